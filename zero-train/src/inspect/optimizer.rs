//! What a checkpoint holds of an optimizer.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;
use zero_core::checkpoint::Manifest;

use super::facts::{Group, Part};

/// Tensors `optimizer.<parameter>.<state>` and what the engine says of them.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct OptimizerFacts {
    /// Its name, such as "adamw".
    pub name: Option<String>,
    /// All its tensors.
    pub all: Group,
    /// Its tensors by the name of the state, such as "exp_avg".
    pub states: BTreeMap<String, Group>,
    /// Parameters that lack a state which others have: those that have never had a gradient.
    pub without: Vec<String>,
    /// Fewest and most updates of a parameter.
    pub updates: Option<[u64; 2]>,
}

impl OptimizerFacts {
    /// `engine` is the engine's part of the state, or null.
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
