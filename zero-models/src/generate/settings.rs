//! Generation settings in a model's folder, in the format of transformers' `generate`: reads [`Sampling`] from `generation_config.json`,
//! or from the same keys of `config.json` if that file is absent.

use std::path::Path;

use serde_json::{Map, Value};

use super::{EarlyStopping, Sampling};
use crate::error::io_at;
use crate::{ModelError, Result};

/// Keys that are not implemented and would change the text, with their values that have no effect. Null and false have none either.
const REFUSED: [(&str, &[f64]); 17] = [
    ("bad_words_ids", &[]),
    ("begin_suppress_tokens", &[]),
    ("constraints", &[]),
    ("diversity_penalty", &[0.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("exponential_decay_length_penalty", &[]),
    ("force_words_ids", &[]),
    ("guidance_scale", &[1.0]),
    ("num_beam_groups", &[1.0]),
    ("penalty_alpha", &[0.0]),
    ("renormalize_logits", &[]),
    ("sequence_bias", &[]),
    ("stop_strings", &[]),
    ("suppress_tokens", &[]),
    ("token_healing", &[]),
    ("watermarking_config", &[]),
];

/// Keys as in [`REFUSED`] that matter only if tokens are sampled.
const REFUSED_DRAWING: [(&str, &[f64]); 5] =
    [("epsilon_cutoff", &[0.0]), ("eta_cutoff", &[0.0]), ("min_p", &[0.0]), ("top_h", &[]), ("typical_p", &[1.0])];

/// The default of `top_k` in transformers if tokens are sampled.
const TOP_K: usize = 50;

/// The keys of one file.
struct Keys<'a> {
    path: &'a Path,
    keys: Map<String, Value>,
}

impl Sampling {
    /// Applies the settings in a model's folder: the keys of `generation_config.json`, or of `config.json` if that file is absent.
    /// Absent keys keep the values of `self`. `eos_token_id` is taken from the first of both files that has one.
    ///
    /// # Errors
    /// [`ModelError::Generation`] for a file that is not JSON, a value of another type, or a key that is not implemented and would
    /// change the text.
    pub fn with_settings_of(mut self, dir: &Path) -> Result<Self> {
        let mut is_first = true;
        let mut ends = None;
        for file in ["generation_config.json", "config.json"] {
            let path = dir.join(file);
            if !path.is_file() {
                continue;
            }
            let bytes = std::fs::read(&path).map_err(io_at("read", &path))?;
            let problem = |problem| ModelError::Generation { path: path.clone(), problem };
            let keys = match serde_json::from_slice(&bytes) {
                Ok(Value::Object(keys)) => keys,
                Ok(other) => return Err(problem(format!("holds {other}: expected a JSON object"))),
                Err(error) => return Err(problem(format!("is not valid JSON ({error}): download or save it again"))),
            };
            let keys = Keys { path: &path, keys };
            if std::mem::take(&mut is_first) {
                self.set(&keys)?;
            }
            ends = if ends.is_none() { keys.tokens("eos_token_id")? } else { ends };
        }
        self.stop = ends.unwrap_or(self.stop);
        Ok(self)
    }

    fn set(&mut self, keys: &Keys<'_>) -> Result<()> {
        let draws = keys.flag("do_sample")?.unwrap_or(false);
        let drawing = if draws { &REFUSED_DRAWING[..] } else { &[] };
        for &(key, harmless) in REFUSED.iter().chain(drawing) {
            let value = &keys.keys.get(key).unwrap_or(&Value::Null);
            let is_empty = value.as_array().is_some_and(Vec::is_empty);
            let is_harmless = value.as_f64().is_some_and(|number| harmless.contains(&number));
            if !(value.is_null() || value.as_bool() == Some(false) || is_empty || is_harmless) {
                return Err(keys.wrong(key, "which is not implemented: remove the key, or set it to null"));
            }
        }
        if draws {
            self.temperature = keys.number("temperature")?.unwrap_or(1.0);
        }
        // A temperature of 0 samples nothing.
        self.top_k = keys.count("top_k")?.or(draws.then_some(TOP_K)).filter(|&k| k > 0).or(self.top_k);
        self.top_p = keys.number("top_p")?.or(self.top_p);
        match (keys.count("max_new_tokens")?, keys.count("max_length")?) {
            (Some(most), _) => self.max_new_tokens = most,
            (None, Some(length)) => (self.max_new_tokens, self.max_length) = (usize::MAX, Some(length)),
            (None, None) => {}
        }
        self.min_length = keys.count("min_length")?.unwrap_or(self.min_length);
        self.min_new_tokens = keys.count("min_new_tokens")?.unwrap_or(self.min_new_tokens);
        self.no_repeat_ngram_size = keys.count("no_repeat_ngram_size")?.unwrap_or(self.no_repeat_ngram_size);
        self.repetition_penalty = keys.number("repetition_penalty")?.unwrap_or(self.repetition_penalty);
        self.length_penalty = keys.number("length_penalty")?.unwrap_or(self.length_penalty);
        self.beams = keys.count("num_beams")?.unwrap_or(self.beams);
        self.early_stopping = match keys.keys.get("early_stopping") {
            None | Some(Value::Null) => self.early_stopping,
            Some(Value::Bool(true)) => EarlyStopping::Yes,
            Some(Value::Bool(false)) => EarlyStopping::No,
            Some(Value::String(text)) if text == "never" => EarlyStopping::Never,
            Some(_) => return Err(keys.wrong("early_stopping", "expected true, false or \"never\"")),
        };
        self.forced_first = keys.token("forced_bos_token_id")?.or(self.forced_first);
        self.forced_last = keys.token("forced_eos_token_id")?.or(self.forced_last);
        Ok(())
    }
}

impl Keys<'_> {
    fn wrong(&self, key: &str, expected: &str) -> ModelError {
        let problem = format!("has {key} = {}, {expected}", self.keys[key]);
        ModelError::Generation { path: self.path.to_path_buf(), problem }
    }

    /// Reads the value of a key, if there is one.
    fn get<T>(&self, key: &str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        match self.keys.get(key).filter(|value| !value.is_null()) {
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, expected)),
            None => Ok(None),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "expected true or false", Value::as_bool)
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "expected a number", Value::as_f64)
    }

    fn count(&self, key: &str) -> Result<Option<usize>> {
        self.get(key, "expected a whole number of at least 0", |value| value.as_u64().map(|count| count as usize))
    }

    /// Reads a token id, or a list of them.
    fn tokens(&self, key: &str) -> Result<Option<Vec<u32>>> {
        let token = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        self.get(key, "expected a token id, or a list of token ids", |value| match value {
            Value::Array(list) => list.iter().map(token).collect(),
            one => token(one).map(|token| vec![token]),
        })
    }

    fn token(&self, key: &str) -> Result<Option<u32>> {
        match self.tokens(key)?.as_deref() {
            None | Some([]) => Ok(None),
            Some([token]) => Ok(Some(*token)),
            Some(_) => Err(self.wrong(key, "expected one token id")),
        }
    }
}
