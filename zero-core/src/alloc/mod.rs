//! A global allocator for programs that allocate and free the same large blocks over and over, such as a training
//! step on the CPU: freed pages are kept mapped, so that only the first steps fault them in.
//!
//! **In:** the calls of [`GlobalAlloc`](std::alloc::GlobalAlloc). Requests below [`THRESHOLD`] bytes, or aligned to
//! more than [`MAX_ALIGN`], go to the allocator given to [`PageKeeper::new`]. Which one owns a block follows from its
//! layout alone, so no address is ever looked up.
//!
//! **Out:** blocks aligned to at least 4 KiB, cut from address ranges ("arenas") that the keeper maps and never
//! unmaps. A freed block belongs to the keeper again, touched pages and all, until [`PageKeeper::trim`] gives the
//! free ones back to the system. There is no decay with time: a program that ends a phase calls `trim`.
//!
//! **Memory of its own:** the records of free ranges lie in a mapping of their own, so the keeper never allocates
//! through itself nor through the small allocator.
//!
//! **Threads:** any, behind one lock; memory is cleared and copied outside of it. A child made by `fork` while another
//! thread holds the lock must not allocate before `exec` (`std::process::Command` does not).
//!
//! **Limits:** the first large request reserves 1 TiB of addresses (not memory), so a program that lowers its own
//! `RLIMIT_AS` must do so before. Where addresses have 32 bits every request goes to the small allocator.
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
