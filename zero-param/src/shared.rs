//! What all parameters of a sharded module have in common on one rank.

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
    /// The group for what ranks do between passes.
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) window: Window<Piece>,
    pub(crate) published: Arc<Published>,
    pub(crate) config: ZeroConfig,
    pub(crate) ahead: Ahead,
    pub(crate) draws: Arc<Draws>,
    /// Known when all parameters are.
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

    /// A parameter as the model computes with it.
    pub(crate) fn cast(&self, tensor: Raw) -> Raw {
        match self.config.param_dtype {
            Float::F32 => tensor,
            Float::Bf16 => narrow(packed(tensor), DType::BF16),
        }
    }
}
