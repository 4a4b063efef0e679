//! GPT-2 with the weights and rows of `tests/fixtures/gpt2_tiny`, beside what PyTorch and the front for Burn 0.21 make of them.

#[path = "../examples/gpt2/model.rs"]
mod model;

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_optim::AdamWConfig;
use model::Config;
use safetensors::SafeTensors;
use serde_json::Value;
use zero_core::collective::threads::ThreadOptions;
use zero_core::{Buffer, ReduceOp, Stage};
use zero_param::{Error, ZeroConfig, run_threads, shard};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gpt2_tiny")
}

/// Losses over all ranks, and norms, of 20 steps of AdamW on 2 ranks.
fn train(stage: Stage, steps: usize) -> Vec<(f64, f64)> {
    let bytes = std::fs::read(fixture().join("batches.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let rows = file.tensor("input_ids").unwrap();
    let ids: Vec<i32> = rows.data().as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as i32).collect();
    let (count, width) = (rows.shape()[0], rows.shape()[1]);
    let config = ZeroConfig { param_persistence_threshold: 0, reduce_bucket_size: 5_000, ..ZeroConfig::new(stage) };
    let options = ThreadOptions { deadline: Duration::from_secs(60) };
    let told = run_threads(2, &options, |ranks| {
        let device = Device::flex().autodiff();
        let (mut model, zero) = shard(Config::load(&fixture(), &device), ranks, &config)?;
        let mut optimizer = zero.optimizer(&AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01))?;
        let mut told = Vec::new();
        for step in 0..steps {
            let first = (2 * step + ranks.comm().rank()) * 2;
            let batch: Vec<i32> =
                (first..first + 2).flat_map(|row| ids[row % count * width..][..width].iter().copied()).collect();
            let batch = Tensor::<2, Int>::from_data(TensorData::new(batch, [2, width]), &device);
            let (loss, grads) = zero.backward(|| model.loss(batch))?;
            let loss = f64::from(loss.into_data().try_into_vec::<f32>().unwrap()[0]);
            let mean = ranks.comm().all_reduce(Buffer::F64(vec![loss]), ReduceOp::Mean)?.into_f64()[0];
            told.push((mean, grads.norm()?));
            model = optimizer.step(1e-3, model, grads)?;
        }
        if stage == Stage::Parameters {
            // The table's rows and the head's gradients are made in the forward pass, a layer's product in both.
            let gathered = |path: &str| zero.uses(path).map(|uses| [uses.gathered_forward, uses.gathered_backward]);
            assert_eq!(gathered("wte"), Some([2 * steps, 0]));
            assert_eq!(gathered("h.0.mlp.c_fc.weight"), Some([steps, steps]));
            assert_eq!(zero.uses("wte").map(|uses| uses.reduced), Some(steps));
        }
        Ok::<_, Error>(told)
    });
    told.unwrap().swap_remove(0)
}

/// Losses and norms in a file of JSON.
fn reference(file: PathBuf) -> (Vec<f64>, Vec<f64>) {
    let json: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let list = |key: &str| json[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    (list("losses"), list("grad_norms"))
}

#[test]
fn gpt2_trains_as_in_pytorch_and_on_burn_0_21() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gpt2_tiny_on_0_21.json");
    let references = [("PyTorch", fixture().join("reference.json")), ("the front for Burn 0.21", own)];
    let mut first = None;
    for stage in Stage::ALL {
        let told = train(stage, 20);
        for (name, file) in &references {
            let (losses, norms) = reference(file.clone());
            let worst = |expected: &[f64], got: fn(&(f64, f64)) -> f64| {
                assert_eq!(expected.len(), told.len());
                expected.iter().zip(&told).map(|(e, told)| (e - got(told)).abs() / e).fold(0.0, f64::max)
            };
            let (loss, norm) = (worst(&losses, |told| told.0), worst(&norms, |told| told.1));
            println!("stage {stage}: largest relative difference to {name}: loss {loss:.1e}, norm {norm:.1e}");
            assert!(loss < 1e-6 && norm < 1e-5, "stage {stage}, {name}: loss {loss:e}, norm {norm:e}");
        }
        assert!(told == *first.get_or_insert(told.clone()), "the bits of stage {stage}");
    }
}
