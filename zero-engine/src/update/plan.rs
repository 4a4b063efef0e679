//! The plan of an update: the arrays of a parameter, its gradient and its state, and the cells of the results.

use std::sync::Arc;

use half::bf16;
use zero_core::{Buffer, Partition};
use zero_kernels::Rule;
use zero_kernels::update::{Kernel, Layout, Norms};

use super::{Array, Averaged, Job};
use crate::abort::{or_stop, stop};
use crate::backend::{Backend, DType, HostData};
use crate::cell::rank::Rank;
use crate::cell::slot::Slot;
use crate::cell::{Cell, Kind, Origin, Template};
use crate::tier::{Home, Stored, SwapDisk, filled};
use crate::values::{narrow_or_f32, of_type};

/// Name of the fp32 master of a 16-bit parameter.
pub const MASTER: &str = "fp32_param";

/// Name of the moving average of a parameter ([`ema_decay`](zero_core::config::ZeroConfig::ema_decay)).
pub const EMA: &str = "ema";

/// Elementwise operations on a shard: of this tensor, by this partition, of the rank at this place in it.
pub type Edits<B> = Box<dyn Fn(<B as Backend>::Tensor, Partition, usize) -> <B as Backend>::Tensor>;

/// A sharded tensor as an operand of an update.
pub struct Operand<B: Backend> {
    /// The tensor.
    pub cell: Arc<Cell<B>>,
    /// Elementwise operations that were recorded on it and have not been applied yet.
    pub edits: Option<Edits<B>>,
}

impl<B: Backend> Operand<B> {
    /// Returns this rank's shard by value, with the recorded operations applied.
    fn into_local(self) -> B::Tensor {
        let Self { cell, edits } = self;
        let (partition, place) = (cell.partition, cell.place());
        let local = cell.into_local();
        match edits {
            Some(edit) => edit(local, partition, place),
            None => local,
        }
    }
}

/// The optimizer state of a parameter: this rank's shards.
#[derive(Clone, Default)]
pub struct ParamState<B: Backend> {
    /// Number of updates so far.
    pub time: usize,
    /// In the order of the rule's names, then the average and the master, if there are any.
    pub cells: Vec<(String, Arc<Cell<B>>)>,
}

/// The place where an update runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Where {
    /// On the CPU, immediately.
    Here,
    /// On the CPU, concurrently with what follows the step.
    Overlapped,
    /// On the device that holds the arrays.
    Device,
}

/// The planned update of a parameter.
pub struct Update<B: Backend> {
    /// The rule.
    pub rule: Rule,
    /// The learning rate.
    pub lr: f64,
    /// Factor by which the gradient is multiplied first.
    pub scale: f32,
    /// The parameter.
    pub parameter: Operand<B>,
    /// Its reduced gradient.
    pub gradient: Operand<B>,
}

impl<B: Backend> Update<B> {
    /// Plans the job that computes the parameter's next version and its states, which are pending from now on. It updates memory in place
    /// if nothing else holds it.
    pub(super) fn plan(mut self, number: usize, state: &mut ParamState<B>) -> (Where, Job<B>) {
        let (parent, dtype) = (self.gradient.cell.clone(), self.parameter.cell.dtype);
        let updated = self.parameter.cell.template(Kind::Optimizer, Origin::Version);
        let rank = updated.rank.clone();
        let names = self.rule.state_names();
        let half = matches!(dtype, DType::F16 | DType::Bf16);
        let decay = rank.config.ema_decay;
        // Always in this order: the cells' names depend on it.
        let kept: Vec<&str> = names.iter().copied().chain(decay.map(|_| EMA)).chain(half.then_some(MASTER)).collect();
        let template = |name: &&str| parent.template(Kind::Optimizer, Cell::derivation(name, &[&parent]));
        let templates: Vec<Template<B>> = kept.iter().map(template).collect();
        // One filler element if the rank has none.
        let elements = parent.partition.len(parent.place()).max(1);
        let (slot, first) = (parent.slot.clone(), parent.partition.range(parent.place()).start);
        let (partition, shape) = ((parent.partition, parent.place()), parent.shape.clone());
        drop(parent);
        self.edit_master(state);
        let place = self.place(state, elements);
        let state_dtype = rank.state_dtype(partition.0.numel());
        let blocks = rank.blocks(partition.0.numel());
        if state_dtype == DType::U8 && matches!(self.rule, Rule::Lamb { .. }) {
            stop("int8_optimizer_states: LAMB reads its moments twice, and 8 bits are too few for that; use AdamW or bf16_optimizer_states".into());
        }
        let complete = names.iter().all(|name| state.cells.iter().any(|(known, _)| known == name));
        // A rule may have changed: state that it does not know is dropped, and missing state begins anew.
        state.time = if complete { state.time + 1 } else { 1 };
        let kernel = Kernel::new(self.rule, self.lr, state.time);

        let mut there = There { cells: std::mem::take(&mut state.cells), place, elements, blocks, rank, slot };
        // Second states are means of squares.
        let take = |(index, name): (usize, &&str)| there.take_as(name, state_dtype, index == 0);
        let states: Vec<Option<Array<B>>> = names.iter().enumerate().map(take).collect();
        let states = match place {
            // All of them, or the kernel creates them.
            Where::Device if !complete => Vec::new(),
            _ => states.into_iter().map(|state| state.unwrap_or_else(|| there.fresh(state_dtype))).collect(),
        };
        let average = decay.map(|decay| match there.take(EMA, DType::F32) {
            Some(array) => Averaged { array, decay, fresh: false },
            // On a device, the parameter's tensor takes its place.
            None => Averaged { array: there.fresh(DType::F32), decay, fresh: true },
        });
        let is_master = half && place == Where::Here && self.parameter.cell.is_rounded_when_read();
        let (parameter, copy) = match (half, there.has(MASTER)) {
            (false, _) => (own(self.parameter, place, false), None),
            // The old version's shard may be its master, which is updated in place.
            (true, true) if is_master => {
                self.parameter.cell.consume();
                (there.take(MASTER, DType::F32).expect("it is there"), None)
            }
            (true, is_copy) => {
                let own = own(self.parameter, place, is_copy);
                let master = there.take(MASTER, DType::F32).unwrap_or_else(|| there.fresh_master(&own, dtype));
                (master, Some((own, dtype)).filter(|_| !is_master))
            }
        };
        let gradient = gradient(self.gradient, place);
        let copied = copy.as_ref().map(|(copy, _)| copy);
        let averaged = average.as_ref().map(|average| &average.array);
        let of_states = if state_dtype == DType::U8 { blocks.bytes(elements) } else { elements };
        let arrays = [&parameter, &gradient.0].into_iter().chain(copied).chain(averaged).map(|array| (array, elements));
        for (array, elements) in arrays.chain(states.iter().map(|state| (state, of_states))) {
            if let Some(other) = array.elements().filter(|&other| other != elements) {
                stop(mismatch(other, elements));
            }
        }
        let pending = |(name, template): (&str, _)| {
            let dtype = if [MASTER, EMA].contains(&name) { DType::F32 } else { state_dtype };
            (name.to_string(), Cell::pending(template, dtype))
        };
        state.cells = kept.into_iter().zip(templates).map(pending).collect();
        let version = Cell::pending(updated, dtype);
        let cells = state.cells.iter().map(|(_, cell)| cell.clone()).chain([version]).collect();
        let (gradient, norms) = (Some(gradient), Norms::default());
        let scale = self.scale;
        let job = Job {
            kernel,
            scale,
            elements,
            first,
            parameter,
            gradient,
            states,
            state_dtype,
            blocks,
            average,
            copy,
            is_master,
            cells,
            number,
            norms,
            partition,
            shape,
            direction: Vec::new(),
        };
        (place, job)
    }

    /// Brings the fp32 master up to date before the update.
    fn edit_master(&mut self, state: &mut ParamState<B>) {
        let own = self.gradient.cell.slot.as_ref().map(|slot| slot.index);
        // A parameter that was prepared again has values of its own: the master belongs to the old ones.
        let is_of_before = |master: &Cell<B>| {
            let slot = master.slot.as_ref().filter(|slot| slot.current.lock().strong_count() == 0);
            slot.zip(own).is_some_and(|(slot, own)| own != slot.index)
        };
        state.cells.retain(|(name, cell)| name != MASTER || !is_of_before(cell));
        if let Some(edits) = &self.parameter.edits
            && let Some((_, master)) = state.cells.iter_mut().find(|(name, _)| name == MASTER)
        {
            // The parameter was changed since its last update, so apply the change to its master.
            *master = edited(master.clone(), edits);
        }
    }

    /// Returns where the update runs. If only the parameter is in host memory, the backend updates it with its state.
    fn place(&self, state: &ParamState<B>, elements: usize) -> Where {
        let (cell, dtype) = (&self.parameter.cell, self.parameter.cell.dtype);
        let home = |kind, size| cell.rank.home(kind, elements * size, cell.slot.as_deref());
        let state_dtype = cell.rank.state_dtype(cell.partition.numel());
        let of_state = if dtype == DType::F32 { state_dtype.size() } else { 4 };
        let is_on_disk = |cell: &Arc<Cell<B>>| matches!(cell.kept_elsewhere(), Some(Stored::Disk(_)));
        let is_overlapped = !matches!(home(Kind::Optimizer, of_state), Home::Backend)
            || matches!(home(Kind::Parameter, dtype.size()), Home::Disk(_))
            || [cell, &self.gradient.cell].into_iter().any(is_on_disk)
            || state
                .cells
                .iter()
                .any(|(_, cell)| !B::is_host(&cell.device) && matches!(cell.kept_elsewhere(), Some(Stored::Host(_))));
        if is_overlapped {
            return Where::Overlapped;
        }
        let is_known = matches!(dtype, DType::F32 | DType::F16 | DType::Bf16);
        if is_known && B::updates(&cell.device, &self.rule, state_dtype) {
            return Where::Device;
        }
        Where::Here
    }
}

/// The state of a parameter before an update.
struct There<B: Backend> {
    cells: Vec<(String, Arc<Cell<B>>)>,
    place: Where,
    /// Number of elements of each array.
    elements: usize,
    blocks: Layout,
    rank: Arc<Rank<B>>,
    slot: Option<Arc<Slot<B>>>,
}

impl<B: Backend> There<B> {
    /// Returns whether a state exists already.
    fn has(&self, name: &str) -> bool {
        self.cells.iter().any(|(known, _)| known == name)
    }

    /// Returns the disk that keeps an array of this type, if one does.
    fn disk(&self, dtype: DType) -> Option<&Arc<SwapDisk>> {
        self.rank.disk_for(Kind::Optimizer, self.elements * dtype.size(), self.slot.as_deref())
    }

    /// Takes a tensor in fp32 that may exist already.
    fn take(&mut self, name: &str, dtype: DType) -> Option<Array<B>> {
        self.take_as(name, dtype, true)
    }

    /// Takes a state that may exist already, in this type; `signed` if its elements may be negative.
    fn take_as(&mut self, name: &str, dtype: DType, signed: bool) -> Option<Array<B>> {
        let cell = self.cells.swap_remove(self.cells.iter().position(|(known, _)| known == name)?).1;
        let kept_as = cell.dtype;
        if self.place == Where::Device {
            // A loaded state is in fp32.
            return Some(Array::Tensor(of_type::<B>(cell.into_local(), dtype)));
        }
        Some(match cell.into_stored() {
            // The state as it was loaded, before its parameter was known.
            Ok(Stored::Disk(stored)) if self.disk(dtype).is_none() || kept_as != dtype => {
                let data = self.read(kept_as, |bytes| or_stop(stored.read_into(bytes)));
                Array::Memory(self.converted(data, dtype, signed))
            }
            Ok(Stored::Host(data)) if kept_as != dtype => {
                Array::Memory(self.converted(B::Data::clone(&data), dtype, signed))
            }
            Ok(stored) => Array::of(stored, &self.rank.copier),
            // Parked on another disk.
            Err(cell) if kept_as == DType::U8 => Array::Memory(cell.blocks()),
            Err(cell) => Array::Memory(self.converted(B::read(cell.into_local()).flat(), dtype, signed)),
        })
    }

    /// Converts elements to `dtype`, or to blocks of 8 bits; in place if they have that type.
    fn converted(&self, data: B::Data, dtype: DType, signed: bool) -> B::Data {
        match dtype {
            DType::U8 => {
                let values = data.cast(DType::F32);
                B::Data::flat_of(Buffer::U8(self.blocks.encode(values.as_slice(), signed)))
            }
            _ => data.cast(dtype),
        }
    }

    /// Creates a state that begins with zeros.
    fn fresh(&self, dtype: DType) -> Array<B> {
        match self.disk(dtype) {
            Some(disk) => Array::Disk { stored: or_stop(disk.reserve(self.elements * dtype.size())), fresh: true },
            None if dtype == DType::U8 => Array::Memory(zeros(self.blocks.bytes(self.elements), dtype)),
            None => Array::Memory(zeros(self.elements, dtype)),
        }
    }

    /// Creates the fp32 master of a parameter that has none yet.
    fn fresh_master(&self, own: &Array<B>, dtype: DType) -> Array<B> {
        match (own, self.disk(DType::F32)) {
            (Array::Tensor(copy), _) => Array::Tensor(B::cast(copy.clone(), DType::F32)),
            (Array::Memory(copy), None) => Array::Memory(copy.clone().cast(DType::F32)),
            (Array::Disk { stored, .. }, None) => {
                Array::Memory(self.read(dtype, |bytes| or_stop(stored.read_into(bytes))).cast(DType::F32))
            }
            (_, Some(_)) => self.fresh(DType::F32),
        }
    }

    fn read(&self, dtype: DType, read: impl FnOnce(&mut [u8])) -> B::Data {
        filled(&self.rank.copier, self.elements, dtype, read)
    }
}

/// Returns the parameter's array; of a 16-bit parameter with a master, the values are not needed.
fn own<B: Backend>(parameter: Operand<B>, place: Where, is_copy: bool) -> Array<B> {
    let (rank, dtype) = (parameter.cell.rank.clone(), parameter.cell.dtype);
    if place == Where::Device {
        return Array::Tensor(parameter.into_local());
    }
    let stored = match parameter.edits {
        None => parameter.cell.into_stored().map_err(|cell| Operand { cell, edits: None }),
        Some(_) => Err(parameter),
    };
    match stored {
        Ok(stored) => Array::of(stored, &rank.copier),
        Err(parameter) => {
            let local = parameter.into_local();
            // A 16-bit copy is overwritten from its master, so its values need not be waited for.
            let numel = B::numel(&local);
            Array::Memory(match is_copy {
                true => filled(&rank.copier, numel, dtype, |_| {}),
                false => narrow_or_f32(B::read(local).flat()),
            })
        }
    }
}

/// Returns the gradient's array, which is only read: data that others may still read is not copied.
fn gradient<B: Backend>(gradient: Operand<B>, place: Where) -> (Array<B>, DType) {
    let (rank, dtype) = (gradient.cell.rank.clone(), gradient.cell.dtype);
    let is_plain = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::Bf16);
    if place != Where::Device && gradient.edits.is_none() && is_plain(dtype) {
        match gradient.cell.stored() {
            Some(Stored::Disk(stored)) => return (Array::Disk { stored, fresh: false }, dtype),
            Some(kept @ Stored::Host(_)) => {
                drop(kept);
                return match gradient.cell.into_stored() {
                    Ok(stored) => (Array::of(stored, &rank.copier), dtype),
                    Err(cell) => (Array::Memory(cell.data()), dtype),
                };
            }
            None => {}
        }
    }
    let local = gradient.into_local();
    let dtype = if is_plain(B::dtype(&local)) { B::dtype(&local) } else { DType::F32 };
    let array = match place {
        Where::Device => Array::Tensor(of_type::<B>(local, dtype)),
        _ if B::elements(&local).is_some() => Array::Tensor(local),
        _ => Array::Memory(narrow_or_f32(B::read(local).flat())),
    };
    (array, dtype)
}

/// Applies to a parameter's fp32 master the operations recorded on the parameter.
pub fn edited<B: Backend>(master: Arc<Cell<B>>, edits: &Edits<B>) -> Arc<Cell<B>> {
    let template = master.template(Kind::Optimizer, Cell::derivation("edit", &[&master]));
    let (partition, place) = (template.partition, master.place());
    Cell::ready(template, of_type::<B>(edits(master.into_local(), partition, place), DType::F32))
}

/// Returns `elements` zeros.
fn zeros<D: HostData>(elements: usize, dtype: DType) -> D {
    D::flat_of(match dtype {
        DType::Bf16 => Buffer::Bf16(vec![bf16::ZERO; elements]),
        DType::U8 => Buffer::U8(vec![0; elements]),
        _ => Buffer::F32(vec![0.0; elements]),
    })
}

/// Returns the error message for optimizer state whose size differs from the parameter's.
fn mismatch(state: usize, parameter: usize) -> String {
    format!(
        "optimizer state of {state} elements does not belong to a parameter whose shard has {parameter}: the record was made \
         by another model, or was not loaded inside zero_burn::load_state (Burn 0.21)"
    )
}
