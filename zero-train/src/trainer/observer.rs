//! Output of rank 0 during training.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::bar::Bar;
use super::plan::Plan;
use crate::Result;
use crate::config::LogFiles;
use crate::memory::format_bytes;
use crate::metrics::{EpochMetrics, Evaluated, Event, EventKind, JsonLines, SaveMetrics, StepMetrics};
use crate::monitor::{
    CsvMonitor, MemoryReport, MemoryTracker, MonitorError, Phase, RunFacts, RunReport, RunState, TensorBoardMonitor,
    io_error, write_page,
};
use crate::signals::Signal;
use crate::step::Step;

/// Columns of `metrics.csv`, and names of the scalars in TensorBoard.
const COLUMNS: [&str; 8] =
    ["loss", "perplexity", "grad_norm", "lr", "loss_scale", "skipped", "tokens_per_second", "peak_rss_bytes"];

/// Without --log-every: the maximum number of steps, and about the maximum time, between two lines.
const LINE_STEPS: usize = 10;
const LINE_TIME: Duration = Duration::from_secs(10);

/// Minimum time between two writes of the report's page.
const PAGE_TIME: Duration = Duration::from_secs(5);

// One for each thing that a step is shown on.
pub(super) struct Observer<'a> {
    plan: &'a Plan,
    bar: Bar,
    lines: Lines,
    out: Option<Out>,
    csv: Vec<CsvMonitor>,
    tensorboard: Option<TensorBoardMonitor>,
    shown: RunReport,
    breakdown: Breakdown,
    tracker: Option<MemoryTracker>,
    /// Memory of the phases that have ended in this epoch.
    memory: Vec<MemoryReport>,
    skipped: usize,
    /// Errors of files that could not be written, each reported once.
    lost: BTreeSet<String>,
}

/// The files in --out.
struct Out {
    dir: PathBuf,
    metrics: JsonLines,
    events: JsonLines,
    /// Time of the last write of the page.
    page: Option<Instant>,
}

impl Out {
    fn write_page(&mut self, shown: &RunReport) -> Result<(), MonitorError> {
        self.page = Some(Instant::now());
        write_page(&self.dir.join("report.html"), std::slice::from_ref(shown))
    }
}

/// The condition for a line, and the figures since the last one.
struct Lines {
    /// The requested number of steps between lines.
    every: Option<usize>,
    /// True if no bar is visible.
    alone: bool,
    /// The time at which the first step of the run ended, and its number.
    first: Option<(Instant, usize)>,
    last: Instant,
    /// Tokens since the last line.
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

/// Time of the steps since the last line, by pass (`wall_clock_breakdown`).
#[derive(Default)]
struct Breakdown {
    steps: usize,
    ms: [f64; 3],
}

impl Breakdown {
    /// Adds a step. Returns the mean of the steps since the last line, if one is due.
    fn add(&mut self, metrics: &StepMetrics, every: usize) -> Option<String> {
        let StepMetrics { step, forward_ms, backward_ms, update_ms, .. } = *metrics;
        self.steps += 1;
        self.ms.iter_mut().zip([forward_ms, backward_ms, update_ms]).for_each(|(sum, ms)| *sum += ms);
        if !step.is_multiple_of(every) {
            return None;
        }
        let Self { steps, ms } = std::mem::take(self);
        let [forward, backward, update] = ms.map(|ms| ms / steps as f64);
        let mean = if steps > 1 { format!(" (mean of {steps})") } else { String::new() };
        Some(format!("step {step}{mean} | forward {forward:.1} ms | backward {backward:.1} ms | step {update:.1} ms"))
    }
}

impl<'a> Observer<'a> {
    pub(super) fn new(plan: &'a Plan) -> Result<Self> {
        let report = &plan.plan.report;
        let done = plan.checkpoints.resumed_steps();
        let name = format!("{}, {} ranks, stage {}", plan.model.name, plan.plan.world, plan.plan.zero.stage);
        let facts = RunFacts {
            name,
            plan: plan.to_string().lines().map(str::to_string).collect(),
            unit: plan.data.unit().to_string(),
            has_perplexity: plan.data.has_perplexity,
            fastest: plan.light.map(|light| (plan.tokens_per_step() as f64 / light.seconds(), light.bound().into())),
            steps: plan.steps,
            formula: plan.state_formula(),
        };
        let mut shown = RunReport::new(facts.clone());
        let (mut out, mut csv) = (None, Vec::new());
        if let Some(dir) = &plan.out {
            // An earlier run's files are replaced, and of the run that is resumed the steps are kept.
            let (metrics, kept) = JsonLines::resume(dir, "metrics.jsonl", |step: &StepMetrics| step.step <= done)?;
            let (events, past) =
                JsonLines::resume(dir, "events.jsonl", |event: &Event| event.step <= done && done > 0)?;
            let facts = serde_json::to_vec(&facts).expect("facts are numbers and texts");
            let path = dir.join("run.json");
            std::fs::write(&path, facts).map_err(io_error("write", &path))?;
            out = Some(Out { dir: dir.clone(), metrics, events, page: None });
            remove(&dir.join("metrics.csv"))?;
            csv.push(CsvMonitor::open(dir, "metrics", &COLUMNS)?);
            for metrics in &kept {
                csv[0].write(metrics.step, &named(metrics))?;
                shown.step(metrics);
            }
            past.into_iter().for_each(|event| shown.event(event));
        }
        if let Some(files) = &report.csv_monitor {
            let mut monitor = CsvMonitor::open(&folder(files), "metrics", &COLUMNS)?;
            if done > 0 {
                monitor.truncate_after(done)?;
            }
            csv.push(monitor);
        }
        let tensorboard = report.tensorboard.as_ref().map(|files| TensorBoardMonitor::create(&folder(files)));
        let bar = Bar::new(plan.progress, plan.steps, done, "building the model");
        let (every, alone, now) = (report.steps_per_print, bar.is_hidden(), Instant::now());
        let mut observer = Self {
            plan,
            lines: Lines { every, alone, first: None, last: now, tokens: 0, time: Duration::ZERO },
            bar,
            breakdown: Breakdown::default(),
            out,
            csv,
            tensorboard: tensorboard.transpose()?,
            shown,
            tracker: None,
            memory: Vec::new(),
            skipped: 0,
            lost: BTreeSet::new(),
        };
        if done > 0 {
            observer.note(Event::new(EventKind::Resume, done, format!("resumed after step {done}")));
        }
        Ok(observer)
    }

    /// Handles a failed write. It is no reason to stop: it is reported once, and tried again the next time.
    fn keep(&mut self, written: Result<(), MonitorError>) {
        if let Err(error) = written
            && self.lost.insert(error.to_string())
        {
            self.log(&format!("warning: {error}; training continues"));
        }
    }

    /// Records an event other than a step.
    fn note(&mut self, event: Event) {
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let event = Event { unix_ms, ..event };
        if let Some(out) = &mut self.out {
            let written = out.events.write(&event);
            self.keep(written);
        }
        self.shown.event(event);
    }

    fn write_page(&mut self) {
        if let Some(out) = &mut self.out {
            let written = out.write_page(&self.shown);
            self.keep(written);
        }
    }

    /// Prints a warning and records it.
    pub(super) fn warn(&mut self, step: usize, warning: &str) {
        self.say(&format!("warning: {warning}"));
        self.note(Event::new(EventKind::Warning, step, warning.into()));
    }

    /// Reports the prediction for a held-out row.
    pub(super) fn sample(&mut self, step: usize, prediction: &Value) {
        let parts = prediction.as_object().into_iter().flatten().map(|(name, value)| format!("{name} {value}"));
        let text = parts.collect::<Vec<_>>().join(", ");
        self.say(&text);
        self.note(Event::new(EventKind::Sample, step, text));
    }

    /// Reports a saved checkpoint.
    pub(super) fn save(&mut self, save: &SaveMetrics) {
        let text = save.to_string();
        self.say(&text);
        let seconds = save.stall_seconds;
        self.note(Event { seconds, ..Event::new(EventKind::Save, save.step, text) });
    }

    /// Prints a line for a person: on standard output, or with `--json` on standard error.
    pub(super) fn say(&self, line: &str) {
        if !self.plan.progress {
            eprintln!("{line}");
        } else {
            self.bar.suspend(|| super::tell(&line));
        }
    }

    /// Prints a line about the training, on standard error.
    fn log(&self, line: &str) {
        use std::io::Write;

        // That nobody reads it is no reason to stop.
        self.bar.suspend(|| drop(writeln!(std::io::stderr(), "{line}")));
    }

    /// Begins a phase and ends the one before it. `device` returns the bytes in use on a device that has its own memory.
    pub(super) fn begin(&mut self, phase: Phase, device: impl Fn() -> Option<u64> + Send + 'static) {
        self.end_phase();
        if self.plan.plan.report.memory_breakdown {
            match MemoryTracker::begin(phase, device) {
                Ok(tracker) => self.tracker = Some(tracker),
                Err(error) => self.keep(Err(error)),
            }
        }
    }

    fn end_phase(&mut self) {
        match self.tracker.take().map(MemoryTracker::end).transpose() {
            Ok(Some(table)) => {
                self.say(&table.to_string());
                self.memory.push(table);
            }
            Ok(None) => {}
            Err(error) => self.keep(Err(error)),
        }
    }

    /// Reports a step that has ended; `last` is true for the run's last one, and `rows` are those whose loss is not finite.
    pub(super) fn step(&mut self, metrics: &StepMetrics, outcome: &Step, last: bool, rows: &[usize]) {
        let memory = memory(metrics);
        let speed = metrics.tokens_per_second;
        let (loss, unit, memory) = (figure(metrics.loss), self.plan.data.unit(), format_bytes(memory));
        let skipped = if self.skipped > 0 { format!("  {} skipped", self.skipped) } else { String::new() };
        self.bar.step(|| format!("loss {loss}  {speed:.0} {unit}/s  peak memory {memory}{skipped}"));
        if let Step::Skipped { loss_scale, next_loss_scale, skipped } = outcome {
            self.skipped = *skipped;
            let scale = match (*loss_scale, *next_loss_scale) {
                (1.0, 1.0) => String::new(),
                (scale, next) if scale == next => format!(", loss scale {scale} kept"),
                (scale, next) => format!(", loss scale {scale} -> {next}"),
            };
            let why = match rows.is_empty() {
                true if scale.is_empty() => "gradients are not finite".into(),
                true => "gradients overflowed".into(),
                false => format!("the loss of {} is not finite", numbered(rows)),
            };
            let text = format!("step {}: {why}, update skipped on all ranks ({skipped} so far){scale}", metrics.step);
            self.say(&text);
            self.note(Event::new(EventKind::Skip, metrics.step, text));
        } else if !rows.is_empty() {
            self.warn(metrics.step, &format!("step {}: the loss of {} is not finite", metrics.step, numbered(rows)));
        }
        self.line(metrics, last);
        if self.plan.plan.report.wall_clock_breakdown {
            let mean = self.breakdown.add(metrics, self.plan.plan.report.steps_per_print.unwrap_or(1));
            mean.into_iter().for_each(|line| self.say(&line));
        }
        self.profile(metrics);

        let named = named(metrics);
        let csv = self.csv.iter_mut().map(|csv| csv.write(metrics.step, &named));
        let tensorboard = self.tensorboard.iter_mut().map(|tensorboard| tensorboard.write(metrics.step, &named));
        let written: Vec<_> =
            csv.chain(tensorboard).chain(self.out.iter_mut().map(|out| out.metrics.write(metrics))).collect();
        written.into_iter().for_each(|written| self.keep(written));
        self.shown.step(metrics);
        if self.out.as_ref().is_some_and(|out| out.page.is_none_or(|page| page.elapsed() >= PAGE_TIME)) {
            self.write_page();
        }
    }

    /// Prints or writes the profile of a step (`flops_profiler`), if it is the step to profile.
    fn profile(&mut self, metrics: &StepMetrics) {
        let Some(profiler) = self.plan.plan.report.flops_profiler.as_ref().filter(|of| of.profile_step == metrics.step)
        else {
            return;
        };
        let StepMetrics { step, step_ms, forward_ms, backward_ms, update_ms, .. } = *metrics;
        let (profile, batch) = (&self.plan.model.profile, self.plan.plan.batch.global);
        let parameters = profile.num_params() as f64 / 1e6;
        // Padding is no work of the model's.
        let full = (metrics.tokens as f64 / self.plan.tokens_per_step() as f64).min(1.0);
        let operations = full * profile.flops_per_row * batch as f64 / 1e12;
        let rate = |ms: f64| operations / ms * 1e3;
        let text = format!(
            "profile of step {step}, {} ranks\n  parameters            {parameters:>10.2} M\n  rows                  {batch:>10}\n  \
             forward, backward     {operations:>10.3} TFLOP, {:.3} TFLOPS\n  forward               {forward_ms:>10.1} ms\n  \
             backward              {backward_ms:>10.1} ms\n  update                {update_ms:>10.1} ms\n  step                  \
             {step_ms:>10.1} ms, {:.1} rows/s, {:.3} TFLOPS",
            self.plan.plan.world,
            rate(forward_ms + backward_ms),
            batch as f64 / step_ms * 1e3,
            rate(step_ms)
        );
        match &profiler.output_file {
            None => self.say(&text),
            Some(path) => {
                if let Err(error) = std::fs::write(path, text + "\n") {
                    self.warn(step, &format!("cannot write {}: {error}", path.display()));
                }
            }
        }
    }

    /// Prints a line, if one is due after this step.
    fn line(&mut self, metrics: &StepMetrics, last: bool) {
        self.lines.tokens += metrics.tokens;
        self.lines.time += Duration::from_secs_f64(metrics.step_ms / 1e3);
        let due = self.lines.due(metrics.step, last);
        let (since, first) = *self.lines.first.get_or_insert((Instant::now(), metrics.step));
        if !due {
            return;
        }
        let speed = self.lines.tokens as f64 / self.lines.time.as_secs_f64();
        let light = self.plan.light.map(|light| {
            let share = 100.0 * light.share(speed, self.plan.tokens_per_step());
            format!(", {share:.0} % of the speed of light ({})", light.bound())
        });
        let mfu = metrics.mfu.map(|mfu| format!(", MFU {:.1} %", 100.0 * mfu * speed / metrics.tokens_per_second));
        // Saves and evaluations included, but for the first step, in which everything is done for the first time.
        let each = match metrics.step - first {
            0 => metrics.step_ms / 1e3,
            steps => since.elapsed().as_secs_f64() / steps as f64,
        };
        let left = Duration::from_secs_f64(each * self.plan.steps.saturating_sub(metrics.step) as f64);
        let StepMetrics { step, lr, .. } = metrics;
        let [loss, norm] = [metrics.loss, metrics.grad_norm].map(figure);
        let (steps, unit, left) = (self.plan.steps, self.plan.data.unit(), clock(left));
        let shares = [mfu, light].into_iter().flatten().collect::<String>();
        let speed = format!("{speed:.0} {unit}/s{shares}, ETA {left}");
        self.log(&format!("step {step}/{steps}: loss {loss}, lr {lr:.3e}, grad norm {norm}, {speed}"));
        (self.lines.last, self.lines.tokens, self.lines.time) = (Instant::now(), 0, Duration::ZERO);
    }

    /// Reports an epoch that has ended, and adds the memory of its phases to its metrics.
    pub(super) fn epoch(&mut self, metrics: &mut EpochMetrics) {
        metrics.memory = std::mem::take(&mut self.memory);
        let EpochMetrics { epoch, step, loss, .. } = metrics;
        let perplexity =
            if self.plan.data.has_perplexity { format!(", perplexity {:.2}", loss.exp()) } else { String::new() };
        let eval = metrics.eval.as_ref().map(|eval| format!("; held out: {}", self.named(eval)));
        let (loss_text, eval) = (figure(*loss), eval.unwrap_or_default());
        let text = format!("epoch {epoch} (to step {step}): loss {loss_text}{perplexity}{eval}");
        self.say(&text);
        let values = vec![("loss".into(), *loss)];
        self.note(Event { values, ..Event::new(EventKind::Epoch, *step, text) });
    }

    /// Reports an evaluation of held-out rows; `said` prints it, if nothing else will.
    pub(super) fn evaluation(&mut self, step: usize, evaluated: &Evaluated, seconds: f64, said: bool) {
        let text = format!("step {step}: held out: {}", self.named(evaluated));
        if said {
            self.say(&text);
        }
        self.note(Event { values: evaluated.clone(), seconds, ..Event::new(EventKind::Evaluation, step, text) });
        if let Some(tensorboard) = &mut self.tensorboard {
            let values = evaluated.iter().map(|(name, value)| (format!("eval_{name}"), *value));
            let perplexity =
                self.plan.data.has_perplexity.then(|| ("eval_perplexity".to_string(), evaluated[0].1.exp()));
            let values: Vec<_> = values.chain(perplexity).collect();
            let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
            let written = tensorboard.write(step, &values);
            self.keep(written);
        }
    }

    fn named(&self, evaluated: &Evaluated) -> String {
        let mut values: Vec<_> = evaluated.iter().map(|(name, value)| format!("{name} {}", figure(*value))).collect();
        if self.plan.data.has_perplexity {
            values.insert(1, format!("perplexity {:.2}", evaluated[0].1.exp()));
        }
        values.join(", ")
    }

    /// Ends the last phase, after all steps or a signal, and completes the report.
    pub(super) fn end(&mut self, step: usize, signal: Option<Signal>) {
        self.end_phase();
        let (kind, text) = match signal {
            None => (EventKind::End, "all steps are done".to_string()),
            Some(signal) => (EventKind::Stop, format!("ended by {}", signal.name())),
        };
        self.note(Event::new(kind, step, text));
        self.write_page();
        if self.plan.progress {
            let curve = Some(self.shown.curve()).filter(|curve| !curve.is_empty());
            let report = self.out.as_ref().map(|out| format!("report: {}", out.dir.join("report.html").display()));
            let dir = self.plan.checkpoints.dir.as_ref();
            let newest = "(--resume auto resumes from the newest)";
            let saved = dir.map(|dir| format!("checkpoints: {} {newest}", dir.display()));
            [curve, report, saved].into_iter().flatten().for_each(|line| self.say(&line));
        }
    }
}

/// Formats hours, minutes and seconds: "01:02:03".
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

impl Drop for Observer<'_> {
    /// Completes the report of a failed run.
    fn drop(&mut self) {
        // Clearing moves it to its end.
        let step = self.bar.steps();
        self.bar.clear();
        if self.shown.state != RunState::Running || self.lines.first.is_none() {
            return;
        }
        self.note(Event::new(EventKind::Fail, step, "an error ended the run".into()));
        self.write_page();
    }
}

/// Formats the first of these rows, by their numbers in the data.
fn numbered(rows: &[usize]) -> String {
    const FIRST: usize = 8;
    let first: Vec<String> = rows.iter().take(FIRST).map(ToString::to_string).collect();
    let more = if rows.len() > FIRST { format!(" and {} more", rows.len() - FIRST) } else { String::new() };
    format!("row{} {}{more}", if rows.len() == 1 { "" } else { "s" }, first.join(", "))
}

/// Formats a value with four decimal places, or four digits if it is small.
fn figure(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-3 { format!("{value:.3e}") } else { format!("{value:.4}") }
}

/// Returns the peak memory of the process so far, in bytes.
fn memory(metrics: &StepMetrics) -> u64 {
    metrics.ranks.first().map_or(0, |rank| rank.peak_rss_bytes)
}

/// Returns the values of [`COLUMNS`].
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

fn folder(files: &LogFiles) -> PathBuf {
    files.output_path.join(&files.job_name)
}

fn remove(path: &Path) -> Result<(), MonitorError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(io_error("replace", path)(source)),
        _ => Ok(()),
    }
}
