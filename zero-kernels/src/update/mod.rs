//! Updates of parameters by their gradients: one pass over slices in host memory.

mod blocks;
mod elements;
mod pass;
mod rule;
mod state;

pub use blocks::{BLOCK, Layout};
pub use elements::Elements;
pub use pass::{Average, Chunk, Norms, Target, update_chunk};
pub use rule::{Kernel, Sweep};
pub use state::{State, step_key};
