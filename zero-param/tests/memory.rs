//! Number of full parameters in memory over time: `cargo test --test memory`. A single test, as it counts allocations of the process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_nn::Linear;
use burn_optim::{AdamWConfig, SgdConfig};
use common::{Mlp, Net, device, options, seed, unkept};
use zero_core::Stage;
use zero_core::accounting::StateBytes;
use zero_core::collective::flight;
use zero_core::config::{Disk, Offload, Tier};
use zero_core::estimate::{Precision, model_state};
use zero_param::{
    Error, OptimizerConfig, Ranks, ZeroConfig, checkpoint, checkpoint_block, embedding, linear, linear_cross_entropy,
    run_threads, shard,
};

const WIDTH: usize = 256;
/// Bytes of one weight.
const WHOLE: usize = WIDTH * WIDTH * 4;

static WHOLES: AtomicIsize = AtomicIsize::new(0);
static MOST_WHOLES: AtomicIsize = AtomicIsize::new(0);
static BYTES: AtomicIsize = AtomicIsize::new(0);

/// Counts bytes, and allocations of about a weight's size.
struct Counting;

fn count(bytes: usize, sign: isize) {
    BYTES.fetch_add(sign * bytes as isize, Relaxed);
    if (WHOLE..WHOLE + WHOLE / 16).contains(&bytes) {
        MOST_WHOLES.fetch_max(WHOLES.fetch_add(sign, Relaxed) + sign, Relaxed);
    }
}

// SAFETY: forwards every call unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(layout.size(), -1);
        count(bytes, 1);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts of both ranks together.
#[derive(Debug, PartialEq)]
struct Seen {
    /// Full weights between steps.
    resting: isize,
    /// Full weights between forward and backward pass.
    between: isize,
    most_forward: isize,
    most_backward: isize,
    /// Bytes of model and optimizer state between steps.
    state: isize,
    /// Bytes of gradients after a backward pass.
    gradients: isize,
}

/// Matrix products keep workspace per thread, which is not a tensor.
fn warm_up() {
    let device = device();
    Mlp::<WIDTH, 2>::build(&device).loss(0, &device).backward();
}

/// Runs three steps. `ordered` if the forward pass runs within `Zero::backward`.
fn steps<const DEPTH: usize>(
    ranks: &Ranks,
    config: &ZeroConfig,
    optimizer: &impl OptimizerConfig,
    ordered: bool,
) -> Result<Option<Seen>, Error> {
    let (device, rank) = (device(), ranks.comm().rank());
    let wait = || ranks.comm().barrier();
    warm_up();
    // Afterwards the flight recorder is full, and each further record replaces one.
    (0..flight::KEPT).try_for_each(|_| wait())?;
    let before = BYTES.load(Relaxed);
    wait()?;
    let (mut net, zero) = shard(Mlp::<WIDTH, DEPTH>::build(&device), ranks, config)?;
    let mut optimizer = zero.optimizer(optimizer)?;
    let mut seen = None;
    for number in 0..3 {
        wait()?;
        let (resting, held) = (WHOLES.load(Relaxed), BYTES.load(Relaxed));
        MOST_WHOLES.store(resting, Relaxed);
        wait()?;
        let mut passes = (0, 0);
        let mut forward = || {
            let loss = net.loss(seed(number, rank), &device);
            wait().unwrap();
            passes = (WHOLES.load(Relaxed), MOST_WHOLES.load(Relaxed));
            wait().unwrap();
            MOST_WHOLES.store(passes.0, Relaxed);
            wait().unwrap();
            loss
        };
        let grads = match ordered {
            true => zero.backward(forward)?.1,
            false => {
                let loss = forward();
                zero.backward(|| loss)?.1
            }
        };
        wait()?;
        let (most_backward, gradients) = (MOST_WHOLES.load(Relaxed), BYTES.load(Relaxed) - held);
        wait()?;
        net = optimizer.step(1e-2, net, grads)?;
        wait()?;
        let (between, most_forward) = passes;
        let state = BYTES.load(Relaxed) - before;
        seen = Some(Seen { resting, between, most_forward, most_backward, state, gradients });
        wait()?;
    }
    drop(net.valid());
    Ok(seen.filter(|_| rank == 0))
}

fn seen<const DEPTH: usize>(stage: Stage, optimizer: &(impl OptimizerConfig + Sync)) -> Seen {
    seen_by::<DEPTH>(&unkept(stage), optimizer)
}

fn seen_by<const DEPTH: usize>(config: &ZeroConfig, optimizer: &(impl OptimizerConfig + Sync)) -> Seen {
    run_threads(2, &options(), |ranks| steps::<DEPTH>(ranks, config, optimizer, true)).unwrap().swap_remove(0).unwrap()
}

/// Returns the paper's formula for `depth` weights on two ranks, with `states` arrays of the optimizer.
fn formula(stage: Stage, depth: usize, states: u64) -> StateBytes {
    let precision = Precision { parameter: 4, gradient: 4, optimizer: 4 * states };
    model_state((depth * WIDTH * WIDTH) as u64, stage, 2, precision)
}

/// Returns the peak of full weights on both ranks while a module of 16 uninitialized layers is sharded.
fn at_birth() -> isize {
    let most = run_threads(2, &options(), |ranks| {
        ranks.comm().barrier()?;
        MOST_WHOLES.store(WHOLES.load(Relaxed), Relaxed);
        ranks.comm().barrier()?;
        let (_net, _zero) = shard(Mlp::<WIDTH, 16>::lazy(&device()), ranks, &unkept(Stage::Parameters))?;
        ranks.comm().barrier()?;
        let most = MOST_WHOLES.load(Relaxed);
        ranks.comm().barrier()?;
        Ok::<_, Error>(most)
    });
    most.unwrap()[0]
}

/// Returns the number of full weights on both ranks while each has gathered the one weight of a module.
fn in_use_at_a_time() -> isize {
    let seen = run_threads(2, &options(), |ranks| {
        let (net, _zero) = shard(Mlp::<WIDTH, 1>::build(&device()), ranks, &unkept(Stage::Parameters))?;
        ranks.comm().barrier()?;
        let before = WHOLES.load(Relaxed);
        ranks.comm().barrier()?;
        let _held = net.valid().materialize();
        ranks.comm().barrier()?;
        let wholes = WHOLES.load(Relaxed) - before;
        ranks.comm().barrier()?;
        Ok::<_, Error>(wholes)
    });
    seen.unwrap()[0]
}

/// Returns the bytes that remain of a module and its optimizer after both were dropped and another was updated.
fn left_behind() -> isize {
    let left = run_threads(2, &options(), |ranks| {
        warm_up();
        let device = device();
        let config = unkept(Stage::Parameters);
        let (mut other, zero) = shard(Mlp::<8, 1>::build(&device), ranks, &config)?;
        let mut optimizer = zero.optimizer(&SgdConfig::new())?;
        let mut step = |other| {
            let (_, grads) = zero.backward(|| Net::loss(&other, 0, &device))?;
            optimizer.step(1e-2, other, grads)
        };
        other = step(other)?;
        ranks.comm().barrier()?;
        let before = BYTES.load(Relaxed);
        ranks.comm().barrier()?;
        let (net, large) = shard(Mlp::<WIDTH, 8>::build(&device), ranks, &config)?;
        let mut updated = large.optimizer(&AdamWConfig::new())?;
        let (_, grads) = large.backward(|| net.loss(0, &device))?;
        drop((updated.step(1e-2, net, grads)?, updated, large));
        // Values dropped before a fence are released after it.
        step(other)?;
        ranks.comm().barrier()?;
        let left = BYTES.load(Relaxed) - before;
        ranks.comm().barrier()?;
        Ok::<_, Error>(left)
    });
    left.unwrap()[0]
}

/// A table that is read at both ends of a model.
#[derive(Module, Debug)]
struct Tied {
    table: Param<Tensor<2>>,
}

/// Returns the number of full tables that a backward pass over a tied table adds, on one rank that keeps the table.
fn of_a_tied_table() -> isize {
    let seen = run_threads(1, &options(), |ranks| {
        let device = device();
        let table = Param::from_tensor(Tensor::zeros([WIDTH, WIDTH], &device));
        let (net, zero) = shard(Tied { table }, ranks, &unkept(Stage::DataParallel))?;
        let mut added = 0;
        for _ in 0..2 {
            let before = WHOLES.load(Relaxed);
            zero.backward(|| {
                let ids = || Tensor::<1, Int>::from_data([3, 1, 3], &device);
                let x = embedding(&net.table, ids().reshape([1, 3])).reshape([3, WIDTH]);
                let loss = linear_cross_entropy(x, net.table.val(), ids(), None);
                MOST_WHOLES.store(WHOLES.load(Relaxed), Relaxed);
                loss
            })?;
            added = MOST_WHOLES.load(Relaxed) - before;
        }
        Ok::<_, Error>(added)
    });
    seen.unwrap()[0]
}

/// Returns the number of full weights on both ranks that are kept for the backward pass of four layers on sequences, if the forward pass
/// runs within `Zero::backward` or before it.
fn kept_of_sequences(device: Device, is_within: bool, forward: fn(&Linear, Tensor<3>) -> Tensor<3>) -> isize {
    let kept = run_threads(2, &options(), |ranks| {
        let (net, zero) = shard(Mlp::<WIDTH, 4>::build(&device), ranks, &unkept(Stage::Parameters))?;
        ranks.comm().barrier()?;
        let before = WHOLES.load(Relaxed);
        ranks.comm().barrier()?;
        let mut kept = 0;
        let mut loss = || {
            let x = Tensor::<3>::ones([2, 32, WIDTH], &device);
            let out = net.layers.iter().fold(x, |x, layer| forward(layer, x));
            ranks.comm().barrier().unwrap();
            kept = WHOLES.load(Relaxed) - before;
            ranks.comm().barrier().unwrap();
            out.mean()
        };
        if is_within {
            zero.backward(loss)?;
        } else {
            let loss = loss();
            zero.backward(|| loss)?;
        }
        Ok::<_, Error>(kept)
    });
    kept.unwrap()[0]
}

/// Returns the number of activations of a weight's size that are kept on both ranks for the backward pass of `DEPTH` blocks. Another thread
/// moves inputs out: waits up to 30 seconds until at most `expected` are kept.
fn kept_of_blocks<const DEPTH: usize>(config: &ZeroConfig, expected: isize) -> isize {
    let kept = run_threads(2, &options(), |ranks| {
        let device = device();
        let (net, zero) = shard(Mlp::<WIDTH, DEPTH>::build(&device), ranks, config)?;
        let block = |x, layer: &Linear| {
            let layer = layer.clone();
            checkpoint_block(move |x: Tensor<2>| layer.forward(layer.forward(x).tanh()).tanh(), x)
        };
        let forward = || net.layers.iter().fold(Tensor::<2>::ones([WIDTH, WIDTH], &device), block);
        // Each pass counts its own blocks.
        zero.backward_no_sync(|| forward().mean());
        ranks.comm().barrier()?;
        let before = WHOLES.load(Relaxed);
        ranks.comm().barrier()?;
        let mut kept = 0;
        zero.backward(|| {
            let out = forward();
            ranks.comm().barrier().unwrap();
            let begin = Instant::now();
            kept = WHOLES.load(Relaxed) - before;
            while kept > expected && begin.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(10));
                kept = WHOLES.load(Relaxed) - before;
            }
            ranks.comm().barrier().unwrap();
            out.mean()
        })?;
        Ok::<_, Error>(kept)
    });
    kept.unwrap()[0]
}

#[test]
fn memory_is_as_the_stage_has_it() {
    // Of a patched Burn: docs/upstream/check.sh.
    let is_patched = std::env::var_os("ZERO_PATCHED_BURN").is_some();
    let sgd = SgdConfig::new();
    let deep = [
        seen::<2>(Stage::Parameters, &sgd),
        seen::<4>(Stage::Parameters, &sgd),
        seen::<8>(Stage::Parameters, &sgd),
        seen::<16>(Stage::Parameters, &sgd),
        seen::<24>(Stage::Parameters, &sgd),
    ];
    println!("stage 3: {deep:#?}");
    let most = at_birth();
    println!("most wholes while 16 layers are born: {most}");
    // Each rank: its own initialization, the values from rank 0, and temporaries of the random initialization.
    assert!(most <= 8, "{most} wholes at a time");
    for seen in &deep {
        assert_eq!(seen.resting, 0, "nothing is whole while nothing uses it");
        // Counted within the loss: the weight used last is released when the loss returns.
        assert!(seen.between <= 1, "{seen:?}");
        // One full weight on each of two ranks.
        assert!(seen.most_forward <= 2, "{seen:?}");
    }
    // Per rank: a full weight in use, its gradient, two buckets in flight, and one being packed or received.
    let most = deep.iter().map(|seen| seen.most_backward).max().unwrap();
    assert!(most <= 8, "a backward pass holds no more with depth: {deep:?}");

    // Without an order all gradients wait, and the count shows it.
    let unordered =
        run_threads(2, &options(), |ranks| steps::<16>(ranks, &unkept(Stage::Parameters), &sgd, false)).unwrap();
    let most = unordered[0].as_ref().unwrap().most_backward;
    assert!(if is_patched { most <= 8 } else { most > 20 }, "{unordered:?}");

    assert_eq!(in_use_at_a_time(), 1, "ranks of a process borrow the whole that one of them has joined");

    assert_eq!(of_a_tied_table(), 1, "the head's gradient, to which the embedding's is added");

    let ours = |layer: &Linear, x| linear(x, layer.weight.val(), layer.bias.as_ref().map(Param::val), None);
    let block = |layer: &Linear, x| {
        let layer = layer.clone();
        checkpoint(move |x: Tensor<3>| layer.forward(x), x)
    };
    // The last one, as above.
    assert!(kept_of_sequences(device(), true, ours) <= 1);
    assert!(kept_of_sequences(device(), true, |layer, x| layer.forward(x)) <= 1, "of Burn's own layer");
    assert!(kept_of_sequences(device().gradient_checkpointing(), true, |layer, x| layer.forward(x)) <= 1);
    assert_eq!(kept_of_sequences(device(), true, block), 0, "of Burn's own layer in a checkpointed block");
    // Before a pass, storage is not released: the weight is computed again, but for views of it.
    assert_eq!(kept_of_sequences(device(), false, ours), 0);
    assert_eq!(kept_of_sequences(device().gradient_checkpointing(), false, |layer, x| layer.forward(x)), 0);
    let burns = kept_of_sequences(device(), false, |layer, x| layer.forward(x));
    match is_patched {
        true => assert_eq!(burns, 0, "with docs/upstream/views.patch"),
        false => {
            assert!(
                burns >= 3,
                "{burns}: Burn's `Linear` keeps none of sequences' any more, which docs/upstream.md asks for"
            );
        }
    }

    // Per rank: the output, the inputs of the blocks, and otherwise four results per block.
    let blocks = |checkpointed_blocks| ZeroConfig { checkpointed_blocks, ..unkept(Stage::Parameters) };
    let [all, half, none] = [8, 4, 0].map(|checkpointed| kept_of_blocks::<8>(&blocks(checkpointed), isize::MAX));
    println!("{none} activations are kept of 8 blocks, {half} if 4 are checkpointed, {all} if all are");
    assert!(all <= 2 * 9 && half >= all + 2 * 4 && none >= half + 2 * 4, "{all}, {half}, {none}");
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk { path: dir.path().into(), buffer_bytes: Disk::SMALLEST_BUFFER, ..Disk::default() };
    let offload = Offload { activations: Tier::Disk, disk, ..Offload::default() };
    let moved = kept_of_blocks::<8>(&ZeroConfig { offload, ..blocks(8) }, 2 * 2);
    println!("{moved} if their inputs are on a disk");
    assert!(moved <= 2 * 2, "{moved}");

    let left = left_behind();
    println!("{left} bytes are left of a module that was dropped");
    assert!(left < WHOLE as isize / 4, "{left} bytes are left of a module that was dropped");

    for stage in Stage::ALL {
        for (states, seen) in [(0, seen::<4>(stage, &sgd)), (2, seen::<4>(stage, &AdamWConfig::new()))] {
            let of_rank = formula(stage, 4, states);
            // Stage 1 shards gradients as well, at the end of a backward pass. At stage 0 the ranks of a process share the full ones.
            let are_halved = matches!(stage, Stage::DataParallel | Stage::OptimizerState);
            let gradients = if are_halved { of_rank.gradients / 2 } else { of_rank.gradients };
            // Vectors with their state, leaves of graphs and names; for gradients minus memory that a pass frees.
            for (what, got, expected, bounds) in [
                ("state", seen.state, of_rank.parameters + of_rank.optimizer, 0..170_000),
                ("gradients", seen.gradients, gradients, -10_000..200_000),
            ] {
                let over = got - 2 * expected as isize;
                println!("stage {stage}, {states} states: {got} bytes of {what}, {over} above the formula");
                assert!(bounds.contains(&over), "stage {stage}, {states} states, {what}: {seen:?}");
            }
        }
    }
    let under_way = |stage| {
        let seen = seen::<16>(stage, &sgd);
        seen.most_backward - seen.resting
    };
    assert!(under_way(Stage::OptimizerState) >= 2 * 16, "stage 1 has all gradients whole within a backward pass");
    let most = under_way(Stage::Gradients);
    assert!(most <= 10, "{most} wholes in a backward pass of stage 2");

    // Model state on a disk leaves buffers, and vectors with their state.
    let dir = tempfile::tempdir().unwrap();
    let (buffer_count, buffer_bytes) = (Disk::FEWEST_BUFFERS, Disk::SMALLEST_BUFFER);
    let disk = Disk { path: dir.path().into(), buffer_count, buffer_bytes, ..Disk::default() };
    let offload = Offload { optimizer: Tier::Disk, parameters: Tier::Disk, disk, ..Offload::default() };
    let config = ZeroConfig { offload, ..unkept(Stage::Parameters) };
    let on_disk = seen_by::<16>(&config, &AdamWConfig::new());
    let in_memory = formula(Stage::Parameters, 16, 2);
    let (got, buffers) = (on_disk.state, (2 * buffer_count * buffer_bytes) as isize);
    println!("{got} bytes of state in memory, {buffers} of them buffers, instead of {in_memory:?} per rank");
    assert!(got < buffers + 16 * 60_000, "{on_disk:?}");
    // On one rank too, parameters on a disk are read for each use.
    let alone = run_threads(1, &options(), |ranks| steps::<8>(ranks, &config, &AdamWConfig::new(), true));
    let alone = alone.unwrap().swap_remove(0).unwrap();
    println!("one rank: {alone:?}");
    assert!(
        alone.resting == 0 && alone.between <= 1 && alone.most_forward <= 2 && alone.most_backward <= 8,
        "{alone:?}"
    );
}
