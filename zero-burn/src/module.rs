//! What a training program calls on its module: [`prepare`] once, [`mark`] before a further forward pass, and
//! [`collect_grads`] on every set of gradients.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorPrimitive, backend::AutodiffBackend};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::distributed::DistributedParamId;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, BackendTypes, TensorData, TensorMetadata};
use burn_std::DType;
use zero_core::{CommError, Partition, ReduceOp};

use crate::ZeroDevice;
use crate::backend::{Zero, reduce_in_place};
use crate::birth::{Fill, parameter};
use crate::context::{Context, Slot, raise, stop};
use crate::elementwise::own_piece;
use crate::gather::read;
use crate::optim::pass::elements_of;
use crate::preparation::{buffer, buffers, draw_as_rank_0};
use crate::random::sign;
use crate::reduce::{Outcome, Phase};
use crate::shard::{Cell, Kind, Origin, Template};
use crate::tensor::{Shard, ZeroTensor};
use crate::tier::Stored;

/// An autodiff backend over [`Zero`]: `Autodiff<Zero<B>>`, with any checkpointing strategy.
pub trait ZeroAutodiff:
    AutodiffBackend<InnerBackend = Zero<Self::Base>, Device = ZeroDevice<<Self::Base as BackendTypes>::Device>>
{
    /// The backend that `Zero` decorates.
    type Base: Backend;

    /// Whether autodiff follows what is computed from `tensor`.
    #[doc(hidden)]
    fn is_tracked(tensor: &Self::FloatTensorPrimitive) -> bool;
}

impl<B: Backend, C: CheckpointStrategy> ZeroAutodiff for Autodiff<Zero<B>, C> {
    type Base = B;

    fn is_tracked(tensor: &Self::FloatTensorPrimitive) -> bool {
        tensor.is_tracked()
    }
}

/// Readies a module for training: parameters that are still ordinary tensors become shards (with rank 0's values on all
/// ranks), fp32 parameters are converted to the configuration's `param_dtype`, and every parameter that requires a
/// gradient is marked for reduction. Where ranks were seeded differently, parameters get the first values that rank 0's seed
/// gives; what is drawn afterwards (dropout) is of each rank's own seed.
///
/// State that a layer changes in its forward pass, such as a batch norm's running mean and variance, is no parameter: it
/// begins with rank 0's values and is then an ordinary tensor, each rank's own, as on Burn. Checkpoints hold rank 0's.
///
/// Call it once, on the whole module, on every rank. It also creates parameters that are still lazy, in the order of
/// the module's fields, which numbers them alike on every rank.
///
/// A parameter that is the result of an operation on a trained tensor becomes a leaf of the graph: Burn 0.21 transposes
/// the weight of a linear layer in column layout after it has begun to track it, and without `prepare` never trains it.
///
/// # Panics
///
/// With the launcher's error when ranks differ in their modules.
pub fn prepare<A: ZeroAutodiff, M: Module<A>>(module: M, device: &A::Device) -> M {
    struct Prepare<'a, A: ZeroAutodiff> {
        context: Arc<Context<A::Base>>,
        device: &'a A::Device,
        /// State of layers.
        buffers: &'a HashSet<ParamId>,
        /// Seeds and births of parameters that were drawn.
        drawn: Vec<(u64, u64)>,
        /// Parameters so far.
        places: u64,
        /// Of their numbers, shapes and types.
        signature: u64,
    }

    impl<A: ZeroAutodiff> ModuleMapper<A> for Prepare<'_, A> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
            let wanted = self.context.config.param_dtype.dtype();
            if !A::Base::supports_dtype(self.device.inner(), wanted) {
                let backend = A::Base::name(self.device.inner());
                stop(format!(
                    "backend {backend} cannot compute in {wanted:?}: use another param_dtype, or another backend"
                ));
            }
            let (id, tensor, mapper) = param.consume();
            let tracked =
                matches!(tensor.clone().into_primitive(), TensorPrimitive::Float(tensor) if A::is_tracked(&tensor));
            let requires_grad = tensor.is_require_grad();
            // Not a leaf of the graph, so that it would get no gradient: made one below.
            let is_result = tracked && !requires_grad;
            let TensorPrimitive::Float(primitive) = tensor.clone().inner().into_primitive() else {
                return Param::from_mapped_value(id, tensor, mapper);
            };
            if self.buffers.contains(&id) {
                return Param::from_mapped_value(id, buffer(&self.context, primitive, self.device), mapper);
            }
            let (tensor, cell) = match primitive {
                ZeroTensor::Shard(shard)
                    if shard.is_parameter()
                        && shard.views.is_empty()
                        && !is_result
                        && (shard.cell.dtype != DType::F32 || wanted == DType::F32) =>
                {
                    (tensor, shard.cell.clone())
                }
                other => {
                    let shard = match other {
                        ZeroTensor::Shard(shard) if shard.is_parameter() && shard.views.is_empty() && !is_result => {
                            shard
                        }
                        other => share(&self.context, other, self.device),
                    };
                    let shard = if shard.cell.dtype == DType::F32 && wanted != DType::F32 {
                        converted(&self.context, &shard.cell, wanted)
                    } else {
                        shard
                    };
                    let cell = shard.cell.clone();
                    let tensor =
                        Tensor::<A::InnerBackend, D>::from_primitive(TensorPrimitive::Float(ZeroTensor::Shard(shard)));
                    (Tensor::from_inner(tensor).set_require_grad(tracked), cell)
                }
            };
            let slot = cell.slot.clone().expect("a parameter's cell has a slot");
            self.drawn.extend(cell.drawn().map(|drawn| (drawn.seed, drawn.birth)));
            self.places += 1;
            slot.place.store(self.places, Ordering::Relaxed);
            let dims = slot.shape.iter().map(|&dim| dim as u64);
            self.signature = sign(
                &[&[self.signature, slot.index, slot.dtype.size() as u64][..], &dims.collect::<Vec<_>>()].concat(),
            );
            self.context.name_slot(DistributedParamId::from(id.val()), slot);
            let tensor = if tracked { tensor.set_distributed(DistributedParamId::from(id.val())) } else { tensor };
            Param::from_mapped_value(id, tensor, mapper)
        }
    }

    let context = Context::current();
    let (known, dropped) = context.dropped_slots();
    let buffers = buffers::<A, M>(&module);
    let (drawn, places, signature) = (Vec::new(), 0, 0);
    let mut mapper = Prepare::<A> { context: context.clone(), device, buffers: &buffers, drawn, places, signature };
    let module = module.map(&mut mapper);
    let (places, drawn) = (mapper.places, mapper.drawn);
    let signature = sign(&[mapper.signature, drawn.len() as u64]);
    let seeds = drawn.iter().fold(0, |seeds, &(seed, birth)| sign(&[seeds, seed, birth]));
    let all = context.gather_bytes([&sign(&[signature, seeds]).to_le_bytes()[..], &dropped].concat());
    let all: Vec<(&[u8], &[u8])> = all.chunks_exact(8 + dropped.len()).map(|rank| rank.split_at(8)).collect();
    let is_alike = all.iter().all(|(rank, _)| *rank == all[0].0);
    let signatures = if is_alike { Vec::new() } else { context.gather_bytes(signature.to_le_bytes().to_vec()) };
    if let Some(other) = signatures.chunks_exact(8).position(|rank| rank != signature.to_le_bytes()) {
        raise(CommError::Mismatch {
            group: "parameters".into(),
            seq: 0,
            rank: context.rank,
            op: format!("prepare on a module of {places} parameters"),
            other_rank: other,
            other_op: "prepare on a module whose parameters have other shapes or were created in another order (build \
                       the same model on every rank, and touch none of its parameters before)"
                .into(),
        });
    }
    let module = if is_alike { module } else { draw_as_rank_0::<A, M>(&context, module, &drawn) };
    let gone = known.iter().enumerate().filter(|&(place, _)| all.iter().all(|(_, dropped)| dropped[place] == 1));
    gone.for_each(|(_, &index)| context.forget_slot(index));
    // All ranks are here and none has read anything: what initialisers left over is not needed.
    context.drop_retired();
    // A rank may use a parameter alone later.
    context.gather_awaited();
    context.end_awaited();
    module
}

/// A dense tensor as a parameter, with rank 0's values.
fn share<B: Backend>(context: &Context<B>, tensor: ZeroTensor<B>, device: &crate::ZeroDevice<B::Device>) -> Shard<B> {
    let data = from_rank_0(context, tensor);
    let (shape, dtype) = (data.shape.clone(), data.dtype);
    match parameter(Fill::Data(data), shape, device.inner(), dtype) {
        ZeroTensor::Shard(shard) => shard,
        _ => unreachable!("a parameter is always a shard"),
    }
}

/// Rank 0's values of a tensor that each rank has.
pub(crate) fn from_rank_0<B: Backend>(context: &Context<B>, tensor: ZeroTensor<B>) -> TensorData {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    let bytes = context.broadcast_bytes(read::<B>(tensor.load()).as_bytes().to_vec());
    TensorData::from_bytes_vec(bytes, shape, dtype)
}

/// A newborn parameter in another type: another parameter as far as the ranks are concerned.
fn converted<B: Backend>(context: &Arc<Context<B>>, cell: &Cell<B>, dtype: DType) -> Shard<B> {
    let template = Template {
        slot: cell.slot.as_ref().map(|slot| context.replace_slot(slot, dtype)),
        ..cell.template(Kind::Parameter, Origin::Version)
    };
    let whole = cell.settled().whole.as_ref().map(zero_ops::Shared::tensor);
    let cast = |tensor| B::float_cast(tensor, dtype.into());
    Shard::new(match whole {
        // Where parameters are not sharded.
        Some(whole) => Cell::whole(template, cast(whole)),
        None => Cell::ready(template, cast(cell.local())),
    })
}

/// Marks the module's parameters for the next backward pass, and counts updated ones as parameters.
///
/// Burn's autodiff forgets a mark in the backward pass that used it; Burn's optimizers set it anew. So a loop of
/// forward, backward and step needs no call. Call it before each further forward pass of the same step (accumulation,
/// gradient penalties): gradients without a mark are reduced all the same, by [`collect_grads`], but only at the end.
pub fn mark<A: ZeroAutodiff, M: Module<A>>(module: &M) {
    struct Mark;
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Mark {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let tensor = param.val();
            if let Some(shard) = shard_of(&tensor) {
                shard.cell.adopt();
            }
            if tensor.is_require_grad() {
                // The mark is kept by the graph under the tensor's identity, not by the returned handle.
                drop(tensor.set_distributed(DistributedParamId::from(param.id.val())));
            }
        }
    }
    module.visit(&mut Mark);
}

fn shard_of<A: ZeroAutodiff, const D: usize>(tensor: &Tensor<A, D>) -> Option<Shard<A::Base>> {
    match tensor.clone().inner().into_primitive() {
        TensorPrimitive::Float(ZeroTensor::Shard(shard)) => Some(shard),
        _ => None,
    }
}

/// Completes a set of gradients: what the backward pass has not reduced is reduced now, and parameters that got a
/// gradient on other ranks only get it here too. Every rank must call it after every backward pass.
///
/// After it, all ranks hold gradients for the same parameters, each as a shard, averaged over the ranks; Burn's
/// optimizers, accumulators and clipping can be used on them. For several optimizers with parameters of their own, see
/// [`collect_grads_of`].
///
/// # Panics
///
/// With the launcher's error when a collective fails.
pub fn collect_grads<A: ZeroAutodiff, M: AutodiffModule<A>>(grads: GradientsParams, module: &M) -> GradientsParams {
    collect::<A, M>(grads, module, None, Vec::new())
}

/// As [`collect_grads`], for the gradients of some of the module's parameters (`GradientsParams::from_params`): those of
/// the others are left for their own call. Every rank must call it with the same parameters.
pub fn collect_grads_of<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: GradientsParams,
    module: &M,
    parameters: &[ParamId],
) -> GradientsParams {
    collect::<A, M>(grads, module, Some(parameters), Vec::new())
}

fn collect<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: GradientsParams,
    module: &M,
    parameters: Option<&[ParamId]>,
    held: Vec<Leftover<A::Base>>,
) -> GradientsParams {
    let context = Context::<A::Base>::current();
    crate::replicas::check::<A, M>(&context, module);
    // Every rank is here before the next update, whether it had a backward pass or not.
    context.join_fence();
    let mut leftovers = Leftovers::<A> { grads, context: context.clone(), found: Vec::new() };
    module.visit(&mut leftovers);
    let Leftovers { grads, mut found, .. } = leftovers;
    found.extend(held);
    loop {
        if let Some(reducer) = &context.reducer {
            let indices = found.iter().map(|(slot, _)| slot.index).collect();
            reducer.begin(context.clone(), Phase::Collect, indices);
        }
        let mut reduced = Vec::new();
        for (slot, dense) in std::mem::take(&mut found) {
            let mut gradient = ZeroTensor::Dense(dense);
            reduce_in_place(&context, &slot, &mut gradient);
            if let ZeroTensor::Shard(shard) = gradient {
                reduced.push((slot.index, shard.cell));
            }
        }
        let outcome = match &context.reducer {
            Some(reducer) => reducer.end().unwrap_or_else(|error| raise(error)),
            None => Outcome { settled: Vec::new(), in_backward: false },
        };
        context.add_settled(reduced);
        context.add_settled(outcome.settled);
        if !outcome.in_backward {
            break;
        }
    }
    let mut supply = Supply::<A> { grads, context, parameters };
    module.visit(&mut supply);
    supply.grads
}

/// Whole gradients that have not been reduced: sums over micro-batches, in fp32, of this rank alone.
///
/// What DeepSpeed and PyTorch call `no_sync`: several backward passes cost one reduction, at the price of a whole set of
/// fp32 gradients on every rank.
pub struct HeldGrads<A: ZeroAutodiff> {
    context: Arc<Context<A::Base>>,
    /// By the parameter's number.
    sums: BTreeMap<u64, Leftover<A::Base>>,
}

impl<A: ZeroAutodiff> Default for HeldGrads<A> {
    fn default() -> Self {
        Self { context: Context::current(), sums: BTreeMap::new() }
    }
}

impl<A: ZeroAutodiff> HeldGrads<A> {
    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.sums.is_empty()
    }

    /// Runs `loss`'s backward pass without reductions and adds its gradients. The module's parameters must be marked
    /// again ([`mark`]) before the next forward pass. Ranks may differ in how many passes they hold.
    pub fn backward<M: AutodiffModule<A>>(&mut self, loss: Tensor<A, 1>, module: &M) {
        struct Release<B: Backend>(Arc<Context<B>>);
        impl<B: Backend> Drop for Release<B> {
            fn drop(&mut self) {
                self.0.hold_back(false);
            }
        }
        self.context.hold_back(true);
        let release = Release(self.context.clone());
        let grads = GradientsParams::from_grads(loss.backward(), module);
        drop(release);
        let mut leftovers = Leftovers::<A> { grads, context: self.context.clone(), found: Vec::new() };
        module.visit(&mut leftovers);
        for (slot, gradient) in leftovers.found {
            let gradient =
                if gradient.dtype().size() < 4 { A::Base::float_cast(gradient, DType::F32.into()) } else { gradient };
            let sum = match self.sums.remove(&slot.index) {
                Some((_, sum)) => A::Base::float_add(sum, gradient),
                None => {
                    self.context.count_unreduced(bytes_of::<A::Base>(&gradient));
                    gradient
                }
            };
            self.sums.insert(slot.index, (slot, sum));
        }
    }

    /// Reduces what is held, as [`collect_grads`] does. Every rank must call it, whether it holds anything or not.
    pub fn collect<M: AutodiffModule<A>>(mut self, module: &M) -> GradientsParams {
        let held = std::mem::take(&mut self.sums);
        held.values().for_each(|(_, sum)| self.context.count_unreduced(-bytes_of::<A::Base>(sum)));
        collect::<A, M>(GradientsParams::new(), module, None, held.into_values().collect())
    }
}

impl<A: ZeroAutodiff> Drop for HeldGrads<A> {
    fn drop(&mut self) {
        self.sums.values().for_each(|(_, sum)| self.context.count_unreduced(-bytes_of::<A::Base>(sum)));
    }
}

/// Bytes of a dense gradient.
pub(crate) fn bytes_of<B: Backend>(gradient: &B::FloatTensorPrimitive) -> i64 {
    (gradient.shape().num_elements() * gradient.dtype().size()) as i64
}

/// A parameter and its dense gradient.
type Leftover<B> = (Arc<Slot<B>>, <B as BackendTypes>::FloatTensorPrimitive);

/// Takes out the gradients that are still dense.
struct Leftovers<A: ZeroAutodiff> {
    grads: GradientsParams,
    context: Arc<Context<A::Base>>,
    found: Vec<Leftover<A::Base>>,
}

impl<A: ZeroAutodiff> ModuleVisitor<A> for Leftovers<A> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        let Some(gradient) = self.grads.remove::<A::InnerBackend, D>(param.id) else { return };
        match gradient.into_primitive() {
            TensorPrimitive::Float(ZeroTensor::Dense(dense)) => {
                let Some(slot) = self.context.slot_of(DistributedParamId::from(param.id.val())) else {
                    stop(format!(
                        "a gradient came for parameter {} that zero_burn::module::prepare has not seen: call prepare \
                         on the whole model before its first forward pass",
                        param.id
                    ));
                };
                self.found.push((slot, dense));
            }
            other => self.grads.register::<A::InnerBackend, D>(param.id, Tensor::from_primitive(other)),
        }
    }
}

/// Adds the reduced gradients that the context holds for the module's parameters.
struct Supply<'a, A: ZeroAutodiff> {
    grads: GradientsParams,
    context: Arc<Context<A::Base>>,
    parameters: Option<&'a [ParamId]>,
}

impl<A: ZeroAutodiff> ModuleVisitor<A> for Supply<'_, A> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        if self.parameters.is_some_and(|parameters| !parameters.contains(&param.id)) {
            return;
        }
        let Some(slot) = self.context.slot_of(DistributedParamId::from(param.id.val())) else { return };
        for cell in self.context.take_settled(slot.index) {
            let primitive = TensorPrimitive::Float(ZeroTensor::Shard(Shard::new(cell)));
            let tensor = Tensor::<A::InnerBackend, D>::from_primitive(primitive);
            let tensor = match self.grads.remove::<A::InnerBackend, D>(param.id) {
                Some(present) => present.add(tensor),
                None => tensor,
            };
            self.grads.register::<A::InnerBackend, D>(param.id, tensor);
        }
    }
}

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
    struct Scale(GradientsParams, f32);
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            if let Some(gradient) = self.0.remove::<A::InnerBackend, D>(param.id) {
                self.0.register::<A::InnerBackend, D>(param.id, gradient.mul_scalar(self.1));
            }
        }
    }
    fn visit<A: ZeroAutodiff, M: Module<A>>(module: &M, scale: &mut impl ModuleVisitor<A>) {
        module.visit(scale);
    }
    let mut scale = Scale(grads, factor);
    visit::<A, M>(module, &mut scale);
    scale.0
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
/// gradients from [`collect_grads`].
pub fn grad_norm<A: ZeroAutodiff, M: AutodiffModule<A>>(grads: &GradientsParams, module: &M) -> f64 {
    struct Squares<'a, A: ZeroAutodiff> {
        grads: &'a GradientsParams,
        context: Arc<Context<A::Base>>,
        /// Per parameter one sum of squares for each rank's piece, zero where another rank computes it.
        pieces: Vec<f64>,
        /// Pieces on a device, and their places in `pieces`.
        on_device: Vec<(usize, <A::Base as BackendTypes>::FloatTensorPrimitive)>,
    }
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Squares<'_, A> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let Some(gradient) = self.grads.get::<A::InnerBackend, D>(param.id) else { return };
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
    let mut squares = Squares::<A> { grads, context: context.clone(), pieces: Vec::new(), on_device: Vec::new() };
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
