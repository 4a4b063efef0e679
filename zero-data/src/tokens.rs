//! A stream of token ids, in memory or in a file that is read on demand.

use std::path::Path;

use super::token_file::TokenFile;
use super::tokenizer::Tokenizer;
use super::{Source, TokenizeOptions, cache, documents};
use crate::error::{Result, wrong_data};

/// Most bytes of a text that is tokenized in memory: that takes seconds, and the tokens take as much memory as the text.
const SMALL: u64 = 16 << 20;

/// Receives ids and the position of the first.
type ScanIds<'a> = dyn FnMut(usize, &[i32]) -> Result<()> + 'a;

#[derive(Debug)]
pub(super) enum Tokens {
    Memory(Vec<i32>),
    File(TokenFile),
    /// Training and validation ids, with the number of ids in full rows of each.
    Splits(Box<[Tokens; 2]>, [usize; 2]),
}

impl Tokens {
    /// Tokenizes the documents of a source of text, for rows of `width` ids. Returns the ids, and the number of last rows
    /// that belong to a validation split.
    pub(super) fn cut(
        source: &Source<'_>,
        options: &TokenizeOptions<'_>,
        tokenizer: &Tokenizer,
        width: usize,
    ) -> Result<(Self, usize)> {
        let narrow = |ids: &[u32]| ids.iter().map(|&id| id as i32).collect::<Vec<_>>();
        match *source {
            Source::Text(text, name) => {
                let ids = tokenizer.encode(text).map_err(|problem| wrong_data(Path::new(name), problem))?;
                Ok((Self::Memory(narrow(&[tokenizer.prefix_ids(), &ids].concat())), 0))
            }
            Source::File(path) => {
                let files = documents::files(path)?;
                let of = |files: &[documents::DataFile]| -> Result<Self> {
                    let most = SMALL / files.len().max(1) as u64;
                    if !files.iter().all(|file| file.is_small(most)) {
                        return Ok(Self::File(cache::open(path, files, options, tokenizer)?));
                    }
                    let mut all = Vec::new();
                    documents::encode(files, options.field, tokenizer, |ids| {
                        all.extend(narrow(ids));
                        Ok(())
                    })?;
                    Ok(Self::Memory(all))
                };
                let (trained, validation) = files.split_at(files.partition_point(|file| !file.is_held_out));
                let trained = of(trained)?;
                if validation.is_empty() {
                    return Ok((trained, 0));
                }
                let validation = of(validation)?;
                let held_out = documents::held_out(options.held_out, validation.len() / width)?;
                let rows = trained.len() / width;
                if rows == 0 {
                    let found = trained.len();
                    let problem = format!(
                        "has {found} training tokens, but one row needs {width}: use a longer text or a smaller --seq"
                    );
                    return Err(wrong_data(path, problem));
                }
                let used = [rows, held_out].map(|rows| rows * width);
                Ok((Self::Splits(Box::new([trained, validation]), used), held_out))
            }
        }
    }

    /// Returns the number of ids.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Memory(ids) => ids.len(),
            Self::File(file) => file.len(),
            Self::Splits(_, used) => used.iter().sum(),
        }
    }

    /// Returns the length of the data's own rows, if it has any.
    pub(super) fn row_length(&self) -> Option<usize> {
        match self {
            Self::Memory(_) | Self::Splits(..) => None,
            Self::File(file) => file.row_length(),
        }
    }

    /// Reads the ids from `first` on into `to`.
    pub(super) fn read(&self, first: usize, to: &mut [i32]) -> Result<()> {
        match self {
            Self::Memory(ids) => to.copy_from_slice(&ids[first..][..to.len()]),
            Self::File(file) => file.read(first, to)?,
            Self::Splits(parts, [split, _]) => {
                let (of_first, of_second) = to.split_at_mut(split.saturating_sub(first).min(to.len()));
                if !of_first.is_empty() {
                    parts[0].read(first, of_first)?;
                }
                if !of_second.is_empty() {
                    parts[1].read(first.saturating_sub(*split), of_second)?;
                }
            }
        }
        Ok(())
    }

    /// Passes ids `first..last` to `each`, in parts, with the position of each part's first id.
    pub(super) fn scan(&self, (first, last): (usize, usize), each: &mut ScanIds<'_>) -> Result<()> {
        match self {
            Self::Memory(ids) => each(first, &ids[first..last]),
            Self::File(file) => file.scan((first, last), each),
            Self::Splits(parts, [split, _]) => {
                if first < *split {
                    parts[0].scan((first, last.min(*split)), each)?;
                }
                match last > *split {
                    true => {
                        let within = (first.saturating_sub(*split), last - split);
                        parts[1].scan(within, &mut |at, ids| each(split + at, ids))
                    }
                    false => Ok(()),
                }
            }
        }
    }

    /// Returns a checksum of ids `first..last` and of the rows' length, which identifies the data.
    pub(super) fn checksum(&self, range: (usize, usize), seq: usize) -> Result<u32> {
        let mut sum = crc32c::crc32c(&seq.to_le_bytes());
        self.scan(range, &mut |_, ids| {
            sum = crc32c::crc32c_append(sum, bytemuck::cast_slice(ids));
            Ok(())
        })?;
        Ok(sum)
    }
}
