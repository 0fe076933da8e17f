//! Finds equal layers of a model, so that a sketch can be taken from models with fewer layers.
//!
//! - In: a model's source, and the options of a step.
//! - Out: how many layers each stage can do without, and the stages of the model without them.
//! - Never: a guess. Layers are equal only if their nodes are, in all on which gradients, division and lowering depend.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::ops::Range;

use gapless_graph::{Graph, Node, NodeId, Place, Source, ValueId};

use super::graph::first_rank;
use super::record::TrainStep;
use super::{Build, StepOptions};
use crate::error::Result;
use crate::partition::StagePartition;
use crate::recompute::{Layers, Recompute, block_of};

/// The forward of a model whose last layers are equal.
#[derive(Debug)]
pub struct EqualLayers {
    forward: Forward,
    /// The number of nodes of a layer.
    nodes: usize,
    /// The nodes of the equal layers.
    equal: Range<usize>,
}

/// The nodes of a forward.
#[derive(Debug)]
struct Forward {
    /// A description of each node.
    nodes: Vec<String>,
    /// The nodes of each layer.
    layers: Vec<Range<usize>>,
    /// The first node of each stage.
    stages: Vec<usize>,
}

impl EqualLayers {
    /// Records the forward of a step. Returns `None` if its last two layers differ.
    ///
    /// # Errors
    /// Returns an error if the options or the model's shapes do not fit together.
    pub fn find(build: &Build<'_>, options: &StepOptions) -> Result<Option<Self>> {
        let forward = Forward::record(build, options)?;
        let Some(last) = forward.layers.last().cloned() else { return Ok(None) };
        let is_like_the_last = |layer: &&Range<usize>| forward.nodes[(*layer).clone()] == forward.nodes[last.clone()];
        let count = forward.layers.iter().rev().take_while(is_like_the_last).count();
        let (nodes, first) = (last.len(), forward.layers[forward.layers.len() - count].start);
        let is_contiguous = last.end - first == count * nodes;
        Ok((count > 1 && is_contiguous).then_some(Self { nodes, equal: first..last.end, forward }))
    }

    /// Returns whether the recomputation, or another option, may treat equal layers differently.
    pub fn are_told_apart(options: &StepOptions) -> bool {
        fn names_layers(recompute: &Recompute) -> bool {
            match recompute {
                Recompute::None | Recompute::Ops(_) | Recompute::Layers(Layers::All) => false,
                Recompute::Layers(Layers::First(_) | Layers::Named(_)) | Recompute::Custom(_) => true,
                Recompute::Cycle(policies) => policies.iter().any(names_layers),
            }
        }
        names_layers(&options.memory.recompute) || !options.update.groups.is_empty()
    }

    /// Returns the number of layers of the model.
    pub fn layers(&self) -> usize {
        self.forward.layers.len()
    }

    /// Returns the number of layers that each stage can do without, if it keeps `kept` of its whole equal layers.
    pub fn spare(&self, kept: usize) -> Vec<usize> {
        let Self { forward: Forward { stages, nodes: all, .. }, nodes, equal } = self;
        let ends = stages[1..].iter().copied().chain([all.len()]);
        let spare = stages.iter().zip(ends).map(|(&start, end)| {
            let first = start.saturating_sub(equal.start).div_ceil(*nodes);
            let last = end.min(equal.end).saturating_sub(equal.start) / nodes;
            last.saturating_sub(first).saturating_sub(kept)
        });
        spare.collect()
    }

    /// Returns the stages of the model without `left_out` layers of each stage.
    pub fn without(&self, left_out: &[usize]) -> StagePartition {
        let mut removed = 0;
        let starts = self.forward.stages[1..].iter().zip(left_out).map(|(start, left_out)| {
            removed += left_out * self.nodes;
            start - removed
        });
        StagePartition::At(starts.collect())
    }

    /// Returns whether the model of `build` is this model without `left_out` layers.
    ///
    /// # Errors
    /// Returns the errors of [`Self::find`].
    pub fn is_without(&self, left_out: usize, build: &Build<'_>, options: &StepOptions) -> Result<bool> {
        let (all, few) = (&self.forward.nodes, Forward::record(build, options)?.nodes);
        let removed = left_out * self.nodes;
        let same = self.equal.end.saturating_sub(removed).min(few.len());
        Ok(few.len() + removed == all.len() && few[..same] == all[..same] && few[same..] == all[self.equal.end..])
    }
}

impl Forward {
    fn record(build: &Build<'_>, options: &StepOptions) -> Result<Self> {
        let ranks = first_rank(options);
        let mut step = TrainStep::forward(build, options, &ranks)?;
        step.partition(options, &ranks)?;
        Ok(Self::of(&step.graph()))
    }

    fn of(graph: &Graph) -> Self {
        let mut layers: Vec<(&str, Range<usize>)> = Vec::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            match (block_of(&node.layer), layers.last_mut()) {
                (None, _) => {}
                (Some(name), Some((last, nodes))) if name == *last && nodes.end == index => nodes.end += 1,
                (Some(name), _) => layers.push((name, index..index + 1)),
            }
        }
        let stage_of = |node: &Node| match node.place {
            Place::Stage(stage) => stage.0 as usize,
            Place::Everywhere => 0,
        };
        let mut stages = vec![0];
        for (index, node) in graph.nodes().iter().enumerate() {
            // A stage without nodes begins where the next one does.
            stages.resize(stages.len().max(stage_of(node) + 1), index);
        }
        let first = layers.first().map_or(0, |(_, nodes)| nodes.start);
        let mut described = Described { graph, first, known: HashMap::new() };
        let nodes = graph.node_ids().map(|id| described.describe(id)).collect();
        Self { nodes, layers: layers.into_iter().map(|(_, nodes)| nodes).collect(), stages }
    }
}

/// The nodes that are described so far.
struct Described<'g> {
    graph: &'g Graph,
    /// The first node of the first layer.
    first: usize,
    /// By root: the node that computes it, or the first that reads it.
    known: HashMap<ValueId, usize>,
}

impl Described<'_> {
    /// Describes a node and the places from which it reads. Places inside of layers are relative to the node.
    fn describe(&mut self, id: NodeId) -> String {
        let Self { graph, first, known } = self;
        let (node, index) = (graph.node(id), id.index());
        let part = node.layer.strip_prefix(block_of(&node.layer).unwrap_or_default());
        let mut text = format!("{:?} {part:?} {:?}", node.op, node.phase);
        let mut add = |what: fmt::Arguments<'_>| write!(text, "; {what}").expect("a String takes all text");
        for &input in &node.inputs {
            let value = graph.value(input);
            let (id, root) = (value.root, graph.value(value.root));
            add(format_args!("{:?} of {:?} {}", value.layout, root.spec, root.row_count.is_some()));
            match &root.source {
                Source::Node { output, .. } => add(format_args!("output {output}")),
                Source::Persistent { .. } => {
                    let marks = [graph.is_head(id), graph.has_vectors(id), graph.is_frozen(id)];
                    add(format_args!("{marks:?} {:?} {:?}", graph.optimizer_of(id), graph.window(id)));
                }
                // All nodes read the same one.
                Source::Input { name } | Source::Cache { name } | Source::Data { name, .. } => {
                    add(format_args!("{name}"));
                    continue;
                }
                Source::Constant(number) => {
                    add(format_args!("{number:?}"));
                    continue;
                }
            }
            match *known.entry(id).or_insert(index) {
                place if place < *first => add(format_args!("at {place}")),
                place => add(format_args!("{} before", index - place)),
            }
        }
        for value in node.outputs.iter().map(|&output| graph.value(output)) {
            add(format_args!("to {:?} {}", value.spec, value.row_count.is_some()));
            known.entry(value.root).or_insert(index);
        }
        text
    }
}
