//! Runs cases of a test binary as ranks, under `mpirun` or with torchrun's variables: the binary starts itself with the
//! case's name in its environment.

#[path = "../common/port.rs"]
mod port;

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The environment variables that make a process a rank of a case.
const CASE: &str = "ZERO_PROCESS_TEST_CASE";
const FOLDER: &str = "ZERO_PROCESS_TEST_FOLDER";

/// Returns the case that this process is to run, and its folder, if it is a rank.
pub fn rank_of() -> Option<(String, PathBuf)> {
    Some((std::env::var(CASE).ok()?, std::env::var_os(FOLDER)?.into()))
}

/// The link between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)] // Each binary tests one.
pub enum LinkUnderTest {
    Mpi,
    Sockets,
}

/// The result of a launch.
#[derive(Debug)]
pub struct Launched {
    /// The exit code of mpirun, or of the lowest rank whose code is not 0; none if a signal ended it.
    pub code: Option<i32>,
    /// The output of all ranks, and of mpirun.
    pub output: String,
    /// The note of each rank that has written one.
    pub notes: Vec<Option<String>>,
    pub took: Duration,
    pub folder: tempfile::TempDir,
}

impl Launched {
    pub fn note(&self, rank: usize) -> &str {
        self.notes[rank].as_deref().unwrap_or_else(|| panic!("rank {rank} has noted nothing: {}", self.output))
    }

    /// Asserts that every rank has noted "ok" and ended without an error.
    pub fn assert_ok(&self) {
        assert_eq!(self.code, Some(0), "{:?}\n{}", self.notes, self.output);
        for rank in 0..self.notes.len() {
            assert_eq!(self.note(rank), "ok", "{}", self.output);
        }
    }

    pub fn flights(&self) -> Vec<PathBuf> {
        (0..self.notes.len())
            .map(|rank| self.folder.path().join(format!("flight-rank-{rank}.json")))
            .filter(|path| path.exists())
            .collect()
    }
}

/// Writes a rank's note to the test that started it.
pub fn note(folder: &Path, rank: usize, text: &str) {
    std::fs::write(folder.join(format!("note-{rank}")), text).expect("the test's folder can be written");
}

/// Starts this binary as `ranks` ranks of a case, with a time limit, and leaves no process behind.
///
/// `rank` is the name of the test that runs a rank of the case.
pub fn launch(
    (link, rank): (LinkUnderTest, &str),
    case: &str,
    ranks: usize,
    limit: Duration,
    meanwhile: impl FnOnce(&Path),
) -> Launched {
    // Two cores: one launch at a time.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let begin = Instant::now();
    let commands = match link {
        LinkUnderTest::Mpi => vec![under_mpirun(ranks)],
        LinkUnderTest::Sockets => by_variables(ranks),
    };
    let mut children = Vec::new();
    let mut readers = Vec::new();
    for mut command in commands {
        let mut child = command
            .args(["--exact", rank, "--nocapture", "--test-threads", "1"])
            .env(CASE, case)
            .env(FOLDER, folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("the launcher can be started: install openmpi-bin");
        readers.push(read(child.stdout.take().unwrap()));
        readers.push(read(child.stderr.take().unwrap()));
        children.push(child);
    }
    meanwhile(folder.path());
    let overdue = !ended(&mut children, begin + limit, |child| is_stopped(child.id()));
    if overdue {
        children.iter().for_each(|child| signal(child.id(), libc::SIGTERM));
        ended(&mut children, Instant::now() + Duration::from_secs(2), |_| false);
    }
    let took = begin.elapsed();
    let mut codes = Vec::new();
    for child in &mut children {
        // One that is stopped, or overdue.
        let _ = child.kill();
        codes.push(child.wait().unwrap().code());
    }
    // What was started has ended; a rank that is still there is a failure, and must not stay.
    let mut stayed = Vec::new();
    for rank in 0..ranks {
        if let Some(pid) = pid(folder.path(), rank)
            && !gone(pid, Duration::from_secs(3))
        {
            signal(pid, libc::SIGKILL);
            stayed.push(rank);
        }
    }
    let output: Vec<String> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
    let output = output.join("\n");
    let notes =
        (0..ranks).map(|rank| std::fs::read_to_string(folder.path().join(format!("note-{rank}"))).ok()).collect();
    assert!(!overdue, "case {case} with {ranks} ranks took longer than {limit:?}: {notes:?}\n{output}");
    assert!(stayed.is_empty(), "rank(s) {stayed:?} outlived their launcher ({codes:?}): {output}");
    let code = codes.iter().copied().find(|code| code.is_some_and(|code| code != 0)).unwrap_or(codes[0]);
    Launched { code, output, notes, took, folder }
}

/// Waits until all processes have ended, except for excused ones; returns whether they ended in time.
fn ended(children: &mut [Child], until: Instant, excused: impl Fn(&Child) -> bool) -> bool {
    loop {
        let runs = |child: &mut Child| child.try_wait().unwrap().is_none();
        let running: Vec<bool> = children.iter_mut().map(runs).collect();
        let awaited = children.iter().zip(&running).filter(|(child, running)| **running && !excused(child)).count();
        if awaited == 0 {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn read(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = from.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}

fn under_mpirun(ranks: usize) -> Command {
    let mut command = Command::new(mpirun());
    if is_open_mpi() {
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output"]);
    }
    command.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    command
}

/// Returns commands that start the ranks with torchrun's environment variables.
fn by_variables(ranks: usize) -> Vec<Command> {
    let port = port::free_port().to_string();
    let rank = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)];
        command.envs(numbers.map(|(name, number)| (name, number.to_string())));
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port);
        command
    };
    (0..ranks).map(rank).collect()
}

fn is_stopped(pid: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit(')').next().is_some_and(|rest| rest.trim().starts_with('T'))
}

/// Returns the launcher of the MPI library that this was built with.
fn mpirun() -> std::ffi::OsString {
    std::env::var_os("ZERO_TEST_MPIRUN").unwrap_or_else(|| "mpirun".into())
}

fn is_open_mpi() -> bool {
    let version = Command::new(mpirun()).arg("--version").output();
    version.is_ok_and(|version| String::from_utf8_lossy(&version.stdout).contains("Open MPI"))
}

/// Records the process id of a rank.
pub fn note_pid(folder: &Path, rank: usize) {
    std::fs::write(folder.join(format!("pid-{rank}")), std::process::id().to_string()).unwrap();
}

/// Returns the process id of a rank, once it is recorded.
pub fn pid(folder: &Path, rank: usize) -> Option<u32> {
    std::fs::read_to_string(folder.join(format!("pid-{rank}"))).ok()?.parse().ok()
}

pub fn signal(pid: u32, signal: i32) {
    // SAFETY: sends a signal to a process that this test has started.
    unsafe { libc::kill(pid as i32, signal) };
}

fn gone(pid: u32, within: Duration) -> bool {
    let end = Instant::now() + within;
    loop {
        // A process whose parent has not fetched its end counts as gone.
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let running = state.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim().starts_with('Z'));
        if !running {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a file that a rank makes.
pub fn await_file(path: &Path) {
    let end = Instant::now() + Duration::from_secs(20);
    while !path.exists() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}
