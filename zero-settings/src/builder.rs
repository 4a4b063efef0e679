//! Builds a plan in code, with the same keys, checks and arithmetic as a file.

use std::path::Path;

use zero_core::Stage;
use zero_core::config::Float;

use super::auto::{Context, MixedPrecision};
use super::error::ConfigError;
use super::load::Config;
use super::node::Node;
use super::optimizer::OptimizerPlan;
use super::plan::{LogFiles, LossScale, Offload, OffloadDevice, Precision, ZeroPlan};
use crate::schedule::Schedule;

const REDUCE_BUCKET: &str = "zero_optimization.reduce_bucket_size";
const REUSE_DISTANCE: &str = "zero_optimization.stage3_max_reuse_distance";

/// Builds a [`ZeroPlan`]. Unset values default as in a DeepSpeed file, except: one row per rank and micro-batch,
/// gradient buckets of 8,388,608 elements, a reuse distance of 0, no clipping.
///
/// An empty one ([`default`](Default::default)) can hold settings for the keys that a file lacks
/// ([`fill_file`](Self::fill_file)).
#[derive(Debug, Clone, Default)]
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
        ZeroPlanBuilder::default().stage(stage).set("gradient_clipping", 0_usize)
    }
}

impl ZeroPlanBuilder {
    setters! {
        /// Sets the rows of one optimizer step, over all ranks.
        global_batch: usize => "train_batch_size";
        /// Sets the rows per rank and micro-batch.
        micro_batch: usize => "train_micro_batch_size_per_gpu";
        /// Sets the micro-batches per optimizer step.
        accumulation: usize => "gradient_accumulation_steps";
        /// Sets the elements of one gradient bucket.
        reduce_bucket_size: usize => REDUCE_BUCKET;
        /// Sets the number of neighbouring ranks that shard model state among them; each such group holds a full copy.
        shard_size: usize => "zero_optimization.mics_shard_size";
        /// Sets the number of neighbouring ranks that hold secondary shards, which serve their all-gathers. Stage 3.
        secondary_shard_size: usize => "zero_optimization.zero_hpz_partition_size";
        /// Sets whether to quantise gradients sent between groups of ranks, or within the group if there is only one.
        quantized_gradients: bool => "zero_optimization.zero_quantized_gradients";
        /// Sets the format of quantised gradients: `int8` (default), `int4` or `nf4`.
        quantized_gradients_format: &str => "zero_optimization.zero_quantized_gradients_format";
        /// Sets whether to quantise weights in all-gathers. Stage 3.
        quantized_weights: bool => "zero_optimization.zero_quantized_weights";
        /// Sets whether to quantise frozen weights, independently of trained ones. Stage 3.
        quantized_nontrainable_weights: bool => "zero_optimization.zero_quantized_nontrainable_weights";
        /// Sets the format of quantised weights: `int8` (default), `int4` or `nf4`. Stage 3.
        quantized_weights_format: &str => "zero_optimization.zero_quantized_weights_format";
        /// Sets the number of elements to prefetch. Stage 3.
        prefetch_bucket_size: usize => "zero_optimization.stage3_prefetch_bucket_size";
        /// Sets the limit on elements of gathered parameters kept. Stage 3.
        max_live_parameters: usize => "zero_optimization.stage3_max_live_parameters";
        /// Keeps a gathered parameter if at most this many elements are used in between. Stage 3.
        max_reuse_distance: usize => REUSE_DISTANCE;
        /// Keeps parameters of at most this many elements gathered. Stage 3.
        param_persistence_threshold: usize => "zero_optimization.stage3_param_persistence_threshold";
        /// Sets the number of updates between comparisons of the ranks' replicas; 0 disables them.
        check_replicas: usize => "zero_optimization.check_replicas";
        /// Sets the number of leading blocks that drop their activations and recompute them.
        checkpointed_blocks: usize => "activation_checkpointing.blocks";
        /// Sets whether to overlap gradient reduction with the backward pass.
        overlap_comm: bool => "zero_optimization.overlap_comm";
        /// Sets whether to reduce gradients with each micro-batch, or once per optimizer step.
        sync_each_batch: bool => "gradient_accumulation_kwargs.sync_each_batch";
        /// Sets whether non-finite gradients are an error.
        error_if_nonfinite: bool => "watchdog.error_if_nonfinite";
        /// Sets whether to save the full 16-bit weights at the end of training. Stage 3.
        save_16bit_model: bool => "zero_optimization.stage3_gather_16bit_weights_on_model_save";
        /// Sets the maximum global gradient norm; 0 disables clipping.
        gradient_clipping: f64 => "gradient_clipping";
        /// Sets whether to divide gradients before the sum instead of after it.
        prescale_gradients: bool => "prescale_gradients";
        /// Sets the divisor applied to gradients before the sum.
        gradient_predivide_factor: f64 => "gradient_predivide_factor";
        /// Sets the type in which gradients are reduced.
        communication_data_type: Float => "communication_data_type";
        /// Sets the type in which gradients accumulate over micro-batches.
        grad_accum_dtype: Float => "data_types.grad_accum_dtype";
        /// Sets whether to keep the optimizer's moments in bf16.
        bf16_optimizer_states: bool => "bf16.bf16_optimizer_states";
        /// Sets the optimizer.
        optimizer: OptimizerPlan => "optimizer";
        /// Sets the learning rate of an optimizer that a file names.
        learning_rate: f64 => "optimizer.params.lr";
        /// Sets epsilon of an optimizer that a file names.
        epsilon: f64 => "optimizer.params.eps";
        /// Sets the weight decay of an optimizer that a file names.
        weight_decay: f64 => "optimizer.params.weight_decay";
        /// Sets the learning-rate schedule.
        schedule: Schedule => "scheduler";
        /// Writes TensorBoard event files.
        tensorboard: &LogFiles => "tensorboard";
        /// Writes CSV files.
        csv_monitor: &LogFiles => "csv_monitor";
        /// Sets the steps between progress lines.
        steps_per_print: usize => "steps_per_print";
        /// Sets whether to print the time of each phase of a step.
        wall_clock_breakdown: bool => "wall_clock_breakdown";
        /// Sets whether to print memory use after each phase.
        memory_breakdown: bool => "memory_breakdown";
    }

    /// Sets the betas of an optimizer that a file names.
    pub fn betas(self, betas: [f64; 2]) -> Self {
        self.set("optimizer.params.betas", Node::List(betas.map(Node::from).to_vec()))
    }

    /// Sets the ZeRO stage.
    pub fn stage(self, stage: Stage) -> Self {
        self.set("zero_optimization.stage", usize::from(stage.number()))
    }

    /// Enables fp16 or bf16, with DeepSpeed's defaults for its other keys.
    pub fn mixed_precision(self, precision: MixedPrecision) -> Self {
        match precision {
            MixedPrecision::No => self,
            MixedPrecision::Fp16 => self.set("fp16.enabled", true),
            MixedPrecision::Bf16 => self.set("bf16.enabled", true),
        }
    }

    /// Sets the type of parameters and activations.
    pub fn precision(self, precision: Precision) -> Self {
        let fp32 = self.set("fp16", Node::Null).set("bf16.enabled", false);
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

    /// Offloads optimizer state.
    pub fn offload_optimizer(self, value: &Offload) -> Self {
        let own = [
            ("ratio", value.ratio.into()),
            ("pipeline_read", value.pipeline_read.into()),
            ("pipeline_write", value.pipeline_write.into()),
        ];
        self.offload("zero_optimization.offload_optimizer", value, own)
    }

    /// Offloads parameters. Stage 3.
    pub fn offload_param(self, value: &Offload) -> Self {
        let own = [("buffer_size", value.buffer_size.into()), ("max_in_cpu", value.max_in_cpu.into())];
        self.offload("zero_optimization.offload_param", value, own)
    }

    /// Builds the plan for `world` ranks.
    ///
    /// # Errors
    ///
    /// Returns [`ConfigError::Invalid`] with every problem found; keys have their names in a DeepSpeed file.
    pub fn build(mut self, world: usize) -> Result<ZeroPlan, ConfigError> {
        if self.tree.get("train_batch_size").is_none() && self.tree.get("train_micro_batch_size_per_gpu").is_none() {
            self = self.micro_batch(1);
        }
        let config = Config::from_tree("plan", &self.tree)?;
        let mut plan = config.resolve(&Context { world: Some(world), ..Context::default() })?;
        // zero-burn's defaults: DeepSpeed's bucket sizes suit GPUs with tens of GB.
        if self.tree.at(REDUCE_BUCKET).is_none() {
            plan.zero.reduce_bucket_size = 1 << 23;
        }
        if self.tree.at(REUSE_DISTANCE).is_none() {
            plan.zero.max_reuse_distance = 0;
        }
        Ok(plan)
    }

    /// Reads a file as [`Config::from_file`] does. A key that the file does not give, or gives as `null`, has this builder's
    /// value, if there is one. An offload section that the file gives is taken as it is, and the values of an optimizer
    /// only apply to an optimizer that the file names.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem found.
    pub fn fill_file(&self, path: impl AsRef<Path>) -> Result<Config, ConfigError> {
        Config::from_file_or(path.as_ref(), &self.tree)
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
