//! Devices: whether they can be had, asked before anything is computed on them, since CubeCL panics where a driver is
//! missing; and their memory.

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

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that tensors of the calling thread's stream hold.
    pub in_use: u64,
    /// Bytes taken from the device: by all its users, as the driver of an NVIDIA GPU says; elsewhere by the calling thread's
    /// stream, for what it holds and what it keeps for later.
    pub reserved: u64,
}

/// The memory of a device of `B`; `None` if it computes in the host's memory, or does not answer.
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

/// The number of a device of `B` among the NVIDIA GPUs that the process sees, if it is one.
pub fn cuda_ordinal<B: Backend>(device: &B::Device) -> Option<usize> {
    let device: &dyn Any = device;
    #[cfg(feature = "cuda")]
    if let Some(device) = device.downcast_ref::<cubecl::cuda::CudaDevice>() {
        return Some(device.index);
    }
    let _ = device;
    None
}

/// What the driver calls a device of `B`, if it is an NVIDIA GPU.
#[cfg(feature = "cuda")]
pub fn cuda_name<B: Backend>(device: &B::Device) -> Option<String> {
    let device = result::device::get(i32::try_from(cuda_ordinal::<B>(device)?).ok()?).ok()?;
    result::device::get_name(device).ok()
}

/// An attribute of an NVIDIA GPU.
#[cfg(feature = "cuda")]
pub(crate) fn attribute(ordinal: i32, attribute: CUdevice_attribute) -> Result<i32, DriverError> {
    let device = result::device::get(ordinal)?;
    // SAFETY: a device of the driver's.
    unsafe { result::device::get_attribute(device, attribute) }
}

fn usage<R: cubecl::Runtime>(device: &R::Device) -> Option<DeviceMemory> {
    let usage = R::client(device).memory_usage().ok()?;
    Some(DeviceMemory { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
}

/// What the driver says is taken of a GPU, by whomever.
#[cfg(feature = "cuda")]
fn cuda_memory_in_use(ordinal: usize) -> Option<u64> {
    let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
    // SAFETY: the device is the driver's own, and its primary context is retained by CubeCL, which computes there, for as
    // long as the process lives; making it current is what CubeCL does on the threads that it uses.
    let (free, total) = unsafe {
        let context = result::primary_ctx::retain(device).ok()?;
        result::ctx::set_current(context).ok()?;
        let told = result::mem_get_info();
        result::primary_ctx::release(device).ok()?;
        told.ok()?
    };
    Some((total - free) as u64)
}

/// Bytes of memory of each NVIDIA GPU that the process may use.
///
/// # Errors
///
/// What is missing, and what to do.
#[cfg(feature = "cuda")]
pub fn cuda() -> Result<Vec<u64>, String> {
    use cubecl::cuda::install::{cccl_include_path, cuda_path, include_path};
    use cudarc::{driver, nvrtc};

    const OR: &str = "or compute on another backend (cpu)";
    let version = |error: driver::DriverError| format!("the NVIDIA driver answers {error:?}: update it, {OR}");
    // SAFETY: opens and closes a library, which runs its initialisers as any program that uses it does.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(format!("no NVIDIA driver was found (libcuda.so): install it, {OR}"));
    }
    // SAFETY: as above.
    if !unsafe { nvrtc::sys::is_culib_present() } || cuda_path().is_none() {
        return Err(format!(
            "kernels are compiled on this machine, and CUDA's compiler library (libnvrtc.so) or its headers were not found: \
             install the CUDA toolkit and set CUDA_PATH to its folder and LD_LIBRARY_PATH to its libraries, {OR}"
        ));
    }
    // What kernels include; the last is in a folder of its own since CUDA 13.
    let lacks = ["cuda_fp16.h", "cuda_bf16.h", "cuda/barrier"]
        .into_iter()
        .find(|name| ![include_path(), cccl_include_path()].iter().any(|folder| folder.join(name).exists()));
    if let Some(header) = lacks {
        return Err(format!(
            "kernels are compiled on this machine, and CUDA's header {header} is not in {}: install the headers of the CUDA toolkit \
             (cuda-cudart-dev, cuda-nvrtc-dev, cuda-cccl; PyPI: nvidia-cuda-runtime, nvidia-cuda-cccl, nvidia-cuda-crt) and set \
             CUDA_PATH, {OR}",
            include_path().display()
        ));
    }
    let (mut major, mut minor, mut takes) = (0, 0, 0);
    // SAFETY: both write the numbers that they are given.
    unsafe {
        nvrtc::sys::nvrtcVersion(&mut major, &mut minor);
        driver::sys::cuDriverGetVersion(&mut takes).result().map_err(version)?;
    }
    if 1000 * major + 10 * minor > takes {
        return Err(format!(
            "CUDA's compiler library (libnvrtc.so) is of version {major}.{minor}, and the NVIDIA driver takes at most {}.{}: install a \
             newer driver, or set LD_LIBRARY_PATH and CUDA_PATH to a CUDA toolkit that is no newer than the driver, {OR}",
            takes / 1000,
            takes % 1000 / 10
        ));
    }
    let count = match driver::result::init() {
        Err(driver::DriverError(driver::sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
        begun => begun.and_then(|()| driver::result::device::get_count()).map_err(version)?,
    };
    if count == 0 {
        return Err(format!("the NVIDIA driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, {OR}"));
    }
    (0..count)
        .map(|ordinal| {
            let device = driver::result::device::get(ordinal).map_err(version)?;
            // SAFETY: the device is the driver's own.
            let bytes = unsafe { driver::result::device::total_mem(device) }.map_err(version)?;
            Ok(bytes as u64)
        })
        .collect()
}

/// How a failure for want of memory begins.
pub const OUT_OF_MEMORY: &str = "the device is out of memory";

/// What first failed on a thread that gives work to a device, since [`watch`] was called.
static FAILED: OnceLock<String> = OnceLock::new();

/// Remembers what fails on the threads that give work to devices, and what reads are told of it, for [`failure`]: CubeCL goes on
/// without what could not be launched, and results are wrong from there on. It is not printed here: who asks tells it, once.
pub fn watch() {
    static WATCHES: Once = Once::new();
    WATCHES.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref().copied()).unwrap_or("no message");
            // As CubeCL names its threads, and the error of whoever reads what was not made.
            let is_devices = std::thread::current().name().is_some_and(|name| name.starts_with("DSD-"));
            let is_told =
                ["ServerUnhealthy", "The server is in an invalid state"].iter().any(|words| text.contains(words));
            if is_devices || is_told { failed(text) } else { before(panic) }
        }));
    });
}

/// Remembers a device's failure, if it is the first.
pub(crate) fn failed(text: &str) {
    FAILED.get_or_init(|| explained(text));
}

/// What failed on a device's thread, and what would help; nothing computed since then can be trusted.
pub fn failure() -> Option<&'static str> {
    FAILED.get().map(String::as_str)
}

/// A failure's words with what would help.
fn explained(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if has(&["OUT_OF_MEMORY", "allocate buffer", "BufferTooBig"]) {
        // CubeCL knows no tensors, only bytes.
        let asked = first.rsplit(' ').next().and_then(|bytes| bytes.parse::<u64>().ok());
        let asked = asked.map_or_else(|| first.to_string(), |bytes| format!("{} MiB more were asked for", bytes >> 20));
        return format!(
            "{OUT_OF_MEMORY} ({asked}; nvidia-smi shows what other programs have): take a smaller batch with \
             more accumulation, a higher ZeRO stage over more devices, or --offload"
        );
    }
    if has(&["UNSUPPORTED_PTX_VERSION"]) {
        return format!(
            "the NVIDIA driver is older than CUDA's compiler library ({first}): update it, or install an older libnvrtc.so"
        );
    }
    if has(&["Compilation", "PTX"]) {
        // CubeCL tells the compiler's words and the whole source: `.. void __launch_bounds__(256)name (..`.
        let name = text.split_once("__launch_bounds__(").and_then(|(_, rest)| rest.split_once(')'));
        let name = name.and_then(|(_, rest)| rest.split_once('(')).map_or("a kernel", |(name, _)| name.trim());
        let why = text.lines().map(str::trim).find(|line| line.contains("error: ") || line.contains("CUDA_ERROR"));
        return format!(
            "{name} could not be compiled for the device ({}): the driver and CUDA's compiler library (libnvrtc.so) may not fit each \
             other or this program, or the cache of kernels is another program's; bench/gpu/README.md says which versions were tried",
            why.unwrap_or(first)
        );
    }
    format!("the device failed: {first}")
}

/// Opens the default device of the Vulkan drivers.
///
/// # Errors
///
/// What is missing, and what to do.
#[cfg(feature = "vulkan")]
pub fn vulkan() -> Result<(), String> {
    use std::panic::catch_unwind;

    use cubecl::Runtime;
    use cubecl::wgpu::WgpuRuntime;

    // The one way to ask is to try, and trying panics.
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let opened = catch_unwind(|| drop(WgpuRuntime::client(&Default::default())));
    set_hook(hook);
    opened.map_err(|_| {
        "no device with a Vulkan driver was found: install the driver of the graphics card, or a software one (Debian: \
         mesa-vulkan-drivers), and look at vulkaninfo; or compute on another backend (cpu)"
            .to_string()
    })
}
