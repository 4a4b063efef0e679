//! Hugging Face weights under ZeRO: every stage and number of ranks gives the bits of a plain load, and a rank converts
//! only its shard of a sharded parameter.
//!
//! `cargo test -p zero-tests --test ranks hugging_face -- --nocapture` prints the shares.

use crate::common;

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_flex::Flex;
use common::{B, on_ranks};
use zero_burn::config::ZeroConfig;
use zero_burn::module::prepare;
use zero_burn::stats::rank_stats;
use zero_core::{Partition, Stage};
use zero_models::hf_export::{ExportDtype, ExportOptions, export};
use zero_models::llama::LlamaKind;
use zero_models::safetensors_file::Checkpoint;
use zero_models::{
    BartConfig, BertConfig, Gpt2Config, LlamaConfig, ModelConfig, T5Config, bart, bert, gpt2, llama, t5,
};

/// Sizes that no world size divides.
fn configs() -> [ModelConfig; 5] {
    let gpt2 = Gpt2Config {
        vocab_size: 61,
        n_positions: 13,
        n_embd: 20,
        n_layer: 2,
        n_head: 4,
        n_inner: Some(33),
        ..Gpt2Config::preset("tiny").unwrap()
    };
    let bert = BertConfig {
        vocab_size: 61,
        hidden_size: 20,
        num_attention_heads: 4,
        intermediate_size: 33,
        max_position_embeddings: 13,
        ..BertConfig::preset("bert-tiny").unwrap()
    };
    let llama = LlamaConfig {
        model_type: LlamaKind::Qwen2,
        vocab_size: 61,
        hidden_size: 20,
        intermediate_size: 33,
        num_key_value_heads: 2,
        head_dim: Some(6),
        max_position_embeddings: 13,
        ..LlamaConfig::preset("llama-tiny").unwrap()
    };
    let bart = BartConfig {
        vocab_size: 61,
        d_model: 20,
        encoder_ffn_dim: 33,
        decoder_layers: 1,
        max_position_embeddings: 13,
        ..BartConfig::preset("bart-tiny").unwrap()
    };
    let t5 = T5Config {
        vocab_size: 61,
        d_model: 20,
        d_kv: 7,
        d_ff: 33,
        num_layers: 2,
        num_decoder_layers: 1,
        num_heads: 3,
        tie_word_embeddings: false,
        ..T5Config::preset("t5-small").unwrap()
    };
    [gpt2.into(), bert.into(), llama.into(), bart.into(), t5.into()]
}

/// Writes a checkpoint in two files; every element has a different value.
fn write(config: &ModelConfig, dtype: ExportDtype, out: &Path) {
    let options = ExportOptions { dtype, max_shard_bytes: 20_000, ..ExportOptions::default() };
    let mut next = 0u32;
    export(config, out, &options, |_, range| {
        Ok(range
            .map(|_| {
                next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                next as f32 / 2f32.powi(32) - 0.5
            })
            .collect())
    })
    .unwrap();
}

/// The bits of every parameter, in visiting order.
fn bits<C: Backend, M: Module<C>>(model: &M) -> Vec<Vec<u32>> {
    struct Bits(Vec<Vec<u32>>);
    impl<C: Backend> ModuleVisitor<C> for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<C, D>>) {
            self.0.push(param.val().into_data().iter::<f32>().map(f32::to_bits).collect());
        }
    }
    let mut bits = Bits(Vec::new());
    model.visit(&mut bits);
    bits.0
}

fn plain(config: &ModelConfig, dir: &Path) -> Vec<Vec<u32>> {
    let device = Default::default();
    match config {
        ModelConfig::Gpt2(_) => bits(&gpt2::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::Bert(_) => bits(&bert::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::Bart(_) => bits(&bart::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::T5(_) => bits(&t5::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::Llama(_) => bits(&llama::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        _ => unreachable!("the tests have none"),
    }
}

/// Returns each rank's bits, the bytes it converted, and the bytes of parameters it holds.
fn sharded(config: &ModelConfig, dir: &Path, stage: Stage, world: usize) -> Vec<(Vec<Vec<u32>>, u64, u64)> {
    let zero = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(stage) };
    on_ranks(world, &zero, |device| {
        let checkpoint = Checkpoint::open(dir).unwrap();
        macro_rules! load {
            ($config:expr, $family:ident) => {{
                let model = $config.init::<B>(&device);
                let model = $family::weights::load_from(model, &checkpoint, &device).unwrap();
                let held = rank_stats::<Flex>().model_state_bytes.parameters;
                let loaded = bits::<B, _>(&model);
                assert_eq!(bits::<B, _>(&prepare::<B, _>(model, &device)), loaded, "prepare changes values");
                (loaded, checkpoint.converted_bytes(), held)
            }};
        }
        match config {
            ModelConfig::Gpt2(config) => load!(config, gpt2),
            ModelConfig::Bert(config) => load!(config, bert),
            ModelConfig::Bart(config) => load!(config, bart),
            ModelConfig::T5(config) => load!(config, t5),
            ModelConfig::Llama(config) => load!(config, llama),
            _ => unreachable!("the tests have none"),
        }
    })
}

#[test]
fn every_stage_and_world_has_the_bits_of_a_plain_load_and_converts_its_pieces() {
    for config in configs() {
        for dtype in ExportDtype::ALL {
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("model");
            write(&config, dtype, &out);
            let expected = plain(&config, &out);
            let element_bytes = if dtype == ExportDtype::Fp32 { 4 } else { 2 };
            let sizes: Vec<usize> = config.parameters().iter().map(|param| param.numel()).collect();
            let total: usize = sizes.iter().sum();
            for stage in Stage::ALL {
                for world in 1..=3 {
                    let mut all = 0;
                    for (rank, (got, converted, held)) in sharded(&config, &out, stage, world).into_iter().enumerate() {
                        let what =
                            format!("{:?} {dtype}, stage {stage}, rank {rank} of {world}", config.architecture());
                        assert!(got == expected, "{what}: other bits");
                        let pieces = if stage.shards_parameters() { world } else { 1 };
                        let own: usize =
                            sizes.iter().map(|&size| Partition::new(size, pieces).len(rank.min(pieces - 1))).sum();
                        assert_eq!(converted, (own * element_bytes) as u64, "{what}");
                        assert_eq!(held, 4 * own as u64, "{what}");
                        if stage.shards_parameters() {
                            let share = own as f64 / total as f64;
                            assert!((share - 1.0 / world as f64).abs() < 0.01, "{what}: {share}");
                            println!("{what}: converts {converted} of {} bytes", total * element_bytes);
                        }
                        all += converted;
                    }
                    let copies = if stage.shards_parameters() { 1 } else { world };
                    assert_eq!(all, (copies * total * element_bytes) as u64);
                }
            }
        }
    }
}
