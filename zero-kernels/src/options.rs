//! What fused operations may be told.

/// Which formula of the Gaussian error linear unit, <https://arxiv.org/abs/1606.08415>.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    Tanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`
    Erf,
}

/// How rows attend to one another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Number of sequences; rows are sequence after sequence.
    pub batch: usize,
    /// Number of heads of the queries; divides their width. Keys and values may have fewer, of the same width: as many as their
    /// rows hold. Then neighbouring heads of queries share one (<https://arxiv.org/abs/2305.13245>).
    pub heads: usize,
    /// Whether a row sees only itself and the rows of its sequence before it.
    pub causal: bool,
    /// With `causal`, how many rows one sees at most, itself among them (<https://arxiv.org/abs/2004.05150>).
    pub window: Option<usize>,
    /// What scores are multiplied by, usually `1 / sqrt(d / heads)`.
    pub scale: f64,
    /// Which probabilities are dropped, if any.
    pub dropout: Option<AttentionDropout>,
}

/// Dropout of attention's probabilities `[b, h, t, u]`, or of any tensor's elements: one is kept if the number that SplitMix64's finaliser
/// makes of the key and of its place, row-major, says so, as `FusedBackend::next_dropout_key` of `zero-ops` tells; it is divided by the
/// probability of that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    /// With which probability one is dropped.
    pub probability: f64,
    /// Of this draw.
    pub key: u64,
}

impl AttentionDropout {
    /// A number's upper 24 bits are counted in so many steps.
    const STEPS: f64 = (1u64 << 24) as f64;

    /// Of the number of place `i`: SplitMix64's finaliser over a keyed Weyl sequence.
    pub fn upper_24_bits(key: u64, i: u64) -> u64 {
        let z = key.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) >> 40
    }

    /// What the probability of a place is multiplied by.
    pub fn share(self, place: u64) -> f32 {
        let keep = 1.0 - self.probability;
        let is_kept = Self::upper_24_bits(self.key, place) < u64::from(Self::threshold(keep));
        if is_kept { (1.0 / keep) as f32 } else { 0.0 }
    }

    /// One is kept whose number has upper 24 bits below this: exactly as often as one of so many steps is below the probability.
    pub fn threshold(probability: f64) -> u32 {
        (probability * Self::STEPS).ceil() as u32
    }
}

/// How gradients are clipped by their norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// What the norm is to be at most.
    pub most: Option<f64>,
    /// What gradients carry; they are divided by it, and their norm is what it is then.
    pub loss_scale: f64,
    /// Whether nothing is updated where some are not finite.
    pub skips: bool,
}
