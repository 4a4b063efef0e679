//! Buckets on devices, for ranks that are processes. Kernels for many tensors pack and unpack them; [`TensorCollectives`] reduces them.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use zero_core::collective::threads::panic_reason;
use zero_core::{CommError, OperationCall};

use super::buckets::{Medium, Reduced, Segment};
use crate::abort::{raise, stop};
use crate::backend::{Backend, DType, PackItem, Shared, UnpackItem};
use crate::cell::Cell;
use crate::cell::deadline::Deadline;
use crate::cell::rank::Rank;
use crate::tensor_collectives::{Begun, TensorCollectives};
use crate::tier::Home;
use crate::worker::Worker;

/// Error for gradients that the kernels do not support.
const TOO_LARGE: &str = "a parameter of 2^31 elements or more cannot be reduced on a device: split it up";

/// Maximum number of elements of a bucket: kernels count in 32 bits.
pub(super) const MOST: usize = i32::MAX as usize / 2;

pub(super) struct OnDevice<B: Backend> {
    rank: Arc<Rank<B>>,
    collectives: Arc<TensorCollectives>,
    /// Factors of the values before they are added, and of their sum.
    before: f32,
    after: f32,
    sent_as: DType,
    /// Items of the bucket that is being filled.
    items: Vec<PackItem<B::Tensor>>,
    /// Moves shards that are not kept on the device, if this runs on the rank's own thread.
    settler: Option<Arc<Settler<B>>>,
}

/// Maximum number of shards that wait to be moved out.
const WAITING: usize = 8;

/// The thread that moves reduced shards out of a device's memory, because that requires waiting for the device.
pub(super) type Settler<B> = Worker<(Arc<Cell<B>>, Shared<B>)>;

/// Settles cells with their shards, concurrently with the rank's own thread.
fn settle_overlapped<B: Backend>(inbox: Receiver<(Arc<Cell<B>>, Shared<B>)>) {
    for (cell, shard) in inbox {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| cell.settle(Ok(shard)))) {
            cell.settle(Err(CommError::Device {
                at: OperationCall::new("gradients", 0, cell.rank.place.rank, format!("moving the {cell:?}")),
                reason: panic_reason(&*payload).into(),
            }));
        }
    }
}

impl<B: Backend> OnDevice<B> {
    pub(super) fn new(
        collectives: Arc<TensorCollectives>,
        rank: &Arc<Rank<B>>,
        settler: Option<Arc<Settler<B>>>,
    ) -> Self {
        let (sent_as, before, after) = rank.config.reduction(rank.world, collectives.rounds_sums());
        Self {
            rank: rank.clone(),
            collectives,
            before,
            after,
            sent_as: sent_as.wire_dtype(),
            items: Vec::new(),
            settler,
        }
    }
}

impl<B: Backend> Medium<B> for OnDevice<B> {
    type Gradient = B::Tensor;
    type Target = B::Tensor;
    type Sent = Begun<B>;
    type Alone = Infallible;

    const HOLDS: bool = true;

    fn shards(&self) -> bool {
        self.rank.config.stage.shards_optimizer()
    }

    fn take(&self, gradient: Shared<B>) -> B::Tensor {
        match gradient.dtype() {
            DType::F32 | DType::F16 | DType::Bf16 => gradient.into_tensor(),
            _ => B::cast(gradient.into_tensor(), DType::F32),
        }
    }

    fn goes_alone(&self, _numel: usize) -> bool {
        false
    }

    fn add(&mut self, gradient: &Option<B::Tensor>, segment: Segment, _row: usize) {
        let Segment { numel, from, columns, .. } = segment;
        self.items.push(PackItem { tensor: gradient.clone(), numel, from, columns });
    }

    fn send(&mut self, row: usize, name: &str) -> Result<Begun<B>, CommError> {
        let (items, ranks) = (std::mem::take(&mut self.items), self.rank.mesh.shards());
        let bucket = match items.iter().all(|item| item.tensor.is_none()) {
            true => B::zeros(&[ranks, row], &self.rank.device, self.sent_as),
            false => {
                let packed = B::pack(items, ranks, self.sent_as, self.before);
                packed.unwrap_or_else(|| stop(TOO_LARGE.into()))
            }
        };
        self.collectives.begin_reduction::<B>(bucket, Medium::<B>::shards(self), name)
    }

    fn receive(
        &mut self,
        sent: Begun<B>,
        _row: usize,
        segments: &[Segment],
        shards: &mut [Option<Reduced<B, B::Tensor>>],
    ) -> Result<(), CommError> {
        let reduced = self.collectives.end_reduction::<B>(sent, &self.rank.device)?;
        let mut items = Vec::with_capacity(segments.len());
        for &Segment { shard, from, columns, .. } in segments {
            let shard = shards[shard].as_mut().expect("a shard is completed by its last segment");
            let (target, numel, dtype) = (shard.target.take(), shard.len, shard.cell.dtype);
            items.push(UnpackItem { target, numel, from, columns, dtype });
        }
        let rows = if Medium::<B>::shards(self) { 1 } else { self.rank.mesh.shards() };
        let unpacked = B::unpack(reduced, rows, items, self.after);
        let unpacked = unpacked.unwrap_or_else(|| stop(TOO_LARGE.into()));
        for (segment, target) in segments.iter().zip(unpacked) {
            shards[segment.shard].as_mut().expect("a shard is completed by its last segment").target = Some(target);
        }
        Ok(())
    }

    fn settle(&self, shard: Reduced<B, B::Tensor>) {
        let Reduced { cell, target, .. } = shard;
        // One filler element if the rank has none.
        let shard = target.unwrap_or_else(|| B::zeros(&[1], &cell.device, cell.dtype));
        let len = B::numel(&shard);
        let shard = Shared::new(B::reshape(shard, &[len]));
        match &self.settler {
            Some(settler) if !matches!(cell.home(), Home::Backend) => {
                // Shards that wait for the settler use the device memory that they are to free.
                let mut deadline = Deadline::new(&self.rank);
                while settler.backlog() > WAITING {
                    std::thread::sleep(Duration::from_micros(100));
                    let waiting = deadline.check(&self.rank, &"a wait for gradients to leave the device");
                    waiting.unwrap_or_else(|error| raise(error));
                }
                settler.send::<B>((cell, shard), settle_overlapped);
            }
            _ => cell.settle(Ok(shard)),
        }
    }

    fn send_alone(&mut self, _: Option<B::Tensor>, _: usize, _: &str, _: &Cell<B>) -> Infallible {
        unreachable!("on a device, all gradients are in buckets")
    }

    fn receive_alone(&mut self, sent: Infallible, _cell: &Cell<B>) -> Result<Shared<B>, CommError> {
        match sent {}
    }

    fn finish(&self) -> Result<(), CommError> {
        self.collectives.check()
    }
}
