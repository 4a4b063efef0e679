//! The backward pass.

use super::{
    Blocks, Head, Inputs, Results, Rows, RowsMut, Scoring, Shape, check_rows, masked, only, store, with_scratch,
};
use crate::cpu::check;
use crate::cpu::math::{exp_at_most_one as exp, tanh};
use crate::cpu::operand::Operand;
use crate::cpu::parallel::spread;
use crate::cpu::product::Write;
use crate::cpu::reduce::sum_over;

pub(super) fn backward_in<T: Operand>(
    blocks: Blocks,
    inputs: Inputs<'_, T>,
    results: Results<'_, T>,
    grads: [RowsMut<'_, T>; 3],
) {
    inputs.check();
    let Shape { batch, heads, kv_heads, head_width, queries, keys, scale, cap, .. } = inputs.shape;
    let d = inputs.d();
    check("attention", "out", results.out.len(), batch * queries * d);
    check("attention", "g", results.g.len(), batch * queries * d);
    check("attention", "lse", results.lse.len(), batch * heads * queries);
    for ((name, d, t), rows) in
        [("dq", d, queries), ("dk", inputs.c(), keys), ("dv", inputs.c(), keys)].into_iter().zip(&grads)
    {
        check_rows(name, rows.len, [d, rows.width, rows.rows.stride()], batch * t);
    }
    if d == 0 {
        return;
    }
    let [dq, dk, dv] = grads.map(|grad| grad.rows);
    let gradient = Rows { data: results.g, stride: d };
    // The query heads that share a key head add to its gradients one after the other.
    let tasks: Vec<_> = (0..batch * kv_heads).collect();
    spread(inputs.work(), tasks, |task| {
        let (block, wide) = (blocks.queries.min(queries), blocks.keys.min(keys));
        with_scratch(block * (2 * wide + 1 + head_width) + 2 * keys * head_width, |scratch| {
            let (delta, scratch) = scratch.split_at_mut(block);
            let (scores, scratch) = scratch.split_at_mut(block * wide);
            let (slopes, scratch) = scratch.split_at_mut(block * wide);
            let (sums_q, scratch) = scratch.split_at_mut(block * head_width);
            let (sums_k, sums_v) = scratch.split_at_mut(keys * head_width);
            let sums_v = &mut sums_v[..keys * head_width];
            let mut factor = 1.0;
            for member in 0..inputs.group() {
                let pair = task * inputs.group() + member;
                let head = Head { sequence: pair / heads, index: pair % heads };
                let lse = &results.lse[pair * queries..(pair + 1) * queries];
                let column = head.index * head_width;
                // Starts at the last block, which reaches every key that it or a later block attends to: the first block to
                // reach a key overwrites the sums that the others add to.
                for first in (0..queries).step_by(block).rev() {
                    let rows = first..queries.min(first + block);
                    let reached = if rows.end == queries { keys } else { inputs.first_block(rows.end, wide) };
                    let n = rows.len();
                    let first_row = head.sequence * queries + first;
                    let (delta, sums_q) = (&mut delta[..n], &mut sums_q[..n * head_width]);
                    let (out, g) = (&results.out[first_row * d + column..], &results.g[first_row * d + column..]);
                    deltas(out, g, d, head_width, delta);
                    let q = inputs.queries(head, &rows);
                    let g = inputs.head(gradient, queries, head, head.index, &rows);
                    for (number, range) in inputs.blocks_of_keys(&rows, wide).enumerate() {
                        let width = range.len();
                        let (scores, slopes) = (&mut scores[..n * width], &mut slopes[..n * width]);
                        let (k, v) = (inputs.keys(head, &range), inputs.values(head, &range));
                        factor = T::product_here(scores, Write::Over, q, k.transposed(), scale);
                        T::product_here(slopes, Write::Over, g, v.transposed(), 1.0);
                        let (mask, horizon) = (inputs.mask(head, &range), inputs.horizon(&rows, &range));
                        let of_rows = [&lse[rows.clone()], delta];
                        scores_gradients(
                            scores,
                            slopes,
                            width,
                            Scoring { factor, cap, mask, horizon },
                            of_rows,
                            T::round,
                        );
                        let (p, ds) = (T::rounded(scores, width), T::rounded(slopes, width));
                        let write_kv = Write::first(member == 0 && range.start < reached);
                        let part = range.start * head_width..range.end * head_width;
                        T::product_here(&mut sums_v[part.clone()], write_kv, p.transposed(), g, 1.0);
                        T::product_here(&mut sums_k[part], write_kv, ds.transposed(), q, scale);
                        T::product_here(sums_q, Write::first(number == 0), ds, k, scale);
                    }
                    // SAFETY: `check_rows` found these rows inside of their buffer; the columns of the head are this task's.
                    unsafe { store(sums_q, head_width, factor, dq.part(first_row, column)) };
                }
            }
            let (row, column) = (task / kv_heads * keys, task % kv_heads * head_width);
            // SAFETY: as above, of a head of keys of a sequence; the columns of the three are apart even where they share a buffer.
            unsafe {
                store(sums_k, head_width, factor, dk.part(row, column));
                store(sums_v, head_width, 1.0, dv.part(row, column));
            }
        });
    });
}

/// Computes the softmax of a row of scores, and their gradients from those of the softmax.
#[inline(always)]
fn softmax_gradients(scores: &mut [f32], slopes: &mut [f32], factor: f32, mask: Option<&[f32]>, lse: f32, delta: f32) {
    let factor = masked(scores, factor, mask);
    for (score, slope) in scores.iter_mut().zip(slopes) {
        let p = exp(score.mul_add(factor, -lse));
        *score = p;
        *slope = p * (*slope - delta);
    }
}

vectorised! {
    /// Computes `out . g` for each row of a head's part.
    fn deltas<'a, T: Operand>(out: &'a [T], g: &'a [T], stride: usize, width: usize, delta: &'a mut [f32]) {
        for (row, delta) in delta.iter_mut().enumerate() {
            let part = row * stride..row * stride + width;
            let (out, g) = (&out[part.clone()], &g[part]);
            *delta = sum_over([out, g], |[out, g], sum| out.mul_add(g, sum));
        }
    }

    /// Turns a block of products into the softmax, and the softmax's gradients into those of the scores, both rounded to
    /// operands. `of_rows`: the log-sum-exp and the delta of each row.
    fn scores_gradients<'a>(
        scores: &'a mut [f32],
        slopes: &'a mut [f32],
        width: usize,
        scoring: Scoring<'a>,
        of_rows: [&'a [f32]; 2],
        round: fn(&mut [f32]),
    ) {
        let [lse, delta] = of_rows;
        let Scoring { factor, cap, mask, horizon } = scoring;
        let blocks = scores.chunks_exact_mut(width).zip(slopes.chunks_exact_mut(width));
        for (row, ((scores, slopes), (lse, delta))) in blocks.zip(lse.iter().zip(delta)).enumerate() {
            let seen = horizon.seen(row, width);
            let mask = mask.map(|mask| &mask[seen.start..]);
            let (all_scores, all_slopes) = (scores, slopes);
            let (scores, slopes) = (only(all_scores, &seen), only(all_slopes, &seen));
            match cap {
                None => softmax_gradients(scores, slopes, factor, mask, *lse, *delta),
                Some(cap) => {
                    let share = factor / cap;
                    for (score, slope) in scores.iter_mut().zip(&mut *slopes) {
                        let tanh = tanh(*score * share);
                        *score = cap * tanh;
                        *slope = (*slope - delta) * tanh.mul_add(-tanh, 1.0);
                    }
                    softmax_gradients(scores, slopes, 1.0, mask, *lse, 0.0);
                }
            }
            round(all_scores);
            round(all_slopes);
        }
    }
}
