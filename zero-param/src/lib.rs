//! ZeRO stages 0 to 3 for modules of Burn 0.22. Its backends are a closed set, so a backend cannot be wrapped as `zero-burn` does for 0.21,
//! but a parameter can be reparameterized.
//!
//! * In: a module, the same on every rank. Out: the same module, whose parameters hold this rank's shard and gather the rest for each use
//!   ([`shard()`]).
//! * Memory: at stage 3 a rank holds its shards, in memory, on a device or on a disk, and a full parameter only while an operation uses it. The backward
//!   pass gathers again; a gradient is held in full until its bucket is reduced.
//!   Of activations, [`checkpoint()`] keeps only inputs of blocks.
//! * Threads: a rank runs on one. Gathers read the other ranks' shards one-sidedly; threads of the rank prefetch them, reduce gradients and
//!   update state on a disk. Within a forward or backward pass, ranks do not wait for each other.
//! * Speed: layers of Burn work unchanged; [`linear`], [`layer_norm`], [`gelu`], [`attention`], [`linear_cross_entropy`] and
//!   [`embedding()`] are kernels. AdamW, Adam and LAMB are one pass. A rank that is a thread computes on its share of the CPU cores.
//! * Numbers: losses have the same bits at every stage, for the same number of ranks and the same place of gradients.
//! * Devices: with the features `cuda`, `vulkan` and `wgpu` the model can be on a device. Its shards are there too, with their optimizer state,
//!   unless [`ZeroConfig::offload`](zero_core::config::Offload) says otherwise.
//! * Features: `train` adds `ZeroStrategy` for the `Learner` of burn-train; `trainer` adds the trainer of `zero-train`; `models` adds language
//!   models and the command `zero-022`; `mpi` lets
//!   [`run_process`] run ranks of mpirun or srun.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_nn::LinearConfig;
//! use burn_optim::AdamWConfig;
//! use zero_core::{Stage, collective::threads::ThreadOptions};
//! use zero_param::{Error, ZeroConfig, run_threads, shard};
//!
//! run_threads(2, &ThreadOptions::default(), |ranks| {
//!     let device = Device::flex().autodiff();
//!     let model = LinearConfig::new(512, 512).init(&device);
//!     let (mut model, zero) = shard(model, ranks, &ZeroConfig::new(Stage::Parameters))?;
//!     let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
//!     for _ in 0..10 {
//!         let rows = Tensor::<2>::ones([8, 512], &device); // this rank's
//!         let (loss, grads) = zero.backward(|| model.forward(rows).square().mean())?;
//!         model = optimizer.step(1e-3, model, grads)?;
//!         println!("{}", loss.into_scalar::<f32>());
//!     }
//!     Ok::<_, Error>(())
//! })
//! .unwrap();
//! ```
//!
//! The paper: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, Rajbhandari et al. 2020,
//! <https://arxiv.org/abs/1910.02054>.

mod activations;
mod backend;
mod buffers;
mod checkpoint;
mod clock;
mod device;
mod engine;
mod error;
mod fused;
mod grads;
mod layers;
#[cfg(feature = "models")]
pub mod models;
mod optim;
mod parameter;
mod random;
mod ranks;
mod reduce;
mod rules;
mod shard;
mod storage;
#[cfg(feature = "train")]
mod strategy;
mod tensors;
#[cfg(feature = "trainer")]
pub mod trainer;
mod update;
mod zero;

pub use activations::{Inputs, checkpoint, checkpoint_block};
pub use checkpoint::Resumed;
pub use error::Error;
pub use fused::{
    Angles, attention, dropout, gelu, layer_norm, linear, linear_cross_entropy, packed_attention, rms_norm, rotary,
    swiglu,
};
pub use grads::Grads;
pub use layers::{dense, embedding, head_cross_entropy, tied_head, without_adapter};
pub use optim::{BoundedLamb, Optimizer, OptimizerConfig};
pub use parameter::Uses;
pub use random::{draw_dropout, initialize};
pub use ranks::{Ranks, run_process, run_threads};
pub use shard::{Gathered, NoAdapters, shard, shard_lora, shard_qlora};
#[cfg(feature = "train")]
pub use strategy::ZeroStrategy;
pub use zero::Zero;
pub use zero_core::config::{self, Float, ZeroConfig};
pub use zero_kernels::options::{AttentionDropout, AttentionOptions, CrossEntropyOptions, Gelu};
pub use zero_kernels::quantized::Format;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../docs/book/src/burn-0-22.md")]
struct Book;

#[cfg(doctest)]
#[doc = include_str!("../../docs/book/src/burn-0-22-features.md")]
struct BookFeatures;
