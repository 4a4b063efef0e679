//! Fine-tuning of a model with a classification head, which predicts classes or numbers from texts: a [`Task`] of the
//! [`Trainer`](crate::trainer::Trainer).

use std::ops::Range;
use std::path::Path;

#[cfg(feature = "burn")]
use burn::tensor::Tensor;
use serde_json::{Value, json};
#[cfg(feature = "burn")]
use zero_models::lora::Adaptable;
use zero_models::safetensors_file::Checkpoint;
#[cfg(feature = "burn")]
use zero_models::{Bart, Bert, Ids, bart, bert};
use zero_models::{BartConfig, BartHead, BertConfig, BertHead, BertKind, ModelConfig, ModelError, ProblemType};

use super::start::Start;
#[cfg(feature = "burn")]
use super::tokens;
use super::{Options, Program, TaskChoice, figures};
#[cfg(feature = "burn")]
use crate::data::LabelledBatch;
use crate::data::{KnownHead, LabelledTexts, Tokenizer};
use crate::error::{Result, wrong};
#[cfg(feature = "burn")]
use crate::trainer::{FusedBackend, Rows, scalar};
use crate::trainer::{InitialAdapter, Measured, Profile, Task};

/// The configuration of a family of models that can have a classification head.
pub trait ClassesFamily: Clone + Send + Sync + Into<ModelConfig> {
    /// The module.
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend>: Adaptable<B>;

    /// The names that [`preset`](Self::preset) accepts, and the default when no model is named.
    const PRESETS: (&'static [&'static str], &'static str);

    /// Returns the configuration of a preset.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`], with the list of names.
    fn preset(name: &str) -> Result<Self, ModelError>;

    /// Returns this family's configuration, if `config` is one.
    fn of(config: ModelConfig) -> Option<Self>;

    /// Returns the `problem_type` in the model's `config.json`.
    fn problem_type(&self) -> Option<ProblemType>;

    /// Returns the same model with a head for these labels.
    fn with_head(self, labels: Vec<String>, problem_type: Option<ProblemType>) -> Self;

    /// Returns the modules of the head, by their names in transformers. Weights have a head if they have the first.
    fn head_modules(&self) -> &'static [&'static str];

    /// Returns the number of tokens in the vocabulary, and the longest sequence.
    fn sizes(&self) -> [usize; 2];

    /// Returns the token that the head reads; all texts must have equally many of it.
    fn end_token(&self) -> Option<u32> {
        None
    }

    /// Returns the parameters, activations and operations of training on `micro_batch` rows of `seq` tokens.
    fn profile(&self, micro_batch: usize, seq: usize) -> Profile;

    /// Creates a model with initial parameters.
    #[cfg(feature = "burn")]
    fn init<B: FusedBackend>(&self, device: &B::Device) -> Self::Model<B>;

    /// Loads the weights of a checkpoint into the model; parameters of the head that the checkpoint lacks keep their initial values.
    ///
    /// # Errors
    /// Same as [`bert::weights::load_without_head`].
    #[cfg(feature = "burn")]
    fn load<B: FusedBackend>(
        model: Self::Model<B>,
        checkpoint: &Checkpoint,
        device: &B::Device,
    ) -> Result<Self::Model<B>, ModelError>;

    /// Returns the logits `[b, labels]` of texts, given as ids, segment numbers, and a padding mask, each `[b, t]`.
    #[cfg(feature = "burn")]
    fn classify<B: FusedBackend>(&self, model: &Self::Model<B>, inputs_bt: [Ids<B>; 3]) -> Tensor<B, 2>;
}

impl ClassesFamily for BertConfig {
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend> = Bert<B>;

    const PRESETS: (&'static [&'static str], &'static str) = (Self::PRESETS, "bert-base");

    fn preset(name: &str) -> Result<Self, ModelError> {
        Self::preset(name)
    }

    fn of(config: ModelConfig) -> Option<Self> {
        if let ModelConfig::Bert(config) = config { Some(config) } else { None }
    }

    fn problem_type(&self) -> Option<ProblemType> {
        self.problem_type
    }

    fn with_head(self, labels: Vec<String>, problem_type: Option<ProblemType>) -> Self {
        Self { head: BertHead::Classes(labels), problem_type, ..self }
    }

    fn head_modules(&self) -> &'static [&'static str] {
        match self.model_type {
            BertKind::Bert => &["classifier", "pooler"],
            BertKind::DistilBert => &["classifier", "pre_classifier"],
            BertKind::Roberta | BertKind::XlmRoberta | BertKind::Camembert => &["classifier"],
        }
    }

    fn sizes(&self) -> [usize; 2] {
        [self.vocab_size, self.positions()]
    }

    fn profile(&self, micro_batch: usize, seq: usize) -> Profile {
        super::bert::profile(self, micro_batch, seq, 0.0)
    }

    #[cfg(feature = "burn")]
    fn init<B: FusedBackend>(&self, device: &B::Device) -> Bert<B> {
        self.init(device)
    }

    #[cfg(feature = "burn")]
    fn load<B: FusedBackend>(model: Bert<B>, from: &Checkpoint, device: &B::Device) -> Result<Bert<B>, ModelError> {
        Ok(bert::weights::load_without_head(model, from, device)?.0)
    }

    #[cfg(feature = "burn")]
    fn classify<B: FusedBackend>(&self, model: &Bert<B>, [ids, types, mask]: [Ids<B>; 3]) -> Tensor<B, 2> {
        // Only BERT knows segments.
        let types = if self.model_type == BertKind::Bert { types } else { types.zeros_like() };
        model.classify(ids, types, Some(mask))
    }
}

impl ClassesFamily for BartConfig {
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend> = Bart<B>;

    const PRESETS: (&'static [&'static str], &'static str) = (Self::PRESETS, "bart-base");

    fn preset(name: &str) -> Result<Self, ModelError> {
        Self::preset(name)
    }

    fn of(config: ModelConfig) -> Option<Self> {
        if let ModelConfig::Bart(config) = config { Some(config) } else { None }
    }

    fn problem_type(&self) -> Option<ProblemType> {
        self.problem_type
    }

    fn with_head(self, labels: Vec<String>, problem_type: Option<ProblemType>) -> Self {
        Self { head: BartHead::Classes(labels), problem_type, ..self }
    }

    fn head_modules(&self) -> &'static [&'static str] {
        &["classification_head"]
    }

    fn sizes(&self) -> [usize; 2] {
        [self.vocab_size, self.max_position_embeddings]
    }

    fn end_token(&self) -> Option<u32> {
        Some(self.eos_token_id)
    }

    fn profile(&self, micro_batch: usize, seq: usize) -> Profile {
        super::seq2seq::profile(self, micro_batch, [seq, seq], 0)
    }

    #[cfg(feature = "burn")]
    fn init<B: FusedBackend>(&self, device: &B::Device) -> Bart<B> {
        self.init(device)
    }

    #[cfg(feature = "burn")]
    fn load<B: FusedBackend>(model: Bart<B>, from: &Checkpoint, device: &B::Device) -> Result<Bart<B>, ModelError> {
        Ok(bart::weights::load_without_head(model, from, device)?.0)
    }

    #[cfg(feature = "burn")]
    fn classify<B: FusedBackend>(&self, model: &Bart<B>, [ids, _, mask]: [Ids<B>; 3]) -> Tensor<B, 2> {
        model.classify(ids, Some(mask))
    }
}

/// A model with a classification head and its labelled texts.
pub struct ClassesTask<C> {
    /// The preset's or folder's name.
    name: String,
    config: C,
    start: Start,
    texts: LabelledTexts,
    /// Says that its head does not come from the weights.
    notice: Option<String>,
}

impl<C: ClassesFamily> ClassesTask<C> {
    /// Creates the task for the model given by name, folder or weights, with the labels of the data.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) if something that the options name cannot be used.
    pub fn new(options: &Options, program: &Program<'_>) -> Result<Self> {
        options.check_for(TaskChoice::TextClassification)?;
        let (presets, default) = C::PRESETS;
        let default = if presets.contains(&program.model) { program.model } else { default };
        let (name, config) = match options.chosen()? {
            Some((name, config)) => match C::of(config) {
                Some(config) => (name, config),
                None => {
                    return Err(wrong("model", name, "expected a BERT or a BART for --task text-classification"));
                }
            },
            None => (default.into(), C::preset(default)?),
        };
        let Some(path) = &options.data else {
            let expected = "expected --data as well: .jsonl or .parquet with a text and a label in each row";
            return Err(wrong("task", "text-classification", expected));
        };
        let (folders, [vocabulary, positions]) = (options.folders(), config.sizes());
        let tokenize = options.tokenize(vocabulary, positions, &folders);
        let tokenizer = Tokenizer::find(path, &tokenize)?;
        let heads = config.head_modules();
        let has_head = match &options.weights {
            Some(dir) => {
                let is_of_head = |name: &str| name.strip_prefix(heads[0]).is_some_and(|rest| rest.starts_with('.'));
                Checkpoint::open(dir)?.names().any(is_of_head)
            }
            None => false,
        };
        let described: ModelConfig = config.clone().into();
        if let Some(dir) = options.weights.as_ref().filter(|_| has_head && described.classes().is_empty()) {
            let expected = "expected weights of a text classifier, or without a classifier: by `architectures` in \
                            config.json, the classifier of these is of another kind";
            return Err(wrong("weights", dir.display(), expected));
        }
        let head = KnownHead {
            names: described.classes(),
            problem: config.problem_type(),
            fresh: !has_head,
            end_token: config.end_token(),
        };
        let texts = LabelledTexts::load(path, options.fields(), &tokenize, &tokenizer, head)?;
        let (labels, problem) = (texts.names().len(), texts.problem());
        // As it stands in the file where it says nothing else.
        let given = config.problem_type().or((problem != ProblemType::SingleLabelClassification).then_some(problem));
        let config = config.with_head(texts.names().to_vec(), given);
        let start = Start::new(options, Some(&tokenizer), config.clone().into(), if has_head { &[] } else { heads })?;
        let notice = (options.weights.is_some() && !has_head).then(|| match problem {
            ProblemType::Regression => {
                format!("The weights of {name} have no regression head: training a fresh one with {labels} outputs.")
            }
            _ => format!("The weights of {name} have no classifier: training a fresh one with {labels} classes."),
        });
        Ok(Self { name, config, start, texts, notice })
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &C {
        &self.config
    }

    /// Returns the labelled texts.
    pub fn texts(&self) -> &LabelledTexts {
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

    /// Returns the loss, and the means from which figures are computed, of logits `[rows, labels]` and their targets.
    pub fn measured(&self, loss: f64, logits: &[f64], targets: &[f64]) -> Measured {
        let means = figures::means(self.texts.problem(), self.texts.names().len(), logits, targets);
        std::iter::once(("loss", loss)).chain(means.into_iter().map(|mean| ("", mean))).collect()
    }

    /// Returns the label of each row and the prediction of its logits: a name, names with the probability of each predicted one, a number,
    /// or numbers.
    pub fn predictions(&self, rows: &[usize], logits: &[f64], targets: &[f64]) -> Vec<Value> {
        let (problem, labels) = (self.texts.problem(), self.texts.names().len());
        let names = |classes: &[usize]| classes.iter().map(|&class| &*self.texts.names()[class]).collect::<Vec<&str>>();
        let width = targets.len() / rows.len().max(1);
        let line = |((logits, target), row): ((&[f64], &[f64]), &usize)| {
            let (predicted, of) = (figures::predicted(problem, logits), figures::classes_of(problem, target));
            match problem {
                ProblemType::SingleLabelClassification => {
                    json!({ "row": row, "label": names(&of)[0], "prediction": names(&predicted)[0] })
                }
                ProblemType::MultiLabelClassification => {
                    let probability = |&class: &usize| 1.0 / (1.0 + (-logits[class]).exp());
                    let probabilities: Vec<f64> = predicted.iter().map(probability).collect();
                    let (label, prediction) = (names(&of), names(&predicted));
                    json!({ "row": row, "label": label, "prediction": prediction, "probabilities": probabilities })
                }
                ProblemType::Regression => match (logits, target) {
                    ([prediction], [label]) => json!({ "row": row, "label": label, "prediction": prediction }),
                    _ => json!({ "row": row, "label": target, "prediction": logits }),
                },
            }
        };
        logits.chunks_exact(labels).zip(targets.chunks_exact(width)).zip(rows).map(line).collect()
    }

    /// Returns the logits, and the batch with their targets.
    #[cfg(feature = "burn")]
    fn classify<B: FusedBackend>(
        &self,
        model: &C::Model<B>,
        rows: &[usize],
        device: &B::Device,
    ) -> (Tensor<B, 2>, LabelledBatch) {
        let batch = self.texts.batch(rows);
        let tokens = |ids: &Vec<i32>| tokens::<B>(ids.clone(), batch.width, device);
        let inputs = [&batch.input_ids, &batch.token_type_ids, &batch.attention_mask].map(tokens);
        (self.config.classify(model, inputs), batch)
    }
}

impl<C: ClassesFamily> Task for ClassesTask<C> {
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend> = C::Model<B>;

    told_by_fields!(texts);

    #[cfg(feature = "burn")]
    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<C::Model<B>> {
        self.start.model(self.config.init(device), C::load, device)
    }

    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(&self, model: &C::Model<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        let (logits, batch) = self.classify(model, rows, device);
        Ok(self.texts.problem().loss(logits, &batch.targets))
    }

    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        Some(self.texts.tokens(rows))
    }

    /// Measures the loss, and the means from which figures are computed.
    #[cfg(feature = "burn")]
    fn evaluate<B: FusedBackend>(&self, model: &C::Model<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        let (logits, batch) = self.classify(model, rows, device);
        let loss = scalar(self.texts.problem().loss(logits.clone(), &batch.targets));
        let logits: Vec<f64> = logits.into_data().iter().collect();
        Ok(self.measured(loss, &logits, &batch.targets))
    }

    fn figures(&self, means: &[f64]) -> Option<Measured> {
        Some(figures::figures(self.texts.problem(), self.texts.names().len(), means[0], &means[1..]))
    }

    #[cfg(feature = "burn")]
    fn predict<B: FusedBackend>(
        &self,
        model: &C::Model<B>,
        rows: &Rows,
        device: &B::Device,
    ) -> Result<Option<Vec<Value>>> {
        let (logits, batch) = self.classify(model, rows, device);
        let logits: Vec<f64> = logits.into_data().iter().collect();
        Ok(Some(self.predictions(rows, &logits, &batch.targets)))
    }

    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        Ok(Some(self.texts.checksum(rows)))
    }

    fn profile(&self, micro_batch: usize) -> Result<Profile> {
        Ok(self.start.profile(self.config.profile(micro_batch, self.texts.seq())))
    }

    fn settings(&self) -> Value {
        self.start.settings()
    }

    fn notice(&self) -> Option<String> {
        self.notice.clone()
    }
}
