//! `Zero<B>`: ZeRO as a Burn backend decorator.
//!
//! Write `Autodiff<Zero<Flex>>` instead of `Autodiff<Flex>`. On one rank nothing changes. On several ([`launch`]) the same model, loss and
//! optimizer code trains data-parallel, with optimizer state, gradients and parameters sharded according to
//! [`ZeroConfig::stage`](config::ZeroConfig).
//!
//! * In: any Burn 0.21 backend `B`; modules created on a [`ZeroDevice`].
//! * Out: tensors that report their logical shape, whichever shard of them this rank holds.
//! * Memory: a rank owns its shards. Gathered tensors belong to the context's cache, which drops them by policy.
//! * Threads: all operations run on the rank's thread. A reducer thread per rank reduces gradients concurrently with the backward pass, and
//!   a prefetch thread gathers parameters ahead of their use.
//!
//! ```
//! use burn::{nn::LinearConfig, optim::{AdamWConfig, GradientsParams, Optimizer}, tensor::Tensor};
//! use burn_autodiff::Autodiff;
//! use burn_flex::Flex;
//! use zero_burn::{Zero, config::ZeroConfig, launch::launch, module::{collect_grads, prepare}};
//! use zero_core::Stage;
//!
//! type B = Autodiff<Zero<Flex>>;
//! let losses = launch::<Flex, _, String>(2, &ZeroConfig::new(Stage::Parameters), &Default::default(), |device| {
//!     let mut model = prepare::<B, _>(LinearConfig::new(8, 8).init::<B>(&device), &device);
//!     let mut optimizer = AdamWConfig::new().init();
//!     let mut loss = 0.0;
//!     for _ in 0..3 {
//!         let x = Tensor::<B, 2>::ones([4, 8], &device);
//!         let mean = model.forward(x).powf_scalar(2.0).mean();
//!         loss = mean.clone().into_scalar();
//!         let grads = GradientsParams::from_grads(mean.backward(), &model);
//!         let grads = collect_grads::<B, _>(grads, &model);
//!         model = optimizer.step(1e-2, model, grads);
//!     }
//!     Ok(loss)
//! })
//! .unwrap();
//! assert_eq!(losses[0], losses[1]);
//! ```

mod activations;
mod asked;
mod autodiff;
mod backend;
mod birth;
mod context;
mod device;
mod elementwise;
mod engine;
mod experts;
pub mod gathered;
mod grads;
pub mod launch;
pub mod module;
mod ops;
pub mod optim;
pub mod parallel;
mod preparation;
mod random;
pub mod ranks;
mod replicas;
pub mod shards;
pub mod stats;
mod tensor;
mod values;
mod view;
mod walk;

use zero_engine::{abort, current};

pub use backend::Zero;
pub use birth::{load_parameters, load_state};
pub use device::ZeroDevice;
pub use tensor::ZeroTensor;
#[doc(inline)]
pub use zero_core::config;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
