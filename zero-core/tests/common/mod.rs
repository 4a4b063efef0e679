//! Tensors whose every byte follows from name, step and position, so that any reader can tell right from wrong.
#![allow(dead_code, missing_docs)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use zero_core::checkpoint::{Checkpoint, CheckpointError, ElementType, Piece, SaveOptions, Saved, piece_for, save};
use zero_core::collective::threads::{ThreadComm, ThreadOptions, run};
use zero_core::{Collective, LaunchError, Partition};

pub type Spec = (String, ElementType, Vec<usize>);

/// Specs with every element type, odd sizes, fewer elements than ranks, scalars, empty tensors, and more than one chunk.
pub fn specs() -> Vec<Spec> {
    let mut specs: Vec<Spec> = ElementType::ALL
        .iter()
        .enumerate()
        .map(|(i, &dtype)| (format!("all/{dtype}"), dtype, vec![3, 2 * i + 1]))
        .collect();
    specs.extend([
        ("two \"quoted\" ü".to_string(), ElementType::F32, vec![2]),
        ("scalar".to_string(), ElementType::I64, vec![]),
        ("empty".to_string(), ElementType::Bf16, vec![4, 0, 7]),
        ("large".to_string(), ElementType::F32, vec![1023, 1025]),
    ]);
    specs
}

/// Specs without the large tensor.
pub fn small_specs() -> Vec<Spec> {
    specs().into_iter().filter(|(name, ..)| name != "large").collect()
}

pub fn whole((name, dtype, shape): &Spec, step: u64) -> Vec<u8> {
    let seed =
        name.bytes().fold(step.wrapping_mul(0x9E37_79B9_7F4A_7C15), |h, b| h.rotate_left(7) ^ u64::from(b) ^ (h << 3));
    let bytes = shape.iter().product::<usize>() * dtype.size();
    (0..bytes as u64).map(|i| ((seed ^ i).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 56) as u8).collect()
}

pub fn pieces(specs: &[Spec], step: u64, rank: usize, world: usize) -> Vec<Piece<'static>> {
    let piece = |spec: &Spec| {
        let (name, dtype, shape) = spec;
        let range = Partition::new(shape.iter().product(), world).range(rank);
        let bytes = whole(spec, step)[range.start * dtype.size()..range.end * dtype.size()].to_vec();
        Piece::new(name.clone(), *dtype, shape.clone(), bytes)
    };
    specs.iter().map(piece).collect()
}

pub fn state(step: u64) -> serde_json::Value {
    serde_json::json!({ "scale": 0.1 + step as f64, "step": step })
}

pub fn ranks<T: Send>(
    world: usize,
    body: impl Fn(&ThreadComm) -> Result<T, CheckpointError> + Sync,
) -> Result<Vec<T>, LaunchError<CheckpointError>> {
    run(world, &ThreadOptions { deadline: Duration::from_secs(60) }, |comm: Arc<ThreadComm>| body(&comm))
}

pub fn save_specs(specs: &[Spec], dir: &Path, step: u64, world: usize, options: &SaveOptions) -> Vec<Saved> {
    ranks(world, |comm| save(comm, dir, step, &pieces(specs, step, comm.rank(), world), &state(step), options)).unwrap()
}

/// Reads everything as `world` ranks do and compares it. Returns errors; panics at a wrong byte.
pub fn check(specs: &[Spec], checkpoint: &Checkpoint, world: usize) -> Result<(), CheckpointError> {
    let step = checkpoint.step();
    assert_eq!(checkpoint.tensors().len(), specs.len());
    assert_eq!(checkpoint.state()?, state(step));
    for spec in specs {
        let (name, dtype, shape) = spec;
        let entry = checkpoint.tensors().get(name).unwrap();
        assert_eq!((&entry.dtype, &entry.shape), (dtype, shape));
        let mut all = Vec::new();
        for rank in 0..world {
            all.extend(piece_for(checkpoint, name, rank, world)?);
        }
        assert!(all == whole(spec, step), "wrong bytes in '{name}'");
    }
    Ok(())
}

/// Returns a command that runs only the ignored test `name` of this test binary.
pub fn child(name: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]).env("CHECKPOINT_TEST_DIR", dir);
    command
}

/// Returns the folder that [`child`] passed; none when somebody runs the ignored tests by hand.
pub fn child_dir() -> Option<std::path::PathBuf> {
    std::env::var_os("CHECKPOINT_TEST_DIR").map(Into::into)
}
