//! Devices: their memory, and whether they are available. Programs check that before they compute, since CubeCL panics if a driver is
//! missing.

#[cfg(feature = "cuda")]
mod kernel_cache;

use std::any::Any;
use std::panic::{set_hook, take_hook};
use std::sync::{Once, OnceLock};

use burn_backend::Backend;
#[cfg(feature = "cuda")]
use cudarc::driver::{DriverError, result, sys::CUdevice_attribute};
#[cfg(feature = "cuda")]
pub use kernel_cache::cache_kernels;

/// Memory usage of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that tensors of the calling thread's stream hold.
    pub in_use: u64,
    /// Bytes allocated on the device: by all its users, as the driver of an NVIDIA GPU reports; elsewhere by the calling thread's stream,
    /// including memory that it keeps for later.
    pub reserved: u64,
}

/// Returns the memory usage of a device of `B`; `None` if it computes in host memory, or does not answer.
pub fn memory<B: Backend>(device: &B::Device) -> Option<DeviceMemory> {
    let device: &dyn Any = device;
    #[cfg(feature = "cuda")]
    if let Some(device) = device.downcast_ref::<cubecl::cuda::CudaDevice>() {
        let in_use = usage::<cubecl::cuda::CudaRuntime>(device)?.in_use;
        return Some(DeviceMemory { in_use, reserved: cuda_memory_in_use(device.index)? });
    }
    #[cfg(feature = "vulkan")]
    if let Some(device) = device.downcast_ref::<cubecl::wgpu::WgpuDevice>() {
        return usage::<cubecl::wgpu::WgpuRuntime>(device);
    }
    let _ = device;
    None
}

/// Returns the index of a device of `B` among the NVIDIA GPUs that the process sees, if it is one.
pub fn cuda_ordinal<B: Backend>(device: &B::Device) -> Option<usize> {
    let device: &dyn Any = device;
    #[cfg(feature = "cuda")]
    if let Some(device) = device.downcast_ref::<cubecl::cuda::CudaDevice>() {
        return Some(device.index);
    }
    let _ = device;
    None
}

/// Returns the driver's name for a device of `B`, if it is an NVIDIA GPU.
#[cfg(feature = "cuda")]
pub fn cuda_name<B: Backend>(device: &B::Device) -> Option<String> {
    let device = result::device::get(i32::try_from(cuda_ordinal::<B>(device)?).ok()?).ok()?;
    result::device::get_name(device).ok()
}

/// Returns an attribute of an NVIDIA GPU.
#[cfg(feature = "cuda")]
pub(crate) fn attribute(ordinal: i32, attribute: CUdevice_attribute) -> Result<i32, DriverError> {
    let device = result::device::get(ordinal)?;
    // SAFETY: the driver returned the device.
    unsafe { result::device::get_attribute(device, attribute) }
}

fn usage<R: cubecl::Runtime>(device: &R::Device) -> Option<DeviceMemory> {
    let usage = R::client(device).memory_usage().ok()?;
    Some(DeviceMemory { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
}

/// Returns the memory in use on a GPU by any process, as the driver reports it.
#[cfg(feature = "cuda")]
fn cuda_memory_in_use(ordinal: usize) -> Option<u64> {
    let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
    // SAFETY: the driver returned the device, and CubeCL, which computes there, retains its primary context for the life of the process;
    // CubeCL makes it current on its threads in the same way.
    let (free, total) = unsafe {
        let context = result::primary_ctx::retain(device).ok()?;
        result::ctx::set_current(context).ok()?;
        let told = result::mem_get_info();
        result::primary_ctx::release(device).ok()?;
        told.ok()?
    };
    Some((total - free) as u64)
}

/// Returns the bytes of memory of each NVIDIA GPU that the process may use.
///
/// # Errors
///
/// Returns what is missing, and a remedy.
#[cfg(feature = "cuda")]
pub fn cuda() -> Result<Vec<u64>, String> {
    use cubecl::cuda::install::{cccl_include_path, cuda_path, include_path};
    use cudarc::{driver, nvrtc};

    const OR: &str = "or use another backend (cpu)";
    let version = |error: driver::DriverError| format!("the NVIDIA driver reports {error:?}: update it, {OR}");
    // SAFETY: opens and closes a library, which runs its initializers as any program that uses it does.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(format!("no NVIDIA driver was found (libcuda.so): install it, {OR}"));
    }
    // SAFETY: as above.
    if !unsafe { nvrtc::sys::is_culib_present() } || cuda_path().is_none() {
        return Err(format!(
            "CUDA's compiler library (libnvrtc.so) or its headers were not found, and kernels are compiled on this \
             machine: install the CUDA toolkit and set CUDA_PATH to its folder and LD_LIBRARY_PATH to its libraries, \
             {OR}"
        ));
    }
    // Headers that kernels include; the last is in a separate folder since CUDA 13.
    let lacks = ["cuda_fp16.h", "cuda_bf16.h", "cuda/barrier"]
        .into_iter()
        .find(|name| ![include_path(), cccl_include_path()].iter().any(|folder| folder.join(name).exists()));
    if let Some(header) = lacks {
        return Err(format!(
            "CUDA's header {header} is not in {}, and kernels are compiled on this machine: install the headers of the \
             CUDA toolkit (cuda-cudart-dev, cuda-nvrtc-dev, cuda-cccl; PyPI: nvidia-cuda-runtime, nvidia-cuda-cccl, \
             nvidia-cuda-crt) and set CUDA_PATH, {OR}",
            include_path().display()
        ));
    }
    let (mut major, mut minor, mut takes) = (0, 0, 0);
    // SAFETY: both write the numbers passed to them.
    unsafe {
        nvrtc::sys::nvrtcVersion(&mut major, &mut minor);
        driver::sys::cuDriverGetVersion(&mut takes).result().map_err(version)?;
    }
    if 1000 * major + 10 * minor > takes {
        return Err(format!(
            "CUDA's compiler library (libnvrtc.so) has version {major}.{minor}, but the NVIDIA driver supports at most \
             {}.{}: install a newer driver, or set LD_LIBRARY_PATH and CUDA_PATH to a CUDA toolkit that is no newer \
             than the driver, {OR}",
            takes / 1000,
            takes % 1000 / 10
        ));
    }
    let count = match driver::result::init() {
        Err(driver::DriverError(driver::sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
        begun => begun.and_then(|()| driver::result::device::get_count()).map_err(version)?,
    };
    if count == 0 {
        return Err(format!("the NVIDIA driver shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, {OR}"));
    }
    (0..count)
        .map(|ordinal| {
            let device = driver::result::device::get(ordinal).map_err(version)?;
            // SAFETY: the driver returned the device.
            let bytes = unsafe { driver::result::device::total_mem(device) }.map_err(version)?;
            Ok(bytes as u64)
        })
        .collect()
}

/// Beginning of the message of an out-of-memory failure.
pub const OUT_OF_MEMORY: &str = "the device is out of memory";

/// First failure on a thread that submits work to a device, since [`watch`] was called.
static FAILED: OnceLock<String> = OnceLock::new();

/// Records failures on threads that submit work to devices, and the errors that reads get for them, for [`failure`]. CubeCL continues
/// without work that it could not launch, and later results are wrong. Nothing is printed here: the caller of [`failure`] reports it, once.
pub fn watch() {
    static WATCHES: Once = Once::new();
    WATCHES.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref().copied()).unwrap_or("no message");
            // CubeCL's thread names, and the error of a read whose tensor was not computed.
            let is_devices = std::thread::current().name().is_some_and(|name| name.starts_with("DSD-"));
            let is_told =
                ["ServerUnhealthy", "The server is in an invalid state"].iter().any(|words| text.contains(words));
            if is_devices || is_told { failed(text) } else { before(panic) }
        }));
    });
}

/// Records a device's failure, if it is the first.
pub(crate) fn failed(text: &str) {
    FAILED.get_or_init(|| explained(text));
}

/// Returns the failure on a device's thread, and a remedy. No result computed after it can be trusted.
pub fn failure() -> Option<&'static str> {
    FAILED.get().map(String::as_str)
}

/// Returns a failure's message with a remedy.
fn explained(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if has(&["OUT_OF_MEMORY", "allocate buffer", "BufferTooBig"]) {
        // CubeCL reports bytes, not tensors.
        let asked = first.rsplit(' ').next().and_then(|bytes| bytes.parse::<u64>().ok());
        let asked = asked.map_or_else(|| first.to_string(), |bytes| format!("{} MiB more were requested", bytes >> 20));
        return format!(
            "{OUT_OF_MEMORY} ({asked}; nvidia-smi shows the memory of other programs): use a smaller batch with more \
             accumulation, a higher ZeRO stage over more devices, or --offload"
        );
    }
    if has(&["UNSUPPORTED_PTX_VERSION"]) {
        return format!(
            "the NVIDIA driver is older than CUDA's compiler library ({first}): update it, or install an older libnvrtc.so"
        );
    }
    if has(&["Compilation", "PTX"]) {
        // CubeCL reports the compiler's output and the full source: `.. void __launch_bounds__(256)name (..`.
        let name = text.split_once("__launch_bounds__(").and_then(|(_, rest)| rest.split_once(')'));
        let name = name.and_then(|(_, rest)| rest.split_once('(')).map_or("a kernel", |(name, _)| name.trim());
        let why = text.lines().map(str::trim).find(|line| line.contains("error: ") || line.contains("CUDA_ERROR"));
        return format!(
            "{name} could not be compiled for the device ({}): the driver and CUDA's compiler library (libnvrtc.so) \
             may be incompatible with each other or with this program, or the kernel cache belongs to another program; \
             bench/gpu/README.md lists the tested versions",
            why.unwrap_or(first)
        );
    }
    format!("the device failed: {first}")
}

/// Opens the default device of the Vulkan drivers.
///
/// # Errors
///
/// Returns what is missing, and a remedy.
#[cfg(feature = "vulkan")]
pub fn vulkan() -> Result<(), String> {
    use std::panic::catch_unwind;

    use cubecl::Runtime;
    use cubecl::wgpu::WgpuRuntime;

    // The only way to find out is to try, and a failed attempt panics.
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let opened = catch_unwind(|| drop(WgpuRuntime::client(&Default::default())));
    set_hook(hook);
    opened.map_err(|_| {
        "no device with a Vulkan driver was found: install the driver of the graphics card, or a software driver \
         (Debian: mesa-vulkan-drivers), and check vulkaninfo; or use another backend (cpu)"
            .to_string()
    })
}
