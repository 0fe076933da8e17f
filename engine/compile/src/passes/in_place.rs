//! Lets outputs take over the bytes of inputs that nobody reads any more, where the operation allows it.
//!
//! In: a program in which every value has a buffer of its own. Out: the same program with fewer buffers. An input is taken over
//! as a whole: by an output of as many bytes, if it is no other operand of the operation, was made by this program, and is used
//! by nothing later. Never: what the host, another rank, or a collective under way still needs.

use super::Context;
use crate::error::Result;
use crate::program::{BufferId, Held, Operand, Program, Step, Work};

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    let mut last_use = last_uses(program);
    // The buffer that stands for each, once its bytes are another's.
    let mut taken_over: Vec<BufferId> = (0..program.buffers.len() as u32).map(BufferId).collect();
    let mut steps = std::mem::take(&mut program.steps);
    for (index, step) in steps.iter_mut().enumerate() {
        each_operand(step, |operand| operand.buffer = taken_over[operand.buffer.index()]);
        let Work::Compute(op) = step.work.clone() else { continue };
        for output in 0..step.outputs.len() {
            let made = step.outputs[output].buffer;
            if step.accumulate >> output & 1 == 1 || step.inputs.iter().any(|i| i.overwritten_by == Some(output)) {
                continue;
            }
            let mut candidates = op.may_overwrite().iter().filter(|pair| pair.1 == output).map(|pair| pair.0);
            let is_free = |&input: &usize| {
                last_use[step.inputs[input].buffer.index()] == index && can_take(program, step, input, made)
            };
            if let Some(input) = candidates.find(is_free) {
                let bytes = step.inputs[input].buffer;
                step.inputs[input].overwritten_by = Some(output);
                step.outputs[output].buffer = bytes;
                taken_over[made.index()] = bytes;
                last_use[bytes.index()] = last_use[made.index()];
                program.buffers[bytes.index()].held = program.buffers[made.index()].held.clone();
            }
        }
    }
    program.steps = steps;
    for output in &mut program.outputs {
        output.operand.buffer = taken_over[output.operand.buffer.index()];
    }
    Ok(())
}

/// Whether an output's buffer may be the whole of an input's.
fn can_take(program: &Program, step: &Step, input: usize, made: BufferId) -> bool {
    let operand = &step.inputs[input];
    let (from, to) = (&program.buffers[operand.buffer.index()], &program.buffers[made.index()]);
    let is_whole = operand.layout.is_contiguous() && operand.layout.start_offset() == 0;
    let is_alone = step.inputs.iter().filter(|other| other.buffer == operand.buffer).count() == 1;
    let is_equal = from.bytes == to.bytes && from.counted == to.counted;
    is_whole && is_alone && is_equal && matches!(from.held, Held::No) && operand.overwritten_by.is_none()
}

/// The last instruction that touches each buffer; what the host reads is never given up.
fn last_uses(program: &Program) -> Vec<usize> {
    let mut last = vec![0; program.buffers.len()];
    for (index, step) in program.steps.iter().enumerate() {
        step.inputs.iter().chain(&step.outputs).for_each(|operand| last[operand.buffer.index()] = index);
    }
    program.outputs.iter().for_each(|output| last[output.operand.buffer.index()] = usize::MAX);
    last
}

fn each_operand(step: &mut Step, f: impl FnMut(&mut Operand)) {
    step.inputs.iter_mut().chain(&mut step.outputs).for_each(f);
}
