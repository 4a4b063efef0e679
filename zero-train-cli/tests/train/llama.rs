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

/// Losses in 16 bit are near those in fp32, for every family that reads the same rows.
#[test]
fn each_family_trains_and_generates_in_sixteen_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, fixtures) = (dir.path(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"));
    for family in ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gpt2"] {
        let folder = fixtures.join(format!("{family}_tiny"));
        let (folder, rows) = (folder.to_str().unwrap(), folder.join("batches.safetensors"));
        let loss = |dtype: &str| {
            let args = ["train", "--data", rows.to_str().unwrap(), "--weights", folder, "--batch", "2", "--steps", "3"];
            let more = ["--threads", "1", "--ranks", "2", "--dtype", dtype, "--json", "--out", "out", "--clip", "1"];
            let ran = zero(&[&args[..], &more].concat(), dir);
            assert!(ran.status.success(), "{family} in {dtype}: {}", String::from_utf8_lossy(&ran.stderr));
            let summary: Value = serde_json::from_slice(&ran.stdout).unwrap();
            summary["loss_first"].as_f64().unwrap()
        };
        let exact = loss("fp32");
        for dtype in ["bf16", "fp16"] {
            let apart = (loss(dtype) - exact).abs() / exact;
            assert!(apart < 2e-2, "{family} in {dtype}: the first loss differs by {apart:e} from fp32's");
        }
        // Prompts of different lengths are padded.
        std::fs::write(dir.join("prompts.txt"), "1 2 3 4 5\n6 7\n").unwrap();
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": { "type": "Whitespace" },
            "post_processor": null, "decoder": null, "truncation": null, "padding": null,
            "model": { "type": "WordLevel", "unk_token": "0",
                "vocab": (0..61).map(|id| (id.to_string(), id.into())).collect::<serde_json::Map<_, _>>() }
        });
        std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        for dtype in ["bf16", "fp16"] {
            let args =
                ["generate", folder, "--tokenizer", "tokenizer.json", "--prompts", "prompts.txt", "--dtype", dtype];
            let ran = zero(&[&args[..], &["--max-new-tokens", "3", "--json"]].concat(), dir);
            assert!(ran.status.success(), "{family} in {dtype}: {}", String::from_utf8_lossy(&ran.stderr));
            assert_eq!(String::from_utf8_lossy(&ran.stdout).lines().count(), 2, "{family} in {dtype}");
        }
    }
}
