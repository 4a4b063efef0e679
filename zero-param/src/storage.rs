//! Storage of a full parameter in host memory that a pass uses: gathered for its first read, and again for a read after its release.
//!
//! Some of Burn's layers keep a weight from the forward to the backward pass: an embedding, and a linear layer on sequences, which keeps a
//! view of it. They keep handles of a tensor. Its [`Bytes`] ask a controller for their memory at each access, so the memory can go while the
//! handles stay.
//!
//! Memory is released only between operations, on the thread that runs them: in the forward pass when a later parameter is used, in the
//! backward pass when a parameter's gradient arrives. What another thread has read stays. What a tensor still refers to at the end of the pass
//! is gathered once more and stays.

use core::mem::MaybeUninit;
use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use burn::backend::TensorMetadata;
use burn::backend::flex::{Flex, FlexTensor, Layout};
use burn::tensor::{AllocationProperty, Bytes};
use burn_std::{AccessError, AccessPolicy, AllocationController, Writer};
use parking_lot::Mutex;

use crate::parameter::Parameter;
use crate::tensors::Raw;

/// The full parameters of a pass.
#[derive(Default)]
struct Pass {
    /// Each with a handle, so that no operation takes its memory for its own.
    made: Vec<(Arc<Full>, Raw)>,
    gathered: Gathered,
}

/// The full parameters that are in memory since the last release.
type Gathered = Arc<Mutex<Vec<Weak<Full>>>>;

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

/// Guard of a pass on this thread, which ends when it is dropped. Holds the enclosing pass.
pub(crate) struct During(Option<Pass>);

/// Begins a pass whose full parameters are released.
pub(crate) fn during() -> During {
    During(PASS.replace(Some(Pass::default())))
}

impl During {
    /// Ends the pass: gathers what a tensor still refers to, as the shards may be updated next.
    pub(crate) fn end(self) {
        let pass = PASS.with_borrow_mut(|pass| pass.as_mut().map(std::mem::take));
        for (full, handle) in pass.into_iter().flat_map(|pass| pass.made) {
            if !handle.is_unique() {
                full.keep();
            }
        }
    }
}

impl Drop for During {
    fn drop(&mut self) {
        PASS.set(self.0.take());
    }
}

/// Returns whether this thread runs a pass.
pub(crate) fn is_in_pass() -> bool {
    PASS.with_borrow(Option::is_some)
}

/// Releases the memory of the pass's full parameters. Called between operations.
pub(crate) fn release() {
    let gathered = PASS.with_borrow(|pass| pass.as_ref().map(|pass| std::mem::take(&mut *pass.gathered.lock())));
    gathered.into_iter().flatten().filter_map(|full| full.upgrade()).for_each(|full| full.release());
}

/// Releases what the pass has used before, and returns a tensor of the full parameter whose base is `base`: `again` in a backward pass.
pub(crate) fn full(parameter: &Arc<Parameter>, base: &Raw, again: bool) -> Raw {
    release();
    parameter.check(base);
    let (shape, dtype) = (parameter.shape.clone(), parameter.dtype());
    let bytes = shape.num_elements() * dtype.size();
    PASS.with_borrow_mut(|pass| {
        let pass = pass.as_mut().expect("called within a pass");
        let state = State { source: Some((parameter.clone(), base.clone())), values: None, again };
        let (thread, gathered) = (thread::current().id(), pass.gathered.clone());
        let full = Arc::new(Full { state: Mutex::new(state), bytes, thread, gathered });
        let controller = Box::new(Controller { full: full.clone(), own: None });
        // SAFETY: the controller's memory has this many bytes, all initialized.
        let storage = unsafe { Bytes::from_controller(controller, bytes) };
        let tensor = FlexTensor::new(storage, Layout::contiguous(shape), dtype);
        pass.made.push((full, tensor.clone()));
        tensor
    })
}

/// A full parameter.
struct Full {
    state: Mutex<State>,
    bytes: usize,
    /// The thread of the pass.
    thread: ThreadId,
    gathered: Gathered,
}

struct State {
    /// The parameter, and the version to gather. `None` once the values stay.
    source: Option<(Arc<Parameter>, Raw)>,
    values: Option<Raw>,
    /// True if the next gather counts as one of a backward pass.
    again: bool,
}

impl State {
    /// Gathers the values, without gaps and without bytes besides their own, unless they are there.
    fn gather(&mut self) -> bool {
        let Some((parameter, base)) = self.source.as_ref().filter(|_| self.values.is_none()) else { return false };
        let full = parameter.load::<Flex>(base, &Default::default(), self.again);
        let bytes = full.shape().num_elements() * full.dtype().size();
        let is_packed = full.is_contiguous() && full.layout().start_offset() == 0 && full.bytes().len() == bytes;
        self.values = Some(if is_packed { full } else { full.to_contiguous() });
        self.again = true;
        true
    }
}

impl Full {
    fn release(&self) {
        let mut state = self.state.lock();
        if state.source.is_some() {
            state.values = None;
        }
    }

    fn keep(&self) {
        let mut state = self.state.lock();
        state.gather();
        state.source = None;
    }
}

/// The controller of a tensor's storage.
struct Controller {
    full: Arc<Full>,
    /// The tensor's own values, once they were written.
    own: Option<Bytes>,
}

impl AllocationController for Controller {
    fn alloc_align(&self) -> usize {
        align_of::<f32>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    fn capacity(&self) -> usize {
        self.full.bytes
    }

    fn memory(&self, policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        if let Some(own) = &self.own {
            // SAFETY: initialized bytes are valid as bytes that may be uninitialized.
            return Ok(unsafe { core::slice::from_raw_parts(own.as_ptr().cast(), own.len()) });
        }
        let mut state = self.full.state.lock();
        if state.values.is_none() && !policy.copy_allowed() {
            return Err(AccessError::WouldCopy);
        }
        if state.gather() {
            self.full.gathered.lock().push(Arc::downgrade(&self.full));
        }
        if thread::current().id() != self.full.thread {
            state.source = None;
        }
        let values = state.values.as_ref().expect("it was gathered").bytes();
        // SAFETY: the values stay where they are until `release` drops them. `release` runs on the pass's thread, between operations: an
        // operation of this thread borrows storage and returns without the borrow. An operation of another thread may go on, but has set
        // `source` to `None`, and then `release` drops nothing. `memory_mut` does not touch the values. Burn's tensors lend no storage to a
        // program; one that borrows it by burn-flex (`FlexTensor::bytes`) must not hold it while it uses another parameter, as the book says.
        Ok(unsafe { core::slice::from_raw_parts(values.as_ptr().cast(), values.len()) })
    }

    unsafe fn memory_mut(&mut self, policy: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        if self.own.is_none() {
            if !policy.copy_allowed() {
                return Err(AccessError::WouldCopy);
            }
            let values = self.memory(policy)?;
            // SAFETY: all of a parameter's bytes are initialized.
            let values = unsafe { core::slice::from_raw_parts(values.as_ptr().cast::<u8>(), values.len()) };
            self.own = Some(Bytes::from_bytes_vec(values.to_vec()));
        }
        let own = self.own.as_mut().expect("it was set").write(Writer::new())?;
        // SAFETY: the caller writes initialized bytes only.
        Ok(unsafe { core::slice::from_raw_parts_mut(own.as_mut_ptr().cast(), own.len()) })
    }
}
