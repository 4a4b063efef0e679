//! cargo test -p zero-models --test models gpt2
//!
//! Properties of a GPT-2 that hold for any weights.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData, s};
use burn_flex::Flex;
use zero_models::loss::IGNORED_LABEL;
use zero_models::{Activation, Gpt2, Gpt2Config, gpt2};

fn config() -> Gpt2Config {
    Gpt2Config {
        vocab_size: 97,
        n_positions: 16,
        n_embd: 32,
        n_layer: 3,
        n_head: 4,
        initializer_range: 0.2,
        ..Gpt2Config::preset("tiny").unwrap()
    }
}

fn model(config: &Gpt2Config) -> Gpt2<Flex> {
    config.init(&Default::default())
}

fn ids(rows: usize, t: usize) -> Tensor<Flex, 2, Int> {
    let ids: Vec<i32> = (0..rows * t).map(|i| (i * i * 7 + i) as i32 % 97).collect();
    Tensor::from_data(TensorData::new(ids, [rows, t]), &Default::default())
}

fn values<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// Computes the cross-entropy of each row of logits that has a label, in 64 bits.
fn by_hand(logits: &[f32], vocab: usize, labels: &[i32]) -> f64 {
    let losses: Vec<f64> = logits
        .chunks(vocab)
        .zip(labels)
        .filter(|&(_, &label)| label != IGNORED_LABEL)
        .map(|(row, &label)| {
            let largest = row.iter().copied().fold(f32::MIN, f32::max) as f64;
            let sum: f64 = row.iter().map(|&x| (x as f64 - largest).exp()).sum();
            sum.ln() + largest - row[label as usize] as f64
        })
        .collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn counts_and_names_are_those_of_the_config() {
    for tied in [true, false] {
        let config = Gpt2Config { tie_word_embeddings: tied, n_inner: Some(48), ..config() };
        let model = model(&config);
        assert_eq!(model.num_params(), config.num_params());
        let described: Vec<_> =
            gpt2::weights::hf_params(&model).into_iter().map(|param| (param.name, param.shape)).collect();
        assert_eq!(described, config.parameter_shapes());
        let names: Vec<_> = gpt2::weights::hf_names(&model).into_iter().map(|(_, name)| name).collect();
        assert_eq!(names.last().unwrap() == "lm_head.weight", !tied);
    }
}

#[test]
fn the_tiny_preset_is_as_large_as_it_says() {
    let config = Gpt2Config::preset("tiny").unwrap();
    assert_eq!(model(&config).num_params(), config.num_params());
}

#[test]
fn fresh_parameters_are_drawn_as_hugging_face_does() {
    let config = Gpt2Config { n_embd: 128, initializer_range: 0.02, ..config() };
    let model = model(&config);
    let deviation = |tensor: Tensor<Flex, 2>| tensor.var(0).mean().into_scalar().sqrt() as f64;
    let block = &model.h[1];
    for (tensor, expected) in [
        (&model.wte, 0.02),
        (&model.wpe, 0.02),
        (&block.attn.c_attn.weight, 0.02),
        (&block.mlp.c_fc.weight, 0.02),
        (&block.attn.c_proj.weight, 0.02 / 6f64.sqrt()),
        (&block.mlp.c_proj.weight, 0.02 / 6f64.sqrt()),
    ] {
        let got = deviation(tensor.val());
        assert!((got / expected - 1.0).abs() < 0.1, "{got} {expected}");
    }
    let bias = block.mlp.c_fc.bias.as_ref().unwrap().val();
    assert!(values(bias).iter().all(|&x| x == 0.0));
    assert!(values(block.ln_1.gamma.val()).iter().all(|&x| x == 1.0));
}

#[test]
fn a_token_does_not_change_what_is_predicted_before_it() {
    let model = model(&config());
    let before = model.forward(ids(2, 12));
    let changed = ids(2, 12).slice_assign(s![0..1, 7..8], Tensor::from_data([[96]], &Default::default()));
    let after = model.forward(changed);
    let part = |logits: &Tensor<Flex, 3>, row: usize, from: usize, to: usize| {
        values(logits.clone().slice(s![row..row + 1, from..to, ..]))
    };
    assert_eq!(part(&before, 0, 0, 7), part(&after, 0, 0, 7));
    assert_eq!(part(&before, 1, 0, 12), part(&after, 1, 0, 12));
    for t in 7..12 {
        assert_ne!(part(&before, 0, t, t + 1), part(&after, 0, t, t + 1));
    }
}

#[test]
fn a_shorter_row_has_the_same_logits() {
    let model = model(&config());
    let long = values(model.forward(ids(1, 16)).slice(s![.., 0..5, ..]));
    let short = values(model.forward(ids(1, 16).slice(s![.., 0..5])));
    for (long, short) in long.iter().zip(short) {
        assert!((long - short).abs() < 1e-4 * long.abs().max(1.0));
    }
}

#[test]
fn the_loss_is_the_cross_entropy_of_the_logits() {
    for activation in [Activation::GeluTanh, Activation::GeluErf, Activation::Relu] {
        for tied in [true, false] {
            let config = Gpt2Config { activation, tie_word_embeddings: tied, ..config() };
            let model = model(&config);
            let (rows, t) = (3, 9);
            let logits = model.forward(ids(rows, t)).slice(s![.., 0..t - 1, ..]);
            let labels: Vec<i32> = ids(rows, t).slice(s![.., 1..t]).into_data().convert::<i32>().to_vec().unwrap();
            let expected = by_hand(&values(logits), 97, &labels);
            let got = model.loss(ids(rows, t)).into_scalar() as f64;
            assert!((got - expected).abs() < 1e-5 * expected, "{got} {expected}");
        }
    }
}

#[test]
fn labels_are_shifted_and_ignored_ones_do_not_count() {
    let model = model(&config());
    let (rows, t) = (2, 6);
    let same = model.loss_with_labels(ids(rows, t), ids(rows, t));
    let loss = model.loss(ids(rows, t)).into_scalar();
    assert!((same.into_scalar() - loss).abs() < 1e-6 * loss);

    let labels: Vec<i32> = vec![3, -100, 5, -100, 9, 1, 0, -100, -100, -100, -100, 2];
    let shifted = [-100, 5, -100, 9, 1, -100, -100, -100, -100, 2];
    let logits = values(model.forward(ids(rows, t)).slice(s![.., 0..t - 1, ..]));
    let expected = by_hand(&logits, 97, &shifted);
    let labels = Tensor::from_data(TensorData::new(labels, [rows, t]), &Default::default());
    let got = model.loss_with_labels(ids(rows, t), labels).into_scalar() as f64;
    assert!((got - expected).abs() < 1e-5 * expected, "{got} {expected}");
}

#[test]
fn unscaled_attention_is_another_model() {
    let scaled = model(&config());
    let unscaled_config = Gpt2Config { scale_attn_weights: false, ..config() };
    let unscaled = model(&unscaled_config).load_record(scaled.clone().into_record());
    let difference = (scaled.forward(ids(1, 8)) - unscaled.forward(ids(1, 8))).abs().max();
    assert!(difference.into_scalar() > 1e-3);
}

#[test]
#[should_panic(expected = "rows of 17 tokens, but the model has 16 positions")]
fn a_row_longer_than_the_positions_is_refused() {
    model(&config()).forward(ids(1, 17));
}

#[test]
#[should_panic(expected = "GPT-2 cannot have n_head = 3")]
fn a_wrong_config_is_refused() {
    model(&Gpt2Config { n_head: 3, ..config() });
}
