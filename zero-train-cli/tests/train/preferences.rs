//! `cargo test -p zero-train-cli --test train preferences`
//!
//! Direct preference optimization: ids, masks, losses, norms and rewards equal those of TRL's `DPOTrainer`;
//! `tests/fixtures/make_preferences.py` creates the references.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zero_train::data::{ChatFormat, Conversations, LossOn, Source, TokenizeOptions, Tokenizer};

use crate::common::assert_stages_agree;
use crate::common::texts::{self, json_lines, refused, zero};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn made(key: &str) -> Vec<Value> {
    let made: Value = serde_json::from_slice(&std::fs::read(fixtures().join("preferences.json")).unwrap()).unwrap();
    made[key].as_array().unwrap().clone()
}

fn lines<'a>(rows: impl IntoIterator<Item = &'a Value>) -> String {
    rows.into_iter().map(|row| format!("{row}\n")).collect()
}

/// The ids of a row's two sequences, and for each id a flag: 1 if it counts.
fn sequences(preferences: &Conversations, row: usize) -> Vec<[Vec<i64>; 2]> {
    let batch = preferences.batch(&[row]);
    let sequence = |(ids, labels): (&[i32], &[i32])| {
        // Padding has no labels, and the sequences end in one.
        let length = labels.iter().rposition(|label| *label >= 0).unwrap() + 1;
        let counts = labels[..length].iter().map(|label| i64::from(*label >= 0)).collect();
        [ids[..length].iter().map(|&id| id.into()).collect(), counts]
    };
    batch.input_ids.chunks(batch.width).zip(batch.labels.chunks(batch.width)).map(sequence).collect()
}

#[test]
fn ids_and_masks_are_those_of_trl() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    let cases = made("cases");
    assert_eq!(cases.len(), 15);
    for case in cases {
        let text = |key: &str| case[key].as_str().unwrap();
        let (name, folder) = (text("name"), dir.path().join(text("name")));
        std::fs::create_dir(&folder).unwrap();
        for entry in std::fs::read_dir(fixtures().join("tokenizers").join(text("tokenizer"))).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        if let Some(template) = case["template"].as_str() {
            std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
        }
        let path = folder.join("rows.jsonl");
        std::fs::write(&path, lines(case["rows"].as_array().unwrap())).unwrap();
        let folders = [&*folder];
        let seq = Some(case["seq"].as_u64().unwrap() as usize);
        let tokenize = TokenizeOptions {
            seq,
            vocab_size: 1 << 20,
            n_positions: 512,
            folders: &folders,
            ..TokenizeOptions::default()
        };
        assert_eq!(ChatFormat::of(&Source::File(&path)).unwrap(), [ChatFormat::Preference], "{name}");
        let tokenizer = Tokenizer::find(&path, &tokenize).unwrap();
        let got =
            Conversations::load(&path, ChatFormat::Preference, LossOn::Completions, &tokenize, tokenizer).unwrap();
        let expected: Vec<[Vec<i64>; 2]> = serde_json::from_value(case["made"].clone()).unwrap();
        assert_eq!(2 * got.rows(), expected.len(), "{name}: {} are left out", got.left_out().without_labels.number);
        let got: Vec<_> = (0..got.rows()).flat_map(|row| sequences(&got, row)).collect();
        for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
            if got != expected {
                wrong.push(format!("{name}, sequence {at}:\n{got:?}\nexpected\n{expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ: {}", wrong.len(), wrong[..wrong.len().min(4)].join("\n"));
}

/// A tiny model with a chat template in `model`, and its training rows in `rows.jsonl`, the first five again at their end.
fn inputs(dir: &Path, case: &Value) {
    let name = case["model"].as_str().unwrap();
    texts::fixture(dir, name);
    std::fs::rename(dir.join(name), dir.join("model")).unwrap();
    let adapter = fixtures().join(name).join("lora");
    std::fs::create_dir(dir.join("adapter")).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(adapter.join(file), dir.join("adapter").join(file)).unwrap();
    }
    std::fs::write(dir.join("model/chat_template.jinja"), case["template"].as_str().unwrap()).unwrap();
    let rows = case["rows"].as_array().unwrap();
    std::fs::write(dir.join("rows.jsonl"), lines(rows.iter().chain(&rows[..5]))).unwrap();
}

const HOW: [&str; 8] = ["--task", "dpo", "--weights", "model", "--data", "rows.jsonl", "--seq", "36"];
const ADAM: [&str; 8] = ["--lr", "1e-3", "--weight-decay", "0", "--schedule", "constant", "--warmup", "0"];

#[test]
fn losses_norms_and_rewards_are_those_of_trl_on_any_cut() {
    let cases = made("training");
    assert_eq!(cases.len(), 4);
    for case in cases {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        inputs(dir, &case);
        let adapter: &[&str] =
            if case["adapter"].as_bool().unwrap() { &["--adapter", "adapter"] } else { &["--stage", "2"] };
        let numbers = |key: &str| serde_json::from_value::<Vec<f64>>(case[key].clone()).unwrap();
        for (ranks, batch, accumulation) in [("1", "4", "1"), ("2", "1", "2")] {
            let run = format!("{ranks}-{batch}");
            let cut = ["--ranks", ranks, "--batch", batch, "--accumulation", accumulation, "--eval", "5"];
            let fixed = ["--steps", "20", "--shuffle", "false"];
            let summary = texts::train(dir, &run, &[&HOW, &ADAM, &cut, &fixed, adapter]);
            let steps = json_lines(&dir.join(&run).join("out/metrics.jsonl"));
            for (key, expected) in [("loss", numbers("losses")), ("grad_norm", numbers("norms"))] {
                let got: Vec<f64> = steps.iter().map(|step| step[key].as_f64().unwrap()).collect();
                let apart = got.iter().zip(&expected).map(|(a, b)| (a - b).abs() / b.max(1.0)).fold(0.0, f64::max);
                println!("{}, {adapter:?}, {ranks} ranks: {key} within {apart:.1e}", case["model"]);
                assert!(got.len() == 20 && apart <= 1e-5, "{got:?}, expected {expected:?}");
            }
            let evaluated = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].clone();
            let evaluated: Vec<(String, f64)> = serde_json::from_value(evaluated).unwrap();
            let names = ["loss", "reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected"];
            assert_eq!(evaluated.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), names);
            let apart = evaluated.iter().zip(numbers("eval")).map(|((_, a), b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart <= 1e-4, "{evaluated:?}, expected {:?}", case["eval"]);
        }
    }
}

/// With shuffled rows, an adapter, and a resume: the reference is measured again by the same model.
#[test]
fn stages_and_resumed_runs_agree() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir, &made("training")[3]);
    let train = |run: &str, more: &[&str]| texts::train(dir, run, &[&HOW, &ADAM, &["--batch", "2"], more]);
    assert_stages_agree(dir, "full-", ["2", "4"], train);
    // A resumed run may use other rows than its first steps would with these ranks.
    train("fewer", &["--ranks", "4", "--stage", "2", "--steps", "6", "--save-every", "6"]);
    train("fewer", &["--ranks", "1", "--stage", "2", "--steps", "9", "--resume", "auto"]);
    assert_eq!(json_lines(&dir.join("fewer/out/metrics.jsonl")).len(), 9);
    let fresh = ["--batch", "2", "--lora-r", "2", "--quantize", "nf4"];
    let train = |run: &str, more: &[&str]| texts::train(dir, run, &[&HOW, &ADAM, &fresh, more]);
    assert_stages_agree(dir, "lora-", ["2", "4"], train);
}

#[test]
fn bad_rows_and_options_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir, &made("training")[0]);
    let say = |role: &str, content: &str| json!({ "role": role, "content": content });
    let good = json!({ "prompt": [say("user", "who")], "chosen": [say("assistant", "a king")], "rejected": [say("assistant", "no.")] });
    let with = |key: &str, value: Value| {
        let mut row = good.clone();
        row[key] = value;
        row
    };
    let train = ["train", "--task", "dpo", "--weights", "model", "--data", "bad.jsonl", "--steps", "1"];
    let train = [&train[..], &["--threads", "1"]].concat();
    for (row, expected) in [
        (
            with("chosen", json!(null)),
            "its \"chosen\" is null or NaN and its \"rejected\" is a list: expected two strings",
        ),
        (with("rejected", json!("no.")), "its \"rejected\" is a string: expected a list of messages"),
        (with("rejected", good["chosen"].clone()), "has the same \"chosen\" and \"rejected\""),
        (with("rejected", json!([])), "its \"rejected\" has no messages: expected at least one"),
        (
            json!({ "chosen": [say("assistant", "a")], "rejected": [say("assistant", "b")] }),
            "its \"prompt\" has no messages",
        ),
        (json!({ "prompt": 3, "chosen": "a", "rejected": "b" }), "its \"prompt\" is a number: expected a string"),
        (json!({ "chosen": "same", "rejected": "same" }), "has the same \"chosen\" and \"rejected\""),
        (with("tools", json!([1])), "has a \"tools\" field, which is not supported"),
    ] {
        std::fs::write(dir.join("bad.jsonl"), lines([&good, &row, &good])).unwrap();
        let text = refused(&train, dir);
        assert!(text.lines().count() == 1 && text.contains(&format!("bad.jsonl: line 2: {expected}")), "{row}: {text}");
        let ran = zero(&[&train[..], &["--on-bad-row", "skip"]].concat(), dir);
        let told = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success() && told.matches("; the row is skipped").count() == 1, "{told}");
    }
    std::fs::write(dir.join("bad.jsonl"), lines([&good])).unwrap();
    for (options, expected) in [
        (&["--packing"][..], "--packing true: expected --task causal-lm"),
        (&["--loss-on", "all"], "--loss-on all: expected --task causal-lm"),
        (&["--dpo-beta", "0"], "--dpo-beta 0: expected a finite number above 0"),
        (&["--task", "causal-lm"], "--task causal-lm: expected --task dpo: the rows of --data are preferences"),
        (&["--task", "causal-lm", "--dpo-beta", "0.2"], "--dpo-beta 0.2: expected --task dpo"),
    ] {
        let train = if options[0] == "--task" { [&train[..1], &train[3..]].concat() } else { train.clone() };
        let text = refused(&[&train[..], options].concat(), dir);
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    std::fs::write(dir.join("bad.jsonl"), lines([&json!({ "messages": good["chosen"] })])).unwrap();
    let text = refused(&train, dir);
    assert!(text.contains("--task dpo: expected --data with preferences"), "{text}");
}

#[test]
fn a_dry_run_shows_both_answers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir, &made("training")[0]);
    let row = json!({ "prompt": "who", "chosen": " a king", "rejected": " no." });
    std::fs::write(dir.join("rows.jsonl"), lines([&row])).unwrap();
    let shown = texts::ok(&[&["train", "--dry-run"][..], &HOW].concat(), dir);
    let examples = shown.split_once("examples (+ counts in the loss, - is only read):\n").expect("there are some").1;
    let chosen = examples.find("row 1, chosen:").expect("it is shown");
    let rejected = examples.find("row 1, rejected:").expect("it is shown");
    assert!(examples[chosen..rejected].contains("+ \"a king"), "{examples}");
    assert!(examples[rejected..].contains("+ \"no."), "{examples}");
    assert!(shown.contains("TRL's DPOConfig") && shown.contains("learning rate 0.000001"), "{shown}");
}
