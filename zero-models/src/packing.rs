//! Packed rows: several documents one after the other, none of which sees another.

use std::ops::Range;

/// The documents in a batch of packed rows, row after row. Each begins at position 0 and attends only to itself, so that a packed batch
/// trains like the same documents in rows of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    lengths: Vec<usize>,
}

impl Documents {
    /// Takes the lengths of the documents; padding at the end of a row is a document too.
    pub fn new(lengths: Vec<usize>) -> Self {
        Self { lengths }
    }

    /// Returns the total number of tokens.
    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Returns the length of the longest document.
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Returns the position of each token in its document.
    pub fn positions(&self) -> impl Iterator<Item = i32> {
        self.lengths.iter().flat_map(|&length| 0..length as i32)
    }

    /// Returns the tokens of consecutive documents of one length, and their number.
    pub fn runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut begin = 0;
        self.lengths.chunk_by(|a, b| a == b).map(move |run| {
            let tokens = begin..begin + run.iter().sum::<usize>();
            begin = tokens.end;
            (tokens, run.len())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_documents_of_one_length() {
        let documents = Documents::new(vec![2, 2, 3, 1, 1]);
        assert_eq!(documents.runs().collect::<Vec<_>>(), [(0..4, 2), (4..7, 1), (7..9, 2)]);
        assert_eq!(documents.positions().collect::<Vec<_>>(), [0, 1, 0, 1, 0, 1, 2, 0, 0]);
        assert_eq!((documents.tokens(), documents.longest()), (9, 3));
    }
}
