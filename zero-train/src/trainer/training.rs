//! The steps of one rank: each is made, recorded, and followed by the work that is due.
//!
//! A step that a device computes by itself ([`RankEngine::is_on_device`]) is recorded once the next one is queued on the
//! device, so that the device has work while metrics are written. A step is recorded at once if something is due after it:
//! evaluation, a checkpoint, the end of an epoch or of the run, a signal.

use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use zero_core::alloc::PageKeeper;
use zero_models::hf_export::{ExportDtype, ExportOptions};

use super::checkpoints::{Best, TrainerState};
use super::integration::RankEngine;
use super::observer::Observer;
use super::plan::Plan;
use super::rows::Reference;
use super::steps::Steps;
use super::{BackendChoice, Measured as Means, Rows, Task};
use crate::config::{LossScale, Precision};
use crate::error::{Result, TrainError, wrong};
use crate::memory::peak_rss_bytes;
use crate::metrics::{EpochMetrics, Evaluated, RankMetrics, RankReport, SaveMetrics, StepMetrics};
use crate::monitor::{Phase, write_whole};
use crate::signals::Signal;
use crate::step::{EngineError, Step, Times};

/// The measurements of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    pub(super) steps: Steps,
    pub(super) epochs: Vec<EpochMetrics>,
    /// Number of checkpoints, and the seconds that training stalled for them.
    pub(super) saves: usize,
    pub(super) stall_seconds: f64,
    /// The signal that ended it before its last step.
    pub(super) signal: Option<Signal>,
    /// A sample of the trained model's output.
    pub(super) sample: Option<String>,
}

/// Maximum number of consecutive skipped updates before a run gives up. A dynamic loss scale ends the run itself, at its minimum.
const MOST_SKIPPED: usize = 20;

/// The training of one rank, from step to step.
// What it was made of, then where it is.
pub(super) struct Training<'a, 'p, T> {
    task: &'a T,
    engine: &'a mut dyn RankEngine,
    plan: &'a Plan,
    /// Present only on rank 0.
    observer: Option<&'a Mutex<Observer<'p>>>,
    allocator: Option<&'a PageKeeper>,
    peak_flops: Option<f64>,
    state: TrainerState,
    reference: Rc<Reference>,
    measured: Measured,
    /// Sum and number of training losses since the last checkpoint, for --keep-best without --eval.
    since_save: (f64, usize),
    /// Bytes that the allocator had taken from the system when the last step was recorded.
    fresh_bytes: Option<u64>,
    /// The last step, until it is recorded.
    made: Option<Made>,
    /// Number of consecutive skipped updates.
    in_a_row: usize,
    /// The step of the last checkpoint.
    saved: usize,
}

/// A step that a rank has made.
struct Made {
    /// Number of the step, from 1.
    step: usize,
    outcome: Step,
    /// Mean loss of this rank's micro-batches.
    loss: f64,
    /// This rank's rows of micro-batches whose loss is not finite.
    odd: Vec<usize>,
    /// Tokens of this rank's rows, if the task counts them.
    tokens: Option<usize>,
    elapsed: Duration,
    lr: f64,
    loss_scale: f64,
    mine: RankMetrics,
    times: Times,
    device_bytes: Option<(u64, u64)>,
}

impl<'a, 'p, T: Task> Training<'a, 'p, T> {
    pub(super) fn new(
        task: &'a T,
        engine: &'a mut dyn RankEngine,
        plan: &'a Plan,
        observer: Option<&'a Mutex<Observer<'p>>>,
        allocator: Option<&'a PageKeeper>,
        state: TrainerState,
        reference: Result<Reference, Signal>,
    ) -> Self {
        let signal = reference.as_ref().err().copied();
        Self {
            task,
            plan,
            observer,
            allocator,
            peak_flops: engine.peak_flops(),
            engine,
            saved: state.step,
            state,
            reference: Rc::new(reference.unwrap_or_default()),
            measured: Measured { signal, ..Measured::default() },
            since_save: (0.0, 0),
            fresh_bytes: allocator.map(|keeper| keeper.stats().fresh_bytes),
            made: None,
            in_a_row: 0,
        }
    }

    /// Calls `what` with the observer, on rank 0 only.
    pub(super) fn observe(&self, what: impl FnOnce(&mut Observer<'_>)) {
        if let Some(observer) = self.observer {
            what(&mut observer.lock().expect("the observer is used by rank 0 alone"));
        }
    }

    fn say(&self, line: &str) {
        self.observe(|observer| observer.say(line));
    }

    /// Begins a phase, whose memory is sampled from another thread.
    pub(super) fn phase(&self, phase: Phase) {
        self.observe(|observer| {
            let probe = self.engine.memory_probe();
            observer.begin(phase, move || probe().map(|(in_use, _)| in_use));
        });
    }

    /// Evaluates one row and predicts it, so that an evaluation that fails is found before an epoch of training.
    pub(super) fn try_evaluation(&self) -> Result<()> {
        if self.measured.signal.is_some() {
            return Ok(());
        }
        let data = &self.plan.data;
        let first = Rows::from(&[data.order.rows][..]);
        let first = if data.held_out > 0 { first.with(&self.reference) } else { first };
        if data.held_out > 0 && self.engine.evaluate(&first)?.is_empty() {
            let told = "the task's `evaluate` returned no values: expected the loss first, then any other metrics";
            return Err(TrainError::Run(told.into()));
        }
        let file = self.plan.predictions.as_ref().filter(|_| data.held_out + data.unlabelled > 0);
        let samples = (self.plan.eval_samples > 0).then_some(self.plan.eval_samples);
        if (file.is_some() || samples.is_some()) && self.engine.predict(&first)?.is_none() {
            let expected = "expected a task that predicts single rows, such as text-classification, or conversations that are not packed";
            return Err(match (file, samples) {
                (Some(path), _) => wrong("predictions", path.display(), expected),
                (None, samples) => wrong("eval-samples", samples.unwrap_or_default(), expected),
            });
        }
        Ok(())
    }

    /// Trains the next step of the run. Returns whether there is another.
    pub(super) fn step(&mut self) -> Result<bool> {
        let step = self.made.as_ref().map_or(self.state.step, |made| made.step) + 1;
        if step > self.plan.steps || self.measured.signal.is_some() {
            return Ok(false);
        }
        let made = self.make(step);
        // The step before is not lost with an error of this one.
        if let Some(before) = self.made.take() {
            self.record(before)?;
        }
        let (made, is_on_device) = match made {
            // At the smallest loss scale. Its rows are behind it, so that a resume does not meet them again.
            Err(TrainError::Engine(EngineError::LossScale(error))) => return Err(self.give_up(error.to_string())?),
            made => made?,
        };
        if is_on_device && !self.is_awaited(step) {
            self.made = Some(made);
            return Ok(true);
        }
        let signal = self.record(made)?;
        self.follow(signal)?;
        Ok(self.state.step < self.plan.steps && self.measured.signal.is_none())
    }

    /// Returns true if something is due after the step.
    fn is_awaited(&self, step: usize) -> bool {
        let plan = self.plan;
        step == plan.steps
            || Signal::asked() != 0.0
            || plan.eval_every.is_some_and(|every| step.is_multiple_of(every))
            || self.state.epoch.ends_with(plan.plan.batch.global, plan.data.order.rows)
            || plan.checkpoints.due(step, false).is_some()
    }

    /// Makes a step's passes and update, and records the previous step while a device computes them. Also returns whether one did.
    fn make(&mut self, step: usize) -> Result<(Made, bool)> {
        let (begin, rank, world, batch) =
            (Instant::now(), self.engine.rank(), self.plan.plan.world, self.plan.plan.batch);
        self.engine.reset_peaks();
        let wire_before = self.engine.metrics().wire_bytes;
        let (lr, loss_scale) = (self.engine.lr(), self.engine.loss_scale());
        // Made as they are used: there may be very many.
        let (plan, used, reference) = (self.plan, self.state.data.used, Rc::clone(&self.reference));
        let rows = |micro: usize| {
            let first = used + (micro * world + rank) * batch.micro;
            plan.data.order.rows(first, batch.micro, plan.zero.seed).with(&reference)
        };
        let (shares, mut tokens) = (self.shares(batch.accumulation, rows)?, Some(0));
        for micro in 0..batch.accumulation {
            let rows = rows(micro);
            tokens = tokens.zip(self.task.tokens(&rows)).map(|(sum, more)| sum + more);
            self.engine.micro_batch(&rows, shares.get(micro).map_or(&[], Vec::as_slice))?;
        }
        self.state.data.used += batch.global;
        // What is asked for here costs a device no time.
        let is_on_device = self.engine.is_on_device();
        let mine = self.engine.metrics();
        let mine = RankMetrics {
            rank,
            wire_bytes: mine.wire_bytes.since(&wire_before),
            peak_rss_bytes: peak_rss_bytes().unwrap_or(0),
            ..mine
        };
        let device_bytes = (self.engine.memory_probe())();
        if let Some(before) = self.made.take() {
            self.record(before)?;
        }
        let (outcome, losses) = self.engine.result()?;
        let (elapsed, times) = (begin.elapsed(), self.engine.take_times());
        let loss = losses.iter().sum::<f64>() / batch.accumulation as f64;
        let odd = losses.iter().enumerate().filter(|(_, loss)| !loss.is_finite());
        let odd = odd.flat_map(|(micro, _)| rows(micro).to_vec()).collect();
        let made = Made { step, outcome, loss, odd, tokens, elapsed, lr, loss_scale, mine, times, device_bytes };
        Ok((made, is_on_device))
    }

    /// Returns, for each micro-batch, the factors of the loss's terms by their share of the update's items: 1 if all
    /// micro-batches of all ranks have equally many. Empty if the task has no [`weights`](Task::weights); otherwise a
    /// collective.
    fn shares(&self, micro_batches: usize, rows: impl Fn(usize) -> Rows) -> Result<Vec<Vec<f64>>> {
        let terms = self.task.weights(&rows(0))?.len();
        if terms == 0 {
            return Ok(Vec::new());
        }
        let weights = (0..micro_batches).map(|micro| self.task.weights(&rows(micro)));
        let weights: Vec<Vec<f64>> = weights.collect::<Result<_>>()?;
        if let Some(other) = weights.iter().find(|weights| weights.len() != terms) {
            let problem =
                format!("the task's `weights` returned {terms} entries for some rows and {} for others", other.len());
            return Err(TrainError::Run(problem));
        }
        let sum = |of: &[Vec<f64>], term: usize| of.iter().map(|weights| weights[term]).sum::<f64>();
        let mine: Vec<f64> = (0..terms).map(|term| sum(&weights, term)).collect();
        let ranks = self.engine.all_gather(&mine)?;
        let even = (micro_batches * ranks.len()) as f64;
        let all: Vec<f64> = (0..terms).map(|term| sum(&ranks, term)).collect();
        let share = |(weight, all): (&f64, &f64)| if *all > 0.0 { weight * even / all } else { 1.0 };
        Ok(weights.iter().map(|weights| weights.iter().zip(&all).map(share).collect()).collect())
    }

    /// Records a step. Returns the signal that has arrived meanwhile, the same on every rank.
    fn record(&mut self, made: Made) -> Result<Option<Signal>> {
        let Made { step, outcome, loss, odd, tokens, elapsed, lr, loss_scale, mine, times, device_bytes } = made;
        let elapsed = elapsed.as_secs_f64();
        let (plan, world) = (self.plan, self.plan.plan.world);
        let batch = plan.plan.batch;
        let most = batch.micro * batch.accumulation * plan.data.units();
        let tokens = tokens.unwrap_or(most) as f64;
        let report = RankReport { loss, signal: Signal::asked(), tokens, metrics: mine };
        let reports = report.of_all_ranks(|values| self.engine.all_gather(values))?;
        // A run that has all its steps behind it has ended by itself.
        let signal = Signal::of_ranks(reports.iter().map(|report| report.signal)).filter(|_| step < plan.steps);
        // All ranks', up to about here: one may have begun its next step.
        let fresh_after = self.allocator.map(|keeper| keeper.stats().fresh_bytes);
        let (device_bytes_in_use, device_bytes_reserved) = device_bytes.unzip();
        let tokens = reports.iter().map(|report| report.tokens).sum::<f64>();
        // Padding is no work of the model's.
        let full = (tokens / (world * most) as f64).min(1.0);
        let flops = full * batch.global as f64 * plan.model.profile.flops_per_row;
        let metrics = StepMetrics {
            step,
            loss: reports.iter().map(|report| report.loss).sum::<f64>() / world as f64,
            grad_norm: match outcome {
                Step::Updated(update) => update.grad_norm,
                _ => f64::INFINITY,
            },
            lr,
            tokens: tokens as usize,
            step_ms: elapsed * 1e3,
            tokens_per_second: tokens / elapsed,
            mfu: self.peak_flops.map(|peak| flops / elapsed / peak),
            forward_ms: times.forward.as_secs_f64() * 1e3,
            backward_ms: times.backward.as_secs_f64() * 1e3,
            update_ms: times.step.as_secs_f64() * 1e3,
            skipped: matches!(outcome, Step::Skipped { .. }),
            loss_scale,
            fresh_bytes: fresh_after.zip(self.fresh_bytes).map(|(after, before)| after - before),
            device_bytes_in_use,
            device_bytes_reserved,
            ranks: reports.into_iter().map(|report| report.metrics).collect(),
        };
        self.fresh_bytes = fresh_after;
        // The same on every rank, as the mean and the gradients are.
        let mut rows = if metrics.loss.is_finite() { Vec::new() } else { self.rows_of_all_ranks(&odd)? };
        rows.sort_unstable();
        let last = step == plan.steps || signal.is_some();
        self.observe(|observer| observer.step(&metrics, &outcome, last, &rows));
        self.state.step = step;
        if metrics.loss.is_finite() {
            self.since_save = (self.since_save.0 + metrics.loss, self.since_save.1 + 1);
        }
        self.state.epoch.add(metrics.loss, batch.global);
        self.in_a_row = if metrics.skipped && !self.has_dynamic_scale() { self.in_a_row + 1 } else { 0 };
        self.measured.steps.add(metrics);
        if self.in_a_row == MOST_SKIPPED {
            let told = format!(
                "the last {MOST_SKIPPED} updates in a row were skipped because gradients were not finite: use a \
                 smaller learning rate, a warm-up, or clipping, or check the data and the weights"
            );
            return Err(self.give_up(told)?);
        }
        Ok(signal)
    }

    fn has_dynamic_scale(&self) -> bool {
        matches!(self.plan.plan.precision, Precision::Fp16 { loss_scale: LossScale::Dynamic(_) })
    }

    /// Gathers every rank's row numbers, in rank order. A collective operation.
    fn rows_of_all_ranks(&self, mine: &[usize]) -> Result<Vec<usize>> {
        let bytes = mine.iter().flat_map(|row| (*row as u64).to_le_bytes()).collect();
        let all = self.engine.all_gather_bytes(bytes)?.concat();
        Ok(all.chunks_exact(8).map(|row| u64::from_le_bytes(row.try_into().expect("8 bytes")) as usize).collect())
    }

    /// Returns the error of a run that can make no more updates. Saves a checkpoint first, if there is a folder for it,
    /// with the last weights and a data position after the rows that were skipped.
    fn give_up(&mut self, told: String) -> Result<TrainError> {
        let step = self.state.step;
        if let Some(dir) = self.plan.checkpoints.due(step, true).filter(|_| self.saved != step) {
            self.save(dir)?;
            if let Some(saved) = self.engine.wait_for_save()? {
                self.say(&format!("checkpoint {} is written", saved.display()));
            }
        }
        Ok(TrainError::Diverged(format!("{told} (after step {step})")))
    }

    fn save(&mut self, dir: &Path) -> Result<()> {
        let save = save(self.plan, self.engine, dir, &self.state)?;
        self.observe(|observer| observer.save(&save));
        self.saved = self.state.step;
        self.measured.saves += 1;
        self.measured.stall_seconds += save.stall_seconds;
        Ok(())
    }

    /// Does what is due after the last step: evaluation, the end of an epoch, a checkpoint.
    fn follow(&mut self, signal: Option<Signal>) -> Result<()> {
        let (plan, step) = (self.plan, self.state.step);
        let last = step == plan.steps || signal.is_some();
        // There may be little time to save in.
        let stays = signal.is_none();
        // At most once a step.
        let mut evaluated: Option<Evaluated> = None;
        if stays && plan.eval_every.is_some_and(|every| step.is_multiple_of(every)) {
            evaluated = self.evaluate(true)?;
        }
        let stays = stays && self.measured.signal.is_none();
        if self.state.epoch.has_ended(plan.data.order.rows) || (last && stays && plan.data.held_out > 0) {
            if stays && evaluated.is_none() {
                evaluated = self.evaluate(false)?;
            }
            if evaluated.is_none() {
                self.phase(Phase::Train);
            }
            let mut metrics = self.state.epoch.end(plan.data.order.rows, step, evaluated.clone());
            self.observe(|observer| observer.epoch(&mut metrics));
            self.measured.epochs.push(metrics);
        }
        let signal = signal.or(self.measured.signal);
        let (last, stays) = (last || signal.is_some(), signal.is_none());
        if let Some(dir) = plan.checkpoints.due(step, last) {
            if plan.checkpoints.keep_best && stays {
                if evaluated.is_none() {
                    evaluated = self.evaluate(true)?;
                }
                let loss = evaluated.map_or(self.since_save.0 / self.since_save.1 as f64, |evaluated| evaluated[0].1);
                // An evaluation that a signal has ended says nothing.
                let is_known = self.measured.signal.is_none();
                if is_known && loss.is_finite() && self.state.best.is_none_or(|best| loss < best.loss) {
                    self.state.best = Some(Best { step: step as u64, loss });
                }
            }
            self.since_save = (0.0, 0);
            self.save(dir)?;
        }
        self.measured.signal = self.measured.signal.or(signal);
        Ok(())
    }

    /// Evaluates the held-out rows, if there are some and no signal ends it; `said` prints the result, if nothing else will.
    fn evaluate(&mut self, said: bool) -> Result<Option<Evaluated>> {
        if self.plan.data.held_out == 0 {
            return Ok(None);
        }
        self.phase(Phase::Eval);
        let begin = Instant::now();
        let averages = self.plan.eval_ema;
        if averages {
            self.engine.swap_averages()?;
        }
        let evaluated = evaluate_all(self.task, self.engine, self.plan, &self.reference);
        let mut samples = Vec::new();
        if matches!(evaluated, Ok(Ok(_))) {
            // All ranks predict the same rows.
            let first = self.plan.data.order.rows;
            let shown: Vec<usize> = (first..first + self.plan.eval_samples).collect();
            for rows in shown.chunks(self.plan.plan.batch.micro) {
                samples.extend(self.engine.predict(&Rows::from(rows).with(&self.reference))?.unwrap_or_default());
            }
        }
        if averages {
            self.engine.swap_averages()?;
        }
        let values = match evaluated? {
            Ok(values) => values,
            Err(signal) => {
                self.measured.signal = Some(signal);
                return Ok(None);
            }
        };
        let seconds = begin.elapsed().as_secs_f64();
        self.observe(|observer| observer.evaluation(self.state.step, &values, seconds, said));
        for sample in samples {
            self.observe(|observer| observer.sample(self.state.step, &sample));
        }
        self.phase(Phase::Train);
        Ok(Some(values))
    }

    /// Writes the outputs that are due at the end of a run.
    pub(super) fn finish(mut self) -> Result<Measured> {
        let plan = self.plan;
        if let Some(saved) = self.engine.wait_for_save()? {
            self.say(&format!("checkpoint {} is written", saved.display()));
        }
        let (steps, skipped) = (self.measured.steps.number, self.measured.steps.skipped);
        // A dynamic loss scale is on its way to one that fits, or has ended the run by itself.
        let gives_up = !self.has_dynamic_scale() && (skipped == steps || 2 * self.in_a_row > steps);
        if self.measured.signal.is_none() && steps > 0 && gives_up {
            let which = if skipped == steps { "all".into() } else { format!("the last {} of the", self.in_a_row) };
            return Err(TrainError::Diverged(format!(
                "{which} {steps} steps were skipped because gradients were not finite: use a smaller learning rate, a \
                 warm-up, or clipping, lower the loss scale, or check the data and the weights"
            )));
        }
        // Nothing is trained or saved after this.
        if plan.eval_ema {
            self.engine.swap_averages()?;
        }
        if let Some(out) = plan.save_16bit.as_ref().filter(|_| self.state.step == plan.steps) {
            // Full 16-bit weights; every rank takes part.
            let fp16 = matches!(plan.plan.precision, Precision::Fp16 { .. });
            let dtype = if fp16 { ExportDtype::Fp16 } else { ExportDtype::Bf16 };
            let options = ExportOptions { dtype, files: plan.model.files.clone(), ..ExportOptions::default() };
            self.engine.export(plan.model.config.as_ref(), out, &options)?;
            self.say(&format!("the 16-bit model ({dtype}) is saved in {}", out.display()));
        }
        if let Some(path) = plan.predictions.as_ref().filter(|_| self.measured.signal.is_none()) {
            let mut lines = Vec::new();
            let rows = plan.data.order.rows;
            let others: Vec<usize> = (rows..rows + plan.data.held_out + plan.data.unlabelled).collect();
            self.measured.signal = each_of(&others, plan, self.engine, &self.reference, |rows, counted| {
                let told = self.engine.predict(rows)?.unwrap_or_default();
                told.iter().take(counted).for_each(|line| lines.extend(format!("{line}\n").bytes()));
                Ok(())
            })?;
            if self.measured.signal.is_none() {
                let all = self.engine.all_gather_bytes(lines)?.concat();
                if self.engine.rank() == 0 {
                    write_whole(path, &all)?;
                    self.say(&format!("predictions are in {}", path.display()));
                }
            }
        }
        let signal = self.measured.signal;
        // For a person. On a device it would compile kernels for shapes that no training has.
        if plan.progress && signal.is_none() && plan.backend == BackendChoice::Cpu {
            self.measured.sample = self.engine.sample()?;
        }
        self.observe(|observer| observer.end(self.state.step, signal));
        Ok(self.measured)
    }
}

fn save(plan: &Plan, engine: &mut dyn RankEngine, dir: &Path, state: &TrainerState) -> Result<SaveMetrics> {
    let (step, options) = (state.step as u64, plan.checkpoints.options(state.best, &plan.model.files));
    let extra = state.saved(&plan.model, &plan.plan);
    let begin = Instant::now();
    let bytes = engine.save(dir, step, extra, &options)?;
    Ok(SaveMetrics { step: state.step, stall_seconds: begin.elapsed().as_secs_f64(), bytes })
}

/// Evaluates all held-out rows. Returns the figures, or the signal that ended it. All ranks evaluate equally often, because
/// they may have to gather parameters together.
fn evaluate_all(
    task: &impl Task,
    engine: &dyn RankEngine,
    plan: &Plan,
    reference: &Reference,
) -> Result<Result<Evaluated, Signal>> {
    let (mut names, mut sums): (Vec<&str>, Vec<[f64; 2]>) = Default::default();
    let held_out: Vec<usize> = (plan.data.order.rows..plan.data.order.rows + plan.data.held_out).collect();
    let signal = each_of(&held_out, plan, engine, reference, |rows, counted| {
        let (values, weights) = (engine.evaluate(rows)?, task.weights(rows)?);
        sums.resize(values.len(), [0.0; 2]);
        names = values.iter().map(|(name, _)| *name).collect();
        for (i, ([sum, items], (_, value))) in sums.iter_mut().zip(values).enumerate() {
            let weight = if counted == 0 { 0.0 } else { weights.get(i).copied().unwrap_or(counted as f64) };
            // A mean over nothing may be anything.
            (*sum, *items) = (*sum + if weight == 0.0 { 0.0 } else { value * weight }, *items + weight);
        }
        Ok(())
    })?;
    if let Some(signal) = signal {
        return Ok(Err(signal));
    }
    let ranks = engine.all_gather(&sums.concat())?;
    let total = |i: usize| ranks.iter().map(|rank| rank[i]).sum::<f64>();
    let mean = |i: usize| if total(2 * i + 1) > 0.0 { total(2 * i) / total(2 * i + 1) } else { 0.0 };
    let means: Vec<f64> = (0..names.len()).map(mean).collect();
    let told = task.figures(&means).unwrap_or_else(|| {
        let mut told: Means = Vec::new();
        for (name, mean) in names.into_iter().zip(means) {
            match told.last_mut().filter(|(last, _)| *last == name) {
                Some((_, sum)) => *sum += mean,
                None => told.push((name, mean)),
            }
        }
        told
    });
    Ok(Ok(told.into_iter().map(|(name, value)| (name.to_string(), value)).collect()))
}

/// Measures all rows of a run by the initial model, if the task asks for it, or returns the signal that ended it. A collective operation.
pub(super) fn reference_of(
    plan: &Plan,
    state: &TrainerState,
    engine: &dyn RankEngine,
    say: impl FnOnce(&str),
) -> Result<Result<Reference, Signal>> {
    let order = plan.data.order;
    if engine.reference(&[order.row(0)][..].into())?.is_none() {
        return Ok(Ok(Reference::default()));
    }
    let held_out = order.rows..order.rows + plan.data.held_out;
    let (used, left) = (state.data.used, plan.steps.saturating_sub(state.step) * plan.plan.batch.global);
    let trained: BTreeSet<usize> = match left < order.rows {
        true => (used..used + left).map(|position| order.row(position)).collect(),
        false => (0..order.rows).collect(),
    };
    let rows: Vec<usize> = trained.into_iter().chain(held_out).collect();
    say(&format!("measuring {} rows with the initial model, which is the reference", rows.len()));
    let mut mine = Vec::new();
    let signal = each_of(&rows, plan, engine, &Reference::default(), |rows, counted| {
        let values = engine.reference(rows)?.unwrap_or_default();
        let width = values.len() / rows.len();
        for (row, values) in rows.iter().zip(values.chunks_exact(width)).take(counted) {
            mine.extend([*row as f64, width as f64]);
            mine.extend(values);
        }
        Ok(())
    })?;
    if let Some(signal) = signal {
        return Ok(Err(signal));
    }
    let bytes = mine.iter().flat_map(|value| value.to_le_bytes()).collect();
    let all = engine.all_gather_bytes(bytes)?.concat();
    let mut values = all.chunks_exact(8).map(|value| f64::from_le_bytes(value.try_into().expect("8 bytes")));
    let mut reference = Reference::default();
    while let (Some(row), Some(width)) = (values.next(), values.next()) {
        reference.insert(row as usize, values.by_ref().take(width as usize).collect());
    }
    Ok(Ok(reference))
}

/// Calls `each` with batches of rows, and the number of these rows that count. Each rank takes an equal share, in order; the first ranks
/// take one row more if the rows do not divide. A rank that has no batch left while others do gets a row that does not count. Between
/// batches, ranks agree on whether a signal ends it, and return that signal.
fn each_of(
    all: &[usize],
    plan: &Plan,
    engine: &dyn RankEngine,
    reference: &Reference,
    mut each: impl FnMut(&Rows, usize) -> Result<()>,
) -> Result<Option<Signal>> {
    let (world, batch, rank) = (plan.plan.world, plan.plan.batch.micro, engine.rank());
    let share = |rank: usize| all.len() / world + usize::from(rank < all.len() % world);
    let begin = (0..rank).map(share).sum::<usize>();
    let mut batches = all[begin..begin + share(rank)].chunks(batch);
    for _ in 0..share(0).div_ceil(batch) {
        let rows = batches.next();
        let counted = rows.map_or(0, <[usize]>::len);
        each(&Rows::from(rows.unwrap_or_else(|| &all[begin - 1..begin])).with(reference), counted)?;
        let asked = engine.all_gather(&[Signal::asked()])?;
        if let Some(signal) = Signal::of_ranks(asked.iter().map(|rank| rank[0])) {
            return Ok(Some(signal));
        }
    }
    Ok(None)
}
