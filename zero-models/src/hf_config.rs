//! Shared code of the families' configurations: [`hf_config!`] defines one by a table of the keys in Hugging Face's `config.json`; other
//! functions look up presets by name and check values.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{check_each, io_at};
use crate::hf_params::Family;
use crate::{ModelError, Result};

/// Defines a family's configuration by a table of the keys in `config.json`, with Hugging Face's defaults for absent keys. `activation`
/// is the key that names the activation function; a family with only one omits it. Keys in `refused` have no field, as only the value in
/// the table is implemented. Reading includes the family's `validate`. A family with several `model_type`s has `model_type` among its
/// keys. `given` converts the text of a file to these keys.
macro_rules! hf_config {
    (
        $(#[$doc:meta])*
        pub struct $config:ident of $family:literal $(, $model_type:literal)? {
            $($(#[$about:meta])* $field:ident: $type:ty = $default:expr,)*
        }
        $(
            $(#[$activation_doc:meta])*
            activation $activation:ident = $key:literal: $activation_default:expr;
        )?
        $(given $given:path;)?
        refused { $($refused:ident: $refused_type:ty = $implemented:expr,)* }
    ) => {
        $(#[$doc])*
        ///
        /// Fields are named as in Hugging Face's `config.json`, which is also the serialized form. Reading fails on settings that are
        /// not implemented and would change the results; keys without an effect on the mathematics are ignored.
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = "Keys", into = "Keys")]
        pub struct $config {
            $($(#[$about])* pub $field: $type,)*
            $(
                $(#[$activation_doc])*
                pub $activation: $crate::Activation,
            )?
        }

        /// The keys of `config.json` that have an effect.
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        struct Keys {
            $(
                #[doc = $model_type]
                model_type: String,
            )?
            $($(#[$about])* $field: $type,)*
            $(
                #[serde(rename = $key)]
                $activation: String,
            )?
            $($refused: $refused_type,)*
        }

        impl Default for Keys {
            fn default() -> Self {
                $config::published().into()
            }
        }

        impl From<$config> for Keys {
            fn from(config: $config) -> Self {
                Self {
                    $(model_type: $model_type.to_string(),)?
                    $($field: config.$field,)*
                    $($activation: config.$activation.hf_name().to_string(),)?
                    $($refused: $implemented,)*
                }
            }
        }

        impl TryFrom<Keys> for $config {
            type Error = $crate::ModelError;

            fn try_from(keys: Keys) -> $crate::Result<Self> {
                $($crate::hf_config::check_model_type($model_type, keys.model_type)?;)?
                $($crate::hf_config::check_implemented($family, stringify!($refused), keys.$refused, $implemented)?;)*
                let config = Self {
                    $($field: keys.$field,)*
                    $($activation: $crate::Activation::from_hf_name($family, $key, &keys.$activation)?,)?
                };
                config.validate()?;
                Ok(config)
            }
        }

        impl $config {
            /// Name of the family in messages.
            pub(crate) const FAMILY: &'static str = $family;

            /// Returns Hugging Face's defaults.
            fn published() -> Self {
                Self { $($field: $default,)* $($activation: $activation_default)? }
            }

            /// Reads the text of a Hugging Face `config.json`.
            ///
            /// # Errors
            /// If it is not JSON, is of another model, describes an impossible model, or asks for a setting that is not implemented.
            pub fn from_json(text: &str) -> $crate::Result<Self> {
                $(let text = &$given(text)?;)?
                $crate::hf_config::parse::<Keys>($family, text)?.try_into()
            }

            /// Reads a Hugging Face `config.json`.
            ///
            /// # Errors
            /// Same as [`from_json`](Self::from_json), and if the file cannot be read.
            pub fn from_file(path: &std::path::Path) -> $crate::Result<Self> {
                $crate::hf_config::from_file(path, Self::from_json)
            }

            /// Returns the number of parameters; a tied head counts once.
            pub fn num_params(&self) -> usize {
                $crate::hf_params::parameters(self).iter().map($crate::ModelParam::numel).sum()
            }

            /// Returns the names and shapes of the parameters in the `state_dict` of Hugging Face's model, in the order in which the
            /// module visits them. A tied head is not listed.
            pub fn parameter_shapes(&self) -> Vec<(String, Vec<usize>)> {
                let parameters = $crate::hf_params::parameters(self).into_iter();
                parameters.map(|param| (param.name.clone(), param.hf_shape())).collect()
            }
        }
    };
}
pub(crate) use hf_config;

/// Parses the keys of a configuration, each of which has a default.
pub(crate) fn parse<K: DeserializeOwned>(model: &'static str, text: &str) -> Result<K> {
    let syntax = |source| ModelError::ConfigSyntax { model, source };
    let keys: Map<String, Value> = serde_json::from_str(text).map_err(syntax)?;
    serde_json::from_value(Value::Object(keys.clone())).map_err(|source| {
        let wrong = keys.into_iter().find_map(|(key, value)| {
            let alone = Map::from_iter([(key.clone(), value)]);
            let mut problem = serde_json::from_value::<K>(alone.into()).err()?.to_string();
            for (of_rust, plain) in [("usize", "a whole number"), ("u32", "a whole number"), ("f64", "a number")] {
                problem = problem.replace(of_rust, plain);
            }
            Some(ModelError::ConfigType { model, key, problem })
        });
        wrong.unwrap_or_else(|| syntax(source))
    })
}

/// Returns the names of a table of presets.
pub(crate) const fn names<T, const N: usize>(presets: &[(&'static str, T); N]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut i = 0;
    while i < N {
        names[i] = presets[i].0;
        i += 1;
    }
    names
}

/// Looks up the preset `got` in a table of presets with these names.
pub(crate) fn find_preset<T: Copy>(
    model: &'static str,
    presets: &[(&str, T)],
    names: &'static [&'static str],
    got: &str,
) -> Result<T> {
    let found = presets.iter().find(|(name, _)| *name == got).map(|(_, preset)| *preset);
    found.ok_or_else(|| ModelError::UnknownPreset { model, got: got.to_string(), presets: names })
}

pub(crate) fn from_file<C: Family>(path: &Path, from_json: fn(&str) -> Result<C>) -> Result<C> {
    let text = std::fs::read_to_string(path).map_err(io_at("read", path))?;
    let read = from_json(&text);
    let config = read.map_err(|error| ModelError::InFile { path: path.to_path_buf(), error: Box::new(error) })?;
    Ok(config.with_weights_in(path.parent().unwrap_or(Path::new(""))))
}

/// Replaces an `eos_token_id` that is a list, as for generation, by its first token.
pub(crate) fn one_end(keys: &mut Map<String, Value>) {
    if let Some(first) = keys.get("eos_token_id").and_then(|ends| ends.get(0)).cloned() {
        keys.insert("eos_token_id".into(), first);
    }
}

/// Checks that the vocabulary has these tokens, each given with the name of its field.
pub(crate) fn check_tokens(model: &'static str, vocabulary: usize, tokens: &[(&'static str, u32)]) -> Result<()> {
    let expected = format!("a token id below {vocabulary}, the size of the vocabulary");
    let is_known = |token: u32| (token as usize) < vocabulary;
    check_each(model, tokens.iter().map(|&(field, token)| (is_known(token), field, token.to_string(), &*expected)))
}

pub(crate) fn check_model_type(expected: &'static str, got: String) -> Result<()> {
    if got == expected { Ok(()) } else { Err(ModelError::ModelType { expected, got }) }
}

/// Checks that a key has the only implemented value.
pub(crate) fn check_implemented<T: PartialEq + Serialize>(
    model: &'static str,
    key: &'static str,
    got: T,
    implemented: T,
) -> Result<()> {
    if got == implemented {
        return Ok(());
    }
    let [got, supported] = [got, implemented].map(|value| match serde_json::json!(value) {
        Value::String(text) => format!("\"{text}\""),
        other => other.to_string(),
    });
    Err(ModelError::Unsupported { model, key, got, supported })
}

/// Pairs each field's name with its value.
macro_rules! named {
    ($config:ident: $($field:ident),*) => {
        [$((stringify!($field), $config.$field)),*]
    };
}
pub(crate) use named;

/// Maximum size in a configuration.
const LARGEST_SIZE: usize = u32::MAX as usize;

/// Maximum number of layers of a model.
const MOST_LAYERS: usize = 10_000;

/// Maximum number of parameters of a model.
const MOST_PARAMETERS: u128 = 1 << 44;

/// Checks the number of layers and parameters, so that counting for a crafted configuration neither takes hours nor overflows.
pub(crate) fn check_count<C: Family>(model: &'static str, layers_field: &'static str, config: &C) -> Result<()> {
    let blocks = |path: &str| if path.contains('*') { config.blocks(path) } else { 1 };
    let layers = C::LAYERS.iter().map(|layer| blocks(layer.path())).max().unwrap_or(0);
    let numel = C::LAYERS.iter().filter(|layer| config.has(layer.path())).map(|layer| {
        let [rows, columns] = layer.sizes(config).map(|size| size as u128);
        rows.saturating_mul(columns).saturating_mul(blocks(layer.path()) as u128)
    });
    let numel = numel.fold(0, u128::saturating_add);
    let (layers_most, most) =
        (format!("at most {MOST_LAYERS}"), format!("at most {MOST_PARAMETERS}, with smaller sizes"));
    check_each(
        model,
        [
            (layers <= MOST_LAYERS, layers_field, layers.to_string(), &*layers_most),
            (numel <= MOST_PARAMETERS, "parameter count", numel.to_string(), &*most),
        ],
    )
}

/// Checks that sizes are in range, `heads` divides `width`, dropout probabilities are at least 0 and below 1, and the `above_0` numbers
/// are finite and positive. Each value comes with the name of its field.
pub(crate) fn check_values(
    model: &'static str,
    sizes: &[(&'static str, usize)],
    [(heads_field, heads), (width_field, width)]: [(&'static str, usize); 2],
    dropouts: &[(&'static str, f64)],
    above_0: &[(&'static str, f64)],
) -> Result<()> {
    let text = |value: &dyn ToString| value.to_string();
    let largest = format!("1 to {LARGEST_SIZE}");
    let sizes = sizes.iter().map(|(field, size)| {
        let expected = if *size == 0 { "at least 1" } else { &largest };
        ((1..=LARGEST_SIZE).contains(size), *field, text(size), expected)
    });
    check_each(model, sizes)?;
    let divisor = format!("a divisor of {width_field} = {width}");
    let heads = [(width.is_multiple_of(heads), heads_field, text(&heads), &*divisor)];
    let below_1 = |p: &f64| (0.0..1.0).contains(p);
    let dropouts = dropouts.iter().map(|(field, p)| (below_1(p), *field, text(p), "at least 0 and below 1"));
    let above_0 = above_0.iter().map(|(field, x)| (x.is_finite() && *x > 0.0, *field, text(x), "above 0"));
    check_each(model, heads.into_iter().chain(dropouts).chain(above_0))
}
