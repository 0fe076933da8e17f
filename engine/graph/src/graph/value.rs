//! A tensor that does not exist yet: its shape and type, where it comes from, and whose bytes it has.

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;

use super::NodeId;
use crate::nn::Initializer;

/// The types that operations compute in, each in one of them throughout: sums and statistics that need it are f32 in any
/// case.
pub const FLOATS: [DType; 2] = [DType::F32, DType::BF16];

/// Index of a value in its graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub(super) u32);

impl ValueId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a value comes from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Output `output` of a node.
    Node {
        /// The node.
        node: NodeId,
        /// Which of its outputs.
        output: usize,
    },
    /// A tensor that outlives the step: a parameter, or a state of the optimizer.
    Persistent {
        /// Full name.
        name: String,
        /// What it holds before the first step.
        fill: Initializer,
    },
    /// Written by the host before each micro-batch.
    Input {
        /// Name by which the host writes it.
        name: String,
    },
    /// What the runs of some programs hand on to each other: keys or values of past tokens. Holds anything before the first.
    Cache {
        /// Name by which programs share it.
        name: String,
    },
    /// The same number everywhere.
    Constant(f64),
    /// Numbers that the model's source gives, in row-major order.
    Data {
        /// A name that says which numbers these are.
        name: String,
        /// The numbers.
        elements: Arc<[f64]>,
    },
}

/// A tensor that does not exist yet.
#[derive(Debug, Clone)]
pub struct Value {
    /// Shape and element type.
    pub spec: Spec,
    /// Where it comes from.
    pub source: Source,
    /// The value that owns the bytes; itself unless this is a view.
    pub root: ValueId,
    /// Where in the root's bytes the elements lie.
    pub layout: Layout,
    /// Of a root whose rows are counted while the step runs: by what.
    pub rows: Option<RowCount>,
}

/// Rows that are counted while the step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowCount {
    /// The value whose last element is their number.
    pub starts: ValueId,
    /// Their number if all ranks have the same.
    pub balanced: usize,
}
