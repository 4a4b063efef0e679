//! Dropout (<https://jmlr.org/papers/v15/srivastava14a.html>). The key of the draw and an element's position decide whether
//! it is kept, so no mask is stored between the forward and the backward pass.

use crate::options::AttentionDropout;

use super::check;
use super::parallel::{TASK, spread};

/// Multiplies each element of `x` by its factor of `dropout`. Applied to the result's gradient, it computes the gradient of `x`.
///
/// # Panics
///
/// If the lengths differ.
pub fn apply(dropout: AttentionDropout, x: &[f32], out: &mut [f32]) {
    check("dropout", "out", out.len(), x.len());
    let tasks: Vec<_> = x.chunks(TASK).zip(out.chunks_mut(TASK)).enumerate().collect();
    spread(x.len(), tasks, |(task, (x, out))| part(dropout, (task * TASK) as u64, x, out));
}

vectorised! {
    /// Processes the elements from `first` on.
    fn part<'a>(dropout: AttentionDropout, first: u64, x: &'a [f32], out: &'a mut [f32]) {
        for (place, (x, out)) in (first..).zip(x.iter().zip(out)) {
            *out = x * dropout.share(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_of_the_whole() {
        let dropout = AttentionDropout { probability: 0.3, key: 7 };
        let x: Vec<f32> = (0..5 * TASK + 3).map(|at| at as f32 + 1.0).collect();
        let mut out = vec![0.0; x.len()];
        apply(dropout, &x, &mut out);
        assert!((0u64..).zip(x.iter().zip(&out)).all(|(place, (x, out))| *out == x * dropout.share(place)));
        let kept = out.iter().filter(|out| **out != 0.0).count() as f64 / out.len() as f64;
        assert!((kept - 0.7).abs() < 0.01, "{kept}");
    }
}
