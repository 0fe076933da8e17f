//! The compared allocators by name, each with its usual options.

use std::fmt;
use std::str::FromStr;

use gapless_alloc::Problem;

use crate::Requests;
use crate::{Allocator, Bfc, Device, GmLake, GmLakeOptions, Ideal, Malloc, Planned, PyTorch, PyTorchOptions, StAlloc};

/// One of the compared allocators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "named as what they stand for")]
pub enum Kind {
    Ideal,
    Gapless,
    PyTorch,
    PyTorchExpandable,
    GmLake,
    Bfc,
    StAlloc,
    StAllocStrips,
    Malloc,
}

/// The error for an unknown allocator name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown allocator {name:?}; choose one of {known}", known = Kind::ALL.map(Kind::name).join(", "))]
pub struct UnknownAllocator {
    /// The name as given.
    pub name: String,
}

impl Kind {
    /// All kinds, in the order of reports.
    pub const ALL: [Self; 9] = [
        Self::Ideal,
        Self::Gapless,
        Self::PyTorch,
        Self::PyTorchExpandable,
        Self::GmLake,
        Self::Bfc,
        Self::StAlloc,
        Self::StAllocStrips,
        Self::Malloc,
    ];

    /// The name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ideal => "ideal",
            Self::Gapless => "gapless",
            Self::PyTorch => "pytorch",
            Self::PyTorchExpandable => "pytorch-expandable",
            Self::GmLake => "gmlake",
            Self::Bfc => "bfc",
            Self::StAlloc => "stalloc",
            Self::StAllocStrips => "stalloc-strips",
            Self::Malloc => "malloc",
        }
    }

    /// True if the allocator returns cached memory to the device before it refuses a request. Such an allocator may
    /// complete on a device that is smaller than the memory that it reserves on a large device.
    pub fn is_elastic(self) -> bool {
        matches!(self, Self::PyTorch | Self::PyTorchExpandable | Self::GmLake | Self::Bfc)
    }

    /// Builds the allocator on an empty device of `capacity` bytes, ready for `requests`. If the allocator needs a
    /// plan, the plan is made here.
    pub fn build(self, capacity: u64, problem: &Problem, requests: &Requests) -> Box<dyn Allocator> {
        self.build_with(capacity, problem, requests, &PyTorchOptions::default())
    }

    /// Like [`build`](Self::build), with options for the two kinds of PyTorch's allocator. Only the kind decides
    /// whether segments expand.
    pub fn build_with(
        self,
        capacity: u64,
        problem: &Problem,
        requests: &Requests,
        pytorch: &PyTorchOptions,
    ) -> Box<dyn Allocator> {
        let device = Device::new(capacity);
        let pytorch = |expandable_segments| {
            Box::new(PyTorch::new(device.clone(), PyTorchOptions { expandable_segments, ..pytorch.clone() }))
        };
        match self {
            Self::Ideal => Box::new(Ideal::new(capacity)),
            Self::Gapless => Box::new(Planned::new(device, problem, requests)),
            Self::PyTorch => pytorch(false),
            Self::PyTorchExpandable => pytorch(true),
            Self::GmLake => Box::new(GmLake::new(device, GmLakeOptions::default())),
            Self::Bfc => Box::new(Bfc::growing(device)),
            Self::StAlloc => Box::new(StAlloc::new(device, problem, requests)),
            Self::StAllocStrips => Box::new(StAlloc::strips(device, problem, requests)),
            Self::Malloc => Box::new(Malloc::new(device)),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = UnknownAllocator;

    fn from_str(name: &str) -> Result<Self, UnknownAllocator> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| UnknownAllocator { name: name.to_owned() })
    }
}
