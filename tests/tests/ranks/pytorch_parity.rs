//! Parity with PyTorch: the fixtures' 20 AdamW losses and gradient norms, at every stage with two ranks.
//!
//! `cargo test -p zero-tests --test ranks pytorch_parity -- --nocapture` prints the largest differences. The fixtures are made
//! by `tests/fixtures/make_reference.py`.

use crate::common;

use std::fs;

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::tensor::{Int, Tensor, TensorData};
use common::{B, Device, adamw, fixture, on_ranks, step};
use safetensors::SafeTensors;
use serde_json::Value;
use zero_burn::config::ZeroConfig;
use zero_burn::module::prepare;
use zero_burn::optim::{Fused, Rule};
use zero_core::Stage;
use zero_models::lora::Adaptable;
use zero_models::safetensors_file::Checkpoint;
use zero_models::{
    BartConfig, Bert, BertBatch, CausalFamily, Gpt2, Gpt2Config, LlamaConfig, ModelConfig, ProblemType, Seq2SeqFamily,
    T5Config, bart, bert, gpt2, lora,
};

const RANKS: usize = 2;
/// Largest relative differences of losses and of norms.
const TOLERANCES: [f64; 2] = [1e-5, 1e-4];

struct Reference {
    losses: Vec<f64>,
    norms: Vec<f64>,
    batch: usize,
}

fn reference(name: &str) -> Reference {
    reference_of(name, "reference.json", "")
}

/// `prefix` is `full_` for full training, as opposed to an adapter.
fn reference_of(name: &str, file: &str, prefix: &str) -> Reference {
    let json: Value = serde_json::from_slice(&fs::read(fixture(name).join(file)).unwrap()).unwrap();
    let list =
        |key: &str| json[format!("{prefix}{key}")].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    Reference {
        losses: list("losses"),
        norms: list("grad_norms"),
        batch: json["global_batch"].as_u64().unwrap() as usize / RANKS,
    }
}

/// An integer tensor of the fixture's batches.
struct Rows {
    values: Vec<i64>,
    width: usize,
}

fn rows(name: &str, tensor: &str) -> Rows {
    let bytes = fs::read(fixture(name).join("batches.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(tensor).unwrap();
    let values = view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
    Rows { values, width: view.shape().get(1).copied().unwrap_or(1) }
}

impl Rows {
    fn take(&self, step: usize, rank: usize, batch: usize) -> Vec<i32> {
        let count = self.values.len() / self.width;
        let first = (step * RANKS + rank) * batch;
        (first..first + batch)
            .flat_map(|row| &self.values[row % count * self.width..][..self.width])
            .map(|&id| id as i32)
            .collect()
    }

    fn matrix(&self, step: usize, rank: usize, batch: usize, device: &Device) -> Tensor<B, 2, Int> {
        Tensor::from_data(TensorData::new(self.take(step, rank, batch), [batch, self.width]), device)
    }

    fn vector(&self, step: usize, rank: usize, batch: usize, device: &Device) -> Tensor<B, 1, Int> {
        Tensor::from_data(TensorData::new(self.take(step, rank, batch), [batch]), device)
    }
}

fn compare(name: &str, stage: Stage, reference: &Reference, got: &[(f64, f64)]) {
    let worst = |expected: &[f64], got: &mut dyn Iterator<Item = f64>| {
        expected.iter().zip(got).map(|(e, g)| (e - g).abs() / e).fold(0.0, f64::max)
    };
    let loss = worst(&reference.losses, &mut got.iter().map(|x| x.0));
    let norm = worst(&reference.norms, &mut got.iter().map(|x| x.1));
    println!("{name}, stage {stage}, {RANKS} ranks: largest relative difference loss {loss:.1e}, norm {norm:.1e}");
    assert_eq!(got.len(), reference.losses.len());
    let [of_loss, of_norm] = TOLERANCES;
    assert!(loss < of_loss && norm < of_norm, "{name}, stage {stage}: loss {loss:e}, norm {norm:e}");
}

/// Small enough that every parameter is sharded, gathered and prefetched.
fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig { param_persistence_threshold: 0, reduce_bucket_size: 5_000, ..ZeroConfig::new(stage) }
}

/// Global losses and gradient norms of a model from `load`. `loss` takes a rank's rows of a step.
fn run<M: AutodiffModule<B>>(
    stage: Stage,
    (ranks, steps): (usize, usize),
    load: &(impl Fn(&Device) -> M + Sync),
    loss: &(impl Fn(&M, usize, &Device) -> Tensor<B, 1> + Sync),
) -> Vec<(f64, f64)> {
    let mut ranks = on_ranks(ranks, &config(stage), |device| {
        let mut model = prepare::<B, _>(load(&device), &device);
        let mut optimizer = adamw::<M>();
        let mut got = Vec::new();
        for s in 0..steps {
            let (next, loss, norm) = step(model, &mut optimizer, |model| loss(model, s, &device));
            got.push((loss, norm));
            model = next;
        }
        got
    });
    ranks.swap_remove(0)
}

/// Checks the reference's figures at every stage, and equal bits; also on one rank and on three.
fn steps<M: AutodiffModule<B>>(
    name: &str,
    what: &str,
    load: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, usize, &Device) -> Tensor<B, 1> + Sync,
) {
    steps_of(&reference(name), what, load, loss);
}

fn steps_of<M: AutodiffModule<B>>(
    reference: &Reference,
    what: &str,
    load: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, usize, &Device) -> Tensor<B, 1> + Sync,
) {
    for (ranks, steps) in [(RANKS, reference.losses.len()), (1, 3), (3, 3)] {
        let mut first = None;
        for stage in Stage::ALL {
            let got = run(stage, (ranks, steps), &load, &loss);
            if ranks == RANKS {
                compare(what, stage, reference, &got);
            }
            assert_eq!(got, *first.get_or_insert(got.clone()), "{what}, {ranks} ranks: the bits of stage {stage}");
        }
    }
}

/// A next-token model with these weights on the fixture's rows, and with the fixture's adapter, if it has one.
fn next_token_steps<C: CausalFamily>(name: &str, weights: &str)
where
    C::Model<B>: AutodiffModule<B>,
{
    let (batch, ids) = (reference(name).batch, rows(name, "input_ids"));
    let described = ModelConfig::from_file(&fixture(weights).join("config.json")).unwrap();
    let load = |device: &Device| {
        let config = C::of(described.clone()).expect("the fixture is of this family");
        C::load(config.init::<B>(device), &Checkpoint::open(&fixture(weights)).unwrap(), device).unwrap()
    };
    let loss = |model: &C::Model<B>, s, device: &Device| {
        let ids_bt = ids.matrix(s, device.rank(), batch, device);
        C::loss(model, ids_bt.clone(), ids_bt, None)
    };
    steps(name, weights, load, loss);
    let adapter = format!("{name}/lora");
    if weights == name && fixture(&adapter).is_dir() {
        let adapted = |device: &Device| lora::load(load(device), &described, &fixture(&adapter), device).unwrap();
        steps(&adapter, &adapter, adapted, loss);
    }
}

#[test]
fn gpt2_trains_as_in_pytorch() {
    next_token_steps::<Gpt2Config>("gpt2_tiny", "gpt2_tiny");
    next_token_steps::<Gpt2Config>("gpt2_tiny", "gpt2_tiny_sharded");
}

#[test]
fn llama_mistral_and_qwen_train_as_in_pytorch() {
    for name in [
        "llama_tiny",
        "mistral_tiny",
        "qwen2_tiny",
        "qwen3_tiny",
        "gemma_tiny",
        "gemma2_tiny",
        "gemma3_tiny",
        "phi3_tiny",
    ] {
        next_token_steps::<LlamaConfig>(name, name);
    }
}

/// `tests/fixtures/make_lora.py`
#[test]
fn an_adapter_of_a_gpt2_trains_as_in_peft() {
    let (name, adapter) = ("gpt2_tiny", "gpt2_tiny/lora");
    let (reference, ids) = (reference(adapter), rows(name, "input_ids"));
    let description = ModelConfig::from_file(&fixture(name).join("config.json")).unwrap();
    for stage in Stage::ALL {
        let got = on_ranks(RANKS, &config(stage), |device| {
            let model = gpt2::weights::from_pretrained::<B>(&fixture(name), &device).unwrap();
            let model = lora::load(model, &description, &fixture(adapter), &device).unwrap();
            let mut model = prepare::<B, _>(model, &device);
            let frozen = model.wte.val().into_data();
            let mut optimizer = adamw::<Gpt2<B>>();
            let mut got = Vec::new();
            for s in 0..reference.losses.len() {
                let batch = ids.matrix(s, device.rank(), reference.batch, &device);
                let (next, loss, norm) = step(model, &mut optimizer, |model| model.loss(batch.clone()));
                got.push((loss, norm));
                model = next;
            }
            assert_eq!(model.wte.val().into_data(), frozen);
            got
        });
        compare(adapter, stage, &reference, &got[0]);
    }
}

/// `tests/fixtures/make_lora.py` and `make_encoders.py`: full training, and an adapter with the head.
#[test]
fn classifiers_train_as_in_pytorch_and_peft() {
    let read = |tensor| rows("bert_tiny", tensor);
    classifier_steps("bert_tiny_classes", read("input_ids"), read("token_type_ids"), read("attention_mask"));
    for name in ["roberta_tiny_classes", "distilbert_tiny_classes"] {
        let (ids, mask) = (rows(name, "input_ids"), rows(name, "attention_mask"));
        // They know no segments.
        let types = Rows { values: vec![0; ids.values.len()], width: ids.width };
        classifier_steps(name, ids, types, mask);
    }
}

fn classifier_steps(name: &str, ids: Rows, types: Rows, mask: Rows) {
    // Which third of the vocabulary a row's second token is in.
    let classes: Vec<Vec<f64>> = ids.values.chunks(ids.width).map(|row| vec![(row[1] * 3 / 199) as f64]).collect();
    let load = |device: &Device| bert::weights::from_pretrained::<B>(&fixture(name), device).unwrap();
    whole_and_adapted_steps(name, load, |model, s, device| {
        let of = |rows: &Rows| rows.matrix(s, device.rank(), BATCH / RANKS, device);
        let logits = model.classify(of(&ids), of(&types), Some(of(&mask)));
        ProblemType::SingleLabelClassification.loss(logits, &targets(&classes, s, device.rank()))
    });
}

/// Steps of a classifier from `load`, in full and with the fixture's adapter.
fn whole_and_adapted_steps<M: AutodiffModule<B> + Adaptable<B>>(
    name: &str,
    load: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, usize, &Device) -> Tensor<B, 1> + Sync,
) {
    let adapter = &format!("{name}/lora");
    steps_of(&reference_of(adapter, "reference.json", "full_"), &format!("{name}, whole"), &load, &loss);
    let description = ModelConfig::from_file(&fixture(name).join("config.json")).unwrap();
    let adapted = |device: &Device| lora::load(load(device), &description, &fixture(adapter), device).unwrap();
    steps_of(&reference(adapter), &format!("{name}, adapter"), adapted, &loss);
}

/// Rows of a step on all ranks.
const BATCH: usize = 4;

/// The labels of a rank's rows of a step.
fn targets(labels: &[Vec<f64>], step: usize, rank: usize) -> Vec<f64> {
    let first = step * BATCH + rank * (BATCH / RANKS);
    (first..first + BATCH / RANKS).flat_map(|row| labels[row % labels.len()].clone()).collect()
}

/// `tests/fixtures/make_encoders.py`: regressions with several numbers and with one, and several labels per row.
#[test]
fn heads_for_numbers_and_several_labels_train_as_in_pytorch() {
    let read = |tensor| rows("bert_tiny", tensor);
    let (ids, types, mask) = (read("input_ids"), read("token_type_ids"), read("attention_mask"));
    for (name, kind, given) in [
        ("bert_tiny_classes", "regression", Some(ProblemType::Regression)),
        ("bert_tiny_classes", "multi_label", Some(ProblemType::MultiLabelClassification)),
        // The file has no problem_type, and one label.
        ("bert_tiny_score", "regression", None),
    ] {
        let file = format!("{kind}.json");
        let json: Value = serde_json::from_slice(&fs::read(fixture(name).join(&file)).unwrap()).unwrap();
        let row = |row: &Value| {
            row.as_array().map_or_else(|| vec![row.as_f64()], |row| row.iter().map(Value::as_f64).collect())
        };
        let rows = json["labels"].as_array().unwrap().iter().map(row);
        let labels: Vec<Vec<f64>> = rows.map(|row| row.into_iter().map(Option::unwrap).collect()).collect();
        let problem = ProblemType::of_head(given, labels[0].len()).unwrap();
        let load = |device: &Device| bert::weights::from_pretrained::<B>(&fixture(name), device).unwrap();
        steps_of(&reference_of(name, &file, ""), &format!("{name}, {kind}"), load, |model, s, device| {
            let of = |rows: &Rows| rows.matrix(s, device.rank(), BATCH / RANKS, device);
            let logits = model.classify(of(&ids), of(&types), Some(of(&mask)));
            problem.loss(logits, &targets(&labels, s, device.rank()))
        });
    }
}

/// `tests/fixtures/make_encoders.py`
#[test]
fn classifiers_of_bart_train_as_in_pytorch_and_peft() {
    let name = "bart_tiny_classes";
    let (ids, mask, classes) = (rows(name, "input_ids"), rows(name, "attention_mask"), rows(name, "labels"));
    let classes: Vec<Vec<f64>> = classes.values.iter().map(|&class| vec![class as f64]).collect();
    let load = |device: &Device| bart::weights::from_pretrained::<B>(&fixture(name), device).unwrap();
    whole_and_adapted_steps(name, load, |model, s, device| {
        let of = |rows: &Rows| rows.matrix(s, device.rank(), BATCH / RANKS, device);
        let logits = model.classify(of(&ids), Some(of(&mask)));
        ProblemType::SingleLabelClassification.loss(logits, &targets(&classes, s, device.rank()))
    });
}

/// A sequence-to-sequence model with the fixture's weights, and with its adapter, if it has one.
fn seq2seq_steps<C: Seq2SeqFamily>(name: &str)
where
    C::Model<B>: AutodiffModule<B>,
{
    let (batch, read) = (reference(name).batch, |tensor| rows(name, tensor));
    let (ids, mask, labels) = (read("input_ids"), read("attention_mask"), read("labels"));
    let described = ModelConfig::from_file(&fixture(name).join("config.json")).unwrap();
    let load = |device: &Device| {
        let config = C::of(described.clone()).expect("the fixture is of this family");
        C::load(config.init::<B>(device), &Checkpoint::open(&fixture(name)).unwrap(), device).unwrap()
    };
    let loss = |model: &C::Model<B>, s, device: &Device| {
        let of = |rows: &Rows| rows.matrix(s, device.rank(), batch, device);
        C::loss(model, of(&ids), Some(of(&mask)), of(&labels))
    };
    steps(name, name, load, loss);
    let adapter = format!("{name}/lora");
    if fixture(&adapter).is_dir() {
        let adapted = |device: &Device| lora::load(load(device), &described, &fixture(&adapter), device).unwrap();
        steps(&adapter, &adapter, adapted, loss);
    }
}

#[test]
fn bart_trains_as_in_pytorch() {
    seq2seq_steps::<BartConfig>("bart_tiny");
}

#[test]
fn t5_trains_as_in_pytorch() {
    seq2seq_steps::<T5Config>("t5_tiny");
    seq2seq_steps::<T5Config>("flan_t5_tiny");
}

/// Returns global losses and gradient norms of BERT's 20 steps at every stage, with optimizers from `make`.
fn bert_steps<O: Optimizer<Bert<B>, B>>(reference: &Reference, what: &str, make: impl Fn() -> O + Sync) {
    let name = "bert_tiny";
    let read = |tensor| rows(name, tensor);
    let (ids, types, mask, labels, next) = (
        read("input_ids"),
        read("token_type_ids"),
        read("attention_mask"),
        read("labels"),
        read("next_sentence_label"),
    );
    for stage in Stage::ALL {
        let got = on_ranks(RANKS, &config(stage), |device| {
            let model = bert::weights::from_pretrained::<B>(&fixture(name), &device).unwrap();
            let mut model = prepare::<B, _>(model, &device);
            let mut optimizer = make();
            let mut got = Vec::new();
            for s in 0..reference.losses.len() {
                let of = |rows: &Rows| rows.matrix(s, device.rank(), reference.batch, &device);
                let (updated, loss, norm) = step(model, &mut optimizer, |model| {
                    let next = next.vector(s, device.rank(), reference.batch, &device);
                    let batch = BertBatch::new(of(&ids), of(&types), of(&labels), next);
                    model.loss(batch.with_attention_mask(of(&mask)))
                });
                got.push((loss, norm));
                model = updated;
            }
            got
        });
        compare(what, stage, reference, &got[0]);
    }
}

#[test]
fn bert_trains_as_in_pytorch() {
    bert_steps(&reference("bert_tiny"), "bert_tiny", adamw::<Bert<B>>);
}

/// `tests/fixtures/make_bert_reference.py`
#[test]
fn bert_trains_as_in_pytorch_with_lamb_and_without_bias_correction() {
    let file = fixture("bert_tiny").join("optimizers.json");
    let file: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let (beta_1, beta_2, epsilon, weight_decay) = (0.8, 0.95, 1e-6, 0.1);
    assert_eq!(file["betas"], serde_json::json!([0.8, 0.95]));
    let lamb = |bias_correction| {
        let (max_coeff, min_coeff) = (10.0, 0.01);
        Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, max_coeff, min_coeff }
    };
    for (name, rule, lr) in [
        ("lamb", lamb(true), "lamb_lr"),
        ("lamb_uncorrected", lamb(false), "lamb_lr"),
        ("adamw_uncorrected", Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction: false }, "adam_lr"),
        ("adam_uncorrected", Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction: false }, "adam_lr"),
    ] {
        let list = |key: &str| file[name][key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let batch = reference("bert_tiny").batch;
        let expected = Reference { losses: list("losses"), norms: list("grad_norms"), batch };
        // `step` takes steps of 1e-3.
        let scale = file[lr].as_f64().unwrap() / 1e-3;
        bert_steps(&expected, name, || Fused::<B>::new(rule).with_group(rule, scale, |_| true));
    }
}
