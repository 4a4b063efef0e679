//! The training loop of each rank.

use std::sync::Mutex;
use std::time::Instant;

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::launch::{LaunchError, launch};
use zero_burn::optim::Fused;
use zero_burn::stats::{all_gather, rank_stats, reset_peaks};
use zero_burn::{Zero, ZeroDevice};
use zero_core::RankFailure;
use zero_core::alloc::PageKeeper;
use zero_models::Gpt2;
use zero_models::gpt2::weights;

use super::Plan;
use super::observer::Observer;
use crate::TrainError;
use crate::data::TokenRows;
use crate::engine::{Step, ZeroEngine};
use crate::memory::peak_rss_bytes;
use crate::metrics::{EpochMetrics, RankReport, StepMetrics};
use crate::monitor::Phase;

type B = Autodiff<Zero<Flex>>;
type Engine = ZeroEngine<B, Gpt2<B>, Fused<B>>;
type Device = ZeroDevice<burn_flex::FlexDevice>;

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
}

/// Trains by the plan; returns every step's metrics.
///
/// `allocator` is the process's.
pub(super) fn train(plan: &Plan, allocator: Option<&PageKeeper>) -> Result<Measured, TrainError> {
    let observer = Mutex::new(Observer::new(plan)?);
    let outcome = launch::<Flex, _, TrainError>(plan.plan.world, &plan.zero, &plan.launch, |device| {
        run_rank(plan, &device, &observer, allocator)
    });
    match outcome {
        Ok(mut measured) => Ok(measured.swap_remove(0)),
        Err(LaunchError::Run(zero_core::LaunchError::Rank { rank, world, failure })) => Err(match *failure {
            RankFailure::Failed(error) => error,
            other => TrainError::Run(format!("rank {rank} of {world}: {other}")),
        }),
        Err(other) => Err(TrainError::Run(other.to_string())),
    }
}

fn run_rank(
    plan: &Plan,
    device: &Device,
    observer: &Mutex<Observer>,
    allocator: Option<&PageKeeper>,
) -> Result<Measured, TrainError> {
    let rank = device.rank();
    // Rank 0 alone prints and writes.
    let observe = |what: &mut dyn FnMut(&mut Observer) -> Result<(), TrainError>| match rank {
        0 => what(&mut observer.lock().expect("the observer is used by rank 0 alone")),
        _ => Ok(()),
    };
    let mut model = plan.model.init::<B>(device);
    if let Some(dir) = &plan.weights {
        model = weights::load(model, dir, device)?;
    }
    let config = plan.plan.engine_config()?;
    let mut engine = ZeroEngine::initialize(model, Fused::new(plan.plan.rule()), config, device)?;
    observe(&mut |observer| observer.begin(Phase::Train))?;

    let (world, batch) = (plan.plan.world, plan.plan.batch);
    let tokens_per_step = batch.global * plan.rows.seq();
    let mut measured = Measured::default();
    let mut epoch = Epoch::new(plan.rows.rows());
    let fresh_bytes = || allocator.map(|keeper| keeper.stats().fresh_bytes);
    let mut fresh_before = fresh_bytes();
    for step in 0..plan.steps {
        let begin = Instant::now();
        reset_peaks::<Flex>();
        let wire_before = rank_stats::<Flex>().wire_bytes;
        let mut loss_sum = 0.0;
        let mut outcome = Step::Accumulating { micro_batches: 0 };
        let lr = engine.lr();
        let loss_scale = engine.loss_scale();
        for micro in 0..batch.accumulation {
            let ids = micro_batch::<B>(&plan.rows, step * batch.accumulation + micro, batch.micro, world, device);
            let loss = engine.forward(|model| model.loss(ids));
            loss_sum += loss.clone().into_data().iter::<f64>().sum::<f64>();
            engine.backward(loss);
            outcome = engine.step()?;
        }
        let elapsed = begin.elapsed();
        let stats = rank_stats::<Flex>();
        let report = RankReport {
            loss: loss_sum / batch.accumulation as f64,
            stats,
            wire: stats.wire_bytes.since(&wire_before),
            peak_rss: peak_rss_bytes().unwrap_or(0),
        };
        let reports = all_gather::<Flex>(&report.to_values());
        if let Some(keeper) = allocator.filter(|_| step + 1 == SETTLED && rank == 0 && world > 1) {
            keeper.reserve((keeper.stats().live_bytes_peak / HEADROOM) as usize);
        }
        // All ranks', up to about here: one may have begun its next step.
        let fresh_after = fresh_bytes();
        let metrics = StepMetrics {
            step: step + 1,
            loss: reports.iter().map(|values| values[0]).sum::<f64>() / world as f64,
            grad_norm: match outcome {
                Step::Updated(update) => update.grad_norm,
                _ => f64::INFINITY,
            },
            lr,
            tokens: tokens_per_step,
            step_ms: elapsed.as_secs_f64() * 1e3,
            tokens_per_second: tokens_per_step as f64 / elapsed.as_secs_f64(),
            skipped: matches!(outcome, Step::Skipped { .. }),
            loss_scale,
            fresh_bytes: fresh_after.zip(fresh_before).map(|(after, before)| after - before),
            ranks: reports.iter().enumerate().map(|(rank, values)| RankReport::metrics(rank, values)).collect(),
        };
        fresh_before = fresh_after;
        let times = engine.take_times();
        observe(&mut |observer| observer.step(&metrics, &outcome, times))?;
        // The same on every rank, so that all stop here.
        if !metrics.loss.is_finite() {
            return Err(TrainError::Run(format!(
                "the loss became {} in step {}: use a smaller learning rate, a warm-up, or clipping",
                metrics.loss, metrics.step
            )));
        }
        let ended = epoch.add(metrics.loss, batch.global);
        let last = step + 1 == plan.steps;
        measured.steps.push(metrics);
        if ended || (last && plan.eval_rows.is_some()) {
            let eval_loss = match &plan.eval_rows {
                Some(rows) => {
                    observe(&mut |observer| observer.begin(Phase::Eval))?;
                    let loss = evaluate(&engine, rows, batch.micro, world, device);
                    observe(&mut |observer| observer.begin(Phase::Train))?;
                    Some(loss)
                }
                None => None,
            };
            let metrics = epoch.end(step + 1, eval_loss);
            observe(&mut |observer| observer.epoch(&metrics))?;
            measured.epochs.push(metrics);
        }
    }
    observe(&mut Observer::end)?;
    Ok(measured)
}

/// Rows of micro-batch `index` for this rank, `[batch, seq]`.
fn micro_batch<T: Backend<Device = Device>>(
    rows: &TokenRows,
    index: usize,
    batch: usize,
    world: usize,
    device: &Device,
) -> Tensor<T, 2, Int> {
    let ids = rows.batch(index, device.rank(), world, batch);
    Tensor::from_data(TensorData::new(ids, [batch, rows.seq()]), device)
}

/// Mean loss over all of `rows`, of which each rank takes as many.
fn evaluate(engine: &Engine, rows: &TokenRows, batch: usize, world: usize, device: &Device) -> f64 {
    let mine = rows.rows() / world;
    let mut sum = 0.0;
    let mut done = 0;
    while done < mine {
        let take = batch.min(mine - done);
        let ids: Vec<i32> = (0..take).flat_map(|i| rows.batch(device.rank() * mine + done + i, 0, 1, 1)).collect();
        let ids = Tensor::<Zero<Flex>, 2, Int>::from_data(TensorData::new(ids, [take, rows.seq()]), device);
        let loss = engine.evaluate(|model| model.loss(ids.clone()));
        sum += loss.into_data().iter::<f64>().sum::<f64>() * take as f64;
        done += take;
    }
    all_gather::<Flex>(&[sum]).iter().map(|rank| rank[0]).sum::<f64>() / rows.rows() as f64
}

/// One pass over the training rows.
struct Epoch {
    rows: usize,
    number: usize,
    seen: usize,
    loss_sum: f64,
    steps: usize,
}

impl Epoch {
    fn new(rows: usize) -> Self {
        Self { rows, number: 1, seen: 0, loss_sum: 0.0, steps: 0 }
    }

    /// Counts a step; whether the epoch has ended with it.
    fn add(&mut self, loss: f64, rows: usize) -> bool {
        self.seen += rows;
        self.loss_sum += loss;
        self.steps += 1;
        self.seen >= self.rows
    }

    fn end(&mut self, step: usize, eval_loss: Option<f64>) -> EpochMetrics {
        let metrics = EpochMetrics::new(self.number, step, self.loss_sum / self.steps as f64, eval_loss);
        let begun = Self { number: self.number + 1, seen: self.seen.saturating_sub(self.rows), ..Self::new(self.rows) };
        *self = begun;
        metrics
    }
}
