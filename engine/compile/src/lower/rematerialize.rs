//! A value's second occurrence: computed again in front of its first reader in the backward.

use std::collections::BTreeSet;

use gapless_graph::{Node, NodeId, Phase, Place, Source, ValueId};
use gapless_parallel::StageId;

use super::Lowerer;
use crate::program::Origin;

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
