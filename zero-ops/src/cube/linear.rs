//! Products of linear layers, in memory without gaps, with bias and residual: added in the product's kernel if it supports them, otherwise
//! by a separate one.
//!
//! Burn's fusion would join bias and residual to the product with its own tuner, which knows fewer kernels (ADR 20). Its output has gaps
//! after its rows, which updates and norms of full tensors would have to copy away.

use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Shape;
use cubecl::prelude::*;

use super::product::{Added, elsewhere, on_matrix_units, product};
use super::rows::{
    Blocks, Extent, HEIGHT, Strided, address_type, dims, own, read, read_if, strided, vector_size, with_whole_rows,
    zeros,
};
use super::tensor::{OnCube, empty, first, launch, packed, run};

/// Adds `bias` `[f]` and `residual` `[n, f]` to `out` `[n, f]`, the product.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_to_product_kernel<E: Float, N: Size>(
    out: &mut Array<Vector<E, N>>,
    bias: &Array<Vector<E, N>>,
    residual: &Strided<E, N>,
    extent: Extent,
    #[comptime] has_bias: bool,
    #[comptime] has_residual: bool,
    #[define(E)] _dtype: StorageType,
) {
    let (column, first, end) = own(&extent);
    if column < extent.vectors {
        let shift = read_if::<E, N>(bias, column, has_bias);
        let mut row = first;
        while row < end {
            let at = row * extent.vectors + column;
            let mut sum = Vector::<f32, N>::cast_from(out[at]) + shift;
            if comptime!(has_residual) {
                sum += read::<E, N>(residual, row, column);
            }
            out[at] = Vector::cast_from(sum);
            row += HEIGHT.comptime();
        }
    }
}

/// Multiplies matrices of one type, in memory without gaps.
fn matrices<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>) -> CubeTensor<R> {
    let ([n, inner], [_, f], dtype) = (dims(&lhs), dims(&rhs), lhs.dtype);
    if n * f * inner == 0 {
        return zeros(&lhs, [n, f], dtype);
    }
    let out = empty(&lhs, [n, f], dtype);
    product(lhs, rhs, out)
}

fn transposed<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    permute(x, &[1, 0])
}

/// Adds bias and residual to a product in place.
fn add<R: CubeRuntime>(out: CubeTensor<R>, Added { bias, residual }: Added<R>) -> CubeTensor<R> {
    let ([n, f], has_bias, has_residual) = (dims(&out), bias.is_some(), residual.is_some());
    if n * f == 0 || !(has_bias || has_residual) {
        return out;
    }
    // Without one of them, the kernel gets a placeholder that it does not read.
    let [bias, residual] = [bias, residual].map(|x| x.unwrap_or_else(|| out.clone()));
    let size = vector_size(&[&out, &bias, &residual]);
    let (blocks, dtype) = (Blocks::new(n, f), out.dtype.into());
    let address = address_type(&[&out, &residual]);
    // SAFETY: units read and write rows below `n` and vectors below `f / size`, which all operands have.
    unsafe {
        launch! {
            add_to_product_kernel on out.client, (blocks.count(f / size), Blocks::dim(), address, size),
            [out.clone(), bias],
            strided(residual, size), blocks.extent(f / size), has_bias, has_residual, dtype
        }
    }
    out
}

/// Implements [`fused_linear`](crate::FusedBackend::fused_linear).
pub(crate) fn linear<T: OnCube>(x: T, weight: T, bias: Option<T>, residual: Option<T>) -> T {
    let promised = vec![(Shape::from([x.shape()[0], weight.shape()[1]]), x.dtype())];
    let (has_bias, has_residual) = (bias.is_some(), residual.is_some());
    let given = [x, weight].into_iter().chain(bias).chain(residual).collect();
    let made = T::run("linear", given, promised, move |given| {
        let mut given = given.into_iter().peekable();
        let [x, weight] = first(&mut given);
        let [bias, residual] = [has_bias, has_residual].map(|is_given| given.next_if(|_| is_given));
        let added = Added { bias: bias.map(packed), residual: residual.map(with_whole_rows) };
        if x.meta.num_elements() * weight.meta.num_elements() == 0 {
            return vec![add(matrices(x, weight), added)];
        }
        let out = empty(&x, [dims(&x)[0], dims(&weight)[1]], x.dtype);
        let is_made = on_matrix_units(&x, &weight, &out, &added);
        vec![if is_made { out } else { add(elsewhere(x, weight, out), added) }]
    });
    made.into_iter().next().expect("the kernel returns one output")
}

/// Implements [`fused_linear_x_backward`](crate::FusedBackend::fused_linear_x_backward).
pub(crate) fn x_backward<T: OnCube>(weight: T, grad: T) -> T {
    let outputs = [(Shape::from([grad.shape()[0], weight.shape()[0]]), grad.dtype())];
    let [dx] = run("linear: gradient of rows", [weight, grad], None, outputs, |[weight, grad], _| {
        [matrices(grad, transposed(weight))]
    });
    dx
}

/// Implements [`fused_linear_weight_backward`](crate::FusedBackend::fused_linear_weight_backward).
pub(crate) fn weight_backward<T: OnCube>(x: T, grad: T) -> T {
    let outputs = [(Shape::from([x.shape()[1], grad.shape()[1]]), grad.dtype())];
    let [d_weight] =
        run("linear: gradient of weight", [x, grad], None, outputs, |[x, grad], _| [matrices(transposed(x), grad)]);
    d_weight
}

compiled! {
    for (dtype, f) in cases() {
        for (has_bias, has_residual) in [(true, false), (false, true), (true, true)] {
            let bias = has_bias.then(|| tensor([f], dtype));
            let residual = has_residual.then(|| tensor([4096, f], dtype));
            add(tensor([4096, f], dtype), Added { bias, residual });
        }
    }
}
