//! What an arena is asked for while programs run: buffers whose rows are counted then.
//!
//! In: programs, and the ticks of their buffers. Out: requests in the order of their first tick, and which instruction makes and
//! ends each.

use std::collections::HashMap;

use gapless_alloc::arena::{ArenaOptions, ArenaPlan, Request, RequestId, Reserve};
use gapless_alloc::{Problem, Solution};

use super::executable::{Asked, Executable};
use super::lifetimes::ALIGNMENT;
use super::program::{BufferId, Counted, Operand, Program};
use crate::cpu::args::CountedAddress;
use crate::error::Result;

impl Executable {
    /// The arena of counted buffers with another reserve; none if nothing is counted.
    pub(crate) fn routing_with(&self, reserve: Reserve) -> Result<Option<ArenaPlan>> {
        let Some(plan) = &self.routing else { return Ok(None) };
        let requests = plan.requests().to_vec();
        Ok(Some(ArenaPlan::new(&self.problem, &self.solution.offsets, requests, &options(reserve))?))
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
    /// By program and buffer.
    of: HashMap<(usize, BufferId), RequestId>,
}

impl Requests {
    /// `of[program][buffer]` is a buffer's index in `problem`.
    pub fn of<P: std::borrow::Borrow<Program>>(programs: &[P], of: &[Vec<usize>], problem: &Problem) -> Self {
        let mut counted = Vec::new();
        for (number, (program, indices)) in programs.iter().zip(of).enumerate() {
            for (id, (buffer, &index)) in program.borrow().buffers.iter().zip(indices).enumerate() {
                let Some(Counted { row_bytes, balanced, .. }) = buffer.counted else { continue };
                let ticks = problem.buffers()[index].lifetime.clone();
                let request = Request::new(ticks, balanced.min(buffer.bytes), buffer.bytes)
                    .aligned(ALIGNMENT)
                    .in_rows(row_bytes)
                    .labelled(buffer.label.clone());
                counted.push((request, (number, BufferId(id as u32))));
            }
        }
        counted.sort_by_key(|(request, _)| request.ticks.start);
        let of = counted.iter().enumerate().map(|(id, (_, key))| (*key, RequestId(id as u32))).collect();
        Self { requests: counted.into_iter().map(|(request, _)| request).collect(), of }
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
        let row = (counted.row_bytes / operand.dtype.size_in_bytes() as u64) as u32;
        Some(CountedAddress { request, count: counted.count, row })
    }

    /// What every step of a program is the first to write, and what the last to use.
    pub fn by_step(&self, number: usize, program: &Program) -> Vec<(Vec<Asked>, Vec<RequestId>)> {
        let mut by_step = vec![(Vec::new(), Vec::new()); program.steps.len()];
        if self.is_empty() {
            return by_step;
        }
        let mut last: HashMap<BufferId, usize> = HashMap::new();
        for (index, step) in program.steps.iter().enumerate() {
            for operand in step.inputs.iter().chain(&step.outputs) {
                let Some(Counted { count, row_bytes, .. }) = program.buffers[operand.buffer.index()].counted else {
                    continue;
                };
                if last.insert(operand.buffer, index).is_none() {
                    let request = self.of[&(number, operand.buffer)];
                    by_step[index].0.push(Asked { request, count, row_bytes });
                }
            }
        }
        for (buffer, index) in last {
            by_step[index].1.push(self.of[&(number, buffer)]);
        }
        // In an order that no hash decides.
        by_step.iter_mut().for_each(|(_, releases)| releases.sort_unstable());
        by_step
    }
}
