//! One attempt after the other, until a job ends well or nothing is left to try.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use super::{LauncherError, STATUS_DIR};

/// How often the launcher and the ranks' words are looked at.
const POLL: Duration = Duration::from_millis(100);

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The launcher's exit code; 128 and the signal's number where a signal ended it.
    pub code: i32,
    /// What failed ranks of this machine said, in rank order.
    pub failures: Vec<String>,
    /// Whether the launcher had to be ended, because it went on after a rank had failed.
    pub ended: bool,
}

/// Runs a launcher's command line to its end. Once a rank of this machine has said that it failed, the launcher has `grace` to
/// end; then it is ended.
///
/// # Errors
///
/// [`LauncherError::Io`] when it cannot be started or watched.
pub fn supervise(command: &[OsString], grace: Duration) -> Result<Attempt, LauncherError> {
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
    let mut failed_since = None;
    loop {
        if let Some(exit) = child.try_wait().map_err(io("wait for", Path::new(program)))? {
            return Ok(Attempt { code: code(exit), failures: words(status.path()), ended: false });
        }
        if failed_since.is_none() && !words(status.path()).is_empty() {
            failed_since = Some(Instant::now());
        }
        if failed_since.is_some_and(|since: Instant| since.elapsed() > grace) {
            let exit = end(&mut child, grace).map_err(io("end", Path::new(program)))?;
            // What it would have said had it been able to: a rank failed.
            let code = if exit.success() { 1 } else { code(exit) };
            return Ok(Attempt { code, failures: words(status.path()), ended: true });
        }
        std::thread::sleep(POLL);
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
fn words(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.path());
    let mut paths: Vec<_> = names.filter(|path| path.extension().is_some_and(|extension| extension == "txt")).collect();
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect()
}

/// Leaves word of a rank's failure for the launcher on the same machine, if there is one that looks.
pub fn leave_word(rank: usize, reason: &str) {
    let Some(dir) = std::env::var_os(STATUS_DIR) else { return };
    let (path, partial) = (format!("rank-{rank:05}.txt"), format!("rank-{rank:05}.partial"));
    let dir = Path::new(&dir);
    // Where there is no such folder, on another machine, nobody looks; a word that cannot be left is on standard error too.
    if std::fs::write(dir.join(&partial), reason).is_ok() {
        let _ = std::fs::rename(dir.join(partial), dir.join(path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, grace_ms: u64) -> Attempt {
        let command = ["sh", "-c", script].map(OsString::from);
        supervise(&command, Duration::from_millis(grace_ms)).unwrap()
    }

    #[test]
    fn a_launchers_exit_code_is_the_attempts() {
        assert_eq!(run("exit 0", 1000), Attempt { code: 0, failures: vec![], ended: false });
        assert_eq!(run("exit 75", 1000).code, 75);
        assert_eq!(run("kill -9 $$", 1000).code, 137);
        let script =
            "printf second >$ZERO_STATUS_DIR/rank-00001.txt; printf first >$ZERO_STATUS_DIR/rank-00000.txt; exit 3";
        assert_eq!(
            run(script, 60_000),
            Attempt { code: 3, failures: vec!["first".into(), "second".into()], ended: false }
        );
    }

    #[test]
    fn a_launcher_that_hangs_after_a_failure_is_ended() {
        let begin = Instant::now();
        let got = run("printf lost >$ZERO_STATUS_DIR/rank-00000.txt; exec sleep 600", 300);
        assert_eq!(got, Attempt { code: 128 + 15, failures: vec!["lost".into()], ended: true });
        let got = run("trap '' TERM; printf lost >$ZERO_STATUS_DIR/rank-00000.txt; while :; do sleep 0.05; done", 300);
        assert_eq!((got.code, got.ended), (128 + 9, true));
        assert!(begin.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn what_cannot_be_started_is_told() {
        let error = supervise(&[OsString::from("/nowhere/mpirun")], Duration::from_secs(1)).unwrap_err().to_string();
        assert!(error.contains("cannot start /nowhere/mpirun"), "{error}");
    }
}
