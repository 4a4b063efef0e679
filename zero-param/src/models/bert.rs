//! BERT for pre-training on Burn 0.22. Its parameters have the paths, shapes and values of `zero_models::Bert`, which reads Hugging Face's
//! files. Its head is tied.
//!
//! The model does not depend on ranks. Shape suffixes: `b` batch, `t` positions, `d` width, `v` vocabulary, `n` = `b * t` rows, `m`
//! predicted rows, `f` inner width.

use burn::module::{Module, Param};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use zero_kernels::options::{AttentionOptions, Gelu};
use zero_models::{Activation, BertConfig, ModelError};

use super::build::check;
use super::layers::{dense, dense_onto, norm};
use crate::activations::checkpoint_block;
use crate::fused::{attention, dropout, gelu};
use crate::layers::{self, embedding, tied_head};
use crate::random::draw_dropout;

/// A BERT with the heads of its pre-training.
#[derive(Module, Debug)]
pub struct Bert {
    embeddings: Embeddings,
    layers: Vec<Layer>,
    pooler: Linear,
    transform: Linear,
    transform_norm: LayerNorm,
    prediction_bias: Param<Tensor<1>>,
    seq_relationship: Linear,
    /// A copy, as Burn's norms keep theirs private.
    epsilon: f64,
}

#[derive(Module, Debug)]
struct Embeddings {
    word_embeddings: Param<Tensor<2>>,
    position_embeddings: Param<Tensor<2>>,
    token_type_embeddings: Param<Tensor<2>>,
    norm: LayerNorm,
    dropout: f64,
}

#[derive(Module, Debug)]
struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    intermediate: Linear,
    output: Linear,
    output_norm: LayerNorm,
    heads: usize,
    epsilon: f64,
    hidden_dropout: f64,
    attention_dropout: f64,
}

/// A batch of inputs and labels.
pub struct BertBatch {
    /// Token ids, some of them replaced by the mask token, `[b, t]`.
    pub ids_bt: Tensor<2, Int>,
    /// 0 in the first segment and 1 in the second, `[b, t]`.
    pub types_bt: Tensor<2, Int>,
    /// 1 at tokens and 0 at padding, `[b, t]`.
    pub mask_bt: Tensor<2, Int>,
    /// Indices of the predicted rows out of `n`, `[m]`.
    pub predicted_m: Tensor<1, Int>,
    /// Ids to predict in these rows, or a negative number, `[m]`.
    pub labels_m: Tensor<1, Int>,
    /// 0 if the second segment follows the first, 1 if not, `[b]`.
    pub follows_b: Tensor<1, Int>,
}

/// Added to the score of a key that is padding.
const MASKED: f32 = -3.0e4;

impl Bert {
    /// Builds a BERT of this configuration with placeholder values.
    ///
    /// # Errors
    ///
    /// For a configuration with features that this model lacks.
    pub fn new(config: &BertConfig, device: &Device) -> Result<Self, ModelError> {
        let has = [
            ("tie_word_embeddings", config.tie_word_embeddings, "true"),
            ("hidden_act", config.hidden_act == Activation::GeluErf, "gelu"),
        ];
        check("BERT on Burn 0.22", &has)?;
        let (d, f) = (config.hidden_size, config.intermediate_size);
        let dense = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(d).with_epsilon(config.layer_norm_eps).init(device);
        let table = |rows| Param::from_tensor(Tensor::zeros([rows, d], device));
        let layer = |_| Layer {
            query: dense(d, d),
            key: dense(d, d),
            value: dense(d, d),
            attention_output: dense(d, d),
            attention_norm: norm(),
            intermediate: dense(d, f),
            output: dense(f, d),
            output_norm: norm(),
            heads: config.num_attention_heads,
            epsilon: config.layer_norm_eps,
            hidden_dropout: config.hidden_dropout_prob,
            attention_dropout: config.attention_probs_dropout_prob,
        };
        Ok(Self {
            embeddings: Embeddings {
                word_embeddings: table(config.vocab_size),
                position_embeddings: table(config.max_position_embeddings),
                token_type_embeddings: table(config.type_vocab_size),
                norm: norm(),
                dropout: config.hidden_dropout_prob,
            },
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            pooler: dense(d, d),
            transform: dense(d, d),
            transform_norm: norm(),
            prediction_bias: Param::from_tensor(Tensor::zeros([config.vocab_size], device)),
            seq_relationship: dense(d, 2),
            epsilon: config.layer_norm_eps,
        })
    }

    /// Returns the mean cross-entropies in nats over the labelled tokens and of the next-sentence prediction, `[2]`.
    pub fn losses(&self, batch: BertBatch) -> Tensor<1> {
        Tensor::cat(self.predict(batch).map(|(logits, labels)| cross_entropy(logits, labels)).to_vec(), 0)
    }

    /// Returns both losses, and the accuracies over the labelled tokens and over the pairs of segments.
    pub fn measure(&self, batch: BertBatch) -> [f64; 4] {
        let [tokens, pairs] = self.predict(batch);
        let rights =
            [&tokens, &pairs].map(|(logits, labels)| accuracy(logits.clone(), labels.clone()).into_scalar::<f64>());
        let loss = [tokens, pairs].map(|(logits, labels)| cross_entropy(logits, labels).into_scalar::<f64>());
        [loss[0], loss[1], rights[0], rights[1]]
    }

    /// Returns logits in fp32, `[m, v]` of tokens and `[b, 2]` of the next-sentence prediction, each with its labels.
    fn predict(&self, batch: BertBatch) -> [(Tensor<2>, Tensor<1, Int>); 2] {
        let [b, t] = batch.ids_bt.dims();
        let mut x_nd = self.embeddings.forward(batch.ids_bt, batch.types_bt, self.epsilon);
        let mask_bt = (batch.mask_bt.float() - 1.0) * -MASKED;
        for layer in &self.layers {
            let (layer, mask_bt) = (layer.clone(), mask_bt.clone());
            x_nd = checkpoint_block(move |x_nd| layer.forward(x_nd, mask_bt.clone()), x_nd);
        }
        let [_, d] = x_nd.dims();
        let first_bd = x_nd.clone().reshape([b, t, d]).narrow(1, 0, 1).reshape([b, d]);
        let follows_b2 = dense(&self.seq_relationship, dense(&self.pooler, first_bd, None).tanh(), None);

        let wide_md = layers::dense(x_nd.select(0, batch.predicted_m), &self.transform.weight, None, None);
        let x_md = gelu(Gelu::Erf, wide_md, self.transform.bias.as_ref().map(Param::val));
        let x_1md = norm(&self.transform_norm, self.epsilon, x_md).unsqueeze::<3>();
        let logits_mv = tied_head(x_1md, &self.embeddings.word_embeddings).squeeze_dim::<2>(0)
            + self.prediction_bias.val().unsqueeze::<2>();
        [(logits_mv, batch.labels_m), (follows_b2, batch.follows_b)]
            .map(|(logits, labels)| (logits.cast(DType::F32), labels))
    }
}

/// Returns the mean cross-entropy over the rows whose label is not negative; 0 if there are none.
fn cross_entropy(logits_nv: Tensor<2>, labels_n: Tensor<1, Int>) -> Tensor<1> {
    let [n] = labels_n.dims();
    let labelled_n = labels_n.clone().greater_equal_elem(0).float();
    let logs_n = log_softmax(logits_nv, 1).gather(1, labels_n.clamp_min(0).reshape([n, 1])).reshape([n]);
    (logs_n * labelled_n.clone()).sum().neg() / labelled_n.sum().clamp_min(1.0)
}

/// Returns the fraction of the rows with a non-negative label that are predicted correctly; 0 if there are none.
fn accuracy(logits_nv: Tensor<2>, labels_n: Tensor<1, Int>) -> Tensor<1> {
    let labelled = labels_n.clone().greater_equal_elem(0).float().sum();
    let right_n = logits_nv.argmax(1).flatten::<1>(0, 1).equal(labels_n);
    right_n.float().sum() / labelled.clamp_min(1.0)
}

impl Embeddings {
    fn forward(&self, ids_bt: Tensor<2, Int>, types_bt: Tensor<2, Int>, epsilon: f64) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let places_1t = Tensor::<1, Int>::arange(0..t as i64, &ids_bt.device()).reshape([1, t]);
        let x_btd = embedding(&self.word_embeddings, ids_bt)
            + embedding(&self.token_type_embeddings, types_bt)
            + embedding(&self.position_embeddings, places_1t);
        let [_, _, d] = x_btd.dims();
        dropout(norm(&self.norm, epsilon, x_btd.reshape([b * t, d])), self.dropout)
    }
}

impl Layer {
    fn forward(&self, x_nd: Tensor<2>, mask_bt: Tensor<2>) -> Tensor<2> {
        let ([_, d], [batch, _], heads) = (x_nd.dims(), mask_bt.dims(), self.heads);
        let scale = ((d / heads) as f64).sqrt().recip();
        let [q, k, v] = [&self.query, &self.key, &self.value].map(|layer| dense(layer, x_nd.clone(), None));
        let dropout = draw_dropout(self.attention_dropout, &x_nd.device());
        let options = AttentionOptions { batch, heads, causal: false, window: None, scale, dropout };
        let mixed_nd = attention(q, k, v, Some(mask_bt), options);
        let sum_nd = dense_onto(&self.attention_output, mixed_nd, self.hidden_dropout, x_nd);
        let x_nd = norm(&self.attention_norm, self.epsilon, sum_nd);
        // The activation adds the bias.
        let wide_nf = layers::dense(x_nd.clone(), &self.intermediate.weight, None, None);
        let wide_nf = gelu(Gelu::Erf, wide_nf, self.intermediate.bias.as_ref().map(Param::val));
        norm(&self.output_norm, self.epsilon, dense_onto(&self.output, wide_nf, self.hidden_dropout, x_nd))
    }
}
