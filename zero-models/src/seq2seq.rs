//! Models that make texts of texts: an encoder reads a text, a decoder makes another of it.
//!
//! In go a [`Seq2SeqLm`] and token ids, out come logits, a loss, or the tokens that are made: texts are read once, then each is generated
//! token by token, as by [`crate::generate`].
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
    /// 1 at tokens and 0 at padding, `[b, u]`, if there is any.
    pub mask_bu: Option<Ids<B>>,
}

/// A model with an encoder, a decoder and a language-model head.
pub trait Seq2SeqLm<B: FusedBackend> {
    /// The most tokens of a text that is read, and of one that is made.
    fn positions(&self) -> usize;

    /// Number of tokens that it knows.
    fn vocabulary(&self) -> usize;

    /// The token that fills up short rows.
    fn pad_token(&self) -> u32;

    /// The token that the decoder begins with.
    fn start_token(&self) -> u32;

    /// The head's weight, `[v, d]`.
    fn head_weight(&self) -> Tensor<B, 2>;

    /// Runs the encoder.
    ///
    /// # Shapes
    /// - `ids_bu`: `[b, u]`, each id in `0..vocab_size`
    /// - `mask_bu`: `[b, u]`, 1 at tokens and 0 at padding; `None` if there is no padding
    ///
    /// # Panics
    /// If `u` is more than [`positions`](Self::positions).
    fn encode(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>) -> Encoded<B>;

    /// Runs the decoder on ids `[b, t]`; returns what the head reads, `[n, d]`.
    ///
    /// # Panics
    /// If `t` is more than [`positions`](Self::positions).
    fn decode(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>) -> Tensor<B, 2>;

    /// As [`decode`](Self::decode) of the ids that follow those in the cache, for the last of each row: `[b, d]`.
    fn decode_next(&self, encoded: &Encoded<B>, decoder_ids_bt: Ids<B>, cache: &mut KvCache<B>) -> Tensor<B, 2>;

    /// Logits of the token that comes next, at every position of the decoder.
    ///
    /// # Shapes
    /// - `ids_bu`, `mask_bu`: as for [`encode`](Self::encode)
    /// - `decoder_ids_bt`: `[b, t]`
    /// - returns `[b, t, v]`
    ///
    /// # Panics
    /// If `t` or `u` is more than [`positions`](Self::positions).
    fn forward(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>, decoder_ids_bt: Ids<B>) -> Tensor<B, 3> {
        let sizes = decoder_ids_bt.dims();
        let hidden_nd = self.hidden_rows(ids_bu, mask_bu, decoder_ids_bt);
        by_sequence(linear(hidden_nd, self.head_weight().transpose(), None, None), sizes)
    }

    /// The mean cross-entropy in nats of predicting each label of a row from the text and the labels before it, as Hugging Face
    /// computes it with `labels`. Those equal to [`IGNORED_LABEL`] do not count. A label that is padding is read as any token.
    ///
    /// # Shapes
    /// - `ids_bu`, `mask_bu`: as for [`encode`](Self::encode)
    /// - `labels_bt`: `[b, t]`
    /// - returns `[1]`
    ///
    /// # Panics
    /// If `t` or `u` is more than [`positions`](Self::positions).
    fn loss(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>, labels_bt: Ids<B>) -> Tensor<B, 1> {
        let [b, t] = labels_bt.dims();
        let decoder_ids_bt = self.decoder_inputs(labels_bt.clone());
        let hidden_nd = self.hidden_rows(ids_bu, mask_bu, decoder_ids_bt);
        linear_cross_entropy(hidden_nd, self.head_weight(), labels_bt.reshape([b * t]), Some(IGNORED_LABEL.into()))
    }

    /// The tokens that the decoder reads to predict these labels `[b, t]`: the start token and all labels but the last.
    fn decoder_inputs(&self, labels_bt: Ids<B>) -> Ids<B> {
        let [_, t] = labels_bt.dims();
        let ignored = labels_bt.clone().equal_elem(IGNORED_LABEL);
        let labels_bt = labels_bt.mask_fill(ignored, self.pad_token() as i32);
        let start_b1 = labels_bt.zeros_like().slice(s![.., 0..1]) + self.start_token() as i32;
        Tensor::cat(vec![start_b1, labels_bt.slice(s![.., 0..t - 1])], 1)
    }

    /// Runs both halves; returns what the head reads, `[n, d]`.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    fn hidden_rows(&self, ids_bu: Ids<B>, mask_bu: Option<Ids<B>>, decoder_ids_bt: Ids<B>) -> Tensor<B, 2> {
        assert_eq!(ids_bu.dims()[0], decoder_ids_bt.dims()[0], "as many texts must be read as are made");
        self.decode(&self.encode(ids_bu, mask_bu), decoder_ids_bt)
    }
}

/// The tokens that are made of each text. Beside others, a text is filled up with padding, which nothing looks at.
///
/// # Errors
/// When a text is empty, longer than the model's positions, or has a token that the model does not know; when `max_new_tokens` is
/// not below the positions, or [`Sampling`] holds a value that is none.
pub fn generate<B: FusedBackend>(
    model: &impl Seq2SeqLm<B>,
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

/// A model with the texts that it has read, of which each row makes one.
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
