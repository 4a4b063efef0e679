//! The training loop of each rank.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use indicatif::{ProgressBar, ProgressStyle};
use zero_burn::launch::{LaunchError, launch};
use zero_burn::module::{collect_grads, grad_norm, mark, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::{all_gather, rank_stats, reset_peaks};
use zero_burn::{Zero, ZeroDevice};
use zero_core::RankFailure;
use zero_models::gpt2::weights;

use super::Plan;
use crate::TrainError;
use crate::memory::{format_bytes, peak_rss_bytes};
use crate::metrics::{MetricsWriter, RankReport, StepMetrics};

type B = Autodiff<Zero<Flex>>;

/// Trains by the plan; returns every step's metrics.
pub(super) fn train(plan: &Plan) -> Result<Vec<StepMetrics>, TrainError> {
    let observer = Mutex::new(Observer::new(plan)?);
    let outcome = launch::<Flex, _, TrainError>(plan.ranks, &plan.zero, &plan.launch, |device| {
        run_rank(plan, &device, &observer)
    });
    match outcome {
        Ok(mut steps) => Ok(steps.swap_remove(0)),
        Err(LaunchError::Run(zero_core::LaunchError::Rank { rank, world, failure })) => Err(match *failure {
            RankFailure::Failed(error) => error,
            other => TrainError::Run(format!("rank {rank} of {world}: {other}")),
        }),
        Err(other) => Err(TrainError::Run(other.to_string())),
    }
}

fn run_rank(
    plan: &Plan,
    device: &ZeroDevice<burn_flex::FlexDevice>,
    observer: &Mutex<Observer>,
) -> Result<Vec<StepMetrics>, TrainError> {
    let rank = device.rank();
    let mut model = plan.model.init::<B>(device);
    if let Some(dir) = &plan.weights {
        model = weights::load(model, dir, device)?;
    }
    let mut model = prepare::<B, _>(model, device);
    let (lr, beta_1, beta_2, epsilon, weight_decay) = plan.adamw;
    let mut optimizer = Fused::new(Rule::AdamW { beta_1, beta_2, epsilon, weight_decay });

    let tokens_per_step = plan.ranks * plan.batch * plan.rows.seq();
    let mut steps = Vec::with_capacity(plan.steps);
    for step in 0..plan.steps {
        let begin = Instant::now();
        reset_peaks::<Flex>();
        let wire_before = rank_stats::<Flex>().wire_bytes;
        let ids = plan.rows.batch(step, rank, plan.ranks, plan.batch);
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [plan.batch, plan.rows.seq()]), device);

        let loss = model.loss(ids);
        let loss_value = f64::from(loss.clone().into_scalar());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = collect_grads::<B, _>(grads, &model);
        let grad_norm = grad_norm::<B, _>(&grads, &model);
        model = optimizer.step(lr, model, grads);
        mark::<B, _>(&model);

        let elapsed = begin.elapsed();
        let stats = rank_stats::<Flex>();
        let report = RankReport {
            loss: loss_value,
            stats,
            wire: stats.wire_bytes.since(&wire_before),
            peak_rss: peak_rss_bytes().unwrap_or(0),
        };
        let reports = all_gather::<Flex>(&report.to_values());
        if rank == 0 {
            let metrics = StepMetrics {
                step: step + 1,
                loss: reports.iter().map(|values| values[0]).sum::<f64>() / plan.ranks as f64,
                grad_norm,
                lr,
                tokens: tokens_per_step,
                step_ms: elapsed.as_secs_f64() * 1e3,
                tokens_per_second: tokens_per_step as f64 / elapsed.as_secs_f64(),
                skipped: false,
                ranks: reports.iter().enumerate().map(|(rank, values)| RankReport::metrics(rank, values)).collect(),
            };
            observer.lock().expect("the observer is used by rank 0 alone").step(&metrics)?;
            if !metrics.loss.is_finite() {
                return Err(TrainError::Run(format!(
                    "the loss became {} in step {}: use a smaller --lr",
                    metrics.loss, metrics.step
                )));
            }
            steps.push(metrics);
        }
    }
    Ok(steps)
}

/// Rank 0's progress bar and metrics file.
struct Observer {
    bar: ProgressBar,
    writer: Option<MetricsWriter>,
}

impl Observer {
    fn new(plan: &Plan) -> Result<Self, TrainError> {
        let writer = plan.out.as_deref().map(MetricsWriter::create).transpose()?;
        let bar = if plan.progress { ProgressBar::new(plan.steps as u64) } else { ProgressBar::hidden() };
        bar.set_style(
            ProgressStyle::with_template("{bar:24} {pos}/{len} steps  {msg}  [{elapsed} < {eta}]")
                .expect("the template is a constant"),
        );
        bar.set_message("building the model");
        bar.enable_steady_tick(Duration::from_millis(500));
        Ok(Self { bar, writer })
    }

    fn step(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let memory = metrics.ranks.first().map_or(0, |rank| rank.peak_rss_bytes);
        self.bar.set_message(format!(
            "loss {:.4}  {:.0} tokens/s  peak memory {}",
            metrics.loss,
            metrics.tokens_per_second,
            format_bytes(memory)
        ));
        self.bar.inc(1);
        self.writer.as_mut().map_or(Ok(()), |writer| writer.write(metrics))
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
