//! Ranks that find each other over sockets, and groups that end with their last handle:
//! `cargo test -p zero-core --test tcp_engine`. Ranks are threads here, each with its own connections; `process_engine` runs
//! and kills processes.

mod door;
#[path = "../common/port.rs"]
mod port;

use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use door::{hello, stranger};
use half::bf16;
use port::free_port;
use zero_core::collective::launcher::{Rendezvous, Start};
use zero_core::collective::process::{ProcessComm, ProcessOptions, RendezvousError, start};
use zero_core::collective::threads::{ThreadOptions, run as run_threads};
use zero_core::collective::{agree, flight};
use zero_core::{Buffer, Collective, CommError, ReduceOp, Request, StartError};

const PATIENT: Duration = Duration::from_secs(30);

fn place(rank: usize, world: usize, port: u16) -> Rendezvous {
    Rendezvous { rank, world, local_rank: Some(rank), host: "127.0.0.1".into(), port, ..Rendezvous::default() }
}

fn options(deadline: Duration) -> ProcessOptions {
    ProcessOptions { deadline, grace: Duration::from_millis(500), ..ProcessOptions::default() }
}

/// Connects a rank, and returns its group, which ends with its last handle.
fn connect(place: &Rendezvous, options: &ProcessOptions) -> Result<Arc<ProcessComm>, RendezvousError> {
    match start(options, &Start::Job(place.clone())) {
        Ok(run) => Ok(run.into_comm()),
        Err(StartError::Rendezvous(error)) => Err(error),
        Err(other) => panic!("{other}"),
    }
}

/// Runs `body` on `world` ranks, and returns the results.
fn on_ranks<T: Send>(world: usize, options: &ProcessOptions, body: impl Fn(Arc<ProcessComm>) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let rank = |rank| {
            let body = &body;
            scope.spawn(move || body(connect(&place(rank, world, port), options).unwrap()))
        };
        let ranks: Vec<_> = (0..world).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn requests(rank: usize, world: usize) -> Vec<Request> {
    let values = |len: usize| -> Vec<f32> { (0..len).map(|i| (i * 31 + rank * 7) as f32 * 0.37 - 3.0).collect() };
    let mut all = vec![Request::Barrier(""), Request::Barrier("a test")];
    for len in [0, 1, 5, 1000] {
        let kinds = |len: usize| {
            let v = values(len);
            let half = v.iter().map(|&x| bf16::from_f32(x)).collect();
            [Buffer::F32(v.clone()), Buffer::Bf16(half), Buffer::F64(v.iter().map(|&x| x.into()).collect())]
        };
        for buffer in kinds(len) {
            all.push(Request::AllGather(buffer.clone()));
            all.extend((0..world).map(|root| Request::Broadcast(buffer.clone(), root)));
            all.extend([ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max].map(|op| Request::AllReduce(buffer.clone(), op)));
        }
        for buffer in kinds(len * world) {
            all.push(Request::AllToAll(buffer.clone()));
            all.push(Request::ReduceScatter(buffer, ReduceOp::Mean));
        }
    }
    all
}

#[test]
fn results_and_counts_are_those_of_threads() {
    for world in [1, 2, 3] {
        let expected = run_threads(world, &ThreadOptions::default(), |comm| {
            let results: Result<Vec<_>, CommError> =
                requests(comm.rank(), world).into_iter().map(|request| comm.execute(request)).collect();
            results.map(|results| (results, comm.wire().read()))
        })
        .unwrap();
        let got = on_ranks(world, &options(PATIENT), |comm| {
            let mut all = requests(comm.rank(), world).into_iter();
            let mut results: Vec<Buffer> =
                all.by_ref().take(20).map(|request| comm.execute(request).unwrap()).collect();
            // The rest in flight at once.
            let pending: Vec<_> = all.map(|request| comm.start(request)).collect();
            results.extend(pending.into_iter().map(|pending| pending.wait().unwrap()));
            (results, comm.wire().read())
        });
        assert_eq!(got, expected);
    }
}

#[test]
fn groups_of_some_ranks_and_settings() {
    on_ranks(4, &options(PATIENT), |comm| {
        let rank = comm.rank();
        let half = comm.split("half", (rank / 2) as u64).unwrap();
        let other = comm.duplicate("other").unwrap();
        comm.check("device", 4, &"all_gather").unwrap();
        let sum = |comm: &dyn Collective| {
            let mine = Buffer::F32(vec![rank as f32]);
            comm.all_reduce(mine, ReduceOp::Sum).unwrap().into_f32()[0]
        };
        assert_eq!((half.members(), half.rank()), (&[rank / 2 * 2, rank / 2 * 2 + 1][..], rank % 2));
        // In no common order: groups know nothing of each other.
        let sums = match rank {
            0 | 1 => (sum(&*half), sum(&*other)),
            _ => {
                let all = other.start(Request::AllReduce(Buffer::F32(vec![rank as f32]), ReduceOp::Sum));
                (sum(&*half), all.wait().unwrap().into_f32()[0])
            }
        };
        assert_eq!(sums, (if rank < 2 { 1.0 } else { 5.0 }, 6.0));
        let lines = [format!("seed = {}", rank / 3)];
        let difference = agree(&*comm, &lines).unwrap().unwrap();
        assert_eq!((difference.rank, difference.other.as_str()), (3, "seed = 1"));
    });
}

#[test]
fn different_calls_are_told_to_all() {
    let errors = on_ranks(3, &options(PATIENT), |comm| {
        comm.barrier().unwrap();
        let len = if comm.rank() == 1 { 4 } else { 5 };
        comm.all_gather(Buffer::F32(vec![0.0; len])).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, CommError::Mismatch { ref at, .. } if at.seq == 1), "{error}");
        assert!(error.to_string().contains("of 4 f32") && error.to_string().contains("of 5 f32"), "{error}");
    }
}

#[test]
fn a_late_rank_is_named_within_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let hasty = ProcessOptions { flight_dir: Some(folder.path().into()), ..options(Duration::from_millis(600)) };
    let errors = on_ranks(3, &hasty, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            let limit = Instant::now() + PATIENT;
            while comm.check("none", 0, &"waiting").is_ok() && Instant::now() < limit {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        comm.all_reduce(Buffer::F32(vec![1.0]), ReduceOp::Sum).unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        match error {
            CommError::Timeout { missing, at, .. } if rank < 2 => assert_eq!((missing, at.rank), (&vec![2], rank)),
            // Told by the one whose deadline passed first.
            CommError::PeerFailed { peer: 0 | 1, reason, .. } => assert!(reason.contains("for rank(s) [2]"), "{error}"),
            error => panic!("rank {rank}: {error}"),
        }
    }
    let records: Vec<_> = (0..3).map(|rank| folder.path().join(format!("flight-rank-{rank}.json"))).collect();
    let report = flight::merge(&records).unwrap().to_string();
    assert!(report.contains("rank 2"), "{report}");
}

#[test]
fn a_rank_that_ends_or_aborts_is_named() {
    // The first of the others to see it ends too, but not before the second has seen it.
    let both = Barrier::new(2);
    let errors = on_ranks(3, &options(PATIENT), |comm| match comm.rank() {
        1 => None,
        _ => {
            let error = comm.barrier().err();
            both.wait();
            error
        }
    });
    for rank in [0, 2] {
        assert!(matches!(errors[rank], Some(CommError::PeerLeft { peer: 1, .. })), "{errors:?}");
    }
    let errors = on_ranks(3, &options(PATIENT), |comm| {
        if comm.rank() == 2 {
            comm.abort("its data is gone");
        }
        comm.barrier().unwrap_err()
    });
    for error in errors {
        assert!(matches!(&error, CommError::PeerFailed { peer: 2, .. }), "{error}");
        assert!(error.to_string().contains("its data is gone"), "{error}");
    }
}

/// An exchange that is too large to go through rank 0 as a hub.
#[test]
fn bulk_goes_between_any_two() {
    on_ranks(3, &options(PATIENT), |comm| {
        let rank = comm.rank() as u8;
        let all = comm.all_gather(Buffer::U8(vec![rank; 17 << 20])).unwrap().into_u8();
        assert!(all.chunks_exact(17 << 20).enumerate().all(|(of, part)| part.iter().all(|&byte| byte == of as u8)));
    });
}

/// The other ranks continue without a rank that has ended without an error, even after its connections have closed.
#[test]
fn a_group_goes_on_without_a_rank_that_has_ended() {
    on_ranks(3, &options(Duration::from_millis(1500)), |comm| {
        let two = comm.split("two", u64::from(comm.rank() == 1)).unwrap();
        if comm.rank() == 1 {
            return;
        }
        // Longer than rank 1 waits for the others.
        std::thread::sleep(Duration::from_millis(1500) + Duration::from_secs(3));
        let sum = two.all_reduce(Buffer::F32(vec![1.0; 5000]), ReduceOp::Sum).unwrap().into_f32();
        assert_eq!(sum, [2.0; 5000]);
        // Rank 0 ends because of rank 1; it is still rank 1 that rank 2 is told of.
        std::thread::sleep(Duration::from_millis(if comm.rank() == 2 { 500 } else { 0 }));
        let error = comm.barrier().unwrap_err();
        assert!(matches!(error, CommError::PeerLeft { peer: 1, .. }), "{error}");
    });
}

#[test]
fn one_local_rank_for_two_is_told_to_all() {
    let port = free_port();
    std::thread::scope(|scope| {
        let rank = |rank| {
            scope.spawn(move || {
                let place = Rendezvous { local_rank: Some(rank / 2), ..place(rank, 3, port) };
                connect(&place, &options(PATIENT)).unwrap_err().to_string()
            })
        };
        for error in [0, 1, 2].map(rank).map(|rank| rank.join().unwrap()) {
            assert!(error.contains("ranks 0 and 1 are both on") && error.contains("both have LOCAL_RANK 0"), "{error}");
        }
    });
}

#[test]
fn ranks_that_do_not_find_each_other_say_so() {
    let port = free_port();
    let short = options(Duration::from_millis(400));
    let begin = Instant::now();
    let error = connect(&place(1, 2, port), &short).unwrap_err();
    assert!(matches!(error, RendezvousError::Unreachable { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("check that rank 0 was started"), "{error}");
    std::thread::scope(|scope| {
        let one = scope.spawn(|| connect(&place(1, 3, port), &options(PATIENT)).unwrap_err());
        let other = scope.spawn(|| stranger(port, &hello(5, 2, 1)));
        let error = connect(&place(0, 3, port), &options(Duration::from_secs(2))).unwrap_err();
        assert!(matches!(&error, RendezvousError::Missing { missing, .. } if *missing == [2]), "{error}");
        assert!(error.to_string().contains("its WORLD_SIZE is 2, rank 0's is 3"), "{error}");
        let told = one.join().unwrap().to_string();
        assert!(told.contains("rank 0 ended or timed out before all ranks had connected"), "{told}");
        other.join().unwrap();
    });
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let error = connect(&place(0, 2, taken.local_addr().unwrap().port()), &short).unwrap_err();
    assert!(error.to_string().contains("MASTER_PORT to a port that nothing else uses"), "{error}");
    assert!(begin.elapsed() < PATIENT);
}

/// For example, an export by one rank.
#[test]
fn what_a_rank_does_alone_at_the_end_fails_no_other() {
    let port = free_port();
    let short = options(Duration::from_millis(600));
    std::thread::scope(|scope| {
        let rank = |rank| {
            let short = &short;
            scope.spawn(move || {
                zero_core::collective::process::run(short, &Start::Job(place(rank, 2, port)), |run| {
                    run.comm().barrier()?;
                    if rank == 0 {
                        std::thread::sleep(Duration::from_millis(2000));
                    }
                    Ok::<(), CommError>(())
                })
                .map_err(|failed| failed.to_string())
            })
        };
        for rank in [rank(0), rank(1)] {
            assert_eq!(rank.join().unwrap(), Ok(()));
        }
    });
}
