//! Folders of jobs: apart from each other, gone with their jobs, and clear about what is wrong with a path.

mod offload_common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use offload_common::{LIMIT, pool, small_blocks};
use zero_core::offload::{DiskError, EngineChoice, SwapDir, SwapFileOptions};

const PARENT: &str = "ZERO_DISK_TEST_PARENT";

/// Not a test: what the child processes of the tests below run. It holds a folder until it is killed.
#[test]
#[ignore = "run by other tests"]
fn child_holds_a_folder() {
    let Some(parent) = std::env::var_os(PARENT) else { return };
    let dir = SwapDir::open(Path::new(&parent)).unwrap();
    let file = dir.create_file(0, &SwapFileOptions::default()).unwrap();
    file.require(1 << 20).unwrap();
    println!("holds {}", dir.path().display());
    std::thread::sleep(LIMIT * 10);
}

/// A job in a process of its own, and its folder.
fn start_job(parent: &Path) -> (Child, PathBuf) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child_holds_a_folder", "--exact", "--ignored", "--nocapture"])
        .env(PARENT, parent)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let holds = lines.map(Result::unwrap).find_map(|line| line.split_once("holds ").map(|(_, path)| path.into()));
    (child, holds.expect("the child says which folder it holds"))
}

fn entries(parent: &Path) -> usize {
    fs::read_dir(parent).unwrap().count()
}

#[test]
fn a_killed_jobs_folder_is_removed_by_the_next_job_and_a_living_ones_is_not() {
    let parent = tempfile::tempdir().unwrap();
    let (mut killed, dead) = start_job(parent.path());
    let (mut living, alive) = start_job(parent.path());
    assert_ne!(dead, alive);
    assert!(dead.exists() && alive.exists());
    // SIGKILL.
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(dead.join("rank-00000.swap").exists());
    let next = SwapDir::open(parent.path()).unwrap();
    assert!(!dead.exists());
    assert!(alive.join("rank-00000.swap").exists() && next.path().exists());
    living.kill().unwrap();
    living.wait().unwrap();
    drop(next);
    drop(SwapDir::open(parent.path()).unwrap());
    assert_eq!(entries(parent.path()), 0);
}

#[test]
fn two_jobs_in_one_parent_do_not_share_data() {
    let parent = tempfile::tempdir().unwrap();
    let jobs = [SwapDir::open(parent.path()).unwrap(), SwapDir::open(parent.path()).unwrap()];
    let files = jobs.each_ref().map(|job| job.create_file(0, &small_blocks(EngineChoice::Auto, true)).unwrap());
    let pool = pool(1, 50_000);
    let regions = files.each_ref().map(|file| file.alloc(50_000).unwrap());
    for (fill, (file, region)) in files.iter().zip(regions).enumerate() {
        let mut buffer = pool.take(LIMIT).unwrap();
        buffer.bytes_mut().fill(fill as u8);
        drop(file.write(region, buffer).unwrap());
    }
    for (fill, (file, region)) in files.iter().zip(regions).enumerate() {
        let buffer = file.read(region, pool.take(LIMIT).unwrap()).unwrap().wait(LIMIT).unwrap();
        assert!(buffer.bytes().iter().all(|byte| *byte == fill as u8));
    }
    assert_eq!(entries(parent.path()), 2);
    drop((jobs, files));
    assert_eq!(entries(parent.path()), 0);
}

#[test]
fn a_folder_is_gone_after_a_panic() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().to_path_buf();
    let outcome = std::thread::spawn(move || {
        let dir = SwapDir::open(&path).unwrap();
        let file = dir.create_file(3, &small_blocks(EngineChoice::Auto, true)).unwrap();
        let region = file.alloc(100_000).unwrap();
        let _ticket = file.write(region, pool(1, 100_000).take(LIMIT).unwrap()).unwrap();
        panic!("a test's panic, in training");
    });
    assert!(outcome.join().is_err());
    assert_eq!(entries(parent.path()), 0);
}

#[test]
fn what_is_no_job_of_ours_is_left_alone() {
    let parent = tempfile::tempdir().unwrap();
    fs::write(parent.path().join("zero-swap-notes.txt"), "mine").unwrap();
    fs::create_dir(parent.path().join("data")).unwrap();
    std::os::unix::fs::symlink(parent.path().join("data"), parent.path().join("zero-swap-link")).unwrap();
    // A folder between its creation and its lock.
    fs::create_dir(parent.path().join(".zero-swap-new-1-2")).unwrap();
    // What is left of a folder that was being removed.
    fs::create_dir(parent.path().join("zero-swap-1-2")).unwrap();
    drop(SwapDir::open(parent.path()).unwrap());
    let mut left: Vec<_> = fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".zero-swap-new-1-2", "data", "zero-swap-link", "zero-swap-notes.txt"]);
}

#[test]
fn a_path_that_will_not_do_is_refused_with_what_to_change() {
    let parent = tempfile::tempdir().unwrap();
    let missing = SwapDir::open(&parent.path().join("nvme0")).unwrap_err();
    assert!(matches!(missing, DiskError::Missing { .. }));
    assert!(missing.to_string().contains("create it on the disk that is to be used, or correct nvme_path"));
    let file = parent.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(SwapDir::open(&file), Err(DiskError::NotAFolder { .. })));
    assert!(matches!(SwapDir::open(&file.join("below")), Err(DiskError::NotAFolder { .. })));
    // /proc takes no folders, whoever asks.
    let refused = SwapDir::open(Path::new("/proc/self")).unwrap_err().to_string();
    assert!(refused.contains("/proc/self"), "{refused}");
}

#[test]
fn a_read_only_disk_is_named() {
    let parent = tempfile::tempdir().unwrap();
    let mounted = Mount::tmpfs(parent.path(), "ro,size=1m");
    if mounted.is_none() {
        eprintln!("skipped: this user may not mount");
        return;
    }
    let error = SwapDir::open(parent.path()).unwrap_err();
    assert!(matches!(error, DiskError::NotWritable { .. }), "{error}");
    assert!(error.to_string().contains("Read-only file system"), "{error}");
}

/// A file system, until dropped.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, options: &str) -> Option<Self> {
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", options, "zero-disk-test"]).arg(at).status();
        status.is_ok_and(|status| status.success()).then(|| Self(at.to_path_buf()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Processes that other tests are starting have this one's files until they are started.
        let unmount = || Command::new("umount").arg(&self.0).status().unwrap().success();
        assert!((0..50).any(|_| unmount() || {
            std::thread::sleep(LIMIT / 600);
            false
        }));
    }
}

#[test]
fn a_disk_without_room_is_named_before_the_first_step() {
    let parent = tempfile::tempdir().unwrap();
    let dir = SwapDir::open(parent.path()).unwrap();
    let file = dir.create_file(0, &SwapFileOptions::default()).unwrap();
    for error in [dir.require(1 << 60).unwrap_err(), file.require(1 << 60).unwrap_err()] {
        let DiskError::NoSpace { needed_bytes, free_bytes, .. } = error else { panic!("{error}") };
        assert!(needed_bytes == 1 << 60 && free_bytes > 0 && free_bytes < 1 << 60);
        assert!(error.to_string().starts_with("no space for 1073741824.00 GiB more in "), "{error}");
        assert!(error.to_string().contains("set nvme_path to a folder on a larger disk"));
    }
    // What is required is taken from the disk at once, and allocated without growing.
    file.require(10_000_000).unwrap();
    let reserved = file.reserved_bytes();
    assert!(reserved >= 10_000_000);
    let on_disk = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(file.path()).unwrap()) * 512;
    assert!(on_disk >= 10_000_000, "{on_disk} bytes on the disk");
    file.require(5_000_000).unwrap();
    file.alloc(9_999_000).unwrap();
    assert_eq!(file.reserved_bytes(), reserved);
}

#[test]
fn a_disk_that_is_full_is_named() {
    let parent = tempfile::tempdir().unwrap();
    let Some(_mounted) = Mount::tmpfs(parent.path(), "size=8m") else {
        eprintln!("skipped: this user may not mount");
        return;
    };
    let dir = SwapDir::open(parent.path()).unwrap();
    let (file, log) = offload_common::Log::of(|| dir.create_file(0, &small_blocks(EngineChoice::Auto, true)).unwrap());
    assert!(log.iter().any(|line| line.contains("is kept in memory (tmpfs)")), "{log:?}");
    let pool = pool(1, 1 << 20);
    let mut regions = Vec::new();
    let error = loop {
        match file.alloc(1 << 20) {
            Ok(region) => regions.push(region),
            Err(error) => break error,
        }
    };
    assert!((5..=8).contains(&regions.len()), "{} regions", regions.len());
    assert!(matches!(error, DiskError::NoSpace { needed_bytes: 1_048_576, .. }), "{error}");
    assert!(file.require(1 << 22).is_err());
    // What was allocated can be used, and what is freed be allocated.
    for (fill, region) in regions.iter().enumerate() {
        let mut buffer = pool.take(LIMIT).unwrap();
        buffer.bytes_mut().fill(fill as u8);
        let buffer = file.write(*region, buffer).unwrap().wait(LIMIT).unwrap();
        let buffer = file.read(*region, buffer).unwrap().wait(LIMIT).unwrap();
        assert!(buffer.bytes().iter().all(|byte| *byte == fill as u8));
    }
    let last = regions.pop().unwrap();
    file.free(last).unwrap();
    file.alloc(1 << 20).unwrap();
}

/// Not a test: run in a process of its own, whose files are limited.
#[test]
#[ignore = "run by another test"]
fn child_with_limited_files() {
    if std::env::var_os(PARENT).is_none() {
        return;
    }
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::Fsize, Rlimit { current: Some(3 << 20), maximum: Some(3 << 20) }).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let dir = SwapDir::open(parent.path()).unwrap();
    let file = dir.create_file(0, &SwapFileOptions::default()).unwrap();
    file.alloc(2 << 20).unwrap();
    let error = file.alloc(2 << 20).unwrap_err().to_string();
    assert!(
        error.contains("would have 4.0 MiB, a process may have files of 3.0 MiB: raise the limit (ulimit -f)"),
        "{error}"
    );
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_not_a_signal() {
    let outcome = Command::new(std::env::current_exe().unwrap())
        .args(["child_with_limited_files", "--exact", "--ignored"])
        .env(PARENT, "")
        .output()
        .unwrap();
    assert!(outcome.status.success(), "{outcome:?}");
}
