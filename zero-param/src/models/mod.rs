//! Language models on Burn 0.22, and the command that trains them (feature `models`).
//!
//! A model has the parameters of its namesake in `zero-models`: the same paths, shapes and initial values. So both versions of Burn read each
//! other's checkpoints and Hugging Face's folders. The configurations are those of `zero-models`.

mod bert;
mod build;
mod gpt2;
mod layers;
mod llama;

use std::path::Path;
use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use zero_models::{BertConfig, CausalFamily, Gpt2Config, LlamaConfig, ModelError};
use zero_train::data::TokenBatch;
use zero_train::language::{BertTask, CausalTask, Options, Program, TaskChoice};
use zero_train::trainer::{Rows, Trainer};
use zero_train::{Result, TrainError};

pub use bert::{Bert, BertBatch};
pub use gpt2::Gpt2;
pub use llama::Llama;

use crate::trainer::Burn022;

/// A model that predicts the next token.
pub trait CausalModel: Module + Sized {
    /// Its configuration.
    type Config: CausalFamily;

    /// Builds a model with the weights in a Hugging Face folder, or with initial weights by `seed`. Weights are read or drawn when `shard`
    /// uses them, one parameter at a time.
    ///
    /// # Errors
    ///
    /// For a configuration with features that the model lacks, or a folder of another model.
    fn build(config: &Self::Config, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError>;

    /// Returns the mean cross-entropy in nats of predicting each label `[b, t]` from the tokens `[b, t]` before it in its row.
    fn loss(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1>;
}

impl CausalModel for Gpt2 {
    type Config = Gpt2Config;

    fn build(config: &Gpt2Config, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let fresh = config.clone();
        build::begin(Gpt2::new(config, device)?, &config.clone().into(), weights, move |each| fresh.fresh(seed, each))
    }

    fn loss(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
        Gpt2::loss(self, ids_bt, labels_bt)
    }
}

impl CausalModel for Llama {
    type Config = LlamaConfig;

    fn build(config: &LlamaConfig, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let fresh = config.clone();
        build::begin(Llama::new(config, device)?, &config.clone().into(), weights, move |each| fresh.fresh(seed, each))
    }

    fn loss(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
        Llama::loss(self, ids_bt, labels_bt)
    }
}

impl Bert {
    /// Builds a model with the weights in a Hugging Face folder, or with initial weights by `seed`, like [`CausalModel::build`].
    ///
    /// # Errors
    ///
    /// The errors of [`CausalModel::build`].
    pub fn build(config: &BertConfig, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let fresh = config.clone();
        build::begin(Bert::new(config, device)?, &config.clone().into(), weights, move |each| fresh.fresh(seed, each))
    }
}

/// Trains the model that the options select, like `zero_train::language::main` on Burn 0.21.
pub fn main(options: &Options, program: &Program<'_>) -> ExitCode {
    match options.task_for(program) {
        TaskChoice::BertPretraining => train_bert(options, program),
        TaskChoice::CausalLm if options.is_llama(program) => train_causal::<Llama>(options, program),
        TaskChoice::CausalLm => train_causal::<Gpt2>(options, program),
        other => {
            let task =
                clap::ValueEnum::to_possible_value(&other).map_or_else(String::new, |name| name.get_name().into());
            let expected = "expected causal-lm or bert-pretraining on Burn 0.22; use `zero train`, on Burn 0.21".into();
            let error = TrainError::Option { option: "task", got: task, expected };
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn train_causal<M: CausalModel>(options: &Options, program: &Program<'_>) -> ExitCode {
    let integration = Burn022::new(
        |task: &CausalTask<M::Config>, seed, device| Ok(M::build(task.config(), task.weights(), seed, device)?),
        |task, model: &M, rows, device| {
            let TokenBatch { width, input_ids, labels } = task.rows().batch(rows)?;
            let of = |ids| Tensor::from_data(TensorData::new(ids, [rows.len(), width]), device);
            Ok(model.loss(of(input_ids), of(labels)))
        },
    )
    .adapted_by(CausalTask::initial_adapter);
    trainer(Trainer::on(integration, &options.train), program)
        .main_with(|setup| CausalTask::new(options, program, setup))
}

fn train_bert(options: &Options, program: &Program<'_>) -> ExitCode {
    let integration = Burn022::new(
        |task: &BertTask, seed, device| Ok(Bert::build(task.config(), task.weights(), seed, device)?),
        |task, model: &Bert, rows, device| Ok(model.losses(batch(task, rows, device)?)),
    )
    .evaluated_by(|task, model, rows, device| {
        let [predicted, related, tokens, pairs] = model.measure(batch(task, rows, device)?);
        let losses = [("loss", predicted), ("loss", related)];
        Ok([&losses[..], &[("masked_accuracy", tokens), ("next_sentence_accuracy", pairs)]].concat())
    })
    .adapted_by(BertTask::initial_adapter);
    trainer(Trainer::on(integration, &options.train), program).main_with(|_| BertTask::new(options, program))
}

fn trainer<'a, F>(trainer: Trainer<'a, F>, program: &Program<'a>) -> Trainer<'a, F> {
    match program.allocator {
        Some(allocator) => trainer.allocator(allocator),
        None => trainer,
    }
}

fn batch(task: &BertTask, rows: &Rows, device: &Device) -> Result<BertBatch> {
    let (batch, seq) = task.batch(rows)?;
    let of = |numbers| Tensor::from_data(TensorData::new(numbers, [rows.len(), seq]), device);
    let list = |numbers: Vec<i32>| Tensor::from_data(TensorData::from(&*numbers), device);
    let labels = batch.predicted_positions.iter().map(|&row| batch.labels[row as usize]).collect();
    Ok(BertBatch {
        ids_bt: of(batch.input_ids),
        types_bt: of(batch.token_type_ids),
        mask_bt: of(batch.attention_mask),
        predicted_m: list(batch.predicted_positions),
        labels_m: list(labels),
        follows_b: list(batch.next_sentence_labels),
    })
}
