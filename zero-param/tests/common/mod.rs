//! Models, batches and training runs that the tests share.
#![allow(dead_code)] // Each binary uses some.

pub mod processes;

use std::collections::BTreeMap;
use std::time::Duration;

use burn::module::{Lora, LoraAdapter, Module, ModuleMapper, ModuleVisitor, Param, Reparameterizer};
use burn::tensor::activation::{gelu, log_softmax, relu, softmax};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_optim::{GradientsParams, ModuleOptimizer};
use zero_core::Stage;
use zero_core::collective::threads::ThreadOptions;
use zero_param::{
    Error, OptimizerConfig, Ranks, Zero, ZeroConfig, checkpoint_block, dropout, embedding, run_threads, shard,
    tied_head,
};

/// Pseudo-random numbers in [-1, 1) that are the same in every run.
pub fn numbers(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0
    }
}

/// Gives every parameter of a module values that are the same in every run.
struct Fill(u64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let (id, tensor, mapper) = param.consume();
        let (shape, device, train) = (tensor.shape(), tensor.device(), tensor.is_require_grad());
        let mut next = numbers(self.0);
        let scale = 1.0 / (shape[0] as f32).sqrt();
        let values: Vec<f32> = (0..shape.num_elements()).map(|_| next() * scale).collect();
        let filled = Tensor::from_data(TensorData::new(values, shape), &device).set_require_grad(train);
        Param::from_mapped_value(id, filled, mapper)
    }
}

pub fn filled<M: Module>(module: M) -> M {
    module.map(&mut Fill(0))
}

/// Burn's LoRA with values of A and B that are the same in every run. B is not zero, so that A has a gradient from the first step on.
#[derive(Clone)]
pub struct Filled(pub Lora);

impl Reparameterizer for Filled {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let (param, adapter) = self.0.reparameterize(path, param);
        (param, adapter.map(filled))
    }
}

pub fn device() -> Device {
    Device::flex().autodiff()
}

/// A module with a loss on rows generated from `seed`.
pub trait Net: Module + Clone + Send + 'static {
    fn build(device: &Device) -> Self;
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1>;
}

pub const ROWS: usize = 4;

/// `DEPTH` layers of `WIDTH` by `WIDTH`.
#[derive(Module, Debug)]
pub struct Mlp<const WIDTH: usize, const DEPTH: usize> {
    pub layers: Vec<Linear>,
}

impl<const WIDTH: usize, const DEPTH: usize> Mlp<WIDTH, DEPTH> {
    /// Builds one whose parameters are initialized lazily.
    pub fn lazy(device: &Device) -> Self {
        Self { layers: (0..DEPTH).map(|_| LinearConfig::new(WIDTH, WIDTH).init(device)).collect() }
    }
}

impl<const WIDTH: usize, const DEPTH: usize> Net for Mlp<WIDTH, DEPTH> {
    fn build(device: &Device) -> Self {
        filled(Self::lazy(device))
    }

    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let mut next = numbers(seed);
        let mut rows = || {
            let values: Vec<f32> = (0..ROWS * WIDTH).map(|_| next()).collect();
            Tensor::<2>::from_data(TensorData::new(values, [ROWS, WIDTH]), device)
        };
        let (mut x, y) = (rows(), rows());
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x);
            if index + 1 < self.layers.len() {
                x = relu(x);
            }
        }
        (x - y).square().mean()
    }
}

pub const VOCABULARY: usize = 37;
pub const LENGTH: usize = 6;
pub const WIDTH: usize = 12;
const HEADS: usize = 3;

#[derive(Module, Debug)]
pub struct Block {
    ln_1: LayerNorm,
    attn: Linear,
    proj: Linear,
    ln_2: LayerNorm,
    fc: Linear,
    out: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            ln_1: LayerNormConfig::new(WIDTH).init(device),
            attn: linear(WIDTH, 3 * WIDTH),
            proj: linear(WIDTH, WIDTH),
            ln_2: LayerNormConfig::new(WIDTH).init(device),
            fc: linear(WIDTH, 4 * WIDTH),
            out: linear(4 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: Tensor<3>, dropped: f64) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let qkv = self.attn.forward(self.ln_1.forward(x.clone()));
        let mut heads =
            qkv.chunk(3, 2).into_iter().map(|part| part.reshape([batch, length, HEADS, width / HEADS]).swap_dims(1, 2));
        let (q, k, v) = (heads.next().unwrap(), heads.next().unwrap(), heads.next().unwrap());
        let mask: Vec<f32> =
            (0..length * length).map(|at| if at % length > at / length { -1e9 } else { 0.0 }).collect();
        let mask = Tensor::<4>::from_data(TensorData::new(mask, [1, 1, length, length]), &x.device());
        let scores = q.matmul(k.transpose()) / ((width / HEADS) as f32).sqrt() + mask;
        let mixed = dropout(softmax(scores, 3), dropped).matmul(v).swap_dims(1, 2).reshape([batch, length, width]);
        let x = x + dropout(self.proj.forward(mixed), dropped);
        x.clone() + dropout(self.out.forward(gelu(self.fc.forward(self.ln_2.forward(x)))), dropped)
    }
}

/// A small GPT-2 with a tied head and a dropout of `DROPPED` percent.
#[derive(Module, Debug)]
pub struct Gpt<const DEPTH: usize, const DROPPED: usize = 0> {
    wte: Param<Tensor<2>>,
    wpe: Param<Tensor<2>>,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
}

impl<const DEPTH: usize, const DROPPED: usize> Net for Gpt<DEPTH, DROPPED> {
    fn build(device: &Device) -> Self {
        let table = |rows| Param::from_tensor(Tensor::zeros([rows, WIDTH], device));
        filled(Self {
            wte: table(VOCABULARY),
            wpe: table(LENGTH),
            blocks: (0..DEPTH).map(|_| Block::new(device)).collect(),
            ln_f: LayerNormConfig::new(WIDTH).init(device),
        })
    }

    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let mut next = numbers(seed);
        let mut ids = || {
            let ids: Vec<i32> = (0..ROWS * LENGTH).map(|_| ((next() + 1.0) / 2.0 * VOCABULARY as f32) as i32).collect();
            Tensor::<2, Int>::from_data(TensorData::new(ids, [ROWS, LENGTH]), device)
        };
        let (ids, targets) = (ids(), ids());
        let places =
            Tensor::<2, Int>::from_data(TensorData::new((0..LENGTH as i32).collect::<Vec<_>>(), [1, LENGTH]), device);
        let dropped = DROPPED as f64 / 100.0;
        let mut x = dropout(embedding(&self.wte, ids) + embedding(&self.wpe, places), dropped);
        for block in &self.blocks {
            let block = block.clone();
            x = checkpoint_block(move |x| block.forward(x, dropped), x);
        }
        let logits = tied_head(self.ln_f.forward(x), &self.wte);
        let likelihoods = log_softmax(logits.reshape([ROWS * LENGTH, VOCABULARY]), 1);
        likelihoods.gather(1, targets.reshape([ROWS * LENGTH, 1])).mean().neg()
    }
}

/// A net that works with whatever type its weights are gathered in.
#[derive(Module, Debug)]
pub struct Half {
    pub first: Param<Tensor<2>>,
    pub second: Param<Tensor<2>>,
}

impl Net for Half {
    fn build(device: &Device) -> Self {
        filled(Self { first: table(16, 24, device), second: table(24, 16, device) })
    }
    fn loss(&self, seed: u64, device: &Device) -> Tensor<1> {
        let (x, y) = rows(seed, 16, device);
        let first = self.first.val();
        let x = x.cast(first.dtype()).matmul(first);
        let out = x.tanh().matmul(self.second.val());
        (out.cast(DType::F32) - y).square().mean()
    }
}

pub fn table(from: usize, to: usize, device: &Device) -> Param<Tensor<2>> {
    Param::from_tensor(Tensor::zeros([from, to], device))
}

/// Returns inputs and targets.
pub fn rows(seed: u64, width: usize, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let mut next = numbers(seed);
    let mut rows = || {
        let values: Vec<f32> = (0..ROWS * width).map(|_| next()).collect();
        Tensor::<2>::from_data(TensorData::new(values, [ROWS, width]), device)
    };
    (rows(), rows())
}

/// Results of a rank's run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Told {
    pub losses: Vec<f32>,
    pub norms: Vec<f64>,
    /// Full parameters at the end.
    pub weights: BTreeMap<String, Vec<f32>>,
}

#[derive(Default)]
struct Weights {
    path: Vec<String>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Weights {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.insert(self.path.join("."), param.val().into_data().iter::<f32>().collect());
    }
}

/// Returns a module's full parameters.
pub fn weights<M: Module>(module: &M) -> BTreeMap<String, Vec<f32>> {
    let mut weights = Weights::default();
    module.valid().materialize().visit(&mut weights);
    weights.found
}

pub fn value(loss: Tensor<1>) -> f32 {
    loss.into_data().try_into_vec::<f32>().unwrap()[0]
}

/// Settings that shard everything but vectors, in buckets of a few parameters.
pub fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig { reduce_bucket_size: 500, param_persistence_threshold: 0, ..ZeroConfig::new(stage) }
}

/// Settings that also keep no gathered parameter from one use to the next, and prefetch none.
pub fn unkept(stage: Stage) -> ZeroConfig {
    ZeroConfig { max_live_parameters: 0, ..config(stage) }
}

/// The seed of a rank's rows.
pub fn seed(step: usize, rank: usize) -> u64 {
    1000 + 10 * step as u64 + rank as u64
}

pub const STEPS: usize = 4;
pub const LR: f64 = 1e-2;

/// Trains a sharded `N` on one rank.
pub fn train<N: Net>(
    ranks: &Ranks,
    config: &ZeroConfig,
    optimizer: &impl OptimizerConfig,
) -> Result<(Told, Zero), Error> {
    train_on::<N>(device(), ranks, config, optimizer)
}

pub fn train_on<N: Net>(
    device: Device,
    ranks: &Ranks,
    config: &ZeroConfig,
    optimizer: &impl OptimizerConfig,
) -> Result<(Told, Zero), Error> {
    let (mut net, zero) = shard(N::build(&device), ranks, config)?;
    let mut optimizer = zero.optimizer(optimizer)?;
    let mut told = Told::default();
    for step in 0..STEPS {
        let (loss, grads) = zero.backward(|| net.loss(seed(step, ranks.comm().rank()), &device))?;
        told.losses.push(value(loss));
        told.norms.push(grads.norm()?);
        net = optimizer.step(LR, net, grads)?;
    }
    told.weights = weights(&net);
    Ok((told, zero))
}

pub fn options() -> ThreadOptions {
    ThreadOptions { deadline: Duration::from_secs(60) }
}

/// Trains `N` on ranks that are threads.
pub fn train_threads<N: Net>(
    world: usize,
    config: &ZeroConfig,
    optimizer: &(impl OptimizerConfig + Sync),
) -> Vec<Told> {
    run_threads(world, &options(), |ranks| train::<N>(ranks, config, optimizer).map(|(told, _)| told)).unwrap()
}

/// Trains a plain module on the mean of the losses of `world` ranks. Returns the results that each rank should have.
pub fn train_plain<N: Net>(world: usize, mut optimizer: ModuleOptimizer) -> Vec<Told> {
    let device = device();
    let mut net = N::build(&device);
    let mut told = vec![Told::default(); world];
    for step in 0..STEPS {
        let losses: Vec<Tensor<1>> = (0..world).map(|rank| net.loss(seed(step, rank), &device)).collect();
        for (told, loss) in told.iter_mut().zip(&losses) {
            told.losses.push(value(loss.clone()));
        }
        let mean = losses.into_iter().reduce(|a, b| a + b).unwrap() / world as f32;
        let grads = GradientsParams::from_grads(mean.backward(), &net);
        let norm = norm(&net, &grads);
        told.iter_mut().for_each(|told| told.norms.push(norm));
        net = optimizer.step(LR, net, grads);
    }
    let weights = weights(&net);
    told.iter_mut().for_each(|told| told.weights = weights.clone());
    told
}

struct Norm<'a>(&'a GradientsParams, f64);

impl ModuleVisitor for Norm<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.0.get::<D>(param.id) {
            self.1 += grad.into_data().iter::<f64>().map(|x| x * x).sum::<f64>();
        }
    }
}

fn norm<M: Module>(module: &M, grads: &GradientsParams) -> f64 {
    let mut norm = Norm(grads, 0.0);
    module.visit(&mut norm);
    norm.1.sqrt()
}

/// Returns the largest difference between two runs, relative for values above 1.
pub fn apart(a: &Told, b: &Told) -> f64 {
    let close = |a: f64, b: f64| (a - b).abs() / b.abs().max(1.0);
    assert_eq!(a.weights.keys().collect::<Vec<_>>(), b.weights.keys().collect::<Vec<_>>());
    let weights = a.weights.values().flatten().zip(b.weights.values().flatten());
    let floats = a.losses.iter().zip(&b.losses).chain(weights).map(|(&a, &b)| close(a.into(), b.into()));
    floats.chain(a.norms.iter().zip(&b.norms).map(|(&a, &b)| close(a, b))).fold(0.0, f64::max)
}
