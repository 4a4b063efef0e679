//! cargo test -p zero-models --test models bert
//!
//! Properties of a BERT that hold for any weights.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData, s};
use burn_flex::Flex;
use zero_models::{Bert, BertBatch, BertConfig, bert};

fn config() -> BertConfig {
    BertConfig {
        vocab_size: 61,
        hidden_size: 32,
        num_attention_heads: 4,
        intermediate_size: 48,
        max_position_embeddings: 16,
        initializer_range: 0.2,
        ..BertConfig::preset("bert-tiny").unwrap()
    }
}

fn model(config: &BertConfig) -> Bert<Flex> {
    config.init(&Default::default())
}

fn ints<const D: usize>(values: &[i32], shape: [usize; D]) -> Tensor<Flex, D, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
}

fn ids(rows: usize, t: usize) -> Tensor<Flex, 2, Int> {
    let ids: Vec<i32> = (0..rows * t).map(|i| (i * i * 5 + i) as i32 % 61).collect();
    ints(&ids, [rows, t])
}

fn types(rows: usize, t: usize) -> Tensor<Flex, 2, Int> {
    let types: Vec<i32> = (0..rows * t).map(|i| i32::from(i % t > t / 2)).collect();
    ints(&types, [rows, t])
}

fn values<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

fn cross_entropy(row: &[f32], label: usize) -> f64 {
    row.iter().map(|&x| (x as f64).exp()).sum::<f64>().ln() - row[label] as f64
}

#[test]
fn counts_and_names_are_those_of_the_config() {
    for tied in [true, false] {
        let config = BertConfig { tie_word_embeddings: tied, ..config() };
        let model = model(&config);
        assert_eq!(model.num_params(), config.num_params());
        let described: Vec<_> =
            bert::weights::hf_params(&model).into_iter().map(|param| (param.name, param.shape)).collect();
        assert_eq!(described, config.parameter_shapes());
        assert_eq!(bert::weights::hf_names(&model).len(), described.len());
    }
}

#[test]
fn the_loss_is_the_sum_of_two_means() {
    let model = model(&config());
    let (rows, t) = (2, 5);
    let labels = [-100, 7, -100, -100, 60, -100, -100, -100, 0, -100];
    let (logits, relation) = model.forward(ids(rows, t), types(rows, t), None);
    let (logits, relation) = (values(logits), values(relation));
    let picked: Vec<f64> = labels
        .iter()
        .enumerate()
        .filter(|&(_, &label)| label != -100)
        .map(|(i, &label)| cross_entropy(&logits[i * 61..(i + 1) * 61], label as usize))
        .collect();
    let related = cross_entropy(&relation[0..2], 1) + cross_entropy(&relation[2..4], 0);
    let expected = picked.iter().sum::<f64>() / 3.0 + related / 2.0;

    let batch = BertBatch::new(ids(rows, t), types(rows, t), ints(&labels, [rows, t]), ints(&[1, 0], [2]));
    let everywhere = model.loss(batch.clone()).into_scalar() as f64;
    assert!((everywhere - expected).abs() < 1e-5 * expected);

    // Position 3 has no label: it fills the list up.
    let chosen = batch.with_predicted_positions(ints(&[1, 4, 8, 3], [4]));
    let chosen = model.loss(chosen).into_scalar() as f64;
    assert!((chosen - expected).abs() < 1e-5 * expected);
}

#[test]
fn padding_is_not_looked_at() {
    let model = model(&config());
    let mask = ints(&[1, 1, 1, 1, 1, 1, 0, 0], [1, 8]);
    let mask = Tensor::cat(vec![mask, ints(&[1; 8], [1, 8])], 0);
    let run = |ids: Tensor<Flex, 2, Int>| {
        let (logits, relation) = model.forward(ids, types(2, 8), Some(mask.clone()));
        (values(logits.clone().slice(s![0..1, 0..6, ..])), values(logits.slice(s![1..2, .., ..])), values(relation))
    };
    let changed = ids(2, 8).slice_assign(s![0..1, 6..8], ints(&[5, 9], [1, 2]));
    assert_eq!(run(ids(2, 8)), run(changed));

    let short = model.forward(ids(2, 8).slice(s![0..1, 0..6]), types(2, 8).slice(s![0..1, 0..6]), None);
    for (padded, short) in run(ids(2, 8)).0.iter().zip(values(short.0)) {
        assert!((padded - short).abs() < 1e-4 * short.abs().max(1.0));
    }
}

#[test]
fn every_position_looks_both_ways_and_at_segments() {
    let model = model(&config());
    let before = values(model.forward_hidden(ids(1, 6), types(1, 6), None));
    let changed = ids(1, 6).slice_assign(s![.., 3..4], ints(&[42], [1, 1]));
    let after = values(model.forward_hidden(changed, types(1, 6), None));
    for (before, after) in before.chunks(32).zip(after.chunks(32)) {
        assert_ne!(before, after);
    }
    let one_segment = values(model.forward_hidden(ids(1, 6), types(1, 6).zeros_like(), None));
    assert_ne!(before, one_segment);
}

#[test]
fn a_row_of_nothing_but_padding_stays_finite() {
    let (logits, _) = model(&config()).forward(ids(1, 4), types(1, 4), Some(ints(&[0; 4], [1, 4])));
    assert!(values(logits).iter().all(|x| x.is_finite()));
}

#[test]
#[should_panic(expected = "rows of 17 tokens, but the model has 16 positions")]
fn a_row_longer_than_the_positions_is_refused() {
    model(&config()).forward(ids(1, 17), types(1, 17), None);
}
