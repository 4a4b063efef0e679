//! `cargo test -p zero-train --test train generate`
//!
//! Text by the command, however its parameters are kept. (That the tokens are transformers': zero-models' tests.)

use std::path::Path;
use std::process::{Command, Output};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

fn zero(args: &[&str], dir: &Path) -> Output {
    Command::cargo_bin("zero").unwrap().args(args).current_dir(dir).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn gpt2() -> Value {
    json!({ "model_type": "gpt2", "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4 })
}

/// A small model that was trained for a few steps, with GPT-2's tokens: `checkpoints`, and exported `hf`.
fn model(dir: &Path, config: &Value) {
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("book.txt"), "The cat sat on the mat, and the dog ran under the tree.\n".repeat(40))
        .unwrap();
    let train = ["train", "--model", "model", "--data", "book.txt", "--seq", "24", "--batch", "2", "--steps", "12"];
    let ran = zero(&[&train[..], &["--lr", "1e-2", "--save", "checkpoints", "--threads", "1"]].concat(), dir);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let shown = text(&ran.stdout);
    assert!(shown.contains("after\n") && shown.contains("\nthe model goes on\n"), "{shown}");
    let ran = zero(&["export", "checkpoints", "hf", "--dtype", "fp32"], dir);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
}

#[test]
fn the_same_text_however_parameters_are_kept() {
    same_text(&gpt2());
}

#[test]
fn the_same_text_of_a_mistral_whose_window_is_shorter_than_the_text() {
    same_text(&json!({
        "model_type": "mistral", "vocab_size": 50257, "max_position_embeddings": 48, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6
    }));
}

fn same_text(config: &Value) {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path(), config);
    let prompts =
        ["--prompt", "The cat", "--prompt", "under the tree", "--prompt", "mat,", "--json", "--max-new-tokens", "10"];
    let made = |model: &str, options: &[&str]| -> Vec<Value> {
        let ran = zero(&[&["generate", model], &prompts[..], options].concat(), dir.path());
        assert!(ran.status.success(), "{options:?}: {}", text(&ran.stderr));
        text(&ran.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    for how in [&[][..], &["--temperature", "1", "--top-k", "50", "--seed", "3"], &["--beams", "3"]] {
        let with = |model: &str, options: &[&str]| made(model, &[how, options].concat());
        let expected = with("hf", &[]);
        assert_eq!(expected.len(), 3);
        assert!(expected.iter().all(|line| line["tokens"].as_array().unwrap().len() == 10), "{expected:?}");
        assert_eq!(with("checkpoints", &[]), expected, "from a checkpoint");
        assert_eq!(with("hf", &["--offload", "disk", "--swap", "."]), expected, "from a disk");
        for ranks in ["2", "3", "4"] {
            assert_eq!(with("hf", &["--ranks", ranks]), expected, "{ranks} ranks");
        }
    }
    // A file of prompts; one that is shown as it is made.
    std::fs::write(dir.path().join("prompts.txt"), "The cat\nmat,").unwrap();
    let ran = zero(&["generate", "hf", "--prompts", "prompts.txt", "--max-new-tokens", "3"], dir.path());
    assert!(
        text(&ran.stdout).starts_with("The cat") && text(&ran.stdout).contains("\n\nmat,"),
        "{}",
        text(&ran.stdout)
    );
    let line = &made("hf", &[])[0];
    let ran = zero(&["generate", "hf", "--prompt", "The cat", "--max-new-tokens", "10"], dir.path());
    assert_eq!(text(&ran.stdout), format!("The cat{}\n", line["text"].as_str().unwrap()));
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 5, "nothing is left: {left:?}");
}

#[test]
fn what_cannot_be_gone_on_with_is_told() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path(), &gpt2());
    let bert = json!({ "model_type": "bert" }).to_string();
    std::fs::create_dir(dir.path().join("bert")).unwrap();
    std::fs::write(dir.path().join("bert/config.json"), bert).unwrap();
    for (args, expected) in [
        (&["nowhere", "--prompt", "a"][..], "nowhere: is no folder: expected one with a config.json and weights"),
        (&["model", "--prompt", "a"], "model"),
        (&["bert", "--prompt", "a"], "expected a GPT-2 or a Llama, which predict the next token"),
        (&["hf", "--prompt", ""], "prompt 0 is empty"),
        (&["hf", "--prompt", "a", "--max-new-tokens", "48"], "more than the model's 48 positions"),
        (&["hf", "--prompt", "a", "--stop", "END"], "--stop END: expected a token of the model's tokenizer"),
        (&["hf", "--prompt", "a", "--top-p", "2"], "top_p = 2"),
        (&["hf", "--prompt", "a", "--ranks", "0"], "--ranks 0: expected at least 1"),
        (&["hf", "--prompt", "a", "--offload", "disk", "--swap", "none"], "--swap none: expected a folder"),
        (&["hf"], "--prompt"),
    ] {
        let ran = zero(&[&["generate"], args].concat(), dir.path());
        let told = text(&ran.stderr);
        assert!(ran.status.code() == Some(2) && told.contains(expected), "{args:?}: {:?} {told}", ran.status);
    }
}
