//! The backward pass.

use gemm::Parallelism;

use super::{Blocks, Head, Horizon, Inputs, Results, Rows, RowsMut, Shape, check_rows, with_scratch};
use crate::cpu::check;
use crate::cpu::math::exp;
use crate::cpu::parallel::spread;
use crate::cpu::product::{Matrix, Write, multiply, multiply_into};
use crate::cpu::reduce::sum_over;

pub(super) fn backward_in(blocks: Blocks, inputs: Inputs<'_>, results: Results<'_>, grads: [RowsMut<'_>; 3]) {
    inputs.check();
    let Shape { batch, heads, kv_heads, head_width, queries, keys, scale, .. } = inputs.shape;
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
        with_scratch(block * (2 * wide + 1), |scratch| {
            let (delta, scratch) = scratch.split_at_mut(block);
            let (scores, slopes) = scratch.split_at_mut(block * wide);
            for member in 0..inputs.group() {
                let pair = task * inputs.group() + member;
                let head = Head { sequence: pair / heads, index: pair % heads };
                let lse = &results.lse[pair * queries..(pair + 1) * queries];
                let (column, kv_column) = (head.index * head_width, task % kv_heads * head_width);
                // Starts at the last block, which reaches every key that it or a later block attends to: the first block to
                // reach a key overwrites the gradient that the others add to.
                for first in (0..queries).step_by(block).rev() {
                    let rows = first..queries.min(first + block);
                    let reached = if rows.end == queries { keys } else { inputs.first_block(rows.end, wide) };
                    let n = rows.len();
                    let first_row = head.sequence * queries + first;
                    let delta = &mut delta[..n];
                    let (out, g) = (&results.out[first_row * d + column..], &results.g[first_row * d + column..]);
                    deltas(out, g, d, head_width, delta);
                    let q = inputs.queries(head, &rows);
                    let g = inputs.head(gradient, queries, head, head.index, &rows);
                    for (number, range) in inputs.blocks_of_keys(&rows, wide).enumerate() {
                        let width = range.len();
                        let (scores, slopes) = (&mut scores[..n * width], &mut slopes[..n * width]);
                        let (k, v) = (inputs.keys(head, &range), inputs.values(head, &range));
                        multiply(scores, Write::Over, q, k.transposed(), scale, Parallelism::None);
                        multiply(slopes, Write::Over, g, v.transposed(), 1.0, Parallelism::None);
                        let (mask, horizon) = (inputs.mask(head, &range), inputs.horizon(&rows, &range));
                        scores_gradients(scores, slopes, width, mask, horizon, &lse[rows.clone()], delta);
                        let (p, ds) = (Matrix::new(scores, n, width), Matrix::new(slopes, n, width));
                        let row_k = head.sequence * keys + range.start;
                        let [to_q, to_k, to_v] =
                            [(dq, first_row, column), (dk, row_k, kv_column), (dv, row_k, kv_column)]
                                .map(|(rows, row, column)| rows.part(row, column).raw_parts());
                        let write_q = Write::first(number == 0);
                        let write_kv = Write::first(member == 0 && range.start < reached);
                        // SAFETY: `check_rows` found these rows inside of their buffers; the columns of a head of keys
                        // of a sequence, and of the queries that share it, are this task's, and those of the three are
                        // apart even where they share a buffer.
                        unsafe {
                            multiply_into(to_v.0, to_v.1, write_kv, p.transposed(), g, 1.0, Parallelism::None);
                            multiply_into(to_k.0, to_k.1, write_kv, ds.transposed(), q, scale, Parallelism::None);
                            multiply_into(to_q.0, to_q.1, write_q, ds, k, scale, Parallelism::None);
                        }
                    }
                }
            }
        });
    });
}

vectorised! {
    /// Computes `out . g` for each row of a head's part.
    fn deltas<'a>(out: &'a [f32], g: &'a [f32], stride: usize, width: usize, delta: &'a mut [f32]) {
        for (row, delta) in delta.iter_mut().enumerate() {
            let part = row * stride..row * stride + width;
            let (out, g) = (&out[part.clone()], &g[part]);
            *delta = sum_over([out, g], |[out, g], sum| out.mul_add(g, sum));
        }
    }

    /// Turns a block of scores into the softmax, and the softmax's gradients into those of the scores.
    fn scores_gradients<'a>(
        scores: &'a mut [f32],
        slopes: &'a mut [f32],
        width: usize,
        mask: Option<&'a [f32]>,
        horizon: Horizon,
        lse: &'a [f32],
        delta: &'a [f32],
    ) {
        let blocks = scores.chunks_exact_mut(width).zip(slopes.chunks_exact_mut(width));
        for (row, ((scores, slopes), (lse, delta))) in blocks.zip(lse.iter().zip(delta)).enumerate() {
            let seen = horizon.seen(row, width);
            let [scores, slopes] = [scores, slopes].map(|row| {
                let (row, hidden) = row.split_at_mut(seen.end);
                hidden.fill(0.0);
                let (hidden, row) = row.split_at_mut(seen.start);
                hidden.fill(0.0);
                row
            });
            if let Some(mask) = mask {
                scores.iter_mut().zip(&mask[seen.start..]).for_each(|(score, mask)| *score += mask);
            }
            for (score, slope) in scores.iter_mut().zip(slopes) {
                let p = exp(*score - lse);
                *score = p;
                *slope = p * (*slope - delta);
            }
        }
    }
}
