//! Overlaps the collectives of shard ranks with computation: parameters are gathered ahead of their readers, and sums of
//! gradients are waited for late.
//!
//! - In: a program in which each parameter is gathered right before its first reader, and each sum of a gradient over ranks
//!   is waited for before its first reader.
//! - Out: the same program, with at most as many gathers and sums under way as the options allow. The gather that comes
//!   `prefetch` gathers after another starts when the readers of that other begin. A sum is waited for right before the
//!   start of the sum that comes `reductions` sums after it, or at the end of its action. Instructions that read the sum
//!   follow the wait.
//! - Never: an order that differs between the ranks of a group, because their programs are equal up to here. A gather never
//!   moves ahead of a change of its parameter.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use gapless_graph::ops::Collective;
use gapless_graph::{Graph, NodeId, Phase, ValueId};

use super::Context;
use crate::error::Result;
use crate::program::{InstrKind, Operand, Program};
use crate::recompute::gathers_persistent;

pub(super) fn run(program: &mut Program, context: &Context<'_>) -> Result<()> {
    let overlap = context.lowering.overlap;
    let graph = context.lowering.graph;
    wait_for_sums(program, &gradient_sums(graph), overlap.reductions);
    gather_ahead(program, graph, overlap.prefetch);
    Ok(())
}

/// A collective: the positions of its start and of its wait.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    start: usize,
    finish: usize,
}

/// Returns the collectives of these nodes, in the order of their starts.
fn transfers(program: &Program, is_one: impl Fn(NodeId) -> bool) -> Vec<Transfer> {
    let mut starts: BTreeMap<usize, usize> = BTreeMap::new();
    let mut transfers = Vec::new();
    for (index, instr) in program.instrs.iter().enumerate() {
        match instr.kind {
            InstrKind::Collective(_, request) if instr.node.is_some_and(&is_one) => {
                starts.insert(request, index);
            }
            InstrKind::Finish(request) => {
                transfers.extend(starts.remove(&request).map(|start| Transfer { start, finish: index }));
            }
            _ => {}
        }
    }
    transfers.sort_unstable_by_key(|transfer| transfer.start);
    transfers
}

fn gather_ahead(program: &mut Program, graph: &Graph, ahead: usize) {
    let mut all = transfers(program, |node| gathers_persistent(graph, graph.node(node)));
    all.sort_unstable_by_key(|gather| gather.finish);
    let finishes: HashSet<usize> = all.iter().map(|gather| gather.finish).collect();
    // The position after the last instruction so far that may change a buffer.
    let mut changed = vec![0; program.buffers.len()];
    let mut bound = vec![0; program.instrs.len()];
    for (index, instr) in program.instrs.iter().enumerate() {
        bound[index] = instr.inputs.iter().map(|operand| changed[operand.buffer.index()]).max().unwrap_or(0);
        let ends = matches!(instr.kind, InstrKind::Wait(_) | InstrKind::Finish(_)) && !finishes.contains(&index);
        let may_change = instr.inputs.iter().filter(|_| ends).chain(&instr.outputs);
        may_change.for_each(|operand| changed[operand.buffer.index()] = index + 1);
    }
    let mut moves = Moves::default();
    for (index, gather) in all.iter().enumerate() {
        let place = match index.checked_sub(ahead) {
            _ if ahead == 0 => gather.finish,
            Some(other) => all[other].finish + 1,
            None => 0,
        };
        moves.add(gather.start, place.max(bound[gather.start]));
    }
    moves.apply(program);
}

/// Returns the nodes of the backward that sum gradients over ranks: only the update reads their results.
fn gradient_sums(graph: &Graph) -> HashSet<NodeId> {
    let read = graph.nodes().iter().filter(|node| node.phase != Phase::Update).flat_map(|node| &node.inputs);
    let read: HashSet<ValueId> = read.map(|&input| graph.value(input).root).collect();
    let is_sum = |&id: &NodeId| {
        let node = graph.node(id);
        let sums = matches!(Collective::of(node), Some(Collective::ReduceScatter { .. }));
        sums && node.phase != Phase::Update && !node.outputs.iter().any(|output| read.contains(output))
    };
    graph.node_ids().filter(is_sum).collect()
}

fn wait_for_sums(program: &mut Program, sums: &HashSet<NodeId>, most: usize) {
    let all = transfers(program, |node| sums.contains(&node));
    let actions = program.parts.iter().filter(|part| part.action.is_some());
    let mut moves = Moves::default();
    for Range { start, end } in actions.map(|part| part.instrs.clone()) {
        let first = all.partition_point(|sum| sum.start < start);
        let sums = &all[first..all.partition_point(|sum| sum.start < end)];
        for (index, sum) in sums.iter().enumerate() {
            let next = sums.get(index.saturating_add(most)).map_or(end, |next| next.start);
            let place = if most == 0 { sum.start + 1 } else { next };
            if sum.finish >= place {
                moves.add(sum.finish, place);
                continue;
            }
            let (late, place) = depending(program, sum.finish..place);
            if late.iter().all(|index| !moves.contains(*index)) {
                late.into_iter().for_each(|index| moves.add(index, place));
            }
        }
    }
    moves.apply(program);
}

/// Returns the first instruction of a range, and all others of the range that must follow it, together with the position
/// to which they can move: the end of the range, or the first of them that must stay in place.
fn depending(program: &Program, range: Range<usize>) -> (Vec<usize>, usize) {
    let (mut read, mut written) = (HashSet::new(), HashSet::new());
    let mut late: Vec<usize> = Vec::new();
    for index in range.clone() {
        let instr = &program.instrs[index];
        let buffers = |operands: &[Operand]| operands.iter().map(|operand| operand.buffer).collect::<Vec<_>>();
        let (inputs, outputs) = (buffers(&instr.inputs), buffers(&instr.outputs));
        let outputs: Vec<_> = outputs.into_iter().chain(instr.workspace.iter().copied()).collect();
        let follows = inputs.iter().chain(&outputs).any(|buffer| written.contains(buffer))
            || outputs.iter().any(|buffer| read.contains(buffer));
        if index > range.start && !follows {
            continue;
        }
        let moves = matches!(instr.kind, InstrKind::Compute(_)) && instr.predicate.is_none();
        if index > range.start && !moves {
            return (late, index);
        }
        // A wait completes the tensors that it names.
        if index == range.start {
            written.extend(inputs.iter().copied());
        }
        read.extend(inputs);
        written.extend(outputs);
        late.push(index);
    }
    (late, range.end)
}

/// New positions of instructions. Each moved instruction is placed before the instruction that was at the position.
#[derive(Debug, Default)]
struct Moves {
    /// By instruction.
    places: BTreeMap<usize, usize>,
    /// By position: the instructions, in order.
    moved: BTreeMap<usize, Vec<usize>>,
}

impl Moves {
    fn contains(&self, index: usize) -> bool {
        self.places.contains_key(&index)
    }

    fn add(&mut self, index: usize, place: usize) {
        self.places.insert(index, place);
        self.moved.entry(place).or_default().push(index);
    }

    fn apply(self, program: &mut Program) {
        let count = program.instrs.len();
        let mut order = Vec::with_capacity(count);
        for index in 0..=count {
            order.extend(self.moved.get(&index).into_iter().flatten().copied());
            order.extend((index < count && !self.contains(index)).then_some(index));
        }
        program.rearrange(&order);
    }
}
