//! The part of a graph's forward that a pipeline stage runs, in the order of an eager program.

use std::collections::{BTreeMap, HashMap, HashSet};

use gapless_engine::graph::{Graph, Node, NodeId, Phase, Place, Source, ValueId};
use gapless_engine::recompute::block_of;
use gapless_parallel::{Action, StageId};

use super::experts::Mixture;

/// A pipeline stage.
#[derive(Debug, Default)]
pub struct Stage {
    pub nodes: Vec<NodeId>,
    /// For each value, the position of the last node that reads it.
    pub last: BTreeMap<ValueId, usize>,
    /// Values that other stages read. For the last stage, this is the loss.
    pub outputs: Vec<ValueId>,
}

/// Returns the place of each node, by index. A program runs a mixture of experts as one function. So if stages meet
/// inside one of `mixtures`, which are given by layer, the whole mixture belongs to the stage in which it begins.
pub fn places(graph: &Graph, mixtures: &BTreeMap<String, Mixture>) -> Vec<Place> {
    let mut places: Vec<Place> = graph.nodes().iter().map(|node| node.place).collect();
    let mut spans: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for id in graph.node_ids().filter(|&id| graph.node(id).phase == Phase::Forward) {
        if let Some((layer, _)) = mixtures.get_key_value(&*graph.node(id).layer) {
            spans.entry(layer).or_insert((id.index(), id.index())).1 = id.index();
        }
    }
    for (first, last) in spans.into_values() {
        let place = places[first];
        places[first..=last].fill(place);
    }
    places
}

impl Stage {
    /// Returns the stages of a rank's actions, and the names of all blocks of the model, in order. `places` has the
    /// place of each node.
    pub fn of_rank(
        graph: &Graph,
        places: &[Place],
        row: &[Action],
        is_transformers: bool,
    ) -> (HashMap<StageId, Self>, Vec<String>) {
        let mut stages: HashMap<StageId, Self> = HashMap::new();
        let here: HashSet<StageId> = row.iter().map(|action| action.stage).collect();
        let mut blocks: Vec<String> = Vec::new();
        for id in graph.node_ids() {
            let node = graph.node(id);
            let Place::Stage(place) = places[id.index()] else { continue };
            if node.phase != Phase::Forward {
                continue;
            }
            if let Some(block) = block_of(&node.layer).filter(|block| !blocks.iter().any(|known| known == block)) {
                blocks.push(block.to_owned());
            }
            if here.contains(&place) {
                let stage = stages.entry(place).or_default();
                stage.nodes.push(id);
            }
        }
        for (&place, stage) in &mut stages {
            if is_transformers {
                put_products_together(graph, &mut stage.nodes);
            }
            let inputs =
                |(position, &id): (usize, &NodeId)| graph.node(id).inputs.iter().map(move |&id| (id, position));
            stage.last = stage.nodes.iter().enumerate().flat_map(inputs).collect();
            stage.outputs = outputs(graph, places, place, stage);
        }
        (stages, blocks)
    }
}

/// True if the value is the output of a `sum`.
pub fn is_sum(graph: &Graph, id: ValueId) -> bool {
    matches!(graph.value(id).source, Source::Node { node, .. } if graph.node(node).op.name() == "sum")
}

/// Moves linear layers that have the same input next to each other, together with the views of their outputs. So the
/// products for queries, keys and values all come before the rotation of queries and keys.
fn put_products_together(graph: &Graph, nodes: &mut [NodeId]) {
    let name = |id: NodeId| graph.node(id).op.name();
    let read = |id: NodeId| Some(graph.node(id)).filter(|node| node.op.name() == "linear").map(|node| node.inputs[0]);
    let is_view = |id: &&NodeId| matches!(name(**id), "reshape" | "transpose");
    for position in 0..nodes.len() {
        let Some(input) = read(nodes[position]) else { continue };
        let views = |from: usize, nodes: &[NodeId]| from + 1 + nodes[from + 1..].iter().take_while(is_view).count();
        let end = views(position, nodes);
        // The shared expert's products come after the router's choice.
        let mut near = (end..nodes.len()).take(32).take_while(|&next| name(nodes[next]) != "top_k");
        if let Some(next) = near.find(|&next| read(nodes[next]) == Some(input)) {
            let moved = views(next, nodes);
            nodes[end..moved].rotate_right(moved - next);
        }
    }
}

/// Returns the values of a stage that other stages read, in order. If there are none, returns the stage's last value.
fn outputs(graph: &Graph, places: &[Place], place: StageId, stage: &Stage) -> Vec<ValueId> {
    let made: HashSet<ValueId> = stage.nodes.iter().flat_map(|&id| &graph.node(id).outputs).copied().collect();
    let is_elsewhere = |(node, at): &(&Node, &Place)| node.phase == Phase::Forward && **at != Place::Stage(place);
    let elsewhere = graph.nodes().iter().zip(places).filter(is_elsewhere);
    let mut read: Vec<ValueId> =
        elsewhere.flat_map(|(node, _)| &node.inputs).filter(|id| made.contains(id)).copied().collect();
    read.sort_unstable();
    read.dedup();
    match stage.nodes.last() {
        Some(&last) if read.is_empty() => vec![graph.node(last).outputs[0]],
        _ => read,
    }
}
