//! Matrix products in the precision that their operands have, with what linear layers add to them.

#[cfg(feature = "cuda")]
mod hopper;

use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_std::DType;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::std::InputBinding;

/// Depths of which the tuner's kernels divide every multiple into an even number of steps. Those with two buffers assume one (cubek 0.2):
/// where theirs is odd and divides the depth they read beyond the operands (`[300, 200]` by `[200, 136]` in fp32, seen on an H200).
const TUNED_DEPTHS: usize = 128;

/// What is added to a product `[n, m]`.
pub(crate) struct Added<R: CubeRuntime> {
    /// `[m]`, to each row.
    pub bias: Option<CubeTensor<R>>,
    /// `[n, m]`.
    pub residual: Option<CubeTensor<R>>,
}

/// Of matrices `[n, k]` and `[k, m]` of one type, or of some pairs of such, into `out`: in 16 bit on a Hopper GPU the one of
/// [`hopper`]; in fp32 a product in fp32, as PyTorch has it by default, where Burn's tuner takes matrix units that round to tf32's 11
/// bits; elsewhere Burn's, of a tuner's choice (which takes minutes the first time) for one pair.
pub(crate) fn product<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>, out: CubeTensor<R>) -> CubeTensor<R> {
    let nothing = Added { bias: None, residual: None };
    if on_matrix_units(&lhs, &rhs, &out, &nothing) { out } else { elsewhere(lhs, rhs, out) }
}

/// What [`product`] is where [`on_matrix_units`] says no.
pub(crate) fn elsewhere<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>, out: CubeTensor<R>) -> CubeTensor<R> {
    let shape = lhs.meta.shape();
    let (is_one, depth, dtype) = (shape.num_dims() == 2, shape[shape.num_dims() - 1], out.dtype);
    if lhs.dtype != DType::F32 && is_one && depth.is_multiple_of(TUNED_DEPTHS) {
        let made = matmul(lhs, rhs, Some(out), MatmulStrategy::default(), dtype);
        return made.expect("a product of matrices of one type is set up");
    }
    plain(lhs, rhs, out)
}

/// Makes `out` with what is added, in one kernel, where there is one.
pub(crate) fn on_matrix_units<R: CubeRuntime>(
    lhs: &CubeTensor<R>,
    rhs: &CubeTensor<R>,
    out: &CubeTensor<R>,
    added: &Added<R>,
) -> bool {
    #[cfg(feature = "cuda")]
    return hopper::product(lhs, rhs, out, added);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (lhs, rhs, out, added);
        false
    }
}

/// By kernels with one buffer: on matrix units those in 16 bit, and in fp32 by units that multiply and add in fp32.
fn plain<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>, out: CubeTensor<R>) -> CubeTensor<R> {
    let [of_lhs, of_rhs, of_out] = [&lhs, &rhs, &out].map(|x| x.dtype.into());
    let on_units = (lhs.dtype != DType::F32).then(|| Strategy::SimpleCyclicCmma(Default::default()));
    let mut strategies = on_units.into_iter().chain([Strategy::SimpleUnit(Default::default()), Strategy::Naive]);
    let launched = strategies.any(|strategy| {
        let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems { lhs: of_lhs, rhs: of_rhs, out: of_out });
        let [lhs, rhs] =
            [(&lhs, of_lhs), (&rhs, of_rhs)].map(|(x, dtype)| InputBinding::new(x.clone().binding(), dtype));
        launch_ref(&strategy, &out.client, lhs, rhs, out.clone().binding(), &mut dtypes).is_ok()
    });
    assert!(launched, "the plain product takes all shapes");
    out
}

compiled! {
    for (dtype, out) in [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::BF16, DType::F32), (DType::F16, DType::F32)] {
        // By tiles of 256, 192 and 128 columns.
        for (rows, columns) in [(8192, 6400), (8192, 768), (1024, 1600)] {
            for (is_left, is_right) in [(false, false), (false, true), (true, false)] {
                for (has_bias, has_residual) in [(false, false), (true, false), (true, true), (false, true)] {
                    if (has_bias || has_residual) && (is_left || is_right || out == DType::F32) {
                        continue;
                    }
                    let matrix = |is_transposed, [n, m]: [usize; 2]| match is_transposed {
                        true => burn_cubecl::ops::permute(tensor([m, n], dtype), &[1, 0]),
                        false => tensor([n, m], dtype),
                    };
                    let (lhs, rhs) = (matrix(is_left, [rows, 512]), matrix(is_right, [512, columns]));
                    let bias = has_bias.then(|| tensor([columns], dtype));
                    let residual = has_residual.then(|| tensor([rows, columns], dtype));
                    let out = tensor([rows, columns], out);
                    assert!(on_matrix_units(&lhs, &rhs, &out, &Added { bias, residual }));
                }
            }
        }
    }
}

#[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
mod tests {
    use burn::tensor::{Tensor, TensorData, TensorPrimitive};
    use burn_backend::{Backend, TensorMetadata};
    use burn_cubecl::ops::permute;

    use super::*;
    use crate::cube::tensor::empty;
    use crate::cube::tested::{Plain, TestRuntime};

    type Cube = CubeTensor<TestRuntime>;

    fn on(values: &[f32], shape: [usize; 2], dtype: DType) -> Cube {
        let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
        Tensor::<Plain, 2>::from_data(data, (&Default::default(), dtype)).into_primitive().tensor()
    }

    fn numbers(len: usize, seed: usize) -> Vec<f32> {
        // Eighths, which 16 bit have exactly.
        (0..len).map(|i| (((i + seed) * 7919 % 97) as f32 - 48.0) / 8.0).collect()
    }

    fn transposed(values: &[f32], [n, m]: [usize; 2]) -> Vec<f32> {
        (0..m * n).map(|i| values[i % n * m + i / n]).collect()
    }

    /// Sizes below, at and above those of tiles; both matrices as they are and as transposes; stored as they are and in fp32.
    #[test]
    fn products_agree_with_loops() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            if !Plain::supports_dtype(&Default::default(), dtype) {
                println!("skipped: the device has no {dtype:?}");
                continue;
            }
            for [n, k, m] in [[8, 16, 8], [130, 72, 264], [300, 200, 136]] {
                let (a, b, more) = (numbers(n * k, 1), numbers(k * m, 2), numbers(n * m, 3));
                let (lhs, rhs) = (on(&a, [n, k], dtype), on(&b, [k, m], dtype));
                let across =
                    |x: &[f32], [n, m]: [usize; 2]| permute(on(&transposed(x, [n, m]), [m, n], dtype), &[1, 0]);
                let expected: Vec<f64> = (0..n * m)
                    .map(|i| (0..k).map(|j| f64::from(a[i / m * k + j]) * f64::from(b[j * m + i % m])).sum())
                    .collect();
                for (lhs, rhs) in [
                    (lhs.clone(), rhs.clone()),
                    (lhs, across(&b, [k, m])),
                    (across(&a, [n, k]), rhs),
                    (across(&a, [n, k]), across(&b, [k, m])),
                ] {
                    for stored in [dtype, DType::F32] {
                        let out = on(&vec![f32::NAN; n * m], [n, m], stored);
                        let made = product(lhs.clone(), rhs.clone(), out);
                        agree(made, &expected, format!("[{n}, {k}, {m}] of {dtype:?} in {stored:?}"));
                    }
                    let [bias, residual] = [on(&more[..m], [1, m], dtype), on(&more, [n, m], dtype)];
                    let bias = Some(crate::cube::many::shaped(bias, [m].into()));
                    let (out, added) = (empty(&lhs, [n, m], dtype), Added { bias, residual: Some(residual) });
                    if on_matrix_units(&lhs, &rhs, &out, &added) {
                        let plus = |(i, x): (usize, &f64)| x + f64::from(more[i % m]) + f64::from(more[i]);
                        let expected: Vec<f64> = expected.iter().enumerate().map(plus).collect();
                        agree(out, &expected, format!("[{n}, {k}, {m}] of {dtype:?}, added to"));
                    } else {
                        println!("nothing is added in a product of {dtype:?}");
                    }
                }
            }
        }
    }

    /// To one rounding of what is stored; sums of eighths are exact in fp32.
    fn agree(made: Cube, expected: &[f64], what: String) {
        let epsilon = match made.dtype() {
            DType::F32 => 0.0,
            DType::BF16 => 2f64.powi(-8),
            _ => 2f64.powi(-11),
        };
        let made = Tensor::<Plain, 2>::from_primitive(TensorPrimitive::Float(made)).into_data().convert::<f32>();
        for (i, (made, expected)) in made.to_vec::<f32>().unwrap().iter().zip(expected).enumerate() {
            let apart = (f64::from(*made) - expected).abs();
            assert!(apart <= epsilon * expected.abs(), "{what}: element {i} is {made}, not {expected}");
        }
    }
}
