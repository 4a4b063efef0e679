//! ZeRO in the `Learner` of burn-train: a training strategy whose ranks are threads.
//!
//! * In: the components that `SupervisedTraining` passes to a strategy. Out: the full trained module, and the metrics of all ranks.
//! * Each rank trains on its part of the items, split as by Burn's own `ddp`, and validates a part. A step is one batch per rank.
//! * Memory: burn-train keeps the learner's module, which a strategy can neither change nor remove: one full fp32 copy in addition to the
//!   shards. The optimizer's state and gradients are sharded.
//! * Threads: one per rank. Events go through a lock, as rank 0 reports the beginning and end of an epoch.

use std::sync::Arc;

use burn::data::dataloader::split::split_dataloader;
use burn::module::{LoraAdapter, ModuleVisitor, Param, ParamId, Reparameterizer};
use burn::tensor::{Tensor, TensorData};
use burn_optim::GradientsParams;
use burn_train::checkpoint::CheckpointerError;
use burn_train::train::WorkerFailure;
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents,
    TrainingError, TrainingItem, TrainingStrategy, ValidLoader,
};
use parking_lot::Mutex;
use zero_core::collective::threads::ThreadOptions;
use zero_core::config::ZeroConfig;
use zero_core::{Buffer, ReduceOp};

use crate::clock;
use crate::error::Error;
use crate::grads::Grads;
use crate::optim::{Optimizer, OptimizerConfig};
use crate::ranks::{Ranks, run_threads};
use crate::shard::{NoAdapters, shard_lora};

/// Number of steps in the trial that compares two optimizers: momentum shows from the second step on.
const TRIAL: usize = 3;

/// Number of steps within which the learning rate must rise above 0.
const WARMUP: usize = 10_000;

/// Trains with ZeRO over ranks that are threads, in `SupervisedTraining::with_training_strategy(strategy.into())`.
///
/// The optimizer is configured again here, as a strategy cannot take the learner's. If the two differ, training ends with an error before
/// its first step. The error is in `LearningResult::error`, and the returned module is then the original one.
///
/// `TrainStep::step` runs unchanged, with its `loss.backward()`, and sees no gradients. `TrainStep::optimize` sees shards. Gradients are
/// means over the ranks; a rank whose items have run out contributes zeros. Burn's checkpointers would save shards and are refused.
#[derive(Debug, Clone)]
pub struct ZeroStrategy<O, L = NoAdapters> {
    ranks: usize,
    config: ZeroConfig,
    optimizer: O,
    options: ThreadOptions,
    lora: L,
    /// True if `lora` adapts the model.
    adapts: bool,
}

impl<O> ZeroStrategy<O> {
    /// Creates a strategy for `ranks` threads, with the configuration of the learner's optimizer.
    pub fn new(ranks: usize, config: ZeroConfig, optimizer: O) -> Self {
        Self { ranks, config, optimizer, options: ThreadOptions::default(), lora: NoAdapters, adapts: false }
    }
}

impl<O, L> ZeroStrategy<O, L> {
    /// Trains LoRA adapters as [`shard_lora`](crate::shard_lora) does: pass the model without adapters to the learner. They are merged into
    /// the module that the learner returns.
    pub fn with_lora<N>(self, lora: N) -> ZeroStrategy<O, N>
    where
        N: Reparameterizer<Reparam = LoraAdapter> + Clone + Send + Sync,
    {
        let Self { ranks, config, optimizer, options, .. } = self;
        ZeroStrategy { ranks, config, optimizer, options, lora, adapts: true }
    }

    /// Sets another deadline for ranks that wait for each other. It has to be longer than the difference between two ranks' validation
    /// times.
    pub fn with_options(self, options: ThreadOptions) -> Self {
        Self { options, ..self }
    }
}

impl<M, O, L> From<ZeroStrategy<O, L>> for TrainingStrategy<M>
where
    M: LearnerModel,
    O: OptimizerConfig + Sync + 'static,
    L: Reparameterizer<Reparam = LoraAdapter> + Clone + Send + Sync + 'static,
{
    fn from(strategy: ZeroStrategy<O, L>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

/// State that all ranks share.
struct Training<'a, M: LearnerModel, O, L> {
    strategy: &'a ZeroStrategy<O, L>,
    interrupter: &'a Interrupter,
    events: &'a Mutex<SupervisedTrainingEventProcessor<M>>,
    epochs: core::ops::RangeInclusive<usize>,
    accumulation: usize,
    train_items: usize,
    valid_items: usize,
}

/// The learner and data of one rank.
struct Part<M: LearnerModel> {
    learner: Learner<M>,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
}

impl<M, O, L> SupervisedLearningStrategy<M> for ZeroStrategy<O, L>
where
    M: LearnerModel,
    O: OptimizerConfig + Sync,
    L: Reparameterizer<Reparam = LoraAdapter> + Clone + Send + Sync,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let TrainingComponents { interrupter, event_store, num_epochs, grad_accumulation, .. } = components;
        if components.checkpointer.is_some() {
            interrupter.fail(CheckpointerError::Unknown(
                "ZeroStrategy: the checkpointers of burn-train would save a rank's shards as if they were full parameters: launch \
                 without checkpointers and save the trained model, or train with Zero::backward and save with Zero::save"
                    .into(),
            ));
            return (learner.model(), components.event_processor);
        }
        let known = match self.ranks {
            0 => Err("ZeroStrategy: got 0 ranks; pass at least 1".into()),
            _ => same_optimizer(&learner, &self.optimizer, self.adapts),
        };
        if let Err(error) = known {
            fail(&interrupter, error);
            return (learner.model(), components.event_processor);
        }
        let events = Mutex::new(components.event_processor);
        let training = Training {
            strategy: self,
            interrupter: &interrupter,
            events: &events,
            epochs: starting_epoch..=num_epochs,
            accumulation: grad_accumulation.unwrap_or(1),
            train_items: train.num_items(),
            valid_items: valid.num_items(),
        };
        let device = learner.model().devices()[0].clone();
        let (on, without) = (vec![device.clone(); self.ranks], vec![device.without_autodiff(); self.ranks]);
        // `split_dataloader` would not move it for a single device.
        let (train, valid) = (train.to_device(&on[0]), valid.to_device(&without[0]));
        let parts = split_dataloader(train, &on).into_iter().zip(split_dataloader(valid, &without));
        let parts: Vec<_> =
            parts.map(|(train, valid)| Mutex::new(Some(Part { learner: learner.clone(), train, valid }))).collect();
        // Rank 0 decides for all.
        let early = Mutex::new(components.early_stopping);
        let is_over = |epoch: usize| {
            early.lock().as_mut().is_some_and(|early| {
                interrupter.fail_on_error(events.lock().flush());
                early.should_stop(epoch, &event_store)
            })
        };
        let trained = run_threads(self.ranks, &self.options, |ranks| {
            let part = parts[ranks.comm().rank()].lock().take().expect("a rank is run once");
            training.run(part, ranks, &is_over)
        });
        let model = match trained {
            Ok(models) => models.into_iter().flatten().next(),
            Err(error) => {
                fail(&interrupter, error.to_string());
                None
            }
        };
        (model.unwrap_or_else(|| learner.model()), events.into_inner())
    }
}

impl<M, O, L> Training<'_, M, O, L>
where
    M: LearnerModel,
    O: OptimizerConfig,
    L: Reparameterizer<Reparam = LoraAdapter> + Clone,
{
    /// Returns the full module, on rank 0.
    fn run(&self, part: Part<M>, ranks: &Ranks, is_over: &dyn Fn(usize) -> bool) -> Result<Option<M>, Error> {
        let Part { mut learner, train, valid } = part;
        let (mut model, zero) = shard_lora(learner.model(), ranks, &self.strategy.config, self.strategy.lora.clone())?;
        let mut optimizer = zero.optimizer(&self.strategy.optimizer)?;
        let (comm, is_first) = (ranks.comm(), ranks.comm().rank() == 0);
        // Returns whether any rank sets each flag. Also a barrier.
        let any = |flags: [bool; 2]| -> Result<[bool; 2], Error> {
            let any = comm.all_reduce(Buffer::U8(flags.map(u8::from).into()), ReduceOp::Max)?.into_u8();
            Ok([any[0] > 0, any[1] > 0])
        };
        let tell = |event| self.interrupter.fail_on_error(self.events.lock().process_train(event));
        let tell_valid = |event| self.interrupter.fail_on_error(self.events.lock().process_valid(event));
        for epoch in self.epochs.clone() {
            if is_first {
                tell(LearnerEvent::StartSplit { epoch_number: epoch, total_items: self.train_items });
            }
            let mut items = train.iter();
            let (mut iteration, mut micro) = (0, 0);
            let mut sum: Option<Grads> = None;
            loop {
                let item = items.next().and_then(|item| item.map_err(|error| self.interrupter.fail(error)).ok());
                let [goes_on, stops] = any([item.is_some(), self.interrupter.should_stop()])?;
                if goes_on && !stops {
                    let (output, grads) = zero.pass(|| {
                        let _ordered = clock::forward();
                        item.map(|item| TrainStep::step(&model, item))
                    })?;
                    match &mut sum {
                        Some(sum) => sum.add(grads),
                        None => sum = Some(grads),
                    }
                    micro += 1;
                    if micro == self.accumulation {
                        let grads = sum.take().expect("it has been added to");
                        model = update(&mut learner, &mut optimizer, model, grads)?;
                        micro = 0;
                    }
                    iteration += comm.world();
                    if let Some(output) = output {
                        let mut progress = items.progress();
                        progress.items_processed *= comm.world();
                        progress.items_total *= comm.world();
                        let lr = Some(learner.lr_current());
                        tell(LearnerEvent::ProcessedItem(TrainingItem::new(
                            output.item,
                            progress,
                            Some(iteration),
                            lr,
                        )));
                    }
                    continue;
                }
                if let Some(grads) = sum.take().filter(|_| !stops) {
                    model = update(&mut learner, &mut optimizer, model, grads)?;
                }
                break;
            }
            if is_first {
                tell(LearnerEvent::EndSplit(epoch));
            }
            if any([self.interrupter.should_stop(), false])?[0] {
                break;
            }
            if is_first {
                tell_valid(LearnerEvent::StartSplit { epoch_number: epoch, total_items: self.valid_items });
            }
            any([false; 2])?;
            let evaluated = model.valid();
            let mut items = valid.iter();
            let mut iteration = 0;
            while let Some(item) = items.next() {
                let Ok(item) = item.map_err(|error| self.interrupter.fail(error)) else { break };
                iteration += 1;
                let output = InferenceStep::step(&evaluated, item);
                tell_valid(LearnerEvent::ProcessedItem(TrainingItem::new(
                    output,
                    items.progress(),
                    Some(iteration),
                    None,
                )));
                if self.interrupter.should_stop() {
                    break;
                }
            }
            any([false; 2])?;
            if is_first {
                tell_valid(LearnerEvent::EndSplit(epoch));
                tell(LearnerEvent::EndEpoch(epoch));
            }
            let over = self.interrupter.should_stop() || is_first && is_over(epoch);
            if any([over, false])?[0] {
                break;
            }
        }
        Ok(is_first.then(|| model.valid().materialize().train()))
    }
}

/// Advances the schedule and runs the optimizer.
fn update<M: LearnerModel>(
    learner: &mut Learner<M>,
    optimizer: &mut Optimizer,
    model: M,
    grads: Grads,
) -> Result<M, Error> {
    learner.lr_step();
    let lr = learner.lr_current();
    optimizer.step_by(model, grads, true, |inner, model, grads| model.optimize(inner, lr, grads))
}

fn fail(interrupter: &Interrupter, message: String) {
    // The error that burn-train has for failures of a strategy.
    interrupter.fail(TrainingError::Workers(vec![WorkerFailure { device_id: 0, message }]));
}

/// Checks that the learner's optimizer, which a strategy can run but not inspect, updates the smallest parameter as `named` does.
fn same_optimizer<M: LearnerModel>(
    learner: &Learner<M>,
    named: &impl OptimizerConfig,
    takes_frozen: bool,
) -> Result<(), String> {
    let mut optimizer = named.of_wholes().map_err(|error| error.to_string())?;
    let mut learner = learner.clone();
    let mut smallest = Smallest { found: None, values: Vec::new(), takes_frozen };
    learner.model().visit(&mut smallest);
    let Some((id, size)) = smallest.found else {
        return Err("ZeroStrategy: the module has no parameter to train".into());
    };
    let rises = (0..WARMUP).any(|_| {
        learner.lr_step();
        learner.lr_current().base() > 0.0
    });
    if !rises {
        return Err(format!("ZeroStrategy: the learning rate is 0 for {WARMUP} steps: pass a schedule that rises"));
    }
    let mut model = learner.model();
    for step in 0..TRIAL {
        let gradient = |at: usize| ((at + step * step) as f32 * 0.7).sin() + 0.1;
        let grads = || {
            let mut feed = Feed { id, values: (0..size).map(gradient).collect(), fed: GradientsParams::new() };
            model.visit(&mut feed);
            feed.fed
        };
        let (of_learner, of_named) = (grads(), grads());
        learner.optimizer_step(of_learner);
        model = model.optimize(&mut optimizer, learner.lr_current(), of_named);
    }
    let values = |model: &M| {
        let mut all = Smallest { found: Some((id, size)), values: Vec::new(), takes_frozen };
        model.visit(&mut all);
        all.values
    };
    match values(&model) == values(&learner.model()) {
        true => Ok(()),
        false => Err("ZeroStrategy: its optimizer differs from the learner's (a trial on one parameter gave another result), and only \
                      the strategy's would train: pass the configuration that the learner's was created from"
            .into()),
    }
}

/// Finds the smallest trained parameter, or reads the values of the one that was found.
struct Smallest {
    found: Option<(ParamId, usize)>,
    values: Vec<u32>,
    /// True if a frozen parameter will do.
    takes_frozen: bool,
}

impl ModuleVisitor for Smallest {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match self.found {
            Some((id, _)) if id == param.id => {
                self.values = param.val().into_data().iter::<f32>().map(f32::to_bits).collect();
            }
            Some((_, size)) if size <= param.lazy_shape().num_elements() => {}
            _ if self.takes_frozen || param.is_require_grad() => {
                self.found = Some((param.id, param.lazy_shape().num_elements()))
            }
            _ => {}
        }
    }
}

/// Registers a gradient for one parameter.
struct Feed {
    id: ParamId,
    values: Vec<f32>,
    fed: GradientsParams,
}

impl ModuleVisitor for Feed {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.id == self.id {
            let data = TensorData::new(std::mem::take(&mut self.values), param.lazy_shape());
            let device = param.val().device().without_autodiff();
            self.fed.register(param.id, Tensor::<D>::from_data(data, &device));
        }
    }
}
