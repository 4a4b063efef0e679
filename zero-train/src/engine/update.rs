//! The end of an update: the gradients' norm, what is made of it, and the optimizer's step.
//!
//! Where the optimizer can leave the norm to the device that has everything ([`Fused::step_clipped`]), the host reads it after the
//! step, in one wait with the losses. Elsewhere it knows the norm before.

use std::time::Instant;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use zero_burn::module::{ZeroAutodiff, first_nonfinite, grad_norm, mark, reset_error_feedback};
use zero_burn::optim::{Clip, Fused, Told};
use zero_burn::stats::all_gather;
use zero_core::Axes;

use super::optimizer::EngineOptimizer;
use super::{EngineError, Result, Step, Update, ZeroEngine};
use crate::schedule::ONE_CYCLE_BETA2;
use crate::step::told_not_finite;

/// Losses of micro-batches, on their way to the host.
pub(super) enum Losses<B: Backend> {
    Unread(Vec<Tensor<B, 1>>),
    Read(Vec<f64>),
}

/// What an update is made of: the module, its gradients, and the losses of its micro-batches.
type Given<A, M> = (M, GradientsParams, Vec<Tensor<<A as AutodiffBackend>::InnerBackend, 1>>);

/// What an update came to.
struct Made<M> {
    model: M,
    norm: f64,
    /// Whether the parameters are others now.
    is_made: bool,
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// This rank's losses of the last update's micro-batches, in order. On a device that makes whole updates they have been read with
    /// the gradients' norm; elsewhere this reads them.
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

    pub(super) fn update(&mut self) -> Result<Step> {
        if self.unreduced {
            return Err(EngineError::Order(
                "the update's last backward pass was inside of no_sync, so that its gradients are not reduced: leave \
                 no_sync before the last micro-batch",
            ));
        }
        let _span = tracing::trace_span!("update").entered();
        let begin = Instant::now();
        self.micro_batches = 0;
        let grads = self.accumulator.grads();
        let loss_scale = self.loss_scale();
        let model = self.model.take().expect("the module is absent only inside of step");
        let lr = self.lr();
        if let (Some(momentum), Some(fused)) = (self.config.schedule.momentum(self.steps), self.optimizer.fused_mut()) {
            set_momentum(fused, momentum);
        }
        let losses = std::mem::take(&mut self.losses);
        let made = self.leave_to_device(lr, (model, grads, losses));
        let Made { model, norm: grad_norm, is_made } = made.or_else(|given| self.update_knowing(lr, given))?;
        if is_made {
            // Counts the new versions as parameters.
            mark::<A, M>(&model);
            self.unmarked = false;
            self.steps += 1;
        }
        self.model = Some(model);
        self.times.step += begin.elapsed();
        // The same on every rank: the norm is.
        if let Some(scaler) = &mut self.config.loss_scale {
            scaler.update(!is_made)?;
        }
        // What quantised gradients have lost is of gradients that were not used, or on another scale than the next.
        if !is_made || self.loss_scale() != loss_scale {
            reset_error_feedback::<A::Base>();
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

    /// Whether an update of gradients that are not finite is left out.
    fn skips(&self) -> bool {
        self.config.loss_scale.is_some() || self.config.skip_overflow
    }

    /// An update whose norm is read after it, with the losses; or the arguments.
    fn leave_to_device(&mut self, lr: f64, (model, grads, losses): Given<A, M>) -> Result<Made<M>, Given<A, M>> {
        let (loss_scale, skips) = (self.loss_scale(), self.skips());
        let clip = Clip { most: self.config.clipping, loss_scale, skips };
        // Which gradient is not finite can be told as long as there is one.
        let fused = if self.config.error_if_nonfinite { None } else { self.optimizer.fused_mut() };
        let Some(fused) = fused else { return Err((model, grads, losses)) };
        match fused.step_clipped(lr, clip, model, grads) {
            Ok((model, late)) => {
                let Told { norm, is_made, others } = fused.told(late, losses);
                self.last_losses = Losses::Read(others);
                if !is_made {
                    // New versions all the same, of the old values.
                    mark::<A, M>(&model);
                    self.unmarked = false;
                }
                Ok(Made { model, norm: norm / loss_scale, is_made })
            }
            Err((model, grads)) => Err((model, grads, losses)),
        }
    }

    /// An update whose norm is known before it.
    fn update_knowing(&mut self, lr: f64, (model, grads, losses): Given<A, M>) -> Result<Made<M>> {
        let loss_scale = self.loss_scale();
        let norm = grad_norm::<A, M>(&grads, &model) / loss_scale;
        let overflow = !norm.is_finite();
        if overflow && self.config.error_if_nonfinite {
            let parameter = first_nonfinite::<A, M>(&grads, &model).map(|meta| meta.path);
            self.model = Some(model);
            return Err(self.not_finite(parameter, losses));
        }
        self.last_losses = Losses::Unread(losses);
        if overflow && self.skips() {
            return Ok(Made { model, norm, is_made: false });
        }
        let clip_factor = self.config.clipping.map_or(1.0, |most| clip_factor(most, norm));
        let model = self.optimizer.step_scaled(lr, (clip_factor / loss_scale) as f32, model, grads);
        Ok(Made { model, norm, is_made: true })
    }

    /// Says that parameters are not finite from here on.
    fn warn_once(&mut self, grad_norm: f64) {
        if grad_norm.is_finite() || self.warned {
            return;
        }
        self.warned = true;
        if zero_burn::ranks::is_main_process::<A::Base>() {
            eprintln!("warning: {}", told_not_finite(self.steps));
        }
    }

    /// What is wrong with an update that is not finite. A gradient is known when it has been reduced, and then is that of all
    /// ranks; but the losses are those of each.
    fn not_finite(&self, parameter: Option<String>, losses: Vec<Tensor<A::InnerBackend, 1>>) -> EngineError {
        let is_odd = |loss: Tensor<A::InnerBackend, 1>| loss.into_data().iter::<f32>().any(|x| !x.is_finite());
        let odd = losses.into_iter().any(is_odd);
        let ranks = all_gather::<A::Base>(&[f64::from(u8::from(odd))]);
        let members = zero_burn::ranks::group::<A::Base>(Axes::DATA);
        let rank = ranks.iter().position(|odd| odd[0] > 0.0).map(|at| members.members()[at]);
        EngineError::NotFinite { step: self.steps + 1, rank, parameter }
    }
}

/// What gradients of `norm` are multiplied by so that it is at most `most`, as PyTorch's `clip_grad_norm_` computes it.
pub(crate) fn clip_factor(most: f64, norm: f64) -> f64 {
    (most / (norm + 1e-6)).min(1.0)
}

pub(super) fn set_momentum<A: ZeroAutodiff>(fused: &mut Fused<A>, momentum: f64) {
    fused.set_momentum(momentum as f32, ONE_CYCLE_BETA2 as f32);
}
