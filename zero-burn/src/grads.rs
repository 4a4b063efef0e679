//! Operations on reduced gradients: norms, scaling, replacement.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use burn::module::{AutodiffModule, Module, ParamId};
use burn::optim::GradientsParams;
#[cfg(feature = "cubecl")]
use burn_backend::BackendTypes;
use burn_backend::ops::FloatTensorOps;
use zero_core::{Axes, ReduceOp};

use crate::abort::stop;
use crate::autodiff::ZeroAutodiff;
use crate::birth::of_part;
use crate::context::Context;
#[cfg(feature = "cubecl")]
use crate::elementwise::own_piece;
use crate::engine::{Cell, Kind, burn_dtype};
use crate::gathered::{ParamMeta, parameters};
use crate::random::sign;
use crate::tensor::{Shard, ZeroTensor};
use crate::values::piece;
use crate::walk;
use zero_engine::update::norms::own_squares;

/// Replaces a parameter's reduced gradient by `values`, the full gradient, flat and the same on every rank. Returns `false` if there is no
/// gradient of that size.
pub fn set_gradient<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: &mut GradientsParams,
    module: &M,
    id: ParamId,
    values: &[f32],
) -> bool {
    let Some(ZeroTensor::Shard(Shard { cell, .. })) = walk::gradient::<A>(grads, id) else { return false };
    let is_here = parameters::<A, M>(module).iter().any(|meta| meta.id == id);
    if !is_here || cell.partition.numel() != values.len() {
        return false;
    }
    let data = piece(values[cell.partition.range(cell.place())].to_vec()).convert_dtype(burn_dtype(cell.dtype));
    let origin = Cell::derivation("set_gradient", &[&cell]);
    let piece = A::Base::float_from_data(data, &cell.device);
    let cell = Cell::ready(cell.template(Kind::Gradient, origin), piece);
    drop(walk::take_gradient::<A>(grads, id));
    walk::put_gradient::<A>(grads, id, ZeroTensor::Shard(Shard::new(cell)));
    true
}

/// Multiplies every gradient of the module by `factor`, shard by shard.
pub fn scale_grads<A: ZeroAutodiff, M: AutodiffModule<A>>(
    mut grads: GradientsParams,
    module: &M,
    factor: f32,
) -> GradientsParams {
    // A parameter may be in the module more than once, tied.
    let mut done = HashSet::new();
    walk::visit::<A, M>(module, |meta, _| {
        let gradient = done.insert(meta.id).then(|| grads.remove::<A::InnerBackend, 1>(meta.id)).flatten();
        if let Some(gradient) = gradient {
            grads.register::<A::InnerBackend, 1>(meta.id, gradient.mul_scalar(factor));
        }
    });
    grads
}

/// Declares that the module's parameters are the same at every place on a foreign axis of the mesh, with the same gradients: for example a
/// norm, or a bias that is added after a sum over the axis. Norms count them once. On an [expert axis](Axes::EXPERT), whose places train on
/// their own parts of the batch, these are all parameters except the experts', and their gradients are averaged over the axis. Call it on a
/// prepared module.
///
/// # Panics
///
/// If the mesh has no such axis; the launcher reports the error.
pub fn replicated_along<A: ZeroAutodiff, M: Module<A>>(module: &M, axis: &str) {
    let is_counted = Context::<A::Base>::current().group(axis).rank() == 0;
    walk::visit::<A, M>(module, |_, tensor| {
        let Some(ZeroTensor::Shard(Shard { cell, .. })) = tensor else { return };
        let Some(slot) = &cell.slot else { return };
        slot.mesh.is_counted.fetch_and(is_counted, Ordering::Relaxed);
        slot.mesh.is_averaged.fetch_or(axis == Axes::EXPERT, Ordering::Relaxed);
    });
}

/// Declares that the module's parameters are parts of full parameters that are split over foreign axes of the mesh, and draws their first
/// values, which differ at each place on the axes. Call it on a module that was just created, for example by `LinearConfig::init`, before
/// `prepare` and any use. Parameters drawn without it are the same at every place.
///
/// # Panics
///
/// If the mesh has no such axis, or if a parameter has been drawn before. The launcher reports the error.
pub fn sharded_along<A: ZeroAutodiff, M: Module<A>>(module: &M, axes: &[&str]) {
    let context = Context::<A::Base>::current();
    if axes.contains(&Axes::DATA) {
        stop("sharded_along: expected axes of the mesh other than data, along which ZeroConfig shards".into());
    }
    let groups: Vec<_> = axes.iter().map(|axis| context.group(axis)).collect();
    if groups.iter().all(|group| group.world() == 1) {
        return;
    }
    let part = sign(&groups.iter().map(|group| group.rank() as u64).collect::<Vec<_>>());
    // Burn's initializers draw when a parameter is first accessed.
    let look = |meta: ParamMeta, tensor| {
        let Some(ZeroTensor::Shard(Shard { cell, .. })) = tensor else { return };
        if cell.drawn().is_some_and(|drawn| drawn.part != Some(part)) {
            let path = meta.path;
            stop(format!("parameter {path:?} was initialized before sharded_along: call it on a newly created module"));
        }
    };
    of_part(part, || walk::visit::<A, M>(module, look));
}

/// Returns the L2 norm over all gradients of the module, the same on every rank and at every stage. It covers all parts of the model along
/// foreign axes of a mesh; parameters that these share must be declared by [`replicated_along`]. Every rank must call it, on gradients from
/// [`collect_grads`](crate::module::collect_grads).
pub fn grad_norm<A: ZeroAutodiff, M: AutodiffModule<A>>(grads: &GradientsParams, module: &M) -> f64 {
    let context = Context::<A::Base>::current();
    let (world, place) = (context.rank.world, context.rank.owners(0).1);
    let mut cells = Vec::new();
    // A parameter may be in the module more than once, tied.
    let mut done = HashSet::new();
    walk::visit::<A, M>(module, |meta, tensor| {
        let Some(gradient) = walk::gradient::<A>(grads, meta.id).filter(|_| done.insert(meta.id)) else { return };
        let ZeroTensor::Shard(Shard { cell, .. }) = gradient else {
            stop(format!("gradient of parameter {} is not reduced: pass gradients through collect_grads", meta.id))
        };
        if cell.slot.as_ref().is_some_and(|slot| !slot.mesh.is_counted.load(Ordering::Relaxed)) {
            cells.push(None);
            return;
        }
        if context.part() > 0
            && let Some(ZeroTensor::Shard(Shard { cell, .. })) = tensor
            && cell.drawn().is_some_and(|drawn| drawn.part.is_none())
        {
            stop(format!(
                "parameter {:?} was initialized with the same values at every place of the mesh {}: if it is a part of \
                 a full parameter, call module::sharded_along on the newly created module; if not, call \
                 module::replicated_along",
                meta.path, context.rank.config.axes
            ));
        }
        cells.push(Some(cell));
    });
    // For each parameter, one sum of squares per rank's shard, zero if another rank computes it.
    let mut pieces = vec![0.0; cells.len() * world];
    for (pieces, sum) in pieces.chunks_exact_mut(world).zip(own_squares(&cells)) {
        pieces[place] = sum;
    }
    // Adding zeros changes no bits. At stage 0, too, each rank squares only its own part: gradients are the same on all ranks.
    pieces = context.reduce_scalars(pieces, ReduceOp::Sum);
    context.sum_over_parts(pieces.iter().sum()).sqrt()
}

/// Returns the sums of squares of all gradients as a tensor on their device, without reading it. Returns `None` unless this is a single
/// rank that keeps everything there.
#[cfg(feature = "cubecl")]
pub(crate) fn sums_on_device<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: &GradientsParams,
    module: &M,
) -> Option<<A::Base as BackendTypes>::FloatTensorPrimitive> {
    let context = Context::<A::Base>::current();
    let rank = &context.rank;
    if context.has_parts() || rank.world > 1 || rank.overlaps_updates || !zero_ops::is_cube::<A::Base>() {
        return None;
    }
    let (mut pieces, mut done, mut is_there) = (Vec::new(), HashSet::new(), true);
    walk::visit::<A, M>(module, |meta, parameter| {
        let Some(gradient) = walk::gradient::<A>(grads, meta.id).filter(|_| done.insert(meta.id)) else { return };
        match (parameter, gradient) {
            (Some(ZeroTensor::Shard(parameter)), ZeroTensor::Shard(Shard { cell, .. }))
                if parameter.cell.dtype != zero_engine::backend::DType::F64 =>
            {
                pieces.extend(own_piece(&cell));
            }
            _ => is_there = false,
        }
    });
    if is_there { zero_ops::sums_of_squares::<A::Base>(&pieces) } else { None }
}

/// Returns the first parameter, in the order of the module's fields, whose gradient holds an infinity or a NaN; the same on every rank.
/// Every rank must call it, on gradients from [`collect_grads`](crate::module::collect_grads). It reads all of them.
pub fn first_nonfinite<A: ZeroAutodiff, M: AutodiffModule<A>>(
    grads: &GradientsParams,
    module: &M,
) -> Option<ParamMeta> {
    let mut odd = Vec::new();
    walk::visit::<A, M>(module, |meta, tensor| {
        if tensor.is_none() {
            return;
        }
        let is_odd = match walk::gradient::<A>(grads, meta.id) {
            Some(ZeroTensor::Shard(shard)) => shard.cell.data().0.iter::<f32>().any(|x| !x.is_finite()),
            _ => false,
        };
        odd.push(f64::from(u8::from(is_odd)));
    });
    let odd = Context::<A::Base>::current().reduce_scalars(odd, ReduceOp::Max);
    let first = odd.into_iter().position(|odd| odd > 0.0)?;
    parameters::<A, M>(module).into_iter().nth(first)
}
