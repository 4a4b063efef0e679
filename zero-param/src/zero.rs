//! A sharded module as a rank's program holds it beside the module.

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
    /// Makes what the module holds known to the other ranks, where it was changed by something else than
    /// [`Optimizer::step`](crate::Optimizer::step): a record that was loaded, say, of this rank's pieces. A collective.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`].
    pub fn settle<M: Module>(&self, model: M) -> Result<M, Error> {
        self.fence()?;
        Ok(self.publish(model))
    }

    /// Waits until no rank reads the versions that are replaced next.
    pub(crate) fn fence(&self) -> Result<(), CommError> {
        let Shared { comm, published, .. } = &*self.shared;
        published.behind(|| comm.execute(Request::Barrier("an update"))).map(drop)
    }

    /// Lets the others read what has changed, and keeps wholes where the stage does. Behind a fence.
    pub(crate) fn publish<M: Module>(&self, model: M) -> M {
        model.visit(&mut Publish(self));
        match self.slots.iter().any(|slot| slot.policy == Policy::Kept) {
            true => model.map(&mut Rebase(self)),
            false => model,
        }
    }

    /// How often a parameter was gathered and reduced; none if there is no such parameter.
    pub fn uses(&self, path: &str) -> Option<Uses> {
        self.slots.iter().find(|slot| slot.path == path).map(|slot| slot.uses())
    }

    /// The parameters' paths, in the module's order.
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
