//! Sharding a module: each parameter is partitioned, and from then on gathers itself.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::{LoraAdapter, Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};
use zero_core::Buffer;
use zero_core::collective::agree;
use zero_core::config::{Gathers, Tier, ZeroConfig};
use zero_engine::backend::Backend;
use zero_engine::values::flat_tensor;
use zero_kernels::quantized::Format;

use crate::backend;
use crate::buffers::{self, LayerState};
use crate::device::{self, hold_as};
use crate::engine::{Burn, Place, Runtime, Slot, caught, threads_share_tensors};
use crate::error::Error;
use crate::parameter::{Parameter, Shared};
use crate::ranks::Ranks;
use crate::reduce::Passes;
use crate::tensors::{host, values as elements};
use crate::zero::Zero;

/// The reparameterization that gathers a full parameter from the shard that the module holds, and adds its LoRA adapter, if it has one.
#[derive(Module, Debug)]
pub struct Gathered {
    #[module(skip)]
    pub(crate) parameter: Arc<Parameter>,
    /// None or one. A list, because an option would have the size of an adapter in every parameter.
    adapters: Vec<LoraAdapter>,
}

impl Gathered {
    /// Returns the parameter's LoRA adapter, if it has one.
    pub(crate) fn adapter(&self) -> Option<&LoraAdapter> {
        self.adapters.first()
    }
}

impl Reparameterization for Gathered {
    const NAME: &'static str = "zero";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let full = backend::gather(base, &self.parameter, None);
        match self.adapter() {
            Some(adapter) => adapter.apply(full),
            None => full,
        }
    }
}

/// Returns the first setting that is not implemented for Burn 0.22.
pub(crate) fn unsupported(config: &ZeroConfig) -> Option<&'static str> {
    let refused = [
        ("a mesh of several axes", !config.axes.foreign().is_empty()),
        ("gathering by collectives", config.gathers == Gathers::Collective),
    ];
    refused.into_iter().find(|(_, is_set)| *is_set).map(|(setting, _)| setting)
}

/// Shards `model` over `ranks`. A collective: all ranks pass modules with the same parameters, whose values become rank 0's.
///
/// Each float parameter keeps its id, its place in the module and whether it requires gradients. It then holds this rank's shard (with
/// shards on a device or a disk, a placeholder), and `param.val()` returns the full parameter. Sharding holds one full parameter at a time, even
/// if parameters were not initialized yet.
///
/// # Errors
///
/// [`Error`]: settings that are not supported, ranks with different modules or settings, or parameters that are not fp32, have a
/// reparameterization or occur twice.
pub fn shard<M: Module>(model: M, ranks: &Ranks, config: &ZeroConfig) -> Result<(M, Zero), Error> {
    shard_by(model, ranks, config, NoAdapters, None)
}

/// Shards `model` like [`shard()`], after `lora` has frozen its parameters and given some of them adapters: Burn's
/// [`Lora`](burn::module::Lora), or another reparameterizer with [`LoraAdapter`]. Only the adapters are trained; they are sharded too.
///
/// `param.val()` returns `base + scale * (a b)`, as in Burn. [`dense`](crate::dense) and [`embedding`](crate::embedding) add the adapter's
/// output without this sum. Parameters of the adapter of `layer.weight` have the paths `layer.adapter.a` and `layer.adapter.b`.
///
/// ```
/// use burn::module::{Lora, ParamGroup};
/// use burn::tensor::{Device, Tensor};
/// use burn_nn::LinearConfig;
/// use burn_optim::AdamWConfig;
/// use zero_core::{Stage, collective::threads::ThreadOptions};
/// use zero_param::{Error, ZeroConfig, dense, run_threads, shard_lora};
///
/// run_threads(2, &ThreadOptions::default(), |ranks| {
///     let device = Device::flex().autodiff();
///     let layer = LinearConfig::new(512, 512).init(&device);
///     let lora = Lora::new(8, 16.0).set_param_group(ParamGroup::from_path("weight"));
///     let (mut layer, zero) = shard_lora(layer, ranks, &ZeroConfig::new(Stage::Parameters), lora)?;
///     let mut optimizer = zero.optimizer(&AdamWConfig::new())?;
///     let rows = Tensor::<2>::ones([8, 512], &device); // this rank's
///     let loss = || dense(rows, &layer.weight, layer.bias.as_ref(), None).square().mean();
///     let (_, grads) = zero.backward(loss)?;
///     layer = optimizer.step(1e-3, layer, grads)?;
///     # let _ = layer;
///     Ok::<_, Error>(())
/// })
/// .unwrap();
/// ```
///
/// LoRA: *Low-Rank Adaptation of Large Language Models*, Hu et al. 2021, <https://arxiv.org/abs/2106.09685>.
///
/// # Errors
///
/// The errors of [`shard()`].
pub fn shard_lora<M: Module>(
    model: M,
    ranks: &Ranks,
    config: &ZeroConfig,
    lora: impl Reparameterizer<Reparam = LoraAdapter>,
) -> Result<(M, Zero), Error> {
    shard_by(model, ranks, config, lora, None)
}

/// Shards `model` like [`shard_lora`], with the frozen weights of its `Linear` layers in 8 or 4 bits: *QLoRA*, Dettmers et al. 2023,
/// <https://arxiv.org/abs/2305.14314>. Embeddings, norms and biases keep their type.
///
/// Shards are quantized: they are stored, kept on a disk and gathered in this form, and decoded for each use. Checkpoints do not hold
/// quantized weights: start from the same weights again, and load the adapter.
///
/// # Errors
///
/// The errors of [`shard()`], and [`Error::NotFinite`].
pub fn shard_qlora<M: Module>(
    model: M,
    ranks: &Ranks,
    config: &ZeroConfig,
    lora: impl Reparameterizer<Reparam = LoraAdapter>,
    format: Format,
) -> Result<(M, Zero), Error> {
    shard_by(model, ranks, config, lora, Some(format))
}

/// Returns the path of the adapter of the parameter at `path`, as in `zero-models`.
pub(crate) fn adapter_path(path: &str) -> String {
    match path.strip_suffix("weight") {
        Some(layer) => format!("{layer}adapter"),
        None => format!("{path}_adapter"),
    }
}

/// A reparameterizer that changes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoAdapters;

impl Reparameterizer for NoAdapters {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        (param, None)
    }
}

/// Shards `model` with the adapters that `lora` makes, and the frozen weights of linear layers in this format.
pub(crate) fn shard_by<M: Module>(
    model: M,
    ranks: &Ranks,
    config: &ZeroConfig,
    lora: impl Reparameterizer<Reparam = LoraAdapter>,
    format: Option<Format>,
) -> Result<(M, Zero), Error> {
    config.validate(ranks.comm.world())?;
    if let Some(setting) = unsupported(config) {
        return Err(Error::Unsupported { setting });
    }
    let mut survey = Survey::default();
    model.visit(&mut survey);
    if let Some(trouble) = survey.trouble.take() {
        return Err(trouble);
    }
    // Ranks may keep their disk files in different places.
    let mut compared = config.clone();
    compared.offload.disk = Default::default();
    let place = survey.place(config);
    let kind = if Burn::is_host(&place) { "host memory" } else { "devices" };
    survey.lines.push(format!("{compared:?} {format:?}, shards in {kind}"));
    if let Some(difference) = agree(&*ranks.comm, &survey.lines)? {
        return Err(difference.into());
    }
    let runtime = Runtime::new(config.clone(), place, ranks.comm.duplicate("model")?, ranks.window.clone())?;
    let runtime = Arc::new(runtime);
    ranks.runtimes.add(&runtime);
    let shared =
        Arc::new(Shared { runtime: runtime.clone(), passes: Passes::default(), adapter_dropout: AtomicU64::default() });
    let born = Rc::new(RefCell::new(Born::default()));
    let layer_state: Arc<[LayerState]> = buffers::find(&model).into();
    let cut = Cut {
        shared: shared.clone(),
        layer_state: layer_state.clone(),
        measured: Rc::new(survey.measured),
        quantized: format.map(|format| (format, Rc::new(survey.linears))),
        born: born.clone(),
        lora,
        prefix: String::new(),
    };
    let model = model.apply_reparameterization(cut);
    let Born { parameters, trained, ids, trouble } = born.take();
    if let Some(error) = trouble {
        return Err(error);
    }
    runtime.rank.keep_states(&trained);
    runtime.end_building();
    let runtimes = ranks.runtimes.clone();
    let members = parameters.iter().map(|parameter| parameter.member.clone()).collect();
    let zero = Zero { shared, parameters: parameters.into(), members, ids: Arc::new(ids), layer_state, runtimes };
    let model = caught(|| {
        zero.fence("a module is sharded");
        zero.rebase(model)
    })?;
    Ok((model, zero))
}

/// Burn's layer that reads the number of rows of its first weight.
const FEED_FORWARD: &str = "PositionWiseFeedForward";

/// Examines a module before anything is changed.
#[derive(Default)]
struct Survey {
    path: Vec<String>,
    types: Vec<String>,
    seen: HashMap<ParamId, String>,
    lines: Vec<String>,
    /// Parameters whose number of rows a layer of Burn reads from what the module holds.
    measured: HashSet<ParamId>,
    /// Weights of linear layers.
    linears: HashSet<ParamId>,
    /// Where parameters are.
    places: Vec<Place>,
    trouble: Option<Error>,
}

impl Survey {
    /// Returns where shards are kept: on the model's device, unless parameters are offloaded, on several devices, or on one whose tensors
    /// threads cannot share.
    fn place(&self, config: &ZeroConfig) -> Place {
        match &self.places[..] {
            [place] if config.offload.parameters == Tier::Memory && threads_share_tensors() => place.clone(),
            _ => Place::Host,
        }
    }
}

impl ModuleVisitor for Survey {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" {
            let (path, name) = (self.path.join("."), name.to_string());
            self.trouble.get_or_insert(Error::Reparameterized { path, name });
        }
        self.path.push(name.to_string());
        self.types.push(container_type.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.types.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        self.lines.push(format!("parameter '{path}' of {:?}", param.lazy_shape()));
        let place = Place::of(param.lazy_device().without_autodiff().as_dispatch());
        if !self.places.contains(&place) {
            self.places.push(place);
        }
        if D == 2 && path.ends_with("weight") && self.types.iter().rev().take(2).any(|of| of.ends_with(":Linear")) {
            self.linears.insert(param.id);
        }
        let is_inner = path.ends_with("linear_inner.weight");
        if is_inner && self.types.iter().rev().take(2).any(|of| of.ends_with(FEED_FORWARD)) {
            self.measured.insert(param.id);
        }
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

/// Shards parameters, one after the other, with the adapters that `lora` makes for them.
struct Cut<L> {
    shared: Arc<Shared>,
    layer_state: Arc<[LayerState]>,
    measured: Rc<HashSet<ParamId>>,
    /// The format of frozen weights of linear layers, and these layers' weights.
    quantized: Option<(Format, Rc<HashSet<ParamId>>)>,
    born: Rc<RefCell<Born>>,
    lora: L,
    /// Beginning of the paths.
    prefix: String,
}

impl<L> Cut<L> {
    /// Returns rank 0's values of a tensor.
    fn values<const D: usize>(&self, path: &str, tensor: Tensor<D>) -> Result<Buffer, Error> {
        let data = tensor.into_data();
        let got = format!("{:?}", data.dtype());
        let values = data.try_into_vec().map_err(|_| Error::Dtype { path: path.into(), got })?;
        Ok(caught(|| self.shared.runtime.broadcast(Buffer::F32(values), 0))?)
    }

    /// Gives layer state rank 0's values.
    fn broadcast<const D: usize>(&self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let values = self.values(path, tensor.clone().cast(DType::F32));
        let tensor = match values {
            Ok(values) => buffers::like(&tensor, values.into_f32()),
            Err(error) => {
                self.born.borrow_mut().trouble = Some(error);
                tensor
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

impl<L: Reparameterizer<Reparam = LoraAdapter>> Reparameterizer for Cut<L> {
    type Reparam = Gathered;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Gathered>) {
        if self.born.borrow().trouble.is_some() {
            return (param, None);
        }
        if self.layer_state.iter().any(|state| state.id == param.id) {
            return (self.broadcast(path, param), None);
        }
        let (param, adapter) = self.lora.reparameterize(path, param);
        let path = &format!("{}{path}", self.prefix);
        let rank = &self.shared.runtime.rank;
        let (id, tensor, mapper) = param.consume();
        let (train, strategy) = (tensor.is_require_grad(), tensor.gradient_checkpointing_strategy());
        let (device, shape) = (tensor.device().without_autodiff(), tensor.shape());
        let checked = device::check(path, &device, rank.config.param_dtype);
        let values = match checked.and_then(|()| self.values(path, tensor)) {
            Ok(values) => host(flat_tensor::<Burn>(values, &Place::Host)),
            Err(error) => {
                // `shard` returns this error instead of the module.
                self.born.borrow_mut().trouble = Some(error);
                return (Param::from_mapped_value(id, Tensor::zeros([0; D], &Device::flex()), mapper), None);
            }
        };
        let mut born = self.born.borrow_mut();
        let index = born.parameters.len();
        let format = self.quantized.as_ref().filter(|(_, linears)| !train && linears.contains(&id));
        let format = format.map(|(format, _)| *format);
        if format.is_some() && !elements::<f32>(&values).iter().all(|x| x.is_finite()) {
            born.trouble = Some(Error::NotFinite { path: path.clone() });
        }
        let shape = (shape, self.measured.contains(&id), format);
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
        drop(born);
        let adapter = adapter.map(|adapter| {
            let prefix = format!("{}.", adapter_path(path));
            let (shared, born, layer_state) = (self.shared.clone(), self.born.clone(), Arc::default());
            let measured = Rc::default();
            let (lora, quantized) = (NoAdapters, None);
            adapter.apply_reparameterization(Cut { shared, layer_state, measured, quantized, born, lora, prefix })
        });
        (
            Param::from_mapped_value(id, base, mapper),
            Some(Gathered { parameter, adapters: adapter.into_iter().collect() }),
        )
    }
}
