//! Attention over rows, <https://arxiv.org/abs/1706.03762>. Fused kernels compute it, or elementary operations if scores have a bias,
//! or if no kernel drops out probabilities.
//!
//! Shape suffixes: `b` batch, `h` query heads, `k` key heads, `t` positions, `u` positions of keys, `e` width of a head, `d` = `h * e`
//! width of the heads, `c` = `k * e`, `n` = `b * t` rows, `m` = `b * u`, `r` = `b * h`, `h` or 1, `s` = `t * u` scores.

use std::cell::OnceCell;

use burn::nn::Dropout;
use burn::tensor::{Bool, Int, Tensor, activation, s};
use zero_kernels::options::MASKED;
use zero_ops::{AttentionDropout, AttentionOptions, FusedBackend};

use crate::Documents;

/// The masks of one forward pass, shared by all layers; all layers with a window have the same window. Masks are added to the scores:
/// unlike filling, an addition costs nothing in the backward pass.
pub(crate) struct Masks<B: FusedBackend> {
    /// Mask of the keys, `[b, u]`; `None` if there is no padding.
    keys_bu: Option<Tensor<B, 2>>,
    /// Masks of query-key pairs, `[r, s]`, without and with a window, for elementary operations; computed on first use.
    pairs_rs: [OnceCell<Option<Tensor<B, 2>>>; 2],
    /// The documents, if rows are packed.
    documents: Option<Documents>,
    /// True if the masks without a window include a bias, which no kernel adds.
    is_biased: bool,
}

impl<B: FusedBackend> Masks<B> {
    /// Returns masks that hide only what the attention options hide.
    pub(crate) fn none() -> Self {
        Self::of_keys(None)
    }

    /// Returns masks that add `keys_bu` to the scores of keys.
    pub(crate) fn of_keys(keys_bu: Option<Tensor<B, 2>>) -> Self {
        Self { keys_bu, pairs_rs: Default::default(), documents: None, is_biased: false }
    }

    /// Lets documents of packed rows attend only to themselves.
    pub(crate) fn within(self, documents: Option<&Documents>) -> Self {
        Self { documents: documents.cloned(), ..self }
    }

    /// Returns masks that hide the positions where `attention_mask_bu` is 0, if there is a mask. `like_nd` has the type of the
    /// activations.
    pub(crate) fn padding(attention_mask_bu: Option<Tensor<B, 2, Int>>, like_nd: &Tensor<B, 2>) -> Self {
        Self::of_keys(attention_mask_bu.map(|mask_bu| hidden(mask_bu, like_nd)))
    }

    /// Adds a bias `[h, s]` per head to the scores of `t` queries and `u` keys, where `pairs` is `[t, u]`.
    pub(crate) fn biased(self, bias_hs: Tensor<B, 2>, options: AttentionOptions, pairs: [usize; 2]) -> Self {
        // Here and not on first use: a value made within a checkpointed block is recomputed for every block that reads it.
        let pairs_rs = match self.pairs_rs(options, pairs, &bias_hs) {
            None => bias_hs,
            Some(mask_1s) if mask_1s.dims()[0] == 1 => plus(bias_hs, mask_1s),
            Some(mask_rs) => plus(mask_rs, bias_hs),
        };
        Self { pairs_rs: [OnceCell::from(Some(pairs_rs)), OnceCell::new()], is_biased: true, ..self }
    }

    /// Returns the masks of the pairs of `t` queries and `u` keys, in the type of `like_nd`.
    fn pairs_rs(&self, options: AttentionOptions, [t, u]: [usize; 2], like_nd: &Tensor<B, 2>) -> Option<Tensor<B, 2>> {
        let made = self.pairs_rs[usize::from(options.window.is_some())].get_or_init(|| {
            let device = like_nd.device();
            let (b, h) = (options.batch, options.heads);
            let keys = self.keys_bu.clone();
            let keys_rs =
                keys.map(|keys_bu| keys_bu.reshape([b, 1, 1, u]).expand([b, h, t, u]).reshape([b * h, t * u]));
            if options.causal {
                let future_tt = Tensor::<B, 2, Bool>::tril_mask([t, t], 0, &device);
                let mut mask_tt = Tensor::zeros([t, t], &device).mask_fill(future_tt, MASKED);
                if let Some(window) = options.window {
                    let past_tt = Tensor::<B, 2, Bool>::triu_mask([t, t], 1 - window.min(t) as i64, &device);
                    mask_tt = mask_tt.mask_fill(past_tt, MASKED);
                }
                let causal_1s = in_type_of(mask_tt.reshape([1, t * t]), like_nd);
                return Some(match keys_rs {
                    Some(keys_rs) => plus(keys_rs, causal_1s),
                    None => causal_1s,
                });
            }
            keys_rs
        });
        made.clone()
    }
}

/// Adds `rows` to every consecutive group of that many rows of `x_rs`.
fn plus<B: FusedBackend>(x_rs: Tensor<B, 2>, rows: Tensor<B, 2>) -> Tensor<B, 2> {
    let ([r, s], [own, _]) = (x_rs.dims(), rows.dims());
    (x_rs.reshape([r / own, own * s]) + rows.reshape([1, own * s])).reshape([r, s])
}

/// Returns the values to add to the scores of keys, so that keys are hidden where the mask is 0.
pub(crate) fn hidden<B: FusedBackend>(mask_bu: Tensor<B, 2, Int>, like_nd: &Tensor<B, 2>) -> Tensor<B, 2> {
    in_type_of((mask_bu.float() - 1.0) * -MASKED, like_nd)
}

/// Computes `cap * tanh(x / cap)`, which is nearly `x` for small `x`, and never more than `cap`.
pub(crate) fn soft_capped<B: FusedBackend, const D: usize>(x: Tensor<B, D>, cap: f64) -> Tensor<B, D> {
    (x / cap).tanh() * cap
}

/// Casts a mask to the type of the activations.
fn in_type_of<B: FusedBackend>(mask: Tensor<B, 2>, x_nd: &Tensor<B, 2>) -> Tensor<B, 2> {
    if mask.dtype() == x_nd.dtype() { mask } else { mask.cast(x_nd.dtype()) }
}

/// Returns `true` if `dropout` applies to tensors like `x_nd`; it does not in evaluation.
pub(crate) fn is_active<B: FusedBackend>(dropout: &Dropout, x_nd: &Tensor<B, 2>) -> bool {
    dropout.prob > 0.0 && B::ad_enabled(&x_nd.device())
}

/// Computes the attention of queries to keys and values.
///
/// # Shapes
/// - `q_nd`: `[n, d]`, `k_mc`, `v_mc`: `[m, c]`
/// - returns `[n, d]`
pub(crate) fn attend<B: FusedBackend>(
    [q_nd, k_mc, v_mc]: [Tensor<B, 2>; 3],
    masks: &Masks<B>,
    options: AttentionOptions,
    dropout: &Dropout,
) -> Tensor<B, 2> {
    if let Some(documents) = &masks.documents {
        let attend = |parts, masks: &_, options| attend(parts, masks, options, dropout);
        return attend_within(documents, [q_nd, k_mc, v_mc], options, attend);
    }
    let is_square = q_nd.dims() == k_mc.dims() && options.window.is_none();
    match is_active(dropout, &q_nd) {
        is_active if masks.is_biased || is_active && !(is_square && B::draws_dropout(&q_nd.device())) => {
            attend_by_scores([q_nd, k_mc, v_mc], masks, options, dropout)
        }
        is_active => {
            let options = if is_active { dropping(options, dropout, &q_nd) } else { options };
            zero_ops::attention(q_nd, k_mc, v_mc, masks.keys_bu.clone(), options)
        }
    }
}

/// Computes attention among the rows of each document, by `attend` on documents of one length at a time.
fn attend_within<B: FusedBackend, const N: usize>(
    documents: &Documents,
    parts: [Tensor<B, 2>; N],
    options: AttentionOptions,
    attend: impl Fn([Tensor<B, 2>; N], &Masks<B>, AttentionOptions) -> Tensor<B, 2>,
) -> Tensor<B, 2> {
    let mixed = documents.runs().map(|(rows, batch)| {
        let parts = parts.clone().map(|part| part.slice(s![rows.clone(), ..]));
        attend(parts, &Masks::none(), AttentionOptions { batch, ..options })
    });
    Tensor::cat(mixed.collect(), 0)
}

/// Lets the kernel drop out probabilities, with a key drawn as for a tensor's dropout mask.
fn dropping<B: FusedBackend>(options: AttentionOptions, dropout: &Dropout, like: &Tensor<B, 2>) -> AttentionOptions {
    let key = B::next_dropout_key(&like.device());
    AttentionOptions { dropout: Some(AttentionDropout { probability: dropout.prob, key }), ..options }
}

/// Same as [`attend`], on rows `[n, 3 * d]` that hold query, key and value side by side.
pub(crate) fn attend_packed<B: FusedBackend>(
    qkv_nw: Tensor<B, 2>,
    masks: &Masks<B>,
    options: AttentionOptions,
    dropout: &Dropout,
) -> Tensor<B, 2> {
    if let Some(documents) = &masks.documents {
        let attend = |[qkv_nw]: [_; 1], masks: &_, options| attend_packed(qkv_nw, masks, options, dropout);
        return attend_within(documents, [qkv_nw], options, attend);
    }
    match is_active(dropout, &qkv_nw) {
        true if options.window.is_some() || !B::draws_dropout(&qkv_nw.device()) => {
            let parts = qkv_nw.chunk(3, 1).try_into().expect("three thirds");
            attend_by_scores(parts, masks, options, dropout)
        }
        is_active => {
            let options = if is_active { dropping(options, dropout, &qkv_nw) } else { options };
            zero_ops::packed_attention(qkv_nw, masks.keys_bu.clone(), options)
        }
    }
}

/// Same as [`attend`], by elementary operations.
fn attend_by_scores<B: FusedBackend>(
    [q_nd, k_mc, v_mc]: [Tensor<B, 2>; 3],
    masks: &Masks<B>,
    options: AttentionOptions,
    dropout: &Dropout,
) -> Tensor<B, 2> {
    let ([n, d], [m, c]) = (q_nd.dims(), k_mc.dims());
    let (b, h) = (options.batch, options.heads);
    let (t, u, e) = (n / b, m / b, d / h);
    let k = c / e;
    let heads = |x_mc: Tensor<B, 2>| x_mc.reshape([b, u, k, e]).swap_dims(1, 2);
    // Query heads that share a key head become its rows, one after the other.
    let by_key = |x_bhtw: Tensor<B, 4>| {
        let [.., width] = x_bhtw.dims();
        if k == h { x_bhtw } else { x_bhtw.reshape([b, k, h / k * t, width]) }
    };
    let mask_rs = masks.pairs_rs(options, [t, u], &q_nd);
    // The reshape leaves a tensor with no other reference, which is scaled in place.
    let q_bhte = (q_nd.reshape([b, t, h, e]) * options.scale).swap_dims(1, 2);
    let mut scores_bhtu = by_key(q_bhte).matmul(heads(k_mc).transpose()).reshape([b, h, t, u]);
    if let Some(cap) = options.cap {
        scores_bhtu = soft_capped(scores_bhtu, cap);
    }
    if let Some(mask_rs) = mask_rs {
        scores_bhtu = plus(scores_bhtu.reshape([b * h, t * u]), mask_rs).reshape([b, h, t, u]);
    }
    let probabilities_bhtu = dropout.forward(activation::softmax(scores_bhtu, 3));
    by_key(probabilities_bhtu).matmul(heads(v_mc)).reshape([b, h, t, e]).swap_dims(1, 2).reshape([n, d])
}
