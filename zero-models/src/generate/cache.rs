//! Keys and values of the tokens so far.
//!
//! Shape suffixes: `b` rows, `h` heads, `t` positions, `e` width of a head, `n` = `b * t` rows of activations, `d` = `h * e`.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, activation};
use zero_ops::{AttentionOptions, FusedBackend};

use crate::attention::MASKED;

/// What a model keeps of the tokens it has read, so that each is read once. Rows begin with padding where others are longer.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    /// Of each layer the keys and the values, `[b, h, t, e]`.
    layers: Vec<[Tensor<B, 4>; 2]>,
    length: usize,
    /// Tokens of padding before each row.
    padding: Vec<usize>,
}

impl<B: FusedBackend> KvCache<B> {
    /// For rows that begin with so many tokens of padding.
    pub fn new(padding: Vec<usize>) -> Self {
        Self { layers: Vec::new(), length: 0, padding }
    }

    /// Positions that are kept.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The numbers of the next `t` positions in each row's own text, `[b * t]`. Those of padding are 0.
    pub(crate) fn positions(&self, t: usize, device: &B::Device) -> Tensor<B, 1, Int> {
        let own = |&padding: &usize| (self.length..self.length + t).map(move |at| at.saturating_sub(padding) as i32);
        let positions: Vec<i32> = self.padding.iter().flat_map(own).collect();
        Tensor::from_ints(&*positions, device)
    }

    /// What hides the padding among `t` keys, `[b, t]`, if there is any.
    fn hidden(&self, t: usize, like: &Tensor<B, 2>) -> Option<Tensor<B, 2>> {
        if self.padding.iter().all(|&padding| padding == 0) {
            return None;
        }
        let of = |&padding: &usize| (0..t).map(move |at| if at < padding { MASKED as f32 } else { 0.0 });
        let hidden: Vec<f32> = self.padding.iter().flat_map(of).collect();
        let data = TensorData::new(hidden, [self.padding.len(), t]);
        Some(Tensor::from_data(data.convert_dtype(like.dtype()), &like.device()))
    }

    /// Adds the keys and values of layer `layer` for new positions, and lets these look at all so far.
    ///
    /// # Shapes
    /// - `q_nd`, `k_nd`, `v_nd`: `[n, d]`; `n` is `b` where positions were read before
    /// - returns `[n, d]`
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        [q_nd, k_nd, v_nd]: [Tensor<B, 2>; 3],
        options: AttentionOptions,
    ) -> Tensor<B, 2> {
        let AttentionOptions { batch: b, heads: h, scale, .. } = options;
        let [n, d] = q_nd.dims();
        let by_head = |x_nd: Tensor<B, 2>| x_nd.reshape([b, n / b, h, d / h]).swap_dims(1, 2);
        let new = [by_head(k_nd.clone()), by_head(v_nd.clone())];
        if self.length == 0 {
            self.layers.push(new);
            return zero_ops::attention(q_nd.clone(), k_nd, v_nd, self.hidden(n / b, &q_nd), options);
        }
        assert_eq!(n, b, "after the first, positions are read one by one");
        let hidden_bt = self.hidden(self.length + 1, &q_nd);
        let kept = &mut self.layers[layer];
        for (kept, new) in kept.iter_mut().zip(new) {
            *kept = Tensor::cat(vec![kept.clone(), new], 2);
        }
        let [keys_bhte, values_bhte] = kept.clone();
        let mut scores_bh1t = by_head(q_nd * scale).matmul(keys_bhte.transpose());
        if let Some(hidden_bt) = hidden_bt {
            scores_bh1t = scores_bh1t + hidden_bt.reshape([b, 1, 1, self.length + 1]);
        }
        activation::softmax(scores_bh1t, 3).matmul(values_bhte).swap_dims(1, 2).reshape([n, d])
    }

    /// All layers have read `t` more positions.
    pub(crate) fn advance(&mut self, t: usize) {
        self.length += t;
    }

    /// Takes other rows in place of its own: row `i` goes on from what row `rows[i]` has read.
    pub(crate) fn take(&mut self, rows: &[usize], device: &B::Device) {
        let of: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let of = Tensor::<B, 1, Int>::from_ints(&*of, device);
        for kept in self.layers.iter_mut().flatten() {
            *kept = kept.clone().select(0, of.clone());
        }
        self.padding = rows.iter().map(|&row| self.padding[row]).collect();
    }
}
