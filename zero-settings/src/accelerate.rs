//! Converts an Accelerate YAML to the DeepSpeed configuration that Accelerate would generate from it.

use super::error::{Findings, ProblemKind};
use super::keys::ACCELERATE;
use super::node::Node;
use super::walk::{is_none, walk};

/// Contents of an Accelerate file.
pub(super) struct Accelerate {
    /// DeepSpeed keys; replaced by those of `deepspeed_file` if there is one.
    pub(super) tree: Node,
    /// DeepSpeed keys that Accelerate would add if nobody gives them.
    pub(super) defaults: Node,
    /// DeepSpeed path, file, and path within that file.
    pub(super) names: Vec<(String, String, String)>,
    /// `num_processes`.
    pub(super) processes: Option<usize>,
    /// `deepspeed_config.deepspeed_config_file`, as written.
    pub(super) deepspeed_file: Option<String>,
}

/// Keys in Accelerate's `deepspeed_config`, and DeepSpeed's. Accelerate rejects them if `deepspeed_config_file` is set.
const PLUGIN: &[(&str, &str)] = &[
    ("zero_stage", "zero_optimization.stage"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("gradient_clipping", "gradient_clipping"),
    ("offload_optimizer_device", "zero_optimization.offload_optimizer.device"),
    ("offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    ("offload_param_device", "zero_optimization.offload_param.device"),
    ("offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"),
    ("zero3_save_16bit_model", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
];

/// DeepSpeed's offload sections.
const SECTIONS: [&str; 2] = ["offload_optimizer", "offload_param"];

/// Keys of an Accelerate file; any of them identifies it.
const MARKS: &str = "distributed_type compute_environment deepspeed_config num_processes num_machines mixed_precision";

const SUPPORTED: &str = "DEEPSPEED, FSDP, NO, MULTI_GPU, MULTI_CPU or another MULTI_ type";
const DATA_PARALLEL: &str = "MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU \
    MULTI_NEURON";

/// FSDP's strategies, in the order of Accelerate's numbers (from 1), each with the equivalent ZeRO stage and a flag for
/// sharding within machines.
const STRATEGIES: [(&str, usize, bool); 5] = [
    ("FULL_SHARD", 3, false),
    ("SHARD_GRAD_OP", 2, false),
    ("NO_SHARD", 0, false),
    ("HYBRID_SHARD", 3, true),
    ("HYBRID_SHARD_ZERO2", 2, true),
];

pub(super) fn is_accelerate(node: &Node) -> bool {
    MARKS.split(' ').any(|mark| node.get(mark).is_some())
}

/// Checks the file's own keys and turns them into DeepSpeed's.
pub(super) fn convert(file: &str, node: &Node, findings: &mut Findings) -> Accelerate {
    // Stage 3: stage-dependent checks run on DeepSpeed's keys.
    let yaml = walk(node, ACCELERATE, 3, findings);
    let at = |path: &str| yaml.at(path).filter(|value| **value != Node::Null);
    let processes = at("num_processes").and_then(Node::as_usize);
    if processes == Some(0) {
        findings.problem("num_processes", ProblemKind::value("at least 1", 0));
    }
    let kind = at("distributed_type").and_then(Node::as_text).unwrap_or_default().to_ascii_uppercase();
    let processes = processes.or((kind == "NO").then_some(1));
    let deepspeed = distributed(&kind, processes, findings);
    let named = |path: &str, shown: &str| (path.to_owned(), file.to_owned(), shown.to_owned());
    let of_zero = |key: &str, shown: &str| named(&format!("zero_optimization.{key}"), shown);
    let mut names = vec![named("num_processes", "num_processes")];
    if deepspeed {
        names.extend(PLUGIN.iter().map(|(name, path)| named(path, &format!("deepspeed_config.{name}"))));
        names.extend(SECTIONS.map(|section| of_zero(section, &format!("deepspeed_config.{section}_device"))));
    }
    if kind == "FSDP" {
        let strategy = strategy(&at);
        names.extend(["stage", "mics_shard_size"].map(|key| of_zero(key, strategy)));
        names.extend(SECTIONS.map(|section| of_zero(section, OFFLOAD)));
    }
    let deepspeed_file = at("deepspeed_config.deepspeed_config_file")
        .and_then(Node::as_text)
        .filter(|name| deepspeed && !is_none(name) && !name.is_empty())
        .map(str::to_owned);
    let mut accelerate =
        Accelerate { tree: Node::Map(Vec::new()), defaults: Node::Null, names, processes, deepspeed_file };

    let precision = precision(at("mixed_precision"), findings);
    if let Some(inner) = &accelerate.deepspeed_file {
        let refuse = |path: String, instead: &str, findings: &mut Findings| {
            let message = format!(
                "cannot be combined with deepspeed_config_file (Accelerate rejects it too): remove it here and \
                write `{instead}` in {inner}"
            );
            findings.conflict(&path, message);
        };
        for (name, instead) in PLUGIN {
            if at(&format!("deepspeed_config.{name}")).is_some() {
                refuse(format!("deepspeed_config.{name}"), instead, findings);
            }
        }
        if at("mixed_precision").is_some() {
            refuse("mixed_precision".to_owned(), "fp16.enabled` or `bf16.enabled", findings);
        }
        accelerate.names.retain(|(path, _, _)| path == "num_processes");
        return accelerate;
    }

    let tree = &mut accelerate.tree;
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
        .into_iter()
        .for_each(|key| tree.set(key, "auto".into()));
    if let Some(section) = precision {
        tree.set(&format!("{section}.enabled"), true.into());
    }
    if !deepspeed {
        accelerate.defaults.set("gradient_clipping", Node::Int(0));
        other_plugin(at("deepspeed_config"), "deepspeed_config", &kind, findings);
        match kind == "FSDP" {
            true => fsdp(&at, processes, tree, findings),
            false => other_plugin(at("fsdp_config"), "fsdp_config", &kind, findings),
        }
        return accelerate;
    }
    other_plugin(at("fsdp_config"), "fsdp_config", &kind, findings);
    tree.set("gradient_clipping", "auto".into());
    accelerate.defaults.set("zero_optimization.stage", Node::Int(2));
    for (name, path) in PLUGIN {
        let value = match at(&format!("deepspeed_config.{name}")) {
            None => continue,
            Some(Node::Text(word)) if name.ends_with("nvme_path") && is_none(word) => continue,
            Some(value) => value.clone(),
        };
        tree.set(path, value);
    }
    let off = at("deepspeed_config.zero3_init_flag") == Some(&Node::Bool(false));
    if off && tree.at("zero_optimization.stage") == Some(&Node::Int(3)) {
        let path = "deepspeed_config.zero3_init_flag";
        findings.warn(path, "has no effect: at stage 3 parameters are always created as shards");
    }
    accelerate
}

fn other_plugin(section: Option<&Node>, name: &str, kind: &str, findings: &mut Findings) {
    if section.is_some_and(|section| !section.is_empty()) {
        findings.warn(name, format!("has no effect: distributed_type is {kind}"));
    }
}

const OFFLOAD: &str = "fsdp_config.fsdp_offload_params";

/// Returns the key that holds the sharding strategy.
fn strategy<'n>(at: &impl Fn(&str) -> Option<&'n Node>) -> &'static str {
    const STRATEGY: &str = "fsdp_config.fsdp_sharding_strategy";
    if at(STRATEGY).is_some() { STRATEGY } else { "fsdp_config.fsdp_reshard_after_forward" }
}

/// Sets keys that shard as PyTorch's FSDP would.
fn fsdp<'n>(
    at: &impl Fn(&str) -> Option<&'n Node>,
    processes: Option<usize>,
    tree: &mut Node,
    findings: &mut Findings,
) {
    let path = strategy(at);
    let found = match at(path) {
        None | Some(Node::Bool(true)) => Some(0),
        Some(Node::Bool(false)) => Some(1),
        Some(given) => STRATEGIES.iter().enumerate().position(|(at, (name, ..))| {
            let word = given.as_text().unwrap_or_default();
            given.as_usize().or(word.parse().ok()) == Some(at + 1) || word.eq_ignore_ascii_case(name)
        }),
    };
    let Some(found) = found else {
        let names = STRATEGIES.map(|(name, ..)| name).join(", ");
        let got = at(path).map(Node::to_string).unwrap_or_default();
        let expected = format!("one of {names}, or its number (1 to {})", STRATEGIES.len());
        return findings.problem(path, ProblemKind::value(expected, got));
    };
    let (name, stage, within_machines) = STRATEGIES[found];
    tree.set("zero_optimization.stage", stage.into());
    if within_machines {
        findings.warnings.retain(|warning| warning.path != "num_machines");
    }
    let machines = at("num_machines").and_then(Node::as_usize).unwrap_or(1).max(1);
    match processes {
        Some(processes) if within_machines && processes.is_multiple_of(machines) => {
            tree.set("zero_optimization.mics_shard_size", (processes / machines).into());
        }
        Some(processes) if within_machines => {
            let message = format!(
                "{processes} ranks on {machines} machines: {name} shards within a machine, which requires the same \
                 number of ranks on each"
            );
            findings.conflict("num_processes", message);
        }
        None if within_machines => {
            let what = format!("{name} shards within a machine; give the total number of ranks, and num_machines");
            findings.problem("num_processes", ProblemKind::Missing(what));
        }
        _ => {}
    }
    let is_on = |key: &str| at(key) == Some(&Node::Bool(true));
    if is_on(OFFLOAD) {
        // FSDP's offload includes gradients and the optimizer.
        let sections = SECTIONS.into_iter().take(if stage == 3 { 2 } else { 1 });
        sections.for_each(|section| tree.set(&format!("zero_optimization.{section}.device"), "cpu".into()));
    }
    if is_on("fsdp_config.fsdp_activation_checkpointing") {
        tree.set("activation_checkpointing.cpu_checkpointing", false.into());
    }
}

/// Returns `true` for DeepSpeed and `false` for FSDP or plain data parallelism; reports any other type.
fn distributed(kind: &str, processes: Option<usize>, findings: &mut Findings) -> bool {
    let refuse = |reason: &str, findings: &mut Findings| {
        findings.problem("distributed_type", ProblemKind::refused(kind, reason));
    };
    match kind {
        "DEEPSPEED" => return true,
        "NO" => {
            if let Some(processes) = processes.filter(|processes| *processes > 1) {
                let message = format!("is {processes}, but distributed_type NO runs one process: change one of them");
                findings.conflict("num_processes", message);
            }
        }
        "" => findings.problem("distributed_type", ProblemKind::Missing(format!("give {SUPPORTED}"))),
        "FSDP" => {}
        "XLA" | "TPU" => refuse("TPUs are not available; use GPUs or the CPU", findings),
        "MEGATRON_LM" => {
            refuse("Zero has no Megatron-LM models and no pipeline parallelism; write DEEPSPEED", findings)
        }
        kind if DATA_PARALLEL.split(' ').any(|known| known == kind) => {}
        kind => findings.problem("distributed_type", ProblemKind::value(SUPPORTED, format!("{kind:?}"))),
    }
    false
}

/// Returns the section that `mixed_precision` enables.
fn precision(value: Option<&Node>, findings: &mut Findings) -> Option<&'static str> {
    let word = value.and_then(Node::as_text).unwrap_or_default().to_ascii_lowercase();
    if word == "fp8" {
        findings.problem("mixed_precision", ProblemKind::refused("fp8", "fp8 training is not implemented; write bf16"));
    }
    ["fp16", "bf16"].into_iter().find(|known| *known == word)
}
