//! Overlaps gradient reduction with the backward: each gradient is summed over the data ranks as soon as this rank has
//! completed it.

use std::collections::HashSet;

use gapless_graph::ops::Collective;
use gapless_graph::{NodeId, Phase, Place, ValueId};
use gapless_parallel::Action;

use super::Lowerer;
use crate::cross_rank::phases;

/// A node of the update that is emitted as soon as its last input is complete.
#[derive(Debug)]
pub(super) struct EarlyNode {
    node: NodeId,
    /// Input roots that are not complete yet.
    incomplete_inputs: Vec<ValueId>,
}

impl Lowerer<'_> {
    /// Returns the nodes that can run early: the collectives that sum gradients over the data ranks, and the nodes
    /// between this rank's sums and these collectives.
    pub(super) fn early_nodes(&self) -> Vec<EarlyNode> {
        let graph = self.lowering.graph;
        let mut early: Vec<EarlyNode> = Vec::new();
        let mut computed = HashSet::new();
        for id in graph.node_ids() {
            let node = graph.node(id);
            let here = self.alive[id.index()] && node.phase == Phase::Update && node.place != Place::Everywhere;
            if !here || !self.is_here(node.place) {
                continue;
            }
            let roots: Vec<ValueId> = node.inputs.iter().map(|&input| graph.value(input).root).collect();
            let is_gradient = |root: &ValueId| {
                let maker = graph.producer(*root);
                maker.is_some_and(|maker| self.accumulated[root.index()] && self.is_here(maker.place))
            };
            let crosses = node.outputs.iter().any(|&output| self.crossings.per_step(output).next().is_some());
            if !crosses && roots.iter().all(|root| is_gradient(root) || computed.contains(root)) {
                if Collective::of(node).is_none() {
                    computed.extend(node.outputs.iter().copied());
                }
                early.push(EarlyNode { node: id, incomplete_inputs: roots });
            }
        }
        // Only nodes that lead to a collective are kept. Other nodes would gain nothing from running early.
        let mut wanted = HashSet::new();
        for EarlyNode { node, incomplete_inputs } in early.iter().rev() {
            let node = graph.node(*node);
            if Collective::of(node).is_some() || node.outputs.iter().any(|output| wanted.contains(output)) {
                wanted.extend(incomplete_inputs.iter().copied());
            }
        }
        early.retain(|EarlyNode { node, .. }| {
            let node = graph.node(*node);
            Collective::of(node).is_some() || node.outputs.iter().any(|output| wanted.contains(output))
        });
        early
    }

    /// Marks `values` as complete, and emits the early nodes whose inputs are now all complete.
    pub(super) fn complete(&mut self, values: &[ValueId]) {
        let graph = self.lowering.graph;
        let mut complete: Vec<ValueId> = values.to_vec();
        let mut waiting = std::mem::take(&mut self.early_update);
        waiting.retain_mut(|early| {
            early.incomplete_inputs.retain(|root| !complete.contains(root));
            let runs = early.incomplete_inputs.is_empty();
            if runs {
                self.emit_node(early.node, 0);
                self.alive[early.node.index()] = false;
                complete.extend(&graph.node(early.node).outputs);
            }
            !runs
        });
        self.early_update = waiting;
    }

    /// Returns the phases of this action that no later action of the same stage runs. If no early nodes are left,
    /// returns an empty list.
    pub(super) fn last_phases(&self, index: usize, action: &Action) -> Vec<Phase> {
        if self.early_update.is_empty() {
            return Vec::new();
        }
        let row = &self.lowering.table[self.lowering.rank];
        let runs_again = |phase: &Phase| {
            row[index + 1..].iter().any(|later| later.stage == action.stage && phases(later.kind).contains(phase))
        };
        phases(action.kind).iter().copied().filter(|phase| !runs_again(phase)).collect()
    }
}
