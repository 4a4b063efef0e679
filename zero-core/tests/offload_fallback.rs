//! A kernel, container or file system that refuses something: offload still works, and the log says why, once.

mod offload_common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr;

use offload_common::{LIMIT, Log, pool, small_blocks};
use zero_core::offload::{DiskError, EngineChoice, EngineKind, SwapDir, SwapFile, SwapFileOptions};

/// Makes the system call `number` fail with `error` on this thread from now on, like a container's filter.
fn refuse(number: libc::c_long, error: i32) {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let jump_equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let give = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = [
        libc::sock_filter { code: load, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: jump_equal, jt: 0, jf: 1, k: number as u32 },
        libc::sock_filter { code: give, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | error as u32 },
        libc::sock_filter { code: give, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the call takes numbers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: `filter` and the program it points to are valid during the call, which copies them.
    let outcome = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, ptr::from_ref(&filter)) };
    assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
}

fn move_something(file: &SwapFile) {
    let region = file.alloc(100_001).unwrap();
    let pool = pool(1, 100_001);
    let mut buffer = pool.take(LIMIT).unwrap();
    buffer.bytes_mut().fill(5);
    let mut buffer = file.write(region, buffer).unwrap().wait(LIMIT).unwrap();
    buffer.bytes_mut().fill(6);
    let buffer = file.read(region, buffer).unwrap().wait(LIMIT).unwrap();
    assert!(buffer.len() == 100_001 && buffer.bytes().iter().all(|byte| *byte == 5));
}

#[test]
fn without_io_uring_threads_are_used_and_the_reason_is_logged_once() {
    for (error, text) in [(libc::EPERM, "Operation not permitted"), (libc::ENOSYS, "Function not implemented")] {
        // In a thread of its own, since a filter stays.
        let body = move || {
            refuse(libc::SYS_io_uring_setup, error);
            let parent = tempfile::tempdir().unwrap();
            let dir = SwapDir::open(parent.path()).unwrap();
            let options = |engine| SwapFileOptions { engine, ..SwapFileOptions::default() };
            let (files, log) =
                Log::of(|| [0, 1].map(|rank| dir.create_file(rank, &options(EngineChoice::Auto)).unwrap()));
            assert!(files.iter().all(|file| file.engine() == EngineKind::Threads && file.is_direct()));
            let lines: Vec<&String> = log.iter().filter(|line| line.contains("io_uring")).collect();
            assert_eq!(lines.len(), 1, "{log:?}");
            assert!(
                lines[0].starts_with("WARN") && lines[0].contains("io_uring_setup") && lines[0].contains(text),
                "{log:?}"
            );
            move_something(&files[1]);
            // Asked for by name, it is an error.
            let refused = dir.create_file(2, &options(EngineChoice::IoUring)).unwrap_err();
            assert!(matches!(&refused, DiskError::NoUring { reason } if reason.contains(text)), "{refused}");
        };
        std::thread::spawn(body).join().unwrap();
    }
}

/// Returns the number of a file's pages that are in the page cache.
fn cached_pages(file: &File, bytes: usize) -> usize {
    let mut pages = vec![0_u8; bytes.div_ceil(4096)];
    // SAFETY: a mapping of the file that is not read; `pages` has a byte for each of its pages.
    unsafe {
        let at = libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::mincore(at, bytes, pages.as_mut_ptr()), 0);
        libc::munmap(at, bytes);
    }
    pages.iter().filter(|page| **page & 1 == 1).count()
}

#[test]
fn without_direct_io_the_page_cache_stays_empty() {
    for (way, engine, direct) in offload_common::ways() {
        let setup = offload_common::setup(&small_blocks(engine, direct));
        let bytes = 8 << 20;
        let region = setup.file.alloc(bytes).unwrap();
        let pool = pool(1, bytes);
        let buffer = setup.file.write(region, pool.take(LIMIT).unwrap()).unwrap().wait(LIMIT).unwrap();
        drop(setup.file.read(region, buffer).unwrap().wait(LIMIT).unwrap());
        let cached = cached_pages(&File::open(setup.file.path()).unwrap(), bytes);
        assert!(cached <= 16, "{way}: {cached} of {} pages are in the page cache", bytes / 4096);
    }
}

#[test]
fn a_file_system_without_direct_io_is_used_all_the_same() {
    // sysfs and the like cannot hold files; a FUSE or older tmpfs refuses O_DIRECT, where there is one.
    for parent in ["/dev/shm", "/run"] {
        let Ok(dir) = SwapDir::open(std::path::Path::new(parent)) else { continue };
        let (file, log) = Log::of(|| dir.create_file(0, &SwapFileOptions::default()).unwrap());
        let told = log.iter().filter(|line| line.contains("using buffered I/O")).count();
        assert_eq!(told, usize::from(!file.is_direct()), "{log:?}");
        move_something(&file);
    }
}

#[test]
fn a_file_that_was_cut_off_is_neither_read_nor_written() {
    for (way, engine, direct) in offload_common::ways() {
        // At a block's end, and within a block.
        for left in [32_768, 33_000] {
            let setup = offload_common::setup(&small_blocks(engine, direct));
            let region = setup.file.alloc(100_000).unwrap();
            let pool = pool(1, 100_000);
            drop(setup.file.write(region, pool.take(LIMIT).unwrap()).unwrap());
            File::options().write(true).open(setup.file.path()).unwrap().set_len(left).unwrap();
            // Before it is read as what it is not, and before a write makes it long again, with zeros in it.
            for error in [
                setup.file.read(region, pool.take(LIMIT).unwrap()).err(),
                setup.file.write(region, pool.take(LIMIT).unwrap()).err(),
            ] {
                let Some(DiskError::Truncated { path, got_bytes, .. }) = &error else { panic!("{way}: {error:?}") };
                assert_eq!((path.as_path(), *got_bytes), (setup.file.path(), left));
            }
            assert_eq!(pool.free(), 1);
        }
    }
}

#[test]
fn a_file_system_without_locks_is_used_and_the_log_says_what_that_costs() {
    for error in [libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOLCK] {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().to_path_buf();
        // In a thread of its own, since a filter stays.
        let without_locks = std::thread::spawn(move || {
            refuse(libc::SYS_flock, error);
            Log::of(|| SwapDir::open(&path).unwrap())
        });
        let (job, log) = without_locks.join().unwrap();
        assert!(log.iter().any(|line| line.starts_with("WARN") && line.contains("lock")), "{log:?}");
        // A job that has locks does not take it for a dead one's, before it has files and after.
        drop(SwapDir::open(parent.path()).unwrap());
        move_something(&job.create_file(0, &SwapFileOptions::default()).unwrap());
        drop(SwapDir::open(parent.path()).unwrap());
        assert!(job.path().join("rank-00000.swap").exists());
        drop(job);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
