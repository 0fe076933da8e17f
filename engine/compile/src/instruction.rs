//! Instructions with resolved addresses, as the runtime executes them.

use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::Label;
use gapless_alloc::arena::RequestId;
use gapless_communicator::launch_order::Call;
use gapless_graph::Spec;
use gapless_graph::nn::Initializer;
use gapless_kernels::Element;
use gapless_kernels::cpu::args::Address;
use gapless_kernels::cpu::scratch::Piece;

use crate::error::{Error, Result};
use crate::program::{Activity, InstrKind};

/// One instruction at its addresses.
#[derive(Debug)]
pub struct Instruction {
    /// The operation, message or copy.
    pub kind: InstrKind,
    /// The category of its time.
    pub activity: Activity,
    /// Tensors that it reads.
    pub inputs: Box<[Address]>,
    /// Tensors that it writes.
    pub outputs: Box<[Address]>,
    /// Pieces of scratch memory.
    pub workspace: Box<[Piece]>,
    /// Bit mask: if bit i is set, output i is accumulated into.
    pub accumulate: u64,
    /// The micro-batch, which is part of the key of its random numbers.
    pub micro_batch: u32,
    /// Name of the layer it belongs to.
    pub layer: Arc<str>,
    /// Ranges of bytes that are not read after this instruction.
    pub dead_after: Box<[Range<u64>]>,
    /// The row count that it produces, as the last element of output 0.
    pub defines_count: Option<u32>,
    /// If set, the instruction runs only if the rows of this count were evicted.
    pub predicate: Option<u32>,
    /// Arena requests to make before it, for dynamic buffers that it is the first to use.
    pub requests: Box<[DynamicAlloc]>,
    /// Arena requests that end after it.
    pub releases: Box<[DynamicFree]>,
}

impl Instruction {
    /// Its operation, layer and micro-batch, for errors.
    pub fn describe(&self) -> String {
        let layer = if self.layer.is_empty() { "the model" } else { &self.layer };
        format!("{} in {layer}, micro-batch {}", self.kind.name(), self.micro_batch)
    }

    /// Tensors to check for non-finite values when a run is watched. A received tensor is checked at its wait, not
    /// before.
    pub fn results(&self) -> &[Address] {
        match &self.kind {
            InstrKind::Compute(_) | InstrKind::Fetch(_) => &self.outputs,
            InstrKind::Wait(_) | InstrKind::Finish(_) => &self.inputs,
            _ => &[],
        }
    }

    /// True if it communicates with other ranks.
    pub fn is_exchange(&self) -> bool {
        self.activity == Activity::Communication
    }
}

/// An arena request whose size depends on a row count.
#[derive(Debug, Clone, Copy)]
pub struct DynamicAlloc {
    /// The request.
    pub request: RequestId,
    /// The request under whose id instructions look up the offset.
    pub slot: RequestId,
    /// The row count.
    pub count: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// The condition under which the request is made.
    pub condition: RunCondition,
}

/// The end of an arena request.
#[derive(Debug, Clone, Copy)]
pub struct DynamicFree {
    /// The request.
    pub request: RequestId,
    /// The row count of its buffer.
    pub count: u32,
    /// The condition under which the request was made.
    pub condition: RunCondition,
}

/// The condition under which an arena request is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunCondition {
    /// In every run.
    Always,
    /// In runs that keep the rows until the backward.
    Kept,
    /// In runs that evict the rows.
    Evicted,
}

/// A tensor at its address, with the name by which the host refers to it.
#[derive(Debug, Clone)]
pub struct BoundTensor {
    /// The name it was declared with.
    pub name: String,
    /// The micro-batch, for tensors that exist once per micro-batch.
    pub micro_batch: u32,
    /// Shape and type.
    pub spec: Spec,
    /// Its address.
    pub address: Address,
}

/// A program whose tensors have addresses.
#[derive(Debug)]
pub struct CompiledProgram {
    /// Name: `train`, `evaluate`, ….
    pub name: String,
    /// Instructions in execution order.
    pub instructions: Vec<Instruction>,
    /// Tensors that the host writes before the program starts.
    pub inputs: Vec<BoundTensor>,
    /// Tensors that the host reads after the program ends.
    pub outputs: Vec<BoundTensor>,
    /// Number of messages and collectives.
    pub requests: usize,
    /// Calls to the pipeline's communicator, for ranks that must agree on an order of messages.
    pub messages: Vec<Call>,
    /// Offsets in the offload file, indexed by [`OffloadId`](super::OffloadId).
    pub host: Vec<u64>,
    /// Number of row counts that are determined while the program runs.
    pub row_counts: usize,
}

impl CompiledProgram {
    /// The address of an input. Checks that it has the type and number of elements of `data`.
    pub fn input_for<T: Element>(&self, name: &str, micro_batch: u32, data: &[T]) -> Result<&Address> {
        let found = self.inputs.iter().find(|input| input.name == name && input.micro_batch == micro_batch);
        let Some(BoundTensor { address, spec, .. }) = found else {
            return Err(unknown(name, self.inputs.iter().map(|input| input.name.as_str())));
        };
        if address.span != data.len() || spec.dtype != T::DTYPE {
            return Err(Error::ElementCount { name: name.into(), expected: address.span, given: data.len() });
        }
        Ok(address)
    }

    /// Finds an output by its name.
    pub fn output(&self, name: &str) -> Result<&BoundTensor> {
        let found = self.outputs.iter().find(|output| output.name == name);
        found.ok_or_else(|| unknown(name, self.outputs.iter().map(|output| output.name.as_str())))
    }
}

/// A tensor that outlives the step.
#[derive(Debug, Clone)]
pub struct Persistent {
    /// Name and role.
    pub label: Label,
    /// Its address.
    pub address: Address,
    /// Shape and type.
    pub spec: Spec,
    /// Its contents before the first step.
    pub fill: Initializer,
    /// Whether an instruction of this rank changes it. Otherwise it may be received from the rank that changes it.
    pub changes_here: bool,
}

impl BoundTensor {
    /// True if the host reads and writes it as f32.
    pub fn is_f32(&self) -> bool {
        self.spec.dtype == DType::F32
    }
}

/// An error for an unknown name, with the existing name that is most similar.
pub(crate) fn unknown<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Error {
    let common = |other: &&str| other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let nearest = names.max_by_key(common).unwrap_or("none, as there are no tensors").to_owned();
    Error::UnknownTensor { name: name.into(), nearest }
}
