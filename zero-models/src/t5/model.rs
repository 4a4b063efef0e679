//! The T5 module: computes logits or a loss from token ids of a source text and of a target text.
//!
//! Between embedding and head, activations are rows `[n, d]`, as in [`crate::gpt2`].
//!
//! Shape suffixes: `b` batch, `t` positions of the decoder, `u` of the encoder, `d` width of the model, `h` heads, `f` inner width, `n`
//! = `b * t` rows, `m` = `b * u` rows, `s` query-key pairs.

use std::ops::Range;

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use zero_ops::{AttentionOptions, FusedBackend, checkpoint_block, embedding};

use super::T5Config;
use super::buckets::Buckets;
use crate::attention::{Masks, attend};
use crate::generate::KvCache;
use crate::layers::{Ids, dense, dense_activated, dense_onto, scaled};
use crate::linear::{Adaptable, Linear, each_field};
use crate::seq2seq::{Encoded, Seq2SeqLm};
use crate::{Activation, init};

/// T5 or mT5 with its language-model head, like Hugging Face's `T5ForConditionalGeneration`.
#[derive(Module, Debug)]
pub struct T5<B: Backend> {
    /// Token embedding `[vocab_size, d_model]`, shared by encoder and decoder, and by the head if that is tied.
    pub shared: Param<Tensor<B, 2>>,
    /// The encoder, which reads the source text.
    pub encoder: T5Stack<B>,
    /// The decoder, which generates the target text.
    pub decoder: T5Stack<B>,
    /// Weight of the head `[vocab_size, d_model]`, if it is not tied.
    pub lm_head: Option<Param<Tensor<B, 2>>>,
    head_scale: f64,
    pad_token: u32,
    start_token: u32,
}

/// The encoder or the decoder.
#[derive(Module, Debug)]
pub struct T5Stack<B: Backend> {
    /// Bias of each head's scores, by the bucket of a distance, `[num_buckets, num_heads]`.
    pub relative_attention_bias: Param<Tensor<B, 2>>,
    /// The layers.
    pub block: Vec<T5Block<B>>,
    /// Factors of the final norm `[d_model]`.
    pub final_layer_norm: Param<Tensor<B, 1>>,
    max_distance: usize,
    is_decoder: bool,
    epsilon: f64,
    dropout: Dropout,
}

/// One layer: attention and feed-forward layer, each applied to its normalized input and added to the input.
#[derive(Module, Debug)]
pub struct T5Block<B: Backend> {
    /// Self-attention.
    pub self_attention: T5Attention<B>,
    /// Cross-attention to the encoder's output, in the decoder.
    pub cross_attention: Option<T5Attention<B>>,
    /// The feed-forward layer.
    pub feed_forward: T5FeedForward<B>,
    epsilon: f64,
    dropout: Dropout,
}

/// Attention without biases and with unscaled scores.
#[derive(Module, Debug)]
pub struct T5Attention<B: Backend> {
    /// Factors of the norm before it `[d_model]`.
    pub layer_norm: Param<Tensor<B, 1>>,
    /// Query projection, `[d_model, num_heads * d_kv]`.
    pub q: Linear<B>,
    /// Key projection.
    pub k: Linear<B>,
    /// Value projection.
    pub v: Linear<B>,
    /// Output projection, from the heads back to the width of the model.
    pub o: Linear<B>,
    heads: usize,
    dropout: Dropout,
}

/// The feed-forward layer, `wo(act(wi(x)))`, or with a gate `wo(act(wi_0(x)) * wi_1(x))`.
#[derive(Module, Debug)]
pub struct T5FeedForward<B: Backend> {
    /// Factors of the norm before it `[d_model]`.
    pub layer_norm: Param<Tensor<B, 1>>,
    /// Up projection, `[d_model, d_ff]`, if there is no gate.
    pub wi: Option<Linear<B>>,
    /// Gate projection, `[d_model, d_ff]`.
    pub wi_0: Option<Linear<B>>,
    /// Up projection that the gate multiplies, `[d_model, d_ff]`.
    pub wi_1: Option<Linear<B>>,
    /// Down projection, `[d_ff, d_model]`.
    pub wo: Linear<B>,
    activation: Activation,
    dropout: Dropout,
}

impl T5Config {
    /// Initializes a model as Hugging Face does: weights from normal distributions whose standard deviations follow from the sizes,
    /// factors of norms `initializer_factor`. A parameter is allocated on its first use.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) fails.
    pub fn init<B: Backend>(&self, device: &B::Device) -> T5<B> {
        self.validate().unwrap_or_else(|error| panic!("{error}"));
        let table = || init::normal([self.vocab_size, self.d_model], self.initializer_factor, device);
        T5 {
            shared: table(),
            encoder: self.init_stack(self.num_layers, false, device),
            decoder: self.init_stack(self.num_decoder_layers, true, device),
            lm_head: (!self.tie_word_embeddings).then(table),
            head_scale: if self.scale_decoder_outputs { (self.d_model as f64).powf(-0.5) } else { 1.0 },
            pad_token: self.pad_token_id,
            start_token: self.decoder_start_token_id,
        }
    }

    fn init_stack<B: Backend>(&self, layers: usize, is_decoder: bool, device: &B::Device) -> T5Stack<B> {
        let (d, f, inner, factor) = (self.d_model, self.d_ff, self.inner_width(), self.initializer_factor);
        let std = |width: usize| factor * (width as f64).powf(-0.5);
        let weight = |d_in, d_out, width| init::weight(d_in, d_out, std(width), device);
        let norm = || init::constant(d, factor, device);
        let dropout = DropoutConfig::new(self.dropout_rate).init();
        let attention = || T5Attention {
            layer_norm: norm(),
            q: weight(d, inner, d * self.d_kv),
            k: weight(d, inner, d),
            v: weight(d, inner, d),
            o: weight(inner, d, inner),
            heads: self.num_heads,
            dropout: dropout.clone(),
        };
        let up = |is_there: bool| is_there.then(|| weight(d, f, d));
        let block = |_| T5Block {
            self_attention: attention(),
            cross_attention: is_decoder.then(attention),
            feed_forward: T5FeedForward {
                layer_norm: norm(),
                wi: up(!self.is_gated_act),
                wi_0: up(self.is_gated_act),
                wi_1: up(self.is_gated_act),
                wo: weight(f, d, f),
                activation: self.activation,
                dropout: dropout.clone(),
            },
            epsilon: self.layer_norm_epsilon,
            dropout: dropout.clone(),
        };
        T5Stack {
            relative_attention_bias: init::normal(
                [self.relative_attention_num_buckets, self.num_heads],
                std(d),
                device,
            ),
            block: (0..layers).map(block).collect(),
            final_layer_norm: norm(),
            max_distance: self.relative_attention_max_distance,
            is_decoder,
            epsilon: self.layer_norm_epsilon,
            dropout: dropout.clone(),
        }
    }
}

impl<B: FusedBackend> T5<B> {
    /// Returns token embeddings `[n, d]`, as the layers of `stack` read them.
    fn embed(&self, stack: &T5Stack<B>, ids_bt: Ids<B>) -> Tensor<B, 2> {
        let [b, t] = ids_bt.dims();
        stack.dropout.forward(embedding(self.shared.val(), ids_bt.reshape([b * t])))
    }

    /// Normalizes and scales the last layer's rows for the head.
    fn before_head(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let x_nd = self.decoder.end(x_nd);
        if self.head_scale == 1.0 { x_nd } else { x_nd * self.head_scale }
    }
}

impl<B: FusedBackend> Seq2SeqLm<B> for T5<B> {
    fn positions(&self) -> usize {
        usize::MAX
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
        self.lm_head.as_ref().unwrap_or(&self.shared).val()
    }

    fn encode(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>) -> Encoded<B> {
        let [b, u] = ids_bu.dims();
        let mut x_md = self.embed(&self.encoder, ids_bu);
        let masks = self.encoder.biased(Masks::padding(mask_bu.clone(), &x_md), [b, u], &x_md);
        for block in &self.encoder.block {
            let forward = |x_md| {
                block.forward(x_md, |attn, x_md, _| {
                    attend(attn.parts(&x_md, &x_md), &masks, attn.options(b, false), &attn.dropout)
                })
            };
            x_md = checkpoint_block(forward, x_md);
        }
        Encoded { rows_md: self.encoder.end(x_md), mask_bu }
    }

    fn decode(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>) -> Tensor<B, 2> {
        let [b, t] = decoder_ids_bt.dims();
        let mut x_nd = self.embed(&self.decoder, decoder_ids_bt);
        let own = self.decoder.biased(Masks::none(), [b, t], &x_nd);
        let across = Masks::padding(encoded.mask_bu.clone(), &x_nd);
        for block in &self.decoder.block {
            let forward = |x_nd| {
                block.forward(x_nd, |attn, x_nd, is_across| {
                    let (others, masks) = if is_across { (&encoded.rows_md, &across) } else { (&x_nd, &own) };
                    attend(attn.parts(&x_nd, others), masks, attn.options(b, !is_across), &attn.dropout)
                })
            };
            x_nd = checkpoint_block(forward, x_nd);
        }
        self.before_head(x_nd)
    }

    fn decode_next(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let [b, t] = decoder_ids_bt.dims();
        let mut x_nd = self.embed(&self.decoder, decoder_ids_bt);
        if cache.is_empty() {
            cache.hide_across(encoded.mask_bu.clone(), &x_nd);
        }
        let bias_hs = self.decoder.bias(cache.len()..cache.len() + t, &x_nd);
        for (number, block) in self.decoder.block.iter().enumerate() {
            x_nd = block.forward(x_nd, |attn, x_nd, is_across| {
                let options = attn.options(b, !is_across);
                if is_across {
                    let of_text = || attn.keys_and_values(&encoded.rows_md);
                    cache.attend_across(number, dense(&attn.q, x_nd), of_text, options)
                } else {
                    cache.attend(number, attn.parts(&x_nd, &x_nd), options, Some(bias_hs.clone()))
                }
            });
        }
        self.before_head(cache.end(x_nd, b))
    }
}

impl<B: FusedBackend> T5Stack<B> {
    /// Returns the biases `[h, s]` of queries at these positions and all keys up to the last query.
    fn bias(&self, queries: Range<usize>, like_nd: &Tensor<B, 2>) -> Tensor<B, 2> {
        let [count, _] = self.relative_attention_bias.lazy_shape().dims();
        let buckets = Buckets { count, max_distance: self.max_distance, both_sides: !self.is_decoder };
        let (first, keys) = (queries.start, queries.end as i64);
        // By distance, so that few logarithms are computed.
        let by_distance: Vec<i32> = (1 - keys..keys - first as i64).map(|at| buckets.of(at) as i32).collect();
        let of_query = |query: usize| &by_distance[keys as usize - 1 - query..][..keys as usize];
        let of_pairs: Vec<i32> = queries.flat_map(of_query).copied().collect();
        embedding(self.relative_attention_bias.val(), Tensor::from_ints(&*of_pairs, &like_nd.device())).transpose()
    }

    /// Adds the biases of all pairs to the masks of rows of `t` tokens.
    fn biased(&self, masks: Masks<B>, [b, t]: [usize; 2], like_nd: &Tensor<B, 2>) -> Masks<B> {
        let options = self.block[0].self_attention.options(b, self.is_decoder);
        masks.biased(self.bias(0..t, like_nd), options, [t, t])
    }

    fn end(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        self.dropout.forward(scaled(&self.final_layer_norm, 0.0, self.epsilon, x_nd))
    }
}

impl<B: FusedBackend> T5Block<B> {
    /// Applies the layer to rows `[n, d]`. `look` computes attention; its last argument is true for cross-attention.
    fn forward(
        &self,
        mut x_nd: Tensor<B, 2>,
        mut look: impl FnMut(&T5Attention<B>, Tensor<B, 2>, bool) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let norm = |gamma: &Param<Tensor<B, 1>>, x_nd| scaled(gamma, 0.0, self.epsilon, x_nd);
        for (attn, is_across) in [(Some(&self.self_attention), false), (self.cross_attention.as_ref(), true)] {
            let Some(attn) = attn else { continue };
            let mixed_ni = look(attn, norm(&attn.layer_norm, x_nd.clone()), is_across);
            x_nd = dense_onto(&attn.o, mixed_ni, &self.dropout, x_nd);
        }
        let layer = &self.feed_forward;
        let wide_nf = layer.widened(norm(&layer.layer_norm, x_nd.clone()));
        dense_onto(&layer.wo, wide_nf, &self.dropout, x_nd)
    }
}

impl<B: FusedBackend> T5FeedForward<B> {
    /// Computes the input of `wo`, `[n, f]`, from normalized rows `[n, d]`.
    fn widened(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        self.dropout.forward(match (&self.wi, &self.wi_0, &self.wi_1) {
            (None, Some(gate), Some(up)) => dense_activated(gate, self.activation, x_nd.clone()) * dense(up, x_nd),
            (Some(up), ..) => dense_activated(up, self.activation, x_nd),
            _ => unreachable!("a feed-forward layer has a gate or none"),
        })
    }
}

impl<B: FusedBackend> T5Attention<B> {
    /// Returns the queries of `x_nd`, and the keys and values of `others_md`.
    fn parts(&self, x_nd: &Tensor<B, 2>, others_md: &Tensor<B, 2>) -> [Tensor<B, 2>; 3] {
        let [k, v] = self.keys_and_values(others_md);
        [dense(&self.q, x_nd.clone()), k, v]
    }

    fn keys_and_values(&self, x_md: &Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
        [&self.k, &self.v].map(|layer| dense(layer, x_md.clone()))
    }

    fn options(&self, b: usize, causal: bool) -> AttentionOptions {
        AttentionOptions { batch: b, heads: self.heads, causal, window: None, scale: 1.0, dropout: None, cap: None }
    }
}

impl<B: Backend> Adaptable<B> for T5<B> {
    fn linears(&mut self, each: &mut dyn FnMut(String, &mut Linear<B>)) {
        for (part, stack) in [("encoder", &mut self.encoder), ("decoder", &mut self.decoder)] {
            for (i, block) in stack.block.iter_mut().enumerate() {
                let (path, layer) = (format!("{part}.block.{i}"), &mut block.feed_forward);
                let attentions = [
                    ("self_attention", Some(&mut block.self_attention)),
                    ("cross_attention", block.cross_attention.as_mut()),
                ];
                for (name, attn) in attentions {
                    let (path, Some(attn)) = (format!("{path}.{name}"), attn) else { continue };
                    each_field!(each, path, attn.q, attn.k, attn.v, attn.o);
                }
                let up = [("wi", &mut layer.wi), ("wi_0", &mut layer.wi_0), ("wi_1", &mut layer.wi_1)];
                for (name, up) in up {
                    up.iter_mut().for_each(|up| each(format!("{path}.feed_forward.{name}"), up));
                }
                each_field!(each, format!("{path}.feed_forward"), layer.wo);
            }
        }
    }
}
