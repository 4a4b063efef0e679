//! The ranks of a run: threads of this process, or processes that a launcher has started, including this one.

use std::any::Any;
use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use zero_core::checkpoint::{Check, Checkpoint, Found, check_together, find_latest, find_latest_together};
use zero_core::collective::launch::LaunchOptions;
use zero_core::collective::launcher::{Start, World};
use zero_core::collective::process::{self, ProcessRun};
use zero_core::collective::{RankError, run_first};
use zero_core::{Buffer, Collective, RankFailure, StartError};

use super::Options;
use crate::config::{Config, Watchdog};
use crate::error::{Result, TrainError, io, of_ranks, wrong};
use crate::launched::notify_started;
use crate::step::EngineError;

/// Default deadline of a wait for another rank.
const DEADLINE: Duration = Duration::from_secs(600);

/// Maximum deadline, in seconds: a year.
pub(crate) const MAX_DEADLINE: f64 = 365.0 * 86_400.0;

/// The ranks of a run, as seen from this process.
pub(super) struct Ranks<'a> {
    /// This process's rank and world size, if a launcher started it as one of several.
    launched: Option<World>,
    process: Option<&'a ProcessRun>,
}

/// The exit code of bad input.
const BAD_INPUT: u8 = 2;

/// The reason that the ranks stopped. A launcher ends all processes when the first one fails: print the error before
/// dropping this. The drop waits, for a few seconds at most, until the other ranks have reached the same point.
pub(super) struct Stopped {
    pub(super) error: TrainError,
    /// Waits when dropped.
    _ending: Option<Box<dyn Any>>,
}

impl From<TrainError> for Stopped {
    fn from(error: TrainError) -> Self {
        Self { error, _ending: None }
    }
}

/// Runs `body` on this process's ranks, which depend on the launcher that started it, if any.
///
/// # Errors
///
/// The errors of `body`, of another rank, or of ranks that cannot be connected.
pub(super) fn with_ranks<T>(options: &Options, body: impl Fn(&Ranks<'_>) -> Result<T>) -> Result<T, Stopped> {
    let start = Start::from_environment().map_err(|error| TrainError::Launch(error.to_string()))?;
    let Some(world) = start.world() else { return Ok(body(&Ranks { launched: None, process: None })?) };
    let launch = launch_options(options)?;
    // What this rank itself found wrong, where another was the first to say so: the same input is wrong on all of them.
    let own: Cell<Option<TrainError>> = Cell::new(None);
    let outcome = process::run(&launch.process(), &start, |run| {
        notify_started(world.rank);
        run.warnings().iter().for_each(|warning| eprintln!("warning: {warning}"));
        let ranks = Ranks { launched: Some(world.clone()), process: Some(run) };
        body(&ranks).map_err(|error| {
            let reason = error.to_string();
            own.set(Some(error));
            reason
        })
    });
    outcome.map_err(|failed| {
        // What is wrong with the input is wrong on every rank, and each says so; all else is the first rank's to say.
        let own = own.take().filter(|own| own.exit_code() == BAD_INPUT);
        let error = own.unwrap_or_else(|| from_launch(&failed.error));
        Stopped { error, _ending: Some(Box::new(failed)) }
    })
}

/// Returns the threads, deadline and flight records of the ranks.
pub(super) fn launch_options(options: &Options) -> Result<LaunchOptions> {
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
    let (threads_per_rank, trusted_network) = (options.threads.unwrap_or(0), options.trusted_network);
    let kernel_cache = !options.no_kernel_cache;
    Ok(LaunchOptions { threads_per_rank, deadline, flight_dir, trusted_network, kernel_cache })
}

/// Converts a launch's error to this crate's.
fn from_launch(error: &zero_core::LaunchError<String>) -> TrainError {
    if let zero_core::LaunchError::Rank { failure, .. } = error
        && let RankFailure::Failed(reason) = &**failure
    {
        return TrainError::Run(reason.clone());
    }
    if let zero_core::LaunchError::Start(start) = error {
        return match &**start {
            StartError::Rendezvous(error) if error.is_transient() => TrainError::Timeout(error.to_string()),
            error @ (StartError::Rendezvous(_) | StartError::WithoutMpi { .. }) => {
                TrainError::Launch(error.to_string())
            }
            other => TrainError::Run(other.to_string()),
        };
    }
    of_ranks(error)
}

impl Ranks<'_> {
    /// Returns ranks that are threads of this process.
    #[cfg(test)]
    pub(super) fn threads() -> Self {
        Ranks { launched: None, process: None }
    }

    /// Returns this process among those of the launcher.
    pub(super) fn process(&self) -> Option<&ProcessRun> {
        self.process
    }

    /// Returns the rank and world size that the launcher gives, if there is one.
    pub(super) fn world(&self) -> Option<&World> {
        self.launched.as_ref()
    }

    /// Returns whether this process is the one that prints and writes.
    pub(super) fn is_main(&self) -> bool {
        self.launched.as_ref().is_none_or(|launched| launched.rank == 0)
    }

    /// Returns the largest number of ranks on a machine, so that all ranks decide alike; `None` for threads.
    pub(super) fn most_on_a_machine(&self) -> Option<usize> {
        let place = self.process?.comm().place();
        (0..place.nodes).map(|node| place.node_of.iter().filter(|&&of| of == node).count()).max()
    }

    /// Returns the minimum of a value over ranks, so that all of them decide alike; `None` if no rank knows it.
    pub(super) fn least(&self, value: Option<u64>) -> Result<Option<u64>> {
        let Some(process) = self.process else { return Ok(value) };
        let mine = value.unwrap_or(u64::MAX).to_le_bytes().to_vec();
        let all = process.comm().all_gather(Buffer::U8(mine))?.into_u8();
        let all = all.as_chunks::<8>().0.iter().map(|&bytes| u64::from_le_bytes(bytes));
        Ok(all.min().filter(|&least| least != u64::MAX))
    }

    /// Returns the newest valid checkpoint in `dir`; every rank checks its share of the files.
    pub(super) fn find_latest(&self, dir: &Path, check: Check) -> Result<Found> {
        let found = match self.process {
            Some(process) => find_latest_together(&**process.comm(), dir, check),
            None => find_latest(dir, check),
        };
        Ok(found.map_err(EngineError::from)?)
    }

    /// Opens the checkpoint at `path`; every rank checks its share of the files.
    pub(super) fn open(&self, path: &Path) -> Result<Checkpoint> {
        let opened = match self.process {
            Some(process) => check_together(&**process.comm(), path, Check::Sizes)
                .and_then(|problem| problem.map_or_else(|| Checkpoint::open_as_read(path), Err)),
            None => Checkpoint::open(path),
        };
        Ok(opened.map_err(EngineError::from)?)
    }

    /// Ends all ranks, before training, if one of them has a line that differs from rank 0's.
    pub(super) fn agree(&self, lines: &[String]) -> Result<()> {
        let Some(process) = self.process else { return Ok(()) };
        let compared = zero_core::collective::agree(&**process.comm(), lines)?;
        compared.map_or(Ok(()), |difference| Err(TrainError::Launch(difference.to_string())))
    }

    /// Same as [`Setup::local_main_process_first`](super::Setup::local_main_process_first).
    pub(super) fn local_main_process_first<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(process) = self.process else { return f() };
        let comm = &**process.comm();
        run_first(comm, comm.local_rank() == 0, f)?.map_err(|failed| match failed {
            RankError::Here(error) => error,
            failed => TrainError::Run(failed.to_string()),
        })
    }

    /// Redirects the output of ranks other than the first to a file per rank: the one that the launcher made, if any (`srun
    /// --output=rank-%t.log`); otherwise one in `out`. Without `out`, standard output is discarded.
    pub(super) fn quieten(&self, out: Option<&Path>) -> Result<()> {
        let Some(World { rank, variable, .. }) = self.launched.as_ref().filter(|_| !self.is_main()) else {
            return Ok(());
        };
        // An MPI launcher collects through pipes what it prints itself. torchrun's ranks may share the file of their parent.
        let own = rustix::fs::fstat(std::io::stdout())
            .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file());
        if own && *variable != "WORLD_SIZE" {
            return Ok(());
        }
        let path = match out {
            None => Path::new("/dev/null").to_path_buf(),
            Some(out) => {
                let logs = out.join("logs");
                std::fs::create_dir_all(&logs).map_err(io("create", &logs))?;
                logs.join(format!("rank-{rank:05}.log"))
            }
        };
        let io = io("write", &path);
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path).map_err(&io)?;
        rustix::stdio::dup2_stdout(&file).map_err(|error| io(error.into()))?;
        if out.is_some() {
            // Without a folder for it, errors are still printed.
            rustix::stdio::dup2_stderr(&file).map_err(|error| io(error.into()))?;
        }
        Ok(())
    }
}
