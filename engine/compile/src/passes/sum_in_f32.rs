//! Computes sums over ranks in f32, as the communicator requires ([`Collective`](gapless_communicator::Collective)). A
//! bf16 tensor is copied to f32 before it is summed, and the sum is rounded once.
//!
//! - In: a program.
//! - Out: the same program with an f32 buffer for each operand of a bf16 sum, and the copies.
//! - Never: a change to an f32 program.

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_alloc::{Label, Role};
use gapless_graph::ops::{Cast, Collective};

use super::Context;
use crate::error::Result;
use crate::program::{BufferKind, Instr, InstrKind, Operand, Program};

/// Adds an f32 buffer for an operand, and returns the operand in that buffer.
fn wide(program: &mut Program, instr: &Instr, operand: &Operand) -> Operand {
    let name = instr.kind.name();
    let tensor = format!("{}/{name} in f32 of micro-batch {}", instr.layer, instr.micro_batch);
    let label = Label { tensor, op: name.into(), layer: instr.layer.to_string(), role: Role::Communication };
    let layout = Layout::contiguous(operand.layout.shape().clone());
    let bytes = (layout.shape().elem_count() * size_of::<f32>()) as u64;
    let buffer = program.add(bytes, label, BufferKind::Temporary);
    Operand { buffer, layout, dtype: DType::F32, overwritten_by: None, widened: None }
}

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    let is_sum = |instr: &Instr| match instr.kind {
        InstrKind::Collective(Collective::AllReduce { .. } | Collective::ReduceScatter { .. }, _) => {
            instr.outputs[0].dtype == DType::BF16
        }
        _ => false,
    };
    if !program.instrs.iter().any(is_sum) {
        return Ok(());
    }
    // By request: the f32 operands that replace the bf16 operands, and the instruction that rounds the sum.
    let mut under_way: Vec<Option<(Vec<Operand>, Instr)>> = vec![None; program.requests];
    let mut starts = Vec::new();
    let mut instrs = Vec::new();
    for mut instr in std::mem::take(&mut program.instrs) {
        starts.push(instrs.len());
        match instr.kind {
            InstrKind::Collective(collective, request) if is_sum(&instr) => {
                let (from, to) = (instr.inputs[0].clone(), instr.outputs[0].clone());
                let input = wide(program, &instr, &from);
                let is_one = matches!(collective, Collective::AllReduce { .. });
                let output = if is_one { input.clone() } else { wide(program, &instr, &to) };
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
    Ok(())
}
