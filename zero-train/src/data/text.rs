//! Text, cut into rows by GPT-2's byte-pair tokenizer, whose table is part of the program.

use std::path::Path;

use super::{TokenRows, wrong_data};
use crate::TrainError;
use crate::error::wrong;

/// Row length of text when none is asked for.
const DEFAULT_SEQ: usize = 128;

/// Consecutive rows of `seq` tokens; what is left over at the end is not used.
pub(super) fn rows(path: &Path, text: &str, seq: Option<usize>, n_positions: usize) -> Result<TokenRows, TrainError> {
    let seq = seq.unwrap_or(DEFAULT_SEQ.min(n_positions));
    if seq == 0 {
        return Err(wrong("seq", 0, "expected at least 2 tokens"));
    }
    let tokenizer = tiktoken_rs::r50k_base_singleton();
    let mut tokens: Vec<i32> = tokenizer.encode_ordinary(text).into_iter().map(|id| id as i32).collect();
    let rows = tokens.len() / seq;
    if rows == 0 {
        let found = tokens.len();
        let problem = format!("has {found} tokens, but one row needs {seq}: use a longer text or a smaller --seq");
        return Err(wrong_data(path, problem));
    }
    tokens.truncate(rows * seq);
    Ok(TokenRows { tokens, seq })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2s_own_tokens() {
        // "Hello world" in GPT-2's vocabulary.
        let rows = rows(Path::new("t"), "Hello world", Some(2), 8).unwrap();
        assert_eq!(rows.batch(0, 0, 1, 1), [15496, 995]);
    }

    #[test]
    fn too_short_a_text_is_refused() {
        let error = rows(Path::new("short.txt"), "Hello world", None, 1024).unwrap_err().to_string();
        assert!(error.contains("has 2 tokens, but one row needs 128"), "{error}");
    }
}
