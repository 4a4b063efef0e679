//! cargo test -p zero-models --test models generate
//!
//! Text as transformers make it (tests/fixtures/make_generated.py), and what holds whatever the weights are.

use std::path::{Path, PathBuf};

use burn::module::Param;
use burn::tensor::{FloatDType, Tensor};
use burn_flex::Flex;
use serde_json::Value;
use zero_models::generate::{CausalLm, Hooks, Sampling, generate, generate_with};
use zero_models::{Gpt2, gpt2};

type B = Flex;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gpt2_tiny")
}

fn generated() -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture().join("generated.json")).unwrap()).unwrap()
}

/// The fixture's, with weights scaled as its script does.
fn model() -> Gpt2<B> {
    let scale = generated()["scale"].as_f64().unwrap();
    let larger = |param: Param<Tensor<B, 2>>| param.map(|weight| weight * scale);
    let mut model = gpt2::weights::from_pretrained::<B>(&fixture(), &Default::default()).unwrap();
    model.wpe = larger(model.wpe);
    for block in &mut model.h {
        block.attn.c_proj.weight = larger(block.attn.c_proj.weight.clone());
        block.mlp.c_proj.weight = larger(block.mlp.c_proj.weight.clone());
    }
    model
}

fn tokens(value: &Value) -> Vec<Vec<u32>> {
    serde_json::from_value(value.clone()).unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    tokens(&generated()["prompts"])
}

fn made(how: &Sampling) -> Vec<Vec<u32>> {
    generate(&model(), &prompts(), how, &Default::default()).unwrap()
}

#[test]
fn tokens_are_those_of_transformers() {
    let file = generated();
    for case in file["cases"].as_array().unwrap() {
        let options = &case["options"];
        let number = |key: &str, default: f64| options[key].as_f64().unwrap_or(default);
        let how = Sampling {
            max_new_tokens: file["max_new_tokens"].as_u64().unwrap() as usize,
            stop: vec![case["eos"].as_u64().unwrap() as u32],
            repetition_penalty: number("repetition_penalty", 1.0),
            beams: number("num_beams", 1.0) as usize,
            length_penalty: number("length_penalty", 1.0),
            ..Sampling::default()
        };
        let expected = tokens(&case["made"]);
        assert_eq!(made(&how), expected, "all prompts at once, {options}");
        for (prompt, expected) in prompts().into_iter().zip(expected) {
            let alone = generate(&model(), std::slice::from_ref(&prompt), &how, &Default::default()).unwrap();
            assert_eq!(alone, [expected], "{prompt:?} alone, {options}");
        }
    }
}

#[test]
fn a_cache_in_16_bit_is_that_in_32_rounded() {
    let (model, device) = (model(), Default::default());
    let tokens = [5, 17, 3, 60, 2, 9, 33, 1];
    // The logits after each token of a text that is read one by one.
    let read = |dtype| -> Vec<f32> {
        let mut cache = zero_models::generate::KvCache::new(vec![0], tokens.len(), dtype);
        let logits = tokens.map(|token| model.next_logits(Tensor::from_ints([[token]], &device), &mut cache));
        logits.into_iter().flat_map(|logits| logits.into_data().to_vec::<f32>().unwrap()).collect()
    };
    let whole = read(None);
    let largest = whole.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    assert_eq!(read(Some(FloatDType::F32)), whole);
    for (dtype, most) in [(FloatDType::F16, 2e-3), (FloatDType::BF16, 2e-2)] {
        let off = read(Some(dtype)).iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / largest;
        assert!(off > 0.0 && off < most, "{dtype:?}: {off}");
    }
}

#[test]
fn draws_follow_the_distribution() {
    let model = model();
    let device = Default::default();
    // Of the same prompt many times, each with draws of its own.
    let prompts = vec![vec![5, 17]; 4000];
    let logits = {
        let mut cache = zero_models::generate::KvCache::new(vec![0], 2, None);
        let ids = Tensor::from_ints([[5, 17]], &device);
        model.next_logits(ids, &mut cache).into_data().to_vec::<f32>().unwrap()
    };
    let share = |how: &Sampling| {
        let drawn = generate(&model, &prompts, how, &device).unwrap();
        let mut counts = vec![0.0; logits.len()];
        drawn.iter().for_each(|tokens| counts[tokens[0] as usize] += 1.0 / prompts.len() as f64);
        counts
    };
    let base = Sampling { max_new_tokens: 1, temperature: 2.0, ..Sampling::default() };
    let weights: Vec<f64> = logits.iter().map(|&logit| (f64::from(logit) / 2.0).exp()).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let fewest = |p: f64| {
        let (total, mut sum) = (weights.iter().sum::<f64>(), 0.0);
        let enough = order.iter().position(|&token| {
            sum += weights[token];
            sum >= p * total
        });
        enough.unwrap() + 1
    };
    for (how, kept) in [
        (base.clone(), weights.len()),
        (Sampling { top_k: Some(3), ..base.clone() }, 3),
        (Sampling { top_p: Some(0.5), ..base.clone() }, fewest(0.5)),
    ] {
        let total: f64 = order[..kept].iter().map(|&token| weights[token]).sum();
        let got = share(&how);
        for (rank, &token) in order.iter().enumerate() {
            let expected = if rank < kept { weights[token] / total } else { 0.0 };
            // Five standard deviations.
            let bound = 5.0 * (expected * (1.0 - expected) / prompts.len() as f64).sqrt();
            assert!((got[token] - expected).abs() <= bound, "{how:?}: token {token}: {} for {expected}", got[token]);
        }
        assert_eq!(share(&how), got, "the same seed, the same text");
        assert_ne!(share(&Sampling { seed: 1, ..how }), got, "another seed, another text");
    }
}

#[test]
fn hooks_are_told_and_asked() {
    let how = Sampling { max_new_tokens: 6, stop: vec![37], ..Sampling::default() };
    let (mut told, mut asked) = (vec![Vec::new(); 3], Vec::new());
    let hooks = Hooks {
        token: &mut |row, token| told[row].push(token),
        goes_on: &mut |needs| {
            asked.push(needs);
            // Another rank needs more.
            asked.len() < 9
        },
        number: &|row| row,
    };
    let texts = generate_with(&model(), &prompts(), &Sampling { max_new_tokens: 9, ..how }, &Default::default(), hooks);
    assert_eq!(texts.unwrap(), told);
    assert_eq!(asked.len(), 9);
    assert!(asked[0] && !asked[8]);
}

#[test]
fn what_cannot_be_gone_on_with_is_told() {
    let model = model();
    let told = |prompts: &[Vec<u32>], how: &Sampling| {
        generate(&model, prompts, how, &Default::default()).unwrap_err().to_string()
    };
    let base = Sampling { max_new_tokens: 20, ..Sampling::default() };
    for (prompts, expected) in [
        (vec![vec![1], vec![]], "prompt 1 is empty"),
        (vec![vec![1, 257]], "prompt 0 has the token 257, and the model knows 257"),
        (vec![vec![1; 13]], "has 13 tokens, with 20 new ones more than the model's 32 positions"),
    ] {
        let text = told(&prompts, &base);
        assert!(text.contains(expected), "{text}");
    }
    for (how, field) in [
        (Sampling { max_new_tokens: 0, ..base.clone() }, "max_new_tokens = 0"),
        (Sampling { temperature: -1.0, ..base.clone() }, "temperature = -1"),
        (Sampling { top_k: Some(0), ..base.clone() }, "top_k = 0"),
        (Sampling { top_p: Some(1.5), ..base.clone() }, "top_p = 1.5"),
        (Sampling { repetition_penalty: 0.0, ..base.clone() }, "repetition_penalty = 0"),
        (Sampling { beams: 0, ..base.clone() }, "beams = 0"),
        (Sampling { beams: 2, temperature: 1.0, ..base.clone() }, "beams = 2"),
    ] {
        let text = told(&[vec![1]], &how);
        assert!(text.contains(field), "{text}");
    }
    assert_eq!(generate(&model, &[], &base, &Default::default()).unwrap(), [[0u32; 0]; 0]);
}
