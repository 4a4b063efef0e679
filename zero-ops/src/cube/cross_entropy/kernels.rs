//! The kernels of cross-entropy.

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use cubecl::prelude::*;

use crate::cube::rows::{Extent, HEIGHT, Strided, over_cube, own, read, share_of_cap};

/// Lower than every logit, and finite.
const LOWEST: f32 = f32::MIN;

/// `counted`: number of `targets` that are not ignored, or 1 if there are none.
#[cube(launch_unchecked)]
pub(super) fn count_kernel<I: Int>(
    targets: &Array<I>,
    counted: &mut Array<f32>,
    rows: usize,
    ignored: InputScalar,
    #[comptime] is_any_ignored: bool,
    #[comptime] units: usize,
    #[define(I)] _dtype: StorageType,
) {
    let mut shared = SharedMemory::<f32>::new(2 * units);
    let mut sum = 0.0f32;
    let mut row = UNIT_POS as usize;
    while row < rows {
        if comptime!(is_any_ignored) {
            if targets[row] != ignored.get::<I>() {
                sum += 1.0f32;
            }
        } else {
            sum += 1.0f32;
        }
        row += units;
    }
    let (sum, _) = over_cube(&mut shared, sum, 0.0f32, units);
    if UNIT_POS == 0 {
        counted[0] = max(sum, 1.0f32);
    }
}

/// `mean`: sum of `losses`, divided by `counted`.
#[cube(launch_unchecked)]
pub(super) fn mean_kernel(
    losses: &Array<f32>,
    counted: &Array<f32>,
    mean: &mut Array<f32>,
    rows: usize,
    #[comptime] units: usize,
) {
    let mut shared = SharedMemory::<f32>::new(2 * units);
    let mut sum = 0.0f32;
    let mut row = UNIT_POS as usize;
    while row < rows {
        sum += losses[row];
        row += units;
    }
    let (sum, _) = over_cube(&mut shared, sum, 0.0f32, units);
    if UNIT_POS == 0 {
        mean[0] = sum / counted[0];
    }
}

/// `logits`: `[rows, v]`, padded with columns to `stride`; they are capped at `cap` if `is_capped`, and if `is_gradient` overwritten with the
/// gradient of the sum of losses times `scale`. `targets`, `losses`: `[n]`, of which these are the rows from `first`.
///
/// One pass finds the largest logit and the sum of exponentials; a second one computes the gradient.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rows_kernel<E: Float, I: Int, N: Size>(
    logits: &mut Array<Vector<E, N>>,
    targets: &Array<I>,
    losses: &mut Array<f32>,
    stride: usize,
    first: usize,
    rows: usize,
    vocabulary: usize,
    scale: f32,
    cap: f32,
    ignored: InputScalar,
    #[comptime] is_any_ignored: bool,
    #[comptime] is_capped: bool,
    #[comptime] is_gradient: bool,
    #[comptime] units: usize,
    #[define(E, I)] _dtypes: [StorageType; 2],
) {
    let mut shared = SharedMemory::<f32>::new(2 * units);
    let mut of_target = SharedMemory::<f32>::new(1usize);
    let me = UNIT_POS as usize;
    // The last vector may reach beyond the row; the values there are not used.
    let vectors = vocabulary.div_ceil(N::value());
    let mut row = CUBE_POS;
    while row < rows {
        let start = row * stride;
        let id = targets[first + row];
        let mut is_counted = true;
        if comptime!(is_any_ignored) {
            is_counted = id != ignored.get::<I>();
        }
        // An index outside the columns matches none and reads nothing.
        let is_in_range = id >= I::new(0) && usize::cast_from(id) < vocabulary;
        let target = select(is_in_range, usize::cast_from(id), vocabulary);

        let mut largest = LOWEST.comptime().runtime();
        let mut sum = 0.0f32;
        let mut column = me;
        while column < vectors {
            let mut values = Vector::<f32, N>::cast_from(logits[start + column]);
            if comptime!(is_capped) {
                #[unroll]
                for k in 0..N::value() {
                    values[k] = share_of_cap(values[k], cap) * cap;
                }
            }
            let mut of_vector = LOWEST.comptime().runtime();
            #[unroll]
            for k in 0..N::value() {
                let index = column * N::value() + k;
                if index < vocabulary {
                    of_vector = max(of_vector, values[k]);
                    if index == target {
                        of_target[0] = values[k];
                    }
                }
            }
            let both = max(largest, of_vector);
            sum *= (largest - both).exp();
            #[unroll]
            for k in 0..N::value() {
                if column * N::value() + k < vocabulary {
                    sum += (values[k] - both).exp();
                }
            }
            largest = both;
            column += units;
        }
        shared[me] = largest;
        shared[me + units] = sum;
        sync_cube();
        let mut half = comptime!(units / 2).runtime();
        while half > 0 {
            if me < half {
                let (a, b) = (shared[me], shared[me + half]);
                let (sum_a, sum_b) = (shared[me + units], shared[me + half + units]);
                let both = max(a, b);
                shared[me] = both;
                shared[me + units] = sum_a * (a - both).exp() + sum_b * (b - both).exp();
            }
            half /= 2;
            sync_cube();
        }
        let lse = shared[0] + shared[units].ln();

        if me == 0 {
            let mut loss = 0.0f32;
            if is_counted {
                // A target outside the columns makes the loss NaN, and so the mean. (CUDA's compiler does not reinterpret constants.)
                let not_a_number = select(is_in_range, 0u32, 0x7fc0_0000u32);
                loss = select(is_in_range, lse - of_target[0], f32::reinterpret(not_a_number));
            }
            losses[first + row] = loss;
        }
        if comptime!(is_gradient) {
            let share = select(is_counted, scale, 0.0f32);
            let mut column = me;
            // The gradient is 0 in the padding.
            while column < stride {
                let mut values = Vector::<f32, N>::cast_from(logits[start + column]);
                let mut slopes = Vector::<f32, N>::new(1.0f32);
                if comptime!(is_capped) {
                    #[unroll]
                    for k in 0..N::value() {
                        let share = share_of_cap(values[k], cap);
                        values[k] = share * cap;
                        slopes[k] = 1.0f32 - share * share;
                    }
                }
                let mut gradient = (values - Vector::new(lse)).exp();
                #[unroll]
                for k in 0..N::value() {
                    let index = column * N::value() + k;
                    if index == target {
                        gradient[k] -= 1.0f32;
                    }
                    if comptime!(is_capped) {
                        gradient[k] *= slopes[k];
                    }
                    gradient[k] = select(is_counted && index < vocabulary, gradient[k] * share, 0.0f32);
                }
                logits[start + column] = Vector::cast_from(gradient);
                column += units;
            }
        }
        // Wait until all units have read this row's sums.
        sync_cube();
        row += CUBE_COUNT;
    }
}

/// Writes to `out`, from row `first` on, `part` `[rows, d]` divided by `counted` and by the scale of the logits' gradient, or adds it.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn place_kernel<N: Size>(
    part: &Strided<f32, N>,
    counted: &Array<f32>,
    out: &mut Array<Vector<f32, N>>,
    first: usize,
    extent: Extent,
    scale: f32,
    #[comptime] is_added: bool,
) {
    let (column, begin, end) = own(&extent);
    let factor = Vector::<f32, N>::new(1.0f32 / (counted[0] * scale));
    if column < extent.vectors {
        let mut row = begin;
        while row < end {
            let at = (first + row) * extent.vectors + column;
            let value = read::<f32, N>(part, row, column) * factor;
            if comptime!(is_added) {
                out[at] += value;
            } else {
                out[at] = value;
            }
            row += HEIGHT.comptime();
        }
    }
}

/// `out`: `[padded, d]`, the rows of `x` `[rows, d]` followed by zeros.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn padded_kernel<E: Float, N: Size>(
    x: &Strided<E, N>,
    out: &mut Array<Vector<E, N>>,
    rows: usize,
    extent: Extent,
    #[define(E)] _dtype: StorageType,
) {
    let (column, begin, end) = own(&extent);
    if column < extent.vectors {
        let mut row = begin;
        while row < end {
            let mut value = Vector::<E, N>::cast_from(0.0f32);
            if row < rows {
                value = x.vectors[row * x.stride + column];
            }
            out[row * extent.vectors + column] = value;
            row += HEIGHT.comptime();
        }
    }
}
