//! Text generation on Burn 0.22: token by token, with a cache of keys and values.
//!
//! [`generate`] is for a model of one's own program, [`TextGenerator`] for the commands `zero-022 generate` and `zero-022 chat`. Sampling and beam
//! search are those of [`zero_models::generate`].

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use zero_core::Collective;
use zero_engine::abort::raise;
use zero_models::generate::{CachedRows, Hooks, Reader, Sampling, alone, generate_by};
use zero_models::{CausalFamily, CausalSizes, ModelConfig, ModelError};
use zero_train::language::generate::{Generator, Job, Options, RankBody, TextModel};
use zero_train::{Result, TrainError};

use super::layers::numbers;
use super::seq2seq::{self, Seq2SeqModel};
use super::{Bart, CausalModel, Gpt2, KvCache, Llama, T5};
use crate::ranks::run_threads;
use crate::shard::{NoAdapters, shard_by};
use crate::trainer::{Adapters, devices, refused, told};
use crate::zero::Zero;

/// Generates the tokens that follow each prompt. `model` is one without autodiff (`model.valid()`), sharded or not, and `device` its device.
///
/// # Errors
///
/// The errors of [`generate_by`].
pub fn generate<M: CausalModel>(
    model: &M,
    config: &M::Config,
    prompts: &[Vec<u32>],
    how: &Sampling,
    device: &Device,
) -> Result<Vec<Vec<u32>>, ModelError> {
    alone(|hooks| generate_with(model, config, prompts, how, device, hooks))
}

/// A model with its cache.
struct Cached<'a, M> {
    model: &'a M,
    sizes: CausalSizes,
    device: &'a Device,
    cache: KvCache,
}

impl<'a, M> Cached<'a, M> {
    fn new(model: &'a M, sizes: CausalSizes, device: &'a Device) -> Self {
        Self { model, sizes, device, cache: KvCache::new(CachedRows::new(Vec::new(), 0, None)) }
    }
}

impl<M: CausalModel> Reader for Cached<'_, M> {
    fn positions(&self) -> usize {
        self.sizes.positions
    }

    fn vocabulary(&self) -> usize {
        self.sizes.vocabulary
    }

    fn begin(&mut self, rows: CachedRows) {
        self.cache = KvCache::new(rows);
    }

    fn read(&mut self, ids: Vec<i32>, b: usize) -> Vec<f32> {
        let shape = [b, ids.len() / b];
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, shape), self.device);
        numbers(self.model.next_logits(ids, &mut self.cache))
    }

    fn take(&mut self, rows: &[usize]) {
        self.cache.take(rows);
    }
}

/// Generates text by modules of Burn 0.22: `zero_train::language::generate::run(&TextGenerator, &options)`.
#[derive(Debug, Clone, Copy)]
pub struct TextGenerator;

impl Generator for TextGenerator {
    fn check(&self, options: &Options) -> Result<()> {
        if options.no_kernel_cache {
            return Err(refused("no_kernel_cache", true));
        }
        devices(options.backend).map(drop)
    }

    fn launch(&self, job: &Job<'_>, body: &RankBody<'_>) -> Result<()> {
        let dir = Some(job.dir());
        match job.config() {
            ModelConfig::Gpt2(config) => {
                launch(job, body, config, |device| Gpt2::build(config, dir, 0, device), generate_with)
            }
            ModelConfig::Llama(config) => {
                launch(job, body, config, |device| Llama::build(config, dir, 0, device), generate_with)
            }
            ModelConfig::Bart(config) => {
                launch(job, body, config, |device| Bart::build(config, dir, 0, device), seq2seq::generate_with)
            }
            ModelConfig::T5(config) => {
                launch(job, body, config, |device| T5::build(config, dir, 0, device), seq2seq::generate_with)
            }
            other => unreachable!("a {:?} generates no text", other.architecture()),
        }
    }
}

/// The function that generates text with a model of configuration `C`.
type Texts<M, C> = fn(&M, &C, &[Vec<u32>], &Sampling, &Device, Hooks<'_>) -> Result<Vec<Vec<u32>>, ModelError>;

/// Generates the tokens that follow each prompt, like [`generate`], with hooks.
///
/// # Errors
///
/// The errors of [`generate_by`].
pub fn generate_with<M: CausalModel>(
    model: &M,
    config: &M::Config,
    prompts: &[Vec<u32>],
    how: &Sampling,
    device: &Device,
    hooks: Hooks<'_>,
) -> Result<Vec<Vec<u32>>, ModelError> {
    generate_by(&mut Cached::new(model, config.sizes(), device), prompts, how, hooks)
}

fn launch<M: Module, C: Sync>(
    job: &Job<'_>,
    body: &RankBody<'_>,
    config: &C,
    build: impl Fn(&Device) -> Result<M, ModelError> + Sync,
    texts: Texts<M, C>,
) -> Result<()> {
    let (zero, devices) = (job.zero(), devices(job.options().backend)?);
    let ranks = run_threads::<(), TrainError>(job.options().ranks, job.launch_options(), |ranks| {
        let device = devices[ranks.comm().local_rank() % devices.len()].clone();
        let model = build(&device)?.no_grad();
        let (adapter, format) = (job.initial_adapter()?, job.options().quantize);
        let sharded = match adapter {
            None => shard_by(model, ranks, &zero, NoAdapters, format),
            Some(adapter) => shard_by(model, ranks, &zero, Adapters(adapter), format),
        };
        let (model, zero) = sharded.map_err(told)?;
        body(&OnRank { model, config, texts, zero, comm: ranks.comm().clone(), device })
    });
    ranks.map(drop).map_err(Into::into)
}

struct OnRank<'a, M, C> {
    model: M,
    config: &'a C,
    texts: Texts<M, C>,
    zero: Zero,
    comm: Arc<dyn Collective>,
    device: Device,
}

impl<M, C> TextModel for OnRank<'_, M, C> {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn goes_on(&self, needs: bool) -> bool {
        self.zero.runtime().gatherer.end_pass();
        let needs = self.comm.all_gather_values(&[f64::from(u8::from(needs))]);
        needs.unwrap_or_else(|error| raise(error)).iter().any(|rank| rank[0] != 0.0)
    }

    fn generate(&self, prompts: &[Vec<u32>], how: &Sampling, hooks: Hooks<'_>) -> Result<Vec<Vec<u32>>, ModelError> {
        (self.texts)(&self.model, self.config, prompts, how, &self.device, hooks)
    }
}
