//! A check that ranks hold the same of what each of them holds whole, see
//! [`ZeroConfig::check_replicas`](crate::config::ZeroConfig::check_replicas).
//!
//! Each rank hashes, parameter by parameter, what its next forward pass would use: its own whole parameters at stage 0, and
//! what it has gathered and kept of the others'. One all-gather of 8 bytes a parameter compares the hashes, so that all ranks
//! come to the same verdict.
//!
//! A change by hand is recorded of a parameter until its next update, which at stages 1 and 2 makes pieces of it that all ranks
//! then gather alike: so a byte of each rank before every update tells whether there is a change, and that it must be compared.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::Backend;

use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::random::sign_bytes;
use crate::tensor::{Shard, ZeroTensor};
use crate::trouble::stop;
use crate::values::read;
use crate::view::Extent;

/// The hash of what a rank does not hold whole.
const ABSENT: u64 = 0;

/// Compares the ranks' replicas before the gradients of every n-th update are collected. A collective.
pub(crate) fn check<A: ZeroAutodiff, M: AutodiffModule<A>>(context: &Context<A::Base>, module: &M) {
    if context.world == 1 || context.config.check_replicas == 0 {
        return;
    }
    let mut edits = Edits { any: false, first: None };
    visit::<A, M>(module, &mut edits);
    let Some((update, is_due)) = edits.first.and_then(|slot| context.update_to_check(slot)) else { return };
    let edited = context.gather_bytes(vec![u8::from(edits.any)]).contains(&1);
    if !is_due && !edited {
        return;
    }
    let mut signatures = Signatures { path: Vec::new(), found: Vec::new() };
    visit::<A, M>(module, &mut signatures);
    let found = signatures.found;
    let all = context.gather_bytes(found.iter().flat_map(|(.., hash)| hash.to_le_bytes()).collect());
    let ranks: Vec<Vec<u64>> = all
        .chunks_exact(8 * found.len().max(1))
        .map(|rank| rank.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes"))).collect())
        .collect();
    for (place, (path, shape, _)) in found.iter().enumerate() {
        let hashes: Vec<u64> = ranks.iter().map(|rank| rank[place]).collect();
        if let Some((odd, usual)) = odd_ranks(&hashes) {
            let names = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            stop(format!(
                "replicas differ before update {update}: parameter {path} {shape:?} of rank {} is not that of rank {}. \
                 Change parameters on all ranks alike (zero_burn::gathered does), or resume from the last checkpoint \
                 (found by check_replicas)",
                names(&odd),
                names(&usual)
            ));
        }
    }
}

/// The ranks that differ from most of the others, or from the lowest if there is no majority, and those.
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

struct Edits {
    /// Whether a parameter was changed since its last update.
    any: bool,
    /// The slot of the first parameter.
    first: Option<u64>,
}

impl<A: ZeroAutodiff> ModuleVisitor<A> for Edits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        if let TensorPrimitive::Float(ZeroTensor::Shard(shard)) = param.val().inner().into_primitive() {
            self.any |= !shard.views.is_empty();
            self.first = self.first.or(shard.cell.slot.as_ref().map(|slot| slot.index));
        }
    }
}

struct Signatures {
    path: Vec<String>,
    /// Path, shape and hash.
    found: Vec<(String, Vec<usize>, u64)>,
}

impl<A: ZeroAutodiff> ModuleVisitor<A> for Signatures {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        let tensor = param.val();
        let shape = tensor.dims().to_vec();
        let hash = match tensor.inner().into_primitive() {
            TensorPrimitive::Float(ZeroTensor::Shard(shard)) => hash::<A::Base>(shard),
            // Each rank's own.
            _ => ABSENT,
        };
        self.found.push((self.path.join("."), shape, hash));
    }
}

fn visit<A: ZeroAutodiff, M: AutodiffModule<A>>(module: &M, visitor: &mut impl ModuleVisitor<A>) {
    module.visit(visitor);
}

/// Of the whole, where this rank has it.
fn hash<B: Backend>(Shard { cell, views }: Shard<B>) -> u64 {
    let tensor = if cell.partition.is_whole() {
        let piece = cell.local();
        if !views.only_maps() {
            return ABSENT;
        }
        views.apply_maps(piece, Extent::Piece(cell.partition, cell.place()))
    } else {
        let whole = cell.settled().whole.as_ref().map(zero_ops::Shared::tensor);
        let Some(whole) = whole else { return ABSENT };
        views.apply(whole)
    };
    // Never that of nothing.
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
