//! The module of Llama and its variants: computes logits or a loss from token ids.
//!
//! Between embedding and head, activations are rows `[n, d]`, as in [`crate::gpt2`].
//!
//! Shape suffixes: `b` batch, `t` positions, `d` width of the model, `v` vocabulary, `n` = `b * t` rows, `f` inner width.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, s};
use zero_ops::{AttentionOptions, FusedBackend, checkpoint_block};

use super::rotary::Angles;
use crate::attention::{Masks, attend};
use crate::generate::{CausalLm, KvCache};
use crate::layers::{Ids, check_positions, dense, dense_onto, scaled};
use crate::linear::{Adaptable, Adapter, Linear, VisitEmbedding, rows};
use crate::loss::next_token_model;
use crate::{Activation, Documents, LlamaConfig, init};

/// Llama or a variant with its language-model head. Fields are named as in Hugging Face's `LlamaForCausalLM`.
#[derive(Module, Debug)]
pub struct Llama<B: Backend> {
    /// Token embedding `[vocab_size, hidden_size]`; also the head's weight if that is tied.
    pub embed_tokens: Param<Tensor<B, 2>>,
    /// LoRA adapter of the token embedding.
    pub embed_tokens_adapter: Option<Adapter<B>>,
    /// The layers.
    pub layers: Vec<LlamaLayer<B>>,
    /// Factors of the final norm `[hidden_size]`.
    pub norm: Param<Tensor<B, 1>>,
    /// Weight of the head `[vocab_size, hidden_size]`, if it is not tied.
    pub lm_head: Option<Param<Tensor<B, 2>>>,
    #[module(skip)]
    speeds: Vec<f32>,
    /// RoPE frequencies of layers with a window, if they differ.
    #[module(skip)]
    local_speeds: Option<Vec<f32>>,
    /// The length above which sequences have other RoPE frequencies, and these frequencies.
    #[module(skip)]
    long_speeds: Option<(usize, Vec<f32>)>,
    turn_factor: f64,
    /// Soft cap of the logits.
    logit_cap: Option<f64>,
    /// Offset of the weights of norms.
    norm_offset: f64,
    /// Scale of token embeddings.
    embedding_scale: f64,
    positions: usize,
    rms_norm_eps: f64,
}

/// One layer: attention and feed-forward layer, each applied to its normalized input and added to the input.
#[derive(Module, Debug)]
pub struct LlamaLayer<B: Backend> {
    /// Factors of the norm before attention `[hidden_size]`.
    pub input_layernorm: Param<Tensor<B, 1>>,
    /// Attention.
    pub self_attn: LlamaAttention<B>,
    /// Factors of the norm before the feed-forward layer `[hidden_size]`; in Gemma 2 and 3, of the norm after attention.
    pub post_attention_layernorm: Param<Tensor<B, 1>>,
    /// Factors of the norm before the feed-forward layer in Gemma 2 and 3 `[hidden_size]`.
    pub pre_feedforward_layernorm: Option<Param<Tensor<B, 1>>>,
    /// Factors of the norm after the feed-forward layer in Gemma 2 and 3 `[hidden_size]`.
    pub post_feedforward_layernorm: Option<Param<Tensor<B, 1>>>,
    /// The feed-forward layer.
    pub mlp: LlamaMlp<B>,
    /// True if the layer uses the RoPE frequencies of layers with a window.
    is_local: bool,
    norm_offset: f64,
    rms_norm_eps: f64,
    dropout: Dropout,
}

/// Causal self-attention; several query heads may share a key and value head.
#[derive(Module, Debug)]
pub struct LlamaAttention<B: Backend> {
    /// Query, key and value projection of Phi-3, side by side.
    pub qkv_proj: Option<Linear<B>>,
    /// Query projection.
    pub q_proj: Option<Linear<B>>,
    /// Key projection.
    pub k_proj: Option<Linear<B>>,
    /// Value projection.
    pub v_proj: Option<Linear<B>>,
    /// Output projection, from the heads back to the width of the model.
    pub o_proj: Linear<B>,
    /// Factors of the norm of each query head `[head_dim]`, in Qwen3 and Gemma 3.
    pub q_norm: Option<Param<Tensor<B, 1>>>,
    /// Factors of the norm of each key head `[head_dim]`, in Qwen3 and Gemma 3.
    pub k_norm: Option<Param<Tensor<B, 1>>>,
    heads: usize,
    head_width: usize,
    window: Option<usize>,
    scale: f64,
    /// Soft cap of the scores.
    cap: Option<f64>,
    dropout: Dropout,
}

/// The feed-forward layer, `down(silu(gate(x)) * up(x))`, or with a GELU instead of `silu`.
#[derive(Module, Debug)]
pub struct LlamaMlp<B: Backend> {
    /// Gate and up projection of Phi-3, side by side, `[hidden_size, 2 * intermediate_size]`.
    pub gate_up_proj: Option<Linear<B>>,
    /// Gate projection, `[hidden_size, intermediate_size]`.
    pub gate_proj: Option<Linear<B>>,
    /// Up projection, `[hidden_size, intermediate_size]`.
    pub up_proj: Option<Linear<B>>,
    /// Down projection, `[intermediate_size, hidden_size]`.
    pub down_proj: Linear<B>,
    is_gelu: bool,
}

impl LlamaConfig {
    /// Initializes a model as Hugging Face does: weights from a normal distribution with standard deviation `initializer_range`, biases
    /// zero, factors of norms one. A parameter is allocated on its first use.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) fails.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Llama<B> {
        self.validate().unwrap_or_else(|error| panic!("{error}"));
        let (v, d, std) = (self.vocab_size, self.hidden_size, self.initializer_range);
        Llama {
            embed_tokens: init::normal([v, d], std, device),
            embed_tokens_adapter: None,
            layers: (0..self.num_hidden_layers).map(|layer| self.init_layer(layer, device)).collect(),
            norm: self.fresh_norm(d, device),
            lm_head: (!self.tie_word_embeddings).then(|| init::normal([v, d], std, device)),
            speeds: self.rope_frequencies(),
            local_speeds: self.local_rope_frequencies(),
            long_speeds: self.long_rope_frequencies(),
            turn_factor: self.rope_factor(),
            logit_cap: self.final_logit_softcapping.filter(|_| self.has_four_norms()),
            norm_offset: if self.is_gemma() { 1.0 } else { 0.0 },
            embedding_scale: if self.is_gemma() { f64::from((d as f32).sqrt()) } else { 1.0 },
            positions: self.positions(),
            rms_norm_eps: self.rms_norm_eps,
        }
    }

    /// Returns the initial weights of a norm, with which it multiplies by one.
    fn fresh_norm<B: Backend>(&self, width: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
        if self.is_gemma() { init::zeros([width], device) } else { init::ones(width, device) }
    }

    fn init_layer<B: Backend>(&self, number: usize, device: &B::Device) -> LlamaLayer<B> {
        let (d, f, std) = (self.hidden_size, self.intermediate_size, self.initializer_range);
        let (q, k) = (self.query_width(), self.key_width());
        let layer = |biased: bool, d_in, d_out| {
            let init = if biased { init::linear } else { init::weight };
            init(d_in, d_out, std, device)
        };
        let fused = |d_out| self.is_fused().then(|| layer(false, d, d_out));
        let alone = |biased, d_out| (!self.is_fused()).then(|| layer(biased, d, d_out));
        LlamaLayer {
            input_layernorm: self.fresh_norm(d, device),
            self_attn: LlamaAttention {
                qkv_proj: fused(q + 2 * k),
                q_proj: alone(self.has_qkv_biases(), q),
                k_proj: alone(self.has_qkv_biases(), k),
                v_proj: alone(self.has_qkv_biases(), k),
                o_proj: layer(self.has_output_bias(), q, d),
                q_norm: self.has_head_norms().then(|| self.fresh_norm(self.head_width(), device)),
                k_norm: self.has_head_norms().then(|| self.fresh_norm(self.head_width(), device)),
                heads: self.num_attention_heads,
                head_width: self.head_width(),
                window: self.window(number),
                scale: self.attention_scale(),
                cap: self.attn_logit_softcapping.filter(|_| self.has_four_norms()),
                dropout: DropoutConfig::new(self.attention_dropout).init(),
            },
            post_attention_layernorm: self.fresh_norm(d, device),
            pre_feedforward_layernorm: self.has_four_norms().then(|| self.fresh_norm(d, device)),
            post_feedforward_layernorm: self.has_four_norms().then(|| self.fresh_norm(d, device)),
            mlp: LlamaMlp {
                gate_up_proj: fused(2 * f),
                gate_proj: alone(false, f),
                up_proj: alone(false, f),
                down_proj: layer(false, f, d),
                is_gelu: self.is_gemma(),
            },
            is_local: self.local_rope_frequencies().is_some() && self.window(number).is_some(),
            norm_offset: if self.is_gemma() { 1.0 } else { 0.0 },
            rms_norm_eps: self.rms_norm_eps,
            dropout: DropoutConfig::new(if self.is_fused() { self.resid_pdrop } else { 0.0 }).init(),
        }
    }
}

next_token_model!(Llama, embed_tokens, logit_cap);

impl<B: FusedBackend> Llama<B> {
    fn hidden_rows(&self, input_ids_bt: Ids<B>, documents: Option<&Documents>) -> Tensor<B, 2> {
        let [b, t] = input_ids_bt.dims();
        check_positions(t, self.positions, "max_position_embeddings");
        let mut x_nd = self.embedded(input_ids_bt);
        let angles = match documents {
            None => self.angles(|| 0..t as i32, &[t], &x_nd),
            Some(documents) => self.angles(|| documents.positions(), &[documents.longest()], &x_nd),
        };
        let masks = Masks::none().within(documents);
        for layer in &self.layers {
            let forward = |x_nd| {
                layer.forward(x_nd, &angles, |attn, parts| attend(parts, &masks, attn.options(b), &attn.dropout))
            };
            x_nd = checkpoint_block(forward, x_nd);
        }
        self.normed(x_nd)
    }

    /// Embeds token ids as rows `[n, d]`.
    fn embedded(&self, input_ids_bt: Ids<B>) -> Tensor<B, 2> {
        let [b, t] = input_ids_bt.dims();
        let x_nd = rows(&self.embed_tokens, &self.embed_tokens_adapter, input_ids_bt.reshape([b * t]));
        if self.embedding_scale == 1.0 { x_nd } else { x_nd * self.embedding_scale }
    }

    /// Returns the RoPE angles of rows at these positions, text after text, where texts have the lengths `in_all`. The second angles are
    /// those of layers with a window, and equal the first unless the frequencies differ.
    fn angles<I: Iterator<Item = i32>>(
        &self,
        positions: impl Fn() -> I,
        in_all: &[usize],
        like_nd: &Tensor<B, 2>,
    ) -> [Angles<B>; 2] {
        let speeds = in_all.iter().map(|in_all| match &self.long_speeds {
            Some((longest, long)) if in_all > longest => &**long,
            _ => &*self.speeds,
        });
        let all = Angles::new(&speeds.collect::<Vec<_>>(), self.turn_factor, positions(), like_nd);
        let local = self.local_speeds.as_ref();
        let local = local.map_or_else(|| all.clone(), |speeds| Angles::new(&[speeds], 1.0, positions(), like_nd));
        [all, local]
    }

    fn normed(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        scaled(&self.norm, self.norm_offset, self.rms_norm_eps, x_nd)
    }
}

impl<B: FusedBackend> LlamaLayer<B> {
    /// Adds attention, which `mix` computes from queries, keys and values, and the feed-forward layer to rows `[n, d]`. Uses the first
    /// angles, or the second for a layer with the frequencies of layers with a window.
    fn forward(
        &self,
        x_nd: Tensor<B, 2>,
        angles: &[Angles<B>; 2],
        mix: impl FnOnce(&LlamaAttention<B>, [Tensor<B, 2>; 3]) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let (attn, mlp, angles) = (&self.self_attn, &self.mlp, &angles[usize::from(self.is_local)]);
        let norm = |gamma: &Param<Tensor<B, 1>>, x_nd| scaled(gamma, self.norm_offset, self.rms_norm_eps, x_nd);
        // Adds a layer's output to its input; if there is a norm, it normalizes the output first.
        let add =
            |layer: &Linear<B>, gamma: Option<&Param<Tensor<B, 1>>>, x: Tensor<B, 2>, x_nd: Tensor<B, 2>| match gamma {
                Some(gamma) => x_nd + norm(gamma, dense(layer, x)),
                None => dense_onto(layer, x, &self.dropout, x_nd),
            };
        let normed_nd = norm(&self.input_layernorm, x_nd.clone());
        let [q, k, v] = attn.parts(normed_nd);
        let by_head = |gamma: &Option<Param<Tensor<B, 1>>>, x_nq: Tensor<B, 2>| match gamma {
            Some(gamma_e) => {
                let shape = x_nq.dims();
                norm(gamma_e, x_nq.reshape([-1, attn.head_width as i32])).reshape(shape)
            }
            None => x_nq,
        };
        let (q, k) = (by_head(&attn.q_norm, q), by_head(&attn.k_norm, k));
        let mixed = mix(attn, [angles.turn(q, attn.head_width), angles.turn(k, attn.head_width), v]);
        let (behind, before) = match &self.pre_feedforward_layernorm {
            Some(before) => (Some(&self.post_attention_layernorm), before),
            None => (None, &self.post_attention_layernorm),
        };
        let x_nd = add(&attn.o_proj, behind, mixed, x_nd);

        let normed_nd = norm(before, x_nd.clone());
        let [gate_nf, up_nf] = mlp.parts(normed_nd);
        let wide_nf = match mlp.is_gelu {
            true => Activation::GeluTanh.forward(gate_nf) * up_nf,
            false => zero_ops::swiglu(gate_nf, up_nf),
        };
        add(&mlp.down_proj, self.post_feedforward_layernorm.as_ref(), wide_nf, x_nd)
    }
}

impl<B: FusedBackend> LlamaMlp<B> {
    /// Computes the gate and the up projection of rows `[n, d]`.
    fn parts(&self, x_nd: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
        match (&self.gate_up_proj, &self.gate_proj, &self.up_proj) {
            (Some(both), ..) => dense(both, x_nd).chunk(2, 1).try_into().expect("two halves"),
            (None, Some(gate), Some(up)) => [dense(gate, x_nd.clone()), dense(up, x_nd)],
            _ => unreachable!("a feed-forward layer has one linear layer for both or two"),
        }
    }
}

impl<B: FusedBackend> LlamaAttention<B> {
    /// Computes queries, keys and values of rows `[n, d]`.
    fn parts(&self, x_nd: Tensor<B, 2>) -> [Tensor<B, 2>; 3] {
        match (&self.qkv_proj, &self.q_proj, &self.k_proj, &self.v_proj) {
            (Some(all), ..) => {
                let all = dense(all, x_nd);
                let (queries, width) = (self.heads * self.head_width, all.dims()[1]);
                let values = (queries + width) / 2;
                [0..queries, queries..values, values..width].map(|part| all.clone().slice(s![.., part]))
            }
            (None, Some(q), Some(k), Some(v)) => [q, k, v].map(|layer| dense(layer, x_nd.clone())),
            _ => unreachable!("attention has one linear layer for all three or three"),
        }
    }

    fn options(&self, b: usize) -> AttentionOptions {
        let Self { heads, window, scale, cap, .. } = *self;
        AttentionOptions { batch: b, heads, causal: true, window, scale, cap, dropout: None }
    }
}

impl<B: Backend> Adaptable<B> for Llama<B> {
    fn linears(&mut self, each: &mut dyn FnMut(String, &mut Linear<B>)) {
        for (i, LlamaLayer { self_attn: attn, mlp, .. }) in self.layers.iter_mut().enumerate() {
            for (name, layer) in [
                ("self_attn.qkv_proj", attn.qkv_proj.as_mut()),
                ("self_attn.q_proj", attn.q_proj.as_mut()),
                ("self_attn.k_proj", attn.k_proj.as_mut()),
                ("self_attn.v_proj", attn.v_proj.as_mut()),
                ("self_attn.o_proj", Some(&mut attn.o_proj)),
                ("mlp.gate_up_proj", mlp.gate_up_proj.as_mut()),
                ("mlp.gate_proj", mlp.gate_proj.as_mut()),
                ("mlp.up_proj", mlp.up_proj.as_mut()),
                ("mlp.down_proj", Some(&mut mlp.down_proj)),
            ] {
                if let Some(layer) = layer {
                    each(format!("layers.{i}.{name}"), layer);
                }
            }
        }
    }

    fn tables(&mut self, each: &mut VisitEmbedding<'_, B>) {
        each("embed_tokens", self.embed_tokens.lazy_shape().dims(), &mut self.embed_tokens_adapter);
    }
}

impl<B: FusedBackend> CausalLm<B> for Llama<B> {
    fn positions(&self) -> usize {
        self.positions
    }

    fn vocabulary(&self) -> usize {
        self.embed_tokens.lazy_shape()[0]
    }

    fn next_logits(&self, input_ids_bt: Ids<B>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let input_ids_bt = match &self.long_speeds {
            Some((longest, _)) => cache.with_earlier(input_ids_bt, *longest),
            None => input_ids_bt,
        };
        let [b, t] = input_ids_bt.dims();
        let mut x_nd = self.embedded(input_ids_bt);
        let reached: Vec<usize> = cache.rows().reached(t).collect();
        let angles = self.angles(|| cache.rows().numbers(t), &reached, &x_nd);
        for (number, layer) in self.layers.iter().enumerate() {
            x_nd = layer.forward(x_nd, &angles, |attn, parts| cache.attend(number, parts, attn.options(b), None));
        }
        self.logits(self.normed(cache.end(x_nd, b)))
    }
}
