//! A linear layer: product, bias and residual in one result.
//!
//! gemm adds to the contents of its destination, so the result is initialised with bias and residual.

use super::parallel::{BLOCK, gemm_threads, rows_of_task, spread};
use super::product::{Matrix, Write, multiply};
use super::reduce::{add, add_partials};
use super::{buffer, check_rows};

/// Computes `x * w + bias + residual`.
///
/// # Shapes
///
/// `x`: `[n, k]`; `w`: `[k, m]`, any strides; `bias`: `[m]`; `residual`, `out`: `[n, m]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn forward(x: &[f32], w: Matrix<'_>, bias: Option<&[f32]>, residual: Option<&[f32]>, out: &mut [f32]) {
    let (k, m) = (w.rows(), w.columns());
    let n = rows("out", out.len(), m);
    check_rows("linear", "x", x.len(), n, k);
    check_rows("linear", "bias", bias.map_or(m, <[f32]>::len), 1, m);
    check_rows("linear", "residual", residual.map_or(n * m, <[f32]>::len), n, m);
    let write = if bias.is_none() && residual.is_none() { Write::Over } else { Write::Add };
    if write == Write::Add && !out.is_empty() {
        let part = rows_of_task(m) * m;
        let mut residuals = residual.map(|residual| residual.chunks(part));
        let tasks: Vec<_> =
            out.chunks_mut(part).map(|out| (out, residuals.as_mut().and_then(Iterator::next))).collect();
        spread(n * m, tasks, |(out, residual)| begin(bias, residual, m, out));
    }
    multiply_rows(out, write, Matrix::new(x, n, k), w);
}

/// Computes the gradient of [`forward`] for `x`, given that of its result: `g` times the transpose of `w`.
///
/// # Shapes
///
/// `g`: `[n, m]`; `w`: `[k, m]`, any strides; `dx`: `[n, k]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn backward_x(g: &[f32], w: Matrix<'_>, dx: &mut [f32]) {
    let (k, m) = (w.rows(), w.columns());
    let n = rows("dx", dx.len(), k);
    check_rows("linear", "g", g.len(), n, m);
    multiply_rows(dx, Write::Over, Matrix::new(g, n, m), w.transposed());
}

/// Computes the gradient of [`forward`] for `w` of `k` rows: the transpose of `x` times `g`.
///
/// # Shapes
///
/// `x`: `[n, k]`; `g`: `[n, m]`; `dw`: `[k, m]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn backward_w(x: &[f32], g: &[f32], k: usize, dw: &mut [f32]) {
    let n = rows("x", x.len(), k);
    let m = dw.len().checked_div(k).unwrap_or(0);
    check_rows("linear", "dw", dw.len(), k, m);
    check_rows("linear", "g", g.len(), n, m);
    multiply(dw, Write::Over, Matrix::new(x, n, k).transposed(), Matrix::new(g, n, m), 1.0, gemm_threads());
}

/// Computes the gradient of [`forward`] for `bias`: the sum of the rows of `g`.
///
/// # Shapes
///
/// `g`: `[n, m]`; `db`: `[m]`.
///
/// # Panics
///
/// If the lengths do not match.
pub fn backward_bias(g: &[f32], db: &mut [f32]) {
    let m = db.len();
    rows("g", g.len(), m);
    if m == 0 {
        return;
    }
    let mut partials = vec![0f32; g.len().div_ceil(BLOCK * m) * m];
    let tasks: Vec<_> = g.chunks(BLOCK * m).zip(partials.chunks_mut(m)).collect();
    spread(g.len(), tasks, |(g, sum)| add_rows(g, sum));
    add_partials(&partials, db);
}

/// Computes `a * b` into `out`, through its transpose if that is faster. The bits are the same, since gemm splits the depth
/// by its length alone.
///
/// gemm copies the right matrix of a row-major result, across its columns. If the columns are contiguous, the copy takes
/// half as long as the product with a hundred rows of `a`. For the transposed product gemm copies the other matrix, and
/// reads this one in place. With more rows that is faster if columns are a multiple of a page apart, because data read
/// together then shares a few sets of the cache.
pub(super) fn multiply_rows(out: &mut [f32], write: Write, a: Matrix<'_>, b: Matrix<'_>) {
    let (n, k, m) = (a.rows(), a.columns(), b.columns());
    if n == 1 && a.column_stride == 1 && [b.row_stride, b.column_stride].contains(&1) {
        multiply_row(out, write, &a.data[..k], b);
        return;
    }
    let gains = b.row_stride == 1 && (n <= FEW_ROWS || b.has_columns_pages_apart() && 2 * n <= m && m <= k);
    if gains && n.min(m) >= TILE {
        multiply_turned(out, write, a, b);
    } else {
        multiply(out, write, a, b, 1.0, gemm_threads());
    }
}

/// Computes [`multiply`] through the transpose.
fn multiply_turned(out: &mut [f32], write: Write, a: Matrix<'_>, b: Matrix<'_>) {
    let (n, m) = (a.rows(), b.columns());
    let mut turned = buffer(n * m);
    if write == Write::Add {
        turn_rows(out, n, m, &mut turned);
    }
    multiply(&mut turned, write, b.transposed(), a.transposed(), 1.0, gemm_threads());
    turn_rows(&turned, m, n, out);
}

/// Writes the transpose of `from`, `[n, m]`, to `out`.
fn turn_rows(from: &[f32], n: usize, m: usize, out: &mut [f32]) {
    let tasks: Vec<_> = out.chunks_mut(TILE * n).enumerate().collect();
    spread(n * m, tasks, |(block, out)| turn(from, m, block * TILE, n, out));
}

/// Computes `x * b` into `out`, or adds it to `out`. For a single row, gemm reads the matrix on one thread, element by element.
fn multiply_row(out: &mut [f32], write: Write, x: &[f32], b: Matrix<'_>) {
    let (k, m) = (b.rows(), b.columns());
    let width = if b.column_stride == 1 { ROW_PART } else { ROW_PART.div_ceil(k.max(1)) };
    let tasks: Vec<_> = out.chunks_mut(width).enumerate().collect();
    spread(k * m, tasks, |(part, out)| {
        if write == Write::Over {
            out.fill(0.0);
        }
        if b.column_stride == 1 {
            add_scaled_rows(x, &b.data[part * width..], b.row_stride, out);
        } else {
            add_products(x, &b.data[part * width * b.column_stride..], b.column_stride, out);
        }
    });
}

/// Columns per task of [`multiply_row`] if they are contiguous, otherwise elements.
const ROW_PART: usize = 1 << 10;

/// Partial sums of a dot product. Fixed, since they determine its bits.
const LANES: usize = 64;

vectorised! {
    /// Adds rows of `b`, `stride` elements apart, times the elements of `x`.
    fn add_scaled_rows<'a>(x: &'a [f32], b: &'a [f32], stride: usize, out: &'a mut [f32]) {
        let width = out.len();
        let row = |i: usize| &b[i * stride..][..width];
        let (fours, rest) = x.as_chunks::<4>();
        for (i, x) in fours.iter().enumerate() {
            let rows = [row(4 * i), row(4 * i + 1), row(4 * i + 2), row(4 * i + 3)];
            for (j, out) in out.iter_mut().enumerate() {
                *out += (x[0] * rows[0][j] + x[1] * rows[1][j]) + (x[2] * rows[2][j] + x[3] * rows[3][j]);
            }
        }
        for (i, x) in rest.iter().enumerate() {
            let row = row(4 * fours.len() + i);
            out.iter_mut().zip(row).for_each(|(out, b)| *out += x * b);
        }
    }

    /// Adds the products of `x` with the columns of `b`, which are contiguous and `stride` elements apart.
    fn add_products<'a>(x: &'a [f32], b: &'a [f32], stride: usize, out: &'a mut [f32]) {
        for (j, out) in out.iter_mut().enumerate() {
            let column = &b[j * stride..][..x.len()];
            let mut sums = [0f32; LANES];
            let ((x, x_rest), (b, b_rest)) = (x.as_chunks::<LANES>(), column.as_chunks::<LANES>());
            for (x, b) in x.iter().zip(b) {
                for lane in 0..LANES {
                    sums[lane] += x[lane] * b[lane];
                }
            }
            let rest: f32 = x_rest.iter().zip(b_rest).map(|(x, b)| x * b).sum();
            *out += sums.iter().sum::<f32>() + rest;
        }
    }
}

/// Rows up to which a product is transposed if columns of its right matrix are contiguous.
const FEW_ROWS: usize = 256;

/// Rows, and columns, per tile of [`turn`]: a cache line of each.
const TILE: usize = 16;

vectorised! {
    /// Writes up to [`TILE`] rows of `out` (`[n, m]`), from row `first` on, from columns of `from` (`[m, n]`).
    fn turn<'a>(from: &'a [f32], n: usize, first: usize, m: usize, out: &'a mut [f32]) {
        let rows = out.len() / m;
        for column in (0..m).step_by(TILE) {
            let width = TILE.min(m - column);
            let mut tile = [[0f32; TILE]; TILE];
            for j in 0..width {
                let at = (column + j) * n + first;
                for (row, value) in tile.iter_mut().zip(&from[at..at + rows]) {
                    row[j] = *value;
                }
            }
            for (out, tile) in out.chunks_exact_mut(m).zip(&tile) {
                out[column..column + width].copy_from_slice(&tile[..width]);
            }
        }
    }

    /// Initialises rows of a result with bias and residual.
    fn begin<'a>(bias: Option<&'a [f32]>, residual: Option<&'a [f32]>, m: usize, out: &'a mut [f32]) {
        match (bias, residual) {
            (Some(bias), Some(residual)) => {
                for (out, residual) in out.chunks_exact_mut(m).zip(residual.chunks_exact(m)) {
                    for ((out, residual), bias) in out.iter_mut().zip(residual).zip(bias) {
                        *out = residual + bias;
                    }
                }
            }
            (Some(bias), None) => out.chunks_exact_mut(m).for_each(|out| out.copy_from_slice(bias)),
            (None, Some(residual)) => out.copy_from_slice(residual),
            (None, None) => {}
        }
    }

    /// Adds a block of rows to its partial sum, zero at first.
    fn add_rows<'a>(g: &'a [f32], sum: &'a mut [f32]) {
        g.chunks_exact(sum.len()).for_each(|g| add(g, sum));
    }
}

/// Returns the number of rows of `width` in `len` elements.
fn rows(name: &str, len: usize, width: usize) -> usize {
    let n = len.checked_div(width).unwrap_or(0);
    assert_eq!(len, n * width, "linear: `{name}` has {len} elements, expected a whole number of rows of {width}");
    n
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, assert_differences, assert_panics, numbers, same_bits, wide};

    fn product(a: &[f64], b: &[f64], n: usize, k: usize, m: usize) -> Vec<f64> {
        (0..n * m).map(|i| (0..k).map(|l| a[i / m * k + l] * b[l * m + i % m]).sum()).collect()
    }

    fn transpose<T: Copy>(a: &[T], rows: usize, columns: usize) -> Vec<T> {
        (0..rows * columns).map(|i| a[i % rows * columns + i / rows]).collect()
    }

    #[test]
    fn agrees_with_f64_for_odd_sizes() {
        for (n, k, m) in [
            (1, 1, 1),
            (3, 7, 64),
            (17, 100, 7),
            (33, 64, 100),
            (1, 100, 64),
            (33, 1, 7),
            (70, 33, 129),
            (33, 150, 77),
            (33, 77, 150),
            // One row, over several tasks of either kind.
            (1, 131, 2100),
        ] {
            let (x, w, g) = (numbers(n * k, 1), numbers(k * m, 2), numbers(n * m, 5));
            let (bias, residual) = (numbers(m, 3), numbers(n * m, 4));
            let (x64, w64, g64) = (wide(&x), wide(&w), wide(&g));
            let flat = transpose(&w, k, m);
            for (with_bias, with_residual) in [(true, true), (true, false), (false, true), (false, false)] {
                let mut expected = product(&x64, &w64, n, k, m);
                for (i, value) in expected.iter_mut().enumerate() {
                    *value += if with_bias { f64::from(bias[i % m]) } else { 0.0 };
                    *value += if with_residual { f64::from(residual[i]) } else { 0.0 };
                }
                for w in [Matrix::new(&w, k, m), Matrix::new(&flat, m, k).transposed()] {
                    let mut out = vec![f32::NAN; n * m];
                    if with_bias || with_residual {
                        out.fill(9.0);
                    }
                    let (bias, residual) = (with_bias.then_some(&bias[..]), with_residual.then_some(&residual[..]));
                    forward(&x, w, bias, residual, &mut out);
                    assert_close("out", &out, &expected, 1e-5);
                }
            }
            let (mut dx, mut dw, mut db) = (vec![f32::NAN; n * k], vec![f32::NAN; k * m], vec![f32::NAN; m]);
            backward_x(&g, Matrix::new(&w, k, m), &mut dx);
            backward_w(&x, &g, k, &mut dw);
            backward_bias(&g, &mut db);
            assert_close("dx", &dx, &product(&g64, &transpose(&w64, k, m), n, m, k), 1e-5);
            assert_close("dw", &dw, &product(&transpose(&x64, n, k), &g64, k, n, m), 1e-5);
            assert_close("db", &db, &product(&vec![1.0; n], &g64, 1, n, m), 1e-5);
            let loss =
                |x: &[f64], w: &[f64]| -> f64 { product(x, w, n, k, m).iter().zip(&g64).map(|(y, g)| y * g).sum() };
            assert_differences("x", &x, &dx, |x| loss(x, &w64));
            assert_differences("w", &w, &dw, |w| loss(&x64, w));
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        // Through the transpose, and with columns that are split.
        for m in [1024, 1000] {
            let (n, k) = (129, 270);
            let (x, w, g) = (numbers(n * k, 1), numbers(k * m, 2), numbers(n * m, 5));
            same_bits(|| {
                let (mut out, mut dx) = (vec![0.0; n * m], vec![0.0; n * k]);
                let (mut dw, mut db) = (vec![0.0; k * m], vec![0.0; m]);
                forward(&x, Matrix::new(&w, k, m), Some(&w[..m]), Some(&g), &mut out);
                backward_x(&g, Matrix::new(&w, k, m), &mut dx);
                backward_w(&x, &g, k, &mut dw);
                backward_bias(&g, &mut db);
                [out, dx, dw, db].concat()
            });
        }
    }

    #[test]
    fn a_product_that_is_turned_has_the_same_bits() {
        // gemm parts a depth of more than 512.
        for (n, k, m) in
            [(16, 1100, 16), (17, 40, 530), (100, 1600, 96), (256, 2, 70), (40, 530, 17), (300, 1100, 1024)]
        {
            let (a, b, begin) = (numbers(n * k, 1), numbers(k * m, 2), numbers(n * m, 3));
            let (a, b) = (Matrix::new(&a, n, k), Matrix::new(&b, m, k).transposed());
            for write in [Write::Over, Write::Add] {
                let bits = |work: fn(&mut [f32], Write, Matrix<'_>, Matrix<'_>)| {
                    let out = same_bits(|| {
                        let mut out = begin.clone();
                        work(&mut out, write, a, b);
                        out
                    });
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let direct = bits(|out, write, a, b| multiply(out, write, a, b, 1.0, gemm_threads()));
                assert_eq!(bits(multiply_turned), direct, "{n} x {k} x {m}, {write:?}");
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit_of_one_row() {
        let (k, m) = (270, 4099);
        let (x, w) = (numbers(k, 1), numbers(k * m, 2));
        for w in [Matrix::new(&w, k, m), Matrix::new(&w, m, k).transposed()] {
            same_bits(|| {
                let mut out = vec![0.0; m];
                forward(&x, w, None, None, &mut out);
                out
            });
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_named() {
        let w = [0.0; 6];
        let w = Matrix::new(&w, 2, 3);
        assert_panics(&["`x` has 3 elements, expected 2 rows of 2"], || {
            forward(&[0.0; 3], w, None, None, &mut [0.0; 6])
        });
        assert_panics(&["`bias` has 2 elements"], || forward(&[0.0; 4], w, Some(&[0.0; 2]), None, &mut [0.0; 6]));
        assert_panics(&["`residual` has 5 elements"], || forward(&[0.0; 4], w, None, Some(&[0.0; 5]), &mut [0.0; 6]));
        assert_panics(&["`g` has 5 elements, expected 2 rows of 3"], || backward_x(&[0.0; 5], w, &mut [0.0; 4]));
        assert_panics(&["`g` has 5 elements", "rows of 3"], || backward_bias(&[0.0; 5], &mut [0.0; 3]));
        assert_panics(&["ends beyond its 6 elements"], || assert_eq!(Matrix::strided(&[0.0; 6], 2, 3, 4, 1).rows(), 2));
        // A sum that overflows is beyond any end.
        assert_panics(&["ends beyond its 6 elements"], || {
            assert_eq!(Matrix::strided(&[0.0; 6], 3, 1, 1 << (usize::BITS - 1), 1).rows(), 3)
        });
    }
}
