//! What of a forward pass is kept until its backward, and what is computed a second time.
//!
//! In: a graph with its gradients, and a [`Recompute`] policy. Out: a [`RematPlan`]: per micro-batch, the values that
//! die with the forward although the backward reads them, and the nodes that bring them back. The compiler runs those
//! nodes again right in front of the first reader of what they make, and only those that lead to something read (Chen et
//! al., arXiv 1604.06174; selective: Korthikanti et al., arXiv 2205.05198). Dropout draws the same numbers again, and
//! kernels are deterministic, so that every policy gives the same bits. Never: an order of actions, or an address.
//!
//! What is kept may wait otherwise than as it is: in eight bits, or in a file ([`Offload`]).
//!
//! Nothing is recomputed over the border of a stage: what another stage reads is kept.

mod block;
mod budget;
mod groups;
mod layer;
mod min_cut;
pub(crate) mod policy;
mod saved;
mod stash;

pub(crate) use policy::Resolving;
pub use policy::{CustomPolicy, Layers, Recompute, RecomputePolicy, block_of};
pub(crate) use saved::SavedActivations;
pub use stash::Offload;
pub(crate) use stash::{Stash, Stashing};

use std::collections::BTreeMap;

use gapless_graph::{Graph, NodeId, ValueId};

/// What each micro-batch of a step drops and computes again.
#[derive(Debug, Clone, Default)]
pub struct RematPlan {
    /// The different ways; never empty once resolved.
    variants: Vec<Variant>,
    /// Micro-batch m goes the way `cycle[m mod n]`,
    cycle: Vec<usize>,
    /// but for this one, which goes a way of its own.
    exception: Option<(u32, usize)>,
}

/// What one micro-batch drops, and what brings it back.
#[derive(Debug, Clone, Default)]
pub struct Variant {
    /// Roots that have a second occurrence, by index of the value: those dropped, and what leads to them.
    rematerialized: Vec<bool>,
    /// Nodes that run a second time, in order.
    nodes: Vec<NodeId>,
    /// Roots that wait for the backward otherwise than as they are.
    stash: BTreeMap<ValueId, Stash>,
}

impl Variant {
    /// Whether a root of the forward ends with it, and is computed again in the backward.
    pub fn is_rematerialized(&self, root: ValueId) -> bool {
        self.rematerialized.get(root.index()).copied().unwrap_or(false)
    }

    /// Nodes that run a second time, in order.
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// The roots that are computed again.
    pub fn rematerialized<'g>(&'g self, graph: &'g Graph) -> impl Iterator<Item = ValueId> + 'g {
        let outputs = self.nodes.iter().flat_map(|&node| &graph.node(node).outputs);
        outputs.copied().filter(|&root| self.is_rematerialized(root))
    }

    /// How a root waits for the backward, if not as it is.
    pub fn stash(&self, root: ValueId) -> Option<Stash> {
        self.stash.get(&root).copied()
    }

    /// The roots that do not wait as they are, and how they do.
    pub fn stashed(&self) -> impl Iterator<Item = (ValueId, Stash)> + '_ {
        self.stash.iter().map(|(&root, &stash)| (root, stash))
    }
}

impl RematPlan {
    /// One way for all micro-batches.
    pub fn uniform(variant: Variant) -> Self {
        Self { variants: vec![variant], cycle: vec![0], exception: None }
    }

    /// The same, with another way for one micro-batch.
    pub fn but_for(mut self, micro_batch: u32, variant: Variant) -> Self {
        self.exception = Some((micro_batch, self.variants.len()));
        self.variants.push(variant);
        self
    }

    /// The ways that there are.
    pub fn variants(&self) -> &[Variant] {
        &self.variants
    }

    /// Which of the ways a micro-batch goes; none where nothing is recomputed at all.
    pub fn of(&self, micro_batch: u32) -> Option<usize> {
        match self.exception {
            Some((exception, variant)) if exception == micro_batch => Some(variant),
            _ => (!self.cycle.is_empty()).then(|| self.cycle[micro_batch as usize % self.cycle.len()]),
        }
    }

    /// Index of a micro-batch's way into tables whose first entry is for nothing recomputed at all.
    pub fn table(&self, micro_batch: u32) -> usize {
        self.of(micro_batch).map_or(0, |variant| variant + 1)
    }
}
