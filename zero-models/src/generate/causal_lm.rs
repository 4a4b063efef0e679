//! Models of Burn 0.21 that predict the next token.

use burn::tensor::{Int, Tensor, TensorData};
use zero_ops::FusedBackend;

use super::{CachedRows, Hooks, KvCache, Reader, Sampling, alone, generate_by};
use crate::Result;

/// A model that predicts the next token.
pub trait CausalLm<B: FusedBackend> {
    /// Returns the maximum sequence length.
    fn positions(&self) -> usize;

    /// Returns the vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Returns the logits of the token that follows each row, `[b, v]`.
    ///
    /// `input_ids_bt` are the tokens `[b, t]` after those in `cache`, and are added to it; `t` is 1 unless the cache is empty.
    fn next_logits(&self, input_ids_bt: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2>;
}

/// Generates the tokens that follow each prompt.
///
/// # Errors
/// Same as [`generate_by`].
pub fn generate<B: FusedBackend, M: CausalLm<B>>(
    model: &M,
    prompts: &[Vec<u32>],
    how: &Sampling,
    device: &B::Device,
) -> Result<Vec<Vec<u32>>> {
    alone(|hooks| generate_with(model, prompts, how, device, hooks))
}

/// Same as [`generate`], with [`Hooks`].
///
/// # Errors
/// Same as [`generate`].
pub fn generate_with<B: FusedBackend, M: CausalLm<B>>(
    model: &M,
    prompts: &[Vec<u32>],
    how: &Sampling,
    device: &B::Device,
    hooks: Hooks<'_>,
) -> Result<Vec<Vec<u32>>> {
    let mut cached = Cached { model, device, cache: KvCache::new(Vec::new(), 0, None) };
    generate_by(&mut cached, prompts, how, hooks)
}

/// A model with its cache.
struct Cached<'a, B: FusedBackend, M> {
    model: &'a M,
    device: &'a B::Device,
    cache: KvCache<B>,
}

impl<B: FusedBackend, M: CausalLm<B>> Reader for Cached<'_, B, M> {
    fn positions(&self) -> usize {
        self.model.positions()
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn begin(&mut self, rows: CachedRows) {
        self.cache = KvCache::of(rows);
    }

    fn read(&mut self, ids: Vec<i32>, b: usize) -> Vec<f32> {
        let shape = [b, ids.len() / b];
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, shape), self.device);
        let logits = self.model.next_logits(ids, &mut self.cache);
        logits.into_data().convert::<f32>().into_vec().expect("logits are converted to this type")
    }

    fn take(&mut self, rows: &[usize]) {
        self.cache.take(rows, self.device);
    }
}
