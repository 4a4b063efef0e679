//! The types that a buffer's bytes may be looked at as.

/// A number that every pattern of bits is a value of.
///
/// # Safety
/// Every pattern of bits is a value, there is no padding, and the alignment is at most a page.
pub unsafe trait Element: Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($name:ty),*) => {
        // SAFETY: plain numbers (those of `half` are transparent wrappers of u16), aligned to their size.
        $(unsafe impl Element for $name {})*
    };
}

elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::f16, half::bf16);
