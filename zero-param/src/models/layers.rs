//! Layers of fused operations, attention with masks, and losses.
//!
//! Shape suffixes: `b` batch, `h` query heads, `k` key heads, `t` positions, `u` positions of keys, `e` width of a head, `d` = `h * e`,
//! `c` = `k * e`, `n` = `b * t` rows, `m` = `b * u`, `r` = `h` or `b * h`, `s` = `t * u` scores, `l` labels, `v` vocabulary.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::activation::{log_sigmoid, log_softmax, relu, softmax};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, s};
use burn_nn::{LayerNorm, Linear};
use zero_kernels::options::{AttentionOptions, CrossEntropyOptions, Gelu, MASKED};
use zero_models::{Activation, Documents, ProblemType};

use crate::fused::plain::capped;
use crate::fused::{attention, dropout, gelu, layer_norm, linear};
use crate::layers::{self, head_cross_entropies, head_cross_entropy};
use crate::random::draw_dropout;

/// Label of a position that is ignored.
pub(super) const IGNORED: i64 = zero_models::loss::IGNORED_LABEL as i64;

/// Applies layer norm to rows. Its epsilon is private in Burn's module, and hence an argument.
pub(super) fn norm(norm: &LayerNorm, epsilon: f64, x_nd: Tensor<2>) -> Tensor<2> {
    layer_norm(x_nd, norm.gamma.val(), norm.beta.as_ref().map(Param::val), epsilon)
}

/// Applies `layer` to rows, and adds `residual_nf` if there is one.
pub(super) fn dense(layer: &Linear, x_nd: Tensor<2>, residual_nf: Option<Tensor<2>>) -> Tensor<2> {
    layers::dense(x_nd, &layer.weight, layer.bias.as_ref(), residual_nf)
}

/// Applies `layer` to rows, then dropout with `probability`, and adds `residual_nf`.
pub(super) fn dense_onto(layer: &Linear, x_nd: Tensor<2>, probability: f64, residual_nf: Tensor<2>) -> Tensor<2> {
    match probability {
        0.0 => dense(layer, x_nd, Some(residual_nf)),
        _ => residual_nf + dropout(dense(layer, x_nd, None), probability),
    }
}

/// Applies `layer` to rows, then its activation.
pub(super) fn dense_activated(layer: &Linear, activation: Activation, x_nd: Tensor<2>) -> Tensor<2> {
    // The activation adds the bias.
    let product_nf = layers::dense(x_nd, &layer.weight, None, None);
    let bias_f = layer.bias.as_ref().map(Param::val);
    match activation {
        Activation::GeluTanh => gelu(Gelu::Tanh, product_nf, bias_f),
        Activation::GeluErf => gelu(Gelu::Erf, product_nf, bias_f),
        Activation::Relu => relu(bias_f.into_iter().fold(product_nf, |x_nf, bias_f| x_nf + bias_f.unsqueeze())),
    }
}

/// Additions and changes to the scores of a pass, beyond those of the attention options.
#[derive(Debug, Clone, Default)]
pub(super) struct Masks {
    /// Added to the scores of keys, `[b, u]`: 0, or a large negative number at padding.
    pub(super) keys_bu: Option<Tensor<2>>,
    /// Added to the scores of all pairs, `[r, s]`, instead of the masks of keys and of the options.
    pub(super) pairs_rs: Option<Tensor<2>>,
    /// The documents of packed rows, which attend only to themselves.
    pub(super) documents: Option<Arc<Documents>>,
}

/// Returns the values to add to the scores of keys, so that keys are hidden where the mask is 0. `like` has the type of the activations.
pub(super) fn hidden(mask_bu: Tensor<2, Int>, like: &Tensor<2>) -> Tensor<2> {
    in_type_of((mask_bu.float() - 1.0) * -MASKED, like)
}

pub(super) fn in_type_of<const D: usize>(x: Tensor<D>, like: &Tensor<2>) -> Tensor<D> {
    if x.dtype() == like.dtype() { x } else { x.cast(like.dtype()) }
}

impl Masks {
    /// Returns the masks of keys.
    pub(super) fn of_keys(keys_bu: Option<Tensor<2>>) -> Self {
        Self { keys_bu, ..Self::default() }
    }

    /// Adds a bias `[h, s]` to the scores of `t` queries and `u` keys, which see each other without a window; returns the sum with the other
    /// masks.
    pub(super) fn with_bias(&self, bias_hs: Tensor<2>, options: AttentionOptions, sizes: [usize; 2]) -> Tensor<2> {
        match self.of_pairs(options, sizes, &bias_hs) {
            None => bias_hs,
            Some(mask_rs) if mask_rs.dims()[0] == 1 => plus(bias_hs, mask_rs),
            Some(mask_rs) => plus(mask_rs, bias_hs),
        }
    }

    /// Returns the masks of the pairs of `t` queries and `u` keys, `[1, s]` or `[b * h, s]`.
    fn of_pairs(&self, options: AttentionOptions, [t, u]: [usize; 2], like: &Tensor<2>) -> Option<Tensor<2>> {
        let AttentionOptions { batch: b, heads: h, causal, .. } = options;
        let keys_rs = self
            .keys_bu
            .clone()
            .map(|keys_bu| keys_bu.reshape([b, 1, 1, u]).expand([b, h, t, u]).reshape([b * h, t * u]));
        if !causal {
            return keys_rs;
        }
        let device = like.device();
        let future_tt = Tensor::<2, Bool>::tril_mask([t, t], 0, &device);
        let mask_tt = Tensor::<2>::zeros([t, t], &device).mask_fill(future_tt, MASKED);
        let causal_1s = in_type_of(mask_tt.reshape([1, t * t]), like);
        Some(match keys_rs {
            Some(keys_rs) => plus(keys_rs, causal_1s),
            None => causal_1s,
        })
    }
}

/// Adds `rows` to every consecutive group of that many rows of `x_rs`.
fn plus(x_rs: Tensor<2>, rows: Tensor<2>) -> Tensor<2> {
    let ([r, s], [own, _]) = (x_rs.dims(), rows.dims());
    (x_rs.reshape([r / own, own * s]) + rows.reshape([1, own * s])).reshape([r, s])
}

/// Computes attention of rows `[n, d]` to keys and values `[m, c]`, with dropout of probabilities. By elementary operations, which store all
/// scores, if these have a bias; then `c = d`.
pub(super) fn attend(parts: [Tensor<2>; 3], masks: &Masks, options: AttentionOptions, probability: f64) -> Tensor<2> {
    if let Some(documents) = &masks.documents {
        let mixed = documents.runs().map(|(rows, batch)| {
            let parts = parts.clone().map(|part| part.slice(s![rows.clone(), ..]));
            attend(parts, &Masks::default(), AttentionOptions { batch, ..options }, probability)
        });
        return Tensor::cat(mixed.collect(), 0);
    }
    let [q_nd, k_mc, v_mc] = parts;
    let Some(mask_rs) = masks.pairs_rs.clone() else {
        let options = AttentionOptions { dropout: draw_dropout(probability, &q_nd.device()), ..options };
        return attention(q_nd, k_mc, v_mc, masks.keys_bu.clone(), options);
    };
    let ([n, d], [m, _], b, h) = (q_nd.dims(), k_mc.dims(), options.batch, options.heads);
    let (t, u, e) = (n / b, m / b, d / h);
    let heads = |x_md: Tensor<2>| x_md.reshape([b, u, h, e]).swap_dims(1, 2);
    let q_bhte = (q_nd.reshape([b, t, h, e]) * options.scale).swap_dims(1, 2);
    let scores_bhtu = capped(q_bhte.matmul(heads(k_mc).transpose()), options.cap);
    let scores_bhtu = plus(scores_bhtu.reshape([b * h, t * u]), mask_rs).reshape([b, h, t, u]);
    let probabilities_bhtu = dropout(softmax(scores_bhtu, 3), probability);
    probabilities_bhtu.matmul(heads(v_mc)).swap_dims(1, 2).reshape([n, d])
}

/// Returns the mean cross-entropy in nats over the rows whose label is not negative, in fp32; 0 if there are none.
pub(super) fn cross_entropy(logits_nv: Tensor<2>, labels_n: Tensor<1, Int>) -> Tensor<1> {
    let [n] = labels_n.dims();
    let labelled_n = labels_n.clone().greater_equal_elem(0).float();
    let logs_nv = log_softmax(logits_nv.cast(DType::F32), 1);
    let logs_n = logs_nv.gather(1, labels_n.clamp_min(0).reshape([n, 1])).reshape([n]);
    (logs_n * labelled_n.clone()).sum().neg() / labelled_n.sum().clamp_min(1.0)
}

/// Returns the mean loss of a classification head's logits `[n, l]`, like `ProblemType::loss` of `zero-models`.
pub(super) fn classes_loss(problem: ProblemType, logits_nl: Tensor<2>, targets: &[f64]) -> Tensor<1> {
    let (shape, device) = (logits_nl.dims(), logits_nl.device());
    if problem == ProblemType::SingleLabelClassification {
        let classes: Vec<i32> = targets.iter().map(|&class| class as i32).collect();
        return cross_entropy(logits_nl, Tensor::from_data(TensorData::from(&*classes), &device));
    }
    let targets: Vec<f32> = targets.iter().map(|&target| target as f32).collect();
    let targets_nl = Tensor::<2>::from_data(TensorData::new(targets, shape), &device);
    let logits_nl = logits_nl.cast(DType::F32);
    match problem {
        ProblemType::Regression => (logits_nl - targets_nl).square(),
        // -log(1 - sigmoid(x)) is x - log(sigmoid(x)).
        _ => (-targets_nl + 1.0) * logits_nl.clone() - log_sigmoid(logits_nl),
    }
    .mean()
}

/// Multiplies rows `[b, d]` by a head `[v, d]`, without its adapter.
pub(super) fn next_logits(x_bd: Tensor<2>, head_vd: &Param<Tensor<2>>) -> Tensor<2> {
    // (w xᵀ)ᵀ: a product needs its operands row-major, and x is the smaller.
    linear(layers::without_adapter(head_vd), x_bd.transpose(), None, None).transpose()
}

/// Returns logits in fp32.
pub(super) fn numbers(logits: Tensor<2>) -> Vec<f32> {
    logits.cast(DType::F32).into_data().try_into_vec().expect("logits are converted to this type")
}

/// Returns the mean cross-entropy in nats of predicting each label `[b, t]` from the rows `[b * t, d]` before it, with a head `[v, d]` and
/// the soft cap of its logits, if they have one: `[1]` over all labels, or `[b]` over those of each row.
pub(super) fn next_token_loss(
    x_nd: Tensor<2>,
    head_vd: &Param<Tensor<2>>,
    cap: Option<f64>,
    labels_bt: Tensor<2, Int>,
    by_row: bool,
) -> Tensor<1> {
    let ([b, t], device) = (labels_bt.dims(), labels_bt.device());
    // A row's last position predicts nothing: ignoring it costs less than copying all others.
    let nothing_b1 = Tensor::full([b, 1], IGNORED, &device);
    let next_n = Tensor::cat(vec![labels_bt.slice([0..b, 1..t]), nothing_b1], 1).reshape([b * t]);
    let options = CrossEntropyOptions { ignored: Some(IGNORED), cap };
    match by_row {
        false => head_cross_entropy(x_nd, head_vd, next_n, options),
        true => head_cross_entropies(x_nd, head_vd, next_n, options, b),
    }
}
