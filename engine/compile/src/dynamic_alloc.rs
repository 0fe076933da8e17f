//! What an arena is asked for while programs run: buffers whose rows are counted then.
//!
//! In: programs, and the ticks of their buffers. Out: requests in the order of their first tick, and which instruction makes and
//! ends each.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use gapless_alloc::arena::{ArenaOptions, ArenaPlan, Need, Request, RequestId, Reserve};
use gapless_alloc::{Problem, Solution};
use gapless_kernels::cpu::args::CountedAddress;

use crate::error::{Error, Result};
use crate::executable::Executable;
use crate::instruction::{DynamicAlloc, DynamicFree, When};
use crate::lifetimes::{ALIGNMENT, tick_of};
use crate::program::{BufferId, DynamicRows, Instr, InstrKind, Operand, Program};

impl Executable {
    /// Plans the arena of counted buffers with another reserve, and goes on with it if `accept` says so. Nothing happens if nothing is
    /// counted.
    ///
    /// # Errors
    /// When the reserve leaves the address space, or is no number; what `accept` returns.
    pub fn reserve_anew<E: From<Error>>(
        &mut self,
        reserve: Reserve,
        accept: impl FnOnce(&ArenaPlan) -> Result<bool, E>,
    ) -> Result<bool, E> {
        let Some(plan) = &self.routing else { return Ok(false) };
        let requests = plan.requests().to_vec();
        let anew = ArenaPlan::new(&self.problem, &self.solution.offsets, requests, &options(reserve));
        let anew = anew.map_err(Error::from)?;
        let is_accepted = accept(&anew)?;
        if is_accepted {
            self.routing = Some(anew);
        }
        Ok(is_accepted)
    }
}

fn options(reserve: Reserve) -> ArenaOptions {
    // About a tenth of a second, where the reserve is not proven lowest before.
    ArenaOptions { reserve, work: 2_000_000, ..ArenaOptions::default() }
}

/// The requests of all programs.
#[derive(Debug)]
pub(super) struct Requests {
    requests: Vec<Request>,
    /// By program and buffer: the one whose place instructions look at.
    of: HashMap<(usize, BufferId), RequestId>,
    /// Of buffers that need not wait for the backward: for when they do not, before and behind that.
    parts: HashMap<(usize, BufferId), [RequestId; 2]>,
    /// By program.
    waits: Vec<HashMap<BufferId, Waits>>,
}

/// The steps that use a buffer which need not wait for the backward.
#[derive(Debug, Clone, Copy)]
struct Waits {
    /// The one that looks for room for it.
    offer: usize,
    /// The first and the last of the forward.
    forward: [usize; 2],
    /// The first and the last of the backward; the first is one of those that may make it again.
    backward: [usize; 2],
}

impl Requests {
    /// `of[program][buffer]` is a buffer's index in `problem`; `spans` are the ticks of the programs.
    pub fn of<P: std::borrow::Borrow<Program>>(
        programs: &[P],
        of: &[Vec<usize>],
        spans: &[Range<u64>],
        problem: &Problem,
    ) -> Self {
        let waits: Vec<_> = programs.iter().map(|program| waits(program.borrow())).collect();
        let need = if waits.iter().all(HashMap::is_empty) { Need::Usual } else { Need::Certain };
        let mut counted = Vec::new();
        for (number, (program, indices)) in programs.iter().zip(of).enumerate() {
            for (id, (buffer, &index)) in program.borrow().buffers.iter().zip(indices).enumerate() {
                let Some(DynamicRows { row_bytes, balanced, .. }) = buffer.counted else { continue };
                let request = |ticks, need| {
                    Request::new(ticks, balanced.min(buffer.bytes), buffer.bytes)
                        .aligned(ALIGNMENT)
                        .in_rows(row_bytes)
                        .needed(need)
                        .labelled(buffer.label.clone())
                };
                let (key, ticks) = ((number, BufferId(id as u32)), problem.buffers()[index].lifetime.clone());
                let Some(Waits { offer, forward, backward }) = waits[number].get(&key.1) else {
                    counted.push((request(ticks, need), (key, None)));
                    continue;
                };
                let written = |instr: usize| tick_of(spans[number].start, instr) + 1;
                counted.push((request(written(*offer)..ticks.end, Need::Optional), (key, None)));
                for (part, [first, last]) in [*forward, *backward].into_iter().enumerate() {
                    counted.push((request(written(first)..written(last) + 1, Need::Certain), (key, Some(part))));
                }
            }
        }
        counted.sort_by_key(|(request, _)| request.ticks.start);
        let (mut of, mut parts) = (HashMap::new(), HashMap::new());
        for (id, (_, (key, part))) in counted.iter().enumerate() {
            let id = RequestId(id as u32);
            match part {
                None => _ = of.insert(*key, id),
                Some(part) => parts.entry(*key).or_insert([id; 2])[*part] = id,
            }
        }
        Self { requests: counted.into_iter().map(|(request, _)| request).collect(), of, parts, waits }
    }

    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The arena beside a static plan; none if nothing is asked for.
    pub fn plan(&self, problem: &Problem, solution: &Solution, reserve: Reserve) -> Result<Option<ArenaPlan>> {
        if self.is_empty() {
            return Ok(None);
        }
        Ok(Some(ArenaPlan::new(problem, &solution.offsets, self.requests.clone(), &options(reserve))?))
    }

    /// How an operand is found while its program runs, if it has no address before.
    pub fn address(&self, number: usize, program: &Program, operand: &Operand) -> Option<CountedAddress> {
        let counted = program.buffers[operand.buffer.index()].counted?;
        let request = self.of[&(number, operand.buffer)].0;
        let row = (counted.row_bytes / operand.dtype.size_in_bytes() as u64) as usize;
        Some(CountedAddress { request, row })
    }

    /// What every step of a program is the first to write, and what the last to use.
    pub fn by_step(&self, number: usize, program: &Program) -> Vec<(Vec<DynamicAlloc>, Vec<DynamicFree>)> {
        let mut by_step = vec![(Vec::new(), Vec::new()); program.instrs.len()];
        if self.is_empty() {
            return by_step;
        }
        let counted = |buffer: BufferId| program.buffers[buffer.index()].counted;
        let mut add = |buffer: BufferId, request: RequestId, [first, last]: [usize; 2], when| {
            let Some(DynamicRows { count, row_bytes, .. }) = counted(buffer) else { return };
            let place = self.of[&(number, buffer)];
            by_step[first].0.push(DynamicAlloc { request, place, count, row_bytes, when });
            by_step[last].1.push(DynamicFree { request, count, when });
        };
        let mut uses: BTreeMap<BufferId, [usize; 2]> = BTreeMap::new();
        for (index, instr) in program.instrs.iter().enumerate() {
            for operand in instr.inputs.iter().chain(&instr.outputs).filter(|operand| counted(operand.buffer).is_some())
            {
                uses.entry(operand.buffer).or_insert([index; 2])[1] = index;
            }
        }
        for (buffer, used) in uses {
            let (key, waits) = ((number, buffer), self.waits[number].get(&buffer));
            let Some(Waits { offer, forward, backward }) = waits else {
                add(buffer, self.of[&key], used, When::Always);
                continue;
            };
            add(buffer, self.of[&key], [*offer, used[1]], When::Kept);
            for (part, used) in [*forward, *backward].into_iter().enumerate() {
                add(buffer, self.parts[&key][part], used, When::Evicted);
            }
        }
        // What is settled is what was offered.
        let offers: HashMap<u32, usize> = offers(program);
        for (index, instr) in program.instrs.iter().enumerate() {
            if let InstrKind::ApplyVote(count) = instr.kind {
                by_step[index].0 = by_step[offers[&count]].0.clone();
            }
        }
        // In the order of their first tick.
        by_step.iter_mut().for_each(|(asked, _)| asked.sort_unstable_by_key(|asked| asked.request));
        by_step.iter_mut().for_each(|(_, released)| released.sort_unstable_by_key(|released| released.request));
        by_step
    }
}

/// The steps that look for room for rows, by their count.
fn offers(program: &Program) -> HashMap<u32, usize> {
    let offer = |(index, instr): (usize, &Instr)| match instr.kind {
        InstrKind::Vote(count) => Some((count, index)),
        _ => None,
    };
    program.instrs.iter().enumerate().filter_map(offer).collect()
}

/// The buffers that need not wait for the backward: those that are written a second time, if at all.
fn waits(program: &Program) -> HashMap<BufferId, Waits> {
    let offers = offers(program);
    let mut waits: HashMap<BufferId, Waits> = HashMap::new();
    if offers.is_empty() {
        return waits;
    }
    let mut uses: HashMap<BufferId, [usize; 2]> = HashMap::new();
    for (index, instr) in program.instrs.iter().enumerate() {
        let outputs = instr.outputs.iter().map(|operand| (operand.buffer, true));
        for (buffer, is_written) in instr.inputs.iter().map(|operand| (operand.buffer, false)).chain(outputs) {
            let Some(offer) = program.buffers[buffer.index()].counted.and_then(|c| offers.get(&c.count)) else {
                continue;
            };
            match (waits.get_mut(&buffer), uses.get(&buffer)) {
                (Some(waits), _) => waits.backward[1] = index,
                // Between, there is nothing to be made again.
                (None, Some(&forward))
                    if is_written && instr.predicate.is_some() && program.instrs[forward[0]].predicate.is_none() =>
                {
                    waits.insert(buffer, Waits { offer: *offer, forward, backward: [index; 2] });
                }
                (None, _) => uses.entry(buffer).or_insert([index; 2])[1] = index,
            }
        }
    }
    waits
}
