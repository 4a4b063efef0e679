//! Formulas for the model state that a rank will hold (ZeRO paper, sections 5 and 7, <https://arxiv.org/abs/1910.02054>).

use crate::Stage;
use crate::accounting::StateBytes;

/// Bytes per parameter of each kind of model state before sharding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Precision {
    /// Bytes of one parameter as the model computes with it.
    pub parameter: u64,
    /// Bytes of one gradient.
    pub gradient: u64,
    /// Bytes of optimizer state per parameter, including the master copy if there is one.
    pub optimizer: u64,
}

impl Precision {
    /// fp32 with AdamW: 4 + 4 + 8 bytes.
    pub const FP32_ADAMW: Precision = Precision { parameter: 4, gradient: 4, optimizer: 8 };
    /// 16-bit compute with fp32 master copy and AdamW: 2 + 2 + 12 bytes.
    pub const MIXED_ADAMW: Precision = Precision { parameter: 2, gradient: 2, optimizer: 12 };
}

/// Returns the bytes of model state on one of `world` ranks for `parameters` parameters.
///
/// ```
/// use zero_core::{Stage, estimate::{Precision, model_state}};
/// let psi = 1_000_000;
/// assert_eq!(model_state(psi, Stage::Parameters, 4, Precision::FP32_ADAMW).total(), 16 * psi / 4);
/// ```
pub fn model_state(parameters: u64, stage: Stage, world: u64, precision: Precision) -> StateBytes {
    let part = |bytes: u64, sharded: bool| {
        let whole = bytes * parameters;
        if sharded { whole.div_ceil(world) } else { whole }
    };
    StateBytes {
        parameters: part(precision.parameter, stage.shards_parameters()),
        gradients: part(precision.gradient, stage.shards_gradients()),
        optimizer: part(precision.optimizer, stage.shards_optimizer()),
    }
}

/// Formats `bytes` in the largest binary unit that gives a number of at least one: "1.50 GiB".
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    match (bytes.max(1).ilog2() / 10) as usize {
        0 => format!("{bytes} B"),
        power => format!("{:.2} {}", bytes as f64 / (1_u64 << (10 * power)) as f64, UNITS[power - 1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_formulas() {
        let (psi, n) = (1_200u64, 4u64);
        let total = |stage| model_state(psi, stage, n, Precision::FP32_ADAMW).total();
        assert_eq!(total(Stage::DataParallel), 16 * psi);
        assert_eq!(total(Stage::OptimizerState), 8 * psi + 8 * psi / n);
        assert_eq!(total(Stage::Gradients), 4 * psi + 12 * psi / n);
        assert_eq!(total(Stage::Parameters), 16 * psi / n);
        let mixed = |stage| model_state(psi, stage, n, Precision::MIXED_ADAMW).total();
        assert_eq!(mixed(Stage::OptimizerState), 4 * psi + 12 * psi / n);
        assert_eq!(mixed(Stage::Gradients), 2 * psi + 14 * psi / n);
    }
}
