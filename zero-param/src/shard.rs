//! Sharding a module: each parameter is partitioned, and from then on gathers itself.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor, TensorData};
use zero_core::collective::agree;
use zero_core::{Buffer, Partition, Request};

use crate::ahead::Ahead;
use crate::backend;
use crate::config::ZeroConfig;
use crate::device;
use crate::error::Error;
use crate::random::Draws;
use crate::ranks::Ranks;
use crate::reduce::{Member, Reducer};
use crate::shared::Shared;
use crate::slot::{Policy, Slot};
use crate::zero::Zero;

/// The reparameterization that gathers a full parameter from the shard that the module holds.
#[derive(Module, Debug)]
pub struct Gathered {
    #[module(skip)]
    pub(crate) slot: Arc<Slot>,
}

impl Reparameterization for Gathered {
    const NAME: &'static str = "zero";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        backend::gather(base, &self.slot, None)
    }
}

/// Shards `model` over `ranks`. A collective: all ranks pass modules with the same parameters, whose values become rank 0's.
///
/// Each float parameter keeps its id, its place in the module and whether it requires gradients. It then holds this rank's shard, and
/// `param.val()` returns the full parameter. Sharding holds one full parameter at a time, even if parameters were not initialized yet.
///
/// # Errors
///
/// [`Error`]: ranks with different modules or settings, or parameters that are not fp32, have a reparameterization or occur twice.
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
        published: ranks.published.clone(),
        config: config.clone(),
        ahead: Ahead::default(),
        draws: Draws::new(config.seed, ranks.comm.rank()),
        reducer: OnceLock::new(),
    });
    let born = Rc::new(RefCell::new(Born::default()));
    let model = model.apply_reparameterization(Cut { shared: shared.clone(), ranks, born: born.clone() });
    let Born { slots, ids, train, trouble } = born.take();
    if let Some(error) = trouble {
        return Err(error);
    }
    ranks.published.keep(slots.iter().map(|slot| slot.clone() as _));
    let member = |(slot, train): (&Arc<Slot>, bool)| Member {
        path: slot.path.clone(),
        partition: slot.partition,
        is_whole: slot.policy == Policy::Replicated,
        train,
    };
    let members = slots.iter().zip(train).map(member).collect();
    let reducer = Reducer::new(&shared.comm, config, members)?;
    shared.reducer.set(reducer).expect("it is set here alone");
    let zero = Zero { shared, slots: slots.into(), ids: Arc::new(ids) };
    let model = zero.publish_changes(model)?;
    Ok((model, zero))
}

/// Examines a module before anything is changed.
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

/// Shards parameters, one after the other.
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
            // A frozen parameter has no optimizer state.
            false if !train => Policy::Replicated,
            false => Policy::Kept,
        }
    }

    /// Returns rank 0's values of a tensor.
    fn values<const D: usize>(&self, path: &str, tensor: Tensor<D>) -> Result<Vec<f32>, Error> {
        let data = tensor.into_data();
        let got = format!("{:?}", data.dtype());
        let values = data.try_into_vec().map_err(|_| Error::Dtype { path: path.into(), got })?;
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
        let home = Device::flex().with_autodiff_context_from(&device);
        let device = device.without_autodiff();
        let checked = device::check(path, &device, self.shared.config.param_dtype);
        let mut values = match checked.and_then(|()| self.values(path, tensor)) {
            Ok(values) => values,
            Err(error) => {
                // `shard` returns this error instead of the module.
                self.born.borrow_mut().trouble = Some(error);
                return (Param::from_mapped_value(id, Tensor::zeros([0; D], &home), mapper), None);
            }
        };
        let mut born = self.born.borrow_mut();
        let policy = self.policy(Partition::new(values.len(), self.shared.world()), D, train);
        let object = self.ranks.next_object();
        let slot = Slot::new(born.slots.len(), path, whole, policy, device, &self.shared, object);
        let slot = Arc::new(slot);
        if policy != Policy::Replicated {
            // A copy, as a view would keep the full parameter alive.
            values = values[slot.own()].to_vec();
        }
        let base = Tensor::<D>::from_data(TensorData::new(values, slot.base.clone()), &home).set_require_grad(train);
        born.ids.insert(id, slot.index);
        born.train.push(train);
        born.slots.push(slot.clone());
        (Param::from_mapped_value(id, base, mapper), Some(Gathered { slot }))
    }
}
