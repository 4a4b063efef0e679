//! The factor by which gradients are clipped, computed on the device from their sums of squares, so the host does not wait.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::any::{self, Body};
use super::many::UNITS;
use super::norm::cube_sum;
use super::tensor::{empty, launch, packed};
use crate::options::Clip;

/// Returns the factor of gradients as one fp32 number, by the formula of PyTorch's `clip_grad_norm_`, from `sums` of
/// [`sums_of_squares`](super::norm::sums_of_squares). It is NaN if and only if nothing is to be updated.
///
/// # Panics
///
/// If the backend's tensors are not CubeCL's.
pub fn clip_factor<B: Backend>(sums: FloatTensor<B>, clip: Clip) -> FloatTensor<B> {
    assert_eq!(sums.dtype(), DType::F32, "sums of squares are in fp32");
    let output = (Shape::from([1]), DType::F32);
    any::run::<B>("clip factor", vec![sums], vec![output], clip).swap_remove(0)
}

impl Body for Clip {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        let sums = packed(inputs.into_iter().next().expect("there is one"));
        let factor = empty(&sums, [1], DType::F32);
        let Self { most, loss_scale, skips } = *self;
        // SAFETY: units read sums below the length; one writes the only element.
        unsafe {
            launch! {
                factor_kernel on sums.client, (CubeCount::new_single(), CubeDim::new_1d(UNITS)),
                [sums, factor.clone()],
                most.unwrap_or(0.0) as f32, loss_scale as f32, most.is_some(), skips
            }
        }
        vec![factor]
    }
}

/// Computes the factor. `sums`: one per tensor, then the number of elements that are not finite.
#[cube(launch_unchecked)]
fn factor_kernel(
    sums: &Array<f32>,
    factor: &mut Array<f32>,
    most: f32,
    loss_scale: f32,
    #[comptime] clips: bool,
    #[comptime] skips: bool,
) {
    let tensors = sums.len() - 1;
    let mut sum = 0.0f32;
    let mut at = UNIT_POS as usize;
    while at < tensors {
        sum += sums[at];
        at += UNITS as usize;
    }
    let sum = cube_sum(sum);
    if UNIT_POS == 0 {
        let odd = sums[tensors];
        let mut share = 1.0f32;
        if comptime!(clips) {
            // A NaN norm clips nothing.
            if odd == 0.0f32 {
                share = min(most / (sum.sqrt() / loss_scale + 1e-6f32), 1.0f32);
            }
        }
        let mut made = share / loss_scale;
        if comptime!(skips) {
            // Compares bits: a compiler's fast math may change a comparison with infinity.
            let exponent = u32::reinterpret(sum) & 0x7f80_0000u32;
            // Then the factor is NaN. (CUDA's compiler does not reinterpret constants.)
            let is_odd = odd > 0.0f32 || exponent == 0x7f80_0000u32;
            made = f32::reinterpret(select(is_odd, 0x7fc0_0000u32, u32::reinterpret(made)));
        }
        factor[0] = made;
    }
}

compiled! {
    for (most, skips) in [(None, true), (Some(1.0), false), (Some(1.0), true)] {
        Clip { most, loss_scale: 1.0, skips }.run(vec![tensor([600], DType::F32)]);
    }
}
