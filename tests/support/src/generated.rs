//! Tests with generated cases. The cases are the same on every machine or, on request, new ones are drawn for a given
//! time.

use std::any::Any;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, FailurePersistence, FileFailurePersistence, PersistedSeed, RngSeed};

/// The seed of all generated cases, unless another one is set.
pub const SEED: u64 = 20_250_716;

/// The environment variable with the number of seconds during which each generated test draws new cases.
const EXPLORE_VARIABLE: &str = "GAPLESS_EXPLORE";

/// The environment variable with a seed that replaces [`SEED`] or, when exploring, the random seed.
const SEED_VARIABLE: &str = "GAPLESS_SEED";

/// Declares tests with generated cases in a module `generated`, so that `cargo test generated::` runs only these
/// tests. Parameters are written as in proptest: `x in strategy` or `x: type`. A module may have one such block.
/// `#![cases(n)]` at the block's top sets the number of cases of each test in it ([`Generated::cases`]); the default
/// is 256.
#[macro_export]
macro_rules! generated {
    (#![cases($cases:expr)] $($(#[$meta:meta])* fn $name:ident($($parameters:tt)+) $body:block)+) => {
        mod generated {
            #[allow(unused_imports, reason = "a test may need nothing of its file")]
            use super::*;

            $(
                $(#[$meta])*
                fn $name() {
                    let test = $crate::Generated { name: concat!(module_path!(), "::", stringify!($name)), cases: $cases };
                    test.run(|config| $crate::proptest::proptest!(config, |($($parameters)+)| $body));
                }
            )+
        }
    };
    ($(#[$meta:meta])+ fn $($tests:tt)+) => {
        $crate::generated! { #![cases(256)] $(#[$meta])+ fn $($tests)+ }
    };
}

/// A generated test, as declared by [`generated!`](crate::generated!).
#[derive(Debug)]
pub struct Generated {
    /// Path of the test.
    pub name: &'static str,
    /// Number of cases that the test draws with `GAPLESS_SLOW_TESTS`. Without this variable, the test draws a quarter
    /// of them.
    pub cases: u32,
}

impl Generated {
    /// Calls `draw` with one configuration after another. Each call of `draw` must draw and run the cases of its
    /// configuration.
    ///
    /// # Panics
    /// Panics if a case fails, or if an environment variable is not a number.
    pub fn run(&self, draw: impl Fn(Config)) {
        let asked = variable::<u64>(SEED_VARIABLE);
        let Some(seconds) = variable::<f64>(EXPLORE_VARIABLE) else {
            let cases = if crate::skipped::is_slow_asked() { self.cases } else { self.cases.div_ceil(4) };
            return draw(Config { cases, ..config(asked.unwrap_or(SEED), Regressions::Replayed) });
        };
        let begun = Instant::now();
        let first = asked.unwrap_or_else(drawn_seed);
        // Known regressions come first. After that, each case has a seed of its own, with which the case can be drawn
        // again.
        draw(Config { cases: 0, ..config(first, Regressions::Replayed) });
        let mut seed = first;
        let limit = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        while seed == first || begun.elapsed() < limit {
            let _named = Named(seed);
            draw(Config { cases: 1, ..config(seed, Regressions::Added) });
            seed = seed.wrapping_add(1);
        }
        let cases = seed.wrapping_sub(first);
        crate::skipped::print_uncaptured(format_args!(
            "explored: {}: {cases} cases, {SEED_VARIABLE}={first}",
            self.name
        ));
    }
}

/// Prints how to draw a case again if it fails.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{EXPLORE_VARIABLE}=0 {SEED_VARIABLE}={} draws this case again", self.0);
        }
    }
}

fn config(seed: u64, regressions: Regressions) -> Config {
    Config {
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: Some(Box::new(regressions)),
        // These limits are per failing case; proptest's default would be per drawn case.
        max_shrink_iters: 1024,
        max_shrink_time: 60_000,
        ..Config::default()
    }
}

/// Reads a number from an environment variable, or returns `None` if the variable is not set.
fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, which is no number of its kind")))
}

/// Returns a random seed, which is the same for all tests of this process.
fn drawn_seed() -> u64 {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    // Half of the range, so that the seeds after it never wrap around.
    *DRAWN.get_or_init(|| RandomState::new().hash_one(Instant::now()) >> 1)
}

/// The seeds of failed cases that exploring has found, in a file next to the test's source.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Regressions {
    Replayed,
    Added,
}

const FILE: FileFailurePersistence = FileFailurePersistence::WithSource("regressions");

impl FailurePersistence for Regressions {
    fn load_persisted_failures2(&self, source_file: Option<&'static str>) -> Vec<PersistedSeed> {
        match self {
            Self::Replayed => FILE.load_persisted_failures2(source_file),
            // They were replayed before exploring.
            Self::Added => Vec::new(),
        }
    }

    fn save_persisted_failure2(
        &mut self,
        source_file: Option<&'static str>,
        seed: PersistedSeed,
        shrunken_value: &dyn std::fmt::Debug,
    ) {
        if *self == Self::Added {
            FILE.clone().save_persisted_failure2(source_file, seed, shrunken_value);
        }
    }

    fn box_clone(&self) -> Box<dyn FailurePersistence> {
        Box::new(*self)
    }

    fn eq(&self, other: &dyn FailurePersistence) -> bool {
        other.as_any().downcast_ref() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
