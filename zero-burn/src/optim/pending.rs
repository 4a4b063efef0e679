//! Clipped updates on one device, which computes the gradients' factor itself. The host reads the norm and other numbers of the step in one
//! wait, while the device still has the update to compute.

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate};
use burn::tensor::Tensor;
#[cfg(feature = "cubecl")]
use burn::tensor::TensorPrimitive;
use zero_ops::Clip;

use super::fused::Fused;
use crate::autodiff::ZeroAutodiff;
#[cfg(feature = "cubecl")]
use crate::context::Context;
#[cfg(feature = "cubecl")]
use crate::engine::Data;

/// A step that has been submitted to a device, with its numbers on their way to the host. [`Fused::wait_for_step`] waits for them.
pub struct PendingStep {
    #[cfg(feature = "cubecl")]
    read: zero_ops::Read,
    /// True if a factor was computed; the factor is NaN if nothing was updated.
    #[cfg(feature = "cubecl")]
    has_factor: bool,
    /// Uninhabited: there are no such steps without a device.
    #[cfg(not(feature = "cubecl"))]
    none: std::convert::Infallible,
}

/// The numbers that were read of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// L2 norm over all gradients, before clipping.
    pub norm: f64,
    /// True if the update was made.
    pub is_made: bool,
    /// The numbers that were read with it.
    pub others: Vec<f64>,
}

impl<A: ZeroAutodiff> Fused<A> {
    /// Same as [`step_scaled`](Fused::step_scaled), with the factor that `clip` computes from the gradients' norm on the device. Requires a
    /// single rank, with all parameters and state on the device, and rules without a trust ratio. The host does not wait. Before the next
    /// step, the numbers of this one, including the values of `others`, must be [read](Fused::wait_for_step).
    ///
    /// # Errors
    ///
    /// The unchanged arguments, if the requirements are not met.
    #[allow(clippy::result_large_err, clippy::type_complexity)] // The arguments given back.
    pub fn step_clipped<M: AutodiffModule<A>>(
        &mut self,
        lr: LearningRate,
        clip: Clip,
        module: M,
        grads: GradientsParams,
        others: &[Tensor<A::InnerBackend, 1>],
    ) -> Result<(M, PendingStep), (M, GradientsParams)> {
        #[cfg(feature = "cubecl")]
        if let Some(sums) = self.has_one_pass().then(|| crate::grads::sums_on_device::<A, M>(&grads, &module)).flatten()
        {
            let is_plain = clip == Clip { most: None, loss_scale: 1.0, skips: false };
            let factor = (!is_plain).then(|| zero_ops::clip_factor::<A::Base>(sums.clone(), clip));
            let others = others.iter().map(|tensor| match tensor.clone().into_primitive() {
                TensorPrimitive::Float(tensor) => tensor.load(),
                TensorPrimitive::QFloat(_) => unreachable!("a tensor of floats"),
            });
            let has_factor = factor.is_some();
            let all = [sums].into_iter().chain(factor.clone()).chain(others).collect();
            // Read before the update, which the device still has to compute when the numbers arrive.
            let read = zero_ops::begin_read::<A::Base>(all);
            let module = self.step_by(lr, 1.0, factor, module, grads);
            zero_ops::send::<A::Base>(&Context::<A::Base>::current().rank.device);
            return Ok((module, PendingStep { read, has_factor }));
        }
        let _ = (lr, clip, others);
        Err((module, grads))
    }

    /// Waits for the numbers of a step, and returns them.
    pub fn wait_for_step(&mut self, late: PendingStep) -> StepResult {
        #[cfg(feature = "cubecl")]
        {
            let PendingStep { read, has_factor } = late;
            let mut read = read.wait().into_iter();
            let sums = zero_engine::update::norms::of_device(&Data(read.next().expect("the sums come first")));
            let factor = if has_factor { read.next() } else { None };
            let is_made = factor.is_none_or(|factor| factor.iter::<f32>().all(|factor| !factor.is_nan()));
            if !is_made {
                self.take_back();
            }
            let others = read.flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect();
            StepResult { norm: sums.into_iter().sum::<f64>().sqrt(), is_made, others }
        }
        #[cfg(not(feature = "cubecl"))]
        match late.none {}
    }
}
