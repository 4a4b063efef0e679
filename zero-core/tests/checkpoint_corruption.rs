//! Every damage to a checkpoint is reported by name, and no reader gets a wrong byte.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{check, save_specs, small_specs};
use zero_core::checkpoint::{Check, Checkpoint, CheckpointError, SaveOptions, find_latest, list, verify};

const WORLD: usize = 2;

/// Creates a folder with checkpoints of steps 1 and 2; returns it and the path of checkpoint 2.
fn two() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=2 {
        save_specs(&small_specs(), dir.path(), step, WORLD, &SaveOptions::default());
    }
    let path = dir.path().join("step-00000002");
    (dir, path)
}

fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-0000{rank}-of-00002.safetensors"))
}

/// Reads everything; returns the first error.
fn read_all(folder: &Path) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open(folder)?;
    check(&small_specs(), &checkpoint, 3)
}

/// Returns the only problem that `verify` finds.
fn the_problem(dir: &Path, folder: &Path) -> CheckpointError {
    let problems = verify(folder);
    assert_eq!(problems.len(), 1, "{problems:?}");
    first_problem(dir, folder)
}

/// Returns the first problem that `verify` finds, after checking that a reader gets the same and that `find_latest` falls back.
fn first_problem(dir: &Path, folder: &Path) -> CheckpointError {
    let problem = verify(folder).into_iter().next().expect("a problem");
    assert_eq!(read_all(folder).unwrap_err().to_string(), problem.to_string());
    let found = find_latest(dir, Check::Contents).unwrap();
    assert_eq!(found.checkpoint, Some(dir.join("step-00000001")));
    assert_eq!(found.skipped.len(), 1);
    assert_eq!(found.skipped[0].0, folder);
    assert_eq!(found.skipped[0].1.to_string(), problem.to_string());
    problem
}

#[test]
fn flipped_bytes_of_every_file_are_found_or_harmless() {
    let (_dir, folder) = two();
    let mut harmless = Vec::new();
    for name in ["manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"] {
        let path = folder.join(name);
        let sound = fs::read(&path).unwrap();
        // Every fifth, in all parts of the file; with 1 in its place this passes too, in 16 seconds.
        for at in (0..sound.len()).step_by(5) {
            let mut bytes = sound.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&path, &bytes).unwrap();
            // `read_all` panics at a wrong byte.
            match read_all(&folder) {
                Ok(()) => harmless.push(format!("{name}: {:?} for {:?}", bytes[at] as char, sound[at] as char)),
                Err(error) => assert!(error.to_string().contains(name), "{error}"),
            }
        }
        fs::write(&path, &sound).unwrap();
    }
    assert!(verify(&folder).is_empty());
    // The case of a hexadecimal digit, white space after the header's JSON: nothing else.
    assert!(harmless.len() < 24, "{harmless:#?}");
}

#[test]
fn a_flipped_byte_of_a_tensor_is_corrupt_by_its_name() {
    let (dir, folder) = two();
    let path = file(&folder, 1);
    let mut bytes = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // The first tensor of the file: 8 bytes an element, "all/F64" before the others.
    bytes[header + 3] ^= 0x10;
    fs::write(&path, bytes).unwrap();
    let problem = the_problem(dir.path(), &folder);
    assert!(matches!(&problem, CheckpointError::Corrupt { tensor, path: p, .. } if tensor == "all/F64" && *p == path));
    // The other tensors can still be read, and sizes alone do not show it.
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(checkpoint.verify().len(), 1);
    assert!(checkpoint.read("all/F32", 0..1).is_ok());
    // Rank 0's part of the damaged tensor is sound too.
    assert!(checkpoint.read("all/F64", 0..2).is_ok());
    assert!(checkpoint.read("all/F64", 0..87).is_err());
    assert_eq!(find_latest(dir.path(), Check::Sizes).unwrap().checkpoint, Some(folder));
}

#[test]
fn every_truncation_is_named() {
    let (dir, folder) = two();
    let path = file(&folder, 0);
    let sound = fs::read(&path).unwrap();
    for len in (0..sound.len()).step_by(37) {
        fs::write(&path, &sound[..len]).unwrap();
        let error = read_all(&folder).unwrap_err();
        let expected = (sound.len() as u64, len as u64);
        assert!(
            matches!(&error, CheckpointError::Truncated { path: p, expected_bytes, got_bytes }
                if *p == path && (*expected_bytes, *got_bytes) == expected),
            "{error}"
        );
    }
    the_problem(dir.path(), &folder);
    fs::write(&path, [&sound[..], b"more"].concat()).unwrap();
    assert!(matches!(the_problem(dir.path(), &folder), CheckpointError::TooLong { .. }));
    fs::write(&path, &sound).unwrap();

    let path = folder.join("manifest.json");
    let sound = fs::read(&path).unwrap();
    for len in 0..sound.len() - 1 {
        fs::write(&path, &sound[..len]).unwrap();
        assert!(matches!(Checkpoint::open(&folder), Err(CheckpointError::BadManifest { .. })));
    }
}

#[test]
fn a_file_cut_off_while_it_is_open_is_an_error_and_not_a_signal() {
    let (_dir, folder) = two();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    fs::File::options().write(true).open(file(&folder, 0)).unwrap().set_len(9).unwrap();
    assert!(matches!(checkpoint.read("all/F64", 0..1), Err(CheckpointError::Truncated { got_bytes: 9, .. })));
}

#[test]
fn missing_files_and_folders_are_named() {
    for gone in ["manifest.json", "rank-00001-of-00002.safetensors"] {
        let (dir, folder) = two();
        fs::remove_file(folder.join(gone)).unwrap();
        let problem = the_problem(dir.path(), &folder);
        assert!(matches!(&problem, CheckpointError::Missing { path, .. } if *path == folder.join(gone)), "{problem}");
    }
    let (dir, folder) = two();
    fs::remove_dir_all(&folder).unwrap();
    assert!(the_problem(dir.path(), &folder).to_string().contains("the checkpoint is missing"));
}

#[test]
fn files_of_other_ranks_steps_and_saves_are_known_as_such() {
    let swapped = |problem: CheckpointError, expected_words: &str, got_words: &str| match problem {
        CheckpointError::Swapped { expected, got, .. } => {
            assert!(expected.contains(expected_words) && got.contains(got_words), "{expected}; {got}");
        }
        other => panic!("{other}"),
    };
    let (dir, folder) = two();
    fs::copy(file(&folder, 0), file(&folder, 1)).unwrap();
    swapped(the_problem(dir.path(), &folder), "rank 1 of 2", "rank 0 of 2");

    let (dir, folder) = two();
    let aside = dir.path().join("aside");
    fs::rename(file(&folder, 0), &aside).unwrap();
    fs::rename(file(&folder, 1), file(&folder, 0)).unwrap();
    fs::rename(&aside, file(&folder, 1)).unwrap();
    assert_eq!(verify(&folder).len(), 2);
    assert!(matches!(read_all(&folder), Err(CheckpointError::Swapped { .. })));

    let (dir, folder) = two();
    fs::copy(file(&dir.path().join("step-00000001"), 0), file(&folder, 0)).unwrap();
    swapped(the_problem(dir.path(), &folder), "step 2", "step 1");

    // The same rank and step, but of another run.
    let ((dir, folder), (_other_dir, other)) = (two(), two());
    fs::copy(file(&other, 0), file(&folder, 0)).unwrap();
    swapped(the_problem(dir.path(), &folder), "rank 0 of 2, step 2, save ", "rank 0 of 2, step 2, save ");

    // A file that is no checkpoint's: its header names no rank.
    let (dir, folder) = two();
    let tensors = vec![("a".to_string(), zero_core::checkpoint::ElementType::U8, vec![])];
    fs::remove_file(file(&folder, 0)).unwrap();
    let mut writer =
        zero_core::checkpoint::SafetensorsWriter::create(&file(&folder, 0), &Default::default(), tensors).unwrap();
    writer.write("a", &[1]).unwrap();
    writer.finish().unwrap();
    assert!(the_problem(dir.path(), &folder).to_string().contains("its metadata has no key 'rank'"));
}

/// Changes the manifest and updates its checksum.
fn edit(folder: &Path, change: impl Fn(&str) -> String) {
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let body = change(&text[21..]);
    assert_ne!(body, text[21..]);
    fs::write(&path, format!(r#"{{"crc32c":"{:08x}",{body}"#, crc32c::crc32c(body.as_bytes()))).unwrap();
}

#[test]
fn an_edited_manifest_never_gives_wrong_data() {
    let problem_of = |from: &str, to: &str| {
        let (dir, folder) = two();
        edit(&folder, |body| body.replacen(from, to, 1));
        first_problem(dir.path(), &folder)
    };
    assert!(problem_of(r#""step":2"#, r#""step":1"#).to_string().contains("expected the file of rank 0 of 2, step 1"));
    assert!(problem_of("all/F32", "all/F33").to_string().contains("tensor 'all/F33' is not in it"));
    let swapped_types = problem_of(r#"all/U8":{"dtype":"U8""#, r#"all/U8":{"dtype":"I8""#);
    assert!(swapped_types.to_string().contains("tensor 'all/U8' is U8 [5], expected I8 [5]"), "{swapped_types}");
    assert!(matches!(
        problem_of(r#""format_version":1"#, r#""format_version":7"#),
        CheckpointError::NewerFormat { .. }
    ));
    let (dir, folder) = two();
    edit(&folder, |body| {
        let at = body.find(r#""all/F16":{"#).unwrap();
        let entry_end = at + body[at..].find("},").unwrap() + 2;
        format!("{}{}", &body[..at], &body[entry_end..])
    });
    assert!(
        first_problem(dir.path(), &folder).to_string().contains("tensor 'all/F16' is in it, but not in the manifest")
    );
}

#[test]
fn a_latest_that_is_nonsense_is_noted_and_passed_over() {
    for nonsense in [&b""[..], b"step-99", b"../step-00000001", b"\xff\xfe", b"/etc/passwd"] {
        let (dir, folder) = two();
        fs::write(dir.path().join("latest"), nonsense).unwrap();
        let found = find_latest(dir.path(), Check::Sizes).unwrap();
        assert_eq!(found.checkpoint, Some(folder));
        assert_eq!(found.skipped[0].0, dir.path().join("latest"));
    }
    let (dir, _folder) = two();
    fs::write(dir.path().join("latest"), "step-00000077\n").unwrap();
    let found = find_latest(dir.path(), Check::Sizes).unwrap();
    assert_eq!(found.skipped[0].0, dir.path().join("step-00000077"));
    // `latest` is obeyed when it names an older one that is sound.
    fs::write(dir.path().join("latest"), "step-00000001").unwrap();
    assert_eq!(find_latest(dir.path(), Check::Sizes).unwrap().checkpoint, Some(dir.path().join("step-00000001")));
}

#[test]
fn a_folder_is_listed_and_the_choice_is_that_of_find_latest() {
    let dir = tempfile::tempdir().unwrap();
    for (step, world) in [(5, 1), (20, 2), (10, 3)] {
        save_specs(&small_specs(), dir.path(), step, world, &SaveOptions::default());
    }
    let agree = || {
        for check in [Check::Sizes, Check::Contents] {
            let listing = list(dir.path(), check).unwrap();
            let found = find_latest(dir.path(), check).unwrap();
            assert_eq!(listing.resume.map(|name| dir.path().join(name)), found.checkpoint);
        }
        list(dir.path(), Check::Contents).unwrap()
    };
    let listing = agree();
    let steps: Vec<_> = listing.checkpoints.iter().map(|listed| (listed.step, listed.world.unwrap())).collect();
    assert_eq!(steps, [(5, 1), (10, 3), (20, 2)]);
    assert_eq!(listing.latest.as_deref(), Some("step-00000010"));
    assert!(listing.remains.is_empty() && listing.problem(dir.path()).is_none());

    // Found only by its checksum, and then by its size.
    let file = dir.path().join("step-00000010/rank-00002-of-00003.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_eq!(agree().resume.as_deref(), Some("step-00000020"));
    fs::write(&file, "").unwrap();
    let listing = agree();
    assert_eq!(listing.checkpoints[1].problems.len(), 1);

    // A save of step 20 again that died between its renames, and remains of others.
    let aside = dir.path().join(".replaced-step-00000020");
    fs::rename(dir.path().join("step-00000020"), &aside).unwrap();
    for name in [".saving-step-00000030-1-2", ".pruned-step-00000001"] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("x"), [0; 100]).unwrap();
    }
    fs::write(dir.path().join(".latest-new"), "step-").unwrap();
    fs::write(dir.path().join("latest"), "step-00000020\n").unwrap();
    let listing = agree();
    assert_eq!(listing.resume.as_deref(), Some(".replaced-step-00000020"));
    let remains: Vec<_> = listing.remains.iter().map(|one| (one.name.as_str(), one.disk_bytes)).collect();
    assert_eq!(remains, [(".latest-new", 5), (".pruned-step-00000001", 100), (".saving-step-00000030-1-2", 100)]);

    fs::write(dir.path().join("latest"), "step-00000077\n").unwrap();
    assert!(agree().problem(dir.path()).unwrap().contains("names step-00000077, which does not exist"));
    fs::write(dir.path().join("latest"), "nonsense").unwrap();
    assert!(agree().problem(dir.path()).unwrap().contains("expected a name such as"));
    assert!(list(&dir.path().join("absent"), Check::Sizes).is_err());
}
