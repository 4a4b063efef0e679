//! Llama and its variants on Burn 0.22: Llama, Mistral, Qwen2 and 3, Gemma, Gemma 3 and Phi-3. Parameters have the paths, shapes and values
//! of `zero_models::Llama`, so either model reads the other's checkpoints and Hugging Face's. Gemma 2 is not supported.
//!
//! The model does not depend on ranks. Shape suffixes: `b` batch, `t` positions, `d` width, `v` vocabulary, `n` = `b * t` rows, `e` width of
//! a head, `f` inner width.

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, s};
use burn_nn::{Linear, LinearConfig};
use zero_kernels::options::{AttentionOptions, Gelu};
use zero_models::llama::rotary_angles;
use zero_models::{LlamaConfig, ModelError};

use super::build::check;
use super::layers::{dense, dense_onto, next_token_loss};
use crate::activations::checkpoint_block;
use crate::fused::{Angles, attention, gelu, rms_norm, rotary, swiglu};
use crate::layers::embedding;
use crate::random::draw_dropout;

/// Llama or a variant with its language-model head.
#[derive(Module, Debug)]
pub struct Llama {
    embed_tokens: Param<Tensor<2>>,
    layers: Vec<Layer>,
    norm: Param<Tensor<1>>,
    lm_head: Option<Param<Tensor<2>>>,
    #[module(skip)]
    frequencies: Frequencies,
    #[module(skip)]
    form: Form,
    embedding_scale: f64,
}

/// RoPE frequencies.
#[derive(Debug, Clone)]
struct Frequencies {
    all: Vec<f32>,
    /// Frequencies of layers with a window, if they differ.
    local: Option<Vec<f32>>,
    /// The length above which sequences have other frequencies, and these.
    long: Option<(usize, Vec<f32>)>,
    factor: f64,
}

/// The form of all norms, and whether the gate is a GELU.
#[derive(Debug, Clone, Copy)]
struct Form {
    epsilon: f64,
    /// Offset of the weights of norms.
    offset: f64,
    is_gelu: bool,
}

#[derive(Module, Debug)]
struct Layer {
    input_layernorm: Param<Tensor<1>>,
    self_attn: Attention,
    post_attention_layernorm: Param<Tensor<1>>,
    pre_feedforward_layernorm: Option<Param<Tensor<1>>>,
    post_feedforward_layernorm: Option<Param<Tensor<1>>>,
    mlp: Mlp,
    /// True if the layer uses the frequencies of layers with a window.
    is_local: bool,
    #[module(skip)]
    form: Form,
    resid_pdrop: f64,
}

#[derive(Module, Debug)]
struct Attention {
    qkv_proj: Option<Linear>,
    q_proj: Option<Linear>,
    k_proj: Option<Linear>,
    v_proj: Option<Linear>,
    o_proj: Linear,
    q_norm: Option<Param<Tensor<1>>>,
    k_norm: Option<Param<Tensor<1>>>,
    heads: usize,
    head_width: usize,
    window: Option<usize>,
    scale: f64,
    dropout: f64,
}

#[derive(Module, Debug)]
struct Mlp {
    gate_up_proj: Option<Linear>,
    gate_proj: Option<Linear>,
    up_proj: Option<Linear>,
    down_proj: Linear,
}

impl Llama {
    /// Builds a model of this configuration with placeholder values.
    ///
    /// # Errors
    ///
    /// For a configuration with features that this model lacks.
    pub fn new(config: &LlamaConfig, device: &Device) -> Result<Self, ModelError> {
        let is_uncapped = |cap: Option<f64>| cap.is_none() || !config.has_four_norms();
        let has = [
            ("attn_logit_softcapping", is_uncapped(config.attn_logit_softcapping), "null"),
            ("final_logit_softcapping", is_uncapped(config.final_logit_softcapping), "null"),
        ];
        check("Llama on Burn 0.22", &has)?;
        let (d, f) = (config.hidden_size, config.intermediate_size);
        let (q, k) = (config.query_width(), config.key_width());
        let linear = |biased, from, to| LinearConfig::new(from, to).with_bias(biased).init(device);
        let fused = |to| config.is_fused().then(|| linear(false, d, to));
        let alone = |biased, to| (!config.is_fused()).then(|| linear(biased, d, to));
        let norm = |width| Param::from_tensor(Tensor::<1>::zeros([width], device));
        let table = || Param::from_tensor(Tensor::<2>::zeros([config.vocab_size, d], device));
        let form = Form {
            epsilon: config.rms_norm_eps,
            offset: if config.is_gemma() { 1.0 } else { 0.0 },
            is_gelu: config.is_gemma(),
        };
        let layer = |number| Layer {
            input_layernorm: norm(d),
            self_attn: Attention {
                qkv_proj: fused(q + 2 * k),
                q_proj: alone(config.has_qkv_biases(), q),
                k_proj: alone(config.has_qkv_biases(), k),
                v_proj: alone(config.has_qkv_biases(), k),
                o_proj: linear(config.has_output_bias(), q, d),
                q_norm: config.has_head_norms().then(|| norm(config.head_width())),
                k_norm: config.has_head_norms().then(|| norm(config.head_width())),
                heads: config.num_attention_heads,
                head_width: config.head_width(),
                window: config.window(number),
                scale: config.attention_scale(),
                dropout: config.attention_dropout,
            },
            post_attention_layernorm: norm(d),
            pre_feedforward_layernorm: config.has_four_norms().then(|| norm(d)),
            post_feedforward_layernorm: config.has_four_norms().then(|| norm(d)),
            mlp: Mlp {
                gate_up_proj: fused(2 * f),
                gate_proj: alone(false, f),
                up_proj: alone(false, f),
                down_proj: linear(false, f, d),
            },
            is_local: config.local_rope_frequencies().is_some() && config.window(number).is_some(),
            form,
            resid_pdrop: if config.is_fused() { config.resid_pdrop } else { 0.0 },
        };
        Ok(Self {
            embed_tokens: table(),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            norm: norm(d),
            lm_head: (!config.tie_word_embeddings).then(table),
            frequencies: Frequencies {
                all: config.rope_frequencies(),
                local: config.local_rope_frequencies(),
                long: config.long_rope_frequencies(),
                factor: config.rope_factor(),
            },
            form,
            embedding_scale: if config.is_gemma() { f64::from((d as f32).sqrt()) } else { 1.0 },
        })
    }

    /// Returns the mean cross-entropy in nats of predicting each label `[b, t]` from the tokens before it in its row.
    pub fn loss(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
        let x_nd = self.hidden_rows(ids_bt);
        next_token_loss(x_nd, self.lm_head.as_ref().unwrap_or(&self.embed_tokens), labels_bt)
    }

    fn hidden_rows(&self, ids_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let x_btd = embedding(&self.embed_tokens, ids_bt);
        let [_, _, d] = x_btd.dims();
        let x_nd = x_btd.reshape([b * t, d]);
        let mut x_nd = if self.embedding_scale == 1.0 { x_nd } else { x_nd * self.embedding_scale };
        let angles = self.frequencies.angles(t);
        for layer in &self.layers {
            let (layer, angles) = (layer.clone(), angles[usize::from(layer.is_local)].clone());
            x_nd = checkpoint_block(move |x_nd| layer.forward(x_nd, &angles, b), x_nd);
        }
        self.form.norm(&self.norm, x_nd)
    }
}

impl Frequencies {
    /// Returns the angles of sequences of `t` positions, and those of layers with a window.
    fn angles(&self, t: usize) -> [Angles; 2] {
        let of = |frequencies: &[f32], factor| {
            let [cos, sin] = rotary_angles(&[frequencies], factor, 0..t as i32);
            Angles::new(cos, sin, frequencies.len())
        };
        let all = match &self.long {
            Some((longest, long)) if t > *longest => of(long, self.factor),
            _ => of(&self.all, self.factor),
        };
        let local = self.local.as_ref().map_or_else(|| all.clone(), |local| of(local, 1.0));
        [all, local]
    }
}

impl Form {
    /// Divides rows by their root mean square and multiplies them by the weight.
    fn norm(&self, weight: &Param<Tensor<1>>, x_nd: Tensor<2>) -> Tensor<2> {
        let gamma_d = weight.val();
        rms_norm(x_nd, if self.offset == 0.0 { gamma_d } else { gamma_d + self.offset }, self.epsilon)
    }
}

impl Layer {
    fn forward(&self, x_nd: Tensor<2>, angles: &Angles, batch: usize) -> Tensor<2> {
        let (behind, before) = match &self.pre_feedforward_layernorm {
            Some(before) => (Some(&self.post_attention_layernorm), before),
            None => (None, &self.post_attention_layernorm),
        };
        let mixed = self.self_attn.mix(self.form.norm(&self.input_layernorm, x_nd.clone()), angles, batch, self.form);
        let x_nd = self.add(&self.self_attn.o_proj, behind, mixed, x_nd);
        let [gate_nf, up_nf] = self.mlp.parts(self.form.norm(before, x_nd.clone()));
        let wide_nf = match self.form.is_gelu {
            true => gelu(Gelu::Tanh, gate_nf, None) * up_nf,
            false => swiglu(gate_nf, up_nf),
        };
        self.add(&self.mlp.down_proj, self.post_feedforward_layernorm.as_ref(), wide_nf, x_nd)
    }

    /// Applies a linear layer, and adds its output to `x_nd`; if there is a norm, it normalizes the output first.
    fn add(&self, layer: &Linear, norm: Option<&Param<Tensor<1>>>, x: Tensor<2>, x_nd: Tensor<2>) -> Tensor<2> {
        match norm {
            Some(weight) => x_nd + self.form.norm(weight, dense(layer, x, None)),
            None => dense_onto(layer, x, self.resid_pdrop, x_nd),
        }
    }
}

impl Attention {
    fn mix(&self, x_nd: Tensor<2>, angles: &Angles, batch: usize, form: Form) -> Tensor<2> {
        let [q, k, v] = self.parts(x_nd);
        let by_head = |weight: &Option<Param<Tensor<1>>>, x: Tensor<2>| match weight {
            Some(weight) => {
                let [n, width] = x.dims();
                form.norm(weight, x.reshape([n * width / self.head_width, self.head_width])).reshape([n, width])
            }
            None => x,
        };
        let (q, k) = (self.turn(by_head(&self.q_norm, q), angles), self.turn(by_head(&self.k_norm, k), angles));
        let dropout = draw_dropout(self.dropout, &q.device());
        let Self { heads, window, scale, .. } = *self;
        attention(q, k, v, None, AttentionOptions { batch, heads, causal: true, window, scale, dropout })
    }

    /// Computes queries, keys and values.
    fn parts(&self, x_nd: Tensor<2>) -> [Tensor<2>; 3] {
        match (&self.qkv_proj, &self.q_proj, &self.k_proj, &self.v_proj) {
            (Some(all), ..) => {
                let all = dense(all, x_nd, None);
                let (queries, width) = (self.heads * self.head_width, all.dims()[1]);
                let values = (queries + width) / 2;
                [0..queries, queries..values, values..width].map(|part| all.clone().slice(s![.., part]))
            }
            (None, Some(q), Some(k), Some(v)) => [q, k, v].map(|layer| dense(layer, x_nd.clone(), None)),
            _ => unreachable!("attention has one linear layer for all three or three"),
        }
    }

    /// Rotates heads; only the first elements of each if there are angles for fewer.
    fn turn(&self, x: Tensor<2>, angles: &Angles) -> Tensor<2> {
        let ([n, d], width, turned) = (x.dims(), self.head_width, 2 * angles.pairs());
        if turned == width {
            return rotary(x, angles);
        }
        let heads = d / width;
        let x_nhe = x.reshape([n, heads, width]);
        let first = rotary(x_nhe.clone().slice(s![.., .., 0..turned]).reshape([n, heads * turned]), angles);
        let rest = x_nhe.slice(s![.., .., turned..]);
        Tensor::cat(vec![first.reshape([n, heads, turned]), rest], 2).reshape([n, d])
    }
}

impl Mlp {
    /// Computes the gate and the up projection.
    fn parts(&self, x_nd: Tensor<2>) -> [Tensor<2>; 2] {
        match (&self.gate_up_proj, &self.gate_proj, &self.up_proj) {
            (Some(both), ..) => dense(both, x_nd, None).chunk(2, 1).try_into().expect("two halves"),
            (None, Some(gate), Some(up)) => [dense(gate, x_nd.clone(), None), dense(up, x_nd, None)],
            _ => unreachable!("a feed-forward layer has one linear layer for both or two"),
        }
    }
}
