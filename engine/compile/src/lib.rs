//! From a graph to instructions with planned addresses.
//!
//! In: a model's source and what a step is to be ([`step::StepOptions`]), or a graph. Out: an [`Executable`]: programs over one
//! arena whose plan has passed the checker. Never: a device, a thread, or a byte of memory.
//!
//! ```text
//! record ─▶ partition ─▶ autodiff ─▶ update ─▶ recompute ─▶ lower ─▶ passes ─▶ lifetimes ─▶ plan ─▶ check ─▶ resolve
//! ```
#![warn(missing_docs)]

#[doc(hidden)]
pub mod calls;
mod cells;
mod cut;
mod error;
mod executable;
mod fuse;
mod hoist;
mod host;
#[cfg(test)]
mod judging;
mod lifetimes;
mod lower;
mod messages;
mod order;
mod planning;
mod program;
pub mod recompute;
pub mod report;
mod requests;
pub mod step;

pub use cut::Cut;
pub use error::{Error, Result};
pub use executable::{CompileOptions, Executable, ProgramId, compile};
pub use host::HostPlan;
pub use lower::{Lowering, Output, Target, lower};
pub use program::{
    Buffer, BufferId, Counted, Held, HostBuffer, HostId, Instance, Message, Operand, Part, Program, Step, Work,
};

/// What the runtime and the trainer need of it, and nobody else.
#[doc(hidden)]
pub mod internal {
    pub use crate::executable::{Asked, CompiledProgram, Instruction, Persistent, Released, When, height};
    pub use crate::lifetimes::ALIGNMENT;
    pub use crate::lower::{PER_STEP, alive_nodes};
    pub use crate::planning::planned;
}
