//! The cost of sharding: `cargo run --release --example speed -- [WIDTH] [LAYERS] [ROWS] [ROUNDS]`.
//!
//! Trains a perceptron with AdamW: on plain Burn, with one thread on all rows, and on two ranks that are threads, each on half of the rows,
//! at every stage. Runs alternate; each figure is the median of the rounds, relative to plain Burn's rows per second.

use std::time::Instant;

use burn::module::Module;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams};
use zero_core::Stage;
use zero_core::collective::threads::ThreadOptions;
use zero_param::{Error, ZeroConfig, run_threads, shard};

const STEPS: usize = 4;
const RANKS: usize = 2;

#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    fn new(width: usize, layers: usize, device: &Device) -> Self {
        Self { layers: (0..layers).map(|_| LinearConfig::new(width, width).init(device)).collect() }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.layers.iter().fold(x, |x, layer| relu(layer.forward(x))).square().mean()
    }
}

/// Returns the seconds of the last step.
fn plain(width: usize, layers: usize, rows: usize) -> f64 {
    let device = Device::flex().autodiff();
    let mut model = Mlp::new(width, layers, &device);
    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::<2>::ones([rows, width], &device);
    let mut seconds = 0.0;
    for _ in 0..STEPS {
        let begin = Instant::now();
        let grads = GradientsParams::from_grads(model.loss(x.clone()).backward(), &model);
        model = optimizer.step(1e-3, model, grads);
        seconds = begin.elapsed().as_secs_f64();
    }
    seconds
}

fn sharded(stage: Stage, width: usize, layers: usize, rows: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let seconds = run_threads(RANKS, &ThreadOptions::default(), |ranks| {
        let device = Device::flex().autodiff();
        let (mut model, zero) = shard(Mlp::new(width, layers, &device), ranks, &ZeroConfig::new(stage))?;
        let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
        let x = Tensor::<2>::ones([rows / RANKS, width], &device);
        let mut seconds = 0.0;
        for _ in 0..STEPS {
            ranks.comm().barrier()?;
            let begin = Instant::now();
            let (_, grads) = zero.backward(|| model.loss(x.clone()))?;
            model = optimizer.step(1e-3, model, grads)?;
            ranks.comm().barrier()?;
            seconds = begin.elapsed().as_secs_f64();
        }
        Ok::<_, Error>(seconds)
    })?;
    Ok(seconds[0])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given: Vec<usize> = std::env::args().skip(1).map(|number| number.parse()).collect::<Result<_, _>>()?;
    let of = |at: usize, default| given.get(at).copied().unwrap_or(default);
    let (width, layers, rows, rounds) = (of(0, 1024), of(1, 8), of(2, 512), of(3, 5));
    let mut all = vec![Vec::new(); 1 + Stage::ALL.len()];
    for _ in 0..rounds {
        all[0].push(plain(width, layers, rows));
        for (seconds, stage) in all[1..].iter_mut().zip(Stage::ALL) {
            seconds.push(sharded(stage, width, layers, rows)?);
        }
    }
    let median = |seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let seconds: Vec<f64> = all.iter_mut().map(median).collect();
    println!("{layers} layers of {width} x {width}, {rows} rows per step; plain Burn: {:.3} s per step", seconds[0]);
    for (stage, seconds_of) in Stage::ALL.iter().zip(&seconds[1..]) {
        println!("stage {stage}, {RANKS} ranks: {:.2} of plain Burn's rows per second", seconds[0] / seconds_of);
    }
    Ok(())
}
