//! `cargo test -p zero-train-cli --test train generate`
//!
//! Text generation through the command, for any placement of parameters. (zero-models' tests check the tokens against transformers.)

use std::path::Path;

use serde_json::{Value, json};

use crate::common::texts::{self, ok, zero};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn gpt2() -> Value {
    json!({ "model_type": "gpt2", "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4 })
}

/// A small model with GPT-2's tokens trained for a few steps.
fn model(dir: &Path, config: &Value) {
    let shown = texts::gpt2(dir, config, "24", "12");
    assert!(shown.contains("prompt:\n") && shown.contains("\ngenerated text:\n"), "{shown}");
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
    for how in [
        &[][..],
        &["--temperature", "1", "--top-k", "50", "--seed", "3"],
        &["--beams", "3"],
        &["--quantize", "int8"],
        &["--quantize", "int4", "--beams", "2"],
    ] {
        let with = |model: &str, options: &[&str]| made(model, &[how, options].concat());
        let expected = with("gpt2-hf", &[]);
        assert_eq!(expected.len(), 3);
        assert!(expected.iter().all(|line| line["tokens"].as_array().unwrap().len() == 10), "{expected:?}");
        assert_eq!(with("gpt2-base", &[]), expected, "from a checkpoint");
        assert_eq!(with("gpt2-hf", &["--offload", "disk", "--swap", "."]), expected, "from a disk");
        for ranks in ["2", "3"] {
            assert_eq!(with("gpt2-hf", &["--ranks", ranks]), expected, "{ranks} ranks");
        }
    }
    // A file of prompts; one that is shown as it is made.
    std::fs::write(dir.path().join("prompts.txt"), "The cat\nmat,").unwrap();
    let ran = zero(&["generate", "gpt2-hf", "--prompts", "prompts.txt", "--max-new-tokens", "3"], dir.path());
    assert!(
        text(&ran.stdout).starts_with("The cat") && text(&ran.stdout).contains("\n\nmat,"),
        "{}",
        text(&ran.stdout)
    );
    let line = &made("gpt2-hf", &[])[0];
    let ran = zero(&["generate", "gpt2-hf", "--prompt", "The cat", "--max-new-tokens", "10"], dir.path());
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
        (&["nowhere", "--prompt", "a"][..], "nowhere: is not a folder: expected one with a config.json and weights"),
        (&["model", "--prompt", "a"], "model"),
        (&["bert", "--prompt", "a"], "expected a GPT-2 or a Llama, which predict the next token"),
        (&["gpt2-hf", "--prompt", "a", "--max-new-tokens", "48"], "exceeds the model's 48 positions"),
        (&["gpt2-hf", "--prompt", "a", "--stop", "<|no|>"], "--stop <|no|>: expected a token of the model's tokenizer"),
        (&["gpt2-hf", "--prompt", "a", "--top-p", "2"], "top_p = 2"),
        (&["gpt2-hf", "--prompt", "a", "--ranks", "0"], "--ranks 0: expected at least 1"),
        (
            &["gpt2-hf", "--prompt", "a", "--offload", "disk", "--swap", "none"],
            "--swap none: expected an existing folder",
        ),
        (&["gpt2-hf"], "--prompt"),
    ] {
        let ran = zero(&[&["generate"], args].concat(), dir.path());
        let told = text(&ran.stderr);
        assert!(ran.status.code() == Some(2) && told.contains(expected), "{args:?}: {:?} {told}", ran.status);
    }
}

/// Same as transformers' `generate` without a prompt, which starts with the model's beginning-of-text token.
#[test]
fn a_text_is_made_of_nothing() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path(), &gpt2());
    let made = |prompt: &str| {
        let args = ["generate", "gpt2-hf", "--prompt", prompt, "--json", "--max-new-tokens", "6"];
        let made: Value = serde_json::from_str(&ok(&args, dir.path())).unwrap();
        made["tokens"].clone()
    };
    assert_eq!(made(""), made("<|endoftext|>"));
}

/// The tokens that transformers' generate produces with the fixture's weights
/// (`tests/fixtures/make_models_reference.py`), for texts that end with their end token.
#[test]
fn a_bart_makes_the_tokens_of_transformers_however_parameters_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/bart_tiny");
    std::fs::create_dir(dir.path().join("bart")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(file), dir.path().join("bart").join(file)).unwrap();
    }
    // A word for each token, by its number.
    let vocabulary: serde_json::Map<_, _> = (0..61).map(|id| (format!("t{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": null, "decoder": null, "truncation": null, "padding": null,
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "t0" }
    });
    std::fs::write(dir.path().join("bart/tokenizer.json"), tokenizer.to_string()).unwrap();
    let file: Value = serde_json::from_slice(&std::fs::read(fixture.join("generated.json")).unwrap()).unwrap();
    let words = |ids: &Value| -> Vec<String> { ids.as_array().unwrap().iter().map(|id| format!("t{id}")).collect() };
    let prompts: Vec<String> = file["prompts"].as_array().unwrap().iter().map(|ids| words(ids).join(" ")).collect();
    let new = file["max_new_tokens"].to_string();
    let made = |model: &str, options: &[&str]| -> Vec<Value> {
        let prompts = prompts.iter().flat_map(|prompt| ["--prompt", prompt]);
        let args: Vec<&str> = ["generate", model, "--json"].into_iter().chain(options.iter().copied()).collect();
        let told = ok(&args.into_iter().chain(prompts).collect::<Vec<_>>(), dir.path());
        told.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let beams = |case: &Value| case["options"]["num_beams"].as_u64().unwrap_or(1).to_string();
    for case in file["marked"].as_array().unwrap() {
        let (beams, expected) = (beams(case), case["made"].as_array().unwrap());
        for kept in [&[][..], &["--ranks", "2"], &["--ranks", "3"], &["--offload", "disk", "--swap", "."]] {
            let lines = made("bart", &[&["--max-new-tokens", &new, "--beams", &beams], kept].concat());
            for ((line, expected), prompt) in lines.iter().zip(expected).zip(&prompts) {
                assert_eq!(line["tokens"], *expected, "{kept:?}, {beams} beams");
                assert_eq!((&line["text"], &line["prompt"]), (&json!(words(expected).join(" ")), &json!(prompt)));
            }
            assert_eq!(lines.len(), expected.len());
        }
    }
    // As long as its positions let it be; an adapter beside the weights and merged into them.
    let plain = made("bart", &[]);
    assert!(plain.iter().all(|line| line["tokens"].as_array().unwrap().len() <= 23), "{plain:?}");
    let adapter = fixture.join("lora").display().to_string();
    ok(&["export", &adapter, "merged", "--merge", "--base", "bart", "--dtype", "fp32"], dir.path());
    std::fs::copy(dir.path().join("bart/tokenizer.json"), dir.path().join("merged/tokenizer.json")).unwrap();
    let merged = made("merged", &["--ranks", "2"]);
    assert_eq!(made(&adapter, &["--base", "bart"]), merged);
    assert_ne!(merged, plain);
    let shown = ok(&["generate", "bart", "--prompt", &prompts[1]], dir.path());
    assert_eq!(shown, format!("{}\n", plain[1]["text"].as_str().unwrap()), "the text that is made, and nothing else");
}
