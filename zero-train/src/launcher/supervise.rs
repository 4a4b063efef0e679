//! One attempt after the other, until a job ends well or nothing is left to try.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use super::{LauncherError, STATUS_DIR};

/// What a failed rank of this machine has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// What the rank ends with.
    pub code: i32,
    /// Its error.
    pub reason: String,
}

/// How often the launcher and the ranks' words are looked at.
const POLL: Duration = Duration::from_millis(100);

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The launcher's exit code; 128 and the signal's number where a signal ended it. Where it had to be ended, the first
    /// failed rank's.
    pub code: i32,
    /// What failed ranks of this machine said, in rank order.
    pub failures: Vec<Word>,
    /// Whether a rank of this machine has begun.
    pub began: bool,
    /// Whether the launcher had to be ended, and why.
    pub ended: Option<Ended>,
}

/// Why a launcher was ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It went on after a rank had failed.
    AfterFailure,
    /// No rank of this machine had begun in time.
    NotBegun,
}

/// How long a launcher may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// To end, once a rank of this machine has failed, or it was asked to.
    pub grace: Duration,
    /// Until a rank of this machine has begun; for jobs that have ranks there.
    pub begin: Option<Duration>,
}

/// Runs a launcher's command line to its end, which it is brought to when it exceeds a limit.
///
/// # Errors
///
/// [`LauncherError::Io`] when it cannot be started or watched.
pub fn supervise(command: &[OsString], limits: Limits) -> Result<Attempt, LauncherError> {
    let io = |action, path: &Path| {
        let path = path.to_path_buf();
        move |source| LauncherError::Io { action, path, source }
    };
    let status = tempfile::Builder::new().prefix("zero-launch-").tempdir();
    let status = status.map_err(io("make a folder in", &std::env::temp_dir()))?;
    let (program, arguments) = command.split_first().expect("a command line names a program");
    let mut builder = Command::new(program);
    builder.args(arguments).env(STATUS_DIR, status.path());
    // SAFETY: between fork and exec only prctl is called, which is safe there.
    unsafe {
        builder.pre_exec(|| {
            // The launcher ends when this process does, in whatever way: it then ends its ranks.
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
            Ok(())
        });
    }
    let mut child = builder.spawn().map_err(io("start", Path::new(program)))?;
    let (start, mut failed_since, mut began) = (Instant::now(), None, false);
    loop {
        let exit = child.try_wait().map_err(io("wait for", Path::new(program)))?;
        began |= has_begun(status.path());
        if let Some(exit) = exit {
            return Ok(Attempt { code: code(exit), failures: words(status.path()), began, ended: None });
        }
        if failed_since.is_none() && !words(status.path()).is_empty() {
            failed_since = Some(Instant::now());
        }
        let ended = if failed_since.is_some_and(|since: Instant| since.elapsed() > limits.grace) {
            Ended::AfterFailure
        } else if !began && limits.begin.is_some_and(|limit| start.elapsed() > limit) {
            Ended::NotBegun
        } else {
            std::thread::sleep(POLL);
            continue;
        };
        let exit = end(&mut child, limits.grace).map_err(io("end", Path::new(program)))?;
        let failures = words(status.path());
        // The launcher's own code tells of its end only.
        let code = failures.first().map_or(if exit.success() { 1 } else { code(exit) }, |word| word.code);
        return Ok(Attempt { code, failures, began, ended: Some(ended) });
    }
}

/// Asks the launcher to end, and after `grace` does not ask any more.
fn end(child: &mut Child, grace: Duration) -> std::io::Result<ExitStatus> {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    let since = Instant::now();
    while since.elapsed() < grace {
        if let Some(exit) = child.try_wait()? {
            return Ok(exit);
        }
        std::thread::sleep(POLL);
    }
    child.kill()?;
    child.wait()
}

fn code(exit: ExitStatus) -> i32 {
    exit.code().unwrap_or_else(|| 128 + exit.signal().unwrap_or(0))
}

/// What ranks have left, in rank order. A file that is being written is looked at next time.
fn words(dir: &Path) -> Vec<Word> {
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).ok()?;
        let (code, reason) = text.split_once('\n')?;
        Some(Word { code: code.parse().ok()?, reason: reason.to_string() })
    };
    files(dir, "txt").iter().filter_map(read).collect()
}

fn has_begun(dir: &Path) -> bool {
    !files(dir, "began").is_empty()
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let mut paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect();
    paths.sort();
    paths
}

/// Tells the launcher on the same machine, if there is one that looks, that this rank has begun.
pub fn say_begun(rank: usize) {
    if let Some(dir) = std::env::var_os(STATUS_DIR) {
        // Where there is no such folder, on another machine, nobody looks.
        let _ = std::fs::write(Path::new(&dir).join(format!("rank-{rank:05}.began")), "");
    }
}

/// Leaves word of a rank's failure, and of what it ends with, for the launcher on the same machine.
pub fn leave_word(rank: usize, code: u8, reason: &str) {
    let Some(dir) = std::env::var_os(STATUS_DIR) else { return };
    let (path, partial) = (format!("rank-{rank:05}.txt"), format!("rank-{rank:05}.partial"));
    let dir = Path::new(&dir);
    // As above; a word that cannot be left is on standard error too.
    if std::fs::write(dir.join(&partial), format!("{code}\n{reason}")).is_ok() {
        let _ = std::fs::rename(dir.join(partial), dir.join(path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, limits: Limits) -> Attempt {
        let command = ["sh", "-c", script].map(OsString::from);
        supervise(&command, limits).unwrap()
    }

    fn grace(millis: u64) -> Limits {
        Limits { grace: Duration::from_millis(millis), begin: None }
    }

    fn word(code: i32, reason: &str) -> Word {
        Word { code, reason: reason.into() }
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
    fn what_cannot_be_started_is_told() {
        let error = supervise(&[OsString::from("/nowhere/mpirun")], grace(1000)).unwrap_err().to_string();
        assert!(error.contains("cannot start /nowhere/mpirun"), "{error}");
    }
}
