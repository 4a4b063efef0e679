//! Windows: ranks read what others publish.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zero_core::collective::DType;
use zero_core::window::{Expose, Exposure, GatherRequest, Key, ReadValue, Window};

use super::*;

/// A shard of a parameter, say: bytes, which may not be ready yet.
#[derive(Debug)]
struct Piece {
    bytes: Vec<u8>,
    ready: AtomicBool,
    broken: bool,
}

impl Piece {
    fn new(rank: usize, len: usize) -> Arc<Self> {
        let bytes = (0..len).map(|i| (i * 31 + rank * 7) as u8).collect();
        Arc::new(Self { bytes, ready: AtomicBool::new(true), broken: false })
    }
}

impl Expose for Piece {
    fn expose(&self, _key: Key) -> Exposure {
        if self.broken {
            return Exposure::Failed("its disk is gone".to_string());
        }
        if !self.ready.load(Ordering::Acquire) {
            return Exposure::Pending;
        }
        Exposure::Ready { tag: format!("u8 [{}]", self.bytes.len()), bytes: Box::new(self.bytes.clone()) }
    }
}

fn bytes_of(seen: ReadValue<Piece>) -> (String, Vec<u8>) {
    match seen {
        ReadValue::Bytes { tag, bytes } => (tag, bytes),
        ReadValue::Here(_) => panic!("ranks are processes"),
    }
}

pub(super) fn window(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    let (rank, world) = (comm.rank(), comm.world());
    let window: Window<Piece> = Window::join_processes(comm);
    let second: Window<Piece> = Window::join_processes(comm);
    let peers: Vec<usize> = (0..world).filter(|&peer| peer != rank).collect();
    let key = |object, version| Key { object, version };
    assert!(window.is_remote());

    // Sizes inside and outside of the message, all at once, some published late.
    let sizes = [0, 1, 100, 8192, 8193, 300_000];
    let mut kept = Vec::new();
    for (object, &len) in sizes.iter().enumerate() {
        if object == 3 && rank == 0 {
            std::thread::sleep(Duration::from_millis(60));
        }
        let piece = Piece::new(rank, len + rank);
        window.publish(key(object as u64, 0), &piece);
        kept.push(piece);
        let key = key(object as u64, 0);
        let readings: Vec<_> = peers.iter().map(|&peer| window.begin_read(peer, key, &"a piece")).collect();
        for (reading, &peer) in readings.into_iter().zip(&peers) {
            let (tag, bytes) = bytes_of(reading.wait()?);
            assert_eq!(tag, format!("u8 [{}]", len + peer));
            assert_eq!(bytes, Piece::new(peer, len + peer).bytes);
        }
    }
    // This rank's own is the value itself.
    assert!(window.read(rank, key(1, 0), &"my own")?.here().is_some());

    // The whole, in place: rank r has `len` bytes at `r len`.
    let len = 70_001;
    let piece = Piece::new(rank, len);
    window.publish(key(50, 3), &piece);
    let pieces: Vec<_> = peers.iter().map(|&peer| (peer, peer * len..(peer + 1) * len)).collect();
    let tag = format!("u8 [{len}]");
    let own = Some((rank * len, &piece.bytes[..]));
    let whole = GatherRequest { dtype: DType::U8, elements: world * len, tag: &tag, own, pieces: &pieces };
    let all = window.gather(whole, key(50, 3), &"a whole")?;
    assert_eq!(all.into_u8(), (0..world).flat_map(|rank| Piece::new(rank, len).bytes.clone()).collect::<Vec<u8>>());
    let hole = GatherRequest { own: None, ..whole };
    assert!(matches!(window.gather(hole, key(50, 3), &"a whole"), Err(CommError::Shape { .. })));

    // A pending value holds up nobody but those who want it.
    let pending = Arc::new(Piece { bytes: vec![9; 10], ready: AtomicBool::new(false), broken: false });
    window.publish(key(60, 0), &pending);
    let waiting: Vec<_> = peers.iter().map(|&peer| window.begin_read(peer, key(60, 0), &"what is pending")).collect();
    for seen in second_of(&second, rank, &peers)? {
        assert_eq!(seen, 4);
    }
    comm.barrier()?;
    pending.ready.store(true, Ordering::Release);
    window.changed();
    for reading in waiting {
        assert_eq!(bytes_of(reading.wait()?).1, vec![9; 10]);
    }

    // What was replaced is gone.
    comm.barrier()?;
    let next = Piece::new(rank, 5);
    window.publish(key(60, 1), &next);
    drop(pending);
    window.retract(key(60, 0));
    comm.barrier()?;
    for &peer in &peers {
        let gone = window.read(peer, key(60, 0), &"the old one");
        assert!(matches!(gone, Err(CommError::Gone { .. })), "{gone:?}");
    }

    // Values live until all have ended: ranks read from one that has returned.
    let last = Piece::new(rank, 20_000);
    window.publish(key(70, 0), &last);
    if rank == 0 {
        std::mem::forget((last, kept));
        return Ok(());
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(bytes_of(window.read(0, key(70, 0), &"of a rank that has ended")?).1.len(), 20_000);
    Ok(())
}

/// Payloads far larger than any buffer on the way, in both directions concurrently on two groups, and reads while nobody receives them.
pub(super) fn bulk(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    let (rank, world) = (comm.rank(), comm.world());
    let window: Window<Piece> = Window::join_processes(comm);
    let other = comm.duplicate("other")?;
    let key = |object| Key { object, version: 0 };
    let large = Piece::new(rank, 20_000_000 + rank);
    window.publish(key(1), &large);
    comm.barrier()?;
    let peer = (rank + 1) % world;
    for round in 0..3_u64 {
        let mine = vec![rank as u8 + round as u8; 12_000_000];
        // Rank 0 has sent its part, and its thread waits in a read; the others come to the exchange only when they have read.
        let first = (rank == 0).then(|| comm.start(Request::AllGather(Buffer::U8(mine.clone()))));
        let (_, bytes) = bytes_of(window.read(peer, key(1), &"a large piece")?);
        assert_eq!((bytes.len(), bytes[77]), (20_000_000 + peer, Piece::new(peer, 78).bytes[77]));
        let small = Piece::new(rank, 10);
        window.publish(key(100 + round), &small);
        assert_eq!(bytes_of(window.read(peer, key(100 + round), &"a small piece")?).1, Piece::new(peer, 10).bytes);
        let also = other.start(Request::AllToAll(Buffer::F32(vec![rank as f32; 1_000_000 * world])));
        let all = first.unwrap_or_else(|| comm.start(Request::AllGather(Buffer::U8(mine)))).wait()?.into_u8();
        for from in 0..world {
            let part = &all[from * 12_000_000..(from + 1) * 12_000_000];
            assert!(part.iter().all(|&byte| byte == from as u8 + round as u8), "the part of rank {from}");
        }
        let also = also.wait()?.into_f32();
        assert!(also.iter().enumerate().all(|(i, &value)| value == (i / 1_000_000) as f32));
        std::mem::forget(small);
    }
    std::mem::forget(large);
    Ok(())
}

#[test]
fn large_payloads_both_ways_hold_up_no_read() {
    launched("bulk", 2).assert_ok();
    launched("bulk chunks", 3).assert_ok();
}

/// A second window has its own keys.
fn second_of(window: &Window<Piece>, rank: usize, peers: &[usize]) -> Result<Vec<usize>, CommError> {
    let piece = Piece::new(rank, 4);
    let key = Key { object: 60, version: 0 };
    window.publish(key, &piece);
    let readings: Vec<_> = peers.iter().map(|&peer| window.begin_read(peer, key, &"the second window's")).collect();
    let lens = readings.into_iter().map(|reading| Ok(bytes_of(reading.wait()?).1.len())).collect();
    // Kept until the process ends: a slower rank may still ask.
    std::mem::forget(piece);
    lens
}

#[test]
fn windows_reach_across_processes() {
    for ranks in [1, 2, 3] {
        launched("window", ranks).assert_ok();
    }
    launched("window chunks", 2).assert_ok();
}

pub(super) fn window_failed(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let window: Window<Piece> = Window::join_processes(run.comm());
    let key = Key { object: 1, version: 0 };
    let broken = Arc::new(Piece { bytes: vec![], ready: AtomicBool::new(true), broken: true });
    if run.comm().rank() == 0 {
        window.publish(key, &broken);
        return run.comm().barrier();
    }
    window.read(0, key, &"parameter 7").map(|_| ())
}

#[test]
fn a_value_that_cannot_be_had_fails_its_readers() {
    let launched = launched("window failed", 2);
    for rank in 0..2 {
        let note = launched.note(rank);
        assert!(note.contains("parameter 7") && note.contains("its disk is gone"), "{note}");
    }
}

pub(super) fn window_left(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let window: Window<Piece> = Window::join_processes(run.comm());
    if run.comm().rank() == 0 {
        return Ok(());
    }
    window.read(0, Key { object: 1, version: 0 }, &"parameter 8").map(|_| ())
}

#[test]
fn an_owner_that_has_ended_publishes_nothing_more() {
    let launched = launched("window left", 2);
    for rank in 0..2 {
        let note = launched.note(rank);
        assert!(note.contains("parameter 8") && note.contains("rank 0 has already ended"), "{note}");
    }
}

pub(super) fn window_late(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let window: Window<Piece> = Window::join_processes(run.comm());
    if run.comm().rank() == 0 {
        std::thread::sleep(Duration::from_millis(1500));
        return run.comm().barrier();
    }
    window.read(0, Key { object: 1, version: 0 }, &"parameter 9").map(|_| ())
}

#[test]
fn a_reader_gives_up_at_the_deadline() {
    let launched = launched("window late", 2);
    assert_eq!(launched.code, Some(code::WATCHDOG), "{}", launched.output);
    for rank in 0..2 {
        let note = launched.note(rank);
        assert!(note.contains("a gather of parameter 9") && note.contains("for rank(s) [0]"), "{note}");
    }
    let report = flight::merge(&launched.flights()).unwrap();
    assert!(report.waits.iter().any(|wait| wait.rank == 1 && wait.for_ranks == [0]), "{report}");
}

pub(super) fn window_tag(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let window: Window<Piece> = Window::join_processes(run.comm());
    let (rank, world, key) = (run.comm().rank(), run.comm().world(), Key { object: 1, version: 0 });
    let piece = Piece::new(rank, 5000 + rank);
    window.publish(key, &piece);
    run.comm().barrier()?;
    if rank == 1 {
        let tag = "u8 [5000]";
        let whole = GatherRequest { dtype: DType::U8, elements: 5001, tag, own: None, pieces: &[(0, 0..5001)] };
        assert!(matches!(window.gather(whole, key, &"a"), Err(CommError::Mismatch { .. })));
        let whole =
            GatherRequest { dtype: DType::U8, elements: 5000, tag: "f32 [5000]", own: None, pieces: &[(0, 0..5000)] };
        let error = window.gather(whole, key, &"a").unwrap_err().to_string();
        assert!(error.contains("f32 [5000]") && error.contains("u8 [5000]"), "{error}");
        let whole = GatherRequest { dtype: DType::U8, elements: 5000, tag, own: None, pieces: &[(0, 0..5000)] };
        assert_eq!(window.gather(whole, key, &"a")?.into_u8(), Piece::new(0, 5000).bytes);
    }
    assert!(world == 2);
    run.comm().barrier()
}

#[test]
fn a_piece_of_another_kind_is_refused() {
    launched("window tag", 2).assert_ok();
}
