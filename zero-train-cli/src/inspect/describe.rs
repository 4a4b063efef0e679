//! One checkpoint: what it is of, whether it is sound, and what it is good for.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use zero_core::checkpoint::{Check, ElementType, Manifest, TensorEntry, disk_bytes};

use super::facts::{EngineFacts, Group, OptimizerFacts, Part, bytes};
use super::time::utc;
use super::words::Use;
use super::{FORMAT, InspectError};
use zero_train::export::model_of;

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
// A field for each of `--json`.
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

/// Element type and dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Kind {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions of the whole.
    pub shape: Vec<usize>,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorFacts {
    /// Its name.
    pub name: String,
    /// Element type and dimensions.
    #[serde(flatten)]
    pub kind: Kind,
    /// Its bytes, over all ranks.
    pub bytes: u64,
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
