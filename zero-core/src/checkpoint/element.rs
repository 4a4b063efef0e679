//! The element types that a file can hold, under the names that safetensors gives them.

use serde::{Deserialize, Serialize};

use super::json;
use super::table::{put_number, take_number};
use crate::collective::DType;

/// The most dimensions of a tensor that are read; what others write has fewer.
const MAX_DIMENSIONS: usize = 64;

/// Element type of a saved tensor. Its bytes are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ElementType {
    /// A byte that is 0 or 1.
    Bool,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// 8-bit float with 5 bits of exponent.
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    /// 8-bit float with 4 bits of exponent.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 16 bits.
    U16,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 32 bits.
    U32,
    /// 32-bit float.
    F32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
    /// 64-bit float.
    F64,
}

impl ElementType {
    /// Every type, for tables and tests.
    pub const ALL: [ElementType; 15] = [
        ElementType::Bool,
        ElementType::U8,
        ElementType::I8,
        ElementType::F8E5M2,
        ElementType::F8E4M3,
        ElementType::I16,
        ElementType::U16,
        ElementType::F16,
        ElementType::Bf16,
        ElementType::I32,
        ElementType::U32,
        ElementType::F32,
        ElementType::I64,
        ElementType::U64,
        ElementType::F64,
    ];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            ElementType::Bool | ElementType::U8 | ElementType::I8 | ElementType::F8E5M2 | ElementType::F8E4M3 => 1,
            ElementType::I16 | ElementType::U16 | ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::I32 | ElementType::U32 | ElementType::F32 => 4,
            ElementType::I64 | ElementType::U64 | ElementType::F64 => 8,
        }
    }

    /// Its name in a file.
    fn name(self) -> &'static str {
        match self {
            ElementType::Bool => "BOOL",
            ElementType::U8 => "U8",
            ElementType::I8 => "I8",
            ElementType::F8E5M2 => "F8_E5M2",
            ElementType::F8E4M3 => "F8_E4M3",
            ElementType::I16 => "I16",
            ElementType::U16 => "U16",
            ElementType::F16 => "F16",
            ElementType::Bf16 => "BF16",
            ElementType::I32 => "I32",
            ElementType::U32 => "U32",
            ElementType::F32 => "F32",
            ElementType::I64 => "I64",
            ElementType::U64 => "U64",
            ElementType::F64 => "F64",
        }
    }

    /// The type whose name is written as `json`.
    pub(super) fn parse(json: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|dtype| json::is(json, dtype.name()));
        found.ok_or_else(|| json::unexpected(json, "an element type, such as \"F32\""))
    }

    /// Bytes of a tensor of `shape`, or `None` when no file could hold it.
    pub(super) fn bytes_of(self, shape: &[usize]) -> Option<u64> {
        // Zero dimensions last, so that a shape such as [2^63, 4, 0] is refused whatever the order of its dimensions.
        let numel = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)))?;
        let bytes = u64::try_from(numel.checked_mul(self.size())?).ok().filter(|&bytes| bytes <= i64::MAX as u64)?;
        Some(if shape.contains(&0) { 0 } else { bytes })
    }
}

/// The dimensions that are written as `json`.
pub(super) fn parse_shape(json: &str) -> Result<Vec<usize>, String> {
    let mut shape = Vec::new();
    json::elements(json, "a list of dimensions", |dimension| {
        if shape.len() == MAX_DIMENSIONS {
            return Err(format!("it has more than {MAX_DIMENSIONS} dimensions, which is the most that is read"));
        }
        shape.push(json::number(dimension, "shape")?);
        Ok(())
    })?;
    Ok(shape)
}

/// Writes type and dimensions into a record of a [`Table`](super::Table).
pub(super) fn put_kind(record: &mut Vec<u8>, dtype: ElementType, shape: &[usize]) {
    put_number(record, dtype as u64);
    put_number(record, shape.len() as u64);
    shape.iter().for_each(|&dimension| put_number(record, dimension as u64));
}

/// Reads what [`put_kind`] wrote.
pub(super) fn take_kind(record: &mut &[u8]) -> (ElementType, Vec<usize>) {
    let dtype = ElementType::ALL[take_number(record) as usize];
    let rank = take_number(record);
    (dtype, (0..rank).map(|_| take_number(record) as usize).collect())
}

impl core::fmt::Display for ElementType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
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
            assert_eq!(ElementType::parse(&format!("\"{element}\"")), Ok(element));
        }
        assert!(ElementType::parse("\"F31\"").unwrap_err().contains("such as \"F32\""));
    }

    #[test]
    fn type_and_dimensions_are_read_as_they_were_written() {
        for element in ElementType::ALL {
            for shape in [vec![], vec![0, 127, 128], vec![usize::MAX; MAX_DIMENSIONS]] {
                let mut record = Vec::new();
                put_kind(&mut record, element, &shape);
                assert_eq!(take_kind(&mut &record[..]), (element, shape.clone()));
                assert_eq!(parse_shape(&format!("{shape:?}")), Ok(shape));
            }
        }
        assert!(parse_shape(&format!("{:?}", [1; MAX_DIMENSIONS + 1])).unwrap_err().contains("more than 64"));
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
