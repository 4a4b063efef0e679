//! The cache of keys and values of generation, in preallocated memory: a new position is written in place.
//!
//! Shape suffixes: `b` rows, `k` key heads, `g` query heads per key head, `t` positions, `e` width of a head, `n` = `b * t` rows of
//! activations, `d` width of the queries, `c` = `k * e`.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData, activation, s};
use zero_core::config::Float;
use zero_kernels::options::AttentionOptions;
use zero_models::generate::CachedRows;

use super::layers::{Masks, attend, hidden};
use crate::fused::plain::capped;

/// Keys and values of the tokens that a model has read, so that each token is read once. Shorter rows are padded on the left.
#[derive(Debug)]
pub struct KvCache {
    pub(super) rows: CachedRows,
    layers: Vec<Kept>,
    /// Keys and values of the encoder's output, per layer, for cross-attention.
    across: Vec<[Tensor<4>; 2]>,
    /// Padding mask of the encoder's output, `[b, u]`, if there is padding.
    hidden_across: Option<Tensor<2>>,
    /// The tokens that were read, `[b, length]`, if they may have to be read again.
    tokens: Option<Tensor<2, Int>>,
}

/// Keys and values of some positions in one layer, `[b, k, places, e]`.
#[derive(Debug)]
struct Kept {
    parts: [Tensor<4>; 2],
    /// The first position stored.
    from: usize,
}

impl Kept {
    /// Writes `new` `[b, k, t, e]` at position `at`. Keeps at least `least` of the stored positions.
    fn put(&mut self, new: [Tensor<4>; 2], at: usize, least: usize) {
        let ([.., places, _], [.., t, _]) = (self.parts[0].dims(), new[0].dims());
        let moved = if at + t - self.from > places { at - least - self.from } else { 0 };
        for (part, new) in self.parts.iter_mut().zip(new) {
            // The only reference, so that the write is in place.
            let mut own = std::mem::replace(part, new.clone());
            let place = at - self.from - moved;
            if moved > 0 {
                let stays = own.clone().slice(s![.., .., moved..moved + place, ..]);
                own = own.slice_assign(s![.., .., 0..place, ..], stays);
            }
            *part = own.slice_assign(s![.., .., place..place + t, ..], new);
        }
        self.from += moved;
    }

    /// Grows the memory to `places` positions.
    fn grow(&mut self, places: usize) {
        for part in &mut self.parts {
            let [b, k, old, e] = part.dims();
            let all = Tensor::zeros([b, k, places, e], (&part.device(), part.dtype()));
            *part = all.slice_assign(s![.., .., 0..old, ..], part.clone());
        }
    }

    /// Returns the keys and the values of these positions, as `dtype`.
    fn of(&self, positions: Range<usize>, dtype: DType) -> [Tensor<4>; 2] {
        let places = positions.start - self.from..positions.end - self.from;
        self.parts.clone().map(|part| as_dtype(part.slice(s![.., .., places.clone(), ..]), dtype))
    }
}

fn as_dtype<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

impl KvCache {
    /// Creates an empty cache for these rows.
    pub fn new(rows: CachedRows) -> Self {
        Self { rows, layers: Vec::new(), across: Vec::new(), hidden_across: None, tokens: None }
    }

    /// Sets the padding mask of cross-attention before the first pass: 1 at tokens and 0 at padding. `like` has the type of the activations.
    pub(super) fn begin_across(&mut self, mask_bu: Option<&Tensor<2, Int>>, like: &Tensor<2>) {
        if self.rows.is_empty() {
            self.hidden_across = mask_bu.cloned().map(|mask_bu| hidden(mask_bu, like));
        }
    }

    /// Returns the tokens `[b, t]` to read now. If they make a text longer than `longest`, clears the cache and returns them with all
    /// earlier tokens: a model that rotates longer texts by other angles reads them again.
    pub(super) fn with_earlier(&mut self, ids_bt: Tensor<2, Int>, longest: usize) -> Tensor<2, Int> {
        let [_, t] = ids_bt.dims();
        let all = match self.tokens.take() {
            Some(earlier) => Tensor::cat(vec![earlier, ids_bt.clone()], 1),
            None => ids_bt.clone(),
        };
        self.tokens = Some(all.clone());
        if !self.rows.rereads(t, longest) {
            return ids_bt;
        }
        self.layers.clear();
        all
    }

    /// Returns the padding mask of these key positions, `[b, keys]`, if they include padding.
    fn hidden(&self, keys: Range<usize>, like: &Tensor<2>) -> Option<Tensor<2>> {
        let (width, hidden) = (keys.len(), self.rows.hidden(keys)?);
        let b = hidden.len() / width;
        Some(Tensor::from_data(TensorData::new(hidden, [b, width]), (&like.device(), like.dtype())))
    }

    /// Adds the keys and values of new positions to layer `layer`, and computes the attention of these positions to all positions so
    /// far, or to those in the window. At most one window of positions that have left it is kept. The bias, if given, is added to the
    /// scores of each head.
    ///
    /// # Shapes
    /// - `q_nd`: `[n, d]`; `n` is `b` if positions were read before, or if there is a bias
    /// - `k_nc`, `v_nc`: `[n, c]`, with as many heads or fewer
    /// - `bias_ht`: `[h, t]`, for all positions so far
    /// - returns `[n, d]`
    pub(super) fn attend(
        &mut self,
        layer: usize,
        [q_nd, k_nc, v_nc]: [Tensor<2>; 3],
        options: AttentionOptions,
        bias_ht: Option<Tensor<2>>,
    ) -> Tensor<2> {
        let AttentionOptions { batch: b, window, .. } = options;
        let [n, d] = q_nd.dims();
        let (keys, is_first) = (self.rows.keys(n / b, window), self.rows.is_empty());
        let end = keys.end;
        let hidden_bt = self.hidden(if is_first { 0..end } else { keys.clone() }, &q_nd);
        let dtype = self.rows.dtype().map_or(k_nc.dtype(), |dtype| match dtype {
            Float::F32 => DType::F32,
            Float::F16 => DType::F16,
            Float::Bf16 => DType::BF16,
        });
        let new = [&k_nc, &v_nc].map(|x_nc| as_dtype(by_head(x_nc.clone(), d, options), dtype));
        if is_first {
            let new = new.map(|x_bkte| x_bkte.slice(s![.., .., keys.clone(), ..]));
            let ([b, k, t, e], device) = (new[0].dims(), q_nd.device());
            let places = self.rows.places(t, window);
            let empty = || Tensor::zeros([b, k, places, e], (&device, dtype));
            let mut kept = Kept { parts: [empty(), empty()], from: keys.start };
            kept.put(new, keys.start, 0);
            self.layers.push(kept);
            if bias_ht.is_none() {
                let masks = Masks { keys_bu: hidden_bt, ..Masks::default() };
                return attend([q_nd, k_nc, v_nc], &masks, options, 0.0);
            }
        } else {
            let kept = &mut self.layers[layer];
            let [.., places, _] = kept.parts[0].dims();
            // No position has left the window, so none can be overwritten.
            if end - kept.from > places && keys.len() >= places {
                kept.grow(2 * places);
            }
            kept.put(new, end - 1, keys.len() - 1);
        }
        let kept = self.layers[layer].of(keys, q_nd.dtype());
        look(q_nd, kept, hidden_bt, options, bias_ht)
    }

    /// Computes cross-attention in layer `layer`. The keys and values `[m, c]` of the encoder's output are computed once, by `of_text`.
    ///
    /// # Shapes
    /// - `q_nd`: `[n, d]`; `n` is `b` if positions were read before
    /// - returns `[n, d]`
    pub(super) fn attend_across(
        &mut self,
        layer: usize,
        q_nd: Tensor<2>,
        of_text: impl FnOnce() -> [Tensor<2>; 2],
        options: AttentionOptions,
    ) -> Tensor<2> {
        let hidden_bu = self.hidden_across.clone();
        if !self.rows.is_empty() {
            return look(q_nd, self.across[layer].clone(), hidden_bu, options, None);
        }
        let [_, d] = q_nd.dims();
        let [k_mc, v_mc] = of_text();
        self.across.push([&k_mc, &v_mc].map(|x_mc| by_head(x_mc.clone(), d, options)));
        attend([q_nd, k_mc, v_mc], &Masks::of_keys(hidden_bu), options, 0.0)
    }

    /// Ends a pass over positions of `b` rows through all layers. Returns the output at the last position of each row, `[b, d]`.
    pub(super) fn end(&mut self, x_nd: Tensor<2>, b: usize) -> Tensor<2> {
        let [n, d] = x_nd.dims();
        let t = n / b;
        self.rows.advance(t);
        x_nd.reshape([b, t, d]).slice(s![.., t - 1..t, ..]).reshape([b, d])
    }

    /// Replaces the rows: row `i` continues from the state of row `rows[i]`.
    pub(super) fn take(&mut self, rows: &[usize]) {
        self.rows.take(rows);
        let Some(device) = self.layers.first().map(|kept| kept.parts[0].device()) else { return };
        let indices: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let indices = Tensor::<1, Int>::from_data(TensorData::from(&*indices), &device);
        for part in self.layers.iter_mut().map(|kept| &mut kept.parts).chain(&mut self.across).flatten() {
            *part = part.clone().select(0, indices.clone());
        }
        self.hidden_across = self.hidden_across.take().map(|hidden_bu| hidden_bu.select(0, indices.clone()));
        self.tokens = self.tokens.take().map(|tokens| tokens.select(0, indices));
    }
}

/// Reshapes rows `[n, c]` of sequences to heads `[b, k, t, e]`, with the head width of queries `[n, d]`.
fn by_head(x_nc: Tensor<2>, d: usize, options: AttentionOptions) -> Tensor<4> {
    let ([n, c], b, e) = (x_nc.dims(), options.batch, d / options.heads);
    x_nc.reshape([b, n / b, c / e, e]).swap_dims(1, 2)
}

/// Computes the attention of one position per row to these keys and values, `[b, d]`.
fn look(
    q_bd: Tensor<2>,
    [keys_bkte, values_bkte]: [Tensor<4>; 2],
    hidden_bt: Option<Tensor<2>>,
    options: AttentionOptions,
    bias_ht: Option<Tensor<2>>,
) -> Tensor<2> {
    let ([b, d], [_, k, t, e]) = (q_bd.dims(), keys_bkte.dims());
    // Query heads that share a key head become its rows.
    let q_bkge = (q_bd * options.scale).reshape([b, k, d / (k * e), e]);
    let mut scores_bkgt = capped(q_bkge.matmul(keys_bkte.transpose()), options.cap);
    if let Some(hidden_bt) = hidden_bt {
        scores_bkgt = scores_bkgt + hidden_bt.reshape([b, 1, 1, t]);
    }
    if let Some(bias_ht) = bias_ht {
        scores_bkgt = scores_bkgt + bias_ht.reshape([1, k, d / (k * e), t]);
    }
    activation::softmax(scores_bkgt, 3).matmul(values_bkte).reshape([b, d])
}
