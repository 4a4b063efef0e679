//! libnccl, found at run time.
//!
//! The types are cudarc's. The functions are looked up here, because cudarc's own lookup does not know the name
//! `libnccl.so.2` (the only one that NVIDIA's runtime packages install), panics if a function is missing, and returns results
//! as an enum, for which an unknown code of a newer library would be undefined behaviour.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};

use super::NcclError;
use crate::collective::{DType, ReduceOp};

/// Return code of a call; see `ncclResult_t`.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;

/// The oldest supported library: it has `ncclCommSplit` and nonblocking communicators.
const OLDEST: &str = "NCCL 2.18";
/// Names of the library, in the order in which they are tried.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

type Stream = *mut c_void;

macro_rules! library {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of libnccl.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Library {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            fn find(library: *mut c_void) -> Result<Self, NcclError> {
                Ok(Self {
                    $($field: {
                        let address = symbol(library, $symbol)?;
                        // SAFETY: the function of this name has this signature in nccl.h.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(address) }
                    },)*
                })
            }
        }
    };
}

library! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId": fn(*mut ncclUniqueId) -> Code;
    init = "ncclCommInitRankConfig": fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code;
    split = "ncclCommSplit": fn(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t) -> Code;
    finalize = "ncclCommFinalize": fn(ncclComm_t) -> Code;
    destroy = "ncclCommDestroy": fn(ncclComm_t) -> Code;
    abort = "ncclCommAbort": fn(ncclComm_t) -> Code;
    get_async_error = "ncclCommGetAsyncError": fn(ncclComm_t, *mut Code) -> Code;
    get_error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(ncclComm_t) -> *const c_char;
    group_start = "ncclGroupStart": fn() -> Code;
    group_end = "ncclGroupEnd": fn() -> Code;
    all_gather = "ncclAllGather":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, Stream) -> Code;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Stream) -> Code;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Stream) -> Code;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> Code;
}

fn symbol(library: *mut c_void, name: &'static str) -> Result<*mut c_void, NcclError> {
    let c_name = CString::new(name).expect("the names above hold no zero byte");
    // SAFETY: the library is open, and is never closed; the name is a C string.
    let address = unsafe { libc::dlsym(library, c_name.as_ptr()) };
    if address.is_null() {
        return Err(NcclError::Symbol { library: "libnccl", symbol: name, needed: OLDEST });
    }
    Ok(address)
}

/// Returns the library, which is loaded once and never closed.
pub(super) fn library() -> Result<&'static Library, NcclError> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let mut said = Vec::new();
    for name in NAMES {
        let c_name = CString::new(name).expect("the names above hold no zero byte");
        // SAFETY: runs the initialisers of NVIDIA's library, once, on this thread; the text of an error is read before any
        // other call of the loader on this thread.
        unsafe {
            let library = libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            if !library.is_null() {
                let found = Library::find(library)?;
                return Ok(LIBRARY.get_or_init(|| found));
            }
            let error = libc::dlerror();
            said.push(if error.is_null() { name.to_string() } else { text(error) });
        }
    }
    Err(NcclError::Library {
        library: "libnccl",
        reason: said.join("; "),
        advice: "install NCCL 2.18 or newer (the package libnccl2, or nvidia-nccl-cu12 or -cu13 from pip) and add its folder to \
                 LD_LIBRARY_PATH",
    })
}

/// # Safety
///
/// `text` is a C string that lives during the call.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Library {
    /// Returns the meaning of a code, with the library's last error message if it has one.
    pub(super) fn explain(&self, code: Code) -> String {
        // SAFETY: both accept any value and return static or thread-local texts, or null.
        unsafe {
            let meaning = (self.get_error_string)(code);
            let meaning = if meaning.is_null() { format!("code {code}") } else { text(meaning) };
            let last = (self.get_last_error)(std::ptr::null_mut());
            let last = if last.is_null() { String::new() } else { text(last) };
            match last.trim() {
                "" => format!("{meaning} (set NCCL_DEBUG=WARN for details)"),
                last => format!("{meaning}: {last}"),
            }
        }
    }

    /// Returns an error unless the call has succeeded or is in progress.
    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            _ => Err(NcclError::Call { call, reason: self.explain(code) }),
        }
    }

    /// Returns its version, such as 22304 for 2.23.4.
    pub(super) fn version(&self) -> Result<u32, NcclError> {
        let mut version = 0;
        // SAFETY: the pointer is to a local.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&raw mut version) })?;
        Ok(version.max(0) as u32)
    }
}

/// Returns the default configuration (`NCCL_CONFIG_INITIALIZER` of nccl.h) with nonblocking calls.
pub(super) fn non_blocking(version: u32) -> ncclConfig_t {
    /// `NCCL_CONFIG_UNDEF_INT`.
    const UNDEFINED: c_int = c_int::MIN;
    /// `NCCL_API_MAGIC`.
    const MAGIC: u32 = 0xcafe_beef;
    /// The version of this configuration; an older library reads the part that it knows.
    const HEADER: u32 = 23_000;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: MAGIC,
        version: version.min(HEADER),
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

pub(super) fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::U8 => ncclDataType_t::ncclUint8,
    }
}

/// Returns the library's reduction for `op` over `world` ranks.
pub(super) fn reduction(op: ReduceOp, world: usize) -> ncclRedOp_t {
    match op {
        // ncclAvg over one rank omits the last elements if their number is not divisible by 4 (fp32, NCCL of PyTorch 2.11, H200).
        ReduceOp::Mean if world == 1 => ncclRedOp_t::ncclSum,
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Mean => ncclRedOp_t::ncclAvg,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
    }
}
