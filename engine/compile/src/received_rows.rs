//! Steps whose routed rows are known: the tables of their buffers, and the bytes of the arena that serve them.
//!
//! - In: programs, or an executable with the arena of their dynamic rows, and the number of rows that the rank receives
//!   in each layer and micro-batch.
//! - Out: a planning problem in which every buffer has its size, as other allocators would see it. For an executable,
//!   also the address at which the arena serves each buffer.
//! - Never: a run of the step.

use std::collections::HashMap;

use gapless_alloc::arena::{Arena, ArenaPlan, RequestId, Reserve, rehearse};
use gapless_alloc::{Problem, Proof, Solution, check, lower_bound};

use crate::error::{Error, Result};
use crate::executable::Executable;
use crate::lifetimes::{ALIGNMENT, Lifetimes, lifetimes};
use crate::program::Program;
use crate::row_sizes::{ReceivedRows, sized_by_rows};

/// Returns the planning problem of one program like [`table`](crate::table), but buffers of dynamic rows have the size
/// of the rows that the rank receives. Buffers for the recomputation of evicted rows have no bytes.
///
/// # Errors
/// Returns an error if the live bytes exceed `u64`.
pub fn table_with_rows(program: &Program, rows: &ReceivedRows<'_>) -> Result<Problem> {
    let Lifetimes { problem, problem_index, .. } = lifetimes(&[program])?;
    let indices = &problem_index[0];
    let sized = sized_by_rows(program).into_iter();
    with_sizes(&problem, sized.map(|(buffer, sized)| (indices[buffer.index()], sized.bytes(rows))))
}

/// Returns the problem with these sizes in bytes, by the buffers' indices.
fn with_sizes(problem: &Problem, sizes: impl Iterator<Item = (usize, u64)>) -> Result<Problem> {
    let mut buffers = problem.buffers().to_vec();
    sizes.for_each(|(index, bytes)| buffers[index].bytes = bytes.next_multiple_of(ALIGNMENT));
    Ok(Problem::new(buffers)?)
}

/// A step whose rows are known, as the arena of an executable serves it.
#[derive(Debug, Clone)]
pub struct ServedRows {
    /// The buffers of the step. Buffers of dynamic rows have the size of their rows.
    pub problem: Problem,
    /// The address of each buffer. The height is the size of the arena that the step needs: what the online arena takes
    /// if its reserve has no end, or the whole arena if that is less. The rest of the arena is reserved for other rows.
    pub solution: Solution,
    /// Size of the arena: the static plan and the reserve.
    pub arena_bytes: u64,
    /// If the reserve of the executable is too small for the rows, the factor of a reserve that is not.
    /// [`Self::arena_bytes`] then has this larger reserve.
    pub grown_to: Option<f64>,
}

impl Executable {
    /// Serves a step with the given rows from the arena, without running it. If the rows do not fit the reserve, the
    /// reserve grows to the factor of the rows, as under `Overflow::Grow`. Without dynamic rows, the result is the plan.
    ///
    /// # Errors
    /// Returns an error if the larger reserve exceeds the address space. Returns [`Error::BadPlan`] if buffers overlap,
    /// which means that the arena has a bug.
    pub fn serve_rows(&self, rows: &ReceivedRows<'_>) -> Result<ServedRows> {
        let Some(plan) = &self.dynamic_arena else {
            let (problem, solution) = (self.problem.clone(), self.solution.clone());
            return Ok(ServedRows { problem, arena_bytes: solution.height, solution, grown_to: None });
        };
        let mut bytes = vec![0; plan.requests().len()];
        for buffer in &self.dynamic_buffers {
            bytes[buffer.request.index()] = buffer.size.bytes(rows);
        }
        let sizes = self.dynamic_buffers.iter().map(|buffer| (buffer.index, bytes[buffer.request.index()]));
        let problem = with_sizes(&self.problem, sizes)?;
        // Returns the addresses and the height with this plan of the arena, or `None` if a request overflows.
        let serve = |plan: ArenaPlan| {
            let mut arena = Arena::new(plan);
            let run = rehearse(&mut arena, |id| bytes[id.index()]);
            let places: HashMap<RequestId, u64> =
                run.served.iter().map(|served| (served.request, served.offset)).collect();
            let mut offsets = self.solution.offsets.clone();
            for buffer in &self.dynamic_buffers {
                offsets[buffer.index] = *places.get(&buffer.request)?;
            }
            let ends = problem.buffers().iter().zip(&offsets).filter(|(buffer, _)| buffer.bytes > 0);
            let height = ends.map(|(buffer, offset)| offset + buffer.bytes).max().unwrap_or(0);
            Some((offsets, height))
        };
        let (mut served, mut arena_bytes, mut grown_to) = (serve(plan.clone()), plan.height(), None);
        if served.is_none() {
            let of_balanced = plan.requests().iter().zip(&bytes);
            let factors = of_balanced.map(|(request, &bytes)| bytes as f64 / request.balanced.max(1) as f64);
            let factor = factors.fold(0.0, f64::max);
            let larger = self.arena_with(plan, Reserve::Balanced { factor })?;
            arena_bytes = larger.height();
            served = serve(larger);
            grown_to = Some(factor);
        }
        // An arena uses its whole reserve, because short-lived buffers go to its end. How much of it the rows need shows
        // in a reserve without an end, where they go as low as they can.
        let without_end = serve(self.arena_with(plan, Reserve::Bytes(u64::MAX >> 8))?);
        let both = [served, without_end].into_iter().flatten();
        let (offsets, height) = both
            .min_by_key(|(_, height)| *height)
            .ok_or_else(|| Error::BadPlan { what: "rows overflow a reserve that promises room for them".to_owned() })?;
        check(&problem, &offsets, Some(height)).map_err(|violations| Error::BadPlan {
            what: violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        })?;
        let bound = lower_bound(&problem);
        let proof = if height == bound { Proof::MaxLive } else { Proof::None { bound } };
        let solution = Solution { offsets, height, lower_bound: bound, proof, ..self.solution.clone() };
        Ok(ServedRows { problem, solution, arena_bytes: arena_bytes.max(height), grown_to })
    }
}
