//! Activation checkpointing (Chen et al. 2016, <https://arxiv.org/abs/1604.06174>): a block of layers keeps only its inputs and outputs, and
//! is computed again in the backward pass.
//!
//! Autodiff records nothing of a block but one node. When the backward pass reaches that node, the block runs again on a graph of its own,
//! whose backward pass follows at once and hands gradients of parameters to the reducer as usual. That graph has no leaf of the outer one,
//! whose lock is held meanwhile: gathers in it are recorded from leaves of their own (`backend.rs`).
//!
//! The inputs may be kept outside of memory until then (`zero_engine::activations`).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    TensorMetadata,
};
use burn::tensor::{Shape, Tensor};
use parking_lot::Mutex;
use zero_core::config::Tier;
use zero_engine::abort::stop;
use zero_engine::activations::Movable;
use zero_engine::random::sign_bytes;

use crate::clock;
use crate::device::Target;
use crate::engine::{Burn, Runtime};
use crate::parameter::{Parameter, Recorded};
use crate::random;
use crate::tensors::{as_host, floats, host};

type Any = FloatTensor<Dispatch>;
type Function = dyn Fn(Vec<Any>) -> Any + Send;

/// The float tensors that a block is computed from: one tensor, a tuple of two or three, or `()` for a block without any, such as an
/// embedding, which owns its ids.
pub trait Inputs {
    /// Returns the tensors.
    #[doc(hidden)]
    fn into_dispatch(self) -> Vec<Any>;
    /// Inverts `into_dispatch`.
    #[doc(hidden)]
    fn from_dispatch(tensors: Vec<Any>) -> Self;
}

impl Inputs for () {
    fn into_dispatch(self) -> Vec<Any> {
        Vec::new()
    }
    fn from_dispatch(_: Vec<Any>) {}
}

macro_rules! inputs {
    ($type:ty, [$($d:ident),*], |$all:ident| $into:expr, |$next:ident| $from:expr) => {
        impl<$(const $d: usize),*> Inputs for $type {
            fn into_dispatch(self) -> Vec<Any> {
                let $all = self;
                $into
            }
            fn from_dispatch(tensors: Vec<Any>) -> Self {
                let mut tensors = tensors.into_iter();
                let mut $next = || tensors.next().expect("a block has the same number of inputs when it runs again");
                $from
            }
        }
    };
}

inputs!(Tensor<D>, [D], |x| vec![x.into_dispatch()], |next| Tensor::from_dispatch(next()));
inputs!((Tensor<D>, Tensor<E>), [D, E], |all| vec![all.0.into_dispatch(), all.1.into_dispatch()], |next| (
    Tensor::from_dispatch(next()),
    Tensor::from_dispatch(next())
));
inputs!(
    (Tensor<D>, Tensor<E>, Tensor<F>),
    [D, E, F],
    |all| vec![all.0.into_dispatch(), all.1.into_dispatch(), all.2.into_dispatch()],
    |next| (Tensor::from_dispatch(next()), Tensor::from_dispatch(next()), Tensor::from_dispatch(next()))
);

/// Runs `block(inputs)` and keeps only its inputs and output in memory. The backward pass runs the block again: sharded parameters are
/// gathered again, [`dropout`](crate::dropout) uses the same masks, and losses and gradients have the same bits. The cost is one more
/// forward pass of the block.
///
/// `block` may use parameters of the sharded module (own them by `module.clone()`, which copies handles), and tensors that need no gradient.
/// Pass other tensors as `inputs`. It must compute the same bits each time, so use this crate's `dropout` instead of Burn's. Within another
/// block, outside of [`Zero::backward`](crate::Zero::backward), and without autodiff the call just runs `block`.
///
/// If an input is used outside of the block too, its gradients are added in another order than without checkpointing. A batch norm within a
/// block updates its running statistics in both runs.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_nn::{Linear, LinearConfig};
/// use zero_core::{Stage, collective::threads::ThreadOptions};
/// use zero_param::{Error, ZeroConfig, checkpoint, linear, run_threads, shard};
///
/// run_threads(2, &ThreadOptions::default(), |ranks| {
///     let device = Device::flex().autodiff();
///     let layers: Vec<Linear> = (0..4).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
///     let (layers, zero) = shard(layers, ranks, &ZeroConfig::new(Stage::Parameters))?;
///     let (_, grads) = zero.backward(|| {
///         let mut x = Tensor::<2>::ones([8, 64], &device);
///         for layer in &layers {
///             let layer = layer.clone();
///             x = checkpoint(move |x: Tensor<2>| linear(x, layer.weight.val(), None, None).tanh(), x);
///         }
///         x.square().mean()
///     })?;
///     assert!(grads.norm()? > 0.0);
///     Ok::<_, Error>(())
/// })
/// .unwrap();
/// ```
///
/// # Panics
///
/// If `block` uses a tensor that requires a gradient and is not one of the inputs; in the backward pass, if the block computes something
/// else than before.
pub fn checkpoint<I: Inputs, const D: usize>(block: impl Fn(I) -> Tensor<D> + Send + 'static, inputs: I) -> Tensor<D> {
    run(block, inputs, |_| true)
}

/// Calls [`checkpoint`] if the run's configuration asks for it. A model for others to train calls this for each of its layers, in order.
/// [`ZeroConfig::checkpointed_blocks`](crate::ZeroConfig::checkpointed_blocks) is the number of leading blocks that are checkpointed; 0 by
/// default.
pub fn checkpoint_block<I: Inputs, const D: usize>(
    block: impl Fn(I) -> Tensor<D> + Send + 'static,
    inputs: I,
) -> Tensor<D> {
    run(block, inputs, Runtime::next_block)
}

fn run<I: Inputs, const D: usize>(
    block: impl Fn(I) -> Tensor<D> + Send + 'static,
    inputs: I,
    is_checkpointed: impl FnOnce(&Runtime) -> bool,
) -> Tensor<D> {
    let is_within = BLOCK.with_borrow(Option::is_some);
    let inputs = inputs.into_dispatch();
    let is_followed = |input: &Any| matches!(input.kind, DispatchTensorKind::Autodiff(_));
    let model = random::model().filter(|_| !is_within && (inputs.is_empty() || inputs.iter().any(is_followed)));
    let Some(model) = model.filter(|model| is_checkpointed(model)) else { return block(I::from_dispatch(inputs)) };
    let function = move |inputs: Vec<Any>| block(I::from_dispatch(inputs)).into_dispatch();
    let free = |input: &Any| match is_followed(input) {
        // Detaching a leaf makes another leaf.
        true => Dispatch::float_set_require_grad(Dispatch::float_detach(input.clone()), false),
        false => input.clone(),
    };
    let free = inputs.iter().map(free).collect();
    let ((out, uses), keys) = random::noted(|| within(Tape::First(VecDeque::new()), || function(free)));
    if !is_followed(&out) {
        return Tensor::from_dispatch(out);
    }
    let first = First { function: Box::new(function), inputs, uses, keys };
    Tensor::from_dispatch(match crate::device::is_host(&out) {
        true => first.record::<burn::backend::Flex>(out, model),
        #[cfg(feature = "cube")]
        false => first.record::<burn::backend::Cube>(out, model),
        #[cfg(not(feature = "cube"))]
        false => crate::device::moved(),
    })
}

/// A block that has run for the first time.
struct First {
    function: Box<Function>,
    inputs: Vec<Any>,
    uses: VecDeque<Arc<Recorded>>,
    keys: Vec<u64>,
}

/// The uses of parameters in a block, in order.
enum Tape {
    /// The first run: the uses of parameters whose gradients are wanted.
    First(VecDeque<Arc<Recorded>>),
    /// A later run, whose uses are those of the first.
    Again(VecDeque<Arc<Recorded>>),
}

thread_local! {
    static BLOCK: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// A gather that autodiff is to record.
pub(crate) struct Use {
    /// The use of the parameter, if its gradient is wanted.
    pub(crate) recorded: Option<Arc<Recorded>>,
    /// True within a block that runs again: leaves of the outer graph are not to be used.
    pub(crate) again: bool,
}

/// Begins a use of a parameter. Returns `None` in the first run of a block, where autodiff records nothing.
pub(crate) fn begin_use(parameter: &Arc<Parameter>, wanted: bool) -> Option<Use> {
    BLOCK.with_borrow_mut(|tape| match tape {
        None => Some(Use { recorded: wanted.then(|| Recorded::new(parameter)), again: false }),
        Some(Tape::First(uses)) => {
            uses.extend(wanted.then(|| Recorded::new(parameter)));
            None
        }
        Some(Tape::Again(_)) if !wanted => Some(Use { recorded: None, again: true }),
        Some(Tape::Again(uses)) => match uses.pop_front().filter(|used| used.is_of(parameter)) {
            Some(used) => Some(Use { recorded: Some(used), again: true }),
            None => changed(&format!("it uses {parameter} at another place")),
        },
    })
}

/// Returns whether this thread runs a block again.
pub(crate) fn runs_again() -> bool {
    BLOCK.with_borrow(|tape| matches!(tape, Some(Tape::Again(_))))
}

fn changed(what: &str) -> ! {
    stop(format!(
        "a checkpointed block is not the same when it runs again: {what}. A block must use the same parameters and compute the same numbers \
         each time: use zero_param::dropout instead of Burn's Dropout, and no random numbers or state of your own"
    ))
}

/// Runs `f` as a block. Returns its result, and the uses of parameters that are left or new.
fn within<T>(tape: Tape, f: impl FnOnce() -> T) -> (T, VecDeque<Arc<Recorded>>) {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            BLOCK.set(None);
        }
    }
    BLOCK.set(Some(tape));
    let end = End;
    let value = f();
    let Some(Tape::First(uses) | Tape::Again(uses)) = BLOCK.take() else { unreachable!("blocks do not nest") };
    drop(end);
    (value, uses)
}

/// An input of a block until the backward pass.
type Input = Arc<Movable<Burn>>;

fn held<B: Target>(tensor: FloatTensor<B>, model: &Runtime) -> Input {
    let (shape, tensor) = (tensor.shape(), B::floats(tensor));
    let stays = model.rank.config.offload.activations == Tier::Memory;
    Movable::new(if stays { tensor } else { floats(host(tensor)) }, shape.as_slice())
}

/// A block that has run, until the backward pass.
struct Ran<B: Target> {
    function: Box<Function>,
    inputs: Vec<Input>,
    uses: VecDeque<Arc<Recorded>>,
    keys: Vec<u64>,
    /// Hash of the output, in host memory.
    hash: Option<u64>,
    context: DispatchAutodiffContext,
    device: B::Device,
    model: Arc<Runtime>,
}

impl<B: Target> Ran<B> {
    /// Runs the block again, from `inputs`.
    fn again(self, inputs: Vec<FloatTensor<Autodiff<B>>>) -> FloatTensor<Autodiff<B>> {
        let Self { function, uses, keys, context, .. } = self;
        let _ordered = clock::forward();
        let inputs = inputs.into_iter().map(|input| wrapped::<B>(input, context)).collect();
        let ((out, left), drawn) = random::given(keys, || within(Tape::Again(uses), || function(inputs)));
        let Some(out) = unwrapped::<B>(out.kind).filter(|_| left.is_empty() && drawn) else {
            changed("it uses fewer parameters or random numbers")
        };
        if self.hash.is_some() && self.hash != hash::<B>(&out) {
            changed("its output differs");
        }
        out
    }
}

/// Returns the hash of a tensor in host memory. Copies nothing if the tensor has no gaps.
fn hash<B: Target>(out: &FloatTensor<Autodiff<B>>) -> Option<u64> {
    let raw = as_host(&B::floats(out.clone().into_primitive()))?.to_contiguous();
    let size = raw.dtype().size();
    let begin = raw.layout().start_offset() * size;
    Some(sign_bytes(&raw.bytes()[begin..][..raw.shape().num_elements() * size]))
}

fn wrapped<B: Target>(tensor: FloatTensor<Autodiff<B>>, autodiff: DispatchAutodiffContext) -> DispatchTensor {
    let kind = DispatchTensorKind::Autodiff(Box::new(B::kind(BackendTensor::Autodiff(tensor))));
    DispatchTensor { kind, autodiff }
}

fn unwrapped<B: Target>(kind: DispatchTensorKind) -> Option<FloatTensor<Autodiff<B>>> {
    Some(match kind {
        DispatchTensorKind::Autodiff(inner) => B::of_kind(*inner)?.autodiff(),
        plain => Autodiff::<B>::from_inner(B::of_kind(plain)?.float()),
    })
}

impl First {
    /// Records the block with its result `out`, and returns it.
    fn record<B: Target>(self, out: Any, model: Arc<Runtime>) -> Any {
        let Self { function, inputs, uses, keys } = self;
        let context = inputs.iter().map(|input| input.autodiff).fold(out.autodiff, DispatchAutodiffContext::merge);
        let unwrap = |tensor: Any| unwrapped::<B>(tensor.kind).unwrap_or_else(|| crate::device::moved());
        let (out, inputs) = (unwrap(out), inputs.into_iter().map(unwrap).collect::<Vec<_>>());
        let device = out.device();
        if out.is_tracked() {
            stop(
                "a checkpointed block uses a tensor that requires a gradient and is neither one of its inputs nor a parameter of the \
                 sharded module: pass it as an input"
                    .into(),
            );
        }
        let token = clock::tick();
        let (Some(token), true) = (token, !uses.is_empty() || inputs.iter().any(|input| input.is_tracked())) else {
            return wrapped::<B>(out, context);
        };
        let nodes: Vec<_> = inputs.iter().map(|input| input.node()).chain([token.node()]).collect();
        let hash = hash::<B>(&out);
        let inputs: Vec<_> = inputs.into_iter().map(|input| held::<B>(input.into_primitive(), &model)).collect();
        if let Some(offloader) = &model.offloader {
            for input in &inputs {
                offloader.move_out(input);
            }
        }
        let ran = Ran { function, inputs, uses, keys, hash, context, device, model };
        let state = State(Arc::new(Mutex::new(Some(ran))));
        let out = out.into_primitive();
        macro_rules! finish {
            ($nodes:expr) => {
                match Node::<B>(PhantomData).prepare::<NoCheckpointing>($nodes).compute_bound().stateful() {
                    OpsKind::Tracked(node) => node.finish(state, out),
                    OpsKind::UnTracked(node) => node.finish(out),
                }
            };
        }
        let mut nodes = nodes.into_iter();
        let out = match std::array::from_fn(|_| nodes.next()) {
            [Some(a), None, None, None] => finish!([a]),
            [Some(a), Some(b), None, None] => finish!([a, b]),
            [Some(a), Some(b), Some(c), None] => finish!([a, b, c]),
            [Some(a), Some(b), Some(c), Some(d)] => finish!([a, b, c, d]),
            _ => unreachable!("blocks have up to three inputs"),
        };
        wrapped::<B>(out, context)
    }
}

/// The block as a node of the outer graph. Its last parent orders it (`clock.rs`).
#[derive(Debug)]
struct Node<B>(PhantomData<B>);

#[derive(Clone)]
struct State<B: Target>(Arc<Mutex<Option<Ran<B>>>>);

impl<B: Target> core::fmt::Debug for State<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Block")
    }
}

impl<B: Target, const N: usize> Backward<B, N> for Node<B> {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let mut ran = ops.state.0.lock().take().expect("a graph runs backward once");
        let (model, device) = (ran.model.clone(), ran.device.clone());
        let inputs = std::mem::take(&mut ran.inputs).into_iter().zip(&ops.parents);
        let leaves: Vec<_> = inputs
            .map(|(input, parent)| {
                let input = B::put(input.tensor(model.offloader.as_deref(), true), &device);
                let leaf = Autodiff::<B>::from_inner(input);
                Autodiff::<B>::float_set_require_grad(leaf, parent.is_some())
            })
            .collect();
        let out = ran.again(leaves.clone());
        let guards = [out.node()];
        let scalar = B::float_zeros(Shape::new([1]), &device, gradient.dtype().into());
        let end = match Seed::<B>(PhantomData).prepare::<NoCheckpointing>(guards).compute_bound().stateful() {
            OpsKind::Tracked(seed) => seed.finish(gradient, scalar),
            OpsKind::UnTracked(_) => changed("its output needs no gradient"),
        };
        drop(out);
        let mut inner = Autodiff::<B>::backward(end);
        for (leaf, parent) in leaves.into_iter().zip(&ops.parents) {
            if let Some(parent) = parent {
                let missing = || B::float_zeros(leaf.shape(), &device, leaf.dtype().into());
                let gradient = Autodiff::<B>::grad_remove(&leaf, &mut inner).unwrap_or_else(missing);
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

/// The end of a block's own graph: passes on the gradient of the block's output.
#[derive(Debug)]
struct Seed<B>(PhantomData<B>);

impl<B: Target> Backward<B, 1> for Seed<B> {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<FloatTensor<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, ops.state);
        }
    }
}
