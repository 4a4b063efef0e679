//! BART on Burn 0.22. Its parameters have the paths, shapes and values of `zero_models::Bart`, so either model reads the other's checkpoints
//! and Hugging Face's.
//!
//! The model does not depend on ranks. Shape suffixes: `b` batch, `t` positions of the decoder, `u` of the encoder, `d` width of the model,
//! `n` = `b * t` rows, `m` = `b * u` rows.

use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use zero_kernels::options::AttentionOptions;
use zero_models::bart::OFFSET;
use zero_models::{Activation, BartConfig, ModelError};

use super::build;
use super::cache::KvCache;
use super::layers::{Masks, attend, dense, dense_activated, dense_onto, hidden, norm};
use super::seq2seq::{Encoded, Seq2SeqModel, decoder_inputs};
use crate::activations::checkpoint_block;
use crate::fused::dropout;
use crate::layers::embedding;

/// The default of torch, which Hugging Face keeps.
const EPSILON: f64 = 1e-5;

/// A BART that generates text, or one with a classification head.
#[derive(Module, Debug)]
pub struct Bart {
    shared: Param<Tensor<2>>,
    encoder: Stack,
    decoder: Stack,
    classification_head: Option<ClassificationHead>,
    embedding_scale: f64,
    #[module(skip)]
    tokens: Tokens,
}

#[derive(Debug, Clone, Copy)]
struct Tokens {
    pad: u32,
    start: u32,
    end: u32,
}

#[derive(Module, Debug)]
struct ClassificationHead {
    dense: Linear,
    out_proj: Linear,
    dropout: f64,
}

#[derive(Module, Debug)]
struct Stack {
    embed_positions: Param<Tensor<2>>,
    layernorm_embedding: LayerNorm,
    layers: Vec<Layer>,
    dropout: f64,
}

#[derive(Module, Debug)]
struct Layer {
    self_attn: Attention,
    self_attn_layer_norm: LayerNorm,
    encoder_attn: Option<Attention>,
    encoder_attn_layer_norm: Option<LayerNorm>,
    fc1: Linear,
    fc2: Linear,
    final_layer_norm: LayerNorm,
    #[module(skip)]
    activation: Activation,
    dropout: f64,
    activation_dropout: f64,
}

#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Linear,
    heads: usize,
    dropout: f64,
}

impl Bart {
    /// Builds a BART of this configuration with placeholder values.
    pub fn new(config: &BartConfig, device: &Device) -> Self {
        let d = config.d_model;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(d).with_epsilon(EPSILON).init(device);
        let table = |rows| Param::from_tensor(Tensor::<2>::zeros([rows, d], device));
        let attention = |heads| Attention {
            q_proj: linear(d, d),
            k_proj: linear(d, d),
            v_proj: linear(d, d),
            out_proj: linear(d, d),
            heads,
            dropout: config.attention_dropout,
        };
        let stack = |[layers, heads, inner]: [usize; 3], looks_across: bool| {
            let layer = |_| Layer {
                self_attn: attention(heads),
                self_attn_layer_norm: norm(),
                encoder_attn: looks_across.then(|| attention(heads)),
                encoder_attn_layer_norm: looks_across.then(norm),
                fc1: linear(d, inner),
                fc2: linear(inner, d),
                final_layer_norm: norm(),
                activation: config.activation,
                dropout: config.dropout,
                activation_dropout: config.activation_dropout,
            };
            Stack {
                embed_positions: table(config.max_position_embeddings + OFFSET),
                layernorm_embedding: norm(),
                layers: (0..layers).map(layer).collect(),
                dropout: config.dropout,
            }
        };
        let encoder = [config.encoder_layers, config.encoder_attention_heads, config.encoder_ffn_dim];
        let decoder = [config.decoder_layers, config.decoder_attention_heads, config.decoder_ffn_dim];
        Self {
            shared: table(config.vocab_size),
            encoder: stack(encoder, false),
            decoder: stack(decoder, true),
            classification_head: (!config.classes().is_empty()).then(|| ClassificationHead {
                dense: linear(d, d),
                out_proj: linear(d, config.classes().len()),
                dropout: config.classifier_dropout,
            }),
            embedding_scale: if config.scale_embedding { (d as f64).sqrt() } else { 1.0 },
            tokens: Tokens { pad: config.pad_token_id, start: config.decoder_start_token_id, end: config.eos_token_id },
        }
    }

    /// Returns the logits of each text's labels `[b, labels]`: the decoder reads the text too, and the head reads the decoder's output at
    /// the last `<eos>` of the text.
    ///
    /// # Panics
    /// If the model has no classification head.
    pub fn classify(&self, ids_bu: Tensor<2, Int>, mask_bu: Option<Tensor<2, Int>>) -> Tensor<2> {
        let head = self.classification_head.as_ref().expect("this BART has no classification head");
        let ([b, u], device) = (ids_bu.dims(), ids_bu.device());
        let count = |range| Tensor::<1, Int>::arange(range, &device);
        let is_end_bu = ids_bu.clone().equal_elem(i64::from(self.tokens.end)).int();
        let last_b = (is_end_bu * count(0..u as i64).reshape([1, u])).max_dim(1).reshape([b]);
        let decoder_ids_bu = decoder_inputs(ids_bu.clone(), self.special_tokens());
        let hidden_nd = self.decode(&self.encode(ids_bu, mask_bu), decoder_ids_bu);
        let read_bd = hidden_nd.select(0, last_b + count(0..b as i64) * u as i64);
        let inner_bd = dense(&head.dense, dropout(read_bd, head.dropout), None).tanh();
        dense(&head.out_proj, dropout(inner_bd, head.dropout), None)
    }

    /// Embeds ids `[b, t]` at these positions, as rows `[n, d]`.
    fn embed(&self, stack: &Stack, ids_bt: Tensor<2, Int>, positions: Tensor<2, Int>) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let tokens_btd = embedding(&self.shared, ids_bt);
        let [_, _, d] = tokens_btd.dims();
        let tokens_btd = if self.embedding_scale == 1.0 { tokens_btd } else { tokens_btd * self.embedding_scale };
        let x_btd = tokens_btd + embedding(&stack.embed_positions, positions);
        dropout(norm(&stack.layernorm_embedding, EPSILON, x_btd.reshape([b * t, d])), stack.dropout)
    }

    /// Embeds texts that begin at the first position.
    fn embed_from_first(&self, stack: &Stack, ids_bt: Tensor<2, Int>) -> Tensor<2> {
        let [_, t] = ids_bt.dims();
        let positions = OFFSET as i64..(OFFSET + t) as i64;
        let positions_1t = Tensor::<1, Int>::arange(positions, &ids_bt.device()).reshape([1, t]);
        self.embed(stack, ids_bt, positions_1t)
    }
}

impl Seq2SeqModel for Bart {
    type Config = BartConfig;

    fn build(config: &BartConfig, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        build::begin(Self::new(config, device), &config.clone().into(), weights, seed)
    }

    fn special_tokens(&self) -> [u32; 2] {
        [self.tokens.pad, self.tokens.start]
    }

    fn head(&self) -> &Param<Tensor<2>> {
        &self.shared
    }

    fn encode(&self, ids_bu: Tensor<2, Int>, mask_bu: Option<Tensor<2, Int>>) -> Encoded {
        let [b, _] = ids_bu.dims();
        let mut x_md = self.embed_from_first(&self.encoder, ids_bu);
        let masks = Masks::of_keys(mask_bu.clone().map(|mask_bu| hidden(mask_bu, &x_md)));
        for layer in &self.encoder.layers {
            let (layer, masks) = (layer.clone(), masks.clone());
            let forward = move |x_md| {
                layer.forward(x_md, |attn, x_md, _| {
                    attend(attn.parts(&x_md, &x_md), &masks, attn.options(b, &x_md, false), attn.dropout)
                })
            };
            x_md = checkpoint_block(forward, x_md);
        }
        Encoded { rows_md: x_md, mask_bu }
    }

    fn decode(&self, encoded: &Encoded, ids_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, _] = ids_bt.dims();
        let mut x_nd = self.embed_from_first(&self.decoder, ids_bt);
        let across = Masks::of_keys(encoded.mask_bu.clone().map(|mask_bu| hidden(mask_bu, &x_nd)));
        for layer in &self.decoder.layers {
            let (layer, across) = (layer.clone(), across.clone());
            let forward = move |(x_nd, rows_md): (Tensor<2>, Tensor<2>)| {
                layer.forward(x_nd, |attn, x_nd, is_across| {
                    let own = Masks::default();
                    let (others, masks) = if is_across { (&rows_md, &across) } else { (&x_nd, &own) };
                    attend(attn.parts(&x_nd, others), masks, attn.options(b, &x_nd, !is_across), attn.dropout)
                })
            };
            x_nd = checkpoint_block(forward, (x_nd, encoded.rows_md.clone()));
        }
        x_nd
    }

    fn decode_next(&self, encoded: &Encoded, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let positions: Vec<i32> = cache.rows.numbers(t).map(|at| at + OFFSET as i32).collect();
        let positions_bt = Tensor::from_data(TensorData::new(positions, [b, t]), &ids_bt.device());
        let mut x_nd = self.embed(&self.decoder, ids_bt, positions_bt);
        cache.begin_across(encoded.mask_bu.as_ref(), &x_nd);
        for (number, layer) in self.decoder.layers.iter().enumerate() {
            x_nd = layer.forward(x_nd, |attn, x_nd, is_across| {
                let options = attn.options(b, &x_nd, !is_across);
                if is_across {
                    let of_text = || attn.keys_and_values(&encoded.rows_md);
                    cache.attend_across(number, dense(&attn.q_proj, x_nd, None), of_text, options)
                } else {
                    cache.attend(number, attn.parts(&x_nd, &x_nd), options, None)
                }
            });
        }
        cache.end(x_nd, b)
    }
}

impl Layer {
    /// Applies the layer to rows `[n, d]`. `look` computes attention; its last argument is true for cross-attention.
    fn forward(&self, x_nd: Tensor<2>, mut look: impl FnMut(&Attention, Tensor<2>, bool) -> Tensor<2>) -> Tensor<2> {
        let mixed_nd = look(&self.self_attn, x_nd.clone(), false);
        let sum_nd = dense_onto(&self.self_attn.out_proj, mixed_nd, self.dropout, x_nd);
        let mut x_nd = norm(&self.self_attn_layer_norm, EPSILON, sum_nd);
        if let (Some(attn), Some(after)) = (&self.encoder_attn, &self.encoder_attn_layer_norm) {
            let mixed_nd = look(attn, x_nd.clone(), true);
            x_nd = norm(after, EPSILON, dense_onto(&attn.out_proj, mixed_nd, self.dropout, x_nd));
        }
        let wide_nf = dropout(dense_activated(&self.fc1, self.activation, x_nd.clone()), self.activation_dropout);
        norm(&self.final_layer_norm, EPSILON, dense_onto(&self.fc2, wide_nf, self.dropout, x_nd))
    }
}

impl Attention {
    /// Returns the queries of `x_nd`, and the keys and values of `others_md`.
    fn parts(&self, x_nd: &Tensor<2>, others_md: &Tensor<2>) -> [Tensor<2>; 3] {
        let [k, v] = self.keys_and_values(others_md);
        [dense(&self.q_proj, x_nd.clone(), None), k, v]
    }

    fn keys_and_values(&self, x_md: &Tensor<2>) -> [Tensor<2>; 2] {
        [&self.k_proj, &self.v_proj].map(|layer| dense(layer, x_md.clone(), None))
    }

    fn options(&self, batch: usize, x_nd: &Tensor<2>, causal: bool) -> AttentionOptions {
        let [_, d] = x_nd.dims();
        let scale = ((d / self.heads) as f64).sqrt().recip();
        AttentionOptions { batch, heads: self.heads, causal, window: None, scale, dropout: None, cap: None }
    }
}
