//! The memory of the process and of the machine, as the system tells it.

use std::fs::File;

/// Most bytes that the process has had resident since its start; nothing where the system doesn't tell.
pub fn peak_rss_bytes() -> Option<u64> {
    proc_field("/proc/self/status", b"VmHWM:")
}

/// Bytes that the process has resident; nothing where the system doesn't tell.
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

/// Bytes that may be allocated before the machine starts to swap; nothing where the system doesn't tell. What a container or
/// a limit of the process leaves may be less.
pub fn available_memory_bytes() -> Option<u64> {
    proc_field("/proc/meminfo", b"MemAvailable:")
}

/// A field of a /proc file that is given in kB (KiB, in fact). Allocates nothing, so that a step may ask.
fn proc_field(path: &str, field: &[u8]) -> Option<u64> {
    use std::io::Read;
    let mut buffer = [0; 8192];
    let mut filled = 0;
    let mut file = File::open(path).ok()?;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]).ok()? {
            0 => break,
            count => filled += count,
        }
    }
    kibibytes(&buffer[..filled], field)
}

fn kibibytes(text: &[u8], field: &[u8]) -> Option<u64> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(field))?;
    let number = line.trim_ascii().strip_suffix(b"kB")?.trim_ascii_end();
    std::str::from_utf8(number).ok()?.parse::<u64>().ok()?.checked_mul(1024)
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
