//! Training of a BART to make texts of texts (conditional generation): a [`Task`] of the [`Trainer`](crate::trainer::Trainer).

use std::ops::Range;

use burn::tensor::Tensor;
use serde_json::{Value, json};
use zero_models::bart::{generate_with, weights};
use zero_models::generate::{Hooks, Sampling};
use zero_models::{Bart, BartConfig, BartHead, ModelConfig};

use super::start::Start;
use super::{Options, Program, tokens};
use crate::data::{TextPairs, Tokenizer};
use crate::error::{Result, wrong};
use crate::trainer::{Activations, FusedBackend, Measured, Profile, Rows, Task, scalar};

/// A BART, and the texts that it learns to make.
pub struct Seq2SeqTask {
    /// The preset's or folder's name.
    name: String,
    config: BartConfig,
    start: Start,
    texts: TextPairs,
}

impl Seq2SeqTask {
    /// The model by name, folder or weights.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) for what the options name and cannot be used.
    pub fn new(options: &Options, program: &Program<'_>) -> Result<Self> {
        let default = if BartConfig::PRESETS.contains(&program.model) { program.model } else { "bart-base" };
        let (name, config) = match options.chosen()? {
            Some((name, ModelConfig::Bart(config))) => {
                (name, BartConfig { head: BartHead::Generation, problem_type: None, ..config })
            }
            Some((name, _)) => return Err(wrong("model", name, "expected a BART for --task seq2seq")),
            None => (default.into(), BartConfig::preset(default)?),
        };
        let Some(path) = &options.data else {
            let expected =
                "expected --data beside it: .jsonl or .parquet with a text, and what is to be made of it, in each row";
            return Err(wrong("task", "seq2seq", expected));
        };
        let folders = options.folders();
        let cutting = options.cutting(config.vocab_size, config.max_position_embeddings, &folders);
        let tokenizer = Tokenizer::find(path, &cutting)?;
        let ends = [config.pad_token_id, config.eos_token_id];
        let texts = TextPairs::load(path, options.fields(), &cutting, tokenizer, ends)?;
        let start = Start::new(options, Some(texts.tokenizer()), config.clone().into(), &[])?;
        Ok(Self { name, config, start, texts })
    }

    fn loss_of<B: FusedBackend>(&self, model: &Bart<B>, rows: &[usize], device: &B::Device) -> Tensor<B, 1> {
        let batch = self.texts.batch(rows);
        let [ids, mask] = [batch.input_ids, batch.attention_mask].map(|ids| tokens::<B>(ids, batch.width, device));
        model.loss(ids, Some(mask), tokens(batch.labels, batch.target_width, device))
    }

    /// What the model makes of these rows, greedily. It is used as often whatever it makes, so that ranks which gather together
    /// never wait for one that has ended early.
    fn made<B: FusedBackend>(&self, model: &Bart<B>, rows: &[usize], device: &B::Device) -> Result<Vec<String>> {
        let texts: Vec<Vec<u32>> = rows.iter().map(|&row| self.texts.source(row)).collect();
        let room = self.config.max_position_embeddings - 1;
        let how = Sampling { max_new_tokens: self.texts.longest_target().min(room), ..self.config.sampling() };
        let mut passes = 0;
        let mut goes_on = |_| {
            passes += 1;
            passes < how.max_new_tokens
        };
        let hooks = Hooks { token: &mut |_, _| (), goes_on: &mut goes_on, number: &|row| row };
        let made = generate_with(model, &texts, &how, device, hooks)?;
        Ok(made.iter().map(|ids| self.texts.tokenizer().decode(ids).trim().to_string()).collect())
    }
}

impl Task for Seq2SeqTask {
    type Model<B: FusedBackend> = Bart<B>;

    told_by_fields!(texts);

    fn unlabelled(&self) -> usize {
        self.texts.unlabelled()
    }

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Bart<B>> {
        self.start.model(self.config.init(device), weights::load_from, device)
    }

    fn loss<B: FusedBackend>(&self, model: &Bart<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        Ok(self.loss_of(model, rows, device))
    }

    /// Tokens of the texts that are to be made, of the loss.
    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        Ok(vec![self.texts.target_tokens(rows) as f64])
    }

    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        Some(self.texts.source_tokens(rows) + self.texts.target_tokens(rows))
    }

    /// The loss, and the part of the rows of which the model makes the very text that is wanted.
    fn evaluate<B: FusedBackend>(&self, model: &Bart<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        let loss = scalar(self.loss_of(model, rows, device));
        let made = self.made(model, rows, device)?;
        let right = made.iter().zip(rows).filter(|(made, row)| self.texts.decoded_target(**row) == Some(made)).count();
        Ok(vec![("loss", loss), ("accuracy", right as f64 / rows.len() as f64)])
    }

    fn predict<B: FusedBackend>(&self, model: &Bart<B>, rows: &Rows, device: &B::Device) -> Result<Option<Vec<Value>>> {
        let made = self.made(model, rows, device)?.into_iter().zip(rows);
        let line =
            |(made, &row): (String, &usize)| json!({ "row": row, "label": self.texts.target(row), "prediction": made });
        Ok(Some(made.map(line).collect()))
    }

    fn has_perplexity(&self) -> bool {
        true
    }

    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        Ok(Some(self.texts.checksum(rows)))
    }

    /// For rows of which text and target are as long as they may be.
    fn profile(&self, micro_batch: usize) -> Option<Profile> {
        let lengths = [self.texts.seq(), self.texts.longest_target()];
        Some(self.start.profile(profile(&self.config, micro_batch, lengths, self.config.vocab_size)))
    }

    fn settings(&self) -> Value {
        self.start.settings()
    }
}

/// What `config` takes on `micro_batch` texts, of so many tokens that the encoder and the decoder read, with logits of so many tokens
/// of the vocabulary at each position of the decoder.
pub(super) fn profile(
    config: &BartConfig,
    micro_batch: usize,
    [seq, target]: [usize; 2],
    vocabulary: usize,
) -> Profile {
    let width = config.d_model;
    // Floats that are kept per token and layer, in widths: as BERT's, and as many again for attention to the text.
    let [encoder, decoder] =
        [(config.encoder_layers, config.encoder_ffn_dim), (config.decoder_layers, config.decoder_ffn_dim)];
    let read = encoder.0 * (9 * width + 2 * encoder.1) * seq;
    let made = decoder.0 * (9 * width + 2 * decoder.1) * target + decoder.0 * (5 * target + 2 * seq) * width;
    let logits = 2 * target * vocabulary;
    // Of a block on average.
    let bytes = |floats: usize| (4 * floats * micro_batch) as u64;
    let weights = |(layers, inner): (usize, usize), attentions: usize| {
        layers * (4 * attentions * width * width + 2 * width * inner)
    };
    let products = weights(encoder, 1) * seq + weights(decoder, 2) * target + vocabulary * width * target;
    let activations = Activations {
        blocks: encoder.0 + decoder.0,
        block: bytes((read + made) / (encoder.0 + decoder.0).max(1)),
        input: bytes((encoder.0 * seq + decoder.0 * target) * width / (encoder.0 + decoder.0).max(1)),
        rest: bytes(logits),
    };
    Profile::of_all(&config.clone().into(), activations, 6.0 * products as f64)
}
