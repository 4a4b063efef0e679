//! The update of one parameter: its arrays, where they lie, and the cells that wait for what comes of it.
//!
//! It runs at once where the arrays are in the host's memory, with the others of its step on a device ([`super::device`]), or
//! beside what follows the step ([`super::beside`]) where something is kept elsewhere than with the backend.

use std::ops::Range;
use std::slice::IterMut;
use std::sync::Arc;

use burn_backend::{Backend, BackendTypes, TensorData, TensorMetadata};
use burn_std::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zero_core::offload::{Access, Buffer};
use zero_ops::{Elements, Rule};

use super::pass::{Stretch, Target, run_stretch};
use super::rule::Kernel;
use super::state::{MASTER, ParamState, mismatch};
use crate::cell::{Cell, Kind, Origin, Piece, Template};
use crate::mover::Mover;
use crate::tensor::Shard;
use crate::tier::{Home, OnDisk, Stored, filled};
use crate::trouble::{or_stop, stop};
use crate::values::{flat, read};
use crate::view::Extent;

/// Where one array of an update is.
pub(super) enum Array<B: Backend> {
    /// With the backend: on a device, or read where it lies.
    Tensor(B::FloatTensorPrimitive),
    /// In the host's memory.
    Memory(TensorData),
    Disk {
        stored: Arc<OnDisk>,
        /// What is there means nothing yet.
        fresh: bool,
    },
}

impl<B: Backend> Array<B> {
    /// What an array that is kept elsewhere than with the backend is to an update: the host's memory is written in place
    /// where nobody else holds it.
    pub(super) fn of(stored: Stored, mover: &Mover) -> Self {
        match stored {
            Stored::Host(data) => Array::Memory(mover.unshared(data)),
            Stored::Disk(stored) => Array::Disk { stored, fresh: false },
        }
    }

    /// What is there of it means nothing yet.
    fn is_fresh(&self) -> bool {
        matches!(self, Array::Disk { fresh: true, .. })
    }

    /// Elements, if it is in memory.
    fn elements(&self) -> Option<usize> {
        match self {
            Array::Tensor(tensor) => Some(tensor.shape().num_elements()),
            Array::Memory(data) => Some(data.num_elements()),
            Array::Disk { .. } => None,
        }
    }
}

/// The update of one parameter.
pub(super) struct Job<B: Backend> {
    pub(super) kernel: Kernel,
    pub(super) scale: f32,
    pub(super) elements: usize,
    /// The fp32 parameter or its master, which is made of `copy` if it is fresh.
    pub(super) parameter: Array<B>,
    pub(super) gradient: (Array<B>, DType),
    /// In the order of the rule's names; zero where fresh.
    pub(super) states: Vec<Array<B>>,
    /// The parameter in 16 bit.
    pub(super) copy: Option<(Array<B>, DType)>,
    /// What comes of it, pending: the states, the master if there is a copy, the parameter's next version.
    pub(super) cells: Vec<Arc<Cell<B>>>,
}

impl<B: Backend> Job<B> {
    /// Arrays in the order in which their buffers come, with their element's size and what becomes of them.
    pub(super) fn arrays(&self) -> Vec<(&Array<B>, usize, Access)> {
        let updated = |home: &Array<B>| match home {
            Array::Disk { fresh: true, .. } => Access::Write,
            _ => Access::Update,
        };
        let mut arrays = vec![
            (&self.parameter, 4, updated(&self.parameter)),
            (&self.gradient.0, self.gradient.1.size(), Access::Read),
        ];
        arrays.extend(self.states.iter().map(|home| (home, 4, updated(home))));
        if let Some((home, dtype)) = &self.copy {
            // It is written over, unless the master is made of it.
            let access = if self.parameter.is_fresh() { Access::Update } else { Access::Write };
            arrays.push((home, dtype.size(), access));
        }
        arrays
    }

    /// Updates elements `range`.
    pub(super) fn compute(&mut self, range: Range<usize>, buffers: &mut [Buffer]) {
        let mut buffers = buffers.iter_mut();
        let fresh = self.parameter.is_fresh();
        let p = floats(&mut self.parameter, &mut buffers, &range);
        let g = match &mut self.gradient {
            (Array::Tensor(g), _) => zero_ops::elements::<B>(g).expect("it was looked at").slice(range.clone()),
            (home, DType::F16) => Elements::F16(halves(home, &mut buffers, &range)),
            (home, DType::BF16) => Elements::Bf16(halves(home, &mut buffers, &range)),
            (home, _) => Elements::F32(floats(home, &mut buffers, &range)),
        };
        let mut states = self.states.iter_mut().map(|home| {
            let fresh = home.is_fresh();
            let values = floats(home, &mut buffers, &range);
            if fresh {
                values.fill(0.0);
            }
            values
        });
        let (a, b) = (states.next().unwrap_or_default(), states.next().unwrap_or_default());
        drop(states);
        let copy = self.copy.as_mut().map(|(home, dtype)| match dtype {
            DType::F16 => Target::F16(halves::<B, f16>(home, &mut buffers, &range)),
            _ => Target::Bf16(halves::<B, bf16>(home, &mut buffers, &range)),
        });
        if fresh {
            match &copy {
                Some(Target::F16(copy)) => copy.convert_to_f32_slice(p),
                Some(Target::Bf16(copy)) => copy.convert_to_f32_slice(p),
                None => unreachable!("a parameter without a copy has values"),
            }
        }
        run_stretch(self.kernel, self.scale, Stretch { p, g, a, b, copy });
    }

    /// Whether something that it has in memory belongs on the disk.
    pub(super) fn is_to_be_stored(&self) -> bool {
        let homes = self.states.iter().chain([&self.parameter]).chain(self.copy.as_ref().map(|(copy, _)| copy));
        let in_memory = |home: &Array<B>| home.elements().is_some();
        homes.zip(&self.cells).any(|(home, cell)| in_memory(home) && matches!(cell.home(), Home::Disk(_)))
    }

    /// Whether all of it is in memory, and stays there.
    pub(super) fn is_in_memory(&self) -> bool {
        !self.is_to_be_stored() && self.arrays().iter().all(|(array, ..)| array.elements().is_some())
    }

    /// All of it at once, of what is in memory.
    pub(super) fn run(mut self) {
        self.compute(0..self.elements, &mut []);
        self.settle();
    }

    /// The cells of the result, each with what it waits for.
    pub(super) fn results(self) -> impl Iterator<Item = (Arc<Cell<B>>, Array<B>)> {
        let copy = self.copy.map(|(copy, _)| copy);
        self.cells.into_iter().zip(self.states.into_iter().chain([self.parameter]).chain(copy))
    }

    pub(super) fn settle(self) {
        for (cell, array) in self.results() {
            match array {
                Array::Tensor(_) => unreachable!("what is written is on the host"),
                Array::Memory(data) => cell.settle_data(data.convert_dtype(cell.dtype)),
                Array::Disk { stored, .. } => cell.settle_as(Piece::Stored(Stored::Disk(stored))),
            }
        }
    }

    /// The parameter's next version.
    pub(super) fn version(&self) -> Arc<Cell<B>> {
        self.cells.last().expect("the parameter's next version is its last").clone()
    }
}

fn floats<'a, B: Backend>(
    home: &'a mut Array<B>,
    buffers: &mut IterMut<'a, Buffer>,
    range: &Range<usize>,
) -> &'a mut [f32] {
    match home {
        Array::Memory(data) => &mut data.as_mut_slice::<f32>().expect("fp32, by its job")[range.clone()],
        Array::Disk { .. } => buffer(buffers).view_mut::<f32>(),
        Array::Tensor(_) => unreachable!("what is computed on is on the host"),
    }
}

fn halves<'a, B: Backend, T: burn_backend::Element + zero_core::offload::Element>(
    home: &'a mut Array<B>,
    buffers: &mut IterMut<'a, Buffer>,
    range: &Range<usize>,
) -> &'a mut [T] {
    match home {
        Array::Memory(data) => &mut data.as_mut_slice::<T>().expect("16 bit, by its job")[range.clone()],
        Array::Disk { .. } => buffer(buffers).view_mut::<T>(),
        Array::Tensor(_) => unreachable!("what is computed on is on the host"),
    }
}

fn buffer<'a>(buffers: &mut IterMut<'a, Buffer>) -> &'a mut Buffer {
    buffers.next().expect("the pipeline gives a buffer for each array on the disk")
}

/// Where an update runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Where {
    /// On the processor, at once.
    Here,
    /// On the processor, beside what follows the step.
    Beside,
    /// On the device that the arrays are on.
    Device,
}

/// What is to become of a parameter.
pub(super) struct Update<B: Backend> {
    pub(super) rule: Rule,
    pub(super) lr: f64,
    /// What the gradient is multiplied by first.
    pub(super) scale: f32,
    pub(super) parameter: Shard<B>,
    pub(super) gradient: Shard<B>,
}

impl<B: Backend> Update<B> {
    /// The job that makes the parameter's next version and its states, which are pending from here on: in place where their
    /// memory is this one's alone.
    pub(super) fn plan(mut self, state: &mut ParamState<B>) -> (Where, Job<B>) {
        let (parent, dtype) = (self.gradient.cell.clone(), self.parameter.cell.dtype);
        let updated = self.parameter.cell.template(Kind::Optimizer, Origin::Version);
        let rank = updated.rank.clone();
        let names = self.rule.state_names();
        let template = |name: &&str| parent.template(Kind::Optimizer, Cell::derivation(name, &[&parent]));
        let templates: Vec<Template<B>> = names.iter().chain([&MASTER]).map(template).collect();
        // One element of filler where the rank has none.
        let elements = parent.partition.len(parent.place()).max(1);
        drop(parent);
        let half = matches!(dtype, DType::F16 | DType::BF16);
        self.edit_master(state);
        let place = self.place(state, elements);
        let complete = names.iter().all(|name| state.cells.iter().any(|(known, _)| known == name));
        // Also when the rule has changed since: state that it does not know is dropped, what is missing begins anew.
        state.time = if complete { state.time + 1 } else { 1 };
        let kernel = Kernel::new(self.rule, self.lr, state.time);

        let mut held = std::mem::take(&mut state.cells);
        // Where a state is that may be there already.
        let mut taken = |name: &str| {
            let cell = held.swap_remove(held.iter().position(|(known, _)| known == name)?).1;
            Some(match place {
                Where::Device => Array::Tensor(cell.into_local()),
                Where::Here | Where::Beside => match cell.into_stored() {
                    Ok(stored) => Array::of(stored, &rank.mover),
                    Err(cell) => Array::Memory(host::<B>(cell.into_local())),
                },
            })
        };
        let fresh = || match rank.disk_for(Kind::Optimizer, elements * 4, None) {
            Some(disk) => Array::Disk { stored: or_stop(disk.reserve(elements * 4)), fresh: true },
            None => Array::Memory(TensorData::new(vec![0f32; elements], [elements])),
        };
        let states: Vec<Option<Array<B>>> = names.iter().map(|name| taken(name)).collect();
        let states = match place {
            // All of them, or the kernel makes them.
            Where::Device if !complete => Vec::new(),
            _ => states.into_iter().map(|state| state.unwrap_or_else(fresh)).collect(),
        };
        let master = taken(MASTER);
        let own = own(self.parameter, place, half && master.is_some());
        let (parameter, copy) = match half {
            false => (own, None),
            true => {
                let master =
                    master.unwrap_or_else(|| match (&own, rank.disk_for(Kind::Optimizer, elements * 4, None)) {
                        (Array::Tensor(copy), _) => Array::Tensor(B::float_cast(copy.clone(), DType::F32.into())),
                        (Array::Memory(copy), None) => Array::Memory(copy.clone().convert_dtype(DType::F32)),
                        (Array::Disk { stored, .. }, None) => {
                            let read = |bytes: &mut [u8]| or_stop(stored.read_into(bytes));
                            let copy = filled(&rank.mover, elements, dtype, [elements], read);
                            Array::Memory(copy.convert_dtype(DType::F32))
                        }
                        (_, Some(_)) => fresh(),
                    });
                (master, Some((own, dtype)))
            }
        };
        let gradient = gradient(self.gradient, place);
        let copied = copy.as_ref().map(|(copy, _)| copy);
        for array in [&parameter, &gradient.0].into_iter().chain(copied).chain(&states) {
            if let Some(other) = array.elements().filter(|&other| other != elements) {
                stop(mismatch(other, elements));
            }
        }
        // Always in this order: names of cells count on it.
        let kept = names.iter().copied().chain(half.then_some(MASTER));
        let cells = kept.zip(templates).map(|(name, template)| (name.to_string(), Cell::pending(template, DType::F32)));
        state.cells = cells.collect();
        let version = Cell::pending(updated, dtype);
        let cells = state.cells.iter().map(|(_, cell)| cell.clone()).chain([version]).collect();
        (place, Job { kernel, scale: self.scale, elements, parameter, gradient, states, copy, cells })
    }

    /// Makes of the fp32 master what it is to be before the update.
    fn edit_master(&mut self, state: &mut ParamState<B>) {
        let own = self.gradient.cell.slot.as_ref().map(|slot| slot.index);
        // A parameter that was prepared anew has values of its own: the master is of those before.
        let is_of_before = |master: &Cell<B>| {
            let slot = master.slot.as_ref().filter(|slot| slot.current.lock().strong_count() == 0);
            slot.zip(own).is_some_and(|(slot, own)| own != slot.index)
        };
        state.cells.retain(|(name, cell)| name != MASTER || !is_of_before(cell));
        if !self.parameter.views.is_empty()
            && let Some((_, master)) = state.cells.iter_mut().find(|(name, _)| name == MASTER)
        {
            // The parameter was changed since its last update, and its master is what it is made of.
            *master = edited(master.clone(), &self.parameter);
        }
    }

    /// Where the update runs: a parameter alone in the host's memory is updated with its state, by the backend.
    fn place(&self, state: &ParamState<B>, elements: usize) -> Where {
        let (cell, dtype) = (&self.parameter.cell, self.parameter.cell.dtype);
        let home = |kind, size| cell.rank.home(kind, elements * size, cell.slot.as_deref());
        let is_on_disk = |cell: &Arc<Cell<B>>| matches!(cell.kept_elsewhere(), Some(Stored::Disk(_)));
        let is_beside = !matches!(home(Kind::Optimizer, 4), Home::Backend)
            || matches!(home(Kind::Parameter, dtype.size()), Home::Disk(_))
            || [cell, &self.gradient.cell].into_iter().any(is_on_disk)
            || state.cells.iter().any(|(_, cell)| cell.kept_elsewhere().is_some());
        if is_beside {
            return Where::Beside;
        }
        #[cfg(feature = "cubecl")]
        if zero_ops::is_cube::<B>() && matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Where::Device;
        }
        Where::Here
    }
}

/// The parameter as it is; in 16 bit with a master, its values are not needed.
fn own<B: Backend>(parameter: Shard<B>, place: Where, is_copy: bool) -> Array<B> {
    let (rank, dtype) = (parameter.cell.rank.clone(), parameter.cell.dtype);
    if place == Where::Device {
        return Array::Tensor(parameter.into_piece());
    }
    let stored = match parameter.views.is_empty() {
        true => parameter.cell.into_stored().map_err(Shard::new),
        false => Err(parameter),
    };
    match stored {
        Ok(stored) => Array::of(stored, &rank.mover),
        Err(parameter) => {
            let piece = parameter.into_piece();
            // A copy in 16 bit is written over from its master: there is no need to wait for its values.
            let unread = is_copy.then(|| rank.mover.array(piece.shape().num_elements(), dtype)).flatten();
            Array::Memory(unread.unwrap_or_else(|| narrow_or_f32(flat(read::<B>(piece)))))
        }
    }
}

/// What is only read: no copy of what others may still read.
fn gradient<B: Backend>(gradient: Shard<B>, place: Where) -> (Array<B>, DType) {
    let (rank, dtype) = (gradient.cell.rank.clone(), gradient.cell.dtype);
    let is_plain = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    if place != Where::Device && gradient.views.is_empty() && is_plain(dtype) {
        match gradient.cell.stored() {
            Some(Stored::Disk(stored)) => return (Array::Disk { stored, fresh: false }, dtype),
            Some(kept @ Stored::Host(_)) => {
                drop(kept);
                return match gradient.cell.into_stored() {
                    Ok(stored) => (Array::of(stored, &rank.mover), dtype),
                    Err(cell) => (Array::Memory(cell.data()), dtype),
                };
            }
            None => {}
        }
    }
    let piece = gradient.into_piece();
    let dtype = if is_plain(piece.dtype()) { piece.dtype() } else { DType::F32 };
    let array = match place {
        Where::Device if piece.dtype() != dtype => Array::Tensor(B::float_cast(piece, dtype.into())),
        Where::Device => Array::Tensor(piece),
        _ if zero_ops::elements::<B>(&piece).is_some() => Array::Tensor(piece),
        _ => Array::Memory(narrow_or_f32(flat(read::<B>(piece)))),
    };
    (array, dtype)
}

/// A parameter's fp32 master with what was done to the parameter itself.
fn edited<B: Backend>(master: Arc<Cell<B>>, parameter: &Shard<B>) -> Arc<Cell<B>> {
    let template = master.template(Kind::Optimizer, Cell::derivation("edit", &[&master]));
    let piece =
        parameter.views.apply_maps(master.into_local(), Extent::Piece(template.partition, parameter.cell.place()));
    let piece = if piece.dtype() == DType::F32 { piece } else { B::float_cast(piece, DType::F32.into()) };
    Cell::ready(template, piece)
}

/// A piece in host memory, as f32, in place if this is its only handle, flat.
fn host<B: Backend>(piece: <B as BackendTypes>::FloatTensorPrimitive) -> TensorData {
    flat(read::<B>(piece)).convert_dtype(DType::F32)
}

/// As f32, unless it is in 16 bit.
fn narrow_or_f32(data: TensorData) -> TensorData {
    match data.dtype {
        DType::F16 | DType::BF16 => data,
        _ => data.convert_dtype(DType::F32),
    }
}
