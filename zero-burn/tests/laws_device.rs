//! The suite of laws over a device with Burn's fusion: several ranks share it, and exchanged tensors stay on it. Mesa's lavapipe, a
//! software device, suffices; most of the time goes to compiling kernels. With the feature `cuda` alone, the device is an NVIDIA GPU.
#![cfg(any(feature = "vulkan", feature = "cuda"))]

#[path = "decorator/suite/mod.rs"]
mod suite;

#[cfg(not(feature = "vulkan"))]
laws!(burn_cuda::Cuda);
#[cfg(feature = "vulkan")]
laws!(burn_wgpu::Vulkan);
