//! The BART module: computes logits or a loss from token ids of a source text and of a target text.
//!
//! Between embedding and head, activations are rows `[n, d]`, as in [`crate::gpt2`].
//!
//! Shape suffixes: `b` batch, `t` positions of the decoder, `u` of the encoder, `d` width of the model, `n` = `b * t` rows,
//! `m` = `b * u` rows.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, LayerNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, s};
use zero_ops::{AttentionOptions, FusedBackend, checkpoint_block, embedding};

use super::config::OFFSET;
use crate::attention::{Masks, attend, is_active};
use crate::generate::KvCache;
use crate::layers::{Ids, check_positions, dense, dense_activated, dense_onto, normed};
use crate::linear::{Adaptable, Linear, each_field};
use crate::seq2seq::{Encoded, Seq2SeqLm};
use crate::{Activation, BartConfig, init};

/// The default of torch, which Hugging Face keeps.
const EPSILON: f64 = 1e-5;

/// BART with the head that its [`BartHead`](crate::BartHead) selects, like Hugging Face's `BartForConditionalGeneration` or
/// `BartForSequenceClassification`.
#[derive(Module, Debug)]
pub struct Bart<B: Backend> {
    /// Token embedding `[vocab_size, d_model]`, shared by encoder, decoder and head.
    pub shared: Param<Tensor<B, 2>>,
    /// The encoder, which reads the source text.
    pub encoder: BartStack<B>,
    /// The decoder, which generates the target text.
    pub decoder: BartStack<B>,
    /// The head of a classifier.
    pub classification_head: Option<BartClassificationHead<B>>,
    embedding_scale: f64,
    pad_token: u32,
    start_token: u32,
    end_token: u32,
}

/// The head of a classifier, which reads one row per text.
#[derive(Module, Debug)]
pub struct BartClassificationHead<B: Backend> {
    /// `[d_model, d_model]`, followed by a tanh.
    pub dense: Linear<B>,
    /// `[d_model, labels]`
    pub out_proj: Linear<B>,
    dropout: Dropout,
}

/// The encoder or the decoder.
#[derive(Module, Debug)]
pub struct BartStack<B: Backend> {
    /// Position embedding `[max_position_embeddings + 2, d_model]`, whose third row is that of the first position.
    pub embed_positions: Param<Tensor<B, 2>>,
    /// Norm of the sum of the embeddings.
    pub layernorm_embedding: LayerNorm<B>,
    /// The layers.
    pub layers: Vec<BartLayer<B>>,
    dropout: Dropout,
}

/// One layer: attention and feed-forward layer, each added to its input and then normalized.
#[derive(Module, Debug)]
pub struct BartLayer<B: Backend> {
    /// Self-attention.
    pub self_attn: BartAttention<B>,
    /// Norm after self-attention.
    pub self_attn_layer_norm: LayerNorm<B>,
    /// Cross-attention to the encoder's output, in the decoder.
    pub encoder_attn: Option<BartAttention<B>>,
    /// Norm after cross-attention.
    pub encoder_attn_layer_norm: Option<LayerNorm<B>>,
    /// Up projection, `[d_model, ffn_dim]`.
    pub fc1: Linear<B>,
    /// Down projection, `[ffn_dim, d_model]`.
    pub fc2: Linear<B>,
    /// Norm after the feed-forward layer.
    pub final_layer_norm: LayerNorm<B>,
    activation: Activation,
    dropout: Dropout,
    activation_dropout: Dropout,
}

/// Multi-head attention.
#[derive(Module, Debug)]
pub struct BartAttention<B: Backend> {
    /// Query projection.
    pub q_proj: Linear<B>,
    /// Key projection.
    pub k_proj: Linear<B>,
    /// Value projection.
    pub v_proj: Linear<B>,
    /// Output projection, from the heads back to the width of the model.
    pub out_proj: Linear<B>,
    heads: usize,
    dropout: Dropout,
}

impl BartConfig {
    /// Initializes a model: weights from a normal distribution with standard deviation `init_std`, biases zero. A parameter is allocated
    /// on its first use.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) fails.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Bart<B> {
        self.validate().unwrap_or_else(|error| panic!("{error}"));
        let encoder = [self.encoder_layers, self.encoder_attention_heads, self.encoder_ffn_dim];
        let decoder = [self.decoder_layers, self.decoder_attention_heads, self.decoder_ffn_dim];
        Bart {
            shared: init::normal([self.vocab_size, self.d_model], self.init_std, device),
            encoder: self.init_stack(encoder, false, device),
            decoder: self.init_stack(decoder, true, device),
            classification_head: (!self.classes().is_empty()).then(|| BartClassificationHead {
                dense: init::linear(self.d_model, self.d_model, self.init_std, device),
                out_proj: init::linear(self.d_model, self.classes().len(), self.init_std, device),
                dropout: DropoutConfig::new(self.classifier_dropout).init(),
            }),
            embedding_scale: if self.scale_embedding { (self.d_model as f64).sqrt() } else { 1.0 },
            pad_token: self.pad_token_id,
            start_token: self.decoder_start_token_id,
            end_token: self.eos_token_id,
        }
    }

    fn init_stack<B: Backend>(
        &self,
        [layers, heads, inner]: [usize; 3],
        looks_across: bool,
        device: &B::Device,
    ) -> BartStack<B> {
        let (d, std) = (self.d_model, self.init_std);
        let norm = || init::norm(d, EPSILON, device);
        let attention = || BartAttention {
            q_proj: init::linear(d, d, std, device),
            k_proj: init::linear(d, d, std, device),
            v_proj: init::linear(d, d, std, device),
            out_proj: init::linear(d, d, std, device),
            heads,
            dropout: DropoutConfig::new(self.attention_dropout).init(),
        };
        let layer = |_| BartLayer {
            self_attn: attention(),
            self_attn_layer_norm: norm(),
            encoder_attn: looks_across.then(attention),
            encoder_attn_layer_norm: looks_across.then(norm),
            fc1: init::linear(d, inner, std, device),
            fc2: init::linear(inner, d, std, device),
            final_layer_norm: norm(),
            activation: self.activation,
            dropout: DropoutConfig::new(self.dropout).init(),
            activation_dropout: DropoutConfig::new(self.activation_dropout).init(),
        };
        BartStack {
            embed_positions: init::normal([self.max_position_embeddings + OFFSET, d], std, device),
            layernorm_embedding: norm(),
            layers: (0..layers).map(layer).collect(),
            dropout: DropoutConfig::new(self.dropout).init(),
        }
    }
}

impl<B: FusedBackend> Bart<B> {
    /// Returns the logits of each text's labels, as Hugging Face's `BartForSequenceClassification` does: the decoder reads the text too,
    /// and the head reads the decoder's output at the last `<eos>` of the text. For a text without one, which Hugging Face refuses, the
    /// head reads the output at the first token.
    ///
    /// # Shapes
    /// - `ids_bu`, `mask_bu`: as for [`encode`](Seq2SeqLm::encode)
    /// - returns `[b, labels]`
    ///
    /// # Panics
    /// If `u` exceeds `max_position_embeddings`, or the model has no classification head.
    pub fn classify(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>) -> Tensor<B, 2> {
        let head = self.classification_head.as_ref();
        let head =
            head.unwrap_or_else(|| panic!("this BART has no classifier: set BartConfig::head to one with classes"));
        let ([b, u], device) = (ids_bu.dims(), ids_bu.device());
        let count = |range| Tensor::<B, 1, Int>::arange(range, &device);
        let is_end_bu = ids_bu.clone().equal_elem(self.end_token as i32).int();
        let last_b = (is_end_bu * count(0..u as i64).reshape([1, u])).max_dim(1).reshape([b]);
        let decoder_ids_bu = self.decoder_inputs(ids_bu.clone());
        let hidden_nd = self.hidden_rows(ids_bu, mask_bu, decoder_ids_bu);
        let read_bd = hidden_nd.select(0, last_b + count(0..b as i64) * u as i64);
        let inner_bd = dense(&head.dense, head.dropout.forward(read_bd)).tanh();
        dense(&head.out_proj, head.dropout.forward(inner_bd))
    }

    /// Embeds texts that begin at the first position, as rows `[n, d]`.
    fn embed(&self, stack: &BartStack<B>, ids_bt: Ids<B>) -> Tensor<B, 2> {
        let [b, t] = ids_bt.dims();
        let table = stack.embed_positions.val();
        let [rows, d] = table.dims();
        check_positions(t, rows - OFFSET, "max_position_embeddings");
        let tokens = self.tokens(ids_bt.reshape([b * t])).reshape([b, t * d]);
        let positions = table.slice(s![OFFSET..OFFSET + t, ..]).reshape([1, t * d]);
        stack.norm((tokens + positions).reshape([b * t, d]))
    }

    /// Returns token embeddings `[n, d]`.
    fn tokens(&self, ids_n: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        let tokens_nd = embedding(self.shared.val(), ids_n);
        if self.embedding_scale == 1.0 { tokens_nd } else { tokens_nd * self.embedding_scale }
    }
}

impl<B: FusedBackend> Seq2SeqLm<B> for Bart<B> {
    fn positions(&self) -> usize {
        self.decoder.embed_positions.lazy_shape()[0] - OFFSET
    }

    fn vocabulary(&self) -> usize {
        self.shared.lazy_shape()[0]
    }

    fn pad_token(&self) -> u32 {
        self.pad_token
    }

    fn start_token(&self) -> u32 {
        self.start_token
    }

    fn head_weight(&self) -> Tensor<B, 2> {
        self.shared.val()
    }

    fn encode(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>) -> Encoded<B> {
        let [b, _] = ids_bu.dims();
        let mut x_md = self.embed(&self.encoder, ids_bu);
        let masks = Masks::padding(mask_bu.clone(), &x_md);
        for layer in &self.encoder.layers {
            let forward = |x_md| {
                layer.forward(x_md, |attn, x_md, _| {
                    attend(attn.parts(&x_md, &x_md), &masks, attn.options(b, &x_md, false), &attn.dropout)
                })
            };
            x_md = checkpoint_block(forward, x_md);
        }
        Encoded { rows_md: x_md, mask_bu }
    }

    fn decode(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>) -> Tensor<B, 2> {
        let [b, _] = decoder_ids_bt.dims();
        let mut x_nd = self.embed(&self.decoder, decoder_ids_bt);
        let (own, across) = (Masks::none(), Masks::padding(encoded.mask_bu.clone(), &x_nd));
        for layer in &self.decoder.layers {
            let forward = |x_nd| {
                layer.forward(x_nd, |attn, x_nd, is_across| {
                    let (others, masks) = if is_across { (&encoded.rows_md, &across) } else { (&x_nd, &own) };
                    attend(attn.parts(&x_nd, others), masks, attn.options(b, &x_nd, !is_across), &attn.dropout)
                })
            };
            x_nd = checkpoint_block(forward, x_nd);
        }
        x_nd
    }

    fn decode_next(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let [b, t] = decoder_ids_bt.dims();
        let decoder = &self.decoder;
        let positions: Vec<i32> = cache.rows().numbers(t).map(|at| at + OFFSET as i32).collect();
        let positions_n = Tensor::from_ints(&*positions, &decoder_ids_bt.device());
        let tokens_nd = self.tokens(decoder_ids_bt.reshape([b * t]));
        let mut x_nd = decoder.norm(tokens_nd + embedding(decoder.embed_positions.val(), positions_n));
        if cache.is_empty() {
            cache.hide_across(encoded.mask_bu.clone(), &x_nd);
        }
        for (number, layer) in decoder.layers.iter().enumerate() {
            x_nd = layer.forward(x_nd, |attn, x_nd, is_across| {
                let options = attn.options(b, &x_nd, !is_across);
                if is_across {
                    let of_text = || attn.keys_and_values(&encoded.rows_md);
                    cache.attend_across(number, attn.queries(x_nd), of_text, options)
                } else {
                    cache.attend(number, attn.parts(&x_nd, &x_nd), options, None)
                }
            });
        }
        cache.end(x_nd, b)
    }
}

impl<B: FusedBackend> BartStack<B> {
    fn norm(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        self.dropout.forward(normed(&self.layernorm_embedding, EPSILON, x_nd))
    }
}

impl<B: FusedBackend> BartLayer<B> {
    /// Applies the layer to rows `[n, d]`. `look` computes attention; its last argument is true for cross-attention.
    fn forward(
        &self,
        x_nd: Tensor<B, 2>,
        mut look: impl FnMut(&BartAttention<B>, Tensor<B, 2>, bool) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let mixed_nd = look(&self.self_attn, x_nd.clone(), false);
        let sum_nd = dense_onto(&self.self_attn.out_proj, mixed_nd, &self.dropout, x_nd);
        let mut x_nd = normed(&self.self_attn_layer_norm, EPSILON, sum_nd);
        if let (Some(attn), Some(norm)) = (&self.encoder_attn, &self.encoder_attn_layer_norm) {
            let mixed_nd = look(attn, x_nd.clone(), true);
            x_nd = normed(norm, EPSILON, dense_onto(&attn.out_proj, mixed_nd, &self.dropout, x_nd));
        }
        let mut wide_nf = dense_activated(&self.fc1, self.activation, x_nd.clone());
        if is_active(&self.activation_dropout, &wide_nf) {
            wide_nf = self.activation_dropout.forward(wide_nf);
        }
        normed(&self.final_layer_norm, EPSILON, dense_onto(&self.fc2, wide_nf, &self.dropout, x_nd))
    }
}

impl<B: FusedBackend> BartAttention<B> {
    /// Returns the queries of `x_nd`, and the keys and values of `others_md`.
    fn parts(&self, x_nd: &Tensor<B, 2>, others_md: &Tensor<B, 2>) -> [Tensor<B, 2>; 3] {
        let [k, v] = self.keys_and_values(others_md);
        [self.queries(x_nd.clone()), k, v]
    }

    fn queries(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        dense(&self.q_proj, x_nd)
    }

    fn keys_and_values(&self, x_md: &Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
        [&self.k_proj, &self.v_proj].map(|layer| dense(layer, x_md.clone()))
    }

    fn options(&self, b: usize, x_nd: &Tensor<B, 2>, causal: bool) -> AttentionOptions {
        let [_, d] = x_nd.dims();
        let scale = ((d / self.heads) as f64).sqrt().recip();
        AttentionOptions { batch: b, heads: self.heads, causal, window: None, scale, dropout: None, cap: None }
    }
}

impl<B: Backend> Adaptable<B> for Bart<B> {
    fn linears(&mut self, each: &mut dyn FnMut(String, &mut Linear<B>)) {
        for (part, stack) in [("encoder", &mut self.encoder), ("decoder", &mut self.decoder)] {
            for (i, layer) in stack.layers.iter_mut().enumerate() {
                let attentions =
                    [("self_attn", Some(&mut layer.self_attn)), ("encoder_attn", layer.encoder_attn.as_mut())];
                for (name, attn) in attentions {
                    let (path, Some(attn)) = (format!("{part}.layers.{i}.{name}"), attn) else { continue };
                    each_field!(each, path, attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj);
                }
                each_field!(each, format!("{part}.layers.{i}"), layer.fc1, layer.fc2);
            }
        }
        if let Some(head) = &mut self.classification_head {
            each_field!(each, "classification_head", head.dense, head.out_proj);
        }
    }
}
