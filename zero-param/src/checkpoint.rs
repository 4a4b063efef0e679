//! Checkpoints in the format of `zero_train`: a run on Burn 0.21 can resume here, and the other way round.
//!
//! * Tensors: `model.<path>`, and `optimizer.<path>.exp_avg` and `.exp_avg_sq` of AdamW, Adam and LAMB, in fp32. Each rank writes its
//!   elements by [`Partition`](zero_core::Partition), at any stage. Any number of ranks reads them back, at any stage.
//! * State, under the key `engine`: number of updates, in total and per parameter, and each rank's dropout state. A run that resumes on a
//!   different number of ranks draws different dropout masks.
//! * Memory: a save copies this rank's state, and a load holds the new state beside the old.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use serde_json::{Map, Value, json};
use zero_core::Buffer;
use zero_core::checkpoint::{Checkpoint, ElementType, Piece, SaveOptions, Saved, save};
use zero_engine::backend::{Backend, DType, HostData};
use zero_engine::random::RandomState;
use zero_engine::update::plan::{EMA, MASTER};
use zero_engine::values::{flat_tensor, of_type};
use zero_kernels::Rule;

use crate::device::{held, hold_as};
use crate::engine::{Cell, Data, Host, ParamState, caught};
use crate::error::Error;
use crate::optim::Optimizer;
use crate::parameter::Parameter;
use crate::tensors::Raw;
use crate::update::{Updates, state_cell};
use crate::zero::Zero;

/// Version of the engine's state that is written, and the newest version that can be read.
const STATE_VERSION: u64 = 1;

/// Key of the engine's state within a checkpoint's state.
const ENGINE: &str = "engine";

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
    /// The program's own values, saved with the model.
    pub extra: Map<String, Value>,
}

fn parameter_name(path: &str) -> String {
    format!("model.{path}")
}

fn state_name(path: &str, name: &str) -> String {
    format!("optimizer.{path}.{name}")
}

impl Zero {
    /// Saves model and optimizer after `steps` updates as the checkpoint of that step in `dir`, together with `extra`, and returns when it
    /// is durable. A collective; gathers nothing.
    ///
    /// # Errors
    ///
    /// [`Error::State`] for an optimizer other than AdamW, Adam and LAMB, or one with AMSGrad or cautious weight decay; [`Error::Checkpoint`].
    pub fn save<M: Module>(
        &self,
        model: &M,
        optimizer: &Optimizer,
        dir: &Path,
        steps: usize,
        extra: Map<String, Value>,
        options: &SaveOptions,
    ) -> Result<Saved, Error> {
        let (pieces, state) = self.pieces((model, optimizer), [steps, 0], extra)?;
        Ok(save(&*self.runtime().owners(), dir, steps as u64, &pieces, &state, options)?)
    }

    /// Returns the tensors that this rank writes to a checkpoint after this many updates and skipped steps, and the state saved with them.
    /// A collective.
    pub(crate) fn pieces<M: Module>(
        &self,
        (model, optimizer): (&M, &Optimizer),
        [steps, skipped]: [usize; 2],
        mut extra: Map<String, Value>,
    ) -> Result<(Vec<Piece<'static>>, Value), Error> {
        let (updates, rule) = saved(optimizer)?;
        let mut held = Held { zero: self, values: Vec::new() };
        model.visit(&mut held);
        let (mut pieces, mut times) = (Vec::new(), BTreeMap::new());
        for (parameter, base) in held.values {
            let state = updates.state(parameter.index);
            let shape: Vec<usize> = parameter.shape.to_vec();
            let mut add = |name: String, bytes: Vec<u8>| {
                pieces.push(Piece::new(name, ElementType::F32, shape.clone(), bytes));
            };
            let cell = parameter.cell();
            let master = state.cells.iter().find(|(name, _)| name == MASTER).map_or(&cell, |(_, master)| master);
            add(
                parameter_name(&parameter.path),
                match self.shared.holds_shards() {
                    true => own_bytes(&cell, Host::read(base)),
                    false => own_bytes(master, master.data()),
                },
            );
            if state.time > 0 {
                times.insert(&parameter.path, state.time);
                for (name, cell) in state.cells.iter().filter(|(name, _)| name != MASTER) {
                    add(state_name(&parameter.path, name), own_bytes(cell, cell.data()));
                }
            }
        }
        let (config, random) = (&self.runtime().rank.config, self.random()?);
        let state = json!({
            "version": STATE_VERSION,
            "steps": steps,
            "skipped": skipped,
            "stage": config.stage.number(),
            "param_dtype": format!("{:?}", config.param_dtype).to_uppercase(),
            "loss_scaler": null,
            "optimizer": { "name": rule.name(), "times": times },
            "random": random,
        });
        extra.insert(ENGINE.into(), state);
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
        let engine = extra.remove(ENGINE).ok_or_else(|| mismatch("it has no engine state".into()))?;
        if engine["version"].as_u64().is_none_or(|version| version > STATE_VERSION) {
            let what = format!(
                "its state has version {}, but the newest supported version is {STATE_VERSION}",
                engine["version"]
            );
            return Err(mismatch(what));
        }
        let (updates, rule) = saved(&optimizer)?.clone();
        let name = rule.name();
        if engine["optimizer"]["name"] != *name {
            return Err(mismatch(format!(
                "it was trained with optimizer {}, but this run uses '{name}'",
                engine["optimizer"]["name"]
            )));
        }
        for tensor in checkpoint.tensors().keys().filter_map(|tensor| tensor.strip_prefix("model.")) {
            if !self.paths().any(|path| path == tensor) {
                return Err(mismatch(format!(
                    "its parameter '{tensor}' is not in this model: configure the same model"
                )));
            }
        }
        let (mut values, mut states) = (HashMap::new(), Vec::new());
        let ids: HashMap<usize, ParamId> = self.ids.iter().map(|(&id, &index)| (index, id)).collect();
        for parameter in self.parameters.iter() {
            let mut state = ParamState::default();
            if parameter.slot.partition.is_empty() {
                states.push(state);
                continue;
            }
            let saved = self.read(checkpoint, parameter, &parameter_name(&parameter.path))?;
            if let Some(time) = engine["optimizer"]["times"][&parameter.path].as_u64() {
                state.time = time as usize;
                let rank = &self.runtime().rank;
                let average = rank.config.ema_decay.map(|_| EMA);
                let average = average.filter(|name| checkpoint.tensor(&state_name(&parameter.path, name)).is_ok());
                for &name in rule.state_names().iter().chain(&average) {
                    let values = self.read(checkpoint, parameter, &state_name(&parameter.path, name))?;
                    let dtype = if name == EMA { DType::F32 } else { rank.state_dtype() };
                    state.cells.push((name.into(), state_cell(parameter, name, of_type::<Host>(values, dtype))));
                }
            }
            if !self.shared.holds_shards() && parameter.slot.dtype != DType::F32 {
                state.cells.push((MASTER.into(), state_cell(parameter, MASTER, saved.clone())));
            }
            states.push(state);
            values.insert(ids[&parameter.index], saved);
        }
        let model = caught(|| {
            self.fence("parameters are loaded");
            self.rebase(model.map(&mut Load { zero: self, values }))
        })?;
        updates.set_states(states);
        self.set_random(&engine["random"]);
        let [steps, skipped] = ["steps", "skipped"].map(|name| engine[name].as_u64().unwrap_or(0) as usize);
        Ok(Resumed { model, optimizer, steps, skipped, extra })
    }

    /// Gathers the random states of all ranks. A collective.
    fn random(&self) -> Result<Value, Error> {
        let RandomState { seed, draws } = self.runtime().draws.state();
        let own = [seed, draws].iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.runtime().collective().all_gather(Buffer::U8(own))?.into_u8();
        let numbers = all.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number));
        let [seeds, draws] = [0, 1].map(|at| numbers.clone().skip(at).step_by(2).collect::<Vec<_>>());
        let mut random = json!({ "seed": seeds[0], "draws": draws });
        // The format of zero-burn, whose ranks may each have their own seed.
        if seeds.iter().any(|seed| *seed != seeds[0]) {
            random["seeds"] = json!(seeds);
        }
        Ok(random)
    }

    /// Restores this rank's random state if the world size is the saved one. If not, continues from a draw number that no rank has used.
    fn set_random(&self, saved: &Value) {
        let numbers = |key: &str| saved[key].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
        let [draws, seeds]: [Vec<u64>; 2] = ["draws", "seeds"].map(numbers);
        let rank = &self.runtime().rank;
        let (rank, same_world) = (rank.index, draws.len() == rank.world);
        let own = |of: &[u64]| of.get(rank).copied().filter(|_| same_world);
        let RandomState { seed, draws: none } = self.runtime().draws.state();
        self.runtime().draws.set_state(RandomState {
            seed: own(&seeds).or(saved["seed"].as_u64()).unwrap_or(seed),
            draws: own(&draws).or(draws.iter().copied().max()).unwrap_or(none),
        });
    }

    /// Reads this rank's elements of the tensor saved under `name`, flat; one filler element if there are none.
    fn read(&self, checkpoint: &Checkpoint, parameter: &Parameter, name: &str) -> Result<Raw, Error> {
        let (tensor, expected) = (checkpoint.tensor(name)?, parameter.shape.to_vec());
        if (tensor.dtype, &tensor.shape) != (ElementType::F32, &expected) {
            let what = format!("'{name}' is {} {:?} there, and F32 {expected:?} here", tensor.dtype, tensor.shape);
            return Err(Error::Mismatch { path: checkpoint.path().to_path_buf(), what });
        }
        let partition = parameter.slot.partition;
        let bytes = checkpoint.read(name, partition.range(self.runtime().rank.place(partition)))?;
        let mut values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|float| f32::from_le_bytes(*float)).collect();
        values.resize(values.len().max(1), 0.0);
        Ok(flat_tensor::<Host>(Buffer::F32(values), &()))
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

/// Returns the bytes in fp32 of the elements that this rank writes, out of its shard's `data`.
fn own_bytes(cell: &Cell, data: Data) -> Vec<u8> {
    let own = cell.own();
    data.cast(DType::F32).bytes()[own.start * size_of::<f32>()..own.end * size_of::<f32>()].to_vec()
}

/// A visitor that collects what the module holds of each parameter.
struct Held<'a> {
    zero: &'a Zero,
    values: Vec<(&'a Arc<Parameter>, Raw)>,
}

impl ModuleVisitor for Held<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(parameter) = self.zero.parameter(param.id) {
            self.values.push((parameter, held(param.base())));
        }
    }
}

struct Load<'a> {
    zero: &'a Zero,
    values: HashMap<ParamId, Raw>,
}

impl ModuleMapper for Load<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.values.remove(&param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let base = self.zero.parameters[self.zero.ids[&id]].replace(values);
        let base = hold_as(base, tensor.gradient_checkpointing_strategy(), tensor.is_require_grad());
        Param::from_mapped_value(id, base, mapper)
    }
}
