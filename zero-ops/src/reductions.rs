//! Burn's reductions along a dimension, run separately: on CubeCL's backends fusion does not join them to other operations.
//!
//! burn-cubecl-fusion 0.21 compiles a reduction and the operations before, alongside and after it into one kernel. It looks for the strides
//! of the kernel's layout among its inputs, even if the layout is an output's, which happens if the result of an unrelated operation is
//! kept. Then the device's thread panics (<https://github.com/tracel-ai/burn/issues/5292>), or it uses another tensor's strides.

#[cfg(feature = "cubecl")]
use burn_backend::TensorMetadata;
#[cfg(feature = "cubecl")]
use burn_backend::ops::{ActivationOps, FloatTensorOps, IntTensorOps, ModuleOps};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, BoolDType, IntDType};
#[cfg(feature = "cubecl")]
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
#[cfg(feature = "cubecl")]
use burn_std::{DType, Shape};

#[cfg(feature = "cubecl")]
use crate::cube::{
    any::{self, Body, same},
    layer_norm,
    many::shaped,
    tensor::Plain,
};

/// Shape and type of an operation's result.
#[cfg(feature = "cubecl")]
type About = (Shape, DType);

/// Runs `body` on `x` separately; `x` and the result have types that [`any::run`] takes for tensors of `B`.
#[cfg(feature = "cubecl")]
fn alone<B: Backend, X: 'static, Y: 'static>(name: &'static str, x: X, about: About, body: impl Body) -> Y {
    same(any::run::<B>(name, vec![same::<X, FloatTensor<B>>(x)], vec![about], body).swap_remove(0))
}

/// Returns the shape of `x` with one element along `dim`.
#[cfg(feature = "cubecl")]
fn along(x: &impl TensorMetadata, dim: usize) -> Shape {
    let mut shape = x.shape();
    shape[dim] = 1;
    shape
}

macro_rules! kind {
    (float, $of:ty) => { FloatTensor<$of> };
    (int, $of:ty) => { IntTensor<$of> };
    (bool, $of:ty) => { BoolTensor<$of> };
}

/// Defines operations of one tensor, with their results' shapes and types.
macro_rules! reductions {
    ($(fn $name:ident($x:ident: $kind:ident $(, $arg:ident: $type:ty)*) -> $made:ident { $shape:expr, $dtype:expr })*) => {$(
        #[doc = concat!("Same as `B::", stringify!($name), "`.")]
        pub fn $name<B: Backend>($x: kind!($kind, B) $(, $arg: $type)*) -> kind!($made, B) {
            #[cfg(feature = "cubecl")]
            if crate::is_cube::<B>() {
                struct Alone($($type),*);

                impl Body for Alone {
                    fn run<R: CubeRuntime>(&self, mut inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
                        let Self($($arg),*) = self;
                        vec![Plain::<R>::$name(inputs.swap_remove(0) $(, *$arg)*)]
                    }
                }

                let about = ($shape, $dtype);
                return alone::<B, _, _>(stringify!($name), $x, about, Alone($($arg),*));
            }
            B::$name($x $(, $arg)*)
        }
    )*};
}

reductions! {
    fn float_sum_dim(x: float, dim: usize) -> float { along(&x, dim), x.dtype() }
    fn float_prod_dim(x: float, dim: usize) -> float { along(&x, dim), x.dtype() }
    fn float_mean_dim(x: float, dim: usize) -> float { along(&x, dim), x.dtype() }
    fn float_max_dim(x: float, dim: usize) -> float { along(&x, dim), x.dtype() }
    fn float_min_dim(x: float, dim: usize) -> float { along(&x, dim), x.dtype() }
    fn float_max_abs_dim(x: float, dim: usize) -> float { along(&x, dim), x.dtype() }
    fn float_argmax(x: float, dim: usize, out_dtype: IntDType) -> int { along(&x, dim), out_dtype.into() }
    fn float_argmin(x: float, dim: usize, out_dtype: IntDType) -> int { along(&x, dim), out_dtype.into() }
    fn float_any_dim(x: float, dim: usize, out_dtype: BoolDType) -> bool { along(&x, dim), out_dtype.into() }
    fn float_all_dim(x: float, dim: usize, out_dtype: BoolDType) -> bool { along(&x, dim), out_dtype.into() }
    fn int_sum_dim(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_prod_dim(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_mean_dim(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_max_dim(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_min_dim(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_max_abs_dim(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_argmax(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_argmin(x: int, dim: usize) -> int { along(&x, dim), x.dtype() }
    fn int_any_dim(x: int, dim: usize, out_dtype: BoolDType) -> bool { along(&x, dim), out_dtype.into() }
    fn int_all_dim(x: int, dim: usize, out_dtype: BoolDType) -> bool { along(&x, dim), out_dtype.into() }
    fn softmax(x: float, dim: usize) -> float { x.shape(), x.dtype() }
    fn log_softmax(x: float, dim: usize) -> float { x.shape(), x.dtype() }
    fn softmin(x: float, dim: usize) -> float { x.shape(), x.dtype() }
    fn linear_bias_backward(x: float) -> float { Shape::new([x.shape()[x.shape().num_dims() - 1]]), x.dtype() }
}

/// Computes `B::layer_norm`, on CubeCL's backends by this crate's kernel.
///
/// # Shapes
/// - `x`: `[.., d]`, `gamma` and `beta`: `[d]`
/// - returns `[.., d]`
pub fn layer_norm<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: Option<FloatTensor<B>>,
    epsilon: f64,
) -> FloatTensor<B> {
    #[cfg(feature = "cubecl")]
    if crate::is_cube::<B>() {
        struct Norm(f64);

        impl Body for Norm {
            fn run<R: CubeRuntime>(&self, inputs: Vec<CubeTensor<R>>) -> Vec<CubeTensor<R>> {
                let mut inputs = inputs.into_iter();
                let (x, gamma) = (inputs.next().expect("a tensor"), inputs.next().expect("a scale"));
                let (beta, d) = (inputs.next(), gamma.meta.shape().num_elements());
                let is_ours = x.meta.shape().num_elements() > 0 && crate::cube::tensor::is_float(x.dtype);
                if !is_ours || gamma.dtype != x.dtype || beta.as_ref().is_some_and(|beta| beta.dtype != x.dtype) {
                    return vec![Plain::<R>::layer_norm(x, gamma, beta, self.0)];
                }
                let rows = x.meta.shape().num_elements() / d;
                let x = shaped(crate::cube::tensor::packed(x), Shape::new([rows, d]));
                vec![layer_norm::layer_norm(x, gamma, beta, self.0).0]
            }
        }

        let about = (x.shape(), x.dtype());
        let inputs = [x, gamma].into_iter().chain(beta).collect();
        return any::run::<B>("layer_norm", inputs, vec![about], Norm(epsilon)).swap_remove(0);
    }
    B::layer_norm(x, gamma, beta, epsilon)
}
