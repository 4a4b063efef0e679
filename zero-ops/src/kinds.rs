//! Shared by the trait and its default bodies: the kinds in which signatures of fused operations are written.

use burn_std::DType;

/// Type in which quantized rows are stored.
pub(crate) const STORED_AS: DType = DType::F16;

/// The type of an operand or result, given its kind and its backend.
macro_rules! ty {
    (float, $of:ty) => { FloatTensor<$of> };
    (opt_float, $of:ty) => { Option<FloatTensor<$of>> };
    (int, $of:ty) => { IntTensor<$of> };
    (float_float, $of:ty) => { (FloatTensor<$of>, FloatTensor<$of>) };
    (float_float_float, $of:ty) => { (FloatTensor<$of>, FloatTensor<$of>, FloatTensor<$of>) };
    (float_opt_float, $of:ty) => { (FloatTensor<$of>, Option<FloatTensor<$of>>) };
    (three_floats, $of:ty) => { [FloatTensor<$of>; 3] };
    (($plain:ty), $of:ty) => { $plain };
}

pub(crate) use ty;
