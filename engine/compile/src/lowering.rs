//! The input of lowering.

use std::collections::HashMap;

use gapless_alloc::Role;
use gapless_graph::{Graph, ValueId};
use gapless_parallel::Action;

use crate::recompute::RematPlan;

/// A graph to lower, with everything that lowering depends on.
#[derive(Debug)]
pub struct Lowering<'a> {
    /// The name of the program.
    pub name: &'a str,
    /// Forward, backward and update nodes.
    pub graph: &'a Graph,
    /// The actions of every rank, in order.
    pub table: &'a [Vec<Action>],
    /// The rank to lower for.
    pub rank: usize,
    /// Values that the host reads after the program. They are computed by the update. In a program with a single
    /// micro-batch, they may also be computed in this micro-batch.
    pub outputs: &'a [Output],
    /// Roles of persistent values that are not parameters.
    pub roles: &'a HashMap<ValueId, Role>,
    /// The plan of the values that are recomputed in the backward.
    pub recomputation: &'a RematPlan,
    /// Whether received rows may be evicted before their backward. If so, rows for which the arena has no space at run
    /// time are exchanged again.
    pub evicts: bool,
    /// The collectives of shard ranks that may be under way.
    pub overlap: Overlap,
    /// The device that the program is for.
    pub target: Target,
}

/// The collectives of shard ranks that may be under way while other instructions run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Number of gathered parameters that may be under way or waiting beside the one that is read.
    pub prefetch: usize,
    /// Number of sums of gradients that may be under way.
    pub reductions: usize,
}

/// The kernels that run a program. The sizes of scratch depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// CPU kernels.
    Cpu {
        /// Number of threads of the run.
        threads: usize,
    },
    /// GPU kernels.
    Cuda,
    /// GPU kernels without fusion, with which fused kernels are compared.
    CudaUnfused,
}

/// A value that the host reads after a program.
#[derive(Debug, Clone)]
pub struct Output {
    /// The name by which the host reads the value.
    pub name: String,
    /// The value.
    pub value: ValueId,
    /// True if every rank gets the value. If false, only the rank that computes the value has it.
    pub everywhere: bool,
}

impl Output {
    /// Returns an output that every rank has after the program.
    pub fn everywhere(name: impl Into<String>, value: ValueId) -> Self {
        Self { name: name.into(), value, everywhere: true }
    }

    /// Returns an output that only the rank that computes the value has after the program.
    pub fn local(name: impl Into<String>, value: ValueId) -> Self {
        Self { name: name.into(), value, everywhere: false }
    }
}
