//! The forward pass.

use gemm::Parallelism;

use super::{Blocks, Head, Horizon, Inputs, Shape, with_scratch};
use crate::cpu::check;
use crate::cpu::math::exp;
use crate::cpu::parallel::spread;
use crate::cpu::product::{Matrix, Write, multiply, multiply_into};
use crate::cpu::reduce::{larger, largest, replace_and_sum};
use crate::cpu::rows::SharedRows;

pub(super) fn forward_in(blocks: Blocks, inputs: Inputs<'_>, out: &mut [f32], lse: &mut [f32]) {
    inputs.check();
    let Shape { batch, heads, head_width, queries, keys, scale, .. } = inputs.shape;
    let d = inputs.d();
    check("attention", "out", out.len(), batch * queries * d);
    check("attention", "lse", lse.len(), batch * heads * queries);
    if d == 0 {
        return;
    }
    let out = SharedRows::new(out, d);
    let mut tasks = vec![];
    for (head, lse) in lse.chunks_mut(queries).enumerate() {
        let head = Head { sequence: head / heads, index: head % heads };
        for (block, lse) in lse.chunks_mut(blocks.queries).enumerate() {
            let first = block * blocks.queries;
            tasks.push((head, first..first + lse.len(), lse));
        }
    }
    spread(inputs.work(), tasks, |(head, queries, lse)| {
        let rows = queries.len();
        let out = out.part(head.sequence * inputs.shape.queries + queries.start, head.index * head_width);
        with_scratch(rows * (blocks.keys.min(keys) + 2), |scratch| {
            let (max, scratch) = scratch.split_at_mut(rows);
            let (sum, scratch) = scratch.split_at_mut(rows);
            max.fill(f32::NEG_INFINITY);
            sum.fill(0.0);
            for (block, keys) in inputs.blocks_of_keys(&queries, blocks.keys).enumerate() {
                let scores = &mut scratch[..rows * keys.len()];
                let (q, k) = (inputs.queries(head, &queries), inputs.keys(head, &keys).transposed());
                multiply(scores, Write::Over, q, k, scale, Parallelism::None);
                let begun = block > 0;
                let (mask, horizon) = (inputs.mask(head, &keys), inputs.horizon(&queries, &keys));
                let gathered = Gathered { max, sum, out, width: head_width };
                fold(scores, keys.len(), mask, horizon, gathered, begun);
                let p = Matrix::new(scores, rows, keys.len());
                let v = inputs.values(head, &keys);
                // SAFETY: these rows' part of the head is inside `out`, whose length was checked, and this task's.
                unsafe { multiply_into(out.raw_parts().0, d, Write::first(!begun), p, v, 1.0, Parallelism::None) };
            }
            finish(Gathered { max, sum, out, width: head_width }, lse);
        });
    });
}

/// A task's state for its queries: the softmax's running maxima and sums, and a head's part of the result's rows, which only
/// this task reads and writes.
struct Gathered<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: SharedRows<'a, f32>,
    width: usize,
}

/// Multiplies a head's part of a row of the result by `factor`.
///
/// # Safety
///
/// The row is inside of the result, initialised, and used by the calling task alone.
#[inline(always)]
unsafe fn scale(out: SharedRows<'_, f32>, row: usize, width: usize, factor: f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { out.slice(row, 0, width) }.iter_mut().for_each(|value| *value *= factor);
}

vectorised! {
    /// Turns a block of scores into its share of the softmax, and updates the running state; also `out`, if earlier
    /// blocks have `begun` it.
    fn fold<'a>(
        scores: &'a mut [f32],
        keys: usize,
        mask: Option<&'a [f32]>,
        horizon: Horizon,
        gathered: Gathered<'a>,
        begun: bool,
    ) {
        let Gathered { max, sum, out, width } = gathered;
        let rows = scores.chunks_exact_mut(keys).zip(max.iter_mut().zip(sum)).enumerate();
        for (row, (scores, (max, sum))) in rows {
            let seen = horizon.seen(row, keys);
            let (scores, hidden) = scores.split_at_mut(seen.end);
            hidden.fill(0.0);
            let (hidden, scores) = scores.split_at_mut(seen.start);
            hidden.fill(0.0);
            if let Some(mask) = mask {
                scores.iter_mut().zip(&mask[seen.start..]).for_each(|(score, mask)| *score += mask);
            }
            let before = *max;
            *max = larger(before, largest(scores));
            // If the mask is infinite after all, exp must not see the difference of two infinities.
            let shift = if *max == f32::NEG_INFINITY { 0.0 } else { *max };
            let rescale = exp(before - shift);
            let part = replace_and_sum(scores, |score| exp(score - shift));
            *sum = sum.mul_add(rescale, part);
            if begun && rescale != 1.0 {
                // SAFETY: one row of `max` for each of the task's rows of the result, which earlier blocks wrote.
                unsafe { scale(out, row, width, rescale) };
            }
        }
    }

    /// Divides the accumulated result by the softmax's sum, and writes the log-sum-exp.
    fn finish<'a>(gathered: Gathered<'a>, lse: &'a mut [f32]) {
        let Gathered { max, sum, out, width } = gathered;
        for (row, ((max, sum), lse)) in max.iter().zip(sum).zip(lse).enumerate() {
            let any = *sum > 0.0;
            *lse = if any { *max + sum.ln() } else { 0.0 };
            // SAFETY: one row of `max` for each of the task's rows of the result, which every block has written.
            unsafe { scale(out, row, width, if any { 1.0 / *sum } else { 0.0 }) };
        }
    }
}
