//! Compresses or offloads activations after the last reader in the forward, and restores them before the first reader
//! in the backward.
//!
//! - In: a program whose activations are kept unchanged until their backward.
//! - Out: the same program, in which the activations that [`recompute`](crate::recompute) names are kept in eight bits
//!   per element, or in a file. A restored activation has a new buffer. On a GPU, copies run while the program goes on:
//!   an activation is copied out until the next one is, and copied back while the backward uses the one before.
//! - Never: the choice of these activations.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use candle_core::Layout;
use gapless_alloc::Label;
use gapless_graph::ops::{Compress, Expand, packed};
use gapless_graph::{Op, Phase, Spec};
use gapless_parallel::Kind;

use super::Context;
use crate::error::Result;
use crate::lowering::Target;
use crate::program::{
    BufferId, BufferKind, Instance, Instr, InstrKind, OffloadId, Operand, Part, Program, role_of_node,
};
use crate::recompute::ActivationStorage;

pub(super) fn run(program: &mut Program, context: &Context<'_>) -> Result<()> {
    let mut pass = Offload {
        context: *context,
        copies: Vec::new(),
        behind: BTreeMap::new(),
        before: BTreeMap::new(),
        back: HashMap::new(),
    };
    let stashed = pass.stashed();
    let uses = uses_of(program, stashed.iter().map(|&(buffer, ..)| buffer));
    for (buffer, origin, stash) in stashed {
        // Only values that the backward reads are stored and restored.
        if let Uses { last: Some(last), first: Some(first) } = uses[&buffer] {
            pass.store(program, buffer, origin, stash, (last, first));
        }
    }
    pass.copy();
    if !pass.behind.is_empty() {
        pass.read_back(program);
        pass.insert(program);
    }
    Ok(())
}

/// The last use of a buffer in the forward, and the first use outside of the forward. Each is `None` if there is no
/// such use.
#[derive(Debug, Clone, Copy, Default)]
struct Uses {
    last: Option<usize>,
    first: Option<usize>,
}

fn uses_of(program: &Program, buffers: impl Iterator<Item = BufferId>) -> HashMap<BufferId, Uses> {
    let mut uses: HashMap<BufferId, Uses> = buffers.map(|buffer| (buffer, Uses::default())).collect();
    if uses.is_empty() {
        return uses;
    }
    for part in &program.parts {
        for index in part.instrs.clone() {
            let instr = &program.instrs[index];
            for operand in instr.inputs.iter().chain(&instr.outputs) {
                let Some(uses) = uses.get_mut(&operand.buffer) else { continue };
                match is_forward(part) {
                    true => uses.last = uses.last.max(Some(index)),
                    false => uses.first = Some(uses.first.map_or(index, |first| first.min(index))),
                }
            }
        }
    }
    uses
}

fn is_forward(part: &Part) -> bool {
    part.action.is_some_and(|action| action.kind == Kind::Forward)
}

/// The copies of an offloaded activation.
struct Copies {
    id: OffloadId,
    /// The activation, and the buffer that it is copied back to.
    from: Operand,
    to: Operand,
    uses: (usize, usize),
    micro_batch: u32,
    layer: Arc<str>,
}

struct Offload<'a> {
    context: Context<'a>,
    copies: Vec<Copies>,
    /// Instructions to insert after a given instruction.
    behind: BTreeMap<usize, Vec<Instr>>,
    /// Instructions to insert before a given instruction.
    before: BTreeMap<usize, Vec<Instr>>,
    /// For each buffer, the buffer into which its contents are restored.
    back: HashMap<BufferId, BufferId>,
}

impl Offload<'_> {
    /// Returns the buffers of the forward that are compressed or offloaded.
    fn stashed(&self) -> Vec<(BufferId, Instance, ActivationStorage)> {
        let recomputation = self.context.lowering.recomputation;
        let stored = |(&origin, &buffer): (&Instance, &BufferId)| {
            let variant = recomputation.variant_of(origin.micro_batch).filter(|_| !origin.is_sum)?;
            let stash = recomputation.variants()[variant].stash(origin.root)?;
            Some((buffer, origin, stash))
        };
        let mut stashed: Vec<_> = self.context.first_buffer.iter().filter_map(stored).collect();
        stashed.sort_unstable_by_key(|&(buffer, origin, _)| (buffer, origin));
        stashed
    }

    /// Stores one buffer after its last use in the forward, and restores the buffer before its first use outside of the
    /// forward.
    fn store(
        &mut self,
        program: &mut Program,
        buffer: BufferId,
        origin: Instance,
        stash: ActivationStorage,
        (last, first): (usize, usize),
    ) {
        let graph = self.context.lowering.graph;
        let (value, micro_batch) = (graph.value(origin.root), origin.micro_batch);
        let maker = graph.producer(origin.root).expect("what is put away is made by a node");
        let from = Operand::new(buffer, value);
        // The buffer of the restored value.
        let label = program.buffers[buffer.index()].label.clone();
        let back = program.add(value.spec.bytes(), label, BufferKind::Temporary);
        let to = Operand::new(back, value);
        match stash {
            ActivationStorage::Compressed => {
                let buffers = packed(&value.spec).map(|spec| {
                    let tensor = format!("{}/{} in 8 bits of micro-batch {micro_batch}", maker.layer, maker.op.name());
                    let (op, layer) = ("compress".into(), maker.layer.to_string());
                    let label = Label { tensor, op, layer, role: role_of_node(Phase::Forward) };
                    program.add(spec.bytes(), label, BufferKind::Temporary)
                });
                let (compress, expand): (Arc<dyn Op>, Arc<dyn Op>) =
                    (Arc::new(Compress), Arc::new(Expand(value.spec.clone())));
                let codes = packed_operands(buffers, &value.spec);
                let instr = |work, inputs, outputs| {
                    Instr::plain(InstrKind::Compute(work), inputs, outputs, micro_batch, maker.layer.clone())
                };
                self.behind.entry(last).or_default().push(instr(compress, vec![from], codes.clone()));
                self.before.entry(first).or_default().push(instr(expand, codes, vec![to]));
            }
            ActivationStorage::Offloaded => {
                let (id, layer) = (program.add_offload(value.spec.bytes()), maker.layer.clone());
                self.copies.push(Copies { id, from, to, uses: (last, first), micro_batch, layer });
            }
        }
        self.back.insert(buffer, back);
    }

    /// Inserts the copies of offloaded activations. A CPU copies after the last use and before the first one. On a GPU,
    /// a copy ends where the next one in the same direction starts, so that it overlaps with the instructions between
    /// them, and at most one activation more is in memory.
    fn copy(&mut self) {
        let copies = std::mem::take(&mut self.copies);
        let overlaps = !matches!(self.context.lowering.target, Target::Cpu { .. });
        let [lasts, firsts]: [BTreeSet<usize>; 2] =
            [copies.iter().map(|copy| copy.uses.0).collect(), copies.iter().map(|copy| copy.uses.1).collect()];
        // At one place, waits for earlier copies come first, then copies in the order of the uses that they precede or
        // follow, and then waits for copies that start there.
        let mut placed: Vec<((u32, usize), Place, Instr)> = Vec::new();
        for copy in copies {
            let (last, first) = copy.uses;
            let instr = |kind, inputs: &[&Operand], outputs: &[&Operand]| {
                let all = |operands: &[&Operand]| operands.iter().map(|&operand| operand.clone()).collect();
                Instr::plain(kind, all(inputs), all(outputs), copy.micro_batch, copy.layer.clone())
            };
            let earlier = firsts.range(..first).next_back().copied().filter(|&earlier| overlaps && earlier > last);
            let fetch_at = earlier.unwrap_or(first);
            placed.push(((1, last), Place::Behind(last), instr(InstrKind::Offload(copy.id), &[&copy.from], &[])));
            placed.push(((1, first), Place::Before(fetch_at), instr(InstrKind::Fetch(copy.id), &[], &[&copy.to])));
            if overlaps {
                let next = lasts.range(last + 1..).next().copied().filter(|&next| next < fetch_at);
                let end = next.map_or(Place::Before(fetch_at), Place::Behind);
                placed.push(((0, last), end, instr(InstrKind::Offloaded(copy.id), &[&copy.from], &[])));
                let order = if fetch_at == first { 2 } else { 0 };
                placed.push((
                    (order, first),
                    Place::Before(first),
                    instr(InstrKind::Fetched(copy.id), &[&copy.to], &[]),
                ));
            }
        }
        placed.sort_by_key(|&(order, ..)| order);
        for (_, place, instr) in placed {
            let all = match place {
                Place::Behind(index) => self.behind.entry(index),
                Place::Before(index) => self.before.entry(index),
            };
            all.or_default().push(instr);
        }
    }

    /// Makes the backward read the restored buffers.
    fn read_back(&self, program: &mut Program) {
        for part in program.parts.iter().filter(|part| !is_forward(part)) {
            for instr in &mut program.instrs[part.instrs.clone()] {
                for operand in instr.inputs.iter_mut().chain(&mut instr.outputs) {
                    operand.buffer = self.back.get(&operand.buffer).copied().unwrap_or(operand.buffer);
                }
            }
        }
    }

    /// Inserts all new instructions.
    fn insert(mut self, program: &mut Program) {
        let mut instrs = std::mem::take(&mut program.instrs).into_iter().enumerate();
        for part in &mut program.parts {
            let first = program.instrs.len();
            for (index, instr) in instrs.by_ref().take(part.instrs.len()) {
                program.instrs.extend(self.before.remove(&index).into_iter().flatten());
                program.instrs.push(instr);
                program.instrs.extend(self.behind.remove(&index).into_iter().flatten());
            }
            part.instrs = first..program.instrs.len();
        }
    }
}

/// A place where an instruction is inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Behind(usize),
    Before(usize),
}

fn packed_operands(buffers: [BufferId; 2], spec: &Spec) -> Vec<Operand> {
    let operand = |(buffer, spec): (BufferId, Spec)| {
        let (layout, dtype) = (Layout::contiguous(spec.shape.clone()), spec.dtype);
        Operand { buffer, layout, dtype, overwritten_by: None, widened: None }
    };
    buffers.into_iter().zip(packed(spec)).map(operand).collect()
}
