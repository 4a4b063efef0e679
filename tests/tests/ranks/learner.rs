//! Burn's `Learner` on ranks: the bits of a plain loop on the same number of ranks, and the numbers of one rank.
//!
//! `cargo test -p zero-tests --test ranks learner -- --nocapture` prints the differences that are asserted on.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::{AutodiffModule, Module};
use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::lr_scheduler::constant::ConstantLr;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer, adaptor::OptimizerAdaptor};
use burn::record::{CompactRecorder, FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::activation::relu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Device as DeviceOf, Int, Tensor, TensorData};

use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::store::{Aggregate, EventStoreClient, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, EarlyStoppingStrategy, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_flex::Flex;
use zero_burn::config::{Float, ZeroConfig};
use zero_burn::gathered::gathered;
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::module::{collect_grads, mark, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;
use zero_train::learner::{SilentRenderer, ZeroStrategy};

type B = burn::backend::Autodiff<Zero<Flex>>;
type Device = ZeroDevice<burn_flex::FlexDevice>;

const FEATURES: usize = 16;
const CLASSES: usize = 4;
const BATCH: usize = 8;
const STEPS: usize = 6;

/// A row of the data set.
#[derive(Clone, Debug)]
struct Row {
    features: [f32; FEATURES],
    class: i32,
}

fn row(number: usize) -> Row {
    let class = number % CLASSES;
    let features = core::array::from_fn(|i| {
        let noise = ((number * 31 + i * 17) % 23) as f32 / 23.0 - 0.5;
        if i % CLASSES == class { 1.0 + noise } else { noise }
    });
    Row { features, class: class as i32 }
}

/// Orders rows so that the contiguous part of each of `world` ranks holds its share of each global batch of `BATCH * 2`
/// rows.
fn rows(world: usize) -> Vec<Row> {
    let (global, per_rank) = (BATCH * 2, BATCH * 2 / world);
    (0..world)
        .flat_map(|rank| {
            (0..STEPS).flat_map(move |step| (0..per_rank).map(move |i| step * global + rank * per_rank + i))
        })
        .map(row)
        .collect()
}

#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    features: Tensor<B, 2>,
    classes: Tensor<B, 1, Int>,
}

#[derive(Clone)]
struct Rows;

impl<B: Backend> Batcher<B, Row, Batch<B>> for Rows {
    fn batch(&self, rows: Vec<Row>, device: &DeviceOf<B>) -> Batch<B> {
        let features: Vec<f32> = rows.iter().flat_map(|row| row.features).collect();
        let classes: Vec<i32> = rows.iter().map(|row| row.class).collect();
        let len = rows.len();
        Batch {
            features: Tensor::from_data(TensorData::new(features, [len, FEATURES]), device),
            classes: Tensor::from_data(TensorData::new(classes, [len]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    hidden: Linear<B>,
    head: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    fn new(device: &DeviceOf<B>) -> Self {
        Self {
            hidden: LinearConfig::new(FEATURES, 33).init(device),
            head: LinearConfig::new(33, CLASSES).with_bias(false).init(device),
        }
    }

    fn classify(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        let features = batch.features.cast(self.hidden.weight.val().dtype());
        let logits = self.head.forward(relu(self.hidden.forward(features)));
        let loss = CrossEntropyLossConfig::new().init(&logits.device()).forward(logits.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, logits, batch.classes)
    }
}

impl<B: AutodiffBackend> TrainStep for Classifier<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Classifier<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

fn loader<B: Backend>(rows: Vec<Row>, batch: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    DataLoaderBuilder::new(Rows).batch_size(batch).build(InMemDataset::new(rows))
}

fn parameters<M: AutodiffModule<B>>(model: M) -> Vec<f32> {
    gathered::<B, _, _>(model, |_| true, None, |all| all.iter().flat_map(|one| one.values.clone()).collect()).1
}

fn inner_parameters(model: Classifier<Zero<Flex>>) -> Vec<f32> {
    let all = [model.hidden.weight.val().into_data(), model.head.weight.val().into_data()];
    let bias = model.hidden.bias.expect("the hidden layer has a bias").val().into_data();
    let [hidden, head] = all;
    [hidden, bias, head].iter().flat_map(|data| data.iter::<f32>()).collect()
}

/// Settings of a learner that differ from the defaults.
#[derive(Clone, Copy, Default)]
struct Setting<'a> {
    accumulation: Option<usize>,
    clipping: Option<f64>,
    checkpoints: Option<&'a Path>,
    resume: Option<usize>,
    fused: bool,
    rows: Option<usize>,
}

/// Trains a learner for `epochs` and returns rank 0's parameters.
fn learner(world: usize, stage: Stage, epochs: usize, setting: Setting<'_>) -> Vec<f32> {
    let directory = tempfile::tempdir().unwrap();
    let results = launch::<Flex, _, String>(world, &ZeroConfig::new(stage), &LaunchOptions::default(), |device| {
        let model = Classifier::<B>::new(&device);
        if setting.fused {
            return Ok(trained(
                model,
                Fused::<B>::new(Rule::adamw()),
                world,
                directory.path(),
                epochs,
                setting,
                &device,
            ));
        }
        let optimizer: OptimizerAdaptor<AdamW, Classifier<B>, B> = AdamWConfig::new().init();
        Ok(trained(model, optimizer, world, directory.path(), epochs, setting, &device))
    })
    .unwrap();
    assert!(results.iter().all(|result| *result == results[0]), "ranks differ");
    results.into_iter().next().unwrap()
}

fn trained<O: Optimizer<Classifier<B>, B> + 'static>(
    model: Classifier<B>,
    optimizer: O,
    world: usize,
    directory: &Path,
    epochs: usize,
    setting: Setting<'_>,
    device: &Device,
) -> Vec<f32> {
    let mut data = rows(world);
    data.truncate(setting.rows.unwrap_or(usize::MAX));
    let batch = BATCH * 2 / world;
    let mut strategy = ZeroStrategy::new(device);
    if let Some(norm) = setting.clipping {
        strategy = strategy.with_clipping(norm);
    }
    if let Some(path) = setting.checkpoints {
        strategy = strategy.with_checkpoints(path, NamedMpkFileRecorder::<FullPrecisionSettings>::new());
    }
    let mut training = SupervisedTraining::new(directory, loader::<B>(data.clone(), batch), loader(data, batch))
        .metrics((LossMetric::<Flex>::new(), AccuracyMetric::<Flex>::new()))
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_application_logger(None)
        .renderer(SilentRenderer)
        .num_epochs(epochs);
    if let Some(count) = setting.accumulation {
        training = training.grads_accumulation(count);
    }
    if let Some(epoch) = setting.resume {
        training = training.checkpoint(epoch);
    }
    let learner = Learner::new(model, optimizer, ConstantLr::new(1e-2));
    inner_parameters(strategy.attach(training).launch(learner).model)
}

/// Trains the same without a learner.
fn plain(world: usize, stage: Stage, epochs: usize) -> Vec<f32> {
    let results = launch::<Flex, _, String>(world, &ZeroConfig::new(stage), &LaunchOptions::default(), |device| {
        let mut model = prepare::<B, _>(Classifier::<B>::new(&device), &device);
        let mut optimizer = AdamWConfig::new().init();
        let (batch, part) = (BATCH * 2 / world, STEPS * BATCH * 2 / world);
        let mine = rows(world)[device.rank() * part..(device.rank() + 1) * part].to_vec();
        for _ in 0..epochs {
            for rows in mine.chunks(batch) {
                let output = model.classify(Rows.batch(rows.to_vec(), &device));
                let grads = GradientsParams::from_grads(output.loss.backward(), &model);
                let grads = collect_grads::<B, _>(grads, &model);
                model = optimizer.step(1e-2, model, grads);
            }
        }
        mark::<B, _>(&model);
        Ok(parameters(model))
    })
    .unwrap();
    results.into_iter().next().unwrap()
}

/// Returns the largest difference, relative to the larger of the numbers and 1e-2.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(b.abs()).max(1e-2)).fold(0.0, f32::max)
}

#[test]
fn a_learner_gives_the_bits_of_a_plain_loop() {
    for (world, stage) in
        [(1, Stage::DataParallel), (2, Stage::DataParallel), (2, Stage::Gradients), (2, Stage::Parameters)]
    {
        assert_eq!(learner(world, stage, 2, Setting::default()), plain(world, stage, 2), "{world} rank(s), {stage:?}");
    }
}

#[test]
fn two_ranks_give_the_numbers_of_one() {
    let one = learner(1, Stage::DataParallel, 2, Setting::default());
    for stage in [Stage::DataParallel, Stage::OptimizerState, Stage::Gradients, Stage::Parameters] {
        let two = learner(2, stage, 2, Setting::default());
        let difference = difference(&one, &two);
        println!("1 rank against 2 at {stage:?}: {difference:e}");
        assert!(difference < 1e-3, "{difference} at {stage:?}");
    }
}

#[test]
fn accumulation_and_clipping_are_those_of_one_rank() {
    let setting = Setting { accumulation: Some(2), clipping: Some(0.5), ..Setting::default() };
    let one = learner(1, Stage::DataParallel, 2, setting);
    let two = learner(2, Stage::Parameters, 2, setting);
    let without = learner(2, Stage::Parameters, 2, Setting { clipping: None, ..setting });
    println!("1 rank against 2: {:e}; clipping changes {:e}", difference(&one, &two), difference(&two, &without));
    assert!(difference(&one, &two) < 1e-3);
    assert!(difference(&two, &without) > 1e-2);
}

/// 33 rows on 2 ranks are 16 and 17: three batches on rank 1, two on rank 0.
#[test]
fn ranks_may_run_out_of_data_at_different_times() {
    learner(2, Stage::Parameters, 2, Setting { rows: Some(33), ..Setting::default() });
}

#[test]
fn a_resumed_learner_goes_on_as_if_it_had_not_stopped() {
    for fused in [false, true] {
        let files = tempfile::tempdir().unwrap();
        let setting = Setting { checkpoints: Some(files.path()), fused, ..Setting::default() };
        let straight = learner(2, Stage::Parameters, 3, setting);
        let resumed = learner(2, Stage::Parameters, 3, Setting { resume: Some(2), ..setting });
        assert_eq!(straight, resumed);
        let files = tempfile::tempdir().unwrap();
        learner(2, Stage::Parameters, 2, Setting { checkpoints: Some(files.path()), fused, ..Setting::default() });
        let alone = learner(
            1,
            Stage::DataParallel,
            3,
            Setting { checkpoints: Some(files.path()), resume: Some(2), fused, ..Setting::default() },
        );
        println!("saved by 2 ranks, resumed by 1: {:e}", difference(&straight, &alone));
        assert!(difference(&straight, &alone) < 1e-3);
    }
}

/// Rank 0's loss is the global batch's, and all ranks stop when it says so.
#[test]
fn metrics_are_of_all_ranks_and_stopping_is_agreed() {
    #[derive(Clone)]
    struct Watch(Arc<Mutex<Vec<(usize, f64)>>>);
    impl EarlyStoppingStrategy for Watch {
        fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
            let loss = store.find_metric("Loss", epoch, Aggregate::Mean, &Split::Valid).expect("the epoch has a loss");
            self.0.lock().unwrap().push((epoch, loss));
            epoch == 2
        }
    }
    let mut seen = Vec::new();
    for world in [1, 2] {
        let losses = Arc::new(Mutex::new(Vec::new()));
        let directory = tempfile::tempdir().unwrap();
        launch::<Flex, _, String>(world, &ZeroConfig::new(Stage::Parameters), &LaunchOptions::default(), |device| {
            let (data, batch) = (rows(world), BATCH * 2 / world);
            let training =
                SupervisedTraining::new(directory.path(), loader::<B>(data.clone(), batch), loader(data, batch))
                    .metric_valid_numeric(LossMetric::<Flex>::new())
                    .early_stopping(Watch(losses.clone()))
                    .with_application_logger(None)
                    .renderer(SilentRenderer)
                    .num_epochs(5);
            let learner = Learner::new(Classifier::<B>::new(&device), AdamWConfig::new().init(), ConstantLr::new(1e-2));
            ZeroStrategy::new(&device).attach(training).launch(learner);
            Ok(())
        })
        .unwrap();
        seen.push(losses.lock().unwrap().clone());
    }
    println!("validation losses of 1 rank and of 2: {seen:?}");
    for (one, two) in seen[0].iter().zip(&seen[1]) {
        assert!(one.0 == two.0 && (one.1 - two.1).abs() < 1e-4, "{seen:?}");
    }
    assert!(seen.iter().all(|epochs| epochs.len() == 2), "{seen:?}");
}

#[test]
fn burns_own_checkpointer_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let error =
        launch::<Flex, (), String>(2, &ZeroConfig::new(Stage::Parameters), &LaunchOptions::default(), |device| {
            let training = SupervisedTraining::new(directory.path(), loader::<B>(rows(2), 8), loader(rows(2), 8))
                .with_file_checkpointer(CompactRecorder::new())
                .with_application_logger(None)
                .renderer(SilentRenderer);
            let learner = Learner::new(Classifier::<B>::new(&device), AdamWConfig::new().init(), ConstantLr::new(1e-2));
            ZeroStrategy::new(&device).attach(training).launch(learner);
            Ok(())
        })
        .unwrap_err();
    assert!(error.to_string().contains("ZeroStrategy::with_checkpoints"), "{error}");
}

/// Trains two ranks at stage 3 with parameters of this type and returns the parameters, or the learner's error.
fn in_16_bit<O: Optimizer<Classifier<B>, B> + 'static>(
    param_dtype: Float,
    optimizer: impl Fn() -> O + Sync,
) -> Result<Vec<f32>, String> {
    let directory = tempfile::tempdir().unwrap();
    let config = ZeroConfig { param_dtype, ..ZeroConfig::new(Stage::Parameters) };
    let results = launch::<Flex, _, String>(2, &config, &LaunchOptions::default(), |device| {
        let model = Classifier::<B>::new(&device);
        Ok(trained(model, optimizer(), 2, directory.path(), 1, Setting::default(), &device))
    });
    results.map(|mut all| all.swap_remove(0)).map_err(|error| error.to_string())
}

#[test]
fn parameters_in_16_bit_need_fp32_masters_and_fp16_a_loss_scale() {
    let burns = || -> OptimizerAdaptor<AdamW, Classifier<B>, B> { AdamWConfig::new().init() };
    let error = in_16_bit(Float::Bf16, burns).unwrap_err();
    assert!(error.contains("keeps no fp32 master weights") && error.contains("zero_burn::optim::Fused"), "{error}");
    for error in [
        in_16_bit(Float::F16, burns).unwrap_err(),
        in_16_bit(Float::F16, || Fused::<B>::new(Rule::adamw())).unwrap_err(),
    ] {
        assert!(error.contains("without a loss scale") && error.contains("use bf16"), "{error}");
    }
    let trained = in_16_bit(Float::Bf16, || Fused::<B>::new(Rule::adamw())).unwrap();
    let whole = learner(2, Stage::Parameters, 1, Setting { fused: true, ..Setting::default() });
    // The same training, to the rounding of bf16.
    let apart = trained.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart > 0.0 && apart < 0.1, "{apart}");
}
