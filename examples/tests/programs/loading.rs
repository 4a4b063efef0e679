//! Models loaded from files, and models that only one rank has.

use crate::common::*;
use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::{Tensor, TensorData};
use zero_burn::ZeroTensor;
use zero_burn::optim::distributed;
use zero_core::Stage;

/// Side length of the loaded weight.
const SIDE: usize = 64;

/// Returns `true` if a rank holds only its shard of the weight.
fn is_piece(model: &Linear<B>) -> bool {
    matches!(model.weight.val().inner().into_primitive().tensor(), ZeroTensor::Shard(_))
}

#[test]
fn a_record_is_loaded_in_pieces() {
    let config = config(Stage::Parameters);
    let ranks = run(2, config, |device| {
        let linear = LinearConfig::new(SIDE, SIDE).with_bias(false);
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let model = linear.init::<B>(&device);
        let expected = whole(&model);
        let record = recorder.record(model.into_record(), ()).unwrap();
        let loaded = linear.init::<B>(&device).load_record(recorder.load(record, &device).unwrap());
        assert_eq!(whole(&loaded), expected);
        is_piece(&loaded)
    });
    assert_eq!(ranks.unwrap(), [true; 2]);
}

/// Loads like burn-store: creates an ordinary tensor from the data, and a parameter from it.
fn read(device: &Device) -> Linear<B> {
    let values: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % 23) as f32 / 40.0 - 0.3).collect();
    let weight = Tensor::<B, 2>::from_data(TensorData::new(values, [SIDE, SIDE]), device).set_require_grad(true);
    Linear { weight: Param::initialized(ParamId::new(), weight), bias: None }
}

#[test]
fn what_a_reader_loads_is_cut_as_it_is_read() {
    let ranks = run(2, config(Stage::Parameters), |device| {
        [is_piece(&zero_burn::load_parameters(|| read(&device))), is_piece(&read(&device))]
    });
    assert_eq!(ranks.unwrap(), [[true, false]; 2]);
    for in_pieces in [true, false] {
        like_one_rank("what a reader has loaded", move |device, world| {
            let model = if in_pieces { zero_burn::load_parameters(|| read(&device)) } else { read(&device) };
            let (mut model, mut optimizer) = distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), &device);
            for step in 0..3 {
                let x = batch(&device, world, step).repeat_dim(1, SIDE / WIDTH);
                let loss = model.forward(x).powf_scalar(2.0).mean();
                model = update(model, &mut optimizer, loss);
            }
            whole(&model)
        });
    }
}

/// A teacher that only rank 0 creates and uses, at stages where each rank holds all of it. At stage 3 the ranks would
/// wait for each other until the deadline.
#[test]
fn a_teacher_of_rank_0_alone() {
    for stage in [Stage::DataParallel, Stage::OptimizerState, Stage::Gradients] {
        let ranks = run(2, config(stage), |device| {
            let model = LinearConfig::new(WIDTH, 3).init::<B>(&device);
            let (mut model, mut optimizer) = distributed::<B, Linear<B>, _>(model, SgdConfig::new().init(), &device);
            let teacher = (device.rank() == 0).then(|| LinearConfig::new(WIDTH, 3).init::<B>(&device));
            for step in 0..3 {
                let x = batch(&device, 2, step);
                let mut loss = model.forward(x.clone()).powf_scalar(2.0).mean();
                if let Some(teacher) = &teacher {
                    loss = loss + (model.forward(x.clone()) - teacher.forward(x).detach()).powf_scalar(2.0).mean();
                }
                model = update(model, &mut optimizer, loss);
            }
            whole(&model)
        });
        let ranks = ranks.unwrap();
        assert_eq!(ranks[0], ranks[1], "{stage:?}");
    }
}
