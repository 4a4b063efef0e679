//! The optimizer's kernels on a device (`../../src/cube/tested.rs`), with Burn's fusion and without, against plain Rust.
//!
//! Without a GPU:
//! `VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json cargo test -p zero-ops --features vulkan,cuda --test cube_optim`
#![cfg(any(feature = "vulkan", feature = "cuda"))]

mod norm;
mod pack;
#[path = "../../../zero-kernels/tests/shared/mod.rs"]
mod shared;
#[path = "../../src/cube/tested.rs"]
mod tested;
mod update;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, TensorData};

use shared::numbers;
use tested::{Fused, Plain, TestRuntime};

fn device<B: Backend>() -> Device<B> {
    Device::<B>::default()
}

fn tensor<B: Backend>(values: Vec<f32>, dtype: DType) -> FloatTensor<B> {
    let len = values.len();
    B::float_from_data(TensorData::new(values, [len]).convert_dtype(dtype), &device::<B>())
}

fn values<B: Backend>(x: FloatTensor<B>) -> Vec<f32> {
    let data = burn::tensor::try_read_sync(B::float_into_data(x)).unwrap().unwrap();
    let data = data.convert_dtype(DType::F32);
    // An empty buffer has no alignment.
    if data.num_elements() == 0 { Vec::new() } else { data.into_vec().unwrap() }
}

/// Returns `values` after a conversion to `dtype`.
fn rounded(values: &[f32], dtype: DType) -> Vec<f32> {
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    data.convert_dtype(DType::F32).into_vec().unwrap()
}

/// Returns whether the device computes with `dtype`, and prints a line if not.
fn supports<B: Backend>(dtype: DType) -> bool {
    let usage = B::dtype_usage(&device::<B>(), dtype);
    let supported = !usage.is_empty();
    if !supported {
        println!("skipped: this device has no {dtype:?}");
    }
    supported
}

fn assert_panics(part: &str, work: impl FnOnce()) {
    shared::assert_panics(&[part], work);
}
