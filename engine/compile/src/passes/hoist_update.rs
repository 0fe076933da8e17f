//! Moves operations of the update to an earlier position if this frees memory earlier.
//!
//! - In: a program whose update follows all actions.
//! - Out: the same program, with some operations of the update moved to right after the last instruction that they
//!   depend on. These operations free at least as many bytes as they allocate. They are sums of a weight's gradients,
//!   and updates of parameters that wait only for their own gradient (gradient release, as in LOMO, Lv et al., arXiv
//!   2306.09782). Instructions that touch the same bytes keep their order, so no result changes.
//! - Never: moves a message or a collective, because the ranks rely on the order of these.

use super::{Context, UPDATE};
use crate::error::Result;
use crate::program::{BufferKind, Instr, InstrKind, Program};

/// Allocations of at most this size, such as scalars, do not prevent a move.
const SMALL: u64 = 4096;

/// The anchors of the last instruction that writes a buffer and of the last that touches it.
#[derive(Debug, Clone, Copy, Default)]
struct Touched {
    written: Option<usize>,
    touched: Option<usize>,
}

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    let Some(update) = program.parts.iter().rev().find(|part| part.name == UPDATE).map(|part| part.instrs.clone())
    else {
        return Ok(());
    };
    let mut last_use = vec![0; program.buffers.len()];
    let mut first_use = vec![usize::MAX; program.buffers.len()];
    for (index, instr) in program.instrs.iter().enumerate() {
        for buffer in buffers(instr) {
            last_use[buffer] = index;
            first_use[buffer] = first_use[buffer].min(index);
        }
    }
    let mut touched = vec![Touched::default(); program.buffers.len()];
    // The anchor of a moved instruction is the instruction after which it is placed. An instruction that stays is its
    // own anchor.
    let mut anchors: Vec<usize> = (0..program.instrs.len()).collect();
    for (index, instr) in program.instrs.iter().enumerate() {
        if update.contains(&index) && matches!(instr.kind, InstrKind::Compute(_)) {
            let size = |&buffer: &usize| program.buffers[buffer].bytes;
            let is_free = |&buffer: &usize| matches!(program.buffers[buffer].kind, BufferKind::Temporary);
            let is_always = |&buffer: &usize| matches!(program.buffers[buffer].kind, BufferKind::Persistent { .. });
            let made = outputs(instr).filter(|&buffer| first_use[buffer] == index && !is_always(&buffer));
            // Scratch counts as allocated, because it moves along, to a position where more bytes may be live.
            let scratch: u64 = instr.workspace.iter().map(|buffer| size(&buffer.index())).sum();
            let made: u64 = scratch + made.map(|buffer| size(&buffer)).sum::<u64>();
            let mut freed: Vec<usize> = inputs(instr).filter(|&b| last_use[b] == index).filter(is_free).collect();
            freed.sort_unstable();
            freed.dedup();
            if made <= SMALL || made <= freed.iter().map(size).sum() {
                let read = inputs(instr).filter_map(|buffer| touched[buffer].written);
                let written = outputs(instr).filter_map(|buffer| touched[buffer].touched);
                anchors[index] = read.chain(written).max().unwrap_or(index);
            }
        }
        let anchor = anchors[index];
        for buffer in inputs(instr) {
            touched[buffer].touched = touched[buffer].touched.max(Some(anchor));
            // Operands of a message or collective are in use until the matching wait, so the wait counts as a write.
            if !matches!(instr.kind, InstrKind::Compute(_)) {
                touched[buffer].written = touched[buffer].written.max(Some(anchor));
            }
        }
        for buffer in outputs(instr) {
            touched[buffer].touched = touched[buffer].touched.max(Some(anchor));
            touched[buffer].written = touched[buffer].written.max(Some(anchor));
        }
    }
    // Each instruction follows its anchor. Instructions with the same anchor keep their order.
    let mut order: Vec<usize> = (0..anchors.len()).collect();
    order.sort_by_key(|&index| (anchors[index], index));
    program.rearrange(&order);
    Ok(())
}

fn inputs(instr: &Instr) -> impl Iterator<Item = usize> + '_ {
    instr.inputs.iter().map(|operand| operand.buffer.index())
}

fn outputs(instr: &Instr) -> impl Iterator<Item = usize> + '_ {
    instr.outputs.iter().map(|operand| operand.buffer.index())
}

fn buffers(instr: &Instr) -> impl Iterator<Item = usize> + '_ {
    inputs(instr).chain(outputs(instr))
}
