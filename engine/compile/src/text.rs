//! A program as text, one instruction a line: what golden tests of passes compare, and what `GAPLESS_DUMP` prints.
//!
//! ```text
//! program train: 2 buffers, 1 instruction
//!   %0 tokens: 32 bytes, input, from the host
//!   %1 embed/embedding.0 of micro-batch 0: 256 bytes, activation
//! 0F0:
//!   %1 f32[8,8] = embedding %2 f32[16,8], %0 u32[8] @ embed, micro-batch 0
//! ```
//!
//! An operand that an output overwrites ends in `!`, one that shows only a part of its buffer, or in other strides, in
//! `+start` and `/strides`. `+=` adds to the output.

use std::fmt::{self, Display, Formatter};

use crate::program::{Buffer, Held, Operand, Program, Step, Work};

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (buffers, steps) = (self.buffers.len(), self.steps.len());
        writeln!(f, "program {}: {buffers} buffers, {steps} instructions", self.name)?;
        for (id, buffer) in self.buffers.iter().enumerate() {
            writeln!(f, "  %{id} {buffer}")?;
        }
        let mut next = 0;
        for part in &self.parts {
            // What no part has stands by itself.
            self.steps[next..part.steps.start].iter().try_for_each(|step| writeln!(f, "  {step}"))?;
            writeln!(f, "{}:", part.name)?;
            self.steps[part.steps.clone()].iter().try_for_each(|step| writeln!(f, "  {step}"))?;
            next = part.steps.end;
        }
        self.steps[next..].iter().try_for_each(|step| writeln!(f, "  {step}"))?;
        for output in &self.outputs {
            writeln!(f, "{} = {}", output.name, output.operand)?;
        }
        Ok(())
    }
}

impl Display for Buffer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let held = match self.held {
            Held::No => "",
            Held::Always { .. } => ", kept between steps",
            Held::FromStart => ", from the host",
            Held::ToEnd => ", for the host",
        };
        let rows = if self.counted.is_some() { ", dynamic rows" } else { "" };
        write!(f, "{}: {} bytes, {}{held}{rows}", self.label.tensor, self.bytes, self.label.role.name())
    }
}

impl Display for Step {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (index, output) in self.outputs.iter().enumerate() {
            write!(f, "{}{output}", if index > 0 { ", " } else { "" })?;
        }
        let sign = if self.accumulate != 0 { " += " } else { " = " };
        write!(f, "{}{}", if self.outputs.is_empty() { "" } else { sign }, self.work.name())?;
        match &self.work {
            Work::Send(message) => write!(f, " to rank {}", message.peer)?,
            Work::Receive(message) => write!(f, " from rank {}", message.peer)?,
            Work::Collective(_, request) | Work::Finish(request) => write!(f, " #{request}")?,
            Work::Wait(message) => write!(f, " #{}", message.request)?,
            Work::Offload(id) | Work::Fetch(id) => write!(f, " @{}", id.index())?,
            Work::Offer(count) | Work::Settle(count) => write!(f, " rows {count}")?,
            Work::Compute(_) => {}
        }
        for (index, input) in self.inputs.iter().enumerate() {
            write!(f, "{}{input}", if index > 0 { ", " } else { " " })?;
        }
        for (index, piece) in self.workspace.iter().enumerate() {
            write!(f, "{}%{}", if index > 0 { ", " } else { " scratch " }, piece.index())?;
        }
        let layer = if self.layer.is_empty() { "the model" } else { &self.layer };
        write!(f, " @ {layer}, micro-batch {}", self.micro_batch)?;
        f.write_str(if self.again { ", recomputed" } else { "" })?;
        self.counts.map_or(Ok(()), |count| write!(f, ", makes rows {count}"))?;
        self.only_if.map_or(Ok(()), |count| write!(f, ", if rows {count} were evicted"))
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
