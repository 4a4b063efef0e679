//! Parameters, as all ranks number and name them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use zero_core::Partition;
use zero_core::window::Key;
use zero_kernels::quantized::Format;

use super::{Cell, DERIVED};
use crate::backend::{Backend, DType, Shape};
use crate::random::sign;

/// A parameter's identity, the same on every rank: parameters are numbered in the order of their creation.
pub struct Slot<B: Backend> {
    /// Its number, from 0.
    pub index: u64,
    /// The full tensor's shape.
    pub shape: Shape,
    /// The type in which the model computes with it.
    pub dtype: DType,
    /// Partition of the parameter's optimizer state (a single shard at stage 0).
    pub partition: Partition,
    /// Names of the tensors that belong to this parameter.
    pub names: Mutex<Names>,
    /// The version that the module holds, as far as it is known here.
    pub current: Mutex<Weak<Cell<B>>>,
    /// The identity that it was prepared under.
    pub id: OnceLock<B::ParamId>,
    /// Its path in the module, for messages.
    pub path: OnceLock<String>,
    /// The origin of its first values.
    pub draw: Draw<B>,
    /// The reduction of its gradients.
    pub reduction: Reduction,
    /// Its exceptions from offload.
    pub offload: Offload,
    /// Its place on the axes of a mesh.
    pub mesh: OnMesh,
    /// The formats in which it is gathered.
    pub quantization: Quantization,
}

/// The origin of a parameter's first values.
pub struct Draw<B: Backend> {
    /// The draw that its first values came from.
    pub first: OnceLock<B::Draw>,
    /// The version that holds these values: the first (1), or the one that `prepare` has redrawn.
    pub version: AtomicU64,
}

/// The reduction of a parameter's gradients.
#[derive(Default)]
pub struct Reduction {
    /// Order of layout in the gradient buckets, highest first: the position in the module, from 1, as `prepare` has found it (0 before),
    /// then the position from the end of a backward pass.
    pub layout: AtomicU64,
    /// The version whose gradient was reduced last; 0 before the first.
    pub reduced_version: AtomicU64,
    /// True if, when gradients were last collected, the program had replaced it by an ordinary tensor, on all ranks alike.
    pub is_edited: AtomicBool,
}

/// Exceptions from offload.
#[derive(Default)]
pub struct Offload {
    /// True if the parameter stays in memory although others are on the disk.
    pub resident: bool,
    /// True if its optimizer state stays with the backend although others' is offloaded, as `prepare` has decided.
    pub state_stays: AtomicBool,
    /// True if its reduced gradient stays with the backend, likewise.
    pub gradient_stays: AtomicBool,
}

/// A parameter on the axes of a mesh.
pub struct OnMesh {
    /// True if this rank counts it in norms over a mesh's axes: one of the ranks that replicate it does.
    pub is_counted: AtomicBool,
    /// True if all places on the mesh's expert axis hold it, so that its gradients are averaged over the axis.
    pub is_averaged: AtomicBool,
}

/// Quantized gathers of a parameter.
#[derive(Default)]
pub struct Quantization {
    /// Formats in which it is gathered for use, if it is quantized: while it is trained, and while it is frozen.
    pub formats: [Option<Format>; 2],
    /// True if it is frozen, as `prepare` has found it.
    pub is_frozen: AtomicBool,
}

/// The names of the shards that belong to a parameter, the same on every rank.
///
/// Versions of the parameter are numbered. Gradients and optimizer state are named by the version after which they were created and by
/// their *signature*: the operations and operands that they come from. So a rank may visit its parameters in any order, and compute
/// something extra for its log.
#[derive(Default)]
pub struct Names {
    /// Number of versions so far.
    epoch: u64,
    /// Number of shards with each signature since the last version.
    ordinals: HashMap<u64, u64>,
}

/// Bit of a key's object number that distinguishes a parameter's secondary shard from the parameter.
const SECONDARY: u64 = 1 << 62;
/// Bit that distinguishes the codes of its shards.
const CODES: u64 = 1 << 61;

impl Names {
    /// Returns the name of the next version of parameter `index`.
    pub fn version(&mut self, index: u64) -> Key {
        self.epoch += 1;
        self.ordinals.clear();
        Key { object: index, version: self.epoch }
    }

    /// Returns the name of a new shard with `signature`.
    pub fn derived(&mut self, index: u64, signature: u64) -> Key {
        let ordinal = self.ordinals.entry(signature).or_insert(0);
        *ordinal += 1;
        Key { object: sign(&[index, signature, *ordinal]) | DERIVED, version: self.epoch }
    }

    /// Returns the name of the secondary shard of a version.
    pub fn secondary(version: Key) -> Key {
        Key { object: version.object | SECONDARY, ..version }
    }

    /// Returns the name of the codes of a version's shards.
    pub fn codes(version: Key) -> Key {
        Key { object: version.object | CODES, ..version }
    }

    /// Returns the number of versions so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl<B: Backend> Slot<B> {
    /// Returns the format in which it is gathered for use, or `None` if it is not quantized.
    pub fn quantized(&self) -> Option<Format> {
        let Quantization { formats, is_frozen } = &self.quantization;
        formats[usize::from(is_frozen.load(Ordering::Relaxed))]
    }
}

impl<B: Backend> core::fmt::Display for Slot<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.path.get() {
            Some(path) => write!(f, "parameter '{path}' {:?}", &self.shape[..]),
            None => write!(f, "parameter {} {:?}", self.index, &self.shape[..]),
        }
    }
}

/// The parameters with one identity, latest last.
type Known<B> = Vec<Weak<Slot<B>>>;

/// The parameters of a rank.
pub struct Parameters<B: Backend> {
    /// Number of parameters numbered so far.
    numbered: AtomicU64,
    /// The parameters that `prepare` has seen, by number: the same on every rank.
    slots: Mutex<BTreeMap<u64, Arc<Slot<B>>>>,
    /// The parameters by the identity that the tensor library gives them. Modules loaded from one record share identities.
    ids: Mutex<HashMap<B::ParamId, Known<B>>>,
    /// Number of elements in one shard of each parameter created so far.
    born_elements: AtomicU64,
}

impl<B: Backend> Default for Parameters<B> {
    fn default() -> Self {
        let (slots, ids) = (Mutex::default(), Mutex::default());
        Self { numbered: AtomicU64::new(0), slots, ids, born_elements: AtomicU64::new(0) }
    }
}

impl<B: Backend> Parameters<B> {
    /// Adds a shard of `elements` elements, and returns whether all shards added so far have at most `most` elements.
    pub fn is_resident(&self, elements: usize, most: usize) -> bool {
        self.born_elements.fetch_add(elements as u64, Ordering::Relaxed) as usize + elements <= most
    }

    /// Numbers the parameters from `first` on: several runtimes of one rank share a window, in which a number has one meaning.
    pub fn number_from(&self, first: u64) {
        self.numbered.store(first, Ordering::Relaxed);
    }

    /// Creates the slot of a parameter under the next number.
    pub fn number(
        &self,
        (shape, dtype): (Shape, DType),
        partition: Partition,
        resident: bool,
        formats: [Option<Format>; 2],
    ) -> Arc<Slot<B>> {
        Arc::new(Slot {
            index: self.numbered.fetch_add(1, Ordering::Relaxed),
            shape,
            dtype,
            partition,
            names: Mutex::default(),
            current: Mutex::new(Weak::new()),
            id: OnceLock::new(),
            path: OnceLock::new(),
            draw: Draw { first: OnceLock::new(), version: AtomicU64::new(1) },
            reduction: Reduction::default(),
            offload: Offload { resident, ..Offload::default() },
            mesh: OnMesh { is_counted: AtomicBool::new(true), is_averaged: AtomicBool::new(false) },
            quantization: Quantization { formats, ..Quantization::default() },
        })
    }

    /// Returns parameter `index`, if `prepare` has seen it and it has not been forgotten since.
    pub fn slot(&self, index: u64) -> Option<Arc<Slot<B>>> {
        self.slots.lock().get(&index).cloned()
    }

    /// Returns the parameters that `prepare` has seen, in the order of their numbers.
    pub fn slots(&self) -> Vec<Arc<Slot<B>>> {
        self.slots.lock().values().cloned().collect()
    }

    /// Returns the version of parameter `index` that is in use.
    pub fn current_version(&self, index: u64) -> Option<Arc<Cell<B>>> {
        self.slot(index)?.current.lock().upgrade()
    }

    /// Makes the parameter known to all ranks, under the identity `id`.
    pub fn name(&self, id: B::ParamId, slot: Arc<Slot<B>>) {
        let mut ids = self.ids.lock();
        let known = ids.entry(id).or_default();
        let is_other = |known: Arc<Slot<B>>| known.index != slot.index && known.current.lock().strong_count() > 0;
        known.retain(|known| known.upgrade().is_some_and(is_other));
        known.push(Arc::downgrade(&slot));
        self.slots.lock().insert(slot.index, slot);
    }

    /// Returns the parameters with this identity, latest first: more than one only if several modules share it.
    pub fn slots_of(&self, id: B::ParamId) -> Vec<Arc<Slot<B>>> {
        self.ids.lock().get(&id).map_or_else(Vec::new, |slots| slots.iter().rev().filter_map(Weak::upgrade).collect())
    }

    /// Returns the parameters that `prepare` has seen, and for each whether nothing refers to it any more.
    pub fn dropped(&self) -> (Vec<u64>, Vec<u8>) {
        let is_dropped = |slot: &Arc<Slot<B>>| u8::from(Arc::strong_count(slot) == 1);
        self.slots.lock().iter().map(|(&index, slot)| (index, is_dropped(slot))).unzip()
    }

    /// Forgets a parameter that was dropped on all ranks.
    pub fn forget(&self, index: u64) {
        self.slots.lock().remove(&index);
        self.ids.lock().retain(|_, slots| slots.iter().any(|slot| slot.strong_count() > 0));
    }
}
