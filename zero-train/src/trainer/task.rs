//! What is trained: a model, its data, and a loss.

use std::ops::Range;

#[cfg(feature = "burn")]
use burn::backend::Autodiff;
#[cfg(feature = "burn")]
use burn::module::{AutodiffModule, Module};
#[cfg(feature = "burn")]
use burn::tensor::Tensor;
#[cfg(feature = "burn")]
use burn_flex::Flex;
use serde_json::Value;
#[cfg(feature = "burn")]
use zero_burn::Zero;
use zero_core::checkpoint::SideFile;
use zero_models::ModelConfig;
#[cfg(feature = "burn")]
use zero_ops::FusedBackend;

use super::profile::Profile;
use super::recipe::Recipe;
use super::rows::Rows;
use crate::Result;

/// Means over some rows, by name; the loss is the first. Values of one name are terms, and are told as their sum.
pub type Measured = Vec<(&'static str, f64)>;

/// What a [`Trainer`](super::Trainer) trains. Three functions and a type say what that is; all others have a default. Without the
/// feature `burn` a task is what there is to know of model and data, and another front adds what it trains.
///
/// The model is a Burn module over any backend; it names no rank. `rows` are numbers of training examples: every rank is
/// given its own of each micro-batch. All that they need lies in `self`, which ranks that are threads share.
pub trait Task: Sync {
    /// The model. `type Model<B: FusedBackend> = Net<B>;` for a `Net` that derives Burn's `Module`.
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend>: Module<B>;

    /// How many examples there are, with those that are held out and those without a label.
    fn rows(&self) -> usize;

    /// The model with its initial weights.
    ///
    /// # Errors
    /// Of weights that are read.
    #[cfg(feature = "burn")]
    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Self::Model<B>>;

    /// The mean loss `[1]` of these examples, or the means `[terms]` whose sum is the loss. It is called for training, and by
    /// [`evaluate`](Self::evaluate). What is random about an example comes from its seed ([`Rows::seeds`]).
    ///
    /// A mean over anything but examples, such as tokens or labels, needs [`weights`](Self::weights).
    ///
    /// # Errors
    /// Of data that cannot be read.
    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(&self, model: &Self::Model<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>>;

    /// Numbers of items over which the means of these examples are taken: entry `i` belongs to term `i` of [`loss`](Self::loss) and
    /// to value `i` of [`evaluate`](Self::evaluate). Where there is no entry, the mean is over the examples.
    ///
    /// The loss of an update is the sum over all its items divided by their number, in all micro-batches and on all ranks
    /// together; a mean of means would depend on how rows are cut into micro-batches. Held-out means are made in the same way.
    /// It must give equally many entries for all examples.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        let _ = rows;
        Ok(Vec::new())
    }

    /// Measures examples that are held out: means over these, by name, or over their items
    /// ([`weights`](Self::weights)). The first is the loss, by which the best checkpoint is chosen (`--keep-best`).
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    #[cfg(feature = "burn")]
    fn evaluate<B: FusedBackend>(&self, model: &Self::Model<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        Ok(self.loss(model, rows, device)?.into_data().iter::<f64>().map(|term| ("loss", term)).collect())
    }

    /// What is told of the means over all rows that are held out, in the order of what [`evaluate`](Self::evaluate) measures: for
    /// figures that are no means, such as F1. `None` tells the means themselves.
    fn figures(&self, means: &[f64]) -> Option<Measured> {
        let _ = means;
        None
    }

    /// A JSON object for each of these examples with what the model says of it, for `--predictions`; `None` where there is
    /// nothing to say.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    #[cfg(feature = "burn")]
    fn predict<B: FusedBackend>(
        &self,
        model: &Self::Model<B>,
        rows: &Rows,
        device: &B::Device,
    ) -> Result<Option<Vec<Value>>> {
        let _ = (model, rows, device);
        Ok(None)
    }

    /// What the model is called, in the plan and in checkpoints. By default, as the type is.
    fn name(&self) -> String {
        let name = std::any::type_name::<Self>();
        name.rsplit("::").next().unwrap_or(name).to_lowercase()
    }

    /// How many of the last rows with a label are held out for evaluation where `--eval` does not say.
    fn held_out(&self) -> usize {
        0
    }

    /// How many rows, behind those that are held out, have no label: they are neither trained on nor evaluated, and only what the
    /// model says of them is written (`--predictions`).
    fn unlabelled(&self) -> usize {
        0
    }

    /// Whether rows are shuffled anew for every epoch, where `--shuffle` does not say.
    fn shuffle(&self) -> bool {
        true
    }

    /// Tokens of a row at most, where it has some: then speeds are of tokens.
    fn tokens_per_row(&self) -> Option<usize> {
        None
    }

    /// Tokens of these rows without padding, where some have fewer than [`tokens_per_row`](Self::tokens_per_row).
    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        let _ = rows;
        None
    }

    /// Whether `exp(loss)` is a perplexity: where the loss is the mean cross-entropy of a token.
    fn has_perplexity(&self) -> bool {
        false
    }

    /// A checksum of these rows, by which a run that is resumed knows its data.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        let _ = rows;
        Ok(None)
    }

    /// The width of the model's layers, from which the `"auto"` sizes of buckets in a DeepSpeed file follow.
    fn hidden_size(&self) -> Option<usize> {
        None
    }

    /// The model's parameters, and what training on so many rows takes. Without, it is counted, in a forward pass on a backend
    /// that computes nothing.
    fn profile(&self, micro_batch: usize) -> Option<Profile> {
        let _ = micro_batch;
        None
    }

    /// The model's configuration, from which an export has its names and its `config.json`: of a family of this project, or a
    /// [`ModuleConfig`](zero_models::ModuleConfig) with names of one's own. Without, parameters keep their paths in the module.
    fn model_config(&self) -> Option<ModelConfig> {
        None
    }

    /// What the trained model makes, to be shown at the end of a run on the CPU. All ranks call it, and must use the model alike.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    #[cfg(feature = "burn")]
    fn sample<B: FusedBackend>(&self, model: &Self::Model<B>, device: &B::Device) -> Result<Option<String>> {
        let _ = (model, device);
        Ok(None)
    }

    /// What else must be the same on all ranks, and is kept in checkpoints.
    fn settings(&self) -> Value {
        Value::Null
    }

    /// Files that belong to the model beside its weights, such as its tokenizer's: checkpoints and exports keep them.
    fn files(&self) -> Vec<SideFile> {
        Vec::new()
    }

    /// Hyperparameters for a user who gives none of them and no configuration file. Without a recipe, their defaults are taken.
    fn recipe(&self) -> Option<Recipe> {
        None
    }

    /// What a user is to know about the choice of the model, before the plan.
    fn notice(&self) -> Option<String> {
        None
    }
}

/// A task whose model can be trained on ranks that compute on backend `I`; follows from [`Task`] for every model that derives
/// Burn's `Module`.
#[cfg(feature = "burn")]
pub trait TaskOn<I: FusedBackend>:
    Task<Model<Autodiff<Zero<I>>>: AutodiffModule<Autodiff<Zero<I>>, InnerModule = <Self as Task>::Model<Zero<I>>>>
{
}

#[cfg(feature = "burn")]
impl<I, T> TaskOn<I> for T
where
    I: FusedBackend,
    T: Task<Model<Autodiff<Zero<I>>>: AutodiffModule<Autodiff<Zero<I>>, InnerModule = <T as Task>::Model<Zero<I>>>>,
{
}

/// A task that can be trained on every backend of this program; follows from [`Task`] as [`TaskOn`] does.
#[cfg(feature = "burn")]
pub trait AnyTask: TaskOn<Flex> + devices::Cuda + devices::Vulkan {}
#[cfg(feature = "burn")]
impl<T: TaskOn<Flex> + devices::Cuda + devices::Vulkan> AnyTask for T {}

/// Nothing, where the program is built without the feature.
#[cfg(feature = "burn")]
mod devices {
    macro_rules! on_device {
        ($name:ident, $feature:literal, $backend:ty) => {
            #[cfg(feature = $feature)]
            pub trait $name: super::TaskOn<$backend> {}
            #[cfg(feature = $feature)]
            impl<T: super::TaskOn<$backend>> $name for T {}
            #[cfg(not(feature = $feature))]
            pub trait $name {}
            #[cfg(not(feature = $feature))]
            impl<T> $name for T {}
        };
    }
    on_device!(Cuda, "cuda", burn_cuda::Cuda);
    on_device!(Vulkan, "vulkan", burn_wgpu::Vulkan);
}

/// The value of a tensor with one element.
#[cfg(feature = "burn")]
pub fn scalar<B: FusedBackend>(tensor: Tensor<B, 1>) -> f64 {
    tensor.into_data().iter::<f64>().sum()
}
