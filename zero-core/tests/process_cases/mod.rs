//! Requirements of the engine of processes over every link, as cases that run in their own processes. Each test starts its
//! binary again as several ranks; there the test `rank` runs the case that the environment names.

mod windows;

use std::path::Path;
use std::time::Duration;

use super::process_common::{Launched, LinkUnderTest, await_file, launch, note, note_pid, pid, rank_of, signal};
use half::{bf16, f16};
use zero_core::collective::exit::{code, end_process};
use zero_core::collective::flight;
use zero_core::collective::launcher::Start;
use zero_core::collective::process::{ProcessOptions, ProcessRun, run};
use zero_core::collective::threads::{ThreadOptions, run as run_threads};
use zero_core::{Buffer, Collective, CommError, ReduceOp, Request};

use windows::{bulk, window, window_failed, window_late, window_left, window_tag};

type Case = fn(&ProcessRun, &Path) -> Result<(), CommError>;

const LIMIT: Duration = Duration::from_secs(60);

fn cases() -> Vec<(&'static str, ProcessOptions, Case)> {
    let options = ProcessOptions { deadline: Duration::from_secs(20), ..ProcessOptions::default() };
    let chunks = ProcessOptions { chunk_bytes: 1000, ..options.clone() };
    let hasty = ProcessOptions { deadline: Duration::from_millis(700), ..options.clone() };
    let nodes = ProcessOptions { node_size: Some(2), ..options.clone() };
    let of = |options: &ProcessOptions| options.clone();
    vec![
        ("collectives", of(&options), collectives as Case),
        ("chunks", of(&chunks), collectives),
        ("groups", of(&options), groups),
        ("nodes", of(&nodes), nodes_of_two),
        ("split", of(&options), split),
        ("split trouble", of(&options), split_trouble),
        ("window", of(&options), window),
        ("window chunks", of(&chunks), window),
        ("bulk", of(&options), bulk),
        ("bulk chunks", of(&ProcessOptions { chunk_bytes: 100_000, ..options.clone() }), bulk),
        ("window failed", of(&options), window_failed),
        ("window left", of(&options), window_left),
        ("window late", of(&hasty), window_late),
        ("window tag", of(&options), window_tag),
        ("mismatch", of(&options), mismatch),
        ("skip", of(&options), skip),
        ("skip broadcast", of(&options), skip_broadcast),
        ("leave", of(&options), leave),
        ("abort", of(&options), abort),
        ("panic", of(&options), panics),
        ("late", of(&hasty), late),
        ("signal", of(&ProcessOptions { deadline: Duration::from_secs(2), ..options }), signalled),
    ]
}

/// Runs a rank of a case. Without a case's environment variables it does nothing.
#[test]
fn rank() {
    let Some((name, folder)) = rank_of() else { return };
    let (_, mut options, case) =
        cases().into_iter().find(|(of, ..)| *of == name).unwrap_or_else(|| panic!("no case '{name}'"));
    options.flight_dir = Some(folder.clone());
    let mut who = None;
    let start = Start::from_environment().expect("the launcher sets what it should");
    let outcome = run(&options, &start, |run| {
        who = Some(run.comm().place().rank);
        note_pid(&folder, run.comm().place().rank);
        case(run, &folder)
    });
    let text = outcome.as_ref().map_or_else(ToString::to_string, |()| "ok".to_string());
    note(&folder, who.expect("the ranks can be connected"), &text);
    match outcome {
        Ok(()) => end_process(code::SUCCESS),
        Err(failed) => failed.end_process(),
    }
}

fn launched(case: &str, ranks: usize) -> Launched {
    launch((super::LINK, "process_cases::rank"), case, ranks, LIMIT, |_| {})
}

// ---- collectives ----

fn values(rank: usize, len: usize, salt: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 7919 + rank * 104_729 + salt * 31) % 2003) as f32 * 0.37 - 300.0 + 1e-3 * rank as f32)
        .collect()
}

/// Returns this rank's contribution, in each of the types.
fn inputs(rank: usize, len: usize) -> Vec<Buffer> {
    let v = values(rank, len, 1);
    vec![
        Buffer::F32(v.clone()),
        Buffer::F64(v.iter().map(|&x| f64::from(x) * 1.1).collect()),
        Buffer::F16(v.iter().map(|&x| f16::from_f32(x)).collect()),
        Buffer::Bf16(v.iter().map(|&x| bf16::from_f32(x)).collect()),
        Buffer::U8(v.iter().map(|&x| (x.abs() as u32 % 7) as u8).collect()),
    ]
}

/// Returns every collective with every type and several sizes, in the same order on every rank.
fn requests(rank: usize, world: usize) -> Vec<Request> {
    let mut all = vec![Request::Barrier(""), Request::Barrier("a test")];
    for len in [0, 1, 2, 3, 7, 64, 1001, 5000] {
        for buffer in inputs(rank, len) {
            all.push(Request::AllGather(buffer.clone()));
            for root in [0, 1, world / 2, world - 1].into_iter().filter(|&root| root < world) {
                all.push(Request::Broadcast(buffer.clone(), root));
                all.push(Request::Gather(buffer.clone(), root));
            }
            all.push(Request::AllReduce(buffer.clone(), ReduceOp::Max));
            if buffer.dtype().name() != "u8" {
                all.push(Request::AllReduce(buffer.clone(), ReduceOp::Sum));
                all.push(Request::AllReduce(buffer, ReduceOp::Mean));
            }
        }
        for buffer in inputs(rank, len * world) {
            all.push(Request::AllToAll(buffer.clone()));
            all.push(Request::ReduceScatter(buffer.clone(), ReduceOp::Max));
            if buffer.dtype().name() != "u8" {
                all.push(Request::ReduceScatter(buffer.clone(), ReduceOp::Sum));
                all.push(Request::ReduceScatter(buffer, ReduceOp::Mean));
            }
        }
    }
    all
}

fn bits(buffer: &Buffer) -> Vec<u64> {
    match buffer {
        Buffer::F32(v) => v.iter().map(|x| u64::from(x.to_bits())).collect(),
        Buffer::F64(v) => v.iter().map(|x| x.to_bits()).collect(),
        Buffer::F16(v) => v.iter().map(|x| u64::from(x.to_bits())).collect(),
        Buffer::Bf16(v) => v.iter().map(|x| u64::from(x.to_bits())).collect(),
        Buffer::U8(v) => v.iter().map(|&x| u64::from(x)).collect(),
    }
}

/// The same bits and the same byte counts as the threads engine, for blocking and started calls.
fn collectives(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    let (rank, world) = (comm.rank(), comm.world());
    let expected = run_threads(world, &ThreadOptions::default(), |comm| {
        let results: Result<Vec<Buffer>, CommError> =
            requests(comm.rank(), world).into_iter().map(|request| comm.execute(request)).collect();
        results.map(|results| (results, comm.wire().read()))
    })
    .unwrap();
    let (results, wire) = &expected[rank];
    let compare = |got: &Buffer, request: &str, i: usize| {
        assert_eq!(got.dtype(), results[i].dtype(), "{request}");
        assert_eq!(bits(got), bits(&results[i]), "{request}, number {i}");
    };
    for (i, request) in requests(rank, world).into_iter().enumerate() {
        let name = format!("{request:?}");
        compare(&comm.execute(request)?, &name, i);
    }
    assert_eq!(comm.wire().read(), *wire);
    let started: Vec<_> = requests(rank, world).into_iter().map(|request| comm.start(request)).collect();
    for (i, pending) in started.into_iter().enumerate() {
        compare(&pending.wait()?, "started", i);
    }
    Ok(())
}

#[test]
fn collectives_have_the_bits_of_the_threads_engine() {
    // More than 8 speak in rounds, and by trees.
    for ranks in [1, 2, 3, 4, 10] {
        launched("collectives", ranks).assert_ok();
    }
}

#[test]
fn payloads_of_several_messages_arrive_whole() {
    for ranks in [2, 3] {
        launched("chunks", ranks).assert_ok();
    }
}

/// Two groups of the same ranks, used by two threads concurrently, each in its own order.
fn groups(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    let (left, right) = (comm.duplicate("left")?, comm.duplicate("right")?);
    let use_it = |group: &dyn Collective, salt: usize, pause: bool| -> Result<(), CommError> {
        for round in 0..100 {
            if pause && round % 10 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let len = 1 + (round * 37 + salt) % 4000;
            let sum = group.all_reduce(Buffer::F32(values(group.rank(), len, salt)), ReduceOp::Sum)?.into_f32();
            let mut expected = values(0, len, salt);
            for rank in 1..group.world() {
                expected.iter_mut().zip(values(rank, len, salt)).for_each(|(a, b)| *a += b);
            }
            assert_eq!(sum, expected);
        }
        Ok(())
    };
    let slow = comm.rank() == 0;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| use_it(&*left, 1, slow));
        use_it(&*right, 2, !slow)?;
        other.join().unwrap()
    })?;
    assert_eq!((left.label(), right.label()), ("left", "right"));
    // A group of a group, while the first has started operations.
    let pending: Vec<_> = (0..10).map(|i| left.start(Request::AllGather(Buffer::U8(vec![i; 3])))).collect();
    let child = left.duplicate("child")?;
    child.barrier()?;
    for (i, pending) in pending.into_iter().enumerate() {
        assert_eq!(pending.wait()?.into_u8(), vec![i as u8; 3 * comm.world()]);
    }
    Ok(())
}

#[test]
fn groups_are_used_at_the_same_time() {
    launched("groups", 2).assert_ok();
    launched("groups", 3).assert_ok();
}

fn nodes_of_two(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let (comm, place) = (run.comm(), run.comm().place());
    let (rank, world) = (comm.rank(), comm.world());
    assert_eq!((place.node, place.local_rank), (rank / 2, rank % 2));
    assert_eq!((place.nodes, place.local_world), (world.div_ceil(2), 2.min(world - rank / 2 * 2)));
    let node = comm.split("node", place.of_node()[0] as u64)?;
    assert_eq!(node.members(), place.of_node());
    assert_eq!((node.rank(), node.world()), (place.local_rank, place.local_world));
    let across = comm.split("across", place.across_nodes()[0] as u64)?;
    assert_eq!(across.members(), place.across_nodes());
    // The sum over all, by way of both, and in the groups at the same time.
    let part = node.all_reduce(Buffer::F64(vec![rank as f64 + 1.0; 5]), ReduceOp::Sum)?;
    let here: f64 = place.of_node().iter().map(|&rank| rank as f64 + 1.0).sum();
    assert_eq!(part, Buffer::F64(vec![here; 5]));
    let seen = across.all_gather(Buffer::U8(vec![rank as u8]))?.into_u8();
    assert_eq!(seen, across.members().iter().map(|&rank| rank as u8).collect::<Vec<_>>());
    let all = comm.all_gather(Buffer::U8(vec![rank as u8]))?;
    assert_eq!(all.into_u8().len(), world);
    Ok(())
}

#[test]
fn ranks_form_groups_by_machine() {
    for ranks in [1, 3, 4] {
        launched("nodes", ranks).assert_ok();
    }
}

fn split(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let (comm, rank) = (run.comm(), run.comm().rank());
    let sum = |group: &dyn Collective| -> Result<f32, CommError> {
        Ok(group.all_reduce(Buffer::F32(vec![rank as f32]), ReduceOp::Sum)?.into_f32()[0])
    };
    let half = comm.split("half", (rank / 2) as u64)?;
    let (own, both) = (half.split("own", rank as u64)?, half.split("both", 7)?);
    assert_eq!((own.members(), both.members()), (&[rank][..], &[rank / 2 * 2, rank / 2 * 2 + 1][..]));
    assert_eq!([sum(&*own)?, sum(&*both)?, sum(&**comm)?], [rank as f32, [1.0, 5.0][rank / 2], 6.0]);
    assert!(comm.in_process().is_none());
    comm.barrier()
}

#[test]
fn groups_are_split_and_split_again() {
    launched("split", 4).assert_ok();
}

fn split_trouble(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    let half = comm.split("half", (comm.rank() / 2) as u64)?;
    let pair = half.split("pair", 0)?;
    match comm.rank() {
        1 => {
            comm.abort("its data is gone");
            comm.barrier()
        }
        0 => pair.barrier(),
        2 => half.all_gather(Buffer::U8(vec![1])).map(|_| ()),
        _ => comm.barrier(),
    }
}

/// A rank that fails ends the waits of all ranks, whichever group they wait in.
#[test]
fn trouble_in_a_part_of_a_group_is_everyones() {
    let launched = launched("split trouble", 4);
    assert_ne!(launched.code, Some(0));
    for rank in 0..4 {
        let note = launched.note(rank);
        assert!(note.contains("its data is gone"), "{note}");
    }
}

// ---- trouble ----

fn mismatch(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    comm.barrier()?;
    let len = if comm.rank() == 1 { 5000 } else { 4000 };
    comm.all_reduce(Buffer::F32(vec![0.0; len]), ReduceOp::Sum)?;
    comm.barrier()
}

#[test]
fn all_ranks_see_both_sides_of_a_mismatch() {
    for ranks in [2, 3, 4, 10] {
        let launched = launched("mismatch", ranks);
        assert_ne!(launched.code, Some(0));
        for rank in 0..ranks {
            let note = launched.note(rank);
            assert!(note.contains("all_reduce of 4000 f32 (sum)") && note.contains("of 5000 f32"), "{note}");
            assert!(note.contains("operation 1 of group 'world'"), "{note}");
        }
        let report = flight::merge(&launched.flights()).unwrap();
        assert_eq!(launched.flights().len(), ranks, "{}", launched.output);
        assert!(report.mismatches.len() == 1 && report.mismatches[0].seq == 1, "{report}");
    }
}

fn skip(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    comm.barrier()?;
    if comm.rank() != 1 {
        comm.all_gather(Buffer::F32(vec![1.0; 3]))?;
    }
    comm.all_reduce(Buffer::F64(vec![1.0; 3]), ReduceOp::Max).map(|_| ())
}

#[test]
fn a_skipped_collective_is_a_mismatch() {
    let launched = launched("skip", 3);
    for rank in 0..3 {
        let note = launched.note(rank);
        assert!(note.contains("all_gather of 3 f32") && note.contains("all_reduce of 3 f64 (max)"), "{note}");
    }
}

/// A skipped broadcast, whose phases differ from those of the collective that runs in its place.
fn skip_broadcast(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    comm.barrier()?;
    if comm.rank() != 1 {
        comm.broadcast(Buffer::F32(vec![1.0; 3]), 0)?;
    }
    comm.all_reduce(Buffer::F64(vec![1.0; 3]), ReduceOp::Max).map(|_| ())
}

#[test]
fn a_skipped_broadcast_is_a_mismatch() {
    for ranks in [3, 10] {
        let launched = launched("skip broadcast", ranks);
        assert!(launched.took < Duration::from_secs(10), "far from the deadline: {:?}", launched.took);
        for rank in 0..ranks {
            let note = launched.note(rank);
            assert!(note.contains("broadcast of 3 f32") && note.contains("all_reduce of 3 f64 (max)"), "{note}");
        }
    }
}

fn leave(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    if comm.rank() == 1 {
        return Ok(());
    }
    comm.barrier()
}

#[test]
fn a_rank_that_returns_early_is_named() {
    for ranks in [3, 10] {
        let launched = launched("leave", ranks);
        for rank in 0..ranks {
            let note = launched.note(rank);
            assert!(note.contains("rank 1 has already ended"), "{note}");
        }
    }
}

fn abort(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    if comm.rank() == 1 {
        comm.abort("the data ends here");
    }
    // Present and future operations fail; one of them is under way on a thread of its own.
    let pending = comm.start(Request::AllGather(Buffer::U8(vec![1])));
    assert!(matches!(pending.wait(), Err(CommError::PeerFailed { peer: 1, .. })));
    let again = comm.barrier();
    assert!(matches!(again, Err(CommError::PeerFailed { peer: 1, .. })));
    Ok(())
}

#[test]
fn an_abort_reaches_every_rank() {
    for ranks in [3, 10] {
        let launched = launched("abort", ranks);
        assert_ne!(launched.code, Some(0));
        for rank in 0..ranks {
            assert_eq!(launched.note(rank), format!("rank 1 of {ranks}: the data ends here"));
        }
        assert_eq!(launched.flights().len(), ranks);
    }
}

fn panics(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    if run.comm().rank() == 0 {
        panic!("index 7 is out of bounds");
    }
    run.comm().barrier()
}

#[test]
fn a_panic_is_the_trouble_of_all() {
    let launched = launched("panic", 2);
    assert_eq!(launched.code, Some(code::FAILURE));
    for rank in 0..2 {
        let note = launched.note(rank);
        assert!(note.starts_with("rank 0 of 2:") && note.contains("index 7 is out of bounds"), "{note}");
    }
}

fn late(run: &ProcessRun, _: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    for _ in 0..3 {
        comm.barrier()?;
    }
    if comm.rank() == 2 {
        std::thread::sleep(Duration::from_millis(1500));
    }
    comm.all_reduce(Buffer::F32(vec![0.0; 10]), ReduceOp::Sum).map(|_| ())
}

#[test]
fn a_deadline_leaves_records_that_name_the_late_rank() {
    let launched = launched("late", 3);
    assert_eq!(launched.code, Some(code::WATCHDOG), "{}", launched.output);
    for rank in 0..3 {
        let note = launched.note(rank);
        assert!(note.contains("all_reduce of 10 f32 (sum)") && note.contains("for rank(s) [2]"), "{note}");
    }
    assert_eq!(launched.flights().len(), 3);
    let report = flight::merge(&launched.flights()).unwrap();
    let late = &report.late[0];
    assert_eq!((late.rank, late.seq, late.last_completed), (2, 3, Some(2)), "{report}");
    assert_eq!(late.waited_for_by, [0, 1], "{report}");
    println!("{report}");

    // Ranks that wait for one that waits for it name it too, as the first to come to the deadline does.
    let launched = self::launched("late", 10);
    assert_eq!(launched.code, Some(code::WATCHDOG), "{}", launched.output);
    for rank in 0..10 {
        assert!(launched.note(rank).contains("for rank(s) [2]"), "{}", launched.note(rank));
    }
    let report = flight::merge(&launched.flights()).unwrap();
    assert_eq!((report.late[0].rank, report.late[0].seq), (2, 3), "{report}");
}

fn signalled(run: &ProcessRun, folder: &Path) -> Result<(), CommError> {
    let comm = run.comm();
    comm.barrier()?;
    if comm.rank() == 1 {
        std::fs::write(folder.join("ready"), "").unwrap();
        std::thread::sleep(Duration::from_secs(30));
    }
    comm.all_gather(Buffer::F32(vec![0.0; 30_000])).map(|_| ())
}

#[test]
fn a_killed_rank_ends_the_others() {
    let launched = launch((super::LINK, "process_cases::rank"), "signal", 3, LIMIT, |folder| {
        await_file(&folder.join("ready"));
        signal(pid(folder, 1).unwrap(), libc::SIGKILL);
    });
    assert_ne!(launched.code, Some(0));
    assert!(launched.took < Duration::from_secs(10), "{:?}: {}", launched.took, launched.output);
    // Over MPI the launcher ends them before they know.
    if super::LINK == LinkUnderTest::Sockets {
        for rank in [0, 2] {
            let note = launched.note(rank);
            assert!(
                note.starts_with("rank 1 of 3: its connection ended; check whether its process and its machine"),
                "{note}"
            );
        }
        assert!(launched.took < Duration::from_secs(2), "far from the deadline: {:?}", launched.took);
        assert_eq!(launched.flights().len(), 2);
    }
}

#[test]
fn a_stopped_rank_is_found_at_the_deadline() {
    let launched = launch((super::LINK, "process_cases::rank"), "signal", 3, LIMIT, |folder| {
        await_file(&folder.join("ready"));
        signal(pid(folder, 1).unwrap(), libc::SIGSTOP);
    });
    assert_eq!(launched.code, Some(code::WATCHDOG), "{}", launched.output);
    assert!(launched.took < Duration::from_secs(15), "{:?}", launched.took);
    for rank in [0, 2] {
        let note = launched.note(rank);
        assert!(note.contains("all_gather of 30000 f32") && note.contains("for rank(s) [1]"), "{note}");
    }
    let report = flight::merge(&launched.flights()).unwrap();
    // mpirun lets a stopped rank run again to end it: it may come to leave a record too.
    let late = &report.late[0];
    assert_eq!((late.rank, late.recorded), (1, report.without_record.is_empty()), "{report}");
    assert_eq!(late.waited_for_by, [0, 2], "{report}");
}
