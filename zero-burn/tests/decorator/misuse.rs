//! Wrong use of ZeRO ends soon in one error that tells the user what to do; never in a hang, and never with ranks that silently train
//! different models.
//!
//! Every run has a watchdog. If an error needs no waiting, the deadline is far longer than the allowed time, so that an error at the
//! deadline fails the test.

mod elsewhere;
mod missing;
mod unprepared;

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::module::linear;
use burn::tensor::{Tensor, TensorData, activation, backend::Backend};
use burn_autodiff::Autodiff;
use burn_flex::{Flex, FlexDevice};
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::module::{collect_grads, mark, prepare};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;

type Ad = Autodiff<Zero<Flex>>;
type Device = ZeroDevice<FlexDevice>;

/// A deadline that an error must not need.
const FAR: Duration = Duration::from_secs(40);
/// A deadline that an error may need.
const NEAR: Duration = Duration::from_secs(2);
/// Maximum time for an error that needs no deadline.
const SOON: Duration = Duration::from_secs(15);
/// Time after which a run counts as hanging.
const HANG: Duration = Duration::from_secs(90);

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    optional: Option<Linear<B>>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self::of_width(6, device)
    }

    fn of_width(width: usize, device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(4, width).init(device),
            second: LinearConfig::new(width, 4).init(device),
            optional: None,
        }
    }

    fn with_optional(device: &B::Device) -> Self {
        Self { optional: Some(LinearConfig::new(4, 4).init(device)), ..Self::new(device) }
    }

    fn loss(&self, x: Tensor<B, 2>, optional: bool) -> Tensor<B, 1> {
        let weight = self.first.weight.val();
        // Whatever its shape: one rank may hold it otherwise than another.
        let width = weight.shape().num_elements() / 4;
        let bias = self.first.bias.as_ref().map(|bias| bias.val());
        let mut y = self.second.forward(activation::relu(linear(x.clone(), weight.reshape([4, width]), bias)));
        if let (Some(layer), true) = (&self.optional, optional) {
            y = layer.forward(y);
        }
        (y - x).powf_scalar(2.0).mean()
    }
}

/// Returns a batch of three rows, different on every rank and in every step.
fn batch(device: &Device, step: usize) -> Tensor<Ad, 2> {
    let salt = device.rank() * 31 + step * 7;
    let values: Vec<f32> = (0..12).map(|i| ((i * 5 + salt * 3) % 11) as f32 / 7.0 - 0.6).collect();
    Tensor::from_data(TensorData::new(values, [3, 4]), device)
}

fn gradients(model: &Net<Ad>, device: &Device, step: usize) -> GradientsParams {
    GradientsParams::from_grads(model.loss(batch(device, step), true).backward(), model)
}

/// Makes a correct step of a correct program.
fn step(model: Net<Ad>, optimizer: &mut impl Optimizer<Net<Ad>, Ad>, device: &Device, step: usize) -> Net<Ad> {
    let grads = collect_grads::<Ad, _>(gradients(&model, device, step), &model);
    optimizer.step(0.05, model, grads)
}

fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig { reduce_bucket_size: 16, param_persistence_threshold: 0, seed: 3, ..ZeroConfig::new(stage) }
}

/// Returns the result of a launch and its duration. A run that does not return is a hang, which fails the test.
fn outcome<T: Send + 'static>(
    world: usize,
    config: ZeroConfig,
    deadline: Duration,
    body: impl Fn(Device) -> Result<T, String> + Send + Sync + 'static,
) -> (Result<Vec<T>, String>, Duration) {
    let begin = Instant::now();
    let (sender, receiver) = channel();
    let name = std::thread::current().name().unwrap_or("test").to_string();
    let runner = std::thread::Builder::new().name(name).spawn(move || {
        let options = LaunchOptions { threads_per_rank: 1, deadline, ..LaunchOptions::default() };
        let result = launch::<Flex, T, String>(world, &config, &options, body);
        // The receiver is gone only when the watchdog has already failed the test.
        let _ = sender.send(result.map_err(|error| error.to_string()));
    });
    let result = match receiver.recv_timeout(HANG) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("a run with a deadline of {deadline:?} hangs"),
        Err(RecvTimeoutError::Disconnected) => panic!("launch itself panicked"),
    };
    runner.unwrap().join().unwrap();
    (result, begin.elapsed())
}

/// Returns the error of a run that must fail within `within`.
fn error<T: Send + core::fmt::Debug + 'static>(
    what: &str,
    (result, took): (Result<Vec<T>, String>, Duration),
    within: Duration,
) -> String {
    let error = match result {
        Ok(values) => panic!("{what}: nobody noticed; the ranks returned {values:?}"),
        Err(error) => error,
    };
    // To be read with `--nocapture`.
    println!("{what} ({} ms): {error}", took.as_millis());
    assert!(took < within, "{what}: took {took:?}: {error}");
    error
}

/// Asserts that at every stage the run ends with one error that contains `phrases`. All stages run before any failure is reported.
fn assert_noticed<T: Send + core::fmt::Debug + 'static>(
    what: &str,
    run: impl Fn(Stage) -> (Result<Vec<T>, String>, Duration),
    within: Duration,
    phrases: &[&str],
) {
    let complaints: Vec<String> = Stage::ALL
        .iter()
        .filter_map(|stage| {
            let (result, took) = run(*stage);
            println!("{what}, stage {stage} ({} ms): {result:?}", took.as_millis());
            let missing = |error: &String| phrases.iter().find(|&&phrase| !error.contains(phrase)).copied();
            match result {
                Ok(values) => Some(format!("stage {stage}: nobody noticed, the ranks returned {values:?}")),
                Err(error) if took >= within => Some(format!("stage {stage}: took {took:?}: {error}")),
                Err(error) => missing(&error).map(|phrase| format!("stage {stage}: '{phrase}' is not in: {error}")),
            }
        })
        .collect();
    assert!(complaints.is_empty(), "{what}\n{}", complaints.join("\n"));
}

/// Asserts that `error` contains all `phrases`.
fn assert_says(what: &str, error: &str, phrases: &[&str]) {
    for phrase in phrases {
        assert!(error.contains(phrase), "{what}: '{phrase}' is not in: {error}");
    }
    assert!(error.lines().count() == 1, "{what}: more than one line: {error}");
    assert!(error.len() < 600, "{what}: {} characters: {error}", error.len());
}

/// Checks that the process still works after a failure.
fn assert_a_right_run_works(stage: Stage) {
    let (result, _) = outcome(2, config(stage), FAR, |device| {
        let mut model = prepare::<Ad, _>(Net::new(&device), &device);
        let mut optimizer = AdamWConfig::new().init();
        for n in 0..2 {
            model = step(model, &mut optimizer, &device, n);
        }
        Ok(model.loss(batch(&device, 0), true).into_scalar())
    });
    let losses = result.unwrap_or_else(|error| panic!("a right run after a wrong one, stage {stage}: {error}"));
    assert!(losses.iter().all(|loss| loss.is_finite()));
}

// ---- (b) micro-batches ----

#[test]
fn accumulation_without_mark_or_collect() {
    for stage in Stage::ALL {
        let run = outcome(2, config(stage), FAR, |device| {
            let model = prepare::<Ad, _>(Net::new(&device), &device);
            let mut accumulator = GradientsAccumulator::new();
            for micro in 0..2 {
                accumulator.accumulate(&model, gradients(&model, &device, micro));
            }
            let model = AdamWConfig::new().init().step(0.05, model, accumulator.grads());
            Ok(model.loss(batch(&device, 9), true).into_scalar())
        });
        let what = format!("accumulation without mark or collect_grads, stage {stage}");
        let error = error(&what, run, SOON);
        assert_says(&what, &error, &["zero_burn::module::collect_grads", "before accumulating"]);
    }
}

/// The first backward pass uses up the marks, and its gradients are thrown away.
#[test]
fn a_step_with_a_second_backward_pass_without_mark_or_collect() {
    for stage in Stage::ALL {
        let run = outcome(2, config(stage), FAR, |device| {
            let model = prepare::<Ad, _>(Net::new(&device), &device);
            drop(gradients(&model, &device, 0));
            let grads = gradients(&model, &device, 1);
            let model = AdamWConfig::new().init().step(0.05, model, grads);
            Ok(model.loss(batch(&device, 9), true).into_scalar())
        });
        let what = format!("second backward pass without mark or collect_grads, stage {stage}");
        let error = error(&what, run, SOON);
        assert_says(&what, &error, &["zero_burn::module::collect_grads", "never reduced"]);
    }
}

/// A layer that only one rank uses gets its gradient on the others only through `collect_grads`.
///
/// Without it, the update is rejected at every stage.
#[test]
fn a_layer_used_on_one_rank_without_collect() {
    let run = |stage| {
        outcome(2, config(stage), NEAR, |device| {
            let mut model = prepare::<Ad, _>(Net::with_optional(&device), &device);
            let mut optimizer = SgdConfig::new().init();
            for n in 0..2 {
                let loss = model.loss(batch(&device, n), device.rank() == 1);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(0.05, model, grads);
            }
            Ok(model.optional.unwrap().forward(Tensor::<Ad, 2>::ones([1, 4], &device)).sum().into_scalar())
        })
    };
    assert_noticed("a layer used on one rank, without collect_grads", run, NEAR + SOON, &["collect_grads"]);
}

/// Some ranks complete their gradients, one does not.
#[test]
fn one_rank_forgets_to_collect() {
    for stage in Stage::ALL {
        for forgetful in 0..2 {
            let run = outcome(2, config(stage), NEAR, move |device| {
                let mut model = prepare::<Ad, _>(Net::new(&device), &device);
                let mut optimizer = AdamWConfig::new().init();
                for n in 0..3 {
                    let mut grads = gradients(&model, &device, n);
                    if device.rank() != forgetful {
                        grads = collect_grads::<Ad, _>(grads, &model);
                    }
                    model = optimizer.step(0.05, model, grads);
                }
                Ok(model.loss(batch(&device, 9), true).into_scalar())
            });
            let what = format!("rank {forgetful} forgets collect_grads, stage {stage}");
            let error = error(&what, run, NEAR + SOON);
            assert_says(&what, &error, &["every rank"]);
        }
    }
}

/// Asserts that correct runs agree, among ranks and among stages.
fn assert_right(what: &str, body: impl Fn(Device) -> Net<Ad> + Clone + Send + Sync + 'static) {
    let mut reference = None;
    for stage in Stage::ALL {
        let body = body.clone();
        let (result, _) = outcome(3, config(stage), SOON, move |device| {
            let model = body(device);
            let weights = [model.first.weight.val(), model.second.weight.val()];
            Ok(weights.map(|weight| weight.into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>()))
        });
        let ranks = result.unwrap_or_else(|error| panic!("{what}, stage {stage}: {error}"));
        for weights in ranks {
            assert_eq!(reference.get_or_insert_with(|| weights.clone()), &weights, "{what}, stage {stage}");
        }
    }
}

/// Not a misuse, because every rank calls `collect_grads`: one rank has run out of data, and has no backward pass in a step.
///
/// It collects the gradients of the others, and updates with them.
#[test]
fn a_rank_without_data_may_skip_its_backward_pass() {
    for idle in 0..3 {
        for at in 0..3 {
            assert_right(&format!("rank {idle} has no data in step {at}"), move |device| {
                let mut model = prepare::<Ad, _>(Net::new(&device), &device);
                let mut optimizer = AdamWConfig::new().init();
                for n in 0..3 {
                    let grads = match device.rank() == idle && n == at {
                        true => GradientsParams::new(),
                        false => gradients(&model, &device, n),
                    };
                    let grads = collect_grads::<Ad, _>(grads, &model);
                    model = optimizer.step(0.05, model, grads);
                }
                model
            });
        }
    }
}

/// Not a misuse: `mark` only determines when a gradient is reduced.
#[test]
fn one_rank_may_mark_alone() {
    for marking in 0..3 {
        assert_right(&format!("rank {marking} marks alone"), move |device| {
            let mut model = prepare::<Ad, _>(Net::new(&device), &device);
            let mut optimizer = AdamWConfig::new().init();
            for n in 0..3 {
                let mut accumulator = GradientsAccumulator::new();
                for micro in 0..2 {
                    if device.rank() == marking {
                        mark::<Ad, _>(&model);
                    }
                    let grads = gradients(&model, &device, 2 * n + micro);
                    accumulator.accumulate(&model, collect_grads::<Ad, _>(grads, &model));
                }
                model = optimizer.step(0.05, model, accumulator.grads());
            }
            model
        });
    }
}

// ---- (c) ranks with different models ----

/// Makes two training steps of models that differ from rank to rank.
fn different_models(
    stage: Stage,
    build: impl Fn(&Device) -> Net<Ad> + Send + Sync + 'static,
) -> (Result<Vec<f32>, String>, Duration) {
    outcome(2, config(stage), NEAR, move |device| {
        let mut model = prepare::<Ad, _>(build(&device), &device);
        let mut optimizer = AdamWConfig::new().init();
        for n in 0..2 {
            model = step(model, &mut optimizer, &device, n);
        }
        Ok(model.loss(batch(&device, 9), true).into_scalar())
    })
}

#[test]
fn ranks_with_models_of_different_width() {
    for stage in Stage::ALL {
        let run = different_models(stage, |device| Net::of_width(6 + device.rank(), device));
        let what = format!("different widths, stage {stage}");
        let error = error(&what, run, NEAR + SOON);
        assert_says(&what, &error, &["the same model on every rank"]);
    }
}

fn weight_data(shape: [usize; 2]) -> TensorData {
    TensorData::new((0..24).map(|i| i as f32 / 24.0 - 0.4).collect::<Vec<f32>>(), shape)
}

/// Equally many elements in another shape: only the shapes differ.
#[test]
fn ranks_with_models_of_equal_size_and_different_shape() {
    for stage in Stage::ALL {
        let run = different_models(stage, |device| {
            let shape = if device.rank() == 0 { [4, 6] } else { [6, 4] };
            let mut model = Net::new(device);
            model.first.weight = Param::from_data(weight_data(shape), device);
            model
        });
        let what = format!("different shapes of equal size, stage {stage}");
        let error = error(&what, run, NEAR + SOON);
        assert_says(&what, &error, &["the same model on every rank"]);
    }
}

#[test]
fn ranks_with_models_of_different_depth() {
    for stage in Stage::ALL {
        let run = different_models(stage, |device| match device.rank() {
            0 => Net::new(device),
            _ => Net::with_optional(device),
        });
        let what = format!("different depths, stage {stage}");
        let error = error(&what, run, NEAR + SOON);
        assert_says(&what, &error, &["the same model on every rank"]);
    }
}

/// `prepare` broadcasts parameters that were created as ordinary tensors, which here happens on one rank only.
#[test]
fn ranks_with_parameters_born_differently() {
    for stage in Stage::ALL {
        let run = different_models(stage, |device| {
            let mut model = Net::new(device);
            model.first.weight = match device.rank() {
                0 => Param::from_data(weight_data([4, 6]), device),
                _ => Param::from_tensor(Tensor::from_data(weight_data([4, 6]), device)),
            };
            model
        });
        let what = format!("parameters born differently, stage {stage}");
        let error = error(&what, run, NEAR + SOON);
        assert_says(&what, &error, &["every rank"]);
    }
}

// ---- (g), (h) configurations ----

#[test]
fn a_bucket_smaller_than_the_world() {
    let few = ZeroConfig { reduce_bucket_size: 2, ..config(Stage::Gradients) };
    let what = "a bucket smaller than the world";
    let error = error::<()>(what, outcome(3, few, FAR, |_| panic!("no rank starts")), SOON);
    assert_says(what, &error, &["reduce_bucket_size is 2", "3 ranks", "raise reduce_bucket_size"]);
}

#[test]
fn no_ranks() {
    let error = error::<()>("no ranks", outcome(0, config(Stage::Gradients), FAR, |_| panic!("no rank starts")), SOON);
    assert_says("no ranks", &error, &["cannot run 0 ranks", "at least 1"]);
}

// ---- models that are built anew ----

/// The bytes that a step sends do not grow with the number of models that were built and dropped before.
#[test]
fn models_that_were_dropped_cost_nothing() {
    for stage in [Stage::DataParallel, Stage::Parameters] {
        // What is gathered ahead is counted whether it is used or not.
        let config = ZeroConfig { prefetch_bucket_size: 0, ..config(stage) };
        let (sent, _) = outcome(2, config, FAR, |device| {
            let mut sent = Vec::new();
            for _ in 0..12 {
                let model = prepare::<Ad, _>(Net::new(&device), &device);
                let before = zero_burn::stats::rank_stats::<Flex>().wire_bytes.total();
                let model = step(model, &mut SgdConfig::new().init(), &device, 0);
                let first = model.loss(batch(&device, 1), true).into_scalar();
                assert!(first.is_finite());
                sent.push(zero_burn::stats::rank_stats::<Flex>().wire_bytes.total() - before);
            }
            Ok(sent)
        });
        for sent in sent.unwrap() {
            assert_eq!(sent[4], sent[11], "bytes of a step, stage {stage}: {sent:?}");
        }
    }
}

// ---- replicas that differ ----

/// Makes four steps, with replicas checked before every `every` updates; after the first, rank `odd` changes a weight.
fn a_rank_edits(stage: Stage, world: usize, odd: Option<usize>, every: u64) -> (Result<Vec<f32>, String>, Duration) {
    let config = ZeroConfig { check_replicas: every, ..config(stage) };
    outcome(world, config, FAR, move |device| {
        let mut model = prepare::<Ad, _>(Net::new(&device), &device);
        let mut optimizer = AdamWConfig::new().init();
        for n in 0..4 {
            model = step(model, &mut optimizer, &device, n);
            if n == 0 && odd == Some(device.rank()) {
                let weight = model.second.weight;
                model.second.weight = weight.map(|weight| Tensor::from_inner(weight.inner() * 1.5).require_grad());
                mark::<Ad, _>(&model);
            }
        }
        Ok(model.loss(batch(&device, 0), true).into_scalar())
    })
}

#[test]
fn a_replica_that_was_changed_by_hand_is_named() {
    for stage in [Stage::DataParallel, Stage::OptimizerState, Stage::Gradients] {
        for (world, odd, names) in
            [(2, 1, "rank(s) 1 differs from rank(s) 0"), (3, 0, "rank(s) 0 differs from rank(s) 1, 2")]
        {
            for every in [1, 3] {
                let what = format!("changed on rank {odd} of {world}, stage {stage}, every {every}");
                let error = error(&what, a_rank_edits(stage, world, Some(odd), every), SOON);
                let phrases = ["replicas differ before update 2", "second.weight [6, 4]", names, "check_replicas"];
                assert_says(&what, &error, &phrases);
            }
        }
    }
    for stage in Stage::ALL {
        for world in [1, 2] {
            let (right, _) = a_rank_edits(stage, world, None, 1);
            let (unchecked, _) = a_rank_edits(stage, world, None, 0);
            assert_eq!(right.unwrap(), unchecked.unwrap(), "a check changes nothing, stage {stage}");
        }
    }
}
