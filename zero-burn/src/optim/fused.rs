//! The optimizer: a rule for each group of parameters, and their state.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::distributed::DistributedParamId;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, BackendTypes, TensorData, TensorMetadata};
use burn_std::{DType, Shape};

use zero_core::offload::DiskError;
use zero_ops::Rule;

#[cfg(feature = "cubecl")]
use super::device;
use super::disk::{Array, Job};
use super::pass::{Arrays, elements_of, run};
use super::rule::Kernel;
use super::state::{MASTER, ParamState, StateRecord, States, flat, mismatch};
use crate::autodiff::ZeroAutodiff;
use crate::backend::Zero;
use crate::context::Context;
use crate::pieces::{Parked, cell_bytes};
use crate::random::sign_bytes;
use crate::shard::{Cell, Kind, Origin, Template};
use crate::tensor::{Shard, ZeroTensor};
use crate::tier::{Home, Stored, filled};
use crate::trouble::{or_stop, raise, stop};
use crate::values::read;
use crate::view::Extent;

/// What is known of a parameter when it is put into a group.
#[derive(Debug, Clone, Copy)]
pub struct ParamInfo<'a> {
    /// Names of fields from the module down, with dots: "h.0.attn.c_attn.weight".
    pub path: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
}

/// Whether a parameter belongs to a group.
type Select = Arc<dyn Fn(ParamInfo<'_>) -> bool + Send + Sync>;

#[derive(Clone)]
struct Group {
    rule: Rule,
    lr_scale: f64,
    select: Select,
}

/// A fused optimizer over a module on `Autodiff<Zero<B>>`.
///
/// ```
/// use zero_burn::optim::{Fused, Rule};
/// # type A = burn_autodiff::Autodiff<zero_burn::Zero<burn_flex::Flex>>;
/// // No weight decay for biases and norms, half the learning rate for embeddings.
/// let optimizer: Fused<A> = Fused::new(Rule::adamw())
///     .with_group(Rule::adamw().with_weight_decay(0.0), 1.0, |param| param.shape.len() < 2)
///     .with_group(Rule::adamw(), 0.5, |param| param.path.starts_with("wte"));
/// ```
pub struct Fused<A: ZeroAutodiff> {
    rule: Rule,
    groups: Vec<Group>,
    states: Vec<ParamState<A::Base>>,
    /// Places in `states`.
    index: HashMap<ParamId, usize>,
}

impl<A: ZeroAutodiff> Clone for Fused<A> {
    fn clone(&self) -> Self {
        Self { rule: self.rule, groups: self.groups.clone(), states: self.states.clone(), index: self.index.clone() }
    }
}

impl<A: ZeroAutodiff> Fused<A> {
    /// One rule for all parameters.
    pub fn new(rule: Rule) -> Self {
        Self { rule, groups: Vec::new(), states: Vec::new(), index: HashMap::new() }
    }

    /// Adds a group with a rule of its own, whose learning rate is the step's times `lr_scale`. A parameter belongs to
    /// the first group that selects it.
    #[must_use]
    pub fn with_group(
        mut self,
        rule: Rule,
        lr_scale: f64,
        select: impl Fn(ParamInfo<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.groups.push(Group { rule, lr_scale, select: Arc::new(select) });
        self
    }

    /// Sets the momentum (the first beta of Adam and Lion) and, for Adam, the second beta, of all groups from the next step
    /// on: schedules that cycle the momentum use it. A rule without momentum keeps none.
    pub fn set_momentum(&mut self, momentum: f32, second_beta: f32) {
        for rule in self.groups.iter_mut().map(|group| &mut group.rule).chain([&mut self.rule]) {
            match rule {
                Rule::AdamW { beta_1, beta_2, .. } | Rule::Adam { beta_1, beta_2, .. } => {
                    (*beta_1, *beta_2) = (momentum, second_beta);
                }
                Rule::Sgd { momentum: own, .. } if *own != 0.0 => *own = momentum,
                Rule::Lion { beta_1, .. } => *beta_1 = momentum,
                Rule::Sgd { .. } | Rule::Adagrad { .. } => {}
            }
        }
    }

    /// As [`Optimizer::step`], with all gradients multiplied by `grad_scale` in the same pass: for clipping by the
    /// global norm and for loss scales.
    pub fn step_scaled<M: AutodiffModule<A>>(
        &mut self,
        lr: LearningRate,
        grad_scale: f32,
        module: M,
        grads: GradientsParams,
    ) -> M {
        Context::<A::Base>::current().mover.sweep();
        let mut step = Step { optimizer: self, grads, lr, grad_scale, path: Vec::new(), jobs: Jobs::default() };
        let module = module.map(&mut step);
        let Step { grads, jobs, .. } = step;
        #[cfg(feature = "cubecl")]
        device::run(jobs.on_device, grad_scale);
        let jobs = jobs.on_processor;
        // What is kept of these is free before more is read.
        drop(grads);
        if !jobs.is_empty() {
            let context = Context::<A::Base>::current();
            let updates = context.updates.as_ref().expect("only what is kept elsewhere makes a job");
            updates.start(&context, jobs).unwrap_or_else(|error| raise(error));
        }
        // Every rank comes here; later one may use a parameter alone. Ended at once, as pieces and wholes are there till then.
        let context = Context::<A::Base>::current();
        context.gather_awaited();
        context.end_awaited();
        module
    }

    /// Waits until the last step's updates have ended. Those of what is kept in the host's memory or on a disk go on beside what follows the step;
    /// whatever needs a parameter or a state waits for that one by itself, so this is for measuring.
    pub fn wait(&self) {
        Context::<A::Base>::current().wait_for_updates();
    }

    /// One state of a parameter by its name ([`Rule::state_names`], or "fp32_param" for the master of a parameter in 16
    /// bit), flat. Reading its data is done by all ranks. `None` before the parameter's first step.
    pub fn state(&self, id: ParamId, name: &str) -> Option<Tensor<A::InnerBackend, 1>> {
        let state = &self.states[*self.index.get(&id)?];
        state.cells.iter().find(|(known, _)| known == name).map(|(_, cell)| flat(cell))
    }

    /// Replaces one state of a parameter by `values`, whole and flat, the same on every rank. `false` if there is no
    /// such state or it has another size; an fp32 master is made if there is none yet.
    pub fn set_state(&mut self, id: ParamId, name: &str, values: &[f32]) -> bool {
        if name == MASTER && self.state(id, name).is_none() {
            // Otherwise the parameter's first update makes it, from the parameter.
            let template = loaded_state(id, name, values.len());
            let nothing =
                <A::Base as FloatTensorOps<A::Base>>::float_zeros(Shape::new([1]), &template.device, DType::F32.into());
            self.state_of(id).cells.push((name.into(), Cell::ready(template, nothing)));
        }
        let Some(&place) = self.index.get(&id) else { return false };
        let cells = &mut self.states[place].cells;
        let Some((_, cell)) = cells.iter_mut().find(|(known, _)| known == name) else { return false };
        if values.len() != cell.partition.numel() {
            return false;
        }
        let range = cell.partition.range(cell.place());
        let piece = if range.is_empty() { vec![0.0] } else { values[range].to_vec() };
        let len = piece.len();
        let local = <A::Base as FloatTensorOps<A::Base>>::float_from_data(TensorData::new(piece, [len]), &cell.device);
        *cell = Cell::ready(Template { shape: cell.shape.clone(), ..loaded_state(id, name, values.len()) }, local);
        true
    }

    /// Updates of a parameter so far, and the names of its states, the master ("fp32_param") included. `None` before its
    /// first update.
    pub fn states(&self, id: ParamId) -> Option<(usize, Vec<&str>)> {
        let state = &self.states[*self.index.get(&id)?];
        Some((state.time, state.cells.iter().map(|(name, _)| name.as_str()).collect()))
    }

    /// This rank's part of a state, fp32 and little-endian, cut as [`pieces`](crate::pieces) are. Nothing is gathered.
    pub fn state_piece(&self, id: ParamId, name: &str) -> Option<Vec<u8>> {
        let state = &self.states[*self.index.get(&id)?];
        state.cells.iter().find(|(known, _)| known == name).map(|(_, cell)| cell_bytes(cell))
    }

    /// Makes `states` all that is known of a parameter of `numel` elements that has been updated `time` times: for each
    /// name the elements that this rank holds ([`held_range`](crate::pieces::held_range)).
    ///
    /// # Panics
    ///
    /// When a state has another number of elements.
    pub fn load_states(&mut self, id: ParamId, numel: usize, time: usize, states: Vec<(String, Vec<f32>)>) {
        let context = Context::<A::Base>::current();
        let partition = context.partition(numel);
        let held = partition.len(if partition.is_whole() { 0 } else { context.rank });
        let mut cells = Vec::with_capacity(states.len());
        for (name, mut values) in states {
            assert_eq!(values.len(), held, "elements of {name} that this rank holds");
            // One element of filler where it holds none, as everywhere.
            values.resize(values.len().max(1), 0.0);
            let (template, len) = (loaded_state(id, &name, numel), values.len());
            let data = TensorData::new(values, [len]);
            let local = <A::Base as FloatTensorOps<A::Base>>::float_from_data(data, &template.device);
            cells.push((name, Cell::ready(template, local)));
        }
        let state = self.state_of(id);
        (state.time, state.cells) = (time, cells);
    }

    /// Moves all state to a disk for a while.
    ///
    /// # Errors
    ///
    /// What the disk says.
    pub fn park(&self, parked: &mut Parked<A::Base>) -> Result<(), DiskError> {
        self.states.iter().flat_map(|state| &state.cells).try_for_each(|(_, cell)| parked.add(cell))
    }

    /// Forgets all state, as before the first update.
    pub fn clear_states(&mut self) {
        self.states.clear();
        self.index.clear();
    }

    /// The rule of parameters that no group selects.
    pub fn rule(&self) -> Rule {
        self.rule
    }

    fn group(&self, path: &str, shape: &[usize]) -> (Rule, f64) {
        let info = ParamInfo { path, shape };
        let group = self.groups.iter().find(|group| (group.select)(info));
        group.map_or((self.rule, 1.0), |group| (group.rule, group.lr_scale))
    }

    fn state_of(&mut self, id: ParamId) -> &mut ParamState<A::Base> {
        let place = *self.index.entry(id).or_insert_with(|| {
            self.states.push(ParamState { id, time: 0, cells: Vec::new() });
            self.states.len() - 1
        });
        &mut self.states[place]
    }
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>> Optimizer<M, A> for Fused<A> {
    type Record = Vec<StateRecord<A>>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        self.step_scaled(lr, 1.0, module, grads)
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, mut grads: MultiGradientsParams) -> M {
        match (grads.grads.pop(), grads.grads.is_empty()) {
            (Some((grads, _)), true) => self.step_scaled(lr, 1.0, module, grads),
            (None, _) => module,
            (Some(_), false) => stop(
                "gradients came from several devices: on Zero<B> every device is a rank of its own, whose gradients are \
                 averaged by the backward pass; call step with the rank's gradients"
                    .into(),
            ),
        }
    }

    fn to_record(&self) -> Self::Record {
        self.states.iter().map(ParamState::to_record).collect()
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.states = record
            .into_iter()
            .map(|record| {
                let id = record.id.clone();
                ParamState::from_record(record).unwrap_or_else(|name| {
                    stop(format!(
                        "optimizer state {name} of parameter {id} is an ordinary tensor: load optimizer records inside \
                         zero_burn::load_state"
                    ))
                })
            })
            .collect();
        self.index = self.states.iter().enumerate().map(|(place, state)| (state.id, place)).collect();
        self
    }
}

/// One step over a module.
struct Step<'a, A: ZeroAutodiff> {
    optimizer: &'a mut Fused<A>,
    grads: GradientsParams,
    lr: f64,
    grad_scale: f32,
    path: Vec<String>,
    jobs: Jobs<A::Base>,
}

/// Updates to be run together.
struct Jobs<B: Backend> {
    /// Of what is not kept with the backend.
    on_processor: Vec<Job<B>>,
    /// Of what is on a device.
    #[cfg(feature = "cubecl")]
    on_device: Vec<device::Job<B>>,
}

impl<B: Backend> Default for Jobs<B> {
    fn default() -> Self {
        Self {
            on_processor: Vec::new(),
            #[cfg(feature = "cubecl")]
            on_device: Vec::new(),
        }
    }
}

impl<A: ZeroAutodiff> ModuleMapper<A> for Step<'_, A> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<A, D>>) -> Param<Tensor<A, D>> {
        let Some(gradient) = self.grads.remove::<A::InnerBackend, D>(param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let requires_grad = tensor.is_require_grad();
        let parameter = shard(tensor.inner(), "parameter");
        let gradient = shard(gradient, "gradient");
        let (rule, lr_scale) = self.optimizer.group(&self.path.join("."), parameter.cell.shape.as_slice());
        let state = self.optimizer.state_of(id);
        let updated = update(state, rule, self.lr * lr_scale, self.grad_scale, parameter, gradient, &mut self.jobs);
        let updated = Tensor::<A::InnerBackend, D>::from_primitive(TensorPrimitive::Float(ZeroTensor::Shard(
            Shard::new(updated),
        )));
        let mut tensor = Tensor::<A, D>::from_inner(updated).set_require_grad(requires_grad);
        if requires_grad {
            tensor = tensor.set_distributed(DistributedParamId::from(id.val()));
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// The parameter's next version, in place where its memory is this one's alone.
fn update<B: Backend>(
    state: &mut ParamState<B>,
    rule: Rule,
    lr: f64,
    grad_scale: f32,
    parameter: Shard<B>,
    gradient: Shard<B>,
    jobs: &mut Jobs<B>,
) -> Arc<Cell<B>> {
    parameter.cell.context.before_update();
    let (parent, dtype) = (gradient.cell.clone(), parameter.cell.dtype);
    let (device, updated) = (parent.device.clone(), parameter.cell.template(Kind::Optimizer, Origin::Version));
    let names = rule.state_names();
    let origins: Vec<Origin> = names.iter().chain([&MASTER]).map(|name| Cell::derivation(name, &[&parent])).collect();
    let template = |origin| Template { origin, kind: Kind::Optimizer, ..parent.template(Kind::Optimizer, origin) };
    let templates: Vec<Template<B>> = origins.into_iter().map(template).collect();
    drop(parent);

    let half = matches!(dtype, DType::F16 | DType::BF16);
    let mut held = std::mem::take(&mut state.cells);
    // A parameter that was prepared anew has values of its own: the master is of those before.
    let is_of_before = |master: &Cell<B>| {
        master.slot.as_ref().is_some_and(|slot| {
            slot.current.lock().strong_count() == 0
                && gradient.cell.slot.as_ref().is_some_and(|own| own.index != slot.index)
        })
    };
    held.retain(|(name, cell)| name != MASTER || !is_of_before(cell));
    if !parameter.views.is_empty()
        && let Some((_, master)) = held.iter_mut().find(|(name, _)| name == MASTER)
    {
        // The parameter was changed since its last update, and its master is what it is made of.
        *master = edited(master.clone(), &parameter);
    }
    let elements = gradient.cell.partition.len(gradient.cell.place());
    let home = |kind, size| updated.context.home(kind, elements * size, updated.slot.as_deref());
    let is_on_disk = |cell: &Arc<Cell<B>>| matches!(cell.kept_elsewhere(), Some(Stored::Disk(_)));
    // A parameter alone in the host's memory is updated with its state, by the backend.
    if !matches!(home(Kind::Optimizer, 4), Home::Backend)
        || matches!(home(Kind::Parameter, dtype.size()), Home::Disk(_))
        || [&parameter.cell, &gradient.cell].into_iter().any(is_on_disk)
        || held.iter().any(|(_, cell)| cell.kept_elsewhere().is_some())
    {
        let (kernel, time) = next_kernel(rule, lr, state.time, |name| held.iter().any(|(known, _)| known == name));
        state.time = time;
        let (job, cells) = job(rule, (kernel, grad_scale), (parameter, gradient), held, (templates, updated));
        state.cells = cells;
        let version = job.cells.last().expect("the parameter's next version is its last").clone();
        jobs.on_processor.push(job);
        return version;
    }
    #[cfg(feature = "cubecl")]
    if zero_ops::is_cube::<B>() && matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        let (kernel, time) = next_kernel(rule, lr, state.time, |name| held.iter().any(|(known, _)| known == name));
        state.time = time;
        let (job, cells) = device::job(rule, kernel, (parameter, gradient), held, (templates, updated));
        state.cells = cells;
        let version = job.version();
        jobs.on_device.push(job);
        return version;
    }
    let mut taken = |name: &str| {
        let place = held.iter().position(|(known, _)| known == name)?;
        Some(host::<B>(held.swap_remove(place).1.into_local()))
    };
    let mut tensors: Vec<Option<TensorData>> = names.iter().map(|name| taken(name)).collect();
    let master = taken(MASTER);
    let (kernel, time) = next_kernel(rule, lr, state.time, |name| {
        names.iter().position(|known| *known == name).is_some_and(|place| tensors[place].is_some())
    });
    state.time = time;

    let piece = parameter.into_piece();
    let (mut p, mut copy) = if half {
        let copy = as_is::<B>(piece);
        (master.unwrap_or_else(|| copy.clone().convert_dtype(DType::F32)), Some(copy))
    } else {
        (host::<B>(piece), None)
    };
    // Other ranks of this process may share it: read where it lies.
    let g = gradient.into_piece();
    let elements = g.shape().num_elements();
    for data in [Some(&p), copy.as_ref()].into_iter().flatten().chain(tensors.iter().flatten()) {
        if data.num_elements() != elements {
            stop(mismatch(data.num_elements(), elements));
        }
    }
    let mut tensors: Vec<TensorData> = tensors
        .iter_mut()
        .map(|data| data.take().unwrap_or_else(|| TensorData::new(vec![0f32; elements], [elements])))
        .collect();
    let data;
    let gradient = match zero_ops::elements::<B>(&g) {
        Some(elements) => elements,
        None => {
            data = narrow_or_f32(as_is::<B>(g.clone()));
            elements_of(&data)
        }
    };
    run(kernel, grad_scale, Arrays { parameter: &mut p, gradient, state: &mut tensors, copy: copy.as_mut() });
    drop(g);

    let mut templates = templates.into_iter();
    for (name, data) in names.iter().zip(tensors) {
        let template = templates.next().expect("a template for each name");
        state.cells.push((name.to_string(), Cell::ready(template, B::float_from_data(data, &device))));
    }
    let p = match copy {
        None => p.convert_dtype(dtype),
        Some(copy) => {
            let template = templates.next().expect("a template for the master");
            state.cells.push((MASTER.into(), Cell::ready(template, B::float_from_data(p, &device))));
            copy
        }
    };
    Cell::ready(updated, B::float_from_data(p, &device))
}

/// State `name` of parameter `id`, of `numel` elements, that comes from elsewhere than from an update.
fn loaded_state<B: Backend>(id: ParamId, name: &str, numel: usize) -> Template<B> {
    let context = Context::<B>::current();
    let (partition, shape, device) = (context.partition(numel), Shape::new([numel]), context.device.clone());
    let slot = context.parameters.slots_of(DistributedParamId::from(id.val())).into_iter().next();
    let origin = Origin::Derived(sign_bytes(name.as_bytes()));
    Template { context, slot, partition, shape, device, kind: Kind::Optimizer, origin }
}

/// A parameter's fp32 master with what was done to the parameter itself.
fn edited<B: Backend>(master: Arc<Cell<B>>, parameter: &Shard<B>) -> Arc<Cell<B>> {
    let template = master.template(Kind::Optimizer, Cell::derivation("edit", &[&master]));
    let piece =
        parameter.views.apply_maps(master.into_local(), Extent::Piece(template.partition, parameter.cell.place()));
    let piece = if piece.dtype() == DType::F32 { piece } else { B::float_cast(piece, DType::F32.into()) };
    Cell::ready(template, piece)
}

/// The update's arithmetic, and its number. Also when the rule has changed since: state that it does not know is dropped,
/// what is missing begins anew.
fn next_kernel(rule: Rule, lr: f64, time: usize, has: impl Fn(&str) -> bool) -> (Kernel, usize) {
    let complete = rule.state_names().iter().all(|name| has(name));
    let time = if complete { time + 1 } else { 1 };
    (Kernel::new(rule, lr, time), time)
}

/// An update to be run on the processor, beside what follows the step, and the states that come of it, pending.
fn job<B: Backend>(
    rule: Rule,
    (kernel, scale): (Kernel, f32),
    (parameter, gradient): (Shard<B>, Shard<B>),
    mut held: States<B>,
    (templates, updated): (Vec<Template<B>>, Template<B>),
) -> (Job<B>, States<B>) {
    let (context, dtype) = (updated.context.clone(), parameter.cell.dtype);
    let elements = gradient.cell.partition.len(gradient.cell.place());
    let half = matches!(dtype, DType::F16 | DType::BF16);
    // Where a state is that may be there already.
    let mut home = |name: &str| {
        let place = held.iter().position(|(known, _)| known == name)?;
        Some(match held.swap_remove(place).1.into_stored() {
            Ok(stored) => Array::of(stored, &context.mover),
            Err(cell) => Array::Memory(host::<B>(cell.into_local())),
        })
    };
    let fresh = || match context.disk_for(Kind::Optimizer, elements * 4, None) {
        Some(disk) => Array::Disk { stored: or_stop(disk.reserve(elements * 4)), fresh: true },
        None => Array::Memory(TensorData::new(vec![0f32; elements], [elements])),
    };
    let names = rule.state_names();
    let states: Vec<Array> = names.iter().map(|name| home(name).unwrap_or_else(fresh)).collect();
    let master = home(MASTER);
    let own = match parameter.views.is_empty() {
        true => parameter.cell.into_stored().map_err(Shard::new),
        false => Err(parameter),
    };
    let own = match own {
        Ok(stored) => Array::of(stored, &context.mover),
        Err(parameter) => {
            let piece = parameter.into_piece();
            // A copy in 16 bit is written over from its master: there is no need to wait for its values.
            let unread = match half && master.is_some() {
                true => context.mover.array(piece.shape().num_elements(), dtype),
                false => None,
            };
            Array::Memory(unread.unwrap_or_else(|| as_is::<B>(piece)))
        }
    };
    let (parameter, copy) = match (half, own) {
        (false, own) => (own, None),
        (true, own) => {
            let master =
                master.unwrap_or_else(|| match (&own, context.disk_for(Kind::Optimizer, elements * 4, None)) {
                    (Array::Memory(copy), None) => Array::Memory(copy.clone().convert_dtype(DType::F32)),
                    (Array::Disk { stored, .. }, None) => {
                        let read = |bytes: &mut [u8]| or_stop(stored.read_into(bytes));
                        let copy = filled(&context.mover, elements, dtype, [elements], read);
                        Array::Memory(copy.convert_dtype(DType::F32))
                    }
                    (_, Some(_)) => fresh(),
                });
            (master, Some((own, dtype)))
        }
    };
    let plain = matches!(gradient.cell.dtype, DType::F32 | DType::F16 | DType::BF16);
    let kept = gradient.cell.stored().filter(|_| gradient.views.is_empty() && plain);
    let gradient_dtype = gradient.cell.dtype;
    let gradient = match kept {
        // Only read: no copy of what others may still read.
        Some(Stored::Disk(stored)) => (Array::Disk { stored, fresh: false }, gradient_dtype),
        Some(kept @ Stored::Host(_)) => {
            drop(kept);
            match gradient.cell.into_stored() {
                Ok(stored) => (Array::of(stored, &context.mover), gradient_dtype),
                Err(cell) => (Array::Memory(cell.data()), gradient_dtype),
            }
        }
        None => {
            let data = narrow_or_f32(as_is::<B>(gradient.into_piece()));
            let dtype = data.dtype;
            (Array::Memory(data), dtype)
        }
    };
    // In the order in which an update in memory makes them: names of cells count on it.
    let kept = names.iter().copied().chain(half.then_some(MASTER));
    let cells = kept.zip(templates).map(|(name, template)| (name.to_string(), Cell::pending(template, DType::F32)));
    let cells: States<B> = cells.collect();
    let version = Cell::pending(updated, dtype);
    let results = cells.iter().map(|(_, cell)| cell.clone()).chain([version]).collect();
    (Job { kernel, scale, elements, parameter, gradient, states, copy, cells: results }, cells)
}

fn shard<B: Backend, const D: usize>(tensor: Tensor<Zero<B>, D>, what: &str) -> Shard<B> {
    match tensor.into_primitive() {
        TensorPrimitive::Float(ZeroTensor::Shard(shard)) if shard.views.only_maps() => shard,
        _ => stop(format!(
            "the fused optimizer got a {what} that is an ordinary tensor: call zero_burn::module::prepare on the model \
             and zero_burn::module::collect_grads on its gradients"
        )),
    }
}

/// A piece in host memory, in place if this is its only handle, flat.
fn as_is<B: Backend>(piece: <B as BackendTypes>::FloatTensorPrimitive) -> TensorData {
    let mut data = read::<B>(piece);
    data.shape = Shape::new([data.num_elements()]);
    data
}

/// The same as f32.
fn host<B: Backend>(piece: <B as BackendTypes>::FloatTensorPrimitive) -> TensorData {
    as_is::<B>(piece).convert_dtype(DType::F32)
}

/// As f32, unless it is in 16 bit.
fn narrow_or_f32(data: TensorData) -> TensorData {
    match data.dtype {
        DType::F16 | DType::BF16 => data,
        _ => data.convert_dtype(DType::F32),
    }
}
