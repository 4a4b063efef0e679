//! LoRA, <https://arxiv.org/abs/2106.09685>: trains a small addition to some linear layers of a frozen model.
//!
//! An adapted layer computes `x W + b + scale * dropout(x) A B` with `A` `[d_in, r]` and `B` `[r, d_out]`; only `A` and `B` are trained.
//! Frozen parameters have no gradient and no optimizer state, and take no part in reductions. On a backend that shards parameters, they
//! are sharded and gathered like any other.
//!
//! * A model's layers are [`Linear`], which computes like Burn's until it has an adapter. [`Adaptable`] lists them. The models of this
//!   crate implement it, and your own module can, with a loop over its layers.
//! * [`LoraConfig`] selects the layers, by their names in Hugging Face's model, and sets the rank and scale. It is PEFT's
//!   `adapter_config.json`.
//! * [`adapt`] adds initialized adapters, [`load`] adds those in a folder that PEFT or `zero export` wrote, and [`merge`] merges them
//!   with the weights in a folder and writes another folder.
//!
//! ```
//! use burn_flex::Flex;
//! use zero_models::lora::{LoraConfig, adapt};
//! use zero_models::{Gpt2Config, ModelConfig};
//!
//! let config = Gpt2Config { vocab_size: 32, n_embd: 16, n_layer: 1, n_head: 2, ..Gpt2Config::preset("tiny")? };
//! let model = config.init::<Flex>(&Default::default());
//! let lora = LoraConfig { r: 4, target_modules: vec!["c_attn".into(), "c_proj".into()], ..LoraConfig::default() };
//! let model = adapt(model, &ModelConfig::from(config), &lora, &Default::default())?;
//! assert!(model.h[0].attn.c_attn.adapter.is_some() && model.h[0].mlp.c_fc.adapter.is_none());
//! # Ok::<(), zero_models::ModelError>(())
//! ```

mod files;

#[cfg(feature = "burn")]
use burn::module::{Initializer, ModuleMapper, Param};
#[cfg(feature = "burn")]
use burn::tensor::Tensor;
#[cfg(feature = "burn")]
use burn::tensor::backend::Backend;
#[cfg(feature = "burn")]
use zero_ops::FusedBackend;

#[cfg(feature = "burn")]
pub use self::files::load;
pub use self::files::{full_embeddings, merge, merge_with, read};
#[cfg(feature = "burn")]
pub use crate::linear::{Adaptable, Adapter, Linear, VisitEmbedding};
pub use crate::peft::LoraConfig;
#[cfg(feature = "burn")]
use crate::{AdaptedModel, ModelConfig, ModelError, Result};

/// Adds an initialized adapter to every layer that `lora` selects, with `A` uniform as in PEFT and `B` zero, and freezes all other
/// parameters except [`LoraConfig::modules_to_save`]. `model` describes the module; its weights must be loaded already.
///
/// # Errors
/// [`ModelError::Adapter`] if no layer has a requested name, or if a value is invalid.
#[cfg(feature = "burn")]
pub fn adapt<B: FusedBackend, M: Adaptable<B>>(
    mut module: M,
    model: &ModelConfig,
    lora: &LoraConfig,
    device: &B::Device,
) -> Result<M> {
    let adapted = AdaptedModel::new(model.clone(), lora.clone(), None)?;
    let paths = adapted.layers()?;
    let trained = adapted.parameters();
    let mut left: Vec<&str> = paths.iter().map(|layer| layer.path.as_str()).collect();
    module.linears(&mut |path, layer| {
        if let Some(at) = left.iter().position(|wanted| *wanted == path) {
            left.swap_remove(at);
            let [d_in, d_out] = layer.sizes();
            // The initialization of torch's linear layers, which PEFT uses for A.
            let bound = (d_in as f64).sqrt().recip();
            let a = Initializer::Uniform { min: -bound, max: bound }.init([d_in, lora.r], device);
            let b = Initializer::Zeros.init([lora.r, d_out], device);
            layer.adapter = Some(Adapter::new(a, b, lora.lora_dropout, lora.scale()));
        }
    });
    module.tables(&mut |path, [rows, width], adapter| {
        if let Some(at) = left.iter().position(|wanted| *wanted == path) {
            left.swap_remove(at);
            // The matrix that is looked up is zero, as in PEFT.
            let a = Initializer::Zeros.init([rows, lora.r], device);
            let b = Initializer::Normal { mean: 0.0, std: 1.0 }.init([lora.r, width], device);
            *adapter = Some(Adapter::new(a, b, 0.0, lora.scale()));
        }
    });
    if let Some(path) = left.first() {
        let problem =
            format!("{path} cannot be adapted: the module does not list it among its linear layers and tables");
        return Err(ModelError::Adapter { problem });
    }
    let mut freeze = Freeze { path: Vec::new(), trained: &|path| trained.iter().any(|param| param.path == path) };
    Ok(module.map(&mut freeze))
}

/// A mapper that sets whether each parameter is trained, by its path.
#[cfg(feature = "burn")]
struct Freeze<'a> {
    path: Vec<String>,
    trained: &'a dyn Fn(&str) -> bool,
}

#[cfg(feature = "burn")]
impl<B: Backend> ModuleMapper<B> for Freeze<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.set_require_grad((self.trained)(&self.path.join(".")))
    }
}
