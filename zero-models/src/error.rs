//! The error type of this crate. Every message states the expected value, the actual value and the remedy.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use crate::suggest::closest;

/// An error of the function that reads parameters.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// The result of reading or writing a configuration or a checkpoint.
pub type Result<T, E = ModelError> = core::result::Result<T, E>;

/// An error in reading or writing a configuration or a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A rule for parameter names that cannot be used.
    #[error("\"{rule}\": {problem}")]
    KeyMap {
        /// The rule, or the name that it produces.
        rule: String,
        /// The problem.
        problem: String,
    },
    /// A prompt that the model cannot continue.
    #[error("prompt {row} {problem}")]
    Prompt {
        /// Index of the prompt, from 0.
        row: usize,
        /// The problem.
        problem: String,
    },
    /// Generation settings that cannot be used.
    #[error("{} {problem}", path.display())]
    Generation {
        /// The file.
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// A weight that cannot be quantized.
    #[error(
        "tensor \"{name}\" in {} has elements that are not finite, so it cannot be quantized: load it without \
         quantization",
        path.display()
    )]
    NotFinite {
        /// The tensor's name.
        name: String,
        /// The file that contains it.
        path: PathBuf,
    },
    /// An adapter that does not fit the model.
    #[error("{problem}")]
    Adapter {
        /// The problem and its remedy.
        problem: String,
    },
    /// A preset that does not exist.
    #[error(
        "there is no {model} preset \"{got}\"{}; choose one of {}",
        did_you_mean(got, presets),
        presets.join(", ")
    )]
    UnknownPreset {
        /// The model family.
        model: &'static str,
        /// The requested name.
        got: String,
        /// The names that exist.
        presets: &'static [&'static str],
    },

    /// A configuration that is not valid JSON, or has a value of a wrong type.
    #[error(
        "the {model} configuration cannot be read as JSON ({source}); pass a configuration file of Hugging Face (config.json, or adapter_config.json for LoRA)"
    )]
    ConfigSyntax {
        /// The model family.
        model: &'static str,
        /// The syntax or type error.
        source: serde_json::Error,
    },

    /// A value of a wrong type in a configuration.
    #[error("the {model} configuration has a wrong \"{key}\" ({problem}); correct it in config.json")]
    ConfigType {
        /// The model family.
        model: &'static str,
        /// The key.
        key: String,
        /// The value and the expected type.
        problem: String,
    },

    /// A configuration of an unknown family.
    #[error("the configuration has {got}: expected one of these values of model_type: {known}")]
    Family {
        /// The name or key in the file.
        got: String,
        /// The known families.
        known: String,
    },

    /// A configuration of another model.
    #[error(
        "the configuration has model_type \"{got}\", expected \"{expected}\"; load it as the model that it describes"
    )]
    ModelType {
        /// The `model_type` of this family.
        expected: &'static str,
        /// The `model_type` in the file.
        got: String,
    },

    /// A setting that would change the mathematics and is not implemented.
    #[error(
        "{model} with {key} = {got} is not implemented, and ignoring it would change the results; supported: \
         {supported}"
    )]
    Unsupported {
        /// The model family.
        model: &'static str,
        /// The key in `config.json`.
        key: &'static str,
        /// Its value.
        got: String,
        /// The values that are implemented.
        supported: String,
    },

    /// A value that no model can have.
    #[error("{model} cannot have {field} = {got}; change it to {expected}")]
    ConfigValue {
        /// The model family.
        model: &'static str,
        /// The key in `config.json`.
        field: &'static str,
        /// Its value.
        got: String,
        /// The allowed values.
        expected: String,
    },

    /// An error in a file.
    #[error("in {path}: {error}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// The error in it.
        error: Box<ModelError>,
    },

    /// An error of the operating system.
    #[error("cannot {action} {path}; check that it exists and is readable")]
    Io {
        /// The attempted action: `open`, `read` or `map`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },

    /// A folder without a checkpoint.
    #[error("no checkpoint in {dir}: expected model.safetensors or model.safetensors.index.json; {hint}")]
    NoCheckpoint {
        /// The folder.
        dir: PathBuf,
        /// The remedy.
        hint: &'static str,
    },

    /// A file of tensors that cannot be read, such as a truncated one.
    #[error(
        "{path} cannot be read as a safetensors file: {reason}; if it is truncated or corrupt, copy or download it again"
    )]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The problem, with the expected value.
        reason: String,
    },

    /// A Git LFS pointer instead of a file.
    #[error("{path} is a Git LFS pointer, not the file itself; run `git lfs pull`")]
    Pointer {
        /// The file.
        path: PathBuf,
    },

    /// An index that is malformed.
    #[error("{path} is not {format}; copy or download it again")]
    Format {
        /// The file.
        path: PathBuf,
        /// The expected format.
        format: &'static str,
        /// The error in it.
        source: Box<dyn Error + Send + Sync>,
    },

    /// An index that names a file which is missing or in another folder.
    #[error("{index} assigns tensor \"{tensor}\" to \"{shard}\"{problem}")]
    Shard {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The file that the index names.
        shard: String,
        /// The problem and its remedy.
        problem: &'static str,
    },

    /// An index and a shard that disagree.
    #[error(
        "{index} and {shard} disagree about tensor \"{tensor}\": the index {difference}; take index and shards from \
         one checkpoint"
    )]
    IndexDisagrees {
        /// The index file.
        index: PathBuf,
        /// The shard.
        shard: PathBuf,
        /// The tensor.
        tensor: String,
        /// The difference: which of the two has the tensor.
        difference: &'static str,
    },

    /// Two tensors of the checkpoint that belong to one parameter of the model.
    #[error("checkpoint {dir} has both \"{first}\" and \"{second}\", which are the same parameter; remove one of them")]
    SameParameter {
        /// The folder.
        dir: PathBuf,
        /// The first name.
        first: String,
        /// The second name.
        second: String,
    },

    /// Tensors that the checkpoint lacks, or that the model does not have.
    #[error(
        "checkpoint {dir} does not fit the model: {}; take config.json and weights from one checkpoint, and check the \
         model class it was saved from",
        describe_name_differences(missing, unexpected)
    )]
    TensorNames {
        /// The folder.
        dir: PathBuf,
        /// Parameters of the model without a tensor.
        missing: Vec<String>,
        /// Tensors without a parameter, as the file names them.
        unexpected: Vec<String>,
    },

    /// Tensors whose shapes differ from those of the model's parameters.
    #[error(
        "checkpoint {dir} does not fit the model: {}; take config.json and weights from one checkpoint",
        listed(mismatches)
    )]
    TensorShapes {
        /// The folder.
        dir: PathBuf,
        /// Every mismatch.
        mismatches: Vec<ShapeMismatch>,
    },

    /// Tensors that the configuration ties although they differ.
    #[error(
        "checkpoint {dir} has different values in \"{first}\" and \"{second}\", but config.json ties them: set \
         tie_word_embeddings to false there, or remove \"{second}\" from the weights"
    )]
    Untied {
        /// The folder.
        dir: PathBuf,
        /// The tensor that would be loaded.
        first: String,
        /// The tensor that would be ignored.
        second: String,
    },

    /// A tensor with elements that cannot be converted to 32-bit floats.
    #[error(
        "tensor \"{name}\" in {path} has elements of type {got:?}, expected F32, F16, BF16 or F64; save the checkpoint \
         without quantization"
    )]
    TensorDtype {
        /// The tensor.
        name: String,
        /// Its file.
        path: PathBuf,
        /// Its element type.
        got: Dtype,
    },

    /// A setting of an export, or a size, that cannot be used.
    #[error("invalid {setting} \"{got}\"; expected {expected}")]
    ExportSetting {
        /// The setting.
        setting: &'static str,
        /// The given value.
        got: String,
        /// The accepted values.
        expected: &'static str,
    },

    /// A parameter that could not be read for export.
    #[error("cannot read parameter \"{path}\" for the export")]
    Read {
        /// Path of the parameter in the module.
        path: String,
        /// The error of the function that reads parameters.
        source: ReadError,
    },

    /// A wrong number of elements from the function that reads parameters.
    #[error(
        "expected {expected} elements of parameter \"{path}\" for the export, got {got}; check that the configuration \
         belongs to the model"
    )]
    ReadSize {
        /// Path of the parameter in the module.
        path: String,
        /// Number of elements requested.
        expected: usize,
        /// Number of elements returned.
        got: usize,
    },

    /// A number that the element type of the export cannot represent.
    #[error("tensor \"{name}\" has the element {value:e}, which is infinite in {dtype}; export as {instead}")]
    Overflow {
        /// The tensor, as Hugging Face names it.
        name: String,
        /// The number.
        value: f32,
        /// The element type.
        dtype: String,
        /// The types that can represent it.
        instead: &'static str,
    },

    /// A checkpoint that could not be written.
    #[error(transparent)]
    Write(#[from] zero_core::checkpoint::CheckpointError),
}

/// Converts the system's error in `action` on a file.
pub(crate) fn io_at(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> ModelError {
    move |source| ModelError::Io { action, path: path.to_path_buf(), source }
}

/// Checks each value, given as a flag that it is valid, the name of its field, its text, and the allowed values. Fails on the first that
/// is wrong.
pub(crate) fn check_each<'a>(
    model: &'static str,
    values: impl IntoIterator<Item = (bool, &'static str, String, &'a str)>,
) -> Result<()> {
    match values.into_iter().find(|(is_right, ..)| !is_right) {
        Some((_, field, got, expected)) => {
            Err(ModelError::ConfigValue { model, field, got, expected: expected.to_string() })
        }
        None => Ok(()),
    }
}

/// A tensor whose shape differs from the model's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "tensor \"{name}\" in {} has shape {got:?}, expected {expected:?}",
    path.file_name().unwrap_or(path.as_os_str()).display()
)]
pub struct ShapeMismatch {
    /// The tensor, as the file names it.
    pub name: String,
    /// The file that contains it.
    pub path: PathBuf,
    /// The model's shape, in the layout of the file.
    pub expected: Vec<usize>,
    /// The shape in the file.
    pub got: Vec<usize>,
}

/// Number of names that a message lists before "and n more".
const LISTED: usize = 10;

/// Joins items with commas; after the first 10, gives the number of the others.
pub fn listed<T: fmt::Display>(items: &[T]) -> String {
    let mut text = items.iter().take(LISTED).map(T::to_string).collect::<Vec<_>>().join(", ");
    if items.len() > LISTED {
        text += &format!(" and {} more", items.len() - LISTED);
    }
    text
}

/// Lists the missing and the unexpected names, with their numbers; empty if there are none.
pub fn describe_name_differences(missing: &[String], unexpected: &[String]) -> String {
    let parts = [(missing, "missing"), (unexpected, "unexpected")].into_iter().filter(|(names, _)| !names.is_empty());
    parts.map(|(names, what)| format!("{} {what}: {}", names.len(), listed(names))).collect::<Vec<_>>().join("; ")
}

pub(crate) fn did_you_mean(got: &str, known: &[&str]) -> String {
    closest(got, known).map(|word| format!(", did you mean \"{word}\"?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_capped() {
        let names: Vec<String> = (0..13).map(|i| format!("t{i}")).collect();
        assert_eq!(
            describe_name_differences(&names, &names[..1]),
            "13 missing: t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and 3 more; 1 unexpected: t0"
        );
    }
}
