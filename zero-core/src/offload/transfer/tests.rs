//! Tests of transfers that fail or are slow, on both engines.

use std::time::{Duration, Instant};

use crate::offload::{
    AioOptions, BufferPool, DiskError, EngineChoice, PoolOptions, SwapDir, SwapFile, SwapFileOptions,
};

const LIMIT: Duration = Duration::from_secs(30);
const BYTES: usize = 300_000;

struct Setup {
    file: SwapFile,
    pool: BufferPool,
    dir: SwapDir,
    _parent: tempfile::TempDir,
}

fn setup(engine: EngineChoice, overlap_events: bool, direct: bool) -> Setup {
    let parent = tempfile::tempdir().unwrap();
    let dir = SwapDir::open(parent.path()).unwrap();
    let aio = AioOptions { block_size: 65_536, queue_depth: 3, overlap_events, ..AioOptions::default() };
    let file = dir.create_file(0, &SwapFileOptions { aio, engine, direct }).unwrap();
    let options = PoolOptions { count: 2, bytes: BYTES, ..PoolOptions::default() };
    Setup { file, pool: BufferPool::new(&options).unwrap(), dir, _parent: parent }
}

fn pattern(byte: usize) -> u8 {
    (byte * 7 + byte / 4096 * 13) as u8
}

/// Runs a test on each engine; without io_uring, which a container may refuse, on threads only.
fn on_engines(test: impl Fn(Setup)) {
    test(setup(EngineChoice::Auto, true, true));
    test(setup(EngineChoice::Auto, false, true));
    test(setup(EngineChoice::Threads, true, true));
    test(setup(EngineChoice::Threads, false, false));
}

fn write_and_read(setup: &Setup) -> Result<(), DiskError> {
    let region = setup.file.alloc(BYTES)?;
    let mut buffer = setup.pool.take(LIMIT)?;
    buffer.bytes_mut().iter_mut().enumerate().for_each(|(byte, value)| *value = pattern(byte));
    let mut buffer = setup.file.write(region, buffer)?.wait(LIMIT)?;
    buffer.bytes_mut().fill(0);
    let buffer = setup.file.read(region, buffer)?.wait(LIMIT)?;
    assert_eq!(buffer.len(), BYTES);
    assert!(buffer.bytes().iter().enumerate().all(|(byte, value)| *value == pattern(byte)));
    setup.file.free(region)
}

#[test]
fn short_requests_are_continued_where_they_ended() {
    on_engines(|setup| {
        for most in [4096, 20_480] {
            setup.file.faults().set.lock().most_bytes = Some(most);
            write_and_read(&setup).unwrap();
        }
    });
    // Direct I/O is never asked for a part of a block.
    for engine in [EngineChoice::Threads, EngineChoice::Auto] {
        let setup = setup(engine, true, false);
        setup.file.faults().set.lock().most_bytes = Some(9_999);
        write_and_read(&setup).unwrap();
    }
}

#[test]
fn interruptions_are_tried_again() {
    on_engines(|setup| {
        for error in [libc::EINTR, libc::EAGAIN] {
            setup.file.faults().set.lock().errors = Some((9, error));
            write_and_read(&setup).unwrap();
            assert_eq!(setup.file.faults().set.lock().errors, Some((0, error)));
        }
    });
}

#[test]
fn an_error_names_file_place_length_and_reason_and_leaves_the_rest_usable() {
    on_engines(|setup| {
        setup.file.faults().set.lock().errors = Some((1, libc::EIO));
        let DiskError::Io { action, path, offset, bytes, source } = write_and_read(&setup).unwrap_err() else {
            panic!()
        };
        assert_eq!((action, path.as_path(), bytes), ("write", setup.file.path(), 65_536));
        assert!(offset.is_multiple_of(65_536) && source.raw_os_error() == Some(libc::EIO));
        assert_eq!(setup.pool.free(), 2);
        write_and_read(&setup).unwrap();
    });
}

#[test]
fn a_disk_that_fills_up_during_a_write_says_so() {
    on_engines(|setup| {
        setup.file.faults().set.lock().errors = Some((1, libc::ENOSPC));
        assert!(matches!(write_and_read(&setup), Err(DiskError::NoSpace { needed_bytes: 65_536, .. })));
    });
}

#[test]
fn a_deadline_leaves_the_buffer_with_the_transfer_and_stops_the_file() {
    on_engines(|setup| {
        let region = setup.file.alloc(BYTES).unwrap();
        let buffer = setup.pool.take(LIMIT).unwrap();
        setup.file.faults().set.lock().delay = Duration::from_millis(150);
        let start = Instant::now();
        let ticket = setup.file.write(region, buffer).unwrap();
        assert!(!ticket.is_done());
        let error = ticket.wait(Duration::from_millis(20)).unwrap_err();
        assert!(start.elapsed() < Duration::from_millis(140), "{:?}", start.elapsed());
        assert!(matches!(error, DiskError::Deadline { .. }));
        assert!(error.to_string().starts_with("the write of 300000 bytes at byte 0 of"), "{error}");
        assert_eq!(setup.pool.free(), 1);
        let refused = setup.file.read(region, setup.pool.take(LIMIT).unwrap()).unwrap_err();
        assert!(matches!(refused, DiskError::Stopped { .. }) && refused.to_string().contains("did not finish within"));
        // It comes back when the system is done with it.
        drop(setup.pool.take_many(2, LIMIT).unwrap());
    });
}

#[test]
fn dropping_a_ticket_or_the_file_waits_for_what_is_under_way() {
    on_engines(|setup| {
        let region = setup.file.alloc(BYTES).unwrap();
        let mut buffer = setup.pool.take(LIMIT).unwrap();
        buffer.bytes_mut().fill(7);
        setup.file.faults().set.lock().delay = Duration::from_millis(15);
        drop(setup.file.write(region, buffer).unwrap());
        assert_eq!(setup.pool.free(), 2);
        assert_eq!(setup.file.stats().bytes_written, region.padded_bytes() as u64);
        let ticket = setup.file.read(region, setup.pool.take(LIMIT).unwrap()).unwrap();
        let path = setup.file.path().to_path_buf();
        let Setup { file, pool, dir, _parent } = setup;
        drop((file, dir));
        // The ticket keeps the folder.
        assert!(ticket.is_done() && path.exists());
        assert!(ticket.wait(LIMIT).unwrap().bytes().iter().all(|byte| *byte == 7));
        assert!(!path.exists());
        drop(pool);
    });
}

#[test]
fn a_panic_in_a_serving_thread_reaches_who_waits() {
    on_engines(|setup| {
        let region = setup.file.alloc(BYTES).unwrap();
        let mut buffers = setup.pool.take_many(2, LIMIT).unwrap();
        setup.file.faults().set.lock().panic = true;
        let first = setup.file.write(region, buffers.pop().unwrap()).unwrap();
        let start = Instant::now();
        assert!(matches!(first.wait(LIMIT), Err(DiskError::Stopped { .. })));
        assert!(start.elapsed() < Duration::from_secs(5));
        // Either refused at once or ended at once.
        let outcome = setup.file.write(region, buffers.pop().unwrap()).and_then(|ticket| ticket.wait(LIMIT));
        assert!(matches!(outcome, Err(DiskError::Stopped { .. })), "{outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn counters_count_bytes_and_busy_time() {
    on_engines(|setup| {
        setup.file.faults().set.lock().delay = Duration::from_millis(2);
        write_and_read(&setup).unwrap();
        let stats = setup.file.stats();
        assert_eq!((stats.bytes_read, stats.bytes_written), (303_104, 303_104));
        assert!(stats.reading >= Duration::from_millis(2) && stats.writing >= Duration::from_millis(2));
        assert!(stats.busy <= stats.reading + stats.writing + Duration::from_millis(1));
        let later = {
            std::thread::sleep(Duration::from_millis(5));
            setup.file.stats()
        };
        assert_eq!(later, stats);
    });
}
