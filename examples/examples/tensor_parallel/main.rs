//! `cargo run --release --example tensor_parallel -- --data 2 --tensor 2 --stage 3`
//!
//! ZeRO along one axis of a mesh, tensor parallelism along the other: blocks of GPT-2's size are split over `--tensor`
//! ranks, and each part is sharded over `--data` ranks. Losses equal those of `--tensor 1` to 1e-5, as sums have
//! another order. Ranks are threads or processes: `zero launch` and torchrun start it like any program.

mod mlp;

use std::path::PathBuf;
use std::process::ExitCode;

use burn::backend::Autodiff;
use burn::prelude::*;
use burn_flex::Flex;
use clap::Parser;
use mlp::{Mlp, TENSOR};
use zero_burn::config::ZeroConfig;
use zero_burn::launch::launch;
use zero_burn::optim::{Fused, Rule};
use zero_burn::parallel::{Group, GroupBackend};
use zero_burn::stats::all_gather;
use zero_burn::{Zero, ranks};
use zero_core::checkpoint::{Check, Checkpoint, SaveOptions};
use zero_core::random::Draws;
use zero_core::{Axes, Stage};
use zero_train::engine::{EngineConfig, EngineError, Parts, Step, ZeroEngine};
use zero_train::schedule::Schedule;
use zero_train::{TrainError, exit};

type B = Autodiff<Zero<Flex>>;

/// Tensor parallelism within ZeRO data parallelism.
#[derive(Parser)]
struct Options {
    /// Number of ranks on the data axis
    #[arg(long, default_value_t = 2)]
    data: usize,
    /// Number of ranks on the tensor axis
    #[arg(long, default_value_t = 2)]
    tensor: usize,
    /// ZeRO stage
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(0..=3))]
    stage: u8,
    /// Width of the blocks
    #[arg(long, default_value_t = 768)]
    width: usize,
    /// Number of blocks
    #[arg(long, default_value_t = 2)]
    blocks: u64,
    /// Total number of updates
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Save the last step to this folder, in one subfolder per part of the tensor axis, and resume from there
    #[arg(long)]
    save: Option<PathBuf>,
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    blocks: Vec<Mlp<B>>,
}

impl<B: GroupBackend> Model<B> {
    fn forward(&self, x: Tensor<B, 2>, tensor: &Group) -> Tensor<B, 2> {
        self.blocks.iter().fold(x, |x, block| block.forward(x, tensor))
    }
}

/// Rows in the batch of one data rank.
const ROWS: usize = 8;

/// Returns random rows, and each shifted by one as the target.
fn batch<B: Backend>(step: usize, rank: usize, width: usize, device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let mut draws = Draws::new(2).fork(step as u64).fork(rank as u64);
    let values: Vec<f32> = (0..ROWS * width).map(|_| draws.unit() as f32 - 0.5).collect();
    let x = Tensor::<B, 1>::from_floats(&*values, device).reshape([ROWS, width]);
    let y = Tensor::cat(vec![x.clone().narrow(1, 1, width - 1), x.clone().narrow(1, 0, 1)], 1);
    (x, y)
}

fn main() -> ExitCode {
    exit(run())
}

fn run() -> Result<(), TrainError> {
    let Options { data, tensor, stage, width, blocks, steps, save } = Options::parse();
    if tensor == 0 || !(4 * width).is_multiple_of(tensor) {
        let expected = format!("expected a number that divides the {} columns of a block", 4 * width);
        return Err(TrainError::Option { option: "tensor", got: tensor.to_string(), expected });
    }
    let axes = Axes::new(&[(Axes::DATA, data), (TENSOR, tensor)]);
    launch::<Flex, _, TrainError>(
        data * tensor,
        &ZeroConfig { axes, ..ZeroConfig::new(Stage::ALL[usize::from(stage)]) },
        &Default::default(),
        |device| {
            let group = ranks::group::<Flex>(TENSOR);
            let place = (group.rank(), group.world());
            let model = Model { blocks: (0..blocks).map(|number| Mlp::new(width, number, place, &device)).collect() };
            let config =
                EngineConfig { clipping: Some(0.5), schedule: Schedule::Constant(1e-3), ..EngineConfig::default() };
            let mut engine = ZeroEngine::<B, _, _>::initialize(model, Fused::new(Rule::adamw()), config, &device)?;
            engine.model().blocks.iter().for_each(Mlp::tell_replicated);
            if let Some(save) = &save
                && let Some(latest) =
                    ranks::find_latest::<Flex>(save, Check::Contents).map_err(EngineError::from)?.checkpoint
            {
                engine.load(&Checkpoint::open(&latest).map_err(EngineError::from)?, Parts::All)?;
            }
            for step in engine.steps()..steps {
                let (x, y) = batch::<B>(step, device.rank(), width, &device);
                let loss = engine.forward(|model| (model.forward(x, &group) - y).powf_scalar(2.0).mean());
                let value = f64::from(loss.clone().into_scalar());
                engine.backward(loss);
                let Step::Updated(update) = engine.step()? else { continue };
                let losses = all_gather::<Flex>(&[value]);
                if ranks::is_main_process::<Flex>() {
                    let mean = losses.iter().map(|rank| rank[0]).sum::<f64>() / losses.len() as f64;
                    println!("step {}: loss {mean:.9}, gradient norm {:.9}", update.step, update.grad_norm);
                }
            }
            if let Some(save) = &save {
                engine.save(save, engine.steps() as u64, Default::default(), &SaveOptions::default())?;
            }
            Ok(())
        },
    )?;
    Ok(())
}
