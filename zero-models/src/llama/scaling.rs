//! RoPE scaling, for sequences longer than those of pre-training.

use serde::{Deserialize, Serialize};

/// A method that reduces RoPE frequencies for sequences longer than those of pre-training; `rope_scaling` in Hugging Face's
/// `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Divides all frequencies by one factor, <https://arxiv.org/abs/2306.15595>.
    Linear {
        /// Divisor of all frequencies.
        factor: f64,
    },
    /// Depends on the sequence length beyond `max_position_embeddings`. Sequences are never longer than that here, so it has no effect.
    Dynamic {
        /// Factor by which sequences may be longer.
        factor: f64,
    },
    /// Divides low frequencies by a factor, and keeps high ones, <https://arxiv.org/abs/2407.21783>.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Frequencies with fewer turns than this in a pre-training sequence are low.
        low_freq_factor: f64,
        /// Frequencies with more turns than this are high.
        high_freq_factor: f64,
        /// Maximum sequence length of pre-training.
        original_max_position_embeddings: usize,
    },
    /// YaRN, <https://arxiv.org/abs/2309.00071>: divides low frequencies by a factor, keeps high ones, and scales cosines and sines.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Maximum sequence length of pre-training.
        original_max_position_embeddings: usize,
        /// Factor of cosines and sines; computed from the other fields if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Frequencies with more turns than this in a pre-training sequence are high; 32 if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        beta_fast: Option<f64>,
        /// Frequencies with fewer turns than this are low; 1 if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        beta_slow: Option<f64>,
        /// Factor of the logarithm in the numerator of the computed `attention_factor`; needs `mscale_all_dim`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mscale: Option<f64>,
        /// Factor of the logarithm in the denominator; needs `mscale`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mscale_all_dim: Option<f64>,
        /// True if the bounds between low and high frequencies are rounded to whole pairs; true if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        truncate: Option<bool>,
    },
    /// LongRoPE, <https://arxiv.org/abs/2402.13753>: divides each frequency by its own factor, with other factors in sequences longer
    /// than those of pre-training.
    LongRope {
        /// Divisors of the frequencies in sequences up to the length of pre-training, one per rotated pair of a head.
        short_factor: Vec<f64>,
        /// Divisors of the frequencies in longer sequences.
        long_factor: Vec<f64>,
        /// Maximum sequence length of pre-training.
        original_max_position_embeddings: usize,
        /// Factor by which sequences may be longer; `max_position_embeddings / original_max_position_embeddings` if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        factor: Option<f64>,
        /// Factor of cosines and sines; computed from the other fields if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
}

impl RopeScaling {
    /// Names that `rope_type` may have, in addition to `default`.
    pub(super) const NAMES: [&str; 5] = ["linear", "dynamic", "llama3", "yarn", "longrope"];

    /// Returns the numbers that must be above 0, with their names.
    pub(super) fn numbers(&self) -> Vec<(&'static str, f64)> {
        match *self {
            Self::Linear { factor } | Self::Dynamic { factor } => vec![("rope_scaling.factor", factor)],
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => vec![
                ("rope_scaling.factor", factor),
                ("rope_scaling.low_freq_factor", low_freq_factor),
                ("rope_scaling.high_freq_factor", high_freq_factor - low_freq_factor),
                ("rope_scaling.original_max_position_embeddings", original_max_position_embeddings as f64),
            ],
            Self::Yarn { factor, original_max_position_embeddings, attention_factor, .. } => vec![
                ("rope_scaling.factor", factor),
                ("rope_scaling.original_max_position_embeddings", original_max_position_embeddings as f64),
                ("rope_scaling.attention_factor", attention_factor.unwrap_or(1.0)),
                ("rope_scaling.beta_fast", self.betas()[0]),
                ("rope_scaling.beta_slow", self.betas()[1]),
            ],
            Self::LongRope {
                ref short_factor,
                ref long_factor,
                original_max_position_embeddings,
                factor,
                attention_factor,
            } => {
                // Above 1, so that its logarithm can be a divisor.
                let original = original_max_position_embeddings.saturating_sub(1) as f64;
                let least = |list: &[f64]| list.iter().copied().fold(f64::MAX, f64::min);
                vec![
                    ("rope_scaling.short_factor", least(short_factor)),
                    ("rope_scaling.long_factor", least(long_factor)),
                    ("rope_scaling.original_max_position_embeddings", original),
                    ("rope_scaling.factor", factor.unwrap_or(1.0)),
                    ("rope_scaling.attention_factor", attention_factor.unwrap_or(1.0)),
                ]
            }
        }
    }

    /// Returns the maximum sequence length, if the scaling extends it beyond `max_position_embeddings`.
    pub(super) fn positions(&self, max_position_embeddings: usize) -> Option<usize> {
        let times = |positions: usize, factor: f64| (positions as f64 * factor) as usize;
        match *self {
            Self::Linear { factor } => Some(times(max_position_embeddings, factor)),
            Self::Yarn { factor, original_max_position_embeddings: original, .. } => Some(times(original, factor)),
            Self::Dynamic { .. } | Self::Llama3 { .. } | Self::LongRope { .. } => None,
        }
    }

    /// Returns the scaling of sequences longer than those of pre-training, if it differs.
    pub(super) fn for_long(&self) -> Option<Self> {
        let mut long = self.clone();
        let Self::LongRope { short_factor, long_factor, .. } = &mut long else { return None };
        short_factor.clone_from(long_factor);
        Some(long)
    }

    /// Returns `beta_fast` and `beta_slow`; an absent one or 0 is the default, as in transformers.
    fn betas(&self) -> [f64; 2] {
        match *self {
            Self::Yarn { beta_fast, beta_slow, .. } => [(beta_fast, 32.0), (beta_slow, 1.0)]
                .map(|(given, default)| given.filter(|x| *x != 0.0).unwrap_or(default)),
            _ => [0.0; 2],
        }
    }

    /// Returns the factor of cosines and sines (`attention_factor` of YaRN and LongRoPE).
    pub(super) fn turn_factor(&self, max_position_embeddings: usize) -> f64 {
        if let Self::LongRope { original_max_position_embeddings: original, factor, attention_factor, .. } = *self {
            let original = original as f64;
            let factor = factor.unwrap_or(max_position_embeddings as f64 / original);
            let computed = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
            return attention_factor.unwrap_or(computed);
        }
        let Self::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = *self else { return 1.0 };
        let by = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let given = |scale: Option<f64>| scale.filter(|scale| *scale != 0.0);
        attention_factor.unwrap_or_else(|| match (given(mscale), given(mscale_all_dim)) {
            (Some(above), Some(below)) => by(above) / by(below),
            _ => by(1.0),
        })
    }

    /// Scales the frequency `speed` of a pair, given its number in a head of this width and the RoPE base.
    pub(super) fn scaled(&self, speed: f64, pair: usize, width: usize, base: f64) -> f64 {
        match *self {
            Self::Linear { factor } => speed / factor,
            Self::Dynamic { .. } => speed,
            Self::LongRope { ref short_factor, .. } => speed / short_factor[pair],
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = original_max_position_embeddings as f64 * speed / std::f64::consts::TAU;
                let fast = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - fast) * speed / factor + fast * speed
            }
            Self::Yarn { factor, original_max_position_embeddings, truncate, .. } => {
                let full_turn = original_max_position_embeddings as f64 / std::f64::consts::TAU;
                // The pair with this number of turns in a pre-training sequence.
                let pair_of = |turns: f64| width as f64 * (full_turn / turns).ln() / (2.0 * base.ln());
                let [mut low, mut high] = self.betas().map(pair_of);
                if truncate.unwrap_or(true) {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(width as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let slow = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                slow * speed / factor + (1.0 - slow) * speed
            }
        }
    }
}
