//! The one error type of this crate. Every message says what was expected, what came, and what to change.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use crate::suggest::closest;

/// Any error of the function that reads parameters.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// Of reading a configuration or a checkpoint, or writing one.
pub type Result<T, E = ModelError> = core::result::Result<T, E>;

/// What can go wrong while reading a configuration or a checkpoint, or writing one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A rule for the names of parameters cannot be used.
    #[error("\"{rule}\": {problem}")]
    KeyMap {
        /// The rule, or the name that it gives.
        rule: String,
        /// What is wrong.
        problem: String,
    },
    /// A prompt that the model cannot go on with.
    #[error("prompt {row} {problem}")]
    Prompt {
        /// Which of the prompts, from 0.
        row: usize,
        /// What is wrong.
        problem: String,
    },
    /// Settings of generation that cannot be used.
    #[error("{} {problem}", path.display())]
    Generation {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to change.
        problem: String,
    },
    /// A weight that is to be quantised and cannot be.
    #[error("tensor \"{name}\" in {} has elements that are not finite, which have no scale: load it without quantising", path.display())]
    NotFinite {
        /// The tensor's name.
        name: String,
        /// The file it lies in.
        path: PathBuf,
    },
    /// An adapter that does not fit the model.
    #[error("{problem}")]
    Adapter {
        /// What is wrong, and what to change.
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
        /// The name that was asked for.
        got: String,
        /// The names that exist.
        presets: &'static [&'static str],
    },

    /// A configuration that is not the JSON of a configuration.
    #[error("the {model} configuration cannot be read as JSON ({source}); pass the text of a Hugging Face config.json")]
    ConfigSyntax {
        /// The model family.
        model: &'static str,
        /// Where the JSON breaks off or has the wrong type.
        source: serde_json::Error,
    },

    /// A configuration of a family that is not known.
    #[error("the configuration has {got}: expected a model_type of {known}")]
    Family {
        /// The name or key that was found in the file.
        got: String,
        /// The families that there are.
        known: String,
    },

    /// A configuration of another model.
    #[error(
        "the configuration has model_type \"{got}\", expected \"{expected}\"; load it as the model that it describes"
    )]
    ModelType {
        /// The `model_type` that this family has.
        expected: &'static str,
        /// The `model_type` in the file.
        got: String,
    },

    /// A setting that would change the mathematics and is not implemented.
    #[error(
        "{model} with {key} = {got} is not implemented, and ignoring it would give other results; supported: {supported}"
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
        /// What it may be.
        expected: String,
    },

    /// An error in a file that has a name.
    #[error("in {path}: {error}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: Box<ModelError>,
    },

    /// The operating system refused.
    #[error("cannot {action} {path}; check that it exists and may be read")]
    Io {
        /// What was tried: `open`, `read` or `map`.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },

    /// A folder without a checkpoint in it.
    #[error("no checkpoint in {dir}: expected model.safetensors or model.safetensors.index.json; {hint}")]
    NoCheckpoint {
        /// The folder.
        dir: PathBuf,
        /// What to do about it.
        hint: &'static str,
    },

    /// A file of tensors that cannot be read, such as one that is cut short.
    #[error(
        "{path} cannot be read as a safetensors file: {reason}; if it is truncated or corrupt, copy or download it again"
    )]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The problem, with what was expected.
        reason: String,
    },

    /// A Git LFS pointer in place of a file.
    #[error("{path} is a Git LFS pointer, not the file itself; run `git lfs pull`")]
    Pointer {
        /// The file.
        path: PathBuf,
    },

    /// An index that is not the JSON of an index.
    #[error("{path} is not {format}; copy or download it again")]
    Format {
        /// The file.
        path: PathBuf,
        /// What it was to be.
        format: &'static str,
        /// How it breaks the format.
        source: Box<dyn Error + Send + Sync>,
    },

    /// An index that names a file which is elsewhere or not there.
    #[error("{index} puts tensor \"{tensor}\" into \"{shard}\"{problem}")]
    Shard {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The file that the index names.
        shard: String,
        /// What is wrong with that, and what to do about it.
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
        /// Which of the two has the tensor.
        difference: &'static str,
    },

    /// Two tensors in the checkpoint that are one parameter of the model.
    #[error("checkpoint {dir} has both \"{first}\" and \"{second}\", which are the same parameter; remove one of them")]
    SameParameter {
        /// The folder.
        dir: PathBuf,
        /// The one name.
        first: String,
        /// The other name.
        second: String,
    },

    /// Tensors that are missing from a checkpoint, or that the model has no place for.
    #[error(
        "checkpoint {dir} does not fit the model: {}; take config.json and weights from one checkpoint, and check the model \
         class it was saved from",
        names_differ(missing, unexpected)
    )]
    TensorNames {
        /// The folder.
        dir: PathBuf,
        /// Parameters of the model without a tensor.
        missing: Vec<String>,
        /// Tensors without a parameter, as the file names them.
        unexpected: Vec<String>,
    },

    /// Tensors of another shape than the model's parameters.
    #[error(
        "checkpoint {dir} does not fit the model: {}; take config.json and weights from one checkpoint",
        listed(mismatches)
    )]
    TensorShapes {
        /// The folder.
        dir: PathBuf,
        /// What does not fit.
        mismatches: Vec<ShapeMismatch>,
    },

    /// Tensors that the configuration ties, and that differ.
    #[error(
        "checkpoint {dir} has other numbers in \"{second}\" than in \"{first}\", which config.json ties to it: set tie_word_embeddings to \
         false there, or take \"{second}\" out of the weights"
    )]
    Untied {
        /// The folder.
        dir: PathBuf,
        /// The tensor that would be loaded.
        first: String,
        /// The one that would be left out.
        second: String,
    },

    /// A tensor with elements that cannot be converted to 32-bit floats.
    #[error(
        "tensor \"{name}\" in {path} has elements of type {got:?}, expected F32, F16, BF16 or F64; \
         save the checkpoint unquantised"
    )]
    TensorDtype {
        /// The tensor.
        name: String,
        /// Its file.
        path: PathBuf,
        /// Its element type.
        got: Dtype,
    },

    /// A setting of an export that cannot be used.
    #[error("{setting} \"{got}\" cannot be exported; expected {expected}")]
    ExportSetting {
        /// Which setting.
        setting: &'static str,
        /// What was given.
        got: String,
        /// What is understood.
        expected: &'static str,
    },

    /// A parameter could not be read to be exported.
    #[error("parameter \"{path}\" cannot be read to be exported")]
    Read {
        /// Where it is in the module.
        path: String,
        /// What whoever reads it says.
        source: ReadError,
    },

    /// Another number of elements than asked for came to be exported.
    #[error(
        "{expected} elements of parameter \"{path}\" were asked for to be exported, {got} came; check that the \
         configuration is the model's"
    )]
    ReadSize {
        /// Where the parameter is in the module.
        path: String,
        /// Elements asked for.
        expected: usize,
        /// Elements that came.
        got: usize,
    },

    /// A number that the element type of an export cannot hold.
    #[error("tensor \"{name}\" has the element {value:e}, which is infinite in {dtype}; export as {instead}")]
    Overflow {
        /// The tensor, as Hugging Face names it.
        name: String,
        /// The number.
        value: f32,
        /// The element type.
        dtype: String,
        /// The types that can hold it.
        instead: &'static str,
    },

    /// A checkpoint could not be written.
    #[error(transparent)]
    Write(#[from] zero_core::checkpoint::CheckpointError),
}

/// What the system answers to `action` on a file, as an error.
pub(crate) fn io_at(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> ModelError {
    move |source| ModelError::Io { action, path: path.to_path_buf(), source }
}

/// Whether each value is right, with the name of its field, what it is, and what it may be: or the first that is wrong.
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

/// A tensor whose shape is not the one that the model has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "tensor \"{name}\" in {} has shape {got:?}, expected {expected:?}",
    path.file_name().unwrap_or(path.as_os_str()).display()
)]
pub struct ShapeMismatch {
    /// The tensor, as the file names it.
    pub name: String,
    /// The file it lies in.
    pub path: PathBuf,
    /// The shape that the model has, in the layout of the file.
    pub expected: Vec<usize>,
    /// The shape in the file.
    pub got: Vec<usize>,
}

/// How many names a message lists before it says "and n more".
const LISTED: usize = 10;

/// Items with commas, and how many more there are behind the first 10.
pub fn listed<T: fmt::Display>(items: &[T]) -> String {
    let mut text = items.iter().take(LISTED).map(T::to_string).collect::<Vec<_>>().join(", ");
    if items.len() > LISTED {
        text += &format!(" and {} more", items.len() - LISTED);
    }
    text
}

/// How many names are missing and how many unexpected, and which; nothing if none is.
pub fn names_differ(missing: &[String], unexpected: &[String]) -> String {
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
            names_differ(&names, &names[..1]),
            "13 missing: t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and 3 more; 1 unexpected: t0"
        );
    }
}
