//! Which machine a process is on.

use serde::{Deserialize, Serialize};

/// The machine of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The same in all its containers, and no other machine's: the identity of the running kernel.
    pub(crate) id: String,
    /// Its name, which containers may have of their own.
    pub(crate) host: String,
}

impl Machine {
    /// This process's.
    pub(crate) fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_string());
        let mut host = read("/proc/sys/kernel/hostname").unwrap_or_else(|| "unknown".into());
        host.truncate(host.char_indices().nth(64).map_or(host.len(), |(at, _)| at));
        let id = read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|| host.clone());
        Self { id, host }
    }
}
