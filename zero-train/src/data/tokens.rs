//! A stream of token ids, in memory or in a file that is read as it is used.

use std::path::Path;

use super::token_file::TokenFile;
use super::tokenizer::Tokenizer;
use super::{Cutting, Source, cache, documents};
use crate::error::{Result, wrong_data};

/// A text of up to so many bytes is cut in memory: that takes seconds, and its tokens take as much memory as it does.
const SMALL: u64 = 16 << 20;

#[derive(Debug)]
pub(super) enum Tokens {
    Memory(Vec<i32>),
    File(TokenFile),
}

impl Tokens {
    /// What `tokenizer` makes of the documents of a source of text.
    pub(super) fn cut(source: &Source<'_>, cutting: &Cutting<'_>, tokenizer: &Tokenizer) -> Result<Self> {
        let narrow = |ids: &[u32]| ids.iter().map(|&id| id as i32).collect::<Vec<_>>();
        match *source {
            Source::Text(text, name) => {
                let ids = tokenizer.encode(text).map_err(|problem| wrong_data(Path::new(name), problem))?;
                Ok(Self::Memory(narrow(&[tokenizer.put_before(), &ids].concat())))
            }
            Source::File(path) => {
                let files = documents::files(path)?;
                if files.iter().map(|file| file.bytes).sum::<u64>() > SMALL {
                    return Ok(Self::File(cache::open(path, &files, cutting, tokenizer)?));
                }
                let mut all = Vec::new();
                documents::encode(&files, cutting.field, tokenizer, |ids| {
                    all.extend(narrow(ids));
                    Ok(())
                })?;
                Ok(Self::Memory(all))
            }
        }
    }

    /// Ids in all.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Memory(ids) => ids.len(),
            Self::File(file) => file.len(),
        }
    }

    /// The length of its rows, if it has rows of its own.
    pub(super) fn row_length(&self) -> Option<usize> {
        match self {
            Self::Memory(_) => None,
            Self::File(file) => file.row_length(),
        }
    }

    /// The ids from `first` on, as many as `to` has.
    pub(super) fn read(&self, first: usize, to: &mut [i32]) -> Result<()> {
        match self {
            Self::Memory(ids) => to.copy_from_slice(&ids[first..][..to.len()]),
            Self::File(file) => file.read(first, to)?,
        }
        Ok(())
    }

    /// Gives ids `first..last` to `each`, a part at a time, with the place of its first.
    pub(super) fn scan<F>(&self, (first, last): (usize, usize), mut each: F) -> Result<()>
    where
        F: FnMut(usize, &[i32]) -> Result<()>,
    {
        match self {
            Self::Memory(ids) => each(first, &ids[first..last]),
            Self::File(file) => file.scan((first, last), each),
        }
    }

    /// Of ids `first..last` and the length of rows, to tell data from other data.
    pub(super) fn checksum(&self, range: (usize, usize), seq: usize) -> Result<u32> {
        let mut sum = crc32c::crc32c(&seq.to_le_bytes());
        self.scan(range, |_, ids| {
            sum = crc32c::crc32c_append(sum, bytemuck::cast_slice(ids));
            Ok(())
        })?;
        Ok(sum)
    }
}
