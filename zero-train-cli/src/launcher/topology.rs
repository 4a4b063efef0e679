//! The cores of this machine.

use std::collections::BTreeSet;
use std::fs;

/// Returns the physical cores that this process may use, as MPI launchers count them, or `None` if the system does not say.
pub fn physical_cores() -> Option<usize> {
    let allowed = fs::read_to_string("/proc/self/status").ok()?;
    let allowed = allowed.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |cpu: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        // Without a topology (some virtual machines), each CPU counts as a core.
        fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
    };
    let cores: BTreeSet<String> = list(allowed)?.into_iter().map(siblings).collect();
    (!cores.is_empty()).then_some(cores.len())
}

/// Parses a list of numbers such as "0-3,8".
fn list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors() {
        assert_eq!(list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(list("x"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_cores() {
        assert!(physical_cores().is_some_and(|cores| cores > 0));
    }
}
