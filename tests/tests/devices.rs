//! Compares GPT-2 on a device with the CPU: losses, bytes between ranks, stages, memory.
//!
//! `cargo test -p zero-tests --features vulkan --test devices -- --nocapture` prints the figures. The device is the one
//! that the Vulkan driver reports; Mesa's lavapipe is a software one. With `--features cuda` alone it is an NVIDIA GPU.

mod common;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
#[cfg(not(feature = "vulkan"))]
use burn_cuda::Cuda as Device;
use burn_flex::Flex;
#[cfg(feature = "vulkan")]
use burn_wgpu::Vulkan as Device;
use common::{Run, launch_options};
use zero_burn::config::{Offload, Tier};
use zero_burn::launch::launch;
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::{all_gather, rank_stats};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;
use zero_core::accounting::WireBytes;
use zero_ops::FusedBackend;
use zero_ops::devices::memory;
use zero_ops::quantized::Format;
use zero_train::engine::{EngineConfig, Step, ZeroEngine};
use zero_train::loss_scale::{DynamicLossScale, LossScaler};

type A<I> = Autodiff<Zero<I>>;

/// Results of a run.
#[derive(Debug, Clone)]
struct Came {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Bytes that rank 0 received in the last step.
    wire: WireBytes,
    /// Bytes of rank 0's tensors on its device after each step.
    in_use: Vec<u64>,
}

fn tokens<I: FusedBackend>(run: &Run, step: usize, device: &ZeroDevice<I::Device>) -> Tensor<A<I>, 2, Int> {
    let first = (step * run.ranks + device.rank()) * run.batch;
    let vocab = run.model.vocab_size;
    let ids: Vec<i32> = (first..first + run.batch)
        .flat_map(|row| (0..run.seq).map(move |i| ((row * 7 + i * (1 + row % 2)) % vocab) as i32))
        .collect();
    Tensor::from_data(TensorData::new(ids, [run.batch, run.seq]), device)
}

/// Trains with the engine and the fused AdamW, with clipping.
fn train<I: FusedBackend>(run: &Run) -> Came {
    train_by::<I>(run, || Fused::new(Rule::adamw()))
}

fn train_by<I: FusedBackend>(run: &Run, optimizer: impl Fn() -> Fused<A<I>> + Sync) -> Came {
    let body = |device: ZeroDevice<I::Device>| -> Result<Came, String> {
        let config = EngineConfig { clipping: Some(1.0), ..EngineConfig::default() };
        let model = run.model.init::<A<I>>(&device);
        let mut engine = ZeroEngine::initialize(model, optimizer(), config, &device).unwrap();
        let mut came = Came { losses: Vec::new(), norms: Vec::new(), wire: WireBytes::default(), in_use: Vec::new() };
        for step in 0..run.steps {
            let before = rank_stats::<I>().wire_bytes;
            let ids = tokens::<I>(run, step, &device);
            let loss = engine.forward(|model| model.loss(ids));
            let value = loss.clone().into_data().iter::<f64>().sum::<f64>();
            engine.backward(loss);
            let Step::Updated(update) = engine.step().unwrap() else { panic!("every step updates") };
            came.norms.push(update.grad_norm);
            came.wire = rank_stats::<I>().wire_bytes.since(&before);
            let losses = all_gather::<I>(&[value]);
            came.losses.push(losses.iter().map(|values| values[0]).sum::<f64>() / losses.len() as f64);
            came.in_use.extend(memory::<I>(device.inner()).map(|memory| memory.in_use));
        }
        Ok(came)
    };
    let launched = launch::<I, _, String>(run.ranks, &run.zero, &launch_options(), body);
    launched.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    // Not `f64::max`, which hides a NaN.
    a.iter().zip(b).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, |worst, next| if next <= worst { worst } else { next })
}

#[test]
fn losses_norms_and_bytes_are_those_of_the_processor() {
    for ranks in 1..=3 {
        for stage in Stage::ALL {
            let run = Run { ranks, steps: 8, ..Run::tiny(stage) };
            let (host, device) = (train::<Flex>(&run), train::<Device>(&run));
            let losses = largest_difference(&host.losses, &device.losses);
            let norms = largest_difference(&host.norms, &device.norms);
            println!("{ranks} rank(s), stage {stage}: losses {losses:.1e}, gradient norms {norms:.1e}");
            assert!(device.norms.iter().all(|norm| norm.is_finite() && *norm > 0.0), "{:?}", device.norms);
            assert!(losses < 1e-4, "{ranks} ranks, stage {stage}: {:?} against {:?}", host.losses, device.losses);
            assert!(norms < 1e-3, "{ranks} ranks, stage {stage}: {:?} against {:?}", host.norms, device.norms);
            assert_eq!(host.wire, device.wire, "{ranks} ranks, stage {stage}: bytes received in a step");
        }
    }
}

/// Includes the dropout of attention probabilities, which the device draws in its kernels.
#[test]
fn masks_of_dropout_are_those_of_the_processor() {
    let mut run = Run { ranks: 2, steps: 6, ..Run::tiny(Stage::Parameters) };
    (run.model.attn_pdrop, run.model.resid_pdrop, run.model.embd_pdrop) = (0.3, 0.2, 0.1);
    let (host, device) = (train::<Flex>(&run), train::<Device>(&run));
    let without = train::<Flex>(&Run { ranks: 2, steps: 6, ..Run::tiny(Stage::Parameters) });
    let (losses, effect) =
        (largest_difference(&host.losses, &device.losses), largest_difference(&host.losses, &without.losses));
    println!("dropout: losses {losses:.1e}, without it {effect:.1e}");
    assert!(losses < 1e-4, "{:?} against {:?}", host.losses, device.losses);
    assert!(effect > 1e-3, "dropout changes the losses: {:?} against {:?}", host.losses, without.losses);
}

#[test]
fn stages_give_the_same_bits_on_a_device() {
    let run = |stage, blocks, activations| {
        let mut run = Run { ranks: 2, steps: 6, ..Run::tiny(stage) };
        run.zero.checkpointed_blocks = blocks;
        run.zero.offload = Offload { activations, min_bytes: 1, ..Offload::default() };
        train::<Device>(&run)
    };
    let reference = run(Stage::DataParallel, 0, Tier::Memory);
    // The last two with activations that are computed again, of inputs that were in the host's memory.
    let activations = [(0, Tier::Memory), (usize::MAX, Tier::Host), (usize::MAX, Tier::Host)];
    for (stage, (blocks, tier)) in Stage::ALL[1..].iter().zip(activations) {
        let came = run(*stage, blocks, tier);
        let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&reference.losses), bits(&came.losses), "stage {stage}: {reference:?} against {came:?}");
    }
}

/// LAMB for matrices and AdamW for other parameters, in one step.
fn lamb<I: FusedBackend>() -> Fused<A<I>> {
    let lamb = Rule::lamb().with_weight_decay(0.01);
    Fused::new(lamb).with_group(Rule::adamw(), 1.0, |param| param.shape.len() < 2)
}

#[test]
fn lamb_beside_adamw_is_the_processors_with_the_same_bits_at_all_stages() {
    let mut bits = None;
    for stage in Stage::ALL {
        let run = Run { ranks: 3, steps: 8, ..Run::tiny(stage) };
        let (host, device) = (train_by::<Flex>(&run, lamb::<Flex>), train_by::<Device>(&run, lamb::<Device>));
        let losses = largest_difference(&host.losses, &device.losses);
        println!("LAMB, stage {stage}: losses {losses:.1e}");
        assert!(losses < 1e-4, "stage {stage}: {:?} against {:?}", host.losses, device.losses);
        let got: Vec<u64> = device.losses.iter().map(|loss| loss.to_bits()).collect();
        assert_eq!(bits.get_or_insert_with(|| got.clone()), &got, "stage {stage}");
    }
}

/// Returns losses, norms and clip factors of 6 updates; the loss of update `odd`, if given, is infinite.
fn with_an_odd_loss<I: FusedBackend>(odd: Option<usize>, scaled: bool) -> Vec<[f64; 4]> {
    let run = Run { ranks: 1, ..Run::tiny(Stage::DataParallel) };
    let body = |device: ZeroDevice<I::Device>| -> Result<Vec<[f64; 4]>, String> {
        let scaler = DynamicLossScale { initial_scale_power: 6, hysteresis: 1, ..DynamicLossScale::default() };
        let config = EngineConfig {
            clipping: Some(0.5),
            skip_overflow: !scaled,
            loss_scale: scaled.then(|| LossScaler::dynamic(scaler).unwrap()),
            ..EngineConfig::default()
        };
        let model = run.model.init::<A<I>>(&device);
        let mut engine = ZeroEngine::initialize(model, Fused::new(Rule::adamw()), config, &device).unwrap();
        let (mut came, mut step) = (Vec::new(), 0);
        while step < 6 {
            let ids = tokens::<I>(&run, step, &device);
            let is_odd = odd == Some(step) && came.len() == step;
            let loss = engine.forward(|model| model.loss(ids));
            engine.backward(if is_odd { loss.mul_scalar(f64::INFINITY) } else { loss });
            match engine.step().unwrap() {
                Step::Updated(update) => {
                    assert_eq!(engine.losses().len(), 1);
                    came.push([engine.losses()[0], update.grad_norm, update.clip_factor, update.loss_scale]);
                    step += 1;
                }
                Step::Skipped { loss_scale, next_loss_scale, skipped } => {
                    assert!(is_odd && skipped == 1 && engine.losses()[0].is_infinite(), "step {step}");
                    came.push([f64::INFINITY, 0.0, loss_scale, next_loss_scale]);
                }
                Step::Accumulating { .. } => panic!("every step ends an update"),
            }
        }
        Ok(came)
    };
    launch::<I, _, String>(1, &run.zero, &launch_options(), body).unwrap().swap_remove(0)
}

/// The host learns after an update whether the device applied it. A skipped update leaves no trace, even if it is the first.
#[test]
fn what_a_device_leaves_out_changes_no_bit() {
    let plain = with_an_odd_loss::<Device>(None, false);
    assert!(plain.iter().any(|[_, norm, clip, _]| *clip < 1.0 && *norm > 0.5), "something is clipped: {plain:?}");
    for odd in [0, 3] {
        let mut came = with_an_odd_loss::<Device>(Some(odd), false);
        assert_eq!(came.remove(odd)[0], f64::INFINITY);
        let bits = |all: &[[f64; 4]]| all.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&plain), bits(&came), "a step left out before step {odd}: {plain:?}, {came:?}");
    }
    // With a loss scale, which is halved by it, against the processor.
    let (device, host) = (with_an_odd_loss::<Device>(Some(2), true), with_an_odd_loss::<Flex>(Some(2), true));
    assert_eq!(device[2], [f64::INFINITY, 0.0, 64.0, 32.0]);
    assert_eq!(device[2], host[2]);
    for (step, (device, host)) in device.iter().zip(&host).enumerate().filter(|(step, _)| *step != 2) {
        let worst = largest_difference(host, device);
        assert!(worst < 1e-3, "step {step}: {device:?}, on the processor {host:?}");
    }
}

#[test]
fn memory_does_not_grow_from_step_to_step() {
    for stage in Stage::ALL {
        let came = train::<Device>(&Run { ranks: 2, steps: 50, ..Run::tiny(stage) });
        println!("stage {stage}: bytes in use {:?}", came.in_use);
        assert_eq!(came.in_use.len(), 50, "the device tells");
        // By the third step all that is kept from step to step is there. Ranks drift apart by a gradient or so.
        let settled = *came.in_use[2..10].iter().max().unwrap();
        let late = *came.in_use[40..].iter().min().unwrap();
        assert!(late <= settled, "stage {stage}: {:?}", came.in_use);
    }
}

#[test]
fn state_in_the_hosts_memory_leaves_the_device() {
    let offload = |optimizer, parameters| Offload { optimizer, parameters, min_bytes: 1, ..Offload::default() };
    for (stage, parameters) in [(Stage::Gradients, Tier::Memory), (Stage::Parameters, Tier::Host)] {
        let mut run = Run { ranks: 2, steps: 6, ..Run::tiny(stage) };
        let kept = train::<Device>(&run);
        run.zero.offload = offload(Tier::Host, parameters);
        let moved = train::<Device>(&run);
        let losses = largest_difference(&kept.losses, &moved.losses);
        let (before, after) = (kept.in_use.last().unwrap(), moved.in_use.last().unwrap());
        println!("stage {stage}, {parameters:?}: losses {losses:.1e}, {before} bytes on the device, then {after}");
        assert!(losses < 1e-6, "stage {stage}: {:?} against {:?}", kept.losses, moved.losses);
        // Two moments of 4 bytes a parameter and rank's share, and at stage 3 the parameters too.
        assert!(2 * after < *before, "stage {stage}: {after} bytes in use in place of {before}");
        // A part of it.
        run.zero.offload.ratio = 0.5;
        let half = train::<Device>(&run);
        let (losses, between) = (largest_difference(&kept.losses, &half.losses), half.in_use.last().unwrap());
        println!("  half of the optimizer's: losses {losses:.1e}, {between} bytes");
        assert!(losses < 1e-6, "stage {stage}: {:?} against {:?}", kept.losses, half.losses);
        assert!(after < between && between < before, "stage {stage}: {between} of {after} to {before}");
    }
}

/// Decoded on the host and copied to the device. Weights that differ in their last digits may have different codes.
#[test]
fn quantized_weights_and_a_second_cut_are_those_of_the_processor() {
    let mut run = Run { ranks: 4, steps: 8, ..Run::tiny(Stage::Parameters) };
    run.zero.quantized_weights = Some(Format::Int8);
    for size in [None, Some(2)] {
        run.zero.secondary_shard_size = size;
        let (host, device) = (train::<Flex>(&run), train::<Device>(&run));
        let losses = largest_difference(&host.losses, &device.losses);
        println!("quantised weights, second cut {size:?}: losses {losses:.1e}");
        assert!(losses < 1e-3, "{:?} against {:?}", host.losses, device.losses);
        assert_eq!(host.wire, device.wire, "bytes received in a step");
    }
}
