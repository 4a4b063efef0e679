//! Errors of settings.

use crate::{Axes, Stage};

/// A setting that cannot work.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// Axes that do not match the number of ranks.
    #[error(
        "axes are {got}, but there are {world} ranks: expected one axis \"data\", unique names of letters, digits and \
         _, and sizes whose product is {world}"
    )]
    Axes {
        /// The axes given.
        got: Axes,
        /// Number of ranks.
        world: usize,
    },
    /// Ranks that cannot form groups of this size.
    #[error(
        "shard_size is {got}, but there are {world} ranks: expected a divisor of {world}, or no value for one group of \
         all ranks"
    )]
    Mesh {
        /// The size given.
        got: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A secondary partition of parameters that the ranks cannot hold.
    #[error(
        "secondary_shard_size is {got} with {world} ranks: expected a divisor of {world}, at stage 3 and without \
         shard_size, which already keeps gathers within groups"
    )]
    SecondaryShards {
        /// The size given.
        got: usize,
        /// Number of ranks.
        world: usize,
    },
    /// Quantised weights at a stage that does not gather parameters for each use.
    #[error(
        "quantized_weights or quantized_nontrainable_weights is set at stage {stage}: only stage 3 gathers parameters \
         where they are used; remove it, or choose stage 3"
    )]
    QuantizedWeights {
        /// The stage.
        stage: Stage,
    },
    /// Collective gathers together with settings that do not use NCCL.
    #[error(
        "collective gathers work only within the groups that hold parameters, and only with unquantized gradients: use \
         one-sided gathers, or remove secondary_shard_size and quantized_gradients"
    )]
    CollectiveGathers,
    /// A gradient bucket that does not hold one element for each rank.
    #[error("reduce_bucket_size is {got}, but {world} ranks need at least {world} elements: raise reduce_bucket_size")]
    Bucket {
        /// The size given.
        got: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A divisor that is not a finite number above 0.
    #[error("gradient_predivide_factor is {got}: expected a number above 0; 1 means no division before the sum")]
    Predivide {
        /// The factor given.
        got: f32,
    },
    /// A decay that is not between 0 and 1.
    #[error("ema_decay is {got}: expected a number between 0 and 1, such as 0.999")]
    EmaDecay {
        /// The decay given.
        got: f64,
    },
    /// Optimizer state in two types.
    #[error("bf16_optimizer_states and int8_optimizer_states are both set: choose one of them")]
    StatesInBoth,
    /// Optimizer state in bf16 on a device that cannot store bf16.
    #[error(
        "bf16_optimizer_states is set, but this device cannot store bf16: offload the optimizer state, so that the CPU \
         updates it, or remove the setting"
    )]
    StatesOnDevice,
    /// Ranks of one process that would use several GPUs, which CubeCL 0.10 cannot copy between from threads that run at once.
    #[error(
        "{ranks} ranks that are threads of one process cannot use {gpus} NVIDIA GPUs: start one process for each GPU (`zero launch \
         --ranks {gpus} -- COMMAND`, or torchrun), or let all ranks share one GPU (set CUDA_VISIBLE_DEVICES=0)"
    )]
    ThreadsOnGpus {
        /// Number of ranks.
        ranks: usize,
        /// Number of GPUs that the process sees.
        gpus: usize,
    },
    /// State that cannot be kept in the requested tier.
    #[error("offload.{key}: {expected}")]
    Offload {
        /// The setting.
        key: &'static str,
        /// The expected value.
        expected: &'static str,
    },
}
