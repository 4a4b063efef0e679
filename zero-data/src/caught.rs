//! Panics of libraries as errors: code that reads untrusted files must not abort the program or print more than one message.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// True while a panic of this thread is returned as an error.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Returns the result of `run`, or the message of its panic, which is not printed.
pub(crate) fn caught<R>(run: impl FnOnce() -> R) -> Result<R, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !CAUGHT.get() {
                before(panic);
            }
        }));
    });
    let before = CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    CAUGHT.set(before);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref().copied());
        let text = text.unwrap_or("a panic");
        text.lines().next().unwrap_or_default().chars().take(200).collect()
    })
}
