//! Running kernels on CubeCL's tensors: at once, or when Burn's fusion executes them.

use std::fmt;
use std::sync::{Arc, Mutex};

use burn_backend::TensorMetadata;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime};
use burn_fusion::FusionTensor;
use burn_fusion::client::GlobalFusionClient;
use burn_fusion::stream::{Operation, OperationStreams};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, OperationIr, TensorIr};
use burn_std::{DType, Shape};

/// Launches a kernel without bounds checks on a client, with the launch's layout, tensors and other arguments. The kernel takes the tensors
/// as arrays: shapes and strides are separate arguments, passed with the launch, whereas CubeCL uploads those of its tensors.
macro_rules! launch {
    ($kernel:ident on $client:expr, ($($layout:expr),+), [$($tensor:expr),*] $(, $argument:expr)* $(,)?) => {{
        let client = $client.clone();
        $kernel::launch_unchecked(&client, $($layout,)+ $($tensor.into_array_arg(),)* $($argument),*);
    }};
}

pub(super) use launch;

/// A tensor on a device that CubeCL kernels run on.
pub(crate) trait OnCube: TensorMetadata + Clone + Sized + 'static {
    /// The device's runtime.
    type Runtime: CubeRuntime;

    /// Runs `body` to compute tensors of the shapes and types `outputs` from `inputs`, of which there is at least one.
    ///
    /// If nobody else holds a tensor, `body` may write to its memory and return it (`handle.can_mut()`).
    fn run(
        name: &'static str,
        inputs: Vec<Self>,
        outputs: Vec<(Shape, DType)>,
        body: impl Fn(Vec<CubeTensor<Self::Runtime>>) -> Vec<CubeTensor<Self::Runtime>> + Send + Sync + 'static,
    ) -> Vec<Self>;

    /// Submits all work queued on the thread's stream, without waiting for the device.
    fn send(device: &<Self::Runtime as cubecl::Runtime>::Device);

    /// Submits all work that computes these tensors, and returns the memory that will hold them.
    fn into_memory(tensors: Vec<Self>) -> Vec<CubeTensor<Self::Runtime>>;

    /// Returns the calling thread's tensor in this memory.
    fn from_memory(memory: CubeTensor<Self::Runtime>) -> Self;
}

/// Calls [`OnCube::run`] with the number of inputs that `body` expects, and an optional one after them.
pub(crate) fn run<T: OnCube, const INPUTS: usize, const OUTPUTS: usize>(
    name: &'static str,
    inputs: [T; INPUTS],
    more: Option<T>,
    outputs: [(Shape, DType); OUTPUTS],
    body: impl Fn(Many<T, INPUTS>, Option<CubeTensor<T::Runtime>>) -> Many<T, OUTPUTS> + Send + Sync + 'static,
) -> [T; OUTPUTS] {
    let inputs = inputs.into_iter().chain(more).collect();
    let made = T::run(name, inputs, outputs.into(), move |given| {
        let mut given = given.into_iter();
        body(first(&mut given), given.next()).into()
    });
    made.try_into().unwrap_or_else(|_| unreachable!("the kernel returns all outputs"))
}

type Many<T, const N: usize> = [CubeTensor<<T as OnCube>::Runtime>; N];

/// Returns the first inputs of an operation.
pub(crate) fn first<T, const N: usize>(given: &mut impl Iterator<Item = T>) -> [T; N] {
    std::array::from_fn(|_| given.next().expect("all inputs are passed on"))
}

impl<R: CubeRuntime> OnCube for CubeTensor<R> {
    type Runtime = R;

    fn run(
        _name: &'static str,
        inputs: Vec<Self>,
        outputs: Vec<(Shape, DType)>,
        body: impl Fn(Vec<Self>) -> Vec<Self> + Send + Sync + 'static,
    ) -> Vec<Self> {
        let made = body(inputs);
        check(&made, &outputs);
        made
    }

    fn send(_device: &R::Device) {}

    fn into_memory(tensors: Vec<Self>) -> Vec<Self> {
        if let Some(first) = tensors.first() {
            // An error reported here is not reported again by a read.
            if let Err(error) = first.client.flush() {
                crate::devices::failed(&error.to_string());
            }
        }
        tensors
    }

    fn from_memory(memory: Self) -> Self {
        memory
    }
}

impl<R: CubeRuntime> OnCube for FusionTensor<FusionCubeRuntime<R>> {
    type Runtime = R;

    fn run(
        name: &'static str,
        inputs: Vec<Self>,
        outputs: Vec<(Shape, DType)>,
        body: impl Fn(Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> + Send + Sync + 'static,
    ) -> Vec<Self> {
        let client = inputs.first().expect("an operation has at least one input").client.clone();
        let streams = OperationStreams::with_inputs(&inputs);
        let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
        let outputs: Vec<TensorIr> = outputs
            .into_iter()
            .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
            .collect();
        register(&client, streams, CustomOpIr::new(name, &inputs, &outputs), move |operation, handles| {
            let inputs = operation.inputs.iter().map(|input| handles.get_float_tensor::<Plain<R>>(input)).collect();
            let made = body(inputs);
            let about = |output: &TensorIr| (output.shape.clone(), output.dtype);
            check(&made, &operation.outputs.iter().map(about).collect::<Vec<_>>());
            for (made, output) in made.into_iter().zip(&operation.outputs) {
                handles.register_float_tensor::<Plain<R>>(&output.id, made);
            }
        })
    }

    fn send(device: &R::Device) {
        GlobalFusionClient::<FusionCubeRuntime<R>>::load(device).sync(|| ());
    }

    fn into_memory(tensors: Vec<Self>) -> Vec<CubeTensor<R>> {
        let Some(client) = tensors.first().map(|first| first.client.clone()) else { return Vec::new() };
        let given: Vec<Arc<Place<R>>> = tensors
            .into_iter()
            .map(|tensor| {
                let place = Arc::new(Mutex::new(None));
                let streams = OperationStreams::with_inputs([&tensor]);
                let (description, to) = (CustomOpIr::new("give", &[tensor.into_ir()], &[]), place.clone());
                register(&client, streams, description, move |give, handles| {
                    let tensor = handles.get_float_tensor::<Plain<R>>(&give.inputs[0]);
                    *to.lock().expect("no thread panics while it holds the lock") = Some(tensor);
                });
                place
            })
            .collect();
        // Submits the work of the thread's stream; does not wait for the device.
        client.sync(|| ());
        given.into_iter().map(|place| taken(&place).expect("the stream has run all operations")).collect()
    }

    fn from_memory(memory: CubeTensor<R>) -> Self {
        let client = GlobalFusionClient::<FusionCubeRuntime<R>>::load(&memory.device);
        let output = TensorIr::uninit(client.create_empty_handle(), memory.shape(), memory.dtype);
        let memory = Mutex::new(Some(memory));
        let description = CustomOpIr::new("take", &[], &[output]);
        let mut made = register(&client, OperationStreams::default(), description, move |take, handles| {
            let memory = taken(&memory).expect("an operation runs once");
            handles.register_float_tensor::<Plain<R>>(&take.outputs[0].id, memory);
        });
        made.swap_remove(0)
    }
}

/// One of a runtime's backends: all have the same tensors.
pub(crate) type Plain<R> = CubeBackend<R, f32, i32, u8>;

/// Tensors of a fusion stream.
type Handles<R> = HandleContainer<<Plain<R> as BackendIr>::Handle>;

/// A slot to which a stream moves a tensor's memory, or from which it takes it.
type Place<R> = Mutex<Option<CubeTensor<R>>>;

fn taken<R: CubeRuntime>(place: &Place<R>) -> Option<CubeTensor<R>> {
    place.lock().expect("no thread panics while it holds the lock").take()
}

/// An operation in a fusion stream, run when the stream reaches it.
struct Deferred<F> {
    description: CustomOpIr,
    execute: F,
}

/// Adds an operation to a fusion stream, and returns its outputs.
fn register<R: CubeRuntime>(
    client: &GlobalFusionClient<FusionCubeRuntime<R>>,
    streams: OperationStreams,
    description: CustomOpIr,
    execute: impl Fn(&CustomOpIr, &mut Handles<R>) + Send + Sync + 'static,
) -> Vec<FusionTensor<FusionCubeRuntime<R>>> {
    client.register(streams, OperationIr::Custom(description.clone()), Deferred { description, execute })
}

impl<F> fmt::Debug for Deferred<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.description)
    }
}

impl<R: CubeRuntime, F: Fn(&CustomOpIr, &mut Handles<R>) + Send + Sync> Operation<FusionCubeRuntime<R>>
    for Deferred<F>
{
    fn execute(&self, handles: &mut Handles<R>) {
        (self.execute)(&self.description, handles);
    }
}

/// Checks that results have the promised shapes and types: fusion has used these before the tensors exist.
fn check<R: CubeRuntime>(made: &[CubeTensor<R>], expected: &[(Shape, DType)]) {
    assert_eq!(made.len(), expected.len(), "wrong number of outputs of a kernel");
    for (made, (shape, dtype)) in made.iter().zip(expected) {
        assert_eq!((&made.shape(), made.dtype), (shape, *dtype), "wrong shape or type of a kernel's output");
    }
}

/// Allocates an uninitialized tensor on `like`'s device, row-major without gaps.
pub(crate) fn empty<R: CubeRuntime>(like: &CubeTensor<R>, shape: impl Into<Shape>, dtype: DType) -> CubeTensor<R> {
    let empty = empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype);
    debug_assert!(empty.is_contiguous());
    empty
}

/// Returns `x` row-major without gaps; copies only if it is not so already.
pub(crate) fn packed<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.is_contiguous() { x } else { into_contiguous(x) }
}

/// Returns whether the kernels here read and write the type.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}
