//! The engine's updates as an optimizer of Burn's, which calls it for each parameter that has a gradient.
//!
//! Burn decides the learning rate and the group of a parameter. Here the update is planned and, unless it needs sums over all ranks or state
//! on a disk, run. State is in the engine: Burn's record of this optimizer is empty.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_optim::{Optimizer, SgdState};
use parking_lot::Mutex;
use zero_core::CommError;
use zero_engine::abort::stop;
use zero_engine::backend::DType;
use zero_engine::cell::{Cell as EngineCell, GRADIENT, Kind, Origin};
use zero_engine::random::sign_bytes;
use zero_engine::update::plan::{EMA, MASTER, Operand, Update};
use zero_engine::values::here;
use zero_kernels::Rule;

use crate::device::{held, hold};
use crate::engine::{Burn, Cell, ParamState, Step, flat};
use crate::parameter::{Address, Parameter, address, copied};
use crate::tensors::{Floats, Raw, floats};
use crate::zero::Zero;

/// A step of an optimizer.
struct Running {
    step: Step,
    /// The parameters to be updated, by the base that the module holds of them.
    parameters: HashMap<Address, Arc<Parameter>>,
    /// Reduced gradients, by parameter. Empty if Burn passes the gradients on.
    gradients: Vec<Option<Arc<Cell>>>,
    factor: f32,
    updated: Vec<Arc<Parameter>>,
}

#[derive(Default)]
struct Shared {
    /// By parameter.
    states: Vec<ParamState>,
    /// First and second beta that replace those of the rules, for schedules that cycle the momentum.
    momentum: Option<(f32, f32)>,
    running: Option<Running>,
}

/// The updates of a module's parameters, and their state.
#[derive(Clone, Default)]
pub(crate) struct Updates(Arc<Mutex<Shared>>);

/// An optimizer of Burn's with one rule.
#[derive(Clone)]
pub(crate) struct Ruled {
    rule: Rule,
    updates: Updates,
}

impl Updates {
    /// Creates the optimizer for a rule, for parameters of the same module.
    pub(crate) fn ruled(&self, rule: Rule) -> Ruled {
        Ruled { rule, updates: self.clone() }
    }

    /// Begins a step that updates the parameters `indices` by `gradients` times `factor`.
    pub(crate) fn begin(&self, zero: &Zero, indices: &[usize], (gradients, factor): (Vec<Option<Arc<Cell>>>, f32)) {
        let runtime = zero.runtime();
        let step = Step::new(runtime.rank.clone(), runtime.updates.clone());
        let named = |&index: &usize| {
            let parameter = &zero.parameters[index];
            Some((address(&parameter.base()?), parameter.clone()))
        };
        let parameters = indices.iter().filter_map(named).collect();
        let shared = &mut *self.0.lock();
        shared.states.resize_with(zero.parameters.len(), ParamState::default);
        shared.running = Some(Running { step, parameters, gradients, factor, updated: Vec::new() });
    }

    /// Ends the step: runs the updates that have not run yet. A collective if the rule needs sums over all ranks.
    pub(crate) fn end(&self, zero: &Zero) -> Result<(), CommError> {
        let shared = &mut *self.0.lock();
        let Running { mut step, gradients, updated, .. } = shared.running.take().expect("a step has begun");
        let runtime = zero.runtime();
        step.run(None, &*runtime.collective(), &*runtime.owners())?;
        drop(gradients);
        step.start()?;
        for parameter in updated {
            parameter.set_base(base_of(&parameter, &shared.states[parameter.index]));
        }
        Ok(())
    }

    /// Sets the momentum of all rules from the next step on ([`Rule::set_momentum`]).
    #[cfg(feature = "trainer")]
    pub(crate) fn set_momentum(&self, momentum: f32, second_beta: f32) {
        self.0.lock().momentum = Some((momentum, second_beta));
    }

    /// Exchanges the parameters, and their masters, with their moving averages. Called after a fence.
    pub(crate) fn swap_averages(&self, zero: &Zero) {
        for (parameter, state) in zero.parameters.iter().zip(&mut self.0.lock().states) {
            let place = |name: &str| state.cells.iter().position(|(known, _)| known == name);
            let Some(average) = place(EMA) else { continue };
            let cell = state.cells[average].1.clone();
            let master = place(MASTER);
            state.cells[average].1 = match (parameter.base(), master) {
                // The base is the master.
                (Some(base), _) if parameter.shared.holds_shards() => state_cell(parameter, EMA, copied(floats(base))),
                (_, Some(master)) => std::mem::replace(&mut state.cells[master].1, cell.clone()),
                (_, None) => state_cell(parameter, EMA, copied(parameter.cell().local())),
            };
            if parameter.shared.holds_shards() {
                state.cells.retain(|(name, _)| name != MASTER);
            }
            parameter.replace(copied(cell.local()));
        }
    }

    /// Returns the state of parameter `index`.
    pub(crate) fn state(&self, index: usize) -> ParamState {
        self.0.lock().states.get(index).cloned().unwrap_or_default()
    }

    /// Sets the states of all parameters.
    pub(crate) fn set_states(&self, states: Vec<ParamState>) {
        self.0.lock().states = states;
    }
}

/// Returns what the module holds of a parameter after its update: the shard in fp32, or a placeholder if it may be on a device or a disk.
fn base_of(parameter: &Parameter, state: &ParamState) -> Raw {
    if !parameter.shared.holds_shards() {
        return parameter.base().unwrap_or_else(|| parameter.placeholder());
    }
    let cell = parameter.cell();
    let master = state.cells.iter().find(|(name, _)| name == MASTER).map(|(_, master)| master);
    parameter.shaped(master.unwrap_or(&cell).local())
}

/// Returns the cell of a state that does not come from an update.
pub(crate) fn state_cell(parameter: &Parameter, name: &str, values: Floats) -> Arc<Cell> {
    let origin = Origin::Derived(sign_bytes(name.as_bytes()));
    EngineCell::ready(parameter.template(Kind::Optimizer, origin), flat(here::<Burn>(values, parameter.place())))
}

impl Optimizer for Ruled {
    // Of the states that Burn has, one that may be empty: there never is one.
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        _: Option<SgdState<D>>,
    ) -> (Tensor<D>, Option<SgdState<D>>) {
        let base = held(tensor);
        let Shared { states, running, momentum } = &mut *self.updates.0.lock();
        let mut rule = self.rule;
        momentum.iter().for_each(|&(momentum, second_beta)| rule.set_momentum(momentum, second_beta));
        let found = running.as_mut().and_then(|running| Some((running.parameters.remove(&address(&base))?, running)));
        let Some((parameter, running)) = found else {
            stop(format!(
                "{} was stepped without `Optimizer::step`, or twice for one parameter: call that, and in your own `TrainStep::optimize` \
                 step the optimizer once",
                self.rule.name()
            ))
        };
        let state = &mut states[parameter.index];
        let cell = parameter.take().expect("a parameter is updated once in a step");
        if parameter.is_frozen() && !parameter.holds_shard() {
            stop(format!(
                "{parameter} was frozen when it was sharded, in 16 bit or quantized, so there is no master to update: let it require \
                 gradients before you call `shard`"
            ));
        }
        if parameter.shared.holds_shards() && parameter.slot.dtype != DType::F32 {
            // The base is the master.
            state.cells.retain(|(name, _)| name != MASTER);
            state.cells.push((MASTER.into(), state_cell(&parameter, MASTER, floats(base))));
        } else {
            drop(base);
        }
        let gradient = running.gradients.get_mut(parameter.index).and_then(Option::take).unwrap_or_else(|| {
            let gradient = here::<Burn>(flat(floats(held(grad))), parameter.place());
            EngineCell::ready(parameter.template(Kind::Gradient, GRADIENT), gradient)
        });
        let (rule, lr_factor) = rule.of(&parameter.path, parameter.shape.as_slice());
        let lr = lr * lr_factor;
        let operand = |cell| Operand { cell, edits: None };
        let (parameter_operand, gradient, scale) = (operand(cell), operand(gradient), running.factor);
        let update = Update { rule, lr, scale, parameter: parameter_operand, gradient };
        let version = running.step.add(update, state);
        let (is_pending, mut base) = (version.is_pending(), parameter.placeholder());
        parameter.set(version, base.clone());
        if is_pending {
            running.updated.push(parameter);
        } else {
            base = base_of(&parameter, state);
            parameter.set_base(base.clone());
        }
        (hold(base), None)
    }

    fn to_device<const D: usize>(state: SgdState<D>, _: &Device) -> SgdState<D> {
        state
    }
}
