//! The task of a trainer: a model, its data, and a loss.

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

#[cfg(feature = "burn")]
use super::count::Counting;
use super::profile::Profile;
use super::recipe::Recipe;
use super::rows::Rows;
use crate::Result;

/// Means over some rows, by name; the loss is the first. Values with the same name are terms, and their sum is reported.
pub type Measured = Vec<(&'static str, f64)>;

/// A model, its data and its loss, for a [`Trainer`](super::Trainer). Three functions and a type are required; all others
/// have a default. Without the feature `burn`, a task describes only model and data, and another [`Integration`](super::Integration)
/// adds the model itself.
///
/// The model is a Burn module over any backend, and does not depend on the rank. `rows` are numbers of training examples:
/// every rank receives its own in each micro-batch. All data is in `self`, which ranks that are threads share.
pub trait Task: Sync + Sized {
    /// The model: `type Model<B: FusedBackend> = Net<B>;` for a `Net` that derives Burn's `Module`.
    #[cfg(feature = "burn")]
    type Model<B: FusedBackend>: Module<B>;

    /// Returns the number of examples, including those that are held out and those without a label.
    fn rows(&self) -> usize;

    /// Creates the model with its initial weights.
    ///
    /// # Errors
    /// An error if weights cannot be read.
    #[cfg(feature = "burn")]
    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Self::Model<B>>;

    /// Returns the mean loss `[1]` of these examples, or the means `[terms]` whose sum is the loss. Called for training,
    /// and by [`evaluate`](Self::evaluate). Draw an example's random numbers from its seed ([`Rows::seeds`]).
    ///
    /// A mean over anything but examples, such as tokens or labels, needs [`weights`](Self::weights).
    ///
    /// # Errors
    /// An error if data cannot be read.
    #[cfg(feature = "burn")]
    fn loss<B: FusedBackend>(&self, model: &Self::Model<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>>;

    /// Measures these examples by the model before its first update, for a loss that compares the trained model with that one, such as that
    /// of direct preference optimization: equally many values for each example, example after example. A run measures every example that
    /// it uses before it trains, and gives the values to the other functions ([`Rows::reference`]). `None`: the loss needs none.
    ///
    /// # Errors
    /// Same as [`loss`](Self::loss).
    #[cfg(feature = "burn")]
    fn reference<B: FusedBackend>(
        &self,
        model: &Self::Model<B>,
        rows: &Rows,
        device: &B::Device,
    ) -> Result<Option<Vec<f64>>> {
        let _ = (model, rows, device);
        Ok(None)
    }

    /// Returns the numbers of items over which the means of these examples are taken: entry `i` belongs to term `i` of
    /// [`loss`](Self::loss) and to value `i` of [`evaluate`](Self::evaluate). A mean without an entry is over the examples.
    ///
    /// The loss of an update is the sum over all its items divided by their number, in all micro-batches and on all ranks
    /// together; a mean of means would depend on how rows are split into micro-batches. Held-out means are computed in the
    /// same way. The number of entries must be the same for all examples.
    ///
    /// # Errors
    /// Same as [`loss`](Self::loss).
    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        let _ = rows;
        Ok(Vec::new())
    }

    /// Measures held-out examples: means over them, by name, or over their items ([`weights`](Self::weights)). The first is
    /// the loss, by which the best checkpoint is chosen (`--keep-best`).
    ///
    /// # Errors
    /// Same as [`loss`](Self::loss).
    #[cfg(feature = "burn")]
    fn evaluate<B: FusedBackend>(&self, model: &Self::Model<B>, rows: &Rows, device: &B::Device) -> Result<Measured> {
        Ok(self.loss(model, rows, device)?.into_data().iter::<f64>().map(|term| ("loss", term)).collect())
    }

    /// Computes the reported figures from the means over all held-out rows, in the order of [`evaluate`](Self::evaluate):
    /// for figures that are not means, such as F1. `None` reports the means themselves.
    fn figures(&self, means: &[f64]) -> Option<Measured> {
        let _ = means;
        None
    }

    /// Returns a JSON object with the model's prediction for each of these examples, for `--predictions`; `None` if the task makes none.
    ///
    /// # Errors
    /// Same as [`loss`](Self::loss).
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

    /// Returns the model's name, for the plan and for checkpoints. By default, the type's name in lower case.
    fn name(&self) -> String {
        let name = std::any::type_name::<Self>();
        name.rsplit("::").next().unwrap_or(name).to_lowercase()
    }

    /// Returns the number of last rows with a label that are held out for evaluation; `--eval` overrides it.
    fn held_out(&self) -> usize {
        0
    }

    /// Returns the number of rows after the held-out ones that have no label: they are neither trained on nor evaluated,
    /// and only predictions are written for them (`--predictions`).
    fn unlabelled(&self) -> usize {
        0
    }

    /// Returns whether rows are shuffled anew for every epoch; `--shuffle` overrides it.
    fn shuffle(&self) -> bool {
        true
    }

    /// Returns the maximum number of tokens of a row, if rows have tokens; speeds are then in tokens.
    fn tokens_per_row(&self) -> Option<usize> {
        None
    }

    /// Returns the number of tokens of these rows without padding, if some have fewer than [`tokens_per_row`](Self::tokens_per_row).
    fn tokens(&self, rows: &[usize]) -> Option<usize> {
        let _ = rows;
        None
    }

    /// Returns whether `exp(loss)` is a perplexity, which it is if the loss is the mean cross-entropy of a token.
    fn has_perplexity(&self) -> bool {
        false
    }

    /// Returns a checksum of these rows, by which a resumed run recognizes its data.
    ///
    /// # Errors
    /// Same as [`loss`](Self::loss).
    fn checksum(&self, rows: Range<usize>) -> Result<Option<u32>> {
        let _ = rows;
        Ok(None)
    }

    /// Returns the width of the model's layers, which determines the `"auto"` bucket sizes of a DeepSpeed file.
    fn hidden_size(&self) -> Option<usize> {
        None
    }

    /// Returns the model's parameters, and the memory and compute of training on `micro_batch` rows. By default, they are
    /// counted in a forward pass on a backend that computes nothing. Without the feature `burn` the default is an empty profile, which
    /// the [`Integration`](super::Integration) completes.
    ///
    /// # Errors
    /// Same as [`model`](Self::model) and [`loss`](Self::loss).
    fn profile(&self, micro_batch: usize) -> Result<Profile> {
        #[cfg(feature = "burn")]
        return super::count::profile(
            [self.rows(), micro_batch],
            |device| self.model::<Counting>(device),
            |model, rows, device| self.loss(model, rows, device),
        );
        #[cfg(not(feature = "burn"))]
        {
            let _ = micro_batch;
            Ok(Profile::default())
        }
    }

    /// Returns the model's configuration, from which an export takes its names and its `config.json`: of a family of this
    /// project, or a [`ModuleConfig`](zero_models::ModuleConfig) with your own names. With `None`, parameters keep their
    /// paths in the module.
    fn model_config(&self) -> Option<ModelConfig> {
        None
    }

    /// Returns a sample of the trained model's output, shown at the end of a run on the CPU. All ranks call it, and must
    /// use the model alike.
    ///
    /// # Errors
    /// Same as [`loss`](Self::loss).
    #[cfg(feature = "burn")]
    fn sample<B: FusedBackend>(&self, model: &Self::Model<B>, device: &B::Device) -> Result<Option<String>> {
        let _ = (model, device);
        Ok(None)
    }

    /// Returns other settings that must be the same on all ranks, and that checkpoints keep.
    fn settings(&self) -> Value {
        Value::Null
    }

    /// Returns the model's files other than its weights, such as its tokenizer's. Checkpoints and exports keep them.
    fn files(&self) -> Vec<SideFile> {
        Vec::new()
    }

    /// Returns hyperparameters for a user who gives none of them and no configuration file. With `None`, their defaults are used.
    fn recipe(&self) -> Option<Recipe> {
        None
    }

    /// Returns some rows as the model sees them, which `--dry-run` shows after the plan.
    fn examples(&self) -> Option<String> {
        None
    }

    /// Returns a message about the choice of the model, shown before the plan.
    fn notice(&self) -> Option<String> {
        None
    }
}

/// A task whose model can be trained by ranks that compute on backend `I`; implemented for every [`Task`] whose model
/// derives Burn's `Module`.
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

/// A task that can be trained on every backend of this program; implemented under the same condition as [`TaskOn`].
#[cfg(feature = "burn")]
pub trait AnyTask: TaskOn<Flex> + devices::Cuda + devices::Vulkan {}
#[cfg(feature = "burn")]
impl<T: TaskOn<Flex> + devices::Cuda + devices::Vulkan> AnyTask for T {}

/// Traits without requirements if the program is built without the feature.
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

/// Returns the value of a tensor with one element.
#[cfg(feature = "burn")]
pub fn scalar<B: FusedBackend>(tensor: Tensor<B, 1>) -> f64 {
    tensor.into_data().iter::<f64>().sum()
}
