//! Texts with labels, for classification heads.
//!
//! * In: JSON lines, tables or Parquet with a text (or two) and a label in each row. The tokenizer's template joins the
//!   texts, as in BERT's `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, or in RoBERTa's `<s> A </s></s> B </s>`.
//! * Memory: all tokens, since labelled data is small.

use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use zero_models::ProblemType;

use super::TokenizeOptions;
use super::documents::{self, Cell, FieldOf, Holds, WrongRow};
use super::labels::{KnownHead, Labels, WrongLabels};
use super::tokenizer::Tokenizer;
use super::wordpiece::SPECIAL;
use crate::error::{Result, wrong_data};

/// Names of the fields of a row.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    /// The text.
    pub text: &'a str,
    /// A second text.
    pub second: Option<&'a str>,
    /// The label: a text, a number, or a list of either.
    pub label: &'a str,
}

/// Tokenized texts with their labels.
#[derive(Debug)]
pub struct LabelledTexts {
    rows: Vec<Row>,
    held_out: usize,
    problem: ProblemType,
    names: Vec<String>,
    seq: usize,
    pad: i32,
}

#[derive(Debug)]
struct Row {
    /// All tokens, including special ones such as `[CLS]` and `[SEP]`.
    ids: Vec<i32>,
    /// Number of tokens before the second text.
    first: usize,
    target: Vec<f64>,
}

/// A flat batch of texts: `[rows, width]`, except for `targets`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LabelledBatch {
    /// Number of tokens of the longest text.
    pub width: usize,
    /// Token ids.
    pub input_ids: Vec<i32>,
    /// 0 in the first text, 1 in the second.
    pub token_type_ids: Vec<i32>,
    /// 1 at tokens, 0 at padding.
    pub attention_mask: Vec<i32>,
    /// The class index of each text, `[rows]`; for several classes 1 or 0 for each, or for a regression its numbers,
    /// `[rows, labels]`.
    pub targets: Vec<f64>,
}

impl LabelledTexts {
    /// Reads, tokenizes and checks texts with labels for this head.
    ///
    /// The head's `problem_type` decides the kind of the labels, or the head's single label makes it a regression. If
    /// neither does, lists are several classes, numbers with a fraction a regression, and all other labels classes. Labels
    /// that are numbers in their file are indices of the head's classes. Labels that are texts are names of classes, or else
    /// their indices. If they are neither, and the head is fresh, they become its classes, sorted as numbers or as texts.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if a file cannot be read or used; if the tokenizer puts no tokens around a text; if
    /// labels do not belong to the head, or are of several kinds; and if rows differ from the first in their number of the
    /// head's `end_token`.
    pub fn load(
        path: &Path,
        fields: Fields<'_>,
        options: &TokenizeOptions<'_>,
        tokenizer: &Tokenizer,
        head: KnownHead<'_>,
    ) -> Result<Self> {
        let around = tokenizer.around(fields.second.is_some());
        let (Some(around), pad) = (around, tokenizer.pad()) else {
            let problem = format!(
                "needs a tokenizer that puts special tokens around a text: one with {}, or one with a post_processor \
                 in its tokenizer.json",
                SPECIAL.join(", ")
            );
            return Err(wrong_data(path, problem));
        };
        let marks = around.iter().map(Vec::len).sum::<usize>();
        let seq = options.row_length(marks + 2)?;
        let [before, behind @ ..] = around.map(|ids| ids.into_iter().map(|id| id as i32).collect::<Vec<_>>());
        let text = |name, option| FieldOf { name, option, holds: Holds::Text };
        let label = FieldOf { name: fields.label, option: "label-field", holds: Holds::Label };
        let mut asked = vec![label, text(fields.text, "text-field")];
        asked.extend(fields.second.map(|name| text(name, "second-field")));
        // None of these may be missing.
        let whole = |row: documents::RowOf| row.into_iter().flatten().collect();
        let (read, places, held_out) = documents::read_rows(path, &asked, options.held_out)?;
        let read: Vec<Vec<Cell>> = read.into_iter().map(whole).collect();
        let labels: Vec<&Cell> = read.iter().map(|row| &row[0]).collect();
        let wrong = |WrongLabels { row, problem }: WrongLabels| match row {
            Some(row) => places.wrong(WrongRow { row, problem }),
            None => wrong_data(path, problem),
        };
        let Labels { problem, names, targets } = Labels::of(&labels, head).map_err(wrong)?;
        let cut = |(row, (mut cells, target)): (usize, (Vec<Cell>, Vec<f64>))| -> Result<Row, WrongRow> {
            let encode = |cell: Cell| tokenizer.encode_within(&cell.into_text(), options.vocab_size);
            let texts = cells.drain(1..).map(encode).collect::<Result<Vec<_>, _>>();
            let mut texts = texts.map_err(|problem| WrongRow { row, problem })?;
            // Truncates the end of the longer text first, like transformers' `longest_first`.
            while texts.iter().map(Vec::len).sum::<usize>() > seq - marks {
                texts.iter_mut().rev().max_by_key(|text| text.len()).expect("there is a text").pop();
            }
            let mut ids = before.clone();
            let mut first = 0;
            // A single text is followed by the tokens that follow the last text of a pair.
            for (text, behind) in texts.iter().zip(&behind[2 - texts.len()..]) {
                ids.extend(text.iter().map(|&id| id as i32).chain(behind.iter().copied()));
                first = if first == 0 { ids.len() } else { first };
            }
            Ok(Row { ids, first, target })
        };
        let rows: Result<Vec<Row>, WrongRow> = read.into_par_iter().zip(targets).enumerate().map(cut).collect();
        let rows = rows.map_err(|wrong| places.wrong(wrong))?;
        if let Some(end) = head.end_token {
            let count = |row: &Row| row.ids.iter().filter(|id| **id == end as i32).count();
            let first = rows.first().map_or(0, count);
            if let Some(row) = rows.iter().position(|row| count(row) != first || first == 0) {
                let problem = format!(
                    "the model's eos_token_id {end} occurs {} time(s) in its tokens, and {first} time(s) in the first \
                     row: expected the same number in all rows, at least 1; use a tokenizer that ends each text with \
                     this token, and texts that do not contain it",
                    count(&rows[row])
                );
                return Err(places.wrong(WrongRow { row, problem }));
            }
        }
        Ok(Self { rows, held_out, problem, names, seq, pad: pad as i32 })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of last rows that belong to a validation split.
    pub fn held_out(&self) -> usize {
        self.held_out
    }

    /// Returns the most tokens of a row.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Returns the kind of the labels.
    pub fn problem(&self) -> ProblemType {
        self.problem
    }

    /// Returns the names of the head's labels.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns a checksum of some rows, which identifies the data.
    pub fn checksum(&self, rows: Range<usize>) -> u32 {
        self.rows[rows].iter().fold(0, |sum, row| {
            let sum = crc32c::crc32c_append(sum, bytemuck::cast_slice(&row.ids));
            let target = |&target: &f64| match self.problem {
                ProblemType::SingleLabelClassification => target as u64,
                _ => target.to_bits(),
            };
            let numbers: Vec<u64> = std::iter::once(row.first as u64).chain(row.target.iter().map(target)).collect();
            numbers.iter().fold(sum, |sum, number| crc32c::crc32c_append(sum, &number.to_le_bytes()))
        })
    }

    /// Returns the total number of tokens of some rows.
    pub fn tokens(&self, rows: &[usize]) -> usize {
        rows.iter().map(|&row| self.rows[row].ids.len()).sum()
    }

    /// Returns a batch of rows, padded to the longest.
    pub fn batch(&self, rows: &[usize]) -> LabelledBatch {
        let width = rows.iter().map(|&row| self.rows[row].ids.len()).max().unwrap_or(0);
        let mut batch = LabelledBatch { width, ..LabelledBatch::default() };
        for Row { ids, first, target } in rows.iter().map(|&row| &self.rows[row]) {
            let fill = |value: i32, of: usize| std::iter::repeat_n(value, of);
            let padding = width - ids.len();
            batch.input_ids.extend(ids.iter().copied().chain(fill(self.pad, padding)));
            batch.token_type_ids.extend(fill(0, *first).chain(fill(1, ids.len() - first)).chain(fill(0, padding)));
            batch.attention_mask.extend(fill(1, ids.len()).chain(fill(0, padding)));
            batch.targets.extend(target);
        }
        batch
    }
}
