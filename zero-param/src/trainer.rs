//! The trainer of `zero-train` on Burn 0.22: its options and configuration files, data and schedules, checkpoints, metrics and reports,
//! with a model written for this version of Burn.
//!
//! * In: functions that build a model and compute its loss ([`Burn022`]), a task of `zero-train` with data and sizes, and its options. Out:
//!   the files of `zero train`.
//! * A configuration that asks for a feature missing here is refused with an error that names it, before training starts.
//! * Memory: between micro-batches a rank holds its shards of the accumulated gradients.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use burn::module::{LoraAdapter, Module, ModuleVisitor, Param, Reparameterizer};
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
#[cfg(feature = "cube")]
use burn::tensor::DeviceType;
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde_json::{Map, Value};
use zero_core::Collective;
use zero_core::accounting::{Gauge, StateBytes};
use zero_core::checkpoint::{AsyncSaver, Checkpoint, SaveOptions, save};
use zero_core::config::Float;
use zero_kernels::quantized::Format;
use zero_models::hf_export::{ExportOptions, export};
use zero_models::{ModelConfig, ModuleConfig};
use zero_train::loss_scale::LossScaler;
use zero_train::metrics::RankMetrics;
use zero_train::schedule::ONE_CYCLE_BETA2;
use zero_train::step::{EngineError, Step, Times, Update, nonfinite_warning};
use zero_train::trainer::{BackendChoice, InitialAdapter, Integration, Measured, Profile, RankEngine, Rows, Run, Task};
use zero_train::{Result, TrainError};

use crate::buffers;
use crate::checkpoint::Resumed;
use crate::clock;
use crate::error::Error;
use crate::grads::Grads;
use crate::optim::Optimizer;
use crate::ranks::{Ranks, run_process, run_threads};
use crate::shard::{self, adapter_path, shard, shard_by};
use crate::storage;
use crate::zero::Zero;

type Make<T, M> = dyn Fn(&T, u64, &Device) -> Result<M> + Send + Sync;
type Loss<T, M> = dyn Fn(&T, &M, &Rows, &Device) -> Result<Tensor<1>> + Send + Sync;
type Adapter<T> = dyn Fn(&T, u64) -> Result<Option<InitialAdapter>> + Send + Sync;
type Sample<T, M> = dyn Fn(&T, &M, &Device) -> Result<Option<String>> + Send + Sync;
type Predict<T, M> = dyn Fn(&T, &M, &Rows, &Device) -> Result<Option<Vec<Value>>> + Send + Sync;
type Reference<T, M> = dyn Fn(&T, &M, &Rows, &Device) -> Result<Vec<f64>> + Send + Sync;
type Evaluate<T, M> = dyn Fn(&T, &M, &Rows, &Device) -> Result<Measured> + Send + Sync;

/// Trains tasks `T` with models `M` of Burn 0.22, for `zero_train::trainer::Trainer::on`.
pub struct Burn022<T, M> {
    model: Arc<Make<T, M>>,
    loss: Arc<Loss<T, M>>,
    evaluate: Option<Arc<Evaluate<T, M>>>,
    reference: Option<Arc<Reference<T, M>>>,
    adapter: Option<Arc<Adapter<T>>>,
    sample: Option<Arc<Sample<T, M>>>,
    predict: Option<Arc<Predict<T, M>>>,
}

impl<T, M> Burn022<T, M> {
    /// Creates the integration. Unless the task implements `Task::profile`, the plan of a run counts parameters, but no activations.
    ///
    /// `model` builds a task's model with its initial values, from the run's seed. `loss` returns the mean loss
    /// `[1]` of some of its rows, or the means `[terms]` whose sum it is (`Task::weights`), with autodiff and without.
    pub fn new(
        model: impl Fn(&T, u64, &Device) -> Result<M> + Send + Sync + 'static,
        loss: impl Fn(&T, &M, &Rows, &Device) -> Result<Tensor<1>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            model: Arc::new(model),
            loss: Arc::new(loss),
            evaluate: None,
            reference: None,
            adapter: None,
            sample: None,
            predict: None,
        }
    }

    /// Sets the evaluation of held-out rows. It returns means by name, the first of which is the loss; the default returns the loss alone.
    #[must_use]
    pub fn evaluated_by(
        self,
        evaluate: impl Fn(&T, &M, &Rows, &Device) -> Result<Measured> + Send + Sync + 'static,
    ) -> Self {
        Self { evaluate: Some(Arc::new(evaluate)), ..self }
    }

    /// Sets the measurements of all rows by the model before its first update, for a loss that compares the trained model with that one:
    /// equally many values for each row, which `Rows::reference` returns later.
    #[must_use]
    pub fn reference_by(
        self,
        reference: impl Fn(&T, &M, &Rows, &Device) -> Result<Vec<f64>> + Send + Sync + 'static,
    ) -> Self {
        Self { reference: Some(Arc::new(reference)), ..self }
    }

    /// Sets what `--predictions` writes of held-out rows: an object for each. `None`: the task predicts no single rows.
    #[must_use]
    pub fn predicted_by(
        self,
        predict: impl Fn(&T, &M, &Rows, &Device) -> Result<Option<Vec<Value>>> + Send + Sync + 'static,
    ) -> Self {
        Self { predict: Some(Arc::new(predict)), ..self }
    }

    /// Sets the LoRA adapter of a task, from the run's seed: `CausalTask::initial_adapter` or your own. The model applies adapted layers by
    /// [`dense`](crate::dense) or `param.val()`.
    #[must_use]
    pub fn adapted_by(
        self,
        adapter: impl Fn(&T, u64) -> Result<Option<InitialAdapter>> + Send + Sync + 'static,
    ) -> Self {
        Self { adapter: Some(Arc::new(adapter)), ..self }
    }

    /// Sets the text that a run shows of its trained model, on all ranks alike: `CausalTask::sample_by` or your own.
    #[must_use]
    pub fn sampled_by(
        self,
        sample: impl Fn(&T, &M, &Device) -> Result<Option<String>> + Send + Sync + 'static,
    ) -> Self {
        Self { sample: Some(Arc::new(sample)), ..self }
    }
}

pub(crate) fn refused(key: &'static str, got: impl ToString) -> TrainError {
    let expected = "not supported with Burn 0.22; remove it, or use Burn 0.21".into();
    EngineError::Setting { key, got: got.to_string(), expected }.into()
}

fn no_device(backend: BackendChoice, expected: &str) -> TrainError {
    let got = format!("{backend:?}").to_lowercase();
    TrainError::Option { option: "backend", got, expected: expected.into() }
}

/// Returns this machine's devices on which ranks can compute: every NVIDIA GPU; with Vulkan only wgpu's default device, as wgpu also lists
/// software devices that run on the CPU.
pub(crate) fn devices(backend: BackendChoice) -> Result<Vec<Device>> {
    let devices = match backend {
        BackendChoice::Cpu => vec![Device::flex()],
        #[cfg(feature = "cuda")]
        BackendChoice::Cuda => Device::enumerate(DeviceType::Cuda).into_vec(),
        #[cfg(feature = "wgpu")]
        BackendChoice::Vulkan => match Device::enumerate(DeviceType::Wgpu).into_vec() {
            none if none.is_empty() => none,
            _ => vec![Device::wgpu(DeviceKind::DefaultDevice)],
        },
        #[allow(unreachable_patterns)] // Reached by what the features leave out.
        _ => {
            return Err(no_device(
                backend,
                "this program was built without this backend; build it with the feature of the same name",
            ));
        }
    };
    match devices.is_empty() {
        true => Err(no_device(backend, "found no such device, or no driver for it, on this machine")),
        false => Ok(devices),
    }
}

/// Adds a task's adapter to a model.
pub(crate) struct Adapters(pub(crate) InitialAdapter);

impl Reparameterizer for Adapters {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let InitialAdapter { scale, trained, values } = &mut self.0;
        let device = param.lazy_device();
        let param = match values.remove(path) {
            None => param,
            Some((shape, values)) => {
                let (id, _, mapper) = param.consume();
                Param::from_mapped_value(id, Tensor::from_data(TensorData::new(values, shape), &device), mapper)
            }
        };
        let param = param.set_require_grad(trained.iter().any(|trained| trained == path));
        let adapter = adapter_path(path);
        let mut factor = |name: &str| {
            let (shape, values) = values.remove(&format!("{adapter}.{name}"))?;
            Some(Param::from_data(TensorData::new(values, shape), &device))
        };
        let factors = factor("a").zip(factor("b"));
        (param, factors.map(|(a, b)| LoraAdapter { a, b, scale: *scale }))
    }
}

/// Elements of a module's parameters.
#[derive(Default)]
struct Sizes {
    trained: Vec<usize>,
    frozen: Vec<usize>,
}

impl ModuleVisitor for Sizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let kind = if param.is_require_grad() { &mut self.trained } else { &mut self.frozen };
        kind.push(param.lazy_shape().num_elements());
    }
}

/// Refuses settings that are not supported here.
fn check_steps(run: &Run<'_>) -> Result<()> {
    shard::unsupported(run.zero).map_or(Ok(()), |setting| Err(refused(setting, "requested")))
}

impl<T: Task, M: Module> Integration<T> for Burn022<T, M> {
    fn profile(&self, task: &T, micro_batch: usize) -> Result<Profile> {
        let profile = task.profile(micro_batch)?;
        if profile.num_params() > 0 {
            return Ok(profile);
        }
        let mut sizes = Sizes::default();
        (self.model)(task, 0, &Device::flex().autodiff())?.visit(&mut sizes);
        let Sizes { trained: parameters, frozen } = sizes;
        let number = parameters.iter().chain(&frozen).sum::<usize>();
        // Each parameter is used once per row, at least.
        Ok(Profile { parameters, frozen, flops_per_row: 6.0 * number as f64, ..profile })
    }

    fn has(&self, backend: BackendChoice) -> Result<()> {
        devices(backend).map(drop)
    }

    fn check(&self, run: &Run<'_>) -> Result<Vec<String>> {
        check_steps(run)?;
        if self.adapter.is_none() && run.engine.exclude_frozen_parameters {
            return Err(refused("LoRA", "requested"));
        }
        let (dtype, got) = match run.zero.param_dtype {
            Float::F32 => return Ok(Vec::new()),
            Float::Bf16 => (DType::BF16, "bf16"),
            Float::F16 => (DType::F16, "fp16"),
        };
        if !devices(run.backend)?.iter().all(|device| device.supports_dtype(dtype)) {
            let expected = format!("the device does not support {got}; remove the option");
            return Err(TrainError::Option { option: "dtype", got: got.into(), expected });
        }
        Ok(Vec::new())
    }

    fn launch<R: Send>(
        &self,
        task: &T,
        run: &Run<'_>,
        body: impl Fn(&mut dyn RankEngine) -> Result<R> + Sync,
    ) -> Result<R> {
        let devices = devices(run.backend)?;
        let rank = |ranks: &Ranks| {
            // Ranks of a machine use its devices round-robin.
            let device = devices[ranks.comm().local_rank() % devices.len()].clone().autodiff();
            let model = (self.model)(task, run.zero.seed, &device)?;
            let adapter = self.adapter.as_ref().map_or(Ok(None), |adapter| adapter(task, run.zero.seed))?;
            let (model, zero) = match adapter {
                None => shard(model, ranks, run.zero).map_err(told)?,
                Some(adapter) => {
                    let trained = adapter.trained.clone();
                    let format = run.settings["quantize"].as_str().map(str::parse::<Format>).transpose();
                    let format = format.map_err(|error| TrainError::Run(error.to_string()))?;
                    let (model, zero) = shard_by(model, ranks, run.zero, Adapters(adapter), format).map_err(told)?;
                    zero.set_adapter_dropout(run.settings["lora"]["lora_dropout"].as_f64().unwrap_or(0.0));
                    if let Some(path) = trained.iter().find(|path| !zero.paths().any(|known| known == *path)) {
                        return Err(TrainError::Run(format!(
                            "the model has no layer for the adapter's parameter {path}"
                        )));
                    }
                    (model, zero)
                }
            };
            let optimizer = zero.optimizer_by(run.plan.rule(), |path, shape| run.decay_except.decays(path, shape));
            let (integration, held) = (self, Some((model, optimizer)));
            body(&mut OnRank {
                integration,
                task,
                run,
                comm: ranks.comm().clone(),
                saver: None,
                zero,
                held,
                device,
                sum: None,
                micro_batches: 0,
                losses: Vec::new(),
                loss_scale: run.engine.loss_scale.clone(),
                step: None,
                done: [0; 2],
                warned: false,
                times: Times::default(),
            })
        };
        match run.process {
            Some(process) => run_process(process, run.launch.clone(), rank),
            None => Ok(run_threads(run.plan.world, run.launch.clone(), rank)?.swap_remove(0)),
        }
    }
}

/// Converts an error of this crate to the trainer's, which keeps its kind.
pub(crate) fn told(error: Error) -> TrainError {
    match error {
        Error::Comm(error) => error.into(),
        Error::Different(error) => EngineError::Ranks(error).into(),
        Error::Checkpoint(error) => EngineError::Checkpoint(error).into(),
        Error::Mismatch { path, what } => EngineError::Mismatch { path, what }.into(),
        other => TrainError::Run(other.to_string()),
    }
}

/// A sharded model with its optimizer, and a rank's progress within a step.
struct OnRank<'a, T, M> {
    integration: &'a Burn022<T, M>,
    task: &'a T,
    run: &'a Run<'a>,
    comm: Arc<dyn Collective>,
    /// Writes checkpoints concurrently with training.
    saver: Option<AsyncSaver>,
    zero: Zero,
    /// `None` only while an update replaces them.
    held: Option<(M, Optimizer)>,
    device: Device,
    /// Sum of the gradients of the micro-batches so far.
    sum: Option<Grads>,
    micro_batches: usize,
    /// Losses of the micro-batches of this step, or of the last one.
    losses: Vec<f64>,
    /// The loss scale of fp16.
    loss_scale: Option<LossScaler>,
    /// The last step's result.
    step: Option<Step>,
    /// Number of updates, and of skipped steps.
    done: [usize; 2],
    /// The warning about an update that is not finite has been printed.
    warned: bool,
    times: Times,
}

impl<T: Task, M: Module> OnRank<'_, T, M> {
    fn model(&self) -> &M {
        &self.held.as_ref().expect("it is absent only inside of an update").0
    }

    /// Ends a step whose gradients are complete.
    fn update(&mut self, mut grads: Grads) -> Result<Step> {
        let engine = &self.run.engine;
        let loss_scale = self.loss_scale();
        let ranks = if engine.sums_gradients { self.comm.world() } else { 1 };
        grads.scale((ranks as f64 / loss_scale) as f32);
        let norm = grads.norm().map_err(told)?;
        if !norm.is_finite() && engine.error_if_nonfinite {
            return Err(self.not_finite(&grads)?.into());
        }
        // The same on every rank, as the norm is.
        if let Some(scaler) = &mut self.loss_scale {
            scaler.update(!norm.is_finite()).map_err(EngineError::LossScale)?;
        }
        if !norm.is_finite() && (engine.skip_overflow || self.loss_scale.is_some()) {
            self.done[1] += 1;
            return Ok(Step::Skipped { loss_scale, next_loss_scale: self.loss_scale(), skipped: self.done[1] });
        }
        let clip_factor = engine.clipping.map_or(1.0, |most| grads.clip(most, norm));
        let lr = self.lr();
        let (model, mut optimizer) = self.held.take().expect("it is absent only inside of an update");
        if let Some(momentum) = engine.schedule.momentum(self.done[0]) {
            optimizer.set_momentum(momentum as f32, ONE_CYCLE_BETA2 as f32);
        }
        let model = optimizer.step(lr, model, grads).map_err(told)?;
        self.held = Some((model, optimizer));
        self.done[0] += 1;
        if !norm.is_finite() && !std::mem::replace(&mut self.warned, true) && self.rank() == 0 {
            eprintln!("warning: {}", nonfinite_warning(self.done[0]));
        }
        Ok(Step::Updated(Update { step: self.done[0], lr, grad_norm: norm, clip_factor, loss_scale }))
    }

    /// Returns the error for a non-finite update. It names the first rank with such a loss and the first parameter with such a gradient.
    fn not_finite(&self, grads: &Grads) -> Result<EngineError> {
        let odd = self.losses.iter().any(|loss| !loss.is_finite());
        let parameter = grads.first_odd().map_or(f64::INFINITY, |index| index as f64);
        let all = self.all_gather(&[f64::from(u8::from(odd)), parameter])?;
        let first = all.iter().map(|rank| rank[1]).fold(f64::INFINITY, f64::min);
        Ok(EngineError::NotFinite {
            step: self.done[0] + 1,
            rank: all.iter().position(|rank| rank[0] > 0.0),
            parameter: first.is_finite().then(|| self.zero.parameters[first as usize].path.clone()),
        })
    }
}

impl<T: Task, M: Module> RankEngine for OnRank<'_, T, M> {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn all_gather(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        Ok(self.comm.all_gather_values(values)?)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Ok(self.comm.all_gather_bytes(bytes)?)
    }

    fn micro_batch(&mut self, rows: &Rows, shares: &[f64]) -> Result<()> {
        let batches = self.run.engine.accumulation;
        if self.micro_batches == 0 {
            self.losses.clear();
        }
        let (begin, mut forward) = (Instant::now(), None);
        let (model, factor) = (self.model(), self.loss_scale() / batches as f64);
        let both = || {
            let loss = {
                let _ordered = clock::forward();
                (self.integration.loss)(self.task, model, rows, &self.device)
            };
            storage::release();
            forward = Some(begin.elapsed());
            loss.map(|terms| {
                let loss = sum_of_terms(terms, shares);
                let value = loss.clone().inner();
                drop((loss * factor).backward());
                value
            })
        };
        let reduces_each = self.run.engine.sync_each_batch.unwrap_or(self.run.zero.stage.shards_gradients());
        let (loss, grads) = match reduces_each || self.micro_batches + 1 == batches {
            true => self.zero.pass(both).map(|(loss, grads)| (loss, Some(grads))).map_err(told)?,
            false => (self.zero.pass_no_sync(both), None),
        };
        let forward = forward.unwrap_or_default();
        self.times.forward += forward;
        self.times.backward += begin.elapsed().saturating_sub(forward);
        self.losses.push(loss?.into_scalar::<f64>());
        self.sum = match (self.sum.take(), grads) {
            (Some(mut sum), Some(grads)) => {
                sum.add(grads);
                Some(sum)
            }
            (sum, grads) => sum.or(grads),
        };
        self.micro_batches += 1;
        if self.micro_batches < batches {
            return Ok(());
        }
        let sum = self.sum.take().expect("the last micro-batch was reduced");
        self.micro_batches = 0;
        let begin = Instant::now();
        let step = self.update(sum);
        self.times.step += begin.elapsed();
        self.step = Some(step?);
        Ok(())
    }

    fn result(&mut self) -> Result<(Step, Vec<f64>)> {
        let step = self.step.take().expect("a step was made before its result is asked for");
        Ok((step, self.losses.clone()))
    }

    fn lr(&self) -> f64 {
        self.run.engine.schedule.lr(self.done[0])
    }

    fn loss_scale(&self) -> f64 {
        self.loss_scale.as_ref().map_or(1.0, LossScaler::scale)
    }

    fn take_times(&mut self) -> Times {
        std::mem::take(&mut self.times)
    }

    fn swap_averages(&mut self) -> Result<()> {
        let (model, mut optimizer) = self.held.take().expect("it is absent only inside of an update");
        let model = optimizer.swap_averages(model).map_err(told)?;
        self.held = Some((model, optimizer));
        Ok(())
    }

    fn evaluate(&self, rows: &Rows) -> Result<Measured> {
        let (model, device) = (self.model().valid(), self.device.clone().without_autodiff());
        match &self.integration.evaluate {
            Some(evaluate) => evaluate(self.task, &model, rows, &device),
            None => {
                let terms = (self.integration.loss)(self.task, &model, rows, &device)?.into_data();
                Ok(terms.iter::<f64>().map(|term| ("loss", term)).collect())
            }
        }
    }

    fn reference(&self, rows: &Rows) -> Result<Option<Vec<f64>>> {
        let (model, device) = (self.model().valid(), self.device.clone().without_autodiff());
        let reference = self.integration.reference.as_ref();
        reference.map(|reference| reference(self.task, &model, rows, &device)).transpose()
    }

    fn predict(&self, rows: &Rows) -> Result<Option<Vec<Value>>> {
        let (model, device) = (self.model().valid(), self.device.clone().without_autodiff());
        let predict = self.integration.predict.as_ref();
        predict.map_or(Ok(None), |predict| predict(self.task, &model, rows, &device))
    }

    fn sample(&self) -> Result<Option<String>> {
        let (model, device) = (self.model().valid(), self.device.clone().without_autodiff());
        self.integration.sample.as_ref().map_or(Ok(None), |sample| sample(self.task, &model, &device))
    }

    fn load(&mut self, checkpoint: &Checkpoint) -> Result<Map<String, Value>> {
        let (model, optimizer) = self.held.take().expect("it is absent only inside of an update");
        let Resumed { model, optimizer, steps, skipped, loss_scaler, extra } =
            self.zero.load(model, optimizer, checkpoint).map_err(told)?;
        self.held = Some((model, optimizer));
        self.done = [steps, skipped];
        let saved = loss_scaler.map(serde_json::from_value::<LossScaler>).transpose();
        let saved = saved.map_err(|error| Error::Mismatch {
            path: checkpoint.path().to_path_buf(),
            what: format!("its loss scale cannot be read: {error}"),
        });
        if let (Some(own), Some(saved)) = (&mut self.loss_scale, saved.map_err(told)?) {
            own.resume(&saved);
        }
        Ok(extra)
    }

    fn save(&mut self, dir: &Path, step: u64, extra: Map<String, Value>, options: &SaveOptions) -> Result<Option<u64>> {
        // The previous save holds a copy of the data that it writes.
        if let Some(saver) = &mut self.saver {
            saver.wait().map_err(EngineError::Checkpoint)?;
        }
        let (model, optimizer) = self.held.as_ref().expect("it is absent only inside of an update");
        let only_trained = self.run.engine.exclude_frozen_parameters;
        let loss_scale = self.loss_scale.as_ref().map(|scale| serde_json::to_value(scale).expect("plain numbers"));
        let (pieces, state) =
            self.zero.pieces((model, optimizer), (self.done, loss_scale), extra, only_trained).map_err(told)?;
        if !self.run.async_save {
            let saved = save(&*self.zero.runtime().owners(), dir, step, &pieces, &state, options);
            return Ok(Some(saved.map_err(EngineError::Checkpoint)?.bytes));
        }
        let saver = match &mut self.saver {
            Some(saver) => saver,
            none => none.insert(AsyncSaver::new(&*self.zero.runtime().owners()).map_err(EngineError::Checkpoint)?),
        };
        saver.save(dir, step, pieces, state, options.clone()).map_err(EngineError::Checkpoint)?;
        Ok(None)
    }

    fn wait_for_save(&mut self) -> Result<Option<PathBuf>> {
        let Some(saver) = &mut self.saver else { return Ok(None) };
        Ok(saver.wait().map_err(EngineError::Checkpoint)?.map(|saved| saved.path))
    }

    fn export(&self, config: Option<&ModelConfig>, out: &Path, options: &ExportOptions) -> Result<()> {
        // Gathers are one-sided: rank 0 reads the other ranks' shards, and they wait until it is done.
        let written = (self.rank() == 0).then(|| {
            let layer_state = buffers::read(self.model(), &self.zero.layer_state);
            let others = self.zero.layer_state.iter().map(|each| (each.path.clone(), each.shape.to_vec()));
            let shapes = self.zero.parameters.iter().map(|each| (each.path.clone(), each.shape.to_vec())).chain(others);
            let mut last: Option<(usize, Vec<f32>)> = None;
            let config = config.cloned().unwrap_or_else(|| ModuleConfig::new(shapes).into());
            export(&config, out, options, |parameter, range| {
                if let Some(state) = self.zero.layer_state.iter().find(|each| each.path == parameter.path) {
                    return Ok(layer_state[&state.id][range].to_vec());
                }
                let missing = || format!("the model has no parameter {}", parameter.path);
                let found = self.zero.parameters.iter().find(|each| each.path == parameter.path).ok_or_else(missing)?;
                // Ranges of one parameter come one after the other.
                if last.as_ref().is_none_or(|(index, _)| *index != found.index) {
                    last = Some((found.index, found.exact()));
                }
                let (_, values) = last.as_ref().expect("it has been set");
                Ok(values[range].to_vec())
            })
        });
        let failed = written.as_ref().is_some_and(Result::is_err);
        let all = self.all_gather(&[f64::from(u8::from(failed))])?;
        match written {
            Some(written) => Ok(written.map(drop).map_err(EngineError::Export)?),
            None if all[0][0] > 0.0 => Err(EngineError::ExportFailed { out: out.to_path_buf() }.into()),
            None => Ok(()),
        }
    }

    fn reset_peaks(&self) {
        let gauges = &self.zero.runtime().rank.gauges;
        [&gauges.parameters, &gauges.gathered, &gauges.gradients, &gauges.in_flight]
            .into_iter()
            .for_each(Gauge::reset_peak);
    }

    fn metrics(&self) -> RankMetrics {
        let gauges = &self.zero.runtime().rank.gauges;
        RankMetrics {
            model_state_bytes: StateBytes {
                parameters: gauges.parameters.peak(),
                gradients: gauges.gradients.peak(),
                optimizer: gauges.optimizer.live(),
            },
            gradients_in_flight_bytes_peak: gauges.in_flight.peak(),
            gathered_bytes_peak: gauges.gathered.peak(),
            wire_bytes: self.comm.wire().read(),
            ..RankMetrics::default()
        }
    }
}

/// Returns the sum `[1]` of a loss's terms, each multiplied by its share.
fn sum_of_terms(terms: Tensor<1>, shares: &[f64]) -> Tensor<1> {
    let [number] = terms.dims();
    let shares: Vec<f64> = shares.iter().copied().chain(std::iter::repeat(1.0)).take(number).collect();
    let terms = match shares.iter().all(|&share| share == 1.0) {
        true => terms,
        false => {
            let shares = Tensor::from_data(TensorData::new(shares, [number]), &terms.device());
            terms * shares
        }
    };
    if number == 1 { terms } else { terms.sum() }
}
