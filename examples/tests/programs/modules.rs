//! Burn modules that the project's other tests do not train: recurrent nets, attention, norms, containers.

use crate::common::*;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::{Module, Param};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::lstm::{Lstm, LstmConfig, LstmState};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{
    Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, Linear, LinearConfig,
};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, activation};
use zero_burn::optim::distributed;

/// Sequences of this rank's rows: `[rows, WIDTH, 2]`.
fn sequences(device: &Device, world: usize, step: usize) -> Tensor<B, 3> {
    Tensor::stack(vec![batch(device, world, step), batch(device, world, step + 31)], 2)
}

#[derive(Module, Debug)]
struct Recurrent<B: Backend> {
    first: Lstm<B>,
    second: Gru<B>,
    out: Linear<B>,
}

/// The state is carried between steps and detached from the graph, as in truncated backpropagation: every weight is
/// used once per position of the sequence.
#[test]
fn recurrent_nets_with_carried_state() {
    like_one_rank("recurrent nets", |device, world| {
        let model = Recurrent {
            first: LstmConfig::new(2, 5, true).init::<B>(&device),
            second: GruConfig::new(5, 3, true).init(&device),
            out: LinearConfig::new(3, 1).init(&device),
        };
        let (mut model, mut optimizer) = distributed::<B, Recurrent<B>, _>(model, AdamWConfig::new().init(), &device);
        let mut carried = None;
        for step in 0..3 {
            let (hidden, state) = model.first.forward(sequences(&device, world, step), carried);
            carried = Some(LstmState::new(state.cell.detach(), state.hidden.detach()));
            let loss = model.out.forward(model.second.forward(hidden, None)).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

#[derive(Module, Debug)]
struct Words<B: Backend> {
    words: Embedding<B>,
    layers: TransformerEncoder<B>,
}

/// The output layer shares the embedding's weight.
#[test]
fn an_encoder_with_a_tied_embedding() {
    like_one_rank("an encoder with a tied embedding", |device, world| {
        let model = Words {
            words: EmbeddingConfig::new(11, 8).init::<B>(&device),
            layers: TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0).init(&device),
        };
        let (mut model, mut optimizer) = distributed::<B, Words<B>, _>(model, AdamWConfig::new().init(), &device);
        for step in 0..3 {
            let ids: Vec<i32> = rows(&device, world)
                .flat_map(|row| (0..5).map(move |i| ((row * 3 + i * 2 + step) % 11) as i32))
                .collect();
            let count = ROWS / world;
            let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [count, 5]), &device);
            let mask = generate_autoregressive_mask::<B>(count, 5, &device);
            let hidden =
                model.layers.forward(TransformerEncoderInput::new(model.words.forward(ids.clone())).mask_attn(mask));
            let logits = hidden.reshape([count * 5, 8]).matmul(model.words.weight.val().transpose());
            let loss = activation::log_softmax(logits, 1).gather(1, ids.reshape([count * 5, 1])).mean().neg();
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

#[derive(Module, Debug)]
struct Norms<B: Backend> {
    conv: Conv1d<B>,
    groups: GroupNorm<B>,
    instances: InstanceNorm<B>,
}

/// Norms over single rows. (Batch norm is not one: its statistics are per rank, as the book states.)
#[test]
fn norms_of_single_rows() {
    like_one_rank("norms of single rows", |device, world| {
        let model = Norms {
            conv: Conv1dConfig::new(2, 6, 3).init::<B>(&device),
            groups: GroupNormConfig::new(2, 6).init(&device),
            instances: InstanceNormConfig::new(6).init(&device),
        };
        let (mut model, mut optimizer) = distributed::<B, Norms<B>, _>(model, AdamWConfig::new().init(), &device);
        for step in 0..3 {
            let y = model.groups.forward(model.conv.forward(sequences(&device, world, step).swap_dims(1, 2)));
            let loss = (model.instances.forward(y.clone()) * y).powf_scalar(2.0).mean();
            model = update(model, &mut optimizer, loss);
        }
        whole(&model)
    });
}

#[allow(clippy::large_enum_variant)] // As a program has it.
#[derive(Module, Debug)]
enum Head<B: Backend> {
    Shallow(Linear<B>),
    Deep([Linear<B>; 2]),
}

#[derive(Debug, Clone)]
struct Note(#[allow(dead_code)] String);

/// Every container that Burn supports.
#[derive(Module, Debug)]
struct Zoo<B: Backend> {
    shift: Option<Param<Tensor<B, 1>>>,
    missing: Option<Linear<B>>,
    layers: Vec<Linear<B>>,
    pair: (Linear<B>, Linear<B>),
    heads: [Head<B>; 2],
    rate: f64,
    #[module(skip)]
    note: Note,
}

impl<B: Backend> Zoo<B> {
    fn new(device: &B::Device) -> Self {
        let layer = || LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            shift: Some(Param::from_data(TensorData::from([0.1f32, 0.2, 0.3, 0.4]), device)),
            missing: None,
            layers: vec![layer(), layer()],
            pair: (layer(), layer()),
            heads: [Head::Shallow(layer()), Head::Deep([layer(), layer()])],
            rate: 0.5,
            note: Note("kept".into()),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let mut y = x + self.shift.as_ref().unwrap().val().unsqueeze();
        for layer in &self.layers {
            y = activation::tanh(layer.forward(y));
        }
        y = self.pair.0.forward(y.clone()) + self.pair.1.forward(y).mul_scalar(self.rate);
        for head in &self.heads {
            y = match head {
                Head::Shallow(layer) => layer.forward(y),
                Head::Deep([first, second]) => second.forward(activation::gelu(first.forward(y))),
            };
        }
        y.powf_scalar(2.0).mean()
    }
}

/// Fields that are not parameters stay unchanged.
#[test]
fn every_container() {
    like_one_rank("every container", |device, world| {
        let zoo = Zoo::<B>::new(&device);
        let count = zoo.num_params();
        let (mut zoo, mut optimizer) = distributed::<B, Zoo<B>, _>(zoo, AdamWConfig::new().init(), &device);
        for step in 0..3 {
            let loss = zoo.loss(batch(&device, world, step));
            zoo = update(zoo, &mut optimizer, loss);
            // A copy that is moved, as programs do for a second device, and let go of.
            let copy = zoo.clone().fork(&device);
            assert_eq!((copy.num_params(), copy.rate, copy.note.0.as_str()), (count, 0.5, "kept"));
        }
        whole(&zoo)
    });
}

/// Burn's own recomputation of activations, over sharded parameters. Expected: the bits of a run that keeps everything.
#[test]
fn balanced_checkpointing() {
    type Balanced = Autodiff<Inner, BalancedCheckpointing>;
    for stage in zero_core::Stage::ALL {
        let kept = run(2, config(stage), |device| {
            let (mut zoo, mut optimizer) =
                distributed::<B, Zoo<B>, _>(Zoo::new(&device), SgdConfig::new().init(), &device);
            for step in 0..3 {
                let loss = zoo.loss(batch(&device, 2, step));
                zoo = update(zoo, &mut optimizer, loss);
            }
            whole(&zoo)
        });
        let recomputed = run(2, config(stage), |device| {
            let (mut zoo, mut optimizer) =
                distributed::<Balanced, Zoo<Balanced>, _>(Zoo::new(&device), SgdConfig::new().init(), &device);
            for step in 0..3 {
                let x = Tensor::<Balanced, 2>::from_inner(batch(&device, 2, step).inner());
                let grads = GradientsParams::from_grads(zoo.loss(x).backward(), &zoo);
                zoo = optimizer.step(0.05, zoo, grads);
            }
            let found = zero_burn::gathered::read::<Balanced, _>(&zoo, |_| true);
            found.into_iter().flat_map(|parameter| parameter.values).collect::<Vec<f32>>()
        });
        assert_eq!(recomputed.unwrap(), kept.unwrap(), "{stage:?}");
    }
}
