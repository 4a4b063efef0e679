//! Options of fused operations.

/// A formula of the Gaussian error linear unit, <https://arxiv.org/abs/1606.08415>.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    Tanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`
    Erf,
}

/// The value added to a masked score, whose probability is then exactly zero in 32 bits. It is finite in 16 bits too, so that a row with
/// only masked positions gives no NaN.
pub const MASKED: f64 = -3.0e4;

/// Options of attention among rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Number of sequences; the rows of a sequence are consecutive.
    pub batch: usize,
    /// Number of query heads; divides the queries' width. Keys and values may have fewer heads, of the same width: as many
    /// as their rows hold. Neighbouring query heads then share one (<https://arxiv.org/abs/2305.13245>).
    pub heads: usize,
    /// If set, a row attends only to itself and to earlier rows of its sequence.
    pub causal: bool,
    /// If `causal`, the most rows that a row attends to, including itself (<https://arxiv.org/abs/2004.05150>).
    pub window: Option<usize>,
    /// Factor of the scores, usually `1 / sqrt(d / heads)`.
    pub scale: f64,
    /// Soft cap of the scores, if any: a score `x` becomes `cap * tanh(x / cap)` before the mask is added
    /// (<https://arxiv.org/abs/2408.00118>).
    pub cap: Option<f64>,
    /// Dropout of the probabilities, if any.
    pub dropout: Option<AttentionDropout>,
}

/// Options of the cross-entropy of a linear layer's result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropyOptions {
    /// Target of rows that do not count, if any.
    pub ignored: Option<i64>,
    /// Soft cap of the logits, if any: a logit `x` becomes `cap * tanh(x / cap)` (<https://arxiv.org/abs/2408.00118>).
    pub cap: Option<f64>,
}

impl From<Option<i64>> for CrossEntropyOptions {
    /// Returns options with the `ignored` target and no soft cap.
    fn from(ignored: Option<i64>) -> Self {
        Self { ignored, cap: None }
    }
}

/// Checks a soft cap.
///
/// # Panics
/// If it is not positive and finite in f32.
pub fn check_cap(operation: &str, cap: Option<f64>) {
    if let Some(cap) = cap {
        // Kernels compute in f32.
        let is_valid = cap as f32 > 0.0 && (cap as f32).is_finite();
        assert!(is_valid, "{operation}: a soft cap must be positive and finite in f32, got {cap}");
    }
}

/// Dropout of attention's probabilities `[b, h, t, u]`, or of any tensor's elements. SplitMix64's finaliser makes a number
/// of the key and of an element's row-major position, and that number decides whether the element is kept (see
/// `FusedBackend::next_dropout_key` of `zero-ops`). A kept element is divided by the probability of being kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    /// Probability of dropping an element.
    pub probability: f64,
    /// Key of this draw.
    pub key: u64,
}

impl AttentionDropout {
    /// Number of values of a number's upper 24 bits.
    const STEPS: f64 = (1u64 << 24) as f64;

    /// Returns the upper 24 bits of the number at position `i`: SplitMix64's finaliser over a keyed Weyl sequence.
    pub fn upper_24_bits(key: u64, i: u64) -> u64 {
        let z = key.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) >> 40
    }

    /// Returns the factor of the element at `place`: 0 if it is dropped, otherwise 1 / (1 - `probability`).
    pub fn share(self, place: u64) -> f32 {
        let keep = 1.0 - self.probability;
        let is_kept = Self::upper_24_bits(self.key, place) < u64::from(Self::threshold(keep));
        if is_kept { (1.0 / keep) as f32 } else { 0.0 }
    }

    /// Returns a bound: a number's upper 24 bits are below it exactly as often as a multiple of 2^-24 in [0, 1) is below `probability`.
    pub fn threshold(probability: f64) -> u32 {
        (probability * Self::STEPS).ceil() as u32
    }
}

/// Gradient clipping by norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clip {
    /// Largest norm allowed.
    pub most: Option<f64>,
    /// Loss scale of the gradients: they are divided by it, and their norm is taken after that.
    pub loss_scale: f64,
    /// If set, nothing is updated when some gradients are not finite.
    pub skips: bool,
}
