//! What rank 0 shows and writes while it trains.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{FormattedDuration, ProgressBar, ProgressStyle};

use super::plan::Plan;
use crate::TrainError;
use crate::config::{LogFiles, Report};
use crate::engine::{Step, Times};
use crate::memory::format_bytes;
use crate::metrics::{EpochMetrics, EvalMetrics, Evaluated, MetricsWriter, StepMetrics};
use crate::monitor::{
    CsvMonitor, LossPlot, MemoryTracker, MonitorError, Phase, TensorBoardMonitor, Timer, WallClock, io_error,
};

/// Columns of `metrics.csv`, and names of the scalars in TensorBoard.
const COLUMNS: [&str; 8] =
    ["loss", "perplexity", "grad_norm", "lr", "loss_scale", "skipped", "tokens_per_second", "peak_rss_bytes"];

/// Without --log-every: the most steps, and about the most time, between two lines.
const LINE_STEPS: usize = 10;
const LINE_TIME: Duration = Duration::from_secs(10);

// One for each thing that a step is shown on.
pub(super) struct Observer {
    bar: ProgressBar,
    /// Of the run.
    steps: usize,
    lines: Lines,
    /// Floating-point operations of a token, or of a row where it has none.
    flops_per_unit: f64,
    unit: &'static str,
    /// Floating-point operations a second that the run's devices can do, where that is known.
    pub(super) peak_flops: Option<f64>,
    report: Report,
    /// Nothing but the summary on standard output.
    quiet: bool,
    writer: Option<MetricsWriter>,
    csv: Vec<CsvMonitor>,
    tensorboard: Option<TensorBoardMonitor>,
    plot: Option<(PathBuf, LossPlot)>,
    clock: WallClock,
    tracker: Option<MemoryTracker>,
    skipped: usize,
}

/// When a line is due, and what it counts.
struct Lines {
    /// As asked for.
    every: Option<usize>,
    /// There is no bar to look at.
    alone: bool,
    /// When the first step of the run ended, and which it was.
    first: Option<(Instant, usize)>,
    last: Instant,
    /// Since the last line.
    tokens: usize,
    time: Duration,
}

impl Lines {
    fn due(&self, step: usize, last_step: bool) -> bool {
        let shown = self.alone || self.every.is_some();
        let turn = match self.every {
            Some(every) => step.is_multiple_of(every),
            None => step.is_multiple_of(LINE_STEPS) || self.last.elapsed() >= LINE_TIME,
        };
        shown && (turn || last_step || self.first.is_none())
    }
}

impl Observer {
    pub(super) fn new(plan: &Plan) -> Result<Self, TrainError> {
        let report = plan.plan.report.clone();
        let done = plan.checkpoints.resumed_steps();
        let (mut writer, mut csv, mut plot) = (None, Vec::new(), None);
        if let Some(out) = &plan.out {
            // An earlier run's files are replaced, and of the run that is resumed the steps are kept.
            let (jsonl, kept) = match done {
                0 => (MetricsWriter::create(out)?, Vec::new()),
                _ => MetricsWriter::resume(out, done)?,
            };
            writer = Some(jsonl);
            remove(&out.join("metrics.csv"))?;
            csv.push(CsvMonitor::open(out, "metrics", &COLUMNS)?);
            let title = format!("{}, {} ranks, stage {}", plan.model.name, plan.plan.world, plan.plan.stage);
            let mut drawn = LossPlot { title, ..LossPlot::default() };
            for metrics in &kept {
                csv[0].write(metrics.step, &named(metrics))?;
                draw(&mut drawn, metrics);
            }
            plot = Some((out.join("loss.svg"), drawn));
        }
        if let Some(files) = &report.csv_monitor {
            let mut monitor = CsvMonitor::open(&folder(files), "metrics", &COLUMNS)?;
            if done > 0 {
                monitor.cut_after(done)?;
            }
            csv.push(monitor);
        }
        let tensorboard = report.tensorboard.as_ref().map(|files| TensorBoardMonitor::create(&folder(files)));
        let bar = if plan.progress { ProgressBar::new(plan.steps as u64) } else { ProgressBar::hidden() };
        bar.set_style(
            ProgressStyle::with_template("{bar:24} {pos}/{len} steps  {msg}  [{elapsed} < {eta}]")
                .expect("the template is a constant"),
        );
        bar.set_position(done as u64);
        bar.set_message("building the model");
        bar.enable_steady_tick(Duration::from_millis(500));
        Ok(Self {
            steps: plan.steps,
            lines: Lines {
                every: report.steps_per_print,
                alone: bar.is_hidden(),
                first: None,
                last: Instant::now(),
                tokens: 0,
                time: Duration::ZERO,
            },
            flops_per_unit: plan.model.profile.flops_per_row / plan.data.units() as f64,
            unit: plan.data.unit(),
            peak_flops: None,
            bar,
            clock: WallClock::new(report.steps_per_print.unwrap_or(1)),
            report,
            quiet: !plan.progress,
            writer,
            csv,
            tensorboard: tensorboard.transpose()?,
            plot,
            tracker: None,
            skipped: 0,
        })
    }

    /// A line for a person: on standard output, or with `--json` on standard error.
    pub(super) fn say(&self, line: &str) {
        if self.quiet {
            eprintln!("{line}");
        } else {
            self.bar.suspend(|| super::tell(&line));
        }
    }

    /// A line about the training, on standard error.
    fn log(&self, line: &str) {
        use std::io::Write;

        // That nobody reads it is no reason to stop.
        self.bar.suspend(|| drop(writeln!(std::io::stderr(), "{line}")));
    }

    /// A phase begins; the one before it ends. `device` tells the bytes in use of a device that has memory of its own.
    pub(super) fn begin(
        &mut self,
        phase: Phase,
        device: impl Fn() -> Option<u64> + Send + 'static,
    ) -> Result<(), TrainError> {
        self.end_phase()?;
        if self.report.memory_breakdown {
            self.tracker = Some(MemoryTracker::begin_with_device(phase, device)?);
        }
        Ok(())
    }

    fn end_phase(&mut self) -> Result<(), TrainError> {
        if let Some(tracker) = self.tracker.take() {
            let table = tracker.end()?;
            self.say(&table.to_string());
        }
        Ok(())
    }

    /// A step has ended, the `last` of the run or not.
    pub(super) fn step(
        &mut self,
        metrics: &StepMetrics,
        outcome: &Step,
        times: Times,
        last: bool,
    ) -> Result<(), TrainError> {
        let memory = memory(metrics);
        let speed = metrics.tokens_per_second;
        self.bar.set_message(format!(
            "loss {:.4}  {speed:.0} {}/s  peak memory {}{}",
            metrics.loss,
            self.unit,
            format_bytes(memory),
            if self.skipped > 0 { format!("  {} skipped", self.skipped) } else { String::new() }
        ));
        self.bar.inc(1);
        if let Step::Skipped { loss_scale, next_loss_scale, skipped } = outcome {
            self.skipped = *skipped;
            let scale = match loss_scale == next_loss_scale {
                true => format!("loss scale {loss_scale} kept"),
                false => format!("loss scale {loss_scale} -> {next_loss_scale}"),
            };
            self.say(&format!(
                "step {}: gradients overflowed, update skipped on all ranks ({skipped} so far), {scale}",
                metrics.step
            ));
        }
        self.line(metrics, last);
        for (timer, time) in
            [(Timer::Forward, times.forward), (Timer::Backward, times.backward), (Timer::Step, times.step)]
        {
            self.clock.add(timer, time);
        }
        let (_, mean) = self.clock.end_step(metrics.step)?;
        if let Some(mean) = mean.filter(|_| self.report.wall_clock_breakdown) {
            self.say(&mean.to_string());
        }

        let named = named(metrics);
        for csv in &mut self.csv {
            csv.write(metrics.step, &named)?;
        }
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.write(metrics.step, &named)?;
        }
        if let Some((_, plot)) = &mut self.plot {
            draw(plot, metrics);
        }
        if let Some(writer) = &mut self.writer {
            writer.write(metrics)?;
        }
        Ok(())
    }

    /// Writes a line, if one is due after this step.
    fn line(&mut self, metrics: &StepMetrics, last: bool) {
        self.lines.tokens += metrics.tokens;
        self.lines.time += Duration::from_secs_f64(metrics.step_ms / 1e3);
        let due = self.lines.due(metrics.step, last);
        let (since, first) = *self.lines.first.get_or_insert((Instant::now(), metrics.step));
        if !due {
            return;
        }
        let speed = self.lines.tokens as f64 / self.lines.time.as_secs_f64();
        let mfu = self.peak_flops.map(|peak| format!(", MFU {:.1} %", 100.0 * speed * self.flops_per_unit / peak));
        // Saves and evaluations included, but for the first step, in which everything is done for the first time.
        let each = match metrics.step - first {
            0 => metrics.step_ms / 1e3,
            steps => since.elapsed().as_secs_f64() / steps as f64,
        };
        let left = Duration::from_secs_f64(each * self.steps.saturating_sub(metrics.step) as f64);
        let StepMetrics { step, loss, lr, grad_norm, .. } = metrics;
        self.log(&format!(
            "step {step}/{}: loss {loss:.4}, lr {lr:.3e}, grad norm {grad_norm:.4}, {speed:.0} {}/s{}, ETA {}",
            self.steps,
            self.unit,
            mfu.unwrap_or_default(),
            FormattedDuration(left)
        ));
        (self.lines.last, self.lines.tokens, self.lines.time) = (Instant::now(), 0, Duration::ZERO);
    }

    pub(super) fn epoch(&mut self, metrics: &EpochMetrics) -> Result<(), TrainError> {
        let EpochMetrics { epoch, step, loss, perplexity, .. } = metrics;
        let perplexity = if self.unit == "tokens" { format!(", perplexity {perplexity:.2}") } else { String::new() };
        let eval = metrics.eval.as_ref().map(|eval| format!("; held out: {}", self.named(eval)));
        self.say(&format!("epoch {epoch} (to step {step}): loss {loss:.4}{perplexity}{}", eval.unwrap_or_default()));
        metrics.eval.as_ref().map_or(Ok(()), |eval| self.write_eval(*step, eval))
    }

    /// An evaluation between epochs.
    pub(super) fn evaluation(&mut self, metrics: &EvalMetrics) -> Result<(), TrainError> {
        let EvalMetrics { step, values } = metrics;
        self.say(&format!("step {step}: held out: {}", self.named(values)));
        self.write_eval(*step, values)
    }

    fn named(&self, evaluated: &Evaluated) -> String {
        let mut values: Vec<_> = evaluated.iter().map(|(name, value)| format!("{name} {value:.4}")).collect();
        if self.unit == "tokens" {
            values.insert(1, format!("perplexity {:.2}", evaluated[0].1.exp()));
        }
        values.join(", ")
    }

    fn write_eval(&mut self, step: usize, evaluated: &Evaluated) -> Result<(), TrainError> {
        if let Some(tensorboard) = &mut self.tensorboard {
            let values = evaluated.iter().map(|(name, value)| (format!("eval_{name}"), *value));
            let perplexity = (self.unit == "tokens").then(|| ("eval_perplexity".to_string(), evaluated[0].1.exp()));
            let values: Vec<_> = values.chain(perplexity).collect();
            let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
            tensorboard.write(step, &values)?;
        }
        Ok(())
    }

    /// The last phase ends, and the plot is drawn.
    pub(super) fn end(&mut self) -> Result<(), TrainError> {
        self.end_phase()?;
        if let Some((path, plot)) = self.plot.take() {
            plot.write(&path)?;
        }
        Ok(())
    }
}

impl Drop for Observer {
    /// A run that has failed leaves its plot too.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        let plot = self.plot.take().filter(|(_, plot)| !plot.loss.is_empty());
        if let Some(Err(error)) = plot.map(|(path, plot)| plot.write(&path)) {
            self.log(&format!("warning: {error}"));
        }
    }
}

/// Most memory of the process so far, in bytes.
fn memory(metrics: &StepMetrics) -> u64 {
    metrics.ranks.first().map_or(0, |rank| rank.peak_rss_bytes)
}

/// The values of [`COLUMNS`].
fn named(metrics: &StepMetrics) -> Vec<(&'static str, f64)> {
    let values: [f64; COLUMNS.len()] = [
        metrics.loss,
        metrics.loss.exp(),
        metrics.grad_norm,
        metrics.lr,
        metrics.loss_scale,
        f64::from(u8::from(metrics.skipped)),
        metrics.tokens_per_second,
        memory(metrics) as f64,
    ];
    COLUMNS.into_iter().zip(values).collect()
}

fn draw(plot: &mut LossPlot, metrics: &StepMetrics) {
    plot.loss.push((metrics.step, metrics.loss));
    plot.memory_bytes.push((metrics.step, memory(metrics)));
}

fn folder(files: &LogFiles) -> PathBuf {
    files.output_path.join(&files.job_name)
}

fn remove(path: &Path) -> Result<(), MonitorError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(io_error("replace", path)(source)),
        _ => Ok(()),
    }
}
