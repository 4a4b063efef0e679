//! Training examples for language models: [`TokenRows`] of `seq` tokens, whose labels are the next tokens inside them; or
//! [`Conversations`], of which the model learns the answers; or [`SentencePairs`], of which some tokens are masked; or
//! [`LabelledTexts`], or [`TextPairs`].
//!
//! * In: a safetensors file of token ids; or text, JSON lines or Parquet, which a tokenizer cuts.
//! * Memory: of a file of ids, none but the rows in use; text is cut once into such a file, the token cache, which the ranks of
//!   a machine share (a small text is cut in memory).

mod cache;
mod caught;
mod conversations;
mod documents;
mod error;
mod labelled;
mod labels;
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
pub use self::pairs::{Masking, PairBatch, SentencePairs};
pub use self::rows::{TokenBatch, TokenRows};
pub use self::text_pairs::{TextPairBatch, TextPairs};
pub use self::tokenizer::{Message, NO_TEMPLATE, Tokenizer};

/// Where rows come from.
#[derive(Debug, Clone)]
pub enum Source<'a> {
    /// A file, or a folder of files of one kind: `.safetensors` with an int tensor `input_ids`, `[rows, T]` or one long row
    /// `[N]`; `.jsonl` and `.parquet` with a document in each row; else UTF-8 text.
    File(&'a Path),
    /// Text that is part of the program, with a name for errors.
    Text(&'a str, &'static str),
}

/// How documents become rows.
#[derive(Debug, Clone, Default)]
pub struct Cutting<'a> {
    /// Tokens per row. `None`: of a file of rows, what it has; else 128, or the model's positions if they are fewer.
    pub seq: Option<usize>,
    /// Tokens that the model knows.
    pub vocab_size: usize,
    /// The longest row of the model; `usize::MAX` if there is no limit.
    pub n_positions: usize,
    /// A `tokenizer.json`, or the folder that it is in. `None`: one in `folders`, else GPT-2's own for a GPT-2 or a preset.
    pub tokenizer: Option<&'a Path>,
    /// Where the model is read from: a tokenizer there is the one that it was made for.
    pub folders: &'a [&'a Path],
    /// True if the model is a GPT-2, whose tokens are known where its folder has no tokenizer.
    pub is_gpt2: bool,
    /// Whether sentences and documents are told apart, for [`SentencePairs`].
    pub sentences: bool,
    /// The column of a Parquet file, or the key of a JSON line, that has the text.
    pub field: Option<&'a str>,
    /// Most rows of a validation split that are held out. `None`: all.
    pub held_out: Option<usize>,
    /// Where text that has been cut is kept. `None`: `$XDG_CACHE_HOME/zero`, or `~/.cache/zero`.
    pub cache: Option<&'a Path>,
}

impl Cutting<'_> {
    /// Tokens of a row, or the most of one: at least `least`, at most as many as the model has positions.
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

/// Tokens of a row where nothing says.
pub const DEFAULT_SEQ: usize = 128;

impl Source<'_> {
    /// The file's path, or the name of a text.
    fn path(&self) -> &Path {
        match self {
            Source::File(path) => path,
            Source::Text(_, name) => Path::new(name),
        }
    }

    /// The length of rows that the data itself fixes, without reading them: of a safetensors file.
    ///
    /// # Errors
    ///
    /// [`DataError`] when there is such a file and it cannot be read.
    pub fn row_length(&self) -> Result<Option<usize>> {
        match self {
            Source::File(path) if is_tokens(path) => Ok(token_file::TokenFile::open(path)?.row_length()),
            _ => Ok(None),
        }
    }
}

/// Checks that a model with so many tokens knows these.
fn check_ids(ids: &[u32], vocab_size: usize) -> std::result::Result<(), String> {
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => Err(format!(
            "holds token {id}, and the model has {vocab_size} tokens: expected a tokenizer, and a chat template, that were made for the model"
        )),
    }
}

fn is_tokens(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "safetensors")
}
