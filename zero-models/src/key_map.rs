//! Rules that map parameter paths to names in other programs' files.

use regex::Regex;

use crate::{ModelError, Result};

/// A map from parameter paths to names in other programs' files.
#[derive(Clone, Debug, Default)]
pub struct KeyMap {
    renamed: Vec<(Regex, String)>,
    transposed: Vec<Regex>,
}

impl KeyMap {
    /// Creates a map from `rename`, rules `REGEX=>NAME` where `$1` is the match of the first group. Each rule is applied to the result
    /// of the previous ones (like burn-store's key remapper). `transpose` are patterns of the resulting names of matrices that are
    /// stored transposed.
    ///
    /// # Errors
    /// [`ModelError::KeyMap`] for an invalid rule.
    pub fn new(rename: &[impl AsRef<str>], transpose: &[impl AsRef<str>]) -> Result<Self> {
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

impl KeyMap {
    /// Returns the name of the parameter at `path`.
    pub(crate) fn name(&self, path: &str) -> String {
        let rename =
            |name: String, (pattern, to): &(Regex, String)| pattern.replace_all(&name, to.as_str()).into_owned();
        self.renamed.iter().fold(path.to_string(), rename)
    }

    /// Returns `true` if a matrix of this name is stored transposed.
    pub(crate) fn transposes(&self, name: &str) -> bool {
        self.transposed.iter().any(|pattern| pattern.is_match(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModuleConfig;

    #[test]
    fn rules_that_are_none_are_named() {
        let told = |rename: &[&str], transpose: &[&str]| KeyMap::new(rename, transpose).unwrap_err().to_string();
        assert!(told(&["a->b"], &[]).contains("\"a->b\": expected REGEX=>NAME"));
        assert!(told(&["(=>b"], &[]).contains("\"(=>b\""));
        assert!(told(&[], &["["]).contains("\"[\""));
        let module = ModuleConfig::new([("a.0".into(), vec![2]), ("a.1".into(), vec![2])]);
        let both = KeyMap::new(&["a\\..=>b"], &[] as &[&str]).unwrap();
        assert!(module.renamed(&both).unwrap_err().to_string().contains("is the name of two parameters"));
    }
}
