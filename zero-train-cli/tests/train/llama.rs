//! `cargo test -p zero-train-cli --test train llama`
//!
//! Training of a Llama through the command: the same task as GPT-2's. (zero-tests' `ranks` compares its losses with transformers.)

use std::path::Path;

use serde_json::{Value, json};

use crate::common::texts::zero;
use crate::common::{assert_stages_agree, write_inputs};

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let (out, save) = (format!("{run}/out"), format!("{run}/checkpoints"));
    let common = ["train", "--data", "rows.safetensors", "--batch", "2", "--threads", "1", "--json", "--clip", "1"];
    let ran = zero(&[&common[..], &["--out", &out, "--save", &save], options].concat(), dir);
    assert!(ran.status.success(), "{options:?}: {}", String::from_utf8_lossy(&ran.stderr));
    serde_json::from_slice(&ran.stdout).unwrap()
}

#[test]
fn stages_and_a_resume_give_the_same_bits_and_an_export_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    write_inputs(dir);
    let config = json!({
        "model_type": "qwen2", "vocab_size": 61, "max_position_embeddings": 16, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1
    });
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
    assert_stages_agree(dir, "", ["4", "6"], |run, options| {
        train(dir, run, &[&["--model", "model"][..], options].concat())
    });
    let ran = zero(&["export", "3-3/checkpoints", "hf", "--dtype", "fp32"], dir);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let config = std::fs::read_to_string(dir.join("hf/config.json")).unwrap();
    assert!(config.contains("Qwen2ForCausalLM") && config.contains("\"model_type\": \"qwen2\""), "{config}");
    let first = train(dir, "on", &["--weights", "hf", "--ranks", "2", "--stage", "3", "--steps", "1"]);
    let begun = train(dir, "anew", &["--model", "hf", "--steps", "1"]);
    let [first, begun] = [first, begun].map(|summary| summary["loss_first"].as_f64().unwrap());
    assert!(first < begun, "it goes on from its weights: {first}, {begun}");
}

#[test]
fn presets_are_known_and_what_does_not_fit_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    write_inputs(dir);
    train(dir, "tiny", &["--model", "llama-tiny", "--steps", "1"]);
    for (model, expected) in
        [("llama-3-8", "did you mean \"llama-3-8b\"?"), ("mistral", "there is no Llama preset \"mistral\"")]
    {
        let ran = zero(&["train", "--data", "rows.safetensors", "--model", model], dir);
        let told = String::from_utf8_lossy(&ran.stderr).to_string();
        assert!(ran.status.code() == Some(2) && told.contains(expected), "{told}");
    }
    let sized = zero(&["estimate", "--model", "mistral-7b", "--ranks", "8"], dir);
    assert!(
        String::from_utf8_lossy(&sized.stdout).contains("7241732096 parameters"),
        "{}",
        String::from_utf8_lossy(&sized.stdout)
    );
}
