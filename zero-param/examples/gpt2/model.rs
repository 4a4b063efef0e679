//! GPT-2 on Burn 0.22, with the parameters of `zero_models::Gpt2`: the same paths, shapes and values, so that either reads the other's
//! checkpoints, and Hugging Face's.
//!
//! Nothing here knows of ranks. Shape suffixes: `b` batch, `t` positions, `d` width, `v` vocabulary, `n` = `b * t` rows,
//! `f` inner width.

use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use serde::Deserialize;
use zero_param::{
    AttentionOptions, Gelu, draw_dropout, dropout, embedding, gelu, linear, linear_cross_entropy, packed_attention,
};

use crate::shared::{self, dense, norm};

/// What `config.json` says.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    pub vocab_size: usize,
    pub n_positions: usize,
    pub n_embd: usize,
    pub n_layer: usize,
    pub n_head: usize,
    pub layer_norm_epsilon: f64,
    #[serde(default = "published_dropout")]
    pub embd_pdrop: f64,
    #[serde(default = "published_dropout")]
    pub resid_pdrop: f64,
    #[serde(default = "published_dropout")]
    pub attn_pdrop: f64,
}

fn published_dropout() -> f64 {
    0.1
}

/// A GPT-2 whose head is its token embedding.
#[derive(Module, Debug)]
pub struct Gpt2 {
    wte: Param<Tensor<2>>,
    wpe: Param<Tensor<2>>,
    h: Vec<Block>,
    ln_f: LayerNorm,
    /// Burn's norms keep theirs to themselves.
    epsilon: f64,
    embd_pdrop: f64,
}

#[derive(Module, Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
    epsilon: f64,
    resid_pdrop: f64,
}

#[derive(Module, Debug)]
struct Attention {
    c_attn: Linear,
    c_proj: Linear,
    heads: usize,
    attn_pdrop: f64,
}

#[derive(Module, Debug)]
struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
}

impl Config {
    pub fn init(&self, device: &Device) -> Gpt2 {
        let d = self.n_embd;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(d).with_epsilon(self.layer_norm_epsilon).init(device);
        let table = |rows| Param::from_tensor(Tensor::zeros([rows, d], device));
        let block = |_| Block {
            ln_1: norm(),
            attn: Attention {
                c_attn: linear(d, 3 * d),
                c_proj: linear(d, d),
                heads: self.n_head,
                attn_pdrop: self.attn_pdrop,
            },
            ln_2: norm(),
            mlp: Mlp { c_fc: linear(d, 4 * d), c_proj: linear(4 * d, d) },
            epsilon: self.layer_norm_epsilon,
            resid_pdrop: self.resid_pdrop,
        };
        Gpt2 {
            wte: table(self.vocab_size),
            wpe: table(self.n_positions),
            h: (0..self.n_layer).map(block).collect(),
            ln_f: norm(),
            epsilon: self.layer_norm_epsilon,
            embd_pdrop: self.embd_pdrop,
        }
    }

    /// The model in a folder of Hugging Face's, with another `dropout` than it has there if one is given.
    pub fn load(folder: &Path, dropout: Option<f64>, device: &Device) -> Gpt2 {
        let mut config: Config = shared::config(folder);
        for probability in [&mut config.embd_pdrop, &mut config.resid_pdrop, &mut config.attn_pdrop] {
            *probability = dropout.unwrap_or(*probability);
        }
        shared::load(config.init(device), folder, |path| {
            let is_table = path == "wte" || path == "wpe";
            (format!("transformer.{path}{}", if is_table { ".weight" } else { "" }), false)
        })
    }
}

impl Gpt2 {
    /// The mean cross-entropy in nats of predicting each token of `ids` `[b, t]` from those before it in its row.
    pub fn loss(&self, ids_bt: Tensor<2, Int>) -> Tensor<1> {
        let [b, t] = ids_bt.dims();
        let device = ids_bt.device();
        let places_1t = Tensor::<1, Int>::arange(0..t as i64, &device).reshape([1, t]);
        let x_btd = embedding(&self.wte, ids_bt.clone()) + embedding(&self.wpe, places_1t);
        let [_, _, d] = x_btd.dims();
        let mut x_nd = dropout(x_btd.reshape([b * t, d]), self.embd_pdrop);
        for block in &self.h {
            x_nd = block.forward(x_nd, b);
        }
        // The last position of a row predicts nothing: ignoring it costs less than copying all others.
        let nothing_b1 = Tensor::full([b, 1], IGNORED, &device);
        let next_n = Tensor::cat(vec![ids_bt.slice([0..b, 1..t]), nothing_b1], 1).reshape([b * t]);
        linear_cross_entropy(norm(&self.ln_f, self.epsilon, x_nd), self.wte.val(), next_n, Some(IGNORED))
    }
}

/// The label of a position that does not count.
const IGNORED: i64 = -100;

impl Block {
    fn forward(&self, x_nd: Tensor<2>, batch: usize) -> Tensor<2> {
        let mixed_nd = self.attn.mix(norm(&self.ln_1, self.epsilon, x_nd.clone()), batch);
        let x_nd = self.onto(&self.attn.c_proj, mixed_nd, x_nd);
        let Mlp { c_fc, c_proj } = &self.mlp;
        // The bias is added where the activation reads.
        let wide_nf = linear(norm(&self.ln_2, self.epsilon, x_nd.clone()), c_fc.weight.val(), None, None);
        self.onto(c_proj, gelu(Gelu::Tanh, wide_nf, c_fc.bias.as_ref().map(Param::val)), x_nd)
    }

    /// `layer` of rows, dropped out, added to `residual_nd`.
    fn onto(&self, layer: &Linear, x_nf: Tensor<2>, residual_nd: Tensor<2>) -> Tensor<2> {
        match self.resid_pdrop {
            0.0 => dense(layer, x_nf, Some(residual_nd)),
            probability => residual_nd + dropout(dense(layer, x_nf, None), probability),
        }
    }
}

impl Attention {
    fn mix(&self, x_nd: Tensor<2>, batch: usize) -> Tensor<2> {
        let [_, d] = x_nd.dims();
        let heads = self.heads;
        let scale = ((d / heads) as f64).sqrt().recip();
        let dropout = draw_dropout(self.attn_pdrop, &x_nd.device());
        let options = AttentionOptions { batch, heads, causal: true, window: None, scale, dropout };
        packed_attention(dense(&self.c_attn, x_nd, None), None, options)
    }
}
