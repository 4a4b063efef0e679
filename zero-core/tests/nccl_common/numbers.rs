//! Numbers of each type as bytes, the values of each rank, and the expected results of collectives.
#![allow(dead_code)] // each takes what it needs

use half::{bf16, f16};
use zero_core::ReduceOp;
use zero_core::collective::DType;

/// Returns the bytes of small whole numbers, which every type can hold.
pub fn bytes_of(values: &[f64], dtype: DType) -> Vec<u8> {
    let bytes = |&value: &f64| match dtype {
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(value).to_ne_bytes().to_vec(),
        DType::Bf16 => bf16::from_f64(value).to_ne_bytes().to_vec(),
        DType::U8 => vec![value as u8],
    };
    values.iter().flat_map(bytes).collect()
}

/// Returns the numbers that these bytes hold.
pub fn numbers_of(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let value = |at: &[u8]| match dtype {
        DType::F32 => f32::from_ne_bytes(at.try_into().unwrap()).into(),
        DType::F64 => f64::from_ne_bytes(at.try_into().unwrap()),
        DType::F16 => f16::from_ne_bytes(at.try_into().unwrap()).into(),
        DType::Bf16 => bf16::from_ne_bytes(at.try_into().unwrap()).into(),
        DType::U8 => at[0].into(),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

/// Returns the values of a rank.
pub fn values(rank: usize, len: usize) -> Vec<f64> {
    (0..len).map(|i| ((i * 7 + rank * 5) % 13) as f64).collect()
}

/// Returns all ranks' `values` reduced. Every type holds these whole numbers, and their means over 2, 4 or 8 ranks, exactly.
pub fn reduced(world: usize, len: usize, op: ReduceOp) -> Vec<f64> {
    let all: Vec<Vec<f64>> = (0..world).map(|rank| values(rank, len)).collect();
    let at = |i: usize| all.iter().map(move |values| values[i]);
    let one = |i: usize| match op {
        ReduceOp::Sum => at(i).sum(),
        ReduceOp::Mean => at(i).sum::<f64>() / world as f64,
        ReduceOp::Max => at(i).fold(0.0, f64::max),
    };
    (0..len).map(one).collect()
}
