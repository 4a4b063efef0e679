//! Conversion of the engine's sharded checkpoints to Hugging Face checkpoints, without a model and without ranks.
//!
//! * Input: a folder that [`zero_core::checkpoint`] wrote, with any number of ranks. Its tensors `model.<path>` are the
//!   module's parameters, in fp32 or 16 bit, and its state may hold `"model"`, a [`ModelConfig`]. It is not modified.
//! * Output: a folder as [`zero_models::hf_export`] writes it; the checksum of every byte read is verified.
//! * Memory: that of [`zero_models::hf_export`], a chunk, or one parameter that is transposed; never the full model.
//! * Threads: the caller's only.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::Value;
use zero_core::checkpoint::{Check, Checkpoint, CheckpointError, ElementType, Manifest, TensorEntry, find_latest};
use zero_models::hf_export::{ExportOptions, Exported, export};
use zero_models::lora::merge_with;
use zero_models::{KeyMap, ModelConfig, ModelError, ModelParam, ModuleConfig, describe_name_differences, listed};

/// Prefix of parameter names in a checkpoint.
const PREFIX: &str = "model.";

/// The name of an average among a parameter's states, `zero_burn::optim::EMA`.
const AVERAGE: &str = "ema";

/// Number of 16-bit elements that are read and widened at a time.
const PART_ELEMS: usize = 1 << 18;

/// The reason that a checkpoint cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// There is nothing to export.
    #[error(
        "no checkpoint in {}: expected a folder step-... with a manifest.json, or the folder above it{}",
        dir.display(),
        reasons(skipped)
    )]
    NoCheckpoint {
        /// The folder that was searched.
        dir: PathBuf,
        /// Invalid checkpoints, with the reason.
        skipped: Vec<(PathBuf, CheckpointError)>,
    },
    /// The model configuration in the checkpoint cannot be read.
    #[error(
        "the \"model\" in the state of {} is not a configuration of a known model: {reason}; expected {{\"family\": \
         \"gpt2\", \"bert\", \"llama\", \"bart\", \"t5\", \"adapted\" or \"module\", \"config\": {{...}}}}",
        path.display()
    )]
    BadModel {
        /// The checkpoint.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// The checkpoint's parameters are not those of the model that it names.
    #[error("{} cannot be exported: {problems}", path.display())]
    Unfit {
        /// The checkpoint.
        path: PathBuf,
        /// Parameters that are missing, unexpected, or of another shape or type, by name.
        problems: String,
    },
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The folder cannot be written.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// The values to export as parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weights {
    /// The trained weights.
    #[default]
    Trained,
    /// The exponential moving averages of the weights, which a run with `--ema-decay` saves. A frozen parameter has no
    /// average; its weights are exported.
    Averaged,
}

/// A checkpoint that has been exported.
#[derive(Debug)]
pub struct ExportedCheckpoint {
    /// The checkpoint's folder.
    pub checkpoint: PathBuf,
    /// Its step.
    pub step: u64,
    /// Newer checkpoints that are invalid, with the reason.
    pub skipped: Vec<(PathBuf, CheckpointError)>,
    /// Its model.
    pub model: ModelConfig,
    /// The exported files.
    pub written: Exported,
}

/// Exports the parameters of `checkpoint` into the folder `out`. `checkpoint` is a folder `step-...`, or the folder above
/// it, whose newest valid checkpoint is used (by its manifest and file sizes; contents are checked as they are read).
/// `names` renames the parameters of a model of another family by their paths in the module; then no `config.json` is
/// written.
///
/// # Errors
/// [`ExportError`]; nothing is left at `out`.
pub fn export_checkpoint(
    checkpoint: &Path,
    out: &Path,
    options: &ExportOptions,
    names: Option<&KeyMap>,
    weights: Weights,
) -> Result<ExportedCheckpoint, ExportError> {
    let (checkpoint, skipped) = open_with(checkpoint, weights)?;
    let mut model = model_of(checkpoint.path(), &checkpoint.state()?, checkpoint.tensors())?;
    if let Some(names) = names {
        let own = model.parameters().into_iter().map(|param| (param.path, param.shape));
        model = ModuleConfig::new(own).renamed(names)?.into();
    }
    let options = &with_files(&checkpoint, options)?;
    let written = export(&model, out, options, |param, range| Ok(parameter(&checkpoint, weights, param, range)?))?;
    Ok(exported(&checkpoint, skipped, model, written))
}

/// Merges a trained LoRA adapter into the weights of its base, and exports the merged model. `checkpoint` is as for
/// [`export_checkpoint`], or a folder with an adapter in PEFT's format. `base` is the folder with the base's weights, if
/// they have moved since training.
///
/// # Errors
/// Same as [`export_checkpoint`].
pub fn merge_checkpoint(
    checkpoint: &Path,
    base: Option<&Path>,
    out: &Path,
    options: &ExportOptions,
    weights: Weights,
) -> Result<ExportedCheckpoint, ExportError> {
    let (checkpoint, skipped) = open_with(checkpoint, weights)?;
    let unfit =
        |problems: &str| ExportError::Unfit { path: checkpoint.path().to_path_buf(), problems: problems.to_string() };
    let ModelConfig::Adapted(adapted) = model_of(checkpoint.path(), &checkpoint.state()?, checkpoint.tensors())? else {
        return Err(unfit("it holds a full model and no adapter: omit --merge"));
    };
    let Some(base) = base.or(adapted.weights.as_deref()) else {
        return Err(unfit("it does not record the folder of its base model: give it with --base DIR"));
    };
    let read = |param: &ModelParam| Ok(parameter(&checkpoint, weights, param, 0..param.numel())?);
    let options = &with_files(&checkpoint, options)?;
    let written = merge_with(&adapted, base, out, options, read)?;
    Ok(exported(&checkpoint, skipped, (*adapted.base).clone(), written))
}

fn parameter(
    checkpoint: &Checkpoint,
    weights: Weights,
    param: &ModelParam,
    range: Range<usize>,
) -> Result<Vec<f32>, CheckpointError> {
    let average = average_name(&param.path);
    match weights == Weights::Averaged && checkpoint.tensors().contains_key(&average) {
        true => elements(checkpoint, &average, range),
        false => elements(checkpoint, &format!("{PREFIX}{}", param.path), range),
    }
}

/// Adds the files that the checkpoint keeps to the options, unless they name some.
fn with_files(checkpoint: &Checkpoint, options: &ExportOptions) -> Result<ExportOptions, CheckpointError> {
    let files = if options.files.is_empty() { checkpoint.files()? } else { options.files.clone() };
    Ok(ExportOptions { files, ..options.clone() })
}

fn average_name(path: &str) -> String {
    format!("optimizer.{path}.{AVERAGE}")
}

fn exported(checkpoint: &Checkpoint, skipped: Skipped, model: ModelConfig, written: Exported) -> ExportedCheckpoint {
    ExportedCheckpoint { checkpoint: checkpoint.path().to_path_buf(), step: checkpoint.step(), skipped, model, written }
}

type Skipped = Vec<(PathBuf, CheckpointError)>;

/// Opens a checkpoint like [`open`], and checks that it has such weights.
fn open_with(path: &Path, weights: Weights) -> Result<(Checkpoint, Skipped), ExportError> {
    let (checkpoint, skipped) = open(path)?;
    let is_average = |name: &String| name.ends_with(&format!(".{AVERAGE}")) && name.starts_with("optimizer.");
    if weights == Weights::Averaged && !checkpoint.tensors().keys().any(is_average) {
        let problems = "it holds no moving averages: train with --ema-decay, or omit --ema".into();
        return Err(ExportError::Unfit { path: checkpoint.path().to_path_buf(), problems });
    }
    Ok((checkpoint, skipped))
}

fn open(path: &Path) -> Result<(Checkpoint, Skipped), ExportError> {
    let named = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    match Manifest::read(path) {
        Err(CheckpointError::Missing { .. }) if !named => {}
        _ => return Ok((Checkpoint::open(path)?, Vec::new())),
    }
    let found = find_latest(path, Check::Sizes)?;
    match found.checkpoint {
        Some(newest) => Ok((Checkpoint::open(&newest)?, found.skipped)),
        None => Err(ExportError::NoCheckpoint { dir: path.to_path_buf(), skipped: found.skipped }),
    }
}

/// Returns the model that the state of the checkpoint in `path` names, if the parameters among `tensors` are those of this
/// model. If it names none, returns a module of these parameters, named by their paths.
///
/// # Errors
/// [`ExportError::BadModel`] and [`ExportError::Unfit`].
pub fn model_of(
    path: &Path,
    state: &Value,
    tensors: &BTreeMap<String, TensorEntry>,
) -> Result<ModelConfig, ExportError> {
    let Some(model) = state.get("model") else {
        let own = tensors.iter().filter_map(|(name, entry)| {
            let path = name.strip_prefix(PREFIX).filter(|_| is_float(entry))?;
            Some((path.to_string(), entry.shape.clone()))
        });
        let module = ModuleConfig::new(own);
        if module.parameters.is_empty() {
            let problems = format!("it has no tensor {PREFIX}...: expected the parameters of a module");
            return Err(ExportError::Unfit { path: path.to_path_buf(), problems });
        }
        return Ok(module.into());
    };
    let model: ModelConfig = serde_json::from_value(model.clone())
        .map_err(|error| ExportError::BadModel { path: path.to_path_buf(), reason: error.to_string() })?;
    check_size(&model, tensors)
        .and_then(|()| check(tensors, &model.parameters()))
        .map_err(|problems| format!("{problems}; export a checkpoint of one run"))
        .map_err(|problems| ExportError::Unfit { path: path.to_path_buf(), problems })?;
    Ok(model)
}

/// Checks that the tensors can be those of `model`, before its parameters are listed: a configuration can name any number
/// of layers, of any width.
fn check_size(model: &ModelConfig, tensors: &BTreeMap<String, TensorEntry>) -> Result<(), String> {
    /// The limit for a base, whose tensors are elsewhere.
    const MOST_LAYERS: usize = 1 << 16;
    let layers = model.blocks();
    if matches!(model, ModelConfig::Adapted(_)) {
        let fits = layers <= MOST_LAYERS;
        return if fits { Ok(()) } else { Err(format!("{layers} layers, expected at most {MOST_LAYERS}")) };
    }
    if layers > tensors.len() {
        return Err(format!("{layers} layers, but only {} tensors in total", tensors.len()));
    }
    let widest =
        tensors.values().flat_map(|tensor| &tensor.shape).max().map_or(0, |&widest| widest).min(u32::MAX as usize);
    match model.widths().into_iter().find(|width| *width > widest) {
        Some(width) => Err(format!("a width of {width}, but no tensor is wider than {widest}")),
        None => Ok(()),
    }
}

/// Checks that the parameters among `tensors` are exactly these; the error lists what is missing, unexpected or different.
fn check(tensors: &BTreeMap<String, TensorEntry>, parameters: &[ModelParam]) -> Result<(), String> {
    let mut unexpected: BTreeSet<&str> =
        tensors.keys().map(String::as_str).filter(|name| name.starts_with(PREFIX)).collect();
    let (mut missing, mut differing) = (Vec::new(), Vec::new());
    for param in parameters {
        let name = format!("{PREFIX}{}", param.path);
        let Some(entry) = tensors.get(&name) else {
            missing.push(name);
            continue;
        };
        unexpected.remove(name.as_str());
        if entry.shape != param.shape {
            differing.push(format!("\"{name}\" has shape {:?}, expected {:?}", entry.shape, param.shape));
        } else if !is_float(entry) {
            differing.push(format!("\"{name}\" has elements of type {}, expected F32, F16 or BF16", entry.dtype));
        }
    }
    let unexpected: Vec<String> = unexpected.into_iter().map(str::to_string).collect();
    let all = [describe_name_differences(&missing, &unexpected), listed(&differing)];
    let problems: Vec<String> = all.into_iter().filter(|problem| !problem.is_empty()).collect();
    match problems.is_empty() {
        true => Ok(()),
        false => Err(problems.join("; ")),
    }
}

fn is_float(entry: &TensorEntry) -> bool {
    matches!(entry.dtype, ElementType::F32 | ElementType::F16 | ElementType::Bf16)
}

/// Returns elements of a tensor in fp32, which represents 16-bit floats exactly. The returned copy is the only one.
fn elements(checkpoint: &Checkpoint, tensor: &str, range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
    let dtype = checkpoint.tensor(tensor)?.dtype;
    let mut values = vec![0f32; range.len()];
    if dtype == ElementType::F32 {
        checkpoint.read_into(tensor, range, bytemuck::cast_slice_mut(&mut values))?;
        // Files are little-endian: nothing changes on a machine that is.
        values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from_le(value.to_bits())));
        return Ok(values);
    }
    let widened: fn([u8; 2]) -> f32 = match dtype {
        ElementType::F16 => |bytes| f16::from_le_bytes(bytes).to_f32(),
        _ => |bytes| bf16::from_le_bytes(bytes).to_f32(),
    };
    let mut bytes = vec![0; 2 * PART_ELEMS.min(values.len())];
    let mut begin = range.start;
    for part in values.chunks_mut(PART_ELEMS) {
        let bytes = &mut bytes[..2 * part.len()];
        checkpoint.read_into(tensor, begin..begin + part.len(), bytes)?;
        for (value, bytes) in part.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = widened(*bytes);
        }
        begin += part.len();
    }
    Ok(values)
}

fn reasons(skipped: &Skipped) -> String {
    skipped.iter().map(|(_, error)| format!("; {error}")).collect()
}
