//! The forward pass.

use super::{Blocks, Head, Inputs, Scoring, Shape, masked, only, store, with_scratch};
use crate::cpu::check;
use crate::cpu::math::{exp_at_most_one as exp, tanh};
use crate::cpu::operand::Operand;
use crate::cpu::parallel::spread;
use crate::cpu::product::Write;
use crate::cpu::reduce::{larger, largest, replace_and_sum};
use crate::cpu::rows::SharedRows;

pub(super) fn forward_in<T: Operand>(blocks: Blocks, inputs: Inputs<'_, T>, out: &mut [T], lse: &mut [f32]) {
    inputs.check();
    let Shape { batch, heads, head_width, queries, keys, scale, cap, .. } = inputs.shape;
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
        with_scratch(rows * (blocks.keys.min(keys) + 2 + head_width), |scratch| {
            let (max, scratch) = scratch.split_at_mut(rows);
            let (sum, scratch) = scratch.split_at_mut(rows);
            let (sums, scratch) = scratch.split_at_mut(rows * head_width);
            max.fill(f32::NEG_INFINITY);
            sum.fill(0.0);
            for (block, keys) in inputs.blocks_of_keys(&queries, blocks.keys).enumerate() {
                let scores = &mut scratch[..rows * keys.len()];
                let (q, k) = (inputs.queries(head, &queries), inputs.keys(head, &keys).transposed());
                let factor = T::product_here(scores, Write::Over, q, k, scale);
                let begun = block > 0;
                let (mask, horizon) = (inputs.mask(head, &keys), inputs.horizon(&queries, &keys));
                let gathered = Gathered { max, sum, sums, width: head_width };
                fold(scores, keys.len(), Scoring { factor, cap, mask, horizon }, gathered, begun, T::round);
                let p = T::rounded(scores, keys.len());
                T::product_here(sums, Write::first(!begun), p, inputs.values(head, &keys), 1.0);
            }
            finish(Gathered { max, sum, sums, width: head_width }, lse);
            // SAFETY: these rows' part of the head is inside `out`, whose length was checked, and this task's.
            unsafe { store(sums, head_width, 1.0, out) };
        });
    });
}

/// A task's state for its queries: the softmax's running maxima and sums, and the sums of a head's part of the result's rows.
struct Gathered<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    sums: &'a mut [f32],
    width: usize,
}

vectorised! {
    /// Turns a block of products into its share of the softmax, rounded to operands, and updates the running state;
    /// also the sums, if earlier blocks have `begun` them.
    fn fold<'a>(
        scores: &'a mut [f32],
        keys: usize,
        scoring: Scoring<'a>,
        gathered: Gathered<'a>,
        begun: bool,
        round: fn(&mut [f32]),
    ) {
        let Gathered { max, sum, sums, width } = gathered;
        let Scoring { factor, cap, mask, horizon } = scoring;
        let rows = scores.chunks_exact_mut(keys).zip(max.iter_mut().zip(sum)).zip(sums.chunks_exact_mut(width)).enumerate();
        for (row, ((scores, (max, sum)), sums)) in rows {
            let seen = horizon.seen(row, keys);
            let all = scores;
            let scores = only(all, &seen);
            let mut factor = factor;
            if let Some(cap) = cap {
                let share = factor / cap;
                scores.iter_mut().for_each(|score| *score = cap * tanh(*score * share));
                factor = 1.0;
            }
            let factor = masked(scores, factor, mask.map(|mask| &mask[seen.start..]));
            let before = *max;
            *max = larger(before, factor * largest(scores));
            // If the mask is infinite after all, exp must not see the difference of two infinities.
            let shift = if *max == f32::NEG_INFINITY { 0.0 } else { *max };
            let rescale = exp(before - shift);
            let part = replace_and_sum(scores, |score| exp(score.mul_add(factor, -shift)));
            *sum = sum.mul_add(rescale, part);
            round(all);
            if begun && rescale != 1.0 {
                sums.iter_mut().for_each(|value| *value *= rescale);
            }
        }
    }

    /// Divides the accumulated result by the softmax's sum, and writes the log-sum-exp.
    fn finish<'a>(gathered: Gathered<'a>, lse: &'a mut [f32]) {
        let Gathered { max, sum, sums, width } = gathered;
        for (((max, sum), lse), sums) in max.iter().zip(sum).zip(lse).zip(sums.chunks_exact_mut(width)) {
            let any = *sum > 0.0;
            *lse = if any { *max + sum.ln() } else { 0.0 };
            let factor = if any { 1.0 / *sum } else { 0.0 };
            sums.iter_mut().for_each(|value| *value *= factor);
        }
    }
}
