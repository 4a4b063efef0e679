//! The keys of an Accelerate YAML, at both levels. Those that are acted on are turned into DeepSpeed's.

use crate::config::auto::Fill;
use crate::config::node::Node;
use crate::config::rule::{Default as D, Gate, Key, Kind as K, Treatment as T, key, section};

const LAUNCHER: T = T::NoEffect("the launcher decides this (`zero launch`, torchrun, mpirun), not the plan");
const TPU: T = T::NoEffect("there are no TPUs here");
const DYNAMO: T = T::NoEffect("there is no torch.compile here");
const OTHER_PLUGIN: T = T::NoEffect("the section belongs to another distributed_type");
const DEVICES: K = K::OneOf(&["none", "cpu", "nvme"]);
const NO_PATH: D = D::Text("none");

/// All keys of the top level.
pub(in crate::config) const ACCELERATE: &[Key] = &[
    key(
        "compute_environment",
        K::OneOf(&["LOCAL_MACHINE", "AMAZON_SAGEMAKER"]),
        D::Text("LOCAL_MACHINE"),
        T::Refused("only LOCAL_MACHINE: SageMaker starts its own jobs"),
    ),
    key("distributed_type", K::Text, D::Null, T::Acted),
    section("deepspeed_config", PLUGIN),
    key("mixed_precision", K::OneOf(&["no", "fp16", "bf16", "fp8"]), D::Text("no"), T::Acted),
    key(
        "fp16",
        K::YesNo,
        D::Null,
        T::Renamed {
            to: "mixed_precision",
            change: |on| Node::from(if *on == Node::Bool(true) { "fp16" } else { "no" }),
            deprecated: true,
        },
    ),
    // Accelerate writes -1 for "not said".
    key("num_processes", K::Int { min: -1, max: i64::MAX as i128 }, D::Int(-1), T::Acted),
    key("num_machines", K::COUNT, D::Int(1), LAUNCHER),
    key("machine_rank", K::COUNT, D::Int(0), LAUNCHER),
    key("main_process_ip", K::Text, D::Null, LAUNCHER),
    key("main_process_port", K::COUNT, D::Null, LAUNCHER),
    key("rdzv_backend", K::Text, D::Text("static"), LAUNCHER),
    key("same_network", K::YesNo, D::Null, T::Quiet),
    key("gpu_ids", K::Any, D::Text("all"), LAUNCHER),
    key("main_training_function", K::Text, D::Text("main"), T::Quiet),
    key("use_cpu", K::YesNo, D::Bool(false), T::NoEffect("the backend the program is built for decides the device")),
    key("enable_cpu_affinity", K::YesNo, D::Bool(false), LAUNCHER),
    key("debug", K::YesNo, D::Bool(false), T::NoEffect("shapes of collectives are always checked")),
    key("downcast_bf16", K::YesNo, D::Bool(false), TPU),
    key("dynamo_backend", K::Text, D::Text("NO"), DYNAMO),
    key("dynamo_config", K::Open(Gate::Given), D::Empty, DYNAMO),
    key("fsdp_config", K::Open(Gate::Given), D::Empty, OTHER_PLUGIN),
    key("megatron_lm_config", K::Open(Gate::Given), D::Empty, OTHER_PLUGIN),
    key("fp8_config", K::Open(Gate::Given), D::Empty, T::NoEffect("it only tunes fp8")),
    key("ipex_config", K::Open(Gate::Given), D::Empty, T::NoEffect("it tunes Intel's PyTorch extension")),
    key("mpirun_config", K::Open(Gate::Given), D::Empty, LAUNCHER),
    key(
        "parallelism_config",
        K::Open(Gate::Given),
        D::Empty,
        T::Refused("all ranks are data parallel: there is no tensor, sequence or pipeline parallelism"),
    ),
    key("tpu_name", K::Text, D::Null, TPU),
    key("tpu_zone", K::Text, D::Null, TPU),
    key("tpu_use_cluster", K::YesNo, D::Bool(false), TPU),
    key("tpu_use_sudo", K::YesNo, D::Bool(false), TPU),
    key("tpu_vm", K::Texts, D::Empty, TPU),
    key("tpu_env", K::Texts, D::Empty, TPU),
    key("command_file", K::Text, D::Null, TPU),
    key("commands", K::Texts, D::Empty, TPU),
];

const PLUGIN: &[Key] = &[
    key("deepspeed_config_file", K::Text, NO_PATH, T::Acted),
    key("zero_stage", K::Int { min: 0, max: 3 }, D::Int(2), T::Acted),
    key("gradient_accumulation_steps", K::ONE_UP, D::Text("auto"), T::Acted).auto(Fill::Batch),
    key("gradient_clipping", K::POSITIVE, D::Text("auto"), T::Acted).auto(Fill::Clipping),
    key("offload_optimizer_device", DEVICES, NO_PATH, T::Acted),
    key("offload_param_device", DEVICES, NO_PATH, T::Acted),
    key("offload_optimizer_nvme_path", K::Text, NO_PATH, T::Acted),
    key("offload_param_nvme_path", K::Text, NO_PATH, T::Acted),
    key("zero3_save_16bit_model", K::YesNo, D::Bool(false), T::Acted),
    key("zero3_init_flag", K::YesNo, D::Null, T::Acted),
    key("deepspeed_hostfile", K::Text, NO_PATH, LAUNCHER),
    key("deepspeed_multinode_launcher", K::Text, D::Text("pdsh"), LAUNCHER),
    key("deepspeed_inclusion_filter", K::Text, NO_PATH, LAUNCHER),
    key("deepspeed_exclusion_filter", K::Text, NO_PATH, LAUNCHER),
    key(
        "deepspeed_moe_layer_cls_names",
        K::Text,
        D::Null,
        T::NotYet("modules are not gathered whole; parameters are gathered as they are used"),
    ),
];
