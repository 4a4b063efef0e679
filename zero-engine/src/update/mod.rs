//! The update of one parameter: its arrays, their locations, and the cells that wait for the results.
//!
//! An update runs immediately if the arrays are in host memory, together with the others of its step on a device (`device`), or
//! concurrently with what follows the step ([`overlapped`]) if something is kept outside the backend.
//!
//! Muon takes two passes as well, with an exchange of matrices between them ([`matrices`]).
//!
//! A rule with a trust ratio takes two passes. The first advances the states and returns sums of squares. The ranks exchange these for all
//! parameters at once. The second recomputes the update from parameter and states, and takes the step. So between the passes the host keeps
//! only these sums, and no gradient; a device keeps the update. Only the second pass overlaps what follows the step.

pub mod device;
pub mod matrices;
pub mod norms;
pub mod overlapped;
pub mod plan;
pub mod step;

use std::ops::Range;
use std::slice::IterMut;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use zero_core::offload::{Access, SwapBuffer};
use zero_core::{Buffer, Partition};
use zero_kernels::update::{Average, Chunk, Elements, Kernel, Layout, Norms, State, Sweep, Target, update_chunk};

use crate::backend::{Backend, DType, HostData, Shape};
use crate::cell::{Cell, ShardState};
use crate::copier::Copier;
use crate::tier::{Home, OnDisk, Stored};

/// The location of one array of an update.
pub enum Array<B: Backend> {
    /// A tensor of the backend: on a device, or read in place.
    Tensor(B::Tensor),
    /// In host memory.
    Memory(B::Data),
    /// In the file of a rank.
    Disk {
        /// The place in the file.
        stored: Arc<OnDisk>,
        /// True if its content is undefined.
        fresh: bool,
    },
}

impl<B: Backend> Array<B> {
    /// Returns the array for an update of data that is kept outside the backend: host memory is written in place if nothing else holds it.
    pub fn of(stored: Stored<B>, copier: &Copier) -> Self {
        match stored {
            Stored::Host(data) => Array::Memory(copier.unshared(data)),
            Stored::Disk(stored) => Array::Disk { stored, fresh: false },
        }
    }

    /// Takes the array, and leaves an empty one.
    fn take(&mut self) -> Self {
        std::mem::replace(self, Array::Memory(B::Data::flat_of(Buffer::F32(Vec::new()))))
    }

    /// Returns whether its content is undefined.
    pub fn is_fresh(&self) -> bool {
        matches!(self, Array::Disk { fresh: true, .. })
    }

    /// Returns the number of elements, if it is in memory.
    pub fn elements(&self) -> Option<usize> {
        match self {
            Array::Tensor(tensor) => Some(B::numel(tensor)),
            Array::Memory(data) => Some(data.numel()),
            Array::Disk { .. } => None,
        }
    }
}

/// The moving average of a parameter, in fp32.
pub struct Averaged<B: Backend> {
    /// Where the average is.
    pub array: Array<B>,
    /// The average's weight in the next average: `decay * average + (1 - decay) * parameter`.
    pub decay: f64,
    /// True if it begins with the parameter's values.
    pub fresh: bool,
}

/// The update of one parameter.
pub struct Job<B: Backend> {
    /// The rule and the numbers of the step.
    pub kernel: Kernel,
    /// Factor by which the gradient is multiplied first.
    pub scale: f32,
    /// Number of elements of each array.
    pub elements: usize,
    /// Index of the first element in the parameter.
    pub first: usize,
    /// The partition of the parameter's state, and this rank's place in it.
    pub partition: (Partition, usize),
    /// Sizes of the parameter.
    pub shape: Shape,
    /// The fp32 parameter or its master; a fresh master is created from `copy`.
    pub parameter: Array<B>,
    /// The gradient. In a second pass: `None` on the host, the update from the first pass on a device, and Muon's orthogonal matrix.
    pub gradient: Option<(Array<B>, DType)>,
    /// In the order of the rule's names; zero if fresh.
    pub states: Vec<Array<B>>,
    /// Type of all states.
    pub state_dtype: DType,
    /// The layout of states in blocks of 8 bits.
    pub blocks: Layout,
    /// Advanced by the pass that takes the step.
    pub average: Option<Averaged<B>>,
    /// The 16-bit parameter.
    pub copy: Option<(Array<B>, DType)>,
    /// True if the parameter's next version is its master, rounded when it is read.
    pub is_master: bool,
    /// Pending cells of the results: the states, the average, the master if there is a copy, the parameter's next version.
    pub cells: Vec<Arc<Cell<B>>>,
    /// Index among the jobs of the step.
    pub number: usize,
    /// Contribution of this rank's shard to the norms of the parameter and of its update.
    pub norms: Norms,
    /// This rank's shard of the matrix to be orthogonalized, written by Muon's first pass.
    pub direction: Vec<f32>,
}

impl<B: Backend> Job<B> {
    /// Returns the arrays in the order of their buffers, each with the size of an element and its kind of access.
    pub fn arrays(&self) -> Vec<(&Array<B>, usize, Access)> {
        let (is_first, is_second) = (self.is_first_pass(), self.is_second_pass());
        let updated = |home: &Array<B>, is_kept| match home {
            Array::Disk { fresh: true, .. } => Access::Write,
            _ if is_kept => Access::Read,
            _ => Access::Update,
        };
        let mut arrays = vec![(&self.parameter, 4, updated(&self.parameter, is_first))];
        arrays.extend(self.gradient.iter().map(|(home, dtype)| (home, dtype.size(), Access::Read)));
        let states = self.states.iter().filter(|_| self.reads_states());
        arrays.extend(states.map(|home| (home, self.state_dtype.size(), updated(home, is_second))));
        if let Some(average) = self.average.as_ref().filter(|_| !is_first) {
            arrays.push((&average.array, 4, if average.fresh { Access::Write } else { Access::Update }));
        }
        if let Some((home, dtype)) = self.copy.as_ref().filter(|_| self.takes_copy()) {
            // It is overwritten, unless the master is created from it.
            let access = if self.parameter.is_fresh() { Access::Update } else { Access::Write };
            arrays.push((home, dtype.size(), access));
        }
        arrays
    }

    /// Returns whether a second pass follows, once the parameter's norms or its orthogonal matrix are known.
    pub fn is_first_pass(&self) -> bool {
        self.kernel.pass == Sweep::First
    }

    /// Returns whether this is the second pass.
    pub fn is_second_pass(&self) -> bool {
        matches!(self.kernel.pass, Sweep::Second { .. })
    }

    /// Returns whether the pass reads or writes the states.
    fn reads_states(&self) -> bool {
        !(self.is_second_pass() && self.kernel.is_muon())
    }

    /// Returns whether the pass reads or writes the 16-bit copy.
    fn takes_copy(&self) -> bool {
        !self.is_first_pass() || self.parameter.is_fresh()
    }

    /// Returns the elements whose squares this rank adds; each element of the parameter belongs to exactly one rank.
    pub fn counted(&self) -> Range<usize> {
        self.cells[self.cells.len() - 1].own()
    }

    /// Updates elements `range`. If states are in blocks of 8 bits, all arrays are in memory, and these are all elements.
    pub fn compute(&mut self, range: Range<usize>, buffers: &mut [SwapBuffer]) {
        match self.state_dtype {
            DType::U8 => {
                for (elements, bytes) in self.blocks.runs(self.elements) {
                    self.compute_run(elements, bytes, &mut []);
                }
            }
            _ => self.compute_run(range.clone(), range, buffers),
        }
    }

    /// Updates elements `range`, whose states are in `of_states`.
    fn compute_run(&mut self, range: Range<usize>, of_states: Range<usize>, buffers: &mut [SwapBuffer]) {
        let mut buffers = buffers.iter_mut();
        let (fresh, takes_copy, counted) = (self.parameter.is_fresh(), self.takes_copy(), self.counted());
        let (is_first_pass, reads_states) = (self.is_first_pass(), self.reads_states());
        let writes_direction = is_first_pass && self.kernel.is_muon();
        let counted = counted.start.saturating_sub(range.start)..counted.end.saturating_sub(range.start);
        let p = numbers(&mut self.parameter, &mut buffers, &range);
        let g = match &mut self.gradient {
            None => Elements::F32(&[]),
            Some((Array::Tensor(g), _)) => B::elements(g).expect("the gradient was checked").slice(range.clone()),
            Some((home, DType::F16)) => Elements::F16(numbers(home, &mut buffers, &range)),
            Some((home, DType::Bf16)) => Elements::Bf16(numbers(home, &mut buffers, &range)),
            Some((home, _)) => Elements::F32(numbers(home, &mut buffers, &range)),
        };
        let mut states =
            self.states.iter_mut().filter(|_| reads_states).map(|home| match (home.is_fresh(), self.state_dtype) {
                (fresh, DType::U8) => State::Blocks(begun(numbers(home, &mut buffers, &of_states), fresh)),
                (fresh, DType::Bf16) => State::Bf16(begun(numbers(home, &mut buffers, &of_states), fresh)),
                (fresh, _) => State::F32(begun(numbers(home, &mut buffers, &of_states), fresh)),
            });
        let (a, mut b) = (states.next().unwrap_or_default(), states.next().unwrap_or_default());
        drop(states);
        if writes_direction {
            b = State::F32(&mut self.direction[range.clone()]);
        }
        let average = self.average.as_mut().filter(|_| !is_first_pass).map(|average| Average {
            values: numbers(&mut average.array, &mut buffers, &range),
            decay: average.decay,
            fresh: average.fresh,
        });
        let copy = self.copy.as_mut().filter(|_| takes_copy).map(|(home, dtype)| match dtype {
            DType::F16 => Target::F16(numbers(home, &mut buffers, &range)),
            _ => Target::Bf16(numbers(home, &mut buffers, &range)),
        });
        if fresh {
            match &copy {
                Some(Target::F16(copy)) => copy.convert_to_f32_slice(p),
                Some(Target::Bf16(copy)) => copy.convert_to_f32_slice(p),
                None => unreachable!("a parameter without a copy has values"),
            }
        }
        let first = self.first + range.start;
        let norms = update_chunk(self.kernel, self.scale, Chunk { p, g, a, b, copy, average, first }, counted);
        self.norms = self.norms.plus(norms);
    }

    /// Settles the parameter's next version if it stays in memory. Called after its last element, before its arrays on the disk have been
    /// written, so that nothing waits for these.
    fn settle_version(&mut self) {
        let is_later = self.is_first_pass() || self.is_master;
        let array = self.copy.as_mut().map_or(&mut self.parameter, |(copy, _)| copy);
        if array.elements().is_some()
            && !is_later
            && let Some(cell) = self.cells.pop_if(|cell| !matches!(cell.home(), Home::Disk(_)))
        {
            settle_one(&cell, array.take());
        }
    }

    /// Ends the job after its last element; returns it if a second pass follows.
    pub fn end(mut self) -> Option<Self> {
        if !self.is_first_pass() {
            self.settle();
            return None;
        }
        self.gradient = None;
        for home in self.states.iter_mut().chain([&mut self.parameter]) {
            if let Array::Disk { fresh, .. } = home {
                *fresh = false;
            }
        }
        Some(self)
    }

    /// Returns whether an array in memory belongs on the disk.
    pub fn is_to_be_stored(&self) -> bool {
        let average = self.average.as_ref().map(|average| &average.array);
        let copy = self.copy.as_ref().map(|(copy, _)| copy);
        let homes = self.states.iter().chain(average).chain([&self.parameter]).chain(copy);
        let in_memory = |home: &Array<B>| home.elements().is_some();
        homes.zip(&self.cells).any(|(home, cell)| in_memory(home) && matches!(cell.home(), Home::Disk(_)))
    }

    /// Returns whether all arrays are in memory, and stay there.
    pub fn is_in_memory(&self) -> bool {
        !self.is_to_be_stored() && self.arrays().iter().all(|(array, ..)| array.elements().is_some())
    }

    /// Computes all elements at once, if the arrays are in memory; returns the same as [`end`](Self::end).
    pub fn run(mut self) -> Option<Self> {
        self.compute(0..self.elements, &mut []);
        self.end()
    }

    /// Returns the cells of the results, each with the array that it waits for.
    pub fn results(self) -> impl Iterator<Item = (Arc<Cell<B>>, Array<B>)> {
        let (average, copy) = (self.average.map(|average| average.array), self.copy.map(|(copy, _)| copy));
        self.cells.into_iter().zip(self.states.into_iter().chain(average).chain([self.parameter]).chain(copy))
    }

    /// Gives each result to the cell that waits for it.
    pub fn settle(self) {
        let of_master = self.is_master.then(|| (self.version(), self.cells[self.cells.len() - 2].clone()));
        self.results().for_each(|(cell, array)| settle_one(&cell, array));
        if let Some((version, master)) = of_master {
            let shard = master.settled().tensor().cloned().expect("a master in memory is a tensor");
            version.settle_as(ShardState::OfMaster(shard));
        }
    }

    /// Returns the parameter's next version.
    pub fn version(&self) -> Arc<Cell<B>> {
        self.cells.last().expect("the parameter's next version is its last").clone()
    }
}

fn settle_one<B: Backend>(cell: &Cell<B>, array: Array<B>) {
    match array {
        Array::Tensor(_) => unreachable!("the results of an update on the host are on the host"),
        Array::Memory(data) => cell.settle_data(data.cast(cell.dtype)),
        Array::Disk { stored, .. } => cell.settle_as(ShardState::Stored(Stored::Disk(stored))),
    }
}

fn numbers<'a, B: Backend, T: bytemuck::Pod + zero_core::offload::Element>(
    home: &'a mut Array<B>,
    buffers: &mut IterMut<'a, SwapBuffer>,
    range: &Range<usize>,
) -> &'a mut [T] {
    match home {
        Array::Memory(data) => &mut data.as_mut_slice::<T>()[range.clone()],
        Array::Disk { .. } => {
            let buffer = buffers.next().expect("the pipeline gives a buffer for each array on the disk");
            buffer.view_mut::<T>()
        }
        Array::Tensor(_) => unreachable!("the arrays of an update on the host are on the host"),
    }
}

/// Returns the state, set to zero if it is fresh.
fn begun<T: Default + Clone>(values: &mut [T], fresh: bool) -> &mut [T] {
    if fresh {
        values.fill(T::default());
    }
    values
}
