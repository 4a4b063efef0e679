//! A check that the tensors that every rank holds in full are equal on all ranks, see
//! [`ZeroConfig::check_replicas`](crate::config::ZeroConfig::check_replicas).
//!
//! Each rank hashes, parameter by parameter, what its next forward pass would use: its own full parameters at stage 0, and those that it
//! has gathered and kept. One all-gather of 8 bytes per parameter compares the hashes, so that all ranks reach the same verdict.
//!
//! A change by hand is recorded on a parameter until its next update. At stages 1 and 2 the update turns it into shards, which all ranks
//! then gather alike. So before every update, one byte from each rank tells whether there is a change that must be compared.

use burn::module::AutodiffModule;
use burn_backend::Backend;
use zero_engine::replicas::{ABSENT, compare, hash as hash_of};

use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::engine::Inner;
use crate::tensor::{Shard, ZeroTensor};
use crate::view::Extent;
use crate::walk;

/// Compares the ranks' replicas before the gradients of every n-th update are collected. A collective.
pub(crate) fn check<A: ZeroAutodiff, M: AutodiffModule<A>>(context: &Context<A::Base>, module: &M) {
    if context.rank.world == 1 || context.rank.config.check_replicas == 0 {
        return;
    }
    // Whether a parameter was changed since its last update, and the slot of the first.
    let (mut any, mut first) = (false, None);
    walk::visit::<A, M>(module, |_, tensor| {
        if let Some(ZeroTensor::Shard(shard)) = tensor {
            any |= !shard.views.is_empty();
            first = first.or(shard.cell.slot.as_ref().map(|slot| slot.index));
        }
    });
    let Some((update, is_due)) = first.and_then(|slot| context.update_to_check(slot)) else { return };
    let edited = context.gather_bytes(vec![u8::from(any)]).contains(&1);
    if !is_due && !edited {
        return;
    }
    let mut found = Vec::new();
    walk::visit::<A, M>(module, |meta, tensor| {
        let name = format!("parameter {} {:?}", meta.path, meta.shape);
        match tensor {
            Some(ZeroTensor::Shard(shard)) => found.push((name, hash::<A::Base>(shard))),
            // Each rank's own.
            Some(_) => found.push((name, ABSENT)),
            None => {}
        }
    });
    compare::<Inner<A::Base>>(context, update, &found);
}

/// Returns the hash of the full tensor, or [`ABSENT`] if this rank does not have it.
fn hash<B: Backend>(Shard { cell, views }: Shard<B>) -> u64 {
    let tensor = if cell.partition.is_whole() {
        let piece = cell.local();
        if !views.only_maps() {
            return ABSENT;
        }
        views.apply_maps(piece, Extent::Piece(cell.partition, cell.place()))
    } else {
        let Some(whole) = cell.settled().full.tensor() else { return ABSENT };
        views.apply(whole)
    };
    hash_of::<Inner<B>>(tensor)
}
