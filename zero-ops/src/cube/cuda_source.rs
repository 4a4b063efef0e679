//! CUDA's source of a kernel, made without a GPU: what tests can know of it here.

use burn_wgpu::WgpuRuntime;
use cubecl::CubeTask;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::ExecutionMode;

use super::many::UNITS;

type Cuda = <CudaRuntime as Runtime>::Compiler;

/// What a kernel is made with: CubeCL asks the client for types that a device has, whatever the kernel is compiled for.
pub(super) fn settings() -> (KernelSettings, ComputeClient<WgpuRuntime>) {
    let settings = KernelSettings::default().cube_dim(CubeDim::new_1d(UNITS)).address_type(AddressType::U32);
    (settings, WgpuRuntime::client(&Default::default()))
}

/// The source.
pub(super) fn source<K: CubeKernel>(kernel: K) -> String {
    let address = kernel.address_type();
    let task = KernelTask::<Cuda, K>::new(kernel);
    let compiled = task.compile(&mut Cuda::default(), &Default::default(), ExecutionMode::Unchecked, address);
    compiled.expect("CUDA's compiler takes the kernel").source
}

/// The compilation arguments of `count` arrays.
pub(super) fn arrays<S: FromIterator<ArrayCompilationArg>>(count: usize) -> S {
    (0..count).map(|_| array()).collect()
}

pub(super) fn array() -> ArrayCompilationArg {
    ArrayCompilationArg { inplace: None }
}

/// The compilation argument of a scalar or of a struct of them.
pub(super) fn scalars<T: LaunchArg>(argument: T::RuntimeArg<WgpuRuntime>) -> T::CompilationArg {
    let mut launcher = KernelLauncher::<WgpuRuntime>::new(settings().0);
    T::register(argument, &mut launcher)
}
