//! The `mpi` engine with real processes: `cargo test -p zero-core --features mpi --test mpi_engine`.
//!
//! Each test starts this binary again under `mpirun`; there the test `rank` runs the case that the environment names.

mod mpi_common;

use std::path::Path;
use std::time::Duration;

use half::{bf16, f16};
use mpi_common::{Launched, launch, note, note_pid, rank_of};
use zero_core::collective::exit::{code_of, end_process};
use zero_core::collective::mpi::{MpiOptions, MpiRun, run};
use zero_core::collective::threads::{ThreadOptions, run as run_threads};
use zero_core::{Buffer, Collective, CommError, ReduceOp, Request};

type Case = fn(&MpiRun, &Path) -> Result<(), CommError>;

const LIMIT: Duration = Duration::from_secs(60);

fn cases() -> Vec<(&'static str, MpiOptions, Case)> {
    let options = MpiOptions { deadline: Duration::from_secs(20), ..MpiOptions::default() };
    let small = MpiOptions { chunk_bytes: 1000, ..options.clone() };
    vec![("collectives", options.clone(), collectives as Case), ("chunks", small, collectives as Case)]
}

/// A rank of a case. Without the environment of one it does nothing.
#[test]
fn rank() {
    let Some((name, folder)) = rank_of() else { return };
    let (_, mut options, case) =
        cases().into_iter().find(|(of, ..)| *of == name).unwrap_or_else(|| panic!("no case '{name}'"));
    options.flight_dir = Some(folder.clone());
    let mut who = None;
    let outcome = run(&options, |run| {
        who = Some(run.comm().place().rank);
        note_pid(&folder, run.comm().place().rank);
        case(run, &folder)
    });
    let (code, text) = match &outcome {
        Ok(()) => (0, "ok".to_string()),
        Err(error) => (code_of(error), error.to_string()),
    };
    note(&folder, who.expect("MPI can be started"), &text);
    end_process(code);
}

fn launched(case: &str, ranks: usize) -> Launched {
    launch(case, ranks, LIMIT, |_| {})
}

// ---- collectives ----

fn values(rank: usize, len: usize, salt: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 7919 + rank * 104_729 + salt * 31) % 2003) as f32 * 0.37 - 300.0 + 1e-3 * rank as f32)
        .collect()
}

/// This rank's contribution, in each of the types.
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

/// Every collective of every type and several sizes, in one order on every rank.
fn requests(rank: usize, world: usize) -> Vec<Request> {
    let mut all = vec![Request::Barrier(""), Request::Barrier("a test")];
    for len in [0, 1, 2, 3, 7, 64, 1001, 5000] {
        for buffer in inputs(rank, len) {
            all.push(Request::AllGather(buffer.clone()));
            all.extend((0..world).map(|root| Request::Broadcast(buffer.clone(), root)));
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

/// The same bits and the same count of bytes as the threads engine, whether run here or started.
fn collectives(run: &MpiRun, _: &Path) -> Result<(), CommError> {
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
    for ranks in 1..=4 {
        launched("collectives", ranks).assert_ok();
    }
}

#[test]
fn payloads_of_several_messages_arrive_whole() {
    for ranks in [2, 3] {
        launched("chunks", ranks).assert_ok();
    }
}
