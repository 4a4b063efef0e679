//! LAMB over shards, by the kernel that `zero-burn` uses. A trust ratio needs the norms of a full parameter, so a step visits the module
//! twice. The first pass updates moments and computes sums of squares; the ranks then exchange these for all parameters at once; the second
//! pass updates the parameters.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_optim::{LambState, Optimizer};
use parking_lot::Mutex;
use zero_core::{Buffer, Collective, CommError};
use zero_kernels::Rule;
use zero_kernels::cpu::norm::Squares;
use zero_kernels::update::{Kernel, Norms};

use crate::adamw::update;
use crate::error::stop;

/// An optimizer of shards, with the sums that all its parameters share.
#[derive(Debug, Clone)]
pub struct Lamb {
    rule: Rule,
    pass: Arc<Mutex<Pass>>,
}

/// State of the pass, for the parameters yet to be visited, in the module's order.
#[derive(Debug)]
enum Pass {
    /// The range of elements that only this rank counts, and the sums of the parameters visited so far.
    First(VecDeque<Range<usize>>, Vec<Norms>),
    /// Sums over all ranks.
    Second(VecDeque<Norms>),
}

impl Default for Pass {
    fn default() -> Self {
        Self::First(VecDeque::new(), Vec::new())
    }
}

impl Lamb {
    pub(crate) fn new(rule: Rule) -> Self {
        Self { rule, pass: Arc::default() }
    }

    /// Returns an optimizer with another rule for other parameters of the same module.
    #[cfg(feature = "trainer")]
    pub(crate) fn beside(&self, rule: Rule) -> Self {
        Self { rule, pass: self.pass.clone() }
    }

    /// Begins the first pass over the updated parameters.
    pub(crate) fn begin(&self, counted: impl Iterator<Item = Range<usize>>) {
        *self.pass.lock() = Pass::First(counted.collect(), Vec::new());
    }

    /// Exchanges the sums between both passes. A collective: sums are added in rank order.
    pub(crate) fn exchange(&self, comm: &dyn Collective) -> Result<(), CommError> {
        let mut pass = self.pass.lock();
        let Pass::First(_, norms) = &*pass else { return Ok(()) };
        let count = norms.len();
        let numbers = |Norms { parameter, update }: &Norms| [parameter.high, parameter.low, update.high, update.low];
        let own = norms.iter().flat_map(numbers).collect();
        let all = comm.all_gather(Buffer::F64(own))?.into_f64();
        let norms = |index: usize| {
            let of = |rank: &[f64]| {
                let squares = |at: usize| Squares { high: rank[4 * index + at], low: rank[4 * index + at + 1] };
                Norms { parameter: squares(0), update: squares(2) }
            };
            all.chunks_exact(4 * count).map(of).fold(Norms::default(), Norms::plus)
        };
        *pass = Pass::Second((0..count).map(norms).collect());
        Ok(())
    }
}

/// Returns the entry of the next parameter.
fn next<T>(expected: &mut VecDeque<T>) -> T {
    expected.pop_front().unwrap_or_else(|| {
        stop(
            "LAMB was stepped without `Optimizer::step`, which knows the full parameters: call that, and in your own \
             `TrainStep::optimize` step the optimizer once"
                .into(),
        )
    })
}

impl Optimizer for Lamb {
    type State<const D: usize> = LambState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<LambState<D>>,
    ) -> (Tensor<D>, Option<LambState<D>>) {
        let LambState { mut time, moment_1, moment_2 } = state.unwrap_or_else(|| {
            let zeros = || Tensor::zeros(tensor.shape(), &tensor.device());
            LambState { time: 0, moment_1: zeros(), moment_2: zeros() }
        });
        let states = [moment_1, moment_2];
        let (tensor, [moment_1, moment_2]) = match &mut *self.pass.lock() {
            Pass::First(counted, norms) => {
                time += 1;
                let counted = next(counted);
                let kernel = Kernel::new(self.rule, lr, time);
                let (tensor, states, sums) = update(tensor, Some(grad), states, kernel, counted);
                norms.push(sums);
                (tensor, states)
            }
            Pass::Second(norms) => {
                let Norms { parameter, update: along } = next(norms);
                let mut kernel = Kernel::new(self.rule, lr, time);
                kernel.trust(parameter.value().sqrt(), along.value().sqrt());
                let (tensor, states, _) = update(tensor, None, states, kernel, 0..0);
                (tensor, states)
            }
        };
        (tensor, Some(LambState { time, moment_1, moment_2 }))
    }

    fn to_device<const D: usize>(mut state: LambState<D>, device: &Device) -> LambState<D> {
        state.moment_1 = state.moment_1.to_device(device);
        state.moment_2 = state.moment_2.to_device(device);
        state
    }
}
