//! The angles of rotary positions, <https://arxiv.org/abs/2104.09864>: in go positions, out come cosines and sines.

use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use zero_ops::FusedBackend;

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

/// Cosines and sines of the angles of some rows, `[t, e / 2]` each, for all layers of a pass.
pub(super) struct Angles<B: FusedBackend> {
    cos: Tensor<B, 2>,
    sin: Tensor<B, 2>,
}

impl<B: FusedBackend> Angles<B> {
    /// Of rows at these positions. `like_nd` has the type of the activations.
    pub(super) fn new(speeds: &[f32], positions: impl Iterator<Item = i32>, like_nd: &Tensor<B, 2>) -> Self {
        // In 32 bits, as transformers: far on in a text, the rounding of an angle is felt.
        let angles: Vec<f32> = positions.flat_map(|at| speeds.iter().map(move |speed| at as f32 * speed)).collect();
        let [cos, sin] = [f64::cos, f64::sin].map(|of| {
            let values: Vec<f32> = angles.iter().map(|&angle| of(f64::from(angle)) as f32).collect();
            let data = TensorData::new(values, [angles.len() / speeds.len(), speeds.len()]);
            Tensor::from_data(data.convert_dtype(like_nd.dtype()), &like_nd.device())
        });
        Self { cos, sin }
    }

    /// Turns rows `[n, _]` of heads.
    pub(super) fn turn(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        zero_ops::rotary(x_nd, self.cos.clone(), self.sin.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::super::LlamaConfig;
    use super::*;

    #[test]
    fn slow_angles_are_divided_and_fast_ones_kept() {
        let plain = LlamaConfig::preset("llama-3-8b").unwrap();
        let of = |scaling| LlamaConfig { rope_scaling: Some(scaling), ..plain.clone() }.speeds();
        let speeds = plain.speeds();
        assert_eq!(speeds[0], 1.0);
        assert_eq!(of(RopeScaling::Dynamic { factor: 4.0 }), speeds);
        let halves: Vec<f32> = speeds.iter().map(|speed| speed / 2.0).collect();
        assert_eq!(of(RopeScaling::Linear { factor: 2.0 }), halves);
        let original_max_position_embeddings = 8192;
        let llama3 = of(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings,
        });
        for (speed, got) in speeds.iter().zip(llama3) {
            let turns = original_max_position_embeddings as f32 * speed / std::f32::consts::TAU;
            match turns {
                _ if turns > 4.0 => assert_eq!(got, *speed),
                _ if turns < 1.0 => assert_eq!(got, speed / 8.0),
                _ => assert!(got < *speed && got > speed / 8.0),
            }
        }
    }
}
