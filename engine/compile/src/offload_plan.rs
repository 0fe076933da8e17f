//! Plans the file for offloaded activations in the same way as an arena.
//!
//! - In: programs, and their ticks.
//! - Out: a checked offset for each [`OffloadBuffer`](super::OffloadBuffer). A buffer lives from the instruction that
//!   writes the buffer to the instruction that reads it back.
//! - Never: an open file.

use std::ops::Range;

use gapless_alloc::{Buffer, Options, Problem, Solution};

use super::lifetimes::tick_of;
use crate::error::Result;
use crate::plan::planned;
use crate::program::{InstrKind, Program};

/// Alignment of all offsets: a page.
const PAGE: u64 = 4096;

/// The plan of the offload file.
#[derive(Debug)]
pub struct HostPlan {
    /// The planning problem, in the arena's ticks.
    pub problem: Problem,
    /// The plan, which has passed the checker.
    pub solution: Solution,
    /// The offset of each buffer in the file: `offsets[program][buffer]`.
    pub(crate) offsets: Vec<Vec<u64>>,
}

/// Plans the offload file of `programs`. `spans` holds the range of ticks of each program.
///
/// # Errors
/// Returns an error if the live bytes exceed `u64`. Returns [`Error::BadPlan`](crate::Error::BadPlan) if the plan does
/// not pass the checker, which means that the planner has a bug.
pub(super) fn plan_host(programs: &[Program], spans: &[Range<u64>], options: &Options) -> Result<HostPlan> {
    let mut buffers: Vec<Buffer> = Vec::new();
    for (program, span) in programs.iter().zip(spans) {
        let mut lifetimes = vec![span.end..span.start; program.offload.len()];
        for (index, instr) in program.instrs.iter().enumerate() {
            if let InstrKind::Offload(id) | InstrKind::Fetch(id) = instr.kind {
                let (tick, lifetime) = (tick_of(span.start, index), &mut lifetimes[id.index()]);
                *lifetime = lifetime.start.min(tick)..lifetime.end.max(tick + 2);
            }
        }
        let sizes = program.offload.iter().map(|buffer| buffer.bytes.next_multiple_of(PAGE));
        buffers.extend(
            lifetimes.into_iter().zip(sizes).map(|(lifetime, bytes)| Buffer::new(lifetime, bytes).aligned(PAGE)),
        );
    }
    let problem = Problem::new(buffers)?;
    let solution = planned(&problem, &Options { capacity: None, ..options.clone() })?;
    let mut left = solution.offsets.iter().copied();
    let offsets = programs.iter().map(|program| left.by_ref().take(program.offload.len()).collect()).collect();
    Ok(HostPlan { problem, solution, offsets })
}
