//! Sharded checkpoints as the engine writes them, of models whose elements are a function of path and index.
#![allow(dead_code)] // each test uses its part

#[path = "../../../zero-models/tests/models/common/small.rs"]
mod small;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{bf16, f16};
use burn_flex::Flex;
use serde_json::{Value, json};
pub use small::*;
use zero_core::checkpoint::{CheckpointError, ElementType, Piece, SaveOptions, save};
use zero_core::collective::threads::{ThreadComm, ThreadOptions, run};
use zero_core::{Collective, Partition};
use zero_models::{ModelConfig, bert, gpt2, llama};

/// A full tensor of a checkpoint.
#[derive(Clone)]
pub struct Whole {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: ElementType,
    pub bytes: Vec<u8>,
}

/// Element `i` of the parameter at `path`, between -1 and 1; uses all bits of fp32.
pub fn element(path: &str, i: usize) -> f32 {
    drawn(seed(path), i)
}

fn seed(path: &str) -> u64 {
    path.bytes().fold(7, |h, b| h.rotate_left(9) ^ u64::from(b).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

fn drawn(seed: u64, i: usize) -> f32 {
    let mixed = (seed ^ i as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (mixed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Tensors that the engine saves for a model: parameters and AdamW's state.
pub fn tensors(config: &ModelConfig, dtype: ElementType) -> Vec<Whole> {
    let mut all = Vec::new();
    for param in config.parameters() {
        let seed = seed(&param.path);
        let values = (0..param.numel()).map(|i| drawn(seed, i));
        let bytes: Vec<u8> = match dtype {
            ElementType::F32 => values.flat_map(f32::to_le_bytes).collect(),
            ElementType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
            _ => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        };
        all.push(Whole { name: format!("model.{}", param.path), shape: param.shape.clone(), dtype, bytes });
        let bytes = vec![1; 4 * param.numel()];
        let name = format!("optimizer.{}.exp_avg", param.path);
        all.push(Whole { name, shape: param.shape, dtype: ElementType::F32, bytes });
    }
    all
}

pub fn state(config: &ModelConfig) -> Value {
    json!({ "engine": { "step": 3 }, "model": config })
}

/// Saves `tensors` from `world` ranks as step `step` in `dir` and returns the checkpoint's folder.
pub fn save_tensors(tensors: &[Whole], state: &Value, dir: &Path, step: u64, world: usize) -> PathBuf {
    let options = ThreadOptions { deadline: Duration::from_secs(60) };
    let saved = run(world, &options, |comm: Arc<ThreadComm>| -> Result<PathBuf, CheckpointError> {
        let piece = |whole: &'_ Whole| {
            let size = whole.dtype.size();
            let range = Partition::new(whole.shape.iter().product(), world).range(comm.rank());
            let bytes = whole.bytes[range.start * size..range.end * size].to_vec();
            Piece::new(whole.name.clone(), whole.dtype, whole.shape.clone(), bytes)
        };
        let pieces: Vec<Piece<'static>> = tensors.iter().map(piece).collect();
        Ok(save(&*comm, dir, step, &pieces, state, &SaveOptions::default())?.path)
    });
    saved.unwrap().swap_remove(0)
}

/// Saves a model in fp32 from `world` ranks and returns the checkpoint's folder.
pub fn save_model(config: &ModelConfig, dir: &Path, world: usize) -> PathBuf {
    save_tensors(&tensors(config, ElementType::F32), &state(config), dir, 3, world)
}

/// Returns the parameters of the Hugging Face model in `dir`, by path.
pub fn loaded(config: &ModelConfig, dir: &Path) -> Vec<(String, Vec<f32>)> {
    let device = Default::default();
    match config {
        ModelConfig::Gpt2(config) => by_path(&gpt2::weights::load(config.init::<Flex>(&device), dir, &device).unwrap()),
        ModelConfig::Bert(config) => by_path(&bert::weights::load(config.init::<Flex>(&device), dir, &device).unwrap()),
        ModelConfig::Llama(config) => {
            by_path(&llama::weights::load(config.init::<Flex>(&device), dir, &device).unwrap())
        }
        _ => unreachable!("the tests have none"),
    }
}
