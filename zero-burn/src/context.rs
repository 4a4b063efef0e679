//! The [`Runtime`] of the rank that a thread runs.
//!
//! There is one [`Context`] per rank and inner backend. A launch installs it on the rank's thread; a thread outside of a launch has the
//! process-wide context of a single rank. Cells know their rank, which leads here ([`Context::of`]). The thread-local context is used
//! where a tensor is created, and where a dense tensor is asked for its device.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Weak};

use burn_backend::Backend;
use parking_lot::Mutex;
use zero_core::window::WindowHost;
use zero_ops::quantized::Format;

use crate::abort::{stop, stop_foreign};
use crate::current::{CURRENT, Installed, PLACES, RUNNING};
use crate::device::ZeroDevice;
use crate::engine::{Cell, Runtime, burn_dtype, burn_shape};
use crate::random::Stream;
use crate::values::empty;

pub(crate) struct Context<B: Backend> {
    runtime: Runtime<B>,
    /// Loaded state that is still in use, by a hash of its content: equal states share one cell.
    pub(crate) loaded: Mutex<HashMap<u64, Weak<Cell<B>>>>,
}

impl<B: Backend> Deref for Context<B> {
    type Target = Runtime<B>;

    fn deref(&self) -> &Runtime<B> {
        &self.runtime
    }
}

/// The process-wide context of a single rank, for each inner backend.
static LONE: LazyLock<Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);

/// Guard that uninstalls the context of a rank's thread.
pub(crate) struct InstallGuard<B: Backend>(Arc<Context<B>>, u64);

impl<B: Backend> Drop for InstallGuard<B> {
    fn drop(&mut self) {
        let Self(context, place) = self;
        CURRENT.set(None);
        RUNNING.lock().remove(place);
        context.runtime.end();
    }
}

impl<B: Backend> Context<B> {
    pub(crate) fn new(runtime: Runtime<B>) -> Arc<Self> {
        let context = Arc::new(Self { runtime, loaded: Mutex::default() });
        let owner: Arc<dyn Any + Send + Sync> = context.clone();
        let _ = context.rank.owner.set(Arc::downgrade(&owner));
        context
    }

    /// Returns the context installed on this thread, if it belongs to a rank.
    fn installed() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)?.context.downcast().ok()
    }

    /// Returns the context of this thread: its rank's, or that of the single rank.
    pub(crate) fn current() -> Arc<Self> {
        Self::installed().unwrap_or_else(|| {
            let mut lone = LONE.lock();
            let context = lone
                .entry(TypeId::of::<B>())
                .or_insert_with(|| Self::new(Runtime::<B>::alone(B::Device::default(), WindowHost::default().alone())));
            context.clone().downcast::<Self>().expect("contexts are stored under their own type")
        })
    }

    /// Ends the run with an error if a thread that belongs to no rank creates a parameter of a rank: two such threads would number the
    /// rank's parameters in an order that differs from rank to rank.
    pub(crate) fn check_thread(device: &ZeroDevice<B::Device>) {
        if CURRENT.with_borrow(Option::is_none) && RUNNING.lock().contains_key(&device.place()) {
            let thread = std::thread::current();
            stop(format!(
                "a parameter of rank {} was created on thread {:?}, which the launch did not start: create the module \
                 on the thread that runs the body, or call zero_burn::module::prepare on it before your own threads \
                 use its parameters",
                device.rank(),
                thread.name().unwrap_or("unnamed")
            ));
        }
    }

    /// Returns the context of the rank that owns `device`. A thread started by the rank's body becomes the rank's, if it belonged to none;
    /// meanwhile the body waits for it, or does other work.
    pub(crate) fn of_device(device: &ZeroDevice<B::Device>) -> Arc<Self> {
        let is_free = CURRENT.with_borrow(Option::is_none);
        let running = is_free.then(|| RUNNING.lock().get(&device.place()).cloned()).flatten();
        if let Some(context) = running.and_then(|context| context.downcast::<Self>().ok()) {
            if !zero_ops::is_host::<B>() {
                let thread = std::thread::current();
                stop(format!(
                    "a module of rank {} was prepared or trained on thread {:?}, which the launch did not start: on a \
                     device, prepare and train it on the thread that runs the rank's body",
                    context.rank.index,
                    thread.name().unwrap_or("unnamed")
                ));
            }
            context.become_this_threads(device.place());
        }
        Self::current()
    }

    /// Returns the context of the rank that owns `cell`. Ends with an error on another rank's thread, and after the owner has ended.
    pub(crate) fn of(cell: &Cell<B>) -> Arc<Self> {
        let owner = || cell.rank.owner.get()?.upgrade()?.downcast().ok();
        match Self::installed() {
            Some(context) => Some(context).filter(|context| Arc::ptr_eq(&context.rank, &cell.rank)),
            None => owner(),
        }
        .unwrap_or_else(|| stop_foreign(&cell.shape))
    }

    /// Installs this context on the current thread until the guard is dropped.
    pub(crate) fn install(self: &Arc<Self>) -> InstallGuard<B> {
        let place = PLACES.fetch_add(1, Ordering::Relaxed);
        RUNNING.lock().insert(place, self.clone());
        self.become_this_threads(place);
        InstallGuard(self.clone(), place)
    }

    fn become_this_threads(self: &Arc<Self>, place: u64) {
        let device = Arc::new(self.rank.device.clone());
        CURRENT.set(Some(Installed { rank: self.rank.index, place, device, context: self.clone() }));
    }

    // ---- gathers ----

    /// Returns the full tensor of `cell`, in its own shape ([`Runtime::load`]).
    pub(crate) fn load(cell: &Arc<Cell<B>>) -> B::FloatTensorPrimitive {
        Self::gather(cell, cell.quantized())
    }

    /// Same as [`Context::load`], but exact for a parameter that is quantized for use.
    pub(crate) fn load_exact(cell: &Arc<Cell<B>>) -> B::FloatTensorPrimitive {
        Self::gather(cell, None)
    }

    fn gather(cell: &Arc<Cell<B>>, how: Option<Format>) -> B::FloatTensorPrimitive {
        let installed = Self::installed();
        if installed.as_ref().is_some_and(|installed| !Arc::ptr_eq(&installed.rank, &cell.rank)) {
            stop_foreign(&cell.shape);
        }
        cell.adopt();
        if cell.partition.is_empty() {
            return empty::<B>(&burn_shape(&cell.shape), burn_dtype(cell.dtype), &cell.device);
        }
        if cell.partition.is_whole() {
            return B::float_reshape(cell.local(), burn_shape(&cell.shape));
        }
        installed.unwrap_or_else(|| Self::of(cell)).runtime.load(cell, how)
    }

    // ---- random numbers ----

    /// Returns the random numbers of one draw for `device` (dropout, noise). They differ at every call and, once a module has been
    /// prepared, on every rank. Before that, modules are built, whose fixed random tensors must be equal on all ranks.
    ///
    /// Threads other than the rank's own, such as a data loader's, have numbers of their own, so that the rank's do not depend on their
    /// progress.
    pub(crate) fn draw(device: &ZeroDevice<B::Device>) -> Stream {
        let is_beside = CURRENT.with_borrow(Option::is_none);
        let running = is_beside.then(|| RUNNING.lock().get(&device.place()).cloned()).flatten();
        match running.map(|context| context.downcast::<Self>()) {
            Some(Ok(context)) => context.draw_on_another_thread(),
            _ => Self::current().runtime.draw(),
        }
    }
}
