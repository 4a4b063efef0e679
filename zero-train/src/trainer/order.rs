//! The order in which rows are used: that of the data, or a new random one in every epoch.

use serde::{Deserialize, Serialize};
use zero_core::random::{WEYL, mix};

use super::rows::{Rows, seed_of};

/// The rows that are trained on, and their order over all epochs. A position in it is all that a run needs to resume, with
/// any number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Number of rows.
    pub rows: usize,
    /// The seed of the shuffles; `None` for the data's own order.
    pub seed: Option<u64>,
}

/// Rounds of the permutation.
const ROUNDS: u64 = 6;

impl Order {
    /// Returns `count` rows from position `first` on, counted over all epochs; `seed` is the run's.
    pub(super) fn rows(&self, first: usize, count: usize, seed: u64) -> Rows {
        (first..first + count).map(|position| (self.row(position), seed_of(seed, position))).collect()
    }

    /// Returns the row at a position. Every row has one position in each epoch.
    pub fn row(&self, position: usize) -> usize {
        let (epoch, position) = (position / self.rows, position % self.rows);
        let Some(seed) = self.seed else { return position };
        // A Feistel network permutes pairs of `half` bits; what falls beyond the rows is permuted again until it does not
        // (a permutation of the rows: https://doi.org/10.1007/3-540-45760-7_9). So no list of rows is kept.
        let half = (usize::BITS - (self.rows - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1 << half) - 1;
        let mix = |value: u64| mix(value.wrapping_add(WEYL));
        let key = mix(seed ^ mix(epoch as u64));
        let mut at = position as u64;
        loop {
            let (mut left, mut right) = (at >> half, at & mask);
            for round in 0..ROUNDS {
                (left, right) = (right, left ^ (mix(key ^ mix(right << 8 | round)) & mask));
            }
            at = left << half | right;
            if at < self.rows as u64 {
                return at as usize;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Ranks take turns, each with its own micro-batches, and resume with another number of ranks.
        #[test]
        fn every_row_is_used_once_an_epoch(
            rows in 1usize..500,
            seed in proptest::option::of(any::<u64>()),
            parts in proptest::collection::vec((1usize..4, 1usize..4, 1usize..8), 1..6),
        ) {
            let order = Order { rows, seed };
            let (mut used, mut seen) = (0, Vec::new());
            // Each part resumes where the one before has ended, with other ranks and batches.
            for (world, micro, steps) in parts.into_iter().cycle() {
                for _ in 0..steps {
                    for rank in 0..world {
                        seen.extend_from_slice(&order.rows(used + rank * micro, micro, 0));
                    }
                    used += world * micro;
                }
                if used >= 3 * rows {
                    break;
                }
            }
            for epoch in seen.chunks_exact(rows) {
                let mut epoch = epoch.to_vec();
                epoch.sort_unstable();
                prop_assert!(epoch.into_iter().eq(0..rows));
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_are_random() {
        let order = |seed| Order { rows: 1000, seed };
        let epoch = |seed, epoch: usize| order(Some(seed)).rows(epoch * 1000, 1000, 0).to_vec();
        assert_eq!(epoch(1, 0), epoch(1, 0));
        for other in [epoch(1, 1), epoch(2, 0), order(None).rows(0, 1000, 0).to_vec()] {
            let equal = epoch(1, 0).iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(equal < 10, "{equal} rows at the same place, where 1 is expected");
        }
        // Rank correlation with the data's order, of which the standard deviation is 1 / sqrt(1000).
        let mean = 499.5;
        let product: f64 =
            epoch(1, 0).iter().enumerate().map(|(i, &row)| (i as f64 - mean) * (row as f64 - mean)).sum();
        let variance: f64 = (0..1000).map(|i| (i as f64 - mean).powi(2)).sum();
        assert!((product / variance).abs() < 0.15, "{}", product / variance);
    }
}
