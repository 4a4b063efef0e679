//! Forward and backward passes, and the gradients that they hand to the engine's reducer.
//!
//! * In: the gradient of each use of a parameter. Out: for each parameter that any rank has used, this rank's shard of the mean over the
//!   ranks.
//! * Gradients of one parameter are added on this rank first, and reduced after its last use. A rank without a gradient contributes zeros.
//! * The pass begins for the reducer with its first gradient, as the forward pass shows which parameters have one.
//! * Threads: the caller's. The reducer has a thread of its own, and waits for the other ranks there.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};
use half::{bf16, f16};
use parking_lot::Mutex;
use zero_core::{Buffer, CommError, ReduceOp, Request};
use zero_engine::abort::stop;
use zero_engine::backend::{Backend, DType, HostData};
use zero_engine::reduce::Phase;
use zero_engine::values::{flat_tensor, here, of_type};
use zero_kernels::cpu::embedding;
use zero_kernels::cpu::half::widened;

use crate::engine::{Burn, Cell, Runtime, Slot, flat};
use crate::tensors::Floats;

/// A parameter, as far as passes know it.
pub(crate) struct Member {
    /// Its place among the module's parameters.
    pub(crate) index: usize,
    pub(crate) slot: Arc<Slot>,
    /// Number of gathers recorded in graphs whose backward pass is still to come.
    pub(crate) recorded: AtomicUsize,
    /// Number of reductions of its gradient.
    pub(crate) reduced: AtomicUsize,
}

impl core::fmt::Debug for Member {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.slot)
    }
}

/// The gradient of a parameter in a pass.
#[derive(Default)]
struct Gradient {
    /// Sum over the uses so far.
    sum: Option<Floats>,
    /// Its reduced shard, once it has been handed to the reducer.
    cell: Option<Arc<Cell>>,
    /// True if the ranks have agreed to reduce it.
    is_expected: bool,
}

struct Pass {
    members: Arc<[Arc<Member>]>,
    gradients: Vec<Gradient>,
    /// By parameter, the sums of earlier passes that were not reduced, in fp32.
    held: Vec<Option<Floats>>,
    /// True if its own gradients are not reduced either.
    is_held: bool,
    has_begun: bool,
}

/// The passes of a rank.
#[derive(Default)]
pub(crate) struct Passes {
    /// The one that it runs.
    running: Mutex<Option<Pass>>,
    /// Sums that were not reduced yet.
    held: Mutex<Vec<Option<Floats>>>,
}

impl Pass {
    /// Tells the reducer which parameters have a gradient on this rank: that of the `first`, and those whose uses are recorded.
    fn begin(&mut self, runtime: &Runtime, first: Option<usize>) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let mut indices = Vec::new();
        for ((member, gradient), held) in self.members.iter().zip(&mut self.gradients).zip(&self.held) {
            let is_used = member.recorded.load(Ordering::Relaxed) > 0 || first == Some(member.index);
            gradient.is_expected = is_used || held.is_some();
            indices.extend(gradient.is_expected.then_some(member.slot.index));
        }
        runtime.begin_reduction(Phase::Backward, indices, (Vec::new(), None));
    }

    /// Takes the sum of a parameter's gradients, with what is held of earlier passes.
    fn take(&mut self, index: usize) -> Option<Floats> {
        match (self.gradients[index].sum.take(), self.held[index].take()) {
            (Some(later), Some(before)) => Some(Burn::add(of_type::<Burn>(later, DType::F32), before)),
            (sum, held) => sum.or(held),
        }
    }

    /// Holds the sum of a parameter's gradients for a later pass.
    fn hold(&mut self, index: usize) {
        self.held[index] = self.take(index).map(|sum| of_type::<Burn>(sum, DType::F32));
    }

    /// Hands the sum of a parameter's gradients to the reducer.
    fn submit(&mut self, runtime: &Runtime, index: usize) {
        let Some(sum) = self.take(index) else { return };
        let cell = self.gradients[index].cell.insert(runtime.gradient(&self.members[index].slot));
        runtime.reduce(sum, cell);
        runtime.reducer.iter().for_each(|reducer| reducer.catch_up(&runtime.rank));
    }
}

impl Passes {
    /// Begins a pass over the parameters of a module, whose gradients are reduced unless it `is_held`.
    pub(crate) fn begin(&self, members: &Arc<[Arc<Member>]>, is_held: bool) {
        let gradients = members.iter().map(|_| Gradient::default()).collect();
        let mut held = std::mem::take(&mut *self.held.lock());
        held.resize_with(members.len(), || None);
        *self.running.lock() = Some(Pass { members: members.clone(), gradients, held, is_held, has_begun: is_held });
    }

    /// Ends a pass that is held: its gradients are kept in full, for the next pass.
    pub(crate) fn hold(&self, runtime: &Runtime) {
        let mut pass = self.running.lock().take().expect("a pass has begun");
        (0..pass.gradients.len()).for_each(|index| pass.hold(index));
        *self.held.lock() = pass.held;
        runtime.end_backward(Vec::new());
    }

    /// Adds the gradient of one use, or of the `rows` of a table that it read; `is_complete` if it was the parameter's last use in this
    /// pass. Called by autodiff, under the lock of this rank's graph.
    pub(crate) fn push(
        &self,
        (runtime, member): (&Runtime, &Member),
        gradient: Floats,
        rows: Option<Arc<[i64]>>,
        is_complete: bool,
    ) {
        let mut pass = self.running.lock();
        let Some(pass) = &mut *pass else {
            stop(format!(
                "{} got a gradient outside of `Zero::backward`, where it is not reduced: call `zero.backward(|| loss)` instead \
                 of `loss.backward()`",
                member.slot
            ));
        };
        pass.begin(runtime, Some(member.index));
        let Gradient { sum: before, cell, is_expected } = &mut pass.gradients[member.index];
        if cell.is_some() || !*is_expected && !pass.is_held {
            stop(format!(
                "{} got a gradient after its last use in this pass, or after another backward pass within it: use the \
                 parameter in the forward pass, and call `zero.backward` once for each backward pass",
                member.slot
            ));
        }
        let place = &runtime.rank.device;
        let gradient = here::<Burn>(gradient, place);
        *before = Some(match (rows, before.take()) {
            (Some(rows), before) => {
                let dtype = Burn::dtype(&gradient);
                let before = before.unwrap_or_else(|| Burn::zeros(&[member.slot.partition.numel()], place, dtype));
                match Burn::is_host(place) {
                    true => {
                        let [gradient, before] = [gradient, before].map(|x| Burn::read(x).into_buffer());
                        flat_tensor::<Burn>(sum_rows(&rows, gradient, before), place)
                    }
                    false => sum_rows_on_device(&rows, gradient, before),
                }
            }
            // The later one first, as in Burn's own sums.
            (None, Some(before)) => Burn::add(flat(gradient), before),
            (None, None) => flat(gradient),
        });
        match (is_complete, pass.is_held) {
            (true, true) => pass.hold(member.index),
            (true, false) if runtime.rank.config.overlap_comm => pass.submit(runtime, member.index),
            _ => {}
        }
    }

    /// Ends the pass. Returns, by parameter, this rank's shard of the mean over the ranks, if any rank had a gradient. A collective: when
    /// it returns, every rank's backward pass is over.
    pub(crate) fn end(&self, runtime: &Runtime) -> Result<Vec<Option<Arc<Cell>>>, CommError> {
        let mut pass = self.running.lock().take().expect("a pass has begun");
        pass.begin(runtime, None);
        (0..pass.gradients.len()).for_each(|index| pass.submit(runtime, index));
        // Zeros for a parameter that no rank has used would be a gradient: an optimizer decays the parameter. Asked before the wait, so that
        // a rank that does something else is found at once.
        let flags = pass.gradients.iter().map(|gradient| u8::from(gradient.cell.is_some())).collect();
        let request = Request::AllReduce(Buffer::U8(flags), ReduceOp::Max);
        let had = runtime.collective().execute_for(request, "which gradients exist")?.into_u8();
        let foreign = runtime.end_reduction().map_or_else(Vec::new, |outcome| outcome.foreign);
        runtime.end_passes();
        runtime.end_backward(foreign);
        let cells = pass.members.iter().zip(pass.gradients).zip(had).map(|((member, gradient), had)| {
            let foreign = runtime.take_foreign(member.slot.index).pop().filter(|_| had > 0);
            let cell = gradient.cell.or(foreign);
            member.reduced.fetch_add(usize::from(cell.is_some()), Ordering::Relaxed);
            cell
        });
        Ok(cells.collect())
    }
}

/// Converts a buffer to fp32 on this rank's thread pool.
fn in_32(gradient: Buffer) -> Vec<f32> {
    match gradient {
        Buffer::Bf16(values) => widened(&values),
        Buffer::F16(values) => widened(&values),
        other => other.into_f32(),
    }
}

/// Adds the gradient of the rows read of a table to an earlier gradient, in place. For a tied embedding the earlier one is the head's, and
/// a second table would double the memory.
fn sum_rows(ids: &[i64], gradient: Buffer, before: Buffer) -> Buffer {
    let gradient = in_32(gradient);
    let width = gradient.len() / ids.len().max(1);
    let mut read = ids.to_vec();
    read.sort_unstable();
    read.dedup();
    let place = |id: &i64| read.binary_search(id).expect("it is one of them") as i64;
    let places: Vec<i64> = ids.iter().map(place).collect();
    let mut sums = vec![0.0; read.len() * width];
    embedding::backward(&places, &gradient, width, &mut sums);
    macro_rules! added {
        ($variant:ident, $table:ident, $of:expr) => {{
            for (&id, later) in read.iter().zip(sums.chunks_exact(width.max(1))) {
                let row = &mut $table[id as usize * width..][..width];
                row.iter_mut().zip(later).for_each(|(before, &later)| *before += $of(later));
            }
            Buffer::$variant($table)
        }};
    }
    match before {
        Buffer::F32(mut table) => added!(F32, table, |x: f32| x),
        // Each sum is rounded, as a separate table would be.
        Buffer::Bf16(mut table) => added!(Bf16, table, bf16::from_f32),
        Buffer::F16(mut table) => added!(F16, table, f16::from_f32),
        _ => unreachable!("gradients are of these types"),
    }
}

/// Same as [`sum_rows`], on a device. Rows are added in fp32 to a table of their own.
fn sum_rows_on_device(ids: &[i64], gradient: Floats, before: Floats) -> Floats {
    let gradient = Tensor::<2>::from_dispatch(gradient).cast(burn::tensor::DType::F32);
    let (before, [rows, width]) = (Tensor::<1>::from_dispatch(before), gradient.dims());
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids.to_vec(), [rows]), &gradient.device());
    let zeros = Tensor::<2>::zeros([before.dims()[0] / width.max(1), width], &gradient.device());
    let zeros = zeros.cast(burn::tensor::DType::F32);
    let sums = zeros.select_assign(0, ids, gradient, IndexingUpdateOp::Add);
    let sums = sums.reshape(before.dims()).cast(before.dtype());
    (before + sums).into_dispatch()
}
