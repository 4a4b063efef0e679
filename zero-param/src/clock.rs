//! The order of gathers in a backward pass.
//!
//! Burn 0.22 runs the steps of a backward pass by their depth in the graph, deepest first. A gather has no parents but a leaf: at
//! depth 1 all would be run at the very end, and every gradient would stay whole until then. So each gets a second parent, a
//! token as deep as the graph is where the gather is recorded: then it is run as soon as all that was recorded after it has been.
//!
//! A token is the end of a chain of empty nodes, which is made longer by as many as the pass has recorded since the last gather.
//! No node is deeper than there are nodes before it, so the chain is never too short; ranks that are threads count one
//! another's nodes too, which makes it longer than need be. The chain is of one pass: a graph that outlives it, of another
//! loss, has none of its nodes.

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

/// Empty nodes that all passes of the process have made. Relaxed: an estimate, it orders nothing.
static TICKS: AtomicU64 = AtomicU64::new(0);

type Token = FloatTensor<Autodiff<Flex>>;

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Pass {
    /// The end of the chain, in the host's memory wherever the pass is.
    token: Option<Token>,
    length: u64,
    /// What nodes were numbered, less empty ones, at the first gather.
    begin: u64,
}

/// A forward pass on this thread, until it is dropped.
pub(crate) struct Forward(());

/// Begins a pass, in which gathers are ordered.
pub(crate) fn forward() -> Forward {
    PASS.set(Some(Pass::default()));
    Forward(())
}

impl Drop for Forward {
    fn drop(&mut self) {
        PASS.set(None);
    }
}

/// Nodes of the process so far, without empty ones.
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

/// A token as deep as what the pass has recorded; none outside of a pass.
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
