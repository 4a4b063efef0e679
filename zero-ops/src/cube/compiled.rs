//! Helpers of the tests `compiled`. They launch every kernel of their file with all types, widths and variants on CUDA.
//! `bench/gpu/dry.sh kernels` provides CUDA's compiler and a driver that executes nothing, so they need no GPU.

use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::Runtime;
use cubecl::cuda::CudaRuntime;

pub(super) const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Widths of rows that are read by vectors of 4 elements, of 2, and of 1.
pub(super) const WIDTHS: [usize; 3] = [1600, 1602, 1601];

/// Returns all types with all widths.
pub(super) fn cases() -> impl Iterator<Item = (DType, usize)> {
    TYPES.into_iter().flat_map(|dtype| WIDTHS.map(|width| (dtype, width)))
}

/// Returns a tensor without memory, from a driver that executes nothing.
pub(super) fn tensor<const D: usize>(shape: [usize; D], dtype: DType) -> CubeTensor<CudaRuntime> {
    let client = CudaRuntime::client(&Default::default());
    empty_device_contiguous_dtype(client, Default::default(), Shape::from(shape), dtype)
}

/// Panics if a kernel that this thread has launched could not be compiled or launched.
pub(super) fn check() {
    let client = CudaRuntime::client(&Default::default());
    cubecl::future::block_on(client.sync()).unwrap_or_else(|error| panic!("{error}"));
}
