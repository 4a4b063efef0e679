//! The validated plan: everything after it sees no raw option.

use std::path::{Path, PathBuf};

use zero_burn::config::{Gathers, Tier, ZeroConfig};
use zero_burn::launch::LaunchOptions;
use zero_core::Stage;
use zero_core::checkpoint::{Check, Manifest};
use zero_core::collective::launcher::{World, launched_alone};
use zero_models::Gpt2Config;

use super::backend::{BackendChoice, name as option_name};
use super::checkpoints::Checkpoints;
use super::fit::{Budget, Choice, MemoryNeed, choose};
use super::options::at_least_one;
use super::predict::Prediction;
use super::ranks::{Ranks, launch_options};
use super::zero_plan::zero_plan;
use super::{GathersChoice, OffloadChoice, Options};
use crate::TrainError;
use crate::config::{Warning, ZeroPlan};
use crate::data::{Source, TokenRows, wrong_data};
use crate::engine::EngineError;
use crate::error::wrong;
use crate::launcher::{LAUNCHED, RESTARTS};
use crate::memory::format_bytes;

/// What will be trained, on what, how.
// What all ranks compare before they train, a field for each line of it.
pub(super) struct Plan {
    pub backend: BackendChoice,
    /// The preset's or folder's name.
    pub name: String,
    pub model: Gpt2Config,
    /// Weights to start from.
    pub weights: Option<PathBuf>,
    pub rows: TokenRows,
    /// Rows held out for evaluation.
    pub eval_rows: Option<TokenRows>,
    /// Sharding, batch, precision, optimizer, schedule, reports.
    pub plan: ZeroPlan,
    /// The same as settings of the decorator.
    pub zero: ZeroConfig,
    pub steps: usize,
    pub launch: LaunchOptions,
    /// Folder for metrics.
    pub out: Option<PathBuf>,
    pub checkpoints: Checkpoints,
    /// The folder for the 16-bit model that the configuration asks for.
    pub save_16bit: Option<PathBuf>,
    /// Whether a progress bar is shown.
    pub progress: bool,
    /// What the run needs.
    pub need: MemoryNeed,
    /// How long a step will take, for a person to read before it begins; not with `--json`, nor for small models.
    pub prediction: Option<Prediction>,
    /// What was said about the choice of the model.
    pub notice: Option<String>,
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
        let (steps, threads, every) = (Some(options.steps), options.threads, options.log_every);
        at_least_one(&[("steps", steps), ("threads", threads), ("log-every", every)])?;
        let source = options.data.as_deref().map_or_else(|| default_data.clone(), Source::File);
        let seq = options.seq.or(source.row_length()?).unwrap_or(128);
        let options = &as_launched(options, here)?;
        options.backend.check()?;
        let budget = Budget::new(options, here)?;
        let Choice { name, model, offload, notice } = choose(options, default_model, seq, &budget)?;
        model.validate()?;
        let options = &Options { offload, ..options.clone() };
        let mut plan = zero_plan(options, &model)?;
        plan.report.steps_per_print = options.log_every.or(plan.report.steps_per_print);
        let (stage, ranks) = (plan.stage, plan.world);
        let mut zero = plan.zero_config(options.seed);
        zero.gathers = gathers(options, here)?;
        let (offload, disk) = (&zero.offload, &zero.offload.disk.path);
        if [offload.optimizer, offload.parameters].contains(&Tier::Disk) && !disk.is_dir() {
            let problem = "is no folder: create it on the disk that is to be used, or correct --swap or nvme_path";
            return Err(wrong_data(disk, problem));
        }
        zero.validate(ranks).map_err(|error| wrong("ranks", ranks, error.to_string()))?;
        if let Some(seq) = options.seq.filter(|&seq| seq < 2 || seq > model.n_positions) {
            let expected = format!("expected 2 to {}, the positions of model {name}", model.n_positions);
            return Err(wrong("seq", seq, expected));
        }
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
        let is_read = !options.json && here.is_main() && options.backend == BackendChoice::Cpu;
        let prediction = if is_read { Prediction::new(&model, &plan, rows.seq(), &need) } else { None };
        Ok(Self {
            prediction,
            backend: options.backend,
            name,
            model,
            weights: options.weights.clone(),
            rows,
            eval_rows,
            zero,
            steps: options.steps,
            launch: launch_options(options)?,
            out: options.out.clone(),
            checkpoints: Checkpoints::new(options, here)?,
            save_16bit: save_16bit(options, &mut plan),
            plan,
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
            format!("the backend {}", option_name(self.backend)),
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
            format!("a 16-bit model at the end: {}", self.save_16bit.is_some()),
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

/// How parameters are gathered.
fn gathers(options: &Options, ranks: &Ranks<'_>) -> Result<Gathers, TrainError> {
    match (options.gathers, ranks.world()) {
        (None, _) => Ok(Gathers::Auto),
        (Some(_), None) => {
            let expected = "expected ranks that are processes (mpirun, torchrun): ranks that are threads read each other's \
                            shards in memory; leave it out";
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
    // Each of several machines counts its own attempts, and their ranks look for a checkpoint together.
    let restarted = number(RESTARTS).is_some_and(|restarts| restarts > 0);
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

/// Where the 16-bit model goes that the file asks for: into --out, or without one into --save, by the run's last step.
fn save_16bit(options: &Options, plan: &mut ZeroPlan) -> Option<PathBuf> {
    if !(plan.save_16bit_model && plan.stage.shards_parameters()) {
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
        writeln!(f, "  model          {}, {} parameters", self.name, self.model.num_params())?;
        let threads = self.launch.threads(plan.world);
        if self.backend != BackendChoice::Cpu {
            writeln!(f, "  backend        {}", option_name(self.backend))?;
        }
        writeln!(f, "  ranks          {} at stage {}, {threads} compute thread(s) each", plan.world, plan.stage)?;
        let micro_batches = match plan.batch.accumulation {
            1 => String::new(),
            micro_batches => format!(" in each of {micro_batches} micro-batches"),
        };
        let (seq, rows) = (self.rows.seq(), self.rows.rows());
        write!(f, "  batch          {} row(s) of {seq} tokens per rank{micro_batches}, ", plan.batch.micro)?;
        writeln!(f, "{} tokens a step, {rows} rows of data", plan.batch.global * seq)?;
        let is_told = |line: &&str| ["ZeRO", "Batch", "Warning"].iter().any(|start| line.starts_with(start));
        for line in plan.explain().lines().filter(|line| !is_told(line)) {
            writeln!(f, "  {line}")?;
        }
        if let Some(checkpoint) = &self.checkpoints.resume {
            let (path, manifest) = (checkpoint.path().display(), checkpoint.manifest());
            writeln!(f, "  resumes from   {path}, step {}, saved by {} rank(s)", manifest.step, manifest.world)?;
        }
        if let Some(dir) = &self.save_16bit {
            writeln!(f, "  16-bit model   saved at the end in {}", dir.display())?;
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
        for (bytes, place) in [(self.need.host, "in the host's memory"), (self.need.disk, "on the disk")] {
            if bytes > 0 {
                write!(f, ", and {} {place}", format_bytes(bytes * self.need.ranks))?;
            }
        }
        Ok(())
    }
}
