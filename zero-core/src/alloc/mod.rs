//! A global allocator for programs that allocate and free the same large blocks over and over, such as a training step on the CPU. It keeps
//! freed pages mapped, so that only the first steps incur page faults.
//!
//! **In:** the calls of [`GlobalAlloc`](std::alloc::GlobalAlloc). Requests below [`THRESHOLD`] bytes, or aligned to more than
//! [`MAX_ALIGN`], go to the allocator given to [`PageKeeper::new`]. The layout of a block alone decides which allocator owns it, so no
//! address is ever looked up.
//!
//! **Out:** blocks aligned to at least 4 KiB, taken from address ranges ("arenas") that the keeper maps and never unmaps. A freed block
//! returns to the keeper, which keeps its touched pages until [`PageKeeper::trim`] gives all free pages back to the system. Pages do not
//! expire over time: a program that ends a phase calls `trim`.
//!
//! **Bookkeeping memory:** the records of free ranges lie in a separate mapping, so the keeper never allocates through itself or through
//! the small allocator.
//!
//! **Threads:** any, behind one lock; memory is cleared and copied outside the lock. A child made by `fork` while another thread holds the
//! lock must not allocate before `exec` (`std::process::Command` does not).
//!
//! **Limits:** the first large request reserves 1 TiB of addresses (not memory), so a program that lowers its own `RLIMIT_AS` must do so
//! earlier. On 32-bit targets, every request goes to the small allocator.
//!
//! ```
//! use std::alloc::System;
//!
//! use zero_core::alloc::PageKeeper;
//!
//! #[global_allocator]
//! static ALLOCATOR: PageKeeper = PageKeeper::new(System);
//!
//! let buffer = vec![0_f32; 1 << 20];
//! drop(buffer);
//! let again = vec![0_f32; 1 << 20];
//! assert_eq!(ALLOCATOR.stats().reused_blocks, 1);
//! # drop(again);
//! ```

mod keeper;
mod space;
mod spans;
mod stats;
mod sys;

pub use keeper::{MAX_ALIGN, PageKeeper, Settings, THRESHOLD};
pub use stats::Stats;
