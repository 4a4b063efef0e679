//! What is done with reduced gradients: norms, factors, replacement.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, BackendTypes, TensorData, TensorMetadata};
use burn_std::DType;
use zero_core::{Partition, ReduceOp};

use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::elementwise::own_piece;
use crate::gathered::{ParamMeta, parameters};
use crate::optim::pass::elements_of;
use crate::shard::{Cell, Kind};
use crate::tensor::{Shard, ZeroTensor};
use crate::tier::Stored;
use crate::trouble::stop;
use crate::values::read;

/// Puts `values`, whole and flat and the same on every rank, in the place of a parameter's reduced gradient; `false` if
/// there is none of that size.
pub fn set_gradient<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: &mut GradientsParams,
    module: &M,
    id: ParamId,
    values: &[f32],
) -> bool {
    struct Set<'a> {
        grads: &'a mut GradientsParams,
        id: ParamId,
        values: &'a [f32],
        done: bool,
    }
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Set<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            if param.id != self.id {
                return;
            }
            let Some(gradient) = self.grads.get::<A::InnerBackend, D>(param.id) else { return };
            let TensorPrimitive::Float(ZeroTensor::Shard(Shard { cell, .. })) = gradient.into_primitive() else {
                return;
            };
            if cell.partition.numel() != self.values.len() {
                return;
            }
            let range = cell.partition.range(cell.place());
            let piece = if range.is_empty() { vec![0.0] } else { self.values[range].to_vec() };
            let len = piece.len();
            let data = TensorData::new(piece, [len]).convert_dtype(cell.dtype);
            let origin = Cell::derivation("set_gradient", &[&cell]);
            let piece = A::Base::float_from_data(data, &cell.device);
            let cell = Cell::ready(cell.template(Kind::Gradient, origin), piece);
            let primitive = TensorPrimitive::Float(ZeroTensor::Shard(Shard::new(cell)));
            self.grads.remove::<A::InnerBackend, D>(param.id);
            self.grads.register::<A::InnerBackend, D>(param.id, Tensor::from_primitive(primitive));
            self.done = true;
        }
    }
    fn visit<A: ZeroAutodiff, M: Module<A>>(module: &M, set: &mut impl ModuleVisitor<A>) {
        module.visit(set);
    }
    let mut set = Set { grads, id, values, done: false };
    visit::<A, M>(module, &mut set);
    set.done
}

/// Every gradient of the module multiplied by `factor`, where it lies.
pub fn scale_grads<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: GradientsParams,
    module: &M,
    factor: f32,
) -> GradientsParams {
    struct Scale {
        grads: GradientsParams,
        factor: f32,
        /// A parameter may be in the module more than once, tied.
        done: HashSet<ParamId>,
    }
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            if self.done.insert(param.id)
                && let Some(gradient) = self.grads.remove::<A::InnerBackend, D>(param.id)
            {
                self.grads.register::<A::InnerBackend, D>(param.id, gradient.mul_scalar(self.factor));
            }
        }
    }
    fn visit<A: ZeroAutodiff, M: Module<A>>(module: &M, scale: &mut impl ModuleVisitor<A>) {
        module.visit(scale);
    }
    let mut scale = Scale { grads, factor, done: HashSet::new() };
    visit::<A, M>(module, &mut scale);
    scale.grads
}

fn sum_of_squares<B: Backend>(x: B::FloatTensorPrimitive) -> f64 {
    // One pass over memory where the elements are at hand, three otherwise.
    if let Some(sum) = zero_ops::sum_of_squares::<B>(&x) {
        return sum;
    }
    // In fp32: squares of what fits into 16 bit do not.
    let x = if x.dtype().size() < 4 { B::float_cast(x, DType::F32.into()) } else { x };
    let sum = B::float_sum(B::float_mul(x.clone(), x));
    read::<B>(sum).iter::<f64>().next().expect("a full reduction gives one number")
}

/// The same of elements in the host's memory.
fn sum_of_squares_on_host(data: &TensorData, range: std::ops::Range<usize>) -> f64 {
    match data.dtype {
        DType::F32 | DType::F16 | DType::BF16 => elements_of(data).slice(range).sum_of_squares(),
        _ => data.iter::<f64>().skip(range.start).take(range.len()).map(|x| x * x).sum(),
    }
}

/// The same of several tensors, read from their device at once where CubeCL computes.
fn sums_of_squares<B: Backend>(tensors: Vec<B::FloatTensorPrimitive>) -> Vec<f64> {
    #[cfg(feature = "cubecl")]
    if let Some(sums) = zero_ops::sums_of_squares::<B>(&tensors) {
        let mut sums: Vec<f64> = read::<B>(sums).iter::<f64>().collect();
        // The last is the number of elements that are not finite: sums may not tell, where arithmetic is fast and loose.
        if sums.pop().is_some_and(|odd| odd > 0.0) {
            sums.iter_mut().for_each(|sum| *sum = f64::NAN);
        }
        return sums;
    }
    tensors.into_iter().map(sum_of_squares::<B>).collect()
}

/// The L2 norm over all gradients of the module, the same on every rank and at every stage. Every rank must call it, on
/// gradients from [`collect_grads`](crate::module::collect_grads).
pub fn grad_norm<A: ZeroAutodiff, M: AutodiffModule<A>>(grads: &GradientsParams, module: &M) -> f64 {
    struct Squares<'a, A: ZeroAutodiff> {
        grads: &'a GradientsParams,
        context: Arc<Context<A::Base>>,
        /// Per parameter one sum of squares for each rank's piece, zero where another rank computes it.
        pieces: Vec<f64>,
        /// Pieces on a device, and their places in `pieces`.
        on_device: Vec<(usize, <A::Base as BackendTypes>::FloatTensorPrimitive)>,
        /// A parameter may be in the module more than once, tied.
        done: HashSet<ParamId>,
    }
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Squares<'_, A> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let Some(gradient) = self.grads.get::<A::InnerBackend, D>(param.id) else { return };
            if !self.done.insert(param.id) {
                return;
            }
            let TensorPrimitive::Float(ZeroTensor::Shard(shard)) = gradient.into_primitive() else {
                stop(format!("gradient of parameter {} is not reduced: pass gradients through collect_grads", param.id))
            };
            let base = self.pieces.len();
            self.pieces.resize(base + self.context.world, 0.0);
            if let Some(data) = shard.cell.stored().as_ref().and_then(Stored::host) {
                let range = Partition::new(shard.cell.partition.numel(), self.context.world).range(self.context.rank);
                let own = if shard.cell.partition.is_whole() { range } else { 0..range.len() };
                self.pieces[base + self.context.rank] = sum_of_squares_on_host(data, own);
                return;
            }
            let Some(piece) = own_piece(&shard.cell) else { return };
            match zero_ops::is_host::<A::Base>() {
                true => self.pieces[base + self.context.rank] = sum_of_squares::<A::Base>(piece),
                false => self.on_device.push((base + self.context.rank, piece)),
            }
        }
    }
    let context = Context::<A::Base>::current();
    let (pieces, on_device, done) = (Vec::new(), Vec::new(), HashSet::new());
    let mut squares = Squares::<A> { grads, context: context.clone(), pieces, on_device, done };
    module.visit(&mut squares);
    let Squares { mut pieces, on_device, .. } = squares;
    let (places, tensors): (Vec<usize>, Vec<_>) = on_device.into_iter().unzip();
    for (place, sum) in places.into_iter().zip(sums_of_squares::<A::Base>(tensors)) {
        pieces[place] = sum;
    }
    // Adding zeros changes no bit. At stage 0 too each rank squares its part only: gradients are the same on all.
    pieces = context.reduce_scalars(pieces, ReduceOp::Sum);
    pieces.iter().sum::<f64>().sqrt()
}

/// The first parameter, in the order of the module's fields, whose gradient holds an infinity or a NaN; the same on every
/// rank. Every rank must call it, on gradients from [`collect_grads`](crate::module::collect_grads). It reads all of them.
pub fn first_nonfinite<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: &GradientsParams,
    module: &M,
) -> Option<ParamMeta> {
    struct Odd<'a>(&'a GradientsParams, Vec<f64>);
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Odd<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let is_odd = match self.0.get::<A::InnerBackend, D>(param.id).map(Tensor::into_primitive) {
                Some(TensorPrimitive::Float(ZeroTensor::Shard(shard))) => {
                    shard.cell.data().iter::<f32>().any(|x| !x.is_finite())
                }
                _ => false,
            };
            self.1.push(f64::from(u8::from(is_odd)));
        }
    }
    fn visit<A: ZeroAutodiff, M: Module<A>>(module: &M, odd: &mut impl ModuleVisitor<A>) {
        module.visit(odd);
    }
    let mut odd = Odd(grads, Vec::new());
    visit::<A, M>(module, &mut odd);
    let odd = Context::<A::Base>::current().reduce_scalars(odd.1, ReduceOp::Max);
    let first = odd.into_iter().position(|odd| odd > 0.0)?;
    parameters::<A, M>(module).into_iter().nth(first)
}
