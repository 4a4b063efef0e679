//! The ZeRO stage: what is sharded over the data-parallel ranks.

use serde::{Deserialize, Serialize};

/// The model state that is sharded over the ranks; each stage includes the ones before it (paper, section 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Stage {
    /// 0: plain data parallelism; every rank holds all state.
    #[default]
    DataParallel,
    /// 1: optimizer state.
    OptimizerState,
    /// 2: optimizer state and gradients.
    Gradients,
    /// 3: optimizer state, gradients and parameters.
    Parameters,
}

/// A stage outside 0..=3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("ZeRO stage {got} does not exist: expected 0, 1, 2 or 3")]
pub struct InvalidStage {
    /// The number given.
    pub got: u8,
}

impl Stage {
    /// All stages in order.
    pub const ALL: [Stage; 4] = [Stage::DataParallel, Stage::OptimizerState, Stage::Gradients, Stage::Parameters];

    /// Returns the stage's number, 0 to 3.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns whether each rank keeps only its part of the optimizer state (stage 1 and above).
    pub fn shards_optimizer(self) -> bool {
        self >= Stage::OptimizerState
    }

    /// Returns whether each rank keeps only its part of the gradients (stage 2 and above).
    pub fn shards_gradients(self) -> bool {
        self >= Stage::Gradients
    }

    /// Returns whether each rank keeps only its part of the parameters (stage 3).
    pub fn shards_parameters(self) -> bool {
        self >= Stage::Parameters
    }
}

impl TryFrom<u8> for Stage {
    type Error = InvalidStage;

    fn try_from(value: u8) -> Result<Self, Self::Error> {
        Stage::ALL.get(usize::from(value)).copied().ok_or(InvalidStage { got: value })
    }
}

impl From<Stage> for u8 {
    fn from(value: Stage) -> u8 {
        value.number()
    }
}

impl core::fmt::Display for Stage {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_others_are_refused() {
        for stage in Stage::ALL {
            assert_eq!(Stage::try_from(stage.number()), Ok(stage));
        }
        assert_eq!(Stage::try_from(4), Err(InvalidStage { got: 4 }));
    }
}
