//! Whole weights of a live model as a folder that Hugging Face's transformers loads: DeepSpeed's `save_16bit_model`.
//!
//! Rank 0 writes; for each parameter that it asks for, all ranks take part in gathering it. Memory: one whole parameter on
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

/// In place of a parameter's number: rank 0 has ended, well or badly.
const DONE: f64 = -1.0;
const FAILED: f64 = -2.0;

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// The engine's module as one of no known family: its parameters, which keep their paths as names.
    pub fn module_config(&self) -> ModuleConfig {
        let parameters = parameters::<A, M>(self.model()).into_iter();
        ModuleConfig::new(parameters.map(|meta| (meta.path, meta.shape.to_vec())))
    }

    /// Writes the parameters, with all digits of their masters, as the folder `out`, which must not exist or be empty:
    /// `model.safetensors` (or shards with an index) and `config.json`. `model` is the configuration that the engine's model
    /// was made of, or [`module_config`](Self::module_config). Every rank calls it; what was written is returned on rank 0.
    ///
    /// # Errors
    ///
    /// [`EngineError::Export`] on rank 0, with nothing left behind, and [`EngineError::ExportFailed`] on the others;
    /// [`EngineError::UnknownParameter`] if the engine's module has not the parameters of `model`.
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
