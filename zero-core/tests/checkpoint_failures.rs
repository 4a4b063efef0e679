//! Failed saves: all ranks get the error, which names the rank and the reason, and the checkpoint before is found.
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

/// Tries to save step 2 on two ranks, checks that both get the same error and that step 1 is untouched, and returns the error.
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

/// Makes this thread access files as the user nobody, to whom permissions apply. Linux keeps this per thread.
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
    assert!(error.contains("another save into") && error.contains("is in progress"), "{error}");
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

/// Saves to a file system of 3 MB, in the child's own mount namespace, which is full in the middle of the save.
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

/// Returns the result of `body`; panics if it blocks on what the folder contains.
fn in_time<T: Send + 'static>(what: &str, body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(body()));
    ended.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|error| panic!("{what}: {error}"))
}

fn fifo(path: &Path) {
    fs::remove_file(path).ok();
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn what_is_no_file_of_ours_hangs_no_reader_and_is_not_read_whole() {
    // Sparse: it takes no room, and more memory than there is.
    let huge = |path: &Path| fs::File::options().write(true).open(path).unwrap().set_len(1 << 42).unwrap();
    type Spoil<'a> = &'a dyn Fn(&Path);
    for (file, spoil, word) in [
        ("latest", &fifo as Spoil, "regular file"),
        ("latest", &huge, "at most"),
        ("step-00000002/manifest.json", &fifo, "regular file"),
        ("step-00000002/manifest.json", &huge, "at most"),
        ("step-00000002/rank-00001-of-00002.safetensors", &fifo, "regular file"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        first(dir.path());
        save_specs(&small_specs(), dir.path(), 2, 2, &SaveOptions::default());
        spoil(&dir.path().join(file));
        let path = dir.path().to_path_buf();
        let found = in_time(file, move || find_latest(&path, Check::Contents).unwrap());
        // `latest` alone says nothing against the newest.
        let sound = if file == "latest" { "step-00000002" } else { "step-00000001" };
        assert_eq!(found.checkpoint, Some(dir.path().join(sound)), "{file}");
        let why = found.skipped.iter().map(|(_, error)| error.to_string()).next().unwrap();
        assert!(why.contains(word) && why.contains(file.rsplit('/').next().unwrap()), "{why}");
    }
}

#[test]
fn links_and_fifos_in_the_place_of_hidden_files_are_not_followed() {
    let victim = tempfile::tempdir().unwrap();
    let (file, made) = (victim.path().join("thesis"), victim.path().join("made"));
    fs::write(&file, "mine").unwrap();
    for place in [Some(&file), Some(&made), None] {
        let dir = tempfile::tempdir().unwrap();
        let lock = dir.path().join(".lock");
        match place {
            Some(target) => std::os::unix::fs::symlink(target, lock).unwrap(),
            None => fifo(&lock),
        }
        let path = dir.path().to_path_buf();
        let error = in_time("a lock", move || {
            ranks(1, |comm| save(comm, &path, 1, &pieces(&specs(), 1, 0, 1), &state(1), &SaveOptions::default()))
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(".lock") && error.contains("regular file"), "{error}");
        assert!(!made.exists());
    }
    // Put there between the start of the save and its end.
    let dir = tempfile::tempdir().unwrap();
    let specs = small_specs();
    let spec = |(name, dtype, shape): &common::Spec| zero_core::checkpoint::TensorSpec {
        name: name.clone(),
        dtype: *dtype,
        shape: shape.clone(),
    };
    let tensors: Vec<_> = specs.iter().map(spec).collect();
    let saved = ranks(1, |comm| {
        let mut bytes = |index: usize| {
            let _ = std::os::unix::fs::symlink(&file, dir.path().join(".latest-new"));
            Ok(pieces(&specs, 1, 0, 1).swap_remove(index).bytes)
        };
        zero_core::checkpoint::save_streamed(
            comm,
            dir.path(),
            1,
            &tensors,
            &mut bytes,
            &state(1),
            &SaveOptions::default(),
        )
    });
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    assert!(saved.unwrap_err().to_string().contains(".latest-new"));
}

#[test]
fn what_is_named_alike_is_not_taken_for_remains() {
    let dir = tempfile::tempdir().unwrap();
    let names = [".saving-notes", ".pruned-branches", ".replaced-drafts", ".saving-step-1"];
    names.iter().for_each(|name| fs::create_dir_all(dir.path().join(name).join("mine")).unwrap());
    first(dir.path());
    assert!(names.iter().all(|name| dir.path().join(name).join("mine").exists()));
}

/// Makes `flock` fail with `error` on this thread, and on threads it starts, from now on.
fn refuse_locks(error: i32) {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let jump_equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let give = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = [
        libc::sock_filter { code: load, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: jump_equal, jt: 0, jf: 1, k: libc::SYS_flock as u32 },
        libc::sock_filter { code: give, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | error as u32 },
        libc::sock_filter { code: give, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the calls take numbers, and a filter and its program that are valid during the call, which copies them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        assert_eq!(libc::syscall(libc::SYS_seccomp, mode, 0, std::ptr::from_ref(&filter)), 0);
    }
}

#[test]
fn a_file_system_without_locks_is_saved_to_all_the_same() {
    for error in [libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOLCK] {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let saves = scope.spawn(|| {
                refuse_locks(error);
                let options = SaveOptions { keep_last: NonZeroUsize::new(1), ..SaveOptions::default() };
                save_specs(&small_specs(), dir.path(), 1, 2, &options);
                save_specs(&small_specs(), dir.path(), 1, 2, &options);
                save_specs(&small_specs(), dir.path(), 2, 2, &options);
            });
            saves.join().unwrap();
        });
        assert_eq!(hidden(dir.path()), [""; 0]);
        let found = find_latest(dir.path(), Check::Contents).unwrap();
        assert_eq!(found.checkpoint, Some(dir.path().join("step-00000002")));
        assert!(!dir.path().join("step-00000001").exists());
    }
}
