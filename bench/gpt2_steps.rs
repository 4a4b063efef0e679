//! The same GPT-2 training steps over any autodiff backend, timed: what the decorator's cost is measured with.
//!
//! Shared by path between `bench/bare` (the bare backend) and `examples/examples/gpt2_steps.rs` (`Zero` around it).

use std::time::Instant;

use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use zero_models::{Gpt2, Gpt2Config};

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

/// Trains and returns the seconds of each step but the first, and the last loss.
pub fn train<B: AutodiffBackend>(
    sizes: &Sizes,
    device: &B::Device,
    prepare: impl Fn(Gpt2<B>) -> Gpt2<B>,
    collect: impl Fn(GradientsParams, &Gpt2<B>) -> GradientsParams,
) -> (Vec<f64>, f64)
where
    Gpt2<B>: AutodiffModule<B>,
{
    let mut model = prepare(sizes.model.init::<B>(device));
    let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
    let (mut seconds, mut last) = (Vec::new(), 0.0);
    for step in 0..=sizes.steps {
        let begin = Instant::now();
        let ids: Vec<i32> = (0..sizes.batch * sizes.seq)
            .map(|i| ((step * 7919 + i * 104_729) % sizes.model.vocab_size) as i32)
            .collect();
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [sizes.batch, sizes.seq]), device);
        let loss = model.loss(ids);
        last = loss.clone().into_data().iter::<f64>().next().expect("a loss is one number");
        let grads = collect(GradientsParams::from_grads(loss.backward(), &model), &model);
        model = optimizer.step(1e-4, model, grads);
        if step > 0 {
            seconds.push(begin.elapsed().as_secs_f64());
        }
    }
    (seconds, last)
}

/// One line: tokens per second by the median step and by the fastest one, and the last loss. Other work on the machine
/// only ever adds to a step's time, so the fastest steps of many compare best where it is not quiet.
pub fn report(name: &str, sizes: &Sizes, seconds: &mut [f64], loss: f64) {
    seconds.sort_by(f64::total_cmp);
    let tokens = (sizes.batch * sizes.seq) as f64;
    let (median, fastest) = (tokens / seconds[seconds.len() / 2], tokens / seconds[0]);
    println!("{name} {median:.2} tokens/s, fastest step {fastest:.2}, last loss {loss:.4}");
}
