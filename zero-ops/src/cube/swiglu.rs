//! SwiGLU, <https://arxiv.org/abs/2002.05202>, and its gradients, in one pass each.

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{Blocks, HEIGHT, STRIP, address_type, dims, stride, vector_size, with_whole_rows};
use super::tensor::{OnCube, empty, launch, run};

/// `1 / (1 + exp(-x))`
#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    // No infinity, of which a fast division may make something else than 0.
    let exponent = min(Vector::new(0.0f32) - x, Vector::new(80.0f32));
    one / (one + exponent.exp())
}

/// `gate`, `up`, `out`: `[n, f]`. With `grad`, the gradients `d_gate` in place of `out`, and `d_up`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn swiglu_kernel<E: Float, N: Size>(
    gate: &Array<Vector<E, N>>,
    up: &Array<Vector<E, N>>,
    grad: &Array<Vector<E, N>>,
    out: &mut Array<Vector<E, N>>,
    d_up: &mut Array<Vector<E, N>>,
    gate_stride: usize,
    up_stride: usize,
    grad_stride: usize,
    rows: usize,
    vectors: usize,
    rows_per_block: usize,
    #[comptime] backward: bool,
    #[define(E)] _dtype: StorageType,
) {
    let column = CUBE_POS_X as usize * STRIP.comptime() + UNIT_POS_X as usize;
    let first = CUBE_POS_Y as usize * rows_per_block;
    let end = min(first + rows_per_block, rows);
    if column < vectors {
        let mut row = first + UNIT_POS_Y as usize;
        while row < end {
            let gate = Vector::<f32, N>::cast_from(gate[row * gate_stride + column]);
            let up = Vector::<f32, N>::cast_from(up[row * up_stride + column]);
            let share = sigmoid::<N>(gate);
            let silu = gate * share;
            if comptime!(backward) {
                let grad = Vector::<f32, N>::cast_from(grad[row * grad_stride + column]);
                out[row * vectors + column] = Vector::cast_from(grad * up * (share + silu - silu * share));
                d_up[row * vectors + column] = Vector::cast_from(grad * silu);
            } else {
                out[row * vectors + column] = Vector::cast_from(silu * up);
            }
            row += HEIGHT.comptime();
        }
    }
}

/// The result, or with `grad` the two gradients.
fn computed<R: CubeRuntime>([gate, up]: [CubeTensor<R>; 2], grad: Option<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
    let ([n, f], backward) = (dims(&gate), grad.is_some());
    let mut made: Vec<_> = (0..1 + usize::from(backward)).map(|_| empty(&gate, [n, f], gate.dtype)).collect();
    if n * f == 0 {
        return made;
    }
    // Where there is no gradient, the kernel is given something to not read, and to not write.
    let grad = grad.unwrap_or_else(|| gate.clone());
    let [gate, up, grad] = [gate, up, grad].map(with_whole_rows);
    let (out, d_up) = (made[0].clone(), made[made.len() - 1].clone());
    let operands = [&gate, &up, &grad, &out];
    let (size, address) = (vector_size(&operands), address_type(&operands));
    let (blocks, dtype) = (Blocks::new(n, f), gate.dtype.into());
    let [gate_stride, up_stride, grad_stride] = [&gate, &up, &grad].map(|x| stride(x, size));
    // SAFETY: units read and write rows below `n` and vectors below `f / size`; all operands have so many.
    unsafe {
        launch! {
            swiglu_kernel on gate.client, (blocks.count(f / size), Blocks::dim(), address, size),
            [gate, up, grad, out, d_up],
            gate_stride, up_stride, grad_stride, n, f / size, blocks.rows_per_block, backward, dtype
        }
    }
    made.truncate(2);
    made
}

/// [`fused_swiglu`](crate::FusedBackend::fused_swiglu).
pub(crate) fn swiglu<T: OnCube>(gate: T, up: T) -> T {
    let outputs = [(gate.shape(), gate.dtype())];
    let [out] = run("swiglu", [gate, up], None, outputs, |operands, _| {
        computed(operands, None).try_into().unwrap_or_else(|_| unreachable!("one result"))
    });
    out
}

/// [`swiglu_backward`](crate::FusedBackend::swiglu_backward).
pub(crate) fn swiglu_backward<T: OnCube>(gate: T, up: T, grad: T) -> (T, T) {
    let about = (gate.shape(), gate.dtype());
    run("swiglu: gradient", [gate, up], Some(grad), [about.clone(), about], |operands, grad| {
        computed(operands, grad).try_into().unwrap_or_else(|_| unreachable!("two gradients"))
    })
    .into()
}

#[cfg(all(test, feature = "cuda"))]
mod compiled {
    use super::*;
    use crate::cube::compiled::{TYPES, WIDTHS, check, tensor};

    #[test]
    #[ignore = "bench/gpu/dry.sh kernels runs it"]
    fn compiled() {
        for (dtype, f) in TYPES.into_iter().flat_map(|dtype| WIDTHS.map(|f| (dtype, f))) {
            let [gate, up, grad] = [(); 3].map(|()| tensor([4096, f], dtype));
            computed([gate.clone(), up.clone()], None);
            computed([gate, up], Some(grad));
        }
        check();
    }
}
