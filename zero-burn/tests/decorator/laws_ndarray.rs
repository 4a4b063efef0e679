//! The suite of laws over burn-ndarray.

use crate::laws;

laws!(burn_ndarray::NdArray);
