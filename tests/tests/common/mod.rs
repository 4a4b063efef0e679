//! Shared by the tests: small GPT-2 and BERT runs on several ranks.
#![allow(dead_code)] // each test uses its part

use std::path::PathBuf;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::module::{collect_grads, grad_norm, mark, prepare};
use zero_burn::stats::{RankStats, all_gather, rank_stats, reset_peaks};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;
use zero_models::{Gpt2, Gpt2Config};

pub type B = Autodiff<Zero<Flex>>;
pub type Device = ZeroDevice<FlexDevice>;

/// The path of a fixture folder.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// A GPT-2 run on synthetic tokens.
#[derive(Debug, Clone)]
pub struct Run {
    pub model: Gpt2Config,
    pub zero: ZeroConfig,
    pub ranks: usize,
    pub batch: usize,
    pub seq: usize,
    pub steps: usize,
}

impl Run {
    /// Two layers of width 32, a vocabulary of 61.
    pub fn tiny(stage: Stage) -> Self {
        let preset = Gpt2Config::preset("tiny").unwrap();
        let model = Gpt2Config { vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 4, ..preset };
        let zero = ZeroConfig {
            reduce_bucket_size: 3_000,
            prefetch_bucket_size: 5_000,
            max_live_parameters: 20_000,
            param_persistence_threshold: 100,
            seed: 3,
            ..ZeroConfig::new(stage)
        };
        Self { model, zero, ranks: 2, batch: 2, seq: 12, steps: 5 }
    }

    /// Learnable tokens: each row counts up from a start.
    pub fn tokens(&self, step: usize, rank: usize, device: &Device) -> Tensor<B, 2, Int> {
        let first = (step * self.ranks + rank) * self.batch;
        let vocab = self.model.vocab_size;
        let ids: Vec<i32> = (first..first + self.batch)
            .flat_map(|row| (0..self.seq).map(move |i| ((row * 7 + i * (1 + row % 2)) % vocab) as i32))
            .collect();
        Tensor::from_data(TensorData::new(ids, [self.batch, self.seq]), device)
    }
}

/// One thread per rank, unless `ZERO_THREADS` is set.
pub fn launch_options() -> LaunchOptions {
    let threads_per_rank = std::env::var("ZERO_THREADS").map_or(1, |threads| threads.parse().expect("ZERO_THREADS"));
    LaunchOptions { threads_per_rank, deadline: Duration::from_secs(120), ..LaunchOptions::default() }
}

/// Runs `body` on every rank.
pub fn on_ranks<T: Send>(ranks: usize, zero: &ZeroConfig, body: impl Fn(Device) -> T + Sync) -> Vec<T> {
    launch::<Flex, T, String>(ranks, zero, &launch_options(), |device| Ok(body(device)))
        .unwrap_or_else(|error| panic!("{error}"))
}

/// PyTorch's AdamW defaults.
pub fn adamw<M: AutodiffModule<B>>() -> impl Optimizer<M, B> {
    AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init()
}

/// Runs one step: updated model, global mean loss, global gradient norm.
pub fn step<M: AutodiffModule<B>>(
    model: M,
    optimizer: &mut impl Optimizer<M, B>,
    loss: impl Fn(&M) -> Tensor<B, 1>,
) -> (M, f64, f64) {
    let loss = loss(&model);
    let value = f64::from(loss.clone().into_scalar());
    let grads = collect_grads::<B, _>(GradientsParams::from_grads(loss.backward(), &model), &model);
    let norm = grad_norm::<B, _>(&grads, &model);
    let model = optimizer.step(1e-3, model, grads);
    mark::<B, _>(&model);
    let losses = all_gather::<Flex>(&[value]);
    (model, losses.iter().map(|values| values[0]).sum::<f64>() / losses.len() as f64, norm)
}

/// Global losses of a run.
pub fn gpt2_losses(run: &Run) -> Vec<f64> {
    on_ranks(run.ranks, &run.zero, |device| {
        let mut model = prepare::<B, _>(run.model.init::<B>(&device), &device);
        let mut optimizer = adamw::<Gpt2<B>>();
        let mut losses = Vec::new();
        for s in 0..run.steps {
            let (next, loss, _) =
                step(model, &mut optimizer, |model| model.loss(run.tokens(s, device.rank(), &device)));
            losses.push(loss);
            model = next;
        }
        losses
    })
    .swap_remove(0)
}

/// Returns each rank's measurements of the last step of a run: traffic and memory.
pub fn gpt2_stats(run: &Run) -> Vec<RankStats> {
    on_ranks(run.ranks, &run.zero, |device| {
        let mut model = prepare::<B, _>(run.model.init::<B>(&device), &device);
        let mut optimizer = adamw::<Gpt2<B>>();
        let mut stats = RankStats::default();
        for s in 0..run.steps {
            reset_peaks::<Flex>();
            let before = rank_stats::<Flex>().wire_bytes;
            let grads = {
                let loss = model.loss(run.tokens(s, device.rank(), &device));
                collect_grads::<B, _>(GradientsParams::from_grads(loss.backward(), &model), &model)
            };
            model = optimizer.step(1e-3, model, grads);
            mark::<B, _>(&model);
            stats = rank_stats::<Flex>();
            stats.wire_bytes = stats.wire_bytes.since(&before);
        }
        // Dropping a module while others read it is another test's matter.
        let _ = model.num_params();
        stats
    })
}
