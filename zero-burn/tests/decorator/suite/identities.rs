//! The identity of parameters: copies, clones, modules of one record, and losses of differences.

use burn::module::{AutodiffModule, Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_backend::Backend;
use zero_burn::module::{UnreducedGrads, collect_grads, grad_norm, mark, prepare, scale_grads};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;

use super::model::Two;
use super::{config, ranks};

type Ad<B> = Autodiff<Zero<B>>;
/// A loss computed from the parameters and an ordinary tensor.
type Loss<B> = fn(&Two<Ad<B>>, Tensor<Ad<B>, 1>) -> Tensor<Ad<B>, 1>;
type Device<B> = ZeroDevice<<B as burn_backend::BackendTypes>::Device>;

const FIVE: [f32; 5] = [1.0, 2.0, 3.0, 4.0, 5.0];

/// Runs `body`, which asserts, on one to three ranks at every stage.
fn everywhere<B: Backend>(body: impl Fn(Device<B>, &str) + Sync) {
    for world in 1..=3 {
        for stage in Stage::ALL {
            ranks::<B, _>(world, &config(stage), |device| body(device, &format!("{world} ranks, stage {stage}")));
        }
    }
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
    assert!(got.len() == expected.len() && got.iter().zip(expected).all(close), "{what}: {got:?}, not {expected:?}");
}

fn sgd<B: Backend>(model: Two<Ad<B>>, grads: GradientsParams) -> Two<Ad<B>> {
    SgdConfig::new().init().step(1.0, model, grads)
}

/// Burn's `detach` keeps the mark of a parameter: the graph has it twice.
pub fn a_parameter_and_its_detached_copy_have_a_gradient_each<B: Backend>() {
    everywhere::<B>(|device, what| {
        for detached_first in [true, false] {
            let mut model = prepare::<Ad<B>, _>(Two::new(&device), &device);
            for step in 0..2 {
                let (a, copy) = (model.a.val(), model.a.val().detach());
                let product = if detached_first { copy * a } else { a * copy };
                // The other parameter is reduced beside the backward pass, as ever.
                let loss = (product + model.b.val()).sum();
                let grads = collect_grads::<Ad<B>, _>(GradientsParams::from_grads(loss.backward(), &model), &model);
                let gradient = grads.get::<Zero<B>, 1>(model.a.id).unwrap();
                assert_close(&values(gradient), &FIVE.map(|x| if step == 0 { x } else { 0.0 }), what);
                model = sgd(model, grads);
                assert_close(&values(model.a.val()), &[0.0; 5], what);
                assert_close(&values(model.b.val()), &FIVE.map(|x| 0.5 * x - 1.0 - step as f32), what);
            }
        }
    });
}

pub fn parameters_made_of_one_tensor_are_two<B: Backend>() {
    everywhere::<B>(|device, what| {
        for (detached, held) in [(true, false), (true, true), (false, false), (false, true)] {
            let Two { a, .. } = Two::<Ad<B>>::new(&device);
            let b = Param::from_tensor(match detached {
                true => a.val().detach(),
                false => Tensor::from_inner(a.val().inner()),
            });
            let mut model = prepare::<Ad<B>, _>(Two { a, b }, &device);
            for _ in 0..2 {
                let loss = |model: &Two<Ad<B>>| model.a.val().sum() + model.b.val().sum().mul_scalar(10.0);
                let grads = match held {
                    true => {
                        let mut sums = UnreducedGrads::<Ad<B>>::default();
                        for _ in 0..2 {
                            mark::<Ad<B>, _>(&model);
                            sums.backward(loss(&model).mul_scalar(0.5), &model);
                        }
                        sums.collect(&model)
                    }
                    false => {
                        let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
                        collect_grads::<Ad<B>, _>(grads, &model)
                    }
                };
                model = sgd(model, grads);
            }
            assert_close(&values(model.a.val()), &FIVE.map(|x| x - 2.0), what);
            assert_close(&values(model.b.val()), &FIVE.map(|x| x - 20.0), what);
        }
    });
}

/// A tied parameter counts once in the norm, and is scaled once.
pub fn a_clone_of_a_parameter_is_the_same<B: Backend>() {
    everywhere::<B>(|device, what| {
        for sharded_before in [true, false] {
            let a = match sharded_before {
                true => Two::<Ad<B>>::new(&device).a,
                false => Param::from_tensor(Tensor::from_data(TensorData::from(FIVE), &device)),
            };
            let mut model = prepare::<Ad<B>, _>(Two { b: a.clone(), a }, &device);
            let mut expected = FIVE;
            for _ in 0..2 {
                let loss = (model.a.val() * model.a.val()).sum() + model.b.val().sum().mul_scalar(3.0);
                let grads = collect_grads::<Ad<B>, _>(GradientsParams::from_grads(loss.backward(), &model), &model);
                let gradient = expected.map(|x| 2.0 * x + 3.0);
                let norm = gradient.iter().map(|x| x * x).sum::<f32>().sqrt();
                assert_close(&[grad_norm::<Ad<B>, _>(&grads, &model) as f32], &[norm], what);
                let halves = scale_grads::<Ad<B>, _>(grads, &model, 0.5);
                let got = values(halves.get::<Zero<B>, 1>(model.a.id).unwrap());
                assert_close(&got, &gradient.map(|x| 0.5 * x), what);
                model = sgd(model, halves);
                model.b = model.a.clone();
                expected = [0, 1, 2, 3, 4].map(|i| expected[i] - 0.5 * gradient[i]);
                assert_close(&values(model.b.val()), &expected, what);
            }
        }
    });
}

/// Their parameters have the same identities.
pub fn modules_of_one_record_train_apart<B: Backend>() {
    everywhere::<B>(|device, what| {
        let first = prepare::<Ad<B>, _>(Two::new(&device), &device);
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let record = recorder.record(first.clone().into_record(), ()).unwrap();
        let second = Two::<Ad<B>>::new(&device).load_record(recorder.load(record, &device).unwrap());
        assert_eq!(first.a.id, second.a.id);
        let mut models = [first, prepare::<Ad<B>, _>(second, &device)];
        for together in [true, false, true] {
            let losses: Vec<_> =
                models.iter().zip([1.0, 10.0]).map(|(model, factor)| model.a.val().sum().mul_scalar(factor)).collect();
            let grads: Vec<_> = match together {
                true => {
                    let mut grads = losses.into_iter().reduce(|a, b| a + b).unwrap().backward();
                    models.iter().map(|model| GradientsParams::from_module(&mut grads, model)).collect()
                }
                false => {
                    let each = losses.into_iter().zip(&models);
                    each.map(|(loss, model)| GradientsParams::from_grads(loss.backward(), model)).collect()
                }
            };
            let each = grads.into_iter().zip(&models);
            let grads: Vec<_> = each.map(|(grads, model)| collect_grads::<Ad<B>, _>(grads, model)).collect();
            let mut grads = grads.into_iter();
            models = models.map(|model| sgd(model, grads.next().unwrap()));
        }
        assert_close(&values(models[0].a.val()), &FIVE.map(|x| x - 3.0), what);
        assert_close(&values(models[1].a.val()), &FIVE.map(|x| x - 30.0), what);
    });
}

/// A distance from given weights is a loss like any other; only an update with an ordinary tensor is rejected.
pub fn a_parameter_may_be_compared_with_an_ordinary_tensor<B: Backend>() {
    let gradients = |loss: Loss<B>, what: &str, expected: [f32; 5]| {
        everywhere::<B>(|device, place| {
            for keeps_a_clone in [false, true] {
                let mut model = prepare::<Ad<B>, _>(Two::new(&device), &device);
                let mut optimizer = AdamWConfig::new().init();
                let clone = keeps_a_clone.then(|| model.clone());
                for step in 0..3 {
                    let w = Tensor::from_data(TensorData::from([1.0, -1.0, 2.0, 0.0, 0.5]), &device);
                    let grads = GradientsParams::from_grads(loss(&model, w.clone()).backward(), &model);
                    // Again, between the backward pass and the step, and without autodiff.
                    let _ = values(loss(&model, w.clone()));
                    let _ = values(model.valid().a.val() - w.inner());
                    if step == 0 {
                        let gradient = grads.get::<Zero<B>, 1>(model.a.id).unwrap();
                        assert_close(&values(gradient), &expected, &format!("{what}, {place}"));
                    }
                    model = optimizer.step(0.1, model, grads);
                }
                assert!(values(model.a.val()).iter().all(|x| x.is_finite()));
                drop(clone);
            }
        });
    };
    gradients(|model, w| (model.a.val() - w).powi_scalar(2).sum(), "a - w", [0.0, 6.0, 2.0, 8.0, 9.0]);
    gradients(|model, w| (w - model.a.val()).powi_scalar(2).sum(), "w - a", [0.0, 6.0, 2.0, 8.0, 9.0]);
    let centred = |model: &Two<Ad<B>>, _| {
        let a = model.a.val();
        (a.clone() - a.mean_dim(0).expand([5])).powi_scalar(2).sum()
    };
    gradients(centred, "a - mean(a)", [-4.0, -2.0, 0.0, 2.0, 4.0]);
    let transposed = |model: &Two<Ad<B>>, w: Tensor<Ad<B>, 1>| {
        (model.a.val().reshape([1, 5]).transpose() - w.reshape([1, 5]).transpose()).powi_scalar(2).sum()
    };
    gradients(transposed, "a.t - w.t", [0.0, 6.0, 2.0, 8.0, 9.0]);
    let moving = |model: &Two<Ad<B>>, w: Tensor<Ad<B>, 1>| (w.clone() + (model.a.val() - w).mul_scalar(0.5)).sum();
    gradients(moving, "w + (a - w) / 2", [0.5; 5]);
    let like = |model: &Two<Ad<B>>, w: Tensor<Ad<B>, 1>| (model.a.val() - w.zeros_like()).powi_scalar(2).sum();
    gradients(like, "a - 0", [2.0, 4.0, 6.0, 8.0, 10.0]);
}
