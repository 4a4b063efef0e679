//! One checkpoint: what it is of, whether it is sound, and what it is good for.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use zero_core::checkpoint::{Check, ElementType, Manifest, TensorEntry, disk_bytes};

use super::optimizer::OptimizerFacts;
use super::time::utc;
use super::words::Use;
use super::{FORMAT, InspectError};
use crate::export::model_of;

/// What was found out about one checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// See [`FORMAT`].
    pub format: u32,
    /// "checkpoint".
    pub kind: &'static str,
    /// Its folder.
    pub path: String,
    /// "contents" when every checksum was computed, "sizes" when only manifest, sizes and headers were looked at.
    pub checked: &'static str,
    /// Whether nothing is wrong, as far as was checked.
    pub sound: bool,
    /// Everything that is wrong.
    pub problems: Vec<String>,
    /// Size of the files in the folder.
    pub disk_bytes: u64,
    /// What it is of, if its manifest can be read.
    pub checkpoint: Option<Description>,
}

/// What a manifest says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// The training step.
    pub step: u64,
    /// Milliseconds since 1970.
    pub saved_unix_ms: u64,
    /// The same, as `2026-03-01T12:00:00Z`.
    pub saved: String,
    /// Version of the crate that wrote it.
    pub crate_version: String,
    /// Number of ranks that saved it.
    pub ranks: usize,
    /// What the engine says of itself.
    pub engine: Option<EngineFacts>,
    /// The model, if it is named.
    pub model: Option<ModelFacts>,
    /// Tensors `model.<path>`.
    pub parameters: Group,
    /// Tensors `optimizer.<path>.<state>`.
    pub optimizer: OptimizerFacts,
    /// All other tensors.
    pub other: Group,
    /// The outermost keys of the state.
    pub state_keys: Vec<String>,
    /// What it can be used for.
    #[serde(rename = "use")]
    pub good_for: Use,
    /// Every tensor, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors: Option<Vec<TensorFacts>>,
}

/// What the engine says; what it does not say, or in another form, is `None`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct EngineFacts {
    /// Version of its part of the state.
    pub version: Option<u64>,
    /// Stage that it was saved at.
    pub stage: Option<u64>,
    /// Type of the parameters in training, as in safetensors.
    pub param_dtype: Option<String>,
    /// Updates made.
    pub steps: Option<u64>,
    /// Updates skipped because gradients overflowed.
    pub skipped: Option<u64>,
    /// Factor of the loss.
    pub loss_scale: Option<f64>,
    /// Whether the factor follows the overflows.
    pub loss_scale_dynamic: Option<bool>,
    /// Seed of the random streams.
    pub seed: Option<u64>,
    /// Number of ranks whose random streams are there.
    pub random_streams: Option<usize>,
}

/// The model as the program that trained it names it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelFacts {
    /// Such as "gpt2".
    pub family: Option<String>,
    /// What the program calls it, such as "tiny".
    pub name: Option<String>,
    /// Its configuration.
    pub config: Value,
}

/// Some of the tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Group {
    /// How many.
    pub tensors: usize,
    /// Their elements.
    pub elements: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How many there are of each type.
    pub dtypes: BTreeMap<String, usize>,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorFacts {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: ElementType,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its bytes, over all ranks.
    pub bytes: u64,
}

/// What the name of a tensor says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// The parameter of this path.
    Parameter(&'a str),
    /// Of the parameter of this path, the state of this name.
    OptimizerState(&'a str, &'a str),
    /// Not the engine's.
    Other,
}

impl<'a> Part<'a> {
    pub(super) fn of(name: &'a str) -> Self {
        if let Some(path) = name.strip_prefix("model.") {
            return Part::Parameter(path);
        }
        match name.strip_prefix("optimizer.").and_then(|rest| rest.rsplit_once('.')) {
            Some((path, state)) => Part::OptimizerState(path, state),
            None => Part::Other,
        }
    }
}

/// Looks at the checkpoint in `path`; a damaged one is no error. With `tensors`, each tensor is listed.
///
/// # Errors
///
/// When the system does not let the folder be read.
pub fn inspect(path: &Path, check: Check, tensors: bool) -> Result<Inspection, InspectError> {
    let (manifest, problems) = match Manifest::read(path) {
        Ok(manifest) => {
            let problems = manifest.problems(path, check);
            (Some(manifest), problems)
        }
        Err(error) => (None, vec![error]),
    };
    Ok(Inspection {
        format: FORMAT,
        kind: "checkpoint",
        path: path.display().to_string(),
        checked: checked(check),
        sound: problems.is_empty(),
        disk_bytes: disk_bytes(path)?,
        checkpoint: manifest.map(|manifest| Description::new(path, manifest, problems.is_empty(), tensors)),
        problems: problems.iter().map(ToString::to_string).collect(),
    })
}

/// The word for how closely was looked.
pub(super) fn checked(check: Check) -> &'static str {
    match check {
        Check::Sizes => "sizes",
        Check::Contents => "contents",
    }
}

impl Description {
    fn new(path: &Path, manifest: Manifest, sound: bool, tensors: bool) -> Self {
        // One that cannot be read is among the problems.
        let state = manifest.state(path).unwrap_or(Value::Null);
        let engine = state.get("engine").unwrap_or(&Value::Null);
        let (mut parameters, mut other) = (Group::default(), Group::default());
        for (name, tensor) in manifest.tensors.iter() {
            match Part::of(name) {
                Part::Parameter(_) => parameters.add(tensor),
                Part::OptimizerState(..) => {}
                Part::Other => other.add(tensor),
            }
        }
        let optimizer = OptimizerFacts::new(&manifest, engine);
        let engine = engine.is_object().then(|| EngineFacts::new(engine));
        let model = state.get("model").filter(|model| model.is_object()).map(ModelFacts::new);
        let export = model_of(path, &state, &manifest.tensors);
        let has_trainer = state.get("trainer").is_some();
        let good_for = Use::new(manifest.world, engine.as_ref(), &parameters, &optimizer, has_trainer, export, sound);
        Self {
            step: manifest.step,
            saved_unix_ms: manifest.saved_unix_ms,
            saved: utc(manifest.saved_unix_ms),
            ranks: manifest.world,
            engine,
            model,
            parameters,
            optimizer,
            other,
            state_keys: state.as_object().map(|state| state.keys().cloned().collect()).unwrap_or_default(),
            good_for,
            tensors: tensors.then(|| manifest.tensors.iter().map(TensorFacts::new).collect()),
            crate_version: manifest.crate_version,
        }
    }
}

impl EngineFacts {
    fn new(engine: &Value) -> Self {
        let at = |place: &str| engine.pointer(place);
        let count = |place: &str| at(place).and_then(Value::as_u64);
        Self {
            version: count("/version"),
            stage: count("/stage"),
            param_dtype: at("/param_dtype").and_then(Value::as_str).map(String::from),
            steps: count("/steps"),
            skipped: count("/skipped"),
            loss_scale: at("/loss_scaler/scale").and_then(Value::as_f64),
            loss_scale_dynamic: at("/loss_scaler/kind").and_then(Value::as_str).map(|kind| kind == "dynamic"),
            seed: count("/random/seed"),
            random_streams: at("/random/draws").and_then(Value::as_array).map(Vec::len),
        }
    }
}

impl ModelFacts {
    fn new(model: &Value) -> Self {
        let text = |key: &str| model.get(key).and_then(Value::as_str).map(String::from);
        Self { family: text("family"), name: text("name"), config: model.get("config").cloned().unwrap_or(Value::Null) }
    }
}

impl Group {
    pub(super) fn add(&mut self, tensor: &TensorEntry) {
        let elements = tensor.numel() as u64;
        self.tensors += 1;
        // Each tensor fits into a file; a damaged manifest may name many such.
        self.elements = self.elements.saturating_add(elements);
        self.bytes = self.bytes.saturating_add(bytes(tensor));
        *self.dtypes.entry(tensor.dtype.to_string()).or_default() += 1;
    }
}

impl TensorFacts {
    fn new((name, tensor): (&String, &TensorEntry)) -> Self {
        Self { name: name.clone(), dtype: tensor.dtype, bytes: bytes(tensor), shape: tensor.shape.clone() }
    }
}

fn bytes(tensor: &TensorEntry) -> u64 {
    tensor.numel() as u64 * tensor.dtype.size() as u64
}
