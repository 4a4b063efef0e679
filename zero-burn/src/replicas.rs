//! A check that the tensors that every rank holds in full are equal on all ranks, see
//! [`ZeroConfig::check_replicas`](crate::config::ZeroConfig::check_replicas).
//!
//! Each rank hashes, parameter by parameter, what its next forward pass would use: its own full parameters at stage 0, and those that it
//! has gathered and kept. One all-gather of 8 bytes per parameter compares the hashes, so that all ranks reach the same verdict.
//!
//! A change by hand is recorded on a parameter until its next update. At stages 1 and 2 the update turns it into shards, which all ranks
//! then gather alike. So before every update, one byte from each rank tells whether there is a change that must be compared.

use std::collections::HashMap;

use burn::module::AutodiffModule;
use burn_backend::Backend;

use crate::abort::stop;
use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::random::{sign_bytes, words};
use crate::tensor::{Shard, ZeroTensor};
use crate::values::read;
use crate::view::Extent;
use crate::walk::{self, ParamMeta};

/// The hash of a tensor that a rank does not hold in full.
const ABSENT: u64 = 0;

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
    let mut found: Vec<(ParamMeta, u64)> = Vec::new();
    walk::visit::<A, M>(module, |meta, tensor| match tensor {
        Some(ZeroTensor::Shard(shard)) => found.push((meta, hash::<A::Base>(shard))),
        // Each rank's own.
        Some(_) => found.push((meta, ABSENT)),
        None => {}
    });
    let all = context.gather_bytes(found.iter().flat_map(|(_, hash)| hash.to_le_bytes()).collect());
    let ranks: Vec<Vec<u64>> = all.chunks_exact(8 * found.len().max(1)).map(|rank| words(rank).collect()).collect();
    for (place, (ParamMeta { path, shape, .. }, _)) in found.iter().enumerate() {
        let hashes: Vec<u64> = ranks.iter().map(|rank| rank[place]).collect();
        if let Some((odd, usual)) = odd_ranks(&hashes) {
            let names = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            stop(format!(
                "replicas differ before update {update}: parameter {path} {shape:?} of rank(s) {} differs from rank(s) \
                 {}. Change parameters alike on all ranks (zero_burn::gathered does), or resume from the last \
                 checkpoint (detected by check_replicas)",
                names(&odd),
                names(&usual)
            ));
        }
    }
}

/// Returns the ranks that differ from the majority, or from the lowest rank if there is no majority, and the ranks that they differ from.
fn odd_ranks(hashes: &[u64]) -> Option<(Vec<usize>, Vec<usize>)> {
    let present: Vec<(usize, u64)> = hashes.iter().copied().enumerate().filter(|&(_, hash)| hash != ABSENT).collect();
    let mut counts: HashMap<u64, usize> = HashMap::new();
    present.iter().for_each(|&(_, hash)| *counts.entry(hash).or_default() += 1);
    let majority = counts.iter().find(|&(_, &count)| 2 * count > present.len()).map(|(&hash, _)| hash);
    let usual = majority.or(present.first().map(|&(_, hash)| hash))?;
    let (usual, odd): (Vec<_>, Vec<_>) = present.into_iter().partition(|&(_, hash)| hash == usual);
    let ranks = |of: Vec<(usize, u64)>| of.into_iter().map(|(rank, _)| rank).collect::<Vec<_>>();
    (!odd.is_empty()).then(|| (ranks(odd), ranks(usual)))
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
    // Never equal to `ABSENT`.
    sign_bytes(read::<B>(tensor).as_bytes()).max(1)
}

#[cfg(test)]
mod tests {
    use super::odd_ranks;

    #[test]
    fn the_odd_one_out_is_found() {
        assert_eq!(odd_ranks(&[5, 5, 5]), None);
        assert_eq!(odd_ranks(&[0, 0]), None);
        assert_eq!(odd_ranks(&[0, 7, 7]), None);
        assert_eq!(odd_ranks(&[5, 6]), Some((vec![1], vec![0])));
        assert_eq!(odd_ranks(&[6, 5, 5]), Some((vec![0], vec![1, 2])));
        assert_eq!(odd_ranks(&[5, 5, 6, 5]), Some((vec![2], vec![0, 1, 3])));
        assert_eq!(odd_ranks(&[5, 6, 7]), Some((vec![1, 2], vec![0])));
    }
}
