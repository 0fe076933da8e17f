//! A value's second life, from the backward on, computed again or brought back, and how often each life is read.

use std::collections::BTreeSet;

use gapless_graph::{Node, NodeId, Phase, Place, Source, ValueId};
use gapless_parallel::StageId;

use super::let_go::LetGo;
use super::{Lowerer, Lowering};
use crate::messages::Crossings;
use crate::recompute::Recomputation;

/// Which making of a value is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The forward's, or the only one.
    First,
    /// The one in front of its first reader in the backward.
    Second,
    /// That too, but only if the rows of this count were let go.
    IfLetGo(u32),
}

impl Life {
    /// The count that it depends on.
    pub(super) fn only_if(self) -> Option<u32> {
        match self {
            Self::First | Self::Second => None,
            Self::IfLetGo(count) => Some(count),
        }
    }

    fn index(self) -> usize {
        match self {
            Self::First => 0,
            Self::Second => 1,
            Self::IfLetGo(_) => 2,
        }
    }
}

/// How often the nodes that a rank runs read each root.
#[derive(Debug)]
pub(super) struct Reads<'a> {
    recomputation: &'a Recomputation,
    /// Per way of recomputing, per value: in its first and second life within a micro-batch, and in the one that it may have
    /// between rows that are made again.
    per_micro_batch: Vec<Vec<[usize; 3]>>,
    /// By the update and the host, per value.
    per_step: Vec<usize>,
}

impl<'a> Reads<'a> {
    pub(super) fn new(of: &Lowering<'a>, alive: &[bool], crossings: &Crossings, let_go: &LetGo) -> Self {
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
        let plain: Vec<[usize; 3]> = forward.iter().zip(&backward).map(|(f, b)| [f + b, 0, 0]).collect();
        let mut per_micro_batch = vec![plain];
        for variant in of.recomputation.variants() {
            let mut reads = per_micro_batch[0].clone();
            for root in variant.reborn(graph) {
                reads[root.index()] = [forward[root.index()], backward[root.index()], 0];
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
        for (table, reads) in per_micro_batch.iter_mut().enumerate() {
            let variant = table.checked_sub(1).map(|index| &of.recomputation.variants()[index]);
            let_go.reads(table, graph, |root, is_between| {
                let is_reborn = variant.is_some_and(|variant| variant.is_reborn(root));
                reads[root.index()][if is_between { 2 } else { usize::from(is_reborn) }] += 1;
            });
        }
        Self { recomputation: of.recomputation, per_micro_batch, per_step }
    }

    /// Reads of one instance of a root by the nodes of its micro-batch.
    pub(super) fn per_micro_batch(&self, root: ValueId, micro_batch: u32, life: Life) -> usize {
        self.per_micro_batch[self.recomputation.table(micro_batch)][root.index()][life.index()]
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
        if node.phase == Phase::Forward {
            return;
        }
        let graph = self.of.graph;
        let makers = self.missing(node, micro_batch).into_iter().map(|(maker, _)| graph.node(maker));
        let readers: Vec<&Node> = std::iter::once(node).chain(makers).collect();
        self.bring_rows_back(&readers, micro_batch);
        self.restore_inputs(node, micro_batch);
    }

    /// The same, but for rows that may have been let go.
    pub(super) fn restore_inputs(&mut self, node: &Node, micro_batch: u32) {
        for (maker, away) in self.missing(node, micro_batch) {
            match away {
                Some(root) => self.bring_back(root, micro_batch),
                None => self.instruct(self.of.graph.node(maker), micro_batch, Life::Second),
            }
        }
    }

    /// What must come back for a node: by its maker, or from where it was put away.
    fn missing(&self, node: &Node, micro_batch: u32) -> BTreeSet<(NodeId, Option<ValueId>)> {
        let of = self.of;
        let mut missing = BTreeSet::new();
        let Some(variant) = of.recomputation.of(micro_batch).map(|index| &of.recomputation.variants()[index]) else {
            return missing;
        };
        let root_of = |&input: &ValueId| of.graph.value(input).root;
        let mut wanted: Vec<ValueId> = node.inputs.iter().map(root_of).collect();
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
        missing
    }
}
