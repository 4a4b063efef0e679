//! Any module, by its parameters: what exporting one of no known family takes.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{KeyMap, ModelError, ModelParam, Result};

/// A module of any family. It is data, so that a checkpoint which has it in its state is exported without the program that made it.
///
/// ```
/// use zero_models::{KeyMap, ModuleConfig};
///
/// // Burn's `Linear` has its weight as [in, out], PyTorch's as [out, in].
/// let names = KeyMap::new(&["^layers\\.([0-9]+)\\.=>encoder.layer.$1."], &["\\.weight$"])?;
/// let module = ModuleConfig::new([("layers.0.fc.weight".into(), vec![4, 8])]).renamed(&names)?;
/// assert_eq!(module.parameters[0].name, "encoder.layer.0.fc.weight");
/// assert_eq!(module.parameters[0].hf_shape(), [8, 4]);
/// # Ok::<(), zero_models::ModelError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModuleConfig {
    /// The class in whose checkpoints the parameters have these names, for `config.json`.
    #[serde(default)]
    pub architecture: Option<String>,
    /// What `config.json` holds besides; none is written if this is null and there is no architecture.
    #[serde(default)]
    pub config: Value,
    /// Every parameter, in the order in which the module visits them.
    pub parameters: Vec<ModelParam>,
}

impl ModuleConfig {
    /// Parameters by path and shape, which keep their names.
    pub fn new(parameters: impl IntoIterator<Item = (String, Vec<usize>)>) -> Self {
        let param =
            |(path, shape): (String, Vec<usize>)| ModelParam { name: path.clone(), path, shape, transposed: false };
        Self { parameters: parameters.into_iter().map(param).collect(), ..Self::default() }
    }

    /// With other names.
    ///
    /// # Errors
    /// [`ModelError::KeyMap`] when two parameters come to one name.
    pub fn renamed(mut self, map: &KeyMap) -> Result<Self> {
        let mut names = BTreeSet::new();
        for param in &mut self.parameters {
            param.name = map.name(&param.path);
            // Patterns such as `\.weight$` are meant for matrices, and match others too.
            param.transposed = param.shape.len() == 2 && map.transposes(&param.name);
            if !names.insert(param.name.clone()) {
                let problem = "is the name of two parameters: change the rules so that names stay apart";
                return Err(ModelError::KeyMap { rule: param.name.clone(), problem: problem.into() });
            }
        }
        Ok(self)
    }
}
