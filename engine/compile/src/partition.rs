//! Which stage runs which part of a model.
//!
//! In: a graph that has only its forward part. Out: the same graph, every node marked with its stage; autodiff hands the
//! marks on. Stages are runs of nodes in the order of the graph. Never: ranks, or an order of execution.

use std::collections::{BTreeSet, HashMap};

use gapless_graph::{Graph, Node, NodeId, Place, Source};
use gapless_parallel::StageId;

use crate::error::{Error, Result};

/// Where a model is cut into stages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StagePartition {
    /// So that the slowest stage is as fast as can be, counting the arithmetic of each stage and the bytes that it hands
    /// over.
    #[default]
    Balanced,
    /// In front of these layers, e.g. `h.3`: one fewer than there are stages, in the order of the model.
    Before(Vec<String>),
}

/// Arithmetic operations in whose time one byte goes from a rank to another: what machines of today have, give or take
/// a factor of four. Only the choice between nearly equal cuts depends on it.
const FLOPS_PER_BYTE: u64 = 64;

/// Marks the forward nodes of `graph` with `stages` stages.
///
/// # Errors
/// When there are fewer nodes than stages, or a layer to cut in front of doesn't exist or comes too early.
pub fn cut(graph: &mut Graph, stages: usize, cut: &StagePartition) -> Result<()> {
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    let starts = match cut {
        StagePartition::Balanced => balanced(graph, stages)?,
        StagePartition::Before(layers) => before(graph, stages, layers)?,
    };
    for (index, node) in nodes.into_iter().enumerate() {
        let stage = starts.partition_point(|&start| start <= index);
        graph.reassign_place(node, place(stage));
    }
    Ok(())
}

/// Which stages read each parameter, by its name.
pub type ParameterStages = HashMap<String, BTreeSet<StageId>>;

/// The stages whose forward nodes read each parameter.
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

/// Marks the forward nodes of another graph of the same model, so that every parameter is read where it was before: each
/// node goes into the earliest stage, not before its predecessors', that has its parameters.
pub fn cut_like(graph: &mut Graph, stages: &ParameterStages) {
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

/// The first node of each stage but stage 0.
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

/// Dynamic programming over (stages so far, nodes so far): the least possible cost of the slowest stage, then the fewest
/// bytes handed over.
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
    // Forward and both gradients; activations one way, their gradients the other.
    let arithmetic = |from: usize, to: usize| (flops[to] - flops[from]).saturating_mul(3);
    let cost = |from: usize, to: usize| {
        arithmetic(from, to).saturating_add((2 * FLOPS_PER_BYTE).saturating_mul(bytes_at(from) + bytes_at(to)))
    };
    // best[k]: (slowest stage, bytes handed over) of the first k operations; with where the last stage begins.
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

/// Bytes that cross a cut in front of each node: made before it, read at or after it.
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
