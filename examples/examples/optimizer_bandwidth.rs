//! `cargo run --release --example optimizer_bandwidth -- [MILLIONS [ROUNDS]]`
//!
//! Measures how much of the machine's memory bandwidth the fused AdamW uses: 28 bytes per parameter (parameter and two moments
//! read and written, gradient read). The reference is the same threads scaling one array in place, alternating in one run.

use std::alloc::System;
use std::time::Instant;

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::config::ZeroConfig;
use zero_burn::launch::launch;
use zero_burn::module::{collect_grads, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;
use zero_core::alloc::PageKeeper;
use zero_examples::median;

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

type A = Autodiff<Zero<Flex>>;

#[derive(Module, Debug)]
struct Weights<B: Backend> {
    w: Param<Tensor<B, 1>>,
}

/// Returns the seconds of one step of `optimizer` on `elements` parameters; the gradient is created beforehand.
fn step<O: Optimizer<Weights<A>, A>>(
    weights: &mut Option<Weights<A>>,
    optimizer: &mut O,
    elements: usize,
    device: &ZeroDevice<burn_flex::FlexDevice>,
) -> f64 {
    let model = weights.take().expect("the weights are put back below");
    let factor = Tensor::<A, 1>::from_data(TensorData::new(vec![1e-3f32; elements], [elements]), device);
    let grads = GradientsParams::from_grads((model.w.val() * factor).sum().backward(), &model);
    let grads = collect_grads::<A, _>(grads, &model);
    let begin = Instant::now();
    *weights = Some(optimizer.step(1e-3, model, grads));
    begin.elapsed().as_secs_f64()
}

/// Returns the seconds of scaling one array in place: 8 bytes per element, one stream.
fn scale(array: &mut [f32]) -> f64 {
    use rayon::prelude::*;
    let begin = Instant::now();
    array.par_chunks_mut(1 << 13).for_each(|chunk| chunk.iter_mut().for_each(|x| *x *= 1.0001));
    begin.elapsed().as_secs_f64()
}

fn main() {
    let number = |at: usize, default: usize| {
        let integer = "expected an integer: millions of parameters, or rounds";
        std::env::args().nth(at).map_or(default, |text| text.parse().expect(integer))
    };
    let (elements, rounds) = (number(1, 32) * 1_000_000, number(2, 9));
    let config = ZeroConfig::new(Stage::OptimizerState);
    launch::<Flex, _, String>(1, &config, &Default::default(), |device| {
        let new = || {
            let data = TensorData::new(vec![0.5f32; elements], [elements]);
            Some(prepare::<A, _>(Weights { w: Param::from_data(data, &device) }, &device))
        };
        let (mut fused_weights, mut burns_weights) = (new(), new());
        let mut fused = Fused::<A>::new(Rule::adamw());
        let mut burns = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
        let mut array = vec![1f32; elements];
        let (mut ours, mut theirs, mut floor) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            let fused_seconds = step(&mut fused_weights, &mut fused, elements, &device);
            let scale_seconds = scale(&mut array);
            let burns_seconds = step(&mut burns_weights, &mut burns, elements, &device);
            // The first round creates the state.
            if round > 0 {
                ours.push(fused_seconds);
                floor.push(scale_seconds);
                theirs.push(burns_seconds);
            }
        }
        let bandwidth = |bytes: usize, seconds: f64| (bytes * elements) as f64 / seconds / 1e9;
        let (ours, floor, theirs) = (median(ours), median(floor), median(theirs));
        let (memory, fused, burns) = (bandwidth(8, floor), bandwidth(28, ours), bandwidth(28, theirs));
        let threads = rayon::current_num_threads();
        println!("{elements} parameters, medians of {rounds} alternating rounds, {threads} threads");
        println!("memory, one array scaled in place  {memory:6.2} GB/s");
        println!("fused AdamW                        {fused:6.2} GB/s, {:.3} of the memory rate", fused / memory);
        println!(
            "Burn's AdamW                       {burns:6.2} GB/s; fused AdamW is {:.1} times as fast",
            theirs / ours
        );
        Ok(())
    })
    .expect("one rank has nobody to disagree with");
}
