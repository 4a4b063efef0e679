//! Shared by the tests of training runs.
#![allow(dead_code)] // each test uses its part

pub mod texts;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command};
use std::time::Duration;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// Writes a model folder and token rows, small enough that a step takes milliseconds.
pub fn write_inputs(dir: &Path) {
    // Dropout, so that random numbers must go on too.
    let config = json!({
        "model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0
    });
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
    // So wide that its pieces are worth a disk, and its weights are above the persistence threshold.
    let wide = json!({
        "model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 192, "n_layer": 1, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0
    });
    std::fs::create_dir(dir.join("wide")).unwrap();
    std::fs::write(dir.join("wide/config.json"), wide.to_string()).unwrap();
    let ids: Vec<u8> = (0..37 * 12i32).flat_map(|i| ((i * i + i / 12) % 61).to_le_bytes()).collect();
    let rows = TensorView::new(Dtype::I32, vec![37, 12], &ids).unwrap();
    safetensors::serialize_to_file([("input_ids", rows)], None, &dir.join("rows.safetensors")).unwrap();
}

/// Creates a folder with [`write_inputs`], and in it another for offloaded state.
pub fn inputs_and_swap() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let swap = dir.path().join("swap");
    std::fs::create_dir(&swap).unwrap();
    (dir, swap.into_os_string().into_string().unwrap())
}

/// Checks that two checkpoints have the same number of ranks, the same state and, by checksum, the same bytes of every tensor.
pub fn assert_same_checkpoint([one, other]: [&Path; 2], step: &str) {
    let [one, other] = [one, other].map(|run| {
        let file = run.join("checkpoints").join(step).join("manifest.json");
        let manifest: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        ["world", "tensors", "state"].map(|key| manifest[key].clone())
    });
    assert!(one[1].as_object().is_some_and(|tensors| !tensors.is_empty()));
    assert_eq!(one, other, "{step}");
}

/// Returns step, loss and gradient norm of every line.
pub fn trajectory(run: &Path) -> Vec<[String; 3]> {
    let text = std::fs::read_to_string(run.join("out/metrics.jsonl")).unwrap();
    let of = |line: &str| {
        let metrics: Value = serde_json::from_str(line).unwrap();
        // As written: shortest decimal forms of f64, equal exactly when the numbers are.
        ["step", "loss", "grad_norm"].map(|key| metrics[key].to_string())
    };
    text.lines().map(of).collect()
}

/// Checks, with 1 to 3 ranks, that each stage stopped after `part` of `steps` and resumed has the trajectory of an uninterrupted
/// stage 0. `train` gets a run's name, which starts with `name`, and options. Returns the output of stage 0 for each number of ranks.
pub fn assert_stages_agree(
    dir: &Path,
    name: &str,
    [part, steps]: [&str; 2],
    train: impl Fn(&str, &[&str]) -> Value,
) -> [Value; 3] {
    ["1", "2", "3"].map(|ranks| {
        let whole = format!("{name}{ranks}-0");
        let said = train(&whole, &["--ranks", ranks, "--stage", "0", "--steps", steps]);
        let expected = trajectory(&dir.join(&whole));
        assert_eq!(expected.len().to_string(), steps);
        for stage in ["1", "2", "3"] {
            let run = format!("{name}{ranks}-{stage}");
            train(&run, &["--ranks", ranks, "--stage", stage, "--steps", part]);
            train(&run, &["--ranks", ranks, "--stage", stage, "--steps", steps, "--resume", "auto"]);
            assert_eq!(trajectory(&dir.join(&run)), expected, "{ranks} ranks at stage {stage}, {run}");
        }
        said
    })
}

/// Adds a small training to a command, with results in `run`.
pub fn small(command: &mut Command, inputs: &Path, run: &Path, options: &[&str]) {
    let at = |name: &str| inputs.join(name).into_os_string();
    // What only becomes of large parameters.
    let of_large = ["--offload", "--secondary-shard-size", "--quantized-weights"];
    let model = if options.iter().any(|option| of_large.contains(option)) { "wide" } else { "model" };
    command.arg("--model").arg(at(model)).arg("--data").arg(at("rows.safetensors"));
    command.args(["--batch", "2", "--threads", "1", "--json", "--warmup", "2", "--clip", "1"]);
    command.arg("--out").arg(run.join("out")).arg("--save").arg(run.join("checkpoints")).args(options);
}

/// Returns the bytes that each rank received, by step and kind.
pub fn wire(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("out/metrics.jsonl")).unwrap();
    let steps = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    steps
        .flat_map(|step| {
            step["ranks"].as_array().unwrap().iter().map(|rank| rank["wire_bytes"].clone()).collect::<Vec<_>>()
        })
        .collect()
}

/// Checks that two runs of 4 steps have the same trajectory and that their ranks received the same number of bytes.
pub fn assert_same_run(ranks: usize, options: &[&str], ours: &Path, theirs: &Path) {
    assert_eq!(trajectory(theirs).len(), 4);
    assert_eq!(trajectory(theirs), trajectory(ours), "{ranks} ranks, {options:?}");
    let (here, there) = (wire(ours), wire(theirs));
    assert!(here.len() == 4 * ranks && here.iter().all(Value::is_object), "{here:?}");
    assert_eq!(there, here, "bytes received, {ranks} ranks, {options:?}");
}

/// A process's standard error, read as it is written.
pub struct Said {
    lines: BufReader<ChildStderr>,
    pub text: String,
}

impl Said {
    pub fn of(child: &mut Child) -> Self {
        Self { lines: BufReader::new(child.stderr.take().unwrap()), text: String::new() }
    }

    /// Reads until a line contains `part`.
    pub fn until(&mut self, part: &str) {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended without {part:?}: {}", self.text);
            self.text.push_str(&line);
            if line.contains(part) {
                return;
            }
        }
    }

    /// Reads until the end.
    pub fn rest(&mut self) -> &str {
        self.lines.read_to_string(&mut self.text).unwrap();
        &self.text
    }
}

/// Starts a child that does not ignore signals, even if this process was started with them ignored (a script's `&`,
/// some build servers). The child ends itself after five minutes, so that no test waits forever.
pub fn start(command: &mut Command) -> Child {
    const SECONDS: u32 = 300;
    let begin = || {
        for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2] {
            // SAFETY: a call that may be made between fork and exec; it takes no pointer but the default action.
            unsafe { libc::signal(number, libc::SIG_DFL) };
        }
        // SAFETY: as above, without a pointer.
        unsafe { libc::alarm(SECONDS) };
        Ok(())
    };
    // SAFETY: `begin` makes two system calls, and takes no lock and no memory.
    unsafe { command.pre_exec(begin) };
    command.spawn().unwrap()
}

/// Sends a signal by its name.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status().unwrap();
    assert!(sent.success());
}

/// Returns the step after which a signal of this name ended the run with this output.
pub fn ended_after(name: &str, said: &str) -> usize {
    let told = format!("stopped: {name} ended the run after step ");
    let step = said.split(told.as_str()).nth(1).unwrap_or_else(|| panic!("{told:?} in {said}"));
    step.split(' ').next().unwrap().parse().unwrap()
}

/// Pause before a signal that must count as a second one.
pub const PAUSE: Duration = Duration::from_millis(500);
