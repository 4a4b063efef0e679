//! Clipped updates of what is on one device, which the host has made without knowing the gradients' norm: it reads that with other
//! numbers of the step, once the device has been given all of it.

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate};
use burn::tensor::Tensor;
#[cfg(feature = "cubecl")]
use burn::tensor::TensorPrimitive;
use burn_backend::Backend;
use zero_ops::Clip;

use super::fused::Fused;
use crate::autodiff::ZeroAutodiff;

/// What is yet to be read of a step.
#[cfg_attr(not(feature = "cubecl"), allow(dead_code))] // Without a device there is none.
pub struct Late<B: Backend> {
    /// As the device makes them, with the number of elements that are not finite.
    sums: B::FloatTensorPrimitive,
    /// What gradients were multiplied by, if that is not 1: NaN where nothing was updated.
    factor: Option<B::FloatTensorPrimitive>,
}

/// What was read of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// The L2 norm over all gradients, as they came.
    pub norm: f64,
    /// Whether the update has been made.
    pub is_made: bool,
    /// The numbers that were read with it.
    pub others: Vec<f64>,
}

impl<A: ZeroAutodiff> Fused<A> {
    /// As [`step_scaled`](Fused::step_scaled) with the factor that `clip` makes of the gradients' norm, where that can be left to their
    /// device: one rank, all of whose parameters and state are on it, and rules without a trust ratio. The host waits for nothing. A
    /// step that [`Clip::skips`] has left out must be [told](Fused::told) before the next.
    ///
    /// # Errors
    ///
    /// The arguments, untouched, elsewhere.
    #[allow(clippy::result_large_err, clippy::type_complexity)] // The arguments given back.
    pub fn step_clipped<M: AutodiffModule<A>>(
        &mut self,
        lr: LearningRate,
        clip: Clip,
        module: M,
        grads: GradientsParams,
    ) -> Result<(M, Late<A::Base>), (M, GradientsParams)> {
        #[cfg(feature = "cubecl")]
        if let Some(sums) = self.has_one_pass().then(|| crate::grads::sums_on_device::<A, M>(&grads, &module)).flatten()
        {
            let is_plain = clip == Clip { most: None, loss_scale: 1.0, skips: false };
            let factor = (!is_plain).then(|| zero_ops::clip_factor::<A::Base>(sums.clone(), clip));
            let module = self.step_by(lr, 1.0, factor.clone(), module, grads);
            return Ok((module, Late { sums, factor }));
        }
        let _ = (lr, clip);
        Err((module, grads))
    }

    /// Reads what the last step came to, together with `others`, in one wait.
    pub fn told(&mut self, late: Late<A::Base>, others: Vec<Tensor<A::InnerBackend, 1>>) -> Told {
        #[cfg(feature = "cubecl")]
        {
            let Late { sums, factor } = late;
            let has_factor = factor.is_some();
            let others = others.into_iter().map(|tensor| match tensor.into_primitive() {
                TensorPrimitive::Float(tensor) => tensor.load(),
                TensorPrimitive::QFloat(_) => unreachable!("a tensor of floats"),
            });
            let all = [sums].into_iter().chain(factor).chain(others).collect();
            let mut read = crate::values::read_many::<A::Base>(all).into_iter();
            let sums = crate::update::norms::of_device(&read.next().expect("the sums come first"));
            let factor = if has_factor { read.next() } else { None };
            let is_made = factor.is_none_or(|factor| factor.iter::<f32>().all(|factor| !factor.is_nan()));
            if !is_made {
                self.take_back();
            }
            let others = read.flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect();
            Told { norm: sums.into_iter().sum::<f64>().sqrt(), is_made, others }
        }
        #[cfg(not(feature = "cubecl"))]
        unreachable!("{} numbers beside a step of a device, of which there is none", (late, others).1.len())
    }
}
