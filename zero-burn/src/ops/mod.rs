//! Forwarding of every operation, one file per trait of Burn.
//!
//! `forward!` expands to calls of the inner backend's operation of the same name, so that a default body never replaces a kernel of `B`.
//! `clippy::missing_trait_methods` is denied on every trait, and `tests/forwarding.rs` checks the same against Burn's sources. Float
//! operands are loaded; other primitives are `B`'s own.

mod activation;
mod bool;
mod float;
mod fused;
mod int;
mod module;
mod quantized;
mod transaction;

use burn_backend::{Backend, TensorPrimitive};
use zero_ops::reductions;

use crate::activations::{Operands, Recording};
use crate::backend::Zero;
use crate::tensor::ZeroTensor;

/// Returns the type of an operand or result of a kind.
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

/// Converts an operand for the inner backend.
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

/// Converts a result for the decorator: `$of` makes a tensor of a float.
macro_rules! result {
    (float, $x:expr, $of:expr) => {
        $of($x)
    };
    (place, $x:expr, $of:expr) => {
        crate::ZeroDevice::here($x)
    };
    (primitive, $x:expr, $of:expr) => {
        crate::ops::primitive_from_inner($x)
    };
    (float_int, $x:expr, $of:expr) => {{
        let (a, b) = $x;
        ($of(a), b)
    }};
    (float_float, $x:expr, $of:expr) => {{
        let (a, b) = $x;
        ($of(a), $of(b))
    }};
    (float_float_float, $x:expr, $of:expr) => {{
        let (a, b, c) = $x;
        ($of(a), $of(b), $of(c))
    }};
    (float_opt_float, $x:expr, $of:expr) => {{
        let (a, b) = $x;
        ($of(a), b.map($of))
    }};
    (three_floats, $x:expr, $of:expr) => {
        $x.map($of)
    };
    (deform_conv2d_gradients, $x:expr, $of:expr) => {{
        let DeformConv2dBackward { x_grad, offset_grad, weight_grad, mask_grad, bias_grad } = $x;
        let [x, offset, weight] = [x_grad, offset_grad, weight_grad].map($of);
        DeformConv2dBackward::new(x, offset, weight, mask_grad.map($of), bias_grad.map($of))
    }};
    (max_pool1d_indices, $x:expr, $of:expr) => {{
        let MaxPool1dWithIndices { output, indices } = $x;
        MaxPool1dWithIndices::new($of(output), indices)
    }};
    (max_pool1d_gradient, $x:expr, $of:expr) => {
        MaxPool1dBackward::new($of($x.x_grad))
    };
    (max_pool2d_indices, $x:expr, $of:expr) => {{
        let MaxPool2dWithIndices { output, indices } = $x;
        MaxPool2dWithIndices::new($of(output), indices)
    }};
    (max_pool2d_gradient, $x:expr, $of:expr) => {
        MaxPool2dBackward::new($of($x.x_grad))
    };
    ($same:tt, $x:expr, $of:expr) => {
        $x
    };
}

/// Stores an operand of a recorded operation: floats become its inputs, everything else is owned.
macro_rules! keep {
    (float, $x:ident, $recording:ident) => {
        $x.record(&mut $recording)
    };
    (opt_float, $x:ident, $recording:ident) => {
        $x.map(|x| x.record(&mut $recording))
    };
    (vec_float, $x:ident, $recording:ident) => {
        $x.into_iter().map(|x| x.record(&mut $recording)).count()
    };
    ((&[$t:ty]), $x:ident, $recording:ident) => {
        $x.to_vec()
    };
    ($same:tt, $x:ident, $recording:ident) => {
        $x
    };
}

/// Returns a stored operand for the inner backend.
macro_rules! again {
    (float, $x:ident, $floats:ident) => {
        $floats.next().expect("as many as were recorded")
    };
    (opt_float, $x:ident, $floats:ident) => {
        $x.map(|()| $floats.next().expect("as many as were recorded"))
    };
    (vec_float, $x:ident, $floats:ident) => {
        $floats.by_ref().take($x).collect()
    };
    ((&[$t:ty]), $x:ident, $floats:ident) => {
        &$x
    };
    ($same:tt, $x:ident, $floats:ident) => {
        $x.clone()
    };
}

/// Operations that load their float operands. `= function` replaces the inner backend's operation.
macro_rules! forward {
    ($(fn $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $by:path)?;)*) => {
        $(fn $name($($arg: ty!($kind)),*) -> ty!($ret) {
            result!($ret, called!($name $(, $by)?)($(operand!($kind, $arg)),*), ZeroTensor::Dense)
        })*
    };
}

/// Same as `forward!`, for operations of a forward pass: within a checkpointed block their results can be recomputed.
macro_rules! recorded {
    ($(fn $name:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $by:path)?;)*) => {
        $(#[allow(unused_variables, clippy::clone_on_copy)] // Of some kinds.
        fn $name($($arg: ty!($kind)),*) -> ty!($ret) {
            let Some(mut recording) = Recording::begin() else {
                return result!($ret, called!($name $(, $by)?)($(operand!($kind, $arg)),*), ZeroTensor::Dense);
            };
            $(let $arg = keep!($kind, $arg, recording);)*
            let run = move |floats: &mut Operands<B>| called!($name $(, $by)?)($(again!($kind, $arg, floats)),*);
            let (made, mut floats) = (run(&mut recording.operands()), Vec::new());
            // Floats are taken in order, the same as on a rerun.
            let made = result!($ret, made, |float| floats.push(float));
            let mut handles = recording.end(floats, Box::new(move |operands| {
                let mut floats = Vec::new();
                let _ = result!($ret, run(operands), |float| floats.push(float));
                floats
            }));
            result!($ret, made, |()| ZeroTensor::Activation(handles.next().expect("as many as were made")))
        })*
    };
}

/// The function that an operation calls.
macro_rules! called {
    ($name:ident) => {
        B::$name
    };
    ($name:ident, $by:path) => {
        $by
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

use {again, binary, called, forward, keep, operand, recorded, result, ty, unary};

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
