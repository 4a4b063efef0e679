//! `zero_optimization.*`.

use crate::auto::Fill;
use crate::node::Node;
use crate::rule::{Fate as T, Gate, Key, Kind as K, keys};

const ALWAYS_BUCKETS: T = T::no_effect("gradients are always reduced through contiguous buckets");
const GATHERS: T = T::no_effect("it does not apply to the all-gather used here");
const PYTORCH: T = T::no_effect("it is a workaround for PyTorch");
const FETCHES: T = T::not_yet("this variant of the all-gather is not implemented");
const SAVES: T = T::not_yet("checkpoints do not have this option");
const SUPER_OFFLOAD: T = T::no_effect("updates of offloaded state overlap with the next forward pass anyway");
const LEAF: T =
    T::no_effect("not needed: parameters are gathered on use, in any order, even if ranks use different ones");
const NO_FEEDBACK: T =
    T::no_effect("error feedback for quantized gradients is not implemented; with AdamW it did not improve the loss");
const DEVICES: K = K::OneOf("none cpu nvme");

/// All keys of `zero_optimization`.
pub(crate) const ZERO: &[Key] = keys! {
    stage = 0 => K::Int { min: 0, max: 3 }, T::ACTED;
    contiguous_gradients = true, reduce_scatter = true => K::Bool, ALWAYS_BUCKETS;
    reduce_bucket_size = 5e8 => K::ONE_UP, T::ACTED.auto(Fill::ReduceBucket);
    use_multi_rank_bucket_allreduce = true => K::Bool, ALWAYS_BUCKETS;
    allgather_partitions = true => K::Bool, GATHERS;
    allgather_bucket_size = 5e8 => K::COUNT, GATHERS;
    overlap_comm = null => K::Bool, T::ACTED;
    // Not DeepSpeed's: updates between comparisons of the ranks' replicas; 0 disables them.
    check_replicas = 0 => K::COUNT, T::ACTED;
    load_from_fp32_weights = true, elastic_checkpoint = false => K::Bool, SAVES;
    round_robin_gradients = false => K::Bool, T::no_effect("each rank already moves only its own shard of a gradient");
    ignore_unused_parameters = true => K::Bool, T::not_yet("unused parameters are never an error");
    legacy_stage1 = false => K::Bool, T::no_effect("there is one implementation of stage 1");
    sub_group_size = 1e9 => K::ONE_UP, T::ACTED;
    offload_optimizer = null => K::Section(keys! {
        device = "none" => DEVICES, T::ACTED;
        nvme_path = null => K::Text, T::ACTED;
        buffer_count = 4 => K::ONE_UP, T::ACTED;
        pin_memory = true => K::Bool, T::ACTED;
        // Off by default in DeepSpeed; overlap does not change any result.
        pipeline_read = true, pipeline_write = true => K::Bool, T::ACTED;
        fast_init = false => K::Bool,
            T::no_effect("optimizer state on disk needs no initial write");
        ratio = 1 => K::FRACTION, T::ACTED;
        super_offload = false => K::Bool, SUPER_OFFLOAD;
        cpuadam_cores_perc = 0.8 => K::FRACTION, SUPER_OFFLOAD;
    }, Gate::Device), T::ACTED.since_stage(1);
    offload_param = null => K::Section(keys! {
        device = "none" => DEVICES, T::ACTED;
        nvme_path = null => K::Text, T::ACTED;
        buffer_count = 5, buffer_size = 1e8 => K::ONE_UP, T::ACTED;
        max_in_cpu = 1e9 => K::COUNT, T::ACTED;
        pin_memory = true => K::Bool, T::ACTED;
    }, Gate::Device), T::ACTED;
    // Stage 3.
    stage3_max_live_parameters = 1e9, stage3_max_reuse_distance = 1e9 => K::COUNT, T::ACTED.since_stage(3);
    stage3_prefetch_bucket_size = 5e7 => K::COUNT, T::ACTED.since_stage(3).auto(Fill::Prefetch);
    stage3_param_persistence_threshold = 100000 => K::COUNT, T::ACTED.since_stage(3).auto(Fill::Persistence);
    // `sys.maxsize`, DeepSpeed's "no limit".
    stage3_model_persistence_threshold = 9223372036854775807 => K::COUNT,
        T::not_yet("the total size of persistent parameters is not limited").since_stage(3);
    stage3_gather_16bit_weights_on_model_save = false => K::Bool, T::ACTED.since_stage(3).auto(Fill::SaveModel);
    stage3_module_granularity_threshold = 0 => K::INT, FETCHES.since_stage(3);
    stage3_use_all_reduce_for_fetch_params = false => K::Bool, FETCHES.since_stage(3);
    stage3_allgather_sequential = false => K::Bool,
        T::no_effect("not needed: each parameter is gathered by its own operation").since_stage(3);
    memory_efficient_linear = true, override_module_apply = true => K::Bool, PYTORCH.since_stage(3);
    pipeline_loading_checkpoint = false => K::Bool, T::no_effect("there are no pipeline stages").since_stage(3);
    enable_sanity_checks = false => K::Bool, T::no_effect("the checks are always on");
    log_trace_cache_warnings = false => K::Bool,
        T::not_yet("changes in the gather order are not logged").since_stage(3);
    save_muon_momentum_buffer_in_memory = false => K::Bool, T::no_effect("the momentum of Muon is sharded, and kept where `offload_optimizer` says");
    leaf_module = null => K::section(keys! { classes = [], names = [], name_suffixes = [] => K::Texts, LEAF; }),
        T::ACTED.since_stage(3);
    // ZeRO++, MiCS, ZenFlow.
    zero_hpz_partition_size = 1 => K::COUNT, T::ACTED.since_stage(3);
    zero_quantized_weights = false, zero_quantized_nontrainable_weights = false => K::Bool, T::ACTED.since_stage(3);
    zero_quantized_weights_format = "int8" => K::OneOf("int8 int4 nf4"), T::ACTED.since_stage(3);
    zero_quantized_gradients = false => K::Bool, T::ACTED;
    zero_quantized_gradients_format = "int8" => K::OneOf("int8 int4 nf4"), T::ACTED;
    zeropp_loco_param = null => K::section(keys! {
        err_beta = 0.8 => K::Decay, T::QUIET;
        reset_T = 1024 => K::ONE_UP, T::QUIET;
    }), NO_FEEDBACK;
    mics_shard_size = -1 => K::INT, T::ACTED.since_stage(1);
    mics_hierarchical_params_gather = false => K::Bool,
        T::no_effect("a rank reads the shards of its group directly, within and across nodes");
    zenflow = null => K::section(keys! {
        topk_ratio = 0.1, auto_ratio = 0.99, pt_reserved_cores_perc = 0.5 => K::FRACTION, T::QUIET;
        select_strategy = "auto" => K::OneOf("auto step epoch"), T::QUIET;
        select_interval = null, update_interval = null, steps_per_epoch = null => K::ONE_UP, T::QUIET;
        overlap_step = false, offload = false => K::Bool, T::QUIET;
        full_warm_up_rounds = 0 => K::COUNT, T::QUIET;
    }), T::refused("ZenFlow applies most gradients late, which changes the training result; remove the section");
    // Deprecated.
    cpu_offload = null => K::Bool, T::renamed("offload_optimizer", cpu_offload);
    cpu_offload_param = null, cpu_offload_params = null => K::Bool, T::renamed("offload_param", cpu_offload);
    cpu_offload_use_pin_memory = null => K::Bool,
        T::no_effect("deprecated; write `pin_memory` in `offload_param` or `offload_optimizer`");
    stage3_gather_fp16_weights_on_model_save = null => K::Bool,
        T::renamed("stage3_gather_16bit_weights_on_model_save", Node::clone);
    // DeepSpeed takes the names without prefix too.
    max_live_parameters = null => K::COUNT, T::alias("stage3_max_live_parameters");
    max_reuse_distance = null => K::COUNT, T::alias("stage3_max_reuse_distance");
    prefetch_bucket_size = null => K::COUNT, T::alias("stage3_prefetch_bucket_size");
    param_persistence_threshold = null => K::COUNT, T::alias("stage3_param_persistence_threshold");
    model_persistence_threshold = null => K::COUNT, T::alias("stage3_model_persistence_threshold");
    gather_16bit_weights_on_model_save = null => K::Bool, T::alias("stage3_gather_16bit_weights_on_model_save");
    module_granularity_threshold = null => K::INT, T::alias("stage3_module_granularity_threshold");
    use_all_reduce_for_fetch_params = null => K::Bool, T::alias("stage3_use_all_reduce_for_fetch_params");
    allgather_sequential = null => K::Bool, T::alias("stage3_allgather_sequential");
};

fn cpu_offload(on: &Node) -> Node {
    Node::map([("device", if *on == Node::Bool(true) { "cpu" } else { "none" }.into())])
}
