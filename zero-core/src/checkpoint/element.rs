//! The element types that a file can hold, under their safetensors names.

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::error::brief;
use crate::collective::DType;

macro_rules! element_types {
    ($($name:ident = $dtype:ident, $doc:literal;)*) => {
        /// Element type of a saved tensor. Its bytes are little-endian.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(try_from = "Dtype", into = "Dtype")]
        pub enum ElementType {
            $(#[doc = $doc] $name,)*
        }

        impl ElementType {
            /// Every type, for tables and tests.
            pub const ALL: [ElementType; [$(stringify!($name)),*].len()] = [$(ElementType::$name),*];
        }

        impl TryFrom<Dtype> for ElementType {
            type Error = String;

            /// Refuses types of less than a byte, and pairs.
            fn try_from(dtype: Dtype) -> Result<Self, String> {
                match dtype {
                    $(Dtype::$dtype => Ok(ElementType::$name),)*
                    other => Err(format!("elements of type {other} are not supported")),
                }
            }
        }

        impl From<ElementType> for Dtype {
            fn from(element: ElementType) -> Self {
                match element {
                    $(ElementType::$name => Dtype::$dtype,)*
                }
            }
        }
    };
}

element_types! {
    Bool = BOOL, "A byte that is 0 or 1.";
    U8 = U8, "Unsigned, 8 bits.";
    I8 = I8, "Signed, 8 bits.";
    F8E5M2 = F8_E5M2, "8-bit float with 5 bits of exponent.";
    F8E4M3 = F8_E4M3, "8-bit float with 4 bits of exponent.";
    I16 = I16, "Signed, 16 bits.";
    U16 = U16, "Unsigned, 16 bits.";
    F16 = F16, "IEEE half precision.";
    Bf16 = BF16, "bfloat16.";
    I32 = I32, "Signed, 32 bits.";
    U32 = U32, "Unsigned, 32 bits.";
    F32 = F32, "32-bit float.";
    I64 = I64, "Signed, 64 bits.";
    U64 = U64, "Unsigned, 64 bits.";
    F64 = F64, "64-bit float.";
}

/// Maximum number of dimensions of a tensor that can be read; files from other programs have fewer.
const MAX_DIMENSIONS: usize = 64;

impl ElementType {
    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        Dtype::from(self).bitsize() / 8
    }

    /// Returns the bytes of a tensor of `shape`, or `None` if no file could hold it.
    pub(super) fn bytes_of(self, shape: &[usize]) -> Option<u64> {
        bytes_of(self.into(), shape)
    }
}

/// Checks that a file can hold a tensor of this type and shape.
pub(super) fn check(dtype: Dtype, shape: &[usize]) -> Result<(), String> {
    if shape.len() > MAX_DIMENSIONS {
        return Err(format!("it has more than {MAX_DIMENSIONS} dimensions, the supported maximum"));
    }
    let too_large = || format!("{dtype} {} is larger than any file", brief(format_args!("{shape:?}")));
    bytes_of(dtype, shape).map(drop).ok_or_else(too_large)
}

/// Returns the bytes of a tensor of `shape`, or `None` if no file could hold it.
fn bytes_of(dtype: Dtype, shape: &[usize]) -> Option<u64> {
    // Zero dimensions last, so that a shape such as [2^63, 4, 0] is refused whatever the order of its dimensions.
    let numel = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)))?;
    // Elements may have 4 or 6 bits, and the bits of the largest file do not fit 64 bits.
    let bytes = (numel as u128 * dtype.bitsize() as u128).div_ceil(8);
    let bytes = i64::try_from(bytes).ok()? as u64;
    Some(if shape.contains(&0) { 0 } else { bytes })
}

impl core::fmt::Display for ElementType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        Dtype::from(*self).fmt(f)
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => ElementType::F32,
            DType::F64 => ElementType::F64,
            DType::F16 => ElementType::F16,
            DType::Bf16 => ElementType::Bf16,
            DType::U8 => ElementType::U8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shown_name_is_the_one_in_the_file() {
        for element in ElementType::ALL {
            assert_eq!(serde_json::to_value(element).unwrap(), element.to_string());
            assert_eq!(serde_json::from_str::<ElementType>(&format!("\"{element}\"")).unwrap(), element);
            assert_eq!(element.size() * 8, Dtype::from(element).bitsize());
        }
        assert!(serde_json::from_str::<ElementType>("\"F31\"").unwrap_err().to_string().contains("F32"));
        assert!(serde_json::from_str::<ElementType>("\"F4\"").unwrap_err().to_string().contains("not supported"));
    }

    #[test]
    fn sizes_that_no_file_could_have_are_refused() {
        assert_eq!(ElementType::F32.bytes_of(&[]), Some(4));
        assert_eq!(ElementType::F32.bytes_of(&[3, 0, 5]), Some(0));
        assert_eq!(ElementType::F64.bytes_of(&[1 << 60]), None);
        assert_eq!(ElementType::U8.bytes_of(&[1 << 40, 1 << 40]), None);
        assert_eq!(ElementType::U8.bytes_of(&[1 << 40, 0, 1 << 40]), None);
    }
}
