//! Bytes for people: binary units, two decimals unless the figure is whole.

use std::fmt;

/// Prints a number of bytes as `96 B`, `1.50 GiB` or `64 MiB`. Honours width and alignment of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let power = self.0.checked_ilog2().unwrap_or(0) / 10;
        let (unit, name) = (1u64 << (10 * power), UNITS[power as usize]);
        let text = match self.0 % unit {
            0 => format!("{} {name}", self.0 / unit),
            _ => format!("{:.2} {name}", self.0 as f64 / unit as f64),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_the_unit() {
        let check = |bytes: u64, expected: &str| assert_eq!(Bytes(bytes).to_string(), expected);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1024, "1 KiB");
        check(1536, "1.50 KiB");
        check(64 << 20, "64 MiB");
        check(u64::MAX, "16.00 EiB");
        assert_eq!(format!("{:>8}", Bytes(7)), "     7 B");
    }
}
