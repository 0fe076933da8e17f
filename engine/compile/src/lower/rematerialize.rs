//! A value's second occurrence: computed again in front of its first reader in the backward.

use std::collections::{BTreeSet, HashMap};

use gapless_graph::{Node, NodeId, Phase, Place, Source, ValueId};
use gapless_parallel::StageId;

use super::Lowerer;
use crate::lowering::Lowering;
use crate::program::Origin;
use crate::recompute::Variant;

/// Which making of a value is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occurrence {
    /// The forward's, or the only one.
    First,
    /// The one in front of its first reader in the backward.
    Second,
    /// That too, but only if the rows of this count were let go.
    IfEvicted(u32),
}

impl Occurrence {
    /// The count that it depends on.
    pub(super) fn predicate(self) -> Option<u32> {
        match self {
            Self::First | Self::Second => None,
            Self::IfEvicted(count) => Some(count),
        }
    }
}

/// A node whose results the weight-gradients read, and that are smaller than what of its inputs would wait for them otherwise.
pub(super) struct SmallerForWeights {
    node: NodeId,
    /// What makes the last of those inputs.
    last_input: NodeId,
}

/// Such nodes of each way to recompute.
pub(super) fn smaller_for_weights(
    of: &Lowering<'_>,
    nodes: &HashMap<(Place, Phase), Vec<NodeId>>,
) -> Vec<Vec<SmallerForWeights>> {
    let graph = of.graph;
    let mut by_weights = vec![false; graph.values().len()];
    for (_, nodes) in nodes.iter().filter(|((_, phase), _)| *phase == Phase::BackwardWeight) {
        for &input in nodes.iter().flat_map(|&node| &graph.node(node).inputs) {
            by_weights[graph.value(input).root.index()] = true;
        }
    }
    let bytes = |roots: &BTreeSet<ValueId>| roots.iter().map(|&root| graph.value(root).spec.bytes()).sum::<u64>();
    let of_variant = |variant: &Variant| {
        let of_node = |&node: &NodeId| {
            let rematerialized = |all: &[ValueId]| -> BTreeSet<ValueId> {
                all.iter().map(|&id| graph.value(id).root).filter(|&root| variant.is_rematerialized(root)).collect()
            };
            let (inputs, outputs) = (&graph.node(node).inputs, &graph.node(node).outputs);
            let made = rematerialized(outputs);
            let mut waiting = rematerialized(inputs);
            waiting.retain(|root| !by_weights[root.index()]);
            let is_wanted = made.iter().any(|root| by_weights[root.index()]);
            let last_input = waiting.iter().filter_map(|&root| graph.maker(root)).max()?;
            (is_wanted && bytes(&made) < bytes(&waiting)).then_some(SmallerForWeights { node, last_input })
        };
        variant.nodes().iter().filter_map(of_node).collect()
    };
    of.recomputation.variants().iter().map(of_variant).collect()
}

impl Lowerer<'_> {
    /// Ends the first lives of a stage's values, behind its forward.
    pub(super) fn drop_rematerialized(&mut self, stage: StageId, micro_batch: u32) {
        let of = self.of;
        let Some(variant) = of.recomputation.of(micro_batch) else { return };
        for root in of.recomputation.variants()[variant].rematerialized(of.graph) {
            if of.graph.place_of(root) == Some(Place::Stage(stage)) {
                self.placed.remove(&Origin::of(root, micro_batch));
            }
        }
    }

    /// Makes again what this node is the first to read in the backward.
    pub(super) fn restore(&mut self, node: &Node, micro_batch: u32) {
        if node.phase == Phase::Forward {
            return;
        }
        let graph = self.of.graph;
        let makers = self.missing(node, micro_batch).into_iter().map(|maker| graph.node(maker));
        let readers: Vec<&Node> = std::iter::once(node).chain(makers).collect();
        self.bring_rows_back(&readers, micro_batch);
        self.restore_inputs(node, micro_batch);
    }

    /// The same, but for rows that may have been let go.
    pub(super) fn restore_inputs(&mut self, node: &Node, micro_batch: u32) {
        for maker in self.missing(node, micro_batch) {
            self.instruct(maker, micro_batch, Occurrence::Second);
            if self.is_split && node.phase == Phase::BackwardInput {
                self.make_for_weights(maker, micro_batch);
            }
        }
    }

    /// Makes what only the weight-gradients will read, and what a node has just made leads to, where it takes fewer bytes than what it
    /// is made of: of a layer x → gate, up → swiglu, I reads gate and up, and W swiglu alone. Made at W, both would wait for it.
    fn make_for_weights(&mut self, made: NodeId, micro_batch: u32) {
        let graph = self.of.graph;
        let of = &self.of.recomputation;
        let Some(index) = of.of(micro_batch) else { return };
        let smaller = self.smaller_for_weights[index].iter().filter(|smaller| smaller.last_input == made);
        for node in smaller.map(|smaller| smaller.node).collect::<Vec<_>>() {
            let variant = &of.variants()[index];
            let is_there = |input: &ValueId| {
                let root = graph.value(*input).root;
                !variant.is_rematerialized(root) || self.placed.contains_key(&Origin::of(root, micro_batch))
            };
            let is_made = |output: &ValueId| self.placed.contains_key(&Origin::of(*output, micro_batch));
            if graph.node(node).inputs.iter().all(is_there) && !graph.node(node).outputs.iter().any(is_made) {
                self.instruct(node, micro_batch, Occurrence::Second);
            }
        }
    }

    /// The nodes that must run again for a node.
    fn missing(&self, node: &Node, micro_batch: u32) -> BTreeSet<NodeId> {
        let of = self.of;
        let mut missing = BTreeSet::new();
        let Some(variant) = of.recomputation.of(micro_batch).map(|index| &of.recomputation.variants()[index]) else {
            return missing;
        };
        let root_of = |&input: &ValueId| of.graph.value(input).root;
        let mut wanted: Vec<ValueId> = node.inputs.iter().map(root_of).collect();
        while let Some(root) = wanted.pop() {
            if !variant.is_rematerialized(root) || self.placed.contains_key(&Origin::of(root, micro_batch)) {
                continue;
            }
            let Source::Node { node: maker, .. } = of.graph.value(root).source else { continue };
            if missing.insert(maker) {
                wanted.extend(of.graph.node(maker).inputs.iter().map(root_of));
            }
        }
        missing
    }
}
