//! Saving and resuming an engine: parameters, optimizer state, and the other state that the next step depends on.
//!
//! * Tensors: `model.<path>`, a parameter in fp32 if the optimizer keeps a master of it, otherwise in its own type; and
//!   `optimizer.<path>.<state>` in fp32. At every stage, each rank writes its own shard, even of tensors that it holds in
//!   full.
//! * State, under the key `engine`: numbers of updates and skipped updates, the loss scale with its history, each
//!   parameter's number of updates, and the random state of every rank. A program adds its own keys, such as `model`, which
//!   `zero export` reads.
//! * Location: the given folder; on a mesh with foreign axes, a subfolder for each part of the model ([`folder`]).
//! * Resuming: with any number of ranks, any stage, any bucket sizes, in fp32 or 16 bit. With the same number of ranks and
//!   the same precision, the next losses equal those of an uninterrupted run bit for bit. With another number of ranks,
//!   parameters, moments and step are equal, but dropout draws other numbers and sums over ranks have another order.

use std::borrow::Cow;
use std::path::Path;

use burn::module::{AutodiffModule, ParamId};
use serde_json::{Map, Value};
use zero_burn::module::ZeroAutodiff;
use zero_burn::optim::Fused;
use zero_burn::ranks::{agree, folder, group, num_processes};
use zero_burn::shards::{self, ParamShard, RandomState};
use zero_core::checkpoint::training::{
    self, ENGINE, OptimizerState, RandomStates, STATE_VERSION, parameter_name, state_name,
};
use zero_core::checkpoint::{
    AsyncSaver, Checkpoint, CheckpointError, ElementType, Piece, SaveOptions, Saved, Started, TensorEntry, TensorSpec,
    save_streamed,
};
use zero_core::{Axes, config};

use super::state::MASTER;
use super::{EngineError, EngineOptimizer, Result, ZeroEngine, not_of_floats};
use crate::loss_scale::LossScaler;

type EngineState = training::EngineState<LossScaler>;

/// The parts of a checkpoint to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parts {
    /// Everything: training resumes.
    #[default]
    All,
    /// Only the parameters: a new training starts from them, with any optimizer.
    Parameters,
}

/// The source of a checkpoint tensor's bytes.
enum Source {
    /// The parameter with this index in the list of parameters.
    Parameter(usize),
    /// A state of the optimizer.
    State(ParamId, String),
}

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// Saves everything that training needs to resume as the checkpoint of `step` in `dir`, together with `extra`. Returns
    /// once it is durable. A collective; see [`zero_core::checkpoint::save`](zero_core::checkpoint::save()). Memory: a part
    /// of this rank's shards at a time.
    ///
    /// # Errors
    ///
    /// [`EngineError::Order`] between the micro-batches of an update, whose gradients a checkpoint does not hold;
    /// [`EngineError::CannotSave`] for an optimizer or a module that cannot be saved; [`EngineError::Checkpoint`].
    pub fn save(&self, dir: &Path, step: u64, extra: Map<String, Value>, options: &SaveOptions) -> Result<Saved> {
        let (parameters, specs, sources) = self.tensors()?;
        let state = self.saved_state(&parameters, extra)?;
        let mut bytes = |index: usize| Ok(Cow::Owned(self.bytes(&parameters, &sources[index])));
        let dir = folder::<A::Base>(dir);
        Ok(save_streamed(&*shards::collective::<A::Base>(), &dir, step, &specs, &mut bytes, &state, options)?)
    }

    /// Like [`save`](Self::save), but returns once this rank's shards are copied; writing them overlaps with training. The
    /// result includes the stall. Waits first for a save that is still in progress.
    ///
    /// # Errors
    ///
    /// The errors of [`save`](Self::save) and of the previous save; after an error of the previous save, this one has not started.
    pub fn save_async(
        &mut self,
        dir: &Path,
        step: u64,
        extra: Map<String, Value>,
        options: &SaveOptions,
    ) -> Result<Started> {
        // Its copy is given back before the next one is made.
        let previous = self.wait_for_save()?;
        let (parameters, specs, sources) = self.tensors()?;
        let state = self.saved_state(&parameters, extra)?;
        if self.saver.is_none() {
            self.saver = Some(AsyncSaver::new(&*shards::collective::<A::Base>())?);
        }
        let begin = std::time::Instant::now();
        let copies = specs.into_iter().zip(&sources).map(|(TensorSpec { name, dtype, shape }, source)| {
            Piece::new(name, dtype, shape, self.bytes(&parameters, source))
        });
        let copies: Vec<Piece<'static>> = copies.collect();
        let saver = self.saver.as_mut().expect("it was made above");
        let mut started = saver.save(&folder::<A::Base>(dir), step, copies, state, options.clone())?;
        started.stall = begin.elapsed();
        started.previous = started.previous.or(previous);
        Ok(started)
    }

    /// Waits until the save started by [`save_async`](Self::save_async) is durable. Returns `None` if there is none.
    ///
    /// # Errors
    ///
    /// The errors of that save.
    pub fn wait_for_save(&mut self) -> Result<Option<Saved>> {
        match &mut self.saver {
            Some(saver) => Ok(saver.wait()?),
            None => Ok(None),
        }
    }

    /// Resumes from a checkpoint that was saved with any number of ranks, stage or precision. Every rank calls it and reads
    /// its own shards. Returns the program's `extra` state.
    ///
    /// # Errors
    ///
    /// [`EngineError::Mismatch`] if the checkpoint is of another model or optimizer, before anything changes;
    /// [`EngineError::Checkpoint`] if it cannot be read, and [`EngineError::LoadFailed`] on the other ranks. After either
    /// of these two, the engine can no longer be used.
    pub fn load(&mut self, checkpoint: &Checkpoint, parts: Parts) -> Result<Map<String, Value>> {
        if self.micro_batches > 0 {
            return Err(EngineError::Order(
                "load was called between the micro-batches of an update: call it before forward, or after step",
            ));
        }
        let mismatch = |what| EngineError::Mismatch { path: checkpoint.path().to_path_buf(), what };
        let mut extra = match checkpoint.state()? {
            Value::Object(state) => state,
            _ => Map::new(),
        };
        let state = match parts {
            Parts::Parameters => None,
            Parts::All => Some(EngineState::take(&mut extra).map_err(mismatch)?),
        };
        self.check(checkpoint, state.as_ref())?;
        let loaded = self.load_tensors(checkpoint, state.as_ref());
        // All ranks or none: one that goes on alone would train another model. Parts of a model are saved apart: a save that was
        // cut short may have left some of them a step behind.
        const FAILED: &str = "failed";
        let step = format!("the checkpoint of step {}", checkpoint.step());
        let unlike = agree::<A::Base>(&[if loaded.is_ok() { step } else { FAILED.into() }]);
        loaded?;
        if let Some(unlike) = unlike {
            let failed =
                [(&unlike.first, 0), (&unlike.other, unlike.rank)].into_iter().find(|(told, _)| *told == FAILED);
            return Err(match failed {
                Some((_, rank)) => EngineError::LoadFailed { rank, path: checkpoint.path().to_path_buf() },
                None => CheckpointError::Unlike(unlike).into(),
            });
        }
        if let Some(state) = state {
            let [seed, draws] = state.random.of(self.device.rank(), num_processes::<A::Base>());
            shards::set_random_state::<A::Base>(RandomState { seed, draws });
            self.steps = state.steps;
            self.skipped = state.skipped;
            if let (Some(own), Some(saved)) = (&mut self.config.loss_scale, state.loss_scaler) {
                own.resume(&saved);
            }
        }
        Ok(extra)
    }

    /// Returns the parameters, and the tensors to save with their sources.
    #[allow(clippy::type_complexity)] // three lists for the two callers above
    fn tensors(&self) -> Result<(Vec<ParamShard<A::Base>>, Vec<TensorSpec>, Vec<Source>)> {
        if self.micro_batches > 0 {
            return Err(EngineError::Order(
                "save was called between the micro-batches of an update, but a checkpoint does not store their \
                 gradients: call it after the step that updates",
            ));
        }
        let fused = self.saved_optimizer()?;
        let (parameters, others) = shards::param_shards::<A, M>(self.model());
        if let Some(path) = others.first() {
            return Err(not_of_floats(path));
        }
        let (mut specs, mut sources) = (Vec::new(), Vec::new());
        let left_out = |piece: &ParamShard<A::Base>| self.config.exclude_frozen_parameters && piece.is_frozen();
        for (place, piece) in parameters.iter().enumerate().filter(|(_, piece)| !left_out(piece)) {
            let (id, path, shape) = (piece.meta.id, &piece.meta.path, &piece.meta.shape);
            let states = fused.states(id).map_or_else(Vec::new, |(_, names)| names);
            let mut add = |name: String, dtype, source| {
                specs.push(TensorSpec { name, dtype, shape: shape.clone() });
                sources.push(source);
            };
            let parameter = parameter_name(path);
            if states.contains(&MASTER) {
                add(parameter, ElementType::F32, Source::State(id, MASTER.into()));
            } else {
                add(parameter, piece.element_type(), Source::Parameter(place));
            }
            for name in states.into_iter().filter(|name| *name != MASTER) {
                add(state_name(path, name), ElementType::F32, Source::State(id, name.into()));
            }
        }
        Ok((parameters, specs, sources))
    }

    fn saved_optimizer(&self) -> Result<&Fused<A>> {
        self.optimizer.fused().ok_or_else(|| {
            EngineError::CannotSave(format!(
                "the state of {} cannot be accessed shard by shard: use zero_burn::optim::Fused, or save the records \
                 of model and optimizer with one of Burn's recorders",
                std::any::type_name::<O>()
            ))
        })
    }

    fn bytes(&self, parameters: &[ParamShard<A::Base>], source: &Source) -> Vec<u8> {
        match source {
            Source::Parameter(place) => parameters[*place].bytes(),
            Source::State(id, name) => {
                let piece = self.optimizer.fused().and_then(|fused| fused.state_piece(*id, name));
                piece.expect("the optimizer has the states that it named")
            }
        }
    }

    fn saved_state(&self, parameters: &[ParamShard<A::Base>], mut extra: Map<String, Value>) -> Result<Value> {
        if extra.contains_key(ENGINE) {
            return Err(EngineError::CannotSave(format!(
                "the program's state has the key {ENGINE:?}, which the engine uses itself: choose another key"
            )));
        }
        let settings = zero_burn::ranks::config::<A::Base>();
        let RandomState { seed, draws } = shards::random_state::<A::Base>();
        let random = RandomStates::gather(&*group::<A::Base>(Axes::DATA), [seed, draws])?;
        let fused = self.saved_optimizer()?;
        let times = parameters.iter().filter_map(|piece| {
            let (time, _) = fused.states(piece.meta.id)?;
            Some((piece.meta.path.clone(), time))
        });
        let state = EngineState {
            version: STATE_VERSION,
            steps: self.steps,
            skipped: self.skipped,
            stage: settings.stage.number(),
            param_dtype: format!("{:?}", settings.param_dtype).to_uppercase(),
            loss_scaler: self.config.loss_scale.clone(),
            optimizer: OptimizerState { name: fused.rule().name().into(), times: times.collect() },
            random,
        };
        extra.insert(ENGINE.into(), serde_json::to_value(state).expect("plain numbers and names"));
        Ok(Value::Object(extra))
    }

    /// Checks that the checkpoint is of this model and this optimizer.
    fn check(&self, checkpoint: &Checkpoint, state: Option<&EngineState>) -> Result<()> {
        let path = checkpoint.path();
        let mismatch = |what: String| Err(EngineError::Mismatch { path: path.to_path_buf(), what });
        let saved = checkpoint.tensors();
        let parameters = self.parameters();
        let mut missing = Vec::new();
        for meta in &parameters {
            let Some(tensor) = saved.get(&parameter_name(&meta.path)) else {
                if self.config.exclude_frozen_parameters && !meta.trained {
                    continue;
                }
                missing.push(meta.path.as_str());
                continue;
            };
            if tensor.shape != meta.shape {
                let (path, here, there) = (&meta.path, &meta.shape, &tensor.shape);
                return mismatch(format!(
                    "parameter {path:?} has shape {here:?} in this model and {there:?} in the checkpoint: configure \
                     the same model"
                ));
            }
            if !matches!(tensor.dtype, ElementType::F64 | ElementType::F32 | ElementType::F16 | ElementType::Bf16) {
                let (path, dtype) = (&meta.path, tensor.dtype);
                return mismatch(format!("parameter {path:?} has type {dtype} in the checkpoint: expected floats"));
            }
        }
        let unexpected: Vec<&str> = saved
            .keys()
            .filter_map(|name| name.strip_prefix("model."))
            .filter(|path| !parameters.iter().any(|meta| meta.path == *path))
            .collect();
        if !missing.is_empty() || !unexpected.is_empty() {
            let list = |names: &[&str]| match names {
                [] => "none".to_string(),
                few if few.len() <= 3 => few.join(", "),
                many => format!("{}, ... ({} in total)", many[..3].join(", "), many.len()),
            };
            return mismatch(format!(
                "parameters only in this model: {}; only in the checkpoint: {}: configure the same model",
                list(&missing),
                list(&unexpected)
            ));
        }
        let Some(state) = state else { return Ok(()) };
        let Some(fused) = self.optimizer.fused() else {
            return mismatch(format!(
                "{} cannot load saved state: use zero_burn::optim::Fused, or load only the parameters",
                std::any::type_name::<O>()
            ));
        };
        let (here, there) = (fused.rule().name(), &state.optimizer.name);
        if here != there {
            return mismatch(format!(
                "it was trained with optimizer {there}, but this run uses {here}: use {there}, or load only \
                 the parameters"
            ));
        }
        for meta in &parameters {
            if !state.optimizer.times.contains_key(&meta.path) {
                continue;
            }
            for (name, tensor) in states_of(checkpoint, &meta.path) {
                if tensor.dtype != ElementType::F32 || tensor.shape != meta.shape {
                    let (path, here, (dtype, there)) = (&meta.path, &meta.shape, (tensor.dtype, &tensor.shape));
                    return mismatch(format!(
                        "optimizer state {name} of {path:?} is {dtype} {there:?} in the checkpoint: expected F32 \
                         {here:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    fn load_tensors(&mut self, checkpoint: &Checkpoint, state: Option<&EngineState>) -> Result<()> {
        let model = self.model.take().expect("the module is absent only inside of step");
        let (model, loaded) = shards::load_shards::<A, M, CheckpointError>(model, |meta, range| {
            let name = parameter_name(&meta.path);
            // It was looked for: what is not there is frozen, and left out.
            let Some(tensor) = checkpoint.tensors().get(&name) else { return Ok(None) };
            Ok(Some((tensor.dtype, checkpoint.read(&name, range)?)))
        });
        self.model = Some(model);
        loaded?;
        if let Some(fused) = self.optimizer.fused_mut() {
            fused.clear_states();
        }
        let in_16_bit = zero_burn::ranks::config::<A::Base>().param_dtype != config::Float::F32;
        for meta in self.parameters() {
            let numel = meta.shape.iter().product();
            let range = shards::held_range::<A::Base>(numel);
            let read = |name: &str| -> Result<Vec<f32>, CheckpointError> {
                let mut values = vec![0f32; range.len()];
                checkpoint.read_into(name, range.clone(), bytemuck::cast_slice_mut(&mut values))?;
                if cfg!(target_endian = "big") {
                    values.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits().swap_bytes()));
                }
                Ok(values)
            };
            let mut states = Vec::new();
            let time = state.and_then(|state| state.optimizer.times.get(&meta.path).copied());
            if time.is_some() {
                for (name, _) in states_of(checkpoint, &meta.path) {
                    states.push((name.to_string(), read(&state_name(&meta.path, name))?));
                }
            }
            let parameter = parameter_name(&meta.path);
            if in_16_bit && meta.trained && checkpoint.tensor(&parameter)?.dtype == ElementType::F32 {
                states.push((MASTER.to_string(), read(&parameter)?));
            }
            if let Some(fused) = self.optimizer.fused_mut().filter(|_| !states.is_empty() || time.is_some()) {
                fused.load_states(meta.id, numel, time.unwrap_or(0), states);
            }
        }
        Ok(())
    }
}

/// Returns the optimizer states of a parameter in a checkpoint, by name.
fn states_of<'c>(checkpoint: &'c Checkpoint, path: &str) -> Vec<(&'c str, &'c TensorEntry)> {
    let prefix = state_name(path, "");
    let named = checkpoint.tensors().range(prefix.clone()..);
    let states = named.map_while(|(name, tensor)| Some((name.strip_prefix(&prefix)?, tensor)));
    // Another parameter's path may go on from this one's; a state's name has no dot.
    states.filter(|(name, _)| !name.contains('.')).collect()
}
