//! LAMB: the paper's formula over the full parameter, for any sharding.
//!
//! `cargo test -p zero-tests --test ranks lamb -- --nocapture` prints the difference from double precision.

use crate::common;

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use common::{B, Device, on_ranks};
use zero_burn::config::{Float, ZeroConfig};
use zero_burn::module::{collect_grads, prepare, set_gradient};
use zero_burn::optim::{Fused, Rule};
use zero_core::Stage;

const STEPS: usize = 6;
const LR: f64 = 0.02;

/// Parameters of several shapes: many chunks per pass, zero norms, fewer elements than ranks.
#[derive(Module, Debug)]
struct Weights<B: burn::tensor::backend::Backend> {
    wide: Param<Tensor<B, 2>>,
    /// Initially zero.
    zero: Param<Tensor<B, 1>>,
    /// Without gradient and weight decay: its update is zero.
    still: Param<Tensor<B, 1>>,
    few: Param<Tensor<B, 1>>,
}

/// Number of elements of each parameter.
const SIZES: [usize; 4] = [150 * 211, 7, 5, 2];

/// Initial values, exact in 16 bit.
fn start() -> [Vec<f32>; 4] {
    let of = |size: usize, scale: f32| (0..size).map(|i| ((i * 53) % 127) as f32 * scale - 63.0 * scale).collect();
    [of(SIZES[0], 1.0 / 32.0), of(SIZES[1], 0.0), of(SIZES[2], 0.5), of(SIZES[3], 0.25)]
}

fn gradients(step: usize) -> [Vec<f32>; 4] {
    let of = |which: usize, scale: f32| -> Vec<f32> {
        (0..SIZES[which]).map(|i| (((i * 37 + step * 11 + which) % 61) as f32 - 30.0) * scale).collect()
    };
    [of(0, 1.0 / 64.0), of(1, 1.0 / 64.0), of(2, 0.0), of(3, 1.0 / 8.0)]
}

/// Returns the bits of all parameters (in 16 bit, of their masters) after each step, as seen by rank 0.
fn train(rule: Rule, ranks: usize, stage: Stage, param_dtype: Float) -> Vec<[Vec<u32>; 4]> {
    let zero = ZeroConfig { param_persistence_threshold: 3, param_dtype, ..ZeroConfig::new(stage) };
    on_ranks(ranks, &zero, |device| steps(rule, param_dtype != Float::F32, &device)).swap_remove(0)
}

fn steps(rule: Rule, has_masters: bool, device: &Device) -> Vec<[Vec<u32>; 4]> {
    let [wide, zero, still, few] = start();
    let vector = |values: Vec<f32>| Param::from_data(TensorData::from(values.as_slice()), device);
    let wide = Param::from_data(TensorData::new(wide, [150, 211]), device);
    let weights = Weights { wide, zero: vector(zero), still: vector(still), few: vector(few) };
    let mut weights = prepare::<B, _>(weights, device);
    let mut optimizer =
        Fused::<B>::new(rule).with_group(rule.with_weight_decay(0.0), 1.0, |param| param.path == "still");
    let bits = |data: TensorData| data.convert::<f32>().iter::<f32>().map(f32::to_bits).collect::<Vec<u32>>();
    (0..STEPS)
        .map(|step| {
            let Weights { wide, zero, still, few } = &weights;
            let ids: [ParamId; 4] = [wide.id, zero.id, still.id, few.id];
            let loss = wide.val().sum() + zero.val().sum() + still.val().sum() + few.val().sum();
            let grads = GradientsParams::from_grads(loss.backward(), &weights);
            let mut grads = collect_grads::<B, _>(grads, &weights);
            for (id, gradient) in ids.into_iter().zip(gradients(step)) {
                // In parts of 1/8, undone by the optimizer's scale.
                let scaled: Vec<f32> = gradient.iter().map(|x| x * 8.0).collect();
                assert!(set_gradient::<B, _>(&mut grads, &weights, id, &scaled));
            }
            weights = optimizer.step_scaled(LR, 0.125, weights.clone(), grads);
            let Weights { wide, zero, still, few } = &weights;
            let [wide, zero, still, few] =
                [wide.val().into_data(), zero.val().into_data(), still.val().into_data(), few.val().into_data()];
            match has_masters {
                true => ids.map(|id| bits(optimizer.state(id, "fp32_param").unwrap().into_data())),
                false => [bits(wide), bits(zero), bits(still), bits(few)],
            }
        })
        .collect()
}

/// The paper's formula in double precision, and the trust ratios of each step.
fn reference(rule: Rule) -> Vec<([Vec<f64>; 4], [f64; 4])> {
    let Rule::Lamb { beta_1, beta_2, epsilon, weight_decay, bias_correction, max_coeff, min_coeff } = rule else {
        panic!("{rule:?}")
    };
    let [beta_1, beta_2, epsilon] = [beta_1, beta_2, epsilon].map(f64::from);
    let mut p = start().map(|values| values.into_iter().map(f64::from).collect::<Vec<_>>());
    let (mut m, mut v) = (SIZES.map(|size| vec![0.0; size]), SIZES.map(|size| vec![0.0; size]));
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    (0..STEPS)
        .map(|step| {
            let corrected =
                |x: f64, beta: f64| if bias_correction { x / (1.0 - beta.powi(step as i32 + 1)) } else { x };
            let mut ratios = [1.0; 4];
            for (which, g) in gradients(step).into_iter().enumerate() {
                let decay = if which == 2 { 0.0 } else { f64::from(weight_decay) };
                let mut u = Vec::new();
                for (i, g) in g.into_iter().map(f64::from).enumerate() {
                    let (m, v) = (&mut m[which][i], &mut v[which][i]);
                    *m = beta_1 * *m + (1.0 - beta_1) * g;
                    *v = beta_2 * *v + (1.0 - beta_2) * g * g;
                    let direction = corrected(*m, beta_1) / (corrected(*v, beta_2).sqrt() + epsilon);
                    u.push(direction + decay * p[which][i]);
                }
                let (parameter, update) = (norm(&p[which]), norm(&u));
                if parameter > 0.0 && update > 0.0 {
                    ratios[which] = (parameter / update).clamp(f64::from(min_coeff), f64::from(max_coeff));
                }
                p[which].iter_mut().zip(u).for_each(|(p, u)| *p -= LR * ratios[which] * u);
            }
            (p.clone(), ratios)
        })
        .collect()
}

#[test]
fn follows_the_papers_formula_at_every_stage_and_number_of_ranks_with_the_same_bits() {
    let (beta_1, beta_2, epsilon, weight_decay) = (0.8, 0.95, 1e-6, 0.1);
    let lamb = |bias_correction, min_coeff, max_coeff| Rule::Lamb {
        beta_1,
        beta_2,
        epsilon,
        weight_decay,
        bias_correction,
        max_coeff,
        min_coeff,
    };
    let mut kinds = [0; 4];
    for (rule, min, max) in [(lamb(true, 0.01, 10.0), 0.01, 10.0), (lamb(false, 0.05, 0.3), 0.05, 0.3)] {
        let expected = reference(rule);
        for ratio in expected.iter().flat_map(|(_, ratios)| ratios) {
            let is = |bound: f32| (ratio - f64::from(bound)).abs() < 1e-9;
            let kind = if *ratio == 1.0 {
                0
            } else if is(min) {
                1
            } else if is(max) {
                2
            } else {
                3
            };
            kinds[kind] += 1;
        }
        for dtype in [Float::F32, Float::Bf16] {
            let one = train(rule, 1, Stage::DataParallel, dtype);
            let mut largest = 0f64;
            for ((expected, _), got) in expected.iter().zip(&one) {
                for (expected, got) in expected.iter().flatten().zip(got.iter().flatten()) {
                    largest = largest.max((expected - f64::from(f32::from_bits(*got))).abs());
                }
            }
            println!("{dtype:?}, ratios from {min} to {max}: {largest:.1e} from double precision after {STEPS} steps");
            assert!(largest < 2e-6, "{dtype:?}, {rule:?}: {largest:e}");
            for (ranks, stage) in [1, 2, 3].into_iter().flat_map(|ranks| Stage::ALL.map(|stage| (ranks, stage))) {
                let got = train(rule, ranks, stage, dtype);
                assert!(got == one, "{dtype:?}, {ranks} ranks, stage {stage}: other bits than on one rank");
            }
            let still: Vec<u32> = start()[2].iter().map(|x| x.to_bits()).collect();
            assert_eq!(one[STEPS - 1][2], still, "a parameter whose update is zero stays");
        }
    }
    assert!(kinds.iter().all(|&kind| kind > 0), "ratios of 1, of both bounds, and between them: {kinds:?}");
}
