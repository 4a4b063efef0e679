//! Saves that fail: the error is every rank's and says which rank and why; the checkpoint before is what is found.
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use common::{check, child, child_dir, pieces, ranks, save_specs, small_specs, specs, state};
use zero_core::Collective;
use zero_core::checkpoint::{Check, Checkpoint, SaveOptions, find_latest, save};

fn first(dir: &Path) {
    save_specs(&small_specs(), dir, 1, 2, &SaveOptions::default());
}

fn hidden(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.') && name != ".lock").collect()
}

/// Tries to save step 2 on two ranks, sees that both get one error and that step 1 is untouched, and returns the error.
fn fails(dir: &Path, prepare: impl Fn(usize) + Sync) -> String {
    let specs = specs();
    let errors = Mutex::new(Vec::new());
    ranks(2, |comm| {
        let pieces = pieces(&specs, 2, comm.rank(), 2);
        prepare(comm.rank());
        let error = save(comm, dir, 2, &pieces, &state(2), &SaveOptions::default()).unwrap_err().to_string();
        errors.lock().unwrap().push(error);
        Ok(())
    })
    .unwrap();
    let errors = errors.into_inner().unwrap();
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].starts_with("saving step 2 failed on rank "), "{}", errors[0]);
    assert_eq!(hidden(dir), [""; 0], "{}", errors[0]);
    still_the_first(dir);
    errors.into_iter().next().unwrap()
}

fn still_the_first(dir: &Path) {
    let found = find_latest(dir, Check::Contents).unwrap();
    assert_eq!(found.checkpoint, Some(dir.join("step-00000001")));
    assert!(found.skipped.is_empty());
    check(&small_specs(), &Checkpoint::open(&dir.join("step-00000001")).unwrap(), 1).unwrap();
}

/// Makes this thread nobody's, to whom permissions apply, in the eyes of the file system. Linux keeps this per thread.
fn become_nobody() {
    // SAFETY: the call changes the credentials of this thread and touches no memory.
    unsafe { libc::setfsuid(65534) };
}

#[test]
fn a_read_only_folder_is_named() {
    let dir = tempfile::tempdir().unwrap();
    first(dir.path());
    let mut permissions = fs::metadata(dir.path()).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o555);
    fs::set_permissions(dir.path(), permissions.clone()).unwrap();
    let error = fails(dir.path(), |_| become_nobody());
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    fs::set_permissions(dir.path(), permissions).unwrap();
    // The lock's file for root's nobody, the new folder for a user who owns the lock's file.
    assert!(error.contains("rank 0 of 2: cannot ") && error.contains("denied"), "{error}");
    assert!(error.contains(dir.path().to_str().unwrap()), "{error}");
}

#[test]
fn a_rank_that_may_not_write_is_named() {
    // Only root can have two owners under one roof.
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    first(dir.path());
    let error = fails(dir.path(), |rank| {
        if rank == 1 {
            become_nobody()
        }
    });
    assert!(error.contains("rank 1 of 2: cannot create") && error.contains("rank-00001-of-00002"), "{error}");
}

#[test]
fn a_second_save_into_the_folder_at_once_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    first(dir.path());
    let lock = fs::File::options().write(true).open(dir.path().join(".lock")).unwrap();
    lock.lock().unwrap();
    let error = fails(dir.path(), |_| ());
    assert!(error.contains("another save into") && error.contains("is going on"), "{error}");
}

#[test]
fn a_rank_that_panics_leaves_nothing_that_the_next_save_minds() {
    let dir = tempfile::tempdir().unwrap();
    first(dir.path());
    let error = ranks(2, |comm| {
        if comm.rank() == 1 {
            panic!("out of tune");
        }
        save(comm, dir.path(), 2, &pieces(&specs(), 2, 0, 2), &state(2), &SaveOptions::default())
    });
    assert!(error.unwrap_err().to_string().contains("out of tune"));
    still_the_first(dir.path());
    save_specs(&small_specs(), dir.path(), 3, 2, &SaveOptions::default());
    assert_eq!(hidden(dir.path()), [""; 0]);
}

#[test]
fn a_file_size_limit_is_an_error_of_the_rank_that_met_it() {
    let dir = tempfile::tempdir().unwrap();
    first(dir.path());
    let mut command = child("child_saves_and_fails", dir.path());
    // SAFETY: between fork and exec, only async-signal-safe calls: the limit, and the signal that comes with it.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            if libc::setrlimit(libc::RLIMIT_FSIZE, &limit) == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("rank 0 of 2: cannot write") && text.contains("File too large"), "{text}");
    still_the_first(dir.path());
}

/// A file system of 3 MB in a mount namespace of the child's own: full in the middle of the save.
#[test]
fn a_full_disk_is_an_error_of_the_rank_that_met_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = child("child_saves_and_fails", dir.path());
    command.env("CHECKPOINT_TEST_FIRST", "1");
    let target = std::ffi::CString::new(dir.path().to_str().unwrap()).unwrap();
    // SAFETY: between fork and exec, only system calls, with strings that live in the closure.
    unsafe {
        command.pre_exec(move || {
            let mount =
                |from: *const _, to: *const _, kind: *const _, flags, data: *const libc::c_char| match libc::mount(
                    from,
                    to,
                    kind,
                    flags,
                    data.cast(),
                ) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                };
            let none = std::ptr::null();
            if libc::unshare(libc::CLONE_NEWNS) != 0 && libc::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWUSER) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none)?;
            mount(c"tmpfs".as_ptr(), target.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=3m".as_ptr())
        })
    };
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return eprintln!("not tested, because this system mounts no tmpfs for us: {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("No space left on device") && text.contains("cannot write"), "{text}");
}

#[test]
#[ignore = "runs in a child process, under a limit"]
fn child_saves_and_fails() {
    let Some(dir) = child_dir() else { return };
    if std::env::var_os("CHECKPOINT_TEST_FIRST").is_some() {
        first(&dir);
    }
    println!("{}", fails(&dir, |_| ()));
    // And a smaller one fits again.
    save_specs(&small_specs(), &dir, 3, 2, &SaveOptions::default());
    let found = find_latest(&dir, Check::Contents).unwrap();
    assert_eq!(found.checkpoint, Some(dir.join("step-00000003")));
    fs::remove_dir_all(dir.join("step-00000003")).unwrap();
    fs::write(dir.join("latest"), "step-00000001\n").unwrap();
}

#[test]
fn a_process_started_in_the_middle_of_a_save_does_not_keep_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let saves = scope.spawn(|| {
            let options = SaveOptions { keep_last: NonZeroUsize::new(1), ..SaveOptions::default() };
            (1..=40).for_each(|step| drop(save_specs(&small_specs(), dir.path(), step, 1, &options)));
        });
        while !saves.is_finished() {
            let mut process = Command::new("true");
            // Between fork and exec it has every open file, for longer than a save takes.
            let wait = || {
                std::thread::sleep(Duration::from_millis(20));
                Ok(())
            };
            // SAFETY: sleeping is allowed between fork and exec.
            unsafe { process.pre_exec(wait) };
            process.status().unwrap();
        }
    });
}
