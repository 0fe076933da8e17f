//! What is done to a rank's program between lowering and planning, in order.
//!
//! Each pass is one file with one function of one signature. `GAPLESS_DUMP=lower,messages,fuse` (or `all`) prints a program
//! behind the stages that it names, as text, to the standard error.

mod fuse;
mod hoist_update;
mod in_place;
mod join;
mod messages;
mod offload;
mod renumber;
mod reorder;
mod sum_in_f32;
#[cfg(test)]
mod tests;
mod widen;

use std::collections::HashMap;

use crate::cross_rank::CrossRankValues;
use crate::error::Result;
use crate::lowering::{Lowering, Target};
use crate::program::{BufferId, Origin, Program};

/// The name of the part that is once per step.
pub(crate) const UPDATE: &str = "update";

/// The name of the part behind it, in which the host's outputs come together.
pub(crate) const FINISH: &str = "finish";

/// What a pass may look at besides the program.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    /// What was lowered.
    pub lowering: &'a Lowering<'a>,
    /// Nodes of its graph that run on some rank.
    pub alive: &'a [bool],
    /// Values that are read on other ranks than where they are made.
    pub crossings: &'a CrossRankValues,
    /// The buffer of the first making of each value, as lowering has laid it down.
    pub made: &'a HashMap<Origin, BufferId>,
}

/// One pass.
struct Pass {
    name: &'static str,
    run: fn(&mut Program, &Context<'_>) -> Result<()>,
}

/// All passes, in order.
const PASSES: [Pass; 10] = [
    // Activations that wait for their backward in eight bits or in a file.
    Pass { name: "offload", run: offload::run },
    // What other ranks make is received, what they read is sent; whatever is under way is waited for.
    Pass { name: "messages", run: messages::run },
    // Parts that are written where they would be copied to.
    Pass { name: "join", run: join::run },
    // Outputs that take over the bytes of an input that nobody reads any more.
    Pass { name: "in_place", run: in_place::run },
    Pass { name: "renumber", run: renumber::run },
    // Sums over ranks, in f32.
    Pass { name: "sum_in_f32", run: sum_in_f32::run },
    // Room for copies in f32 of what is stored in bf16, for kernels that know f32 alone.
    Pass { name: "widen", run: widen::run },
    // Sums and updates that let go of memory, as soon as all they need is there.
    Pass { name: "hoist_update", run: hoist_update::run },
    // Neighbours in the order in which fewest bytes are alive.
    Pass { name: "reorder", run: reorder::run },
    // Operations of elements that hand each other registers.
    Pass { name: "fuse", run: fuse::run },
];

/// Runs all passes.
pub(crate) fn run(
    program: &mut Program,
    context: &Context<'_>,
    observe: &mut dyn FnMut(&'static str, &Program),
) -> Result<()> {
    for pass in &PASSES {
        let is_for = match (pass.name, context.lowering.target) {
            ("widen", target) => matches!(target, Target::Cpu { .. }),
            ("join" | "fuse", target) => target == Target::Cuda,
            _ => true,
        };
        if !is_for {
            continue;
        }
        (pass.run)(program, context)?;
        observe(pass.name, program);
    }
    Ok(())
}

/// Prints a stage that the environment asks for.
pub(crate) fn dump(stage: &str, text: &dyn std::fmt::Display) {
    let Ok(wanted) = std::env::var("GAPLESS_DUMP") else { return };
    if wanted.split(',').any(|name| name == stage || name == "all") {
        eprintln!("== {stage}\n{text}");
    }
}
