//! Measures memory with a counting allocator instead of the accounting: what ranks hold after training steps, and at
//! stage 3 the peak.
//!
//! One test in this file, because it counts the full process:
//! `cargo test -p zero-tests --test allocations -- --nocapture`.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::optim::{GradientsParams, Optimizer};
use common::{B, Run, adamw, on_ranks};
use zero_burn::config::{Disk, Offload, Tier, ZeroConfig};
use zero_burn::module::{collect_grads, mark, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_core::Stage;
use zero_core::estimate::{Precision, model_state};
use zero_models::{Gpt2, Gpt2Config};
use zero_train::trainer::Activations;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Returns `true` for allocations of tensors and of the framework. The matrix library's packing buffer is excluded:
/// 1 MiB per thread, the only 128-byte aligned allocation, freed when its thread ends, some time after its rank.
fn is_counted(layout: Layout) -> bool {
    layout.align() < 128
}

// SAFETY: every call goes to the system's allocator with the caller's arguments; counting touches atomics only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_counted(layout) {
            let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
            PEAK.fetch_max(live, Ordering::Relaxed);
        }
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if is_counted(layout) {
            LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        }
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of last steps whose peak is measured.
const MEASURED: usize = 4;

/// Returns the live bytes of all ranks after training (parameters and optimizer state) and the peak of a step. The peak
/// is the lowest of the last steps: at stage 3 ranks lend each other full parameters, so the gathered bytes depend on
/// how far the threads have drifted apart.
fn measure<O: Optimizer<Gpt2<B>, B>>(run: &Run, optimizer: fn() -> O) -> (usize, usize) {
    let before = LIVE.load(Ordering::SeqCst);
    let together = Barrier::new(run.ranks);
    let measured = on_ranks(run.ranks, &run.zero, |device| {
        let mut model = prepare::<B, _>(run.model.init::<B>(&device), &device);
        let mut optimizer = optimizer();
        let mut lowest = usize::MAX;
        for step in 0..run.steps {
            let measured = step + MEASURED.min((run.steps - 1).max(1)) >= run.steps;
            if measured {
                // All ranks stand still, so that the peak is that of one step.
                together.wait();
                PEAK.store(LIVE.load(Ordering::SeqCst), Ordering::SeqCst);
                together.wait();
            }
            let loss = model.loss(run.tokens(step, device.rank(), &device));
            let grads = collect_grads::<B, _>(GradientsParams::from_grads(loss.backward(), &model), &model);
            model = optimizer.step(1e-3, model, grads);
            mark::<B, _>(&model);
            if measured {
                together.wait();
                lowest = lowest.min(PEAK.load(Ordering::SeqCst) - before);
            }
        }
        together.wait();
        let measured = (LIVE.load(Ordering::SeqCst) - before, lowest);
        together.wait();
        drop((model, optimizer));
        measured
    });
    measured[0]
}

#[test]
fn an_allocator_counts_what_the_formulas_say() {
    follows_the_formulas("Burn's AdamW", &[2], adamw::<Gpt2<B>>);
    follows_the_formulas("fused AdamW", &[1, 2, 4], || Fused::<B>::new(Rule::adamw()));
    activations_follow_theirs();
}

fn activations_follow_theirs() {
    let (layers, width, seq, batch) = (12, 64, 128, 8);
    let model = Gpt2Config { n_layer: layers, n_embd: width, n_positions: seq, ..Run::tiny(Stage::DataParallel).model };
    for stage in [Stage::DataParallel, Stage::Parameters] {
        let zero = ZeroConfig::new(stage);
        let run = Run { model: model.clone(), zero, ranks: 1, batch, seq, steps: 2 };
        checkpointing_saves_what_the_plan_says(&run, Tier::Memory, &[6, 12]);
    }
}

/// The same for a published size, with state on a disk for models too large for memory. Takes minutes for GPT-2 124M
/// and an hour for 1.5B, where one step is enough (`ZERO_STEPS=1`), because its state is on the disk.
/// `ZERO_MODEL=gpt2 ZERO_BATCH=4 ZERO_THREADS=2 cargo test -p zero-tests --test allocations -- --ignored --nocapture`
#[test]
#[ignore = "takes minutes to an hour, and gigabytes"]
fn activations_of_a_published_size() {
    let given = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_string());
    let number = |name: &str, default| given(name, default).parse().expect(name);
    let model = Gpt2Config::preset(&given("ZERO_MODEL", "gpt2")).unwrap();
    let (seq, batch) = (number("ZERO_SEQ", "1024"), number("ZERO_BATCH", "4"));
    let swap = tempfile::tempdir().unwrap();
    let disk = Disk { path: swap.path().to_path_buf(), ..Disk::default() };
    let tier = if model.num_params() < 1 << 30 { Tier::Memory } else { Tier::Disk };
    let offload = Offload { parameters: tier, optimizer: tier, disk, ..Offload::default() };
    let zero = ZeroConfig { offload, ..ZeroConfig::new(Stage::Parameters) };
    let (all, steps) = ([model.n_layer], number("ZERO_STEPS", "2"));
    checkpointing_saves_what_the_plan_says(&Run { model, zero, ranks: 1, batch, seq, steps }, tier, &all);
}

/// Checks that checkpointing saves as much of a step's peak, nearly all of it activations, as the plan states. Uses one
/// rank, because several do not reach their peaks at the same time.
fn checkpointing_saves_what_the_plan_says(run: &Run, state: Tier, checkpointed: &[usize]) {
    let swap = tempfile::tempdir().unwrap();
    let stage = run.zero.stage;
    let peak = |blocks, activations| {
        let mut run = run.clone();
        if state != Tier::Disk {
            run.zero.offload.disk.path = swap.path().to_path_buf();
        }
        run.zero.checkpointed_blocks = blocks;
        run.zero.offload.activations = activations;
        measure(&run, || Fused::<B>::new(Rule::adamw())).1
    };
    let model = &run.model;
    let bytes = |widths: usize| (4 * run.batch * run.seq * widths * model.n_embd) as u64;
    // In memory gradients of the blocks behind are there too, which grow while activations become fewer.
    let gradients = if state == Tier::Memory { 48 * (model.n_embd * model.n_embd) as u64 } else { 0 };
    let formula = |checkpointed: usize, is_offloaded| {
        let at = |behind: usize| {
            let blocks = model.n_layer - behind;
            let there = Activations { blocks, block: bytes(16), input: bytes(1), rest: 0 };
            there.bytes(checkpointed.min(blocks), is_offloaded) + behind as u64 * gradients
        };
        (0..model.n_layer).map(at).max().expect("a model has blocks")
    };
    let mut none = 0;
    for tier in [Tier::Memory, Tier::Disk] {
        // With the disk's buffers, if there is one.
        if none == 0 || state != Tier::Disk {
            none = peak(0, tier);
        }
        for &blocks in checkpointed {
            let with = peak(blocks, tier);
            let (saved, formula) =
                (none as f64 - with as f64, (formula(0, false) - formula(blocks, tier == Tier::Disk)) as f64);
            let ratio = saved / formula;
            println!(
                "stage {stage}: {blocks} of {} blocks checkpointed, inputs in {tier:?}: peak {} MiB of {} MiB, saves {ratio:.3} of \
                 the formula",
                model.n_layer,
                with >> 20,
                none >> 20
            );
            assert!(
                (ratio - 1.0).abs() < 0.05,
                "{blocks} blocks, stage {stage}: {saved} bytes saved, the formula says {formula}"
            );
        }
    }
}

fn follows_the_formulas<O: Optimizer<Gpt2<B>, B>>(name: &str, worlds: &[usize], optimizer: fn() -> O) {
    let base = Run::tiny(Stage::DataParallel);
    // One layer against three: what differs is model state alone, whatever the machinery around it takes.
    let model = |layers| Gpt2Config { vocab_size: 256, n_embd: 512, n_layer: layers, ..base.model.clone() };
    for &ranks in worlds {
        for stage in Stage::ALL {
            let zero = ZeroConfig {
                reduce_bucket_size: 200_000,
                prefetch_bucket_size: 0,
                max_live_parameters: 1_060_000,
                param_persistence_threshold: 0,
                ..ZeroConfig::new(stage)
            };
            let run =
                |layers| Run { model: model(layers), zero: zero.clone(), ranks, batch: 1, seq: 4, steps: 2 + MEASURED };
            let (small, large) = (run(1), run(3));
            let ((small_live, small_peak), (large_live, large_peak)) =
                (measure(&small, optimizer), measure(&large, optimizer));
            let more = (large.model.num_params() - small.model.num_params()) as u64;
            // After the update of stages 1 and 2 the parameters are in pieces until the next forward pass gathers them.
            let parts = if stage.shards_optimizer() { ranks as u64 } else { 1 };
            let formula = 12 * more / parts * ranks as u64;
            let live = (large_live - small_live) as f64 / formula as f64;
            let peak_formula = model_state(more, stage, ranks as u64, Precision::FP32_ADAMW).total() * ranks as u64;
            let peak = (large_peak - small_peak) as f64 / peak_formula as f64;
            println!(
                "{name}, stage {stage}, {ranks} rank(s): between steps {live:.4} of the formula's parameters and optimizer \
                 state; peak of a step {peak:.3} of its model state"
            );
            assert!((live - 1.0).abs() < 0.02, "{name}, stage {stage}, {ranks} ranks: {live}");
            // What is gathered and what is on its way must not grow with the model.
            assert!(peak < 1.1, "{name}, stage {stage}, {ranks} ranks: the peak is {peak} of the formula");
        }
    }
}
