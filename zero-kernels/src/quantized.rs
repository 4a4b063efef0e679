//! Numbers in 8 or 4 bits, in blocks with a scale each: weights of frozen layers, and data that ranks exchange.
//!
//! A row of a weight `[d, f]` is split into blocks of 64 elements, the last one padded with zeros. A block is its scale
//! (fp32, little-endian) and then its codes: a byte per element, or for 4 bits a byte for elements `i` (low half) and
//! `i + 32`. So each block can be decoded alone, and a rank with any part of the weight can decode that part.
//!
//! A backend holds such rows as a 16-bit float tensor `[d, words]`, whose numbers have no meaning. It is only ever copied,
//! so it is sharded, gathered, offloaded to a disk or sent like any parameter.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Elements of a block.
pub const BLOCK: usize = 64;

/// The codes of NF4, *QLoRA*, Dettmers et al. 2023, <https://arxiv.org/abs/2305.14314>, appendix E.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// A format of a quantized weight's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// 255 equal steps between minus and plus the largest magnitude of the block: 8.5 bits per element.
    Int8,
    /// 15 such steps: 4.5 bits per element.
    Int4,
    /// The 16 values of NF4, which lie closer together near zero: 4.5 bits per element.
    Nf4,
}

impl Format {
    /// All formats, with their names.
    pub const NAMES: [(&'static str, Self); 3] = [("int8", Self::Int8), ("int4", Self::Int4), ("nf4", Self::Nf4)];

    /// Returns the bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Int8 => 4 + BLOCK,
            Self::Int4 | Self::Nf4 => 4 + BLOCK / 2,
        }
    }

    /// Returns the bytes of a row of `numel` numbers.
    pub const fn bytes(self, numel: usize) -> usize {
        numel.div_ceil(BLOCK) * self.block_bytes()
    }

    /// Returns the 16-bit numbers that a row of `width` elements takes.
    pub fn words(self, width: usize) -> usize {
        self.bytes(width) / 2
    }

    /// Appends the blocks that encode `elements`. A block with an infinity or a NaN decodes to NaN.
    pub fn encode_row(self, elements: &[f32], out: &mut Vec<u8>) {
        let begin = out.len();
        out.resize(begin + self.bytes(elements.len()), 0);
        encode_row(self, elements, &mut out[begin..]);
    }

    /// Adds the numbers that `blocks` encode to `sum`.
    ///
    /// # Panics
    ///
    /// If the number of elements differs.
    pub fn add_row(self, blocks: &[u8], sum: &mut [f32]) {
        assert_eq!(blocks.len(), self.bytes(sum.len()), "wrong number of bytes for {} numbers", sum.len());
        add_row(self, blocks, sum);
    }

    /// Decodes `blocks` into `out`.
    ///
    /// # Panics
    ///
    /// If the number of elements differs.
    pub fn decode_row(self, blocks: &[u8], out: &mut [f32]) {
        assert_eq!(blocks.len(), self.bytes(out.len()), "wrong number of bytes for {} numbers", out.len());
        decode_row(self, blocks, out);
    }

    #[inline(always)]
    fn each_block(self, blocks: &[u8], out: &mut [f32], put: impl Fn(&mut f32, f32)) {
        let mut decoded = [0f32; BLOCK];
        let mut blocks = blocks.chunks_exact(self.block_bytes());
        // Chunks of a length that the compiler knows.
        let (whole, rest) = out.as_chunks_mut::<BLOCK>();
        for (out, block) in whole.iter_mut().zip(&mut blocks) {
            self.decode(block, &mut decoded);
            for i in 0..BLOCK {
                put(&mut out[i], decoded[i]);
            }
        }
        if let Some(block) = blocks.next() {
            self.decode(block, &mut decoded);
            rest.iter_mut().zip(decoded).for_each(|(out, decoded)| put(out, decoded));
        }
    }

    #[inline(always)]
    fn encode_blocks(self, elements: &[f32], out: &mut [u8]) {
        let mut blocks = out.chunks_exact_mut(self.block_bytes());
        let (whole, rest) = elements.as_chunks::<BLOCK>();
        for (elements, block) in whole.iter().zip(&mut blocks) {
            self.encode(elements, block);
        }
        if let Some(block) = blocks.next() {
            let mut filled = [0f32; BLOCK];
            filled[..rest.len()].copy_from_slice(rest);
            self.encode(&filled, block);
        }
    }

    /// Encodes 64 numbers as a block.
    #[inline(always)]
    fn encode(self, elements: &[f32; BLOCK], block: &mut [u8]) {
        // Magnitudes have the order of their bits, and non-finite ones are above all finite ones.
        let mut lanes = [0u32; 16];
        for part in elements.as_chunks::<16>().0 {
            for (lane, x) in lanes.iter_mut().zip(part) {
                *lane = (*lane).max(x.abs().to_bits());
            }
        }
        let largest = lanes.into_iter().fold(0, u32::max);
        let largest = Some(f32::from_bits(largest)).filter(|largest| largest.is_finite()).unwrap_or(f32::NAN);
        let steps = match self {
            Self::Int8 => 127.0,
            Self::Int4 => 7.0,
            Self::Nf4 => 1.0,
        };
        let scale = largest / steps;
        let (first, codes) = block.split_first_chunk_mut::<4>().expect("a block begins with its scale");
        *first = scale.to_le_bytes();
        // A scale of zero, or NaN, leaves nothing to divide.
        let mut at = [0f32; BLOCK];
        if scale > 0.0 {
            for i in 0..BLOCK {
                at[i] = elements[i] / scale;
            }
        }
        // The compiler vectorises these loops over arrays.
        let mut code = [0u8; BLOCK];
        match self {
            Self::Int8 => {
                for i in 0..BLOCK {
                    code[i] = nearest(at[i], 127.0) as u8;
                }
                codes.copy_from_slice(&code);
            }
            Self::Int4 => {
                for i in 0..BLOCK {
                    code[i] = (nearest(at[i], 7.0) + 8) as u8;
                }
                halves(codes, &code);
            }
            Self::Nf4 => {
                // The nearest value's index is the number of midpoints between neighbours that lie below the number.
                let mut below = [0u32; BLOCK];
                for at_most in 1..NF4.len() {
                    let middle = (NF4[at_most - 1] + NF4[at_most]) / 2.0;
                    for i in 0..BLOCK {
                        below[i] += u32::from(at[i] > middle);
                    }
                }
                for i in 0..BLOCK {
                    code[i] = below[i] as u8;
                }
                halves(codes, &code);
            }
        }
    }

    /// Decodes a block.
    #[inline(always)]
    pub(crate) fn decode(self, block: &[u8], out: &mut [f32; BLOCK]) {
        let (scale, codes) = block.split_first_chunk::<4>().expect("a block begins with its scale");
        let scale = f32::from_le_bytes(*scale);
        let (low, high) = out.split_at_mut(BLOCK / 2);
        match self {
            Self::Int8 => {
                let (first, second) = codes.split_at(BLOCK / 2);
                for i in 0..BLOCK / 2 {
                    low[i] = f32::from(first[i] as i8) * scale;
                    high[i] = f32::from(second[i] as i8) * scale;
                }
            }
            Self::Int4 => {
                let codes = &codes[..BLOCK / 2];
                for i in 0..BLOCK / 2 {
                    low[i] = f32::from((codes[i] & 15) as i8 - 8) * scale;
                    high[i] = f32::from((codes[i] >> 4) as i8 - 8) * scale;
                }
            }
            Self::Nf4 => {
                let codes = &codes[..BLOCK / 2];
                for i in 0..BLOCK / 2 {
                    low[i] = NF4[usize::from(codes[i] & 15)] * scale;
                    high[i] = NF4[usize::from(codes[i] >> 4)] * scale;
                }
            }
        }
    }
}

vectorised! {
    fn encode_row<'a>(how: Format, elements: &'a [f32], out: &'a mut [u8]) {
        match how {
            Format::Int8 => Format::Int8.encode_blocks(elements, out),
            Format::Int4 => Format::Int4.encode_blocks(elements, out),
            Format::Nf4 => Format::Nf4.encode_blocks(elements, out),
        }
    }

    fn decode_row<'a>(how: Format, blocks: &'a [u8], out: &'a mut [f32]) {
        match how {
            Format::Int8 => Format::Int8.each_block(blocks, out, |out, decoded| *out = decoded),
            Format::Int4 => Format::Int4.each_block(blocks, out, |out, decoded| *out = decoded),
            Format::Nf4 => Format::Nf4.each_block(blocks, out, |out, decoded| *out = decoded),
        }
    }

    fn add_row<'a>(how: Format, blocks: &'a [u8], sum: &'a mut [f32]) {
        match how {
            Format::Int8 => Format::Int8.each_block(blocks, sum, |sum, decoded| *sum += decoded),
            Format::Int4 => Format::Int4.each_block(blocks, sum, |sum, decoded| *sum += decoded),
            Format::Nf4 => Format::Nf4.each_block(blocks, sum, |sum, decoded| *sum += decoded),
        }
    }
}

/// Packs codes of 4 bits, two per byte: one of the first half and one of the second.
#[inline(always)]
fn halves(out: &mut [u8], codes: &[u8; BLOCK]) {
    let (low, high) = codes.split_at(BLOCK / 2);
    let out = &mut out[..BLOCK / 2];
    for i in 0..BLOCK / 2 {
        out[i] = low[i] | high[i] << 4;
    }
}

/// Returns the nearest integer between minus and plus `most`, an even one in a tie. Its magnitude is so small that its sum
/// with the constant has no room for a fraction.
#[inline(always)]
fn nearest(value: f32, most: f32) -> i32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23
    let value = value.max(-most).min(most);
    (value + SHIFT).to_bits() as i32 - SHIFT.to_bits() as i32
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, _) = Self::NAMES.into_iter().find(|(_, format)| format == self).expect("all formats have a name");
        f.write_str(name)
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::NAMES.into_iter().find(|(name, _)| *name == text);
        found
            .map(|(_, format)| format)
            .ok_or_else(|| format!("expected {}", Self::NAMES.map(|(name, _)| name).join(", ")))
    }
}

/// A weight `[d, width]` with quantized rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantized {
    /// The format of the elements.
    pub format: Format,
    /// Elements of a row.
    pub width: usize,
}

impl Quantized {
    /// Returns the bytes of the part `words` of the quantized rows, which are consecutive; `words` counts 16-bit numbers.
    /// `elements` returns the weight's elements in a flat range.
    pub fn encode(self, words: Range<usize>, elements: impl FnOnce(Range<usize>) -> Vec<f32>) -> Vec<u8> {
        let per_block = self.format.block_bytes() / 2;
        let blocks = words.start / per_block..words.end.div_ceil(per_block);
        let per_row = self.width.div_ceil(BLOCK);
        let first = |block: usize| block / per_row * self.width + block % per_row * BLOCK;
        let end = |block: usize| (first(block) + BLOCK).min((block / per_row + 1) * self.width);
        let mut bytes = Vec::with_capacity(blocks.len() * self.format.block_bytes());
        if let Some(last) = blocks.clone().last() {
            let range = first(blocks.start)..end(last);
            let elements = elements(range.clone());
            for block in blocks.clone() {
                self.format.encode_row(&elements[first(block) - range.start..end(block) - range.start], &mut bytes);
            }
        }
        let from = 2 * (words.start - blocks.start * per_block);
        bytes.truncate(from + 2 * words.len());
        bytes.drain(..from);
        bytes
    }

    /// Decodes the elements of the weight from its quantized rows.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let per_row = self.format.bytes(self.width);
        let mut out = vec![0.0; bytes.len() / per_row * self.width];
        let rows = bytes.chunks_exact(per_row).zip(out.chunks_exact_mut(self.width));
        rows.for_each(|(blocks, row)| self.format.decode_row(blocks, row));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<f32> {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        // Sums of three, of which most are small.
        (0..count).map(|i| (next() + next() + next()) * [1.0, 30.0, 1e-3][i / BLOCK % 3]).collect()
    }

    fn of(how: Quantized, rows: usize, x: &[f32]) -> Vec<u8> {
        how.encode(0..rows * how.format.words(how.width), |range| x[range].to_vec())
    }

    #[test]
    fn no_element_is_further_off_than_half_of_the_widest_gap() {
        for (format, gap) in [(Format::Int8, 1.0 / 127.0), (Format::Int4, 1.0 / 7.0), (Format::Nf4, 1.0 - 0.696_192_8)]
        {
            for (rows, width) in [(1, 1), (3, 64), (5, 100), (2, 200)] {
                let (how, x) = (Quantized { format, width }, numbers(rows * width));
                let data = of(how, rows, &x);
                assert_eq!(data.len(), rows * width.div_ceil(BLOCK) * format.block_bytes());
                let got = how.decode(&data);
                assert_eq!(got.len(), x.len());
                for (x, got) in x.chunks(width).zip(got.chunks(width)) {
                    for (x, got) in x.chunks(BLOCK).zip(got.chunks(BLOCK)) {
                        let largest = x.iter().fold(0f64, |largest, x| largest.max(f64::from(x.abs())));
                        for (x, got) in x.iter().zip(got) {
                            let off = (f64::from(*x) - f64::from(*got)).abs();
                            assert!(off <= largest * (gap / 2.0 + 1e-6), "{format}: {x} became {got} of {largest}");
                        }
                    }
                }
                // Quantizing the result again gives it back, except for the last bit of a scale.
                let again = how.decode(&of(how, rows, &got));
                assert!(got.iter().zip(&again).all(|(a, b)| (a - b).abs() <= a.abs() * 1e-6), "{format} twice");
            }
        }
    }

    #[test]
    fn every_part_is_that_of_the_whole() {
        for (_, format) in Format::NAMES {
            let (how, rows) = (Quantized { format, width: 100 }, 3);
            let x = numbers(rows * how.width);
            let whole = of(how, rows, &x);
            let words = rows * format.words(how.width);
            for range in [0..words, 0..1, 5..18, 17..words, 33..71, words..words] {
                let part = how.encode(range.clone(), |range| x[range].to_vec());
                assert_eq!(part, whole[2 * range.start..2 * range.end], "{format} {range:?}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        for (_, format) in Format::NAMES {
            let how = Quantized { format, width: 70 };
            // The smallest number cannot be divided.
            let x: Vec<f32> = (0..140).map(|i| if i == 130 { f32::from_bits(1) } else { 0.0 }).collect();
            assert!(how.decode(&of(how, 2, &x)).iter().all(|x| x.abs() <= f32::from_bits(1)));
        }
    }

    #[test]
    fn names_are_read() {
        for (name, format) in Format::NAMES {
            assert_eq!((name.parse(), format.to_string()), (Ok(format), name.to_string()));
        }
        assert_eq!("int5".parse::<Format>(), Err("expected int8, int4, nf4".into()));
    }
}
