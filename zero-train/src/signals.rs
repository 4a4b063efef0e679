//! Handling of SIGINT, SIGTERM, SIGHUP (when a terminal closes), and SIGUSR1 and SIGUSR2 (by which Slurm and submitit
//! announce the time limit), in a run and in a launcher.
//!
//! While a run trains, the first signal asks its ranks to end after the current step or the current batch of an evaluation,
//! and a second one ends the process at once. At other times signals have their default effect. A signal may reach only
//! some ranks, at any moment: each rank shares the signal it received along with the figures that ranks exchange at the end
//! of a step, so that all ranks decide alike.
//!
//! The handler runs on any thread, at any point: it uses only atomics, a clock, `write` and `_exit`.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::low_level::{emulate_default_handler, exit, register, signal_name};

/// Milliseconds within which more signals count as one: some reach every process of a job, and a launcher then forwards its own.
const ECHO_MS: u64 = 400;

/// Polling interval of a wait that a signal ends.
const POLL: Duration = Duration::from_millis(50);

/// Signals that end a run after its current step.
pub const SIGNALS: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

/// Number of runs that train in this process.
static TRAINING: AtomicUsize = AtomicUsize::new(0);

/// The first signal's number, and from bit 8 on its time, in milliseconds since [`BEGIN`]; 0 for none.
static FIRST: AtomicU64 = AtomicU64::new(0);

/// True if this process prints a message when it receives a signal.
static TELLS: AtomicBool = AtomicBool::new(false);

static BEGIN: OnceLock<Instant> = OnceLock::new();

/// A signal that asks a run to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signal(i32);

impl Signal {
    /// Returns the signal that this process has received, as a number that ranks exchange: 0 for none.
    pub(crate) fn asked() -> f64 {
        (FIRST.load(Ordering::Relaxed) & 0xff) as f64
    }

    /// Returns the signal of the first rank that has received one, given each rank's number.
    pub(crate) fn of_ranks(mut asked: impl Iterator<Item = f64>) -> Option<Self> {
        asked.find(|&number| number > 0.0).map(|number| Self(number as i32))
    }

    /// Returns the name that shells use.
    pub(crate) fn name(self) -> &'static str {
        signal_name(self.0).unwrap_or("a signal")
    }

    /// Returns the exit code that a shell reports for a process ended by this signal.
    pub(crate) fn exit_code(self) -> u8 {
        128 + self.0 as u8
    }
}

/// While it exists, signals ask the run to end and do not end the process.
pub(crate) struct Watch(());

impl Watch {
    /// Installs the handlers. With `tells`, the process prints a message when it receives a signal.
    ///
    /// # Errors
    ///
    /// The system's error if it accepts no handler.
    pub(crate) fn begin(tells: bool) -> std::io::Result<Self> {
        static HANDLERS: OnceLock<Result<(), i32>> = OnceLock::new();
        let registered = HANDLERS.get_or_init(|| {
            BEGIN.get_or_init(Instant::now);
            // A file that may not grow is an error of what writes it, and not the end of the process.
            // SAFETY: the handler does nothing.
            let unheeded = unsafe { register(SIGXFSZ, || ()) };
            unheeded.map_err(|error| error.raw_os_error().unwrap_or(0))?;
            SIGNALS.into_iter().filter(|&signal| !is_ignored(signal)).try_for_each(|signal| {
                // SAFETY: `on` does only what a handler may do, see there.
                let handler = unsafe { register(signal, move || on(signal)) };
                handler.map(drop).map_err(|error| error.raw_os_error().unwrap_or(0))
            })
        });
        registered.map_err(std::io::Error::from_raw_os_error)?;
        if TRAINING.fetch_add(1, Ordering::SeqCst) == 0 {
            FIRST.store(0, Ordering::SeqCst);
        }
        TELLS.store(tells, Ordering::SeqCst);
        Ok(Self(()))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        TRAINING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns whether this process was started with the signal ignored, as a shell does with SIGINT for a script's background jobs.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask >> (signal - 1) & 1 == 1))
}

/// Signals that ask a launcher to end the processes it has started, counted from [`StopSignals::watch`] on.
#[derive(Debug, Clone)]
pub struct StopSignals {
    /// Number of the first signal.
    first: Arc<AtomicUsize>,
    times: Arc<AtomicUsize>,
}

impl StopSignals {
    /// Handles SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2.
    ///
    /// # Errors
    ///
    /// The system's error if it accepts no handler.
    pub fn watch() -> std::io::Result<Self> {
        let asked = Self::never();
        for signal in SIGNALS.into_iter().filter(|&signal| !is_ignored(signal)) {
            let counted = asked.clone();
            // SAFETY: the handler touches atomics only.
            unsafe { register(signal, move || counted.count(signal)) }?;
        }
        Ok(asked)
    }

    /// Creates an instance that handles no signals.
    pub fn never() -> Self {
        Self { first: Arc::default(), times: Arc::default() }
    }

    /// Counts a signal, as the handler does.
    pub fn count(&self, signal: i32) {
        // What is there already stays.
        let _ = self.first.compare_exchange(0, signal as usize, Ordering::SeqCst, Ordering::SeqCst);
        self.times.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the first signal's number.
    pub fn first(&self) -> Option<i32> {
        Some(self.first.load(Ordering::SeqCst) as i32).filter(|&signal| signal != 0)
    }

    /// Returns the number of signals received.
    pub fn times(&self) -> usize {
        self.times.load(Ordering::SeqCst)
    }

    /// Sleeps for `time`, or until a signal is received.
    pub fn sleep(&self, time: Duration) {
        let since = Instant::now();
        while self.first().is_none() && since.elapsed() < time {
            std::thread::sleep(POLL.min(time));
        }
    }
}

/// The handler. It takes no lock and allocates no memory: `BEGIN` is set before the handler is registered, and every system
/// function that it calls is async-signal-safe.
fn on(signal: i32) {
    if TRAINING.load(Ordering::SeqCst) == 0 {
        // It does not fail for signals that there are.
        let _ = emulate_default_handler(signal);
        return;
    }
    let now = BEGIN.get().map_or(0, |begin| begin.elapsed().as_millis() as u64);
    match FIRST.compare_exchange(0, now << 8 | signal as u64, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) if TELLS.load(Ordering::SeqCst) => {
            let name = Signal(signal).name().as_bytes();
            // Who cannot be written to any more need not know.
            let parts: [&[u8]; 3] = [b"\n", name, b": stopping after this step; a second signal stops immediately\n"];
            for part in parts {
                let _ = rustix::io::write(rustix::stdio::stderr(), part);
            }
        }
        Ok(_) => {}
        Err(first) if now.saturating_sub(first >> 8) > ECHO_MS => exit(128 + signal),
        Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_ranks_signal_is_all_ranks_signal() {
        assert_eq!(Signal::of_ranks([0.0, 0.0].into_iter()), None);
        let asked = Signal::of_ranks([0.0, f64::from(SIGTERM), f64::from(SIGINT)].into_iter()).unwrap();
        assert_eq!((asked.name(), asked.exit_code()), ("SIGTERM", 143));
        let codes = [SIGINT, SIGUSR1].map(|signal| Signal(signal).exit_code());
        assert_eq!(codes, [130, 138]);
    }
}
