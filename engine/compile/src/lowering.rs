//! What is lowered, and for whom.

use std::collections::HashMap;

use gapless_alloc::Role;
use gapless_graph::{Graph, ValueId};
use gapless_parallel::Action;

use crate::recompute::RematPlan;

/// What to lower, and how.
#[derive(Debug)]
pub struct Lowering<'a> {
    /// The name of the program.
    pub name: &'a str,
    /// Forward, backward and update nodes.
    pub graph: &'a Graph,
    /// The actions of every rank, in order.
    pub table: &'a [Vec<Action>],
    /// The rank whose program it is.
    pub rank: usize,
    /// What the host reads after the program. Values of the update, or of the only micro-batch.
    pub outputs: &'a [Output],
    /// Roles of persistent values that are not parameters.
    pub roles: &'a HashMap<ValueId, Role>,
    /// What is computed again in the backward.
    pub recomputation: &'a RematPlan,
    /// Whether rows that are received need not wait for their backward: if there is no room for them while the program runs,
    /// they are exchanged again.
    pub evicts: bool,
    /// What it is for.
    pub target: Target,
}

/// Whose kernels run a program: workspaces are sized for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The CPU's.
    Cpu {
        /// Threads of the run.
        threads: usize,
    },
    /// A GPU's.
    Cuda,
    /// A GPU's, each operation with kernels of its own: the reference of those that do several operations.
    CudaUnfused,
}

/// A value that the host reads after a program.
#[derive(Debug, Clone)]
pub struct Output {
    /// The name it is read by.
    pub name: String,
    /// What it is.
    pub value: ValueId,
    /// Whether every rank has it, or only the one that makes it.
    pub everywhere: bool,
}

impl Output {
    /// A value that every rank has in the end.
    pub fn everywhere(name: impl Into<String>, value: ValueId) -> Self {
        Self { name: name.into(), value, everywhere: true }
    }

    /// A value that stays on the rank that makes it.
    pub fn local(name: impl Into<String>, value: ValueId) -> Self {
        Self { name: name.into(), value, everywhere: false }
    }
}
