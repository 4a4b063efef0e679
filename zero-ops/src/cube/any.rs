//! Access to CubeCL's tensors from generic code: functions for all backends use this to find out which of CubeCL's tensors, if any, a
//! backend has.

use std::any::{Any, TypeId};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_cubecl::CubeRuntime;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::tensor::CubeTensor;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
use burn_fusion::FusionTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::ComputeClient;

use super::many::shaped;
use super::tensor::OnCube;

/// A computation of tensors from tensors, on any runtime.
pub(crate) trait Body: Send + Sync + 'static {
    /// Computes the promised tensors, or flat ones with the same numbers of elements.
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>>;
}

/// Runs `$found` with `$tensor` as the CubeCL tensor type that `$given` is, or else `$otherwise`.
macro_rules! on_the_tensor_of {
    ($given:ty, $tensor:ident => $found:expr, $otherwise:expr) => {{
        #[cfg(feature = "cuda")]
        on_the_tensor_of!(@ cubecl::cuda::CudaRuntime, $given, $tensor => $found);
        #[cfg(feature = "vulkan")]
        on_the_tensor_of!(@ burn_wgpu::WgpuRuntime, $given, $tensor => $found);
        $otherwise
    }};
    (@ $runtime:ty, $given:ty, $tensor:ident => $found:expr) => {
        {
            type $tensor = CubeTensor<$runtime>;
            if TypeId::of::<$given>() == TypeId::of::<$tensor>() {
                return $found;
            }
        }
        {
            type $tensor = FusionTensor<FusionCubeRuntime<$runtime>>;
            if TypeId::of::<$given>() == TypeId::of::<$tensor>() {
                return $found;
            }
        }
    };
}

/// Returns whether the tensors of `B` are CubeCL's, on a runtime that this crate was built for.
pub fn has_cube_tensors<B: Backend>() -> bool {
    on_the_tensor_of!(FloatTensor<B>, T => { let _ = TypeId::of::<T>(); true }, false)
}

/// Runs `body` to compute tensors of the shapes and types `outputs` from `inputs`, of which there is at least one: at once, or when fusion
/// executes it.
///
/// # Panics
///
/// If [`has_cube_tensors`] is false.
pub(crate) fn run<B: Backend>(
    name: &'static str,
    inputs: Vec<FloatTensor<B>>,
    outputs: Vec<(Shape, DType)>,
    body: impl Body,
) -> Vec<FloatTensor<B>> {
    let shapes: Vec<Shape> = outputs.iter().map(|(shape, _)| shape.clone()).collect();
    on_the_tensor_of!(
        FloatTensor<B>,
        T => {
            let run = move |inputs| {
                let made = body.run(inputs).into_iter().zip(&shapes);
                made.map(|(made, shape)| if made.meta.shape() == shape { made } else { shaped(made, shape.clone()) }).collect()
            };
            same(T::run(name, same::<Vec<FloatTensor<B>>, Vec<T>>(inputs), outputs, run))
        },
        panic!("the backend's tensors are not CubeCL's: check has_cube_tensors first")
    )
}

/// A computation of a tensor from no inputs, on any runtime, at once.
pub(crate) trait Born {
    fn make<R: CubeRuntime>(&self, device: &R::Device) -> Option<CubeTensor<R>>;
}

/// Returns the tensor that `what` computes on a device of `B`, if `B`'s tensors are CubeCL's and it computes one.
pub(crate) fn born<B: Backend>(device: &B::Device, what: &impl Born) -> Option<FloatTensor<B>> {
    let device: &dyn Any = device;
    on_the_tensor_of!(
        FloatTensor<B>,
        T => {
            let device = device.downcast_ref::<<<T as OnCube>::Runtime as cubecl::Runtime>::Device>()?;
            Some(same(T::from_memory(what.make::<<T as OnCube>::Runtime>(device)?)))
        },
        {
            let _ = (device, what);
            None
        }
    )
}

/// Values being copied from a device to the host, see [`begin_read`].
pub struct Read(Box<dyn FnOnce() -> Result<Vec<TensorData>, String> + Send>);

impl Read {
    /// Waits for the values and returns them in the order of the tensors.
    ///
    /// # Panics
    ///
    /// If the device has failed.
    pub fn wait(self) -> Vec<TensorData> {
        (self.0)().unwrap_or_else(|error| panic!("reading tensors from the device failed: {error}"))
    }
}

/// Begins to copy tensors to the host after all work submitted to the device so far, without waiting for it.
///
/// # Panics
///
/// If [`has_cube_tensors`] is false, or there is no tensor.
pub fn begin_read<B: Backend>(tensors: Vec<FloatTensor<B>>) -> Read {
    on_the_tensor_of!(
        FloatTensor<B>,
        T => read_of(T::into_memory(same::<Vec<FloatTensor<B>>, Vec<T>>(tensors))),
        panic!("the backend's tensors are not CubeCL's: check has_cube_tensors first")
    )
}

/// Submits all work that the calling thread has queued for a device of `B`, without waiting for the device. Burn's fusion would submit it
/// only when a result is read.
pub fn send<B: Backend>(device: &B::Device) {
    let device: &dyn Any = device;
    on_the_tensor_of!(
        FloatTensor<B>,
        T => device.downcast_ref().into_iter().for_each(T::send),
        ()
    );
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
fn read_of<R: CubeRuntime>(tensors: Vec<CubeTensor<R>>) -> Read {
    use std::future::poll_fn;
    use std::task::{Context, Poll, Waker};

    use cubecl::server::CopyDescriptor;

    let tensors: Vec<_> = tensors.into_iter().map(super::tensor::packed).collect();
    let client = tensors.first().expect("there is a tensor to read").client.clone();
    let descriptor = |x: &CubeTensor<R>| {
        let (shape, strides) = (x.meta.shape().clone(), x.meta.strides().clone());
        CopyDescriptor::new(x.handle.clone().binding(), shape, strides, x.elem_size())
    };
    let descriptors = tensors.iter().map(descriptor).collect();
    // The call submits the copies, and its result borrows the client. CUDA's future blocks on the copies when it is first polled, so it is
    // polled only when this one is polled a second time.
    let mut copies = Box::pin(async move {
        let copies = client.read_tensor_async(descriptors);
        let mut is_first = true;
        poll_fn(|_| if std::mem::take(&mut is_first) { Poll::Pending } else { Poll::Ready(()) }).await;
        copies.await
    });
    let is_begun = copies.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
    debug_assert!(is_begun, "nothing is read in the first poll");
    let about: Vec<(Shape, DType)> = tensors.iter().map(|x| (x.shape(), x.dtype)).collect();
    Read(Box::new(move || {
        let copied = cubecl::reader::read_sync(copies).map_err(|error| format!("{error:?}"))?;
        let data = copied.into_iter().zip(about);
        Ok(data.map(|(bytes, (shape, dtype))| TensorData::from_bytes(bytes, shape, dtype)).collect())
    }))
}

/// A question to a device, on any runtime.
pub(crate) trait Question {
    fn answer<R: CubeRuntime>(&self, client: &ComputeClient<R>) -> bool;
}

/// Returns whether a device of `B` is CubeCL's and the answer to `what` is yes.
pub(crate) fn asked<B: Backend>(device: &B::Device, what: &impl Question) -> bool {
    let device: &dyn Any = device;
    on_the_tensor_of!(
        FloatTensor<B>,
        T => {
            let device = device.downcast_ref::<<<T as OnCube>::Runtime as cubecl::Runtime>::Device>();
            device.is_some_and(|device| what.answer(&<<T as OnCube>::Runtime as cubecl::Runtime>::client(device)))
        },
        {
            let _ = (device, what);
            false
        }
    )
}

#[cfg(feature = "cuda")]
pub use zero_kernels::device::{CudaSpan, End};

/// An operation that runs on a CUDA device concurrently with the device's other work, together with the memory that it reads. When the last
/// handle is dropped, later work is ordered after the operation, so that its memory can be reused.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub struct OnCuda(std::sync::Arc<Begun>);

#[cfg(feature = "cuda")]
#[derive(Default)]
struct Begun(std::sync::Mutex<Option<(End, Box<dyn Any + Send>)>>);

#[cfg(feature = "cuda")]
impl Begun {
    fn end(&self) {
        let begun = self.0.lock().expect("no thread panics while it holds the lock").take();
        if let Some((end, inputs)) = begun {
            end();
            drop(inputs);
        }
    }
}

#[cfg(feature = "cuda")]
impl Drop for Begun {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(feature = "cuda")]
impl OnCuda {
    /// Returns `tensors`, the operation's outputs, for use by later work.
    pub fn end<B: Backend>(&self, tensors: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        struct Pass(OnCuda);

        impl Body for Pass {
            fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
                (self.0).0.end();
                inputs
            }
        }

        let outputs = tensors.iter().map(|tensor| (tensor.shape(), tensor.dtype())).collect();
        run::<B>("end of a concurrent operation", tensors, outputs, Pass(self.clone()))
    }
}

/// Has `begin` start writing tensors of the shapes and types `outputs` from `inputs`, of which there is at least one. It gets their
/// addresses, row-major without gaps, and is called at once or when fusion executes it. The work that it starts must come after all work
/// submitted to the device's primary context before. The [`End`] that it returns makes later work wait; `None` means that it started
/// nothing. The outputs may be used only through [`OnCuda::end`].
///
/// # Errors
///
/// Returns the inputs if the backend's tensors are not on CUDA.
#[cfg(feature = "cuda")]
#[allow(clippy::type_complexity)] // The arguments given back.
pub fn begin_on_cuda<B: Backend>(
    name: &'static str,
    inputs: Vec<FloatTensor<B>>,
    outputs: Vec<(Shape, DType)>,
    begin: impl Fn(&[CudaSpan], &[CudaSpan]) -> Option<End> + Send + Sync + 'static,
) -> Result<(Vec<FloatTensor<B>>, OnCuda), Vec<FloatTensor<B>>> {
    type Plain = CubeTensor<cubecl::cuda::CudaRuntime>;
    type Fused = FusionTensor<FusionCubeRuntime<cubecl::cuda::CudaRuntime>>;

    struct ByAddress<F> {
        outputs: Vec<(Shape, DType)>,
        begin: F,
        begun: OnCuda,
    }

    impl<F> Body for ByAddress<F>
    where
        F: Fn(&[CudaSpan], &[CudaSpan]) -> Option<End> + Send + Sync + 'static,
    {
        fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
            let inputs: Vec<Plain> = same(inputs);
            let inputs: Vec<Plain> = inputs.into_iter().map(super::tensor::packed).collect();
            let first = inputs.first().expect("there is at least one input");
            let make = |(shape, dtype): &(Shape, DType)| super::tensor::empty(first, shape.clone(), *dtype);
            let outputs: Vec<Plain> = self.outputs.iter().map(make).collect();
            let spans = |memory: &[Plain]| memory.iter().map(span).collect::<Vec<_>>();
            if let Some(end) = (self.begin)(&spans(&inputs), &spans(&outputs)) {
                // Both sides' memory is held until later work is ordered: the outputs too may be dropped before that.
                let held: Box<dyn Any + Send> = Box::new((inputs, outputs.clone()));
                *self.begun.0.0.lock().expect("no thread panics while it holds the lock") = Some((end, held));
            }
            same(outputs)
        }
    }

    let given = TypeId::of::<FloatTensor<B>>();
    if given != TypeId::of::<Plain>() && given != TypeId::of::<Fused>() {
        return Err(inputs);
    }
    let begun = OnCuda(std::sync::Arc::default());
    let body = ByAddress { outputs: outputs.clone(), begin, begun: begun.clone() };
    Ok((run::<B>(name, inputs, outputs, body), begun))
}

/// Returns the memory of tensors if they are CubeCL's, otherwise the tensors.
#[allow(clippy::type_complexity)] // The arguments given back.
pub(crate) fn into_memory<B: Backend>(
    tensors: Vec<FloatTensor<B>>,
) -> Result<Vec<Box<dyn Memory<B>>>, Vec<FloatTensor<B>>> {
    on_the_tensor_of!(
        FloatTensor<B>,
        T => {
            let memory = T::into_memory(same::<Vec<FloatTensor<B>>, Vec<T>>(tensors));
            Ok(memory.into_iter().map(|memory| Box::new(Of::<T>(memory)) as Box<dyn Memory<B>>).collect())
        },
        Err(tensors)
    )
}

/// A tensor's memory, usable by any thread.
pub(crate) trait Memory<B: Backend>: Send + Sync {
    fn tensor(&self) -> FloatTensor<B>;

    fn into_tensor(self: Box<Self>) -> FloatTensor<B>;

    fn duplicate(&self) -> Box<dyn Memory<B>>;

    /// Returns its address, if it is on CUDA and row-major without gaps.
    #[cfg(feature = "cuda")]
    fn on_cuda(&self) -> Option<CudaSpan>;
}

/// Memory of tensors of type `T`.
struct Of<T: OnCube>(CubeTensor<T::Runtime>);

impl<B: Backend, T: OnCube> Memory<B> for Of<T> {
    fn tensor(&self) -> FloatTensor<B> {
        same(T::from_memory(self.0.clone()))
    }

    fn into_tensor(self: Box<Self>) -> FloatTensor<B> {
        same(T::from_memory(self.0))
    }

    fn duplicate(&self) -> Box<dyn Memory<B>> {
        Box::new(Self(self.0.clone()))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self) -> Option<CudaSpan> {
        let memory: &dyn Any = &self.0;
        let memory = memory.downcast_ref::<CubeTensor<cubecl::cuda::CudaRuntime>>()?;
        memory.is_contiguous().then(|| span(memory))
    }
}

/// Returns the address of a tensor without gaps. Waits until the device's thread has launched all earlier work.
#[cfg(feature = "cuda")]
fn span(memory: &CubeTensor<cubecl::cuda::CudaRuntime>) -> CudaSpan {
    let resource = memory.client.get_resource(memory.handle.clone()).expect("the handle keeps its memory");
    CudaSpan { pointer: resource.resource().ptr, elements: elements(memory) }
}

/// Allocates uninitialized memory on a CUDA device of `B`, or returns `None` if `B` has other devices.
#[cfg(feature = "cuda")]
pub(crate) fn uninit_on_cuda<B: Backend>(
    device: &B::Device,
    shape: Shape,
    dtype: DType,
) -> Option<(Box<dyn Memory<B>>, CudaSpan)> {
    use cubecl::Runtime;
    use cubecl::cuda::CudaRuntime;

    let device: &dyn Any = device;
    let device = device.downcast_ref::<cubecl::cuda::CudaDevice>()?.clone();
    let client = CudaRuntime::client(&device);
    let memory = burn_cubecl::ops::numeric::empty_device_contiguous_dtype::<CudaRuntime>(client, device, shape, dtype);
    let span = span(&memory);
    on_the_tensor_of!(FloatTensor<B>, T => Some((Box::new(Of::<T>(same(memory))), span)), None)
}

/// Returns `value` as the type `T`, which is `A`.
pub(crate) fn same<A: 'static, T: 'static>(value: A) -> T {
    let mut value = Some(value);
    let value = (&mut value as &mut dyn Any).downcast_mut::<Option<T>>();
    value.and_then(Option::take).expect("the types are equal")
}

/// Returns the number of elements of a tensor.
pub(crate) fn elements(x: &impl TensorMetadata) -> usize {
    x.shape().num_elements()
}

/// Returns whether kernels can index this many elements in 32 bit, with room for one more chunk.
pub(crate) fn is_countable(elements: usize) -> bool {
    i32::try_from(elements).is_ok()
}
