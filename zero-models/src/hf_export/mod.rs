//! Export of Hugging Face checkpoints: writes a folder that transformers and [`crate::gpt2::weights`] or [`crate::bert::weights`] load,
//! from a configuration and a function that reads elements of a parameter.
//!
//! * Input: a [`ModelConfig`], which determines the parameters, and `read`, which returns the elements of a parameter in a flat range,
//!   in fp32: from a module, from ranks that gather it, or from files. No module is needed.
//! * Output: `config.json`, and `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with their index, named and filled
//!   as by transformers' `save_pretrained`, which does not write a tied head either.
//! * Memory: one chunk of a parameter that has the module's layout in the file; a full parameter if it is transposed. Earlier parameters
//!   are not kept.
//! * Disk: everything is written to a hidden sibling of the folder and synced, and the sibling is renamed at the end ([`NewFolder`]).
//!   After an error, or a panic of `read`, nothing is left.
//! * Threads: everything runs on the caller's thread.
//!
//! ```
//! use zero_models::hf_export::{ExportOptions, export};
//! use zero_models::{Gpt2Config, ModelConfig};
//!
//! let config = Gpt2Config { vocab_size: 32, n_embd: 16, n_layer: 1, n_head: 2, ..Gpt2Config::preset("tiny")? };
//! # let dir = tempfile::tempdir().unwrap();
//! # let out = dir.path().join("model");
//! let written = export(&config.into(), &out, &ExportOptions::default(), |_parameter, range| Ok(vec![0.5; range.len()]))?;
//! assert_eq!(written.files, ["model.safetensors"]);
//! # Ok::<(), zero_models::ModelError>(())
//! ```

mod dtype;
mod shards;
mod side;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Value, json};
use zero_core::checkpoint::{CheckpointError, Header, NewFolder, SafetensorsWriter, SideFile};

pub use crate::error::ReadError;
use crate::error::io_at;
use crate::safetensors_file::{INDEX, transposed};
use crate::{ModelConfig, ModelError, ModelParam, Result};

pub use dtype::ExportDtype;
pub use shards::parse_bytes;
use shards::{Tensor, shard_name, split, tensors};
pub use side::side_files;

/// Number of elements that are converted and written at a time.
const PART_ELEMS: usize = 1 << 18;

/// Options of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Element type of the files.
    pub dtype: ExportDtype,
    /// Maximum number of bytes of tensors in one file; a larger tensor has a file of its own.
    pub max_shard_bytes: u64,
    /// Maximum number of elements to request at a time, for parameters that have the module's layout in the file. Callers that gather
    /// the full parameter anyway set `usize::MAX`.
    pub chunk_elems: usize,
    /// Files of the model that training began from ([`side_files`]). The tokenizer and `generation_config.json` are written alongside
    /// the weights, and keys of `config.json` that the configuration lacks are kept. An adapter gets the tokenizer only.
    pub files: Vec<SideFile>,
}

impl Default for ExportOptions {
    /// bfloat16, 5 GB, 4 MiB of fp32, no files.
    fn default() -> Self {
        Self { dtype: ExportDtype::Bf16, max_shard_bytes: 5_000_000_000, chunk_elems: 1 << 20, files: Vec::new() }
    }
}

/// A checkpoint that has been written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The folder.
    pub path: PathBuf,
    /// The files with tensors, in order.
    pub files: Vec<String>,
    /// Number of tensors in them.
    pub tensors: usize,
    /// Bytes of tensors in them.
    pub bytes: u64,
}

/// Writes a checkpoint into the folder `out`, which must be absent or empty.
///
/// `read` returns the elements of a parameter in a range of its flat, row-major order in the module. It is called for every element of
/// every parameter once, front to back, in the order of [`ModelConfig::parameters`]. (The one exception is the prediction bias of a BERT
/// whose head is not tied: transformers expects it under two names.) Elements are rounded to nearest, ties to even; NaN and infinities
/// are written unchanged.
///
/// # Errors
/// [`ModelError::Read`] if `read` fails, [`ModelError::ReadSize`] if it returns a wrong number of elements, [`ModelError::Overflow`] for
/// a number that the element type cannot represent, [`ModelError::Write`] if `out` is taken or the system reports an error. Nothing is
/// left then.
pub fn export(
    config: &ModelConfig,
    out: &Path,
    options: &ExportOptions,
    mut read: impl FnMut(&ModelParam, Range<usize>) -> Result<Vec<f32>, ReadError>,
) -> Result<Exported> {
    let parameters = config.parameters();
    let tensors = tensors(config, &parameters, options.dtype);
    // PEFT supports only one file.
    let most = if matches!(config, ModelConfig::Adapted(_)) { u64::MAX } else { options.max_shard_bytes };
    let files = split(&tensors, most);
    let names: Vec<String> = (0..files.len()).map(|file| shard_name(config.files()[0], file, files.len())).collect();
    let total_bytes = tensors.iter().map(|tensor| tensor.bytes).sum();

    let folder = NewFolder::begin(out)?;
    for (name, tensors) in names.iter().zip(&files) {
        write_file(&folder.path().join(name), tensors, options, &mut read)?;
    }
    if files.len() > 1 {
        folder.write_file(INDEX, &index(&names, &files, total_bytes, options.dtype))?;
    }
    if let Some(json) = config_json(config, options) {
        folder.write_file(config.files()[1], &pretty(&json))?;
    }
    side::write(&folder, config, &options.files)?;
    let path = folder.publish()?;
    Ok(Exported { path, files: names, tensors: tensors.len(), bytes: total_bytes })
}

type Read<'a> = dyn FnMut(&ModelParam, Range<usize>) -> Result<Vec<f32>, ReadError> + 'a;

fn write_file(path: &Path, tensors: &[Tensor<'_>], options: &ExportOptions, read: &mut Read<'_>) -> Result<()> {
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let dtype = options.dtype.element();
    let announced = tensors.iter().map(|tensor| (tensor.name.to_string(), dtype, tensor.param.hf_shape())).collect();
    let mut writer = SafetensorsWriter::create(path, &metadata, announced)?;
    for tensor in tensors {
        write_tensor(&mut writer, tensor, options, read)?;
    }
    writer.finish()?;
    check_file(path, tensors, options.dtype)
}

fn write_tensor(
    writer: &mut SafetensorsWriter,
    tensor: &Tensor<'_>,
    options: &ExportOptions,
    read: &mut Read<'_>,
) -> Result<()> {
    let (param, numel) = (tensor.param, tensor.param.numel());
    let mut put = |values: &[f32]| -> Result<()> {
        for part in values.chunks(PART_ELEMS) {
            let bytes = options.dtype.encode(part).map_err(|value| ModelError::Overflow {
                name: tensor.name.to_string(),
                value,
                dtype: options.dtype.to_string(),
                instead: options.dtype.wider(),
            })?;
            writer.append(tensor.name, &bytes)?;
        }
        Ok(())
    };
    if !param.transposed {
        for range in ranges(numel, options.chunk_elems) {
            put(&read_checked(read, param, range)?)?;
        }
        return Ok(());
    }
    let &[rows, columns] = param.shape.as_slice() else {
        let problem = format!("has shape {:?}, but only a matrix can be transposed", param.shape);
        return Err(ModelError::KeyMap { rule: tensor.name.to_string(), problem });
    };
    let values = read_checked(read, param, 0..numel)?;
    for range in ranges(numel, PART_ELEMS) {
        put(&transposed(rows, columns, range, |at| values[at]))?;
    }
    Ok(())
}

fn ranges(numel: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let most = most.clamp(1, numel.max(1));
    (0..numel).step_by(most).map(move |begin| begin..numel.min(begin + most))
}

fn read_checked(read: &mut Read<'_>, param: &ModelParam, range: Range<usize>) -> Result<Vec<f32>> {
    let expected = range.len();
    let values = read(param, range).map_err(|source| ModelError::Read { path: param.path.clone(), source })?;
    match values.len() {
        got if got == expected => Ok(values),
        got => Err(ModelError::ReadSize { path: param.path.clone(), expected, got }),
    }
}

/// Checks that the written file has the expected tensors. Its length has already been checked.
fn check_file(path: &Path, tensors: &[Tensor<'_>], dtype: ExportDtype) -> Result<()> {
    let file = File::open(path).map_err(io_at("open", path))?;
    let header = Header::read(&file, path)?;
    for tensor in tensors {
        let expected = (Dtype::from(dtype.element()), tensor.param.hf_shape());
        let found = header.tensors.get(tensor.name).map(|entry| (entry.dtype, entry.shape.clone()));
        if found.as_ref() != Some(&expected) {
            let (expected, got) = (format!("{expected:?} in {}", path.display()), format!("{found:?}"));
            return Err(CheckpointError::Unfit { tensor: tensor.name.to_string(), expected, got }.into());
        }
    }
    Ok(())
}

fn index(names: &[String], files: &[Vec<Tensor<'_>>], total_bytes: u64, dtype: ExportDtype) -> Vec<u8> {
    let place = |(name, tensors): (&String, &Vec<Tensor<'_>>)| {
        tensors.iter().map(|tensor| (tensor.name.to_string(), name.clone())).collect::<Vec<_>>()
    };
    let weight_map: BTreeMap<String, String> = names.iter().zip(files).flat_map(place).collect();
    let elements = total_bytes / dtype.element().size() as u64;
    pretty(&json!({
        "metadata": { "total_parameters": elements, "total_size": total_bytes },
        "weight_map": weight_map,
    }))
}

/// Returns the keys of `config.json`; `None` for a module of which only the parameters are known.
fn config_json(config: &ModelConfig, options: &ExportOptions) -> Option<Value> {
    let dtype = options.dtype;
    let mut value = config.to_hf();
    if value.is_null() && config.architecture().is_none() {
        return None;
    }
    if !matches!(config, ModelConfig::Adapted(_) | ModelConfig::Module(_)) {
        side::keep_keys(&mut value, &options.files);
    }
    if let Some(architecture) = config.architecture() {
        value["architectures"] = json!([architecture]);
    }
    if !matches!(config, ModelConfig::Adapted(_)) {
        value["torch_dtype"] = json!(dtype.torch_name());
        if value.get("dtype").is_some() {
            value["dtype"] = json!(dtype.torch_name());
        }
    }
    Some(value)
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("texts and numbers have a JSON form");
    text.push(b'\n');
    text
}
