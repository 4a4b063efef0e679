//! `zero tune`: short runs of `zero train` with different settings, to find the fastest.
//!
//! The number of rows per step stays the same, so the training result does too, but for the order of additions. Ranks, micro-batch and
//! ZeRO stage are searched one after the other, each with the best of the others so far. A trial is a process of its own: one that runs
//! out of memory ends no other. What a trial leaves open, such as offload and activation checkpointing, its plan chooses.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use serde_json::{Value, json};
use zero_core::collective::launcher::started;

use super::Options;
use crate::error::{Result, TrainError, io, wrong, wrong_data};
use crate::memory::format_bytes;

/// Options of `zero tune`, besides those of `zero train`.
#[derive(Debug, Clone, Args)]
pub struct TuneOptions {
    /// Rows per step, over all ranks and micro-batches, which all trials keep [default: --batch x --accumulation x --ranks, or
    /// what --config sets]
    #[arg(long, value_name = "ROWS")]
    pub train_batch_size: Option<usize>,
    /// Steps of a trial; the first one is not timed [default: autotuning.end_profile_step in --config, otherwise 4]
    #[arg(long, value_name = "N")]
    pub trial_steps: Option<usize>,
    /// Run at most N trials [default: autotuning.tuner_num_trials in --config, otherwise 20]
    #[arg(long, value_name = "N")]
    pub trials: Option<usize>,
    /// End a trial that takes longer than SECONDS
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    pub trial_timeout: f64,
    /// Write the --config file with the fastest settings to this file
    #[arg(long, value_name = "FILE", requires = "config")]
    pub output: Option<PathBuf>,
    /// Those of `zero train`.
    #[command(flatten)]
    pub train: Options,
}

/// Options of `zero train` that a trial does not have: those that are searched, and those of evaluation and output.
const LEFT_OUT: [&str; 25] = [
    "batch",
    "accumulation",
    "auto-find-batch-size",
    "steps",
    "eval",
    "eval-every",
    "eval-samples",
    "eval-metric",
    "predictions",
    "out",
    "save",
    "save-every",
    "save-async",
    "keep-last",
    "keep-best",
    "resume",
    "trace",
    "log-every",
    "json",
    "dry-run",
    "memory-breakdown",
    "flight",
    "config",
    "ranks",
    "stage",
];

/// Text of the error of a run that needs too much memory.
const NO_FIT: &str = "does not fit";

/// The settings of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Setting {
    ranks: usize,
    /// `None`: the configuration file's.
    stage: Option<u8>,
    batch: usize,
    accumulation: usize,
}

/// The measurements of a trial.
#[derive(Debug, Clone, Copy)]
struct Measurement {
    /// Median seconds per step.
    seconds: f64,
    /// Peak memory of the process.
    bytes: u64,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, stage, batch, accumulation } = self;
        let stage = stage.map_or("file".into(), |stage| stage.to_string());
        write!(f, "{ranks:>5} {stage:>5} {batch:>5} {accumulation:>12}")
    }
}

/// A search in progress.
struct Search<'a> {
    options: &'a TuneOptions,
    trial_steps: usize,
    /// Trials that may still be run.
    trials_left: usize,
    rows: usize,
    /// Options of every trial.
    given: Vec<OsString>,
    file: Option<(PathBuf, Value)>,
    scratch: tempfile::TempDir,
    /// A measurement, or the reason that there is none.
    trials: BTreeMap<Setting, Result<Measurement, String>>,
}

/// Runs trials of `zero train` with the options of a command line, and prints the fastest. `matches` are those of the options, `program`
/// is the program's name.
///
/// # Errors
///
/// [`TrainError`] if the options cannot be used, or if no trial runs to its end.
pub fn run(program: &str, options: &TuneOptions, matches: &ArgMatches) -> Result<()> {
    let Options { train, .. } = &options.train;
    if started().is_some() {
        let problem =
            "zero tune was started by a launcher, as one of several ranks: start it alone; it runs the trials itself";
        return Err(TrainError::Launch(problem.into()));
    }
    if !(options.trial_timeout.is_finite() && options.trial_timeout > 0.0) {
        return Err(wrong("trial-timeout", options.trial_timeout, "expected a number of seconds above 0"));
    }
    if let Some(path) = options.output.as_ref().filter(|path| path.exists()) {
        return Err(wrong("output", path.display(), "expected a file that does not exist yet"));
    }
    let file = train.config.as_deref().map(|path| read(path).map(|file| (path.to_path_buf(), file))).transpose()?;
    let of_file = |key: &str| file.as_ref().and_then(|(_, file)| file[key].as_u64()).map(|number| number as usize);
    let autotuning = |key: &str| {
        let number = file.as_ref().and_then(|(_, file)| file["autotuning"][key].as_u64());
        number.map(|number| number as usize)
    };
    let trial_steps = options.trial_steps.or(autotuning("end_profile_step")).unwrap_or(4);
    let trials = options.trials.or(autotuning("tuner_num_trials")).unwrap_or(20);
    for (name, value, least) in [("trial-steps", trial_steps, 2), ("trials", trials, 1)] {
        if value < least {
            return Err(wrong(name, value, format!("expected at least {least}")));
        }
    }
    let ranks = train.ranks.unwrap_or(2);
    let rows = options.train_batch_size.or(of_file("train_batch_size")).unwrap_or_else(|| {
        let batch = train.hyper.batch.or(of_file("train_micro_batch_size_per_gpu")).unwrap_or(1);
        batch * train.hyper.accumulation.or(of_file("gradient_accumulation_steps")).unwrap_or(1) * ranks
    });
    if rows == 0 || train.ranks.is_some_and(|ranks| ranks == 0 || !rows.is_multiple_of(ranks)) {
        let expected = format!("expected a multiple of --ranks {ranks}");
        return Err(wrong("train-batch-size", rows, expected));
    }
    let least = autotuning("min_train_micro_batch_size_per_gpu").unwrap_or(1);
    let most = autotuning("max_train_micro_batch_size_per_gpu").unwrap_or(usize::MAX);
    let limits = [least, most.max(least)];
    let given = given(matches);
    let keep = |(name, _): &&(String, Vec<OsString>)| !LEFT_OUT.contains(&&**name);
    let scratch = tempfile::tempdir().map_err(io("create a folder in", &std::env::temp_dir()))?;
    let mut search = Search {
        options,
        trial_steps,
        trials_left: trials,
        rows,
        given: given.iter().filter(keep).flat_map(|(name, values)| written(name, values)).collect(),
        file,
        scratch,
        trials: BTreeMap::new(),
    };
    let best = search.search(train.ranks, train.stage, limits)?;
    search.report(program, &given, best)
}

/// Returns whether only JSON is printed.
fn json_only(options: &TuneOptions) -> bool {
    options.train.train.json
}

/// Reads a DeepSpeed file.
fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(io("read", path))?;
    let file: Option<Value> = serde_json::from_str(&text).ok();
    file.filter(Value::is_object).ok_or_else(|| {
        wrong_data(path, "expected a DeepSpeed JSON file: zero tune cannot change other files; pass options instead")
    })
}

/// Returns the options of `zero train` that the command line gives, with their values, in the order of the help.
fn given(matches: &ArgMatches) -> Vec<(String, Vec<OsString>)> {
    let command = Options::augment_args(clap::Command::new("train"));
    let of = |arg: &clap::Arg| {
        let id = arg.get_id().as_str();
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            return None;
        }
        let values = matches.get_raw(id).filter(|_| arg.get_action().takes_values());
        Some((arg.get_long()?.to_string(), values.into_iter().flatten().map(OsString::from).collect()))
    };
    command.get_arguments().filter_map(of).collect()
}

/// Returns an option as it is written on a command line.
fn written(name: &str, values: &[OsString]) -> Vec<OsString> {
    let option = OsString::from(format!("--{name}"));
    if values.is_empty() {
        return vec![option];
    }
    values.iter().flat_map(|value| [option.clone(), value.clone()]).collect()
}

/// Returns the divisors of `number` within limits, the largest first.
fn divisors(number: usize, [least, most]: [usize; 2]) -> Vec<usize> {
    (1..=number).rev().filter(|divisor| number.is_multiple_of(*divisor) && (least..=most).contains(divisor)).collect()
}

impl Search<'_> {
    /// Returns the fastest setting.
    fn search(&mut self, ranks: Option<usize>, stage: Option<u8>, limits: [usize; 2]) -> Result<Setting> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks: Vec<usize> = match ranks {
            Some(ranks) => vec![ranks],
            None => {
                let powers =
                    std::iter::successors(Some(1), |ranks| Some(ranks * 2)).take_while(|&ranks| ranks <= cores.max(2));
                powers.filter(|ranks| self.rows.is_multiple_of(*ranks)).collect()
            }
        };
        // Stage 3 takes the least memory: a micro-batch that does not fit there fits nowhere.
        let of_file = self.file.as_ref().filter(|(_, file)| !file["zero_optimization"]["stage"].is_null());
        let searches_stage = stage.is_none() && of_file.is_none();
        let first = stage.or(searches_stage.then_some(3));
        let mut best: Option<Setting> = None;
        for ranks in ranks {
            let batches = divisors(self.rows / ranks, limits);
            if batches.is_empty() {
                continue;
            }
            let mut last = None;
            for batch in batches {
                let setting = Setting { ranks, stage: first, batch, accumulation: self.rows / ranks / batch };
                let seconds = self.seconds(setting)?;
                // Smaller micro-batches only become slower.
                if last.is_some_and(|last| seconds > last) {
                    break;
                }
                last = Some(seconds).filter(|seconds| seconds.is_finite());
                best = self.faster(best, setting);
            }
        }
        let Some(mut best) = best.filter(|best| self.measured(best).is_some()) else {
            let why = self.trials.values().find_map(|trial| trial.as_ref().err()).cloned();
            let none =
                || format!("no micro-batch of {} to {} rows divides {} rows per step", limits[0], limits[1], self.rows);
            return Err(TrainError::Launch(
                why.map_or_else(none, |why| format!("no trial ran to its end; the first one: {why}")),
            ));
        };
        if searches_stage {
            for stage in [2, 1, 0] {
                let setting = Setting { stage: Some(stage), ..best };
                self.seconds(setting)?;
                best = self.faster(Some(best), setting).unwrap_or(best);
            }
        }
        Ok(self.confirm(best))
    }

    fn measured(&self, setting: &Setting) -> Option<Measurement> {
        self.trials.get(setting)?.as_ref().ok().copied()
    }

    /// Returns the faster of two settings that have been measured.
    fn faster(&self, best: Option<Setting>, other: Setting) -> Option<Setting> {
        let seconds = |setting: &Setting| self.measured(setting).map_or(f64::INFINITY, |found| found.seconds);
        best.into_iter().chain([other]).min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
    }

    /// Measures the two fastest settings once more, and returns the faster one.
    fn confirm(&mut self, best: Setting) -> Setting {
        let mut found: Vec<(Setting, Measurement)> =
            self.trials.iter().filter_map(|(setting, trial)| Some((*setting, *trial.as_ref().ok()?))).collect();
        found.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
        if found.len() < 2 {
            return best;
        }
        for (setting, before) in found.iter_mut().take(2) {
            if let Ok(again) = self.trial(*setting) {
                before.seconds = before.seconds.min(again.seconds);
                self.trials.insert(*setting, Ok(*before));
            }
        }
        if found[1].1.seconds < found[0].1.seconds { found[1].0 } else { found[0].0 }
    }

    /// Returns the seconds per step of a setting: infinite if its trial fails.
    fn seconds(&mut self, setting: Setting) -> Result<f64> {
        if let Some(found) = self.trials.get(&setting) {
            return Ok(found.as_ref().map_or(f64::INFINITY, |found| found.seconds));
        }
        let found = if self.trials_left > 0 { self.trial(setting) } else { Err("not run: --trials".into()) };
        // Bad input fails every trial.
        if let (Err(why), true) = (&found, self.trials.is_empty())
            && !why.contains(NO_FIT)
            && !why.starts_with("took more")
        {
            return Err(TrainError::Launch(why.clone()));
        }
        if !json_only(self.options) {
            if self.trials.is_empty() {
                println!("{} rows per step, trials of {} steps", self.rows, self.trial_steps);
                println!("ranks stage batch accumulation  seconds/step  peak memory");
            }
            match &found {
                Ok(Measurement { seconds, bytes }) => {
                    println!("{setting}  {seconds:>12.3} {:>12}", format_bytes(*bytes))
                }
                Err(why) => println!("{setting}  {}", if why.contains(NO_FIT) { NO_FIT } else { why }),
            }
        }
        let seconds = found.as_ref().map_or(f64::INFINITY, |found| found.seconds);
        self.trials.insert(setting, found);
        Ok(seconds)
    }

    /// Runs a trial.
    fn trial(&mut self, setting: Setting) -> Result<Measurement, String> {
        self.trials_left = self.trials_left.saturating_sub(1);
        let Setting { ranks, stage, batch, accumulation } = setting;
        let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
        command.arg("train").args(&self.given).args(["--json", "--log-every", "1", "--eval", "0"]);
        command.args(["--steps".into(), self.trial_steps.to_string()]);
        command.args(["--ranks".into(), ranks.to_string()]);
        match self.tuned_file(setting) {
            Some(file) => {
                let path = self.scratch.path().join("config.json");
                std::fs::write(&path, file.to_string()).map_err(|error| error.to_string())?;
                command.arg("--config").arg(path);
            }
            None => {
                command.args(["--batch".into(), batch.to_string(), "--accumulation".into(), accumulation.to_string()]);
                command.args(stage.iter().flat_map(|stage| ["--stage".into(), stage.to_string()]));
            }
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = Ended(child.map_err(|error| error.to_string())?);
        let limit = Duration::from_secs_f64(self.options.trial_timeout);
        let (lines, summary) =
            child.watch(limit).ok_or_else(|| format!("took more than {} s", self.options.trial_timeout))?;
        let status = child.0.wait().map_err(|error| error.to_string())?;
        let text = |line: &(Instant, String)| line.1.strip_prefix("error: ").map(str::to_string);
        if !status.success() {
            return Err(lines.iter().rev().find_map(text).unwrap_or_else(|| format!("the run ended with {status}")));
        }
        let steps: Vec<Instant> = lines.iter().filter(|line| line.1.starts_with("step ")).map(|line| line.0).collect();
        let mut seconds: Vec<f64> = steps.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().ok_or("the run printed no steps")?;
        let summary: Value = serde_json::from_str(&summary).map_err(|error| error.to_string())?;
        Ok(Measurement { seconds: median, bytes: summary["peak_rss_bytes"].as_u64().unwrap_or(0) })
    }

    /// Returns the configuration file with a setting.
    fn tuned_file(&self, setting: Setting) -> Option<Value> {
        let mut file = self.file.as_ref()?.1.clone();
        let keys = file.as_object_mut()?;
        keys.remove("autotuning");
        keys.insert("train_batch_size".into(), self.rows.into());
        keys.insert("train_micro_batch_size_per_gpu".into(), setting.batch.into());
        keys.insert("gradient_accumulation_steps".into(), setting.accumulation.into());
        if let Some(stage) = setting.stage {
            keys.entry("zero_optimization").or_insert_with(|| json!({}))["stage"] = stage.into();
        }
        Some(file)
    }

    /// Prints the fastest setting as a command, or everything as JSON.
    fn report(&self, program: &str, given: &[(String, Vec<OsString>)], best: Setting) -> Result<()> {
        let searched = ["batch", "accumulation", "auto-find-batch-size", "ranks", "stage", "json", "dry-run"];
        let mut command = vec![program.to_string(), "train".into()];
        for (name, values) in given.iter().filter(|(name, _)| !searched.contains(&&**name)) {
            let values = match (&**name, &self.options.output) {
                ("config", Some(path)) => vec![path.clone().into_os_string()],
                _ => values.clone(),
            };
            command.extend(written(name, &values).iter().map(|word| quoted(&word.to_string_lossy())));
        }
        let Setting { ranks, stage, batch, accumulation } = best;
        command.extend(["--ranks".into(), ranks.to_string()]);
        if self.file.is_none() {
            command.extend(stage.iter().flat_map(|stage| ["--stage".into(), stage.to_string()]));
            command.extend(["--batch".into(), batch.to_string(), "--accumulation".into(), accumulation.to_string()]);
        }
        if let (Some(path), Some(file)) = (&self.options.output, self.tuned_file(best)) {
            let text = serde_json::to_string_pretty(&file).expect("JSON was read");
            std::fs::write(path, text + "\n").map_err(io("write", path))?;
        }
        let command = command.join(" ");
        if json_only(self.options) {
            let of = |setting: &Setting| json!({ "ranks": setting.ranks, "stage": setting.stage, "batch": setting.batch, "accumulation": setting.accumulation });
            let trials = self.trials.iter().map(|(setting, trial)| {
                let mut told = of(setting);
                match trial {
                    Ok(Measurement { seconds, bytes }) => {
                        told["seconds_per_step"] = (*seconds).into();
                        told["peak_rss_bytes"] = (*bytes).into();
                    }
                    Err(why) => told["error"] = why.clone().into(),
                }
                told
            });
            let trials: Vec<Value> = trials.collect();
            println!(
                "{}",
                json!({ "rows_per_step": self.rows, "best": of(&best), "command": command, "trials": trials })
            );
            return Ok(());
        }
        println!("\nfastest:\n  {command}");
        if self.file.is_some() && self.options.output.is_none() {
            println!(
                "with train_micro_batch_size_per_gpu {batch} and gradient_accumulation_steps {accumulation} in the file"
            );
        }
        Ok(())
    }
}

/// Quotes a word for a shell, if it needs that.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+%@".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A process that is killed when this is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Ended {
    /// Returns the lines of its standard error with the times of their arrival, and its standard output; `None` if it takes longer than
    /// `limit`.
    fn watch(&mut self, limit: Duration) -> Option<(Vec<(Instant, String)>, String)> {
        let end = Instant::now() + limit;
        let (errors, mut out) = (self.0.stderr.take()?, self.0.stdout.take()?);
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(|line| line.ok()) {
                if sender.send((Instant::now(), line)).is_err() {
                    return;
                }
            }
        });
        let summary = std::thread::spawn(move || {
            let mut text = String::new();
            // What is cut is no JSON.
            let _ = out.read_to_string(&mut text);
            text
        });
        let mut lines = Vec::new();
        loop {
            match receiver.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => return None,
            }
        }
        Some((lines, summary.join().unwrap_or_default()))
    }
}
