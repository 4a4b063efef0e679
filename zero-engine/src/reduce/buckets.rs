//! The layout of gradients in buckets of constant size: a row per rank, in which each parameter has the same columns. A large parameter
//! spans buckets. A gradient that the ranks divide evenly may be sent alone, unchanged: its rows already have a bucket's layout.
//!
//! The [`Medium`] decides where rows are packed, sent and unpacked: in host memory ([`super::host`]), or on a device ([`super::device`]).

use std::sync::Arc;

use zero_core::CommError;

use super::{Incoming, Lanes, names};
use crate::backend::{Backend, Shared};
use crate::cell::Cell;
use crate::cell::rank::Rank;

/// Columns `from` to `from + columns` of a gradient of `numel` elements; they begin at column `at` of their bucket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub(super) shard: usize,
    pub(super) numel: usize,
    pub(super) from: usize,
    pub(super) columns: usize,
    pub(super) at: usize,
}

/// A gradient's reduced shard, while it is assembled from buckets.
pub(super) struct Reduced<B: Backend, T> {
    pub(super) cell: Arc<Cell<B>>,
    /// The part assembled so far.
    pub(super) target: Option<T>,
    /// Number of its elements.
    pub(super) len: usize,
    /// Number of columns that have been reduced, and of all columns.
    done: usize,
    columns: usize,
}

/// The memory that holds buckets, and the operations on them.
pub(super) trait Medium<B: Backend>: Send {
    /// A full gradient; a missing one counts as zeros.
    type Gradient: Send;
    /// A reduced shard, or the part of it that has arrived.
    type Target: Send;
    /// A bucket that is being reduced.
    type Sent: Send;
    /// A gradient that is being reduced by itself.
    type Alone: Send;

    /// True if gradients are held until their bucket is sent.
    const HOLDS: bool;

    /// Returns whether each rank keeps a shard of the result, rather than all of it.
    fn shards(&self) -> bool;

    /// Returns the gradient's values to be added.
    fn take(&self, gradient: Shared<B>) -> Self::Gradient;

    /// Returns whether a gradient is sent alone; the same on every rank.
    fn goes_alone(&self, numel: usize) -> bool;

    /// Adds a segment to the bucket that is being filled, of `row` columns.
    fn add(&mut self, gradient: &Option<Self::Gradient>, segment: Segment, row: usize);

    /// Sends this bucket, of `row` columns.
    fn send(&mut self, row: usize, name: &str) -> Result<Self::Sent, CommError>;

    /// Waits for a bucket of `row` columns, and copies its segments to their shards.
    fn receive(
        &mut self,
        sent: Self::Sent,
        row: usize,
        segments: &[Segment],
        shards: &mut [Option<Reduced<B, Self::Target>>],
    ) -> Result<(), CommError>;

    /// Settles a cell with its complete shard.
    fn settle(&self, shard: Reduced<B, Self::Target>);

    fn send_alone(&mut self, gradient: Option<Self::Gradient>, numel: usize, name: &str, cell: &Cell<B>)
    -> Self::Alone;

    fn receive_alone(&mut self, sent: Self::Alone, cell: &Cell<B>) -> Result<Shared<B>, CommError>;

    /// Completes the reduction, after everything has been received.
    fn finish(&self) -> Result<(), CommError>;
}

enum InFlight<B: Backend, M: Medium<B>> {
    Bucket { sent: M::Sent, segments: Vec<Segment>, row: usize },
    Alone { sent: M::Alone, cell: Arc<Cell<B>>, counted: i64 },
}

/// The buckets of one backward pass.
pub(super) struct Buckets<B: Backend, M: Medium<B>> {
    rank: Arc<Rank<B>>,
    medium: M,
    /// Columns of a full bucket.
    capacity: usize,
    /// Columns still to come in this pass, so that the last bucket is not larger than necessary.
    remaining: usize,
    /// Number of columns of the bucket that is being filled, and of those that are filled.
    row: usize,
    filled: usize,
    segments: Vec<Segment>,
    /// Bytes of its gradients that count as not reduced.
    counted: i64,
    in_flight: Option<InFlight<B, M>>,
    shards: Vec<Option<Reduced<B, M::Target>>>,
}

impl<B: Backend, M: Medium<B>> Buckets<B, M> {
    /// Creates buckets of `elements` for the parameters `plan`.
    pub(super) fn new(rank: &Arc<Rank<B>>, medium: M, elements: usize, plan: &[u64]) -> Self {
        let sizes = plan.iter().filter_map(|&index| rank.parameters.slot(index)).map(|slot| slot.partition.numel());
        let laid_out = sizes.filter(|&numel| !medium.goes_alone(numel));
        Self {
            capacity: (elements / rank.mesh.shards()).max(1),
            remaining: laid_out.map(|numel| rank.mesh.partition(numel).stride()).sum(),
            rank: rank.clone(),
            medium,
            row: 0,
            filled: 0,
            segments: Vec::new(),
            counted: 0,
            in_flight: None,
            shards: Vec::new(),
        }
    }

    /// Stops counting the gradients laid out so far as unreduced: they are in a bucket.
    fn release(&mut self) {
        self.rank.count_unreduced(-std::mem::take(&mut self.counted));
    }

    /// Sends the bucket, which is full, once the one before it is done.
    fn flush(&mut self) -> Result<(), CommError> {
        self.wait()?;
        let (row, segments) = (std::mem::take(&mut self.row), std::mem::take(&mut self.segments));
        self.filled = 0;
        let shards = segments.iter().filter_map(|segment| self.shards[segment.shard].as_ref());
        let name = names(shards.map(|shard| &*shard.cell));
        let sent = self.medium.send(row, &name);
        self.release();
        self.in_flight = Some(InFlight::Bucket { sent: sent?, segments, row });
        Ok(())
    }

    fn send_alone(
        &mut self,
        gradient: Option<M::Gradient>,
        cell: Arc<Cell<B>>,
        numel: usize,
        counted: i64,
    ) -> Result<(), CommError> {
        if let Err(error) = self.wait() {
            self.rank.count_unreduced(-counted);
            cell.settle(Err(error.clone()));
            return Err(error);
        }
        let sent = self.medium.send_alone(gradient, numel, &names(std::iter::once(&*cell)), &cell);
        self.in_flight = Some(InFlight::Alone { sent, cell, counted });
        Ok(())
    }

    /// Receives the result of the request in flight.
    fn wait(&mut self) -> Result<(), CommError> {
        // On an error, `fail` settles the cells that were in flight and all that are still to come.
        match self.in_flight.take() {
            None => {}
            Some(InFlight::Bucket { sent, segments, row }) => {
                self.medium.receive(sent, row, &segments, &mut self.shards)?;
                for Segment { shard: index, columns, .. } in segments {
                    let shard = self.shards[index].as_mut().expect("a shard is completed by its last segment");
                    shard.done += columns;
                    if shard.done == shard.columns {
                        self.complete(index);
                    }
                }
            }
            Some(InFlight::Alone { sent, cell, counted }) => {
                let reduced = self.medium.receive_alone(sent, &cell);
                self.rank.count_unreduced(-counted);
                let failed = reduced.as_ref().err().cloned();
                cell.settle(reduced);
                return failed.map_or(Ok(()), Err);
            }
        }
        Ok(())
    }

    fn complete(&mut self, index: usize) {
        self.medium.settle(self.shards[index].take().expect("a shard is completed once"));
    }
}

impl<B: Backend, M: Medium<B>> Lanes<B> for Buckets<B, M> {
    fn push(&mut self, incoming: Incoming<B>) -> Result<(), CommError> {
        let Incoming { gradient, cell, numel, counted } = incoming;
        let gradient = gradient.map(|gradient| self.medium.take(gradient));
        if self.medium.goes_alone(numel) {
            return self.send_alone(gradient, cell, numel, counted);
        }
        self.counted += counted;
        let layout = self.rank.mesh.partition(numel);
        let (shard, columns) = (self.shards.len(), layout.stride());
        let len = if self.medium.shards() { layout.len(self.rank.mesh.shard(self.rank.index)) } else { numel };
        self.shards.push(Some(Reduced { cell, target: None, len, done: 0, columns }));
        if numel == 0 {
            self.complete(shard);
        }
        let mut from = 0;
        while from < columns {
            if self.row == 0 {
                self.row = self.capacity.min(self.remaining);
            }
            let part = (self.row - self.filled).min(columns - from);
            let segment = Segment { shard, numel, from, columns: part, at: self.filled };
            self.medium.add(&gradient, segment, self.row);
            self.segments.push(segment);
            self.filled += part;
            self.remaining -= part;
            from += part;
            if self.filled == self.row {
                self.flush()?;
            }
        }
        if !M::HOLDS {
            self.release();
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), CommError> {
        // The last bucket was sent when the last gradient filled it.
        self.wait()?;
        self.medium.finish()
    }

    fn fail(&mut self, error: &CommError) {
        self.release();
        if let Some(InFlight::Alone { cell, counted, .. }) = self.in_flight.take() {
            self.rank.count_unreduced(-counted);
            cell.settle(Err(error.clone()));
        }
        for shard in self.shards.iter_mut().filter_map(Option::take) {
            shard.cell.settle(Err(error.clone()));
        }
    }
}
