//! The top level of a DeepSpeed JSON.

use super::training::{OPTIMIZERS, SCHEDULERS};
use super::zero::ZERO;
use crate::auto::Fill;
use crate::node::Node;
use crate::rule::{Fate as T, Gate, Key, Kind as K, keys};

/// Options for one contiguous buffer of all block inputs.
const CONTIGUOUS: T = T::no_effect("all block inputs have the same size and reuse each other's freed memory");
const CLOCK: T = T::no_effect("throughput is always measured, at the end of a step");
const COMPILER: T = T::no_effect("it configures PyTorch's graph compiler");
const LOW_PRECISION_MASTER: T = T::refused(
    "master weights are always fp32; remove the key, or set `bf16.bf16_optimizer_states` to store the moments in bf16",
);
const WHOLE_MODEL: T = T::no_effect("operations are counted for the whole model, not for each module");
const NO_LOGGER: T = T::not_yet("this logger is not implemented; use tensorboard or csv_monitor");
const NO_PIPELINE: T = T::no_effect("there are no pipeline stages");
const SAVES: T = T::not_yet("checkpoints do not have this option");
const WRITER: T = T::no_effect("it tunes DeepSpeed's checkpoint writer");
const DTYPES: K = K::OneOf("fp32 fp16 bf16");
/// `data_types` also takes PyTorch's names.
const TORCH_DTYPES: K =
    K::OneOf("fp32 fp16 bf16 float32 float16 bfloat16 float half torch.float32 torch.float16 torch.bfloat16");

const BF16: &[Key] = keys! {
    enabled = false => K::Bool, T::ACTED.auto(Fill::Bf16);
    check_grad_overflow = true => K::Bool, T::ACTED;
    immediate_grad_update = false => K::Bool, T::no_effect("gradients are always accumulated as they arrive");
    bf16_master_weights_and_grads = false => K::Bool, LOW_PRECISION_MASTER;
    bf16_optimizer_states = false => K::Bool, T::ACTED;
};

/// All keys of the top level.
pub(crate) const DEEPSPEED: &[Key] = keys! {
    train_batch_size = null, train_micro_batch_size_per_gpu = null, gradient_accumulation_steps = null => K::ONE_UP,
        T::ACTED.auto(Fill::Batch);
    zero_optimization = null => K::section(ZERO), T::ACTED;
    optimizer = null => K::Tagged(&OPTIMIZERS), T::ACTED;
    scheduler = null => K::Tagged(&SCHEDULERS), T::ACTED;
    fp16 = null => K::section(keys! {
        enabled = false => K::Bool, T::ACTED.auto(Fill::Fp16);
        auto_cast = false => K::Bool, T::no_effect("inputs keep the type that the program gives them");
        loss_scale = 0 => K::POSITIVE, T::ACTED;
        initial_scale_power = 16 => K::Int { min: 0, max: 127 }, T::ACTED;
        loss_scale_window = 1000 => K::COUNT, T::ACTED;
        hysteresis = 2 => K::ONE_UP, T::ACTED;
        consecutive_hysteresis = false => K::Bool, T::ACTED;
        min_loss_scale = 1 => K::POSITIVE, T::ACTED;
        fp16_master_weights_and_grads = false => K::Bool, LOW_PRECISION_MASTER;
    }), T::ACTED;
    bf16 = null => K::section(BF16), T::ACTED;
    bfloat16 = null => K::section(BF16), T::renamed("bf16", Node::clone);
    // 1.0 since DeepSpeed 0.19.6; versions before did not clip by default.
    gradient_clipping = 1 => K::POSITIVE, T::ACTED.auto(Fill::Clipping);
    prescale_gradients = false => K::Bool, T::ACTED;
    gradient_predivide_factor = 1 => K::Num { min: f64::MIN_POSITIVE, max: f64::MAX }, T::ACTED;
    gradient_allreduce_op = "mean" => K::OneOf("mean sum"), T::ACTED;
    communication_data_type = null => DTYPES, T::ACTED;
    fp32_allreduce = false => K::Bool, T::renamed("communication_data_type", |on| match on {
        Node::Bool(true) => "fp32".into(),
        _ => Node::Null,
    });
    seq_parallel_communication_data_type = "fp32" => DTYPES, T::no_effect("there is no sequence parallelism");
    data_types = null => K::section(keys! {
        grad_accum_dtype = null => TORCH_DTYPES, T::ACTED;
        param_dtype = null, buffer_dtype = null => TORCH_DTYPES,
            T::refused("the type follows from bf16.enabled and fp16.enabled; remove the key");
    }), T::ACTED;
    managed_gradient_accumulation = true => K::Bool,
        T::no_effect("the trainer counts the micro-batches of a step; in your own loop, end a step with ZeroEngine::step_partial");
    sequence_parallel_size = 1 => K::ONE_UP,
        T::refused("sequences are not split over ranks; set it to 1, or remove it");
    sparse_gradients = false => K::Bool, T::no_effect("gradients of embeddings are dense");
    disable_allgather = false => K::Bool, T::no_effect("there is only one way to gather parameters");
    allgather_size = null => K::COUNT, T::no_effect("deprecated; it does not apply to the all-gather used here");
    zero_allow_untested_optimizer = false => K::Bool, T::QUIET;
    zero_force_ds_cpu_optimizer = true => K::Bool, T::no_effect("the same optimizer runs on all devices");
    dataloader_drop_last = false => K::Bool, T::no_effect("the program provides the data loader");
    vocabulary_size = null => K::ONE_UP, T::no_effect("DeepSpeed uses it only for an alignment warning");
    graph_harvesting = false => K::Bool, T::no_effect("it tunes PyTorch's CUDA graphs");
    use_data_before_expert_parallelism = false => K::Bool, T::no_effect("there is no expert parallelism");
    dump_state = false => K::Bool, T::no_effect("`zero check FILE` and `ZeroPlan::explain` describe the plan");
    log_level = null => K::Text, T::no_effect("the program decides what is logged");
    // Observing.
    steps_per_print = null => K::ONE_UP, T::ACTED;
    wall_clock_breakdown = false, memory_breakdown = false => K::Bool, T::ACTED;
    tensorboard = null, csv_monitor = null => K::switch(keys! {
        enabled = false => K::Bool, T::QUIET;
        output_path = "", job_name = "DeepSpeedJobName" => K::Text, T::ACTED;
    }), T::ACTED;
    wandb = null => K::switch(keys! {
        enabled = false => K::Bool, T::QUIET;
        group = null, team = null, project = "deepspeed" => K::Text, T::QUIET;
    }), NO_LOGGER;
    comet = null => K::switch(keys! {
        enabled = false, online = null => K::Bool, T::QUIET;
        samples_log_interval = 100 => K::ONE_UP, T::QUIET;
        project = null, workspace = null, api_key = null, experiment_name = null, experiment_key = null, mode = null
            => K::Text, T::QUIET;
    }), NO_LOGGER;
    flops_profiler = null => K::switch(keys! {
        enabled = false => K::Bool, T::QUIET;
        profile_step = 1 => K::INT, T::ACTED;
        output_file = null => K::Text, T::ACTED;
        detailed = true => K::Bool, WHOLE_MODEL;
        module_depth = -1 => K::INT, WHOLE_MODEL;
        top_modules = 1 => K::COUNT, WHOLE_MODEL;
        recompute_fwd_factor = 0 => K::POSITIVE, T::no_effect("recomputation is not counted");
    }), T::ACTED;
    comms_logger = null => K::switch(keys! {
        enabled = false => K::Bool, T::QUIET;
        prof_all = true => K::Bool, T::ACTED;
        prof_ops = [] => K::Texts, T::ACTED;
        verbose = false, debug = false => K::Bool, T::no_effect("--trace FILE records each collective with its thread and time");
    }), T::ACTED;
    timers = null => K::section(keys! {
        throughput = null => K::section(keys! { enabled = true, synchronized = true => K::Bool, CLOCK; }), T::ACTED;
    }), T::ACTED;
    // Memory, files.
    activation_checkpointing = null => K::section(keys! {
        partition_activations = false => K::Bool,
            T::no_effect("it is for ranks that hold the same activations (model parallelism); here each rank has its own rows");
        contiguous_memory_optimization = false => K::Bool, CONTIGUOUS;
        number_checkpoints = null => K::COUNT, CONTIGUOUS;
        synchronize_checkpoint_boundary = false => K::Bool,
            T::no_effect("there is no synchronization at the end of a block");
        profile = false => K::Bool, T::no_effect("--trace FILE records the time of each recomputed block");
        cpu_checkpointing = false => K::Bool, T::ACTED;
        // Not DeepSpeed's: the number of leading blocks, and a folder to use instead of host memory.
        blocks = null => K::COUNT, T::ACTED;
        nvme_path = null => K::Text, T::ACTED;
    }), T::ACTED;
    aio = null => K::section(keys! {
        block_size = 1048576, queue_depth = 8 => K::ONE_UP, T::ACTED;
        thread_count = 1 => K::ONE_UP, T::renamed("intra_op_parallelism", Node::clone);
        intra_op_parallelism = 1 => K::ONE_UP, T::ACTED;
        single_submit = false, overlap_events = true => K::Bool, T::ACTED;
        use_gds = false => K::Bool,
            T::refused("direct transfers between disk and GPU memory are not implemented; remove the key");
    }), T::ACTED;
    // Not DeepSpeed's, which has no such keys.
    watchdog = null => K::section(keys! {
        deadline_seconds = null => K::POSITIVE, T::ACTED;
        flight_dir = null => K::Text, T::ACTED;
        error_if_nonfinite = false => K::Bool, T::ACTED;
    }), T::ACTED;
    gradient_accumulation_kwargs = null => K::section(keys! { sync_each_batch = null => K::Bool, T::ACTED; }), T::ACTED;
    checkpoint = null => K::section(keys! {
        tag_validation = "Warn" => K::OneOf("Ignore Warn Fail"), SAVES;
        load_universal = false, use_node_local_storage = false => K::Bool, SAVES;
        checkpoint_serialization = true => K::Bool, WRITER;
        writer = null => K::Open(Gate::Given), WRITER;
        parallel_write = null => K::section(keys! { pipeline_stage = false => K::Bool, WRITER; }), T::ACTED;
    }), T::ACTED;
    nebula = null => K::switch(keys! {
        enabled = false, enable_nebula_load = true => K::Bool, T::QUIET;
        nebula_load_path = null, persistent_storage_path = null => K::Text, T::QUIET;
        persistent_time_interval = 100, num_of_version_in_retention = 2 => K::COUNT, T::QUIET;
    }), T::no_effect("Nebula is a service of Azure");
    datastates_ckpt = null => K::Open(Gate::Given), SAVES;
    // Features of DeepSpeed that are not part of ZeRO.
    elasticity = null => K::switch(keys! {
        enabled = false, prefer_larger_batch = true, ignore_non_elastic_batch_info = false => K::Bool, T::QUIET;
        max_train_batch_size = 2000 => K::ONE_UP, T::QUIET;
        micro_batch_sizes = null => K::Any, T::QUIET;
        min_gpus = 1, max_gpus = 10000, num_gpus_per_node = 1, model_parallel_size = 1, min_time = 0
            => K::COUNT, T::QUIET;
        version = 0.2 => K::NUM, T::QUIET;
    }), T::refused("it would choose other batch sizes; set the batch size keys instead");
    amp = null => K::switch(keys! {
        enabled = false => K::Bool, T::QUIET;
        opt_level = null => K::Text, T::QUIET;
        loss_scale = null, keep_batchnorm_fp32 = null, master_weights = null, min_loss_scale = null,
        max_loss_scale = null => K::Any, T::QUIET;
    }), T::refused("NVIDIA's amp is not available; use bf16 or fp16");
    torch_autocast = null => K::switch(keys! {
        enabled = false => K::Bool, T::QUIET;
        dtype = "bfloat16" => K::Text, T::QUIET;
        lower_precision_safe_modules = [] => K::Texts, T::QUIET;
    }), T::refused("PyTorch's autocast is not available; use bf16 or fp16");
    progressive_layer_drop = null => K::switch(keys! {
        enabled = false => K::Bool, T::QUIET;
        theta = 1 => K::FRACTION, T::QUIET;
        gamma = 0.001 => K::POSITIVE, T::QUIET;
    }), T::refused("layers are never dropped; remove the section");
    eigenvalue = null => K::switch(keys! {
        enabled = false, verbose = false => K::Bool, T::QUIET;
        max_iter = 100, gas_boundary_resolution = 1, layer_num = 0 => K::COUNT, T::QUIET;
        tol = 1e-2, stability = 1e-6 => K::POSITIVE, T::QUIET;
        layer_name = "bert.encoder.layer" => K::Text, T::QUIET;
    }), T::no_effect("it only controls quantized training, which is not implemented");
    hybrid_engine = null => K::switch(keys! {
        enabled = false, release_inference_cache = false, pin_parameters = true, enable_cuda_graph = false
            => K::Bool, T::QUIET;
        max_out_tokens = 512, inference_tp_size = 1, tp_gather_partition_size = 8 => K::COUNT, T::QUIET;
    }), T::no_effect("there is no inference engine to switch to");
    pipeline = null => K::section(keys! {
        stages = "auto" => K::Any, NO_PIPELINE;
        partition = "best" => K::Text, NO_PIPELINE;
        seed_layers = false, pipe_partitioned = true, grad_partitioned = true => K::Bool, NO_PIPELINE;
        activation_checkpoint_interval = 0 => K::COUNT, NO_PIPELINE;
    }), T::ACTED;
    tensor_parallel = null => K::section(keys! {
        autotp_size = 0 => K::COUNT,
            T::refused("layers are not split automatically; remove the key (your own model can be split along an axis of a mesh)");
        dtype = null, preset_model = null => K::Text, T::QUIET;
        tp_overlap_comm = false, keep_module_on_host = false, replace_with_kernel_inject = false, kernel_inject = false
            => K::Bool, T::QUIET;
        tp = null, tensor_parallel = null, partition_config = null => K::Open(Gate::Given), T::QUIET;
        injection_policy_tuple = null => K::Any, T::QUIET;
    }), T::ACTED;
    compile = null => K::section(keys! {
        deepcompile = false, free_activation = false, offload_activation = false, offload_activation_pin_memory = true,
        offload_opt_states = false, double_buffer = true, symmetric_memory = false, debug_log = false,
        offload_parameters = false, sync_before_reduce = false, sync_after_reduce = false,
        sync_before_allgather = false, sync_after_allgather = false, keep_int_input_tensors = true,
        keep_all_input_tensors = false => K::Bool, COMPILER;
        free_activation_threshold = 10485760 => K::COUNT, COMPILER;
        passes = [] => K::Texts, COMPILER;
    }), T::ACTED;
    compression_training = null => K::Open(Gate::Enabled), T::refused("models are not compressed; remove the section");
    quantize_training = null => K::Open(Gate::Enabled),
        T::refused("quantized training is not implemented; remove the section");
    weight_quantization = null => K::Open(Gate::Given),
        T::refused("weight quantization is not implemented; remove the section");
    sparse_attention = null => K::Open(Gate::Given),
        T::no_effect("DeepSpeed passes it to models that ask for it; the models here use dense attention");
    data_efficiency = null, curriculum_learning = null => K::Open(Gate::Enabled),
        T::refused("samples are used as the program's loader returns them");
    expert_parallel = null => K::Open(Gate::Enabled), T::refused("there is no expert parallelism; remove the section");
    msamp = null => K::Open(Gate::Enabled), T::refused("fp8 is not supported; use bf16");
    autotuning = null => K::Open(Gate::Enabled), T::no_effect("`zero tune --config FILE` searches the settings; other commands use them as given");
};
