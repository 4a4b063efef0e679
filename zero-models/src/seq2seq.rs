//! Sequence-to-sequence models: an encoder reads a source text, and a decoder generates a target text.
//!
//! A [`Seq2SeqLm`] takes token ids and returns logits, a loss, or generated tokens. Source texts are read once; then each target text is
//! generated token by token, as by [`crate::generate`].
//!
//! Shape suffixes: `b` batch, `t` positions of the decoder, `u` of the encoder, `d` width of the model, `v` vocabulary,
//! `n` = `b * t` rows, `m` = `b * u` rows.

use burn::tensor::{Int, Tensor, TensorData, s};
use zero_ops::{FusedBackend, linear, linear_cross_entropy};

use crate::Result;
use crate::generate::{self, CausalLm, Hooks, KvCache, Sampling};
use crate::layers::{Ids, by_sequence};
use crate::loss::IGNORED_LABEL;

/// The output of an encoder.
#[derive(Debug, Clone)]
pub struct Encoded<B: FusedBackend> {
    /// `[m, d]`
    pub rows_md: Tensor<B, 2>,
    /// Padding mask: 1 at tokens and 0 at padding, `[b, u]`, if there is padding.
    pub mask_bu: Option<Ids<B>>,
}

/// A model with an encoder, a decoder and a language-model head.
pub trait Seq2SeqLm<B: FusedBackend> {
    /// Returns the maximum number of tokens of a source text, and of a target text.
    fn positions(&self) -> usize;

    /// Returns the vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Returns the padding token.
    fn pad_token(&self) -> u32;

    /// Returns the first token that the decoder reads.
    fn start_token(&self) -> u32;

    /// Returns the head's weight, `[v, d]`.
    fn head_weight(&self) -> Tensor<B, 2>;

    /// Runs the encoder.
    ///
    /// # Shapes
    /// - `ids_bu`: `[b, u]`, each id in `0..vocab_size`
    /// - `mask_bu`: `[b, u]`, 1 at tokens and 0 at padding; `None` if there is no padding
    ///
    /// # Panics
    /// If `u` exceeds [`positions`](Self::positions).
    fn encode(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>) -> Encoded<B>;

    /// Runs the decoder on ids `[b, t]`; returns the head's input, `[n, d]`.
    ///
    /// # Panics
    /// If `t` exceeds [`positions`](Self::positions).
    fn decode(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>) -> Tensor<B, 2>;

    /// Same as [`decode`](Self::decode), on the ids after those in the cache; returns the head's input at the last position of each row,
    /// `[b, d]`.
    fn decode_next(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>, cache: &mut KvCache<B>) -> Tensor<B, 2>;

    /// Returns the logits of the next token at every position of the decoder.
    ///
    /// # Shapes
    /// - `ids_bu`, `mask_bu`: as for [`encode`](Self::encode)
    /// - `decoder_ids_bt`: `[b, t]`
    /// - returns `[b, t, v]`
    ///
    /// # Panics
    /// If `t` or `u` exceeds [`positions`](Self::positions).
    fn forward(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>, decoder_ids_bt: Ids<B>) -> Tensor<B, 3> {
        let sizes = decoder_ids_bt.dims();
        let hidden_nd = self.hidden_rows(ids_bu, mask_bu, decoder_ids_bt);
        by_sequence(linear(hidden_nd, self.head_weight().transpose(), None, None), sizes)
    }

    /// Returns the mean cross-entropy in nats of predicting each label of a row from the source text and the labels before it, as
    /// Hugging Face computes it with `labels`. Labels equal to [`IGNORED_LABEL`] do not count. A label that is padding is treated like
    /// any other token.
    ///
    /// # Shapes
    /// - `ids_bu`, `mask_bu`: as for [`encode`](Self::encode)
    /// - `labels_bt`: `[b, t]`
    /// - returns `[1]`
    ///
    /// # Panics
    /// If `t` or `u` exceeds [`positions`](Self::positions).
    fn loss(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>, labels_bt: Ids<B>) -> Tensor<B, 1> {
        let [b, t] = labels_bt.dims();
        let decoder_ids_bt = self.decoder_inputs(labels_bt.clone());
        let hidden_nd = self.hidden_rows(ids_bu, mask_bu, decoder_ids_bt);
        linear_cross_entropy(hidden_nd, self.head_weight(), labels_bt.reshape([b * t]), Some(IGNORED_LABEL.into()))
    }

    /// Returns the tokens that the decoder reads to predict labels `[b, t]`: the start token and all labels but the last.
    fn decoder_inputs(&self, labels_bt: Ids<B>) -> Ids<B> {
        let [_, t] = labels_bt.dims();
        let ignored = labels_bt.clone().equal_elem(IGNORED_LABEL);
        let labels_bt = labels_bt.mask_fill(ignored, self.pad_token() as i32);
        let start_b1 = labels_bt.zeros_like().slice(s![.., 0..1]) + self.start_token() as i32;
        Tensor::cat(vec![start_b1, labels_bt.slice(s![.., 0..t - 1])], 1)
    }

    /// Runs encoder and decoder; returns the head's input, `[n, d]`.
    ///
    /// # Panics
    /// Same as [`forward`](Self::forward).
    fn hidden_rows(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>, decoder_ids_bt: Ids<B>) -> Tensor<B, 2> {
        assert_eq!(ids_bu.dims()[0], decoder_ids_bt.dims()[0], "encoder and decoder must have the same number of rows");
        self.decode(&self.encode(ids_bu, mask_bu), decoder_ids_bt)
    }
}

/// Generates the target text of each source text. Shorter source texts are padded, and the padding is masked.
///
/// # Errors
/// If a text is empty, longer than the model's positions, or has a token outside the vocabulary; if `max_new_tokens` is not below the
/// positions, or [`Sampling`] holds an invalid value.
pub fn generate<B: FusedBackend>(
    model: &impl Seq2SeqLm<B>,
    texts: &[Vec<u32>],
    how: &Sampling,
    device: &B::Device,
) -> Result<Vec<Vec<u32>>> {
    generate::alone(|hooks| generate_with(model, texts, how, device, hooks))
}

/// Same as [`generate()`], with [`Hooks`].
///
/// # Errors
/// Same as [`generate()`].
pub fn generate_with<B: FusedBackend>(
    model: &impl Seq2SeqLm<B>,
    texts: &[Vec<u32>],
    how: &Sampling,
    device: &B::Device,
    hooks: Hooks<'_>,
) -> Result<Vec<Vec<u32>>> {
    generate::check(texts, |_| 0, model.positions(), model.vocabulary())?;
    let Some(longest) = texts.iter().map(Vec::len).max() else { return Ok(Vec::new()) };
    let shape = [texts.len(), longest];
    let filled = |of: &dyn Fn(&[u32], usize) -> i32| -> Tensor<B, 2, Int> {
        let rows: Vec<i32> = texts.iter().flat_map(|text| (0..longest).map(|at| of(text, at))).collect();
        Tensor::from_data(TensorData::new(rows, shape), device)
    };
    let ids = filled(&|text, at| text.get(at).map_or(model.pad_token(), |&token| token) as i32);
    let mask = texts.iter().any(|text| text.len() < longest).then(|| filled(&|text, at| (at < text.len()).into()));
    let decoder = Decoder { model, encoded: model.encode(ids, mask) };
    generate::generate_with(&decoder, &vec![vec![model.start_token()]; texts.len()], how, device, hooks)
}

/// A model with the encoded source texts; each row generates the target text of one.
struct Decoder<'a, B: FusedBackend, M> {
    model: &'a M,
    encoded: Encoded<B>,
}

impl<B: FusedBackend, M: Seq2SeqLm<B>> CausalLm<B> for Decoder<'_, B, M> {
    fn positions(&self) -> usize {
        self.model.positions()
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn next_logits(&self, input_ids_bt: Ids<B>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let hidden_bd = self.model.decode_next(&self.encoded, input_ids_bt, cache);
        linear(hidden_bd, self.model.head_weight().transpose(), None, None)
    }
}
