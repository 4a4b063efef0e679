//! The summary of a run: measured figures alongside the ZeRO formulas.

use serde::{Deserialize, Serialize};
use zero_core::accounting::{StateBytes, WireBytes};

use super::plan::Plan;
use super::predict::SpeedOfLight;
use super::training::Measured;
use crate::memory::format_bytes;
use crate::metrics::{EpochMetrics, number_or_nan};

/// The results of a run, printed on standard output with `--json`.
// A field for each of `--json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Preset or folder.
    pub model: String,
    /// Number of parameters.
    pub parameters: usize,
    /// ZeRO stage.
    pub stage: u8,
    /// Number of ranks.
    pub ranks: usize,
    /// Steps trained.
    pub steps: usize,
    /// Rows per rank and micro-batch.
    pub batch: usize,
    /// Micro-batches per step.
    pub accumulation: usize,
    /// Tokens per row; 1 if rows have none.
    pub seq: usize,
    /// Unit of speeds: `tokens`, or `rows` if they have no tokens.
    pub unit: String,
    /// True if `exp(loss)` is a perplexity.
    pub has_perplexity: bool,
    /// Loss of the first step, before its update.
    #[serde(deserialize_with = "number_or_nan")]
    pub loss_first: f64,
    /// Loss of the last step, before its update.
    #[serde(deserialize_with = "number_or_nan")]
    pub loss_last: f64,
    /// Skipped updates.
    pub skipped: usize,
    /// Epochs, including an unfinished one that was evaluated.
    pub epochs: Vec<EpochMetrics>,
    /// Median over the steps, in `unit` per second; without the first step if there are more, and over a sample of thousands.
    pub tokens_per_second: f64,
    /// The least seconds of a step on this machine, by a short probe; absent for small models, and if several machines or devices compute.
    #[serde(default)]
    pub speed_of_light: Option<SpeedOfLight>,
    /// The fraction of that speed that the run reached.
    #[serde(default)]
    pub speed_of_light_share: Option<f64>,
    /// Measured bytes of model state on the rank that held most, in the last step.
    pub model_state_bytes: StateBytes,
    /// The same by the ZeRO formula.
    pub model_state_bytes_formula: StateBytes,
    /// Peak bytes of full gradients waiting to be reduced, on any rank (stages 2 and 3).
    pub gradients_in_flight_bytes_peak: u64,
    /// Peak bytes of gathered parameters, on any rank.
    pub gathered_bytes_peak: u64,
    /// Measured bytes received per rank in the last step.
    pub wire_bytes_per_step: u64,
    /// The same by the ZeRO formula, which accounts for the persistence threshold at stage 3.
    pub wire_bytes_per_step_formula: u64,
    /// Bytes that the same rank would have received without quantisation.
    pub wire_bytes_per_step_uncompressed: u64,
    /// Bytes received from ranks on other machines, on the rank that received most from there.
    pub wire_bytes_per_step_from_other_machines: u64,
    /// Bytes of memory, in large blocks, that the steps after the second newly took from the system: 0 if every buffer of a
    /// step is reused from the step before. Absent if the program's allocator does not count them.
    pub fresh_bytes_after_two_steps: Option<u64>,
    /// Peak memory of the process.
    pub peak_rss_bytes: u64,
    /// Checkpoints saved.
    pub checkpoints: usize,
    /// Total time that training stalled for them.
    pub checkpoint_stall_seconds: f64,
    /// A sample of the trained model's output.
    pub sample: Option<String>,
    /// Messages about the choice of the model, the recipe and the tier.
    pub notice: Option<String>,
}

impl Summary {
    pub(super) fn new(plan: &Plan, measured: &Measured) -> Self {
        let steps = &measured.steps;
        let (last, [in_flight, gathered, memory]) = (&steps.last, steps.peaks);
        let state = last.ranks.iter().map(|rank| rank.model_state_bytes).max_by_key(StateBytes::total);
        let wire = last.ranks.iter().map(|rank| rank.wire_bytes).max_by_key(WireBytes::total).unwrap_or_default();
        Self {
            model: plan.model.name.clone(),
            parameters: plan.model.profile.num_params(),
            stage: plan.zero.stage.number(),
            ranks: plan.plan.world,
            steps: steps.number,
            batch: plan.plan.batch.micro,
            accumulation: plan.plan.batch.accumulation,
            seq: plan.data.units(),
            unit: plan.data.unit().to_string(),
            has_perplexity: plan.data.has_perplexity,
            loss_first: steps.loss_first,
            loss_last: last.loss,
            skipped: steps.skipped,
            epochs: measured.epochs.clone(),
            tokens_per_second: steps.speeds.median(),
            speed_of_light: plan.light,
            speed_of_light_share: plan.light.map(|light| light.share(steps.speeds.median(), plan.tokens_per_step())),
            model_state_bytes: state.unwrap_or_default(),
            model_state_bytes_formula: plan.state_formula(),
            gradients_in_flight_bytes_peak: in_flight,
            gathered_bytes_peak: gathered,
            wire_bytes_per_step: wire.total(),
            wire_bytes_per_step_uncompressed: wire.uncompressed.total(),
            wire_bytes_per_step_formula: plan.wire_bytes(),
            wire_bytes_per_step_from_other_machines: {
                let received = last.ranks.iter().map(|rank| rank.wire_bytes.from_other_machines);
                received.max().unwrap_or(0)
            },
            fresh_bytes_after_two_steps: steps.fresh_bytes,
            peak_rss_bytes: memory,
            checkpoints: measured.saves,
            checkpoint_stall_seconds: measured.stall_seconds,
            sample: measured.sample.clone(),
            notice: plan.notice.clone(),
        }
    }
}

impl core::fmt::Display for Summary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (state, formula) = (self.model_state_bytes, self.model_state_bytes_formula);
        let bytes = |f: &mut core::fmt::Formatter<'_>, name: &str, measured: u64, formula: u64| {
            let ratio = if formula == 0 { String::new() } else { format!("{:.3}", measured as f64 / formula as f64) };
            writeln!(f, "  {name:<28} {:>12} {:>12} {ratio:>8}", format_bytes(measured), format_bytes(formula))
        };
        // Rows that are told where there is something to tell.
        let rows = |f: &mut core::fmt::Formatter<'_>, rows: &[(bool, &str, String)]| {
            let mut told = rows.iter().filter(|(is_told, ..)| *is_told);
            told.try_for_each(|(_, name, figures)| writeln!(f, "  {name:<28} {figures}"))
        };
        let [first, last] = [self.loss_first, self.loss_last];
        let eval = self.epochs.last().and_then(|epoch| epoch.eval.as_deref()).unwrap_or_default();
        let of_perplexity = |loss: f64| format!("{:>12.2}", loss.exp());
        rows(
            f,
            &[
                (true, "", format!("{:>12} {:>12}", "first", "last")),
                (true, "loss", format!("{first:>12.4} {last:>12.4}")),
                (self.has_perplexity, "perplexity", [first, last].map(of_perplexity).join(" ")),
            ],
        )?;
        for (name, value) in eval {
            rows(f, &[(true, &format!("held-out {name}"), format!("{:>12} {value:>12.4}", ""))])?;
        }
        let share = self.speed_of_light_share.unwrap_or(0.0);
        let bound = self.speed_of_light.map_or("", |light| light.bound());
        let light = format!("{share:>12.3} bound by {bound}");
        let held_out = eval.first().map_or(String::new(), |(_, loss)| format!("{:>12} {}", "", of_perplexity(*loss)));
        rows(
            f,
            &[
                (self.has_perplexity && !eval.is_empty(), "held-out perplexity", held_out),
                (self.skipped > 0, "skipped updates", format!("{:>12} {:>12}", "", self.skipped)),
                (true, &format!("{} per second", self.unit), format!("{:>12.1}", self.tokens_per_second)),
                (self.speed_of_light.is_some(), "share of the speed of light", light),
                (true, "bytes per rank", format!("{:>12} {:>12} {:>8}", "measured", "formula", "ratio")),
            ],
        )?;
        bytes(f, "  parameters", state.parameters, formula.parameters)?;
        bytes(f, "  gradients (peak)", state.gradients, formula.gradients)?;
        bytes(f, "  optimizer", state.optimizer, formula.optimizer)?;
        bytes(f, "  model state", state.total(), formula.total())?;
        let (wire, uncompressed) = (self.wire_bytes_per_step, self.wire_bytes_per_step_uncompressed);
        bytes(f, "  received, per step", wire, self.wire_bytes_per_step_formula)?;
        let (across, fresh) = (self.wire_bytes_per_step_from_other_machines, self.fresh_bytes_after_two_steps);
        let size = |bytes: u64| format!("{:>12}", format_bytes(bytes));
        let stall = self.checkpoint_stall_seconds / self.checkpoints as f64;
        rows(
            f,
            &[
                (uncompressed != wire, "  without quantization", size(uncompressed)),
                (across > 0, "  from other machines", size(across)),
                (true, "  gradients not yet reduced", size(self.gradients_in_flight_bytes_peak)),
                (true, "  gathered at once", size(self.gathered_bytes_peak)),
                (self.checkpoints > 0, "checkpoints", format!("{:>12} {stall:>12.2} s stall each", self.checkpoints)),
                (fresh.is_some(), "new memory after step 2", size(fresh.unwrap_or(0))),
            ],
        )?;
        write!(f, "  {:<28} {}", "peak memory of the process", size(self.peak_rss_bytes))?;
        if let Some(sample) = &self.sample {
            write!(f, "\n\n{sample}")?;
        }
        Ok(())
    }
}
