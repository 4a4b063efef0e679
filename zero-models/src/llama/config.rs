//! The configuration of Llama and its variants: from a preset or Hugging Face's `config.json`, with parameter counts, shapes and
//! floating-point operations.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::RopeScaling;
use crate::hf_config::{check_count, check_values, find_preset, hf_config, named, names};
use crate::{ModelError, Result};

/// A variant of Llama, by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LlamaKind {
    /// Llama, of all three generations.
    Llama,
    /// Mistral: attention within a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: queries, keys and values have biases.
    Qwen2,
    /// Qwen3, dense: query and key heads are normalized before they are rotated.
    Qwen3,
    /// The first Gemma: norms multiply by `1 + weight`, embeddings are scaled, and the gate is a GELU.
    Gemma,
    /// The text model of Gemma 3: Gemma with head norms, norms after attention and the feed-forward layer, and a separate RoPE base for
    /// layers with a window.
    #[serde(rename = "gemma3_text")]
    Gemma3,
    /// Gemma 2: Gemma with norms after attention and the feed-forward layer, soft caps of scores and logits, and a window in every other
    /// layer.
    Gemma2,
    /// Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: queries, keys and values are one linear layer, and so are gate and up projection.
    Phi3,
}

/// The positions that a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// All earlier positions.
    FullAttention,
    /// Positions within the sliding window.
    SlidingAttention,
}

hf_config! {
    /// The configuration of Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, the text model of Gemma 3, or Phi-3.
    pub struct LlamaConfig of "Llama" {
        /// The variant.
        model_type: LlamaKind = LlamaKind::Llama,
        /// Number of tokens in the vocabulary.
        vocab_size: usize = 32000,
        /// Width of the model.
        hidden_size: usize = 4096,
        /// Width of the feed-forward layer.
        intermediate_size: usize = 11008,
        /// Number of layers.
        num_hidden_layers: usize = 32,
        /// Number of query heads.
        num_attention_heads: usize = 32,
        /// Number of key and value heads, which divides the number of query heads and defaults to it.
        num_key_value_heads: usize = 32,
        /// Width of a head; if absent, 128 for Qwen3, 256 for Gemma, and `hidden_size / num_attention_heads` otherwise.
        // Transformers' Qwen2 reads null as a width.
        #[serde(skip_serializing_if = "Option::is_none")]
        head_dim: Option<usize> = None,
        /// Maximum sequence length, before RoPE scaling.
        max_position_embeddings: usize = 2048,
        /// Epsilon that norms add to the mean square.
        rms_norm_eps: f64 = 1e-6,
        /// RoPE base.
        rope_theta: f64 = 10000.0,
        /// RoPE base of Gemma 3's layers with a window.
        rope_local_base_freq: f64 = 10000.0,
        /// Gemma 2 and 3 divide queries by the square root of this, instead of that of the head width.
        query_pre_attn_scalar: usize = 256,
        /// Soft cap of Gemma 2 and 3: attention scores `x` become `cap * tanh(x / cap)`.
        attn_logit_softcapping: Option<f64> = None,
        /// Soft cap of Gemma 2 and 3: logits `x` become `cap * tanh(x / cap)`.
        final_logit_softcapping: Option<f64> = None,
        /// RoPE scaling; for Gemma 3, in layers without a window.
        rope_scaling: Option<RopeScaling> = None,
        /// Fraction of a head's elements that RoPE rotates in Phi-3.
        partial_rotary_factor: f64 = 1.0,
        /// True if the attention of Llama, Qwen3 or Gemma has biases.
        attention_bias: bool = false,
        /// Dropout probability of attention probabilities.
        attention_dropout: f64 = 0.0,
        /// Dropout probability of the outputs of attention and the feed-forward layer in Phi-3.
        resid_pdrop: f64 = 0.0,
        /// Size of the sliding window in tokens, including the position itself, in Mistral, Gemma 2 and 3, Phi-3, and Qwen if
        /// `use_sliding_window`.
        sliding_window: Option<usize> = None,
        /// True if Qwen uses the window.
        use_sliding_window: bool = false,
        /// The first layer of Qwen with the window, unless `layer_types` is given.
        max_window_layers: usize = 0,
        /// The attention type of each layer, in Qwen and Gemma 2 and 3.
        #[serde(skip_serializing_if = "Option::is_none")]
        layer_types: Option<Vec<LayerType>> = None,
        /// Standard deviation of initial weights.
        initializer_range: f64 = 0.02,
        /// True if the head's weight is the token embedding.
        tie_word_embeddings: bool = false,
    }
    given complete;
    refused {
        hidden_act: String = "silu".to_string(),
        mlp_bias: bool = false,
    }
}

/// Vocabulary, width, feed-forward width, layers, query heads, key heads, positions.
type Sizes = [usize; 7];

/// Name, variant, sizes and RoPE base of each preset.
const PRESETS: [(&str, (LlamaKind, Sizes, f64)); 29] = [
    ("llama-tiny", (LlamaKind::Llama, [50257, 64, 176, 2, 4, 2, 128], 1e4)),
    ("qwen2.5-0.5b", (LlamaKind::Qwen2, [151_936, 896, 4864, 24, 14, 2, 32768], 1e6)),
    ("qwen3-0.6b", (LlamaKind::Qwen3, [151_936, 1024, 3072, 28, 16, 8, 40960], 1e6)),
    ("gemma3-1b", (LlamaKind::Gemma3, [262_144, 1152, 6912, 26, 4, 1, 32768], 1e6)),
    ("llama-3.2-1b", (LlamaKind::Llama, [128_256, 2048, 8192, 16, 32, 8, 131_072], 5e5)),
    ("qwen2.5-1.5b", (LlamaKind::Qwen2, [151_936, 1536, 8960, 28, 12, 2, 131_072], 1e6)),
    ("qwen3-1.7b", (LlamaKind::Qwen3, [151_936, 2048, 6144, 28, 16, 8, 40960], 1e6)),
    ("gemma-2b", (LlamaKind::Gemma, [256_000, 2048, 16384, 18, 8, 1, 8192], 1e4)),
    ("gemma2-2b", (LlamaKind::Gemma2, [256_000, 2304, 9216, 26, 8, 4, 8192], 1e4)),
    ("llama-3.2-3b", (LlamaKind::Llama, [128_256, 3072, 8192, 28, 24, 8, 131_072], 5e5)),
    ("phi-3-mini", (LlamaKind::Phi3, [32064, 3072, 8192, 32, 32, 32, 4096], 1e4)),
    ("phi-4-mini", (LlamaKind::Phi3, [200_064, 3072, 8192, 32, 24, 8, 4096], 1e4)),
    ("qwen3-4b", (LlamaKind::Qwen3, [151_936, 2560, 9728, 36, 32, 8, 40960], 1e6)),
    ("llama-2-7b", (LlamaKind::Llama, [32000, 4096, 11008, 32, 32, 32, 4096], 1e4)),
    ("mistral-7b", (LlamaKind::Mistral, [32000, 4096, 14336, 32, 32, 8, 32768], 1e4)),
    ("qwen2.5-7b", (LlamaKind::Qwen2, [152_064, 3584, 18944, 28, 28, 4, 131_072], 1e6)),
    ("llama-3-8b", (LlamaKind::Llama, [128_256, 4096, 14336, 32, 32, 8, 8192], 5e5)),
    ("qwen3-8b", (LlamaKind::Qwen3, [151_936, 4096, 12288, 36, 32, 8, 40960], 1e6)),
    ("gemma-7b", (LlamaKind::Gemma, [256_000, 3072, 24576, 28, 16, 16, 8192], 1e4)),
    ("gemma2-9b", (LlamaKind::Gemma2, [256_000, 3584, 14336, 42, 16, 8, 8192], 1e4)),
    ("llama-2-13b", (LlamaKind::Llama, [32000, 5120, 13824, 40, 40, 40, 4096], 1e4)),
    ("phi-4", (LlamaKind::Phi3, [100_352, 5120, 17920, 40, 40, 10, 16384], 25e4)),
    ("qwen3-14b", (LlamaKind::Qwen3, [151_936, 5120, 17408, 40, 40, 8, 40960], 1e6)),
    ("qwen2.5-14b", (LlamaKind::Qwen2, [152_064, 5120, 13824, 48, 40, 8, 131_072], 1e6)),
    ("gemma2-27b", (LlamaKind::Gemma2, [256_000, 4608, 36864, 46, 32, 16, 8192], 1e4)),
    ("qwen3-32b", (LlamaKind::Qwen3, [151_936, 5120, 25600, 64, 64, 8, 40960], 1e6)),
    ("qwen2.5-32b", (LlamaKind::Qwen2, [152_064, 5120, 27648, 64, 40, 8, 131_072], 1e6)),
    ("llama-2-70b", (LlamaKind::Llama, [32000, 8192, 28672, 80, 64, 8, 4096], 1e4)),
    ("llama-3-70b", (LlamaKind::Llama, [128_256, 8192, 28672, 80, 64, 8, 8192], 5e5)),
];

impl LlamaConfig {
    /// Names that [`preset`](Self::preset) accepts, small to large.
    pub const PRESETS: &'static [&'static str] = &names(&PRESETS);

    /// Returns the configuration of a preset: `llama-tiny` (3.3 M parameters, nearly all token embedding, with GPT-2's vocabulary), or a
    /// published size.
    ///
    /// # Errors
    /// [`ModelError::UnknownPreset`], with the list of names.
    pub fn preset(name: &str) -> Result<Self> {
        let (model_type, sizes, rope_theta) = find_preset(Self::FAMILY, &PRESETS, Self::PRESETS, name)?;
        let [
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            positions,
        ] = sizes;
        let long = name.starts_with("llama-3.2");
        Ok(Self {
            model_type,
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            max_position_embeddings: positions,
            // The published value, even if the larger models of a family differ.
            rms_norm_eps: match model_type {
                LlamaKind::Llama | LlamaKind::Mistral | LlamaKind::Phi3 => 1e-5,
                _ if matches!(name, "qwen2.5-14b" | "qwen2.5-32b") => 1e-5,
                _ => 1e-6,
            },
            rope_theta,
            rope_scaling: long.then_some(RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            }),
            sliding_window: match model_type {
                LlamaKind::Mistral | LlamaKind::Gemma2 => Some(4096),
                LlamaKind::Gemma3 => Some(512),
                LlamaKind::Phi3 if name == "phi-3-mini" => Some(2047),
                _ => None,
            },
            attn_logit_softcapping: (model_type == LlamaKind::Gemma2).then_some(50.0),
            final_logit_softcapping: (model_type == LlamaKind::Gemma2).then_some(30.0),
            partial_rotary_factor: if name == "phi-4-mini" { 0.75 } else { 1.0 },
            // The largest Gemma 2 has other heads than its relatives.
            head_dim: (name == "gemma2-27b").then_some(128),
            query_pre_attn_scalar: if name == "gemma2-27b" { 144 } else { 256 },
            // The published value: true for the smaller models of the newer families.
            tie_word_embeddings: long
                || matches!(model_type, LlamaKind::Gemma | LlamaKind::Gemma2 | LlamaKind::Gemma3)
                || matches!(
                    name,
                    "llama-tiny"
                        | "phi-4-mini"
                        | "qwen2.5-0.5b"
                        | "qwen2.5-1.5b"
                        | "qwen3-0.6b"
                        | "qwen3-1.7b"
                        | "qwen3-4b"
                ),
            ..Self::published()
        })
    }

    /// Checks that a model can have these sizes.
    ///
    /// # Errors
    /// [`ModelError::ConfigValue`] for the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let [vocabulary, width, inner, layers, heads, kv_heads, positions] = named!(self:
            vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
            num_key_value_heads, max_position_embeddings);
        let above_0: Vec<_> = named!(self: rms_norm_eps, initializer_range, rope_theta, rope_local_base_freq)
            .into_iter()
            .chain(self.rope_scaling.iter().flat_map(RopeScaling::numbers))
            .chain([
                ("attn_logit_softcapping", self.attn_logit_softcapping.unwrap_or(1.0)),
                ("final_logit_softcapping", self.final_logit_softcapping.unwrap_or(1.0)),
                ("partial_rotary_factor", self.partial_rotary_factor),
            ])
            .collect();
        let window = ("sliding_window", self.sliding_window.unwrap_or(1));
        let scalar = ("query_pre_attn_scalar", self.query_pre_attn_scalar);
        let sizes = [vocabulary, width, inner, layers, heads, positions, kv_heads, window, scalar];
        let dropouts = named!(self: attention_dropout, resid_pdrop);
        check_values(Self::FAMILY, &sizes, [kv_heads, heads], &dropouts, &above_0)?;
        if self.head_dim.is_none() && !self.is_gemma() && self.model_type != LlamaKind::Qwen3 {
            check_values(Self::FAMILY, &[], [heads, width], &[], &[])?;
        }
        let wrong = |field, got: usize, expected: String| {
            Err(ModelError::ConfigValue { model: Self::FAMILY, field, got: got.to_string(), expected })
        };
        let head_width = self.head_width();
        if head_width == 0 || !head_width.is_multiple_of(2) {
            return wrong("head_dim", head_width, "an even width, because RoPE rotates pairs of elements".into());
        }
        let (factor, rotated) = (self.partial_rotary_factor, self.rotary_width());
        if factor > 1.0 || rotated == 0 || !rotated.is_multiple_of(2) {
            let expected =
                format!("a value of at most 1 that gives an even number of a head's {head_width} elements, at least 2");
            let field = "partial_rotary_factor";
            return Err(ModelError::ConfigValue { model: Self::FAMILY, field, got: factor.to_string(), expected });
        }
        if let Some(RopeScaling::LongRope { short_factor, long_factor, .. }) = &self.rope_scaling
            && let Some(factors) = [short_factor, long_factor].into_iter().find(|list| list.len() != rotated / 2)
        {
            let expected = format!("{} numbers, one for each rotated pair", rotated / 2);
            return wrong("rope_scaling.short_factor and long_factor", factors.len(), expected);
        }
        if let Some(layers) = self.layer_types.as_ref().filter(|layers| layers.len() != self.num_hidden_layers) {
            let expected = format!("a list of num_hidden_layers = {} types", self.num_hidden_layers);
            return wrong("layer_types", layers.len(), expected);
        }
        check_count(Self::FAMILY, "num_hidden_layers", self)
    }

    /// Returns the width of a head.
    pub fn head_width(&self) -> usize {
        self.head_dim.unwrap_or(match self.model_type {
            LlamaKind::Qwen3 => 128,
            LlamaKind::Gemma | LlamaKind::Gemma2 | LlamaKind::Gemma3 => 256,
            _ => self.hidden_size / self.num_attention_heads,
        })
    }

    /// Returns the number of a head's elements that RoPE rotates.
    pub fn rotary_width(&self) -> usize {
        (self.head_width() as f64 * self.partial_rotary_factor) as usize
    }

    /// Returns the total width of the query heads.
    pub fn query_width(&self) -> usize {
        // Saturates instead of overflowing, for a crafted configuration.
        self.num_attention_heads.saturating_mul(self.head_width())
    }

    /// Returns the total width of the key heads, which is also that of the value heads.
    pub fn key_width(&self) -> usize {
        self.num_key_value_heads.saturating_mul(self.head_width())
    }

    /// Returns the size of a layer's sliding window, including the position itself, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let has_window = match self.model_type {
            LlamaKind::Llama | LlamaKind::Gemma => false,
            LlamaKind::Mistral | LlamaKind::Phi3 => true,
            LlamaKind::Gemma2 | LlamaKind::Gemma3 => match &self.layer_types {
                Some(layers) => layers.get(layer) == Some(&LayerType::SlidingAttention),
                None if self.model_type == LlamaKind::Gemma2 => layer.is_multiple_of(2),
                None => !(layer + 1).is_multiple_of(PATTERN),
            },
            LlamaKind::Qwen2 | LlamaKind::Qwen3 => {
                self.use_sliding_window
                    && match &self.layer_types {
                        Some(layers) => layers.get(layer) == Some(&LayerType::SlidingAttention),
                        None => layer >= self.max_window_layers,
                    }
            }
        };
        self.sliding_window.filter(|_| has_window)
    }

    /// Returns the maximum sequence length: `max_position_embeddings`, as extended by [`rope_scaling`](Self::rope_scaling).
    pub fn positions(&self) -> usize {
        let scaled = self
            .rope_scaling
            .as_ref()
            .filter(|_| self.model_type != LlamaKind::Gemma3)
            .and_then(|scaling| scaling.positions(self.max_position_embeddings));
        scaled.unwrap_or(0).max(self.max_position_embeddings)
    }

    /// Returns `true` if queries, keys and values have biases.
    pub fn has_qkv_biases(&self) -> bool {
        self.model_type == LlamaKind::Qwen2 || self.has_output_bias()
    }

    /// Returns `true` if the output projection of attention has a bias.
    pub fn has_output_bias(&self) -> bool {
        !matches!(self.model_type, LlamaKind::Mistral | LlamaKind::Qwen2 | LlamaKind::Phi3) && self.attention_bias
    }

    /// Returns `true` if query and key heads are normalized.
    pub fn has_head_norms(&self) -> bool {
        matches!(self.model_type, LlamaKind::Qwen3 | LlamaKind::Gemma3)
    }

    /// Returns `true` if there are norms after attention and around the feed-forward layer.
    pub fn has_four_norms(&self) -> bool {
        matches!(self.model_type, LlamaKind::Gemma2 | LlamaKind::Gemma3)
    }

    /// Returns `true` if queries, keys and values are one linear layer, and gate and up projection another.
    pub fn is_fused(&self) -> bool {
        self.model_type == LlamaKind::Phi3
    }

    /// Returns `true` if norms multiply by `1 + weight`, embeddings are scaled, and the gate is a GELU.
    pub fn is_gemma(&self) -> bool {
        matches!(self.model_type, LlamaKind::Gemma | LlamaKind::Gemma2 | LlamaKind::Gemma3)
    }

    /// Returns the class in transformers.
    pub(crate) fn architecture(&self) -> &'static str {
        match self.model_type {
            LlamaKind::Llama => "LlamaForCausalLM",
            LlamaKind::Mistral => "MistralForCausalLM",
            LlamaKind::Qwen2 => "Qwen2ForCausalLM",
            LlamaKind::Qwen3 => "Qwen3ForCausalLM",
            LlamaKind::Gemma => "GemmaForCausalLM",
            LlamaKind::Gemma2 => "Gemma2ForCausalLM",
            LlamaKind::Gemma3 => "Gemma3ForCausalLM",
            LlamaKind::Phi3 => "Phi3ForCausalLM",
        }
    }

    /// Returns the floating-point operations per token of a forward and a backward pass over sequences of `seq` tokens, counted as in
    /// [`Gpt2Config::flops_per_token`](crate::Gpt2Config::flops_per_token), within each layer's window.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let [d, q, k, f] =
            [self.hidden_size, self.query_width(), self.key_width(), self.intermediate_size].map(|width| width as u64);
        let layers = self.num_hidden_layers as u64;
        let weights = layers * (2 * d * (q + k) + 3 * d * f) + self.vocab_size as u64 * d;
        let seen = |layer| seq.min(self.window(layer).unwrap_or(seq)) as u64;
        6 * weights + 12 * q * (0..self.num_hidden_layers).map(seen).sum::<u64>()
    }
}

/// Period of the layers of a Gemma 3 that have no window.
const PATTERN: usize = 6;

/// Converts a `config.json` of any variant and version to the keys of [`LlamaConfig`]: adds the variant's defaults, and moves keys that
/// newer files store elsewhere.
fn complete(text: &str) -> Result<String> {
    let syntax = |source| ModelError::ConfigSyntax { model: LlamaConfig::FAMILY, source };
    let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(syntax)?;
    let kind = keys.get("model_type").and_then(Value::as_str).unwrap_or_default().to_string();
    let defaults: Vec<(&str, Value)> = match &*kind {
        "mistral" => vec![
            ("intermediate_size", 14336.into()),
            ("num_key_value_heads", 8.into()),
            ("max_position_embeddings", 131_072.into()),
            ("sliding_window", 4096.into()),
        ],
        "qwen2" | "qwen3" => vec![
            ("intermediate_size", 22016.into()),
            ("vocab_size", 151_936.into()),
            ("max_position_embeddings", 32768.into()),
            ("max_window_layers", 28.into()),
            ("sliding_window", 4096.into()),
        ],
        "gemma" => vec![
            ("vocab_size", 256_000.into()),
            ("hidden_size", 3072.into()),
            ("intermediate_size", 24576.into()),
            ("num_hidden_layers", 28.into()),
            ("num_attention_heads", 16.into()),
            ("num_key_value_heads", 16.into()),
            ("max_position_embeddings", 8192.into()),
            ("tie_word_embeddings", true.into()),
        ],
        "gemma2" => vec![
            ("vocab_size", 256_000.into()),
            ("hidden_size", 2304.into()),
            ("intermediate_size", 9216.into()),
            ("num_hidden_layers", 26.into()),
            ("num_attention_heads", 8.into()),
            ("num_key_value_heads", 4.into()),
            ("max_position_embeddings", 8192.into()),
            ("tie_word_embeddings", true.into()),
            ("sliding_window", 4096.into()),
            ("attn_logit_softcapping", 50.0.into()),
            ("final_logit_softcapping", 30.0.into()),
        ],
        "phi3" => vec![
            ("vocab_size", 32064.into()),
            ("hidden_size", 3072.into()),
            ("intermediate_size", 8192.into()),
            ("max_position_embeddings", 4096.into()),
            ("original_max_position_embeddings", 4096.into()),
            ("rms_norm_eps", 1e-5.into()),
        ],
        "gemma3_text" => vec![
            ("vocab_size", 262_208.into()),
            ("hidden_size", 2304.into()),
            ("intermediate_size", 9216.into()),
            ("num_hidden_layers", 26.into()),
            ("num_attention_heads", 8.into()),
            ("num_key_value_heads", 4.into()),
            ("max_position_embeddings", 131_072.into()),
            ("tie_word_embeddings", true.into()),
            ("sliding_window", 4096.into()),
            ("rope_theta", 1e6.into()),
        ],
        _ => Vec::new(),
    };
    for (key, default) in defaults {
        keys.entry(key).or_insert(default);
    }
    if kind.starts_with("gemma") {
        gemma(&mut keys)?;
    }
    if keys.get("num_key_value_heads").is_none_or(Value::is_null)
        && let Some(heads) = keys.get("num_attention_heads").cloned()
    {
        keys.insert("num_key_value_heads".into(), heads);
    }
    let null_is_absent = |value: &Value| !value.is_null();
    let is_phi = kind == "phi3";
    // Since version 5, transformers writes all RoPE settings as one object.
    let angles =
        ["rope_parameters", "rope_scaling"].map(|key| keys.remove(key)).into_iter().flatten().find(null_is_absent);
    if !is_phi {
        // In transformers, all other variants rotate full heads.
        keys.remove("partial_rotary_factor");
    }
    if let Some(Value::Object(mut angles)) = angles {
        if let Some(theta) = angles.remove("rope_theta") {
            keys.insert("rope_theta".into(), theta);
        }
        // Before version 4.43 the type had another name.
        let kind = angles.remove("rope_type").or_else(|| angles.remove("type"));
        let mut kind = kind.as_ref().and_then(Value::as_str).unwrap_or("default").to_string();
        let mut partial = angles.remove("partial_rotary_factor");
        if is_phi {
            partial.take().map(|part| keys.insert("partial_rotary_factor".into(), part));
            // Older names of the same type.
            if kind == "su" || kind == "yarn" {
                kind = "longrope".into();
            }
        }
        let partial = partial.filter(|part| part.as_f64() != Some(1.0));
        let names = if is_phi { &["longrope"][..] } else { &RopeScaling::NAMES };
        if kind != "default" && !names.contains(&&*kind) || partial.is_some() {
            let got = partial.map_or(format!("\"{kind}\""), |part| format!("a partial_rotary_factor of {part}"));
            let supported = format!("default, {}", names.join(", "));
            return Err(ModelError::Unsupported { model: LlamaConfig::FAMILY, key: "rope_scaling", got, supported });
        }
        if kind != "default" {
            angles.insert("rope_type".into(), kind.into());
            // The top-level key takes precedence over the object, as in transformers.
            const ORIGINAL: &str = "original_max_position_embeddings";
            let positions = keys.get("max_position_embeddings").cloned();
            match keys.get(ORIGINAL) {
                Some(original) => drop(angles.insert(ORIGINAL.into(), original.clone())),
                None => drop(angles.entry(ORIGINAL).or_insert_with(|| {
                    positions.unwrap_or_else(|| LlamaConfig::published().max_position_embeddings.into())
                })),
            }
            keys.insert("rope_scaling".into(), angles.into());
        }
    }
    // The attention type of each layer. A list of equal types is replaced by `use_sliding_window`, except in Gemma 2 and 3.
    let mixes = matches!(&*kind, "qwen2" | "qwen3" | "gemma2" | "gemma3_text");
    if let Some(Value::Array(layers)) = keys.remove("layer_types") {
        let windows = layers.iter().filter(|layer| *layer == "sliding_attention").count();
        let is_mixed = windows > 0 && windows < layers.len();
        if layers.iter().any(|layer| layer != "sliding_attention" && layer != "full_attention") || is_mixed && !mixes {
            let (got, supported) = (Value::from(layers).to_string(), "the same for all layers".to_string());
            return Err(ModelError::Unsupported { model: LlamaConfig::FAMILY, key: "layer_types", got, supported });
        }
        if kind == "mistral" && windows == 0 {
            keys.insert("sliding_window".into(), Value::Null);
        }
        keys.insert("use_sliding_window".into(), (windows > 0).into());
        keys.insert("max_window_layers".into(), 0.into());
        if is_mixed || kind == "gemma2" || kind == "gemma3_text" {
            keys.insert("layer_types".into(), layers.into());
        }
    }
    Ok(Value::from(keys).to_string())
}

/// Converts the keys of a Gemma to those of the other variants: its activation, and the RoPE settings of its two types of layers.
fn gemma(keys: &mut Map<String, Value>) -> Result<()> {
    let given = keys.remove("hidden_activation").filter(|value| !value.is_null());
    let older = keys.remove("hidden_act");
    // Only files of the first Gemma may have the other key, or "gelu" with the same meaning.
    let is_first = keys.get("model_type").is_some_and(|kind| kind == "gemma");
    let activation = given.or(older.filter(|_| is_first));
    match activation.as_ref().and_then(Value::as_str) {
        Some("gelu") if is_first => drop(keys.insert("hidden_act".into(), "silu".into())),
        None | Some("gelu_pytorch_tanh") => drop(keys.insert("hidden_act".into(), "silu".into())),
        Some(other) => {
            let (got, supported) = (format!("\"{other}\""), "\"gelu_pytorch_tanh\"".to_string());
            return Err(ModelError::Unsupported { model: "Gemma", key: "hidden_activation", got, supported });
        }
    }
    // transformers does not use it.
    if keys.get("model_type").is_some_and(|kind| kind == "gemma3_text") {
        keys.remove("attn_logit_softcapping");
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if keys.get("model_type").is_some_and(|kind| kind == "gemma")
            && let Some(cap) = keys.remove(key).filter(|cap| !cap.is_null())
        {
            return Err(ModelError::Unsupported {
                model: "Gemma",
                key,
                got: cap.to_string(),
                supported: "null".into(),
            });
        }
    }
    if keys.get("use_bidirectional_attention").and_then(Value::as_bool) == Some(true) {
        let (got, supported) = ("true".to_string(), "false".to_string());
        return Err(ModelError::Unsupported { model: "Gemma", key: "use_bidirectional_attention", got, supported });
    }
    if let Some(pattern) = keys.remove("sliding_window_pattern").as_ref().and_then(Value::as_u64)
        && !keys.contains_key("layer_types")
    {
        let layers = keys.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(1 << 16);
        let of = |layer: u64| {
            if (layer + 1).is_multiple_of(pattern.max(1)) { "full_attention" } else { "sliding_attention" }
        };
        keys.insert("layer_types".into(), (0..layers).map(of).collect::<Vec<_>>().into());
    }
    // Since version 5, there are RoPE settings for each type of layer.
    if let Some(Value::Object(mut both)) = keys.remove("rope_parameters") {
        if let Some(local) = both.get("sliding_attention") {
            let kind = local.get("rope_type").or(local.get("type")).and_then(Value::as_str).unwrap_or("default");
            if kind != "default" {
                let key = "rope_parameters.sliding_attention.rope_type";
                let (got, supported) = (kind.to_string(), "default".to_string());
                return Err(ModelError::Unsupported { model: "Gemma", key, got, supported });
            }
            if let Some(base) = local.get("rope_theta") {
                keys.insert("rope_local_base_freq".into(), base.clone());
            }
        }
        let of_all = both.remove("full_attention").unwrap_or_else(|| both.into());
        keys.insert("rope_parameters".into(), of_all);
    }
    Ok(())
}

impl LlamaConfig {
    /// Returns the keys of `config.json`, as the variant names them.
    pub(crate) fn to_keys(&self) -> Value {
        let mut all = serde_json::to_value(self).expect("a configuration is numbers and texts");
        let keys = all.as_object_mut().expect("it is an object");
        let (is_phi, is_newer_gemma) = (self.model_type == LlamaKind::Phi3, self.has_four_norms());
        for (key, is_known) in [
            ("rope_local_base_freq", self.model_type == LlamaKind::Gemma3),
            ("query_pre_attn_scalar", is_newer_gemma),
            ("attn_logit_softcapping", is_newer_gemma),
            ("final_logit_softcapping", is_newer_gemma),
            ("partial_rotary_factor", is_phi),
            ("resid_pdrop", is_phi),
        ] {
            if !is_known {
                keys.remove(key);
            }
        }
        if let Some(RopeScaling::LongRope { original_max_position_embeddings: original, .. }) = self.rope_scaling {
            keys.insert("original_max_position_embeddings".into(), original.into());
        }
        // The default of transformers is a token that this embedding has no row for.
        if is_phi && self.vocab_size <= 32000 {
            keys.insert("pad_token_id".into(), Value::Null);
        }
        if self.is_gemma() {
            for key in ["hidden_act", "hidden_activation"] {
                keys.insert(key.into(), "gelu_pytorch_tanh".into());
            }
        }
        all
    }
}

impl LlamaConfig {
    /// Returns the RoPE frequencies: the growth of each pair's angle from one position to the next.
    pub fn rope_frequencies(&self) -> Vec<f32> {
        self.speeds_by(self.rope_theta, self.rope_scaling.as_ref())
    }

    /// Returns the RoPE frequencies of sequences longer than those of pre-training, and that length, if there is a separate list for
    /// them.
    pub fn long_rope_frequencies(&self) -> Option<(usize, Vec<f32>)> {
        let long = self.rope_scaling.as_ref()?.for_long()?;
        let RopeScaling::LongRope { original_max_position_embeddings: original, .. } = long else { return None };
        Some((original, self.speeds_by(self.rope_theta, Some(&long))))
    }

    /// Returns the RoPE frequencies of Gemma 3's layers with a window.
    pub fn local_rope_frequencies(&self) -> Option<Vec<f32>> {
        (self.model_type == LlamaKind::Gemma3).then(|| self.speeds_by(self.rope_local_base_freq, None))
    }

    fn speeds_by(&self, base: f64, scaling: Option<&RopeScaling>) -> Vec<f32> {
        let width = self.rotary_width();
        let speed = |pair: usize| base.powf(-((2 * pair) as f64) / width as f64);
        let scaled = |pair| match scaling {
            Some(scaling) => scaling.scaled(speed(pair), pair, width, base),
            None => speed(pair),
        };
        (0..width / 2).map(|pair| scaled(pair) as f32).collect()
    }

    /// Returns the scale of attention scores.
    pub fn attention_scale(&self) -> f64 {
        let width = if self.has_four_norms() { self.query_pre_attn_scalar } else { self.head_width() };
        (width as f64).sqrt().recip()
    }

    /// Returns the factor of cosines and sines (`attention_factor` of YaRN and LongRoPE).
    pub fn rope_factor(&self) -> f64 {
        self.rope_scaling.as_ref().map_or(1.0, |scaling| scaling.turn_factor(self.max_position_embeddings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_published_sizes() {
        for (name, params) in [
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen3-0.6b", 596_049_920),
            ("gemma3-1b", 999_885_952),
            ("llama-3.2-1b", 1_235_814_400),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("gemma-2b", 2_506_172_416),
            ("gemma2-2b", 2_614_341_888),
            ("llama-3.2-3b", 3_212_749_824),
            ("phi-3-mini", 3_821_079_552),
            ("phi-4-mini", 3_836_021_760),
            ("llama-2-7b", 6_738_415_616),
            ("mistral-7b", 7_241_732_096),
            ("qwen2.5-7b", 7_615_616_512),
            ("llama-3-8b", 8_030_261_248),
            ("gemma-7b", 8_537_680_896),
            ("gemma2-9b", 9_241_705_984),
            ("llama-2-13b", 13_015_864_320),
            ("phi-4", 14_659_507_200),
            ("gemma2-27b", 27_227_128_320),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3-70b", 70_553_706_496),
        ] {
            assert_eq!(LlamaConfig::preset(name).unwrap().num_params(), params, "{name}");
        }
        let sizes: Vec<usize> =
            LlamaConfig::PRESETS.iter().map(|name| LlamaConfig::preset(name).unwrap().num_params()).collect();
        assert!(sizes.is_sorted(), "{sizes:?}");
    }

    #[test]
    fn is_written_as_it_is_read() {
        for name in LlamaConfig::PRESETS {
            let config = LlamaConfig::preset(name).unwrap();
            config.validate().unwrap();
            let text = config.to_keys().to_string();
            assert_eq!(text.contains("head_dim"), name == &"gemma2-27b", "{text}");
            assert!(!text.contains("layer_types"), "{text}");
            assert_eq!(LlamaConfig::from_json(&text).unwrap(), config);
            let text = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<LlamaConfig>(&text).unwrap(), config);
        }
    }

    #[test]
    fn files_of_any_year_are_read() {
        let read = |text: &str| LlamaConfig::from_json(text).unwrap();
        let llama3 =
            r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32"#;
        let old = read(&format!(r#"{{"rope_theta": 5e5, "rope_scaling": {{"rope_type": "llama3", {llama3}}}}}"#));
        let new = read(&format!(r#"{{"rope_parameters": {{"rope_theta": 5e5, "rope_type": "llama3", {llama3}}}}}"#));
        assert_eq!(old, new);
        assert!(matches!(old.rope_scaling, Some(RopeScaling::Llama3 { .. })));
        assert_eq!(old.rope_theta, 5e5);
        let linear = read(r#"{"rope_scaling": {"type": "linear", "factor": 2.0}}"#).rope_scaling;
        assert_eq!(linear, Some(RopeScaling::Linear { factor: 2.0 }));
        let plain = r#"{"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_scaling": null}"#;
        assert_eq!(read(plain), LlamaConfig::published());

        let mistral = read(r#"{"model_type": "mistral"}"#);
        assert_eq!((mistral.window(0), mistral.num_key_value_heads, mistral.has_qkv_biases()), (Some(4096), 8, false));
        assert_eq!(read(r#"{"model_type": "mistral", "sliding_window": null}"#).window(0), None);
        let qwen = read(r#"{"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 28}"#);
        assert_eq!((qwen.window(0), qwen.has_qkv_biases(), qwen.has_output_bias()), (None, true, false));
        let windows =
            r#"{"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": true, "num_hidden_layers": 2"#;
        for (first, expected) in [(0, [Some(9); 2]), (1, [None, Some(9)]), (2, [None; 2])] {
            let config = read(&format!("{windows}, \"max_window_layers\": {first}}}"));
            assert_eq!([0, 1].map(|layer| config.window(layer)), expected);
        }
        let types = format!("{windows}, \"layer_types\": [\"sliding_attention\", \"sliding_attention\"]}}");
        assert_eq!(read(&types).window(1), Some(9));
        let mixed = read(&types.replacen("sliding_attention", "full_attention", 1));
        assert_eq!([0, 1].map(|layer| mixed.window(layer)), [None, Some(9)]);
        assert_eq!(LlamaConfig::from_json(&serde_json::to_string(&mixed).unwrap()).unwrap(), mixed);
        assert_eq!(read(r#"{"model_type": "llama", "sliding_window": 9}"#).window(0), None);

        let gemma = read(r#"{"model_type": "gemma2", "num_hidden_layers": 3}"#);
        assert_eq!([0, 1, 2].map(|layer| gemma.window(layer)), [Some(4096), None, Some(4096)]);
        assert_eq!((gemma.attn_logit_softcapping, gemma.final_logit_softcapping), (Some(50.0), Some(30.0)));
        assert_eq!(read(r#"{"model_type": "gemma2", "attn_logit_softcapping": null}"#).attn_logit_softcapping, None);

        // The keys of Phi-3.5-mini, and those of Phi-4-mini as version 5 writes them.
        let factors = |n: usize| vec![1.5; n];
        let long = format!(r#""short_factor": {0:?}, "long_factor": {0:?}"#, factors(48));
        let text = format!(
            r#"{{"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": {{"type": "su", {long}}}}}"#
        );
        let phi = read(&text);
        assert!(matches!(
            phi.rope_scaling,
            Some(RopeScaling::LongRope { original_max_position_embeddings: 4096, factor: None, .. })
        ));
        assert_eq!((phi.positions(), phi.window(0), phi.rotary_width()), (131_072, None, 96));
        assert_eq!(LlamaConfig::from_json(&phi.to_keys().to_string()).unwrap(), phi);
        let long = format!(r#""short_factor": {0:?}, "long_factor": {0:?}"#, factors(36));
        let phi = read(&format!(
            r#"{{"model_type": "phi3", "original_max_position_embeddings": 100, "rope_parameters": {{"rope_type": "longrope",
                "partial_rotary_factor": 0.75, "original_max_position_embeddings": 100, {long}}}}}"#
        ));
        assert_eq!((phi.partial_rotary_factor, phi.rotary_width()), (0.75, 72));
        let whole = r#"{"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_parameters": {"partial_rotary_factor": 1.0}}"#;
        assert_eq!(read(whole).rotary_width(), 96);
        let biased = read(r#"{"model_type": "phi3", "attention_bias": true}"#);
        assert!(!biased.has_output_bias() && !biased.has_qkv_biases());
        assert_eq!(read(r#"{"model_type": "gemma2", "hidden_act": "silu"}"#), read(r#"{"model_type": "gemma2"}"#));
        // Another family rotates heads whole, whatever this key says.
        assert_eq!(read(r#"{"partial_rotary_factor": 0.5}"#).rotary_width(), 128);
    }

    #[test]
    fn refuses_what_would_change_the_results() {
        for (text, expected) in [
            (r#"{"model_type": "phi2"}"#, r#"a wrong "model_type" (unknown variant"#),
            (
                r#"{"hidden_size": "16"}"#,
                r#"a wrong "hidden_size" (invalid type: string "16", expected a whole number)"#,
            ),
            (r#"{"rope_scaling": {"rope_type": "3d"}}"#, "rope_scaling = \"3d\" is not implemented"),
            (r#"{"rope_scaling": {"rope_type": "longrope"}}"#, "missing field `short_factor`"),
            (
                r#"{"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}"#,
                "long_factor = 1; change it to 48 numbers, one for each rotated pair",
            ),
            (
                r#"{"model_type": "phi3", "partial_rotary_factor": 1.5}"#,
                "partial_rotary_factor = 1.5; change it to a value of at most 1",
            ),
            (r#"{"model_type": "phi3", "partial_rotary_factor": 0.0}"#, "partial_rotary_factor = 0"),
            (r#"{"model_type": "phi3", "head_dim": 9223372036854775808}"#, "parameter count = "),
            (
                r#"{"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}"#,
                "supported: default, longrope",
            ),
            (r#"{"model_type": "gemma2", "hidden_activation": "gelu"}"#, "hidden_activation = \"gelu\""),
            (r#"{"model_type": "gemma2", "final_logit_softcapping": 0.0}"#, "final_logit_softcapping = 0"),
            (r#"{"model_type": "gemma", "final_logit_softcapping": 30.0}"#, "final_logit_softcapping = 30"),
            (r#"{"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}"#, "rope_scaling.factor = -4"),
            (r#"{"rope_parameters": {"partial_rotary_factor": 0.5}}"#, "a partial_rotary_factor of 0.5"),
            (r#"{"rope_scaling": {"type": "linear"}}"#, r#"a wrong "rope_scaling" (missing field `factor`)"#),
            (r#"{"rope_scaling": {"type": "linear", "factor": 0.0}}"#, "rope_scaling.factor = 0"),
            (r#"{"hidden_act": "gelu"}"#, "hidden_act = \"gelu\""),
            (r#"{"mlp_bias": true}"#, "mlp_bias = true"),
            (
                r#"{"num_key_value_heads": 5}"#,
                "num_key_value_heads = 5; change it to a divisor of num_attention_heads = 32",
            ),
            (r#"{"num_attention_heads": 3}"#, "num_attention_heads = 3; change it to a divisor of hidden_size = 4096"),
            (r#"{"head_dim": 3}"#, "head_dim = 3; change it to an even width"),
            (r#"{"model_type": "mistral", "sliding_window": 0}"#, "sliding_window = 0"),
            (
                r#"{"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}"#,
                "layer_types = 2; change it to a list of num_hidden_layers = 32 types",
            ),
            (r#"{"layer_types": ["full_attention", "sliding_attention"]}"#, "the same for all layers"),
            ("[1]", "cannot be read as JSON"),
            (
                r#"{"num_hidden_layers": 9223372036854775808}"#,
                "num_hidden_layers = 9223372036854775808; change it to 1 to",
            ),
            (r#"{"num_hidden_layers": 70000, "hidden_size": 2, "num_attention_heads": 1}"#, "at most 10000"),
            (r#"{"head_dim": 2147483648}"#, "parameter count = "),
        ] {
            let error = LlamaConfig::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn flops_are_six_per_matrix_weight_and_attention() {
        let config = LlamaConfig::preset("llama-2-7b").unwrap();
        let vectors = (2 * 32 + 1) * 4096;
        let matrices = config.num_params() - vectors - 32000 * 4096;
        assert_eq!(config.flops_per_token(1024), 6 * matrices as u64 + 12 * 32 * 4096 * 1024);
    }
}
