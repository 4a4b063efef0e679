//! Labelled texts, a vocabulary and small models for tests of tasks, all in one folder.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use zero_train::data::{TokenizeOptions, Tokenizer};

/// Runs the command in a folder.
pub fn zero(args: &[&str], dir: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_zero")).args(args).current_dir(dir).output().unwrap()
}

/// Returns the command's standard output; it must succeed.
#[track_caller]
pub fn ok(args: &[&str], dir: &Path) -> String {
    let ran = zero(args, dir);
    assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// Returns the error message for bad input.
#[track_caller]
pub fn refused(args: &[&str], dir: &Path) -> String {
    let ran = zero(args, dir);
    let text = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2), "{args:?}: {text}");
    text
}

/// Trains with files in `run` and returns the summary.
#[track_caller]
pub fn train(dir: &Path, run: &str, options: &[&[&str]]) -> Value {
    let (out, save) = (format!("{run}/out"), format!("{run}/checkpoints"));
    let common = ["train", "--threads", "1", "--json", "--out", &out, "--save", &save];
    serde_json::from_str(&ok(&[&common[..], &options.concat()].concat(), dir)).unwrap()
}

/// Returns the objects of a file of JSON lines.
pub fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Copies a tiny fixture model with a tokenizer to the folder `name` of `dir`.
pub fn fixture(dir: &Path, name: &str) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    std::fs::create_dir(dir.join(name)).unwrap();
    for from in [fixtures.join("texts").join(name), fixtures.join(name)] {
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
            std::fs::copy(entry.path(), dir.join(name).join(entry.file_name())).unwrap();
        }
    }
}

/// Creates a folder with a `config.json`.
pub fn model(dir: &Path, name: &str, config: &Value) {
    std::fs::create_dir(dir.join(name)).unwrap();
    std::fs::write(dir.join(name).join("config.json"), config.to_string()).unwrap();
}

const WORDS: [&str; 12] = ["cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "was", "glad", "not", "here"];

/// Writes 163 rows to `rows.jsonl`, whose class (`class`) and answer of one to three words (`answer`) follow from their
/// words, such sentences to `text.txt`, and their vocabulary to `tok`.
pub fn labelled(dir: &Path) {
    let sentence = |at: usize| -> String {
        let words: Vec<&str> = (0..4 + at % 5).map(|i| WORDS[(at * at + 5 * i + at * i) % 12]).collect();
        words.join(" ")
    };
    let row = |at: usize| {
        let text = sentence(at);
        let (class, answer) = match (text.contains("cat"), text.contains("dog")) {
            (true, _) => ("cats", "cat"),
            (_, true) => ("dogs", "dog ran"),
            _ => ("none", "not here glad"),
        };
        let row = json!({ "class": class, "answer": answer, "text": text, "other": sentence(at + 7), "n": at % 2 });
        format!("{row}\n")
    };
    std::fs::write(dir.join("rows.jsonl"), (0..163).map(row).collect::<String>()).unwrap();
    let text: String = (0..240).map(|at| sentence(at) + if at % 6 == 5 { "\n\n" } else { "\n" }).collect();
    std::fs::write(dir.join("text.txt"), text).unwrap();
    ok(&["tokenizer", "tok", "--data", "text.txt", "--vocab-size", "61"], dir);
}

/// [`labelled`], and a small BERT pre-trained for a few steps: `bert-hf`.
pub fn bert(dir: &Path) {
    model(
        dir,
        "bert",
        &json!({
            "model_type": "bert", "vocab_size": 61, "max_position_embeddings": 24, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 48, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1
        }),
    );
    let pretrain = ["train", "--model", "bert", "--tokenizer", "tok", "--data", "text.txt", "--seq", "24"];
    ok(&[&pretrain[..], &["--threads", "1", "--steps", "3", "--save", "bert-base"]].concat(), dir);
    ok(&["export", "bert-base", "bert-hf", "--dtype", "fp32"], dir);
}

/// A small BART for [`labelled`]: `bart`.
pub fn bart(dir: &Path) {
    model(
        dir,
        "bart",
        &json!({
            "model_type": "bart", "vocab_size": 61, "max_position_embeddings": 24, "d_model": 32, "encoder_layers": 2,
            "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 48, "dropout": 0.1, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 3,
            "forced_bos_token_id": 2, "forced_eos_token_id": 3
        }),
    );
}

/// A small T5 for [`labelled`], of version 1.1: `t5`.
pub fn t5(dir: &Path) {
    model(
        dir,
        "t5",
        &json!({
            "model_type": "t5", "vocab_size": 61, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": false, "dropout_rate": 0.1, "eos_token_id": 3
        }),
    );
}

/// A small model with GPT-2's tokens trained for a few steps on `book.txt`: `gpt2-base`, exported as `gpt2-hf`.
pub fn gpt2(dir: &Path, config: &Value, seq: &str, steps: &str) -> String {
    model(dir, "model", config);
    if config["model_type"] != "gpt2" {
        // GPT-2's, as a folder of another family has to bring its own.
        let tokenize = TokenizeOptions { vocab_size: 50257, ..TokenizeOptions::default() };
        Tokenizer::find(Path::new("text"), &tokenize).unwrap().save(&dir.join("model")).unwrap();
    }
    std::fs::write(dir.join("book.txt"), "The cat sat on the mat, and the dog ran under the tree.\n".repeat(40))
        .unwrap();
    let train = ["train", "--model", "model", "--data", "book.txt", "--seq", seq, "--batch", "2", "--steps", steps];
    let shown = ok(&[&train[..], &["--lr", "1e-2", "--save", "gpt2-base", "--threads", "1"]].concat(), dir);
    ok(&["export", "gpt2-base", "gpt2-hf", "--dtype", "fp32"], dir);
    shown
}
