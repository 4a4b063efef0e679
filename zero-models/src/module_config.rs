//! Modules of unknown families, described by their parameters for export.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{KeyMap, ModelError, ModelParam, Result};

/// A module of any family. It is data, so a checkpoint that contains it is exported without the program that wrote it.
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
    /// The class whose checkpoints have these parameter names, for `config.json`.
    #[serde(default)]
    pub architecture: Option<String>,
    /// Other contents of `config.json`. If this is null and there is no architecture, the file is not written.
    #[serde(default)]
    pub config: Value,
    /// Every parameter, in the order in which the module visits them.
    pub parameters: Vec<ModelParam>,
}

impl ModuleConfig {
    /// Creates a module from the paths and shapes of its parameters; names are the paths.
    pub fn new(parameters: impl IntoIterator<Item = (String, Vec<usize>)>) -> Self {
        let param =
            |(path, shape): (String, Vec<usize>)| ModelParam { name: path.clone(), path, shape, transposed: false };
        Self { parameters: parameters.into_iter().map(param).collect(), ..Self::default() }
    }

    /// Renames the parameters.
    ///
    /// # Errors
    /// [`ModelError::KeyMap`] if two parameters get the same name.
    pub fn renamed(mut self, map: &KeyMap) -> Result<Self> {
        let mut names = BTreeSet::new();
        for param in &mut self.parameters {
            param.name = map.name(&param.path);
            // Patterns such as `\.weight$` are meant for matrices, and match others too.
            param.transposed = param.shape.len() == 2 && map.transposes(&param.name);
            if !names.insert(param.name.clone()) {
                let problem = "is the name of two parameters: change the rules so that all names differ";
                return Err(ModelError::KeyMap { rule: param.name.clone(), problem: problem.into() });
            }
        }
        Ok(self)
    }
}
