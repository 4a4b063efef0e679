//! Rows of equal length, in memory or in a file that is read on demand.

use std::ops::Range;
use std::path::Path;

use super::token_file::TokenFile;
use super::tokenizer::Tokenizer;
use super::tokens::Tokens;
use super::{DEFAULT_SEQ, Source, TokenizeOptions, is_tokens};
use crate::error::{Result, wrong, wrong_data};

/// Rows of token ids of equal length.
#[derive(Debug)]
pub struct TokenRows {
    tokens: Tokens,
    seq: usize,
    rows: usize,
    held_out: usize,
    /// The tokenizer of the rows, if it is known.
    tokenizer: Option<Tokenizer>,
}

/// A flat batch of rows: `[rows, width]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenBatch {
    /// Tokens per row.
    pub width: usize,
    /// Token ids.
    pub input_ids: Vec<i32>,
    /// The ids at positions that count in the loss, compared with the predictions at the previous position; -100 elsewhere.
    pub labels: Vec<i32>,
    /// The lengths of the documents, row after row, if rows are packed; padding is one too.
    pub documents: Option<Vec<usize>>,
}

impl TokenRows {
    /// Opens and checks rows for a model.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if a file cannot be read, holds too few tokens or a token outside of the vocabulary,
    /// or does not match the row length, or if the tokenizer is not the model's.
    pub fn load(source: &Source<'_>, options: &TokenizeOptions<'_>) -> Result<Self> {
        if let Source::File(path) = *source
            && is_tokens(path)
        {
            return Self::cut(path, (Tokens::File(TokenFile::open(path)?), 0), options);
        }
        let tokenizer = Tokenizer::find(source.path(), options)?;
        let width = options.seq.unwrap_or(DEFAULT_SEQ.min(options.n_positions)).max(1);
        let rows = Self::cut(source.path(), Tokens::cut(source, options, &tokenizer, width)?, options)?;
        Ok(Self { tokenizer: Some(tokenizer), ..rows })
    }

    fn cut(path: &Path, (tokens, held_out): (Tokens, usize), options: &TokenizeOptions<'_>) -> Result<Self> {
        let TokenizeOptions { vocab_size, n_positions, .. } = *options;
        let problem = |problem: String| wrong_data(path, problem);
        let (found, own) = (tokens.len(), tokens.row_length());
        if let (Some(seq), Some(own)) = (options.seq, own)
            && seq != own
        {
            let expected = format!("{} has rows of {own} tokens: leave --seq out, or set it to {own}", path.display());
            return Err(wrong("seq", seq, expected));
        }
        let seq = own.or(options.seq).unwrap_or(DEFAULT_SEQ.min(n_positions));
        if seq < 2 {
            return Err(problem(format!("rows of {seq} token(s) have no next token: expected at least 2")));
        }
        if seq > n_positions {
            return Err(problem(format!(
                "rows of {seq} tokens are longer than the model's {n_positions} positions: use --seq {n_positions} or a \
                 model with more positions"
            )));
        }
        let rows = Self { rows: found / seq, tokens, seq, held_out, tokenizer: None };
        if rows.rows == 0 {
            return Err(problem(format!(
                "has {found} tokens, but one row needs {seq}: use a longer text or a smaller --seq"
            )));
        }
        rows.tokens.scan((0, rows.rows * seq), &mut |at, ids| {
            let outside = |&id: &i32| usize::try_from(id).map_or(true, |id| id >= vocab_size);
            let Some(place) = ids.iter().position(outside) else { return Ok(()) };
            Err(problem(format!(
                "token id {} at row {}, column {} is outside the model's vocabulary of {vocab_size}: expected ids from \
                 0 to {}; use data made for this model's tokenizer",
                ids[place],
                (at + place) / seq,
                (at + place) % seq,
                vocab_size - 1
            )))
        })?;
        Ok(rows)
    }

    /// Returns a checksum of the tokens of some rows and of the rows' length, which identifies the data.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn checksum(&self, rows: Range<usize>) -> Result<u32> {
        self.tokens.checksum((rows.start * self.seq, rows.end * self.seq), self.seq)
    }

    /// Returns the tokenizer; none for a file of ids.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of last rows that belong to a validation split.
    pub fn held_out(&self) -> usize {
        self.held_out
    }

    /// Returns the tokens per row.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Returns the tokens of `rows`, flat: `[rows.len() * seq]`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn tokens(&self, rows: &[usize]) -> Result<Vec<i32>> {
        let mut tokens = vec![0; rows.len() * self.seq];
        for (row, to) in rows.iter().zip(tokens.chunks_exact_mut(self.seq)) {
            self.tokens.read(row * self.seq, to)?;
        }
        Ok(tokens)
    }
}
