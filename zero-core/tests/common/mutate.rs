//! Random mutations of bytes, for parsers that must not trust their input. The same bytes and seed give the same result.
#![allow(dead_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// SplitMix64, <https://prng.di.unimi.it/splitmix64.c>.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to `end - 1`, or 0 when `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}

/// Numbers at which sizes, offsets and counts overflow or hit limits.
const NUMBERS: [&str; 20] = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "-0",
    "0.5",
    "1e3",
    "1e400",
    "255",
    "65536",
    "2147483648",
    "4294967296",
    "2305843009213693951",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
];

/// Tokens of the JSON of checkpoints.
const TOKENS: [&str; 30] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "null",
    "true",
    "{}",
    "[]",
    "[[",
    "\"\"",
    "\"F64\"",
    "\"BOOL\"",
    "\"F4\"",
    "\"__metadata__\"",
    "\"dtype\":",
    "\"shape\":",
    "\"data_offsets\":",
    "\"a\":",
    "\"world\":",
    "\"state\":",
    " ",
    "\n",
    "\\u0000",
    "\\ud800",
    "\u{7f}",
    "ü",
];

/// Makes one to four random changes: to bits, bytes, numbers and tokens; cuts, copies and moves of parts; and rarely a
/// truncation, since a parser reads little of a truncated input.
pub fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let length = 1 + random.below(24);
        let end = (at + length).min(bytes.len());
        match random.below(16) {
            0 | 1 if at < end => bytes[at] ^= 1 << random.below(8),
            2 if at < end => bytes[at] = random.next() as u8,
            3 => drop(bytes.drain(at..end)),
            4 => {
                let piece = bytes[at..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            5 => {
                let piece: Vec<u8> = bytes.drain(at..end).collect();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            6..=10 => replace_number(random, bytes, at),
            11 | 12 => {
                let token = random.pick(&TOKENS);
                bytes.splice(at..at, token.bytes());
            }
            13 => {
                let token = random.pick(&TOKENS);
                bytes.splice(at..end, token.bytes());
            }
            14 if random.below(4) == 0 => bytes.truncate(at),
            _ => replace_string(random, bytes, at),
        }
    }
}

/// Changes a safetensors file: mostly its header, whose length field is then usually updated.
pub fn mutate_file(random: &mut Random, file: &mut Vec<u8>) {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    match random.below(8) {
        0 => {
            let length = random.next() >> random.below(64);
            file[..8].copy_from_slice(&length.to_le_bytes());
        }
        1 => file.truncate(random.below(file.len())),
        2 => mutate(random, file),
        _ => {
            let data = file.split_off(8 + header);
            let mut json = file.split_off(8);
            mutate(random, &mut json);
            *file = [&(json.len() as u64).to_le_bytes()[..], &json, &data].concat();
        }
    }
}

/// Replaces the first number from `at` on with another.
fn replace_number(random: &mut Random, bytes: &mut Vec<u8>, at: usize) {
    let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|skip| at + skip) else { return };
    let end =
        bytes[start..].iter().position(|byte| !byte.is_ascii_digit()).map_or(bytes.len(), |length| start + length);
    let number = random.pick(&NUMBERS);
    bytes.splice(start..end, number.bytes());
}

/// Replaces the first string from `at` on with another one from the same bytes: names occur twice, types change.
fn replace_string(random: &mut Random, bytes: &mut Vec<u8>, at: usize) {
    let string_from = |at: usize| {
        let start = bytes[at..].iter().position(|&byte| byte == b'"')? + at;
        let length = bytes[start + 1..].iter().position(|&byte| byte == b'"')?;
        Some(start..start + length + 2)
    };
    let from = random.below(bytes.len());
    if let (Some(to), Some(from)) = (string_from(at), string_from(from)) {
        let string = bytes[from].to_vec();
        bytes.splice(to, string);
    }
}

/// Runs `body`; if it panics, prints the input.
pub fn on<T>(what: &str, case: usize, input: &[u8], body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let shown = &input[..input.len().min(4000)];
        eprintln!("{what}, case {case}, {} bytes: {}", input.len(), shown.escape_ascii());
        resume_unwind(panic)
    })
}
