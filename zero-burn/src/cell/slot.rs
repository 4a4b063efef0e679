//! Parameters, as all ranks number and name them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use burn_backend::distributed::DistributedParamId;
use burn_backend::{Backend, Distribution};
use burn_std::{DType, Shape};
use parking_lot::Mutex;
use zero_core::Partition;
use zero_core::window::Key;
use zero_ops::quantized::Format;

use super::{Cell, DERIVED};
use crate::random::{Stream, sign};

/// A parameter's identity, the same on every rank: its number is the order of its birth.
pub(crate) struct Slot<B: Backend> {
    pub(crate) index: u64,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// The cut of the parameter's optimizer state (whole at stage 0).
    pub(crate) partition: Partition,
    /// Later is laid out first when gradients are reduced: the place in the module, from 1, as `prepare` has found it (0
    /// before), then the place from the end of a backward pass.
    pub(crate) place: AtomicU64,
    /// From what its first values were drawn.
    pub(crate) drawn: OnceLock<Drawn>,
    /// The version that has these: the first, or the one that `prepare` has drawn again.
    pub(crate) drawn_version: AtomicU64,
    /// Names of what belongs to this parameter.
    pub(crate) names: Mutex<Names>,
    /// Whether the parameter stays in memory although others are on the disk.
    pub(crate) resident: bool,
    /// Whether its optimizer state stays with the backend although others' is elsewhere, as `prepare` has it.
    pub(crate) state_stays: AtomicBool,
    /// Whether its reduced gradient does.
    pub(crate) gradient_stays: AtomicBool,
    /// Whether this rank counts it in norms over a mesh's axes: one of those among which it is replicated does.
    pub(crate) is_counted: AtomicBool,
    /// Whether all places on the mesh's expert axis have it, and its gradients are averaged over the axis.
    pub(crate) is_averaged: AtomicBool,
    /// The version that the module holds, as far as it is known here.
    pub(crate) current: Mutex<Weak<Cell<B>>>,
    /// The identity that it was prepared under.
    pub(crate) id: OnceLock<DistributedParamId>,
    /// How it is gathered where it is used, if not as it is: when it is trained, and when it is frozen.
    pub(crate) formats: [Option<Format>; 2],
    /// Which of both it is, as `prepare` has found it.
    pub(crate) is_frozen: AtomicBool,
    /// The version of which a gradient was last reduced; 0 before the first.
    pub(crate) reduced_version: AtomicU64,
    /// True if a program had put an ordinary tensor in its place, alike on all ranks, when gradients were last collected.
    pub(crate) is_edited: AtomicBool,
}

/// What a parameter's first values were drawn from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Drawn {
    pub(crate) seed: u64,
    /// Parameters born since that seed.
    pub(crate) birth: u64,
    /// The part of a whole that it is, where places on foreign axes have others.
    pub(crate) part: Option<u64>,
    pub(crate) distribution: Distribution,
}

impl Drawn {
    /// The same numbers on every rank of the part, for any number of ranks and any type.
    pub(crate) fn stream(&self) -> Stream {
        Stream::of_parameter(self.seed, self.birth, self.part)
    }
}

/// Gives every piece that belongs to a parameter a name that is the same on every rank.
///
/// Versions of the parameter are numbered. Gradients and optimizer state are named by the version they were made after
/// and by their *signature*, what operations made them of what, so that it does not matter in which order ranks visit
/// their parameters, nor that one rank computes something else besides for its log.
#[derive(Default)]
pub(crate) struct Names {
    /// Versions so far.
    epoch: u64,
    /// Pieces of each signature since the last version.
    ordinals: HashMap<u64, u64>,
}

/// The bit of a name that sets a parameter's second cut apart from the parameter.
const SECONDARY: u64 = 1 << 62;
/// The one that sets the codes of its pieces apart.
const CODES: u64 = 1 << 61;

impl Names {
    /// The name of the next version of parameter `index`.
    pub(crate) fn version(&mut self, index: u64) -> Key {
        self.epoch += 1;
        self.ordinals.clear();
        Key { object: index, version: self.epoch }
    }

    /// The name of a new piece with `signature`.
    pub(crate) fn derived(&mut self, index: u64, signature: u64) -> Key {
        let ordinal = self.ordinals.entry(signature).or_insert(0);
        *ordinal += 1;
        Key { object: sign(&[index, signature, *ordinal]) | DERIVED, version: self.epoch }
    }

    /// The name of the second cut of a version.
    pub(crate) fn secondary(version: Key) -> Key {
        Key { object: version.object | SECONDARY, ..version }
    }

    /// The name of the codes of a version's pieces.
    pub(crate) fn codes(version: Key) -> Key {
        Key { object: version.object | CODES, ..version }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl<B: Backend> Slot<B> {
    /// How it is gathered where it is used, if not as it is.
    pub(crate) fn quantized(&self) -> Option<Format> {
        self.formats[usize::from(self.is_frozen.load(Ordering::Relaxed))]
    }
}

impl<B: Backend> core::fmt::Display for Slot<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "parameter {} {:?}", self.index, self.shape.as_slice())
    }
}

/// The parameters of a rank.
pub(crate) struct Parameters<B: Backend> {
    /// Numbers given so far.
    numbered: AtomicU64,
    /// Those that `prepare` has seen, by number: the same on every rank.
    slots: Mutex<BTreeMap<u64, Arc<Slot<B>>>>,
    /// By the identity that Burn gives a parameter. Modules that were loaded from one record have the same.
    ids: Mutex<HashMap<DistributedParamId, Vec<Weak<Slot<B>>>>>,
    /// Elements of those born so far, a piece of each.
    born_elements: AtomicU64,
}

impl<B: Backend> Default for Parameters<B> {
    fn default() -> Self {
        let (slots, ids) = (Mutex::default(), Mutex::default());
        Self { numbered: AtomicU64::new(0), slots, ids, born_elements: AtomicU64::new(0) }
    }
}

impl<B: Backend> Parameters<B> {
    /// Whether a piece of so many elements, and all born before it, are no more than `most`.
    pub(crate) fn is_resident(&self, elements: usize, most: usize) -> bool {
        self.born_elements.fetch_add(elements as u64, Ordering::Relaxed) as usize + elements <= most
    }

    /// Numbers a parameter.
    pub(crate) fn number(
        &self,
        (shape, dtype): (Shape, DType),
        partition: Partition,
        resident: bool,
        formats: [Option<Format>; 2],
    ) -> Arc<Slot<B>> {
        Arc::new(Slot {
            index: self.numbered.fetch_add(1, Ordering::Relaxed),
            partition,
            resident,
            state_stays: AtomicBool::new(false),
            gradient_stays: AtomicBool::new(false),
            is_counted: AtomicBool::new(true),
            is_averaged: AtomicBool::new(false),
            formats,
            is_frozen: AtomicBool::new(false),
            reduced_version: AtomicU64::new(0),
            is_edited: AtomicBool::new(false),
            shape,
            dtype,
            place: AtomicU64::new(0),
            drawn: OnceLock::new(),
            drawn_version: AtomicU64::new(1),
            names: Mutex::default(),
            current: Mutex::new(Weak::new()),
            id: OnceLock::new(),
        })
    }

    /// Parameter `index`, if `prepare` has seen it and it was not found to be gone since.
    pub(crate) fn slot(&self, index: u64) -> Option<Arc<Slot<B>>> {
        self.slots.lock().get(&index).cloned()
    }

    /// The parameters that `prepare` has seen, in the order of their numbers.
    pub(crate) fn slots(&self) -> Vec<Arc<Slot<B>>> {
        self.slots.lock().values().cloned().collect()
    }

    /// The version of parameter `index` that is in use.
    pub(crate) fn current_version(&self, index: u64) -> Option<Arc<Cell<B>>> {
        self.slot(index)?.current.lock().upgrade()
    }

    pub(crate) fn name(&self, id: DistributedParamId, slot: Arc<Slot<B>>) {
        let mut ids = self.ids.lock();
        let known = ids.entry(id).or_default();
        let is_other = |known: Arc<Slot<B>>| known.index != slot.index && known.current.lock().strong_count() > 0;
        known.retain(|known| known.upgrade().is_some_and(is_other));
        known.push(Arc::downgrade(&slot));
        self.slots.lock().insert(slot.index, slot);
    }

    /// The parameters of this identity, the last one first: more than one only if several modules have it.
    pub(crate) fn slots_of(&self, id: DistributedParamId) -> Vec<Arc<Slot<B>>> {
        self.ids.lock().get(&id).map_or_else(Vec::new, |slots| slots.iter().rev().filter_map(Weak::upgrade).collect())
    }

    /// The parameters that `prepare` has seen, and for each whether nothing here belongs to it any more.
    pub(crate) fn dropped(&self) -> (Vec<u64>, Vec<u8>) {
        let is_dropped = |slot: &Arc<Slot<B>>| u8::from(Arc::strong_count(slot) == 1);
        self.slots.lock().iter().map(|(&index, slot)| (index, is_dropped(slot))).unzip()
    }

    /// Forgets a parameter that is gone on all ranks.
    pub(crate) fn forget(&self, index: u64) {
        self.slots.lock().remove(&index);
        self.ids.lock().retain(|_, slots| slots.iter().any(|slot| slot.strong_count() > 0));
    }
}
