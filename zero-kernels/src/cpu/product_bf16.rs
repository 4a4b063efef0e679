//! Products of bfloat16 matrices, accumulated in f32.
//!
//! Inputs are strided views of the caller's slices; the output is a row-major slice that the caller allocates. Operands are
//! copied, in the order that the kernel reads, to buffers that each thread keeps. Work is spread over the caller's rayon pool.
//!
//! # Numerics
//!
//! Every element is a sum in f32 over the full depth. Bias and residual are added in f32, and the result is rounded to
//! bfloat16 once, to nearest even. The number of threads changes no bit.
//!
//! On CPUs with AVX512_BF16, `vdpbf16ps` adds the products of two neighbours in depth to an f32, the odd one first. A product
//! of two bfloat16 is exact; each of the two additions rounds to nearest even, whatever the rounding mode; denormal inputs
//! count as zero and denormal sums become zero. Bias, residual and the last rounding keep denormals. The order of the additions
//! depends only on the depth, so an element has the same bits in a larger matrix, or in one that is stored differently.
//!
//! On CPUs that also have tiles (AMX), `tdpbf16ps` takes 32 neighbours in depth. It sums the products of the even ones, in
//! order, and those of the odd ones, adds the two sums, and adds the result to the previous sum; denormals are zero as
//! above. These bits differ from those of `vdpbf16ps`, but also depend only on the depth.
//!
//! On other CPUs, operands are converted to f32 as they are packed, and multiplied and added in the order of `vdpbf16ps`.
//! The bits are the same, except that denormals are kept.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
#[cfg(target_arch = "x86_64")]
mod pack;
mod target;
mod widened;

use gemm::Parallelism;
use half::bf16;

use super::product::Matrix;
use super::rows::SharedRows;
use target::Target;

/// Most columns of a result for which narrow tiles are used: as many as a head's.
#[cfg(target_arch = "x86_64")]
const NARROW: usize = 64;

/// A strided view of a bfloat16 matrix.
pub type MatrixBf16<'a> = Matrix<'a, bf16>;

/// Terms that are added to a product before it is rounded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Begin<'a> {
    /// `[m]`, added to every row.
    pub bias: Option<&'a [bf16]>,
    /// `[n, m]`.
    pub residual: Option<&'a [bf16]>,
}

/// The output of a product: `[n, m]`, row-major without gaps.
#[derive(Debug)]
pub enum Out<'a> {
    /// Overwritten by the rounded product.
    Bf16 {
        /// `[n, m]`; its old contents are not read.
        data: &'a mut [bf16],
        /// Terms that are added to the product.
        begin: Option<Begin<'a>>,
    },
    /// Written in f32, the precision of the sums.
    F32 {
        /// `[n, m]`.
        data: &'a mut [f32],
        /// If set, the product is added to `data`; otherwise it overwrites `data` unread.
        add: bool,
    },
}

impl<'a> Out<'a> {
    fn into_target(self, n: usize, m: usize) -> Target<'a> {
        let check = |name: &str, got: usize, expected: usize| {
            assert_eq!(got, expected, "product_bf16: `{name}` has {got} elements, expected {expected} for {n} x {m}");
        };
        match self {
            Self::Bf16 { data, begin } => {
                let begin = begin.unwrap_or_default();
                check("out", data.len(), n * m);
                check("bias", begin.bias.map_or(m, <[bf16]>::len), m);
                check("residual", begin.residual.map_or(n * m, <[bf16]>::len), n * m);
                Target::Bf16 { out: SharedRows::new(data, m), begin, partial: None }
            }
            Self::F32 { data, add } => {
                check("out", data.len(), n * m);
                Target::F32 { out: SharedRows::new(data, m), add }
            }
        }
    }
}

/// Computes `a * b` into `out`, on the threads of the caller's pool, or on this one under `Parallelism::None`.
///
/// # Shapes
///
/// `a`: `[n, k]`; `b`: `[k, m]`; `out`: `[n, m]`.
///
/// # Panics
///
/// If the shapes do not match.
///
/// # Example
///
/// ```
/// # use zero_kernels::cpu::product_bf16::{MatrixBf16, Out, multiply};
/// # use half::bf16;
/// let [x, w] = [[1.0, 2.0], [3.0, 4.0]].map(|row| row.map(bf16::from_f32));
/// let mut out = [0.0];
/// let (x, w) = (MatrixBf16::new(&x, 1, 2), MatrixBf16::new(&w, 1, 2));
/// multiply(Out::F32 { data: &mut out, add: false }, x, w.transposed(), gemm::Parallelism::None);
/// assert_eq!(out, [11.0]);
/// ```
pub fn multiply(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>, threads: Parallelism) {
    assert_eq!(a.columns, b.rows, "the width of the left matrix is not the height of the right one");
    let target = out.into_target(a.rows, b.columns);
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(tiles) = amx::Amx::detect() {
        return blocks::multiply(tiles, target, a, b, threads);
    } else if let Some(tiles) = avx512::Avx512::<32>::detect()
        && b.columns <= NARROW
    {
        return blocks::multiply(tiles, target, a, b, threads);
    } else if let Some(tiles) = avx512::Avx512::<48>::detect() {
        return blocks::multiply(tiles, target, a, b, threads);
    }
    widened::multiply(pulp::Arch::new(), target, a, b, threads);
}

/// Returns whether this CPU has instructions for products of bfloat16.
pub fn is_native() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amx::Amx::detect().is_some() || avx512::Avx512::<48>::detect().is_some();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Returns the name of the instructions with which this CPU multiplies bfloat16 matrices, for display.
pub fn instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if amx::Amx::detect().is_some() {
        return "AMX";
    } else if avx512::Avx512::<48>::detect().is_some() {
        return "AVX512_BF16";
    }
    "conversion to fp32"
}

/// Runs `work` on every task, on the pool's threads if `threads` allows it and there are enough multiplications.
fn spread<T: Send>(multiplications: usize, threads: Parallelism, tasks: Vec<T>, work: impl Fn(T) + Sync + Send) {
    /// Multiplications that take as long as element-wise work on one element.
    const PER_ELEMENT: usize = 16;
    match threads {
        Parallelism::None => tasks.into_iter().for_each(work),
        Parallelism::Rayon(_) => super::parallel::spread(multiplications / PER_ELEMENT, tasks, work),
    }
}

/// Splits `0..len` into parts of `size`, the last one possibly smaller.
fn parts(len: usize, size: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..len).step_by(size).map(move |begin| begin..len.min(begin + size))
}

#[cfg(test)]
mod tests;
