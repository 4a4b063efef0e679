//! Describes in words who can use a checkpoint, and for what.

use indicatif::HumanCount;
use serde::Serialize;
use zero_models::ModelConfig;

use super::facts::{EngineFacts, Group, OptimizerFacts};
use zero_train::export::ExportError;

/// Version of the engine's state that this crate reads.
const ENGINE_VERSION: u64 = 1;

/// Possible uses of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Use {
    /// True if the engine can resume from it.
    pub can_resume: bool,
    /// Who can resume from it, or why nobody can.
    pub resume: String,
    /// Requirements for bit-identical results, if the engine can resume.
    pub bit_for_bit: Option<String>,
    /// True if `zero export` can write the model in Hugging Face's form.
    pub can_export: bool,
    /// The exported form, or why there is none.
    pub export: String,
}

impl Use {
    /// Derives the uses; `export` is the model that the export would write, or why it cannot.
    pub(super) fn new(
        ranks: usize,
        engine: Option<&EngineFacts>,
        parameters: &Group,
        optimizer: &OptimizerFacts,
        has_trainer: bool,
        export: Result<ModelConfig, ExportError>,
        sound: bool,
    ) -> Self {
        // Who can resume, or why nobody can.
        let resume = || -> Result<String, String> {
            let reader = "zero_core::checkpoint::Checkpoint reads its tensors at any number of ranks";
            let Some(engine) = engine else {
                return Err(format!(
                    "not with the engine, which did not save it: its state has no \"engine\"; {reader}"
                ));
            };
            match engine.version {
                Some(ENGINE_VERSION) => {}
                Some(version) => {
                    return Err(format!(
                        "not with this version, which reads engine state version {ENGINE_VERSION}: it has version \
                         {version}; use the version that saved it"
                    ));
                }
                None => return Err(format!("not with the engine: its \"engine\" state names no version; {reader}")),
            }
            if parameters.tensors == 0 {
                return Err("not with the engine: it has no tensor `model.…`".to_string());
            }
            if !sound {
                return Err("not possible while it is damaged".to_string());
            }
            let mut words =
                "on any number of ranks, at any stage, with any bucket sizes, in fp32 or 16 bit".to_string();
            match &optimizer.name {
                Some(name) => words += &format!(", with {name}"),
                None => words += ", with the optimizer that saved it",
            }
            if optimizer.all.tensors == 0 {
                words += "; there is no optimizer state, so the optimizer starts from zero";
            }
            if !has_trainer {
                words += "; only with ZeroEngine::load in your program: there is no \"trainer\" state, which \
                          `zero train --resume` needs";
            }
            Ok(words)
        };
        let resume = resume();
        let export = match export {
            Ok(_) if !sound => Err("`zero export` refuses it while it is damaged".to_string()),
            Ok(model) => Ok(match model.architecture() {
                Some(architecture) => format!("`zero export` writes it as a Hugging Face {architecture}"),
                None => "`zero export` writes its parameters by their paths in the module".to_string(),
            }),
            Err(error) => Err(format!("`zero export` refuses it: {error}")),
        };
        Self {
            can_resume: resume.is_ok(),
            bit_for_bit: resume.is_ok().then(|| bit_for_bit(ranks, engine)),
            resume: resume.unwrap_or_else(|why_not| why_not),
            can_export: export.is_ok(),
            export: export.unwrap_or_else(|why_not| why_not),
        }
    }
}

fn bit_for_bit(ranks: usize, engine: Option<&EngineFacts>) -> String {
    let precision = engine
        .and_then(|engine| engine.param_dtype.as_deref())
        .map_or_else(|| "the same precision".to_string(), |dtype| format!("{} as saved", precision(dtype)));
    match engine.and_then(|engine| engine.random_streams) {
        Some(streams) if streams == ranks => {
            format!(
                "requires {}, each with its saved random stream, and {precision}; other numbers of ranks resume from \
                 the same parameters and moments, but with different dropout and a different order of summation",
                count(ranks, "rank")
            )
        }
        Some(streams) => format!(
            "not if random numbers are drawn, such as by dropout: expected the random streams of {}, it has {streams}",
            count(ranks, "rank")
        ),
        None => {
            format!(
                "requires {} and {precision}, and no use of random numbers, such as by dropout: it has no random \
                 streams",
                count(ranks, "rank")
            )
        }
    }
}

/// Returns the common name of an engine's type.
pub(super) fn precision(dtype: &str) -> String {
    match dtype {
        "F32" => "fp32".to_string(),
        "F16" => "fp16".to_string(),
        "BF16" => "bf16".to_string(),
        other => other.to_string(),
    }
}

/// Formats a count: "1 rank", "2 ranks".
pub(super) fn count(number: usize, what: &str) -> String {
    format!("{} {what}{}", grouped(number as u64), if number == 1 { "" } else { "s" })
}

/// Formats `value` with commas between thousands.
pub(super) fn grouped(value: u64) -> String {
    HumanCount(value).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands() {
        for (value, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(value), text);
        }
    }
}
