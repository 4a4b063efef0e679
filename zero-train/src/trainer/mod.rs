//! Training of any model: from options to a validated plan, ranks that train, and a report.
//!
//! ```no_run
//! use burn::nn::loss::CrossEntropyLossConfig;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::prelude::*;
//! use zero_train::trainer::{self, FusedBackend, Result, Rows, Task};
//!
//! /// Which half of the unit interval a number is in.
//! struct Halves;
//!
//! impl Task for Halves {
//!     type Model<B: FusedBackend> = Linear<B>;
//!
//!     fn rows(&self) -> usize {
//!         1000
//!     }
//!
//!     fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Linear<B>> {
//!         Ok(LinearConfig::new(1, 2).init(device))
//!     }
//!
//!     fn loss<B: FusedBackend>(&self, model: &Linear<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
//!         let numbers: Vec<f32> = rows.iter().map(|&row| row as f32 / 1000.0).collect();
//!         let halves: Vec<i32> = rows.iter().map(|&row| i32::from(row >= 500)).collect();
//!         let input = Tensor::<B, 1>::from_floats(&*numbers, device).reshape([rows.len(), 1]);
//!         let targets = Tensor::<B, 1, Int>::from_ints(&*halves, device);
//!         Ok(CrossEntropyLossConfig::new().init(device).forward(model.forward(input), targets))
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     trainer::main(&Halves)
//! }
//! ```

mod backend;
mod bar;
#[cfg(feature = "burn")]
mod burn;
mod checkpoints;
mod comms;
#[cfg(feature = "burn")]
mod count;
mod facts;
mod fit;
mod integration;
mod observer;
mod options;
mod order;
mod plan;
mod predict;
mod profile;
mod ranks;
mod recipe;
mod report;
mod rows;
mod steps;
mod task;
mod trace;
mod train;
mod training;
mod zero_plan;

use std::borrow::Borrow;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

pub use backend::BackendChoice;
#[cfg(feature = "burn")]
pub use burn::Burn021;
pub use fit::MemoryNeed;
pub use integration::{InitialAdapter, Integration, MemoryProbe, RankEngine, Run};
pub use options::{
    Blocks, DecayExcept, Dtype, GathersChoice, Hyperparameters, OffloadChoice, OffloadTo, Options, ScheduleChoice,
};
pub use order::Order;
pub use predict::SpeedOfLight;
#[cfg(feature = "language")]
pub(crate) use profile::matrices;
pub use profile::{Activations, Profile};
pub use recipe::Recipe;
pub use report::Summary;
pub use rows::Rows;
#[cfg(feature = "burn")]
pub use task::{AnyTask, TaskOn, scalar};
pub use task::{Measured, Task};
#[cfg(feature = "burn")]
pub use zero_ops::FusedBackend;
pub use zero_plan::outline;

use zero_core::alloc::PageKeeper;
use zero_core::collective::exit::end_process;
use zero_core::collective::launcher::started;
use zero_core::config::Tier;
use zero_core::offload::SwapDir;

use self::comms::CommsLog;
use self::fit::{Budget, Candidate};
pub(crate) use self::options::at_least_one;
use self::plan::{Plan, as_launched};
#[cfg(feature = "language")]
pub(crate) use self::ranks::MAX_DEADLINE;
use self::ranks::{Ranks, Stopped, with_ranks};
pub use crate::Result;
use crate::TrainError;
use crate::error::format_error;
use crate::launched::write_status;
use crate::signals::Signal;
use crate::step::EngineError;

/// A trainer of a [`Task`], configured by [`Options`], on ranks that are threads of this process or the processes that a launcher started.
#[derive(Debug, Clone, Copy)]
pub struct Trainer<'a, F> {
    integration: F,
    options: &'a Options,
    allocator: Option<&'a PageKeeper>,
}

#[cfg(all(feature = "burn", feature = "cli"))]
/// Trains `task` with the options of the command line: the main function of a program without its own options.
pub fn main<T: AnyTask>(task: &T) -> ExitCode {
    /// Train with ZeRO.
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    Trainer::new(&<Line as clap::Parser>::parse().options).main(task)
}

/// The start of a run: queries for a program that has yet to choose what to train.
pub struct Setup<'a> {
    options: &'a Options,
    budget: &'a Budget,
    ranks: &'a Ranks<'a>,
}

impl Setup<'_> {
    /// Runs `f` on the first rank of each machine and then on the others, for data that the first creates and the others
    /// find. An error on one rank is returned on every rank. Ranks that are threads of one process share the result: there
    /// it runs once.
    ///
    /// # Errors
    ///
    /// The error of `f` on this rank, or its message from another; a missed deadline.
    pub fn local_main_process_first<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        self.ranks.local_main_process_first(f)
    }

    /// Returns the reason that a model of this width does not fit into memory (and, offloaded as far as the options allow,
    /// onto a disk), or `None` if it fits. `profile` returns its profile by the rows of a micro-batch.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for invalid options.
    pub fn memory_shortfall(
        &self,
        hidden_size: Option<usize>,
        profile: &dyn Fn(usize) -> Profile,
    ) -> Result<Option<String>> {
        let profile = |micro_batch: usize| Ok(profile(micro_batch));
        let candidate = Candidate { hidden_size, profile: &profile, budget: self.budget };
        if candidate.cheapest(self.options)?.is_some() {
            return Ok(None);
        }
        let need = candidate.need(self.options)?;
        Ok(Some(format!("{}{}", need.arithmetic(), self.budget.but(&need))))
    }
}

#[cfg(feature = "burn")]
impl<'a> Trainer<'a, Burn021> {
    /// Creates a trainer with these options, on Burn 0.21.
    pub fn new(options: &'a Options) -> Self {
        Self::on(Burn021, options)
    }
}

impl<'a, F> Trainer<'a, F> {
    /// Creates a trainer with these options, on another [`Integration`].
    pub fn on(integration: F, options: &'a Options) -> Self {
        Self { integration, options, allocator: None }
    }

    /// Sets the program's allocator, if it counts allocations: memory that a step newly takes is then part of its metrics.
    #[must_use]
    pub fn allocator(self, allocator: &'a PageKeeper) -> Self {
        Self { allocator: Some(allocator), ..self }
    }

    /// Trains and returns an exit code: 0, 2 for bad input, 1 for a failed run, 128 plus the signal's number for a run that
    /// a signal ended ([`TrainError::exit_code`]). Prints the error, if any, once on standard error.
    pub fn main<T: Task>(self, task: &T) -> ExitCode
    where
        F: Integration<T>,
    {
        self.exit(|ranks| self.run_on::<T, &T>(ranks, |_| Ok(task)))
    }

    /// Like [`main`](Self::main), with a task that is created after the options are checked.
    pub fn main_with<T: Task>(self, task: impl Fn(&Setup<'_>) -> Result<T>) -> ExitCode
    where
        F: Integration<T>,
    {
        self.exit(|ranks| self.run_on::<T, T>(ranks, &task))
    }

    /// Like [`main_with`](Self::main_with). Calls `then` on rank 0 when all steps are done, with the summary if steps were left to do.
    pub fn main_then<T: Task>(
        self,
        task: impl Fn(&Setup<'_>) -> Result<T>,
        then: impl Fn(Option<&Summary>) -> Result<()>,
    ) -> ExitCode
    where
        F: Integration<T>,
    {
        self.exit(|ranks| {
            let ended = self.run_on::<T, T>(ranks, &task)?;
            if ended.signal.is_none() && ranks.is_main() && !self.options.dry_run {
                then(ended.summary.as_ref())?;
            }
            Ok(ended)
        })
    }

    /// Like [`main`](Self::main), but returns the summary or the error. There is no summary if the checkpoint to resume
    /// from has completed all steps, nor in a process that is not rank 0.
    ///
    /// # Errors
    ///
    /// [`TrainError`]; [`TrainError::Signal`] if a signal ended the run, after the checkpoint that is due is saved. While
    /// it trains, the process handles these signals.
    pub fn run<T: Task>(self, task: &T) -> Result<Option<Summary>>
    where
        F: Integration<T>,
    {
        self.run_as(|ranks| self.run_on::<T, &T>(ranks, |_| Ok(task)))
    }

    /// Like [`run`](Self::run), with a task that is created after the options are checked.
    ///
    /// # Errors
    ///
    /// Same as [`run`](Self::run).
    pub fn run_with<T: Task>(self, task: impl Fn(&Setup<'_>) -> Result<T>) -> Result<Option<Summary>>
    where
        F: Integration<T>,
    {
        self.run_as(|ranks| self.run_on::<T, T>(ranks, &task))
    }

    fn run_as(&self, body: impl Fn(&Ranks<'_>) -> Result<Ended>) -> Result<Option<Summary>> {
        let ended = with_ranks(self.options, body).map_err(|stopped| stopped.error)?;
        ended.signal.map_or(Ok(ended.summary), Err)
    }

    fn exit(&self, body: impl Fn(&Ranks<'_>) -> Result<Ended>) -> ExitCode {
        let launched = started();
        let ended = with_ranks(self.options, |ranks| {
            let ended = body(ranks)?;
            if let Some(signal) = &ended.signal {
                if ranks.is_main() {
                    eprintln!("stopped: {}", format_error(signal));
                }
                // A launcher kills the other processes when the first exits. The run is over, so a rank that is gone is no error.
                let _ = ranks.least(None);
            }
            Ok(ended)
        });
        let stopped: Stopped = match ended {
            Ok(Ended { signal: None, .. }) => return ExitCode::SUCCESS,
            Ok(Ended { signal: Some(signal), .. }) => signal.into(),
            Err(stopped) => {
                // In one write, as ranks that are processes share a terminal.
                let _ = std::io::stderr().write_all(format!("error: {}\n", format_error(&stopped.error)).as_bytes());
                stopped
            }
        };
        let code = stopped.error.exit_code();
        if let Some(launched) = launched {
            write_status(launched.rank, code, &format!("rank {}: {}", launched.rank, format_error(&stopped.error)));
            drop(stopped);
            // Not through the exit handlers of an MPI library, which may wait for a rank that is gone.
            end_process(code.into());
        }
        ExitCode::from(code)
    }

    fn run_on<T: Task, H: Borrow<T>>(&self, ranks: &Ranks<'_>, task: impl Fn(&Setup<'_>) -> Result<H>) -> Result<Ended>
    where
        F: Integration<T>,
    {
        let Options { steps, threads, log_every, eval_every, .. } = *self.options;
        let counts = [("threads", threads), ("log-every", log_every), ("eval-every", eval_every)];
        at_least_one(&[&[("steps", Some(steps))], &counts[..]].concat())?;
        ranks.quieten(self.options.out.as_deref())?;
        let options = &as_launched(self.options, ranks)?;
        self.integration.has(options.backend)?;
        let budget = &Budget::new(options, ranks)?;
        let task = task(&Setup { options, budget, ranks })?;
        let profile = |micro_batch| self.integration.profile(task.borrow(), micro_batch);
        let mut plan = Plan::new(options, (task.borrow(), &profile), budget, ranks)?;
        let unheeded = self.integration.check(&plan.run(ranks)?)?;
        ranks.agree(&plan.fingerprint())?;
        let trace = options.trace.as_deref().filter(|_| ranks.is_main());
        let comms = plan.plan.report.comms_logger.clone().filter(|_| ranks.is_main() && !options.dry_run);
        let comms = comms.map(|settings| CommsLog::new(settings, started().is_none()));
        let _trace = trace::begin(trace, comms.clone())?;
        if !options.json {
            tell(&plan);
        }
        let warnings = plan.plan.warnings.iter().map(ToString::to_string).chain(plan.checkpoints.warnings.clone());
        let warnings = warnings.chain(unheeded);
        warnings.for_each(|warning| eprintln!("warning: {warning}"));
        if options.dry_run {
            let examples = task.borrow().examples().filter(|_| !options.json && ranks.is_main());
            examples.into_iter().for_each(|examples| println!("{examples}"));
            return Ok(Ended { summary: None, signal: None });
        }
        let done = plan.checkpoints.resumed_steps();
        // A run that was killed behind its last step may not have come to all that it writes.
        let kept = |path: &Option<PathBuf>| path.as_ref().is_none_or(|path| path.exists());
        let unwritten = !(kept(&plan.save_16bit) && kept(&plan.predictions));
        let unwritten = ranks.least(ranks.is_main().then_some(unwritten.into()))? == Some(1);
        if done == plan.steps && unwritten {
            plan.save_16bit = plan.save_16bit.filter(|path| !path.exists());
        } else if done >= plan.steps {
            eprintln!("the checkpoint is at step {done} and --steps is {}: nothing is left to do", plan.steps);
            let offload = &plan.zero.offload;
            if offload.uses(Tier::Disk) {
                // Killed as it ended, it has left its swap files: opening removes them.
                drop(SwapDir::open(&offload.disk.path).map_err(EngineError::from)?);
            }
            return Ok(Ended { summary: None, signal: None });
        }
        let measured = train::train(&self.integration, task.borrow(), &plan, ranks, self.allocator)?;
        comms.iter().for_each(|log| eprintln!("{log}"));
        let signal = measured.signal.map(|signal| ended_by(signal, [done, measured.steps.number], &plan));
        if !ranks.is_main() || measured.steps.number == 0 {
            return Ok(Ended { summary: None, signal });
        }
        let summary = Summary::new(&plan, &measured);
        match options.json {
            true => tell(&serde_json::to_string(&summary).expect("a summary is plain numbers and names")),
            false => tell(&summary),
        }
        Ok(Ended { summary: Some(summary), signal })
    }
}

/// The end of a run that did not fail.
struct Ended {
    summary: Option<Summary>,
    /// [`TrainError::Signal`], if a signal ended it before its last step.
    signal: Option<TrainError>,
}

/// Prints a line on standard output. A closed output (`| head`) is no reason to stop training.
pub(crate) fn tell(line: &dyn core::fmt::Display) {
    use std::io::Write;

    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Returns the error of a run that a signal has ended, `made` steps after step `done`.
fn ended_by(signal: Signal, [done, made]: [usize; 2], plan: &Plan) -> TrainError {
    let step = done + made;
    let kept = match &plan.checkpoints.dir {
        Some(_) if made == 0 => "no step was made, and nothing was saved".to_string(),
        Some(dir) => {
            let dir = dir.display();
            format!("this step's checkpoint is in {dir}; the same command with --resume auto resumes from it")
        }
        None => "no checkpoint was saved; add --save DIR to save one".to_string(),
    };
    let told = format!("{} ended the run after step {step} of {}; {kept}", signal.name(), plan.steps);
    TrainError::Signal { told, code: signal.exit_code() }
}
