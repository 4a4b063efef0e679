//! Texts with a label each, for classifiers.
//!
//! * In: JSON lines, tables or Parquet with a text (or two) and a label in each row, cut as the tokenizer puts texts together: as BERT's
//!   `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, or as RoBERTa's `<s> A </s></s> B </s>`.
//! * Memory: all tokens; labelled data is small.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;

use super::Cutting;
use super::documents::{self, Cell, FieldOf, Holds};
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
    held_out: usize,
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
    /// Reads, cuts and checks. `known` are a model's classes: labels that are numbers are theirs, and labels that are texts their names,
    /// or else their numbers. If the labels are neither, and `fresh`, they become the classes, in their order as numbers or as texts.
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
        let around = tokenizer.around(fields.second.is_some());
        let (Some(around), pad) = (around, tokenizer.pad()) else {
            let problem = format!(
                "needs a tokenizer that puts tokens around a text: with {}, or with a post_processor in its tokenizer.json",
                SPECIAL.join(", ")
            );
            return Err(wrong_data(path, problem));
        };
        let marks = around.iter().map(Vec::len).sum::<usize>();
        let seq = cutting.row_length(marks + 2)?;
        let [before, behind @ ..] = around.map(|ids| ids.into_iter().map(|id| id as i32).collect::<Vec<_>>());
        let text = |name, option| FieldOf { name, option, holds: Holds::Text };
        let label = FieldOf { name: fields.label, option: "label-field", holds: Holds::Label };
        let mut asked = vec![label, text(fields.text, "text-field")];
        asked.extend(fields.second.map(|name| text(name, "second-field")));
        // None of these may be missing.
        let whole = |row: documents::RowOf| row.into_iter().flatten().collect();
        let (read, held_out) = documents::read_rows(path, &asked, cutting.held_out)?;
        let read: Vec<Vec<Cell>> = read.into_iter().map(whole).collect();
        let labels: BTreeSet<(&str, bool)> = read.iter().map(|row| (row[0].text.as_str(), row[0].is_number)).collect();
        let (classes, numbers) = classes(&labels, known, fresh).map_err(|problem| wrong_data(path, problem))?;
        let cut = |row: &Vec<Cell>| -> Result<Row, String> {
            let mut texts = row[1..].iter().map(|cell| tokenizer.encode(&cell.text)).collect::<Result<Vec<_>, _>>()?;
            // The longer one loses its end first, as transformers' `longest_first`.
            while texts.iter().map(Vec::len).sum::<usize>() > seq - marks {
                texts.iter_mut().rev().max_by_key(|text| text.len()).expect("there is a text").pop();
            }
            let mut ids = before.clone();
            let mut first = 0;
            // Behind a text alone stands what stands behind the last.
            for (text, behind) in texts.iter().zip(&behind[2 - texts.len()..]) {
                ids.extend(text.iter().map(|&id| id as i32).chain(behind.iter().copied()));
                first = if first == 0 { ids.len() } else { first };
            }
            Ok(Row { ids, first, class: numbers[&*row[0].text] })
        };
        let rows: Result<Vec<Row>, String> = read.par_iter().map(cut).collect();
        Ok(Self { rows: rows.map_err(|problem| wrong_data(path, problem))?, held_out, classes, seq, pad: pad as i32 })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The number of last rows that belong to a validation split.
    pub fn held_out(&self) -> usize {
        self.held_out
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

/// The classes of these labels, of which each is a text and whether it is a number in its file; and the number of the class of each.
fn classes<'a>(
    labels: &BTreeSet<(&'a str, bool)>,
    known: &[String],
    fresh: bool,
) -> Result<(Vec<String>, HashMap<&'a str, usize>), String> {
    let are_numbers = labels.iter().any(|(_, is_number)| *is_number);
    let texts = || labels.iter().map(|(label, _)| *label);
    if let Some((text, _)) = labels.iter().find(|(_, is_number)| are_numbers && !is_number) {
        return Err(format!("has labels that are numbers, and the label {text:?}, which is a text: expected one kind"));
    }
    // A table has no numbers, only texts.
    let are_whole = are_numbers || texts().all(|label| label.parse::<i64>().is_ok());
    if let Some(label) = texts().find(|label| are_whole && label.starts_with('-')) {
        return Err(format!(
            "has the label {label}: expected numbers of classes from 0; leave out rows without a label"
        ));
    }
    let named = |label: &str| known.iter().position(|class| class == label);
    let numbered = |label: &str| label.parse::<usize>().ok().filter(|number| *number < known.len());
    let of_all = |number: &dyn Fn(&str) -> Option<usize>| -> Option<HashMap<&'a str, usize>> {
        texts().map(|label| Some((label, number(label)?))).collect()
    };
    // A number is never a name: a file may name its classes by other numbers.
    let by_name = if are_numbers { None } else { of_all(&named) };
    if let Some(numbers) = by_name.or_else(|| of_all(&numbered)) {
        return Ok((known.to_vec(), numbers));
    }
    if fresh {
        let mut classes: Vec<&'a str> = texts().collect();
        classes.sort_by_key(|label| (label.parse::<i64>().unwrap_or(i64::MAX), label.to_string()));
        return match classes.len() {
            1 => Err(format!("has the label {:?} in all rows: expected at least 2 classes", classes[0])),
            _ => {
                let names = classes.iter().map(ToString::to_string).collect();
                Ok((names, classes.into_iter().zip(0..).collect()))
            }
        };
    }
    let other = texts().find(|label| (are_numbers || named(label).is_none()) && numbered(label).is_none());
    let other = other.or_else(|| texts().next()).expect("there is a row");
    Err(format!(
        "has the label {other:?}, and the model's classes are {known:?}: expected their names, or their numbers from 0"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Classes = (Vec<String>, Vec<usize>);

    /// The classes, and the number of each label.
    fn of(labels: &[&str], are_numbers: bool, known: &[&str], fresh: bool) -> Result<Classes, String> {
        let known: Vec<String> = known.iter().map(ToString::to_string).collect();
        let all = labels.iter().map(|label| (*label, are_numbers)).collect();
        let (classes, numbers) = classes(&all, &known, fresh)?;
        Ok((classes, labels.iter().map(|label| numbers[label]).collect()))
    }

    #[track_caller]
    fn same(got: Result<Classes, String>, classes: &[&str], numbers: &[usize]) {
        assert_eq!(got.unwrap(), (classes.iter().map(ToString::to_string).collect(), numbers.to_vec()));
    }

    #[test]
    fn labels_are_a_models_classes_or_become_them() {
        let three = &["no", "so-so", "yes"];
        same(of(&["yes", "no"], false, three, false), three, &[2, 0]);
        same(of(&["0", "2"], false, three, false), three, &[0, 2]);
        same(of(&["0", "2"], true, three, false), three, &[0, 2]);
        same(of(&["10", "9", "no"], false, &["a", "b"], true), &["9", "10", "no"], &[1, 0, 2]);
        same(of(&["7", "3"], true, &["a", "b"], true), &["3", "7"], &[1, 0]);
        same(of(&["b", "a"], false, &[], true), &["a", "b"], &[1, 0]);
        assert!(of(&["b", "b"], false, &[], true).unwrap_err().contains("expected at least 2 classes"));
        let told = of(&["yes", "maybe"], false, &["no", "yes"], false).unwrap_err();
        assert!(told.contains("the label \"maybe\"") && told.contains("[\"no\", \"yes\"]"), "{told}");
        assert!(of(&["0", "2"], true, &["no", "yes"], false).unwrap_err().contains("the label \"2\""));
    }

    /// Classes whose names are numbers, and not their own.
    #[test]
    fn a_number_is_no_name() {
        let stars = &["1", "2", "3"];
        same(of(&["0", "1", "2"], true, stars, false), stars, &[0, 1, 2]);
        same(of(&["1", "2"], true, stars, false), stars, &[1, 2]);
        same(of(&["1", "2"], false, stars, false), stars, &[0, 1]);
        same(of(&["0", "1"], false, stars, false), stars, &[0, 1]);
    }

    #[test]
    fn rows_without_a_label_and_labels_of_two_kinds_are_refused() {
        assert!(of(&["-1", "0"], true, &["a", "b"], true).unwrap_err().contains("has the label -1"));
        assert!(of(&["-1", "0"], false, &["a", "b"], true).unwrap_err().contains("has the label -1"));
        let two = [("0", true), ("no", false)].into();
        assert!(classes(&two, &[], true).unwrap_err().contains("the label \"no\", which is a text"));
    }
}
