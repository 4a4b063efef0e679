//! Keys and values of the tokens so far.
//!
//! Shape suffixes: `b` rows, `h` heads, `k` heads of keys, `g` = `h / k`, `t` positions, `e` width of a head, `n` = `b * t` rows of
//! activations, `d` = `h * e`, `c` = `k * e`.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, activation, s};
use zero_ops::{AttentionOptions, FusedBackend};

use crate::attention::{MASKED, hidden};

/// What a model keeps of the tokens it has read, so that each is read once. Rows begin with padding where others are longer.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    /// Of each layer the keys and the values, `[b, k, t, e]`.
    layers: Vec<[Tensor<B, 4>; 2]>,
    /// Of each layer the keys and the values of another text, which each row looks at besides.
    across: Vec<[Tensor<B, 4>; 2]>,
    /// What hides the padding of these texts, `[b, u]`, if there is any.
    hidden_across: Option<Tensor<B, 2>>,
    length: usize,
    /// Tokens of padding before each row.
    padding: Vec<usize>,
}

impl<B: FusedBackend> KvCache<B> {
    /// For rows that begin with so many tokens of padding.
    pub fn new(padding: Vec<usize>) -> Self {
        Self { layers: Vec::new(), across: Vec::new(), hidden_across: None, length: 0, padding }
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
        let own = move |&padding: &usize| next.clone().map(move |at| at.saturating_sub(padding) as i32);
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
    /// what nobody will look at any more is dropped.
    ///
    /// # Shapes
    /// - `q_nd`: `[n, d]`; `n` is `b` where positions were read before
    /// - `k_nd`, `v_nd`: `[n, c]`, of as many heads or fewer
    /// - returns `[n, d]`
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        [q_nd, k_nd, v_nd]: [Tensor<B, 2>; 3],
        options: AttentionOptions,
    ) -> Tensor<B, 2> {
        let AttentionOptions { batch: b, window, .. } = options;
        let [n, d] = q_nd.dims();
        let end = self.length + n / b;
        let keys = end - window.unwrap_or(end).min(end)..end;
        let hidden_bt = self.hidden(if self.length == 0 { 0..end } else { keys.clone() }, &q_nd);
        let in_window = |x_bhte: Tensor<B, 4>| {
            let [.., t, _] = x_bhte.dims();
            if t > keys.len() { x_bhte.slice(s![.., .., t - keys.len()..t, ..]) } else { x_bhte }
        };
        let new = [&k_nd, &v_nd].map(|x_nd| by_head(x_nd.clone(), d, options));
        if self.length == 0 {
            self.layers.push(new.map(in_window));
            return zero_ops::attention(q_nd, k_nd, v_nd, hidden_bt, options);
        }
        assert_eq!(n, b, "after the first, positions are read one by one");
        let kept = &mut self.layers[layer];
        for (kept, new) in kept.iter_mut().zip(new) {
            *kept = in_window(Tensor::cat(vec![kept.clone(), new], 2));
        }
        look(q_nd, kept.clone(), hidden_bt, options)
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
            return look(q_nd, self.across[layer].clone(), hidden_bu, options);
        }
        let [_, d] = q_nd.dims();
        let [k_mc, v_mc] = of_text();
        self.across.push([&k_mc, &v_mc].map(|x_mc| by_head(x_mc.clone(), d, options)));
        zero_ops::attention(q_nd, k_mc, v_mc, hidden_bu, options)
    }

    /// All layers have read `t` more positions.
    pub(crate) fn advance(&mut self, t: usize) {
        self.length += t;
    }

    /// Takes other rows in place of its own: row `i` goes on from what row `rows[i]` has read.
    pub(crate) fn take(&mut self, rows: &[usize], device: &B::Device) {
        let of: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let of = Tensor::<B, 1, Int>::from_ints(&*of, device);
        for kept in self.layers.iter_mut().chain(&mut self.across).flatten() {
            *kept = kept.clone().select(0, of.clone());
        }
        self.hidden_across = self.hidden_across.take().map(|hidden_bu| hidden_bu.select(0, of));
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
) -> Tensor<B, 2> {
    let ([b, d], [_, k, t, e]) = (q_bd.dims(), keys_bkte.dims());
    // Heads of queries that share one of keys are its rows.
    let q_bkge = (q_bd * options.scale).reshape([b, k, d / (k * e), e]);
    let mut scores_bkgt = q_bkge.matmul(keys_bkte.transpose());
    if let Some(hidden_bt) = hidden_bt {
        scores_bkgt = scores_bkgt + hidden_bt.reshape([b, 1, 1, t]);
    }
    activation::softmax(scores_bkgt, 3).matmul(values_bkte).reshape([b, d])
}
