//! One layer by itself: every way to keep and drop what its backward reads, and what each costs.
//!
//! In: a graph, and the time that each node takes. Out: per layer, the [`Choice`]s that no other beats in all of kept
//! bytes, bytes at the peak of the layer's own backward, and time. Layers of one shape are looked at once. Never: a
//! budget, or what other layers do.
//!
//! What a layer is, [`Groups`] says. Nodes whose results the backward reads are the candidates; all their subsets are tried.
//! A layer with more candidates than [`CANDIDATES`] is looked at in runs of so many.

use std::collections::HashMap;
use std::rc::Rc;

use super::Saved;
use super::groups::{Group, Groups};
use crate::graph::{Graph, Node, NodeId, Phase, Place, ValueId};

/// Candidates of a layer, at most: 2¹² subsets.
const CANDIDATES: usize = 12;

/// A set of a layer's values.
type Mask = u128;

/// One way to keep and drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The candidates that are dropped.
    candidates: u32,
    /// Bytes that one micro-batch keeps from the layer's forward to its backward.
    pub kept: u64,
    /// The most bytes of the layer that are alive at once in its backward, kept ones included.
    pub peak: u64,
    /// Time of what is computed again, in nanoseconds.
    pub nanoseconds: u64,
}

/// A layer, or a part of one.
#[derive(Debug)]
pub(crate) struct Block {
    /// Where it runs.
    pub place: Place,
    /// What each candidate saves.
    candidates: Vec<Vec<ValueId>>,
    /// From the one that keeps everything, which comes first, to the one that takes longest.
    pub choices: Rc<[Choice]>,
}

impl Block {
    /// The values that a choice drops.
    pub fn dropped(&self, choice: &Choice) -> impl Iterator<Item = ValueId> + '_ {
        let candidates = choice.candidates;
        let chosen = move |&(index, _): &(usize, &Vec<ValueId>)| candidates >> index & 1 == 1;
        self.candidates.iter().enumerate().filter(chosen).flat_map(|(_, roots)| roots.iter().copied())
    }
}

/// The layers of the nodes that are `alive`, in the order of the graph.
pub(crate) fn blocks(graph: &Graph, alive: &[bool], saved: &Saved<'_>, time: impl Fn(&Node) -> u64) -> Vec<Block> {
    let mut fronts: HashMap<Shape, Rc<[Choice]>> = HashMap::new();
    let mut blocks = Vec::new();
    for part in parts(graph, alive, saved) {
        let (shape, candidates) = part.shape(graph, saved, &time);
        let choices = fronts.entry(shape).or_insert_with_key(Shape::choices).clone();
        blocks.push(Block { place: part.place, candidates, choices });
    }
    blocks
}

/// The nodes of one layer, or of a run of its candidates.
struct PartOfGraph {
    group: Group,
    place: Place,
    candidates: usize,
    forward: Vec<NodeId>,
    backward: Vec<NodeId>,
}

fn parts(graph: &Graph, alive: &[bool], saved: &Saved<'_>) -> Vec<PartOfGraph> {
    let mut parts: Vec<PartOfGraph> = Vec::new();
    let groups = Groups::of(graph);
    let mut last: HashMap<(Place, Group), usize> = HashMap::new();
    // By value, the part that makes it.
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
                        parts.push(PartOfGraph { group, place, candidates: 0, forward: vec![], backward: vec![] });
                        parts.len() - 1
                    }
                };
                last.insert((node.place, group), part);
                parts[part].candidates += usize::from(is_candidate);
                parts[part].forward.push(id);
                made_in.extend(node.outputs.iter().map(|&output| (output, part)));
            }
            Phase::BackwardInput | Phase::BackwardWeight => {
                // A run of a layer has the nodes that read of it; other layers, those that read what they may drop.
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

/// The outputs of a forward node that may be dropped.
fn candidates_of<'a>(node: &'a Node, saved: &'a Saved<'_>) -> impl Iterator<Item = ValueId> + 'a {
    node.outputs.iter().copied().filter(|&root| saved.is_candidate(root))
}

/// A node as its layer sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Local {
    reads: Mask,
    makes: Mask,
    nanoseconds: u64,
}

/// All that the choices of a layer depend on: layers of one shape have the same.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Shape {
    bytes: Vec<u64>,
    /// What can run again, in order.
    forward: Vec<Local>,
    backward: Vec<Local>,
    /// What is kept from the forward to the backward where nothing is dropped.
    saved: Mask,
    /// What each candidate saves.
    candidates: Vec<Mask>,
    /// What others read of the backward's results.
    leaves: Mask,
}

impl PartOfGraph {
    /// The part's shape, and the values that its candidates save.
    fn shape(&self, graph: &Graph, saved: &Saved<'_>, time: &impl Fn(&Node) -> u64) -> (Shape, Vec<Vec<ValueId>>) {
        let mut locals = Locals::default();
        let mut shape = Shape {
            bytes: Vec::new(),
            forward: Vec::new(),
            backward: Vec::new(),
            saved: 0,
            candidates: Vec::new(),
            leaves: 0,
        };
        let mut candidates = Vec::new();
        let root = |value: ValueId| graph.value(value).root;
        for node in self.forward.iter().map(|&id| graph.node(id)) {
            let makes = node.outputs.iter().fold(0, |mask, &o| mask | locals.bit(graph, o));
            // What comes from other layers is theirs to keep.
            let reads = node.inputs.iter().fold(0, |mask, &i| mask | locals.known(root(i)));
            let kept = node.outputs.iter().filter(|&&output| saved.is_read(output));
            shape.saved |= kept.fold(0, |mask, &output| mask | locals.known(output));
            if node.outputs.iter().all(|&output| saved.is_repeatable(output)) {
                shape.forward.push(Local { reads, makes, nanoseconds: time(node) });
            }
            let roots: Vec<ValueId> = candidates_of(node, saved).collect();
            if !roots.is_empty() {
                shape.candidates.push(roots.iter().fold(0, |mask, &root| mask | locals.known(root)));
                candidates.push(roots);
            }
        }
        for node in self.backward.iter().map(|&id| graph.node(id)) {
            let is_gradient = |root: ValueId| graph.producer(root).is_some_and(|p| p.phase == Phase::BackwardInput);
            let reads = node.inputs.iter().fold(0, |mask, &input| {
                let root = root(input);
                mask | if is_gradient(root) { locals.bit(graph, root) } else { locals.known(root) }
            });
            let makes = match node.phase {
                Phase::BackwardInput => node.outputs.iter().fold(0, |mask, &o| mask | locals.bit(graph, o)),
                _ => 0,
            };
            shape.backward.push(Local { reads, makes, nanoseconds: 0 });
        }
        let read_here = shape.backward.iter().fold(0, |mask, local| mask | local.reads);
        let made_here = shape.backward.iter().fold(0, |mask, local| mask | local.makes);
        shape.leaves = made_here & !read_here;
        shape.bytes = locals.bytes;
        (shape, candidates)
    }
}

/// Values by the bits of a mask. A layer of more values than there are bits does without the last ones: what it says of
/// its peak is then too low.
#[derive(Default)]
struct Locals {
    bits: HashMap<ValueId, Mask>,
    bytes: Vec<u64>,
}

impl Locals {
    fn bit(&mut self, graph: &Graph, root: ValueId) -> Mask {
        if let Some(&bit) = self.bits.get(&root) {
            return bit;
        }
        if self.bytes.len() == Mask::BITS as usize {
            return 0;
        }
        let bit = 1 << self.bytes.len();
        self.bytes.push(graph.value(root).spec.bytes());
        self.bits.insert(root, bit);
        bit
    }

    fn known(&self, root: ValueId) -> Mask {
        self.bits.get(&root).copied().unwrap_or(0)
    }
}

impl Shape {
    /// All subsets, but those that another is at least as good as in every way.
    fn choices(&self) -> Rc<[Choice]> {
        let all = 1u32 << self.candidates.len();
        let mut choices: Vec<Choice> = (0..all).map(|candidates| self.choice(candidates)).collect();
        choices.sort_by_key(|c| (c.nanoseconds, c.kept, c.peak, c.candidates));
        let mut best: Vec<Choice> = Vec::new();
        for choice in choices {
            if best.iter().all(|other| other.kept > choice.kept || other.peak > choice.peak) {
                best.push(choice);
            }
        }
        // Nothing dropped takes no time, so it is among them; and it comes first.
        let plain = best.iter().position(|choice| choice.candidates == 0).unwrap_or(0);
        best[..=plain].rotate_right(1);
        best.into()
    }

    fn choice(&self, candidates: u32) -> Choice {
        let chosen = self.candidates.iter().enumerate().filter(|(index, _)| candidates >> index & 1 == 1);
        let dropped = chosen.fold(0, |mask, (_, saved)| mask | saved);
        let kept = self.saved & !dropped;
        let made = self.forward.iter().fold(0, |mask, local| mask | local.makes);
        // What runs in the backward, in order: its own nodes, and in front of them what they miss.
        let (mut there, mut nanoseconds, mut sequence) = (kept, 0u64, Vec::with_capacity(self.backward.len()));
        for own in &self.backward {
            let mut missing = own.reads & made & !there;
            let mut again = Vec::new();
            for local in self.forward.iter().rev() {
                if local.makes & missing != 0 {
                    missing = (missing & !local.makes) | (local.reads & made & !there);
                    again.push(*local);
                }
            }
            for local in again.into_iter().rev() {
                nanoseconds = nanoseconds.saturating_add(local.nanoseconds);
                there |= local.makes;
                sequence.push(local);
            }
            sequence.push(*own);
        }
        let mut alive = self.leaves;
        let mut peak = self.size(kept);
        for local in sequence.iter().rev() {
            peak = peak.max(self.size(alive | local.makes | local.reads));
            alive = (alive & !local.makes) | local.reads;
        }
        Choice { candidates, kept: self.size(kept), peak, nanoseconds }
    }

    fn size(&self, mut mask: Mask) -> u64 {
        let mut bytes = 0;
        while mask != 0 {
            bytes += self.bytes[mask.trailing_zeros() as usize];
            mask &= mask - 1;
        }
        bytes
    }
}
