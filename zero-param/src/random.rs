//! Dropout's random numbers: each draw has a key of the seed, the rank and the draw's number, and an element's fate follows from that and
//! its place. So they are the same at every stage and in a resumed run, and those of the front for Burn 0.21.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Device;
use parking_lot::Mutex;
use zero_core::random::sign;
use zero_kernels::options::AttentionDropout;

/// What a rank's draws resume from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) seed: u64,
    /// So far.
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

    /// The key of the next.
    fn next(&self) -> u64 {
        let State { seed, draws } = &mut *self.state.lock();
        *draws += 1;
        sign(&[*seed, self.rank, *draws - 1])
    }
}

thread_local! {
    static PASS: RefCell<Option<Arc<Draws>>> = const { RefCell::new(None) };
}

/// A pass on this thread, until it is dropped; with the one that it is within.
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

/// Which elements the next draw drops, each with `probability`; none where nothing is trained: on a `device` without autodiff, or where the
/// probability is 0. For [`AttentionOptions::dropout`](crate::AttentionOptions::dropout); [`dropout`](crate::dropout) draws by itself.
///
/// # Panics
///
/// If the probability is not in `[0, 1)`; with autodiff outside of [`Zero::backward`](crate::Zero::backward), whose model counts the draws.
pub fn draw_dropout(probability: f64, device: &Device) -> Option<AttentionDropout> {
    assert!((0.0..1.0).contains(&probability), "dropout: its probability is {probability}; pass one from 0 to below 1");
    if probability == 0.0 || !device.is_autodiff() {
        return None;
    }
    let key = PASS.with_borrow(|pass| pass.as_ref().map(|draws| draws.next()));
    let key = key.expect(
        "dropout: it draws from the model that is trained, within Zero::backward: run the forward pass there, or, to evaluate, that of \
         model.valid() on a device without autodiff",
    );
    Some(AttentionDropout { probability, key })
}
