//! Random numbers that depend only on their seed, the same in every version and on every machine: SplitMix64 (Steele, Lea,
//! Flood 2014, <https://doi.org/10.1145/2714064.2660195>).

use std::ops::Range;

use rayon::prelude::*;

/// Increment of the generator's state, and factor of the position in streams addressed by position.
pub const WEYL: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finaliser: every bit of the result depends on every bit of `z`.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns a hash of `words` that depends on their order: the key of a stream whose numbers are addressed by position.
pub fn sign(words: &[u64]) -> u64 {
    words.iter().fold(0, |key, &word| mix(key ^ mix(word.wrapping_add(WEYL))))
}

/// A sequential stream of random numbers.
#[derive(Debug, Clone)]
pub struct Draws(u64);

impl Draws {
    /// Creates the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns an independent stream for part `number` of this stream's use. This stream does not advance.
    pub fn fork(&self, number: u64) -> Self {
        Self(mix(self.0 ^ mix(number.wrapping_add(WEYL))))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(WEYL);
        mix(self.0)
    }

    /// Returns a number from 0 to below `end`, which must be above 0. (The bias is negligible: each number stands for 2^64 /
    /// `end` values of the generator, rounded up or down.)
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.bits()) * end as u128) >> 64) as usize
    }

    /// Returns a number from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// A stream of random numbers addressed by position. Number `i` depends only on the stream and `i`: each rank can draw just
/// its part, and the numbers do not depend on the number of ranks. Normals are Box-Muller pairs.
#[derive(Debug, Clone, Copy)]
pub struct Stream(u64);

impl Stream {
    /// Creates the stream of `words` (such as seed, rank, draw number).
    pub fn new(words: &[u64]) -> Self {
        Self(sign(words))
    }

    /// Returns the key that, with a position, determines a number.
    pub fn key(self) -> u64 {
        self.0
    }

    /// Returns the 64 random bits at position `i`.
    pub fn bits(self, i: u64) -> u64 {
        mix(self.0.wrapping_add(i.wrapping_add(1).wrapping_mul(WEYL)))
    }

    /// Returns a uniform number in [0, 1) with 53 bits.
    pub fn unit(self, i: u64) -> f64 {
        (self.bits(i) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns the pair of standard normals at positions `2 pair` and `2 pair + 1`.
    fn pair(self, pair: u64) -> (f64, f64) {
        // 1 - u lies in (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.unit(2 * pair)).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.unit(2 * pair + 1)).sin_cos();
        (radius * cos, radius * sin)
    }

    /// Returns the stream for the initial values of the parameter numbered `birth` among those initialized with this seed;
    /// `part` is its part, if parts are drawn separately.
    pub fn of_parameter(seed: u64, birth: u64, part: Option<u64>) -> Self {
        let words = [seed, u64::MAX, birth].into_iter().chain(part);
        Self::new(&words.collect::<Vec<_>>())
    }

    /// Returns numbers `range` of a draw from a normal distribution, computed by all threads of the caller's pool.
    pub fn normals<T: Copy + Default + Send>(
        self,
        range: Range<usize>,
        mean: f64,
        std: f64,
        from: impl Fn(f64) -> T + Sync,
    ) -> Vec<T> {
        const CHUNK: usize = 1 << 14;
        let mut all = vec![T::default(); range.len()];
        all.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, out)| {
            let first = range.start + chunk * CHUNK;
            let mut at = 0;
            while at < out.len() {
                let i = first + at;
                let (even, odd) = self.pair(i as u64 / 2);
                if i.is_multiple_of(2) {
                    out[at] = from(mean + std * even);
                    at += 1;
                }
                if at < out.len() {
                    out[at] = from(mean + std * odd);
                    at += 1;
                }
            }
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_draw_are_those_of_the_whole() {
        let stream = Stream::new(&[1, 2]);
        let draw = |range| stream.normals(range, 1.0, 2.0, |x| x);
        let all = draw(0..50_000);
        for range in [0..1, 1..2, 3..40_000, 16_383..16_385, 49_999..50_000] {
            assert_eq!(draw(range.clone()), all[range]);
        }
        let one: Vec<f64> = (0..50_000).flat_map(|i| draw(i..i + 1)).collect();
        assert_eq!(one, all);
    }

    #[test]
    fn draws_are_those_of_the_reference() {
        // splitmix64.c of https://prng.di.unimi.it, seed 1234567.
        let mut draws = Draws::new(1_234_567);
        assert_eq!([draws.bits(), draws.bits()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
        let mut draws = Draws::new(7);
        let mut counts = [0; 5];
        (0..50_000).for_each(|_| counts[draws.below(5)] += 1);
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
        assert!((0..1000).map(|_| draws.unit()).all(|unit| (0.0..1.0).contains(&unit)));
        let mut items: Vec<usize> = (0..100).collect();
        draws.shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
        assert_ne!(Draws::new(7).fork(0).bits(), Draws::new(7).fork(1).bits());
    }
}
