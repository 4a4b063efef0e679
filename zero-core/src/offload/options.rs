//! The settings of transfers, under DeepSpeed's names, and which engine moves the bytes.

use crate::offload::DiskError;

/// The largest piece: well below the 2 GiB that one call of the kernel moves at most.
const LARGEST_BLOCK: usize = 1 << 30;

/// The largest number of pieces in flight: a ring may have 32768 entries.
const LARGEST_DEPTH: usize = 4096;

/// The most threads or rings that a file may have.
const MOST_THREADS: usize = 256;

/// Which engine moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring, and threads where the kernel or a container refuses it. The log says so, with the reason.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// Threads that call `pread` and `pwrite`.
    Threads,
}

/// DeepSpeed's `aio` section, with its defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AioOptions {
    /// Bytes of a piece: what one request to the kernel moves at most. A multiple of the disk's alignment (4096).
    pub block_size: usize,
    /// How many pieces each ring has in flight. The threads engine has as many threads, because each can wait for one
    /// piece only.
    pub queue_depth: usize,
    /// How many rings, each with a thread that serves it, share the pieces of every transfer. The threads engine has as
    /// many times `queue_depth` threads. `thread_count` in DeepSpeed's older configurations.
    pub intra_op_parallelism: usize,
    /// Hand pieces to the kernel one by one instead of all that fit at once. The threads engine does so in any case.
    pub single_submit: bool,
    /// Replace every piece that ends by the next at once. Without it, `queue_depth` pieces are handed over when all
    /// earlier ones have ended.
    pub overlap_events: bool,
    /// Move data between the disk and a GPU's memory directly. Not available: `true` is refused.
    pub use_gds: bool,
}

impl Default for AioOptions {
    fn default() -> Self {
        Self {
            block_size: 1 << 20,
            queue_depth: 8,
            intra_op_parallelism: 1,
            single_submit: false,
            overlap_events: true,
            use_gds: false,
        }
    }
}

impl AioOptions {
    /// Says which setting cannot be acted on, if there is one, on a disk that needs `alignment`.
    ///
    /// # Errors
    /// [`DiskError::Setting`], with the setting's name.
    pub fn check(&self, alignment: usize) -> Result<(), DiskError> {
        let refuse = |key, value: String, reason: String| Err(DiskError::Setting { key, value, reason });
        if self.block_size == 0 || !self.block_size.is_multiple_of(alignment) || self.block_size > LARGEST_BLOCK {
            let reason = format!("it must be a multiple of {alignment} up to {LARGEST_BLOCK}");
            return refuse("aio.block_size", self.block_size.to_string(), reason);
        }
        for (key, value, most) in [
            ("aio.queue_depth", self.queue_depth, LARGEST_DEPTH),
            ("aio.intra_op_parallelism", self.intra_op_parallelism, MOST_THREADS),
        ] {
            if !(1..=most).contains(&value) {
                return refuse(key, value.to_string(), format!("it must be 1 to {most}"));
            }
        }
        if self.use_gds {
            let reason = "GPUDirect Storage is not supported; data go through buffers in memory: set it to false";
            return refuse("aio.use_gds", "true".to_string(), reason.to_string());
        }
        Ok(())
    }

    /// How many threads the threads engine has. What `queue_depth` times `intra_op_parallelism` exceeds the most that a
    /// file may have is not silently dropped: the log says so.
    pub(crate) fn io_threads(&self) -> usize {
        let asked = self.queue_depth * self.intra_op_parallelism;
        if asked > MOST_THREADS {
            tracing::warn!(
                "aio.queue_depth {} x aio.intra_op_parallelism {} asks for {asked} I/O threads; a file has {MOST_THREADS} at most",
                self.queue_depth,
                self.intra_op_parallelism
            );
        }
        asked.min(MOST_THREADS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_acted_on_is_refused_by_name() {
        let defaults = AioOptions::default();
        defaults.check(4096).unwrap();
        let refused = |options: AioOptions| options.check(4096).unwrap_err().to_string();
        assert!(refused(AioOptions { block_size: 5000, ..defaults.clone() }).starts_with("aio.block_size = 5000 is"));
        assert!(refused(AioOptions { queue_depth: 0, ..defaults.clone() }).contains("aio.queue_depth"));
        assert!(refused(AioOptions { intra_op_parallelism: 0, ..defaults.clone() }).contains("intra_op_parallelism"));
        assert!(refused(AioOptions { use_gds: true, ..defaults }).starts_with("aio.use_gds = true is refused"));
    }
}
