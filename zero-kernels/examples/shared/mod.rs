//! Helpers shared by the benchmarks: arguments, numbers, times.

use std::time::Instant;

/// Returns a function that gives the number at a position of the command line, or a default.
pub fn arguments() -> impl Fn(usize, usize) -> usize {
    let given: Vec<usize> = std::env::args().skip(1).map(|text| text.parse().expect("numbers")).collect();
    move |at, default| given.get(at).copied().unwrap_or(default)
}

pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(count).collect()
}

pub fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("the system gives threads")
}

/// Returns the median seconds of the work, after a warm-up of two rounds.
pub fn median(pool: &rayon::ThreadPool, rounds: usize, work: &mut (dyn FnMut() + Send)) -> f64 {
    let time = |_| {
        let begin = Instant::now();
        pool.install(&mut *work);
        begin.elapsed().as_secs_f64()
    };
    let mut times: Vec<f64> = (0..rounds + 2).map(time).skip(2).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
