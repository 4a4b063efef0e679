//! Layers that are created in full, or as views.

use burn::module::{AutodiffModule, Initializer};
use burn::nn::LinearLayout;
use burn::optim::AdamWConfig;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use zero_burn::module::mark;

use super::*;

/// A network of two layers: one is created in full or as a view, the other is not.
#[derive(Module, Debug)]
struct Odd<B: Backend> {
    odd: Linear<B>,
    even: Linear<B>,
}

fn orthogonal(device: &Device) -> Linear<Ad> {
    // A bias has no rows to be orthogonal.
    let config = LinearConfig::new(6, 4).with_bias(false);
    config.with_initializer(Initializer::Orthogonal { gain: 1.0 }).init(device)
}

pub(super) fn column<B: Backend<Device = Device>>(device: &Device) -> Linear<B> {
    LinearConfig::new(6, 4).with_layout(LinearLayout::Col).init(device)
}

/// Created without autodiff, and therefore a leaf of the graph from the start.
fn column_as_a_leaf(device: &Device) -> Linear<Ad> {
    <Linear<Ad> as AutodiffModule<Ad>>::from_inner(column::<Zero<Flex>>(device))
}

fn batch(device: &Device, step: usize) -> Tensor<Ad, 2> {
    let salt = device.rank() * 31 + step * 7;
    let values: Vec<f32> = (0..18).map(|i| ((i * 5 + salt * 3) % 11) as f32 / 7.0 - 0.6).collect();
    Tensor::from_data(TensorData::new(values, [3, 6]), device)
}

fn train(mut model: Odd<Ad>, device: &Device) -> (Odd<Ad>, Vec<u32>) {
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..4 {
        let x = batch(device, step);
        let loss = (model.even.forward(model.odd.forward(x.clone())) - x).powf_scalar(2.0).mean();
        losses.push(loss.clone().into_scalar().to_bits());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = collect_grads::<Ad, _>(grads, &model);
        model = optimizer.step(0.05, model, grads);
    }
    (model, losses)
}

/// Checks that first values are the same in every world and at every stage, and that sharded training is bit-equal at every stage.
fn an_odd_layer_works(odd: fn(&Device) -> Linear<Ad>, sizes: &[usize]) -> Vec<TensorData> {
    let mut first: Option<Vec<TensorData>> = None;
    for world in 1..=4 {
        let mut reference = None;
        for stage in Stage::ALL {
            let run = ranks(world, config(stage, 5), |device| {
                let model = Odd { odd: odd(&device), even: LinearConfig::new(4, 6).init(&device) };
                let model = prepare::<Ad, _>(model, &device);
                let born = values::<Ad, _>(&model);
                let (model, losses) = train(model, &device);
                // What the optimizer has made counts as parameters from here.
                mark::<Ad, _>(&model);
                let held = held();
                let expected = bytes_of(sizes, stage, world, device.rank());
                // At stages 1 and 2 an updated parameter is a piece until its first use.
                let least = bytes_of(sizes, Stage::Parameters, world, device.rank());
                let place = format!("stage {stage}, rank {} of {world}", device.rank());
                assert!((least..=expected).contains(&held), "{held} bytes, not {expected}, {place}");
                let trained = all_bits(&values::<Ad, _>(&model));
                for (parameter, (before, after)) in all_bits(&born).iter().zip(&trained).enumerate() {
                    assert_ne!(before, after, "parameter {parameter} was not trained, {place}");
                }
                drop(model);
                (born, losses)
            });
            let losses: Vec<_> = run.iter().map(|(_, losses)| losses.clone()).collect();
            assert_eq!(reference.get_or_insert_with(|| losses.clone()), &losses, "stage {stage}, {world} ranks");
            assert!(f32::from_bits(losses[0][3]) < f32::from_bits(losses[0][0]), "the loss does not fall");
            for (born, _) in run {
                let first = first.get_or_insert_with(|| born.clone());
                assert_eq!(all_bits(first), all_bits(&born), "stage {stage}, {world} ranks");
            }
        }
    }
    first.unwrap()
}

#[test]
fn the_orthogonal_initializer_works() {
    let weight = an_odd_layer_works(orthogonal, &[24, 24, 6]).remove(0).to_vec::<f32>().unwrap();
    for a in 0..4 {
        for b in 0..4 {
            let product: f32 = (0..6).map(|row| weight[row * 4 + a] * weight[row * 4 + b]).sum();
            assert!((product - if a == b { 1.0 } else { 0.0 }).abs() < 1e-5, "columns {a} and {b}: {product}");
        }
    }
}

#[test]
fn a_column_layout_works() {
    for column in [column::<Ad>, column_as_a_leaf] {
        let born = an_odd_layer_works(column, &[24, 4, 24, 6]);
        assert_eq!(born[0].shape.as_slice(), [6, 4]);
    }
}

/// An initializer's temporaries, and a view's base, are dropped after the first step.
#[test]
fn an_initializers_temporaries_do_not_stay() {
    for odd in [orthogonal, column_as_a_leaf] {
        ranks(4, config(Stage::Parameters, 5), |device| {
            let model = Odd { odd: odd(&device), even: LinearConfig::new(4, 6).init(&device) };
            let (model, _) = train(prepare::<Ad, _>(model, &device), &device);
            mark::<Ad, _>(&model);
            let mut sizes = Vec::new();
            for value in values::<Ad, _>(&model) {
                sizes.push(value.num_elements());
            }
            assert_eq!(held(), bytes_of(&sizes, Stage::Parameters, 4, device.rank()));
        });
    }
}

/// Until then they cost memory: initializing a model that fits as shards must not need a multiple of that.
///
/// An initializer's temporaries are dropped after `prepare`.
#[test]
fn an_initializers_temporaries_are_few() {
    ranks(4, config(Stage::Parameters, 5), |device| {
        let initializer = Initializer::Orthogonal { gain: 1.0 };
        let odd = LinearConfig::new(64, 64).with_bias(false).with_initializer(initializer).init(&device);
        let model = prepare::<Ad, _>(odd, &device);
        let share = 4 * 64 * 64 / 4;
        let held = held();
        assert!(held <= 2 * share, "{held} bytes are held for a parameter of {share}");
        drop(model);
    });
}

/// A column layout's record holds the transposed weight, at every stage.
#[test]
fn a_column_layouts_record_round_trips() {
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let born = |stage, world| {
        ranks(world, config(stage, 5), |device| {
            let model = column::<Zero<Flex>>(&device);
            let born = all_bits(&values::<Zero<Flex>, _>(&model));
            let bytes: Vec<u8> = recorder.record(model.into_record(), ()).unwrap();
            Ad::seed(&device, 99);
            let fresh = column::<Zero<Flex>>(&device).load_record(recorder.load(bytes, &device).unwrap());
            assert_eq!(all_bits(&values::<Zero<Flex>, _>(&fresh)), born, "stage {stage}, {world} ranks");
            born
        })
    };
    let reference = born(Stage::DataParallel, 1).remove(0);
    for stage in Stage::ALL {
        for got in born(stage, 3) {
            assert_eq!(got, reference, "stage {stage}");
        }
    }
}
