//! What is adapted, and how: PEFT's `adapter_config.json`, and the parameters that follow from it.

use std::path::{Path, PathBuf};

use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{did_you_mean, io_at};
use crate::{ModelConfig, ModelError, ModelParam};

/// The file of PEFT that describes an adapter.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// What names of an adapter's tensors begin with.
const PREFIX: &str = "base_model.model.";
/// In place of the names of layers: all linear layers but the head.
const ALL: &str = "all-linear";

/// Which layers are adapted, and how. Keys and defaults are those of PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoraConfig {
    /// The rank of what is added.
    pub r: usize,
    /// What is added is multiplied by `lora_alpha / r`.
    pub lora_alpha: f64,
    /// The probability with which an element of an adapter's input is dropped out.
    pub lora_dropout: f64,
    /// Layers, by their names in Hugging Face's model or the ends of these: `c_attn` is every `transformer.h.*.attn.c_attn`.
    /// One name alone may be a regular expression for the whole name, or `all-linear`. If empty, those that PEFT takes for the
    /// family.
    #[serde(with = "one_or_more")]
    pub target_modules: Vec<String>,
    /// Rank-stabilised, <https://arxiv.org/abs/2312.03732>: multiplied by `lora_alpha / sqrt(r)`.
    pub use_rslora: bool,
    /// Modules that are trained whole besides, and saved with the adapter: a fresh head.
    #[serde(with = "one_or_more")]
    pub modules_to_save: Vec<String>,
}

/// A list that may be null, or one text.
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

/// What only regular expressions have.
const REGEX: [char; 8] = ['*', '+', '(', '|', '[', '\\', '^', '$'];

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
    /// What an adapter's part is multiplied by.
    pub fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.lora_alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// Reads the `adapter_config.json` in a folder.
    ///
    /// # Errors
    /// When there is none, or it asks for what would give other results.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
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

    fn check(&self) -> Result<(), ModelError> {
        let wrong = |field, got: String, expected: &str| {
            Err(ModelError::ConfigValue { model: "LoRA", field, got, expected: expected.to_string() })
        };
        if self.r == 0 {
            return wrong("r", "0".into(), "at least 1");
        }
        if !self.lora_alpha.is_finite() {
            return wrong("lora_alpha", self.lora_alpha.to_string(), "a number");
        }
        if !(0.0..1.0).contains(&self.lora_dropout) {
            return wrong("lora_dropout", self.lora_dropout.to_string(), "at least 0 and below 1");
        }
        Ok(())
    }
}

/// Keys of PEFT that are this configuration's, or change nothing here: where an adapter comes from, and how fresh ones are drawn.
const KEYS: [&str; 21] = [
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
    "init_lora_weights",
    "loftq_config",
    "corda_config",
    "eva_config",
    "megatron_core",
    "peft_version",
    "task_type",
    "qalora_group_size",
    "layers_pattern",
    "ensure_weight_tying",
];

/// Refuses all other keys that are not empty: they would give other results.
fn check_implemented(keys: &Map<String, Value>) -> Result<(), ModelError> {
    let implemented = |key: &str, value: &Value| match (key, value) {
        ("peft_type", value) => value == "LORA",
        ("bias", value) => value == "none",
        (_, Value::Null | Value::Bool(false)) => true,
        (_, Value::Array(items)) => items.is_empty(),
        (_, Value::Object(items)) => items.is_empty(),
        _ => false,
    };
    match keys.iter().find(|(key, value)| !KEYS.contains(&key.as_str()) && !implemented(key, value)) {
        None => Ok(()),
        Some((key, got)) => {
            let problem = format!(
                "LoRA with {key} = {got} is not implemented, and ignoring it would give other results; save the adapter \
                 without it"
            );
            Err(ModelError::Adapter { problem })
        }
    }
}

/// A layer that is adapted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layer {
    /// Its path in the module.
    pub(super) path: String,
    /// Its name in Hugging Face's model.
    pub(super) name: String,
    /// `[d_in, d_out]`
    pub(super) shape: [usize; 2],
}

/// A model with an adapter: what a checkpoint of the adapter alone has to say about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdaptedModel {
    /// The model that stays as it is.
    pub base: Box<ModelConfig>,
    /// The folder with its weights, if they came from one.
    pub weights: Option<PathBuf>,
    /// What is trained.
    pub lora: LoraConfig,
}

impl AdaptedModel {
    /// A model of the family of `base`.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] when a name that `lora` asks for is no layer's, and for values that are none.
    pub fn new(base: ModelConfig, lora: LoraConfig, weights: Option<PathBuf>) -> Result<Self, ModelError> {
        lora.check()?;
        let adapted = Self { base: Box::new(base), weights, lora };
        adapted.layers()?;
        adapted.saved()?;
        Ok(adapted)
    }

    /// The layers that are adapted.
    pub(super) fn layers(&self) -> Result<Vec<Layer>, ModelError> {
        let targets: Vec<String> = match &*self.lora.target_modules {
            [] => self.base.lora_targets()?.iter().map(ToString::to_string).collect(),
            targets => targets.to_vec(),
        };
        let all = linears(&self.base);
        let is_pattern = |text: &str| text.contains(REGEX);
        let found: Vec<Layer> = match &*targets {
            [one] if one == ALL => all.clone(),
            [one] if is_pattern(one) => {
                let problem = |error| ModelError::Adapter { problem: format!("target_modules {one:?}: {error}") };
                let whole = Regex::new(&format!("^(?:{one})$")).map_err(problem)?;
                all.iter().filter(|layer| whole.is_match(&layer.name)).cloned().collect()
            }
            targets => {
                for target in targets {
                    if !all.iter().any(|layer| ends_with(&layer.name, target)) {
                        return Err(unknown("target_modules", target, all.iter().map(|layer| &*layer.name)));
                    }
                }
                let wanted = |layer: &&Layer| targets.iter().any(|target| ends_with(&layer.name, target));
                all.iter().filter(wanted).cloned().collect()
            }
        };
        match found.is_empty() {
            true => Err(unknown("target_modules", &targets[0], all.iter().map(|layer| &*layer.name))),
            false => Ok(found),
        }
    }

    /// The parameters of [`LoraConfig::modules_to_save`].
    fn saved(&self) -> Result<Vec<ModelParam>, ModelError> {
        let parameters = self.base.parameters();
        let module =
            |param: &ModelParam| param.name.rsplit_once('.').map_or(String::new(), |(module, _)| module.to_string());
        let modules = &self.lora.modules_to_save;
        // The module itself, or one that it is in.
        let within = |name: &str, wanted: &str| {
            let mut ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
            ends.any(|at| ends_with(&name[..at], wanted))
        };
        let wanted = |param: &ModelParam| modules.iter().any(|wanted| within(&module(param), wanted));
        let saved: Vec<ModelParam> = parameters.iter().filter(|param| wanted(param)).cloned().collect();
        match &**modules {
            // PEFT names the heads of all families, of which a model has one.
            [first, ..] if saved.is_empty() => {
                let modules: Vec<String> = parameters.iter().map(module).collect();
                Err(unknown("modules_to_save", first, modules.iter().map(String::as_str)))
            }
            _ => Ok(saved),
        }
    }

    /// What is trained, with the names that PEFT gives it: adapters, and modules that are saved besides.
    pub fn parameters(&self) -> Vec<ModelParam> {
        let layers = self.layers().expect("it was checked when it was made");
        let saved = self.saved().expect("it was checked when it was made");
        let adapters = layers.into_iter().flat_map(|Layer { path, name, shape: [d_in, d_out] }| {
            let r = self.lora.r;
            [("a", [d_in, r]), ("b", [r, d_out])].map(|(field, shape)| ModelParam {
                path: format!("{path}.adapter.{field}"),
                shape: shape.to_vec(),
                name: peft_name(&name, field),
                transposed: true,
            })
        });
        let saved = saved.into_iter().map(|param| ModelParam { name: format!("{PREFIX}{}", param.name), ..param });
        adapters.chain(saved).collect()
    }

    /// The text of PEFT's `adapter_config.json`.
    pub(crate) fn to_peft(&self) -> Value {
        let mut keys = serde_json::to_value(&self.lora).expect("numbers and texts have a JSON form");
        let layers = self.layers().expect("it was checked when it was made");
        if self.lora.target_modules.is_empty() {
            keys["target_modules"] = json!(self.base.lora_targets().expect("layers were found"));
        }
        keys["peft_type"] = json!("LORA");
        keys["task_type"] = json!(self.base.task_type());
        keys["base_model_name_or_path"] = json!(self.weights.as_ref().map(|dir| dir.display().to_string()));
        keys["bias"] = json!("none");
        // Whether the base stores weights as [in, out]: transformers' Conv1D.
        let in_out = |layer: &Layer| {
            let name = format!("{}.weight", layer.name);
            self.base.parameters().iter().any(|param| param.name == name && !param.transposed)
        };
        keys["fan_in_fan_out"] = json!(layers.iter().any(in_out));
        keys["inference_mode"] = json!(true);
        keys
    }
}

/// PEFT's name of a field of a layer's adapter.
pub(crate) fn peft_name(layer: &str, field: &str) -> String {
    format!("{PREFIX}{layer}.lora_{}.weight", field.to_uppercase())
}

/// The linear layers of a model: its matrices that are a layer's weight.
fn linears(model: &ModelConfig) -> Vec<Layer> {
    let linear = |param: ModelParam| {
        let shape = <[usize; 2]>::try_from(&*param.shape).ok()?;
        let [path, name] = [&param.path, &param.name].map(|text| text.strip_suffix(".weight").map(str::to_string));
        Some(Layer { path: path?, name: name?, shape })
    };
    model.parameters().into_iter().filter_map(linear).collect()
}

/// As PEFT compares names.
fn ends_with(name: &str, target: &str) -> bool {
    name.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn unknown<'a>(key: &str, got: &str, names: impl Iterator<Item = &'a str>) -> ModelError {
    let mut ends: Vec<&str> = names.map(|name| name.rsplit('.').next().unwrap_or(name)).collect();
    ends.sort_unstable();
    ends.dedup();
    let last = got.rsplit('.').next().unwrap_or(got);
    let problem = format!(
        "{key} has \"{got}\", which no layer of the model is called{}; its layers are {}",
        did_you_mean(last, &ends),
        ends.join(", ")
    );
    ModelError::Adapter { problem }
}
