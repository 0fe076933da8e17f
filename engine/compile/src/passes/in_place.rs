//! Lets outputs overwrite inputs that are not read again, where the operation supports this.
//!
//! - In: a program in which every value has its own buffer.
//! - Out: the same program with fewer buffers. An output may overwrite an input of the same size if the input is a
//!   temporary of this program, is not used later, and is not another operand of the same operation.
//! - Never: overwrites data that the host, another rank, or a collective in flight still reads.

use super::Context;
use crate::error::Result;
use crate::program::{BufferId, BufferKind, Instr, InstrKind, Operand, Program};

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    let mut last_use = last_uses(program);
    // For each buffer, the buffer that has replaced it.
    let mut taken_over: Vec<BufferId> = (0..program.buffers.len() as u32).map(BufferId).collect();
    let mut instrs = std::mem::take(&mut program.instrs);
    for (index, instr) in instrs.iter_mut().enumerate() {
        each_operand(instr, |operand| operand.buffer = taken_over[operand.buffer.index()]);
        let InstrKind::Compute(op) = instr.kind.clone() else { continue };
        for output in 0..instr.outputs.len() {
            let made = instr.outputs[output].buffer;
            if instr.accumulate >> output & 1 == 1 || instr.inputs.iter().any(|i| i.overwritten_by == Some(output)) {
                continue;
            }
            let mut candidates = op.inplace().iter().filter(|pair| pair.1 == output).map(|pair| pair.0);
            let is_free = |&input: &usize| {
                let operand = instr.inputs.get(input);
                operand.is_some_and(|operand| last_use[operand.buffer.index()] == index)
                    && can_take(program, instr, input, output)
            };
            if let Some(input) = candidates.find(is_free) {
                let bytes = instr.inputs[input].buffer;
                instr.inputs[input].overwritten_by = Some(output);
                instr.outputs[output].buffer = bytes;
                taken_over[made.index()] = bytes;
                last_use[bytes.index()] = last_use[made.index()];
                program.buffers[bytes.index()].kind = program.buffers[made.index()].kind.clone();
            }
        }
    }
    program.instrs = instrs;
    for output in &mut program.outputs {
        output.operand.buffer = taken_over[output.operand.buffer.index()];
    }
    Ok(())
}

/// True if an output may take over the whole buffer of an input.
fn can_take(program: &Program, instr: &Instr, input: usize, output: usize) -> bool {
    let (operand, made) = (&instr.inputs[input], &instr.outputs[output]);
    let (from, to) = (&program.buffers[operand.buffer.index()], &program.buffers[made.buffer.index()]);
    let is_whole = operand.layout.is_contiguous() && operand.layout.start_offset() == 0;
    let is_alone = instr.inputs.iter().filter(|other| other.buffer == operand.buffer).count() == 1;
    let is_equal = from.bytes == to.bytes && from.dynamic_rows == to.dynamic_rows && operand.dtype == made.dtype;
    is_whole && is_alone && is_equal && matches!(from.kind, BufferKind::Temporary) && operand.overwritten_by.is_none()
}

/// Returns the last instruction that touches each buffer. A buffer that the host reads counts as used to the end.
fn last_uses(program: &Program) -> Vec<usize> {
    let mut last = vec![0; program.buffers.len()];
    for (index, instr) in program.instrs.iter().enumerate() {
        instr.inputs.iter().chain(&instr.outputs).for_each(|operand| last[operand.buffer.index()] = index);
    }
    program.outputs.iter().for_each(|output| last[output.operand.buffer.index()] = usize::MAX);
    last
}

fn each_operand(instr: &mut Instr, f: impl FnMut(&mut Operand)) {
    instr.inputs.iter_mut().chain(&mut instr.outputs).for_each(f);
}
