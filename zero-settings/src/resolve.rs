//! Turns a checked [`Config`] and the program's [`Context`] into a [`ZeroPlan`].

use std::cell::RefCell;
use std::path::PathBuf;

use zero_core::Mesh;
use zero_core::config::ZeroConfig;
use zero_core::offload::AioOptions;
use zero_kernels::quantized::Format;

use super::auto::{Auto, Context, Filled};
use super::batch::{Batch, BatchError, GLOBAL, MICRO};
use super::error::{ConfigError, Findings, ProblemKind};
use super::keys::DEEPSPEED;
use super::load::Config;
use super::node::Node;
use super::optimizer::OptimizerPlan;
use super::plan::{
    CommsLogger, FlopsProfiler, LogFiles, LossScale, Offload, OffloadDevice, Precision, Report, Watchdog, ZeroPlan,
    float_named,
};
use super::reader::Reader;
use super::scheduler;

/// The three batch sizes: rows per step, rows per micro-batch and rank, micro-batches per step.
const SIZES: [&str; 3] = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];

impl Config {
    /// Fills `"auto"` values, derives the batch sizes and returns the plan.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] with every problem found.
    pub fn resolve(&self, context: &Context) -> Result<ZeroPlan, ConfigError> {
        let (mut plan, findings) = self.read(context);
        plan.warnings = findings.finish()?.warnings;
        Ok(plan)
    }

    /// Like [`resolve`](Self::resolve), to show what the file means before every value is known. An `"auto"` that
    /// `context` does not fill is not an error: it is listed without a value, and the plan has the key's default.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] with every other problem found.
    pub fn outline(&self, context: &Context) -> Result<(ZeroPlan, Vec<Filled>), ConfigError> {
        let (mut plan, mut findings) = self.read(context);
        findings.problems.retain(|problem| !matches!(problem.kind, ProblemKind::Unfilled(_)));
        let findings = findings.finish()?;
        plan.warnings = findings.warnings;
        Ok((plan, findings.filled))
    }

    fn read(&self, context: &Context) -> (ZeroPlan, Findings) {
        let findings = RefCell::new(self.findings.clone());
        let auto = &context.auto;
        let top = Reader::new(&self.tree, DEEPSPEED, self.stage.number(), auto, &findings);
        let named = self.world(context.batch_world.or(context.world), &top);
        let world = context.world.unwrap_or(named);
        let (zero, watchdog) = (top.section("zero_optimization"), top.section("watchdog"));
        let optimizer = OptimizerPlan::read(&top);
        // The section's presence enables checkpointing. DeepSpeed leaves the rest to the model, which is ours here.
        let activations = top.section("activation_checkpointing");
        let blocks = || activations.get::<Option<usize>>("blocks").unwrap_or(usize::MAX);
        let checkpointed = top.given("activation_checkpointing").then(blocks);
        let sizes = batch_sizes(&top, auto);
        let batch = batch(sizes, named, &mut findings.borrow_mut());
        let batch = if named == world { batch } else { batch.on(world.max(1)) };
        let by = ["--batch x --accumulation x ranks", "--batch", "--accumulation"];
        for ((key, by), value) in SIZES.into_iter().zip(by).zip([batch.global, batch.micro, batch.accumulation]) {
            if top.is_auto(key) {
                top.filled(key, by, Some(Node::from(value)));
            }
        }
        let format = "zero_quantized_weights_format";
        let weights = |key| quantized(&zero, key, format).filter(|_| self.stage.shards_parameters());
        let plan = ZeroPlan {
            zero: ZeroConfig {
                stage: self.stage,
                shard_size: shard_size(&zero, world).filter(|_| self.stage.shards_optimizer()),
                secondary_shard_size: secondary_shard_size(&zero, world).filter(|_| self.stage.shards_parameters()),
                reduce_bucket_size: zero.get("reduce_bucket_size"),
                prefetch_bucket_size: zero.get("stage3_prefetch_bucket_size"),
                max_live_parameters: zero.get("stage3_max_live_parameters"),
                max_reuse_distance: zero.get("stage3_max_reuse_distance"),
                param_persistence_threshold: zero.get("stage3_param_persistence_threshold"),
                check_replicas: zero.get("check_replicas"),
                checkpointed_blocks: checkpointed.unwrap_or(0),
                overlap_comm: zero.get::<Option<bool>>("overlap_comm").unwrap_or(true),
                communication_dtype: float_named(&top.get::<String>("communication_data_type")),
                quantized_gradients: quantized(&zero, "zero_quantized_gradients", "zero_quantized_gradients_format"),
                quantized_weights: weights("zero_quantized_weights"),
                quantized_nontrainable_weights: weights("zero_quantized_nontrainable_weights"),
                bf16_optimizer_states: top.section("bf16").get("bf16_optimizer_states"),
                ..ZeroConfig::default()
            },
            world,
            batch,
            sync_each_batch: top.section("gradient_accumulation_kwargs").get("sync_each_batch"),
            error_if_nonfinite: watchdog.get("error_if_nonfinite"),
            gradient_clipping: Some(top.get("gradient_clipping")).filter(|norm| *norm > 0.0),
            prescale_gradients: top.get("prescale_gradients"),
            gradient_predivide_factor: top.get("gradient_predivide_factor"),
            sums_gradients: top.get::<String>("gradient_allreduce_op") == "sum",
            precision: precision(&top),
            grad_accum_dtype: float_named(&top.section("data_types").get::<String>("grad_accum_dtype")),
            schedule: scheduler::read(&top, optimizer.as_ref(), auto.learning_rate),
            optimizer,
            // The walk warns if it has no effect.
            offload_optimizer: offload(&zero.section("offload_optimizer"), false)
                .filter(|_| self.stage.shards_optimizer()),
            offload_param: offload(&zero.section("offload_param"), true).filter(|_| self.stage.shards_parameters()),
            offload_activations: offload_activations(&activations),
            sub_group_size: zero.get("sub_group_size"),
            aio: aio(&top.section("aio")),
            report: Report {
                steps_per_print: top.get("steps_per_print"),
                wall_clock_breakdown: top.get("wall_clock_breakdown"),
                memory_breakdown: top.get("memory_breakdown"),
                flops_profiler: flops_profiler(&top.section("flops_profiler")),
                comms_logger: comms_logger(&top.section("comms_logger")),
                tensorboard: log_files(&top.section("tensorboard")),
                csv_monitor: log_files(&top.section("csv_monitor")),
            },
            watchdog: Watchdog {
                deadline: watchdog.get::<Option<f64>>("deadline_seconds").filter(|seconds| *seconds > 0.0),
                flight_dir: watchdog.get::<Option<PathBuf>>("flight_dir").filter(|dir| !dir.as_os_str().is_empty()),
            },
            save_16bit_model: zero.get("stage3_gather_16bit_weights_on_model_save"),
            warnings: Vec::new(),
        };
        let mut findings = findings.into_inner();
        if findings.problems.is_empty() {
            // Errors that ranks would report at start.
            if let Err(error) = plan.zero_config(0).validate(world) {
                findings.problem("zero_optimization", ProblemKind::Conflict(error.to_string()));
            }
            if let Err(error) = plan.engine_config() {
                findings.problem("fp16", ProblemKind::Conflict(error.to_string()));
            }
        }
        (plan, findings)
    }

    /// Returns the disk folder that the file offloads to, if any. A program measures its free space before planning.
    pub fn nvme_path(&self) -> Option<PathBuf> {
        self.read(&Context::default()).0.nvme_path().cloned()
    }

    /// Returns the file's watchdog settings, which a program may need before it knows its number of ranks.
    pub fn watchdog(&self) -> Watchdog {
        self.read(&Context::default()).0.watchdog
    }

    fn world(&self, program: Option<usize>, top: &Reader<'_>) -> usize {
        match (program, self.processes) {
            (Some(0), _) => {
                top.conflict("", "the program gives 0 ranks; Context::world must be at least 1");
                1
            }
            (Some(program), Some(file)) if program != file => {
                top.problem("num_processes", ProblemKind::World { file, program });
                program
            }
            (Some(world), _) | (None, Some(world)) => world,
            (None, None) => match SIZES.map(|key| top.get::<Option<usize>>(key).filter(|_| top.given(key))) {
                [Some(global), Some(micro), Some(accumulation)] => {
                    let of_a_rank = micro.checked_mul(accumulation).filter(|rows| global.is_multiple_of(*rows));
                    of_a_rank.and_then(|rows| global.checked_div(rows)).unwrap_or(1).max(1)
                }
                _ => 1,
            },
        }
    }
}

/// Returns global batch, micro-batch and accumulation. The program's values are used for `"auto"`, or if the file gives
/// neither a global nor a micro-batch size; the rest is derived.
fn batch_sizes(top: &Reader<'_>, auto: &Auto) -> [Option<usize>; 3] {
    let [global, micro, accumulation] = SIZES;
    let supplied = |key: &str, value: Option<usize>, wanted: bool| {
        if top.given(key) {
            return top.get(key);
        }
        let value = value.filter(|_| wanted || top.is_auto(key));
        if value == Some(0) {
            top.problem(key, ProblemKind::value("at least 1 from the program", 0));
        }
        value
    };
    let sizeless = !top.given(global) && !top.given(micro);
    [
        supplied(global, None, false),
        supplied(micro, auto.micro_batch, sizeless),
        supplied(accumulation, auto.accumulation, sizeless && top.absent(accumulation)),
    ]
}

fn precision(top: &Reader<'_>) -> Precision {
    let (fp16, bf16) = (top.section("fp16"), top.section("bf16"));
    match (fp16.get("enabled"), bf16.get("enabled")) {
        (true, true) => {
            bf16.conflict("enabled", "bf16 and fp16 are both enabled: set one of them to false");
            Precision::Fp32
        }
        (false, false) => Precision::Fp32,
        (false, true) => Precision::Bf16 { check_grad_overflow: bf16.get("check_grad_overflow") },
        (true, false) => {
            let scale = fp16.get("loss_scale");
            if scale > 0.0 {
                return Precision::Fp16 { loss_scale: LossScale::Static(scale) };
            }
            for key in ["loss_scale_window", "min_loss_scale"] {
                if fp16.get::<f64>(key) == 0.0 {
                    fp16.problem(key, ProblemKind::value("more than 0 when loss_scale is 0 (dynamic)", 0));
                }
            }
            let hysteresis = fp16.get::<i64>("hysteresis").min(u32::MAX.into());
            let settings = fp16.values(vec![("hysteresis", hysteresis.into())]);
            Precision::Fp16 { loss_scale: LossScale::Dynamic(settings.to().unwrap_or_default()) }
        }
    }
}

fn offload(section: &Reader<'_>, of_parameters: bool) -> Option<Offload> {
    let device = match section.get::<String>("device").as_str() {
        "cpu" => OffloadDevice::Cpu,
        "nvme" => OffloadDevice::Nvme { path: section.get("nvme_path") },
        _ => return None,
    };
    let mut offload = Offload::to(device);
    (offload.pin_memory, offload.buffer_count) = (section.get("pin_memory"), section.get("buffer_count"));
    // Each section has its own keys.
    if of_parameters {
        (offload.buffer_size, offload.max_in_cpu) = (section.get("buffer_size"), section.get("max_in_cpu"));
    } else {
        offload.ratio = section.get("ratio");
        (offload.pipeline_read, offload.pipeline_write) = (section.get("pipeline_read"), section.get("pipeline_write"));
    }
    Some(offload)
}

fn offload_activations(section: &Reader<'_>) -> Option<OffloadDevice> {
    let folder = section.get::<Option<PathBuf>>("nvme_path").filter(|path| !path.as_os_str().is_empty());
    match folder {
        Some(path) => Some(OffloadDevice::Nvme { path }),
        None => section.get::<bool>("cpu_checkpointing").then_some(OffloadDevice::Cpu),
    }
}

fn aio(section: &Reader<'_>) -> AioOptions {
    AioOptions {
        block_size: section.get("block_size"),
        queue_depth: section.get("queue_depth"),
        intra_op_parallelism: section.get("intra_op_parallelism"),
        single_submit: section.get("single_submit"),
        overlap_events: section.get("overlap_events"),
        use_gds: false,
    }
}

fn log_files(section: &Reader<'_>) -> Option<LogFiles> {
    section
        .get::<bool>("enabled")
        .then(|| LogFiles { output_path: section.get("output_path"), job_name: section.get("job_name") })
}

fn flops_profiler(section: &Reader<'_>) -> Option<FlopsProfiler> {
    let step = usize::try_from(section.get::<i64>("profile_step")).unwrap_or(0);
    let profiler = || FlopsProfiler { profile_step: step, output_file: section.get("output_file") };
    section.get::<bool>("enabled").then(profiler).filter(|profiler| profiler.profile_step > 0)
}

fn comms_logger(section: &Reader<'_>) -> Option<CommsLogger> {
    let ops = || if section.get("prof_all") { None } else { Some(section.get("prof_ops")) };
    section.get::<bool>("enabled").then(|| CommsLogger { ops: ops() })
}

/// Returns the quantization `format`, if `key` is true.
fn quantized(zero: &Reader<'_>, key: &str, format: &str) -> Option<Format> {
    let format: String = zero.get(format);
    format.parse().ok().filter(|_| zero.get(key))
}

/// Returns the ranks per group, if there are several groups.
fn shard_size(zero: &Reader<'_>, world: usize) -> Option<usize> {
    const KEY: &str = "mics_shard_size";
    let size = usize::try_from(zero.get::<i64>(KEY)).ok().filter(|&size| size > 0)?;
    (divides(zero, KEY, size, world, "-1 for all") && size < world).then_some(size)
}

/// Returns `true` if groups of `size` evenly divide the ranks; reports it otherwise.
fn divides(zero: &Reader<'_>, key: &str, size: usize, world: usize, otherwise: &str) -> bool {
    let divides = Mesh::new(world, size).is_some();
    if !divides {
        let expected = format!("expected a divisor of the number of ranks, or {otherwise}");
        zero.conflict(key, &format!("{size} does not divide {world} ranks: {expected}"));
    }
    divides
}

/// Returns the ranks per group that holds secondary shards, if there are several groups.
fn secondary_shard_size(zero: &Reader<'_>, world: usize) -> Option<usize> {
    const KEY: &str = "zero_hpz_partition_size";
    let size: usize = zero.get(KEY);
    if size <= 1 || size == world || !divides(zero, KEY, size, world, "1 for no secondary partition") {
        return None;
    }
    if zero.get::<i64>("mics_shard_size") > 0 {
        zero.conflict(KEY, "gathers already stay within the groups of mics_shard_size: remove one of the two keys");
        return None;
    }
    Some(size)
}

fn batch(sizes: [Option<usize>; 3], world: usize, findings: &mut Findings) -> Batch {
    Batch::solve(sizes[0], sizes[1], sizes[2], world).unwrap_or_else(|error| {
        let is_of_all = matches!(error, BatchError::Indivisible { .. } | BatchError::Contradiction { .. });
        findings.problem(if is_of_all { GLOBAL } else { MICRO }, error);
        Batch { global: world, micro: 1, accumulation: 1 }
    })
}
