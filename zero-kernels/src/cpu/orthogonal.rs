//! Orthogonalization of a matrix by Newton-Schulz iterations, for the Muon optimizer: Jordan et al. 2024,
//! <https://kellerjordan.github.io/posts/muon/>.
//!
//! Values are bfloat16 between products, and products accumulate in fp32, as in `torch.optim.Muon`.

use half::bf16;

use super::half::{nearest, wide};
use super::norm::sum_of_squares_of;
use super::parallel::{TASK, gemm_threads, spread};
use super::product_bf16::{MatrixBf16, Out, multiply};
use super::{buffer, buffer_of};

/// Number of iterations, and the coefficients of the polynomial `a x + b x^3 + c x^5` of the singular values.
const STEPS: usize = 5;
const A: f32 = 3.4445;
const B: f32 = -4.775;
const C: f32 = 2.0315;
/// The smallest norm that a matrix is divided by.
const EPSILON: f32 = 1e-7;
/// Panels of a symmetric product, of which only those on and above the diagonal are computed.
const PANELS: usize = 6;

/// Replaces `x`, `[rows, columns]`, by a nearly orthogonal matrix with the same singular vectors: its singular values are about 0.7 to 1.2.
/// A matrix that is 0 stays 0.
///
/// # Panics
///
/// If the lengths do not match.
pub fn orthogonalize(x: &mut [f32], rows: usize, columns: usize) {
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
    iterate(&mut short, sizes);
    match is_turned {
        true => transpose(&short, sizes, x, wide),
        false => over(x, &short, |_, x| wide(x)),
    }
}

/// Runs the iterations on a matrix with at most as many rows as columns.
fn iterate(x: &mut [bf16], [rows, columns]: [usize; 2]) {
    let norm = wide(nearest((sum_of_squares_of(x) as f32).sqrt())).max(wide(nearest(EPSILON)));
    x.iter_mut().for_each(|x| *x = nearest(wide(*x) / norm));
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

    #[test]
    fn rows_or_columns_are_nearly_orthonormal() {
        for (rows, columns) in [(5, 12), (40, 7), (33, 33), (70, 64)] {
            let mut x = matrix(rows, columns);
            orthogonalize(&mut x, rows, columns);
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
        let x = matrix(20, 50);
        let (mut wide, mut tall) = (x.clone(), transposed(&x, [20, 50]));
        orthogonalize(&mut wide, 20, 50);
        orthogonalize(&mut tall, 50, 20);
        assert_eq!(transposed(&tall, [50, 20]), wide);
    }

    #[test]
    fn nothing_stays_nothing() {
        let mut zeros = vec![0.0; 12];
        orthogonalize(&mut zeros, 3, 4);
        assert_eq!(zeros, [0.0; 12]);
        orthogonalize(&mut [], 0, 4);
    }
}
