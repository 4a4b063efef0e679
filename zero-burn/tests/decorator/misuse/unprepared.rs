//! Models that were never prepared, or only in part.

use burn::nn::LinearLayout;

use super::*;

/// Makes two steps without `prepare`, and returns the sum of each rank's output.
fn unprepared<M, O>(
    stage: Stage,
    build: impl Fn(&Device) -> M + Send + Sync + 'static,
    forward: impl Fn(&M, Tensor<Ad, 2>) -> Tensor<Ad, 2> + Send + Sync + 'static,
    optimizer: impl Fn() -> O + Send + Sync + 'static,
) -> (Result<Vec<f32>, String>, Duration)
where
    M: AutodiffModule<Ad> + 'static,
    O: Optimizer<M, Ad>,
{
    outcome(2, config(stage), FAR, move |device| {
        let (mut model, mut optimizer) = (build(&device), optimizer());
        for step in 0..2 {
            let x = batch(&device, step);
            let loss = (forward(&model, x.clone()) - x).powf_scalar(2.0).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, grads);
        }
        Ok(forward(&model, Tensor::ones([1, 4], &device)).sum().into_scalar())
    })
}

#[test]
fn a_step_on_a_model_that_was_never_prepared() {
    for stage in Stage::ALL {
        let build = |device: &Device| LinearConfig::new(4, 4).init::<Ad>(device);
        let forward = |model: &Linear<Ad>, x| model.forward(x);
        for (name, outcome) in [
            ("AdamW", unprepared(stage, build, forward, || AdamWConfig::new().with_weight_decay(0.1).init())),
            ("Sgd", unprepared(stage, build, forward, || SgdConfig::new().init())),
        ] {
            let what = format!("never prepared, {name}, stage {stage}");
            let error = error(&what, outcome, SOON);
            assert_says(&what, &error, &["zero_burn::module::prepare", "never reduced", "[4, 4]"]);
        }
    }
}

#[test]
fn collecting_the_gradients_of_a_model_that_was_never_prepared() {
    let run = outcome(2, config(Stage::Parameters), FAR, |device| {
        let model = Net::<Ad>::new(&device);
        Ok(collect_grads::<Ad, _>(gradients(&model, &device, 0), &model).len())
    });
    let error = error("collect_grads without prepare", run, SOON);
    assert_says(
        "collect_grads without prepare",
        &error,
        &["was not prepared", "call zero_burn::module::prepare on the whole model"],
    );
}

/// Only part of the model is prepared.
#[test]
fn a_step_on_a_model_that_was_prepared_in_part() {
    for stage in Stage::ALL {
        let run = outcome(2, config(stage), FAR, |device| {
            let mut model = Net::<Ad>::new(&device);
            model.first = prepare::<Ad, _>(model.first, &device);
            let grads = gradients(&model, &device, 0);
            Ok(AdamWConfig::new().init().step(0.05, model, grads).second.weight.val().to_data().to_string())
        });
        let what = format!("prepared in part, stage {stage}");
        let error = error(&what, run, SOON);
        assert_says(&what, &error, &["zero_burn::module::prepare", "never reduced"]);
    }
}

/// A column layout's weight is a transposed view of its shard.
#[test]
fn a_step_on_a_column_layout_that_was_never_prepared() {
    let build = |device: &Device| {
        let born = LinearConfig::new(4, 4).with_bias(false).with_layout(LinearLayout::Col).init::<Zero<Flex>>(device);
        // Without autodiff at birth, as otherwise Burn 0.21 makes it no leaf.
        <Linear<Ad> as AutodiffModule<Ad>>::from_inner(born)
    };
    let forward = |model: &Linear<Ad>, x| model.forward(x);
    let run = |stage| unprepared(stage, build, forward, || SgdConfig::new().init());
    assert_noticed("LinearLayout::Col, never prepared", run, SOON, &["zero_burn::module::prepare"]);
}

/// A clone of the module is kept, so the number of the parameter's handles shows nothing.
#[test]
fn a_step_with_gradients_that_were_never_reduced_and_a_clone_of_the_model() {
    fn twice<O: Optimizer<Net<Ad>, Ad>>(optimizer: impl Fn() -> O + Clone + Send + Sync + 'static) {
        let run = |stage| {
            let optimizer = optimizer.clone();
            outcome(2, config(stage), FAR, move |device| {
                let model = prepare::<Ad, _>(Net::new(&device), &device);
                drop(gradients(&model, &device, 0));
                let (before, grads) = (model.clone(), gradients(&model, &device, 1));
                let after = optimizer().step(0.05, model, grads);
                Ok((after.first.weight.val() - before.first.weight.val()).sum().into_scalar())
            })
        };
        assert_noticed("a clone of the model", run, SOON, &["zero_burn::module::collect_grads", "never reduced"]);
    }
    twice(|| AdamWConfig::new().with_weight_decay(0.1).init());
    twice(|| SgdConfig::new().init());
}

/// A custom optimizer, which queries no devices.
#[test]
fn an_update_by_hand_with_gradients_that_were_never_reduced() {
    let run = |stage| {
        outcome(2, config(stage), FAR, |device| {
            let mut model = prepare::<Ad, _>(Net::new(&device), &device);
            drop(gradients(&model, &device, 0));
            let mut grads = gradients(&model, &device, 1);
            let gradient = grads.remove::<Zero<Flex>, 2>(model.first.weight.id).unwrap();
            model.first.weight = model.first.weight.map(|w| Tensor::from_inner(w.inner() - gradient.mul_scalar(0.1)));
            Ok(model.first.weight.val().sum().into_scalar())
        })
    };
    assert_noticed("an update by hand", run, SOON, &["zero_burn::module::collect_grads", "never reduced"]);
}

/// A parameter that an ordinary tensor has replaced is reported when gradients are collected.
#[test]
fn a_parameter_that_has_become_an_ordinary_tensor() {
    let run = |stage| {
        outcome(2, config(stage), FAR, |device| {
            let mut model = prepare::<Ad, _>(Net::new(&device), &device);
            let noise = Tensor::<Zero<Flex>, 2>::ones([4, 6], &device).mul_scalar(device.rank() as f32);
            model.first.weight = model.first.weight.map(|w| Tensor::from_inner(w.inner() + noise).require_grad());
            Ok(collect_grads::<Ad, _>(gradients(&model, &device, 0), &model).len())
        })
    };
    assert_noticed(
        "a replaced parameter",
        run,
        SOON,
        &["an ordinary tensor has replaced a parameter", "zero_burn::module::prepare"],
    );
}
