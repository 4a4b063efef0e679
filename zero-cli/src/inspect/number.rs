//! An element's bytes as a number, whatever its type.

use half::{bf16, f16};
use zero_core::checkpoint::ElementType;

/// A number with all its digits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    /// Of an integer type, or a truth value.
    Integer(i128),
    /// Of a float type, which may be NaN or infinite.
    Float(f64),
}

/// The distance of two finite numbers, and the magnitude of the larger.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Distance {
    pub(super) absolute: f64,
    pub(super) larger: f64,
}

impl Number {
    /// Reads the little-endian bytes of one element.
    ///
    /// # Panics
    ///
    /// When `bytes` are not as many as the type has.
    pub(super) fn read(dtype: ElementType, bytes: &[u8]) -> Self {
        macro_rules! number {
            ($type:ty) => {
                <$type>::from_le_bytes(bytes.try_into().expect("an element has the bytes of its type"))
            };
        }
        match dtype {
            ElementType::Bool | ElementType::U8 => Number::Integer(number!(u8).into()),
            ElementType::I8 => Number::Integer(number!(i8).into()),
            ElementType::I16 => Number::Integer(number!(i16).into()),
            ElementType::U16 => Number::Integer(number!(u16).into()),
            ElementType::I32 => Number::Integer(number!(i32).into()),
            ElementType::U32 => Number::Integer(number!(u32).into()),
            ElementType::I64 => Number::Integer(number!(i64).into()),
            ElementType::U64 => Number::Integer(number!(u64).into()),
            // The upper half of an f16.
            ElementType::F8E5M2 => Number::Float(f16::from_bits(u16::from(number!(u8)) << 8).into()),
            ElementType::F8E4M3 => Number::Float(from_e4m3(number!(u8))),
            ElementType::F16 => Number::Float(number!(f16).into()),
            ElementType::Bf16 => Number::Float(number!(bf16).into()),
            ElementType::F32 => Number::Float(number!(f32).into()),
            ElementType::F64 => Number::Float(number!(f64)),
        }
    }

    /// As the nearest 64-bit float.
    pub(super) fn to_f64(self) -> f64 {
        match self {
            Number::Integer(integer) => integer as f64,
            Number::Float(float) => float,
        }
    }

    pub(super) fn is_nan(self) -> bool {
        matches!(self, Number::Float(float) if float.is_nan())
    }

    /// How far `self` is from `other`; `None` when one of them is not finite.
    pub(super) fn distance(self, other: Self) -> Option<Distance> {
        let (a, b) = (self.to_f64(), other.to_f64());
        if !(a.is_finite() && b.is_finite()) {
            return None;
        }
        let absolute = match (self, other) {
            // Of large integers the floats may be the same.
            (Number::Integer(a), Number::Integer(b)) => (a - b).unsigned_abs() as f64,
            // Two numbers of 64 bits may be farther apart than such a float can say.
            _ => (a - b).abs().min(f64::MAX),
        };
        Some(Distance { absolute, larger: a.abs().max(b.abs()) })
    }
}

impl Distance {
    /// The distance as a part of the larger magnitude: 0 to 2.
    pub(super) fn relative(self) -> f64 {
        // Of 0 and -0 too.
        if self.absolute == 0.0 { 0.0 } else { (self.absolute / self.larger).min(2.0) }
    }
}

/// 8-bit float with 4 bits of exponent and no infinities: NaN is the largest pattern.
fn from_e4m3(byte: u8) -> f64 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => fraction * 2f64.powi(-6),
        _ => (1.0 + fraction) * 2f64.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dtype: ElementType, bytes: &[u8]) -> f64 {
        Number::read(dtype, bytes).to_f64()
    }

    #[test]
    fn every_type_is_read() {
        for dtype in ElementType::ALL {
            assert_eq!(read(dtype, &vec![0; dtype.size()]), 0.0);
        }
        assert_eq!(read(ElementType::Bool, &[1]), 1.0);
        assert_eq!(read(ElementType::I8, &[0xff]), -1.0);
        assert_eq!(read(ElementType::I64, &i64::MIN.to_le_bytes()), -(2f64.powi(63)));
        assert_eq!(Number::read(ElementType::U64, &[0xff; 8]), Number::Integer(i128::from(u64::MAX)));
        assert_eq!(read(ElementType::F16, &0x3c00u16.to_le_bytes()), 1.0);
        assert_eq!(read(ElementType::Bf16, &0xbf80u16.to_le_bytes()), -1.0);
        assert_eq!(read(ElementType::F64, &0.1f64.to_le_bytes()), 0.1);
        assert_eq!(read(ElementType::F8E5M2, &[0x3c]), 1.0);
        assert_eq!(read(ElementType::F8E5M2, &[0xfc]), f64::NEG_INFINITY);
        assert_eq!(read(ElementType::F8E4M3, &[0x38]), 1.0);
        assert_eq!(read(ElementType::F8E4M3, &[0xfe]), -448.0);
        assert_eq!(read(ElementType::F8E4M3, &[0x01]), 2f64.powi(-9));
        assert!(Number::read(ElementType::F8E4M3, &[0xff]).is_nan());
    }

    #[test]
    fn distances_of_what_floats_cannot_hold() {
        let integer = |value: u64| Number::read(ElementType::U64, &value.to_le_bytes());
        assert_eq!(integer(u64::MAX).distance(integer(u64::MAX - 1)).unwrap().absolute, 1.0);
        let far = Number::Float(f64::MAX).distance(Number::Float(-f64::MAX)).unwrap();
        assert_eq!((far.absolute, far.relative()), (f64::MAX, 1.0));
        assert_eq!(Number::Float(0.0).distance(Number::Float(-0.0)).unwrap().relative(), 0.0);
        assert_eq!(Number::Float(-1.0).distance(Number::Float(1.0)).unwrap().relative(), 2.0);
        assert_eq!(Number::Float(f64::NAN).distance(Number::Float(1.0)), None);
        assert_eq!(Number::Float(f64::INFINITY).distance(Number::Float(1.0)), None);
    }
}
