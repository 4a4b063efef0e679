//! Orthogonalization of a matrix by Newton-Schulz iterations, for the Muon optimizer: Jordan et al. 2024,
//! <https://kellerjordan.github.io/posts/muon/>.
//!
//! Values are bfloat16 between products, and products accumulate in fp32, as in `torch.optim.Muon`.
//!
//! Gram Newton-Schulz, <https://tridao.me/blog/2026/gram-newton-schulz/>, iterates on the square `R = x x^T` instead of the matrix `x`. An
//! iteration multiplies `x` from the left by a polynomial of `R`; `Q` is the product of these polynomials. `Q`, `R` and the polynomials are
//! symmetric, so half of each of their products is computed. Every two iterations `x` becomes `Q x`, and `R` is computed again: the rounding
//! errors of `R` grow with each iteration, and after a second update of `R` the result of a matrix that is nearly of rank 1 would diverge.

use half::bf16;

use super::half::{nearest, wide};
use super::norm::sum_of_squares_of;
use super::parallel::{TASK, gemm_threads, spread};
use super::product_bf16::{MatrixBf16, Out, multiply};
use super::{buffer, buffer_of};
use crate::rule::NewtonSchulz;

/// Number of iterations, and the coefficients of the polynomial `a x + b x^3 + c x^5` of the singular values.
const STEPS: usize = 5;
const A: f32 = 3.4445;
const B: f32 = -4.775;
const C: f32 = 2.0315;
/// Iterations of the Gram variant on one `R`.
const RESTART: usize = 2;
/// Columns per row from which the Gram variant is used. With fewer, it saves little, and its squares would take more memory.
const WIDE: usize = 2;
/// The smallest norm that a matrix is divided by.
const EPSILON: f32 = 1e-7;
/// Panels of a symmetric product, of which only those on and above the diagonal are computed.
const PANELS: usize = 6;

/// Replaces `x`, `[rows, columns]`, by a nearly orthogonal matrix with the same singular vectors: its singular values are about 0.7 to 1.2.
/// A matrix that is 0 stays 0. [`NewtonSchulz::Gram`] computes a matrix with less than twice as many columns as rows, or the reverse, like
/// [`NewtonSchulz::Standard`].
///
/// # Panics
///
/// If the lengths do not match.
pub fn orthogonalize(x: &mut [f32], rows: usize, columns: usize, method: NewtonSchulz) {
    assert_eq!(x.len(), rows * columns, "wrong number of elements for a matrix of {rows} x {columns}");
    if x.is_empty() {
        return;
    }
    // A square matrix is turned, as PyTorch stores it.
    let is_turned = rows >= columns;
    let sizes = if is_turned { [columns, rows] } else { [rows, columns] };
    let mut short = buffer_of::<bf16>(x.len());
    match is_turned {
        true => transpose(x, [rows, columns], &mut short, nearest),
        false => over(&mut short, x, |_, x| nearest(x)),
    }
    let norm = wide(nearest((sum_of_squares_of(&short) as f32).sqrt())).max(wide(nearest(EPSILON)));
    short.iter_mut().for_each(|x| *x = nearest(wide(*x) / norm));
    match method {
        NewtonSchulz::Gram if sizes[1] >= WIDE * sizes[0] => iterate_on_gram(&mut short, sizes),
        _ => iterate(&mut short, sizes),
    }
    match is_turned {
        true => transpose(&short, sizes, x, wide),
        false => over(x, &short, |_, x| wide(x)),
    }
}

/// Runs the iterations on a matrix with at most as many rows as columns.
fn iterate(x: &mut [bf16], [rows, columns]: [usize; 2]) {
    let (mut gram, mut update) = (buffer_of::<bf16>(rows * rows), buffer_of::<bf16>(rows * rows));
    let mut product = buffer(rows * columns);
    for _ in 0..STEPS {
        let whole = MatrixBf16::new(x, rows, columns);
        symmetric(whole, whole.transposed(), &mut product, &mut gram, |_, product| product);
        let square = MatrixBf16::new(&gram, rows, rows);
        symmetric(square, square, &mut product, &mut update, |at, product| B * wide(gram[at]) + C * product);
        let out = Out::F32 { data: &mut product, add: false };
        multiply(out, MatrixBf16::new(&update, rows, rows), MatrixBf16::new(x, rows, columns), gemm_threads());
        over(x, &product, |x, product| nearest(A * wide(x) + product));
    }
}

/// Same as [`iterate`], by the Gram matrix.
fn iterate_on_gram(x: &mut [bf16], [rows, columns]: [usize; 2]) {
    let [mut gram, mut z, mut q, mut next] = [(); 4].map(|()| buffer_of::<bf16>(rows * rows));
    let mut product = buffer(rows * columns);
    for begin in (0..STEPS).step_by(RESTART) {
        let steps = RESTART.min(STEPS - begin);
        let whole = MatrixBf16::new(x, rows, columns);
        symmetric(whole, whole.transposed(), &mut product, &mut gram, |_, product| product);
        for step in 0..steps {
            let r = MatrixBf16::new(&gram, rows, rows);
            symmetric(r, r, &mut product, &mut z, |at, product| B * wide(gram[at]) + C * product);
            let z = MatrixBf16::new(&z, rows, rows);
            // Returns `(a + z) of`.
            let mut apply = |of: &[bf16], out: &mut [bf16]| {
                symmetric(z, MatrixBf16::new(of, rows, rows), &mut product, out, |at, product| {
                    A * wide(of[at]) + product
                });
            };
            if step == 0 {
                q.copy_from_slice(z.data);
                q.iter_mut().step_by(rows + 1).for_each(|q| *q = nearest(A + wide(*q)));
            } else {
                apply(&q, &mut next);
                std::mem::swap(&mut q, &mut next);
            }
            if step + 1 < steps {
                apply(&gram, &mut next);
                apply(&next, &mut gram);
            }
        }
        let out = Out::F32 { data: &mut product, add: false };
        multiply(out, MatrixBf16::new(&q, rows, rows), MatrixBf16::new(x, rows, columns), gemm_threads());
        over(x, &product, |_, product| nearest(product));
    }
}

/// Writes a symmetric product `left * right` to `out`, `[rows, rows]`. `each` gives an element from its index and the product's. Half of it
/// is computed, by panels: both halves have the same bits.
fn symmetric(
    left: MatrixBf16<'_>,
    right: MatrixBf16<'_>,
    product: &mut [f32],
    out: &mut [bf16],
    each: impl Fn(usize, f32) -> f32,
) {
    let rows = left.rows();
    let height = rows.div_ceil(PANELS).next_multiple_of(16);
    for begin in (0..rows).step_by(height) {
        let (height, width) = (height.min(rows - begin), rows - begin);
        let product = &mut product[..height * width];
        let data = Out::F32 { data: product, add: false };
        multiply(data, left.rows_from(begin, height), right.columns_from(begin, width), gemm_threads());
        for (row, product) in (begin..).zip(product.chunks(width)) {
            // The panel holds both halves of its square on the diagonal.
            for (column, &product) in (row..).zip(&product[row - begin..]) {
                let value = nearest(each(row * rows + column, product));
                out[row * rows + column] = value;
                out[column * rows + row] = value;
            }
        }
    }
}

/// Sets each element of `to` from itself and that of `from`.
fn over<T: Copy + Send, U: Copy + Sync>(to: &mut [T], from: &[U], each: impl Fn(T, U) -> T + Sync + Send) {
    let tasks: Vec<_> = to.chunks_mut(TASK).zip(from.chunks(TASK)).collect();
    spread(from.len(), tasks, |(to, from)| to.iter_mut().zip(from).for_each(|(to, from)| *to = each(*to, *from)));
}

/// Writes the transpose of a row-major matrix to `out`.
fn transpose<T: Copy + Sync, U: Send>(
    x: &[T],
    [rows, columns]: [usize; 2],
    out: &mut [U],
    each: impl Fn(T) -> U + Sync,
) {
    const TILE: usize = 32;
    let tasks: Vec<_> = out.chunks_mut(TILE * rows).enumerate().collect();
    spread(x.len(), tasks, |(index, out): (usize, &mut [U])| {
        for row in (0..rows).step_by(TILE) {
            for (column, out) in out.chunks_mut(rows).enumerate() {
                for (at, out) in out[row..rows.min(row + TILE)].iter_mut().enumerate() {
                    *out = each(x[(row + at) * columns + index * TILE + column]);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, columns: usize) -> Vec<f32> {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..rows * columns).map(|_| next()).collect()
    }

    fn transposed(x: &[f32], sizes: [usize; 2]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        transpose(x, sizes, &mut out, |x| x);
        out
    }

    /// Returns the result in f64 for a matrix with at most as many rows as columns, and without rounding.
    fn exact(x: &[f32], [rows, columns]: [usize; 2]) -> Vec<f64> {
        let product = |a: &[f64], b: &dyn Fn(usize, usize) -> f64, width: usize| -> Vec<f64> {
            let row = |at: usize| &a[at / width * (a.len() / rows)..][..a.len() / rows];
            (0..rows * width).map(|at| row(at).iter().enumerate().map(|(k, a)| a * b(k, at % width)).sum()).collect()
        };
        let norm = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x) / norm).collect();
        let [a, b, c] = [A, B, C].map(f64::from);
        for _ in 0..STEPS {
            let gram = product(&x, &|k, row| x[row * columns + k], rows);
            let square = product(&gram, &|k, row| gram[k * rows + row], rows);
            let update: Vec<f64> = gram.iter().zip(square).map(|(gram, square)| b * gram + c * square).collect();
            let added = product(&update, &|k, column| x[k * columns + column], columns);
            x.iter_mut().zip(added).for_each(|(x, added)| *x = a * *x + added);
        }
        x
    }

    /// Sums of rows whose norms fall from 1 to 1e-5: the singular values differ as much.
    fn ill_conditioned(rows: usize, columns: usize) -> Vec<f32> {
        let (factors, terms) = (matrix(rows, rows), matrix(columns, rows));
        let size = |k: usize| 1e-5_f32.powf(k as f32 / rows as f32);
        let element = |row: usize, column: usize| -> f32 {
            (0..rows).map(|k| size(k) * factors[row * rows + k] * terms[column * rows + k]).sum()
        };
        (0..rows * columns).map(|at| element(at / columns, at % columns)).collect()
    }

    #[test]
    fn the_gram_variant_is_as_close_to_exact_iterations_as_the_standard_one() {
        for (rows, columns) in [(24, 96), (48, 160), (30, 61), (64, 256)] {
            for x in [matrix(rows, columns), ill_conditioned(rows, columns)] {
                let expected = exact(&x, [rows, columns]);
                let apart = |method| {
                    let mut x = x.clone();
                    orthogonalize(&mut x, rows, columns, method);
                    let error: f64 = x.iter().zip(&expected).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum();
                    (error / expected.iter().map(|y| y * y).sum::<f64>()).sqrt()
                };
                let (gram, standard) = (apart(NewtonSchulz::Gram), apart(NewtonSchulz::Standard));
                println!("{rows} x {columns}: gram {gram:.1e}, standard {standard:.1e}");
                assert!(
                    gram < 0.03 || gram < 1.1 * standard,
                    "{rows} x {columns}: gram {gram:.1e}, standard {standard:.1e}"
                );
            }
        }
    }

    #[test]
    fn the_gram_variant_is_stable_for_matrices_of_nearly_rank_1() {
        for rows in [2, 3, 4, 8, 16] {
            let columns = 4 * rows;
            for seed in 0..100 {
                let noise = 0.1 * 0.95_f32.powi(seed as i32);
                let all = matrix(rows * columns + 7 * seed, 1);
                let (x, first) = (&all[7 * seed..], &all[..columns]);
                let mut x: Vec<f32> = x.iter().enumerate().map(|(at, x)| first[at % columns] + noise * x).collect();
                orthogonalize(&mut x, rows, columns, NewtonSchulz::Gram);
                // A row's norm is at most the largest singular value.
                let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
                let largest = x.chunks(columns).map(norm).fold(0.0, f32::max);
                assert!(largest < 1.3, "{rows} x {columns}, noise {noise}: a row's norm is {largest}");
            }
        }
        let mut x = [0.707_031_25, 0.0, 0.0, 0.0, 0.703_125, 0.046_875, 0.0, 0.0];
        orthogonalize(&mut x, 2, 4, NewtonSchulz::Gram);
        assert!(x.iter().all(|x| x.abs() < 1.3), "{x:?}");
    }

    #[test]
    fn rows_or_columns_are_nearly_orthonormal() {
        let cases = [(5, 12), (40, 7), (33, 33), (70, 64)];
        for (method, (rows, columns)) in [NewtonSchulz::Standard, NewtonSchulz::Gram]
            .into_iter()
            .flat_map(|method| cases.map(|sizes| (method, sizes)))
        {
            let mut x = matrix(rows, columns);
            orthogonalize(&mut x, rows, columns, method);
            let at = |row: usize, column: usize| f64::from(x[row * columns + column]);
            let (short, long) = (rows.min(columns), rows.max(columns));
            let along = |i: usize, j: usize| if rows < columns { at(i, j) } else { at(j, i) };
            for i in 0..short {
                for j in 0..short {
                    let product: f64 = (0..long).map(|k| along(i, k) * along(j, k)).sum();
                    let range = if i == j { 0.3..1.6 } else { -0.45..0.45 };
                    assert!(range.contains(&product), "{rows} x {columns}: rows {i} and {j}: {product}");
                }
            }
        }
    }

    #[test]
    fn a_transpose_gives_the_transposed_result() {
        for method in [NewtonSchulz::Standard, NewtonSchulz::Gram] {
            let x = matrix(20, 50);
            let (mut wide, mut tall) = (x.clone(), transposed(&x, [20, 50]));
            orthogonalize(&mut wide, 20, 50, method);
            orthogonalize(&mut tall, 50, 20, method);
            assert_eq!(transposed(&tall, [50, 20]), wide);
        }
    }

    #[test]
    fn nothing_stays_nothing() {
        for method in [NewtonSchulz::Standard, NewtonSchulz::Gram] {
            let mut zeros = vec![0.0; 12];
            orthogonalize(&mut zeros, 2, 6, method);
            assert_eq!(zeros, [0.0; 12]);
            orthogonalize(&mut [], 0, 4, method);
        }
    }
}
