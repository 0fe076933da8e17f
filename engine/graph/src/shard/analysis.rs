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

    /// Chooses the leaves that `ranks` ranks divide: those that occur in parameters and in operations with a rule, none of
    /// which needs them whole; the ones with the largest parameters first. No operation and no parameter has two of them.
    /// If each of the ranks has other experts (`folds`), none divides those of a parameter that is an expert rank's share.
    pub fn choose(&self, graph: &Graph, ranks: usize, folds: bool) -> Vec<Dim> {
        let mut bytes: BTreeMap<Dim, u64> = BTreeMap::new();
        let mut groups: Vec<&BTreeSet<Dim>> = Vec::new();
        let ruled = || self.nodes.iter().filter(|node| node.is_ruled);
        for (id, _) in graph.persistent() {
            groups.push(&self.leaves[id.index()]);
            for &leaf in &self.leaves[id.index()] {
                *bytes.entry(leaf).or_default() += graph.value(id).spec.bytes();
            }
        }
        for id in graph.value_ids() {
            if matches!(graph.value(id).source, Source::Input { .. }) {
                self.leaves[id.index()].iter().for_each(|leaf| _ = bytes.remove(leaf));
            }
        }
        for (id, _) in graph.persistent().filter(|&(id, _)| folds && !graph.window(id).is_whole()) {
            self.leaves[id.index()].iter().for_each(|leaf| _ = bytes.remove(leaf));
        }
        for node in ruled() {
            node.whole.iter().for_each(|leaf| _ = bytes.remove(leaf));
            groups.push(&node.leaves);
        }
        let is_divisible = |leaf: Dim| self.dims.extent(leaf) >= ranks && !self.dims.is_whole(leaf);
        let is_known = |leaf: &Dim| ruled().any(|node| node.leaves.contains(leaf));
        bytes.retain(|leaf, _| is_divisible(*leaf) && is_known(leaf));
        // Each element of a parameter must lie on one rank, so all segments of a dimension must be split.
        for (id, _) in graph.persistent() {
            let divides = |leaf: Dim| {
                let part = |rank| Part::Range { of: ranks, index: rank };
                let of_rank = |rank| self.window(id, &Parts::from([(leaf, part(rank))])).elements();
                (0..ranks).map(of_rank).sum::<usize>() == graph.value(id).spec.elements()
            };
            let leaves = &self.leaves[id.index()];
            bytes.retain(|leaf, _| !leaves.contains(leaf) || divides(*leaf));
        }
        let mut order: Vec<(Reverse<u64>, Dim)> =
            bytes.into_iter().map(|(leaf, bytes)| (Reverse(bytes), leaf)).collect();
        order.sort_unstable();
        let mut chosen: Vec<Dim> = Vec::new();
        for (_, leaf) in order {
            let meets = |group: &&&BTreeSet<Dim>| group.contains(&leaf) && chosen.iter().any(|c| group.contains(c));
            if !groups.iter().any(|group| meets(&group)) {
                chosen.push(leaf);
            }
        }
        chosen
    }

    /// Returns the leaves for which parameters are held as in another graph. If this graph reads a parameter in another
    /// way, the split dimension gets a leaf of its own, with which no node can run: ranks gather the parameter. Returns the
    /// name of a parameter for which neither is possible.
    pub fn choose_as(
        &mut self,
        graph: &Graph,
        part: Part,
        windows: &BTreeMap<String, Window>,
    ) -> Result<Vec<Dim>, String> {
        let mut chosen = BTreeSet::new();
        for (id, name) in graph.persistent() {
            let Some(window) = windows.get(name).filter(|window| !window.is_whole()) else { continue };
            let fits = |analysis: &Self, leaf: Dim| analysis.window(id, &Parts::from([(leaf, part)])) == *window;
            let known = self.leaves[id.index()].iter().copied().find(|&leaf| fits(self, leaf));
            let leaf = match known {
                Some(leaf) => leaf,
                None => {
                    let is_split = |dim: &usize| window.dims()[*dim] != window.whole_dims()[*dim];
                    let dim = (0..window.dims().len()).find(is_split).ok_or_else(|| name.to_owned())?;
                    let leaf = self.dims.leaf(window.whole_dims()[dim]);
                    let shape = &mut self.shapes[id.index()];
                    shape[dim] = leaf;
                    self.leaves[id.index()] = shape.iter().flat_map(|&dim| self.dims.leaves(dim)).collect();
                    fits(self, leaf).then_some(leaf).ok_or_else(|| name.to_owned())?
                }
            };
            chosen.insert(leaf);
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
