//! Rotary position embeddings (RoPE), <https://arxiv.org/abs/2104.09864>: cosines and sines of the angles of positions.

use burn::tensor::{Tensor, TensorData, s};
use zero_ops::FusedBackend;

/// Cosines and sines of the angles of rows, `[t, e / 2]` each, for all layers of a pass.
#[derive(Clone)]
pub(super) struct Angles<B: FusedBackend> {
    cos: Tensor<B, 2>,
    sin: Tensor<B, 2>,
}

impl<B: FusedBackend> Angles<B> {
    /// Computes cosines and sines at these positions, times `factor`, with frequencies `speeds` for each text. `like_nd` has the type of
    /// the activations.
    pub(super) fn new(
        speeds: &[&[f32]],
        factor: f64,
        positions: impl Iterator<Item = i32>,
        like_nd: &Tensor<B, 2>,
    ) -> Self {
        let (positions, pairs) = (positions.collect::<Vec<_>>(), speeds[0].len());
        let texts = positions.chunks(positions.len() / speeds.len()).zip(speeds);
        // In 32 bits, as in transformers: at large positions, the rounding of an angle matters.
        let turned = |(text, speeds): (_, &&[f32])| -> Vec<f32> {
            let text: &[i32] = text;
            text.iter().flat_map(|at| speeds.iter().map(move |speed| *at as f32 * speed)).collect()
        };
        let angles: Vec<f32> = texts.flat_map(turned).collect();
        let [cos, sin] = [f64::cos, f64::sin].map(|of| {
            let values: Vec<f32> = angles.iter().map(|&angle| (of(f64::from(angle)) * factor) as f32).collect();
            let data = TensorData::new(values, [angles.len() / pairs, pairs]);
            Tensor::from_data(data.convert_dtype(like_nd.dtype()), &like_nd.device())
        });
        Self { cos, sin }
    }

    /// Rotates rows `[n, d]` of heads of this width; only the first elements of each head if there are angles for fewer.
    pub(super) fn turn(&self, x_nd: Tensor<B, 2>, head_width: usize) -> Tensor<B, 2> {
        let turn = |x| zero_ops::rotary(x, self.cos.clone(), self.sin.clone());
        let ([n, d], turned) = (x_nd.dims(), 2 * self.cos.dims()[1]);
        if turned == head_width {
            return turn(x_nd);
        }
        let heads = d / head_width;
        let x_nhe = x_nd.reshape([n, heads, head_width]);
        let first = turn(x_nhe.clone().slice(s![.., .., 0..turned]).reshape([n, heads * turned]));
        let rest = x_nhe.slice(s![.., .., turned..]);
        Tensor::cat(vec![first.reshape([n, heads, turned]), rest], 2).reshape([n, d])
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LlamaConfig, RopeScaling};

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
