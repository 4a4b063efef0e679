//! A check that tensors that every rank holds in full are equal on all ranks
//! ([`ZeroConfig::check_replicas`](zero_core::config::ZeroConfig::check_replicas)). Each rank hashes what it would use next, and one
//! all-gather of 8 bytes per parameter compares the hashes, so that all ranks reach the same verdict.

use std::collections::HashMap;

use crate::abort::stop;
use crate::backend::{Backend, HostData};
use crate::cell::Cell;
use crate::random::{sign_bytes, words};
use crate::runtime::Runtime;

/// The hash of a tensor that a rank does not hold in full.
pub const ABSENT: u64 = 0;

/// Returns the hash of a full tensor.
pub fn hash<B: Backend>(full: B::Tensor) -> u64 {
    // Never equal to `ABSENT`.
    sign_bytes(B::read(full).bytes()).max(1)
}

/// Returns the hash of the full tensor of `cell`, or [`ABSENT`] if this rank does not hold it.
pub fn hash_of<B: Backend>(cell: &Cell<B>) -> u64 {
    let full = if cell.partition.is_whole() { Some(cell.local()) } else { cell.settled().full.tensor() };
    full.map_or(ABSENT, hash::<B>)
}

/// Compares the hashes of the parameters `found`, each with a description, before update number `update`. Ends all ranks with an error if
/// replicas of a parameter differ. A collective.
pub fn compare<B: Backend>(runtime: &Runtime<B>, update: u64, found: &[(String, u64)]) {
    let all = runtime.gather_bytes(found.iter().flat_map(|(_, hash)| hash.to_le_bytes()).collect());
    let ranks: Vec<Vec<u64>> = all.chunks_exact(8 * found.len().max(1)).map(|rank| words(rank).collect()).collect();
    for (place, (parameter, _)) in found.iter().enumerate() {
        let hashes: Vec<u64> = ranks.iter().map(|rank| rank[place]).collect();
        if let Some((odd, usual)) = odd_ranks(&hashes) {
            let names = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            stop(format!(
                "replicas differ before update {update}: {parameter} of rank(s) {} differs from rank(s) {}. Change parameters \
                 alike on all ranks, or resume from the last checkpoint (detected by check_replicas)",
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
