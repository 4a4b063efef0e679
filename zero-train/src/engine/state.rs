//! Reading and writing whole parameters, gradients and optimizer state through their shards: what DeepSpeed calls
//! `GatheredParameters` and `safe_get_full_*`, `safe_set_full_*`. Every rank calls these alike.

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use zero_burn::config::{self, Float};
use zero_burn::gathered::{Gathered, ParamMeta, gathered, parameters};
use zero_burn::module::ZeroAutodiff;

use super::{EngineError, EngineOptimizer, ZeroEngine};

/// The optimizer's name for the fp32 master of a parameter in 16 bit.
const MASTER: &str = "fp32_param";

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// The float parameters, in the order of the module's fields.
    pub fn parameters(&self) -> Vec<ParamMeta> {
        parameters::<A, M>(self.model())
    }

    /// Runs `f` on the whole parameters that `select` names, on every rank; with `modify_on_rank`, what that rank leaves
    /// there becomes their value everywhere, masters included.
    ///
    /// # Panics
    ///
    /// As [`zero_burn::gathered::gathered`].
    pub fn gathered<R>(
        &mut self,
        select: impl Fn(&ParamMeta) -> bool,
        modify_on_rank: Option<usize>,
        f: impl FnOnce(&mut [Gathered]) -> R,
    ) -> R {
        let model = self.model.take().expect("the module is absent only inside of step");
        let ids: Vec<ParamMeta> = parameters::<A, M>(&model).into_iter().filter(|meta| select(meta)).collect();
        let (model, result) = gathered::<A, M, R>(model, select, modify_on_rank, f);
        self.model = Some(model);
        if modify_on_rank.is_some() && config::current::<A::Base>().param_dtype != Float::F32 {
            for meta in ids {
                let values = self.values(&meta);
                // There is none before the parameter's first update, which makes it from the parameter.
                self.optimizer.set_state(meta.id, MASTER, &values);
            }
        }
        result
    }

    /// A parameter in fp32: its master where it is kept in 16 bit.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`].
    pub fn full_parameter(&self, path: &str) -> Result<Gathered, EngineError> {
        let meta = self.meta(path)?;
        let values = match self.optimizer.state(meta.id, MASTER) {
            Some(master) => master.into_data().iter::<f32>().collect(),
            None => self.values(&meta),
        };
        Ok(Gathered { meta, values })
    }

    /// Sets a parameter, and its master, to `values`, the same on every rank.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`] and [`EngineError::Size`].
    pub fn set_full_parameter(&mut self, path: &str, values: &[f32]) -> Result<(), EngineError> {
        let meta = self.meta(path)?;
        check_size(&meta, values)?;
        let model = self.model.take().expect("the module is absent only inside of step");
        let (model, ()) = gathered::<A, M, ()>(
            model,
            |other| other.id == meta.id,
            Some(0),
            |found| {
                found.iter_mut().for_each(|parameter| parameter.values = values.to_vec());
            },
        );
        self.model = Some(model);
        self.optimizer.set_state(meta.id, MASTER, values);
        Ok(())
    }

    /// The gradient of a parameter, averaged over ranks and summed over the micro-batches so far, without the loss scale.
    /// Between [`backward`](Self::backward) and [`step`](Self::step), where it has been reduced.
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`]; [`EngineError::NoState`] where there is none.
    pub fn full_gradient(&mut self, path: &str) -> Result<Gathered, EngineError> {
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
        ModuleVisitorRun::<A, M>::run(model, &mut read);
        let values = read.values;
        self.accumulator.accumulate(model, grads);
        let scale = self.loss_scale() as f32;
        match values {
            Some(values) => Ok(Gathered { meta, values: values.into_iter().map(|value| value / scale).collect() }),
            None => Err(EngineError::NoState {
                path: path.into(),
                what: "reduced gradient".into(),
                why: "read it between the update's last backward and its step; a parameter that no rank has used has none",
            }),
        }
    }

    /// A state of the optimizer for a parameter, by its name (for AdamW "exp_avg" and "exp_avg_sq").
    ///
    /// # Errors
    ///
    /// [`EngineError::UnknownParameter`]; [`EngineError::NoState`] before the parameter's first update, for a name that the
    /// optimizer does not know, and for Burn's optimizers.
    pub fn full_optimizer_state(&self, path: &str, name: &str) -> Result<Gathered, EngineError> {
        let meta = self.meta(path)?;
        match self.optimizer.state(meta.id, name) {
            Some(state) => Ok(Gathered { values: state.into_data().iter::<f32>().collect(), meta }),
            None => Err(no_state(path, name)),
        }
    }

    /// Sets a state of the optimizer for a parameter to `values`, the same on every rank.
    ///
    /// # Errors
    ///
    /// As [`full_optimizer_state`](Self::full_optimizer_state), and [`EngineError::Size`].
    pub fn set_full_optimizer_state(&mut self, path: &str, name: &str, values: &[f32]) -> Result<(), EngineError> {
        let meta = self.meta(path)?;
        check_size(&meta, values)?;
        if self.optimizer.set_state(meta.id, name, values) { Ok(()) } else { Err(no_state(path, name)) }
    }

    fn values(&self, meta: &ParamMeta) -> Vec<f32> {
        struct Read(ParamId, Vec<f32>);
        impl<A: ZeroAutodiff> ModuleVisitor<A> for Read {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
                if param.id == self.0 {
                    self.1 = param.val().inner().into_data().iter::<f32>().collect();
                }
            }
        }
        let mut read = Read(meta.id, Vec::new());
        ModuleVisitorRun::<A, M>::run(self.model(), &mut read);
        read.1
    }

    fn meta(&self, path: &str) -> Result<ParamMeta, EngineError> {
        let all = self.parameters();
        let close = || {
            let distance = |meta: &ParamMeta| strsim::levenshtein(&meta.path, path);
            all.iter()
                .min_by_key(|meta| distance(meta))
                .filter(|meta| distance(meta) <= 4)
                .map(|meta| meta.path.clone())
        };
        match all.iter().find(|meta| meta.path == path) {
            Some(meta) => Ok(meta.clone()),
            None => Err(EngineError::UnknownParameter { path: path.into(), hint: close() }),
        }
    }
}

/// Names the backend of a visit, which a visitor that is generic over it cannot.
struct ModuleVisitorRun<A, M>(std::marker::PhantomData<(A, M)>);

impl<A: ZeroAutodiff, M: AutodiffModule<A>> ModuleVisitorRun<A, M> {
    fn run(module: &M, visitor: &mut impl ModuleVisitor<A>) {
        module.visit(visitor);
    }
}

fn check_size(meta: &ParamMeta, values: &[f32]) -> Result<(), EngineError> {
    let expected = meta.shape.iter().product();
    match values.len() {
        got if got == expected => Ok(()),
        got => Err(EngineError::Size { path: meta.path.clone(), expected, got }),
    }
}

fn no_state(path: &str, name: &str) -> EngineError {
    EngineError::NoState {
        path: path.into(),
        what: format!("optimizer state {name:?}"),
        why: "state begins with the parameter's first update, and only the fused optimizers give access to it, by the \
              names of zero_burn::optim::Rule::state_names",
    }
}
