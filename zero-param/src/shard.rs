//! Sharding a module, and what is done with it as a whole.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Tensor, TensorData};
use zero_core::collective::agree;
use zero_core::{Buffer, CommError, Partition, Request};

use crate::config::ZeroConfig;
use crate::error::Error;
use crate::grads::Grads;
use crate::ranks::Ranks;
use crate::reduce::Reducer;
use crate::shared::Shared;
use crate::slot::{Policy, Slot, Uses};
use crate::{backend, clock};

/// What makes the whole of a parameter from the piece that the module holds.
#[derive(Module, Debug)]
pub struct Gathered {
    #[module(skip)]
    slot: Arc<Slot>,
}

impl Reparameterization for Gathered {
    const NAME: &'static str = "zero";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        backend::gather(base, &self.slot)
    }
}

/// One rank's handle of a sharded module.
#[derive(Debug, Clone)]
pub struct Zero {
    pub(crate) shared: Arc<Shared>,
    pub(crate) slots: Arc<[Arc<Slot>]>,
    pub(crate) ids: Arc<HashMap<ParamId, usize>>,
}

/// Shards `model` over `ranks`. A collective: all ranks pass modules of the same parameters, whose values become rank 0's.
///
/// Each float parameter keeps its id, its place in the module and whether it requires gradients. What it holds becomes this rank's
/// part of it, `param.val()` the whole. One parameter at a time is whole on the way, also if it was not initialised yet.
///
/// # Errors
///
/// [`Error`]: ranks whose modules or settings differ, parameters that are not fp32, have a reparameterization or are there twice.
pub fn shard<M: Module>(model: M, ranks: &Ranks, config: &ZeroConfig) -> Result<(M, Zero), Error> {
    let mut survey = Survey::default();
    model.visit(&mut survey);
    if let Some(trouble) = survey.trouble {
        return Err(trouble);
    }
    survey.lines.push(format!("{config:?}"));
    if let Some(difference) = agree(&*ranks.comm, &survey.lines)? {
        return Err(difference.into());
    }
    let shared = Arc::new(Shared {
        comm: ranks.comm.duplicate("model")?,
        window: ranks.window.clone(),
        config: config.clone(),
        reducer: OnceLock::new(),
    });
    let born = Rc::new(RefCell::new(Born::default()));
    let model = model.apply_reparameterization(Cut { shared: shared.clone(), ranks, born: born.clone() });
    let Born { slots, ids, train, trouble } = born.take();
    if let Some(error) = trouble {
        return Err(error);
    }
    ranks.keep(&slots);
    let reducer = Reducer::new(&shared.comm, config, &slots, train)?;
    shared.reducer.set(reducer).expect("it is set here alone");
    let zero = Zero { shared, slots: slots.into(), ids: Arc::new(ids) };
    let model = zero.settle(model)?;
    Ok((model, zero))
}

/// Looks at a module before anything is changed.
#[derive(Default)]
struct Survey {
    path: Vec<String>,
    seen: HashMap<ParamId, String>,
    lines: Vec<String>,
    trouble: Option<Error>,
}

impl ModuleVisitor for Survey {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" {
            let (path, name) = (self.path.join("."), name.to_string());
            self.trouble.get_or_insert(Error::Reparameterized { path, name });
        }
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        self.lines.push(format!("parameter '{path}' of {:?}", param.lazy_shape()));
        if let Some(first) = self.seen.insert(param.id, path.clone()) {
            self.trouble.get_or_insert(Error::Twice { first, second: path });
        }
    }
}

#[derive(Default)]
struct Born {
    slots: Vec<Arc<Slot>>,
    ids: HashMap<ParamId, usize>,
    train: Vec<bool>,
    trouble: Option<Error>,
}

/// Cuts parameters, one after the other.
struct Cut<'a> {
    shared: Arc<Shared>,
    ranks: &'a Ranks,
    born: Rc<RefCell<Born>>,
}

impl Cut<'_> {
    fn policy(&self, partition: Partition, dimensions: usize, train: bool) -> Policy {
        let config = &self.shared.config;
        let last = partition.len(partition.world() - 1);
        let is_small = dimensions < 2 || partition.numel() <= config.param_persistence_threshold || last == 0;
        match config.stage.shards_parameters() {
            _ if is_small || partition.is_whole() || !config.stage.shards_optimizer() => Policy::Replicated,
            true => Policy::Sharded,
            // A frozen parameter has no state.
            false if !train => Policy::Replicated,
            false => Policy::Kept,
        }
    }

    /// Rank 0's values of a tensor.
    fn values<const D: usize>(&self, path: &str, tensor: Tensor<D>) -> Result<Vec<f32>, Error> {
        let data = tensor.into_data();
        let dtype = data.dtype();
        let values: Vec<f32> =
            data.try_into_vec().map_err(|_| Error::Dtype { path: path.into(), got: format!("{dtype:?}") })?;
        let values = self.shared.comm.execute_for(Request::Broadcast(Buffer::F32(values), 0), path)?;
        Ok(values.into_f32())
    }
}

impl Reparameterizer for Cut<'_> {
    type Reparam = Gathered;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Gathered>) {
        if self.born.borrow().trouble.is_some() {
            return (param, None);
        }
        let (id, tensor, mapper) = param.consume();
        let (device, train, whole) = (tensor.device(), tensor.is_require_grad(), tensor.shape());
        let mut values = match self.values(path, tensor.clone()) {
            Ok(values) => values,
            Err(error) => {
                self.born.borrow_mut().trouble = Some(error);
                return (Param::from_mapped_value(id, tensor, mapper), None);
            }
        };
        drop(tensor);
        let mut born = self.born.borrow_mut();
        let policy = self.policy(Partition::new(values.len(), self.shared.world()), D, train);
        let slot = Slot::new(born.slots.len(), path, whole, policy, &self.shared, self.ranks.next_object());
        let slot = Arc::new(slot);
        if policy != Policy::Replicated {
            // A copy: a view would keep the whole.
            values = values[slot.own()].to_vec();
        }
        let base = Tensor::<D>::from_data(TensorData::new(values, slot.base.clone()), &device).set_require_grad(train);
        born.ids.insert(id, slot.index);
        born.train.push(train);
        born.slots.push(slot.clone());
        (Param::from_mapped_value(id, base, mapper), Some(Gathered { slot }))
    }
}

impl Zero {
    /// Runs `loss`, then its backward pass, in which gradients are reduced, and gives the loss's value and the gradients. A
    /// collective; all other gradients that the loss's graph has are dropped.
    ///
    /// ```ignore
    /// let (loss, grads) = zero.backward(|| model.loss(batch))?;
    /// model = optimizer.step(1e-3, model, grads)?;
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]. A gather that fails inside of `loss` travels as a panic payload, which whoever runs the ranks catches.
    pub fn backward<const D: usize>(&self, loss: impl FnOnce() -> Tensor<D>) -> Result<(Tensor<D>, Grads), Error> {
        let reducer = self.shared.reducer();
        reducer.begin();
        let loss = {
            let _ordered = clock::forward();
            loss()
        };
        let value = loss.clone().inner();
        drop(loss.backward());
        drop(loss);
        let means = reducer.finish()?;
        for (slot, _) in self.slots.iter().zip(&means).filter(|(_, mean)| mean.is_some()) {
            slot.count_reduced();
        }
        Ok((value, Grads::new(self, means)))
    }

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
        self.shared.comm.execute(Request::Barrier("an update")).map(drop)
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

    fn slot(&self, id: ParamId) -> Option<&Arc<Slot>> {
        self.ids.get(&id).map(|&index| &self.slots[index])
    }
}

struct Publish<'a>(&'a Zero);

impl ModuleVisitor for Publish<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(slot) = self.0.slot(param.id) {
            backend::publish(param.base().without_autodiff(), slot);
        }
    }
}

struct Rebase<'a>(&'a Zero);

impl ModuleMapper for Rebase<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.0.slot(param.id).filter(|slot| slot.policy == Policy::Kept) else { return param };
        let (id, tensor, mapper) = param.consume();
        let (train, strategy) = (tensor.is_require_grad(), tensor.gradient_checkpointing_strategy());
        let mut base = backend::rebase(tensor.without_autodiff(), slot);
        if let Some(strategy) = strategy {
            base = base.autodiff().with_gradient_checkpointing_strategy(strategy).set_require_grad(train);
        }
        Param::from_mapped_value(id, base, mapper)
    }
}
