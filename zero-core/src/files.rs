//! File access in folders that others may write to. Creating a file follows no link, opening one waits for no FIFO, and
//! every read has a limit. Also handles operations that not every file system supports.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use parking_lot::Mutex;

/// Opens a regular file. Anything else is an error, such as a FIFO, which would block until it has a writer.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // The flag has no effect on regular files.
    regular(options.custom_flags(libc::O_NONBLOCK).open(path)?)
}

/// Opens this program's own file for writing, in a folder that others may write to, and creates it if it does not exist.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).read(true).write(true);
    match options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Err(no_regular_file()),
        file => regular(file?),
    }
}

fn regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() { Ok(file) } else { Err(no_regular_file()) }
}

fn no_regular_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is a link, a FIFO or a folder, not a regular file; remove it")
}

/// Reads a regular file of at most `limit` bytes.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path, OpenOptions::new().read(true))?;
    let too_large = |bytes| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it has {bytes} bytes, expected at most {limit}; replace it"),
        )
    };
    let bytes = file.metadata()?.len();
    if bytes > limit {
        return Err(too_large(bytes));
    }
    let mut read = Vec::with_capacity(bytes as usize);
    // The file may grow meanwhile.
    match file.take(limit + 1).read_to_end(&mut read)? as u64 {
        bytes if bytes > limit => Err(too_large(bytes)),
        _ => Ok(read),
    }
}

/// Returns whether the error of a lock, or of a folder's sync, means that the file system does not support the operation:
/// Lustre without `flock`, and some CIFS and FUSE file systems.
pub(crate) fn is_not_offered(error: &io::Error) -> bool {
    let codes = [libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOLCK, libc::EINVAL, libc::EBADF, libc::EISDIR];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Asks the system to write a range of a file to the disk soon. If `wait` is set, waits for that range, including earlier
/// requests. On a file system without support for it this does nothing, and the kernel writes the page cache as usual.
///
/// # Errors
///
/// Errors of the disk, which a later sync would not report again.
pub(crate) fn write_out(file: &File, offset: u64, bytes: u64, wait: bool) -> io::Result<()> {
    let waiting = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let flags = libc::SYNC_FILE_RANGE_WRITE | if wait { waiting } else { 0 };
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and no memory is touched.
    let failed = unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, bytes as i64, flags) } != 0;
    let error = io::Error::last_os_error();
    if failed && !matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE)) {
        return Err(error);
    }
    Ok(())
}

/// Logs a warning, once per process and message.
pub(crate) fn warn_once(message: String) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock();
    if !told.contains(&message) {
        tracing::warn!("{message}");
        told.insert(message);
    }
}
