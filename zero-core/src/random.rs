//! Random numbers that are a function of their seed and nothing else, the same in every version and on every machine:
//! SplitMix64 (Steele, Lea, Flood 2014, <https://doi.org/10.1145/2714064.2660195>).

use std::ops::Range;

use rayon::prelude::*;

/// What the generator's state grows by, which numbers draws that are addressed by position.
pub const WEYL: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finaliser: every bit of the result depends on every bit of `z`.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A hash of `words` that depends on their order: the key of a draw whose numbers are addressed by position.
pub fn sign(words: &[u64]) -> u64 {
    words.iter().fold(0, |key, &word| mix(key ^ mix(word.wrapping_add(WEYL))))
}

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub struct Draws(u64);

impl Draws {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The stream of part `number` of what this stream is for; this one stays where it is.
    pub fn fork(&self, number: u64) -> Self {
        Self(mix(self.0 ^ mix(number.wrapping_add(WEYL))))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(WEYL);
        mix(self.0)
    }

    /// A number from 0 to below `end`, which is above 0. (Of 2^64 values, up to `end` are drawn once too often.)
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.bits()) * end as u128) >> 64) as usize
    }

    /// A number from 0 to below 1.
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

/// A stream of random numbers addressed by position: number `i` depends on the stream and `i` alone, so that each rank can draw only its
/// part, and what is drawn does not depend on the number of ranks. Normals are Box-Muller pairs.
#[derive(Debug, Clone, Copy)]
pub struct Stream(u64);

impl Stream {
    /// The stream of `words` (such as seed, rank, draw number).
    pub fn new(words: &[u64]) -> Self {
        Self(sign(words))
    }

    /// What its numbers are made of, with their places.
    pub fn key(self) -> u64 {
        self.0
    }

    /// 64 random bits of a place.
    pub fn bits(self, i: u64) -> u64 {
        mix(self.0.wrapping_add(i.wrapping_add(1).wrapping_mul(WEYL)))
    }

    /// Uniform in [0, 1) with 53 bits.
    pub fn unit(self, i: u64) -> f64 {
        (self.bits(i) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// The pair of standard normals of positions `2 pair` and `2 pair + 1`.
    fn pair(self, pair: u64) -> (f64, f64) {
        // 1 - u lies in (0, 1], so that the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.unit(2 * pair)).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.unit(2 * pair + 1)).sin_cos();
        (radius * cos, radius * sin)
    }

    /// That of the first values of a parameter, the `birth`-th that is made with this seed.
    pub fn of_parameter(seed: u64, birth: u64, part: Option<u64>) -> Self {
        let words = [seed, u64::MAX, birth].into_iter().chain(part);
        Self::new(&words.collect::<Vec<_>>())
    }

    /// Numbers `range` of a draw from a normal distribution, by all threads of the caller's pool.
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
