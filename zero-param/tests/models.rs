//! GPT-2 and BERT with the weights and rows of `tests/fixtures`, compared with PyTorch and with `zero-burn` on Burn 0.21.

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_optim::AdamWConfig;
use safetensors::SafeTensors;
use serde_json::Value;
use zero_core::collective::threads::ThreadOptions;
use zero_core::{Buffer, ReduceOp, Stage};
use zero_models::{BertConfig, Gpt2Config};
use zero_param::models::{Bert, BertBatch, CausalModel, Gpt2};
use zero_param::{Error, Zero, ZeroConfig, run_threads, shard};

const RANKS: usize = 2;
/// Rows of a step on one rank.
const BATCH: usize = 2;
const STEPS: usize = 20;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// Integers in rows.
struct Rows {
    values: Vec<i32>,
    width: usize,
}

impl Rows {
    fn read(folder: &Path, name: &str) -> Self {
        let bytes = std::fs::read(folder.join("batches.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let rows = file.tensor(name).unwrap();
        let values = rows.data().as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as i32).collect();
        Self { values, width: rows.shape().get(1).copied().unwrap_or(1) }
    }

    /// Returns the rows of a rank's step, beginning with row `first`.
    fn from(&self, first: usize, device: &Device) -> Tensor<2, Int> {
        let count = self.values.len() / self.width;
        let row = |row: usize| self.values[row % count * self.width..][..self.width].iter().copied();
        let values: Vec<i32> = (first..first + BATCH).flat_map(row).collect();
        Tensor::from_data(TensorData::new(values, [BATCH, self.width]), device)
    }
}

/// Returns losses over all ranks, and norms, of steps of AdamW.
fn train<M: Module>(
    stage: Stage,
    load: &(impl Fn(&Device) -> M + Sync),
    loss: &(impl Fn(&M, usize, &Device) -> Tensor<1> + Sync),
    at_the_end: &(impl Fn(&Zero) + Sync),
) -> Vec<(f64, f64)> {
    // No gathered parameter is kept from one use to the next.
    let config = ZeroConfig {
        param_persistence_threshold: 0,
        max_live_parameters: 0,
        reduce_bucket_size: 5_000,
        ..ZeroConfig::new(stage)
    };
    let options = ThreadOptions { deadline: Duration::from_secs(60) };
    let told = run_threads(RANKS, &options, |ranks| {
        let device = Device::flex().autodiff();
        let (mut model, zero) = shard(load(&device), ranks, &config)?;
        let mut optimizer = zero.optimizer(&AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01))?;
        let mut told = Vec::new();
        for step in 0..STEPS {
            let first = (RANKS * step + ranks.comm().rank()) * BATCH;
            let (loss, grads) = zero.backward(|| loss(&model, first, &device))?;
            let loss = f64::from(loss.into_data().try_into_vec::<f32>().unwrap()[0]);
            let mean = ranks.comm().all_reduce(Buffer::F64(vec![loss]), ReduceOp::Mean)?.into_f64()[0];
            told.push((mean, grads.norm()?));
            model = optimizer.step(1e-3, model, grads)?;
        }
        if stage == Stage::Parameters {
            at_the_end(&zero);
        }
        Ok::<_, Error>(told)
    });
    told.unwrap().swap_remove(0)
}

/// Returns how often a parameter was gathered per step, forward and backward, and reduced.
fn uses(zero: &Zero, path: &str) -> [usize; 3] {
    let uses = zero.uses(path).unwrap();
    [uses.gathered_forward, uses.gathered_backward, uses.reduced].map(|count| {
        assert!(count.is_multiple_of(STEPS), "{path}: {uses:?}");
        count / STEPS
    })
}

/// Checks that every stage has the same bits, and that losses and norms match those of each file.
fn compare(references: &[(&str, PathBuf)], train: impl Fn(Stage) -> Vec<(f64, f64)>) {
    let mut first = None;
    for stage in Stage::ALL {
        let told = train(stage);
        for (name, file) in references {
            let json: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
            let worst = |key: &str, got: fn(&(f64, f64)) -> f64| {
                let expected: Vec<f64> = json[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
                assert_eq!(expected.len(), told.len());
                expected.iter().zip(&told).map(|(e, told)| (e - got(told)).abs() / e).fold(0.0, f64::max)
            };
            let (loss, norm) = (worst("losses", |told| told.0), worst("grad_norms", |told| told.1));
            println!("stage {stage}: largest relative difference to {name}: loss {loss:.1e}, norm {norm:.1e}");
            assert!(loss < 1e-6 && norm < 1e-5, "stage {stage}, {name}: loss {loss:e}, norm {norm:e}");
        }
        assert!(told == *first.get_or_insert(told.clone()), "the bits of stage {stage}");
    }
}

#[test]
fn gpt2_trains_as_in_pytorch_and_on_burn_0_21() {
    let folder = fixture("gpt2_tiny");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gpt2_tiny_on_0_21.json");
    let references = [("PyTorch", folder.join("reference.json")), ("the front for Burn 0.21", own)];
    let ids = Rows::read(&folder, "input_ids");
    let config = Gpt2Config::from_file(&folder.join("config.json")).unwrap();
    let load = |device: &Device| Gpt2::build(&config, Some(&folder), 0, device).unwrap();
    let loss = |model: &Gpt2, first, device: &Device| {
        let ids = ids.from(first, device);
        model.loss(ids.clone(), ids, None)
    };
    let at_the_end = |zero: &Zero| {
        // The rows of the table and the head's gradients are computed in the forward pass, a layer's product in both.
        assert_eq!(uses(zero, "wte"), [2, 0, 1]);
        assert_eq!(uses(zero, "h.0.mlp.c_fc.weight"), [1, 1, 1]);
    };
    compare(&references, |stage| train(stage, &load, &loss, &at_the_end));
}

#[test]
fn bert_trains_as_in_pytorch() {
    let folder = fixture("bert_tiny");
    let [ids, types, mask, labels, follows] =
        ["input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label"]
            .map(|name| Rows::read(&folder, name));
    let config = BertConfig::from_file(&folder.join("config.json")).unwrap();
    let load = |device: &Device| Bert::build(&config, Some(&folder), 0, device).unwrap();
    let batch = |first, device: &Device| {
        let of = |rows: &Rows| rows.from(first, device);
        let (ids_bt, types_bt, mask_bt) = (of(&ids), of(&types), of(&mask));
        let [labels_m, follows_b] = [&labels, &follows].map(|rows| of(rows).reshape([-1]));
        let predicted_m = Tensor::arange(0..labels_m.dims()[0] as i64, device);
        BertBatch { ids_bt, types_bt, mask_bt, predicted_m, labels_m, follows_b }
    };
    let loss = |model: &Bert, first, device: &Device| model.losses(batch(first, device)).sum();
    let device = Device::flex();
    let [predicted, related, tokens, pairs] = load(&device).measure(batch(0, &device));
    assert_eq!(predicted as f32 + related as f32, loss(&load(&device), 0, &device).into_scalar::<f32>());
    let labelled = batch(0, &device).labels_m.greater_equal_elem(0).int().sum().into_scalar::<f64>();
    for (part, of) in [(tokens, labelled), (pairs, BATCH as f64)] {
        assert!((0.0..=1.0).contains(&part) && (part * of - (part * of).round()).abs() < 1e-5, "{part} of {of}");
    }
    let at_the_end = |zero: &Zero| {
        // A head with its own bias computes no gradients in the forward pass.
        assert_eq!(uses(zero, "embeddings.word_embeddings"), [2, 1, 1]);
        assert_eq!(uses(zero, "embeddings.token_type_embeddings"), [1, 0, 1]);
        assert_eq!(uses(zero, "layers.0.query.weight"), [1, 1, 1]);
    };
    let reference = [("PyTorch", folder.join("reference.json"))];
    compare(&reference, |stage| train(stage, &load, &loss, &at_the_end));
}
