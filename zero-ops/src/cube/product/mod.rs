//! Matrix products in the precision of their operands, with the additions of linear layers.

#[cfg(feature = "cuda")]
mod hopper;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul as tuned_matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Metadata, Shape, Strides};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::std::InputBinding;

use super::any::{self, Body};
use super::many::shaped;
use super::rows::zeros;
use super::tensor::{empty, packed};

/// Multiples of this depth make an even number of steps in the tuner's kernels. Those with two buffers assume an even number (cubek 0.2):
/// with an odd one that divides the depth they read beyond the operands (`[300, 200]` by `[200, 136]` in fp32, seen on an H200).
const TUNED_DEPTHS: usize = 128;

/// Terms added to a product `[n, m]`.
pub(crate) struct Added<R: CubeRuntime> {
    /// `[m]`, added to each row.
    pub bias: Option<CubeTensor<R>>,
    /// `[n, m]`.
    pub residual: Option<CubeTensor<R>>,
}

/// Multiplies matrices `[n, k]` and `[k, m]` of one type, or batches of them, into `out`. In 16 bit it runs [`hopper`] on a Hopper GPU;
/// elsewhere a single product runs the kernel of Burn's that a tuner selects (minutes, the first time). In fp32 it multiplies in fp32,
/// PyTorch's default; Burn's tuner would use matrix units that round to tf32's 11 bits.
pub(crate) fn product<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>, out: CubeTensor<R>) -> CubeTensor<R> {
    let nothing = Added { bias: None, residual: None };
    if on_matrix_units(&lhs, &rhs, &out, &nothing) { out } else { elsewhere(lhs, rhs, out) }
}

/// Computes [`product`] where [`on_matrix_units`] returns false.
pub(crate) fn elsewhere<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>, out: CubeTensor<R>) -> CubeTensor<R> {
    let shape = lhs.meta.shape();
    let (is_one, depth, dtype) = (shape.num_dims() == 2, shape[shape.num_dims() - 1], out.dtype);
    if lhs.dtype != DType::F32 && is_one && depth.is_multiple_of(TUNED_DEPTHS) && !has_matrix_units(&out) {
        let made = tuned_matmul(lhs, rhs, Some(out), MatmulStrategy::default(), dtype);
        return made.expect("a product of matrices of one type can be set up");
    }
    plain(lhs, rhs, out)
}

/// Computes `out` with `added` in one kernel, if there is one. Returns false if not.
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

/// Returns true if the device has a kernel of this crate. Nothing is tuned there: products that the kernel does not support are small or
/// rare.
fn has_matrix_units<R: CubeRuntime>(out: &CubeTensor<R>) -> bool {
    #[cfg(feature = "cuda")]
    return hopper::is_here(out);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = out;
        false
    }
}

/// Multiplies by kernels with one buffer: 16 bit on matrix units, fp32 on units that multiply and add in fp32.
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

/// Multiplies matrices by the products of this crate, like Burn's `Tensor::matmul`: in fp32 without tf32, and on Hopper GPUs untuned.
///
/// # Shapes
/// - `lhs`: `[.., n, k]`, `rhs`: `[.., k, m]`; the leading dimensions are equal, or 1
/// - returns `[.., n, m]`
///
/// # Errors
/// Returns the arguments if the backend's tensors are not CubeCL's, or their types differ or have no kernels.
pub fn matmul<B: Backend>(
    lhs: FloatTensor<B>,
    rhs: FloatTensor<B>,
) -> Result<FloatTensor<B>, (FloatTensor<B>, FloatTensor<B>)> {
    if !super::computes::<B>(lhs.dtype()) || lhs.dtype() != rhs.dtype() {
        return Err((lhs, rhs));
    }
    let (of_lhs, of_rhs, dtype) = (lhs.shape(), rhs.shape(), lhs.dtype());
    let last = of_lhs.num_dims() - 1;
    // A dimension of one element is broadcast.
    let mut shape = of_lhs.clone();
    (0..last - 1).filter(|&dim| of_lhs[dim] == 1).for_each(|dim| shape[dim] = of_rhs[dim]);
    shape[last] = of_rhs[last];
    let mut made = any::run::<B>("matmul", vec![lhs, rhs], vec![(shape.clone(), dtype)], Matmul(shape));
    Ok(made.swap_remove(0))
}

/// A product, by its shape.
struct Matmul(Shape);

impl Body for Matmul {
    fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
        let [lhs, rhs] = inputs.try_into().unwrap_or_else(|_| unreachable!("two tensors were given"));
        let (shape, dtype, last) = (&self.0, lhs.dtype, self.0.num_dims() - 1);
        let [elements, depth] = [shape.num_elements(), lhs.meta.shape()[last]];
        if elements * depth == 0 {
            return vec![zeros(&lhs, shape.clone(), dtype)];
        }
        if last > 1 && (0..last - 1).all(|dim| rhs.meta.shape()[dim] == 1) {
            // One matrix on the right, as in a linear layer: all rows on the left form one matrix.
            let columns = shape[last];
            let rows = elements / columns;
            let strides = rhs.meta.strides();
            let meta = Metadata::new(Shape::from([depth, columns]), Strides::from(&strides[last - 1..]));
            let rhs = CubeTensor::new(rhs.client.clone(), rhs.handle.clone(), meta, rhs.device.clone(), dtype);
            let lhs = shaped(packed(lhs), Shape::from([rows, depth]));
            let out = empty(&lhs, [rows, columns], dtype);
            return vec![product(lhs, rhs, out)];
        }
        let out = empty(&lhs, shape.clone(), dtype);
        vec![product(lhs, rhs, out)]
    }
}

compiled! {
    // A product whose depth is divided.
    let lhs = burn_cubecl::ops::permute(tensor([8192, 768], DType::BF16), &[1, 0]);
    let out = tensor([768, 768], DType::BF16);
    assert!(on_matrix_units(&lhs, &tensor([8192, 768], DType::BF16), &out, &Added { bias: None, residual: None }));
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
        // Eighths, which 16 bit represent exactly.
        (0..len).map(|i| (((i + seed) * 7919 % 97) as f32 - 48.0) / 8.0).collect()
    }

    fn transposed(values: &[f32], [n, m]: [usize; 2]) -> Vec<f32> {
        (0..m * n).map(|i| values[i % n * m + i / n]).collect()
    }

    /// Sizes below, at and above those of tiles, and a deep product of few tiles, whose depth a Hopper GPU divides; both matrices plain and
    /// transposed; results stored in the operands' type and in fp32.
    #[test]
    fn products_agree_with_loops() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            if !Plain::supports_dtype(&Default::default(), dtype) {
                println!("skipped: the device has no {dtype:?}");
                continue;
            }
            for [n, k, m] in [[8, 16, 8], [130, 72, 264], [300, 200, 136], [136, 4104, 72]] {
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
                        let out = packed(on(&vec![f32::NAN; n * m], [n, m], stored));
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

    /// Checks the semantics of Burn's `Tensor::matmul`: batches, broadcast dimensions on either side, views, and empty tensors.
    #[test]
    fn batches_agree_with_loops() {
        let device = Default::default();
        let tensor = |shape: [usize; 4], seed: usize| {
            let values = numbers(shape.iter().product(), seed);
            Tensor::<Plain, 4>::from_data(TensorData::new(values, shape), &device)
        };
        for (lhs, rhs) in [
            ([2, 3, 5, 7], [2, 3, 7, 6]),
            ([2, 3, 5, 7], [1, 1, 7, 6]),
            ([2, 3, 5, 7], [2, 1, 7, 6]),
            ([1, 3, 5, 7], [2, 1, 7, 6]),
            ([2, 3, 1, 8], [2, 3, 8, 9]),
            ([2, 3, 0, 8], [2, 3, 8, 9]),
            ([2, 3, 4, 0], [2, 3, 0, 9]),
        ] {
            for is_turned in [false, true] {
                let turned = |x: Tensor<Plain, 4>| if is_turned { x.swap_dims(2, 3) } else { x };
                let stored = |[a, b, n, m]: [usize; 4]| if is_turned { [a, b, m, n] } else { [a, b, n, m] };
                let (a, b) = (turned(tensor(stored(lhs), 1)), turned(tensor(stored(rhs), 2)));
                let made = matmul::<Plain>(a.clone().into_primitive().tensor(), b.clone().into_primitive().tensor());
                let made = made.unwrap_or_else(|_| panic!("the tensors are CubeCL's"));
                let made = Tensor::<Plain, 4>::from_primitive(TensorPrimitive::Float(made));
                let shape = [lhs[0].max(rhs[0]), lhs[1].max(rhs[1]), lhs[2], rhs[3]];
                assert_eq!(made.dims(), shape);
                let [a, b, made] = [a, b, made].map(|x| x.into_data().to_vec::<f32>().unwrap());
                let at = |of: [usize; 4], [i, j, n, m]: [usize; 4]| {
                    ((i % of[0] * of[1] + j % of[1]) * of[2] + n) * of[3] + m
                };
                for (place, made) in made.into_iter().enumerate() {
                    let [m, n] = [place % shape[3], place / shape[3] % shape[2]];
                    let [j, i] = [place / (shape[3] * shape[2]) % shape[1], place / (shape[3] * shape[2] * shape[1])];
                    let sum: f32 = (0..lhs[3]).map(|k| a[at(lhs, [i, j, n, k])] * b[at(rhs, [i, j, k, m])]).sum();
                    assert_eq!(made, sum, "{lhs:?} by {rhs:?}, element {place}");
                }
            }
        }
    }

    /// Checks agreement to one rounding of the stored type; sums of eighths are exact in fp32.
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
