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
    /// The category to which the instruction's time is attributed.
    pub activity: Activity,
    /// Tensors that the instruction reads.
    pub inputs: Box<[Address]>,
    /// Tensors that the instruction writes.
    pub outputs: Box<[Address]>,
    /// Pieces of scratch memory.
    pub workspace: Box<[Piece]>,
    /// Bit mask: if bit i is set, output i is accumulated into.
    pub accumulate: u64,
    /// The micro-batch, which is part of the key of the instruction's random numbers.
    pub micro_batch: u32,
    /// Name of the layer to which the instruction belongs.
    pub layer: Arc<str>,
    /// Ranges of bytes in the arena whose contents are not read after this instruction.
    pub dead_after: Box<[Range<u64>]>,
    /// Index of the row count that the instruction produces, as the last element of output 0.
    pub defines_count: Option<u32>,
    /// If this is the index of a row count, the instruction runs only if the rows of that count were evicted.
    pub predicate: Option<u32>,
    /// Arena requests that are made before the instruction: those for dynamic buffers that no earlier instruction uses.
    pub requests: Box<[DynamicAlloc]>,
    /// Arena requests that end after the instruction.
    pub releases: Box<[DynamicFree]>,
}

impl Instruction {
    /// Returns the instruction's operation, layer and micro-batch, as text for errors.
    pub fn describe(&self) -> String {
        let layer = if self.layer.is_empty() { "the model" } else { &self.layer };
        format!("{} in {layer}, micro-batch {}", self.kind.name(), self.micro_batch)
    }

    /// Tensors that are complete after this instruction, and are checked for non-finite values when a run is watched. A
    /// received or fetched tensor is complete after the wait.
    pub fn results(&self) -> &[Address] {
        match &self.kind {
            InstrKind::Compute(_) => &self.outputs,
            InstrKind::Wait(_) | InstrKind::Finish(_) | InstrKind::Fetched(_) => &self.inputs,
            _ => &[],
        }
    }

    /// True if the instruction communicates with other ranks.
    pub fn is_exchange(&self) -> bool {
        self.activity == Activity::Communication
    }
}

/// An arena request whose size depends on a row count.
#[derive(Debug, Clone, Copy)]
pub struct DynamicAlloc {
    /// The id of this request.
    pub request: RequestId,
    /// The request whose id instructions use to look up the buffer's offset. If the rows were evicted, this is not the
    /// id in `request`.
    pub slot: RequestId,
    /// Index of the row count.
    pub count: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// The condition under which the request is made.
    pub condition: RunCondition,
}

/// The end of an arena request.
#[derive(Debug, Clone, Copy)]
pub struct DynamicFree {
    /// The id of the request.
    pub request: RequestId,
    /// Index of the row count of the request's buffer.
    pub count: u32,
    /// The condition under which the request was made.
    pub condition: RunCondition,
}

/// The condition under which an arena request is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunCondition {
    /// The request is made in every run.
    Always,
    /// The request is made in runs that keep the rows until the backward.
    Kept,
    /// The request is made in runs that evict the rows.
    Evicted,
}

/// A tensor at its address, with the name by which the host refers to it.
#[derive(Debug, Clone)]
pub struct BoundTensor {
    /// The name with which the tensor was declared.
    pub name: String,
    /// The micro-batch; 0 for tensors that exist once per step.
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
    /// Calls to the pipeline's communicator. Ranks use this list to agree on an order of messages.
    pub messages: Vec<Call>,
    /// Offsets of buffers in the offload file, indexed by [`OffloadId`](super::OffloadId).
    pub host: Vec<u64>,
    /// Number of row counts that are determined while the program runs.
    pub row_counts: usize,
}

impl CompiledProgram {
    /// Returns the address of an input.
    ///
    /// # Errors
    /// Returns an error if there is no such input, or if the input's type or number of elements is another.
    pub fn input_for<T: Element>(&self, name: &str, micro_batch: u32, elements: usize) -> Result<&Address> {
        let found = self.inputs.iter().find(|input| input.name == name && input.micro_batch == micro_batch);
        let Some(BoundTensor { address, spec, .. }) = found else {
            return Err(unknown(name, self.inputs.iter().map(|input| input.name.as_str())));
        };
        if address.span != elements || spec.dtype != T::DTYPE {
            return Err(Error::ElementCount { name: name.into(), expected: address.span, given: elements });
        }
        Ok(address)
    }

    /// Returns the output of this name.
    ///
    /// # Errors
    /// If no output has this name, returns an error that suggests the most similar name.
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
    /// Whether an instruction of this rank changes the tensor. If not, another rank may change the tensor and send it
    /// to this rank.
    pub changes_here: bool,
}

impl BoundTensor {
    /// True if the tensor is stored as f32, so that the host can read and write it as such.
    pub fn is_f32(&self) -> bool {
        self.spec.dtype == DType::F32
    }
}

/// Returns the error for an unknown name. The error suggests the most similar existing name.
pub(crate) fn unknown<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Error {
    let common = |other: &&str| other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let nearest = names.max_by_key(common).unwrap_or("none, as there are no tensors").to_owned();
    Error::UnknownTensor { name: name.into(), nearest }
}
