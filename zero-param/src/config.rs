//! Settings of a sharded module. Keys and defaults are those of `zero_burn::ZeroConfig`.

use zero_core::Stage;
use zero_core::collective::DType;

/// What parameters are gathered as, and what the model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Float {
    /// 32 bit.
    #[default]
    F32,
    /// bfloat16. What is updated stays in 32 bit: the pieces are the fp32 masters.
    Bf16,
}

impl Float {
    pub(crate) fn on_the_wire(self) -> DType {
        match self {
            Float::F32 => DType::F32,
            Float::Bf16 => DType::Bf16,
        }
    }
}

/// What is sharded. Sizes are in elements.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// What is sharded.
    pub stage: Stage,
    /// Elements of one gradient bucket. A parameter of as many or more has a bucket of its own, and so has one of 65,536 or more that is
    /// cut evenly over the ranks: it is reduced as it lies. Default 8,388,608.
    pub reduce_bucket_size: usize,
    /// A parameter of at most this many elements is gathered ahead of its use at stage 3, in the order of the pass before; 0 turns that
    /// off. Default 50,000,000.
    pub prefetch_bucket_size: usize,
    /// Parameters of at most this many elements, and vectors of any length, stay whole on every rank, optimizer state included.
    /// Default 100,000.
    pub param_persistence_threshold: usize,
    /// What parameters are gathered as, and gradients are sent as. Default fp32.
    pub param_dtype: Float,
    /// Of the random numbers of [`dropout`](crate::dropout), which differ from rank to rank. Default 0.
    pub seed: u64,
}

impl ZeroConfig {
    /// The defaults at `stage`.
    pub fn new(stage: Stage) -> Self {
        Self {
            stage,
            reduce_bucket_size: 8 << 20,
            prefetch_bucket_size: 50_000_000,
            param_persistence_threshold: 100_000,
            param_dtype: Float::F32,
            seed: 0,
        }
    }
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self::new(Stage::default())
    }
}
