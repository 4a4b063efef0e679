//! Classification heads of transformers' `...ForSequenceClassification`: the keys of `config.json` that describe one, and the losses
//! that train one.
//!
//! Shape suffixes: `n` rows, `l` labels.

use std::collections::BTreeMap;

#[cfg(feature = "burn")]
use burn::tensor::backend::Backend;
#[cfg(feature = "burn")]
use burn::tensor::{Tensor, TensorData, activation};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

#[cfg(feature = "burn")]
use crate::loss::{cross_entropy_with_ignored, in_fp32};
use crate::{ModelError, Result};

/// Suffix of the class names in transformers that have a classification head.
pub(crate) const CLASSIFIER: &str = "ForSequenceClassification";

const MOST_LABELS: usize = 1 << 20;

/// The kind of labels that a classification head is trained on: `problem_type` in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemType {
    /// One number for each output of the head.
    Regression,
    /// One class of several.
    SingleLabelClassification,
    /// Any number of classes.
    MultiLabelClassification,
}

impl ProblemType {
    /// Returns the kind that `problem_type` names. Without it, a head with one label is trained by regression; for other heads the
    /// labels decide, as in transformers, and this returns `None`.
    pub fn of_head(given: Option<Self>, labels: usize) -> Option<Self> {
        given.or_else(|| (labels == 1).then_some(Self::Regression))
    }

    /// Returns the mean loss of a batch, as transformers' `...ForSequenceClassification`: the mean squared error over all numbers, the
    /// mean cross-entropy of the classes, or the mean binary cross-entropy over all classes of all rows. For 16-bit logits it is
    /// computed in fp32.
    ///
    /// # Shapes
    /// - `logits_nl`: `[n, l]`
    /// - `targets`: `n` class indices for a single label, otherwise `n * l` numbers, row by row; for several labels, 1 for each class of
    ///   a row and 0 for the others
    /// - returns `[1]`
    ///
    /// # Panics
    /// If the number of targets is wrong.
    #[cfg(feature = "burn")]
    pub fn loss<B: Backend>(self, logits_nl: Tensor<B, 2>, targets: &[f64]) -> Tensor<B, 1> {
        let (shape, device) = (logits_nl.dims(), logits_nl.device());
        if self == Self::SingleLabelClassification {
            let classes: Vec<i32> = targets.iter().map(|&class| class as i32).collect();
            return cross_entropy_with_ignored(logits_nl, Tensor::from_ints(&*classes, &device));
        }
        let targets: Vec<f32> = targets.iter().map(|&target| target as f32).collect();
        let targets_nl = Tensor::<B, 2>::from_data(TensorData::new(targets, shape), &device);
        let logits_nl = in_fp32(logits_nl);
        match self {
            Self::Regression => {
                let errors_nl = logits_nl - targets_nl;
                errors_nl.clone() * errors_nl
            }
            // -log(1 - sigmoid(x)) is x - log(sigmoid(x)).
            _ => (-targets_nl + 1.0) * logits_nl.clone() - activation::log_sigmoid(logits_nl),
        }
        .mean()
    }
}

/// Checks that a head can have these labels.
pub(crate) fn check_labels(model: &'static str, given: Option<ProblemType>, labels: &[String]) -> Result<()> {
    let (least, expected) = match given {
        Some(ProblemType::SingleLabelClassification) => {
            (2, "at least 2 with problem_type \"single_label_classification\"")
        }
        _ => (1, "at least 1"),
    };
    if labels.len() >= least {
        return Ok(());
    }
    let got = format!("{} classes", labels.len());
    Err(ModelError::ConfigValue { model, field: "id2label", got, expected: expected.into() })
}

/// The keys of `config.json` that determine a model's head and, for a classification head, the names of its labels.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct HeadKeys {
    architectures: Option<Vec<String>>,
    /// Names are strings; some files have numbers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "map_or_null")]
    id2label: BTreeMap<String, Value>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty", skip_deserializing)]
    label2id: BTreeMap<String, usize>,
    #[serde(skip_serializing, deserialize_with = "label_count")]
    num_labels: Option<usize>,
}

fn map_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, Value>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Reads a number of labels, which is limited because names are created for all of them.
fn label_count<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    match Option::<usize>::deserialize(from)? {
        Some(count) if count > MOST_LABELS => {
            Err(serde::de::Error::custom(format!("num_labels = {count}: expected at most {MOST_LABELS}")))
        }
        count => Ok(count),
    }
}

impl HeadKeys {
    /// Returns the keys of a model of this class in transformers, with these labels.
    pub(crate) fn new(architecture: String, labels: &[String]) -> Self {
        Self {
            architectures: Some(vec![architecture]),
            id2label: labels.iter().enumerate().map(|(id, label)| (id.to_string(), label.as_str().into())).collect(),
            label2id: labels.iter().cloned().zip(0..).collect(),
            num_labels: None,
        }
    }

    /// Returns `true` if a class name ends with `class`.
    pub(crate) fn is(&self, class: &str) -> bool {
        self.architectures.iter().flatten().any(|name| name.ends_with(class))
    }

    /// Returns the labels of a classification head, if the model has one. If the file has neither names nor a number, there are
    /// `default` labels.
    pub(crate) fn labels(&self, default: usize) -> Option<Vec<String>> {
        if !self.is(CLASSIFIER) {
            return None;
        }
        // JSON's keys are strings.
        let number = |id: &String| id.parse::<usize>().unwrap_or(usize::MAX);
        let name = |label: &Value| label.as_str().map_or_else(|| label.to_string(), str::to_string);
        let mut named: Vec<_> = self.id2label.iter().map(|(id, label)| (number(id), name(label))).collect();
        named.sort();
        let labels: Vec<String> = named.into_iter().map(|(_, label)| label).collect();
        Some(if labels.is_empty() { unnamed_labels(self.num_labels.unwrap_or(default)) } else { labels })
    }
}

/// Returns transformers' names for labels without names.
pub fn unnamed_labels(labels: usize) -> Vec<String> {
    (0..labels).map(|label| format!("LABEL_{label}")).collect()
}

#[cfg(all(test, feature = "burn"))]
mod tests {
    use burn_flex::Flex;

    use super::*;

    fn loss(problem: ProblemType, logits: [[f32; 3]; 2], targets: &[f64]) -> f64 {
        let logits = Tensor::<Flex, 2>::from_floats(logits, &Default::default());
        f64::from(problem.loss(logits, targets).into_scalar())
    }

    #[test]
    fn losses_are_means_over_all_entries() {
        let logits = [[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]];
        let flat: Vec<f64> = logits.concat().into_iter().map(f64::from).collect();
        let targets = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0];
        let mean = |of: &dyn Fn(f64, f64) -> f64| flat.iter().zip(targets).map(|(&x, y)| of(x, y)).sum::<f64>() / 6.0;
        let squared = mean(&|x, y| (x - y).powi(2));
        assert!((loss(ProblemType::Regression, logits, &targets) - squared).abs() < 1e-6);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let binary = mean(&|x, y| -(y * sigmoid(x).ln() + (1.0 - y) * (1.0 - sigmoid(x)).ln()));
        assert!((loss(ProblemType::MultiLabelClassification, logits, &targets) - binary).abs() < 1e-6);
        let row = |x: &[f64], class: usize| x.iter().map(|x| x.exp()).sum::<f64>().ln() - x[class];
        let single = (row(&flat[..3], 2) + row(&flat[3..], 1)) / 2.0;
        assert!((loss(ProblemType::SingleLabelClassification, logits, &[2.0, 1.0]) - single).abs() < 1e-6);
    }

    #[test]
    fn large_logits_stay_finite() {
        let logits = [[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]];
        let right = [1.0, 0.0, 0.5, 0.0, 1.0, 0.5];
        let got = loss(ProblemType::MultiLabelClassification, logits, &right);
        assert!((got - 2.0 * 2f64.ln() / 6.0).abs() < 1e-6, "{got}");
        let wrong = [0.0, 1.0, 0.5, 1.0, 0.0, 0.5];
        let got = loss(ProblemType::MultiLabelClassification, logits, &wrong);
        assert!((got - 4e4 / 6.0).abs() < 1.0, "{got}");
    }
}
