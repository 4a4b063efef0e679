//! Threads other than the rank's own.

use std::sync::mpsc::channel;

use crate::common::*;
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Tensor, TensorData};
use zero_burn::config::ZeroConfig;
use zero_burn::optim::distributed;
use zero_core::Stage;

fn train(device: &Device, world: usize) -> Vec<f32> {
    let model = LinearConfig::new(WIDTH, 3).init::<B>(device);
    let (mut model, mut optimizer) = distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), device);
    for step in 0..3 {
        let loss = model.forward(batch(device, world, step)).powf_scalar(2.0).mean();
        model = update(model, &mut optimizer, loss);
    }
    whole(&model)
}

/// The body hands the full training to another thread: for a user interface, for a runtime.
#[test]
fn a_thread_of_the_body_trains() {
    like_one_rank("a thread of the body trains", |device, world| {
        let thread = std::thread::Builder::new().stack_size(32 << 20);
        thread.spawn(move || train(&device, world)).unwrap().join().unwrap()
    });
}

/// Members of an ensemble that are created concurrently would be numbered in a different order on each rank.
#[test]
fn members_are_made_side_by_side() {
    refused("members made side by side", &["on thread \"member\""], |device| {
        let device = &device;
        let make = move || LinearConfig::new(WIDTH, 3).init::<B>(device).weight.val().shape();
        std::thread::scope(|scope| {
            let member = std::thread::Builder::new().name("member".into()).spawn_scoped(scope, make).unwrap();
            member.join().map_err(|payload| std::panic::resume_unwind(payload)).unwrap()
        })
    });
}

/// A thread answers requests with the weights that it received last, while training continues. At stage 3 it reads
/// shards of other ranks, which may have freed them: it then reports an error.
#[test]
fn a_thread_infers_while_the_rank_trains() {
    fn body(device: &Device, world: usize) -> Vec<f32> {
        let model = LinearConfig::new(WIDTH, 3).init::<B>(device);
        let (mut model, mut optimizer) = distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), device);
        let (weights, asked) = channel::<<Linear<B> as AutodiffModule<B>>::InnerModule>();
        let (x, answers) = (Tensor::<Inner, 2>::ones([2, WIDTH], device), channel::<TensorData>());
        let server = std::thread::spawn(move || {
            for model in asked {
                // Slower on one rank than on the other.
                std::thread::sleep(std::time::Duration::from_millis(30));
                answers.0.send(model.forward(x.clone()).into_data()).unwrap();
            }
        });
        for step in 0..4 {
            weights.send(model.valid()).unwrap();
            let loss = model.forward(batch(device, world, step)).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
        }
        drop(weights);
        server.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload));
        answers.1.iter().flat_map(|data| data.to_vec::<f32>().unwrap()).collect()
    }
    let alone = run(1, config(Stage::DataParallel), |device| body(&device, 1)).unwrap().remove(0);
    for stage in Stage::ALL {
        match run(2, config(stage), |device| body(&device, 2)) {
            Ok(ranks) => assert!(ranks.iter().all(|answers| distance(answers, &alone) < 1e-4), "{stage:?}"),
            Err(told) => assert!(stage == Stage::Parameters && told.contains("while another still reads"), "{told}"),
        }
    }
}

/// A stack that fits in the 8 MiB of a program's main thread fits in a rank's.
#[test]
fn a_body_of_four_mebibytes_of_stack() {
    /// Calls itself until `bytes` of the stack are in use, however large the compiler makes a frame.
    #[inline(never)]
    fn deep(top: usize, bytes: usize) -> usize {
        let frame = std::hint::black_box([0u8; 4 << 10]);
        let used = top - frame.as_ptr().addr();
        if used < bytes { deep(top, bytes) + frame[0] as usize } else { used }
    }
    let ranks = run(2, config(Stage::Parameters), |_| {
        let top = std::hint::black_box(0u8);
        deep((&raw const top).addr(), 4 << 20)
    });
    assert!(ranks.unwrap().iter().all(|used| *used >= 4 << 20));
}

/// Two concurrent launches in one process give the results of separate ones.
#[test]
fn two_launches_side_by_side() {
    let alone = run(2, config(Stage::Parameters), |device| train(&device, 2)).unwrap();
    let other = ZeroConfig { seed: 8, ..config(Stage::Parameters) };
    let other_alone = run(2, other.clone(), |device| train(&device, 2)).unwrap();
    let second = std::thread::spawn(move || run(2, other, |device| train(&device, 2)).unwrap());
    let first = run(2, config(Stage::Parameters), |device| train(&device, 2)).unwrap();
    assert_eq!(first, alone);
    assert_eq!(second.join().unwrap(), other_alone);
}
