//! Cross-entropy over a vocabulary: a mean, from logits and target indices.
//!
//! `-log softmax(logits)[target] = log(sum(exp(logits))) - logits[target]`, where the row's largest logit is subtracted before the
//! exponentials. The full table of log-probabilities is never formed.
//!
//! Shape suffixes: `n` rows, `v` vocabulary.

#[cfg(feature = "burn")]
use burn::tensor::backend::Backend;
#[cfg(feature = "burn")]
use burn::tensor::{FloatDType, Int, Tensor, s};
#[cfg(feature = "burn")]
use zero_ops::{CrossEntropyOptions, FusedBackend, linear_cross_entropy};

#[cfg(feature = "burn")]
use crate::layers::Ids;

/// Label of a position that the loss ignores.
pub const IGNORED_LABEL: i32 = -100;

/// Computes the mean cross-entropy in nats of predicting each label from the tokens before it in its row: `[1]` over all labels, or `[b]`
/// over those of each row. Labels are shifted here. `model` returns the rows `[n, d]` that the head reads, and the head's weight `[v, d]`.
///
/// # Panics
/// If rows have fewer than 2 tokens, or labels have another shape.
#[cfg(feature = "burn")]
pub(crate) fn next_token_loss<B: FusedBackend>(
    input_ids_bt: Ids<B>,
    labels_bt: Ids<B>,
    logit_cap: Option<f64>,
    by_row: bool,
    model: impl FnOnce(Ids<B>) -> (Tensor<B, 2>, Tensor<B, 2>),
) -> Tensor<B, 1> {
    let [b, t] = input_ids_bt.dims();
    assert!(t >= 2, "a next-token loss needs rows of at least 2 tokens, got {t}");
    assert_eq!(labels_bt.dims(), [b, t], "labels must have the shape of input_ids");
    // The last position of a row predicts nothing: ignoring it costs less than copying all others.
    let nothing_b1 = labels_bt.zeros_like().slice(s![.., 0..1]) + IGNORED_LABEL;
    let next_n = Tensor::cat(vec![labels_bt.slice(s![.., 1..t]), nothing_b1], 1).reshape([b * t]);
    let (hidden_nd, weight_vd) = model(input_ids_bt);
    let options = CrossEntropyOptions { ignored: Some(IGNORED_LABEL.into()), cap: logit_cap };
    let loss = |hidden_nd, next_n| linear_cross_entropy(hidden_nd, weight_vd.clone(), next_n, options);
    if !by_row {
        return loss(hidden_nd, next_n);
    }
    let row = |row| {
        let tokens = row * t..(row + 1) * t;
        loss(hidden_nd.clone().slice(s![tokens.clone(), ..]), next_n.clone().slice(s![tokens]))
    };
    Tensor::cat((0..b).map(row).collect(), 0)
}

/// Implements logits and losses of a causal language model, given its `hidden_rows`, its `lm_head`, its token embedding, and the soft
/// cap of its logits if it has one.
#[cfg(feature = "burn")]
macro_rules! next_token_model {
    ($model:ident, $table:ident $(, $cap:ident)?) => {
        impl<B: FusedBackend> $model<B> {
            /// Returns the logits of the next token at every position.
            ///
            /// # Shapes
            /// - `input_ids_bt`: `[b, t]`, each id in `0..vocab_size`
            /// - returns `[b, t, v]`
            ///
            /// # Panics
            /// If `t` exceeds the model's positions.
            pub fn forward(&self, input_ids_bt: $crate::Ids<B>) -> Tensor<B, 3> {
                let sizes = input_ids_bt.dims();
                $crate::layers::by_sequence(self.logits(self.hidden_rows(input_ids_bt, None)), sizes)
            }

            /// Returns the head's input: the output of the final norm.
            ///
            /// # Shapes
            /// - `input_ids_bt`: `[b, t]`
            /// - returns `[b, t, d]`
            ///
            /// # Panics
            /// If `t` exceeds the model's positions.
            pub fn forward_hidden(&self, input_ids_bt: $crate::Ids<B>) -> Tensor<B, 3> {
                let sizes = input_ids_bt.dims();
                $crate::layers::by_sequence(self.hidden_rows(input_ids_bt, None), sizes)
            }

            /// Returns the mean cross-entropy in nats of predicting each token of a row from the tokens before it, over all
            /// `b * (t - 1)` predictions, as Hugging Face computes it with `labels=input_ids`.
            ///
            /// # Shapes
            /// - `input_ids_bt`: `[b, t]`
            /// - returns `[1]`
            ///
            /// # Panics
            /// If `t` is below 2 or exceeds the model's positions.
            pub fn loss(&self, input_ids_bt: $crate::Ids<B>) -> Tensor<B, 1> {
                self.loss_with_labels(input_ids_bt.clone(), input_ids_bt)
            }

            /// Same as [`loss`](Self::loss) with other labels; those equal to [`IGNORED_LABEL`](crate::loss::IGNORED_LABEL) do not
            /// count. Labels are shifted here, as in Hugging Face: the prediction at position `i` is compared with the label at `i + 1`.
            ///
            /// # Shapes
            /// - `input_ids_bt`, `labels_bt`: `[b, t]`
            /// - returns `[1]`
            ///
            /// # Panics
            /// If `t` is below 2 or exceeds the model's positions, or if the shapes differ.
            pub fn loss_with_labels(&self, input_ids_bt: $crate::Ids<B>, labels_bt: $crate::Ids<B>) -> Tensor<B, 1> {
                self.packed_loss(input_ids_bt, labels_bt, None)
            }

            /// Same as [`loss_with_labels`](Self::loss_with_labels) for packed rows: each document begins at position 0 and attends
            /// only to itself. Its first label should be ignored, because the token before it is of another document.
            ///
            /// # Panics
            /// Same as [`loss_with_labels`](Self::loss_with_labels), or if the documents are not as long as the rows together.
            pub fn packed_loss(
                &self,
                input_ids_bt: $crate::Ids<B>,
                labels_bt: $crate::Ids<B>,
                documents: Option<&$crate::Documents>,
            ) -> Tensor<B, 1> {
                let tokens = input_ids_bt.shape().num_elements();
                assert!(documents.is_none_or(|documents| documents.tokens() == tokens), "documents of other rows");
                let model = |ids_bt| (self.hidden_rows(ids_bt, documents), self.head_weight());
                $crate::loss::next_token_loss(input_ids_bt, labels_bt, self.cap(), false, model)
            }

            /// Returns the mean loss of each row, like [`loss_with_labels`](Self::loss_with_labels) of that row alone: `[b]`. The sum of a
            /// row's log-probabilities is this mean, times its number of labels, negated.
            ///
            /// # Panics
            /// Same as [`loss_with_labels`](Self::loss_with_labels).
            pub fn row_losses(&self, input_ids_bt: $crate::Ids<B>, labels_bt: $crate::Ids<B>) -> Tensor<B, 1> {
                let model = |ids_bt| (self.hidden_rows(ids_bt, None), self.head_weight());
                $crate::loss::next_token_loss(input_ids_bt, labels_bt, self.cap(), true, model)
            }

            /// Returns the head's weight, `[v, d]`: the token embedding, or its own.
            pub fn head_weight(&self) -> Tensor<B, 2> {
                self.lm_head.as_ref().unwrap_or(&self.$table).val()
            }

            /// Computes logits from rows: `[n, d]` to `[n, v]`.
            fn logits(&self, hidden_nd: Tensor<B, 2>) -> Tensor<B, 2> {
                let logits_nv = zero_ops::linear(hidden_nd, self.head_weight().transpose(), None, None);
                match self.cap() {
                    Some(cap) => $crate::attention::soft_capped(logits_nv, cap),
                    None => logits_nv,
                }
            }

            fn cap(&self) -> Option<f64> {
                None$(.or(self.$cap))?
            }
        }
    };
}
#[cfg(feature = "burn")]
pub(crate) use next_token_model;

/// Returns the mean cross-entropy in nats over the rows whose label is not [`IGNORED_LABEL`]; 0 if there are none.
///
/// # Shapes
/// - `logits_nv`: `[n, v]`
/// - `labels_n`: `[n]`, each in `0..v` or [`IGNORED_LABEL`]
/// - returns `[1]`
#[cfg(feature = "burn")]
pub fn cross_entropy_with_ignored<B: Backend>(logits_nv: Tensor<B, 2>, labels_n: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let ignored_n = labels_n.clone().equal_elem(IGNORED_LABEL);
    let targets_n = labels_n.mask_fill(ignored_n.clone(), 0);
    let counted = ignored_n.clone().bool_not().float().sum().clamp_min(1.0);
    let losses_n = row_losses(logits_nv, targets_n).mask_fill(ignored_n, 0.0);
    losses_n.sum() / counted
}

/// Casts 16-bit logits to fp32, and leaves others unchanged.
#[cfg(feature = "burn")]
pub(crate) fn in_fp32<B: Backend>(logits_nv: Tensor<B, 2>) -> Tensor<B, 2> {
    if logits_nv.dtype().size() < 4 { logits_nv.cast(FloatDType::F32) } else { logits_nv }
}

/// Returns the cross-entropy of each row, `[n]`. For 16-bit logits it is computed in fp32: a mean over thousands of rows needs more
/// precision.
#[cfg(feature = "burn")]
fn row_losses<B: Backend>(logits_nv: Tensor<B, 2>, targets_n: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let [n, _] = logits_nv.dims();
    let logits_nv = in_fp32(logits_nv);
    // The last use of the logits is the subtraction, so that it and the exponential may reuse their memory.
    let largest_n1 = logits_nv.clone().detach().max_dim(1);
    let picked_n1 = logits_nv.clone().gather(1, targets_n.reshape([n, 1]));
    let sum_n1 = (logits_nv - largest_n1.clone()).exp().sum_dim(1);
    (sum_n1.log() + largest_n1 - picked_n1).reshape([n])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;

    fn logits() -> Tensor<Flex, 2> {
        Tensor::from_floats([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [-1.0, 5.0, 0.5]], &Default::default())
    }

    fn expected(row: [f64; 3], target: usize) -> f64 {
        row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[target]
    }

    #[test]
    fn is_the_mean_of_the_rows() {
        let targets = Tensor::from_ints([0, 2, 1], &Default::default());
        let got = cross_entropy_with_ignored(logits(), targets).into_scalar() as f64;
        let rows = expected([1.0, 2.0, 3.0], 0) + expected([0.0; 3], 2) + expected([-1.0, 5.0, 0.5], 1);
        assert!((got - rows / 3.0).abs() < 1e-6);
    }

    #[test]
    fn ignored_rows_do_not_count() {
        let labels = Tensor::from_ints([0, IGNORED_LABEL, 1], &Default::default());
        let got = cross_entropy_with_ignored(logits(), labels).into_scalar() as f64;
        let rows = expected([1.0, 2.0, 3.0], 0) + expected([-1.0, 5.0, 0.5], 1);
        assert!((got - rows / 2.0).abs() < 1e-6);
        let none = Tensor::from_ints([IGNORED_LABEL; 3], &Default::default());
        assert_eq!(cross_entropy_with_ignored(logits(), none).into_scalar(), 0.0);
    }

    #[test]
    fn large_logits_stay_finite() {
        let logits = Tensor::<Flex, 2>::from_floats([[1e4, -1e4, 0.0]], &Default::default());
        let target = Tensor::from_ints([1], &Default::default());
        let got = cross_entropy_with_ignored(logits, target).into_scalar();
        assert!((got - 2e4).abs() < 1.0, "{got}");
    }
}
