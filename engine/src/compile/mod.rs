//! From a graph to instructions with addresses: lower, lifetimes, plan, resolve.

mod calls;
mod cells;
mod cut;
mod executable;
#[cfg(feature = "cuda")]
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
mod requests;

pub use cut::Cut;
pub(crate) use cut::{ParameterStages, cut, cut_like, parameter_stages};
pub(crate) use executable::{Asked, CompiledProgram, Instruction, Persistent, Released, When, height};
pub use executable::{CompileOptions, Executable, ProgramId, compile};
pub use host::HostPlan;
pub(crate) use lifetimes::ALIGNMENT;
pub(crate) use lower::alive_nodes;
pub use lower::{Lowering, Output, Target, lower};
#[cfg(feature = "cuda")]
pub(crate) use planning::planned;
pub use program::{
    Buffer, BufferId, Counted, Held, HostBuffer, HostId, Instance, Message, Operand, Part, Program, Step, Work,
};
