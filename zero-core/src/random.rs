//! Random numbers that are a function of their seed and nothing else, the same in every version and on every machine:
//! SplitMix64 (Steele, Lea, Flood 2014, <https://doi.org/10.1145/2714064.2660195>).

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

#[cfg(test)]
mod tests {
    use super::*;

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
