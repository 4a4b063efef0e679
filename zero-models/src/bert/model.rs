//! The BERT module: computes logits or a loss from token ids, segment ids and a padding mask.
//!
//! Between embedding and heads, activations are rows `[n, d]`, as in [`crate::gpt2`].
//!
//! Shape suffixes: `b` batch, `t` positions, `d` width of the model, `v` vocabulary, `n` = `b * t` rows, `m` rows with a prediction, `f`
//! inner width.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, LayerNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, activation, s};
use zero_ops::{AttentionOptions, FusedBackend, checkpoint_block, embedding, linear};

use crate::attention::{Masks, attend};
use crate::hf_params::Family;
use crate::layers::{Ids, by_sequence, check_positions, dense, dense_activated, dense_onto, normed};
use crate::linear::{Adaptable, Adapter, Linear, VisitEmbedding, each_field, rows};
use crate::{Activation, BertBatch, BertConfig, BertKind, BertPredictions, init};

/// BERT with the heads that its [`BertHead`](crate::BertHead) selects.
#[derive(Module, Debug)]
pub struct Bert<B: Backend> {
    /// The embeddings.
    pub embeddings: BertEmbeddings<B>,
    /// The layers.
    pub layers: Vec<BertLayer<B>>,
    /// Pooler, which the next-sentence head and a classifier read; it reads the first token.
    pub pooler: Option<Linear<B>>,
    /// Dense layer of the prediction head.
    pub transform: Option<Linear<B>>,
    /// Norm of the prediction head.
    pub transform_norm: Option<LayerNorm<B>>,
    /// Weight of the prediction head `[vocab_size, hidden_size]`, if it is not tied to the word embedding.
    pub decoder: Option<Param<Tensor<B, 2>>>,
    /// Bias of the prediction head `[vocab_size]`.
    pub prediction_bias: Option<Param<Tensor<B, 1>>>,
    /// The next-sentence head.
    pub seq_relationship: Option<Linear<B>>,
    /// The head of a classifier.
    pub classifier: Option<Linear<B>>,
    classifier_dropout: Dropout,
    #[module(skip)]
    kind: BertKind,
    num_attention_heads: usize,
    activation: Activation,
    layer_norm_eps: f64,
}

/// The sum of word, position and segment embeddings, normalized.
#[derive(Module, Debug)]
pub struct BertEmbeddings<B: Backend> {
    /// `[vocab_size, hidden_size]`; also the prediction head's weight if that is tied.
    pub word_embeddings: Param<Tensor<B, 2>>,
    /// LoRA adapter of the word embedding.
    pub word_embeddings_adapter: Option<Adapter<B>>,
    /// `[max_position_embeddings, hidden_size]`
    pub position_embeddings: Param<Tensor<B, 2>>,
    /// `[type_vocab_size, hidden_size]`, if the model has segments.
    pub token_type_embeddings: Option<Param<Tensor<B, 2>>>,
    /// Norm of the sum.
    pub norm: LayerNorm<B>,
    dropout: Dropout,
    layer_norm_eps: f64,
    /// The row of the first position.
    position_offset: usize,
}

/// One layer: attention and feed-forward layer, each added to its input and then normalized.
// Fields are in the order of a Hugging Face layer.
#[derive(Module, Debug)]
pub struct BertLayer<B: Backend> {
    /// Query projection.
    pub query: Linear<B>,
    /// Key projection.
    pub key: Linear<B>,
    /// Value projection.
    pub value: Linear<B>,
    /// Output projection, from the heads back to the width of the model.
    pub attention_output: Linear<B>,
    /// Norm after attention.
    pub attention_norm: LayerNorm<B>,
    /// Up projection, `[hidden_size, intermediate_size]`.
    pub intermediate: Linear<B>,
    /// Down projection, `[intermediate_size, hidden_size]`.
    pub output: Linear<B>,
    /// Norm after the feed-forward layer.
    pub output_norm: LayerNorm<B>,
    num_attention_heads: usize,
    activation: Activation,
    /// Dropout after the output projection of attention.
    output_dropout: Dropout,
    hidden_dropout: Dropout,
    attention_dropout: Dropout,
    layer_norm_eps: f64,
}

impl BertConfig {
    /// Initializes a model: weights from a normal distribution with standard deviation `initializer_range`, biases zero. Hugging Face
    /// also zeroes the padding token's embedding, which a padding mask hides anyway. A parameter is allocated on its first use.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) fails.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Bert<B> {
        self.validate().unwrap_or_else(|error| panic!("{error}"));
        let (v, d, std) = (self.vocab_size, self.hidden_size, self.initializer_range);
        Bert {
            embeddings: BertEmbeddings {
                word_embeddings: init::normal([v, d], std, device),
                word_embeddings_adapter: None,
                position_embeddings: init::normal([self.max_position_embeddings, d], std, device),
                token_type_embeddings: self
                    .has("embeddings.token_type_embeddings")
                    .then(|| init::normal([self.type_vocab_size, d], std, device)),
                norm: init::norm(d, self.layer_norm_eps, device),
                dropout: DropoutConfig::new(self.hidden_dropout_prob).init(),
                layer_norm_eps: self.layer_norm_eps,
                position_offset: self.position_offset(),
            },
            layers: (0..self.num_hidden_layers).map(|_| self.init_layer(device)).collect(),
            pooler: self.has("pooler").then(|| init::linear(d, d, std, device)),
            transform: self.has("transform").then(|| init::linear(d, d, std, device)),
            transform_norm: self.has("transform_norm").then(|| init::norm(d, self.layer_norm_eps, device)),
            decoder: (self.has("decoder") && !self.tie_word_embeddings).then(|| init::normal([v, d], std, device)),
            prediction_bias: self.has("prediction_bias").then(|| init::zeros([v], device)),
            seq_relationship: self.has("seq_relationship").then(|| init::linear(d, 2, std, device)),
            classifier: self.has("classifier").then(|| init::linear(d, self.classes(), std, device)),
            classifier_dropout: DropoutConfig::new(self.classifier_dropout.unwrap_or(self.hidden_dropout_prob)).init(),
            kind: self.model_type,
            num_attention_heads: self.num_attention_heads,
            activation: self.hidden_act,
            layer_norm_eps: self.layer_norm_eps,
        }
    }

    fn init_layer<B: Backend>(&self, device: &B::Device) -> BertLayer<B> {
        let (d, f, std) = (self.hidden_size, self.intermediate_size, self.initializer_range);
        BertLayer {
            query: init::linear(d, d, std, device),
            key: init::linear(d, d, std, device),
            value: init::linear(d, d, std, device),
            attention_output: init::linear(d, d, std, device),
            attention_norm: init::norm(d, self.layer_norm_eps, device),
            intermediate: init::linear(d, f, std, device),
            output: init::linear(f, d, std, device),
            output_norm: init::norm(d, self.layer_norm_eps, device),
            num_attention_heads: self.num_attention_heads,
            activation: self.hidden_act,
            output_dropout: DropoutConfig::new(match self.model_type {
                BertKind::DistilBert => 0.0,
                _ => self.hidden_dropout_prob,
            })
            .init(),
            hidden_dropout: DropoutConfig::new(self.hidden_dropout_prob).init(),
            attention_dropout: DropoutConfig::new(self.attention_probs_dropout_prob).init(),
            layer_norm_eps: self.layer_norm_eps,
        }
    }
}

impl<B: Backend> Bert<B> {
    pub(super) fn kind(&self) -> BertKind {
        self.kind
    }
}

impl<B: FusedBackend> Bert<B> {
    /// Returns the logits of the token at every position, and of whether the second segment follows the first.
    ///
    /// # Shapes
    /// - `ids_bt`: `[b, t]`, each id in `0..vocab_size`
    /// - `types_bt` (segment ids): `[b, t]`, each id in `0..type_vocab_size`
    /// - `mask_bt`: `[b, t]`, 1 at tokens and 0 at padding, which is at the end; `None` if there is no padding
    /// - returns `[b, t, v]` and `[b, 2]`
    ///
    /// # Panics
    /// If `t` exceeds the model's positions, or the model lacks the pre-training heads.
    pub fn forward(&self, ids_bt: Ids<B>, types_bt: Ids<B>, mask_bt: Option<Ids<B>>) -> (Tensor<B, 3>, Tensor<B, 2>) {
        let [b, t] = ids_bt.dims();
        let hidden_nd = self.hidden_rows(ids_bt, types_bt, mask_bt);
        let relation_b2 = self.relation_logits(hidden_nd.clone(), b);
        (by_sequence(self.prediction_logits(hidden_nd), [b, t]), relation_b2)
    }

    /// Returns the last layer's output `[b, t, d]`; shapes as for [`forward`](Self::forward).
    ///
    /// # Panics
    /// If `t` exceeds the model's positions.
    pub fn forward_hidden(&self, ids_bt: Ids<B>, types_bt: Ids<B>, mask_bt: Option<Ids<B>>) -> Tensor<B, 3> {
        let sizes = ids_bt.dims();
        by_sequence(self.hidden_rows(ids_bt, types_bt, mask_bt), sizes)
    }

    /// Returns the logits of the token at every position, `[b, t, v]`; shapes as for [`forward`](Self::forward).
    ///
    /// # Panics
    /// If `t` exceeds the model's positions, or the model has no head for masked tokens.
    pub fn predict_tokens(&self, ids_bt: Ids<B>, types_bt: Ids<B>, mask_bt: Option<Ids<B>>) -> Tensor<B, 3> {
        let sizes = ids_bt.dims();
        let hidden_nd = self.hidden_rows(ids_bt, types_bt, mask_bt);
        by_sequence(self.prediction_logits(hidden_nd), sizes)
    }

    /// Returns the logits of each text's classes, `[b, classes]`; shapes as for [`forward`](Self::forward).
    ///
    /// # Panics
    /// If `t` exceeds the model's positions, or the model has no classifier.
    pub fn classify(&self, ids_bt: Ids<B>, types_bt: Ids<B>, mask_bt: Option<Ids<B>>) -> Tensor<B, 2> {
        let [b, _] = ids_bt.dims();
        let hidden_nd = self.hidden_rows(ids_bt, types_bt, mask_bt);
        let pooled_bd = self.classifier_dropout.forward(self.pooled(hidden_nd, b));
        dense(of_head(&self.classifier, "a classifier"), pooled_bd)
    }

    /// Returns the pre-training loss, `[1]`: [`BertPredictions::loss`].
    ///
    /// # Panics
    /// Same as [`predict`](Self::predict).
    pub fn loss(&self, batch: BertBatch<B>) -> Tensor<B, 1> {
        self.predict(batch).loss()
    }

    /// Returns the predictions at the positions that the batch asks for.
    ///
    /// # Panics
    /// If the batch's rows are longer than the model's positions, or the model lacks the pre-training heads.
    pub fn predict(&self, batch: BertBatch<B>) -> BertPredictions<B> {
        let [b, t] = batch.input_ids_bt.dims();
        let hidden_nd = self.hidden_rows(batch.input_ids_bt, batch.token_type_ids_bt, batch.attention_mask_bt);
        let relation_logits_b2 = self.relation_logits(hidden_nd.clone(), b);
        let labels_n = batch.labels_bt.reshape([b * t]);
        let (hidden_md, labels_m) = match batch.predicted_positions_m {
            Some(rows_m) => (hidden_nd.select(0, rows_m.clone()), labels_n.select(0, rows_m)),
            None => (hidden_nd, labels_n),
        };
        let (token_logits_mv, next_sentence_labels_b) =
            (self.prediction_logits(hidden_md), batch.next_sentence_labels_b);
        BertPredictions { token_logits_mv, labels_m, relation_logits_b2, next_sentence_labels_b }
    }

    /// Returns the weight of the prediction head, `[v, d]`: the word embedding, or its own.
    pub fn head_weight(&self) -> Tensor<B, 2> {
        self.decoder.as_ref().unwrap_or(&self.embeddings.word_embeddings).val()
    }

    fn hidden_rows(&self, ids_bt: Ids<B>, types_bt: Ids<B>, mask_bt: Option<Ids<B>>) -> Tensor<B, 2> {
        let [b, _] = ids_bt.dims();
        let mut x_nd = self.embeddings.forward(ids_bt, types_bt);
        let masks = Masks::padding(mask_bt, &x_nd);
        for layer in &self.layers {
            x_nd = checkpoint_block(|x_nd| layer.forward(x_nd, &masks, b), x_nd);
        }
        x_nd
    }

    /// Pools `b` sequences: `[n, d]` to `[b, d]`.
    fn pooled(&self, hidden_nd: Tensor<B, 2>, b: usize) -> Tensor<B, 2> {
        let [n, d] = hidden_nd.dims();
        let mut first_bd = hidden_nd.reshape([b, n / b, d]).slice(s![.., 0..1, ..]).reshape([b, d]);
        if self.kind.is_roberta() {
            first_bd = self.classifier_dropout.forward(first_bd);
        }
        let pooled_bd = dense(of_head(&self.pooler, "a pooler"), first_bd);
        if self.kind == BertKind::DistilBert { activation::relu(pooled_bd) } else { pooled_bd.tanh() }
    }

    /// Computes the next-sentence logits of `b` sequences: `[n, d]` to `[b, 2]`.
    fn relation_logits(&self, hidden_nd: Tensor<B, 2>, b: usize) -> Tensor<B, 2> {
        dense(of_head(&self.seq_relationship, "a next-sentence head"), self.pooled(hidden_nd, b))
    }

    /// Computes the logits of the prediction head: `[m, d]` to `[m, v]`.
    fn prediction_logits(&self, hidden_md: Tensor<B, 2>) -> Tensor<B, 2> {
        let what = "a head for masked tokens";
        // RoBERTa's head always uses GELU.
        let activation = if self.kind.is_roberta() { Activation::GeluErf } else { self.activation };
        let x_md = dense_activated(of_head(&self.transform, what), activation, hidden_md);
        let x_md = normed(of_head(&self.transform_norm, what), self.layer_norm_eps, x_md);
        linear(x_md, self.head_weight().transpose(), Some(of_head(&self.prediction_bias, what).val()), None)
    }
}

fn of_head<'a, T>(part: &'a Option<T>, what: &str) -> &'a T {
    part.as_ref().unwrap_or_else(|| panic!("this BERT does not have {what}: set BertConfig::head to one that has it"))
}

impl<B: Backend> Adaptable<B> for Bert<B> {
    fn linears(&mut self, each: &mut dyn FnMut(String, &mut Linear<B>)) {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            let path = format!("layers.{i}");
            each_field!(each, path, layer.query, layer.key, layer.value, layer.attention_output);
            each_field!(each, path, layer.intermediate, layer.output);
        }
        let Self { pooler, transform, seq_relationship, classifier, .. } = self;
        let heads = [("pooler", pooler), ("transform", transform), ("seq_relationship", seq_relationship)];
        for (path, head) in heads.into_iter().chain([("classifier", classifier)]) {
            head.iter_mut().for_each(|head| each(path.into(), head));
        }
    }

    fn tables(&mut self, each: &mut VisitEmbedding<'_, B>) {
        let BertEmbeddings { word_embeddings: words, word_embeddings_adapter: adapter, .. } = &mut self.embeddings;
        each("embeddings.word_embeddings", words.lazy_shape().dims(), adapter);
    }
}

impl<B: FusedBackend> BertEmbeddings<B> {
    /// Embeds tokens.
    ///
    /// # Shapes
    /// - `ids_bt`, `types_bt`: `[b, t]`
    /// - returns `[n, d]`
    ///
    /// # Panics
    /// If `t` exceeds the model's positions.
    pub fn forward(&self, ids_bt: Ids<B>, types_bt: Ids<B>) -> Tensor<B, 2> {
        let [b, t] = ids_bt.dims();
        let position_table = self.position_embeddings.val();
        let [longest, d] = position_table.dims();
        let first = self.position_offset;
        check_positions(t, longest - first, "max_position_embeddings");
        let rows_of = |table, ids_bt: Ids<B>| embedding(table, ids_bt.reshape([b * t])).reshape([b, t * d]);
        let words = rows(&self.word_embeddings, &self.word_embeddings_adapter, ids_bt.reshape([b * t]));
        let words = words.reshape([b, t * d]);
        let words = match &self.token_type_embeddings {
            Some(table) => words + rows_of(table.val(), types_bt),
            None => words,
        };
        let positions = position_table.slice(s![first..first + t, ..]).reshape([1, t * d]);
        let x_nd = (words + positions).reshape([b * t, d]);
        self.dropout.forward(normed(&self.norm, self.layer_norm_eps, x_nd))
    }
}

impl<B: FusedBackend> BertLayer<B> {
    /// Applies the layer to rows `[n, d]` of `b` sequences, one sequence after the other.
    fn forward(&self, x_nd: Tensor<B, 2>, masks: &Masks<B>, b: usize) -> Tensor<B, 2> {
        let (heads, epsilon) = (self.num_attention_heads, self.layer_norm_eps);
        let [_, d] = x_nd.dims();
        let scale = ((d / heads) as f64).sqrt().recip();
        let options =
            AttentionOptions { batch: b, heads, causal: false, window: None, scale, dropout: None, cap: None };
        let parts = [&self.query, &self.key, &self.value].map(|layer| dense(layer, x_nd.clone()));
        let mixed_nd = attend(parts, masks, options, &self.attention_dropout);
        let sum_nd = dense_onto(&self.attention_output, mixed_nd, &self.output_dropout, x_nd);
        let x_nd = normed(&self.attention_norm, epsilon, sum_nd);

        let wide_nf = dense_activated(&self.intermediate, self.activation, x_nd.clone());
        let sum_nd = dense_onto(&self.output, wide_nf, &self.hidden_dropout, x_nd);
        normed(&self.output_norm, epsilon, sum_nd)
    }
}
