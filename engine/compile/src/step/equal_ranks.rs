//! Finds pipeline ranks whose programs are equal, so that a sketch lowers only one of them.
//!
//! - In: a graph, the actions of all ranks, and what is recomputed.
//! - Out: for each rank, the first rank with an equal program. The programs of two equal ranks differ only in names, in
//!   the numbers of stages and peers, and in the order of values that the update reads from other ranks.
//! - Never: a guess. A rank is described by everything about its nodes on which lowering depends, and ranks are equal
//!   only if their descriptions are.
//!
//! Most stages of a deep model hold the same number of equal layers. The first and the last stage differ from the
//! others by the embedding and the head.

use std::collections::HashMap;

use gapless_graph::{Graph, Phase, Place, Source, Value, ValueId};
use gapless_parallel::StageId;

use crate::error::Result;
use crate::lower::Shared;
use crate::lowering::Lowering;

/// Returns for each node a number of its operation. Equal numbers mean equal operations.
pub(super) fn number_ops(graph: &Graph) -> Vec<u64> {
    let mut known: HashMap<String, u64> = HashMap::new();
    let mut number = |text: String| {
        let next = known.len() as u64;
        *known.entry(text).or_insert(next)
    };
    graph.nodes().iter().map(|node| format!("{:?}", node.op)).map(&mut number).collect()
}

/// Returns for each rank the first rank that is equal to it. `ops` are the numbers of the nodes' operations.
///
/// # Errors
/// Returns an error if the actions wait for each other in a cycle.
pub(super) fn first_equal_ranks(lowering: &Lowering<'_>, shared: &Shared, ops: &[u64]) -> Result<Vec<usize>> {
    let ranks = lowering.table.len();
    let has_row_counts = lowering.graph.values().iter().any(|value| value.row_count.is_some());
    // Of two ranks, one is the first and the other the last, which differ.
    if ranks < 3 || has_row_counts {
        return Ok((0..ranks).collect());
    }
    let facts = Facts::new(lowering, shared, ops);
    let mut known: HashMap<Vec<u64>, usize> = HashMap::new();
    (0..ranks).map(|rank| Ok(*known.entry(facts.describe(rank)?).or_insert(rank))).collect()
}

/// The facts about a graph that the descriptions of all ranks need.
struct Facts<'a> {
    lowering: &'a Lowering<'a>,
    shared: &'a Shared,
    ops: &'a [u64],
    /// By root: whether the update reads a value of the forward or the backward.
    is_summed: Vec<bool>,
    /// By root: whether a weight gradient reads it.
    by_weights: Vec<bool>,
    /// By variant and node: whether it is recomputed.
    recomputed: Vec<Vec<bool>>,
    /// Numbers of the names of inputs, caches and data.
    names: HashMap<&'a str, u64>,
}

impl<'a> Facts<'a> {
    fn new(lowering: &'a Lowering<'a>, shared: &'a Shared, ops: &'a [u64]) -> Self {
        let graph = lowering.graph;
        let (mut is_summed, mut by_weights) = (vec![false; graph.values().len()], vec![false; graph.values().len()]);
        for node in graph.node_ids().filter(|id| shared.alive[id.index()]).map(|id| graph.node(id)) {
            for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                is_summed[root.index()] |= node.phase == Phase::Update;
                by_weights[root.index()] |= node.phase == Phase::BackwardWeight;
            }
        }
        let variants = lowering.recomputation.variants().iter();
        let recomputed = variants.map(|variant| {
            let mut is_recomputed = vec![false; graph.nodes().len()];
            variant.nodes().iter().for_each(|node| is_recomputed[node.index()] = true);
            is_recomputed
        });
        let recomputed = recomputed.collect();
        let mut names = HashMap::new();
        for value in graph.values() {
            if let Source::Input { name } | Source::Cache { name } | Source::Data { name, .. } = &value.source {
                let next = names.len() as u64;
                names.entry(name.as_str()).or_insert(next);
            }
        }
        Self { lowering, shared, ops, is_summed, by_weights, recomputed, names }
    }

    /// Describes a rank, its actions, and its nodes in the order of the graph.
    fn describe(&self, rank: usize) -> Result<Vec<u64>> {
        let Self { lowering, shared, .. } = self;
        let (graph, row) = (lowering.graph, &lowering.table[rank]);
        let mut stages: Vec<StageId> = row.iter().map(|action| action.stage).collect();
        stages.sort_unstable();
        stages.dedup();
        let mut description =
            Description { facts: self, rank, text: Vec::new(), numbers: vec![None; graph.values().len()], count: 0 };
        for action in row {
            let stage = stages.binary_search(&action.stage).unwrap_or(usize::MAX);
            description.text.extend([action.kind as u64, stage as u64, u64::from(action.micro_batch.0)]);
        }
        for id in graph.node_ids().filter(|id| shared.alive[id.index()]) {
            let node = graph.node(id);
            let stage = match node.place {
                Place::Everywhere => stages.len(),
                Place::Stage(stage) => match stages.binary_search(&stage) {
                    Ok(index) => index,
                    Err(_) => continue,
                },
            };
            let flags = self.recomputed.iter().map(|is_recomputed| u64::from(is_recomputed[id.index()]));
            description.text.extend([self.ops[id.index()], node.phase as u64, stage as u64]);
            description.text.extend(flags);
            description.text.extend([node.inputs.len() as u64, node.outputs.len() as u64]);
            let mut inputs: Vec<Vec<u64>> =
                node.inputs.iter().map(|&input| description.operand(input, node.phase)).collect();
            // Ranks read the same values of all ranks here, in the order of the stages, and each finds its own at another
            // place.
            if node.place == Place::Everywhere {
                inputs.sort_unstable();
            }
            description.text.extend(inputs.into_iter().flatten());
            node.outputs.iter().for_each(|&output| description.output(output));
        }
        for output in lowering.outputs {
            let value = description.operand(output.value, Phase::Update);
            description.text.push(u64::from(output.everywhere));
            description.text.extend(value);
        }
        let received = shared.crossings.received_before(graph, lowering.table, rank)?;
        let received = received.into_iter().map(|((root, micro_batch, to), action)| {
            let number = description.numbers[root.index()].unwrap_or(u64::MAX);
            [number, u64::from(micro_batch), description.distance(to), action as u64]
        });
        let mut received: Vec<[u64; 4]> = received.collect();
        received.sort_unstable();
        description.text.extend(received.into_iter().flatten());
        Ok(description.text)
    }
}

/// The description of a rank, as far as it is written.
struct Description<'a> {
    facts: &'a Facts<'a>,
    rank: usize,
    text: Vec<u64>,
    /// The number of each root that was named.
    numbers: Vec<Option<u64>>,
    count: u64,
}

impl Description<'_> {
    /// The position of another rank relative to this one.
    fn distance(&self, rank: usize) -> u64 {
        (rank as u64).wrapping_sub(self.rank as u64)
    }

    fn number(&mut self, root: ValueId) -> u64 {
        self.count += 1;
        self.numbers[root.index()] = Some(self.count);
        self.count
    }

    /// Describes a value that a node of a phase reads.
    fn operand(&mut self, id: ValueId, reader: Phase) -> Vec<u64> {
        let Facts { lowering, shared, names, .. } = self.facts;
        let (graph, crossings) = (lowering.graph, &shared.crossings);
        let value = graph.value(id);
        let root = graph.value(value.root);
        let layout = value.layout.dims().iter().chain(value.layout.stride()).map(|&extent| extent as u64);
        let mut text: Vec<u64> = vec![value.layout.dims().len() as u64, value.layout.start_offset() as u64];
        text.extend(layout);
        if let Some(number) = self.numbers[value.root.index()] {
            text.extend([0, number]);
            return text;
        }
        text.extend(spec(root));
        match &root.source {
            Source::Node { node, .. } => {
                let maker = graph.node(*node);
                text.extend([1, maker.phase as u64]);
                // The host and the update read these once. Each of them has a buffer of its own, which no action touches.
                if reader == Phase::Update {
                    return text;
                }
                text.push(self.distance(crossings.ranks_of(maker.place).start));
            }
            Source::Persistent { .. } => {
                let role = lowering.roles.get(&value.root).map_or(u64::MAX, |&role| role as u64);
                text.extend([2, role, crossings.replicas(value.root).count() as u64]);
            }
            Source::Constant(number) => text.extend([3, number.to_bits()]),
            Source::Input { name } | Source::Cache { name } | Source::Data { name, .. } => {
                text.extend([4, names[name.as_str()]]);
            }
        }
        text.push(self.number(value.root));
        text
    }

    /// Describes a value that a node of this rank computes.
    fn output(&mut self, id: ValueId) {
        let Facts { lowering, shared, is_summed, by_weights, .. } = self.facts;
        let number = self.number(id);
        self.text.extend(spec(lowering.graph.value(id)));
        let per_step = shared.crossings.per_step(id).count() as u64;
        self.text.extend([number, u64::from(is_summed[id.index()]), u64::from(by_weights[id.index()]), per_step]);
        let to: Vec<u64> = shared.crossings.per_micro_batch(id).map(|to| self.distance(to)).collect();
        self.text.push(to.len() as u64);
        self.text.extend(to);
        for variant in lowering.recomputation.variants() {
            let stash = variant.stash(id).map_or(0, |stash| 1 + stash as u64);
            self.text.extend([u64::from(variant.is_rematerialized(id)), u64::from(variant.ends_with_input(id)), stash]);
        }
    }
}

/// Describes the shape and the type of a value.
fn spec(value: &Value) -> impl Iterator<Item = u64> {
    let dims = value.spec.dims().iter().map(|&extent| extent as u64);
    [value.spec.dtype as u64, value.spec.dims().len() as u64].into_iter().chain(dims)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write;
    use std::sync::Arc;

    use gapless_parallel::{Action, Kind, Mesh, by_name};

    use super::super::budget_reference::{Chain, TARGET};
    use super::super::{MemoryOptions, Pipeline, RankPlan, StepOptions, boxed_build, policy, record};
    use super::*;
    use crate::StagePartition;
    use crate::lower::lower;
    use crate::program::{BufferKind, Operand, Program};
    use crate::recompute::{Layers, Recompute};

    /// Describes what a program does in its actions, with numbers of stages and buffers in the order in which they occur.
    fn actions(program: &Program) -> String {
        let mut text = String::new();
        let (mut stages, mut buffers): (Vec<StageId>, Vec<usize>) = (Vec::new(), Vec::new());
        let always = program.buffers.iter().filter(|buffer| matches!(buffer.kind, BufferKind::Persistent { .. }));
        writeln!(text, "{} bytes", always.map(|buffer| buffer.bytes).sum::<u64>()).unwrap();
        for part in &program.parts {
            let Some(Action { kind, stage, micro_batch }) = part.action else { continue };
            let stage = stages.iter().position(|&known| known == stage).unwrap_or_else(|| {
                stages.push(stage);
                stages.len() - 1
            });
            writeln!(text, "{kind:?} {stage} {micro_batch:?}").unwrap();
            for instr in &program.instrs[part.instrs.clone()] {
                let mut operand = |Operand { buffer, layout, overwritten_by, .. }: &Operand| {
                    let index = buffer.index();
                    let number = buffers.iter().position(|&known| known == index).unwrap_or_else(|| {
                        buffers.push(index);
                        buffers.len() - 1
                    });
                    format!("{number} {} {layout:?} {overwritten_by:?}", program.buffers[index].bytes)
                };
                let inputs: Vec<String> = instr.inputs.iter().map(&mut operand).collect();
                let outputs: Vec<String> = instr.outputs.iter().map(&mut operand).collect();
                let scratch: u64 = instr.workspace.iter().map(|piece| program.buffers[piece.index()].bytes).sum();
                let flags = (instr.accumulate, instr.micro_batch, instr.rematerialized, scratch);
                writeln!(text, "{} {inputs:?} {outputs:?} {flags:?}", instr.kind.name()).unwrap();
            }
        }
        text
    }

    /// Returns the first equal rank of each rank of a chain of layers with these widths. Programs of equal ranks must do the
    /// same in their actions.
    fn equal(hidden: &[usize], ranks: usize, chunks: usize, recompute: Recompute, split: bool) -> Vec<usize> {
        let schedule = Arc::from(by_name(if chunks == 2 { "zbv" } else { "1f1b" }).unwrap());
        let pipeline = Pipeline { schedule, chunks, cut: StagePartition::Equal };
        let memory = MemoryOptions { recompute, ..MemoryOptions::default() };
        let mesh = Mesh::pipeline(ranks);
        let options = StepOptions {
            batch: 64,
            micro_batches: 16,
            sequence: 16,
            mesh,
            pipeline,
            memory,
            ..StepOptions::default()
        };
        let mut plan = RankPlan::new(mesh, 0, &options.pipeline, options.micro_batches).unwrap();
        let kinds: &[Kind] = if split { &[Kind::BackwardInput, Kind::BackwardWeight] } else { &[Kind::Backward] };
        let row = |row: &Vec<Action>| -> Vec<Action> {
            let stages: BTreeSet<u32> = row.iter().map(|action| action.stage.0).collect();
            let of = |micro_batch| {
                let down = stages.iter().map(move |&stage| Action::new(Kind::Forward, stage, micro_batch));
                let up = stages.iter().rev();
                let back = move |&stage| kinds.iter().map(move |&kind| Action::new(kind, stage, micro_batch));
                down.chain(up.flat_map(back))
            };
            (0..2).flat_map(of).collect()
        };
        plan.table = plan.table.iter().map(row).collect();
        let step = record(&boxed_build(|vb| Chain::new(hidden, vb)), &options, &plan).unwrap();
        let once = policy(&step, &options, &plan, TARGET, &[]).unwrap();
        let graph = step.graph();
        let lowering = |rank| Lowering { rank, ..step.lowering(&graph, &options, &plan, TARGET, &once) };
        let shared = Shared::new(&lowering(0));
        let first = first_equal_ranks(&lowering(0), &shared, &number_ops(&graph)).unwrap();
        let programs: Vec<String> = (0..ranks).map(|rank| actions(&lower(&lowering(rank)).unwrap())).collect();
        for (rank, &like) in first.iter().enumerate() {
            assert_eq!(programs[rank], programs[like], "{rank} is like {like}");
        }
        first
    }

    #[test]
    fn ranks_with_equal_stages_are_equal() {
        let layers = || Recompute::Layers(Layers::All);
        for split in [false, true] {
            // The second rank receives the embedding's result from the first, as the others receive a layer's.
            assert_eq!(equal(&[64; 6], 6, 1, Recompute::None, split), [0, 1, 1, 1, 1, 5]);
            assert_eq!(equal(&[64; 12], 6, 1, layers(), split), [0, 1, 1, 1, 1, 5]);
            assert_eq!(equal(&[64; 10], 5, 2, layers(), true), [0, 1, 1, 1, 4]);
        }
        // The third layer is wider, and only the fourth is recomputed.
        assert_eq!(equal(&[64, 64, 96, 64, 64, 64], 6, 1, Recompute::None, false), [0, 1, 2, 1, 1, 5]);
        let one = Recompute::Layers(Layers::Named(vec!["h.3".into()]));
        assert_eq!(equal(&[64; 6], 6, 1, one, false), [0, 1, 1, 3, 1, 5]);
        assert_eq!(equal(&[64; 2], 2, 1, Recompute::None, false), [0, 1]);
    }
}
