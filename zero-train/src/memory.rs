//! Memory of the machine and of this process: available, used, and peak.

use std::fs;
use std::path::{Component, Path};

pub use zero_core::estimate::format_bytes;

/// Returns the bytes that this process may still allocate: the system's available memory, capped by the limits of its control groups.
pub fn available_bytes() -> Option<u64> {
    let system = proc_field("/proc/meminfo", "MemAvailable:")?;
    let limit = cgroup_headroom(Path::new("/")).unwrap_or(u64::MAX);
    Some(system.min(limit))
}

/// Returns the peak resident set size of this process, in bytes.
pub fn peak_rss_bytes() -> Option<u64> {
    proc_field("/proc/self/status", "VmHWM:")
}

/// Returns the current resident set size of this process, in bytes.
pub(crate) fn rss_bytes() -> Option<u64> {
    proc_field("/proc/self/status", "VmRSS:")
}

/// Returns, in bytes, a field of a `/proc` file that is given in kB.
fn proc_field(path: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Returns the bytes of `available` that a plan leaves to other programs: a tenth and at least 1 GiB, but at most a quarter.
pub(crate) fn left_to_others(available: u64) -> u64 {
    (available / 10).max(1 << 30).min(available / 4)
}

/// The names of a control group's files: its folder below the root, limits, usage, and the page-cache entries of `memory.stat`.
type Files = (&'static str, &'static [&'static str], &'static str, [&'static str; 2]);

/// Beyond `memory.high`, processes are throttled; beyond `memory.max`, they are killed.
const V2: Files = ("sys/fs/cgroup", &["memory.max", "memory.high"], "memory.current", ["inactive_file", "active_file"]);

/// Version 2 alongside version 1, on systems that have both.
const HYBRID: Files = ("sys/fs/cgroup/unified", V2.1, V2.2, V2.3);

const V1: Files = (
    "sys/fs/cgroup/memory",
    &["memory.limit_in_bytes"],
    "memory.usage_in_bytes",
    ["total_inactive_file", "total_active_file"],
);

/// Returns the bytes that this process's control groups leave: the minimum over its own, which a Slurm job or a systemd
/// service has, and all groups above it. `root` is the root folder.
fn cgroup_headroom(root: &Path) -> Option<u64> {
    // "0::/a/b" is version 2's, "5:memory:/a/b" one of version 1's. Without such a file there is the topmost group.
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let own = |is_its: &dyn Fn(&str) -> bool| {
        let path = text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            is_its(controllers).then_some(path)
        });
        path.unwrap_or("/").to_string()
    };
    let v2 = own(&|controllers| controllers.is_empty());
    let v1 = own(&|controllers| controllers.split(',').any(|controller| controller == "memory"));
    let all = [(V2, &v2), (HYBRID, &v2), (V1, &v1)];
    all.into_iter().filter_map(|(files, path)| least_headroom(root, files, path)).min()
}

/// Returns the minimum that the group at `path` and the groups above it leave, among those that are visible and have a limit.
fn least_headroom(root: &Path, (base, limits, usage, cache): Files, path: &str) -> Option<u64> {
    let mut group = root.join(base);
    let mut groups = vec![group.clone()];
    // In a container a path may begin outside of what is seen here, or not exist here: then the topmost group is its own.
    for part in Path::new(path).components() {
        if let Component::Normal(part) = part {
            group.push(part);
            groups.push(group.clone());
        }
    }
    let headroom = |group: &Path| {
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // What files are cached in is given back when it is needed, as in MemAvailable.
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cached = |line: &str| {
            let (name, bytes) = line.split_once(' ')?;
            cache.contains(&name).then(|| bytes.parse::<u64>().ok())?
        };
        let used = number(usage)?.saturating_sub(stat.lines().filter_map(cached).sum());
        Some(limits.iter().filter_map(|limit| number(limit)).min()?.saturating_sub(used))
    };
    groups.iter().filter_map(|group| headroom(group)).min()
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
    fn a_plan_leaves_something_to_others() {
        let gib = |number: u64| number << 30;
        assert_eq!([gib(2), gib(8), gib(40)].map(left_to_others), [gib(1) / 2, gib(1), gib(4)]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_memory() {
        assert!(peak_rss_bytes().is_some_and(|bytes| bytes > 1 << 20));
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
        let rss = rss_bytes().unwrap();
        assert!((1 << 18..1 << 34).contains(&rss), "{rss}");
    }

    /// Creates a root folder with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn the_tightest_group_above_this_process_counts() {
        let slurm = root(&[
            ("proc/self/cgroup", "0::/system.slice/job_7/step_0\n"),
            ("sys/fs/cgroup/memory.stat", "anon 5\n"),
            ("sys/fs/cgroup/system.slice/memory.max", "max\n"),
            ("sys/fs/cgroup/system.slice/memory.current", "900\n"),
            ("sys/fs/cgroup/system.slice/job_7/memory.max", "1000\n"),
            ("sys/fs/cgroup/system.slice/job_7/memory.current", "700\n"),
            ("sys/fs/cgroup/system.slice/job_7/memory.stat", "anon 550\nfile 150\ninactive_file 100\nactive_file 50\n"),
            ("sys/fs/cgroup/system.slice/job_7/step_0/memory.max", "5000\n"),
            ("sys/fs/cgroup/system.slice/job_7/step_0/memory.current", "600\n"),
            // Somebody else's.
            ("sys/fs/cgroup/system.slice/job_8/memory.max", "10\n"),
            ("sys/fs/cgroup/system.slice/job_8/memory.current", "1\n"),
        ]);
        assert_eq!(cgroup_headroom(slurm.path()), Some(450));
        let v1 = root(&[
            ("proc/self/cgroup", "12:cpu,cpuacct:/a\n5:hugetlb,memory:/slurm/uid_0/job_7\n0::/init.scope\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "123\n"),
            ("sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.usage_in_bytes", "400\n"),
            ("sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n"),
            ("sys/fs/cgroup/unified/init.scope/cgroup.procs", "1\n"),
        ]);
        assert_eq!(cgroup_headroom(v1.path()), Some(650));
        // A container, which sees its own group as the topmost, and its path as the machine does, or above what it sees.
        for path in ["/", "/kubepods/pod1/c2", "/../../kubepods"] {
            let container = root(&[
                ("proc/self/cgroup", &format!("0::{path}\n")),
                ("sys/fs/cgroup/memory.max", "1000\n"),
                ("sys/fs/cgroup/memory.current", "250\n"),
            ]);
            assert_eq!(cgroup_headroom(container.path()), Some(750), "{path}");
        }
        for (most, high, left) in [("max", "600", Some(350)), ("500", "600", Some(250)), ("max", "max", None)] {
            let throttled = root(&[
                ("proc/self/cgroup", "0::/job\n"),
                ("sys/fs/cgroup/job/memory.max", most),
                ("sys/fs/cgroup/job/memory.high", high),
                ("sys/fs/cgroup/job/memory.current", "250\n"),
            ]);
            assert_eq!(cgroup_headroom(throttled.path()), left, "{most} {high}");
        }
        assert_eq!(cgroup_headroom(root(&[("proc/self/cgroup", "0::/\nnonsense\n")]).path()), None);
        assert_eq!(cgroup_headroom(root(&[]).path()), None);
    }
}
