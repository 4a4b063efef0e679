//! Identification of the machine that a process runs on.

use serde::{Deserialize, Serialize};

/// The machine of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Identity of the running kernel: the same in all containers of a machine, and different on every other machine.
    pub(crate) id: String,
    /// Host name; each container may have its own.
    pub(crate) host: String,
}

impl Machine {
    /// Returns the machine of this process.
    pub(crate) fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_string());
        let mut host = read("/proc/sys/kernel/hostname").unwrap_or_else(|| "unknown".into());
        host.truncate(host.char_indices().nth(64).map_or(host.len(), |(at, _)| at));
        let id = read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|| host.clone());
        Self { id, host }
    }
}
