//! Eviction of dynamic rows. Rows are kept for the backward if the arena has space for them. If not, they are evicted,
//! and then exchanged and recomputed again in the backward.
//!
//! The ranks that exchange the rows decide this together while the step runs, as soon as the rows of a layer and
//! micro-batch are counted. Each rank votes ([`InstrKind::Vote`]), an all-reduce adds the votes, and
//! [`InstrKind::ApplyVote`] evicts the rows if any rank has no space.
//!
//! The program contains the instructions for both cases. The instructions that recompute the rows come before the first
//! reader in the backward, and run only if the rows were evicted. They write the same buffers as the forward, so
//! readers need not distinguish the cases. Only the arena knows whether a buffer was kept. On all ranks that exchange
//! rows, these instructions are at the same position among the collectives, whatever else each rank recomputes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use gapless_alloc::{Label, Role};
use gapless_graph::ops::{Collective, Group};
use gapless_graph::{Graph, Node, NodeId, Phase, ValueId};

use super::dynamic_rows::Counts;
use super::rematerialize::Occurrence;
use super::{BufferId, Lowerer, Lowering, collective_of};
use crate::program::{BufferKind, Instr, InstrKind, Operand, Origin};
use crate::recompute::{SavedActivations, Variant};

/// The rows that may be evicted. The first index is the recomputation variant
/// ([`RematPlan::table`](crate::recompute::RematPlan::table)), and the second is the value that counts the rows.
#[derive(Debug, Default)]
pub(super) struct Evicted {
    of: Vec<BTreeMap<ValueId, Rows>>,
    /// Roots with dynamic rows that the forward computes and the backward reads, each with the value that counts it.
    read: HashMap<ValueId, ValueId>,
    /// Row counts and micro-batches for which the recomputation has been emitted.
    back: HashSet<(ValueId, u32)>,
}

/// The rows of one row count.
#[derive(Debug, Default, Clone)]
pub(super) struct Rows {
    /// Roots that are either kept for the backward or evicted and recomputed.
    roots: BTreeSet<ValueId>,
    /// The nodes that recompute evicted roots, in order.
    rematerialized: BTreeSet<NodeId>,
    /// Other roots that the recomputation computes and reads. They are not kept.
    between: BTreeSet<ValueId>,
}

impl Evicted {
    pub(super) fn new(of: &Lowering<'_>, alive: &[bool], counts: &Counts) -> Self {
        if !of.evicts {
            return Self::default();
        }
        let graph = of.graph;
        let saved = SavedActivations::new(graph, alive);
        let mut read = HashMap::new();
        for node in graph.node_ids().filter(|id| alive[id.index()]).map(|id| graph.node(id)) {
            if matches!(node.phase, Phase::BackwardInput | Phase::BackwardWeight) {
                for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                    let is_forward = graph.producer(root).is_some_and(|maker| maker.phase == Phase::Forward);
                    if let Some(starts) = counts.starts_of(graph, root).filter(|_| is_forward) {
                        read.insert(root, starts);
                    }
                }
            }
        }
        let plain = Variant::default();
        let variants = std::iter::once(&plain).chain(of.recomputation.variants());
        let rows = |variant: &Variant| {
            let mut by_count: BTreeMap<ValueId, Rows> = BTreeMap::new();
            for (&root, &starts) in &read {
                if !variant.is_rematerialized(root) && is_repeatable(graph, &saved, root) {
                    by_count.entry(starts).or_default().roots.insert(root);
                }
            }
            by_count.values_mut().for_each(|rows| rows.find_way(graph, &saved, variant));
            by_count
        };
        Self { of: variants.map(rows).collect(), read, back: HashSet::new() }
    }
}

impl Rows {
    /// Finds the nodes that recompute `roots`, going back to values that are available even when the rows were evicted.
    fn find_way(&mut self, graph: &Graph, saved: &SavedActivations<'_>, variant: &Variant) {
        let mut missing: Vec<ValueId> = self.roots.iter().copied().collect();
        while let Some(root) = missing.pop() {
            let Some(maker) = graph.maker(root) else { continue };
            if !self.rematerialized.insert(maker) {
                continue;
            }
            for input in graph.node(maker).inputs.iter().map(|&input| graph.value(input).root) {
                let is_there = self.roots.contains(&input) || variant.is_rematerialized(input) || saved.is_read(input);
                if !is_there && !saved.leaves_layer(input) && saved.is_repeatable(input) && self.between.insert(input) {
                    missing.push(input);
                }
            }
        }
    }
}

/// True if a root can be recomputed by an ordinary operation, or by exchanging its rows again.
fn is_repeatable(graph: &Graph, saved: &SavedActivations<'_>, root: ValueId) -> bool {
    let is_exchange = |node: &Node| matches!(collective_of(node), Some(Collective::AllToAllRows { .. }));
    saved.is_repeatable(root) || graph.producer(root).is_some_and(is_exchange)
}

impl Lowerer<'_> {
    /// Returns the rows that a micro-batch may evict, by the value that counts them.
    fn evicted(&self, micro_batch: u32) -> Option<&BTreeMap<ValueId, Rows>> {
        self.evicted.of.get(self.of.recomputation.table(micro_batch))
    }

    fn rows_of(&self, starts: ValueId, micro_batch: u32) -> Option<&Rows> {
        self.evicted(micro_batch)?.get(&starts)
    }

    /// If `node`, whose instruction was just emitted, counts rows that may be evicted: emits the vote on whether to
    /// keep them.
    pub(super) fn settle(&mut self, node: &Node, micro_batch: u32) {
        let Some(count) = self.program.instrs.last().and_then(|instr| instr.counts) else { return };
        let starts = node.outputs[0];
        if self.rows_of(starts, micro_batch).is_none() {
            return;
        }
        let tensor = format!("{}/no room for rows of micro-batch {micro_batch}", node.layer);
        let label = Label { tensor, op: "offer".into(), layer: node.layer.to_string(), role: Role::Communication };
        let buffer = self.program.add(size_of::<f32>() as u64, label, BufferKind::No);
        let flag = Operand::scalar(buffer);
        let request = self.program.add_request();
        let sum = InstrKind::Collective(Collective::AllReduce { group: Group::Experts }, request);
        let summed = Operand { overwritten_by: Some(0), ..flag.clone() };
        for (work, inputs, outputs) in [
            (InstrKind::Vote(count), vec![], vec![flag.clone()]),
            (sum, vec![summed], vec![flag.clone()]),
            (InstrKind::Finish(request), vec![flag.clone()], vec![]),
            (InstrKind::ApplyVote(count), vec![flag], vec![]),
        ] {
            self.program.instrs.push(Instr::plain(work, inputs, outputs, micro_batch, node.layer.clone()));
        }
    }

    /// Emits the conditional recomputation of evicted rows, if one of `readers` is the first node in the backward to
    /// read them.
    pub(super) fn bring_rows_back(&mut self, readers: &[&Node], micro_batch: u32) {
        let graph = self.of.graph;
        let inputs = readers.iter().flat_map(|node| &node.inputs);
        let read: BTreeSet<ValueId> =
            inputs.filter_map(|&input| self.evicted.read.get(&graph.value(input).root).copied()).collect();
        for starts in read {
            if !self.evicted.back.insert((starts, micro_batch)) {
                continue;
            }
            let Some(Rows { rematerialized, between, .. }) = self.rows_of(starts, micro_batch).cloned() else {
                continue;
            };
            between.iter().for_each(|&root| _ = self.placed.remove(&Origin::of(root, micro_batch)));
            let count = self.number(starts, micro_batch);
            for id in rematerialized {
                self.restore_inputs(graph.node(id), micro_batch);
                self.instruct(id, micro_batch, Occurrence::IfEvicted(count));
            }
        }
    }

    /// True if a root is only a temporary in the recomputation of evicted rows.
    pub(super) fn is_between(&self, root: ValueId, micro_batch: u32) -> bool {
        self.evicted(micro_batch).is_some_and(|all| all.values().any(|rows| rows.between.contains(&root)))
    }

    /// Returns the buffer of a root whose rows may have been evicted. `None` for any other root.
    pub(super) fn still_placed(&self, root: ValueId, micro_batch: u32) -> Option<BufferId> {
        let starts = self.evicted.read.get(&root)?;
        let waits = self.rows_of(*starts, micro_batch)?.roots.contains(&root);
        self.placed.get(&Origin::of(root, micro_batch)).copied().filter(|_| waits)
    }
}
