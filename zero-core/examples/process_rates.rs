//! `cargo build --release -p zero-core --example process_rates`, then over sockets
//! `torchrun --nproc-per-node 2 --no-python target/release/examples/process_rates [MB] [rounds] [bytes of a message]`,
//! or, built with `--features mpi`, over MPI `mpirun -n 2 target/release/examples/process_rates [MB] [rounds] ...`
//!
//! Measures all-gather and reduce-scatter of `MB` (100) million bytes of f32 between processes, the same between threads of
//! one process, and a plain copy of as many bytes, in one run. GB/s count the full tensor once, like gloo's micro-benchmark;
//! a round is a barrier and the collective. Prints medians, with the fastest and the slowest.
//!
//! A time includes the collective, and allocating (with the allocator that training uses) and freeing its result. It excludes
//! creating the input. The idle cost is the CPU time that the communication thread uses in a second without communication.

use std::alloc::System;
use std::time::{Duration, Instant};

use zero_core::alloc::PageKeeper;
use zero_core::collective::exit::code;
use zero_core::collective::launcher::Start;
use zero_core::collective::process::{ProcessOptions, run};
use zero_core::collective::threads::{ThreadOptions, run as run_threads};
use zero_core::{Buffer, Collective, CommError, ReduceOp};

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// Warm-up rounds, which are not measured.
const WARM: usize = 3;

fn show(name: &str, bytes: usize, mut times: Vec<Duration>) {
    times.sort();
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    let (median, last) = (times[times.len() / 2], times[times.len() - 1]);
    println!("{name:<28} {:>7.2} GB/s  ({:.2} to {:.2})", rate(median), rate(last), rate(times[0]));
}

/// Times `rounds` rounds: the full exchange, starting with a barrier.
fn measure(
    comm: &dyn Collective,
    rounds: usize,
    make: impl Fn() -> Buffer,
    collective: impl Fn(Buffer) -> Result<Buffer, CommError>,
) -> Result<Vec<Duration>, CommError> {
    let mut times = Vec::new();
    for round in 0..WARM + rounds {
        let input = make();
        let begin = Instant::now();
        comm.barrier()?;
        drop(collective(input)?);
        if round >= WARM {
            times.push(begin.elapsed());
        }
    }
    Ok(times)
}

fn engine(name: &str, comm: &dyn Collective, bytes: usize, rounds: usize) -> Result<(), CommError> {
    let numel = bytes / size_of::<f32>() / comm.world() * comm.world();
    let piece = || Buffer::F32(vec![comm.rank() as f32; numel / comm.world()]);
    let whole = || Buffer::F32(vec![comm.rank() as f32; numel]);
    let gather = measure(comm, rounds, piece, |input| comm.all_gather(input))?;
    let scatter = measure(comm, rounds, whole, |input| comm.reduce_scatter(input, ReduceOp::Sum))?;
    let reduce = measure(comm, rounds, whole, |input| comm.all_reduce(input, ReduceOp::Sum))?;
    let broadcast = measure(comm, rounds, whole, |input| comm.broadcast(input, 0))?;
    let barrier = measure(comm, 200, || Buffer::U8(Vec::new()), Ok)?;
    if comm.rank() == 0 {
        show(&format!("{name} all_gather"), bytes, gather);
        show(&format!("{name} reduce_scatter"), bytes, scatter);
        show(&format!("{name} all_reduce"), bytes, reduce);
        show(&format!("{name} broadcast"), bytes, broadcast);
        let mut barrier = barrier;
        barrier.sort();
        println!("{:<28} {:>7.1} us", format!("{name} barrier"), barrier[100].as_secs_f64() * 1e6);
    }
    Ok(())
}

fn memcpy(bytes: usize, rounds: usize) {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    let mut times = Vec::new();
    for _ in 0..rounds + WARM {
        let begin = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        times.push(begin.elapsed());
    }
    show("memcpy, one thread", bytes, times.split_off(WARM));
}

/// Returns the CPU time used by the thread of this name.
fn cpu_of(name_begins: &str, name_ends: &str) -> Duration {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let Some((head, _)) = stat.rsplit_once(')') else { continue };
        let name = head.split_once('(').map_or("", |(_, name)| name);
        if name.starts_with(name_begins) && name.ends_with(name_ends) {
            let schedstat = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            ticks += schedstat.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Duration::from_nanos(ticks)
}

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let bytes = arguments.first().copied().unwrap_or(100) * 1_000_000;
    let rounds = arguments.get(1).copied().unwrap_or(15);
    let chunk = arguments.get(2).copied();
    let mut options = ProcessOptions { deadline: Duration::from_secs(60), ..ProcessOptions::default() };
    options.chunk_bytes = chunk.unwrap_or(options.chunk_bytes);
    let start = match Start::from_environment() {
        Ok(start) => start,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(code::BAD_INPUT);
        }
    };
    let link = if let Start::Mpi(_) = start { "mpi" } else { "sockets" };
    let outcome = run(&options, &start, |run| -> Result<(), CommError> {
        let comm = run.comm();
        engine(link, &**comm, bytes, rounds)?;
        comm.barrier()?;
        std::thread::sleep(Duration::from_millis(500));
        let before = cpu_of("rank-", "-link");
        std::thread::sleep(Duration::from_secs(2));
        let idle = (cpu_of("rank-", "-link") - before) / 2;
        comm.barrier()?;
        if comm.rank() == 0 {
            println!("{:<28} {:>7.2} ms of processor time a second", format!("{link}, idle"), idle.as_secs_f64() * 1e3);
            memcpy(bytes, rounds);
            let threads = ThreadOptions { deadline: Duration::from_secs(60) };
            run_threads(comm.world(), &threads, |comm| engine("threads", &*comm, bytes, rounds))
                .expect("the threads engine works here");
        }
        // The others sleep meanwhile.
        comm.barrier()
    });
    if let Err(failed) = outcome {
        eprintln!("{failed}");
        failed.end_process();
    }
}
