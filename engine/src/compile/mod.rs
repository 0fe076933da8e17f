//! From a graph to instructions with addresses: lower, lifetimes, plan, resolve.

mod executable;
mod lifetimes;
mod lower;
mod program;

pub use executable::{CompileOptions, Executable, compile};
pub(crate) use executable::{CompiledProgram, Instruction, Named, Persistent};
pub(crate) use lifetimes::ALIGNMENT;
pub use lower::{Lowering, lower};
pub use program::{Buffer, BufferId, Held, Instance, Operand, Program, Step};
