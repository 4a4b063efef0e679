//! Keys and values of the tokens so far, in memory that is there from the start: a new position is written into its place.
//!
//! Shape suffixes: `b` rows, `h` heads, `k` heads of keys, `g` = `h / k`, `t` positions, `e` width of a head, `n` = `b * t` rows of
//! activations, `d` = `h * e`, `c` = `k * e`.

use std::ops::Range;

use burn::nn::Dropout;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, activation, s};
use zero_ops::{AttentionOptions, FusedBackend};

use crate::attention::{MASKED, Masks, attend, hidden, soft_capped};

/// What a model keeps of the tokens it has read, so that each is read once. Rows begin with padding where others are longer.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    layers: Vec<Kept<B>>,
    /// Of each layer the keys and the values of another text, which each row looks at besides.
    across: Vec<[Tensor<B, 4>; 2]>,
    /// What hides the padding of these texts, `[b, u]`, if there is any.
    hidden_across: Option<Tensor<B, 2>>,
    length: usize,
    /// Positions that are expected in all.
    room: usize,
    /// What keys and values are kept as, if not as they come.
    dtype: Option<FloatDType>,
    /// Tokens of padding before each row.
    padding: Vec<usize>,
    /// Positions that the model has.
    positions: usize,
    /// The soft cap of scores.
    cap: Option<f64>,
    /// The tokens that were read, `[b, length]`, if they may have to be read again.
    tokens: Option<Tensor<B, 2, Int>>,
}

/// Positions that there is room for at first, if so many are expected.
const AT_FIRST: usize = 2048;

/// Of one layer the keys and the values of some positions, `[b, k, places, e]`.
#[derive(Debug, Clone)]
struct Kept<B: Backend> {
    parts: [Tensor<B, 4>; 2],
    /// The position in the first place.
    from: usize,
}

impl<B: Backend> Kept<B> {
    /// Puts `new` `[b, k, t, e]` at position `at`. Of what is there already at least `least` positions stay.
    fn put(&mut self, new: [Tensor<B, 4>; 2], at: usize, least: usize) {
        let ([.., places, _], [.., t, _]) = (self.parts[0].dims(), new[0].dims());
        let moved = if at + t - self.from > places { at - least - self.from } else { 0 };
        for (part, new) in self.parts.iter_mut().zip(new) {
            // The only handle, so that it is written where it is.
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

    /// Makes room for so many positions.
    fn grow(&mut self, places: usize) {
        for part in &mut self.parts {
            let [b, k, old, e] = part.dims();
            let all = Tensor::zeros([b, k, places, e], (&part.device(), part.dtype()));
            *part = all.slice_assign(s![.., .., 0..old, ..], part.clone());
        }
    }

    /// The keys and the values from position `start` to `end`, as `dtype`.
    fn of(&self, start: usize, end: usize, dtype: FloatDType) -> [Tensor<B, 4>; 2] {
        self.parts.clone().map(|part| as_dtype(part.slice(s![.., .., start - self.from..end - self.from, ..]), dtype))
    }
}

fn as_dtype<B: Backend, const D: usize>(x: Tensor<B, D>, dtype: FloatDType) -> Tensor<B, D> {
    if x.dtype() == dtype.into() { x } else { x.cast(dtype) }
}

impl<B: FusedBackend> KvCache<B> {
    /// For rows that begin with so many tokens of padding, and will have about so many positions in all: more make the cache grow. Keys and
    /// values are kept as `dtype` if there is one: in 16 bit they take half of the memory.
    pub fn new(padding: Vec<usize>, room: usize, dtype: Option<FloatDType>) -> Self {
        Self {
            layers: Vec::new(),
            across: Vec::new(),
            hidden_across: None,
            length: 0,
            room,
            dtype,
            padding,
            positions: usize::MAX,
            cap: None,
            tokens: None,
        }
    }

    /// The same for a model with so many positions, where rows that have ended read on beside others: what they read is used for nothing, and
    /// is taken to stand at the last position.
    pub(super) fn within(self, positions: usize) -> Self {
        Self { positions, ..self }
    }

    /// Caps scores `x` of own positions at `cap`, as `cap * tanh(x / cap)`.
    pub(crate) fn cap_scores(&mut self, cap: Option<f64>) {
        self.cap = cap;
    }

    /// Positions that each row's own text has with `t` more.
    pub(crate) fn reached(&self, t: usize) -> impl Iterator<Item = usize> {
        let end = self.length + t;
        self.padding.iter().map(move |padding| end.saturating_sub(*padding))
    }

    /// The tokens `[b, t]` to read now. Where these make a text longer than `longest`, they come with all before them, and what those gave is
    /// forgotten: a model that rotates longer texts by other angles reads them again.
    pub(crate) fn with_earlier(&mut self, ids_bt: Tensor<B, 2, Int>, longest: usize) -> Tensor<B, 2, Int> {
        let [_, t] = ids_bt.dims();
        let all = match self.tokens.take() {
            Some(earlier) => Tensor::cat(vec![earlier, ids_bt.clone()], 1),
            None => ids_bt.clone(),
        };
        self.tokens = Some(all.clone());
        if !self.reached(t).any(|n| n > longest && n.saturating_sub(t) <= longest) {
            return ids_bt;
        }
        self.layers.clear();
        self.length = 0;
        all
    }

    /// Positions that are kept.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The numbers of the next `t` positions in each row's own text, row after row. Those of padding are 0.
    pub(crate) fn numbers(&self, t: usize) -> impl Iterator<Item = i32> {
        let next = self.length..self.length + t;
        let last = self.positions.saturating_sub(1);
        let own = move |&padding: &usize| next.clone().map(move |at| at.saturating_sub(padding).min(last) as i32);
        self.padding.iter().flat_map(own)
    }

    /// What hides the padding among the keys of these positions, `[b, t]`, if there is any.
    fn hidden(&self, keys: Range<usize>, like: &Tensor<B, 2>) -> Option<Tensor<B, 2>> {
        if self.padding.iter().all(|&padding| padding <= keys.start) {
            return None;
        }
        let of = |&padding: &usize| keys.clone().map(move |at| if at < padding { MASKED as f32 } else { 0.0 });
        let hidden: Vec<f32> = self.padding.iter().flat_map(of).collect();
        let data = TensorData::new(hidden, [self.padding.len(), keys.len()]);
        Some(Tensor::from_data(data.convert_dtype(like.dtype()), &like.device()))
    }

    /// Adds the keys and values of layer `layer` for new positions, and lets these look at all so far, or at those in the window;
    /// of what nobody will look at any more no more is kept than a window has. A bias is added to the scores of each head.
    ///
    /// # Shapes
    /// - `q_nd`: `[n, d]`; `n` is `b` where positions were read before, or there is a bias
    /// - `k_nd`, `v_nd`: `[n, c]`, of as many heads or fewer
    /// - `bias_ht`: `[h, t]`, of all positions so far
    /// - returns `[n, d]`
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        [q_nd, k_nd, v_nd]: [Tensor<B, 2>; 3],
        options: AttentionOptions,
        bias_ht: Option<Tensor<B, 2>>,
    ) -> Tensor<B, 2> {
        let AttentionOptions { batch: b, window, .. } = options;
        let [n, d] = q_nd.dims();
        let end = self.length + n / b;
        let keys = end - window.unwrap_or(end).min(end)..end;
        let hidden_bt = self.hidden(if self.length == 0 { 0..end } else { keys.clone() }, &q_nd);
        let dtype = self.dtype.unwrap_or(k_nd.dtype().into());
        let new = [&k_nd, &v_nd].map(|x_nd| as_dtype(by_head(x_nd.clone(), d, options), dtype));
        if self.length == 0 {
            let new = new.map(|x_bkte| x_bkte.slice(s![.., .., keys.clone(), ..]));
            let ([b, k, t, e], device) = (new[0].dims(), q_nd.device());
            // A window is moved to the front when it has come to the end.
            let places = self.room.min(window.map_or(AT_FIRST, |window| 2 * window)).max(t);
            let empty = || Tensor::zeros([b, k, places, e], (&device, DType::from(dtype)));
            let mut kept = Kept { parts: [empty(), empty()], from: keys.start };
            kept.put(new, keys.start, 0);
            self.layers.push(kept);
            if bias_ht.is_none() {
                let masks = Masks::of_keys(hidden_bt).capped(self.cap);
                return attend([q_nd, k_nd, v_nd], &masks, options, &Dropout { prob: 0.0 });
            }
        } else {
            let kept = &mut self.layers[layer];
            let [.., places, _] = kept.parts[0].dims();
            // Where a window lets nothing go.
            if end - kept.from > places && keys.len() >= places {
                kept.grow(2 * places);
            }
            kept.put(new, end - 1, keys.len() - 1);
        }
        assert_eq!(n, b, "after the first, and with a bias, positions are read one by one");
        let kept = self.layers[layer].of(keys.start, end, q_nd.dtype().into());
        look(q_nd, kept, hidden_bt, options, self.cap, bias_ht)
    }

    /// Hides where `mask_bu` is 0 in the texts that rows look at besides their own. `like` has the type of the activations.
    pub(crate) fn hide_across(&mut self, mask_bu: Option<Tensor<B, 2, Int>>, like: &Tensor<B, 2>) {
        self.hidden_across = mask_bu.map(|mask_bu| hidden(mask_bu, like));
    }

    /// Lets the new positions look at another text, whose keys and values `[m, c]` in layer `layer` are made once.
    ///
    /// # Shapes
    /// - `q_nd`: `[n, d]`; `n` is `b` where positions were read before
    /// - returns `[n, d]`
    pub(crate) fn attend_across(
        &mut self,
        layer: usize,
        q_nd: Tensor<B, 2>,
        of_text: impl FnOnce() -> [Tensor<B, 2>; 2],
        options: AttentionOptions,
    ) -> Tensor<B, 2> {
        let hidden_bu = self.hidden_across.clone();
        if self.length > 0 {
            return look(q_nd, self.across[layer].clone(), hidden_bu, options, None, None);
        }
        let [_, d] = q_nd.dims();
        let [k_mc, v_mc] = of_text();
        self.across.push([&k_mc, &v_mc].map(|x_mc| by_head(x_mc.clone(), d, options)));
        zero_ops::attention(q_nd, k_mc, v_mc, hidden_bu, options)
    }

    /// All layers have read these positions of `b` texts: what came of the last of each.
    pub(crate) fn end(&mut self, x_nd: Tensor<B, 2>, b: usize) -> Tensor<B, 2> {
        let [n, d] = x_nd.dims();
        let t = n / b;
        self.length += t;
        x_nd.reshape([b, t, d]).slice(s![.., t - 1..t, ..]).reshape([b, d])
    }

    /// Takes other rows in place of its own: row `i` goes on from what row `rows[i]` has read.
    pub(crate) fn take(&mut self, rows: &[usize], device: &B::Device) {
        let of: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let of = Tensor::<B, 1, Int>::from_ints(&*of, device);
        for kept in self.layers.iter_mut().map(|kept| &mut kept.parts).chain(&mut self.across).flatten() {
            *kept = kept.clone().select(0, of.clone());
        }
        self.hidden_across = self.hidden_across.take().map(|hidden_bu| hidden_bu.select(0, of.clone()));
        self.tokens = self.tokens.take().map(|tokens| tokens.select(0, of));
        self.padding = rows.iter().map(|&row| self.padding[row]).collect();
    }
}

/// Rows `[m, c]` of sequences as heads `[b, k, t, e]`, of the width that those of queries `[n, d]` have.
fn by_head<B: Backend>(x_mc: Tensor<B, 2>, d: usize, options: AttentionOptions) -> Tensor<B, 4> {
    let ([m, c], b, e) = (x_mc.dims(), options.batch, d / options.heads);
    x_mc.reshape([b, m / b, c / e, e]).swap_dims(1, 2)
}

/// What one position of each row sees among these keys and values, `[b, d]`.
fn look<B: FusedBackend>(
    q_bd: Tensor<B, 2>,
    [keys_bkte, values_bkte]: [Tensor<B, 4>; 2],
    hidden_bt: Option<Tensor<B, 2>>,
    options: AttentionOptions,
    cap: Option<f64>,
    bias_ht: Option<Tensor<B, 2>>,
) -> Tensor<B, 2> {
    let ([b, d], [_, k, t, e]) = (q_bd.dims(), keys_bkte.dims());
    // Heads of queries that share one of keys are its rows.
    let q_bkge = (q_bd * options.scale).reshape([b, k, d / (k * e), e]);
    let mut scores_bkgt = q_bkge.matmul(keys_bkte.transpose());
    if let Some(cap) = cap {
        scores_bkgt = soft_capped(scores_bkgt, cap);
    }
    if let Some(hidden_bt) = hidden_bt {
        scores_bkgt = scores_bkgt + hidden_bt.reshape([b, 1, 1, t]);
    }
    if let Some(bias_ht) = bias_ht {
        scores_bkgt = scores_bkgt + bias_ht.reshape([1, k, d / (k * e), t]);
    }
    activation::softmax(scores_bkgt, 3).matmul(values_bkte).reshape([b, d])
}
