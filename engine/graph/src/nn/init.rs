//! What parameters hold before the first step.

use std::sync::Arc;

use gapless_kernels::Numbers;

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

/// What a persistent tensor holds before the first step: elements of a tensor that may be another, or larger.
#[derive(Debug, Clone, PartialEq)]
pub struct Initializer {
    /// How that tensor is filled.
    pub init: Init,
    /// Its name, which decides its random numbers.
    pub name: String,
    /// Which of its elements is the first here.
    pub first: usize,
    /// The tensor's elements, where they are given instead.
    pub given: Option<Arc<[f64]>>,
}

impl Initializer {
    /// Fills what is here: a pure function of the run's seed and of these, cast to its type.
    pub fn fill<T: Copy>(&self, seed: u64, out: &mut [T], cast: impl Fn(f64) -> T) {
        if let Some(given) = &self.given {
            out.iter_mut().zip(&given[self.first..]).for_each(|(x, &given)| *x = cast(given));
            return;
        }
        let hash = blake3::hash(self.name.as_bytes());
        let key = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"));
        let (numbers, first) = (Numbers::from_seed(seed ^ key), self.first);
        match self.init {
            Init::Const(value) => out.fill(cast(value)),
            Init::Randn { mean, stdev } => {
                out.iter_mut().enumerate().for_each(|(i, x)| *x = cast(mean + stdev * numbers.normal(first + i)));
            }
            Init::Uniform { lo, up } => {
                let uniform = |i| lo + (up - lo) * f64::from(numbers.uniform(i));
                out.iter_mut().enumerate().for_each(|(i, x)| *x = cast(uniform(first + i)));
            }
        }
    }
}
