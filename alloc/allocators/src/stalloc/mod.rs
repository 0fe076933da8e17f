//! STAlloc: a static plan from a profiled run that is matched request by request, and a caching allocator for all other
//! requests.
//!
//! The model follows the released planner (`Synthesizer/` of infinigence/STAlloc at 3a9f97ff4896, arXiv 2507.16274).
//! The planner places persistent buffers end to end, and plans the buffers that are born in the first two iterations.
//! All sizes are rounded to 512 bytes.
//!
//! - By default ([`StAlloc::new`], `--static-algo split-and-fuse`), the buffers of the iterations go into layers, size
//!   by size.
//! - If the phases of a step are known, buffers that are born in one phase and die in another are grouped and fused
//!   first ([`StAlloc::with`], `group`). STAlloc takes the better of these two plans only with `--static-algo
//!   autotune`.
//! - [`StAlloc::strips`] follows the idea of the layers, without the losses of the released code.
//!
//! At run time, the n-th request of an iteration gets the n-th planned offset if the request has the planned size and
//! the bytes at this offset are free. Otherwise, PyTorch's caching allocator serves it. Requests of at most 512 bytes
//! have blocks of their own, twice as many as are ever alive.
//!
//! Buffers that are marked as dynamic (their sizes depend on the data) are not planned. A dynamic buffer gets the
//! best-fitting range that the plan does not use during the buffer's lifetime. If there is no such range, the caching
//! allocator serves the dynamic buffer too.

mod chains;
mod groups;
mod lanes;
mod layers;
mod plan;
mod rooms;
mod skyline;
mod strips;

use std::collections::BTreeMap;

use gapless_alloc::{BufferId, Problem};
use plan::{Plan, Planned, Rectangle, gaps};

use crate::pytorch::PyTorchOptions;
use crate::{Allocator, Block, Device, Extent, Gauge, OutOfMemory, PyTorch, Requests, Statistics, Stream};

const GRAIN: u64 = 512;
/// The slot of all blocks from the static pool. The caching allocator's slots are lower.
const IN_POOL: u32 = u32::MAX;

/// STAlloc on one device.
#[derive(Debug)]
pub struct StAlloc {
    name: &'static str,
    plan: Plan,
    /// Address of the static pool, once it has been taken.
    pool: Option<u64>,
    /// The next request that the plan expects.
    next: usize,
    /// Bytes of the blocks in use, by offset.
    live: BTreeMap<u64, u64>,
    /// Offsets of the free small blocks.
    small: Vec<u64>,
    caching: PyTorch,
    in_pool: Statistics,
    statistics: Statistics,
}

impl StAlloc {
    /// Plans `problem` without phases or dynamic buffers, as the released code does by default.
    pub fn new(device: Device, problem: &Problem, requests: &Requests) -> Self {
        Self::with(device, problem, requests, &[], |_| false)
    }

    /// Plans the buffers of `problem` that are not dynamic. `phases` are the ticks, ascending, at which one phase of the
    /// step ends and the next begins. A phase is the forward or backward pass of a micro-batch.
    pub fn with(
        device: Device,
        problem: &Problem,
        requests: &Requests,
        phases: &[u64],
        is_dynamic: impl Fn(BufferId) -> bool,
    ) -> Self {
        Self::planned("stalloc", device, Plan::released(problem, requests, phases, is_dynamic))
    }

    /// Plans one iteration in strips, without the losses of the released planner: lifetimes are not extended, and each
    /// size class is placed in order of birth.
    pub fn strips(device: Device, problem: &Problem, requests: &Requests) -> Self {
        Self::planned("stalloc-strips", device, Plan::strips(problem, requests))
    }

    fn planned(name: &'static str, device: Device, plan: Plan) -> Self {
        Self {
            name,
            small: (0..plan.small_blocks).rev().map(|block| plan.bytes.saturating_add(block * GRAIN)).collect(),
            plan,
            pool: None,
            next: 0,
            live: BTreeMap::new(),
            caching: PyTorch::new(device, PyTorchOptions::default()),
            in_pool: Statistics::default(),
            statistics: Statistics::default(),
        }
    }

    /// Bytes of the static pool and of the small blocks after it.
    fn pool_bytes(&self) -> u64 {
        self.plan.bytes.saturating_add(self.plan.small_blocks * GRAIN)
    }

    /// Returns the address of the static pool, or `None` if the device does not have the bytes. The first call takes
    /// the pool from the device.
    fn pool(&mut self) -> Option<u64> {
        let bytes = self.pool_bytes();
        if self.pool.is_none() && bytes > 0 {
            self.pool = Some(self.caching.device_mut().malloc(bytes)?);
            self.in_pool.reserved.rise(bytes);
            self.in_pool.segments = 1;
            self.in_pool.device_allocations = 1;
        }
        Some(self.pool.unwrap_or_default())
    }

    /// Returns the planned offset of the next request. Returns `None` if the request does not have the planned size, or
    /// if the bytes at the planned offset are not free.
    fn planned_offset(&mut self, bytes: u64) -> Option<u64> {
        if bytes <= self.plan.small {
            return self.small.pop();
        }
        if self.next == self.plan.requests.len() {
            self.next = self.plan.again;
        }
        let planned = self.plan.requests.get(self.next)?;
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

    /// The pieces of a range of the pool that are not in use.
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
    bytes.saturating_add(GRAIN - 1) / GRAIN * GRAIN
}

impl Allocator for StAlloc {
    fn name(&self) -> &'static str {
        self.name
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
        block.map_err(|error| OutOfMemory::new(self.name, bytes, &self.statistics, error.capacity))
    }

    fn free(&mut self, block: Block) {
        if block.slot == IN_POOL {
            let offset = block.address - self.pool.unwrap_or_default();
            self.live.remove(&offset).expect("a block goes back to the allocator it came from");
            if offset >= self.plan.bytes {
                self.small.push(offset);
            }
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
            extents.extend(crate::allocator::with_holes(pool, self.pool_bytes(), live));
        }
        extents.sort_unstable_by_key(|extent| extent.address);
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gapless_alloc::{Buffer, Lifetime};

    fn problem(rows: &[(Lifetime, u64)]) -> Problem {
        Problem::new(rows.iter().map(|(lifetime, bytes)| Buffer::new(lifetime.clone(), *bytes)).collect()).unwrap()
    }

    /// Checks the bytes reserved by the released planner and by strips.
    fn check(rows: &[(Lifetime, u64)], released: u64, strips: u64) {
        let problem = problem(rows);
        let requests = Requests::new(&problem);
        let device = Device::new(1 << 30);
        let allocators =
            [StAlloc::new(device.clone(), &problem, &requests), StAlloc::strips(device, &problem, &requests)];
        for (mut allocator, expected) in allocators.into_iter().zip([released, strips]) {
            let report = crate::replay(&requests, &mut allocator, 3).unwrap();
            assert_eq!(report.peak_reserved(), expected, "{}: {rows:?}", report.allocator);
            assert_eq!(report.statistics.device_allocations, 1, "the plan holds");
        }
    }

    #[test]
    fn smaller_sizes_fill_larger_layers_first() {
        check(&[(1..3, 2048), (2..4, 2048), (6..9, 4096)], 4096 + 2048, 4096);
        check(&[(0..9, 1024), (1..4, 4096), (4..8, 4096)], 1024 + 4096, 1024 + 4096);
        // Layers are separate, so the idle spaces of two layers do not add up.
        let rows = [(0..2, 4096), (0..2, 4096), (2..4, 3072), (2..4, 3072), (2..4, 2048)];
        check(&rows, 2 * 4096 + 2048, 2 * 4096 + 2048);
    }

    #[test]
    fn the_released_planner_leaves_a_request_between() {
        // A buffer is freed right before a member of the layer is born, either in this iteration or in the next one.
        check(&[(0..1, 2048), (2..3, 4096)], 4096 + 2048, 4096);
        check(&[(0..1, 4096), (2..3, 2048)], 4096 + 2048, 4096);
        // The requests of a small buffer lie in between. The small buffer has a block of its own.
        check(&[(0..1, 2048), (2..3, 100), (4..5, 4096)], 4096 + 2 * 512, 4096);
    }

    #[test]
    fn requests_outside_the_plan_are_cached() {
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
        // The static buffer of 4096 bytes has a layer of its own, since it dies right before the next iteration's
        // buffer of 8192 bytes is born. The first dynamic buffer takes half of the 8192 idle bytes, and the second fits
        // nowhere.
        assert_eq!(report.peak_reserved(), 8192 + 4096 + 2 * 512 + (2 << 20));
    }
}
