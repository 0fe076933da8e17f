//! A comparison of all allocators on the same program.
//!
//! In: a problem and its requests. Out: a [`Compared`], which prints as a table and serializes as an object. [`page`]
//! draws it as a page.

mod page;
mod timeline;

use std::fmt;

use gapless_alloc::{Options, Problem, Solution};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::{Device, Kind, OutOfMemory, PyTorchOptions, Setup};
use crate::{Report, Requests, replay, replay_observed, smallest_capacity};
pub use page::page;
pub use timeline::Timeline;

/// The settings of a comparison.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// Number of times that the step is repeated.
    pub iterations: u64,
    /// The allocators, in any order. The default is all registered ones.
    pub kinds: Vec<Kind>,
    /// Size of the device in bytes. `None` means 80 GiB, or four times the live bytes if these exceed 60 GiB.
    pub capacity: Option<u64>,
    /// Options of the two kinds of PyTorch's allocator.
    pub pytorch: PyTorchOptions,
    /// Whether to search for the smallest device on which each allocator completes. The search takes some twenty
    /// replays per allocator.
    pub smallest_device: bool,
    /// Whether to record timelines for pictures, which takes longer.
    pub pictures: bool,
    /// Options of the planner for [`Kind::GAPLESS`].
    pub planner: Options,
    /// An existing plan for [`Kind::GAPLESS`]. With `None`, the comparison makes a plan.
    pub plan: Option<Solution>,
    /// Bytes that gapless reserves beyond the plan, for routed rows that these requests do not have. `None` if all
    /// sizes are known when the step is compiled.
    pub unused_reserve: Option<u64>,
}

impl Default for Comparison {
    fn default() -> Self {
        Self {
            iterations: 1,
            kinds: Kind::all(),
            capacity: None,
            pytorch: PyTorchOptions::default(),
            smallest_device: false,
            pictures: false,
            planner: Options::default(),
            plan: None,
            unused_reserve: None,
        }
    }
}

/// The result of a comparison. Allocators are sorted by reserved bytes. Allocators that ran out of memory come last.
#[derive(Debug, Serialize)]
pub struct Compared {
    /// One entry per allocator.
    pub allocators: Vec<Entry>,
    /// The most bytes alive at once, before any rounding by an allocator.
    pub peak_live: u64,
    /// Number of times that the step was repeated.
    pub iterations: u64,
    /// Size of the device in bytes.
    pub capacity: u64,
}

/// The result for one allocator.
#[derive(Debug)]
pub struct Entry {
    /// The allocator.
    pub kind: Kind,
    /// The allocator's report, or the request that it could not serve.
    pub outcome: Result<Report, OutOfMemory>,
    /// The smallest device in bytes on which the allocator completes. `None` if that was not requested, or if the
    /// allocator does not complete on the given device.
    pub smallest_device: Option<u64>,
    /// Bytes that gapless reserves in addition for other routed rows; `None` for all other allocators.
    pub unused_reserve: Option<u64>,
    /// The allocator's timeline, if pictures were requested.
    pub timeline: Option<Timeline>,
}

/// Replays the requests through every allocator of `comparison`, each allocator on a device of its own.
pub fn compare(problem: &Problem, requests: &Requests, comparison: &Comparison) -> Compared {
    let capacity = comparison.capacity.unwrap_or_else(|| match requests.peak_live() {
        live if live <= Device::DEFAULT_CAPACITY / 4 * 3 => Device::DEFAULT_CAPACITY,
        live => live.saturating_mul(4),
    });
    let build = |kind: Kind, capacity| kind.build_with(&Setup { capacity, problem, requests, comparison });
    let served = requests.persistent().len() as u64 + requests.step().len() as u64 * comparison.iterations;
    let entry = |&kind: &Kind| {
        let mut allocator = build(kind, capacity);
        let mut timeline = comparison.pictures.then(|| Timeline::new(served));
        let outcome = match &mut timeline {
            None => replay(requests, &mut *allocator, comparison.iterations),
            Some(timeline) => {
                replay_observed(requests, &mut *allocator, comparison.iterations, |request, allocator| {
                    timeline.observe(request, allocator);
                })
            }
        };
        let smallest = |report: &Report| match kind.is_elastic() {
            false => Some(report.peak_reserved()),
            true => {
                let build = |capacity| build(kind, capacity);
                let search = |enough| smallest_capacity(requests, comparison.iterations, enough, build);
                let found = search(report.peak_reserved()).or_else(|_| search(capacity));
                found.ok().map(|(smallest, _)| smallest)
            }
        };
        let smallest_device = outcome.as_ref().ok().filter(|_| comparison.smallest_device).and_then(smallest);
        let unused_reserve = comparison.unused_reserve.filter(|_| kind == Kind::GAPLESS);
        Entry { kind, outcome, smallest_device, unused_reserve, timeline }
    };
    let mut allocators: Vec<Entry> = comparison.kinds.iter().map(entry).collect();
    allocators.sort_by_key(|entry| (entry.outcome.is_err(), entry.outcome.as_ref().ok().map(Report::peak_reserved)));
    Compared { allocators, peak_live: requests.peak_live(), iterations: comparison.iterations, capacity }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut entry = serializer.serialize_struct("Entry", 8)?;
        entry.serialize_field("allocator", self.kind.name())?;
        match &self.outcome {
            Ok(report) => {
                entry.serialize_field("peak_allocated", &report.peak_allocated())?;
                entry.serialize_field("peak_reserved", &report.peak_reserved())?;
                entry.serialize_field("fragmentation", &report.fragmentation())?;
                entry.serialize_field("segments", &report.statistics.segments)?;
                entry.serialize_field("device_calls", &report.statistics.device_calls())?;
                match &self.smallest_device {
                    Some(bytes) => entry.serialize_field("min_capacity", bytes)?,
                    None => entry.skip_field("min_capacity")?,
                }
                match &self.unused_reserve {
                    Some(bytes) => entry.serialize_field("unused_reserve", bytes)?,
                    None => entry.skip_field("unused_reserve")?,
                }
            }
            Err(error) => entry.serialize_field("error", &error.to_string())?,
        }
        entry.end()
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<20}{:>15}{:>15}{:>10}", "allocator", "reserved GiB", "allocated GiB", "× live")?;
        write!(f, "{:>15}{:>10}{:>14}{:>12}", "fragmentation", "segments", "device calls", "time")?;
        let searched = self.allocators.iter().any(|entry| entry.smallest_device.is_some());
        let reserves = self.allocators.iter().any(|entry| entry.unused_reserve.is_some());
        write!(f, "{}", if searched { "  smallest device GiB" } else { "" })?;
        writeln!(f, "{}", if reserves { "  unused reserve GiB" } else { "" })?;
        for Entry { kind, outcome, smallest_device, unused_reserve, .. } in &self.allocators {
            let report = match outcome {
                Ok(report) => report,
                Err(error) => {
                    writeln!(f, "{kind:<20}{error}")?;
                    continue;
                }
            };
            let (reserved, allocated) = (report.peak_reserved(), report.peak_allocated());
            let above = reserved as f64 / self.peak_live.max(1) as f64;
            write!(f, "{kind:<20}{:>15.3}{:>15.3}{above:>10.4}", gib(reserved), gib(allocated))?;
            let (segments, calls) = (report.statistics.segments, report.statistics.device_calls());
            let ms = 1e3 * report.time.as_secs_f64();
            write!(f, "{:>14.2}%{segments:>10}{calls:>14}{ms:>9.1} ms", 100.0 * report.fragmentation())?;
            match smallest_device {
                Some(bytes) => write!(f, "{:>21.3}", gib(*bytes))?,
                None if searched => write!(f, "{:>21}", "")?,
                None => {}
            }
            match unused_reserve {
                Some(bytes) => writeln!(f, "{:>20.3}", gib(*bytes))?,
                None => writeln!(f)?,
            }
        }
        let times = if self.iterations == 1 { "once".to_owned() } else { format!("{} times", self.iterations) };
        writeln!(
            f,
            "\npeak live bytes: {} ({:.3} GiB); the program runs {times} on a device of {:.1} GiB",
            self.peak_live,
            gib(self.peak_live),
            gib(self.capacity)
        )
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
