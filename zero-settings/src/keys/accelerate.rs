//! Keys of an Accelerate YAML, at both levels. Supported ones are converted to DeepSpeed's keys.

use crate::auto::Fill;
use crate::node::Node;
use crate::rule::{Fate as T, Gate, Key, Kind as K, keys};

const LAUNCHER: T = T::no_effect("set by the launcher (`zero launch`, torchrun, mpirun), not by the plan");
const TPU: T = T::no_effect("TPUs are not available");
const DYNAMO: T = T::no_effect("torch.compile is not available");
const OTHER_PLUGIN: T = T::no_effect("the section belongs to another distributed_type");
const DEVICES: K = K::OneOf("none cpu nvme");

/// All keys of the top level.
pub(crate) const ACCELERATE: &[Key] = keys! {
    compute_environment = "LOCAL_MACHINE" => K::OneOf("LOCAL_MACHINE AMAZON_SAGEMAKER"),
        T::refused("SageMaker starts its own jobs; use LOCAL_MACHINE");
    distributed_type = null => K::Text, T::ACTED;
    deepspeed_config = null => K::section(keys! {
        deepspeed_config_file = "none" => K::Text, T::ACTED;
        zero_stage = 2 => K::Int { min: 0, max: 3 }, T::ACTED;
        gradient_accumulation_steps = "auto" => K::ONE_UP, T::ACTED.auto(Fill::Batch);
        gradient_clipping = "auto" => K::POSITIVE, T::ACTED.auto(Fill::Clipping);
        offload_optimizer_device = "none", offload_param_device = "none" => DEVICES, T::ACTED;
        offload_optimizer_nvme_path = "none", offload_param_nvme_path = "none" => K::Text, T::ACTED;
        zero3_save_16bit_model = false => K::YesNo, T::ACTED;
        // False at stage 3 gives a warning.
        zero3_init_flag = null => K::YesNo, T::QUIET;
        deepspeed_hostfile = "none", deepspeed_multinode_launcher = "pdsh", deepspeed_inclusion_filter = "none",
        deepspeed_exclusion_filter = "none" => K::Text, LAUNCHER;
        deepspeed_moe_layer_cls_names = null => K::Text,
            T::no_effect("not needed: parameters are gathered on use, in any order, even if ranks use different ones");
    }), T::ACTED;
    mixed_precision = "no" => K::OneOf("no fp16 bf16 fp8"), T::ACTED;
    fp16 = null => K::YesNo,
        T::renamed("mixed_precision", |on| Node::from(if *on == Node::Bool(true) { "fp16" } else { "no" }));
    // Accelerate writes -1 for "not given".
    num_processes = -1 => K::Int { min: -1, max: i64::MAX as i128 }, T::ACTED;
    num_machines = 1 => K::COUNT,
        T::no_effect(
            "set by the launcher (`zero launch`, torchrun, mpirun), not by the plan; only FSDP's HYBRID strategies read it",
        );
    // `zero launch` reads them.
    machine_rank = 0, main_process_port = null => K::COUNT, T::ACTED;
    main_process_ip = null => K::Text, T::ACTED;
    rdzv_backend = "static" => K::Text, LAUNCHER;
    same_network = null => K::YesNo, T::QUIET;
    gpu_ids = "all" => K::Any, LAUNCHER;
    main_training_function = "main" => K::Text, T::QUIET;
    // The program's backend decides.
    use_cpu = false => K::YesNo, T::QUIET;
    enable_cpu_affinity = false => K::YesNo, LAUNCHER;
    debug = false => K::YesNo, T::no_effect("shapes of collectives are always checked");
    downcast_bf16 = false, tpu_use_cluster = false, tpu_use_sudo = false => K::YesNo, TPU;
    dynamo_backend = "NO" => K::Text, DYNAMO;
    dynamo_config = null => K::Open(Gate::Given), DYNAMO;
    fsdp_config = null => K::section(keys! {
        // A name or its number; version 2 has `fsdp_reshard_after_forward` in its place, which is true or false there.
        fsdp_sharding_strategy = null, fsdp_reshard_after_forward = null => K::Any, T::ACTED;
        fsdp_offload_params = false, fsdp_activation_checkpointing = false => K::YesNo, T::ACTED;
        fsdp_version = 1 => K::ONE_UP, T::QUIET;
        fsdp_auto_wrap_policy = null, fsdp_transformer_layer_cls_to_wrap = null, fsdp_backward_prefetch = null,
        fsdp_backward_prefetch_policy = null, fsdp_state_dict_type = null => K::Text, T::QUIET;
        fsdp_min_num_params = null => K::COUNT, T::QUIET;
        fsdp_forward_prefetch = null, fsdp_cpu_ram_efficient_loading = null, fsdp_sync_module_states = null,
        fsdp_use_orig_params = null, fsdp_limit_all_gathers = null => K::YesNo, T::QUIET;
    }), T::ACTED;
    megatron_lm_config = null => K::Open(Gate::Given), OTHER_PLUGIN;
    fp8_config = null => K::Open(Gate::Given), T::no_effect("it only tunes fp8");
    ipex_config = null => K::Open(Gate::Given), T::no_effect("it tunes Intel's PyTorch extension");
    mpirun_config = null => K::Open(Gate::Given), LAUNCHER;
    parallelism_config = null => K::Open(Gate::Given),
        T::refused(
            "the models of zero-train are data parallel; for groups that shard and replicate, set \
             fsdp_sharding_strategy: HYBRID_SHARD; for other axes, set ZeroConfig::axes in your own program",
        );
    tpu_name = null, tpu_zone = null, command_file = null => K::Text, TPU;
    tpu_vm = [], tpu_env = [], commands = [] => K::Texts, TPU;
};
