//! Settings of transfers, under DeepSpeed's names, and the choice of the engine.

use crate::offload::DiskError;

/// Maximum size of a chunk: well below the 2 GiB limit of one system call.
const LARGEST_BLOCK: usize = 1 << 30;

/// Maximum number of chunks in flight: a ring may have 32768 entries.
const LARGEST_DEPTH: usize = 4096;

/// Maximum number of threads or rings of a file.
const MOST_THREADS: usize = 256;

/// Choice of the engine that transfers the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring, or threads if the kernel or a container refuses it; the reason is logged.
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
    /// Size of a chunk in bytes: the maximum that one request to the kernel transfers. A multiple of the disk's alignment (4096).
    pub block_size: usize,
    /// Number of chunks that each ring has in flight. The thread engine has this many threads, because each can wait for one chunk only.
    pub queue_depth: usize,
    /// Number of rings, each with a thread that serves it, that share the chunks of every transfer. The thread engine has this many times
    /// `queue_depth` threads. `thread_count` in DeepSpeed's older configurations.
    pub intra_op_parallelism: usize,
    /// Submits chunks to the kernel one by one instead of all that fit at once. The thread engine always does so.
    pub single_submit: bool,
    /// Replaces every completed chunk by the next at once. Otherwise, `queue_depth` chunks are submitted when all earlier ones have ended.
    pub overlap_events: bool,
    /// Moves data between the disk and GPU memory directly. Not available: `true` is refused.
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
    /// Checks the settings for a disk that needs `alignment`.
    ///
    /// # Errors
    /// [`DiskError::Setting`] with the name of the first unsupported setting.
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
                return refuse(key, value.to_string(), format!("it must be from 1 to {most}"));
            }
        }
        if self.use_gds {
            let reason =
                "GPUDirect Storage is not supported; data passes through buffers in host memory: set it to false";
            return refuse("aio.use_gds", "true".to_string(), reason.to_string());
        }
        Ok(())
    }

    /// Returns the number of threads of the thread engine. If `queue_depth` times `intra_op_parallelism` exceeds the maximum per file, the
    /// reduction is logged.
    pub(crate) fn io_threads(&self) -> usize {
        let asked = self.queue_depth * self.intra_op_parallelism;
        if asked > MOST_THREADS {
            tracing::warn!(
                "aio.queue_depth {} x aio.intra_op_parallelism {} asks for {asked} I/O threads; using {MOST_THREADS}, \
                 the maximum per file",
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
        assert!(refused(AioOptions { use_gds: true, ..defaults }).starts_with("aio.use_gds = true is invalid"));
    }
}
