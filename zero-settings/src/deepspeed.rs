//! Checks of a DeepSpeed configuration that involve more than one key.

use zero_core::Stage;

use super::error::{Findings, ProblemKind};
use super::keys::DEEPSPEED;
use super::node::Node;
use super::rule::{Gate, Key, Kind};
use super::walk::{is_none, join, walk};

/// Returns `node` with the values of `others` for keys that it lacks. A tree with problems stays as it is, for
/// [`check`] to report.
pub(super) fn filled(mut node: Node, others: &Node) -> Node {
    if *others == Node::Null {
        return node;
    }
    let section = node.get("zero_optimization");
    let stage =
        others.at("zero_optimization.stage").filter(|_| matches!(section, None | Some(Node::Null | Node::Map(_))));
    if let Some(stage) = stage
        && node.at("zero_optimization.stage").is_none_or(|given| *given == Node::Null || given.is_auto())
    {
        // The other keys are checked by the stage.
        node.set("zero_optimization.stage", stage.clone());
    }
    let mut findings = Findings::new("");
    let (given, _) = check(&node, &mut findings);
    if !findings.problems.is_empty() {
        return node;
    }
    let mut others = others.clone();
    for (one, other) in [("fp16", "bf16"), ("bf16", "fp16")] {
        if given.at(&format!("{one}.enabled")) == Some(&Node::Bool(true)) {
            others.remove(&format!("{other}.enabled"));
        }
    }
    fill(&mut node, &given, &others, DEEPSPEED, "");
    node
}

/// Adds the values of `others` for keys that `given` lacks to `node`; `given` is `node` under canonical names.
fn fill(node: &mut Node, given: &Node, others: &Node, keys: &[Key], path: &str) {
    let Node::Map(others) = others else { return };
    for (name, value) in others {
        let Some(key) = Key::find(keys, name) else { continue };
        let path = join(path, name);
        match (given.get(name).filter(|given| **given != Node::Null), key.kind) {
            (None, Kind::Tagged(_)) if value.get("type").is_none() => {}
            (None, _) => node.set(&path, value.clone()),
            (Some(given), Kind::Section(keys, Gate::Given | Gate::Enabled)) => fill(node, given, value, keys, &path),
            (Some(given), Kind::Tagged(tagged)) => {
                let is = |name: &str| given.get("type").and_then(Node::as_text) == Some(name);
                let (params, values) = (given.get("params"), value.get("params"));
                if let Some(((_, keys), values)) = tagged.variants.iter().find(|(name, _)| is(name)).zip(values) {
                    fill(node, params.unwrap_or(&Node::Null), values, keys, &join(&path, "params"));
                }
            }
            _ => {}
        }
    }
}

/// Checks `node` against the key table and its keys against each other; returns it with canonical names, and the stage.
pub(super) fn check(node: &Node, findings: &mut Findings) -> (Node, Stage) {
    let mut node = node.clone();
    old_form(&mut node, findings);
    let stage = node.at("zero_optimization.stage");
    if stage.is_some_and(Node::is_auto) {
        let supply = "the meaning of other keys depends on the stage; give a number from 0 to 3".to_owned();
        findings.problem("zero_optimization.stage", ProblemKind::Unfilled(supply));
    }
    let number = stage.and_then(Node::as_usize).and_then(|number| u8::try_from(number).ok());
    let known = number.and_then(|number| Stage::try_from(number).ok());
    // The walk reports a stage that does not exist.
    let is_wrong = stage.is_some_and(|stage| *stage != Node::Null) && known.is_none();
    let stage = known.unwrap_or_default();
    let tree = walk(&node, DEEPSPEED, stage.number(), findings);
    if matches!(tree, Node::Map(_)) {
        offload(&tree, if is_wrong { Stage::Parameters } else { stage }, findings);
        if tree.get("gradient_clipping").is_none_or(|value| *value == Node::Null) {
            let message = "not given: gradients are clipped to norm 1, as in DeepSpeed since 0.19.6 (earlier versions \
                did not clip); write 1.0, or 0 to turn clipping off";
            findings.warn("gradient_clipping", message);
        }
    }
    (tree, stage)
}

/// Converts DeepSpeed's oldest form: `zero_optimization: true` means stage 1.
fn old_form(node: &mut Node, findings: &mut Findings) {
    if let Some(Node::Bool(on)) = node.get("zero_optimization") {
        let stage = usize::from(*on);
        findings.warn("zero_optimization", format!("deprecated; write {{\"stage\": {stage}}}"));
        node.set("zero_optimization", Node::Null);
        node.set("zero_optimization.stage", stage.into());
    }
}

fn offload(tree: &Node, stage: Stage, findings: &mut Findings) {
    let mut folder = None;
    for section in ["zero_optimization.offload_optimizer", "zero_optimization.offload_param"] {
        let Some(offload) = tree.at(section) else { continue };
        let device = offload.get("device").and_then(Node::as_text).filter(|word| !is_none(word) && *word != "auto");
        let Some(device) = device else { continue };
        if section.ends_with("param") && !stage.shards_parameters() {
            let message = format!(
                "parameters can only be offloaded at stage 3, and this is stage {stage}: raise the \
                stage, or set the device to none"
            );
            findings.conflict(&format!("{section}.device"), message);
        }
        let path = offload.get("nvme_path").and_then(Node::as_text).filter(|path| !is_none(path) && !path.is_empty());
        match path {
            _ if !device.eq_ignore_ascii_case("nvme") => {}
            None => {
                let what = "the device is nvme; give the folder to write to".to_owned();
                findings.problem(&format!("{section}.nvme_path"), ProblemKind::Missing(what));
            }
            Some(path) => {
                let first = *folder.get_or_insert(path);
                if first != path {
                    let message =
                        format!("has no effect: parameters are stored in the optimizer state's folder, {first}");
                    findings.warn(&format!("{section}.nvme_path"), message);
                }
            }
        }
    }
    let path = tree.at("activation_checkpointing.nvme_path").and_then(Node::as_text);
    if let Some((first, path)) = folder.zip(path).filter(|(first, path)| first != path) {
        let message =
            format!("{path} differs from the folder of model state, {first}: a rank uses one folder; give the same");
        findings.conflict("activation_checkpointing.nvme_path", message);
    }
}
