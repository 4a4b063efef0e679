//! Prediction of a step's duration from a short probe of the machine: matrix products, and the disk if state is kept on one.

use std::path::Path;
use std::time::{Duration, Instant};

use zero_core::config::Tier;
use zero_core::offload::{BufferPool, DiskError, PendingTransfer, PoolOptions, SwapDir, SwapFileOptions};
use zero_kernels::cpu::{Matrix, linear};

use super::{MemoryNeed, Profile};
use crate::config::ZeroPlan;

/// Fraction of the rate of one large product that a step's products reach, as measured on GPT-2 124M (docs/performance.md).
const EFFICIENCY: f64 = 0.8;

/// Minimum floating-point operations of a step for a probe: a smaller step takes less than a second.
const WORTH_A_PROBE: f64 = 1e11;

/// Bytes that the probe writes to the disk and reads.
const PROBE_BYTES: usize = 128 << 20;

const LIMIT: Duration = Duration::from_secs(60);

/// Predicted seconds of a step.
#[derive(Clone, Copy)]
pub(super) struct Prediction {
    /// Matrix products.
    pub compute: f64,
    /// Transfers between disk and memory; partly concurrent with compute.
    pub disk: f64,
}

impl Prediction {
    /// Predicts a step of `plan`. Returns `None` if it takes less than about a second, or when a probe fails.
    pub(super) fn new(profile: &Profile, plan: &ZeroPlan, need: &MemoryNeed) -> Option<Self> {
        let operations = profile.flops_per_row * plan.batch.global as f64;
        if operations < WORTH_A_PROBE {
            return None;
        }
        let compute = operations / (product_rate() * EFFICIENCY);
        let disk = match need.disk {
            0 => 0.0,
            _ => moved_bytes(profile, plan) / disk_rate(&plan.zero_config(0).offload.disk.path).ok()?,
        };
        Some(Self { compute, disk })
    }
}

impl core::fmt::Display for Prediction {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "about {:.0} s: {:.0} s of compute", self.compute + self.disk, self.compute)?;
        if self.disk > 0.0 {
            write!(f, ", {:.0} s to move state to and from the disk", self.disk)?;
        }
        write!(f, " (estimated from a short probe)")
    }
}

/// Returns the bytes that all ranks together read and write in a step.
fn moved_bytes(profile: &Profile, plan: &ZeroPlan) -> f64 {
    let config = plan.zero_config(0);
    let ([of_gradients, of_state], offload) = (config.offloaded_shares(), config.offload);
    let micro_batches = plan.batch.accumulation as f64;
    let on_disk = |tier| f64::from(u8::from(tier == Tier::Disk));
    // Two moments, each read and written; a gradient written with each micro-batch and read once.
    let optimizer = on_disk(offload.optimizer) * (16.0 * of_state + (4.0 * micro_batches + 4.0) * of_gradients);
    // Gathered forward and backward of each micro-batch, by one rank for all; read and written by the update.
    let parameters = on_disk(offload.parameters) * (8.0 * micro_batches + 8.0);
    let frozen =
        on_disk(offload.parameters) * 2.0 * micro_batches * profile.frozen_bytes(|numel| 4 * numel, |_| true) as f64;
    profile.num_trained() as f64 * (optimizer + parameters) + frozen
}

/// Returns the floating-point operations per second of a matrix product on all cores.
fn product_rate() -> f64 {
    let (a, b) = (vec![0.5; 512 * 1024], vec![0.5; 1024 * 2048]);
    let mut product = vec![0.0; 512 * 2048];
    let seconds = (0..4).map(|_| {
        let begin = Instant::now();
        linear::forward(&a, Matrix::new(&b, 1024, 2048), None, None, &mut product);
        begin.elapsed().as_secs_f64()
    });
    2.0 * (512 * 1024 * 2048) as f64 / seconds.fold(f64::INFINITY, f64::min)
}

/// Returns the bytes per second of writing and then reading a file below `path`.
fn disk_rate(path: &Path) -> Result<f64, DiskError> {
    let file = SwapDir::open(path)?.create_file(0, &SwapFileOptions::default())?;
    let pool = BufferPool::new(&PoolOptions { bytes: 8 << 20, ..PoolOptions::default() })?;
    let region = file.alloc(PROBE_BYTES)?;
    let mut seconds = 0.0;
    // Written twice: the first write of a place costs more, and a step writes what has been written before.
    for (write, counts) in [(true, false), (true, true), (false, true)] {
        let begin = Instant::now();
        let mut flying: Vec<PendingTransfer> = Vec::new();
        for part in region.parts(pool.buffer_bytes()) {
            if flying.len() == pool.count() {
                flying.remove(0).wait(LIMIT)?;
            }
            let mut buffer = pool.take(LIMIT)?;
            buffer.set_len(part.bytes());
            flying.push(if write { file.write(part, buffer)? } else { file.read(part, buffer)? });
        }
        flying.into_iter().try_for_each(|ticket| ticket.wait(LIMIT).map(drop))?;
        seconds += if counts { begin.elapsed().as_secs_f64() } else { 0.0 };
    }
    Ok(2.0 * PROBE_BYTES as f64 / seconds)
}
