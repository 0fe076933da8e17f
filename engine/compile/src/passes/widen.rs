//! Adds scratch for f32 copies of bf16 operands, for CPU kernels that only support f32.
//!
//! - In: a program for the CPU.
//! - Out: the same program, with a piece of scratch for each bf16 operand of an operation that does not [run in
//!   bf16](gapless_graph::Op::runs_in_bf16).
//! - Never: a change to an f32 program.

use candle_core::{DType, Layout};
use gapless_alloc::{Label, Role};
use gapless_kernels::cpu::args::span;
use gapless_kernels::cpu::bf16::widened_layout;

use super::Context;
use crate::error::Result;
use crate::program::{BufferId, BufferKind, Instr, InstrKind, Program};

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    let mut instrs = std::mem::take(&mut program.instrs);
    for instr in &mut instrs {
        let InstrKind::Compute(op) = instr.kind.clone() else { continue };
        if instr.inputs.iter().chain(&instr.outputs).all(|operand| operand.dtype != DType::BF16) {
            continue;
        }
        let what = instr.clone();
        let inputs = instr.inputs.iter_mut().enumerate().filter(|(index, _)| !op.reads_bf16(*index));
        let outputs = instr.outputs.iter_mut().filter(|_| !op.runs_in_bf16());
        for operand in inputs.map(|(_, input)| input).chain(outputs) {
            if operand.dtype == DType::BF16 && operand.overwritten_by.is_none() {
                let piece = room(program, &what, &operand.layout);
                operand.widened = Some(piece);
                instr.workspace.push(piece);
            }
        }
    }
    program.instrs = instrs;
    Ok(())
}

/// Adds a scratch buffer for an f32 copy of the elements of a layout.
fn room(program: &mut Program, instr: &Instr, layout: &Layout) -> BufferId {
    let name = instr.kind.name();
    let tensor = format!("{}/{name} in f32 of micro-batch {}", instr.layer, instr.micro_batch);
    let label = Label { tensor, op: name.into(), layer: instr.layer.to_string(), role: Role::Workspace };
    program.add((span(&widened_layout(layout)) * size_of::<f32>()) as u64, label, BufferKind::Temporary)
}
