//! `zero_optimization.*`.

use crate::config::auto::Fill;
use crate::config::node::Node;
use crate::config::rule::{Default as D, Gate, Key, Kind as K, Treatment as T, alias, key, section};

/// `sys.maxsize`, DeepSpeed's "no limit".
const MAX_SIZE: i128 = i64::MAX as i128;

const ALWAYS_BUCKETS: T = T::NoEffect("gradients are always reduced through contiguous buckets");
const GATHERS: T = T::NoEffect("the all-gather of parameters has no such setting");
const PYTORCH: T = T::NoEffect("it works around PyTorch");
const FETCHES: T = T::NotYet("the all-gather of parameters has no such variant yet");
const QUANTIZED: T = T::Refused("quantised communication would change the numbers trained with; remove the key");
const WHOLE: T = T::NotYet("optimizer state is offloaded as a whole");
const SUPER_OFFLOAD: T = T::NoEffect("updates of offloaded state overlap with the next forward pass anyway");
const BEGINS_ON_DISK: T = T::NoEffect("optimizer state on a disk begins there, without being written first");
const NO_MICS: T = T::Refused("MiCS is not available: states would be sharded over all ranks; remove the key");

/// All keys of `zero_optimization`.
pub(in crate::config) const ZERO: &[Key] = &[
    key("stage", K::Int { min: 0, max: 3 }, D::Int(0), T::Acted),
    key("contiguous_gradients", K::Bool, D::Bool(true), ALWAYS_BUCKETS),
    key("reduce_scatter", K::Bool, D::Bool(true), ALWAYS_BUCKETS),
    key("reduce_bucket_size", K::ONE_UP, D::Int(500_000_000), T::Acted).auto(Fill::ReduceBucket),
    key("use_multi_rank_bucket_allreduce", K::Bool, D::Bool(true), ALWAYS_BUCKETS),
    key("allgather_partitions", K::Bool, D::Bool(true), GATHERS),
    key("allgather_bucket_size", K::COUNT, D::Int(500_000_000), GATHERS),
    key("overlap_comm", K::Bool, D::Null, T::Acted),
    // Not DeepSpeed's: updates from one comparison of the ranks' replicas to the next, 0 for none.
    key("check_replicas", K::COUNT, D::Int(0), T::Acted),
    key("load_from_fp32_weights", K::Bool, D::Bool(true), T::NotYet("checkpoints have no such option yet")),
    key("elastic_checkpoint", K::Bool, D::Bool(false), T::NotYet("checkpoints have no such option yet")),
    key(
        "round_robin_gradients",
        K::Bool,
        D::Bool(false),
        T::NoEffect("each rank already moves only its own shard of a gradient"),
    ),
    key("ignore_unused_parameters", K::Bool, D::Bool(true), T::NotYet("unused parameters are never an error")),
    key("legacy_stage1", K::Bool, D::Bool(false), T::NoEffect("there is one implementation of stage 1")),
    key("sub_group_size", K::ONE_UP, D::Int(1_000_000_000), T::Acted),
    key("offload_optimizer", K::Section(OFFLOAD_OPTIMIZER, Gate::Device), D::Empty, T::Acted).since_stage(1),
    key("offload_param", K::Section(OFFLOAD_PARAM, Gate::Device), D::Empty, T::Acted),
    // Stage 3.
    key("stage3_max_live_parameters", K::COUNT, D::Int(1_000_000_000), T::Acted).since_stage(3),
    key("stage3_max_reuse_distance", K::COUNT, D::Int(1_000_000_000), T::Acted).since_stage(3),
    key("stage3_prefetch_bucket_size", K::COUNT, D::Int(50_000_000), T::Acted).since_stage(3).auto(Fill::Prefetch),
    key("stage3_param_persistence_threshold", K::COUNT, D::Int(100_000), T::Acted)
        .since_stage(3)
        .auto(Fill::Persistence),
    key(
        "stage3_model_persistence_threshold",
        K::COUNT,
        D::Int(MAX_SIZE),
        T::NotYet("persistent parameters are not limited in sum"),
    )
    .since_stage(3),
    key("stage3_gather_16bit_weights_on_model_save", K::Bool, D::Bool(false), T::Acted)
        .since_stage(3)
        .auto(Fill::SaveModel),
    key("stage3_module_granularity_threshold", K::INT, D::Int(0), FETCHES).since_stage(3),
    key("stage3_use_all_reduce_for_fetch_params", K::Bool, D::Bool(false), FETCHES).since_stage(3),
    key("stage3_allgather_sequential", K::Bool, D::Bool(false), FETCHES).since_stage(3),
    key("memory_efficient_linear", K::Bool, D::Bool(true), PYTORCH).since_stage(3),
    key("override_module_apply", K::Bool, D::Bool(true), PYTORCH).since_stage(3),
    key("pipeline_loading_checkpoint", K::Bool, D::Bool(false), T::NoEffect("there are no pipeline stages"))
        .since_stage(3),
    key("enable_sanity_checks", K::Bool, D::Bool(false), T::NoEffect("the checks are always on")),
    key("log_trace_cache_warnings", K::Bool, D::Bool(false), T::NotYet("changes of the trace are not logged"))
        .since_stage(3),
    key("save_muon_momentum_buffer_in_memory", K::Bool, D::Bool(false), T::NoEffect("there is no Muon optimizer")),
    section("leaf_module", LEAF_MODULE).since_stage(3),
    // ZeRO++, MiCS, ZenFlow.
    key(
        "zero_hpz_partition_size",
        K::COUNT,
        D::Int(1),
        T::NotYet("there is no secondary partition: gathers reach over all ranks"),
    ),
    key("zero_quantized_weights", K::Bool, D::Bool(false), QUANTIZED),
    key("zero_quantized_nontrainable_weights", K::Bool, D::Bool(false), QUANTIZED),
    key("zero_quantized_gradients", K::Bool, D::Bool(false), QUANTIZED),
    key("zeropp_loco_param", K::Section(LOCO, Gate::Given), D::Empty, QUANTIZED),
    key("mics_shard_size", K::INT, D::Int(-1), NO_MICS),
    key("mics_hierarchical_params_gather", K::Bool, D::Bool(false), T::NoEffect("there is no MiCS")),
    key(
        "zenflow",
        K::Section(ZENFLOW, Gate::Given),
        D::Empty,
        T::Refused("ZenFlow applies most gradients late, which is another training; remove the section"),
    ),
    // Deprecated.
    key("cpu_offload", K::Bool, D::Null, T::Renamed { to: "offload_optimizer", change: cpu_offload, deprecated: true }),
    key(
        "cpu_offload_param",
        K::Bool,
        D::Null,
        T::Renamed { to: "offload_param", change: cpu_offload, deprecated: true },
    ),
    key(
        "cpu_offload_params",
        K::Bool,
        D::Null,
        T::Renamed { to: "offload_param", change: cpu_offload, deprecated: true },
    ),
    key(
        "cpu_offload_use_pin_memory",
        K::Bool,
        D::Null,
        T::NoEffect("deprecated; write `pin_memory` in `offload_param` or `offload_optimizer`"),
    ),
    key(
        "stage3_gather_fp16_weights_on_model_save",
        K::Bool,
        D::Null,
        T::Renamed { to: "stage3_gather_16bit_weights_on_model_save", change: Node::clone, deprecated: true },
    ),
    // DeepSpeed takes the names without prefix too.
    alias("max_live_parameters", K::COUNT, "stage3_max_live_parameters"),
    alias("max_reuse_distance", K::COUNT, "stage3_max_reuse_distance"),
    alias("prefetch_bucket_size", K::COUNT, "stage3_prefetch_bucket_size"),
    alias("param_persistence_threshold", K::COUNT, "stage3_param_persistence_threshold"),
    alias("model_persistence_threshold", K::COUNT, "stage3_model_persistence_threshold"),
    alias("gather_16bit_weights_on_model_save", K::Bool, "stage3_gather_16bit_weights_on_model_save"),
    alias("module_granularity_threshold", K::INT, "stage3_module_granularity_threshold"),
    alias("use_all_reduce_for_fetch_params", K::Bool, "stage3_use_all_reduce_for_fetch_params"),
    alias("allgather_sequential", K::Bool, "stage3_allgather_sequential"),
];

const DEVICE: Key = key("device", K::OneOf(&["none", "cpu", "nvme"]), D::Text("none"), T::Acted);
const NVME_PATH: Key = key("nvme_path", K::Text, D::Null, T::Acted);
const PIN_MEMORY: Key = key("pin_memory", K::Bool, D::Bool(true), T::Acted);

const OFFLOAD_OPTIMIZER: &[Key] = &[
    DEVICE,
    NVME_PATH,
    key("buffer_count", K::ONE_UP, D::Int(4), T::Acted),
    PIN_MEMORY,
    // DeepSpeed has them off unless asked for; overlapping changes no number.
    key("pipeline_read", K::Bool, D::Bool(true), T::Acted),
    key("pipeline_write", K::Bool, D::Bool(true), T::Acted),
    key("fast_init", K::Bool, D::Bool(false), BEGINS_ON_DISK),
    key("ratio", K::FRACTION, D::Num(1.0), WHOLE),
    key("super_offload", K::Bool, D::Bool(false), SUPER_OFFLOAD),
    key("cpuadam_cores_perc", K::FRACTION, D::Num(0.8), SUPER_OFFLOAD),
];

const OFFLOAD_PARAM: &[Key] = &[
    DEVICE,
    NVME_PATH,
    key("buffer_count", K::ONE_UP, D::Int(5), T::Acted),
    key("buffer_size", K::ONE_UP, D::Int(100_000_000), T::Acted),
    key("max_in_cpu", K::COUNT, D::Int(1_000_000_000), T::Acted),
    PIN_MEMORY,
];

const LEAF: T = T::NotYet("modules are not gathered whole; parameters are gathered as they are used");
const LEAF_MODULE: &[Key] = &[
    key("classes", K::Texts, D::Empty, LEAF),
    key("names", K::Texts, D::Empty, LEAF),
    key("name_suffixes", K::Texts, D::Empty, LEAF),
];

const LOCO: &[Key] =
    &[key("err_beta", K::FRACTION, D::Num(0.8), T::Quiet), key("reset_T", K::ONE_UP, D::Int(1024), T::Quiet)];

const ZENFLOW: &[Key] = &[
    key("topk_ratio", K::FRACTION, D::Num(0.1), T::Quiet),
    key("select_strategy", K::OneOf(&["auto", "step", "epoch"]), D::Text("auto"), T::Quiet),
    key("select_interval", K::ONE_UP, D::Null, T::Quiet),
    key("update_interval", K::ONE_UP, D::Null, T::Quiet),
    key("overlap_step", K::Bool, D::Bool(false), T::Quiet),
    key("offload", K::Bool, D::Bool(false), T::Quiet),
    key("auto_ratio", K::FRACTION, D::Num(0.99), T::Quiet),
    key("full_warm_up_rounds", K::COUNT, D::Int(0), T::Quiet),
    key("pt_reserved_cores_perc", K::FRACTION, D::Num(0.5), T::Quiet),
    key("steps_per_epoch", K::ONE_UP, D::Null, T::Quiet),
];

fn cpu_offload(on: &Node) -> Node {
    match on {
        Node::Bool(true) => Node::Map(vec![("device".to_owned(), Node::from("cpu"))]),
        _ => Node::Null,
    }
}
