//! Disks that fail during a training run: one clear error, intact checkpoints, and no files left.
#![cfg(target_os = "linux")]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{start, trajectory, write_inputs};

struct Run(tempfile::TempDir);

impl Run {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_inputs(dir.path());
        std::fs::create_dir(dir.path().join("swap")).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn args(&self, run: &str, steps: usize) -> Vec<String> {
        let path = |name: &str| self.path(name).display().to_string();
        let out = path(run);
        [
            "train",
            "--model",
            &path("wide"),
            "--data",
            &path("rows.safetensors"),
            "--ranks",
            "2",
            "--threads",
            "1",
            "--offload",
            "all",
            "--swap",
            &path("swap"),
            "--json",
            "--steps",
            &steps.to_string(),
            "--save-every",
            "2",
            "--resume",
            "auto",
            "--out",
            &format!("{out}/out"),
            "--save",
            &format!("{out}/checkpoints"),
        ]
        .map(String::from)
        .into()
    }

    fn train(&self, run: &str, steps: usize) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.args(self.args(run, steps)).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn swap_files(&self) -> Vec<PathBuf> {
        let folders = std::fs::read_dir(self.path("swap")).unwrap().map(|entry| entry.unwrap().path());
        let files = folders.flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten());
        files.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|e| e == "swap")).collect()
    }

    fn nothing_is_left(&self) {
        assert_eq!(std::fs::read_dir(self.path("swap")).unwrap().count(), 0, "files are left below --swap");
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", stderr(output));
}

#[test]
fn a_swap_file_cut_from_outside_ends_the_run_and_the_next_goes_on() {
    let run = Run::new();
    succeeded(&run.train("unbroken", 60).output().unwrap());
    let process = start(&mut run.train("broken", 60));
    let begin = Instant::now();
    let lines = || std::fs::read_to_string(run.path("broken/out/metrics.jsonl")).map_or(0, |text| text.lines().count());
    while lines() < 6 {
        assert!(begin.elapsed() < Duration::from_secs(60), "no steps after a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
    let files = run.swap_files();
    assert_eq!(files.len(), 2, "a file for each rank: {files:?}");
    std::fs::OpenOptions::new().write(true).open(&files[1]).unwrap().set_len(0).unwrap();
    let output = process.wait_with_output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("was truncated by another process") && said.contains("last checkpoint"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    run.nothing_is_left();
    succeeded(&run.train("broken", 60).output().unwrap());
    assert_eq!(trajectory(&run.path("broken")), trajectory(&run.path("unbroken")));
    run.nothing_is_left();
}

#[test]
fn a_limit_on_the_size_of_files_is_told() {
    let run = Run::new();
    let command = [&[env!("CARGO_BIN_EXE_zero").to_string()][..], &run.args("run", 4)].concat();
    let command = command.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    // In blocks of 1024 bytes.
    let limited = format!("ulimit -f 500; exec {command}");
    let output = Command::new("bash").args(["-c", &limited]).stdout(Stdio::null()).output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("swap") && said.contains("limit") && !said.contains("panicked"), "{said}");
    run.nothing_is_left();
}

/// A tmpfs of a few MiB, if mounting is allowed.
struct Mounted(PathBuf);

impl Mounted {
    fn new(at: &Path, kib: usize) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let size = format!("size={kib}k");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "zero-test"]).arg(at).output();
        mounted.is_ok_and(|output| output.status.success()).then(|| Self(at.to_path_buf()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_disk_that_is_too_small_is_told_before_the_first_step() {
    let run = Run::new();
    let at = run.path("small");
    let Some(_mounted) = Mounted::new(&at, 512) else {
        println!("skipped: this user may not mount a tmpfs");
        return;
    };
    let mut args = run.args("run", 4);
    let swap = args.iter().position(|arg| arg == "--swap").unwrap();
    args[swap + 1] = at.display().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_zero")).args(args).output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("does not fit") && said.contains("on the disk, which has"), "{said}");
    assert!(!run.path("run/out/metrics.jsonl").exists());
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0);
}
