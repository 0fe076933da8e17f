//! Tensors that get their place while a program runs: how many rows they have is counted first, and an arena finds room.
//!
//! In: requests that the compiler has planned, and counts as instructions make them. Out: places. Never: a heap allocation while
//! a program runs.

use std::ops::Range;

use gapless_alloc::arena::{Arena, ArenaPlan, ArenaReport, Overflow, RequestId, RunViolation, Served, check_run};

use super::args::Places;
use crate::compile::{Executable, Instruction};

/// The counts and places of the run under way, or of the last one.
#[derive(Debug, Default)]
pub(crate) struct Routed {
    arena: Option<Arena>,
    offsets: Vec<u64>,
    rows: Vec<usize>,
    /// What the last run was served, in order.
    served: Vec<Served>,
}

impl Routed {
    /// For the programs of an executable, run one at a time.
    pub fn new(plan: Option<&ArenaPlan>, counts: usize) -> Self {
        let requests = plan.map_or(0, |plan| plan.requests().len());
        Self {
            arena: plan.cloned().map(Arena::new),
            offsets: vec![0; requests],
            rows: vec![0; counts],
            served: Vec::with_capacity(requests),
        }
    }

    /// Forgets the last run.
    pub fn begin(&mut self) {
        self.arena.iter_mut().for_each(Arena::reset);
        self.served.clear();
    }

    /// Notes a count.
    pub fn count(&mut self, count: u32, rows: u32) {
        self.rows[count as usize] = rows as usize;
    }

    /// Finds room for what an instruction is the first to write.
    pub fn place(&mut self, instruction: &Instruction) -> Result<(), Overflow> {
        for asked in &*instruction.requests {
            let arena = self.arena.as_mut().expect("an executable with requests has an arena");
            let bytes = self.rows[asked.count as usize] as u64 * asked.row_bytes;
            let offset = arena.request(asked.request, bytes)?;
            self.offsets[asked.request.index()] = offset;
            self.served.push(Served { request: asked.request, offset, bytes });
        }
        Ok(())
    }

    /// Takes back what nobody reads after an instruction.
    pub fn release(&mut self, instruction: &Instruction) {
        for &request in &*instruction.releases {
            self.arena.as_mut().expect("an executable with requests has an arena").release(request);
        }
    }

    /// Where that was.
    pub fn released(&self, instruction: &Instruction) -> impl Iterator<Item = Range<u64>> {
        let served = |&request: &RequestId| self.served.iter().rev().find(move |served| served.request == request);
        instruction.releases.iter().filter_map(served).map(|served| served.offset..served.offset + served.bytes)
    }

    pub fn places(&self) -> Places<'_> {
        Places { offsets: &self.offsets, rows: &self.rows }
    }

    pub fn report(&self) -> Option<ArenaReport> {
        self.arena.as_ref().map(Arena::report)
    }

    /// Judges what the last run was served, together with the static plan.
    pub fn check(&self, executable: &Executable) -> Result<usize, Vec<RunViolation>> {
        let Some(plan) = &executable.routing else { return Ok(0) };
        let (problem, offsets) = (&executable.problem, &executable.solution.offsets);
        check_run(problem, offsets, plan.requests(), &self.served, plan.height())?;
        Ok(self.served.len())
    }
}
