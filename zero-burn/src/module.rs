//! The calls of a training program on its module: [`prepare`] once, [`mark`] before a further forward pass, and [`collect_grads`] on every
//! set of gradients.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{BasicOps, Bool, Int, Tensor, TensorData, TensorPrimitive};
use burn_backend::distributed::DistributedParamId;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, BackendTypes, TensorMetadata};
use burn_std::DType;
use zero_core::window::Key;
use zero_core::{CommError, OperationCall};

use crate::abort::{raise, stop, stop_foreign};
pub use crate::autodiff::ZeroAutodiff;
use crate::autodiff::from_rank_0;
use crate::birth::{Fill, parameter};
use crate::context::Context;
use crate::engine::{Cell, Kind, Origin, Phase, Slot, Template, burn_dtype, engine_dtype};
use crate::experts;
pub use crate::grads::{first_nonfinite, grad_norm, replicated_along, scale_grads, set_gradient, sharded_along};
use crate::preparation::{buffer, buffers, draw_as_rank_0};
use crate::random::{sign, sign_bytes};
use crate::tensor::{Shard, ZeroTensor};
use crate::values::{of_type, read};
use crate::walk::{self, ParamMeta, below, leaf};

/// Prepares a module for training:
///
/// * Parameters that are still ordinary tensors become shards, with rank 0's values on all ranks.
/// * fp32 parameters are converted to the configuration's `param_dtype`.
/// * Every parameter that requires a gradient is marked for reduction.
/// * Int and bool parameters get rank 0's values.
///
/// If ranks were seeded differently, parameters get the first values of rank 0's seed; later draws (dropout) use each rank's own seed.
///
/// State that a layer changes in its forward pass, such as a batch norm's running mean and variance, is not a parameter. It begins with
/// rank 0's values and is then an ordinary tensor of each rank, as in Burn. Checkpoints hold rank 0's.
///
/// Burn does not show visitors a plain tensor in a field of a module. Random ones drawn before the first call are the same on all ranks. In
/// later modules, and for tensors made from each rank's data, use `Param::from_tensor(tensor).no_grad()`.
///
/// Call it once, on the full module, on every rank. A thread that the rank's body has started may call it and train; it is then the rank's
/// thread, and no other may do so. The call also creates parameters that are still lazy, in the order of the module's fields, so that every
/// rank numbers them alike.
///
/// A parameter that is the result of an operation on a trained tensor becomes a leaf of the graph. For example, Burn 0.21 transposes the
/// weight of a linear layer in column layout after it has begun to track it, and never trains it without `prepare`.
///
/// A clone of a `Param` in the module stays tied to it. A `Param` made from another's tensor is a parameter of its own, as in Burn.
///
/// # Panics
///
/// If ranks differ in their modules, or if the module was built outside of the launch or by another rank. The launcher reports the error.
pub fn prepare<A: ZeroAutodiff, M: Module<A>>(module: M, device: &A::Device) -> M {
    let context = Context::of_device(device);
    let (known, dropped) = context.rank.parameters.dropped();
    let buffers = buffers::<A, M>(&module);
    let mut mapper = Prepare::<A>::new(context.clone(), device, &buffers);
    let module = module.map(&mut mapper);
    context.rank.keep_states(&mapper.trained);
    let (is_alike, gone) = mapper.compare_ranks(&dropped);
    let module = if is_alike { module } else { draw_as_rank_0::<A, M>(&context, module, &mapper.drawn) };
    known.iter().zip(gone).filter(|(_, gone)| *gone).for_each(|(&index, _)| context.rank.forget_slot(index));
    // All ranks are here and none has read anything: the initializers' leftovers are not needed.
    context.rank.drop_retired();
    // A rank may use a parameter alone later.
    context.gather_awaited();
    context.end_building();
    module
}

/// The mapper of [`prepare`].
struct Prepare<'a, A: ZeroAutodiff> {
    context: Arc<Context<A::Base>>,
    device: &'a A::Device,
    /// Identities of the layers' state.
    buffers: &'a HashSet<ParamId>,
    /// Seeds and creation numbers of the parameters that were drawn.
    drawn: Vec<(u64, u64)>,
    /// Parameters so far, by identity and cell.
    seen: HashSet<(ParamId, Option<Key>)>,
    /// Trained parameters.
    trained: Vec<Arc<Slot<A::Base>>>,
    /// Number of parameters so far.
    places: u64,
    /// Hash of their numbers, shapes and types.
    signature: u64,
    /// Prepared parameters, by identity and node of the graph: a clone of one is the same parameter.
    prepared: HashMap<(ParamId, u64), A::FloatTensorPrimitive>,
}

impl<'a, A: ZeroAutodiff> Prepare<'a, A> {
    fn new(context: Arc<Context<A::Base>>, device: &'a A::Device, buffers: &'a HashSet<ParamId>) -> Self {
        let wanted = burn_dtype(context.rank.config.param_dtype.wire_dtype());
        if !A::Base::supports_dtype(device.inner(), wanted) {
            let backend = A::Base::name(device.inner());
            stop(format!(
                "backend {backend} cannot compute in {wanted:?}: use another param_dtype, or another backend"
            ));
        }
        Self {
            context,
            device,
            buffers,
            drawn: Vec::new(),
            seen: HashSet::new(),
            trained: Vec::new(),
            places: 0,
            signature: 0,
            prepared: HashMap::new(),
        }
    }

    /// Returns the parameter's own shard in its final type, and whether it replaces the one that was found.
    fn own_shard(&self, id: ParamId, found: ZeroTensor<A::Base>, is_result: bool) -> (Shard<A::Base>, bool) {
        let wanted = burn_dtype(self.context.rank.config.param_dtype.wire_dtype());
        let identity = DistributedParamId::from(id.val());
        // True if another parameter uses the same tensor, so that this one needs its own.
        let is_another = |cell: &Cell<A::Base>| {
            cell.slot.as_ref().and_then(|slot| slot.id.get()).is_some_and(|known| *known != identity)
        };
        let (shard, is_new) = match found {
            ZeroTensor::Shard(shard) if shard.is_parameter() && shard.views.is_empty() && !is_result => (shard, false),
            other => (share(&self.context, other, self.device), true),
        };
        let found = burn_dtype(shard.cell.dtype);
        let dtype = if found == DType::F32 { wanted } else { found };
        if dtype != found || is_another(&shard.cell) {
            return (converted(&self.context, &shard.cell, dtype), true);
        }
        (shard, is_new)
    }

    /// Numbers a parameter by its position in the module, and adds it to the signature.
    fn add(&mut self, id: ParamId, cell: &Cell<A::Base>, tracked: bool) {
        let slot = cell.slot.clone().expect("a parameter's cell has a slot");
        if self.seen.insert((id, cell.key)) {
            self.drawn.extend(cell.drawn().map(|drawn| (drawn.seed, drawn.birth)));
            self.trained.extend(tracked.then(|| slot.clone()));
            slot.quantization.is_frozen.store(!tracked, Ordering::Relaxed);
        }
        self.places += 1;
        slot.reduction.layout.store(self.places, Ordering::Relaxed);
        let dims = slot.shape.iter().map(|&dim| dim as u64);
        self.signature =
            sign(&[&[self.signature, slot.index, slot.dtype.size() as u64][..], &dims.collect::<Vec<_>>()].concat());
        let identity = DistributedParamId::from(id.val());
        // A module that is prepared again keeps its identities.
        let _ = slot.id.set(identity);
        self.context.rank.parameters.name(identity, slot);
    }

    /// Compares the ranks' modules and raises an error if they differ. Returns whether all ranks drew the same values, and for each entry
    /// of `dropped` whether that parameter was dropped on every rank.
    fn compare_ranks(&self, dropped: &[u8]) -> (bool, Vec<bool>) {
        let Self { context, places, drawn, .. } = self;
        let signature = sign(&[self.signature, drawn.len() as u64]);
        let seeds = drawn.iter().fold(0, |seeds, &(seed, birth)| sign(&[seeds, seed, birth]));
        let all = context.gather_bytes([&sign(&[signature, seeds]).to_le_bytes()[..], dropped].concat());
        let all: Vec<(&[u8], &[u8])> = all.chunks_exact(8 + dropped.len()).map(|rank| rank.split_at(8)).collect();
        let is_alike = all.iter().all(|(rank, _)| *rank == all[0].0);
        let signatures = if is_alike { Vec::new() } else { context.gather_bytes(signature.to_le_bytes().to_vec()) };
        if let Some(other) = signatures.chunks_exact(8).position(|rank| rank != signature.to_le_bytes()) {
            let mine = format!("prepare on a module of {places} parameters");
            raise(CommError::Mismatch {
                at: OperationCall::new("parameters", 0, context.rank.place.rank, mine),
                other_rank: context.rank.window.in_run(other),
                other_op:
                    "prepare on a module whose parameters have other shapes or were created in another order (build \
                           the same model on every rank, and do not use its parameters before)"
                        .into(),
            });
        }
        (is_alike, (0..dropped.len()).map(|place| all.iter().all(|(_, dropped)| dropped[place] == 1)).collect())
    }
}

impl<A: ZeroAutodiff> ModuleMapper<A> for Prepare<'_, A> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        let (id, tensor, mapper) = param.consume();
        let TensorPrimitive::Float(in_graph) = tensor.clone().into_primitive() else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let (tracked, node) = (A::is_tracked(&in_graph), A::node(&in_graph));
        if let Some(prepared) = self.prepared.get(&(id, node)) {
            let tensor = Tensor::from_primitive(TensorPrimitive::Float(prepared.clone()));
            return Param::from_mapped_value(id, tensor, mapper);
        }
        // Not a leaf of the graph, so that it would get no gradient: made one below.
        let is_result = tracked && !tensor.is_require_grad();
        let TensorPrimitive::Float(primitive) = tensor.clone().inner().into_primitive() else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        if let ZeroTensor::Shard(shard) = &primitive
            && !Arc::ptr_eq(&shard.cell.rank, &self.context.rank)
        {
            stop_foreign(&shard.cell.shape);
        }
        if self.buffers.contains(&id) {
            let state = buffer(&self.context, primitive, self.device.inner());
            return Param::from_mapped_value(id, leaf(state, id, false), mapper);
        }
        let (shard, is_new) = self.own_shard(id, primitive, is_result);
        let cell = shard.cell.clone();
        let tensor = if is_new { leaf(ZeroTensor::Shard(shard), id, tracked) } else { tensor };
        self.add(id, &cell, tracked);
        let tensor = if tracked { tensor.set_distributed(DistributedParamId::from(id.val())) } else { tensor };
        if let TensorPrimitive::Float(prepared) = tensor.clone().into_primitive() {
            self.prepared.insert((id, node), prepared);
        }
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<A, D, Int>>) -> Param<Tensor<A, D, Int>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, of_rank_0(&self.context, tensor), mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<A, D, Bool>>) -> Param<Tensor<A, D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, of_rank_0(&self.context, tensor), mapper)
    }
}

/// Returns an int or bool tensor with rank 0's values.
fn of_rank_0<A: ZeroAutodiff, const D: usize, K: BasicOps<A>>(
    context: &Context<A::Base>,
    tensor: Tensor<A, D, K>,
) -> Tensor<A, D, K> {
    if context.rank.world == 1 {
        return tensor;
    }
    let (device, data) = (tensor.device(), tensor.into_data());
    let (shape, dtype) = (data.shape.clone(), data.dtype);
    let bytes = context.broadcast_bytes(data.into_bytes().to_vec());
    Tensor::from_data(TensorData::from_bytes_vec(bytes, shape, dtype), (&device, dtype))
}

/// Makes a parameter of a dense tensor, with rank 0's values.
fn share<B: Backend>(context: &Context<B>, tensor: ZeroTensor<B>, device: &crate::ZeroDevice<B::Device>) -> Shard<B> {
    let data = from_rank_0(context, tensor);
    let (shape, dtype) = (data.shape.clone(), data.dtype);
    match parameter(Fill::Data(data), shape, device.inner(), dtype) {
        ZeroTensor::Shard(shard) => shard,
        _ => unreachable!("a parameter is always a shard"),
    }
}

/// Creates another parameter with the same values, in type `dtype`.
fn converted<B: Backend>(context: &Arc<Context<B>>, cell: &Cell<B>, dtype: DType) -> Shard<B> {
    let template = Template {
        slot: cell.slot.as_ref().map(|slot| context.rank.replace_slot(slot, engine_dtype(dtype))),
        ..cell.template(Kind::Parameter, Origin::Version)
    };
    let whole = cell.settled().full.tensor();
    Shard::new(match whole {
        // Parameters are not sharded.
        Some(whole) => Cell::full(template, of_type::<B>(whole, dtype)),
        None => Cell::ready(template, of_type::<B>(cell.local(), dtype)),
    })
}

/// Marks the module's parameters for the next backward pass, and counts updated ones as parameters.
///
/// Burn's autodiff drops a mark in the backward pass that uses it; Burn's optimizers set it again. So a loop of forward, backward and step
/// needs no call. Call it before each further forward pass of the same step (accumulation, gradient penalties). Gradients without a mark
/// are reduced too, but only at the end, by [`collect_grads`].
pub fn mark<A: ZeroAutodiff, M: Module<A>>(module: &M) {
    struct Mark;
    impl<A: ZeroAutodiff> ModuleVisitor<A> for Mark {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
            let tensor = param.val();
            if let Some(ZeroTensor::Shard(shard)) = below(tensor.clone()) {
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

/// Ends a pass of a program that evaluates without training, when the next pass uses the same parameters in the same order. In text
/// generation, a pass is a token. Parameters are then gathered, or read from a disk, ahead of their use across the end of the pass. If
/// ranks gather collectively, every rank must call it.
pub fn end_pass<B: Backend>() {
    Context::<B>::current().gatherer.end_pass();
}

/// Completes a set of gradients: reduces those that the backward pass has not reduced, and adds those of parameters that got a gradient on
/// other ranks only. Every rank must call it after every backward pass.
///
/// Afterwards all ranks hold gradients for the same parameters, each as a shard, averaged over the ranks. Burn's optimizers, accumulators
/// and clipping work on them. For several optimizers with parameters of their own, see [`collect_grads_of`].
///
/// # Panics
///
/// If a collective fails; the launcher reports the error.
pub fn collect_grads<A: ZeroAutodiff, M: AutodiffModule<A>>(grads: GradientsParams, module: &M) -> GradientsParams {
    collect::<A, M>(grads, module, None, Vec::new())
}

/// Same as [`collect_grads`], for the gradients of some of the module's parameters (`GradientsParams::from_params`). The others' gradients
/// are left for their own call. Every rank must call it with the same parameters.
pub fn collect_grads_of<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: GradientsParams,
    module: &M,
    parameters: &[ParamId],
) -> GradientsParams {
    collect::<A, M>(grads, module, Some(parameters), Vec::new())
}

fn collect<A: ZeroAutodiff, M: AutodiffModule<A>>(
    mut grads: GradientsParams,
    module: &M,
    parameters: Option<&[ParamId]>,
    held: Vec<Leftover<A::Base>>,
) -> GradientsParams {
    let context = Context::<A::Base>::current();
    // Every rank is here before the next update, whether it had a backward pass or not.
    context.join_fence();
    let (mut found, mut named) = leftovers::<A, M>(&mut grads, &context, module);
    named.extend(held.iter().map(|(slot, _)| slot.index));
    found.extend(held);
    let edits = edits::<A, M>(&context, module);
    // On a single rank, everything that is collected is its own.
    let mut meant = None;
    loop {
        let indices = found.iter().map(|(slot, _)| slot.index).collect();
        context.begin_reduction(Phase::Collect, indices, (named.clone(), Some(edits)));
        for (slot, dense) in std::mem::take(&mut found) {
            let cell = context.gradient(&slot);
            context.reduce(dense, &cell);
            context.add_foreign(vec![(slot.index, cell)]);
        }
        let Some(outcome) = context.end_reduction() else { break };
        context.add_foreign(outcome.foreign);
        if !outcome.in_backward {
            meant = Some(outcome.named);
            break;
        }
    }
    context.end_passes();
    // All ranks are here, whether they had a backward pass or not, and nothing is updated yet.
    crate::replicas::check::<A, M>(&context, module);
    // The reduced gradients that the context holds for the module's parameters.
    walk::visit::<A, M>(module, |ParamMeta { id, .. }, tensor| {
        if parameters.is_some_and(|parameters| !parameters.contains(&id)) {
            return;
        }
        let Some(slot) = walk::slot_of(&context, id, tensor.as_ref()) else { return };
        // A parameter that no rank's gradients include belongs to another optimizer.
        if meant.as_ref().is_some_and(|meant| !meant.contains(&slot.index)) {
            return;
        }
        for cell in context.take_foreign(slot.index) {
            let tensor = ZeroTensor::Shard(Shard::new(cell));
            let sum = match walk::take_gradient::<A>(&mut grads, id) {
                Some(present) => A::InnerBackend::float_add(present, tensor),
                None => tensor,
            };
            walk::put_gradient::<A>(&mut grads, id, sum);
        }
    });
    experts::average::<A, M>(&context, &mut grads, module, |id| parameters.is_none_or(|meant| meant.contains(&id)));
    grads
}

/// Full gradients that have not been reduced: this rank's sums over micro-batches, in fp32.
///
/// DeepSpeed and PyTorch call this `no_sync`: several backward passes cost one reduction, at the price of a full set of fp32 gradients on
/// every rank.
pub struct UnreducedGrads<A: ZeroAutodiff> {
    context: Arc<Context<A::Base>>,
    /// Sums by the parameter's number.
    sums: BTreeMap<u64, Leftover<A::Base>>,
}

impl<A: ZeroAutodiff> Default for UnreducedGrads<A> {
    fn default() -> Self {
        Self { context: Context::current(), sums: BTreeMap::new() }
    }
}

impl<A: ZeroAutodiff> UnreducedGrads<A> {
    /// Returns whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.sums.is_empty()
    }

    /// Runs `loss`'s backward pass without reduction and adds its gradients. The module's parameters must be marked again ([`mark`]) before
    /// the next forward pass. Ranks may differ in how many passes they hold.
    pub fn backward<M: AutodiffModule<A>>(&mut self, loss: Tensor<A, 1>, module: &M) {
        self.context.hold_back(true);
        let release = scopeguard::guard(&self.context, |context| context.hold_back(false));
        let mut grads = GradientsParams::from_grads(loss.backward(), module);
        drop(release);
        for (slot, gradient) in leftovers::<A, M>(&mut grads, &self.context, module).0 {
            let gradient =
                if gradient.dtype().size() < 4 { A::Base::float_cast(gradient, DType::F32.into()) } else { gradient };
            let sum = match self.sums.remove(&slot.index) {
                Some((_, sum)) => A::Base::float_add(sum, gradient),
                None => {
                    self.context.rank.count_unreduced(bytes_of::<A::Base>(&gradient));
                    gradient
                }
            };
            self.sums.insert(slot.index, (slot, sum));
        }
    }

    /// Reduces the held gradients, like [`collect_grads`]. Every rank must call it, whether it holds any or not.
    pub fn collect<M: AutodiffModule<A>>(mut self, module: &M) -> GradientsParams {
        let held = std::mem::take(&mut self.sums);
        held.values().for_each(|(_, sum)| self.context.rank.count_unreduced(-bytes_of::<A::Base>(sum)));
        collect::<A, M>(GradientsParams::new(), module, None, held.into_values().collect())
    }
}

impl<A: ZeroAutodiff> Drop for UnreducedGrads<A> {
    fn drop(&mut self) {
        self.sums.values().for_each(|(_, sum)| self.context.rank.count_unreduced(-bytes_of::<A::Base>(sum)));
    }
}

/// Returns the size of a dense gradient in bytes.
pub(crate) fn bytes_of<B: Backend>(gradient: &B::FloatTensorPrimitive) -> i64 {
    (gradient.shape().num_elements() * gradient.dtype().size()) as i64
}

/// A parameter and its dense gradient.
type Leftover<B> = (Arc<Slot<B>>, <B as BackendTypes>::FloatTensorPrimitive);

/// Returns a hash of the ordinary tensors that a program has put in place of the module's parameters; 0 if there are none. Ranks compare it
/// when they collect gradients: if the hashes are equal, so are the tensors.
fn edits<A: ZeroAutodiff, M: AutodiffModule<A>>(context: &Context<A::Base>, module: &M) -> u64 {
    let mut hash = 0;
    if context.rank.world == 1 {
        return hash;
    }
    walk::visit::<A, M>(module, |ParamMeta { id, .. }, tensor| {
        let Some(slot) = tensor.as_ref().and_then(|tensor| walk::slot_of(context, id, Some(tensor))) else { return };
        let dense = match tensor {
            Some(dense @ ZeroTensor::Dense(_)) => Some(dense.load()),
            _ => None,
        };
        slot.reduction.is_edited.store(dense.is_some(), Ordering::Relaxed);
        if let Some(dense) = dense {
            hash = sign(&[hash, slot.index, sign_bytes(read::<A::Base>(dense).as_bytes())]).max(1);
        }
    });
    hash
}

/// Takes out the gradients that are still dense. Also returns the numbers of all parameters for which `grads` has a gradient.
fn leftovers<A: ZeroAutodiff, M: Module<A>>(
    grads: &mut GradientsParams,
    context: &Context<A::Base>,
    module: &M,
) -> (Vec<Leftover<A::Base>>, Vec<u64>) {
    let (mut found, mut named, mut numbers) = (Vec::new(), Vec::new(), HashSet::new());
    walk::visit::<A, M>(module, |ParamMeta { id, .. }, tensor| {
        let Some(gradient) = walk::take_gradient::<A>(grads, id) else { return };
        named.extend(walk::slot_of(context, id, tensor.as_ref()).map(|slot| slot.index));
        let dense = match gradient {
            dense @ (ZeroTensor::Dense(_) | ZeroTensor::Activation(_)) => dense.load(),
            other => return walk::put_gradient::<A>(grads, id, other),
        };
        let Some(slot) = walk::slot_of(context, id, tensor.as_ref()) else {
            stop(format!(
                "got a gradient for parameter {id}, which was not prepared: call zero_burn::module::prepare on the \
                 whole model before its first forward pass"
            ));
        };
        if !numbers.insert(slot.index) {
            stop(format!(
                "got gradients for parameter {id} and for another parameter with the same tensor: call \
                 zero_burn::module::prepare on the whole model, which gives each parameter its own tensor"
            ));
        }
        found.push((slot, dense));
    });
    (found, named)
}
