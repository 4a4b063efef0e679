//! Weights in 8 or 4 bit: of a model that is not trained, or of the base that an adapter is trained for (*QLoRA*,
//! <https://arxiv.org/abs/2305.14314>).
//!
//! Linear layers are quantised as they are loaded, block by block; embeddings, norms, biases and heads stay as they are. Over a backend
//! that shards parameters, shards are quantised: they are what is kept, read from a disk and gathered. What a weight stands for is
//! made where it is used.

use std::collections::HashSet;
use std::path::Path;

use zero_ops::FusedBackend;
pub use zero_ops::quantized::{Format, Quantized};

use crate::Result;
use crate::linear::Adaptable;
use crate::safetensors_file::Checkpoint;

/// Loads a module from a folder, by `load`, with the linear layers that it lists in `format`; those whose paths `is_kept` says stay as
/// they are, as what is trained has to. Quantised weights are frozen.
///
/// ```no_run
/// # use burn_flex::Flex;
/// use zero_models::quantize::{Format, load};
/// use zero_models::{Gpt2Config, gpt2};
///
/// let (dir, device) = ("gpt2".as_ref(), Default::default());
/// let config = Gpt2Config::preset("gpt2")?;
/// let model = load::<Flex, _>(config.init(&device), dir, Format::Int8, |_| false, |model, checkpoint| {
///     gpt2::weights::load_from(model, checkpoint, &device)
/// })?;
/// # Ok::<(), zero_models::ModelError>(())
/// ```
///
/// # Errors
/// As `load`, and when a weight that is to be quantised has an element that is not finite.
pub fn load<B: FusedBackend, M: Adaptable<B>>(
    mut module: M,
    dir: &Path,
    format: Format,
    is_kept: impl Fn(&str) -> bool,
    load: impl FnOnce(M, &Checkpoint) -> Result<M>,
) -> Result<M> {
    let mut weights = HashSet::new();
    module.linears(&mut |path, layer| {
        if !is_kept(&path) {
            let [_, width] = layer.weight.lazy_shape().dims();
            layer.quantized = Some(Quantized { format, width });
            weights.insert(layer.weight.id.val());
        }
    });
    let mut module = load(module, &Checkpoint::open(dir)?.quantized_as(format, weights))?;
    // A fresh head, which the folder has not.
    let is_loaded = |how: &Quantized, stored: usize| stored == how.format.words(how.width);
    module.linears(&mut |_, layer| {
        let [_, stored] = layer.weight.lazy_shape().dims();
        layer.quantized = layer.quantized.filter(|how| is_loaded(how, stored));
    });
    Ok(module)
}
