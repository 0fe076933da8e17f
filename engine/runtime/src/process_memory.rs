//! Memory of the process and the machine, as reported by the operating system.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Peak resident memory of the process in bytes; `None` where the system does not report it.
pub fn peak_rss_bytes() -> Option<u64> {
    proc_field("/proc/self/status", b"VmHWM:")
}

/// Resident memory of the process in bytes; `None` where the system does not report it.
///
/// ```
/// use gapless_runtime::process_memory::current_rss_bytes;
/// if let Some(bytes) = current_rss_bytes() {
///     println!("{:.1} MiB resident", bytes as f64 / f64::from(1 << 20));
///     assert!(bytes > 4096);
/// }
/// ```
pub fn current_rss_bytes() -> Option<u64> {
    proc_field("/proc/self/status", b"VmRSS:")
}

/// The limit that determines how much memory can still be allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The machine's memory; beyond it, swapping starts.
    Machine,
    /// A control group (of a container or a service), version 1 or 2.
    ControlGroup,
    /// The process's address space (`ulimit -v`).
    AddressSpace,
    /// The process's data (`ulimit -d`).
    Data,
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machine => "the machine's available memory",
            Self::ControlGroup => "the memory limit of the container or control group",
            Self::AddressSpace => "the limit of the address space (ulimit -v)",
            Self::Data => "the limit of the data segment (ulimit -d)",
        })
    }
}

/// Returns the bytes that can still be allocated: the minimum over the machine, the control groups and the limits of
/// the process. Returns `None` if the system reports none of these.
pub fn available_memory_bytes() -> Option<u64> {
    available_memory().map(|(bytes, _)| bytes)
}

/// Returns [`available_memory_bytes`] and the limit that determines it, or `None` if the system reports no limit.
pub fn available_memory() -> Option<(u64, MemoryLimit)> {
    let limits = [
        (proc_field("/proc/meminfo", b"MemAvailable:"), MemoryLimit::Machine),
        (control_groups::available(), MemoryLimit::ControlGroup),
        (left_of_limit(b"Max address space", b"VmSize:"), MemoryLimit::AddressSpace),
        (left_of_limit(b"Max data size", b"VmData:"), MemoryLimit::Data),
    ];
    limits.into_iter().filter_map(|(bytes, limit)| Some((bytes?, limit))).min_by_key(|(bytes, _)| *bytes)
}

/// Returns the bytes that the process can still use below a soft limit, or `None` if there is no limit.
fn left_of_limit(limit: &[u8], used: &[u8]) -> Option<u64> {
    let mut buffer = [0; BUFFER];
    let text = read("/proc/self/limits".as_ref(), &mut buffer)?;
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(limit))?;
    let soft = line.trim_ascii().split(|byte| *byte == b' ').next()?;
    let soft: u64 = std::str::from_utf8(soft).ok()?.parse().ok()?;
    Some(soft.saturating_sub(proc_field("/proc/self/status", used)?))
}

mod control_groups {
    use std::path::{Path, PathBuf};
    use std::sync::OnceLock;

    use super::{BUFFER, number, read};

    /// A control group that limits memory, and the names of its files.
    struct Group {
        limit: PathBuf,
        used: PathBuf,
        statistics: PathBuf,
        /// The name of the statistic that counts cached file pages; the kernel reclaims them when memory is short.
        cache: &'static [u8],
    }

    /// Returns the minimum of the memory that is still free in the process's control groups, or `None` if no group has
    /// a limit.
    pub(super) fn available() -> Option<u64> {
        // The groups are determined once, because a process hardly ever changes its groups, and a step may call this
        // function often.
        static GROUPS: OnceLock<Vec<Group>> = OnceLock::new();
        let groups = GROUPS.get_or_init(|| {
            let memberships = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            groups(&memberships, Path::new("/sys/fs/cgroup"))
        });
        groups.iter().filter_map(Group::available).min()
    }

    /// Returns the groups of a process and their ancestors, given the lines of its `/proc/self/cgroup`.
    fn groups(memberships: &str, root: &Path) -> Vec<Group> {
        let mut groups = Vec::new();
        for line in memberships.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            let (root, names) = match controllers {
                "" => (root.to_owned(), ["memory.max", "memory.current", "inactive_file "]),
                _ if controllers.split(',').any(|controller| controller == "memory") => {
                    (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "])
                }
                _ => continue,
            };
            // In a container, the path may be the group's path on the host, while only part of it is visible here.
            for folder in Path::new(path.trim_start_matches('/')).ancestors().map(|inside| root.join(inside)) {
                let [limit, used, cache] = names;
                if folder.join(limit).exists() {
                    let statistics = folder.join("memory.stat");
                    let (limit, used) = (folder.join(limit), folder.join(used));
                    groups.push(Group { limit, used, statistics, cache: cache.as_bytes() });
                }
            }
        }
        groups
    }

    impl Group {
        fn available(&self) -> Option<u64> {
            let mut buffer = [0; BUFFER];
            // "max" is not a number: the group has no limit.
            let limit = number(read(&self.limit, &mut buffer)?)?;
            let used = number(read(&self.used, &mut buffer)?)?;
            let statistics = read(&self.statistics, &mut buffer).unwrap_or_default();
            let mut lines = statistics.split(|&byte| byte == b'\n');
            let cache = lines.find_map(|line| number(line.strip_prefix(self.cache)?)).unwrap_or(0);
            Some(limit.saturating_sub(used.saturating_sub(cache)))
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_tightest_group_counts() {
            let folder = tempfile::tempdir().unwrap();
            let write = |path: &str, text: &str| {
                let path = folder.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            };
            write("a/memory.max", "1000\n");
            write("a/memory.current", "600\n");
            write("a/memory.stat", "anon 5\ninactive_file 100\n");
            write("a/b/memory.max", "max\n");
            write("a/b/memory.current", "600\n");
            write("memory/c/memory.limit_in_bytes", "700\n");
            write("memory/c/memory.usage_in_bytes", "100\n");
            let least = |text: &str| groups(text, folder.path()).iter().filter_map(Group::available).min();
            assert_eq!(least("0::/a/b\n"), Some(500));
            assert_eq!(least("3:cpu,memory:/c/d\n1:name=x:/\n"), Some(600));
            assert_eq!(least("0::/elsewhere\nnonsense\n"), None);
        }
    }
}

/// Bytes read from a file; the statistics of a control group take about 4,000.
const BUFFER: usize = 16384;

/// Returns a field of a /proc file in bytes, or `None` if the file has no such field. The file states the field in
/// "kB", which means KiB there. Does not allocate, so that a step may call this function.
fn proc_field(path: &str, field: &[u8]) -> Option<u64> {
    kibibytes(read(path.as_ref(), &mut [0; BUFFER])?, field)
}

/// Reads the beginning of a file, or returns `None` if it cannot be read.
fn read<'b>(path: &Path, buffer: &'b mut [u8; BUFFER]) -> Option<&'b [u8]> {
    let mut filled = 0;
    let mut file = File::open(path).ok()?;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]).ok()? {
            0 => break,
            count => filled += count,
        }
    }
    Some(&buffer[..filled])
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}

fn kibibytes(text: &[u8], field: &[u8]) -> Option<u64> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(field))?;
    number(line.trim_ascii().strip_suffix(b"kB")?)?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc() {
        let check = |text: &str, expected| assert_eq!(kibibytes(text.as_bytes(), b"VmRSS:"), expected, "{text}");
        check("Name:\tx\nVmRSS:\t    1234 kB\nVmHWM: 5 kB\n", Some(1234 * 1024));
        check("VmRSS: 12", None);
        check("VmRSS: x kB", None);
        check("VmHWM: 5 kB", None);
        check("VmRSS: 99999999999999999999 kB", None);
        for told in [current_rss_bytes(), peak_rss_bytes(), available_memory_bytes()] {
            assert_eq!(told.is_some_and(|bytes| bytes > 4096), cfg!(target_os = "linux"));
        }
    }
}
