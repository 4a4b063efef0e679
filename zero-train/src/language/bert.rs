//! Pre-training of a BERT, to predict masked tokens and whether one text follows another: a [`Task`] of the
//! [`Trainer`](crate::trainer::Trainer).

use std::ops::Range;
use std::path::Path;

#[cfg(feature = "burn")]
use burn::tensor::{Int, Tensor};
use serde_json::{Value, json};
#[cfg(feature = "burn")]
use zero_models::bert::weights;
use zero_models::loss::IGNORED_LABEL;
use zero_models::safetensors_file::Checkpoint;
#[cfg(feature = "burn")]
use zero_models::{Bert, BertBatch, BertPredictions};
use zero_models::{BertConfig, BertHead, BertKind, ModelConfig};

use super::start::Start;
#[cfg(feature = "burn")]
use super::tokens;
use super::{Options, Program, TaskChoice, recipes};
use crate::data::{Masking, PairBatch, SentencePairs, Source, TokenizeOptions, Tokenizer};
use crate::error::{Result, wrong};
use crate::trainer::{Activations, InitialAdapter, Profile, Recipe, Rows, Task};
#[cfg(feature = "burn")]
use crate::trainer::{FusedBackend, Measured};

/// Size of a vocabulary that is learned from a program's own text.
const LEARNED: usize = 8192;

/// A BERT and its pre-training text.
pub struct BertTask {
    /// The preset's or folder's name.
    name: String,
    config: BertConfig,
    start: Start,
    pairs: SentencePairs,
    masking: Masking,
    /// Number of rows that are trained on.
    trained: usize,
    /// Names the heads that the weights lack.
    notice: Option<String>,
}

/// Modules that weights of another class may lack, with the prefix of their tensors' names.
const HEADS: [(&str, &str); 3] =
    [("pooler", "pooler."), ("seq_relationship", "cls.seq_relationship."), ("predictions", "cls.predictions.")];

impl BertTask {
    /// Creates the task for the model given by name, folder or weights. If none is given, uses the program's model if it is
    /// a BERT, or bert-base. A preset's vocabulary has the size of its tokenizer's.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) if something that the options name cannot be used.
    pub fn new(options: &Options, program: &Program<'_>) -> Result<Self> {
        options.check_for(TaskChoice::BertPretraining)?;
        let default = if BertConfig::PRESETS.contains(&program.model) { program.model } else { "bert-base" };
        let (name, mut config) = match options.chosen()? {
            Some((name, ModelConfig::Bert(config))) if config.model_type == BertKind::Bert => {
                (name, BertConfig { head: BertHead::PreTraining, ..config })
            }
            Some((name, _)) => return Err(wrong("model", name, "expected a BERT for --task bert-pretraining")),
            None => (default.into(), BertConfig::preset(default)?),
        };
        let masking = Masking { probability: options.mask_probability, whole_words: options.whole_word_mask };
        if !(masking.probability > 0.0 && masking.probability < 1.0) {
            return Err(wrong("mask-probability", masking.probability, "expected a fraction above 0 and below 1"));
        }
        let is_preset = BertConfig::PRESETS.contains(&&*name);
        let known = if is_preset { usize::MAX } else { config.vocab_size };
        let (source, folders) = (options.source(program), options.folders());
        let tokenize = options.tokenize(known, config.positions(), &folders);
        let tokenize = TokenizeOptions { sentences: true, ..tokenize };
        let tokenizer = match source {
            Source::Text(..) if options.tokenizer.is_none() && is_preset => {
                Tokenizer::learn(&source, None, LEARNED, true)?
            }
            _ => Tokenizer::find(options.data.as_deref().unwrap_or("the text".as_ref()), &tokenize)?,
        };
        let pairs = SentencePairs::load(&source, &tokenize, &tokenizer)?;
        if is_preset {
            config.vocab_size = pairs.vocabulary();
        }
        let trained = pairs.rows().saturating_sub(options.train.eval.unwrap_or(pairs.held_out()));
        let fresh: Vec<&str> = match &options.weights {
            Some(dir) => {
                let checkpoint = Checkpoint::open(dir)?;
                let has = |begins: &str| {
                    checkpoint.names().any(|name| name.strip_prefix("bert.").unwrap_or(name).starts_with(begins))
                };
                HEADS.iter().filter(|(_, begins)| !has(begins)).map(|(module, _)| *module).collect()
            }
            None => Vec::new(),
        };
        let notice = (!fresh.is_empty()).then(|| {
            format!("The weights of {name} lack these modules, which are newly initialized: {}.", fresh.join(", "))
        });
        let start = Start::new(options, Some(&tokenizer), config.clone().into(), &fresh)?;
        Ok(Self { name, config, start, pairs, masking, trained, notice })
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Returns the folder of weights to start from, if the model is not trained from scratch.
    pub fn weights(&self) -> Option<&Path> {
        self.start.weights()
    }

    /// Returns the LoRA adapter as it begins on ranks with this seed, if the model has one.
    ///
    /// # Errors
    ///
    /// If the adapter's folder cannot be read, or is of another model.
    pub fn initial_adapter(&self, seed: u64) -> Result<Option<InitialAdapter>> {
        self.start.initial_adapter(seed)
    }

    /// Returns these rows, masked by their seeds, and the number of tokens of each.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) if the text can no longer be read.
    pub fn batch(&self, rows: &Rows) -> Result<(PairBatch, usize)> {
        let split = |row: usize| if row < self.trained { 0..self.trained } else { self.trained..self.pairs.rows() };
        Ok((self.pairs.batch(rows, rows.seeds(), split, self.masking)?, self.pairs.seq()))
    }

    #[cfg(feature = "burn")]
    fn predict<B: FusedBackend>(&self, model: &Bert<B>, rows: &Rows, device: &B::Device) -> Result<BertPredictions<B>> {
        let (batch, seq) = self.batch(rows)?;
        let tokens = |ids| tokens::<B>(ids, seq, device);
        let list = |ids: Vec<i32>| Tensor::<B, 1, Int>::from_ints(&*ids, device);
        let related = list(batch.next_sentence_labels);
        let [ids, types, labels] = [batch.input_ids, batch.token_type_ids, batch.labels].map(tokens);
        let input = BertBatch::new(ids, types, labels, related)
            .with_attention_mask(tokens(batch.attention_mask))
            .with_predicted_positions(list(batch.predicted_positions));
        Ok(model.predict(input))
    }
}

impl Task for BertTask {
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend> = Bert<B>;

    told_by_fields!(pairs);

    #[cfg(feature = "burn")]
    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Bert<B>> {
        let load = |model, from: &_, device: &_| Ok(weights::load_without_head(model, from, device)?.0);
        self.start.model(self.config.init(device), load, device)
    }

    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(&self, model: &Bert<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        Ok(self.predict(model, rows, device)?.losses())
    }

    /// Returns the numbers of masked tokens and of rows, the weights of the two losses and of the two accuracies.
    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        let labels = self.batch(rows)?.0.labels;
        let masked = labels.iter().filter(|label| **label != IGNORED_LABEL).count() as f64;
        let rows = rows.len() as f64;
        Ok(vec![masked, rows, masked, rows])
    }

    #[cfg(feature = "burn")]
    fn evaluate<B: FusedBackend>(&self, model: &Bert<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        let predicted = self.predict(model, rows, device)?;
        let right: Vec<f64> = predicted.clone().accuracies().into_data().iter().collect();
        let losses: Vec<f64> = predicted.losses().into_data().iter().collect();
        let [losses, right] = [losses, right].map(|pair| <[f64; 2]>::try_from(pair).expect("of tokens and of rows"));
        let accuracies = [("masked_accuracy", right[0]), ("next_sentence_accuracy", right[1])];
        Ok(losses.map(|loss| ("loss", loss)).into_iter().chain(accuracies).collect())
    }

    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        Ok(Some(self.pairs.checksum(rows)?))
    }

    fn recipe(&self) -> Option<Recipe> {
        let is_fresh = BertConfig::PRESETS.contains(&&*self.name) && self.start.weights().is_none();
        is_fresh.then(recipes::bert)
    }

    fn profile(&self, micro_batch: usize) -> Result<Profile> {
        let predicted = self.masking.probability;
        Ok(self.start.profile(profile(&self.config, micro_batch, self.pairs.seq(), predicted)))
    }

    fn notice(&self) -> Option<String> {
        self.notice.clone()
    }

    fn settings(&self) -> Value {
        let mut settings = self.start.settings();
        settings["mask_probability"] = json!(self.masking.probability);
        settings["whole_word_mask"] = json!(self.masking.whole_words);
        settings
    }
}

/// Returns the profile of `config` on `micro_batch` rows of `seq` tokens, of which the fraction `predicted` is predicted.
pub(super) fn profile(config: &BertConfig, micro_batch: usize, seq: usize, predicted: f64) -> Profile {
    let (width, words) = (config.hidden_size as f64, config.vocab_size as f64);
    // Floats that the fused operations keep per token and layer, in widths: the input, query, key and value, attention's
    // result, the sum after it and its norm, the feed-forward layer before and after its activation, sum and norm.
    let per_layer = 9.0 * width + 2.0 * config.intermediate_size as f64;
    let bytes = |floats: f64| (4.0 * floats * (micro_batch * seq) as f64) as u64;
    // The head does not run at every token.
    let flops = config.flops_per_token(seq) as f64 - 6.0 * (1.0 - predicted) * width * (width + words);
    let activations = Activations {
        blocks: config.num_hidden_layers,
        block: bytes(per_layer),
        input: bytes(width),
        rest: bytes(predicted * (3.0 * width + 2.0 * words)),
    };
    Profile::of_all(&config.clone().into(), activations, flops * seq as f64)
}
