//! Training of a BART or a T5 to generate text from text (conditional generation): a [`Task`] of the [`Trainer`](crate::trainer::Trainer).

use std::ops::Range;
use std::path::Path;

#[cfg(feature = "burn")]
use burn::tensor::Tensor;
use serde_json::{Value, json};
use zero_models::generate::{Hooks, Sampling};
use zero_models::{ModelConfig, Seq2SeqFamily, Seq2SeqSettings};

use super::start::Start;
#[cfg(feature = "burn")]
use super::tokens;
use super::{Options, Program, TaskChoice, in_fixed_passes};
use crate::data::{TextPairs, Tokenizer};
use crate::error::{Result, wrong};
use crate::trainer::{Activations, InitialAdapter, Measured, Profile, Rows, Task};
#[cfg(feature = "burn")]
use crate::trainer::{FusedBackend, scalar};

/// A model of a family that generates text from text, and its training pairs.
pub struct Seq2SeqTask<C> {
    /// The preset's or folder's name.
    name: String,
    config: C,
    settings: Seq2SeqSettings,
    sampling: Sampling,
    start: Start,
    texts: TextPairs,
}

impl<C: Seq2SeqFamily> Seq2SeqTask<C> {
    /// Creates the task for the model given by name, folder or weights.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) if something that the options name cannot be used.
    pub fn new(options: &Options, program: &Program<'_>) -> Result<Self> {
        options.check_for(TaskChoice::Seq2Seq)?;
        let default = if C::PRESETS.contains(&program.model) { program.model } else { C::DEFAULT };
        let (name, config) = match options.chosen()? {
            Some((name, config)) => match C::of(config) {
                Some(config) => (name, config),
                None => return Err(wrong("model", name, "expected a BART or a T5 for --task seq2seq")),
            },
            None => (default.into(), C::preset(default)?),
        };
        let Some(path) = &options.data else {
            let expected =
                "expected --data as well: .jsonl or .parquet with a source text and a target text in each row";
            return Err(wrong("task", "seq2seq", expected));
        };
        let model: ModelConfig = config.clone().into();
        let settings = model.seq2seq().expect("models of these families generate text from text");
        let sampling = model.sampling();
        let folders = options.folders();
        let tokenize = options.tokenize(config.sizes().vocabulary, settings.positions, &folders);
        let tokenizer = Tokenizer::find(path, &tokenize)?;
        let texts = TextPairs::load(path, options.fields(), &tokenize, tokenizer, &settings)?;
        let start = Start::new(options, Some(texts.tokenizer()), model, &[])?;
        Ok(Self { name, config, settings, sampling, start, texts })
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &C {
        &self.config
    }

    /// Returns the training pairs.
    pub fn texts(&self) -> &TextPairs {
        &self.texts
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

    /// Returns the text that `generate` makes from each of these rows, greedily.
    ///
    /// # Errors
    ///
    /// An error of `generate`.
    pub fn generate_by(
        &self,
        rows: &[usize],
        generate: impl FnOnce(&[Vec<u32>], &Sampling, Hooks<'_>) -> Result<Vec<Vec<u32>>>,
    ) -> Result<Vec<String>> {
        let texts: Vec<Vec<u32>> = rows.iter().map(|&row| self.texts.source(row)).collect();
        let room = self.settings.positions - 1;
        let max_new_tokens = self.texts.longest_target().min(room);
        let how = Sampling { max_new_tokens, ..self.sampling.clone() };
        let made = in_fixed_passes(&texts, &how, generate)?;
        Ok(made.iter().map(|ids| self.texts.tokenizer().decode(ids).trim().to_string()).collect())
    }

    /// Returns the loss of these rows, and the fraction for which `made` is exactly the target text.
    pub fn measured(&self, rows: &[usize], loss: f64, made: &[String]) -> Measured {
        let right = made.iter().zip(rows).filter(|(made, row)| self.texts.decoded_target(**row) == Some(made)).count();
        vec![("loss", loss), ("accuracy", right as f64 / rows.len() as f64)]
    }

    /// Returns the target text of each row, and the text `made` from it.
    pub fn predictions(&self, rows: &[usize], made: Vec<String>) -> Vec<Value> {
        let line =
            |(made, &row): (String, &usize)| json!({ "row": row, "label": self.texts.target(row), "prediction": made });
        made.into_iter().zip(rows).map(line).collect()
    }

    #[cfg(feature = "burn")]
    fn loss_of<B: FusedBackend>(&self, model: &C::Model<B>, rows: &[usize], device: &B::Device) -> Tensor<B, 1> {
        let batch = self.texts.batch(rows);
        let [ids, mask] = [batch.input_ids, batch.attention_mask].map(|ids| tokens::<B>(ids, batch.width, device));
        C::loss(model, ids, Some(mask), tokens(batch.labels, batch.target_width, device))
    }

    #[cfg(feature = "burn")]
    fn made<B: FusedBackend>(&self, model: &C::Model<B>, rows: &[usize], device: &B::Device) -> Result<Vec<String>> {
        self.generate_by(rows, |texts, how, hooks| Ok(C::generate(model, texts, how, device, hooks)?))
    }
}

impl<C: Seq2SeqFamily> Task for Seq2SeqTask<C> {
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend> = C::Model<B>;

    told_by_fields!(texts);

    fn unlabelled(&self) -> usize {
        self.texts.unlabelled()
    }

    #[cfg(feature = "burn")]
    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<C::Model<B>> {
        self.start.model(self.config.init(device), C::load, device)
    }

    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(&self, model: &C::Model<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        Ok(self.loss_of(model, rows, device))
    }

    /// Returns the number of target tokens, the weight of the loss.
    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        Ok(vec![self.texts.target_tokens(rows) as f64])
    }

    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        Some(self.texts.source_tokens(rows) + self.texts.target_tokens(rows))
    }

    /// Measures the loss, and the fraction of rows for which the model generates exactly the target text.
    #[cfg(feature = "burn")]
    fn evaluate<B: FusedBackend>(&self, model: &C::Model<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        let loss = scalar(self.loss_of(model, rows, device));
        Ok(self.measured(rows, loss, &self.made(model, rows, device)?))
    }

    #[cfg(feature = "burn")]
    fn predict<B: FusedBackend>(
        &self,
        model: &C::Model<B>,
        rows: &Rows,
        device: &B::Device,
    ) -> Result<Option<Vec<Value>>> {
        Ok(Some(self.predictions(rows, self.made(model, rows, device)?)))
    }

    fn has_perplexity(&self) -> bool {
        true
    }

    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        Ok(Some(self.texts.checksum(rows)))
    }

    /// Returns the profile of rows whose text and target have the maximum length.
    fn profile(&self, micro_batch: usize) -> Result<Profile> {
        let lengths = [self.texts.seq(), self.texts.longest_target()];
        Ok(self.start.profile(profile(&self.config, micro_batch, lengths, self.config.sizes().vocabulary)))
    }

    fn settings(&self) -> Value {
        self.start.settings()
    }
}

/// Returns memory and operations of `config` on `micro_batch` texts. The encoder reads `seq` tokens and the decoder
/// `target` tokens, with `vocabulary` logits at each position of the decoder.
pub(super) fn profile<C: Seq2SeqFamily>(
    config: &C,
    micro_batch: usize,
    [seq, target]: [usize; 2],
    vocabulary: usize,
) -> Profile {
    let sizes = config.sizes();
    let (width, inner, [encoder, decoder]) = (sizes.width, sizes.inner, [sizes.encoder, sizes.decoder]);
    // Floats that are kept per token and layer: as BERT's, and as many again for attention to the text. Of scores, these, their
    // probabilities, and those that are not dropped out.
    let per_token = |[_, ffn]: [usize; 2]| 5 * width + 4 * inner + 2 * (sizes.matrices - 1) * ffn;
    let scores = |keys: usize| 3 * sizes.scores * keys;
    let [read, made] =
        [(encoder, seq), (decoder, target)].map(|(half, tokens)| half[0] * (per_token(half) + scores(tokens)) * tokens);
    let across = decoder[0] * ((2 * width + 3 * inner) * target + 2 * inner * seq);
    let layers = encoder[0] + decoder[0];
    // Of a block on average.
    let bytes = |floats: usize| (4 * floats * micro_batch) as u64;
    let weights = |[layers, ffn]: [usize; 2], attentions: usize| {
        layers * (4 * attentions * width * inner + sizes.matrices * width * ffn)
    };
    let products = weights(encoder, 1) * seq + weights(decoder, 2) * target + vocabulary * width * target;
    let activations = Activations {
        blocks: layers,
        block: bytes((read + made + across) / layers.max(1)),
        input: bytes((encoder[0] * seq + decoder[0] * target) * width / layers.max(1)),
        rest: bytes(2 * target * vocabulary),
    };
    Profile::of_all(&config.clone().into(), activations, 6.0 * products as f64)
}
