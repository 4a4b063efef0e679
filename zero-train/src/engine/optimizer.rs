//! The interface between the engine and an optimizer.

use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, SimpleOptimizer};
use zero_burn::module::{ZeroAutodiff, scale_grads};
use zero_burn::optim::Fused;

/// An optimizer that a [`ZeroEngine`](super::ZeroEngine) can drive: [`Fused`], or one of Burn's.
pub trait EngineOptimizer<A: ZeroAutodiff, M: AutodiffModule<A>>: Optimizer<M, A> {
    /// Returns the fused optimizer, if this is one. Only fused optimizers keep fp32 masters of 16-bit parameters, have a
    /// momentum that can be changed, and give access to their state, so that it can be saved, loaded and moved shard by
    /// shard.
    fn fused(&self) -> Option<&Fused<A>> {
        None
    }

    /// Returns a mutable reference to the fused optimizer, if this is one.
    fn fused_mut(&mut self) -> Option<&mut Fused<A>> {
        None
    }

    /// Makes a step with every gradient multiplied by `grad_scale`.
    fn step_scaled(&mut self, lr: f64, grad_scale: f32, module: M, grads: GradientsParams) -> M {
        let grads = if grad_scale == 1.0 { grads } else { scale_grads::<A, M>(grads, &module, grad_scale) };
        self.step(lr, module, grads)
    }
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>> EngineOptimizer<A, M> for Fused<A> {
    fn fused(&self) -> Option<&Fused<A>> {
        Some(self)
    }

    fn fused_mut(&mut self) -> Option<&mut Fused<A>> {
        Some(self)
    }

    fn step_scaled(&mut self, lr: f64, grad_scale: f32, module: M, grads: GradientsParams) -> M {
        Fused::step_scaled(self, lr, grad_scale, module, grads)
    }
}

impl<A, M, O> EngineOptimizer<A, M> for OptimizerAdaptor<O, M, A>
where
    A: ZeroAutodiff,
    M: AutodiffModule<A>,
    O: SimpleOptimizer<A::InnerBackend>,
{
}
