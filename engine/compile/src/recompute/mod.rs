//! What of a forward pass is kept until its backward, and what is computed a second time.
//!
//! In: a graph with its gradients, and a [`Recompute`] policy. Out: a [`RematPlan`]: per micro-batch, the values that
//! die with the forward although the backward reads them, and the nodes that bring them back. The compiler runs those
//! nodes again right in front of the first reader of what they make, and only those that lead to something read (Chen et
//! al., arXiv 1604.06174; selective: Korthikanti et al., arXiv 2205.05198). Dropout draws the same numbers again, and
//! kernels are deterministic, so that every policy gives the same bits. Never: an order of actions, or an address.
//!
//! What is kept may wait otherwise than as it is: in eight bits, or in a file.
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
mod twice;

pub(crate) use policy::Resolving;
pub use policy::{CustomPolicy, Layers, Recompute, RecomputePolicy, block_of};
pub(crate) use saved::SavedActivations;
pub(crate) use stash::{Stash, Stashing};
pub use twice::stages_twice;

use std::collections::{BTreeMap, BTreeSet};

use gapless_graph::{Graph, NodeId, Place, ValueId};
use gapless_parallel::StageId;

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
    /// Roots that end with the input gradients where a schedule splits the backward, whether they were kept or came back for them,
    /// and are computed again where the weight gradients miss them.
    end_with_input: BTreeSet<ValueId>,
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

    /// Whether a root does not wait for the weight gradients of a split backward.
    pub fn ends_with_input(&self, root: ValueId) -> bool {
        self.end_with_input.contains(&root)
    }

    /// The roots that do not.
    pub fn ending_with_input(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.end_with_input.iter().copied()
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

    /// The same, but in these stages what comes back for the input gradients of a split backward ends with them, and comes back
    /// once more for the weight gradients.
    pub fn twice_in(mut self, graph: &Graph, stages: &BTreeSet<StageId>) -> Self {
        for variant in &mut self.variants {
            let is_in = |root: &ValueId| match graph.place_of(*root) {
                Some(Place::Stage(stage)) => stages.contains(&stage),
                _ => false,
            };
            variant.end_with_input = variant.rematerialized(graph).filter(is_in).collect();
        }
        self
    }

    /// Whether anything is recomputed at all.
    pub fn is_empty(&self) -> bool {
        self.variants.iter().all(|variant| variant.nodes.is_empty())
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
