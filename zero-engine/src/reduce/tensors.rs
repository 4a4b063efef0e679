//! Reduction of gradients in place, on devices.
//!
//! The ranks of a process exchange handles of their gradients, one bucket's worth at a time, and each sums its own shards on its own
//! device. The last rank that has read a gradient drops it. At stage 0, one rank sums each gradient and shares it with the others.

use std::sync::Arc;

use zero_core::accounting::WireKind;
use zero_core::collective::Joined;
use zero_core::{Collective, CommError, Partition};

use super::{Incoming, Lanes, names};
use crate::backend::{Backend, DType, Shared, SumItem};
use crate::cell::rank::Rank;
use crate::values::{here, of_type, part};

const SUMMED: &str = "every gradient is summed by this rank or by the one that shares it";

/// Gradients, or sums of them, that a rank hands to the others; `None` where it has none.
type Handed<B> = Vec<Option<Shared<B>>>;

/// A mean that this rank computes: elements `range` of the gradient at `place`.
struct Wanted {
    place: usize,
    range: std::ops::Range<usize>,
}

pub(super) struct Tensors<B: Backend> {
    rank: Arc<Rank<B>>,
    comm: Arc<dyn Collective>,
    /// Each rank keeps its shard of the sum, not the full sum.
    shards: bool,
    /// Factors of the values before they are added, and of their sum.
    before: f32,
    after: f32,
    /// Type to which values are rounded as if they were sent, so that bits equal those of ranks that do send them.
    sent_as: DType,
    /// Number of elements that are handed over at once.
    capacity: usize,
    held: Vec<Incoming<B>>,
    elements: usize,
}

impl<B: Backend> Tensors<B> {
    pub(super) fn new(comm: Arc<dyn Collective>, bucket_size: usize, shards: bool, rank: &Arc<Rank<B>>) -> Self {
        let (sent_as, before, after) = rank.config.reduction(comm.world(), false);
        Self {
            before,
            after,
            sent_as: sent_as.wire_dtype(),
            capacity: bucket_size.max(1),
            rank: rank.clone(),
            comm,
            shards,
            held: Vec::new(),
            elements: 0,
        }
    }

    /// Reduces the held gradients.
    fn flush(&mut self) -> Result<(), CommError> {
        if self.held.is_empty() {
            return Ok(());
        }
        let name = names(self.held.iter().map(|held| &*held.cell));
        let size = self.sent_as.size();
        let bytes = self.elements * size;
        let handed: Handed<B> = self.held.iter_mut().map(|held| held.gradient.take()).collect();
        let all = self.exchange(handed, bytes, &name)?;
        let (rank, world) = (self.comm.rank(), self.comm.world());
        let columns: usize = self.held.iter().map(|held| Partition::new(held.numel, world).stride()).sum();
        let shards = self.shards;
        let wanted = (0..self.held.len()).filter_map(|place| {
            let numel = self.held[place].numel;
            let range = match shards {
                true => Partition::new(numel, world).range(rank),
                false if place % world == rank => 0..numel,
                false => return None,
            };
            Some(Wanted { place, range })
        });
        let reduced = self.sums(&all, wanted.collect());
        drop(all);
        // As if they had been sent; an all-reduce is a reduce-scatter and an all-gather.
        let received = columns * size * (world - 1);
        let settled = match shards {
            true => {
                self.comm.wire().add(WireKind::ReduceScatter, received);
                reduced
            }
            false => {
                self.comm.wire().add(WireKind::AllReduce, 2 * received);
                let all = self.exchange(reduced, bytes, &name)?;
                let on_device = |full: &Shared<B>| here::<B>(B::unaliased(full.tensor()), &self.rank.device);
                let full = |place: usize| all[place % world][place].as_ref().map(on_device);
                let full: Option<Vec<B::Tensor>> = (0..self.held.len()).map(full).collect();
                Shared::many(full.expect(SUMMED)).into_iter().map(Some).collect()
            }
        };
        self.elements = 0;
        for (held, shard) in self.held.drain(..).zip(settled) {
            self.rank.count_unreduced(-held.counted);
            held.cell.settle(Ok(shard.expect(SUMMED)));
        }
        Ok(())
    }

    fn exchange(&self, handed: Handed<B>, bytes: usize, name: &str) -> Result<Vec<Arc<Handed<B>>>, CommError> {
        let all = self.comm.in_process().expect("the ranks share memory").exchange(Arc::new(handed), bytes, name)?;
        let tensors = |item: Joined| item.downcast().expect("all ranks have the same inner backend");
        Ok(all.into_iter().map(tensors).collect())
    }

    /// Returns the wanted means, at their places.
    fn sums(&self, all: &[Arc<Handed<B>>], wanted: Vec<Wanted>) -> Handed<B> {
        let (mut places, mut sums) = (Vec::with_capacity(wanted.len()), Vec::with_capacity(wanted.len()));
        let wanted = self.sums_at_once(all, wanted, &mut places, &mut sums);
        for Wanted { place, range } in wanted {
            let numel = self.held[place].numel;
            places.push(place);
            sums.push(self.sum(all.iter().map(|handed| handed[place].as_ref()), numel, range, place));
        }
        let mut reduced: Handed<B> = vec![None; self.held.len()];
        for (place, sum) in places.into_iter().zip(Shared::many(sums)) {
            reduced[place] = Some(sum);
        }
        reduced
    }

    /// Computes the wanted means that CubeCL's kernel for many tensors supports; returns the others.
    fn sums_at_once(
        &self,
        all: &[Arc<Handed<B>>],
        wanted: Vec<Wanted>,
        places: &mut Vec<usize>,
        sums: &mut Vec<B::Tensor>,
    ) -> Vec<Wanted> {
        if self.before != 1.0 || self.sent_as != DType::F32 || !B::has_kernels(&self.rank.device) {
            return wanted;
        }
        let device = &self.rank.device;
        let (now, later): (Vec<Wanted>, Vec<Wanted>) = wanted.into_iter().partition(|wanted| {
            let mut parts = all.iter().filter_map(|handed| handed[wanted.place].as_ref());
            !wanted.range.is_empty() && parts.all(|part| part.dtype() == DType::F32 && part.device() == device)
        });
        let item = |Wanted { place, range }: &Wanted| SumItem {
            parts: all.iter().filter_map(|handed| handed[*place].as_ref()).map(Shared::tensor).collect(),
            range: range.clone(),
            dtype: self.held[*place].cell.dtype,
        };
        match B::sum_parts(now.iter().map(item).collect(), self.after) {
            Some(made) => {
                places.extend(now.iter().map(|wanted| wanted.place));
                sums.extend(made);
            }
            None => return now.into_iter().chain(later).collect(),
        }
        later
    }

    /// Returns elements `range` of the mean over the ranks, summed in rank order in fp32; one filler element for an empty range.
    fn sum<'t>(
        &self,
        gradients: impl Iterator<Item = Option<&'t Shared<B>>>,
        numel: usize,
        range: std::ops::Range<usize>,
        place: usize,
    ) -> B::Tensor
    where
        B: 't,
    {
        let device = &self.rank.device;
        let dtype = self.held[place].cell.dtype;
        if range.is_empty() {
            return B::zeros(&[1], device, dtype);
        }
        let sent = |x: B::Tensor| of_type::<B>(of_type::<B>(x, self.sent_as), DType::F32);
        let addend = |gradient: &Shared<B>| {
            let flat = B::reshape(gradient.tensor(), &[numel]);
            sent(scaled::<B>(here::<B>(part::<B>(flat, range.clone()), device), self.before))
        };
        let sum = gradients.flatten().map(addend).reduce(|sum, next| B::add(sum, next));
        let sum = sum.expect("a parameter is reduced when at least one rank has a gradient of it");
        of_type::<B>(scaled::<B>(sent(sum), self.after), dtype)
    }
}

impl<B: Backend> Lanes<B> for Tensors<B> {
    fn push(&mut self, incoming: Incoming<B>) -> Result<(), CommError> {
        self.elements += incoming.numel;
        self.held.push(incoming);
        if self.elements >= self.capacity { self.flush() } else { Ok(()) }
    }

    fn finish(&mut self) -> Result<(), CommError> {
        self.flush()
    }

    fn fail(&mut self, error: &CommError) {
        for held in self.held.drain(..) {
            self.rank.count_unreduced(-held.counted);
            held.cell.settle(Err(error.clone()));
        }
    }
}

/// Multiplies `x` by `factor` in fp32.
fn scaled<B: Backend>(x: B::Tensor, factor: f32) -> B::Tensor {
    if factor == 1.0 { x } else { B::mul_scalar(of_type::<B>(x, DType::F32), factor.into()) }
}
