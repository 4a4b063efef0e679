//! Buckets in the host's memory.

use std::sync::Arc;

use burn_backend::{Backend, TensorData};
use burn_std::{DType, Shape};
use zero_core::collective::Joined;
use zero_core::{Buffer, Collective, CommError, Partition, Pending, ReduceOp, Request, Stage};
use zero_ops::Shared;

use super::{Incoming, names};
use crate::context::Context;
use crate::shard::Cell;
use crate::values::{here, read};

/// A gradient's reduced piece as it is put together from buckets.
struct Piece<B: Backend> {
    cell: Arc<Cell<B>>,
    values: Vec<f32>,
    /// Columns of the layout that have been reduced.
    columns_done: usize,
    columns: usize,
}

/// `columns` columns of piece `piece`, from its column `from`, at column `at` of the bucket.
struct Segment {
    piece: usize,
    from: usize,
    at: usize,
    columns: usize,
}

/// Rows of one bucket: for each rank `capacity` columns.
pub(super) struct Buckets<B: Backend> {
    context: Arc<Context<B>>,
    comm: Arc<dyn Collective>,
    stage: Stage,
    /// What values are multiplied by before they are added, and their sum afterwards.
    before: f32,
    after: f32,
    sent_as: zero_core::collective::DType,
    /// Columns of a full bucket.
    capacity: usize,
    /// Columns still to come in this pass, so that the last bucket is no larger than it need be.
    remaining: usize,
    rows: Vec<f32>,
    row_len: usize,
    filled: usize,
    segments: Vec<Segment>,
    in_flight: Option<InFlight>,
    pieces: Vec<Option<Piece<B>>>,
}

/// A request, and what it holds.
enum InFlight {
    /// A bucket of rows of `row_len` columns.
    Bucket { pending: Pending, segments: Vec<Segment>, row_len: usize },
    /// One gradient: the result is its piece.
    Alone { pending: Pending, piece: usize, counted: i64 },
    /// One gradient that every rank keeps whole: the result is a tensor, the same for all ranks of this process.
    Shared { pending: Pending<Joined>, piece: usize, counted: i64 },
}

/// Elements from which a gradient goes alone: 256 KiB, beyond which a request's own cost is nothing.
const ALONE: usize = 1 << 16;

impl<B: Backend> Buckets<B> {
    pub(super) fn new(
        comm: Arc<dyn Collective>,
        bucket_size: usize,
        stage: Stage,
        context: &Arc<Context<B>>,
        plan: &[u64],
    ) -> Self {
        let world = comm.world();
        let columns = |numel: usize| Partition::new(numel, world).stride();
        let config = &context.config;
        let (sent_as, before, after) = config.reduction(world, false);
        let sent_as = sent_as.on_the_wire();
        let sizes =
            || plan.iter().filter_map(|index| context.parameters.slot(*index)).map(|slot| slot.partition.numel());
        Self {
            before,
            after,
            sent_as,
            capacity: (bucket_size / world).max(1),
            remaining: sizes().filter(|&numel| !goes_alone(numel, world, sent_as, before)).map(columns).sum(),
            context: context.clone(),
            comm,
            stage,
            rows: Vec::new(),
            row_len: 0,
            filled: 0,
            segments: Vec::new(),
            in_flight: None,
            pieces: Vec::new(),
        }
    }

    /// Lays one gradient into buckets, sending those that fill up.
    pub(super) fn push(&mut self, incoming: Incoming<B>) -> Result<(), CommError> {
        let Incoming { gradient, cell, numel, counted } = incoming;
        let values = gradient.map(|gradient| read::<B>(gradient.into_tensor()).convert_dtype(DType::F32));
        if self.goes_alone(numel) {
            return self.send_alone(values, cell, numel, counted);
        }
        // It is in the bucket by the end of this.
        self.context.count_unreduced(-counted);
        let values = values.as_ref().map(|data| data.as_slice::<f32>().expect("callers converted it"));
        let world = self.comm.world();
        let layout = Partition::new(numel, world);
        let piece = self.pieces.len();
        let len = if self.stage.shards_optimizer() { layout.len(self.comm.rank()) } else { numel };
        self.pieces.push(Some(Piece {
            cell,
            values: vec![0.0; len.max(1)],
            columns_done: 0,
            columns: layout.stride(),
        }));
        if numel == 0 {
            self.complete(piece);
            return Ok(());
        }
        let mut from = 0;
        while from < layout.stride() {
            if self.row_len == 0 {
                self.row_len = self.capacity.min(self.remaining);
                self.rows = vec![0.0; self.row_len * world];
            }
            let columns = (self.row_len - self.filled).min(layout.stride() - from);
            if let Some(values) = values {
                for rank in 0..world {
                    let owned = layout.range(rank);
                    let source = (owned.start + from).min(owned.end)..(owned.start + from + columns).min(owned.end);
                    let at = rank * self.row_len + self.filled;
                    copy_scaled(&mut self.rows[at..at + source.len()], &values[source], self.before);
                }
            }
            self.segments.push(Segment { piece, from, at: self.filled, columns });
            self.filled += columns;
            self.remaining -= columns;
            from += columns;
            if self.filled == self.row_len {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Sends the bucket, full by now, once the one before it is done.
    fn flush(&mut self) -> Result<(), CommError> {
        if self.filled == 0 {
            return Ok(());
        }
        debug_assert_eq!(self.filled, self.row_len, "a bucket is never larger than what remains");
        self.wait()?;
        let rows = Buffer::from_f32(std::mem::take(&mut self.rows), self.sent_as);
        let pieces = self.segments.iter().filter_map(|segment| self.pieces[segment.piece].as_ref());
        let name = names(pieces.map(|piece| &*piece.cell));
        let request = if self.stage.shards_optimizer() {
            Request::ReduceScatter(rows, ReduceOp::Sum)
        } else {
            Request::AllReduce(rows, ReduceOp::Sum)
        };
        let segments = std::mem::take(&mut self.segments);
        let pending = self.comm.start_for(request, &name);
        self.in_flight = Some(InFlight::Bucket { pending, segments, row_len: self.row_len });
        self.filled = 0;
        self.row_len = 0;
        Ok(())
    }

    /// Whether a gradient is sent as it is; the same on every rank. Not where it is converted or divided first.
    fn goes_alone(&self, numel: usize) -> bool {
        goes_alone(numel, self.comm.world(), self.sent_as, self.before)
    }

    fn send_alone(
        &mut self,
        values: Option<TensorData>,
        cell: Arc<Cell<B>>,
        numel: usize,
        counted: i64,
    ) -> Result<(), CommError> {
        let columns = Partition::new(numel, self.comm.world()).stride();
        let piece = self.pieces.len();
        self.pieces.push(Some(Piece { cell, values: Vec::new(), columns_done: 0, columns }));
        let values = match values {
            Some(values) => values.into_vec::<f32>().expect("callers converted it"),
            None => vec![0.0; numel],
        };
        if let Err(error) = self.wait() {
            self.context.count_unreduced(-counted);
            return Err(error);
        }
        let values = Buffer::F32(values);
        let name = names(self.pieces[piece].iter().map(|piece| &*piece.cell));
        self.in_flight = Some(if self.stage.shards_optimizer() {
            let pending = self.comm.start_for(Request::ReduceScatter(values, ReduceOp::Mean), &name);
            InFlight::Alone { pending, piece, counted }
        } else {
            let cell = &self.pieces[piece].as_ref().expect("it is completed by its result").cell;
            let (device, dtype) = (cell.device.clone(), cell.dtype);
            let join = move |pieces: &[Arc<Buffer>]| -> Joined {
                Arc::new(tensor::<B>(Buffer::join(pieces).into_f32(), dtype, &device))
            };
            let pending = self.comm.start_shared(values, ReduceOp::Mean, &name, Box::new(join));
            InFlight::Shared { pending, piece, counted }
        });
        Ok(())
    }

    /// Sends the last bucket and waits for all results.
    pub(super) fn finish(&mut self) -> Result<(), CommError> {
        self.flush()?;
        self.wait()
    }

    /// Takes in the result of the request in flight.
    fn wait(&mut self) -> Result<(), CommError> {
        // An error: `fail` tells the cells of what was in flight and of all that is still to come.
        match self.in_flight.take() {
            None => {}
            Some(InFlight::Bucket { pending, segments, row_len }) => {
                self.take_in(segments, row_len, &pending.wait()?.into_f32());
            }
            Some(InFlight::Alone { pending, piece, counted }) => {
                let reduced = pending.wait().map(Buffer::into_f32);
                self.context.count_unreduced(-counted);
                self.pieces[piece].as_mut().expect("a piece is completed once").values = reduced?;
                self.complete(piece);
            }
            Some(InFlight::Shared { pending, piece, counted }) => {
                let joined = pending.wait();
                self.context.count_unreduced(-counted);
                let joined = joined?.downcast::<B::FloatTensorPrimitive>();
                let whole = (*joined.expect("every rank joins to a tensor of the one inner backend")).clone();
                let cell = self.pieces[piece].take().expect("a piece is completed once").cell;
                cell.settle(Ok(Shared::new(here::<B>(whole, &cell.device))));
            }
        }
        Ok(())
    }

    /// Copies the reduced rows of a bucket to the pieces that they are parts of.
    fn take_in(&mut self, segments: Vec<Segment>, row_len: usize, reduced: &[f32]) {
        let world = self.comm.world();
        let scale = self.after;
        for Segment { piece: index, from, at, columns } in segments {
            let piece = self.pieces[index].as_mut().expect("a piece is completed by its last segment");
            if self.stage.shards_optimizer() {
                let from = from.min(piece.values.len());
                let take = columns.min(piece.values.len() - from);
                copy_scaled(&mut piece.values[from..from + take], &reduced[at..at + take], scale);
            } else {
                let layout = Partition::new(piece.values.len(), world);
                for rank in 0..world {
                    let owned = layout.range(rank);
                    let target = (owned.start + from).min(owned.end)..(owned.start + from + columns).min(owned.end);
                    let source = rank * row_len + at;
                    let len = target.len();
                    copy_scaled(&mut piece.values[target], &reduced[source..source + len], scale);
                }
            }
            piece.columns_done += columns;
            if piece.columns_done == piece.columns {
                self.complete(index);
            }
        }
    }

    fn complete(&mut self, index: usize) {
        let piece = self.pieces[index].take().expect("a piece is completed once");
        let settled = tensor::<B>(piece.values, piece.cell.dtype, &piece.cell.device);
        piece.cell.settle(Ok(Shared::new(settled)));
    }

    pub(super) fn fail(&mut self, error: &CommError) {
        for piece in self.pieces.iter_mut().filter_map(Option::take) {
            piece.cell.settle(Err(error.clone()));
        }
    }
}

/// A flat tensor of `values`, as `dtype`.
fn tensor<B: Backend>(values: Vec<f32>, dtype: DType, device: &B::Device) -> B::FloatTensorPrimitive {
    let len = values.len();
    let mut data = TensorData::new(values, Shape::new([len]));
    if dtype != DType::F32 {
        data = data.convert_dtype(dtype);
    }
    B::float_from_data(data, device)
}

/// See [`Buckets::goes_alone`].
fn goes_alone(numel: usize, world: usize, sent_as: zero_core::collective::DType, before: f32) -> bool {
    numel >= ALONE && numel.is_multiple_of(world) && sent_as == zero_core::collective::DType::F32 && before == 1.0
}

fn copy_scaled(target: &mut [f32], source: &[f32], scale: f32) {
    if scale == 1.0 {
        target.copy_from_slice(source);
        return;
    }
    target.iter_mut().zip(source).for_each(|(t, s)| *t = s * scale);
}
