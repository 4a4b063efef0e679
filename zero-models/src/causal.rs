//! Families of models that generate text: traits for generation, next-token training and sequence-to-sequence training.

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
use crate::{Bart, Documents, Gpt2, Ids, Llama, T5, bart, gpt2, llama, t5};
use crate::{BartConfig, BartHead, Gpt2Config, LlamaConfig, ModelConfig, Result, T5Config};

/// A family of models that generate text, by its configuration.
pub trait TextFamily: Clone + Debug + Send + Sync + Into<ModelConfig> + 'static {
    /// The module.
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend>: Adaptable<B>;

    /// Initializes a model.
    ///
    /// # Panics
    /// If the family's `validate` fails.
    #[cfg(feature = "burn")]
    fn init<B: FusedBackend>(&self, device: &B::Device) -> Self::Model<B>;

    /// Loads the weights of a Hugging Face checkpoint into the model.
    ///
    /// # Errors
    /// Same as [`gpt2::weights::load_from`].
    #[cfg(feature = "burn")]
    fn load<B: FusedBackend>(
        model: Self::Model<B>,
        checkpoint: &Checkpoint,
        device: &B::Device,
    ) -> Result<Self::Model<B>>;

    /// Generates the model's output tokens for each prompt.
    ///
    /// # Errors
    /// Same as [`generate_with`].
    #[cfg(feature = "burn")]
    fn generate<B: FusedBackend>(
        model: &Self::Model<B>,
        prompts: &[Vec<u32>],
        how: &Sampling,
        device: &B::Device,
        hooks: Hooks<'_>,
    ) -> Result<Vec<Vec<u32>>>;
}

/// A family of causal language models, which predict the next token.
pub trait CausalFamily: TextFamily {
    /// Names that [`preset`](Self::preset) accepts, small to large.
    const PRESETS: &'static [&'static str];

    /// Returns the configuration of a preset.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`](crate::ModelError::UnknownPreset), with the list of names.
    fn preset(name: &str) -> Result<Self>;

    /// Returns this family's configuration, if `config` is one.
    fn of(config: ModelConfig) -> Option<Self>;

    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`](crate::ModelError::ConfigValue) for the first field that is wrong.
    fn validate(&self) -> Result<()>;

    /// Returns the mean loss `[1]` of predicting each label of rows `[b, t]` from the tokens before it. Labels equal to
    /// [`IGNORED_LABEL`](crate::loss::IGNORED_LABEL) do not count; for plain text, the labels are the tokens themselves. `documents` are
    /// those of packed rows.
    ///
    /// # Panics
    /// If rows have fewer than 2 tokens or more than the model's positions, or if the shapes differ.
    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(
        model: &Self::Model<B>,
        input_ids_bt: Tensor<B, 2, Int>,
        labels_bt: Tensor<B, 2, Int>,
        documents: Option<&Documents>,
    ) -> Tensor<B, 1>;

    /// Returns the mean loss of each row, `[b]`, like [`loss`](Self::loss) of that row alone.
    ///
    /// # Panics
    /// Same as [`loss`](Self::loss).
    #[cfg(feature = "burn")]
    fn row_losses<B: FusedBackend>(
        model: &Self::Model<B>,
        input_ids_bt: Tensor<B, 2, Int>,
        labels_bt: Tensor<B, 2, Int>,
    ) -> Tensor<B, 1>;

    /// Returns the configuration of the same model without dropout.
    #[must_use]
    fn without_dropout(&self) -> Self;

    /// Returns the floating-point operations per token of a forward and a backward pass over sequences of `seq` tokens.
    fn flops_per_token(&self, seq: usize) -> u64;

    /// Returns the model's sizes.
    fn sizes(&self) -> CausalSizes;
}

/// Sizes of a causal language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalSizes {
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Maximum sequence length.
    pub positions: usize,
    /// Width of the model.
    pub width: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of floats that the fused operations keep for the backward pass, per token and layer.
    pub kept: usize,
}

/// A family of sequence-to-sequence models.
pub trait Seq2SeqFamily: TextFamily {
    /// The preset to train if none is named.
    const DEFAULT: &'static str;

    /// Names that [`preset`](Self::preset) accepts, small to large.
    const PRESETS: &'static [&'static str];

    /// Returns the configuration of a preset.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`](crate::ModelError::UnknownPreset), with the list of names.
    fn preset(name: &str) -> Result<Self>;

    /// Returns this family's configuration with a head that generates text, if `config` is of this family.
    fn of(config: ModelConfig) -> Option<Self>;

    /// Returns the mean loss `[1]` of labels `[b, t]`: [`Seq2SeqLm::loss`].
    ///
    /// # Panics
    /// If rows are longer than the model's positions.
    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(
        model: &Self::Model<B>,
        ids_bu: Ids<B>,
        mask_bu: Option<Ids<B>>,
        labels_bt: Ids<B>,
    ) -> Tensor<B, 1>;

    /// Returns the model's sizes.
    fn sizes(&self) -> Seq2SeqSizes;
}

/// Sizes of a sequence-to-sequence model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seq2SeqSizes {
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Width of the model.
    pub width: usize,
    /// Total width of the attention heads.
    pub inner: usize,
    /// Number of encoder layers, and width of their feed-forward layers.
    pub encoder: [usize; 2],
    /// Number of decoder layers, and width of their feed-forward layers.
    pub decoder: [usize; 2],
    /// Number of matrices of a feed-forward layer; a gate adds one.
    pub matrices: usize,
    /// Number of heads whose scores of all pairs are kept for the backward pass; 0 if kernels compute attention.
    pub scores: usize,
}

/// Implements [`TextFamily`] by the functions of a family's configuration, model and weights, and by the function that generates text.
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

/// Implements [`TextFamily`] and [`Seq2SeqFamily`] for a configuration.
macro_rules! seq2seq_family {
    ($config:ident, $model:ident, $family:ident, $default:literal, |$of:ident| $with_head:expr, |$c:ident| $sizes:expr) => {
        text_family!($config, $model, $family, seq2seq::generate_with);

        impl Seq2SeqFamily for $config {
            const DEFAULT: &'static str = $default;
            const PRESETS: &'static [&'static str] = $config::PRESETS;

            fn preset(name: &str) -> Result<Self> {
                $config::preset(name)
            }

            fn of(config: ModelConfig) -> Option<Self> {
                if let ModelConfig::$model($of) = config { Some($with_head) } else { None }
            }

            #[cfg(feature = "burn")]
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

/// Implements [`TextFamily`] and [`CausalFamily`] for a configuration.
macro_rules! causal_family {
    ($config:ident, $model:ident, $family:ident, [$($dropout:ident),*], |$c:ident| $sizes:expr) => {
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
                documents: Option<&Documents>,
            ) -> Tensor<B, 1> {
                model.packed_loss(input_ids_bt, labels_bt, documents)
            }

            #[cfg(feature = "burn")]
            fn row_losses<B: FusedBackend>(
                model: &$model<B>,
                input_ids_bt: Tensor<B, 2, Int>,
                labels_bt: Tensor<B, 2, Int>,
            ) -> Tensor<B, 1> {
                model.row_losses(input_ids_bt, labels_bt)
            }

            fn without_dropout(&self) -> Self {
                Self { $($dropout: 0.0,)* ..self.clone() }
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

causal_family!(Gpt2Config, Gpt2, gpt2, [embd_pdrop, resid_pdrop, attn_pdrop], |c| CausalSizes {
    vocabulary: c.vocab_size,
    positions: c.n_positions,
    width: c.n_embd,
    layers: c.n_layer,
    // The input, the outputs of both norms, query, key and value, attention's output, the sum after it, and the feed-forward layer
    // before and after its activation.
    kept: 8 * c.n_embd + 2 * c.inner_width(),
});

causal_family!(LlamaConfig, Llama, llama, [attention_dropout, resid_pdrop], |c| CausalSizes {
    vocabulary: c.vocab_size,
    positions: c.positions(),
    width: c.hidden_size,
    layers: c.num_hidden_layers,
    // The input, the outputs of both norms, the sum between them; rotated queries and keys, values, attention's output; gate, up and
    // their product. A model with head norms also keeps queries and keys before and after these norms.
    kept: 4 * c.hidden_size
        + 2 * (c.query_width() + c.key_width())
        + if c.has_head_norms() { 2 * (c.query_width() + c.key_width()) } else { 0 }
        + 3 * c.intermediate_size,
});
