//! Texts with a label each, for classifiers.
//!
//! * In: JSON lines or Parquet with a text (or two) and a label in each row, cut as BERT's pairs are: `[CLS] A [SEP]` or
//!   `[CLS] A [SEP] B [SEP]`.
//! * Memory: all tokens; labelled data is small.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;

use super::Cutting;
use super::documents::{self, FieldOf, Holds};
use super::tokenizer::Tokenizer;
use super::wordpiece::SPECIAL;
use crate::error::{Result, wrong_data};

/// Which fields of a row are what.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    /// The text.
    pub text: &'a str,
    /// A second text.
    pub second: Option<&'a str>,
    /// The label: a text, or a whole number.
    pub label: &'a str,
}

/// Texts, cut, and their classes.
#[derive(Debug)]
pub struct LabelledTexts {
    rows: Vec<Row>,
    classes: Vec<String>,
    seq: usize,
    pad: i32,
}

#[derive(Debug)]
struct Row {
    /// With `[CLS]` and `[SEP]`.
    ids: Vec<i32>,
    /// Of these, before the second text.
    first: usize,
    class: usize,
}

/// A batch of texts, flat: `[rows, width]`, but for `classes`, `[rows]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LabelledBatch {
    /// Tokens of the longest text.
    pub width: usize,
    /// Token ids.
    pub input_ids: Vec<i32>,
    /// 0 in the first text, 1 in the second.
    pub token_type_ids: Vec<i32>,
    /// 1 at tokens, 0 at padding.
    pub attention_mask: Vec<i32>,
    /// The class of each text.
    pub classes: Vec<i32>,
}

impl LabelledTexts {
    /// Reads, cuts and checks. `known` are a model's classes: labels are their names or their numbers. If the labels are neither,
    /// and `fresh`, they become the classes, in their order as numbers or as texts.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) when a file cannot be read or used; for a tokenizer that is not as BERT's; for labels that are no class.
    pub fn load(
        path: &Path,
        fields: Fields<'_>,
        cutting: &Cutting<'_>,
        tokenizer: &Tokenizer,
        (known, fresh): (&[String], bool),
    ) -> Result<Self> {
        let marks = 2 + usize::from(fields.second.is_some());
        let seq = cutting.row_length(marks + 2)?;
        let special = SPECIAL.map(|token| tokenizer.id(token).map(|id| id as i32));
        let [Some(pad), _, Some(cls), Some(sep), _] = special else {
            let problem = format!("is for a tokenizer as BERT's, with {}", SPECIAL.join(", "));
            return Err(wrong_data(path, problem));
        };
        let text = |name, option| FieldOf { name, option, holds: Holds::Text };
        let label = FieldOf { name: fields.label, option: "label-field", holds: Holds::Label };
        let mut asked = vec![label, text(fields.text, "text-field")];
        asked.extend(fields.second.map(|name| text(name, "second-field")));
        // None of these may be missing.
        let whole = |row: documents::RowOf| row.into_iter().flatten().collect();
        let read: Vec<Vec<String>> = documents::read_rows(path, &asked)?.into_iter().map(whole).collect();
        let labels: BTreeSet<&str> = read.iter().map(|row| row[0].as_str()).collect();
        let classes = classes(&labels, known, fresh).map_err(|problem| wrong_data(path, problem))?;
        let number = |label: &str| {
            let named = classes.iter().position(|class| class == label);
            named.or_else(|| label.parse().ok()).expect("it was looked for in all labels")
        };
        let cut = |row: &Vec<String>| -> Result<Row, String> {
            let mut texts = row[1..].iter().map(|text| tokenizer.encode(text)).collect::<Result<Vec<_>, _>>()?;
            // The longer one loses its end first, as transformers' `longest_first`.
            while texts.iter().map(Vec::len).sum::<usize>() > seq - marks {
                texts.iter_mut().rev().max_by_key(|text| text.len()).expect("there is a text").pop();
            }
            let mut ids = vec![cls];
            let mut first = 0;
            for text in &texts {
                ids.extend(text.iter().map(|&id| id as i32).chain([sep]));
                first = if first == 0 { ids.len() } else { first };
            }
            Ok(Row { ids, first, class: number(&row[0]) })
        };
        let rows: Result<Vec<Row>, String> = read.par_iter().map(cut).collect();
        Ok(Self { rows: rows.map_err(|problem| wrong_data(path, problem))?, classes, seq, pad })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The most tokens of a row.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Names of the classes.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Of some rows, to tell data from other data.
    pub fn checksum(&self, rows: Range<usize>) -> u32 {
        self.rows[rows].iter().fold(0, |sum, row| {
            let sum = crc32c::crc32c_append(sum, bytemuck::cast_slice(&row.ids));
            crc32c::crc32c_append(sum, &[row.first as u64, row.class as u64].map(u64::to_le_bytes).concat())
        })
    }

    /// Tokens of some rows, together.
    pub fn tokens(&self, rows: &[usize]) -> usize {
        rows.iter().map(|&row| self.rows[row].ids.len()).sum()
    }

    /// A batch of rows, filled up to the longest.
    pub fn batch(&self, rows: &[usize]) -> LabelledBatch {
        let width = rows.iter().map(|&row| self.rows[row].ids.len()).max().unwrap_or(0);
        let mut batch = LabelledBatch { width, ..LabelledBatch::default() };
        for Row { ids, first, class } in rows.iter().map(|&row| &self.rows[row]) {
            let fill = |value: i32, of: usize| std::iter::repeat_n(value, of);
            let padding = width - ids.len();
            batch.input_ids.extend(ids.iter().copied().chain(fill(self.pad, padding)));
            batch.token_type_ids.extend(fill(0, *first).chain(fill(1, ids.len() - first)).chain(fill(0, padding)));
            batch.attention_mask.extend(fill(1, ids.len()).chain(fill(0, padding)));
            batch.classes.push(*class as i32);
        }
        batch
    }
}

/// The classes of these labels.
fn classes(labels: &BTreeSet<&str>, known: &[String], fresh: bool) -> Result<Vec<String>, String> {
    let is_name = |label: &&str| known.iter().any(|class| class == label);
    let is_number = |label: &&str| label.parse::<usize>().is_ok_and(|number| number < known.len());
    if labels.iter().all(is_name) || labels.iter().all(is_number) {
        return Ok(known.to_vec());
    }
    if fresh {
        let mut classes: Vec<String> = labels.iter().map(ToString::to_string).collect();
        classes.sort_by_key(|label| (label.parse::<i64>().unwrap_or(i64::MAX), label.clone()));
        return match classes.len() {
            1 => Err(format!("has the label {:?} in all rows: expected at least 2 classes", classes[0])),
            _ => Ok(classes),
        };
    }
    let other = labels
        .iter()
        .find(|label| !is_name(label) && !is_number(label))
        .unwrap_or_else(|| labels.iter().next().expect("there is a row"));
    Err(format!(
        "has the label {other:?}, and the model's classes are {known:?}: expected their names, or their numbers from 0"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(labels: &[&str], known: &[&str], fresh: bool) -> Result<Vec<String>, String> {
        classes(&labels.iter().copied().collect(), &known.iter().map(ToString::to_string).collect::<Vec<_>>(), fresh)
    }

    #[test]
    fn labels_are_a_models_classes_or_become_them() {
        assert_eq!(of(&["yes", "no"], &["no", "so-so", "yes"], false).unwrap(), ["no", "so-so", "yes"]);
        assert_eq!(of(&["0", "2"], &["no", "so-so", "yes"], false).unwrap(), ["no", "so-so", "yes"]);
        assert_eq!(of(&["10", "9", "-1"], &["a", "b"], true).unwrap(), ["-1", "9", "10"]);
        assert_eq!(of(&["b", "a"], &[], true).unwrap(), ["a", "b"]);
        assert!(of(&["b", "b"], &[], true).unwrap_err().contains("expected at least 2 classes"));
        let told = of(&["yes", "maybe"], &["no", "yes"], false).unwrap_err();
        assert!(told.contains("the label \"maybe\"") && told.contains("[\"no\", \"yes\"]"), "{told}");
    }
}
