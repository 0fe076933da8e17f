//! The recomputation choices of one layer on its own, and what each costs.
//!
//! - In: a graph, and the time that each node takes.
//! - Out: for each layer, the Pareto-optimal [`Choice`]s in three costs: bytes kept, peak bytes of the layer's own
//!   backward, and time. Layers of the same shape share one list of choices.
//! - Never: a budget, or the choices of other layers.
//!
//! [`Groups`] defines what a layer is. The candidates of a layer are the nodes whose results the backward reads. A
//! layer with more than [`CANDIDATES`] candidates is split into runs of at most [`CANDIDATES`] candidates.

#[cfg(test)]
mod reference;

use std::collections::HashMap;
use std::rc::Rc;

use gapless_graph::{Graph, Node, NodeId, Phase, Place, ValueId};

use super::SavedActivations;
use super::groups::{Group, Groups};
use super::layer::{CANDIDATES, Candidates, Choice, Layer, Local};

/// A layer, or one run of the candidates of a large layer.
#[derive(Debug)]
pub struct Block {
    /// The stage that runs the layer.
    pub place: Place,
    /// The saved values of each candidate.
    candidates: Vec<Vec<ValueId>>,
    /// The choices. The first one keeps everything, and the last one is the slowest.
    pub choices: Rc<[Choice]>,
}

impl Block {
    /// Returns the values that a choice drops after the forward.
    pub fn dropped(&self, choice: &Choice) -> impl Iterator<Item = ValueId> + '_ {
        self.chosen(choice.dropped)
    }

    /// Returns the values that a choice frees at the end of the input gradients (I) of a split backward.
    pub fn again(&self, choice: &Choice) -> impl Iterator<Item = ValueId> + '_ {
        self.chosen(choice.freed_after_input)
    }

    fn chosen(&self, candidates: Candidates) -> impl Iterator<Item = ValueId> + '_ {
        let chosen = move |&(index, _): &(usize, &Vec<ValueId>)| candidates >> index & 1 == 1;
        self.candidates.iter().enumerate().filter(chosen).flat_map(|(_, roots)| roots.iter().copied())
    }
}

/// Returns the layers of the nodes that are `alive`, in graph order. `is_split` says whether the backward is split into
/// input and weight gradients.
pub fn blocks(
    graph: &Graph,
    alive: &[bool],
    saved: &SavedActivations<'_>,
    is_split: bool,
    time: impl Fn(&Node) -> u64,
) -> Vec<Block> {
    let mut fronts: HashMap<Layer, Rc<[Choice]>> = HashMap::new();
    let mut blocks = Vec::new();
    for part in parts(graph, alive, saved) {
        let (layer, candidates) = part.layer(graph, saved, is_split, &time);
        let choices = fronts.entry(layer).or_insert_with_key(|layer| layer.choices().into()).clone();
        blocks.push(Block { place: part.place, candidates, choices });
    }
    blocks
}

/// The nodes of one layer, or of one run of its candidates.
struct LayerNodes {
    group: Group,
    place: Place,
    candidates: usize,
    forward: Vec<NodeId>,
    backward: Vec<NodeId>,
}

fn parts(graph: &Graph, alive: &[bool], saved: &SavedActivations<'_>) -> Vec<LayerNodes> {
    let mut parts: Vec<LayerNodes> = Vec::new();
    let groups = Groups::of(graph);
    let mut last: HashMap<(Place, Group), usize> = HashMap::new();
    // The part that computes each value.
    let mut made_in: HashMap<ValueId, usize> = HashMap::new();
    for id in graph.node_ids().filter(|id| alive[id.index()]) {
        let node = graph.node(id);
        let group = groups.of_node(node);
        let known = last.get(&(node.place, group.clone())).copied();
        match node.phase {
            Phase::Forward => {
                let is_candidate = candidates_of(node, saved).next().is_some();
                let part = match known {
                    Some(part) if parts[part].candidates < CANDIDATES || !is_candidate => part,
                    _ => {
                        let (group, place) = (group.clone(), node.place);
                        parts.push(LayerNodes { group, place, candidates: 0, forward: vec![], backward: vec![] });
                        parts.len() - 1
                    }
                };
                last.insert((node.place, group), part);
                parts[part].candidates += usize::from(is_candidate);
                parts[part].forward.push(id);
                made_in.extend(node.outputs.iter().map(|&output| (output, part)));
            }
            Phase::BackwardInput | Phase::BackwardWeight => {
                // A backward node belongs to the last run whose values it reads. It also belongs to every other part
                // with a candidate that the node reads.
                let roots = || node.inputs.iter().map(|&input| graph.value(input).root);
                let of_layer = |part: &usize| parts[*part].group == group && parts[*part].place == node.place;
                let own = roots().filter_map(|root| made_in.get(&root).copied()).filter(of_layer).max().or(known);
                let others = roots().filter(|&root| saved.is_candidate(root));
                let mut readers: Vec<usize> = others.filter_map(|root| made_in.get(&root).copied()).collect();
                readers.extend(own);
                readers.sort_unstable();
                readers.dedup();
                readers.into_iter().for_each(|part| parts[part].backward.push(id));
                last.extend(own.map(|part| ((node.place, group), part)));
            }
            Phase::Update => {}
        }
    }
    parts
}

/// Returns the outputs of a forward node that may be dropped.
fn candidates_of<'a>(node: &'a Node, saved: &'a SavedActivations<'_>) -> impl Iterator<Item = ValueId> + 'a {
    node.outputs.iter().copied().filter(|&root| saved.is_candidate(root))
}

impl LayerNodes {
    /// Builds the [`Layer`] of this part, and lists the saved values of each candidate.
    fn layer(
        &self,
        graph: &Graph,
        saved: &SavedActivations<'_>,
        is_split: bool,
        time: &impl Fn(&Node) -> u64,
    ) -> (Layer, Vec<Vec<ValueId>>) {
        let (mut locals, mut layer, mut candidates) = (Locals::default(), Layer::default(), Vec::new());
        let root = |value: ValueId| graph.value(value).root;
        for node in self.forward.iter().map(|&id| graph.node(id)) {
            let makes: Vec<usize> = node.outputs.iter().map(|&output| locals.index(graph, output)).collect();
            // Values of other layers are counted as kept in those layers. Here, such a value counts only if W needs it.
            let is_of_forward = |root: &ValueId| graph.producer(*root).is_some_and(|p| p.phase == Phase::Forward);
            for root in node.inputs.iter().map(|&input| root(input)).filter(|root| is_split && is_of_forward(root)) {
                locals.index(graph, root);
            }
            let reads = node.inputs.iter().filter_map(|&input| locals.known(root(input))).collect();
            let kept = node.outputs.iter().zip(&makes).filter(|&(&output, _)| saved.is_read(output));
            layer.saved.extend(kept.map(|(_, &index)| index));
            if node.outputs.iter().all(|&output| saved.is_repeatable(output)) {
                layer.forward.push(Local { reads, makes, nanoseconds: time(node) });
            }
            let roots: Vec<ValueId> = candidates_of(node, saved).collect();
            if !roots.is_empty() {
                layer.candidates.push(roots.iter().filter_map(|&root| locals.known(root)).collect());
                candidates.push(roots);
            }
        }
        layer.forward_values = locals.bytes.len();
        for node in self.backward.iter().map(|&id| graph.node(id)) {
            let is_gradient = |root: ValueId| graph.producer(root).is_some_and(|p| p.phase == Phase::BackwardInput);
            let mut reads = Vec::new();
            for root in node.inputs.iter().map(|&input| root(input)) {
                let index = if is_gradient(root) { Some(locals.index(graph, root)) } else { locals.known(root) };
                reads.extend(index);
            }
            let makes = match node.phase {
                Phase::BackwardInput => node.outputs.iter().map(|&output| locals.index(graph, output)).collect(),
                _ => Vec::new(),
            };
            let for_weights = is_split && node.phase == Phase::BackwardWeight;
            let half = if for_weights { &mut layer.weights } else { &mut layer.backward };
            half.push(Local { reads, makes, nanoseconds: 0 });
        }
        let readers = || layer.backward.iter().chain(&layer.weights);
        let is_read = |index: &usize| readers().any(|local| local.reads.contains(index));
        let made = layer.backward.iter().flat_map(|local| &local.makes);
        layer.leaves = made.copied().filter(|index| !is_read(index)).collect();
        layer.bytes = locals.bytes;
        (layer, candidates)
    }
}

/// Numbers values in the order in which a layer first uses them.
#[derive(Default)]
struct Locals {
    indices: HashMap<ValueId, usize>,
    bytes: Vec<u64>,
}

impl Locals {
    fn index(&mut self, graph: &Graph, root: ValueId) -> usize {
        *self.indices.entry(root).or_insert_with(|| {
            self.bytes.push(graph.value(root).spec.bytes());
            self.bytes.len() - 1
        })
    }

    fn known(&self, root: ValueId) -> Option<usize> {
        self.indices.get(&root).copied()
    }
}
