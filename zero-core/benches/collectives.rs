//! `cargo bench -p zero-core --bench collectives`
//!
//! The collectives of the threads engine at 1, 2 and 4 ranks for tensors of 1 MiB and 64 MiB of f32, the one-sided
//! window, and a plain copy of as many bytes by one thread ([`memcpy`]) as the yardstick.
//!
//! `B/s` count the payload once: the whole tensor, which a reduction takes from every rank, and which a gather, an
//! all-reduce or a broadcast gives to every rank. So N ranks that each write a whole result do N copies' work for one
//! payload; ranks beyond the machine's cores share them.
//!
//! **In a time:** from rank 0's call of the collective until every rank has its result, with the result's allocation
//! and the release of the inputs. **Overhead in it:** the [`barrier`] that tells rank 0 that the others have their
//! results, measured alone as well, and the time that ranks take to wake from the barrier before. **Not in it:** making
//! the inputs, dropping the results, starting the threads. An iteration is a sample, without a warm-up: `slowest` is
//! often the first, which touches new pages. The allocator is the one that the training command installs.
//!
//! With the System allocator in its place the engine pays for fresh pages at every call.

use core::fmt;
use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use parking_lot::Mutex;
use zero_core::alloc::PageKeeper;
use zero_core::collective::threads::{ThreadComm, ThreadOptions, run};
use zero_core::window::{Key, Window, WindowHost};
use zero_core::{Buffer, Collective, CommError, ReduceOp};

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

/// Sizes of a tensor in MiB.
const SIZES_MIB: [usize; 2] = [1, 64];

/// Numbers of ranks.
const WORLDS: [usize; 3] = [1, 2, 4];

fn main() {
    divan::main();
}

/// A tensor and the ranks it is moved between.
struct Case {
    mib: usize,
    world: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB, ranks: {}", self.mib, self.world)
    }
}

fn cases() -> impl Iterator<Item = Case> {
    SIZES_MIB.into_iter().flat_map(|mib| WORLDS.map(|world| Case { mib, world }))
}

impl Case {
    /// Elements of the whole tensor.
    fn numel(&self) -> usize {
        (self.mib << 20) / size_of::<f32>()
    }

    /// Elements of a rank's piece.
    fn piece(&self) -> usize {
        self.numel() / self.world
    }

    fn payload(&self) -> BytesCount {
        BytesCount::of_many::<f32>(self.numel())
    }
}

/// Measures `collective` on all ranks, each of which gives a buffer of `len` elements.
///
/// Ranks go in lockstep. Before an iteration a barrier makes every rank wait until all have their inputs; behind it the
/// peers look whether rank 0 has raised `done` instead of beginning another. That barrier's lock gives the
/// happens-before edge from the raising to the looking.
fn measure(
    bencher: Bencher<'_, '_>,
    case: &Case,
    len: usize,
    collective: impl Fn(&ThreadComm, Buffer) -> Result<Buffer, CommError> + Sync,
) {
    let bencher = Mutex::new(Some(bencher.counter(case.payload())));
    let done = AtomicBool::new(false);
    let options = ThreadOptions { deadline: Duration::from_secs(60) };
    run(case.world, &options, |comm| -> Result<(), CommError> {
        let input = || -> Result<Buffer, CommError> {
            let input = Buffer::F32(vec![comm.rank() as f32; len]);
            comm.barrier()?;
            Ok(input)
        };
        let iteration = |input| -> Result<Buffer, CommError> {
            let result = collective(&comm, input)?;
            comm.barrier()?;
            Ok(result)
        };
        if comm.rank() == 0 {
            let bencher = bencher.lock().take().expect("there is one rank 0");
            bencher
                .with_inputs(|| input().expect("no rank fails"))
                .bench_local_values(|input| iteration(input).expect("no rank fails"));
            done.store(true, Ordering::Relaxed);
            return comm.barrier();
        }
        loop {
            let input = input()?;
            if done.load(Ordering::Relaxed) {
                return Ok(());
            }
            // Dropped when rank 0 has seen that it is there, so outside of the time.
            drop(black_box(iteration(input)?));
        }
    })
    .expect("no rank fails");
}

#[divan::bench(args = cases(), sample_size = 1, max_time = 1)]
fn all_reduce(bencher: Bencher<'_, '_>, case: &Case) {
    measure(bencher, case, case.numel(), |comm, input| comm.all_reduce(input, ReduceOp::Sum));
}

#[divan::bench(args = cases(), sample_size = 1, max_time = 1)]
fn reduce_scatter(bencher: Bencher<'_, '_>, case: &Case) {
    measure(bencher, case, case.numel(), |comm, input| comm.reduce_scatter(input, ReduceOp::Sum));
}

#[divan::bench(args = cases(), sample_size = 1, max_time = 1)]
fn all_gather(bencher: Bencher<'_, '_>, case: &Case) {
    measure(bencher, case, case.piece(), |comm, input| comm.all_gather(input));
}

#[divan::bench(args = cases(), sample_size = 1, max_time = 1)]
fn broadcast(bencher: Bencher<'_, '_>, case: &Case) {
    measure(bencher, case, case.numel(), |comm, input| comm.broadcast(input, 0));
}

/// As [`all_gather`], but through the window: every rank reads the pieces where they lie and joins them.
#[divan::bench(args = cases(), sample_size = 1, max_time = 1)]
fn window_gather(bencher: Bencher<'_, '_>, case: &Case) {
    let host = WindowHost::default();
    let key = Key { object: 0, version: 0 };
    let pieces: Vec<Arc<Vec<f32>>> = (0..case.world).map(|rank| Arc::new(vec![rank as f32; case.piece()])).collect();
    measure(bencher, case, 0, |comm, _| {
        let window: Window<Vec<f32>> = host.join(comm);
        // Costs a lock: nothing is copied.
        window.publish(key, &pieces[comm.rank()]);
        let mut whole = Vec::with_capacity(case.numel());
        for peer in 0..case.world {
            whole.extend_from_slice(&window.read(peer, key, &"a piece")?);
        }
        Ok(Buffer::F32(whole))
    });
}

/// One read of what has been published, without a copy: what the window itself costs, whatever the size.
#[divan::bench(max_time = 1)]
fn window_read(bencher: Bencher<'_, '_>) {
    let window = WindowHost::default().alone();
    let (key, value) = (Key { object: 0, version: 0 }, Arc::new(0f32));
    window.publish(key, &value);
    bencher.bench_local(|| window.read(0, black_box(key), &"a number").expect("it is published and held"));
}

/// The overhead in every time above: one barrier, after all ranks have left another.
#[divan::bench(args = WORLDS, sample_size = 1, max_time = 1)]
fn barrier(bencher: Bencher<'_, '_>, world: usize) {
    measure(bencher, &Case { mib: 0, world }, 0, |_, input| Ok(input));
}

/// The yardstick: one thread copies as many bytes, between buffers that it has touched before.
#[divan::bench(args = SIZES_MIB, max_time = 1)]
fn memcpy(bencher: Bencher<'_, '_>, mib: usize) {
    let case = Case { mib, world: 1 };
    let (from, mut to) = (vec![1f32; case.numel()], vec![0f32; case.numel()]);
    bencher.counter(case.payload()).bench_local(|| {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    });
}
