//! `cargo test -p zero-train-cli --test train bert`
//!
//! Pre-training of BERT, through the command.

use std::path::Path;

use serde_json::{Value, json};

use crate::common::assert_stages_agree;
use crate::common::texts::zero;

/// Writes a text of sentences and documents, its vocabulary, and a small model with dropout.
fn inputs(dir: &Path) {
    let words = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "was", "glad", "not", "here"];
    let sentence =
        |at: usize| (0..5 + at % 4).map(|i| words[(at * at + 3 * i + at * i) % 14]).collect::<Vec<_>>().join(" ");
    let lines = (0..240).map(|at| sentence(at) + if at % 6 == 5 { "\n\n" } else { "\n" });
    std::fs::write(dir.join("text.txt"), lines.collect::<String>()).unwrap();
    let made = zero(&["tokenizer", "tok", "--data", "text.txt", "--vocab-size", "61"], dir);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let config = json!({
        "model_type": "bert", "vocab_size": 61, "max_position_embeddings": 24, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1
    });
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
}

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let (out, save) = (format!("{run}/out"), format!("{run}/checkpoints"));
    let common =
        ["train", "--model", "model", "--tokenizer", "tok", "--data", "text.txt", "--seq", "24", "--batch", "3"];
    let rest =
        ["--threads", "1", "--json", "--out", &out, "--save", &save, "--eval", "10", "--warmup", "2", "--clip", "1"];
    let ran = zero(&[&common[..], &rest, options].concat(), dir);
    assert!(ran.status.success(), "{options:?}: {}", String::from_utf8_lossy(&ran.stderr));
    serde_json::from_slice(&ran.stdout).unwrap()
}

/// Weights of another transformers class, without a pooler and a next-sentence head.
#[test]
fn weights_without_a_head_start_with_a_fresh_one() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    inputs(dir);
    train(dir, "base", &["--steps", "3"]);
    crate::common::texts::ok(&["export", "base/checkpoints", "hf", "--dtype", "fp32"], dir);
    let path = dir.join("hf/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let kept = all.iter().filter(|(name, _)| !name.contains("seq_relationship") && !name.contains("pooler"));
    let kept: Vec<_> = kept.map(|(name, tensor)| (name.to_string(), tensor)).collect();
    assert_eq!(all.len() - kept.len(), 4);
    safetensors::serialize_to_file(kept, None, &path).unwrap();
    let go_on = ["train", "--weights", "hf", "--tokenizer", "tok", "--data", "text.txt", "--seq", "24", "--steps", "2"];
    let ran = zero(&go_on, dir);
    let told = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{told}");
    assert!(
        told.contains("The weights of hf lack these modules, which are newly initialized: pooler, seq_relationship."),
        "{told}"
    );
    // An adapter saves what is fresh.
    let ran = zero(&[&go_on[..], &["--lora-r", "2", "--save", "small"]].concat(), dir);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    crate::common::texts::ok(&["export", "small", "adapter"], dir);
    let saved = std::fs::read_to_string(dir.join("adapter/adapter_config.json")).unwrap();
    assert!(saved.contains("\"pooler\"") && saved.contains("\"seq_relationship\""), "{saved}");
}

#[test]
fn stages_and_a_resume_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    for said in assert_stages_agree(dir.path(), "", ["5", "8"], |run, options| train(dir.path(), run, options)) {
        let names: Vec<&str> =
            said["epochs"][0]["eval"].as_array().unwrap().iter().map(|pair| pair[0].as_str().unwrap()).collect();
        assert_eq!(names, ["loss", "masked_accuracy", "next_sentence_accuracy"]);
    }
}

#[test]
fn it_learns_and_is_exported_as_transformers_have_it() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let long = ["--steps", "120", "--lr", "3e-3", "--dtype", "bf16", "--whole-word-mask", "--mask-probability", "0.2"];
    let summary = train(dir.path(), "run", &long);
    let [first, last] = ["loss_first", "loss_last"].map(|key| summary[key].as_f64().unwrap());
    assert!(last < 0.8 * first, "{first} to {last}");
    let exported = zero(&["export", "run/checkpoints", "hf"], dir.path());
    assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    let config = std::fs::read_to_string(dir.path().join("hf/config.json")).unwrap();
    assert!(config.contains("BertForPreTraining"), "{config}");
    let on = [
        "train",
        "--weights",
        "hf",
        "--tokenizer",
        "tok",
        "--data",
        "text.txt",
        "--seq",
        "24",
        "--steps",
        "1",
        "--json",
    ];
    let again = zero(&on, dir.path());
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert!(again["loss_first"].as_f64().unwrap() < 0.9 * first, "it goes on from its weights");
}

#[test]
fn what_does_not_fit_is_told() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let told = |options: &[&str]| {
        let ran = zero(&[&["train"], options].concat(), dir.path());
        let text = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(2), "{text}");
        text
    };
    let base = ["--data", "text.txt", "--tokenizer", "tok"];
    for (options, expected) in [
        (
            &["--model", "tiny", "--task", "bert-pretraining"][..],
            "--model tiny: expected a BERT for --task bert-pretraining",
        ),
        (
            &["--model", "model", "--task", "causal-lm"],
            "--model model: expected a GPT-2, or a Llama, Mistral, Qwen, Gemma or Phi, for --task causal-lm",
        ),
        (&["--model", "bert-tiny", "--mask-probability", "1"], "expected a fraction above 0 and below 1"),
        (&["--model", "model", "--seq", "25"], "--seq 25: expected 5 to 24, the positions of the model"),
        (&["--model", "bert-smal"], "bert-tiny, bert-base, bert-large"),
    ] {
        let text = told(&[options, &base].concat());
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    let text = told(&["--model", "bert-tiny", "--data", "text.txt"]);
    assert!(text.contains("create one from it with `zero tokenizer DIR --data FILE`"), "{text}");
    std::fs::write(dir.path().join("short.txt"), "the cat").unwrap();
    let text = told(&["--model", "model", "--tokenizer", "tok", "--data", "short.txt"]);
    assert!(text.contains("but one row needs 21: use a longer text or a smaller --seq"), "{text}");
    let wide = zero(&["tokenizer", "wide", "--data", "text.txt", "--vocab-size", "9"], dir.path());
    assert!(String::from_utf8_lossy(&wide.stderr).contains("expected --vocab-size"));
}
