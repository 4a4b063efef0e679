//! The suite of laws over a device with Burn's fusion: several ranks share it, and what they exchange stays on it. Mesa's
//! lavapipe, a software device, serves; most of the time is the compilation of kernels.

#[path = "decorator/suite/mod.rs"]
mod suite;

laws!(burn_wgpu::Vulkan);
