//! The addresses at which programs run on a device, and the launches with these addresses.
//!
//! - In: a compiled program, and the addresses of the arena, the key, the tickets and the slots.
//! - Out: the program's parts. Each part is a sequence of launches. Between two parts, the host must do something,
//!   such as send a message.
//! - Never: a call of the device.

use std::collections::HashSet;
use std::ops::Range;

use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_compile::{Executable, InstrKind, OffloadId};
use gapless_graph::launches;
use gapless_kernels::Spec;
use gapless_kernels::cpu::args::Address;
use gapless_kernels::cuda::launch::together;
use gapless_kernels::cuda::{Features, HostCopy, Launch, Operand, Operands, Random};

use super::device::{Device, DeviceError};
use super::refused::Refused;
use super::slots::slot;
use crate::error::Result;

/// Launches, each with the index of the instruction that it belongs to.
pub(super) type Launches = Vec<(usize, Launch)>;

/// A part of a program: consecutive instructions that run without intervention by the host.
#[derive(Debug)]
pub(super) struct Part<L> {
    /// The indices of the part's instructions.
    pub span: Range<usize>,
    /// The launches of the part's instructions. `None` means that there is nothing to launch, as for a message to
    /// another rank or an operation on empty tensors.
    pub launches: Option<L>,
    /// True if the part changes tensors that outlive the step, and values were copied back from the offload file before
    /// it. The host first checks that these copies have succeeded.
    pub checks_copies: bool,
}

impl<L> Part<L> {
    /// Converts the launches with `f`. Returns an error if `f` does.
    pub fn try_map<M>(self, f: impl FnOnce(L) -> Result<M>) -> Result<Part<M>> {
        let Self { span, launches, checks_copies } = self;
        Ok(Part { span, launches: launches.map(f).transpose()?, checks_copies })
    }
}

/// The offsets in the arena of the tensors that outlive the step.
#[derive(Debug, Default)]
pub(super) struct Persistents(HashSet<u64>);

impl Persistents {
    /// Returns the persistent tensors of an executable.
    pub fn of(executable: &Executable) -> Self {
        Self(executable.persistent().iter().map(|tensor| tensor.address.offset).collect())
    }

    fn changed_by(&self, instruction: &Instruction) -> bool {
        instruction.outputs.iter().any(|output| self.0.contains(&output.offset))
    }
}

/// The alignment, in bytes, of the reserved range and of each area in it.
pub(super) const ALIGNMENT: u64 = 256;

/// Returns the shapes and types of the tensors at these addresses.
pub(super) fn specs(addresses: &[Address]) -> Vec<Spec> {
    let spec = |address: &Address| Spec { shape: address.layout.shape().clone(), dtype: address.dtype };
    addresses.iter().map(spec).collect()
}

/// Returns the index of a copy of an offloaded activation to or from the host.
fn index_of(id: OffloadId, to_host: bool) -> u32 {
    2 * id.index() as u32 + u32::from(!to_host)
}

/// Returns the index of the copy that an instruction waits for.
fn awaited_copy(instruction: &Instruction) -> Option<u32> {
    match instruction.kind {
        InstrKind::Offloaded(id) => Some(index_of(id, true)),
        InstrKind::Fetched(id) => Some(index_of(id, false)),
        _ => None,
    }
}

/// The addresses at which a program runs, and the indices of this rank's micro-batches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// The start of the arena, which extends to the end of the reserved range.
    pub base: u64,
    /// The address of the key for a step's random numbers, at the start of the reserved range.
    pub key: u64,
    pub tickets: u64,
    /// The table of slots for dynamic rows.
    pub slots: u64,
    pub first_part: u64,
    pub part_stride: u64,
    /// The optional features of the device.
    pub features: Features,
    /// True if activations are offloaded to a file, whose copies can fail.
    pub has_offload_file: bool,
}

impl Place {
    /// A place that does not belong to a device, with the arena at address 0.
    pub const NOWHERE: Self = Self {
        base: 0,
        key: 0,
        tickets: 0,
        slots: 0,
        first_part: 0,
        part_stride: 1,
        features: Features { warpgroups: false, tf32: false },
        has_offload_file: false,
    };

    /// Ensures that the device has memory for the arena up to this offset.
    pub fn reach(&self, device: &mut dyn Device, offset: u64) -> Result<(), DeviceError> {
        device.extend(self.base - self.key + offset)
    }

    /// Divides a program into parts that are as long as possible. Messages to other ranks and votes are parts of
    /// their own. A part ends after an instruction that defines a row count, and before an instruction that changes a
    /// tensor of `persistent` after values were copied back from a file. All instructions of a part have the same
    /// condition for running.
    pub fn parts(&self, program: &CompiledProgram, persistent: &Persistents) -> Result<Vec<Part<Launches>>> {
        let mut refused = Refused::default();
        let parts = self.parts_or(program, persistent, &mut refused);
        refused.check().map(|()| parts)
    }

    /// Divides a program into parts like [`Self::parts`]. Instructions without kernels are left out, and added to
    /// `refused`.
    pub fn parts_or(
        &self,
        program: &CompiledProgram,
        persistent: &Persistents,
        refused: &mut Refused,
    ) -> Vec<Part<Launches>> {
        let are_one =
            |before: &Instruction, at: &Instruction| before.predicate == at.predicate && before.defines_count.is_none();
        self.cut(program, persistent, refused, are_one)
    }

    /// Divides a program into one part per instruction.
    pub fn single_parts(&self, program: &CompiledProgram, persistent: &Persistents) -> Result<Vec<Part<Launches>>> {
        let mut refused = Refused::default();
        let parts = self.cut(program, persistent, &mut refused, |_, _| false);
        refused.check().map(|()| parts)
    }

    fn cut(
        &self,
        program: &CompiledProgram,
        persistent: &Persistents,
        refused: &mut Refused,
        are_one: impl Fn(&Instruction, &Instruction) -> bool,
    ) -> Vec<Part<Launches>> {
        let mut parts: Vec<Part<Launches>> = Vec::new();
        let awaited: HashSet<u32> = program.instructions.iter().filter_map(awaited_copy).collect();
        let mut has_unchecked_copies = false;
        for (index, instruction) in program.instructions.iter().enumerate() {
            let launches = match instruction.kind {
                InstrKind::Offload(id) => Some(self.copy(program, id, &instruction.inputs[0], true, &awaited)),
                InstrKind::Fetch(id) => Some(self.copy(program, id, &instruction.outputs[0], false, &awaited)),
                InstrKind::Offloaded(_) | InstrKind::Fetched(_) => {
                    Some(awaited_copy(instruction).map(Launch::CopyEnd).into_iter().collect())
                }
                InstrKind::Vote(_) | InstrKind::ApplyVote(_) => None,
                _ if instruction.is_exchange() => None,
                _ => match self.of(instruction) {
                    Some(launches) => Some(launches),
                    None => {
                        refused.add(instruction);
                        continue;
                    }
                },
            };
            let launches =
                launches.map(|of_one| of_one.into_iter().map(|launch| (index, launch)).collect::<Launches>());
            has_unchecked_copies |= self.has_offload_file && matches!(instruction.kind, InstrKind::Fetch(_));
            let checks_copies = has_unchecked_copies && persistent.changed_by(instruction);
            has_unchecked_copies &= !checks_copies;
            match (parts.last_mut(), launches) {
                (Some(Part { span, launches: Some(all), .. }), Some(more))
                    if !checks_copies && are_one(&program.instructions[span.end - 1], instruction) =>
                {
                    span.end = index + 1;
                    all.extend(more);
                }
                (_, launches) => parts.push(Part { span: index..index + 1, launches, checks_copies }),
            }
        }
        for part in &mut parts {
            part.launches = part.launches.take().map(together).filter(|launches| !launches.is_empty());
        }
        parts
    }

    /// Returns the copy of an offloaded activation. If the program does not wait for the copy (`awaited`), it ends where it
    /// starts, as on the CPU.
    fn copy(
        &self,
        program: &CompiledProgram,
        id: OffloadId,
        of: &Address,
        to_host: bool,
        awaited: &HashSet<u32>,
    ) -> Vec<Launch> {
        let index = index_of(id, to_host);
        let copy = Launch::Copy(HostCopy {
            index,
            address: self.base + of.offset,
            offset: program.host[id.index()],
            bytes: (of.span * of.dtype.size_in_bytes()) as u64,
            to_host,
        });
        let end = (!awaited.contains(&index)).then_some(Launch::CopyEnd(index));
        [copy].into_iter().chain(end).collect()
    }

    /// Returns the launches of an instruction. Returns `None` if it has no kernels, if its scratch is smaller than
    /// the kernels need, or if it has dynamic rows and a kernel that does not read slots.
    fn of(&self, instruction: &Instruction) -> Option<Vec<Launch>> {
        let InstrKind::Compute(op) = &instruction.kind else { return None };
        let operand = |of: &Address| {
            let address = of.dynamic.map_or(self.base + of.offset, |counted| slot(self.slots, counted));
            Operand { address, layout: of.layout.clone(), dtype: of.dtype }
        };
        let all = |addresses: &[Address]| addresses.iter().map(operand).collect::<Vec<_>>();
        let inputs = instruction.inputs.iter().map(|input| (&input.layout, input.dtype));
        // The program may have been lowered for the CPU, whose scratch is smaller. The kernels would write past the
        // end of it.
        let needed = launches::workspace(&**op, inputs, &specs(&instruction.outputs));
        let given = instruction.workspace.iter().map(|piece| piece.bytes);
        if needed.len() != given.len() || needed.iter().zip(given).any(|(&needed, given)| needed > given) {
            return None;
        }
        let workspace: Vec<u64> = instruction.workspace.iter().map(|piece| self.base + piece.offset).collect();
        let operands = Operands {
            inputs: &all(&instruction.inputs),
            outputs: &all(&instruction.outputs),
            workspace: &workspace,
            accumulate: instruction.accumulate,
            tickets: self.tickets,
            random: Random {
                key: self.key,
                micro_batch: self
                    .first_part
                    .wrapping_add(self.part_stride.wrapping_mul(instruction.micro_batch.into())),
            },
            features: self.features,
        };
        let mut launches = launches::launches(&**op, &operands)?;
        for launch in &mut launches {
            if let Launch::Product(product) = launch {
                product.with_features(self.features);
            }
        }
        // A kernel that does not read slots would use the slot's address as the tensor's.
        let reads_slots = |launch: &Launch| matches!(launch, Launch::Kernel(kernel) if kernel.family.reads_slots());
        let has_slots = operands.inputs.iter().chain(operands.outputs).any(Operand::has_slot);
        (!has_slots || launches.iter().all(reads_slots)).then_some(launches)
    }
}
