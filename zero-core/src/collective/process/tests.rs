//! Message counts with many ranks: this engine with ranks that are threads, over [`MemoryLink`] or sockets.
//!
//! `cargo test -p zero-core --lib a_thousand_ranks -- --ignored --nocapture` prints the tables of ADR 23.

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::super::launcher::{Rendezvous, Start, Topology};
use super::link::memory::{Hub, MemoryLink, Said};
use super::run::{ProcessOptions, ProcessRun, over, start};
use crate::checkpoint::{Check, Checkpoint, ElementType, Piece, SaveOptions, find_latest_together, piece_for, save};
use crate::collective::agree;
use crate::window::{Expose, Exposure, Key, ReadValue, Window};
use crate::{Buffer, Collective, CommError, ReduceOp};

/// Cost of a phase; counts are the maximum over the ranks.
#[derive(Debug)]
struct Cost {
    phase: &'static str,
    messages: usize,
    peers: usize,
    bytes: usize,
    /// CPU time of all ranks, divided by their number.
    processor: Duration,
    wall: Duration,
}

/// Returns the CPU time so far of this process, and of the child processes that it has waited for.
pub(super) fn processor() -> Duration {
    let of = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    let times = [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN].map(|who| {
        // SAFETY: a `rusage` of zeros is valid, and the call writes one.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(who, &raw mut usage);
            usage
        };
        of(usage.ru_utime) + of(usage.ru_stime)
    });
    times.into_iter().sum()
}

/// Number of the checkpoint's tensors.
const TENSORS: usize = 148;

/// Returns a rank's shard of each of a model's tensors.
fn pieces(rank: usize, world: usize) -> Vec<Piece<'static>> {
    let piece = |at: usize| {
        let name = format!("transformer.h.{at}.mlp.c_fc.weight");
        Piece::new(name, ElementType::F32, vec![world], ((at * rank) as f32).to_le_bytes().to_vec())
    };
    (0..TENSORS).map(piece).collect()
}

type Phase = (&'static str, fn(&dyn Collective, &Path) -> Result<(), CommError>);

const PHASES: [Phase; 7] = [
    ("a fence", |comm, _| comm.barrier()),
    ("agreement on settings", |comm, _| {
        let settings: Vec<String> = (0..60).map(|line| format!("a setting of number {line}: its value")).collect();
        assert!(agree(comm, &settings)?.is_none());
        Ok(())
    }),
    ("a norm", |comm, _| {
        let sum = comm.all_reduce(Buffer::F32(vec![comm.rank() as f32]), ReduceOp::Sum)?.into_f32();
        assert_eq!(sum, [(0..comm.world()).fold(0.0, |sum, rank| sum + rank as f32)]);
        Ok(())
    }),
    ("a broadcast", |comm, _| {
        let root = comm.world() / 3;
        assert_eq!(comm.broadcast(Buffer::U8(vec![comm.rank() as u8]), root)?.into_u8(), [root as u8]);
        Ok(())
    }),
    ("groups of 8, and one of each", |comm, _| {
        let near = comm.split("machine", (comm.rank() / 8) as u64)?;
        let far = comm.split("across", (comm.rank() % 8) as u64)?;
        assert_eq!((near.world(), far.world()), (8, comm.world() / 8));
        near.barrier().and_then(|()| far.barrier())
    }),
    ("save", |comm, folder| {
        let pieces = pieces(comm.rank(), comm.world());
        let saved = save(comm, folder, 7, &pieces, &Value::Null, &SaveOptions::default()).unwrap();
        assert_eq!(saved.step, 7);
        Ok(())
    }),
    ("resume", |comm, folder| {
        let found = find_latest_together(comm, folder, Check::Contents).unwrap();
        let checkpoint = Checkpoint::open_as_read(&found.checkpoint.unwrap()).unwrap();
        for piece in pieces(comm.rank(), comm.world()) {
            assert_eq!(piece_for(&checkpoint, &piece.name, comm.rank(), comm.world()).unwrap(), *piece.bytes);
        }
        Ok(())
    }),
];

/// Runs every phase on `world` ranks, then one rank fails while the others wait.
fn costs(world: usize) -> Vec<Cost> {
    let (hub, meet, folder) = (Hub::new(world), Arc::new(Barrier::new(world)), tempfile::tempdir().unwrap());
    let options = ProcessOptions { deadline: Duration::from_secs(120), ..ProcessOptions::default() };
    let failing = world / 2;
    let rank = |rank: usize| {
        let (hub, of_link) = (&hub, hub.clone());
        let open = move || {
            let leaders: Vec<usize> = (0..world).map(|rank| rank - rank % 8).collect();
            Ok((MemoryLink::open(of_link, rank), Topology::from_leaders(rank, &leaders)))
        };
        let run = over(&options, rank, open).unwrap();
        let comm = run.comm().clone();
        let mut costs = Vec::new();
        let mut measure = |phase: &'static str, run: &mut dyn FnMut()| {
            if rank == 0 {
                hub.take_said();
            }
            meet.wait();
            let (begin, before) = (Instant::now(), processor());
            run();
            meet.wait();
            // The others wait while one takes the counts.
            if rank == 0 {
                let (wall, processor) = (begin.elapsed(), (processor() - before) / world as u32);
                let said = hub.take_said();
                let most = |of: fn(&Said) -> usize| said.iter().map(of).max().unwrap_or(0);
                let (messages, bytes) = (most(|said| said.messages), most(|said| said.bytes));
                costs.push(Cost { phase, messages, peers: most(|said| said.peers.len()), bytes, processor, wall });
            }
            meet.wait();
        };
        for (phase, body) in PHASES {
            measure(phase, &mut || body(&*comm, folder.path()).unwrap());
        }
        let mut told = None;
        measure("a rank fails", &mut || {
            if rank == failing {
                std::thread::sleep(Duration::from_millis(100));
                comm.abort("a test's failure");
            }
            told = Some(comm.barrier().unwrap_err());
        });
        assert!(matches!(told, Some(CommError::PeerFailed { peer, .. }) if peer == failing), "{told:?}");
        assert!(run.finish().is_err());
        costs
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let spawn =
            |at: usize| std::thread::Builder::new().stack_size(1 << 20).spawn_scoped(scope, move || rank(at)).unwrap();
        let ranks: Vec<_> = (0..world).map(spawn).collect();
        ranks.into_iter().flat_map(|rank| rank.join().unwrap()).collect()
    })
}

fn show(world: usize, costs: &[Cost]) {
    for Cost { phase, messages, peers, bytes, processor, wall } in costs {
        println!("| {world} | {phase} | {messages} | {peers} | {bytes} | {processor:.1?} | {wall:.1?} |");
    }
}

/// Checks that the messages of a rank, and the ranks it communicates with, are bounded per factor of 8 in ranks.
fn check(world: usize, costs: &[Cost]) {
    let rounds = (world as f64).log(8.0).ceil() as usize;
    for Cost { phase, messages, peers, .. } in costs {
        let operations = match *phase {
            "a fence" | "a norm" | "a broadcast" => 1,
            "agreement on settings" => 2,
            "groups of 8, and one of each" => 4,
            // Progress messages, whose number grows with the time that the disk takes.
            "save" | "resume" => 40,
            _ => 2,
        };
        assert!(*messages <= operations * 14 * rounds, "{world} ranks, {phase}: {messages} messages");
        assert!(*peers <= 2 * 14 * rounds, "{world} ranks, {phase}: {peers} peers");
    }
}

#[test]
fn ranks_speak_to_few() {
    // Not a power of 8, and more than one.
    for world in [64, 72] {
        let costs = costs(world);
        check(world, &costs);
    }
}

#[test]
#[ignore = "a minute of two processors"]
fn a_thousand_ranks() {
    println!("| ranks | | messages | to ranks | bytes | processor | all of them took |");
    for world in [64, 256, 1024] {
        let costs = costs(world);
        show(world, &costs);
        check(world, &costs);
    }
}

/// The value that a rank publishes.
struct Published(Vec<u8>);

impl Expose for Published {
    fn expose(&self, _: Key) -> Exposure {
        Exposure::Ready { tag: "u8".into(), bytes: Box::new(self.0.clone()) }
    }
}

/// Runs `body` on ranks that are threads of this process, over sockets.
fn over_sockets<T: Send>(world: usize, body: impl Fn(usize, ProcessRun) -> T + Sync) -> Vec<T> {
    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let options = ProcessOptions { deadline: Duration::from_secs(60), ..ProcessOptions::default() };
    let body = &body;
    std::thread::scope(|scope| {
        let spawn = |rank: usize| {
            let job = Rendezvous { rank, world, host: "127.0.0.1".into(), port, ..Rendezvous::default() };
            let options = &options;
            scope.spawn(move || body(rank, start(options, &Start::Job(job)).unwrap()))
        };
        let ranks: Vec<_> = (0..world).map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Uses more ranks than neighbours: large data for each, so that all connections are made at once, from both ends; reads of
/// published values, and groups of ranks that are not neighbours. All ranks succeed.
#[test]
fn ranks_that_are_no_neighbours_connect_when_they_speak() {
    const WORLD: usize = 26;
    over_sockets(WORLD, |rank, run| {
        let comm = run.comm().clone();
        let window: Window<Published> = Window::join_processes(&comm);
        let key = Key { object: 0, version: 0 };
        let value = Arc::new(Published(vec![rank as u8; 20_000]));
        window.publish(key, &value);
        // A group of 13 whose members are 2 apart, and one rank that reads before anything else was said to that peer.
        let far = comm.split("every other", (rank % 2) as u64).unwrap();
        let sum = far.all_reduce(Buffer::F32(vec![1.0; 30_000]), ReduceOp::Sum).unwrap().into_f32();
        assert_eq!((sum.len(), sum[0]), (30_000, 13.0));
        let peer = (rank + 12) % WORLD;
        match window.read(peer, key, &"a value").unwrap() {
            ReadValue::Bytes { bytes, .. } => assert_eq!(bytes, vec![peer as u8; 20_000]),
            ReadValue::Here(_) => panic!("they are like processes"),
        }
        let parts = comm.all_gather(Buffer::F32(vec![rank as f32; 20_000])).unwrap().into_f32();
        assert!(parts.iter().enumerate().all(|(at, &value)| value == (at / 20_000) as f32));
        comm.barrier().unwrap();
        drop(window);
        drop((far, comm));
        run.finish().unwrap();
    });
}

/// All ranks name a rank that fails, including those that are not its neighbours.
#[test]
fn all_ranks_hear_of_one_that_fails_over_sockets() {
    const WORLD: usize = 26;
    over_sockets(WORLD, |rank, run| {
        let comm = run.comm().clone();
        // It may fail before the slowest has all that was sent.
        let gathered = comm.all_gather(Buffer::F32(vec![rank as f32; 20_000]));
        if rank == 5 {
            comm.abort("a test's failure");
        }
        let error = gathered.and_then(|_| comm.barrier()).unwrap_err();
        assert!(matches!(error, CommError::PeerFailed { peer: 5, .. }), "{error}");
        assert!(run.finish().is_err());
    });
}
