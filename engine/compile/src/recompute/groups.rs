//! What counts as a layer where layers are looked at one by one.
//!
//! A layer is all that has one name up to its number, e.g. `h.3`. What stands outside of numbered layers is one layer more in
//! front of them (embeddings), and one behind them (the last norm, the head); all of a model that has no numbered ones.

use std::collections::HashMap;
use std::sync::Arc;

use gapless_graph::{Graph, Node, Phase};

use crate::recompute::policy::block_of;

/// Layers of a graph, by the names of its nodes.
#[derive(Debug)]
pub(super) struct Groups {
    of: HashMap<Arc<str>, Group>,
}

/// A layer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Group {
    Front,
    Numbered(Arc<str>),
    Back,
}

impl Groups {
    pub(super) fn of(graph: &Graph) -> Self {
        let mut of: HashMap<Arc<str>, Group> = HashMap::new();
        let mut outside = Group::Front;
        for node in graph.nodes().iter().filter(|node| node.phase == Phase::Forward) {
            let group = match block_of(&node.layer) {
                Some(block) => {
                    outside = Group::Back;
                    Group::Numbered(block.into())
                }
                None => outside.clone(),
            };
            of.entry(node.layer.clone()).or_insert(group);
        }
        Self { of }
    }

    /// The layer of a node; gradients are of the layer that they are gradients of.
    pub(super) fn of_node(&self, node: &Node) -> Group {
        self.of.get(&node.layer).cloned().unwrap_or(Group::Back)
    }
}
