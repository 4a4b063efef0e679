//! GELU with bias, <https://arxiv.org/abs/1606.08415>, and its gradients in one pass over `x` and the output's gradient.

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use super::column_sums::total;
use super::many::array;
use super::rows::{
    Blocks, Extent, HEIGHT, STRIP, Strided, address_type, dims, over_height, own, read, read_if, strided, vector_size,
    with_whole_rows, zeros,
};
use super::tensor::{OnCube, empty, first, launch, packed, run};
use crate::options::Gelu;

/// `2 sqrt(2 / pi)`
const SLOPE: f32 = (2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2) as f32;
/// Coefficient of `x^3` relative to that of `x`.
const CUBIC: f32 = 0.044715;
/// `1 / sqrt(2)`
const ROOT: f32 = FRAC_1_SQRT_2 as f32;
/// The normal density at 0, `1 / sqrt(2 pi)`.
const DENSITY: f32 = (0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2) as f32;

/// Returns `0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y))` of the tanh formula.
#[cube]
fn tanh_gate<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    let slope = Vector::new(SLOPE.comptime()) + x * x * Vector::new((SLOPE * CUBIC).comptime());
    // Avoids infinity, whose reciprocal a fast division may not make 0.
    let exponent = min(Vector::new(0.0f32) - x * slope, Vector::new(80.0f32));
    one / (one + exponent.exp())
}

/// Returns the cumulative normal distribution at `x`.
#[cube]
fn erf_gate<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let half = Vector::<f32, N>::new(0.5f32);
    (x * Vector::new(ROOT.comptime())).erf() * half + half
}

#[cube]
fn value<N: Size>(x: Vector<f32, N>, #[comptime] tanh: bool) -> Vector<f32, N> {
    if comptime!(tanh) { x * tanh_gate::<N>(x) } else { x * erf_gate::<N>(x) }
}

#[cube]
fn derivative<N: Size>(x: Vector<f32, N>, #[comptime] tanh: bool) -> Vector<f32, N> {
    if comptime!(tanh) {
        let gate = tanh_gate::<N>(x);
        let slope = Vector::new(SLOPE.comptime()) + x * x * Vector::new((3.0 * SLOPE * CUBIC).comptime());
        gate + x * slope * (gate - gate * gate)
    } else {
        let density = (x * x * Vector::new(-0.5f32)).exp() * Vector::new(DENSITY.comptime());
        erf_gate::<N>(x) + x * density
    }
}

/// `x`: `[n, f]`, `bias`: `[f]`, `out`: `[n, f]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gelu_kernel<E: Float, N: Size>(
    x: &Strided<E, N>,
    bias: &Array<Vector<E, N>>,
    out: &mut Array<Vector<E, N>>,
    extent: Extent,
    #[comptime] has_bias: bool,
    #[comptime] tanh: bool,
    #[define(E)] _dtype: StorageType,
) {
    let (column, first, end) = own(&extent);
    if column < extent.vectors {
        let shift = read_if::<E, N>(bias, column, has_bias);
        let mut row = first;
        while row < end {
            let x = read::<E, N>(x, row, column) + shift;
            out[row * extent.vectors + column] = Vector::cast_from(value::<N>(x, tanh));
            row += HEIGHT.comptime();
        }
    }
}

/// `x`, `grad`: `[n, f]`, `bias`: `[f]`, `dx`: `[n, f]`, `partial`: the bias's gradient per block of rows, `[blocks, f]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gelu_gradients_kernel<E: Float, N: Size>(
    x: &Strided<E, N>,
    bias: &Array<Vector<E, N>>,
    grad: &Strided<E, N>,
    dx: &mut Array<Vector<E, N>>,
    partial: &mut Array<Vector<f32, N>>,
    extent: Extent,
    #[comptime] has_bias: bool,
    #[comptime] tanh: bool,
    #[define(E)] _dtype: StorageType,
) {
    let (column, first, end) = own(&extent);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < extent.vectors {
        let shift = read_if::<E, N>(bias, column, has_bias);
        let mut row = first;
        while row < end {
            let x = read::<E, N>(x, row, column) + shift;
            let grad = read::<E, N>(grad, row, column);
            let d = grad * derivative::<N>(x, tanh);
            sum += d;
            dx[row * extent.vectors + column] = Vector::cast_from(d);
            row += HEIGHT.comptime();
        }
    }
    if comptime!(has_bias) {
        let mut shared = SharedMemory::<Vector<f32, N>>::new(STRIP * HEIGHT);
        let sum = over_height::<N>(&mut shared, sum);
        if UNIT_POS_Y == 0 && column < extent.vectors {
            partial[CUBE_POS_Y as usize * extent.vectors + column] = sum;
        }
    }
}

fn forward<R: CubeRuntime>(kind: Gelu, x: CubeTensor<R>, bias: Option<CubeTensor<R>>) -> CubeTensor<R> {
    let [n, f] = dims(&x);
    let out = empty(&x, [n, f], x.dtype);
    if n * f == 0 {
        return out;
    }
    let x = with_whole_rows(x);
    let has_bias = bias.is_some();
    // Without a bias, the kernel gets a placeholder that it does not read.
    let bias = bias.map_or_else(|| x.clone(), packed);
    let size = vector_size(&[&x, &bias, &out]);
    let (blocks, dtype) = (Blocks::new(n, f), x.dtype.into());
    let address = address_type(&[&x, &bias, &out]);
    // SAFETY: units read and write rows below `n` and vectors below `f / size`, which all operands have.
    unsafe {
        launch! {
            gelu_kernel on x.client, (blocks.count(f / size), Blocks::dim(), address, size), [],
            strided(x, size), array(&bias), array(&out), blocks.extent(f / size), has_bias, kind == Gelu::Tanh, dtype
        }
    }
    out
}

fn backward<R: CubeRuntime>(
    kind: Gelu,
    x: CubeTensor<R>,
    bias: Option<CubeTensor<R>>,
    grad: CubeTensor<R>,
) -> (CubeTensor<R>, Option<CubeTensor<R>>) {
    let ([n, f], dtype) = (dims(&x), x.dtype);
    let dx = empty(&x, [n, f], dtype);
    if n * f == 0 {
        let d_bias = bias.map(|bias| zeros(&bias, [f], dtype));
        return (dx, d_bias);
    }
    let (x, grad) = (with_whole_rows(x), with_whole_rows(grad));
    let has_bias = bias.is_some();
    let bias = bias.map_or_else(|| x.clone(), packed);
    let blocks = Blocks::new(n, f);
    let partial = empty(&x, [if has_bias { blocks.blocks } else { 1 }, f], DType::F32);
    let size = vector_size(&[&x, &bias, &grad, &dx, &partial]);
    let address = address_type(&[&x, &bias, &grad, &dx, &partial]);
    // SAFETY: units read and write rows below `n` and vectors below `f / size`, and those of `blocks` partial rows.
    unsafe {
        launch! {
            gelu_gradients_kernel on x.client, (blocks.count(f / size), Blocks::dim(), address, size), [],
            strided(x, size), array(&bias), strided(grad, size), array(&dx), array(&partial),
            blocks.extent(f / size), has_bias, kind == Gelu::Tanh, dtype.into()
        }
    }
    (dx, has_bias.then(|| total(partial, dtype)))
}

/// Implements [`fused_gelu`](crate::FusedBackend::fused_gelu).
pub(crate) fn gelu<T: OnCube>(kind: Gelu, x: T, bias: Option<T>) -> T {
    let outputs = [(x.shape(), x.dtype())];
    let [out] = run("gelu", [x], bias, outputs, move |[x], bias| [forward(kind, x, bias)]);
    out
}

/// Implements [`gelu_backward_fused`](crate::FusedBackend::gelu_backward_fused).
pub(crate) fn gelu_backward<T: OnCube>(kind: Gelu, x: T, bias: Option<T>, grad: T) -> (T, Option<T>) {
    let mut outputs = vec![(x.shape(), x.dtype())];
    outputs.extend(bias.as_ref().map(|_| (Shape::from([x.shape()[1]]), x.dtype())));
    let given = [x, grad].into_iter().chain(bias).collect();
    let made = T::run("gelu: gradient", given, outputs, move |given| {
        let mut given = given.into_iter();
        let [x, grad] = first(&mut given);
        let (dx, d_bias) = backward(kind, x, given.next(), grad);
        [dx].into_iter().chain(d_bias).collect()
    });
    let mut made = made.into_iter();
    (made.next().expect("the kernel returns one output"), made.next())
}

compiled! {
    for (dtype, f) in cases() {
        for kind in [Gelu::Tanh, Gelu::Erf] {
            for has_bias in [false, true] {
                let [x, grad] = [(); 2].map(|()| tensor([4096, f], dtype));
                let bias = has_bias.then(|| tensor([f], dtype));
                forward(kind, x.clone(), bias.clone());
                backward(kind, x, bias, grad);
            }
        }
    }
}
