//! The update of one parameter: its arrays, where they lie, and the cells that wait for what comes of it.
//!
//! It runs at once where the arrays are in the host's memory, with the others of its step on a device (`device`), or beside what
//! follows the step ([`beside`]) where something is kept elsewhere than with the backend.
//!
//! A rule with a trust ratio takes two passes. The first moves the states on and gives sums of squares; ranks exchange these for all
//! parameters at once; the second makes the same update of parameter and states again, and takes the step. So on the host nothing is
//! kept between them but these sums, and no gradient; a device keeps the update. Only the second runs beside what follows the step.

pub(crate) mod beside;
#[cfg(feature = "cubecl")]
pub(crate) mod device;
pub(crate) mod norms;

use std::ops::Range;
use std::slice::IterMut;
use std::sync::Arc;

use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::DType;
use half::slice::HalfFloatSliceExt;
use zero_core::offload::{Access, SwapBuffer};
use zero_ops::Elements;
use zero_ops::update::{Average, Kernel, Norms, State, Stretch, Sweep, Target, run_stretch};

use crate::cell::{Cell, Piece};
use crate::mover::Mover;
use crate::tier::{Home, OnDisk, Stored};

/// Where one array of an update is.
pub(crate) enum Array<B: Backend> {
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
    pub(crate) fn of(stored: Stored, mover: &Mover) -> Self {
        match stored {
            Stored::Host(data) => Array::Memory(mover.unshared(data)),
            Stored::Disk(stored) => Array::Disk { stored, fresh: false },
        }
    }

    /// What is there, and nothing in its place.
    fn take(&mut self) -> Self {
        std::mem::replace(self, Array::Memory(TensorData::new(Vec::<f32>::new(), [0])))
    }

    /// What is there of it means nothing yet.
    pub(crate) fn is_fresh(&self) -> bool {
        matches!(self, Array::Disk { fresh: true, .. })
    }

    /// Elements, if it is in memory.
    pub(crate) fn elements(&self) -> Option<usize> {
        match self {
            Array::Tensor(tensor) => Some(tensor.shape().num_elements()),
            Array::Memory(data) => Some(data.num_elements()),
            Array::Disk { .. } => None,
        }
    }
}

/// The moving average of a parameter, in fp32.
pub(crate) struct Averaged<B: Backend> {
    pub(crate) array: Array<B>,
    pub(crate) decay: f64,
    /// Begins with the parameter.
    pub(crate) fresh: bool,
}

/// The update of one parameter.
pub(crate) struct Job<B: Backend> {
    pub(crate) kernel: Kernel,
    pub(crate) scale: f32,
    pub(crate) elements: usize,
    /// The place of the first in the parameter.
    pub(crate) first: usize,
    /// The fp32 parameter or its master, which is made of `copy` if it is fresh.
    pub(crate) parameter: Array<B>,
    /// None in a second pass; of one on a device the update that the first pass gave.
    pub(crate) gradient: Option<(Array<B>, DType)>,
    /// In the order of the rule's names; zero where fresh.
    pub(crate) states: Vec<Array<B>>,
    /// Of all states.
    pub(crate) state_dtype: DType,
    /// Moved on by the pass that takes the step.
    pub(crate) average: Option<Averaged<B>>,
    /// The parameter in 16 bit.
    pub(crate) copy: Option<(Array<B>, DType)>,
    /// The cells of its results, pending: the states, the average, the master if there is a copy, the parameter's next version.
    pub(crate) cells: Vec<Arc<Cell<B>>>,
    /// Its place among those of the step.
    pub(crate) number: usize,
    /// What this rank's part of the parameter adds to its norm and to that of its update.
    pub(crate) norms: Norms,
}

impl<B: Backend> Job<B> {
    /// Arrays in the order in which their buffers come, with their element's size and what becomes of them.
    pub(crate) fn arrays(&self) -> Vec<(&Array<B>, usize, Access)> {
        let (is_first, is_second) = (self.is_first_pass(), self.is_second_pass());
        let updated = |home: &Array<B>, is_kept| match home {
            Array::Disk { fresh: true, .. } => Access::Write,
            _ if is_kept => Access::Read,
            _ => Access::Update,
        };
        let mut arrays = vec![(&self.parameter, 4, updated(&self.parameter, is_first))];
        arrays.extend(self.gradient.iter().map(|(home, dtype)| (home, dtype.size(), Access::Read)));
        arrays.extend(self.states.iter().map(|home| (home, self.state_dtype.size(), updated(home, is_second))));
        if let Some(average) = self.average.as_ref().filter(|_| !is_first) {
            arrays.push((&average.array, 4, if average.fresh { Access::Write } else { Access::Update }));
        }
        if let Some((home, dtype)) = self.copy.as_ref().filter(|_| self.takes_copy()) {
            // It is written over, unless the master is made of it.
            let access = if self.parameter.is_fresh() { Access::Update } else { Access::Write };
            arrays.push((home, dtype.size(), access));
        }
        arrays
    }

    /// Whether a second pass follows, once the parameter's norms are known.
    pub(crate) fn is_first_pass(&self) -> bool {
        self.kernel.pass == Sweep::First
    }

    pub(crate) fn is_second_pass(&self) -> bool {
        matches!(self.kernel.pass, Sweep::Second { .. })
    }

    /// Whether the pass reads or writes the copy in 16 bit.
    fn takes_copy(&self) -> bool {
        !self.is_first_pass() || self.parameter.is_fresh()
    }

    /// The elements whose squares are this rank's to add: each of the parameter's is one rank's.
    pub(crate) fn counted(&self) -> Range<usize> {
        self.cells[self.cells.len() - 1].own()
    }

    /// Updates elements `range`.
    pub(crate) fn compute(&mut self, range: Range<usize>, buffers: &mut [SwapBuffer]) {
        let mut buffers = buffers.iter_mut();
        let (fresh, takes_copy, counted) = (self.parameter.is_fresh(), self.takes_copy(), self.counted());
        let is_first_pass = self.is_first_pass();
        let counted = counted.start.saturating_sub(range.start)..counted.end.saturating_sub(range.start);
        let p = numbers(&mut self.parameter, &mut buffers, &range);
        let g = match &mut self.gradient {
            None => Elements::F32(&[]),
            Some((Array::Tensor(g), _)) => zero_ops::elements::<B>(g).expect("it was looked at").slice(range.clone()),
            Some((home, DType::F16)) => Elements::F16(numbers(home, &mut buffers, &range)),
            Some((home, DType::BF16)) => Elements::Bf16(numbers(home, &mut buffers, &range)),
            Some((home, _)) => Elements::F32(numbers(home, &mut buffers, &range)),
        };
        let mut states = self.states.iter_mut().map(|home| match (home.is_fresh(), self.state_dtype) {
            (fresh, DType::BF16) => State::Bf16(begun(numbers(home, &mut buffers, &range), fresh)),
            (fresh, _) => State::F32(begun(numbers(home, &mut buffers, &range), fresh)),
        });
        let (a, b) = (states.next().unwrap_or_default(), states.next().unwrap_or_default());
        drop(states);
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
        let norms = run_stretch(self.kernel, self.scale, Stretch { p, g, a, b, copy, average, first }, counted);
        self.norms = self.norms.plus(norms);
    }

    /// After its last element, before its arrays on the disk have been written: who waits for the parameter's next version has it, if
    /// it stays in memory.
    fn settle_version(&mut self) {
        let is_first_pass = self.is_first_pass();
        let array = self.copy.as_mut().map_or(&mut self.parameter, |(copy, _)| copy);
        if array.elements().is_some()
            && !is_first_pass
            && let Some(cell) = self.cells.pop_if(|cell| !matches!(cell.home(), Home::Disk(_)))
        {
            settle_one(&cell, array.take());
        }
    }

    /// After its last element: the job again, if a second pass is to come.
    pub(crate) fn end(mut self) -> Option<Self> {
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

    /// Whether something that it has in memory belongs on the disk.
    pub(crate) fn is_to_be_stored(&self) -> bool {
        let average = self.average.as_ref().map(|average| &average.array);
        let copy = self.copy.as_ref().map(|(copy, _)| copy);
        let homes = self.states.iter().chain(average).chain([&self.parameter]).chain(copy);
        let in_memory = |home: &Array<B>| home.elements().is_some();
        homes.zip(&self.cells).any(|(home, cell)| in_memory(home) && matches!(cell.home(), Home::Disk(_)))
    }

    /// Whether all of it is in memory, and stays there.
    pub(crate) fn is_in_memory(&self) -> bool {
        !self.is_to_be_stored() && self.arrays().iter().all(|(array, ..)| array.elements().is_some())
    }

    /// All of it at once, of what is in memory; as [`end`](Self::end).
    pub(crate) fn run(mut self) -> Option<Self> {
        self.compute(0..self.elements, &mut []);
        self.end()
    }

    /// The cells of the result, each with what it waits for.
    pub(crate) fn results(self) -> impl Iterator<Item = (Arc<Cell<B>>, Array<B>)> {
        let (average, copy) = (self.average.map(|average| average.array), self.copy.map(|(copy, _)| copy));
        self.cells.into_iter().zip(self.states.into_iter().chain(average).chain([self.parameter]).chain(copy))
    }

    pub(crate) fn settle(self) {
        self.results().for_each(|(cell, array)| settle_one(&cell, array));
    }

    /// The parameter's next version.
    pub(crate) fn version(&self) -> Arc<Cell<B>> {
        self.cells.last().expect("the parameter's next version is its last").clone()
    }
}

fn settle_one<B: Backend>(cell: &Cell<B>, array: Array<B>) {
    match array {
        Array::Tensor(_) => unreachable!("what is written is on the host"),
        Array::Memory(data) => cell.settle_data(data.convert_dtype(cell.dtype)),
        Array::Disk { stored, .. } => cell.settle_as(Piece::Stored(Stored::Disk(stored))),
    }
}

fn numbers<'a, B: Backend, T: burn_backend::Element + zero_core::offload::Element>(
    home: &'a mut Array<B>,
    buffers: &mut IterMut<'a, SwapBuffer>,
    range: &Range<usize>,
) -> &'a mut [T] {
    match home {
        Array::Memory(data) => &mut data.as_mut_slice::<T>().expect("of this type, by its job")[range.clone()],
        Array::Disk { .. } => {
            let buffer = buffers.next().expect("the pipeline gives a buffer for each array on the disk");
            buffer.view_mut::<T>()
        }
        Array::Tensor(_) => unreachable!("what is computed on is on the host"),
    }
}

/// State as it is, or as it begins.
fn begun<T: Default + Clone>(values: &mut [T], fresh: bool) -> &mut [T] {
    if fresh {
        values.fill(T::default());
    }
    values
}
