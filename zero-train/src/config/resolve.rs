//! From a checked [`Config`] and the program's [`Context`] to a [`ZeroPlan`].

use std::cell::RefCell;
use std::path::PathBuf;

use zero_core::offload::AioOptions;

use super::auto::{Auto, Context, Filled};
use super::batch::{Batch, BatchError, GLOBAL, MICRO};
use super::error::{ConfigError, Findings, ProblemKind};
use super::keys::DEEPSPEED;
use super::load::Config;
use super::node::Node;
use super::optimizer::OptimizerPlan;
use super::plan::{DataType, LogFiles, LossScale, Offload, OffloadDevice, Precision, Report, Watchdog, ZeroPlan};
use super::reader::Reader;
use super::schedule::SchedulePlan;

/// The three batch sizes: of a step, of a rank's micro-batch, and micro-batches of a step.
const SIZES: [&str; 3] = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];

fn watchdog(top: &Reader<'_>) -> Watchdog {
    let section = top.section("watchdog");
    Watchdog {
        deadline: section.maybe_f64("deadline_seconds").filter(|seconds| *seconds > 0.0),
        flight_dir: section.maybe_text("flight_dir").map(PathBuf::from),
    }
}

impl Config {
    /// Fills `"auto"`, does the batch arithmetic and reads the plan.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] with every problem found.
    pub fn resolve(&self, context: &Context) -> Result<ZeroPlan, ConfigError> {
        let (mut plan, findings) = self.read(context);
        plan.warnings = findings.finish()?;
        Ok(plan)
    }

    /// As [`resolve`](Self::resolve), for someone who wants to see what the file means before everything is known: an
    /// `"auto"` that `context` does not fill is no error but listed, without a value; the plan has the key's default there.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] with every other problem found.
    pub fn outline(&self, context: &Context) -> Result<(ZeroPlan, Vec<Filled>), ConfigError> {
        let (mut plan, mut findings) = self.read(context);
        findings.problems.retain(|problem| !matches!(problem.kind, ProblemKind::Unfilled { .. }));
        let filled = std::mem::take(&mut findings.filled);
        plan.warnings = findings.finish()?;
        Ok((plan, filled))
    }

    fn read(&self, context: &Context) -> (ZeroPlan, Findings) {
        let findings = RefCell::new(self.findings.clone());
        let auto = &context.auto;
        let top = Reader::new(&self.tree, DEEPSPEED, self.stage.number(), auto, &findings);
        let world = self.world(context.world, &top);
        let zero = top.section("zero_optimization");
        let optimizer = OptimizerPlan::read(&top);
        let sizes = batch_sizes(&top, auto);
        let batch = batch(sizes, world, &mut findings.borrow_mut());
        let by = ["--batch x --accumulation x ranks", "--batch", "--accumulation"];
        for ((key, by), value) in SIZES.into_iter().zip(by).zip([batch.global, batch.micro, batch.accumulation]) {
            if top.is_auto(key) {
                top.filled(key, by, Some(Node::from(value)));
            }
        }
        let plan = ZeroPlan {
            stage: self.stage,
            world,
            batch,
            reduce_bucket_size: zero.usize("reduce_bucket_size"),
            prefetch_bucket_size: zero.usize("stage3_prefetch_bucket_size"),
            max_live_parameters: zero.usize("stage3_max_live_parameters"),
            max_reuse_distance: zero.usize("stage3_max_reuse_distance"),
            param_persistence_threshold: zero.usize("stage3_param_persistence_threshold"),
            check_replicas: zero.usize("check_replicas"),
            overlap_comm: zero.maybe_bool("overlap_comm"),
            sync_each_batch: top.section("gradient_accumulation_kwargs").maybe_bool("sync_each_batch"),
            error_if_nonfinite: top.section("watchdog").bool("error_if_nonfinite"),
            gradient_clipping: Some(top.f64("gradient_clipping")).filter(|norm| *norm > 0.0),
            prescale_gradients: top.bool("prescale_gradients"),
            gradient_predivide_factor: top.f64("gradient_predivide_factor"),
            precision: precision(&top),
            communication_data_type: DataType::named(&top.text("communication_data_type")),
            grad_accum_dtype: DataType::named(&top.section("data_types").text("grad_accum_dtype")),
            schedule: SchedulePlan::read(&top, optimizer.as_ref(), auto.learning_rate),
            optimizer,
            offload_optimizer: offload(&zero.section("offload_optimizer"), false),
            offload_param: offload(&zero.section("offload_param"), true),
            sub_group_size: zero.usize("sub_group_size"),
            aio: aio(&top.section("aio")),
            report: Report {
                steps_per_print: top.maybe_usize("steps_per_print"),
                wall_clock_breakdown: top.bool("wall_clock_breakdown"),
                memory_breakdown: top.bool("memory_breakdown"),
                tensorboard: log_files(&top.section("tensorboard")),
                csv_monitor: log_files(&top.section("csv_monitor")),
            },
            watchdog: watchdog(&top),
            save_16bit_model: zero.bool("stage3_gather_16bit_weights_on_model_save"),
            warnings: Vec::new(),
        };
        (plan, findings.into_inner())
    }

    /// The folder of the disk that the file offloads to, if it does; a program measures its room before it plans.
    pub fn nvme_path(&self) -> Option<PathBuf> {
        let (auto, findings) = (Auto::default(), RefCell::default());
        let zero =
            Reader::new(&self.tree, DEEPSPEED, self.stage.number(), &auto, &findings).section("zero_optimization");
        let sections = [("offload_optimizer", false), ("offload_param", true)];
        sections.into_iter().find_map(|(name, of_parameters)| {
            match offload(&zero.section(name), of_parameters)?.device {
                OffloadDevice::Nvme { path } => Some(path),
                OffloadDevice::Cpu => None,
            }
        })
    }

    /// What the file says of waits, which a program may need before it knows its ranks.
    pub fn watchdog(&self) -> Watchdog {
        let (auto, findings) = (Auto::default(), RefCell::default());
        watchdog(&Reader::new(&self.tree, DEEPSPEED, self.stage.number(), &auto, &findings))
    }

    fn world(&self, program: Option<usize>, top: &Reader<'_>) -> usize {
        match (program, self.processes) {
            (Some(0), _) => {
                top.conflict("", "the program says there are 0 ranks; Context::world is at least 1");
                1
            }
            (Some(program), Some(file)) if program != file => {
                top.problem("num_processes", ProblemKind::World { file, program });
                program
            }
            (Some(world), _) | (None, Some(world)) => world,
            (None, None) => match SIZES.map(|key| top.maybe_usize(key).filter(|_| top.given(key))) {
                [Some(global), Some(micro), Some(accumulation)] => {
                    let of_a_rank = micro.checked_mul(accumulation).filter(|rows| global.is_multiple_of(*rows));
                    of_a_rank.and_then(|rows| global.checked_div(rows)).unwrap_or(1).max(1)
                }
                _ => 1,
            },
        }
    }
}

/// Global batch, micro-batch, accumulation. For `"auto"`, or where the file has nothing to start from, the program's
/// value counts; the rest is left to the arithmetic.
fn batch_sizes(top: &Reader<'_>, auto: &Auto) -> [Option<usize>; 3] {
    let [global, micro, accumulation] = SIZES;
    let absent = |key: &str| !top.given(key) && !top.is_auto(key);
    let supplied = |key: &str, value: Option<usize>, wanted: bool| {
        if top.given(key) {
            return top.maybe_usize(key);
        }
        let value = value.filter(|_| wanted || top.is_auto(key));
        if value == Some(0) {
            top.problem(
                key,
                ProblemKind::Value { expected: "at least 1 from the program".to_owned(), got: "0".into() },
            );
        }
        value
    };
    let sizeless = !top.given(global) && !top.given(micro);
    [
        supplied(global, None, false),
        supplied(micro, auto.micro_batch, sizeless),
        supplied(accumulation, auto.accumulation, sizeless && absent(accumulation)),
    ]
}

fn precision(top: &Reader<'_>) -> Precision {
    let (fp16, bf16) = (top.section("fp16"), top.section("bf16"));
    match (fp16.bool("enabled"), bf16.bool("enabled")) {
        (true, true) => {
            bf16.conflict("enabled", "bf16 and fp16 are both enabled: set one of them to false");
            Precision::Fp32
        }
        (false, false) => Precision::Fp32,
        (false, true) => Precision::Bf16 { check_grad_overflow: bf16.bool("check_grad_overflow") },
        (true, false) => {
            let scale = fp16.f64("loss_scale");
            if scale > 0.0 {
                return Precision::Fp16 { loss_scale: LossScale::Static(scale) };
            }
            for key in ["loss_scale_window", "min_loss_scale"] {
                if fp16.f64(key) == 0.0 {
                    let expected = "more than 0 when loss_scale is 0 (dynamic)".to_owned();
                    fp16.problem(key, ProblemKind::Value { expected, got: "0".to_owned() });
                }
            }
            Precision::Fp16 {
                loss_scale: LossScale::Dynamic {
                    // The table's range fits.
                    initial_scale_power: u32::try_from(fp16.usize("initial_scale_power")).unwrap_or_default(),
                    window: fp16.usize("loss_scale_window"),
                    hysteresis: fp16.usize("hysteresis"),
                    consecutive_hysteresis: fp16.bool("consecutive_hysteresis"),
                    min_scale: fp16.f64("min_loss_scale"),
                },
            }
        }
    }
}

fn offload(section: &Reader<'_>, of_parameters: bool) -> Option<Offload> {
    let device = match section.text("device").as_str() {
        "cpu" => OffloadDevice::Cpu,
        "nvme" => OffloadDevice::Nvme { path: PathBuf::from(section.text("nvme_path")) },
        _ => return None,
    };
    let common = Offload {
        pin_memory: section.bool("pin_memory"),
        buffer_count: section.usize("buffer_count"),
        ..Offload::to(device)
    };
    // Each section has keys of its own.
    Some(match of_parameters {
        true => {
            Offload { buffer_size: section.usize("buffer_size"), max_in_cpu: section.usize("max_in_cpu"), ..common }
        }
        false => Offload {
            pipeline_read: section.bool("pipeline_read"),
            pipeline_write: section.bool("pipeline_write"),
            ..common
        },
    })
}

fn aio(section: &Reader<'_>) -> AioOptions {
    AioOptions {
        block_size: section.usize("block_size"),
        queue_depth: section.usize("queue_depth"),
        intra_op_parallelism: section.usize("intra_op_parallelism"),
        single_submit: section.bool("single_submit"),
        overlap_events: section.bool("overlap_events"),
        use_gds: false,
    }
}

fn log_files(section: &Reader<'_>) -> Option<LogFiles> {
    section.bool("enabled").then(|| LogFiles {
        output_path: section.maybe_text("output_path").map(PathBuf::from).unwrap_or_default(),
        job_name: section.text("job_name"),
    })
}

/// [`Batch::solve`], with the error reported where it arises.
fn batch(sizes: [Option<usize>; 3], world: usize, findings: &mut Findings) -> Batch {
    Batch::solve(sizes[0], sizes[1], sizes[2], world).unwrap_or_else(|error| {
        let path = if matches!(error, BatchError::Indivisible { .. } | BatchError::Contradiction { .. }) {
            GLOBAL
        } else {
            MICRO
        };
        findings.problem(path, error);
        Batch { global: world, micro: 1, accumulation: 1 }
    })
}
