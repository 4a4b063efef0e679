//! Models from outside of a launch, and unannounced edits.

use std::sync::Mutex;

use zero_burn::gathered::{Gathered, ParamMeta, gathered};
use zero_burn::stats::all_gather;

use super::*;

// ---- models from elsewhere ----

/// Builds a model with a parameter that exists already; `Linear`'s own are drawn at their first use.
fn built(device: &Device) -> Net<Ad> {
    let mut model = Net::<Ad>::new(device);
    model.first.weight = Param::from_data(weight_data([4, 6]), device);
    model
}

/// Returns the loss after two steps.
fn trained(mut model: Net<Ad>, prepared: bool, device: &Device) -> f32 {
    if prepared {
        model = prepare::<Ad, _>(model, device);
    }
    let mut optimizer = SgdConfig::new().init();
    for n in 0..2 {
        model = step(model, &mut optimizer, device, n);
    }
    model.loss(batch(device, 9), true).into_scalar()
}

#[test]
fn a_model_that_was_built_outside_of_the_launch() {
    for prepared in [true, false] {
        let run = |stage| {
            let outside = built(&Device::default());
            outcome(2, config(stage), FAR, move |device| Ok(trained(outside.clone(), prepared, &device)))
        };
        assert_noticed("a model from outside", run, SOON, &["built outside of this launch", "inside of the function"]);
    }
}

#[test]
fn a_model_of_another_launch() {
    for prepared_before in [true, false] {
        for prepared in [true, false] {
            let run = |stage| {
                let (built, _) = outcome(2, config(stage), FAR, move |device| {
                    let model = built(&device);
                    Ok(if prepared_before { prepare::<Ad, _>(model, &device) } else { model })
                });
                let built = Mutex::new(built.unwrap().into_iter().map(Some).collect::<Vec<_>>());
                outcome(2, config(stage), FAR, move |device| {
                    // On its own line, so that the lock is not held while a rank fails.
                    let model = built.lock().unwrap()[device.rank()].take().unwrap();
                    Ok(trained(model, prepared, &device))
                })
            };
            assert_noticed("a model of another launch", run, SOON, &["built outside of this launch"]);
        }
    }
}

/// Ranks swap their models.
#[test]
fn a_model_of_another_rank() {
    let run = |stage| {
        let places: [Mutex<Option<Net<Ad>>>; 2] = Default::default();
        outcome(2, config(stage), FAR, move |device| {
            *places[device.rank()].lock().unwrap() = Some(prepare::<Ad, _>(built(&device), &device));
            all_gather::<Flex>(&[0.0]);
            let model = places[1 - device.rank()].lock().unwrap().take().unwrap();
            Ok(model.loss(batch(&device, 0), true).into_scalar())
        })
    };
    assert_noticed("a model of another rank", run, SOON, &["built outside of this launch, or by another of its ranks"]);
}

// ---- edits of whole parameters that nobody announced ----

#[test]
fn an_edit_of_gathered_parameters_that_would_be_lost() {
    for (what, root, editor) in
        [("by all", None, None), ("by rank 0", None, Some(0)), ("by another rank", Some(1), Some(0))]
    {
        let run = |stage| {
            outcome(2, config(stage), NEAR, move |device| {
                let model = prepare::<Ad, _>(built(&device), &device);
                let edits = editor.is_none_or(|editor| editor == device.rank());
                let of_weight = |param: &ParamMeta| param.path == "first.weight";
                let (model, ()) = gathered::<Ad, _, _>(model, of_weight, root, |found| {
                    if edits {
                        found[0].values.fill(0.0);
                    }
                });
                Ok(model.first.weight.val().sum().into_scalar())
            })
        };
        assert_noticed(what, run, NEAR + SOON, &["first.weight", "modify_on_rank"]);
    }
}

/// Not a misuse: all ranks run the same closure, and the values of the announced rank count.
#[test]
fn an_edit_by_all_ranks_that_is_announced() {
    assert_right("an edit by all ranks", |device| {
        let model = prepare::<Ad, _>(built(&device), &device);
        let of_weight = |param: &ParamMeta| param.path == "first.weight";
        let edit = |found: &mut [Gathered]| found[0].values.fill(device.rank() as f32);
        let (model, ()) = gathered::<Ad, _, _>(model, of_weight, Some(2), edit);
        assert!(model.first.weight.val().into_data().iter::<f32>().all(|x| x == 2.0));
        model
    });
}
