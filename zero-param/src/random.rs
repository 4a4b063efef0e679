//! Dropout's random numbers. Each draw has a key made of the seed, the rank and the draw's number; the key and an element's index decide
//! whether it is dropped. So masks are the same at every stage, in a resumed run and in `zero-burn`.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Device;
use zero_kernels::options::AttentionDropout;

use crate::engine::Runtime;

thread_local! {
    static PASS: RefCell<Option<Arc<Runtime>>> = const { RefCell::new(None) };
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
    let key = PASS.with_borrow(|pass| pass.as_ref().map(|model| model.draw().key()));
    let key = key.expect(
        "dropout in training needs Zero::backward: run the forward pass in its closure, or, to evaluate, use model.valid() on a device \
         without autodiff",
    );
    Some(AttentionDropout { probability, key })
}
