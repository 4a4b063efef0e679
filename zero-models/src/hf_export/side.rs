//! Files and keys of the folder that training began from, which an export keeps alongside the weights.

use std::path::Path;

use serde_json::Value;
use zero_core::checkpoint::{NewFolder, SideFile};

use crate::error::io_at;
use crate::{ModelConfig, Result};

const CONFIG: &str = "config.json";

const GENERATION: &str = "generation_config.json";

/// File names of tokenizers in transformers.
const TOKENIZER: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// Keys of a `config.json` that describe its weights, its own code or its head, and not the exported model.
const NOT_KEPT: [&str; 6] =
    ["_name_or_path", "auto_map", "num_labels", "problem_type", "quantization_config", "torch_dtype"];

/// Reads the files of a model's folder that are useful without its weights: `config.json`, `generation_config.json` and the tokenizer's
/// files. Their contents are not checked.
///
/// # Errors
/// The system's error, for an existing file that cannot be read.
pub fn side_files(folder: &Path) -> Result<Vec<SideFile>> {
    let names = [CONFIG, GENERATION].into_iter().chain(TOKENIZER);
    let there = names.map(|name| (name, folder.join(name))).filter(|(_, path)| path.is_file());
    let read = |(name, path): (&str, std::path::PathBuf)| {
        let bytes = std::fs::read(&path).map_err(io_at("read", &path))?.into();
        Ok(SideFile { name: name.into(), bytes })
    };
    there.map(read).collect()
}

/// Writes those of `files` that belong in an export of the model.
pub(super) fn write(folder: &NewFolder, config: &ModelConfig, files: &[SideFile]) -> Result<()> {
    let is_adapter = matches!(config, ModelConfig::Adapted(_));
    let is_kept = |name: &str| TOKENIZER.contains(&name) || (name == GENERATION && !is_adapter);
    files.iter().filter(|file| is_kept(&file.name)).try_for_each(|file| Ok(folder.write_file(&file.name, &file.bytes)?))
}

/// Adds the keys of the folder's `config.json` that the configuration lacks. Also restores its values of keys that training has not
/// changed, as they may be written in another way, or have no effect here.
pub(super) fn keep_keys(config: &mut Value, files: &[SideFile]) {
    let Some(file) = files.iter().find(|file| file.name == CONFIG) else { return };
    let read = ModelConfig::from_json(&String::from_utf8_lossy(&file.bytes));
    let given = serde_json::from_slice(&file.bytes);
    let (Ok(Value::Object(given)), Value::Object(own)) = (given, config) else { return };
    let read = read.map_or(Value::Null, |read| read.to_hf());
    for (key, value) in given {
        let is_changed = own.get(&key).is_some_and(|own| read.get(&key) != Some(own));
        if !is_changed && !NOT_KEPT.contains(&&*key) {
            own.insert(key, value);
        }
    }
}
