//! Facts about tensors, the engine and its optimizer.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;
use zero_core::checkpoint::{Manifest, TensorEntry};

/// State of the engine; missing or malformed values are `None`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct EngineFacts {
    /// Version of the engine's state.
    pub version: Option<u64>,
    /// ZeRO stage at save time.
    pub stage: Option<u64>,
    /// Type of the parameters in training, as in safetensors.
    pub param_dtype: Option<String>,
    /// Number of updates applied.
    pub steps: Option<u64>,
    /// Number of updates skipped because gradients overflowed.
    pub skipped: Option<u64>,
    /// Loss scale.
    pub loss_scale: Option<f64>,
    /// True if the loss scale is dynamic.
    pub loss_scale_dynamic: Option<bool>,
    /// Seed of the random streams.
    pub seed: Option<u64>,
    /// Number of ranks with a saved random stream.
    pub random_streams: Option<usize>,
}

/// A group of tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Group {
    /// Number of tensors.
    pub tensors: usize,
    /// Total elements.
    pub elements: u64,
    /// Total bytes.
    pub bytes: u64,
    /// Number of tensors of each type.
    pub dtypes: BTreeMap<String, usize>,
}

/// Tensors `optimizer.<parameter>.<state>` and the engine's facts about them.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct OptimizerFacts {
    /// Name of the optimizer, such as "adamw".
    pub name: Option<String>,
    /// All optimizer tensors.
    pub all: Group,
    /// Tensors by state name, such as "exp_avg".
    pub states: BTreeMap<String, Group>,
    /// Parameters that lack a state which others have, because they never had a gradient.
    pub without: Vec<String>,
    /// Fewest and most updates of any parameter.
    pub updates: Option<[u64; 2]>,
}

/// Meaning of a tensor's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// The parameter with this path.
    Parameter(&'a str),
    /// A parameter's path and the name of its optimizer state.
    OptimizerState(&'a str, &'a str),
    /// Not the engine's tensor.
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

impl EngineFacts {
    pub(super) fn new(engine: &Value) -> Self {
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

impl OptimizerFacts {
    /// Collects the facts; `engine` is the engine's state, or null.
    pub(super) fn new(manifest: &Manifest, engine: &Value) -> Self {
        let mut facts = Self {
            name: engine.pointer("/optimizer/name").and_then(Value::as_str).map(String::from),
            ..Self::default()
        };
        let mut states_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (name, tensor) in manifest.tensors.iter() {
            match Part::of(name) {
                Part::Parameter(path) => {
                    states_of.entry(path).or_default();
                }
                Part::OptimizerState(path, state) => {
                    facts.all.add(tensor);
                    facts.states.entry(state.to_string()).or_default().add(tensor);
                    states_of.entry(path).or_default().insert(state);
                }
                Part::Other => {}
            }
        }
        let lacking = states_of.into_iter().filter(|(_, states)| states.len() < facts.states.len());
        facts.without = lacking.map(|(path, _)| path.to_string()).collect();
        if let Some(times) = engine.pointer("/optimizer/times").and_then(Value::as_object) {
            let times = || times.values().filter_map(Value::as_u64);
            facts.updates = times().min().zip(times().max()).map(|(least, most)| [least, most]);
        }
        facts
    }
}

impl Group {
    pub(super) fn add(&mut self, tensor: &TensorEntry) {
        let elements = tensor.numel() as u64;
        self.tensors += 1;
        // Each tensor fits in a file, but a damaged manifest may name many large ones.
        self.elements = self.elements.saturating_add(elements);
        self.bytes = self.bytes.saturating_add(bytes(tensor));
        *self.dtypes.entry(tensor.dtype.to_string()).or_default() += 1;
    }
}

pub(super) fn bytes(tensor: &TensorEntry) -> u64 {
    tensor.numel() as u64 * tensor.dtype.size() as u64
}
