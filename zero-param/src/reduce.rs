//! Reduction of a backward pass's gradients, in buckets that are sent as soon as they are complete.
//!
//! * In: full gradients, each complete at the graph's last use of the parameter. Out: means over the ranks, of the elements that a rank
//!   updates.
//! * Every rank contributes to the same buckets in the same order, whatever its graph contained. Buckets that fill up during the pass are
//!   sent at once. The others are sent at its end, when ranks have agreed which parameters have a gradient on any of them. A rank without a
//!   gradient contributes zeros. Additions are in rank order, so a mean is the same at every stage.
//! * Memory: a gradient is held in full until its bucket is sent; the size of two buckets may be in flight. At stage 1 all wait for the end
//!   of the pass.
//! * Threads: the caller's; collectives run on the group's own thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, TensorData};
use half::bf16;
use parking_lot::Mutex;
use zero_core::{Buffer, Collective, CommError, Partition, Pending, ReduceOp, Request, Stage};
use zero_kernels::cpu::embedding;
use zero_kernels::cpu::half::widened;

use crate::config::{Float, ZeroConfig};
use crate::error::{raise, stop};

/// Number of full buckets, or the same number of elements in smaller ones, that may be in flight.
const IN_FLIGHT: usize = 2;

/// Number of elements from which an evenly split gradient gets its own bucket.
const ALONE: usize = 1 << 16;

/// Limit of a backward pass's wait for a bucket in flight. Bounded and short, as the wait holds the graph's lock: a rank that shares a leaf
/// of its graph with this one waits for that lock.
const PATIENCE: Duration = Duration::from_secs(1);

/// A parameter whose gradients are reduced.
#[derive(Debug)]
pub(crate) struct Member {
    /// Its path in the module.
    pub(crate) path: String,
    pub(crate) partition: Partition,
    /// Every rank updates the full parameter.
    pub(crate) is_whole: bool,
    /// The parameter is expected to have a gradient.
    pub(crate) train: bool,
}

/// Parameters whose gradients are reduced by one collective.
#[derive(Debug, Clone)]
struct Bucket {
    members: Vec<usize>,
    /// All-reduced rather than reduce-scattered.
    is_whole: bool,
}

#[derive(Debug, Default)]
struct Pass {
    is_running: bool,
    /// Sums over the uses so far, and whether the last use is included.
    gradients: Vec<Option<(Buffer, bool)>>,
    is_sent: Vec<bool>,
    /// Parameters in the order of their first gradient.
    arrived: Vec<usize>,
    /// Number of buckets sent.
    sent: usize,
    in_flight: VecDeque<(Bucket, Pending)>,
    /// A wait has timed out: the rest of the pass does not wait, and holds its gradients in full for longer.
    is_impatient: bool,
    reduced: Vec<Option<Vec<f32>>>,
}

#[derive(Debug)]
struct State {
    pass: Pass,
    buckets: Vec<Bucket>,
    /// For each parameter, whether `buckets` contain it. `is_settled`: they are in the order in which gradients arrive.
    planned: Vec<bool>,
    is_settled: bool,
}

#[derive(Debug)]
pub(crate) struct Reducer {
    comm: Arc<dyn Collective>,
    /// The group for buckets, which run in a different order than the calls between passes.
    lane: Arc<dyn Collective>,
    members: Vec<Member>,
    config: ZeroConfig,
    state: Mutex<State>,
}

impl Reducer {
    /// Creates a reducer for `members`. A collective.
    pub(crate) fn new(
        comm: &Arc<dyn Collective>,
        config: &ZeroConfig,
        members: Vec<Member>,
    ) -> Result<Self, CommError> {
        // Gradients are expected in the reverse of the module's order, until a pass has shown the actual order.
        let order: Vec<usize> = (0..members.len()).rev().filter(|&index| members[index].train).collect();
        let buckets = bucketed(&members, &order, config.reduce_bucket_size);
        let planned = members.iter().map(|member| member.train).collect();
        let state = State { pass: Pass::default(), buckets, planned, is_settled: false };
        let lane = comm.duplicate("gradients")?;
        Ok(Self { comm: comm.clone(), lane, members, config: config.clone(), state: Mutex::new(state) })
    }

    /// Begins a backward pass.
    pub(crate) fn begin(&self) {
        let count = self.members.len();
        let gradients = std::iter::repeat_with(|| None).take(count).collect();
        let (is_sent, reduced) = (vec![false; count], vec![None; count]);
        self.state.lock().pass = Pass { is_running: true, gradients, is_sent, reduced, ..Pass::default() };
    }

    /// Adds the gradient of one use, or of the `rows` of a table that it read; `is_complete` if it was the parameter's last use in this
    /// pass. Called by autodiff, under the lock of this rank's graph. May wait for buckets in flight, for which the other ranks need only
    /// their own graphs.
    pub(crate) fn push(&self, index: usize, gradient: TensorData, rows: Option<Arc<[i64]>>, is_complete: bool) {
        let mut state = self.state.lock();
        let State { pass, buckets, .. } = &mut *state;
        if !pass.is_running {
            stop(format!(
                "parameter '{}' got a gradient outside of `Zero::backward`, where it is not reduced: \
                 call `zero.backward(|| loss)` instead of `loss.backward()`",
                self.members[index].path
            ));
        }
        if pass.is_sent[index] {
            stop(format!(
                "parameter '{}' got a gradient after its last use in this pass: a custom layer gathered it during the backward \
                 pass; use the parameter in the forward pass instead",
                self.members[index].path
            ));
        }
        let gradient = as_buffer(gradient, self.config.param_dtype);
        let before = pass.gradients[index].take().map(|(before, _)| before);
        if before.is_none() {
            pass.arrived.push(index);
        }
        let sum = match (rows, before) {
            (Some(rows), before) => {
                let before = before.unwrap_or_else(|| self.zeros(self.members[index].partition.numel()));
                sum_rows(&rows, gradient, before)
            }
            (None, Some(before)) => sum(gradient, &before),
            (None, None) => gradient,
        };
        pass.gradients[index] = Some((sum, is_complete));
        // At stage 1 gradients are not sharded: they are held in full until the end of the pass.
        if self.config.stage == Stage::OptimizerState || self.comm.world() == 1 {
            return;
        }
        while let Some(bucket) = buckets.get(pass.sent)
            && bucket.members.iter().all(|&index| matches!(pass.gradients[index], Some((_, true))))
        {
            pass.sent += 1;
            self.send(pass, bucket.clone());
            while self.is_ahead(pass) && !pass.is_impatient {
                let (bucket, pending) = pass.in_flight.pop_front().expect("it is not empty");
                match pending.wait_for(PATIENCE) {
                    Ok(reduced) => self.receive(pass, &bucket, reduced.unwrap_or_else(|error| raise(error))),
                    Err(pending) => {
                        pass.in_flight.push_front((bucket, pending));
                        pass.is_impatient = true;
                    }
                }
            }
        }
    }

    /// Ends the pass. Returns, by parameter, the means over the ranks of the gradients that any rank had. A collective: when it returns,
    /// every rank's backward pass is over.
    pub(crate) fn finish(&self) -> Result<Vec<Option<Vec<f32>>>, CommError> {
        let mut state = self.state.lock();
        let mut pass = std::mem::take(&mut state.pass);
        if self.comm.world() == 1 {
            // They are means already: packing buckets would copy every gradient twice.
            for &index in &pass.arrived {
                pass.reduced[index] = pass.gradients[index].take().map(|(gradient, _)| in_32(gradient));
            }
            return Ok(pass.reduced);
        }
        let mut flags = vec![0; self.members.len()];
        pass.arrived.iter().for_each(|&index| flags[index] = 1);
        let request = Request::AllReduce(Buffer::U8(flags), ReduceOp::Max);
        let had: Vec<bool> =
            self.comm.execute_for(request, "which gradients exist")?.into_u8().iter().map(|&any| any > 0).collect();
        let mut rest: Vec<Bucket> = state.buckets[pass.sent..].to_vec();
        for bucket in &mut rest {
            bucket.members.retain(|&index| had[index]);
        }
        let unplanned: Vec<usize> = (0..had.len()).filter(|&index| had[index] && !state.planned[index]).collect();
        rest.extend(bucketed(&self.members, &unplanned, self.config.reduce_bucket_size));
        for bucket in rest.into_iter().filter(|bucket| !bucket.members.is_empty()) {
            self.send(&mut pass, bucket);
            while self.is_ahead(&pass) {
                self.receive_oldest(&mut pass)?;
            }
        }
        while !pass.in_flight.is_empty() {
            self.receive_oldest(&mut pass)?;
        }
        if !state.is_settled || had != state.planned {
            // Rank 0's order of arrival, then the parameters that only other ranks had.
            let first = self.first_ranks_order(&pass.arrived)?;
            let others = (0..had.len()).filter(|index| had[*index] && !first.contains(index));
            let order: Vec<usize> = first.iter().copied().chain(others).collect();
            state.buckets = bucketed(&self.members, &order, self.config.reduce_bucket_size);
            (state.planned, state.is_settled) = (had, true);
        }
        Ok(pass.reduced)
    }

    fn first_ranks_order(&self, arrived: &[usize]) -> Result<Vec<usize>, CommError> {
        let none = u32::MAX.to_le_bytes();
        let mut bytes: Vec<u8> = arrived.iter().flat_map(|&index| (index as u32).to_le_bytes()).collect();
        bytes.resize(none.len() * self.members.len(), u8::MAX);
        let bytes =
            self.comm.execute_for(Request::Broadcast(Buffer::U8(bytes), 0), "the order of gradients")?.into_u8();
        let (numbers, _) = bytes.as_chunks::<4>();
        Ok(numbers
            .iter()
            .filter(|number| **number != none)
            .map(|number| u32::from_le_bytes(*number) as usize)
            .collect())
    }

    /// Packs a bucket and starts its collective.
    fn send(&self, pass: &mut Pass, bucket: Bucket) {
        bucket.members.iter().for_each(|&index| pass.is_sent[index] = true);
        let mut taken = |index: usize| match pass.gradients[index].take() {
            Some((gradient, _)) => gradient,
            None => self.zeros(self.members[index].partition.numel()),
        };
        let alone = match bucket.members[..] {
            [index] => Some(index),
            _ => None,
        };
        let is_laid_out = |index: &usize| bucket.is_whole || self.members[*index].partition.is_even();
        let buffer = match alone.filter(is_laid_out) {
            Some(index) => taken(index),
            None => {
                let gradients: Vec<Buffer> = bucket.members.iter().map(|&index| taken(index)).collect();
                self.laid_out(&bucket, &gradients)
            }
        };
        let request = match bucket.is_whole {
            true => Request::AllReduce(buffer, ReduceOp::Mean),
            false => Request::ReduceScatter(buffer, ReduceOp::Mean),
        };
        let pending = self.lane.start_for(request, &self.name(&bucket));
        pass.in_flight.push_back((bucket, pending));
    }

    /// Returns a bucket's name in errors: its first and last parameter.
    fn name(&self, bucket: &Bucket) -> String {
        let path = |index: usize| &self.members[index].path;
        match bucket.members[..] {
            [only] => path(only).clone(),
            [first, .., last] => format!("{} to {}", path(first), path(last)),
            [] => unreachable!("a bucket that is sent has members"),
        }
    }

    fn zeros(&self, numel: usize) -> Buffer {
        match self.config.param_dtype {
            Float::F32 => Buffer::F32(vec![0.0; numel]),
            Float::Bf16 => Buffer::Bf16(vec![bf16::ZERO; numel]),
        }
    }

    /// Packs gradients one after the other. For a reduce-scatter it packs a row per rank: the rank's shards, each padded to the longest.
    fn laid_out(&self, bucket: &Bucket, gradients: &[Buffer]) -> Buffer {
        macro_rules! rows {
            ($variant:ident, $zero:expr) => {{
                let rows = if bucket.is_whole { 1 } else { self.comm.world() };
                let columns = |index: &usize| self.columns(bucket, *index);
                let mut out = Vec::with_capacity(rows * bucket.members.iter().map(columns).sum::<usize>());
                for rank in 0..rows {
                    for (&index, gradient) in bucket.members.iter().zip(gradients) {
                        let Buffer::$variant(gradient) = gradient else { unreachable!("gradients have one type") };
                        let partition = self.members[index].partition;
                        let range = if bucket.is_whole { 0..partition.numel() } else { partition.range(rank) };
                        let end = out.len() + self.columns(bucket, index);
                        out.extend_from_slice(&gradient[range]);
                        out.resize(end, $zero);
                    }
                }
                Buffer::$variant(out)
            }};
        }
        match self.config.param_dtype {
            Float::F32 => rows!(F32, 0.0),
            Float::Bf16 => rows!(Bf16, bf16::ZERO),
        }
    }

    /// Returns whether more buckets are in flight than allowed.
    fn is_ahead(&self, pass: &Pass) -> bool {
        let members = pass.in_flight.iter().flat_map(|(bucket, _)| &bucket.members);
        let elements: usize = members.map(|&index| self.members[index].partition.numel()).sum();
        pass.in_flight.len() > IN_FLIGHT && elements > self.config.reduce_bucket_size.saturating_mul(IN_FLIGHT)
    }

    /// Waits for the oldest bucket in flight.
    fn receive_oldest(&self, pass: &mut Pass) -> Result<(), CommError> {
        let (bucket, pending) = pass.in_flight.pop_front().expect("something is under way");
        self.receive(pass, &bucket, pending.wait()?);
        Ok(())
    }

    /// Unpacks a bucket's means.
    fn receive(&self, pass: &mut Pass, bucket: &Bucket, reduced: Buffer) {
        let mut reduced = in_32(reduced);
        if let [index] = bucket.members[..] {
            reduced.truncate(self.len(bucket, index));
            pass.reduced[index] = Some(reduced);
            return;
        }
        let mut begin = 0;
        for &index in &bucket.members {
            pass.reduced[index] = Some(reduced[begin..begin + self.len(bucket, index)].to_vec());
            begin += self.columns(bucket, index);
        }
    }

    /// Returns the number of elements that a parameter takes of a row.
    fn columns(&self, bucket: &Bucket, index: usize) -> usize {
        let partition = self.members[index].partition;
        if bucket.is_whole { partition.numel() } else { partition.stride() }
    }

    /// Returns the number of elements of a reduced gradient on this rank.
    fn len(&self, bucket: &Bucket, index: usize) -> usize {
        let partition = self.members[index].partition;
        if bucket.is_whole { partition.numel() } else { partition.len(self.comm.rank()) }
    }
}

/// Groups the parameters in `order` into buckets, which are closed once they have `elements`. Replicated and sharded parameters fill
/// separate buckets. A large parameter that splits evenly has its own, which needs no packing.
fn bucketed(members: &[Member], order: &[usize], elements: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let mut open = [false, true].map(|is_whole| (Bucket { members: Vec::new(), is_whole }, 0));
    for &index in order {
        let Member { partition, is_whole, .. } = members[index];
        if partition.numel() >= ALONE.min(elements) && !is_whole && partition.is_even() {
            buckets.push(Bucket { members: vec![index], is_whole });
            continue;
        }
        let (bucket, filled) = &mut open[usize::from(is_whole)];
        bucket.members.push(index);
        *filled += partition.numel();
        if *filled >= elements {
            let empty = Bucket { members: Vec::new(), is_whole: bucket.is_whole };
            buckets.push(std::mem::replace(bucket, empty));
            *filled = 0;
        }
    }
    buckets.extend(open.into_iter().map(|(bucket, _)| bucket).filter(|bucket| !bucket.members.is_empty()));
    buckets
}

fn as_buffer(gradient: TensorData, dtype: Float) -> Buffer {
    let got = gradient.dtype();
    let values = match dtype {
        Float::F32 if got == DType::F32 => gradient.try_into_vec().map(Buffer::F32),
        Float::Bf16 if got == DType::BF16 => gradient.try_into_vec().map(Buffer::Bf16),
        _ => unreachable!("the gradient of a {dtype:?} whole is {got:?}"),
    };
    values.expect("the elements are of the type that they say")
}

/// Converts a buffer to fp32 on this rank's thread pool.
fn in_32(gradient: Buffer) -> Vec<f32> {
    match gradient {
        Buffer::Bf16(values) => widened(&values),
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
        _ => unreachable!("gradients are of these types"),
    }
}

/// Adds two gradients in the order of Burn's own sums: the later one first.
fn sum(later: Buffer, before: &Buffer) -> Buffer {
    match (later, before) {
        (Buffer::F32(mut sum), Buffer::F32(before)) => {
            sum.iter_mut().zip(before).for_each(|(a, b)| *a += b);
            Buffer::F32(sum)
        }
        (Buffer::Bf16(mut sum), Buffer::Bf16(before)) => {
            sum.iter_mut().zip(before).for_each(|(a, b)| *a += b);
            Buffer::Bf16(sum)
        }
        _ => unreachable!("gradients have one type"),
    }
}
