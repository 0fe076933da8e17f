//! Tensors that get their place while a program runs: how many rows they have is counted first, and an arena finds room.
//!
//! In: requests that the compiler has planned, and counts as instructions make them. Out: places. Never: a heap allocation while
//! a program runs.

use std::ops::Range;

use gapless_alloc::arena::{Arena, ArenaPlan, ArenaReport, Overflow, RequestId, RunViolation, Served, check_run};
use gapless_compile::Executable;
use gapless_compile::internal::{DynamicAlloc, DynamicFree, Instruction, When};
use gapless_kernels::cpu::args::Places;
use gapless_kernels::cpu::overflow_heap::OverflowHeap;

/// The counts and places of the run under way, or of the last one.
#[derive(Debug, Default)]
pub(crate) struct Routed {
    arena: Option<Arena>,
    offsets: Vec<u64>,
    rows: Vec<usize>,
    /// What the last run was served, in order.
    served: Vec<Served>,
    outside: OverflowHeap,
    /// By count: whether its rows were let go.
    evicted: Vec<bool>,
    /// If what the arena refuses is served outside: up to how many bytes, of both.
    limit: Option<u64>,
}

/// Why there is no room.
#[derive(Debug)]
pub(super) struct Refusal {
    pub overflow: Box<Overflow>,
    /// Bytes that it takes to serve it outside, if those are too many.
    pub needed: Option<u64>,
}

impl Routed {
    /// For the programs of an executable, run one at a time.
    pub fn new(plan: Option<&ArenaPlan>, counts: usize) -> Self {
        let requests = plan.map_or(0, |plan| plan.requests().len());
        Self {
            arena: plan.cloned().map(Arena::new),
            offsets: vec![0; requests],
            rows: vec![0; counts],
            evicted: vec![false; counts],
            served: Vec::with_capacity(requests),
            ..Self::default()
        }
    }

    /// Lets what the arena refuses be served outside, as long as both take no more than `limit`.
    pub fn serve_outside(&mut self, limit: u64) {
        self.limit = Some(limit);
    }

    /// Forgets the last run.
    pub fn begin(&mut self, arena_bytes: u64) {
        self.arena.iter_mut().for_each(Arena::reset);
        self.served.clear();
        self.evicted.fill(false);
        self.outside.begin(arena_bytes);
    }

    /// Notes a count.
    pub fn count(&mut self, count: u32, rows: u32) {
        self.rows[count as usize] = rows as usize;
    }

    /// Whether an instruction is left out.
    pub fn is_left_out(&self, instruction: &Instruction) -> bool {
        instruction.predicate.is_some_and(|count| !self.evicted[count as usize])
    }

    /// Looks for room for all rows that an instruction offers to keep. Whether there is.
    pub fn offer(&mut self, instruction: &Instruction) -> bool {
        let arena = self.arena.as_mut().expect("an executable with requests has an arena");
        for (index, asked) in instruction.requests.iter().enumerate() {
            let bytes = self.rows[asked.count as usize] as u64 * asked.row_bytes;
            let Some(offset) = arena.offer(asked.request, bytes) else {
                instruction.requests[..index].iter().for_each(|asked| arena.release(asked.request));
                return false;
            };
            self.offsets[asked.place.index()] = offset;
        }
        true
    }

    /// Keeps the rows that were offered room, or lets them go: then `had_room` says whether there was any.
    pub fn settle(&mut self, instruction: &Instruction, evicts: bool, had_room: bool) {
        let arena = self.arena.as_mut().expect("an executable with requests has an arena");
        for &DynamicAlloc { request, place, count, row_bytes, .. } in &*instruction.requests {
            self.evicted[count as usize] = evicts;
            match evicts {
                true if had_room => arena.release(request),
                true => {}
                false => {
                    let (offset, bytes) = (self.offsets[place.index()], self.rows[count as usize] as u64 * row_bytes);
                    self.served.push(Served { request, offset, bytes });
                }
            }
        }
        if evicts {
            arena.note_evicted();
        }
    }

    fn is_made(&self, when: When, count: u32) -> bool {
        match when {
            When::Always => true,
            When::Kept => !self.evicted[count as usize],
            When::Evicted => self.evicted[count as usize],
        }
    }

    /// Finds room for what an instruction is the first to write.
    pub fn place(&mut self, instruction: &Instruction) -> Result<(), Refusal> {
        for &DynamicAlloc { request, place, count, row_bytes, when } in &*instruction.requests {
            // What is kept was placed when it was offered.
            if when == When::Kept || !self.is_made(when, count) {
                continue;
            }
            let arena = self.arena.as_mut().expect("an executable with requests has an arena");
            let bytes = self.rows[count as usize] as u64 * row_bytes;
            let offset = match arena.request(request, bytes) {
                Ok(offset) => offset,
                Err(overflow) => self.place_outside(request, bytes, overflow)?,
            };
            self.offsets[place.index()] = offset;
            self.served.push(Served { request, offset, bytes });
        }
        Ok(())
    }

    fn place_outside(&mut self, request: RequestId, bytes: u64, overflow: Overflow) -> Result<u64, Refusal> {
        let arena = self.arena.as_mut().expect("it has refused");
        let needed = arena.plan().height().saturating_add(self.outside.live()).saturating_add(bytes);
        let refusal = |needed| Refusal { overflow: Box::new(overflow), needed };
        match self.limit {
            None => Err(refusal(None)),
            Some(limit) if needed > limit => Err(refusal(Some(needed))),
            Some(_) => match self.outside.serve(request.0, bytes) {
                Some(offset) => {
                    arena.note_outside(bytes, self.outside.live());
                    Ok(offset)
                }
                None => Err(refusal(Some(needed))),
            },
        }
    }

    /// Takes back what nobody reads after an instruction.
    pub fn release(&mut self, instruction: &Instruction) {
        for released in &*instruction.releases {
            let request = released.request;
            if self.is_made(released.when, released.count) && !self.outside.release(request.0) {
                self.arena.as_mut().expect("an executable with requests has an arena").release(request);
            }
        }
    }

    /// Where in the arena that was.
    pub fn released(&self, instruction: &Instruction) -> impl Iterator<Item = Range<u64>> {
        let made = instruction.releases.iter().filter(|released| self.is_made(released.when, released.count));
        let served =
            |released: &DynamicFree| self.served.iter().rev().find(|served| served.request == released.request);
        let ranges = made.filter_map(served).map(|served| served.offset..served.offset + served.bytes);
        ranges.filter(|range| range.end <= self.outside.range().start)
    }

    /// The factor of balanced sizes that would have served the last run, if the arena has not.
    pub fn factor_needed(&self) -> Option<f64> {
        let arena = self.arena.as_ref()?;
        (!self.outside.range().is_empty() && arena.is_idle()).then(|| arena.factor())
    }

    /// Goes on with a larger arena.
    pub fn grow(&mut self, plan: ArenaPlan) {
        self.arena.iter_mut().for_each(|arena| arena.grow(plan.clone()));
    }

    pub fn places(&self) -> Places<'_> {
        Places { offsets: &self.offsets, rows: &self.rows, outside: Some(&self.outside) }
    }

    pub fn report(&self) -> Option<ArenaReport> {
        self.arena.as_ref().map(Arena::report)
    }

    /// Judges what the last run was served, together with the static plan.
    pub fn check(&self, executable: &Executable) -> Result<usize, Vec<RunViolation>> {
        let Some(plan) = &executable.routing else { return Ok(0) };
        let (problem, offsets) = (&executable.problem, &executable.solution.offsets);
        let limit = plan.height().max(self.outside.range().end);
        check_run(problem, offsets, plan.requests(), &self.served, limit)?;
        Ok(self.served.len())
    }
}
