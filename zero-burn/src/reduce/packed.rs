//! Buckets on devices, for ranks that are processes: packed, reduced ([`Bulk`]) and unpacked by kernels for many tensors.
//!
//! The layout is that of [`super::host`]: per rank a row, per parameter the same columns of each.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};
use crossbeam_channel::Receiver;
use zero_core::collective::threads::panic_reason;
use zero_core::{CommError, Partition, Stage};
use zero_ops::{PackItem, Shared, UnpackItem};

use super::{Incoming, names};
use crate::bulk::{Begun, Bulk};
use crate::context::Context;
use crate::patience::Patience;
use crate::shard::Cell;
use crate::tier::Home;
use crate::trouble::{raise, stop};
use crate::worker::Worker;

/// What kernels do not take, of the floats on a device that come here.
const TOO_LARGE: &str = "a parameter of 2^31 elements or more cannot be reduced on a device: cut it in two";

/// A gradient's reduced piece as it is put together from buckets.
struct Piece<B: Backend> {
    cell: Arc<Cell<B>>,
    target: Option<B::FloatTensorPrimitive>,
    /// Elements of the target.
    len: usize,
    columns_done: usize,
    columns: usize,
}

/// Columns of a bucket that are `columns` columns of a piece, from its column `from`.
struct Segment {
    piece: usize,
    from: usize,
    columns: usize,
}

struct InFlight<B: Backend> {
    begun: Begun<B>,
    segments: Vec<Segment>,
}

pub(super) struct Packed<B: Backend> {
    context: Arc<Context<B>>,
    bulk: Arc<Bulk>,
    stage: Stage,
    rank: usize,
    world: usize,
    /// What values are multiplied by before they are added, and their sum afterwards.
    before: f32,
    after: f32,
    sent_as: DType,
    /// Columns of a full bucket.
    capacity: usize,
    /// Of the bucket that is being filled.
    items: Vec<PackItem<B::FloatTensorPrimitive>>,
    segments: Vec<Segment>,
    filled: usize,
    /// Bytes of its gradients, which count as not reduced.
    counted: i64,
    in_flight: Option<InFlight<B>>,
    pieces: Vec<Option<Piece<B>>>,
    /// Moves pieces that are kept elsewhere than on the device, where this runs on the rank's own thread.
    settler: Option<Arc<Settler<B>>>,
}

/// Most pieces that wait to be moved out.
const WAITING: usize = 8;

/// The thread that moves reduced pieces out of a device's memory, which takes waiting for the device.
pub(super) type Settler<B> = Worker<(Arc<Cell<B>>, Shared<B>)>;

/// Gives a cell its piece, beside the rank's own thread.
fn settle_beside<B: Backend>(inbox: Receiver<(Arc<Cell<B>>, Shared<B>)>) {
    for (cell, piece) in inbox {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| cell.settle(Ok(piece)))) {
            cell.settle(Err(CommError::Device {
                group: "gradients".into(),
                seq: 0,
                rank: cell.context.rank,
                op: format!("moving a reduced gradient of {cell:?}"),
                reason: panic_reason(&*payload).into(),
            }));
        }
    }
}

impl<B: Backend> Packed<B> {
    pub(super) fn new(
        bulk: Arc<Bulk>,
        (bucket_size, stage): (usize, Stage),
        context: &Arc<Context<B>>,
        settler: Option<Arc<Settler<B>>>,
    ) -> Self {
        let world = context.world;
        let (sent_as, before, after) = context.config.reduction(world, bulk.rounds_sums());
        Self {
            before,
            after,
            sent_as: sent_as.dtype(),
            // Kernels count in 32 bit.
            capacity: (bucket_size.min(i32::MAX as usize / 2) / world).max(1),
            context: context.clone(),
            bulk,
            stage,
            rank: context.rank,
            world,
            items: Vec::new(),
            segments: Vec::new(),
            filled: 0,
            counted: 0,
            in_flight: None,
            pieces: Vec::new(),
            settler,
        }
    }

    /// Lays one gradient into buckets, sending those that fill up.
    pub(super) fn push(&mut self, incoming: Incoming<B>) -> Result<(), CommError> {
        let Incoming { gradient, cell, numel, counted } = incoming;
        self.counted += counted;
        let tensor = gradient.map(|gradient| match gradient.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => gradient.into_tensor(),
            _ => B::float_cast(gradient.into_tensor(), DType::F32.into()),
        });
        let layout = Partition::new(numel, self.world);
        let piece = self.pieces.len();
        let len = if self.stage.shards_optimizer() { layout.len(self.rank) } else { numel };
        self.pieces.push(Some(Piece { cell, target: None, len, columns_done: 0, columns: layout.stride() }));
        if numel == 0 {
            self.complete(piece);
            return Ok(());
        }
        let mut from = 0;
        while from < layout.stride() {
            let columns = (self.capacity - self.filled).min(layout.stride() - from);
            self.items.push(PackItem { tensor: tensor.clone(), numel, from, columns });
            self.segments.push(Segment { piece, from, columns });
            self.filled += columns;
            from += columns;
            if self.filled == self.capacity {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Sends the bucket, once the one before it is done.
    fn flush(&mut self) -> Result<(), CommError> {
        if self.filled == 0 {
            return Ok(());
        }
        self.wait()?;
        let (items, segments) = (std::mem::take(&mut self.items), std::mem::take(&mut self.segments));
        let columns = std::mem::take(&mut self.filled);
        let is_empty = items.iter().all(|item| item.tensor.is_none());
        let bucket = match is_empty {
            true => B::float_zeros(Shape::new([self.world, columns]), &self.context.device, self.sent_as.into()),
            false => {
                let packed = zero_ops::pack::<B>(items, self.world, self.sent_as, self.before);
                packed.unwrap_or_else(|_| stop(TOO_LARGE.into()))
            }
        };
        self.context.count_unreduced(-std::mem::take(&mut self.counted));
        let pieces = segments.iter().filter_map(|segment| self.pieces[segment.piece].as_ref());
        let name = names(pieces.map(|piece| &*piece.cell));
        let begun = self.bulk.begin_reduction::<B>(bucket, self.stage.shards_optimizer(), &name)?;
        self.in_flight = Some(InFlight { begun, segments });
        Ok(())
    }

    /// Sends the last bucket and waits for all results.
    pub(super) fn finish(&mut self) -> Result<(), CommError> {
        self.flush()?;
        self.wait()?;
        self.bulk.check()
    }

    /// Takes in the result of the bucket in flight.
    fn wait(&mut self) -> Result<(), CommError> {
        let Some(InFlight { begun, segments }) = self.in_flight.take() else { return Ok(()) };
        let reduced = self.bulk.end::<B>(begun, &self.context.device)?;
        let mut items = Vec::with_capacity(segments.len());
        for Segment { piece, from, columns } in &segments {
            let piece = self.pieces[*piece].as_mut().expect("a piece is completed by its last segment");
            let (target, numel, dtype) = (piece.target.take(), piece.len, piece.cell.dtype);
            items.push(UnpackItem { target, numel, from: *from, columns: *columns, dtype });
        }
        let rows = if self.stage.shards_optimizer() { 1 } else { self.world };
        let unpacked = zero_ops::unpack::<B>(reduced, rows, items, self.after);
        let unpacked = unpacked.unwrap_or_else(|_| stop(TOO_LARGE.into()));
        for (Segment { piece: index, columns, .. }, target) in segments.into_iter().zip(unpacked) {
            let piece = self.pieces[index].as_mut().expect("a piece is completed by its last segment");
            piece.target = Some(target);
            piece.columns_done += columns;
            if piece.columns_done == piece.columns {
                self.complete(index);
            }
        }
        Ok(())
    }

    fn complete(&mut self, index: usize) {
        let Piece { cell, target, .. } = self.pieces[index].take().expect("a piece is completed once");
        // One element of filler where the rank has none.
        let piece = target.unwrap_or_else(|| B::float_zeros(Shape::new([1]), &cell.device, cell.dtype.into()));
        let len = piece.shape().num_elements();
        let piece = Shared::new(B::float_reshape(piece, Shape::new([len])));
        match &self.settler {
            Some(settler) if !matches!(cell.home(), Home::Backend) => {
                // Pieces that wait for it take the device's memory, which they are to leave.
                let mut patience = Patience::new(&self.context);
                while settler.backlog() > WAITING {
                    std::thread::sleep(Duration::from_micros(100));
                    let waiting = patience.check(&self.context, &"a wait for gradients to leave the device");
                    waiting.unwrap_or_else(|error| raise(error));
                }
                settler.send((cell, piece), settle_beside);
            }
            _ => cell.settle(Ok(piece)),
        }
    }

    pub(super) fn fail(&mut self, error: &CommError) {
        self.context.count_unreduced(-std::mem::take(&mut self.counted));
        for piece in self.pieces.iter_mut().filter_map(Option::take) {
            piece.cell.settle(Err(error.clone()));
        }
    }
}
