//! Settings of a sharded model, validated once before ranks start; `zero-burn` implements all of them.
//!
//! The words are those of `zero-burn`. In `zero-param`, `prepare` is `shard`, `Fused` is an optimizer of AdamW, Adam or LAMB, and gradients
//! are collected at the end of `Zero::backward`. `shard` refuses the settings that it does not implement.

mod error;

use std::path::PathBuf;
use std::time::Duration;

use zero_kernels::quantized::Format;

use crate::collective::DType;
use crate::offload::{AioOptions, PipelineOptions};
use crate::{Axes, Mesh, Stage};
pub use error::ConfigError;

/// A type of floating-point numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Float {
    /// 32 bit.
    #[default]
    F32,
    /// IEEE half precision: 5 bits of exponent, so that small gradients need a loss scale.
    F16,
    /// bfloat16: the exponent of f32, 8 bits of precision.
    Bf16,
}

impl Float {
    /// Returns the size of one number in bytes.
    pub fn size(self) -> usize {
        self.wire_dtype().size()
    }

    /// Returns the corresponding type of the collectives.
    pub fn wire_dtype(self) -> crate::collective::DType {
        match self {
            Float::F32 => crate::collective::DType::F32,
            Float::F16 => crate::collective::DType::F16,
            Float::Bf16 => crate::collective::DType::Bf16,
        }
    }
}

/// The memory tier that keeps shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tier {
    /// Device memory; on the CPU backend, host memory.
    #[default]
    Memory,
    /// Host memory; the CPU computes on the shards. On the CPU backend, the same as [`Tier::Memory`].
    Host,
    /// A file, see [`Disk`].
    Disk,
}

/// The way in which ranks that are processes gather parameters. Ranks that are threads always read each other's shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gathers {
    /// [`Gathers::Collective`] if the ranks have NCCL, otherwise [`Gathers::OneSided`].
    #[default]
    Auto,
    /// All ranks gather together, in program order, and with NCCL without copies through the host. Every rank must use the same parameters
    /// in the same order. A difference is an error before anything is updated, or at the deadline. One rank alone can use a module (to
    /// evaluate, to generate) at stages 0 to 2, between updates of `Fused` whose state is on the device. It cannot do so with offloaded
    /// state, at stage 3, or with Burn's optimizers.
    Collective,
    /// Each rank reads the others' shards when it needs them, through host memory. Ranks may use different parameters.
    OneSided,
}

/// The memory tier of each kind of model state.
#[derive(Debug, Clone, PartialEq)]
pub struct Offload {
    /// Optimizer state, and gradients from their reduction to the update. On a disk: from stage 1 on (gradients from stage 2 on). In host
    /// memory: at every stage (gradients from stage 1 on). DeepSpeed's `offload_optimizer`.
    pub optimizer: Tier,
    /// Parameters, at stage 3. DeepSpeed's `offload_param`.
    pub parameters: Tier,
    /// Inputs of [checkpointed](ZeroConfig::checkpointed_blocks) blocks, except the first block's, from the end of the block until the
    /// backward pass reaches it. DeepSpeed's `cpu_checkpointing`.
    pub activations: Tier,
    /// Share of a module's optimizer state and reduced gradients that is offloaded to `optimizer`, measured in bytes for AdamW. It consists
    /// of the state and gradients of the module's last parameters; the rest stays with the backend. With a disk, gradients stay in
    /// preference to state, because they are written while nothing is read. Default 1; DeepSpeed's `ratio` (Twin-Flow).
    pub ratio: f32,
    /// Minimum size of an offloaded tensor, in bytes. Smaller ones stay with the backend: moving them would cost more than it saves.
    /// Default 64 KiB.
    pub min_bytes: usize,
    /// Settings of the disk.
    pub disk: Disk,
}

impl Default for Offload {
    fn default() -> Self {
        let [optimizer, parameters, activations] = [Tier::default(); 3];
        Self { optimizer, parameters, activations, ratio: 1.0, min_bytes: 64 << 10, disk: Disk::default() }
    }
}

impl Offload {
    /// Returns whether anything is kept in this tier.
    pub fn uses(&self, tier: Tier) -> bool {
        self.activations == tier || self.keeps_state(tier)
    }

    /// Returns whether model state is kept in this tier.
    pub fn keeps_state(&self, tier: Tier) -> bool {
        [self.optimizer, self.parameters].contains(&tier)
    }
}

/// Settings of a disk. Each rank has its own file and buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct Disk {
    /// Folder in which each run creates a folder of its own. DeepSpeed's `nvme_path`.
    pub path: PathBuf,
    /// Sizes and parallelism of requests; DeepSpeed's `aio`.
    pub aio: AioOptions,
    /// Number of buffers per rank, at least 6. All transfers use them, and no other memory grows. Default 16.
    pub buffer_count: usize,
    /// Bytes of a buffer. Default 8 MiB.
    pub buffer_bytes: usize,
    /// Locks the buffers into memory.
    pub pin_memory: bool,
    /// Maximum number of elements of a sub-group of an update, whose arrays are read, computed and written together. A buffer's size limits
    /// it too. DeepSpeed's `sub_group_size`.
    pub sub_group_size: usize,
    /// Number of elements of this rank's parameters that stay in host memory anyway, in the order of initialization. Default 0;
    /// DeepSpeed's `max_in_cpu`, whose default is 1,000,000,000.
    pub max_in_memory: usize,
    /// Reads later sub-groups while one is computed.
    pub pipeline_read: bool,
    /// Writes sub-groups while later ones are computed.
    pub pipeline_write: bool,
    /// Timeout of one transfer.
    pub limit: Duration,
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            aio: AioOptions::default(),
            buffer_count: 16,
            buffer_bytes: 8 << 20,
            pin_memory: false,
            sub_group_size: usize::MAX,
            max_in_memory: 0,
            pipeline_read: true,
            pipeline_write: true,
            limit: Duration::from_secs(600),
        }
    }
}

impl Disk {
    /// Minimum of `buffer_count`: a parameter, a gradient, two states and a 16-bit copy of an update, and one spare.
    pub const FEWEST_BUFFERS: usize = 6;

    /// Minimum of `buffer_bytes`: two sub-groups of the shortest length, in bytes of fp32.
    pub const SMALLEST_BUFFER: usize = 64 << 10;

    /// Returns the overlap options for the sub-groups of an update.
    pub fn pipeline(&self) -> PipelineOptions {
        let Self { pipeline_read, pipeline_write, limit, .. } = *self;
        PipelineOptions { pipeline_read, pipeline_write, limit }
    }
}

/// Settings of sharding, and of the memory that communication may take. Sizes are in elements, as in DeepSpeed's keys.
// One field per setting.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// ZeRO stage: the kinds of model state that are sharded.
    pub stage: Stage,
    /// Axes of a mesh of all ranks. ZeRO shards, reduces and saves along `data` alone. Ranks at different positions on another axis have
    /// models of their own, or parts of one (`parallel`), whose gradients share one norm. Everything said about ranks here applies to the
    /// ranks along `data`. Default: none, all ranks form the data axis. PyTorch's `DeviceMesh`; DeepSpeed's `mpu`.
    pub axes: Axes,
    /// Number of neighbouring ranks that model state is sharded among, such as the ranks of one machine. Every such group holds all model
    /// state and gathers parameters internally; gradients are added within the group first, then across groups. Divides the number of
    /// ranks. Default: all ranks. DeepSpeed's `mics_shard_size`, PyTorch's hybrid sharding.
    pub shard_size: Option<usize>,
    /// Stage 3: number of neighbouring ranks in a group that keeps a secondary partition of each parameter and gathers from it. A version
    /// of a parameter crosses groups once, when it is made, however often it is gathered. Model state is sharded over all ranks as before;
    /// the secondary partition takes an additional `1 / secondary_shard_size` of the parameters' bytes. Training results are bit-identical.
    /// Default: none. hpZ of ZeRO++ ([Wang et al. 2023](https://arxiv.org/abs/2306.10209)), DeepSpeed's `zero_hpz_partition_size`.
    pub secondary_shard_size: Option<usize>,
    /// Elements of one gradient bucket. Default 8,388,608 (32 MiB of fp32); DeepSpeed's `reduce_bucket_size`.
    pub reduce_bucket_size: usize,
    /// Number of parameter elements that are prefetched at stage 3, in the order recorded in the previous step; 0 turns prefetch off.
    /// Default 50,000,000; DeepSpeed's `stage3_prefetch_bucket_size`.
    pub prefetch_bucket_size: usize,
    /// Maximum number of elements of gathered parameters that are kept at stage 3. A larger parameter is still gathered in full for the
    /// operation that needs it. Default 1,000,000,000; DeepSpeed's `stage3_max_live_parameters`.
    pub max_live_parameters: usize,
    /// Keeps a gathered parameter if, in the order recorded in the previous step, at most this many other elements are gathered before its
    /// next use. Default 0: only an immediate reuse, such as that of a tied output head between forward and backward pass (DeepSpeed's
    /// `stage3_max_reuse_distance` is 1e9, which keeps all parameters of a small model).
    pub max_reuse_distance: usize,
    /// Parameters of at most this many elements stay gathered until they are updated. Default 100,000; DeepSpeed's
    /// `stage3_param_persistence_threshold`.
    pub param_persistence_threshold: usize,
    /// Seed of parameters and of dropout, the same on every rank.
    pub seed: u64,
    /// Type to which `prepare` converts fp32 parameters, and in which they are gathered. In 16 bit, the model computes in 16 bit, and
    /// `Fused` keeps an fp32 master of each parameter. Default fp32.
    pub param_dtype: Float,
    /// Type in which reduced gradients are kept and accumulated over micro-batches. Default: the parameter's.
    pub gradient_dtype: Option<Float>,
    /// Keeps the moments of `Fused` in bf16. They are computed in fp32 and rounded stochastically, independently of the partition. It
    /// halves their bytes in memory, on a disk and in transfer, and changes training results; masters and checkpoints stay in fp32. A
    /// device that keeps the moments itself must be able to store bf16. Default false; DeepSpeed's `bf16_optimizer_states`.
    pub bf16_optimizer_states: bool,
    /// Keeps the moments of `Fused` in 8 bits: blocks of 256 elements with one scale, as in bitsandbytes (*8-bit Optimizers via Block-wise
    /// Quantization*, Dettmers et al. 2022, <https://arxiv.org/abs/2110.02861>). Those of a parameter of less than 4,096 elements stay in
    /// fp32. They are computed in fp32 and stay in host memory, where the CPU updates. The bits are the same at every stage. It changes training
    /// results; masters and checkpoints stay in fp32. Not with state on a disk, and not for LAMB. Default false; `adamw_8bit` of Hugging Face's Trainer.
    pub int8_optimizer_states: bool,
    /// Decay of an exponential moving average (EMA) of the weights, which `Fused` keeps in fp32 as an additional optimizer state. The first
    /// update copies the weights; each later one moves the average by `1 - ema_decay` of its distance to them, as PyTorch's
    /// `get_ema_multi_avg_fn` does. Between 0 and 1. Default: none.
    pub ema_decay: Option<f64>,
    /// Type in which gradients are sent; DeepSpeed's `communication_data_type`. Sums are in fp32 and rounded once, except that NCCL adds in
    /// the type that is sent and rounds at every step. Default: fp32 with NCCL, otherwise the parameter's type.
    pub communication_dtype: Option<Float>,
    /// Format in which gradients are sent: 8 or 4 bit, in blocks of 64 with a scale each. It applies across groups of `shard_size` ranks;
    /// across the groups of a secondary partition after a sum within each; or, if there is one group, within it. Sums are in fp32; sums
    /// across groups are quantised again on the way back. It changes training results: the error is up to half a step of 1/127
    /// ([`Format::Int8`]) or 1/7 ([`Format::Int4`]) of the largest value of a block. Default: none. DeepSpeed's `zero_quantized_gradients`.
    pub quantized_gradients: Option<Format>,
    /// Format in which parameters of more than `param_persistence_threshold` elements are gathered: 8 or 4 bit, in blocks of 64 with a
    /// scale each. It applies over all ranks, or for the secondary partition if there is one. Every rank computes with the decoded values;
    /// updates, checkpoints and values that are read out keep full precision. The codes of a rank's shard are kept in addition to it while
    /// it is in memory. A parameter that was made in fp16 is gathered unquantised: it may hold quantised codes already. Stage 3 only.
    /// Default: none. DeepSpeed's `zero_quantized_weights`.
    pub quantized_weights: Option<Format>,
    /// The same for parameters that are frozen when `prepare` is called, independent of the format of trained ones. Stage 3 only.
    /// Default: `quantized_weights`. DeepSpeed's `zero_quantized_nontrainable_weights`.
    pub quantized_nontrainable_weights: Option<Format>,
    /// Reduces gradients during the backward pass, as they arrive. Otherwise `collect_grads` reduces them after the pass, and full
    /// gradients are kept until then. Default true; DeepSpeed's `overlap_comm`.
    pub overlap_comm: bool,
    /// Divisor of gradients before they are added, so that a sum in 16 bit does not overflow. The sum is then divided by the number of
    /// ranks over this divisor. Default 1; DeepSpeed's `gradient_predivide_factor`.
    pub gradient_predivide_factor: f32,
    /// The way in which processes gather parameters. Default: collectively if they have NCCL.
    pub gathers: Gathers,
    /// Interval between checks of replicas, in updates. Before such an update, when gradients are collected, ranks compare hashes
    /// of the parameters that each of them holds in full: all at stage 0, gathered and kept ones at the other stages. They also do so
    /// before any update that follows a change by hand. A parameter that was changed on one rank alone is an error on all ranks, which
    /// names the parameter, the rank and the update. A check reads those parameters once. Default 0: never.
    pub check_replicas: u64,
    /// Number of a model's first blocks that use activation checkpointing (`checkpoint_block`): the forward pass drops their activations,
    /// and the backward pass computes them again, with parameters gathered again. The last blocks cost least to keep, because the backward
    /// pass finishes them before it reaches the others. Default 0; `usize::MAX` for all.
    pub checkpointed_blocks: usize,
    /// Offload settings. Default: no offload.
    pub offload: Offload,
}

impl ZeroConfig {
    /// Returns the shares of reduced gradients and of optimizer state that are offloaded, by [`Offload::ratio`].
    pub fn offloaded_shares(&self) -> [f64; 2] {
        let ratio = f64::from(self.offload.ratio);
        match self.offload.optimizer {
            Tier::Disk if self.stage.shards_gradients() => {}
            Tier::Disk => return [0.0, ratio],
            Tier::Memory | Tier::Host => return [ratio; 2],
        }
        // Bytes of a parameter: its gradient, two moments, and a 16-bit parameter's master.
        let gradient = self.gradient_dtype.unwrap_or(self.param_dtype).size() as f64;
        let state = self.optimizer_arrays(2).sum::<usize>() as f64;
        let stays = (1.0 - ratio) * (gradient + state);
        [1.0 - (stays / gradient).min(1.0), 1.0 - (stays - gradient).max(0.0) / state]
    }

    /// Returns the type of optimizer state other than masters; `U8` stands for blocks of 8 bits.
    pub fn optimizer_state_dtype(&self) -> DType {
        match (self.int8_optimizer_states, self.bf16_optimizer_states) {
            (true, _) => DType::U8,
            (false, true) => DType::Bf16,
            (false, false) => DType::F32,
        }
    }

    /// Returns the bytes that `Fused` keeps per element of a parameter, for each array: `states` optimizer states, the average of the
    /// weights, and a 16-bit parameter's master.
    pub fn optimizer_arrays(&self, states: usize) -> impl Iterator<Item = usize> {
        let average = self.ema_decay.map(|_| 4);
        let master = (self.param_dtype != Float::F32).then_some(4);
        std::iter::repeat_n(self.optimizer_state_dtype().size(), states).chain(average).chain(master)
    }

    /// Returns how gradients of `world` ranks are added: the type that is sent, the factor before the addition, and the factor of the sum.
    /// `rounds_sums`: NCCL adds them, which rounds to the sent type at every step.
    pub fn reduction(&self, world: usize, rounds_sums: bool) -> (Float, f32, f32) {
        let (sent_as, divided) = match (self.communication_dtype, rounds_sums) {
            (None, true) => (Float::F32, self.gradient_predivide_factor),
            // A sum over more ranks would overflow sooner.
            (Some(Float::F16), true) => (Float::F16, self.gradient_predivide_factor.max(world as f32)),
            (given, _) => (given.unwrap_or(self.param_dtype), self.gradient_predivide_factor),
        };
        (sent_as, 1.0 / divided, divided / world as f32)
    }

    /// Returns the groups of `world` ranks, or `None` if `shard_size` does not divide `world`.
    pub fn mesh(&self, world: usize) -> Option<Mesh> {
        Mesh::new(world, self.shard_size.unwrap_or(world))
    }

    /// Returns the groups that keep a secondary partition of parameters, if it differs from the partition of model state.
    pub fn secondary_mesh(&self, world: usize) -> Option<Mesh> {
        Mesh::new(world, self.secondary_shard_size?).filter(|mesh| mesh.replicas() > 1)
    }

    /// Returns the groups in which gradients that all ranks share are added first, so that less data crosses groups, in quantised form.
    /// Unquantised gradients go in one hop, which adds in the order of ranks.
    pub fn cut_on_the_way(&self, world: usize) -> Option<Mesh> {
        self.secondary_mesh(world).filter(|_| self.quantized_gradients.is_some())
    }

    /// Returns how processes gather parameters: one-sided if there is a secondary partition, otherwise as configured.
    pub fn gathers(&self, world: usize) -> Gathers {
        if self.gathers_one_sided(world) { Gathers::OneSided } else { self.gathers }
    }

    fn gathers_one_sided(&self, world: usize) -> bool {
        self.secondary_mesh(world).is_some()
    }

    fn quantizes_weights(&self) -> bool {
        self.quantized_weights.or(self.quantized_nontrainable_weights).is_some()
    }

    /// Returns the formats in which large trained and large frozen parameters are gathered for use.
    pub fn weights(&self) -> [Option<Format>; 2] {
        [self.quantized_weights, self.quantized_nontrainable_weights.or(self.quantized_weights)]
    }

    /// Returns whether gradients are added in host memory even if ranks have devices: NCCL only adds types that it knows.
    pub fn reduces_on_hosts(&self) -> bool {
        self.quantized_gradients.is_some()
    }

    /// Returns the defaults at `stage`.
    pub fn new(stage: Stage) -> Self {
        Self { stage, ..Self::default() }
    }

    /// Checks the constraints that types cannot express.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if ranks cannot form the axes or groups, settings contradict each other or the stage, a bucket has no room for one
    /// element per rank, or a number is out of range.
    pub fn validate(&self, world: usize) -> Result<(), ConfigError> {
        // The launcher refuses 0 ranks.
        let Some(world) = self.axes.data(world.max(1)) else {
            return Err(ConfigError::Axes { got: self.axes.clone(), world });
        };
        if self.mesh(world).is_none() {
            return Err(ConfigError::Mesh { got: self.shard_size.unwrap_or(world), world });
        }
        if let Some(size) = self.secondary_shard_size {
            let is_alone = self.stage.shards_parameters() && self.shard_size.is_none();
            if Mesh::new(world, size).is_none() || !is_alone {
                return Err(ConfigError::SecondaryShards { got: size, world });
            }
        }
        if self.quantizes_weights() && !self.stage.shards_parameters() {
            return Err(ConfigError::QuantizedWeights { stage: self.stage });
        }
        if (self.reduces_on_hosts() || self.gathers_one_sided(world)) && self.gathers == Gathers::Collective {
            return Err(ConfigError::CollectiveGathers);
        }
        if self.reduce_bucket_size < world {
            return Err(ConfigError::Bucket { got: self.reduce_bucket_size, world });
        }
        if !(self.gradient_predivide_factor.is_finite() && self.gradient_predivide_factor > 0.0) {
            return Err(ConfigError::Predivide { got: self.gradient_predivide_factor });
        }
        if let Some(got) = self.ema_decay.filter(|decay| !(*decay > 0.0 && *decay < 1.0)) {
            return Err(ConfigError::EmaDecay { got });
        }
        if self.int8_optimizer_states && self.bf16_optimizer_states {
            return Err(ConfigError::StatesInBoth);
        }
        let offload = &self.offload;
        let refuse = |key, expected| Err(ConfigError::Offload { key, expected });
        if self.int8_optimizer_states && offload.keeps_state(Tier::Disk) {
            return refuse(
                "optimizer",
                "int8_optimizer_states keeps optimizer state in memory: keep all model state off the disk, or set bf16_optimizer_states",
            );
        }
        if offload.parameters != Tier::Memory && !self.stage.shards_parameters() {
            return refuse(
                "parameters",
                "parameters can be offloaded to host memory or a disk only at stage 3, where they are sharded",
            );
        }
        if offload.optimizer == Tier::Disk && !self.stage.shards_optimizer() {
            return refuse(
                "optimizer",
                "optimizer state can be offloaded to a disk only from stage 1 on, where it is sharded",
            );
        }
        if !(0.0..=1.0).contains(&offload.ratio) {
            return refuse("ratio", "expected a fraction from 0 to 1 of optimizer state and gradients");
        }
        if offload.uses(Tier::Disk) {
            if offload.disk.path.as_os_str().is_empty() {
                return refuse("disk.path", "name a folder on a fast disk");
            }
            if offload.disk.buffer_count < Disk::FEWEST_BUFFERS {
                return refuse("disk.buffer_count", "expected at least 6 buffers: an update uses up to five at once");
            }
            if offload.disk.buffer_bytes < Disk::SMALLEST_BUFFER {
                return refuse("disk.buffer_bytes", "expected buffers of at least 64 KiB");
            }
        }
        Ok(())
    }
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self {
            stage: Stage::DataParallel,
            axes: Axes::default(),
            shard_size: None,
            secondary_shard_size: None,
            reduce_bucket_size: 1 << 23,
            prefetch_bucket_size: 50_000_000,
            max_live_parameters: 1_000_000_000,
            max_reuse_distance: 0,
            param_persistence_threshold: 100_000,
            seed: 0,
            param_dtype: Float::F32,
            gradient_dtype: None,
            bf16_optimizer_states: false,
            int8_optimizer_states: false,
            ema_decay: None,
            communication_dtype: None,
            quantized_gradients: None,
            quantized_weights: None,
            quantized_nontrainable_weights: None,
            overlap_comm: true,
            gradient_predivide_factor: 1.0,
            gathers: Gathers::default(),
            check_replicas: 0,
            checkpointed_blocks: 0,
            offload: Offload::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_stage_3_has_is_refused_elsewhere_and_a_second_cut_beside_collective_gathers() {
        for stage in Stage::ALL {
            let cut = ZeroConfig { secondary_shard_size: Some(2), ..ZeroConfig::new(stage) };
            let quantized = ZeroConfig { quantized_weights: Some(Format::Int8), ..ZeroConfig::new(stage) };
            let frozen = ZeroConfig { quantized_nontrainable_weights: Some(Format::Int8), ..ZeroConfig::new(stage) };
            for config in [cut, quantized, frozen] {
                let told = config.validate(4).err().map(|error| error.to_string());
                assert_eq!(told.is_none(), stage == Stage::Parameters, "{told:?}");
                assert!(told.as_ref().is_none_or(|told| told.contains("stage 3")));
                let is_refused = told.is_some() || config.secondary_shard_size.is_some();
                let together = ZeroConfig { gathers: Gathers::Collective, ..config };
                assert_eq!(together.validate(4).is_err(), is_refused);
            }
        }
        // Groups consist of ranks along the data axis.
        let axes = Axes::new(&[("data", 2), ("tensor", 2)]);
        let config = ZeroConfig { axes, ..ZeroConfig::new(Stage::Parameters) };
        assert!(ZeroConfig { shard_size: Some(4), ..config.clone() }.validate(4).is_err());
        assert_eq!(
            config.validate(6).unwrap_err().to_string(),
            "axes are data=2 x tensor=2, but there are 6 ranks: expected one axis \"data\", unique names of letters, \
             digits and _, and sizes whose product is 6"
        );
        let error = ZeroConfig { secondary_shard_size: Some(3), ..ZeroConfig::new(Stage::Parameters) }.validate(4);
        assert!(matches!(error, Err(ConfigError::SecondaryShards { got: 3, world: 4 })));
    }

    #[test]
    fn sums_are_rounded_once_unless_asked_otherwise() {
        let config = |communication_dtype, predivide| ZeroConfig {
            param_dtype: Float::Bf16,
            communication_dtype,
            gradient_predivide_factor: predivide,
            ..ZeroConfig::new(Stage::Gradients)
        };
        // Sums in fp32: gradients are sent in the parameters' type.
        assert_eq!(config(None, 1.0).reduction(8, false), (Float::Bf16, 1.0, 0.125));
        assert_eq!(config(Some(Float::F16), 4.0).reduction(8, false), (Float::F16, 0.25, 0.5));
        // Sums in the type that is sent: fp32.
        assert_eq!(config(None, 1.0).reduction(8, true), (Float::F32, 1.0, 0.125));
        assert_eq!(config(Some(Float::Bf16), 1.0).reduction(8, true), (Float::Bf16, 1.0, 0.125));
        // A sum of 1,000 ranks' fp16 gradients is no larger than the largest of them.
        let (sent_as, before, after) = config(Some(Float::F16), 1.0).reduction(1000, true);
        assert_eq!((sent_as, before * 1000.0, after), (Float::F16, 1.0, 1.0));
    }
}
