//! Weights in 8 or 4 bits, for a model that is not trained, or for the base of an adapter (*QLoRA*, <https://arxiv.org/abs/2305.14314>).
//!
//! Linear layers are quantized block by block as they are loaded; embeddings, norms, biases and heads stay unquantized. On a backend
//! that shards parameters, the shards are quantized, and are stored, read from disk and gathered in this form. A weight is dequantized
//! where it is used.

use std::collections::HashSet;
use std::path::Path;

use zero_ops::FusedBackend;
pub use zero_ops::quantized::{Format, Quantized};

use crate::Result;
use crate::linear::Adaptable;
use crate::safetensors_file::Checkpoint;

/// Loads a module from a folder, by `load`, and quantizes its linear layers to `format`. Layers for whose paths `is_kept` returns `true`
/// stay unquantized; trained layers must be among them. Quantized weights are frozen.
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
/// The errors of `load`, and [`ModelError::NotFinite`](crate::ModelError::NotFinite) if a weight to quantize has an element that is not
/// finite.
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
    // A new head, which the folder does not have, is not quantized.
    let is_loaded = |how: &Quantized, stored: usize| stored == how.format.words(how.width);
    module.linears(&mut |_, layer| {
        let [_, stored] = layer.weight.lazy_shape().dims();
        layer.quantized = layer.quantized.filter(|how| is_loaded(how, stored));
    });
    Ok(module)
}
