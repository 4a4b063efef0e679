//! Timed GPT-2 training steps over any autodiff backend, to measure the overhead of the decorator.
//!
//! Shared by path between `bench/bare` (the bare backend) and `examples/examples/gpt2_steps.rs` (`Zero` around it).

use std::time::Instant;

use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use zero_models::{Gpt2, Gpt2Config};
use zero_ops::FusedBackend;

/// Sizes of a measurement, from the command line: `PRESET BATCH SEQ STEPS`.
pub struct Sizes {
    pub model: Gpt2Config,
    pub batch: usize,
    pub seq: usize,
    pub steps: usize,
}

impl Sizes {
    pub fn from_args() -> Self {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let number = |i: usize, default: usize| {
            args.get(i).map_or(default, |arg| arg.parse().unwrap_or_else(|_| panic!("{arg}: expected a number")))
        };
        let preset = args.first().map_or("gpt2", String::as_str);
        let model = Gpt2Config::preset(preset).unwrap_or_else(|error| panic!("{error}"));
        Self { model, batch: number(1, 1), seq: number(2, 128), steps: number(3, 6) }
    }
}

/// Trains and returns the seconds of each step after the first, for forward, backward (with reduction) and update, and
/// the last loss.
pub fn train<B: AutodiffBackend + FusedBackend>(
    sizes: &Sizes,
    device: &B::Device,
    prepare: impl Fn(Gpt2<B>) -> Gpt2<B>,
    collect: impl Fn(GradientsParams, &Gpt2<B>) -> GradientsParams,
) -> (Vec<[f64; 3]>, f64)
where
    Gpt2<B>: AutodiffModule<B>,
{
    let mut model = prepare(sizes.model.init::<B>(device));
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
    let (mut seconds, mut last) = (Vec::new(), 0.0);
    for step in 0..=sizes.steps {
        let ids: Vec<i32> = (0..sizes.batch * sizes.seq)
            .map(|i| ((step * 7919 + i * 104_729) % sizes.model.vocab_size) as i32)
            .collect();
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [sizes.batch, sizes.seq]), device);
        let begin = Instant::now();
        let loss = model.loss(ids);
        last = loss.clone().into_data().iter::<f64>().next().expect("a loss is one number");
        let forward = Instant::now();
        let grads = collect(GradientsParams::from_grads(loss.backward(), &model), &model);
        let backward = Instant::now();
        model = optimizer.step(1e-4, model, grads);
        if step > 0 {
            let phases = [forward - begin, backward - forward, backward.elapsed()];
            seconds.push(phases.map(|phase| phase.as_secs_f64()));
        }
    }
    (seconds, last)
}

/// Prints one line: tokens per second of the median step, the fastest forward, backward and update in ms, and the last
/// loss. Other work on the machine can only slow a step down, so on a busy machine the fastest steps compare best.
pub fn report(name: &str, sizes: &Sizes, seconds: &[[f64; 3]], loss: f64) {
    let mut steps: Vec<f64> = seconds.iter().map(|phases| phases.iter().sum()).collect();
    steps.sort_by(f64::total_cmp);
    let median = (sizes.batch * sizes.seq) as f64 / steps[steps.len() / 2];
    let fastest = |phase: usize| seconds.iter().map(|phases| phases[phase] * 1e3).fold(f64::INFINITY, f64::min);
    let (forward, backward, update) = (fastest(0), fastest(1), fastest(2));
    println!(
        "{name} {median:.2} tokens/s, fastest phases {forward:.1} {backward:.1} {update:.1} ms, last loss {loss:.4}"
    );
}
