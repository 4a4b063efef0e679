//! The integration of Burn 0.21: `Zero<B>`, and the engine on it.

use std::path::{Path, PathBuf};

use burn::backend::Autodiff;
use burn::tensor::backend::{Backend, BackendTypes};
use burn::tensor::{StreamId, Tensor, TensorData};
use serde_json::{Map, Value};
use zero_burn::launch;
use zero_burn::module::ZeroAutodiff;
use zero_burn::optim::Fused;
use zero_burn::stats::{all_gather, all_gather_bytes, rank_stats, reset_peaks};
use zero_burn::{Zero, ZeroDevice};
use zero_core::checkpoint::{Checkpoint, SaveOptions};
#[cfg(feature = "cuda")]
use zero_core::collective::launcher::started;
use zero_models::ModelConfig;
use zero_models::hf_export::ExportOptions;
use zero_ops::FusedBackend;

use super::integration::{Integration, MemoryProbe, RankEngine, Run};
use super::rows::Rows;
use super::task::{AnyTask, Measured, Task, TaskOn};
use super::{BackendChoice, DecayExcept};
use crate::engine::{Parts, Step, Times, ZeroEngine};
use crate::error::{Result, TrainError};
use crate::metrics::RankMetrics;

/// The [`Integration`] for Burn 0.21, for whose backends tasks write their models.
#[derive(Debug, Clone, Copy, Default)]
pub struct Burn021;

type Trained<I> = Autodiff<Zero<I>>;
type Engine<I, T> = ZeroEngine<Trained<I>, <T as Task>::Model<Trained<I>>, Fused<Trained<I>>>;
type Device<I> = ZeroDevice<<I as BackendTypes>::Device>;

impl<T: AnyTask> Integration<T> for Burn021 {
    fn has(&self, backend: BackendChoice) -> Result<()> {
        backend.check()
    }

    fn check(&self, _: &Run<'_>) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn launch<R: Send>(
        &self,
        task: &T,
        run: &Run<'_>,
        body: impl Fn(&mut dyn RankEngine) -> Result<R> + Sync,
    ) -> Result<R> {
        #[cfg(any(feature = "cuda", feature = "vulkan"))]
        zero_ops::devices::watch();
        let trained = match run.backend {
            #[cfg(feature = "cuda")]
            BackendChoice::Cuda => run_ranks::<burn_cuda::Cuda, T, R>(task, run, body),
            #[cfg(feature = "vulkan")]
            BackendChoice::Vulkan => run_ranks::<burn_wgpu::Vulkan, T, R>(task, run, body),
            _ => run_ranks::<burn_flex::Flex, T, R>(task, run, body),
        };
        // The failure of a device is the cause of what a rank reports.
        device_failure().map_or(trained, Err)
    }
}

fn run_ranks<I: FusedBackend, T: TaskOn<I>, R: Send>(
    task: &T,
    run: &Run<'_>,
    body: impl Fn(&mut dyn RankEngine) -> Result<R> + Sync,
) -> Result<R> {
    let rank = |device: Device<I>| {
        let model = task.model::<Trained<I>>(&device)?;
        let engine = ZeroEngine::initialize(model, optimizer(run), run.engine.clone(), &device)?;
        body(&mut OnRank::<I, T> { task, engine, device, run, step: None })
    };
    if let Some(process) = run.process {
        return launch::launch_on::<I, _, TrainError>(process, run.zero, run.launch, rank);
    }
    let mut results = launch::launch::<I, _, TrainError>(run.plan.world, run.zero, run.launch, rank)?;
    Ok(results.swap_remove(0))
}

/// Returns a failure of a device that occurred while the run continued.
fn device_failure() -> Option<TrainError> {
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    if let Some(told) = zero_ops::devices::failure() {
        let is_memory = told.contains(zero_ops::devices::OUT_OF_MEMORY);
        let error = if is_memory { TrainError::Memory } else { TrainError::Run };
        return Some(error(told.to_string()));
    }
    None
}

/// An engine with its task, device and run.
struct OnRank<'a, I: FusedBackend, T: TaskOn<I>> {
    task: &'a T,
    engine: Engine<I, T>,
    device: Device<I>,
    run: &'a Run<'a>,
    /// The last step's result, unless a device still computes it.
    step: Option<Step>,
}

impl<I: FusedBackend, T: TaskOn<I>> RankEngine for OnRank<'_, I, T> {
    fn rank(&self) -> usize {
        self.device.rank()
    }

    fn all_gather(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        Ok(all_gather::<I>(values))
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Ok(all_gather_bytes::<I>(bytes))
    }

    fn micro_batch(&mut self, rows: &Rows, shares: &[f64]) -> Result<()> {
        let terms = self.engine.forward(|model| self.task.loss(model, rows, &self.device))?;
        self.engine.backward(sum_of_terms(terms, shares));
        self.step = self.engine.step_async()?;
        Ok(())
    }

    fn is_on_device(&self) -> bool {
        self.engine.has_pending_update()
    }

    fn result(&mut self) -> Result<(Step, Vec<f64>)> {
        // Once a device has been given all of the step: a wait between its passes would leave it without work.
        let step = match self.step.take() {
            Some(step) => step,
            None => self.engine.wait_for_update()?,
        };
        let losses = self.engine.losses().to_vec();
        device_failure().map_or(Ok((step, losses)), Err)
    }

    fn lr(&self) -> f64 {
        self.engine.lr()
    }

    fn loss_scale(&self) -> f64 {
        self.engine.loss_scale()
    }

    fn take_times(&mut self) -> Times {
        self.engine.take_times()
    }

    fn swap_averages(&mut self) -> Result<()> {
        Ok(self.engine.swap_averages()?)
    }

    fn evaluate(&self, rows: &Rows) -> Result<Measured> {
        self.engine.evaluate(|model| self.task.evaluate(model, rows, &self.device))
    }

    fn reference(&self, rows: &Rows) -> Result<Option<Vec<f64>>> {
        self.engine.evaluate(|model| self.task.reference(model, rows, &self.device))
    }

    fn predict(&self, rows: &Rows) -> Result<Option<Vec<Value>>> {
        self.engine.evaluate(|model| self.task.predict(model, rows, &self.device))
    }

    fn sample(&self) -> Result<Option<String>> {
        self.engine.evaluate(|model| self.task.sample(model, &self.device))
    }

    fn load(&mut self, checkpoint: &Checkpoint) -> Result<Map<String, Value>> {
        Ok(self.engine.load(checkpoint, Parts::All)?)
    }

    fn save(&mut self, dir: &Path, step: u64, extra: Map<String, Value>, options: &SaveOptions) -> Result<Option<u64>> {
        Ok(match self.run.async_save {
            true => self.engine.save_async(dir, step, extra, options).map(|_| None)?,
            false => Some(self.engine.save(dir, step, extra, options)?.bytes),
        })
    }

    fn wait_for_save(&mut self) -> Result<Option<PathBuf>> {
        Ok(self.engine.wait_for_save()?.map(|saved| saved.path))
    }

    fn export(&self, config: Option<&ModelConfig>, out: &Path, options: &ExportOptions) -> Result<()> {
        let config = config.cloned().unwrap_or_else(|| self.engine.module_config().into());
        self.engine.export(&config, out, options)?;
        Ok(())
    }

    fn reset_peaks(&self) {
        reset_peaks::<I>();
    }

    fn metrics(&self) -> RankMetrics {
        let stats = rank_stats::<I>();
        RankMetrics {
            model_state_bytes: stats.model_state_bytes,
            gradients_in_flight_bytes_peak: stats.gradients_in_flight_peak,
            gathered_bytes_peak: stats.gathered_bytes_peak,
            wire_bytes: stats.wire_bytes,
            ..RankMetrics::default()
        }
    }

    fn memory_probe(&self) -> MemoryProbe {
        // What this thread's stream holds.
        let (device, stream) = (self.device.clone(), StreamId::current());
        Box::new(move || stream.executes(|| device_memory::<I>(&device)))
    }

    fn peak_flops(&self) -> Option<f64> {
        peak_flops::<I>(self.run, &self.device)
    }
}

/// Returns the sum `[1]` of a loss's terms, each multiplied by its share.
fn sum_of_terms<B: Backend>(terms: Tensor<B, 1>, shares: &[f64]) -> Tensor<B, 1> {
    let [number] = terms.dims();
    let shares: Vec<f64> = shares.iter().copied().chain(std::iter::repeat(1.0)).take(number).collect();
    // Where nothing is to be done, nothing is launched.
    let terms = match shares.iter().all(|&share| share == 1.0) {
        true => terms,
        false => {
            let shares = Tensor::from_data(TensorData::new(shares, [number]), &terms.device());
            terms * shares
        }
    };
    if number == 1 { terms } else { terms.sum() }
}

/// Creates an optimizer with the plan's rule, without decay for the parameters that are excluded from it.
fn optimizer<A: ZeroAutodiff>(run: &Run<'_>) -> Fused<A> {
    let (rule, except) = (run.plan.rule(), run.decay_except);
    let fused = Fused::new(rule);
    match rule.weight_decay() == 0.0 || except == DecayExcept::Nothing {
        true => fused,
        false => fused.with_group(rule.with_weight_decay(0.0), 1.0, move |info| !except.decays(info.path, info.shape)),
    }
}

/// Returns the bytes in use and the bytes reserved on a device that has its own memory.
fn device_memory<I: FusedBackend>(device: &Device<I>) -> Option<(u64, u64)> {
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    return zero_ops::devices::memory::<I>(device.inner()).map(|memory| (memory.in_use, memory.reserved));
    #[cfg(not(any(feature = "cuda", feature = "vulkan")))]
    {
        let _ = device;
        None
    }
}

/// Returns the peak floating-point operations per second of the run's devices in the type that it computes in, if known.
fn peak_flops<I: FusedBackend>(run: &Run<'_>, device: &Device<I>) -> Option<f64> {
    #[cfg(feature = "cuda")]
    {
        let name = zero_ops::devices::cuda_name::<I>(device.inner())?;
        let half = run.zero.param_dtype != zero_core::config::Float::F32;
        // Threads share the GPUs that the process sees, processes have one each.
        let gpus = match started() {
            Some(_) => run.plan.world,
            None => run.plan.world.min(zero_ops::devices::cuda().ok()?.len()),
        };
        crate::monitor::peak_flops(&name, half).map(|peak| peak * gpus as f64)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (run, device);
        None
    }
}
