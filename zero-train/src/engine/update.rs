//! The end of an update: gradient norm, clipping, overflow check, and the optimizer's step.
//!
//! If the optimizer can leave the norm to the device that makes the update ([`Fused::step_clipped`]), the host reads norm
//! and losses in one wait while the device makes the update. Otherwise the host knows the norm before the update.

use std::time::Instant;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use zero_burn::module::{ZeroAutodiff, first_nonfinite, grad_norm, mark};
use zero_burn::optim::{Clip, Fused, PendingStep, StepResult};
use zero_burn::stats::all_gather;
use zero_core::Axes;

use super::optimizer::EngineOptimizer;
use super::{EngineError, Result, Step, Update, ZeroEngine};
use crate::schedule::ONE_CYCLE_BETA2;
use crate::step::nonfinite_warning;

/// Losses of micro-batches, on the device or read by the host.
pub(super) enum Losses<B: Backend> {
    Unread(Vec<Tensor<B, 1>>),
    Read(Vec<f64>),
}

/// The inputs of an update: the module, its gradients, and the losses of its micro-batches.
type Parts<A, M> = (M, GradientsParams, Vec<Tensor<<A as AutodiffBackend>::InnerBackend, 1>>);

/// The learning rate and loss scale of an update.
#[derive(Clone, Copy)]
struct Begun {
    lr: f64,
    loss_scale: f64,
    /// Divisor of the reduced gradients: the loss scale times the fraction of the configured micro-batches, over the number
    /// of ranks if the engine sums gradients.
    divisor: f64,
}

/// An update that runs on a device, with its norm and losses still to be read.
pub(super) struct Given {
    begun: Begun,
    late: PendingStep,
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// Returns this rank's losses of the last update's micro-batches, in order. On a device that makes entire updates they
    /// have been read with the gradient norm; otherwise this reads them.
    pub fn losses(&mut self) -> &[f64] {
        if let Losses::Unread(losses) = &mut self.last_losses {
            let values = std::mem::take(losses).into_iter().map(|loss| loss.into_data().iter::<f64>().sum()).collect();
            self.last_losses = Losses::Read(values);
        }
        match &self.last_losses {
            Losses::Read(values) => values,
            Losses::Unread(_) => unreachable!("they have just been read"),
        }
    }

    /// Makes the update. Returns `None` if it was left to a device.
    pub(super) fn update(&mut self) -> Result<Option<Step>> {
        if self.unreduced {
            return Err(EngineError::Order(
                "the update's last backward pass ran inside no_sync, so its gradients are not reduced: leave \
                 no_sync before the last micro-batch",
            ));
        }
        let _span = tracing::trace_span!("update").entered();
        let begin = Instant::now();
        // Each micro-batch's loss was divided by the number that an update has by the configuration.
        let part = std::mem::take(&mut self.micro_batches) as f64 / self.config.accumulation as f64;
        let grads = self.accumulator.grads();
        let model = self.model.take().expect("the module is absent only inside of step");
        let loss_scale = self.loss_scale();
        let ranks = if self.config.sums_gradients { zero_burn::ranks::num_processes::<A::Base>() } else { 1 };
        let begun = Begun { lr: self.lr(), loss_scale, divisor: loss_scale * part / ranks as f64 };
        if let (Some(momentum), Some(fused)) = (self.config.schedule.momentum(self.steps), self.optimizer.fused_mut()) {
            set_momentum(fused, momentum);
        }
        let losses = std::mem::take(&mut self.losses);
        let step = match self.leave_to_device(begun, (model, grads, losses)) {
            Ok(()) => None,
            Err(parts) => Some(self.update_knowing(begun, parts)?),
        };
        self.times.step += begin.elapsed();
        Ok(step)
    }

    /// Returns `true` while the result of an update that [`step_async`](Self::step_async) left to a device has not been read.
    pub fn has_pending_update(&self) -> bool {
        self.given.is_some()
    }

    /// Waits for the result of an update that [`step_async`](Self::step_async) left to a device, but not for the update
    /// itself. Afterwards, [`losses`](Self::losses) returns its losses.
    ///
    /// # Errors
    ///
    /// [`EngineError::Order`] if there is none; [`EngineError::LossScale`] as in [`step`](Self::step).
    pub fn wait_for_update(&mut self) -> Result<Step> {
        let Some(Given { begun, late }) = self.given.take() else {
            return Err(EngineError::Order(
                "wait_for_update was called, but step_async left no update pending on a device",
            ));
        };
        let begin = Instant::now();
        let fused = self.optimizer.fused_mut().expect("a fused optimizer has left it to the device");
        let StepResult { norm, is_made, others } = fused.wait_for_step(late);
        self.last_losses = Losses::Read(others);
        let step = self.ended(begun, norm / begun.divisor, is_made);
        self.times.step += begin.elapsed();
        step
    }

    /// Installs the updated module and marks its parameters for the next passes.
    fn replace(&mut self, model: M) {
        // Counts the new versions as parameters.
        mark::<A, M>(&model);
        self.unmarked = false;
        self.model = Some(model);
    }

    /// Finishes an update once its norm is known.
    fn ended(&mut self, Begun { lr, loss_scale, .. }: Begun, grad_norm: f64, is_made: bool) -> Result<Step> {
        self.steps += usize::from(is_made);
        // The same on every rank: the norm is.
        if let Some(scaler) = &mut self.config.loss_scale {
            scaler.update(!is_made)?;
        }
        if !is_made {
            self.skipped += 1;
            let next_loss_scale = self.loss_scale();
            return Ok(Step::Skipped { loss_scale, next_loss_scale, skipped: self.skipped });
        }
        self.warn_once(grad_norm);
        let clip_factor = self.config.clipping.map_or(1.0, |most| clip_factor(most, grad_norm));
        Ok(Step::Updated(Update { step: self.steps, lr, grad_norm, clip_factor, loss_scale }))
    }

    /// Returns whether updates with non-finite gradients are skipped.
    fn skips(&self) -> bool {
        self.config.loss_scale.is_some() || self.config.skip_overflow
    }

    /// Leaves an update and its norm to a device, or returns the inputs if it cannot.
    fn leave_to_device(&mut self, begun: Begun, (model, grads, losses): Parts<A, M>) -> Result<(), Parts<A, M>> {
        let clip = Clip { most: self.config.clipping, loss_scale: begun.divisor, skips: self.skips() };
        // Which gradient is not finite can be told as long as there is one.
        let fused = if self.config.error_if_nonfinite { None } else { self.optimizer.fused_mut() };
        let Some(fused) = fused else { return Err((model, grads, losses)) };
        match fused.step_clipped(begun.lr, clip, model, grads, &losses) {
            Ok((model, late)) => {
                // Where it is left out there are new versions all the same, of the old values.
                self.replace(model);
                self.given = Some(Given { begun, late });
                Ok(())
            }
            Err((model, grads)) => Err((model, grads, losses)),
        }
    }

    /// Makes an update after computing its norm.
    fn update_knowing(&mut self, begun: Begun, (model, grads, losses): Parts<A, M>) -> Result<Step> {
        let norm = grad_norm::<A, M>(&grads, &model) / begun.divisor;
        let overflow = !norm.is_finite();
        if overflow && self.config.error_if_nonfinite {
            let parameter = first_nonfinite::<A, M>(&grads, &model).map(|meta| meta.path);
            self.model = Some(model);
            return Err(self.not_finite(parameter, losses));
        }
        self.last_losses = Losses::Unread(losses);
        if overflow && self.skips() {
            self.model = Some(model);
            return self.ended(begun, norm, false);
        }
        let clip_factor = self.config.clipping.map_or(1.0, |most| clip_factor(most, norm));
        let scale = (clip_factor / begun.divisor) as f32;
        let model = self.optimizer.step_scaled(begun.lr, scale, model, grads);
        self.replace(model);
        self.ended(begun, norm, true)
    }

    /// Warns when parameters become non-finite, once.
    fn warn_once(&mut self, grad_norm: f64) {
        if grad_norm.is_finite() || self.warned {
            return;
        }
        self.warned = true;
        if zero_burn::ranks::is_main_process::<A::Base>() {
            eprintln!("warning: {}", nonfinite_warning(self.steps));
        }
    }

    /// Returns the error of a non-finite update. A reduced gradient is the same on all ranks; losses differ between ranks.
    fn not_finite(&self, parameter: Option<String>, losses: Vec<Tensor<A::InnerBackend, 1>>) -> EngineError {
        let is_odd = |loss: Tensor<A::InnerBackend, 1>| loss.into_data().iter::<f32>().any(|x| !x.is_finite());
        let odd = losses.into_iter().any(is_odd);
        let ranks = all_gather::<A::Base>(&[f64::from(u8::from(odd))]);
        let members = zero_burn::ranks::group::<A::Base>(Axes::DATA);
        let rank = ranks.iter().position(|odd| odd[0] > 0.0).map(|at| members.members()[at]);
        EngineError::NotFinite { step: self.steps + 1, rank, parameter }
    }
}

/// Returns the factor that clips gradients of `norm` to a norm of at most `most`, computed like PyTorch's `clip_grad_norm_`.
pub(crate) fn clip_factor(most: f64, norm: f64) -> f64 {
    (most / (norm + 1e-6)).min(1.0)
}

pub(super) fn set_momentum<A: ZeroAutodiff>(fused: &mut Fused<A>, momentum: f64) {
    fused.set_momentum(momentum as f32, ONE_CYCLE_BETA2 as f32);
}
