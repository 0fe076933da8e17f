//! Initial values of parameters and other persistent tensors.

use std::sync::Arc;

use gapless_kernels::{Numbers, Window};
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

/// The initial values of a persistent tensor: a part of the initial values of a source tensor. The source tensor is
/// usually the persistent tensor itself. For one rank's part of a tensor, the source is the whole tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Initializer {
    /// Distribution of the source tensor's values.
    pub init: Init,
    /// Name of the source tensor. Its random numbers are derived from this name.
    pub name: String,
    /// The part of the source tensor.
    pub window: Window,
    /// Elements of the source tensor if they are given, or `None` if they are drawn from `init`.
    pub given: Option<Arc<[f64]>>,
}

/// Number of values that one task draws.
const CHUNK: usize = 1 << 14;

impl Initializer {
    /// The initial values of a whole tensor of these extents.
    pub fn whole(init: Init, name: impl Into<String>, dims: &[usize]) -> Self {
        Self { init, name: name.into(), window: Window::whole(dims), given: None }
    }

    /// The initial values of a part of these: the elements that `window` holds of the tensor that they fill.
    pub(crate) fn part(&self, window: &Window) -> Self {
        Self { window: self.window.part(window), ..self.clone() }
    }

    /// Fills `out` with the initial values, converted by `cast`, in parallel. The values are a pure function of `seed`
    /// and this initializer. An element of a part has the value that it has in the whole tensor.
    pub fn fill<T: Copy + Send + Sync>(&self, seed: u64, out: &mut [T], cast: impl Fn(f64) -> T + Sync) {
        let mut each = |value: &(dyn Fn(usize) -> f64 + Sync)| {
            let chunks = out.par_chunks_mut(CHUNK).enumerate();
            chunks.for_each(|(chunk, out)| {
                let part = self.window.range(chunk * CHUNK..chunk * CHUNK + out.len());
                part.runs().flatten().zip(out).for_each(|(i, x)| *x = cast(value(i)));
            });
        };
        if let Some(given) = &self.given {
            return each(&|i| given[i]);
        }
        let hash = blake3::hash(self.name.as_bytes());
        let key = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"));
        let numbers = Numbers::from_seed(seed ^ key);
        match self.init {
            Init::Const(value) => out.fill(cast(value)),
            Init::Randn { mean, stdev } => each(&|i| mean + stdev * numbers.normal(i)),
            Init::Uniform { lo, up } => each(&|i| lo + (up - lo) * f64::from(numbers.uniform(i))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_values_of_the_whole() {
        // More elements than one task draws, so that tasks begin within rows.
        let whole = [120, 300];
        let given: Arc<[f64]> = (0..120 * 300).map(f64::from).collect();
        let windows = [
            Window::of(&whole, vec![vec![17..110], vec![0..300]]),
            Window::of(&whole, vec![vec![0..120], vec![1..299]]),
            Window::of(&whole, vec![vec![3..40, 43..80, 83..120], vec![0..300]]),
            Window::of(&whole, vec![vec![0..120], vec![50..250]]).range(777..20_000),
            Window::of(&whole, vec![vec![5..5], vec![0..300]]),
        ];
        let fill = |initializer: &Initializer| {
            let mut values = vec![0.0; initializer.window.elements()];
            initializer.fill(7, &mut values, |x| x);
            values
        };
        let drawn = [Init::Const(2.0), Init::Randn { mean: 1.0, stdev: 2.0 }, Init::Uniform { lo: -1.0, up: 3.0 }];
        let drawn = drawn.map(|init| Initializer::whole(init, "w", &whole));
        let given = Initializer { given: Some(given), ..drawn[0].clone() };
        for initializer in drawn.into_iter().chain([given]) {
            let all = fill(&initializer);
            for window in &windows {
                let expected: Vec<f64> = window.runs().flatten().map(|i| all[i]).collect();
                let part = Initializer { window: window.clone(), ..initializer.clone() };
                assert!(fill(&part) == expected, "{window} of {:?}", part.init);
            }
        }
    }
}
