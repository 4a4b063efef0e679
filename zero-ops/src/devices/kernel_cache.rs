//! Keeps compiled CUDA kernels in the user's cache folder, so that a program compiles each of them once and not at every start.
//!
//! CubeCL can keep the PTX of its kernels in a folder, but names them by the kernel's type and parameters alone: not by source,
//! GPU architecture or compiler version. It also guards the folder by lock files that outlive a killed process. So this module
//! gives each process a folder of its own:
//!
//! ```text
//! ~/.cache/zero/kernels/<hash of the program>-sm_90-nvrtc_13.0/<slot>/
//! ```
//!
//! A process holds a slot by a lock (`flock`) that the operating system releases when the process ends. Ranks that are processes
//! use one slot each. The NVIDIA driver keeps what it assembles from PTX by itself (`CUDA_CACHE_PATH`).

use std::fs::{self, File, TryLockError};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use cubecl::config::CubeClRuntimeConfig;
use cubecl::config::RuntimeConfig;
use cubecl::config::cache::CacheConfig;
use cudarc::driver::{result, sys::CUdevice_attribute};

use super::attribute;

/// Number of programs whose kernels are kept: a rebuilt program is a new one.
const PROGRAMS: usize = 8;

/// Free disk space in bytes below which nothing is kept. The kernels of GPT-2 1.5B take 4.5 MiB (`bench/gpu/dry.sh steps --start xl`).
const LEAST_FREE: u64 = 256 << 20;

/// File name of a slot's lock.
const LOCK: &str = "lock";

/// Name of the folder that CubeCL creates in a slot.
const KERNELS: &str = "cuda";

/// The lock of this process's slot, held until the process ends.
static SLOT: OnceLock<Result<Option<File>, String>> = OnceLock::new();

/// Makes CubeCL keep the CUDA kernels that this process compiles under `XDG_CACHE_HOME` (or `~/.cache`), in `zero/kernels`. Call
/// it before the first computation on a device; later calls do nothing. It changes nothing where a `cubecl.toml` names a cache
/// (`compilation.cache`).
///
/// # Errors
///
/// Returns why kernels cannot be kept. The program still runs, and compiles its kernels at every start.
pub fn cache_kernels() -> Result<(), String> {
    SLOT.get_or_init(open).as_ref().map(|_| ()).map_err(Clone::clone)
}

fn open() -> Result<Option<File>, String> {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    if config.compilation.cache.is_some() {
        return Ok(None);
    }
    let root = user_cache().ok_or("neither XDG_CACHE_HOME nor HOME is set")?.join("zero/kernels");
    let failed = |error: io::Error| format!("cannot write {}: {error}", root.display());
    let program = root.join(program_key()?);
    let (lock, slot) = take_slot(&program).map_err(failed)?;
    let space = rustix::fs::statvfs(&slot).map_err(|error| failed(error.into()))?;
    if space.f_bavail * space.f_frsize < LEAST_FREE {
        return Err(format!("less than {} MiB are free in {}", LEAST_FREE >> 20, root.display()));
    }
    remove_oldest(&root, &program);
    config.compilation.cache = Some(CacheConfig::File(slot));
    let mut state = CubeClRuntimeConfig::storage().lock();
    if state.is_some() {
        return Err("this process has already used a device".into());
    }
    *state = Some(config.into());
    Ok(Some(lock))
}

fn user_cache() -> Option<PathBuf> {
    let from = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    // A relative path is to be ignored, says https://specifications.freedesktop.org/basedir-spec.
    from("XDG_CACHE_HOME").filter(|path| path.is_absolute()).or_else(|| Some(from("HOME")?.join(".cache")))
}

/// Names everything that compiled kernels depend on and CubeCL ignores: the program, the GPUs' architecture and the compiler.
fn program_key() -> Result<String, String> {
    let unknown = |error: &dyn std::fmt::Display| format!("the GPUs' architecture is unknown: {error}");
    let count = result::device::get_count().map_err(|error| unknown(&error))?;
    let mut architectures: Vec<i32> = (0..count)
        .map(|ordinal| {
            let [major, minor] = [
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            ]
            .map(|name| attribute(ordinal, name));
            Ok(10 * major? + minor?)
        })
        .collect::<Result<_, _>>()
        .map_err(|error: cudarc::driver::DriverError| unknown(&error))?;
    architectures.dedup();
    let [architecture] = architectures[..] else {
        return Err(
            "the visible GPUs have different architectures; select GPUs of one architecture with CUDA_VISIBLE_DEVICES"
                .into(),
        );
    };
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes the two numbers passed to it.
    unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    let program = hash_of_program().map_err(|error| format!("cannot read the program's file: {error}"))?;
    Ok(format!("{program:016x}-sm_{architecture}-nvrtc_{major}.{minor}"))
}

fn hash_of_program() -> io::Result<u64> {
    // The running file, even if another has taken its name since.
    let running = Path::new("/proc/self/exe");
    let mut file = File::open(if running.exists() { running.into() } else { std::env::current_exe()? })?;
    let (mut hasher, mut buffer) = (DefaultHasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            read => hasher.write(&buffer[..read]),
        }
    }
}

/// Takes the first slot that no other process holds.
fn take_slot(program: &Path) -> io::Result<(File, PathBuf)> {
    for number in 0.. {
        let slot = program.join(number.to_string());
        fs::create_dir_all(&slot)?;
        let lock = File::create(slot.join(LOCK))?;
        match lock.try_lock() {
            Ok(()) => {
                lock.set_modified(SystemTime::now())?;
                // CubeCL's own locks: only this process uses the slot, so a killed process left those that exist.
                remove_locks(&slot);
                if number > 0 && !slot.join(KERNELS).exists() {
                    copy_kernels(&program.join("0"), &slot);
                }
                return Ok((lock, slot));
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    unreachable!("numbers do not end")
}

/// Copies the first slot's kernels to a new one, so that many ranks start as fast as one. A file that another process is writing ends in a
/// partial entry at worst, which CubeCL ignores.
fn copy_kernels(from: &Path, to: &Path) {
    fn copy(from: &Path, to: &Path) -> io::Result<()> {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let (from, to) = (entry.path(), to.join(entry.file_name()));
            if entry.file_type()?.is_dir() {
                copy(&from, &to)?;
            } else {
                fs::copy(from, to)?;
            }
        }
        Ok(())
    }

    // Kernels that cannot be copied are compiled.
    let _ = copy(&from.join(KERNELS), &to.join(KERNELS));
    remove_locks(to);
}

fn remove_locks(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            remove_locks(&path);
        } else if path.extension().is_some_and(|extension| extension == "lock") {
            // A lock that remains costs CubeCL a wait of 30 s.
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes the folders of the least recently used programs that are not in use.
fn remove_oldest(root: &Path, current: &Path) {
    let mut others: Vec<(SystemTime, PathBuf)> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path != current)
        .map(|path| {
            let used = fs::metadata(path.join("0").join(LOCK)).and_then(|lock| lock.modified());
            (used.unwrap_or(SystemTime::UNIX_EPOCH), path)
        })
        .collect();
    others.sort_unstable_by(|a, b| b.cmp(a));
    for (_, path) in others.into_iter().skip(PROGRAMS - 1).filter(|(_, path)| !is_used(path)) {
        // A folder that cannot be removed belongs to somebody else, and is harmless.
        let _ = fs::remove_dir_all(path);
    }
}

fn is_used(program: &Path) -> bool {
    fs::read_dir(program).into_iter().flatten().flatten().any(|slot| {
        let lock = File::open(slot.path().join(LOCK));
        lock.is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_take_slots_of_their_own_and_find_no_stale_locks() {
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join("program");
        let (first, slot) = take_slot(&program).unwrap();
        let kernels = slot.join("cuda/0.10.0/ptx");
        fs::create_dir_all(&kernels).unwrap();
        fs::write(kernels.join("toc.json.log"), "kept").unwrap();
        fs::write(kernels.join("toc.json.log.lock"), "left by a killed process").unwrap();
        let (_second, other) = take_slot(&program).unwrap();
        assert_eq!((slot.ends_with("0"), other.ends_with("1")), (true, true));
        // The second slot begins with the first one's kernels.
        assert_eq!(fs::read_to_string(other.join("cuda/0.10.0/ptx/toc.json.log")).unwrap(), "kept");
        assert!(!other.join("cuda/0.10.0/ptx/toc.json.log.lock").exists());
        // The end of a process closes its files.
        drop(first);
        let (_again, slot) = take_slot(&program).unwrap();
        assert!(slot.ends_with("0"));
        assert!(kernels.join("toc.json.log").exists() && !kernels.join("toc.json.log.lock").exists());
    }

    #[test]
    fn the_oldest_programs_that_nobody_uses_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let mut held = Vec::new();
        for number in 0..12 {
            let (lock, _) = take_slot(&root.path().join(format!("program-{number:02}"))).unwrap();
            lock.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(number)).unwrap();
            // The oldest is in use.
            if number == 0 {
                held.push(lock);
            }
        }
        remove_oldest(root.path(), &root.path().join("program-11"));
        let mut left: Vec<String> =
            fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        let expected: Vec<String> = [0, 4, 5, 6, 7, 8, 9, 10, 11].map(|number| format!("program-{number:02}")).into();
        assert_eq!(left, expected);
    }
}
