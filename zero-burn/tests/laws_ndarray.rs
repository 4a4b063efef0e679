//! The suite of laws over burn-ndarray.

mod suite;

laws!(burn_ndarray::NdArray);
