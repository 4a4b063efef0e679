//! Rotary positions for texts that are longer than those of the first training.

use serde::{Deserialize, Serialize};

/// How angles are made smaller, for texts that are longer than those of the first training; as `rope_scaling` in Hugging Face's
/// `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// All by one factor, <https://arxiv.org/abs/2306.15595>.
    Linear {
        /// What angles are divided by.
        factor: f64,
    },
    /// From `max_position_embeddings` on, by the length of the text. Texts are no longer than that here, and so it changes nothing.
    Dynamic {
        /// How much longer texts may be.
        factor: f64,
    },
    /// Slow ones by a factor, fast ones not, <https://arxiv.org/abs/2407.21783>.
    Llama3 {
        /// What slow angles are divided by.
        factor: f64,
        /// Angles that turn round less often than this in a text of the first training are slow.
        low_freq_factor: f64,
        /// Angles that turn round more often than this are fast.
        high_freq_factor: f64,
        /// The longest text of the first training.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// The names that `rope_type` may have, beside `default`.
    pub(super) const NAMES: [&str; 3] = ["linear", "dynamic", "llama3"];

    /// Numbers that must be above 0, with their names.
    pub(super) fn numbers(&self) -> Vec<(&'static str, f64)> {
        match *self {
            Self::Linear { factor } | Self::Dynamic { factor } => vec![("rope_scaling.factor", factor)],
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => vec![
                ("rope_scaling.factor", factor),
                ("rope_scaling.low_freq_factor", low_freq_factor),
                ("rope_scaling.high_freq_factor", high_freq_factor - low_freq_factor),
                ("rope_scaling.original_max_position_embeddings", original_max_position_embeddings as f64),
            ],
        }
    }

    #[cfg(feature = "burn")]
    pub(super) fn scaled(&self, speed: f64) -> f64 {
        match *self {
            Self::Linear { factor } => speed / factor,
            Self::Dynamic { .. } => speed,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = original_max_position_embeddings as f64 * speed / std::f64::consts::TAU;
                let fast = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - fast) * speed / factor + fast * speed
            }
        }
    }
}
