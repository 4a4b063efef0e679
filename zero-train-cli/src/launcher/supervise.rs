//! Runs and supervises one attempt of a job.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{LauncherError, STATUS_DIR, StopSignals};

/// Failure report of a rank on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureReport {
    /// Exit code of the rank.
    pub code: i32,
    /// Its error message.
    pub reason: String,
}

/// A process to start: a launcher or a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Command line, program first.
    pub command: Vec<OsString>,
    /// Environment variables in addition to those of this process.
    pub variables: Vec<(String, String)>,
    /// True for an MPI launcher. On SIGTERM it kills its ranks, but it forwards SIGUSR1 to them.
    pub is_launcher: bool,
}

/// Interval between checks of the processes and the ranks' reports. Signals are forwarded with at most this delay.
const POLL: Duration = Duration::from_millis(50);

/// Outcome of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Exit code of the launcher or of the first rank that failed; 128 plus the signal's number if a signal ended it.
    /// If a launcher had to be ended, the first failed rank's.
    pub code: i32,
    /// Failure reports of this machine's ranks, in rank order.
    pub failures: Vec<FailureReport>,
    /// True if a rank of this machine started.
    pub began: bool,
    /// Reason for ending processes, if any.
    pub ended: Option<Ended>,
}

/// Reason for ending a launcher or ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// They kept running after a rank had failed.
    AfterFailure,
    /// No rank of this machine started in time.
    NotBegun,
    /// A second signal arrived.
    StopSignals,
}

/// Time limits of a launcher or of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time to end after a rank of this machine fails or a second signal arrives.
    pub grace: Duration,
    /// Time until a rank of this machine has started, for jobs with ranks here.
    pub begin: Option<Duration>,
}

/// Runs a launcher or ranks until they end, and ends them if they exceed a limit: after a rank fails, the other
/// processes have `grace` to end.
///
/// The first signal of `asked` is forwarded, and the processes then have unlimited time: a rank may save. After a
/// second signal they have `grace` to end.
///
/// # Errors
///
/// [`LauncherError::Io`] if they cannot be started or watched.
pub fn supervise(processes: &[Process], limits: Limits, asked: &StopSignals) -> Result<Attempt, LauncherError> {
    let io = |action, path: &Path| {
        let path = path.to_path_buf();
        move |source| LauncherError::Io { action, path, source }
    };
    let status = tempfile::Builder::new().prefix("zero-launch-").tempdir();
    let status = status.map_err(io("create a folder in", &std::env::temp_dir()))?;
    let program = processes.first().and_then(|process| process.command.first());
    let program = Path::new(program.expect("a command line names a program"));
    let mut running = Running(Vec::new());
    for process in processes {
        let child = begin(process, status.path()).map_err(io("start", program))?;
        running.0.push((child, process.is_launcher));
    }
    let (start, mut failed_since, mut began, mut first) = (Instant::now(), None, false, None);
    let mut handed_on = false;
    loop {
        let exits = running.exits().map_err(io("wait for", program))?;
        began |= !files(status.path(), "began").is_empty();
        // Of those that ended at once, a process that a signal killed: the others ended because of it.
        let killed = exits.iter().copied().find(|&code| code > 128);
        first = first.or(killed).or(exits.into_iter().find(|&code| code != 0));
        if running.0.is_empty() {
            return Ok(Attempt { code: first.unwrap_or(0), failures: words(status.path()), began, ended: None });
        }
        if failed_since.is_none() && (first.is_some() || !words(status.path()).is_empty()) {
            failed_since = Some(Instant::now());
        }
        if !handed_on && let Some(signal) = asked.first().and_then(Signal::from_named_raw) {
            running.hand_on(signal).map_err(io("signal", program))?;
            handed_on = true;
        }
        let ended = if asked.times() > 1 {
            Ended::StopSignals
        } else if failed_since.is_some_and(|since: Instant| since.elapsed() > limits.grace) {
            Ended::AfterFailure
        } else if !handed_on && !began && limits.begin.is_some_and(|limit| start.elapsed() > limit) {
            Ended::NotBegun
        } else {
            std::thread::sleep(POLL);
            continue;
        };
        let exits = running.end(limits.grace).map_err(io("end", program))?;
        let failures = words(status.path());
        // The exit code of an ended launcher describes only its own end.
        let said = first.or(failures.first().map(|word| word.code));
        let code = said.or(exits.into_iter().find(|&code| code != 0)).unwrap_or(1);
        return Ok(Attempt { code, failures, began, ended: Some(ended) });
    }
}

fn begin(process: &Process, status: &Path) -> std::io::Result<Child> {
    let (program, arguments) = process.command.split_first().expect("a command line names a program");
    let mut builder = Command::new(program);
    // Ctrl-C on a terminal reaches only this process, which forwards it.
    builder.process_group(0);
    if std::io::stdin().is_terminal() && !process.is_launcher {
        // Background ranks would be stopped if they read the terminal.
        builder.stdin(Stdio::null());
    }
    builder.args(arguments).envs(process.variables.iter().map(|(name, value)| (name, value))).env(STATUS_DIR, status);
    // SAFETY: between fork and exec only prctl is called, which is safe there.
    unsafe {
        builder.pre_exec(|| {
            // It ends when this process does, for any reason; a launcher then ends its ranks.
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            Ok(())
        });
    }
    builder.spawn()
}

/// Running processes, each with a flag for a launcher. Dropping it kills them.
struct Running(Vec<(Child, bool)>);

impl Running {
    /// Returns the exit codes of processes that ended since the last call.
    fn exits(&mut self) -> std::io::Result<Vec<i32>> {
        let exits: Result<Vec<_>, _> = self.0.iter_mut().map(|(child, _)| child.try_wait()).collect();
        let exits = exits?;
        let mut ended = exits.iter().map(Option::is_some);
        self.0.retain(|_| ended.next() == Some(false));
        Ok(exits.into_iter().flatten().map(code).collect())
    }

    fn hand_on(&self, signal: Signal) -> std::io::Result<()> {
        for (child, is_launcher) in &self.0 {
            kill_process(Pid::from_child(child), if *is_launcher { Signal::USR1 } else { signal })?;
        }
        Ok(())
    }

    /// Sends SIGTERM, and kills the processes that are left after `grace`.
    fn end(&mut self, grace: Duration) -> std::io::Result<Vec<i32>> {
        for (child, _) in &self.0 {
            kill_process(Pid::from_child(child), Signal::TERM)?;
        }
        let (since, mut codes) = (Instant::now(), Vec::new());
        while since.elapsed() < grace && !self.0.is_empty() {
            codes.extend(self.exits()?);
            std::thread::sleep(POLL);
        }
        for (mut child, _) in self.0.drain(..) {
            child.kill()?;
            codes.push(code(child.wait()?));
        }
        Ok(codes)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn code(exit: ExitStatus) -> i32 {
    exit.code().unwrap_or_else(|| 128 + exit.signal().unwrap_or(0))
}

/// Returns the ranks' failure reports in rank order. Incomplete files are read by a later call.
fn words(dir: &Path) -> Vec<FailureReport> {
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).ok()?;
        let (code, reason) = text.split_once('\n')?;
        Some(FailureReport { code: code.parse().ok()?, reason: reason.to_string() })
    };
    files(dir, "txt").iter().filter_map(read).collect()
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let mut paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, limits: Limits) -> Attempt {
        supervise(&[shell(script)], limits, &StopSignals::never()).unwrap()
    }

    fn shell(script: &str) -> Process {
        let command = ["sh", "-c", script].map(OsString::from).to_vec();
        Process { command, variables: vec![("OF_RANKS".into(), "yes".into())], is_launcher: false }
    }

    fn grace(millis: u64) -> Limits {
        Limits { grace: Duration::from_millis(millis), begin: None }
    }

    fn word(code: i32, reason: &str) -> FailureReport {
        FailureReport { code, reason: reason.into() }
    }

    #[test]
    fn a_launchers_exit_code_is_the_attempts() {
        assert_eq!(run("exit 0", grace(1000)), Attempt { code: 0, failures: vec![], began: false, ended: None });
        assert_eq!(run("exit 75", grace(1000)).code, 75);
        assert_eq!(run("kill -9 $$", grace(1000)).code, 137);
        let script = "cd $ZERO_STATUS_DIR; touch rank-00000.began; printf '75\nsecond' >rank-00001.txt
            printf '1\nfirst' >rank-00000.txt; exit 3";
        let failures = vec![word(1, "first"), word(75, "second")];
        assert_eq!(run(script, grace(60_000)), Attempt { code: 3, failures, began: true, ended: None });
    }

    #[test]
    fn a_launcher_that_hangs_after_a_failure_is_ended() {
        let begin = Instant::now();
        let got = run("printf '75\nlost' >$ZERO_STATUS_DIR/rank-00000.txt; exec sleep 600", grace(300));
        let failures = vec![word(75, "lost")];
        assert_eq!(got, Attempt { code: 75, failures, began: false, ended: Some(Ended::AfterFailure) });
        let script = "trap '' TERM; printf '1\nlost' >$ZERO_STATUS_DIR/rank-00000.txt; while :; do sleep 0.05; done";
        assert_eq!(run(script, grace(300)).ended, Some(Ended::AfterFailure));
        assert!(begin.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_launcher_that_starts_nothing_is_ended() {
        let limits = Limits { begin: Some(Duration::from_millis(300)), ..grace(300) };
        let got = run("exec sleep 600", limits);
        assert_eq!((got.code, got.ended), (128 + 15, Some(Ended::NotBegun)));
        let got = run("touch $ZERO_STATUS_DIR/rank-00000.began; sleep 1; exit 4", limits);
        assert_eq!((got.code, got.began, got.ended), (4, true, None));
    }

    #[test]
    fn a_signal_is_handed_on_and_waited_for_and_a_second_one_ends() {
        let begin = Instant::now();
        // The ranks have begun when their files are there.
        let signalled = |script: &str, is_launcher: bool, ready: &Path, signals: &'static [i32]| {
            let asked = StopSignals::never();
            let (counted, ready) = (asked.clone(), ready.to_path_buf());
            let asking = std::thread::spawn(move || {
                for &signal in signals {
                    while !ready.exists() {
                        std::thread::sleep(POLL);
                    }
                    counted.count(signal);
                    std::thread::sleep(4 * POLL);
                }
            });
            let attempt = supervise(&[Process { is_launcher, ..shell(script) }], grace(300), &asked).unwrap();
            asking.join().unwrap();
            attempt
        };
        let dir = tempfile::tempdir().unwrap();
        let ready = |name: &str| dir.path().join(name);
        let script = |name: &str, signal: &str, then: &str| {
            let path = ready(name).display().to_string();
            format!("trap '{then}' {signal}; touch {path}; while :; do sleep 0.05; done")
        };
        // Longer than the grace of a failure, as a save may take.
        let saves = script("a", "TERM", "sleep 1; exit 143");
        let got = signalled(&saves, false, &ready("a"), &[15]);
        assert_eq!((got.code, got.ended), (143, None));
        let got = signalled(&script("b", "USR1", "exit 138"), true, &ready("b"), &[2]);
        assert_eq!((got.code, got.ended), (138, None), "an MPI launcher gets what it hands on");
        let got = signalled(&script("c", "TERM", ""), false, &ready("c"), &[15, 2]);
        assert_eq!((got.code, got.ended), (137, Some(Ended::StopSignals)));
        assert!(begin.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn what_cannot_be_started_is_told() {
        let mpirun = Process { command: vec!["/nowhere/mpirun".into()], variables: Vec::new(), is_launcher: true };
        let error = supervise(&[mpirun], grace(1000), &StopSignals::never()).unwrap_err().to_string();
        assert!(error.contains("cannot start /nowhere/mpirun"), "{error}");
    }

    #[test]
    fn ranks_end_with_the_first_that_ends_badly() {
        let begin = Instant::now();
        let all = |scripts: &[&str], limits| {
            let processes: Vec<Process> = scripts.iter().map(|script| shell(script)).collect();
            supervise(&processes, limits, &StopSignals::never()).unwrap()
        };
        let fine = Attempt { code: 0, failures: vec![], began: false, ended: None };
        assert_eq!(all(&["test $OF_RANKS = yes", "sleep 0.3"], grace(1000)), fine);
        // Those that hear of it end by themselves; the first one's code counts.
        let told = all(&["sleep 0.7; exit 1", "exit 75", "sleep 0.7"], grace(20_000));
        assert_eq!(told, Attempt { code: 75, ..fine.clone() });
        let dead = all(&["exec sleep 600", "kill -9 $$", "trap '' TERM; while :; do sleep 0.05; done"], grace(300));
        assert_eq!(dead, Attempt { code: 137, ended: Some(Ended::AfterFailure), ..fine });
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
}
