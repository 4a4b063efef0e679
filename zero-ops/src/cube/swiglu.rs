//! SwiGLU, <https://arxiv.org/abs/2002.05202>, and its gradients, in one pass each.

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::many::array;
use super::rows::{
    Blocks, Extent, HEIGHT, Strided, address_type, dims, own, read, strided, vector_size, with_whole_rows,
};
use super::tensor::{OnCube, empty, launch, run};

/// Returns `1 / (1 + exp(-x))`
#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    // Avoids infinity, whose reciprocal a fast division may not make 0.
    let exponent = min(Vector::new(0.0f32) - x, Vector::new(80.0f32));
    one / (one + exponent.exp())
}

/// `gate`, `up`, `out`: `[n, f]`. With `backward`, `out` is the gradient `d_gate`, and `d_up` is written too.
#[cube(launch_unchecked, address_type = "dynamic")]
fn swiglu_kernel<E: Float, N: Size>(
    gate: &Strided<E, N>,
    up: &Strided<E, N>,
    grad: &Strided<E, N>,
    out: &mut Array<Vector<E, N>>,
    d_up: &mut Array<Vector<E, N>>,
    extent: Extent,
    #[comptime] backward: bool,
    #[define(E)] _dtype: StorageType,
) {
    let (column, first, end) = own(&extent);
    if column < extent.vectors {
        let mut row = first;
        while row < end {
            let gate = read::<E, N>(gate, row, column);
            let up = read::<E, N>(up, row, column);
            let share = sigmoid::<N>(gate);
            let silu = gate * share;
            if comptime!(backward) {
                let grad = read::<E, N>(grad, row, column);
                out[row * extent.vectors + column] = Vector::cast_from(grad * up * (share + silu - silu * share));
                d_up[row * extent.vectors + column] = Vector::cast_from(grad * silu);
            } else {
                out[row * extent.vectors + column] = Vector::cast_from(silu * up);
            }
            row += HEIGHT.comptime();
        }
    }
}

/// Returns the result or, with `grad`, the two gradients.
fn computed<R: CubeRuntime>([gate, up]: [CubeTensor<R>; 2], grad: Option<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
    let ([n, f], backward) = (dims(&gate), grad.is_some());
    let mut made: Vec<_> = (0..1 + usize::from(backward)).map(|_| empty(&gate, [n, f], gate.dtype)).collect();
    if n * f == 0 {
        return made;
    }
    // Without a gradient, the kernel gets placeholders that it neither reads nor writes.
    let grad = grad.unwrap_or_else(|| gate.clone());
    let [gate, up, grad] = [gate, up, grad].map(with_whole_rows);
    let (out, d_up) = (made[0].clone(), made[made.len() - 1].clone());
    let operands = [&gate, &up, &grad, &out];
    let (size, address) = (vector_size(&operands), address_type(&operands));
    let (blocks, dtype) = (Blocks::new(n, f), gate.dtype.into());
    // SAFETY: units read and write rows below `n` and vectors below `f / size`, which all operands have.
    unsafe {
        launch! {
            swiglu_kernel on gate.client, (blocks.count(f / size), Blocks::dim(), address, size), [],
            strided(gate, size), strided(up, size), strided(grad, size), array(&out), array(&d_up),
            blocks.extent(f / size), backward, dtype
        }
    }
    made.truncate(2);
    made
}

/// Implements [`fused_swiglu`](crate::FusedBackend::fused_swiglu).
pub(crate) fn swiglu<T: OnCube>(gate: T, up: T) -> T {
    let outputs = [(gate.shape(), gate.dtype())];
    let [out] = run("swiglu", [gate, up], None, outputs, |operands, _| {
        computed(operands, None).try_into().unwrap_or_else(|_| unreachable!("one result"))
    });
    out
}

/// Implements [`swiglu_backward`](crate::FusedBackend::swiglu_backward).
pub(crate) fn swiglu_backward<T: OnCube>(gate: T, up: T, grad: T) -> (T, T) {
    let about = (gate.shape(), gate.dtype());
    run("swiglu: gradient", [gate, up], Some(grad), [about.clone(), about], |operands, grad| {
        computed(operands, grad).try_into().unwrap_or_else(|_| unreachable!("two gradients"))
    })
    .into()
}

compiled! {
    for (dtype, f) in cases() {
        let [gate, up, grad] = [(); 3].map(|()| tensor([4096, f], dtype));
        computed([gate.clone(), up.clone()], None);
        computed([gate, up], Some(grad));
    }
}
