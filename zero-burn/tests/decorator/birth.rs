//! Initialization of parameters: as shards, without communication, with values that depend only on the seed. Also how `prepare` shards
//! parameters that were created in full.

mod odd_layers;

use std::collections::BTreeSet;
use std::time::Duration;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{Distribution, FloatDType, Tensor, TensorData, backend::Backend};
use burn_autodiff::Autodiff;
use burn_flex::{Flex, FlexDevice};
use odd_layers::column;
use zero_burn::config::{Float, ZeroConfig};
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::module::{collect_grads, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::{rank_stats, reset_peaks};
use zero_burn::{Zero, ZeroDevice};
use zero_core::{Partition, Stage};

type Ad = Autodiff<Zero<Flex>>;
type Device = ZeroDevice<FlexDevice>;

/// Every kind of parameter that is created as a shard, in sizes that no world size divides.
#[derive(Module, Debug)]
struct Newborn<B: Backend> {
    linear: Linear<B>,
    embedding: Embedding<B>,
    norm: LayerNorm<B>,
    conv: Conv2d<B>,
    data: Param<Tensor<B, 2>>,
    single: Param<Tensor<B, 1>>,
}

/// Numbers of elements of its parameters, in the order of its fields.
const SIZES: [usize; 9] = [7 * 5, 5, 11 * 3, 5, 5, 3 * 2 * 3 * 3, 3, 4 * 3, 1];

impl<B: Backend> Newborn<B> {
    fn new(device: &B::Device) -> Self {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        Self {
            linear: LinearConfig::new(7, 5).init(device),
            embedding: EmbeddingConfig::new(11, 3).init(device),
            norm: LayerNormConfig::new(5).init(device),
            conv: Conv2dConfig::new([2, 3], [3, 3]).init(device),
            data: Param::from_data(TensorData::new(values, [4, 3]), device),
            single: Param::from_data(TensorData::from([0.5f32]), device),
        }
    }
}

/// Creates lazy parameters in the order of the module's fields, without reading them.
fn settle<M: Module<Ad>>(module: &M) {
    struct Touch;
    impl ModuleVisitor<Ad> for Touch {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Ad, D>>) {
            drop(param.val());
        }
    }
    module.visit(&mut Touch);
}

/// The data of every parameter, in the order of the module's fields.
fn values<B: Backend, M: Module<B>>(module: &M) -> Vec<TensorData> {
    struct Values(Vec<TensorData>);
    impl<B: Backend> ModuleVisitor<B> for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data());
        }
    }
    let mut values = Values(Vec::new());
    module.visit(&mut values);
    values.0
}

fn bits(data: &TensorData) -> Vec<u32> {
    data.iter::<f32>().map(f32::to_bits).collect()
}

fn all_bits(data: &[TensorData]) -> Vec<Vec<u32>> {
    data.iter().map(bits).collect()
}

/// No persistence, so that small parameters are sharded like large ones.
fn config(stage: Stage, seed: u64) -> ZeroConfig {
    ZeroConfig { reduce_bucket_size: 64, param_persistence_threshold: 0, seed, ..ZeroConfig::new(stage) }
}

fn ranks<T: Send>(world: usize, config: ZeroConfig, body: impl Fn(Device) -> T + Sync) -> Vec<T> {
    let options = LaunchOptions { threads_per_rank: 1, deadline: Duration::from_secs(60), ..LaunchOptions::default() };
    launch::<Flex, T, String>(world, &config, &options, |device| Ok(body(device)))
        .unwrap_or_else(|error| panic!("{world} ranks, {config:?}: {error}"))
}

/// Returns the bytes of parameters that this rank holds now.
fn held() -> u64 {
    reset_peaks::<Flex>();
    rank_stats::<Flex>().model_state_bytes.parameters
}

/// Returns the bytes of fp32 parameters of `sizes` that `rank` holds.
fn bytes_of(sizes: &[usize], stage: Stage, world: usize, rank: usize) -> u64 {
    let world = if stage.shards_parameters() { world } else { 1 };
    sizes.iter().map(|&numel| 4 * Partition::new(numel, world).len(rank.min(world - 1)) as u64).sum()
}

// ---- (a) ----

#[test]
fn parameters_are_born_as_shards_without_communication() {
    for stage in Stage::ALL {
        for world in 1..=4 {
            ranks(world, config(stage, 1), |device| {
                let model = Newborn::<Ad>::new(&device);
                settle(&model);
                let expected = bytes_of(&SIZES, stage, world, device.rank());
                let stats = rank_stats::<Flex>();
                assert_eq!(stats.model_state_bytes.parameters, expected, "stage {stage}, {world} ranks");
                assert_eq!(stats.wire_bytes.total(), 0, "stage {stage}, {world} ranks");
                // `parameters` is the peak here. Each parameter was created as a shard, so `prepare` has nothing to broadcast: it only
                // compares signatures.
                let model = prepare::<Ad, _>(model, &device);
                let stats = rank_stats::<Flex>();
                assert_eq!(stats.model_state_bytes.parameters, expected, "stage {stage}, {world} ranks");
                assert!(stats.wire_bytes.total() <= 8 * (world as u64 - 1), "{:?}", stats.wire_bytes);
                assert_eq!((stats.gathered_bytes, stats.gathered_bytes_peak), (0, 0), "stage {stage}, {world} ranks");
                drop(model);
            });
        }
    }
}

/// The promise: about 4 bytes per element, divided among the ranks.
#[test]
fn a_large_layer_takes_a_ranks_share() {
    let shares = ranks(4, config(Stage::Parameters, 1), |device| {
        let model = LinearConfig::new(100, 1000).init::<Ad>(&device);
        settle(&model);
        rank_stats::<Flex>().model_state_bytes.parameters as f64 / (4.0 * 101_000.0)
    });
    assert!(shares.iter().all(|share| (share - 0.25).abs() < 1e-4), "{shares:?}");
}

/// If values come from a file, a rank reads only the elements of its shard.
#[test]
fn a_parameter_asks_for_the_elements_that_it_keeps() {
    for stage in Stage::ALL {
        for world in 1..=4 {
            for shape in [[5, 7], [2, 1]] {
                ranks(world, config(stage, 1), |device| {
                    let mut asked = Vec::new();
                    let parameter: Tensor<Ad, 2> = zero_ops::parameter_from(shape, &device, |range| {
                        asked.push(range.clone());
                        range.map(|i| i as f32).collect()
                    });
                    let numel = shape[0] * shape[1];
                    let (pieces, place) = if stage.shards_parameters() { (world, device.rank()) } else { (1, 0) };
                    let own = Partition::new(numel, pieces).range(place);
                    let held = 4 * own.len() as u64;
                    let expected = if own.is_empty() { vec![] } else { vec![own] };
                    assert_eq!(asked, expected, "stage {stage}, {world} ranks");
                    let stats = rank_stats::<Flex>();
                    assert_eq!((stats.model_state_bytes.parameters, stats.wire_bytes.total()), (held, 0));
                    let values: Vec<f32> = parameter.into_data().to_vec().unwrap();
                    assert_eq!(values, (0..numel).map(|i| i as f32).collect::<Vec<_>>());
                });
            }
        }
    }
}

// ---- (b) ----

#[test]
fn first_values_depend_on_the_seed_alone() {
    let born = |world, stage, seed| {
        ranks(world, config(stage, seed), |device| {
            let model = Newborn::<Ad>::new(&device);
            let before = all_bits(&values::<Ad, _>(&model));
            let after = all_bits(&values::<Ad, _>(&prepare::<Ad, _>(model, &device)));
            assert_eq!(before, after, "prepare changes values");
            before
        })
    };
    let reference = born(1, Stage::DataParallel, 5).remove(0);
    assert_eq!(reference.iter().map(Vec::len).collect::<Vec<_>>(), SIZES);
    for world in 1..=4 {
        for stage in Stage::ALL {
            for (rank, got) in born(world, stage, 5).into_iter().enumerate() {
                assert_eq!(reference, got, "rank {rank} of {world}, stage {stage}");
            }
        }
    }
    let other = born(3, Stage::Parameters, 6).remove(0);
    for (parameter, drawn) in [true, true, true, false, false, true, true, false, false].into_iter().enumerate() {
        assert_eq!(reference[parameter] != other[parameter], drawn, "parameter {parameter} of another seed");
    }
    // No two drawn parameters begin alike.
    let firsts: BTreeSet<u32> = [0, 1, 2, 5, 6].map(|parameter| reference[parameter][0]).into();
    assert_eq!(firsts.len(), 5);
}

// ---- (c) ----

#[test]
fn seeding_reseeds_parameters() {
    let born = |config_seed, seed: Option<u64>| {
        ranks(2, config(Stage::Parameters, config_seed), |device| {
            if let Some(seed) = seed {
                Ad::seed(&device, seed);
            }
            all_bits(&values::<Ad, _>(&Newborn::<Ad>::new(&device)))
        })
        .remove(0)
    };
    assert_eq!(born(1, Some(9)), born(9, None));
    assert_ne!(born(1, Some(9)), born(1, None));
}

/// Prepares a module: draws before it belong to a module, and are the same on all ranks.
fn trains(device: &Device) {
    let module: Linear<Ad> = LinearConfig::new(2, 2).init(device);
    drop(prepare::<Ad, _>(module, device));
}

/// Covers fixed random tensors from which modules are built.
#[test]
fn draws_are_alike_on_all_ranks_until_a_module_is_prepared() {
    let drawn = ranks(3, config(Stage::Parameters, 1), |device| {
        let draw = || bits(&Tensor::<Ad, 1>::random([64], Distribution::Default, &device).into_data());
        let before = [draw(), draw()];
        trains(&device);
        (before, draw())
    });
    assert!(drawn.iter().all(|(before, _)| *before == drawn[0].0 && before[0] != before[1]));
    assert!(drawn[0].1 != drawn[1].1 && drawn[1].1 != drawn[2].1);
}

#[test]
fn seeding_reseeds_draws() {
    for rank in ranks(2, config(Stage::Parameters, 1), |device| {
        trains(&device);
        let draw = || bits(&Tensor::<Ad, 1>::random([64], Distribution::Default, &device).into_data());
        let [a, b, c, d, e] = [Some(4), None, Some(4), None, Some(5)].map(|seed| {
            if let Some(seed) = seed {
                Ad::seed(&device, seed);
            }
            draw()
        });
        assert_eq!((&a, &b), (&c, &d));
        assert!(a != b && a != e);
        a
    })
    .windows(2)
    {
        assert_ne!(rank[0], rank[1], "ranks draw alike");
    }
}

/// The same seed gives the same model, like on any Burn backend.
///
/// Seeding again restarts the numbering of draws.
#[test]
fn seeding_again_gives_the_same_parameters_again() {
    ranks(2, config(Stage::Parameters, 1), |device| {
        let born = || {
            Ad::seed(&device, 9);
            all_bits(&values::<Ad, _>(&Newborn::<Ad>::new(&device)))
        };
        assert!(born() == born(), "the second model differs");
    });
}

/// The usual idiom of data-parallel programs: dropout differs between ranks, the model does not.
#[test]
fn ranks_with_seeds_of_their_own_begin_with_one_model() {
    let born = |world, stage, of: fn(u64) -> u64| {
        ranks(world, config(stage, 1), move |device| {
            Ad::seed(&device, of(device.rank() as u64));
            let model = Newborn::<Ad>::new(&device);
            // Looking at one of them before changes nothing.
            let _ = model.embedding.weight.val().into_data();
            let model = prepare::<Ad, _>(model, &device);
            let dropout: Dropout = DropoutConfig::new(0.4).init();
            let mask = bits(&dropout.forward(Tensor::<Ad, 2>::ones([8, 32], &device)).into_data());
            (all_bits(&values::<Ad, _>(&model)), mask)
        })
    };
    let reference = born(1, Stage::DataParallel, |_| 42).remove(0).0;
    for world in [2, 3] {
        for stage in Stage::ALL {
            let got = born(world, stage, |rank| 42 + rank);
            for (rank, (values, _)) in got.iter().enumerate() {
                assert_eq!(
                    *values, reference,
                    "rank {rank} of {world}, stage {stage}: not the values of rank 0's seed"
                );
            }
            assert_ne!(got[0].1, got[1].1, "dropout is alike");
        }
    }
    // A column layout's weight is a view of what is drawn.
    let columns = ranks(2, config(Stage::Parameters, 1), |device| {
        Ad::seed(&device, 7 + device.rank() as u64);
        all_bits(&values::<Ad, _>(&prepare::<Ad, _>(column::<Ad>(&device), &device)))
    });
    assert_eq!(columns[0], columns[1]);
    // What was one parameter stays one.
    ranks(2, config(Stage::Parameters, 1), |device| {
        Ad::seed(&device, 7 + device.rank() as u64);
        let layer = LinearConfig::new(5, 3).with_bias(false).init::<Ad>(&device);
        // A clone of what is still lazy is drawn by itself.
        drop(layer.weight.val());
        let tied = prepare::<Ad, _>(vec![layer.clone(), layer], &device);
        let loss = tied[0].weight.val().sum() + tied[1].weight.val().sum();
        let grads = collect_grads::<Ad, _>(GradientsParams::from_grads(loss.backward(), &tied), &tied);
        let grad = grads.get::<Zero<Flex>, 2>(tied[0].weight.id).unwrap().into_data();
        assert_eq!(grad.to_vec::<f32>().unwrap(), [2.0; 15]);
    });
}

#[test]
fn tied_parameters_that_are_frozen_take_one_draw() {
    let born = |world, seed: fn(u64) -> u64| {
        ranks(world, config(Stage::Parameters, 1), move |device| {
            Ad::seed(&device, seed(device.rank() as u64));
            let layer = LinearConfig::new(5, 3).init::<Ad>(&device);
            drop((layer.weight.val(), layer.bias.as_ref().map(Param::val)));
            let model = vec![layer.clone().no_grad(), layer.no_grad(), LinearConfig::new(4, 3).init(&device)];
            all_bits(&values::<Ad, _>(&prepare::<Ad, _>(model, &device)))
        })
    };
    let reference = born(1, |_| 7).remove(0);
    assert!(born(2, |rank| 7 + rank).iter().all(|rank| *rank == reference));
}

/// A tensor computed from a parameter may be another parameter, such as the scale of a quantization.
#[test]
fn a_parameter_made_of_a_sum_is_trained() {
    for world in [1, 2] {
        ranks(world, config(Stage::Parameters, 1), |device| {
            let weight = LinearConfig::new(5, 3).init::<Ad>(&device).weight;
            let scale = Tensor::from_inner(weight.val().inner().abs().mean());
            let model = prepare::<Ad, _>(Linear { weight, bias: Some(Param::from_tensor(scale)) }, &device);
            let bias = model.bias.as_ref().unwrap();
            let grads =
                collect_grads::<Ad, _>(GradientsParams::from_grads(bias.val().sum().backward(), &model), &model);
            assert_eq!(grads.get::<Zero<Flex>, 1>(bias.id).unwrap().into_data().to_vec::<f32>().unwrap(), [1.0]);
        });
    }
}

/// If 16-bit weights are replaced, the optimizer's master does not overwrite the new ones.
#[test]
fn weights_in_16_bit_that_are_prepared_anew_are_those_that_are_trained() {
    struct Sevens;
    impl ModuleMapper<Ad> for Sevens {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Ad, D>>) -> Param<Tensor<Ad, D>> {
            let (id, tensor, mapper) = param.consume();
            let sevens: Tensor<Ad, D> = Tensor::full(tensor.shape(), 7.0, &tensor.device());
            Param::from_mapped_value(id, sevens.cast(FloatDType::BF16).require_grad(), mapper)
        }
    }
    for stage in Stage::ALL {
        let config = ZeroConfig { param_dtype: Float::Bf16, ..config(stage, 1) };
        ranks(2, config, |device| {
            let mut optimizer = Fused::new(Rule::sgd());
            let mut step = |model: Linear<Ad>| {
                let loss = model.weight.val().sum();
                let grads = collect_grads::<Ad, _>(GradientsParams::from_grads(loss.backward(), &model), &model);
                optimizer.step(0.0, model, grads)
            };
            let model = step(prepare(LinearConfig::new(5, 3).with_bias(false).init::<Ad>(&device), &device));
            let model = step(prepare(model.map(&mut Sevens), &device));
            let weight = model.weight.val().into_data().convert::<f32>().to_vec::<f32>().unwrap();
            assert_eq!(weight, [7.0; 15], "stage {stage}");
        });
    }
}

// ---- (d) ----

#[test]
fn tensor_parameters_get_the_first_ranks_values() {
    for stage in Stage::ALL {
        for world in 1..=4 {
            let shape = [3, 5];
            for got in ranks(world, config(stage, 1), |device| {
                let own = Tensor::<Ad, 2>::full(shape, device.rank() as f32 + 1.0, &device)
                    + Tensor::arange(0..15, &device).float().reshape(shape);
                let model = Linear { weight: Param::from_tensor(own), bias: None };
                let model = prepare::<Ad, _>(model, &device);
                assert_eq!(held(), bytes_of(&[15], stage, world, device.rank()), "stage {stage}, {world} ranks");
                assert!(model.weight.val().is_require_grad());
                values::<Ad, _>(&model).remove(0).to_vec::<f32>().unwrap()
            }) {
                let expected: Vec<f32> = (0..15).map(|i| i as f32 + 1.0).collect();
                assert_eq!(got, expected, "stage {stage}, {world} ranks");
            }
        }
    }
}

// ---- (f) ----

#[test]
fn dropout_differs_between_ranks_and_calls_and_repeats_between_runs() {
    let masks = |world, stage, seed| {
        ranks(world, config(stage, seed), |device| {
            trains(&device);
            let dropout: Dropout = DropoutConfig::new(0.4).init();
            [(); 3].map(|()| bits(&dropout.forward(Tensor::<Ad, 2>::ones([8, 32], &device)).into_data()))
        })
    };
    let reference = masks(4, Stage::Parameters, 5);
    let distinct: BTreeSet<&Vec<u32>> = reference.iter().flatten().collect();
    assert_eq!(distinct.len(), 12, "two masks are alike");
    for mask in &distinct {
        let kept = mask.iter().filter(|&&bits| bits != 0).count() as f64 / 256.0;
        assert!((0.45..0.75).contains(&kept), "{kept} of the elements are kept, at a dropout of 0.4");
        let scale = 1.0f32 / 0.6;
        assert!(mask.iter().all(|&bits| bits == 0 || (f32::from_bits(bits) - scale).abs() < 1e-6));
    }
    for stage in Stage::ALL {
        assert_eq!(masks(4, stage, 5), reference, "another run, stage {stage}");
    }
    let fewer = masks(2, Stage::Parameters, 5);
    assert_eq!(fewer[..], reference[..2], "a rank's masks depend on the number of ranks");
    let other = masks(4, Stage::Parameters, 6);
    assert!(other.iter().flatten().all(|mask| !distinct.contains(mask)));
}

/// Threads of a data loader draw (augmentation) for the rank whose device they got, without affecting the rank's own draws.
#[test]
fn other_threads_draw_for_their_rank() {
    let drawn = |seed| {
        ranks(2, config(Stage::Parameters, seed), |device| {
            trains(&device);
            let draw = |device: &Device| {
                let drawn = Tensor::<Ad, 1>::random([64], Distribution::Default, device);
                bits(&drawn.into_data())
            };
            let beside = [(); 2].map(|()| {
                let device = device.clone();
                std::thread::spawn(move || draw(&device)).join().unwrap()
            });
            [beside[0].clone(), beside[1].clone(), draw(&device)]
        })
    };
    let (first, alone) = (drawn(5), drawn_by_a_rank_alone(5));
    assert_eq!(first, drawn(5), "another run");
    assert_eq!(first[0][2], alone, "the rank's own draws are what they were");
    let all: BTreeSet<Vec<u32>> = first.into_iter().chain(drawn(6)).flatten().collect();
    assert_eq!(all.len(), 12, "two draws are alike");
}

fn drawn_by_a_rank_alone(seed: u64) -> Vec<u32> {
    let own = |device: Device| {
        trains(&device);
        bits(&Tensor::<Ad, 1>::random([64], Distribution::Default, &device).into_data())
    };
    ranks(2, config(Stage::Parameters, seed), own).remove(0)
}

/// Dropout in a forward and backward pass: the backward pass uses the mask of the forward pass.
#[test]
fn the_backward_pass_uses_the_mask_of_the_forward_pass() {
    ranks(2, config(Stage::Parameters, 5), |device| {
        let dropout: Dropout = DropoutConfig::new(0.5).init();
        let x = Tensor::<Ad, 2>::ones([8, 32], &device).require_grad();
        let y = dropout.forward(x.clone());
        let gradient = x.grad(&y.clone().sum().backward()).unwrap().into_data();
        assert_eq!(bits(&gradient), bits(&y.into_data()));
    });
}
