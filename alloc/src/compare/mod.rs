//! Every allocator on the same program, side by side.
//!
//! In: a problem and its requests. Out: a [`Compared`] that prints as a table, serialises as an object and is drawn as a
//! page by [`page`].

mod page;
mod timeline;

use std::fmt;

use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::peers::{Device, Kind, OutOfMemory};
use crate::{Problem, Report, Requests, replay, replay_observed};
pub use page::page;
pub use timeline::Timeline;

/// What to compare, and how.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// How often the step is repeated.
    pub iterations: u64,
    /// The allocators, in any order.
    pub kinds: Vec<Kind>,
    /// Bytes of the device; `None` for 80 GiB, or four times the live bytes where that is more.
    pub capacity: Option<u64>,
    /// Whether timelines are kept for pictures, which takes longer.
    pub pictures: bool,
}

impl Default for Comparison {
    fn default() -> Self {
        Self { iterations: 1, kinds: Kind::ALL.to_vec(), capacity: None, pictures: false }
    }
}

/// What came of it, the least reserved first and those that ran out of memory last.
#[derive(Debug, Serialize)]
pub struct Compared {
    /// One entry per allocator.
    pub allocators: Vec<Entry>,
    /// The most bytes alive at once, as asked for.
    pub peak_live: u64,
    /// How often the step was repeated.
    pub iterations: u64,
    /// Bytes of the device.
    pub capacity: u64,
}

/// One allocator's part.
#[derive(Debug)]
pub struct Entry {
    /// Which one.
    pub kind: Kind,
    /// Its report, or the request that it could not serve.
    pub outcome: Result<Report, OutOfMemory>,
    /// Its course over time, if pictures were asked for.
    pub timeline: Option<Timeline>,
}

/// Replays the requests through each allocator on a device of its own.
pub fn compare(problem: &Problem, requests: &Requests, comparison: &Comparison) -> Compared {
    let capacity =
        comparison.capacity.unwrap_or_else(|| Device::DEFAULT_CAPACITY.max(requests.peak_live().saturating_mul(4)));
    let entry = |&kind: &Kind| {
        let mut allocator = kind.build(capacity, problem, requests);
        if !comparison.pictures {
            let outcome = replay(requests, &mut *allocator, comparison.iterations);
            return Entry { kind, outcome, timeline: None };
        }
        let served = requests.persistent().len() as u64 + requests.step().len() as u64 * comparison.iterations;
        let mut timeline = Timeline::new(served);
        let outcome = replay_observed(requests, &mut *allocator, comparison.iterations, |request, allocator| {
            timeline.observe(request, allocator);
        });
        Entry { kind, outcome, timeline: Some(timeline) }
    };
    let mut allocators: Vec<Entry> = comparison.kinds.iter().map(entry).collect();
    allocators.sort_by_key(|entry| (entry.outcome.is_err(), entry.outcome.as_ref().ok().map(Report::peak_reserved)));
    Compared { allocators, peak_live: requests.peak_live(), iterations: comparison.iterations, capacity }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut entry = serializer.serialize_struct("Entry", 7)?;
        entry.serialize_field("allocator", self.kind.name())?;
        match &self.outcome {
            Ok(report) => {
                entry.serialize_field("peak_allocated", &report.peak_allocated())?;
                entry.serialize_field("peak_reserved", &report.peak_reserved())?;
                entry.serialize_field("fragmentation", &report.fragmentation())?;
                entry.serialize_field("segments", &report.statistics.segments)?;
                entry.serialize_field("device_calls", &report.statistics.device_calls())?;
            }
            Err(error) => entry.serialize_field("error", &error.to_string())?,
        }
        entry.end()
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<20}{:>15}{:>15}{:>10}{:>15}{:>10}{:>14}{:>12}",
            "allocator", "reserved GiB", "allocated GiB", "× live", "fragmentation", "segments", "device calls", "time"
        )?;
        for Entry { kind, outcome, .. } in &self.allocators {
            match outcome {
                Ok(report) => writeln!(
                    f,
                    "{:<20}{:>15.3}{:>15.3}{:>10.4}{:>14.2}%{:>10}{:>14}{:>9.1} ms",
                    kind,
                    gib(report.peak_reserved()),
                    gib(report.peak_allocated()),
                    report.peak_reserved() as f64 / self.peak_live.max(1) as f64,
                    100.0 * report.fragmentation(),
                    report.statistics.segments,
                    report.statistics.device_calls(),
                    1e3 * report.time.as_secs_f64()
                )?,
                Err(error) => writeln!(f, "{kind:<20}{error}")?,
            }
        }
        let times = if self.iterations == 1 { "once".to_owned() } else { format!("{} times", self.iterations) };
        writeln!(
            f,
            "\nmost bytes alive at once: {} ({:.3} GiB); the step {times}, on a device of {:.1} GiB",
            self.peak_live,
            gib(self.peak_live),
            gib(self.capacity)
        )
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
