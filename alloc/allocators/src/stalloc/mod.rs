//! STAlloc: a static plan from a profiled iteration, matched request by request, and a caching allocator for the rest.
//!
//! The planner lays persistent buffers end to end; the rest goes into strips, sizes in descending order, all rounded to
//! 512 bytes. Where the phases of a step are known, buffers that are born in one phase and die in another are grouped and
//! fused first (the paper's planner, `group` in its code); without phases there are only strips (`split-and-fuse`, the
//! code's default). At run time the n-th request of an iteration gets the n-th planned
//! offset if its size is the planned one; otherwise PyTorch's caching allocator serves it, and likewise if the bytes are
//! taken. Buffers marked as dynamic (the data decides their sizes) are not planned: they get the best-fitting range that
//! the plan leaves idle throughout their lifetime, or else come from the caching allocator too.

mod groups;
mod skyline;
mod strips;

use std::collections::BTreeMap;

use gapless_alloc::{BufferId, Lifetime, Problem};
use strips::Rectangle;

use crate::pytorch::PyTorchOptions;
use crate::{Allocator, Block, Device, Extent, Gauge, OutOfMemory, PyTorch, Statistics, Stream};
use crate::{Request, Requests};

const GRAIN: u64 = 512;
/// The slot of blocks from the static pool; the caching allocator's are below.
const IN_POOL: u32 = u32::MAX;

/// STAlloc on one device.
#[derive(Debug)]
pub struct StAlloc {
    plan: Vec<Planned>,
    pool_bytes: u64,
    /// Address of the static pool, once it is taken.
    pool: Option<u64>,
    /// Requests that come once, before the first iteration.
    persistent: usize,
    next: usize,
    /// Offsets in use, with their bytes.
    live: BTreeMap<u64, u64>,
    caching: PyTorch,
    in_pool: Statistics,
    statistics: Statistics,
}

/// What the plan says of one request.
#[derive(Debug, Clone)]
enum Planned {
    /// This offset, if the size is this.
    Static { offset: u64, bytes: u64 },
    /// Anywhere in these ranges of the pool (offset, bytes), which are idle throughout its lifetime.
    Dynamic { idle: Vec<(u64, u64)> },
}

impl StAlloc {
    /// Plans `problem`, knowing of no phases and no dynamic buffers: the released code's default.
    pub fn new(device: Device, problem: &Problem, requests: &Requests) -> Self {
        Self::with(device, problem, requests, &[], |_| false)
    }

    /// Plans the buffers of `problem` that are not dynamic. `phases` are the ticks, ascending, at which a phase of the step
    /// (the forward or backward pass of a micro-batch) ends and the next begins.
    pub fn with(
        device: Device,
        problem: &Problem,
        requests: &Requests,
        phases: &[u64],
        is_dynamic: impl Fn(BufferId) -> bool,
    ) -> Self {
        let births = requests.step().iter().filter_map(|request| match request {
            Request::Allocate(id) => Some(*id),
            Request::Free(_) => None,
        });
        let births: Vec<BufferId> = births.collect();
        let rounded = |id: BufferId| problem.buffer(id).bytes.saturating_add(GRAIN - 1) / GRAIN * GRAIN;
        let mut pool_bytes = 0;
        let mut plan = Vec::with_capacity(requests.persistent().len() + births.len());
        for &id in requests.persistent() {
            plan.push(Planned::Static { offset: pool_bytes, bytes: problem.buffer(id).bytes });
            pool_bytes = pool_bytes.saturating_add(rounded(id));
        }
        let fixed: Vec<BufferId> = births.iter().copied().filter(|&id| !is_dynamic(id)).collect();
        let rectangle = |&id| Rectangle { lifetime: problem.buffer(id).lifetime.clone(), bytes: rounded(id) };
        let rectangles: Vec<Rectangle> = fixed.iter().map(rectangle).collect();
        let placed = strips::place(&rectangles, phases);
        let base = pool_bytes;
        pool_bytes = pool_bytes.saturating_add(placed.height);
        let mut offsets = placed.offsets.iter().map(|offset| base.saturating_add(*offset));
        for &id in &births {
            plan.push(if is_dynamic(id) {
                let busy = rectangles.iter().zip(&placed.offsets).map(|(r, &offset)| (r, base.saturating_add(offset)));
                Planned::Dynamic { idle: idle_ranges(busy, &problem.buffer(id).lifetime, base..pool_bytes) }
            } else {
                let offset = offsets.next().expect("one offset per static buffer");
                Planned::Static { offset, bytes: problem.buffer(id).bytes }
            });
        }
        Self {
            plan,
            pool_bytes,
            pool: None,
            persistent: requests.persistent().len(),
            next: 0,
            live: BTreeMap::new(),
            caching: PyTorch::new(device, PyTorchOptions::default()),
            in_pool: Statistics::default(),
            statistics: Statistics::default(),
        }
    }

    /// Takes the pool from the device, if that has not happened.
    fn pool(&mut self) -> Option<u64> {
        if self.pool.is_none() && self.pool_bytes > 0 {
            self.pool = Some(self.caching.device_mut().malloc(self.pool_bytes)?);
            self.in_pool.reserved.rise(self.pool_bytes);
            self.in_pool.segments = 1;
            self.in_pool.device_allocations = 1;
        }
        Some(self.pool.unwrap_or_default())
    }

    /// The offset that the plan has for the next request, if it holds.
    fn planned_offset(&mut self, bytes: u64) -> Option<u64> {
        if self.next == self.plan.len() {
            self.next = self.persistent;
        }
        let planned = self.plan.get(self.next)?;
        self.next += 1;
        match planned {
            Planned::Static { offset, bytes: expected } if *expected == bytes => {
                self.is_free(*offset, round(bytes)).then_some(*offset)
            }
            Planned::Static { .. } => None,
            Planned::Dynamic { idle } => {
                let free = idle.iter().flat_map(|&(offset, size)| self.free_within(offset, size));
                let fitting = free.filter(|&(_, size)| size >= round(bytes));
                fitting.min_by_key(|&(offset, size)| (size, offset)).map(|(offset, _)| offset)
            }
        }
    }

    fn is_free(&self, offset: u64, bytes: u64) -> bool {
        self.live.range(..offset + bytes).next_back().is_none_or(|(&other, &size)| other + size <= offset)
    }

    /// The parts of a range of the pool that are not in use.
    fn free_within(&self, offset: u64, bytes: u64) -> Vec<(u64, u64)> {
        let inside = self.live.range(..offset + bytes).rev().take_while(|&(&at, &size)| at + size > offset);
        let mut used: Vec<(u64, u64)> = inside.map(|(&at, &size)| (at, at + size)).collect();
        used.reverse();
        gaps(offset..offset + bytes, &used)
    }

    fn account(&mut self) {
        let caching = self.caching.statistics();
        let sum = |gauge: &mut Gauge, now: u64| {
            gauge.current = now;
            gauge.peak = gauge.peak.max(now);
        };
        sum(&mut self.statistics.allocated, self.in_pool.allocated.current + caching.allocated.current);
        sum(&mut self.statistics.reserved, self.in_pool.reserved.current + caching.reserved.current);
        self.statistics.segments = self.in_pool.segments + caching.segments;
        self.statistics.device_allocations = self.in_pool.device_allocations + caching.device_allocations;
        self.statistics.device_frees = caching.device_frees;
        self.statistics.retries = caching.retries;
        self.statistics.driver = caching.driver;
    }
}

fn round(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRAIN)
}

/// The ranges of `within` that none of the placed rectangles touches during `lifetime`.
fn idle_ranges<'r>(
    placed: impl Iterator<Item = (&'r Rectangle, u64)>,
    lifetime: &Lifetime,
    within: std::ops::Range<u64>,
) -> Vec<(u64, u64)> {
    let overlapping = placed.filter(|(r, _)| r.lifetime.start < lifetime.end && lifetime.start < r.lifetime.end);
    let mut used: Vec<(u64, u64)> = overlapping.map(|(r, offset)| (offset, offset.saturating_add(r.bytes))).collect();
    used.sort_unstable();
    gaps(within, &used)
}

/// What sorted ranges (start, end) leave free within a range, as (start, bytes).
fn gaps(within: std::ops::Range<u64>, used: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut gaps = Vec::new();
    let mut floor = within.start;
    for &(start, end) in used.iter().chain(&[(within.end, within.end)]) {
        if start > floor {
            gaps.push((floor, start - floor));
        }
        floor = floor.max(end);
    }
    gaps
}

impl Allocator for StAlloc {
    fn name(&self) -> &'static str {
        "stalloc"
    }

    fn allocate(&mut self, bytes: u64, stream: Stream) -> Result<Block, OutOfMemory> {
        let Some(pool) = self.pool() else {
            let capacity = self.caching.device_mut().capacity();
            return Err(OutOfMemory::new(self.name(), bytes, &self.statistics, capacity));
        };
        let block = match self.planned_offset(bytes) {
            Some(offset) => {
                self.live.insert(offset, round(bytes));
                self.in_pool.allocated.rise(round(bytes));
                Ok(Block { address: pool + offset, bytes: round(bytes), slot: IN_POOL })
            }
            None => self.caching.allocate(bytes, stream),
        };
        self.account();
        block.map_err(|error| OutOfMemory::new("stalloc", bytes, &self.statistics, error.capacity))
    }

    fn free(&mut self, block: Block) {
        if block.slot == IN_POOL {
            let offset = block.address - self.pool.unwrap_or_default();
            self.live.remove(&offset).expect("a block goes back to the allocator it came from");
            self.in_pool.allocated.fall(block.bytes);
        } else {
            self.caching.free(block);
        }
        self.account();
    }

    fn statistics(&self) -> Statistics {
        self.statistics
    }

    fn extents(&self) -> Vec<Extent> {
        let mut extents = self.caching.extents();
        if let Some(pool) = self.pool {
            let live = self.live.iter().map(|(&offset, &bytes)| (pool + offset, bytes));
            extents.extend(crate::allocator::with_holes(pool, self.pool_bytes, live));
        }
        extents.sort_unstable_by_key(|extent| extent.address);
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_alloc::Buffer;

    fn problem(rows: &[(Lifetime, u64)]) -> Problem {
        Problem::new(rows.iter().map(|(lifetime, bytes)| Buffer::new(lifetime.clone(), *bytes)).collect()).unwrap()
    }

    #[test]
    fn smaller_sizes_fill_larger_strips_first() {
        let check = |rows: &[(Lifetime, u64)], expected: u64| {
            let problem = problem(rows);
            let requests = Requests::new(&problem);
            let mut allocator = StAlloc::new(Device::new(1 << 30), &problem, &requests);
            let report = crate::replay(&requests, &mut allocator, 2).unwrap();
            assert_eq!(report.peak_reserved(), expected, "{rows:?}");
            assert_eq!(report.statistics.device_allocations, 1, "the plan holds");
        };
        check(&[(0..9, 512), (1..4, 4096), (4..8, 4096)], 512 + 4096);
        check(&[(0..2, 4096), (2..4, 1024), (2..4, 2048), (5..6, 100)], 4096);
        check(&[(0..2, 2048), (1..3, 2048), (3..5, 4096)], 4096);
        // Strips are isolated: what two of them leave idle does not add up.
        check(&[(0..2, 4096), (0..2, 4096), (2..4, 3072), (2..4, 3072), (2..4, 2048)], 4096 + 4096 + 2048);
    }

    #[test]
    fn what_the_plan_does_not_know_is_cached() {
        let problem = problem(&[(0..2, 4096), (1..3, 4096)]);
        let requests = Requests::new(&problem);
        let mut allocator = StAlloc::new(Device::new(1 << 30), &problem, &requests);
        let first = allocator.allocate(4096, Stream::default()).unwrap();
        let other = allocator.allocate(5000, Stream::default()).unwrap(); // not the planned size
        assert_eq!(allocator.reserved(), 8192 + (2 << 20));
        allocator.free(first);
        allocator.free(other);
        assert_eq!(allocator.allocated(), 0);
    }

    #[test]
    fn dynamic_buffers_use_idle_ranges() {
        let rows = [(0..9, 512), (0..4, 8192), (5..8, 4096), (5..7, 4096), (5..6, 4097)];
        let problem = problem(&rows);
        let requests = Requests::new(&problem);
        let mut allocator = StAlloc::with(Device::new(1 << 30), &problem, &requests, &[], |id| id.index() >= 3);
        let report = crate::replay(&requests, &mut allocator, 1).unwrap();
        // 4096 idle bytes serve the first, nothing is left for the second.
        assert_eq!(report.peak_reserved(), 512 + 8192 + (2 << 20));
    }
}
