//! Dynamic buffers: tensors whose number of rows is only known while a program runs, such as the tokens routed to an
//! expert. An instruction counts the rows. An [`Arena`] then finds room for them.
//!
//! In: the requests that the compiler has planned, and the row counts that instructions compute. Out: the buffers'
//! offsets. Never: a heap allocation while a program runs, or access to the arena's bytes, which only the backend
//! accesses.

use std::ops::Range;

use gapless_alloc::arena::{Arena, ArenaReport, Overflow, RequestId, Reserve, Served, check_run};
use gapless_compile::internal::{CompiledProgram, DynamicAlloc, DynamicFree, Instruction, RunCondition};
use gapless_compile::{Executable, InstrKind};
use gapless_kernels::cpu::args::{Address, Places};
use gapless_kernels::cpu::overflow_heap::OverflowHeap;

use crate::error::{Error, Result};

/// Row counts of dynamic buffers, and the offsets where they were placed, in the current run or the last one.
#[derive(Debug, Default)]
pub(crate) struct DynamicBuffers {
    arena: Option<Arena>,
    /// The offset of each request's buffer in bytes, indexed by request.
    request_offsets: Vec<u64>,
    /// The row count with which each request was placed, indexed by request. If the rows are counted again later, this
    /// entry does not change.
    rows: Vec<usize>,
    /// The latest row count, indexed by count (`DynamicAlloc::count`).
    row_counts: Vec<u32>,
    /// The requests that were placed in the last run, in order.
    assigned: Vec<Served>,
    overflow_heap: OverflowHeap,
    /// For each row count, true if the rows of the count were evicted in this run.
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
    /// The bytes that the arena and the buffers outside of it would take together, which exceed the limit or cannot be
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

impl DynamicBuffers {
    /// Creates the state for the programs of an executable, which are run one at a time.
    pub fn new(executable: &Executable, overflow_heap: OverflowHeap) -> Self {
        let plan = executable.routing();
        let requests = plan.map_or(0, |plan| plan.requests().len());
        let counts = executable.programs().iter().map(|program| program.row_counts).max().unwrap_or(0);
        Self {
            arena: plan.cloned().map(Arena::new),
            overflow_heap,
            request_offsets: vec![0; requests],
            rows: vec![0; requests],
            row_counts: vec![0; counts],
            evicted: vec![false; counts],
            assigned: Vec::with_capacity(requests),
            ..Self::default()
        }
    }

    /// Allows requests that the arena refuses to be placed outside of it, as long as the arena and all buffers
    /// outside of it take at most `limit` bytes together.
    pub fn allow_overflow_heap(&mut self, limit: u64) {
        self.limit = Some(limit);
    }

    /// Starts a run: forgets the places and evictions of the last one.
    pub fn begin(&mut self, arena_bytes: u64) {
        self.arena.iter_mut().for_each(Arena::reset);
        self.assigned.clear();
        self.rows.fill(0);
        self.evicted.fill(false);
        self.overflow_heap.begin(arena_bytes);
    }

    /// Records a row count.
    pub fn count(&mut self, count: u32, rows: u32) {
        self.row_counts[count as usize] = rows;
    }

    /// Returns the size of the request's buffer for the latest row count. Saturates, so an impossible size exceeds
    /// every request's bound.
    fn bytes(&self, asked: &DynamicAlloc) -> u64 {
        u64::from(self.row_counts[asked.count as usize]).saturating_mul(asked.row_bytes)
    }

    /// Records where the request's buffer was placed, and with which row count.
    fn record_place(&mut self, asked: &DynamicAlloc, offset: u64) {
        let place = asked.slot.index();
        (self.request_offsets[place], self.rows[place]) = (offset, self.row_counts[asked.count as usize] as usize);
    }

    /// True if the instruction is skipped in this run. The predicate of an instruction names a row count. An
    /// instruction with a predicate only runs if the rows of that count were evicted.
    pub fn is_left_out(&self, instruction: &Instruction) -> bool {
        instruction.predicate.is_some_and(|count| !self.evicted[count as usize])
    }

    /// Reserves room for all rows that a vote instruction proposes to keep. Returns this rank's vote: 0 if there is
    /// room for all of these rows, or 1 if not. If the vote is 1, nothing stays reserved.
    pub fn try_reserve(&mut self, instruction: &Instruction) -> f32 {
        for (index, asked) in instruction.requests.iter().enumerate() {
            let bytes = self.bytes(asked);
            let arena = self.arena.as_mut().expect("an executable with requests has an arena");
            let Some(offset) = arena.try_request(asked.request, bytes) else {
                instruction.requests[..index].iter().for_each(|asked| arena.release(asked.request));
                self.had_room = false;
                return 1.0;
            };
            self.record_place(asked, offset);
        }
        self.had_room = true;
        0.0
    }

    /// Applies the result of a vote: the rows are kept if all ranks have room for them, and evicted if not. `without`
    /// is the sum of the ranks' votes, so it is 0 if all ranks have room.
    pub fn apply_vote(&mut self, instruction: &Instruction, without: f32) {
        // If this rank has no room, it evicts the rows even if the sum is 0.
        let (evicts, had_room) = (without != 0.0 || !self.had_room, self.had_room);
        let arena = self.arena.as_mut().expect("an executable with requests has an arena");
        for &DynamicAlloc { request, slot, count, row_bytes, .. } in &*instruction.requests {
            self.evicted[count as usize] = evicts;
            match evicts {
                true if had_room => arena.release(request),
                true => {}
                false => {
                    let (offset, rows) = (self.request_offsets[slot.index()], self.rows[slot.index()]);
                    self.assigned.push(Served { request, offset, bytes: rows as u64 * row_bytes });
                }
            }
        }
        if evicts {
            arena.record_eviction();
        }
    }

    fn is_active(&self, when: RunCondition, count: u32) -> bool {
        match when {
            RunCondition::Always => true,
            RunCondition::Kept => !self.evicted[count as usize],
            RunCondition::Evicted => self.evicted[count as usize],
        }
    }

    /// Places the dynamic buffers that an instruction is the first to write, in the arena or outside of it.
    pub fn place(&mut self, instruction: &Instruction) -> Result<(), Refusal> {
        for asked in &*instruction.requests {
            let &DynamicAlloc { request, count, condition, .. } = asked;
            // The vote has already placed rows that are kept.
            if condition == RunCondition::Kept || !self.is_active(condition, count) {
                continue;
            }
            let bytes = self.bytes(asked);
            let arena = self.arena.as_mut().expect("an executable with requests has an arena");
            let offset = match arena.request(request, bytes) {
                Ok(offset) => offset,
                Err(overflow) => self.place_in_overflow_heap(request, bytes, overflow)?,
            };
            self.record_place(asked, offset);
            self.assigned.push(Served { request, offset, bytes });
        }
        Ok(())
    }

    fn place_in_overflow_heap(&mut self, request: RequestId, bytes: u64, overflow: Overflow) -> Result<u64, Refusal> {
        let arena = self.arena.as_mut().expect("it has refused");
        let needed = arena.plan().height().saturating_add(self.overflow_heap.live()).saturating_add(bytes);
        let is_beyond_bound = bytes > overflow.most;
        let refusal = |needed| Refusal { overflow: Box::new(overflow), needed };
        match self.limit {
            // The rows exceed the request's own upper bound, so more memory would not help.
            _ if is_beyond_bound => Err(refusal(None)),
            None => Err(refusal(None)),
            Some(limit) if needed > limit => Err(refusal(Some(needed))),
            Some(_) => match self.overflow_heap.serve(request.0, bytes) {
                Some(offset) => {
                    arena.record_outside(bytes, self.overflow_heap.live());
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
            if self.is_active(released.condition, released.count) && !self.overflow_heap.release(request.0) {
                self.arena.as_mut().expect("an executable with requests has an arena").release(request);
            }
        }
    }

    /// Returns the arena ranges of the buffers that [`Self::release`] released after the instruction.
    pub fn released(&self, instruction: &Instruction) -> impl Iterator<Item = Range<u64>> {
        let made = instruction.releases.iter().filter(|released| self.is_active(released.condition, released.count));
        let served =
            |released: &DynamicFree| self.assigned.iter().rev().find(|served| served.request == released.request);
        let ranges = made.filter_map(served).map(|served| served.offset..served.offset + served.bytes);
        ranges.filter(|range| range.end <= self.overflow_heap.range().start)
    }

    /// Returns the end of the addresses outside of the arena, or `None` if the run used no such addresses.
    #[cfg(feature = "cuda")]
    pub fn outside_end(&self) -> Option<u64> {
        let range = self.overflow_heap.range();
        (!range.is_empty()).then_some(range.end)
    }

    /// Returns the factor of [`Reserve::Balanced`] with which the arena would have held all buffers of the last run.
    /// Returns `None` if the arena held all of them.
    pub fn factor_needed(&self) -> Option<f64> {
        let arena = self.arena.as_ref()?;
        (!self.overflow_heap.range().is_empty() && arena.is_idle()).then(|| arena.factor())
    }

    /// Enlarges the arena to the size for 1.25 × `factor`, if this size is within `limit` and `enlarge` accepts it. If
    /// not, enlarges the arena to the size for `factor` under the same conditions. If neither size is possible, nothing
    /// changes.
    pub fn grow(
        &mut self,
        executable: &mut Executable,
        factor: f64,
        limit: u64,
        mut enlarge: impl FnMut(u64) -> Result<bool>,
    ) -> Result<()> {
        for factor in [1.25 * factor, factor] {
            let before = executable.arena_bytes();
            let has_grown = executable.replace_reserve(Reserve::Balanced { factor }, |plan| {
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
        Places { offsets: &self.request_offsets, rows: &self.rows, outside: Some(&self.overflow_heap) }
    }

    pub fn report(&self) -> Option<ArenaReport> {
        self.arena.as_ref().map(Arena::report)
    }

    /// Checks that the buffers placed in the last run overlap neither each other nor buffers of the static plan.
    /// Returns the number of placed buffers.
    pub fn check(&self, executable: &Executable) -> Result<usize> {
        let Some(plan) = executable.routing() else { return Ok(0) };
        let (problem, offsets) = (executable.problem(), &executable.solution().offsets);
        let limit = plan.height().max(self.overflow_heap.range().end);
        check_run(problem, offsets, plan.requests(), &self.assigned, limit).map_err(|violations| Error::BadRun {
            what: violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        })?;
        Ok(self.assigned.len())
    }
}

/// Number of preceding instructions to search: enough for a router and the layers before it.
const MAX_SEARCHED: usize = 96;

/// Called when `program.instructions[index]` finds no room, which non-finite values can cause: NaN scores send all
/// tokens to the same experts. Of the preceding instructions of the same micro-batch, returns the earliest with a
/// planned output that is still in memory and not finite. Returns `None` if there is no such instruction.
pub(crate) fn find_nonfinite_origin(
    program: &CompiledProgram,
    index: usize,
    is_finite: impl Fn(&Address) -> bool,
) -> Option<usize> {
    let mut gone: Vec<Range<u64>> = Vec::new();
    let mut culprit = None;
    let micro_batch = program.instructions[index].micro_batch;
    for (index, instruction) in program.instructions[..index].iter().enumerate().rev().take(MAX_SEARCHED) {
        gone.extend(instruction.dead_after.iter().cloned());
        let range =
            |output: &Address| output.offset..output.offset + (output.span * output.dtype.size_in_bytes()) as u64;
        let planned = || instruction.outputs.iter().filter(|output| output.dynamic.is_none());
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
