//! A value's second life, from the backward on, computed again or brought back, and how often each life is read.

use std::collections::BTreeSet;

use gapless_parallel::StageId;

use super::{Lowerer, Lowering};
use crate::compile::messages::Crossings;
use crate::graph::{Node, NodeId, Phase, Place, Source, ValueId};
use crate::recompute::Recomputation;

/// Which making of a value is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The forward's, or the only one.
    First,
    /// The one in front of its first reader in the backward.
    Second,
}

/// How often the nodes that a rank runs read each root.
#[derive(Debug)]
pub(super) struct Reads<'a> {
    recomputation: &'a Recomputation,
    /// Per way of recomputing, per value: in its first and second life, within a micro-batch.
    per_micro_batch: Vec<Vec<[usize; 2]>>,
    /// By the update and the host, per value.
    per_step: Vec<usize>,
}

impl<'a> Reads<'a> {
    pub(super) fn new(of: &Lowering<'a>, alive: &[bool], crossings: &Crossings) -> Self {
        let graph = of.graph;
        let values = graph.values().len();
        let (mut forward, mut backward, mut per_step) = (vec![0; values], vec![0; values], vec![0; values]);
        for node in graph.node_ids().filter(|id| alive[id.index()]).map(|id| graph.node(id)) {
            if !crossings.ranks_of(node.place).contains(&of.rank) {
                continue;
            }
            for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                match node.phase {
                    Phase::Forward => forward[root.index()] += 1,
                    Phase::BackwardInput | Phase::BackwardWeight => backward[root.index()] += 1,
                    Phase::Update => per_step[root.index()] += 1,
                }
            }
            for &output in &node.outputs {
                forward[output.index()] += crossings.per_micro_batch(output).count();
                per_step[output.index()] += crossings.per_step(output).count();
            }
        }
        // What the host reads is never overwritten.
        for output in of.outputs {
            per_step[graph.value(output.value).root.index()] += 1;
        }
        let plain: Vec<[usize; 2]> = forward.iter().zip(&backward).map(|(f, b)| [f + b, 0]).collect();
        let mut per_micro_batch = vec![plain];
        for variant in of.recomputation.variants() {
            let mut reads = per_micro_batch[0].clone();
            for root in variant.reborn(graph) {
                reads[root.index()] = [forward[root.index()], backward[root.index()]];
            }
            // Putting it away reads it too.
            variant.stashed().for_each(|root| reads[root.index()][0] += 1);
            for node in variant.again().iter().map(|&id| graph.node(id)) {
                if crossings.ranks_of(node.place).contains(&of.rank) {
                    for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                        reads[root.index()][usize::from(variant.is_reborn(root))] += 1;
                    }
                }
            }
            per_micro_batch.push(reads);
        }
        Self { recomputation: of.recomputation, per_micro_batch, per_step }
    }

    /// Reads of one instance of a root by the nodes of its micro-batch.
    pub(super) fn per_micro_batch(&self, root: ValueId, micro_batch: u32, life: Life) -> usize {
        // The first table is that of nothing recomputed.
        let table = self.recomputation.of(micro_batch).map_or(0, |variant| variant + 1);
        self.per_micro_batch[table][root.index()][life as usize]
    }

    /// Reads of a root by the update and the host.
    pub(super) fn per_step(&self, root: ValueId) -> usize {
        self.per_step[root.index()]
    }
}

impl Lowerer<'_> {
    /// Ends the first lives of a stage's values, behind its forward.
    pub(super) fn drop_reborn(&mut self, stage: StageId, micro_batch: u32) {
        let of = self.of;
        let Some(variant) = of.recomputation.of(micro_batch) else { return };
        for root in of.recomputation.variants()[variant].reborn(of.graph) {
            if of.graph.place_of(root) == Some(Place::Stage(stage)) {
                self.placed.remove(&(root, micro_batch));
            }
        }
    }

    /// Makes again, or brings back, what this node is the first to read in the backward.
    pub(super) fn restore(&mut self, node: &Node, micro_batch: u32) {
        let of = self.of;
        let Some(variant) = of.recomputation.of(micro_batch).map(|index| &of.recomputation.variants()[index]) else {
            return;
        };
        if node.phase == Phase::Forward {
            return;
        }
        let root_of = |&input: &ValueId| of.graph.value(input).root;
        let mut wanted: Vec<ValueId> = node.inputs.iter().map(root_of).collect();
        // What comes back: by its maker, or from where it was put away.
        let mut missing: BTreeSet<(NodeId, Option<ValueId>)> = BTreeSet::new();
        while let Some(root) = wanted.pop() {
            if !variant.is_reborn(root) || self.placed.contains_key(&(root, micro_batch)) {
                continue;
            }
            let Source::Node { node: maker, .. } = of.graph.value(root).source else { continue };
            let away = variant.stash(root).map(|_| root);
            if missing.insert((maker, away)) && away.is_none() {
                wanted.extend(of.graph.node(maker).inputs.iter().map(root_of));
            }
        }
        for (maker, away) in missing {
            match away {
                Some(root) => self.bring_back(root, micro_batch),
                None => self.instruct(of.graph.node(maker), micro_batch, Life::Second),
            }
        }
    }
}
