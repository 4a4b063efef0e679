//! Runs cases of a test binary as ranks, each a process, on the software driver and NCCL of `tests/cuda_shim`; also memory
//! and streams of that driver.

pub mod numbers;
#[path = "../common/port.rs"]
mod port;

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use numbers::{bytes_of, numbers_of};
use zero_core::collective::DType;
use zero_core::collective::nccl::DeviceSlice;

const CASE: &str = "ZERO_NCCL_TEST_CASE";
const FOLDER: &str = "ZERO_NCCL_TEST_FOLDER";

/// Returns the case that this process is to run, and its folder, if it is a rank.
pub fn rank_of() -> Option<(String, PathBuf)> {
    Some((std::env::var(CASE).ok()?, std::env::var_os(FOLDER)?.into()))
}

/// A build of the software libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shim {
    /// Both libraries.
    Full,
    /// A driver without context events.
    OldDriver,
    /// NCCL without `ncclCommSplit`.
    OldNccl,
    /// NCCL alone.
    NoDriver,
    /// The driver alone.
    NoNccl,
    /// Nothing.
    Nothing,
}

/// Returns the folder of a build, which the first call compiles.
fn libraries(shim: Shim) -> PathBuf {
    static BUILT: OnceLock<Mutex<HashMap<Shim, tempfile::TempDir>>> = OnceLock::new();
    let mut built = BUILT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let folder = built.entry(shim).or_insert_with(|| {
        let folder = tempfile::Builder::new().prefix("cuda-shim").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_shim");
        let compile = |file: &str, to: &str, more: &[&str]| {
            let common = ["-shared", "-fPIC", "-O1", "-pthread"];
            let output = Command::new("cc")
                .args(common)
                .arg("-o")
                .arg(folder.path().join(to))
                .arg(source.join(file))
                .args(more)
                .output()
                .expect("a C compiler, `cc`, makes the software libraries");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        if !matches!(shim, Shim::Nothing | Shim::NoDriver) {
            let old = if shim == Shim::OldDriver { "-DNO_CONTEXT_EVENTS" } else { "-DCONTEXT_EVENTS" };
            compile("cuda.c", "libcuda.so", &["-Wl,-soname,libcuda.so", old]);
        }
        if !matches!(shim, Shim::Nothing | Shim::NoNccl) {
            let old = if shim == Shim::OldNccl { "-DNO_SPLIT" } else { "-DSPLIT" };
            let search = format!("-L{}", folder.path().display());
            let driver: &[&str] = match shim {
                Shim::NoDriver => &["-Wl,--defsym=cuLaunchHostFunc=0,--defsym=cuCtxGetDevice=0"],
                _ => &[&search, "-lcuda", "-Wl,-rpath,$ORIGIN"],
            };
            compile("nccl.c", "libnccl.so.2", &[driver, &[old]].concat());
        }
        folder
    });
    folder.path().to_path_buf()
}

/// The result of a launch.
#[derive(Debug)]
pub struct Launched {
    /// The note of each rank that has written one.
    pub notes: Vec<Option<String>>,
    /// The output of each rank.
    pub outputs: Vec<String>,
    pub took: Duration,
    pub folder: tempfile::TempDir,
}

impl Launched {
    pub fn note(&self, rank: usize) -> &str {
        self.notes[rank].as_deref().unwrap_or_else(|| panic!("rank {rank} has noted nothing: {}", self.outputs[rank]))
    }

    /// Asserts that every rank has noted "ok".
    pub fn assert_ok(&self) {
        for rank in 0..self.notes.len() {
            assert_eq!(self.note(rank), "ok", "rank {rank}: {}", self.outputs[rank]);
        }
    }

    pub fn flights(&self) -> Vec<PathBuf> {
        let path = |rank: usize| self.folder.path().join(format!("flight-rank-{rank}.json"));
        (0..self.notes.len()).map(path).filter(|path| path.exists()).collect()
    }
}

/// Writes a rank's note to the test that started it.
pub fn note(folder: &Path, rank: usize, text: &str) {
    std::fs::write(folder.join(format!("note-{rank}")), text).expect("the test's folder can be written");
}

/// Starts this binary as `ranks` ranks of `case`, with more environment variables for all or some. Kills what is left after `LIMIT`.
pub fn launch(case: &str, ranks: usize, shim: Shim, more: impl Fn(usize) -> Vec<(&'static str, String)>) -> Launched {
    // Two cores: one launch at a time.
    static ONE: Mutex<()> = Mutex::new(());
    const LIMIT: Duration = Duration::from_secs(50);
    let libraries = libraries(shim);
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let port = port::free_port();
    let begin = Instant::now();
    let output = |rank: usize| folder.path().join(format!("output-{rank}"));
    let mut children: Vec<_> = (0..ranks)
        .map(|rank| {
            let file = std::fs::File::create(output(rank)).unwrap();
            Command::new(std::env::current_exe().unwrap())
                .args(["rank", "--exact", "--nocapture", "--test-threads=1"])
                .env(CASE, case)
                .env(FOLDER, folder.path())
                .env("SHIM_DIR", folder.path())
                .env("LD_LIBRARY_PATH", &libraries)
                .envs([("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", rank)].map(|(k, v)| (k, v.to_string())))
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .envs(more(rank))
                .stdin(Stdio::null())
                .stdout(file.try_clone().unwrap())
                .stderr(file)
                .spawn()
                .unwrap()
        })
        .collect();
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) && begin.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(5));
    }
    for child in &mut children {
        let _ = child.kill();
        child.wait().unwrap();
    }
    let took = begin.elapsed();
    let notes =
        (0..ranks).map(|rank| std::fs::read_to_string(folder.path().join(format!("note-{rank}"))).ok()).collect();
    let outputs = (0..ranks).map(|rank| std::fs::read_to_string(output(rank)).unwrap_or_default()).collect();
    Launched { notes, outputs, took, folder }
}

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Device memory.
pub struct Memory(pub DeviceSlice);

impl Memory {
    pub fn new(len: usize, dtype: DType) -> Self {
        let mut pointer = 0;
        // SAFETY: the pointer is to a local; the driver has been loaded by a communicator.
        ok(unsafe { sys::cuMemAlloc_v2(&raw mut pointer, (len * dtype.size()).max(1)) });
        Self(DeviceSlice { pointer, len, dtype })
    }

    /// Creates memory with small whole numbers, which every type can hold.
    pub fn of(values: &[f64], dtype: DType) -> Self {
        let memory = Self::new(values.len(), dtype);
        let bytes = bytes_of(values, dtype);
        // SAFETY: as many bytes as the memory has.
        ok(unsafe { sys::cuMemcpyHtoD_v2(memory.0.pointer, bytes.as_ptr().cast(), bytes.len()) });
        memory
    }

    pub fn read(&self) -> Vec<f64> {
        let mut bytes = vec![0_u8; self.0.bytes()];
        // SAFETY: as many bytes as the memory has.
        ok(unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.0.pointer, bytes.len()) });
        numbers_of(&bytes, self.0.dtype)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. Tests wait for what uses it.
        ok(unsafe { sys::cuMemFree_v2(self.0.pointer) });
    }
}

/// A stream for computation on device `ordinal`.
pub struct Compute(pub sys::CUstream);

impl Compute {
    pub fn new(ordinal: i32) -> Self {
        let (mut device, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: pointers are to locals; the context that is pushed is popped.
        unsafe {
            ok(sys::cuDeviceGet(&raw mut device, ordinal));
            ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, device));
            ok(sys::cuCtxPushCurrent_v2(context));
            ok(sys::cuStreamCreateWithPriority(&raw mut stream, 1, 0));
            ok(sys::cuCtxPopCurrent_v2(&raw mut context));
        }
        Self(stream)
    }

    /// Submits a stand-in for a kernel to the stream.
    pub fn run(&self, kernel: impl FnOnce() + Send + 'static) {
        unsafe extern "C" fn call(data: *mut c_void) {
            // SAFETY: the box that `run` made, once.
            let kernel = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce()>>()) };
            kernel();
        }
        let boxed: Box<dyn FnOnce()> = Box::new(kernel);
        // SAFETY: `call` takes what is passed with it.
        ok(unsafe { sys::cuLaunchHostFunc(self.0, Some(call), Box::into_raw(Box::new(boxed)).cast()) });
    }

    pub fn synchronize(&self) {
        // SAFETY: the stream is alive.
        ok(unsafe { sys::cuStreamSynchronize(self.0) });
    }
}
