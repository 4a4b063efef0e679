//! Checkpoints as a training run uses them: saved and read by different numbers of ranks, pruned, replaced, and saved
//! concurrently with training steps.

mod common;

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use common::{check, pieces, ranks, save_specs, small_specs, specs, state, whole};
use proptest::prelude::*;
use zero_core::Collective;
use zero_core::checkpoint::{
    AsyncSaver, Check, Checkpoint, CheckpointError, ElementType, Found, Piece, SaveOptions, SideFile, TensorSpec,
    check_together, find_latest, find_latest_together, save, save_streamed, verify,
};
use zero_core::collective::threads::{ThreadOptions, run};

fn keep(last: usize) -> SaveOptions {
    SaveOptions { keep_last: NonZeroUsize::new(last), ..SaveOptions::default() }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".lock");
    names.sort();
    names
}

#[test]
fn any_number_of_ranks_reads_what_any_other_saved() {
    let specs = specs();
    for saved_by in 1..=4 {
        let dir = tempfile::tempdir().unwrap();
        let saved = save_specs(&specs, dir.path(), 12, saved_by, &SaveOptions::default());
        assert!(saved.iter().all(|one| one.path == dir.path().join("step-00000012") && one.bytes == saved[0].bytes));
        assert_eq!(names(dir.path()), ["latest", "step-00000012"]);
        assert!(verify(&saved[0].path).is_empty());
        for read_by in 1..=4 {
            // A new one each time: what has been verified before is read by another path.
            let checkpoint = Checkpoint::open(&saved[0].path).unwrap();
            check(&specs, &checkpoint, read_by).unwrap();
            check(&specs, &checkpoint, read_by).unwrap();
        }
    }
}

#[test]
fn the_files_are_ordinary_safetensors_with_aligned_tensors() {
    let (specs, world) = (specs(), 3);
    let dir = tempfile::tempdir().unwrap();
    let saved = save_specs(&specs, dir.path(), 1, world, &SaveOptions::default());
    for rank in 0..world {
        let bytes = std::fs::read(saved[0].path.join(format!("rank-0000{rank}-of-00003.safetensors"))).unwrap();
        let (header_bytes, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header_bytes % 8, 0);
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let own =
            pieces(&specs, 1, rank, world).into_iter().filter(|piece| !piece.bytes.is_empty()).collect::<Vec<_>>();
        assert_eq!(file.len(), own.len());
        for piece in own {
            let view = file.tensor(&piece.name).unwrap();
            assert_eq!(view.data(), &*piece.bytes);
            assert_eq!(view.shape(), [piece.bytes.len() / piece.dtype.size()]);
            let (begin, _) = header.info(&piece.name).unwrap().data_offsets;
            assert_eq!(begin % piece.dtype.size(), 0, "{}", piece.name);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn any_range_is_the_slice_of_the_whole(
        numel in 0usize..700_000, world in 1usize..5, ranges in prop::collection::vec(any::<[prop::sample::Index; 2]>(), 5),
    ) {
        let spec = ("t".to_string(), ElementType::F32, vec![numel]);
        let dir = tempfile::tempdir().unwrap();
        save_specs(std::slice::from_ref(&spec), dir.path(), 1, world, &SaveOptions::default());
        let whole = whole(&spec, 1);
        for [a, b] in ranges {
            let (a, b) = (a.index(numel + 1), b.index(numel + 1));
            let (a, b) = (a.min(b), a.max(b));
            let checkpoint = Checkpoint::open(&dir.path().join("step-00000001")).unwrap();
            for _ in 0..2 {
                prop_assert!(checkpoint.read("t", a..b).unwrap() == whole[a * 4..b * 4]);
            }
        }
    }
}

#[test]
fn what_is_not_there_is_said_so() {
    let dir = tempfile::tempdir().unwrap();
    let saved = save_specs(&small_specs(), dir.path(), 1, 2, &SaveOptions::default());
    let checkpoint = Checkpoint::open(&saved[0].path).unwrap();
    assert!(matches!(checkpoint.read("nose", 0..1), Err(CheckpointError::NoTensor { .. })));
    assert!(matches!(checkpoint.read("scalar", 0..2), Err(CheckpointError::OutOfRange { numel: 1, .. })));
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = checkpoint.read("scalar", 1..0);
    assert!(matches!(reversed, Err(CheckpointError::OutOfRange { .. })));
    assert!(matches!(checkpoint.read_into("scalar", 0..1, &mut [0; 7]), Err(CheckpointError::Unfit { .. })));
    assert!(checkpoint.read("scalar", 1..1).unwrap().is_empty());
}

#[test]
fn files_are_kept_with_the_tensors() {
    let (specs, dir) = (small_specs(), tempfile::tempdir().unwrap());
    let file = |name: &str, bytes: &[u8]| SideFile { name: name.into(), bytes: bytes.into() };
    let long: Vec<u8> = (0..1000).map(|i| (i % 251) as u8).collect();
    let kept = [file("a.json", b"{}"), file("long.bin", &long)];
    // What is empty needs no place; what leads out of a folder is not given back.
    let others = [file("empty.txt", b""), file("../up.txt", b"x"), file("a/b.txt", b"x"), file(".hidden", b"x")];
    for world in [1, 3] {
        let files = kept.iter().chain(&others).cloned().collect();
        let options = SaveOptions { files, ..SaveOptions::default() };
        let saved = save_specs(&specs, dir.path(), world as u64, world, &options);
        assert!(verify(&saved[0].path).is_empty());
        let checkpoint = Checkpoint::open(&saved[0].path).unwrap();
        assert_eq!(checkpoint.files().unwrap(), kept);
        assert_eq!(checkpoint.tensors().len(), specs.len() + 5);
    }
}

#[test]
fn old_ones_are_pruned_but_not_the_protected_or_the_incomplete() {
    let (specs, dir) = (small_specs(), tempfile::tempdir().unwrap());
    std::fs::create_dir(dir.path().join("step-00000000")).unwrap();
    std::fs::create_dir(dir.path().join(".saving-step-00000001-of-the-dead")).unwrap();
    std::fs::create_dir(dir.path().join(".pruned-step-00000001")).unwrap();
    for step in 1..=5 {
        let options = SaveOptions { protect: vec![2], ..keep(2) };
        let saved = save_specs(&specs, dir.path(), step, 2, &options);
        // 2 is the third newest at step 4, and stays.
        assert_eq!(saved[0].pruned.len(), usize::from(step == 3 || step == 5), "step {step}");
        assert_eq!(saved[1].pruned, saved[0].pruned);
    }
    assert_eq!(names(dir.path()), ["latest", "step-00000000", "step-00000002", "step-00000004", "step-00000005"]);
    // Back at an earlier step: the order of saving counts, not the step.
    save_specs(&specs, dir.path(), 3, 2, &keep(1));
    assert_eq!(names(dir.path()), ["latest", "step-00000000", "step-00000003"]);
    let found = find_latest(dir.path(), Check::Contents).unwrap();
    assert_eq!(found.checkpoint, Some(dir.path().join("step-00000003")));
    assert!(found.skipped.is_empty());
}

#[test]
fn a_step_saved_again_replaces_the_former_also_after_a_crash_between_the_renames() {
    let (specs, dir) = (small_specs(), tempfile::tempdir().unwrap());
    save_specs(&specs, dir.path(), 7, 3, &SaveOptions::default());
    let saved = save_specs(&specs, dir.path(), 7, 2, &SaveOptions::default());
    assert_eq!(names(dir.path()), ["latest", "step-00000007"]);
    check(&specs, &Checkpoint::open(&saved[0].path).unwrap(), 1).unwrap();

    let aside = dir.path().join(".replaced-step-00000007");
    std::fs::rename(&saved[0].path, &aside).unwrap();
    assert_eq!(find_latest(dir.path(), Check::Sizes).unwrap().checkpoint, Some(aside));
    save_specs(&specs, dir.path(), 8, 2, &SaveOptions::default());
    assert_eq!(names(dir.path()), ["latest", "step-00000007", "step-00000008"]);
    assert!(verify(&saved[0].path).is_empty());
}

#[test]
fn there_is_no_latest_where_nothing_was_saved() {
    let dir = tempfile::tempdir().unwrap();
    for dir in [dir.path().to_path_buf(), dir.path().join("not/yet")] {
        let found = find_latest(&dir, Check::Sizes).unwrap();
        assert!(found.checkpoint.is_none() && found.skipped.is_empty());
    }
    let made = dir.path().join("not/yet");
    save_specs(&small_specs(), &made, 1, 1, &SaveOptions::default());
    assert!(find_latest(&made, Check::Sizes).unwrap().checkpoint.is_some());
}

#[test]
fn ranks_that_disagree_are_told_on_what_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let f32s = |name: &'static str, numel: usize, bytes: usize| {
        Piece::new(name, ElementType::F32, vec![numel], vec![0; bytes])
    };
    let save_with = |step: u64, pieces: Vec<Piece<'static>>| {
        let error = ranks(2, |comm| {
            let (step, pieces) = if comm.rank() == 0 { (1, vec![f32s("w", 4, 8)]) } else { (step, pieces.clone()) };
            // Both ranks must fail; the run hands on the first of them.
            save(comm, dir.path(), step, &pieces, &state(1), &SaveOptions::default()).map(|_| panic!("saved"))
        });
        error.map(|_: Vec<()>| ()).unwrap_err().to_string()
    };
    let has = |error: String, words: &[&str]| assert!(words.iter().all(|word| error.contains(word)), "{error}");
    has(save_with(2, vec![f32s("w", 4, 8)]), &["disagree on the step: rank 1 saves step 2, rank 0 saves step 1"]);
    has(save_with(1, vec![f32s("w", 3, 4)]), &["tensor 'w'", "F32 [3]", "F32 [4]"]);
    has(save_with(1, vec![]), &["tensor 'w'", "rank 1 saves no such tensor"]);
    has(save_with(1, vec![f32s("w", 4, 8), f32s("x", 1, 0)]), &["tensor 'x'", "rank 0 saves no such tensor"]);
    has(save_with(1, vec![f32s("w", 4, 4)]), &["failed on rank 1 of 2", "expected 8 bytes", "got 4 bytes"]);
    has(save_with(1, vec![f32s("w", 4, 8), f32s("w", 4, 8)]), &["rank 1", "one tensor of this name"]);
    has(save_with(1, vec![f32s("w", usize::MAX, 8)]), &["rank 1", "a size that a file can have"]);
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn an_asynchronous_save_is_the_same_and_one_waits_for_the_other() {
    let (specs, dir, world) = (specs(), tempfile::tempdir().unwrap(), 3);
    ranks(world, |comm| {
        let mut saver = AsyncSaver::new(comm)?;
        assert_eq!(saver.wait()?, None);
        for step in 1..=4 {
            let pieces = pieces(&specs, step, comm.rank(), world);
            let started = saver.save(dir.path(), step, pieces, state(step), keep(2))?;
            assert_eq!(started.previous.map(|saved| saved.step), (step > 1).then(|| step - 1));
            assert!(started.stall >= started.waited);
            // The training goes on in its own group.
            comm.barrier()
                .map_err(|source| CheckpointError::Comm { doing: "training".into(), source: source.into() })?;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(names(dir.path()), ["latest", "step-00000003", "step-00000004"]);
    let found = find_latest(dir.path(), Check::Contents).unwrap().checkpoint.unwrap();
    check(&specs, &Checkpoint::open(&found).unwrap(), 2).unwrap();
}

#[test]
fn an_asynchronous_failure_comes_with_the_next_call_on_every_rank() {
    let (specs, dir) = (small_specs(), tempfile::tempdir().unwrap());
    let file = dir.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let reasons = ranks(2, |comm| {
        let mut saver = AsyncSaver::new(comm)?;
        let mut begin =
            |dir: &Path| saver.save(dir, 1, pieces(&specs, 1, comm.rank(), 2), state(1), SaveOptions::default());
        begin(&file)?;
        let reason = begin(dir.path()).unwrap_err().to_string();
        begin(dir.path())?;
        saver.wait()?;
        Ok(reason)
    })
    .unwrap();
    assert_eq!(reasons[0], reasons[1]);
    assert!(reasons[0].contains("failed on rank 0 of 2: cannot create folder"), "{}", reasons[0]);
    assert!(find_latest(dir.path(), Check::Contents).unwrap().checkpoint.is_some());
}

/// Changes a byte of a tensor of the checkpoint, in the middle of rank 0's file.
fn damage(folder: &Path) {
    let mut paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let path = paths.find(|path| path.to_string_lossy().contains("rank-00000")).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_not_one_of_those_that_are_kept() {
    let (specs, dir) = (small_specs(), tempfile::tempdir().unwrap());
    for step in [50, 100, 200] {
        save_specs(&specs, dir.path(), step, 2, &keep(3));
    }
    damage(&dir.path().join("step-00000200"));
    // What a resume does.
    let found = find_latest(dir.path(), Check::Contents).unwrap();
    assert_eq!(found.checkpoint, Some(dir.path().join("step-00000100")));
    let saved = save_specs(&specs, dir.path(), 300, 2, &keep(2));
    assert_eq!(names(dir.path()), ["latest", "step-00000100", "step-00000200", "step-00000300"]);
    assert_eq!(saved[0].pruned, [dir.path().join("step-00000050")]);
    assert!(saved[0].not_pruned.iter().any(|why| why.contains("step-00000200")), "{:?}", saved[0].not_pruned);
    // Found out by the save itself, in a file that this process has written.
    damage(&dir.path().join("step-00000300"));
    save_specs(&specs, dir.path(), 400, 2, &keep(2));
    let left = ["latest", "step-00000100", "step-00000200", "step-00000300", "step-00000400"];
    assert_eq!(names(dir.path()), left);
    // With two sound ones that are newer, nothing is lost with the rest.
    save_specs(&specs, dir.path(), 500, 2, &keep(2));
    assert_eq!(names(dir.path()), ["latest", "step-00000400", "step-00000500"]);
}

#[test]
fn a_slow_rank_is_waited_for_as_long_as_it_gets_on() {
    let (deadline, dir) = (Duration::from_millis(800), tempfile::tempdir().unwrap());
    let tensors: Vec<TensorSpec> =
        (0..8).map(|i| TensorSpec { name: format!("t{i}"), dtype: ElementType::F32, shape: vec![1000] }).collect();
    run(2, &ThreadOptions { deadline }, |comm| {
        let mut bytes = |_: usize| {
            if comm.rank() == 1 {
                std::thread::sleep(deadline / 4);
            }
            Ok(vec![0; 2000].into())
        };
        save_streamed(&*comm, dir.path(), 1, &tensors, &mut bytes, &state(1), &SaveOptions::default())
    })
    .unwrap();
    assert!(find_latest(dir.path(), Check::Contents).unwrap().checkpoint.is_some());
}

#[test]
fn ranks_look_at_a_checkpoint_together_and_find_what_one_finds() {
    let (specs, dir) = (small_specs(), tempfile::tempdir().unwrap());
    for (step, world) in [(1, 3), (2, 3), (3, 1), (4, 5)] {
        save_specs(&specs, dir.path(), step, world, &SaveOptions::default());
    }
    let told = |found: &Found| -> Vec<String> { found.skipped.iter().map(|(_, error)| error.to_string()).collect() };
    let alike = |check: Check, expected: Option<&str>| {
        let alone = find_latest(dir.path(), check).unwrap();
        assert_eq!(alone.checkpoint, expected.map(|name| dir.path().join(name)));
        for world in 1..=4 {
            for found in ranks(world, |comm| find_latest_together(comm, dir.path(), check)).unwrap() {
                assert_eq!((&found.checkpoint, told(&found)), (&alone.checkpoint, told(&alone)), "{world} ranks");
            }
        }
    };
    alike(Check::Contents, Some("step-00000004"));
    damage(&dir.path().join("step-00000004"));
    alike(Check::Sizes, Some("step-00000004"));
    alike(Check::Contents, Some("step-00000003"));
    std::fs::remove_file(dir.path().join("step-00000003/manifest.json")).unwrap();
    alike(Check::Contents, Some("step-00000002"));
    std::fs::write(dir.path().join("latest"), "nonsense").unwrap();
    std::fs::remove_file(dir.path().join("step-00000002/rank-00002-of-00003.safetensors")).unwrap();
    alike(Check::Sizes, Some("step-00000004"));
    alike(Check::Contents, Some("step-00000001"));
    let missing = ranks(2, |comm| check_together(comm, &dir.path().join("step-00000002"), Check::Sizes)).unwrap();
    assert!(missing.iter().all(|problem| problem.as_ref().unwrap().to_string().contains("rank-00002-of-00003")));
    assert!(
        ranks(2, |comm| find_latest_together(comm, &dir.path().join("none"), Check::Sizes)).unwrap()[1]
            .checkpoint
            .is_none()
    );
}

#[test]
fn a_rank_opens_the_files_that_it_reads() {
    let (spec, dir) = (("t".to_string(), ElementType::F32, vec![4000]), tempfile::tempdir().unwrap());
    let saved = save_specs(std::slice::from_ref(&spec), dir.path(), 1, 4, &SaveOptions::default());
    let checkpoint = Checkpoint::open_as_read(&saved[0].path).unwrap();
    for rank in [0, 1, 3] {
        std::fs::remove_file(saved[0].path.join(format!("rank-0000{rank}-of-00004.safetensors"))).unwrap();
    }
    assert!(Checkpoint::open(&saved[0].path).is_err());
    assert!(checkpoint.read("t", 2000..3000).unwrap() == whole(&spec, 1)[8000..12_000]);
    let error = checkpoint.read("t", 1999..3000).unwrap_err();
    assert!(matches!(error, CheckpointError::Missing { .. }), "{error}");
    assert_eq!(checkpoint.verify().len(), 3);
}
