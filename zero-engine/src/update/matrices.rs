//! Muon's updates: full matrices are orthogonalized, each by one rank, or by every rank if each has all of it.
//!
//! The momentum of a matrix is sharded like any state. In each round, every rank gets the shards of one matrix from all ranks,
//! orthogonalizes it, and returns to each rank its shard. Matrices are taken by size, so that the ranks of a round have equally much to do.
//! Besides its shards, a rank holds one matrix with the workspace of its products, and its shards of the round's matrices. The bits do not
//! depend on the number of ranks, as each matrix is computed as a whole.

use std::sync::Arc;

use zero_core::{Buffer, Collective, CommError};
use zero_kernels::Rule;
use zero_kernels::cpu::orthogonal::orthogonalize;
use zero_kernels::update::Sweep;

use super::overlapped::run_jobs;
use super::{Array, Job};
use crate::backend::{Backend, DType, HostData};
use crate::cell::rank::Rank;

/// Runs both passes of these updates. A collective operation of `owners`, the ranks in the order of their shards.
pub(super) fn run<B: Backend>(
    mut jobs: Vec<Job<B>>,
    rank: &Arc<Rank<B>>,
    owners: &dyn Collective,
) -> Result<(), CommError> {
    jobs.sort_by_key(|job| (std::cmp::Reverse(job.partition.0.numel()), job.number));
    let mut jobs = jobs.into_iter().peekable();
    while jobs.peek().is_some() {
        let mut round: Vec<Job<B>> = jobs.by_ref().take(owners.world()).collect();
        round.iter_mut().for_each(|job| job.direction = vec![0.0; job.elements]);
        // Jobs in memory run at once, others through the disk's buffers; the order may change.
        let mut round = run_jobs(round, rank)?;
        round.sort_by_key(|job| (std::cmp::Reverse(job.partition.0.numel()), job.number));
        exchange(&mut round, owners)?;
        for job in &mut round {
            let values = std::mem::take(&mut job.direction);
            job.gradient = Some((Array::Memory(B::Data::flat_of(Buffer::F32(values))), DType::F32));
            job.scale = 1.0;
            job.kernel.pass = Sweep::Second { trust: job.kernel.rule.scale(sizes(job)) };
        }
        drop(run_jobs(round, rank)?);
    }
    Ok(())
}

fn sizes<B: Backend>(job: &Job<B>) -> [usize; 2] {
    [job.shape[0], job.shape[1..].iter().product()]
}

/// Replaces the directions of a round's matrices by orthogonal ones.
fn exchange<B: Backend>(round: &mut [Job<B>], owners: &dyn Collective) -> Result<(), CommError> {
    let orthogonal = |job: &Job<B>, matrix: &mut [f32]| {
        let [rows, columns] = sizes(job);
        let _span = tracing::trace_span!("orthogonalize", rows, columns).entered();
        let Rule::Muon { ns_method, .. } = job.kernel.rule else {
            unreachable!("only Muon's matrices are orthogonalized")
        };
        orthogonalize(matrix, rows, columns, ns_method);
    };
    // Every rank has all of each matrix.
    if round.iter().all(|job| job.partition.0.is_whole()) {
        for job in round {
            let mut matrix = std::mem::take(&mut job.direction);
            orthogonal(job, &mut matrix);
            job.direction = matrix;
        }
        return Ok(());
    }
    let (own, world) = (owners.rank(), owners.world());
    let stride = round.iter().map(|job| job.partition.0.stride()).max().unwrap_or(0);
    let mut sent = vec![0.0; world * stride];
    for (job, part) in round.iter().zip(sent.chunks_mut(stride)) {
        let (partition, place) = job.partition;
        part[..partition.len(place)].copy_from_slice(&job.direction[..partition.len(place)]);
    }
    let mut shards = owners.all_to_all(Buffer::F32(sent))?.into_f32();
    if let Some(job) = round.get(own) {
        let partition = job.partition.0;
        // With hybrid sharding, consecutive owners have copies of a shard.
        let range = |owner: usize| partition.range(owner * partition.world() / world);
        let mut matrix = vec![0.0; partition.numel()];
        for (owner, shard) in shards.chunks(stride).enumerate() {
            let range = range(owner);
            matrix[range.clone()].copy_from_slice(&shard[..range.len()]);
        }
        orthogonal(job, &mut matrix);
        for (owner, shard) in shards.chunks_mut(stride).enumerate() {
            let range = range(owner);
            shard[..range.len()].copy_from_slice(&matrix[range]);
        }
    }
    let returned = owners.all_to_all(Buffer::F32(shards))?.into_f32();
    for (job, part) in round.iter_mut().zip(returned.chunks(stride)) {
        let (partition, place) = job.partition;
        let length = partition.len(place);
        job.direction[..length].copy_from_slice(&part[..length]);
    }
    Ok(())
}
