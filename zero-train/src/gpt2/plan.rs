//! The validated plan: everything after it sees no raw option.

use std::path::{Path, PathBuf};
use std::time::Duration;

use zero_burn::config::{Float, Gathers, ZeroConfig};
use zero_burn::launch::LaunchOptions;
use zero_core::accounting::StateBytes;
use zero_core::checkpoint::{Check, Manifest, find_latest};
use zero_core::collective::launcher::{World, launched_alone};
use zero_core::estimate::{Precision, model_state};
use zero_core::{Partition, Stage};
use zero_models::Gpt2Config;
use zero_models::hf_export::parse_bytes;

use super::BackendChoice;
use super::checkpoints::Checkpoints;
use super::ranks::Ranks;
use super::zero_plan::zero_plan;
use super::{GathersChoice, OffloadChoice, Options, Prediction};
use crate::TrainError;
use crate::config::{Config, Offload, OffloadDevice, Watchdog, ZeroPlan};
use crate::data::{Source, TokenRows};
use crate::engine::EngineError;
use crate::launcher::{LAUNCHED, RESTARTS};
use crate::memory::{available_bytes, format_bytes};

/// The longest that a rank waits for another.
const DEADLINE: Duration = Duration::from_secs(600);

/// In seconds: a year.
const MAX_DEADLINE: f64 = 365.0 * 86_400.0;

/// What will be trained, on what, how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Where ranks compute.
    pub backend: BackendChoice,
    /// The preset's or folder's name.
    pub name: String,
    /// The model.
    pub model: Gpt2Config,
    /// Weights to start from.
    pub weights: Option<PathBuf>,
    /// Training rows.
    pub rows: TokenRows,
    /// Rows held out for evaluation.
    pub eval_rows: Option<TokenRows>,
    /// Sharding, batch, precision, optimizer, schedule, reports.
    pub plan: ZeroPlan,
    /// The same as settings of the decorator.
    pub zero: ZeroConfig,
    /// Steps.
    pub steps: usize,
    /// Threads and deadline of ranks.
    pub launch: LaunchOptions,
    /// Folder for metrics.
    pub out: Option<PathBuf>,
    /// What is saved, and where training goes on.
    pub checkpoints: Checkpoints,
    /// Whether a progress bar is shown.
    pub progress: bool,
    /// What the run needs.
    pub need: MemoryNeed,
    /// How long a step will take, for a person to read before it begins; not with `--json`, nor for small models.
    pub prediction: Option<Prediction>,
    /// What was said about the choice of the model.
    pub notice: Option<String>,
}

/// Bytes that a run will take at its peak, by kind; an estimate except for model state, which is exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Model state of one rank.
    pub state: StateBytes,
    /// Gathered parameters, gradients on their way and optimizer temporaries of one rank.
    pub working: u64,
    /// Activations kept for the backward pass, and logits, of one rank.
    pub activations: u64,
    /// Number of ranks on this machine, or on the one that has most.
    pub ranks: u64,
    /// Model state of one rank in the host's memory, where the backend has memory of its own.
    pub host: u64,
    /// Model state of one rank on the disk.
    pub disk: u64,
}

impl MemoryNeed {
    /// For `plan` on rows of `seq` tokens.
    pub fn new(model: &Gpt2Config, plan: &ZeroPlan, seq: usize, backend: BackendChoice) -> Self {
        let (stage, ranks, batch) = (plan.stage, plan.world, plan.batch.micro);
        let psi = model.num_params() as u64;
        let mut state = model_state(psi, stage, ranks as u64, precision(plan));
        let on_disk = |offload: &Option<Offload>| {
            offload.as_ref().is_some_and(|offload| matches!(offload.device, OffloadDevice::Nvme { .. }))
        };
        let on_host = |offload: &Option<Offload>| {
            let is_host = |offload: &Offload| offload.device == OffloadDevice::Cpu;
            backend != BackendChoice::Cpu && offload.as_ref().is_some_and(is_host)
        };
        let all = state.total();
        if on_disk(&plan.offload_optimizer) {
            state.optimizer = 0;
            state.gradients = if stage.shards_gradients() { 0 } else { state.gradients };
        }
        if on_disk(&plan.offload_param) {
            state.parameters = 0;
        }
        let disk = all - state.total();
        if on_host(&plan.offload_optimizer) {
            state.optimizer = 0;
            // Reduced at the end of the backward pass at stage 1: until then they are whole, and with the backend.
            state.gradients = if stage.shards_gradients() { 0 } else { state.gradients };
        }
        if on_host(&plan.offload_param) {
            state.parameters = 0;
        }
        let host = all - disk - state.total();
        let largest =
            model.parameter_shapes().iter().map(|(_, shape)| shape.iter().product::<usize>()).max().unwrap_or(0);
        let piece = if stage.shards_optimizer() { Partition::new(largest, ranks).stride() } else { largest };
        let (tokens, width) = ((batch * seq) as u64, model.n_embd as u64);
        // One gathered copy, one dense gradient and its reduced piece, and two buckets in flight with their results.
        let gathered = if stage.shards_parameters() { largest } else { 0 };
        let mut working = 4 * (gathered + largest + piece + 3 * plan.reduce_bucket_size.min(model.num_params()));
        if on_disk(&plan.offload_optimizer) || on_disk(&plan.offload_param) {
            let settings = plan.zero_config(0).offload.disk;
            working += settings.buffer_count * settings.buffer_bytes;
        }
        // Floats that the fused operations keep per token and layer, in widths: the input, the two norms' results, query,
        // key and value, attention's result, the sum after it, and the feed-forward layer before and after its activation.
        let per_layer = tokens * (8 * width + 2 * model.inner_width() as u64);
        // Logits are made for a few rows at a time.
        let logits = 2 * tokens.min(256) * model.vocab_size as u64;
        let activations = 4 * (model.n_layer as u64 * per_layer + logits);
        Self { state, working: working as u64, activations, ranks: ranks as u64, host, disk }
    }

    /// The same with so many ranks on a machine.
    #[must_use]
    pub fn with_ranks_here(self, ranks: usize) -> Self {
        Self { ranks: ranks as u64, ..self }
    }

    /// Sum over the ranks of a machine.
    pub fn total(&self) -> u64 {
        (self.state.total() + self.working + self.activations) * self.ranks
    }

    fn arithmetic(&self) -> String {
        format!(
            "{} ranks x ({} model state + {} working memory + {} activations) = {}",
            self.ranks,
            format_bytes(self.state.total()),
            format_bytes(self.working),
            format_bytes(self.activations),
            format_bytes(self.total())
        )
    }
}

impl Plan {
    /// Checks the options and everything they name, before anything is written.
    ///
    /// # Errors
    ///
    /// [`TrainError`], the first thing that is wrong.
    pub(super) fn new(
        options: &Options,
        default_model: &str,
        default_data: &Source<'_>,
        here: &Ranks<'_>,
    ) -> Result<Self, TrainError> {
        positive("steps", options.steps)?;
        if let Some(threads) = options.threads {
            positive("threads", threads)?;
        }
        if let Some(every) = options.log_every {
            positive("log-every", every)?;
        }
        let seq_guess = options.seq.unwrap_or(128);
        let options = &as_launched(options, here)?;
        options.backend.check()?;
        let budget = Budget::new(options, here)?;
        let Choice { name, model, offload, notice } = choose(options, default_model, seq_guess, &budget)?;
        model.validate()?;
        let options = &Options { offload, ..options.clone() };
        let mut plan = zero_plan(options, &model)?;
        plan.report.steps_per_print = options.log_every.or(plan.report.steps_per_print);
        let (stage, ranks) = (plan.stage, plan.world);
        let mut zero = plan.zero_config(options.seed);
        zero.gathers = gathers(options, here)?;
        zero.validate(ranks).map_err(|error| wrong("ranks", ranks, error.to_string()))?;
        if let Some(seq) = options.seq.filter(|&seq| seq < 2 || seq > model.n_positions) {
            let expected = format!("expected 2 to {}, the positions of model {name}", model.n_positions);
            return Err(wrong("seq", seq, expected));
        }
        let source = options.data.as_deref().map_or_else(|| default_data.clone(), Source::File);
        // What is no folder has no tokenizer.
        let folders = [options.weights.as_deref(), options.model.as_deref().map(Path::new)];
        let folders: Vec<&Path> = folders.into_iter().flatten().collect();
        let mut rows = TokenRows::load(&source, options.seq, model.vocab_size, model.n_positions, &folders)?;
        let eval_rows = hold_out(options.eval, ranks, &mut rows)?;
        let need = MemoryNeed::new(&model, &plan, rows.seq(), options.backend)
            .with_ranks_here(budget.ranks_here.unwrap_or(ranks));
        if !budget.holds(&need) {
            return Err(TrainError::Memory(format!(
                "model {name} does not fit: {}{}; use a smaller --model, --batch or --seq, fewer --ranks{}{}",
                need.arithmetic(),
                budget.but(&need),
                if stage == Stage::Parameters { "" } else { ", or --stage 3" },
                if options.config.is_none() && options.offload != Some(OffloadChoice::All) {
                    ", or --offload all (to a disk with --offload-to disk, and a fast one at --swap)"
                } else {
                    ""
                }
            )));
        }
        let prediction = match options.json || !here.is_main() {
            true => None,
            false if options.backend != BackendChoice::Cpu => None,
            false => Prediction::new(&model, &plan, rows.seq(), &need),
        };
        Ok(Self {
            prediction,
            backend: options.backend,
            name,
            model,
            weights: options.weights.clone(),
            rows,
            eval_rows,
            plan,
            zero,
            steps: options.steps,
            launch: launch_options(options)?,
            out: options.out.clone(),
            checkpoints: Checkpoints::new(options)?,
            progress: !options.json,
            need,
            notice,
        })
    }

    /// What must be the same on every rank, a line each. Not where things lie, which may differ between machines.
    pub(super) fn fingerprint(&self) -> Vec<String> {
        let mut zero = self.zero.clone();
        zero.offload.disk = Default::default();
        let eval = self.eval_rows.as_ref().map(TokenRows::checksum);
        let (every, last, best) = (self.checkpoints.every, self.checkpoints.keep_last, self.checkpoints.keep_best);
        let saves = self.checkpoints.dir.is_some();
        vec![
            format!("zero {}", env!("CARGO_PKG_VERSION")),
            format!("the backend {}", self.backend.name()),
            format!("the model {:?}", self.model),
            format!("{:?} ranks at stage {}", self.plan.world, self.plan.stage),
            format!("the batch {:?}", self.plan.batch),
            format!("the precision {:?}", self.plan.precision),
            format!("the optimizer {:?}", self.plan.optimizer),
            format!("the schedule {:?}", self.plan.schedule),
            format!("clipping {:?}", self.plan.gradient_clipping),
            format!("the settings {zero:?}"),
            format!("{} steps", self.steps),
            format!("rows of {} tokens", self.rows.seq()),
            format!("data with the checksum {:08x}, held out {eval:08x?}", self.rows.checksum()),
            format!("checkpoints {saves}, every {every:?}, keeping {last:?}, the best {best}"),
            format!("{} steps behind it", self.checkpoints.resumed_steps()),
            format!("a deadline of {:?}", self.launch.deadline),
            format!("weights to start from: {}", self.weights.is_some()),
        ]
    }

    /// Bytes that one rank receives in one step by the ZeRO formula. With `A` micro-batches gradients are reduced once at
    /// stages 0 and 1 and `A` times at 2 and 3; at stage 3 parameters are gathered twice in each, those below the
    /// persistence threshold once.
    pub fn wire_bytes(&self) -> u64 {
        let shapes = self.model.parameter_shapes();
        let sizes = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>());
        let persistent: usize = sizes.filter(|&numel| numel <= self.zero.param_persistence_threshold).sum();
        let (psi, persistent) = (self.model.num_params() as u64, persistent as u64);
        let (world, micro_batches) = (self.plan.world as u64, self.plan.batch.accumulation as u64);
        let parameter = self.zero.param_dtype.size() as u64;
        let gradient = self.zero.communication_dtype.unwrap_or(self.zero.param_dtype).size() as u64;
        let moved = match self.plan.stage {
            Stage::DataParallel => 2 * psi * gradient,
            Stage::OptimizerState => psi * (gradient + parameter),
            Stage::Gradients => psi * (micro_batches * gradient + parameter),
            Stage::Parameters => {
                micro_batches * psi * gradient + (2 * micro_batches * (psi - persistent) + persistent) * parameter
            }
        };
        moved * (world - 1) / world
    }
}

/// Bytes per parameter of each kind of model state.
pub(super) fn precision(plan: &ZeroPlan) -> Precision {
    let config = plan.zero_config(0);
    let (parameter, names) = (config.param_dtype.size() as u64, plan.rule().state_names().len() as u64);
    Precision {
        parameter,
        gradient: config.gradient_dtype.unwrap_or(config.param_dtype).size() as u64,
        optimizer: 4 * (names + u64::from(config.param_dtype != Float::F32)),
    }
}

/// Takes the rows for evaluation from the end of the data.
fn hold_out(eval: usize, ranks: usize, rows: &mut TokenRows) -> Result<Option<TokenRows>, TrainError> {
    if eval == 0 {
        return Ok(None);
    }
    if !eval.is_multiple_of(ranks) {
        let near = eval.next_multiple_of(ranks);
        return Err(wrong("eval", eval, format!("expected a multiple of the {ranks} ranks, such as {near}")));
    }
    let all = rows.rows();
    match rows.split_off(eval) {
        Some(held_out) => Ok(Some(held_out)),
        None => Err(wrong("eval", eval, format!("expected fewer than the {all} rows of the data"))),
    }
}

pub(super) fn wrong(option: &'static str, got: impl ToString, expected: impl Into<String>) -> TrainError {
    TrainError::Option { option, got: got.to_string(), expected: expected.into() }
}

fn positive(option: &'static str, value: usize) -> Result<(), TrainError> {
    if value == 0 { Err(wrong(option, 0, "expected at least 1")) } else { Ok(()) }
}

/// Memory and disk that a run may take.
struct Budget {
    /// `None`: unknown, and not limited.
    memory: Option<u64>,
    /// The host's memory, where the backend has memory of its own.
    host: Option<u64>,
    disk: Option<u64>,
    /// The most ranks of a machine, if they are processes; otherwise all.
    ranks_here: Option<usize>,
}

impl Budget {
    fn new(options: &Options, ranks: &Ranks<'_>) -> Result<Self, TrainError> {
        let limit = options.memory.as_deref().map(parse_bytes).transpose().map_err(|error| {
            let got = options.memory.clone().unwrap_or_default();
            wrong("memory", got, error.to_string())
        })?;
        let available = match options.backend {
            BackendChoice::Cpu => available_bytes(),
            device => device.memory(),
        };
        let memory = available.into_iter().chain(limit).min();
        let host = available_bytes().filter(|_| options.backend != BackendChoice::Cpu);
        // What the fewest have, so that ranks on several machines take the same tier.
        let (memory, host) = (ranks.least(memory)?, ranks.least(host)?);
        let disk = ranks.least(free_disk(&options.swap))?;
        Ok(Self { memory, host, disk, ranks_here: ranks.most_on_a_machine() })
    }

    fn holds(&self, need: &MemoryNeed) -> bool {
        self.memory.is_none_or(|memory| need.total() <= memory)
            && (need.host == 0 || self.host.is_none_or(|host| need.host * need.ranks <= host))
            && (need.disk == 0 || self.disk.is_none_or(|disk| need.disk * need.ranks <= disk))
    }

    /// What there is too little of.
    fn but(&self, need: &MemoryNeed) -> String {
        match (self.memory, self.host, self.disk) {
            (Some(memory), ..) if need.total() > memory => {
                format!(", but {} of memory may be used", format_bytes(memory))
            }
            (_, Some(host), _) if need.host * need.ranks > host => {
                let needed = format_bytes(need.host * need.ranks);
                format!(", and {needed} in the host's memory, of which {} are free", format_bytes(host))
            }
            (.., Some(disk)) => {
                format!(", and {} on the disk, which has {}", format_bytes(need.disk * need.ranks), format_bytes(disk))
            }
            _ => String::new(),
        }
    }
}

/// How parameters are gathered.
fn gathers(options: &Options, ranks: &Ranks<'_>) -> Result<Gathers, TrainError> {
    match (options.gathers, ranks.world()) {
        (None, _) => Ok(Gathers::Auto),
        (Some(_), None) => {
            let expected = "expected ranks that are processes (mpirun, torchrun): ranks that are threads read each other's \
                            pieces where they lie; leave it out";
            Err(wrong("gathers", "given", expected))
        }
        (Some(GathersChoice::Collective), Some(_)) => Ok(Gathers::Collective),
        (Some(GathersChoice::OneSided), Some(_)) => Ok(Gathers::OneSided),
    }
}

/// The options as the launcher has them too: the number of ranks is the number of its processes, and after a restart training
/// goes on from the last checkpoint that the job has saved.
fn as_launched(options: &Options, ranks: &Ranks<'_>) -> Result<Options, TrainError> {
    let mut options = options.clone();
    if let Some(World { world, variable, .. }) = ranks.world() {
        if let Some(asked) = options.ranks.filter(|asked| asked != world) {
            let expected =
                format!("expected {world}, the processes that were started (by {variable}); leave --ranks out");
            return Err(wrong("ranks", asked, expected));
        }
        options.ranks = Some(*world);
    } else if options.config.is_none() && launched_alone() {
        // `mpirun -n 1`, or what is left after restarts.
        options.ranks = options.ranks.or(Some(1));
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    if number(RESTARTS).is_some_and(|restarts| restarts > 0)
        && let Some(save) = &options.save
        && options.resume.as_deref() != Some(Path::new("auto"))
    {
        // What an earlier attempt has saved. What lay there before is not this job's: without a checkpoint of its own it
        // begins as it was told to.
        let since = number(LAUNCHED).unwrap_or(0);
        let latest = find_latest(save, Check::Sizes).map_err(EngineError::from)?.checkpoint;
        let own = latest.map(|path| Manifest::read(&path)).transpose().map_err(EngineError::from)?;
        if own.is_some_and(|manifest| manifest.saved_unix_ms >= since) {
            options.resume = Some("auto".into());
        }
    }
    Ok(options)
}

/// Threads, deadline and flight records of the ranks.
pub(super) fn launch_options(options: &Options) -> Result<LaunchOptions, TrainError> {
    let watchdog = match &options.config {
        Some(path) => Config::from_file(path)?.watchdog(),
        None => Watchdog::default(),
    };
    let deadline = match options.deadline.or(watchdog.deadline) {
        Some(seconds) if !(seconds.is_finite() && seconds > 0.0 && seconds <= MAX_DEADLINE) => {
            return Err(wrong("deadline", seconds, "expected seconds above 0 and up to a year"));
        }
        Some(seconds) => Duration::from_secs_f64(seconds),
        None => DEADLINE,
    };
    let flight_dir =
        options.flight.clone().or(watchdog.flight_dir).or_else(|| options.out.as_ref().map(|out| out.join("flight")));
    Ok(LaunchOptions { threads_per_rank: options.threads.unwrap_or(0), deadline, flight_dir })
}

/// Free bytes of the file system of a folder, or of the nearest folder above it that exists.
fn free_disk(folder: &Path) -> Option<u64> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let existing = folder.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("."));
    zero_core::offload::free_bytes(existing).ok()
}

/// The model, and what of it is kept on a disk.
struct Choice {
    name: String,
    model: Gpt2Config,
    offload: Option<OffloadChoice>,
    notice: Option<String>,
}

/// A tier that fits, and what is to be said about it.
type Fitting = (Option<OffloadChoice>, Option<String>);

/// The model by name, folder or weights; if none is named, the default, or the largest preset that fits. Without --offload
/// and --config, the cheapest tier of memory and disk that fits.
fn choose(options: &Options, default_model: &str, seq: usize, budget: &Budget) -> Result<Choice, TrainError> {
    let need = |model: &Gpt2Config, offload: Option<OffloadChoice>| -> Result<MemoryNeed, TrainError> {
        let options = Options { offload, ..options.clone() };
        let plan = zero_plan(&options, model)?;
        let need = MemoryNeed::new(model, &plan, seq.min(model.n_positions), options.backend);
        Ok(need.with_ranks_here(budget.ranks_here.unwrap_or(plan.world)))
    };
    let tiers: &[Option<OffloadChoice>] = match (options.offload, &options.config) {
        (Some(given), _) => &[Some(given)],
        (None, Some(_)) => &[None],
        (None, None) => match options.stage.unwrap_or(3) {
            0 => &[None],
            1 | 2 => &[None, Some(OffloadChoice::Optimizer)],
            _ => &[None, Some(OffloadChoice::Optimizer), Some(OffloadChoice::All)],
        },
    };
    // The first tier that fits, with what is to be said about it.
    let fitting = |model: &Gpt2Config| -> Result<Option<Fitting>, TrainError> {
        for &tier in tiers {
            let with = need(model, tier)?;
            if budget.holds(&with) {
                let notice = match tier {
                    Some(choice) if options.offload.is_none() => {
                        let without = need(model, None)?;
                        Some(format!(
                            "In memory alone: {}{}.\nSo --offload {}: {} in memory, {}.",
                            without.arithmetic(),
                            budget.but(&without),
                            choice.name(),
                            format_bytes(with.total()),
                            match with.disk {
                                0 => format!("{} in the host's", format_bytes(with.host * with.ranks)),
                                disk => {
                                    format!("{} below {}", format_bytes(disk * with.ranks), options.swap.display())
                                }
                            }
                        ))
                    }
                    _ => None,
                };
                return Ok(Some((tier, notice)));
            }
        }
        Ok(None)
    };
    let named = match (&options.model, &options.weights) {
        (Some(name), _) if Path::new(name).is_dir() => {
            Some((name.clone(), Gpt2Config::from_file(&Path::new(name).join("config.json"))?))
        }
        (Some(name), _) => Some((name.clone(), Gpt2Config::preset(name)?)),
        (None, Some(dir)) => Some((dir.display().to_string(), Gpt2Config::from_file(&dir.join("config.json"))?)),
        (None, None) => None,
    };
    if let Some((name, model)) = named {
        // What does not fit is told with the length of the data's rows.
        let (offload, notice) = fitting(&model)?.unwrap_or((options.offload, None));
        return Ok(Choice { name, model, offload, notice });
    }
    let wanted = Gpt2Config::preset(default_model)?;
    if let Some((offload, notice)) = fitting(&wanted)? {
        return Ok(Choice { name: default_model.to_string(), model: wanted, offload, notice });
    }
    let too_much = need(&wanted, options.offload)?;
    let why = format!("{default_model} does not fit: {}{}", too_much.arithmetic(), budget.but(&too_much));
    for &name in Gpt2Config::PRESETS.iter().rev() {
        let model = Gpt2Config::preset(name)?;
        if model.num_params() >= wanted.num_params() || options.seq.is_some_and(|seq| seq > model.n_positions) {
            continue;
        }
        if let Some((offload, notice)) = fitting(&model)? {
            let notice = [Some(format!("{why}.\nTraining {name}, the largest preset that fits.")), notice];
            let notice = notice.into_iter().flatten().collect::<Vec<_>>().join("\n");
            return Ok(Choice { name: name.to_string(), model, offload, notice: Some(notice) });
        }
    }
    Err(TrainError::Memory(format!(
        "{why}, and no smaller preset fits either; use fewer --ranks or a smaller --seq or --batch"
    )))
}

impl core::fmt::Display for Plan {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if let Some(notice) = &self.notice {
            writeln!(f, "{notice}\n")?;
        }
        let (state, plan) = (self.need.state, &self.plan);
        writeln!(f, "plan")?;
        writeln!(f, "  model          {}, {} parameters", self.name, self.model.num_params())?;
        let threads = self.launch.threads(plan.world);
        if self.backend != BackendChoice::Cpu {
            writeln!(f, "  backend        {}", self.backend.name())?;
        }
        writeln!(f, "  ranks          {} at stage {}, {threads} compute thread(s) each", plan.world, plan.stage)?;
        let micro_batches = match plan.batch.accumulation {
            1 => String::new(),
            micro_batches => format!(" in each of {micro_batches} micro-batches"),
        };
        writeln!(
            f,
            "  batch          {} row(s) of {} tokens per rank{micro_batches}, {} tokens a step, {} rows of data",
            plan.batch.micro,
            self.rows.seq(),
            plan.batch.global * self.rows.seq(),
            self.rows.rows()
        )?;
        for line in plan
            .explain()
            .lines()
            .filter(|line| !["ZeRO", "Batch", "Warning"].iter().any(|start| line.starts_with(start)))
        {
            writeln!(f, "  {line}")?;
        }
        if let Some(checkpoint) = &self.checkpoints.resume {
            let manifest = checkpoint.manifest();
            writeln!(
                f,
                "  resumes from   {}, step {}, saved by {} rank(s)",
                checkpoint.path().display(),
                manifest.step,
                manifest.world
            )?;
        }
        if let Some(prediction) = &self.prediction {
            writeln!(f, "  a step         {prediction}")?;
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
        if self.need.host > 0 {
            write!(f, ", and {} in the host's memory", format_bytes(self.need.host * self.need.ranks))?;
        }
        if self.need.disk > 0 {
            write!(f, ", and {} on the disk", format_bytes(self.need.disk * self.need.ranks))?;
        }
        Ok(())
    }
}
