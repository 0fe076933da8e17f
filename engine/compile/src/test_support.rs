//! Helpers of the tests that check passes on small programs.

use gapless_alloc::lower_bound;
use gapless_parallel::{Action, Kind};

use super::lifetimes::lifetimes;
use crate::program::{Part, Program};

/// Returns the peak of live bytes, computed as the planner's lower bound.
pub fn peak(program: &Program) -> u64 {
    lower_bound(&lifetimes(&[program]).unwrap().problem)
}

/// Divides a program into parts of this many instructions.
pub fn in_parts(mut program: Program, length: usize) -> Program {
    let count = program.instrs.len();
    for (number, start) in (0..count).step_by(length).enumerate() {
        let action = Action::new(Kind::Forward, 0, number as u32);
        let instrs = start..count.min(start + length);
        program.parts.push(Part { instrs, name: action.to_string(), action: Some(action) });
    }
    program
}
