//! What the trait and the bodies that it calls share: the words in which signatures of fused operations are written.

use burn_std::DType;

/// What quantised rows are held as.
pub(crate) const STORED_AS: DType = DType::F16;

/// The type of an operand or result by its kind, and its backend.
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
