//! Loads a GPT-2 checkpoint into shards and saves them again: `cargo run --features models --example copy -- MODEL CHECKPOINT OUT`.
//!
//! MODEL is a Hugging Face folder with `config.json`. No parameter is updated: `tests/across.sh` compares the bits.

use std::path::PathBuf;

use burn::tensor::Device;
use burn_optim::AdamWConfig;
use zero_core::Stage;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_core::collective::threads::ThreadOptions;
use zero_models::Gpt2Config;
use zero_param::models::Gpt2;
use zero_param::{Error, ZeroConfig, run_threads, shard};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [folder, from, to] = &paths[..] else { return Err("expected the arguments MODEL CHECKPOINT OUT".into()) };
    let config = Gpt2Config::from_file(&folder.join("config.json"))?;
    let model = Gpt2::new(&config, &Device::flex().autodiff());
    let settings = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(Stage::Parameters) };
    let from = Checkpoint::open(from)?;
    let options = SaveOptions { files: from.files()?, ..SaveOptions::default() };
    run_threads(2, &ThreadOptions::default(), |ranks| {
        let (model, zero) = shard(model.clone(), ranks, &settings)?;
        let loaded = zero.load(model, zero.optimizer(&AdamWConfig::new())?, &from)?;
        zero.save(&loaded.model, &loaded.optimizer, to, loaded.steps, loaded.extra, &options)?;
        Ok::<_, Error>(())
    })?;
    Ok(())
}
