//! What is executed: instructions with resolved addresses.

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

/// One operation at its addresses.
#[derive(Debug)]
pub struct Instruction {
    /// What is done.
    pub kind: InstrKind,
    /// What its time counts as.
    pub activity: Activity,
    /// From what.
    pub inputs: Box<[Address]>,
    /// Into what.
    pub outputs: Box<[Address]>,
    /// The pieces of its scratch.
    pub workspace: Box<[Piece]>,
    /// Bit i: output i is added to.
    pub accumulate: u64,
    /// The micro-batch whose random numbers it draws.
    pub micro_batch: u32,
    /// The layer it belongs to.
    pub layer: Arc<str>,
    /// Ranges of bytes that nobody reads after this instruction.
    pub dead_after: Box<[Range<u64>]>,
    /// The count that the last element of output 0 is.
    pub counts: Option<u32>,
    /// If it is left out unless the rows of this count were let go.
    pub predicate: Option<u32>,
    /// What it is the first to write, of what is placed while the program runs.
    pub requests: Box<[DynamicAlloc]>,
    /// What nobody reads after it.
    pub releases: Box<[DynamicFree]>,
}

impl Instruction {
    /// Its operation, layer and micro-batch, for errors.
    pub fn describe(&self) -> String {
        let layer = if self.layer.is_empty() { "the model" } else { &self.layer };
        format!("{} in {layer}, micro-batch {}", self.kind.name(), self.micro_batch)
    }

    /// What it has made, of which a run that watches asks whether it is finite. What is being received is not looked at before the wait
    /// for it.
    pub fn made(&self) -> &[Address] {
        match &self.kind {
            InstrKind::Compute(_) | InstrKind::Fetch(_) => &self.outputs,
            InstrKind::Wait(_) | InstrKind::Finish(_) => &self.inputs,
            _ => &[],
        }
    }

    /// Whether it has to do with other ranks.
    pub fn is_exchange(&self) -> bool {
        self.activity == Activity::Communication
    }
}

/// A request for as many bytes as a count says.
#[derive(Debug, Clone, Copy)]
pub struct DynamicAlloc {
    /// The request.
    pub request: RequestId,
    /// The request whose place instructions look at.
    pub place: RequestId,
    /// The count that says how many rows.
    pub count: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// In which runs.
    pub when: When,
}

/// A request that ends.
#[derive(Debug, Clone, Copy)]
pub struct DynamicFree {
    /// The request.
    pub request: RequestId,
    /// The count of its rows.
    pub count: u32,
    /// In which runs.
    pub when: When,
}

/// In which runs a request is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// In all.
    Always,
    /// In those in which the rows wait for their backward.
    Kept,
    /// In those in which they were let go.
    Evicted,
}

/// A tensor at its address, with the name that the host knows it by.
#[derive(Debug, Clone)]
pub struct Named {
    /// The name it was declared with.
    pub name: String,
    /// The micro-batch, for what exists once per micro-batch.
    pub micro_batch: u32,
    /// Shape and type.
    pub spec: Spec,
    /// Where it lies.
    pub address: Address,
}

/// A program whose tensors have addresses.
#[derive(Debug)]
pub struct CompiledProgram {
    /// `train`, `evaluate`, ….
    pub name: String,
    /// In order.
    pub instructions: Vec<Instruction>,
    /// What the host writes before it starts.
    pub inputs: Vec<Named>,
    /// What the host reads after it ends.
    pub outputs: Vec<Named>,
    /// Messages and collectives that it has.
    pub requests: usize,
    /// What it does with the pipeline's communicator, for ranks that have to agree on an order of messages.
    pub messages: Vec<Call>,
    /// Where in the file what is offloaded waits, by [`HostId`](super::HostId).
    pub host: Vec<u64>,
    /// Numbers of rows that are counted while it runs.
    pub counts: usize,
}

impl CompiledProgram {
    /// Where an input lies that takes these elements.
    pub fn input_for<T: Element>(&self, name: &str, micro_batch: u32, data: &[T]) -> Result<&Address> {
        let found = self.inputs.iter().find(|input| input.name == name && input.micro_batch == micro_batch);
        let Some(Named { address, spec, .. }) = found else {
            return Err(unknown(name, self.inputs.iter().map(|input| input.name.as_str())));
        };
        if address.span != data.len() || spec.dtype != T::DTYPE {
            return Err(Error::ElementCount { name: name.into(), expected: address.span, given: data.len() });
        }
        Ok(address)
    }

    /// An output by its name.
    pub fn output(&self, name: &str) -> Result<&Named> {
        let found = self.outputs.iter().find(|output| output.name == name);
        found.ok_or_else(|| unknown(name, self.outputs.iter().map(|output| output.name.as_str())))
    }
}

/// A tensor that outlives the step.
#[derive(Debug, Clone)]
pub struct Persistent {
    /// Name and role.
    pub label: Label,
    /// Where it lies.
    pub address: Address,
    /// Shape and type.
    pub spec: Spec,
    /// What it holds before the first step.
    pub fill: Initializer,
    /// Whether an instruction of this rank changes it, rather than a message from the rank that does.
    pub changes_here: bool,
}

impl Named {
    /// Whether the host reads and writes it as f32.
    pub fn is_f32(&self) -> bool {
        self.spec.dtype == DType::F32
    }
}

/// Names the nearest of those that there are.
pub(crate) fn unknown<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Error {
    let common = |other: &&str| other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let nearest = names.max_by_key(common).unwrap_or("none, as there are no tensors").to_owned();
    Error::UnknownTensor { name: name.into(), nearest }
}
