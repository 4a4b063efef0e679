//! The `nccl` engine: `cargo test -p zero-core --features nccl --test nccl_engine`. Needs no GPU: the CUDA driver and NCCL
//! are software (`tests/cuda_shim`, compiled by `cc`), which the engine loads as it would load the real ones.
//!
//! Tests the *engine*: its calls, their order, and its reaction to faults. It says nothing about NCCL, a GPU or speed;
//! `examples/nccl_check.rs` checks those.
//!
//! Each test starts this binary again as ranks; there the test `rank` runs the case that the environment names.

mod groups;
#[path = "../nccl_common/mod.rs"]
mod nccl_common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nccl_common::numbers::{reduced, values};
use nccl_common::{Compute, Launched, Memory, Shim, launch, note, rank_of};
use zero_core::collective::nccl::{self, DevicePending, DeviceRequest, DeviceSlice, NcclComm, NcclError, NcclOptions};
use zero_core::collective::threads::{ThreadOptions, run as run_threads};
use zero_core::collective::{DType, flight};
use zero_core::{Buffer, Collective, CommError, LaunchError, ReduceOp};

type Case = fn(&NcclComm, &Path) -> Result<(), CommError>;

const PATIENT: Duration = Duration::from_secs(25);

fn cases() -> Vec<(&'static str, NcclOptions, Case)> {
    let options = NcclOptions { deadline: PATIENT, ..NcclOptions::default() };
    let hasty = NcclOptions { deadline: Duration::from_millis(2500), ..options.clone() };
    let nodes = NcclOptions { node_size: Some(2), ..options.clone() };
    let hosted = NcclOptions { context_events: false, ..options.clone() };
    vec![
        ("collectives", options.clone(), collectives as Case),
        ("order", options.clone(), order),
        ("order on the host", hosted, order_on_the_host),
        ("order with an old driver", options.clone(), order_on_the_host),
        ("split", nodes, groups::split),
        ("split trouble", options.clone(), groups::split_trouble),
        ("stall", hasty.clone(), runs_into_a_fault),
        ("stall of the last", hasty.clone(), runs_into_a_fault),
        ("unwatched", hasty.clone(), unwatched),
        ("own work", hasty, own_work),
        ("fault", options.clone(), runs_into_a_fault),
        ("killed", options.clone(), killed),
        ("killed hub", options.clone(), killed_hub),
        ("leave", options.clone(), leave),
        ("abort", options.clone(), abort),
        ("nothing", options, |comm, _| comm.control().barrier()),
    ]
}

/// Runs a rank of a case. Without a case's environment variables it does nothing.
#[test]
fn rank() {
    let Some((name, folder)) = rank_of() else { return };
    let rank = std::env::var("RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
    if name == "threads" {
        let text = ranks_as_threads().map_or_else(|error| error.to_string(), |()| "ok".to_string());
        note(&folder, rank, &text);
        return;
    }
    let (_, mut options, case) =
        cases().into_iter().find(|(of, ..)| *of == name).unwrap_or_else(|| panic!("no case '{name}'"));
    options.flight_dir = Some(folder.clone());
    if name == "stall of the last" && rank == 0 {
        // It waits for its operation meanwhile: its own deadline is not to pass first.
        options.deadline = PATIENT;
    }
    let text = match NcclComm::from_environment(&options) {
        Err(error) => format!("[{}] {error}", error.code()),
        Ok(comm) => match case(&comm, &folder) {
            Ok(()) => "ok".to_string(),
            Err(error) => {
                let again = comm.health().expect_err("a communicator that has faulted stays so").to_string();
                assert_eq!(again, error.to_string(), "every later call gives the same error");
                error.to_string()
            }
        },
    };
    note(&folder, rank, &text);
}

fn launched(case: &str, ranks: usize) -> Launched {
    launch(case, ranks, Shim::Full, |_| Vec::new())
}

fn with_fault(case: &str, ranks: usize, fault: &str) -> Launched {
    launch(case, ranks, Shim::Full, |_| vec![("SHIM_NCCL_FAULT", fault.to_string())])
}

// ---- collectives one at a time ----

/// Submits one collective, ordered after all work of the context.
///
/// # Safety
///
/// Same as [`NcclComm::submit`].
unsafe fn one(comm: &NcclComm, request: DeviceRequest, what: &str) -> Result<DevicePending, CommError> {
    // SAFETY: the caller's word.
    unsafe { comm.submit(&[request], nccl::Compute::Context, what) }
}

/// # Safety
///
/// Same as [`NcclComm::submit`].
unsafe fn all_gather(
    comm: &NcclComm,
    input: DeviceSlice,
    output: DeviceSlice,
    what: &str,
) -> Result<DevicePending, CommError> {
    // SAFETY: the caller's word.
    unsafe { one(comm, DeviceRequest::AllGather { input, output }, what) }
}

/// # Safety
///
/// Same as [`NcclComm::submit`].
unsafe fn all_reduce(
    comm: &NcclComm,
    input: DeviceSlice,
    output: DeviceSlice,
    op: ReduceOp,
    what: &str,
) -> Result<DevicePending, CommError> {
    // SAFETY: the caller's word.
    unsafe { one(comm, DeviceRequest::AllReduce { input, output, op }, what) }
}

/// # Safety
///
/// Same as [`NcclComm::submit`].
unsafe fn broadcast(comm: &NcclComm, buffer: DeviceSlice, root: usize, what: &str) -> Result<DevicePending, CommError> {
    // SAFETY: the caller's word.
    unsafe { one(comm, DeviceRequest::Broadcast { buffer, root }, what) }
}

// ---- results ----

/// Every collective, type and reduction: results, counts, and size errors that leave the communicator usable.
fn collectives(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    let (rank, world) = (comm.rank(), comm.world());
    let before = comm.wire().read();
    let mut issued = 0;
    for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::U8] {
        for len in [0, 1, 3, 1000] {
            let mine = Memory::of(&values(rank, len), dtype);
            let (all, kept) = (Memory::new(len * world, dtype), Memory::of(&values(rank, len), dtype));
            // SAFETY: memory of this device that is kept until the operations have ended.
            unsafe {
                all_gather(comm, mine.0, all.0, "parameters")?.wait()?;
                broadcast(comm, kept.0, world - 1, "")?.wait()?;
            }
            issued += 2;
            let gathered: Vec<f64> = (0..world).flat_map(|rank| values(rank, len)).collect();
            assert_eq!(all.read(), gathered);
            assert_eq!(kept.read(), values(world - 1, len));
            for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
                if dtype == DType::U8 && op == ReduceOp::Mean {
                    continue;
                }
                let (wide, part) = (Memory::of(&values(rank, len * world), dtype), Memory::new(len, dtype));
                let whole = Memory::new(len, dtype);
                // Several in one launch.
                let requests = [
                    DeviceRequest::ReduceScatter { input: wide.0, output: part.0, op },
                    DeviceRequest::AllReduce { input: mine.0, output: whole.0, op },
                ];
                // SAFETY: as above.
                let ticket = unsafe { comm.submit(&requests, nccl::Compute::Context, "") }?;
                ticket.wait()?;
                issued += 1;
                assert_eq!(ticket.seq() + 1, issued);
                assert_eq!(part.read(), reduced(world, len * world, op)[rank * len..(rank + 1) * len]);
                assert_eq!(whole.read(), reduced(world, len, op));
            }
        }
    }
    let moved = comm.wire().read().since(&before);
    let elements = 1004 * (world - 1) as u64;
    assert_eq!(moved.all_gather, elements * (4 + 8 + 2 + 2 + 1));
    assert_eq!(moved.reduce_scatter, elements * (3 * (4 + 8 + 2 + 2) + 2));
    assert_eq!(moved.broadcast, if rank == world - 1 { 0 } else { 1004 * 17 });

    let (two, three) = (Memory::of(&[1.0, 2.0], DType::F32), Memory::new(3, DType::F32));
    // SAFETY: as above.
    let error = unsafe { all_reduce(comm, two.0, three.0, ReduceOp::Sum, "") }.unwrap_err();
    assert!(matches!(error, CommError::Shape { .. }), "{error}");
    // In place, and many issued ahead.
    // SAFETY: as above.
    let tickets = (0..50).map(|_| unsafe { all_reduce(comm, two.0, two.0, ReduceOp::Max, "") });
    let tickets = tickets.collect::<Result<Vec<_>, _>>()?;
    tickets.last().expect("there are fifty").wait()?;
    assert!(tickets[0].is_done()?);
    assert_eq!(two.read(), [1.0, 2.0]);
    // The control group serves beside it.
    let sum = comm.control().all_reduce(Buffer::F32(vec![1.0]), ReduceOp::Sum)?.into_f32();
    assert_eq!(sum, [world as f32]);
    Ok(())
}

#[test]
fn collectives_of_processes() {
    launched("collectives", 2).assert_ok();
    launched("collectives", 4).assert_ok();
    launched("collectives", 1).assert_ok();
}

/// Ranks as threads of one process, with the `threads` engine as control group; then one of them fails.
fn ranks_as_threads() -> Result<(), Box<dyn std::error::Error>> {
    let options = NcclOptions { deadline: PATIENT, ..NcclOptions::default() };
    let threads = ThreadOptions { deadline: PATIENT };
    let new = |comm: Arc<dyn Collective>| {
        let device = comm.rank();
        NcclComm::new(comm, device, &options)
    };
    run_threads(4, &threads, |comm| -> Result<(), NcclError> {
        let comm = new(comm)?;
        let place = comm.control().place();
        assert_eq!((place.local_world, place.nodes), (4, 1));
        Ok(collectives(&comm, Path::new(""))?)
    })?;
    let failed = run_threads(2, &threads, |comm| -> Result<(), String> {
        let comm = new(comm).map_err(|error| error.to_string())?;
        if comm.rank() == 1 {
            return Err("its data is gone".into());
        }
        let memory = Memory::new(8, DType::F32);
        // SAFETY: memory of this device; after the error the communicator has been aborted.
        let ticket = unsafe { all_reduce(&comm, memory.0, memory.0, ReduceOp::Sum, "") };
        let error = ticket.and_then(|ticket| ticket.wait()).unwrap_err();
        assert!(matches!(&error, CommError::PeerFailed { peer: 1, .. }), "{error}");
        Err(error.to_string())
    });
    let LaunchError::Rank { rank: 1, failure, .. } = failed.unwrap_err() else { panic!("rank 1 failed first") };
    assert_eq!(failure.to_string(), "its data is gone");
    // Ranks that take the same device.
    let taken = run_threads(2, &threads, |comm| match NcclComm::new(comm, 0, &options) {
        Err(error @ NcclError::Duplicate { first: 0, second: 1, .. }) => Ok(error.to_string()),
        other => Err(format!("{other:?}")),
    })?;
    assert!(taken[0] == taken[1] && taken[0].contains("the GPU at 0000:01:00.0"), "{taken:?}");
    Ok(())
}

#[test]
fn collectives_of_threads() {
    launched("threads", 1).assert_ok();
}

// ---- order ----

/// A kernel that waits for the host, then writes; a collective after it; a kernel after that. None blocks the host, and each
/// sees the right data.
fn order(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    let (world, len) = (comm.world(), 100);
    assert!(comm.orders_on_device());
    for explicit in [false, true] {
        let stream = Compute::new(comm.device() as i32);
        let (memory, seen) = (Memory::of(&vec![0.0; len], DType::F32), Memory::new(len, DType::F32));
        let (input, result) = (memory.0, seen.0);
        let go = Arc::new(AtomicBool::new(false));
        let gate = go.clone();
        stream.run(move || {
            while !gate.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            // SAFETY: the memory is this test's, and of as many floats.
            unsafe { std::slice::from_raw_parts_mut(input.pointer as *mut f32, input.len) }.fill(3.0);
        });
        let compute = if explicit { nccl::Compute::Stream(stream.0 as u64) } else { nccl::Compute::Context };
        let request = DeviceRequest::AllReduce { input, output: input, op: ReduceOp::Sum };
        // SAFETY: memory of this device, kept until the stream has been waited for below.
        let ticket = unsafe { comm.submit(&[request], compute, "") }?;
        if explicit {
            // SAFETY: the stream is alive.
            unsafe { ticket.order_stream(stream.0 as u64) }?;
        } else {
            ticket.order_compute()?;
        }
        stream.run(move || {
            // SAFETY: as above; both are of as many floats, and do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(input.pointer as *const f32, result.pointer as *mut f32, 100) }
        });
        // Long enough for what does not wait to have run.
        std::thread::sleep(Duration::from_millis(30));
        assert!(!ticket.is_done()?, "the collective waits for the kernel");
        go.store(true, Ordering::Release);
        stream.synchronize();
        assert_eq!(seen.read(), vec![3.0 * world as f64; len]);
        ticket.wait()?;
    }
    Ok(())
}

/// Like [`order`], but the host waits.
fn order_on_the_host(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    assert!(!comm.orders_on_device());
    let stream = Compute::new(comm.device() as i32);
    let memory = Memory::of(&[0.0; 100], DType::F32);
    let input = memory.0;
    stream.run(move || {
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: the memory is this test's, and of as many floats.
        unsafe { std::slice::from_raw_parts_mut(input.pointer as *mut f32, input.len) }.fill(3.0);
    });
    // SAFETY: memory of this device, kept until the operation has ended.
    let ticket = unsafe { all_reduce(comm, input, input, ReduceOp::Mean, "") }?;
    ticket.order_compute()?;
    assert_eq!(memory.read(), [3.0; 100]);
    Ok(())
}

#[test]
fn collectives_are_ordered_among_kernels() {
    launched("order", 2).assert_ok();
    launched("order on the host", 2).assert_ok();
    launch("order with an old driver", 2, Shim::OldDriver, |_| Vec::new()).assert_ok();
    let version = |_| vec![("SHIM_CUDA_VERSION", "12040".to_string())];
    launch("order with an old driver", 2, Shim::Full, version).assert_ok();
}

// ---- faults ----

/// Runs all-reduces until one fails.
fn runs_into_a_fault(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    let memory = Memory::of(&[1.0; 16], DType::F32);
    for _ in 0..20 {
        // SAFETY: memory of this device; after an error the communicator has been aborted.
        unsafe { all_reduce(comm, memory.0, memory.0, ReduceOp::Max, "gradients") }?.wait()?;
    }
    Ok(())
}

#[test]
fn a_collective_that_hangs_ends_at_the_deadline_on_all_ranks() {
    let hung = with_fault("stall", 3, "hang:1:2");
    let stalled: Vec<usize> = (0..3).filter(|&rank| hung.note(rank).contains(" waited ")).collect();
    assert!(!stalled.is_empty());
    for rank in 0..3 {
        let note = hung.note(rank);
        // As it found out itself, or as it was told by who did first.
        assert!(note.starts_with(&format!("rank {rank} ")), "{note}");
        assert!(note.contains("all_reduce of 16 f32 (max) for gradients (operation 2 of group 'world')"), "{note}");
        assert!(note.contains("to finish on its device; it has started here but not finished"), "{note}");
    }
    assert!(hung.took < Duration::from_secs(20), "{:?}", hung.took);
    let flights = hung.flights();
    assert_eq!(flights.len(), 3);
    let report = flight::merge(&flights).unwrap().to_string();
    assert!(report.contains("all_reduce of 16 f32 (max) for gradients"), "{report}");
}

/// No rank continues with memory that a communicator may still write to.
#[test]
fn a_rank_whose_communicator_cannot_be_aborted_ends() {
    let hung = with_fault("stall", 2, "no-abort:1:2");
    assert!(hung.notes[1].is_none(), "{:?}", hung.notes);
    let told = &hung.outputs[1];
    assert!(told.contains("the communicator could not be aborted (ncclCommAbort: "), "{told}");
    assert!(told.contains("operation 2 of group 'world'"), "{told}");
    assert!(hung.note(0).contains("operation 2 of group 'world'"), "{}", hung.note(0));
}

/// A fault is detected although no thread waits.
fn unwatched(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    let memory = Memory::of(&[1.0; 16], DType::F32);
    // SAFETY: memory of this device, kept until the communicator has been aborted.
    let ticket = unsafe { all_reduce(comm, memory.0, memory.0, ReduceOp::Sum, "") }?;
    let end = Instant::now() + PATIENT;
    // Another rank's failure is what the control group tells.
    while comm.control().check("none", 0, &"sleeping").is_ok() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    ticket.wait()
}

#[test]
fn a_fault_is_found_though_nobody_waits() {
    let hung = with_fault("unwatched", 2, "hang:0:0");
    for rank in 0..2 {
        assert!(hung.note(rank).contains("operation 0 of group 'world'"), "{}", hung.note(rank));
    }
}

/// A kernel before the collective does not end: the error says that the cause is not the other ranks.
fn own_work(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    let stream = Compute::new(comm.device() as i32);
    let go = Arc::new(AtomicBool::new(comm.rank() == 1));
    let (gate, opener) = (go.clone(), go.clone());
    stream.run(move || {
        while !gate.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let memory = Memory::new(4, DType::F32);
    // SAFETY: memory of this device, kept until the communicator has been aborted.
    let ticket = unsafe { all_reduce(comm, memory.0, memory.0, ReduceOp::Sum, "") }?;
    // An abort waits for what the device has begun.
    let open = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(4000));
        opener.store(true, Ordering::Release);
    });
    let outcome = ticket.wait();
    open.join().expect("it sleeps and stores");
    outcome
}

#[test]
fn own_work_that_does_not_end_is_told_from_late_ranks() {
    let notes = launched("own work", 2);
    let all = [notes.note(0), notes.note(1)].join("\n");
    // Whichever rank's deadline passes first says what it sees.
    let own = "this rank's own earlier work has not finished";
    assert!(all.contains(own) || all.contains("so other ranks have not started it"), "{all}");
    assert!(notes.note(0).contains("operation 0 of group 'world'"), "{all}");
}

#[test]
fn an_asynchronous_error_is_every_ranks_error() {
    let failed = with_fault("fault", 3, "async:1:3");
    let note = failed.note(1);
    assert!(
        note.starts_with("rank 1, all_reduce of 16 f32 (max) for gradients (operation 3 of group 'world')"),
        "{note}"
    );
    assert!(note.contains("NCCL reports: remote process exited or there was a network error"), "{note}");
    for rank in [0, 2] {
        let note = failed.note(rank);
        assert!(note.starts_with(&format!("rank {rank} stopped in ")), "{note}");
        assert!(note.contains("of group 'world') because rank 1 failed: rank 1, all_reduce"), "{note}");
    }
    let failed = with_fault("fault", 2, "call:0:1");
    assert!(failed.note(0).contains("ncclAllReduce: remote process exited"), "{}", failed.note(0));
    assert!(failed.note(1).contains("because rank 0 failed"), "{}", failed.note(1));
}

#[test]
fn a_communicator_that_is_never_made_ends_at_the_deadline() {
    let hung = with_fault("stall of the last", 2, "init-hang:1:0");
    assert!(hung.note(1).contains("[75] rank 1 waited"), "{}", hung.note(1));
    assert!(hung.note(1).contains("the creation of the communicator"), "{}", hung.note(1));
    assert!(hung.note(0).contains("NCCL has not finished setting it up"), "{}", hung.note(0));
}

fn killed(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    killing(comm, 1)
}

fn killed_hub(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    killing(comm, 0)
}

fn killing(comm: &NcclComm, victim: usize) -> Result<(), CommError> {
    let memory = Memory::of(&[1.0; 16], DType::F32);
    for step in 0..3 {
        if step == 2 && comm.rank() == victim {
            // SAFETY: ends this process at once, as a failing machine would.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        // SAFETY: memory of this device; after an error the communicator has been aborted.
        unsafe { all_reduce(comm, memory.0, memory.0, ReduceOp::Max, "") }?.wait()?;
    }
    Ok(())
}

#[test]
fn a_killed_process_is_named_by_all_others() {
    let killed = launched("killed", 4);
    assert!(killed.notes[1].is_none());
    for rank in [0, 2, 3] {
        let note = killed.note(rank);
        assert!(note.starts_with(&format!("rank {rank} stopped in ")), "{note}");
        assert!(
            note.contains(
                "because rank 1 failed: its connection ended; check whether its process and its machine still run"
            ),
            "{note}"
        );
    }
    // Far from the deadline.
    assert!(killed.took < Duration::from_secs(15), "{:?}", killed.took);
    // And the hub of the control group itself.
    let killed = launched("killed hub", 3);
    for rank in [1, 2] {
        let note = killed.note(rank);
        assert!(
            note.contains(
                "because rank 0 failed: its connection ended; check whether its process and its machine still run"
            ),
            "{note}"
        );
    }
}

/// Rank 1 ends without an error, but too early.
fn leave(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    if comm.rank() == 1 {
        return Ok(());
    }
    runs_into_a_fault(comm, Path::new(""))
}

#[test]
fn a_rank_that_ends_too_early_is_named() {
    let left = launched("leave", 2);
    assert_eq!(left.note(1), "ok");
    assert!(left.note(0).contains("rank 1 has already ended"), "{}", left.note(0));
    assert!(left.took < PATIENT, "{:?}", left.took);
}

fn abort(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    if comm.rank() == 1 {
        comm.abort("a loss that is no number");
    }
    runs_into_a_fault(comm, Path::new(""))
}

#[test]
fn an_abort_reaches_all() {
    let aborted = launched("abort", 3);
    for rank in 0..3 {
        let note = aborted.note(rank);
        assert!(note.contains("this rank has aborted: a loss that is no number"), "{note}");
        assert!(rank == 1 || note.contains("because rank 1 failed"), "{note}");
    }
}

// ---- what has to be set up differently ----

#[test]
fn what_cannot_be_made_says_what_to_change() {
    let told = |shim: Shim, more: &[(&'static str, &str)], words: &[&str]| {
        let launched =
            launch("nothing", 2, shim, |_| more.iter().map(|(key, value)| (*key, value.to_string())).collect());
        for rank in 0..2 {
            let note = launched.note(rank);
            assert!(words.iter().all(|word| note.contains(word)), "{words:?}: {note}");
        }
    };
    told(Shim::Full, &[], &["ok"]);
    told(Shim::Full, &[("LOCAL_RANK", "1")], &["[2] ranks 0 and 1 both use the GPU at 0000:02:00.0", "LOCAL_RANK"]);
    let one = [("SHIM_DEVICES", "1")];
    told(Shim::Full, &one, &["[2] ranks 0 and 1 both use the GPU at 0000:01:00.0", "CUDA_VISIBLE_DEVICES"]);
    told(Shim::Full, &[("LOCAL_RANK", "7")], &["[2] there is no GPU 7: this process sees 4"]);
    told(Shim::Nothing, &[], &["[2] libnccl cannot be used", "libnccl.so.2", "install NCCL 2.18 or newer"]);
    told(Shim::NoNccl, &[], &["[2] libnccl cannot be used"]);
    told(Shim::OldNccl, &[], &["[2] libnccl has no ncclCommSplit: NCCL 2.18 or newer is needed"]);
    told(Shim::NoDriver, &[], &["[2] libcuda cannot be used", "docker run --gpus all"]);
    let launched = launch("nothing", 2, Shim::Full, |rank| vec![("SHIM_NCCL_VERSION", format!("2270{rank}"))]);
    for rank in 0..2 {
        let note = launched.note(rank);
        assert!(note.contains("[2] rank 1 has NCCL 2.27.1, but rank 0 has 2.27.0"), "{note}");
    }
    let launched = launch("nothing", 1, Shim::Full, |_| vec![("WORLD_SIZE", "0".into())]);
    assert!(launched.note(0).starts_with("[2] WORLD_SIZE: expected at least 1, got '0'"), "{}", launched.note(0));
}
