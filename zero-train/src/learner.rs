//! Burn's `Learner` on several ranks: a training strategy for `SupervisedTraining`.
//!
//! * Input: on every rank, the same `SupervisedTraining` and `Learner` over `Autodiff<Zero<B>>`, built in the body of
//!   [`launch`](zero_burn::launch::launch), with the full data set. [`ZeroStrategy::attach`] sets the training's strategy.
//! * Output: the trained model on every rank. Rank 0 renders, logs, and decides on checkpoints and early stopping, from
//!   metrics over the outputs of all ranks ([`AcrossRanks`]).
//! * Every rank trains on its own part of each data set. An iteration is one batch on each rank: a batch size of 8 on 4
//!   ranks is a global batch of 32. The learning rate scheduler steps once per iteration.
//! * Threads: only the rank's thread accesses tensors. Burn's event thread receives full outputs, never shards.
//!
//! ```no_run
//! # use burn::{module::AutodiffModule, optim::{Optimizer, lr_scheduler::LrScheduler}, record::CompactRecorder};
//! # use burn::train::{Learner, LearningComponentsMarker, InferenceStep, SupervisedTraining, TrainStep};
//! # use zero_burn::module::ZeroAutodiff;
//! # use zero_train::learner::{AcrossRanks, ZeroStrategy};
//! # fn train<A: ZeroAutodiff, L: LrScheduler + 'static, M, O: Optimizer<M, A> + 'static>(
//! #     training: SupervisedTraining<LearningComponentsMarker<A, L, M, O>>,
//! #     learner: Learner<LearningComponentsMarker<A, L, M, O>>,
//! #     device: A::Device,
//! # ) where
//! #     LearningComponentsMarker<A, L, M, O>: Send,
//! #     M: TrainStep<Output: AcrossRanks> + AutodiffModule<A> + core::fmt::Display + 'static,
//! #     M::InnerModule: InferenceStep<Output: AcrossRanks>,
//! # {
//! // In the body of a launch, where `device` is this rank's.
//! let training = ZeroStrategy::new(&device)
//!     .with_clipping(1.0)
//!     .with_checkpoints("out/checkpoint", CompactRecorder::new())
//!     .attach(training);
//! let result = training.launch(learner);
//! # }
//! ```

mod across;
mod checkpoints;
mod silent;

use std::any::TypeId;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, Progress};
use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::record::FileRecorder;
use burn::tensor::backend::Backend;
use burn::tensor::{Device, Tensor};
use burn::train::checkpoint::CheckpointingStrategy;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearningComponentsTypes,
    SupervisedLearningStrategy, SupervisedTraining, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingBackend, TrainingComponents, TrainingItem, TrainingModel, TrainingStrategy, ValidLoader,
};
use zero_burn::gathered::parameters;
use zero_burn::module::{ZeroAutodiff, collect_grads, grad_norm, mark, prepare, scale_grads};
use zero_burn::optim::Fused;
use zero_core::config::Float;

pub use self::across::{AcrossRanks, Ranks};
use self::checkpoints::Checkpoints;
pub use self::silent::SilentRenderer;
use crate::engine::{EngineError, clip_factor};

/// A strategy that trains a Burn `Learner` data-parallel over the ranks of a launch, sharded by the launch's stage.
///
/// It calls `prepare` on the learner's model. Gradients are averaged over the ranks with every batch; Burn's
/// `grads_accumulation` sums the averages, so at stages 0 and 1 it saves no communication. Parameters in bf16 need
/// [`Fused`], which keeps fp32 masters of them; fp16 needs a loss scale, which only the [engine](crate::engine::ZeroEngine)
/// has.
pub struct ZeroStrategy<LC: LearningComponentsTypes> {
    device: Device<TrainingBackend<LC>>,
    clipping: Option<f64>,
    checkpoints: Option<Checkpoints<LC>>,
}

impl<LC> ZeroStrategy<LC>
where
    LC: LearningComponentsTypes + 'static,
    LC::Backend: ZeroAutodiff,
    <LC::TrainingModel as TrainStep>::Output: AcrossRanks,
    <LC::InferenceModel as InferenceStep>::Output: AcrossRanks,
{
    /// Creates the strategy of the rank with this device.
    pub fn new(device: &Device<TrainingBackend<LC>>) -> Self {
        Self { device: device.clone(), clipping: None, checkpoints: None }
    }

    /// Scales gradients down so that their L2 norm over all parameters and ranks is at most `norm`. Burn's own clipping,
    /// per parameter, is set on the optimizer.
    #[must_use]
    pub fn with_clipping(mut self, norm: f64) -> Self {
        self.clipping = Some(norm);
        self
    }

    /// Saves model, optimizer and scheduler to `directory` after an epoch, in the files of Burn's `with_file_checkpointer`,
    /// and restores them if `SupervisedTraining::checkpoint` asks for it, also with another number of ranks or at another
    /// stage. Keeps the last two epochs; see [`with_checkpointing_strategy`](Self::with_checkpointing_strategy).
    ///
    /// Memory: the full model and optimizer state, on every rank, while they are saved.
    #[must_use]
    pub fn with_checkpoints<FR>(mut self, directory: impl AsRef<Path>, recorder: FR) -> Self
    where
        FR: FileRecorder<LC::Backend> + 'static,
    {
        self.checkpoints = Some(Checkpoints::new(directory.as_ref(), recorder));
        self
    }

    /// Sets the strategy that decides, on rank 0, when checkpoints are saved and deleted.
    ///
    /// # Panics
    ///
    /// If [`with_checkpoints`](Self::with_checkpoints) was not called before.
    #[must_use]
    pub fn with_checkpointing_strategy(self, strategy: impl CheckpointingStrategy + 'static) -> Self {
        match &self.checkpoints {
            Some(checkpoints) => checkpoints.set_strategy(Box::new(strategy)),
            None => panic!("with_checkpointing_strategy has no effect without with_checkpoints: call that first"),
        }
        self
    }

    /// Makes this the strategy of `training`, and silences all ranks but rank 0. Set a renderer and loggers before.
    pub fn attach(self, training: SupervisedTraining<LC>) -> SupervisedTraining<LC> {
        let rank = self.device.rank();
        let training = training.with_training_strategy(TrainingStrategy::Custom(Arc::new(self)));
        match rank {
            0 => training,
            _ => training.renderer(SilentRenderer).with_application_logger(None),
        }
    }

    fn ranks(&self) -> Ranks {
        Ranks::new::<LC::Backend>(self.device.rank())
    }

    /// Stops the rank if 16-bit parameters need a loss scale or fp32 masters that the learner lacks.
    fn check_precision(&self, ranks: &Ranks) {
        let settings = zero_burn::ranks::config::<<LC::Backend as ZeroAutodiff>::Base>();
        if settings.param_dtype == Float::F16 {
            ranks.stop(
                "fp16 loses small gradients without a loss scale, which Burn's Learner does not support: use bf16, or \
                 zero_train::engine::ZeroEngine",
            );
        }
        let keeps_masters = TypeId::of::<LC::Optimizer>() == TypeId::of::<Fused<LC::Backend>>();
        if settings.param_dtype != Float::F32 && !keeps_masters {
            let optimizer = std::any::type_name::<LC::Optimizer>();
            ranks.stop(EngineError::NoMasters { optimizer }.to_string());
        }
    }

    /// Shards the learner's model.
    fn shard(&self, learner: &mut Learner<LC>, ranks: &Ranks) {
        let prepared = prepare::<LC::Backend, _>(learner.model(), &self.device);
        let wanted = parameters::<LC::Backend, _>(&prepared);
        replace_model(learner, prepared);
        // Burn copies whether a parameter is trained from the model it replaces, where a parameter that was transposed
        // after its initialization counts as the result of an operation.
        let got = parameters::<LC::Backend, _>(&learner.model());
        if let Some((lost, _)) = wanted.iter().zip(&got).find(|(wanted, got)| wanted.trained != got.trained) {
            ranks.stop(format!(
                "the learner would not train {}: call zero_burn::module::prepare on the model before Learner::new",
                lost.path
            ));
        }
    }

    fn train_epoch(&self, epoch: &mut Epoch<'_, LC>, loader: &TrainLoader<LC>, accumulation: Option<usize>) -> Ended {
        let ranks = epoch.ranks;
        let mut accumulator = GradientsAccumulator::new();
        let mut accumulated = 0;
        let ended = epoch.each_batch(loader, |epoch, batch, progress, iteration| {
            epoch.learner.lr_step();
            // Every backward pass forgets the marks, and of a step's parameters not all optimizers set them anew.
            mark::<LC::Backend, _>(&epoch.learner.model());
            let (grads, output) = match batch {
                Some(batch) => {
                    let output = epoch.learner.train_step(batch);
                    (output.grads, Some(output.item))
                }
                // Others have a batch left. This rank adds nothing to the sum.
                None => (GradientsParams::new(), None),
            };
            let model = epoch.learner.model();
            let grads = collect_grads::<LC::Backend, _>(grads, &model);
            let due = match accumulation {
                None => Some(grads),
                Some(count) => {
                    accumulator.accumulate(&model, grads);
                    accumulated += 1;
                    (accumulated >= count).then(|| {
                        accumulated = 0;
                        accumulator.grads()
                    })
                }
            };
            if let Some(grads) = due {
                let grads = self.clip(grads, &model);
                // One handle of the old parameters less while they are updated.
                drop(model);
                epoch.learner.optimizer_step(grads);
            }
            let output = AcrossRanks::across_ranks(output, &ranks);
            if ranks.rank() == 0 {
                let lr = Some(epoch.learner.lr_current());
                let item = TrainingItem::new(output, progress, epoch.progress.clone(), Some(iteration), lr);
                epoch.processor.process_train(LearnerEvent::ProcessedItem(item));
            }
        });
        // The last update's parameters count as such.
        mark::<LC::Backend, _>(&epoch.learner.model());
        if ranks.rank() == 0 {
            epoch.processor.process_train(LearnerEvent::EndEpoch(epoch.progress.items_processed));
        }
        ended
    }

    fn clip(&self, grads: GradientsParams, model: &TrainingModel<LC>) -> GradientsParams {
        let Some(most) = self.clipping else { return grads };
        let norm = grad_norm::<LC::Backend, _>(&grads, model);
        let factor = clip_factor(most, norm);
        if factor < 1.0 { scale_grads::<LC::Backend, _>(grads, model, factor as f32) } else { grads }
    }

    fn validate(&self, epoch: &mut Epoch<'_, LC>, loader: &ValidLoader<LC>) -> Ended {
        let ranks = epoch.ranks;
        let model = epoch.learner.model().valid();
        let ended = epoch.each_batch(loader, |epoch, batch, progress, iteration| {
            let output = AcrossRanks::across_ranks(batch.map(|batch| model.step(batch)), &ranks);
            if ranks.rank() == 0 {
                let item = TrainingItem::new(output, progress, epoch.progress.clone(), Some(iteration), None);
                epoch.processor.process_valid(LearnerEvent::ProcessedItem(item));
            }
        });
        if ranks.rank() == 0 {
            epoch.processor.process_valid(LearnerEvent::EndEpoch(epoch.progress.items_processed));
        }
        ended
    }
}

impl<LC> SupervisedLearningStrategy<LC> for ZeroStrategy<LC>
where
    LC: LearningComponentsTypes + 'static,
    LC::Backend: ZeroAutodiff,
    <LC::TrainingModel as TrainStep>::Output: AcrossRanks,
    <LC::InferenceModel as InferenceStep>::Output: AcrossRanks,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let ranks = self.ranks();
        if components.checkpointer.is_some() {
            ranks.stop(
                "with_file_checkpointer saves from its own thread, which sees only one rank's shards: use \
                 ZeroStrategy::with_checkpoints",
            );
        }
        self.check_precision(&ranks);
        self.shard(&mut learner, &ranks);
        if let Some(epoch) = components.checkpoint {
            match &self.checkpoints {
                Some(checkpoints) => checkpoints.restore(&mut learner, epoch, &self.device, &ranks),
                None => ranks.stop(format!("cannot resume from epoch {epoch}: add ZeroStrategy::with_checkpoints")),
            }
            // What has been loaded are new parameters, under the identities of the files.
            self.shard(&mut learner, &ranks);
        }
        let train = part_of_rank(&train, &self.device, &ranks);
        let valid = part_of_rank(&valid, &self.device, &ranks);

        let mut processor = components.event_processor;
        let mut early_stopping = components.early_stopping;
        for number in starting_epoch..=components.num_epochs {
            let mut epoch = Epoch {
                learner: &mut learner,
                processor: &mut processor,
                interrupter: &components.interrupter,
                progress: Progress::new(number, components.num_epochs),
                ranks,
            };
            if self.train_epoch(&mut epoch, &train, components.grad_accumulation) == Ended::Interrupted {
                break;
            }
            // Interrupted while it validates, Burn's strategies still save this epoch.
            let ended = self.validate(&mut epoch, &valid);
            if ranks.rank() == 0 {
                wait_for_events::<LC>(&mut processor);
            }
            if let Some(checkpoints) = &self.checkpoints {
                checkpoints.after_epoch(&learner, number, &components.event_store, &ranks);
            }
            let stop = early_stopping
                .as_mut()
                .is_some_and(|strategy| ranks.decide(|| strategy.should_stop(number, &components.event_store)));
            if stop || ended == Ended::Interrupted {
                break;
            }
        }
        (learner.model(), processor)
    }
}

/// The state of an epoch.
struct Epoch<'a, LC: LearningComponentsTypes> {
    learner: &'a mut Learner<LC>,
    processor: &'a mut SupervisedTrainingEventProcessor<LC>,
    interrupter: &'a Interrupter,
    /// Number of the epoch, and of all epochs.
    progress: Progress,
    ranks: Ranks,
}

/// The reason that a loop over batches ended, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// No rank has data left.
    Data,
    /// An interrupter has been set on some rank.
    Interrupted,
}

impl<LC: LearningComponentsTypes> Epoch<'_, LC> {
    /// Calls `step` in each iteration, on which the ranks agree first. Its arguments are this rank's batch, `None` if only
    /// others have one left; the number of items that all ranks have processed; and the iteration's number.
    fn each_batch<B: Backend, O>(
        &mut self,
        loader: &Arc<dyn DataLoader<B, O>>,
        mut step: impl FnMut(&mut Self, Option<O>, Progress, usize),
    ) -> Ended {
        let mut batches = loader.iter();
        let mut iteration = 0;
        loop {
            let (batch, progress) = (batches.next(), batches.progress());
            let mine = [
                f64::from(u8::from(batch.is_some())),
                f64::from(u8::from(self.interrupter.should_stop())),
                progress.items_processed as f64,
                progress.items_total as f64,
            ];
            let all = self.ranks.all_gather(&mine);
            let sum = |i: usize| all.iter().map(|rank| rank[i]).sum::<f64>();
            if sum(1) > 0.0 {
                return Ended::Interrupted;
            }
            if sum(0) == 0.0 {
                return Ended::Data;
            }
            iteration += 1;
            step(self, batch, Progress::new(sum(2) as usize, sum(3) as usize), iteration);
        }
    }
}

/// Returns the rank's part of a data set: contiguous, and at most one item larger than another rank's.
fn part_of_rank<B: Backend, O: 'static>(
    loader: &Arc<dyn DataLoader<B, O>>,
    device: &B::Device,
    ranks: &Ranks,
) -> Arc<dyn DataLoader<B, O>> {
    let (rank, world, items) = (ranks.rank(), ranks.world(), loader.num_items());
    if world == 1 {
        return loader.to_device(device);
    }
    loader.slice(rank * items / world, (rank + 1) * items / world).to_device(device)
}

/// Replaces the learner's model, which Burn allows only through a record.
fn replace_model<LC: LearningComponentsTypes>(learner: &mut Learner<LC>, model: TrainingModel<LC>) {
    /// Detaches parameters, because a record holds no part of a graph.
    struct Untracked;
    impl<B: Backend> ModuleMapper<B> for Untracked {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, tensor.detach().set_require_grad(false), mapper)
        }
    }
    learner.load_model(Module::<LC::Backend>::map(model, &mut Untracked).into_record());
}

/// Waits until the event thread has processed all events, so that the event store covers the full epoch.
///
/// The thread's queue holds one event: once it accepts the second of two more, the events before them are processed. Burn
/// ignores the start of a validation.
fn wait_for_events<LC: LearningComponentsTypes>(processor: &mut SupervisedTrainingEventProcessor<LC>) {
    processor.process_valid(LearnerEvent::Start);
    processor.process_valid(LearnerEvent::Start);
}
