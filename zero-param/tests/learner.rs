//! Burn's `Learner` with `ZeroStrategy`, compared with Burn's own training on one device: `cargo test --features train --test learner`.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::{Lora, Module};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use burn_optim::{AdamWConfig, LambConfig, ModuleOptimizer, MuonConfig, SgdConfig};
use burn_train::metric::LossMetric;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    EarlyStoppingStrategy, InferenceStep, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep, TrainingStrategy,
};
use common::{Filled, config, device, filled, numbers, weights};
use parking_lot::Mutex;
use zero_core::Stage;
use zero_param::{OptimizerConfig, ZeroConfig, ZeroStrategy};

const WIDTH: usize = 8;
const ITEMS: usize = 24;
const EPOCHS: usize = 2;

/// The bits of losses, keyed by whether they are of training and by the batch's first item.
type Losses = BTreeMap<(bool, u64), Vec<f32>>;

/// Losses recorded by the models of this process. The only test here takes them after each run.
static LOSSES: Mutex<Losses> = Mutex::new(Losses::new());

/// First item of the batch at which a model panics.
static CURSED: AtomicU64 = AtomicU64::new(u64::MAX);

#[derive(Debug, Clone)]
struct Batch {
    first: u64,
    x: Tensor<2>,
    y: Tensor<2>,
}

struct Rows;

impl Batcher<u64, Batch> for Rows {
    fn batch(&self, items: Vec<u64>, device: &Device) -> Batch {
        let rows = |salt: u64| {
            let row = |&item: &u64| {
                let mut next = numbers(2 * item + salt);
                (0..WIDTH).map(|_| next()).collect::<Vec<f32>>()
            };
            let values: Vec<f32> = items.iter().flat_map(row).collect();
            Tensor::from_data(TensorData::new(values, [items.len(), WIDTH]), device)
        };
        Batch { first: items[0], x: rows(0), y: rows(1) }
    }
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new() -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device());
        filled(Self { first: linear(), second: linear() })
    }

    fn output(&self, Batch { first, x, y }: Batch, is_training: bool) -> RegressionOutput {
        assert!(first != CURSED.load(Ordering::Relaxed), "out of luck");
        let output = self.second.forward(relu(self.first.forward(x)));
        let loss = (output.clone() - y.clone()).square().mean();
        let value = loss.clone().into_data().iter::<f32>().next().unwrap();
        LOSSES.lock().entry((is_training, first)).or_default().push(value);
        RegressionOutput::new(loss, output, y)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;
    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.output(batch, true);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;
    fn step(&self, batch: Batch) -> RegressionOutput {
        self.output(batch, false)
    }
}

fn loader(items: Vec<u64>, batch: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows).batch_size(batch).build(InMemDataset::new(items))
}

/// Returns batches of `batch` items of each of `ranks` ranks, so that one device's batch consists of theirs.
fn interleaved(ranks: usize, batch: usize) -> Vec<u64> {
    let of_rank = ITEMS / ranks;
    let step = |first: usize| {
        (0..ranks).flat_map(move |rank| (0..batch).map(move |row| (rank * of_rank + first + row) as u64))
    };
    (0..of_rank).step_by(batch).flat_map(step).collect()
}

fn learn(
    items: Vec<u64>,
    batch: usize,
    optimizer: ModuleOptimizer,
    strategy: Option<TrainingStrategy<Net>>,
    adjust: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> (Losses, LearningResult<Net>) {
    learn_from(Net::new(), items, batch, optimizer, strategy, adjust)
}

fn learn_from(
    net: Net,
    items: Vec<u64>,
    batch: usize,
    optimizer: ModuleOptimizer,
    strategy: Option<TrainingStrategy<Net>>,
    adjust: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> (Losses, LearningResult<Net>) {
    LOSSES.lock().clear();
    let dir = tempfile::tempdir().unwrap();
    let valid = (100..108).collect();
    let mut training = SupervisedTraining::new(dir.path(), loader(items, batch), loader(valid, batch))
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .with_application_logger(None)
        .num_epochs(EPOCHS);
    if let Some(strategy) = strategy {
        training = training.with_training_strategy(strategy);
    }
    let result = adjust(training).launch(Learner::new(net, optimizer, 1e-2));
    let losses: Losses = std::mem::take(&mut LOSSES.lock());
    if result.error.is_none() && result.interrupted.is_none() {
        // The metrics have the losses of all ranks.
        let told = std::fs::read_to_string(dir.path().join("train/epoch-1/Loss.log")).unwrap();
        let told: Vec<f32> = told.lines().filter_map(|line| line.split(',').next()?.parse().ok()).collect();
        for (_, losses) in losses.iter().filter(|((is_training, _), _)| *is_training) {
            assert!(told.contains(&losses[0]), "{} is not of {told:?}", losses[0]);
        }
    }
    (losses, result)
}

#[derive(Clone)]
struct AfterTheFirst;

impl EarlyStoppingStrategy for AfterTheFirst {
    fn should_stop(&mut self, _: usize, _: &EventStoreClient) -> bool {
        true
    }
}

fn zero(ranks: usize, stage: Stage) -> Option<TrainingStrategy<Net>> {
    Some(ZeroStrategy::new(ranks, config(stage), adamw()).into())
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

fn close(a: f32, b: f32) -> bool {
    (a - b).abs() <= 1e-6 * b.abs().max(1.0)
}

/// A single test: losses of all models of the process are in one place.
#[test]
fn a_learner_trains_as_on_one_device() {
    const BATCH: usize = 4;
    let all: Vec<u64> = (0..ITEMS as u64).collect();

    let (plain, result) = learn(all.clone(), BATCH, adamw().init(), None, |training| training);
    let plain_weights = weights(&result.model.train());
    assert_eq!(plain.values().map(Vec::len).sum::<usize>(), EPOCHS * (ITEMS + 8) / BATCH);
    for stage in Stage::ALL {
        let (losses, result) = learn(all.clone(), BATCH, adamw().init(), zero(1, stage), |training| training);
        assert!(result.error.is_none(), "{}", result.error.unwrap());
        assert_eq!(losses, plain, "one rank at stage {stage}");
        assert_eq!(weights(&result.model.train()), plain_weights, "one rank at stage {stage}");
    }

    let (whole, result) = learn(interleaved(2, BATCH), 2 * BATCH, adamw().init(), None, |training| training);
    let whole_weights = weights(&result.model.train());
    let mut first: Option<Losses> = None;
    for stage in Stage::ALL {
        let (losses, result) = learn(all.clone(), BATCH, adamw().init(), zero(2, stage), |training| training);
        assert!(result.error.is_none(), "{}", result.error.unwrap());
        for (&(is_training, item), of_whole) in whole.iter().filter(|((is_training, _), _)| *is_training) {
            let of = |item: u64| &losses[&(is_training, item)];
            let (a, b) = (of(item), of(item + ITEMS as u64 / 2));
            assert_eq!((a.len(), b.len()), (EPOCHS, EPOCHS));
            let means = a.iter().zip(b).map(|(a, b)| (a + b) / 2.0);
            assert!(means.zip(of_whole).all(|(mean, &whole)| close(mean, whole)), "stage {stage}, item {item}");
        }
        let pairs = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).all(|(&a, &b)| close(a, b));
        assert!(weights(&result.model.train()).values().zip(whole_weights.values()).all(pairs), "stage {stage}");
        assert_eq!(&losses, first.get_or_insert_with(|| losses.clone()), "the bits of stage {stage}");
    }

    // LAMB visits the module twice, and its ratios are of full parameters.
    let lamb = LambConfig::new().with_weight_decay(0.1);
    let (_, result) = learn(interleaved(2, BATCH), 2 * BATCH, lamb.init(), None, |training| training);
    let whole = weights(&result.model.train());
    let strategy = || Some(ZeroStrategy::new(2, config(Stage::Parameters), lamb.clone()).into());
    let (_, result) = learn(all.clone(), BATCH, lamb.init(), strategy(), |training| training);
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    let trained = weights(&result.model.train());
    assert!(trained.values().flatten().zip(whole.values().flatten()).all(|(&a, &b)| close(a, b)), "LAMB");

    // LoRA: on one device the module has Burn's adapters.
    let lora = Filled(Lora::new(2, 4.0));
    let adapted = || Net::new().apply_reparameterization(lora.clone());
    let merged = |net: Net| weights(&net.materialize().train());
    for (ranks, items) in [(1, all.clone()), (2, interleaved(2, BATCH))] {
        let (_, result) = learn_from(adapted(), items, ranks * BATCH, adamw().init(), None, |training| training);
        let plain = merged(result.model);
        assert_ne!(plain, weights(&Net::new()), "the adapters train");
        for stage in Stage::ALL {
            let strategy = ZeroStrategy::new(ranks, config(stage), adamw()).with_lora(lora.clone());
            // The model may be frozen already.
            let net = Net::new().freeze();
            let strategy = Some(strategy.into());
            let (_, result) = learn_from(net, all.clone(), BATCH, adamw().init(), strategy, |training| training);
            assert!(result.error.is_none(), "{}", result.error.unwrap());
            let trained = merged(result.model);
            let is_close = |(a, b): (&f32, &f32)| close(*a, *b);
            assert!(trained.values().flatten().zip(plain.values().flatten()).all(is_close), "LoRA at stage {stage}");
        }
    }

    // Micro-batches, with fewer in the last update; ranks whose parts differ in length.
    let odd: Vec<u64> = (0..20).collect();
    let accumulated = |training: SupervisedTraining<Net>| training.grads_accumulation(2);
    let (plain, _) = learn(odd.clone(), BATCH, adamw().init(), None, accumulated);
    let (losses, _) = learn(odd.clone(), BATCH, adamw().init(), zero(1, Stage::Parameters), accumulated);
    assert_eq!(losses, plain, "micro-batches");
    let (losses, result) =
        learn((0..17).collect(), BATCH, adamw().init(), zero(2, Stage::Parameters), |training| training);
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    assert_eq!(losses.keys().filter(|(is_training, _)| *is_training).count(), 5, "2 batches and 3");

    // Events that end a run early, on all ranks.
    let early = |training: SupervisedTraining<Net>| training.early_stopping(AfterTheFirst);
    let (losses, result) = learn(all.clone(), BATCH, adamw().init(), zero(2, Stage::Parameters), early);
    assert!(result.error.is_none() && losses.values().all(|losses| losses.len() == 1), "one epoch");
    let stopped = |training: SupervisedTraining<Net>| {
        training.interrupter().stop(Some("enough"));
        training
    };
    let (losses, result) = learn(all.clone(), BATCH, adamw().init(), zero(2, Stage::Parameters), stopped);
    assert!(losses.is_empty() && result.interrupted.is_some(), "no step");

    // A panic on rank 1, in training and in validation, is the run's error.
    for cursed in [16, 104] {
        CURSED.store(cursed, Ordering::Relaxed);
        let (_, result) = learn(all.clone(), BATCH, adamw().init(), zero(2, Stage::Parameters), |training| training);
        let told = result.error.expect("it has panicked").to_string();
        assert!(told.contains("rank 1") && told.contains("out of luck"), "{told}");
        assert_eq!(weights(&result.model.train()), weights(&Net::new()), "the module that came in");
    }
    CURSED.store(u64::MAX, Ordering::Relaxed);

    // Settings that are refused before the first step.
    let named = |optimizer: &dyn Fn() -> Option<TrainingStrategy<Net>>, inner: ModuleOptimizer| {
        let (losses, result) = learn(all.clone(), BATCH, inner, optimizer(), |training| training);
        assert!(losses.is_empty(), "no step");
        result.error.expect("it is refused").to_string()
    };
    let told = named(&|| zero(2, Stage::Parameters), SgdConfig::new().init());
    assert!(told.contains("differs from the learner's"), "{told}");
    let told =
        named(&|| zero(2, Stage::Parameters), AdamWConfig::new().with_beta_2(0.99).with_weight_decay(0.1).init());
    assert!(told.contains("differs from the learner's"), "{told}");
    let muon = || -> Option<TrainingStrategy<Net>> {
        Some(ZeroStrategy::new(2, ZeroConfig::new(Stage::Parameters), MuonConfig::new()).into())
    };
    let told = named(&muon, MuonConfig::new().init());
    assert!(told.contains("Muon"), "{told}");
    let saving = |training: SupervisedTraining<Net>| training.with_default_checkpointers();
    let (losses, result) = learn(all.clone(), BATCH, adamw().init(), zero(2, Stage::Parameters), saving);
    assert!(losses.is_empty() && result.error.unwrap().to_string().contains("checkpointers"));

    // The learner may have the fused optimizer: its bits are Burn's.
    let fused = adamw().elementwise().unwrap();
    let (losses, result) = learn(all, BATCH, fused, zero(2, Stage::Parameters), |training| training);
    assert!(result.error.is_none() && Some(losses) == first);
}
