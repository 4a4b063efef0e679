//! Fused neural-network operations on `f32` slices in host memory.
//!
//! Inputs are row-major slices that the caller owns; outputs are slices that the caller allocates. Every kernel overwrites
//! its outputs, except for the embedding's gradient, which is added to. Work is spread over the rayon pool of the caller,
//! and never over another. The bits of a result depend only on the shapes, not on the number of threads: a sum over rows
//! consists of partial sums over fixed blocks of rows, added in order.
//!
//! Arithmetic is written as plain scalar loops in `vectorised!` functions.

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
mod operand;
pub mod orthogonal;
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

pub use operand::Operand;
pub use product::Matrix;

/// Returns a buffer for a kernel that overwrites all of it before it reads any of it: its numbers are whatever the memory
/// holds. Clearing it would cost a pass over memory for each result of a step.
pub fn buffer(len: usize) -> Vec<f32> {
    buffer_of(len)
}

/// Returns a [`buffer`] of 32-bit or 16-bit floats.
pub fn buffer_of<T: half::Plain>(len: usize) -> Vec<T> {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    {
        let mut buffer = Vec::<T>::with_capacity(len);
        // SAFETY: the assembly is empty. The compiler must assume that it writes any bits to the memory it is passed, which
        // is this buffer's `len` elements: from here on they are initialised, with what is there. Any bits are a valid
        // element, as the trait promises.
        unsafe {
            core::arch::asm!("/* {} */", in(reg) buffer.as_mut_ptr(), options(nostack, preserves_flags));
            buffer.set_len(len);
        }
        buffer
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    vec![T::ZERO; len]
}

/// Panics unless an operand has as many elements as the others require.
fn check(op: &str, name: &str, got: usize, expected: usize) {
    assert_eq!(got, expected, "{op}: `{name}` has {got} elements, expected {expected}");
}

/// Panics unless an operand has `n` rows of `width` elements.
fn check_rows(op: &str, name: &str, got: usize, n: usize, width: usize) {
    assert_eq!(got, n * width, "{op}: `{name}` has {got} elements, expected {n} rows of {width}");
}
