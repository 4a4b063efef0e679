//! The order of gathers within a backward pass.
//!
//! Burn 0.22 runs the steps of a backward pass by their depth in the graph, deepest first. A gather's only parent is a leaf. At depth 1 all
//! gathers would run at the very end, and every full gradient would stay in memory until then. So each gather gets a second parent, a token
//! as deep as the graph is when the gather is recorded. The gather then runs as soon as everything recorded after it has run.
//!
//! A token is the end of a chain of empty nodes. Each gather extends the chain by the number of nodes that the pass has recorded since the
//! last gather. No node is deeper than the number of nodes before it, so the chain is never too short. Ranks that are threads count each
//! other's nodes too, which makes it longer than necessary. Each pass has its own chain, so a graph of another loss that outlives the pass
//! contains none of its nodes.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Flex};
use burn::tensor::{DType, Shape};

/// A longer chain would cost more than it saves.
const LONGEST: u64 = 1 << 20;

/// Empty nodes that all passes of the process have made. Relaxed: an estimate that orders nothing.
static TICKS: AtomicU64 = AtomicU64::new(0);

type Token = FloatTensor<Autodiff<Flex>>;

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

#[derive(Default)]
pub(crate) struct Pass {
    /// The end of the chain, in host memory whatever device the pass runs on.
    token: Option<Token>,
    length: u64,
    /// Result of [`nodes`] at the first gather.
    begin: u64,
}

/// Guard of a forward pass on this thread, which ends when it is dropped. Holds the enclosing pass.
pub(crate) struct Forward(Option<Pass>);

/// Begins a pass in which gathers are ordered.
pub(crate) fn forward() -> Forward {
    Forward(PASS.replace(Some(Pass::default())))
}

impl Drop for Forward {
    fn drop(&mut self) {
        PASS.set(self.0.take());
    }
}

/// Returns the number of nodes of the process so far, without empty ones.
fn nodes() -> u64 {
    let ticks = TICKS.load(Ordering::Relaxed);
    NodeId::new().value.saturating_sub(ticks)
}

#[derive(Debug)]
struct Tick;

impl Backward<Flex, 1> for Tick {
    type State = ();
    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// Returns a token as deep as the graph that the pass has recorded, or `None` outside of a pass.
pub(crate) fn tick() -> Option<Token> {
    PASS.with_borrow_mut(|pass| {
        let pass = pass.as_mut()?;
        let mut token = match pass.token.take() {
            Some(token) => token,
            None => {
                (pass.begin, pass.length) = (nodes(), 0);
                let scalar = Flex::float_zeros(Shape::new([1]), &Default::default(), DType::F32.into());
                Autodiff::<Flex>::float_set_require_grad(Autodiff::<Flex>::from_inner(scalar), true)
            }
        };
        let depth = nodes().saturating_sub(pass.begin).min(LONGEST);
        while pass.length < depth {
            let empty = Tick.prepare::<NoCheckpointing>([token.node()]).compute_bound();
            token = empty.stateless(token.into_primitive());
            TICKS.fetch_add(1, Ordering::Relaxed);
            pass.length += 1;
        }
        pass.token = Some(token.clone());
        Some(token)
    })
}
