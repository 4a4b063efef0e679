//! Whole parameters for a while: reading and changing them outside of a forward pass. What DeepSpeed calls
//! `GatheredParameters`.

use std::collections::{HashMap, HashSet};
use std::hash::Hasher;

use burn::module::{AutodiffModule, ParamId};
use burn_backend::{Backend, TensorData};
use zero_core::Buffer;

use crate::autodiff::ZeroAutodiff;
use crate::cell::{Cell, Kind, Origin};
use crate::context::Context;
use crate::preparation::{end_forward, in_place_of};
use crate::stats::all_gather;
use crate::tensor::{Shard, ZeroTensor};
use crate::trouble::stop;
use crate::values::{piece, read as read_data};
use crate::walk;
pub use crate::walk::ParamMeta;

/// The float parameters of a module, in the order of its fields.
pub fn parameters<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M) -> Vec<ParamMeta> {
    let mut metas = Vec::new();
    walk::visit::<A, M>(module, |meta, tensor| metas.extend(tensor.map(|_| meta)));
    metas
}

/// A whole parameter in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Gathered {
    /// Which parameter it is.
    pub meta: ParamMeta,
    /// Its elements in row-major order, in fp32.
    pub values: Vec<f32>,
}

/// The parameters that `select` names, whole, on this rank. Ranks may differ in what they read.
///
/// Memory: the selected parameters whole; select one at a time where that matters.
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

/// Makes rank `root`'s `values` the parameters' values on all ranks; returns the module and the values. Every rank calls
/// it, with the same parameters. Between a backward pass and its update it is not allowed: gradients would be of other
/// parameters.
///
/// An optimizer that keeps fp32 masters must be told ([`Fused::set_state`](crate::optim::Fused::set_state)); zero-train's
/// engine does that.
///
/// # Panics
///
/// With the launcher's error when a collective fails, when `root` is no rank, or when a parameter has another number of
/// elements than values were given.
pub fn write<A: ZeroAutodiff, M: AutodiffModule<A>>(
    module: M,
    root: usize,
    parameters: Vec<Gathered>,
) -> (M, Vec<Gathered>) {
    let context = Context::<A::Base>::current();
    if root >= context.rank.world {
        stop(format!("the values of rank {root} were asked for, but there are {} ranks, from 0", context.rank.world));
    }
    let mut written = Vec::with_capacity(parameters.len());
    for Gathered { meta, values } in parameters {
        let expected: usize = meta.shape.iter().product();
        if values.len() != expected {
            stop(format!("{} has {expected} elements, but {} values were left in its place", meta.path, values.len()));
        }
        written.push(Gathered { meta, values: context.broadcast(Buffer::F32(values), root).into_f32() });
    }
    let mut replacements: HashMap<ParamId, &[f32]> =
        written.iter().map(|parameter| (parameter.meta.id, parameter.values.as_slice())).collect();
    end_forward::<A, M>(&module);
    // Nobody reads the old versions any more; and once all are replaced, nobody needs them.
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

/// Tells which gathered parameters a program changes.
#[derive(Debug)]
pub struct Edits(Vec<u64>);

impl Edits {
    /// Of parameters as they were gathered, alike on all ranks.
    pub fn watch(found: &[Gathered]) -> Self {
        Self(found.iter().map(|parameter| fingerprint(&parameter.values)).collect())
    }

    /// Those that rank `root` has changed since; none without a `root`. With one, every rank must call it.
    ///
    /// # Panics
    ///
    /// With the launcher's error when a parameter was changed where it does not count: it would keep its old values.
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
                    "rank {} has changed the values of {} while they were gathered, but {counted} changes are kept: name the \
                     rank that changes parameters as modify_on_rank",
                    first + rank,
                    found[lost].meta.path
                ));
            }
        }
        found.into_iter().zip(counts).filter(|(_, counts)| **counts > 0.0).map(|(parameter, _)| parameter).collect()
    }
}

/// Of the bits of `values`, to see whether any has changed.
fn fingerprint(values: &[f32]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    values.iter().for_each(|value| hasher.write_u32(value.to_bits()));
    hasher.finish()
}

/// Gathers the parameters that `select` names, runs `f` on them on every rank, and, with `modify_on_rank`, makes what that
/// rank has left in `values` the parameters' values on all ranks, as [`write()`] does. Every rank must call it alike.
///
/// # Panics
///
/// As [`write()`], and when a parameter is changed where that would be lost ([`Edits::of`]).
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

/// The parameter's next version, of which `piece` is this rank's part, converted to its type.
pub(crate) fn next_version<B: Backend>(cell: &Cell<B>, piece: TensorData) -> ZeroTensor<B> {
    let piece = B::float_from_data(piece.convert_dtype(cell.dtype), &cell.device);
    ZeroTensor::Shard(Shard::new(Cell::ready(cell.template(Kind::Parameter, Origin::Version), piece)))
}
