//! Token rows for language models: each row is one training example of `seq` tokens.
//!
//! Rows are used in order and wrap around: step `s` (from 0), rank `r` of `N` ranks with `b` rows each takes rows
//! `(s N + r) b ..` of length `b`. Labels are the next tokens inside the row.

mod safetensors_rows;
mod text;
mod tokenizer;

use std::path::Path;

use crate::TrainError;

/// Where rows come from.
#[derive(Debug, Clone)]
pub enum Source<'a> {
    /// A file: safetensors with an int tensor `input_ids` `[rows, T]` by its ending `.safetensors`, else UTF-8 text.
    File(&'a Path),
    /// Text that is part of the program, with a name for errors.
    Text(&'a str, &'static str),
}

/// Rows of token ids, all of one length.
#[derive(Debug, Clone)]
pub struct TokenRows {
    tokens: Vec<i32>,
    seq: usize,
}

impl Source<'_> {
    /// The length of rows that the data itself fixes, without reading them: of a safetensors file.
    ///
    /// # Errors
    ///
    /// [`TrainError`] when there is such a file and it cannot be read.
    pub fn row_length(&self) -> Result<Option<usize>, TrainError> {
        self.safetensors().map(|path| safetensors_rows::with_ids(path, |ids| Ok(ids.shape()[1]))).transpose()
    }

    fn safetensors(&self) -> Option<&Path> {
        match self {
            Source::File(path) if path.extension().is_some_and(|ending| ending == "safetensors") => Some(path),
            _ => None,
        }
    }
}

impl TokenRows {
    /// Of all tokens and the rows' length, to tell data from other data.
    pub fn checksum(&self) -> u32 {
        let seed = crc32c::crc32c(&self.seq.to_le_bytes());
        crc32c::crc32c_append(seed, bytemuck::cast_slice(&self.tokens))
    }

    /// Reads and checks rows for a model with `vocab_size` tokens and `n_positions` positions.
    ///
    /// `seq` is the row length: for text `None` means 128 (or `n_positions` if that is less); a safetensors file has its
    /// own, which `seq` must equal if given.
    ///
    /// Text is cut by GPT-2's tokenizer: the model's must be that too. `folders` are those that the model is read from, with
    /// the tokenizer that it was made for.
    ///
    /// # Errors
    ///
    /// [`TrainError`] when the file cannot be read, holds too few tokens or a token outside of the vocabulary, or does
    /// not fit the row length; text for a model with another tokenizer than GPT-2's.
    pub fn load(
        source: &Source<'_>,
        seq: Option<usize>,
        vocab_size: usize,
        n_positions: usize,
        folders: &[&Path],
    ) -> Result<Self, TrainError> {
        let cut = |path: &Path, text: &str| {
            tokenizer::check(path, vocab_size, folders)?;
            text::rows(path, text, seq, n_positions)
        };
        let (path, rows) = match *source {
            Source::File(path) if source.safetensors().is_some() => (path, safetensors_rows::read(path, seq)?),
            Source::File(path) => {
                let text = String::from_utf8(read(path)?).map_err(|error| {
                    let byte = error.utf8_error().valid_up_to();
                    let expected = "expected text, or a file that ends in .safetensors";
                    wrong_data(path, format!("is not UTF-8 text (byte {byte}): {expected}"))
                })?;
                (path, cut(path, &text)?)
            }
            Source::Text(text, name) => (Path::new(name), cut(Path::new(name), text)?),
        };
        rows.check(path, vocab_size, n_positions)?;
        Ok(rows)
    }

    fn check(&self, path: &Path, vocab_size: usize, n_positions: usize) -> Result<(), TrainError> {
        let problem = |problem: String| Err(wrong_data(path, problem));
        if self.seq < 2 {
            return problem(format!("rows of {} token(s) have no next token: expected at least 2", self.seq));
        }
        if self.seq > n_positions {
            return problem(format!(
                "rows of {} tokens are longer than the model's {n_positions} positions: use --seq {n_positions} or a \
                 model with more positions",
                self.seq
            ));
        }
        let outside = |&id: &i32| usize::try_from(id).map_or(true, |id| id >= vocab_size);
        if let Some(at) = self.tokens.iter().position(outside) {
            return problem(format!(
                "token id {} at row {}, column {} is outside the model's vocabulary of {vocab_size}: expected ids from \
                 0 to {}; use data made for this model's tokenizer",
                self.tokens[at],
                at / self.seq,
                at % self.seq,
                vocab_size - 1
            ));
        }
        Ok(())
    }

    /// Cuts the last `rows` rows off, for evaluation. `None` if that leaves none to train on.
    pub fn split_off(&mut self, rows: usize) -> Option<Self> {
        let keep = self.rows().checked_sub(rows).filter(|&keep| keep > 0)?;
        Some(Self { tokens: self.tokens.split_off(keep * self.seq), seq: self.seq })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len() / self.seq
    }

    /// Tokens of a row.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// `rows` rows from row `first` on, counted over all passes through the data, flat: `[rows * seq]`.
    pub fn from(&self, first: usize, rows: usize) -> Vec<i32> {
        (first..first + rows)
            .flat_map(|row| {
                let start = (row % self.rows()) * self.seq;
                self.tokens[start..start + self.seq].iter().copied()
            })
            .collect()
    }

    /// Rows of `step` (from 0) for `rank` of `world` ranks with `batch` rows each, flat: `[batch * seq]`.
    pub fn batch(&self, step: usize, rank: usize, world: usize, batch: usize) -> Vec<i32> {
        self.from((step * world + rank) * batch, batch)
    }
}

/// A file with the wrong content: what is wrong, what was expected, and what to change.
pub(crate) fn wrong_data(path: &Path, problem: impl Into<String>) -> TrainError {
    TrainError::Data { path: path.to_path_buf(), problem: problem.into() }
}

fn read(path: &Path) -> Result<Vec<u8>, TrainError> {
    std::fs::read(path).map_err(|source| TrainError::Io { action: "read", path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_in_order_over_ranks_and_wrap_around() {
        let rows = TokenRows { tokens: (0..12).collect(), seq: 2 };
        assert_eq!(rows.batch(0, 0, 2, 2), [0, 1, 2, 3]);
        assert_eq!(rows.batch(0, 1, 2, 2), [4, 5, 6, 7]);
        assert_eq!(rows.batch(1, 0, 2, 2), [8, 9, 10, 11]);
        assert_eq!(rows.batch(1, 1, 2, 2), [0, 1, 2, 3]);
    }
}
