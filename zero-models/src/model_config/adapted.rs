//! A model with a LoRA adapter: the adapted layers, and the parameters that follow from them.

use std::path::PathBuf;

use fancy_regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zero_core::random::Stream;

use super::ModelConfig;
use crate::error::did_you_mean;
use crate::hf_params::{AS_NAMED, Rules, stored};
use crate::peft::{ALL, LoraConfig, PREFIX, REGEX, peft_name};
use crate::safetensors_file::{Checkpoint, StoredTensor};
use crate::{ModelError, ModelParam, Result};

/// A layer with an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    /// Path in the module.
    pub(crate) path: String,
    /// Name in Hugging Face's model.
    pub(crate) name: String,
    /// `[d_in, d_out]`
    pub(crate) shape: [usize; 2],
    /// True if it is an embedding table, whose rows are looked up.
    pub(crate) is_table: bool,
}

impl Layer {
    /// Returns the path of its adapter.
    pub(crate) fn adapter(&self) -> String {
        format!("{}{}", self.path, if self.is_table { "_adapter" } else { ".adapter" })
    }
}

/// A model with a LoRA adapter, as a checkpoint of the adapter alone describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdaptedModel {
    /// The base model.
    pub base: Box<ModelConfig>,
    /// The folder of the base model's weights, if they came from one.
    pub weights: Option<PathBuf>,
    /// The settings of the adapter.
    pub lora: LoraConfig,
}

impl AdaptedModel {
    /// Describes the model `base` with the adapter `lora`.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] if no layer has a name that `lora` asks for, or if a value is invalid.
    pub fn new(base: ModelConfig, lora: LoraConfig, weights: Option<PathBuf>) -> Result<Self> {
        lora.check()?;
        let adapted = Self { base: Box::new(base), weights, lora };
        adapted.layers()?;
        adapted.saved()?;
        Ok(adapted)
    }

    /// Returns the layers that have adapters.
    pub(crate) fn layers(&self) -> Result<Vec<Layer>> {
        let targets: Vec<String> = match &*self.lora.target_modules {
            [] => self.base.lora_targets()?.iter().map(ToString::to_string).collect(),
            targets => targets.to_vec(),
        };
        // A layer that is saved in full has no adapter.
        let is_saved = |layer: &Layer| {
            let modules = &self.lora.modules_to_save;
            modules.iter().any(|module| {
                layer
                    .name
                    .split('.')
                    .scan(0, |end, part| {
                        *end += part.len() + 1;
                        Some(&layer.name[..*end - 1])
                    })
                    .any(|within| ends_with(within, module))
            })
        };
        let linear: Vec<Layer> = linears(&self.base).into_iter().filter(|layer| !is_saved(layer)).collect();
        let all: Vec<Layer> =
            linear.iter().cloned().chain(table(&self.base).filter(|layer| !is_saved(layer))).collect();
        let is_pattern = |text: &str| text.contains(REGEX);
        let found: Vec<Layer> = match &*targets {
            [one] if one == ALL => {
                let saved: Vec<String> = self.saved()?.into_iter().map(|param| param.path).collect();
                let is_adapted = |layer: &Layer| !saved.contains(&format!("{}.weight", layer.path));
                linear.into_iter().filter(is_adapted).collect()
            }
            [one] if is_pattern(one) => {
                let problem = |error| ModelError::Adapter { problem: format!("target_modules {one:?}: {error}") };
                let whole = Regex::new(&format!("^(?:{one})$")).map_err(problem)?;
                let mut found = Vec::new();
                for layer in &all {
                    if whole.is_match(&layer.name).map_err(problem)? {
                        found.push(layer.clone());
                    }
                }
                found
            }
            // One match is enough, as in PEFT, whose list names the layers of many families.
            targets => {
                let wanted = |layer: &&Layer| targets.iter().any(|target| ends_with(&layer.name, target));
                all.iter().filter(wanted).cloned().collect()
            }
        };
        if let Some(other) = self.other_target(&targets) {
            let problem = format!(
                "target_modules has {other}, a table that cannot have an adapter: remove it, or train the full table \
                 (modules_to_save)"
            );
            return Err(ModelError::Adapter { problem });
        }
        match found.is_empty() {
            true => Err(unknown("target_modules", &targets[0], all.iter().map(|layer| &*layer.name))),
            false => Ok(found),
        }
    }

    /// Returns a target that PEFT adapts and this crate does not: a head that is a table, or a position table.
    fn other_target(&self, targets: &[String]) -> Option<String> {
        if matches!(targets, [one] if one == ALL || one.contains(REGEX)) {
            return None;
        }
        let adaptable: Vec<Layer> = linears(&self.base).into_iter().chain(table(&self.base)).collect();
        let tables = self.base.parameters().into_iter().filter(|param| param.shape.len() == 2).map(|param| param.name);
        // A classifier has no head for tokens.
        let is_head = |name: &str| !matches!(&*self.base, ModelConfig::Bert(_)) && name.contains("lm_head");
        let repeats = self.base.rules().repeats.iter().map(|(name, _)| name.to_string()).filter(|name| is_head(name));
        let names = tables.chain(repeats).filter_map(|name| name.strip_suffix(".weight").map(str::to_string));
        let mut others = names.filter(|name| !adaptable.iter().any(|layer| layer.name == *name));
        others.find(|name| targets.iter().any(|target| ends_with(name, target)))
    }

    /// Returns `true` if the parameter at this path of the base is the weight of a linear layer of the module; a head that is a table is
    /// not.
    pub fn is_linear(&self, path: &str) -> bool {
        linears(&self.base).iter().any(|layer| path.strip_suffix(".weight") == Some(&layer.path))
    }

    /// Returns the parameters of [`LoraConfig::modules_to_save`].
    fn saved(&self) -> Result<Vec<ModelParam>> {
        let parameters = self.base.parameters();
        let module =
            |param: &ModelParam| param.name.rsplit_once('.').map_or(String::new(), |(module, _)| module.to_string());
        let modules = &self.lora.modules_to_save;
        // The module itself, or one that contains it. PEFT compares the ends of names here, so that `classifier` also matches
        // `pre_classifier`.
        let within = |name: &str, wanted: &str| {
            let mut ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
            ends.any(|at| name[..at].ends_with(wanted))
        };
        let wanted = |param: &ModelParam| modules.iter().any(|wanted| within(&module(param), wanted));
        let saved: Vec<ModelParam> = parameters.iter().filter(|param| wanted(param)).cloned().collect();
        match &**modules {
            // By default, PEFT names the heads of other families, and then trains no head in full.
            modules if saved.is_empty() && modules.iter().all(|name| name == "classifier" || name == "score") => {
                Ok(saved)
            }
            [first, ..] if saved.is_empty() => {
                let modules: Vec<String> = parameters.iter().map(module).collect();
                Err(unknown("modules_to_save", first, modules.iter().map(String::as_str)))
            }
            _ => Ok(saved),
        }
    }

    /// Returns the trained parameters with their names in PEFT: adapters, and modules that are saved in full.
    pub fn parameters(&self) -> Vec<ModelParam> {
        let layers = self.layers().expect("it was checked when it was made");
        let saved = self.saved().expect("it was checked when it was made");
        let adapters = layers.into_iter().flat_map(|layer| {
            let (r, [d_in, d_out]) = (self.lora.r, layer.shape);
            [("a", [d_in, r]), ("b", [r, d_out])].map(|(field, shape)| ModelParam {
                path: format!("{}.{field}", layer.adapter()),
                shape: shape.to_vec(),
                name: peft_name(&layer.name, field, layer.is_table),
                transposed: true,
            })
        });
        let saved = saved.into_iter().map(|param| ModelParam { name: format!("{PREFIX}{}", param.name), ..param });
        adapters.chain(saved).collect()
    }

    /// Calls `each` with the parameters of a fresh adapter and their initial values: `A` uniform as in PEFT and `B` zero; of a table, `A`
    /// zero and `B` normal. They are those of [`lora::adapt`](crate::lora::adapt()) on ranks with this seed, after the weights of the base
    /// were loaded.
    pub fn fresh(&self, seed: u64, mut each: impl FnMut(ModelParam, Vec<f32>)) {
        let layers = self.layers().expect("it was checked when it was made");
        // The base's parameters were created first, then adapters in the order of their layers in the module.
        let base = self.base.parameters();
        let place = |param: &ModelParam| {
            let adapter = param.path.strip_suffix(".a").or(param.path.strip_suffix(".b"));
            layers.iter().filter(|layer| Some(&*layer.adapter()) == adapter).find_map(|layer| {
                let weight = if layer.is_table { layer.path.clone() } else { format!("{}.weight", layer.path) };
                base.iter().position(|param| param.path == weight)
            })
        };
        let mut parameters: Vec<ModelParam> = self.parameters().into_iter().take(2 * layers.len()).collect();
        parameters.sort_by_key(place);
        for (param, birth) in parameters.into_iter().zip(base.len() as u64..) {
            let is_table = param.name.contains("lora_embedding");
            let (stream, all) = (Stream::of_parameter(seed, birth, None), 0..param.numel());
            let values = match (param.path.ends_with(".a"), is_table) {
                (true, false) => {
                    // The initialization of torch's linear layers.
                    let bound = (param.shape[0] as f64).sqrt().recip();
                    // 24 bits, as Zero's draws have.
                    let unit = |i: usize| (stream.bits(i as u64) >> 40) as f64 * (1.0 / (1u64 << 24) as f64);
                    all.map(|i| (2.0 * bound * unit(i) - bound) as f32).collect()
                }
                (false, true) => stream.normals(all, 0.0, 1.0, |x| x as f32),
                _ => vec![0.0; all.len()],
            };
            each(param, values);
        }
    }

    /// Pairs the parameters with their tensors in a file of PEFT. Its names may lack the prefixes that the base model's names may lack.
    pub(super) fn stored<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Vec<(ModelParam, StoredTensor<'a>)>> {
        let base = self.base.rules();
        let named = |name: &str| self.in_state_dict(name);
        let repeats = base.repeats.iter().map(|(name, of)| (format!("{PREFIX}{name}"), format!("{PREFIX}{of}")));
        let repeats: Vec<(String, String)> = repeats.collect();
        let repeats: Vec<(&str, &str)> = repeats.iter().map(|(name, of)| (name.as_str(), of.as_str())).collect();
        stored(self.parameters(), checkpoint, Rules { in_state_dict: &named, repeats: &repeats, ..AS_NAMED })
    }

    /// Returns the name of an adapter's tensor with the prefix of the full model's names.
    fn in_state_dict(&self, name: &str) -> Option<String> {
        const FIELDS: [&str; 4] = [".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B"];
        if name.contains(".base_layer.") {
            return None;
        }
        let Some(name) = name.strip_prefix(PREFIX) else { return Some(name.to_string()) };
        let of_base = self.base.rules().in_state_dict;
        let field = FIELDS.iter().find_map(|field| Some((name.strip_suffix(field)?, *field)));
        let whole = match field {
            Some((module, field)) => {
                let weight = of_base(&format!("{module}.weight"))?;
                format!("{}{field}", weight.strip_suffix(".weight").unwrap_or(&weight))
            }
            None => of_base(name)?,
        };
        Some(format!("{PREFIX}{whole}"))
    }

    /// Adds tables that a file holds in full although no key names them, as PEFT saves them with `save_embedding_layers`.
    pub(crate) fn with_saved_tables(&self, checkpoint: &Checkpoint) -> Self {
        let mut all = self.clone();
        let known = self.parameters();
        let tables = [self.base.adaptable_table().map(|(path, _)| path), Some("lm_head")];
        let base = self.base.parameters();
        for param in base.iter().filter(|param| tables.contains(&Some(&*param.path))) {
            let is_own = |name: &str| base.iter().any(|param| param.name == name);
            let repeats = self.base.rules().repeats.iter().filter(|(name, of)| *of == param.name && !is_own(name));
            let repeats = repeats.map(|(name, _)| *name);
            let names: Vec<String> = repeats.chain([&*param.name]).map(|name| format!("{PREFIX}{name}")).collect();
            let is_there = |name: &str| self.in_state_dict(name).is_some_and(|name| names.contains(&name));
            let is_new = !known.iter().any(|known| known.path == param.path);
            if is_new && checkpoint.names().any(is_there) {
                let module = param.name.trim_end_matches(".weight").to_string();
                all.lora.modules_to_save.push(module);
            }
        }
        all
    }

    /// Returns the keys of PEFT's `adapter_config.json`.
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
        // True if the base stores the weight as [in, out]: transformers' Conv1D.
        let in_out = |layer: &Layer| {
            let name = format!("{}.weight", layer.name);
            self.base.parameters().iter().any(|param| param.name == name && !param.transposed)
        };
        keys["fan_in_fan_out"] = json!(layers.iter().any(|layer| !layer.is_table && in_out(layer)));
        keys["inference_mode"] = json!(true);
        keys
    }
}

/// Returns the linear layers of a model: its matrices that are the weight of a layer.
fn linears(model: &ModelConfig) -> Vec<Layer> {
    let linear = |param: ModelParam| {
        let shape = <[usize; 2]>::try_from(&*param.shape).ok()?;
        let [path, name] = [&param.path, &param.name].map(|text| text.strip_suffix(".weight").map(str::to_string));
        Some(Layer { path: path?, name: name?, shape, is_table: false })
    };
    model.parameters().into_iter().filter_map(linear).collect()
}

/// Returns the token embedding of a model, if it can have an adapter.
fn table(model: &ModelConfig) -> Option<Layer> {
    let (path, _) = model.adaptable_table()?;
    let param = model.parameters().into_iter().find(|param| param.path == path)?;
    let name = param.name.strip_suffix(".weight")?.to_string();
    Some(Layer { path: param.path, name, shape: <[usize; 2]>::try_from(&*param.shape).ok()?, is_table: true })
}

/// Compares names as PEFT does: `target` must be the name, or its last parts.
fn ends_with(name: &str, target: &str) -> bool {
    name.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn unknown<'a>(key: &str, got: &str, names: impl Iterator<Item = &'a str>) -> ModelError {
    let mut ends: Vec<&str> = names.map(|name| name.rsplit('.').next().unwrap_or(name)).collect();
    ends.sort_unstable();
    ends.dedup();
    let last = got.rsplit('.').next().unwrap_or(got);
    let problem = format!(
        "{key} has \"{got}\", which matches no layer of the model{}; its layers are {}",
        did_you_mean(last, &ends),
        ends.join(", ")
    );
    ModelError::Adapter { problem }
}
