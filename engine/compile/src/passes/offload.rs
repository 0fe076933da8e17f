//! Puts activations away behind their last reader of the forward, and brings them back in front of their first of the backward.
//!
//! In: a program whose activations wait for their backward as they are. Out: the same program, in which those that
//! [`recompute`](crate::recompute) names wait in eight bits, or in a file. What is brought back has a buffer of its own. Never:
//! which values these are.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::Layout;
use gapless_alloc::Label;
use gapless_graph::ops::{Compress, Expand, packed};
use gapless_graph::{Op, Phase, Spec};
use gapless_parallel::Kind;

use super::Context;
use crate::error::Result;
use crate::program::{
    BufferId, BufferKind, HostBuffer, HostId, Instr, InstrKind, Operand, Origin, Part, Program, role_of_node,
};
use crate::recompute::Stash;

pub(super) fn run(program: &mut Program, context: &Context<'_>) -> Result<()> {
    let mut pass = Offload { context: *context, behind: BTreeMap::new(), before: BTreeMap::new() };
    for (buffer, origin, stash) in pass.stashed() {
        pass.put_away(program, buffer, origin, stash);
    }
    if !pass.behind.is_empty() {
        pass.insert(program);
    }
    Ok(())
}

struct Offload<'a> {
    context: Context<'a>,
    /// What is laid down behind a step, and in front of one.
    behind: BTreeMap<usize, Vec<Instr>>,
    before: BTreeMap<usize, Vec<Instr>>,
}

impl Offload<'_> {
    /// The buffers of the forward that wait otherwise than as they are.
    fn stashed(&self) -> Vec<(BufferId, Origin, Stash)> {
        let recomputation = self.context.lowering.recomputation;
        let of = |(&origin, &buffer): (&Origin, &BufferId)| {
            let variant = recomputation.of(origin.micro_batch).filter(|_| !origin.is_sum)?;
            let stash = recomputation.variants()[variant].stash(origin.root)?;
            Some((buffer, origin, stash))
        };
        let mut stashed: Vec<_> = self.context.made.iter().filter_map(of).collect();
        stashed.sort_unstable_by_key(|&(buffer, origin, _)| (buffer, origin));
        stashed
    }

    /// Puts one buffer away, if the backward reads it.
    fn put_away(&mut self, program: &mut Program, buffer: BufferId, origin: Origin, stash: Stash) {
        let is_forward = |part: &Part| part.action.is_some_and(|action| action.kind == Kind::Forward);
        let touches = |instr: &Instr| instr.inputs.iter().chain(&instr.outputs).any(|operand| operand.buffer == buffer);
        let uses = |wanted: bool| {
            let parts = program.parts.iter().filter(move |part| is_forward(part) == wanted);
            parts.flat_map(|part| part.instrs.clone()).filter(|&instr| touches(&program.instrs[instr]))
        };
        let (Some(last), Some(first)) = (uses(true).max(), uses(false).min()) else { return };
        let graph = self.context.lowering.graph;
        let (value, micro_batch) = (graph.value(origin.root), origin.micro_batch);
        let maker = graph.producer(origin.root).expect("what is put away is made by a node");
        let from = Operand::new(buffer, value);
        // What comes back.
        let label = program.buffers[buffer.index()].label.clone();
        let back = program.add(value.spec.bytes(), label, BufferKind::No);
        let to = Operand::new(back, value);
        let (away, fetch) = match stash {
            Stash::Compressed => {
                let buffers = packed(&value.spec).map(|spec| {
                    let tensor = format!("{}/{} in 8 bits of micro-batch {micro_batch}", maker.layer, maker.op.name());
                    let (op, layer) = ("compress".into(), maker.layer.to_string());
                    let label = Label { tensor, op, layer, role: role_of_node(Phase::Forward) };
                    program.add(spec.bytes(), label, BufferKind::No)
                });
                let (compress, expand): (Arc<dyn Op>, Arc<dyn Op>) =
                    (Arc::new(Compress), Arc::new(Expand(value.spec.clone())));
                let codes = packed_operands(buffers, &value.spec);
                (
                    (InstrKind::Compute(compress), vec![from], codes.clone()),
                    (InstrKind::Compute(expand), codes, vec![to]),
                )
            }
            Stash::Offloaded => {
                let id = HostId(u32::try_from(program.host.len()).expect("fewer than 2^32 buffers"));
                program.host.push(HostBuffer { bytes: value.spec.bytes() });
                ((InstrKind::Offload(id), vec![from], vec![]), (InstrKind::Fetch(id), vec![], vec![to]))
            }
        };
        let instr = |(work, inputs, outputs)| Instr::plain(work, inputs, outputs, micro_batch, maker.layer.clone());
        self.behind.entry(last).or_default().push(instr(away));
        self.before.entry(first).or_default().push(instr(fetch));
        // The backward reads what came back.
        for part in program.parts.iter().filter(|part| !is_forward(part)) {
            for instr in &mut program.instrs[part.instrs.clone()] {
                let operands = instr.inputs.iter_mut().chain(&mut instr.outputs);
                operands.filter(|operand| operand.buffer == buffer).for_each(|operand| operand.buffer = back);
            }
        }
    }

    /// Lays all of it down.
    fn insert(mut self, program: &mut Program) {
        let mut steps = std::mem::take(&mut program.instrs).into_iter().enumerate();
        for part in &mut program.parts {
            let first = program.instrs.len();
            for (index, instr) in steps.by_ref().take(part.instrs.len()) {
                program.instrs.extend(self.before.remove(&index).into_iter().flatten());
                program.instrs.push(instr);
                program.instrs.extend(self.behind.remove(&index).into_iter().flatten());
            }
            part.instrs = first..program.instrs.len();
        }
    }
}

fn packed_operands(buffers: [BufferId; 2], spec: &Spec) -> Vec<Operand> {
    let operand = |(buffer, spec): (BufferId, Spec)| {
        let (layout, dtype) = (Layout::contiguous(spec.shape.clone()), spec.dtype);
        Operand { buffer, layout, dtype, overwritten_by: None, widened: None }
    };
    buffers.into_iter().zip(packed(spec)).map(operand).collect()
}
