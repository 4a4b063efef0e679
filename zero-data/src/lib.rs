//! Training examples for language models:
//!
//! * [`TokenRows`] of `seq` tokens, whose labels are the next tokens inside them;
//! * [`Conversations`], of which the model learns the answers;
//! * [`SentencePairs`], of which some tokens are masked;
//! * [`LabelledTexts`] and [`TextPairs`].
//!
//! Input is a safetensors file of token ids; or text, JSON lines or Parquet, which a tokenizer splits into tokens. From a
//! file of ids, only the rows in use are in memory. Text is tokenized once into such a file, the token cache, which the
//! ranks of a machine share; a small text is tokenized in memory.

mod cache;
mod caught;
mod conversations;
mod documents;
mod error;
mod labelled;
mod labels;
mod left_out;
mod packing;
mod pairs;
mod rows;
mod text_pairs;
mod token_file;
mod tokenizer;
mod tokens;
mod vocabulary;
mod wordpiece;

use std::path::Path;

pub use self::conversations::{ChatFormat, Conversations, LONGEST, LossOn};
use self::error::wrong;
pub use self::error::{DataError, Result};
pub use self::labelled::{Fields, LabelledBatch, LabelledTexts};
pub use self::labels::KnownHead;
pub use self::left_out::{LeftOut, Noted};
pub use self::pairs::{Masking, PairBatch, SentencePairs};
pub use self::rows::{TokenBatch, TokenRows};
pub use self::text_pairs::{TextPairBatch, TextPairs};
pub use self::tokenizer::{Message, NO_TEMPLATE, Tokenizer};

/// The source of rows.
#[derive(Debug, Clone)]
pub enum Source<'a> {
    /// A file, or a folder of files of one kind: `.safetensors` with an int tensor `input_ids`, `[rows, T]` or one long row
    /// `[N]`; `.jsonl` and `.parquet` with a document in each row; else UTF-8 text.
    File(&'a Path),
    /// Text that is part of the program, with a name for error messages.
    Text(&'a str, &'static str),
}

/// Settings for splitting documents into rows of tokens.
#[derive(Debug, Clone, Default)]
pub struct TokenizeOptions<'a> {
    /// Tokens per row. `None`: the length of the rows in a file of rows; else 128, or the model's positions if they are fewer.
    pub seq: Option<usize>,
    /// Size of the model's vocabulary.
    pub vocab_size: usize,
    /// The model's longest row; `usize::MAX` if there is no limit.
    pub n_positions: usize,
    /// A `tokenizer.json`, or its folder. `None`: one in `folders`, else GPT-2's own for a GPT-2 or a preset.
    pub tokenizer: Option<&'a Path>,
    /// Folders that the model is read from: a tokenizer there is the one that it was made for.
    pub folders: &'a [&'a Path],
    /// True if the model is a GPT-2, whose tokens are known even if its folder has no tokenizer.
    pub is_gpt2: bool,
    /// If set, the ends of sentences and documents are marked, for [`SentencePairs`].
    pub sentences: bool,
    /// The column of a Parquet file, or the key of a JSON line, with the text.
    pub field: Option<&'a str>,
    /// If set, a row of conversations that cannot be used is skipped, and is no error.
    pub skips_bad_rows: bool,
    /// If set, rows of conversations are packed: several in one row of `seq` tokens.
    pub packing: bool,
    /// Maximum number of rows of a validation split that are held out. `None`: all.
    pub held_out: Option<usize>,
    /// Folder of the token cache. `None`: `$XDG_CACHE_HOME/zero`, or `~/.cache/zero`.
    pub cache: Option<&'a Path>,
}

impl TokenizeOptions<'_> {
    /// Returns the length of a row, or the greatest length: at least `least`, at most the model's positions.
    fn row_length(&self, least: usize) -> Result<usize> {
        let seq = self.seq.unwrap_or(DEFAULT_SEQ.min(self.n_positions));
        if (least..=self.n_positions).contains(&seq) {
            return Ok(seq);
        }
        Err(wrong(
            "seq",
            seq,
            match self.n_positions {
                usize::MAX => format!("expected at least {least}"),
                most => format!("expected {least} to {most}, the positions of the model"),
            },
        ))
    }
}

/// Default number of tokens per row.
pub const DEFAULT_SEQ: usize = 128;

impl Source<'_> {
    /// Returns the file's path, or the name of a text.
    fn path(&self) -> &Path {
        match self {
            Source::File(path) => path,
            Source::Text(_, name) => Path::new(name),
        }
    }

    /// Returns the row length that the data itself fixes, which is the case for a safetensors file of rows. Reads only the header.
    ///
    /// # Errors
    ///
    /// [`DataError`] if there is such a file and it cannot be read.
    pub fn row_length(&self) -> Result<Option<usize>> {
        match self {
            Source::File(path) if is_tokens(path) => Ok(token_file::TokenFile::open(path)?.row_length()),
            _ => Ok(None),
        }
    }
}

/// Checks that these ids are within a vocabulary of `vocab_size` tokens.
fn check_ids(ids: &[u32], vocab_size: usize) -> std::result::Result<(), String> {
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => Err(format!(
            "contains token {id}, but the model has {vocab_size} tokens: use the tokenizer and the chat template that \
             were made for the model"
        )),
    }
}

fn is_tokens(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "safetensors")
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
