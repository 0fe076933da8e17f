//! Recomputation of values in the backward. Each value is recomputed before the first node of the backward that reads
//! it. If the backward is split into I (gradients of inputs) and W (gradients of weights), a value can be recomputed
//! once more before its first reader in W.

use std::collections::{BTreeSet, HashMap};

use gapless_graph::{Node, NodeId, Phase, Place, Source, ValueId};
use gapless_parallel::{Action, Kind};

use super::Lowerer;
use crate::lowering::Lowering;
use crate::program::Instance;
use crate::recompute::Variant;

/// The computation of a value that an instruction performs, if the value is computed more than once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occurrence {
    /// The computation in the forward, or the only one.
    Original,
    /// A recomputation before the value's first reader in the backward, or in one half of a split backward.
    Recomputed,
    /// A recomputation that runs only if the rows of this row count were evicted.
    RecomputedIfEvicted(u32),
}

impl Occurrence {
    /// Returns the index of the row count that decides whether the instruction runs. Returns `None` if it always runs.
    pub(super) fn predicate(self) -> Option<u32> {
        match self {
            Self::Original | Self::Recomputed => None,
            Self::RecomputedIfEvicted(count) => Some(count),
        }
    }
}

/// Recomputed nodes that run early, in I instead of W, because the outputs take fewer bytes until W than the inputs.
///
/// Each node is listed under the node after which it runs. If its inputs are recomputed, this is the node that
/// recomputes the last of these inputs. If its inputs are kept, this is the first node of I that reads one of these
/// inputs.
pub(super) type SmallerForWeights = HashMap<NodeId, Vec<NodeId>>;

/// Returns the [`SmallerForWeights`] of each variant.
pub(super) fn smaller_for_weights(
    lowering: &Lowering<'_>,
    nodes: &HashMap<(Place, Phase), Vec<NodeId>>,
) -> Vec<SmallerForWeights> {
    let graph = lowering.graph;
    let root_of = |&input: &ValueId| graph.value(input).root;
    let of_phase =
        |wanted: Phase| nodes.iter().filter(move |((_, phase), _)| *phase == wanted).flat_map(|entry| entry.1);
    let mut by_weights = vec![false; graph.values().len()];
    for root in of_phase(Phase::BackwardWeight).flat_map(|&node| &graph.node(node).inputs).map(root_of) {
        by_weights[root.index()] = true;
    }
    let mut first_by_input: HashMap<(Place, ValueId), NodeId> = HashMap::new();
    for &node in of_phase(Phase::BackwardInput) {
        let Node { inputs, place, .. } = graph.node(node);
        for root in inputs.iter().map(root_of) {
            first_by_input.entry((*place, root)).and_modify(|first| *first = node.min(*first)).or_insert(node);
        }
    }
    let bytes = |roots: &BTreeSet<ValueId>| roots.iter().map(|&root| graph.value(root).spec.bytes()).sum::<u64>();
    let is_of_forward = |root: &ValueId| graph.producer(*root).is_some_and(|maker| maker.phase == Phase::Forward);
    let of_variant = |variant: &Variant| {
        let mut smaller = SmallerForWeights::new();
        for &node in variant.nodes() {
            let Node { inputs, outputs, place, .. } = graph.node(node);
            let is_made = |root: &ValueId| variant.is_rematerialized(*root) && !variant.ends_with_input(*root);
            let outputs_for_w: BTreeSet<ValueId> = outputs.iter().map(root_of).filter(is_made).collect();
            let waiting: BTreeSet<ValueId> =
                inputs.iter().map(root_of).filter(|root| !by_weights[root.index()]).filter(is_of_forward).collect();
            let recomputed = waiting.iter().filter(|&&root| variant.is_rematerialized(root));
            let last_again = recomputed.filter_map(|&root| graph.producer_id(root)).max();
            let first = || waiting.iter().filter_map(|&root| first_by_input.get(&(*place, root))).min().copied();
            let when = last_again.or_else(first);
            let is_wanted = outputs_for_w.iter().any(|root| by_weights[root.index()]);
            if let (true, Some(when)) = (is_wanted && bytes(&outputs_for_w) < bytes(&waiting), when) {
                smaller.entry(when).or_default().push(node);
            }
        }
        smaller
    };
    lowering.recomputation.variants().iter().map(of_variant).collect()
}

impl Lowerer<'_> {
    /// After a forward, ends the lifetimes of the stage's recomputed values. After an I of a split backward, ends the
    /// lifetimes of the values that are recomputed for W.
    pub(super) fn drop_rematerialized(&mut self, action: &Action) {
        let (graph, micro_batch) = (self.lowering.graph, action.micro_batch.0);
        let Some(variant) = self.variant(micro_batch) else { return };
        let ends: Vec<ValueId> = match action.kind {
            Kind::Forward => variant.rematerialized(graph).collect(),
            Kind::BackwardInput => variant.ending_with_input().collect(),
            Kind::Backward | Kind::BackwardWeight => return,
        };
        for root in ends.into_iter().filter(|&root| graph.place_of(root) == Some(Place::Stage(action.stage))) {
            self.live_buffer.remove(&Instance::micro_batch(root, micro_batch));
        }
    }

    /// Emits the recomputation of all values for which this node is the first reader in the backward.
    pub(super) fn rematerialize_inputs(&mut self, id: NodeId, micro_batch: u32) {
        let graph = self.lowering.graph;
        let node = graph.node(id);
        if node.phase == Phase::Forward {
            return;
        }
        let makers = self.missing(node, micro_batch).into_iter().map(|maker| graph.node(maker));
        let readers: Vec<&Node> = std::iter::once(node).chain(makers).collect();
        self.recompute_evicted(&readers, micro_batch);
        self.rematerialize_static_inputs(node, micro_batch);
        if self.is_split && node.phase == Phase::BackwardInput {
            self.keep_smaller_for_w(id, micro_batch);
        }
    }

    /// Like [`rematerialize_inputs`](Self::rematerialize_inputs), but does not recompute evicted rows.
    pub(super) fn rematerialize_static_inputs(&mut self, node: &Node, micro_batch: u32) {
        let graph = self.lowering.graph;
        for maker in self.missing(node, micro_batch) {
            // In an earlier iteration, `keep_smaller_for_w` may already have emitted this node.
            let is_there =
                |output: &ValueId| self.live_buffer.contains_key(&Instance::micro_batch(*output, micro_batch));
            if graph.node(maker).outputs.iter().all(is_there) {
                continue;
            }
            self.emit(maker, micro_batch, Occurrence::Recomputed);
            if self.is_split && node.phase == Phase::BackwardInput {
                self.keep_smaller_for_w(maker, micro_batch);
            }
        }
    }

    /// Emits the nodes that run early for W after node `when`. An example is x → gate, up → swiglu, where I reads gate
    /// and up, and W reads only swiglu. If swiglu were recomputed in W, both gate and up would have to be kept until
    /// then.
    fn keep_smaller_for_w(&mut self, when: NodeId, micro_batch: u32) {
        let graph = self.lowering.graph;
        let Some(index) = self.lowering.recomputation.variant_of(micro_batch) else { return };
        for node in self.smaller_for_weights[index].get(&when).cloned().unwrap_or_default() {
            let variant = &self.lowering.recomputation.variants()[index];
            let is_there = |input: &ValueId| {
                let root = graph.value(*input).root;
                !variant.is_rematerialized(root)
                    || self.live_buffer.contains_key(&Instance::micro_batch(root, micro_batch))
            };
            let is_made =
                |output: &ValueId| self.live_buffer.contains_key(&Instance::micro_batch(*output, micro_batch));
            if graph.node(node).inputs.iter().all(is_there) && !graph.node(node).outputs.iter().any(is_made) {
                self.emit(node, micro_batch, Occurrence::Recomputed);
            }
        }
    }

    fn variant(&self, micro_batch: u32) -> Option<&Variant> {
        let recomputation = &self.lowering.recomputation;
        recomputation.variant_of(micro_batch).map(|index| &recomputation.variants()[index])
    }

    /// Returns the nodes that must be recomputed before `node` can run.
    fn missing(&self, node: &Node, micro_batch: u32) -> BTreeSet<NodeId> {
        let lowering = self.lowering;
        let mut missing = BTreeSet::new();
        let Some(variant) = self.variant(micro_batch) else { return missing };
        let root_of = |&input: &ValueId| lowering.graph.value(input).root;
        let mut wanted: Vec<ValueId> = node.inputs.iter().map(root_of).collect();
        while let Some(root) = wanted.pop() {
            let is_dropped = variant.is_rematerialized(root) || variant.ends_with_input(root);
            if !is_dropped || self.live_buffer.contains_key(&Instance::micro_batch(root, micro_batch)) {
                continue;
            }
            let Source::Node { node: maker, .. } = lowering.graph.value(root).source else { continue };
            if missing.insert(maker) {
                wanted.extend(lowering.graph.node(maker).inputs.iter().map(root_of));
            }
        }
        missing
    }
}
