//! LAMB follows the paper's formula over full parameters, however they are sharded: `cargo test --test lamb -- --nocapture` prints the
//! difference from double precision.

mod common;

use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData};
use burn_optim::LambConfig;
use common::{Gpt, LR, STEPS, apart, config, device, options, train_plain, train_threads, weights};
use zero_core::Stage;
use zero_param::{BoundedLamb, Error, run_threads, shard};

/// A sharded matrix with more elements than one pass over memory takes at a time, and replicated vectors.
#[derive(Module, Debug)]
struct Weights {
    wide: Param<Tensor<2>>,
    /// Initially zeros: its norm is 0.
    zero: Param<Tensor<1>>,
    /// Its gradient is zero, and so is its update if there is no weight decay.
    still: Param<Tensor<1>>,
}

const WIDE: [usize; 2] = [150, 211];
const SIZES: [usize; 3] = [WIDE[0] * WIDE[1], 7, 5];
const NAMES: [&str; 3] = ["wide", "zero", "still"];

fn start() -> [Vec<f32>; 3] {
    let of = |size: usize, scale: f32| (0..size).map(|i| (((i * 53) % 127) as f32 - 63.0) * scale).collect();
    [of(SIZES[0], 1.0 / 32.0), of(SIZES[1], 0.0), of(SIZES[2], 0.5)]
}

/// Gradients whose means over the ranks are exact.
fn gradients(step: usize) -> [Vec<f32>; 3] {
    let of = |which: usize, scale: f32| -> Vec<f32> {
        (0..SIZES[which]).map(|i| (((i * 37 + step * 11 + which) % 61) as f32 - 30.0) * scale).collect()
    };
    [of(0, 1.0 / 64.0), of(1, 1.0 / 64.0), of(2, 0.0)]
}

/// Returns all parameters after the last step, as rank 0 sees them.
fn train(lamb: &BoundedLamb, world: usize, stage: Stage) -> [Vec<f32>; 3] {
    let trained = run_threads(world, &options(), |ranks| {
        let device = device();
        let [wide, zero, still] = start();
        let vector = |values: Vec<f32>| Param::from_data(TensorData::from(values.as_slice()), &device);
        let wide = Param::from_data(TensorData::new(wide, WIDE), &device);
        let model = Weights { wide, zero: vector(zero), still: vector(still) };
        let (mut model, zero) = shard(model, ranks, &config(stage))?;
        let mut optimizer = zero.optimizer(lamb)?;
        for step in 0..STEPS {
            let [wide, along, still] = gradients(step);
            let vector = |values: Vec<f32>| Tensor::<1>::from_data(TensorData::from(values.as_slice()), &device);
            let wide = Tensor::<2>::from_data(TensorData::new(wide, WIDE), &device);
            let (_, grads) = zero.backward(|| {
                let vectors = (model.zero.val() * vector(along)).sum() + (model.still.val() * vector(still)).sum();
                (model.wide.val() * wide).sum() + vectors
            })?;
            model = optimizer.step(LR, model, grads)?;
        }
        let mut all = weights(&model);
        Ok::<_, Error>(NAMES.map(|name| all.remove(name).unwrap()))
    });
    trained.unwrap().swap_remove(0)
}

/// Returns the result of the formula in double precision, and the trust ratios of all steps.
fn reference(decay: f32, min: f32, max: f32) -> ([Vec<f64>; 3], Vec<f64>) {
    let [beta_1, beta_2, epsilon] = [BETAS[0], BETAS[1], EPSILON].map(f64::from);
    let mut p = start().map(|values| values.into_iter().map(f64::from).collect::<Vec<_>>());
    let (mut m, mut v) = (SIZES.map(|size| vec![0.0; size]), SIZES.map(|size| vec![0.0; size]));
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut ratios = Vec::new();
    for step in 0..STEPS {
        for (which, g) in gradients(step).into_iter().enumerate() {
            let mut u = Vec::new();
            for (i, g) in g.into_iter().map(f64::from).enumerate() {
                let (m, v) = (&mut m[which][i], &mut v[which][i]);
                *m = beta_1 * *m + (1.0 - beta_1) * g;
                *v = beta_2 * *v + (1.0 - beta_2) * g * g;
                let corrected = |x: f64, beta: f64| x / (1.0 - beta.powi(step as i32 + 1));
                u.push(
                    corrected(*m, beta_1) / (corrected(*v, beta_2).sqrt() + epsilon) + f64::from(decay) * p[which][i],
                );
            }
            let (parameter, update) = (norm(&p[which]), norm(&u));
            let ratio = match parameter > 0.0 && update > 0.0 {
                true => (parameter / update).clamp(min.into(), max.into()),
                false => 1.0,
            };
            p[which].iter_mut().zip(u).for_each(|(p, u)| *p -= LR * ratio * u);
            ratios.push(ratio);
        }
    }
    (p, ratios)
}

const BETAS: [f32; 2] = [0.8, 0.95];
const EPSILON: f32 = 1e-6;

fn lamb(decay: f32) -> LambConfig {
    let config = LambConfig::new().with_beta_1(BETAS[0]).with_beta_2(BETAS[1]);
    config.with_epsilon(EPSILON).with_weight_decay(decay)
}

#[test]
fn it_follows_the_papers_formula_at_every_stage_and_number_of_ranks_with_the_same_bits() {
    let mut kinds = [0; 4];
    for (decay, min, max) in [(0.1, 0.01, 10.0), (0.0, 0.05, 0.3)] {
        let (expected, ratios) = reference(decay, min, max);
        for ratio in ratios {
            let is = |bound: f64| (ratio - bound).abs() < 1e-9;
            kinds[[1.0, min.into(), max.into()].into_iter().position(is).unwrap_or(3)] += 1;
        }
        let lamb = BoundedLamb { lamb: lamb(decay), ratios: min..=max };
        let one = train(&lamb, 1, Stage::DataParallel);
        let pairs = expected.iter().flatten().zip(one.iter().flatten());
        let largest = pairs.map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, f64::max);
        println!("ratios from {min} to {max}: {largest:.1e} from double precision after {STEPS} steps");
        assert!(largest < 2e-6, "{largest:e}");
        for (world, stage) in [1, 2, 3].into_iter().flat_map(|world| Stage::ALL.map(|stage| (world, stage))) {
            assert!(train(&lamb, world, stage) == one, "{world} ranks, stage {stage}: other bits than on one rank");
        }
    }
    assert!(kinds.iter().all(|&kind| kind > 0), "ratios of 1, of both bounds, and between them: {kinds:?}");
}

#[test]
fn burns_own_is_trained_on_pieces_as_on_wholes() {
    let config_of = lamb(0.1);
    let plain = train_plain::<Gpt<1>>(2, config_of.init());
    let first = train_threads::<Gpt<1>>(2, &config(Stage::DataParallel), &config_of);
    for stage in Stage::ALL {
        let told = train_threads::<Gpt<1>>(2, &config(stage), &config_of);
        assert!(told == first, "stage {stage} has other bits than stage 0");
        for (told, plain) in told.iter().zip(&plain) {
            let apart = apart(told, plain);
            assert!(apart < 1e-6, "stage {stage}: {apart:e} from Burn's");
        }
    }
    // Without trust ratios it is elementwise, and is Burn's.
    let plain = train_plain::<Gpt<1>>(2, config_of.clone().with_use_trust_ratio(false).init());
    let told = train_threads::<Gpt<1>>(2, &config(Stage::Parameters), &config_of.clone().with_use_trust_ratio(false));
    assert!(apart(&told[0], &plain[0]) < 1e-6);
}
