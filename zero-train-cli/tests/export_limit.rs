//! cargo test -p zero-train-cli --test export_limit -- --nocapture
//!
//! Exports a model in a process that cannot hold a quarter of it.
#![cfg(target_os = "linux")]

mod sharded;

use std::path::{Path, PathBuf};
use std::process::Command;

use sharded::{element, loaded, save_tensors, state, tensors};
use zero_core::checkpoint::ElementType;
use zero_models::hf_export::ExportOptions;
use zero_models::{BertConfig, ModelConfig};
use zero_train::export::{Weights, export_checkpoint};

const DIR: &str = "ZERO_TEST_EXPORT_DIR";

/// 38 M parameters; the largest has 15 M, the largest one transposed in the file 2.4 M.
fn config() -> ModelConfig {
    let config = BertConfig { vocab_size: 20_000, num_hidden_layers: 3, ..BertConfig::preset("bert-base").unwrap() };
    config.into()
}

fn parameter_bytes() -> usize {
    4 * config().parameters().iter().map(|param| param.numel()).sum::<usize>()
}

/// Not a separate test: the parent runs it under the limit.
#[test]
fn export_under_the_parents_limit() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else { return };
    assert!(Vec::<u8>::new().try_reserve_exact(parameter_bytes() / 2).is_err(), "the limit holds");
    let options = ExportOptions { max_shard_bytes: 30_000_000, ..ExportOptions::default() };
    let exported = export_checkpoint(&dir.join("saves"), &dir.join("out"), &options, None, Weights::Trained).unwrap();
    println!("exported: {:?}", exported.written);
}

#[test]
fn a_model_four_times_larger_than_the_memory_is_exported() {
    let dir = tempfile::tempdir().unwrap();
    save(&dir.path().join("saves"));
    let limit = parameter_bytes() / 4;
    let output = Command::new("sh")
        .args([
            "-c",
            &format!(
                "ulimit -d {} && exec \"$0\" --exact export_under_the_parents_limit --nocapture --test-threads 1",
                limit >> 10
            ),
        ])
        .arg(std::env::current_exe().unwrap())
        .env(DIR, dir.path())
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("exported:"), "{text}");
    println!("{} bytes of parameters exported under a limit of {limit} bytes of memory", parameter_bytes());

    // And what came out is the model.
    for (path, values) in loaded(&config(), &dir.path().join("out")) {
        for i in (0..values.len()).step_by(997) {
            let expected = burn::tensor::bf16::from_f32(element(&path, i)).to_f32();
            assert_eq!(values[i], expected, "{path}[{i}]");
        }
    }
}

fn save(dir: &Path) {
    let mut all = tensors(&config(), ElementType::F32);
    all.retain(|whole| whole.name.starts_with("model."));
    save_tensors(&all, &state(&config()), dir, 3, 2);
}
