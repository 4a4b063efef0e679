//! The machine's memory: what is free, what this process has used at most.

use std::fs;

/// Bytes this process may still take: what the system says is available, cut at the control group's limit.
pub fn available_bytes() -> Option<u64> {
    let system = proc_field("/proc/meminfo", "MemAvailable:")?;
    let limit = cgroup_headroom().unwrap_or(u64::MAX);
    Some(system.min(limit))
}

/// The most bytes of memory this process has held (its resident set).
pub fn peak_rss_bytes() -> Option<u64> {
    proc_field("/proc/self/status", "VmHWM:")
}

/// A field of a `/proc` file given in kB.
fn proc_field(path: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// What the control group (version 2, then 1) leaves.
fn cgroup_headroom() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let v2 = || Some(read("/sys/fs/cgroup/memory.max")?.saturating_sub(read("/sys/fs/cgroup/memory.current")?));
    let v1 = || {
        let base = "/sys/fs/cgroup/memory/memory";
        Some(read(&format!("{base}.limit_in_bytes"))?.saturating_sub(read(&format!("{base}.usage_in_bytes"))?))
    };
    v2().or_else(v1)
}

/// `bytes` in the largest binary unit that leaves at least one before the point: "1.50 GiB".
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(format_bytes(1023), "1023 B");
        assert_eq!(format_bytes(1536 << 20), "1.50 GiB");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_memory() {
        assert!(peak_rss_bytes().is_some_and(|bytes| bytes > 1 << 20));
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
