//! Adapters in folders, as PEFT's `adapter_config.json` and `adapter_model.safetensors`, and merging with base weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[cfg(feature = "burn")]
use zero_ops::FusedBackend;

use super::LoraConfig;
#[cfg(feature = "burn")]
use super::{Adaptable, adapt};
use crate::hf_export::{ExportOptions, Exported, export};
#[cfg(feature = "burn")]
use crate::hf_load::load_some;
use crate::safetensors_file::{ADAPTER, Checkpoint};
use crate::{AdaptedModel, ModelConfig, ModelError, ModelParam, Result};

/// The adapter file of older versions of PEFT.
const PICKLED: &str = "adapter_model.bin";

/// Adds the adapter in the folder `dir`, with its weights, to a module that `model` describes, and freezes all parameters that it does
/// not train. On a backend that shards parameters, each rank reads its own part.
///
/// # Errors
/// If the folder has no adapter, or one for another model. All of that is checked before a tensor is loaded.
#[cfg(feature = "burn")]
pub fn load<B: FusedBackend, M: Adaptable<B>>(
    module: M,
    model: &ModelConfig,
    dir: &Path,
    device: &B::Device,
) -> Result<M> {
    let (adapted, whole, checkpoint) = open(dir, model.clone(), None)?;
    let module = adapt(module, model, &adapted.lora, device)?;
    load_some(module, whole.stored(&checkpoint)?, &checkpoint, device)
}

/// Calls `each` with every parameter that the file in an adapter's folder has, and its elements in the module's layout.
///
/// # Errors
/// If the folder has no adapter, or one for another model.
pub fn read(model: &ModelConfig, dir: &Path, mut each: impl FnMut(ModelParam, Vec<f32>)) -> Result<()> {
    let (_, whole, checkpoint) = open(dir, model.clone(), None)?;
    whole.read_from(&checkpoint, &mut each)
}

/// Returns the names of tables that an adapter's file holds in full although no key of its configuration names them. They are loaded,
/// and not trained.
///
/// # Errors
/// If the folder has no adapter, or one for another model.
pub fn full_embeddings(model: &ModelConfig, dir: &Path) -> Result<Vec<String>> {
    let (adapted, whole, _) = open(dir, model.clone(), None)?;
    let known = adapted.lora.modules_to_save.len();
    let ModelConfig::Adapted(whole) = whole else { unreachable!("an adapter was opened") };
    Ok(whole.lora.modules_to_save[known..].to_vec())
}

/// Opens the adapter in a folder, for a model with its weights in another folder. Returns the adapted model by its configuration, the
/// same with all tables in its file, and the file.
fn open(dir: &Path, model: ModelConfig, weights: Option<PathBuf>) -> Result<(AdaptedModel, ModelConfig, Checkpoint)> {
    let for_another = |error| {
        let dir = dir.display();
        let problem = format!(
            "the adapter in {dir} is for another model: {error}; use the base model that it was trained with, with the \
             same vocabulary size"
        );
        ModelError::Adapter { problem }
    };
    let adapted = AdaptedModel::new(model, LoraConfig::from_dir(dir)?, weights).map_err(for_another)?;
    if !dir.join(ADAPTER).is_file() && dir.join(PICKLED).is_file() {
        let problem = format!(
            "{} has {PICKLED}, which is not supported: load it with PEFT, and save it with save_pretrained(..., \
             safe_serialization=True)",
            dir.display()
        );
        return Err(ModelError::Adapter { problem });
    }
    let checkpoint = Checkpoint::open_file(dir, ADAPTER)?;
    let whole = ModelConfig::from(adapted.with_saved_tables(&checkpoint));
    whole.stored(&checkpoint).map_err(for_another)?;
    Ok((adapted, whole, checkpoint))
}

/// Merges an adapter into the weights in the folder `base`, and writes a folder of the base's family, which needs no adapter.
///
/// Memory: one parameter.
///
/// # Errors
/// Same as [`load`] and [`export`].
pub fn merge(base: &Path, adapter: &Path, out: &Path, options: &ExportOptions) -> Result<Exported> {
    let model = ModelConfig::from_file(&base.join("config.json"))?;
    let (_, whole, checkpoint) = open(adapter, model, Some(base.to_path_buf()))?;
    let ModelConfig::Adapted(adapted) = &whole else { unreachable!("an adapter was opened") };
    let found: BTreeMap<String, _> =
        whole.stored(&checkpoint)?.into_iter().map(|(param, stored)| (param.path, stored)).collect();
    let read = |param: &ModelParam| {
        let stored = found[&param.path];
        if param.transposed { stored.elements_transposed(0..stored.numel()) } else { stored.to_f32() }
    };
    merge_with(adapted, base, out, options, read)
}

/// Same as [`merge`], for an adapter whose parameters `read` returns in full and in the module's layout.
///
/// # Errors
/// Same as [`merge`], and the errors of `read`.
pub fn merge_with(
    adapted: &AdaptedModel,
    base: &Path,
    out: &Path,
    options: &ExportOptions,
    mut read: impl FnMut(&ModelParam) -> Result<Vec<f32>>,
) -> Result<Exported> {
    if let Some((table, true)) = adapted.base.adaptable_table()
        && adapted.parameters().iter().any(|param| param.path == format!("{table}_adapter.a"))
    {
        let problem =
            format!("the adapter of {table} cannot be merged: the head uses the same table, and would change with it");
        return Err(ModelError::Adapter { problem });
    }
    let weights = Checkpoint::open(base)?;
    let stored: BTreeMap<String, _> =
        adapted.base.stored(&weights)?.into_iter().map(|(param, stored)| (param.path, stored)).collect();
    let trained: BTreeMap<String, ModelParam> =
        adapted.parameters().into_iter().map(|param| (param.path.clone(), param)).collect();
    let scale = adapted.lora.scale() as f32;
    let options = ExportOptions { chunk_elems: usize::MAX, ..options.clone() };
    export(&adapted.base, out, &options, |param, range| {
        debug_assert_eq!(range, 0..param.numel());
        if let Some(saved) = trained.get(&param.path) {
            return Ok(read(saved)?);
        }
        let stored = stored[&param.path];
        let mut values = if param.transposed { stored.elements_transposed(range) } else { stored.elements(range) }?;
        let adapter = match param.path.strip_suffix(".weight") {
            Some(layer) => format!("{layer}.adapter"),
            None => format!("{}_adapter", param.path),
        };
        if let Some(a) = trained.get(&format!("{adapter}.a")) {
            let b = &trained[&format!("{adapter}.b")];
            let [d_in, r, d_out] = [a.shape[0], a.shape[1], b.shape[1]];
            let [a, b] = [read(a)?, read(b)?];
            for (row, a) in values.chunks_exact_mut(d_out).zip(a.chunks_exact(r)).take(d_in) {
                for (a, b) in a.iter().zip(b.chunks_exact(d_out)) {
                    row.iter_mut().zip(b).for_each(|(value, b)| *value += scale * a * b);
                }
            }
        }
        Ok(values)
    })
}
