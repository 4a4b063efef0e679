//! cargo run -p zero-models --example export_tiny -- OUT
//!
//! Exports tiny models of all families, with tied and untied heads, in fp32 and bf16, in one file and in several, and writes their
//! outputs: the Rust side of `tests/transformers_export.sh`.

#[path = "../tests/models/common/mod.rs"]
mod common;

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use common::noisy;
use common::small::by_path;
use serde_json::{Value, json};
use zero_models::hf_export::{ExportDtype, ExportOptions, export};
use zero_models::llama::{LlamaKind, RopeScaling};
use zero_models::t5::T5Kind;
use zero_models::{
    Activation, BartConfig, BartHead, BertConfig, BertHead, BertKind, Gpt2Config, LlamaConfig, ModelConfig,
    ProblemType, Seq2SeqLm, T5Config,
};

const VOCABULARY: usize = 101;
const ROWS: [usize; 2] = [3, 14];
/// Number of tokens in each row; the rest is padding.
const TOKENS: [usize; 3] = [11, 14, 9];

fn main() -> Result<(), Box<dyn Error>> {
    let out = std::env::args().nth(1).ok_or("name the folder to write")?;
    let out = Path::new(&out);
    let device = Default::default();
    Flex::seed(&device, 7);
    let ids = rows(&device, VOCABULARY, 7);
    for tied in [true, false] {
        let tie = if tied { "tied" } else { "untied" };

        let config = Gpt2Config {
            vocab_size: VOCABULARY,
            n_positions: 16,
            n_embd: 24,
            n_layer: 2,
            n_head: 3,
            n_inner: Some(56),
            tie_word_embeddings: tied,
            ..Gpt2Config::preset("tiny")?
        };
        let model = noisy(config.init::<Flex>(&device));
        let computed = json!({ "input_ids": ints(&ids), "logits": floats(model.forward(ids.clone())) });
        write(out, &format!("gpt2_{tie}"), &config.into(), &model, computed)?;

        let config = BertConfig {
            vocab_size: VOCABULARY,
            hidden_size: 24,
            num_attention_heads: 3,
            intermediate_size: 56,
            max_position_embeddings: 16,
            hidden_act: Activation::GeluErf,
            tie_word_embeddings: tied,
            ..BertConfig::preset("bert-tiny")?
        };
        let encoder = config.clone();
        let model = noisy(config.init::<Flex>(&device));
        let types = rows(&device, 2, 1);
        let padding = TOKENS.map(|tokens| std::array::from_fn::<i32, 14, _>(|t| i32::from(t < tokens)));
        let mask = Tensor::<Flex, 2, Int>::from_data(padding, &device);
        let (logits, relation) = model.forward(ids.clone(), types.clone(), Some(mask.clone()));
        let computed = json!({
            "input_ids": ints(&ids),
            "token_type_ids": ints(&types),
            "attention_mask": ints(&mask),
            "logits": floats(logits),
            "relation": floats(relation),
        });
        write(out, &format!("bert_{tie}"), &config.into(), &model, computed)?;

        for (name, model_type) in [
            ("bert", BertKind::Bert),
            ("roberta", BertKind::Roberta),
            ("xlm-roberta", BertKind::XlmRoberta),
            ("camembert", BertKind::Camembert),
            ("distilbert", BertKind::DistilBert),
        ] {
            let is_roberta = matches!(name, "roberta" | "xlm-roberta" | "camembert");
            let classes = if tied { labels(4) } else { labels(1) };
            for (class, head) in [("mlm", BertHead::MaskedLm), ("classes", BertHead::Classes(classes))] {
                let config = BertConfig {
                    model_type,
                    // The first position of a RoBERTa is row 2.
                    max_position_embeddings: if is_roberta { 18 } else { 16 },
                    type_vocab_size: if matches!(name, "bert") { 2 } else { 1 },
                    pad_token_id: usize::from(is_roberta),
                    problem_type: (class == "classes" && tied).then_some(ProblemType::MultiLabelClassification),
                    head: head.clone(),
                    ..encoder.clone()
                };
                let model = noisy(config.init::<Flex>(&device));
                let zeros = types.zeros_like();
                let types = if name == "bert" { &types } else { &zeros };
                // Transformers finds a RoBERTa's padding by its id.
                let ids = if is_roberta {
                    ids.clone().clamp_min(2).mask_fill(mask.clone().equal_elem(0), 1)
                } else {
                    ids.clone()
                };
                let logits = match class {
                    "mlm" => floats(model.predict_tokens(ids.clone(), types.clone(), Some(mask.clone()))),
                    _ => floats(model.classify(ids.clone(), types.clone(), Some(mask.clone()))),
                };
                let mut computed = json!({ "input_ids": ints(&ids), "attention_mask": ints(&mask), "logits": logits });
                if name == "bert" {
                    computed["token_type_ids"] = ints(types).into();
                }
                write(out, &format!("{name}-{class}_{tie}"), &config.into(), &model, computed)?;
            }
        }

        let scaling = RopeScaling::Llama3 {
            factor: 4.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8,
        };
        let long = RopeScaling::LongRope {
            short_factor: vec![1.0, 1.5, 2.0],
            long_factor: vec![1.5, 2.0, 4.0],
            original_max_position_embeddings: 8,
            factor: None,
            attention_factor: None,
        };
        for (name, model_type) in [
            ("llama", LlamaKind::Llama),
            ("mistral", LlamaKind::Mistral),
            ("qwen2", LlamaKind::Qwen2),
            ("qwen3", LlamaKind::Qwen3),
            ("gemma", LlamaKind::Gemma),
            ("gemma2", LlamaKind::Gemma2),
            ("gemma3", LlamaKind::Gemma3),
            ("phi3", LlamaKind::Phi3),
        ] {
            let config = LlamaConfig {
                model_type,
                vocab_size: VOCABULARY,
                hidden_size: 24,
                intermediate_size: 40,
                num_key_value_heads: if tied { 4 } else { 2 },
                // A Gemma's is 256 if it is not given.
                head_dim: (!tied && name != "phi3" || name.starts_with("gemma")).then_some(8),
                max_position_embeddings: 16,
                rope_scaling: Some(if name == "phi3" { long.clone() } else { scaling.clone() }).filter(|_| tied),
                attn_logit_softcapping: (name == "gemma2").then_some(3.0),
                final_logit_softcapping: (name == "gemma2").then_some(2.0),
                attention_bias: tied,
                sliding_window: (model_type != LlamaKind::Llama).then_some(5),
                use_sliding_window: tied,
                tie_word_embeddings: tied,
                ..LlamaConfig::preset("llama-tiny")?
            };
            let model = noisy(config.init::<Flex>(&device));
            let computed = json!({ "input_ids": ints(&ids), "logits": floats(model.forward(ids.clone())) });
            write(out, &format!("{name}_{tie}"), &config.into(), &model, computed)?;
        }

        let config = BartConfig {
            vocab_size: VOCABULARY,
            d_model: 24,
            encoder_ffn_dim: 40,
            decoder_ffn_dim: 56,
            encoder_layers: 1,
            max_position_embeddings: 16,
            scale_embedding: tied,
            ..BartConfig::preset("bart-tiny")?
        };
        let model = noisy(config.init::<Flex>(&device));
        let logits = floats(model.forward(types.clone(), Some(mask.clone()), ids.clone()));
        let computed = json!({
            "input_ids": ints(&types),
            "attention_mask": ints(&mask),
            "decoder_input_ids": ints(&ids),
            "logits": logits,
        });
        let scaled = if tied { "scaled" } else { "plain" };
        write(out, &format!("bart_{scaled}"), &config.clone().into(), &model, computed)?;

        let config = BartConfig { head: BartHead::Classes(labels(if tied { 3 } else { 1 })), ..config };
        let model = noisy(config.init::<Flex>(&device));
        // Each row ends with the token that ends a text.
        let last = TOKENS.map(|tokens| std::array::from_fn::<i32, 14, _>(|t| i32::from(t + 1 == tokens)));
        let is_last = Tensor::<Flex, 2, Int>::from_data(last, &device).equal_elem(1);
        let ends = ids.clone().mask_fill(ids.clone().equal_elem(2), 3).mask_fill(is_last, 2);
        let logits = floats(model.classify(ends.clone(), Some(mask.clone())));
        let computed = json!({ "input_ids": ints(&ends), "attention_mask": ints(&mask), "logits": logits });
        write(out, &format!("bart-classes_{scaled}"), &config.into(), &model, computed)?;

        for (name, model_type) in [("t5", T5Kind::T5), ("mt5", T5Kind::Mt5)] {
            // As published: of version 1.0, or with a gate. A head of its own, or none.
            let is_first = tied && model_type == T5Kind::T5;
            let config = T5Config {
                model_type,
                vocab_size: VOCABULARY,
                d_model: 24,
                d_kv: 5,
                d_ff: 40,
                num_layers: 1,
                num_decoder_layers: 2,
                num_heads: 4,
                relative_attention_num_buckets: 8,
                relative_attention_max_distance: 10,
                // An mT5 is not scaled, and its logits would be large.
                initializer_factor: 0.4,
                is_gated_act: !is_first,
                activation: if is_first { Activation::Relu } else { Activation::GeluTanh },
                tie_word_embeddings: tied,
                scale_decoder_outputs: is_first,
                ..T5Config::preset("t5-small")?
            };
            let model = noisy(config.init::<Flex>(&device));
            let logits = floats(model.forward(types.clone(), Some(mask.clone()), ids.clone()));
            let computed = json!({
                "input_ids": ints(&types),
                "attention_mask": ints(&mask),
                "decoder_input_ids": ints(&ids),
                "logits": logits,
            });
            write(out, &format!("{name}_{tie}"), &config.into(), &model, computed)?;
        }
    }
    Ok(())
}

fn rows(
    device: &<Flex as burn::tensor::backend::BackendTypes>::Device,
    below: usize,
    factor: usize,
) -> Tensor<Flex, 2, Int> {
    let ids: Vec<i32> = (0..ROWS[0] * ROWS[1]).map(|i| ((i * i * factor + i / 5) % below) as i32).collect();
    Tensor::from_data(TensorData::new(ids, ROWS), device)
}

fn labels(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("label {i}")).collect()
}

fn ints(x: &Tensor<Flex, 2, Int>) -> Vec<Vec<i64>> {
    let flat: Vec<i64> = x.to_data().iter().collect();
    flat.chunks(ROWS[1]).map(<[i64]>::to_vec).collect()
}

fn floats<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
    x.into_data().iter().collect()
}

fn write<M: Module<Flex>>(
    out: &Path,
    name: &str,
    config: &ModelConfig,
    model: &M,
    computed: Value,
) -> Result<(), Box<dyn Error>> {
    let values: HashMap<_, _> = by_path(model).into_iter().collect();
    for (dtype, files, max_shard_bytes) in
        [(ExportDtype::Fp32, "one", 1 << 40), (ExportDtype::Bf16, "one", 1 << 40), (ExportDtype::Fp32, "many", 20_000)]
    {
        let options = ExportOptions { dtype, max_shard_bytes, ..ExportOptions::default() };
        let folder = out.join(format!("{name}-{dtype}-{files}"));
        export(config, &folder, &options, |param, range| Ok(values[&param.path][range].to_vec()))?;
    }
    std::fs::write(out.join(format!("{name}.json")), computed.to_string())?;
    Ok(())
}
