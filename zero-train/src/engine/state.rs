//! Reading and writing full parameters, gradients and optimizer state through their shards: DeepSpeed's
//! `GatheredParameters`, `safe_get_full_*` and `safe_set_full_*`. Every rank makes the same calls.

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use zero_burn::gathered::{self, Edits, Gathered, ParamMeta, parameters};
use zero_burn::module::{ZeroAutodiff, set_gradient};
use zero_burn::shards::OffloadedStates;
use zero_core::config::{Disk, Float};

use super::{EngineError, EngineOptimizer, Result, ZeroEngine};

/// The optimizer's name for the fp32 master of a 16-bit parameter.
pub(super) const MASTER: &str = "fp32_param";

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// Returns the float parameters, in the order of the module's fields.
    pub fn parameters(&self) -> Vec<ParamMeta> {
        parameters::<A, M>(self.model())
    }

    /// Runs `f` on every rank with the full parameters that `select` picks, in the precision of their masters if they are
    /// kept in 16 bit. With `modify_on_rank`, the changes of that rank are applied on every rank, to masters too; it must
    /// then not be called between [`backward`](Self::backward) and [`step`](Self::step).
    ///
    /// # Panics
    ///
    /// Same as [`zero_burn::gathered::gathered()`].
    pub fn gathered<R>(
        &mut self,
        select: impl Fn(&ParamMeta) -> bool,
        modify_on_rank: Option<usize>,
        f: impl FnOnce(&mut [Gathered]) -> R,
    ) -> R {
        let mut found = gathered::read::<A, M>(self.model(), select);
        for parameter in &mut found {
            if let Some(master) = self.state(parameter.meta.id, MASTER) {
                parameter.values = master;
            }
        }
        let edits = Edits::watch(&found);
        let result = f(&mut found);
        let changed = edits.of::<A::Base>(found, modify_on_rank);
        if let Some(root) = modify_on_rank {
            self.write(root, changed);
        }
        result
    }

    /// Moves parameters and the state of a fused optimizer from memory to a file below `disk.path`, between two updates.
    /// Returns this rank's number of bytes. The memory returns to the system only when the allocator releases it
    /// ([`PageKeeper::trim`](zero_core::alloc::PageKeeper::trim)). Every rank calls it. DeepSpeed's `offload_states`.
    ///
    /// # Errors
    ///
    /// [`EngineError::Order`] between micro-batches, or if the state is already offloaded; [`EngineError::Disk`].
    pub fn offload_states(&mut self, disk: &Disk) -> Result<u64> {
        if self.micro_batches > 0 || self.parked.is_some() {
            return Err(EngineError::Order(
                "offload_states was called between the micro-batches of an update, or twice: call it after step, and \
                 call reload_states before the next offload_states",
            ));
        }
        let mut parked = OffloadedStates::begin(disk)?;
        let moved = parked.add_module::<A, M>(self.model()).and_then(|()| match self.optimizer.fused() {
            Some(fused) => fused.offload_states_to(&mut parked),
            None => Ok(()),
        });
        let bytes = parked.bytes();
        // What has been moved is used from the disk, also after an error.
        self.parked = Some(parked);
        moved?;
        Ok(bytes)
    }

    /// Moves the state that [`offload_states`](Self::offload_states) moved to disk back into memory. Every rank calls it.
    pub fn reload_states(&mut self) {
        if let Some(parked) = self.parked.take() {
            parked.reload();
        }
    }

    fn write(&mut self, root: usize, parameters: Vec<Gathered>) {
        let model = self.model.take().expect("the module is absent only inside of step");
        let (model, written) = gathered::write::<A, M>(model, root, parameters);
        self.model = Some(model);
        if zero_burn::ranks::config::<A::Base>().param_dtype != Float::F32 {
            // The state of layers has no master: no update would refresh it.
            for Gathered { meta, values } in written.into_iter().filter(|written| written.meta.trained) {
                self.set_state(meta.id, MASTER, &values);
            }
        }
    }

    /// Returns a parameter in fp32: its master if it is kept in 16 bit.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`].
    pub fn full_parameter(&self, path: &str) -> Result<Gathered> {
        let meta = self.meta(path)?;
        Ok(match self.state(meta.id, MASTER) {
            Some(values) => Gathered { values, meta },
            None => {
                let found = gathered::read::<A, M>(self.model(), |other| other.id == meta.id);
                found.into_iter().next().expect("the module has the parameter that was found in it")
            }
        })
    }

    /// Sets a parameter, and its master, to rank 0's `values`.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`] and [`EngineError::Size`].
    pub fn set_full_parameter(&mut self, path: &str, values: &[f32]) -> Result<()> {
        let meta = self.meta(path)?;
        check_size(&meta, values)?;
        self.write(0, vec![Gathered { meta, values: values.to_vec() }]);
        Ok(())
    }

    /// Returns the gradient of a parameter, averaged over ranks and summed over the micro-batches so far (each divided by
    /// their number per update), without the loss scale. It exists between [`backward`](Self::backward) and
    /// [`step`](Self::step), once it is reduced.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`]; [`EngineError::NoState`] if there is none.
    pub fn full_gradient(&mut self, path: &str) -> Result<Gathered> {
        struct Read<'a> {
            grads: &'a GradientsParams,
            id: ParamId,
            values: Option<Vec<f32>>,
        }
        impl<A: ZeroAutodiff> ModuleVisitor<A> for Read<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
                if param.id == self.id
                    && let Some(gradient) = self.grads.get::<A::InnerBackend, D>(param.id)
                {
                    self.values = Some(gradient.into_data().iter::<f32>().collect());
                }
            }
        }
        let meta = self.meta(path)?;
        let grads = self.accumulator.grads();
        let mut read = Read { grads: &grads, id: meta.id, values: None };
        let model = self.model.as_ref().expect("the module is absent only inside of step");
        Module::<A>::visit(model, &mut read);
        let values = read.values;
        self.accumulator.accumulate(model, grads);
        let scale = self.loss_scale() as f32;
        let values = values.ok_or_else(|| no_gradient(&meta))?;
        Ok(Gathered { meta, values: values.into_iter().map(|value| value / scale).collect() })
    }

    /// Sets a reduced gradient to `values`, the same on every rank, in the scale of [`full_gradient`](Self::full_gradient).
    ///
    /// # Errors
    ///
    /// The errors of [`full_gradient`](Self::full_gradient), and [`EngineError::Size`].
    pub fn set_full_gradient(&mut self, path: &str, values: &[f32]) -> Result<()> {
        let meta = self.meta(path)?;
        check_size(&meta, values)?;
        let scale = self.loss_scale() as f32;
        let values: Vec<f32> = values.iter().map(|value| value * scale).collect();
        let mut grads = self.accumulator.grads();
        let model = self.model.as_ref().expect("the module is absent only inside of step");
        let set = set_gradient::<A, M>(&mut grads, model, meta.id, &values);
        self.accumulator.accumulate(model, grads);
        if set { Ok(()) } else { Err(no_gradient(&meta)) }
    }

    /// Returns a state of the optimizer for a parameter, by name (for AdamW "exp_avg" and "exp_avg_sq").
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`]; [`EngineError::NoState`] before the parameter's first update, for a name that the
    /// optimizer does not know, and for Burn's optimizers.
    pub fn full_optimizer_state(&self, path: &str, name: &str) -> Result<Gathered> {
        let meta = self.meta(path)?;
        let values = self.state(meta.id, name).ok_or_else(|| no_state(&meta, name))?;
        Ok(Gathered { values, meta })
    }

    /// Sets a state of the optimizer for a parameter to `values`, the same on every rank.
    ///
    /// # Errors
    ///
    /// The errors of [`full_optimizer_state`](Self::full_optimizer_state), and [`EngineError::Size`].
    pub fn set_full_optimizer_state(&mut self, path: &str, name: &str, values: &[f32]) -> Result<()> {
        if name == MASTER {
            return self.set_full_parameter(path, values);
        }
        let meta = self.meta(path)?;
        check_size(&meta, values)?;
        if self.set_state(meta.id, name, values) { Ok(()) } else { Err(no_state(&meta, name)) }
    }

    fn state(&self, id: ParamId, name: &str) -> Option<Vec<f32>> {
        Some(self.optimizer.fused()?.state(id, name)?.into_data().iter::<f32>().collect())
    }

    fn set_state(&mut self, id: ParamId, name: &str, values: &[f32]) -> bool {
        self.optimizer.fused_mut().is_some_and(|fused| fused.set_state(id, name, values))
    }

    pub(super) fn meta(&self, path: &str) -> Result<ParamMeta> {
        let all = self.parameters();
        let found = all.iter().find(|meta| meta.path == path).cloned();
        found.ok_or_else(|| {
            let distance = |meta: &&ParamMeta| strsim::levenshtein(&meta.path, path);
            let close = all.iter().min_by_key(distance).filter(|meta| distance(meta) <= 4);
            EngineError::UnknownParameter { path: path.into(), hint: close.map(|meta| meta.path.clone()) }
        })
    }
}

fn check_size(meta: &ParamMeta, values: &[f32]) -> Result<()> {
    let expected = meta.shape.iter().product();
    let got = values.len();
    if got == expected { Ok(()) } else { Err(EngineError::Size { path: meta.path.clone(), expected, got }) }
}

fn no_gradient(meta: &ParamMeta) -> EngineError {
    let why = "it exists only between the update's last backward and its step, and only if a rank used the parameter";
    no(meta, "reduced gradient".into(), why)
}

fn no_state(meta: &ParamMeta, name: &str) -> EngineError {
    let why = "state exists after the parameter's first update, and only the fused optimizers give access to it, under \
               the names of zero_kernels::Rule::state_names";
    no(meta, format!("optimizer state {name:?}"), why)
}

/// Returns the error of a parameter that has no `what`; `why` applies to a trained parameter.
fn no(meta: &ParamMeta, what: String, why: &'static str) -> EngineError {
    const FROZEN: &str = "it is frozen (require_grad is false): full_parameter returns its values";
    EngineError::NoState { path: meta.path.clone(), what, why: if meta.trained { why } else { FROZEN } }
}
