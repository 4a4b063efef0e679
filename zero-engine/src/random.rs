//! The random state of a rank, and hashes of bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
pub use zero_core::random::{Stream, sign};
use zero_core::random::{WEYL, mix};

/// Returns a hash of `bytes`.
pub fn sign_bytes(bytes: &[u8]) -> u64 {
    let rest = bytes.as_chunks::<8>().1;
    let rest = rest.iter().fold(rest.len() as u64, |word, &byte| word << 8 | u64::from(byte));
    words(bytes).chain([rest]).fold(0, |key, word| mix(key ^ mix(word.wrapping_add(WEYL))))
}

/// Returns the little-endian numbers in `bytes`.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|&word| u64::from_le_bytes(word))
}

/// The state from which this rank's random numbers (dropout, noise) resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomState {
    /// This rank's seed; the same on all ranks, unless they were seeded differently.
    pub seed: u64,
    /// Number of this rank's draws so far.
    pub draws: u64,
}

/// A rank's seed, and its draws since the seed was set.
pub struct Draws {
    seed: AtomicU64,
    /// Parameters created.
    births: AtomicU64,
    draws: AtomicU64,
    /// Draws of threads other than the rank's own. Not part of the random state: they differ from run to run.
    draws_beside: AtomicU64,
}

impl Draws {
    /// Creates the random state of a rank with this seed.
    pub fn new(seed: u64) -> Self {
        let [births, draws, draws_beside] = [0; 3].map(AtomicU64::new);
        Self { seed: AtomicU64::new(seed), births, draws, draws_beside }
    }

    /// Returns the state from which the draws resume.
    pub fn state(&self) -> RandomState {
        RandomState { seed: self.seed.load(Ordering::Relaxed), draws: self.draws.load(Ordering::Relaxed) }
    }

    /// Resumes from a state.
    pub fn set_state(&self, state: RandomState) {
        self.seed.store(state.seed, Ordering::Relaxed);
        self.draws.store(state.draws, Ordering::Relaxed);
    }

    /// Starts over with another seed.
    pub fn reseed(&self, seed: u64) {
        self.set_state(RandomState { seed, draws: 0 });
        self.births.store(0, Ordering::Relaxed);
    }

    /// Returns the seed of the next parameter, and its number since the seed was set.
    pub fn next_birth(&self) -> (u64, u64) {
        self.next_of(&self.births)
    }

    /// Returns the seed and the number of the rank's next draw.
    pub fn next(&self) -> (u64, u64) {
        self.next_of(&self.draws)
    }

    /// Same as [`Draws::next`], for another thread.
    pub fn next_beside(&self) -> (u64, u64) {
        self.next_of(&self.draws_beside)
    }

    fn next_of(&self, count: &AtomicU64) -> (u64, u64) {
        (self.seed.load(Ordering::Relaxed), count.fetch_add(1, Ordering::Relaxed))
    }
}
