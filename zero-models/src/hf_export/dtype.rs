//! Element types of exported checkpoints, and rounding to them.

use std::fmt;
use std::str::FromStr;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zero_core::checkpoint::ElementType;

use crate::{ModelError, Result};

/// The element type of an exported checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportDtype {
    /// 32 bits, `fp32`.
    Fp32,
    /// IEEE half precision, `fp16`: numbers up to 65504.
    Fp16,
    /// bfloat16, `bf16`: the range of fp32 with 8 bits of precision.
    Bf16,
}

impl ExportDtype {
    /// Every type.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::Fp16, Self::Fp32];

    /// Returns the element type, its names here and in `config.json`, and the types with a wider range, for a message.
    fn facts(self) -> (ElementType, [&'static str; 3]) {
        match self {
            Self::Fp32 => (ElementType::F32, ["fp32", "float32", "fp32"]),
            Self::Fp16 => (ElementType::F16, ["fp16", "float16", "bf16 or fp32"]),
            Self::Bf16 => (ElementType::Bf16, ["bf16", "bfloat16", "fp32"]),
        }
    }

    /// Returns the type's name in `config.json`.
    pub fn torch_name(self) -> &'static str {
        self.facts().1[1]
    }

    pub(super) fn element(self) -> ElementType {
        self.facts().0
    }

    /// Returns the types with a wider range, for a message.
    pub(super) fn wider(self) -> &'static str {
        self.facts().1[2]
    }

    /// Returns the elements' little-endian bytes, rounded to nearest, ties to even; or, as an error, the first finite number that would
    /// become infinite.
    pub(super) fn encode(self, values: &[f32]) -> Result<Vec<u8>, f32> {
        /// Rounds to a 16-bit type.
        fn rounded<H: Copy + Default>(
            values: &[f32],
            bytes: fn(H) -> [u8; 2],
            is_finite: fn(H) -> bool,
        ) -> Result<Vec<u8>, f32>
        where
            [H]: HalfFloatSliceExt,
        {
            let mut halves = vec![H::default(); values.len()];
            halves.convert_from_f32_slice(values);
            let overflows = |(value, half): &(&f32, &H)| value.is_finite() && !is_finite(**half);
            match values.iter().zip(&halves).find(overflows) {
                Some((value, _)) => Err(*value),
                None => Ok(halves.into_iter().flat_map(bytes).collect()),
            }
        }
        match self {
            Self::Fp32 => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            Self::Fp16 => rounded(values, f16::to_le_bytes, f16::is_finite),
            Self::Bf16 => rounded(values, bf16::to_le_bytes, bf16::is_finite),
        }
    }
}

impl fmt::Display for ExportDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.facts().1[0])
    }
}

impl FromStr for ExportDtype {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.to_string() == text);
        found.ok_or_else(|| ModelError::ExportSetting {
            setting: "element type",
            got: text.to_string(),
            expected: "bf16, fp16 or fp32",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halves(dtype: ExportDtype, values: &[f32]) -> Vec<u16> {
        let bytes = dtype.encode(values).unwrap();
        bytes.as_chunks::<2>().0.iter().map(|&bytes| u16::from_le_bytes(bytes)).collect()
    }

    #[test]
    fn ties_go_to_even() {
        // Halfway between two numbers, where the lower is even and where the upper is; and just beyond halfway.
        let f32s = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0xbf80_8000].map(f32::from_bits);
        assert_eq!(halves(ExportDtype::Bf16, &f32s), [0x3f80, 0x3f82, 0x3f81, 0xbf80]);
        let f32s = [0x3f80_1000, 0x3f80_3000, 0x3f80_1001, 0x3300_0000, 0x3300_0001].map(f32::from_bits);
        assert_eq!(halves(ExportDtype::Fp16, &f32s), [0x3c00, 0x3c02, 0x3c01, 0, 1]);
    }

    #[test]
    fn what_overflows_is_told_and_what_was_infinite_stays() {
        assert_eq!(ExportDtype::Fp16.encode(&[1.0, 65519.9, -65520.0, 1e9]), Err(-65520.0));
        assert_eq!(ExportDtype::Bf16.encode(&[f32::MAX]), Err(f32::MAX));
        ExportDtype::Bf16.encode(&[3.38e38]).unwrap();
        ExportDtype::Fp32.encode(&[f32::MAX]).unwrap();
        let infinite = [f32::INFINITY, f32::NEG_INFINITY];
        assert_eq!(halves(ExportDtype::Fp16, &infinite), [0x7c00, 0xfc00]);
        assert_eq!(halves(ExportDtype::Bf16, &infinite), [0x7f80, 0xff80]);
        assert!(halves(ExportDtype::Bf16, &[f32::NAN])[0] & 0x7fff > 0x7f80);
    }

    #[test]
    fn names_are_read() {
        for dtype in ExportDtype::ALL {
            assert_eq!(dtype.to_string().parse::<ExportDtype>().unwrap(), dtype);
        }
        let error = "float8".parse::<ExportDtype>().unwrap_err().to_string();
        assert_eq!(error, "invalid element type \"float8\"; expected bf16, fp16 or fp32");
    }
}
