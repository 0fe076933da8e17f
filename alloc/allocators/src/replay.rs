//! Replays a lifetime table through an allocator.
//!
//! In: a [`Problem`], turned into the requests of a program that repeats its step. Out: a [`Report`] of the memory that
//! the allocator reserved and the driver calls that it made. The allocator gets one request after another, without
//! looking ahead.

use std::time::{Duration, Instant};

use gapless_alloc::{BufferId, Problem, lower_bound};

use crate::{Allocator, Block, OutOfMemory, Statistics, Stream};

/// One request of a program to its allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The buffer is allocated.
    Allocate(BufferId),
    /// The buffer is freed.
    Free(BufferId),
}

/// A lifetime table as an ordered list of requests.
///
/// Buffers that are alive over the whole table are persistent. They are allocated once, at the start and in the order
/// of the file. All others are requested again in every iteration, in order of their ticks. At one tick, frees come
/// before allocations; apart from that, the order of the file counts. Buffers of zero bytes are left out.
#[derive(Debug, Clone)]
pub struct Requests {
    bytes: Vec<u64>,
    /// Stream of each buffer; empty if all are on one stream.
    streams: Vec<Stream>,
    peak_live: u64,
    persistent: Vec<BufferId>,
    step: Vec<Request>,
}

impl Requests {
    /// Orders the births and deaths of a table.
    pub fn new(problem: &Problem) -> Self {
        let buffers = problem.buffers();
        let start = buffers.iter().map(|b| b.lifetime.start).min().unwrap_or(0);
        let end = problem.end();
        let sized = || problem.ids().filter(|&id| problem.buffer(id).bytes > 0);
        let (persistent, passing): (Vec<_>, Vec<_>) =
            sized().partition(|&id| problem.buffer(id).lifetime == (start..end));
        let mut events: Vec<(u64, bool, BufferId)> = Vec::with_capacity(2 * passing.len());
        for id in passing {
            let lifetime = &problem.buffer(id).lifetime;
            events.push((lifetime.start, true, id));
            events.push((lifetime.end, false, id));
        }
        // `false < true`: at one tick, frees come before allocations.
        events.sort_unstable();
        let request = |(_, birth, id)| if birth { Request::Allocate(id) } else { Request::Free(id) };
        Self {
            bytes: buffers.iter().map(|b| b.bytes).collect(),
            streams: Vec::new(),
            peak_live: lower_bound(problem),
            persistent,
            step: events.into_iter().map(request).collect(),
        }
    }

    /// The same requests with a stream for each buffer (indexed by [`BufferId`]).
    pub fn on_streams(self, streams: Vec<Stream>) -> Self {
        Self { streams, ..self }
    }

    /// The stream on which a buffer is allocated.
    pub fn stream(&self, id: BufferId) -> Stream {
        self.streams.get(id.index()).copied().unwrap_or_default()
    }

    /// Number of buffers in the table.
    pub(crate) fn buffers(&self) -> usize {
        self.bytes.len()
    }

    /// Buffers that live through all iterations.
    pub fn persistent(&self) -> &[BufferId] {
        &self.persistent
    }

    /// The requests that every iteration makes.
    pub fn step(&self) -> &[Request] {
        &self.step
    }

    /// The most bytes alive at once. A device smaller than this cannot hold the buffers.
    pub fn peak_live(&self) -> u64 {
        self.peak_live
    }

    /// Bytes that a buffer asks for.
    pub fn bytes(&self, id: BufferId) -> u64 {
        self.bytes[id.index()]
    }
}

/// The result of a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The allocator's name.
    pub allocator: &'static str,
    /// The allocator's statistics at the end.
    pub statistics: Statistics,
    /// Number of requests served, which are allocations and frees.
    pub requests: u64,
    /// Time that serving the requests took on this machine. Device time is not included.
    pub time: Duration,
}

impl Report {
    /// The most bytes held by the program at once, as the allocator rounds them.
    pub fn peak_allocated(&self) -> u64 {
        self.statistics.allocated.peak
    }

    /// The most bytes taken from the device.
    pub fn peak_reserved(&self) -> u64 {
        self.statistics.reserved.peak
    }

    /// Peak of allocated bytes ÷ peak of reserved bytes; 1 if nothing was reserved.
    pub fn memory_efficiency(&self) -> f64 {
        if self.peak_reserved() == 0 { 1.0 } else { self.peak_allocated() as f64 / self.peak_reserved() as f64 }
    }

    /// 1 − memory efficiency, which is STAlloc's definition of fragmentation.
    pub fn fragmentation(&self) -> f64 {
        1.0 - self.memory_efficiency()
    }
}

/// Serves `requests` from `allocator`: the persistent buffers once, then the step `iterations` times.
///
/// # Errors
/// Returns the error of the first request that the allocator could not serve.
pub fn replay(requests: &Requests, allocator: &mut dyn Allocator, iterations: u64) -> Result<Report, OutOfMemory> {
    replay_observed(requests, allocator, iterations, |_, _| {})
}

/// Like [`replay`], but calls `observe(requests served, allocator)` after each request.
///
/// # Errors
/// Returns the error of the first request that the allocator could not serve.
pub fn replay_observed(
    requests: &Requests,
    allocator: &mut dyn Allocator,
    iterations: u64,
    mut observe: impl FnMut(u64, &dyn Allocator),
) -> Result<Report, OutOfMemory> {
    let started = Instant::now();
    let mut live: Vec<Option<Block>> = (0..requests.bytes.len()).map(|_| None).collect();
    let mut served = 0;
    for &id in &requests.persistent {
        live[id.index()] = Some(allocator.allocate(requests.bytes(id), requests.stream(id))?);
        served += 1;
        observe(served, allocator);
    }
    for _ in 0..iterations {
        for request in &requests.step {
            match *request {
                Request::Allocate(id) => {
                    live[id.index()] = Some(allocator.allocate(requests.bytes(id), requests.stream(id))?);
                }
                Request::Free(id) => {
                    allocator.free(live[id.index()].take().expect("lifetimes are not empty: births come first"));
                }
            }
            served += 1;
            observe(served, allocator);
        }
    }
    let (time, statistics) = (started.elapsed(), allocator.statistics());
    Ok(Report { allocator: allocator.name(), statistics, requests: served, time })
}

/// Finds the smallest device, in steps of 2 MiB, on which a replay completes. Returns the device's size and the report
/// of that replay. The search bisects below `enough`, a capacity that is known to suffice. Some allocators fail on a
/// device although they complete on a smaller one; for such an allocator, the result is the size at which the bisection
/// ends.
///
/// # Errors
/// Returns the error of the request that fails even on a device of `enough` bytes.
pub fn smallest_capacity(
    requests: &Requests,
    iterations: u64,
    enough: u64,
    mut allocator: impl FnMut(u64) -> Box<dyn Allocator>,
) -> Result<(u64, Report), OutOfMemory> {
    const STEP: u64 = 2 << 20;
    let mut attempt = |steps: u64| replay(requests, &mut *allocator(steps * STEP), iterations);
    let mut completes = enough.div_ceil(STEP);
    let mut report = attempt(completes)?;
    let mut fails = requests.peak_live().saturating_sub(1) / STEP;
    while completes - fails > 1 {
        let middle = fails + (completes - fails) / 2;
        match attempt(middle) {
            Ok(better) => (completes, report) = (middle, better),
            Err(_) => fails = middle,
        }
    }
    Ok((completes * STEP, report))
}
