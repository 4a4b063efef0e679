//! Additional operations of Llama, against plain loops in f64.

use burn_backend::TensorMetadata;
use burn_std::{DType, FloatDType};
use zero_ops::quantized::{Format, Quantized};
use zero_ops::{AttentionOptions, FusedBackend};

use crate::shared::{assert_close, numbers, wide};
use crate::{WIDTHS, device, pitched, primitive, row, rows, transposed, values};

/// Returns the result, the gradients for `x` and `gamma`, and the reciprocals.
fn rms_norm(x: &[f32], gamma: &[f32], grad: &[f32], epsilon: f64) -> [Vec<f64>; 4] {
    let (d, [x, gamma, grad]) = (gamma.len(), [x, gamma, grad].map(wide));
    let (mut out, mut dx, mut d_gamma, mut rrms) = (Vec::new(), Vec::new(), vec![0.0; d], Vec::new());
    for (x, grad) in x.chunks(d).zip(grad.chunks(d)) {
        let scale = (x.iter().map(|x| x * x).sum::<f64>() / d as f64 + epsilon).sqrt().recip();
        let inner: Vec<f64> = grad.iter().zip(&gamma).map(|(g, gamma)| g * gamma).collect();
        let along = inner.iter().zip(x).map(|(g, x)| g * x * scale).sum::<f64>() / d as f64;
        out.extend(x.iter().zip(&gamma).map(|(x, gamma)| x * scale * gamma));
        dx.extend(inner.iter().zip(x).map(|(g, x)| (g - x * scale * along) * scale));
        d_gamma.iter_mut().zip(grad.iter().zip(x)).for_each(|(sum, (g, x))| *sum += g * x * scale);
        rrms.push(scale);
    }
    [out, dx, d_gamma, rrms]
}

pub fn rms_norm_agrees<B: FusedBackend>() {
    for (d, n) in WIDTHS.into_iter().flat_map(|d| [1, 2, 7, 45].map(|n| (d, n))) {
        let what = format!("rms norm of [{n}, {d}]");
        let x: Vec<f32> = numbers(n * d, 1).iter().enumerate().map(|(i, x)| 3.0 * x + (i / d % 5) as f32).collect();
        let (gamma, grad) = (numbers(d, 2), numbers(n * d, 4));
        let [out, dx, d_gamma, rrms] = rms_norm(&x, &gamma, &grad, 1e-5);
        let on_device = || primitive(row::<B>(&gamma));
        for (x, grad) in [
            (rows::<B>(&x, [n, d]), rows::<B>(&grad, [n, d])),
            (pitched(&x, [n, d]), pitched(&grad, [n, d])),
            (rows::<B>(&transposed(&x, d), [d, n]).transpose(), pitched(&grad, [n, d])),
        ] {
            let (got, saved) = B::rms_norm_forward(primitive(x.clone()), on_device(), 1e-5);
            assert_close(&what, &values::<B, 2>(got), &out, 1e-5);
            assert_close(&what, &values::<B, 1>(saved.clone()), &rrms, 1e-5);
            let (got, got_gamma) = B::rms_norm_backward(primitive(x), on_device(), saved, primitive(grad));
            // In rows of one or two elements the gradient is a difference of nearly equal numbers.
            let tolerance = if d < 3 { 1e-3 } else { 1e-5 };
            assert_close(&what, &values::<B, 2>(got), &dx, tolerance);
            assert_close(&what, &values::<B, 1>(got_gamma), &d_gamma, tolerance);
        }
    }
}

pub fn swiglu_agrees<B: FusedBackend>() {
    for (f, n) in WIDTHS.into_iter().flat_map(|f| [1, 7, 70].map(|n| (f, n))) {
        let what = format!("swiglu of [{n}, {f}]");
        let gate: Vec<f32> = numbers(n * f, 5).iter().map(|x| 12.0 * x * x * x).collect();
        let (up, grad) = (numbers(n * f, 6), numbers(n * f, 7));
        let (mut out, mut d_gate, mut d_up) = (Vec::new(), Vec::new(), Vec::new());
        for ((x, up), grad) in wide(&gate).into_iter().zip(wide(&up)).zip(wide(&grad)) {
            let share = 1.0 / (1.0 + (-x).exp());
            out.push(x * share * up);
            d_gate.push(grad * up * share * (1.0 + x * (1.0 - share)));
            d_up.push(grad * x * share);
        }
        for (gate, up, grad) in [
            (rows::<B>(&gate, [n, f]), rows::<B>(&up, [n, f]), rows::<B>(&grad, [n, f])),
            (pitched(&gate, [n, f]), rows::<B>(&transposed(&up, f), [f, n]).transpose(), pitched(&grad, [n, f])),
        ] {
            let got = B::fused_swiglu(primitive(gate.clone()), primitive(up.clone()));
            assert_close(&what, &values::<B, 2>(got), &out, 2e-6);
            let (got, got_up) = B::swiglu_backward(primitive(gate), primitive(up), primitive(grad));
            assert_close(&what, &values::<B, 2>(got), &d_gate, 2e-6);
            assert_close(&what, &values::<B, 2>(got_up), &d_up, 2e-6);
        }
    }
}

pub fn rotary_agrees<B: FusedBackend>() {
    for (b, t, heads, half) in [(1, 1, 1, 1), (2, 5, 3, 4), (3, 33, 2, 16), (2, 7, 5, 3), (1, 40, 32, 64)] {
        let (n, d) = (b * t, 2 * heads * half);
        let what = format!("rotary of {b} x {t}, {heads} heads of {}", 2 * half);
        let (x, cos, sin) = (numbers(n * d, 8), numbers(t * half, 9), numbers(t * half, 10));
        let [x64, cos64, sin64] = [&x, &cos, &sin].map(|values| wide(values));
        for back in [false, true] {
            let expected: Vec<f64> = (0..n * d)
                .map(|i| {
                    let (row, column) = (i / d, i % d);
                    let (angle, upper) = (row % t * half + column % half, column / half % 2 == 1);
                    let other = x64[if upper { i - half } else { i + half }];
                    let sign = if upper != back { 1.0 } else { -1.0 };
                    x64[i] * cos64[angle] + sign * other * sin64[angle]
                })
                .collect();
            for x in [rows::<B>(&x, [n, d]), pitched(&x, [n, d]), rows::<B>(&transposed(&x, d), [d, n]).transpose()] {
                let [cos, sin] = [&cos, &sin].map(|values| primitive(rows::<B>(values, [t, half])));
                let got = B::fused_rotary(primitive(x), cos, sin, back);
                assert_close(&what, &values::<B, 2>(got), &expected, 1e-6);
            }
        }
    }
}

/// Compares with the CPU kernels, which are checked against f64.
pub fn shared_heads_agree<B: FusedBackend>() {
    type Here = burn_flex::Flex;
    for (batch, t, heads, kv, e, masked) in [(1, 5, 4, 2, 8, false), (2, 17, 6, 1, 16, true), (2, 33, 6, 3, 8, true)] {
        let (n, d, c) = (batch * t, heads * e, kv * e);
        let options =
            AttentionOptions { batch, heads, causal: true, window: None, dropout: None, scale: 0.3, cap: None };
        let parts = [(d, 13), (c, 14), (c, 15), (d, 16)].map(|(width, seed)| (numbers(n * width, seed), width));
        let mask: Vec<f32> = (0..n).map(|i| if i % t % 3 == 1 { -1e4 } else { 0.0 }).collect();
        fn computed<B: FusedBackend>(
            parts: [burn::tensor::Tensor<B, 2>; 4],
            mask: Option<burn::tensor::Tensor<B, 2>>,
            options: AttentionOptions,
        ) -> [Vec<f32>; 4] {
            let ([q, k, v, grad], mask) = (parts.map(primitive), mask.map(primitive));
            let (out, lse) = B::attention_forward(q.clone(), k.clone(), v.clone(), mask.clone(), options);
            let [dq, dk, dv] = B::attention_backward(q, k, v, mask, out.clone(), lse, grad, options);
            [out, dq, dk, dv].map(values::<B, 2>)
        }
        let there = parts.each_ref().map(|(x, width)| rows::<B>(x, [n, *width]));
        let here = parts.each_ref().map(|(x, width)| rows::<Here>(x, [n, *width]));
        let got = computed(there, masked.then(|| rows::<B>(&mask, [batch, t])), options);
        let expected = computed(here, masked.then(|| rows::<Here>(&mask, [batch, t])), options);
        for (what, (got, expected)) in ["out", "dq", "dk", "dv"].iter().zip(got.iter().zip(&expected)) {
            assert_close(&format!("{what} of {heads} heads over {kv}"), got, &wide(expected), 1e-5);
        }
    }
}

/// Checks that numbers are as close as the formats allow, with the CPU's scales.
pub fn quantized_agrees<B: FusedBackend>() {
    for (name, format) in Format::NAMES {
        let gap = match format {
            Format::Int8 => 1.0 / 127.0,
            Format::Int4 => 1.0 / 7.0,
            Format::Nf4 => 1.0 - 0.696_192_8,
        };
        for (n, width) in [(1, 1), (3, 64), (5, 100), (300, 1600)] {
            let elements = numbers(n * width, 13);
            let made = zero_ops::to_codes::<B>(primitive(rows::<B>(&elements, [n, width])), format);
            let how = Quantized { format, width };
            let got = values::<B, 2>(zero_ops::from_codes::<B>(made, how, DType::F32));
            for (x, got) in elements.chunks(width).zip(got.chunks(width)) {
                for (x, got) in x.chunks(64).zip(got.chunks(64)) {
                    let largest = x.iter().fold(0f64, |largest, x| largest.max(f64::from(x.abs())));
                    for (x, got) in x.iter().zip(got) {
                        let off = (f64::from(*x) - *got as f64).abs();
                        assert!(off <= largest * (gap / 2.0 + 1e-6), "{name}: {x} became {got} of {largest}");
                    }
                }
            }
        }
        // A non-finite number makes its block NaN, and no other.
        let mut elements = numbers(130, 14);
        elements[70] = f32::INFINITY;
        elements[129] = 0.0;
        elements[128] = 0.0;
        let made = zero_ops::to_codes::<B>(primitive(rows::<B>(&elements, [1, 130])), format);
        let got = values::<B, 2>(zero_ops::from_codes::<B>(made, Quantized { format, width: 130 }, DType::F32));
        assert!(got.iter().enumerate().all(|(at, got)| got.is_nan() == (64..128).contains(&at)), "{name}");
        assert!(got[128..].iter().all(|got| *got == 0.0), "{name}");
    }
}

/// Compares with the CPU's results bit by bit.
pub fn dequantized_agrees<B: FusedBackend>() {
    for (name, format) in Format::NAMES {
        for (d, width) in [(1, 1), (3, 64), (5, 100), (300, 1600)] {
            let (how, elements) = (Quantized { format, width }, numbers(d * width, 11));
            let of = |range: std::ops::Range<usize>| elements[range].to_vec();
            let here = zero_ops::quantized_parameter::<burn_flex::Flex>([d, width], format, &Default::default(), of);
            let here = burn_flex::Flex::dequantized(primitive(here), how, FloatDType::F32);
            let there = zero_ops::quantized_parameter::<B>([d, width], format, &device::<B>(), of);
            let made = B::dequantized(primitive(there.clone()), how, FloatDType::F32);
            assert_eq!(made.dtype(), DType::F32);
            assert_eq!(values::<B, 2>(made), values::<burn_flex::Flex, 2>(here), "[{d}, {width}] in {name}");
            let x = rows::<B>(&numbers(2 * d, 12), [2, d]);
            let product = zero_ops::quantized_linear(x.clone(), there.clone(), None, None, how);
            assert_eq!(product.dims(), [2, width]);
        }
    }
}
