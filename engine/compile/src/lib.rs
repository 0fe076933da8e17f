//! Compiles a graph to instructions with planned addresses.
//!
//! - In: a model's source and the options of a step ([`step::StepOptions`]), or a graph.
//! - Out: an [`Executable`]: programs over one arena whose plan has passed the checker.
//! - Never: a device, a thread, or memory of the arena.
//!
//! ```text
//! record ─▶ partition ─▶ autodiff ─▶ update ─▶ recompute ─▶ lower ─▶ passes ─▶ lifetimes ─▶ plan ─▶ check ─▶ resolve
//! ```
#![warn(missing_docs)]

mod cross_rank;
mod dynamic_alloc;
mod error;
mod executable;
mod instruction;
mod lifetimes;
mod link;
mod lower;
mod lowering;
mod offload_plan;
mod partition;
mod passes;
mod plan;
mod program;
mod received_rows;
pub mod recompute;
pub mod report;
mod row_sizes;
pub mod step;
#[cfg(test)]
mod test_support;
mod text;
mod verify;

pub use error::{Error, Result};
pub use executable::{CompileOptions, Executable, ProgramId};
pub use lifetimes::table;
pub use link::compile;
pub use lower::lower;
pub use lowering::{Lowering, Output, Overlap, Target};
pub use offload_plan::HostPlan;
pub use partition::StagePartition;
pub use program::{
    Buffer, BufferId, BufferKind, DynamicRows, Instance, Instr, InstrKind, IoTensor, Message, OffloadBuffer, OffloadId,
    Operand, Part, Program,
};
pub use received_rows::{ServedRows, table_with_rows};
pub use row_sizes::ReceivedRows;

/// Internals for the runtime only.
#[doc(hidden)]
pub mod internal {
    pub use crate::instruction::{CompiledProgram, DynamicAlloc, DynamicFree, Instruction, Persistent, RunCondition};
    pub use crate::lifetimes::ALIGNMENT;
    pub use crate::lower::PER_STEP;
    pub use crate::plan::planned;
    pub use crate::program::Activity;
}
