//! Groups nodes into layers, so that recomputation can be examined layer by layer.
//!
//! A numbered layer consists of all nodes whose names share a prefix that ends in a number, e.g. `h.3`. The other nodes
//! form two more layers: one before the numbered layers (embeddings), and one after them (the last norm, the head). A
//! model without numbered layers is one layer.

use std::collections::HashMap;
use std::sync::Arc;

use gapless_graph::{Graph, Node, Phase};

use crate::recompute::policy::block_of;

/// The layer of each node, by the node's name.
#[derive(Debug)]
pub(super) struct Groups {
    by_layer: HashMap<Arc<str>, Group>,
}

/// A layer of the model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Group {
    Front,
    Numbered(Arc<str>),
    Back,
}

impl Groups {
    pub(super) fn of(graph: &Graph) -> Self {
        let mut by_layer: HashMap<Arc<str>, Group> = HashMap::new();
        let mut outside = Group::Front;
        for node in graph.nodes().iter().filter(|node| node.phase == Phase::Forward) {
            let group = match block_of(&node.layer) {
                Some(block) => {
                    outside = Group::Back;
                    Group::Numbered(block.into())
                }
                None => outside.clone(),
            };
            by_layer.entry(node.layer.clone()).or_insert(group);
        }
        Self { by_layer }
    }

    /// Returns the layer of a node. Gradient nodes belong to the layer of their forward node.
    pub(super) fn of_node(&self, node: &Node) -> Group {
        self.by_layer.get(&node.layer).cloned().unwrap_or(Group::Back)
    }
}
