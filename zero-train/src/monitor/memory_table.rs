//! Memory of a phase of training: before it, retained after it, and at its peak.
//!
//! * Input: the beginning and the end of a phase, and, for a device, a function that returns the bytes in use.
//! * Output: a [`MemoryReport`], which prints as a table in MiB. The figures are those of the memory tracker in PEFT's
//!   examples for Accelerate (`peft_lora_seq2seq_accelerate_ds_zero3_offload.py` in
//!   <https://github.com/huggingface/peft/tree/main/examples/conditional_generation>):
//!   before, consumed at the end (end - begin), peak consumed (max - begin), total peak.
//! * Threads: one, `zero-memory-sampler`, from `begin` to `end` (or drop), which samples every 10 ms. It owns its peaks and
//!   returns them when it is joined, so nothing is shared. It ends when the tracker drops its end of a channel.
//!
//! A peak shorter than 10 ms can fall between two samples. On the host, the kernel's high-water mark makes up for that, if
//! there is one: if the mark rose in the phase, it is the phase's peak.

use std::fmt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{MonitorError, Result};
use crate::memory::{peak_rss_bytes, rss_bytes};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_millis(10);

/// A phase of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Forward, backward and update.
    Train,
    /// Forward only.
    Eval,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Train => "train",
            Phase::Eval => "eval",
        })
    }
}

/// One kind of memory in one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFigures {
    /// Bytes held when the phase began.
    pub before_bytes: u64,
    /// Bytes held when it ended, minus `before_bytes`; negative if it released memory.
    pub consumed_bytes: i64,
    /// Bytes held at the phase's peak, minus `before_bytes`.
    pub peak_bytes: u64,
    /// Bytes held at the phase's peak.
    pub total_peak_bytes: u64,
}

impl MemoryFigures {
    fn new(before: u64, end: u64, seen_peak: u64) -> Self {
        let total_peak_bytes = seen_peak.max(before).max(end);
        let consumed = i128::from(end) - i128::from(before);
        Self {
            before_bytes: before,
            consumed_bytes: consumed.clamp(i64::MIN.into(), i64::MAX.into()) as i64,
            peak_bytes: total_peak_bytes - before,
            total_peak_bytes,
        }
    }
}

/// The memory of a phase. Its `Display` is a table of four rows in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The phase.
    pub phase: Phase,
    /// This process's resident set; `None` if the system does not report it.
    pub host: Option<MemoryFigures>,
    /// The device's memory; `None` if the tracker was started without one, or its function returned nothing.
    pub device: Option<MemoryFigures>,
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 20));
        let of = |cell: fn(&MemoryFigures) -> f64| {
            [&self.host, &self.device]
                .map(|figures| figures.as_ref().map_or("-".to_string(), |figures| mib(cell(figures))))
        };
        let rows = [
            ("before entering", of(|figures| figures.before_bytes as f64)),
            ("consumed at the end (end - begin)", of(|figures| figures.consumed_bytes as f64)),
            ("peak consumed (max - begin)", of(|figures| figures.peak_bytes as f64)),
            ("total peak (max)", of(|figures| figures.total_peak_bytes as f64)),
        ];
        write!(f, "{:<34} {:>12} {:>12}", format!("memory of {}", self.phase), "host MiB", "device MiB")?;
        for (name, [host, device]) in rows {
            write!(f, "\n{name:<34} {host:>12} {device:>12}")?;
        }
        Ok(())
    }
}

/// Bytes held now, host and device.
type Held = [Option<u64>; 2];

/// A tracker of the memory of one phase, from [`begin`](Self::begin) to [`end`](Self::end).
#[derive(Debug)]
pub struct MemoryTracker {
    phase: Phase,
    before: Held,
    high_water_before: Option<u64>,
    /// Dropping it ends the sampler.
    stop: Option<Sender<()>>,
    /// Returns the bytes held at the end and the peaks.
    sampler: Option<JoinHandle<(Held, Held)>>,
}

impl MemoryTracker {
    /// Begins a phase and tracks the memory of the host and of a device. `bytes_in_use` is called from another thread,
    /// every 10 ms and at both ends, and should return at once.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Sampler`] if the thread cannot be started.
    pub fn begin(phase: Phase, bytes_in_use: impl Fn() -> Option<u64> + Send + 'static) -> Result<Self> {
        let look = move || [rss_bytes(), bytes_in_use()];
        let (high_water_before, before) = (peak_rss_bytes(), look());
        let (stop, stopped) = mpsc::channel();
        let sampler = thread::Builder::new()
            .name("zero-memory-sampler".to_string())
            .spawn(move || sample(&look, before, &stopped))
            .map_err(|error| MonitorError::Sampler { problem: error.to_string() })?;
        Ok(Self { phase, before, high_water_before, stop: Some(stop), sampler: Some(sampler) })
    }

    /// Ends the phase and returns its memory.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Sampler`] if the device's function panicked.
    pub fn end(mut self) -> Result<MemoryReport> {
        let panicked = || MonitorError::Sampler { problem: "the device's function panicked".to_string() };
        let (end, mut peak) = self.join().ok_or_else(panicked)?;
        let high_water = peak_rss_bytes();
        if high_water > self.high_water_before {
            peak[0] = peak[0].max(high_water);
        }
        let figures = |i: usize| Some(MemoryFigures::new(self.before[i]?, end[i]?, peak[i]?));
        Ok(MemoryReport { phase: self.phase, host: figures(0), device: figures(1) })
    }

    /// Ends the sampler, which stops within one sample.
    fn join(&mut self) -> Option<(Held, Held)> {
        self.stop = None;
        self.sampler.take()?.join().ok()
    }
}

impl Drop for MemoryTracker {
    fn drop(&mut self) {
        self.join();
    }
}

/// Samples until the other end of `stopped` is dropped, and once more then.
fn sample(look: &impl Fn() -> Held, mut peak: Held, stopped: &Receiver<()>) -> (Held, Held) {
    loop {
        let done = stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout);
        let held = look();
        for (peak, held) in peak.iter_mut().zip(held) {
            *peak = (*peak).max(held);
        }
        if done {
            return (held, peak);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_device_peak_is_seen() {
        let used = Arc::new(AtomicU64::new(100 * MIB));
        let looks = Arc::new(AtomicU64::new(0));
        let tracker = {
            let (used, looks) = (used.clone(), looks.clone());
            let probe = move || {
                looks.fetch_add(1, Ordering::Relaxed);
                Some(used.load(Ordering::Relaxed))
            };
            MemoryTracker::begin(Phase::Train, probe).unwrap()
        };
        used.store(700 * MIB, Ordering::Relaxed);
        let (seen, deadline) = (looks.load(Ordering::Relaxed), Instant::now() + Duration::from_secs(20));
        while looks.load(Ordering::Relaxed) < seen + 2 {
            assert!(Instant::now() < deadline, "the sampler does not look");
            thread::sleep(INTERVAL);
        }
        used.store(60 * MIB, Ordering::Relaxed);
        let report = tracker.end().unwrap();
        let expected = MemoryFigures {
            before_bytes: 100 * MIB,
            consumed_bytes: -40 * MIB as i64,
            peak_bytes: 600 * MIB,
            total_peak_bytes: 700 * MIB,
        };
        assert_eq!(report.device, Some(expected));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn host_memory_is_followed() {
        let tracker = MemoryTracker::begin(Phase::Eval, || None).unwrap();
        let held = std::hint::black_box(vec![1_u8; 64 << 20]);
        thread::sleep(5 * INTERVAL);
        let host = tracker.end().unwrap().host.unwrap();
        drop(held);
        // The other tests of this process hold and free memory too, so only the order of magnitude is sure.
        assert!(
            host.peak_bytes >= 48 * MIB && host.total_peak_bytes == host.before_bytes + host.peak_bytes,
            "{host:?}"
        );
        assert!(host.consumed_bytes >= 48 * MIB as i64, "{host:?}");
    }

    #[test]
    fn a_panicking_probe_is_an_error_and_a_dropped_tracker_ends_its_thread() {
        let calls = AtomicU64::new(0);
        let probe =
            move || if calls.fetch_add(1, Ordering::Relaxed) == 0 { Some(1) } else { panic!("expected by the test") };
        let error = MemoryTracker::begin(Phase::Train, probe).unwrap().end().unwrap_err();
        assert_eq!(error.to_string(), "cannot sample the memory: the device's function panicked");
        let alive = Arc::new(());
        let held = alive.clone();
        let probe = move || Some(Arc::strong_count(&held) as u64);
        drop(MemoryTracker::begin(Phase::Train, probe).unwrap());
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn the_table_is_aligned() {
        let host = Some(MemoryFigures::new(1536 * MIB, 1024 * MIB, 2048 * MIB));
        let report = MemoryReport { phase: Phase::Train, host, device: None };
        let expected = "\
memory of train                        host MiB   device MiB
before entering                          1536.0            -
consumed at the end (end - begin)        -512.0            -
peak consumed (max - begin)               512.0            -
total peak (max)                         2048.0            -";
        assert_eq!(report.to_string(), expected);
    }
}
