//! Optimizer state in 8 bits: *8-bit Optimizers via Block-wise Quantization*, Dettmers et al. 2022, <https://arxiv.org/abs/2110.02861>.
//!
//! A block of [`BLOCK`] elements has a byte for each element and a scale in fp32, the element that is farthest from zero. A byte stands for
//! a fraction of the scale: zero, one, or one of the fractions of bitsandbytes' dynamic map, which has twice as many for each decade from
//! 1e-6 to one. Elements are rounded to the nearest fraction. An element above a tenth of the scale has an error of at most 7 % (3.5 % in a
//! block without negative elements), near the scale of a tenth of that. The error doubles with each decade below.
//!
//! In bitsandbytes a scale is positive, so a block whose farthest element is negative does not hold that element exactly. Here the scale has
//! its sign. So encoding decoded elements again gives the same bytes, which a resumed run needs. The last bit of a scale is 1 if the block's
//! elements are not negative, as those of a mean of squares: such blocks have twice as many fractions.
//!
//! Blocks begin anew at each rank's shard ([`Layout`]), so that the bytes are the same at every stage.

use std::ops::Range;

/// Number of elements that share a scale.
pub const BLOCK: usize = 256;

/// Bytes of a block: its elements, then the scale.
const BYTES: usize = BLOCK + 4;

/// Number of decades of the fractions.
const DECADES: usize = 7;

/// The fractions of a state that may be negative, or of one that may not.
#[derive(Clone, Copy)]
struct Map {
    fractions: [f32; 256],
    /// For each decade, the smallest number that is nearest to one of its fractions. A decade has `n` of them, the middles of `n` equal parts
    /// of its range. So in the first decade a number `x` is in part `x n / (0.9e-6) - n / 9`.
    decades: [f32; DECADES],
    /// The smallest number that is nearest to 1, and its byte.
    one: (f32, u8),
}

const fn map(signed: bool) -> Map {
    let mut map = Map { fractions: [0.0; 256], decades: [0.0; DECADES], one: (0.0, if signed { 128 } else { 255 }) };
    let (mut decade, mut byte, mut below, mut power) = (0, 1, 0.0f64, 1e6f64);
    while decade < DECADES {
        let n = 1 << (decade + if signed { 0 } else { 1 });
        let mut part = 0;
        while part < n {
            let fraction = (0.1 + 0.9 * (part as f64 + 0.5) / n as f64) / power;
            if part == 0 {
                map.decades[decade] = ((below + fraction) / 2.0) as f32;
            }
            map.fractions[byte] = fraction as f32;
            if signed {
                map.fractions[byte + 128] = -(fraction as f32);
            }
            below = fraction;
            byte += 1;
            part += 1;
        }
        decade += 1;
        power /= 10.0;
    }
    map.one.0 = ((below + 1.0) / 2.0) as f32;
    map.fractions[map.one.1 as usize] = 1.0;
    map
}

static SIGNED: Map = map(true);
static UNSIGNED: Map = map(false);

/// The bytes of a shard: those of blocks, which begin anew every `stride` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Number of elements of the shard of one rank, at least 1.
    pub stride: usize,
}

impl Layout {
    /// Returns the number of bytes of the first `elements` elements: all, or a multiple of the stride.
    pub fn bytes(self, elements: usize) -> usize {
        elements / self.stride * bytes(self.stride) + bytes(elements % self.stride)
    }

    /// Returns the ranges of `elements` elements in which blocks are consecutive, each with that of its bytes.
    pub fn runs(self, elements: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        (0..elements).step_by(self.stride).map(move |begin| {
            let end = elements.min(begin + self.stride);
            (begin..end, self.bytes(begin)..self.bytes(end))
        })
    }

    /// Encodes all elements of a shard; without `signed` none may be negative.
    pub fn encode(self, values: &[f32], signed: bool) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes(values.len())];
        for (elements, place) in self.runs(values.len()) {
            encode(&values[elements], &mut bytes[place], signed);
        }
        bytes
    }

    /// Decodes all `elements` elements of a shard.
    pub fn decode(self, bytes: &[u8], elements: usize) -> Vec<f32> {
        let mut values = vec![0.0; elements];
        for (elements, place) in self.runs(elements) {
            decode(&bytes[place], &mut values[elements]);
        }
        values
    }
}

/// Returns the number of bytes of consecutive blocks.
pub(super) const fn bytes(elements: usize) -> usize {
    elements + 4 * elements.div_ceil(BLOCK)
}

/// Decodes consecutive blocks.
#[inline(always)]
pub(super) fn decode(bytes: &[u8], values: &mut [f32]) {
    for (block, values) in bytes.chunks(BYTES).zip(values.chunks_mut(BLOCK)) {
        let (codes, scale) = block.split_at(values.len());
        let scale = f32::from_le_bytes(scale.try_into().expect("a block ends with its scale"));
        let fractions = if scale.to_bits() & 1 == 0 { &SIGNED.fractions } else { &UNSIGNED.fractions };
        values.iter_mut().zip(codes).for_each(|(value, &code)| *value = fractions[usize::from(code)] * scale);
    }
}

/// Encodes consecutive blocks.
#[inline(always)]
pub(super) fn encode(values: &[f32], bytes: &mut [u8], signed: bool) {
    let map = if signed { &SIGNED } else { &UNSIGNED };
    for (block, values) in bytes.chunks_mut(BYTES).zip(values.chunks(BLOCK)) {
        let (codes, place) = block.split_at_mut(values.len());
        // As bits, among which those of NaN are the largest.
        let farthest = values.iter().fold(0, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
        let is_positive = values.iter().any(|value| value.to_bits() == farthest);
        let size = f32::from_bits(farthest & !1 | u32::from(!signed));
        let scale = if is_positive { size } else { -size };
        place.copy_from_slice(&scale.to_le_bytes());
        if farthest == 0 {
            codes.fill(0);
            continue;
        }
        let mut x = [0.0; BLOCK];
        x.iter_mut().zip(values).for_each(|(x, value)| *x = value / scale);
        nearest(&mut x, map, signed);
        // The sum's last bits are the byte.
        codes.iter_mut().zip(&x).for_each(|(code, x)| *code = (x + 8_388_608.0).to_bits() as u8);
    }
}

/// Replaces fractions `x`, at most 1 in size, by the bytes of the nearest ones. Each loop is simple enough to be vectorized.
#[inline(always)]
fn nearest(x: &mut [f32; BLOCK], map: &Map, signed: bool) {
    let Map { decades, one, .. } = *map;
    // The number of fractions of the decade, a power of two.
    let least = if signed { 1.0 } else { 2.0 };
    let (mut n, mut parts) = ([least; BLOCK], [least * (1e6 / 0.9); BLOCK]);
    for from in &decades[1..] {
        for ((n, parts), x) in n.iter_mut().zip(&mut parts).zip(x.iter()) {
            // A choice between constants: one between numbers in memory would gather them.
            let is_above = x.abs() >= *from;
            *n *= if is_above { 2.0 } else { 1.0 };
            *parts *= if is_above { 0.2 } else { 1.0 };
        }
    }
    // The byte of the first fraction of a decade is `n`, or the one before.
    let skipped = if signed { 0.0 } else { 1.0 };
    for ((n, parts), x) in n.iter().zip(&parts).zip(x.iter_mut()) {
        let far = x.abs();
        let part = (far * parts - n * (1.0 / 9.0)).floor().max(0.0).min(n - 1.0);
        let byte = if far < decades[0] { 0.0 } else { part + n - skipped };
        let byte = if *x >= one.0 { f32::from(one.1) } else { byte };
        *x = if *x < 0.0 && byte > 0.0 { byte + 128.0 } else { byte };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Rule;
    use crate::update::{Chunk, Elements, Kernel, State, update_chunk};

    fn numbers(count: usize, mut seed: u32, signed: bool) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32
        };
        let number = |_| {
            let size = 10f32.powf(-8.0 * next());
            if signed && next() < 0.5 { -size } else { size }
        };
        (0..count).map(number).collect()
    }

    /// The numbers of bitsandbytes' `create_dynamic_map`.
    fn dynamic_map(signed: bool) -> Vec<f64> {
        let mut map = vec![0.0, 1.0];
        for decade in 0..7 {
            let n = 1 << (decade + i32::from(!signed));
            for part in 0..n {
                let bounds = [part, part + 1].map(|at| 0.1 + 0.9 * f64::from(at) / f64::from(n));
                let mean = 10f64.powi(decade - 6) * (bounds[0] + bounds[1]) / 2.0;
                map.extend([mean, -mean].into_iter().take(1 + usize::from(signed)));
            }
        }
        map
    }

    #[test]
    fn the_fractions_are_those_of_bitsandbytes_and_the_nearest_is_chosen() {
        for signed in [true, false] {
            let map = if signed { &SIGNED } else { &UNSIGNED };
            let mut expected = dynamic_map(signed);
            let mut got: Vec<f64> = map.fractions.iter().map(|&fraction| f64::from(fraction)).collect();
            expected.sort_by(f64::total_cmp);
            got.sort_by(f64::total_cmp);
            assert_eq!(expected.len(), 256);
            for (got, expected) in got.iter().zip(&expected) {
                assert!((got - expected).abs() <= 1e-6 * expected.abs(), "{got}, expected {expected}");
            }
            for x in numbers(20_000, 1, signed).into_iter().chain(map.fractions).chain([0.0, 1e-30]) {
                let mut bytes = [x; BLOCK];
                nearest(&mut bytes, map, signed);
                let distance = |fraction: f64| (fraction - f64::from(x)).abs();
                let least = expected.iter().map(|&fraction| distance(fraction)).fold(f64::INFINITY, f64::min);
                let got = f64::from(map.fractions[bytes[0] as usize]);
                assert!(distance(got) <= least + 1e-6 * f64::from(x.abs()), "{x}: {got}");
            }
        }
    }

    #[test]
    fn decoded_elements_have_the_same_bytes() {
        for signed in [true, false] {
            for (count, stride) in [(1, 1), (256, 256), (1000, 1000), (1000, 334), (5000, 1250)] {
                let layout = Layout { stride };
                let values = numbers(count, count as u32, signed);
                let bytes = layout.encode(&values, signed);
                assert_eq!(bytes.len(), layout.bytes(count));
                let decoded = layout.decode(&bytes, count);
                assert!(layout.encode(&decoded, signed) == bytes, "{count} elements by {stride}");
                // The shards of single ranks are the same bytes.
                let parts: Vec<u8> = values.chunks(stride).flat_map(|part| layout.encode(part, signed)).collect();
                assert_eq!(parts, bytes);
                for (block, decoded) in values.chunks(stride).zip(decoded.chunks(stride)) {
                    for (values, decoded) in block.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                        let scale = values.iter().fold(0f32, |most, value| most.max(value.abs()));
                        for (value, decoded) in values.iter().zip(decoded) {
                            let decades = (value.abs() / scale).log10().floor().clamp(-7.0, -1.0) + 1.0;
                            let part =
                                0.9 * 10f32.powf(decades) / 2f32.powf(6.0 + decades + f32::from(u8::from(!signed)));
                            assert!((decoded - value).abs() <= 0.501 * part * scale, "{value}: {decoded}, by {scale}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none_and_zeros_stay_zeros() {
        let layout = Layout { stride: 300 };
        let mut values = vec![1.0; 300];
        values[3] = f32::NAN;
        let decoded = layout.decode(&layout.encode(&values, true), 300);
        assert!(decoded[..BLOCK].iter().all(|value| value.is_nan()) && decoded[BLOCK..] == values[BLOCK..]);
        for signed in [true, false] {
            assert_eq!(layout.decode(&layout.encode(&[0.0; 300], signed), 300), [0.0; 300]);
        }
        assert_eq!(layout.decode(&vec![0; layout.bytes(300)], 300), [0.0; 300]);
    }

    /// Every 64th parameter after 12 steps of torchao 0.18's `AdamW8bit` (torch 2.15), learning rate 0.01, decay 0.01, with the numbers of
    /// [`Aligned`].
    const OF_TORCHAO: [f32; 64] = [
        -0.25075784,
        0.30037624,
        0.07687922,
        0.29000762,
        -0.28962332,
        -0.09917339,
        0.06773865,
        0.32288748,
        0.51479733,
        0.1946614,
        0.4600451,
        -0.22376902,
        0.46853423,
        0.45723462,
        -0.2865205,
        -0.2806089,
        -0.18046774,
        0.0035299377,
        0.17274557,
        -0.37766084,
        0.02122923,
        0.16122454,
        -0.022085583,
        -0.121732116,
        0.3580539,
        0.317257,
        -0.42181438,
        -0.31214967,
        -0.05345759,
        -0.48750177,
        0.24935412,
        0.2691032,
        0.4372829,
        0.36635837,
        0.23924157,
        0.26209685,
        -0.053143337,
        -0.5984424,
        -0.022780146,
        -0.38074133,
        -0.26932222,
        0.0762848,
        -0.3184701,
        -0.23373887,
        0.1247653,
        0.36417207,
        -0.77572465,
        0.114354655,
        -0.4498197,
        -0.4333533,
        0.33076444,
        -0.016287215,
        0.28524902,
        -0.06986623,
        -0.08663476,
        -0.33620316,
        -0.4665218,
        -0.309605,
        -0.31314763,
        0.2971273,
        -0.16851468,
        0.07171572,
        0.02826172,
        0.35966292,
    ];

    /// Parameters and gradients by one sequence of random numbers. The element of a block that is farthest from zero is positive, as
    /// torchao's scales have no sign.
    struct Aligned(u32);

    impl Aligned {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(self.0 >> 8) / f64::from(1 << 24)
        }

        fn gradient(&mut self, at: usize) -> f32 {
            let size = self.next();
            let value = (self.next() - 0.5) * 10f64.powf(-4.0 * size);
            if at % BLOCK == 7 { 2.0 } else { value as f32 }
        }
    }

    #[test]
    fn adamw_has_the_parameters_of_torchao() {
        const COUNT: usize = 4096;
        let mut source = Aligned(1);
        let mut p: Vec<f32> = (0..COUNT).map(|_| (source.next() - 0.5) as f32).collect();
        let [mut m, mut v] = [bytes(COUNT); 2].map(|len| vec![0; len]);
        for time in 1..=12 {
            let g: Vec<f32> = (0..COUNT).map(|at| source.gradient(at)).collect();
            let (a, b) = (State::Blocks(&mut m), State::Blocks(&mut v));
            let chunk = Chunk { p: &mut p, g: Elements::F32(&g), a, b, copy: None, average: None, first: 0 };
            update_chunk(Kernel::new(Rule::adamw(), 1e-2, time), 1.0, chunk, 0..0);
        }
        let got = p.iter().step_by(64);
        let apart = got.zip(OF_TORCHAO).map(|(got, expected)| (got - expected).abs()).fold(0.0, f32::max);
        println!("{apart:e} apart");
        assert!(apart < 1e-5, "{apart:e}");
    }
}
