//! What BERT's pre-training loss reads: tensors that the data loader made and checked.

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
    /// Which of the `b * t` positions the prediction head runs at, `[m]`; all of them if `None`.
    pub predicted_positions_m: Option<Tensor<B, 1, Int>>,
}

impl<B: Backend> BertBatch<B> {
    /// A batch that predicts at every position and has no padding.
    ///
    /// # Shapes
    /// - `ids_bt`, `types_bt` (of segments), `labels_bt`: `[b, t]`
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

    /// Marks padding: 1 at tokens and 0 at padding, `[b, t]`.
    pub fn with_attention_mask(mut self, attention_mask_bt: Ids<B>) -> Self {
        self.attention_mask_bt = Some(attention_mask_bt);
        self
    }

    /// Runs the prediction head at these positions only, as indices into the `b * t` positions of the batch.
    ///
    /// With some 15 % of the tokens masked, this saves most of the largest product. The loss is the same as long as
    /// every position with a label is among them; a position without a label does no harm, so that the list may be
    /// filled up to a constant length.
    pub fn with_predicted_positions(mut self, predicted_positions_m: Tensor<B, 1, Int>) -> Self {
        self.predicted_positions_m = Some(predicted_positions_m);
        self
    }
}

/// What a BERT makes of a batch, and what it should have made. Shape suffixes: as of [`BertBatch`], `v` vocabulary.
#[derive(Clone, Debug)]
pub struct BertPredictions<B: Backend> {
    /// Logits of the tokens at the chosen positions, `[m, v]`.
    pub token_logits_mv: Tensor<B, 2>,
    /// The ids there, or [`IGNORED_LABEL`], `[m]`.
    pub labels_m: Tensor<B, 1, Int>,
    /// Logits of whether the second segment follows the first (0) or does not (1), `[b, 2]`.
    pub relation_logits_b2: Tensor<B, 2>,
    /// Which it is, `[b]`.
    pub next_sentence_labels_b: Tensor<B, 1, Int>,
}

impl<B: Backend> BertPredictions<B> {
    /// The loss of pre-training, `[1]`: the sum of [`losses`](Self::losses), as Hugging Face's `BertForPreTraining`.
    pub fn loss(self) -> Tensor<B, 1> {
        self.losses().sum()
    }

    /// The mean cross-entropies in nats over the labelled tokens and over the next-sentence predictions, `[2]`.
    pub fn losses(self) -> Tensor<B, 1> {
        let predicted = cross_entropy_with_ignored(self.token_logits_mv, self.labels_m);
        let related = cross_entropy_with_ignored(self.relation_logits_b2, self.next_sentence_labels_b);
        Tensor::cat(vec![predicted, related], 0)
    }

    /// The parts of labelled tokens and of next-sentence predictions that are right, `[2]`; 0 where nothing is labelled.
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
