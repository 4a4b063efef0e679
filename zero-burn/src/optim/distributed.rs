//! Burn's optimizers on several ranks, with an unchanged training loop.

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};

use crate::autodiff::ZeroAutodiff;
use crate::module::{collect_grads, prepare};

/// An optimizer that completes a rank's gradients ([`collect_grads`]) before each step. Created by [`distributed`].
#[derive(Debug, Clone)]
pub struct Distributed<O>(O);

/// Prepares `model` for training ([`prepare`]) and wraps `optimizer`, Burn's or [`Fused`](super::Fused), for its ranks. The loop of a plain
/// Burn program then trains on them. Every rank calls it, and `step` after every backward pass.
///
/// ```
/// use burn::{backend::Autodiff, nn::LinearConfig, tensor::Tensor};
/// use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
/// use burn_flex::Flex;
/// use zero_burn::{Zero, config::ZeroConfig, launch::launch_auto, optim::distributed};
/// use zero_core::Stage;
///
/// type B = Autodiff<Zero<Flex>>;
///
/// launch_auto::<Flex, _, String>(2, &ZeroConfig::new(Stage::Parameters), &Default::default(), |device| {
///     let model = LinearConfig::new(8, 8).init::<B>(&device);
///     let (mut model, mut optimizer) = distributed::<B, _, _>(model, AdamWConfig::new().init(), &device);
///     for _ in 0..3 {
///         let loss = model.forward(Tensor::<B, 2>::ones([4, 8], &device)).powf_scalar(2.0).mean();
///         let grads = GradientsParams::from_grads(loss.backward(), &model);
///         model = optimizer.step(1e-3, model, grads);
///     }
///     Ok(())
/// })
/// .unwrap();
/// ```
///
/// # Panics
///
/// Same as [`prepare`].
pub fn distributed<A, M, O>(model: M, optimizer: O, device: &A::Device) -> (M, Distributed<O>)
where
    A: ZeroAutodiff,
    M: AutodiffModule<A>,
    O: Optimizer<M, A>,
{
    (prepare::<A, M>(model, device), Distributed(optimizer))
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: Optimizer<M, A>> Optimizer<M, A> for Distributed<O> {
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        let grads = collect_grads::<A, M>(grads, &module);
        self.0.step(lr, module, grads)
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, mut grads: MultiGradientsParams) -> M {
        for (grads, _) in &mut grads.grads {
            *grads = collect_grads::<A, M>(std::mem::take(grads), &module);
        }
        self.0.step_multi(lr, module, grads)
    }

    fn to_record(&self) -> Self::Record {
        self.0.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self(self.0.load_record(record))
    }
}
