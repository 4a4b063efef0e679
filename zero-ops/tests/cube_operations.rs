//! The CubeCL kernels against plain loops in f64, on a device (`../src/cube/tested.rs`), with fusion and without.
//!
//! Without a GPU the device is Mesa's lavapipe:
//! `VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json cargo test -p zero-ops --features vulkan --test cube_operations`

#![cfg(any(feature = "vulkan", feature = "cuda"))]

use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use burn_autodiff::Autodiff;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, FloatDType};
use zero_ops::{CrossEntropyOptions, FusedBackend, Gelu};

mod llama;
mod reference;
#[path = "../../zero-kernels/tests/shared/mod.rs"]
mod shared;
#[path = "../src/cube/tested.rs"]
mod tested;
use llama::{dequantized_agrees, quantized_agrees, rms_norm_agrees, rotary_agrees, shared_heads_agree, swiglu_agrees};
use reference::{Gradients, column_sums, cross_entropy, gelu, gelu_backward, layer_norm, layer_norm_backward, linear};
use shared::{assert_close, numbers};

/// Widths that vectors and cubes divide and that they do not, up to one that does not fit into a cube's registers.
const WIDTHS: [usize; 8] = [1, 2, 3, 5, 64, 1600, 5000, 9000];

/// Returns the device, or panics with a remedy if there is none.
fn device<B: Backend>() -> B::Device {
    let device = B::Device::default();
    let found = std::panic::catch_unwind(|| {
        let device = B::Device::default();
        Tensor::<B, 1>::zeros([1], &device).into_data()
    });
    assert!(found.is_ok(), "no device was found: install Mesa's lavapipe and name its driver in VK_ICD_FILENAMES");
    device
}

/// Returns rows in the middle of wider rows, as a slice without a copy.
fn pitched<B: Backend>(values: &[f32], [n, d]: [usize; 2]) -> Tensor<B, 2> {
    // 64 elements are a multiple of every alignment that a slice without a copy requires.
    let gap = 64;
    let mut wide = vec![f32::NAN; n * (d + 2 * gap)];
    for (row, values) in wide.chunks_mut(d + 2 * gap).zip(values.chunks(d)) {
        row[gap..gap + d].copy_from_slice(values);
    }
    let wide = Tensor::<B, 2>::from_data(TensorData::new(wide, [n, d + 2 * gap]), &device::<B>());
    wide.slice([0..n, gap..gap + d])
}

fn rows<B: Backend>(values: &[f32], shape: [usize; 2]) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &device::<B>())
}

fn row<B: Backend>(values: &[f32]) -> Tensor<B, 1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &device::<B>())
}

fn targets<B: Backend>(values: &[i64]) -> Tensor<B, 1, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &device::<B>())
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

fn values<B: Backend, const D: usize>(x: FloatTensor<B>) -> Vec<f32> {
    let x: Tensor<B, D> = Tensor::from_primitive(TensorPrimitive::Float(x));
    let data = x.into_data().convert::<f32>();
    // An empty buffer has no alignment.
    if data.num_elements() == 0 { Vec::new() } else { data.to_vec().unwrap() }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn layer_norm_agrees<B: FusedBackend>() {
    for d in WIDTHS {
        for n in [1, 2, 7, 45] {
            let what = format!("layer norm of [{n}, {d}]");
            // A mean that is not 0, and differs between rows.
            let x: Vec<f32> = numbers(n * d, 1).iter().enumerate().map(|(i, x)| 3.0 * x + (i / d % 5) as f32).collect();
            let (gamma, beta, grad) = (numbers(d, 2), numbers(d, 3), numbers(n * d, 4));
            let expected = layer_norm(&x, &gamma, Some(&beta), d, 1e-5);
            let forward = |x: Tensor<B, 2>, beta: Option<&[f32]>| {
                let beta = beta.map(|beta| primitive(row::<B>(beta)));
                B::layer_norm_forward(primitive(x), primitive(row::<B>(&gamma)), beta, 1e-5)
            };
            for x in [rows::<B>(&x, [n, d]), pitched(&x, [n, d]), rows::<B>(&transposed(&x, d), [d, n]).transpose()] {
                let (out, mean, rstd) = forward(x, Some(&beta));
                assert_close(&what, &values::<B, 2>(out), &expected.out, 1e-5);
                assert_close(&what, &values::<B, 1>(mean), &expected.mean, 1e-5);
                assert_close(&what, &values::<B, 1>(rstd), &expected.rstd, 1e-5);
            }
            let without = layer_norm(&x, &gamma, None, d, 1e-5);
            assert_close(&what, &values::<B, 2>(forward(rows(&x, [n, d]), None).0), &without.out, 1e-5);

            let expected = layer_norm_backward(&x, &gamma, &grad, d, 1e-5);
            for (x, grad) in [
                (rows::<B>(&x, [n, d]), rows::<B>(&grad, [n, d])),
                (pitched(&x, [n, d]), pitched(&grad, [n, d])),
                (pitched(&x, [n, d]), rows::<B>(&transposed(&grad, d), [d, n]).transpose()),
            ] {
                let (_, mean, rstd) = forward(x.clone(), Some(&beta));
                let gamma = primitive(row::<B>(&gamma));
                let (dx, d_gamma, d_beta) = B::layer_norm_backward(primitive(x), gamma, mean, rstd, primitive(grad));
                // In a row of one or two elements the gradient is a difference of equal numbers, multiplied by a reciprocal standard
                // deviation of up to 300.
                let tolerance = if d < 3 { 1e-3 } else { 1e-5 };
                assert_close(&what, &values::<B, 2>(dx), &expected.dx, tolerance);
                assert_close(&what, &values::<B, 1>(d_gamma), &expected.d_gamma, tolerance);
                assert_close(&what, &values::<B, 1>(d_beta), &expected.d_beta, 1e-5);
            }
        }
    }
}

fn transposed(x: &[f32], d: usize) -> Vec<f32> {
    let n = x.len() / d;
    (0..d).flat_map(|column| (0..n).map(move |row| x[row * d + column])).collect()
}

fn gelu_agrees<B: FusedBackend>() {
    for kind in [Gelu::Tanh, Gelu::Erf] {
        for f in WIDTHS {
            for n in [1, 2, 7, 300] {
                let n = if f > 1000 { n.min(70) } else { n };
                let what = format!("{kind:?} gelu of [{n}, {f}]");
                let x: Vec<f32> = numbers(n * f, 5).iter().map(|x| 12.0 * x * x * x).collect();
                let (bias, grad) = (numbers(f, 6), numbers(n * f, 7));
                for bias in [Some(bias.as_slice()), None] {
                    let (out, gradients) = (gelu(kind, &x, bias, f), gelu_backward(kind, &x, bias, &grad, f));
                    for (x, grad) in [
                        (rows::<B>(&x, [n, f]), rows::<B>(&grad, [n, f])),
                        (pitched(&x, [n, f]), pitched(&grad, [n, f])),
                        (rows::<B>(&transposed(&x, f), [f, n]).transpose(), pitched(&grad, [n, f])),
                    ] {
                        let bias = bias.map(|bias| primitive(row::<B>(bias)));
                        let got = B::fused_gelu(kind, primitive(x.clone()), bias.clone());
                        assert_close(&what, &values::<B, 2>(got), &out, 1e-6);
                        let (dx, d_bias) = B::gelu_backward_fused(kind, primitive(x), bias, primitive(grad));
                        assert_close(&what, &values::<B, 2>(dx), &gradients.dx, 2e-6);
                        assert_eq!(d_bias.is_some(), gradients.d_bias.is_some(), "{what}");
                        if let (Some(got), Some(expected)) = (d_bias, gradients.d_bias.as_ref()) {
                            assert_close(&what, &values::<B, 1>(got), expected, 1e-5);
                        }
                    }
                }
            }
        }
    }
}

/// Uses vectors of 4 elements, and of 1.
fn linear_agrees<B: FusedBackend>() {
    for [n, d, f] in [[33, 16, 24], [70, 5, 7]] {
        let (x, weight, grad) = (numbers(n * d, 30), numbers(d * f, 31), numbers(n * f, 32));
        let (bias, residual) = (numbers(f, 33), numbers(n * f, 34));
        let what = format!("linear of [{n}, {d}] by [{d}, {f}]");
        for (has_bias, has_residual) in [(false, false), (true, false), (false, true), (true, true)] {
            let bias = has_bias.then_some(bias.as_slice());
            let expected = linear(&x, &weight, bias, has_residual.then_some(residual.as_slice()), d);
            for is_apart in [false, true] {
                let matrix = |values: &[f32], shape| {
                    primitive(if is_apart { pitched(values, shape) } else { rows::<B>(values, shape) })
                };
                let bias = bias.map(|bias| primitive(row::<B>(bias)));
                let residual = has_residual.then(|| matrix(&residual, [n, f]));
                let out = B::fused_linear(matrix(&x, [n, d]), matrix(&weight, [d, f]), bias, residual);
                assert_close(&what, &values::<B, 2>(out), &expected, 1e-5);
            }
        }
        let matrix = |values: &[f32], shape| primitive(rows::<B>(values, shape));
        let dx = B::fused_linear_x_backward(matrix(&weight, [d, f]), matrix(&grad, [n, f]));
        let expected = linear(&grad, &transposed(&weight, f), None, None, f);
        assert_close(&what, &values::<B, 2>(dx), &expected, 1e-5);
        let d_weight = B::fused_linear_weight_backward(matrix(&x, [n, d]), matrix(&grad, [n, f]));
        let expected = linear(&transposed(&x, d), &grad, None, None, n);
        assert_close(&what, &values::<B, 2>(d_weight), &expected, 1e-5);
    }
}

fn bias_gradient_agrees<B: FusedBackend>() {
    for f in WIDTHS {
        for n in [1, 2, 31, 33, 1000] {
            let grad = numbers(n * f, 8);
            let expected = column_sums(&grad, f);
            for grad in [rows::<B>(&grad, [n, f]), pitched(&grad, [n, f])] {
                let got = values::<B, 1>(B::fused_linear_bias_backward(primitive(grad)));
                assert_close(&format!("columns of [{n}, {f}]"), &got, &expected, 1e-5);
            }
        }
    }
}

/// Every third target is `ignored`.
fn some_targets(n: usize, v: usize, ignored: i64) -> Vec<i64> {
    (0..n).map(|i| if i % 3 == 1 { ignored } else { (i * 7 % v) as i64 }).collect()
}

fn check_cross_entropy<B: FusedBackend>(
    what: &str,
    operands: [&Tensor<B, 2>; 2],
    ids: &[i64],
    options: CrossEntropyOptions,
    expected: &Gradients,
) {
    let [x, weight] = operands.map(|x| primitive(x.clone()));
    let ids = || targets::<B>(ids).into_primitive();
    let loss = B::fused_linear_cross_entropy(x.clone(), weight.clone(), ids(), options);
    assert_close(what, &values::<B, 1>(loss), &[expected.loss], 1e-5);
    let (loss, dx, d_weight) = B::linear_cross_entropy_with_gradients(x.clone(), weight.clone(), ids(), options);
    assert_close(what, &values::<B, 1>(loss), &[expected.loss], 1e-5);
    assert_close(what, &values::<B, 2>(dx), &expected.dx, 1e-5);
    assert_close(what, &values::<B, 2>(d_weight), &expected.d_weight, 1e-5);
    let (loss, dx) = B::linear_cross_entropy_with_x_gradient(x, weight, ids(), options);
    assert_close(what, &values::<B, 1>(loss), &[expected.loss], 1e-5);
    assert_close(what, &values::<B, 2>(dx), &expected.dx, 1e-5);
}

/// Uses few shapes, for a software device.
fn cross_entropy_agrees<B: FusedBackend>() {
    for [n, d, v] in [[7, 5, 3], [33, 16, 257], [6, 8, 5003], [7, 16, 5003]] {
        let x = numbers(n * d, 9);
        let weight: Vec<f32> = numbers(v * d, 10).iter().map(|weight| 2.0 * weight).collect();
        let (on_device, weight_on_device) = (rows::<B>(&x, [n, d]), rows::<B>(&weight, [v, d]));
        let check = |case: &str, ids: &[i64], options: CrossEntropyOptions| {
            let what = format!("cross-entropy of [{n}, {d}] by [{v}, {d}], {case}");
            let expected = cross_entropy(&x, &weight, ids, options, d);
            check_cross_entropy::<B>(&what, [&on_device, &weight_on_device], ids, options, &expected);
            expected
        };
        let some = some_targets(n, v, -100);
        let expected = check("some ignored", &some, Some(-100).into());
        check("all ignored", &vec![-100; n], Some(-100).into());
        let capped = CrossEntropyOptions { ignored: Some(-100), cap: Some(1.5) };
        check("with a soft cap", &some, capped);
        let ids: Vec<i64> = some.iter().map(|id| (*id).max(0)).collect();
        check("none ignored", &ids, None.into());
        check("a column ignored", &ids, Some(0).into());
        // No 32-bit target has this value.
        check("none to be ignored", &ids, Some(i64::MIN).into());
        if n == 33 {
            let operands = [&pitched::<B>(&x, [n, d]), &pitched::<B>(&weight, [v, d])];
            check_cross_entropy::<B>("rows apart", operands, &some, Some(-100).into(), &expected);
        }
    }
}

/// An index outside the columns makes the loss NaN and has no gradient.
fn targets_out_of_range_are_told<B: FusedBackend>() {
    let [n, d, v] = [3, 4, 5];
    let (x, weight) = (numbers(n * d, 11), numbers(v * d, 12));
    for wrong in [v as i64, i64::from(i32::MAX), -1, i64::from(i32::MIN)] {
        let ids = targets::<B>(&[0, wrong, 4]).into_primitive();
        let (x, weight) = (primitive(rows::<B>(&x, [n, d])), primitive(rows::<B>(&weight, [v, d])));
        let (loss, dx, d_weight) = B::linear_cross_entropy_with_gradients(x, weight, ids, Some(-100).into());
        assert!(values::<B, 1>(loss)[0].is_nan(), "a target of {wrong}");
        assert!(values::<B, 2>(dx).iter().chain(&values::<B, 2>(d_weight)).all(|value| value.is_finite()));
    }
}

/// A NaN among the logits makes the loss NaN, also with a soft cap.
fn a_nan_is_told<B: FusedBackend>() {
    let [n, d, v] = [3, 4, 5];
    let (x, weight) = (rows::<B>(&[f32::NAN; 12], [n, d]), rows::<B>(&numbers(v * d, 12), [v, d]));
    for cap in [None, Some(2.0)] {
        let (ids, options) = (targets::<B>(&[0, 1, 4]).into_primitive(), CrossEntropyOptions { ignored: None, cap });
        let loss = B::fused_linear_cross_entropy(primitive(x.clone()), primitive(weight.clone()), ids, options);
        assert!(values::<B, 1>(loss)[0].is_nan(), "a cap of {cap:?}");
    }
}

/// Sums of no rows are 0, and nothing else fails without rows.
fn no_rows_are_no_fault<B: FusedBackend>() {
    let d = 5;
    let none = || primitive(Tensor::<B, 2>::empty([0, d], &device::<B>()));
    let gamma = || primitive(row::<B>(&[1.0; 5]));
    assert_eq!(values::<B, 1>(B::fused_linear_bias_backward(none())), [0.0; 5]);
    let weight = || primitive(rows::<B>(&[1.0; 15], [5, 3]));
    assert_eq!(B::fused_linear(none(), weight(), None, None).shape().to_vec(), [0, 3]);
    let grad = || primitive(Tensor::<B, 2>::empty([0, 3], &device::<B>()));
    assert_eq!(B::fused_linear_x_backward(weight(), grad()).shape().to_vec(), [0, d]);
    assert_eq!(values::<B, 2>(B::fused_linear_weight_backward(none(), grad())), [0.0; 15]);
    let (out, mean, rstd) = B::layer_norm_forward(none(), gamma(), Some(gamma()), 1e-5);
    assert_eq!((out.shape().to_vec(), mean.shape().to_vec()), (vec![0, d], vec![0]));
    let (dx, d_gamma, d_beta) = B::layer_norm_backward(none(), gamma(), mean, rstd, none());
    assert_eq!(dx.shape().to_vec(), [0, d]);
    assert_eq!((values::<B, 1>(d_gamma), values::<B, 1>(d_beta)), (vec![0.0; 5], vec![0.0; 5]));
    let (dx, d_bias) = B::gelu_backward_fused(Gelu::Tanh, none(), Some(gamma()), none());
    assert_eq!(dx.shape().to_vec(), [0, d]);
    assert_eq!(values::<B, 1>(d_bias.unwrap()), [0.0; 5]);
    assert_eq!(B::fused_gelu(Gelu::Erf, none(), None).shape().to_vec(), [0, d]);
    let ids = Tensor::<B, 1, Int>::empty([0], &device::<B>()).into_primitive();
    let weight = primitive(rows::<B>(&[1.0; 15], [3, 5]));
    let (loss, _, d_weight) = B::linear_cross_entropy_with_gradients(none(), weight, ids, None.into());
    assert_eq!((values::<B, 1>(loss), values::<B, 2>(d_weight)), (vec![0.0], vec![0.0; 15]));
}

/// The same operands give the same bits.
fn bits_repeat<B: FusedBackend>() {
    let [n, d, v] = [200, 96, 33];
    let (x, grad, weight) = (numbers(n * d, 13), numbers(n * d, 14), numbers(v * d, 15));
    let once = || {
        let (x, grad) = (rows::<B>(&x, [n, d]), rows::<B>(&grad, [n, d]));
        let gamma = || primitive(row::<B>(&numbers(d, 16)));
        let (_, mean, rstd) = B::layer_norm_forward(primitive(x.clone()), gamma(), None, 1e-5);
        let (_, d_gamma, d_beta) =
            B::layer_norm_backward(primitive(x.clone()), gamma(), mean, rstd, primitive(grad.clone()));
        let (_, d_bias) =
            B::gelu_backward_fused(Gelu::Tanh, primitive(x.clone()), Some(gamma()), primitive(grad.clone()));
        let ids = targets::<B>(&some_targets(n, v, -1)).into_primitive();
        let weight = primitive(rows::<B>(&weight, [v, d]));
        let loss = B::fused_linear_cross_entropy(primitive(x), weight, ids, Some(-1).into());
        let sums = B::fused_linear_bias_backward(primitive(grad));
        [d_gamma, d_beta, d_bias.unwrap(), loss, sums].map(|made| bits(&values::<B, 1>(made)))
    };
    let first = once();
    for _ in 0..3 {
        assert_eq!(first, once());
    }
}

/// Compares autodiff's gradients from the kernels, with operations before and after that fusion may join, to central differences of the f64
/// loss. Not generic: over a generic backend, autodiff requires more if Burn's `distributed` is on, as it is when the workspace is built
/// together.
macro_rules! gradients_agree_with_differences {
    ($backend:ty) => {{
        type B = $backend;
        let [n, d, v] = [5, 6, 4];
        let device = device::<B>();
        let operands = [numbers(n * d, 17), numbers(d, 18), numbers(d, 19), numbers(d, 20), numbers(v * d, 21)];
        let ids = [0, 3, -100, 2, 1];
        for kind in [Gelu::Tanh, Gelu::Erf] {
            let leaf = |values: &[f32], shape: &[usize]| {
                Tensor::<Autodiff<B>, 2>::from_data(TensorData::new(values.to_vec(), shape), &device).require_grad()
            };
            let [x, gamma, beta, bias, weight] =
                [(0, n), (1, 1), (2, 1), (3, 1), (4, v)].map(|(i, rows)| leaf(&operands[i], &[rows, d]));
            let vector = |x: &Tensor<Autodiff<B>, 2>| x.clone().reshape([d]);
            let h = zero_ops::layer_norm(x.clone() * 2.0 + 0.5, vector(&gamma), Some(vector(&beta)), 1e-5) * 1.5;
            let h = zero_ops::gelu(kind, h, Some(vector(&bias))) + 0.25;
            let ids_on_device = Tensor::from_data(TensorData::new(ids.to_vec(), [n]), &device);
            let loss = zero_ops::linear_cross_entropy(h, weight.clone(), ids_on_device, Some(-100));

            let of = |operands: &[Vec<f64>; 5]| {
                let [x, gamma, beta, bias, weight] = operands;
                let x: Vec<f64> = x.iter().map(|x| x * 2.0 + 0.5).collect();
                let h = reference::layer_norm_of(&x, gamma, Some(beta), d, 1e-5).out;
                let h: Vec<f64> = h.iter().map(|h| h * 1.5).collect();
                let h: Vec<f64> = reference::gelu_of(kind, &h, Some(bias), d).iter().map(|h| h + 0.25).collect();
                reference::cross_entropy_of(&h, weight, &ids, Some(-100).into(), d).loss
            };
            let mut wide = operands.clone().map(|values| values.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>());
            let got: f64 = f64::from(loss.clone().into_data().to_vec::<f32>().unwrap()[0]);
            assert!((got - of(&wide)).abs() < 1e-5, "{kind:?}: {got}, {}", of(&wide));
            let gradients = loss.backward();
            for (i, leaf) in [x, gamma, beta, bias, weight].iter().enumerate() {
                let gradient = leaf.grad(&gradients).unwrap().into_data().to_vec::<f32>().unwrap();
                for j in 0..gradient.len() {
                    let at = wide[i][j];
                    let [above, below] = [1e-5, -1e-5].map(|h| {
                        wide[i][j] = at + h;
                        of(&wide)
                    });
                    wide[i][j] = at;
                    let expected = (above - below) / 2e-5;
                    let error = (f64::from(gradient[j]) - expected).abs();
                    assert!(error < 2e-5, "{kind:?}: operand {i}, element {j}: {}, {expected}", gradient[j]);
                }
            }
        }
    }};
}

/// In 16 bit, if the device supports it: equal to fp32 of the same operands, up to one rounding.
fn sixteen_bit_agrees<B: FusedBackend>() {
    let device = device::<B>();
    for (dtype, epsilon) in [(FloatDType::F16, 2f64.powi(-11)), (FloatDType::BF16, 2f64.powi(-8))] {
        if !B::supports_dtype(&device, DType::from(dtype)) {
            println!("{dtype:?} is not checked: this device does not have it");
            continue;
        }
        let [n, d, v] = [37, 72, 50];
        // Operands that 16 bit represent exactly.
        let exact = |len, seed| numbers(len, seed).iter().map(|x| (x * 64.0).round() / 64.0).collect::<Vec<f32>>();
        let (x, grad, gamma, weight) = (exact(n * d, 22), exact(n * d, 23), exact(d, 24), exact(v * d, 25));
        let narrow = |x: Tensor<B, 2>| primitive(x.cast(dtype));
        let vector = || primitive(row::<B>(&gamma).cast(dtype));
        let (rows_of_x, rows_of_grad) = (|| narrow(rows(&x, [n, d])), || narrow(rows(&grad, [n, d])));

        let expected = layer_norm(&x, &gamma, Some(&gamma), d, 1e-5);
        let (out, mean, rstd) = B::layer_norm_forward(rows_of_x(), vector(), Some(vector()), 1e-5);
        assert_eq!((out.dtype(), mean.dtype()), (dtype.into(), DType::F32));
        assert_close("layer norm", &values::<B, 2>(out), &expected.out, epsilon);
        assert_close("mean", &values::<B, 1>(mean.clone()), &expected.mean, 1e-5);
        let (dx, d_gamma, _) = B::layer_norm_backward(rows_of_x(), vector(), mean, rstd, rows_of_grad());
        let expected = layer_norm_backward(&x, &gamma, &grad, d, 1e-5);
        assert_eq!(dx.dtype(), dtype.into());
        assert_close("layer norm: dx", &values::<B, 2>(dx), &expected.dx, epsilon);
        assert_close("layer norm: d gamma", &values::<B, 1>(d_gamma), &expected.d_gamma, epsilon);

        for kind in [Gelu::Tanh, Gelu::Erf] {
            let out = B::fused_gelu(kind, rows_of_x(), Some(vector()));
            assert_close("gelu", &values::<B, 2>(out), &gelu(kind, &x, Some(&gamma), d), epsilon);
            let (dx, d_bias) = B::gelu_backward_fused(kind, rows_of_x(), Some(vector()), rows_of_grad());
            let expected = gelu_backward(kind, &x, Some(&gamma), &grad, d);
            assert_close("gelu: dx", &values::<B, 2>(dx), &expected.dx, epsilon);
            assert_close("gelu: d bias", &values::<B, 1>(d_bias.unwrap()), &expected.d_bias.unwrap(), epsilon);
        }
        let out = B::fused_linear(rows_of_x(), narrow(rows(&weight, [d, v])), None, None);
        assert_eq!(out.dtype(), dtype.into());
        // Sums of up to 72 products, rounded.
        assert_close("linear", &values::<B, 2>(out), &linear(&x, &weight, None, None, d), 8.0 * epsilon);
        let sums = B::fused_linear_bias_backward(rows_of_grad());
        assert_close("bias", &values::<B, 1>(sums), &column_sums(&grad, d), epsilon);

        let ids = some_targets(n, v, -100);
        let of = || targets::<B>(&ids).into_primitive();
        for cap in [None, Some(4.0)] {
            let options = CrossEntropyOptions { ignored: Some(-100), cap };
            let Gradients { loss: expected_loss, dx: expected_dx, d_weight: expected_d_weight } =
                cross_entropy(&x, &weight, &ids, options, d);
            let (loss, dx, d_weight) =
                B::linear_cross_entropy_with_gradients(rows_of_x(), narrow(rows(&weight, [v, d])), of(), options);
            assert_eq!([loss.dtype(), dx.dtype(), d_weight.dtype()], [DType::F32; 3]);
            // Logits of up to 12 are rounded, and their gradient once more.
            assert_close("loss", &values::<B, 1>(loss), &[expected_loss], 12.0 * epsilon);
            let largest = |values: &[f64]| values.iter().fold(0f64, |largest, value| largest.max(value.abs()));
            for (what, got, expected) in [("dx", dx, expected_dx), ("d weight", d_weight, expected_d_weight)] {
                let scale = largest(&expected);
                let scaled: Vec<f64> = expected.iter().map(|value| value / scale).collect();
                let got: Vec<f32> = values::<B, 2>(got).iter().map(|value| value / scale as f32).collect();
                assert_close(what, &got, &scaled, 12.0 * epsilon);
            }
        }
    }
}

macro_rules! suite {
    ($name:ident, $backend:ty: $($test:ident),* $(,)?) => {
        mod $name {
            $(#[test]
            fn $test() {
                super::$test::<$backend>();
            })*

            #[test]
            fn gradients_agree_with_differences() {
                use super::*;

                gradients_agree_with_differences!($backend);
            }
        }
    };
    ($($name:ident: $backend:ty),*) => {
        $(suite!(
            $name, $backend: layer_norm_agrees, gelu_agrees, linear_agrees, bias_gradient_agrees, cross_entropy_agrees,
            targets_out_of_range_are_told, a_nan_is_told, no_rows_are_no_fault, bits_repeat, sixteen_bit_agrees, rms_norm_agrees, swiglu_agrees,
            rotary_agrees, dequantized_agrees, quantized_agrees, shared_heads_agree,
        );)*
    };
}

suite!(bare: crate::tested::Plain, under_fusion: crate::tested::Fused);
