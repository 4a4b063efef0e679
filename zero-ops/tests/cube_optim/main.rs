//! The optimizer's kernels on a Vulkan device, with Burn's fusion and without, against plain Rust.
//!
//! Without a GPU: `VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json cargo test -p zero-ops --features vulkan,cuda
//! --test cube_optim`
#![cfg(feature = "vulkan")]

mod norm;
mod pack;
#[path = "../../../zero-kernels/tests/shared/mod.rs"]
mod shared;
mod update;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, TensorData};
use burn_cubecl::CubeBackend;
use burn_wgpu::WgpuRuntime;

use shared::numbers;

/// Without fusion.
type Plain = CubeBackend<WgpuRuntime, f32, i32, u8>;

fn device<B: Backend>() -> Device<B> {
    Device::<B>::default()
}

fn tensor<B: Backend>(values: Vec<f32>, dtype: DType) -> FloatTensor<B> {
    let len = values.len();
    B::float_from_data(TensorData::new(values, [len]).convert_dtype(dtype), &device::<B>())
}

fn values<B: Backend>(x: FloatTensor<B>) -> Vec<f32> {
    let data = burn::tensor::try_read_sync(B::float_into_data(x)).unwrap().unwrap();
    data.convert_dtype(DType::F32).into_vec().unwrap()
}

/// `values` as they are after a conversion to `dtype`.
fn rounded(values: &[f32], dtype: DType) -> Vec<f32> {
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    data.convert_dtype(DType::F32).into_vec().unwrap()
}

/// Whether the device computes with `dtype`; says so if not.
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
