//! Backward passes outside of training steps, or not on all ranks.

use crate::common::*;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use zero_burn::module::mark;
use zero_burn::optim::distributed;

fn prepared(device: &Device) -> (Linear<B>, impl Optimizer<Linear<B>, B>) {
    let model = LinearConfig::new(WIDTH, 3).init::<B>(device);
    distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), device)
}

/// The gradient of the output with respect to the input: forces in a validation, saliency maps, adversarial examples.
fn slope(model: &Linear<B>, x: Tensor<B, 2>) -> Tensor<Inner, 2> {
    let x = x.require_grad();
    let grads = model.forward(x.clone()).sum().backward();
    x.grad(&grads).expect("the input's gradient")
}

/// Rank 0 alone validates, with a backward pass to the input, as many programs do "on the main process": the pass would
/// pair with the other rank's training pass.
#[test]
fn rank_0_alone_validates_with_gradients() {
    for check_replicas in [0, 1] {
        refused("rank 0 alone validates with gradients", &["rank 0", "rank 1", "backward pass"], move |device| {
            let (mut model, mut optimizer) = prepared(&device);
            for step in 0..4 {
                if step == 2 && device.rank() == 0 {
                    slope(&model, batch(&device, 1, 50 + check_replicas));
                }
                let loss = model.forward(batch(&device, 2, step)).powf_scalar(2.0).mean();
                model = update(model, &mut optimizer, loss);
            }
            whole(&model)
        });
    }
}

/// The number of such passes depends on a rank's remaining rows: one here, two there. Only a step's first pass is reduced while it runs.
#[test]
fn ranks_validate_unevenly() {
    like_one_rank("ranks validate unevenly", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..3 {
            let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
            for pass in 0..=device.rank() {
                slope(&model, batch(&device, 1, 60 + pass));
            }
        }
        whole(&model)
    });
}

/// One rank alone may differentiate a copy without gradients, which is not marked for reduction.
#[test]
fn rank_0_alone_validates_on_a_copy_without_gradients() {
    like_one_rank("rank 0 alone validates on a copy", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..4 {
            if step == 2 && device.rank() == 0 {
                slope(&model.clone().no_grad(), batch(&device, 1, 50));
            }
            let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

/// All ranks run the same such passes.
#[test]
fn all_ranks_validate_with_gradients() {
    like_one_rank("all ranks validate with gradients", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..4 {
            // Of rows that are each rank's own, as in a real evaluation.
            slope(&model, batch(&device, world, 50 + step));
            let loss = model.forward(batch(&device, world, step)).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

/// One rank finds a NaN gradient and skips this step after its backward pass: the next collective reports what each
/// rank did.
#[test]
fn one_rank_leaves_a_step_out_after_its_pass() {
    refused("one rank leaves a step out after its pass", &["backward pass", "rank 0", "rank 1"], |device| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..4 {
            let loss = model.forward(batch(&device, 2, step)).powf_scalar(2.0).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            if step == 1 && device.rank() == 1 {
                continue;
            }
            model = optimizer.step(0.05, model, grads);
        }
        whole(&model)
    });
}

/// The same before the pass, at a NaN loss. Passes of different steps pair up, which a count cannot detect; the error
/// comes when the other rank has one more.
#[test]
fn one_rank_leaves_a_step_out_before_its_pass() {
    refused("one rank leaves a step out before its pass", &["step"], |device| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..4 {
            let loss = model.forward(batch(&device, 2, step)).powf_scalar(2.0).mean();
            if step == 1 && device.rank() == 1 {
                continue;
            }
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

/// Two losses of one step, each with its own pass.
#[test]
fn two_losses_two_passes() {
    like_one_rank("two losses", |device, world| {
        let (mut model, mut optimizer) = prepared(&device);
        for step in 0..3 {
            let y = model.forward(batch(&device, world, step));
            let mut first = y.clone().powf_scalar(2.0).mean().backward();
            let one = GradientsParams::from_module(&mut first, &model);
            mark::<B, _>(&model);
            let mut second = model.forward(batch(&device, world, step)).abs().mean().backward();
            let two = GradientsParams::from_module(&mut second, &model);
            model = optimizer.step(0.05, model, one);
            model = optimizer.step(0.05, model, two);
        }
        whole(&model)
    });
}
