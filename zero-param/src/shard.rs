//! Sharding a module: each parameter is partitioned, and from then on gathers itself.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor};
use zero_core::Buffer;
use zero_core::collective::agree;
use zero_core::config::{Float, Gathers, Tier, ZeroConfig};
use zero_engine::values::flat_tensor;

use crate::backend;
use crate::device::{self, hold_as};
use crate::engine::{Host, Runtime, Slot, caught};
use crate::error::Error;
use crate::parameter::{Parameter, Shared};
use crate::ranks::Ranks;
use crate::reduce::Passes;
use crate::zero::Zero;

/// The reparameterization that gathers a full parameter from the shard that the module holds.
#[derive(Module, Debug)]
pub struct Gathered {
    #[module(skip)]
    pub(crate) parameter: Arc<Parameter>,
}

impl Reparameterization for Gathered {
    const NAME: &'static str = "zero";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        backend::gather(base, &self.parameter, None)
    }
}

/// Returns the first setting that is not implemented for Burn 0.22.
pub(crate) fn unsupported(config: &ZeroConfig) -> Option<&'static str> {
    let refused = [
        ("a mesh of several axes", !config.axes.foreign().is_empty()),
        ("fp16", config.param_dtype == Float::F16),
        ("activation checkpointing (checkpointed_blocks)", config.checkpointed_blocks > 0),
        ("offload of activations", config.offload.activations != Tier::Memory),
        ("gathering by collectives", config.gathers == Gathers::Collective),
    ];
    refused.into_iter().find(|(_, is_set)| *is_set).map(|(setting, _)| setting)
}

/// Shards `model` over `ranks`. A collective: all ranks pass modules with the same parameters, whose values become rank 0's.
///
/// Each float parameter keeps its id, its place in the module and whether it requires gradients. It then holds this rank's shard (with
/// model state on a disk, a placeholder), and `param.val()` returns the full parameter. Sharding holds one full parameter at a time, even
/// if parameters were not initialized yet.
///
/// # Errors
///
/// [`Error`]: settings that are not supported, ranks with different modules or settings, or parameters that are not fp32, have a
/// reparameterization or occur twice.
pub fn shard<M: Module>(model: M, ranks: &Ranks, config: &ZeroConfig) -> Result<(M, Zero), Error> {
    config.validate(ranks.comm.world())?;
    if let Some(setting) = unsupported(config) {
        return Err(Error::Unsupported { setting });
    }
    let mut survey = Survey::default();
    model.visit(&mut survey);
    if let Some(trouble) = survey.trouble {
        return Err(trouble);
    }
    // Ranks may keep their disk files in different places.
    let mut compared = config.clone();
    compared.offload.disk = Default::default();
    survey.lines.push(format!("{compared:?}"));
    if let Some(difference) = agree(&*ranks.comm, &survey.lines)? {
        return Err(difference.into());
    }
    let runtime = Runtime::new(config.clone(), (), ranks.comm.duplicate("model")?, ranks.window.clone())?;
    let runtime = Arc::new(runtime);
    ranks.runtimes.add(&runtime);
    let shared = Arc::new(Shared { runtime: runtime.clone(), passes: Passes::default() });
    let born = Rc::new(RefCell::new(Born::default()));
    let model = model.apply_reparameterization(Cut { shared: shared.clone(), born: born.clone() });
    let Born { parameters, trained, ids, trouble } = born.take();
    if let Some(error) = trouble {
        return Err(error);
    }
    runtime.rank.keep_states(&trained);
    runtime.end_building();
    let runtimes = ranks.runtimes.clone();
    let members = parameters.iter().map(|parameter| parameter.member.clone()).collect();
    let zero = Zero { shared, parameters: parameters.into(), members, ids: Arc::new(ids), runtimes };
    let model = caught(|| {
        zero.fence("a module is sharded");
        zero.rebase(model)
    })?;
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
    parameters: Vec<Arc<Parameter>>,
    /// The parameters that require gradients.
    trained: Vec<Arc<Slot>>,
    ids: HashMap<ParamId, usize>,
    trouble: Option<Error>,
}

/// Shards parameters, one after the other.
struct Cut {
    shared: Arc<Shared>,
    born: Rc<RefCell<Born>>,
}

impl Cut {
    /// Returns rank 0's values of a tensor.
    fn values<const D: usize>(&self, path: &str, tensor: Tensor<D>) -> Result<Buffer, Error> {
        let data = tensor.into_data();
        let got = format!("{:?}", data.dtype());
        let values = data.try_into_vec().map_err(|_| Error::Dtype { path: path.into(), got })?;
        Ok(caught(|| self.shared.runtime.broadcast(Buffer::F32(values), 0))?)
    }
}

impl Reparameterizer for Cut {
    type Reparam = Gathered;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Gathered>) {
        if self.born.borrow().trouble.is_some() {
            return (param, None);
        }
        let rank = &self.shared.runtime.rank;
        let (id, tensor, mapper) = param.consume();
        let (train, strategy) = (tensor.is_require_grad(), tensor.gradient_checkpointing_strategy());
        let (device, shape) = (tensor.device().without_autodiff(), tensor.shape());
        let checked = device::check(path, &device, rank.config.param_dtype);
        let values = match checked.and_then(|()| self.values(path, tensor)) {
            Ok(values) => flat_tensor::<Host>(values, &()),
            Err(error) => {
                // `shard` returns this error instead of the module.
                self.born.borrow_mut().trouble = Some(error);
                return (Param::from_mapped_value(id, Tensor::zeros([0; D], &Device::flex()), mapper), None);
            }
        };
        let mut born = self.born.borrow_mut();
        let index = born.parameters.len();
        let parameter = Arc::new(Parameter::new((index, path), shape, device, &self.shared));
        let slot = &parameter.slot;
        slot.reduction.layout.store(index as u64 + 1, Ordering::Relaxed);
        slot.quantization.is_frozen.store(!train, Ordering::Relaxed);
        let _ = (slot.id.set(id), slot.path.set(path.to_string()));
        rank.parameters.name(id, slot.clone());
        let base = hold_as(parameter.begin(values), strategy, train);
        if train {
            born.trained.push(slot.clone());
        }
        born.ids.insert(id, index);
        born.parameters.push(parameter.clone());
        (Param::from_mapped_value(id, base, mapper), Some(Gathered { parameter }))
    }
}
