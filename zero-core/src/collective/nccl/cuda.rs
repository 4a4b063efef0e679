//! Wrappers of the CUDA driver: a device's primary context, streams, events.
//!
//! They use cudarc, which finds libcuda at run time and panics if it, or a function, is missing; so both are checked
//! first. The context is the device's *primary* one, which CubeCL and the CUDA runtime library use too.

use std::ffi::c_char;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUevent, CUresult, CUstream};

use super::NcclError;

/// The functions that are always needed.
const NEEDED: [&str; 19] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuGetErrorString",
];

pub(crate) fn has(symbol: &str) -> bool {
    // SAFETY: the library is present (the callers have checked); the address is only tested for existence, never called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok()
}

/// Returns an error unless the call has succeeded.
pub(crate) fn checked(call: &'static str, code: CUresult) -> Result<(), NcclError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: accepts any code and returns a static text, or null.
    let meaning = unsafe {
        let _ = sys::cuGetErrorString(code, &raw mut text);
        if text.is_null() { String::new() } else { std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Err(NcclError::Call { call, reason: format!("{code:?}: {meaning}") })
}

/// Finds and initialises the driver; returns `false` if it sees no device.
fn driver() -> Result<bool, NcclError> {
    // SAFETY: loads NVIDIA's driver library, whose initialisers may run on any thread.
    if !unsafe { sys::is_culib_present() } {
        return Err(NcclError::Library {
            library: "libcuda",
            reason: "no library of this name can be loaded".into(),
            advice: "run on a machine with an NVIDIA GPU and its driver; start a container with access to the GPUs \
                     (docker run --gpus all)",
        });
    }
    if let Some(symbol) = NEEDED.into_iter().find(|symbol| !has(symbol)) {
        return Err(NcclError::Symbol { library: "libcuda", symbol, needed: "the driver of CUDA 11.4" });
    }
    // SAFETY: may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(false),
        code => checked("cuInit", code).map(|()| true),
    }
}

/// Returns the number of devices that this process sees.
///
/// # Errors
///
/// [`NcclError`] without a driver.
pub fn device_count() -> Result<usize, NcclError> {
    if !driver()? {
        return Ok(0);
    }
    let mut count = 0;
    // SAFETY: the pointer is to a local.
    checked("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(count.max(0) as usize)
}

/// A device with its primary context.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    device: sys::CUdevice,
    context: CUcontext,
    /// Address on the machine's bus, the same in every process of the machine.
    pub(crate) bus: String,
    /// `true` if an event can cover all work of a context (the driver of CUDA 12.5).
    pub(crate) context_events: bool,
}

// SAFETY: a context is a handle that any thread may push and pop, and events and streams may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A guard: the context is current on this thread until it is dropped.
#[must_use]
pub(crate) struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: pops the context that `enter` has pushed on this thread. A failure leaves nothing to do.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

impl Device {
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>, NcclError> {
        let count = device_count()?;
        if ordinal >= count {
            return Err(NcclError::Device { ordinal, count });
        }
        let (mut device, mut context, mut version) = (0, std::ptr::null_mut(), 0);
        let mut bus = [0_u8; 32];
        // SAFETY: the pointers are to locals, of the lengths given; the driver has been started.
        unsafe {
            checked("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
            let length = bus.len() as i32;
            checked("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(bus.as_mut_ptr().cast(), length, device))?;
            checked("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
            checked("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        let end = bus.iter().position(|&byte| byte == 0).unwrap_or(bus.len());
        let bus = String::from_utf8_lossy(&bus[..end]).to_lowercase();
        let context_events = version >= 12_050 && has("cuCtxRecordEvent") && has("cuCtxWaitEvent");
        Ok(Arc::new(Self { ordinal, device, context, bus, context_events }))
    }

    /// Makes the context current on this thread, on top of the previous one.
    pub(crate) fn enter(&self) -> Result<Entered, NcclError> {
        // SAFETY: the context is retained for as long as this device lives.
        checked("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered)
    }

    /// Makes all work submitted to the context from now on wait for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), NcclError> {
        // SAFETY: both are alive; the function exists if `context_events` is set, which the caller has checked.
        checked("cuCtxWaitEvent", unsafe { sys::cuCtxWaitEvent(self.context, event.raw) })
    }

    /// Waits for all work of the context, without a deadline.
    pub(crate) fn synchronize(&self) -> Result<(), NcclError> {
        let _entered = self.enter()?;
        // SAFETY: a context is current.
        checked("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: was retained once, by `open`. A failure leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A stream of a device, without implicit synchronization with the default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: CUstream,
    device: Arc<Device>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream, of the highest priority if requested: a collective that waits behind compute kernels delays all ranks.
    pub(crate) fn new(device: &Arc<Device>, high_priority: bool) -> Result<Self, NcclError> {
        let _entered = device.enter()?;
        let (mut raw, mut least, mut greatest) = (std::ptr::null_mut(), 0, 0);
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointers are to locals, and a context is current.
        unsafe {
            let range = sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest);
            checked("cuCtxGetStreamPriorityRange", range)?;
            let priority = if high_priority { greatest } else { least };
            let code = sys::cuStreamCreateWithPriority(&raw mut raw, flags, priority);
            checked("cuStreamCreateWithPriority", code)?;
        }
        Ok(Self { raw, device: device.clone() })
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Makes work submitted to the stream from now on wait for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), NcclError> {
        // SAFETY: both are alive.
        unsafe { wait_on(self.raw, event) }
    }
}

/// Makes work submitted to `stream` from now on wait for `event`.
///
/// # Safety
///
/// `stream` is a stream of this process that is alive.
pub(crate) unsafe fn wait_on(stream: CUstream, event: &Event) -> Result<(), NcclError> {
    // SAFETY: guaranteed by the caller; the event is alive.
    checked("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event.raw, 0) })
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: created by `new`; the driver first completes its pending work. A failure leaves nothing to do.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// An event in the work of a device.
#[derive(Debug)]
pub(crate) struct Event {
    raw: CUevent,
    device: Arc<Device>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event. The caller has entered the device.
    fn new(device: &Arc<Device>) -> Result<Self, NcclError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the pointer is to a local, and a context is current.
        checked("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(Self { raw, device: device.clone() })
    }

    /// Records an event after all work submitted to `stream` so far. The caller has entered the device.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the device that is alive.
    pub(crate) unsafe fn of_stream(device: &Arc<Device>, stream: CUstream) -> Result<Self, NcclError> {
        let event = Self::new(device)?;
        // SAFETY: guaranteed by the caller; the event was just created.
        checked("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, stream) })?;
        Ok(event)
    }

    /// Records an event after all work submitted to any stream of the device's context so far. The caller has entered the device
    /// and checked [`Device::context_events`].
    pub(crate) fn of_context(device: &Arc<Device>) -> Result<Self, NcclError> {
        let event = Self::new(device)?;
        // SAFETY: both are alive, and the function exists.
        checked("cuCtxRecordEvent", unsafe { sys::cuCtxRecordEvent(device.context, event.raw) })?;
        Ok(event)
    }

    /// Returns `true` if the device has reached the event.
    pub(crate) fn reached(&self) -> Result<bool, NcclError> {
        let _entered = self.device.enter()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => checked("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once; the driver keeps it for work that still waits for it. A failure leaves nothing to do.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}
