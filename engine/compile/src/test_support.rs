//! What judges of passes over small programs have in common.

use gapless_alloc::lower_bound;
use gapless_parallel::{Action, Kind};

use super::lifetimes::lifetimes;
use crate::program::{Part, Program};

/// The most live bytes, by the planner's own bound.
pub fn most(program: &Program) -> u64 {
    lower_bound(&lifetimes(&[program]).unwrap().problem)
}

/// The same program in parts of so many instrs.
pub fn in_parts(mut program: Program, length: usize) -> Program {
    let count = program.instrs.len();
    for (number, start) in (0..count).step_by(length).enumerate() {
        let action = Action::new(Kind::Forward, 0, number as u32);
        let instrs = start..count.min(start + length);
        program.parts.push(Part { instrs, name: action.to_string(), action: Some(action) });
    }
    program
}
