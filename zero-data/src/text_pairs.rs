//! Source texts, and target texts to generate from them.
//!
//! * In: JSON lines or Parquet with both in each row.
//! * Memory: all tokens, and the target texts.

use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use zero_models::Seq2SeqSettings;

use super::TokenizeOptions;
use super::documents::{self, Cell, FieldOf, Holds, RowOf, WrongRow};
use super::labelled::Fields;
use super::tokenizer::Tokenizer;
use crate::error::Result;

/// Source texts with their target texts.
#[derive(Debug)]
pub struct TextPairs {
    rows: Vec<Row>,
    tokenizer: Tokenizer,
    seq: usize,
    pad: i32,
    longest_target: usize,
    held_out: usize,
    unlabelled: usize,
}

#[derive(Debug)]
struct Row {
    source: Vec<i32>,
    target: Vec<i32>,
    made: Option<Made>,
}

/// A target text.
#[derive(Debug)]
struct Made {
    text: String,
    /// The text decoded from its tokens, which may lose case and blanks.
    decoded: String,
}

/// A flat batch: `[rows, width]` and `[rows, target_width]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextPairBatch {
    /// Number of tokens of the longest source text.
    pub width: usize,
    /// Token ids of the source texts.
    pub input_ids: Vec<i32>,
    /// 1 at tokens, 0 at padding.
    pub attention_mask: Vec<i32>,
    /// Number of tokens of the longest target text.
    pub target_width: usize,
    /// Token ids of the target texts, padded with -100.
    pub labels: Vec<i32>,
}

impl TextPairs {
    /// Reads, tokenizes and checks. The beginning of each text is kept, with the tokens that begin and end a text according
    /// to the model's settings. The last rows may have no target text.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if a file cannot be read or used, or a target text is longer than the model's positions.
    pub fn load(
        path: &Path,
        fields: Fields<'_>,
        options: &TokenizeOptions<'_>,
        tokenizer: Tokenizer,
        settings: &Seq2SeqSettings,
    ) -> Result<Self> {
        let (begin, end) = (tokenizer.encoder_prefix(settings), settings.end_token);
        let seq = options.row_length(begin.len() + 2)?;
        let encode = |text: &str, row: usize| {
            let ids = tokenizer.encode_within(text, options.vocab_size);
            ids.map_err(|problem| WrongRow { row, problem })
        };
        let fields = [
            FieldOf { name: fields.text, option: "text-field", holds: Holds::Text },
            FieldOf { name: fields.label, option: "label-field", holds: Holds::TextOrNothing },
        ];
        let (read, places, held_out) = documents::read_rows(path, &fields, options.held_out)?;
        let marked = |ids: &[u32], most: usize| -> Vec<i32> {
            let ids = begin.iter().chain(ids).take(most - 1).chain([&end]);
            ids.map(|&id| id as i32).collect()
        };
        let row = |(number, row): (usize, RowOf)| -> Result<Row, WrongRow> {
            let [text, made] = <[_; 2]>::try_from(row).expect("two fields were asked for");
            let source = marked(&encode(&text.map_or_else(String::new, Cell::into_text), number)?, seq);
            let Some(text) = made.map(Cell::into_text) else {
                return Ok(Row { source, target: Vec::new(), made: None });
            };
            let ids = encode(&text, number)?;
            let target = marked(&ids, options.n_positions);
            if target.len() < begin.len() + ids.len() + 1 {
                let problem = format!(
                    "has a \"{}\" with more tokens than the model's {} positions: shorten it",
                    fields[1].name, options.n_positions
                );
                return Err(WrongRow { row: number, problem });
            }
            let decoded = tokenizer.decode(&ids).trim().to_string();
            Ok(Row { source, target, made: Some(Made { text, decoded }) })
        };
        let rows: Result<Vec<Row>, WrongRow> = read.into_par_iter().enumerate().map(row).collect();
        let rows = rows.map_err(|wrong| places.wrong(wrong))?;
        let labelled = rows.iter().rposition(|row| row.made.is_some()).map_or(0, |last| last + 1);
        if let Some(row) = rows[..labelled].iter().position(|row| row.made.is_none()) {
            let problem = format!(
                "has no \"{}\", but later rows have one: move rows that are only to be predicted to the end",
                fields[1].name
            );
            return Err(places.wrong(WrongRow { row, problem }));
        }
        let longest_target = rows.iter().map(|row| row.target.len()).max().unwrap_or(0);
        let unlabelled = rows.len() - labelled;
        Ok(Self { rows, held_out, tokenizer, seq, pad: settings.pad_token as i32, longest_target, unlabelled })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of last labelled rows that belong to a validation split.
    pub fn held_out(&self) -> usize {
        self.held_out
    }

    /// Returns the number of last rows without a target text.
    pub fn unlabelled(&self) -> usize {
        self.unlabelled
    }

    /// Returns the most tokens of a source text.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Returns the most tokens of a target text.
    pub fn longest_target(&self) -> usize {
        self.longest_target
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns a row's target text, if it is known.
    pub fn target(&self, row: usize) -> Option<&str> {
        self.rows[row].made.as_ref().map(|made| made.text.as_str())
    }

    /// Returns the target text decoded from its tokens, which may lose case and blanks.
    pub fn decoded_target(&self, row: usize) -> Option<&str> {
        self.rows[row].made.as_ref().map(|made| made.decoded.as_str())
    }

    /// Returns the tokens of a row's source text.
    pub fn source(&self, row: usize) -> Vec<u32> {
        self.rows[row].source.iter().map(|&id| id as u32).collect()
    }

    /// Returns the total number of tokens of some rows' source texts.
    pub fn source_tokens(&self, rows: &[usize]) -> usize {
        rows.iter().map(|&row| self.rows[row].source.len()).sum()
    }

    /// Returns the total number of tokens of some rows' target texts.
    pub fn target_tokens(&self, rows: &[usize]) -> usize {
        rows.iter().map(|&row| self.rows[row].target.len()).sum()
    }

    /// Returns a checksum of some rows, which identifies the data.
    pub fn checksum(&self, rows: Range<usize>) -> u32 {
        self.rows[rows].iter().fold(0, |sum, Row { source, target, .. }| {
            let sum = crc32c::crc32c_append(sum, &(source.len() as u64).to_le_bytes());
            [source, target].iter().fold(sum, |sum, ids| crc32c::crc32c_append(sum, bytemuck::cast_slice(ids)))
        })
    }

    /// Returns a batch of rows, padded to the longest.
    pub fn batch(&self, rows: &[usize]) -> TextPairBatch {
        let rows = || rows.iter().map(|&row| &self.rows[row]);
        let width = rows().map(|row| row.source.len()).max().unwrap_or(0);
        let target_width = rows().map(|row| row.target.len()).max().unwrap_or(0);
        let mut batch = TextPairBatch { width, target_width, ..TextPairBatch::default() };
        let fill = |value: i32, of: usize| std::iter::repeat_n(value, of);
        for Row { source, target, .. } in rows() {
            let padding = width - source.len();
            batch.input_ids.extend(source.iter().copied().chain(fill(self.pad, padding)));
            batch.attention_mask.extend(fill(1, source.len()).chain(fill(0, padding)));
            let ignored = fill(zero_models::loss::IGNORED_LABEL, target_width - target.len());
            batch.labels.extend(target.iter().copied().chain(ignored));
        }
        batch
    }
}
