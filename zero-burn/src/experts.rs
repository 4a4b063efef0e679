//! Gradients on a mesh with an expert axis ([`Axes::EXPERT`](zero_core::Axes::EXPERT)). Its places train on their own parts of the batch
//! and have experts of their own, to which [`parallel::all_to_all`](crate::parallel::all_to_all) sends rows. Gradients of shared parameters
//! are summed over the axis when gradients are collected, in buckets, after the reduction along `data`. An expert's gradient covers the
//! rows of all places already. Both are then divided by the number of places.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn_backend::Backend;
use burn_backend::ops::FloatTensorOps;
use burn_std::DType;
use zero_core::{Buffer, ReduceOp};
use zero_engine::cell::GRADIENT;

use crate::abort::raise;
use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::engine::{Cell, Kind, Slot, Template, burn_dtype};
use crate::tensor::{Shard, ZeroTensor};
use crate::values::{piece, read};
use crate::walk;

/// The reduced gradient of a parameter, if this rank has one.
struct Reduced<B: Backend> {
    id: ParamId,
    slot: Arc<Slot<B>>,
    cell: Option<Arc<Cell<B>>>,
}

/// Averages the reduced gradients of the module's parameters over the expert axis, for those that `is_meant` selects. A collective.
pub(crate) fn average<A: ZeroAutodiff, M: AutodiffModule<A>>(
    context: &Context<A::Base>,
    grads: &mut GradientsParams,
    module: &M,
    is_meant: impl Fn(ParamId) -> bool,
) {
    let Some(places) = context.expert_places() else { return };
    // A parameter may be in the module more than once, tied.
    let (mut done, mut shared) = (HashSet::new(), Vec::new());
    walk::visit::<A, M>(module, |meta, tensor| {
        let id = meta.id;
        if !is_meant(id) || !done.insert(id) {
            return;
        }
        let Some(slot) = walk::slot_of(context, id, tensor.as_ref()) else { return };
        let cell = match walk::take_gradient::<A>(grads, id) {
            Some(ZeroTensor::Shard(Shard { cell, .. })) => Some(cell),
            Some(other) => return walk::put_gradient::<A>(grads, id, other),
            None => None,
        };
        shared.push(Reduced { id, slot, cell });
    });
    let (shared, own): (Vec<_>, Vec<_>) =
        shared.into_iter().partition(|reduced| reduced.slot.mesh.is_averaged.load(Ordering::Relaxed));
    for Reduced { id, cell, .. } in own {
        let Some(cell) = cell else { continue };
        let tensor = ZeroTensor::Shard(Shard::new(cell));
        let mean = A::InnerBackend::float_div_scalar(tensor, (places.world() as f32).into());
        walk::put_gradient::<A>(grads, id, mean);
    }
    // Some places may have used a parameter that this one has not.
    let has = shared.iter().map(|reduced| u8::from(reduced.cell.is_some())).collect();
    let has = places.all_reduce(Buffer::U8(has), ReduceOp::Max).unwrap_or_else(|error| raise(error)).into_u8();
    let mut shared = shared.into_iter().zip(has).filter_map(|(reduced, has)| (has == 1).then_some(reduced)).peekable();
    while shared.peek().is_some() {
        let (mut bucket, mut values) = (Vec::new(), Vec::new());
        while let Some(Reduced { id, slot, cell }) =
            shared.next_if(|_| values.len() < context.rank.config.reduce_bucket_size)
        {
            let len = slot.partition.len(context.rank.place(slot.partition));
            match cell {
                Some(cell) => values.extend(values_of(&cell)),
                None => values.resize(values.len() + len, 0.0),
            }
            bucket.push((id, slot, len));
        }
        let means = places.all_reduce(Buffer::F32(values), ReduceOp::Mean).unwrap_or_else(|error| raise(error));
        let mut means = means.into_f32().into_iter();
        for (id, slot, len) in bucket {
            let cell = with_values(context, &slot, means.by_ref().take(len).collect());
            walk::put_gradient::<A>(grads, id, ZeroTensor::Shard(Shard::new(cell)));
        }
    }
}

/// Returns this rank's shard of a reduced gradient.
fn values_of<B: Backend>(cell: &Cell<B>) -> Vec<f32> {
    let mut values = read::<B>(cell.local()).convert_dtype(DType::F32).into_vec().expect("it was converted");
    values.truncate(cell.partition.len(cell.place()));
    values
}

/// Creates the reduced gradient of a parameter, with `values` as this rank's shard.
fn with_values<B: Backend>(context: &Context<B>, slot: &Arc<Slot<B>>, values: Vec<f32>) -> Arc<Cell<B>> {
    let rank = &context.rank;
    let piece = B::float_from_data(piece(values).convert_dtype(burn_dtype(rank.gradient_dtype(slot))), &rank.device);
    Cell::ready(Template::of(rank, slot, Kind::Gradient, GRADIENT), piece)
}
