//! Initial values of parameters and other persistent tensors.

use std::sync::Arc;

use gapless_kernels::Numbers;
use rayon::prelude::*;

/// A distribution of initial values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// The same value for every element.
    Const(f64),
    /// A normal distribution.
    Randn {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        stdev: f64,
    },
    /// A uniform distribution.
    Uniform {
        /// Lower end.
        lo: f64,
        /// Upper end.
        up: f64,
    },
}

/// The initial values of a persistent tensor: a range of the initial values of a source tensor. The source tensor is
/// usually the persistent tensor itself. For one rank's share of a tensor, the source is the whole tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Initializer {
    /// Distribution of the source tensor's values.
    pub init: Init,
    /// Name of the source tensor. Its random numbers are derived from this name.
    pub name: String,
    /// Index of the source tensor's element with which the range begins.
    pub first: usize,
    /// Elements of the source tensor if they are given, or `None` if they are drawn from `init`.
    pub given: Option<Arc<[f64]>>,
}

/// Number of values that one task draws.
const CHUNK: usize = 1 << 14;

impl Initializer {
    /// Fills `out` with the initial values, converted by `cast`, in parallel. The values are a pure function of `seed`
    /// and this initializer.
    pub fn fill<T: Copy + Send + Sync>(&self, seed: u64, out: &mut [T], cast: impl Fn(f64) -> T + Sync) {
        if let Some(given) = &self.given {
            out.iter_mut().zip(&given[self.first..]).for_each(|(x, &given)| *x = cast(given));
            return;
        }
        let hash = blake3::hash(self.name.as_bytes());
        let key = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"));
        let numbers = Numbers::from_seed(seed ^ key);
        let mut each = |value: &(dyn Fn(usize) -> f64 + Sync)| {
            let chunks = out.par_chunks_mut(CHUNK).enumerate();
            chunks.for_each(|(chunk, out)| {
                (self.first + chunk * CHUNK..).zip(out).for_each(|(i, x)| *x = cast(value(i)));
            });
        };
        match self.init {
            Init::Const(value) => out.fill(cast(value)),
            Init::Randn { mean, stdev } => each(&|i| mean + stdev * numbers.normal(i)),
            Init::Uniform { lo, up } => each(&|i| lo + (up - lo) * f64::from(numbers.uniform(i))),
        }
    }
}
