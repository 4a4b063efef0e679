//! The fused optimizer: a rule for each group of parameters, and the parameters' state.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn_backend::distributed::DistributedParamId;
use burn_backend::{Backend, BackendTypes};
use burn_std::{DType, Shape};

use zero_core::offload::DiskError;
use zero_ops::Rule;

use super::state::{StateRecord, flat, from_record, to_record};
use crate::abort::{raise, stop};
use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::engine::{
    Cell, EngineDType, Kind, Origin, ParamState, Step, Template, burn_dtype, burn_shape, engine_shape,
};
use crate::random::sign_bytes;
use crate::shards::OffloadedStates;
use crate::tensor::{Shard, ZeroTensor};
use crate::values::piece;
use crate::walk;
use zero_engine::update::plan::{EMA, MASTER, Update};

/// Properties of a parameter by which groups select it.
#[derive(Debug, Clone, Copy)]
pub struct ParamInfo<'a> {
    /// Names of the fields from the module down, separated by dots: "h.0.attn.c_attn.weight".
    pub path: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
}

/// A tensor of the inner backend.
type BaseTensor<A> = <<A as ZeroAutodiff>::Base as BackendTypes>::FloatTensorPrimitive;

/// Predicate that selects the parameters of a group.
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
#[derive(Clone)]
pub struct Fused<A: ZeroAutodiff> {
    rule: Rule,
    groups: Vec<Group>,
    pub(super) states: Vec<(ParamId, ParamState<A::Base>)>,
    /// Indices in `states`.
    pub(super) index: HashMap<ParamId, usize>,
    /// Parameters updated by the last step.
    latest: Vec<ParamId>,
}

impl<A: ZeroAutodiff> Fused<A> {
    /// Creates an optimizer with one rule for all parameters.
    pub fn new(rule: Rule) -> Self {
        Self { rule, groups: Vec::new(), states: Vec::new(), index: HashMap::new(), latest: Vec::new() }
    }

    /// Adds a group with its own rule, whose learning rate is the step's times `lr_scale`. A parameter belongs to the first group that
    /// selects it.
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

    /// Sets the momentum (the first beta of Adam, LAMB and Lion, the momentum of Muon's matrices) and, for Adam and LAMB, the second beta, of
    /// all groups from the next step on, for schedules that cycle the momentum. A rule without momentum stays without.
    pub fn set_momentum(&mut self, momentum: f32, second_beta: f32) {
        for rule in self.groups.iter_mut().map(|group| &mut group.rule).chain([&mut self.rule]) {
            rule.set_momentum(momentum, second_beta);
        }
    }

    /// Same as [`Optimizer::step`], with all gradients multiplied by `grad_scale` in the same pass: for clipping by the global norm and for
    /// loss scales.
    pub fn step_scaled<M: AutodiffModule<A>>(
        &mut self,
        lr: LearningRate,
        grad_scale: f32,
        module: M,
        grads: GradientsParams,
    ) -> M {
        self.step_by(lr, grad_scale, None, module, grads)
    }

    /// Steps with `factor` instead of `scale`, if everything is updated on the device that holds it.
    pub(super) fn step_by<M: AutodiffModule<A>>(
        &mut self,
        lr: LearningRate,
        scale: f32,
        factor: Option<BaseTensor<A>>,
        module: M,
        mut grads: GradientsParams,
    ) -> M {
        let context = Context::<A::Base>::current();
        self.latest.clear();
        let mut step = Step::new(context.rank.clone(), context.updates.clone());
        let module = walk::map::<A, M, _>(
            module,
            |meta, _| walk::take_gradient::<A>(&mut grads, meta.id),
            |meta, gradient, parameter| {
                let (parameter, gradient) = (shard(parameter, "parameter"), shard(gradient, "gradient"));
                let (rule, lr_scale) = self.group(&meta.path, &parameter.cell.shape);
                let (rule, factor) = rule.of(&meta.path, &parameter.cell.shape);
                let lr_scale = lr_scale * factor;
                Context::of(&parameter.cell).before_update();
                let (parameter, gradient) = (parameter.into_operand(), gradient.into_operand());
                let update = Update { rule, lr: lr * lr_scale, scale, parameter, gradient };
                self.latest.push(meta.id);
                ZeroTensor::Shard(Shard::new(step.add(update, self.state_of(meta.id))))
            },
        );
        if step.has_second_pass() && context.has_parts() {
            stop(
                "LAMB's trust ratio and Muon's matrices need the full parameter, but in a mesh with axes other than data, a \
                 rank may have only a part of it: choose another rule, such as Rule::adamw, or a mesh with only the data axis"
                    .into(),
            );
        }
        step.run(factor, &*context.collective(), &*context.owners()).unwrap_or_else(|error| raise(error));
        // Frees what only these gradients keep, before more is read.
        drop(grads);
        step.start().unwrap_or_else(|error| raise(error));
        // Every rank comes here; later, one may use a parameter alone. Ended at once, because until then memory holds both shards and full
        // tensors.
        context.gather_awaited();
        module
    }

    /// Waits until the last step's updates have ended. Updates of state in host memory or on a disk overlap what follows the step. Any use
    /// of a parameter or a state waits for that one by itself, so this is only needed for measurements.
    pub fn wait(&self) {
        Context::<A::Base>::current().wait_for_updates();
    }

    /// Returns one state of a parameter by its name ([`Rule::state_names`], [`EMA`], or "fp32_param" for the master of a 16-bit parameter),
    /// flat. Reading its data is a collective. `None` before the parameter's first step.
    pub fn state(&self, id: ParamId, name: &str) -> Option<Tensor<A::InnerBackend, 1>> {
        let (_, state) = &self.states[*self.index.get(&id)?];
        state.cells.iter().find(|(known, _)| known == name).map(|(_, cell)| flat(cell))
    }

    /// Replaces one state of a parameter by `values`: the full state, flat, the same on every rank. Returns `false` if there is no such
    /// state or its size differs. Creates an fp32 master if there is none yet.
    pub fn set_state(&mut self, id: ParamId, name: &str, values: &[f32]) -> bool {
        if name == MASTER && self.state(id, name).is_none() {
            // Otherwise the parameter's first update creates it from the parameter.
            let cell = loaded_state(id, name, Shape::new([values.len()]), Vec::new());
            self.state_of(id).cells.push((name.into(), cell));
        }
        let Some(&place) = self.index.get(&id) else { return false };
        let cells = &mut self.states[place].1.cells;
        let Some((_, cell)) = cells.iter_mut().find(|(known, _)| known == name) else { return false };
        if values.len() != cell.partition.numel() {
            return false;
        }
        let range = cell.partition.range(cell.place());
        *cell = loaded_state(id, name, burn_shape(&cell.shape), values[range].to_vec());
        true
    }

    /// Returns the number of a parameter's updates so far, and the names of its states, including the master ("fp32_param"). `None` before
    /// its first update.
    pub fn states(&self, id: ParamId) -> Option<(usize, Vec<&str>)> {
        let (_, state) = &self.states[*self.index.get(&id)?];
        Some((state.time, state.cells.iter().map(|(name, _)| name.as_str()).collect()))
    }

    /// Returns this rank's part of a state, fp32 and little-endian, partitioned like [`pieces`](crate::shards). Nothing is gathered.
    pub fn state_piece(&self, id: ParamId, name: &str) -> Option<Vec<u8>> {
        let (_, state) = &self.states[*self.index.get(&id)?];
        let (_, cell) = state.cells.iter().find(|(known, _)| known == name)?;
        Some(cell.own_bytes(EngineDType::F32))
    }

    /// Sets the complete state of a parameter of `numel` elements that has been updated `time` times. For each name, `states` has the
    /// elements that this rank holds ([`held_range`](crate::shards::held_range)).
    ///
    /// # Panics
    ///
    /// If a state has another number of elements.
    pub fn load_states(&mut self, id: ParamId, numel: usize, time: usize, states: Vec<(String, Vec<f32>)>) {
        let context = Context::<A::Base>::current();
        let partition = context.rank.partition(numel);
        let held = partition.len(context.rank.place(partition));
        let mut cells = Vec::with_capacity(states.len());
        for (name, values) in states {
            assert_eq!(values.len(), held, "number of values of optimizer state {name} on this rank");
            let cell = loaded_state(id, &name, Shape::new([numel]), values);
            cells.push((name, cell));
        }
        let state = self.state_of(id);
        (state.time, state.cells) = (time, cells);
    }

    /// Moves all state to a disk temporarily.
    ///
    /// # Errors
    ///
    /// [`DiskError`].
    pub fn offload_states_to(&self, parked: &mut OffloadedStates<A::Base>) -> Result<(), DiskError> {
        self.states.iter().flat_map(|(_, state)| &state.cells).try_for_each(|(_, cell)| parked.add(cell))
    }

    /// Drops all state, as before the first update.
    pub fn clear_states(&mut self) {
        self.states.clear();
        self.index.clear();
    }

    /// Returns the rule of parameters that no group selects.
    pub fn rule(&self) -> Rule {
        self.rule
    }

    /// Returns whether a device can compute a step by itself: no rule has a second pass, for which sums are read, and no average follows an
    /// update that may be skipped.
    #[cfg(feature = "cubecl")]
    pub(super) fn has_one_pass(&self) -> bool {
        let mut rules = self.groups.iter().map(|group| group.rule).chain([self.rule]);
        let has_average = Context::<A::Base>::current().rank.config.ema_decay.is_some();
        !has_average && rules.all(|rule| !matches!(rule, Rule::Lamb { .. } | Rule::Muon { .. }))
    }

    /// Uncounts the last step, which a device has skipped.
    #[cfg(feature = "cubecl")]
    pub(super) fn take_back(&mut self) {
        for id in std::mem::take(&mut self.latest) {
            let state = self.state_of(id);
            state.time -= 1;
            if state.time == 0 {
                // These states have not begun.
                state.cells.retain(|(name, _)| name == MASTER);
            }
        }
    }

    fn group(&self, path: &str, shape: &[usize]) -> (Rule, f64) {
        let info = ParamInfo { path, shape };
        let group = self.groups.iter().find(|group| (group.select)(info));
        group.map_or((self.rule, 1.0), |group| (group.rule, group.lr_scale))
    }

    fn state_of(&mut self, id: ParamId) -> &mut ParamState<A::Base> {
        let place = *self.index.entry(id).or_insert_with(|| {
            self.states.push((id, ParamState::default()));
            self.states.len() - 1
        });
        &mut self.states[place].1
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
                "got gradients from several devices: with Zero<B>, each device is a rank of its own, and the backward \
                 pass averages the gradients; call step with this rank's gradients"
                    .into(),
            ),
        }
    }

    fn to_record(&self) -> Self::Record {
        self.states.iter().map(|(id, state)| to_record(*id, state)).collect()
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.states = record
            .into_iter()
            .map(|record| {
                let id = record.id.clone();
                from_record(record).unwrap_or_else(|name| {
                    stop(format!(
                        "optimizer state {name} of parameter {id} is an ordinary tensor: load optimizer records inside \
                         zero_burn::load_state"
                    ))
                })
            })
            .collect();
        self.index = self.states.iter().enumerate().map(|(place, &(id, _))| (id, place)).collect();
        self
    }
}

/// Creates state `name` of parameter `id` from this rank's elements `held`, for state that does not come from an update.
pub(super) fn loaded_state<B: Backend>(id: ParamId, name: &str, shape: Shape, held: Vec<f32>) -> Arc<Cell<B>> {
    let rank = Context::<B>::current().rank.clone();
    let (partition, device) = (rank.partition(shape.num_elements()), rank.device.clone());
    let of_rule = || burn_dtype(rank.loaded_state_dtype(shape.num_elements()));
    let dtype = if [MASTER, EMA].contains(&name) { DType::F32 } else { of_rule() };
    let local = B::float_from_data(piece(held).convert_dtype(dtype), &device);
    let slot = rank.parameters.slots_of(DistributedParamId::from(id.val())).into_iter().next();
    let origin = Origin::Derived(sign_bytes(name.as_bytes()));
    let shape = engine_shape(&shape);
    Cell::ready(Template { rank, slot, partition, shape, device, kind: Kind::Optimizer, origin }, local)
}

fn shard<B: Backend>(tensor: ZeroTensor<B>, what: &str) -> Shard<B> {
    match tensor {
        ZeroTensor::Shard(shard) if shard.views.only_maps() => shard,
        _ => stop(format!(
            "the fused optimizer got a {what} that is an ordinary tensor: call zero_burn::module::prepare on the model \
             and zero_burn::module::collect_grads on its gradients"
        )),
    }
}
