//! The distribution of tokens over experts that plans and comparisons assume.

use std::fmt::{self, Display};
use std::str::FromStr;

/// The distribution of the tokens of a step over the experts of each layer, for commands that run no step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertLoad {
    /// `skewed:A`: in each layer, the n-th most popular expert is chosen n^−A times as often as the most popular one.
    /// `even` is `skewed:0`, where every expert has the same chance.
    Skewed(f64),
    /// `worst`: every token of every expert rank chooses experts of one rank, and always the same ones, up to their
    /// capacity. No routing sends more rows to a rank.
    Worst,
}

impl ExpertLoad {
    /// Every expert has the same chance.
    pub const EVEN: Self = Self::Skewed(0.0);
}

impl Default for ExpertLoad {
    fn default() -> Self {
        Self::EVEN
    }
}

impl Display for ExpertLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skewed(0.0) => f.write_str("even"),
            Self::Skewed(exponent) => write!(f, "skewed:{exponent}"),
            Self::Worst => f.write_str("worst"),
        }
    }
}

impl FromStr for ExpertLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let exponent = |text: &str| text.parse().ok().filter(|exponent| (0.0..=16.0).contains(exponent));
        match text {
            "even" => Ok(Self::EVEN),
            "worst" => Ok(Self::Worst),
            _ => text.strip_prefix("skewed:").and_then(exponent).map(Self::Skewed).ok_or_else(|| {
                format!("{text:?} is not a load of experts; write even, worst, or skewed:A with A from 0 to 16")
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_as_they_are_written() {
        for text in ["even", "skewed:0.6", "skewed:2", "worst"] {
            assert_eq!(text.parse::<ExpertLoad>().unwrap().to_string(), text);
        }
        assert_eq!("skewed:0".parse(), Ok(ExpertLoad::EVEN));
        for text in ["", "zipf", "skewed", "skewed:", "skewed:-1", "skewed:NaN", "skewed:17"] {
            assert!(text.parse::<ExpertLoad>().unwrap_err().contains("skewed:A with A from 0 to 16"), "{text}");
        }
    }
}
