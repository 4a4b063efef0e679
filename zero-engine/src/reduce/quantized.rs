//! Gradients that are sent in 8 or 4 bits and summed in fp32, like in ZeRO++ (Wang et al. 2023, <https://arxiv.org/abs/2306.10209>).

use zero_core::accounting::WireKind;
use zero_core::collective::DType;
use zero_core::{Buffer, Collective, CommError};
use zero_kernels::quantized::Format;

/// Encodes each of `shards` equal parts of `values` by itself, for an all-to-all.
pub(super) fn encode(how: Format, values: &[f32], shards: usize) -> Buffer {
    let mut sent = Vec::with_capacity(shards * how.bytes(values.len() / shards));
    for shard in values.chunks_exact((values.len() / shards).max(1)) {
        how.encode_row(shard, &mut sent);
    }
    Buffer::U8(sent)
}

/// Counts the uncompressed bytes of the other ranks' codes, each of `numel` numbers that would be sent as `dtype`.
pub(super) fn count(how: Format, comm: &dyn Collective, kind: WireKind, numel: usize, dtype: DType) {
    let others = comm.world() - 1;
    comm.wire().add_uncompressed(kind, others * numel * dtype.size(), others * how.bytes(numel));
}

/// Sums the received parts, of `numel` values each, in their order.
pub(super) fn sum(how: Format, received: Buffer, numel: usize) -> Vec<f32> {
    let (received, mut sum) = (received.into_u8(), vec![0.0; numel]);
    received.chunks_exact(how.bytes(numel).max(1)).for_each(|shard| how.add_row(shard, &mut sum));
    sum
}

/// Sums `values` over the ranks, quantized in both directions of an all-reduce: to the rank that sums a part, and back. Every rank gets the
/// same bits. Without quantization, they would be sent as `dtype`.
pub(super) fn all_reduce(
    how: Format,
    comm: &dyn Collective,
    values: &mut [f32],
    dtype: DType,
) -> Result<(), CommError> {
    let (world, numel) = (comm.world(), values.len().div_ceil(comm.world()));
    let mut padded = values.to_vec();
    padded.resize(world * numel, 0.0);
    [WireKind::AllToAll, WireKind::AllGather].into_iter().for_each(|kind| count(how, comm, kind, numel, dtype));
    let codes = encode(how, &padded, world);
    let sum = sum(how, comm.all_to_all(codes)?, numel);
    let codes = encode(how, &sum, 1);
    let all = comm.all_gather(codes)?.into_u8();
    padded.fill(0.0);
    let shards = all.chunks_exact(how.bytes(numel).max(1)).zip(padded.chunks_mut(numel.max(1)));
    shards.for_each(|(shard, values)| how.add_row(shard, values));
    values.copy_from_slice(&padded[..values.len()]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use zero_core::collective::threads::{ThreadOptions, run};

    use super::*;

    #[test]
    fn every_rank_has_the_same_sum_near_the_exact_one() {
        for how in [Format::Int8, Format::Int4, Format::Nf4] {
            for (ranks, numel) in [(1, 70), (2, 1), (3, 1000), (4, 3), (4, 0)] {
                let value = |rank: usize, i: usize| ((rank * 37 + i * 11) % 101) as f32 / 50.0 - 1.0;
                let sums = run(ranks, &ThreadOptions::default(), |comm| {
                    let mut values: Vec<f32> = (0..numel).map(|i| value(comm.rank(), i)).collect();
                    all_reduce(how, &*comm, &mut values, DType::F32).map(|()| values)
                });
                let sums = sums.unwrap();
                assert!(sums.iter().all(|sum| *sum == sums[0]), "{how}, {ranks} ranks");
                // Half of the widest gap of what each rank sends, and of the sum on its way back.
                let gap = match how {
                    Format::Int8 => 1.0 / 127.0,
                    Format::Int4 => 1.0 / 7.0,
                    Format::Nf4 => 1.0 - 0.696_192_8,
                };
                for (i, sum) in sums[0].iter().enumerate() {
                    let exact: f64 = (0..ranks).map(|rank| f64::from(value(rank, i))).sum();
                    let off = (f64::from(*sum) - exact).abs();
                    assert!(off <= 2.1 * ranks as f64 * gap / 2.0, "{how}, {ranks} ranks: {sum} for {exact}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_seen_by_all() {
        for odd in [f32::NAN, f32::INFINITY] {
            let sums = run(2, &ThreadOptions::default(), |comm| {
                let mut values = vec![1.0; 300];
                values[200] = if comm.rank() == 1 { odd } else { 1.0 };
                all_reduce(Format::Int8, &*comm, &mut values, DType::F32).map(|()| values)
            });
            assert!(sums.unwrap().iter().all(|sum| sum[200].is_nan() && sum[0] > 1.9), "{odd}");
        }
    }
}
