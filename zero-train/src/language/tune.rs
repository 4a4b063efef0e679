//! `zero tune`: short runs of `zero train` with different settings, to find the fastest.
//!
//! The number of rows per step stays the same, so the training result does too, but for the order of additions. Ranks, micro-batch and
//! ZeRO stage are searched one after the other, each with the best of the others so far. A trial is a process of its own: one that runs
//! out of memory ends no other. The plan of each trial chooses offload and activation checkpointing, as in `zero train`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use serde_json::{Value, json};
use zero_core::collective::launcher::started;

use super::Options;
use crate::config::{Format, Node};
use crate::error::{Result, TrainError, io, wrong, wrong_data};
use crate::memory::format_bytes;
use crate::trainer::{MAX_DEADLINE, at_least_one, outline, tell};

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
    /// Options of `zero train`.
    #[command(flatten)]
    pub train: Options,
}

/// Options of `zero train` that a trial does not have: those that are searched, and those of evaluation and output.
const LEFT_OUT: [&str; 27] = [
    "batch",
    "accumulation",
    "auto-find-batch-size",
    "steps",
    "warmup",
    "schedule",
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

/// Texts of the errors of runs that need too much memory.
const NO_MEMORY: [&str; 2] = ["does not fit", "out of memory"];

/// Keys of a configuration file that a trial does not have: those of logs, and of what depends on the number of steps.
const KEYS_LEFT_OUT: [&str; 9] = [
    "autotuning",
    "scheduler",
    "tensorboard",
    "csv_monitor",
    "flops_profiler",
    "comms_logger",
    "wall_clock_breakdown",
    "memory_breakdown",
    "steps_per_print",
];

/// The settings of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Setting {
    ranks: usize,
    /// `None`: the configuration file's.
    stage: Option<u8>,
    batch: usize,
    accumulation: usize,
}

/// The measurements of the trials of a setting.
#[derive(Debug, Clone)]
struct Measurement {
    /// Median seconds per step of each trial, in ascending order.
    seconds: Vec<f64>,
    /// The highest peak memory of the processes.
    bytes: u64,
}

impl Measurement {
    /// Returns the median of the trials; of two, the slower.
    fn seconds(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }
}

/// Trials of the fastest setting: the times of short trials differ by several percent.
const TRIALS_OF_FASTEST: usize = 3;

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, stage, batch, accumulation } = self;
        let stage = stage.map_or("file".into(), |stage| stage.to_string());
        write!(f, "{ranks:>5} {stage:>5} {batch:>5} {accumulation:>12}")
    }
}

/// The reason that a trial has no measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// It needs more memory than there is, or was killed, as the system does if memory is short.
    NoMemory,
    /// It took longer than the limit.
    Late,
    /// It cannot run with these settings.
    Refused,
}

/// A search in progress.
struct Search<'a> {
    options: &'a TuneOptions,
    trial_steps: usize,
    /// Trials that may still be run.
    trials_left: usize,
    rows: usize,
    /// Fewest and most rows of a micro-batch.
    limits: [usize; 2],
    /// Options of every trial.
    given: Vec<OsString>,
    file: Option<(PathBuf, Value)>,
    scratch: tempfile::TempDir,
    /// A measurement, or the reason that there is none.
    trials: BTreeMap<Setting, Result<Measurement, Failure>>,
    /// The message of the first trial that failed.
    first_failure: Option<String>,
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
    if !(f64::MIN_POSITIVE..=MAX_DEADLINE).contains(&options.trial_timeout) {
        let expected = format!("expected a number of seconds above 0, and at most {MAX_DEADLINE:.0}");
        return Err(wrong("trial-timeout", options.trial_timeout, expected));
    }
    if let Some(path) = &options.output {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if path.exists() || !folder.is_dir() {
            let expected = "expected a file that does not exist yet, in an existing folder";
            return Err(wrong("output", path.display(), expected));
        }
    }
    let file = train.config.as_deref().map(|path| read(path).map(|file| (path.to_path_buf(), file))).transpose()?;
    let plan =
        train.config.as_deref().map(|path| outline(path, &train.hyper, train.steps, train.ranks, None)).transpose()?;
    let number = |section: &str, key: &str| {
        let value = file.as_ref().map(|(_, file)| &file[section][key]);
        value.and_then(Value::as_f64).filter(|number| *number >= 0.0).map(|number| number as usize)
    };
    let trial_steps = options.trial_steps.or(number("autotuning", "end_profile_step")).unwrap_or(4);
    let trials = options.trials.or(number("autotuning", "tuner_num_trials")).unwrap_or(20);
    if trial_steps < 2 {
        return Err(wrong("trial-steps", trial_steps, "expected at least 2"));
    }
    at_least_one(&[
        ("trials", Some(trials)),
        ("ranks", train.ranks),
        ("batch", train.hyper.batch),
        ("accumulation", train.hyper.accumulation),
        ("train-batch-size", options.train_batch_size),
    ])?;
    let of_file = file.as_ref().and_then(|(_, file)| file["zero_optimization"]["stage"].as_u64());
    if let (Some(stage), Some(set)) = (train.stage, of_file)
        && u64::from(stage) != set
    {
        let expected = format!("the --config file sets {set}; omit the option, or change the file");
        return Err(wrong("stage", stage, expected));
    }
    let ranks = train.ranks.unwrap_or(2);
    let rows = options.train_batch_size.unwrap_or_else(|| match &plan {
        Some((plan, _)) => plan.batch.global,
        None => train.hyper.batch.unwrap_or(1) * train.hyper.accumulation.unwrap_or(1) * ranks,
    });
    if train.ranks.is_some() && !rows.is_multiple_of(ranks) {
        return Err(wrong("train-batch-size", rows, format!("expected a multiple of --ranks {ranks}")));
    }
    let least = number("autotuning", "min_train_micro_batch_size_per_gpu").unwrap_or(1);
    let most = number("autotuning", "max_train_micro_batch_size_per_gpu").unwrap_or(usize::MAX);
    let given = given(matches);
    let keep = |(name, _): &&(String, Vec<OsString>)| !LEFT_OUT.contains(&&**name);
    let scratch = tempfile::tempdir().map_err(io("create a folder in", &std::env::temp_dir()))?;
    let mut search = Search {
        options,
        trial_steps,
        trials_left: trials,
        rows,
        limits: [least, most.max(least)],
        given: given.iter().filter(keep).flat_map(|(name, values)| written(name, values)).collect(),
        file,
        scratch,
        trials: BTreeMap::new(),
        first_failure: None,
    };
    let best = search.search(train.ranks, train.stage)?;
    search.report(program, &given, best)
}

/// Reads a DeepSpeed file.
fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(io("read", path))?;
    let file = Node::parse(Format::Json, &text).ok().and_then(|file| serde_json::to_value(file).ok());
    let mut file = file.filter(Value::is_object).ok_or_else(|| {
        wrong_data(path, "expected a DeepSpeed JSON file: zero tune cannot change other files; pass options instead")
    })?;
    // The old way to write stage 1.
    if let Some(is_on) = file["zero_optimization"].as_bool() {
        file["zero_optimization"] = json!({ "stage": u8::from(is_on) });
    }
    Ok(file)
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

impl Search<'_> {
    /// Returns the fastest setting.
    fn search(&mut self, ranks: Option<usize>, stage: Option<u8>) -> Result<Setting> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let powers = std::iter::successors(Some(1), |ranks| Some(ranks * 2)).take_while(|&ranks| ranks <= cores.max(2));
        let ranks = ranks.map_or_else(|| powers.collect(), |ranks| vec![ranks]);
        let of_file = self.file.as_ref().filter(|(_, file)| !file["zero_optimization"]["stage"].is_null());
        let searches_stage = stage.is_none() && of_file.is_none();
        // Stage 3 takes the least memory: a micro-batch that does not fit there fits nowhere.
        let first = stage.or(searches_stage.then_some(3));
        let mut best: Option<Setting> = None;
        // The largest micro-batch that fits, for each number of ranks.
        for ranks in ranks.into_iter().filter(|ranks| self.rows.is_multiple_of(*ranks)).collect::<Vec<_>>() {
            for setting in self.settings(ranks, first) {
                self.measure(setting);
                best = self.faster(best, setting);
                if !matches!(self.trials.get(&setting), Some(Err(Failure::NoMemory | Failure::Late))) {
                    break;
                }
            }
        }
        let Some(mut best) = best.filter(|best| self.seconds(best).is_finite()) else {
            let [least, most] = self.limits;
            let none = format!("no micro-batch of {least} to {most} rows divides {} rows per step", self.rows);
            return Err(TrainError::Launch(self.first_failure.take().unwrap_or(none)));
        };
        // Smaller micro-batches, until they only become slower.
        for setting in self
            .settings(best.ranks, first)
            .into_iter()
            .filter(|setting| setting.batch < best.batch)
            .collect::<Vec<_>>()
        {
            self.measure(setting);
            let before = best;
            best = self.faster(Some(best), setting).unwrap_or(best);
            if best == before {
                break;
            }
        }
        if searches_stage {
            for stage in [2, 1, 0] {
                let setting = Setting { stage: Some(stage), ..best };
                self.measure(setting);
                best = self.faster(Some(best), setting).unwrap_or(best);
            }
        }
        Ok(self.confirm(best))
    }

    /// Returns the settings of a number of ranks, the largest micro-batch first.
    fn settings(&self, ranks: usize, stage: Option<u8>) -> Vec<Setting> {
        let (all, [least, most]) = (self.rows / ranks, self.limits);
        let fits = |batch: &usize| all.is_multiple_of(*batch) && (least..=most).contains(batch);
        let setting = |batch| Setting { ranks, stage, batch, accumulation: all / batch };
        (1..=all).rev().filter(fits).map(setting).collect()
    }

    /// Returns the seconds per step of a setting; infinity if it has not been measured.
    fn seconds(&self, setting: &Setting) -> f64 {
        self.trials.get(setting).and_then(|found| found.as_ref().ok()).map_or(f64::INFINITY, Measurement::seconds)
    }

    /// Returns the faster of two settings.
    fn faster(&self, best: Option<Setting>, other: Setting) -> Option<Setting> {
        best.into_iter().chain([other]).min_by(|a, b| self.seconds(a).total_cmp(&self.seconds(b)))
    }

    /// Measures the fastest setting again until the fastest has three trials, if more may be run. Returns it.
    fn confirm(&mut self, mut best: Setting) -> Setting {
        loop {
            let settings: Vec<Setting> = self.trials.keys().copied().collect();
            best = settings.into_iter().fold(best, |best, setting| self.faster(Some(best), setting).unwrap_or(best));
            let found = self.trials.get(&best).and_then(|found| found.as_ref().ok());
            if self.trials_left == 0 || found.is_none_or(|found| found.seconds.len() >= TRIALS_OF_FASTEST) {
                return best;
            }
            self.measure(best);
        }
    }

    /// Runs a trial, if more may be run, and prints its row.
    fn measure(&mut self, setting: Setting) {
        if self.trials_left == 0 {
            return;
        }
        self.trials_left -= 1;
        let found = self.trial(setting);
        if self.trials.is_empty() {
            self.say(&format!("{} rows per step, trials of {} steps", self.rows, self.trial_steps));
            self.say("ranks stage batch accumulation  seconds/step  peak memory");
        }
        match &found {
            Ok((seconds, bytes)) => self.say(&format!("{setting}  {seconds:>12.3} {:>12}", format_bytes(*bytes))),
            Err((failure, why)) => {
                self.say(&format!("{setting}  {}", if *failure == Failure::NoMemory { "does not fit" } else { why }));
                self.first_failure.get_or_insert_with(|| why.clone());
            }
        }
        match (self.trials.get_mut(&setting), found) {
            (Some(Ok(before)), Ok((seconds, bytes))) => {
                let place = before.seconds.partition_point(|other| *other < seconds);
                before.seconds.insert(place, seconds);
                before.bytes = before.bytes.max(bytes);
            }
            // It fits only sometimes.
            (_, Err((failure, _))) => drop(self.trials.insert(setting, Err(failure))),
            (_, Ok((seconds, bytes))) => {
                drop(self.trials.insert(setting, Ok(Measurement { seconds: vec![seconds], bytes })));
            }
        }
    }

    /// Prints a line, unless only JSON is printed.
    fn say(&self, line: &str) {
        if !self.options.train.train.json {
            tell(&line);
        }
    }

    /// Runs a trial. Returns its median seconds per step and its peak memory, or the reason that there is none, with a message.
    fn trial(&self, setting: Setting) -> Result<(f64, u64), (Failure, String)> {
        let failed = |error: std::io::Error| (Failure::Refused, format!("cannot run a trial: {error}"));
        let Setting { ranks, stage, batch, accumulation } = setting;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg("train").args(&self.given).args(["--json", "--log-every", "1", "--eval", "0"]);
        command.args(["--steps".into(), self.trial_steps.to_string()]);
        command.args(["--ranks".into(), ranks.to_string()]);
        match self.tuned_file(setting) {
            Some(mut file) => {
                KEYS_LEFT_OUT.iter().filter_map(|key| file.as_object_mut()?.remove(*key)).for_each(drop);
                let path = self.scratch.path().join("config.json");
                std::fs::write(&path, file.to_string()).map_err(failed)?;
                command.arg("--config").arg(path);
            }
            None => {
                command.args(["--batch".into(), batch.to_string(), "--accumulation".into(), accumulation.to_string()]);
                command.args(stage.iter().flat_map(|stage| ["--stage".into(), stage.to_string()]));
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: between fork and exec only prctl is called, which is safe there.
        unsafe {
            command.pre_exec(|| {
                // It ends when this process does, for any reason.
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
                Ok(())
            });
        }
        let mut child = Trial(command.spawn().map_err(failed)?);
        let seconds = self.options.trial_timeout;
        let late = || (Failure::Late, format!("took more than {seconds} s"));
        let (lines, summary) = child.watch(Duration::from_secs_f64(seconds)).ok_or_else(late)?;
        let status = child.0.wait().map_err(failed)?;
        if !status.success() {
            let message = |(_, line): &(Instant, String)| line.strip_prefix("error: ").map(str::to_string);
            let message = lines.iter().rev().find_map(message);
            let is_memory = message.as_ref().is_none_or(|text| NO_MEMORY.iter().any(|words| text.contains(words)));
            let failure = if is_memory { Failure::NoMemory } else { Failure::Refused };
            return Err((failure, message.unwrap_or_else(|| format!("the run ended with {status}"))));
        }
        let of_steps = format!("/{}: ", self.trial_steps);
        let is_step = |line: &str| line.strip_prefix("step ").is_some_and(|rest| rest.contains(&of_steps));
        let steps: Vec<Instant> = lines.iter().filter(|(_, line)| is_step(line)).map(|(time, _)| *time).collect();
        let mut seconds: Vec<f64> = steps.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        seconds.sort_by(f64::total_cmp);
        let summary: Value = serde_json::from_str(&summary).unwrap_or_default();
        match (seconds.get(seconds.len() / 2), summary["peak_rss_bytes"].as_u64()) {
            (Some(&seconds), Some(bytes)) => Ok((seconds, bytes)),
            _ => Err((Failure::Refused, "the run has neither steps nor a summary".into())),
        }
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
        let command = command.join(" ");
        if self.options.train.train.json {
            let of = |setting: &Setting| json!({ "ranks": setting.ranks, "stage": setting.stage, "batch": setting.batch, "accumulation": setting.accumulation });
            let trials = self.trials.iter().map(|(setting, trial)| {
                let mut told = of(setting);
                match trial {
                    Ok(found) => {
                        told["seconds_per_step"] = found.seconds().into();
                        told["peak_rss_bytes"] = found.bytes.into();
                    }
                    Err(failure) => told["error"] = format!("{failure:?}").into(),
                }
                told
            });
            let trials: Vec<Value> = trials.collect();
            let told = json!({ "rows_per_step": self.rows, "best": of(&best), "command": command, "trials": trials });
            tell(&told);
        }
        self.say(&format!("\nfastest:\n  {command}"));
        let Some(file) = self.tuned_file(best) else { return Ok(()) };
        match &self.options.output {
            Some(path) => {
                let text = serde_json::to_string_pretty(&file).expect("JSON was read");
                std::fs::write(path, text + "\n").map_err(io("write", path))?;
            }
            None => {
                let (rows, stage) = (self.rows, &file["zero_optimization"]["stage"]);
                let stage = if stage.is_null() { String::new() } else { format!(", zero_optimization.stage {stage}") };
                self.say(&format!(
                    "with these values in the file: train_batch_size {rows}, train_micro_batch_size_per_gpu {batch}, \
                     gradient_accumulation_steps {accumulation}{stage} (--output FILE writes it)"
                ));
            }
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

/// The process of a trial, which is killed when this is dropped.
struct Trial(Child);

impl Drop for Trial {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Trial {
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
            // If it cannot be read in full, it is no JSON.
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
