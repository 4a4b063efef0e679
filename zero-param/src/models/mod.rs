//! Language models on Burn 0.22, and the command that trains them and generates text (feature `models`).
//!
//! A model has the parameters of its namesake in `zero-models`: the same paths, shapes and initial values. So both versions of Burn read each
//! other's checkpoints and Hugging Face's folders. The configurations are those of `zero-models`.

mod bart;
mod bert;
mod build;
mod cache;
pub mod generate;
mod gpt2;
mod layers;
mod llama;
pub mod seq2seq;
mod t5;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::activation::log_sigmoid;
use burn::tensor::{Device, Int, Tensor, TensorData};
use zero_models::generate::{Hooks, Sampling};
use zero_models::{BartConfig, BertConfig, BertKind, CausalFamily, Documents, Gpt2Config, LlamaConfig, ModelError};
use zero_train::data::TokenBatch;
use zero_train::language::{
    BertTask, CausalTask, ClassesFamily, ClassesTask, Options, Program, Seq2SeqTask, TaskChoice,
};
use zero_train::trainer::{Rows, Trainer};
use zero_train::{Result, TrainError};

pub use bart::Bart;
pub use bert::{Bert, BertBatch};
pub use cache::KvCache;
pub use gpt2::Gpt2;
pub use llama::Llama;
pub use seq2seq::Seq2SeqModel;
pub use t5::T5;

use layers::classes_loss;

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

    /// Returns the mean cross-entropy in nats of predicting each label `[b, t]` from the tokens `[b, t]` before it in its row, or in its
    /// document if rows are packed.
    fn loss(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>, documents: Option<&Arc<Documents>>) -> Tensor<1>;

    /// Returns the mean loss of each row, `[b]`, like [`loss`](Self::loss) of that row alone.
    fn row_losses(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1>;

    /// Returns the logits `[b, v]` of the token that follows each row. `ids_bt` are the tokens `[b, t]` after those in `cache`, and are
    /// added to it; `t` is 1 unless the cache is empty.
    fn next_logits(&self, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2>;
}

impl CausalModel for Gpt2 {
    type Config = Gpt2Config;

    fn build(config: &Gpt2Config, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        build::begin(Gpt2::new(config, device), &config.clone().into(), weights, seed)
    }

    fn loss(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>, documents: Option<&Arc<Documents>>) -> Tensor<1> {
        Gpt2::loss(self, ids_bt, labels_bt, documents)
    }

    fn row_losses(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
        Gpt2::row_losses(self, ids_bt, labels_bt)
    }

    fn next_logits(&self, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        Gpt2::next_logits(self, ids_bt, cache)
    }
}

impl CausalModel for Llama {
    type Config = LlamaConfig;

    fn build(config: &LlamaConfig, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        build::begin(Llama::new(config, device), &config.clone().into(), weights, seed)
    }

    fn loss(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>, documents: Option<&Arc<Documents>>) -> Tensor<1> {
        Llama::loss(self, ids_bt, labels_bt, documents)
    }

    fn row_losses(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
        Llama::row_losses(self, ids_bt, labels_bt)
    }

    fn next_logits(&self, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        Llama::next_logits(self, ids_bt, cache)
    }
}

impl Bert {
    /// Builds a model with the weights in a Hugging Face folder, or with initial weights by `seed`, like [`CausalModel::build`]. Parameters
    /// of a head that the folder lacks get initial values.
    ///
    /// # Errors
    ///
    /// The errors of [`CausalModel::build`].
    pub fn build(config: &BertConfig, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        build::begin(Bert::new(config, device), &config.clone().into(), weights, seed)
    }
}

/// Trains the model that the options select, like `zero_train::language::main` on Burn 0.21.
pub fn main(options: &Options, program: &Program<'_>) -> ExitCode {
    match options.task_for(program) {
        TaskChoice::BertPretraining => train_bert(options, program),
        TaskChoice::Seq2Seq if options.is_t5(program) => train_seq2seq::<T5>(options, program),
        TaskChoice::Seq2Seq => train_seq2seq::<Bart>(options, program),
        TaskChoice::TextClassification if options.is_bart(program) => {
            let build = |config: &BartConfig, weights: Option<&Path>, seed, device: &Device| {
                <Bart as Seq2SeqModel>::build(config, weights, seed, device)
            };
            train_classes(options, program, build, |_, model, [ids, _, mask]| model.classify(ids, Some(mask)))
        }
        TaskChoice::TextClassification => {
            train_classes(options, program, Bert::build, |config: &BertConfig, model, [ids, types, mask]| {
                // Only BERT knows segments.
                let types = if config.model_type == BertKind::Bert { types } else { types.zeros_like() };
                model.classify(ids, types, mask)
            })
        }
        TaskChoice::CausalLm | TaskChoice::Dpo if options.is_llama(program) => train_causal::<Llama>(options, program),
        TaskChoice::CausalLm | TaskChoice::Dpo => train_causal::<Gpt2>(options, program),
    }
}

/// Returns a tensor `[rows, width]` of numbers, one for each token.
fn tokens(numbers: Vec<i32>, width: usize, device: &Device) -> Tensor<2, Int> {
    let rows = numbers.len() / width.max(1);
    Tensor::from_data(TensorData::new(numbers, [rows, width]), device)
}

fn train_seq2seq<M: Seq2SeqModel>(options: &Options, program: &Program<'_>) -> ExitCode {
    let loss = |task: &Seq2SeqTask<M::Config>, model: &M, rows: &Rows, device: &Device| {
        let batch = task.texts().batch(rows);
        let [ids, mask] = [batch.input_ids, batch.attention_mask].map(|ids| tokens(ids, batch.width, device));
        seq2seq::loss(model, ids, Some(mask), tokens(batch.labels, batch.target_width, device))
    };
    let made = |task: &Seq2SeqTask<M::Config>, model: &M, rows: &Rows, device: &Device| {
        task.generate_by(rows, |texts, how, hooks| {
            Ok(seq2seq::generate_with(model, task.config(), texts, how, device, hooks)?)
        })
    };
    let integration = Burn022::new(
        |task: &Seq2SeqTask<M::Config>, seed, device| Ok(M::build(task.config(), task.weights(), seed, device)?),
        move |task, model: &M, rows, device| Ok(loss(task, model, rows, device)),
    )
    .evaluated_by(move |task, model, rows, device| {
        let loss = loss(task, model, rows, device).into_scalar::<f64>();
        Ok(task.measured(rows, loss, &made(task, model, rows, device)?))
    })
    .predicted_by(move |task, model, rows, device| Ok(Some(task.predictions(rows, made(task, model, rows, device)?))))
    .adapted_by(Seq2SeqTask::initial_adapter);
    trainer(Trainer::on(integration, &options.train), program).main_with(|_| Seq2SeqTask::new(options, program))
}

fn train_classes<M: Module, C: ClassesFamily + 'static>(
    options: &Options,
    program: &Program<'_>,
    build: impl Fn(&C, Option<&Path>, u64, &Device) -> Result<M, ModelError> + Send + Sync + 'static,
    classify: impl Fn(&C, &M, [Tensor<2, Int>; 3]) -> Tensor<2> + Send + Sync + Copy + 'static,
) -> ExitCode {
    let logits = move |task: &ClassesTask<C>, model: &M, rows: &Rows, device: &Device| {
        let batch = task.texts().batch(rows);
        let of = |ids: &Vec<i32>| tokens(ids.clone(), batch.width, device);
        let inputs = [&batch.input_ids, &batch.token_type_ids, &batch.attention_mask].map(of);
        (classify(task.config(), model, inputs), batch.targets)
    };
    let integration = Burn022::new(
        move |task: &ClassesTask<C>, seed, device| Ok(build(task.config(), task.weights(), seed, device)?),
        move |task, model: &M, rows, device| {
            let (logits, targets) = logits(task, model, rows, device);
            Ok(classes_loss(task.texts().problem(), logits, &targets))
        },
    )
    .evaluated_by(move |task, model, rows, device| {
        let (logits, targets) = logits(task, model, rows, device);
        let loss = classes_loss(task.texts().problem(), logits.clone(), &targets).into_scalar::<f64>();
        Ok(task.measured(loss, &logits.into_data().iter::<f64>().collect::<Vec<_>>(), &targets))
    })
    .predicted_by(move |task, model, rows, device| {
        let (logits, targets) = logits(task, model, rows, device);
        Ok(Some(task.predictions(rows, &logits.into_data().iter::<f64>().collect::<Vec<_>>(), &targets)))
    })
    .adapted_by(ClassesTask::initial_adapter);
    trainer(Trainer::on(integration, &options.train), program).main_with(|_| ClassesTask::new(options, program))
}

fn train_causal<M: CausalModel>(options: &Options, program: &Program<'_>) -> ExitCode {
    let row_losses = |task: &CausalTask<M::Config>, model: &M, rows: &Rows, device: &Device| {
        let TokenBatch { width, input_ids, labels, .. } = task.rows().batch(rows)?;
        Ok::<_, TrainError>(model.row_losses(tokens(input_ids, width, device), tokens(labels, width, device)))
    };
    let loss = move |task: &CausalTask<M::Config>, model: &M, rows: &Rows, device: &Device| {
        if let Some(preferences) = task.preferences(rows) {
            return Ok(preference_loss(row_losses(task, model, rows, device)?, preferences).0);
        }
        let TokenBatch { width, input_ids, labels, documents } = task.rows().batch(rows)?;
        let documents = documents.map(|lengths| Arc::new(Documents::new(lengths)));
        Ok(model.loss(tokens(input_ids, width, device), tokens(labels, width, device), documents.as_ref()))
    };
    let answers = |task: &CausalTask<M::Config>,
                   model: &M,
                   prompts: &[Vec<u32>],
                   how: &Sampling,
                   device: &Device,
                   hooks: Hooks<'_>| {
        Ok(generate::generate_with(model, task.trained_config(), prompts, how, device, hooks)?)
    };
    let mut integration = Burn022::new(
        |task: &CausalTask<M::Config>, seed, device| Ok(M::build(task.trained_config(), task.weights(), seed, device)?),
        loss,
    )
    .evaluated_by(move |task, model, rows, device| {
        let Some(preferences) = task.preferences(rows) else {
            let loss = loss(task, model, rows, device)?.into_scalar();
            return task
                .measured_by(rows, loss, |prompts, how, hooks| answers(task, model, prompts, how, device, hooks));
        };
        let (loss, rewards) = preference_loss(row_losses(task, model, rows, device)?, preferences);
        Ok(task.measured(loss.into_scalar(), &rewards.into_data().iter().collect::<Vec<_>>()))
    })
    .predicted_by(move |task, model, rows, device| {
        task.predictions_by(rows, |prompts, how, hooks| answers(task, model, prompts, how, device, hooks))
    })
    .adapted_by(CausalTask::initial_adapter)
    .sampled_by(|task, model: &M, device| {
        task.sample_by(|prompts, how| Ok(generate::generate(model, task.trained_config(), prompts, how, device)?))
    });
    if options.task == Some(TaskChoice::Dpo) {
        integration = integration.reference_by(move |task, model, rows, device| {
            let losses: Vec<f64> = row_losses(task, model, rows, device)?.into_data().iter().collect();
            Ok(task.reference_of(&losses))
        });
    }
    trainer(Trainer::on(integration, &options.train), program)
        .main_with(|setup| CausalTask::new(options, program, setup))
}

/// Returns the loss `[1]` of preferences and the rewards of their sequences `[s]`, from the model's mean losses `[s]` and
/// [`CausalTask::preferences`], like `zero-train` on Burn 0.21.
fn preference_loss(losses_s: Tensor<1>, preferences: [Vec<f32>; 2]) -> (Tensor<1>, Tensor<1>) {
    let [factors_s, reference_s] =
        preferences.map(|values| Tensor::from_data(TensorData::from(&*values), &losses_s.device()));
    let rewards_s = (reference_s - losses_s) * factors_s;
    let [chosen_b, rejected_b] = rewards_s.clone().chunk(2, 0).try_into().expect("a row has two sequences");
    (log_sigmoid(chosen_b - rejected_b).mean().neg(), rewards_s)
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
    let of = |numbers| tokens(numbers, seq, device);
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
