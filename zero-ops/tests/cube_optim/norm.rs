//! Sums of squares and counts of non-finite elements.

use burn_backend::{Backend, DType, TensorMetadata};
use zero_ops::{Clip, clip_factor, sums_of_squares};

use crate::{Fused, Plain, numbers, rounded, supports, tensor, values};

const LENGTHS: [usize; 12] = [1, 2, 3, 4, 31, 1000, 4097, 16_384, 16_388, 70_001, 0, 300_000];

/// Returns `count` lengths, which include all of the above.
fn lengths(count: usize) -> Vec<usize> {
    (0..count).map(|i| LENGTHS[i % LENGTHS.len()] + i / LENGTHS.len()).collect()
}

fn exact<B: Backend>(count: usize, dtype: DType) {
    if !supports::<B>(dtype) {
        return;
    }
    let all: Vec<Vec<f32>> =
        lengths(count).into_iter().enumerate().map(|(i, len)| rounded(&numbers(len, i as u64), dtype)).collect();
    let tensors: Vec<_> = all.iter().map(|x| tensor::<B>(x.clone(), dtype)).collect();
    let sums = sums_of_squares::<B>(&tensors).unwrap();
    assert_eq!(sums.dtype(), DType::F32);
    let sums = values::<B>(sums);
    assert_eq!(sums.len(), count + 1);
    for (x, sum) in all.iter().zip(&sums) {
        let expected: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let error = (f64::from(*sum) - expected).abs();
        assert!(error <= 2e-6 * expected, "{} elements: {sum}, expected {expected}", x.len());
    }
    assert_eq!(sums[count], 0.0, "all are finite");
    let again = values::<B>(sums_of_squares::<B>(&tensors).unwrap());
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&sums), bits(&again), "the same bits each time");
}

#[test]
fn sums_are_exact() {
    for count in [1, 12, 40] {
        exact::<Plain>(count, DType::F32);
    }
    exact::<Fused>(13, DType::F32);
}

#[test]
fn sums_in_16_bit_are_exact() {
    for dtype in [DType::F16, DType::BF16] {
        exact::<Plain>(13, dtype);
        exact::<Fused>(13, dtype);
    }
}

/// Each product is rounded down by nearly half a unit: rounding errors of a long chain of additions would accumulate.
#[test]
fn errors_do_not_pile_up() {
    let x = vec![0.1f32; 4_000_003];
    let expected = 4_000_003.0 * f64::from(0.1f32) * f64::from(0.1f32);
    let sum = f64::from(values::<Plain>(sums_of_squares::<Plain>(&[tensor::<Plain>(x, DType::F32)]).unwrap())[0]);
    assert!((sum - expected).abs() <= 5e-6 * expected, "{sum}, expected {expected}");
}

#[test]
fn whatever_is_not_finite_is_counted() {
    let kinds = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !supports::<Plain>(dtype) {
            continue;
        }
        for len in [1, 3, 4, 4097, 16_388] {
            for at in [0, len / 3, len / 2, len - 1] {
                let mut x = numbers(len, 5);
                x[at] = kinds[at % kinds.len()];
                let others = tensor::<Plain>(numbers(100, 6), dtype);
                let sums = sums_of_squares::<Plain>(&[others.clone(), tensor::<Plain>(x, dtype), others]).unwrap();
                assert_eq!(values::<Plain>(sums)[3], 1.0, "{dtype:?}: position {at} of {len}");
            }
        }
        let all = tensor::<Plain>(vec![f32::NAN; 70_001], dtype);
        assert_eq!(values::<Plain>(sums_of_squares::<Plain>(&[all]).unwrap())[1], 70_001.0);
    }
}

/// Large, tiny and negative numbers are finite.
#[test]
fn whatever_is_finite_is_not_counted() {
    let x = vec![f32::MAX, f32::MIN, f32::MIN_POSITIVE, 0.0, -0.0, 1e-45, 1e19];
    let sums = values::<Fused>(sums_of_squares::<Fused>(&[tensor::<Fused>(x, DType::F32)]).unwrap());
    assert_eq!(sums[1], 0.0);
}

#[test]
fn nothing_and_other_backends_have_no_sums() {
    assert!(sums_of_squares::<Plain>(&[]).is_none());
    #[cfg(feature = "flex")]
    assert!(sums_of_squares::<burn_flex::Flex>(&[tensor::<burn_flex::Flex>(vec![1.0], DType::F32)]).is_none());
}

/// One sum and more sums than a cube has units, against the formula in f64.
#[test]
fn factors_are_those_of_the_formula() {
    for count in [1, 5, 600] {
        let sums: Vec<f32> = numbers(count, 7).iter().map(|x| x * x).collect();
        let norm = sums.iter().map(|sum| f64::from(*sum)).sum::<f64>().sqrt();
        for (most, loss_scale) in [(None, 8.0), (Some(0.5), 1.0), (Some(0.5), 4096.0), (Some(1e6), 4.0)] {
            for skips in [false, true] {
                let clip = Clip { most, loss_scale, skips };
                let factor = |odd: f32| {
                    let sums = sums.iter().copied().chain([odd]).collect();
                    values::<Plain>(clip_factor::<Plain>(tensor::<Plain>(sums, DType::F32), clip))[0]
                };
                let share = most.map_or(1.0, |most: f64| (most / (norm / loss_scale + 1e-6)).min(1.0));
                let expected = share / loss_scale;
                let got = f64::from(factor(0.0));
                assert!(
                    (got - expected).abs() <= 1e-6 * expected,
                    "{count} sums, {clip:?}: {got}, expected {expected}"
                );
                // Same as the host, whose norm is then NaN: nothing is clipped.
                let odd = factor(3.0);
                assert!(if skips { odd.is_nan() } else { f64::from(odd) == 1.0 / loss_scale }, "{clip:?}: {odd}");
            }
        }
    }
    let clip = Clip { most: Some(1.0), loss_scale: 1.0, skips: true };
    let too_large = tensor::<Plain>(vec![f32::INFINITY, 0.0], DType::F32);
    assert!(values::<Plain>(clip_factor::<Plain>(too_large, clip))[0].is_nan(), "a sum that is infinite");
}
