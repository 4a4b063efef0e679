//! A self-contained HTML page of one run, or of several side by side: `report.html` in `--out`, and `zero report`.
//!
//! * Input: [`RunFacts`], [`StepMetrics`] and [`Event`]s, as they arrive or from a run's files.
//! * Output: a page that needs no network, of less than a megabyte however long the run; a loss curve for a terminal.
//! * Memory: a fixed number of intervals of steps, which double in length as the run proceeds.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zero_core::accounting::{StateBytes, WireBytes};

use super::{MonitorError, Result, io_error};
use crate::metrics::{Event, EventKind, JsonLines, RankMetrics, StepMetrics};

const PAGE: &str = include_str!("report.html");

/// The placeholder that the data replaces.
const PLACE: &str = "/*DATA*/null";

/// At most twice this number of intervals is kept.
const STRETCHES: usize = 500;

/// Maximum number of events that are kept, and half the maximum number of points of an evaluation's value.
const POINTS: usize = 1000;

/// Rows and columns of the curve in a terminal.
const CURVE: (usize, usize) = (8, 64);

/// Facts of a run that are known before its first step: `run.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunFacts {
    /// Model, ranks and stage.
    pub name: String,
    /// The plan, one line each.
    pub plan: Vec<String>,
    /// Unit of speeds: `tokens` or `rows`.
    pub unit: String,
    /// True if `exp(loss)` is a perplexity.
    #[serde(default)]
    pub has_perplexity: bool,
    /// The most tokens (or rows) per second at this machine's rates, and what bounds them; `None` if unknown.
    #[serde(default)]
    pub fastest: Option<(f64, String)>,
    /// Steps of the full run.
    pub steps: usize,
    /// Bytes of one rank's model state by the ZeRO formula.
    pub formula: StateBytes,
}

/// State of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Steps remain.
    Running,
    /// All steps are done.
    Done,
    /// A signal has ended it.
    Stopped,
    /// An error has ended it.
    Failed,
}

/// A run as shown in a report.
#[derive(Debug, Clone)]
pub struct RunReport {
    facts: RunFacts,
    /// State of the run.
    pub state: RunState,
    series: Series,
    eval: BTreeMap<String, Vec<(usize, f64)>>,
    ranks: Vec<RankMetrics>,
    /// Seconds, by activity.
    time: BTreeMap<&'static str, f64>,
    events: Vec<Event>,
}

/// An interval of steps, whose values are merged.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    last_step: usize,
    steps: usize,
    loss: Range,
    sums: [f64; 5],
    /// Number of known values in each sum.
    known: [usize; 5],
}

/// Names of [`Stretch::sums`].
const SUMS: [&str; 5] = ["lr", "grad_norm", "speed", "mfu", "memory"];

#[derive(Debug, Clone, Copy)]
struct Range {
    sum: f64,
    count: usize,
    min: f64,
    max: f64,
}

#[derive(Debug, Clone)]
struct Series {
    /// Number of steps of a full interval.
    length: usize,
    stretches: Vec<Stretch>,
}

impl Range {
    const NONE: Self = Self { sum: 0.0, count: 0, min: f64::INFINITY, max: f64::NEG_INFINITY };

    fn and(self, other: Self) -> Self {
        Self {
            sum: self.sum + other.sum,
            count: self.count + other.count,
            min: self.min.min(other.min),
            max: self.max.max(other.max),
        }
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

impl Stretch {
    fn of(step: &StepMetrics) -> Self {
        let memory = step.ranks.first().map(|rank| rank.peak_rss_bytes as f64);
        let values = [Some(step.lr), Some(step.grad_norm), Some(step.tokens_per_second), step.mfu, memory];
        let values = values.map(|value| value.filter(|value| value.is_finite()));
        let loss = match step.loss.is_finite() {
            true => Range { sum: step.loss, count: 1, min: step.loss, max: step.loss },
            false => Range::NONE,
        };
        Self {
            last_step: step.step,
            steps: 1,
            loss,
            sums: values.map(Option::unwrap_or_default),
            known: values.map(|value| usize::from(value.is_some())),
        }
    }

    fn and(mut self, other: &Self) -> Self {
        self.sums.iter_mut().zip(other.sums).for_each(|(sum, other)| *sum += other);
        self.known.iter_mut().zip(other.known).for_each(|(known, other)| *known += other);
        (self.last_step, self.steps, self.loss) =
            (other.last_step, self.steps + other.steps, self.loss.and(other.loss));
        self
    }
}

impl Series {
    fn add(&mut self, stretch: Stretch) {
        match self.stretches.last_mut().filter(|last| last.steps < self.length) {
            Some(last) => *last = last.and(&stretch),
            None => self.stretches.push(stretch),
        }
        if self.stretches.len() > 2 * STRETCHES {
            self.length *= 2;
            let pairs = std::mem::take(&mut self.stretches);
            self.stretches = pairs.chunks(2).map(|pair| pair[1..].iter().fold(pair[0], Stretch::and)).collect();
        }
    }
}

impl RunReport {
    /// Creates the report of a run that begins.
    pub fn new(facts: RunFacts) -> Self {
        let series = Series { length: 1, stretches: Vec::new() };
        let (eval, time) = (BTreeMap::new(), BTreeMap::new());
        Self { facts, state: RunState::Running, series, eval, ranks: Vec::new(), time, events: Vec::new() }
    }

    /// Reads the files that a run has written into its `--out`.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`]; [`MonitorError::NoRun`] if the folder has no readable `run.json`.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("run.json");
        let no_run = |problem: String| MonitorError::NoRun { path: folder.to_path_buf(), problem };
        let facts = std::fs::read(&path).map_err(|error| no_run(format!("cannot read {}: {error}", path.display())))?;
        let facts = serde_json::from_slice(&facts).map_err(|error| no_run(format!("{}: {error}", path.display())))?;
        let mut report = Self::new(facts);
        let steps: Vec<StepMetrics> = JsonLines::read(&folder.join("metrics.jsonl"))?;
        steps.iter().for_each(|step| report.step(step));
        let events: Vec<Event> = JsonLines::read(&folder.join("events.jsonl"))?;
        events.into_iter().for_each(|event| report.event(event));
        Ok(report)
    }

    /// Adds a step that has ended.
    pub fn step(&mut self, step: &StepMetrics) {
        self.series.add(Stretch::of(step));
        self.ranks.clone_from(&step.ranks);
        let parts = [("forward", step.forward_ms), ("backward", step.backward_ms), ("update", step.update_ms)];
        let known: f64 = parts.iter().map(|(_, ms)| ms).sum();
        for (kind, ms) in parts.into_iter().chain([("other", (step.step_ms - known).max(0.0))]) {
            *self.time.entry(kind).or_default() += ms / 1e3;
        }
    }

    /// Adds an event.
    pub fn event(&mut self, event: Event) {
        let kind = match event.kind {
            EventKind::Evaluation => Some("evaluation"),
            EventKind::Save => Some("checkpoints"),
            _ => None,
        };
        if let Some(kind) = kind {
            *self.time.entry(kind).or_default() += event.seconds;
        }
        match event.kind {
            EventKind::Resume => self.state = RunState::Running,
            EventKind::End => self.state = RunState::Done,
            EventKind::Stop => self.state = RunState::Stopped,
            EventKind::Fail => self.state = RunState::Failed,
            EventKind::Evaluation => {
                for (name, value) in event.values.iter().filter(|(_, value)| value.is_finite()) {
                    let points = self.eval.entry(name.clone()).or_default();
                    points.push((event.step, *value));
                    if points.len() > 2 * POINTS {
                        // The newest stays.
                        let odd = points.len() % 2;
                        let mut place: usize = odd;
                        points.retain(|_| {
                            place += 1;
                            place.is_multiple_of(2)
                        });
                    }
                }
            }
            _ => {}
        }
        // What evaluations say is drawn.
        if event.kind != EventKind::Evaluation {
            self.events.push(event);
        }
        if self.events.len() > POINTS {
            self.events.drain(..POINTS / 2);
        }
    }

    fn data(&self) -> Value {
        let stretches = &self.series.stretches;
        let mut series = json!({
            "step": stretches.iter().map(|stretch| stretch.last_step).collect::<Vec<_>>(),
            "loss": stretches.iter().map(|stretch| stretch.loss.mean()).collect::<Vec<_>>(),
        });
        // JSON has no infinity: of nothing, null.
        series["loss_min"] = stretches.iter().map(|stretch| stretch.loss.min).collect();
        series["loss_max"] = stretches.iter().map(|stretch| stretch.loss.max).collect();
        for (i, name) in SUMS.into_iter().enumerate() {
            let mean = |stretch: &Stretch| (stretch.known[i] > 0).then(|| stretch.sums[i] / stretch.known[i] as f64);
            let values: Vec<Option<f64>> = stretches.iter().map(mean).collect();
            series[name] = if values.iter().all(Option::is_none) { Value::Null } else { json!(values) };
        }
        let rank = |rank: &RankMetrics| {
            let StateBytes { parameters, gradients, optimizer } = rank.model_state_bytes;
            json!({
                "rank": rank.rank, "parameters": parameters, "gradients": gradients, "optimizer": optimizer,
                "peak_rss": rank.peak_rss_bytes
            })
        };
        let wire = self.ranks.iter().map(|rank| &rank.wire_bytes).max_by_key(|wire| wire.total());
        json!({
            "name": self.facts.name, "plan": self.facts.plan, "unit": self.facts.unit, "has_perplexity": self.facts.has_perplexity, "fastest": self.facts.fastest, "steps": self.facts.steps,
            "state": self.state, "series": series, "eval": self.eval,
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "formula": self.facts.formula, "time": self.time, "wire": wire.unwrap_or(&WireBytes::default()),
            "events": self.events,
        })
    }

    /// Returns the loss over the steps as text for a terminal; empty before two steps, and for a constant loss.
    pub fn curve(&self) -> String {
        let (height, width) = CURVE;
        let points: Vec<f64> = self.series.stretches.iter().filter_map(|stretch| stretch.loss.mean()).collect();
        let (Some(low), Some(high)) =
            (points.iter().copied().reduce(f64::min), points.iter().copied().reduce(f64::max))
        else {
            return String::new();
        };
        if points.len() < 2 || low == high {
            return String::new();
        }
        let width = width.min(points.len());
        let column = |i: usize| {
            let part = &points[i * points.len() / width..((i + 1) * points.len()).div_ceil(width).min(points.len())];
            part.iter().sum::<f64>() / part.len() as f64
        };
        // Two points above each other in a character.
        let level = |loss: f64| ((loss - low) / (high - low) * (2 * height - 1) as f64).round() as usize;
        let levels: Vec<usize> = (0..width).map(|i| level(column(i))).collect();
        let mut text = String::new();
        for row in (0..height).rev() {
            let label = match row {
                0 => format!("{low:8.4}"),
                row if row + 1 == height => format!("{high:8.4}"),
                _ => String::new(),
            };
            let line: String = levels
                .iter()
                .map(|&level| match level.checked_sub(2 * row) {
                    Some(0) => '.',
                    Some(1) => '\'',
                    _ => ' ',
                })
                .collect();
            writeln!(text, "{label:>8} | {}", line.trim_end()).expect("a string takes what is written");
        }
        let (first, last) = (self.series.stretches[0].last_step, self.series.stretches[points.len() - 1].last_step);
        write!(text, "    loss   steps {first} to {last}").expect("a string takes what is written");
        text
    }
}

/// Returns the page of these runs.
pub fn page(runs: &[RunReport]) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let data = json!({ "updated_unix_ms": now, "runs": runs.iter().map(RunReport::data).collect::<Vec<_>>() });
    // So that no text ends the script.
    PAGE.replacen(PLACE, &data.to_string().replace('<', "\\u003c"), 1)
}

/// Writes the page of these runs to `path`. It replaces an earlier page atomically, so that a browser never sees half of
/// one. The folder must exist.
///
/// # Errors
///
/// [`MonitorError::Io`], which leaves the earlier page unchanged.
pub fn write_page(path: &Path, runs: &[RunReport]) -> Result<()> {
    write_whole(path, page(runs).as_bytes())
}

/// Writes a file that replaces an earlier one; an error leaves that one unchanged. The folder must exist.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // What an ordinary new file may be used for (less the process's mask); temporary files are private otherwise.
    let readable = Permissions::from_mode(0o666);
    let file = tempfile::Builder::new().prefix(".part-").permissions(readable).tempfile_in(dir);
    let mut file = file.map_err(io_error("create a file in", dir))?;
    file.write_all(bytes).map_err(io_error("write", file.path()))?;
    file.persist(path).map_err(|error| io_error("write", path)(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> RunFacts {
        let formula = StateBytes { parameters: 10, gradients: 10, optimizer: 20 };
        RunFacts {
            name: "a </script> b".into(),
            plan: vec!["p".into()],
            unit: "rows".into(),
            has_perplexity: false,
            fastest: Some((1000.0, "products".into())),
            steps: 100_000,
            formula,
        }
    }

    fn step(step: usize, loss: f64) -> StepMetrics {
        StepMetrics {
            step,
            loss,
            grad_norm: f64::INFINITY,
            lr: 0.5,
            ranks: vec![RankMetrics::default()],
            ..StepMetrics::default()
        }
    }

    /// Returns the JSON in a page.
    fn data(page: &str) -> Value {
        let begin = page.find("const DATA = ").unwrap() + 13;
        let end = begin + page[begin..].find(";</script>").or(page[begin..].find(";\n")).unwrap();
        serde_json::from_str(&page[begin..end]).unwrap()
    }

    #[test]
    fn a_long_run_has_a_small_page() {
        let mut report = RunReport::new(facts());
        for i in 1..=100_000 {
            report.step(&step(i, 1.0 + 1.0 / i as f64));
            if i % 10 == 0 {
                let values = vec![("loss".to_string(), 1.0), ("accuracy".to_string(), f64::NAN)];
                report.event(Event { step: i, kind: EventKind::Evaluation, values, seconds: 0.5, ..Event::default() });
                report.event(Event { step: i, kind: EventKind::Save, text: "saved".into(), ..Event::default() });
            }
        }
        let page = page(&[report.clone(), report]);
        assert!(page.len() < 1_000_000, "{} bytes", page.len());
        assert!(!page.contains("a </script> b"));
        let run = &data(&page)["runs"][1];
        assert_eq!(run["name"], "a </script> b");
        let series = &run["series"];
        let steps = series["step"].as_array().unwrap();
        assert!(steps.len() > STRETCHES && steps.len() <= 2 * STRETCHES, "{}", steps.len());
        assert_eq!(steps.last().unwrap(), 100_000);
        assert_eq!((&series["loss_max"][0], &series["lr"][0]), (&json!(2.0), &json!(0.5)));
        // Of a norm that is never finite, nothing.
        assert_eq!(series["grad_norm"], Value::Null);
        assert_eq!(run["time"]["evaluation"], 5000.0);
        let eval = run["eval"]["loss"].as_array().unwrap();
        assert!(eval.len() <= 2 * POINTS && eval.last().unwrap()[0] == 100_000, "{}", eval.len());
    }

    #[test]
    fn a_run_is_read_from_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let told = RunReport::read(dir.path()).unwrap_err().to_string();
        assert!(told.contains("run.json"), "{told}");
        std::fs::write(dir.path().join("run.json"), serde_json::to_vec(&facts()).unwrap()).unwrap();
        let mut steps = JsonLines::create(dir.path(), "metrics.jsonl").unwrap();
        let mut events = JsonLines::create(dir.path(), "events.jsonl").unwrap();
        let mut report = RunReport::new(facts());
        for i in 1..=50 {
            steps.write(&step(i, 5.0 / i as f64)).unwrap();
            report.step(&step(i, 5.0 / i as f64));
        }
        let end = Event { step: 50, kind: EventKind::End, text: "done".into(), ..Event::default() };
        events.write(&end).unwrap();
        report.event(end);
        let read = RunReport::read(dir.path()).unwrap();
        assert_eq!(read.state, RunState::Done);
        assert_eq!(read.data(), report.data());
        let curve = read.curve();
        assert_eq!(curve.lines().count(), CURVE.0 + 1, "{curve}");
        assert!(curve.contains("5.0000 | '") && curve.ends_with("steps 1 to 50"), "{curve}");
    }

    #[test]
    fn odd_series_are_no_trouble() {
        for losses in [vec![], vec![1.0], vec![2.0, 2.0], vec![f64::NAN, 1.0], vec![f64::INFINITY; 3]] {
            let mut report = RunReport::new(facts());
            losses.iter().enumerate().for_each(|(i, &loss)| report.step(&step(i + 1, loss)));
            assert_eq!(
                data(&page(&[report.clone()]))["runs"][0]["series"]["step"].as_array().unwrap().len(),
                losses.len()
            );
            assert_eq!(report.curve(), "");
        }
    }
}
