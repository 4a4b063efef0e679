//! Sums and maxima in independent lanes, and sums over rows.

#![allow(clippy::needless_range_loop)] // An index for several arrays reads better here than zipped iterators.

use super::half::Number;
use super::parallel::spread;

/// Independent partial results of a reduction over a row, so that it vectorises: one register of the widest instruction set.
const LANES: usize = 16;

/// Full registers of a row are processed in pairs, each with its own partial results: one dependent addition takes as long
/// as four independent ones.
const STEP: usize = 2 * LANES;

// The loops below keep to a form that the compiler turns into vectors: fixed lengths, lanes never indexed by a
// variable that it cannot unroll, and what is left of a row apart from them.

/// Returns the sum of the lanes, in a fixed tree.
#[inline(always)]
fn sum_lanes(a: [f32; LANES], b: [f32; LANES], rest: f32) -> f32 {
    let mut sum = [0f32; LANES];
    for l in 0..LANES {
        sum[l] = a[l] + b[l];
    }
    let mut half = [0f32; LANES / 2];
    for l in 0..LANES / 2 {
        half[l] = sum[l] + sum[l + LANES / 2];
    }
    let mut quarter = [0f32; LANES / 4];
    for l in 0..LANES / 4 {
        quarter[l] = half[l] + half[l + LANES / 4];
    }
    (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]) + rest
}

/// Returns the larger number, as a select: `f32::max` also handles NaN, and compiles to more instructions.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Folds `term` over the elements of rows of equal length, in lanes.
#[inline(always)]
pub(super) fn sum_over<T: Number, const ROWS: usize>(
    rows: [&[T]; ROWS],
    term: impl Fn([f32; ROWS], f32) -> f32,
) -> f32 {
    let (mut a, mut b) = ([0f32; LANES], [0f32; LANES]);
    let parts = rows.map(|row| row[..rows[0].len()].as_chunks::<STEP>());
    for i in 0..parts[0].0.len() {
        let values = parts.map(|(whole, _)| &whole[i]);
        for l in 0..LANES {
            a[l] = term(values.map(|values| values[l].load()), a[l]);
        }
        for l in 0..LANES {
            b[l] = term(values.map(|values| values[LANES + l].load()), b[l]);
        }
    }
    let mut rest = 0.0;
    for i in 0..parts[0].1.len() {
        rest = term(parts.map(|(_, rest)| rest[i].load()), rest);
    }
    sum_lanes(a, b, rest)
}

/// Replaces each value of a row by `f` of it, and returns their sum.
#[inline(always)]
pub(super) fn replace_and_sum(row: &mut [f32], f: impl Fn(f32) -> f32) -> f32 {
    // Two passes over data in the first-level cache: a single one would not be vectorised.
    let mut sum = 0.0;
    for part in row.chunks_mut(1 << 11) {
        part.iter_mut().for_each(|value| *value = f(*value));
        sum += sum_over([part], |[value], sum| sum + value);
    }
    sum
}

/// Returns the largest value of a row.
#[inline(always)]
pub(super) fn largest(row: &[f32]) -> f32 {
    let (mut a, mut b) = ([f32::NEG_INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    let (whole, rest) = row.as_chunks::<STEP>();
    for values in whole {
        for l in 0..LANES {
            a[l] = larger(a[l], values[l]);
        }
        for l in 0..LANES {
            b[l] = larger(b[l], values[LANES + l]);
        }
    }
    let rest = rest.iter().copied().fold(f32::NEG_INFINITY, larger);
    a.into_iter().chain(b).fold(rest, larger)
}

/// Columns per task of [`add_partials`].
const COLUMNS: usize = 1 << 10;

/// Writes the sum of the rows of `partials` (`[blocks, out.len()]`), in order, to `out`.
pub(super) fn add_partials(partials: &[f32], out: &mut [f32]) {
    let width = out.len();
    let tasks: Vec<_> = out.chunks_mut(COLUMNS).enumerate().collect();
    spread(partials.len(), tasks, |(task, out)| add_columns(partials, width, task * COLUMNS, out));
}

vectorised! {
    fn add_columns<'a>(partials: &'a [f32], width: usize, first: usize, out: &'a mut [f32]) {
        out.fill(0.0);
        for row in partials.chunks_exact(width) {
            add(&row[first..first + out.len()], out);
        }
    }
}

/// Adds a row to `sum`.
#[inline(always)]
pub(super) fn add(row: &[f32], sum: &mut [f32]) {
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum += value;
    }
}
