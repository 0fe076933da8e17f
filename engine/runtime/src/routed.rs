//! Dynamic buffers: tensors whose number of rows is only known while a program runs, such as the tokens routed to an
//! expert. An instruction counts the rows. An [`Arena`] then finds room for them.
//!
//! In: the requests that the compiler has planned, and the row counts that instructions compute. Out: the buffers'
//! offsets. Never: a heap allocation while a program runs, or access to the arena's bytes, which only the backend
//! accesses.

use std::ops::Range;

use gapless_alloc::arena::{Arena, ArenaReport, Overflow, RequestId, Reserve, Served, check_run};
use gapless_compile::internal::{CompiledProgram, DynamicAlloc, DynamicFree, Instruction, When};
use gapless_compile::{Executable, InstrKind};
use gapless_kernels::cpu::args::{Address, Places};
use gapless_kernels::cpu::overflow_heap::OverflowHeap;

use crate::error::{Error, Result};

/// Row counts of dynamic buffers, and the offsets where they were placed, in the current run or the last one.
#[derive(Debug, Default)]
pub(crate) struct Routed {
    arena: Option<Arena>,
    /// The offset of each request's buffer in bytes, indexed by request.
    offsets: Vec<u64>,
    /// The row count with which each request was placed, indexed by request. Counting again later does not change it.
    rows: Vec<usize>,
    /// The latest row count, indexed by count (`DynamicAlloc::count`).
    counted: Vec<u32>,
    /// The requests that were placed in the last run, in order.
    served: Vec<Served>,
    outside: OverflowHeap,
    /// For each count, whether its rows were evicted in this run.
    evicted: Vec<bool>,
    /// True if this rank had room for the rows of the last vote.
    had_room: bool,
    /// The most bytes that the arena and the buffers outside of it may take together. `None` if all buffers must lie
    /// in the arena.
    limit: Option<u64>,
}

/// The reason why a dynamic buffer found no room.
#[derive(Debug)]
pub(crate) struct Refusal {
    overflow: Box<Overflow>,
    /// The bytes that the arena and the buffers outside of it would take, if this exceeds the limit or cannot be
    /// provided. `None` if the buffer may not be placed outside of the arena at all.
    needed: Option<u64>,
}

impl Refusal {
    /// Turns the refusal into an error that names the instruction.
    pub fn error(self, instruction: String) -> Error {
        match self {
            Self { overflow, needed: None } => Error::Routing { instruction, source: overflow },
            Self { overflow, needed: Some(needed) } => Error::Growth { instruction, needed, source: overflow },
        }
    }
}

impl Routed {
    /// Creates the state for the programs of an executable, which are run one at a time.
    pub fn new(executable: &Executable, outside: OverflowHeap) -> Self {
        let plan = executable.routing();
        let requests = plan.map_or(0, |plan| plan.requests().len());
        let counts = executable.programs().iter().map(|program| program.counts).max().unwrap_or(0);
        Self {
            arena: plan.cloned().map(Arena::new),
            outside,
            offsets: vec![0; requests],
            rows: vec![0; requests],
            counted: vec![0; counts],
            evicted: vec![false; counts],
            served: Vec::with_capacity(requests),
            ..Self::default()
        }
    }

    /// Allows requests that the arena refuses to be placed outside of it, as long as the arena and all buffers
    /// outside of it take at most `limit` bytes together.
    pub fn serve_outside(&mut self, limit: u64) {
        self.limit = Some(limit);
    }

    /// Starts a run: forgets the places and evictions of the last one.
    pub fn begin(&mut self, arena_bytes: u64) {
        self.arena.iter_mut().for_each(Arena::reset);
        self.served.clear();
        self.rows.fill(0);
        self.evicted.fill(false);
        self.outside.begin(arena_bytes);
    }

    /// Records a row count.
    pub fn count(&mut self, count: u32, rows: u32) {
        self.counted[count as usize] = rows;
    }

    /// Returns the size of the request's buffer for the latest row count. Saturates, so an impossible size exceeds
    /// every request's bound.
    fn bytes(&self, asked: &DynamicAlloc) -> u64 {
        u64::from(self.counted[asked.count as usize]).saturating_mul(asked.row_bytes)
    }

    /// Records where the request's buffer was placed, and with which row count.
    fn found(&mut self, asked: &DynamicAlloc, offset: u64) {
        let place = asked.place.index();
        (self.offsets[place], self.rows[place]) = (offset, self.counted[asked.count as usize] as usize);
    }

    /// True if the instruction is skipped in this run. An instruction with a predicate only runs if the rows of the
    /// count that the predicate names were evicted.
    pub fn is_left_out(&self, instruction: &Instruction) -> bool {
        instruction.predicate.is_some_and(|count| !self.evicted[count as usize])
    }

    /// Reserves room for all rows that a vote instruction proposes to keep. Returns this rank's vote: 0 if there is
    /// room for all of them, or 1 if not. With vote 1, nothing stays reserved.
    pub fn offer(&mut self, instruction: &Instruction) -> f32 {
        for (index, asked) in instruction.requests.iter().enumerate() {
            let bytes = self.bytes(asked);
            let arena = self.arena.as_mut().expect("an executable with requests has an arena");
            let Some(offset) = arena.offer(asked.request, bytes) else {
                instruction.requests[..index].iter().for_each(|asked| arena.release(asked.request));
                self.had_room = false;
                return 1.0;
            };
            self.found(asked, offset);
        }
        self.had_room = true;
        0.0
    }

    /// Applies the result of a vote: the rows are kept if all ranks have room for them, and evicted if not. `without`
    /// is the sum of the ranks' votes, so it is 0 if all ranks have room.
    pub fn settle(&mut self, instruction: &Instruction, without: f32) {
        // If this rank has no room, it evicts the rows even if the sum is 0.
        let (evicts, had_room) = (without != 0.0 || !self.had_room, self.had_room);
        let arena = self.arena.as_mut().expect("an executable with requests has an arena");
        for &DynamicAlloc { request, place, count, row_bytes, .. } in &*instruction.requests {
            self.evicted[count as usize] = evicts;
            match evicts {
                true if had_room => arena.release(request),
                true => {}
                false => {
                    let (offset, rows) = (self.offsets[place.index()], self.rows[place.index()]);
                    self.served.push(Served { request, offset, bytes: rows as u64 * row_bytes });
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

    /// Places the dynamic buffers that an instruction is the first to write, in the arena or outside of it.
    pub fn place(&mut self, instruction: &Instruction) -> Result<(), Refusal> {
        for asked in &*instruction.requests {
            let &DynamicAlloc { request, count, when, .. } = asked;
            // The vote has already placed rows that are kept.
            if when == When::Kept || !self.is_made(when, count) {
                continue;
            }
            let bytes = self.bytes(asked);
            let arena = self.arena.as_mut().expect("an executable with requests has an arena");
            let offset = match arena.request(request, bytes) {
                Ok(offset) => offset,
                Err(overflow) => self.place_outside(request, bytes, overflow)?,
            };
            self.found(asked, offset);
            self.served.push(Served { request, offset, bytes });
        }
        Ok(())
    }

    fn place_outside(&mut self, request: RequestId, bytes: u64, overflow: Overflow) -> Result<u64, Refusal> {
        let arena = self.arena.as_mut().expect("it has refused");
        let needed = arena.plan().height().saturating_add(self.outside.live()).saturating_add(bytes);
        let is_beyond_bound = bytes > overflow.most;
        let refusal = |needed| Refusal { overflow: Box::new(overflow), needed };
        match self.limit {
            // The rows exceed the request's own upper bound, so more memory would not help.
            _ if is_beyond_bound => Err(refusal(None)),
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

    /// Releases the dynamic buffers that are not read after an instruction.
    pub fn release(&mut self, instruction: &Instruction) {
        for released in &*instruction.releases {
            let request = released.request;
            if self.is_made(released.when, released.count) && !self.outside.release(request.0) {
                self.arena.as_mut().expect("an executable with requests has an arena").release(request);
            }
        }
    }

    /// Returns the arena ranges of the buffers that [`Self::release`] released after the instruction.
    pub fn released(&self, instruction: &Instruction) -> impl Iterator<Item = Range<u64>> {
        let made = instruction.releases.iter().filter(|released| self.is_made(released.when, released.count));
        let served =
            |released: &DynamicFree| self.served.iter().rev().find(|served| served.request == released.request);
        let ranges = made.filter_map(served).map(|served| served.offset..served.offset + served.bytes);
        ranges.filter(|range| range.end <= self.outside.range().start)
    }

    /// Returns the end of the addresses outside of the arena, or `None` if the run used no such addresses.
    #[cfg(feature = "cuda")]
    pub fn outside_end(&self) -> Option<u64> {
        let range = self.outside.range();
        (!range.is_empty()).then_some(range.end)
    }

    /// Returns the factor of [`Reserve::Balanced`] with which the arena would have held all buffers of the last run.
    /// Returns `None` if the arena did hold them all.
    pub fn factor_needed(&self) -> Option<f64> {
        let arena = self.arena.as_ref()?;
        (!self.outside.range().is_empty() && arena.is_idle()).then(|| arena.factor())
    }

    /// Enlarges the arena: to the size for 1.25 × `factor` if that is within `limit` and `enlarge` accepts it, or
    /// else to the size for `factor`. If neither is possible, nothing changes.
    pub fn grow(
        &mut self,
        executable: &mut Executable,
        factor: f64,
        limit: u64,
        mut enlarge: impl FnMut(u64) -> Result<bool>,
    ) -> Result<()> {
        for factor in [1.25 * factor, factor] {
            let before = executable.arena_bytes();
            let has_grown = executable.reserve_anew(Reserve::Balanced { factor }, |plan| {
                let bytes = plan.height();
                if bytes > limit || bytes <= before || !enlarge(bytes)? {
                    return Ok::<_, Error>(false);
                }
                tracing::info!(factor, bytes, "the arena has grown");
                self.arena.iter_mut().for_each(|arena| arena.grow(plan.clone()));
                Ok(true)
            })?;
            if has_grown {
                break;
            }
        }
        Ok(())
    }

    pub fn places(&self) -> Places<'_> {
        Places { offsets: &self.offsets, rows: &self.rows, outside: Some(&self.outside) }
    }

    pub fn report(&self) -> Option<ArenaReport> {
        self.arena.as_ref().map(Arena::report)
    }

    /// Checks the places of the last run for overlaps, with each other and with the static plan. Returns how many
    /// buffers were placed.
    pub fn check(&self, executable: &Executable) -> Result<usize> {
        let Some(plan) = executable.routing() else { return Ok(0) };
        let (problem, offsets) = (executable.problem(), &executable.solution().offsets);
        let limit = plan.height().max(self.outside.range().end);
        check_run(problem, offsets, plan.requests(), &self.served, limit).map_err(|violations| Error::BadRun {
            what: violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        })?;
        Ok(self.served.len())
    }
}

/// Number of preceding instructions to search: enough for a router and the layers before it.
const LOOKED_AT: usize = 96;

/// Called when `program.instructions[index]` finds no room, which non-finite values can cause: NaN scores send all
/// tokens to the same experts. Of the preceding instructions of the same micro-batch, returns the earliest with a
/// planned output that is still in memory and not finite. Returns `None` if there is no such instruction.
pub(crate) fn not_finite_before(
    program: &CompiledProgram,
    index: usize,
    is_finite: impl Fn(&Address) -> bool,
) -> Option<usize> {
    let mut gone: Vec<Range<u64>> = Vec::new();
    let mut culprit = None;
    let micro_batch = program.instructions[index].micro_batch;
    for (index, instruction) in program.instructions[..index].iter().enumerate().rev().take(LOOKED_AT) {
        gone.extend(instruction.dead_after.iter().cloned());
        let range =
            |output: &Address| output.offset..output.offset + (output.span * output.dtype.size_in_bytes()) as u64;
        let planned = || instruction.outputs.iter().filter(|output| output.counted.is_none());
        let is_there = |output: &&Address| {
            let range = range(output);
            gone.iter().all(|gone| gone.end <= range.start || range.end <= gone.start)
        };
        // An instruction with a predicate may have been skipped.
        let is_compute = matches!(instruction.kind, InstrKind::Compute(_)) && instruction.predicate.is_none();
        let is_own = instruction.micro_batch == micro_batch;
        if is_compute && is_own && !planned().filter(is_there).all(&is_finite) {
            culprit = Some(index);
        }
        gone.extend(planned().map(range));
        gone.extend(instruction.workspace.iter().map(|piece| piece.offset..piece.offset + piece.bytes));
    }
    culprit
}
