//! State that all parameters of a sharded module share on one rank.

use std::sync::{Arc, OnceLock};

use burn::tensor::DType;
use zero_core::Collective;
use zero_core::window::Window;

use crate::ahead::Ahead;
use crate::config::{Float, ZeroConfig};
use crate::fused::{narrow, packed};
use crate::piece::{Piece, Raw};
use crate::published::Published;
use crate::random::Draws;
use crate::reduce::Reducer;

#[derive(Debug)]
pub(crate) struct Shared {
    /// The group for collectives between passes.
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) window: Window<Piece>,
    pub(crate) published: Arc<Published>,
    pub(crate) config: ZeroConfig,
    pub(crate) ahead: Ahead,
    pub(crate) draws: Arc<Draws>,
    /// Set once all parameters are known.
    pub(crate) reducer: OnceLock<Reducer>,
}

impl Shared {
    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(crate) fn world(&self) -> usize {
        self.comm.world()
    }

    pub(crate) fn reducer(&self) -> &Reducer {
        self.reducer.get().expect("a model is used after it has been sharded")
    }

    /// Casts a parameter to the type in which the model computes.
    pub(crate) fn cast(&self, tensor: Raw) -> Raw {
        match self.config.param_dtype {
            Float::F32 => tensor,
            Float::Bf16 => narrow(packed(tensor), DType::BF16),
        }
    }
}
