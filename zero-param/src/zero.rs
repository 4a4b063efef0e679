//! A rank's handle of a sharded module, separate from the module itself.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use zero_core::{CommError, Request};

use crate::device::{held, hold};
use crate::error::Error;
use crate::shared::Shared;
use crate::slot::{Policy, Slot, Uses};

/// One rank's handle of a sharded module.
#[derive(Debug, Clone)]
pub struct Zero {
    pub(crate) shared: Arc<Shared>,
    pub(crate) slots: Arc<[Arc<Slot>]>,
    pub(crate) ids: Arc<HashMap<ParamId, usize>>,
}

impl Zero {
    /// Publishes the module's values to the other ranks after something other than [`Optimizer::step`](crate::Optimizer::step) changed
    /// them, such as loading a record of this rank's shards. A collective.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`].
    pub fn publish_changes<M: Module>(&self, model: M) -> Result<M, Error> {
        self.fence()?;
        Ok(self.publish(model))
    }

    /// Waits until no rank reads the versions that are replaced next.
    pub(crate) fn fence(&self) -> Result<(), CommError> {
        let Shared { comm, published, .. } = &*self.shared;
        published.behind(|| comm.execute(Request::Barrier("an update"))).map(drop)
    }

    /// Publishes the shards that have changed, and gathers the parameters that this stage keeps in full. Called after a fence.
    pub(crate) fn publish<M: Module>(&self, model: M) -> M {
        model.visit(&mut Publish(self));
        match self.slots.iter().any(|slot| slot.policy == Policy::Kept) {
            true => model.map(&mut Rebase(self)),
            false => model,
        }
    }

    /// Returns how often a parameter was gathered and reduced, or `None` if there is no such parameter.
    pub fn uses(&self, path: &str) -> Option<Uses> {
        self.slots.iter().find(|slot| slot.path == path).map(|slot| slot.uses())
    }

    /// Returns the parameters' paths, in the module's order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.slots.iter().map(|slot| &*slot.path)
    }

    pub(crate) fn slot(&self, id: ParamId) -> Option<&Arc<Slot>> {
        self.ids.get(&id).map(|&index| &self.slots[index])
    }
}

struct Publish<'a>(&'a Zero);

impl ModuleVisitor for Publish<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(slot) = self.0.slot(param.id) {
            slot.publish(&held(param.base()));
        }
    }
}

struct Rebase<'a>(&'a Zero);

impl ModuleMapper for Rebase<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.0.slot(param.id).filter(|slot| slot.policy == Policy::Kept) else { return param };
        let (id, tensor, mapper) = param.consume();
        let (train, strategy) = (tensor.is_require_grad(), tensor.gradient_checkpointing_strategy());
        let mut base = hold(slot.rebase(held(tensor)));
        if let Some(strategy) = strategy {
            base = base.autodiff().with_gradient_checkpointing_strategy(strategy).set_require_grad(train);
        }
        Param::from_mapped_value(id, base, mapper)
    }
}
