//! Forwarding of every operation, one file per trait of Burn's.
//!
//! `forward!` expands to calls of the inner backend's operation of the same name, so that a kernel of `B` is never
//! replaced by a default body; `clippy::missing_trait_methods` is denied on every trait, and `tests/forwarding.rs`
//! checks the same against Burn's sources. Float operands are loaded, other primitives are `B`'s own.

mod activation;
mod bool;
mod float;
mod fused;
mod int;
mod module;
mod quantized;
mod transaction;

use burn_backend::{Backend, TensorPrimitive};

use crate::backend::Zero;
use crate::tensor::ZeroTensor;

/// The type of an operand or result by its kind.
macro_rules! ty {
    (float) => { burn_backend::tensor::FloatTensor<Self> };
    (shape_of) => { burn_backend::tensor::FloatTensor<Self> };
    (int) => { burn_backend::tensor::IntTensor<Self> };
    (bool) => { burn_backend::tensor::BoolTensor<Self> };
    (quantized) => { burn_backend::tensor::QuantizedTensor<Self> };
    (opt_float) => { Option<burn_backend::tensor::FloatTensor<Self>> };
    (opt_bool) => { Option<burn_backend::tensor::BoolTensor<Self>> };
    (vec_float) => { Vec<burn_backend::tensor::FloatTensor<Self>> };
    (vec_int) => { Vec<burn_backend::tensor::IntTensor<Self>> };
    (vec_bool) => { Vec<burn_backend::tensor::BoolTensor<Self>> };
    (vec_quantized) => { Vec<burn_backend::tensor::QuantizedTensor<Self>> };
    (ref_int) => { &burn_backend::tensor::IntTensor<Self> };
    (ref_bool) => { &burn_backend::tensor::BoolTensor<Self> };
    (ref_quantized) => { &burn_backend::tensor::QuantizedTensor<Self> };
    (device) => { &burn_backend::tensor::Device<Self> };
    (place) => { burn_backend::tensor::Device<Self> };
    (primitive) => { burn_backend::TensorPrimitive<Self> };
    (float_int) => { (burn_backend::tensor::FloatTensor<Self>, burn_backend::tensor::IntTensor<Self>) };
    (float_float) => { (burn_backend::tensor::FloatTensor<Self>, burn_backend::tensor::FloatTensor<Self>) };
    (int_int) => { (burn_backend::tensor::IntTensor<Self>, burn_backend::tensor::IntTensor<Self>) };
    (float_float_float) => { (ty!(float), ty!(float), ty!(float)) };
    (float_opt_float) => { (ty!(float), Option<ty!(float)>) };
    (three_floats) => { [ty!(float); 3] };
    (deform_conv2d_gradients) => { burn_backend::ops::DeformConv2dBackward<Self> };
    (max_pool1d_indices) => { burn_backend::ops::MaxPool1dWithIndices<Self> };
    (max_pool1d_gradient) => { burn_backend::ops::MaxPool1dBackward<Self> };
    (max_pool2d_indices) => { burn_backend::ops::MaxPool2dWithIndices<Self> };
    (max_pool2d_gradient) => { burn_backend::ops::MaxPool2dBackward<Self> };
    (quantized_int) => { (burn_backend::tensor::QuantizedTensor<Self>, burn_backend::tensor::IntTensor<Self>) };
    (($plain:ty)) => { $plain };
}

/// An operand as the inner backend takes it.
macro_rules! operand {
    (float, $x:expr) => {
        $x.load()
    };
    (shape_of, $x:expr) => {
        $x.shape_only()
    };
    (opt_float, $x:expr) => {
        $x.map(ZeroTensor::load)
    };
    (vec_float, $x:expr) => {
        $x.into_iter().map(ZeroTensor::load).collect()
    };
    (device, $x:expr) => {
        $x.inner()
    };
    (primitive, $x:expr) => {
        crate::ops::primitive_to_inner($x)
    };
    ($same:tt, $x:expr) => {
        $x
    };
}

/// A result as the decorator gives it.
macro_rules! result {
    (float, $x:expr) => {
        ZeroTensor::Dense($x)
    };
    (place, $x:expr) => {
        crate::ZeroDevice::here($x)
    };
    (primitive, $x:expr) => {
        crate::ops::primitive_from_inner($x)
    };
    (float_int, $x:expr) => {{
        let (a, b) = $x;
        (ZeroTensor::Dense(a), b)
    }};
    (float_float, $x:expr) => {{
        let (a, b) = $x;
        (ZeroTensor::Dense(a), ZeroTensor::Dense(b))
    }};
    (float_float_float, $x:expr) => {{
        let (a, b, c) = $x;
        (ZeroTensor::Dense(a), ZeroTensor::Dense(b), ZeroTensor::Dense(c))
    }};
    (float_opt_float, $x:expr) => {{
        let (a, b) = $x;
        (ZeroTensor::Dense(a), b.map(ZeroTensor::Dense))
    }};
    (three_floats, $x:expr) => {
        $x.map(ZeroTensor::Dense)
    };
    (deform_conv2d_gradients, $x:expr) => {{
        let DeformConv2dBackward { x_grad, offset_grad, weight_grad, mask_grad, bias_grad } = $x;
        let [x, offset, weight] = [x_grad, offset_grad, weight_grad].map(ZeroTensor::Dense);
        DeformConv2dBackward::new(x, offset, weight, mask_grad.map(ZeroTensor::Dense), bias_grad.map(ZeroTensor::Dense))
    }};
    (max_pool1d_indices, $x:expr) => {{
        let MaxPool1dWithIndices { output, indices } = $x;
        MaxPool1dWithIndices::new(ZeroTensor::Dense(output), indices)
    }};
    (max_pool1d_gradient, $x:expr) => {
        MaxPool1dBackward::new(ZeroTensor::Dense($x.x_grad))
    };
    (max_pool2d_indices, $x:expr) => {{
        let MaxPool2dWithIndices { output, indices } = $x;
        MaxPool2dWithIndices::new(ZeroTensor::Dense(output), indices)
    }};
    (max_pool2d_gradient, $x:expr) => {
        MaxPool2dBackward::new(ZeroTensor::Dense($x.x_grad))
    };
    ($same:tt, $x:expr) => {
        $x
    };
}

/// Operations that load their float operands.
macro_rules! forward {
    ($(fn $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt;)*) => {
        $(fn $name($($arg: ty!($kind)),*) -> ty!($ret) {
            result!($ret, B::$name($(operand!($kind, $arg)),*))
        })*
    };
}

/// Elementwise operations of one float tensor and plain arguments.
macro_rules! unary {
    ($(fn $name:ident($x:ident: float $(, $arg:ident: ($plain:ty))*) -> float;)*) => {
        $(fn $name($x: ty!(float) $(, $arg: $plain)*) -> ty!(float) {
            crate::elementwise::unary(stringify!($name), $x, move |x| B::$name(x $(, $arg)*))
        })*
    };
}

/// Elementwise operations of two float tensors.
macro_rules! binary {
    ($(fn $name:ident($x:ident: float, $y:ident: float) -> float;)*) => {
        $(fn $name($x: ty!(float), $y: ty!(float)) -> ty!(float) {
            crate::elementwise::binary(stringify!($name), $x, $y, B::$name)
        })*
    };
}

use {binary, forward, operand, result, ty, unary};

fn primitive_to_inner<B: Backend>(primitive: TensorPrimitive<Zero<B>>) -> TensorPrimitive<B> {
    match primitive {
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor.load()),
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
    }
}

fn primitive_from_inner<B: Backend>(primitive: TensorPrimitive<B>) -> TensorPrimitive<Zero<B>> {
    match primitive {
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(ZeroTensor::Dense(tensor)),
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
    }
}
