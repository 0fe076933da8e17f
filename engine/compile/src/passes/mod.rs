//! The passes over a rank's program between lowering and planning, in order.
//!
//! Each pass is a file with one function, and all these functions have the same signature. The environment variable
//! `GAPLESS_DUMP=lower,messages,fuse` (or `all`) prints the program to stderr after each of the named steps (`lower` or
//! a pass).

mod fuse;
mod hoist_update;
mod in_place;
mod join;
mod messages;
mod offload;
mod prefetch;
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
use crate::program::{BufferId, Instance, Program};

/// The name of the program's part that holds the update, which runs once per step.
pub(crate) const UPDATE: &str = "update";

/// The name of the program's last part, which collects the outputs for the host.
pub(crate) const FINISH: &str = "finish";

/// The data that a pass may read in addition to the program.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    /// The input of lowering.
    pub lowering: &'a Lowering<'a>,
    /// By node of the graph: whether it runs on any rank.
    pub alive: &'a [bool],
    /// Values that cross between ranks.
    pub crossings: &'a CrossRankValues,
    /// The first buffer that lowering created for each instance of a value.
    pub first_buffer: &'a HashMap<Instance, BufferId>,
}

/// One pass.
struct Pass {
    name: &'static str,
    run: fn(&mut Program, &Context<'_>) -> Result<()>,
}

/// All passes, in order.
const PASSES: [Pass; 11] = [
    // Compresses or offloads activations until their backward.
    Pass { name: "offload", run: offload::run },
    // Sends and receives values between ranks, and waits for everything in flight.
    Pass { name: "messages", run: messages::run },
    // Writes parts directly into the tensor that concatenates them.
    Pass { name: "join", run: join::run },
    // Lets outputs overwrite inputs that are not read again.
    Pass { name: "in_place", run: in_place::run },
    // Renumbers buffers in the order of their first use.
    Pass { name: "renumber", run: renumber::run },
    // Sums over ranks in f32.
    Pass { name: "sum_in_f32", run: sum_in_f32::run },
    // Adds scratch for f32 copies of bf16 operands, for kernels that only support f32.
    Pass { name: "widen", run: widen::run },
    // Moves sums and updates to earlier positions where they free memory.
    Pass { name: "hoist_update", run: hoist_update::run },
    // Reorders neighbouring instructions to lower the peak of live bytes.
    Pass { name: "reorder", run: reorder::run },
    // Gathers parameters ahead of their readers, and waits late for sums of gradients over shard ranks.
    Pass { name: "prefetch", run: prefetch::run },
    // Fuses elementwise operations, which then pass values in registers.
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

/// Prints `text` to stderr if the environment variable `GAPLESS_DUMP` names this step.
pub(crate) fn dump(stage: &str, text: &dyn std::fmt::Display) {
    let Ok(wanted) = std::env::var("GAPLESS_DUMP") else { return };
    if wanted.split(',').any(|name| name == stage || name == "all") {
        eprintln!("== {stage}\n{text}");
    }
}
