//! Training of a GPT-2 or a Llama to predict the next token, or to prefer one answer to another: a [`Task`] of the
//! [`Trainer`](crate::trainer::Trainer).
//!
//! Preferences are trained by direct preference optimization (Rafailov et al. 2023, <https://arxiv.org/abs/2305.18290>). The reference model
//! is the model before training. Its log-probabilities are computed once for all rows of a run, so it takes no memory while the run trains.

use std::ops::Range;
use std::path::Path;

#[cfg(feature = "burn")]
use burn::tensor::Tensor;
#[cfg(feature = "burn")]
use burn::tensor::activation::log_sigmoid;
use serde_json::{Value, json};
#[cfg(feature = "burn")]
use zero_models::Documents;
#[cfg(feature = "burn")]
use zero_models::generate::alone;
use zero_models::generate::{Hooks, Sampling};
use zero_models::{CausalFamily, ModelConfig};

use super::start::Start;
#[cfg(feature = "burn")]
use super::tokens;
use super::{EvalMetric, OnBadRow, Options, Program, TaskChoice, in_fixed_passes, recipes};
use crate::data::{
    ChatFormat, Conversations, DEFAULT_SEQ, LONGEST, LeftOut, LossOn, Source, TokenBatch, TokenRows, Tokenizer,
};
use crate::error::{Result, TrainError, wrong};
#[cfg(feature = "burn")]
use crate::trainer::FusedBackend;
#[cfg(feature = "burn")]
use crate::trainer::scalar;
use crate::trainer::{Activations, InitialAdapter, Measured, Profile, Recipe, Rows, Setup, Task};

/// A model that predicts the next token, and its training rows.
pub struct CausalTask<C> {
    /// The preset's or folder's name.
    name: String,
    config: C,
    /// The configuration to train with: without dropout for preferences, as in TRL.
    trained: C,
    /// The strength of the tie to the reference model, if rows are preferences.
    beta: Option<f64>,
    metric: Option<EvalMetric>,
    /// Number of tokens of the longest answer of a held-out row; 0 if the labels of rows are not answers alone.
    longest_answer: usize,
    start: Start,
    rows: CausalRows,
    /// The reason that it is not the program's model.
    notice: Option<String>,
}

/// Training rows of a model that predicts the next token.
#[derive(Debug)]
pub enum CausalRows {
    /// Documents, one after the other.
    Documents(TokenRows),
    /// One conversation per row.
    Conversations(Conversations),
}

impl CausalRows {
    fn load(
        options: &Options,
        source: &Source<'_>,
        format: Option<ChatFormat>,
        [vocabulary, positions]: [usize; 2],
    ) -> Result<Self> {
        let folders = options.folders();
        let tokenize = options.tokenize(vocabulary, positions, &folders);
        if format == Some(ChatFormat::Preference) && options.task != Some(TaskChoice::Dpo) {
            let expected =
                "expected --task dpo: the rows of --data are preferences, with the keys `chosen` and `rejected`";
            return Err(wrong("task", "causal-lm", expected));
        }
        let (Source::File(path), Some(format)) = (source, format) else {
            if let Some(loss_on) = options.loss_on {
                let expected =
                    "expected --data as well, with conversations, or with prompts and completions, in its rows";
                return Err(wrong("loss-on", format!("{loss_on:?}").to_lowercase(), expected));
            }
            if options.packing {
                let expected = "expected --data as well, with conversations; rows of documents are always full";
                return Err(wrong("packing", true, expected));
            }
            if options.eval_metric.is_some() {
                return Err(wrong(
                    "eval-metric",
                    "exact-match",
                    "expected --data with conversations as well: other rows have no answers",
                ));
            }
            if options.on_bad_row == OnBadRow::Skip {
                let expected = "expected --data as well, with conversations; the first row determines the format, so it must be a good one";
                return Err(wrong("on-bad-row", "skip", expected));
            }
            return Ok(Self::Documents(TokenRows::load(source, &tokenize)?));
        };
        let tokenizer = Tokenizer::find(path, &tokenize)?;
        let rows = Conversations::load(path, format, options.loss_on.unwrap_or_default(), &tokenize, tokenizer)?;
        warn_of(path, &rows);
        Ok(Self::Conversations(rows))
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Documents(rows) => rows.rows(),
            Self::Conversations(rows) => rows.rows(),
        }
    }

    /// Returns the number of rows at the end that belong to a validation split.
    pub fn held_out(&self) -> usize {
        match self {
            Self::Documents(rows) => rows.held_out(),
            Self::Conversations(rows) => rows.held_out(),
        }
    }

    /// Returns the number of tokens of the longest row.
    pub fn seq(&self) -> usize {
        match self {
            Self::Documents(rows) => rows.seq(),
            Self::Conversations(rows) => rows.seq(),
        }
    }

    /// Returns the tokenizer; `None` for a file of ids.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match self {
            Self::Documents(rows) => rows.tokenizer(),
            Self::Conversations(rows) => Some(rows.tokenizer()),
        }
    }

    /// Returns the tokens of some rows and their labels; of preferences, those of [`Conversations::batch`].
    ///
    /// # Errors
    ///
    /// An error if the file cannot be read.
    pub fn batch(&self, rows: &[usize]) -> Result<TokenBatch> {
        match self {
            Self::Documents(documents) => {
                let ids = documents.tokens(rows)?;
                Ok(TokenBatch { width: documents.seq(), labels: ids.clone(), input_ids: ids, documents: None })
            }
            Self::Conversations(conversations) => Ok(conversations.batch(rows)),
        }
    }

    /// Returns the prompt that the model continues after training: the beginning of a document, or everything before an answer.
    fn prompt(&self, row: usize, most: usize) -> Result<Vec<u32>> {
        let prompt = match self {
            Self::Conversations(rows) => rows.prompt_and_answer(row)[0].to_vec(),
            rows => rows.batch(&[row])?.input_ids.into_iter().take(16).collect(),
        };
        Ok(unsigned(&prompt).take(most).collect())
    }
}

fn unsigned(ids: &[i32]) -> impl Iterator<Item = u32> {
    ids.iter().map(|&id| id as u32)
}

/// Prints which rows are left out or cut.
fn warn_of(path: &Path, rows: &Conversations) {
    let LeftOut { read, without_labels, cut, empty, bad } = rows.left_out();
    bad.first.iter().for_each(|problem| eprintln!("warning: {problem}; the row is skipped"));
    let path = path.display();
    let more = bad.number - bad.first.len();
    if more > 0 {
        eprintln!("warning: {path}: {more} more rows cannot be used, and are skipped ({} of {read})", bad.number);
    }
    for (rows, what) in [
        (without_labels, "are skipped: no token of an answer fits into the longest row (--seq)"),
        (cut, "are cut to the length of the longest row (--seq)"),
        (empty, "have an answer without text: the model learns only to end its turn"),
    ] {
        if rows.number > 0 {
            eprintln!("warning: {path}: {} of {read} rows {what}: {rows}", rows.number);
        }
    }
}

impl<C: CausalFamily> CausalTask<C> {
    /// Creates the task for the model given by name, folder or weights. If none is given, uses the program's model, or the
    /// largest preset that fits into memory.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if something that the options name cannot be used.
    pub fn new(options: &Options, program: &Program<'_>, setup: &Setup<'_>) -> Result<Self> {
        let is_dpo = options.task == Some(TaskChoice::Dpo);
        options.check_for(if is_dpo { TaskChoice::Dpo } else { TaskChoice::CausalLm })?;
        let source = options.source(program);
        // A field that is named is one of documents.
        let formats = if options.text_field.is_none() { ChatFormat::of(&source)? } else { Vec::new() };
        let format = match is_dpo {
            false => formats.first().copied(),
            true if formats.contains(&ChatFormat::Preference) => Some(ChatFormat::Preference),
            true => {
                let expected = "expected --data with preferences: rows with the keys `chosen` and `rejected`, and possibly `prompt`";
                return Err(wrong("task", "dpo", expected));
            }
        };
        let default = if format.is_some() { LONGEST } else { DEFAULT_SEQ };
        let seq = options.seq.or(source.row_length()?).unwrap_or(default);
        let (name, config, notice) = match options.chosen()? {
            Some((name, config)) => match C::of(config) {
                Some(config) => (name, config, None),
                None => {
                    return Err(wrong(
                        "model",
                        name,
                        "expected a GPT-2, or a Llama, Mistral, Qwen, Gemma or Phi, for --task causal-lm and dpo",
                    ));
                }
            },
            None => fitting(program.model, (seq, if is_dpo { 2 } else { 1 }), options.seq, setup)?,
        };
        config.validate()?;
        let sizes = config.sizes();
        if let Some(seq) = options.seq.filter(|&seq| seq < 2 || seq > sizes.positions) {
            let expected = format!("expected 2 to {}, the positions of model {name}", sizes.positions);
            return Err(wrong("seq", seq, expected));
        }
        let rows = CausalRows::load(options, &source, format, [sizes.vocabulary, sizes.positions])?;
        let start = Start::new(options, rows.tokenizer(), config.clone().into(), &[])?;
        let beta = is_dpo.then(|| options.dpo_beta.unwrap_or(DPO_BETA));
        let trained = if is_dpo { config.without_dropout() } else { config.clone() };
        let held_out = options.train.eval.unwrap_or(rows.held_out()).min(rows.rows());
        let longest_answer = match &rows {
            CausalRows::Conversations(conversations)
                if !conversations.is_packed() && options.loss_on != Some(LossOn::All) =>
            {
                let answers = (rows.rows() - held_out..rows.rows()).map(|row| conversations.prompt_and_answer(row)[1]);
                answers.map(<[i32]>::len).max().unwrap_or(0).max(1)
            }
            _ => 0,
        };
        let metric = options.eval_metric;
        if metric.is_some() && (longest_answer == 0 || held_out == 0) {
            let expected = "expected held-out conversations (--eval ROWS) without --packing and --loss-on all";
            return Err(wrong("eval-metric", "exact-match", expected));
        }
        Ok(Self { name, config, trained, beta, metric, longest_answer, start, rows, notice })
    }

    /// Returns the configuration of the model to train.
    pub fn trained_config(&self) -> &C {
        &self.trained
    }

    /// Returns the factors of the rewards of a batch of preferences, sequence by sequence, and the reference's mean losses; `None` if rows
    /// are no preferences. The reward of a sequence is its factor times the reference's loss minus the model's: beta times the difference of
    /// their log-probabilities.
    pub fn preferences(&self, rows: &Rows) -> Option<[Vec<f32>; 2]> {
        let (CausalRows::Conversations(conversations), Some(beta)) = (&self.rows, self.beta) else { return None };
        let factors = conversations.labels_of_each(rows).into_iter().map(|labels| (beta * labels as f64) as f32);
        // The reference has the two losses of each row together; in a batch, all chosen sequences come first.
        let of = |at: usize| rows.reference().iter().skip(at).step_by(2).map(|&loss| loss as f32);
        Some([factors.collect(), of(0).chain(of(1)).collect()])
    }

    /// Returns what [`Task::reference`] returns, from the mean losses of a batch's sequences.
    pub fn reference_of(&self, losses: &[f64]) -> Vec<f64> {
        let (chosen, rejected) = losses.split_at(losses.len() / 2);
        chosen.iter().zip(rejected).flat_map(|(chosen, rejected)| [*chosen, *rejected]).collect()
    }

    /// Returns the figures of held-out preferences from their loss and their sequences' rewards.
    pub fn measured(&self, loss: f64, rewards: &[f64]) -> Measured {
        let (chosen, rejected) = rewards.split_at(rewards.len() / 2);
        let pairs = || chosen.iter().zip(rejected);
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / chosen.len() as f64;
        vec![
            ("loss", loss),
            ("reward_accuracy", mean(&mut pairs().map(|(chosen, rejected)| f64::from(u8::from(chosen > rejected))))),
            ("reward_margin", mean(&mut pairs().map(|(chosen, rejected)| chosen - rejected))),
            ("reward_chosen", mean(&mut chosen.iter().copied())),
            ("reward_rejected", mean(&mut rejected.iter().copied())),
        ]
    }

    /// Returns the training rows.
    pub fn rows(&self) -> &CausalRows {
        &self.rows
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

    /// Returns the loss of held-out rows with the figures of the requested metric, for which `generate` makes answers as in
    /// [`predictions_by`](Self::predictions_by).
    ///
    /// # Errors
    ///
    /// An error of `generate`.
    pub fn measured_by(
        &self,
        rows: &Rows,
        loss: f64,
        generate: impl FnOnce(&[Vec<u32>], &Sampling, Hooks<'_>) -> Result<Vec<Vec<u32>>>,
    ) -> Result<Measured> {
        let mut measured = vec![("loss", loss)];
        if self.metric == Some(EvalMetric::ExactMatch)
            && let Some(predictions) = self.predictions_by(rows, generate)?
        {
            let right = predictions.iter().filter(|line| line["prediction"] == line["label"]).count();
            measured.push(("exact_match", right as f64 / predictions.len() as f64));
        }
        Ok(measured)
    }

    /// Returns the last answer of each of these conversations, and the one that `generate` makes, greedily; `None` for documents, packed
    /// rows, and rows whose labels are all tokens.
    ///
    /// # Errors
    ///
    /// An error of `generate`.
    pub fn predictions_by(
        &self,
        rows: &[usize],
        generate: impl FnOnce(&[Vec<u32>], &Sampling, Hooks<'_>) -> Result<Vec<Vec<u32>>>,
    ) -> Result<Option<Vec<Value>>> {
        let CausalRows::Conversations(conversations) = &self.rows else { return Ok(None) };
        if self.longest_answer == 0 {
            return Ok(None);
        }
        let tokenizer = conversations.tokenizer();
        let text = |ids: &[u32]| tokenizer.decode(ids).trim().to_string();
        let both: Vec<[Vec<u32>; 2]> =
            rows.iter().map(|&row| conversations.prompt_and_answer(row).map(|ids| unsigned(ids).collect())).collect();
        let prompts: Vec<Vec<u32>> = both.iter().map(|[prompt, _]| prompt.clone()).collect();
        // A turn ends with a special token, which may not be the tokenizer's own end, and which a newline may follow.
        let is_special = |id: &&u32| tokenizer.decode(&[**id]).is_empty();
        let ends = both.iter().filter_map(|[_, answer]| answer.iter().rev().take(2).find(is_special).copied());
        let stop = ends.chain(tokenizer.end()).collect();
        let how = Sampling {
            max_new_tokens: self.longest_answer,
            max_length: Some(self.config.sizes().positions),
            stop,
            ..Sampling::default()
        };
        let made = in_fixed_passes(&prompts, &how, generate)?;
        let line = |((&row, [prompt, answer]), made): ((&usize, &[Vec<u32>; 2]), &Vec<u32>)| json!({ "row": row, "prompt": text(prompt), "label": text(answer), "prediction": text(made) });
        Ok(Some(rows.iter().zip(&both).zip(&made).map(line).collect()))
    }

    /// Returns the prompt of the last row, and the tokens that follow by `generate`. `None` if there is no tokenizer or prompt.
    ///
    /// # Errors
    ///
    /// An error of `generate`, or if the row cannot be read.
    pub fn sample_by(
        &self,
        generate: impl FnOnce(&[Vec<u32>], &Sampling) -> Result<Vec<Vec<u32>>>,
    ) -> Result<Option<String>> {
        let Some(tokenizer) = self.rows.tokenizer() else { return Ok(None) };
        let how = Sampling { max_new_tokens: 32, temperature: 0.8, top_k: Some(40), ..Sampling::default() };
        let room = self.config.sizes().positions.saturating_sub(how.max_new_tokens);
        let prompt = self.rows.prompt(self.rows.rows() - 1, room)?;
        if prompt.is_empty() {
            return Ok(None);
        }
        let made = generate(std::slice::from_ref(&prompt), &how)?.concat();
        let [given, follows] = [&prompt[..], &made].map(|tokens| tokenizer.decode(tokens));
        Ok(Some(format!("prompt:\n{given}\ngenerated text:\n{follows}")))
    }
}

/// Returns the program's model, or the largest preset that fits and the reason for it.
fn fitting<C: CausalFamily>(
    default: &str,
    (seq, sequences): (usize, usize),
    asked: Option<usize>,
    setup: &Setup<'_>,
) -> Result<(String, C, Option<String>)> {
    let shortfall = |model: &C| {
        let profile = |micro_batch: usize| profile(model, sequences * micro_batch, seq.min(model.sizes().positions));
        setup.memory_shortfall(Some(model.sizes().width), &profile)
    };
    let wanted = C::preset(default)?;
    let Some(why) = shortfall(&wanted)? else { return Ok((default.to_string(), wanted, None)) };
    let why = format!("{default} does not fit: {why}");
    let parameters = |model: &C| profile(model, 1, 1).parameters.iter().sum::<usize>();
    for &name in C::PRESETS.iter().rev() {
        let model = C::preset(name)?;
        let short = asked.is_some_and(|seq| seq > model.sizes().positions);
        if parameters(&model) < parameters(&wanted) && !short && shortfall(&model)?.is_none() {
            let notice = format!("{why}.\nTraining {name}, the largest preset that fits.");
            return Ok((name.to_string(), model, Some(notice)));
        }
    }
    Err(TrainError::Memory(format!(
        "{why}, and no smaller preset fits either; use fewer --ranks or a smaller --seq or --batch"
    )))
}

/// Returns the profile of `model` on `micro_batch` rows of `seq` tokens.
fn profile<C: CausalFamily>(model: &C, micro_batch: usize, seq: usize) -> Profile {
    let (tokens, sizes) = ((micro_batch * seq) as u64, model.sizes());
    // Logits are made for a few rows at a time.
    let logits = 2 * tokens.min(256) * sizes.vocabulary as u64;
    let activations = Activations {
        blocks: sizes.layers,
        block: 4 * tokens * sizes.kept as u64,
        input: 4 * tokens * sizes.width as u64,
        rest: 4 * logits,
    };
    Profile::of_all(&model.clone().into(), activations, model.flops_per_token(seq) as f64 * seq as f64)
}

/// Default of `--dpo-beta`, the same as TRL's.
const DPO_BETA: f64 = 0.1;

/// Returns the loss `[1]` of preferences and the rewards of their sequences `[s]`, from the model's mean losses `[s]` and
/// [`CausalTask::preferences`]: the mean of `-log sigmoid(chosen reward - rejected reward)`.
#[cfg(feature = "burn")]
fn preference_loss<B: FusedBackend>(
    losses_s: Tensor<B, 1>,
    preferences: [Vec<f32>; 2],
) -> (Tensor<B, 1>, Tensor<B, 1>) {
    let [factors_s, reference_s] = preferences.map(|values| Tensor::from_floats(&*values, &losses_s.device()));
    let rewards_s = (reference_s - losses_s) * factors_s;
    let [chosen_b, rejected_b] = rewards_s.clone().chunk(2, 0).try_into().expect("a row has two sequences");
    (log_sigmoid(chosen_b - rejected_b).mean().neg(), rewards_s)
}

impl<C: CausalFamily> CausalTask<C> {
    /// Returns the mean loss of each sequence of a batch.
    #[cfg(feature = "burn")]
    fn row_losses<B: FusedBackend>(
        &self,
        model: &C::Model<B>,
        rows: &Rows,
        device: &B::Device,
    ) -> Result<Tensor<B, 1>> {
        let TokenBatch { width, input_ids, labels, .. } = self.rows.batch(rows)?;
        let [ids_bt, labels_bt] = [input_ids, labels].map(|ids| tokens(ids, width, device));
        Ok(C::row_losses(model, ids_bt, labels_bt))
    }

    /// Returns the number of sequences that the model reads for a row.
    fn sequences_per_row(&self) -> usize {
        if self.beta.is_some() { 2 } else { 1 }
    }
}

impl<C: CausalFamily> Task for CausalTask<C> {
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend> = C::Model<B>;

    told_by_fields!(rows, sequences_per_row);

    #[cfg(feature = "burn")]
    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<C::Model<B>> {
        self.start.model(self.trained.init(device), C::load, device)
    }

    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(&self, model: &C::Model<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        if let Some(preferences) = self.preferences(rows) {
            return Ok(preference_loss(self.row_losses(model, rows, device)?, preferences).0);
        }
        let TokenBatch { width, input_ids, labels, documents } = self.rows.batch(rows)?;
        let [ids_bt, labels_bt] = [input_ids, labels].map(|ids| tokens(ids, width, device));
        Ok(C::loss(model, ids_bt, labels_bt, documents.map(Documents::new).as_ref()))
    }

    #[cfg(feature = "burn")]
    fn reference<B: FusedBackend>(
        &self,
        model: &C::Model<B>,
        rows: &Rows,
        device: &B::Device,
    ) -> Result<Option<Vec<f64>>> {
        if self.beta.is_none() {
            return Ok(None);
        }
        let losses: Vec<f64> = self.row_losses(model, rows, device)?.into_data().iter().collect();
        Ok(Some(self.reference_of(&losses)))
    }

    #[cfg(feature = "burn")]
    fn evaluate<B: FusedBackend>(&self, model: &C::Model<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        let Some(preferences) = self.preferences(rows) else {
            let loss = scalar(self.loss(model, rows, device)?);
            return self
                .measured_by(rows, loss, |prompts, how, hooks| Ok(C::generate(model, prompts, how, device, hooks)?));
        };
        let (loss, rewards) = preference_loss(self.row_losses(model, rows, device)?, preferences);
        Ok(self.measured(scalar(loss), &rewards.into_data().iter().collect::<Vec<_>>()))
    }

    #[cfg(feature = "burn")]
    fn predict<B: FusedBackend>(
        &self,
        model: &C::Model<B>,
        rows: &Rows,
        device: &B::Device,
    ) -> Result<Option<Vec<Value>>> {
        self.predictions_by(rows, |prompts, how, hooks| Ok(C::generate(model, prompts, how, device, hooks)?))
    }

    /// Returns the number of labels of conversations. All rows of documents have equally many, and the loss of preferences is a mean over
    /// rows.
    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        Ok(match &self.rows {
            CausalRows::Conversations(conversations) if self.beta.is_none() => vec![conversations.labels(rows) as f64],
            _ => Vec::new(),
        })
    }

    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        match &self.rows {
            CausalRows::Documents(_) => None,
            CausalRows::Conversations(conversations) => Some(conversations.tokens(rows)),
        }
    }

    /// Returns `false` for documents, which are read in their own order.
    fn shuffle(&self) -> bool {
        matches!(self.rows, CausalRows::Conversations(_))
    }

    fn has_perplexity(&self) -> bool {
        self.beta.is_none()
    }

    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        Ok(Some(match &self.rows {
            CausalRows::Documents(documents) => documents.checksum(rows)?,
            CausalRows::Conversations(conversations) => conversations.checksum(rows),
        }))
    }

    fn profile(&self, micro_batch: usize) -> Result<Profile> {
        let sequences = self.sequences_per_row();
        let mut whole = profile(&self.config, sequences * micro_batch, self.rows.seq());
        if self.beta.is_some() && !self.start.has_adapter() {
            // Each sequence keeps the gradient of the head until the backward pass scales it.
            let head = (self.config.sizes().vocabulary * self.config.sizes().width) as u64;
            whole.activations.rest += 4 * head * (sequences * micro_batch) as u64;
        }
        Ok(self.start.profile(Profile { flops_per_row: whole.flops_per_row * sequences as f64, ..whole }))
    }

    /// Generates the tokens that follow the prompt of the last row.
    #[cfg(feature = "burn")]
    fn sample<B: FusedBackend>(&self, model: &C::Model<B>, device: &B::Device) -> Result<Option<String>> {
        self.sample_by(|prompts, how| Ok(alone(|hooks| C::generate(model, prompts, how, device, hooks))?))
    }

    fn examples(&self) -> Option<String> {
        let CausalRows::Conversations(rows) = &self.rows else { return None };
        let example = |(row, of, at): (usize, &str, usize)| {
            let part = |(counts, text): (bool, String)| format!("  {} {text:?}", if counts { '+' } else { '-' });
            let parts: Vec<String> = rows.parts(row, at).into_iter().map(part).collect();
            format!("row {}{of}:\n{}", row + 1, parts.join("\n"))
        };
        let shown = (0..rows.rows().min(3)).flat_map(|row| match (rows.are_preferences(), rows.is_packed()) {
            (true, _) => vec![(row, ", chosen", 0), (row, ", rejected", 1)],
            (false, true) => vec![(row, ", its first conversation", 0)],
            (false, false) => vec![(row, "", 0)],
        });
        let examples: Vec<String> = shown.map(example).collect();
        Some(format!("examples (+ counts in the loss, - is only read):\n{}", examples.join("\n")))
    }

    fn settings(&self) -> Value {
        let mut settings = self.start.settings();
        if let Some(beta) = self.beta {
            settings["dpo_beta"] = beta.into();
        }
        settings
    }

    fn recipe(&self) -> Option<Recipe> {
        if self.beta.is_some() {
            return Some(recipes::dpo(self.start.has_adapter()));
        }
        if !C::PRESETS.contains(&&*self.name) || self.start.weights().is_some() {
            return None;
        }
        let model: ModelConfig = self.config.clone().into();
        let parameters = model.parameters().iter().map(zero_models::ModelParam::numel).sum();
        Some(match model {
            ModelConfig::Llama(_) => recipes::llama(parameters),
            _ => recipes::gpt2(parameters),
        })
    }

    fn notice(&self) -> Option<String> {
        self.notice.clone()
    }
}
