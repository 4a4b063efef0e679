//! The progress bar of the feature `cli`. Without the feature there is none.

use std::cell::Cell;

/// The steps done, shown on a terminal.
pub(super) struct Bar {
    step: Cell<usize>,
    #[cfg(feature = "cli")]
    shown: indicatif::ProgressBar,
}

impl Bar {
    /// Creates a bar of `steps` steps, of which `done` are completed, with a first message.
    #[cfg_attr(not(feature = "cli"), allow(unused_variables))]
    pub(super) fn new(is_shown: bool, steps: usize, done: usize, message: &'static str) -> Self {
        #[cfg(feature = "cli")]
        let shown = {
            use indicatif::{ProgressBar, ProgressStyle};
            let shown = if is_shown { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
            shown.set_style(
                ProgressStyle::with_template("{bar:24} {pos}/{len} steps  {msg}  [{elapsed} < {eta}]")
                    .expect("the template is a constant"),
            );
            shown.set_position(done as u64);
            shown.set_message(message);
            shown.enable_steady_tick(std::time::Duration::from_millis(500));
            shown
        };
        Self {
            step: Cell::new(done),
            #[cfg(feature = "cli")]
            shown,
        }
    }

    pub(super) fn is_hidden(&self) -> bool {
        #[cfg(feature = "cli")]
        return self.shown.is_hidden();
        #[cfg(not(feature = "cli"))]
        true
    }

    /// Counts a step.
    #[cfg_attr(not(feature = "cli"), allow(unused_variables))]
    pub(super) fn step(&self, message: impl FnOnce() -> String) {
        self.step.set(self.step.get() + 1);
        #[cfg(feature = "cli")]
        {
            self.shown.set_message(message());
            self.shown.inc(1);
        }
    }

    pub(super) fn steps(&self) -> usize {
        self.step.get()
    }

    /// Prints while the bar is hidden.
    pub(super) fn suspend(&self, print: impl FnOnce()) {
        #[cfg(feature = "cli")]
        return self.shown.suspend(print);
        #[cfg(not(feature = "cli"))]
        print()
    }

    pub(super) fn clear(&self) {
        #[cfg(feature = "cli")]
        self.shown.finish_and_clear();
    }
}
