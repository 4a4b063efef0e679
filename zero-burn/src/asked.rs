//! The device queries of this thread, which distinguish an optimizer's update from a loss.
//!
//! Burn's optimizers query a gradient's device and then its parameter's, before they compute the update (`OptimizerAdaptor` of burn-optim
//! 0.21). Nothing else shows the backend that an update begins. Operations make the same queries for their operands, but then use them
//! immediately ([`used`], [`computed`]).

use std::cell::RefCell;

use burn_std::Shape;
use zero_core::window::Key;

#[derive(Default)]
struct Asked {
    /// The shape of the ordinary tensor that was queried last, if nothing else was since.
    dense: Option<Shape>,
    /// The parameter that was queried right after an ordinary tensor of its shape.
    updated: Option<Key>,
}

thread_local! {
    static ASKED: RefCell<Asked> = RefCell::default();
}

/// Notes that an ordinary tensor's device is queried.
pub(crate) fn of_dense(shape: Shape) {
    ASKED.with_borrow_mut(|asked| asked.dense = Some(shape));
}

/// Notes that the device of a parameter of this shape and name is queried.
pub(crate) fn of_parameter(shape: &Shape, key: Option<Key>) {
    ASKED.with_borrow_mut(|asked| {
        let follows = asked.dense.take().is_some_and(|dense| dense == *shape);
        if follows || asked.updated != key {
            asked.updated = key.filter(|_| follows);
        }
    });
}

/// Notes that something is computed, or that another tensor's device is queried.
pub(crate) fn computed() {
    ASKED.with_borrow_mut(|asked| asked.dense = None);
}

/// Notes that the sharded tensor of this name is loaded.
pub(crate) fn used(key: Option<Key>) {
    ASKED.with_borrow_mut(|asked| {
        if key == asked.updated {
            asked.updated = None;
        }
    });
}

/// Returns whether an optimizer has just queried the parameter of this name.
pub(crate) fn is_updated(key: Option<Key>) -> bool {
    ASKED.with_borrow(|asked| asked.updated.is_some() && asked.updated == key)
}
