//! The typed, owned memory that collectives move.

use super::ReduceOp;

/// Element type of a [`Buffer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// Bytes: flags, or anything that is moved but not added.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 => 8,
            DType::U8 => 1,
        }
    }

    /// Lower-case name, as in Rust.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::U8 => "u8",
        }
    }
}

/// Owned elements of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// Bytes.
    U8(Vec<u8>),
}

/// Runs the same expression on the vector inside one or two buffers of one type.
macro_rules! each {
    ($buffer:expr, $v:ident => $body:expr) => {
        match $buffer {
            Buffer::F32($v) => $body,
            Buffer::F64($v) => $body,
            Buffer::U8($v) => $body,
        }
    };
}

impl Buffer {
    /// Number of elements.
    pub fn len(&self) -> usize {
        each!(self, v => v.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Buffer::F32(_) => DType::F32,
            Buffer::F64(_) => DType::F64,
            Buffer::U8(_) => DType::U8,
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }

    /// The floats of an f32 buffer.
    ///
    /// # Panics
    ///
    /// When the buffer holds another type: a collective returns the type it was given.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Buffer::F32(v) => v,
            other => panic!("expected an f32 buffer, got {}", other.dtype().name()),
        }
    }

    /// The floats of an f64 buffer.
    ///
    /// # Panics
    ///
    /// When the buffer holds another type.
    pub fn into_f64(self) -> Vec<f64> {
        match self {
            Buffer::F64(v) => v,
            other => panic!("expected an f64 buffer, got {}", other.dtype().name()),
        }
    }

    /// The bytes of a u8 buffer.
    ///
    /// # Panics
    ///
    /// When the buffer holds another type.
    pub fn into_u8(self) -> Vec<u8> {
        match self {
            Buffer::U8(v) => v,
            other => panic!("expected a u8 buffer, got {}", other.dtype().name()),
        }
    }

    /// Elements `range` of the inputs, reduced in the order of the inputs.
    pub(super) fn reduce_range(
        inputs: &[std::sync::Arc<Buffer>],
        range: std::ops::Range<usize>,
        op: ReduceOp,
    ) -> Buffer {
        macro_rules! reduce {
            ($variant:ident, $max:expr) => {{
                let of = |i: usize| match &*inputs[i] {
                    Buffer::$variant(v) => &v[range.clone()],
                    _ => unreachable!("the rendezvous has checked that all ranks sent one type"),
                };
                let mut out = of(0).to_vec();
                for i in 1..inputs.len() {
                    match op {
                        ReduceOp::Sum => out.iter_mut().zip(of(i)).for_each(|(a, b)| *a += *b),
                        ReduceOp::Max => out.iter_mut().zip(of(i)).for_each(|(a, b)| *a = $max(*a, *b)),
                    }
                }
                Buffer::$variant(out)
            }};
        }
        match &*inputs[0] {
            Buffer::F32(_) => reduce!(F32, f32::max),
            Buffer::F64(_) => reduce!(F64, f64::max),
            Buffer::U8(_) => reduce!(U8, u8::max),
        }
    }

    /// The concatenation of elements `range` of every input.
    pub(super) fn concat(inputs: &[std::sync::Arc<Buffer>], range: std::ops::Range<usize>) -> Buffer {
        macro_rules! concat {
            ($variant:ident) => {{
                let mut out = Vec::with_capacity(range.len() * inputs.len());
                for input in inputs {
                    match &**input {
                        Buffer::$variant(v) => out.extend_from_slice(&v[range.clone()]),
                        _ => {
                            unreachable!("the rendezvous has checked that all ranks sent one type")
                        }
                    }
                }
                Buffer::$variant(out)
            }};
        }
        match &*inputs[0] {
            Buffer::F32(_) => concat!(F32),
            Buffer::F64(_) => concat!(F64),
            Buffer::U8(_) => concat!(U8),
        }
    }
}
