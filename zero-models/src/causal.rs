//! Families of models that make text: traits for generation, and for training to predict the next token or to make texts of texts.

use std::fmt::Debug;

#[cfg(feature = "burn")]
use burn::tensor::{Int, Tensor};
#[cfg(feature = "burn")]
use zero_ops::FusedBackend;

#[cfg(feature = "burn")]
use crate::generate::{Hooks, Sampling, generate_with};
#[cfg(feature = "burn")]
use crate::linear::Adaptable;
#[cfg(feature = "burn")]
use crate::safetensors_file::Checkpoint;
#[cfg(feature = "burn")]
use crate::seq2seq::{self, Seq2SeqLm};
#[cfg(feature = "burn")]
use crate::{Bart, BartHead, Gpt2, Ids, Llama, T5, bart, gpt2, llama, t5};
use crate::{BartConfig, Gpt2Config, LlamaConfig, ModelConfig, Result, T5Config};

/// A family of models that make text, by its configuration.
pub trait TextFamily: Clone + Debug + Send + Sync + Into<ModelConfig> + 'static {
    /// The module.
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend>: Adaptable<B>;

    /// A model with fresh parameters.
    ///
    /// # Panics
    /// If the configuration is refused by the family's `validate`.
    #[cfg(feature = "burn")]
    fn init<B: FusedBackend>(&self, device: &B::Device) -> Self::Model<B>;

    /// The model with the weights of a Hugging Face folder.
    ///
    /// # Errors
    /// As [`gpt2::weights::load_from`].
    #[cfg(feature = "burn")]
    fn load<B: FusedBackend>(
        model: Self::Model<B>,
        checkpoint: &Checkpoint,
        device: &B::Device,
    ) -> Result<Self::Model<B>>;

    /// The tokens that the model makes of each prompt.
    ///
    /// # Errors
    /// As [`generate_with`].
    #[cfg(feature = "burn")]
    fn generate<B: FusedBackend>(
        model: &Self::Model<B>,
        prompts: &[Vec<u32>],
        how: &Sampling,
        device: &B::Device,
        hooks: Hooks<'_>,
    ) -> Result<Vec<Vec<u32>>>;
}

/// A family of models that predict the next token.
pub trait CausalFamily: TextFamily {
    /// The names that [`preset`](Self::preset) knows, small to large.
    const PRESETS: &'static [&'static str];

    /// A configuration by name.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`](crate::ModelError::UnknownPreset), with the list of names.
    fn preset(name: &str) -> Result<Self>;

    /// This family's configuration, if it is one.
    fn of(config: ModelConfig) -> Option<Self>;

    /// Whether a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`](crate::ModelError::ConfigValue) for the first field that is wrong.
    fn validate(&self) -> Result<()>;

    /// The mean loss `[1]` of predicting each label of rows `[b, t]` from the tokens before it. Labels that are
    /// [`IGNORED_LABEL`](crate::loss::IGNORED_LABEL) do not count; the tokens themselves are the labels of plain text.
    ///
    /// # Panics
    /// If rows have fewer than 2 tokens, or more than the model has positions, or if the shapes differ.
    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(
        model: &Self::Model<B>,
        input_ids_bt: Tensor<B, 2, Int>,
        labels_bt: Tensor<B, 2, Int>,
    ) -> Tensor<B, 1>;

    /// Floating-point operations per token of a forward and a backward pass over sequences of `seq` tokens.
    fn flops_per_token(&self, seq: usize) -> u64;

    /// Its sizes.
    fn sizes(&self) -> CausalSizes;
}

/// Sizes of a model that predicts the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalSizes {
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The longest sequence.
    pub positions: usize,
    /// Width of the model.
    pub width: usize,
    /// Number of layers.
    pub layers: usize,
    /// Floats that the fused operations keep for the backward pass, per token and layer.
    pub kept: usize,
}

/// A family of models that make texts of texts.
#[cfg(feature = "burn")]
pub trait Seq2SeqFamily: TextFamily {
    /// The preset that is trained where none is named.
    const DEFAULT: &'static str;

    /// The names that [`preset`](Self::preset) knows, small to large.
    const PRESETS: &'static [&'static str];

    /// A configuration by name.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`](crate::ModelError::UnknownPreset), with the list of names.
    fn preset(name: &str) -> Result<Self>;

    /// This family's configuration, if it is one, with a head that makes texts.
    fn of(config: ModelConfig) -> Option<Self>;

    /// The mean loss `[1]` of labels `[b, t]`, as [`Seq2SeqLm::loss`].
    ///
    /// # Panics
    /// If rows are longer than the model's positions.
    fn loss<B: FusedBackend>(
        model: &Self::Model<B>,
        ids_bu: Ids<B>,
        mask_bu: Option<Ids<B>>,
        labels_bt: Ids<B>,
    ) -> Tensor<B, 1>;

    /// Its sizes.
    fn sizes(&self) -> Seq2SeqSizes;
}

/// Sizes of a model that makes texts of texts.
#[cfg(feature = "burn")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seq2SeqSizes {
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Width of the model.
    pub width: usize,
    /// Width of all heads of an attention.
    pub inner: usize,
    /// Number of layers of the encoder, and width of their feed-forward layers.
    pub encoder: [usize; 2],
    /// As `encoder`, of the decoder.
    pub decoder: [usize; 2],
    /// Matrices of a feed-forward layer: with a gate one more.
    pub matrices: usize,
    /// Heads whose scores of all pairs are kept for the backward pass: none where kernels compute attention.
    pub scores: usize,
}

/// A family whose configuration, model and weights have functions of these names, with the function that makes text.
macro_rules! text_family {
    ($config:ident, $model:ident, $family:ident, $generate:path) => {
        impl TextFamily for $config {
            #[cfg(feature = "burn")]
            type Model<B: FusedBackend> = $model<B>;

            #[cfg(feature = "burn")]
            fn init<B: FusedBackend>(&self, device: &B::Device) -> $model<B> {
                $config::init(self, device)
            }

            #[cfg(feature = "burn")]
            fn load<B: FusedBackend>(model: $model<B>, from: &Checkpoint, device: &B::Device) -> Result<$model<B>> {
                $family::weights::load_from(model, from, device)
            }

            #[cfg(feature = "burn")]
            fn generate<B: FusedBackend>(
                model: &$model<B>,
                prompts: &[Vec<u32>],
                how: &Sampling,
                device: &B::Device,
                hooks: Hooks<'_>,
            ) -> Result<Vec<Vec<u32>>> {
                $generate(model, prompts, how, device, hooks)
            }
        }
    };
}

/// As [`text_family`], with what a configuration has of one that makes texts of texts.
macro_rules! seq2seq_family {
    ($config:ident, $model:ident, $family:ident, $default:literal, |$of:ident| $with_head:expr, |$c:ident| $sizes:expr) => {
        text_family!($config, $model, $family, seq2seq::generate_with);

        #[cfg(feature = "burn")]
        impl Seq2SeqFamily for $config {
            const DEFAULT: &'static str = $default;
            const PRESETS: &'static [&'static str] = $config::PRESETS;

            fn preset(name: &str) -> Result<Self> {
                $config::preset(name)
            }

            fn of(config: ModelConfig) -> Option<Self> {
                if let ModelConfig::$model($of) = config { Some($with_head) } else { None }
            }

            fn loss<B: FusedBackend>(
                model: &$model<B>,
                ids_bu: Ids<B>,
                mask_bu: Option<Ids<B>>,
                labels_bt: Ids<B>,
            ) -> Tensor<B, 1> {
                Seq2SeqLm::loss(model, ids_bu, mask_bu, labels_bt)
            }

            fn sizes(&self) -> Seq2SeqSizes {
                let $c = self;
                $sizes
            }
        }
    };
}

seq2seq_family!(
    BartConfig,
    Bart,
    bart,
    "bart-base",
    |of| BartConfig { head: BartHead::Generation, problem_type: None, ..of },
    |c| Seq2SeqSizes {
        vocabulary: c.vocab_size,
        width: c.d_model,
        inner: c.d_model,
        encoder: [c.encoder_layers, c.encoder_ffn_dim],
        decoder: [c.decoder_layers, c.decoder_ffn_dim],
        matrices: 2,
        scores: 0,
    }
);

seq2seq_family!(T5Config, T5, t5, "t5-small", |of| of, |c| Seq2SeqSizes {
    vocabulary: c.vocab_size,
    width: c.d_model,
    inner: c.inner_width(),
    encoder: [c.num_layers, c.d_ff],
    decoder: [c.num_decoder_layers, c.d_ff],
    matrices: if c.is_gated_act { 3 } else { 2 },
    scores: c.num_heads,
});

/// As [`text_family`], with what a configuration has of one that predicts the next token.
macro_rules! causal_family {
    ($config:ident, $model:ident, $family:ident, |$c:ident| $sizes:expr) => {
        text_family!($config, $model, $family, generate_with);

        impl CausalFamily for $config {
            const PRESETS: &'static [&'static str] = $config::PRESETS;

            fn preset(name: &str) -> Result<Self> {
                $config::preset(name)
            }

            fn of(config: ModelConfig) -> Option<Self> {
                if let ModelConfig::$model(config) = config { Some(config) } else { None }
            }

            fn validate(&self) -> Result<()> {
                $config::validate(self)
            }

            #[cfg(feature = "burn")]
            fn loss<B: FusedBackend>(
                model: &$model<B>,
                input_ids_bt: Tensor<B, 2, Int>,
                labels_bt: Tensor<B, 2, Int>,
            ) -> Tensor<B, 1> {
                model.loss_with_labels(input_ids_bt, labels_bt)
            }

            fn flops_per_token(&self, seq: usize) -> u64 {
                $config::flops_per_token(self, seq)
            }

            fn sizes(&self) -> CausalSizes {
                let $c = self;
                $sizes
            }
        }
    };
}

causal_family!(Gpt2Config, Gpt2, gpt2, |c| CausalSizes {
    vocabulary: c.vocab_size,
    positions: c.n_positions,
    width: c.n_embd,
    layers: c.n_layer,
    // The input, the two norms' results, query, key and value, attention's result, the sum after it, and the feed-forward layer
    // before and after its activation.
    kept: 8 * c.n_embd + 2 * c.inner_width(),
});

causal_family!(LlamaConfig, Llama, llama, |c| CausalSizes {
    vocabulary: c.vocab_size,
    positions: c.positions(),
    width: c.hidden_size,
    layers: c.num_hidden_layers,
    // The input, the two norms' results, the sum between them; turned queries and keys, values, attention's result; gate, up and
    // their product. Of a Qwen3, queries and keys before their norms, too, and after.
    kept: 4 * c.hidden_size
        + 2 * (c.query_width() + c.key_width())
        + if c.has_head_norms() { 2 * (c.query_width() + c.key_width()) } else { 0 }
        + 3 * c.intermediate_size,
});
