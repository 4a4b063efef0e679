//! Settings of a sharded module. Keys and defaults are those of `zero_burn::ZeroConfig`.

use zero_core::Stage;
use zero_core::collective::DType;

/// Data type in which parameters are gathered and the model computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Float {
    /// 32 bit.
    #[default]
    F32,
    /// bfloat16. The optimizer updates the shards in fp32: they are the master weights.
    Bf16,
}

impl Float {
    pub(crate) fn wire_dtype(self) -> DType {
        match self {
            Float::F32 => DType::F32,
            Float::Bf16 => DType::Bf16,
        }
    }
}

/// Settings of a sharded module. Sizes are in elements.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// ZeRO stage: which model states are sharded.
    pub stage: Stage,
    /// Size of a gradient bucket, which is closed once it holds this many elements. A sharded parameter of at least this size, or of at
    /// least 65,536 elements, gets its own bucket and is reduced without a copy if it splits evenly over the ranks. Default 8,388,608.
    pub reduce_bucket_size: usize,
    /// Size up to which a parameter is prefetched at stage 3, in the order of the previous pass; 0 disables prefetch. Default 50,000,000.
    pub prefetch_bucket_size: usize,
    /// Size up to which a parameter is replicated on every rank, optimizer state included. Vectors of any length are. Default 100,000.
    pub param_persistence_threshold: usize,
    /// Data type of gathered parameters and of gradients on the wire. Default fp32.
    pub param_dtype: Float,
    /// Seed of the random numbers of [`dropout`](crate::dropout), which differ from rank to rank. Default 0.
    pub seed: u64,
}

impl ZeroConfig {
    /// Returns the defaults at `stage`.
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
