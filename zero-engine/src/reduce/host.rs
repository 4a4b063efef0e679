//! Buckets in host memory, for any collective engine.

use std::sync::Arc;

use zero_core::accounting::WireKind;
use zero_core::collective::Joined;
use zero_core::{Buffer, Collective, CommError, Mesh, Pending, ReduceOp, Request};
use zero_kernels::cpu::half::Half;
use zero_kernels::quantized::Format;

use super::buckets::{Medium, Reduced, Segment};
use super::{Hops, quantized};
use crate::backend::{Backend, DType, HostData, Shared};
use crate::cell::Cell;
use crate::cell::rank::Rank;
use crate::values::{elements_of, flat_tensor, here, narrow_or_f32};

/// Number of elements from which a gradient is sent alone: 256 KiB, beyond which a request's own cost is negligible.
const ALONE: usize = 1 << 16;

pub(super) struct Host {
    hops: Hops,
    quantized: Option<Format>,
    mesh: Mesh,
    /// The groups of the first hop, if gradients are summed over all ranks in two hops. Each rank of a group then sums rows for ranks of
    /// all groups.
    on_the_way: Option<Mesh>,
    /// True if each rank keeps a shard of the result, false if it keeps all of it.
    shards: bool,
    /// Factors of the values before they are added, and of their sum.
    before: f32,
    after: f32,
    sent_as: DType,
    /// The bucket that is being filled: a row per rank.
    rows: Vec<f32>,
}

impl Host {
    /// Creates buckets of which each rank keeps a shard (`shards`) or everything.
    pub(super) fn new<B: Backend>(hops: Hops, rank: &Rank<B>, shards: bool) -> Self {
        let (sent_as, before, after) = rank.config.reduction(rank.world, false);
        let mesh = rank.mesh;
        let quantized = rank.config.quantized_gradients;
        // The two-hop sum gives each rank its own row. What every rank keeps in full is summed row by row.
        let on_the_way = rank.config.cut_on_the_way(rank.world).filter(|_| shards);
        let sent_as = sent_as.wire_dtype();
        Self { hops, quantized, mesh, on_the_way, shards, before, after, sent_as, rows: Vec::new() }
    }

    /// Returns the index of the row for `rank`: the rows that cross groups from one rank are adjacent.
    fn place_of_row(&self, rank: usize) -> usize {
        self.on_the_way.map_or(rank, |mesh| mesh.shard(rank) * mesh.replicas() + mesh.replica(rank))
    }

    /// Returns the operation for a gradient that is sent alone, and the factor of its result. A 16-bit sum is rounded before it is
    /// multiplied, like that of a bucket.
    fn alone(&self) -> (ReduceOp, f32) {
        match self.sent_as {
            DType::F32 => (ReduceOp::Mean, 1.0),
            _ => (ReduceOp::Sum, self.after),
        }
    }

    /// Returns the format of gradients sent within a group: quantized if that is the only hop.
    fn quantizes_within(&self) -> Option<Format> {
        self.quantized.filter(|_| self.hops.across.is_none())
    }

    /// Sums a group's results, `row` elements per destination rank, across the groups. In the two-hop sum, each rank receives its own row
    /// here.
    fn across(&self, reduced: Buffer, row: usize) -> Result<Vec<f32>, CommError> {
        let Some(across) = &self.hops.across else { return Ok(reduced.into_f32()) };
        let _span = tracing::trace_span!("reduce across groups", elements = reduced.len()).entered();
        let Some(how) = self.quantized else { return Ok(across.all_reduce(reduced, ReduceOp::Sum)?.into_f32()) };
        let mut reduced = reduced.into_f32();
        if self.on_the_way.is_some() {
            let codes = self.encode(how, &**across, &reduced, row);
            return Ok(quantized::sum(how, across.all_to_all(codes)?, row));
        }
        // Row by row, so that at every stage the same values share a scale.
        for row in reduced.chunks_mut(row) {
            quantized::all_reduce(how, &**across, row, self.sent_as)?;
        }
        Ok(reduced)
    }

    /// Encodes `values` in rows of `row` values, one for each rank of `comm`.
    fn encode(&self, how: Format, comm: &dyn Collective, values: &[f32], row: usize) -> Buffer {
        quantized::count(how, comm, WireKind::AllToAll, row, self.sent_as);
        quantized::encode(how, values, values.len() / row)
    }
}

/// One gradient that is sent alone.
pub(super) enum Alone {
    /// The result is this rank's shard.
    Scattered(Pending),
    /// Every rank keeps the full gradient: the result is a tensor, the same for all ranks of this process.
    Shared(Pending<Joined>),
}

impl<B: Backend> Medium<B> for Host {
    type Gradient = B::Data;
    type Target = Vec<f32>;
    type Sent = Pending;
    type Alone = Alone;

    const HOLDS: bool = false;

    fn shards(&self) -> bool {
        self.shards
    }

    fn take(&self, gradient: Shared<B>) -> B::Data {
        narrow_or_f32(B::read(gradient.into_tensor()))
    }

    /// Returns whether a gradient is sent alone: not if it is divided or quantized first, or also summed across groups.
    fn goes_alone(&self, numel: usize) -> bool {
        self.before == 1.0
            && self.hops.across.is_none()
            && self.quantized.is_none()
            && numel >= ALONE
            && numel.is_multiple_of(self.mesh.shards())
    }

    fn add(&mut self, gradient: &Option<B::Data>, segment: Segment, row: usize) {
        let Segment { numel, from, columns, at, .. } = segment;
        if self.rows.is_empty() {
            self.rows = vec![0.0; row * self.mesh.shards()];
        }
        let Some(gradient) = gradient else { return };
        let values = elements_of(gradient).expect("it was converted");
        for (rank, source) in parts(self.mesh, numel, from, columns).enumerate() {
            let at = self.place_of_row(rank) * row + at;
            let target = &mut self.rows[at..at + source.len()];
            values.slice(source).widen_into(target);
            scale(target, self.before);
        }
    }

    fn send(&mut self, row: usize, name: &str) -> Result<Pending, CommError> {
        let rows = std::mem::take(&mut self.rows);
        let request = match (self.quantizes_within(), self.shards) {
            (Some(how), _) => Request::AllToAll(self.encode(how, &*self.hops.within, &rows, row)),
            (None, true) => Request::ReduceScatter(Buffer::from_f32(rows, self.sent_as), ReduceOp::Sum),
            (None, false) => Request::AllReduce(Buffer::from_f32(rows, self.sent_as), ReduceOp::Sum),
        };
        Ok(self.hops.within.start_for(request, name))
    }

    fn receive(
        &mut self,
        sent: Pending,
        row: usize,
        segments: &[Segment],
        shards: &mut [Option<Reduced<B, Vec<f32>>>],
    ) -> Result<(), CommError> {
        let reduced = match self.quantizes_within() {
            None => self.across(sent.wait()?, row)?,
            Some(how) => {
                let sum = quantized::sum(how, sent.wait()?, row);
                // Not quantized, so that the stages give the same bits.
                if self.shards { sum } else { self.hops.within.all_gather(Buffer::F32(sum))?.into_f32() }
            }
        };
        for &Segment { shard, numel, from, columns, at } in segments {
            let Reduced { target, len, .. } = shards[shard].as_mut().expect("a shard is completed by its last segment");
            let target = target.get_or_insert_with(|| vec![0.0; (*len).max(1)]);
            if self.shards {
                let part = from.min(*len)..(from + columns).min(*len);
                let source = at..at + part.len();
                copy_scaled(&mut target[part], &reduced[source], self.after);
                continue;
            }
            for (rank, part) in parts(self.mesh, numel, from, columns).enumerate() {
                let source = rank * row + at..rank * row + at + part.len();
                copy_scaled(&mut target[part], &reduced[source], self.after);
            }
        }
        Ok(())
    }

    fn settle(&self, shard: Reduced<B, Vec<f32>>) {
        // One filler element if the rank has none.
        let values = shard.target.unwrap_or_else(|| vec![0.0; shard.len.max(1)]);
        let settled = tensor::<B>(Buffer::F32(values), 1.0, shard.cell.dtype, &shard.cell.device);
        shard.cell.settle(Ok(Shared::new(settled)));
    }

    fn send_alone(&mut self, gradient: Option<B::Data>, numel: usize, name: &str, cell: &Cell<B>) -> Alone {
        let values = gradient.map_or_else(|| Buffer::F32(vec![0.0; numel]), HostData::into_buffer);
        let values =
            if values.dtype() == self.sent_as { values } else { Buffer::from_f32(values.into_f32(), self.sent_as) };
        let (op, after) = self.alone();
        if self.shards {
            return Alone::Scattered(self.hops.within.start_for(Request::ReduceScatter(values, op), name));
        }
        let (device, dtype) = (cell.device.clone(), cell.dtype);
        let join = move |shards: &[Arc<Buffer>]| -> Joined {
            Arc::new(tensor::<B>(Buffer::join(shards), after, dtype, &device))
        };
        Alone::Shared(self.hops.within.start_shared(values, op, name, Box::new(join)))
    }

    fn receive_alone(&mut self, sent: Alone, cell: &Cell<B>) -> Result<Shared<B>, CommError> {
        Ok(Shared::new(match sent {
            Alone::Scattered(pending) => tensor::<B>(pending.wait()?, self.alone().1, cell.dtype, &cell.device),
            Alone::Shared(pending) => {
                let joined = pending.wait()?.downcast::<B::Tensor>();
                let full = (*joined.expect("all ranks have the same inner backend")).clone();
                here::<B>(full, &cell.device)
            }
        }))
    }

    fn finish(&self) -> Result<(), CommError> {
        Ok(())
    }
}

/// Returns, for each rank of a group, the elements of its row in columns `from` to `from + columns`.
fn parts(mesh: Mesh, numel: usize, from: usize, columns: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let layout = mesh.partition(numel);
    (0..mesh.shards()).map(move |rank| {
        let owned = layout.range(rank);
        (owned.start + from).min(owned.end)..(owned.start + from + columns).min(owned.end)
    })
}

/// Returns a flat tensor of `values` times `factor`, in type `dtype`.
fn tensor<B: Backend>(mut values: Buffer, factor: f32, dtype: DType, device: &B::Device) -> B::Tensor {
    match (&mut values, dtype) {
        (Buffer::F16(values), DType::F16) => scale_halves(values, factor),
        (Buffer::Bf16(values), DType::Bf16) => scale_halves(values, factor),
        _ => {
            let mut wide = values.into_f32();
            scale(&mut wide, factor);
            values = match dtype {
                DType::F64 => Buffer::F64(wide.into_iter().map(f64::from).collect()),
                _ => Buffer::from_f32(wide, dtype),
            };
        }
    }
    flat_tensor::<B>(values, device)
}

fn copy_scaled(target: &mut [f32], source: &[f32], factor: f32) {
    if factor == 1.0 {
        target.copy_from_slice(source);
        return;
    }
    target.iter_mut().zip(source).for_each(|(target, source)| *target = source * factor);
}

fn scale(values: &mut [f32], factor: f32) {
    if factor != 1.0 {
        values.iter_mut().for_each(|value| *value *= factor);
    }
}

fn scale_halves<H: Half>(values: &mut [H], factor: f32) {
    if factor == 1.0 {
        return;
    }
    let mut wide = [0.0; 1 << 10];
    for values in values.chunks_mut(wide.len()) {
        let wide = &mut wide[..values.len()];
        H::widen(values, wide);
        scale(wide, factor);
        H::narrow(wide, values);
    }
}
