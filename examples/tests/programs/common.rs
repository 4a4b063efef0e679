//! Helpers that compare two ranks with one rank that has the full batch, at every stage, with a timeout.
#![allow(dead_code)]

use std::ops::Range;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::{Zero, ZeroDevice, gathered};
use zero_core::Stage;

pub type Inner = Zero<Flex>;
pub type B = Autodiff<Inner>;
pub type Device = ZeroDevice<FlexDevice>;

/// Rows of the full batch, and their width.
pub const ROWS: usize = 8;
pub const WIDTH: usize = 4;

/// Shards small parameters like large ones.
pub fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig { param_persistence_threshold: 0, reduce_bucket_size: 64, seed: 7, ..ZeroConfig::new(stage) }
}

/// Returns the ranks' results, or the launch error. A hang is an error too.
pub fn run<T: Send + 'static>(
    world: usize,
    config: ZeroConfig,
    body: impl Fn(Device) -> T + Send + Sync + 'static,
) -> Result<Vec<T>, String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let options = LaunchOptions { threads_per_rank: 1, deadline: Duration::from_secs(20), ..Default::default() };
        let ranks = launch::<Flex, T, String>(world, &config, &options, |device| Ok(body(device)));
        let _ = sender.send(ranks.map_err(|error| error.to_string()));
    });
    match receiver.recv_timeout(Duration::from_secs(90)) {
        Ok(ranks) => ranks,
        Err(RecvTimeoutError::Timeout) => Err("HANG: no end within 90 s at a deadline of 20 s".into()),
        Err(RecvTimeoutError::Disconnected) => Err("the launch itself panicked".into()),
    }
}

/// This rank's rows of the full batch.
pub fn rows(device: &Device, world: usize) -> Range<usize> {
    let each = ROWS / world;
    device.rank() * each..(device.rank() + 1) * each
}

/// This rank's part of a step's batch.
pub fn batch(device: &Device, world: usize, step: usize) -> Tensor<B, 2> {
    let value = |row: usize, i: usize| ((row * 5 + i * 3 + step * 7) % 11) as f32 / 7.0 - 0.6;
    let values: Vec<f32> = rows(device, world).flat_map(|row| (0..WIDTH).map(move |i| value(row, i))).collect();
    Tensor::from_data(TensorData::new(values, [ROWS / world, WIDTH]), device)
}

/// All parameters of a model, concatenated. Every rank must call it.
pub fn whole<M: AutodiffModule<B>>(model: &M) -> Vec<f32> {
    gathered::read::<B, M>(model, |_| true).into_iter().flat_map(|parameter| parameter.values).collect()
}

/// Runs the backward pass and the update.
pub fn update<M: AutodiffModule<B>>(model: M, optimizer: &mut impl Optimizer<M, B>, loss: Tensor<B, 1>) -> M {
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(0.05, model, grads)
}

pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() {
        return f32::INFINITY;
    }
    let far =
        |(a, b): (&f32, &f32)| if a.is_nan() || b.is_nan() { f32::INFINITY } else { (a - b).abs() / (1.0 + b.abs()) };
    a.iter().zip(b).map(far).fold(0.0, f32::max)
}

/// Checks that two ranks, at every stage, give the result of one rank that has the full batch. `body` gets the number
/// of ranks. All stages run before failures are reported.
pub fn like_one_rank(what: &str, body: impl Fn(Device, usize) -> Vec<f32> + Clone + Send + Sync + 'static) {
    let mut wrong = Vec::new();
    for stage in Stage::ALL {
        let (alone, both) = (body.clone(), body.clone());
        let alone = match run(1, config(stage), move |device| alone(device, 1)) {
            Ok(mut ranks) => ranks.remove(0),
            Err(error) => {
                wrong.push(format!("{stage:?}, one rank: {error}"));
                continue;
            }
        };
        match run(2, config(stage), move |device| both(device, 2)) {
            Err(error) => wrong.push(format!("{stage:?}, two ranks: {error}")),
            Ok(ranks) => {
                for (rank, values) in ranks.iter().enumerate() {
                    let far = distance(values, &alone);
                    if far > 1e-4 {
                        wrong.push(format!("{stage:?}, rank {rank}: {far:.4} from one rank's: {values:?} {alone:?}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}

/// Checks that two ranks fail with an error that contains all of `phrases`, at every stage.
pub fn refused<T: Send + core::fmt::Debug + 'static>(
    what: &str,
    phrases: &[&str],
    body: impl Fn(Device) -> T + Clone + Send + Sync + 'static,
) {
    let mut wrong = Vec::new();
    for stage in Stage::ALL {
        match run(2, config(stage), body.clone()) {
            Ok(ranks) => wrong.push(format!("{stage:?}: nobody noticed; the ranks returned {ranks:?}")),
            Err(error) if phrases.iter().all(|phrase| error.contains(phrase)) => {}
            Err(error) => wrong.push(format!("{stage:?}: the error lacks {phrases:?}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}
