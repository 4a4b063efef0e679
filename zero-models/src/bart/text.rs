//! Text that a BART makes of others: these are read once, then it goes on token by token, as by [`crate::generate`].

use burn::tensor::{Int, Tensor, TensorData};
use zero_ops::{FusedBackend, embedding};

use super::Bart;
use super::config::OFFSET;
use super::model::Read;
use crate::Result;
use crate::generate::{self, CausalLm, Hooks, KvCache, Sampling};

/// The tokens that are made of each text; [`BartConfig::sampling`](super::BartConfig::sampling) says how by default. Beside
/// others, a text is filled up with padding, which nothing looks at.
///
/// # Errors
/// When a text is empty, longer than the model's positions, or has a token that the model does not know; when `max_new_tokens` is
/// not below the positions, or [`Sampling`] holds a value that is none.
pub fn generate<B: FusedBackend>(
    model: &Bart<B>,
    texts: &[Vec<u32>],
    how: &Sampling,
    device: &B::Device,
) -> Result<Vec<Vec<u32>>> {
    generate::alone(|hooks| generate_with(model, texts, how, device, hooks))
}

/// As [`generate()`], with [`Hooks`].
///
/// # Errors
/// As [`generate()`].
pub fn generate_with<B: FusedBackend>(
    model: &Bart<B>,
    texts: &[Vec<u32>],
    how: &Sampling,
    device: &B::Device,
    hooks: Hooks<'_>,
) -> Result<Vec<Vec<u32>>> {
    let (positions, vocabulary) =
        (model.encoder.embed_positions.lazy_shape()[0] - OFFSET, model.shared.lazy_shape()[0]);
    generate::check(texts, |_| 0, positions, vocabulary)?;
    let Some(longest) = texts.iter().map(Vec::len).max() else { return Ok(Vec::new()) };
    let shape = [texts.len(), longest];
    let filled = |of: &dyn Fn(&[u32], usize) -> i32| -> Tensor<B, 2, Int> {
        let rows: Vec<i32> = texts.iter().flat_map(|text| (0..longest).map(|at| of(text, at))).collect();
        Tensor::from_data(TensorData::new(rows, shape), device)
    };
    let ids = filled(&|text, at| text.get(at).map_or(model.pad_token, |&token| token) as i32);
    let mask = texts.iter().any(|text| text.len() < longest).then(|| filled(&|text, at| (at < text.len()).into()));
    let reader = Reader { model, read: model.read(ids, mask) };
    generate::generate_with(&reader, &vec![vec![model.start_token]; texts.len()], how, device, hooks)
}

/// A model with the texts that it has read, of which each row makes one.
struct Reader<'a, B: FusedBackend> {
    model: &'a Bart<B>,
    read: Read<B>,
}

impl<B: FusedBackend> CausalLm<B> for Reader<'_, B> {
    fn positions(&self) -> usize {
        self.model.decoder.embed_positions.lazy_shape()[0] - OFFSET
    }

    fn vocabulary(&self) -> usize {
        self.model.shared.lazy_shape()[0]
    }

    fn next_logits(&self, input_ids_bt: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let [b, t] = input_ids_bt.dims();
        let decoder = &self.model.decoder;
        let positions: Vec<i32> = cache.numbers(t).map(|at| at + OFFSET as i32).collect();
        let positions_n = Tensor::from_ints(&*positions, &input_ids_bt.device());
        let tokens_nd = self.model.tokens(input_ids_bt.reshape([b * t]));
        let mut x_nd = decoder.norm(tokens_nd + embedding(decoder.embed_positions.val(), positions_n));
        if cache.is_empty() {
            cache.hide_across(self.read.mask_bu.clone(), &x_nd);
        }
        for (number, layer) in decoder.layers.iter().enumerate() {
            x_nd = layer.forward(x_nd, |attn, x_nd, is_across| {
                let options = attn.options(b, &x_nd, !is_across);
                if is_across {
                    let of_text = || attn.keys_and_values(&self.read.rows_md);
                    cache.attend_across(number, attn.queries(x_nd), of_text, options)
                } else {
                    cache.attend(number, attn.parts(&x_nd, &x_nd), options)
                }
            });
        }
        self.model.logits(cache.end(x_nd, b))
    }
}
