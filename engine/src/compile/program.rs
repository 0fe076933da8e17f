//! What is executed, before anything has an address: operations over buffers, in order.

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_alloc::{Label, Role};

use crate::graph::{Spec, Value};
use crate::nn::Init;
use crate::op::Op;

/// Index of a buffer in its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub(crate) u32);

impl BufferId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Bytes that live from their first use to their last, unless something outside holds them longer.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// Size.
    pub bytes: u64,
    /// Names and role.
    pub label: Label,
    /// Who holds it beyond its uses.
    pub held: Held,
}

/// Who holds a buffer beyond its uses by instructions.
#[derive(Debug, Clone)]
pub enum Held {
    /// Nobody.
    No,
    /// The run: parameters, optimizer states, constants. Shared between programs by name.
    Always {
        /// How it is filled before the first step.
        init: Init,
        /// What it was declared as; instructions may read it through views of other shapes.
        spec: Spec,
    },
    /// The host writes it before the program starts.
    FromStart,
    /// The host reads it after the program ends.
    ToEnd,
}

/// A tensor of an instruction.
#[derive(Debug, Clone)]
pub struct Operand {
    /// The buffer that holds it.
    pub buffer: BufferId,
    /// Where in the buffer, in elements.
    pub layout: Layout,
    /// Element type.
    pub dtype: DType,
    /// For inputs: the output that has the same bytes.
    pub overwritten_by: Option<usize>,
}

impl Operand {
    /// A value as it lies in its root's buffer.
    pub(crate) fn new(buffer: BufferId, value: &Value) -> Self {
        Self { buffer, layout: value.layout.clone(), dtype: value.spec.dtype, overwritten_by: None }
    }
}

/// One operation on buffers.
#[derive(Debug, Clone)]
pub struct Step {
    /// What is computed.
    pub op: Arc<dyn Op>,
    /// From what.
    pub inputs: Vec<Operand>,
    /// Into what.
    pub outputs: Vec<Operand>,
    /// Scratch.
    pub workspace: Option<BufferId>,
    /// Bit i: output i is added to instead of set.
    pub accumulate: u64,
    /// The micro-batch whose random numbers it draws.
    pub micro_batch: u32,
    /// The layer it belongs to.
    pub layer: Arc<str>,
}

/// A tensor that the host writes or reads by name.
#[derive(Debug, Clone)]
pub struct Instance {
    /// The name it was declared with.
    pub name: String,
    /// The micro-batch, for what exists once per micro-batch.
    pub micro_batch: u32,
    /// The tensor.
    pub operand: Operand,
    /// Shape and type.
    pub spec: Spec,
}

/// A list of operations over buffers. It *is* the lifetime of every buffer.
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// `train`, `evaluate`, ….
    pub name: String,
    /// Buffers, indexed by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Operations in order.
    pub steps: Vec<Step>,
    /// What the host writes before it starts.
    pub inputs: Vec<Instance>,
    /// What the host reads after it ends.
    pub outputs: Vec<Instance>,
    /// Ranges of steps that belong together, e.g. `0F3`, for pictures and traces.
    pub parts: Vec<(std::ops::Range<usize>, String)>,
}

impl Program {
    /// Arithmetic of one run.
    pub fn flops(&self) -> u64 {
        let specs = |operands: &[Operand]| -> Vec<Spec> {
            operands.iter().map(|o| Spec { shape: o.layout.shape().clone(), dtype: o.dtype }).collect()
        };
        self.steps.iter().map(|s| s.op.flops(&specs(&s.inputs), &specs(&s.outputs))).sum()
    }

    pub(crate) fn add(&mut self, bytes: u64, label: Label, held: Held) -> BufferId {
        let id = BufferId(u32::try_from(self.buffers.len()).expect("fewer than 2^32 buffers"));
        self.buffers.push(Buffer { bytes, label, held });
        id
    }
}

/// The role of a buffer that holds a value made in a given phase.
pub(crate) fn role_of_node(phase: crate::graph::Phase) -> Role {
    match phase {
        crate::graph::Phase::BackwardWeight => Role::Gradient,
        _ => Role::Activation,
    }
}
