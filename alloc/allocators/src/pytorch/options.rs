//! `PYTORCH_ALLOC_CONF`: the options of PyTorch's caching allocator, in the text form that PyTorch reads.

use std::str::FromStr;

const MIB: u64 = 1 << 20;

/// The options that affect reserved memory. The defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq)]
pub struct PyTorchOptions {
    /// `max_split_size_mb`: blocks of at least this many bytes are never split, and do not serve requests of fewer
    /// bytes.
    pub max_split_bytes: u64,
    /// `max_non_split_rounding_mb`: an unsplittable block serves a request only if the block is larger than the request
    /// by less than this value.
    pub max_non_split_rounding_bytes: u64,
    /// `roundup_power2_divisions`: number of parts into which the range up to the next power of two is divided. The
    /// entries are for requests below 2 MiB, below 4 MiB, and so on; the last entry is for 32 GiB and more. If an entry
    /// is 0 or 1, its requests are rounded to multiples of 512 bytes instead.
    pub roundup_power2_divisions: [u64; 16],
    /// `garbage_collection_threshold`: a fraction of the allowed memory. If more than this is reserved, cached blocks
    /// that are older than average are freed before new memory is taken. As in the original, the option has no effect
    /// unless [`memory_fraction`](Self::memory_fraction) is set.
    pub garbage_collection_threshold: Option<f64>,
    /// `per_process_memory_fraction`: the fraction of the device that may be reserved.
    pub memory_fraction: Option<f64>,
    /// `expandable_segments`: grow mapped ranges instead of allocating new segments.
    pub expandable_segments: bool,
    /// `large_segment_size_mb`: size of the segments for requests between 1 and 10 MiB, and of the pages of expandable
    /// segments.
    pub large_segment_bytes: u64,
}

impl Default for PyTorchOptions {
    fn default() -> Self {
        Self {
            max_split_bytes: u64::MAX,
            max_non_split_rounding_bytes: 20 * MIB,
            roundup_power2_divisions: [0; 16],
            garbage_collection_threshold: None,
            memory_fraction: None,
            expandable_segments: false,
            large_segment_bytes: 20 * MIB,
        }
    }
}

impl PyTorchOptions {
    /// The default options with expandable segments.
    pub fn expandable() -> Self {
        Self { expandable_segments: true, ..Self::default() }
    }

    /// Returns the rounded size of a request of `bytes`. It is a multiple of 512 bytes, or a division of a power of
    /// two.
    pub(super) fn round(&self, bytes: u64) -> u64 {
        const SMALLEST: u64 = 512;
        if bytes < SMALLEST {
            return SMALLEST;
        }
        let interval = bytes.ilog2().saturating_sub(MIB.ilog2()).min(15) as usize;
        let divisions = self.roundup_power2_divisions[interval];
        if divisions <= 1 || bytes <= SMALLEST * divisions || bytes.is_power_of_two() {
            return bytes.next_multiple_of(SMALLEST);
        }
        let floor = 1u64 << bytes.ilog2();
        match floor >> divisions.ilog2() {
            0 => floor << 1,
            step => bytes.next_multiple_of(step),
        }
    }
}

/// The error of an invalid option string.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum OptionsError {
    #[error("{text:?} is not of the form option:value")]
    NoValue { text: String },
    #[error("unknown allocator option {name:?}; choose one of {known}", known = KNOWN.join(", "))]
    Unknown { name: String },
    #[error("{name}: {value:?} is not {expected}")]
    Value { name: String, value: String, expected: &'static str },
}

const KNOWN: [&str; 7] = [
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "per_process_memory_fraction",
    "expandable_segments",
    "large_segment_size_mb",
];

impl FromStr for PyTorchOptions {
    type Err = OptionsError;

    /// Parses `option:value,option:value`, as in `PYTORCH_ALLOC_CONF`, e.g.
    /// `max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:4]`.
    fn from_str(text: &str) -> Result<Self, OptionsError> {
        let mut options = Self::default();
        for part in split_outside_brackets(text) {
            let (name, value) = part.split_once(':').ok_or_else(|| OptionsError::NoValue { text: part.to_owned() })?;
            options.set(name.trim(), value.trim())?;
        }
        Ok(options)
    }
}

impl PyTorchOptions {
    fn set(&mut self, name: &str, value: &str) -> Result<(), OptionsError> {
        let fail = |expected| OptionsError::Value { name: name.to_owned(), value: value.to_owned(), expected };
        let mebibytes = || {
            let expected = "a whole number of MiB, at least 20";
            let count = value.parse::<u64>().ok().filter(|&count| count >= 20).ok_or_else(|| fail(expected))?;
            count.checked_mul(MIB).ok_or_else(|| fail(expected))
        };
        let fraction = |most: f64| {
            let within = |f: &f64| *f > 0.0 && *f <= most;
            value.parse().ok().filter(within).ok_or_else(|| fail("a fraction between 0 and 1"))
        };
        match name {
            "max_split_size_mb" => self.max_split_bytes = mebibytes()?,
            "max_non_split_rounding_mb" => self.max_non_split_rounding_bytes = mebibytes()?,
            "large_segment_size_mb" => {
                let expected = "an even number of MiB, at least 20";
                self.large_segment_bytes =
                    mebibytes().ok().filter(|b| b % (2 * MIB) == 0).ok_or_else(|| fail(expected))?;
            }
            "garbage_collection_threshold" => {
                self.garbage_collection_threshold = Some(fraction(1.0 - f64::EPSILON)?);
            }
            "per_process_memory_fraction" => self.memory_fraction = Some(fraction(1.0)?),
            "expandable_segments" => {
                self.expandable_segments = match value {
                    "True" | "true" => true,
                    "False" | "false" => false,
                    _ => return Err(fail("True or False")),
                }
            }
            "roundup_power2_divisions" => {
                self.roundup_power2_divisions =
                    divisions(value).ok_or_else(|| fail("a power of two or a list like [256:1,512:2,>:4]"))?;
            }
            _ => return Err(OptionsError::Unknown { name: name.to_owned() }),
        }
        Ok(())
    }
}

/// Parses one number for all sizes, or `[MiB:divisions,…,>:divisions]`. The first entry also applies to smaller sizes,
/// and `>` to sizes above the last entry. Sizes between two entries that are not named get no divisions. Returns `None`
/// if the text has another form.
fn divisions(value: &str) -> Option<[u64; 16]> {
    let count = |text: &str| text.trim().parse::<u64>().ok().filter(|n| *n == 0 || n.is_power_of_two());
    let Some(list) = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
        return count(value).map(|n| [n; 16]);
    };
    let mut table = [0; 16];
    let mut last = None;
    for entry in list.split(',') {
        let (boundary, divisions) = entry.split_once(':')?;
        let divisions = count(divisions)?;
        if boundary.trim() == ">" {
            table[last.map_or(0, |l: usize| l + 1)..].fill(divisions);
            continue;
        }
        let boundary = count(boundary).filter(|&b| b > 0)?;
        let index = (boundary.ilog2() as usize).min(15);
        if last.is_none() {
            table[..index].fill(divisions);
        }
        table[index] = divisions;
        last = Some(index);
    }
    Some(table)
}

fn split_outside_brackets(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    text.split(move |c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_users_write() {
        let options: PyTorchOptions = "max_split_size_mb:128, expandable_segments:True,\
             roundup_power2_divisions:[64:8,128:2,>:4],garbage_collection_threshold:0.8"
            .parse()
            .unwrap();
        assert_eq!(options.max_split_bytes, 128 * MIB);
        assert!(options.expandable_segments);
        assert_eq!(options.garbage_collection_threshold, Some(0.8));
        assert_eq!(options.roundup_power2_divisions, [8, 8, 8, 8, 8, 8, 8, 2, 4, 4, 4, 4, 4, 4, 4, 4]);
        assert_eq!("".parse(), Ok(PyTorchOptions::default()));
    }

    #[test]
    fn says_what_is_wrong() {
        let check = |text: &str, expected: &str| {
            let error = text.parse::<PyTorchOptions>().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check("max_split_size_mb", "not of the form option:value");
        check("max_split_size_mb:19", "at least 20");
        check("max_split_size_mb:99999999999999999", "whole number of MiB");
        check("garbage_collection_threshold:1.0", "between 0 and 1");
        check("garbage_collection_threshold:NaN", "between 0 and 1");
        check("roundup_power2_divisions:3", "power of two");
        check("roundup_power2_divisions:[0:2]", "power of two");
        check("expandable_segments:yes", "True or False");
        check("expandable:True", "unknown allocator option \"expandable\"");
    }

    #[test]
    fn rounds_as_documented() {
        let plain = PyTorchOptions::default();
        let four: PyTorchOptions = "roundup_power2_divisions:4".parse().unwrap();
        let check = |options: &PyTorchOptions, bytes: u64, expected: u64| assert_eq!(options.round(bytes), expected);
        check(&plain, 1, 512);
        check(&plain, 512, 512);
        check(&plain, 513, 1024);
        check(&four, 2048, 2048);
        check(&four, 1200, 1536); // up to 4 × 512 bytes: plain rounding
        check(&four, 4097, 5120);
        check(&four, 7000, 7168);
        check(&four, 7169, 8192);
    }
}
