//! Lookup of a table's rows by number, and the scatter-add of their gradients.

use super::check_rows;
use super::half::{Half, Plain};
use super::parallel::{rows_of_task, spread};
use super::reduce::add;

/// Copies row `ids[i]` of the table to row i of `out`.
///
/// # Shapes
///
/// `table`: `[v, d]`; `ids`: `[n]`; `out`: `[n, d]`.
///
/// # Panics
///
/// If the lengths do not match, or an id is outside of `0..v`.
pub fn forward<T: Plain>(table: &[T], ids: &[i64], out: &mut [T]) {
    if ids.is_empty() {
        assert!(out.is_empty(), "embedding: `out` has {} elements, expected none for no ids", out.len());
        return;
    }
    let d = out.len() / ids.len();
    assert_eq!(out.len(), ids.len() * d, "embedding: `out` has {} elements for {} ids", out.len(), ids.len());
    check(ids, table.len(), d);
    if d == 0 {
        return;
    }
    let rows = rows_of_task(d);
    let tasks: Vec<_> = ids.chunks(rows).zip(out.chunks_mut(rows * d)).collect();
    spread(ids.len() * d, tasks, |(ids, out)| {
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(d)) {
            let first = *id as usize * d;
            out.copy_from_slice(&table[first..first + d]);
        }
    });
}

/// Adds row i of `g` to row `ids[i]` of `dtable`, in the order of i for each id.
///
/// # Shapes
///
/// `ids`: `[n]`; `g`: `[n, d]`; `dtable`: `[v, d]`.
///
/// # Panics
///
/// If the lengths do not match, or an id is outside of `0..v`.
pub fn backward(ids: &[i64], g: &[f32], d: usize, dtable: &mut [f32]) {
    check_rows("embedding", "g", g.len(), ids.len(), d);
    check(ids, dtable.len(), d);
    if d == 0 || ids.is_empty() {
        return;
    }
    let order = order(ids);
    spread(g.len(), segments(ids, &order, d, dtable), |(first, order, dtable)| {
        scatter(ids, g, d, first, order, dtable);
    });
}

/// Returns the numbers of the rows sorted by id, in order within each id.
fn order(ids: &[i64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|i| ids[*i]);
    order
}

/// Splits the sorted rows into parts of about a task's size. Each comes with the first id and the slice of the part of the
/// table that it alone adds to. No id's rows are split.
fn segments<'a>(
    ids: &[i64],
    order: &'a [usize],
    d: usize,
    mut dtable: &'a mut [f32],
) -> Vec<(usize, &'a [usize], &'a mut [f32])> {
    let rows = rows_of_task(d);
    let (mut segments, mut first, mut order) = (vec![], 0, order);
    while !order.is_empty() {
        let last = ids[order[rows.min(order.len()) - 1]];
        let (part, rest) = order.split_at(order.partition_point(|i| ids[*i] <= last));
        let end = last as usize + 1;
        let (table, behind) = dtable.split_at_mut((end - first) * d);
        segments.push((first, part, table));
        (first, order, dtable) = (end, rest, behind);
    }
    segments
}

fn check(ids: &[i64], table: usize, d: usize) {
    assert!(
        if d == 0 { table == 0 } else { table.is_multiple_of(d) },
        "embedding: the table has {table} elements, expected a whole number of rows of {d}"
    );
    let v = table.checked_div(d).unwrap_or(usize::MAX);
    for (row, id) in ids.iter().enumerate() {
        let inside = usize::try_from(*id).is_ok_and(|id| id < v);
        assert!(inside, "embedding: id {id} of row {row} is outside of the table's rows 0..{v}");
    }
}

vectorised! {
    /// Adds rows of a gradient to a part of the table.
    fn scatter<'a>(ids: &'a [i64], g: &'a [f32], d: usize, first: usize, order: &'a [usize], dtable: &'a mut [f32]) {
        for i in order {
            let at = (ids[*i] as usize - first) * d;
            add(&g[i * d..(i + 1) * d], &mut dtable[at..at + d]);
        }
    }
}

/// Computes [`backward`] into a table in 16 bits: the rows of an id are added in f32 and rounded once, overwriting the id's row.
///
/// # Panics
///
/// Same as [`backward`].
pub fn backward_of<H: Half>(ids: &[i64], g: &[f32], d: usize, dtable: &mut [H]) {
    check_rows("embedding", "g", g.len(), ids.len(), d);
    check(ids, dtable.len(), d);
    let order = order(ids);
    let mut sum = vec![0f32; d];
    for rows in order.chunk_by(|a, b| ids[*a] == ids[*b]) {
        sum.fill(0.0);
        rows.iter().for_each(|row| sum.iter_mut().zip(&g[row * d..(row + 1) * d]).for_each(|(sum, g)| *sum += g));
        let id = ids[rows[0]] as usize;
        H::narrow(&sum, &mut dtable[id * d..(id + 1) * d]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, assert_panics, numbers, same_bits};

    fn ids(n: usize, v: usize) -> Vec<i64> {
        (0..n).map(|i| ((i * i * 7 + i / 3) % v) as i64).collect()
    }

    #[test]
    fn agrees_with_f64_for_odd_sizes() {
        for (n, d, v) in [(1, 1, 1), (3, 7, 5), (17, 64, 3), (33, 100, 50), (700, 64, 11), (333, 100, 1000)] {
            let (table, ids, g) = (numbers(v * d, 1), ids(n, v), numbers(n * d, 2));
            let mut out = vec![f32::NAN; n * d];
            forward(&table, &ids, &mut out);
            let mut expected = vec![0f64; v * d];
            for (i, id) in ids.iter().enumerate() {
                let row = *id as usize * d;
                assert_eq!(out[i * d..(i + 1) * d], table[row..row + d]);
                (0..d).for_each(|c| expected[row + c] += f64::from(g[i * d + c]));
            }
            let mut dtable = vec![0.0; v * d];
            backward(&ids, &g, d, &mut dtable);
            assert_close("dtable", &dtable, &expected, 1e-5);
        }
    }

    #[test]
    fn it_adds_to_what_is_there() {
        let mut dtable = vec![1.0; 6];
        backward(&[2, 0, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, &mut dtable);
        assert_eq!(dtable, [4.0, 5.0, 1.0, 1.0, 7.0, 9.0]);
    }

    #[test]
    fn the_number_of_threads_changes_no_bit_and_rows_are_added_in_order() {
        let (n, d, v) = (900, 100, 40);
        let (ids, g, table) = (ids(n, v), numbers(n * d, 2), numbers(v * d, 3));
        let got = same_bits(|| {
            let (mut out, mut dtable) = (vec![0.0; n * d], vec![0.0; v * d]);
            forward(&table, &ids, &mut out);
            backward(&ids, &g, d, &mut dtable);
            [dtable, out].concat()
        });
        let mut plain = vec![0f32; v * d];
        for (i, id) in ids.iter().enumerate() {
            (0..d).for_each(|c| plain[*id as usize * d + c] += g[i * d + c]);
        }
        assert_eq!(got[..v * d], plain);
    }

    #[test]
    fn wrong_ids_and_lengths_are_named() {
        assert_panics(&["id 3 of row 1", "0..3"], || forward(&[0.0; 6], &[0, 3], &mut [0.0; 4]));
        assert_panics(&["id -1 of row 0", "0..3"], || backward(&[-1], &[0.0; 2], 2, &mut [0.0; 6]));
        assert_panics(&["`g` has 3 elements, expected 2 rows of 2"], || backward(&[0, 1], &[0.0; 3], 2, &mut [0.0; 6]));
        assert_panics(&["table has 5 elements", "rows of 2"], || forward(&[0.0; 5], &[0], &mut [0.0; 2]));
    }
}
