//! Programs as text, one instruction per line, for snapshot tests of passes and for `GAPLESS_DUMP`.
//!
//! ```text
//! program train: 2 buffers, 1 instruction
//!   %0 tokens: 32 bytes, input, from the host
//!   %1 embed/embedding.0 of micro-batch 0: 256 bytes, activation
//! 0F0:
//!   %1 f32[8,8] = embedding %2 f32[16,8], %0 u32[8] @ embed, micro-batch 0
//! ```
//!
//! An operand that an output overwrites ends in `!`. An operand at an offset in its buffer ends in `+start`. An operand
//! whose strides are not contiguous ends in `/strides`. `+=` means that the instruction accumulates into the output.

use std::fmt::{self, Display, Formatter};

use crate::program::{Buffer, BufferKind, Instr, InstrKind, Operand, Program};

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (buffers, steps) = (self.buffers.len(), self.instrs.len());
        writeln!(f, "program {}: {buffers} buffers, {steps} instructions", self.name)?;
        for (id, buffer) in self.buffers.iter().enumerate() {
            writeln!(f, "  %{id} {buffer}")?;
        }
        let mut next = 0;
        for part in &self.parts {
            // Instructions that belong to no part.
            self.instrs[next..part.instrs.start].iter().try_for_each(|instr| writeln!(f, "  {instr}"))?;
            writeln!(f, "{}:", part.name)?;
            self.instrs[part.instrs.clone()].iter().try_for_each(|instr| writeln!(f, "  {instr}"))?;
            next = part.instrs.end;
        }
        self.instrs[next..].iter().try_for_each(|instr| writeln!(f, "  {instr}"))?;
        for output in &self.outputs {
            writeln!(f, "{} = {}", output.name, output.operand)?;
        }
        Ok(())
    }
}

impl Display for Buffer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let held = match self.kind {
            BufferKind::Temporary => "",
            BufferKind::Persistent { .. } => ", kept between steps",
            BufferKind::Cache => ", kept between runs",
            BufferKind::Input => ", from the host",
            BufferKind::Output => ", for the host",
        };
        let rows = if self.dynamic_rows.is_some() { ", dynamic rows" } else { "" };
        write!(f, "{}: {} bytes, {}{held}{rows}", self.label.tensor, self.bytes, self.label.role.name())
    }
}

impl Display for Instr {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (index, output) in self.outputs.iter().enumerate() {
            write!(f, "{}{output}", if index > 0 { ", " } else { "" })?;
        }
        let sign = if self.accumulate != 0 { " += " } else { " = " };
        write!(f, "{}{}", if self.outputs.is_empty() { "" } else { sign }, self.kind.name())?;
        match &self.kind {
            InstrKind::Send(message) => write!(f, " to rank {}", message.peer)?,
            InstrKind::Receive(message) => write!(f, " from rank {}", message.peer)?,
            InstrKind::Collective(_, request) | InstrKind::Finish(request) => write!(f, " #{request}")?,
            InstrKind::Wait(message) => write!(f, " #{}", message.request)?,
            InstrKind::Offload(id) | InstrKind::Offloaded(id) | InstrKind::Fetch(id) | InstrKind::Fetched(id) => {
                write!(f, " @{}", id.index())?
            }
            InstrKind::Vote(count) | InstrKind::ApplyVote(count) => write!(f, " rows {count}")?,
            InstrKind::Compute(_) => {}
        }
        for (index, input) in self.inputs.iter().enumerate() {
            write!(f, "{}{input}", if index > 0 { ", " } else { " " })?;
        }
        for (index, piece) in self.workspace.iter().enumerate() {
            write!(f, "{}%{}", if index > 0 { ", " } else { " scratch " }, piece.index())?;
        }
        let layer = if self.layer.is_empty() { "the model" } else { &self.layer };
        write!(f, " @ {layer}, micro-batch {}", self.micro_batch)?;
        f.write_str(if self.rematerialized { ", recomputed" } else { "" })?;
        self.defines_count.map_or(Ok(()), |count| write!(f, ", makes rows {count}"))?;
        self.predicate.map_or(Ok(()), |count| write!(f, ", if rows {count} were evicted"))
    }
}

impl Display for Operand {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let list = |numbers: &[usize]| numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        write!(f, "%{} {}[{}]", self.buffer.index(), self.dtype.as_str(), list(self.layout.dims()))?;
        if self.layout.start_offset() != 0 {
            write!(f, "+{}", self.layout.start_offset())?;
        }
        if !self.layout.is_contiguous() {
            write!(f, "/{}", list(self.layout.stride()))?;
        }
        f.write_str(if self.overwritten_by.is_some() { "!" } else { "" })
    }
}
