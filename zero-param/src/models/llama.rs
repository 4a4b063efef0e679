//! Llama and its variants on Burn 0.22: Llama, Mistral, Qwen2 and 3, Gemma 1 to 3 and Phi-3. Parameters have the paths, shapes and values
//! of `zero_models::Llama`, so either model reads the other's checkpoints and Hugging Face's.
//!
//! The model does not depend on ranks. Shape suffixes: `b` batch, `t` positions, `d` width, `v` vocabulary, `n` = `b * t` rows, `e` width of
//! a head, `f` inner width.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, s};
use burn_nn::{Linear, LinearConfig};
use zero_kernels::options::{AttentionOptions, Gelu};
use zero_models::llama::rotary_angles;
use zero_models::{Documents, LlamaConfig};

use super::cache::KvCache;
use super::layers::{Masks, attend, dense, dense_onto, next_logits, next_token_loss};
use crate::activations::checkpoint_block;
use crate::fused::plain::capped;
use crate::fused::{Angles, gelu, rms_norm, rotary, swiglu};
use crate::layers::embedding;

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
    /// Soft cap of the logits.
    #[module(skip)]
    logit_cap: Option<f64>,
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
    /// Soft cap of the scores.
    #[module(skip)]
    cap: Option<f64>,
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
    pub fn new(config: &LlamaConfig, device: &Device) -> Self {
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
                cap: config.attn_logit_softcapping.filter(|_| config.has_four_norms()),
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
        Self {
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
            logit_cap: config.final_logit_softcapping.filter(|_| config.has_four_norms()),
        }
    }

    /// Returns the mean cross-entropy in nats of predicting each label `[b, t]` from the tokens before it in its row, or in its document if
    /// rows are packed.
    pub fn loss(
        &self,
        ids_bt: Tensor<2, Int>,
        labels_bt: Tensor<2, Int>,
        documents: Option<&Arc<Documents>>,
    ) -> Tensor<1> {
        next_token_loss(self.hidden_rows(ids_bt, documents), self.head(), self.logit_cap, labels_bt, false)
    }

    /// Returns the mean loss of each row, `[b]`, like [`loss`](Self::loss) of that row alone.
    pub fn row_losses(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(self.hidden_rows(ids_bt, None), self.head(), self.logit_cap, labels_bt, true)
    }

    fn head(&self) -> &Param<Tensor<2>> {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }

    /// Returns the logits `[b, v]` of the token that follows each row, after reading its next tokens `[b, t]`.
    pub fn next_logits(&self, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        let ids_bt = match &self.frequencies.long {
            Some((longest, _)) => cache.with_earlier(ids_bt, *longest),
            None => ids_bt,
        };
        let [b, t] = ids_bt.dims();
        let mut x_nd = self.embedded(ids_bt);
        let reached: Vec<usize> = cache.rows.reached(t).collect();
        let angles = self.frequencies.angles(|| cache.rows.numbers(t), &reached);
        for (number, layer) in self.layers.iter().enumerate() {
            let angles = &angles[usize::from(layer.is_local)];
            x_nd = layer.forward(x_nd, angles, |attn, parts| cache.attend(number, parts, attn.options(b), None));
        }
        let x_bd = self.form.norm(&self.norm, cache.end(x_nd, b));
        capped(next_logits(x_bd, self.head()), self.logit_cap)
    }

    fn hidden_rows(&self, ids_bt: Tensor<2, Int>, documents: Option<&Arc<Documents>>) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let mut x_nd = self.embedded(ids_bt);
        let angles = match documents {
            None => self.frequencies.angles(|| 0..t as i32, &[t]),
            Some(documents) => self.frequencies.angles(|| documents.positions(), &[documents.longest()]),
        };
        let masks = Masks { documents: documents.cloned(), ..Masks::default() };
        for layer in &self.layers {
            let (layer, angles, masks) = (layer.clone(), angles[usize::from(layer.is_local)].clone(), masks.clone());
            let forward = move |x_nd| {
                layer.forward(x_nd, &angles, |attn, parts| attend(parts, &masks, attn.options(b), attn.dropout))
            };
            x_nd = checkpoint_block(forward, x_nd);
        }
        self.form.norm(&self.norm, x_nd)
    }

    /// Looks up the rows `[n, d]` of tokens.
    fn embedded(&self, ids_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let x_btd = embedding(&self.embed_tokens, ids_bt);
        let [_, _, d] = x_btd.dims();
        let x_nd = x_btd.reshape([b * t, d]);
        if self.embedding_scale == 1.0 { x_nd } else { x_nd * self.embedding_scale }
    }
}

impl Frequencies {
    /// Returns the angles of these positions in texts of these lengths, and those of layers with a window. Texts of equal length may be
    /// given once.
    fn angles<I: Iterator<Item = i32>>(&self, positions: impl Fn() -> I, lengths: &[usize]) -> [Angles; 2] {
        let of = |frequencies: &[&[f32]], factor| {
            let [cos, sin] = rotary_angles(frequencies, factor, positions());
            Angles::new(cos, sin, frequencies[0].len())
        };
        let frequencies = lengths.iter().map(|length| match &self.long {
            Some((longest, long)) if length > longest => &**long,
            _ => &*self.all,
        });
        let all = of(&frequencies.collect::<Vec<_>>(), self.factor);
        let local = self.local.as_ref().map_or_else(|| all.clone(), |local| of(&[local], 1.0));
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
    /// Adds attention, which `mix` computes from queries, keys and values, and the feed-forward layer to rows `[n, d]`.
    fn forward(
        &self,
        x_nd: Tensor<2>,
        angles: &Angles,
        mix: impl FnOnce(&Attention, [Tensor<2>; 3]) -> Tensor<2>,
    ) -> Tensor<2> {
        let (behind, before) = match &self.pre_feedforward_layernorm {
            Some(before) => (Some(&self.post_attention_layernorm), before),
            None => (None, &self.post_attention_layernorm),
        };
        let attn = &self.self_attn;
        let parts = attn.rotated(self.form.norm(&self.input_layernorm, x_nd.clone()), angles, self.form);
        let mixed = mix(attn, parts);
        let x_nd = self.add(&attn.o_proj, behind, mixed, x_nd);
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
    /// Computes queries, keys and values, and rotates queries and keys.
    fn rotated(&self, x_nd: Tensor<2>, angles: &Angles, form: Form) -> [Tensor<2>; 3] {
        let [q, k, v] = self.parts(x_nd);
        let by_head = |weight: &Option<Param<Tensor<1>>>, x: Tensor<2>| match weight {
            Some(weight) => {
                let [n, width] = x.dims();
                form.norm(weight, x.reshape([n * width / self.head_width, self.head_width])).reshape([n, width])
            }
            None => x,
        };
        [self.turn(by_head(&self.q_norm, q), angles), self.turn(by_head(&self.k_norm, k), angles), v]
    }

    fn options(&self, batch: usize) -> AttentionOptions {
        let Self { heads, window, scale, cap, .. } = *self;
        AttentionOptions { batch, heads, causal: true, window, scale, cap, dropout: None }
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
