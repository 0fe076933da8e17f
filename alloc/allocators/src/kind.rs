//! The allocators that can be compared, by name.
//!
//! The registry has the models of this crate with their usual options, and the allocators that a program adds
//! ([`Kind::register`]). Comparisons, sweeps and command lines know allocators only by this registry.

use std::fmt;
use std::str::FromStr;
use std::sync::{LazyLock, PoisonError, RwLock};

use gapless_alloc::{Problem, plan};

use crate::{
    Allocator, Bfc, Comparison, Device, GmLake, GmLakeOptions, Ideal, Malloc, Planned, PyTorch, PyTorchOptions,
    Requests, StAlloc,
};

/// An allocator that can be compared: its name, and a function that builds it. Kinds are equal if their names are.
///
/// ```
/// use gapless_alloc::{Buffer, Problem};
/// use gapless_allocators::{Comparison, Device, Kind, Malloc, Requests, compare};
///
/// let mine = Kind::register("my-malloc", false, |setup| Box::new(Malloc::new(Device::new(setup.capacity))))?;
/// let problem = Problem::new(vec![Buffer::new(0..1, 3 << 20), Buffer::new(1..2, 3 << 20)])?;
/// let compared = compare(&problem, &Requests::new(&problem), &Comparison::default()); // all registered allocators
/// assert!(compared.allocators.iter().any(|entry| entry.kind == mine));
/// assert_eq!("my-malloc".parse(), Ok(mine)); // as in `allocators` of a sweep
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy)]
pub struct Kind {
    name: &'static str,
    is_elastic: bool,
    build: &'static Build,
}

type Build = dyn Fn(&Setup<'_>) -> Box<dyn Allocator> + Send + Sync;

/// The program that an allocator is built for, and its device.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// Bytes of the device, which is empty.
    pub capacity: u64,
    /// The lifetimes of the program.
    pub problem: &'a Problem,
    /// The requests of the program.
    pub requests: &'a Requests,
    /// The settings of the comparison: the plan, options of the planner and of PyTorch's allocator.
    pub comparison: &'a Comparison,
}

/// The error for an unknown allocator name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown allocator {name:?}; choose one of {}", names())]
pub struct UnknownAllocator {
    /// The name as given.
    pub name: String,
}

/// The error for a name that an allocator cannot be registered with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "an allocator cannot be registered as {name:?}; use lower-case letters, digits and dashes, and none of {}",
    names()
)]
pub struct InvalidName {
    /// The name as given.
    pub name: String,
}

static REGISTRY: LazyLock<RwLock<Vec<Kind>>> = LazyLock::new(|| {
    RwLock::new(vec![
        Kind::IDEAL,
        Kind::GAPLESS,
        Kind::PYTORCH,
        Kind::PYTORCH_EXPANDABLE,
        Kind::GMLAKE,
        Kind::BFC,
        Kind::STALLOC,
        Kind::STALLOC_STRIPS,
        Kind::MALLOC,
    ])
});

impl Kind {
    /// [`Ideal`].
    pub const IDEAL: Self = Self::new("ideal", false, &|setup| Box::new(Ideal::new(setup.capacity)));
    /// [`Planned`], with the plan of the comparison or one of its planner.
    pub const GAPLESS: Self = Self::new("gapless", false, &|setup| {
        let Comparison { plan: known, planner, .. } = setup.comparison;
        let made = known.is_none().then(|| plan(setup.problem, planner));
        let plan = known.as_ref().or(made.as_ref()).expect("there is a plan, or one was made");
        Box::new(Planned::with_plan(setup.device(), setup.problem, setup.requests, plan))
    });
    /// [`PyTorch`].
    pub const PYTORCH: Self = Self::new("pytorch", true, &|setup| setup.pytorch(false));
    /// [`PyTorch`] with expandable segments.
    pub const PYTORCH_EXPANDABLE: Self = Self::new("pytorch-expandable", true, &|setup| setup.pytorch(true));
    /// [`GmLake`].
    pub const GMLAKE: Self =
        Self::new("gmlake", true, &|setup| Box::new(GmLake::new(setup.device(), GmLakeOptions::default())));
    /// [`Bfc`] with regions that grow.
    pub const BFC: Self = Self::new("bfc", true, &|setup| Box::new(Bfc::growing(setup.device())));
    /// [`StAlloc`] with the algorithm of its authors.
    pub const STALLOC: Self =
        Self::new("stalloc", false, &|setup| Box::new(StAlloc::new(setup.device(), setup.problem, setup.requests)));
    /// [`StAlloc`] with our implementation of its layers.
    pub const STALLOC_STRIPS: Self = Self::new("stalloc-strips", false, &|setup| {
        Box::new(StAlloc::strips(setup.device(), setup.problem, setup.requests))
    });
    /// [`Malloc`].
    pub const MALLOC: Self = Self::new("malloc", false, &|setup| Box::new(Malloc::new(setup.device())));

    const fn new(name: &'static str, is_elastic: bool, build: &'static Build) -> Self {
        Self { name, is_elastic, build }
    }

    /// Adds an allocator to the registry. From then on, it is one of [`Kind::all`], and its name is valid wherever a
    /// comparison or a sweep names allocators. `build` must return an allocator with an empty device of
    /// [`Setup::capacity`] bytes each time. [`Kind::is_elastic`] describes `is_elastic`. The entry lives as long as the
    /// process.
    ///
    /// # Errors
    /// Returns [`InvalidName`] if the name is empty or taken, or has other characters than `a` to `z`, digits and
    /// dashes.
    pub fn register(
        name: &str,
        is_elastic: bool,
        build: impl Fn(&Setup<'_>) -> Box<dyn Allocator> + Send + Sync + 'static,
    ) -> Result<Self, InvalidName> {
        let mut registry = REGISTRY.write().unwrap_or_else(PoisonError::into_inner);
        let is_valid = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
        if name.is_empty() || !name.chars().all(is_valid) || registry.iter().any(|kind| kind.name == name) {
            drop(registry);
            return Err(InvalidName { name: name.to_owned() });
        }
        let kind = Self::new(String::leak(name.to_owned()), is_elastic, Box::leak(Box::new(build)));
        registry.push(kind);
        Ok(kind)
    }

    /// Returns all registered kinds: those of this crate in the order of reports, and then those that were added.
    pub fn all() -> Vec<Self> {
        REGISTRY.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The name in tables and on the command line.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// True if the allocator returns cached memory to the device before it refuses a request. Such an allocator may
    /// complete on a device that is smaller than the memory that it reserves on a large device.
    pub fn is_elastic(self) -> bool {
        self.is_elastic
    }

    /// Builds the allocator on an empty device of `capacity` bytes, ready for `requests`. If the allocator needs a
    /// plan, the plan is made here.
    pub fn build(self, capacity: u64, problem: &Problem, requests: &Requests) -> Box<dyn Allocator> {
        self.build_with(&Setup { capacity, problem, requests, comparison: &Comparison::default() })
    }

    /// Like [`build`](Self::build), with the settings of a comparison.
    pub fn build_with(self, setup: &Setup<'_>) -> Box<dyn Allocator> {
        (self.build)(setup)
    }
}

impl Setup<'_> {
    /// Returns an empty device of the given capacity.
    fn device(&self) -> Device {
        Device::new(self.capacity)
    }

    /// PyTorch's allocator with the options of the comparison. Only the kind decides whether segments expand.
    fn pytorch(&self, expandable_segments: bool) -> Box<dyn Allocator> {
        let options = PyTorchOptions { expandable_segments, ..self.comparison.pytorch.clone() };
        Box::new(PyTorch::new(self.device(), options))
    }
}

impl PartialEq for Kind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Kind {}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kind({})", self.name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl FromStr for Kind {
    type Err = UnknownAllocator;

    fn from_str(name: &str) -> Result<Self, UnknownAllocator> {
        let found = Self::all().into_iter().find(|kind| kind.name == name);
        found.ok_or_else(|| UnknownAllocator { name: name.to_owned() })
    }
}

/// Returns the names of all kinds, separated by commas.
fn names() -> String {
    Kind::all().iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_registered_once() {
        let register = |name: &str| Kind::register(name, false, |setup| Box::new(Malloc::new(setup.device())));
        let mine = register("of-a-test").unwrap();
        assert_eq!(("of-a-test".parse(), Kind::all().contains(&mine)), (Ok(mine), true));
        for name in ["of-a-test", "pytorch", "", "Mine", "a,b", "a b"] {
            let why = register(name).unwrap_err().to_string();
            assert!(why.contains(&format!("{name:?}")) && why.contains("pytorch, pytorch-expandable"), "{why}");
        }
        assert_eq!("of-no-test".parse::<Kind>().unwrap_err().name, "of-no-test");
    }
}
