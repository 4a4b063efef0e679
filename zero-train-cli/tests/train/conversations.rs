//! `cargo test -p zero-train-cli --test train conversations`
//!
//! Training on conversations, and on prompts with completions: ids and labels equal TRL's, losses equal torch's;
//! `tests/fixtures/make_conversations.py` creates the references.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use zero_train::data::{ChatFormat, Conversations, LossOn, Source, TokenBatch, TokenizeOptions, Tokenizer};

use crate::common::assert_stages_agree;
use crate::common::texts::{self, json_lines, refused, zero};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn made() -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join("conversations.json")).unwrap()).unwrap()
}

/// Cases of another file: `tests/fixtures/make_conversations.py` says how to make one.
fn other_cases() -> Vec<Value> {
    let Some(path) = std::env::var_os("ZERO_CONVERSATIONS") else { return Vec::new() };
    let mut made: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    serde_json::from_value(made["cases"].take()).unwrap()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn lines<'a>(rows: impl IntoIterator<Item = &'a Value>) -> String {
    rows.into_iter().map(|row| format!("{row}\n")).collect()
}

fn read(path: &Path, folder: &Path, seq: usize, loss_on: LossOn) -> Result<Conversations, String> {
    read_with(path, folder, seq, loss_on, false)
}

fn read_with(path: &Path, folder: &Path, seq: usize, loss_on: LossOn, packing: bool) -> Result<Conversations, String> {
    let format = ChatFormat::of(&Source::File(path)).unwrap()[0];
    let folders = [folder];
    let tokenize = TokenizeOptions {
        seq: Some(seq),
        vocab_size: 1 << 20,
        n_positions: 512,
        folders: &folders,
        packing,
        ..TokenizeOptions::default()
    };
    let tokenizer = Tokenizer::find(path, &tokenize).unwrap();
    Conversations::load(path, format, loss_on, &tokenize, tokenizer).map_err(|error| error.to_string())
}

/// The ids of each row, and for each id a flag: 1 if it has a label.
fn rows(conversations: &Conversations) -> Vec<[Vec<i64>; 2]> {
    let row = |row| {
        let batch = conversations.batch(&[row]);
        let has_label = batch.labels.iter().zip(&batch.input_ids).map(|(label, id)| match label {
            -100 => 0,
            label => i64::from(label == id) + 10 * i64::from(label != id),
        });
        [batch.input_ids.iter().map(|&id| id.into()).collect(), has_label.collect()]
    };
    (0..conversations.rows()).map(row).collect()
}

#[test]
fn ids_and_labels_are_those_of_trl() {
    let made = made();
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    let mut cases = made["cases"].as_array().unwrap().clone();
    assert!(cases.len() >= 27);
    cases.extend(other_cases());
    for case in cases {
        let text = |key: &str| case[key].as_str().unwrap();
        let (name, folder) = (text("name"), dir.path().join(text("name")));
        copy(&fixtures().join("tokenizers").join(text("tokenizer")), &folder);
        if let Some(template) = case["template"].as_str() {
            std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
        }
        let path = folder.join("rows.jsonl");
        std::fs::write(&path, lines(case["rows"].as_array().unwrap())).unwrap();
        println!("{name}: {} rows", case["rows"].as_array().unwrap().len());
        let loss_on = if text("loss_on") == "all" { LossOn::All } else { LossOn::Completions };
        let got = read(&path, &folder, case["seq"].as_u64().unwrap() as usize, loss_on).unwrap();
        let expected: Vec<[Vec<i64>; 2]> = serde_json::from_value(case["made"].clone()).unwrap();
        assert_eq!(got.rows() + got.left_out().without_labels.number, case["rows"].as_array().unwrap().len(), "{name}");
        assert_eq!(got.rows(), expected.len(), "{name}: {} are left out", got.left_out().without_labels.number);
        for (row, (got, expected)) in rows(&got).iter().zip(&expected).enumerate() {
            if got != expected {
                wrong.push(format!("{name}, row {row}:\n{got:?}\nexpected\n{expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ: {}", wrong.len(), wrong[..wrong.len().min(4)].join("\n"));
}

/// A Llama with a tokenizer and a chat template in `llama`, and its training rows in `chats.jsonl`.
fn inputs(dir: &Path) -> Value {
    inputs_of(dir, 0)
}

/// [`inputs`] with the model of a training.
fn inputs_of(dir: &Path, at: usize) -> Value {
    let made = made()["training"][at].take();
    texts::fixture(dir, made["model"].as_str().unwrap());
    std::fs::rename(dir.join(made["model"].as_str().unwrap()), dir.join("llama")).unwrap();
    std::fs::write(dir.join("llama/chat_template.jinja"), made["template"].as_str().unwrap()).unwrap();
    std::fs::write(dir.join("chats.jsonl"), lines(made["rows"].as_array().unwrap())).unwrap();
    made
}

/// Training as in the references.
const FIXED: [&str; 18] = [
    "--weights",
    "llama",
    "--data",
    "chats.jsonl",
    "--seq",
    "36",
    "--shuffle",
    "false",
    "--lr",
    "1e-3",
    "--weight-decay",
    "0.01",
    "--decay-except",
    "nothing",
    "--schedule",
    "constant",
    "--warmup",
    "0",
];

fn losses(dir: &Path, run: &str) -> Vec<f64> {
    json_lines(&dir.join(run).join("out/metrics.jsonl")).iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

#[test]
fn losses_and_norms_are_those_of_trl_on_any_cut() {
    for (at, model) in ["llama_tiny", "qwen3_tiny"].into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let made = inputs_of(dir, at);
        assert_eq!(made["model"], model);
        for (ranks, batch, accumulation, stage) in [
            ("1", "4", "1", "0"),
            ("1", "1", "4", "0"),
            ("2", "2", "1", "3"),
            ("2", "1", "2", "2"),
            ("4", "1", "1", "1"),
        ] {
            let cut = ["--ranks", ranks, "--batch", batch, "--accumulation", accumulation, "--stage", stage];
            let run = [ranks, batch, accumulation, stage].join("-");
            texts::train(dir, &run, &[&FIXED, &["--steps", "20"], &cut]);
            for (key, expected) in [("loss", "losses"), ("grad_norm", "norms")] {
                let expected: Vec<f64> = serde_json::from_value(made[expected].clone()).unwrap();
                let steps = json_lines(&dir.join(&run).join("out/metrics.jsonl"));
                let got: Vec<f64> = steps.iter().map(|step| step[key].as_f64().unwrap()).collect();
                let apart = got.iter().zip(&expected).map(|(a, b)| (a - b).abs() / b.max(1.0)).fold(0.0, f64::max);
                println!("{model}, {cut:?}: {key} within {apart:.1e}");
                assert!(got.len() == 20 && apart <= 1e-5, "{got:?}, expected {expected:?}");
            }
        }
    }
    // All tokens are another loss.
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let expected = inputs(dir)["losses"][0].as_f64().unwrap();
    texts::train(dir, "all", &[&FIXED, &["--loss-on", "all", "--batch", "4", "--steps", "1"]]);
    assert!((losses(dir, "all")[0] - expected).abs() > 1e-2, "{:?}", losses(dir, "all"));
}

/// The documents of a batch: their ids and labels. The first token of each is not predicted.
fn documents(batch: &TokenBatch) -> Vec<[Vec<i32>; 2]> {
    let lengths = batch.documents.clone().expect("rows are packed");
    assert_eq!(lengths.iter().sum::<usize>(), batch.input_ids.len());
    let mut begin = 0;
    let document = |length: &usize| {
        let range = begin..begin + length;
        begin = range.end;
        assert_eq!(batch.labels[range.start], -100);
        [batch.input_ids[range.clone()].to_vec(), batch.labels[range][1..].to_vec()]
    };
    lengths.iter().map(document).collect()
}

/// [`inputs`], and short texts with completions in `pairs.jsonl`.
fn pairs(dir: &Path) {
    inputs(dir);
    let words = ["to", "be", "a", "or", "now"];
    let text = |at: usize, many: usize| (0..many).map(|i| words[(at + i * i) % 5]).collect::<Vec<_>>().join(" ");
    let pair = |at: usize| json!({ "prompt": text(at, 1 + at % 2), "completion": text(at + 3, 1 + at % 3) });
    std::fs::write(dir.join("pairs.jsonl"), lines(&(0..24).map(pair).collect::<Vec<_>>())).unwrap();
}

#[test]
fn packed_rows_hold_every_conversation_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pairs(dir);
    let (path, folder) = (dir.join("pairs.jsonl"), dir.join("llama"));
    let alone = read(&path, &folder, 36, LossOn::Completions).unwrap();
    let packed = read_with(&path, &folder, 36, LossOn::Completions, true).unwrap();
    println!("{} conversations in {} rows", alone.rows(), packed.rows());
    assert!(2 * packed.rows() < alone.rows() && packed.seq() <= 36 && packed.conversations() == alone.rows());
    let row = |conversations: &Conversations, row: usize| conversations.batch(&[row]);
    let mut expected: Vec<_> =
        (0..alone.rows()).map(|at| row(&alone, at)).map(|row| [row.input_ids, row.labels[1..].to_vec()]).collect();
    let mut got: Vec<_> = (0..packed.rows()).flat_map(|at| documents(&row(&packed, at))).collect();
    expected.sort();
    got.sort();
    assert_eq!(got, expected);
    // Rows of a batch end in padding, which is a document without labels.
    let all: Vec<usize> = (0..packed.rows()).collect();
    let batch = packed.batch(&all);
    let with_labels = documents(&batch).iter().filter(|[_, labels]| labels.iter().any(|label| *label >= 0)).count();
    assert_eq!((with_labels, batch.input_ids.len()), (alone.rows(), batch.width * all.len()));
    assert_eq!(packed.labels(&all), alone.labels(&(0..alone.rows()).collect::<Vec<_>>()));
}

#[test]
fn packed_rows_train_like_rows_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pairs(dir);
    let packed = read_with(&dir.join("pairs.jsonl"), &dir.join("llama"), 36, LossOn::Completions, true).unwrap();
    // All rows in one step: a longer row would hold other documents than a step of unpacked rows.
    let [all, packs] = [packed.conversations(), packed.rows()].map(|rows| rows.to_string());
    let how = ["--weights", "llama", "--data", "pairs.jsonl", "--seq", "36", "--lr", "1e-3"];
    let step = |run: &str, more: &[&str]| {
        texts::train(dir, run, &[&how, &["--steps", "3", "--shuffle", "false"], more]);
        let steps = json_lines(&dir.join(run).join("out/metrics.jsonl"));
        steps.iter().flat_map(|step| ["loss", "grad_norm"].map(|key| step[key].as_f64().unwrap())).collect::<Vec<_>>()
    };
    let alone = step("alone", &["--batch", &all]);
    let got = step("packed", &["--batch", &packs, "--packing"]);
    let apart = got.iter().zip(&alone).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max);
    println!("losses and norms of packed rows differ by at most {apart:.1e}");
    assert!(got.len() == 6 && apart < 1e-6, "{got:?}, expected {alone:?}");
    let train = |run: &str, more: &[&str]| texts::train(dir, run, &[&how, &["--batch", "2", "--packing"], more]);
    assert_stages_agree(dir, "packed-", ["2", "4"], train);
}

#[test]
fn a_packed_gpt2_trains_like_rows_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pairs(dir);
    let sizes = json!({
        "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "attn_pdrop": 0.0
    });
    texts::model(dir, "model", &sizes);
    let how = ["--model", "model", "--data", "pairs.jsonl", "--seq", "24", "--lr", "1e-3", "--shuffle", "false"];
    let plan = texts::ok(&[&["train"], &how[..], &["--packing", "--dry-run"]].concat(), dir);
    let packs = plan.split(" rows of data").next().and_then(|text| text.rsplit(' ').next()).unwrap();
    assert!((2..12).contains(&packs.parse::<usize>().unwrap()), "{packs} rows of 24 conversations");
    let steps = |run: &str, more: &[&str]| {
        texts::train(dir, run, &[&how, &["--steps", "2"], more]);
        losses(dir, run)
    };
    let (alone, packed) = (steps("alone", &["--batch", "24"]), steps("packed", &["--batch", packs, "--packing"]));
    let apart = packed.iter().zip(&alone).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max);
    assert!(packed.len() == 2 && apart < 1e-6, "{packed:?}, expected {alone:?}");
}

/// The same rows in all kinds of files, also when split.
#[test]
fn tables_arrays_and_parquet_are_read_alike() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir);
    let loaded = |path: &str| read(&dir.join(path), &dir.join("llama"), 36, LossOn::Completions).unwrap();
    let [a, b] = [("to be", "or not"), ("who", "a king, is it?")];
    let texts = [a, b].map(|(prompt, completion)| json!({ "prompt": prompt, "completion": completion, "id": 3 }));
    std::fs::write(dir.join("texts.jsonl"), lines(&texts)).unwrap();
    std::fs::write(dir.join("texts.json"), json!(texts).to_string()).unwrap();
    std::fs::write(dir.join("texts.csv"), "completion,id,prompt\nor not,3,to be\n\"a king, is it?\",3,who\n").unwrap();
    let expected = rows(&loaded("texts.jsonl"));
    assert_eq!((expected.len(), rows(&loaded("texts.json"))), (2, expected.clone()));
    assert_eq!(rows(&loaded("texts.csv")), expected);

    let conversation = |(prompt, completion): (&str, &str)| json!([{ "role": "user", "content": prompt }, { "role": "assistant", "content": completion }]);
    let chats = [a, b].map(|pair| json!({ "messages": conversation(pair) }));
    std::fs::write(dir.join("two.jsonl"), lines(&chats)).unwrap();
    let schema = "message schema { required int32 id; optional group messages (list) { repeated group list { optional group element {
        optional byte_array content (utf8); optional byte_array role (utf8); } } } }";
    let file = std::fs::File::create(dir.join("two.parquet")).unwrap();
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(parse_message_type(schema).unwrap()), Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<parquet::data_type::Int32Type>().write_batch(&[1, 2], None, None).unwrap();
    column.close().unwrap();
    for values in [[a.0, a.1, b.0, b.1], ["user", "assistant", "user", "assistant"]] {
        let mut column = group.next_column().unwrap().unwrap();
        let values = values.map(ByteArray::from);
        column.typed::<ByteArrayType>().write_batch(&values, Some(&[4; 4]), Some(&[0, 1, 0, 1])).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
    let expected = rows(&loaded("two.jsonl"));
    assert_eq!((expected.len(), rows(&loaded("two.parquet"))), (2, expected.clone()));

    // The first is trained on, and the second held out; rows without an answer are in neither.
    std::fs::create_dir(dir.join("split")).unwrap();
    let silent = json!({ "messages": [{ "role": "user", "content": "no" }] });
    std::fs::write(dir.join("split/train.jsonl"), lines([&silent, &chats[0]])).unwrap();
    std::fs::write(dir.join("split/validation.jsonl"), lines([&chats[1], &silent])).unwrap();
    let split = loaded("split");
    assert_eq!((rows(&split), split.held_out(), split.left_out().without_labels.number), (expected, 1, 2));
}

#[test]
fn the_command_says_what_is_left_out_and_measures_what_is_held_out() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir);
    let chats = std::fs::read_to_string(dir.join("chats.jsonl")).unwrap();
    let silent = json!({ "messages": [{ "role": "user", "content": "no" }] });
    std::fs::write(dir.join("chats.jsonl"), format!("{silent}\n{chats}{silent}\n")).unwrap();
    let train = ["train", "--weights", "llama", "--data", "chats.jsonl", "--threads", "1", "--batch", "2"];
    let told = |ran: &std::process::Output| String::from_utf8_lossy(&ran.stderr).into_owned();
    let ran = zero(&[&train[..], &["--steps", "2", "--eval", "5"]].concat(), dir);
    assert!(ran.status.success(), "{}", told(&ran));
    let left_out = "warning: chats.jsonl: 2 of 82 rows are skipped: no token of an answer fits into the longest row (--seq): line 1, line 82\n";
    assert_eq!(told(&ran).matches(left_out).count(), 1, "{}", told(&ran));
    let shown = String::from_utf8_lossy(&ran.stdout);
    assert!(shown.contains("perplexity") && shown.contains("generated text:"), "{shown}");
    let ran = zero(&[&train[..], &["--dry-run"]].concat(), dir);
    assert!(ran.status.success() && String::from_utf8_lossy(&ran.stdout).contains("80 rows"), "{ran:?}");
    // A validation split without answers does not vanish.
    std::fs::create_dir(dir.join("split")).unwrap();
    std::fs::write(dir.join("split/train.jsonl"), &chats).unwrap();
    std::fs::write(dir.join("split/validation.jsonl"), lines([&silent])).unwrap();
    let split = ["train", "--weights", "llama", "--data", "split", "--dry-run"];
    let text = told(&zero(&split, dir));
    assert!(text.contains("validation.jsonl: has no row with an answer in its first"), "{text}");
    assert!(zero(&[&split[..], &["--eval", "0"]].concat(), dir).status.success());
    // Where held-out rows lie in batches does not change their mean.
    let evals = [("1", "5"), ("1", "2"), ("2", "1")].map(|(ranks, batch)| {
        let how = ["--weights", "llama", "--data", "chats.jsonl", "--steps", "1", "--eval", "5", "--lr", "0"];
        let run = format!("eval-{ranks}-{batch}");
        let summary = texts::train(dir, &run, &[&how, &["--ranks", ranks, "--batch", batch]]);
        summary["epochs"][0]["eval"][0][1].as_f64().unwrap()
    });
    assert!(evals.iter().all(|loss| (loss - evals[0]).abs() < 1e-6), "{evals:?}");
}

#[test]
fn bad_rows_are_skipped_with_a_line_each() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pairs(dir);
    let good = std::fs::read_to_string(dir.join("pairs.jsonl")).unwrap();
    let bad = json!({ "prompt": "to", "completion": 3 });
    std::fs::write(dir.join("pairs.jsonl"), format!("{good}{bad}\n{}", format!("{bad}\n").repeat(12))).unwrap();
    let train = ["train", "--weights", "llama", "--data", "pairs.jsonl", "--threads", "1", "--steps", "1"];
    let text = refused(&train, dir);
    assert!(text.contains("pairs.jsonl: line 25: its \"prompt\" is a string"), "{text}");
    let ran = zero(&[&train[..], &["--on-bad-row", "skip", "--seq", "8"]].concat(), dir);
    let told = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{told}");
    assert_eq!(told.matches("; the row is skipped").count(), 10, "{told}");
    assert!(told.contains("3 more rows cannot be used, and are skipped (13 of 37)"), "{told}");
    assert!(told.contains("rows are cut to the length of the longest row (--seq): line 2, "), "{told}");
    // If none is left, the reason is told.
    std::fs::write(dir.join("pairs.jsonl"), format!("{bad}\n{bad}\n")).unwrap();
    let text = refused(&[&train[..], &["--on-bad-row", "skip"]].concat(), dir);
    let reason = "2 rows cannot be used, the first one because: pairs.jsonl: line 1: its \"prompt\" is a string";
    assert!(text.contains(reason), "{text}");
    // An answer without text is trained on, as in TRL, and counted.
    let empty = json!({ "prompt": "to", "completion": " " });
    std::fs::write(dir.join("pairs.jsonl"), format!("{good}{empty}\n")).unwrap();
    let ran = zero(&train, dir);
    let told = String::from_utf8_lossy(&ran.stderr);
    let expected = "1 of 25 rows have an answer without text: the model learns only to end its turn: line 25";
    assert!(ran.status.success() && told.contains(expected), "{told}");
    // Documents have no bad rows.
    std::fs::write(dir.join("text.txt"), "to be or not to be\n".repeat(50)).unwrap();
    let text = refused(&["train", "--weights", "llama", "--data", "text.txt", "--on-bad-row", "skip"], dir);
    assert!(text.contains("--on-bad-row skip: expected --data as well, with conversations"), "{text}");
}

#[test]
fn a_dry_run_shows_what_counts() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir);
    let conversation =
        json!({ "messages": [{ "role": "user", "content": "who" }, { "role": "assistant", "content": "a king" }] });
    std::fs::write(dir.join("one.jsonl"), lines([&conversation])).unwrap();
    let shown = texts::ok(&["train", "--weights", "llama", "--data", "one.jsonl", "--dry-run", "--task", "sft"], dir);
    let examples =
        shown.split_once("examples (+ counts in the loss, - is only read):\n").expect("there are examples").1;
    let parts: Vec<&str> = examples.lines().filter(|line| line.starts_with("  + ")).collect();
    assert!(matches!(parts[..], [part] if part.contains("a king") && !part.contains("who")), "{examples}");
    assert!(examples.lines().any(|line| line.starts_with("  - ") && line.contains("who")), "{examples}");
}

#[test]
fn what_cannot_be_used_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir);
    let say = |role: &str, content: &str| json!({ "role": role, "content": content });
    let good = json!({ "messages": [say("user", "a"), say("assistant", "b")] });
    let refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{% for m in messages %}\
                    {{ m.role[0] }}{{ m.content }}{% endfor %}";
    // The answer before the last is told in another way.
    let forgetting = "{% for m in messages %}{{ m.role[0] }}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    let template = |text: &str| std::fs::write(dir.join("llama/chat_template.jinja"), text).unwrap();
    let train = ["train", "--weights", "llama", "--data", "bad.jsonl", "--steps", "1", "--seq", "16"];
    let told = |rows: &[Value], options: &[&str]| {
        std::fs::write(dir.join("bad.jsonl"), lines(rows)).unwrap();
        let text = refused(&[&train[..], options].concat(), dir);
        assert!(text.lines().count() == 1 && text.starts_with("error: "), "{text}");
        text
    };
    template(refusing);
    for (row, expected) in [
        (json!({ "text": "a" }), "bad.jsonl: line 2: its \"messages\" is missing: expected a list of messages"),
        (json!({ "messages": "a" }), "line 2: its \"messages\" is a string: expected a list of messages"),
        (json!({ "messages": [] }), "line 2: its \"messages\" has no messages"),
        (json!({ "messages": ["a"] }), "line 2: message 0 of its \"messages\": is a string: expected an object"),
        (json!({ "messages": [{ "content": "a" }] }), "message 0 of its \"messages\": its \"role\" is missing"),
        (json!({ "messages": [{ "role": "user", "content": [1] }] }), "its \"content\" is a list: expected a string"),
        (
            json!({ "messages": [{ "role": "user", "content": "a", "tool_calls": [1] }] }),
            "has a \"tool_calls\" field, which is not supported",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "content": "a", "train": false }] }),
            "has a \"train\" field, which is not supported",
        ),
        (
            json!({ "messages": [say("assistant", "a"), say("user", "b")] }),
            "no prompt for an assistant message that comes first",
        ),
        (
            json!({ "messages": good["messages"], "tools": "[]" }),
            "line 2: has a \"tools\" field, which is not supported",
        ),
        (
            json!({ "messages": [say("system", "a")] }),
            "line 2: the chat template of llama cannot be used: no system here",
        ),
        (json!([1]), "line 2: is a list: expected an object"),
    ] {
        let text = told(&[good.clone(), row.clone()], &[]);
        assert!(text.contains(expected), "{row}: {text}");
    }
    for (row, expected) in [
        (
            json!({ "prompt": "a", "completion": 1 }),
            "line 1: its \"prompt\" is a string and its \"completion\" is a number",
        ),
        (
            json!({ "prompt": "a", "completion": [say("user", "a")] }),
            "its \"completion\" is a list: expected two strings, or two lists of messages",
        ),
        (json!({ "instruction": 1, "output": "b" }), "line 1: its \"instruction\" is a number: expected a string"),
        (
            json!({ "conversations": [{ "from": "observation", "value": "a" }] }),
            "is from \"observation\": expected human, gpt or system",
        ),
        (
            json!({ "messages": [say("user", "a")] }),
            "bad.jsonl: has no row with an answer in its first 16 tokens, as tokenized by llama",
        ),
    ] {
        let text = told(std::slice::from_ref(&row), &[]);
        assert!(text.contains(expected), "{row}: {text}");
    }
    let again =
        json!({ "messages": [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")] });
    template(forgetting);
    let text = told(std::slice::from_ref(&again), &[]);
    assert!(
        text.contains("renders message 1 differently when others follow") && text.contains("--loss-on all"),
        "{text}"
    );
    std::fs::write(dir.join("bad.jsonl"), lines([&again])).unwrap();
    assert!(zero(&[&train[..], &["--loss-on", "all"]].concat(), dir).status.success());
    template("{% for m in messages %}");
    assert!(told(std::slice::from_ref(&good), &[]).contains("the chat template of llama cannot be used: syntax error"));
    std::fs::remove_file(dir.join("llama/chat_template.jinja")).unwrap();
    assert!(told(std::slice::from_ref(&good), &[]).contains("line 1: holds messages, but llama has no chat template"));
    // The loss is of documents where a field is named, or rows are no conversations.
    assert!(told(&[good], &["--text-field", "messages"]).contains("its \"messages\" is a list: expected a string"));
    let text = told(&[json!({ "text": "to be or not to be" })], &["--loss-on", "all"]);
    assert!(text.contains("--loss-on all: expected --data as well, with conversations"), "{text}");
}

/// The model learns one answer by heart; it is generated at every evaluation.
#[test]
fn answers_are_generated_at_evaluations() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir);
    let say = |role: &str, content: &str| json!({ "role": role, "content": content });
    let row = |question: &str| json!({ "messages": [say("user", question), say("assistant", "a king")] });
    let rows: Vec<Value> =
        ["who", "to be", "or", "not", "is it?", "no."].iter().map(|question| row(question)).collect();
    std::fs::write(dir.join("chats.jsonl"), lines(rows.iter().cycle().take(60))).unwrap();
    let how =
        ["--weights", "llama", "--data", "chats.jsonl", "--seq", "36", "--lr", "1e-2", "--eval", "5", "--batch", "4"];
    let measured =
        ["--eval-metric", "exact-match", "--eval-samples", "2", "--eval-every", "10", "--predictions", "made.jsonl"];
    for cut in [&["--ranks", "1"][..], &["--ranks", "3", "--stage", "3"]] {
        let run = cut[1];
        let summary = texts::train(dir, run, &[&how, &measured, &["--steps", "20"], cut]);
        let evaluated = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].clone();
        let evaluated: Vec<(String, f64)> = serde_json::from_value(evaluated).unwrap();
        assert!(matches!(&evaluated[1], (name, 1.0) if name == "exact_match"), "{evaluated:?}");
        let events = json_lines(&dir.join(run).join("out/events.jsonl"));
        let samples: Vec<&str> = events
            .iter()
            .filter(|event| event["kind"] == "sample")
            .map(|event| event["text"].as_str().unwrap())
            .collect();
        assert!(samples.len() >= 4, "{samples:?}");
        assert!(samples.last().unwrap().contains("label \"a king\", prediction \"a king\""), "{samples:?}");
        let made = json_lines(&dir.join("made.jsonl"));
        assert_eq!(made.len(), 5);
        assert!(made.iter().all(|line| line["prediction"] == "a king" && line["prompt"].is_string()), "{made:?}");
    }
    // An answer that is not learnt is not right.
    let summary = texts::train(dir, "short", &[&how, &measured[..2], &["--steps", "1"]]);
    assert_eq!(summary["epochs"][0]["eval"][1], json!(["exact_match", 0.0]));
    let train = [&["train", "--steps", "1"][..], &how].concat();
    let text = refused(&[&train[..], &["--packing", "--eval-samples", "1"]].concat(), dir);
    assert!(text.contains("--eval-samples 1: expected a task that predicts single rows"), "{text}");
    let metric =
        "--eval-metric exact-match: expected held-out conversations (--eval ROWS) without --packing and --loss-on all";
    for more in [&["--packing"][..], &["--loss-on", "all"]] {
        let text = refused(&[&train[..], &measured[..2], more].concat(), dir);
        assert!(text.contains(metric), "{text}");
    }
    let how = [&["train", "--steps", "1"][..], &how[..4]].concat();
    assert!(refused(&[&how[..], &measured[..2]].concat(), dir).contains(metric));
    let text = refused(&[&how[..], &["--eval-samples", "1"]].concat(), dir);
    assert!(text.contains("--eval-samples 1: expected held-out rows: add --eval ROWS"), "{text}");
    let text = refused(&["train", "--task", "seq2seq", "--eval-metric", "exact-match", "--data", "chats.jsonl"], dir);
    assert!(text.contains("--eval-metric exact-match: expected --task causal-lm"), "{text}");
}
