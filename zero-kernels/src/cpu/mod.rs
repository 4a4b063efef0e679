//! Fused neural-network operations on `f32` slices in host memory.
//!
//! In go row-major slices that the caller owns, out come slices that the caller allocated; every kernel overwrites its
//! outputs (the embedding's gradient alone is added to). Work is spread over the rayon pool that the call is made in,
//! and never over another. The bits of a result depend on the shapes only, not on the number of threads: a sum over
//! rows is made of partial sums over fixed blocks of rows, added in order.
//!
//! Arithmetic is plain scalar loops in `vectorised!` functions.

pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod gelu;
pub mod half;
pub mod layer_norm;
pub mod linear;
pub mod math;
pub mod norm;
pub mod parallel;
mod product;
pub mod product_bf16;
pub mod quantized;
mod reduce;
pub mod rms_norm;
pub mod rotary;
mod rows;
pub mod swiglu;
#[cfg(test)]
mod testing;

pub use product::Matrix;

/// A buffer that a kernel writes whole before it reads any of it: its numbers are what the memory happens to hold. Clearing it
/// first would cost a pass over memory for each result of a step.
pub fn buffer(len: usize) -> Vec<f32> {
    buffer_of(len)
}

/// As [`buffer`], of floats of 32 or 16 bit.
pub fn buffer_of<T: half::Plain>(len: usize) -> Vec<T> {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    {
        let mut buffer = Vec::<T>::with_capacity(len);
        // SAFETY: the assembly is empty and may be taken to have written any bits to the memory it is shown, which is this
        // buffer's `len` elements: to the compiler they are initialised from here on, with what is there. Any bits are one,
        // as the trait promises.
        unsafe {
            core::arch::asm!("/* {} */", in(reg) buffer.as_mut_ptr(), options(nostack, preserves_flags));
            buffer.set_len(len);
        }
        buffer
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    vec![T::ZERO; len]
}

/// Panics unless an operand has as many elements as the others ask for.
fn check(op: &str, name: &str, got: usize, expected: usize) {
    assert_eq!(got, expected, "{op}: `{name}` has {got} elements, expected {expected}");
}

/// As [`check`], of `n` rows of `width`.
fn check_rows(op: &str, name: &str, got: usize, n: usize, width: usize) {
    assert_eq!(got, n * width, "{op}: `{name}` has {got} elements, expected {n} rows of {width}");
}
