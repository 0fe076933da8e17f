//! A run of a program on a device, part by part.
//!
//! - In: the parts, and a function that starts the launches of each part.
//! - Out: launches in order. Between the parts, messages are exchanged, row counts are read and dynamic buffers are
//!   placed.
//! - Never: a decision about dynamic buffers, which [`Routed`](crate::routed::Routed) makes as on the CPU. Never a
//!   wait for the device before the messages that the device waits for have arrived.

use std::ops::Range;

use candle_core::{DType, Device as CandleDevice, Tensor};
use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_compile::{Executable, InstrKind, ProgramId};
use gapless_kernels::Stream;
use gapless_kernels::cpu::args::Address;

use super::device::{Device, DeviceError};
use super::place::{ALIGNMENT, Part, Place};
use super::slots::{Located, Slots};
use super::staging::{Exchanging, Staging};
use crate::error::{Error, Result};
use crate::routed::{Refusal, find_nonfinite_origin};
use crate::session::RunOptions;

/// Everything that is needed to run programs on a device.
#[derive(Debug)]
pub(super) struct Runner {
    /// Dropped first, because communicators may use the device's stream and memory.
    pub staging: Staging,
    pub device: Box<dyn Device>,
    pub place: Place,
    pub slots: Slots,
}

impl Runner {
    /// Runs the parts of a program. Calls `launch` for each part that is not skipped; this function must start the
    /// part's launches, if there are any. If a part is a message without launches, the message has been started
    /// before the call.
    pub fn go_through<L>(
        &mut self,
        executable: &Executable,
        id: ProgramId,
        options: RunOptions,
        parts: &[Part<L>],
        mut launch: impl FnMut(&mut Run<'_>, &Part<L>) -> Result<()>,
    ) -> Result<()> {
        let Self { staging, device, place, slots } = self;
        let (device, program) = (&mut **device, &executable.programs()[id.0]);
        device.write(place.key, &Stream::new(options.seed, options.step, 0).key().to_ne_bytes())?;
        slots.routed.begin(executable.arena_bytes().next_multiple_of(ALIGNMENT));
        let exchanging = staging.run(id.0)?;
        let mut run = Run { device, place: *place, slots, exchanging, program, step: options.step };
        let mut go = |part: &Part<L>| {
            let instructions = &program.instructions[part.span.clone()];
            if run.slots.routed.is_left_out(&instructions[0]) {
                return Ok(());
            }
            if part.checks_copies {
                run.finish()?;
            }
            run.find_places(part.span.clone())?;
            match part.launches {
                Some(_) => run.slots.changes().map_or(Ok(()), |(at, slots)| run.write(at, &slots))?,
                None => instructions.iter().try_for_each(|instruction| run.exchange(instruction))?,
            }
            launch(&mut run, part)?;
            instructions.last().map_or(Ok(()), |last| run.count(last))
        };
        let ran = parts.iter().try_for_each(&mut go).and_then(|()| run.finish());
        run.exchanging.end(ran)
    }
}

/// A run of a program.
pub(super) struct Run<'r> {
    pub device: &'r mut dyn Device,
    place: Place,
    slots: &'r mut Slots,
    exchanging: Exchanging<'r>,
    program: &'r CompiledProgram,
    step: u64,
}

impl Run<'_> {
    /// Waits until all messages that the device waits for have arrived. Must be called before the host waits for the
    /// device.
    pub fn settle(&mut self) -> Result<()> {
        self.exchanging.settle()
    }

    /// Returns the current addresses of operands.
    pub fn located(&self) -> Located<'_> {
        self.slots.located()
    }

    /// Sets all bytes of the ranges that are dead after an instruction, which has been started. Floats of such bytes are NaN.
    pub fn poison(&mut self, instruction: &Instruction) -> Result<()> {
        let dead = instruction.dead_after.iter().cloned().chain(self.slots.routed.released(instruction));
        for Range { start, end } in dead.collect::<Vec<_>>() {
            self.device.fill(self.place.base + start, (end - start) as usize, u8::MAX)?;
        }
        Ok(())
    }

    /// Adds the program's name to an error of a recorded program. The driver does not say which of the launches has
    /// failed.
    pub fn at_once(&self, error: DeviceError) -> DeviceError {
        if matches!(error, DeviceError::Offload { .. }) {
            return error.during(&self.program.name);
        }
        error.during(&format!("{}, one of its kernels (find it with compute-sanitizer)", self.program.name))
    }

    /// Waits for all work on the device.
    fn finish(&mut self) -> Result<()> {
        let settled = self.settle();
        // The driver reports the failure of a kernel at a later call. This call is the one that finds it.
        self.device.wait().map_err(|error| self.at_once(error))?;
        settled
    }

    /// Copies bytes to the device, after all work that was started before.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        self.settle()?;
        Ok(self.device.write(address, bytes).map_err(|error| self.at_once(error))?)
    }

    /// Reads bytes from the device, after all work that was started before.
    fn read<const N: usize>(&mut self, address: u64) -> Result<[u8; N]> {
        self.settle()?;
        let mut bytes = [0; N];
        self.device.read(address, &mut bytes).map_err(|error| self.at_once(error))?;
        Ok(bytes)
    }

    /// Places the dynamic buffers of instructions, in order. The buffers of earlier instructions are released before,
    /// although the device has not run these instructions yet. This is valid because the device runs the instructions
    /// in the same order.
    fn find_places(&mut self, span: Range<usize>) -> Result<()> {
        for instruction in &self.program.instructions[span.clone()] {
            if let Err(refusal) = self.slots.routed.place(instruction) {
                return Err(self.refused(refusal, instruction, span.start));
            }
            if let Some(end) = self.slots.routed.outside_end() {
                self.place.reach(self.device, end).map_err(|error| error.during(&instruction.describe()))?;
            }
            self.slots.note(instruction);
            self.slots.routed.release(instruction);
        }
        Ok(())
    }

    /// Returns the error for an instruction whose buffers find no room. The instructions before `begun` have run. If
    /// one of these instructions has an output that is not finite, the error reports that instruction instead.
    fn refused(&mut self, refusal: Refusal, instruction: &Instruction, begun: usize) -> Error {
        if let Err(error) = self.settle() {
            return error;
        }
        let located = self.slots.located();
        let is_finite = |planned: &Address| is_finite(self.device, located, planned).unwrap_or(true);
        match find_nonfinite_origin(self.program, begun, is_finite) {
            Some(index) => {
                let culprit = self.program.instructions[index].describe();
                Error::NonFinite { step: self.step, loss: f32::NAN, culprit }
            }
            None => refusal.error(instruction.describe()),
        }
    }

    /// Runs an instruction without launches.
    fn exchange(&mut self, instruction: &Instruction) -> Result<()> {
        match instruction.kind {
            // An operation on empty tensors has no launches.
            InstrKind::Compute(_) => {}
            InstrKind::Vote(_) => {
                let without = self.slots.routed.try_reserve(instruction);
                let (at, _) = self.located().of(&instruction.outputs[0]);
                self.write(at, &without.to_ne_bytes())?;
            }
            InstrKind::ApplyVote(_) => {
                let (at, _) = self.located().of(&instruction.inputs[0]);
                let without = f32::from_ne_bytes(self.read(at)?);
                self.slots.routed.apply_vote(instruction, without);
                self.slots.note(instruction);
            }
            _ => self.exchanging.exchange(instruction, self.device, self.slots.located())?,
        }
        Ok(())
    }

    /// Reads the row count if the last instruction of a part has computed one.
    fn count(&mut self, instruction: &Instruction) -> Result<()> {
        let Some(count) = instruction.defines_count else { return Ok(()) };
        let (at, bytes) = self.located().of(&instruction.outputs[0]);
        let rows = u32::from_ne_bytes(self.read(at + (bytes - size_of::<u32>()) as u64)?);
        self.slots.routed.count(count, rows);
        Ok(())
    }
}

/// True if all elements of a tensor are finite, or if the tensor does not have a float type.
pub(super) fn is_finite(device: &dyn Device, located: Located<'_>, address: &Address) -> Result<bool> {
    let (at, len) = located.of(address);
    if !address.dtype.is_float() || len == 0 {
        return Ok(true);
    }
    let mut bytes = vec![0; len];
    device.read(at, &mut bytes)?;
    let count = len / address.dtype.size_in_bytes();
    let numbers = Tensor::from_raw_buffer(&bytes, address.dtype, &[count], &CandleDevice::Cpu)?;
    Ok(numbers.to_dtype(DType::F64)?.to_vec1::<f64>()?.iter().all(|x| x.is_finite()))
}
