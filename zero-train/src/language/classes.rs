//! Fine-tuning of a BERT to tell classes of texts: a [`Task`] of the [`Trainer`](crate::trainer::Trainer).

use std::ops::Range;

use burn::tensor::Tensor;
use serde_json::{Value, json};
use zero_models::bert::weights;
use zero_models::loss::cross_entropy_with_ignored;
use zero_models::safetensors_file::Checkpoint;
use zero_models::{Bert, BertConfig, BertHead, BertKind, ModelConfig};

use super::bert::profile;
use super::start::Start;
use super::{Options, Program, tokens};
use crate::data::{LabelledBatch, LabelledTexts, Tokenizer};
use crate::error::{Result, wrong};
use crate::trainer::{FusedBackend, Measured, Profile, Rows, Task, scalar};

/// A BERT with a classifier, and the texts that it learns to tell.
pub struct ClassesTask {
    /// The preset's or folder's name.
    name: String,
    config: BertConfig,
    start: Start,
    texts: LabelledTexts,
    /// Why its head is not the weights'.
    notice: Option<String>,
}

impl ClassesTask {
    /// The model by name, folder or weights, and the data's classes.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) for what the options name and cannot be used.
    pub fn new(options: &Options, program: &Program<'_>) -> Result<Self> {
        let default = if BertConfig::PRESETS.contains(&program.model) { program.model } else { "bert-base" };
        let (name, config) = match options.chosen()? {
            Some((name, ModelConfig::Bert(config))) => (name, config),
            Some((name, _)) => return Err(wrong("model", name, "expected a BERT for --task text-classification")),
            None => (default.into(), BertConfig::preset(default)?),
        };
        let Some(path) = &options.data else {
            let expected = "expected --data beside it: .jsonl or .parquet with a text and a label in each row";
            return Err(wrong("task", "text-classification", expected));
        };
        let folders = options.folders();
        let cutting = options.cutting(config.vocab_size, config.positions(), &folders);
        let tokenizer = Tokenizer::find(path, &cutting)?;
        let known: &[String] = if let BertHead::Classes(classes) = &config.head { classes } else { &[] };
        let has_head = match &options.weights {
            Some(dir) => Checkpoint::open(dir)?.names().any(|name| name.starts_with("classifier.")),
            None => false,
        };
        let texts = LabelledTexts::load(path, options.fields(), &cutting, &tokenizer, (known, !has_head))?;
        let config = BertConfig { head: BertHead::Classes(texts.classes().to_vec()), ..config };
        let heads: &[&str] = match config.model_type {
            _ if has_head => &[],
            BertKind::Bert => &["classifier", "pooler"],
            BertKind::DistilBert => &["classifier", "pre_classifier"],
            BertKind::Roberta | BertKind::XlmRoberta | BertKind::Camembert => &["classifier"],
        };
        let start = Start::new(options, Some(&tokenizer), config.clone().into(), heads)?;
        let notice = (options.weights.is_some() && !has_head).then(|| {
            format!(
                "The weights of {name} have no classifier: one of {} classes is trained from fresh.",
                texts.classes().len()
            )
        });
        Ok(Self { name, config, start, texts, notice })
    }

    /// Logits, and the classes that they should tell.
    fn classify<B: FusedBackend>(
        &self,
        model: &Bert<B>,
        rows: &[usize],
        device: &B::Device,
    ) -> (Tensor<B, 2>, LabelledBatch) {
        let batch = self.texts.batch(rows);
        let tokens = |ids: &Vec<i32>| tokens::<B>(ids.clone(), batch.width, device);
        let [ids, mut types, mask] = [&batch.input_ids, &batch.token_type_ids, &batch.attention_mask].map(tokens);
        if self.config.model_type != BertKind::Bert {
            types = types.zeros_like();
        }
        (model.classify(ids, types, Some(mask)), batch)
    }

    /// The most likely class of each row of logits.
    fn chosen<B: FusedBackend>(logits: Tensor<B, 2>) -> Vec<usize> {
        logits.argmax(1).into_data().iter::<i64>().map(|class| class as usize).collect()
    }
}

impl Task for ClassesTask {
    type Model<B: FusedBackend> = Bert<B>;

    told_by_fields!(texts);

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Bert<B>> {
        let load = |model, from: &_, device: &_| Ok(weights::load_beneath_head(model, from, device)?.0);
        self.start.model(self.config.init(device), load, device)
    }

    fn loss<B: FusedBackend>(&self, model: &Bert<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        let (logits, batch) = self.classify(model, rows, device);
        Ok(cross_entropy_with_ignored(logits, Tensor::from_ints(&*batch.classes, device)))
    }

    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        Some(self.texts.tokens(rows))
    }

    /// The loss, and by class the parts of rows that are of it and were told so, that were told so, and that are of it.
    fn evaluate<B: FusedBackend>(&self, model: &Bert<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        let (logits, batch) = self.classify(model, rows, device);
        let loss = scalar(cross_entropy_with_ignored(logits.clone(), Tensor::from_ints(&*batch.classes, device)));
        let classes = self.texts.classes().len();
        let mut parts = vec![0.0; 3 * classes];
        for (told, of) in Self::chosen(logits).into_iter().zip(batch.classes) {
            let of = of as usize;
            parts[of] += f64::from(u8::from(told == of));
            parts[classes + told] += 1.0;
            parts[2 * classes + of] += 1.0;
        }
        let mean = |sum: f64| ("", sum / rows.len() as f64);
        Ok(std::iter::once(("loss", loss)).chain(parts.into_iter().map(mean)).collect())
    }

    /// The accuracy, and F1: the mean of all classes', or of two the second one's.
    fn figures(&self, means: &[f64]) -> Option<Measured> {
        let parts: Vec<&[f64]> = means[1..].chunks_exact(self.texts.classes().len()).collect();
        let accuracy = parts[0].iter().sum();
        let f1 = |class: usize| match parts[1][class] + parts[2][class] {
            0.0 => 0.0,
            all => 2.0 * parts[0][class] / all,
        };
        let f1 = match parts[0].len() {
            2 => f1(1),
            classes => (0..classes).map(f1).sum::<f64>() / classes as f64,
        };
        Some(vec![("loss", means[0]), ("accuracy", accuracy), ("f1", f1)])
    }

    fn predict<B: FusedBackend>(&self, model: &Bert<B>, rows: &Rows, device: &B::Device) -> Result<Option<Vec<Value>>> {
        let (logits, batch) = self.classify(model, rows, device);
        let name = |class: usize| &self.texts.classes()[class];
        let told = Self::chosen(logits).into_iter().zip(batch.classes).zip(rows);
        let line = |((told, of), row)| json!({ "row": row, "label": name(of as usize), "prediction": name(told) });
        Ok(Some(told.map(line).collect()))
    }

    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        Ok(Some(self.texts.checksum(rows)))
    }

    fn profile(&self, micro_batch: usize) -> Option<Profile> {
        Some(self.start.profile(profile(&self.config, micro_batch, self.texts.seq(), 0.0)))
    }

    fn settings(&self) -> Value {
        self.start.settings()
    }

    fn notice(&self) -> Option<String> {
        self.notice.clone()
    }
}
