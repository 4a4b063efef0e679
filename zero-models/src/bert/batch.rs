//! The input of BERT's pre-training loss: tensors that the data loader has made and checked.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::layers::Ids;
use crate::loss::{IGNORED_LABEL, cross_entropy_with_ignored};

/// One batch of pre-training data. Shape suffixes: `b` batch, `t` positions, `m` chosen positions.
#[derive(Clone, Debug)]
pub struct BertBatch<B: Backend> {
    /// Token ids, some of them replaced by the mask token, `[b, t]`.
    pub input_ids_bt: Ids<B>,
    /// 0 in the first segment and 1 in the second, `[b, t]`.
    pub token_type_ids_bt: Ids<B>,
    /// 1 at tokens and 0 at padding, `[b, t]`; `None` if there is no padding.
    pub attention_mask_bt: Option<Ids<B>>,
    /// The id to predict, or [`IGNORED_LABEL`](crate::loss::IGNORED_LABEL), `[b, t]`.
    pub labels_bt: Ids<B>,
    /// 0 if the second segment follows the first, 1 if not, `[b]`.
    pub next_sentence_labels_b: Tensor<B, 1, Int>,
    /// Indices of the positions, among the `b * t`, where the prediction head runs, `[m]`; all positions if `None`.
    pub predicted_positions_m: Option<Tensor<B, 1, Int>>,
}

impl<B: Backend> BertBatch<B> {
    /// Creates a batch that predicts at every position and has no padding.
    ///
    /// # Shapes
    /// - `ids_bt`, `types_bt` (segment ids), `labels_bt`: `[b, t]`
    /// - `next_sentence_labels_b`: `[b]`
    pub fn new(ids_bt: Ids<B>, types_bt: Ids<B>, labels_bt: Ids<B>, next_sentence_labels_b: Tensor<B, 1, Int>) -> Self {
        Self {
            input_ids_bt: ids_bt,
            token_type_ids_bt: types_bt,
            attention_mask_bt: None,
            labels_bt,
            next_sentence_labels_b,
            predicted_positions_m: None,
        }
    }

    /// Sets the padding mask: 1 at tokens and 0 at padding, `[b, t]`.
    pub fn with_attention_mask(mut self, attention_mask_bt: Ids<B>) -> Self {
        self.attention_mask_bt = Some(attention_mask_bt);
        self
    }

    /// Runs the prediction head only at these positions, given as indices into the `b * t` positions of the batch.
    ///
    /// If about 15 % of the tokens are masked, this saves most of the largest matrix product. The loss stays the same as long as every
    /// position with a label is included. A position without a label does no harm, so the list may be padded to a constant length.
    pub fn with_predicted_positions(mut self, predicted_positions_m: Tensor<B, 1, Int>) -> Self {
        self.predicted_positions_m = Some(predicted_positions_m);
        self
    }
}

/// The predictions of a BERT for a batch, with their labels. Shape suffixes: those of [`BertBatch`], and `v` vocabulary.
#[derive(Clone, Debug)]
pub struct BertPredictions<B: Backend> {
    /// Logits of the tokens at the chosen positions, `[m, v]`.
    pub token_logits_mv: Tensor<B, 2>,
    /// Labels of these positions: ids, or [`IGNORED_LABEL`], `[m]`.
    pub labels_m: Tensor<B, 1, Int>,
    /// Logits of the next-sentence prediction, `[b, 2]`: 0 if the second segment follows the first, 1 if not.
    pub relation_logits_b2: Tensor<B, 2>,
    /// Labels of the next-sentence prediction, `[b]`.
    pub next_sentence_labels_b: Tensor<B, 1, Int>,
}

impl<B: Backend> BertPredictions<B> {
    /// Returns the pre-training loss, `[1]`: the sum of [`losses`](Self::losses), as in Hugging Face's `BertForPreTraining`.
    pub fn loss(self) -> Tensor<B, 1> {
        self.losses().sum()
    }

    /// Returns the mean cross-entropies in nats over the labelled tokens and over the next-sentence predictions, `[2]`.
    pub fn losses(self) -> Tensor<B, 1> {
        let predicted = cross_entropy_with_ignored(self.token_logits_mv, self.labels_m);
        let related = cross_entropy_with_ignored(self.relation_logits_b2, self.next_sentence_labels_b);
        Tensor::cat(vec![predicted, related], 0)
    }

    /// Returns the accuracies of the labelled tokens and of the next-sentence predictions, `[2]`; 0 where nothing is labelled.
    pub fn accuracies(self) -> Tensor<B, 1> {
        let tokens = accuracy(self.token_logits_mv, self.labels_m);
        Tensor::cat(vec![tokens, accuracy(self.relation_logits_b2, self.next_sentence_labels_b)], 0)
    }
}

fn accuracy<B: Backend>(logits_nv: Tensor<B, 2>, labels_n: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let labelled = labels_n.clone().not_equal_elem(IGNORED_LABEL).int().sum().float().clamp_min(1.0);
    let right = logits_nv.argmax(1).flatten::<1>(0, 1).equal(labels_n).int().sum().float();
    right / labelled
}
