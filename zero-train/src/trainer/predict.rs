//! The least duration of a step on this machine, from a short probe: matrix products, copies in memory, and the disk if state is kept on one.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use half::bf16;
use serde::{Deserialize, Serialize};
use zero_core::config::{Float, Tier};
use zero_core::estimate::Precision;
use zero_core::offload::{BufferPool, DiskError, PendingTransfer, PoolOptions, Region, SwapDir, SwapFileOptions};
use zero_kernels::cpu::parallel::gemm_threads;
use zero_kernels::cpu::product_bf16::{self, Out};
use zero_kernels::cpu::{Matrix, linear};

use super::fit::precision;
use super::{MemoryNeed, Profile};
use crate::config::ZeroPlan;

/// Fraction of the rate of one large product that a step's products reach, as measured on GPT-2 124M (docs/performance.md).
const EFFICIENCY: f64 = 0.8;

/// Minimum floating-point operations of a step for a probe: a smaller step takes less than a second.
const WORTH_A_PROBE: f64 = 1e11;

/// Bytes that a run of the disk's probe moves: one half is written, the other is read.
const PROBE_BYTES: usize = 128 << 20;

/// Bytes that each core copies in the probe of memory, more than its share of a cache, and the most of all cores.
const COPIED_BYTES: [usize; 2] = [32 << 20, 1 << 30];

/// Least time of a probe, of whose runs the fastest counts. A burst of another program is shorter.
const PROBE_TIME: Duration = Duration::from_millis(250);

const LIMIT: Duration = Duration::from_secs(60);

/// Seconds that a step's work takes at the rates of this machine, which a probe of about a second measures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SpeedOfLight {
    /// Matrix products, at the rate of a large one.
    pub products: f64,
    /// The update's reads and writes of memory, at the rate of a copy.
    pub update: f64,
    /// Transfers between disk and memory. They overlap with the rest.
    pub disk: f64,
}

impl SpeedOfLight {
    /// Probes the machine for a step of `plan`. Returns `None` if the step takes less than about a second, or when a probe fails.
    pub(super) fn new(profile: &Profile, plan: &ZeroPlan, need: &MemoryNeed) -> Option<Self> {
        let operations = profile.flops_per_row * plan.batch.global as f64;
        if operations < WORTH_A_PROBE {
            return None;
        }
        // Products of fp16 are computed in fp32.
        let is_bf16 = plan.zero_config(0).param_dtype == Float::Bf16;
        let disk = match need.disk {
            0 => 0.0,
            _ => moved_bytes(profile, plan) / disk_rate(&plan.zero_config(0).offload.disk.path).ok()?,
        };
        let products = operations / if is_bf16 { product_rate_bf16() } else { product_rate() };
        Some(Self { products, update: updated_bytes(profile, plan) / memory_rate(), disk })
    }

    /// Returns the least seconds of a step.
    pub fn seconds(&self) -> f64 {
        (self.products + self.update).max(self.disk)
    }

    /// Returns the fraction of this speed that a run reaches with `speed` tokens (or rows) per second, of `tokens` in a step.
    pub fn share(&self, speed: f64, tokens: usize) -> f64 {
        self.seconds() * speed / tokens as f64
    }

    /// Returns what takes most of these seconds.
    pub fn bound(&self) -> &'static str {
        match self {
            Self { products, update, disk } if *disk > products + update => "disk",
            Self { products, update, .. } if update > products => "memory",
            _ => "products",
        }
    }
}

impl core::fmt::Display for SpeedOfLight {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let compute = self.products / EFFICIENCY + self.update;
        write!(f, "about {:.0} s: {compute:.0} s of compute", compute + self.disk)?;
        if self.disk > 0.0 {
            write!(f, ", {:.0} s to move state to and from the disk", self.disk)?;
        }
        write!(f, " (estimated from a short probe)")
    }
}

/// Returns the bytes of memory that the updates of all ranks read and write in a step.
fn updated_bytes(profile: &Profile, plan: &ZeroPlan) -> f64 {
    let Precision { parameter, gradient, optimizer } = precision(plan);
    let each = if plan.zero.stage.shards_optimizer() { 1 } else { plan.world } * profile.num_trained();
    (each as u64 * (gradient + 2 * parameter + 2 * optimizer)) as f64
}

/// Returns the bytes that all ranks together read and write in a step.
fn moved_bytes(profile: &Profile, plan: &ZeroPlan) -> f64 {
    let config = plan.zero_config(0);
    let ([of_gradients, of_state], offload) = (config.offloaded_shares(), config.offload);
    let micro_batches = plan.batch.accumulation as f64;
    let on_disk = |tier| f64::from(u8::from(tier == Tier::Disk));
    // Two moments, each read and written.
    let optimizer = on_disk(offload.optimizer) * 16.0 * of_state;
    // A gradient, but for the first parameter's if parameters are in memory, is written with each micro-batch and read once.
    let (all, first) = (profile.num_trained() as f64, profile.parameters.first().map_or(0.0, |&first| first as f64));
    let is_counted = first <= (1.0 - of_gradients) * all || offload.parameters != Tier::Memory;
    let leaving = (of_gradients * all - if is_counted { 0.0 } else { first }).max(0.0);
    let gradients = on_disk(offload.optimizer) * (4.0 * micro_batches + 4.0) * leaving;
    // Gathered forward and backward of each micro-batch, by one rank for all; read and written by the update.
    let parameters = on_disk(offload.parameters) * (8.0 * micro_batches + 8.0);
    let frozen =
        on_disk(offload.parameters) * 2.0 * micro_batches * profile.frozen_bytes(|numel| 4 * numel, |_| true) as f64;
    profile.num_trained() as f64 * (optimizer + parameters) + gradients + frozen
}

/// Returns the seconds of the fastest of several runs of `work`.
fn least_seconds(mut work: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut least = f64::INFINITY;
    while least.is_infinite() || begin.elapsed() < PROBE_TIME {
        let begin = Instant::now();
        work();
        least = least.min(begin.elapsed().as_secs_f64());
    }
    least
}

/// Returns the floating-point operations per second of a matrix product on all cores.
fn product_rate() -> f64 {
    let (a, b) = (vec![0.5; 512 * 1024], vec![0.5; 1024 * 2048]);
    let mut product = vec![0.0; 512 * 2048];
    let seconds = least_seconds(|| linear::forward(&a, Matrix::new(&b, 1024, 2048), None, None, &mut product));
    2.0 * (512 * 1024 * 2048) as f64 / seconds
}

/// Returns the same rate of a product of bfloat16 matrices.
fn product_rate_bf16() -> f64 {
    let (a, b) = (vec![bf16::ONE; 512 * 1024], vec![bf16::ONE; 1024 * 2048]);
    let mut product = vec![bf16::ZERO; 512 * 2048];
    let seconds = least_seconds(|| {
        let out = Out::Bf16 { data: &mut product, begin: None };
        product_bf16::multiply(out, Matrix::new(&a, 512, 1024), Matrix::new(&b, 1024, 2048), gemm_threads());
    });
    2.0 * (512 * 1024 * 2048) as f64 / seconds
}

/// Returns the bytes per second that all cores together read and write when they copy.
fn memory_rate() -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let [each, all] = COPIED_BYTES;
    let words = each.min(all / cores) / 8;
    let copy = || {
        let (from, mut to) = (vec![1_u64; words], vec![0_u64; words]);
        let seconds = least_seconds(|| std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from)));
        2.0 * (8 * words) as f64 / seconds
    };
    std::thread::scope(|scope| {
        let copies: Vec<_> = (0..cores).map(|_| scope.spawn(copy)).collect();
        copies.into_iter().map(|copy| copy.join().unwrap_or(0.0)).sum()
    })
}

/// Returns the bytes per second that a file below `path` takes and gives at once, as an update does.
fn disk_rate(path: &Path) -> Result<f64, DiskError> {
    let file = SwapDir::open(path)?.create_file(0, &SwapFileOptions::default())?;
    let pool = BufferPool::new(&PoolOptions { bytes: 8 << 20, ..PoolOptions::default() })?;
    let mut regions = [file.alloc(PROBE_BYTES / 2)?, file.alloc(PROBE_BYTES / 2)?];
    // The region that is written, and the one that is read.
    let transfer = |regions: &[Region]| -> Result<(), DiskError> {
        let mut flying = VecDeque::new();
        let mut parts: Vec<_> = regions.iter().map(|region| region.parts(pool.buffer_bytes())).collect();
        while let Some(round) = parts.iter_mut().map(Iterator::next).collect::<Option<Vec<Region>>>() {
            for (index, part) in round.into_iter().enumerate() {
                if flying.len() == pool.count() {
                    flying.pop_front().map_or(Ok(()), |oldest: PendingTransfer| oldest.wait(LIMIT).map(drop))?;
                }
                let mut buffer = pool.take(LIMIT)?;
                buffer.set_len(part.bytes());
                flying.push_back(if index == 0 { file.write(part, buffer)? } else { file.read(part, buffer)? });
            }
        }
        flying.into_iter().try_for_each(|transfer| transfer.wait(LIMIT).map(drop))
    };
    // The first write of a place costs more, and a step writes what has been written before.
    regions.iter().try_for_each(|region| transfer(std::slice::from_ref(region)))?;
    let mut ended = Ok(());
    let seconds = least_seconds(|| {
        regions.reverse();
        ended = std::mem::replace(&mut ended, Ok(())).and_then(|()| transfer(&regions));
    });
    ended.map(|()| PROBE_BYTES as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_compute_and_disk_bounds_a_step() {
        let light = |products, update, disk| SpeedOfLight { products, update, disk };
        let cases =
            [((4.0, 1.0, 2.0), 5.0, "products"), ((1.0, 4.0, 2.0), 5.0, "memory"), ((1.0, 1.0, 8.0), 8.0, "disk")];
        for ((products, update, disk), seconds, bound) in cases {
            let light = light(products, update, disk);
            assert_eq!((light.seconds(), light.bound()), (seconds, bound));
        }
        // 100 tokens in 10 s instead of 5.
        assert_eq!(light(4.0, 1.0, 2.0).share(10.0, 100), 0.5);
    }

    /// Rates that no machine exceeds or falls below.
    #[test]
    fn probes_measure() {
        for rate in [product_rate(), product_rate_bf16()] {
            assert!((1e8..1e15).contains(&rate), "{rate}");
        }
        let rate = memory_rate();
        assert!((1e8..1e13).contains(&rate), "{rate}");
    }
}
