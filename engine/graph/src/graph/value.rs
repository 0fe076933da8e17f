//! Values: symbolic tensors with a shape, a type, a source, and the root whose bytes they share.

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;

use super::NodeId;
use crate::nn::Initializer;

/// The types in which operations compute. Each operation's float operands all have the same type, which is one of
/// these. Sums and statistics that need more precision than bf16 are always f32.
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

/// The origin of a value.
#[derive(Debug, Clone)]
pub enum Source {
    /// An output of a node.
    Node {
        /// The node.
        node: NodeId,
        /// Index of the output.
        output: usize,
    },
    /// A tensor that outlives the step: a parameter or an optimizer state.
    Persistent {
        /// Full name of the tensor.
        name: String,
        /// Values of its elements before the first step.
        fill: Initializer,
    },
    /// A tensor that the host writes before each micro-batch.
    Input {
        /// Name under which the host writes it.
        name: String,
    },
    /// A tensor that keeps the keys or values of past tokens from one run of a program to the next. Its contents are
    /// undefined before the first run.
    Cache {
        /// Name under which the programs share it.
        name: String,
    },
    /// A constant. One element is stored and broadcast to the value's shape.
    Constant(f64),
    /// A tensor whose elements are given when the model is recorded.
    Data {
        /// A name derived from the elements, so that equal data have equal names.
        name: String,
        /// The elements, in row-major order.
        elements: Arc<[f64]>,
    },
}

/// A symbolic tensor, without data.
#[derive(Debug, Clone)]
pub struct Value {
    /// Shape and element type.
    pub spec: Spec,
    /// The source of the value.
    pub source: Source,
    /// The value that owns the bytes: the value itself or, for a view, the viewed value.
    pub root: ValueId,
    /// The layout of the elements in the bytes of the root.
    pub layout: Layout,
    /// The row count, if the number of rows is known only while the step runs. Set for roots only, not for views.
    pub row_count: Option<RowCount>,
}

/// A number of rows that is known only while the step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowCount {
    /// The value whose last element is the number of rows.
    pub offsets: ValueId,
    /// The number of rows under balanced routing; see [`RowUse::DynamicOutputs`](crate::RowUse::DynamicOutputs).
    pub balanced: usize,
}
