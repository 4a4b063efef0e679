//! cargo test -p zero-models --test models families
//!
//! Logits, losses and text of Hugging Face's models on the same weights: what `tests/fixtures/make_models_reference.py` has written.

use std::path::{Path, PathBuf};

use burn::tensor::{Int, Tensor, TensorData, s};
use burn_flex::Flex;
use safetensors::SafeTensors;
use serde_json::Value;
use zero_models::generate::{CausalLm, Sampling, generate};
use zero_models::{Llama, llama};

type B = Flex;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

pub fn json(folder: &str, file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(folder).join(file)).unwrap()).unwrap()
}

/// The first rows of a tensor of the fixture's batches.
pub fn rows(folder: &str, name: &str, count: usize) -> Tensor<B, 2, Int> {
    let bytes = std::fs::read(fixture(folder).join("batches.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let ids: Vec<i64> = tensor.data().as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect();
    let all = Tensor::from_data(TensorData::new(ids, tensor.shape().to_vec()), &Default::default());
    all.slice(s![0..count])
}

/// Within 1e-5 of the largest logit.
#[track_caller]
pub fn same_logits(what: &str, logits: Tensor<B, 3>, file: &Value) {
    let expected: Vec<Vec<Vec<f64>>> = serde_json::from_value(file["logits"].clone()).unwrap();
    let expected: Vec<f64> = expected.concat().concat();
    let got: Vec<f32> = logits.into_data().to_vec().unwrap();
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
    let worst = got.iter().zip(&expected).map(|(got, x)| (f64::from(*got) - x).abs()).fold(0.0, f64::max);
    println!("{what}: logits differ by {worst:.1e} at most, the largest is {largest:.1}");
    assert!(worst <= 1e-5 * largest, "{what}: {worst:e}, the largest is {largest}");
}

#[track_caller]
pub fn same_loss(what: &str, got: Tensor<B, 1>, reference: &Value) {
    let (got, expected) = (f64::from(got.into_scalar()), reference["losses"][0].as_f64().unwrap());
    println!("{what}: loss {got}, expected {expected}");
    assert!((got - expected).abs() <= 1e-5 * expected, "{what}: {got}, expected {expected}");
}

/// Text as transformers make it, all prompts at once and each alone.
pub fn same_text(folder: &str, made: impl Fn(&[Vec<u32>], &Sampling) -> Vec<Vec<u32>>) {
    let file = json(folder, "generated.json");
    let tokens = |value: &Value| -> Vec<Vec<u32>> { serde_json::from_value(value.clone()).unwrap() };
    let prompts = tokens(&file["prompts"]);
    for case in file["cases"].as_array().unwrap() {
        let options = &case["options"];
        let number = |key: &str, default: f64| options[key].as_f64().unwrap_or(default);
        let token = |value: &Value| value.as_u64().map(|token| token as u32);
        let how = Sampling {
            max_new_tokens: file["max_new_tokens"].as_u64().unwrap() as usize,
            stop: token(&case["eos"]).into_iter().collect(),
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
fn llama_mistral_and_qwen_are_hugging_faces() {
    for folder in ["llama_tiny", "mistral_tiny", "qwen2_tiny"] {
        let model: Llama<B> = llama::weights::from_pretrained(&fixture(folder), &Default::default()).unwrap();
        same_logits(folder, model.forward(rows(folder, "input_ids", 2)), &json(folder, "generated.json"));
        same_loss(folder, model.loss(rows(folder, "input_ids", 4)), &json(folder, "reference.json"));
        same_text(folder, |prompts, how| generate(&model, prompts, how, &Default::default()).unwrap());
        assert_eq!((model.positions(), model.vocabulary()), (40, 61));
    }
}
