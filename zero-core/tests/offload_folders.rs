//! Folders of jobs: separate from each other, removed with their jobs, with clear errors for unusable paths.

mod offload_common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, mpsc};
use std::time::SystemTime;

use offload_common::{LIMIT, pool, small_blocks};
use zero_core::offload::{DiskError, EngineChoice, SwapDir, SwapFileOptions};

const PARENT: &str = "ZERO_DISK_TEST_PARENT";

/// Not a test: the tests below run this in child processes. It holds a folder until it is killed.
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

/// Starts a job in its own process; returns the process and its folder.
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
    fs::create_dir(parent.path().join(format!("zero-swap-{}-1-00000000000000a2", host()))).unwrap();
    // Another machine's, whose locks are not seen here.
    let other = folder(parent.path().join("zero-swap-other.host-0123abcd-1-00000000000000a2"), &["owner.lock"]);
    drop(SwapDir::open(parent.path()).unwrap());
    let mut left: Vec<_> = fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    let other = other.file_name().unwrap().to_str().unwrap();
    assert_eq!(left, [".zero-swap-new-1-2", "data", "zero-swap-link", "zero-swap-notes.txt", other]);
}

/// The name of a dead job's folder, and of a folder whose job died before it held the lock. No process has that number.
static DEAD: LazyLock<String> = LazyLock::new(|| format!("zero-swap-{}-4194305-00112233aabbccdd", host()));
static NEWBORN: LazyLock<String> = LazyLock::new(|| DEAD.replace("zero-swap-", ".zero-swap-new-"));

/// Returns the part between prefix and process in the names of this machine's jobs.
fn host() -> String {
    format!("{}-0123abcd", fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim())
}

/// Creates a folder with files that contain their names.
fn folder(path: PathBuf, files: &[&str]) -> PathBuf {
    fs::create_dir_all(&path).unwrap();
    files.iter().for_each(|name| fs::write(path.join(name), name).unwrap());
    path
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Lists everything below `path`, without following links, with the contents of files and the targets of links.
fn everything(path: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(path).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        let holds = match kind {
            _ if kind.is_dir() => "a folder".to_string(),
            _ if kind.is_file() => fs::read_to_string(&path).unwrap(),
            _ if kind.is_symlink() => format!("-> {}", fs::read_link(&path).unwrap().display()),
            _ => format!("{kind:?}"),
        };
        if kind.is_dir() {
            everything(&path, found);
        }
        found.insert(path, holds);
    }
}

/// Starts and ends a job in `parent`, and fails if the folder's contents block it.
fn start_and_end(parent: &Path) -> Vec<String> {
    let (done, ended) = mpsc::channel();
    let parent = parent.to_path_buf();
    std::thread::spawn(move || done.send(offload_common::Log::of(|| drop(SwapDir::open(&parent).unwrap())).1));
    ended.recv_timeout(LIMIT / 4).expect("a start hangs on what lies in the folder")
}

#[test]
fn hostile_folders_are_left_as_they_are_and_hang_no_start() {
    type Hostile<'a> = (&'a str, &'a dyn Fn(&Path));
    let build: [Hostile; 15] = [
        ("results, named alike", &|at| drop(folder(at.join("zero-swap-results"), &["loss.csv", "rank-00000.swap"]))),
        ("a name that is almost a job's", &|at| {
            for name in ["1-2", "017-00112233aabbccdd", "17-00112233AABBCCDD", ""] {
                folder(at.join(format!("zero-swap-{}-{name}", host())), &["owner.lock", "rank-00000.swap"]);
            }
            folder(at.join(format!("{}.bak", *DEAD)), &["owner.lock", "rank-00000.swap"]);
        }),
        ("a job's name, foreign content", &|at| drop(folder(at.join(&*DEAD), &["thesis.tex", "rank-00000.swap"]))),
        ("a job's name, a folder in it", &|at| {
            folder(at.join(&*DEAD).join("rank-00000.swap"), &["thesis.tex"]);
            folder(at.join(&*DEAD).join("data"), &["owner.lock"]);
        }),
        ("a link to a folder", &|at| {
            folder(at.join("data"), &["owner.lock", "rank-00000.swap"]);
            symlink("data", at.join(&*DEAD)).unwrap();
        }),
        ("a link to a file, and one to nothing", &|at| {
            fs::write(at.join("file"), "mine").unwrap();
            symlink("file", at.join(&*DEAD)).unwrap();
            symlink("nowhere", at.join(DEAD.replace("33aabb", "33bbbb"))).unwrap();
        }),
        ("a FIFO, and a file", &|at| {
            fifo(&at.join(&*DEAD));
            fs::write(at.join(DEAD.replace("33aabb", "33bbbb")), "mine").unwrap();
        }),
        ("a FIFO for a lock", &|at| fifo(&folder(at.join(&*DEAD), &["rank-00000.swap"]).join("owner.lock"))),
        ("a link for a lock", &|at| {
            fs::write(at.join("lock"), "").unwrap();
            symlink("../lock", folder(at.join(&*DEAD), &["rank-00000.swap"]).join("owner.lock")).unwrap();
        }),
        ("a folder for a lock", &|at| {
            drop(folder(folder(at.join(&*DEAD), &["rank-00000.swap"]).join("owner.lock"), &["a"]))
        }),
        ("links, FIFOs and notes beside a lock", &|at| {
            let dead = folder(at.join(&*DEAD), &["owner.lock", "notes.txt", "rank-0.swap", "rank-00000.swap.old"]);
            folder(at.join("data"), &["weights"]);
            symlink("../data/weights", dead.join("rank-00000.swap")).unwrap();
            symlink("../data", dead.join("rank-00001.swap")).unwrap();
            fifo(&dead.join("rank-00002.swap"));
        }),
        ("one without content that may be entered by nobody", &|at| {
            let dead = folder(at.join(&*DEAD), &["thesis.tex"]);
            fs::set_permissions(dead, fs::Permissions::from_mode(0o000)).unwrap();
        }),
        ("a name that is almost a newborn job's", &|at| {
            for name in [".zero-swap-new-results", ".zero-swap-new-", ".zero-swap-newest-1-00112233aabbccdd"] {
                let path = folder(at.join(name), &["loss.csv"]);
                fs::File::open(path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
            }
        }),
        ("an old newborn job's name, foreign content", &|at| {
            let path = folder(at.join(&*NEWBORN), &["loss.csv"]);
            fs::File::open(path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }),
        ("a link in a newborn job's place", &|at| {
            folder(at.join("data"), &["owner.lock"]);
            symlink("data", at.join(&*NEWBORN)).unwrap();
        }),
    ];
    for (what, build) in build {
        let parent = tempfile::tempdir().unwrap();
        build(parent.path());
        let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
        everything(parent.path(), &mut before);
        // One that a job did leave, so that it is seen that there is a sweep.
        let left = folder(
            parent.path().join(format!("zero-swap-{}-4194306-ffeeddccbbaa9988", host())),
            &["owner.lock", "rank-00001.swap"],
        );
        start_and_end(parent.path());
        assert!(!left.exists(), "{what}: what a dead job left stays");
        everything(parent.path(), &mut after);
        assert_eq!(after, before, "{what}");
    }
}

#[test]
fn what_else_lies_in_a_jobs_folder_stays_and_is_told() {
    let parent = tempfile::tempdir().unwrap();
    let dead = folder(parent.path().join(&*DEAD), &["owner.lock", "rank-00000.swap", "rank-00001.swap", "notes.txt"]);
    let log = start_and_end(parent.path());
    // The job is dead, so its own files go.
    assert_eq!(fs::read_to_string(dead.join("notes.txt")).unwrap(), "notes.txt");
    assert!(!dead.join("rank-00000.swap").exists() && !dead.join("rank-00001.swap").exists());
    assert!(
        log.iter().any(|line| line.contains("WARN") && line.contains(&*DEAD) && line.contains("notes.txt")),
        "{log:?}"
    );
    // As in the folder of a job that ends.
    let job = SwapDir::open(parent.path()).unwrap();
    let file = job.create_file(0, &SwapFileOptions::default()).unwrap();
    let path = job.path().to_path_buf();
    folder(path.join("results"), &["loss.csv"]);
    drop((job, file));
    assert_eq!(fs::read_to_string(path.join("results/loss.csv")).unwrap(), "loss.csv");
    assert!(!path.join("rank-00000.swap").exists());
}

#[test]
fn a_living_jobs_folder_in_a_folder_named_alike_stays() {
    for name in ["zero-swap-A", &DEAD] {
        let scratch = tempfile::tempdir().unwrap();
        let (mut living, alive) = start_job(&folder(scratch.path().join(name), &[]));
        start_and_end(scratch.path());
        let there = alive.join("rank-00000.swap").exists();
        living.kill().unwrap();
        living.wait().unwrap();
        assert!(there, "{}", alive.display());
    }
}

/// Not a test: the test below runs this as another user.
#[test]
#[ignore = "run by another test"]
fn child_starts_and_ends() {
    let Some(parent) = std::env::var_os(PARENT) else { return };
    start_and_end(Path::new(&parent));
}

#[test]
fn another_users_folder_stays() {
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can make folders of two users");
        return;
    }
    const NOBODY: u32 = 65534;
    let parent = tempfile::tempdir().unwrap();
    fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let shown = folder(parent.path().join(&*DEAD), &["owner.lock", "rank-00000.swap"]);
    let closed = folder(parent.path().join(DEAD.replace("33aabb", "33bbbb")), &["owner.lock", "rank-00000.swap"]);
    let waiting = folder(parent.path().join(DEAD.replace("33aabb", "33ccbb")), &["rank-00000.swap"]);
    fifo(&waiting.join("owner.lock"));
    let hand_over = |owner| {
        for folder in [&shown, &closed, &waiting] {
            for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).chain([folder.clone()]) {
                std::os::unix::fs::lchown(path, Some(owner), Some(owner)).unwrap();
            }
        }
    };
    let all_there = || [&shown, &closed, &waiting].iter().all(|folder| folder.join("rank-00000.swap").exists());
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    // Nobody's, and root starts.
    hand_over(NOBODY);
    start_and_end(parent.path());
    assert!(all_there());
    // Root's, and nobody starts: in a program of its own, which nobody may not read where it was built.
    hand_over(0);
    let program = parent.path().join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let run = || {
        let mut command = Command::new(&program);
        command.args(["child_starts_and_ends", "--exact", "--ignored"]).env(PARENT, parent.path());
        command.uid(NOBODY).gid(NOBODY).current_dir("/").output().unwrap()
    };
    let outcome = run();
    assert!(outcome.status.success(), "{outcome:?}");
    assert!(all_there());
    // And a folder of nobody's own that nobody may not enter, beside one that goes.
    std::os::unix::fs::chown(&closed, Some(NOBODY), Some(NOBODY)).unwrap();
    let own = folder(parent.path().join(DEAD.replace("33aabb", "33ddbb")), &["owner.lock"]);
    for path in [own.join("owner.lock"), own.clone()] {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let outcome = run();
    assert!(outcome.status.success(), "{outcome:?}");
    assert!(all_there() && !own.exists());
    assert_eq!(fs::metadata(&shown).unwrap().uid(), 0);
}

#[test]
fn a_path_that_will_not_do_is_refused_with_what_to_change() {
    let parent = tempfile::tempdir().unwrap();
    let missing = SwapDir::open(&parent.path().join("nvme0")).unwrap_err();
    assert!(matches!(missing, DiskError::Missing { .. }));
    assert!(missing.to_string().contains("create it on the disk to offload to, or correct nvme_path"));
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

/// A mounted file system, unmounted on drop.
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

/// Not a test: run in its own process, with limited file sizes.
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
        error.contains("would grow to 4.0 MiB, above the limit of 3.0 MiB per file: raise the limit (ulimit -f)"),
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
