//! The command that trains a language model: its options, and the [`Task`](crate::trainer::Task) that they select.

/// Implements the functions of a task that follow from its fields `name`, `config` and `start`, and the field of its data.
macro_rules! told_by_fields {
    ($data:ident $(, $sequences:ident)?) => {
        fn name(&self) -> String {
            self.name.clone()
        }

        fn rows(&self) -> usize {
            self.$data.rows()
        }

        fn held_out(&self) -> usize {
            self.$data.held_out()
        }

        fn tokens_per_row(&self) -> Option<usize> {
            Some(self.$data.seq() $(* self.$sequences())?)
        }

        fn hidden_size(&self) -> Option<usize> {
            self.model_config()?.hidden_size()
        }

        fn model_config(&self) -> Option<zero_models::ModelConfig> {
            Some(self.start.config(self.config.clone().into()))
        }

        fn files(&self) -> Vec<zero_core::checkpoint::SideFile> {
            self.start.files().to_vec()
        }
    };
}

mod bert;
mod causal;
mod classes;
mod figures;
pub mod generate;
mod recipes;
mod seq2seq;
mod start;
pub mod tune;

use std::path::{Path, PathBuf};
#[cfg(feature = "burn")]
use std::process::ExitCode;

#[cfg(feature = "burn")]
use burn::tensor::{Tensor, TensorData};
use clap::{Args, FromArgMatches, ValueEnum};
use zero_core::alloc::PageKeeper;
#[cfg(feature = "burn")]
use zero_models::Ids;
use zero_models::generate::{Hooks, Sampling};
use zero_models::{BartConfig, BertConfig, BertKind, Gpt2Config, LlamaConfig, ModelConfig, ModelError, T5Config};

pub use self::bert::BertTask;
pub use self::causal::{CausalRows, CausalTask};
pub use self::classes::{ClassesFamily, ClassesTask};
pub use self::seq2seq::Seq2SeqTask;
pub use self::start::LoraOptions;
use crate::Result;
use crate::data::{Fields, LossOn, Source, TokenizeOptions};
use crate::error::wrong;
use crate::trainer;
#[cfg(feature = "burn")]
use crate::trainer::{FusedBackend, Trainer};

/// The training objective of a language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TaskChoice {
    /// Predict the next token: GPT-2, Llama, Mistral, Qwen, Gemma, Phi.
    #[value(alias = "sft")]
    CausalLm,
    /// Learn to prefer the chosen answer to a prompt over the rejected one (direct preference optimization): the same models as causal-lm.
    Dpo,
    /// Predict masked tokens, and whether one text follows another: BERT.
    BertPretraining,
    /// Assign one class or more to a text, or predict numbers from it (regression): BERT, RoBERTa, DistilBERT, BART.
    TextClassification,
    /// Generate one text from another: BART, T5.
    #[value(name = "seq2seq")]
    Seq2Seq,
}

/// Handling of a row that cannot be used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OnBadRow {
    /// The run ends with an error that names the row.
    #[default]
    Error,
    /// The row is skipped with a warning.
    Skip,
}

/// A metric of held-out conversations, other than the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EvalMetric {
    /// The fraction of answers that the model generates exactly.
    ExactMatch,
}

/// Options of a command that trains a language model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and data")]
pub struct Options {
    /// Training objective [default: the one that the model's config.json or preset implies]
    #[arg(long, value_name = "TASK")]
    pub task: Option<TaskChoice>,
    /// Train this preset (tiny, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-10b; bert-tiny, bert-base, bert-large;
    /// llama-tiny, llama-3.2-1b, qwen2.5-0.5b, mistral-7b, t5-small and others), or the model that the Hugging Face
    /// config.json in this folder describes [default: the model of --weights, otherwise gpt2 (in the example gpt2_1_5b,
    /// gpt2-xl), or a smaller preset if that does not fit]
    #[arg(long, value_name = "PRESET|DIR")]
    pub model: Option<String>,
    /// Start from the Hugging Face weights in this folder (model.safetensors, or several files with an index). Without
    /// --model, the config.json in this folder describes the model
    #[arg(long, value_name = "DIR")]
    pub weights: Option<PathBuf>,
    /// Train on this data (required): a text file (.txt, .md); a .jsonl, .json, .csv, .tsv or .parquet file with a document, a
    /// conversation, or a text and its label in each row; a folder of such files, whose names may include the name of a
    /// split (train, validation); or a .safetensors file with an int tensor `input_ids` of shape `[rows, tokens per
    /// row]`, or `[tokens]`, which is cut into rows of --seq. Text and table files, except .parquet, may be compressed
    /// (.gz, .zst)
    #[arg(long, value_name = "FILE|DIR")]
    pub data: Option<PathBuf>,
    /// JSON key or table column with the text. With --task causal-lm, giving this option also turns off the detection of
    /// conversations: rows are read as plain text [default: text]
    #[arg(long, value_name = "NAME")]
    pub text_field: Option<String>,
    /// JSON key or table column with the second text of a pair, for --task text-classification
    #[arg(long, value_name = "NAME")]
    pub second_field: Option<String>,
    /// JSON key or table column with the label. For --task text-classification, a label is a class (a text or an integer),
    /// a list of classes, or a number to predict; for --task seq2seq, it is the target text [default: label]
    #[arg(long, value_name = "NAME")]
    pub label_field: Option<String>,
    /// Compute the loss of conversations on these tokens. A row is a conversation if it has the key `messages`, the key
    /// `conversations`, the two keys `prompt` and `completion`, or the two keys `instruction` and `output` [default:
    /// completions]
    #[arg(long, value_name = "TOKENS")]
    pub loss_on: Option<LossOn>,
    /// End the run with an error, or skip the row with a warning, if a row of conversations cannot be used: for example, a message has no
    /// role, or the chat template refuses it. The first row determines the format, so it must be a good one. A line that is not JSON always
    /// ends the run
    #[arg(long, value_name = "WHAT", default_value = "error")]
    pub on_bad_row: OnBadRow,
    /// Beta of the DPO loss, for --task dpo: a larger value keeps the trained model closer to the reference, which is the model before
    /// training [default: 0.1]
    #[arg(long, value_name = "BETA")]
    pub dpo_beta: Option<f64>,
    /// Pack conversations: put several into one row of --seq tokens, so that little computation is spent on padding. Each conversation attends only to its
    /// own tokens, as if it were alone in a row
    #[arg(long)]
    pub packing: bool,
    /// Also evaluate conversations by this metric. `exact-match`: the fraction of held-out rows for which greedy decoding produces exactly
    /// the last answer
    #[arg(long, value_name = "METRIC")]
    pub eval_metric: Option<EvalMetric>,
    /// Use this tokenizer: a tokenizer.json, or a folder with the files of a tokenizer (tokenizer.json, BERT's vocab.txt
    /// and others). `zero tokenizer` trains one for BERT [default: the one in --weights or --model, otherwise the
    /// built-in tokenizer of GPT-2]
    #[arg(long, value_name = "FILE|DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Cache the tokens of large texts in this folder, which all runs and ranks of a machine share [default:
    /// $XDG_CACHE_HOME/zero, or ~/.cache/zero]
    #[arg(long, value_name = "DIR")]
    pub token_cache: Option<PathBuf>,
    /// Number of tokens per row; for conversations and labeled texts, the maximum [default: the row length of a
    /// .safetensors file; 1024 for conversations; otherwise 128]
    #[arg(long)]
    pub seq: Option<usize>,
    /// Fraction of the tokens that BERT pre-training masks and predicts
    #[arg(long, value_name = "FRACTION", default_value_t = 0.15)]
    pub mask_probability: f64,
    /// Mask all tokens of a word together, in BERT pre-training
    #[arg(long)]
    pub whole_word_mask: bool,
    /// LoRA's.
    #[command(flatten)]
    pub lora: LoraOptions,
    /// The trainer's.
    #[command(flatten)]
    pub train: trainer::Options,
}

impl Default for Options {
    /// Returns the options of an empty command line.
    fn default() -> Self {
        let matches = Self::augment_args(clap::Command::new("train")).get_matches_from(["train"]);
        Self::from_arg_matches(&matches).expect("every option has a default or is none")
    }
}

/// Defaults that a program provides.
#[derive(Debug, Clone)]
pub struct Program<'a> {
    /// The model to train if the options name none; if it does not fit into memory, the largest preset that fits is trained.
    pub model: &'a str,
    /// The data to read if the options name no file.
    pub data: Source<'a>,
    /// The program's allocator, if it counts allocations.
    pub allocator: Option<&'a PageKeeper>,
}

/// Runs the command like [`Trainer::main`].
#[cfg(feature = "burn")]
pub fn main(options: &Options, program: &Program<'_>) -> ExitCode {
    let trainer = Trainer::new(&options.train);
    let trainer = program.allocator.map_or(trainer, |allocator| trainer.allocator(allocator));
    match options.task_for(program) {
        TaskChoice::BertPretraining => trainer.main_with(|_| BertTask::new(options, program)),
        TaskChoice::Seq2Seq if options.is_t5(program) => {
            trainer.main_with(|_| Seq2SeqTask::<T5Config>::new(options, program))
        }
        TaskChoice::Seq2Seq => trainer.main_with(|_| Seq2SeqTask::<BartConfig>::new(options, program)),
        TaskChoice::TextClassification if options.is_bart(program) => {
            trainer.main_with(|_| ClassesTask::<BartConfig>::new(options, program))
        }
        TaskChoice::TextClassification => trainer.main_with(|_| ClassesTask::<BertConfig>::new(options, program)),
        TaskChoice::CausalLm | TaskChoice::Dpo if options.is_llama(program) => {
            trainer.main_with(|setup| CausalTask::<LlamaConfig>::new(options, program, setup))
        }
        TaskChoice::CausalLm | TaskChoice::Dpo => {
            trainer.main_with(|setup| CausalTask::<Gpt2Config>::new(options, program, setup))
        }
    }
}

impl Options {
    /// Returns the model that the options name, with its name.
    pub(crate) fn chosen(&self) -> Result<Option<(String, ModelConfig)>> {
        Ok(match (&self.model, &self.weights) {
            (Some(name), _) => Some((name.clone(), model(name)?)),
            (None, Some(dir)) => Some((dir.display().to_string(), ModelConfig::from_file(&dir.join("config.json"))?)),
            (None, None) => None,
        })
    }

    /// Rejects options of another task.
    pub(crate) fn check_for(&self, task: TaskChoice) -> Result<()> {
        if let Some(loss_on) = self.loss_on.filter(|_| task != TaskChoice::CausalLm) {
            let expected = "expected --task causal-lm, the only one that reads conversations";
            return Err(wrong("loss-on", format!("{loss_on:?}").to_lowercase(), expected));
        }
        if self.on_bad_row == OnBadRow::Skip && ![TaskChoice::CausalLm, TaskChoice::Dpo].contains(&task) {
            let expected = "expected --task causal-lm or dpo, the only ones that read conversations";
            return Err(wrong("on-bad-row", "skip", expected));
        }
        if self.eval_metric.is_some() && task != TaskChoice::CausalLm {
            let expected =
                "expected --task causal-lm; --task seq2seq and text-classification always measure their accuracy";
            return Err(wrong("eval-metric", "exact-match", expected));
        }
        if let Some(beta) = self.dpo_beta {
            if task != TaskChoice::Dpo {
                return Err(wrong("dpo-beta", beta, "expected --task dpo, the only one that reads preferences"));
            }
            if !(beta.is_finite() && beta > 0.0) {
                return Err(wrong("dpo-beta", beta, "expected a finite number above 0"));
            }
        }
        if self.packing && task != TaskChoice::CausalLm {
            return Err(wrong("packing", true, "expected --task causal-lm, the only one that reads conversations"));
        }
        match self.second_field.as_ref().filter(|_| task != TaskChoice::TextClassification) {
            Some(name) => Err(wrong(
                "second-field",
                name,
                "expected --task text-classification, the only one with pairs of texts",
            )),
            None => Ok(()),
        }
    }

    /// Returns the task to train. If the model cannot be read, that task reports the error.
    pub fn task_for(&self, program: &Program<'_>) -> TaskChoice {
        self.task.unwrap_or_else(|| match self.chosen() {
            Ok(Some((_, config))) if !config.classes().is_empty() => TaskChoice::TextClassification,
            // Only a BERT is pre-trained.
            Ok(Some((_, ModelConfig::Bert(config)))) if config.model_type != BertKind::Bert => {
                TaskChoice::TextClassification
            }
            Ok(Some((_, ModelConfig::Bert(_)))) => TaskChoice::BertPretraining,
            Ok(Some((_, ModelConfig::Bart(_) | ModelConfig::T5(_)))) => TaskChoice::Seq2Seq,
            Ok(None) if [BartConfig::PRESETS, T5Config::PRESETS].concat().contains(&program.model) => {
                TaskChoice::Seq2Seq
            }
            Ok(None) if BertConfig::PRESETS.contains(&program.model) => TaskChoice::BertPretraining,
            _ => TaskChoice::CausalLm,
        })
    }

    /// Returns whether the model to train is a T5.
    pub fn is_t5(&self, program: &Program<'_>) -> bool {
        match self.chosen() {
            Ok(Some((_, config))) => matches!(config, ModelConfig::T5(_)),
            Ok(None) => T5Config::PRESETS.contains(&program.model),
            Err(_) => false,
        }
    }

    /// Returns whether the model to train is a Llama or one of its variants.
    pub fn is_llama(&self, program: &Program<'_>) -> bool {
        match self.chosen() {
            Ok(Some((_, config))) => matches!(config, ModelConfig::Llama(_)),
            Ok(None) => LlamaConfig::PRESETS.contains(&program.model),
            Err(_) => false,
        }
    }

    /// Returns whether the model to train is a BART.
    pub fn is_bart(&self, program: &Program<'_>) -> bool {
        match self.chosen() {
            Ok(Some((_, config))) => matches!(config, ModelConfig::Bart(_)),
            Ok(None) => BartConfig::PRESETS.contains(&program.model),
            Err(_) => false,
        }
    }

    pub(crate) fn source<'a>(&'a self, program: &Program<'a>) -> Source<'a> {
        self.data.as_deref().map_or_else(|| program.data.clone(), Source::File)
    }

    /// Returns the paths that may hold the model's own tokenizer; those that are not folders have none.
    pub(crate) fn folders(&self) -> Vec<&Path> {
        [self.weights.as_deref(), self.model.as_deref().map(Path::new)].into_iter().flatten().collect()
    }

    pub(crate) fn fields(&self) -> Fields<'_> {
        Fields {
            text: self.text_field.as_deref().unwrap_or("text"),
            second: self.second_field.as_deref(),
            label: self.label_field.as_deref().unwrap_or("label"),
        }
    }

    pub(crate) fn tokenize<'a>(
        &'a self,
        vocab_size: usize,
        n_positions: usize,
        folders: &'a [&'a Path],
    ) -> TokenizeOptions<'a> {
        TokenizeOptions {
            seq: self.seq,
            vocab_size,
            n_positions,
            tokenizer: self.tokenizer.as_deref(),
            folders,
            is_gpt2: matches!(self.chosen(), Ok(Some((_, ModelConfig::Gpt2(_))) | None)),
            sentences: false,
            field: self.text_field.as_deref(),
            held_out: self.train.eval,
            cache: self.token_cache.as_deref(),
            packing: self.packing,
            skips_bad_rows: self.on_bad_row == OnBadRow::Skip,
        }
    }
}

/// Generates tokens after each text by `generate`, in `how.max_new_tokens` passes however long they are, so that ranks which gather together
/// never wait for one that has ended early.
fn in_fixed_passes(
    texts: &[Vec<u32>],
    how: &Sampling,
    generate: impl FnOnce(&[Vec<u32>], &Sampling, Hooks<'_>) -> Result<Vec<Vec<u32>>>,
) -> Result<Vec<Vec<u32>>> {
    let mut passes = 0;
    let mut goes_on = |_| {
        passes += 1;
        passes < how.max_new_tokens
    };
    generate(texts, how, Hooks { token: &mut |_, _| (), goes_on: &mut goes_on, number: &|row| row })
}

/// Returns a tensor `[rows, width]` of numbers, one for each token.
#[cfg(feature = "burn")]
fn tokens<B: FusedBackend>(numbers: Vec<i32>, width: usize, device: &B::Device) -> Ids<B> {
    let rows = numbers.len() / width.max(1);
    Tensor::from_data(TensorData::new(numbers, [rows, width]), device)
}

/// Returns a model by the name of a preset, or by a folder with its `config.json`.
///
/// # Errors
///
/// [`ModelError`] if there is no such preset, or the file is invalid.
pub fn model(name: &str) -> Result<ModelConfig, ModelError> {
    let path = Path::new(name);
    match path.is_dir() || path.components().count() > 1 {
        true => ModelConfig::from_file(&path.join("config.json")),
        false => ModelConfig::preset(name),
    }
}
