//! BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT on Burn 0.22, with the heads of pre-training or a classifier. Parameters have the
//! paths, shapes and values of `zero_models::Bert`, which reads Hugging Face's files.
//!
//! The model does not depend on ranks. Shape suffixes: `b` batch, `t` positions, `d` width, `v` vocabulary, `n` = `b * t` rows, `m`
//! predicted rows, `f` inner width.

use burn::module::{Module, Param};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use zero_kernels::options::AttentionOptions;
use zero_models::{Activation, BertConfig, BertHead, BertKind, ModelConfig};

use super::layers::{Masks, attend, cross_entropy, dense, dense_activated, dense_onto, hidden, norm};
use crate::activations::checkpoint_block;
use crate::fused::dropout;
use crate::layers::{embedding, tied_head};

/// A BERT with the heads that its configuration selects: those of pre-training, or a classifier.
#[derive(Module, Debug)]
pub struct Bert {
    embeddings: Embeddings,
    layers: Vec<Layer>,
    pooler: Option<Linear>,
    transform: Option<Linear>,
    transform_norm: Option<LayerNorm>,
    decoder: Option<Param<Tensor<2>>>,
    prediction_bias: Option<Param<Tensor<1>>>,
    seq_relationship: Option<Linear>,
    classifier: Option<Linear>,
    classifier_dropout: f64,
    #[module(skip)]
    kind: BertKind,
    #[module(skip)]
    activation: Activation,
    /// A copy, as Burn's norms keep theirs private.
    epsilon: f64,
}

#[derive(Module, Debug)]
struct Embeddings {
    word_embeddings: Param<Tensor<2>>,
    position_embeddings: Param<Tensor<2>>,
    token_type_embeddings: Option<Param<Tensor<2>>>,
    norm: LayerNorm,
    dropout: f64,
    /// The row of the first position.
    offset: usize,
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
    #[module(skip)]
    activation: Activation,
    epsilon: f64,
    /// Dropout after attention's output projection.
    output_dropout: f64,
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

impl Bert {
    /// Builds a BERT of this configuration with placeholder values.
    pub fn new(config: &BertConfig, device: &Device) -> Self {
        let (v, d, f) = (config.vocab_size, config.hidden_size, config.intermediate_size);
        let parameters = ModelConfig::from(config.clone()).parameters();
        let has = |layer: &str| {
            let is_of =
                |path: &str| path.strip_prefix(layer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            parameters.iter().any(|param| is_of(&param.path))
        };
        let dense = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(d).with_epsilon(config.layer_norm_eps).init(device);
        let table = |rows| Param::from_tensor(Tensor::<2>::zeros([rows, d], device));
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
            activation: config.hidden_act,
            epsilon: config.layer_norm_eps,
            output_dropout: if config.model_type == BertKind::DistilBert { 0.0 } else { config.hidden_dropout_prob },
            hidden_dropout: config.hidden_dropout_prob,
            attention_dropout: config.attention_probs_dropout_prob,
        };
        let classes = if let BertHead::Classes(classes) = &config.head { classes.len() } else { 0 };
        Self {
            embeddings: Embeddings {
                word_embeddings: table(v),
                position_embeddings: table(config.max_position_embeddings),
                token_type_embeddings: has("embeddings.token_type_embeddings").then(|| table(config.type_vocab_size)),
                norm: norm(),
                dropout: config.hidden_dropout_prob,
                offset: config.max_position_embeddings - config.positions(),
            },
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            pooler: has("pooler").then(|| dense(d, d)),
            transform: has("transform").then(|| dense(d, d)),
            transform_norm: has("transform_norm").then(norm),
            decoder: has("decoder").then(|| table(v)),
            prediction_bias: has("prediction_bias").then(|| Param::from_tensor(Tensor::zeros([v], device))),
            seq_relationship: has("seq_relationship").then(|| dense(d, 2)),
            classifier: has("classifier").then(|| dense(d, classes)),
            classifier_dropout: config.classifier_dropout.unwrap_or(config.hidden_dropout_prob),
            kind: config.model_type,
            activation: config.hidden_act,
            epsilon: config.layer_norm_eps,
        }
    }

    /// Returns the logits of each text's classes, `[b, classes]`. `types_bt` are segment numbers, and `mask_bt` is 1 at tokens and 0 at
    /// padding, both `[b, t]`.
    ///
    /// # Panics
    /// If the model has no classifier.
    pub fn classify(&self, ids_bt: Tensor<2, Int>, types_bt: Tensor<2, Int>, mask_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, _] = ids_bt.dims();
        let hidden_nd = self.hidden_rows(ids_bt, types_bt, mask_bt);
        let pooled_bd = dropout(self.pooled(hidden_nd, b), self.classifier_dropout);
        dense(of_head(&self.classifier, "a classifier"), pooled_bd, None)
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
        let [b, _] = batch.ids_bt.dims();
        let x_nd = self.hidden_rows(batch.ids_bt, batch.types_bt, batch.mask_bt);
        let related = of_head(&self.seq_relationship, "a next-sentence head");
        let follows_b2 = dense(related, self.pooled(x_nd.clone(), b), None);
        let logits_mv = self.prediction_logits(x_nd.select(0, batch.predicted_m));
        [(logits_mv, batch.labels_m), (follows_b2, batch.follows_b)]
            .map(|(logits, labels)| (logits.cast(DType::F32), labels))
    }

    fn hidden_rows(&self, ids_bt: Tensor<2, Int>, types_bt: Tensor<2, Int>, mask_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, _] = ids_bt.dims();
        let mut x_nd = self.embeddings.forward(ids_bt, types_bt, self.epsilon);
        let mask_bt = hidden(mask_bt, &x_nd);
        for layer in &self.layers {
            let (layer, masks) = (layer.clone(), Masks::of_keys(Some(mask_bt.clone())));
            x_nd = checkpoint_block(move |x_nd| layer.forward(x_nd, &masks, b), x_nd);
        }
        x_nd
    }

    /// Pools `b` sequences: `[n, d]` to `[b, d]`.
    fn pooled(&self, hidden_nd: Tensor<2>, b: usize) -> Tensor<2> {
        let [n, d] = hidden_nd.dims();
        let mut first_bd = hidden_nd.reshape([b, n / b, d]).narrow(1, 0, 1).reshape([b, d]);
        if self.kind.is_roberta() {
            first_bd = dropout(first_bd, self.classifier_dropout);
        }
        let pooled_bd = dense(of_head(&self.pooler, "a pooler"), first_bd, None);
        if self.kind == BertKind::DistilBert { relu(pooled_bd) } else { pooled_bd.tanh() }
    }

    /// Computes the logits of the prediction head: `[m, d]` to `[m, v]`.
    fn prediction_logits(&self, hidden_md: Tensor<2>) -> Tensor<2> {
        let what = "a head for masked tokens";
        // RoBERTa's head always uses GELU.
        let activation = if self.kind.is_roberta() { Activation::GeluErf } else { self.activation };
        let x_md = dense_activated(of_head(&self.transform, what), activation, hidden_md);
        let x_1md = norm(of_head(&self.transform_norm, what), self.epsilon, x_md).unsqueeze::<3>();
        let head = self.decoder.as_ref().unwrap_or(&self.embeddings.word_embeddings);
        tied_head(x_1md, head).squeeze_dim::<2>(0) + of_head(&self.prediction_bias, what).val().unsqueeze::<2>()
    }
}

fn of_head<'a, T>(part: &'a Option<T>, what: &str) -> &'a T {
    part.as_ref().unwrap_or_else(|| panic!("this BERT does not have {what}: set BertConfig::head to one that has it"))
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
        let places = self.offset as i64..(self.offset + t) as i64;
        let places_1t = Tensor::<1, Int>::arange(places, &ids_bt.device()).reshape([1, t]);
        let words_btd = embedding(&self.word_embeddings, ids_bt);
        let words_btd = match &self.token_type_embeddings {
            Some(table) => words_btd + embedding(table, types_bt),
            None => words_btd,
        };
        let x_btd = words_btd + embedding(&self.position_embeddings, places_1t);
        let [_, _, d] = x_btd.dims();
        dropout(norm(&self.norm, epsilon, x_btd.reshape([b * t, d])), self.dropout)
    }
}

impl Layer {
    fn forward(&self, x_nd: Tensor<2>, masks: &Masks, batch: usize) -> Tensor<2> {
        let ([_, d], heads) = (x_nd.dims(), self.heads);
        let scale = ((d / heads) as f64).sqrt().recip();
        let parts = [&self.query, &self.key, &self.value].map(|layer| dense(layer, x_nd.clone(), None));
        let options = AttentionOptions { batch, heads, causal: false, window: None, scale, dropout: None, cap: None };
        let mixed_nd = attend(parts, masks, options, self.attention_dropout);
        let sum_nd = dense_onto(&self.attention_output, mixed_nd, self.output_dropout, x_nd);
        let x_nd = norm(&self.attention_norm, self.epsilon, sum_nd);
        let wide_nf = dense_activated(&self.intermediate, self.activation, x_nd.clone());
        norm(&self.output_norm, self.epsilon, dense_onto(&self.output, wide_nf, self.hidden_dropout, x_nd))
    }
}
