//! Inspects one checkpoint: its contents, integrity and possible uses.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use zero_core::checkpoint::{Check, ElementType, Manifest, TensorEntry, disk_bytes};

use super::facts::{EngineFacts, Group, OptimizerFacts, Part, bytes};
use super::time::utc;
use super::words::Use;
use super::{FORMAT, InspectError};
use zero_train::export::model_of;

/// Result of inspecting one checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// See [`FORMAT`].
    pub format: u32,
    /// "checkpoint".
    pub kind: &'static str,
    /// Path of the checkpoint's folder.
    pub path: String,
    /// "contents" if every checksum was computed, "sizes" if only manifest, sizes and headers were read.
    pub checked: &'static str,
    /// True if no check found a problem.
    pub sound: bool,
    /// All problems found.
    pub problems: Vec<String>,
    /// Size of the folder's files in bytes.
    pub disk_bytes: u64,
    /// Description of the contents, if the manifest can be read.
    pub checkpoint: Option<Description>,
}

/// Contents of a manifest.
// A field for each of `--json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// The training step.
    pub step: u64,
    /// Milliseconds since 1970.
    pub saved_unix_ms: u64,
    /// The same time, as `2026-03-01T12:00:00Z`.
    pub saved: String,
    /// Version of the crate that wrote it.
    pub crate_version: String,
    /// Number of ranks that saved it.
    pub ranks: usize,
    /// State saved by the engine.
    pub engine: Option<EngineFacts>,
    /// The model, if the program recorded one.
    pub model: Option<ModelFacts>,
    /// Tensors `model.<path>`.
    pub parameters: Group,
    /// Tensors `optimizer.<path>.<state>`.
    pub optimizer: OptimizerFacts,
    /// All other tensors.
    pub other: Group,
    /// Top-level keys of the state.
    pub state_keys: Vec<String>,
    /// Possible uses.
    #[serde(rename = "use")]
    pub good_for: Use,
    /// Every tensor, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensors: Option<Vec<TensorFacts>>,
}

/// The model, as recorded by the program that trained it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelFacts {
    /// Family, such as "gpt2".
    pub family: Option<String>,
    /// The program's name for it, such as "tiny".
    pub name: Option<String>,
    /// Configuration.
    pub config: Value,
}

/// Element type and dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Kind {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions of the full tensor.
    pub shape: Vec<usize>,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorFacts {
    /// Name of the tensor.
    pub name: String,
    /// Element type and dimensions.
    #[serde(flatten)]
    pub kind: Kind,
    /// Size in bytes, over all ranks.
    pub bytes: u64,
}

/// Inspects the checkpoint in `path`; a damaged one is not an error. If `tensors` is set, every tensor is listed.
///
/// # Errors
///
/// Returns an error if the folder cannot be read.
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

/// Returns the name of the check level.
pub(super) fn checked(check: Check) -> &'static str {
    match check {
        Check::Sizes => "sizes",
        Check::Contents => "contents",
    }
}

impl Description {
    fn new(path: &Path, manifest: Manifest, sound: bool, tensors: bool) -> Self {
        // A state that cannot be read is already among the problems.
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

impl ModelFacts {
    fn new(model: &Value) -> Self {
        let text = |key: &str| model.get(key).and_then(Value::as_str).map(String::from);
        Self { family: text("family"), name: text("name"), config: model.get("config").cloned().unwrap_or(Value::Null) }
    }
}

impl TensorFacts {
    fn new((name, tensor): (&String, &TensorEntry)) -> Self {
        Self {
            name: name.clone(),
            kind: Kind { dtype: tensor.dtype, shape: tensor.shape.clone() },
            bytes: bytes(tensor),
        }
    }
}
