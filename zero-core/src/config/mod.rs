//! Settings of a sharded model, validated once before ranks start: `zero-burn` does all of them.

mod error;

use std::path::PathBuf;
use std::time::Duration;

use zero_kernels::quantized::Format;

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
    /// Bytes of one number.
    pub fn size(self) -> usize {
        self.on_the_wire().size()
    }

    /// What collectives call it.
    pub fn on_the_wire(self) -> crate::collective::DType {
        match self {
            Float::F32 => crate::collective::DType::F32,
            Float::F16 => crate::collective::DType::F16,
            Float::Bf16 => crate::collective::DType::Bf16,
        }
    }
}

/// Where shards are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tier {
    /// In the device's memory; on the CPU backend that is the host's.
    #[default]
    Memory,
    /// In the host's memory, and computed on by the processor; on the CPU backend as [`Tier::Memory`].
    Host,
    /// In a file, see [`Disk`].
    Disk,
}

/// How parameters are gathered between ranks that are processes. Ranks that are threads read each other's pieces in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gathers {
    /// [`Gathers::Collective`] where the ranks have NCCL, otherwise [`Gathers::OneSided`].
    #[default]
    Auto,
    /// By all ranks together, in the order of the program, without copies through the host with NCCL. Every rank must use the
    /// same parameters in the same order; what differs is an error before anything is updated, or at the deadline. One rank
    /// alone can use a module (to evaluate, to generate) at stages 0 to 2, between updates of `Fused`
    /// whose state is on the device; with state offloaded, at stage 3, and with Burn's optimizers it cannot.
    Collective,
    /// Each rank reads the others' pieces when it needs them, through the hosts' memory: ranks may use different parameters.
    OneSided,
}

/// Where each kind of model state is kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Offload {
    /// Optimizer state, and gradients from their reduction to the update: on a disk from stage 1 on (gradients from stage 2
    /// on), in the host's memory at every stage (gradients from stage 1 on). DeepSpeed's `offload_optimizer`.
    pub optimizer: Tier,
    /// Parameters, at stage 3. DeepSpeed's `offload_param`.
    pub parameters: Tier,
    /// Inputs of [checkpointed](ZeroConfig::checkpointed_blocks) blocks, but the first's, from the end of the block until the
    /// backward pass comes to it. DeepSpeed's `cpu_checkpointing`.
    pub activations: Tier,
    /// The share of a module's optimizer state and reduced gradients, by bytes of AdamW's, that is where `optimizer` says: those of the
    /// parameters at its end. The others' stay with the backend; where there is a disk, gradients before state, as gradients are
    /// written while nothing is read. Default 1; DeepSpeed's `ratio` (Twin-Flow).
    pub ratio: f32,
    /// What has fewer bytes stays where the backend computes: moving it would cost more than it takes. Default 64 KiB.
    pub min_bytes: usize,
    /// How the disk is used.
    pub disk: Disk,
}

impl Default for Offload {
    fn default() -> Self {
        let [optimizer, parameters, activations] = [Tier::default(); 3];
        Self { optimizer, parameters, activations, ratio: 1.0, min_bytes: 64 << 10, disk: Disk::default() }
    }
}

impl Offload {
    /// Whether something is kept in this tier.
    pub fn uses(&self, tier: Tier) -> bool {
        self.activations == tier || self.keeps_state(tier)
    }

    /// Whether model state is kept in this tier.
    pub fn keeps_state(&self, tier: Tier) -> bool {
        [self.optimizer, self.parameters].contains(&tier)
    }
}

/// How a disk is used; each rank has a file and buffers of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Disk {
    /// The folder, in which each run makes one of its own. DeepSpeed's `nvme_path`.
    pub path: PathBuf,
    /// Sizes and parallelism of requests; DeepSpeed's `aio`.
    pub aio: AioOptions,
    /// Buffers of each rank, at least 6: what moves between memory and disk, and nothing else that grows. Default 16.
    pub buffer_count: usize,
    /// Bytes of a buffer. Default 8 MiB.
    pub buffer_bytes: usize,
    /// Whether buffers are locked into memory.
    pub pin_memory: bool,
    /// Most elements of a stretch of an update, whose arrays are read, computed and written together; no more than a buffer
    /// has. DeepSpeed's `sub_group_size`.
    pub sub_group_size: usize,
    /// Elements of this rank's parameters that stay in the host's memory all the same, in the order of their birth. Default 0;
    /// DeepSpeed's `max_in_cpu`, whose default is 1,000,000,000.
    pub max_in_memory: usize,
    /// Later stretches are read while one is computed.
    pub pipeline_read: bool,
    /// Stretches are written while later ones are computed.
    pub pipeline_write: bool,
    /// The longest wait for one transfer.
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
    /// Parameter, gradient, two states and a 16-bit copy of an update, and one to go on with.
    pub const FEWEST_BUFFERS: usize = 6;

    /// Two stretches of the shortest length, in bytes of fp32.
    pub const SMALLEST_BUFFER: usize = 64 << 10;

    /// What stretches of an update overlap with.
    pub fn pipeline(&self) -> PipelineOptions {
        let Self { pipeline_read, pipeline_write, limit, .. } = *self;
        PipelineOptions { pipeline_read, pipeline_write, limit }
    }
}

/// What is sharded, and how much memory communication may take. Sizes are in elements, as DeepSpeed's keys are.
// A field for each setting.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// What is sharded.
    pub stage: Stage,
    /// The axes of a mesh of all ranks. ZeRO shards, adds and saves along `data` alone; ranks with different places on another axis have
    /// models of their own, parts of one perhaps (`parallel`), whose gradients have one norm. All that is said of
    /// ranks here is of those along `data`. Default: none, all ranks are the data axis. PyTorch's `DeviceMesh`; DeepSpeed's `mpu`.
    pub axes: Axes,
    /// Among how many neighbouring ranks model state is sharded, those of one machine perhaps: every such group holds all of it,
    /// parameters are gathered within the group, and gradients are added within it first and then across. Divides the number of
    /// ranks. Default: all ranks. DeepSpeed's `mics_shard_size`, PyTorch's hybrid sharding.
    pub shard_size: Option<usize>,
    /// Stage 3: groups of so many neighbouring ranks keep a second cut of each parameter among them, which serves their gathers. A
    /// version crosses groups once, when it is made, however often it is gathered. State is cut over all ranks as before; the second
    /// cut takes `1 / secondary_shard_size` of the parameters' bytes more. It changes no bit of what is trained. Default: none.
    /// hpZ of ZeRO++ ([Wang et al. 2023](https://arxiv.org/abs/2306.10209)), DeepSpeed's `zero_hpz_partition_size`.
    pub secondary_shard_size: Option<usize>,
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
    /// What `prepare` makes of fp32 parameters, and what is gathered. In 16 bit the model computes in 16 bit, and
    /// `Fused` keeps an fp32 master of each parameter. Default fp32.
    pub param_dtype: Float,
    /// What reduced gradients are kept as, and added up as over micro-batches. Default: as the parameter.
    pub gradient_dtype: Option<Float>,
    /// Whether `Fused` keeps the moments of its rules in bf16, computed in fp32 and rounded up or down by chance,
    /// the same however a parameter is cut. It halves their bytes in memory, on a disk and on their way to it, and changes what is
    /// trained; masters stay in fp32, and so do checkpoints. Only where the processor updates them. Default false; DeepSpeed's
    /// `bf16_optimizer_states`.
    pub bf16_optimizer_states: bool,
    /// The decay of an exponential moving average (EMA) of the weights, which `Fused` keeps in fp32 as one more state of the optimizer:
    /// the first update copies the weights, and each later one moves the average by `1 - ema_decay` of its distance to them, as
    /// PyTorch's `get_ema_multi_avg_fn` does. Between 0 and 1. Default: none.
    pub ema_decay: Option<f64>,
    /// What gradients are sent as; DeepSpeed's `communication_data_type`. Additions are in fp32, rounded once, but for NCCL's,
    /// which adds in the type that is sent and rounds at every step. Default: with NCCL fp32, otherwise as the parameter.
    pub communication_dtype: Option<Float>,
    /// Whether gradients are sent in 8 or 4 bit, in blocks of 64 with a scale each: across groups of `shard_size` ranks, across those of a second cut after
    /// a sum within each, or, if there is one group, within it.
    /// Sums are in fp32; those across groups are quantised again on the way back. It changes what is trained: an error of up to half
    /// a step of 1/127 ([`Format::Int8`]) or 1/7 ([`Format::Int4`]) of the largest of a block. Default: no. DeepSpeed's `zero_quantized_gradients`.
    pub quantized_gradients: Option<Format>,
    /// Whether parameters of more elements than `param_persistence_threshold` are gathered in 8 or 4 bit, in blocks of 64 with a scale
    /// each: over all ranks, or for a second cut if there is one. Every rank computes with what the codes stand for; what is updated,
    /// saved and read out has all digits. The codes of a rank's piece are kept beside it while it is in memory. A parameter that was
    /// made in fp16 is gathered as it is: it may be quantised already. Stage 3 only. Default: no. DeepSpeed's `zero_quantized_weights`.
    pub quantized_weights: Option<Format>,
    /// The same of parameters that are frozen, as `prepare` finds them, whatever is done with those that are trained. Stage 3 only.
    /// Default: as with the others. DeepSpeed's `zero_quantized_nontrainable_weights`.
    pub quantized_nontrainable_weights: Option<Format>,
    /// Gradients are reduced beside the backward pass, as they come; otherwise after it, by `collect_grads`, which keeps
    /// them whole until then. Default true; DeepSpeed's `overlap_comm`.
    pub overlap_comm: bool,
    /// Gradients are divided by this before they are added and by the rest of the number of ranks afterwards, so that a
    /// sum in 16 bit does not overflow. Default 1; DeepSpeed's `gradient_predivide_factor`.
    pub gradient_predivide_factor: f32,
    /// How processes gather parameters. Default: together where they have NCCL.
    pub gathers: Gathers,
    /// Before every so many updates, when gradients are collected, ranks compare hashes of the parameters that each of them
    /// holds whole (all at stage 0, what has been gathered and kept at the others), and before any update of what was changed by
    /// hand since the last. One that differs, as it was changed on one rank alone, is an error on all ranks that names parameter,
    /// rank and update. A check reads those parameters once. Default 0: never.
    pub check_replicas: u64,
    /// How many of a model's first blocks are checkpointed (`checkpoint_block`): their activations are dropped in the
    /// forward pass and computed again in the backward pass, parameters gathered again. The last blocks cost least to keep: the
    /// backward pass is done with them before it comes to the others. Default 0; `usize::MAX` for all.
    pub checkpointed_blocks: usize,
    /// What is not kept in memory. Default: nothing.
    pub offload: Offload,
}

impl ZeroConfig {
    /// The shares of reduced gradients and of optimizer state that are offloaded, by [`Offload::ratio`].
    pub fn offloaded_shares(&self) -> [f64; 2] {
        let ratio = f64::from(self.offload.ratio);
        match self.offload.optimizer {
            Tier::Disk if self.stage.shards_gradients() => {}
            Tier::Disk => return [0.0, ratio],
            Tier::Memory | Tier::Host => return [ratio; 2],
        }
        // Bytes of a parameter: its gradient, two moments, and a master of 16 bit.
        let gradient = self.gradient_dtype.unwrap_or(self.param_dtype).size() as f64;
        let state = self.optimizer_arrays(2).sum::<usize>() as f64;
        let stays = (1.0 - ratio) * (gradient + state);
        [1.0 - (stays / gradient).min(1.0), 1.0 - (stays - gradient).max(0.0) / state]
    }

    /// The type of optimizer state but for masters.
    pub fn optimizer_state_dtype(&self) -> Float {
        if self.bf16_optimizer_states { Float::Bf16 } else { Float::F32 }
    }

    /// Bytes that `Fused` keeps of each element of a parameter: those of so many states, of the average of its weights, and of the
    /// master of 16 bit.
    pub fn optimizer_arrays(&self, states: usize) -> impl Iterator<Item = usize> {
        let average = self.ema_decay.map(|_| 4);
        let master = (self.param_dtype != Float::F32).then_some(4);
        std::iter::repeat_n(self.optimizer_state_dtype().size(), states).chain(average).chain(master)
    }

    /// How gradients of `world` ranks are added up: what they are sent as, what they are multiplied by before, and the sum
    /// after. `rounds_sums`: by NCCL, which rounds at every step to what is sent.
    pub fn reduction(&self, world: usize, rounds_sums: bool) -> (Float, f32, f32) {
        let (sent_as, divided) = match (self.communication_dtype, rounds_sums) {
            (None, true) => (Float::F32, self.gradient_predivide_factor),
            // A sum of more ranks would overflow sooner.
            (Some(Float::F16), true) => (Float::F16, self.gradient_predivide_factor.max(world as f32)),
            (given, _) => (given.unwrap_or(self.param_dtype), self.gradient_predivide_factor),
        };
        (sent_as, 1.0 / divided, divided / world as f32)
    }

    /// The groups of `world` ranks; `None` if they do not come out even.
    pub fn mesh(&self, world: usize) -> Option<Mesh> {
        Mesh::new(world, self.shard_size.unwrap_or(world))
    }

    /// The groups that keep a second cut of parameters, if it is another than that of model state.
    pub fn secondary_mesh(&self, world: usize) -> Option<Mesh> {
        Mesh::new(world, self.secondary_shard_size?).filter(|mesh| mesh.replicas() > 1)
    }

    /// The groups in which gradients that all ranks share are added first: what crosses groups is less then, and is quantised. As they
    /// are they go in one hop, whose sums have the order of ranks.
    pub fn cut_on_the_way(&self, world: usize) -> Option<Mesh> {
        self.secondary_mesh(world).filter(|_| self.quantized_gradients.is_some())
    }

    /// How processes gather parameters: from a second cut, or quantised, each by itself.
    pub fn gathers(&self, world: usize) -> Gathers {
        if self.gathers_one_sided(world) { Gathers::OneSided } else { self.gathers }
    }

    fn gathers_one_sided(&self, world: usize) -> bool {
        self.secondary_mesh(world).is_some()
    }

    fn quantizes_weights(&self) -> bool {
        self.quantized_weights.or(self.quantized_nontrainable_weights).is_some()
    }

    /// How large parameters are gathered where they are used: those that are trained, and those that are frozen.
    pub fn weights(&self) -> [Option<Format>; 2] {
        [self.quantized_weights, self.quantized_nontrainable_weights.or(self.quantized_weights)]
    }

    /// Whether gradients are added in the hosts' memory also where ranks have devices: NCCL adds in the types that it knows.
    pub fn reduces_on_hosts(&self) -> bool {
        self.quantized_gradients.is_some()
    }

    /// The defaults at `stage`.
    pub fn new(stage: Stage) -> Self {
        Self { stage, ..Self::default() }
    }

    /// Checks what no type can.
    ///
    /// # Errors
    ///
    /// [`ConfigError`]: axes or groups that the ranks cannot form, a bucket without room for one element per rank, or a factor that is not above 0.
    pub fn validate(&self, world: usize) -> Result<(), ConfigError> {
        // Whoever launches refuses no ranks.
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
        let offload = &self.offload;
        let refuse = |key, expected| Err(ConfigError::Offload { key, expected });
        if offload.parameters != Tier::Memory && !self.stage.shards_parameters() {
            return refuse(
                "parameters",
                "parameters can only be kept on a disk or in the host's memory at stage 3, where they are sharded",
            );
        }
        if offload.optimizer == Tier::Disk && !self.stage.shards_optimizer() {
            return refuse(
                "optimizer",
                "optimizer state can only be kept on a disk from stage 1 on, where it is sharded",
            );
        }
        if !(0.0..=1.0).contains(&offload.ratio) {
            return refuse("ratio", "a share from 0 to 1 of optimizer state and gradients");
        }
        if offload.uses(Tier::Disk) {
            if offload.disk.path.as_os_str().is_empty() {
                return refuse("disk.path", "name a folder on a fast disk");
            }
            if offload.disk.buffer_count < Disk::FEWEST_BUFFERS {
                return refuse("disk.buffer_count", "at least 6 buffers: an update takes up to five at once");
            }
            if offload.disk.buffer_bytes < Disk::SMALLEST_BUFFER {
                return refuse("disk.buffer_bytes", "buffers of at least 64 KiB");
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
        // Groups are of the ranks along the data axis.
        let axes = Axes::new(&[("data", 2), ("tensor", 2)]);
        let config = ZeroConfig { axes, ..ZeroConfig::new(Stage::Parameters) };
        assert!(ZeroConfig { shard_size: Some(4), ..config.clone() }.validate(4).is_err());
        assert_eq!(
            config.validate(6).unwrap_err().to_string(),
            "axes are data=2 x tensor=2, but there are 6 ranks: expected one axis \"data\", others with names of their own of \
             letters, digits and _, and numbers of ranks whose product is 6"
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
        // What adds in fp32 is sent what the parameters are.
        assert_eq!(config(None, 1.0).reduction(8, false), (Float::Bf16, 1.0, 0.125));
        assert_eq!(config(Some(Float::F16), 4.0).reduction(8, false), (Float::F16, 0.25, 0.5));
        // What adds in what it is sent, fp32.
        assert_eq!(config(None, 1.0).reduction(8, true), (Float::F32, 1.0, 0.125));
        assert_eq!(config(Some(Float::Bf16), 1.0).reduction(8, true), (Float::Bf16, 1.0, 0.125));
        // A sum of 1,000 ranks' fp16 gradients is no larger than the largest of them.
        let (sent_as, before, after) = config(Some(Float::F16), 1.0).reduction(1000, true);
        assert_eq!((sent_as, before * 1000.0, after), (Float::F16, 1.0, 1.0));
    }
}
