//! Running kernels on tensors that are CubeCL's: at once, or when Burn's fusion comes to them.

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

/// A tensor on a device that CubeCL kernels run on.
pub(crate) trait OnCube: TensorMetadata + Clone + Sized + 'static {
    /// The device's runtime.
    type Runtime: CubeRuntime;

    /// Has `body` make tensors of the shapes and types `outputs` from `inputs`, of which there is at least one.
    ///
    /// A tensor that nobody else holds comes with memory that `body` may write to and return
    /// (`handle.can_mut()`).
    fn run(
        name: &'static str,
        inputs: Vec<Self>,
        outputs: Vec<(Shape, DType)>,
        body: impl Fn(Vec<CubeTensor<Self::Runtime>>) -> Vec<CubeTensor<Self::Runtime>> + Send + Sync + 'static,
    ) -> Vec<Self>;

    /// Sends all that makes these tensors to the device, and gives the memory that they will be in.
    fn into_memory(tensors: Vec<Self>) -> Vec<CubeTensor<Self::Runtime>>;

    /// The calling thread's tensor in this memory.
    fn from_memory(memory: CubeTensor<Self::Runtime>) -> Self;
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

    fn into_memory(tensors: Vec<Self>) -> Vec<Self> {
        if let Some(first) = tensors.first() {
            // What a kernel met is told by the read that follows it.
            let _ = first.client.flush();
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
        let description = CustomOpIr::new(name, &inputs, &outputs);
        client.register(streams, OperationIr::Custom(description.clone()), Deferred { description, body })
    }

    fn into_memory(tensors: Vec<Self>) -> Vec<CubeTensor<R>> {
        let Some(client) = tensors.first().map(|first| first.client.clone()) else { return Vec::new() };
        let taken: Vec<Arc<Place<R>>> = tensors
            .into_iter()
            .map(|tensor| {
                let place = Arc::new(Mutex::new(None));
                let streams = OperationStreams::with_inputs([&tensor]);
                let input = tensor.into_ir();
                let description = CustomOpIr::new("give", std::slice::from_ref(&input), &[]);
                client.register(streams, OperationIr::Custom(description), Give { input, place: place.clone() });
                place
            })
            .collect();
        // Runs what the thread's stream has been given; the device is not waited for.
        client.sync(|| ());
        let take = |place: Arc<Place<R>>| place.lock().expect("nobody panics with it").take();
        taken.into_iter().map(|place| take(place).expect("the stream has run all that it was given")).collect()
    }

    fn from_memory(memory: CubeTensor<R>) -> Self {
        let client = GlobalFusionClient::<FusionCubeRuntime<R>>::load(&memory.device);
        let output = TensorIr::uninit(client.create_empty_handle(), memory.shape(), memory.dtype);
        let description = CustomOpIr::new("take", &[], std::slice::from_ref(&output));
        let take = Take { output, memory: Mutex::new(Some(memory)) };
        client.register(OperationStreams::default(), OperationIr::Custom(description), take).swap_remove(0)
    }
}

/// Where a tensor's memory is put when a stream comes to it.
type Place<R> = Mutex<Option<CubeTensor<R>>>;

/// Takes a tensor out of a fusion stream.
struct Give<R: CubeRuntime> {
    input: TensorIr,
    place: Arc<Place<R>>,
}

/// Puts a tensor into a fusion stream.
struct Take<R: CubeRuntime> {
    output: TensorIr,
    memory: Place<R>,
}

impl<R: CubeRuntime> fmt::Debug for Give<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "give {:?}", self.input)
    }
}

impl<R: CubeRuntime> fmt::Debug for Take<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "take {:?}", self.output)
    }
}

impl<R: CubeRuntime> Operation<FusionCubeRuntime<R>> for Give<R> {
    fn execute(&self, handles: &mut HandleContainer<<Plain<R> as BackendIr>::Handle>) {
        let tensor = handles.get_float_tensor::<Plain<R>>(&self.input);
        *self.place.lock().expect("nobody panics with it") = Some(tensor);
    }
}

impl<R: CubeRuntime> Operation<FusionCubeRuntime<R>> for Take<R> {
    fn execute(&self, handles: &mut HandleContainer<<Plain<R> as BackendIr>::Handle>) {
        let memory = self.memory.lock().expect("nobody panics with it").take();
        handles.register_float_tensor::<Plain<R>>(&self.output.id, memory.expect("an operation runs once"));
    }
}

/// An operation in a fusion stream, run when the stream comes to it.
struct Deferred<F> {
    description: CustomOpIr,
    body: F,
}

impl<F> fmt::Debug for Deferred<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.description)
    }
}

/// Which of a runtime's backends: all have the same tensors.
type Plain<R> = CubeBackend<R, f32, i32, u8>;

impl<R, F> Operation<FusionCubeRuntime<R>> for Deferred<F>
where
    R: CubeRuntime,
    F: Fn(Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> + Send + Sync,
{
    fn execute(&self, handles: &mut HandleContainer<<Plain<R> as BackendIr>::Handle>) {
        let inputs = self.description.inputs.iter().map(|input| handles.get_float_tensor::<Plain<R>>(input)).collect();
        let made = (self.body)(inputs);
        let expected: Vec<(Shape, DType)> =
            self.description.outputs.iter().map(|output| (output.shape.clone(), output.dtype)).collect();
        check(&made, &expected);
        for (made, output) in made.into_iter().zip(&self.description.outputs) {
            handles.register_float_tensor::<Plain<R>>(&output.id, made);
        }
    }
}

/// What was promised is what came: fusion has told others the shapes before they exist.
fn check<R: CubeRuntime>(made: &[CubeTensor<R>], expected: &[(Shape, DType)]) {
    assert_eq!(made.len(), expected.len(), "a kernel makes the tensors that it was said to make");
    for (made, (shape, dtype)) in made.iter().zip(expected) {
        assert_eq!((&made.shape(), made.dtype), (shape, *dtype), "a kernel makes what it was said to make");
    }
}

/// A new tensor beside `like`, row-major without gaps, its elements whatever was in memory.
pub(crate) fn empty<R: CubeRuntime>(like: &CubeTensor<R>, shape: impl Into<Shape>, dtype: DType) -> CubeTensor<R> {
    let empty = empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype);
    debug_assert!(empty.is_contiguous());
    empty
}

/// Row-major without gaps; a copy only if it is not.
pub(crate) fn packed<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.is_contiguous() { x } else { into_contiguous(x) }
}
