//! Dropout's random numbers. Each draw has a key made of the seed, the rank and the draw's number; the key and an element's index decide
//! whether it is dropped. So masks are the same at every stage, in a resumed run and in `zero-burn`.

use std::cell::RefCell;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use parking_lot::Mutex;
use zero_engine::abort::stop;
use zero_kernels::options::AttentionDropout;

use crate::engine::Runtime;

thread_local! {
    static PASS: RefCell<Option<Arc<Runtime>>> = const { RefCell::new(None) };
    static KEYS: RefCell<Keys> = const { RefCell::new(Keys::Drawn) };
}

/// The source of keys.
enum Keys {
    Drawn,
    /// Drawn, for a block that will run again.
    Noted(Vec<u64>),
    /// Drawn in the block's first run.
    Given(std::vec::IntoIter<u64>),
}

/// Returns the model whose pass this thread runs.
pub(crate) fn model() -> Option<Arc<Runtime>> {
    PASS.with_borrow(Clone::clone)
}

/// Runs `f` and returns its result with the keys that it has drawn.
pub(crate) fn noted<T>(f: impl FnOnce() -> T) -> (T, Vec<u64>) {
    let (value, keys) = with(Keys::Noted(Vec::new()), f);
    (value, if let Keys::Noted(keys) = keys { keys } else { Vec::new() })
}

/// Runs `f` with the keys of an earlier run. Returns its result, and whether it has used all of them.
pub(crate) fn given<T>(keys: Vec<u64>, f: impl FnOnce() -> T) -> (T, bool) {
    let (value, keys) = with(Keys::Given(keys.into_iter()), f);
    (value, matches!(keys, Keys::Given(left) if left.len() == 0))
}

fn with<T>(keys: Keys, f: impl FnOnce() -> T) -> (T, Keys) {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            KEYS.set(Keys::Drawn);
        }
    }
    let end = End;
    KEYS.set(keys);
    let value = f();
    let keys = KEYS.replace(Keys::Drawn);
    drop(end);
    (value, keys)
}

/// Guard of a pass on this thread, which ends when it is dropped. Holds the enclosing pass's model.
pub(crate) struct During(Option<Arc<Runtime>>);

/// Begins a pass of a model, whose random numbers it draws.
pub(crate) fn during(model: &Arc<Runtime>) -> During {
    During(PASS.replace(Some(model.clone())))
}

impl Drop for During {
    fn drop(&mut self) {
        PASS.set(self.0.take());
    }
}

/// Draws which elements to drop, each with `probability`; `None` on a `device` without autodiff, where nothing is trained, or for
/// probability 0. For [`AttentionOptions::dropout`](crate::AttentionOptions::dropout); [`dropout`](crate::dropout) draws by itself.
///
/// # Panics
///
/// If the probability is not in `[0, 1)`; with autodiff outside of [`Zero::backward`](crate::Zero::backward), as the sharded model counts
/// the draws.
pub fn draw_dropout(probability: f64, device: &Device) -> Option<AttentionDropout> {
    assert!((0.0..1.0).contains(&probability), "dropout: the probability is {probability}; pass one in [0, 1)");
    if probability == 0.0 || !device.is_autodiff() {
        return None;
    }
    let key = KEYS.with_borrow_mut(|keys| {
        let draw = || model().map(|model| model.draw().key());
        match keys {
            Keys::Drawn => draw(),
            Keys::Noted(noted) => draw().inspect(|&key| noted.push(key)),
            Keys::Given(given) => Some(given.next().unwrap_or_else(|| {
                stop(
                    "a checkpointed block draws more random numbers when it runs again: let each run draw as many"
                        .into(),
                )
            })),
        }
    });
    let key = key.expect(
        "dropout in training needs Zero::backward: run the forward pass in its closure, or, to evaluate, use model.valid() on a device \
         without autodiff",
    );
    Some(AttentionDropout { probability, key })
}

/// Builds a module and initializes all of its parameters, with Burn's random numbers from `seed`. Ranks that are threads share these numbers,
/// so one of them builds at a time, and all get the same values.
pub fn initialize<M: Module>(build: impl FnOnce() -> M, seed: u64, device: &Device) -> M {
    struct Initialize;

    impl ModuleMapper for Initialize {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, tensor, mapper)
        }
    }

    static DRAWING: Mutex<()> = Mutex::new(());
    let _drawing = DRAWING.lock();
    device.seed(seed);
    build().map(&mut Initialize)
}
