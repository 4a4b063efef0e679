//! What is told of tensors and of the engine.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use zero_core::checkpoint::TensorEntry;

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

pub(super) fn bytes(tensor: &TensorEntry) -> u64 {
    tensor.numel() as u64 * tensor.dtype.size() as u64
}
