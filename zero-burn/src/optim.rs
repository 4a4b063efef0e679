//! A fused AdamW: one pass over memory, on this rank's pieces.
//!
//! Burn's AdamW makes a dozen passes, each with a buffer of its own. This one reads parameter, gradient and moments once
//! and writes parameter and moments in place: 28 bytes a parameter. It rounds as Burn's does, operation by operation, so
//! that over a backend that computes in IEEE arithmetic both give the same bits, and its record is Burn's, so that either
//! can resume the other.
//!
//! * Memory: host memory; a backend whose tensors live elsewhere copies them in and out.
//! * Threads: the rank's pool of compute threads.
//!
//! *Decoupled Weight Decay Regularization*, Loshchilov and Hutter 2019, <https://arxiv.org/abs/1711.05101>.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamWState, AdaptiveMomentumState, LearningRate, SimpleOptimizer};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::{Backend, TensorData};
use burn_std::{DType, Shape};
use rayon::prelude::*;

use crate::backend::Zero;
use crate::context::stop;
use crate::device::ZeroDevice;
use crate::gather::read;
use crate::module::ZeroAutodiff;
use crate::shard::{Cell, Kind, Origin};
use crate::tensor::{Shard, ZeroTensor};

/// Settings of the fused AdamW, with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients. Default 0.9.
    pub beta_1: f32,
    /// Decay of the mean of squared gradients. Default 0.999.
    pub beta_2: f32,
    /// Added to the square root of the second moment. Default 1e-8.
    pub epsilon: f32,
    /// Decoupled weight decay. Default 0.01.
    pub weight_decay: f32,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }
    }
}

impl AdamWConfig {
    /// The optimizer, for a module on `Autodiff<Zero<B>>`.
    pub fn init<A: ZeroAutodiff, M: AutodiffModule<A>>(&self) -> OptimizerAdaptor<AdamW<A::Base>, M, A> {
        OptimizerAdaptor::from(AdamW { config: *self, _backend: PhantomData })
    }
}

/// The fused AdamW; made by [`AdamWConfig::init`].
#[derive(Debug)]
pub struct AdamW<B> {
    config: AdamWConfig,
    _backend: PhantomData<fn() -> B>,
}

impl<B> Clone for AdamW<B> {
    fn clone(&self) -> Self {
        Self { config: self.config, _backend: PhantomData }
    }
}

/// The numbers of one step, rounded as Burn rounds them.
#[derive(Debug, Clone, Copy)]
struct Coefficients {
    beta_1: f32,
    factor_1: f32,
    beta_2: f32,
    factor_2: f32,
    correction_1: f32,
    correction_2: f32,
    epsilon: f32,
    keep: f32,
    lr: f32,
}

impl Coefficients {
    fn new(config: &AdamWConfig, lr: f64, time: usize) -> Self {
        let AdamWConfig { beta_1, beta_2, epsilon, weight_decay } = *config;
        Self {
            beta_1,
            factor_1: 1.0 - beta_1,
            beta_2,
            factor_2: 1.0 - beta_2,
            correction_1: 1.0 - beta_1.powi(time as i32),
            correction_2: 1.0 - beta_2.powi(time as i32),
            epsilon,
            keep: (1.0 - lr * f64::from(weight_decay)) as f32,
            lr: lr as f32,
        }
    }

    /// One pass over equally long slices. `fresh` moments are not read.
    #[inline(always)]
    fn apply(self, parameter: &mut [f32], gradient: &[f32], m: &mut [f32], v: &mut [f32], fresh: bool) {
        let moments = m.iter_mut().zip(v.iter_mut());
        for ((p, g), (m, v)) in parameter.iter_mut().zip(gradient).zip(moments) {
            let square = *g * *g;
            if fresh {
                *m = *g * self.factor_1;
                *v = square * self.factor_2;
            } else {
                *m = *m * self.beta_1 + *g * self.factor_1;
                *v = *v * self.beta_2 + square * self.factor_2;
            }
            let delta = (*m / self.correction_1) / ((*v / self.correction_2).sqrt() + self.epsilon);
            *p = *p * self.keep - delta * self.lr;
        }
    }
}

/// Elements that a thread takes at a time: four arrays of it fit a core's second-level cache.
const CHUNK: usize = 1 << 15;

impl<B: Backend> SimpleOptimizer<Zero<B>> for AdamW<B> {
    type State<const D: usize> = AdamWState<Zero<B>, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<Zero<B>, D>,
        grad: Tensor<Zero<B>, D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<Zero<B>, D>, Option<Self::State<D>>) {
        let (parameter, gradient) = (shard(tensor, "parameter"), shard(grad, "gradient"));
        parameter.cell.context.before_update();
        let (context, parent) = (parameter.cell.context.clone(), gradient.cell.clone());
        let (partition, shape, device) = (parent.partition, parent.shape.clone(), parent.device.clone());
        let dtype = parameter.cell.dtype;
        let updated = parameter.cell.template(Kind::Optimizer, Origin::Version);
        let names = ["adamw_moment_1", "adamw_moment_2"].map(|name| Cell::derivation(name, &[&parent]));
        drop(parent);

        let time = state.as_ref().map_or(0, |state| state.momentum.time) + 1;
        let fresh = state.is_none();
        let mut p = host::<B>(parameter.into_piece());
        let g = host::<B>(gradient.into_piece());
        let zeros = || TensorData::new(vec![0f32; g.num_elements()], g.shape.clone());
        let [mut m, mut v] = match state {
            Some(state) => [state.momentum.moment_1, state.momentum.moment_2]
                .map(|moment| host::<B>(shard(moment, "optimizer state").into_piece())),
            None => [zeros(), zeros()],
        };

        let coefficients = Coefficients::new(&self.config, lr, time);
        {
            let expect = "converted to f32";
            let g = g.as_slice::<f32>().expect(expect);
            let p = p.as_mut_slice::<f32>().expect(expect);
            let (m, v) = (m.as_mut_slice::<f32>().expect(expect), v.as_mut_slice::<f32>().expect(expect));
            let chunks = p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK));
            chunks.zip(m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK))).for_each(|((p, g), (m, v))| {
                pulp::Arch::new().dispatch(|| coefficients.apply(p, g, m, v, fresh));
            });
        }

        let piece = |data: TensorData, dtype: DType| B::float_from_data(data.convert_dtype(dtype), &device);
        let [moment_1, moment_2] = [m, v]
            .into_iter()
            .zip(names)
            .map(|(data, origin)| {
                let template = crate::shard::Template {
                    context: Arc::clone(&context),
                    slot: updated.slot.clone(),
                    partition,
                    shape: shape.clone(),
                    device: device.clone(),
                    kind: Kind::Optimizer,
                    origin,
                };
                tensor_of::<B, D>(Cell::ready(template, piece(data, DType::F32)))
            })
            .collect::<Vec<_>>()
            .try_into()
            .expect("two moments");
        let tensor = tensor_of::<B, D>(Cell::ready(updated, piece(p, dtype)));
        (tensor, Some(AdamWState::new(AdaptiveMomentumState::new(time, moment_1, moment_2))))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &ZeroDevice<B::Device>) -> Self::State<D> {
        AdamWState::new(state.momentum.to_device(device))
    }
}

fn shard<B: Backend, const D: usize>(tensor: Tensor<Zero<B>, D>, what: &str) -> Shard<B> {
    match tensor.into_primitive() {
        TensorPrimitive::Float(ZeroTensor::Shard(shard)) if shard.views.only_maps() => shard,
        _ => stop(format!(
            "the fused AdamW got a {what} that is an ordinary tensor: call zero_burn::module::prepare on the model, \
             zero_burn::module::collect_grads on its gradients, and load optimizer records inside zero_burn::load_state"
        )),
    }
}

fn tensor_of<B: Backend, const D: usize>(cell: Arc<Cell<B>>) -> Tensor<Zero<B>, D> {
    Tensor::from_primitive(TensorPrimitive::Float(ZeroTensor::Shard(Shard::new(cell))))
}

/// A piece in host memory, in place if this is its only handle, as f32.
fn host<B: Backend>(piece: B::FloatTensorPrimitive) -> TensorData {
    let mut data = read::<B>(piece).convert_dtype(DType::F32);
    data.shape = Shape::new([data.num_elements()]);
    data
}
