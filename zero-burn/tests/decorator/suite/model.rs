//! An awkward model: a tied head, a module used twice, a frozen one, an unused one, parameters that are empty or smaller than the world
//! size, and int and bool parameters.

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Int, Tensor, TensorData, activation, backend::Backend};

pub const VOCAB: usize = 17;
pub const WIDTH: usize = 10;

#[derive(Module, Debug)]
pub struct Awkward<B: Backend> {
    pub embedding: Embedding<B>,
    pub twice: Linear<B>,
    pub norm: LayerNorm<B>,
    pub frozen: Linear<B>,
    pub unused: Linear<B>,
    pub optional: Linear<B>,
    pub scale: Param<Tensor<B, 1>>,
    pub nothing: Param<Tensor<B, 2>>,
    pub order: Param<Tensor<B, 1, Int>>,
    pub keep: Param<Tensor<B, 1, Bool>>,
}

impl<B: Backend> Awkward<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            twice: LinearConfig::new(WIDTH, WIDTH).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            frozen: LinearConfig::new(WIDTH, WIDTH).init(device).no_grad(),
            unused: LinearConfig::new(WIDTH, 3).init(device),
            optional: LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device),
            scale: Param::from_data(TensorData::from([1.5f32]), device),
            nothing: Param::from_tensor(Tensor::zeros([0, 3], device)),
            order: Param::initialized(Default::default(), Tensor::arange(0..WIDTH as i64, device)),
            keep: Param::initialized(Default::default(), Tensor::from_data([true; WIDTH], device)),
        }
    }

    /// Returns the mean next-token loss of `tokens` `[B, T]`; `optional` says whether that layer is used.
    pub fn loss(&self, tokens: Tensor<B, 2, Int>, optional: bool) -> Tensor<B, 1> {
        let [b, t] = tokens.dims();
        let mut x = self.embedding.forward(tokens.clone());
        x = x.clone() + activation::gelu(self.twice.forward(self.norm.forward(x)));
        x = x.clone() + self.twice.forward(x) * self.scale.val().unsqueeze::<3>();
        x = x.clone() + self.frozen.forward(x);
        if optional {
            x = x.clone() + activation::relu(self.optional.forward(x));
        }
        x = x.select(2, self.order.val());
        x = x.mask_fill(self.keep.val().bool_not().unsqueeze::<3>().expand([b, t, WIDTH]), 0.0);
        let head = self.embedding.weight.val().transpose();
        let logits = x.slice([0..b, 0..t - 1]).reshape([b * (t - 1), WIDTH]).matmul(head);
        let targets = tokens.slice([0..b, 1..t]).reshape([b * (t - 1), 1]);
        -activation::log_softmax(logits, 1).gather(1, targets).mean()
    }
}

/// Two parameters.
#[derive(Module, Debug)]
pub struct Two<B: Backend> {
    pub a: Param<Tensor<B, 1>>,
    pub b: Param<Tensor<B, 1>>,
}

impl<B: Backend> Two<B> {
    /// 1, 2, 3, 4, 5 and their halves.
    pub fn new(device: &B::Device) -> Self {
        let parameter =
            |scale: f32| Param::from_data(TensorData::from([1.0, 2.0, 3.0, 4.0, 5.0].map(|x| x * scale)), device);
        Self { a: parameter(1.0), b: parameter(0.5) }
    }
}

/// Returns the tokens of global row `row`, which are always the same.
pub fn tokens<B: Backend>(rows: std::ops::Range<usize>, device: &B::Device) -> Tensor<B, 2, Int> {
    let (len, t) = (rows.len(), 6);
    let data: Vec<i32> = rows.flat_map(|row| (0..t).map(move |i| ((row * 5 + i * i * 3 + 1) % VOCAB) as i32)).collect();
    Tensor::from_data(TensorData::new(data, [len, t]), device)
}
