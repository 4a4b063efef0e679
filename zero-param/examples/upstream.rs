//! Demonstrates the requests of docs/upstream.md on Burn 0.22.1 alone: `cargo run --example upstream`, or with the name of one.
//!
//! `deadlock` hangs on 0.22.1 and runs only when named; it ends itself after 20 seconds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use std::time::Duration;

use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::module::{embedding, linear};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_nn::RmsNormConfig;

const WIDTH: usize = 256;
/// Bytes of a weight in fp32.
const WHOLE: usize = WIDTH * WIDTH * 4;

static ALIVE: AtomicIsize = AtomicIsize::new(0);
static MOST: AtomicIsize = AtomicIsize::new(0);

/// Counts allocations of the size of a weight, or of twice that size.
struct Counting;

fn count(bytes: usize, sign: isize) {
    if bytes == WHOLE || bytes == 2 * WHOLE {
        MOST.fetch_max(ALIVE.fetch_add(sign, Relaxed) + sign, Relaxed);
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
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn device() -> Device {
    Device::flex().autodiff()
}

fn leaf(device: &Device) -> Tensor<2> {
    Tensor::<2>::full([WIDTH, WIDTH], 0.01, device).require_grad()
}

/// Returns the number of weight-sized buffers that `forward` keeps alive for its backward pass.
fn kept(forward: impl FnOnce() -> Tensor<1>) -> isize {
    let before = ALIVE.load(Relaxed);
    let loss = forward();
    let kept = ALIVE.load(Relaxed) - before;
    drop(loss.backward());
    kept
}

/// 1. The backward pass of an embedding needs only the weight's shape, but the full weight is saved for it.
fn embedding_saves_its_weight() {
    let device = device();
    let table = leaf(&device);
    let ids = || Tensor::<2, Int>::from_data([[1, 2, 3]], &device);
    // A weight that is computed for its use: a reparameterized one, or a cast one.
    let made = || table.clone().mul_scalar(2.0);
    let by_embedding = kept(|| embedding(made(), ids()).sum());
    let by_select = kept(|| made().select(0, ids().reshape([3])).sum());
    println!(
        "1. weights kept from the forward to the backward pass: {by_embedding} by embedding, {by_select} by select"
    );
}

/// 2. A norm reads the shape of the stored tensor rather than of `val()`.
fn norms_look_at_the_stored_shape() {
    #[derive(Module, Debug)]
    struct Twice {}
    impl Reparameterization for Twice {
        const NAME: &'static str = "twice";
        fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
            Tensor::cat(vec![base.clone(), base], D - 1)
        }
    }
    struct Half;
    impl Reparameterizer for Half {
        type Reparam = Twice;
        fn reparameterize<const D: usize>(
            &mut self,
            _: &str,
            param: Param<Tensor<D>>,
        ) -> (Param<Tensor<D>>, Option<Twice>) {
            let half = param.map(|gamma| gamma.set_require_grad(false).narrow(D - 1, 0, 4).require_grad());
            (half, Some(Twice {}))
        }
    }
    let panics = catch_unwind(|| {
        let device = device();
        let norm = RmsNormConfig::new(8).init(&device).apply_reparameterization(Half);
        norm.forward(Tensor::<2>::ones([2, 8], &device)).into_data()
    })
    .is_err();
    println!("2. RmsNorm with a reparameterized gamma of the right size panics: {panics}");
}

/// 3. A cast is cheap to recompute, but its result is kept even with gradient checkpointing.
fn casts_are_kept() {
    let device = device().gradient_checkpointing();
    let weight = leaf(&device);
    let x = Tensor::<2>::ones([2, WIDTH], &device).require_grad();
    let by_cast = kept(|| x.clone().cast(DType::F64).matmul(weight.clone().cast(DType::F64)).sum());
    let by_product = kept(|| x.clone().matmul(weight.clone().mul_scalar(2.0)).sum());
    println!(
        "3. copies kept for the backward pass with gradient checkpointing: {by_cast} by cast, {by_product} by mul_scalar"
    );
}

/// 4. Steps of a backward pass run by depth, so steps near the leaves run last, and their gradients wait. Here weights are expanded rows:
///    their gradients are as small as the rows once the step of `expand` has run.
fn gradients_wait() {
    let device = device();
    for layers in [2, 4, 8, 16] {
        let mut x = Tensor::<2>::ones([2, WIDTH], &device);
        for _ in 0..layers {
            let row = Tensor::<2>::full([1, WIDTH], 0.01, &device).require_grad();
            x = x.matmul(row.expand([WIDTH, WIDTH])).tanh();
        }
        let loss = x.sum();
        let before = ALIVE.load(Relaxed);
        MOST.store(before, Relaxed);
        drop(loss.backward());
        println!(
            "4. {layers} layers: {} additional weight-sized buffers in the backward pass",
            MOST.load(Relaxed) - before
        );
    }
}

/// 5. The result of an operation with an untracked parent is saved, although the operation is declared cheap to recompute.
fn frozen_weights_are_kept() {
    let device = device().gradient_checkpointing();
    let x = Tensor::<2>::ones([2, WIDTH], &device).require_grad();
    let frozen = Tensor::<2>::full([WIDTH, WIDTH], 0.01, &device);
    let by_frozen = kept(|| x.clone().matmul(frozen.clone().mul_scalar(2.0)).sum());
    let trained = leaf(&device);
    let by_trained = kept(|| x.clone().matmul(trained.clone().mul_scalar(2.0)).sum());
    println!(
        "5. products kept with gradient checkpointing: {by_frozen} of a frozen weight, {by_trained} of a trained one"
    );
}

/// 6. The head of a tied embedding is a view, and a view keeps its source alive.
fn views_keep_what_they_are_of() {
    let device = device();
    let table = leaf(&device);
    let x = Tensor::<2>::ones([2, WIDTH], &device).require_grad();
    let made = || table.clone().mul_scalar(2.0);
    let by_view = kept(|| linear(x.clone(), made().transpose(), None).sum());
    println!("6. weights kept from the forward to the backward pass by linear(x, w.transpose()): {by_view}");
}

/// 7. Two threads share a leaf. One merges graphs under the locator's lock and waits for a graph's lock. The other runs a backward pass
///    under the graph's lock and waits for the locator's.
fn deadlock() {
    let device = device();
    let begin = std::time::Instant::now();
    let threads = std::thread::spawn(move || {
        for _ in 0..2_000 {
            let shared = Tensor::<1>::ones([8], &device).require_grad();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    let (shared, device) = (shared.clone(), &device);
                    scope.spawn(move || {
                        let mut own = Tensor::<1>::ones([8], device).require_grad();
                        for _ in 0..50 {
                            own = own.tanh();
                        }
                        for _ in 0..50 {
                            own = (own * shared.clone()).tanh();
                        }
                        drop(own.sum().backward());
                    });
                }
            });
        }
    });
    while !threads.is_finished() {
        if begin.elapsed() > Duration::from_secs(20) {
            println!("7. two threads that share a leaf deadlock");
            std::process::exit(0);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("7. two threads that share a leaf: done in {:?}", begin.elapsed());
}

fn main() {
    let all: [(&str, fn()); 6] = [
        ("embedding", embedding_saves_its_weight),
        ("norms", norms_look_at_the_stored_shape),
        ("casts", casts_are_kept),
        ("order", gradients_wait),
        ("frozen", frozen_weights_are_kept),
        ("views", views_keep_what_they_are_of),
    ];
    let named = std::env::args().nth(1);
    for (name, show) in all {
        if named.as_deref().is_none_or(|named| named == name) {
            show();
        }
    }
    if named.as_deref() == Some("deadlock") {
        deadlock();
    }
}
