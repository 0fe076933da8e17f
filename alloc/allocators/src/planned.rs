//! gapless in the comparison: the step is planned beforehand, and requests are served by looking up offsets.
//!
//! The allocator serves only the planned requests, in their order, from one arena of the plan's height. It takes this
//! arena from the device once. Any other request is refused.

use gapless_alloc::{BufferId, Problem, Solution, check};

use crate::{Allocator, Block, Device, Extent, OutOfMemory, Statistics, Stream};
use crate::{Request, Requests};

/// Serves a planned step out of one arena.
#[derive(Debug)]
pub struct Planned {
    device: Device,
    /// Offset and bytes of every request, in order: first the persistent buffers, then those of a step.
    offsets: Vec<(u64, u64)>,
    persistent: usize,
    next: usize,
    /// First byte of the arena, once it has been taken.
    arena: Option<u64>,
    height: u64,
    /// For each slot, true if it is in use.
    live: Vec<bool>,
    statistics: Statistics,
}

impl Planned {
    /// Prepares to serve the requests of `problem` with its plan. If the plan has no offsets, because the
    /// planner found none, every request is refused.
    ///
    /// # Panics
    /// Panics if the checker rejects the plan.
    pub fn with_plan(device: Device, problem: &Problem, requests: &Requests, plan: &Solution) -> Self {
        let found = plan.offsets.len() == problem.len();
        if found && let Err(violations) = check(problem, &plan.offsets, None) {
            panic!("a plan is used only if it passes the checker: {violations:?}");
        }
        let births = requests.step().iter().filter_map(|request| match request {
            Request::Allocate(id) => Some(*id),
            Request::Free(_) => None,
        });
        let order = requests.persistent().iter().copied().chain(births);
        let offset = |id: BufferId| plan.offsets.get(id.index()).copied().unwrap_or(u64::MAX);
        let offsets: Vec<_> = order.map(|id| (offset(id), problem.buffer(id).bytes)).collect();
        Self {
            device,
            live: vec![false; offsets.len()],
            offsets,
            persistent: requests.persistent().len(),
            next: 0,
            arena: None,
            height: if found { plan.height } else { u64::MAX },
            statistics: Statistics::default(),
        }
    }
}

impl Allocator for Planned {
    fn name(&self) -> &'static str {
        "gapless"
    }

    fn allocate(&mut self, bytes: u64, _stream: Stream) -> Result<Block, OutOfMemory> {
        let refusal = OutOfMemory::new(self.name(), bytes, &self.statistics, self.device.capacity());
        let arena = match self.arena {
            Some(arena) => arena,
            None => {
                let arena = self.device.malloc(self.height).ok_or(refusal.clone())?;
                self.statistics.reserved.rise(self.height);
                self.statistics.segments = 1;
                self.statistics.device_allocations = 1;
                *self.arena.insert(arena)
            }
        };
        if self.next == self.offsets.len() {
            // The step starts again. Persistent buffers stay allocated.
            self.next = self.persistent;
        }
        let slot = self.next;
        let planned = self.offsets.get(slot).filter(|planned| planned.1 == bytes && !self.live[slot]);
        let &(offset, _) = planned.ok_or(refusal)?;
        self.live[slot] = true;
        self.next += 1;
        self.statistics.allocated.rise(bytes);
        Ok(Block { address: arena + offset, bytes, slot: slot as u32 })
    }

    fn free(&mut self, block: Block) {
        let was_live = std::mem::replace(&mut self.live[block.slot as usize], false);
        assert!(was_live, "a block goes back to the allocator it came from");
        self.statistics.allocated.fall(block.bytes);
    }

    fn statistics(&self) -> Statistics {
        Statistics { driver: self.device.calls(), ..self.statistics }
    }

    fn extents(&self) -> Vec<Extent> {
        let Some(arena) = self.arena else { return Vec::new() };
        let mut live: Vec<(u64, u64)> =
            self.offsets.iter().zip(&self.live).filter(|(_, live)| **live).map(|(planned, _)| *planned).collect();
        live.sort_unstable();
        crate::allocator::with_holes(
            arena,
            self.height,
            live.into_iter().map(|(offset, bytes)| (arena + offset, bytes)),
        )
    }
}
