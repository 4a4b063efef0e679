//! Dropout's random numbers. Each draw has a key made of the seed, the rank and the draw's number; the key and an element's index decide
//! whether it is dropped. So masks are the same at every stage, in a resumed run and in `zero-burn`.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Device;
use parking_lot::Mutex;
use zero_core::random::sign;
use zero_kernels::options::AttentionDropout;

/// State from which a rank's draws resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) seed: u64,
    /// Number of draws so far.
    pub(crate) draws: u64,
}

/// The draws of a model on one rank.
#[derive(Debug)]
pub(crate) struct Draws {
    rank: u64,
    state: Mutex<State>,
}

impl Draws {
    pub(crate) fn new(seed: u64, rank: usize) -> Arc<Self> {
        Arc::new(Self { rank: rank as u64, state: Mutex::new(State { seed, draws: 0 }) })
    }

    pub(crate) fn state(&self) -> State {
        *self.state.lock()
    }

    pub(crate) fn set_state(&self, state: State) {
        *self.state.lock() = state;
    }

    /// Returns the key of the next draw.
    fn next(&self) -> u64 {
        let State { seed, draws } = &mut *self.state.lock();
        *draws += 1;
        sign(&[*seed, self.rank, *draws - 1])
    }
}

thread_local! {
    static PASS: RefCell<Option<Arc<Draws>>> = const { RefCell::new(None) };
}

/// Guard of a pass on this thread, which ends when it is dropped. Holds the enclosing pass's draws.
pub(crate) struct During(Option<Arc<Draws>>);

/// Begins a pass that draws from `draws`.
pub(crate) fn during(draws: &Arc<Draws>) -> During {
    During(PASS.replace(Some(draws.clone())))
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
    let key = PASS.with_borrow(|pass| pass.as_ref().map(|draws| draws.next()));
    let key = key.expect(
        "dropout in training needs Zero::backward: run the forward pass in its closure, or, to evaluate, use model.valid() on a device \
         without autodiff",
    );
    Some(AttentionDropout { probability, key })
}
