//! Dropout's random numbers: `cargo test --test dropout`.

mod common;

use burn::tensor::Tensor;
use burn_optim::SgdConfig;
use common::{Gpt, Mlp, Net, config, device, options, train_on, train_threads};
use zero_core::Stage;
use zero_param::{Error, ZeroConfig, dropout, run_threads, shard};

#[test]
fn dropout_has_the_same_bits_at_all_stages() {
    let train = |config: &ZeroConfig| train_threads::<Gpt<2, 20>>(3, config, &SgdConfig::new());
    let first = train(&config(Stage::DataParallel));
    assert!(first != train_threads::<Gpt<2>>(3, &config(Stage::DataParallel), &SgdConfig::new()), "it drops");
    assert!(first != train(&ZeroConfig { seed: 1, ..config(Stage::DataParallel) }), "by the seed");
    for stage in Stage::ALL {
        assert!(train(&config(stage)) == first, "stage {stage}");
        // Operations that the backward pass recomputes have the same masks.
        let again = run_threads(3, &options(), |ranks| {
            let device = device().gradient_checkpointing();
            train_on::<Gpt<2, 20>>(device, ranks, &config(stage), &SgdConfig::new()).map(|(told, _)| told)
        });
        assert!(again.unwrap() == first, "stage {stage} with checkpointing");
    }
}

#[test]
fn dropout_keeps_as_many_as_it_says() {
    const KEPT: f64 = 0.7;
    let values = |x: Tensor<2>| x.into_data().try_into_vec::<f32>().unwrap();
    let drawn = run_threads(2, &options(), |ranks| {
        let device = device();
        let (net, zero) = shard(Mlp::<8, 1>::build(&device), ranks, &config(Stage::Parameters))?;
        let ones = || Tensor::<2>::ones([100, 100], &device).require_grad();
        let mut drawn = Vec::new();
        zero.backward(|| {
            for _ in 0..2 {
                let x = ones();
                let out = dropout(x.clone(), 1.0 - KEPT);
                drawn.push(values(out.clone().inner()));
                let gradient = x.grad(&out.sum().backward()).unwrap();
                assert_eq!(&values(gradient), drawn.last().unwrap(), "what is dropped has no gradient");
            }
            assert_eq!(values(dropout(ones().inner(), 0.5)), vec![1.0; 10_000], "in evaluation");
            net.loss(0, &device)
        })?;
        Ok::<_, Error>(drawn)
    });
    let drawn: Vec<Vec<f32>> = drawn.unwrap().into_iter().flatten().collect();
    for (index, values) in drawn.iter().enumerate() {
        assert!(values.iter().all(|&x| x == 0.0 || x == (1.0 / KEPT) as f32));
        let kept = values.iter().filter(|x| **x > 0.0).count() as f64 / values.len() as f64;
        assert!((kept - KEPT).abs() < 0.02, "{kept}");
        assert!(!drawn[..index].contains(values), "each rank and each draw has its own");
    }
    let outside = run_threads(2, &options(), |ranks| {
        let device = device();
        let (net, _zero) = shard(Gpt::<1, 10>::build(&device), ranks, &config(Stage::Parameters))?;
        drop(net.loss(0, &device));
        Ok::<_, Error>(())
    });
    let error = outside.unwrap_err().to_string();
    assert!(error.contains("needs Zero::backward"), "{error}");
}
