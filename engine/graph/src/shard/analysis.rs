//! The dimensions of a graph that belong together, and those that ranks divide.
//!
//! In: a graph. Out: the leaves ([`Dims`]) of every value and node, and the choice of leaves to split. Never: a node of
//! the new graph.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use gapless_kernels::Window;

use super::dims::{Dim, Dims, Part, Parts};
use super::rule::Related;
use crate::graph::{Graph, NodeId, Source, ValueId};

#[cfg(test)]
mod judge;
#[cfg(test)]
mod tests;

/// The statement of the rules about a node.
#[derive(Debug)]
pub struct NodeDims {
    /// False if the operation has no rule that fits its operands.
    pub is_ruled: bool,
    /// The leaves of all operands.
    pub leaves: BTreeSet<Dim>,
    /// The leaves that this node needs whole.
    pub whole: BTreeSet<Dim>,
    /// For each output, the inputs that it depends on; `None` stands for all.
    pub reads: Vec<Option<Vec<usize>>>,
}

impl NodeDims {
    /// `related` is what the rule says about these operands, if there is a rule.
    fn new(dims: &Dims, related: Option<Related>, operands: &[&[Dim]]) -> Self {
        let leaves: BTreeSet<Dim> = operands.iter().copied().flatten().flat_map(|&dim| dims.leaves(dim)).collect();
        let Some(Related { labels, reads }) = related else {
            return Self { is_ruled: false, whole: leaves.clone(), leaves, reads: Vec::new() };
        };
        // A leaf that two labels share has two meanings in this node.
        let mut labelled: HashMap<Dim, usize> = HashMap::new();
        let mut whole = BTreeSet::new();
        for label in &labels {
            let leaves = dims.leaves(label.dim);
            for &leaf in &leaves {
                *labelled.entry(leaf).or_default() += 1;
                if label.is_whole || label.is_range && leaves.len() > 1 {
                    whole.insert(leaf);
                }
            }
        }
        whole.extend(labelled.into_iter().filter(|&(_, count)| count > 1).map(|(leaf, _)| leaf));
        for operand in operands {
            let mut seen = BTreeSet::new();
            let of_dims = operand.iter().flat_map(|&dim| dims.leaves(dim));
            whole.extend(of_dims.filter(|&leaf| !seen.insert(leaf)));
        }
        Self { is_ruled: true, leaves, whole, reads }
    }
}

/// Leaves that are split together, outermost first, and the number of parts of each. The product of these is the number of
/// ranks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Split(Vec<(Dim, usize)>);

impl Split {
    fn leaves(&self) -> impl Iterator<Item = Dim> + '_ {
        self.0.iter().map(|&(leaf, _)| leaf)
    }

    /// The parts of a rank.
    pub fn parts(&self, mut rank: usize) -> Parts {
        let mut parts = Parts::new();
        for &(leaf, of) in self.0.iter().rev() {
            parts.insert(leaf, Part::Range { of, index: rank % of });
            rank /= of;
        }
        parts
    }
}

#[derive(Debug)]
pub struct Analysis {
    pub dims: Dims,
    /// The dimensions of each value.
    pub shapes: Vec<Vec<Dim>>,
    /// The leaves of each value.
    pub leaves: Vec<BTreeSet<Dim>>,
    pub nodes: Vec<NodeDims>,
}

impl Analysis {
    /// Relates the dimensions of all values. `pairs` are values of the same shape that are split in the same way.
    pub fn new(graph: &Graph, pairs: &[(ValueId, ValueId)]) -> Self {
        let mut dims = Dims::default();
        let of_value = |value: &crate::Value, dims: &mut Dims| -> Vec<Dim> {
            value.spec.dims().iter().map(|&extent| dims.leaf(extent)).collect()
        };
        let shapes: Vec<Vec<Dim>> = graph.values().iter().map(|value| of_value(value, &mut dims)).collect();
        let mut related = Vec::new();
        for node in graph.nodes() {
            let of = |ids: &[ValueId]| -> Vec<&[Dim]> { ids.iter().map(|id| &shapes[id.index()][..]).collect() };
            let rule = node.op.rule(&graph.specs(&node.inputs), &graph.specs(&node.outputs));
            let relation = rule.map(|rule| rule.relate(&mut dims, &of(&node.inputs), &of(&node.outputs)));
            if let Some(Err(why)) = &relation {
                debug_assert!(false, "the rule of {}: {why}", node.op.name());
            }
            related.push(relation.and_then(Result::ok));
        }
        for (a, b) in pairs {
            let (a, b) = (&shapes[a.index()], &shapes[b.index()]);
            a.iter().zip(b).for_each(|(&a, &b)| dims.unify(a, b));
        }
        dims.shorten();
        let leaves: Vec<BTreeSet<Dim>> =
            shapes.iter().map(|shape| shape.iter().flat_map(|&dim| dims.leaves(dim)).collect()).collect();
        let of_node = |(id, related): (NodeId, Option<Related>)| {
            let node = graph.node(id);
            let operands: Vec<&[Dim]> =
                node.inputs.iter().chain(&node.outputs).map(|id| &shapes[id.index()][..]).collect();
            NodeDims::new(&dims, related, &operands)
        };
        let nodes = graph.node_ids().zip(related).map(of_node).collect();
        Self { dims, shapes, leaves, nodes }
    }

    /// Chooses the splits that `ranks` ranks make: of leaves that occur in parameters and in operations with a rule, none of
    /// which needs them whole; the ones with the largest parameters first. No operation and no parameter has two of them.
    /// If each of the ranks has other experts (`folds`), none divides those of a parameter that is an expert rank's share.
    pub fn choose(&self, graph: &Graph, ranks: usize, folds: bool) -> Vec<Split> {
        let mut free: BTreeSet<Dim> = self.leaves_of_parameters(graph);
        for id in graph.value_ids().filter(|&id| matches!(graph.value(id).source, Source::Input { .. })) {
            free.retain(|leaf| !self.leaves[id.index()].contains(leaf));
        }
        for (id, _) in graph.persistent().filter(|&(id, _)| folds && !graph.window(id).is_whole()) {
            free.retain(|leaf| !self.leaves[id.index()].contains(leaf));
        }
        let ruled = || self.nodes.iter().filter(|node| node.is_ruled);
        for node in ruled() {
            free.retain(|leaf| !node.whole.contains(leaf));
        }
        free.retain(|&leaf| !self.dims.is_whole(leaf) && ruled().any(|node| node.leaves.contains(&leaf)));
        // The bytes of the parameters that a split divides. Each element of a parameter must lie on one rank, so all segments
        // of a dimension must be split.
        let bytes = |split: &Split| {
            let mut bytes = 0;
            for (id, _) in graph.persistent().filter(|&(id, _)| self.divides(split, id)) {
                let of_rank = |rank| self.window(id, &split.parts(rank)).elements();
                if (0..ranks).map(of_rank).sum::<usize>() != graph.value(id).spec.elements() {
                    return None;
                }
                bytes += graph.value(id).spec.bytes();
            }
            (bytes > 0).then_some(bytes)
        };
        let splits = self.splits(graph, &free, ranks).into_iter();
        let mut order: Vec<(Reverse<u64>, Split)> =
            splits.filter_map(|split| Some((Reverse(bytes(&split)?), split))).collect();
        order.sort_unstable();
        let groups =
            || ruled().map(|node| &node.leaves).chain(graph.persistent().map(|(id, _)| &self.leaves[id.index()]));
        let mut chosen: Vec<Split> = Vec::new();
        for (_, split) in order {
            let has = |group: &BTreeSet<Dim>, split: &Split| split.leaves().any(|leaf| group.contains(&leaf));
            let meets = |group: &BTreeSet<Dim>| has(group, &split) && chosen.iter().any(|other| has(group, other));
            if !groups().any(meets) {
                chosen.push(split);
            }
        }
        chosen
    }

    fn leaves_of_parameters(&self, graph: &Graph) -> BTreeSet<Dim> {
        graph.persistent().flat_map(|(id, _)| &self.leaves[id.index()]).copied().collect()
    }

    /// Returns the splits of these leaves that give each rank a part: of a leaf that has enough indices, or of two neighbouring
    /// factors that only have enough together. Two key heads of four queries each are split among eight ranks by both.
    fn splits(&self, graph: &Graph, leaves: &BTreeSet<Dim>, ranks: usize) -> BTreeSet<Split> {
        let mut splits: BTreeSet<Split> = BTreeSet::new();
        let is_large = |leaf: &Dim| self.dims.extent(*leaf) >= ranks;
        splits.extend(leaves.iter().copied().filter(is_large).map(|leaf| Split(vec![(leaf, ranks)])));
        for (id, _) in graph.persistent() {
            for &dim in &self.shapes[id.index()] {
                for pair in self.dims.factors(&[dim]).windows(2) {
                    let &[outer, inner] = pair else { continue };
                    let of_outer = self.dims.extent(outer);
                    let has_parts = ranks.is_multiple_of(of_outer) && self.dims.extent(inner) >= ranks / of_outer;
                    let is_free = |leaf: &Dim| leaves.contains(leaf) && !is_large(leaf);
                    if has_parts && pair.iter().all(is_free) {
                        splits.insert(Split(vec![(outer, of_outer), (inner, ranks / of_outer)]));
                    }
                }
            }
        }
        splits
    }

    /// True if a value is divided by a split: if it has all leaves.
    fn divides(&self, split: &Split, id: ValueId) -> bool {
        split.leaves().all(|leaf| self.leaves[id.index()].contains(&leaf))
    }

    /// Returns the splits for which parameters are held as in another graph. If this graph reads a parameter in another
    /// way, the split dimension gets a leaf of its own, with which no node can run: ranks gather the parameter. Returns the
    /// name of a parameter for which neither is possible.
    pub fn choose_as(
        &mut self,
        graph: &Graph,
        (ranks, rank): (usize, usize),
        windows: &BTreeMap<String, Window>,
    ) -> Result<Vec<Split>, String> {
        let possible = self.splits(graph, &self.leaves_of_parameters(graph), ranks);
        let mut chosen = BTreeSet::new();
        for (id, name) in graph.persistent() {
            let Some(window) = windows.get(name).filter(|window| !window.is_whole()) else { continue };
            let fits = |analysis: &Self, split: &Split| analysis.window(id, &split.parts(rank)) == *window;
            let known = possible.iter().find(|split| self.divides(split, id) && fits(self, split)).cloned();
            let split = match known {
                Some(split) => split,
                None => {
                    let is_split = |dim: &usize| window.dims()[*dim] != window.whole_dims()[*dim];
                    let dim = (0..window.dims().len()).find(is_split).ok_or_else(|| name.to_owned())?;
                    let leaf = self.dims.leaf(window.whole_dims()[dim]);
                    let shape = &mut self.shapes[id.index()];
                    shape[dim] = leaf;
                    self.leaves[id.index()] = shape.iter().flat_map(|&dim| self.dims.leaves(dim)).collect();
                    let split = Split(vec![(leaf, ranks)]);
                    fits(self, &split).then_some(split).ok_or_else(|| name.to_owned())?
                }
            };
            chosen.insert(split);
        }
        Ok(chosen.into_iter().collect())
    }

    /// Returns the part of a value that a rank holds.
    pub fn window(&self, id: ValueId, parts: &Parts) -> Window {
        let shape = &self.shapes[id.index()];
        let whole: Vec<usize> = shape.iter().map(|&dim| self.dims.extent(dim)).collect();
        Window::of(&whole, shape.iter().map(|&dim| self.dims.held(dim, parts)).collect())
    }

    pub fn node(&self, id: NodeId) -> &NodeDims {
        &self.nodes[id.index()]
    }
}
