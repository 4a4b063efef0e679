//! Two checkpoints compared, whoever saved them, in little memory; and a folder of them listed.

#[path = "../../zero-core/tests/common/mod.rs"]
mod common;
#[path = "../../zero-core/tests/common/counting.rs"]
mod counting;

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};

use common::{Spec, pieces, ranks, save_specs, small_specs, specs, state, whole};
use counting::{Counting, peak};
use serde_json::{Value, json};
use zero_cli::inspect::{Comparison, compare};
use zero_core::Collective;
use zero_core::checkpoint::{Check, Checkpoint, CheckpointError, ElementType, SaveOptions, find_latest, list, save};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Saves `specs` as step 1 over `world` ranks, with each piece changed by `change` (name, first element, bytes).
fn saved(
    dir: &Path,
    specs: &[Spec],
    world: usize,
    state: &Value,
    change: impl Fn(&str, usize, &mut [u8]) + Sync,
) -> Checkpoint {
    let saved = ranks(world, |comm| {
        let mut pieces = pieces(specs, 1, comm.rank(), world);
        for piece in &mut pieces {
            let numel: usize = piece.shape.iter().product();
            let begin = zero_core::Partition::new(numel, world).range(comm.rank()).start;
            let mut bytes = piece.bytes.to_vec();
            change(&piece.name, begin, &mut bytes);
            piece.bytes = Cow::Owned(bytes);
        }
        save(comm, dir, 1, &pieces, state, &SaveOptions::default())
    });
    Checkpoint::open(&saved.unwrap()[0].path).unwrap()
}

fn unchanged(_: &str, _: usize, _: &mut [u8]) {}

fn bits(a: &Checkpoint, b: &Checkpoint) -> Comparison {
    compare(a, b, None).unwrap()
}

fn with_tolerance(a: &Checkpoint, b: &Checkpoint, tolerance: &str) -> Comparison {
    compare(a, b, Some(tolerance.parse().unwrap())).unwrap()
}

#[test]
fn the_same_saved_by_other_ranks_is_the_same() {
    let specs = specs();
    let dirs = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let all: Vec<Checkpoint> =
        dirs.iter().zip(1..).map(|(dir, world)| saved(dir.path(), &specs, world, &state(1), unchanged)).collect();
    for a in &all {
        for b in &all {
            let found = bits(a, b);
            assert!(found.is_same() && found.tensors.is_empty());
            assert_eq!(found.equal_tensors, specs.len());
            let elements: usize = specs.iter().map(|(_, _, shape)| shape.iter().product::<usize>()).sum();
            assert_eq!(found.equal_elements, elements as u64);
        }
    }
}

/// A tensor of these floats.
fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Checkpoints of one tensor `w` [2, 3], by 1 and by 4 ranks.
fn of_floats(a: [f32; 6], b: [f32; 6]) -> (Checkpoint, Checkpoint) {
    let spec = [("w".to_string(), ElementType::F32, vec![2, 3])];
    let [a, b] = [(a, 1), (b, 4)].map(|(values, world)| {
        let dir = tempfile::tempdir().unwrap();
        saved(dir.path(), &spec, world, &json!({}), |_, begin, bytes| {
            bytes.copy_from_slice(&floats(&values)[begin * 4..][..bytes.len()]);
        })
    });
    (a, b)
}

#[test]
fn elements_are_counted_and_the_farthest_are_found() {
    let (a, b) = of_floats([1.0, 2.0, 0.5, -3.0, 1e-3, 7.0], [1.0, 2.5, 0.5, -3.0, 2e-3, 7.0]);
    let found = bits(&a, &b);
    assert!(!found.is_same() && !found.tensors_same() && found.state_same());
    let [tensor] = found.tensors.as_slice() else { panic!("{found:?}") };
    assert_eq!((tensor.elements, tensor.bit_equal, tensor.different, tensor.within), (6, 4, 2, 0));
    let max = tensor.max_abs.as_ref().unwrap();
    assert_eq!((max.value, max.at.as_slice(), max.a, max.b), (0.5, &[0, 1][..], 2.0, 2.5));
    let max = tensor.max_rel.as_ref().unwrap();
    assert_eq!((max.at.as_slice(), (max.value * 1e6).round()), (&[1, 1][..], 5e5));

    let found = with_tolerance(&a, &b, "1e-2");
    assert_eq!((found.tensors[0].different, found.tensors[0].within), (1, 1));
    // 0.5 of 2.5, relative to the larger.
    assert!(with_tolerance(&a, &b, "0.2001").is_same());
    assert!(!with_tolerance(&a, &b, "0.1999").is_same());
}

#[test]
fn nans_zeros_and_infinities() {
    let quiet = f32::from_bits(0x7fc0_0001);
    let (a, b) = of_floats(
        [f32::NAN, f32::NAN, 0.0, f32::INFINITY, f32::INFINITY, f32::NAN],
        [f32::NAN, quiet, -0.0, f32::INFINITY, 1.0, 2.0],
    );
    let found = bits(&a, &b);
    let tensor = &found.tensors[0];
    assert_eq!((tensor.bit_equal, tensor.different, tensor.not_finite), (2, 4, 3));
    // Of those that are numbers, 0 and -0 are the farthest apart.
    assert_eq!(tensor.max_abs.as_ref().unwrap().value, 0.0);
    let found = with_tolerance(&a, &b, "0");
    let tensor = &found.tensors[0];
    assert_eq!((tensor.within, tensor.different, tensor.not_finite), (2, 2, 2));
    // JSON has no infinities, and none are needed.
    let json: Value = serde_json::from_str(&serde_json::to_string(&found).unwrap()).unwrap();
    assert_eq!(json["tensors"][0]["max_abs"]["value"], 0.0);
}

#[test]
fn what_only_one_has_and_what_is_of_another_shape() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let spec = |name: &str, dtype, shape: &[usize]| (name.to_string(), dtype, shape.to_vec());
    let a = [
        spec("a", ElementType::F32, &[2]),
        spec("shape", ElementType::F32, &[2, 3]),
        spec("type", ElementType::F16, &[2]),
        spec("none", ElementType::F32, &[0, 3]),
    ];
    let b = [
        spec("b", ElementType::F32, &[2]),
        spec("shape", ElementType::F32, &[3, 2]),
        spec("type", ElementType::Bf16, &[2]),
        spec("none", ElementType::F32, &[0, 3]),
    ];
    let a = saved(dirs[0].path(), &a, 2, &json!({"x": 1}), unchanged);
    let b = saved(dirs[1].path(), &b, 3, &json!({"x": 1.0}), unchanged);
    let found = bits(&a, &b);
    assert_eq!((found.only_a.as_slice(), found.only_b.as_slice()), (&["a".to_string()][..], &["b".to_string()][..]));
    let names: Vec<&str> = found.unlike.iter().map(|unlike| unlike.name.as_str()).collect();
    assert_eq!(names, ["shape", "type"]);
    assert_eq!((&found.unlike[0].a.shape, &found.unlike[0].b.shape), (&vec![2, 3], &vec![3, 2]));
    assert_eq!((found.equal_tensors, found.equal_elements, found.state.len()), (1, 0, 1));
    assert!(!found.tensors_same() && !found.state_same());
}

#[test]
fn a_damaged_tensor_is_an_error() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [a, b] = dirs.each_ref().map(|dir| save_specs(&small_specs(), dir.path(), 1, 2, &SaveOptions::default()));
    let file = b[0].path.join("rank-00001-of-00002.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let [a, b] = [a, b].map(|saved| Checkpoint::open(&saved[0].path).unwrap());
    assert!(matches!(compare(&a, &b, None), Err(CheckpointError::Corrupt { .. })));
}

#[test]
fn a_large_tensor_takes_little_memory() {
    const MIB: usize = 1 << 20;
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let spec = [("w".to_string(), ElementType::F32, vec![32, MIB / 4])];
    let all = whole(&spec[0], 1);
    let a = saved(dirs[0].path(), &spec, 1, &json!({}), unchanged);
    let b = saved(dirs[1].path(), &spec, 3, &json!({}), |_, begin, bytes| {
        // One in a thousand.
        for (at, element) in bytes.chunks_exact_mut(4).enumerate() {
            element[0] ^= u8::from((begin + at).is_multiple_of(1000));
        }
    });
    assert_eq!(all.len(), 32 * MIB);
    let (found, peak) = peak(|| bits(&a, &b));
    assert_eq!(found.tensors[0].different, (8 * MIB as u64).div_ceil(1000));
    println!("{peak} bytes at most for two tensors of 32 MiB");
    assert!(peak < 4 * MIB, "{peak}");
}

fn flip_last(file: PathBuf) {
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
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
    flip_last(file.clone());
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
    assert!(agree().problem(dir.path()).unwrap().contains("names step-00000077, which is not there"));
    fs::write(dir.path().join("latest"), "nonsense").unwrap();
    assert!(agree().problem(dir.path()).unwrap().contains("expected a name such as"));
    assert!(list(&dir.path().join("absent"), Check::Sizes).is_err());
}
