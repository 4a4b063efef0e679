//! What all parameters of a sharded module have in common on one rank.

use std::sync::{Arc, OnceLock};

use zero_core::Collective;
use zero_core::window::Window;

use crate::config::ZeroConfig;
use crate::reduce::Reducer;
use crate::slot::Piece;

#[derive(Debug)]
pub(crate) struct Shared {
    /// The group for what ranks do between passes.
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) window: Window<Piece>,
    pub(crate) config: ZeroConfig,
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
}
