//! Inputs of checkpointed blocks outside of the backend's memory: in host memory or on the disk (ZeRO's offload of activation checkpoints,
//! Rajbhandari et al. 2020, section 6.1, <https://arxiv.org/abs/1910.02054>).
//!
//! After a block, a thread of the rank moves the inputs that came from the previous block out of memory, while the next block is computed.
//! The backward pass reaches blocks in reverse order: loading an input makes the thread bring back the one that left before it, while the
//! rank computes. Nothing depends on that order: a thread that needs an input waits for it, or reads it itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use burn_backend::Backend;
use burn_std::{DType, Shape};
use parking_lot::{Condvar, Mutex};
use zero_core::collective::threads::panic_reason;

use super::Float;
use crate::abort::{or_stop, stop};
use crate::engine::{Caller, Inner, Rank, Shared, Stored, engine_dtype};
use crate::worker::Worker;
use zero_engine::tier::fetch_shaped;

/// The location of a slot's tensor.
pub(super) enum Content<B: Backend> {
    /// Nowhere: it can be recomputed.
    Gone,
    Here(Float<B>),
    /// Here until its copy is complete.
    Leaving(Shared<B>),
    Stored(Stored<B>),
    /// Here again, or kept here after all.
    Back(Shared<B>),
}

impl<B: Backend> Content<B> {
    /// Returns the tensor, if it is in the backend's memory, without keeping a handle if `is_last`.
    pub(super) fn tensor(&mut self, is_last: bool) -> Option<Float<B>> {
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
            Content::Gone | Content::Leaving(_) | Content::Stored(_) => None,
        }
    }
}

/// Maximum number of inputs on their way out at once, so that a slow disk does not determine memory use.
const MOST_LEAVING: usize = 2;

/// The offloader of a rank's block inputs.
pub(crate) struct Offloader<B: Backend> {
    moves: Arc<Moves<B>>,
    worker: Worker<Job<B>>,
}

struct Moves<B: Backend> {
    rank: Arc<Rank<B>>,
    /// Inputs that have left, in order, until they are loaded.
    left: Mutex<Vec<Moved<B>>>,
    /// The number of inputs on their way out, and the reason why one failed.
    leaving: Mutex<(usize, Option<String>)>,
    arrived: Condvar,
}

/// A tensor that is moved. The thread that moves it holds nothing of its block, whose tensors belong to the rank's own thread.
struct Moved<B: Backend> {
    content: Weak<Mutex<Content<B>>>,
    shape: Shape,
    dtype: DType,
    device: B::Device,
}

enum Job<B: Backend> {
    Store(Weak<Mutex<Content<B>>>),
    Fetch(Moved<B>),
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
    pub(super) fn move_out(&self, content: &Arc<Mutex<Content<B>>>, shape: &Shape, dtype: DType, device: &B::Device) {
        let moves = &self.moves;
        if moves.rank.activations_home(shape.num_elements() * dtype.size()).is_none() {
            return;
        }
        {
            let mut content = content.lock();
            match std::mem::replace(&mut *content, Content::Gone) {
                Content::Here(tensor) => *content = Content::Leaving(Shared::new(tensor)),
                // Something else has needed it once already.
                other => return *content = other,
            }
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
        let weak = Arc::downgrade(content);
        let moved = Moved { content: weak.clone(), shape: shape.clone(), dtype, device: device.clone() };
        moves.left.lock().push(moved);
        self.send(Job::Store(weak));
    }

    /// Loads the stored tensor for the calling thread.
    pub(super) fn fetch(&self, stored: &Stored<B>, shape: &Shape, dtype: DType, device: &B::Device) -> Shared<B> {
        or_stop(fetch_shaped(
            stored,
            engine_dtype(dtype),
            Some(shape.as_slice()),
            device,
            &self.moves.rank.copier,
            Caller::OwnThread,
        ))
    }

    /// Notes that an input that has left is being loaded, and brings back the one that left before it.
    pub(super) fn is_loaded(&self, content: &Arc<Mutex<Content<B>>>) {
        let mut left = self.moves.left.lock();
        let is_it = |moved: &Moved<B>| std::ptr::eq(moved.content.as_ptr(), Arc::as_ptr(content));
        let Some(place) = left.iter().rposition(is_it) else { return };
        left.remove(place);
        let is_held = |moved: &Moved<B>| moved.content.strong_count() > 0;
        let before = left[..place].iter().rposition(is_held);
        let wanted = before.map(|before| {
            let Moved { content, shape, dtype, device } = &left[before];
            Moved { content: content.clone(), shape: shape.clone(), dtype: *dtype, device: device.clone() }
        });
        // Drops those of passes that have ended.
        left.retain(is_held);
        drop(left);
        wanted.into_iter().for_each(|wanted| self.send(Job::Fetch(wanted)));
    }

    fn send(&self, job: Job<B>) {
        let moves = self.moves.clone();
        self.worker.send::<Inner<B>>(job, move |inbox| inbox.into_iter().for_each(|job| moves.serve(job)));
    }
}

impl<B: Backend> Moves<B> {
    fn serve(&self, job: Job<B>) {
        let _span = tracing::trace_span!("move activations").entered();
        match job {
            Job::Store(content) => {
                let done = catch_unwind(AssertUnwindSafe(|| self.store(&content)));
                let failed = done.map_err(|panic| panic_reason(&*panic)).and_then(|done| done).err();
                let mut leaving = self.leaving.lock();
                leaving.0 -= 1;
                leaving.1 = leaving.1.take().or(failed);
                self.arrived.notify_all();
            }
            // An error occurs again on the thread that needs the tensor.
            Job::Fetch(moved) => drop(catch_unwind(AssertUnwindSafe(|| self.fetch(&moved)))),
        }
    }

    fn store(&self, content: &Weak<Mutex<Content<B>>>) -> Result<(), String> {
        let Some(content) = content.upgrade() else { return Ok(()) };
        let leaving = match &*content.lock() {
            Content::Leaving(shared) => shared.clone(),
            _ => return Ok(()),
        };
        let bytes = leaving.numel() * leaving.dtype().size();
        let Some(home) = self.rank.activations_home(bytes) else { return Ok(()) };
        let stored = Stored::of(home, leaving, &self.rank.copier, None).map_err(|error| error.to_string())?;
        let mut content = content.lock();
        if let (Content::Leaving(_), Ok(stored)) = (&*content, stored) {
            *content = Content::Stored(stored);
        }
        Ok(())
    }

    fn fetch(&self, moved: &Moved<B>) {
        let Some(content) = moved.content.upgrade() else { return };
        // Locked until the tensor has arrived: a thread that needs it waits here.
        let mut content = content.lock();
        let Moved { shape, dtype, device, .. } = moved;
        if let Content::Stored(stored) = &*content
            && let Ok(back) = fetch_shaped(
                stored,
                engine_dtype(*dtype),
                Some(shape.as_slice()),
                device,
                &self.rank.copier,
                Caller::OtherThread,
            )
        {
            *content = Content::Back(back);
        }
    }
}
