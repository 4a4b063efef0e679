//! PEFT's `adapter_config.json`, which selects the adapted layers and sets the adapters' rank and scale.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{check_each, io_at};
use crate::{ModelError, Result};

/// PEFT's file that describes an adapter.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// Prefix of the names of an adapter's tensors.
pub(crate) const PREFIX: &str = "base_model.model.";
/// All linear layers except the head, in place of the names of layers.
pub(crate) const ALL: &str = "all-linear";

/// Settings of LoRA adapters. Keys and defaults are those of PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoraConfig {
    /// Rank of the adapters.
    pub r: usize,
    /// The adapter's output is multiplied by `lora_alpha / r`.
    pub lora_alpha: f64,
    /// Dropout probability of an adapter's input.
    pub lora_dropout: f64,
    /// Linear layers and embedding tables, by their names in Hugging Face's model or the ends of these: `c_attn` selects every
    /// `transformer.h.*.attn.c_attn`. A single entry may be `all-linear`, or a regular expression for the full name. If empty, PEFT's
    /// default for the family.
    #[serde(with = "one_or_more")]
    pub target_modules: Vec<String>,
    /// True for rank-stabilized LoRA, <https://arxiv.org/abs/2312.03732>: the factor is `lora_alpha / sqrt(r)`.
    pub use_rslora: bool,
    /// Modules that are trained in full, and saved with the adapter, such as a new head.
    #[serde(with = "one_or_more")]
    pub modules_to_save: Vec<String>,
}

/// Serialization of a list that may be null or a single string.
mod one_or_more {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        None,
        One(String),
        More(Vec<String>),
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        Ok(match Form::deserialize(from)? {
            Form::None => Vec::new(),
            Form::One(text) => vec![text],
            Form::More(texts) => texts,
        })
    }

    pub fn serialize<S: Serializer>(texts: &[String], to: S) -> Result<S::Ok, S::Error> {
        match texts {
            [] => to.serialize_none(),
            [one] if one == super::ALL || one.contains(super::REGEX) => one.serialize(to),
            more => more.serialize(to),
        }
    }
}

/// Characters that only regular expressions contain.
pub(crate) const REGEX: [char; 8] = ['*', '+', '(', '|', '[', '\\', '^', '$'];

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: Vec::new(),
            use_rslora: false,
            modules_to_save: Vec::new(),
        }
    }
}

impl LoraConfig {
    /// Returns the factor of an adapter's output.
    pub fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.lora_alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// Reads the `adapter_config.json` in a folder.
    ///
    /// # Errors
    /// If there is none, or a setting is not implemented and would change the results.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG);
        let text = std::fs::read_to_string(&path).map_err(io_at("read", &path))?;
        let read = || {
            let syntax = |source| ModelError::ConfigSyntax { model: "LoRA", source };
            let keys: Map<String, Value> = serde_json::from_str(&text).map_err(syntax)?;
            check_implemented(&keys)?;
            let config: Self = serde_json::from_value(keys.into()).map_err(syntax)?;
            config.check()?;
            Ok(config)
        };
        read().map_err(|error| ModelError::InFile { path: path.clone(), error: Box::new(error) })
    }

    pub(crate) fn check(&self) -> Result<()> {
        let Self { r, lora_alpha: alpha, lora_dropout: p, .. } = *self;
        let values = [
            (r > 0, "r", r.to_string(), "at least 1"),
            (alpha.is_finite(), "lora_alpha", alpha.to_string(), "a finite number"),
            ((0.0..1.0).contains(&p), "lora_dropout", p.to_string(), "at least 0 and below 1"),
        ];
        check_each("LoRA", values)
    }
}

/// Keys of PEFT that this configuration has, or that have no effect here: the origin of an adapter, and initialization.
const KEYS: [&str; 18] = [
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "modules_to_save",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "fan_in_fan_out",
    "eva_config",
    "megatron_core",
    "peft_version",
    "task_type",
    "qalora_group_size",
    "layers_pattern",
    "ensure_weight_tying",
];

/// Rejects all other keys that are not empty: they would change the results.
fn check_implemented(keys: &Map<String, Value>) -> Result<()> {
    let implemented = |key: &str, value: &Value| match (key, value) {
        ("peft_type", value) => value == "LORA",
        ("bias", value) => value == "none",
        // The initialization of new adapters. Other methods change the base too.
        ("init_lora_weights", value) => match value.as_str() {
            Some(how) => ["gaussian", "orthogonal", "eva"].contains(&how),
            None => value.is_boolean() || value.is_null(),
        },
        (_, Value::Null | Value::Bool(false)) => true,
        (_, Value::Array(items)) => items.is_empty(),
        (_, Value::Object(items)) => items.is_empty(),
        _ => false,
    };
    match keys.iter().find(|(key, value)| !KEYS.contains(&key.as_str()) && !implemented(key, value)) {
        None => Ok(()),
        Some((key, got)) if key == "init_lora_weights" => {
            let problem = format!(
                "LoRA with init_lora_weights = {got} needs a base model whose weights its initialization changed \
                 (PiSSA, OLoRA, CorDA, LoftQ): convert it with PEFT's \
                 save_pretrained(path_initial_model_for_weight_conversion=...)"
            );
            Err(ModelError::Adapter { problem })
        }
        Some((key, got)) => {
            let problem = format!(
                "LoRA with {key} = {got} is not implemented, and ignoring it would change the results; save the \
                 adapter without it"
            );
            Err(ModelError::Adapter { problem })
        }
    }
}

/// Returns PEFT's name of an adapter's field, for a layer or an embedding table.
pub(crate) fn peft_name(layer: &str, field: &str, is_table: bool) -> String {
    let field = field.to_uppercase();
    if is_table {
        format!("{PREFIX}{layer}.lora_embedding_{field}")
    } else {
        format!("{PREFIX}{layer}.lora_{field}.weight")
    }
}
