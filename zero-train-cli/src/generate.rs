//! Text generation on Burn 0.21, for `zero generate` and `zero chat`.

use zero_burn::launch::launch;
use zero_burn::module::end_pass;
use zero_burn::stats::all_gather;
use zero_burn::{Zero, ZeroDevice};
use zero_models::generate::{Hooks, Sampling};
use zero_models::safetensors_file::Checkpoint;
use zero_models::{ModelConfig, ModelError, TextFamily, lora, quantize};
use zero_ops::FusedBackend;

use zero_train::error::{Result, TrainError};
use zero_train::language::generate::{Generator, Job, Options, RankBody, TextModel};
#[cfg(any(feature = "cuda", feature = "vulkan"))]
use zero_train::trainer::BackendChoice;

/// Generates text by modules of Burn 0.21.
#[derive(Debug, Clone, Copy)]
pub struct Burn021;

impl Generator for Burn021 {
    fn check(&self, options: &Options) -> Result<()> {
        options.backend.check()
    }

    fn launch(&self, job: &Job<'_>, body: &RankBody<'_>) -> Result<()> {
        match job.config() {
            ModelConfig::Gpt2(config) => launch_family(job, config, body),
            ModelConfig::Llama(config) => launch_family(job, config, body),
            ModelConfig::Bart(config) => launch_family(job, config, body),
            ModelConfig::T5(config) => launch_family(job, config, body),
            other => unreachable!("a {:?} generates no text", other.architecture()),
        }
    }
}

fn launch_family<F: TextFamily>(job: &Job<'_>, family: &F, body: &RankBody<'_>) -> Result<()> {
    let launch = match job.options().backend {
        #[cfg(feature = "cuda")]
        BackendChoice::Cuda => launch_on::<burn_cuda::Cuda, F>,
        #[cfg(feature = "vulkan")]
        BackendChoice::Vulkan => launch_on::<burn_wgpu::Vulkan, F>,
        _ => launch_on::<burn_flex::Flex, F>,
    };
    launch(job, family, body)
}

fn launch_on<I: FusedBackend, F: TextFamily>(job: &Job<'_>, family: &F, body: &RankBody<'_>) -> Result<()> {
    let (zero, options) = (job.zero(), job.launch_options());
    let ranks = launch::<I, _, TrainError>(job.options().ranks, &zero, &options, |device| {
        let model = family.init::<Zero<I>>(&device);
        let model = match job.options().quantize {
            Some(format) => {
                quantize::load(model, job.dir(), format, |_| false, |model, from| F::load(model, from, &device))?
            }
            None => F::load(model, &Checkpoint::open(job.dir())?, &device)?,
        };
        let model = match job.adapter() {
            Some(adapter) => lora::load(model, job.config(), adapter, &device)?,
            None => model,
        };
        body(&OnRank::<I, F> { model, device })
    });
    ranks.map(drop).map_err(Into::into)
}

struct OnRank<I: FusedBackend, F: TextFamily> {
    model: F::Model<Zero<I>>,
    device: ZeroDevice<I::Device>,
}

impl<I: FusedBackend, F: TextFamily> TextModel for OnRank<I, F> {
    fn rank(&self) -> usize {
        self.device.rank()
    }

    fn goes_on(&self, needs: bool) -> bool {
        end_pass::<I>();
        all_gather::<I>(&[needs.into()]).iter().any(|rank| rank[0] != 0.0)
    }

    fn generate(&self, prompts: &[Vec<u32>], how: &Sampling, hooks: Hooks<'_>) -> Result<Vec<Vec<u32>>, ModelError> {
        F::generate(&self.model, prompts, how, &self.device, hooks)
    }
}
