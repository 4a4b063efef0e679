//! Inputs of checkpointed blocks outside of the backend's memory: in host memory or on the disk (ZeRO's offload of activation checkpoints,
//! Rajbhandari et al. 2020, section 6.1, <https://arxiv.org/abs/1910.02054>).
//!
//! After a block, a thread of the rank moves the inputs that came from the previous block out of memory, while the next block is computed.
//! The backward pass reaches blocks in reverse order: loading an input makes the thread bring back the one that left before it, while the
//! rank computes. Nothing depends on that order: a thread that needs an input waits for it, or reads it itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};
use zero_core::collective::threads::panic_reason;
use zero_core::offload::DiskError;

use crate::abort::{or_stop, stop};
use crate::backend::{Backend, DType, Shape, Shared};
use crate::cell::rank::Rank;
use crate::copier::Caller;
use crate::tier::{Stored, fetch_shaped};
use crate::worker::Worker;

/// A tensor that can be moved out of the backend's memory and back, or dropped if it can be recomputed.
pub struct Movable<B: Backend> {
    shape: Shape,
    device: B::Device,
    content: Mutex<Content<B>>,
}

/// The location of a tensor.
enum Content<B: Backend> {
    /// Nowhere: it can be recomputed.
    Gone,
    Here(B::Tensor),
    /// Here until its copy is complete.
    Leaving(Shared<B>),
    Stored(Stored<B>, DType),
    /// Here again, or kept here after all.
    Back(Shared<B>),
}

impl<B: Backend> Content<B> {
    /// Returns the tensor, if it is in the backend's memory, without keeping a handle if `is_last`.
    fn tensor(&mut self, is_last: bool) -> Option<B::Tensor> {
        if let Content::Leaving(shared) = self {
            *self = Content::Back(shared.clone());
        }
        match self {
            Content::Here(tensor) if !is_last => Some(tensor.clone()),
            Content::Back(shared) if !is_last => Some(shared.tensor()),
            Content::Here(_) | Content::Back(_) => match std::mem::replace(self, Content::Gone) {
                Content::Here(tensor) => Some(tensor),
                Content::Back(shared) => Some(shared.into_tensor()),
                _ => None,
            },
            Content::Gone | Content::Leaving(_) | Content::Stored(..) => None,
        }
    }
}

impl<B: Backend> Movable<B> {
    /// Holds `tensor`, which has this shape.
    pub fn new(tensor: B::Tensor, shape: &[usize]) -> Arc<Self> {
        let (shape, device) = (shape.into(), B::device(&tensor));
        Arc::new(Self { shape, device, content: Mutex::new(Content::Here(tensor)) })
    }

    /// Returns whether the tensor has been dropped.
    pub fn is_gone(&self) -> bool {
        matches!(*self.content.lock(), Content::Gone)
    }

    /// Drops the tensor.
    pub fn drop_tensor(&self) {
        *self.content.lock() = Content::Gone;
    }

    /// Holds a recomputed tensor, if it was dropped.
    pub fn refill(&self, tensor: B::Tensor) {
        let mut content = self.content.lock();
        if let Content::Gone = *content {
            *content = Content::Here(tensor);
        }
    }

    /// Returns the tensor, without keeping a handle if `is_last`. It must not have been dropped.
    pub fn tensor(self: &Arc<Self>, offloader: Option<&Offloader<B>>, is_last: bool) -> B::Tensor {
        let mut content = self.content.lock();
        if let (Content::Leaving(_) | Content::Stored(..) | Content::Back(_), Some(offloader)) = (&*content, offloader)
        {
            offloader.is_loaded(self);
            or_stop(offloader.moves.bring_back(self, &mut content, Caller::OwnThread));
        }
        content.tensor(is_last).expect("a replay recomputes all held tensors")
    }
}

/// Maximum number of inputs on their way out at once, so that a slow disk does not determine memory use.
const MOST_LEAVING: usize = 2;

/// The offloader of a rank's block inputs.
pub struct Offloader<B: Backend> {
    moves: Arc<Moves<B>>,
    worker: Worker<Job<B>>,
}

/// The thread that moves a tensor holds nothing of its block, whose tensors belong to the rank's own thread.
struct Moves<B: Backend> {
    rank: Arc<Rank<B>>,
    /// Inputs that have left, in order, until they are loaded.
    left: Mutex<Vec<Weak<Movable<B>>>>,
    /// The number of inputs on their way out, and the reason why one failed.
    leaving: Mutex<(usize, Option<String>)>,
    arrived: Condvar,
}

enum Job<B: Backend> {
    Store(Weak<Movable<B>>),
    Fetch(Weak<Movable<B>>),
}

impl<B: Backend> Offloader<B> {
    /// Creates the offloader of `rank`, if inputs of blocks are to be kept elsewhere than with the backend.
    pub(crate) fn new(rank: &Arc<Rank<B>>) -> Option<Arc<Self>> {
        rank.activations_home(usize::MAX)?;
        let (left, leaving, arrived) = (Mutex::default(), Mutex::default(), Condvar::new());
        let moves = Arc::new(Moves { rank: rank.clone(), left, leaving, arrived });
        Some(Arc::new(Self { moves, worker: Worker::new(format!("rank-{}-activations", rank.place.rank)) }))
    }

    /// Stops the thread.
    pub(crate) fn stop(&self) {
        self.worker.stop();
    }

    /// Moves a tensor out of memory, if it is here and large enough. Waits while the maximum number is on the way.
    pub fn move_out(&self, movable: &Arc<Movable<B>>) {
        let moves = &self.moves;
        {
            let mut content = movable.content.lock();
            // Otherwise something else has needed it once already.
            let Content::Here(tensor) = &*content else { return };
            if moves.rank.activations_home(B::numel(tensor) * B::dtype(tensor).size()).is_none() {
                return;
            }
            // Leaving holds the only handle, so that the memory is free when the copy is complete.
            *content = match std::mem::replace(&mut *content, Content::Gone) {
                Content::Here(tensor) => Content::Leaving(Shared::new(tensor)),
                other => other,
            };
        }
        let mut leaving = moves.leaving.lock();
        while leaving.0 >= MOST_LEAVING && leaving.1.is_none() {
            if moves.arrived.wait_for(&mut leaving, moves.rank.deadline).timed_out() {
                leaving.1.get_or_insert_with(|| format!("timed out after {:?}", moves.rank.deadline));
            }
        }
        if let Some(reason) = leaving.1.take() {
            stop(format!("an activation checkpoint could not be offloaded: {reason}"));
        }
        leaving.0 += 1;
        drop(leaving);
        let weak = Arc::downgrade(movable);
        moves.left.lock().push(weak.clone());
        self.send(Job::Store(weak));
    }

    /// Notes that an input that has left is being loaded, and brings back the one that left before it.
    fn is_loaded(&self, movable: &Arc<Movable<B>>) {
        let mut left = self.moves.left.lock();
        let is_it = |left: &Weak<Movable<B>>| std::ptr::eq(left.as_ptr(), Arc::as_ptr(movable));
        let Some(place) = left.iter().rposition(is_it) else { return };
        left.remove(place);
        let is_held = |left: &Weak<Movable<B>>| left.strong_count() > 0;
        let before = left[..place].iter().rposition(is_held).map(|before| left[before].clone());
        // Drops those of passes that have ended.
        left.retain(is_held);
        drop(left);
        before.into_iter().for_each(|before| self.send(Job::Fetch(before)));
    }

    fn send(&self, job: Job<B>) {
        let moves = self.moves.clone();
        self.worker.send::<B>(job, move |inbox| inbox.into_iter().for_each(|job| moves.serve(job)));
    }
}

impl<B: Backend> Moves<B> {
    fn serve(&self, job: Job<B>) {
        let _span = tracing::trace_span!("move activations").entered();
        match job {
            Job::Store(movable) => {
                let done = catch_unwind(AssertUnwindSafe(|| self.store(&movable)));
                let failed = done.map_err(|panic| panic_reason(&*panic)).and_then(|done| done).err();
                let mut leaving = self.leaving.lock();
                leaving.0 -= 1;
                leaving.1 = leaving.1.take().or(failed);
                self.arrived.notify_all();
            }
            Job::Fetch(movable) => drop(catch_unwind(AssertUnwindSafe(|| self.fetch(&movable)))),
        }
    }

    fn store(&self, movable: &Weak<Movable<B>>) -> Result<(), String> {
        let Some(movable) = movable.upgrade() else { return Ok(()) };
        let leaving = match &*movable.content.lock() {
            Content::Leaving(shared) => shared.clone(),
            _ => return Ok(()),
        };
        let dtype = leaving.dtype();
        let Some(home) = self.rank.activations_home(leaving.numel() * dtype.size()) else { return Ok(()) };
        let stored = Stored::of(home, leaving, &self.rank.copier, None).map_err(|error| error.to_string())?;
        let mut content = movable.content.lock();
        if let (Content::Leaving(_), Ok(stored)) = (&*content, stored) {
            *content = Content::Stored(stored, dtype);
        }
        Ok(())
    }

    fn fetch(&self, movable: &Weak<Movable<B>>) {
        let Some(movable) = movable.upgrade() else { return };
        // Locked until the tensor has arrived: a thread that needs it waits here.
        let mut content = movable.content.lock();
        // A failure occurs again on the thread that needs the tensor.
        let _ = self.bring_back(&movable, &mut content, Caller::OtherThread);
    }

    /// Loads a stored tensor.
    fn bring_back(&self, movable: &Movable<B>, content: &mut Content<B>, who: Caller) -> Result<(), DiskError> {
        if let Content::Stored(stored, dtype) = content {
            let Movable { shape, device, .. } = movable;
            *content = Content::Back(fetch_shaped(stored, *dtype, Some(shape), device, &self.rank.copier, who)?);
        }
        Ok(())
    }
}
