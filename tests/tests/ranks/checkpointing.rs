//! Activation checkpointing changes no bit, in one of our models and in a module of Burn's layers.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{DType, Distribution, Tensor};
use burn_flex::Flex;
use zero_burn::config::{Disk, Float, Offload, Tier};
use zero_burn::module::prepare;
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::rank_stats;
use zero_core::Stage;
use zero_models::{Gpt2, Gpt2Config};
use zero_ops::{FusedBackend, checkpoint};
use zero_train::engine::{EngineConfig, Step, ZeroEngine};

use crate::common::{B, Run, adamw, on_ranks, step};

/// Returns bits of losses and norms of updates with two micro-batches on all ranks, and bytes received in the last one.
fn trained(run: &Run) -> (Vec<[u64; 2]>, u64) {
    let of_ranks = on_ranks(run.ranks, &run.zero, |device| {
        let model = run.model.init::<B>(&device);
        let config = EngineConfig { accumulation: 2, ..EngineConfig::default() };
        let mut engine = ZeroEngine::initialize(model, Fused::new(Rule::adamw()), config, &device).unwrap();
        let (mut bits, mut before) = (Vec::new(), 0);
        for micro in 0..2 * run.steps {
            if micro + 2 == 2 * run.steps {
                before = rank_stats::<Flex>().wire_bytes.total();
            }
            let loss = engine.forward(|model: &Gpt2<B>| model.loss(run.tokens(micro, device.rank(), &device)));
            let value = f64::from(loss.clone().cast(DType::F32).into_data().iter::<f32>().next().unwrap());
            engine.backward(loss);
            if let Step::Updated(update) = engine.step().unwrap() {
                bits.push([value.to_bits(), update.grad_norm.to_bits()]);
            }
        }
        (bits, rank_stats::<Flex>().wire_bytes.total() - before)
    });
    let bytes = of_ranks.iter().map(|(_, bytes)| bytes).sum();
    (of_ranks.into_iter().flat_map(|(bits, _)| bits).collect(), bytes)
}

/// Inputs read back from a disk are unchanged.
#[test]
fn no_bit_differs_of_inputs_on_a_disk() {
    let swap = tempfile::tempdir().unwrap();
    for (ranks, stage, dtype) in [
        (1, Stage::DataParallel, Float::F32),
        (2, Stage::Gradients, Float::Bf16),
        (3, Stage::OptimizerState, Float::F32),
        (3, Stage::Parameters, Float::Bf16),
    ] {
        let mut run = Run { ranks, steps: 3, ..Run::tiny(stage) };
        run.model = Gpt2Config { n_layer: 5, resid_pdrop: 0.1, ..run.model };
        run.zero.param_dtype = dtype;
        let (plain, _) = trained(&run);
        run.zero.checkpointed_blocks = 4;
        let disk = Disk { path: swap.path().to_path_buf(), ..Disk::default() };
        run.zero.offload = Offload { activations: Tier::Disk, min_bytes: 0, disk, ..Offload::default() };
        let (bits, _) = trained(&run);
        assert_eq!(bits, plain, "{ranks} ranks, stage {stage}, {dtype:?}");
    }
    assert_eq!(std::fs::read_dir(swap.path()).unwrap().count(), 0, "swap files are left");
}

#[test]
fn no_bit_differs_at_any_stage() {
    for ranks in [1, 2, 3] {
        for stage in Stage::ALL {
            for dtype in [Float::F32, Float::Bf16] {
                let mut run = Run { ranks, steps: 3, ..Run::tiny(stage) };
                run.model = Gpt2Config { n_layer: 3, embd_pdrop: 0.1, attn_pdrop: 0.1, resid_pdrop: 0.1, ..run.model };
                run.zero.param_dtype = dtype;
                let (plain, bytes) = trained(&run);
                assert!(plain.iter().any(|bits| bits != &plain[0]), "nothing is trained");
                for blocks in [1, 2, usize::MAX] {
                    run.zero.checkpointed_blocks = blocks;
                    let (bits, more) = trained(&run);
                    assert_eq!(bits, plain, "{blocks} blocks, {ranks} ranks, stage {stage}, {dtype:?}");
                    // What is computed again is gathered again.
                    let is_more = ranks > 1 && stage.shards_parameters();
                    assert!(if is_more { more > bytes } else { more == bytes }, "{more} bytes, and {bytes} without");
                }
            }
        }
    }
}

/// A layer of Burn's own parts that uses every way to record: views, products, elementwise operations (one with a
/// parameter), random numbers, masks, several results.
#[derive(Module, Debug)]
struct Layer<B: FusedBackend> {
    norm: LayerNorm<B>,
    hidden: Linear<B>,
    out: Linear<B>,
    scale: Param<Tensor<B, 1>>,
    dropout: Dropout,
}

impl<B: FusedBackend> Layer<B> {
    fn forward(&self, x: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let hidden = self.dropout.forward(relu(self.hidden.forward(self.norm.forward(x.clone()))));
        let scores = softmax(hidden.clone().matmul(hidden.clone().swap_dims(1, 2)), 2);
        let seen = scores.clone().greater_elem(0.05);
        let scores = scores.mask_fill(seen.bool_not(), 0.0).clamp_max(0.9);
        let (most, _) = hidden.clone().max_dim_with_indices(1);
        let noise = Tensor::random(hidden.shape(), Distribution::Normal(0.0, 0.01), &hidden.device());
        let mixed = scores.matmul(hidden + noise) * self.scale.val().unsqueeze::<3>() + most;
        let halves = mixed.clone().chunk(2, 2);
        (x + self.out.forward(Tensor::cat(halves, 2)).tanh(), mixed.powi_scalar(2).mean_dim(2))
    }
}

/// Losses and norms of Burn's own loop: a nested checkpointed call, and several outputs.
fn trained_by_hand(stage: Stage, ranks: usize, is_checkpointed: bool) -> Vec<[u64; 2]> {
    let run = Run { ranks, ..Run::tiny(stage) };
    let of_ranks = on_ranks(ranks, &run.zero, |device| {
        let layer = || Layer::<B> {
            norm: LayerNormConfig::new(8).init(&device),
            hidden: LinearConfig::new(8, 16).init(&device),
            out: LinearConfig::new(16, 8).init(&device),
            scale: Param::from_tensor(Tensor::ones([16], &device)),
            dropout: DropoutConfig::new(0.2).init(),
        };
        let mut layers = prepare::<B, _>(vec![layer(), layer(), layer()], &device);
        let mut optimizer = adamw::<Vec<Layer<B>>>();
        let mut bits = Vec::new();
        for _ in 0..4 {
            let x = Tensor::<B, 3>::random([2, 5, 8], Distribution::Default, &device);
            let (next, loss, norm) = step(layers, &mut optimizer, |layers: &Vec<Layer<B>>| {
                let (mut x, mut aside) = (x.clone(), Tensor::zeros([1], &device));
                for layer in layers {
                    let forward = |x: Tensor<B, 3>| {
                        let within = |x| layer.forward(x);
                        if is_checkpointed { checkpoint(within, x) } else { within(x) }
                    };
                    let (next, more) = if is_checkpointed { checkpoint(forward, x) } else { forward(x) };
                    (x, aside) = (next, aside + more.mean());
                }
                x.powi_scalar(2).mean() + aside
            });
            bits.push([loss.to_bits(), norm.to_bits()]);
            layers = next;
        }
        bits
    });
    of_ranks.concat()
}

#[test]
fn a_module_of_stock_layers_has_the_same_bits() {
    for ranks in [1, 2] {
        for stage in Stage::ALL {
            let plain = trained_by_hand(stage, ranks, false);
            assert_eq!(trained_by_hand(stage, ranks, true), plain, "{ranks} ranks, stage {stage}");
        }
    }
}
