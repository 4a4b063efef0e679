//! Temporary access to full parameters, to read and change them outside of a forward pass. DeepSpeed calls this `GatheredParameters`.

use std::collections::{HashMap, HashSet};
use std::hash::Hasher;

use burn::module::{AutodiffModule, ParamId};
use burn_backend::{Backend, TensorData};
use zero_core::Buffer;

use crate::abort::stop;
use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::engine::{Cell, Kind, Origin, burn_dtype};
use crate::preparation::{end_forward, in_place_of};
use crate::stats::all_gather;
use crate::tensor::{Shard, ZeroTensor};
use crate::values::{piece, read as read_data};
use crate::walk;
pub use crate::walk::ParamMeta;

/// Returns the float parameters of a module, in the order of its fields.
pub fn parameters<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) -> Vec<ParamMeta> {
    let mut metas = Vec::new();
    walk::visit::<A, M>(module, |meta, tensor| metas.extend(tensor.map(|_| meta)));
    metas
}

/// A full parameter in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Gathered {
    /// The parameter.
    pub meta: ParamMeta,
    /// Its elements in row-major order, in fp32.
    pub values: Vec<f32>,
}

/// Reads the full parameters for which `select` returns `true` on this rank. Ranks may differ in what they read.
///
/// Memory: all selected parameters in full. To save memory, select one at a time.
pub fn read<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M, select: impl Fn(&ParamMeta) -> bool) -> Vec<Gathered> {
    end_forward::<A, M>(module);
    // A parameter may be in the module more than once, tied.
    let (mut found, mut done) = (Vec::new(), HashSet::new());
    walk::visit::<A, M>(module, |meta, tensor| {
        if let Some(tensor) = tensor.filter(|_| select(&meta) && done.insert(meta.id)) {
            let values = read_data::<A::Base>(tensor.load_exact()).iter::<f32>().collect();
            found.push(Gathered { meta, values });
        }
    });
    found
}

/// Sets parameters on all ranks to rank `root`'s `values`; returns the module and the values. Every rank calls it, with the same
/// parameters. It is not allowed between a backward pass and its update: the gradients would belong to other parameters.
///
/// An optimizer with fp32 master weights must be updated too ([`Fused::set_state`](crate::optim::Fused::set_state)); zero-train's engine
/// does that.
///
/// # Panics
///
/// If a collective fails, if `root` is not a rank, or if the number of values differs from the parameter's number of elements. The launcher
/// reports the error.
pub fn write<A: ZeroAutodiff, M: AutodiffModule<A>>(
    module: M,
    root: usize,
    parameters: Vec<Gathered>,
) -> (M, Vec<Gathered>) {
    let context = Context::<A::Base>::current();
    if root >= context.rank.world {
        stop(format!("cannot take values from rank {root}: there are {} ranks, numbered from 0", context.rank.world));
    }
    let mut written = Vec::with_capacity(parameters.len());
    for Gathered { meta, values } in parameters {
        let expected: usize = meta.shape.iter().product();
        if values.len() != expected {
            stop(format!("parameter {}: expected {expected} values, got {}", meta.path, values.len()));
        }
        written.push(Gathered { meta, values: context.broadcast(Buffer::F32(values), root).into_f32() });
    }
    let mut replacements: HashMap<ParamId, &[f32]> =
        written.iter().map(|parameter| (parameter.meta.id, parameter.values.as_slice())).collect();
    end_forward::<A, M>(&module);
    // No rank reads the old versions any more; once all are replaced, no rank needs them.
    context.fence("before parameters are replaced");
    let module = walk::map::<A, M, _>(
        module,
        |meta, _| replacements.remove(&meta.id),
        |meta, values, tensor| {
            let cell = match tensor {
                ZeroTensor::Shard(Shard { cell, .. }) => cell,
                ZeroTensor::Dense(dense) if !meta.trained => {
                    return in_place_of::<A::Base>(&dense, TensorData::new(values.to_vec(), [values.len()]));
                }
                _ => stop(format!(
                    "parameter {} is an ordinary tensor: call zero_burn::module::prepare on the model on rank {}",
                    meta.id, context.rank.place.rank
                )),
            };
            next_version(&cell, piece(values[cell.partition.range(cell.place())].to_vec()))
        },
    );
    context.fence("after parameters are replaced");
    (module, written)
}

/// A detector of changes to gathered parameters.
#[derive(Debug)]
pub struct Edits(Vec<u64>);

impl Edits {
    /// Records gathered parameters, whose values are the same on all ranks.
    pub fn watch(found: &[Gathered]) -> Self {
        Self(found.iter().map(|parameter| fingerprint(&parameter.values)).collect())
    }

    /// Returns the parameters that rank `root` has changed since; none without a `root`. If there is one, every rank must call it.
    ///
    /// # Panics
    ///
    /// If a parameter was changed on a rank whose changes are not kept; the launcher reports the error.
    pub fn of<B: Backend>(self, found: Vec<Gathered>, root: Option<usize>) -> Vec<Gathered> {
        let changed = found.iter().zip(&self.0).map(|(now, before)| fingerprint(&now.values) != *before);
        let mine: Vec<f64> = changed.map(|changed| f64::from(u8::from(changed))).collect();
        let rank = Context::<B>::current().rank.index;
        let (all, first) = match root {
            Some(_) => (all_gather::<B>(&mine), 0),
            None => (vec![mine], rank),
        };
        let nothing = vec![0.0; found.len()];
        let counts = match root {
            Some(root) => match all.get(root) {
                Some(counts) => counts,
                // `write` says that there is no such rank.
                None => return found,
            },
            None => &nothing,
        };
        for (rank, changed) in all.iter().enumerate() {
            if let Some(lost) = changed.iter().zip(counts).position(|(changed, counts)| changed > counts) {
                let counted = root.map_or("no rank's".into(), |root| format!("only rank {root}'s"));
                stop(format!(
                    "rank {} changed the gathered values of {}, but {counted} changes are kept: pass the rank that \
                     changes parameters as modify_on_rank",
                    first + rank,
                    found[lost].meta.path
                ));
            }
        }
        found.into_iter().zip(counts).filter(|(_, counts)| **counts > 0.0).map(|(parameter, _)| parameter).collect()
    }
}

/// Returns a hash of the bits of `values`, to detect changes.
fn fingerprint(values: &[f32]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    values.iter().for_each(|value| hasher.write_u32(value.to_bits()));
    hasher.finish()
}

/// Gathers the parameters for which `select` returns `true` and runs `f` on them on every rank. If `modify_on_rank` is given, the `values`
/// that `f` leaves on that rank become the parameters' values on all ranks, as in [`write()`]. Every rank must call it alike.
///
/// # Panics
///
/// Same as [`write()`]; also if a parameter is changed on a rank whose changes are not kept ([`Edits::of`]).
pub fn gathered<A: ZeroAutodiff, M: AutodiffModule<A>, R>(
    module: M,
    select: impl Fn(&ParamMeta) -> bool,
    modify_on_rank: Option<usize>,
    f: impl FnOnce(&mut [Gathered]) -> R,
) -> (M, R) {
    let mut found = read::<A, M>(&module, select);
    let edits = Edits::watch(&found);
    let result = f(&mut found);
    let changed = edits.of::<A::Base>(found, modify_on_rank);
    match modify_on_rank {
        Some(root) => (write::<A, M>(module, root, changed).0, result),
        None => (module, result),
    }
}

/// Returns the parameter's next version, with `piece` as this rank's shard, converted to its type.
pub(crate) fn next_version<B: Backend>(cell: &Cell<B>, piece: TensorData) -> ZeroTensor<B> {
    let piece = B::float_from_data(piece.convert_dtype(burn_dtype(cell.dtype)), &cell.device);
    ZeroTensor::Shard(Shard::new(Cell::ready(cell.template(Kind::Parameter, Origin::Version), piece)))
}
