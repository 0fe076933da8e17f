//! Partitions a model into pipeline stages.
//!
//! - In: a graph with only its forward.
//! - Out: the same graph, with every node assigned to a stage. Each stage is a run of nodes in graph order. Autodiff
//!   later assigns gradient nodes to the stages of their forward nodes.
//! - Never: ranks, or an order of execution.

use std::collections::{BTreeSet, HashMap};

use gapless_graph::{Graph, Node, NodeId, Place, Source};
use gapless_parallel::StageId;

use crate::error::{Error, Result};
use crate::recompute::layers_of;

/// The stage boundaries of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StagePartition {
    /// Minimizes the cost of the slowest stage. The cost of a stage is its floating-point operations, plus the bytes
    /// that it sends and receives.
    #[default]
    Balanced,
    /// All stages have the same number of layers (`h.0`, `h.1`, …); if the number does not divide, the numbers differ by
    /// one. The embedding belongs to the first stage, and the head to the last.
    Equal,
    /// Stages begin at these layers, e.g. `h.3`, in the order of the model. The first stage is not listed, so there is
    /// one fewer layer than stages.
    Before(Vec<String>),
    /// Stages begin at these nodes of the forward, counted in its order from 0. The first stage is not listed.
    At(Vec<usize>),
}

impl StagePartition {
    /// True for the default.
    pub fn is_balanced(&self) -> bool {
        *self == Self::Balanced
    }
}

/// The number of floating-point operations that take as long as sending one byte to another rank. On current machines,
/// the ratio is within a factor of four of this value. Only the choice between nearly equal partitions depends on it.
const FLOPS_PER_BYTE: u64 = 64;

/// Assigns the forward nodes of `graph` to `stages` stages.
///
/// # Errors
/// Returns an error if there are fewer nodes than stages. Returns an error if a layer at which a stage begins does not
/// exist, or comes before the layer of an earlier stage.
pub fn partition(graph: &mut Graph, stages: usize, cut: &StagePartition) -> Result<()> {
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    let starts = match cut {
        StagePartition::Balanced => balanced(graph, stages)?,
        StagePartition::Equal => before(graph, stages, &equal(graph, stages)?)?,
        StagePartition::Before(layers) => before(graph, stages, layers)?,
        StagePartition::At(starts) => at(&nodes, stages, starts)?,
    };
    for (index, node) in nodes.into_iter().enumerate() {
        let stage = starts.partition_point(|&start| start <= index);
        graph.reassign_place(node, place(stage));
    }
    Ok(())
}

/// The stages that read each parameter, by the parameter's name.
pub type ParameterStages = HashMap<String, BTreeSet<StageId>>;

/// Returns the stages whose forward nodes read each parameter.
pub fn parameter_stages(graph: &Graph) -> ParameterStages {
    let mut stages = ParameterStages::new();
    for node in graph.nodes().iter().filter(|node| !graph.is_view(node.outputs[0])) {
        let Place::Stage(stage) = node.place else { continue };
        for name in parameters(graph, node) {
            stages.entry(name.to_owned()).or_default().insert(stage);
        }
    }
    stages
}

/// Assigns the forward nodes of another graph of the same model to stages. `stages` lists the stages that already read
/// each parameter. A node goes to the earliest listed stage of its parameters that does not precede the stages of
/// earlier nodes. A node without such a stage goes to the stage of the node before it.
pub fn partition_like(graph: &mut Graph, stages: &ParameterStages) {
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    let mut stage = StageId(0);
    for id in nodes {
        let node = graph.node(id);
        if !graph.is_view(node.outputs[0]) {
            for name in parameters(graph, node) {
                let read_in = stages.get(name).and_then(|stages| stages.range(stage..).next());
                stage = read_in.copied().unwrap_or(stage);
            }
        }
        graph.reassign_place(id, Place::Stage(stage));
    }
}

fn parameters<'g>(graph: &'g Graph, node: &Node) -> impl Iterator<Item = &'g str> {
    node.inputs.iter().filter_map(|&input| match &graph.value(graph.value(input).root).source {
        Source::Persistent { name, .. } => Some(name.as_str()),
        _ => None,
    })
}

fn place(stage: usize) -> Place {
    Place::Stage(StageId(stage as u32))
}

/// Returns the first layer of each stage after stage 0, for stages with equal numbers of layers.
fn equal(graph: &Graph, stages: usize) -> Result<Vec<String>> {
    let layers = layers_of(graph);
    if layers.len() < stages {
        let why = format!("equal stages need a layer each, but the model has {} layers for {stages}", layers.len());
        return Err(Error::config("pipeline.cut", why, "use balanced, fewer stages, or a deeper model"));
    }
    Ok((1..stages).map(|stage| layers[stage * layers.len() / stages].to_owned()).collect())
}

/// Returns the index of the first node of each stage after stage 0, for stages that begin at given layers.
fn before(graph: &Graph, stages: usize, layers: &[String]) -> Result<Vec<usize>> {
    let fail =
        |why| Err(Error::config("pipeline.cut", why, "name the first layer of every stage but stage 0, in order"));
    if layers.len() + 1 != stages {
        return fail(format!("{} layers make {} stages, not {stages}", layers.len(), layers.len() + 1));
    }
    let mut starts: Vec<usize> = Vec::new();
    for layer in layers {
        let inside = |node: &Node| {
            node.layer.strip_prefix(layer.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        match graph.nodes().iter().position(inside) {
            None => return fail(format!("the model has no layer {layer:?}")),
            Some(start) if start <= starts.last().copied().unwrap_or(0) => {
                return fail(format!("layer {layer:?} does not come after the one named before it"));
            }
            Some(start) => starts.push(start),
        }
    }
    Ok(starts)
}

/// Returns `starts` if stages can begin at these nodes.
fn at(nodes: &[NodeId], stages: usize, starts: &[usize]) -> Result<Vec<usize>> {
    let is_ascending = starts.is_sorted_by(|a, b| a < b) && starts.first().is_none_or(|&first| first > 0);
    if starts.len() + 1 != stages || !is_ascending || starts.last().is_some_and(|&last| last >= nodes.len()) {
        let why = format!("{starts:?} does not divide {} nodes into {stages} stages", nodes.len());
        return Err(Error::config("pipeline.cut", why, "name the first node of every stage but stage 0, in order"));
    }
    Ok(starts.to_vec())
}

/// Returns the index of the first node of each stage after stage 0, for balanced stages. Dynamic programming over
/// (number of stages, number of nodes) minimizes the cost of the slowest stage, then the bytes sent.
fn balanced(graph: &Graph, stages: usize) -> Result<Vec<usize>> {
    let work: Vec<usize> = (0..graph.nodes().len()).filter(|&i| !graph.is_view(graph.nodes()[i].outputs[0])).collect();
    if work.len() < stages {
        let why = format!("{stages} stages are more than the {} operations of the model", work.len());
        return Err(Error::config("mesh", why, "use fewer stages or a deeper model"));
    }
    let crossing = crossing_bytes(graph);
    let mut flops = vec![0];
    for &index in &work {
        let node = &graph.nodes()[index];
        let of_node: u64 = node.op.flops(&graph.specs(&node.inputs), &graph.specs(&node.outputs));
        flops.push(of_node.saturating_add(flops[flops.len() - 1]));
    }
    let bytes_at = |k: usize| if k == 0 || k == work.len() { 0 } else { crossing[work[k]] };
    // The forward and the two gradients together take three times the operations of the forward. Activations are sent
    // in one direction, and their gradients in the opposite direction.
    let arithmetic = |from: usize, to: usize| (flops[to] - flops[from]).saturating_mul(3);
    let cost = |from: usize, to: usize| {
        arithmetic(from, to).saturating_add((2 * FLOPS_PER_BYTE).saturating_mul(bytes_at(from) + bytes_at(to)))
    };
    // best[k] is (cost of the slowest stage, bytes sent) for the first k operations. `begins` holds the start of the
    // last stage of each such solution.
    let mut best: Vec<Option<(u64, u64)>> = vec![None; work.len() + 1];
    best[0] = Some((0, 0));
    let mut begins = Vec::new();
    for stage in 0..stages {
        let mut next = vec![None; work.len() + 1];
        let mut from = vec![0; work.len() + 1];
        for to in stage + 1..=work.len() {
            let starts = if stage == 0 { 0..1 } else { stage..to };
            for start in starts.rev() {
                if next[to].is_some_and(|(slowest, _)| arithmetic(start, to) > slowest) {
                    break;
                }
                let Some((slowest, bytes)) = best[start] else { continue };
                let candidate = (slowest.max(cost(start, to)), bytes + bytes_at(start));
                if next[to].is_none_or(|known| candidate < known) {
                    (next[to], from[to]) = (Some(candidate), start);
                }
            }
        }
        best = next;
        begins.push(from);
    }
    let mut starts = Vec::new();
    let mut end = work.len();
    for from in begins.iter().rev() {
        end = from[end];
        starts.push(work[end]);
    }
    starts.reverse();
    Ok(starts.split_off(1))
}

/// Returns for each node the bytes that would cross a stage boundary right before that node. These are the values that
/// are computed before the node, and read by the node or by a later one.
fn crossing_bytes(graph: &Graph) -> Vec<u64> {
    let mut last_read = vec![0; graph.values().len()];
    for (index, node) in graph.nodes().iter().enumerate() {
        node.inputs.iter().for_each(|&input| last_read[graph.value(input).root.index()] = index);
    }
    let mut change = vec![0i64; graph.nodes().len() + 2];
    for (index, node) in graph.nodes().iter().enumerate() {
        for &output in node.outputs.iter().filter(|&&output| !graph.is_view(output)) {
            let (bytes, last) = (graph.value(output).spec.bytes() as i64, last_read[output.index()]);
            if last > index {
                change[index + 1] += bytes;
                change[last + 1] -= bytes;
            }
        }
    }
    change
        .iter()
        .scan(0, |bytes, &change| {
            *bytes += change;
            Some(*bytes as u64)
        })
        .collect()
}
