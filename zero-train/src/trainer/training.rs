//! The steps of one rank: each is made, recorded, and followed by what is due.
//!
//! A step that a device computes by itself ([`Trainee::is_on_device`]) is recorded once the device has been given the next one, so that it
//! has work while metrics are written. A step is recorded at once where something is due after it: evaluation, a checkpoint, the end of an
//! epoch or of the run, a signal.

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use zero_core::alloc::PageKeeper;
use zero_core::collective::launcher::started;
use zero_models::hf_export::{ExportDtype, ExportOptions};

use super::checkpoints::{Best, TrainerState};
use super::front::Trainee;
use super::observer::Observer;
use super::plan::Plan;
use super::{BackendChoice, Rows, Task};
use crate::config::Precision;
use crate::error::{Result, TrainError, wrong};
use crate::memory::peak_rss_bytes;
use crate::metrics::{EpochMetrics, Evaluated, RankMetrics, RankReport, SaveMetrics, StepMetrics};
use crate::monitor::{Phase, write_whole};
use crate::signals::Signal;
use crate::step::{Step, Times};

/// What a run has measured.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    pub(super) steps: Vec<StepMetrics>,
    pub(super) epochs: Vec<EpochMetrics>,
    pub(super) saves: Vec<SaveMetrics>,
    /// What has ended it before its last step.
    pub(super) signal: Option<Signal>,
    /// What the trained model makes.
    pub(super) sample: Option<String>,
}

/// The step after which memory is expected not to grow.
const SETTLED: usize = 2;

/// The part of the highest use of memory that is taken beside it when memory has settled. Ranks drift apart differently in
/// every step, so with several of them a later peak can be higher: by 5 % at most in 6 runs of GPT-2 124M on 2 ranks.
const HEADROOM: u64 = 20;

/// A rank's training, from step to step.
// What it was made of, then where it is.
pub(super) struct Training<'a, 'p, T> {
    task: &'a T,
    trainee: &'a mut dyn Trainee,
    plan: &'a Plan,
    /// Present on rank 0 alone.
    observer: Option<&'a Mutex<Observer<'p>>>,
    allocator: Option<&'a PageKeeper>,
    peak_flops: Option<f64>,
    state: TrainerState,
    measured: Measured,
    /// Sum and number of training losses since the last checkpoint, for --keep-best without --eval.
    since_save: (f64, usize),
    /// Bytes that the allocator had taken from the system when the last step was recorded.
    fresh_bytes: Option<u64>,
    /// The last step, while it is not recorded.
    made: Option<Made>,
}

/// A step that a rank has made.
struct Made {
    /// From 1.
    step: usize,
    outcome: Step,
    /// Mean of this rank's micro-batches.
    loss: f64,
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
        trainee: &'a mut dyn Trainee,
        plan: &'a Plan,
        observer: Option<&'a Mutex<Observer<'p>>>,
        allocator: Option<&'a PageKeeper>,
        state: TrainerState,
    ) -> Self {
        Self {
            task,
            plan,
            observer,
            allocator,
            peak_flops: trainee.peak_flops(),
            trainee,
            state,
            measured: Measured::default(),
            since_save: (0.0, 0),
            fresh_bytes: allocator.map(|keeper| keeper.stats().fresh_bytes),
            made: None,
        }
    }

    /// Has rank 0 show or write something.
    pub(super) fn observe(&self, what: impl FnOnce(&mut Observer<'_>) -> Result<()>) -> Result<()> {
        self.observer
            .map_or(Ok(()), |observer| what(&mut observer.lock().expect("the observer is used by rank 0 alone")))
    }

    fn say(&self, line: &str) -> Result<()> {
        self.observe(|observer| {
            observer.say(line);
            Ok(())
        })
    }

    /// A phase begins, whose table of memory is sampled from another thread.
    pub(super) fn phase(&self, phase: Phase) -> Result<()> {
        self.observe(|observer| {
            let probe = self.trainee.memory_probe();
            observer.begin(phase, move || probe().map(|(in_use, _)| in_use))
        })
    }

    /// Measures one row, and predicts it: an evaluation that fails is to be found before an epoch of training, not after.
    pub(super) fn try_evaluation(&self) -> Result<()> {
        let data = &self.plan.data;
        let first = Rows::from(&[data.order.rows][..]);
        if data.held_out > 0 && self.trainee.evaluate(&first)?.is_empty() {
            let told = "the task's `evaluate` measured nothing: expected the loss first, and what else there is";
            return Err(TrainError::Run(told.into()));
        }
        if let Some(path) = self.plan.predictions.as_ref().filter(|_| data.held_out + data.unlabelled > 0)
            && self.trainee.predict(&first)?.is_none()
        {
            let expected = "expected a task that says something of single rows, as text-classification does";
            return Err(wrong("predictions", path.display(), expected));
        }
        Ok(())
    }

    /// Trains a step, the next of the run; whether there is another.
    pub(super) fn step(&mut self) -> Result<bool> {
        let step = self.made.as_ref().map_or(self.state.step, |made| made.step) + 1;
        if step > self.plan.steps {
            return Ok(false);
        }
        let made = self.make(step);
        // The step before is not lost with an error of this one.
        if let Some(before) = self.made.take() {
            self.record(before)?;
        }
        let (made, is_on_device) = made?;
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

    /// Makes a step's passes and update, and records the step before while a device computes them. Also whether one did.
    fn make(&mut self, step: usize) -> Result<(Made, bool)> {
        let (begin, rank, world, batch) =
            (Instant::now(), self.trainee.rank(), self.plan.plan.world, self.plan.plan.batch);
        self.trainee.reset_peaks();
        let wire_before = self.trainee.metrics().wire_bytes;
        let (lr, loss_scale) = (self.trainee.lr(), self.trainee.loss_scale());
        for micro in 0..batch.accumulation {
            let first = self.state.data.used + (micro * world + rank) * batch.micro;
            self.trainee.micro_batch(&self.plan.data.order.rows(first, batch.micro, self.plan.zero.seed))?;
        }
        self.state.data.used += batch.global;
        // What is asked for here costs a device no time.
        let is_on_device = self.trainee.is_on_device();
        let mine = self.trainee.metrics();
        let mine = RankMetrics {
            rank,
            wire_bytes: mine.wire_bytes.since(&wire_before),
            peak_rss_bytes: peak_rss_bytes().unwrap_or(0),
            ..mine
        };
        let device_bytes = (self.trainee.memory_probe())();
        if let Some(before) = self.made.take() {
            self.record(before)?;
        }
        let (outcome, losses) = self.trainee.result()?;
        let (elapsed, times) = (begin.elapsed(), self.trainee.take_times());
        let loss = losses.iter().sum::<f64>() / batch.accumulation as f64;
        Ok((Made { step, outcome, loss, elapsed, lr, loss_scale, mine, times, device_bytes }, is_on_device))
    }

    /// Records a step; the signal that has come meanwhile, the same on every rank.
    fn record(&mut self, made: Made) -> Result<Option<Signal>> {
        let Made { step, outcome, loss, elapsed, lr, loss_scale, mine, times, device_bytes } = made;
        let elapsed = elapsed.as_secs_f64();
        let (plan, world) = (self.plan, self.plan.plan.world);
        let batch = plan.plan.batch;
        let report = RankReport { loss, signal: Signal::asked(), metrics: mine };
        let reports = report.of_all_ranks(|values| self.trainee.all_gather(values))?;
        // A run that has all its steps behind it has ended by itself.
        let signal = Signal::of_ranks(reports.iter().map(|report| report.signal)).filter(|_| step < plan.steps);
        // One rank of each process.
        let is_first_here = self.trainee.rank() == 0 || started().is_some();
        if let Some(keeper) = self.allocator.filter(|_| step == SETTLED && is_first_here && world > 1) {
            keeper.reserve((keeper.stats().live_bytes_peak / HEADROOM) as usize);
        }
        // All ranks', up to about here: one may have begun its next step.
        let fresh_after = self.allocator.map(|keeper| keeper.stats().fresh_bytes);
        let (device_bytes_in_use, device_bytes_reserved) = device_bytes.unzip();
        let (tokens, flops) =
            (batch.global * plan.data.units(), batch.global as f64 * plan.model.profile.flops_per_row);
        let metrics = StepMetrics {
            step,
            loss: reports.iter().map(|report| report.loss).sum::<f64>() / world as f64,
            grad_norm: match outcome {
                Step::Updated(update) => update.grad_norm,
                _ => f64::INFINITY,
            },
            lr,
            tokens,
            step_ms: elapsed * 1e3,
            tokens_per_second: tokens as f64 / elapsed,
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
        self.observe(|observer| observer.step(&metrics, &outcome, step == plan.steps || signal.is_some()))?;
        // The same on every rank, so that all stop here.
        if !metrics.loss.is_finite() {
            return Err(TrainError::Run(format!(
                "the loss became {} in step {step}: use a smaller learning rate, a warm-up, or clipping",
                metrics.loss
            )));
        }
        self.state.step = step;
        self.since_save = (self.since_save.0 + metrics.loss, self.since_save.1 + 1);
        self.state.epoch.add(metrics.loss, batch.global);
        self.measured.steps.push(metrics);
        Ok(signal)
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
        if self.state.epoch.has_ended(plan.data.order.rows) || (last && stays && plan.data.held_out > 0) {
            if stays && evaluated.is_none() {
                evaluated = self.evaluate(false)?;
            }
            if evaluated.is_none() {
                self.phase(Phase::Train)?;
            }
            let mut metrics = self.state.epoch.end(plan.data.order.rows, step, evaluated.clone());
            self.observe(|observer| observer.epoch(&mut metrics))?;
            self.measured.epochs.push(metrics);
        }
        if let Some(dir) = plan.checkpoints.due(step, last) {
            if plan.checkpoints.keep_best && stays {
                if evaluated.is_none() {
                    evaluated = self.evaluate(true)?;
                }
                let loss = evaluated.map_or(self.since_save.0 / self.since_save.1 as f64, |evaluated| evaluated[0].1);
                if self.state.best.is_none_or(|best| loss < best.loss) {
                    self.state.best = Some(Best { step: step as u64, loss });
                }
            }
            self.since_save = (0.0, 0);
            let save = save(plan, self.trainee, dir, &self.state)?;
            self.observe(|observer| observer.save(&save))?;
            self.measured.saves.push(save);
        }
        self.measured.signal = signal;
        Ok(())
    }

    /// Measures the rows that are held out, if there are some; `said` if nothing else will say it.
    fn evaluate(&self, said: bool) -> Result<Option<Evaluated>> {
        if self.plan.data.held_out == 0 {
            return Ok(None);
        }
        self.phase(Phase::Eval)?;
        let begin = Instant::now();
        let values = evaluate_all(self.task, self.trainee, self.plan)?;
        let seconds = begin.elapsed().as_secs_f64();
        self.observe(|observer| observer.evaluation(self.state.step, &values, seconds, said))?;
        self.phase(Phase::Train)?;
        Ok(Some(values))
    }

    /// Writes what is written at the end of a run.
    pub(super) fn finish(mut self) -> Result<Measured> {
        let (plan, signal) = (self.plan, self.measured.signal);
        if let Some(saved) = self.trainee.wait_for_save()? {
            self.say(&format!("checkpoint {} is written", saved.display()))?;
        }
        if let Some(out) = plan.save_16bit.as_ref().filter(|_| self.state.step == plan.steps) {
            // Whole 16-bit weights; every rank takes part.
            let fp16 = matches!(plan.plan.precision, Precision::Fp16 { .. });
            let dtype = if fp16 { ExportDtype::Fp16 } else { ExportDtype::Bf16 };
            let options = ExportOptions { dtype, ..ExportOptions::default() };
            self.trainee.export(plan.model.config.as_ref(), out, &options)?;
            self.say(&format!("the 16-bit model ({dtype}) is saved in {}", out.display()))?;
        }
        if let Some(path) = plan.predictions.as_ref().filter(|_| signal.is_none()) {
            let mut lines = Vec::new();
            let rows = plan.data.order.rows;
            let others = rows..rows + plan.data.held_out + plan.data.unlabelled;
            each_of(others, plan, self.trainee.rank(), |rows, counted| {
                let told = self.trainee.predict(rows)?.unwrap_or_default();
                told.iter().take(counted).for_each(|line| lines.extend(format!("{line}\n").bytes()));
                Ok(())
            })?;
            let all = self.trainee.all_gather_bytes(lines)?.concat();
            if self.trainee.rank() == 0 {
                write_whole(path, &all)?;
                self.say(&format!("predictions are in {}", path.display()))?;
            }
        }
        // For a person. On a device it would compile kernels for shapes that no training has.
        if plan.progress && signal.is_none() && plan.backend == BackendChoice::Cpu {
            self.measured.sample = self.trainee.sample()?;
        }
        self.observe(|observer| observer.end(self.state.step, signal))?;
        Ok(self.measured)
    }
}

fn save(plan: &Plan, trainee: &mut dyn Trainee, dir: &Path, state: &TrainerState) -> Result<SaveMetrics> {
    let (step, options) = (state.step as u64, plan.checkpoints.options(state.best));
    let extra = state.saved(&plan.model, &plan.plan);
    let begin = Instant::now();
    let bytes = trainee.save(dir, step, extra, &options)?;
    Ok(SaveMetrics { step: state.step, stall_seconds: begin.elapsed().as_secs_f64(), bytes })
}

/// What the task measures of all rows that are held out. All ranks evaluate equally often, for they may have to gather parameters
/// together.
fn evaluate_all(task: &impl Task, trainee: &dyn Trainee, plan: &Plan) -> Result<Evaluated> {
    let mut sums: Vec<(&str, f64)> = Vec::new();
    let held_out = plan.data.order.rows..plan.data.order.rows + plan.data.held_out;
    each_of(held_out, plan, trainee.rank(), |rows, counted| {
        let values = trainee.evaluate(rows)?;
        sums.resize(values.len(), ("", 0.0));
        for ((sum, total), (name, value)) in sums.iter_mut().zip(values) {
            (*sum, *total) = (name, *total + value * counted as f64);
        }
        Ok(())
    })?;
    let totals: Vec<f64> = sums.iter().map(|(_, total)| *total).collect();
    let totals = trainee.all_gather(&totals)?;
    let mean = |i: usize| totals.iter().map(|rank| rank[i]).sum::<f64>() / plan.data.held_out as f64;
    let means: Vec<f64> = (0..sums.len()).map(mean).collect();
    let told =
        task.figures(&means).unwrap_or_else(|| sums.iter().zip(means).map(|((name, _), mean)| (*name, mean)).collect());
    Ok(told.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
}

/// Gives `each` batches of rows that are not trained on, and how many of these rows count. Each rank takes as many, in their
/// order, the first ones one more where they do not divide; in place of a batch that only other ranks have comes a row that does not
/// count.
fn each_of(
    others: Range<usize>,
    plan: &Plan,
    rank: usize,
    mut each: impl FnMut(&Rows, usize) -> Result<()>,
) -> Result<()> {
    let (world, batch) = (plan.plan.world, plan.plan.batch.micro);
    let share = |rank: usize| others.len() / world + usize::from(rank < others.len() % world);
    let begin = others.start + (0..rank).map(share).sum::<usize>();
    let mine: Vec<usize> = (begin..begin + share(rank)).collect();
    let mut batches = mine.chunks(batch);
    (0..share(0).div_ceil(batch)).try_for_each(|_| match batches.next() {
        Some(rows) => each(&rows.into(), rows.len()),
        None => each(&[begin - 1][..].into(), 0),
    })
}
