//! ZeRO along the data axis of a mesh whose other axis splits the model: `cargo test -p zero-tests --test ranks axes -- --nocapture`.

use std::path::Path;
use std::time::Duration;

use burn::module::{AutodiffModule, Module};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::Backend;
use burn::tensor::Tensor;
use burn_flex::Flex;
use zero_burn::config::{Disk, Offload, Tier, ZeroConfig};
use zero_burn::launch::{LaunchError, LaunchOptions, launch};
use zero_burn::module::{collect_grads, mark, prepare, sharded_along};
use zero_burn::optim::{Fused, Rule};
use zero_burn::parallel::{Group, GroupBackend, copy_to, reduce_from};
use zero_burn::ranks;
use zero_burn::stats::all_gather;
use zero_core::checkpoint::{Check, Checkpoint, SaveOptions, find_latest};
use zero_core::random::Draws;
use zero_core::{Axes, Stage};
use zero_train::engine::{EngineConfig, EngineError, Parts, Step, ZeroEngine};

use crate::common::{B, Device, on_ranks};

#[path = "../../../examples/examples/tensor_parallel/mlp.rs"]
mod mlp;

use mlp::{Mlp, TENSOR};

const WIDTH: usize = 32;
/// Rows of all data ranks.
const ROWS: usize = 8;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    blocks: Vec<Mlp<B>>,
}

impl Model<B> {
    fn new(device: &Device) -> Self {
        let group = ranks::group::<Flex>(TENSOR);
        let block = |number| Mlp::new(WIDTH, number, (group.rank(), group.world()), device);
        Self { blocks: (0..3).map(block).collect() }
    }
}

impl<B: GroupBackend> Model<B> {
    fn forward(&self, x: Tensor<B, 2>, group: &Group) -> Tensor<B, 2> {
        self.blocks.iter().fold(x, |x, block| block.forward(x, group))
    }
}

/// This rank's rows of a step.
fn rows(step: usize, device: &Device) -> Tensor<B, 2> {
    let mut draws = Draws::new(2).fork(step as u64);
    let values: Vec<f32> = (0..ROWS * WIDTH).map(|_| draws.unit() as f32 - 0.5).collect();
    let here = ROWS / ranks::num_processes::<Flex>();
    Tensor::<B, 1>::from_floats(&*values, device).reshape([ROWS, WIDTH]).narrow(0, device.rank() * here, here)
}

fn mesh(axes: &[(&str, usize)], stage: Stage) -> ZeroConfig {
    let (reduce_bucket_size, param_persistence_threshold) = (5_000, 100);
    ZeroConfig { axes: Axes::new(axes), reduce_bucket_size, param_persistence_threshold, ..ZeroConfig::new(stage) }
}

fn world(config: &ZeroConfig) -> usize {
    (1..100).find(|&world| config.axes.data(world).is_some()).unwrap()
}

type Engine = ZeroEngine<B, Model<B>, Fused<B>>;

fn engine(device: &Device) -> Engine {
    let (sync_each_batch, clipping) = (Some(true), Some(0.02));
    let config = EngineConfig { accumulation: 2, sync_each_batch, clipping, ..EngineConfig::default() };
    let engine = ZeroEngine::initialize(Model::new(device), Fused::new(Rule::adamw()), config, device).unwrap();
    engine.model().blocks.iter().for_each(Mlp::tell_replicated);
    engine
}

/// Returns losses and gradient norms from the engine's current update to update `last`.
fn train(engine: &mut Engine, last: usize, in_blocks: bool) -> Vec<(f64, f64)> {
    let (group, device) = (ranks::group::<Flex>(TENSOR), engine.device().clone());
    let (mut steps, mut loss_sum) = (Vec::new(), 0.0);
    for micro in 2 * engine.steps()..2 * last {
        let x = rows(micro, &device);
        let loss = engine.forward(|model| {
            let group = group.clone();
            let out = match in_blocks {
                true => zero_ops::checkpoint(|x: Tensor<B, 2>| model.forward(x, &group), x.clone()),
                false => model.forward(x.clone(), &group),
            };
            (out - x * 0.5).powf_scalar(2.0).mean()
        });
        let mean = all_gather::<Flex>(&[f64::from(loss.clone().into_scalar())]);
        loss_sum += mean.iter().map(|rank| rank[0]).sum::<f64>() / mean.len() as f64;
        engine.backward(loss);
        if let Step::Updated(update) = engine.step().unwrap() {
            steps.push((std::mem::take(&mut loss_sum), update.grad_norm));
        }
    }
    steps
}

fn trained(config: &ZeroConfig, in_blocks: bool) -> Vec<(f64, f64)> {
    let mut of_ranks = on_ranks(world(config), config, |device| {
        // One rank prints, whatever the axes.
        let main = u8::from(ranks::is_main_process::<Flex>());
        (train(&mut engine(&device), 5, in_blocks), main)
    });
    assert_eq!(of_ranks.iter().map(|(_, main)| main).sum::<u8>(), 1);
    assert!(of_ranks.iter().all(|rank| rank.0 == of_ranks[0].0), "ranks have seen different norms");
    of_ranks.swap_remove(0).0
}

fn apart(a: &[(f64, f64)], b: &[(f64, f64)]) -> f64 {
    let apart = |(a, b): (&(f64, f64), &(f64, f64))| ((a.0 - b.0) / a.0).abs().max(((a.1 - b.1) / a.1).abs());
    a.iter().zip(b).map(apart).fold(0.0, f64::max)
}

#[test]
fn a_model_cut_over_an_axis_trains_as_on_the_data_axis_alone_at_all_stages() {
    let swap = tempfile::tempdir().unwrap();
    let whole = trained(&mesh(&[("data", 2), (TENSOR, 1)], Stage::DataParallel), false);
    assert!(whole[4].0 < whole[0].0, "the loss does not fall: {whole:?}");
    for (axes, shards) in [
        (&[("data", 2), (TENSOR, 2)][..], None),
        (&[(TENSOR, 2), ("data", 2)], None),
        (&[("data", 1), (TENSOR, 4)], None),
        (&[("data", 4), (TENSOR, 2)], Some(2)),
    ] {
        let mut first = None;
        for stage in Stage::ALL {
            let mut config = mesh(axes, stage);
            config.shard_size = shards;
            if stage == Stage::Parameters {
                // Every rank has a file of its own.
                let disk = Disk { path: swap.path().into(), ..Disk::default() };
                let (optimizer, parameters) = (Tier::Disk, Tier::Disk);
                config.offload = Offload { optimizer, parameters, min_bytes: 1, disk, ..Offload::default() };
            }
            let cut = trained(&config, false);
            let worst = apart(&whole, &cut);
            println!("{}, stage {stage}: losses and norms within {worst:.1e} of the data axis alone", config.axes);
            assert!(worst < 1e-5, "{}, stage {stage}: {worst:e}", config.axes);
            let first = first.get_or_insert_with(|| cut.clone());
            assert_eq!(*first, cut, "{}, stage {stage}", config.axes);
        }
        // Sums are made again in the backward pass, by all ranks of the group.
        let checkpointed = trained(&ZeroConfig { shard_size: shards, ..mesh(axes, Stage::Parameters) }, true);
        assert_eq!(first.unwrap(), checkpointed, "checkpointed");
    }
}

/// Saves two steps; the first one also in another folder.
fn save(dir: &Path, config: &ZeroConfig) -> Vec<(f64, f64)> {
    let losses = on_ranks(world(config), config, |device| {
        let mut engine = engine(&device);
        let save = |engine: &Engine, dir: &Path| {
            engine.save(dir, engine.steps() as u64, Default::default(), &SaveOptions::default()).unwrap();
        };
        train(&mut engine, 1, false);
        save(&engine, &dir.join("one"));
        train(&mut engine, 2, false);
        save(&engine, &dir.join("two"));
        train(&mut engine, 5, false)
    });
    losses.into_iter().next().unwrap()
}

fn resume(engine: &mut Engine, dir: &Path) -> Result<(), EngineError> {
    let latest = ranks::find_latest::<Flex>(dir, Check::Contents)?.checkpoint.unwrap();
    engine.load(&Checkpoint::open(&latest)?, Parts::All).map(|_| ())
}

#[test]
fn parts_are_saved_apart_and_resumed_on_another_data_axis_together() {
    let dir = tempfile::tempdir().unwrap();
    let unbroken = save(dir.path(), &mesh(&[("data", 2), (TENSOR, 2)], Stage::Parameters));
    let at = |data, stage, dir: &Path| {
        let config = mesh(&[("data", data), (TENSOR, 2)], stage);
        let mut losses = on_ranks(world(&config), &config, |device| {
            let mut engine = engine(&device);
            resume(&mut engine, dir).unwrap();
            train(&mut engine, 5, false)
        });
        losses.swap_remove(0)
    };
    let two = dir.path().join("two");
    for part in ["tensor-0", "tensor-1"] {
        assert!(two.join(part).is_dir());
    }
    assert_eq!(at(2, Stage::OptimizerState, &two), unbroken);
    assert!(apart(&at(1, Stage::Parameters, &two), &unbroken) < 1e-5);
    assert!(apart(&at(4, Stage::Gradients, &two), &unbroken) < 1e-5);

    // A save that was cut short: one part is a step behind.
    std::fs::remove_dir_all(two.join("tensor-1")).unwrap();
    std::fs::rename(dir.path().join("one/tensor-1"), two.join("tensor-1")).unwrap();
    let config = mesh(&[("data", 2), (TENSOR, 2)], Stage::Parameters);
    let all_told = |words: &[String], told: Vec<String>| {
        assert!(told.iter().all(|told| words.iter().all(|word| told.contains(word))), "{words:?}: {told:?}");
    };
    let part = |part: &str| two.join(part).display().to_string();
    let found = || on_ranks(4, &config, |_| ranks::find_latest::<Flex>(&two, Check::Sizes).unwrap_err().to_string());
    let in_0 = format!("rank 0 has the checkpoint of step 2 in {}, ", part("tensor-0"));
    all_told(&[in_0.clone(), format!("rank 1 has the checkpoint of step 1 in {}; ", part("tensor-1"))], found());
    for parts in [Parts::All, Parts::Parameters] {
        let told = on_ranks(4, &config, |device| {
            let latest = find_latest(&ranks::folder::<Flex>(&two), Check::Contents).unwrap().checkpoint.unwrap();
            engine(&device).load(&Checkpoint::open(&latest).unwrap(), parts).unwrap_err().to_string()
        });
        let words = "rank 0 has the checkpoint of step 2, rank 1 has the checkpoint of step 1; ";
        all_told(&[words.into()], told);
    }

    // One part has none; and then none has.
    std::fs::remove_dir_all(two.join("tensor-1")).unwrap();
    all_told(&[in_0, format!("rank 1 has no checkpoint in {}; ", part("tensor-1"))], found());
    std::fs::remove_dir_all(two.join("tensor-0")).unwrap();
    on_ranks(4, &config, |_| assert!(ranks::find_latest::<Flex>(&two, Check::Sizes).unwrap().checkpoint.is_none()));
}

/// A rank that cannot read its part is reported by its global rank.
#[test]
fn a_part_that_cannot_be_loaded_is_told_by_its_rank_in_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let config = mesh(&[("data", 2), (TENSOR, 2)], Stage::Parameters);
    save(dir.path(), &config);
    let told = on_ranks(4, &config, |device| {
        let latest = ranks::find_latest::<Flex>(&dir.path().join("two"), Check::Sizes).unwrap().checkpoint.unwrap();
        let checkpoint = Checkpoint::open(&latest).unwrap();
        ranks::wait_for_everyone::<Flex>();
        // Ranks 1 and 3 have this part; rank 3 reads its second half, in a file of its own.
        if ranks::is_main_process::<Flex>() {
            let name = latest.file_name().unwrap();
            let file = dir.path().join("two/tensor-1").join(name).join("rank-00001-of-00002.safetensors");
            std::fs::write(&file, "").unwrap();
        }
        ranks::wait_for_everyone::<Flex>();
        engine(&device).load(&checkpoint, Parts::All).unwrap_err().to_string()
    });
    for rank in [0, 1, 2] {
        assert!(told[rank].starts_with("rank 3 could not load its part of "), "{}", told[rank]);
    }
    assert!(told[3].contains("rank-00001-of-00002"), "{}", told[3]);
}

/// Burn's layers, split as in Megatron-LM: by outputs, then by inputs.
#[derive(Module, Debug)]
struct Layers<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

/// Returns the first layer's weights on every rank, before the first update. `tell` gets the layers right after their creation.
fn drawn(config: &ZeroConfig, tell: impl Fn(&Layers<B>, &Device) + Sync) -> Result<Vec<Vec<f32>>, LaunchError<String>> {
    launch::<Flex, _, String>(world(config), config, &Default::default(), |device| {
        let group = ranks::group::<Flex>(TENSOR);
        let layer = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(&device);
        let model = Layers { up: layer(WIDTH, WIDTH / 2), down: layer(WIDTH / 2, WIDTH) };
        tell(&model, &device);
        let mut engine =
            ZeroEngine::<B, _, _>::initialize(model, Fused::new(Rule::adamw()), Default::default(), &device).unwrap();
        let up = engine.model().up.weight.val().into_data().to_vec().unwrap();
        let x = copy_to(rows(0, &device), &group);
        let loss = engine
            .forward(|model| reduce_from(model.down.forward(model.up.forward(x)), &group).powf_scalar(2.0).mean());
        engine.backward(loss);
        engine.step().unwrap();
        Ok(up)
    })
}

#[test]
fn parts_are_drawn_apart_and_what_is_drawn_alike_is_told() {
    for stage in Stage::ALL {
        let config = mesh(&[("data", 2), (TENSOR, 2)], stage);
        for seeds in [0, 1] {
            let seed = |_: &Layers<B>, device: &Device| B::seed(device, seeds * device.rank() as u64);
            let alike = drawn(&config, seed).unwrap_err().to_string();
            assert!(
                alike.contains(
                    r#"parameter "up.weight" was initialized with the same values at every place of the mesh"#
                ),
                "{alike}"
            );
        }
        // Ranks of a part have its numbers, whatever their seeds.
        let own_seeds = |layers: &Layers<B>, device: &Device| {
            B::seed(device, device.rank() as u64);
            sharded_along::<B, _>(layers, &[TENSOR]);
        };
        for parts in [drawn(&config, |layers, _| sharded_along::<B, _>(layers, &[TENSOR])), drawn(&config, own_seeds)] {
            let parts = parts.unwrap();
            assert_eq!((&parts[0], &parts[1]), (&parts[2], &parts[3]), "{stage}");
            let differ = parts[0].iter().zip(&parts[1]).filter(|(a, b)| a != b).count();
            assert_eq!(differ, parts[0].len(), "{stage}");
        }
    }
    let config = mesh(&[("data", 1), (TENSOR, 2)], Stage::Parameters);
    let late = drawn(&config, |layers, _| {
        let _ = layers.up.weight.val();
        sharded_along::<B, _>(layers, &[TENSOR]);
    });
    let late = late.unwrap_err().to_string();
    assert!(late.contains(r#"parameter "up.weight" was initialized before sharded_along"#), "{late}");
    let data = drawn(&config, |layers, _| sharded_along::<B, _>(layers, &["data"])).unwrap_err().to_string();
    assert!(data.contains("expected axes of the mesh other than data, along which ZeroConfig shards"), "{data}");
}

/// Both forward passes run before both backward passes, so no sum of a forward pass synchronizes the ranks between these.
#[test]
fn ranks_that_wait_for_each_other_in_a_pass_are_never_in_two_passes() {
    let config = mesh(&[("data", 2), (TENSOR, 2)], Stage::Parameters);
    let options = LaunchOptions { threads_per_rank: 1, deadline: Duration::from_secs(20), ..LaunchOptions::default() };
    launch::<Flex, _, String>(4, &config, &options, |device| {
        let group = ranks::group::<Flex>(TENSOR);
        let model = prepare::<B, _>(Model::new(&device), &device);
        for step in 0..100 {
            let losses =
                [0, 1].map(|pass| model.forward(rows(2 * step + pass, &device), &group).powf_scalar(2.0).mean());
            let passes = losses.map(|loss| loss.backward());
            for grads in passes {
                let grads = burn::optim::GradientsParams::from_grads(grads, &model);
                collect_grads::<B, _>(grads, &model);
            }
            mark::<B, _>(&model);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_a_mesh_does_not_have_is_told() {
    let told = |config: &ZeroConfig, body: &(dyn Fn(Device) + Sync)| {
        let run = launch::<Flex, _, String>(world(config), config, &Default::default(), |device| {
            body(device);
            Ok(())
        });
        run.unwrap_err().to_string()
    };
    let config = mesh(&[("data", 1), (TENSOR, 2)], Stage::Parameters);
    let error = told(&config, &|_| drop(ranks::group::<Flex>("pipeline")));
    assert!(error.contains(r#"the mesh has no axis "pipeline": expected one of ["data", "tensor"]"#), "{error}");
    let error = told(&config, &|device| {
        let model = Model::new(&device);
        let optimizer = Fused::new(Rule::lamb());
        let mut engine = ZeroEngine::<B, _, _>::initialize(model, optimizer, Default::default(), &device).unwrap();
        let group = ranks::group::<Flex>(TENSOR);
        let loss = engine.forward(|model| model.forward(rows(0, &device), &group).powf_scalar(2.0).mean());
        engine.backward(loss);
        let _ = engine.step();
    });
    assert!(error.contains("choose another rule, such as Rule::adamw"), "{error}");
    // Without autodiff it sums over the axis too.
    let sums = on_ranks(2, &config, |device| {
        let (model, group) = (Model::new(&device), ranks::group::<Flex>(TENSOR));
        let x = rows(0, &device);
        let with = model.forward(x.clone(), &group).sum().into_scalar();
        (with, model.valid().forward(x.inner(), &group).sum().into_scalar())
    });
    assert!(sums.iter().all(|sum| (sum.0 - sum.1).abs() < 1e-5 && *sum == sums[0]), "{sums:?}");
}
