//! Orthogonalization of a matrix by Newton-Schulz iterations, for the Muon optimizer: Jordan et al. 2024,
//! <https://kellerjordan.github.io/posts/muon/>.
//!
//! Values are bfloat16 between products, and products accumulate in fp32, as in `torch.optim.Muon`.

use half::bf16;

use super::buffer;
use super::half::{nearest, wide};
use super::linear;
use super::norm::sum_of_squares;
use super::parallel::{TASK, spread};
use super::product::Matrix;

/// Number of iterations, and the coefficients of the polynomial `a x + b x^3 + c x^5` of the singular values.
const STEPS: usize = 5;
const A: f32 = 3.4445;
const B: f32 = -4.775;
const C: f32 = 2.0315;
/// The smallest norm that a matrix is divided by.
const EPSILON: f32 = 1e-7;

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
    if rows < columns {
        return iterate(x, rows, columns);
    }
    // Of a square matrix the output side, the columns, is the smaller one, as in PyTorch, where it is the rows.
    let mut turned = transposed(x, rows, columns);
    iterate(&mut turned, columns, rows);
    x.copy_from_slice(&transposed(&turned, columns, rows));
}

/// Runs the iterations on a matrix with at most as many rows as columns.
fn iterate(x: &mut [f32], rows: usize, columns: usize) {
    map(x, |x| x);
    let norm = wide(nearest((sum_of_squares(x) as f32).sqrt())).max(wide(nearest(EPSILON)));
    map(x, |x| x / norm);
    let (mut gram, mut square, mut next) = (buffer(rows * rows), buffer(rows * rows), buffer(rows * columns));
    for _ in 0..STEPS {
        linear::forward(x, Matrix::new(x, rows, columns).transposed(), None, None, &mut gram);
        map(&mut gram, |x| x);
        linear::forward(&gram, Matrix::new(&gram, rows, rows), None, None, &mut square);
        combine(&mut gram, B, &square, C);
        linear::forward(&gram, Matrix::new(x, rows, columns), None, None, &mut next);
        combine(x, A, &next, 1.0);
    }
}

/// Applies `each` to all values, and rounds them to bfloat16.
fn map(x: &mut [f32], each: impl Fn(f32) -> f32 + Sync) {
    let len = x.len();
    spread(len, x.chunks_mut(TASK).collect(), |x: &mut [f32]| x.iter_mut().for_each(|x| *x = rounded(each(*x))));
}

/// Sets `x` to `a x + b y`, rounded to bfloat16.
fn combine(x: &mut [f32], a: f32, y: &[f32], b: f32) {
    let len = x.len();
    let tasks: Vec<_> = x.chunks_mut(TASK).zip(y.chunks(TASK)).collect();
    spread(len, tasks, |(x, y)| x.iter_mut().zip(y).for_each(|(x, y)| *x = rounded(a * *x + b * y)));
}

fn rounded(x: f32) -> f32 {
    let x: bf16 = nearest(x);
    wide(x)
}

/// Returns the transpose of a row-major matrix.
fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const TILE: usize = 32;
    let mut out = buffer(x.len());
    let tasks: Vec<_> = out.chunks_mut(TILE * rows).enumerate().collect();
    spread(x.len(), tasks, |(index, out): (usize, &mut [f32])| {
        for row in (0..rows).step_by(TILE) {
            for (column, out) in out.chunks_mut(rows).enumerate() {
                for (at, out) in out[row..rows.min(row + TILE)].iter_mut().enumerate() {
                    *out = x[(row + at) * columns + index * TILE + column];
                }
            }
        }
    });
    out
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
        let (mut wide, mut tall) = (x.clone(), transposed(&x, 20, 50));
        orthogonalize(&mut wide, 20, 50);
        orthogonalize(&mut tall, 50, 20);
        assert_eq!(transposed(&tall, 50, 20), wide);
    }

    #[test]
    fn nothing_stays_nothing() {
        let mut zeros = vec![0.0; 12];
        orthogonalize(&mut zeros, 3, 4);
        assert_eq!(zeros, [0.0; 12]);
        orthogonalize(&mut [], 0, 4);
    }
}
