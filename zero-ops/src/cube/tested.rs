//! Device of the kernels' tests: a Vulkan one, which may be in software, or, built with the feature `cuda` and without `vulkan`, an NVIDIA
//! GPU.

use burn_cubecl::CubeBackend;

#[cfg(not(feature = "vulkan"))]
pub use cubecl::cuda::CudaRuntime as TestRuntime;
#[cfg(feature = "vulkan")]
pub use cubecl::wgpu::WgpuRuntime as TestRuntime;

/// The backend without fusion.
pub type Plain = CubeBackend<TestRuntime, f32, i32, u8>;
/// The backend with fusion.
#[allow(dead_code)] // Not all tests that have this file use it.
pub type Fused = burn_fusion::Fusion<Plain>;
