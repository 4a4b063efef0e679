//! Layer norm of rows, <https://arxiv.org/abs/1607.06450>, and RMS norm, <https://arxiv.org/abs/1910.07467>, which does not subtract the
//! mean; and their gradients, in one pass over memory each.
//!
//! A cube processes one row at a time, in the registers of its units; it reads a very wide row again, from the cache.

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::column_sums::total;
use super::many::array;
use super::rows::{
    Blocks, Extent, Strided, across, address_type, cubes, dims, over_cube, read, strided, units, vector_size,
    with_whole_rows, zeros,
};
use super::tensor::{OnCube, empty, launch, packed, run};

/// Maximum number of elements that a unit keeps in registers.
const KEPT: usize = 16;

/// Maximum number of units of a cube.
const UNITS: usize = 512;

/// Maximum number of row blocks, each summed by one cube, for the gradients of gamma and beta.
const BLOCKS: usize = 1024;

/// Distribution of a row over a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    units: usize,
    /// Maximum number of vectors per unit.
    each: usize,
    /// The vectors stay in registers.
    kept: bool,
}

fn plan<R: CubeRuntime>(client: &ComputeClient<R>, d: usize, size: usize) -> Plan {
    let units = units(client, d, KEPT, UNITS);
    let each = (d / size).div_ceil(units);
    Plan { units, each, kept: each * size <= KEPT }
}

/// `x`: `[n, d]`, `gamma`, `beta`: `[d]`; `out`: `[n, d]`, `mean`, `rstd`: `[n]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn layer_norm_kernel<E: Float, N: Size>(
    x: &Strided<E, N>,
    gamma: &Array<Vector<E, N>>,
    beta: &Array<Vector<E, N>>,
    out: &mut Array<Vector<E, N>>,
    mean: &mut Array<f32>,
    rstd: &mut Array<f32>,
    rows: usize,
    vectors: usize,
    epsilon: f32,
    #[comptime] has_beta: bool,
    #[comptime] centred: bool,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: StorageType,
) {
    let units = comptime!(plan.units);
    let mut shared = SharedMemory::<f32>::new(2 * units);
    let mut own = Array::<Vector<f32, N>>::new(comptime!(if plan.kept { plan.each } else { 1 }));
    let me = UNIT_POS as usize;
    let d = f32::cast_from(vectors * N::value());
    let mut row = CUBE_POS;
    while row < rows {
        let mut sum = 0.0f32;
        #[unroll(plan.kept)]
        for i in 0..comptime!(plan.each) {
            let column = me + i * units;
            if column < vectors {
                let value = read::<E, N>(x, row, column);
                if comptime!(plan.kept) {
                    own[i] = value;
                }
                sum += across::<N>(value);
            }
        }
        let mut middle = 0.0f32;
        if comptime!(centred) {
            let (sum, _) = over_cube(&mut shared, sum, 0.0f32, units);
            middle = sum / d;
        }

        let mut squares = 0.0f32;
        #[unroll(plan.kept)]
        for i in 0..comptime!(plan.each) {
            let column = me + i * units;
            if column < vectors {
                let value = if comptime!(plan.kept) { own[i] } else { read::<E, N>(x, row, column) };
                let centred = value - Vector::new(middle);
                squares += across::<N>(centred * centred);
            }
        }
        let (squares, _) = over_cube(&mut shared, squares, 0.0f32, units);
        let scale = 1.0f32 / (squares / d + epsilon).sqrt();

        #[unroll(plan.kept)]
        for i in 0..comptime!(plan.each) {
            let column = me + i * units;
            if column < vectors {
                let value = if comptime!(plan.kept) { own[i] } else { read::<E, N>(x, row, column) };
                let normed = (value - Vector::new(middle)) * Vector::new(scale);
                let mut result = normed * Vector::cast_from(gamma[column]);
                if comptime!(has_beta) {
                    result += Vector::cast_from(beta[column]);
                }
                out[row * vectors + column] = Vector::cast_from(result);
            }
        }
        if me == 0 {
            if comptime!(centred) {
                mean[row] = middle;
            }
            rstd[row] = scale;
        }
        row += CUBE_COUNT;
    }
}

/// `x`, `grad`: `[n, d]`, `gamma`: `[d]`, `mean`, `rstd`: `[n]`; `dx`: `[n, d]`, `d_gamma`, `d_beta`: per block of rows, `[blocks, d]`.
///
/// A cube processes the rows of a block in order, and a unit the same columns of each, so its sums are its own.
#[cube(launch_unchecked, address_type = "dynamic")]
fn layer_norm_gradients_kernel<E: Float, N: Size>(
    x: &Strided<E, N>,
    gamma: &Array<Vector<E, N>>,
    mean: &Array<f32>,
    rstd: &Array<f32>,
    grad: &Strided<E, N>,
    dx: &mut Array<Vector<E, N>>,
    d_gamma: &mut Array<Vector<f32, N>>,
    d_beta: &mut Array<Vector<f32, N>>,
    extent: Extent,
    #[comptime] centred: bool,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: StorageType,
) {
    let units = comptime!(plan.units);
    let mut shared = SharedMemory::<f32>::new(2 * units);
    let in_registers = comptime!(if plan.kept { plan.each } else { 1 });
    let mut own_normed = Array::<Vector<f32, N>>::new(in_registers);
    let mut own_grad = Array::<Vector<f32, N>>::new(in_registers);
    let mut sum_gamma = Array::<Vector<f32, N>>::new(in_registers);
    let mut sum_beta = Array::<Vector<f32, N>>::new(in_registers);
    let me = UNIT_POS as usize;
    let d = f32::cast_from(extent.vectors * N::value());
    let zero = Vector::<f32, N>::new(0.0f32);
    let block = CUBE_POS * extent.vectors;
    #[unroll(plan.kept)]
    for i in 0..comptime!(plan.each) {
        let column = me + i * units;
        if comptime!(plan.kept) {
            sum_gamma[i] = zero;
            if comptime!(centred) {
                sum_beta[i] = zero;
            }
        } else if column < extent.vectors {
            d_gamma[block + column] = zero;
            if comptime!(centred) {
                d_beta[block + column] = zero;
            }
        }
    }
    let mut row = CUBE_POS * extent.rows_per_block;
    let end = min(row + extent.rows_per_block, extent.rows);
    while row < end {
        let scale = rstd[row];
        let mut middle = 0.0f32;
        if comptime!(centred) {
            middle = mean[row];
        }
        let mut sum = 0.0f32;
        let mut along = 0.0f32;
        #[unroll(plan.kept)]
        for i in 0..comptime!(plan.each) {
            let column = me + i * units;
            if column < extent.vectors {
                let value = read::<E, N>(x, row, column);
                let normed = (value - Vector::new(middle)) * Vector::new(scale);
                let grad = read::<E, N>(grad, row, column);
                let inner = grad * Vector::cast_from(gamma[column]);
                if comptime!(centred) {
                    sum += across::<N>(inner);
                }
                along += across::<N>(inner * normed);
                if comptime!(plan.kept) {
                    sum_gamma[i] += grad * normed;
                    if comptime!(centred) {
                        sum_beta[i] += grad;
                    }
                    own_normed[i] = normed;
                    own_grad[i] = inner;
                } else {
                    d_gamma[block + column] += grad * normed;
                    if comptime!(centred) {
                        d_beta[block + column] += grad;
                    }
                }
            }
        }
        let (sum, along) = over_cube(&mut shared, sum, along, units);
        let (sum, along) = (Vector::<f32, N>::new(sum / d), Vector::<f32, N>::new(along / d));
        #[unroll(plan.kept)]
        for i in 0..comptime!(plan.each) {
            let column = me + i * units;
            if column < extent.vectors {
                let normed = if comptime!(plan.kept) {
                    own_normed[i]
                } else {
                    let value = read::<E, N>(x, row, column);
                    (value - Vector::new(middle)) * Vector::new(scale)
                };
                let inner = if comptime!(plan.kept) {
                    own_grad[i]
                } else {
                    read::<E, N>(grad, row, column) * Vector::cast_from(gamma[column])
                };
                let mut value = inner - normed * along;
                if comptime!(centred) {
                    value = inner - sum - normed * along;
                }
                value *= Vector::new(scale);
                dx[row * extent.vectors + column] = Vector::cast_from(value);
            }
        }
        row += 1;
    }
    if comptime!(plan.kept) {
        #[unroll]
        for i in 0..comptime!(plan.each) {
            let column = me + i * units;
            if column < extent.vectors {
                d_gamma[block + column] = sum_gamma[i];
                if comptime!(centred) {
                    d_beta[block + column] = sum_beta[i];
                }
            }
        }
    }
}

fn cube_count(cubes: usize) -> CubeCount {
    CubeCount::new_1d(cubes.try_into().expect("cubes are counted in 32 bit"))
}

/// Returns the norm and the saved values of each row: the mean, if `centred`, and the scale.
fn forward<R: CubeRuntime>(
    x: CubeTensor<R>,
    gamma: CubeTensor<R>,
    beta: Option<CubeTensor<R>>,
    epsilon: f64,
    centred: bool,
) -> [CubeTensor<R>; 3] {
    let ([n, d], dtype) = (dims(&x), x.dtype);
    let (out, rstd) = (empty(&x, [n, d], dtype), empty(&x, [n], DType::F32));
    let mean = if centred { empty(&x, [n], DType::F32) } else { rstd.clone() };
    if n * d == 0 {
        return [out, mean, rstd];
    }
    let (x, gamma) = (with_whole_rows(x), packed(gamma));
    let has_beta = beta.is_some();
    // Without a beta, the kernel gets a placeholder that it does not read.
    let beta = beta.map_or_else(|| gamma.clone(), packed);
    let size = vector_size(&[&x, &gamma, &beta, &out]);
    let plan = plan(&x.client, d, size);
    let address = address_type(&[&x, &gamma, &beta, &out]);
    // SAFETY: units read and write rows below `n` and vectors below `d / size`, which all operands have.
    unsafe {
        launch! {
            layer_norm_kernel on x.client, (cube_count(cubes(n)), CubeDim::new_1d(plan.units as u32), address, size), [],
            strided(x, size), array(&gamma), array(&beta), array(&out), array(&mean), array(&rstd),
            n, d / size, epsilon as f32, has_beta, centred, plan, dtype.into()
        }
    }
    [out, mean, rstd]
}

/// Returns the gradients for `x`, `gamma` and, if `centred`, `beta`.
fn backward<R: CubeRuntime>([x, gamma, mean, rstd, grad]: [CubeTensor<R>; 5], centred: bool) -> [CubeTensor<R>; 3] {
    let ([n, d], dtype) = (dims(&x), x.dtype);
    let dx = empty(&x, [n, d], dtype);
    if n * d == 0 {
        return [dx, zeros(&x, [d], dtype), zeros(&x, [d], dtype)];
    }
    let [x, grad] = [x, grad].map(with_whole_rows);
    let [gamma, mean, rstd] = [gamma, mean, rstd].map(packed);
    let blocks = Blocks::of(n, n.div_ceil(BLOCKS).max(4));
    let d_gamma = empty(&x, [blocks.blocks, d], DType::F32);
    let d_beta = if centred { empty(&x, [blocks.blocks, d], DType::F32) } else { d_gamma.clone() };
    let operands = [&x, &gamma, &grad, &dx, &d_gamma, &d_beta];
    let (size, address) = (vector_size(&operands), address_type(&operands));
    let plan = plan(&x.client, d, size);
    // SAFETY: units read and write rows below `n` and vectors below `d / size`, and those of `blocks` partial rows.
    unsafe {
        launch! {
            layer_norm_gradients_kernel on x.client,
            (cube_count(blocks.blocks), CubeDim::new_1d(plan.units as u32), address, size), [],
            strided(x, size), array(&gamma), array(&mean), array(&rstd), strided(grad, size), array(&dx),
            array(&d_gamma), array(&d_beta), blocks.extent(d / size), centred, plan, dtype.into()
        }
    }
    let d_beta = if centred { total(d_beta, dtype) } else { zeros(&dx, [0], dtype) };
    [dx, total(d_gamma, dtype), d_beta]
}

/// Implements [`layer_norm_forward`](crate::FusedBackend::layer_norm_forward). Saved values are in fp32 whatever the type of `x`: they are
/// small, and all gradients depend on them.
pub(crate) fn layer_norm<T: OnCube>(x: T, gamma: T, beta: Option<T>, epsilon: f64) -> (T, T, T) {
    let rows = Shape::from([x.shape()[0]]);
    let outputs = [(x.shape(), x.dtype()), (rows.clone(), DType::F32), (rows, DType::F32)];
    run("layer norm", [x, gamma], beta, outputs, move |[x, gamma], beta| forward(x, gamma, beta, epsilon, true)).into()
}

/// Implements [`layer_norm_backward`](crate::FusedBackend::layer_norm_backward).
pub(crate) fn layer_norm_backward<T: OnCube>(x: T, gamma: T, mean: T, rstd: T, grad: T) -> (T, T, T) {
    let (dtype, columns) = (x.dtype(), Shape::from([x.shape()[1]]));
    let outputs = [(x.shape(), dtype), (columns.clone(), dtype), (columns, dtype)];
    let inputs = [x, gamma, mean, rstd, grad];
    run("layer norm: gradient", inputs, None, outputs, |inputs, _| backward(inputs, true)).into()
}

/// Implements [`rms_norm_forward`](crate::FusedBackend::rms_norm_forward), which also saves in fp32.
pub(crate) fn rms_norm<T: OnCube>(x: T, gamma: T, epsilon: f64) -> (T, T) {
    let outputs = [(x.shape(), x.dtype()), (Shape::from([x.shape()[0]]), DType::F32)];
    run("rms norm", [x, gamma], None, outputs, move |[x, gamma], _| {
        let [out, _, rrms] = forward(x, gamma, None, epsilon, false);
        [out, rrms]
    })
    .into()
}

/// Implements [`rms_norm_backward`](crate::FusedBackend::rms_norm_backward).
pub(crate) fn rms_norm_backward<T: OnCube>(x: T, gamma: T, rrms: T, grad: T) -> (T, T) {
    let (dtype, columns) = (x.dtype(), Shape::from([x.shape()[1]]));
    let outputs = [(x.shape(), dtype), (columns, dtype)];
    run("rms norm: gradient", [x, gamma, rrms, grad], None, outputs, |[x, gamma, rrms, grad], _| {
        let [dx, d_gamma, _] = backward([x, gamma, rrms.clone(), rrms, grad], false);
        [dx, d_gamma]
    })
    .into()
}

compiled! {
    for dtype in TYPES {
        // Includes a row that does not fit into registers.
        for d in WIDTHS.into_iter().chain([768, 9000]) {
            let [x, grad] = [(); 2].map(|()| tensor([4096, d], dtype));
            let [gamma, beta] = [(); 2].map(|()| tensor([d], dtype));
            let [_, _, rrms] = forward(x.clone(), gamma.clone(), None, 1e-5, false);
            backward([x.clone(), gamma.clone(), rrms.clone(), rrms, grad.clone()], false);
            forward(x.clone(), gamma.clone(), None, 1e-5, true);
            let [_, mean, rstd] = forward(x.clone(), gamma.clone(), Some(beta), 1e-5, true);
            backward([x, gamma, mean, rstd, grad], true);
        }
    }
}
