//! The training engine, with the `forward`, `backward` and `step` of DeepSpeed.
//!
//! * Input: a module on `Autodiff<Zero<B>>`, an optimizer ([`Fused`](zero_burn::optim::Fused) or Burn's), and an [`EngineConfig`].
//! * The engine makes every call that all ranks must make in the same order (marks, reductions, collection, norms), so that
//!   none can be forgotten. Each rank drives its own engine through the same steps.
//! * Memory: the engine owns the module, the optimizer, and the gradients between `backward` and `step`.
//!
//! ```
//! use burn::{nn::LinearConfig, tensor::Tensor};
//! use zero_burn::{Zero, config::ZeroConfig, launch::launch, optim::{Fused, Rule}};
//! use zero_train::engine::{EngineConfig, EngineError, ZeroEngine};
//! # use burn_flex::Flex;
//! type B = burn::backend::Autodiff<Zero<Flex>>;
//!
//! launch::<Flex, _, EngineError>(2, &ZeroConfig::new(zero_core::Stage::Parameters), &Default::default(), |device| {
//!     let model = LinearConfig::new(4, 4).init::<B>(&device);
//!     let config = EngineConfig { accumulation: 2, clipping: Some(1.0), ..EngineConfig::default() };
//!     let mut engine = ZeroEngine::initialize(model, Fused::new(Rule::adamw()), config, &device)?;
//!     for _ in 0..10 {
//!         let x = Tensor::<B, 2>::ones([8, 4], &device);
//!         let loss = engine.forward(|model| model.forward(x).powf_scalar(2.0).mean());
//!         engine.backward(loss);
//!         engine.step()?;                      // updates at every second call
//!     }
//!     assert_eq!(engine.steps(), 5);
//!     Ok(())
//! })
//! .unwrap();
//! ```

mod average;
mod checkpoint;
mod export;
mod optimizer;
mod state;
mod update;

use std::time::Instant;

use burn::module::AutodiffModule;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::Tensor;
pub use checkpoint::Parts;
pub use optimizer::EngineOptimizer;
use zero_burn::gathered::parameters;
use zero_burn::module::{UnreducedGrads, ZeroAutodiff, collect_grads, mark, prepare};
use zero_burn::shards::{OffloadedStates, held_range, param_shards, reserve_on_disk};
use zero_burn::stats::all_gather;
use zero_core::checkpoint::AsyncSaver;
use zero_core::config::{Float, Tier};

use crate::loss_scale::LossScaler;
pub use crate::step::{EngineConfig, EngineError, Result, Step, Times, Update};
pub(crate) use update::clip_factor;
use update::{Given, Losses, set_momentum};

/// Block size of disks, in bytes: allocations are multiples of it.
const BLOCK: usize = 4096;

/// A rank's action in a micro-batch, see [`ZeroEngine::next_batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextBatch<T> {
    /// Train on it.
    Batch(T),
    /// This rank has no data left but others have: call [`ZeroEngine::skip_batch`] in place of forward and backward.
    Skip,
    /// No rank has data left.
    End,
}

/// A module in training.
// What it was made of, then where it is in its step; all of it is used together in `step`.
pub struct ZeroEngine<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> {
    /// Absent only while an update replaces it.
    model: Option<M>,
    optimizer: O,
    config: EngineConfig,
    device: A::Device,
    /// Reduced gradients of the micro-batches so far.
    accumulator: GradientsAccumulator<M>,
    micro_batches: usize,
    /// A backward pass has consumed the parameters' marks.
    unmarked: bool,
    /// Gradients are reduced once per update: those of earlier micro-batches stay on the rank.
    reduces_once: bool,
    in_no_sync: bool,
    /// Gradients that have not been reduced yet.
    held: UnreducedGrads<A>,
    /// This rank or another has unreduced gradients.
    unreduced: bool,
    /// This rank's losses of the update's micro-batches so far.
    losses: Vec<Tensor<A::InnerBackend, 1>>,
    /// This rank's losses of the last update.
    last_losses: Losses<A::InnerBackend>,
    /// An update that runs on a device, until its result is read.
    given: Option<Given>,
    /// The warning about a non-finite update has been given.
    warned: bool,
    steps: usize,
    skipped: usize,
    times: Times,
    /// Saves that overlap with training; created by the first one.
    saver: Option<AsyncSaver>,
    /// Model state that is temporarily offloaded to a disk.
    parked: Option<OffloadedStates<A::Base>>,
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// Shards a module that was built on this rank's device. Every rank calls it, with the same model.
    ///
    /// # Errors
    ///
    /// [`EngineError::Setting`] and [`EngineError::NoMasters`]; [`EngineError::Disk`] if a disk has no room for the state to be kept there.
    pub fn initialize(model: M, mut optimizer: O, config: EngineConfig, device: &A::Device) -> Result<Self> {
        if config.accumulation == 0 {
            return Err(setting("accumulation", 0, "expected at least 1 micro-batch per update"));
        }
        let settings = zero_burn::ranks::config::<A::Base>();
        let world = zero_burn::ranks::num_processes::<A::Base>();
        if let Some(planned) = config.world.filter(|planned| *planned != world) {
            let expected = format!(
                "expected {world}, the number of running ranks: set Context::world from \
                 zero_burn::launch::launched_ranks, or start {planned} rank(s)"
            );
            return Err(setting("the plan's number of ranks", planned, &expected));
        }
        if settings.param_dtype == Float::F16 && config.loss_scale.is_none() {
            let expected = "fp16 loses small gradients without one: set LossScaler::dynamic, or use bf16";
            return Err(setting("loss_scale", "absent", expected));
        }
        if let Some(clipping) = config.clipping.filter(|clipping| !(*clipping > 0.0 && clipping.is_finite())) {
            return Err(setting("clipping", clipping, "expected a norm above 0, or none for no clipping"));
        }
        if config.error_if_nonfinite && config.loss_scale.is_some() {
            let expected = "a loss scale skips such updates: choose one of the two";
            return Err(setting("error_if_nonfinite", true, expected));
        }
        if let Err(error) = config.schedule.validate()
            && !error.is_warning_in_deepspeed()
        {
            return Err(error.into());
        }
        let momentum = config.schedule.momentum(0);
        match optimizer.fused_mut() {
            Some(fused) => momentum.into_iter().for_each(|momentum| set_momentum(fused, momentum)),
            None if momentum.is_some() => {
                let expected =
                    "this optimizer's momentum cannot be changed: use zero_burn::optim::Fused, or cycle_momentum false";
                return Err(setting("cycle_momentum", true, expected));
            }
            None if settings.ema_decay.is_some() => {
                let expected =
                    "only zero_burn::optim::Fused keeps averages: use that, or keep averages in a module of your own";
                return Err(setting("ema_decay", settings.ema_decay.unwrap_or_default(), expected));
            }
            None if settings.int8_optimizer_states => {
                let expected =
                    "the state of Burn's optimizers has the type of the parameters: use zero_burn::optim::Fused";
                return Err(setting("int8_optimizer_states", true, expected));
            }
            None if settings.bf16_optimizer_states => {
                let expected =
                    "the state of Burn's optimizers has the type of the parameters: use zero_burn::optim::Fused";
                return Err(setting("bf16_optimizer_states", true, expected));
            }
            None if settings.param_dtype != Float::F32 => {
                return Err(EngineError::NoMasters { optimizer: std::any::type_name::<O>() });
            }
            None if settings.gradient_dtype.is_some_and(|dtype| dtype != settings.param_dtype) => {
                let expected = "Burn's optimizers need gradients of the parameters' type: use zero_burn::optim::Fused";
                return Err(setting("gradient_dtype", format!("{:?}", settings.gradient_dtype), expected));
            }
            None => {}
        }
        // Before anything is sharded: ranks that accumulate, clip, scale or schedule differently would drift apart in silence.
        let lines: Vec<String> = format!("{config:#?}").lines().map(String::from).collect();
        if let Some(difference) = zero_burn::ranks::agree::<A::Base>(&lines) {
            return Err(EngineError::Ranks(difference));
        }
        let model = prepare::<A, M>(model, device);
        if let Some(path) = param_shards::<A, M>(&model).1.first() {
            return Err(not_of_floats(path));
        }
        if settings.offload.optimizer == Tier::Disk {
            // Parameters have their place already. All of the rest before the first step: states, masters, gradients.
            let gradient = settings.gradient_dtype.unwrap_or(settings.param_dtype).size();
            let states = optimizer.fused().map_or(0, |fused| fused.rule().states());
            let mut arrays: Vec<usize> = settings.optimizer_arrays(states).collect();
            arrays.extend(settings.stage.shards_gradients().then_some(gradient));
            let trained = parameters::<A, M>(&model).into_iter().filter(|meta| meta.trained);
            let elements = trained.map(|meta| held_range::<A::Base>(meta.shape.iter().product()).len());
            // A disk gives whole blocks.
            let bytes =
                |elements: usize| arrays.iter().map(|size| (elements * size).next_multiple_of(BLOCK)).sum::<usize>();
            reserve_on_disk::<A::Base>(elements.map(bytes).sum::<usize>() as u64)?;
        }
        Ok(Self {
            model: Some(model),
            optimizer,
            reduces_once: !config.sync_each_batch.unwrap_or(settings.stage.shards_gradients()),
            config,
            device: device.clone(),
            accumulator: GradientsAccumulator::new(),
            micro_batches: 0,
            unmarked: false,
            in_no_sync: false,
            held: UnreducedGrads::default(),
            unreduced: false,
            losses: Vec::new(),
            last_losses: Losses::Read(Vec::new()),
            given: None,
            warned: false,
            steps: 0,
            skipped: 0,
            times: Times::default(),
            saver: None,
            parked: None,
        })
    }

    /// Returns the module. Use it for a forward pass only through [`forward`](Self::forward).
    pub fn model(&self) -> &M {
        self.model.as_ref().expect("the module is absent only inside of step")
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// Returns this rank's device.
    pub fn device(&self) -> &A::Device {
        &self.device
    }

    /// Returns the number of updates so far, without skipped ones.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Returns the number of skipped updates so far.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Returns the learning rate of the next update.
    pub fn lr(&self) -> f64 {
        self.config.schedule.lr(self.steps)
    }

    /// Returns the factor that the loss is currently multiplied by.
    pub fn loss_scale(&self) -> f64 {
        self.config.loss_scale.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Returns whether the next backward pass is the last of its update.
    pub fn is_boundary(&self) -> bool {
        self.micro_batches + 1 >= self.config.accumulation
    }

    /// Returns the time spent since the last call.
    pub fn take_times(&mut self) -> Times {
        std::mem::take(&mut self.times)
    }

    /// Runs a forward pass with gradients.
    pub fn forward<R>(&mut self, f: impl FnOnce(&M) -> R) -> R {
        let _span = tracing::trace_span!("forward").entered();
        let begin = Instant::now();
        if std::mem::take(&mut self.unmarked) {
            mark::<A, M>(self.model());
        }
        let result = f(self.model());
        self.times.forward += begin.elapsed();
        result
    }

    /// Runs a forward pass without gradients, at any time, also between micro-batches. Ranks may run different passes,
    /// unless they gather together ([`Gathers::Collective`](zero_burn::config::Gathers::Collective), as with NCCL).
    pub fn evaluate<R>(&self, f: impl FnOnce(&M::InnerModule) -> R) -> R {
        f(&self.model().valid())
    }

    /// Runs the backward pass of a micro-batch's `loss`, a mean over the rank's rows. All ranks call it (or
    /// [`idle`](Self::skip_batch)) equally often; their graphs may differ.
    pub fn backward(&mut self, loss: Tensor<A, 1>) {
        let _span = tracing::trace_span!("backward").entered();
        let begin = Instant::now();
        self.losses.push(loss.clone().inner());
        let factor = self.loss_scale() / self.config.accumulation as f64;
        let loss = if factor == 1.0 { loss } else { loss.mul_scalar(factor) };
        let model = self.model.as_ref().expect("the module is absent only inside of step");
        let waits = self.in_no_sync || (self.reduces_once && !self.is_boundary());
        if waits || self.unreduced {
            self.held.backward(loss, model);
            self.unreduced = true;
        } else {
            let grads = GradientsParams::from_grads(loss.backward(), model);
            self.accumulator.accumulate(model, collect_grads::<A, M>(grads, model));
        }
        if !waits && self.unreduced {
            self.reduce_held();
        }
        self.end_micro_batch(begin);
    }

    /// Replaces forward and backward on a rank that has no data for this micro-batch; it adds nothing to the sum. The
    /// average is over all ranks, as in PyTorch's `join`.
    pub fn skip_batch(&mut self) {
        let begin = Instant::now();
        let waits = self.in_no_sync || (self.reduces_once && !self.is_boundary());
        self.unreduced |= waits;
        if !waits {
            self.reduce_held();
        }
        self.end_micro_batch(begin);
    }

    fn reduce_held(&mut self) {
        let model = self.model.as_ref().expect("the module is absent only inside of step");
        let grads = std::mem::take(&mut self.held).collect(model);
        self.accumulator.accumulate(model, grads);
        self.unreduced = false;
    }

    fn end_micro_batch(&mut self, begin: Instant) {
        self.micro_batches += 1;
        self.unmarked = true;
        self.times.backward += begin.elapsed();
    }

    /// Runs `f` without reducing the gradients of its backward passes, at any stage. Their full gradients are kept until
    /// the first backward pass after it. Accumulation does this itself unless it reduces with each micro-batch
    /// ([`EngineConfig::sync_each_batch`]).
    pub fn no_sync<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        let before = std::mem::replace(&mut self.in_no_sync, true);
        let result = f(self);
        self.in_no_sync = before;
        result
    }

    /// Agrees with the other ranks on the next micro-batch when they may run out of data at different times. `batch` is
    /// this rank's next micro-batch. A collective of 8 bytes.
    pub fn next_batch<T>(&self, batch: Option<T>) -> NextBatch<T> {
        let have = all_gather::<A::Base>(&[f64::from(u8::from(batch.is_some()))]);
        match batch {
            Some(batch) => NextBatch::Batch(batch),
            None if have.iter().any(|rank| rank[0] > 0.0) => NextBatch::Skip,
            None => NextBatch::End,
        }
    }

    /// Ends a micro-batch, and updates the parameters if it was the last of its update. Every rank calls it after every
    /// [`backward`](Self::backward) or [`idle`](Self::skip_batch).
    ///
    /// # Errors
    ///
    /// [`EngineError::Order`] before a backward pass, or while gradients are unreduced; [`EngineError::LossScale`] if a
    /// dynamic loss scale cannot get smaller; [`EngineError::NotFinite`].
    pub fn step(&mut self) -> Result<Step> {
        match self.step_async()? {
            Some(step) => Ok(step),
            None => self.wait_for_update(),
        }
    }

    /// Ends a micro-batch like [`step`](Self::step), but does not wait for the device. If one device makes the entire
    /// update, returns `None` once the update is queued there. [`wait_for_update`](Self::wait_for_update) then returns the result, and must
    /// be called before the next forward pass. In between, a program can do work that would otherwise leave the device
    /// idle, such as writing metrics.
    ///
    /// # Errors
    ///
    /// Same as [`step`](Self::step).
    pub fn step_async(&mut self) -> Result<Option<Step>> {
        if self.has_pending_update() {
            return Err(EngineError::Order(
                "the last update's result has not been read: call wait_for_update after step_async",
            ));
        }
        if self.micro_batches == 0 {
            return Err(EngineError::Order("step was called before backward: call forward and backward first"));
        }
        if self.micro_batches > self.config.accumulation {
            return Err(EngineError::Order(
                "backward was called more often than the update has micro-batches: call step after every backward, or \
                 raise accumulation",
            ));
        }
        if self.micro_batches < self.config.accumulation {
            return Ok(Some(Step::Accumulating { micro_batches: self.micro_batches }));
        }
        self.update()
    }

    /// Updates with the micro-batches so far, fewer than configured (at the end of an epoch). The gradient is that of their
    /// mean. Every rank calls it.
    ///
    /// # Errors
    ///
    /// Same as [`step`](Self::step).
    pub fn step_partial(&mut self) -> Result<Step> {
        if self.micro_batches == 0 {
            return Err(EngineError::Order("step_partial was called before backward: call forward and backward first"));
        }
        if self.unreduced && !self.in_no_sync {
            self.reduce_held();
        }
        match self.update()? {
            Some(step) => Ok(step),
            None => self.wait_for_update(),
        }
    }

    /// Returns the trained module and its optimizer.
    pub fn into_parts(self) -> (M, O) {
        (self.model.expect("the module is absent only inside of step"), self.optimizer)
    }
}

/// Returns the error of a parameter that a checkpoint cannot hold.
fn not_of_floats(path: &str) -> EngineError {
    EngineError::CannotSave(format!(
        "parameter {path:?} is not a float tensor: expected floats, which can be sharded; store it as floats, or write \
         your own training loop and save the model's record with one of Burn's recorders"
    ))
}

fn setting(key: &'static str, got: impl ToString, expected: &str) -> EngineError {
    EngineError::Setting { key, got: got.to_string(), expected: expected.into() }
}
