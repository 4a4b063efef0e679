//! Settings of [`Zero`](crate::Zero), validated once before ranks start.

use zero_core::Stage;

/// What is sharded, and how much memory communication may take. Sizes are in elements, as DeepSpeed's keys are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZeroConfig {
    /// What is sharded.
    pub stage: Stage,
    /// Elements of one gradient bucket. Default 8,388,608 (32 MiB of fp32); DeepSpeed's `reduce_bucket_size`.
    pub reduce_bucket_size: usize,
    /// Elements of parameters gathered ahead of their use at stage 3, in the order recorded in the step before; 0 turns
    /// prefetch off. Default 50,000,000; DeepSpeed's `stage3_prefetch_bucket_size`.
    pub prefetch_bucket_size: usize,
    /// Elements of gathered parameters that may be kept at stage 3. One parameter larger than this is still gathered
    /// whole for the operation that needs it. Default 1,000,000,000; DeepSpeed's `stage3_max_live_parameters`.
    pub max_live_parameters: usize,
    /// A gathered parameter is kept when, by the order recorded in the step before, at most this many other elements
    /// are gathered before its next use. Default 0: only an immediate reuse, such as a tied output head's between
    /// forward and backward (DeepSpeed's `stage3_max_reuse_distance` is 1e9, which keeps a small model whole).
    pub max_reuse_distance: usize,
    /// Parameters of at most this many elements stay gathered until they are updated. Default 100,000; DeepSpeed's
    /// `stage3_param_persistence_threshold`.
    pub param_persistence_threshold: usize,
    /// Seed of parameters and of dropout, the same on every rank.
    pub seed: u64,
}

impl ZeroConfig {
    /// The defaults at `stage`.
    pub fn new(stage: Stage) -> Self {
        Self { stage, ..Self::default() }
    }

    /// Checks what no type can.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for a bucket without room for one element per rank.
    pub fn validate(&self, world: usize) -> Result<(), ConfigError> {
        if self.reduce_bucket_size < world {
            return Err(ConfigError::Bucket { got: self.reduce_bucket_size, world });
        }
        Ok(())
    }
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self {
            stage: Stage::DataParallel,
            reduce_bucket_size: 1 << 23,
            prefetch_bucket_size: 50_000_000,
            max_live_parameters: 1_000_000_000,
            max_reuse_distance: 0,
            param_persistence_threshold: 100_000,
            seed: 0,
        }
    }
}

/// A setting that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A gradient bucket that does not hold one element for each rank.
    #[error("reduce_bucket_size is {got}, but {world} ranks need at least {world} elements: raise reduce_bucket_size")]
    Bucket {
        /// The size given.
        got: usize,
        /// Number of ranks.
        world: usize,
    },
}
