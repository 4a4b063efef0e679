//! The kernels of [`super`](super::Flash).

#![allow(clippy::too_many_arguments)] // A kernel's arguments are all that it reads and writes.

use burn_cubecl::CubeRuntime;
use cubecl::prelude::*;

use crate::cube::attention::dropped::{Dropped, share};
use crate::cube::attention::tiles::{Cut, Two, left, multiply, no_sums, over_row, rounded, stage};
use crate::cube::attention::{Rows, Sizes, Variant};
use crate::cube::many::array;
use crate::cube::rows::stride;

/// Score of a hidden key.
const HIDDEN: f32 = f32::MIN;

/// Rows, and the position of their heads.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Heads<E: Float, N: Size> {
    rows: Array<Vector<E, N>>,
    /// Number of elements from one row to the next.
    stride: usize,
    /// First column of the first head.
    column: usize,
    /// Number of heads of queries that share a head.
    group: usize,
}

pub(super) fn heads<E: Float, N: Size, R: CubeRuntime>(rows: &Rows<R>) -> HeadsLaunch<E, N, R> {
    HeadsLaunch::new(array(&rows.tensor), stride(&rows.tensor, 1), rows.column, rows.group)
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Problem {
    pairs: usize,
    heads: usize,
    t: usize,
    /// Number of cubes of a pair; in the kernel for keys, of a head of keys.
    blocks: usize,
    scale: f32,
}

pub(super) fn problem<R: CubeRuntime>(sizes: Sizes, blocks: usize) -> ProblemLaunch<R> {
    ProblemLaunch::new(sizes.pairs, sizes.heads, sizes.t, blocks, sizes.scale)
}

/// Returns the element at which row 0 of a pair's head begins.
#[cube]
fn head<E: Float, N: Size>(heads: &Heads<E, N>, problem: &Problem, pair: usize, #[comptime] cut: Cut) -> usize {
    let which = pair % problem.heads / heads.group;
    pair / problem.heads * problem.t * heads.stride + heads.column + which * comptime!(cut.e).runtime()
}

/// Copies rows of a head to shared memory.
#[cube]
fn stage_head<E: Float, N: Size>(
    heads: &Heads<E, N>,
    problem: &Problem,
    pair: usize,
    first: usize,
    into: &mut SharedMemory<Vector<E, N>>,
    #[comptime] count: usize,
    #[comptime] cut: Cut,
) {
    let at = head::<E, N>(heads, problem, pair, cut) / N::value();
    stage::<E, N>(&heads.rows, at, heads.stride / N::value(), first, problem.t, into, count, cut);
}

/// Copies the numbers of a sequence's rows, from row `first` on, to shared memory; 0 beyond the last row.
#[cube]
fn stage_numbers(
    numbers: &Array<f32>,
    at: usize,
    first: usize,
    t: usize,
    into: &mut SharedMemory<f32>,
    #[comptime] count: usize,
) {
    let mut which = UNIT_POS as usize;
    while which < comptime!(count) {
        let mut value = 0.0f32;
        if first + which < t {
            value = numbers[at + first + which];
        }
        into[which] = value;
        which += CUBE_DIM as usize;
    }
}

/// Stores a plane's sums, of `e` columns, multiplied by a factor for each row, to the rows of a head from `first` on.
#[cube]
fn store<E: Float>(
    sums: &Array<Vector<f32, Two>>,
    factors: &Array<f32>,
    heads: &mut Heads<E, Two>,
    problem: &Problem,
    pair: usize,
    first: usize,
    #[comptime] cut: Cut,
) {
    let (g, p) = (UNIT_POS_X as usize / 4, UNIT_POS_X as usize % 4);
    let at = head::<E, Two>(heads, problem, pair, cut);
    let tiles = comptime!(cut.e / 8);
    #[unroll(cut.matrices)]
    for m in 0..comptime!(cut.tall) {
        #[unroll(cut.matrices)]
        for i in 0..2usize {
            let row = first + 16 * m + 8 * i + g;
            if row < problem.t {
                #[unroll(cut.matrices)]
                for n in 0..tiles {
                    let value = sums[2 * (m * tiles + n) + i] * Vector::new(factors[2 * m + i]);
                    heads.rows[(at + row * heads.stride + 8 * n + 2 * p) / 2] = Vector::cast_from(value);
                }
            }
        }
    }
}

/// Computes `out` `[n, d]` and `lse` `[b, h, t]`. A cube takes queries.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = fast(cut))]
pub(super) fn forward_kernel<E: Float, N: Size>(
    q: &Heads<E, N>,
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    mask: &Array<f32>,
    out: &mut Heads<E, Two>,
    lse: &mut Array<f32>,
    problem: Problem,
    of_dropout: Dropped,
    #[comptime] variant: Variant,
    #[comptime] cut: Cut,
    #[define(E)] _dtype: StorageType,
) {
    if CUBE_POS >= problem.blocks * problem.pairs {
        terminate!();
    }
    let pair = CUBE_POS / problem.blocks;
    // Queries with the most keys come first.
    let first = (problem.blocks - 1 - CUBE_POS % problem.blocks) * comptime!(cut.rows());
    let of_plane = UNIT_POS_Y as usize * comptime!(cut.of_plane());
    let (g, p) = (UNIT_POS_X as usize / 4, UNIT_POS_X as usize % 4);
    let t = problem.t;
    let tiles = comptime!(cut.others / 8);
    let steps = comptime!(cut.e / 16);

    let width = N::value().comptime();
    let mut exchange = SharedMemory::<f32>::new(comptime!(cut.exchanged()));
    let mut shared_mask = SharedMemory::<f32>::new(comptime!(if variant.masked { cut.others } else { 1 }));
    let mut queries = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.rows()) / width));
    let mut keys = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.others) / width));
    let mut values = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.others) / width));

    stage_head::<E, N>(q, &problem, pair, first, &mut queries, comptime!(cut.rows()), cut);
    let mut sums = no_sums(comptime!(cut.e / 8), cut);
    let mut largest = Array::<f32>::new(comptime!(2 * cut.tall));
    let mut weights = Array::<f32>::new(comptime!(2 * cut.tall));
    #[unroll(cut.matrices)]
    for row in 0..comptime!(2 * cut.tall) {
        largest[row] = HIDDEN.comptime().runtime();
        weights[row] = 0.0f32;
    }

    let mut end = t;
    if comptime!(variant.causal) {
        end = min(t, first + comptime!(cut.rows()));
    }
    let mut from = 0usize;
    while from < end {
        // All units have read the previous rows.
        sync_cube();
        stage_head::<E, N>(k, &problem, pair, from, &mut keys, comptime!(cut.others), cut);
        stage_head::<E, N>(v, &problem, pair, from, &mut values, comptime!(cut.others), cut);
        if comptime!(variant.masked) {
            stage_numbers(mask, pair / problem.heads * t, from, t, &mut shared_mask, comptime!(cut.others));
        }
        sync_cube();

        let mut scores = no_sums(tiles, cut);
        #[unroll(cut.matrices)]
        for step in 0..steps {
            let operand = left::<E, N>(&queries, of_plane, 16 * step, cut);
            multiply::<E, N>(&mut scores, &operand, &keys, 0, 16 * step, &mut exchange, tiles, false, cut);
        }
        #[unroll(cut.matrices)]
        for m in 0..comptime!(cut.tall) {
            #[unroll(cut.matrices)]
            for i in 0..2usize {
                let mut seen = t;
                if comptime!(variant.causal) {
                    seen = min(t, first + of_plane + 16 * m + 8 * i + g + 1);
                }
                let row = 2 * m + i;
                let mut top = largest[row];
                #[unroll(cut.matrices)]
                for n in 0..tiles {
                    let at = 2 * (m * tiles + n) + i;
                    let mut both = scores[at] * Vector::new(problem.scale);
                    #[unroll]
                    for c in 0..2usize {
                        let key = 8 * n + 2 * p + c;
                        if comptime!(variant.masked) {
                            both[c] += shared_mask[key];
                        }
                        both[c] = select(from + key < seen, both[c], HIDDEN.comptime().runtime());
                        top = max(top, both[c]);
                    }
                    scores[at] = both;
                }
                top = over_row(top, &mut exchange, true, cut);
                let shrunk = (largest[row] - top).exp();
                largest[row] = top;
                let mut weight = weights[row] * shrunk;
                #[unroll(cut.matrices)]
                for n in 0..tiles {
                    let at = 2 * (m * tiles + n) + i;
                    let mut both = (scores[at] - Vector::new(top)).exp();
                    weight += both[0] + both[1];
                    if comptime!(variant.drops) {
                        let query = first + of_plane + 16 * m + 8 * i + g;
                        #[unroll]
                        for c in 0..2usize {
                            both[c] *= share(&of_dropout, pair, query, from + 8 * n + 2 * p + c, t);
                        }
                    }
                    scores[at] = both;
                }
                weights[row] = weight;
                #[unroll(cut.matrices)]
                for n in 0..comptime!(cut.e / 8) {
                    let at = 2 * (m * comptime!(cut.e / 8) + n) + i;
                    sums[at] *= Vector::new(shrunk);
                }
            }
        }
        #[unroll(cut.matrices)]
        for j in 0..comptime!(cut.others / 16) {
            let probabilities = rounded::<E>(&scores, j, tiles, cut);
            multiply::<E, N>(
                &mut sums,
                &probabilities,
                &values,
                16 * j,
                0,
                &mut exchange,
                comptime!(cut.e / 8),
                true,
                cut,
            );
        }
        from += comptime!(cut.others);
    }

    #[unroll(cut.matrices)]
    for row in 0..comptime!(2 * cut.tall) {
        let weight = over_row(weights[row], &mut exchange, false, cut);
        weights[row] = 1.0f32 / weight;
        let query = first + of_plane + 8 * row + g;
        if p == 0 && query < t {
            lse[pair * t + query] = weight.ln() + largest[row];
        }
    }
    store::<E>(&sums, &weights, out, &problem, pair, first + of_plane, cut);
}

/// Returns the probability and the gradient of the score, from a score `q k^T` and a gradient of the probability `dO v^T`.
///
/// `lse`, `along`: those of the query; the key is hidden unless `seen`.
#[cube]
fn gradients(score: f32, gradient: f32, lse: f32, along: f32, seen: bool, scale: f32) -> (f32, f32) {
    let mut probability = (score - lse).exp();
    if !seen {
        probability = 0.0f32;
    }
    (probability, probability * (gradient - along) * scale)
}

/// Computes `dk` and `dv` `[n, c]`. A cube takes keys, which are its rows of tiles: all scores are transposed. It adds up the gradients by all
/// heads of queries that share these keys.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = fast(cut))]
pub(super) fn keys_kernel<E: Float, N: Size>(
    q: &Heads<E, N>,
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    mask: &Array<f32>,
    grad: &Heads<E, N>,
    lse: &Array<f32>,
    along: &Array<f32>,
    dk: &mut Heads<E, Two>,
    dv: &mut Heads<E, Two>,
    problem: Problem,
    of_dropout: Dropped,
    #[comptime] variant: Variant,
    #[comptime] cut: Cut,
    #[define(E)] _dtype: StorageType,
) {
    if CUBE_POS >= problem.blocks * (problem.pairs / k.group) {
        terminate!();
    }
    let first_pair = CUBE_POS / problem.blocks * k.group;
    // Keys that the most queries see come first.
    let first = CUBE_POS % problem.blocks * comptime!(cut.rows());
    let of_plane = UNIT_POS_Y as usize * comptime!(cut.of_plane());
    let (g, p) = (UNIT_POS_X as usize / 4, UNIT_POS_X as usize % 4);
    let t = problem.t;
    let tiles = comptime!(cut.others / 8);
    let steps = comptime!(cut.e / 16);

    let width = N::value().comptime();
    let mut exchange = SharedMemory::<f32>::new(comptime!(cut.exchanged()));
    let mut shared_lse = SharedMemory::<f32>::new(comptime!(cut.others));
    let mut shared_along = SharedMemory::<f32>::new(comptime!(cut.others));
    let mut keys = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.rows()) / width));
    let mut values = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.rows()) / width));
    let mut queries = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.others) / width));
    let mut grads = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.others) / width));

    stage_head::<E, N>(k, &problem, first_pair, first, &mut keys, comptime!(cut.rows()), cut);
    stage_head::<E, N>(v, &problem, first_pair, first, &mut values, comptime!(cut.rows()), cut);
    let mut biases = Array::<f32>::new(comptime!(2 * cut.tall));
    #[unroll(cut.matrices)]
    for row in 0..comptime!(2 * cut.tall) {
        biases[row] = 0.0f32;
        if comptime!(variant.masked) {
            let key = first + of_plane + 8 * row + g;
            if key < t {
                biases[row] = mask[first_pair / problem.heads * t + key];
            }
        }
    }

    let mut d_keys = no_sums(comptime!(cut.e / 8), cut);
    let mut d_values = no_sums(comptime!(cut.e / 8), cut);
    for member in 0..k.group {
        let pair = first_pair + member;
        let mut from = 0usize;
        if comptime!(variant.causal) {
            // Queries before the first key see none.
            from = first / comptime!(cut.others) * comptime!(cut.others);
        }
        while from < t {
            // All units have read the previous rows.
            sync_cube();
            stage_head::<E, N>(q, &problem, pair, from, &mut queries, comptime!(cut.others), cut);
            stage_head::<E, N>(grad, &problem, pair, from, &mut grads, comptime!(cut.others), cut);
            stage_numbers(lse, pair * t, from, t, &mut shared_lse, comptime!(cut.others));
            stage_numbers(along, pair * t, from, t, &mut shared_along, comptime!(cut.others));
            sync_cube();

            let mut scores = no_sums(tiles, cut);
            let mut d_scores = no_sums(tiles, cut);
            #[unroll(cut.matrices)]
            for step in 0..steps {
                let operand = left::<E, N>(&keys, of_plane, 16 * step, cut);
                multiply::<E, N>(&mut scores, &operand, &queries, 0, 16 * step, &mut exchange, tiles, false, cut);
                let operand = left::<E, N>(&values, of_plane, 16 * step, cut);
                multiply::<E, N>(&mut d_scores, &operand, &grads, 0, 16 * step, &mut exchange, tiles, false, cut);
            }
            #[unroll(cut.matrices)]
            for m in 0..comptime!(cut.tall) {
                #[unroll(cut.matrices)]
                for n in 0..tiles {
                    #[unroll(cut.matrices)]
                    for i in 0..2usize {
                        let key = first + of_plane + 16 * m + 8 * i + g;
                        let at = 2 * (m * tiles + n) + i;
                        let mut both = scores[at];
                        let mut d_both = d_scores[at];
                        #[unroll]
                        for c in 0..2usize {
                            let query = 8 * n + 2 * p + c;
                            let mut seen = from + query < t;
                            if comptime!(variant.causal) {
                                seen = seen && key <= from + query;
                            }
                            let score = both[c] * problem.scale + biases[2 * m + i];
                            let mut share_of = 1.0f32;
                            if comptime!(variant.drops) {
                                share_of = share(&of_dropout, pair, from + query, key, t);
                                d_both[c] *= share_of;
                            }
                            let (probability, d_score) = gradients(
                                score,
                                d_both[c],
                                shared_lse[query],
                                shared_along[query],
                                seen,
                                problem.scale,
                            );
                            both[c] = probability;
                            if comptime!(variant.drops) {
                                both[c] *= share_of;
                            }
                            d_both[c] = d_score;
                        }
                        scores[at] = both;
                        d_scores[at] = d_both;
                    }
                }
            }
            #[unroll(cut.matrices)]
            for j in 0..comptime!(cut.others / 16) {
                let tiles_of_e = comptime!(cut.e / 8);
                let probabilities = rounded::<E>(&scores, j, tiles, cut);
                multiply::<E, N>(
                    &mut d_values,
                    &probabilities,
                    &grads,
                    16 * j,
                    0,
                    &mut exchange,
                    tiles_of_e,
                    true,
                    cut,
                );
                let d_products = rounded::<E>(&d_scores, j, tiles, cut);
                multiply::<E, N>(&mut d_keys, &d_products, &queries, 16 * j, 0, &mut exchange, tiles_of_e, true, cut);
            }
            from += comptime!(cut.others);
        }
    }

    let mut ones = Array::<f32>::new(comptime!(2 * cut.tall));
    #[unroll(cut.matrices)]
    for row in 0..comptime!(2 * cut.tall) {
        ones[row] = 1.0f32;
    }
    store::<E>(&d_keys, &ones, dk, &problem, first_pair, first + of_plane, cut);
    store::<E>(&d_values, &ones, dv, &problem, first_pair, first + of_plane, cut);
}

/// Computes `dq` `[n, d]`. A cube takes queries.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = fast(cut))]
pub(super) fn queries_kernel<E: Float, N: Size>(
    q: &Heads<E, N>,
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    mask: &Array<f32>,
    grad: &Heads<E, N>,
    lse: &Array<f32>,
    along: &Array<f32>,
    dq: &mut Heads<E, Two>,
    problem: Problem,
    of_dropout: Dropped,
    #[comptime] variant: Variant,
    #[comptime] cut: Cut,
    #[define(E)] _dtype: StorageType,
) {
    if CUBE_POS >= problem.blocks * problem.pairs {
        terminate!();
    }
    let pair = CUBE_POS / problem.blocks;
    // Queries with the most keys come first.
    let first = (problem.blocks - 1 - CUBE_POS % problem.blocks) * comptime!(cut.rows());
    let of_plane = UNIT_POS_Y as usize * comptime!(cut.of_plane());
    let (g, p) = (UNIT_POS_X as usize / 4, UNIT_POS_X as usize % 4);
    let t = problem.t;
    let tiles = comptime!(cut.others / 8);
    let steps = comptime!(cut.e / 16);

    let width = N::value().comptime();
    let mut exchange = SharedMemory::<f32>::new(comptime!(cut.exchanged()));
    let mut shared_mask = SharedMemory::<f32>::new(comptime!(if variant.masked { cut.others } else { 1 }));
    let mut queries = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.rows()) / width));
    let mut grads = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.rows()) / width));
    let mut keys = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.others) / width));
    let mut values = SharedMemory::<Vector<E, N>>::new(comptime!(cut.memory(cut.others) / width));

    stage_head::<E, N>(q, &problem, pair, first, &mut queries, comptime!(cut.rows()), cut);
    stage_head::<E, N>(grad, &problem, pair, first, &mut grads, comptime!(cut.rows()), cut);
    let mut lses = Array::<f32>::new(comptime!(2 * cut.tall));
    let mut alongs = Array::<f32>::new(comptime!(2 * cut.tall));
    let mut ones = Array::<f32>::new(comptime!(2 * cut.tall));
    #[unroll(cut.matrices)]
    for row in 0..comptime!(2 * cut.tall) {
        let query = min(first + of_plane + 8 * row + g, t - 1);
        lses[row] = lse[pair * t + query];
        alongs[row] = along[pair * t + query];
        ones[row] = 1.0f32;
    }

    let mut d_queries = no_sums(comptime!(cut.e / 8), cut);
    let mut end = t;
    if comptime!(variant.causal) {
        end = min(t, first + comptime!(cut.rows()));
    }
    let mut from = 0usize;
    while from < end {
        // All units have read the previous rows.
        sync_cube();
        stage_head::<E, N>(k, &problem, pair, from, &mut keys, comptime!(cut.others), cut);
        stage_head::<E, N>(v, &problem, pair, from, &mut values, comptime!(cut.others), cut);
        if comptime!(variant.masked) {
            stage_numbers(mask, pair / problem.heads * t, from, t, &mut shared_mask, comptime!(cut.others));
        }
        sync_cube();

        let mut scores = no_sums(tiles, cut);
        let mut d_scores = no_sums(tiles, cut);
        #[unroll(cut.matrices)]
        for step in 0..steps {
            let operand = left::<E, N>(&queries, of_plane, 16 * step, cut);
            multiply::<E, N>(&mut scores, &operand, &keys, 0, 16 * step, &mut exchange, tiles, false, cut);
            let operand = left::<E, N>(&grads, of_plane, 16 * step, cut);
            multiply::<E, N>(&mut d_scores, &operand, &values, 0, 16 * step, &mut exchange, tiles, false, cut);
        }
        #[unroll(cut.matrices)]
        for m in 0..comptime!(cut.tall) {
            #[unroll(cut.matrices)]
            for n in 0..tiles {
                #[unroll(cut.matrices)]
                for i in 0..2usize {
                    let mut end = t;
                    if comptime!(variant.causal) {
                        end = min(t, first + of_plane + 16 * m + 8 * i + g + 1);
                    }
                    let at = 2 * (m * tiles + n) + i;
                    let both = scores[at];
                    let mut d_both = d_scores[at];
                    #[unroll]
                    for c in 0..2usize {
                        let key = 8 * n + 2 * p + c;
                        let mut score = both[c] * problem.scale;
                        if comptime!(variant.masked) {
                            score += shared_mask[key];
                        }
                        let seen = from + key < end;
                        let mut d_probability = d_both[c];
                        if comptime!(variant.drops) {
                            let query = first + of_plane + 16 * m + 8 * i + g;
                            d_probability *= share(&of_dropout, pair, query, from + key, t);
                        }
                        let (_, d_score) =
                            gradients(score, d_probability, lses[2 * m + i], alongs[2 * m + i], seen, problem.scale);
                        d_both[c] = d_score;
                    }
                    d_scores[at] = d_both;
                }
            }
        }
        #[unroll(cut.matrices)]
        for j in 0..comptime!(cut.others / 16) {
            let d_products = rounded::<E>(&d_scores, j, tiles, cut);
            multiply::<E, N>(
                &mut d_queries,
                &d_products,
                &keys,
                16 * j,
                0,
                &mut exchange,
                comptime!(cut.e / 8),
                true,
                cut,
            );
        }
        from += comptime!(cut.others);
    }
    store::<E>(&d_queries, &ones, dq, &problem, pair, first + of_plane, cut);
}

/// Enables hardware exponentials for matrix units, whose 16-bit rounding is coarser. Loops, compared in fp32, use exact ones.
fn fast(cut: Cut) -> <FastMath as std::ops::BitOr>::Output {
    if cut.matrices { FastMath::NotNaN | FastMath::NotInf | FastMath::ReducedPrecision } else { Default::default() }
}
