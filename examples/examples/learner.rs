//! Burn's own `Learner`, on any number of ranks:
//!
//! ```text
//! cargo run --release --example learner -- 2
//! ```
//!
//! Trains a small classifier of points on two spirals. Only the lines marked `Zero` differ from a program for one device.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::optim::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::record::CompactRecorder;
use burn::tensor::activation::tanh;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining,
    TrainOutput, TrainStep,
};
use burn_flex::Flex;
use zero_burn::{Zero, config::ZeroConfig, launch::launch}; // Zero
use zero_core::Stage; // Zero
use zero_train::learner::ZeroStrategy; // Zero

type B = burn::backend::Autodiff<Zero<Flex>>; // Zero: was Autodiff<Flex>

/// A point and the spiral it belongs to.
#[derive(Clone, Debug)]
struct Point {
    at: [f32; 2],
    spiral: i32,
}

fn points(count: usize, offset: f32) -> InMemDataset<Point> {
    let point = |number: usize| {
        let (spiral, t) = ((number % 2) as i32, 0.5 + (number as f32 + offset) / count as f32 * 8.0);
        let angle = t + spiral as f32 * std::f32::consts::PI;
        Point { at: [t * angle.cos() / 8.5, t * angle.sin() / 8.5], spiral }
    };
    InMemDataset::new((0..count).map(point).collect())
}

#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    /// `[points, 2]`
    at: Tensor<B, 2>,
    /// `[points]`
    spirals: Tensor<B, 1, Int>,
}

#[derive(Clone)]
struct Points;

impl<B: Backend> Batcher<B, Point, Batch<B>> for Points {
    fn batch(&self, points: Vec<Point>, device: &B::Device) -> Batch<B> {
        let at: Vec<f32> = points.iter().flat_map(|point| point.at).collect();
        let spirals: Vec<i32> = points.iter().map(|point| point.spiral).collect();
        let len = points.len();
        Batch {
            at: Tensor::from_data(TensorData::new(at, [len, 2]), device),
            spirals: Tensor::from_data(TensorData::new(spirals, [len]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Spirals<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    head: Linear<B>,
}

impl<B: Backend> Spirals<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(2, 64).init(device),
            second: LinearConfig::new(64, 64).init(device),
            head: LinearConfig::new(64, 2).init(device),
        }
    }

    fn classify(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        let x = tanh(self.first.forward(batch.at));
        let logits = self.head.forward(tanh(self.second.forward(x)));
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        ClassificationOutput::new(loss.forward(logits.clone(), batch.spirals.clone()), logits, batch.spirals)
    }
}

impl<B: AutodiffBackend> TrainStep for Spirals<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Spirals<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

fn loader<B: Backend>(points: InMemDataset<Point>, batch: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    DataLoaderBuilder::new(Points).batch_size(batch).shuffle(7).build(points)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ranks: usize = std::env::args().nth(1).map_or(Ok(2), |ranks| ranks.parse())?;
    let directory = std::env::temp_dir().join("zero-learner");
    launch::<Flex, _, String>(ranks, &ZeroConfig::new(Stage::Parameters), &Default::default(), |device| {
        // Zero: the batch size is per rank, so that the global batch is 64.
        let batch = 64 / ranks;
        let training = SupervisedTraining::new(
            &directory,
            loader::<B>(points(4096, 0.0), batch),
            loader(points(1024, 0.5), batch),
        )
        .metrics((LossMetric::<Flex>::new(), AccuracyMetric::<Flex>::new()))
        .early_stopping(MetricEarlyStoppingStrategy::new(
            &LossMetric::<Flex>::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 3 },
        ))
        .num_epochs(10)
        .summary();
        let scheduler = CosineAnnealingLrSchedulerConfig::new(1e-2, 640).init()?;
        let learner = Learner::new(Spirals::<B>::new(&device), AdamWConfig::new().init(), scheduler);
        // Zero: replaces `with_file_checkpointer`.
        let strategy = ZeroStrategy::new(&device)
            .with_clipping(1.0)
            .with_checkpoints(directory.join("checkpoint"), CompactRecorder::new());
        strategy.attach(training).launch(learner);
        Ok(())
    })?;
    Ok(())
}
