//! The validated plan: nothing after it sees a raw option.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use zero_core::accounting::StateBytes;
use zero_core::checkpoint::{Check, Manifest};
use zero_core::collective::launch::LaunchOptions;
use zero_core::collective::launcher::{World, launched_alone};
use zero_core::config::{Gathers, Tier, ZeroConfig};
use zero_core::{Mesh, Stage};
use zero_models::ModelConfig;

use super::backend::{BackendChoice, name as option_name};
use super::checkpoints::Checkpoints;
use super::facts::{Data, Model};
use super::fit::{Budget, Candidate, MemoryNeed, settled_state};
use super::integration::Run;
use super::predict::SpeedOfLight;
use super::profile::Profile;
use super::ranks::{Ranks, launch_options};
use super::zero_plan::zero_plan;
use super::{DecayExcept, GathersChoice, OffloadChoice, Options, Task};
use crate::config::{Config, Precision, Warning, ZeroPlan};
use crate::error::{Result, TrainError, wrong, wrong_data};
use crate::launched::{FIRST_RANKS, LAUNCHED, RESTART_RANKS, RESTARTS};
use crate::memory::format_bytes;
use crate::step::{EngineConfig, EngineError};

/// The model, the data and the settings of a training run.
// What all ranks compare before they train, a field for each line of it.
pub(super) struct Plan {
    pub backend: BackendChoice,
    pub model: Model,
    pub data: Data,
    /// Sharding, batch, precision, optimizer, schedule, reports.
    pub plan: ZeroPlan,
    /// The plan's sharding settings.
    pub zero: ZeroConfig,
    pub decay_except: DecayExcept,
    pub steps: usize,
    pub eval_every: Option<usize>,
    /// True if evaluation, predictions and the export use the moving averages of the weights.
    pub eval_ema: bool,
    pub launch: LaunchOptions,
    /// Folder for metrics.
    pub out: Option<PathBuf>,
    pub checkpoints: Checkpoints,
    /// The folder for the 16-bit model that the configuration asks for.
    pub save_16bit: Option<PathBuf>,
    /// Number of held-out rows whose predictions are shown at every evaluation.
    pub eval_samples: usize,
    /// The file for predictions.
    pub predictions: Option<PathBuf>,
    /// True if a progress bar is shown.
    pub progress: bool,
    /// The memory that the run needs.
    pub need: MemoryNeed,
    /// The memory that it may use, formatted.
    pub memory: Option<String>,
    /// The least duration of a step; `None` for small models, and if several machines or devices compute.
    pub light: Option<SpeedOfLight>,
    /// Messages about the choice of the model, the recipe and the tier.
    pub notice: Option<String>,
}

impl Plan {
    /// Returns the most tokens (or rows, if they have none) of a step.
    pub(super) fn tokens_per_step(&self) -> usize {
        self.plan.batch.global * self.data.units()
    }

    /// Checks the options and everything that they name, before anything is written. `profile` returns that of a micro-batch.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for the first problem.
    pub(super) fn new<T: Task>(
        options: &Options,
        (task, profile): (&T, &dyn Fn(usize) -> Result<Profile>),
        budget: &Budget,
        here: &Ranks<'_>,
    ) -> Result<Self> {
        // Of each micro-batch once: every tier is asked for.
        let known: RefCell<HashMap<usize, Profile>> = RefCell::default();
        let taken = |micro_batch: usize| -> Result<Profile> {
            if let Some(profile) = known.borrow().get(&micro_batch) {
                return Ok(profile.clone());
            }
            let counted = profile(micro_batch)?;
            known.borrow_mut().insert(micro_batch, counted.clone());
            Ok(counted)
        };
        let candidate = Candidate { hidden_size: task.hidden_size(), profile: &taken, budget };
        let recipe = task.recipe().filter(|_| options.config.is_none());
        let completed = recipe.and_then(|recipe| Some((recipe.complete(&options.hyper, options.steps)?, recipe)));
        let recipe = completed.as_ref().map(|(_, recipe)| recipe.told(&task.name()));
        let options = &match completed {
            Some((hyper, _)) => Options { hyper, ..options.clone() },
            None => options.clone(),
        };
        // What does not fit is told below.
        let (options, chosen) = candidate.fitting(options, task.rows().max(1))?;
        let notice = [task.notice(), recipe, chosen].into_iter().flatten().reduce(|a, b| format!("{a}\n{b}"));
        let options = &options;
        let mut plan = zero_plan(options, task.hidden_size())?;
        check_restarts(&plan)?;
        plan.report.steps_per_print = options.log_every.or(plan.report.steps_per_print);
        plan.report.memory_breakdown |= options.memory_breakdown;
        let (stage, ranks) = (plan.zero.stage, plan.world);
        let mut zero = plan.zero_config(options.seed);
        zero.gathers = gathers(options, here)?;
        let (offload, disk) = (&zero.offload, &zero.offload.disk.path);
        if offload.uses(Tier::Disk) && !disk.is_dir() {
            let problem = "is not a folder: create it on the disk to use, or correct --swap or nvme_path";
            return Err(wrong_data(disk, problem));
        }
        zero.validate(ranks).map_err(|error| wrong("ranks", ranks, error.to_string()))?;
        let data = Data::new(task, options)?;
        let profile = taken(plan.batch.micro)?;
        let need = MemoryNeed::new(&profile, &plan, options.backend);
        let need = need.with_ranks_here(budget.ranks_here.unwrap_or(ranks));
        let name = task.name();
        if !budget.holds(&need) {
            if let Some(short) = candidate.disk_needed(options)? {
                return Err(TrainError::Memory(format!("model {name} does not fit: {short}")));
            }
            return Err(TrainError::Memory(format!(
                "model {name} does not fit: {}{}; use a smaller model, a smaller --batch, shorter rows, fewer \
                 --ranks{}{}",
                need.arithmetic(),
                budget.but(&need),
                if stage == Stage::Parameters { "" } else { ", or --stage 3" },
                if options.config.is_none()
                    && options.offload != Some(OffloadChoice::All)
                    && !options.int8_optimizer_states
                {
                    ", or --offload all (with --offload-to disk and --swap on a fast disk)"
                } else {
                    ""
                }
            )));
        }
        // Only if this machine runs all ranks.
        let is_probed = here.is_main() && options.backend == BackendChoice::Cpu && need.ranks == ranks as u64;
        let light = if is_probed { SpeedOfLight::new(&profile, &plan, &need) } else { None };
        Ok(Self {
            light,
            memory: budget.told(),
            backend: options.backend,
            save_16bit: save_16bit(options, &mut plan),
            eval_samples: eval_samples(options, &data)?,
            predictions: predictions(options, &data)?,
            model: Model { name, profile, config: task.model_config(), settings: task.settings(), files: task.files() },
            data,
            zero,
            decay_except: options.decay_except,
            steps: options.steps,
            eval_every: options.eval_every,
            eval_ema: options.eval_ema,
            launch: launch_options(options)?,
            out: options.out.clone(),
            checkpoints: Checkpoints::new(options, here)?,
            plan,
            progress: !options.json,
            need,
            notice,
        })
    }

    /// Returns the settings of a run for a [`Integration`].
    pub(super) fn run<'a>(&'a self, ranks: &'a Ranks<'_>) -> Result<Run<'a>> {
        // The base is where its weights are.
        let exclude_frozen_parameters = matches!(self.model.config, Some(ModelConfig::Adapted(_)));
        Ok(Run {
            plan: &self.plan,
            zero: &self.zero,
            engine: EngineConfig { exclude_frozen_parameters, ..self.plan.engine_config()? },
            decay_except: self.decay_except,
            settings: &self.model.settings,
            backend: self.backend,
            launch: &self.launch,
            async_save: self.checkpoints.beside,
            process: ranks.process(),
        })
    }

    /// Returns what must be the same on every rank, one line each. Paths are left out, because they may differ between machines.
    pub(super) fn fingerprint(&self) -> Vec<String> {
        let mut zero = self.zero.clone();
        zero.offload.disk = Default::default();
        let (every, last, best) = (self.checkpoints.every, self.checkpoints.keep_last, self.checkpoints.keep_best);
        let saves = self.checkpoints.dir.is_some();
        let (model, data) = (&self.model, &self.data);
        let ([train, eval], shuffle) = (data.checksums, data.order.seed);
        vec![
            format!("zero {}", env!("CARGO_PKG_VERSION")),
            format!("the backend {}", option_name(self.backend)),
            format!("the model {:?} {} {:?}", model.config, model.settings, model.profile.parameters),
            format!("{:?} ranks at stage {}", self.plan.world, self.plan.zero.stage),
            format!("the batch {:?}", self.plan.batch),
            format!("the precision {:?}", self.plan.precision),
            format!("the optimizer {:?}, weight decay except {:?}", self.plan.optimizer, self.decay_except),
            format!("the schedule {:?}", self.plan.schedule),
            format!("clipping {:?}", self.plan.gradient_clipping),
            format!("the settings {zero:?}"),
            format!("{} steps, evaluation every {:?}, of the averages: {}", self.steps, self.eval_every, self.eval_ema),
            format!("{} rows of {:?} tokens, {} held out", data.order.rows, data.tokens_per_row, data.held_out),
            format!("{} rows without a label", data.unlabelled),
            format!("data with checksum {train:08x?}, held out {eval:08x?}, shuffled with seed {shuffle:?}"),
            format!("checkpoints: {saves}, every {every:?}, keep last {last:?}, keep best {best}"),
            format!("{} completed steps", self.checkpoints.resumed_steps()),
            format!("a deadline of {:?}", self.launch.deadline),
            format!("a 16-bit model at the end: {}", self.save_16bit.is_some()),
        ]
    }

    /// Returns the bytes of one rank's model state after an update, by the ZeRO formula.
    pub(super) fn state_formula(&self) -> StateBytes {
        settled_state(&self.model.profile, &self.plan, self.backend)
    }

    /// Returns the bytes that one rank receives in one step by the ZeRO formula, a sum over hops. With `A` micro-batches,
    /// gradients are reduced once at stages 0 and 1 and `A` times at 2 and 3. At stage 3 parameters are gathered twice per
    /// micro-batch, those below the persistence threshold once per step. Frozen parameters are gathered and never reduced.
    /// If groups hold all model state each, gathers stay within a group, and a rank's reduced gradients are summed across
    /// groups.
    pub fn wire_bytes(&self) -> u64 {
        let (profile, zero, plan) = (&self.model.profile, &self.zero, &self.plan);
        let (world, shards, micro_batches) = (plan.world as u64, plan.shards() as u64, plan.batch.accumulation as u64);
        let (stage, second) = (plan.zero.stage, plan.zero.secondary_shard_size.map(|size| size as u64));
        let mut received = 0;
        // So often gathers or scatters bytes, of which each of so many ranks has a part.
        let mut hop = |bytes: u64, ranks: u64, often: u64| received += often * (bytes * (ranks - 1) / ranks);

        // Gradients are added within groups, then across; the last of both hops is what is quantised.
        let psi = profile.num_trained();
        let sent = (psi * zero.communication_dtype.unwrap_or(zero.param_dtype).size()) as u64;
        let last = zero.quantized_gradients.map_or(sent, |how| how.bytes(psi) as u64);
        let on_the_way = second.filter(|_| zero.quantized_gradients.is_some());
        let within = on_the_way.unwrap_or(shards);
        let across = world / within;
        let reductions = if stage.shards_gradients() { micro_batches } else { 1 };
        let first = if across == 1 { last } else { sent };
        hop(first, within, reductions);
        if stage == Stage::DataParallel {
            // Back to all ranks: quantised gradients as they were added up, in fp32.
            hop(if first == sent { sent } else { 4 * psi as u64 }, within, 1);
        }
        let kept = last / if stage.shards_optimizer() { within } else { 1 };
        // Back to all groups, which hold the same, but to the one owner that a second cut leaves.
        hop(kept, across, reductions * if on_the_way.is_some() { 1 } else { 2 });

        // Parameters: what is gathered for each use is what may be quantised.
        let exactly = |numel: usize| numel * zero.param_dtype.size();
        if !stage.shards_parameters() {
            hop(exactly(psi) as u64, if stage.shards_optimizer() { shards } else { 1 }, 1);
            return received;
        }
        let is_large = |numel: usize| numel > zero.param_persistence_threshold;
        let (large, small): (Vec<usize>, Vec<usize>) = profile.parameters.iter().partition(|&&numel| is_large(numel));
        let [trained, frozen] =
            zero.weights().map(|how| move |numel| how.map_or(exactly(numel), |how| how.bytes(numel)));
        let used =
            large.iter().map(|&numel| trained(numel) as u64).sum::<u64>() + profile.frozen_bytes(frozen, is_large);
        hop(exactly(small.iter().sum()) as u64, shards, 1);
        let Some(size) = second else {
            hop(used, shards, 2 * micro_batches);
            return received;
        };
        // From within groups, as they are; a version crosses them once, but for what a rank has of it.
        hop(exactly(large.iter().sum()) as u64 + profile.frozen_bytes(exactly, is_large), size, 2 * micro_batches);
        let there = (0..world).filter(|rank| rank % size == rank * size / world).count() as u64;
        received + used / size - used * there / (world * world)
    }
}

/// Returns the number of held-out rows whose predictions are shown.
fn eval_samples(options: &Options, data: &Data) -> Result<usize> {
    match options.eval_samples > 0 && data.held_out == 0 {
        true => Err(wrong("eval-samples", options.eval_samples, "expected held-out rows: add --eval ROWS")),
        false => Ok(options.eval_samples.min(data.held_out)),
    }
}

/// Returns the file for predictions. It is written at the end; its folder is checked now.
fn predictions(options: &Options, data: &Data) -> Result<Option<PathBuf>> {
    let Some(path) = &options.predictions else { return Ok(None) };
    if data.held_out + data.unlabelled == 0 {
        return Err(wrong("predictions", path.display(), "expected held-out rows: add --eval ROWS"));
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match dir.is_dir() && !path.is_dir() {
        true => Ok(Some(path.clone())),
        false => Err(wrong("predictions", path.display(), "expected a file in an existing folder")),
    }
}

/// Returns the method by which parameters are gathered.
fn gathers(options: &Options, ranks: &Ranks<'_>) -> Result<Gathers> {
    if options.gathers.is_some() && ranks.world().is_none() {
        let expected = "expected ranks that are processes (zero launch, torchrun, mpirun), because threads read each \
                        other's shards in memory; omit the option";
        return Err(wrong("gathers", "with ranks that are threads", expected));
    }
    Ok(options.gathers.map_or(Gathers::Auto, |choice| match choice {
        GathersChoice::Collective => Gathers::Collective,
        GathersChoice::OneSided => Gathers::OneSided,
    }))
}

/// Applies the launcher's settings to the options: the number of ranks is the number of its processes, and after a restart
/// training resumes from the last checkpoint that the job has saved.
pub(super) fn as_launched(options: &Options, ranks: &Ranks<'_>) -> Result<Options> {
    let mut options = options.clone();
    if let Some(World { world, variable, .. }) = ranks.world() {
        if let Some(asked) = options.ranks.filter(|asked| asked != world) {
            let expected = format!("expected {world}, the number of started processes ({variable}); omit --ranks");
            return Err(wrong("ranks", asked, expected));
        }
        options.ranks = Some(*world);
    } else if launched_alone() && !says_processes(&options)? {
        // `mpirun -n 1`, or what is left after restarts.
        options.ranks = options.ranks.or(Some(1));
    }
    // Each of several machines counts its own attempts, and their ranks look for a checkpoint together.
    let restarted = number(RESTARTS).is_some_and(|restarts| restarts > 0);
    if restarted && let Some(world) = options.ranks {
        options.hyper.batch_ranks = number(FIRST_RANKS).map(|first| first as usize).filter(|&first| first != world);
        // As many ranks as hold model state between them now, or more: so memory is enough still.
        let even = |size: usize| (size.min(world)..=world).find(|&size| Mesh::new(world, size).is_some());
        for (name, size) in
            [("shard-size", &mut options.shard_size), ("secondary-shard-size", &mut options.secondary_shard_size)]
        {
            let (given, taken) = (*size, size.and_then(even));
            if given == taken {
                continue;
            }
            *size = taken.filter(|&size| size < world);
            if ranks.is_main() {
                let (given, taken) = (given.unwrap_or(0), size.map_or("all of them".into(), |size| size.to_string()));
                eprintln!("--{name} {given} does not divide the {world} ranks of this restart: using {taken}");
            }
        }
    }
    if let Some(since) = ranks.least(restarted.then(|| number(LAUNCHED).unwrap_or(0)))?
        && let Some(save) = &options.save
        && options.resume.as_deref() != Some(Path::new("auto"))
    {
        // What an earlier attempt has saved. What lay there before is not this job's: without a checkpoint of its own it
        // begins as it was told to.
        let latest = ranks.find_latest(save, Check::Sizes)?.checkpoint;
        let own = latest.map(|path| Manifest::read(&path)).transpose().map_err(EngineError::from)?;
        if own.is_some_and(|manifest| manifest.saved_unix_ms >= since) {
            options.resume = Some("auto".into());
        }
    }
    Ok(options)
}

/// Returns a number that the launcher has set for its ranks.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Rejects, before training, a number of ranks for restarts that does not divide the rows of a step.
fn check_restarts(plan: &ZeroPlan) -> Result<()> {
    let rows = plan.batch.global;
    let is_first = number(RESTARTS) == Some(0);
    match number(RESTART_RANKS).map(|ranks| ranks as usize).filter(|_| is_first) {
        Some(ranks) if ranks > 0 && plan.batch.on(ranks).global != rows => {
            let expected = format!(
                "expected a number that divides the {rows} rows of a step, so that a restart keeps the batch; change \
                 --batch or --accumulation, or the file's batch sizes"
            );
            Err(wrong("restart-ranks", ranks, expected))
        }
        _ => Ok(()),
    }
}

/// Returns true if a configuration file gives the number of processes.
fn says_processes(options: &Options) -> Result<bool> {
    let config = options.config.as_deref().map(Config::from_file).transpose()?;
    Ok(config.is_some_and(|config| config.processes().is_some()))
}

/// Returns the path for the 16-bit model that the file requests: in --out, or without one in --save, named after the run's last step.
fn save_16bit(options: &Options, plan: &mut ZeroPlan) -> Option<PathBuf> {
    if !(plan.save_16bit_model && plan.zero.stage.shards_parameters()) {
        return None;
    }
    let Some(dir) = options.out.as_ref().or(options.save.as_ref()) else {
        plan.warnings.push(Warning {
            path: "zero_optimization.stage3_gather_16bit_weights_on_model_save".into(),
            message: "no 16-bit model will be saved: there is no folder for it; give --save DIR or --out DIR".into(),
        });
        return None;
    };
    Some(dir.join(format!("16bit-model-{:08}", options.steps)))
}

impl core::fmt::Display for Plan {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if let Some(notice) = &self.notice {
            writeln!(f, "{notice}\n")?;
        }
        let (state, plan) = (self.need.state, &self.plan);
        writeln!(f, "plan")?;
        let profile = &self.model.profile;
        write!(f, "  model          {}, {} parameters", self.model.name, profile.num_params())?;
        if !profile.frozen.is_empty() {
            write!(f, ", of which {} are trained", profile.num_trained())?;
        }
        writeln!(f)?;
        let threads = self.launch.threads(plan.world);
        if self.backend != BackendChoice::Cpu {
            writeln!(f, "  backend        {}", option_name(self.backend))?;
        }
        let groups = match (plan.zero.shard_size, plan.zero.secondary_shard_size) {
            (Some(size), _) => format!(" within groups of {size}"),
            (_, Some(size)) => format!(", gathers within groups of {size}"),
            _ => String::new(),
        };
        writeln!(
            f,
            "  ranks          {} at stage {}{groups}, {threads} compute thread(s) each",
            plan.world, plan.zero.stage
        )?;
        if self.backend == BackendChoice::Cpu && matches!(plan.precision, Precision::Bf16 { .. }) {
            writeln!(f, "  bf16 products  by {}", zero_kernels::cpu::product_bf16::instructions())?;
        }
        let micro_batches = match plan.batch.accumulation {
            1 => String::new(),
            micro_batches => format!(" in each of {micro_batches} micro-batches"),
        };
        let of = |tokens: Option<usize>| tokens.map_or(String::new(), |tokens| format!(" of {tokens} tokens"));
        let Data { order, held_out, unlabelled, tokens_per_row, .. } = &self.data;
        let (global, unit) = (plan.batch.global * self.data.units(), self.data.unit());
        write!(f, "  batch          {} row(s){} per rank{micro_batches}, ", plan.batch.micro, of(*tokens_per_row))?;
        write!(f, "{global} {unit} per step, {} rows of data", order.rows)?;
        if order.seed.is_some() {
            write!(f, ", shuffled")?;
        }
        if *held_out > 0 {
            write!(f, ", {held_out} held out")?;
        }
        if *unlabelled > 0 {
            write!(f, ", {unlabelled} without a label")?;
        }
        writeln!(f)?;
        let is_told = |line: &&str| ["ZeRO", "Batch", "Warning"].iter().any(|start| line.starts_with(start));
        for line in plan.explain().lines().filter(|line| !is_told(line)) {
            writeln!(f, "  {line}")?;
            if line.starts_with("Optimizer") && plan.rule().weight_decay() != 0.0 {
                let whose = match self.decay_except {
                    DecayExcept::Nothing => "all parameters",
                    DecayExcept::Vectors => "all parameters except biases and norms (--decay-except vectors)",
                    DecayExcept::Embeddings => {
                        "all parameters except biases, norms and embeddings (--decay-except embeddings)"
                    }
                };
                writeln!(f, "  Weight decay: {whose}.")?;
            }
        }
        if let Some(checkpoint) = &self.checkpoints.resume {
            let (path, manifest) = (checkpoint.path().display(), checkpoint.manifest());
            writeln!(f, "  resumes from   {path}, step {}, saved by {} rank(s)", manifest.step, manifest.world)?;
        }
        if let Some(dir) = &self.save_16bit {
            writeln!(f, "  16-bit model   saved at the end in {}", dir.display())?;
        }
        if let Some(light) = &self.light {
            writeln!(f, "  time per step  {light}")?;
        }
        writeln!(f, "  bytes per rank (estimated)")?;
        for (kind, bytes) in [
            ("parameters", state.parameters),
            ("gradients", state.gradients),
            ("optimizer", state.optimizer),
            ("working", self.need.working),
            ("activations", self.need.activations),
        ] {
            writeln!(f, "    {kind:<12} {:>12}", format_bytes(bytes))?;
        }
        write!(f, "  all ranks      {}", format_bytes(self.need.total()))?;
        for (bytes, place) in [(self.need.host, "in host memory"), (self.need.disk, "on the disk")] {
            if bytes > 0 {
                write!(f, ", and {} {place}", format_bytes(bytes * self.need.ranks))?;
            }
        }
        if let Some(memory) = &self.memory {
            write!(f, "\n  available      {memory}")?;
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "burn"))]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Tensor;

    use super::*;
    use crate::trainer::{Activations, FusedBackend, Rows};

    /// A task whose activations take 64 MiB per row, in `blocks` blocks.
    struct Wide {
        blocks: usize,
    }

    impl Task for Wide {
        type Model<B: FusedBackend> = Linear<B>;

        fn name(&self) -> String {
            "wide".into()
        }

        fn rows(&self) -> usize {
            100
        }

        fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Linear<B>, TrainError> {
            Ok(LinearConfig::new(2, 2).init(device))
        }

        fn loss<B: FusedBackend>(
            &self,
            model: &Linear<B>,
            rows: &Rows,
            device: &B::Device,
        ) -> Result<Tensor<B, 1>, TrainError> {
            Ok(model.forward(Tensor::<B, 2>::ones([rows.len(), 2], device)).mean())
        }

        fn profile(&self, micro_batch: usize) -> Result<Profile> {
            let bytes = (micro_batch * (64 << 20)) as u64;
            let activations = match self.blocks {
                0 => Activations { rest: bytes, ..Activations::default() },
                blocks => {
                    Activations { blocks, block: bytes / blocks as u64, input: bytes / blocks as u64 / 16, rest: 0 }
                }
            };
            Ok(Profile { parameters: vec![32 << 20], activations, flops_per_row: 1.0, ..Profile::default() })
        }
    }

    #[test]
    fn a_disk_without_room_is_told() {
        let swap = tempfile::tempdir().unwrap();
        let plan = |memory: u64, disk: Option<u64>| {
            let options = Options {
                memory: Some(format!("{memory}B")),
                swap: Some(swap.path().to_path_buf()),
                ..Options::default()
            };
            let ranks = Ranks::threads();
            let task = Wide { blocks: 0 };
            let mut budget = Budget::new(&options, &ranks).unwrap();
            budget.disk = disk;
            Plan::new(&options, (&task, &|batch| task.profile(batch)), &budget, &ranks)
        };
        let memory = plan(u64::MAX / 2, None).unwrap().need.total() - (256 << 20);
        let needed = plan(memory, None).unwrap().need;
        let told = plan(memory, Some(1 << 20)).err().unwrap().to_string();
        let expected =
            format!("{} on the disk, which has 1.00 MiB free", crate::memory::format_bytes(needed.disk * needed.ranks));
        assert!(told.contains(&expected) && told.contains("--swap"), "{told}");
        // What fits in no way is told by its memory.
        let told = plan(1 << 20, Some(1 << 20)).err().unwrap().to_string();
        assert!(told.contains("of memory may be used"), "{told}");
    }

    #[test]
    fn the_tier_is_chosen_for_the_rows_of_a_micro_batch() {
        let swap = tempfile::tempdir().unwrap();
        let plan = |blocks: usize, batch: usize, memory: u64| {
            let options = Options {
                memory: Some(format!("{memory}B")),
                swap: Some(swap.path().to_path_buf()),
                json: true,
                hyper: crate::trainer::Hyperparameters { batch: Some(batch), ..Default::default() },
                ..Options::default()
            };
            let ranks = Ranks::threads();
            let (task, budget) = (Wide { blocks }, Budget::new(&options, &ranks).unwrap());
            Plan::new(&options, (&task, &|batch| task.profile(batch)), &budget, &ranks).unwrap()
        };
        let memory = plan(0, 1, u64::MAX / 2).need.total();
        assert!(plan(0, 1, memory).notice.is_none());
        let larger = plan(0, 2, memory);
        assert!(larger.need.disk > 0 && larger.notice.unwrap().contains("--offload"));
        // As little as memory allows, but for a twentieth of it and a hundredth of the state.
        let less = memory - (16 << 20);
        let part = plan(0, 1, less);
        let (taken, ratio, notice) = (part.need.total(), part.zero.offload.ratio, part.notice.unwrap());
        assert!(notice.contains(&format!("--offload optimizer --offload-ratio {ratio}")), "{notice}");
        assert!(taken <= less / 20 * 19 && taken > less / 10 * 9, "{taken} of {less}");
        assert!(0.0 < ratio && ratio < 1.0, "{ratio}");
        // What can be computed again is dropped before state is offloaded, of no more blocks than it takes.
        let larger = plan(4, 2, memory);
        assert_eq!((larger.need.disk, larger.zero.checkpointed_blocks), (0, 3));
        assert!(larger.need.total() <= memory && larger.notice.unwrap().contains("--checkpoint-activations 3"));
    }

    #[test]
    fn the_plan_finds_the_largest_micro_batch() {
        let swap = tempfile::tempdir().unwrap();
        let plan = |memory: u64, auto_find_batch_size: bool, offload_activations: bool| {
            let options = Options {
                memory: Some(format!("{memory}B")),
                swap: Some(swap.path().to_path_buf()),
                offload: Some(OffloadChoice::None),
                auto_find_batch_size,
                offload_activations,
                ..Options::default()
            };
            let ranks = Ranks::threads();
            let (task, budget) = (Wide { blocks: 64 }, Budget::new(&options, &ranks).unwrap());
            Plan::new(&options, (&task, &|batch| task.profile(batch)), &budget, &ranks).unwrap()
        };
        let one = plan(u64::MAX / 2, false, false).need.total();
        let memory = one + (256 << 20);
        let found = plan(memory, true, false);
        let notice = found.notice.unwrap();
        assert!(found.need.total() <= memory && found.plan.batch.micro > 2, "{notice}");
        assert!(notice.contains(&format!("--batch {}", found.plan.batch.micro)), "{notice}");
        // One row more does not fit, whatever is checkpointed and offloaded: a block that is computed again does not.
        let rest = (memory - found.need.total()) / found.need.ranks;
        assert!(rest < (64 << 20) / 64 * 2, "{rest} bytes are left");
        assert!(notice.contains("--checkpoint-activations") && notice.contains("--offload-activations"), "{notice}");
        assert_eq!(found.zero.offload.activations, Tier::Disk);
        // Asked for without more, every block is checkpointed.
        let asked = plan(u64::MAX / 2, false, true);
        assert_eq!((asked.zero.checkpointed_blocks, asked.zero.offload.activations), (usize::MAX, Tier::Disk));
    }
}
