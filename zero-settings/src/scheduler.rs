//! `scheduler`: converts DeepSpeed's keys to a [`Schedule`], and back.

use super::node::Node;
use super::optimizer::OptimizerPlan;
use super::reader::Reader;
use crate::schedule::{OneCycle, Schedule};

/// Reads `scheduler`; a missing peak rate defaults to the optimizer's learning rate.
pub(super) fn read(
    top: &Reader<'_>,
    optimizer: Option<&OptimizerPlan>,
    learning_rate: Option<f64>,
) -> Option<Schedule> {
    let (name, params) = top.tagged("scheduler")?;
    let base_lr = optimizer.map(|optimizer| optimizer.lr);
    let mut known: Vec<(&str, Node)> = vec![("base_lr", base_lr.unwrap_or(OptimizerPlan::DEFAULT.lr).into())];
    let is_auto = params.is_auto("warmup_max_lr");
    let has_top = ["WarmupLR", "WarmupDecayLR"].contains(&name);
    if is_auto || has_top && params.absent("warmup_max_lr") {
        let max_lr = base_lr.or(learning_rate).unwrap_or_else(|| {
            if !is_auto && name == "WarmupLR" {
                params.missing("warmup_max_lr", "the file has no optimizer whose learning rate could be used");
            }
            params.get("warmup_max_lr")
        });
        if !is_auto && name == "WarmupDecayLR" && max_lr != params.get::<f64>("warmup_max_lr") {
            params.warn(
                "warmup_max_lr",
                &format!("is not given: the optimizer's lr, {max_lr}, is used (DeepSpeed uses 0.001)"),
            );
        }
        if is_auto {
            params.filled("warmup_max_lr", "the optimizer's lr", Some(max_lr.into()));
        }
        known.push(("warmup_max_lr", max_lr.into()));
    }
    let ends = ["WarmupDecayLR", "WarmupCosineLR"].contains(&name);
    if ends {
        known.push(("total_num_steps", Node::Null));
    }
    if name == "OneCycle" {
        for key in ["cycle_min_lr", "cycle_max_lr"] {
            if params.absent(key) {
                params.missing(key, "OneCycle requires it");
                known.push((key, Node::Int(0)));
            }
        }
        for (second, first) in [
            ("cycle_second_step_size", "cycle_first_step_size"),
            ("cycle_second_stair_count", "cycle_first_stair_count"),
        ] {
            if params.absent(second) {
                known.push((second, params.get::<usize>(first).into()));
            }
        }
    }
    let mut values = params.values(known);
    if ends {
        if params.absent("total_num_steps") {
            params.missing("total_num_steps", "the schedule needs the total number of optimizer steps, or \"auto\"");
        }
        let total: usize = params.get("total_num_steps");
        if (1..params.get::<usize>("warmup_num_steps")).contains(&total) {
            params.warn("total_num_steps", "the training ends before the warm-up does");
        }
        values.set("total_num_steps", total.into());
    }
    let mut schedule: Schedule = Node::map([("type", name.into()), ("params", values)]).to()?;
    if let Some(lr) = base_lr.filter(|lr| *lr != schedule.top_lr()) {
        let which = if matches!(schedule, Schedule::LrRangeTest { .. }) { "first" } else { "highest" };
        let told =
            format!("the optimizer's lr, {lr}, has no effect: this schedule's {which} rate is {}", schedule.top_lr());
        top.warn("scheduler", &told);
    }
    if let Schedule::OneCycle(cycle) = &mut schedule
        && !params.get::<bool>("cycle_momentum")
    {
        cycle.momentum = None;
    }
    Some(schedule)
}

/// Converts to DeepSpeed's section.
impl From<Schedule> for Node {
    fn from(schedule: Schedule) -> Self {
        let mut node = Node::of(&schedule);
        if matches!(schedule, Schedule::OneCycle(OneCycle { momentum: None, .. })) {
            node.set("params.cycle_momentum", false.into());
        }
        node
    }
}
