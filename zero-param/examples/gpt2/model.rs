//! GPT-2 on Burn 0.22, with the parameters of `zero_models::Gpt2`: the same paths, shapes and values, so that either reads the other's
//! checkpoints, and Hugging Face's.
//!
//! Nothing here knows of ranks. Shape suffixes: `b` batch, `t` positions, `d` width, `v` vocabulary, `n` = `b * t` rows.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::{gelu_approximate, log_softmax, softmax};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use safetensors::SafeTensors;
use serde::Deserialize;
use zero_param::{embedding, tied_head};

/// What `config.json` says.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    pub vocab_size: usize,
    pub n_positions: usize,
    pub n_embd: usize,
    pub n_layer: usize,
    pub n_head: usize,
    pub layer_norm_epsilon: f64,
}

/// A GPT-2 whose head is its token embedding.
#[derive(Module, Debug)]
pub struct Gpt2 {
    wte: Param<Tensor<2>>,
    wpe: Param<Tensor<2>>,
    h: Vec<Block>,
    ln_f: LayerNorm,
}

#[derive(Module, Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
}

#[derive(Module, Debug)]
struct Attention {
    c_attn: Linear,
    c_proj: Linear,
    heads: usize,
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
            attn: Attention { c_attn: linear(d, 3 * d), c_proj: linear(d, d), heads: self.n_head },
            ln_2: norm(),
            mlp: Mlp { c_fc: linear(d, 4 * d), c_proj: linear(4 * d, d) },
        };
        Gpt2 {
            wte: table(self.vocab_size),
            wpe: table(self.n_positions),
            h: (0..self.n_layer).map(block).collect(),
            ln_f: norm(),
        }
    }

    /// The model in a folder of Hugging Face's. A program's own error handling goes where this panics.
    pub fn load(folder: &Path, device: &Device) -> Gpt2 {
        let config: Config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let floats = |data: &[u8]| data.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        let tensors = file.iter().map(|(name, view)| (name.to_string(), floats(view.data()))).collect();
        config.init(device).map(&mut Fill { path: Vec::new(), tensors })
    }
}

/// Gives each parameter the values that Hugging Face has under its name.
struct Fill {
    path: Vec<String>,
    tensors: BTreeMap<String, Vec<f32>>,
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".").replace("gamma", "weight").replace("beta", "bias");
        let is_table = path == "wte" || path == "wpe";
        let name = format!("transformer.{path}{}", if is_table { ".weight" } else { "" });
        let values = self.tensors.remove(&name).unwrap_or_else(|| panic!("{name} is not in the file"));
        let (id, tensor, mapper) = param.consume();
        let loaded = Tensor::from_data(TensorData::new(values, tensor.shape()), &tensor.device());
        Param::from_mapped_value(id, loaded.set_require_grad(tensor.is_require_grad()), mapper)
    }
}

impl Gpt2 {
    /// The mean cross-entropy in nats of predicting each token of `ids` `[b, t]` from those before it in its row.
    pub fn loss(&self, ids_bt: Tensor<2, Int>) -> Tensor<1> {
        let [b, t] = ids_bt.dims();
        let device = ids_bt.device();
        let places_1t = Tensor::<1, Int>::arange(0..t as i64, &device).reshape([1, t]);
        let mut x_btd = embedding(&self.wte, ids_bt.clone()) + embedding(&self.wpe, places_1t);
        for block in &self.h {
            x_btd = block.forward(x_btd);
        }
        let logits_btv = tied_head(self.ln_f.forward(x_btd), &self.wte);
        let [_, _, v] = logits_btv.dims();
        let predicted_nv = logits_btv.slice([0..b, 0..t - 1]).reshape([b * (t - 1), v]);
        let next_n1 = ids_bt.slice([0..b, 1..t]).reshape([b * (t - 1), 1]);
        log_softmax(predicted_nv, 1).gather(1, next_n1).mean().neg()
    }
}

impl Block {
    fn forward(&self, x_btd: Tensor<3>) -> Tensor<3> {
        let x_btd = x_btd.clone() + self.attn.forward(self.ln_1.forward(x_btd));
        let wide = gelu_approximate(self.mlp.c_fc.forward(self.ln_2.forward(x_btd.clone())));
        x_btd + self.mlp.c_proj.forward(wide)
    }
}

impl Attention {
    fn forward(&self, x_btd: Tensor<3>) -> Tensor<3> {
        let [b, t, d] = x_btd.dims();
        let width = d / self.heads;
        let by_head = |part: Tensor<3>| part.reshape([b, t, self.heads, width]).swap_dims(1, 2);
        let [q, k, v] =
            <[_; 3]>::try_from(self.c_attn.forward(x_btd.clone()).chunk(3, 2)).expect("three thirds").map(by_head);
        let mask: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { f32::NEG_INFINITY } else { 0.0 }).collect();
        let mask = Tensor::<4>::from_data(TensorData::new(mask, [1, 1, t, t]), &x_btd.device());
        let scores = q.matmul(k.transpose()) / (width as f32).sqrt() + mask;
        let mixed = softmax(scores, 3).matmul(v).swap_dims(1, 2).reshape([b, t, d]);
        self.c_proj.forward(mixed)
    }
}
