//! The training loop of each rank.

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use zero_core::alloc::PageKeeper;
use zero_core::collective::launcher::started;
use zero_models::hf_export::{ExportDtype, ExportOptions};

use super::checkpoints::{Best, DataPosition, EpochState, TrainerState};
use super::front::{Front, Trainee};
use super::observer::Observer;
use super::plan::Plan;
use super::ranks::Ranks;
use super::{BackendChoice, Rows, Task};
use crate::config::Precision;
use crate::error::{Result, TrainError, wrong, wrong_data};
use crate::memory::peak_rss_bytes;
use crate::metrics::{EpochMetrics, Evaluated, RankMetrics, RankReport, SaveMetrics, StepMetrics};
use crate::monitor::{Phase, write_whole};
use crate::signals::{Signal, Watch};
use crate::step::Step;

/// The step after which memory is expected not to grow.
const SETTLED: usize = 2;

/// The part of the highest use of memory that is taken beside it when memory has settled. Ranks drift apart differently in
/// every step, so with several of them a later peak can be higher: by 5 % at most in 6 runs of GPT-2 124M on 2 ranks.
const HEADROOM: u64 = 20;

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

/// Trains by the plan; returns every step's metrics.
///
/// `allocator` is the process's.
pub(super) fn train<T: Task, F: Front<T>>(
    front: &F,
    task: &T,
    plan: &Plan,
    ranks: &Ranks<'_>,
    allocator: Option<&PageKeeper>,
) -> Result<Measured> {
    plan.checkpoints.prepare()?;
    if let Some(out) = plan.save_16bit.as_ref().filter(|out| out.exists()) {
        let problem =
            "is there already, and the 16-bit model of this run would go there: move it away, or name another --out";
        return Err(wrong_data(out, problem));
    }
    let observer = ranks.is_main().then(|| Observer::new(plan).map(Mutex::new)).transpose()?;
    let watch = Watch::begin(ranks.is_main());
    let _watch = watch.map_err(|error| TrainError::Run(format!("no handler of signals can be set: {error}")))?;
    let run = plan.run(ranks)?;
    front.launch(task, &run, |trainee| run_rank(task, trainee, plan, observer.as_ref(), allocator))
}

fn run_rank(
    task: &impl Task,
    trainee: &mut dyn Trainee,
    plan: &Plan,
    observer: Option<&Mutex<Observer<'_>>>,
    allocator: Option<&PageKeeper>,
) -> Result<Measured> {
    let rank = trainee.rank();
    // Rank 0 alone prints and writes.
    let observe = |what: &mut dyn FnMut(&mut Observer<'_>) -> Result<()>| match observer {
        Some(observer) if rank == 0 => what(&mut observer.lock().expect("the observer is used by rank 0 alone")),
        _ => Ok(()),
    };
    let say = |line: &str| {
        observe(&mut |observer| {
            observer.say(line);
            Ok(())
        })
    };
    let (mut state, warning) = begin(plan, trainee)?;
    if let Some(warning) = warning {
        observe(&mut |observer| observer.warn(state.step, &warning))?;
    }
    // The table is sampled from another thread.
    let phase = |trainee: &dyn Trainee, phase: Phase| {
        observe(&mut |observer| {
            let probe = trainee.memory_probe();
            observer.begin(phase, move || probe().map(|(in_use, _)| in_use))
        })
    };
    let peak_flops = trainee.peak_flops();
    phase(trainee, Phase::Train)?;

    let (world, batch) = (plan.plan.world, plan.plan.batch);
    let order = plan.data.order;
    if plan.data.held_out + plan.data.unlabelled > 0 {
        // An evaluation that fails is to be found before an epoch of training, not after.
        let first = Rows::from(&[order.rows][..]);
        if plan.data.held_out > 0 && trainee.evaluate(&first)?.is_empty() {
            let told = "the task's `evaluate` measured nothing: expected the loss first, and what else there is";
            return Err(TrainError::Run(told.into()));
        }
        if let Some(path) = &plan.predictions
            && trainee.predict(&first)?.is_none()
        {
            let expected = "expected a task that says something of single rows, as text-classification does";
            return Err(wrong("predictions", path.display(), expected));
        }
    }
    let tokens_per_step = batch.global * plan.data.units();
    let flops_per_step = batch.global as f64 * plan.model.profile.flops_per_row;
    let mut measured = Measured::default();
    // Mean training loss since the last checkpoint, for --keep-best without --eval.
    let mut since_save = (0.0, 0);
    let fresh_bytes = || allocator.map(|keeper| keeper.stats().fresh_bytes);
    // One rank of each process.
    let first_here = rank == 0 || started().is_some();
    let mut fresh_before = fresh_bytes();
    for step in state.step..plan.steps {
        let begin = Instant::now();
        trainee.reset_peaks();
        let wire_before = trainee.metrics().wire_bytes;
        let mut outcome = Step::Accumulating { micro_batches: 0 };
        let lr = trainee.lr();
        let loss_scale = trainee.loss_scale();
        for micro in 0..batch.accumulation {
            let first = state.data.used + (micro * world + rank) * batch.micro;
            let rows = order.rows(first, batch.micro, plan.zero.seed);
            outcome = trainee.micro_batch(&rows)?;
        }
        // Once a device has been given all of the step: a wait between its passes would leave it without work.
        let loss_sum = trainee.losses()?.iter().sum::<f64>();
        let elapsed = begin.elapsed();
        let mine = trainee.metrics();
        let mine = RankMetrics {
            rank,
            wire_bytes: mine.wire_bytes.since(&wire_before),
            peak_rss_bytes: peak_rss_bytes().unwrap_or(0),
            ..mine
        };
        let loss = loss_sum / batch.accumulation as f64;
        let report = RankReport { loss, signal: Signal::asked(), metrics: mine };
        let reports = report.of_all_ranks(|values| trainee.all_gather(values))?;
        // The same on every rank. A run that has all its steps behind it has ended by itself.
        let signal = Signal::of_ranks(reports.iter().map(|report| report.signal)).filter(|_| step + 1 < plan.steps);
        let last = step + 1 == plan.steps || signal.is_some();
        if let Some(keeper) = allocator.filter(|_| step + 1 == SETTLED && first_here && world > 1) {
            keeper.reserve((keeper.stats().live_bytes_peak / HEADROOM) as usize);
        }
        // All ranks', up to about here: one may have begun its next step.
        let fresh_after = fresh_bytes();
        let (device_bytes_in_use, device_bytes_reserved) = (trainee.memory_probe())().unzip();
        let times = trainee.take_times();
        let metrics = StepMetrics {
            step: step + 1,
            loss: reports.iter().map(|report| report.loss).sum::<f64>() / world as f64,
            grad_norm: match outcome {
                Step::Updated(update) => update.grad_norm,
                _ => f64::INFINITY,
            },
            lr,
            tokens: tokens_per_step,
            step_ms: elapsed.as_secs_f64() * 1e3,
            tokens_per_second: tokens_per_step as f64 / elapsed.as_secs_f64(),
            mfu: peak_flops.map(|peak| flops_per_step / elapsed.as_secs_f64() / peak),
            forward_ms: times.forward.as_secs_f64() * 1e3,
            backward_ms: times.backward.as_secs_f64() * 1e3,
            update_ms: times.step.as_secs_f64() * 1e3,
            skipped: matches!(outcome, Step::Skipped { .. }),
            loss_scale,
            fresh_bytes: fresh_after.zip(fresh_before).map(|(after, before)| after - before),
            device_bytes_in_use,
            device_bytes_reserved,
            ranks: reports.into_iter().map(|report| report.metrics).collect(),
        };
        fresh_before = fresh_after;
        observe(&mut |observer| observer.step(&metrics, &outcome, last))?;
        // The same on every rank, so that all stop here.
        if !metrics.loss.is_finite() {
            return Err(TrainError::Run(format!(
                "the loss became {} in step {}: use a smaller learning rate, a warm-up, or clipping",
                metrics.loss, metrics.step
            )));
        }
        state.step = step + 1;
        state.data.used += batch.global;
        since_save = (since_save.0 + metrics.loss, since_save.1 + 1);
        let ended = state.epoch.add(metrics.loss, batch.global, order.rows);
        // At most once a step.
        let mut evaluated: Option<Evaluated> = None;
        let mut evaluate = |trainee: &dyn Trainee, said: bool| -> Result<Option<Evaluated>> {
            if evaluated.is_none() && plan.data.held_out > 0 {
                phase(trainee, Phase::Eval)?;
                let begin = Instant::now();
                let values = evaluate_all(task, trainee, plan)?;
                let seconds = begin.elapsed().as_secs_f64();
                observe(&mut |observer| observer.evaluation(step + 1, &values, seconds, said))?;
                evaluated = Some(values);
                phase(trainee, Phase::Train)?;
            }
            Ok(evaluated.clone())
        };
        measured.steps.push(metrics);
        // There may be little time to save in.
        let stays = signal.is_none();
        if stays && plan.eval_every.is_some_and(|every| state.step.is_multiple_of(every)) {
            evaluate(trainee, true)?;
        }
        if ended || (last && stays && plan.data.held_out > 0) {
            let evaluated = if stays { evaluate(trainee, false)? } else { None };
            if evaluated.is_none() {
                phase(trainee, Phase::Train)?;
            }
            let mut metrics = state.epoch.end(order.rows, step + 1, evaluated);
            observe(&mut |observer| observer.epoch(&mut metrics))?;
            measured.epochs.push(metrics);
        }
        if let Some(dir) = plan.checkpoints.due(step + 1, last) {
            if plan.checkpoints.keep_best && stays {
                let evaluated = evaluate(trainee, true)?.map(|evaluated| evaluated[0].1);
                let loss = evaluated.unwrap_or(since_save.0 / since_save.1 as f64);
                if state.best.is_none_or(|best| loss < best.loss) {
                    state.best = Some(Best { step: step as u64 + 1, loss });
                }
            }
            since_save = (0.0, 0);
            let save = save(plan, trainee, dir, &state)?;
            observe(&mut |observer| observer.save(&save))?;
            measured.saves.push(save);
        }
        measured.signal = signal;
        if last {
            break;
        }
    }
    if let Some(saved) = trainee.wait_for_save()? {
        say(&format!("checkpoint {} is written", saved.display()))?;
    }
    if let Some(out) = plan.save_16bit.as_ref().filter(|_| state.step == plan.steps) {
        // Whole 16-bit weights; every rank takes part.
        let fp16 = matches!(plan.plan.precision, Precision::Fp16 { .. });
        let dtype = if fp16 { ExportDtype::Fp16 } else { ExportDtype::Bf16 };
        let options = ExportOptions { dtype, ..ExportOptions::default() };
        trainee.export(plan.model.config.as_ref(), out, &options)?;
        say(&format!("the 16-bit model ({dtype}) is saved in {}", out.display()))?;
    }
    if let Some(path) = plan.predictions.as_ref().filter(|_| measured.signal.is_none()) {
        let mut lines = Vec::new();
        let others = order.rows..order.rows + plan.data.held_out + plan.data.unlabelled;
        each_of(others, plan, rank, |rows, counted| {
            let told = trainee.predict(rows)?.unwrap_or_default();
            told.iter().take(counted).for_each(|line| lines.extend(format!("{line}\n").bytes()));
            Ok(())
        })?;
        let all = trainee.all_gather_bytes(lines)?.concat();
        if rank == 0 {
            write_whole(path, &all)?;
            say(&format!("predictions are in {}", path.display()))?;
        }
    }
    // For a person. On a device it would tune products of shapes that no training has.
    if plan.progress && measured.signal.is_none() && plan.backend == BackendChoice::Cpu {
        measured.sample = trainee.sample()?;
    }
    observe(&mut |observer| observer.end(state.step, measured.signal))?;
    Ok(measured)
}

/// The state to begin with: of nothing, or of the checkpoint, into which the engine is put. Also what is to be told.
fn begin(plan: &Plan, trainee: &mut dyn Trainee) -> Result<(TrainerState, Option<String>)> {
    let data = DataPosition::first(&plan.data);
    let Some(checkpoint) = &plan.checkpoints.resume else {
        return Ok((TrainerState { step: 0, data, epoch: EpochState::first(), best: None }, None));
    };
    let loaded = trainee.load(checkpoint)?;
    let mut state = TrainerState::loaded(&loaded, checkpoint)?;
    let warning = state.data.differs_from(&data);
    if warning.is_some() {
        (state.data, state.epoch) = (data, EpochState { number: state.epoch.number, ..EpochState::first() });
    }
    state.data.checksum = data.checksum;
    Ok((state, warning))
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
