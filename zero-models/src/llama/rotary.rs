//! Rotary position embeddings (RoPE), <https://arxiv.org/abs/2104.09864>: cosines and sines of the angles of positions.

#[cfg(feature = "burn")]
use burn::tensor::{Tensor, TensorData, s};
#[cfg(feature = "burn")]
use zero_ops::FusedBackend;

/// Returns the cosines and the sines, times `factor`, of the angles of pairs of elements at these positions: `[positions, pairs]`. The
/// positions are those of as many texts of equal length as there are lists of `frequencies` `[pairs]`, one for each text.
pub fn rotary_angles(frequencies: &[&[f32]], factor: f64, positions: impl Iterator<Item = i32>) -> [Vec<f32>; 2] {
    let positions: Vec<_> = positions.collect();
    let texts = positions.chunks(positions.len() / frequencies.len()).zip(frequencies);
    // In 32 bits, as in transformers: at large positions, the rounding of an angle matters.
    let turned = |(text, frequencies): (_, &&[f32])| -> Vec<f32> {
        let text: &[i32] = text;
        text.iter().flat_map(|at| frequencies.iter().map(move |frequency| *at as f32 * frequency)).collect()
    };
    let angles: Vec<f32> = texts.flat_map(turned).collect();
    [f64::cos, f64::sin].map(|of| angles.iter().map(|&angle| (of(f64::from(angle)) * factor) as f32).collect())
}

/// Cosines and sines of the angles of rows, `[t, e / 2]` each, for all layers of a pass.
#[cfg(feature = "burn")]
#[derive(Clone)]
pub(super) struct Angles<B: FusedBackend> {
    cos: Tensor<B, 2>,
    sin: Tensor<B, 2>,
}

#[cfg(feature = "burn")]
impl<B: FusedBackend> Angles<B> {
    /// Computes cosines and sines at these positions, times `factor`, with frequencies `speeds` for each text. `like_nd` has the type of
    /// the activations.
    pub(super) fn new(
        speeds: &[&[f32]],
        factor: f64,
        positions: impl Iterator<Item = i32>,
        like_nd: &Tensor<B, 2>,
    ) -> Self {
        let pairs = speeds[0].len();
        let [cos, sin] = rotary_angles(speeds, factor, positions).map(|values| {
            let shape = [values.len() / pairs, pairs];
            Tensor::from_data(TensorData::new(values, shape), (&like_nd.device(), like_nd.dtype()))
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
        let of = |scaling| LlamaConfig { rope_scaling: Some(scaling), ..plain.clone() }.rope_frequencies();
        let speeds = plain.rope_frequencies();
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
