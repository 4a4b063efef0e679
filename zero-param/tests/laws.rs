//! Properties of every sharded module: `cargo test --test laws`.

mod common;

use burn::module::{Lora, Module, Param, ParamGroup};
use burn::tensor::module::linear;
use burn::tensor::{Device, Tensor};
use burn_nn::{RmsNorm, RmsNormConfig};
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LBFGSConfig, LambConfig, LionConfig,
    ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use common::{
    Gpt, Half, LR, Mlp, Net, STEPS, Told, apart, config, device, filled, options, rows, seed, table, train, train_on,
    train_plain, train_threads, unkept, value, weights,
};
use zero_core::accounting::WireBytes;
use zero_core::{Partition, Stage};
use zero_param::{Error, Float, Grads, OptimizerConfig, Ranks, Uses, ZeroConfig, run_threads, shard};

/// Checks that losses, norms and weights have the same bits at all stages, and are plain Burn's except for the order of additions.
fn stages_agree<N: Net>(worlds: std::ops::RangeInclusive<usize>, optimizer: &(impl OptimizerConfig + Sync)) {
    for world in worlds {
        let plain = train_plain::<N>(world, optimizer.elementwise().unwrap());
        assert!(plain[0].losses.windows(2).any(|pair| pair[0] != pair[1]), "it trains");
        let first = train_threads::<N>(world, &config(Stage::DataParallel), optimizer);
        for (rank, (sharded, plain)) in first.iter().zip(&plain).enumerate() {
            let apart = apart(sharded, plain);
            assert!(apart < 1e-6, "{world} ranks, rank {rank}: {apart:e}");
        }
        for stage in &Stage::ALL[1..] {
            let told = train_threads::<N>(world, &config(*stage), optimizer);
            assert!(told == first, "{world} ranks: stage {stage} has other bits than stage 0");
        }
    }
}

#[test]
fn an_mlp_trains_alike_at_all_stages() {
    // Odd sizes: shards differ in length.
    stages_agree::<Mlp<13, 3>>(1..=4, &SgdConfig::new());
    stages_agree::<Mlp<16, 2>>(1..=2, &SgdConfig::new());
}

#[test]
fn a_gpt2_trains_alike_at_all_stages() {
    stages_agree::<Gpt<2>>(1..=4, &SgdConfig::new());
}

#[test]
fn each_elementwise_optimizer_trains_alike_at_all_stages() {
    stages_agree::<Mlp<13, 2>>(3..=3, &AdaGradConfig::new());
    stages_agree::<Mlp<13, 2>>(3..=3, &AdamConfig::new());
    stages_agree::<Mlp<13, 2>>(3..=3, &AdamWConfig::new());
    stages_agree::<Mlp<13, 2>>(3..=3, &AdanConfig::new());
    stages_agree::<Mlp<13, 2>>(3..=3, &LionConfig::new());
    stages_agree::<Mlp<13, 2>>(3..=3, &RmsPropConfig::new());
    stages_agree::<Gpt<1>>(2..=2, &AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Value(1e-3))));
}

/// A user's own configuration.
struct Own(ModuleOptimizer);

impl OptimizerConfig for Own {
    fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
        Ok(self.0.clone())
    }
}

#[test]
fn optimizers_of_whole_parameters_are_refused_by_name() {
    fn refused(config: &impl OptimizerConfig, name: &str) {
        let error = config.elementwise().err().expect("it is refused").to_string();
        assert!(error.starts_with(name) && error.contains("AdamW"), "{error}");
    }
    refused(&AdafactorConfig::new(), "Adafactor");
    refused(&LBFGSConfig::new(), "LBFGS");
    refused(&LambConfig::new(), "Lamb");
    refused(&MuonConfig::new(), "Muon");
    run_threads(2, &options(), |ranks| {
        let (_, zero) = shard(Mlp::<8, 1>::build(&device()), ranks, &config(Stage::Parameters))?;
        let norm = SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(1.0)));
        let error = zero.optimizer(&norm).err().expect("it is refused").to_string();
        assert!(error.contains("GradientClipping::Norm") && error.contains("clip_norm"), "{error}");
        // Burn reveals only the first group's clipping.
        let sgd = SgdConfig::new();
        let grouped = |clipping: Option<GradientClippingConfig>| {
            let clipping = clipping.map(|clipping| clipping.init());
            sgd.init().with_group(ParamGroup::from_path("bias"), sgd.build(), clipping)
        };
        assert!(zero.optimizer_of(grouped(None)).is_ok());
        let clipped = || grouped(Some(GradientClippingConfig::Norm(1.0)));
        for refused in [zero.optimizer_of(clipped()), zero.optimizer(&Own(clipped()))] {
            let error = refused.err().expect("it is refused").to_string();
            assert!(error.starts_with("the gradient clipping of an optimizer group"), "{error}");
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn sixteen_bit_gathers_keep_masters_in_32() {
    let half = |stage| ZeroConfig { param_dtype: Float::Bf16, ..config(stage) };
    let exact = train_threads::<Half>(2, &config(Stage::Parameters), &SgdConfig::new());
    let first = train_threads::<Half>(2, &half(Stage::DataParallel), &SgdConfig::new());
    for stage in &Stage::ALL[1..] {
        assert!(train_threads::<Half>(2, &half(*stage), &SgdConfig::new()) == first, "stage {stage}");
        let gathered = |config| moved::<Half>(&device(), 2, config)[0].all_gather;
        assert_eq!(2 * gathered(&half(*stage)), gathered(&config(*stage)), "bytes that are gathered at stage {stage}");
    }
    for (half, exact) in first[0].losses.iter().zip(&exact[0].losses) {
        assert!((half - exact).abs() < 0.01 * exact && half != exact, "{half} in 16 bit, {exact} in 32");
    }
}

const D: usize = 12;

/// Uses of parameters that differ from those in a layer.
#[derive(Module, Debug)]
struct Odd<const HOW: u8> {
    first: Param<Tensor<2>>,
    second: Param<Tensor<2>>,
    down: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
    norm: RmsNorm,
}

/// `x A A`, and `A` once more.
const TWICE: u8 = 0;
/// A head of Burn's operations, tied by a transposed view.
const TIED: u8 = 1;
/// A frozen layer with a low-rank adapter, after a trained one.
const LORA: u8 = 2;
/// A norm that reads the shape of its vector.
const NORM: u8 = 3;

impl<const HOW: u8> Net for Odd<HOW> {
    fn build(device: &Device) -> Self {
        let mut odd = filled(Self {
            first: table(D, D, device),
            second: table(D, D, device),
            down: table(D, 2, device),
            up: table(2, D, device),
            norm: RmsNormConfig::new(D).init(device),
        });
        if HOW == LORA {
            odd.second = odd.second.set_require_grad(false);
        }
        odd
    }

    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let (x, y) = rows(seed, D, device);
        let (a, b) = (&self.first, &self.second);
        let x = x.matmul(a.val());
        let out = match HOW {
            TWICE => x.tanh().matmul(a.val()) + y.clone().matmul(a.val()),
            TIED => linear(x, b.val().transpose(), None),
            LORA => x.clone().matmul(b.val()) + x.matmul(self.down.val()).matmul(self.up.val()),
            _ => self.norm.forward(x),
        };
        (out - y).square().mean()
    }
}

/// Trains at stage 3 on two ranks, and returns each parameter's total uses.
fn used<N: Net>() -> Vec<(String, Uses)> {
    used_by::<N>(&unkept(Stage::Parameters))
}

fn used_by<N: Net>(config: &ZeroConfig) -> Vec<(String, Uses)> {
    let uses = run_threads(2, &options(), |ranks| {
        let (_, zero) = train::<N>(ranks, config, &SgdConfig::new())?;
        Ok::<_, Error>(zero.paths().map(|path| (path.to_string(), zero.uses(path).unwrap())).collect::<Vec<_>>())
    });
    uses.unwrap().swap_remove(0)
}

fn in_all(uses: &[(String, Uses)], path: &str) -> Uses {
    uses.iter().find(|(found, _)| found == path).unwrap().1
}

/// Uses of a replicated parameter: reduced once a step, and never gathered.
const VECTOR: Uses = Uses { gathered_forward: 0, gathered_backward: 0, gathered_ahead: 0, reduced: STEPS };

/// Returns the uses of a path per step. There is one more forward gather, which reads the weights at the end.
fn a_step(uses: &[(String, Uses)], path: &str) -> (usize, usize, usize) {
    let Uses { gathered_forward, gathered_backward, reduced, .. } = in_all(uses, path);
    let each = |count: usize| {
        assert_eq!(count % STEPS, 0, "{path}: {uses:?}");
        count / STEPS
    };
    (each(gathered_forward - 1), each(gathered_backward), each(reduced))
}

#[test]
fn layers_gather_twice_and_reduce_once() {
    stages_agree::<Mlp<12, 4>>(2..=2, &SgdConfig::new());
    let uses = used::<Mlp<12, 4>>();
    // No gradient flows to the inputs: the first layer needs no weight for it.
    assert_eq!(a_step(&uses, "layers.0.weight"), (1, 0, 1));
    for layer in 1..4 {
        assert_eq!(a_step(&uses, &format!("layers.{layer}.weight")), (1, 1, 1));
    }
    assert_eq!(in_all(&uses, "layers.1.bias"), VECTOR);
    // From the second step on, the last layer is kept for its gradient, which is its next use.
    let kept = used_by::<Mlp<12, 4>>(&config(Stage::Parameters));
    assert_eq!(in_all(&kept, "layers.3.weight").gathered_backward, 1);
    assert_eq!(a_step(&kept, "layers.2.weight"), (1, 1, 1));
}

#[test]
fn a_parameter_that_is_used_three_times_is_reduced_once() {
    stages_agree::<Odd<TWICE>>(1..=3, &SgdConfig::new());
    // Only the last use has an operation behind it that needs its gradient.
    assert_eq!(a_step(&used::<Odd<TWICE>>(), "first"), (3, 1, 1));
}

#[test]
fn tied_heads_have_the_gradient_of_both_uses() {
    stages_agree::<Odd<TIED>>(1..=3, &SgdConfig::new());
    assert_eq!(a_step(&used::<Odd<TIED>>(), "second"), (1, 1, 1), "a view keeps no memory of the whole");
    let uses = used::<Gpt<1>>();
    assert_eq!(a_step(&uses, "wte"), (2, 1, 1), "of the embedding the ids are enough");
    assert_eq!(a_step(&uses, "wpe"), (1, 0, 1));
}

#[test]
fn a_frozen_layer_with_an_adapter_trains_the_adapter() {
    stages_agree::<Odd<LORA>>(1..=3, &AdamWConfig::new());
    let told = train_threads::<Odd<LORA>>(2, &config(Stage::Parameters), &AdamWConfig::new());
    let before = weights(&Odd::<LORA>::build(&device()));
    assert_eq!(told[0].weights["second"], before["second"]);
    assert!(told[0].weights["down"] != before["down"] && told[0].weights["first"] != before["first"]);
    let uses = used::<Odd<LORA>>();
    assert_eq!(a_step(&uses, "second"), (1, 1, 0), "gathered again rather than kept, and never reduced");
    for path in ["down", "up"] {
        assert_eq!(a_step(&uses, path), (1, 1, 1), "{path}");
    }
}

#[test]
fn burns_own_checkpointing_changes_no_bit() {
    for stage in [Stage::Gradients, Stage::Parameters] {
        let config = config(stage);
        let told = run_threads(2, &options(), |ranks| {
            let device = device().gradient_checkpointing();
            train_on::<Gpt<2>>(device, ranks, &config, &SgdConfig::new()).map(|(told, _)| told)
        });
        assert!(told.unwrap() == train_threads::<Gpt<2>>(2, &config, &SgdConfig::new()), "stage {stage}");
    }
}

#[test]
fn norms_of_burn_work_as_they_are() {
    stages_agree::<Odd<NORM>>(1..=3, &SgdConfig::new());
    assert_eq!(in_all(&used::<Odd<NORM>>(), "norm.gamma"), VECTOR);
    let uses = used::<Gpt<1>>();
    for path in ["ln_f.gamma", "ln_f.beta", "blocks.0.ln_1.gamma"] {
        assert_eq!(in_all(&uses, path), VECTOR, "{path}");
    }
}

/// Returns the error of a `body` that fails on two ranks.
fn failure(body: impl Fn(&Ranks) -> Result<(), Error> + Sync) -> String {
    run_threads(2, &options(), body).unwrap_err().to_string()
}

#[test]
fn a_model_of_another_rank_is_found_before_it_hangs() {
    let handed = parking_lot::Mutex::new(None);
    let error = failure(|ranks| {
        let device = device();
        let (mut net, zero) = shard(Mlp::<8, 2>::build(&device), ranks, &config(Stage::Parameters))?;
        if ranks.comm().rank() == 0 {
            *handed.lock() = Some(net.clone());
        }
        ranks.comm().barrier()?;
        if ranks.comm().rank() == 1 {
            net = handed.lock().clone().unwrap();
        }
        zero.backward(|| net.loss(0, &device))?;
        Ok(())
    });
    assert!(error.contains("sharded by rank 0, but rank 1 uses it"), "{error}");
}

#[test]
fn ranks_may_shard_clones_of_one_model() {
    let one = Mlp::<13, 3>::build(&device());
    // Its leaves are shared by all clones.
    drop(one.loss(0, &device()).backward());
    let config = config(Stage::Parameters);
    let told = run_threads(2, &options(), |ranks| {
        let device = device();
        let (mut net, zero) = shard(one.clone(), ranks, &config)?;
        let mut optimizer = zero.optimizer(&SgdConfig::new())?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
            losses.push(value(loss));
            net = optimizer.step(LR, net, grads)?;
        }
        Ok::<_, Error>(losses)
    });
    let expected = train_threads::<Mlp<13, 3>>(2, &config, &SgdConfig::new());
    assert_eq!(told.unwrap(), expected.into_iter().map(|told| told.losses).collect::<Vec<_>>());
}

#[test]
fn ranks_get_the_weights_of_rank_0() {
    let got = run_threads(3, &options(), |ranks| {
        let mut net = Mlp::<8, 1>::build(&device());
        if ranks.comm().rank() > 0 {
            net = net.map(&mut Zeros);
        }
        let (net, _) = shard(net, ranks, &config(Stage::Parameters))?;
        Ok::<_, Error>(weights(&net))
    });
    let expected = weights(&Mlp::<8, 1>::build(&device()));
    assert_eq!(got.unwrap(), vec![expected; 3]);
}

struct Zeros;

impl burn::module::ModuleMapper for Zeros {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| Tensor::zeros_like(&tensor.set_require_grad(false)).set_require_grad(true))
    }
}

#[test]
fn a_backward_pass_that_would_not_be_reduced_is_refused() {
    let error = failure(|ranks| {
        let device = device();
        let (net, _zero) = shard(Mlp::<8, 2>::build(&device), ranks, &config(Stage::Parameters))?;
        drop(net.loss(0, &device).backward());
        Ok(())
    });
    assert!(error.contains("zero.backward(|| loss)"), "{error}");
}

#[test]
fn a_model_from_before_a_step_is_refused() {
    let error = failure(|ranks| {
        let device = device();
        let (net, zero) = shard(Mlp::<8, 2>::build(&device), ranks, &config(Stage::Parameters))?;
        let mut optimizer = zero.optimizer(&SgdConfig::new())?;
        let (_, grads) = zero.backward(|| net.loss(0, &device))?;
        let _next = optimizer.step(LR, net.clone(), grads)?;
        zero.backward(|| net.loss(0, &device))?;
        Ok(())
    });
    assert!(error.contains("differs from the version that the other ranks read"), "{error}");
}

#[test]
fn a_rank_that_fails_or_ends_is_named() {
    let run = |then: fn() -> Result<(), Error>, steps: [usize; 2]| {
        failure(|ranks| {
            let (device, rank) = (device(), ranks.comm().rank());
            let (mut net, zero) = shard(Mlp::<8, 2>::build(&device), ranks, &config(Stage::Parameters))?;
            let mut optimizer = zero.optimizer(&SgdConfig::new())?;
            for step in 0..steps[rank] {
                let (_, grads) = zero.backward(|| net.loss(seed(step, rank), &device))?;
                net = optimizer.step(LR, net, grads)?;
            }
            if rank == 1 { then() } else { Ok(()) }
        })
    };
    let error = run(|| panic!("out of luck"), [4, 2]);
    assert!(error.contains("rank 1") && error.contains("out of luck"), "{error}");
    let error = run(|| Err(Error::State("its own error".into())), [4, 2]);
    assert!(error.contains("rank 1") && error.contains("its own error"), "{error}");
    let error = run(|| Ok(()), [4, 2]);
    assert!(error.contains("rank 1 has already ended"), "{error}");
}

#[test]
fn modules_that_cannot_be_sharded_are_told_why() {
    let error = failure(|ranks| {
        let adapted = Mlp::<8, 2>::build(&device()).apply_lora(Lora::new(2, 4.0));
        shard(adapted, ranks, &config(Stage::Parameters)).map(drop)
    });
    assert!(error.contains("'lora'") && error.contains("layers.0.weight"), "{error}");
    let error = failure(|ranks| {
        let mut odd = Odd::<TWICE>::build(&device());
        odd.second = odd.first.clone();
        shard(odd, ranks, &config(Stage::Parameters)).map(drop)
    });
    assert!(error.contains("'first' and 'second' have the same id"), "{error}");
    let error = failure(|ranks| {
        let stage = if ranks.comm().rank() == 0 { Stage::Parameters } else { Stage::Gradients };
        shard(Mlp::<8, 2>::build(&device()), ranks, &config(stage)).map(drop)
    });
    assert!(error.contains("different settings"), "{error}");
}

#[test]
fn ranks_may_use_different_parameters() {
    for stage in Stage::ALL {
        let told = run_threads(2, &options(), |ranks| {
            let device = device();
            let (net, zero) = shard(Odd::<TWICE>::build(&device), ranks, &config(stage))?;
            let rank = ranks.comm().rank();
            let (x, _) = rows(7, D, &device);
            // Rank 0 uses only the first, rank 1 only the second, and no rank the others.
            let (_, grads) = zero.backward(|| {
                let table = if rank == 0 { &net.first } else { &net.second };
                x.matmul(table.val()).sum()
            })?;
            let own = |path| grads.get(path).map(|piece| piece.iter().sum::<f32>());
            Ok::<_, Error>([own("first"), own("second"), own("down")])
        })
        .unwrap();
        for [first, second, down] in told {
            assert!(first.is_some_and(|sum| sum != 0.0) && second.is_some_and(|sum| sum != 0.0), "stage {stage}");
            assert_eq!(down, None);
        }
    }
}

#[test]
fn micro_batches_add_up_and_norms_are_clipped() {
    let run = |stage| {
        let told = run_threads(2, &options(), |ranks| {
            let device = device();
            let (mut net, zero) = shard(Gpt::<1>::build(&device), ranks, &config(stage))?;
            let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
            let mut told = Told::default();
            for step in 0..STEPS {
                let loss = |part: usize| net.loss(seed(step, 2 * part + ranks.comm().rank()), &device) / 2.0;
                let (one, mut grads) = zero.backward(|| loss(0))?;
                let (two, more) = zero.backward(|| loss(1))?;
                grads.add(more);
                told.losses.push(value(one) + value(two));
                told.norms.push(grads.clip_norm(0.01)?);
                let left = grads.norm()?;
                assert!((left - 0.01).abs() < 1e-6, "{left} after clipping");
                net = optimizer.step(LR, net, grads)?;
            }
            told.weights = weights(&net);
            Ok::<_, Error>(told)
        });
        told.unwrap()
    };
    let first = run(Stage::DataParallel);
    for stage in &Stage::ALL[1..] {
        assert!(run(*stage) == first, "stage {stage}");
    }
    // The same four parts of a batch, at once.
    let plain = train_plain::<Gpt<1>>(4, SgdConfig::new().init());
    let (norm, expected) = (first[0].norms[0], plain[0].norms[0]);
    assert!((norm - expected).abs() < 1e-6 * expected, "{norm}, not {expected}");
}

/// Returns the bytes that each rank receives in a step, once the order of gradients is known.
fn moved<N: Net>(device: &Device, world: usize, config: &ZeroConfig) -> Vec<WireBytes> {
    let moved = run_threads(world, &options(), |ranks| {
        let (mut net, zero) = shard(N::build(device), ranks, config)?;
        let mut optimizer = zero.optimizer(&SgdConfig::new())?;
        let mut moved = WireBytes::default();
        for _ in 0..2 {
            ranks.comm().barrier()?;
            let before = ranks.comm().wire().read();
            let (_, grads) = zero.backward(|| net.loss(0, device))?;
            net = optimizer.step(LR, net, grads)?;
            moved = ranks.comm().wire().read().since(&before);
        }
        Ok::<_, Error>(moved)
    });
    moved.unwrap()
}

/// Returns the part of `bytes` that a rank does not hold.
fn part(bytes: usize, world: usize) -> u64 {
    (bytes * (world - 1) / world) as u64
}

/// Returns the bytes that a rank receives to agree, at both ends of a pass, which of so many parameters have gradients: two all-reduces.
fn agreed(parameters: usize, rank: usize, world: usize) -> u64 {
    let received = |bytes: usize| {
        let own = Partition::new(bytes, world).len(rank);
        (world - 1) * own + bytes - own
    };
    (received(19 + 2 * parameters) + received(parameters)) as u64
}

#[test]
fn bytes_on_the_wire_are_those_of_the_paper() {
    const WIDTH: usize = 16;
    let weight = WIDTH * WIDTH * 4;
    for world in [2, 4] {
        let part = |bytes| part(bytes, world);
        for stage in Stage::ALL {
            for (rank, moved) in moved::<Mlp<WIDTH, 3>>(&device(), world, &unkept(stage)).iter().enumerate() {
                let (gathers, scatters, whole) = match stage {
                    Stage::DataParallel => (0, 0, 3),
                    // Once, after the update.
                    Stage::OptimizerState | Stage::Gradients => (3, 3, 0),
                    // Forward, and backward except for the first layer.
                    Stage::Parameters => (5, 3, 0),
                };
                assert_eq!(moved.all_gather, gathers * part(weight), "stage {stage}, {world} ranks");
                assert_eq!(moved.reduce_scatter, scatters * part(weight), "stage {stage}, {world} ranks");
                // Biases, and which parameters have gradients.
                let vectors = 2 * part(3 * WIDTH * 4) + agreed(6, rank, world);
                let reduced = 2 * part(whole * weight) + vectors;
                assert!(moved.all_reduce.abs_diff(reduced) <= 2, "stage {stage}: {} of {reduced}", moved.all_reduce);
            }
        }
    }
}

#[test]
fn a_gpt2_moves_the_bytes_of_the_paper() {
    let parameters = weights(&Gpt::<2>::build(&device()));
    let elements = |of: fn(&str) -> bool| {
        parameters.iter().filter(|(path, _)| of(path)).map(|(_, values)| values.len()).sum::<usize>()
    };
    let psi = elements(|_| true);
    let vectors = elements(|path| ["bias", "gamma", "beta"].iter().any(|end| path.ends_with(end)));
    let (words, places) = (elements(|path| path == "wte"), elements(|path| path == "wpe"));
    for world in 2..=4 {
        for stage in Stage::ALL {
            let times_psi = match stage {
                // The token embedding is gathered at both ends, the position embedding only forward; vectors are replicated.
                Stage::Parameters => 3 * psi + words - places - vectors,
                _ => 2 * psi,
            };
            // Without checkpointing Burn's `Linear` keeps some full weights, as its input is not rows.
            for (rank, moved) in
                moved::<Gpt<2>>(&device().gradient_checkpointing(), world, &unkept(stage)).iter().enumerate()
            {
                let expected = part(4 * times_psi, world) + agreed(parameters.len(), rank, world);
                let got = moved.total();
                // The sizes of vectors, and the number of those bytes, need not be multiples of the number of ranks.
                assert!(got.abs_diff(expected) <= 32, "stage {stage}, {world} ranks: {got} of {expected}");
            }
        }
    }
}

#[test]
fn a_tensor_of_a_full_parameter_keeps_its_values_after_its_pass() {
    type Net3 = Mlp<12, 3>;
    let read = |x: Tensor<2>| x.into_data().iter::<f32>().collect::<Vec<_>>();
    let plain = Net3::build(&device());
    let [first, second] = [0, 1].map(|layer| read(plain.layers[layer].weight.val()));
    let sum: Vec<f32> = first.iter().zip(&second).map(|(a, b)| a + b).collect();
    run_threads(2, &options(), |ranks| {
        let (mut net, zero) = shard(Net3::build(&device()), ranks, &unkept(Stage::Parameters))?;
        let mut optimizer = zero.optimizer(&SgdConfig::new())?;
        let mut kept = None;
        let (_, grads) = zero.backward(|| {
            let weight = net.layers[0].weight.val();
            // Uses another parameter, which releases the first: the sum reads it again.
            let other = net.layers[1].weight.val();
            let both = weight.clone() + other.clone();
            // Another thread reads it while this one uses, and so releases, others.
            let elsewhere = weight.clone().inner();
            let elsewhere =
                std::thread::spawn(move || (0..50).all(|_| read(elsewhere.clone()) == read(elsewhere.clone())));
            (0..50).for_each(|_| drop(net.layers[2].weight.val().sum()));
            assert!(elsewhere.join().unwrap());
            kept = Some((weight.inner(), other.inner(), both.inner()));
            net.loss(seed(0, ranks.comm().rank()), &device())
        })?;
        net = optimizer.step(0.5, net, grads)?;
        assert_ne!(read(net.layers[0].weight.val()), first, "it trains");
        let (weight, other, both) = kept.unwrap();
        assert_eq!(read(both), sum);
        // Written in place, if nothing else holds the tensor.
        assert_eq!(read(weight * 2.0), first.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
        assert_eq!(read(other), second);
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn micro_batches_that_are_reduced_once_have_the_gradients_of_their_sum() {
    let steps = |stage: Stage, is_held: bool| {
        run_threads(2, &options(), |ranks| {
            let (mut net, zero) = shard(Gpt::<1>::build(&device()), ranks, &config(stage))?;
            let mut optimizer = zero.optimizer(&SgdConfig::new())?;
            let mut norms = Vec::new();
            for step in 0..3 {
                let loss = |micro: usize| net.loss(seed(3 * step + micro, ranks.comm().rank()), &device());
                // Rank 1 has a micro-batch less to hold.
                let held: Vec<usize> = (0..2 - ranks.comm().rank()).collect();
                let mut grads = None;
                if is_held {
                    held.iter().for_each(|&micro| drop(zero.backward_no_sync(|| loss(micro))));
                } else {
                    for micro in 0..2 {
                        let factor = if held.contains(&micro) { 1.0 } else { 0.0 };
                        let (_, of_one) = zero.backward(|| loss(micro) * factor)?;
                        match &mut grads {
                            None => grads = Some(of_one),
                            Some(sum) => Grads::add(sum, of_one),
                        }
                    }
                }
                let (_, last) = zero.backward(|| loss(2))?;
                let mut grads = match grads {
                    None => last,
                    Some(mut sum) => {
                        sum.add(last);
                        sum
                    }
                };
                norms.push(grads.clip_norm(1e9)?);
                net = optimizer.step(LR, net, grads)?;
            }
            Ok::<_, Error>(norms)
        })
        .unwrap()
    };
    let held = steps(Stage::DataParallel, true);
    for (stage, norms) in Stage::ALL.map(|stage| (stage, steps(stage, true))) {
        assert_eq!(norms, held, "the bits of stage {stage}");
    }
    let each = steps(Stage::Parameters, false);
    for (held, each) in held[0].iter().zip(&each[0]) {
        assert!((held - each).abs() < 1e-6 * each, "{held} {each}");
    }
}
