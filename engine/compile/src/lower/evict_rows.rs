//! Eviction of dynamic rows. If the arena has space for the rows, the rows are kept for the backward. Otherwise they
//! are evicted, and exchanged and recomputed once more in the backward.
//!
//! The ranks that exchange the rows decide this together while the step runs, as soon as the rows of a layer and
//! micro-batch are counted. Each rank votes ([`InstrKind::Vote`]), an all-reduce adds the votes, and
//! [`InstrKind::ApplyVote`] evicts the rows if any rank has no space.
//!
//! The program contains the instructions for both cases. The instructions that recompute the rows come before the first
//! reader in the backward, and run only if the rows were evicted. They write the same buffers as the forward, so a
//! reader reads the same buffer in both cases. Whether a buffer was kept is recorded only in the online arena. On all
//! ranks that exchange rows, the recomputing instructions are at the same position among the collectives, whatever else
//! each rank recomputes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use gapless_alloc::{Label, Role};
use gapless_graph::ops::Collective;
use gapless_graph::{Graph, Node, NodeId, Phase, ValueId};
use gapless_parallel::Axes;

use super::dynamic_rows::RowCounts;
use super::rematerialize::Occurrence;
use super::{BufferId, Lowerer, Lowering};
use crate::program::{BufferKind, Instance, Instr, InstrKind, Operand};
use crate::recompute::{SavedActivations, Variant};

/// The rows that may be evicted. `by_variant` is indexed first by the recomputation variant
/// ([`RematPlan::table_index`](crate::recompute::RematPlan::table_index)), then by the value that counts the rows.
#[derive(Debug, Default)]
pub(super) struct Evicted {
    by_variant: Vec<BTreeMap<ValueId, EvictableRows>>,
    /// Roots with dynamic rows that the forward computes and the backward reads, each with the value that counts its
    /// rows.
    read: HashMap<ValueId, ValueId>,
    /// Row counts and micro-batches for which the recomputation has been emitted.
    recomputed: HashSet<(ValueId, u32)>,
}

/// The rows of one row count.
#[derive(Debug, Default, Clone)]
pub(super) struct EvictableRows {
    /// Roots that are either kept for the backward or evicted and recomputed.
    roots: BTreeSet<ValueId>,
    /// The nodes that recompute evicted roots, in order.
    rematerialized: BTreeSet<NodeId>,
    /// Other roots that the recomputation computes and reads. They are not kept.
    temporaries: BTreeSet<ValueId>,
    /// The axes of the ranks that take part in the recomputation: they must come to the same decision.
    axes: Axes,
}

impl Evicted {
    pub(super) fn new(lowering: &Lowering<'_>, alive: &[bool], counts: &RowCounts) -> Self {
        if !lowering.evicts {
            return Self::default();
        }
        let graph = lowering.graph;
        let saved = SavedActivations::new(graph, alive);
        let mut read = HashMap::new();
        for node in graph.node_ids().filter(|id| alive[id.index()]).map(|id| graph.node(id)) {
            if matches!(node.phase, Phase::BackwardInput | Phase::BackwardWeight) {
                for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                    let is_forward = graph.producer(root).is_some_and(|maker| maker.phase == Phase::Forward);
                    if let Some(offsets) = counts.offsets_of(graph, root).filter(|_| is_forward) {
                        read.insert(root, offsets);
                    }
                }
            }
        }
        let plain = Variant::default();
        let variants = std::iter::once(&plain).chain(lowering.recomputation.variants());
        let rows = |variant: &Variant| {
            let mut by_count: BTreeMap<ValueId, EvictableRows> = BTreeMap::new();
            for (&root, &offsets) in &read {
                if !variant.is_rematerialized(root) && is_repeatable(graph, &saved, root) {
                    by_count.entry(offsets).or_default().roots.insert(root);
                }
            }
            by_count.values_mut().for_each(|rows| rows.find_recomputation(graph, &saved, variant));
            by_count
        };
        Self { by_variant: variants.map(rows).collect(), read, recomputed: HashSet::new() }
    }
}

impl EvictableRows {
    /// Finds the nodes that recompute `roots` from values that are available even if the rows were evicted.
    fn find_recomputation(&mut self, graph: &Graph, saved: &SavedActivations<'_>, variant: &Variant) {
        let mut missing: Vec<ValueId> = self.roots.iter().copied().collect();
        while let Some(root) = missing.pop() {
            let Some(maker) = graph.producer_id(root) else { continue };
            if !self.rematerialized.insert(maker) {
                continue;
            }
            self.axes = self.axes | Collective::of(graph.node(maker)).map_or(Axes::NONE, Collective::axes);
            for input in graph.node(maker).inputs.iter().map(|&input| graph.value(input).root) {
                let is_there = self.roots.contains(&input) || variant.is_rematerialized(input) || saved.is_read(input);
                if !is_there
                    && !saved.leaves_layer(input)
                    && saved.is_repeatable(input)
                    && self.temporaries.insert(input)
                {
                    missing.push(input);
                }
            }
        }
    }
}

/// True if a root can be recomputed by an ordinary operation, or by exchanging its rows again.
fn is_repeatable(graph: &Graph, saved: &SavedActivations<'_>, root: ValueId) -> bool {
    let is_exchange = |node: &Node| matches!(Collective::of(node), Some(Collective::AllToAllRows { .. }));
    saved.is_repeatable(root) || graph.producer(root).is_some_and(is_exchange)
}

impl Lowerer<'_> {
    /// Returns the rows that a micro-batch may evict, by the value that counts the rows. Returns `None` if the step
    /// evicts no rows.
    fn evicted(&self, micro_batch: u32) -> Option<&BTreeMap<ValueId, EvictableRows>> {
        self.evicted.by_variant.get(self.lowering.recomputation.table_index(micro_batch))
    }

    fn rows_of(&self, offsets: ValueId, micro_batch: u32) -> Option<&EvictableRows> {
        self.evicted(micro_batch)?.get(&offsets)
    }

    /// If `node`, whose instruction was just emitted, counts rows that may be evicted, emits the vote on whether to
    /// keep these rows.
    pub(super) fn emit_vote(&mut self, node: &Node, micro_batch: u32) {
        let Some(count) = self.program.instrs.last().and_then(|instr| instr.defines_count) else { return };
        let offsets = node.outputs[0];
        let Some(&EvictableRows { axes, .. }) = self.rows_of(offsets, micro_batch) else { return };
        let exchanged = node.inputs.iter().filter_map(|&input| Collective::of(self.lowering.graph.producer(input)?));
        let axes = exchanged.fold(axes, |axes, exchange| axes | exchange.axes());
        let tensor = format!("{}/no room for rows of micro-batch {micro_batch}", node.layer);
        let label = Label { tensor, op: "offer".into(), layer: node.layer.to_string(), role: Role::Communication };
        let buffer = self.program.add(size_of::<f32>() as u64, label, BufferKind::Temporary);
        let flag = Operand::scalar(buffer);
        let request = self.program.add_request();
        let sum = InstrKind::Collective(Collective::AllReduce { axes }, request);
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
    pub(super) fn recompute_evicted(&mut self, readers: &[&Node], micro_batch: u32) {
        let graph = self.lowering.graph;
        let inputs = readers.iter().flat_map(|node| &node.inputs);
        let read: BTreeSet<ValueId> =
            inputs.filter_map(|&input| self.evicted.read.get(&graph.value(input).root).copied()).collect();
        for offsets in read {
            if !self.evicted.recomputed.insert((offsets, micro_batch)) {
                continue;
            }
            let Some(EvictableRows { rematerialized, temporaries, .. }) = self.rows_of(offsets, micro_batch).cloned()
            else {
                continue;
            };
            temporaries.iter().for_each(|&root| _ = self.live_buffer.remove(&Instance::micro_batch(root, micro_batch)));
            let count = self.count_id(offsets, micro_batch);
            for id in rematerialized {
                self.rematerialize_static_inputs(graph.node(id), micro_batch);
                self.emit(id, micro_batch, Occurrence::RecomputedIfEvicted(count));
            }
        }
    }

    /// True if a root is only a temporary in the recomputation of evicted rows.
    pub(super) fn is_temporary(&self, root: ValueId, micro_batch: u32) -> bool {
        self.evicted(micro_batch).is_some_and(|all| all.values().any(|rows| rows.temporaries.contains(&root)))
    }

    /// Returns the buffer of a root whose rows may have been evicted. Returns `None` for any other root.
    pub(super) fn still_live(&self, root: ValueId, micro_batch: u32) -> Option<BufferId> {
        let offsets = self.evicted.read.get(&root)?;
        let is_evictable = self.rows_of(*offsets, micro_batch)?.roots.contains(&root);
        self.live_buffer.get(&Instance::micro_batch(root, micro_batch)).copied().filter(|_| is_evictable)
    }
}
