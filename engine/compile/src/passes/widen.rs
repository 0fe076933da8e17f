//! Room for copies in f32 of what is stored in bf16, for kernels of the CPU that know f32 alone.
//!
//! In: a program for the CPU. Out: the same with a piece of scratch for each operand of bf16 of an operation that does not
//! [run in bf16](gapless_graph::Op::runs_in_bf16), and sums over ranks of copies in f32, made in front of them. Never: a change to
//! a program of f32.

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_alloc::{Label, Role};
use gapless_graph::ops::{Cast, Collective};
use gapless_kernels::cpu::args::span;
use gapless_kernels::cpu::bf16::widened_layout;

use super::Context;
use crate::error::Result;
use crate::program::{BufferId, BufferKind, Instr, InstrKind, Operand, Program};

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    widen_sums(program);
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
                let piece = room(program, &what, &operand.layout, Role::Workspace);
                operand.widened = Some(piece);
                instr.workspace.push(piece);
            }
        }
    }
    program.instrs = instrs;
    Ok(())
}

/// A buffer for what a layout shows, in f32.
fn room(program: &mut Program, of: &Instr, layout: &Layout, role: Role) -> BufferId {
    let name = of.kind.name();
    let tensor = format!("{}/{name} in f32 of micro-batch {}", of.layer, of.micro_batch);
    let label = Label { tensor, op: name.into(), layer: of.layer.to_string(), role };
    program.add((span(&widened_layout(layout)) * size_of::<f32>()) as u64, label, BufferKind::No)
}

/// Communicators on the host add in f32: what they add in bf16 is copied in front, and rounded behind.
fn widen_sums(program: &mut Program) {
    let is_sum = |instr: &Instr| match instr.kind {
        InstrKind::Collective(Collective::AllReduce { .. } | Collective::ReduceScatter { .. }, _) => {
            instr.outputs[0].dtype == DType::BF16
        }
        _ => false,
    };
    if !program.instrs.iter().any(is_sum) {
        return;
    }
    // By request: the buffers that stand for those of bf16, and the cast of the sum.
    let mut under_way: Vec<Option<(Vec<Operand>, Instr)>> = vec![None; program.requests];
    let mut starts = Vec::new();
    let mut instrs = Vec::new();
    for mut instr in std::mem::take(&mut program.instrs) {
        starts.push(instrs.len());
        match instr.kind {
            InstrKind::Collective(collective, request) if is_sum(&instr) => {
                let wide = |program: &mut Program, operand: &Operand| {
                    let buffer = room(program, &instr, &operand.layout, Role::Communication);
                    let layout = Layout::contiguous(operand.layout.shape().clone());
                    Operand { buffer, layout, dtype: DType::F32, overwritten_by: None, widened: None }
                };
                let (from, to) = (instr.inputs[0].clone(), instr.outputs[0].clone());
                let input = wide(program, &from);
                let is_one = matches!(collective, Collective::AllReduce { .. });
                let output = if is_one { input.clone() } else { wide(program, &to) };
                let cast = |dtype, from: Operand, to: Operand| {
                    let (kind, layer) = (InstrKind::Compute(Arc::new(Cast { dtype })), instr.layer.clone());
                    Instr::plain(kind, vec![from], vec![to], instr.micro_batch, layer)
                };
                let from = Operand { overwritten_by: None, ..from };
                instrs.push(cast(DType::F32, from, input.clone()));
                let back = cast(DType::BF16, output.clone(), to);
                under_way[request] = Some((vec![input.clone(), output.clone()], back));
                instr.inputs[0] = Operand { overwritten_by: is_one.then_some(0), ..input };
                instr.outputs[0] = output;
                instrs.push(instr);
            }
            InstrKind::Finish(request) => match under_way[request].take() {
                Some((operands, back)) => {
                    instr.inputs = operands;
                    instrs.extend([instr, back]);
                }
                None => instrs.push(instr),
            },
            _ => instrs.push(instr),
        }
    }
    starts.push(instrs.len());
    program.instrs = instrs;
    for part in &mut program.parts {
        part.instrs = starts[part.instrs.start]..starts[part.instrs.end];
    }
}
