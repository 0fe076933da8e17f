//! Activation recomputation: which forward values are kept until the backward, and which are recomputed.
//!
//! - In: a graph with its gradients, and a [`Recompute`] policy.
//! - Out: a [`RematPlan`]. For each micro-batch, it holds the values that are freed after the forward although the
//!   backward reads them, and the nodes that recompute these values.
//! - Never: an order of actions, or an address.
//!
//! Lowering repeats a node right before the first reader of the node's result, and only if the node leads to a value
//! that is read (full recomputation: Chen et al., arXiv 1604.06174; selective: Korthikanti et al., arXiv 2205.05198).
//! Dropout draws the same random numbers again, and kernels are deterministic. So every policy gives the same bits.
//!
//! Kept values can also be compressed to eight bits, or offloaded to a file (`stash`).
//!
//! Recomputation never crosses a stage boundary: values that another stage reads are kept.

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
pub(crate) use policy::layers_of;
pub use policy::{CustomPolicy, Layers, Recompute, RecomputePolicy, block_of};
pub(crate) use saved::{SavedActivations, gathers_persistent};
pub(crate) use stash::{ActivationStorage, StorageOptions};
pub use twice::stages_that_recompute_twice;

use std::collections::{BTreeMap, BTreeSet};

use gapless_graph::ops::Collective;
use gapless_graph::{Graph, NodeId, Place, ValueId};
use gapless_parallel::StageId;

/// The values that each micro-batch of a step drops and recomputes.
#[derive(Debug, Clone, Default)]
pub struct RematPlan {
    /// The distinct variants. Never empty once a policy has been resolved.
    variants: Vec<Variant>,
    /// Micro-batch m uses variant `cycle[m mod n]`, where n is the length of the cycle.
    cycle: Vec<usize>,
    /// The index of a micro-batch that has its own variant, and the variant's index.
    exception: Option<(u32, usize)>,
}

/// The values that one micro-batch drops, and the nodes that recompute them.
#[derive(Debug, Clone, Default)]
pub struct Variant {
    /// By value index: whether the root is recomputed. This is so if the root is dropped, or if a dropped value is
    /// computed from the root.
    rematerialized: Vec<bool>,
    /// Recomputed nodes, in order.
    nodes: Vec<NodeId>,
    /// Roots that are freed at the end of the input gradients of a split backward, whether they were kept or recomputed
    /// until then. The weight gradients that read such a root recompute it first.
    end_with_input: BTreeSet<ValueId>,
    /// Roots that are compressed or offloaded between forward and backward.
    stash: BTreeMap<ValueId, ActivationStorage>,
}

impl Variant {
    /// True if a root is freed after the forward and recomputed in the backward.
    pub fn is_rematerialized(&self, root: ValueId) -> bool {
        self.rematerialized.get(root.index()).copied().unwrap_or(false)
    }

    /// Returns the recomputed nodes, in order.
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// True if a root is not kept from the input gradients to the weight gradients of a split backward.
    pub fn ends_with_input(&self, root: ValueId) -> bool {
        self.end_with_input.contains(&root)
    }

    /// Returns all roots that are not kept from the input gradients to the weight gradients.
    pub fn ending_with_input(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.end_with_input.iter().copied()
    }

    /// Returns all roots that are recomputed.
    pub fn rematerialized<'g>(&'g self, graph: &'g Graph) -> impl Iterator<Item = ValueId> + 'g {
        let outputs = self.nodes.iter().flat_map(|&node| &graph.node(node).outputs);
        outputs.copied().filter(|&root| self.is_rematerialized(root))
    }

    /// Returns how a root is stored until the backward. Returns `None` if it is neither compressed nor offloaded.
    pub fn stash(&self, root: ValueId) -> Option<ActivationStorage> {
        self.stash.get(&root).copied()
    }

    /// Returns the roots that are compressed or offloaded, and which of the two each is.
    pub fn stashed(&self) -> impl Iterator<Item = (ValueId, ActivationStorage)> + '_ {
        self.stash.iter().map(|(&root, &stash)| (root, stash))
    }
}

impl RematPlan {
    /// Returns a plan in which all micro-batches use the same variant.
    pub fn uniform(variant: Variant) -> Self {
        Self { variants: vec![variant], cycle: vec![0], exception: None }
    }

    /// Returns this plan, except that the given micro-batch uses `variant`.
    pub fn except(mut self, micro_batch: u32, variant: Variant) -> Self {
        self.exception = Some((micro_batch, self.variants.len()));
        self.variants.push(variant);
        self
    }

    /// Returns this plan with recomputation in both halves of a split backward for these stages. Values that are
    /// recomputed for the input gradients are freed after the input gradients, and recomputed once more for the weight
    /// gradients.
    pub fn recompute_in_both_halves(mut self, graph: &Graph, stages: &BTreeSet<StageId>) -> Self {
        for variant in &mut self.variants {
            let is_in = |root: &ValueId| match graph.place_of(*root) {
                Some(Place::Stage(stage)) => stages.contains(&stage),
                _ => false,
            };
            let ends: Vec<ValueId> = variant.rematerialized(graph).filter(is_in).collect();
            variant.end_with_input.extend(ends);
        }
        self
    }

    /// True if the recomputation repeats collectives besides the gathers of persistent tensors.
    pub fn repeats_exchanges(&self, graph: &Graph) -> bool {
        let mut nodes = self.variants.iter().flat_map(|variant| &variant.nodes).map(|&node| graph.node(node));
        nodes.any(|node| Collective::of(node).is_some() && !gathers_persistent(graph, node))
    }

    /// True if nothing is recomputed.
    pub fn is_empty(&self) -> bool {
        self.variants.iter().all(|variant| variant.nodes.is_empty())
    }

    /// Returns the distinct variants.
    pub fn variants(&self) -> &[Variant] {
        &self.variants
    }

    /// Returns the index of a micro-batch's variant, or `None` if the plan is empty and so recomputes nothing.
    pub fn variant_of(&self, micro_batch: u32) -> Option<usize> {
        match self.exception {
            Some((exception, variant)) if exception == micro_batch => Some(variant),
            _ => (!self.cycle.is_empty()).then(|| self.cycle[micro_batch as usize % self.cycle.len()]),
        }
    }

    /// Returns the index of a micro-batch's variant in tables whose entry 0 stands for "nothing is recomputed".
    pub fn table_index(&self, micro_batch: u32) -> usize {
        self.variant_of(micro_batch).map_or(0, |variant| variant + 1)
    }
}
