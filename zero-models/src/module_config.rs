//! Any module, by its parameters: what exporting one of no known family takes.

use std::collections::BTreeSet;

use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ModelError, ModelParam};

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

/// Names of parameters in other programs' files.
#[derive(Clone, Debug, Default)]
pub struct KeyMap {
    renamed: Vec<(Regex, String)>,
    transposed: Vec<Regex>,
}

impl KeyMap {
    /// `rename` are rules `REGEX=>NAME`, where `$1` is what the first group matched; each is applied to what those before have left
    /// (as burn-store's key remapper does). `transpose` are patterns of names, once renamed, that are stored transposed.
    ///
    /// # Errors
    /// [`ModelError::KeyMap`] for a rule that is none.
    pub fn new(rename: &[impl AsRef<str>], transpose: &[impl AsRef<str>]) -> Result<Self, ModelError> {
        let wrong = |rule: &str, problem: String| ModelError::KeyMap { rule: rule.to_string(), problem };
        let regex = |rule: &str, pattern: &str| Regex::new(pattern).map_err(|error| wrong(rule, error.to_string()));
        let rule = |rule: &str| {
            let Some((pattern, name)) = rule.split_once("=>") else {
                return Err(wrong(rule, "expected REGEX=>NAME".to_string()));
            };
            Ok((regex(rule, pattern)?, name.to_string()))
        };
        Ok(Self {
            renamed: rename.iter().map(|text| rule(text.as_ref())).collect::<Result<_, _>>()?,
            transposed: transpose.iter().map(|text| regex(text.as_ref(), text.as_ref())).collect::<Result<_, _>>()?,
        })
    }
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
    /// [`ModelError::KeyMap`] when two parameters come to one name, or one that is to be transposed is no matrix.
    pub fn renamed(mut self, map: &KeyMap) -> Result<Self, ModelError> {
        let mut names = BTreeSet::new();
        for param in &mut self.parameters {
            for (pattern, name) in &map.renamed {
                param.name = pattern.replace_all(&param.name, name.as_str()).into_owned();
            }
            let wrong = |problem: &str| ModelError::KeyMap { rule: param.name.clone(), problem: problem.to_string() };
            if let Some(pattern) = map.transposed.iter().find(|pattern| pattern.is_match(&param.name)) {
                // Patterns such as `\.weight$` are meant for matrices, and match scales of norms too.
                match param.shape.len() {
                    1 => {}
                    2 => param.transposed = true,
                    _ => return Err(wrong(&format!("has shape {:?}, and {pattern} transposes it", param.shape))),
                }
            }
            if !names.insert(param.name.clone()) {
                return Err(wrong("is the name of two parameters: change the rules so that names stay apart"));
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_are_none_are_named() {
        let told = |rename: &[&str], transpose: &[&str]| KeyMap::new(rename, transpose).unwrap_err().to_string();
        assert!(told(&["a->b"], &[]).contains("\"a->b\": expected REGEX=>NAME"));
        assert!(told(&["(=>b"], &[]).contains("\"(=>b\""));
        assert!(told(&[], &["["]).contains("\"[\""));
        let module = ModuleConfig::new([("a.0".into(), vec![2]), ("a.1".into(), vec![2, 3, 4])]);
        let both = KeyMap::new(&["a\\..=>b"], &[] as &[&str]).unwrap();
        assert!(module.clone().renamed(&both).unwrap_err().to_string().contains("is the name of two parameters"));
        let cube = KeyMap::new(&[] as &[&str], &["a"]).unwrap();
        assert!(module.renamed(&cube).unwrap_err().to_string().contains("has shape [2, 3, 4]"));
    }
}
