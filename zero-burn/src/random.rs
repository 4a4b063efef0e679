//! Random tensors: element `i` of a draw depends only on the seed, the draw's stream and `i` ([`Stream`]), so that each rank can draw only
//! its shard of a parameter.

use std::ops::Range;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Distribution, TensorData};
use burn_std::{DType, Shape};
use rayon::prelude::*;
pub use zero_engine::random::RandomState;
pub(crate) use zero_engine::random::{Stream, sign, sign_bytes, words};

/// The random draw that a parameter's first values came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drawn {
    /// The seed of the random numbers.
    pub(crate) seed: u64,
    /// Number of parameters created since that seed.
    pub(crate) birth: u64,
    /// Index of this part of the full parameter, if ranks along foreign axes hold other parts.
    pub(crate) part: Option<u64>,
    pub(crate) distribution: Distribution,
}

impl Drawn {
    /// Returns the random stream: the same numbers on every rank of the part, for any number of ranks and any type.
    pub(crate) fn stream(&self) -> Stream {
        Stream::of_parameter(self.seed, self.birth, self.part)
    }
}

/// Number of elements that are worth a task of their own.
const TASK: usize = 1 << 14;

/// Returns elements `range` of a draw from `distribution`, in the type `T`.
fn sample<T: Copy + Default + Send>(
    stream: Stream,
    range: Range<usize>,
    distribution: Distribution,
    from: impl Fn(f64) -> T + Sync + Send,
) -> Vec<T> {
    // 24 bits, so that an f32 never rounds up to the excluded upper end of [0, 1).
    let unit24 = |i: usize| (stream.bits(i as u64) >> 40) as f64 * (1.0 / (1u64 << 24) as f64);
    let scaled = |low: f64, high: f64| each(range.clone(), |i| from(low + (high - low) * unit24(i)));
    match distribution {
        Distribution::Default => scaled(0.0, 1.0),
        Distribution::Uniform(low, high) => scaled(low, high),
        Distribution::Bernoulli(p) => each(range, |i| from(if unit24(i) < p { 1.0 } else { 0.0 })),
        Distribution::Normal(mean, std) => stream.normals(range, mean, std, from),
    }
}

/// Computes the elements of `range` on the threads of this rank's pool.
fn each<T: Send>(range: Range<usize>, element: impl Fn(usize) -> T + Sync + Send) -> Vec<T> {
    range.into_par_iter().with_min_len(TASK).map(element).collect()
}

/// Returns elements `range` of a draw from `stream` as data of `shape` (whose size is the range's) and `dtype`.
pub(crate) fn data(
    stream: Stream,
    range: Range<usize>,
    distribution: Distribution,
    shape: impl Into<Shape>,
    dtype: DType,
) -> TensorData {
    match dtype {
        DType::F32 => TensorData::new(sample(stream, range, distribution, |x| x as f32), shape),
        DType::F64 => TensorData::new(sample(stream, range, distribution, |x| x), shape),
        DType::I64 => TensorData::new(sample(stream, range, distribution, |x| x as i64), shape),
        DType::I32 => TensorData::new(sample(stream, range, distribution, |x| x as i32), shape),
        other => TensorData::new(sample(stream, range, distribution, |x| x as f32), shape).convert_dtype(other),
    }
}

/// Returns a full draw as a tensor. Dropout masks are drawn on devices. All else is drawn on the host, because devices round differently.
pub(crate) fn tensor<B: Backend>(
    stream: Stream,
    shape: Shape,
    distribution: Distribution,
    dtype: DType,
    device: &B::Device,
) -> FloatTensor<B> {
    #[cfg(feature = "cubecl")]
    if let Distribution::Bernoulli(p) = distribution
        && let Some(made) = zero_ops::bernoulli::<B>(stream.key(), p, shape.clone(), dtype, device)
    {
        return made;
    }
    B::float_from_data(data(stream, 0..shape.num_elements(), distribution, shape, dtype), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(range: Range<usize>, distribution: Distribution) -> Vec<f64> {
        let len = range.len();
        data(Stream::new(&[1, 2]), range, distribution, [len], DType::F64).to_vec().unwrap()
    }

    #[test]
    fn a_part_is_the_part_of_the_whole() {
        for distribution in [Distribution::Default, Distribution::Normal(1.0, 2.0), Distribution::Bernoulli(0.3)] {
            let whole = values(0..1000, distribution);
            for range in [0..1, 3..4, 7..500, 500..1000, 999..1000] {
                assert_eq!(values(range.clone(), distribution), whole[range]);
            }
        }
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let n = 200_000;
        let moments = |v: Vec<f64>| {
            let mean = v.iter().sum::<f64>() / n as f64;
            (mean, (v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64).sqrt())
        };
        let (mean, std) = moments(values(0..n, Distribution::Normal(0.5, 0.02)));
        assert!((mean - 0.5).abs() < 3e-4 && (std - 0.02).abs() < 2e-4, "{mean} {std}");
        let (mean, std) = moments(values(0..n, Distribution::Uniform(-1.0, 1.0)));
        assert!(mean.abs() < 5e-3 && (std - 1.0 / 3f64.sqrt()).abs() < 3e-3, "{mean} {std}");
        let (mean, _) = moments(values(0..n, Distribution::Bernoulli(0.1)));
        assert!((mean - 0.1).abs() < 3e-3, "{mean}");
    }

    #[test]
    fn streams_differ() {
        let of = |words: &[u64]| Stream::new(words).bits(0);
        assert_ne!(of(&[0, 1]), of(&[1, 0]));
        assert_ne!(of(&[0]), of(&[0, 0]));
    }
}
