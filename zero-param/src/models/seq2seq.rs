//! Sequence-to-sequence models on Burn 0.22: an encoder reads a source text, and a decoder generates a target text.
//!
//! Shape suffixes: `b` batch, `t` positions of the decoder, `u` of the encoder, `d` width of the model, `v` vocabulary,
//! `n` = `b * t` rows, `m` = `b * u` rows.

use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData, s};
use zero_models::generate::{CachedRows, Hooks, Reader, Sampling, alone, check, generate_by};
use zero_models::{ModelError, Seq2SeqFamily};

use super::KvCache;
use super::layers::{IGNORED, next_logits, numbers};
use crate::layers::head_cross_entropy;

/// The output of an encoder.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// `[m, d]`
    pub rows_md: Tensor<2>,
    /// Padding mask: 1 at tokens and 0 at padding, `[b, u]`, if there is padding.
    pub mask_bu: Option<Tensor<2, Int>>,
}

/// A model with an encoder, a decoder and a language-model head.
pub trait Seq2SeqModel: Module + Sized {
    /// Its configuration.
    type Config: Seq2SeqFamily;

    /// Builds a model with the weights in a Hugging Face folder, or with initial weights by `seed`, like
    /// [`CausalModel::build`](super::CausalModel::build). Parameters of a classification head that the folder lacks get initial values.
    ///
    /// # Errors
    ///
    /// The errors of [`CausalModel::build`](super::CausalModel::build).
    fn build(config: &Self::Config, weights: Option<&Path>, seed: u64, device: &Device) -> Result<Self, ModelError>;

    /// Returns the padding token, and the first token that the decoder reads.
    fn special_tokens(&self) -> [u32; 2];

    /// Returns the head's weight, `[v, d]`.
    fn head(&self) -> &Param<Tensor<2>>;

    /// Runs the encoder on ids `[b, u]`, with a mask that is 1 at tokens and 0 at padding.
    fn encode(&self, ids_bu: Tensor<2, Int>, mask_bu: Option<Tensor<2, Int>>) -> Encoded;

    /// Runs the decoder on ids `[b, t]`; returns the head's input, `[n, d]`.
    fn decode(&self, encoded: &Encoded, ids_bt: Tensor<2, Int>) -> Tensor<2>;

    /// Runs the decoder on the ids `[b, t]` after those in the cache; returns the head's input at the last position of each row, `[b, d]`.
    fn decode_next(&self, encoded: &Encoded, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2>;
}

/// Returns the tokens that the decoder reads to predict labels `[b, t]`: the start token and all labels but the last.
pub(super) fn decoder_inputs(labels_bt: Tensor<2, Int>, [pad, start]: [u32; 2]) -> Tensor<2, Int> {
    let [_, t] = labels_bt.dims();
    let ignored = labels_bt.clone().equal_elem(IGNORED);
    let labels_bt = labels_bt.mask_fill(ignored, i64::from(pad));
    let start_b1 = labels_bt.clone().slice(s![.., 0..1]).zeros_like() + i64::from(start);
    Tensor::cat(vec![start_b1, labels_bt.slice(s![.., 0..t - 1])], 1)
}

/// Returns the mean cross-entropy in nats of predicting each label of a row from the source text and the labels before it. Labels equal to
/// -100 do not count.
///
/// # Shapes
/// - `ids_bu`, `mask_bu`: as for [`Seq2SeqModel::encode`]
/// - `labels_bt`: `[b, t]`
/// - returns `[1]`
pub fn loss<M: Seq2SeqModel>(
    model: &M,
    ids_bu: Tensor<2, Int>,
    mask_bu: Option<Tensor<2, Int>>,
    labels_bt: Tensor<2, Int>,
) -> Tensor<1> {
    let [b, t] = labels_bt.dims();
    let decoder_ids_bt = decoder_inputs(labels_bt.clone(), model.special_tokens());
    let hidden_nd = model.decode(&model.encode(ids_bu, mask_bu), decoder_ids_bt);
    head_cross_entropy(hidden_nd, model.head(), labels_bt.reshape([b * t]), Some(IGNORED))
}

/// Generates the target text of each source text. `model` is one without autodiff (`model.valid()`), and `device` its device. Shorter source
/// texts are padded, and the padding is masked.
///
/// # Errors
///
/// If a text is empty, longer than the model's positions, or has a token outside the vocabulary; if `max_new_tokens` is not below the
/// positions, or [`Sampling`] holds an invalid value.
pub fn generate<M: Seq2SeqModel>(
    model: &M,
    config: &M::Config,
    texts: &[Vec<u32>],
    how: &Sampling,
    device: &Device,
) -> Result<Vec<Vec<u32>>, ModelError> {
    alone(|hooks| generate_with(model, config, texts, how, device, hooks))
}

/// Same as [`generate`], with [`Hooks`].
///
/// # Errors
///
/// Same as [`generate`].
pub fn generate_with<M: Seq2SeqModel>(
    model: &M,
    config: &M::Config,
    texts: &[Vec<u32>],
    how: &Sampling,
    device: &Device,
    hooks: Hooks<'_>,
) -> Result<Vec<Vec<u32>>, ModelError> {
    let settings = config.clone().into().seq2seq().expect("models of these families generate text from text");
    let vocabulary = config.sizes().vocabulary;
    check(texts, |_| 0, settings.positions, vocabulary)?;
    let Some(longest) = texts.iter().map(Vec::len).max() else { return Ok(Vec::new()) };
    let [pad, start] = model.special_tokens();
    let filled = |of: &dyn Fn(&[u32], usize) -> i32| {
        let rows: Vec<i32> = texts.iter().flat_map(|text| (0..longest).map(|at| of(text, at))).collect();
        Tensor::<2, Int>::from_data(TensorData::new(rows, [texts.len(), longest]), device)
    };
    let ids = filled(&|text, at| text.get(at).map_or(pad, |&token| token) as i32);
    let mask = texts.iter().any(|text| text.len() < longest).then(|| filled(&|text, at| (at < text.len()).into()));
    let encoded = model.encode(ids, mask);
    let cache = KvCache::new(CachedRows::new(Vec::new(), 0, None));
    let mut decoder = Decoder { model, encoded, sizes: [settings.positions, vocabulary], device, cache };
    generate_by(&mut decoder, &vec![vec![start]; texts.len()], how, hooks)
}

/// A model with the encoded source texts; each row generates the target text of one.
struct Decoder<'a, M> {
    model: &'a M,
    encoded: Encoded,
    /// Positions and vocabulary.
    sizes: [usize; 2],
    device: &'a Device,
    cache: KvCache,
}

impl<M: Seq2SeqModel> Reader for Decoder<'_, M> {
    fn positions(&self) -> usize {
        self.sizes[0]
    }

    fn vocabulary(&self) -> usize {
        self.sizes[1]
    }

    fn begin(&mut self, rows: CachedRows) {
        self.cache = KvCache::new(rows);
    }

    fn read(&mut self, ids: Vec<i32>, b: usize) -> Vec<f32> {
        let shape = [b, ids.len() / b];
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, shape), self.device);
        let hidden_bd = self.model.decode_next(&self.encoded, ids, &mut self.cache);
        numbers(next_logits(hidden_bd, self.model.head()))
    }

    fn take(&mut self, rows: &[usize]) {
        self.cache.take(rows);
    }
}
