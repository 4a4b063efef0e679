//! T5 and mT5 on Burn 0.22. Their parameters have the paths, shapes and values of `zero_models::T5`, so either model reads the other's
//! checkpoints and Hugging Face's.
//!
//! The model does not depend on ranks. Shape suffixes: `b` batch, `t` positions of the decoder, `u` of the encoder, `d` width of the model,
//! `h` heads, `f` inner width, `n` = `b * t` rows, `m` = `b * u` rows, `s` query-key pairs.

use std::ops::Range;
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use zero_kernels::options::AttentionOptions;
use zero_models::t5::Buckets;
use zero_models::{Activation, ModelError, T5Config};

use super::build;
use super::cache::KvCache;
use super::layers::{Masks, attend, dense, dense_activated, dense_onto, hidden};
use super::seq2seq::{Encoded, Seq2SeqModel};
use crate::activations::checkpoint_block;
use crate::fused::{dropout, rms_norm};
use crate::layers::embedding;

/// A T5 with its language-model head.
#[derive(Module, Debug)]
pub struct T5 {
    shared: Param<Tensor<2>>,
    encoder: Stack,
    decoder: Stack,
    lm_head: Option<Param<Tensor<2>>>,
    head_scale: f64,
    /// The padding token, and the first one that the decoder reads.
    #[module(skip)]
    tokens: [u32; 2],
}

#[derive(Module, Debug)]
struct Stack {
    relative_attention_bias: Param<Tensor<2>>,
    block: Vec<Block>,
    final_layer_norm: Param<Tensor<1>>,
    #[module(skip)]
    buckets: Buckets,
    epsilon: f64,
    dropout: f64,
}

#[derive(Module, Debug)]
struct Block {
    self_attention: Attention,
    cross_attention: Option<Attention>,
    feed_forward: FeedForward,
    epsilon: f64,
    dropout: f64,
}

#[derive(Module, Debug)]
struct Attention {
    layer_norm: Param<Tensor<1>>,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: usize,
    dropout: f64,
}

#[derive(Module, Debug)]
struct FeedForward {
    layer_norm: Param<Tensor<1>>,
    wi: Option<Linear>,
    wi_0: Option<Linear>,
    wi_1: Option<Linear>,
    wo: Linear,
    #[module(skip)]
    activation: Activation,
    dropout: f64,
}

impl T5 {
    /// Builds a T5 of this configuration with placeholder values.
    pub fn new(config: &T5Config, device: &Device) -> Self {
        let (d, f, inner, rate) = (config.d_model, config.d_ff, config.inner_width(), config.dropout_rate);
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let norm = || Param::from_tensor(Tensor::<1>::zeros([d], device));
        let table = |rows, columns| Param::from_tensor(Tensor::<2>::zeros([rows, columns], device));
        let attention = || Attention {
            layer_norm: norm(),
            q: linear(d, inner),
            k: linear(d, inner),
            v: linear(d, inner),
            o: linear(inner, d),
            heads: config.num_heads,
            dropout: rate,
        };
        let up = |is_there: bool| is_there.then(|| linear(d, f));
        let stack = |layers: usize, is_decoder: bool| {
            let block = |_| Block {
                self_attention: attention(),
                cross_attention: is_decoder.then(attention),
                feed_forward: FeedForward {
                    layer_norm: norm(),
                    wi: up(!config.is_gated_act),
                    wi_0: up(config.is_gated_act),
                    wi_1: up(config.is_gated_act),
                    wo: linear(f, d),
                    activation: config.activation,
                    dropout: rate,
                },
                epsilon: config.layer_norm_epsilon,
                dropout: rate,
            };
            let count = config.relative_attention_num_buckets;
            let max_distance = config.relative_attention_max_distance;
            Stack {
                relative_attention_bias: table(count, config.num_heads),
                block: (0..layers).map(block).collect(),
                final_layer_norm: norm(),
                buckets: Buckets { count, max_distance, both_sides: !is_decoder },
                epsilon: config.layer_norm_epsilon,
                dropout: rate,
            }
        };
        Self {
            shared: table(config.vocab_size, d),
            encoder: stack(config.num_layers, false),
            decoder: stack(config.num_decoder_layers, true),
            lm_head: (!config.tie_word_embeddings).then(|| table(config.vocab_size, d)),
            head_scale: if config.scale_decoder_outputs { (d as f64).powf(-0.5) } else { 1.0 },
            tokens: [config.pad_token_id, config.decoder_start_token_id],
        }
    }

    /// Returns token embeddings `[n, d]`, as the layers of `stack` read them.
    fn embed(&self, stack: &Stack, ids_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let x_btd = embedding(&self.shared, ids_bt);
        let [_, _, d] = x_btd.dims();
        dropout(x_btd.reshape([b * t, d]), stack.dropout)
    }

    /// Normalizes and scales the last layer's rows for the head.
    fn before_head(&self, x_nd: Tensor<2>) -> Tensor<2> {
        let x_nd = self.decoder.end(x_nd);
        if self.head_scale == 1.0 { x_nd } else { x_nd * self.head_scale }
    }
}

impl Seq2SeqModel for T5 {
    type Config = T5Config;

    fn build(config: &T5Config, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError> {
        build::begin(Self::new(config, device), &config.clone().into(), weights, seed)
    }

    fn special_tokens(&self) -> [u32; 2] {
        self.tokens
    }

    fn head(&self) -> &Param<Tensor<2>> {
        self.lm_head.as_ref().unwrap_or(&self.shared)
    }

    fn encode(&self, ids_bu: Tensor<2, Int>, mask_bu: Option<Tensor<2, Int>>) -> Encoded {
        let [b, u] = ids_bu.dims();
        let mut x_md = self.embed(&self.encoder, ids_bu);
        let keys = Masks::of_keys(mask_bu.clone().map(|mask_bu| hidden(mask_bu, &x_md)));
        let pairs_rs = self.encoder.pairs(&keys, [b, u], false, &x_md);
        for block in &self.encoder.block {
            let block = block.clone();
            let forward = move |(x_md, pairs_rs): (Tensor<2>, Tensor<2>)| {
                let masks = Masks { pairs_rs: Some(pairs_rs), ..Masks::default() };
                block.forward(x_md, |attn, x_md, _| {
                    attend(attn.parts(&x_md, &x_md), &masks, attn.options(b, false), attn.dropout)
                })
            };
            x_md = checkpoint_block(forward, (x_md, pairs_rs.clone()));
        }
        Encoded { rows_md: self.encoder.end(x_md), mask_bu }
    }

    fn decode(&self, encoded: &Encoded, ids_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let mut x_nd = self.embed(&self.decoder, ids_bt);
        let pairs_rs = self.decoder.pairs(&Masks::default(), [b, t], true, &x_nd);
        let across = Masks::of_keys(encoded.mask_bu.clone().map(|mask_bu| hidden(mask_bu, &x_nd)));
        for block in &self.decoder.block {
            let (block, across) = (block.clone(), across.clone());
            let forward = move |(x_nd, rows_md, pairs_rs): (Tensor<2>, Tensor<2>, Tensor<2>)| {
                let own = Masks { pairs_rs: Some(pairs_rs), ..Masks::default() };
                block.forward(x_nd, |attn, x_nd, is_across| {
                    let (others, masks) = if is_across { (&rows_md, &across) } else { (&x_nd, &own) };
                    attend(attn.parts(&x_nd, others), masks, attn.options(b, !is_across), attn.dropout)
                })
            };
            x_nd = checkpoint_block(forward, (x_nd, encoded.rows_md.clone(), pairs_rs.clone()));
        }
        self.before_head(x_nd)
    }

    fn decode_next(&self, encoded: &Encoded, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let mut x_nd = self.embed(&self.decoder, ids_bt);
        cache.begin_across(encoded.mask_bu.as_ref(), &x_nd);
        let read = cache.rows.len();
        let bias_hs = self.decoder.bias(read..read + t, &x_nd);
        for (number, block) in self.decoder.block.iter().enumerate() {
            x_nd = block.forward(x_nd, |attn, x_nd, is_across| {
                let options = attn.options(b, !is_across);
                if is_across {
                    let of_text = || attn.keys_and_values(&encoded.rows_md);
                    cache.attend_across(number, dense(&attn.q, x_nd, None), of_text, options)
                } else {
                    cache.attend(number, attn.parts(&x_nd, &x_nd), options, Some(bias_hs.clone()))
                }
            });
        }
        self.before_head(cache.end(x_nd, b))
    }
}

impl Stack {
    /// Returns the biases `[h, s]` of queries at these positions and all keys up to the last query.
    fn bias(&self, queries: Range<usize>, like: &Tensor<2>) -> Tensor<2> {
        let (first, keys) = (queries.start, queries.end as i64);
        // By distance, so that few logarithms are computed.
        let by_distance: Vec<i32> = (1 - keys..keys - first as i64).map(|at| self.buckets.of(at) as i32).collect();
        let of_query = |query: usize| &by_distance[keys as usize - 1 - query..][..keys as usize];
        let of_pairs: Vec<i32> = queries.flat_map(of_query).copied().collect();
        let pairs = of_pairs.len();
        let of_pairs = Tensor::<2, Int>::from_data(TensorData::new(of_pairs, [1, pairs]), &like.device());
        embedding(&self.relative_attention_bias, of_pairs).squeeze_dim::<2>(0).transpose()
    }

    /// Returns the sum of the biases and the masks of all pairs of `b` rows of `t` tokens.
    fn pairs(&self, masks: &Masks, [b, t]: [usize; 2], causal: bool, like: &Tensor<2>) -> Tensor<2> {
        let options = self.block[0].self_attention.options(b, causal);
        masks.with_bias(self.bias(0..t, like), options, [t, t])
    }

    fn end(&self, x_nd: Tensor<2>) -> Tensor<2> {
        dropout(rms_norm(x_nd, self.final_layer_norm.val(), self.epsilon), self.dropout)
    }
}

impl Block {
    /// Applies the layer to rows `[n, d]`. `look` computes attention; its last argument is true for cross-attention.
    fn forward(
        &self,
        mut x_nd: Tensor<2>,
        mut look: impl FnMut(&Attention, Tensor<2>, bool) -> Tensor<2>,
    ) -> Tensor<2> {
        let norm = |gamma: &Param<Tensor<1>>, x_nd| rms_norm(x_nd, gamma.val(), self.epsilon);
        for (attn, is_across) in [(Some(&self.self_attention), false), (self.cross_attention.as_ref(), true)] {
            let Some(attn) = attn else { continue };
            let mixed_ni = look(attn, norm(&attn.layer_norm, x_nd.clone()), is_across);
            x_nd = dense_onto(&attn.o, mixed_ni, self.dropout, x_nd);
        }
        let layer = &self.feed_forward;
        let wide_nf = layer.widened(norm(&layer.layer_norm, x_nd.clone()));
        dense_onto(&layer.wo, wide_nf, self.dropout, x_nd)
    }
}

impl FeedForward {
    /// Computes the input of `wo`, `[n, f]`, from normalized rows `[n, d]`.
    fn widened(&self, x_nd: Tensor<2>) -> Tensor<2> {
        let wide_nf = match (&self.wi, &self.wi_0, &self.wi_1) {
            (None, Some(gate), Some(up)) => {
                dense_activated(gate, self.activation, x_nd.clone()) * dense(up, x_nd, None)
            }
            (Some(up), ..) => dense_activated(up, self.activation, x_nd),
            _ => unreachable!("a feed-forward layer has a gate or none"),
        };
        dropout(wide_nf, self.dropout)
    }
}

impl Attention {
    /// Returns the queries of `x_nd`, and the keys and values of `others_md`.
    fn parts(&self, x_nd: &Tensor<2>, others_md: &Tensor<2>) -> [Tensor<2>; 3] {
        let [k, v] = self.keys_and_values(others_md);
        [dense(&self.q, x_nd.clone(), None), k, v]
    }

    fn keys_and_values(&self, x_md: &Tensor<2>) -> [Tensor<2>; 2] {
        [&self.k, &self.v].map(|layer| dense(layer, x_md.clone(), None))
    }

    fn options(&self, batch: usize, causal: bool) -> AttentionOptions {
        AttentionOptions { batch, heads: self.heads, causal, window: None, scale: 1.0, dropout: None, cap: None }
    }
}
