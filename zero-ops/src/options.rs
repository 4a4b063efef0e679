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
}
