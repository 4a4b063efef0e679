//! The training examples of a batch.

use core::ops::Deref;
use std::collections::BTreeMap;

use zero_core::random::Draws;

/// The numbers of some training examples, as a slice, and a seed for each.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    numbers: Vec<usize>,
    seeds: Vec<u64>,
    reference: Vec<f64>,
}

/// The values that [`Task::reference`](super::Task::reference) has measured, by row.
pub(super) type Reference = BTreeMap<usize, Vec<f64>>;

impl Rows {
    /// Returns a seed for each row, to draw random numbers from (crops of an image, masks of a text). It follows from the
    /// run's `--seed`, the row and the epoch: it is the same at every stage, with every number of ranks and after a resume,
    /// and differs between epochs. Held-out rows have the same seeds in every evaluation.
    pub fn seeds(&self) -> &[u64] {
        &self.seeds
    }

    /// Returns what [`Task::reference`](super::Task::reference) returned for these rows; empty if it returned `None`.
    pub fn reference(&self) -> &[f64] {
        &self.reference
    }

    /// Adds what was measured of these rows before training.
    pub(super) fn with(self, reference: &Reference) -> Self {
        if reference.is_empty() {
            return self;
        }
        let of =
            |row: &usize| reference.get(row).expect("all rows that a run uses are measured before").iter().copied();
        Self { reference: self.numbers.iter().flat_map(of).collect(), ..self }
    }
}

impl Deref for Rows {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.numbers
    }
}

impl<'a> IntoIterator for &'a Rows {
    type Item = &'a usize;
    type IntoIter = core::slice::Iter<'a, usize>;

    fn into_iter(self) -> Self::IntoIter {
        self.numbers.iter()
    }
}

impl FromIterator<(usize, u64)> for Rows {
    fn from_iter<I: IntoIterator<Item = (usize, u64)>>(rows: I) -> Self {
        let (numbers, seeds) = rows.into_iter().unzip();
        Self { numbers, seeds, reference: Vec::new() }
    }
}

/// Rows with the seeds of an evaluation.
impl From<&[usize]> for Rows {
    fn from(numbers: &[usize]) -> Self {
        numbers.iter().map(|&row| (row, seed_of(0, row))).collect()
    }
}

/// Returns the seed of a position in a run with this seed.
pub(super) fn seed_of(seed: u64, position: usize) -> u64 {
    Draws::new(seed).fork(position as u64).bits()
}
