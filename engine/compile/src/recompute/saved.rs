//! The forward values that the backward reads, and which of them can be recomputed.

use std::collections::{BTreeMap, BTreeSet};

use gapless_graph::ops::Collective;
use gapless_graph::{FLOATS, Graph, Node, NodeId, Phase, Place, Source, Spec, ValueId};
use gapless_parallel::Axes;

use super::groups::Groups;
use super::{ActivationStorage, Variant};

/// The values that the forward passes to its own backward.
#[derive(Debug)]
pub struct SavedActivations<'g> {
    graph: &'g Graph,
    /// Values that may be dropped, in the order in which they are computed.
    roots: Vec<ValueId>,
    /// By value index: whether the node that computes it can run again.
    repeatable: Vec<bool>,
    /// By value index: whether the backward reads it.
    is_read: Vec<bool>,
    /// By value index: whether a weight gradient reads it.
    by_weights: Vec<bool>,
    /// By value index: whether a forward node of another layer reads it.
    leaves_layer: Vec<bool>,
    /// By value index: whether it is a gathered persistent tensor. All ranks of the group repeat the gather.
    is_gathered: Vec<bool>,
    /// Values that are compressed or offloaded, unless they are recomputed.
    stash: BTreeMap<ValueId, ActivationStorage>,
}

impl<'g> SavedActivations<'g> {
    /// Analyses the nodes of `graph` that are `alive`.
    pub fn new(graph: &'g Graph, alive: &[bool]) -> Self {
        Self::of(graph, alive, false)
    }

    /// Like [`Self::new`], except that the backward may repeat the gathers and scatters of tokens. All ranks must then drop
    /// the same values, so the choice must not depend on the sizes of values, in which ranks may differ.
    pub fn repeating_collectives(graph: &'g Graph, alive: &[bool]) -> Self {
        Self::of(graph, alive, true)
    }

    fn of(graph: &'g Graph, alive: &[bool], repeats: bool) -> Self {
        let (values, groups) = (graph.values().len(), Groups::of(graph));
        let [mut is_read, mut by_weights, mut leaves_layer, mut leaves_stage, mut is_summed] =
            [(); 5].map(|()| vec![false; values]);
        for node in graph.node_ids().filter(|id| alive[id.index()]).map(|id| graph.node(id)) {
            for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                let Some(maker) = graph.producer(root).filter(|maker| maker.phase == Phase::Forward) else { continue };
                match node.phase {
                    Phase::Forward => leaves_layer[root.index()] |= groups.of_node(node) != groups.of_node(maker),
                    Phase::BackwardInput | Phase::BackwardWeight => is_read[root.index()] = true,
                    Phase::Update => is_summed[root.index()] = true,
                }
                by_weights[root.index()] |= node.phase == Phase::BackwardWeight;
                leaves_stage[root.index()] |= node.place != maker.place;
            }
        }
        let (mut roots, mut repeatable, mut is_gathered) = (Vec::new(), vec![false; values], vec![false; values]);
        for node in graph.node_ids().filter(|id| alive[id.index()]).map(|id| graph.node(id)) {
            let stays = node.outputs.iter().all(|o| !leaves_stage[o.index()] && !is_summed[o.index()]);
            let gathers = gathers_persistent(graph, node);
            let is_repeated = |collective| repeats && moves_tokens(collective);
            let pure = gathers || node.op.mutates().is_empty() && Collective::of(node).is_none_or(is_repeated);
            if node.phase == Phase::Forward && stays && pure && node.place != Place::Everywhere {
                node.outputs.iter().for_each(|output| repeatable[output.index()] = true);
                if gathers {
                    is_gathered[node.outputs[0].index()] = true;
                    continue;
                }
                roots.extend(node.outputs.iter().copied().filter(|output| is_read[output.index()]));
            }
        }
        let stash = BTreeMap::new();
        Self { graph, roots, repeatable, is_read, by_weights, leaves_layer, is_gathered, stash }
    }

    /// Sets how some of [`Self::roots`] are stored until the backward. If some are compressed, discrete choices can no
    /// longer be recomputed, because rounded inputs could change them. Discrete choices are values that are not floats,
    /// and the other outputs of nodes with such values.
    pub fn stashing(mut self, stash: impl IntoIterator<Item = (ValueId, ActivationStorage)>) -> Self {
        self.stash = stash.into_iter().collect();
        if self.stash.values().any(|&stash| stash == ActivationStorage::Compressed) {
            let graph = self.graph;
            let is_choice =
                |node: &&Node| node.outputs.iter().any(|&output| !FLOATS.contains(&graph.value(output).spec.dtype));
            let choices = graph.nodes().iter().filter(is_choice).flat_map(|node| &node.outputs);
            choices.for_each(|output| self.repeatable[output.index()] = false);
            self.roots.retain(|root| self.repeatable[root.index()]);
        }
        self
    }

    /// Values that may be dropped, in the order in which they are computed.
    pub fn roots(&self) -> &[ValueId] {
        &self.roots
    }

    /// Returns the node that computes a root.
    pub fn maker(&self, root: ValueId) -> &'g Node {
        self.graph.producer(root).expect("what is saved is made by a node")
    }

    /// Returns the shape and type of a root.
    pub fn spec(&self, root: ValueId) -> &'g Spec {
        &self.graph.value(root).spec
    }

    /// True if the node that computes a value can run again.
    pub fn is_repeatable(&self, root: ValueId) -> bool {
        self.repeatable[root.index()]
    }

    /// True if the backward reads a value that may be kept for it.
    pub fn is_read(&self, root: ValueId) -> bool {
        self.is_read[root.index()] && !self.is_gathered[root.index()]
    }

    /// True if a value is one of [`Self::roots`], stays within its layer, and is neither compressed nor offloaded.
    pub fn is_candidate(&self, root: ValueId) -> bool {
        let is_candidate = self.is_read(root) && self.is_repeatable(root) && !self.leaves_layer(root);
        is_candidate && !self.stash.contains_key(&root)
    }

    /// True if other layers read a value that may be kept for them.
    pub fn leaves_layer(&self, root: ValueId) -> bool {
        self.leaves_layer[root.index()] && !self.is_gathered[root.index()]
    }

    /// Returns the variant that drops some of [`Self::roots`], with the nodes that recompute them. Gathered persistent
    /// tensors are always dropped, after the forward and after each half of a split backward.
    ///
    /// Recomputation starts from two kinds of kept values: those that the backward reads, and those that one layer
    /// passes to another. So only the layers of the dropped values are recomputed.
    pub fn dropping(&self, dropped: impl IntoIterator<Item = ValueId>) -> Variant {
        let mut rematerialized = vec![false; self.graph.values().len()];
        let gathered = self.graph.value_ids().filter(|id| self.is_gathered[id.index()] && self.is_read[id.index()]);
        let mut missing: Vec<ValueId> = dropped.into_iter().chain(gathered).collect();
        missing.iter().for_each(|root| rematerialized[root.index()] = true);
        let mut nodes: BTreeSet<NodeId> = BTreeSet::new();
        while let Some(root) = missing.pop() {
            let Source::Node { node, .. } = self.graph.value(root).source else { continue };
            if !nodes.insert(node) {
                continue;
            }
            for input in self.graph.node(node).inputs.iter().map(|&input| self.graph.value(input).root) {
                let index = input.index();
                let is_kept = !rematerialized[index] && (self.is_read(input) || self.leaves_layer(input));
                if self.repeatable[index] && !is_kept {
                    rematerialized[index] = true;
                    missing.push(input);
                }
            }
        }
        let kept = self.stash.iter().filter(|(root, _)| !rematerialized[root.index()]);
        let stash: BTreeMap<ValueId, ActivationStorage> = kept.map(|(&root, &stash)| (root, stash)).collect();
        let outputs = nodes.iter().flat_map(|&node| &self.graph.node(node).outputs);
        let end_with_input = outputs.copied().filter(|output| self.is_gathered[output.index()]).collect();
        let nodes = nodes.into_iter().collect();
        Variant { rematerialized, nodes, end_with_input, stash }
    }

    /// Returns the same variant, except that the roots `ends` are freed at the end of the input gradients of a split
    /// backward. For the weight gradients, these roots are recomputed. This second recomputation starts from values
    /// that the weight gradients also read, or that are kept until the weight gradients anyway.
    pub fn ending_with_input(&self, variant: Variant, ends: impl IntoIterator<Item = ValueId>) -> Variant {
        let mut missing: Vec<ValueId> = ends.into_iter().collect();
        let mut end_with_input: BTreeSet<ValueId> = missing.iter().chain(&variant.end_with_input).copied().collect();
        while let Some(root) = missing.pop() {
            let Some(maker) = self.graph.producer(root) else { continue };
            for input in maker.inputs.iter().map(|&input| self.graph.value(input).root) {
                let index = input.index();
                let waits = self.by_weights[index] || self.leaves_layer(input) || self.stash.contains_key(&input);
                if self.repeatable[index] && !waits && end_with_input.insert(input) {
                    missing.push(input);
                }
            }
        }
        Variant { end_with_input, ..variant }
    }
}

/// True if a collective gathers or scatters the tokens of a layer.
fn moves_tokens(collective: Collective) -> bool {
    let is_pure = matches!(collective, Collective::AllGather { .. } | Collective::ReduceScatter { .. });
    is_pure && (collective.axes() & !(Axes::TENSOR | Axes::CONTEXT)).is_empty()
}

/// True if a node gathers the parts of a persistent tensor. Every rank of the group has a program with the same collectives
/// in the same order, so all of them can repeat it.
pub(crate) fn gathers_persistent(graph: &Graph, node: &Node) -> bool {
    let is_persistent =
        |&input: &ValueId| matches!(graph.value(graph.value(input).root).source, Source::Persistent { .. });
    matches!(Collective::of(node), Some(Collective::AllGather { .. })) && node.inputs.iter().all(is_persistent)
}
