//! The laws of the decorator, generic over the inner backend.

pub mod laws;
pub mod model;

use std::time::Duration;

use burn_backend::Backend;
use zero_burn::ZeroDevice;
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchOptions, launch};
use zero_core::Stage;

/// Small buckets and no persistence, so that every path is taken by small models.
pub fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig {
        reduce_bucket_size: 64,
        prefetch_bucket_size: 2_000,
        max_live_parameters: 100_000,
        param_persistence_threshold: 0,
        seed: 7,
        ..ZeroConfig::new(stage)
    }
}

pub fn ranks<B: Backend, T: Send>(
    world: usize,
    config: &ZeroConfig,
    body: impl Fn(ZeroDevice<B::Device>) -> T + Sync,
) -> Vec<T> {
    let options = LaunchOptions { threads_per_rank: 1, deadline: Duration::from_secs(60) };
    launch::<B, T, String>(world, config, &options, |device| Ok(body(device))).unwrap_or_else(|error| panic!("{error}"))
}
