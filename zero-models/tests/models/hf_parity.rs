//! cargo test -p zero-models --test models hf_parity
//!
//! The logits and the first loss of Hugging Face's models on the same weights and rows. The references come from
//! `tests/fixtures/make_reference.py` at the root of the workspace.

use std::path::{Path, PathBuf};

use burn::tensor::{Int, Tensor, TensorData, s};
use burn_flex::Flex;
use safetensors::SafeTensors;
use serde_json::Value;
use zero_models::{Bert, BertBatch, Gpt2, bert, gpt2};

const TOLERANCE: f64 = 1e-4;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn reference(name: &str) -> Value {
    let text = std::fs::read_to_string(fixture(name).join("reference.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the rows of the first step, as the reference read them.
pub fn first_rows<const D: usize>(folder: &str, name: &str, rows: usize) -> Tensor<Flex, D, Int> {
    let bytes = std::fs::read(fixture(folder).join("batches.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let ids: Vec<i64> = tensor.data().as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect();
    let all = Tensor::from_data(TensorData::new(ids, tensor.shape().to_vec()), &Default::default());
    all.slice(s![0..rows])
}

#[track_caller]
fn assert_close(got: &[f32], expected: &Value) {
    let expected = expected.as_array().unwrap();
    assert_eq!(got.len(), expected.len());
    for (&got, expected) in got.iter().zip(expected) {
        let expected = expected.as_f64().unwrap();
        let error = (got as f64 - expected).abs();
        assert!(error <= TOLERANCE * expected.abs().max(0.1), "{got} {expected}");
    }
}

/// Compares the sampled logits of row 0.
#[track_caller]
fn assert_sample(logits: &Tensor<Flex, 3>, reference: &Value) {
    for t in [0, 5] {
        let sample: Vec<f32> = logits.clone().slice(s![0..1, t..t + 1, 0..8]).into_data().to_vec().unwrap();
        assert_close(&sample, &reference["logits_sample"][t.to_string()]);
    }
}

#[test]
fn gpt2_is_hugging_faces() {
    let reference = reference("gpt2_tiny");
    let rows = reference["global_batch"].as_u64().unwrap() as usize;
    let ids = first_rows::<2>("gpt2_tiny", "input_ids", rows);
    for folder in ["gpt2_tiny", "gpt2_tiny_sharded"] {
        let model: Gpt2<Flex> = gpt2::weights::from_pretrained(&fixture(folder), &Default::default()).unwrap();
        assert_sample(&model.forward(ids.clone()), &reference);
        let loss = model.loss(ids.clone()).into_scalar();
        assert_close(&[loss], &Value::from(vec![reference["losses"][0].clone()]));
    }
}

#[test]
fn bert_is_hugging_faces() {
    let folder = "bert_tiny";
    let reference = reference(folder);
    let rows = reference["global_batch"].as_u64().unwrap() as usize;
    let model: Bert<Flex> = bert::weights::from_pretrained(&fixture(folder), &Default::default()).unwrap();
    let ids = first_rows::<2>(folder, "input_ids", rows);
    let types = first_rows::<2>(folder, "token_type_ids", rows);
    let mask = first_rows::<2>(folder, "attention_mask", rows);

    let (logits, relation) = model.forward(ids.clone(), types.clone(), Some(mask.clone()));
    assert_sample(&logits, &reference);
    let relation: Vec<f32> = relation.slice(s![0..1]).into_data().to_vec().unwrap();
    assert_close(&relation, &reference["nsp_logits_sample"]);

    let labels = first_rows::<2>(folder, "labels", rows);
    let next = first_rows::<1>(folder, "next_sentence_label", rows);
    let batch = BertBatch::new(ids, types, labels, next).with_attention_mask(mask);
    let loss = model.loss(batch).into_scalar();
    assert_close(&[loss], &Value::from(vec![reference["losses"][0].clone()]));
}
