//! Models that are made of Burn's own layers, as Burn's examples are: one call shards each, and it trains as on plain Burn:
//! `cargo test --test burn_modules -- --nocapture`.

mod common;

use burn::module::{Module, Param};
use burn::tensor::activation::{leaky_relu, log_softmax, relu, tanh};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn_nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn_nn::gru::{Gru, GruConfig};
use burn_nn::lstm::{Lstm, LstmConfig};
use burn_nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn_nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn_nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, LayerNorm, LayerNormConfig,
    Linear, LinearConfig, PaddingConfig2d,
};
use burn_optim::{AdamConfig, SgdConfig};
use common::{
    Net, Told, apart, config, device, filled, numbers, options, seed, train_plain, train_threads, unkept, value,
};
use serde_json::Map;
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_param::{Error, Optimizer, OptimizerConfig, Ranks, Zero, run_threads, shard};

const ROWS: usize = 3;

fn floats<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let mut next = numbers(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn ids<const D: usize>(seed: u64, shape: [usize; D], below: usize, device: &Device) -> Tensor<D, Int> {
    let mut next = numbers(seed);
    let values: Vec<i32> = (0..shape.iter().product()).map(|_| ((next() + 1.0) / 2.0 * below as f32) as i32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn cross_entropy(logits: Tensor<2>, seed: u64) -> Tensor<1> {
    let [rows, classes] = logits.dims();
    let labels = ids(seed + 1, [rows, 1], classes, &logits.device());
    log_softmax(logits, 1).gather(1, labels).mean().neg()
}

/// Regression by a perceptron with one hidden layer.
#[derive(Module, Debug)]
struct Regression {
    input: Linear,
    output: Linear,
}

impl Net for Regression {
    fn build(device: &Device) -> Self {
        filled(Self {
            input: LinearConfig::new(8, 64).init(device),
            output: LinearConfig::new(64, 1).with_bias(false).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let (x, y) = (floats(seed, [ROWS, 8], device), floats(seed + 1, [ROWS, 1], device));
        (self.output.forward(relu(self.input.forward(x))) - y).square().mean()
    }
}

/// A classifier of images: convolutions, batch norm and pooling.
#[derive(Module, Debug)]
struct Digits {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    pool: MaxPool2d,
    fc: Linear,
}

impl Net for Digits {
    fn build(device: &Device) -> Self {
        filled(Self {
            conv1: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm1: BatchNormConfig::new(4).init(device),
            conv2: Conv2dConfig::new([4, 6], [3, 3]).with_padding(PaddingConfig2d::Same).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            fc: LinearConfig::new(6 * 9, 10).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let x = floats(seed, [ROWS, 1, 8, 8], device);
        let x = self.conv2.forward(relu(self.norm1.forward(self.conv1.forward(x))));
        cross_entropy(self.fc.forward(self.pool.forward(x).flatten::<2>(1, 3)), seed)
    }
}

/// A classifier of texts: token and position embeddings, and an encoder.
#[derive(Module, Debug)]
struct Texts {
    tokens: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    output: Linear,
}

const LENGTH: usize = 5;
const D: usize = 16;

impl Texts {
    fn encoded(&self, seed: u64, is_causal: bool, device: &Device) -> Tensor<3> {
        let x = self.tokens.forward(ids(seed, [ROWS, LENGTH], 20, device));
        let places = Tensor::arange(0..LENGTH as i64, device).reshape([1, LENGTH]).repeat_dim(0, ROWS);
        let input = TransformerEncoderInput::new((x + self.positions.forward(places)) / 2);
        self.encoder.forward(match is_causal {
            true => input.mask_attn(generate_autoregressive_mask(ROWS, LENGTH, device)),
            false => input,
        })
    }
}

impl Net for Texts {
    fn build(device: &Device) -> Self {
        // On two ranks the shards of the feed-forward layer are no full rows.
        let encoder = TransformerEncoderConfig::new(D, 31, 2, 2).with_dropout(0.0).with_norm_first(true);
        filled(Self {
            tokens: EmbeddingConfig::new(20, D).init(device),
            positions: EmbeddingConfig::new(LENGTH, D).init(device),
            encoder: encoder.init(device),
            output: LinearConfig::new(D, 4).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let first = self.encoded(seed, false, device).slice([0..ROWS, 0..1]).reshape([ROWS, D]);
        cross_entropy(self.output.forward(first), seed)
    }
}

/// A generator of texts: the same with a causal mask, and a loss at each position.
#[derive(Module, Debug)]
struct Generation {
    texts: Texts,
}

impl Net for Generation {
    fn build(device: &Device) -> Self {
        Self { texts: Texts::build(device) }
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let logits = self.texts.output.forward(self.texts.encoded(seed, true, device));
        cross_entropy(logits.reshape([ROWS * LENGTH, 4]), seed)
    }
}

/// A recurrent net with an LSTM and layer norm.
#[derive(Module, Debug)]
struct Sequences {
    lstm: Lstm,
    norm: LayerNorm,
    output: Linear,
}

impl Net for Sequences {
    fn build(device: &Device) -> Self {
        filled(Self {
            lstm: LstmConfig::new(6, D, true).init(device),
            norm: LayerNormConfig::new(D).init(device),
            output: LinearConfig::new(D, 1).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let (_, state) = self.lstm.forward(floats(seed, [ROWS, LENGTH, 6], device), None);
        let y = floats(seed + 1, [ROWS, 1], device);
        (self.output.forward(self.norm.forward(state.hidden)) - y).square().mean()
    }
}

/// A recurrent net with a GRU over convolved features.
#[derive(Module, Debug)]
struct Sounds {
    conv: Conv1d,
    gru: Gru,
    output: Linear,
}

impl Net for Sounds {
    fn build(device: &Device) -> Self {
        filled(Self {
            conv: Conv1dConfig::new(3, 8, 3).init(device),
            gru: GruConfig::new(8, D, true).init(device),
            output: LinearConfig::new(D, 3).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let x = relu(self.conv.forward(floats(seed, [ROWS, 3, LENGTH + 2], device))).swap_dims(1, 2);
        let last = self.gru.forward(x, None).slice([0..ROWS, LENGTH - 1..LENGTH]).reshape([ROWS, D]);
        cross_entropy(self.output.forward(last), seed)
    }
}

/// A residual net: blocks of two convolutions with batch norm, one with a projection, and pooling over all positions.
#[derive(Module, Debug)]
struct Residual {
    blocks: Vec<ResidualBlock>,
    pool: AdaptiveAvgPool2d,
    fc: Linear,
}

#[derive(Module, Debug)]
struct ResidualBlock {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    project: Option<Conv2d>,
}

impl ResidualBlock {
    fn new(from: usize, to: usize, device: &Device) -> Self {
        let conv = |from, to, size| {
            Conv2dConfig::new([from, to], [size, size])
                .with_padding(PaddingConfig2d::Same)
                .with_bias(false)
                .init(device)
        };
        Self {
            conv1: conv(from, to, 3),
            norm1: BatchNormConfig::new(to).init(device),
            conv2: conv(to, to, 3),
            norm2: BatchNormConfig::new(to).init(device),
            project: (from != to).then(|| conv(from, to, 1)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let out = relu(self.norm1.forward(self.conv1.forward(x.clone())));
        let out = self.norm2.forward(self.conv2.forward(out));
        relu(out + self.project.as_ref().map_or(x.clone(), |project| project.forward(x)))
    }
}

impl Net for Residual {
    fn build(device: &Device) -> Self {
        filled(Self {
            blocks: vec![ResidualBlock::new(3, 3, device), ResidualBlock::new(3, 6, device)],
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            fc: LinearConfig::new(6, 5).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let x = self.blocks.iter().fold(floats(seed, [ROWS, 3, 6, 6], device), |x, block| block.forward(x));
        cross_entropy(self.fc.forward(self.pool.forward(x).flatten::<2>(1, 3)), seed)
    }
}

/// Generator and critic of a Wasserstein GAN, with the loss of both.
#[derive(Module, Debug)]
struct Gan {
    project: Linear,
    norm: BatchNorm,
    up: ConvTranspose2d,
    critic: Conv2d,
    score: Linear,
}

impl Net for Gan {
    fn build(device: &Device) -> Self {
        let up = ConvTranspose2dConfig::new([4, 1], [4, 4]).with_stride([2, 2]).with_padding([1, 1]);
        filled(Self {
            project: LinearConfig::new(6, 4 * 16).init(device),
            norm: BatchNormConfig::new(4).init(device),
            up: up.init(device),
            critic: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            score: LinearConfig::new(4 * 36, 1).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let seen = |x: Tensor<4>| self.score.forward(leaky_relu(self.critic.forward(x), 0.2).flatten::<2>(1, 3)).mean();
        let noise = self.project.forward(floats(seed, [ROWS, 6], device)).reshape([ROWS, 4, 4, 4]);
        let made = tanh(self.up.forward(relu(self.norm.forward(noise))));
        seen(made) - seen(floats(seed + 1, [ROWS, 1, 8, 8], device))
    }
}

/// An autoencoder with group norm.
#[derive(Module, Debug)]
struct Autoencoder {
    down: Conv2d,
    norm: GroupNorm,
    code: Linear,
    decode: Linear,
    up: ConvTranspose2d,
}

impl Net for Autoencoder {
    fn build(device: &Device) -> Self {
        filled(Self {
            down: Conv2dConfig::new([1, 4], [2, 2]).with_stride([2, 2]).init(device),
            norm: GroupNormConfig::new(2, 4).init(device),
            code: LinearConfig::new(4 * 16, 6).init(device),
            decode: LinearConfig::new(6, 4 * 16).init(device),
            up: ConvTranspose2dConfig::new([4, 1], [2, 2]).with_stride([2, 2]).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let x = floats(seed, [ROWS, 1, 8, 8], device);
        let code = self.code.forward(relu(self.norm.forward(self.down.forward(x.clone()))).flatten::<2>(1, 3));
        (self.up.forward(self.decode.forward(code).reshape([ROWS, 4, 4, 4])) - x).square().mean()
    }
}

/// Attention over a learned memory, with parameters of its own beside Burn's layers.
#[derive(Module, Debug)]
struct Memory {
    memory: Param<Tensor<3>>,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    output: Linear,
}

impl Net for Memory {
    fn build(device: &Device) -> Self {
        filled(Self {
            memory: Param::from_tensor(Tensor::zeros([1, 7, D], device)),
            attention: MultiHeadAttentionConfig::new(D, 4).with_dropout(0.0).init(device),
            norm: LayerNormConfig::new(D).init(device),
            output: LinearConfig::new(D, 1).init(device),
        })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let x = floats(seed, [ROWS, LENGTH, D], device);
        let memory = self.memory.val().repeat_dim(0, ROWS);
        let read = self.attention.forward(MhaInput::new(x.clone(), memory.clone(), memory)).context;
        self.output.forward(self.norm.forward(x + read)).square().mean()
    }
}

/// Compares sharded training with plain Burn. Asserts that the ranks hold at most two full parameters between forward and backward pass,
/// without and with Burn's gradient checkpointing, and none after it.
fn check<N: Net>(name: &str) {
    // Not Adam: it magnifies rounding where a gradient is exactly zero, as that of a bias before a batch norm.
    let optimizer = SgdConfig::new();
    let plain = train_plain::<N>(2, optimizer.elementwise().unwrap());
    assert!(plain[0].losses.windows(2).any(|pair| pair[0] != pair[1]), "{name} trains");
    let first = train_threads::<N>(2, &config(Stage::DataParallel), &optimizer);
    // Each rank has running statistics of its own rows.
    let parameters = |told: &Told| {
        let mut told = told.clone();
        told.weights.retain(|path, _| !path.contains("running_"));
        told
    };
    let differences = first.iter().zip(&plain).map(|(sharded, plain)| apart(&parameters(sharded), &parameters(plain)));
    let apart = differences.fold(0.0, f64::max);
    println!("{name}: losses, norms and weights after 4 steps differ by at most {apart:.1e} from plain Burn's");
    assert!(apart < 1e-6, "{name}: {apart:e}");
    for stage in &Stage::ALL[1..] {
        assert!(train_threads::<N>(2, &config(*stage), &optimizer) == first, "{name}: stage {stage} has other bits");
    }
    for device in [device(), device().gradient_checkpointing()] {
        let held = run_threads(2, &options(), |ranks| {
            let (net, zero) = shard(N::build(&device), ranks, &unkept(Stage::Parameters))?;
            let full = || zero.full_parameters().map(str::to_string).collect::<Vec<_>>();
            let mut between = Vec::new();
            zero.backward(|| {
                let loss = net.loss(seed(0, ranks.comm().rank()), &device);
                // Ranks of a process share full parameters.
                ranks.comm().barrier().unwrap();
                between = full();
                ranks.comm().barrier().unwrap();
                loss
            })?;
            Ok::<_, Error>((between, full()))
        });
        for (between, after) in held.unwrap() {
            println!("{name}: in full between the passes {between:?}, after them {after:?}");
            assert!(between.len() <= 2 && after.is_empty(), "{name}");
        }
    }
}

#[test]
fn running_statistics_are_saved_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let statistics = |net: &Digits| -> Vec<f32> {
        let norm = net.valid().norm1;
        [norm.running_mean.value(), norm.running_var.value()]
            .into_iter()
            .flat_map(|of| of.into_data().iter::<f32>().collect::<Vec<_>>())
            .collect()
    };
    let steps = |ranks: &Ranks, zero: &Zero, mut net: Digits, mut optimizer: Optimizer, of: std::ops::Range<usize>| {
        let mut losses = Vec::new();
        for step in of {
            let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device()))?;
            losses.push(value(loss));
            net = optimizer.step(1e-2, net, grads)?;
        }
        Ok::<_, Error>((losses, net, optimizer))
    };
    let saved = run_threads(2, &options(), |ranks| {
        let (net, zero) = shard(Digits::build(&device()), ranks, &config(Stage::Parameters))?;
        assert!(!zero.paths().any(|path| path.contains("running_")), "they are no parameters");
        let (_, net, optimizer) = steps(ranks, &zero, net, zero.optimizer(&AdamConfig::new())?, 0..3)?;
        zero.save(&net, &optimizer, dir.path(), 3, Map::new(), &SaveOptions::default())?;
        let own = statistics(&net);
        Ok::<_, Error>((own, steps(ranks, &zero, net, optimizer, 3..5)?.0))
    })
    .unwrap();
    assert!(saved[0].0 != saved[1].0, "each rank has its own");
    assert!(saved[0].0.iter().any(|&x| x != 0.0 && x != 1.0), "they change");
    for (world, stage) in [(2, Stage::DataParallel), (2, Stage::Parameters), (3, Stage::Gradients)] {
        let loaded = run_threads(world, &options(), |ranks| {
            let (net, zero) = shard(Digits::build(&device()), ranks, &config(stage))?;
            let found = Checkpoint::open(&dir.path().join("step-00000003"))?;
            let resumed = zero.load(net, zero.optimizer(&AdamConfig::new())?, &found)?;
            let own = statistics(&resumed.model);
            Ok::<_, Error>((own, steps(ranks, &zero, resumed.model, resumed.optimizer, 3..5)?.0))
        })
        .unwrap();
        for (rank, (statistics, losses)) in loaded.iter().enumerate() {
            assert!(*statistics == saved[0].0, "{world} ranks, stage {stage}: rank 0's on all");
            assert!(
                world != 2 || *losses == saved[rank].1,
                "{world} ranks, stage {stage}: it goes on with the same losses"
            );
        }
    }
}

#[test]
fn ten_models_of_burns_layers_train_as_on_plain_burn() {
    check::<Regression>("regression");
    check::<Digits>("digits");
    check::<Texts>("text classification");
    check::<Generation>("text generation");
    check::<Sequences>("lstm");
    check::<Sounds>("gru");
    check::<Residual>("residual net");
    check::<Gan>("gan");
    check::<Autoencoder>("autoencoder");
    check::<Memory>("attention");
}
