//! Automatic differentiation: gradients as further nodes of the graph.
//!
//! In: a graph and its loss. Out: the same graph, followed by nodes that compute the gradient of every trained
//! parameter that the loss depends on. Gradients that only frozen parameters would need are not computed. Never: a
//! decision on the order of execution across micro-batches, or on memory.
//!
//! Each node is marked as part of the input gradients (I), which earlier layers wait for, or of the weight gradients
//! (W), which only the update reads. Zero-bubble schedules rely on that split (Qi et al., arXiv 2401.10241).

use std::any::Any;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};

use candle_core::DType;

use crate::Gradient;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Phase, Source, ValueId, lock};
use crate::ops::{Cat, Contiguous, Widen};
use crate::tensor::Tensor;

/// The gradient of one parameter.
#[derive(Debug, Clone)]
pub struct ParameterGradient {
    /// The parameter to which the gradient belongs.
    pub parameter: ValueId,
    /// Summands of the gradient, one per use of the parameter, each contiguous. Each summand is accumulated separately
    /// over the micro-batches. Once per step, the accumulated summands are added up. So the order of summation does not
    /// depend on the number of micro-batches.
    pub summands: Vec<ValueId>,
}

/// Records the gradients of `loss` with respect to all trained parameters, and returns them. `seed` is the gradient of
/// the loss itself, a factor of all gradients.
///
/// # Errors
/// Returns an error if the loss is not a scalar or depends on no trained parameter, or if an operation between a
/// trained parameter and the loss has no gradient.
pub fn differentiate(graph: &Arc<Mutex<Graph>>, loss: &Tensor, seed: f64) -> Result<Vec<ParameterGradient>> {
    differentiate_in(graph, loss, seed, &|parameter| parameter.dtype())
}

/// Like [`differentiate`], but sums the gradients of a parameter in the type that `dtype_of` returns for it.
///
/// # Errors
/// Returns the errors of [`differentiate`].
pub fn differentiate_in(
    graph: &Arc<Mutex<Graph>>,
    loss: &Tensor,
    seed: f64,
    dtype_of: &dyn Fn(&Tensor) -> DType,
) -> Result<Vec<ParameterGradient>> {
    if loss.rank() != 0 {
        return Err(Error::LossNotScalar { shape: loss.shape().clone() });
    }
    let pass = Pass::new(graph);
    if !pass.depends[loss.id().index()] {
        return Err(Error::NothingToTrain);
    }
    loss.set_phase(Phase::BackwardInput);
    let result = pass.run(loss, seed, dtype_of);
    loss.set_phase(Phase::Forward);
    result
}

struct Pass {
    graph: Arc<Mutex<Graph>>,
    /// True for forward values that depend on a trained parameter.
    depends: Vec<bool>,
    /// True for forward values that are views of a trained parameter. The gradient of such a value is used for the
    /// parameter's gradient and for nothing else.
    is_weight: Vec<bool>,
    forward_nodes: Vec<NodeId>,
}

impl Pass {
    fn new(graph: &Arc<Mutex<Graph>>) -> Self {
        let g = lock(graph);
        let mut depends = vec![false; g.values().len()];
        let mut is_weight = vec![false; g.values().len()];
        for (id, _) in g.persistent().filter(|(id, _)| !g.is_frozen(*id)) {
            (depends[id.index()], is_weight[id.index()]) = (true, true);
        }
        for node in g.nodes() {
            let any = !node.op.stops_gradients() && node.inputs.iter().any(|i| depends[i.index()]);
            for &output in &node.outputs {
                depends[output.index()] = any;
                is_weight[output.index()] = any && g.is_view(output) && is_weight[node.inputs[0].index()];
            }
        }
        Self { graph: graph.clone(), depends, is_weight, forward_nodes: g.node_ids().collect() }
    }

    fn run(&self, loss: &Tensor, seed: f64, dtype_of: &dyn Fn(&Tensor) -> DType) -> Result<Vec<ParameterGradient>> {
        let mut pending: HashMap<ValueId, Vec<Tensor>> = HashMap::new();
        pending.insert(loss.id(), vec![loss.constant(seed, ())]);
        let mut input_gradients = Vec::new();
        for &node_id in self.forward_nodes.iter().rev() {
            let node = lock(&self.graph).node(node_id).clone();
            lock(&self.graph).set_place(node.place);
            if !node.outputs.iter().any(|o| pending.contains_key(o)) {
                continue;
            }
            if !node.inputs.iter().any(|i| self.depends[i.index()]) {
                continue;
            }
            let _layer = loss.enter(&node.layer);
            if self.is_weight[node.outputs[0].index()] {
                self.propagate_each(node_id, &mut pending)?;
                continue;
            }
            let mut grads = Vec::new();
            for output in &node.outputs {
                grads.push(pending.remove(output).map(|parts| self.total(parts)).transpose()?);
            }
            input_gradients.extend(grads.iter().flatten().map(Tensor::id));
            self.propagate(node_id, grads, &mut pending)?;
        }
        self.mark_phases(&input_gradients);
        let gradients = self.collect(pending, dtype_of)?;
        self.defer_movement(&gradients);
        Ok(gradients)
    }

    /// Propagates the pending gradients of a view of a weight one by one, without adding them up first. The uses of the
    /// view may be in different stages, and each stage accumulates the gradient of its own uses.
    fn propagate_each(&self, id: NodeId, pending: &mut HashMap<ValueId, Vec<Tensor>>) -> Result<()> {
        let node = lock(&self.graph).node(id).clone();
        for part in pending.remove(&node.outputs[0]).unwrap_or_default() {
            let place = lock(&self.graph).place_of(part.id()).unwrap_or(node.place);
            lock(&self.graph).set_place(place);
            self.propagate(id, vec![Some(part)], pending)?;
        }
        Ok(())
    }

    /// Records the gradients of a node's inputs, given the gradients of its outputs, and adds them to `pending`.
    fn propagate(
        &self,
        id: NodeId,
        grads: Vec<Option<Tensor>>,
        pending: &mut HashMap<ValueId, Vec<Tensor>>,
    ) -> Result<()> {
        let node = lock(&self.graph).node(id).clone();
        let tensors = |ids: &[ValueId]| ids.iter().map(|&id| Tensor::of(&self.graph, id)).collect();
        let (inputs, outputs) = (tensors(&node.inputs), tensors(&node.outputs));
        let wants = node.inputs.iter().map(|i| self.depends[i.index()]).collect();
        let graph = self.graph.clone();
        let mut gradient = Gradient { graph, node: id, inputs, outputs, grads, wants, accumulated: Vec::new() };
        node.op.gradient(&mut gradient)?;
        // An operation that computes all gradients together may also record gradients of inputs that need none. Such
        // gradients are dropped.
        for (input, grad) in gradient.accumulated.into_iter().filter(|(input, _)| gradient.wants[*input]) {
            pending.entry(node.inputs[input]).or_default().push(grad);
        }
        Ok(())
    }

    /// Returns the gradients of the parameters. By now, the keys of `pending` are values that no node produces, such as
    /// parameters.
    fn collect(
        &self,
        pending: HashMap<ValueId, Vec<Tensor>>,
        dtype_of: &dyn Fn(&Tensor) -> DType,
    ) -> Result<Vec<ParameterGradient>> {
        let mut gradients = Vec::new();
        let mut read: HashSet<ValueId> =
            lock(&self.graph).nodes().iter().flat_map(|node| &node.inputs).copied().collect();
        // Iterates over the parameters in a fixed order, because this loop records nodes, and the same model must
        // always give the same program.
        for (parameter, parts) in BTreeMap::from_iter(pending) {
            if !matches!(lock(&self.graph).value(parameter).source, Source::Persistent { .. }) {
                continue;
            }
            let dtype = dtype_of(&Tensor::of(&self.graph, parameter));
            let mut summands = Vec::new();
            for part in parts {
                part.set_phase(Phase::BackwardWeight);
                // A constant is stored once per program, but a gradient must be accumulated once per micro-batch. So a
                // node, which runs in every micro-batch, copies the constant.
                let root = lock(&self.graph).value(part.id()).root;
                let made = matches!(lock(&self.graph).value(root).source, Source::Node { .. });
                let place = lock(&self.graph).place_of(part.id()).unwrap_or_default();
                lock(&self.graph).set_place(place);
                let dense =
                    if made { part.contiguous()? } else { Tensor::apply_op::<1>(Contiguous, &[&part])?[0].clone() };
                // `change_output_dtype` may have changed the type of the value since the handle `dense` was created.
                let made_in = lock(&self.graph).value(dense.id()).spec.dtype;
                let is_so = made_in == dtype
                    || !read.contains(&dense.id()) && lock(&self.graph).change_output_dtype(dense.id(), dtype)?;
                let summand = if is_so { dense.id() } else { self.cast(dense, dtype)?.id() };
                // Another parameter may have the same value as its gradient, if both parameters are summands of one
                // sum. From now on, `change_output_dtype` must not change the type of this value.
                read.insert(summand);
                summands.push(summand);
            }
            gradients.push(ParameterGradient { parameter, summands });
        }
        Ok(gradients)
    }

    /// Casts a gradient to another type. If the last operations of the gradient only rearrange elements, the cast is
    /// placed before these operations. [`Self::defer_movement`] later moves these operations to after the sum over
    /// micro-batches. The cast is then adjacent to the sum.
    fn cast(&self, part: Tensor, dtype: DType) -> Result<Tensor> {
        let (mut value, mut moves) = (part.id(), Vec::new());
        {
            let g = lock(&self.graph);
            while let Source::Node { node, .. } = g.value(value).source {
                let source = g.node(node).inputs[0];
                if !rearranges(&g, value) || !matches!(g.value(g.value(source).root).source, Source::Node { .. }) {
                    break;
                }
                moves.push(g.node(node).op.clone());
                value = source;
            }
        }
        let cast = Tensor::of(&self.graph, value).to_dtype(dtype)?;
        let moved = moves
            .into_iter()
            .rev()
            .try_fold(cast.id(), |value, op| lock(&self.graph).apply(op, &[value]).map(|outputs| outputs[0]))?;
        Ok(Tensor::of(&self.graph, moved))
    }

    /// Moves operations that only rearrange a weight's gradient to after the sum over micro-batches. An example is the
    /// operation that pads the gradient of a range of an embedding with zeros. The moved operation runs once per step,
    /// and the operation before it can accumulate into the sum in place.
    fn defer_movement(&self, gradients: &[ParameterGradient]) {
        let mut g = lock(&self.graph);
        let mut readers = vec![0; g.values().len()];
        g.nodes().iter().flat_map(|node| &node.inputs).for_each(|i| readers[i.index()] += 1);
        for &summand in gradients.iter().flat_map(|gradient| &gradient.summands) {
            let mut value = summand;
            let mut readers_expected = 0;
            while let Source::Node { node: id, .. } = g.value(value).source {
                let node = g.node(id);
                let moves = rearranges(&g, value);
                let alone = readers[value.index()] == readers_expected;
                let source = g.value(g.value(node.inputs[0]).root);
                let made = matches!(source.source, Source::Node { .. });
                if node.phase != Phase::BackwardWeight || !moves || !alone || !made || node.outputs[0] != value {
                    break;
                }
                value = node.inputs[0];
                readers_expected = 1;
                g.reassign_phase(id, Phase::Update);
            }
        }
    }

    /// Returns the sum of the gradients of all uses of a value. If these gradients are zero outside of ranges that tile
    /// one dimension, such as the thirds of a packed qkv, the ranges are concatenated instead of added.
    fn total(&self, parts: Vec<Tensor>) -> Result<Tensor> {
        if let Some(joined) = self.join(&parts)? {
            return Ok(joined);
        }
        let here = lock(&self.graph).place();
        let mut parts = parts.into_iter();
        let first = parts.next().expect("a gradient that is pending has a part");
        let total = parts.try_fold(first, |sum, part| {
            // The sum of two gradients is computed in the earlier of their stages. So the gradients of several uses in
            // one later stage are added in that stage, which then sends only their sum.
            let mut g = lock(&self.graph);
            let places = [&sum, &part].map(|t| g.place_of(t.id()).unwrap_or(here));
            let [first, second] = places;
            g.set_place(first.min(second));
            drop(g);
            sum.add(&part)
        });
        lock(&self.graph).set_place(here);
        total
    }

    fn join(&self, parts: &[Tensor]) -> Result<Option<Tensor>> {
        if parts.len() < 2 {
            return Ok(None);
        }
        let mut ranges: Vec<(usize, Tensor, usize)> = Vec::new();
        let mut extent = 0;
        for part in parts {
            let g = lock(&self.graph);
            let Source::Node { node, .. } = g.value(part.id()).source else { return Ok(None) };
            let node = g.node(node).clone();
            drop(g);
            let op: &dyn Any = &*node.op;
            let Some(widen) = op.downcast_ref::<Widen>() else { return Ok(None) };
            extent = widen.extent;
            ranges.push((widen.start, Tensor::of(&self.graph, node.inputs[0]), widen.dim));
        }
        ranges.sort_by_key(|r| r.0);
        let dim = ranges[0].2;
        let mut end = 0;
        for (start, tensor, d) in &ranges {
            if *d != dim || *start != end {
                return Ok(None);
            }
            end += tensor.dims()[dim];
        }
        if end != extent {
            return Ok(None);
        }
        let tensors: Vec<&Tensor> = ranges.iter().map(|r| &r.1).collect();
        Ok(Some(Tensor::apply_op::<1>(Cat { dim }, &tensors)?[0].clone()))
    }

    /// Marks the backward nodes on which the gradient of an activation depends as I, and all other backward nodes as W.
    fn mark_phases(&self, input_gradients: &[ValueId]) {
        let mut g = lock(&self.graph);
        let mut wanted = vec![false; g.values().len()];
        for id in input_gradients {
            wanted[id.index()] = true;
        }
        let backward: Vec<NodeId> = g.node_ids().skip(self.forward_nodes.len()).collect();
        for id in backward.into_iter().rev() {
            let node = g.node(id).clone();
            let needed = node.outputs.iter().any(|o| wanted[o.index()]);
            if needed {
                node.inputs.iter().for_each(|i| wanted[i.index()] = true);
            }
            g.reassign_phase(id, if needed { Phase::BackwardInput } else { Phase::BackwardWeight });
        }
    }
}

/// True if the node's output consists of its input's elements, possibly among zeros.
fn rearranges(graph: &Graph, value: ValueId) -> bool {
    let Source::Node { node, .. } = graph.value(value).source else { return false };
    let op: &dyn Any = &*graph.node(node).op;
    graph.is_view(value) || op.is::<Widen>() || op.is::<Contiguous>()
}
