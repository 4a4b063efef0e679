//! The top level of a DeepSpeed JSON.

use super::training::{OPTIMIZERS, SCHEDULERS};
use super::zero::ZERO;
use crate::config::auto::Fill;
use crate::config::node::Node;
use crate::config::rule::{Default as D, Gate, Key, Kind as K, Treatment as T, key, section};

const LOADER: T = T::NoEffect("the data loader is the program's");
const EXPERTS: T = T::NoEffect("there is no expert parallelism");
const CUDA: T = T::NoEffect("it tunes PyTorch's CUDA graphs");
const ACTIVATIONS: T = T::NotYet("activations are not checkpointed by the configuration yet");
const NO_GDS: T = T::Refused("data does not move between a disk and a GPU's memory directly; remove the key");
const LOW_PRECISION_MASTER: T = T::Refused("master weights and optimizer states are always fp32; remove the key");
const NO_LOGGER: T = T::NotYet("there is no such log yet; use tensorboard or csv_monitor");
const SAVES: T = T::NotYet("checkpoints have no such option yet");
const WRITER: T = T::NoEffect("it tunes DeepSpeed's writer of checkpoints");
const DTYPES: K = K::OneOf(&["fp32", "fp16", "bf16"]);
/// `data_types` also takes PyTorch's names.
const TORCH_DTYPES: K = K::OneOf(&[
    "fp32",
    "fp16",
    "bf16",
    "float32",
    "float16",
    "bfloat16",
    "float",
    "half",
    "torch.float32",
    "torch.float16",
    "torch.bfloat16",
]);

const fn enabled(default: bool) -> Key {
    key("enabled", K::Bool, D::Bool(default), T::Quiet)
}

/// A section that does something once enabled, and whose `treatment` says what becomes of that.
const fn switch(name: &'static str, keys: &'static [Key], treatment: T) -> Key {
    key(name, K::Section(keys, Gate::Enabled), D::Empty, treatment)
}

/// A feature that does not exist here, so that its keys are not looked at.
const fn absent(name: &'static str, gate: Gate, treatment: T) -> Key {
    key(name, K::Open(gate), D::Empty, treatment)
}

const fn refused(name: &'static str, gate: Gate, reason: &'static str) -> Key {
    absent(name, gate, T::Refused(reason))
}

/// All keys of the top level.
pub(in crate::config) const DEEPSPEED: &[Key] = &[
    key("train_batch_size", K::ONE_UP, D::Null, T::Acted).auto(Fill::Batch),
    key("train_micro_batch_size_per_gpu", K::ONE_UP, D::Null, T::Acted).auto(Fill::Batch),
    key("gradient_accumulation_steps", K::ONE_UP, D::Null, T::Acted).auto(Fill::Batch),
    section("zero_optimization", ZERO),
    key("optimizer", K::Tagged(&OPTIMIZERS), D::Empty, T::Acted),
    key("scheduler", K::Tagged(&SCHEDULERS), D::Empty, T::Acted),
    section("fp16", FP16),
    section("bf16", BF16),
    key(
        "bfloat16",
        K::Section(BF16, Gate::Given),
        D::Empty,
        T::Renamed { to: "bf16", change: Node::clone, deprecated: true },
    ),
    // 1.0 since DeepSpeed 0.19.6; versions before did not clip by default.
    key("gradient_clipping", K::POSITIVE, D::Num(1.0), T::Acted).auto(Fill::Clipping),
    key("prescale_gradients", K::Bool, D::Bool(false), T::Acted),
    key("gradient_predivide_factor", K::Num { min: f64::MIN_POSITIVE, max: f64::MAX }, D::Num(1.0), T::Acted),
    key(
        "gradient_allreduce_op",
        K::OneOf(&["mean", "sum"]),
        D::Text("mean"),
        T::Refused("gradients are averaged over the ranks; scale the loss instead"),
    ),
    key("communication_data_type", DTYPES, D::Null, T::Acted),
    key(
        "fp32_allreduce",
        K::Bool,
        D::Bool(false),
        T::Renamed {
            to: "communication_data_type",
            change: |on| if *on == Node::Bool(true) { Node::from("fp32") } else { Node::Null },
            deprecated: true,
        },
    ),
    key("seq_parallel_communication_data_type", DTYPES, D::Text("fp32"), T::NoEffect("sequences are not split")),
    section("data_types", DATA_TYPES),
    key(
        "managed_gradient_accumulation",
        K::Bool,
        D::Bool(true),
        T::Refused("the engine counts the micro-batches of a step; remove the key"),
    ),
    key("sparse_gradients", K::Bool, D::Bool(false), T::NoEffect("gradients of embeddings are dense")),
    key("disable_allgather", K::Bool, D::Bool(false), T::NoEffect("there is one way to gather")),
    key(
        "allgather_size",
        K::COUNT,
        D::Null,
        T::NoEffect("deprecated; the all-gather of parameters has no such setting"),
    ),
    key("zero_allow_untested_optimizer", K::Bool, D::Bool(false), T::Quiet),
    key("zero_force_ds_cpu_optimizer", K::Bool, D::Bool(true), T::NoEffect("there is one optimizer for all devices")),
    key("dataloader_drop_last", K::Bool, D::Bool(false), LOADER),
    key("vocabulary_size", K::ONE_UP, D::Null, T::NoEffect("DeepSpeed only warns of its alignment")),
    key("graph_harvesting", K::Bool, D::Bool(false), CUDA),
    key("use_data_before_expert_parallelism", K::Bool, D::Bool(false), EXPERTS),
    key("dump_state", K::Bool, D::Bool(false), T::NoEffect("`explain` prints the plan")),
    key("log_level", K::Text, D::Null, T::NoEffect("the program decides what is logged")),
    // Observing.
    key("steps_per_print", K::ONE_UP, D::Null, T::Acted),
    key("wall_clock_breakdown", K::Bool, D::Bool(false), T::Acted),
    key("memory_breakdown", K::Bool, D::Bool(false), T::Acted),
    switch("tensorboard", LOG_FILES, T::Acted),
    switch("csv_monitor", LOG_FILES, T::Acted),
    switch("wandb", WANDB, NO_LOGGER),
    switch("comet", COMET, NO_LOGGER),
    switch("flops_profiler", FLOPS_PROFILER, T::NotYet("operations are not counted yet")),
    switch("comms_logger", COMMS_LOGGER, T::NotYet("collectives are not logged one by one yet")),
    section("timers", TIMERS),
    // Memory, files.
    section("activation_checkpointing", ACTIVATION_CHECKPOINTING),
    section("aio", AIO),
    // Not DeepSpeed's, which has no such keys.
    section("watchdog", WATCHDOG),
    section("gradient_accumulation_kwargs", GRADIENT_ACCUMULATION),
    section("checkpoint", CHECKPOINT),
    switch("nebula", NEBULA, T::NoEffect("it is a service of one cloud")),
    absent("datastates_ckpt", Gate::Given, SAVES),
    // Features of DeepSpeed that are not part of ZeRO.
    switch("elasticity", ELASTICITY, T::Refused("it would choose other batch sizes; give them in the batch keys")),
    switch("amp", AMP, T::Refused("NVIDIA's amp does not exist here; use bf16 or fp16")),
    switch("torch_autocast", AUTOCAST, T::Refused("PyTorch's autocast does not exist here; use bf16 or fp16")),
    switch("progressive_layer_drop", PLD, T::Refused("layers are never dropped; remove the section")),
    switch("eigenvalue", EIGENVALUE, T::NoEffect("it only steers quantised training")),
    switch("hybrid_engine", HYBRID_ENGINE, T::NoEffect("there is no inference engine to switch to")),
    section("pipeline", PIPELINE),
    section("tensor_parallel", TENSOR_PARALLEL),
    section("compile", COMPILE),
    refused("compression_training", Gate::Enabled, "models are not compressed; remove the section"),
    refused("quantize_training", Gate::Enabled, "training is not quantised; remove the section"),
    refused("weight_quantization", Gate::Given, "weights are not quantised; remove the section"),
    refused("sparse_attention", Gate::Given, "attention is dense; remove the section"),
    refused("data_efficiency", Gate::Enabled, "samples are taken as the program's loader gives them"),
    refused("curriculum_learning", Gate::Enabled, "samples are taken as the program's loader gives them"),
    refused("expert_parallel", Gate::Enabled, "there is no expert parallelism; remove the section"),
    refused("msamp", Gate::Enabled, "fp8 is not supported; use bf16"),
    absent("autotuning", Gate::Enabled, T::NotYet("settings are taken as they are, not searched")),
];

const FP16: &[Key] = &[
    key("enabled", K::Bool, D::Bool(false), T::Acted).auto(Fill::Fp16),
    key("auto_cast", K::Bool, D::Bool(false), T::NoEffect("inputs have the type the program gives them")),
    key("loss_scale", K::POSITIVE, D::Num(0.0), T::Acted),
    key("initial_scale_power", K::Int { min: 0, max: 127 }, D::Int(16), T::Acted),
    key("loss_scale_window", K::COUNT, D::Int(1000), T::Acted),
    key("hysteresis", K::ONE_UP, D::Int(2), T::Acted),
    key("consecutive_hysteresis", K::Bool, D::Bool(false), T::Acted),
    key("min_loss_scale", K::POSITIVE, D::Num(1.0), T::Acted),
    key("fp16_master_weights_and_grads", K::Bool, D::Bool(false), LOW_PRECISION_MASTER),
];

const BF16: &[Key] = &[
    key("enabled", K::Bool, D::Bool(false), T::Acted).auto(Fill::Bf16),
    key("check_grad_overflow", K::Bool, D::Bool(true), T::Acted),
    key("immediate_grad_update", K::Bool, D::Bool(false), T::NoEffect("gradients are added up as they arrive")),
    key("bf16_master_weights_and_grads", K::Bool, D::Bool(false), LOW_PRECISION_MASTER),
    key("bf16_optimizer_states", K::Bool, D::Bool(false), LOW_PRECISION_MASTER),
];

const STORED_TYPE: T = T::Refused("the type follows from bf16.enabled and fp16.enabled; remove the key");
const DATA_TYPES: &[Key] = &[
    key("grad_accum_dtype", TORCH_DTYPES, D::Null, T::Acted),
    key("param_dtype", TORCH_DTYPES, D::Null, STORED_TYPE),
    key("buffer_dtype", TORCH_DTYPES, D::Null, STORED_TYPE),
];

const ACTIVATION_CHECKPOINTING: &[Key] = &[
    key("partition_activations", K::Bool, D::Bool(false), ACTIVATIONS),
    key("cpu_checkpointing", K::Bool, D::Bool(false), ACTIVATIONS),
    key("contiguous_memory_optimization", K::Bool, D::Bool(false), ACTIVATIONS),
    key("number_checkpoints", K::COUNT, D::Null, ACTIVATIONS),
    key("synchronize_checkpoint_boundary", K::Bool, D::Bool(false), ACTIVATIONS),
    key("profile", K::Bool, D::Bool(false), ACTIVATIONS),
];

const AIO: &[Key] = &[
    key("block_size", K::ONE_UP, D::Int(1_048_576), T::Acted),
    key("queue_depth", K::ONE_UP, D::Int(8), T::Acted),
    key(
        "thread_count",
        K::ONE_UP,
        D::Int(1),
        T::Renamed { to: "intra_op_parallelism", change: Node::clone, deprecated: true },
    ),
    key("intra_op_parallelism", K::ONE_UP, D::Int(1), T::Acted),
    key("single_submit", K::Bool, D::Bool(false), T::Acted),
    key("overlap_events", K::Bool, D::Bool(true), T::Acted),
    key("use_gds", K::Bool, D::Bool(false), NO_GDS),
];

const WATCHDOG: &[Key] = &[
    key("deadline_seconds", K::POSITIVE, D::Null, T::Acted),
    key("flight_dir", K::Text, D::Null, T::Acted),
    key("error_if_nonfinite", K::Bool, D::Bool(false), T::Acted),
];

const GRADIENT_ACCUMULATION: &[Key] = &[key("sync_each_batch", K::Bool, D::Null, T::Acted)];

const CHECKPOINT: &[Key] = &[
    key("tag_validation", K::OneOf(&["Ignore", "Warn", "Fail"]), D::Text("Warn"), SAVES),
    key("load_universal", K::Bool, D::Bool(false), SAVES),
    key("use_node_local_storage", K::Bool, D::Bool(false), SAVES),
    key("checkpoint_serialization", K::Bool, D::Bool(true), WRITER),
    absent("writer", Gate::Given, WRITER),
    section("parallel_write", &[key("pipeline_stage", K::Bool, D::Bool(false), WRITER)]),
];

const LOG_FILES: &[Key] = &[
    enabled(false),
    key("output_path", K::Text, D::Text(""), T::Acted),
    key("job_name", K::Text, D::Text("DeepSpeedJobName"), T::Acted),
];

const WANDB: &[Key] = &[
    enabled(false),
    key("group", K::Text, D::Null, T::Quiet),
    key("team", K::Text, D::Null, T::Quiet),
    key("project", K::Text, D::Text("deepspeed"), T::Quiet),
];

const COMET: &[Key] = &[
    enabled(false),
    key("samples_log_interval", K::ONE_UP, D::Int(100), T::Quiet),
    key("project", K::Text, D::Null, T::Quiet),
    key("workspace", K::Text, D::Null, T::Quiet),
    key("api_key", K::Text, D::Null, T::Quiet),
    key("experiment_name", K::Text, D::Null, T::Quiet),
    key("experiment_key", K::Text, D::Null, T::Quiet),
    key("online", K::Bool, D::Null, T::Quiet),
    key("mode", K::Text, D::Null, T::Quiet),
];

const FLOPS_PROFILER: &[Key] = &[
    enabled(false),
    key("recompute_fwd_factor", K::POSITIVE, D::Num(0.0), T::Quiet),
    key("profile_step", K::INT, D::Int(1), T::Quiet),
    key("module_depth", K::INT, D::Int(-1), T::Quiet),
    key("top_modules", K::COUNT, D::Int(1), T::Quiet),
    key("detailed", K::Bool, D::Bool(true), T::Quiet),
    key("output_file", K::Text, D::Null, T::Quiet),
];

const COMMS_LOGGER: &[Key] = &[
    enabled(false),
    key("verbose", K::Bool, D::Bool(false), T::Quiet),
    key("prof_all", K::Bool, D::Bool(true), T::Quiet),
    key("prof_ops", K::Texts, D::Empty, T::Quiet),
    key("debug", K::Bool, D::Bool(false), T::Quiet),
];

const CLOCK: T = T::NoEffect("throughput is always measured, at the end of a step");
const TIMERS: &[Key] = &[section(
    "throughput",
    &[key("enabled", K::Bool, D::Bool(true), CLOCK), key("synchronized", K::Bool, D::Bool(true), CLOCK)],
)];

const NEBULA: &[Key] = &[
    enabled(false),
    key("enable_nebula_load", K::Bool, D::Bool(true), T::Quiet),
    key("nebula_load_path", K::Text, D::Null, T::Quiet),
    key("persistent_storage_path", K::Text, D::Null, T::Quiet),
    key("persistent_time_interval", K::COUNT, D::Int(100), T::Quiet),
    key("num_of_version_in_retention", K::COUNT, D::Int(2), T::Quiet),
];

const ELASTICITY: &[Key] = &[
    enabled(false),
    key("max_train_batch_size", K::ONE_UP, D::Int(2000), T::Quiet),
    key("micro_batch_sizes", K::Any, D::Null, T::Quiet),
    key("min_gpus", K::COUNT, D::Int(1), T::Quiet),
    key("max_gpus", K::COUNT, D::Int(10_000), T::Quiet),
    key("num_gpus_per_node", K::COUNT, D::Int(1), T::Quiet),
    key("model_parallel_size", K::COUNT, D::Int(1), T::Quiet),
    key("min_time", K::COUNT, D::Int(0), T::Quiet),
    key("prefer_larger_batch", K::Bool, D::Bool(true), T::Quiet),
    key("ignore_non_elastic_batch_info", K::Bool, D::Bool(false), T::Quiet),
    key("version", K::NUM, D::Num(0.2), T::Quiet),
];

const AMP: &[Key] = &[
    enabled(false),
    key("opt_level", K::Text, D::Null, T::Quiet),
    key("loss_scale", K::Any, D::Null, T::Quiet),
    key("keep_batchnorm_fp32", K::Any, D::Null, T::Quiet),
    key("master_weights", K::Any, D::Null, T::Quiet),
    key("min_loss_scale", K::Any, D::Null, T::Quiet),
    key("max_loss_scale", K::Any, D::Null, T::Quiet),
];

const AUTOCAST: &[Key] = &[
    enabled(false),
    key("dtype", K::Text, D::Text("bfloat16"), T::Quiet),
    key("lower_precision_safe_modules", K::Texts, D::Empty, T::Quiet),
];

const PLD: &[Key] = &[
    enabled(false),
    key("theta", K::FRACTION, D::Num(1.0), T::Quiet),
    key("gamma", K::POSITIVE, D::Num(0.001), T::Quiet),
];

const EIGENVALUE: &[Key] = &[
    enabled(false),
    key("verbose", K::Bool, D::Bool(false), T::Quiet),
    key("max_iter", K::COUNT, D::Int(100), T::Quiet),
    key("tol", K::POSITIVE, D::Num(1e-2), T::Quiet),
    key("stability", K::POSITIVE, D::Num(1e-6), T::Quiet),
    key("gas_boundary_resolution", K::COUNT, D::Int(1), T::Quiet),
    key("layer_name", K::Text, D::Text("bert.encoder.layer"), T::Quiet),
    key("layer_num", K::COUNT, D::Int(0), T::Quiet),
];

const HYBRID_ENGINE: &[Key] = &[
    enabled(false),
    key("max_out_tokens", K::COUNT, D::Int(512), T::Quiet),
    key("inference_tp_size", K::COUNT, D::Int(1), T::Quiet),
    key("release_inference_cache", K::Bool, D::Bool(false), T::Quiet),
    key("pin_parameters", K::Bool, D::Bool(true), T::Quiet),
    key("tp_gather_partition_size", K::COUNT, D::Int(8), T::Quiet),
    key("enable_cuda_graph", K::Bool, D::Bool(false), T::Quiet),
];

const NO_PIPELINE: T = T::NoEffect("there are no pipeline stages");
const PIPELINE: &[Key] = &[
    key("stages", K::Any, D::Text("auto"), NO_PIPELINE),
    key("partition", K::Text, D::Text("best"), NO_PIPELINE),
    key("seed_layers", K::Bool, D::Bool(false), NO_PIPELINE),
    key("activation_checkpoint_interval", K::COUNT, D::Int(0), NO_PIPELINE),
    key("pipe_partitioned", K::Bool, D::Bool(true), NO_PIPELINE),
    key("grad_partitioned", K::Bool, D::Bool(true), NO_PIPELINE),
];

const TENSOR_PARALLEL: &[Key] = &[
    key(
        "autotp_size",
        K::COUNT,
        D::Int(0),
        T::Refused("there is no tensor parallelism: all ranks are data parallel; remove the key"),
    ),
    key("dtype", K::Text, D::Null, T::Quiet),
    key("tp_overlap_comm", K::Bool, D::Bool(false), T::Quiet),
    absent("tp", Gate::Given, T::Quiet),
    absent("tensor_parallel", Gate::Given, T::Quiet),
    absent("partition_config", Gate::Given, T::Quiet),
    key("injection_policy_tuple", K::Any, D::Null, T::Quiet),
    key("preset_model", K::Text, D::Null, T::Quiet),
    key("keep_module_on_host", K::Bool, D::Bool(false), T::Quiet),
    key("replace_with_kernel_inject", K::Bool, D::Bool(false), T::Quiet),
    key("kernel_inject", K::Bool, D::Bool(false), T::Quiet),
];

const COMPILER: T = T::NoEffect("it compiles PyTorch's graphs");
const COMPILE: &[Key] = &[
    key("deepcompile", K::Bool, D::Bool(false), COMPILER),
    key("free_activation", K::Bool, D::Bool(false), COMPILER),
    key("free_activation_threshold", K::COUNT, D::Int(10_485_760), COMPILER),
    key("offload_activation", K::Bool, D::Bool(false), COMPILER),
    key("offload_activation_pin_memory", K::Bool, D::Bool(true), COMPILER),
    key("offload_opt_states", K::Bool, D::Bool(false), COMPILER),
    key("double_buffer", K::Bool, D::Bool(true), COMPILER),
    key("symmetric_memory", K::Bool, D::Bool(false), COMPILER),
    key("debug_log", K::Bool, D::Bool(false), COMPILER),
    key("offload_parameters", K::Bool, D::Bool(false), COMPILER),
    key("sync_before_reduce", K::Bool, D::Bool(false), COMPILER),
    key("sync_after_reduce", K::Bool, D::Bool(false), COMPILER),
    key("sync_before_allgather", K::Bool, D::Bool(false), COMPILER),
    key("sync_after_allgather", K::Bool, D::Bool(false), COMPILER),
    key("keep_int_input_tensors", K::Bool, D::Bool(true), COMPILER),
    key("keep_all_input_tensors", K::Bool, D::Bool(false), COMPILER),
    key("passes", K::Texts, D::Empty, COMPILER),
];
