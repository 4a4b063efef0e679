//! A process that saves repeatedly is killed at random moments: the newest checkpoint is intact every time.
#![cfg(unix)]

mod common;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::num::NonZeroUsize;
use std::time::Duration;

use common::{check, child, child_dir, pieces, ranks, small_specs, state};
use zero_core::Collective;
use zero_core::checkpoint::{AsyncSaver, Check, Checkpoint, ElementType, SaveOptions, find_latest, save};

const KILLS: usize = 30;
const WORLD: usize = 2;

fn specs() -> Vec<common::Spec> {
    let mut specs = small_specs();
    specs.push(("medium".to_string(), ElementType::F32, vec![300_001]));
    specs
}

fn killed_at_random_moments(child_test: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (mut last, mut inside, mut advanced) = (0, 0, 0);
    for kill in 0..KILLS {
        let mut process = child(child_test, dir.path()).stdout(std::process::Stdio::null()).spawn().unwrap();
        // The seed of each hasher is random: no other source of chance is needed.
        let chance = RandomState::new().build_hasher().finish();
        std::thread::sleep(Duration::from_micros(10_000 + chance % 190_000));
        process.kill().unwrap();
        process.wait().unwrap();
        let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        inside += usize::from(names.into_iter().any(|name| name.to_string_lossy().starts_with(".saving-")));
        let found = find_latest(dir.path(), Check::Contents).unwrap();
        assert!(found.skipped.is_empty(), "kill {kill}: {:?}", found.skipped);
        let Some(path) = found.checkpoint else {
            assert_eq!(last, 0, "kill {kill}: the checkpoint of step {last} is gone");
            continue;
        };
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert!(checkpoint.step() >= last, "kill {kill}: from step {last} back to {}", checkpoint.step());
        check(&specs(), &checkpoint, 3).unwrap();
        advanced += usize::from(checkpoint.step() > last);
        last = checkpoint.step();
    }
    println!("{KILLS} kills of {child_test}, {inside} inside a save; {advanced} saved more, up to step {last}");
    assert!(inside > 0 && advanced > 0, "the kills must hit saves, and leave time for some: {inside}, {advanced}");
}

#[test]
fn a_sound_checkpoint_survives_every_kill() {
    killed_at_random_moments("child_saves_forever");
}

#[test]
fn a_sound_checkpoint_survives_every_kill_of_an_asynchronous_save() {
    killed_at_random_moments("child_saves_forever_asynchronously");
}

#[test]
#[ignore = "runs in a child process, which is killed"]
fn child_saves_forever() {
    let Some(dir) = child_dir() else { return };
    forever(&dir, false);
}

#[test]
#[ignore = "runs in a child process, which is killed"]
fn child_saves_forever_asynchronously() {
    let Some(dir) = child_dir() else { return };
    forever(&dir, true);
}

/// Resumes, and saves every step twice: the second time it replaces the first.
fn forever(dir: &std::path::Path, asynchronous: bool) {
    let found = find_latest(dir, Check::Contents).unwrap().checkpoint;
    let begin = found.map_or(1, |path| Checkpoint::open(&path).unwrap().step() + 1);
    let options = SaveOptions { keep_last: NonZeroUsize::new(2), ..SaveOptions::default() };
    let specs = specs();
    let _ = ranks(WORLD, |comm| {
        let mut saver = AsyncSaver::new(comm)?;
        for step in (begin..).flat_map(|step| [step, step]) {
            let pieces = pieces(&specs, step, comm.rank(), WORLD);
            if asynchronous {
                saver.save(dir, step, pieces, state(step), options.clone())?;
            } else {
                save(comm, dir, step, &pieces, &state(step), &options)?;
            }
        }
        Ok(())
    });
}
