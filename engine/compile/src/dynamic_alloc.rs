//! Requests to the online arena, for buffers with dynamic rows, whose size is known only while programs run.
//!
//! - In: programs, and the ticks of their buffers.
//! - Out: the requests in the order of their first tick. For each request, the instructions at which the request starts
//!   and ends.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use gapless_alloc::arena::{ArenaOptions, ArenaPlan, Need, Request, RequestId, Reserve};
use gapless_alloc::{Problem, Solution};
use gapless_kernels::cpu::args::DynamicAddress;

use crate::error::{Error, Result};
use crate::executable::Executable;
use crate::instruction::{DynamicAlloc, DynamicFree, RunCondition};
use crate::lifetimes::{ALIGNMENT, tick_of};
use crate::program::{BufferId, DynamicRows, Instr, InstrKind, Operand, Program};
use crate::row_sizes::{DynamicBuffer, SizedByRows, sized_by_rows};

impl Executable {
    /// Plans the arena of dynamic rows again, with another reserve. Keeps the new plan if `accept` returns true.
    /// Returns true if the new plan is kept. Returns false if `accept` refuses the plan, or if there are no dynamic
    /// rows.
    ///
    /// # Errors
    /// Returns an error if the reserve exceeds the address space, or if its factor is not a valid number. Returns the
    /// errors of `accept`.
    pub fn replace_reserve<E: From<Error>>(
        &mut self,
        reserve: Reserve,
        accept: impl FnOnce(&ArenaPlan) -> Result<bool, E>,
    ) -> Result<bool, E> {
        let Some(plan) = &self.dynamic_arena else { return Ok(false) };
        let anew = self.arena_with(plan, reserve)?;
        let is_accepted = accept(&anew)?;
        if is_accepted {
            self.dynamic_arena = Some(anew);
        }
        Ok(is_accepted)
    }

    /// Plans the requests of an arena of dynamic rows with another reserve.
    pub(super) fn arena_with(&self, plan: &ArenaPlan, reserve: Reserve) -> Result<ArenaPlan> {
        let requests = plan.requests().to_vec();
        Ok(ArenaPlan::new(&self.problem, &self.solution.offsets, requests, &options(reserve))?)
    }
}

fn options(reserve: Reserve) -> ArenaOptions {
    // This limit allows about a tenth of a second. Planning ends earlier if the reserve is proven minimal.
    ArenaOptions { reserve, work: 2_000_000, ..ArenaOptions::default() }
}

/// The requests of all programs.
#[derive(Debug)]
pub(super) struct DynamicBuffers {
    requests: Vec<Request>,
    /// By program and buffer: the request whose id instructions use to look up the buffer's offset.
    request_of: HashMap<(usize, BufferId), RequestId>,
    /// By program and evictable buffer: the two requests that are made if the rows are evicted, one for the forward and
    /// one for the backward.
    evicted_halves: HashMap<(usize, BufferId), [RequestId; 2]>,
    /// By program: the evictable buffers.
    evictable: Vec<HashMap<BufferId, EvictableUses>>,
}

/// The instructions that use an evictable buffer.
#[derive(Debug, Clone, Copy)]
struct EvictableUses {
    /// The instruction that votes on whether the buffer's rows are evicted.
    vote: usize,
    /// The first and the last instruction in the forward.
    forward: [usize; 2],
    /// The first and the last instruction in the backward. The first one is part of the recomputation of evicted rows.
    backward: [usize; 2],
}

impl DynamicBuffers {
    /// Collects the requests of all programs. `problem_index[program][buffer]` is a buffer's index in `problem`, and
    /// `spans` has the ticks of each program.
    pub fn new<P: std::borrow::Borrow<Program>>(
        programs: &[P],
        problem_index: &[Vec<usize>],
        spans: &[Range<u64>],
        problem: &Problem,
    ) -> Self {
        let evictable: Vec<_> = programs.iter().map(|program| evictable(program.borrow())).collect();
        let need = if evictable.iter().all(HashMap::is_empty) { Need::Usual } else { Need::Certain };
        let mut keyed_requests = Vec::new();
        for (program_index, (program, indices)) in programs.iter().zip(problem_index).enumerate() {
            for (id, (buffer, &index)) in program.borrow().buffers.iter().zip(indices).enumerate() {
                let Some(DynamicRows { row_bytes, balanced, .. }) = buffer.dynamic_rows else { continue };
                let request = |ticks, need| {
                    Request::new(ticks, balanced.min(buffer.bytes), buffer.bytes)
                        .aligned(ALIGNMENT)
                        .in_rows(row_bytes)
                        .needed(need)
                        .labelled(buffer.label.clone())
                };
                let (key, ticks) = ((program_index, BufferId(id as u32)), problem.buffers()[index].lifetime.clone());
                let Some(EvictableUses { vote, forward, backward }) = evictable[program_index].get(&key.1) else {
                    keyed_requests.push((request(ticks, need), (key, None)));
                    continue;
                };
                let written = |instr: usize| tick_of(spans[program_index].start, instr) + 1;
                keyed_requests.push((request(written(*vote)..ticks.end, Need::Optional), (key, None)));
                for (part, [first, last]) in [*forward, *backward].into_iter().enumerate() {
                    keyed_requests.push((request(written(first)..written(last) + 1, Need::Certain), (key, Some(part))));
                }
            }
        }
        keyed_requests.sort_by_key(|(request, _)| request.ticks.start);
        let (mut request_of, mut evicted_halves) = (HashMap::new(), HashMap::new());
        for (id, (_, (key, part))) in keyed_requests.iter().enumerate() {
            let id = RequestId(id as u32);
            match part {
                None => _ = request_of.insert(*key, id),
                Some(part) => evicted_halves.entry(*key).or_insert([id; 2])[*part] = id,
            }
        }
        Self {
            requests: keyed_requests.into_iter().map(|(request, _)| request).collect(),
            request_of,
            evicted_halves,
            evictable,
        }
    }

    /// True if no program has dynamic rows.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Plans the arena of dynamic rows on top of a static plan. Returns `None` if there are no requests.
    pub fn plan(&self, problem: &Problem, solution: &Solution, reserve: Reserve) -> Result<Option<ArenaPlan>> {
        if self.is_empty() {
            return Ok(None);
        }
        Ok(Some(ArenaPlan::new(problem, &solution.offsets, self.requests.clone(), &options(reserve))?))
    }

    /// Returns the dynamic buffers of a program. `indices` has the index of each buffer in the problem.
    pub fn buffers(&self, program_index: usize, program: &Program, indices: &[usize]) -> Vec<DynamicBuffer> {
        let buffer = |(id, size): (BufferId, SizedByRows)| DynamicBuffer {
            index: indices[id.index()],
            request: self.request_of[&(program_index, id)],
            size,
        };
        sized_by_rows(program).into_iter().map(buffer).collect()
    }

    /// Returns the run-time address of an operand with dynamic rows, and `None` for any other operand.
    pub fn address(&self, program_index: usize, program: &Program, operand: &Operand) -> Option<DynamicAddress> {
        let dynamic_rows = program.buffers[operand.buffer.index()].dynamic_rows?;
        let request = self.request_of[&(program_index, operand.buffer)].0;
        let row = (dynamic_rows.row_bytes / operand.dtype.size_in_bytes() as u64) as usize;
        Some(DynamicAddress { request, row })
    }

    /// Returns, for each instruction of a program, the requests that start at it and the requests that end after it.
    pub fn by_instruction(
        &self,
        program_index: usize,
        program: &Program,
    ) -> Vec<(Vec<DynamicAlloc>, Vec<DynamicFree>)> {
        let mut by_instruction = vec![(Vec::new(), Vec::new()); program.instrs.len()];
        if self.is_empty() {
            return by_instruction;
        }
        let dynamic_rows = |buffer: BufferId| program.buffers[buffer.index()].dynamic_rows;
        let mut add = |buffer: BufferId, request: RequestId, [first, last]: [usize; 2], condition| {
            let Some(DynamicRows { count, row_bytes, .. }) = dynamic_rows(buffer) else { return };
            let slot = self.request_of[&(program_index, buffer)];
            by_instruction[first].0.push(DynamicAlloc { request, slot, count, row_bytes, condition });
            by_instruction[last].1.push(DynamicFree { request, count, condition });
        };
        let mut uses: BTreeMap<BufferId, [usize; 2]> = BTreeMap::new();
        for (index, instr) in program.instrs.iter().enumerate() {
            for operand in
                instr.inputs.iter().chain(&instr.outputs).filter(|operand| dynamic_rows(operand.buffer).is_some())
            {
                uses.entry(operand.buffer).or_insert([index; 2])[1] = index;
            }
        }
        for (buffer, used) in uses {
            let (key, uses) = ((program_index, buffer), self.evictable[program_index].get(&buffer));
            let Some(EvictableUses { vote, forward, backward }) = uses else {
                add(buffer, self.request_of[&key], used, RunCondition::Always);
                continue;
            };
            add(buffer, self.request_of[&key], [*vote, used[1]], RunCondition::Kept);
            for (part, used) in [*forward, *backward].into_iter().enumerate() {
                add(buffer, self.evicted_halves[&key][part], used, RunCondition::Evicted);
            }
        }
        // The instruction that applies a vote makes the same requests as the vote.
        let offers: HashMap<u32, usize> = votes(program);
        for (index, instr) in program.instrs.iter().enumerate() {
            if let InstrKind::ApplyVote(count) = instr.kind {
                by_instruction[index].0 = by_instruction[offers[&count]].0.clone();
            }
        }
        // Requests are made in the order of their first tick.
        by_instruction.iter_mut().for_each(|(asked, _)| asked.sort_unstable_by_key(|asked| asked.request));
        by_instruction.iter_mut().for_each(|(_, released)| released.sort_unstable_by_key(|released| released.request));
        by_instruction
    }
}

/// Returns the index of the instruction that votes on each row count.
fn votes(program: &Program) -> HashMap<u32, usize> {
    let offer = |(index, instr): (usize, &Instr)| match instr.kind {
        InstrKind::Vote(count) => Some((count, index)),
        _ => None,
    };
    program.instrs.iter().enumerate().filter_map(offer).collect()
}

/// Returns the evictable buffers: those that a conditional instruction writes a second time.
fn evictable(program: &Program) -> HashMap<BufferId, EvictableUses> {
    let offers = votes(program);
    let mut evictable: HashMap<BufferId, EvictableUses> = HashMap::new();
    if offers.is_empty() {
        return evictable;
    }
    let mut uses: HashMap<BufferId, [usize; 2]> = HashMap::new();
    for (index, instr) in program.instrs.iter().enumerate() {
        let outputs = instr.outputs.iter().map(|operand| (operand.buffer, true));
        for (buffer, is_written) in instr.inputs.iter().map(|operand| (operand.buffer, false)).chain(outputs) {
            let Some(offer) = program.buffers[buffer.index()].dynamic_rows.and_then(|c| offers.get(&c.count)) else {
                continue;
            };
            match (evictable.get_mut(&buffer), uses.get(&buffer)) {
                (Some(waits), _) => waits.backward[1] = index,
                // A buffer that only the recomputation writes is a temporary, not an evictable buffer.
                (None, Some(&forward))
                    if is_written && instr.predicate.is_some() && program.instrs[forward[0]].predicate.is_none() =>
                {
                    evictable.insert(buffer, EvictableUses { vote: *offer, forward, backward: [index; 2] });
                }
                (None, _) => uses.entry(buffer).or_insert([index; 2])[1] = index,
            }
        }
    }
    evictable
}
