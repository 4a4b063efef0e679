//! Buckets on devices, for ranks that are processes. Kernels for many tensors pack and unpack them; [`Bulk`] reduces them.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};
use crossbeam_channel::Receiver;
use zero_core::collective::threads::panic_reason;
use zero_core::{CommError, OperationCall};
use zero_ops::{PackItem, Shared, UnpackItem};

use super::buckets::{Medium, Reduced, Segment};
use crate::bulk::{Begun, Bulk};
use crate::cell::Cell;
use crate::cell::patience::Patience;
use crate::cell::rank::Rank;
use crate::tier::Home;
use crate::trouble::{raise, stop};
use crate::values::dtype_of;
use crate::worker::Worker;

/// Error for gradients that the kernels do not support.
const TOO_LARGE: &str = "a parameter of 2^31 elements or more cannot be reduced on a device: split it up";

/// Maximum number of elements of a bucket: kernels count in 32 bits.
pub(super) const MOST: usize = i32::MAX as usize / 2;

pub(super) struct OnDevice<B: Backend> {
    rank: Arc<Rank<B>>,
    bulk: Arc<Bulk>,
    /// Factors of the values before they are added, and of their sum.
    before: f32,
    after: f32,
    sent_as: DType,
    /// Items of the bucket that is being filled.
    items: Vec<PackItem<B::FloatTensorPrimitive>>,
    /// Moves shards that are not kept on the device, if this runs on the rank's own thread.
    settler: Option<Arc<Settler<B>>>,
}

/// Maximum number of shards that wait to be moved out.
const WAITING: usize = 8;

/// The thread that moves reduced shards out of a device's memory, because that requires waiting for the device.
pub(super) type Settler<B> = Worker<(Arc<Cell<B>>, Shared<B>)>;

/// Settles cells with their shards, concurrently with the rank's own thread.
fn settle_beside<B: Backend>(inbox: Receiver<(Arc<Cell<B>>, Shared<B>)>) {
    for (cell, piece) in inbox {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| cell.settle(Ok(piece)))) {
            cell.settle(Err(CommError::Device {
                at: OperationCall::new("gradients", 0, cell.rank.place.rank, format!("moving the {cell:?}")),
                reason: panic_reason(&*payload).into(),
            }));
        }
    }
}

impl<B: Backend> OnDevice<B> {
    pub(super) fn new(bulk: Arc<Bulk>, rank: &Arc<Rank<B>>, settler: Option<Arc<Settler<B>>>) -> Self {
        let (sent_as, before, after) = rank.config.reduction(rank.world, bulk.rounds_sums());
        Self { rank: rank.clone(), bulk, before, after, sent_as: dtype_of(sent_as), items: Vec::new(), settler }
    }
}

impl<B: Backend> Medium<B> for OnDevice<B> {
    type Gradient = B::FloatTensorPrimitive;
    type Target = B::FloatTensorPrimitive;
    type Sent = Begun<B>;
    type Alone = Infallible;

    const HOLDS: bool = true;

    fn take(&self, gradient: Shared<B>) -> B::FloatTensorPrimitive {
        match gradient.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => gradient.into_tensor(),
            _ => B::float_cast(gradient.into_tensor(), DType::F32.into()),
        }
    }

    fn goes_alone(&self, _numel: usize) -> bool {
        false
    }

    fn add(&mut self, gradient: &Option<B::FloatTensorPrimitive>, segment: Segment, _row: usize) {
        let Segment { numel, from, columns, .. } = segment;
        self.items.push(PackItem { tensor: gradient.clone(), numel, from, columns });
    }

    fn send(&mut self, row: usize, name: &str) -> Result<Begun<B>, CommError> {
        let (items, ranks) = (std::mem::take(&mut self.items), self.rank.mesh.shards());
        let bucket = match items.iter().all(|item| item.tensor.is_none()) {
            true => B::float_zeros(Shape::new([ranks, row]), &self.rank.device, self.sent_as.into()),
            false => {
                let packed = zero_ops::pack::<B>(items, ranks, self.sent_as, self.before);
                packed.unwrap_or_else(|_| stop(TOO_LARGE.into()))
            }
        };
        self.bulk.begin_reduction::<B>(bucket, self.rank.config.stage.shards_optimizer(), name)
    }

    fn receive(
        &mut self,
        sent: Begun<B>,
        _row: usize,
        segments: &[Segment],
        pieces: &mut [Option<Reduced<B, B::FloatTensorPrimitive>>],
    ) -> Result<(), CommError> {
        let reduced = self.bulk.end_reduction::<B>(sent, &self.rank.device)?;
        let mut items = Vec::with_capacity(segments.len());
        for &Segment { piece, from, columns, .. } in segments {
            let piece = pieces[piece].as_mut().expect("a shard is completed by its last segment");
            let (target, numel, dtype) = (piece.target.take(), piece.len, piece.cell.dtype);
            items.push(UnpackItem { target, numel, from, columns, dtype });
        }
        let rows = if self.rank.config.stage.shards_optimizer() { 1 } else { self.rank.mesh.shards() };
        let unpacked = zero_ops::unpack::<B>(reduced, rows, items, self.after);
        let unpacked = unpacked.unwrap_or_else(|_| stop(TOO_LARGE.into()));
        for (segment, target) in segments.iter().zip(unpacked) {
            pieces[segment.piece].as_mut().expect("a shard is completed by its last segment").target = Some(target);
        }
        Ok(())
    }

    fn settle(&self, piece: Reduced<B, B::FloatTensorPrimitive>) {
        let Reduced { cell, target, .. } = piece;
        // One filler element if the rank has none.
        let piece = target.unwrap_or_else(|| B::float_zeros(Shape::new([1]), &cell.device, cell.dtype.into()));
        let len = piece.shape().num_elements();
        let piece = Shared::new(B::float_reshape(piece, Shape::new([len])));
        match &self.settler {
            Some(settler) if !matches!(cell.home(), Home::Backend) => {
                // Shards that wait for the settler use the device memory that they are to free.
                let mut patience = Patience::new(&self.rank);
                while settler.backlog() > WAITING {
                    std::thread::sleep(Duration::from_micros(100));
                    let waiting = patience.check(&self.rank, &"a wait for gradients to leave the device");
                    waiting.unwrap_or_else(|error| raise(error));
                }
                settler.send((cell, piece), settle_beside);
            }
            _ => cell.settle(Ok(piece)),
        }
    }

    fn send_alone(&mut self, _: Option<B::FloatTensorPrimitive>, _: usize, _: &str, _: &Cell<B>) -> Infallible {
        unreachable!("on a device, all gradients are in buckets")
    }

    fn receive_alone(&mut self, sent: Infallible, _cell: &Cell<B>) -> Result<Shared<B>, CommError> {
        match sent {}
    }

    fn finish(&self) -> Result<(), CommError> {
        self.bulk.check()
    }
}
