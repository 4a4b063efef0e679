//! Checkpoints in the format of `zero_train`: a run on Burn 0.21 can resume here, and the other way round.
//!
//! * Tensors: `model.<path>`, and `optimizer.<path>.exp_avg` and `.exp_avg_sq` of AdamW, Adam and LAMB, in fp32. Each rank writes its
//!   elements by [`Partition`](zero_core::Partition), at any stage. Any number of ranks reads them back, at any stage.
//! * State, under the key `engine`: number of updates, in total and per parameter, and each rank's dropout state. A run that resumes on a
//!   different number of ranks draws different dropout masks.
//! * Memory: Burn returns an optimizer's state as one record, so a save or load holds this rank's state once or twice more.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bytes, DType, Shape, Tensor, TensorData};
use burn_optim::OptimizerRecord;
use burn_pack::{Reader, Scalar, Writer};
use serde_json::{Map, Value, json};
use zero_core::Buffer;
use zero_core::checkpoint::{Checkpoint, ElementType, Piece, SaveOptions, Saved, save};

use crate::error::Error;
use crate::optim::Optimizer;
use crate::random::State;
use crate::slot::Slot;
use crate::zero::Zero;

/// Version of the engine's state that is written, and the newest version that can be read.
const STATE_VERSION: u64 = 1;

/// Key of the engine's state within a checkpoint's state.
const ENGINE: &str = "engine";

/// Burn's names of a parameter's moments, and their names in a checkpoint.
const MOMENTS: [(&str, &str); 2] = [("moment_1", "exp_avg"), ("moment_2", "exp_avg_sq")];
const TIME: &str = "time";
/// Prefix of both moments in Burn's records. LAMB's records have none.
const PLACE: &str = "momentum.";
const RANK: &str = "__rank";

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

/// An optimizer's state for one parameter.
struct Moments {
    time: usize,
    /// In the order of [`MOMENTS`].
    values: [Bytes; 2],
}

impl Zero {
    /// Saves model and optimizer after `steps` updates as the checkpoint of that step in `dir`, together with `extra`, and returns when it
    /// is durable. A collective; gathers nothing.
    ///
    /// # Errors
    ///
    /// [`Error::State`] for an optimizer other than AdamW, Adam and LAMB, or one with AMSGrad; [`Error::Checkpoint`].
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
        Ok(save(&*self.shared.comm, dir, steps as u64, &pieces, &state, options)?)
    }

    /// Returns the tensors that this rank writes to a checkpoint after this many updates and skipped steps, and the state saved with them.
    /// A collective.
    pub(crate) fn pieces<M: Module>(
        &self,
        (model, optimizer): (&M, &Optimizer),
        [steps, skipped]: [usize; 2],
        mut extra: Map<String, Value>,
    ) -> Result<(Vec<Piece<'static>>, Value), Error> {
        let name = saved_name(optimizer)?;
        let mut moments = moments(optimizer)?;
        let mut held = Held { zero: self, values: Vec::new() };
        model.visit(&mut held);
        let (mut pieces, mut times) = (Vec::new(), BTreeMap::new());
        for (slot, id, data) in &held.values {
            let mut add = |name: String, bytes: &[u8]| {
                pieces.push(Piece::new(name, ElementType::F32, slot.whole.to_vec(), Self::own_bytes(slot, bytes)));
            };
            add(parameter_name(&slot.path), data.as_bytes());
            if let Some(Moments { time, values }) = moments.remove(&id.val()) {
                times.insert(&slot.path, time);
                for ((_, name), bytes) in MOMENTS.iter().zip(&values) {
                    add(state_name(&slot.path, name), bytes);
                }
            }
        }
        let (config, random) = (&self.shared.config, self.random()?);
        let state = json!({
            "version": STATE_VERSION,
            "steps": steps,
            "skipped": skipped,
            "stage": config.stage.number(),
            "param_dtype": format!("{:?}", config.param_dtype).to_uppercase(),
            "loss_scaler": null,
            "optimizer": { "name": name, "times": times },
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
        let name = saved_name(&optimizer)?;
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
        let mut values = HashMap::new();
        let (mut tensors, mut scalars, mut paths) = (Vec::new(), Vec::new(), Vec::new());
        for (&id, slot) in self.ids.iter().map(|(id, &index)| (id, &self.slots[index])) {
            values.insert(id, self.read(checkpoint, slot, &parameter_name(&slot.path))?);
            let Some(time) = engine["optimizer"]["times"][&slot.path].as_u64() else { continue };
            let place = if name == "lamb" { "" } else { PLACE };
            let key = |leaf: &str| format!("{}.{place}{leaf}", id.val());
            for (leaf, name) in MOMENTS {
                let bytes = Bytes::from_elems(self.read(checkpoint, slot, &state_name(&slot.path, name))?);
                tensors.push(burn_pack::Tensor::new(key(leaf), DType::F32, slot.base.clone(), Some(id.val()), bytes));
            }
            scalars.push((key(TIME), Scalar::from(time as usize)));
            scalars.push((format!("{}.{RANK}", id.val()), Scalar::from(slot.base.num_dims())));
            paths.push((id.val().to_string(), slot.path.clone()));
        }
        let mut record = Writer::new(tensors);
        for (key, value) in scalars {
            record = record.with_scalar(&key, value);
        }
        for (key, path) in paths {
            record = record.with_metadata(&key, &path);
        }
        let bytes = record.into_bytes().map_err(|error| Error::State(error.to_string()))?;
        let record = OptimizerRecord::from_bytes(bytes).map_err(|error| Error::State(error.to_string()))?;
        let model = self.publish_changes(model.map(&mut Load { zero: self, values }))?;
        self.set_random(&engine["random"]);
        let [steps, skipped] = ["steps", "skipped"].map(|name| engine[name].as_u64().unwrap_or(0) as usize);
        Ok(Resumed { model, optimizer: optimizer.with_record(record), steps, skipped, extra })
    }

    /// Gathers the random states of all ranks. A collective.
    fn random(&self) -> Result<Value, Error> {
        let State { seed, draws } = self.shared.draws.state();
        let own = [seed, draws].iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.shared.comm.all_gather(Buffer::U8(own))?.into_u8();
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
        let (rank, same_world) = (self.shared.rank(), draws.len() == self.shared.world());
        let own = |of: &[u64]| of.get(rank).copied().filter(|_| same_world);
        let State { seed, draws: none } = self.shared.draws.state();
        self.shared.draws.set_state(State {
            seed: own(&seeds).or(saved["seed"].as_u64()).unwrap_or(seed),
            draws: own(&draws).or(draws.iter().copied().max()).unwrap_or(none),
        });
    }

    /// Returns the bytes of a parameter that this rank writes, out of `bytes`, the elements that it updates.
    fn own_bytes(slot: &Slot, bytes: &[u8]) -> Vec<u8> {
        let own = slot.counted();
        bytes[own.start * size_of::<f32>()..own.end * size_of::<f32>()].to_vec()
    }

    /// Reads the elements that this rank updates of the tensor saved under `name`.
    fn read(&self, checkpoint: &Checkpoint, slot: &Slot, name: &str) -> Result<Vec<f32>, Error> {
        let (tensor, expected) = (checkpoint.tensor(name)?, slot.whole.to_vec());
        if (tensor.dtype, &tensor.shape) != (ElementType::F32, &expected) {
            let what = format!("'{name}' is {} {:?} there, and F32 {expected:?} here", tensor.dtype, tensor.shape);
            return Err(Error::Mismatch { path: checkpoint.path().to_path_buf(), what });
        }
        let bytes = checkpoint.read(name, slot.own())?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|float| f32::from_le_bytes(*float)).collect())
    }
}

fn saved_name(optimizer: &Optimizer) -> Result<&'static str, Error> {
    optimizer.saved_name.ok_or_else(|| {
        Error::State("checkpoints cannot store the state of this optimizer: use AdamW, Adam or LAMB, or save the record of `Optimizer::inner`".into())
    })
}

/// Returns an optimizer's state by parameter.
fn moments(optimizer: &Optimizer) -> Result<HashMap<u64, Moments>, Error> {
    let unknown =
        |what: String| Error::State(format!("{what}, which a checkpoint cannot store: use AdamW without AMSGrad"));
    let packed = |error: burn_pack::Error| Error::State(error.to_string());
    let record = optimizer.inner().into_bytes().map_err(|error| Error::State(error.to_string()))?;
    let reader = Reader::from_bytes(record).map_err(packed)?;
    let scalars = reader.scalars().clone();
    let mut found: HashMap<u64, [Option<Bytes>; 2]> = HashMap::new();
    for tensor in reader.into_tensors().map_err(packed)? {
        let (name, _, _, id, bytes) = tensor.into_parts().map_err(packed)?;
        let place = id.and_then(|id| {
            let leaf = name.strip_prefix(&format!("{id}."))?;
            let leaf = leaf.strip_prefix(PLACE).unwrap_or(leaf);
            Some((id, MOMENTS.iter().position(|(burns, _)| *burns == leaf)?))
        });
        let (id, place) = place.ok_or_else(|| unknown(format!("the optimizer has the state '{name}'")))?;
        found.entry(id).or_default()[place] = Some(bytes);
    }
    let mut all = HashMap::new();
    for (id, values) in found {
        let time = [PLACE, ""].iter().find_map(|place| scalars.get(&format!("{id}.{place}{TIME}")));
        let time = time.and_then(|&time| usize::try_from(time).ok());
        let ([Some(first), Some(second)], Some(time)) = (values, time) else {
            return Err(unknown(format!(
                "the optimizer's state of parameter {id} is not two moments and a step count"
            )));
        };
        all.insert(id, Moments { time, values: [first, second] });
    }
    Ok(all)
}

/// A visitor that collects this rank's values of each parameter.
struct Held<'a> {
    zero: &'a Zero,
    values: Vec<(&'a Slot, ParamId, TensorData)>,
}

impl ModuleVisitor for Held<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(&index) = self.zero.ids.get(&param.id) {
            self.values.push((&self.zero.slots[index], param.id, param.base().into_data()));
        }
    }
}

struct Load<'a> {
    zero: &'a Zero,
    values: HashMap<ParamId, Vec<f32>>,
}

impl ModuleMapper for Load<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.values.remove(&param.id) else { return param };
        let shape: Shape = self.zero.slots[self.zero.ids[&param.id]].base.clone();
        let (id, tensor, mapper) = param.consume();
        let loaded = Tensor::from_data(TensorData::new(values, shape), &tensor.device());
        Param::from_mapped_value(id, loaded.set_require_grad(tensor.is_require_grad()), mapper)
    }
}
