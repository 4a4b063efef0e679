//! The state of an engine in a checkpoint, and the names of its tensors: one format for all versions of Burn.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::CheckpointError;
use crate::{Buffer, Collective};

/// Key of the engine's state within a checkpoint's state.
pub const ENGINE: &str = "engine";

/// The version of [`EngineState`] that is written, and the newest that is read.
pub const STATE_VERSION: u32 = 1;

/// Returns the name of a parameter's tensor.
pub fn parameter_name(path: &str) -> String {
    format!("model.{path}")
}

/// Returns the name of the tensor of a parameter's optimizer state.
pub fn state_name(path: &str, name: &str) -> String {
    format!("optimizer.{path}.{name}")
}

/// State that an engine's next step depends on, in addition to its tensors. `S` is the state of its loss scale.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineState<S> {
    /// [`STATE_VERSION`].
    pub version: u32,
    /// Number of updates.
    pub steps: usize,
    /// Number of steps that were skipped because their gradients were not finite.
    pub skipped: usize,
    /// Informative; any stage can resume.
    pub stage: u8,
    /// Informative; any precision can resume.
    pub param_dtype: String,
    /// The loss scale with its history.
    pub loss_scaler: Option<S>,
    /// The optimizer's rule and counters.
    pub optimizer: OptimizerState,
    /// The ranks' random states.
    pub random: RandomStates,
}

/// An optimizer's rule and counters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OptimizerState {
    /// Name of the rule.
    pub name: String,
    /// Number of updates of each parameter that has been updated.
    pub times: BTreeMap<String, usize>,
}

/// The ranks' random states.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RandomStates {
    /// Seed of rank 0.
    pub seed: u64,
    /// Seed of each rank; empty if all are equal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub seeds: Vec<u64>,
    /// Number of draws of each rank.
    pub draws: Vec<u64>,
}

impl<S: DeserializeOwned> EngineState<S> {
    /// Takes the engine's state out of a checkpoint's state.
    ///
    /// # Errors
    ///
    /// The reason why there is none that can be read.
    pub fn take(state: &mut Map<String, Value>) -> Result<Self, String> {
        let state = state.remove(ENGINE).ok_or("it has no engine state: no engine has saved it")?;
        if let Some(version) = state["version"].as_u64().filter(|version| *version > STATE_VERSION.into()) {
            return Err(format!(
                "its engine state has version {version}, this program reads up to {STATE_VERSION}: update the program"
            ));
        }
        serde_json::from_value(state).map_err(|error| format!("its engine state cannot be read: {error}"))
    }
}

impl RandomStates {
    /// Gathers the ranks' seeds and numbers of draws. A collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Comm`].
    pub fn gather(comm: &dyn Collective, own: [u64; 2]) -> Result<Self, CheckpointError> {
        let all = comm.all_gather(Buffer::U8(own.map(u64::to_le_bytes).concat()));
        let doing = || "gathering random states".into();
        let all = all.map_err(|source| CheckpointError::Comm { doing: doing(), source: Box::new(source) })?.into_u8();
        let numbers = all.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number));
        let [mut seeds, draws] = [0, 1].map(|at| numbers.clone().skip(at).step_by(2).collect::<Vec<_>>());
        let seed = seeds[0];
        if seeds.iter().all(|other| *other == seed) {
            seeds.clear();
        }
        Ok(Self { seed, seeds, draws })
    }

    /// Returns the seed and the number of draws from which rank `rank` of `world` resumes. With another number of ranks, it continues from
    /// a draw that no rank has used.
    pub fn of(&self, rank: usize, world: usize) -> [u64; 2] {
        let own = |of: &[u64]| of.get(rank).copied().filter(|_| self.draws.len() == world);
        let most = || self.draws.iter().copied().max().unwrap_or(0);
        [own(&self.seeds).unwrap_or(self.seed), own(&self.draws).unwrap_or_else(most)]
    }
}
