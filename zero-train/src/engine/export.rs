//! Export of a live model's full weights to a folder that Hugging Face's transformers loads: DeepSpeed's `save_16bit_model`.
//!
//! Rank 0 writes; all ranks take part in the all-gather of each parameter that it requests. Memory: one full parameter on
//! each rank at a time.

use std::ops::Range;
use std::path::Path;

use burn::module::AutodiffModule;
use zero_burn::gathered::parameters;
use zero_burn::module::ZeroAutodiff;
use zero_burn::stats::all_gather;
use zero_models::hf_export::{ExportOptions, Exported, ReadError, export};
use zero_models::{ModelConfig, ModelError, ModelParam, ModuleConfig};

use super::{EngineError, EngineOptimizer, Result, ZeroEngine};

/// Sent in place of a parameter's number when the export on rank 0 has succeeded, or [`FAILED`] when it has not.
const DONE: f64 = -1.0;
const FAILED: f64 = -2.0;

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// Returns the configuration of the engine's module as a model of no known family: its parameters, named by their paths.
    pub fn module_config(&self) -> ModuleConfig {
        let parameters = parameters::<A, M>(self.model()).into_iter();
        ModuleConfig::new(parameters.map(|meta| (meta.path, meta.shape.to_vec())))
    }

    /// Writes the parameters, in the precision of their masters, to the folder `out`, which must be empty or not exist:
    /// `model.safetensors` (or shards with an index) and `config.json`. `model` is the configuration that the engine's
    /// model was made from, or [`module_config`](Self::module_config). Every rank calls it; only rank 0 returns a summary.
    ///
    /// # Errors
    ///
    /// [`EngineError::Export`] on rank 0, with nothing left behind, and [`EngineError::ExportFailed`] on the others;
    /// [`EngineError::UnknownParameter`] if the engine's module lacks a parameter of `model`.
    pub fn export(&self, model: &ModelConfig, out: &Path, options: &ExportOptions) -> Result<Option<Exported>> {
        let parameters = model.parameters();
        for parameter in &parameters {
            // On every rank alike, before anything is written.
            self.meta(&parameter.path)?;
        }
        if self.device.rank() != 0 {
            loop {
                match all_gather::<A::Base>(&[0.0])[0][0] {
                    DONE => return Ok(None),
                    FAILED => return Err(EngineError::ExportFailed { out: out.to_path_buf() }),
                    number => drop(self.full_parameter(&parameters[number as usize].path)?),
                }
            }
        }
        let read = |parameter: &ModelParam, range: Range<usize>| -> Result<Vec<f32>, ReadError> {
            let number = parameters.iter().position(|other| other.path == parameter.path);
            let number = number.expect("what is asked for is one of the model's parameters");
            all_gather::<A::Base>(&[number as f64]);
            let mut values = self.full_parameter(&parameter.path)?.values;
            if range.len() < values.len() {
                values = values[range].to_vec();
            }
            Ok(values)
        };
        // Each parameter is asked for once, whole: a gather costs more than the memory that parts would save.
        let options = ExportOptions { chunk_elems: usize::MAX, ..options.clone() };
        let exported: Result<Exported, ModelError> = export(model, out, &options, read);
        all_gather::<A::Base>(&[if exported.is_ok() { DONE } else { FAILED }]);
        Ok(Some(exported?))
    }
}
