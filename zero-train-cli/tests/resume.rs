//! `zero train --save` and `--resume` from a user's view.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command;
use common::{PAUSE, Said, ended_after, signal, start, trajectory, write_inputs};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

struct Inputs(tempfile::TempDir);

impl Inputs {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_inputs(dir.path());
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Trains to step `steps`, with metrics in `run/out` and checkpoints in `run/checkpoints`.
    fn train(&self, run: &str, steps: usize, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.arg("train").arg("--model").arg(self.path("model")).arg("--data").arg(self.path("rows.safetensors"));
        command.args(["--batch", "2", "--threads", "1", "--steps", &steps.to_string()]);
        command.arg("--out").arg(self.path(run).join("out")).arg("--save").arg(self.path(run).join("checkpoints"));
        command.args(options);
        command
    }

    /// The same without checkpoints, as a child with piped output.
    fn begin(&self, run: &str, steps: usize, options: &[&str]) -> Child {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_zero"));
        command.arg("train").arg("--model").arg(self.path("model")).arg("--data").arg(self.path("rows.safetensors"));
        command.args(["--batch", "2", "--threads", "1", "--json", "--steps", &steps.to_string()]);
        command.arg("--out").arg(self.path(run).join("out")).args(options);
        start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    fn checkpoints(&self, run: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(run).join("checkpoints")).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name.starts_with("step-"));
        names.sort();
        names
    }
}

fn stdout(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stdout.clone()).unwrap()
}

fn stderr(command: &mut Command, code: i32) -> String {
    let run = command.assert().code(code);
    String::from_utf8(run.get_output().stderr.clone()).unwrap()
}

#[test]
fn a_run_goes_on_at_another_shape_and_its_files_are_one_run() {
    let inputs = Inputs::new();
    let said = stdout(&mut inputs.train("run", 6, &["--ranks", "2", "--stage", "3", "--save-every", "4"]));
    assert!(said.contains("step 4: saved") && said.contains("step 6: saved"), "{said}");
    assert_eq!(inputs.checkpoints("run"), ["step-00000004", "step-00000006"]);
    let first = trajectory(&inputs.path("run"));

    let said = stdout(&mut inputs.train("run", 9, &["--ranks", "1", "--stage", "0", "--resume", "auto"]));
    assert!(said.contains("resumes from") && said.contains("step 6, saved by 2 rank(s)"), "{said}");
    let both = trajectory(&inputs.path("run"));
    assert_eq!(both[..6], first);
    assert_eq!(
        both.iter().map(|line| line[0].as_str()).collect::<Vec<_>>(),
        ["1", "2", "3", "4", "5", "6", "7", "8", "9"]
    );
    let csv = std::fs::read_to_string(inputs.path("run/out/metrics.csv")).unwrap();
    assert_eq!(csv.lines().count(), 10, "a head and nine steps: {csv}");

    // What a run leaves that is killed behind its last checkpoint: its locks are nobody's.
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let left = inputs.path(&format!("zero-swap-{}-0123abcd-1-0123456789abcdef", host.trim()));
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("owner.lock"), "1").unwrap();
    std::fs::write(left.join("rank-00000.swap"), "its optimizer state").unwrap();
    let swap = inputs.path("");
    let to_disk = ["--offload", "optimizer", "--offload-to", "disk", "--swap", swap.to_str().unwrap()];
    let mut again = inputs.train("run", 9, &["--resume", "auto"]);
    let said = stderr(again.args(to_disk), 0);
    assert!(!left.exists(), "{said}");
    assert!(
        said.contains("the checkpoint is at step 9 and --steps is") && said.contains("nothing is left to do"),
        "{said}"
    );
    assert_eq!(trajectory(&inputs.path("run")), both, "nothing is lost when nothing is left to do");
}

#[test]
fn the_newest_sound_checkpoint_is_taken_and_the_others_are_named() {
    let inputs = Inputs::new();
    let whole = ["--ranks", "2", "--save-every", "2"];
    stdout(&mut inputs.train("run", 8, &whole));
    let unbroken = trajectory(&inputs.path("run"));
    let damage = |step: &str, what: &dyn Fn(&Path)| what(&inputs.path("run/checkpoints").join(step));
    damage("step-00000008", &|path| {
        let file = path.join("rank-00001-of-00002.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        std::fs::write(&file, bytes).unwrap();
    });
    damage("step-00000006", &|path| std::fs::remove_file(path.join("rank-00000-of-00002.safetensors")).unwrap());
    let mut again = inputs.train("run", 8, &["--ranks", "2", "--resume", "auto"]);
    let said = stderr(&mut again, 0);
    for expected in ["step-00000008 is skipped", "is corrupt", "step-00000006 is skipped", "is missing"] {
        assert!(said.contains(expected), "{expected} in {said}");
    }
    assert_eq!(trajectory(&inputs.path("run")), unbroken, "from step 4 on");

    let damaged = inputs.path("run/checkpoints/step-00000006");
    let said = stderr(&mut inputs.train("run", 8, &["--resume", damaged.to_str().unwrap()]), 2);
    assert!(said.contains("is missing") && said.contains("rank-00000-of-00002"), "{said}");
}

#[test]
fn the_last_and_the_best_are_kept() {
    let inputs = Inputs::new();
    // The rate is so high that the loss grows: the first checkpoint stays the best.
    let options = ["--save-every", "2", "--keep-last", "2", "--keep-best", "--lr", "3", "--eval", "2"];
    stdout(&mut inputs.train("run", 8, &options));
    assert_eq!(inputs.checkpoints("run").len(), 3, "{:?}", inputs.checkpoints("run"));
    assert_eq!(inputs.checkpoints("run")[1..], ["step-00000006", "step-00000008"]);
    stdout(&mut inputs.train("plain", 8, &["--save-every", "2", "--keep-last", "2", "--save-async"]));
    assert_eq!(inputs.checkpoints("plain"), ["step-00000006", "step-00000008"]);
}

#[test]
fn other_data_is_told_and_begins_with_its_first_row() {
    let inputs = Inputs::new();
    stdout(&mut inputs.train("run", 3, &[]));
    let text = inputs.path("text.txt");
    std::fs::write(&text, "To be, or not to be, that is the question. ".repeat(30)).unwrap();
    // Text of GPT-2's tokens does not fit a vocabulary of 61: held-out rows make other data as well.
    let said = stdout(&mut inputs.train("run", 5, &["--resume", "auto", "--eval", "2"]));
    assert!(said.contains("37 rows of 12 tokens, but this run's data has 35 rows of 12"), "{said}");
}

#[test]
fn other_data_of_the_same_size_is_told_too_and_checkpoints_of_before_know_the_size_alone() {
    let inputs = Inputs::new();
    stdout(&mut inputs.train("run", 3, &["--save-every", "3"]));
    let rows = inputs.path("rows.safetensors");
    let former = std::fs::read(&rows).unwrap();
    let mut other = former.clone();
    // One token of 444, which stays in the vocabulary.
    let last = other.len() - 4;
    other[last] ^= 1;
    std::fs::write(&rows, &other).unwrap();
    let said = stdout(&mut inputs.train("run", 4, &["--resume", "auto"]));
    for words in
        ["37 rows of 12 tokens, but this run's data has 37 rows of 12", "checksum", "first row", "use the data"]
    {
        assert!(said.contains(words), "{words} in {said}");
    }
    // The same data: not a word.
    let said = stdout(&mut inputs.train("run", 5, &["--resume", "auto"]));
    assert!(!said.contains("checksum"), "{said}");

    // As an earlier version wrote it.
    let folder = inputs.path("run/checkpoints/step-00000005");
    let text = std::fs::read_to_string(folder.join("manifest.json")).unwrap();
    let begin = text.find(",\"checksum\":").or_else(|| text.find("\"checksum\":")).unwrap();
    let end = begin + 1 + text[begin + 1..].find([',', '}']).unwrap();
    let end = if text[begin..].starts_with('"') { end + 1 } else { end };
    let body = [&text[..begin], &text[end..]].concat();
    let body = &body[r#"{"crc32c":"00000000","#.len()..];
    let sealed = format!(r#"{{"crc32c":"{:08x}",{body}"#, crc32c::crc32c(body.as_bytes()));
    std::fs::write(folder.join("manifest.json"), sealed).unwrap();
    std::fs::write(&rows, &former).unwrap();
    let said = stdout(&mut inputs.train("run", 6, &["--resume", "auto"]));
    assert!(said.contains("step 5, saved by") && !said.contains("the data has"), "{said}");
}

#[test]
fn a_csv_log_has_each_step_once_after_a_resume() {
    let inputs = Inputs::new();
    let config = inputs.path("config.json");
    let logs = inputs.path("logs");
    let settings = serde_json::json!({
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "csv_monitor": {"enabled": true, "output_path": logs, "job_name": "run"}
    });
    std::fs::write(&config, settings.to_string()).unwrap();
    let train = |steps: usize, options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command
            .arg("train")
            .arg("--model")
            .arg(inputs.path("model"))
            .arg("--data")
            .arg(inputs.path("rows.safetensors"));
        command.arg("--config").arg(&config).args(["--threads", "1", "--steps", &steps.to_string()]);
        stdout(command.arg("--save").arg(inputs.path("checkpoints")).args(options));
    };
    train(6, &["--save-every", "4"]);
    // As if the machine had gone before the last was saved.
    std::fs::remove_dir_all(inputs.path("checkpoints/step-00000006")).unwrap();
    train(7, &["--resume", "auto"]);
    let text = std::fs::read_to_string(logs.join("run/metrics.csv")).unwrap();
    let steps: Vec<&str> = text.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
    assert_eq!(steps, ["1", "2", "3", "4", "5", "6", "7"], "{text}");
}

#[test]
fn what_cannot_work_is_refused_before_the_first_step() {
    let inputs = Inputs::new();
    let bare = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.arg("train").arg("--model").arg(inputs.path("model"));
        command.arg("--data").arg(inputs.path("rows.safetensors")).args(options);
        stderr(&mut command, 2)
    };
    let refused = |options: &[&str], expected: &str| {
        let said = bare(options);
        assert!(said.contains(expected), "{expected} in {said}");
    };
    refused(&["--resume", "auto"], "--resume auto: expected --save DIR too");
    refused(&["--resume", "nowhere"], "--resume nowhere: expected a checkpoint (step-...)");
    refused(&["--save-every", "2"], "--save");
    refused(&["--save", "x", "--save-every", "0"], "--save-every 0: expected at least 1");
    refused(&["--save", "x", "--keep-last", "0"], "--keep-last 0: expected at least 1");
    refused(&["--save", "x", "--keep-best"], "--keep-last");
    let file = inputs.path("rows.safetensors");
    refused(&["--save", file.to_str().unwrap()], "expected a folder, or a name for one; this is a file");
    // A file system that nobody may write to, root neither.
    refused(&["--save", "/proc/zero-checkpoints"], "cannot save checkpoints into /proc/zero-checkpoints");

    stdout(&mut inputs.train("run", 2, &[]));
    let other = inputs.path("other");
    std::fs::create_dir(&other).unwrap();
    let config = std::fs::read_to_string(inputs.path("model/config.json")).unwrap();
    std::fs::write(other.join("config.json"), config.replace("\"n_layer\":2", "\"n_layer\":3")).unwrap();
    let said = stderr(inputs.train("run", 4, &["--resume", "auto"]).arg("--model").arg(&other), 2);
    assert!(said.contains("--model"), "{said}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
    command.arg("train").arg("--model").arg(&other).arg("--data").arg(inputs.path("rows.safetensors"));
    command.args(["--steps", "4", "--resume"]).arg(inputs.path("run/checkpoints"));
    let said = stderr(&mut command, 2);
    assert!(said.contains("cannot resume from") && said.contains("only in this model: h.2."), "{said}");
}

/// Sets the variables that `zero launch` passes to restarted ranks.
fn restarted(command: &mut Command, launched_unix_ms: u128) -> &mut Command {
    command.env("ZERO_RESTARTS", "1").env("ZERO_LAUNCHED_UNIX_MS", launched_unix_ms.to_string())
}

#[test]
fn a_restart_goes_on_from_what_its_job_has_saved_and_otherwise_as_it_was_told() {
    let inputs = Inputs::new();
    let shape = ["--ranks", "1", "--stage", "0", "--save-every", "2"];
    stdout(&mut inputs.train("old", 4, &shape));
    let old = inputs.path("old").join("checkpoints/step-00000002").into_os_string().into_string().unwrap();
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    let launched = now();
    let told = [&shape[..], &["--resume", &old]].concat();

    // Nothing saved yet: from where the job was to begin, not from the beginning.
    let said = stdout(restarted(&mut inputs.train("new", 6, &told), launched));
    assert!(said.contains("resumes from") && said.contains("step 2, saved by"), "{said}");
    // A checkpoint of its own, of step 6.
    let said = stdout(restarted(&mut inputs.train("new", 8, &told), launched));
    assert!(said.contains("step 6, saved by"), "{said}");
    // What lay in the folder before the launch is another job's.
    std::thread::sleep(std::time::Duration::from_millis(5));
    let said = stdout(restarted(&mut inputs.train("new", 8, &told), now()));
    assert!(said.contains("step 2, saved by"), "{said}");
}

/// Returns the numbers of the steps that have their own line.
fn logged(said: &str) -> Vec<usize> {
    let numbers = said.lines().filter_map(|line| line.strip_prefix("step ")?.split_once('/')?.0.parse().ok());
    numbers.collect()
}

#[test]
fn a_run_without_a_terminal_writes_lines() {
    let inputs = Inputs::new();
    let said = |run: &str, options: &[&str]| {
        let output = inputs.begin(run, 25, options).wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let summary = String::from_utf8(output.stdout).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&summary).unwrap()["steps"], 25, "nothing else on standard output");
        said
    };
    let lines = said("plain", &["--ranks", "2", "--warmup", "4"]);
    // More of them, if 10 seconds have passed.
    let steps = logged(&lines);
    assert!([1, 10, 20, 25].iter().all(|step| steps.contains(step)) && steps.len() < 12, "{lines}");
    let metrics = std::fs::read_to_string(inputs.path("plain/out/metrics.jsonl")).unwrap();
    for line in lines.lines().filter(|line| line.starts_with("step ")) {
        let step = logged(line)[0];
        let metrics: Value = serde_json::from_str(metrics.lines().nth(step - 1).unwrap()).unwrap();
        let of = |key: &str| metrics[key].as_f64().unwrap();
        let numbers =
            format!("step {step}/25: loss {:.4}, lr {:.3e}, grad norm {:.4}, ", of("loss"), of("lr"), of("grad_norm"));
        assert!(line.starts_with(&numbers) && line.contains(" tokens/s, ETA 00:0"), "{numbers} in {line}");
        assert!(!line.contains("MFU"), "what a processor can do at most is not known: {line}");
    }
    assert!(lines.contains("step 25/25: ") && lines.contains(", ETA 00:00:00\n"), "{lines}");

    assert_eq!(logged(&said("every", &["--log-every", "7"])), [1, 7, 14, 21, 25]);
    let config = inputs.path("ds.json");
    std::fs::write(&config, r#"{"train_micro_batch_size_per_gpu": 2, "steps_per_print": 6}"#).unwrap();
    let config = ["--config", config.to_str().unwrap()];
    assert_eq!(logged(&said("config", &config)), [1, 6, 12, 18, 24, 25]);
    assert_eq!(logged(&said("both", &[&config[..], &["--log-every", "20"]].concat())), [1, 20, 25]);
    let output = inputs.begin("none", 25, &["--log-every", "0"]).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--log-every 0: expected at least 1"));
}

#[test]
fn a_signal_ends_a_run_after_a_step_with_a_checkpoint_that_changes_no_bit() {
    let inputs = Inputs::new();
    let best = ["--save-every", "100000", "--keep-last", "1", "--keep-best", "--eval", "2"];
    let shapes: [(&str, i32, Vec<&str>); 4] = [
        ("TERM", 143, vec!["--ranks", "2", "--stage", "3"]),
        ("INT", 130, vec!["--ranks", "1", "--stage", "0", "--save-async"]),
        ("HUP", 129, vec!["--ranks", "1", "--stage", "0"]),
        ("USR1", 138, [&["--ranks", "2", "--stage", "1"], &best[..]].concat()),
    ];
    for (name, code, options) in shapes {
        let (stopped, whole) = (format!("stopped-{name}"), format!("whole-{name}"));
        let save = inputs.path(&stopped).join("checkpoints").into_os_string().into_string().unwrap();
        let saves = [&options[..], &["--save", &save]].concat();
        let mut child = inputs.begin(&stopped, 100_000, &saves);
        let mut said = Said::of(&mut child);
        said.until("step 20/100000: ");
        signal(&child, name);
        let told = said.rest().to_string();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{told}");
        assert!(
            told.contains(&format!("SIG{name}: stopping after this step; a second signal stops immediately")),
            "{told}"
        );
        assert!(told.contains("the same command with --resume auto resumes from it"), "{told}");
        let step = ended_after(&format!("SIG{name}"), &told);
        assert!((20..100_000).contains(&step), "{told}");
        assert_eq!(inputs.checkpoints(&stopped), [format!("step-{step:08}")], "{told}");
        assert_eq!(trajectory(&inputs.path(&stopped)).len(), step);
        let page = std::fs::read_to_string(inputs.path(&stopped).join("out/report.html")).unwrap();
        assert!(page.contains("\"state\":\"stopped\"") && page.contains(&format!("ended by SIG{name}")));
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["steps"], step);

        let steps = step + 8;
        let epochs = |run: &str, options: &[&str]| {
            let summary = stdout(inputs.train(run, steps, options).arg("--json"));
            serde_json::from_str::<Value>(&summary).unwrap()["epochs"].as_array().unwrap().clone()
        };
        let resumed = epochs(&stopped, &[&options[..], &["--resume", "auto"]].concat());
        let mut since = epochs(&whole, &options);
        since.retain(|epoch| epoch["step"].as_u64().unwrap() > step as u64);
        assert_eq!(resumed, since, "SIG{name} after step {step}");
        assert_eq!(trajectory(&inputs.path(&stopped)), trajectory(&inputs.path(&whole)), "SIG{name} after step {step}");
    }
}

/// The evaluation is aborted, and the trained state is saved.
#[test]
fn a_signal_ends_an_evaluation_within_seconds() {
    let inputs = Inputs::new();
    let ids: Vec<u8> = (0..12 * 60_000i32).flat_map(|i| ((i * 7 + i / 12) % 61).to_le_bytes()).collect();
    let rows = TensorView::new(Dtype::I32, vec![60_000, 12], &ids).unwrap();
    safetensors::serialize_to_file([("input_ids", rows)], None, &inputs.path("rows.safetensors")).unwrap();
    for ranks in ["1", "2"] {
        let run = format!("run-{ranks}");
        let save = inputs.path(&run).join("checkpoints").into_os_string().into_string().unwrap();
        let options = ["--ranks", ranks, "--eval", "59000", "--eval-every", "3", "--save", &save];
        let mut child = inputs.begin(&run, 100, &options);
        let mut said = Said::of(&mut child);
        said.until("step 1/100");
        std::thread::sleep(PAUSE * 2);
        let begin = Instant::now();
        signal(&child, "TERM");
        let told = said.rest().to_string();
        assert_eq!(child.wait().unwrap().code(), Some(143), "{told}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}: {told}", begin.elapsed());
        assert!(told.contains("ended the run after step 3 of 100"), "{told}");
        assert_eq!(inputs.checkpoints(&run), ["step-00000003"]);
        let events = std::fs::read_to_string(inputs.path(&run).join("out/events.jsonl")).unwrap();
        assert!(!events.contains("evaluation"), "{events}");
    }
}

#[test]
fn without_a_folder_to_save_to_a_signal_ends_a_run_too_and_a_second_one_at_once() {
    let inputs = Inputs::new();
    let mut child = inputs.begin("unsaved", 100_000, &[]);
    let mut said = Said::of(&mut child);
    said.until("step 10/");
    signal(&child, "TERM");
    let told = said.rest().to_string();
    assert_eq!(child.wait().unwrap().code(), Some(143), "{told}");
    assert!(told.contains("no checkpoint was saved; add --save DIR to save one"), "{told}");
    assert!(inputs.path("unsaved/out/report.html").exists());

    // A step that does not end.
    let mut child = inputs.begin("long", 10, &["--accumulation", "100000000"]);
    let mut said = Said::of(&mut child);
    let begin = Instant::now();
    let status = format!("/proc/{}/status", child.id());
    let term = 1 << 14;
    let handled = || {
        let status = std::fs::read_to_string(&status).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(caught, 16).unwrap() & term != 0
    };
    while !handled() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not begin to train");
        std::thread::sleep(Duration::from_millis(10));
    }
    signal(&child, "TERM");
    said.until("SIGTERM: stopping after this step");
    std::thread::sleep(PAUSE);
    assert_eq!(child.try_wait().unwrap(), None, "the first one waits for the step");
    let second = Instant::now();
    signal(&child, "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130), "{}", said.rest());
    assert!(second.elapsed() < Duration::from_secs(5), "{:?}", second.elapsed());
}

#[test]
fn a_run_that_fails_leaves_its_report() {
    let inputs = Inputs::new();
    let said = stderr(&mut inputs.train("run", 10, &["--lr", "1e30"]), 2);
    assert!(said.contains("the last 9 of the 10 steps were skipped"), "{said}");
    assert!(std::fs::read_to_string(inputs.path("run/out/report.html")).unwrap().contains("\"state\":\"failed\""));
}

#[test]
fn a_report_is_made_of_the_files_of_runs() {
    let inputs = Inputs::new();
    let evaluated = ["--eval", "5", "--eval-every", "4", "--save-every", "6"];
    assert!(inputs.train("one", 20, &evaluated).output().unwrap().status.success());
    // Cut short and resumed, it has each step and each event once.
    assert!(inputs.train("two", 10, &evaluated).output().unwrap().status.success());
    assert!(
        inputs.train("two", 20, &[&evaluated[..], &["--resume", "auto"]].concat()).output().unwrap().status.success()
    );
    let kinds = |run: &str| -> Vec<(u64, String)> {
        let text = std::fs::read_to_string(inputs.path(run).join("out/events.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|event| (event["step"].as_u64().unwrap(), event["kind"].as_str().unwrap().to_string())).collect()
    };
    let evaluations = |run: &str| kinds(run).into_iter().filter(|(_, kind)| kind == "evaluation").map(|(step, _)| step);
    // Every 4 steps, and at the ends of the passes over 32 rows by 4, which are at steps 8 and 16, and of the run.
    assert!(evaluations("one").eq([4, 8, 12, 16, 20]), "{:?}", kinds("one"));
    assert!(kinds("two").contains(&(10, "resume".into())), "{:?}", kinds("two"));
    let report = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.arg("report").args(args).current_dir(inputs.path("."));
        command
    };
    let out = inputs.path("both.html");
    let said = report(&["one/out", "two/out", "--output", "both.html"]).output().unwrap();
    assert!(said.status.success() && String::from_utf8_lossy(&said.stdout).contains("both.html"));
    let page = std::fs::read_to_string(&out).unwrap();
    assert_eq!(page.matches("\"state\":\"done\"").count(), 2);
    assert!(stderr(&mut report(&["one"]), 2).contains("is not the --out folder of a run"));
}

#[test]
fn text_is_refused_for_a_model_with_a_tokenizer_that_cannot_be_read() {
    let inputs = Inputs::new();
    let text = inputs.path("text.txt");
    // Tokens 0 to 60 of GPT-2 alone, which a vocabulary of 61 holds.
    std::fs::write(&text, "!\"#$%&'()*+,-./0123456789".repeat(30)).unwrap();
    let refused = |model: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
        command.arg("train").arg("--model").arg(model).arg("--data").arg(&text).args(["--seq", "8", "--steps", "1"]);
        stderr(&mut command, 2)
    };
    let said = refused(&inputs.path("model"));
    assert!(said.contains("GPT-2's does not fit: it has 50257 tokens, but the model has 61 tokens"), "{said}");
    let other = inputs.path("other");
    std::fs::create_dir(&other).unwrap();
    let config = std::fs::read_to_string(inputs.path("model/config.json")).unwrap();
    std::fs::write(other.join("config.json"), config.replace("\"vocab_size\":61", "\"vocab_size\":50257")).unwrap();
    std::fs::write(other.join("tekken.json"), "").unwrap();
    let said = refused(&other);
    assert!(said.contains("tekken.json: is the model's tokenizer, in a format that is not supported"), "{said}");
    assert!(said.contains("--data FILE.safetensors with an integer tensor input_ids"), "{said}");
}
