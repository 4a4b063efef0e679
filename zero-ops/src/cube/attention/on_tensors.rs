//! The passes as operations on tensors: run at once, or when fusion comes to them.

use burn_std::{DType, Shape};

use super::super::tensor::OnCube;
use crate::options::AttentionOptions;

/// Outputs of a forward pass over rows `[n, d]`: rows, and logarithms of sums `[b, h, t]`.
fn outputs(n: usize, d: usize, dtype: DType, options: AttentionOptions) -> Vec<(Shape, DType)> {
    let lse = Shape::from([options.batch, options.heads, n / options.batch]);
    vec![(Shape::from([n, d]), dtype), (lse, DType::F32)]
}

fn two<T>(made: Vec<T>) -> (T, T) {
    let [out, lse] = made.try_into().unwrap_or_else(|_| unreachable!("two outputs were promised"));
    (out, lse)
}

/// See [`super::forward`].
pub(crate) fn forward<T: OnCube>(q: T, k: T, v: T, mask: Option<T>, options: AttentionOptions) -> (T, T) {
    let (shape, dtype) = (q.shape(), q.dtype());
    let given = [q, k, v].into_iter().chain(mask).collect();
    two(T::run("attention", given, outputs(shape[0], shape[1], dtype, options), move |given| {
        let mut given = given.into_iter();
        let mut next = || given.next().expect("query, key and value are given");
        let (q, k, v) = (next(), next(), next());
        let (out, lse) = super::forward(q, k, v, given.next(), options);
        vec![out, lse]
    }))
}

/// See [`super::backward`]; `saved` is the output, the logarithms of sums, and the output's gradient.
pub(crate) fn backward<T: OnCube>(parts: [T; 3], mask: Option<T>, saved: [T; 3], options: AttentionOptions) -> [T; 3] {
    let promised = parts.iter().map(|part| (part.shape(), part.dtype())).collect();
    let given = parts.into_iter().chain(saved).chain(mask).collect();
    let made = T::run("attention: gradient", given, promised, move |given| {
        let mut given = given.into_iter();
        let mut next = || given.next().expect("three parts and what was saved are given");
        let (q, k, v, out, lse, grad) = (next(), next(), next(), next(), next(), next());
        super::backward(q, k, v, given.next(), out, lse, grad, options).into()
    });
    made.try_into().unwrap_or_else(|_| unreachable!("three outputs were promised"))
}

/// See [`super::packed_forward`].
pub(crate) fn packed_forward<T: OnCube>(qkv: T, mask: Option<T>, options: AttentionOptions) -> (T, T) {
    let (shape, dtype) = (qkv.shape(), qkv.dtype());
    let given = [qkv].into_iter().chain(mask).collect();
    two(T::run("packed attention", given, outputs(shape[0], shape[1] / 3, dtype, options), move |given| {
        let mut given = given.into_iter();
        let qkv = given.next().expect("packed rows are given");
        let (out, lse) = super::packed_forward(qkv, given.next(), options);
        vec![out, lse]
    }))
}

/// See [`super::packed_backward`]; `saved` as in [`backward`].
pub(crate) fn packed_backward<T: OnCube>(qkv: T, mask: Option<T>, saved: [T; 3], options: AttentionOptions) -> T {
    let promised = vec![(qkv.shape(), qkv.dtype())];
    let given = [qkv].into_iter().chain(saved).chain(mask).collect();
    let mut made = T::run("packed attention: gradient", given, promised, move |given| {
        let mut given = given.into_iter();
        let mut next = || given.next().expect("packed rows and what was saved are given");
        let (qkv, out, lse, grad) = (next(), next(), next(), next());
        vec![super::packed_backward(qkv, given.next(), out, lse, grad, options)]
    });
    made.pop().unwrap_or_else(|| unreachable!("an output was promised"))
}
