//! The open file and its growth. It bypasses the page cache if the file system can; otherwise it keeps the page cache empty.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Advice, AtFlags, FallocateFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::files;
use crate::offload::counters::Counters;
use crate::offload::direction::Direction;
use crate::offload::error::system_at;
use crate::offload::faults::Faults;
use crate::offload::memory::Memory;
use crate::offload::{DiskError, SwapDir, folder};

/// Minimum alignment of memory and offsets: the page, and the sector of almost every disk.
const LEAST_ALIGNMENT: usize = 4096;

/// The `statfs` type of a file system in memory.
const TMPFS_MAGIC: u64 = 0x0102_1994;

pub(crate) struct Backing {
    /// Keeps the folder until the file is closed.
    dir: SwapDir,
    file: File,
    path: PathBuf,
    direct: bool,
    alignment: usize,
    /// Set by the first growth if the file system cannot reserve space.
    sparse: AtomicBool,
    /// The reason why the file's transfers are no longer reliable.
    stopped: Mutex<Option<String>>,
    pub(crate) counters: Counters,
    pub(crate) faults: Faults,
}

impl Backing {
    /// Creates the file. With `direct`, it bypasses the page cache if the file system can; otherwise the reason is logged.
    pub(crate) fn create(dir: SwapDir, name: &str, direct: bool) -> Result<Self, DiskError> {
        let path = dir.path().join(name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|error| folder::not_writable(&path, error))?;
        if rustix::fs::fstatfs(&file).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC) {
            dir.warn_once("is kept in memory (tmpfs): offloading to it frees no memory");
        }
        let mut backing = Self {
            dir,
            file,
            path,
            direct: false,
            alignment: LEAST_ALIGNMENT,
            sparse: AtomicBool::new(false),
            stopped: Mutex::default(),
            counters: Counters::default(),
            faults: Faults::default(),
        };
        if direct {
            match backing.bypass_page_cache() {
                Ok(alignment) => (backing.direct, backing.alignment) = (true, alignment),
                Err(reason) => backing.dir.warn_once(&format!(
                    "{reason}; using buffered I/O and dropping its pages from the page cache, which is slower"
                )),
            }
        }
        if !backing.direct {
            // Otherwise the kernel reads ahead into pages that nobody drops. If the advice is ignored, they stay for a while.
            let _ = rustix::fs::fadvise(&backing.file, 0, None, Advice::Random);
        }
        Ok(backing)
    }

    /// Switches to direct I/O and returns the alignment that it needs, or the reason why it is refused.
    fn bypass_page_cache(&self) -> Result<usize, String> {
        let flags = StatxFlags::DIOALIGN;
        let stat = rustix::fs::statx(&self.file, c"", AtFlags::EMPTY_PATH, flags).ok();
        let told = stat.filter(|stat| stat.stx_mask & flags.bits() != 0);
        let needed = match told {
            Some(stat) if stat.stx_dio_offset_align == 0 => {
                return Err("the file system does not support direct I/O".to_string());
            }
            Some(stat) => stat.stx_dio_mem_align.max(stat.stx_dio_offset_align) as usize,
            // A kernel before 6.1: the probe below tests the usual alignment.
            None => LEAST_ALIGNMENT,
        };
        let alignment = needed.max(LEAST_ALIGNMENT).next_power_of_two();
        let flags =
            rustix::fs::fcntl_getfl(&self.file).map_err(|error| format!("cannot read the file's flags: {error}"))?;
        rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT)
            .map_err(|error| format!("O_DIRECT is refused: {error}"))?;
        // Some file systems accept the flag and refuse the transfer.
        let probe = Memory::map(alignment, alignment).map_err(|error| error.to_string())?;
        // SAFETY: the probe's memory is `alignment` bytes, and nobody else has it.
        let outcome = unsafe { self.request(Direction::Write, probe.start(), alignment, 0) };
        outcome.map(|_| alignment).map_err(|error| {
            // The flags were valid a moment ago; if they cannot be set, every transfer reports an error.
            let _ = rustix::fs::fcntl_setfl(&self.file, flags);
            format!("direct I/O is refused: {error}")
        })
    }

    pub(crate) fn dir(&self) -> &SwapDir {
        &self.dir
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Returns the alignment of offsets, lengths and addresses of transfers.
    pub(crate) fn alignment(&self) -> usize {
        self.alignment
    }

    /// Performs one `pread` or `pwrite`; returns the number of bytes transferred.
    ///
    /// # Safety
    /// `[at, at + bytes)` is readable and writable, and nobody else uses it during the call.
    pub(crate) unsafe fn request(
        &self,
        direction: Direction,
        at: NonNull<u8>,
        bytes: usize,
        offset: u64,
    ) -> io::Result<usize> {
        // SAFETY: by this function's contract; and the memory, mapped, is initialised.
        let memory = unsafe { slice::from_raw_parts_mut(at.as_ptr(), bytes) };
        match direction {
            Direction::Read => self.file.read_at(memory, offset),
            Direction::Write => self.file.write_at(memory, offset),
        }
    }

    /// Writes a chunk that was transferred through the page cache to the disk and drops it from the cache.
    pub(crate) fn settle(&self, direction: Direction, offset: u64, bytes: usize) -> io::Result<()> {
        if self.direct {
            return Ok(());
        }
        if direction == Direction::Write {
            // The next call only drops clean pages.
            files::write_out(&self.file, offset, bytes as u64, true)?;
        }
        let len = std::num::NonZeroU64::new(bytes as u64);
        rustix::fs::fadvise(&self.file, offset, len, Advice::DontNeed).or_else(|error| match error {
            Errno::INVAL | Errno::NOSYS => Ok(()),
            error => Err(error.into()),
        })
    }

    /// Extends the file by `more` bytes beyond `end`, with reserved space on the disk if the file system can.
    pub(crate) fn grow(&self, end: u64, more: u64) -> Result<(), DiskError> {
        let needed_bytes = end.saturating_add(more);
        let too_large = |limit_bytes| DiskError::FileTooLarge { path: self.path.clone(), needed_bytes, limit_bytes };
        // Beyond the limit, the kernel would not only refuse but also send a signal that ends the process.
        if let Some(limit_bytes) = getrlimit(Resource::Fsize).current
            && needed_bytes > limit_bytes
        {
            return Err(too_large(limit_bytes));
        }
        if !self.sparse.load(Ordering::Relaxed) {
            let outcome = loop {
                match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), end, more) {
                    Err(Errno::INTR) => {}
                    outcome => break outcome,
                }
            };
            match outcome {
                Ok(()) => return Ok(()),
                Err(error @ (Errno::NOSPC | Errno::DQUOT)) => {
                    // Part of it may have been reserved. If it cannot be released now, it is released with the file.
                    let _ = rustix::fs::ftruncate(&self.file, end);
                    return Err(folder::no_space(&self.path, more, error == Errno::DQUOT));
                }
                Err(Errno::FBIG) => return Err(too_large(self.file.metadata().map_or(0, |found| found.len()))),
                Err(error @ (Errno::OPNOTSUPP | Errno::NOSYS)) => {
                    self.dir.warn_once(&format!(
                        "the file system cannot reserve space ({error}): the disk may fill up during training"
                    ));
                    self.sparse.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(system_at("reserve space for", &self.path)(error)),
            }
        }
        folder::require(&self.path, more)?;
        rustix::fs::ftruncate(&self.file, needed_bytes).map_err(system_at("extend", &self.path))
    }

    /// Makes every later transfer fail.
    pub(crate) fn stop(&self, reason: String) {
        self.stopped.lock().get_or_insert(reason);
    }

    /// Checks that the file still has the bytes that were reserved.
    pub(crate) fn check_length(&self, expected_bytes: u64) -> Result<(), DiskError> {
        let got_bytes = self.file.metadata().map_err(system_at("read the metadata of", &self.path))?.len();
        if got_bytes < expected_bytes {
            let path = self.path.clone();
            return Err(DiskError::Truncated { path, expected_bytes, got_bytes });
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), DiskError> {
        match &*self.stopped.lock() {
            Some(reason) => Err(DiskError::Stopped { path: self.path.clone(), reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Returns the error for a part of a transfer.
    pub(crate) fn io_error(&self, direction: Direction, offset: u64, bytes: usize, source: io::Error) -> DiskError {
        let path = self.path.clone();
        // Truncated after its length was checked.
        if source.kind() == io::ErrorKind::UnexpectedEof
            && let Err(truncated) = self.check_length(offset + bytes as u64)
        {
            return truncated;
        }
        match source.raw_os_error() {
            Some(libc::ENOSPC) => folder::no_space(&path, bytes as u64, false),
            Some(libc::EDQUOT) => folder::no_space(&path, bytes as u64, true),
            _ => DiskError::Io { action: direction.verb(), path, offset, bytes, source },
        }
    }
}

/// Maximum wait for something that must end by itself: the transfer of a dropped ticket, or the threads of a dropped file.
pub(crate) const ENDING_LIMIT: Duration = Duration::from_secs(60);
