//! A rank's handle of a sharded module, separate from the module itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use zero_core::ReduceOp;
use zero_engine::replicas::{compare, hash_of};

use crate::buffers::LayerState;
use crate::device::{held, hold_as};
use crate::engine::{Runtime, caught};
use crate::error::Error;
use crate::parameter::{Parameter, Shared, Uses, address};
use crate::ranks::Runtimes;
use crate::reduce::Member;
use crate::tensors::Raw;

/// One rank's handle of a sharded module.
#[derive(Debug, Clone)]
pub struct Zero {
    pub(crate) shared: Arc<Shared>,
    pub(crate) parameters: Arc<[Arc<Parameter>]>,
    pub(crate) members: Arc<[Arc<Member>]>,
    pub(crate) ids: Arc<HashMap<ParamId, usize>>,
    pub(crate) layer_state: Arc<[LayerState]>,
    pub(crate) runtimes: Arc<Runtimes>,
}

impl Zero {
    /// Publishes the module's values to the other ranks after something other than [`Optimizer::step`](crate::Optimizer::step) changed
    /// them, such as loading a record of this rank's shards. Ranks may change different parameters, but none whose values the module does
    /// not hold: those with shards on a device or a disk, and those that are frozen in 16 bit or quantized. A collective.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`].
    pub fn publish_changes<M: Module>(&self, model: M) -> Result<M, Error> {
        caught(|| {
            let mut changed = vec![0.0; self.parameters.len()];
            self.visit(&model, |parameter, base| {
                changed[parameter.index] = f64::from(u8::from(parameter.is_changed(&base)));
            });
            // Every rank makes the same versions, so that their names match.
            let changed = self.runtime().reduce_scalars(changed, ReduceOp::Max);
            self.fence("a change of parameters");
            self.visit(&model, |parameter, base| {
                if changed[parameter.index] > 0.0 {
                    parameter.publish(base);
                }
            });
            self.rebase(model)
        })
        .map_err(Error::from)
    }

    /// Sets the dropout of the inputs of LoRA adapters in [`dense`](crate::dense), PEFT's `lora_dropout`; 0 by default. Adapters of tables have
    /// none, as in PEFT. `param.val()` adds the adapter to the weight, and drops nothing.
    ///
    /// # Panics
    ///
    /// If the probability is not in `[0, 1)`.
    pub fn set_adapter_dropout(&self, probability: f64) {
        assert!((0.0..1.0).contains(&probability), "dropout: the probability is {probability}; pass one in [0, 1)");
        self.shared.adapter_dropout.store(probability.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn runtime(&self) -> &Arc<Runtime> {
        &self.shared.runtime
    }

    /// Waits, before an update, until no rank reads the versions that are replaced next.
    pub(crate) fn begin_update(&self) {
        self.runtime().join_fence();
        self.runtime().before_update();
        self.runtimes.drop_retired();
    }

    /// Waits until no rank reads the versions that are replaced next.
    pub(crate) fn fence(&self, purpose: &'static str) {
        self.runtime().wait_for_updates();
        self.runtime().fence(purpose);
        self.runtimes.drop_retired();
    }

    /// Compares the ranks' replicas before every n-th update ([`ZeroConfig::check_replicas`](crate::ZeroConfig)). A collective.
    pub(crate) fn check_replicas(&self) {
        let (runtime, first) = (self.runtime(), self.parameters.first().map_or(0, |parameter| parameter.slot.index));
        if runtime.rank.world == 1 || runtime.rank.config.check_replicas == 0 {
            return;
        }
        let Some((update, is_due)) = runtime.update_to_check(first) else { return };
        if is_due {
            let hash = |parameter: &Arc<Parameter>| (parameter.slot.to_string(), hash_of(&*parameter.cell()));
            compare(runtime, update, &self.parameters.iter().map(hash).collect::<Vec<_>>());
        }
    }

    /// Returns the first parameter of `model` that was changed by hand and not published.
    pub(crate) fn first_changed<M: Module>(&self, model: &M) -> Option<String> {
        let mut first = None;
        self.visit(model, |parameter, base| {
            if first.is_none() && parameter.is_changed(&base) {
                first = Some(parameter.path.clone());
            }
        });
        first
    }

    /// Publishes the shards of the `updated` parameters, in ascending order, that an update has changed, on all ranks alike. Called after a
    /// fence.
    pub(crate) fn publish<M: Module>(&self, model: &M, updated: &[usize]) {
        self.visit(model, |parameter, base| {
            if updated.binary_search(&parameter.index).is_ok() && parameter.is_changed(&base) {
                parameter.publish(base);
            }
        });
    }

    /// Calls `each` for the parameters of `model`, with what the module holds of them.
    pub(crate) fn visit<M: Module>(&self, model: &M, each: impl FnMut(&Arc<Parameter>, Raw)) {
        struct Visit<'a, F>(&'a Zero, F);

        impl<F: FnMut(&Arc<Parameter>, Raw)> ModuleVisitor for Visit<'_, F> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if let Some(parameter) = self.0.parameter(param.id) {
                    (self.1)(parameter, held(param.base()));
                }
            }
        }

        model.visit(&mut Visit(self, each));
    }

    /// Gathers the parameters that this stage keeps in full, and gives the module the bases of the versions in use.
    pub(crate) fn rebase<M: Module>(&self, model: M) -> M {
        // Every rank comes here; later, one may use a parameter alone.
        self.runtime().gather_awaited();
        self.parameters.iter().for_each(|parameter| parameter.keep_full());
        self.lay(model)
    }

    /// Gives the module the bases of the versions in use.
    pub(crate) fn lay<M: Module>(&self, model: M) -> M {
        model.map(&mut Rebase(self))
    }

    /// Returns how often a parameter was gathered and reduced, or `None` if there is no such parameter.
    pub fn uses(&self, path: &str) -> Option<Uses> {
        self.parameters.iter().find(|parameter| parameter.path == path).map(|parameter| parameter.uses())
    }

    /// Returns the parameters' paths, in the module's order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(|parameter| &*parameter.path)
    }

    /// Returns the paths of the sharded parameters whose last gather is in host memory still, to find what keeps full parameters. At stage 3
    /// these are the ones that a rank of the process uses, that a tensor still refers to, or that `param_persistence_threshold` or
    /// `max_reuse_distance` keeps.
    pub fn full_parameters(&self) -> impl Iterator<Item = &str> {
        let full =
            self.parameters.iter().filter(|parameter| parameter.is_gathered_for_each_use() && parameter.is_full());
        full.map(|parameter| &*parameter.path)
    }

    pub(crate) fn parameter(&self, id: ParamId) -> Option<&Arc<Parameter>> {
        self.ids.get(&id).map(|&index| &self.parameters[index])
    }
}

struct Rebase<'a>(&'a Zero);

impl ModuleMapper for Rebase<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let base = self.0.parameter(param.id).and_then(|parameter| parameter.base());
        let Some(base) = base.filter(|base| address(base) != address(&held(param.base()))) else { return param };
        let (id, tensor, mapper) = param.consume();
        let base = hold_as(base, tensor.gradient_checkpointing_strategy(), tensor.is_require_grad());
        Param::from_mapped_value(id, base, mapper)
    }
}
