//! Options for launching ranks, independent of the program that they run.

use std::path::PathBuf;
use std::time::Duration;

use super::process::{ProcessComm, ProcessOptions};
use super::threads::ThreadOptions;
use super::{Buffer, Collective};
use crate::CommError;

/// Options for launching ranks.
#[derive(Debug, Clone)]
pub struct LaunchOptions {
    /// Number of compute threads per rank; 0 divides the machine's cores evenly among its ranks.
    pub threads_per_rank: usize,
    /// The longest time that any wait for another rank may take.
    pub deadline: Duration,
    /// Folder to which ranks write flight records (their last operations) if a deadline passes or a rank fails.
    pub flight_dir: Option<PathBuf>,
    /// Allows ranks that are processes without a secret (`ZERO_SECRET`) to connect at an address that other machines can reach,
    /// because nobody else is on their network; `ZERO_TRUSTED_NETWORK=1` does the same.
    pub trusted_network: bool,
    /// Keep compiled kernels of CUDA devices in the user's cache folder (`zero_ops::devices::cache_kernels`).
    pub kernel_cache: bool,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        let deadline = ThreadOptions::default().deadline;
        Self { threads_per_rank: 0, deadline, flight_dir: None, trusted_network: false, kernel_cache: true }
    }
}

/// Threads share the cores evenly.
impl From<&ThreadOptions> for LaunchOptions {
    fn from(options: &ThreadOptions) -> Self {
        Self { deadline: options.deadline, ..Self::default() }
    }
}

impl LaunchOptions {
    /// Returns the number of compute threads of each of `world` ranks.
    pub fn threads(&self, world: usize) -> usize {
        match self.threads_per_rank {
            0 => (std::thread::available_parallelism().map_or(1, usize::from) / world.max(1)).max(1),
            threads => threads,
        }
    }

    /// Returns the number of compute threads of a rank that is a process. A rank that its launcher has bound to CPUs of its own
    /// uses those; otherwise the ranks of a machine share its CPUs. A collective operation.
    ///
    /// # Errors
    ///
    /// [`CommError`], as for any collective.
    pub fn threads_of(&self, comm: &ProcessComm) -> Result<usize, CommError> {
        let mut mask = allowed_processors();
        mask.resize(MASK, 0);
        let masks = comm.all_gather(Buffer::U8(mask))?.into_u8();
        let local: Vec<&[u8]> = comm.place().of_node().into_iter().map(|rank| &masks[rank * MASK..][..MASK]).collect();
        let shared = (0..MASK).any(|byte| {
            local
                .iter()
                .fold((0u8, false), |(seen, twice), mask| (seen | mask[byte], twice || seen & mask[byte] != 0))
                .1
        });
        let known = local.iter().all(|mask| mask.iter().any(|&byte| byte != 0));
        Ok(match self.threads_per_rank {
            0 if known && !shared => std::thread::available_parallelism().map_or(1, usize::from),
            _ => self.threads(local.len()),
        })
    }

    /// Returns the same options for the process engine.
    pub fn process(&self) -> ProcessOptions {
        let Self { deadline, flight_dir, trusted_network, .. } = self.clone();
        ProcessOptions { deadline, flight_dir, trusted_network, ..ProcessOptions::default() }
    }
}

/// Size in bytes of a CPU set with one bit per CPU.
const MASK: usize = 1024;

/// Returns the set of CPUs that this process may use; empty if the system does not report it.
fn allowed_processors() -> Vec<u8> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    let mut mask = vec![0; MASK];
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else { continue };
        for processor in (first..=last).filter(|processor| processor / 8 < MASK) {
            mask[processor / 8] |= 1 << (processor % 8);
        }
    }
    mask
}
