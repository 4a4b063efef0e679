//! `cargo bench -p zero-core --bench collectives`
//!
//! The collectives of the threads engine at 1, 2 and 4 ranks for tensors of 1 MiB and 64 MiB of f32, the one-sided
//! window, and a plain copy of as many bytes by one thread ([`memcpy`]) as the yardstick.
//!
//! `B/s` count the payload once: the whole tensor, which a reduction takes from every rank, and which a gather, an
//! all-reduce or a broadcast gives to every rank. So N ranks that each write a whole result do N copies' work for one
//! payload; ranks beyond the machine's cores share them.
//!
//! **In a time:** the collective on all ranks, until the last has its result, with that result's allocation and the
//! release of the inputs. **Overhead in it:** handing each rank its input through a channel and each result back to the
//! measuring thread, which is no rank; [`hand_over`] is that alone. **Not in it:** making the inputs, dropping the
//! results, starting the threads. An iteration is a sample, without a warm-up: `slowest` is often the first, which
//! touches new pages. Beside other programs `fastest` is the column to trust. The allocator is the one that the
//! training command installs; with the system's in its place the engine would pay for new pages at every call.

use core::fmt;
use std::alloc::System;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::bounded;
use divan::counter::BytesCount;
use divan::{Bencher, black_box};
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

/// The longest that a collective may take.
const DEADLINE: Duration = Duration::from_secs(60);

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
/// Ranks end when the measuring thread, by returning or by a panic, drops the channels that their inputs come through.
fn measure(
    bencher: Bencher,
    case: &Case,
    len: usize,
    collective: impl Fn(&ThreadComm, Buffer) -> Result<Buffer, CommError> + Sync,
) {
    let (to_ranks, inputs): (Vec<_>, Vec<_>) = (0..case.world).map(|_| bounded::<Buffer>(1)).unzip();
    let (from_ranks, results) = bounded(case.world);
    let ranks = || {
        run(case.world, &ThreadOptions { deadline: DEADLINE }, |comm| -> Result<(), CommError> {
            for input in &inputs[comm.rank()] {
                // Nobody listens any more when the measuring thread has panicked over another rank's error.
                let _ = from_ranks.send(collective(&comm, input));
            }
            Ok(())
        })
        .expect("errors of collectives travel with the results");
    };
    std::thread::scope(move |scope| {
        std::thread::Builder::new()
            .name("launcher".into())
            .spawn_scoped(scope, ranks)
            .expect("the system gives a thread");
        let result =
            || results.recv_timeout(2 * DEADLINE).expect("a collective ends within the deadline, well or badly");
        bencher
            .with_inputs(|| -> Vec<Buffer> {
                (0..case.world).map(|rank| Buffer::F32(vec![rank as f32 + 1.0; len])).collect()
            })
            .bench_local_values(|inputs| -> Vec<Buffer> {
                for (rank, input) in to_ranks.iter().zip(inputs) {
                    rank.send(input).expect("ranks live as long as their channels");
                }
                to_ranks.iter().map(|_| result().expect("no rank fails")).collect()
            });
        drop(to_ranks);
    });
}

#[divan::bench(args = cases(), sample_size = 1, min_time = 0.2, max_time = 1)]
fn all_reduce(bencher: Bencher, case: &Case) {
    measure(bencher.counter(case.payload()), case, case.numel(), |comm, input| comm.all_reduce(input, ReduceOp::Sum));
}

#[divan::bench(args = cases(), sample_size = 1, min_time = 0.2, max_time = 1)]
fn reduce_scatter(bencher: Bencher, case: &Case) {
    measure(bencher.counter(case.payload()), case, case.numel(), |comm, input| {
        comm.reduce_scatter(input, ReduceOp::Sum)
    });
}

#[divan::bench(args = cases(), sample_size = 1, min_time = 0.2, max_time = 1)]
fn all_gather(bencher: Bencher, case: &Case) {
    measure(bencher.counter(case.payload()), case, case.piece(), |comm, input| comm.all_gather(input));
}

#[divan::bench(args = cases(), sample_size = 1, min_time = 0.2, max_time = 1)]
fn broadcast(bencher: Bencher, case: &Case) {
    measure(bencher.counter(case.payload()), case, case.numel(), |comm, input| comm.broadcast(input, 0));
}

/// As [`all_gather`], but through the window: every rank reads the pieces where they lie and joins them.
#[divan::bench(args = cases(), sample_size = 1, min_time = 0.2, max_time = 1)]
fn window_gather(bencher: Bencher, case: &Case) {
    let host = WindowHost::default();
    let key = Key { object: 0, version: 0 };
    let pieces: Vec<Arc<Vec<f32>>> = (0..case.world).map(|rank| Arc::new(vec![rank as f32; case.piece()])).collect();
    measure(bencher.counter(case.payload()), case, 0, |comm, _| {
        let window: Window<Vec<f32>> = host.join(comm);
        // Costs a lock: nothing is copied.
        window.publish(key, &pieces[comm.rank()]);
        let mut whole = Vec::with_capacity(case.numel());
        for peer in 0..case.world {
            whole.extend_from_slice(&window.read(peer, key, &"a piece")?.here().expect("ranks are threads"));
        }
        Ok(Buffer::F32(whole))
    });
}

/// One read of what has been published, without a copy: what the window itself costs, whatever the size.
#[divan::bench(min_time = 0.2, max_time = 1)]
fn window_read(bencher: Bencher) {
    let window = WindowHost::default().alone();
    let (key, value) = (Key { object: 0, version: 0 }, Arc::new(0f32));
    window.publish(key, &value);
    bencher.bench_local(|| window.read(0, black_box(key), &"a number").expect("it is published and held"));
}

/// The overhead in every time above: empty buffers, to each rank and back.
#[divan::bench(args = WORLDS.map(|world| Case { mib: 0, world }), sample_size = 1, min_time = 0.2, max_time = 1)]
fn hand_over(bencher: Bencher, case: &Case) {
    measure(bencher, case, 0, |_, input| Ok(input));
}

/// The yardstick: the measuring thread alone copies as many bytes, between buffers that it has touched before.
#[divan::bench(args = SIZES_MIB.map(|mib| Case { mib, world: 1 }), min_time = 0.2, max_time = 1)]
fn memcpy(bencher: Bencher, case: &Case) {
    let (from, mut to) = (vec![1f32; case.numel()], vec![0f32; case.numel()]);
    bencher.counter(case.payload()).bench_local(|| {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    });
}
