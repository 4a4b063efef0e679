//! Rotary positions (<https://arxiv.org/abs/2104.09864>): pairs of elements, half a head apart, are rotated by angles.

use super::check;
use super::parallel::{rows_of_task, spread};

/// Rotates every row of `x`; row `r` has the angles of row `r % t`. `back` rotates in the other direction.
///
/// # Shapes
///
/// `x`, `out`: `[n, d]`; `cos`, `sin`: `[t, half]`; heads are `2 * half` wide.
///
/// # Panics
///
/// If the lengths do not match.
pub fn turn(x: &[f32], [cos, sin]: [&[f32]; 2], half: usize, d: usize, back: bool, out: &mut [f32]) {
    check("rotary positions", "out", out.len(), x.len());
    check("rotary positions", "sin", sin.len(), cos.len());
    if x.is_empty() {
        return;
    }
    assert!(half > 0 && d.is_multiple_of(2 * half), "rotary positions: {half} pairs do not divide a width of {d}");
    let (n, t) = (x.len() / d, cos.len() / half);
    check("rotary positions", "x", x.len(), n * d);
    assert!(t > 0 && n.is_multiple_of(t), "rotary positions: angles of {t} rows do not divide {n} rows");
    let rows = rows_of_task(d);
    let tasks: Vec<_> = x.chunks(rows * d).zip(out.chunks_mut(rows * d)).enumerate().collect();
    spread(x.len(), tasks, |(task, (x, out))| turn_rows(x, [cos, sin], half, d, task * rows % t, back, out));
}

vectorised! {
    fn turn_rows<'a>(
        x: &'a [f32],
        angles: [&'a [f32]; 2],
        half: usize,
        d: usize,
        first: usize,
        back: bool,
        out: &'a mut [f32],
    ) {
        let sign = if back { -1.0 } else { 1.0 };
        let [cos, sin] = angles.map(|angles| angles.chunks_exact(half).cycle().skip(first));
        let rows = x.chunks_exact(d).zip(out.chunks_exact_mut(d)).zip(cos.zip(sin));
        for ((x, out), (cos, sin)) in rows {
            for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
                let ((a, b), (to_a, to_b)) = (x.split_at(half), out.split_at_mut(half));
                for ((a, b), ((to_a, to_b), (cos, sin))) in
                    a.iter().zip(b).zip(to_a.iter_mut().zip(to_b).zip(cos.iter().zip(sin)))
                {
                    let sin = sign * sin;
                    *to_a = a.mul_add(*cos, -(b * sin));
                    *to_b = b.mul_add(*cos, a * sin);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, assert_panics, numbers, same_bits};

    /// Returns cosines and sines of rows.
    fn angles(t: usize, half: usize) -> [Vec<f32>; 2] {
        let angle = |i: usize| (i / half) as f64 * 100f64.powf(-((i % half) as f64) / half as f64);
        [f64::cos, f64::sin].map(|of| (0..t * half).map(|i| of(angle(i)) as f32).collect())
    }

    #[test]
    fn agrees_with_f64_and_turns_back() {
        for (b, t, heads, half) in [(1, 1, 1, 1), (2, 5, 3, 4), (3, 33, 2, 17), (2, 200, 4, 32)] {
            let (n, d) = (b * t, heads * 2 * half);
            let x = numbers(n * d, 1);
            let [cos, sin] = angles(t, half);
            let expected: Vec<f64> = (0..n * d)
                .map(|i| {
                    let (row, at) = (i / d % t, i % (2 * half));
                    let other = f64::from(if at < half { -x[i + half] } else { x[i - half] });
                    let angle = row * half + at % half;
                    f64::from(x[i]) * f64::from(cos[angle]) + other * f64::from(sin[angle])
                })
                .collect();
            let (mut out, mut again) = (vec![f32::NAN; n * d], vec![f32::NAN; n * d]);
            turn(&x, [&cos, &sin], half, d, false, &mut out);
            assert_close("out", &out, &expected, 1e-6);
            turn(&out, [&cos, &sin], half, d, true, &mut again);
            assert_close("again", &again, &x.iter().map(|&x| x.into()).collect::<Vec<_>>(), 1e-6);
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (x, [cos, sin]) = (numbers(999 * 64, 1), angles(333, 16));
        same_bits(|| {
            let mut out = vec![0.0; x.len()];
            turn(&x, [&cos, &sin], 16, 64, false, &mut out);
            out
        });
    }

    #[test]
    fn lengths_that_do_not_fit_are_named() {
        let run = |x: usize, cos: usize, half: usize| {
            let (x, cos) = (vec![0.0; x], vec![0.0; cos]);
            turn(&x, [&cos, &cos], half, 8, false, &mut vec![0.0; x.len()]);
        };
        assert_panics(&["3 pairs do not divide a width of 8"], || run(16, 6, 3));
        assert_panics(&["angles of 3 rows do not divide 2 rows"], || run(16, 12, 4));
        assert_panics(&["`x` has 17 elements, expected 16"], || run(17, 8, 4));
    }
}
