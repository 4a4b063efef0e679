//! Checkpoints in the format of `zero_train`: a run on Burn 0.21 can resume here, and the other way round.
//!
//! * Tensors: `model.<path>`, and `optimizer.<path>.exp_avg` and `.exp_avg_sq` of AdamW, Adam and LAMB, in fp32. Each rank writes its
//!   elements by [`Partition`](zero_core::Partition), at any stage. Any number of ranks reads them back, at any stage.
//! * State, under the key `engine`: number of updates, in total and per parameter, and each rank's dropout state. A run that resumes on a
//!   different number of ranks draws different dropout masks.
//! * Memory: a save copies this rank's state, and a load holds the new state beside the old.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use burn::module::Module;
use burn::tensor::Shape;
use half::{bf16, f16};
use serde_json::{Map, Value};
use zero_core::Buffer;
use zero_core::checkpoint::training::{
    ENGINE, EngineState, OptimizerState, RandomStates, STATE_VERSION, parameter_name, state_name,
};
use zero_core::checkpoint::{Checkpoint, ElementType, Piece, SaveOptions, Saved, save};
use zero_engine::backend::{Backend, DType, HostData};
use zero_engine::random::RandomState;
use zero_engine::update::plan::{EMA, MASTER};
use zero_engine::values::{flat_tensor, of_type};
use zero_kernels::Rule;

use crate::buffers::{self, LayerState};
use crate::engine::{Burn, ParamState, Place, caught};
use crate::error::Error;
use crate::optim::Optimizer;
use crate::parameter::Parameter;
use crate::tensors::{Floats, floats};
use crate::update::{Updates, state_cell};
use crate::zero::Zero;

/// A model, its optimizer and the counters loaded from a checkpoint.
pub struct Resumed<M> {
    /// The module.
    pub model: M,
    /// Its optimizer.
    pub optimizer: Optimizer,
    /// Number of updates made before the checkpoint.
    pub steps: usize,
    /// Number of steps that were skipped because their gradients were not finite.
    pub skipped: usize,
    /// The trainer's loss scale with its history.
    #[cfg_attr(not(feature = "trainer"), allow(dead_code))]
    pub(crate) loss_scaler: Option<Value>,
    /// The program's own values, saved with the model.
    pub extra: Map<String, Value>,
}

impl Zero {
    /// Saves model and optimizer after `steps` updates as the checkpoint of that step in `dir`, together with `extra`, and returns when it
    /// is durable. A collective; gathers nothing.
    ///
    /// # Errors
    ///
    /// [`Error::State`] for an optimizer that the engine does not run, or one with AMSGrad or cautious weight decay; [`Error::Checkpoint`].
    /// The engine runs AdamW, Adam and LAMB, and the optimizers of the trainer.
    pub fn save<M: Module>(
        &self,
        model: &M,
        optimizer: &Optimizer,
        dir: &Path,
        steps: usize,
        extra: Map<String, Value>,
        options: &SaveOptions,
    ) -> Result<Saved, Error> {
        let (pieces, state) = self.pieces((model, optimizer), ([steps, 0], None), extra, false)?;
        Ok(save(&*self.runtime().owners(), dir, steps as u64, &pieces, &state, options)?)
    }

    /// Returns the tensors that this rank writes to a checkpoint after this many updates and skipped steps, at this loss scale, and the state
    /// saved with them.
    /// With `only_trained`, frozen parameters are left out. A collective.
    pub(crate) fn pieces<M: Module>(
        &self,
        (model, optimizer): (&M, &Optimizer),
        ([steps, skipped], loss_scaler): ([usize; 2], Option<Value>),
        mut extra: Map<String, Value>,
        only_trained: bool,
    ) -> Result<(Vec<Piece<'static>>, Value), Error> {
        let (updates, rule) = saved(optimizer)?;
        let (mut pieces, mut times) = (Vec::new(), BTreeMap::new());
        self.visit(model, |parameter, base| {
            if only_trained && parameter.is_frozen() || parameter.quantized.is_some() {
                return;
            }
            let state = updates.state(parameter.index);
            let mut add = |name: String, bytes: Vec<u8>| {
                pieces.push(Piece::new(name, ElementType::F32, parameter.shape.to_vec(), bytes));
            };
            let cell = parameter.cell();
            let master = state.cells.iter().find(|(name, _)| name == MASTER).map_or(&cell, |(_, master)| master);
            add(
                parameter_name(&parameter.path),
                match parameter.holds_shard() {
                    // The base is the master.
                    true => {
                        let own = cell.own();
                        Burn::read(floats(base)).bytes()[own.start * size_of::<f32>()..own.end * size_of::<f32>()]
                            .to_vec()
                    }
                    false => master.own_bytes(DType::F32),
                },
            );
            if state.time > 0 {
                times.insert(parameter.path.clone(), state.time);
                for (name, cell) in state.cells.iter().filter(|(name, _)| name != MASTER) {
                    add(state_name(&parameter.path, name), cell.own_bytes(DType::F32));
                }
            }
        });
        let layer_state = buffers::read(model, &self.layer_state);
        for LayerState { id, path, shape } in self.layer_state.iter() {
            let values = caught(|| self.runtime().broadcast(Buffer::F32(layer_state[id].clone()), 0))?.into_f32();
            let (owners, place) = self.runtime().rank.owners(values.len());
            let bytes: Vec<u8> = values[owners.range(place)].iter().flat_map(|value| value.to_le_bytes()).collect();
            pieces.push(Piece::new(parameter_name(path), ElementType::F32, shape.to_vec(), bytes));
        }
        let config = &self.runtime().rank.config;
        let RandomState { seed, draws } = self.runtime().draws.state();
        let state = EngineState::<Value> {
            version: STATE_VERSION,
            steps,
            skipped,
            stage: config.stage.number(),
            param_dtype: format!("{:?}", config.param_dtype).to_uppercase(),
            loss_scaler,
            optimizer: OptimizerState { name: rule.name().into(), times },
            random: RandomStates::gather(&*self.runtime().collective(), [seed, draws])?,
        };
        extra.insert(ENGINE.into(), serde_json::to_value(state).expect("plain numbers and names"));
        Ok((pieces, Value::Object(extra)))
    }

    /// Loads a checkpoint of [`Zero::save`] or of an engine of `zero_train`, written by any number of ranks at any stage. A collective.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] when the checkpoint is of another model or optimizer; [`Error::Checkpoint`] for one that cannot be read.
    pub fn load<M: Module>(
        &self,
        model: M,
        optimizer: Optimizer,
        checkpoint: &Checkpoint,
    ) -> Result<Resumed<M>, Error> {
        let mismatch = |what: String| Error::Mismatch { path: checkpoint.path().to_path_buf(), what };
        let Value::Object(mut extra) = checkpoint.state()? else {
            return Err(mismatch("its state is not a JSON object".into()));
        };
        let engine = EngineState::<Value>::take(&mut extra).map_err(mismatch)?;
        let (updates, rule) = saved(&optimizer)?.clone();
        let name = rule.name();
        if engine.optimizer.name != name {
            let what = format!("it was trained with optimizer {}, but this run uses {name}", engine.optimizer.name);
            return Err(mismatch(what));
        }
        for tensor in checkpoint.tensors().keys().filter_map(|tensor| tensor.strip_prefix("model.")) {
            let mut layer_state = self.layer_state.iter().map(|state| &*state.path);
            if !self.paths().any(|path| path == tensor) && !layer_state.any(|path| path == tensor) {
                return Err(mismatch(format!(
                    "its parameter '{tensor}' is not in this model: configure the same model"
                )));
            }
        }
        let (mut values, mut states) = (Vec::new(), Vec::new());
        for parameter in self.parameters.iter() {
            let mut state = ParamState::default();
            let name = parameter_name(&parameter.path);
            // A checkpoint of an adapter has no frozen parameters.
            let is_left_out =
                parameter.is_frozen() && (parameter.quantized.is_some() || checkpoint.tensor(&name).is_err());
            if parameter.slot.partition.is_empty() || is_left_out {
                states.push(state);
                continue;
            }
            let saved = self.read(checkpoint, parameter, &name)?;
            if let Some(&time) = engine.optimizer.times.get(&parameter.path) {
                state.time = time;
                let rank = &self.runtime().rank;
                let average = rank.config.ema_decay.map(|_| EMA);
                let average = average.filter(|name| checkpoint.tensor(&state_name(&parameter.path, name)).is_ok());
                let (rule, _) = rule.of(&parameter.path, parameter.shape.as_slice());
                for &name in rule.state_names().iter().chain(&average) {
                    let values = self.read(checkpoint, parameter, &state_name(&parameter.path, name))?;
                    let of_rule = || rank.loaded_state_dtype(parameter.shape.num_elements());
                    let dtype = if name == EMA { DType::F32 } else { of_rule() };
                    state.cells.push((name.into(), state_cell(parameter, name, of_type::<Burn>(values, dtype))));
                }
            }
            if !self.shared.holds_shards() && parameter.slot.dtype != DType::F32 {
                state.cells.push((MASTER.into(), state_cell(parameter, MASTER, saved.clone())));
            }
            states.push(state);
            values.push((parameter, saved));
        }
        let mut layer_state = HashMap::new();
        for LayerState { id, path, shape } in self.layer_state.iter() {
            let values = self.read_range(checkpoint, &parameter_name(path), shape, 0..shape.num_elements())?;
            layer_state.insert(*id, values);
        }
        let model = buffers::write(model, layer_state);
        let model = caught(|| {
            self.fence("parameters are loaded");
            values.into_iter().for_each(|(parameter, values)| drop(parameter.replace(values)));
            self.rebase(model)
        })?;
        updates.set_states(states);
        let rank = &self.runtime().rank;
        let [seed, draws] = engine.random.of(rank.index, rank.world);
        self.runtime().draws.set_state(RandomState { seed, draws });
        let EngineState { steps, skipped, loss_scaler, .. } = engine;
        Ok(Resumed { model, optimizer, steps, skipped, loss_scaler, extra })
    }

    /// Reads this rank's elements of the tensor saved under `name`, flat; one filler element if there are none.
    fn read(&self, checkpoint: &Checkpoint, parameter: &Parameter, name: &str) -> Result<Floats, Error> {
        let partition = parameter.slot.partition;
        let range = partition.range(self.runtime().rank.place(partition));
        let mut values = self.read_range(checkpoint, name, &parameter.shape, range)?;
        values.resize(values.len().max(1), 0.0);
        Ok(flat_tensor::<Burn>(Buffer::F32(values), &Place::Host))
    }

    /// Reads these elements of the tensor saved under `name`.
    fn read_range(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        shape: &Shape,
        range: Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let (tensor, expected) = (checkpoint.tensor(name)?, shape.to_vec());
        // On Burn 0.21 a parameter without a master, which the first update makes, is saved in the type that the model computes in.
        let is_known = matches!(tensor.dtype, ElementType::F32 | ElementType::F16 | ElementType::Bf16);
        if !is_known || tensor.shape != expected {
            let what = format!("'{name}' is {} {:?} there, and F32 {expected:?} here", tensor.dtype, tensor.shape);
            return Err(Error::Mismatch { path: checkpoint.path().to_path_buf(), what });
        }
        let bytes = checkpoint.read(name, range)?;
        let of_two = |number: fn([u8; 2]) -> f32| bytes.as_chunks::<2>().0.iter().map(|two| number(*two)).collect();
        Ok(match tensor.dtype {
            ElementType::F16 => of_two(|two| f16::from_le_bytes(two).to_f32()),
            ElementType::Bf16 => of_two(|two| bf16::from_le_bytes(two).to_f32()),
            _ => bytes.as_chunks::<4>().0.iter().map(|float| f32::from_le_bytes(*float)).collect(),
        })
    }
}

/// Returns the updates whose state a checkpoint stores, and their rule.
fn saved(optimizer: &Optimizer) -> Result<&(Updates, Rule), Error> {
    optimizer.engine.as_ref().ok_or_else(|| {
        Error::State(
            "checkpoints cannot store the state of this optimizer: use AdamW, Adam or LAMB (without AMSGrad and cautious weight decay), or \
             save the record of `Optimizer::inner`"
                .into(),
        )
    })
}
