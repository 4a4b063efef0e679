//! GPT-2 on a device against the same on the processor: losses, bytes between ranks, stages, memory.
//!
//! `cargo test -p zero-tests --features vulkan --test devices -- --nocapture` prints the figures. The device is whatever the
//! Vulkan driver shows; Mesa's lavapipe is one in software.

mod common;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use burn_wgpu::Vulkan;
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
use zero_train::engine::{EngineConfig, Step, ZeroEngine};

type A<I> = Autodiff<Zero<I>>;

/// What a run came to.
#[derive(Debug, Clone)]
struct Came {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Bytes that rank 0 received in the last step.
    wire: WireBytes,
    /// Bytes that rank 0's tensors held on its device after each step.
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

/// Trains with the engine and the fused AdamW, clipping on.
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
            let (host, device) = (train::<Flex>(&run), train::<Vulkan>(&run));
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

#[test]
fn stages_give_the_same_bits_on_a_device() {
    let run = |stage| train::<Vulkan>(&Run { ranks: 2, steps: 6, ..Run::tiny(stage) });
    let reference = run(Stage::DataParallel);
    for stage in &Stage::ALL[1..] {
        let came = run(*stage);
        let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&reference.losses), bits(&came.losses), "stage {stage}: {reference:?} against {came:?}");
    }
}

/// LAMB for matrices and AdamW for the rest, in one step.
fn lamb<I: FusedBackend>() -> Fused<A<I>> {
    let lamb = Rule::lamb().with_weight_decay(0.01);
    Fused::new(lamb).with_group(Rule::adamw(), 1.0, |param| param.shape.len() < 2)
}

#[test]
fn lamb_beside_adamw_is_the_processors_with_the_same_bits_at_all_stages() {
    let mut bits = None;
    for stage in Stage::ALL {
        let run = Run { ranks: 3, steps: 8, ..Run::tiny(stage) };
        let (host, device) = (train_by::<Flex>(&run, lamb::<Flex>), train_by::<Vulkan>(&run, lamb::<Vulkan>));
        let losses = largest_difference(&host.losses, &device.losses);
        println!("LAMB, stage {stage}: losses {losses:.1e}");
        assert!(losses < 1e-4, "stage {stage}: {:?} against {:?}", host.losses, device.losses);
        let got: Vec<u64> = device.losses.iter().map(|loss| loss.to_bits()).collect();
        assert_eq!(bits.get_or_insert_with(|| got.clone()), &got, "stage {stage}");
    }
}

#[test]
fn memory_does_not_grow_from_step_to_step() {
    for stage in Stage::ALL {
        let came = train::<Vulkan>(&Run { ranks: 2, steps: 50, ..Run::tiny(stage) });
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
        let kept = train::<Vulkan>(&run);
        run.zero.offload = offload(Tier::Host, parameters);
        let moved = train::<Vulkan>(&run);
        let losses = largest_difference(&kept.losses, &moved.losses);
        let (before, after) = (kept.in_use.last().unwrap(), moved.in_use.last().unwrap());
        println!("stage {stage}, {parameters:?}: losses {losses:.1e}, {before} bytes on the device, then {after}");
        assert!(losses < 1e-6, "stage {stage}: {:?} against {:?}", kept.losses, moved.losses);
        // Two moments of 4 bytes a parameter and rank's share, and at stage 3 the parameters too.
        assert!(2 * after < *before, "stage {stage}: {after} bytes in use in place of {before}");
    }
}
