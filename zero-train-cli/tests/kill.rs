//! Kills a training process with SIGKILL at random moments, sometimes stops it with SIGTERM, and restarts it with
//! `--resume auto` until all steps are done, for every task. Every loss must equal that of an uninterrupted run, bit by bit.
#![cfg(unix)]

mod common;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{signal, start, texts, trajectory, write_inputs};

const STEPS: usize = 150;

const GPT2: &[&str] = &["--model", "model", "--data", "rows.safetensors"];
/// Wide enough that its shards are offloaded to a disk.
const WIDE: &[&str] = &["--model", "wide", "--data", "rows.safetensors"];
const LORA: &[&str] = &["--weights", "gpt2-hf", "--data", "rows.safetensors", "--lora-r", "4", "--lora-dropout", "0.1"];
const CLASSES: &[&str] = &[
    "--task",
    "text-classification",
    "--weights",
    "bert-hf",
    "--tokenizer",
    "tok",
    "--data",
    "rows.jsonl",
    "--label-field",
    "class",
    "--seq",
    "16",
    "--eval",
    "9",
];
const SEQ2SEQ: &[&str] = &[
    "--model",
    "bart",
    "--tokenizer",
    "tok",
    "--data",
    "rows.jsonl",
    "--label-field",
    "answer",
    "--seq",
    "16",
    "--eval",
    "9",
];

/// The tasks and their training options.
const KINDS: [(&[&str], &[&str]); 8] = [
    (WIDE, &["--ranks", "2", "--stage", "3", "--save-every", "2", "--keep-last", "2", "--offload", "all"]),
    (LORA, &["--ranks", "2", "--stage", "3", "--save-every", "2", "--keep-last", "2"]),
    (CLASSES, &["--ranks", "2", "--stage", "2", "--save-every", "2", "--keep-last", "2", "--keep-best"]),
    (SEQ2SEQ, &["--ranks", "2", "--stage", "3", "--save-every", "2", "--keep-last", "2"]),
    (GPT2, &["--ranks", "2", "--stage", "3", "--save-every", "2", "--keep-last", "2"]),
    (GPT2, &["--ranks", "2", "--stage", "1", "--save-every", "1", "--keep-last", "1", "--save-async"]),
    (
        GPT2,
        &[
            "--ranks",
            "3",
            "--stage",
            "2",
            "--save-every",
            "3",
            "--keep-last",
            "2",
            "--keep-best",
            "--accumulation",
            "2",
        ],
    ),
    (GPT2, &["--ranks", "1", "--stage", "0", "--save-every", "1", "--keep-last", "3"]),
];

fn train(inputs: &Path, run: &Path, (what, how): (&[&str], &[&str])) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
    command.current_dir(inputs).arg("train").args(what).args(["--swap", "swap"]);
    command.args(["--batch", "2", "--threads", "1", "--json", "--steps"]).arg(STEPS.to_string());
    command.args(["--warmup", "20", "--clip", "1", "--resume", "auto"]);
    command.arg("--out").arg(run.join("out")).arg("--save").arg(run.join("checkpoints")).args(how);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Writes the models and texts of the tasks, except those of [`write_inputs`].
fn write_tasks(dir: &Path) {
    texts::labelled(dir);
    texts::bert(dir);
    texts::bart(dir);
    texts::ok(&[&["train"], GPT2, &["--steps", "2", "--threads", "1", "--save", "gpt2-base"]].concat(), dir);
    texts::ok(&["export", "gpt2-base", "gpt2-hf", "--dtype", "fp32"], dir);
}

/// `ZERO_KILLS`; the default of 24 takes about a minute.
fn wanted() -> usize {
    std::env::var("ZERO_KILLS").map_or(24, |kills| kills.parse().expect("ZERO_KILLS is a number"))
}

#[test]
fn kills_change_no_bit_of_the_losses() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    write_tasks(dir.path());
    let wanted = wanted();
    let (mut kills, mut inside, mut before_any, mut runs, mut stops, mut saved) = (0, 0, 0, 0, 0, 0);
    std::fs::create_dir(dir.path().join("swap")).unwrap();
    // Where a disk is so fast that few kills hit a save, more are tried.
    while runs < KINDS.len() || kills < wanted || (inside < 5 && kills < 4 * wanted.max(50)) {
        let options = KINDS[runs % KINDS.len()];
        let unbroken = dir.path().join(format!("unbroken-{runs}"));
        let done = train(dir.path(), &unbroken, options).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let broken = dir.path().join(format!("broken-{runs}"));
        loop {
            let mut process = start(&mut train(dir.path(), &broken, options));
            // The seed of each hasher is random: no other source of chance is needed.
            let chance = RandomState::new().build_hasher().finish();
            std::thread::sleep(Duration::from_micros(50_000 + chance % 450_000));
            if let Some(status) = process.try_wait().unwrap() {
                let done = process.wait_with_output().unwrap();
                assert!(status.success(), "{}", String::from_utf8_lossy(&done.stderr));
                break;
            }
            if (kills + stops) % 4 == 3 {
                // It saves, and says so by its exit code; or has not come to where it handles signals, or is done.
                signal(&process, "TERM");
                let ended = process.wait_with_output().unwrap();
                let (code, by) = (ended.status.code(), ended.status.signal());
                let told = String::from_utf8_lossy(&ended.stderr);
                assert!(matches!(code, Some(0 | 143)) || by == Some(15), "{options:?}: {:?} {told}", ended.status);
                (stops, saved) = (stops + 1, saved + usize::from(code == Some(143)));
                continue;
            }
            process.kill().unwrap();
            process.wait().unwrap();
            kills += 1;
            let names = std::fs::read_dir(broken.join("checkpoints")).into_iter().flatten();
            let names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            inside += usize::from(names.iter().any(|name| name.starts_with('.') && name != ".lock"));
            before_any += usize::from(!names.iter().any(|name| name == "latest"));
        }
        let (expected, got) = (trajectory(&unbroken), trajectory(&broken));
        assert_eq!(expected.len(), STEPS);
        let left = std::fs::read_dir(dir.path().join("swap")).unwrap().count();
        assert_eq!(left, 0, "what killed runs left on the disk is removed by those that follow");
        assert_eq!(got, expected, "run {runs} with {options:?}");
        runs += 1;
    }
    println!(
        "{kills} kills over {runs} runs of {STEPS} steps ({inside} inside a save, {before_any} before the first checkpoint) and {stops} \
         stops, of which {saved} have saved: every loss and gradient norm equals the unbroken run's bit by bit"
    );
    assert!(saved > 0, "no stop has saved");
    assert!(inside >= 5, "the kills must hit saves: {inside} of {kills}");
}
