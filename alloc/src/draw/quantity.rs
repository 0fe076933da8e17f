//! Sizes in bytes for people. They are printed in binary units, with two decimals unless the value is whole. Common
//! spellings are parsed.

use std::fmt;
use std::str::FromStr;

/// Prints a number of bytes as `96 B`, `1.50 GiB` or `64 MiB`. The format's width and alignment apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Parses a number of bytes such as `4096`, `600MiB`, `40M` or `1.5 GB`. KiB, MiB, … and K, M, … are powers of
    /// 1024; KB, MB, … are powers of 1000.
    ///
    /// # Errors
    /// Returns [`NotBytes`] with the reason if the text is not a number of bytes.
    pub fn read(text: &str) -> Result<u64, NotBytes> {
        let text = text.trim();
        if text.starts_with('-') {
            return Err(NotBytes::Negative);
        }
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        if number.is_empty() {
            return Err(NotBytes::Number { text: text.into() });
        }
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" | "k" => 1 << 10,
            "mib" | "m" => 1 << 20,
            "gib" | "g" => 1 << 30,
            "tib" | "t" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(NotBytes::Unit { unit: unit.trim().into() }),
        };
        let too_many = || NotBytes::TooMany { text: text.into() };
        // Whole numbers are parsed as integers, so that large ones lose no digits.
        if let Ok(number) = number.parse::<u64>() {
            return number.checked_mul(scale).filter(|&bytes| bytes < 1 << 63).ok_or_else(too_many);
        }
        let number: f64 = number.parse().map_err(|_| NotBytes::Number { text: text.into() })?;
        let bytes = number * scale as f64;
        if bytes < 2f64.powi(63) { Ok(bytes as u64) } else { Err(too_many()) }
    }
}

impl FromStr for Bytes {
    type Err = NotBytes;

    fn from_str(text: &str) -> Result<Self, NotBytes> {
        Self::read(text).map(Self)
    }
}

/// The reason why a text is not a number of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum NotBytes {
    Negative,
    Number { text: String },
    Unit { unit: String },
    TooMany { text: String },
}

impl fmt::Display for NotBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Negative => write!(f, "a number of bytes cannot be negative"),
            Self::Number { text } => write!(f, "{text:?} is not a number of bytes; write 4096, 600MiB, 40M or 1.5GB"),
            Self::Unit { unit } => {
                write!(f, "{unit:?} is not a unit of bytes; use KiB, MiB, GiB, TiB, or KB, MB, GB, TB")
            }
            Self::TooMany { text } => write!(f, "{text} is more than 2^64 - 1 bytes"),
        }
    }
}

impl std::error::Error for NotBytes {}

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

/// Prints a number of bytes as [`Bytes`] does, followed by the exact number: `1.50 GiB (1610612736 bytes)`. Fewer than
/// 1024 bytes are printed as `96 bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactBytes(pub u64);

impl fmt::Display for ExactBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        if bytes < 1024 { write!(f, "{bytes} bytes") } else { write!(f, "{} ({bytes} bytes)", Bytes(bytes)) }
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
        assert_eq!(ExactBytes(1023).to_string(), "1023 bytes");
        assert_eq!(ExactBytes(1536).to_string(), "1.50 KiB (1536 bytes)");
    }

    #[test]
    fn reads_what_people_write() {
        let check = |text: &str, bytes: u64| assert_eq!(Bytes::read(text), Ok(bytes), "{text}");
        check("4096", 4096);
        check("600MiB", 600 << 20);
        check("40M", 40 << 20);
        check(" 1.5GB ", 1_500_000_000);
        check("1.5 GiB", 3 << 29);
        check("9007199254740993", 9_007_199_254_740_993); // no f64 has this value
        assert_eq!(Bytes(1536).to_string().parse(), Ok(Bytes(1536)));
        for text in ["-1", "", "MiB", "4 parsecs", "1.2.3", "99999999999G", "18446744073709551615"] {
            assert!(Bytes::read(text).is_err(), "{text}");
        }
    }
}
