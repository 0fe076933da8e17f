//! What parameters hold before the first step.

use crate::random::Numbers;

/// How a persistent tensor is filled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// One number everywhere.
    Const(f64),
    /// Normal with this mean and standard deviation.
    Randn {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        stdev: f64,
    },
    /// Uniform between two numbers.
    Uniform {
        /// Lower end.
        lo: f64,
        /// Upper end.
        up: f64,
    },
}

impl Init {
    /// Fills a tensor, or the part of it from element `first` on: a pure function of the run's seed and the tensor's name, cast
    /// to its type.
    pub(crate) fn fill<T: Copy>(self, seed: u64, name: &str, first: usize, out: &mut [T], cast: impl Fn(f64) -> T) {
        let hash = blake3::hash(name.as_bytes());
        let key = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"));
        let numbers = Numbers::from_seed(seed ^ key);
        match self {
            Self::Const(value) => out.fill(cast(value)),
            Self::Randn { mean, stdev } => {
                out.iter_mut().enumerate().for_each(|(i, x)| *x = cast(mean + stdev * numbers.normal(first + i)));
            }
            Self::Uniform { lo, up } => {
                let uniform = |i| lo + (up - lo) * f64::from(numbers.uniform(i));
                out.iter_mut().enumerate().for_each(|(i, x)| *x = cast(uniform(first + i)));
            }
        }
    }
}
