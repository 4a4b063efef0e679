//! Text of models on Burn 0.22 compared with that of transformers (`tests/fixtures/make_models_reference.py`):
//! `cargo test --features models --test generate`.

mod common;

use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use common::{config, options};
use serde_json::Value;
use zero_core::Stage;
use zero_core::config::Float;
use zero_models::generate::{CachedRows, Sampling};
use zero_models::{BartConfig, CausalFamily, Gpt2Config, LlamaConfig, ModelConfig};
use zero_param::models::generate::generate;
use zero_param::models::{Bart, CausalModel, Gpt2, KvCache, Llama, Seq2SeqModel, T5, seq2seq};
use zero_param::{Error, run_threads, shard};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// Compares text with that of transformers, for all prompts at once and for each alone.
fn same_text(folder: &str, made: impl Fn(&[Vec<u32>], &Sampling) -> Vec<Vec<u32>>) {
    let file = std::fs::read_to_string(fixture(folder).join("generated.json")).unwrap();
    let file: Value = serde_json::from_str(&file).unwrap();
    let tokens = |value: &Value| -> Vec<Vec<u32>> { serde_json::from_value(value.clone()).unwrap() };
    let prompts = tokens(&file["prompts"]);
    for case in file["cases"].as_array().unwrap() {
        let number = |key: &str, default: f64| case["options"][key].as_f64().unwrap_or(default);
        let token = |value: &Value| value.as_u64().map(|token| token as u32);
        let how = Sampling {
            max_new_tokens: file["max_new_tokens"].as_u64().unwrap() as usize,
            stop: token(&case["eos"]).into_iter().collect(),
            forced_first: token(&case["options"]["forced_bos_token_id"]),
            forced_last: token(&case["options"]["forced_eos_token_id"]),
            repetition_penalty: number("repetition_penalty", 1.0),
            beams: number("num_beams", 1.0) as usize,
            length_penalty: number("length_penalty", 1.0),
            ..Sampling::default()
        };
        let expected = tokens(&case["made"]);
        assert_eq!(made(&prompts, &how), expected, "{folder}: all prompts at once, {case}");
        for (prompt, expected) in prompts.iter().zip(expected) {
            assert_eq!(made(std::slice::from_ref(prompt), &how), [expected], "{folder}: {prompt:?} alone, {case}");
        }
    }
}

#[test]
fn texts_are_those_of_transformers() {
    for family in ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"] {
        let folder = &format!("{family}_tiny");
        let config = LlamaConfig::from_file(&fixture(folder).join("config.json")).unwrap();
        let device = Device::flex();
        let model = Llama::build(&config, Some(&fixture(folder)), 0, &device).unwrap();
        same_text(folder, |prompts, how| generate(&model, &config, prompts, how, &device).unwrap());
    }
}

#[test]
fn texts_from_texts_are_those_of_transformers() {
    let device = Device::flex();
    let config = BartConfig::from_file(&fixture("bart_tiny").join("config.json")).unwrap();
    let model = Bart::build(&config, Some(&fixture("bart_tiny")), 0, &device).unwrap();
    same_text("bart_tiny", |texts, how| seq2seq::generate(&model, &config, texts, how, &device).unwrap());
    for folder in ["t5_tiny", "flan_t5_tiny"] {
        let ModelConfig::T5(config) = ModelConfig::from_file(&fixture(folder).join("config.json")).unwrap() else {
            panic!("{folder} is no T5")
        };
        let model = T5::build(&config, Some(&fixture(folder)), 0, &device).unwrap();
        same_text(folder, |texts, how| seq2seq::generate(&model, &config, texts, how, &device).unwrap());
    }
}

#[test]
fn a_sharded_model_generates_the_same_text() {
    let folder = fixture("qwen3_tiny");
    let sizes = LlamaConfig::from_file(&folder.join("config.json")).unwrap();
    run_threads(2, &options(), |ranks| {
        let device = Device::flex().autodiff();
        let model = Llama::build(&sizes, Some(&folder), 0, &device).unwrap();
        let (model, _) = shard(model, ranks, &config(Stage::Parameters))?;
        let (model, device) = (model.valid(), device.without_autodiff());
        same_text("qwen3_tiny", |prompts, how| generate(&model, &sizes, prompts, how, &device).unwrap());
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// Reads a text token by token, and returns all logits.
fn read<M: CausalModel>(model: &M, tokens: &[i32], dtype: Option<Float>) -> Vec<f32> {
    let mut cache = KvCache::new(CachedRows::new(vec![0], tokens.len(), dtype));
    let logits = tokens.iter().map(|&token| {
        let ids = Tensor::<2, Int>::from_data(TensorData::new(vec![token], [1, 1]), &Device::flex());
        model.next_logits(ids, &mut cache).into_data().try_into_vec::<f32>().unwrap()
    });
    logits.flatten().collect()
}

#[test]
fn a_cache_in_16_bit_is_that_in_32_rounded() {
    let config = Gpt2Config::from_file(&fixture("gpt2_tiny").join("config.json")).unwrap();
    let model = Gpt2::build(&config, Some(&fixture("gpt2_tiny")), 0, &Device::flex()).unwrap();
    let tokens = [5, 17, 3, 60, 2, 9, 33, 1];
    let whole = read(&model, &tokens, None);
    assert_eq!(whole.len(), tokens.len() * config.sizes().vocabulary);
    let largest = whole.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    assert_eq!(read(&model, &tokens, Some(Float::F32)), whole);
    for (dtype, most) in [(Float::F16, 2e-3), (Float::Bf16, 2e-2)] {
        let cached = read(&model, &tokens, Some(dtype));
        let off = cached.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / largest;
        assert!(off > 0.0 && off < most, "{dtype:?}: {off}");
    }
}
