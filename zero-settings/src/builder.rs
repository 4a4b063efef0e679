//! A plan in code: the same keys, checks and arithmetic as a file's.

use zero_core::Stage;
use zero_core::config::Float;

use super::auto::Context;
use super::error::ConfigError;
use super::load::Config;
use super::node::Node;
use super::optimizer::OptimizerPlan;
use super::plan::{LogFiles, LossScale, Offload, OffloadDevice, Precision, ZeroPlan};
use crate::schedule::Schedule;

const REDUCE_BUCKET: &str = "zero_optimization.reduce_bucket_size";
const REUSE_DISTANCE: &str = "zero_optimization.stage3_max_reuse_distance";

/// Makes a [`ZeroPlan`]. What is not set is as in a DeepSpeed file, but for these: one row per rank and micro-batch,
/// gradient buckets of 8,388,608 elements, a reuse distance of 0, no clipping.
#[derive(Debug, Clone)]
#[must_use]
pub struct ZeroPlanBuilder {
    tree: Node,
}

macro_rules! setters {
    ($($(#[$doc:meta])+ $name:ident: $type:ty => $path:expr;)+) => {$(
        $(#[$doc])+
        pub fn $name(self, value: $type) -> Self {
            self.set($path, value)
        }
    )+};
}

impl ZeroPlan {
    /// Starts a plan in code, with [`ZeroPlanBuilder`]'s defaults.
    ///
    /// ```
    /// use zero_settings::ZeroPlan;
    /// use zero_core::Stage;
    ///
    /// let plan = ZeroPlan::builder(Stage::Parameters).micro_batch(2).accumulation(3).build(4)?;
    /// assert_eq!(plan.batch.global, 24);
    /// # Ok::<(), zero_settings::ConfigError>(())
    /// ```
    pub fn builder(stage: Stage) -> ZeroPlanBuilder {
        let builder = ZeroPlanBuilder { tree: Node::Null };
        builder.set("zero_optimization.stage", usize::from(stage.number())).set("gradient_clipping", 0_usize)
    }
}

impl ZeroPlanBuilder {
    setters! {
        /// Rows of one optimizer step, over all ranks.
        global_batch: usize => "train_batch_size";
        /// Rows per rank and micro-batch.
        micro_batch: usize => "train_micro_batch_size_per_gpu";
        /// Micro-batches per optimizer step.
        accumulation: usize => "gradient_accumulation_steps";
        /// Elements of one gradient bucket.
        reduce_bucket_size: usize => REDUCE_BUCKET;
        /// Among how many neighbouring ranks model state is sharded; each such group holds all of it.
        shard_size: usize => "zero_optimization.mics_shard_size";
        /// Among how many neighbouring ranks a second cut of the parameters is kept, which serves their gathers. Stage 3.
        secondary_shard_size: usize => "zero_optimization.zero_hpz_partition_size";
        /// Whether gradients are quantised on their way across groups of ranks, or within the one there is.
        quantized_gradients: bool => "zero_optimization.zero_quantized_gradients";
        /// To what: `int8`, the default, `int4` or `nf4`.
        quantized_gradients_format: &str => "zero_optimization.zero_quantized_gradients_format";
        /// Whether weights are quantised when they are gathered. Stage 3.
        quantized_weights: bool => "zero_optimization.zero_quantized_weights";
        /// Whether frozen weights are, whatever is done with the others. Stage 3.
        quantized_nontrainable_weights: bool => "zero_optimization.zero_quantized_nontrainable_weights";
        /// To what: `int8`, the default, `int4` or `nf4`. Stage 3.
        quantized_weights_format: &str => "zero_optimization.zero_quantized_weights_format";
        /// Elements gathered ahead of their use. Stage 3.
        prefetch_bucket_size: usize => "zero_optimization.stage3_prefetch_bucket_size";
        /// Elements of gathered parameters that may be kept. Stage 3.
        max_live_parameters: usize => "zero_optimization.stage3_max_live_parameters";
        /// Elements used in between up to which a gathered parameter is kept. Stage 3.
        max_reuse_distance: usize => REUSE_DISTANCE;
        /// Elements up to which a parameter stays gathered. Stage 3.
        param_persistence_threshold: usize => "zero_optimization.stage3_param_persistence_threshold";
        /// Updates from one comparison of the ranks' replicas to the next; 0 compares none.
        check_replicas: usize => "zero_optimization.check_replicas";
        /// How many of the model's first blocks drop their activations and compute them again.
        checkpointed_blocks: usize => "activation_checkpointing.blocks";
        /// Whether gradients are reduced while the backward pass goes on.
        overlap_comm: bool => "zero_optimization.overlap_comm";
        /// Whether gradients are reduced with each micro-batch, or once per optimizer step.
        sync_each_batch: bool => "gradient_accumulation_kwargs.sync_each_batch";
        /// Whether gradients that are not finite are an error.
        error_if_nonfinite: bool => "watchdog.error_if_nonfinite";
        /// Whether whole 16-bit weights are saved at the end of training. Stage 3.
        save_16bit_model: bool => "zero_optimization.stage3_gather_16bit_weights_on_model_save";
        /// Highest norm of the whole gradient; 0 does not clip.
        gradient_clipping: f64 => "gradient_clipping";
        /// Whether gradients are divided before they are summed.
        prescale_gradients: bool => "prescale_gradients";
        /// What they are divided by before the sum.
        gradient_predivide_factor: f64 => "gradient_predivide_factor";
        /// The type gradients are reduced in.
        communication_data_type: Float => "communication_data_type";
        /// The type gradients of micro-batches are added up in.
        grad_accum_dtype: Float => "data_types.grad_accum_dtype";
        /// Whether the optimizer keeps its moments in bf16. Of [`precision`](Self::precision) and this, this comes second.
        bf16_optimizer_states: bool => "bf16.bf16_optimizer_states";
        /// The optimizer.
        optimizer: OptimizerPlan => "optimizer";
        /// The learning-rate schedule.
        schedule: Schedule => "scheduler";
        /// TensorBoard event files.
        tensorboard: &LogFiles => "tensorboard";
        /// CSV files.
        csv_monitor: &LogFiles => "csv_monitor";
        /// Steps between progress lines.
        steps_per_print: usize => "steps_per_print";
        /// Whether the time of each phase of a step is printed.
        wall_clock_breakdown: bool => "wall_clock_breakdown";
        /// Whether memory is printed after each phase.
        memory_breakdown: bool => "memory_breakdown";
    }

    /// The type of parameters and activations.
    pub fn precision(self, precision: Precision) -> Self {
        let fp32 = self.set("fp16", Node::Null).set("bf16", Node::Null);
        match precision {
            Precision::Fp32 => fp32,
            Precision::Bf16 { check_grad_overflow } => {
                fp32.set("bf16.check_grad_overflow", check_grad_overflow).set("bf16.enabled", true)
            }
            Precision::Fp16 { loss_scale: LossScale::Static(scale) } => {
                fp32.set("fp16.loss_scale", scale).set("fp16.enabled", true)
            }
            Precision::Fp16 { loss_scale: LossScale::Dynamic(settings) } => {
                fp32.set("fp16", Node::of(&settings)).set("fp16.enabled", true)
            }
        }
    }

    /// Where optimizer state is kept.
    pub fn offload_optimizer(self, value: &Offload) -> Self {
        let own = [
            ("ratio", value.ratio.into()),
            ("pipeline_read", value.pipeline_read.into()),
            ("pipeline_write", value.pipeline_write.into()),
        ];
        self.offload("zero_optimization.offload_optimizer", value, own)
    }

    /// Where parameters are kept. Stage 3.
    pub fn offload_param(self, value: &Offload) -> Self {
        let own = [("buffer_size", value.buffer_size.into()), ("max_in_cpu", value.max_in_cpu.into())];
        self.offload("zero_optimization.offload_param", value, own)
    }

    /// The plan for `world` ranks.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] with every problem found; keys have the names they have in a DeepSpeed file.
    pub fn build(mut self, world: usize) -> Result<ZeroPlan, ConfigError> {
        if self.tree.get("train_batch_size").is_none() && self.tree.get("train_micro_batch_size_per_gpu").is_none() {
            self = self.micro_batch(1);
        }
        let config = Config::from_tree("plan", &self.tree)?;
        let mut plan = config.resolve(&Context { world: Some(world), ..Context::default() })?;
        // zero-burn's defaults: DeepSpeed's buckets are made for GPUs with tens of GB.
        if self.tree.at(REDUCE_BUCKET).is_none() {
            plan.zero.reduce_bucket_size = 1 << 23;
        }
        if self.tree.at(REUSE_DISTANCE).is_none() {
            plan.zero.max_reuse_distance = 0;
        }
        Ok(plan)
    }

    fn offload(self, section: &str, value: &Offload, own: impl IntoIterator<Item = (&'static str, Node)>) -> Self {
        let (device, path) = match &value.device {
            OffloadDevice::Cpu => ("cpu", Node::Null),
            OffloadDevice::Nvme { path } => ("nvme", path.display().to_string().into()),
        };
        let (pinned, buffers) = (value.pin_memory.into(), value.buffer_count.into());
        let common =
            [("device", device.into()), ("nvme_path", path), ("pin_memory", pinned), ("buffer_count", buffers)];
        self.set(section, Node::map(common.into_iter().chain(own)))
    }

    fn set(mut self, path: &str, value: impl Into<Node>) -> Self {
        self.tree.set(path, value.into());
        self
    }
}
