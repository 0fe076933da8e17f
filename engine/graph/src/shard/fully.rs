//! Fully sharded data: ranks that share the batch divide parameters and gradients among themselves (ZeRO stages 2 and 3,
//! Rajbhandari et al., arXiv 1910.02054, section 5).
//!
//! In: a graph, differentiated or not, in which every tensor is whole. Out: the same graph, in which each divided
//! parameter is a part of its flattened elements. Each place that reads the parameter gathers it once; all readers of that
//! place read the gathered value. The gradient of a divided parameter is summed over the ranks by a reduce-scatter, right
//! after the node that makes it. Never: the decision which parameters are divided, or how long a gathered one lives.

use std::any::Any;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gapless_parallel::Axes;

use crate::error::Result;
use crate::graph::{Graph, Node, NodeId, Phase, Place, Source, ValueId};
use crate::ops::{Binary, BinaryKind, Collective, Contiguous, Reshape};

/// The ranks that divide parameters and gradients, and one of them.
#[derive(Debug, Clone, Copy)]
pub struct FullSharing {
    /// The axes of the mesh along which these ranks lie.
    pub axes: Axes,
    /// Number of ranks.
    pub ranks: usize,
    /// Index of this rank.
    pub rank: usize,
    /// Whether parameters are divided (stage 3), or gradients only (stage 2).
    pub parameters: bool,
}

/// The graph of one rank.
#[derive(Debug)]
pub struct FullySharded {
    /// The graph.
    pub graph: Graph,
    values: HashMap<ValueId, ValueId>,
}

impl FullySharded {
    /// Returns the value of this graph for a value of the whole graph. For the gradient of a divided parameter, it is the
    /// part of the sum that this rank has, and for a divided parameter the part that this rank holds, `[elements]`.
    ///
    /// # Panics
    /// Panics if the value is only needed for the gradient of a divided parameter.
    pub fn value(&self, id: ValueId) -> ValueId {
        self.values[&id]
    }
}

/// True if a persistent tensor can be gathered where it is read: no node changes it, and the update does not read it.
pub fn can_be_gathered(graph: &Graph, tensor: ValueId) -> bool {
    let is_it = |&id: &ValueId| graph.value(id).root == tensor;
    let reads = |node: &&Node| node.inputs.iter().any(is_it) && !node.outputs.iter().any(is_it);
    graph.nodes().iter().filter(reads).all(|node| {
        let changes = node.mutated_inputs().any(|input| is_it(&input));
        !changes && node.phase != Phase::Update && node.place != Place::Everywhere
    })
}

/// Returns one rank's graph. `divided` has the names of the tensors that are divided: of each, the number of elements
/// must be a multiple of the number of ranks, and it must be possible to [gather](can_be_gathered) it. `gradients` has the
/// parameters with their gradients.
///
/// # Errors
/// Returns the errors of recording graph nodes.
pub fn fully_shard(
    graph: &Graph,
    sharing: &FullSharing,
    divided: &BTreeSet<String>,
    gradients: &[(ValueId, ValueId)],
) -> Result<FullySharded> {
    let mut pass = Pass::new(graph, sharing, divided, gradients);
    for id in graph.value_ids().filter(|&id| !matches!(graph.value(id).source, Source::Node { .. })) {
        pass.source(id, divided)?;
    }
    for id in graph.node_ids() {
        pass.node(id)?;
    }
    pass.finish()
}

struct Pass<'a> {
    old: &'a Graph,
    new: Graph,
    sharing: FullSharing,
    values: HashMap<ValueId, ValueId>,
    /// The parts of divided parameters.
    parts: HashMap<ValueId, ValueId>,
    /// Divided parameters and their views, by the place that reads them.
    gathered: HashMap<(ValueId, Place), ValueId>,
    /// Gradients of divided parameters.
    gradients: Vec<ValueId>,
    /// For each node: the summands of gradients that it completes.
    completes: HashMap<NodeId, Vec<ValueId>>,
    /// This rank's parts of gradients and their summands.
    summed: HashMap<ValueId, ValueId>,
    /// Nodes of the update that only gradients of divided parameters need.
    unneeded: HashSet<NodeId>,
}

/// The way in which a node of the update passes parts on.
enum Linear {
    /// The output has the input's elements in the same order.
    Same,
    /// Each element of the output is made of the inputs' elements at the same index.
    Each,
}

impl<'a> Pass<'a> {
    fn new(
        old: &'a Graph,
        sharing: &FullSharing,
        divided: &BTreeSet<String>,
        gradients: &[(ValueId, ValueId)],
    ) -> Self {
        let is_divided = |parameter: ValueId| match &old.value(parameter).source {
            Source::Persistent { name, .. } => divided.contains(name),
            _ => false,
        };
        let (of_divided, others): (Vec<_>, Vec<_>) = gradients.iter().partition(|&&(tensor, _)| is_divided(tensor));
        let [gradients, others] = [of_divided, others].map(|all| all.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
        let mut pass = Self {
            old,
            new: Graph::default(),
            sharing: *sharing,
            values: HashMap::new(),
            parts: HashMap::new(),
            gathered: HashMap::new(),
            completes: HashMap::new(),
            summed: HashMap::new(),
            unneeded: unneeded(old, &gradients, &others),
            gradients,
        };
        for gradient in pass.gradients.clone() {
            pass.find_summands(gradient);
        }
        pass
    }

    /// Declares a value that no node produces.
    fn source(&mut self, id: ValueId, divided: &BTreeSet<String>) -> Result<()> {
        let value = self.old.value(id);
        let new = match &value.source {
            Source::Persistent { name, fill } if self.sharing.parameters && divided.contains(name) => {
                let FullSharing { ranks, rank, .. } = self.sharing;
                let elements = value.spec.elements() / ranks;
                let mut fill = fill.clone();
                fill.window = fill.window.range(rank * elements..(rank + 1) * elements);
                let part = self.new.add_filled(name, value.spec.in_shape(elements), fill)?;
                self.parts.insert(id, part);
                part
            }
            _ => self.new.adopt(value),
        };
        self.values.insert(id, new);
        Ok(())
    }

    fn node(&mut self, id: NodeId) -> Result<()> {
        let node = self.old.node(id);
        // A view of a divided parameter is recorded where it is read.
        if self.unneeded.contains(&id) || self.parts.contains_key(&self.old.value(node.outputs[0]).root) {
            return Ok(());
        }
        self.rebuild(id, node)?;
        for summand in self.completes.remove(&id).into_iter().flatten() {
            self.reduce_scatter(summand, node)?;
        }
        Ok(())
    }

    /// Adds a node to the new graph, in the phase, the place and the layer of `like`.
    fn rebuild(&mut self, id: NodeId, like: &Node) -> Result<()> {
        let node = self.old.node(id);
        let inputs = node.inputs.iter().map(|&input| self.read(input, like)).collect::<Result<Vec<_>>>()?;
        let outputs = self.new.apply_like(like, node.op.clone(), &inputs)?;
        self.values.extend(node.outputs.iter().copied().zip(outputs));
        Ok(())
    }

    /// Returns a value as a node reads it: all of it.
    fn read(&mut self, id: ValueId, reader: &Node) -> Result<ValueId> {
        let value = self.old.value(id);
        let Some(&part) = self.parts.get(&value.root) else { return Ok(self.values[&id]) };
        if let Some(&gathered) = self.gathered.get(&(id, reader.place)) {
            return Ok(gathered);
        }
        // Readers in the other half of a split backward need the value too.
        let phase = if reader.phase == Phase::Forward { Phase::Forward } else { Phase::BackwardInput };
        let like = Node { phase, ..reader.clone() };
        let gathered = match value.source {
            Source::Node { node, .. } => {
                let Node { op, inputs, .. } = self.old.node(node);
                let inputs = inputs.iter().map(|&input| self.read(input, reader)).collect::<Result<Vec<_>>>()?;
                self.new.apply_like(&like, op.clone(), &inputs)?[0]
            }
            _ => {
                let FullSharing { axes, ranks, .. } = self.sharing;
                let flat = self.new.apply_like(&like, Arc::new(Collective::AllGather { axes, ranks }), &[part])?;
                self.new.apply_like(&like, Arc::new(Reshape { shape: value.spec.shape.clone() }), &flat)?[0]
            }
        };
        self.gathered.insert((id, reader.place), gathered);
        self.values.entry(id).or_insert(gathered);
        Ok(gathered)
    }

    /// Finds the summands of a gradient that each micro-batch makes, and the nodes after which they are complete.
    fn find_summands(&mut self, id: ValueId) {
        let Some(maker) = self.old.maker(id) else { return };
        let node = self.old.node(maker);
        if linear(node).is_some() {
            return node.inputs.iter().for_each(|&input| self.find_summands(input));
        }
        // Operations of the update that rearrange the elements of the whole gradient move back into the backward.
        let (mut last, mut above) = (None, vec![maker]);
        while let Some(id) = above.pop() {
            let node = self.old.node(id);
            match node.phase {
                Phase::Update => above.extend(node.inputs.iter().filter_map(|&input| self.old.maker(input))),
                _ => last = last.max(Some(id)),
            }
        }
        let of_node = self.completes.entry(last.unwrap_or(maker)).or_default();
        if !of_node.contains(&id) {
            of_node.push(id);
        }
    }

    /// Sums a summand over the ranks, of which each gets its part.
    fn reduce_scatter(&mut self, id: ValueId, like: &Node) -> Result<()> {
        self.rearrange(id, like)?;
        let FullSharing { axes, ranks, .. } = self.sharing;
        let whole = self.values[&id];
        let mut part = self.new.apply_like(like, Arc::new(Collective::ReduceScatter { axes, ranks }), &[whole])?[0];
        let spec = &self.new.value(part).spec;
        if spec.dims().len() != 1 {
            let flat = Arc::new(Reshape { shape: spec.elements().into() });
            part = self.new.apply_like(like, flat, &[part])?[0];
        }
        self.summed.insert(id, part);
        Ok(())
    }

    /// Makes a value from the values that a micro-batch makes.
    fn rearrange(&mut self, id: ValueId, like: &Node) -> Result<()> {
        let Some(maker) = self.old.maker(id).filter(|_| !self.values.contains_key(&id)) else { return Ok(()) };
        for &input in &self.old.node(maker).inputs {
            self.rearrange(input, like)?;
        }
        self.rebuild(maker, like)
    }

    /// Returns this rank's part of a gradient.
    fn part(&mut self, id: ValueId) -> Result<ValueId> {
        if let Some(&part) = self.summed.get(&id) {
            return Ok(part);
        }
        let node = self.old.producer_id(id).and(self.old.maker(id)).map(|maker| self.old.node(maker));
        let node = node.expect("a gradient is made by a node");
        let mut parts = node.inputs.iter().map(|&input| self.part(input)).collect::<Result<Vec<_>>>()?;
        let part = match linear(node) {
            Some(Linear::Each) => {
                // A sum in place needs a tensor of its own.
                if !node.op.mutates().is_empty() {
                    parts = self.new.apply_like(node, Arc::new(Contiguous), &parts)?;
                }
                self.new.apply_like(node, node.op.clone(), &parts)?[0]
            }
            _ => parts[0],
        };
        self.summed.insert(id, part);
        Ok(part)
    }

    fn finish(mut self) -> Result<FullySharded> {
        for gradient in std::mem::take(&mut self.gradients) {
            let part = self.part(gradient)?;
            self.values.insert(gradient, part);
        }
        // A watched value may be a view of a parameter that no node reads.
        let old = self.old;
        for &(_, id) in old.watched() {
            if let Some(maker) = self.old.maker(id).filter(|_| !self.values.contains_key(&id)) {
                self.read(id, old.node(maker))?;
            }
        }
        let Self { mut new, values, .. } = self;
        new.carry_over(old, &|id| values[&id]);
        Ok(FullySharded { graph: new, values })
    }
}

/// Returns how a node of the update passes on parts of flattened tensors, or `None` if it needs whole tensors.
fn linear(node: &Node) -> Option<Linear> {
    let op: &dyn Any = &*node.op;
    let is_sum = op.downcast_ref().is_some_and(|binary: &Binary| binary.kind == BinaryKind::Add)
        || matches!(op.downcast_ref(), Some(Collective::AllReduce { .. }));
    match node.phase {
        Phase::Update if is_sum => Some(Linear::Each),
        Phase::Update if op.is::<Reshape>() || op.is::<Contiguous>() => Some(Linear::Same),
        _ => None,
    }
}

/// Returns the nodes of the update that only `gradients` need, and neither `others` nor the host.
fn unneeded(graph: &Graph, gradients: &[ValueId], others: &[ValueId]) -> HashSet<NodeId> {
    let mut readers: HashMap<ValueId, Vec<NodeId>> = HashMap::new();
    for id in graph.node_ids() {
        graph.node(id).inputs.iter().for_each(|&input| readers.entry(input).or_default().push(id));
    }
    let mut unneeded: HashSet<NodeId> = HashSet::new();
    for id in graph.node_ids().rev().filter(|&id| graph.node(id).phase == Phase::Update) {
        let is_unneeded = |output: &ValueId| {
            let readers = readers.get(output).map_or(&[][..], Vec::as_slice);
            let is_read = gradients.contains(output) || !readers.is_empty();
            is_read && !others.contains(output) && readers.iter().all(|reader| unneeded.contains(reader))
        };
        if graph.node(id).outputs.iter().all(is_unneeded) {
            unneeded.insert(id);
        }
    }
    unneeded
}

#[cfg(test)]
mod tests {
    use gapless_kernels::Stream;

    use super::super::tests::{TOKENS, VOCABULARY, WIDTH, evaluate_together, gpt, record};
    use super::*;
    use crate::graph::lock;
    use crate::nn::{Module, embedding, layer_norm};
    use crate::reference::{Array, evaluate};

    /// Ranks with the same tokens have the whole graph's loss, and parts of its gradients times their number. The tied
    /// table is gathered once, and so is the weight whose gradient's parts are put together in the update.
    #[test]
    fn ranks_have_parts_of_the_sum_of_gradients() {
        let recorded = record(|vb, tokens, targets| {
            let table = embedding(VOCABULARY, WIDTH, vb.pp("wte"))?;
            let x = table.forward(tokens)?;
            let x = x.broadcast_add(&vb.pp("wpe").get((2 * TOKENS, WIDTH), "weight")?.narrow(0, 0, TOKENS)?)?;
            let x = layer_norm(WIDTH, 1e-5, vb.pp("norm"))?.forward(&gpt(&vb.pp("h.0"), &x, 6)?)?;
            x.linear_cross_entropy(table.embeddings(), targets)?.mean_all()
        })
        .unwrap();
        let graph = lock(&recorded.graph);
        let stream = Stream::new(7, 0, 0);
        let whole = evaluate(&graph, &recorded.given, stream);
        let pairs: Vec<(ValueId, ValueId)> = recorded.gradients.iter().map(|&(_, tensor, g)| (tensor, g)).collect();
        for (ranks, parameters) in [(2, true), (2, false), (3, true)] {
            let is_divisible = |&(id, _): &(ValueId, &str)| {
                graph.value(id).spec.elements().is_multiple_of(ranks) && can_be_gathered(&graph, id)
            };
            let divided: BTreeSet<String> =
                graph.persistent().filter(is_divisible).map(|(_, name)| name.to_owned()).collect();
            assert!(divided.contains("wte.weight") && divided.contains("wpe.weight"), "{divided:?}");
            let of_rank = |rank| {
                let sharing = FullSharing { axes: Axes::SHARD, ranks, rank, parameters };
                fully_shard(&graph, &sharing, &divided, &pairs).unwrap()
            };
            let part = |values: &[f64], rank: usize| {
                let elements = values.len() / ranks;
                values[rank * elements..(rank + 1) * elements].to_vec()
            };
            let given = |rank: usize| {
                let of = |(name, array): (&String, &Array)| match parameters && divided.contains(name) {
                    true => (name.clone(), Array::new(&[array.data.len() / ranks], part(&array.data, rank))),
                    false => (name.clone(), array.clone()),
                };
                recorded.given.iter().map(of).collect::<HashMap<_, _>>()
            };
            let sharded: Vec<FullySharded> = (0..ranks).map(of_rank).collect();
            let graphs: Vec<&Graph> = sharded.iter().map(|sharded| &sharded.graph).collect();
            let all = evaluate_together(&graphs, &(0..ranks).map(given).collect::<Vec<_>>(), stream);
            for (rank, (sharded, values)) in sharded.iter().zip(&all).enumerate() {
                let value = |id: ValueId| &values[sharded.value(id).index()].data;
                assert_eq!(*value(recorded.loss), whole[recorded.loss.index()].data);
                for (name, _, gradient) in &recorded.gradients {
                    let exact = &whole[gradient.index()].data;
                    let (exact, factor) = match divided.contains(name) {
                        true => (part(exact, rank), ranks as f64),
                        false => (exact.clone(), 1.0),
                    };
                    assert_eq!(value(*gradient).len(), exact.len(), "{name}");
                    let is_near = |(a, b): (&f64, &f64)| (a - factor * b).abs() <= 1e-12 * (1.0 + a.abs());
                    assert!(value(*gradient).iter().zip(&exact).all(is_near), "{name} of rank {rank}");
                }
            }
            // The update is recorded behind the pass.
            let mut graph = of_rank(0).graph;
            let zero = graph.add_constant(0.0, crate::Spec::f32(3)).unwrap();
            graph.apply(Arc::new(Contiguous), &[zero]).unwrap();
            assert_eq!(graph.nodes().last().map(|node| node.phase), Some(Phase::Update));
            let collectives: Vec<(Phase, Collective)> = sharded[0]
                .graph
                .nodes()
                .iter()
                .filter_map(|node| Some((node.phase, *(&*node.op as &dyn Any).downcast_ref()?)))
                .collect();
            let gathers = collectives.iter().filter(|(_, op)| matches!(op, Collective::AllGather { .. })).count();
            assert_eq!(gathers, if parameters { divided.len() } else { 0 });
            assert!(collectives.iter().all(|(phase, _)| *phase != Phase::Update), "{collectives:?}");
        }
    }
}
