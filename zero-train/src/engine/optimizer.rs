//! What the engine asks of an optimizer.

use burn::module::{AutodiffModule, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, SimpleOptimizer};
use burn::tensor::Tensor;
use zero_burn::module::{ZeroAutodiff, scale_grads};
use zero_burn::optim::Fused;
use zero_burn::pieces::Parked;
use zero_core::offload::DiskError;

/// An optimizer that a [`ZeroEngine`](super::ZeroEngine) can drive: [`Fused`], or one of Burn's.
pub trait EngineOptimizer<A: ZeroAutodiff, M: AutodiffModule<A>>: Optimizer<M, A> {
    /// Whether it keeps fp32 masters of parameters in 16 bit.
    const KEEPS_MASTERS: bool;

    /// Whether its state can be saved and loaded piece by piece.
    const SAVES_STATES: bool;

    /// Its rule's name, as in a DeepSpeed configuration but in lower case.
    fn name(&self) -> String;

    /// Bytes of state that it keeps for each element, without the master; 0 if that is not known.
    fn state_bytes(&self) -> usize;

    /// Updates of a parameter so far and the names of its states, the master included; `None` before the first.
    fn states(&self, id: ParamId) -> Option<(usize, Vec<String>)>;

    /// This rank's part of a state, see [`Fused::state_piece`].
    fn state_piece(&self, id: ParamId, name: &str) -> Option<Vec<u8>>;

    /// Makes these the states of a parameter, see [`Fused::load_states`].
    fn load_states(&mut self, id: ParamId, numel: usize, time: usize, states: Vec<(String, Vec<f32>)>);

    /// Forgets all state.
    fn clear_states(&mut self);

    /// Moves all state to a disk for a while, see [`Fused::park`].
    ///
    /// # Errors
    ///
    /// What the disk says.
    fn park(&self, parked: &mut Parked<A::Base>) -> Result<(), DiskError>;

    /// A step with every gradient multiplied by `grad_scale`.
    fn step_scaled(&mut self, lr: f64, grad_scale: f32, module: M, grads: GradientsParams) -> M;

    /// Sets the momentum (Adam's first beta) and, for Adam, the second beta, of the next steps; `false` if the optimizer
    /// has no such setting.
    fn set_momentum(&mut self, momentum: f32, beta_2: f32) -> bool;

    /// A state of a parameter by its name, flat, if the optimizer gives access to it.
    fn state(&self, id: ParamId, name: &str) -> Option<Tensor<A::InnerBackend, 1>>;

    /// Replaces a state of a parameter; `false` if there is none of that name and size.
    fn set_state(&mut self, id: ParamId, name: &str, values: &[f32]) -> bool;
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>> EngineOptimizer<A, M> for Fused<A> {
    const KEEPS_MASTERS: bool = true;
    const SAVES_STATES: bool = true;

    fn name(&self) -> String {
        self.rule().name().into()
    }

    fn state_bytes(&self) -> usize {
        4 * self.rule().state_names().len()
    }

    fn states(&self, id: ParamId) -> Option<(usize, Vec<String>)> {
        let (time, names) = Fused::states(self, id)?;
        Some((time, names.into_iter().map(String::from).collect()))
    }

    fn state_piece(&self, id: ParamId, name: &str) -> Option<Vec<u8>> {
        Fused::state_piece(self, id, name)
    }

    fn load_states(&mut self, id: ParamId, numel: usize, time: usize, states: Vec<(String, Vec<f32>)>) {
        Fused::load_states(self, id, numel, time, states);
    }

    fn clear_states(&mut self) {
        Fused::clear_states(self);
    }

    fn park(&self, parked: &mut Parked<A::Base>) -> Result<(), DiskError> {
        Fused::park(self, parked)
    }

    fn step_scaled(&mut self, lr: f64, grad_scale: f32, module: M, grads: GradientsParams) -> M {
        Fused::step_scaled(self, lr, grad_scale, module, grads)
    }

    fn set_momentum(&mut self, momentum: f32, beta_2: f32) -> bool {
        Fused::set_momentum(self, momentum, beta_2);
        true
    }

    fn state(&self, id: ParamId, name: &str) -> Option<Tensor<A::InnerBackend, 1>> {
        Fused::state(self, id, name)
    }

    fn set_state(&mut self, id: ParamId, name: &str, values: &[f32]) -> bool {
        Fused::set_state(self, id, name, values)
    }
}

impl<A, M, O> EngineOptimizer<A, M> for OptimizerAdaptor<O, M, A>
where
    A: ZeroAutodiff,
    M: AutodiffModule<A>,
    O: SimpleOptimizer<A::InnerBackend>,
{
    const KEEPS_MASTERS: bool = false;
    const SAVES_STATES: bool = false;

    fn name(&self) -> String {
        std::any::type_name::<O>().into()
    }

    fn state_bytes(&self) -> usize {
        0
    }

    fn states(&self, _id: ParamId) -> Option<(usize, Vec<String>)> {
        None
    }

    fn state_piece(&self, _id: ParamId, _name: &str) -> Option<Vec<u8>> {
        None
    }

    fn load_states(&mut self, _id: ParamId, _numel: usize, _time: usize, _states: Vec<(String, Vec<f32>)>) {}

    fn clear_states(&mut self) {}

    fn park(&self, _parked: &mut Parked<A::Base>) -> Result<(), DiskError> {
        Ok(())
    }

    fn step_scaled(&mut self, lr: f64, grad_scale: f32, module: M, grads: GradientsParams) -> M {
        let grads = if grad_scale == 1.0 { grads } else { scale_grads::<A, M>(grads, &module, grad_scale) };
        self.step(lr, module, grads)
    }

    fn set_momentum(&mut self, _momentum: f32, _beta_2: f32) -> bool {
        false
    }

    fn state(&self, _id: ParamId, _name: &str) -> Option<Tensor<A::InnerBackend, 1>> {
        None
    }

    fn set_state(&mut self, _id: ParamId, _name: &str, _values: &[f32]) -> bool {
        false
    }
}
