//! The training step as data: single-assignment values of known shape, made by nodes in order.
//!
//! In: calls of the builder ([`Tensor`]), and of autodiff. Out: a [`Graph`] whose nodes stand in an order
//! in which they can run. Never: a buffer, an address, or a number.
//!
//! View operations (`reshape`, `transpose`, `narrow`, `broadcast_as`) make no data: their value shares the storage of
//! another one, its *root*, under a layout. A node whose operation cannot read strides gets a `contiguous` copy put in
//! front of it, so that everything after the graph can rely on what an operation declared.

mod apply;
mod check;
mod declare;
mod node;
mod value;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Layout, Shape};
use gapless_kernels::{LossTerms, Spec};

use crate::error::{Error, Result};
use crate::optim::Optimizer;
use crate::reference::layout_indices;

pub use node::{Node, NodeId, Phase, Place};
pub use value::{FLOATS, RowCount, Source, Value, ValueId};

/// Tensors of a graph at most: a thousand layers have some ten thousands.
const MOST_VALUES: usize = 1 << 20;

/// What the tokens of a graph's sequences are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sequences {
    /// Each the first tokens of a text.
    #[default]
    Whole,
    /// Those behind others, whose keys and values earlier runs have left in tensors of [`Source::Cache`]: attention writes its own
    /// behind them, and reads both.
    Continued {
        /// The place of each token in its sequence: u32 [batch, tokens]. Those of a sequence are consecutive.
        positions: ValueId,
        /// Tokens of a sequence at most.
        window: usize,
    },
    /// Those of several documents side by side, which do not see each other. The loss of each token counts by its weight.
    Packed {
        /// The first token of each token's document: u32 [batch, tokens].
        starts: ValueId,
        /// The place of each token in its document: u32 [batch, tokens].
        positions: ValueId,
        /// What each token's loss is multiplied by: f32 [batch, tokens].
        weights: ValueId,
        /// What each token counts in the statistics of a router, 1 in the mean over the batch: f32 [batch, tokens], 0 for padding.
        routed: ValueId,
    },
}

/// A part of a training loss that each step reports apart from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossPart {
    /// −log p of the targets, where a head counts more than that.
    Likelihood,
    /// The balance losses of routers.
    Balance,
    /// The z-losses of routers.
    RouterZ,
}

/// A scalar that is reported as a part of the loss.
#[derive(Debug, Clone, Copy)]
pub struct ReportedLoss {
    /// Which part.
    pub part: LossPart,
    /// What the loss is made of if it has this part.
    pub of: ValueId,
    /// What the part counts in the loss of a micro-batch.
    pub mean: ValueId,
}

/// Values and the nodes that make them, in an order in which they can run.
#[derive(Debug, Default)]
pub struct Graph {
    values: Vec<Value>,
    nodes: Vec<Node>,
    names: HashMap<String, ValueId>,
    /// The stored element of each number, by its bits, in each type.
    constants: HashMap<(u64, DType), ValueId>,
    layers: Vec<Arc<str>>,
    phase: Option<Phase>,
    place: Place,
    random_places: u64,
    /// Shapes of the whole tensors of which the expert ranks have a share each.
    shares: HashMap<ValueId, Shape>,
    /// How parameters change that the optimizer has no say in.
    rules: HashMap<ValueId, Arc<dyn Optimizer>>,
    /// Parameters that are not trained.
    frozen: HashSet<ValueId>,
    /// What a training step shows of itself, beside the loss.
    watched: Vec<(String, ValueId)>,
    /// What the loss of a micro-batch is the sum of, among others.
    loss_parts: Vec<ReportedLoss>,
    sequences: Sequences,
    loss_terms: LossTerms,
}

/// The graph behind its handles. A panic elsewhere leaves a graph that is short of nodes, not a broken one.
pub fn lock(graph: &Mutex<Graph>) -> MutexGuard<'_, Graph> {
    graph.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Graph {
    /// One value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// One node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Shapes and types of some values.
    pub fn specs(&self, ids: &[ValueId]) -> Vec<Spec> {
        ids.iter().map(|&id| self.value(id).spec.clone()).collect()
    }

    /// All nodes, in order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All values, in order.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// All ids of nodes, in order.
    pub fn node_ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// All ids of values, in order.
    pub fn value_ids(&self) -> impl DoubleEndedIterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// Whether the value is a view of another one.
    pub fn is_view(&self, id: ValueId) -> bool {
        self.value(id).root != id
    }

    /// The values that outlive the step, with their names, in the order in which they were declared.
    pub fn persistent(&self) -> impl Iterator<Item = (ValueId, &str)> {
        self.value_ids().filter_map(|id| match &self.value(id).source {
            Source::Persistent { name, .. } => Some((id, name.as_str())),
            _ => None,
        })
    }

    /// Says what the tokens are of what is recorded from now on.
    pub fn set_sequences(&mut self, sequences: Sequences) {
        self.sequences = sequences;
    }

    /// Says what losses over a vocabulary count, of those that are recorded from now on.
    pub fn set_loss_terms(&mut self, terms: LossTerms) {
        self.loss_terms = terms;
    }

    /// What losses over a vocabulary count beside the likelihood of their targets.
    pub fn loss_terms(&self) -> LossTerms {
        self.loss_terms
    }

    /// What the tokens are.
    pub fn sequences(&self) -> Sequences {
        self.sequences
    }

    /// The number that every element of a value is, if that is known.
    pub fn number(&self, id: ValueId) -> Option<f64> {
        match self.value(self.value(id).root).source {
            Source::Constant(number) => Some(number),
            _ => None,
        }
    }

    /// The elements of a value that the model's source gives, in row-major order, if it is one.
    pub fn data(&self, id: ValueId) -> Option<Vec<f64>> {
        let value = self.value(id);
        match &self.value(value.root).source {
            Source::Constant(number) => Some(vec![*number; value.spec.elements()]),
            Source::Data { elements, .. } => Some(layout_indices(&value.layout).map(|i| elements[i]).collect()),
            _ => None,
        }
    }

    /// A key for the next operation that draws random numbers: their order in the model, which no shape changes.
    pub fn next_random(&mut self) -> u64 {
        self.random_places += 1;
        self.random_places
    }

    /// Lets a parameter change by a rule of its own.
    pub fn set_rule(&mut self, parameter: ValueId, rule: Arc<dyn Optimizer>) {
        self.rules.insert(parameter, rule);
    }

    /// A parameter's own rule, if it has one.
    pub fn rule(&self, parameter: ValueId) -> Option<&Arc<dyn Optimizer>> {
        self.rules.get(&parameter)
    }

    /// Leaves a parameter as it is: it has no gradient.
    pub fn freeze(&mut self, parameter: ValueId) {
        self.frozen.insert(parameter);
    }

    /// Whether a parameter is not trained.
    pub fn is_frozen(&self, parameter: ValueId) -> bool {
        self.frozen.contains(&parameter)
    }

    /// Shows a value under a name; where that is taken, with a number behind it.
    pub fn watch(&mut self, name: &str, id: ValueId) {
        let free = self.free_name(name, |graph, wanted| graph.watched.iter().any(|(taken, _)| taken == wanted));
        self.watched.push((free, id));
    }

    /// The name; where that is taken, with a number behind it.
    fn free_name(&self, name: &str, is_taken: impl Fn(&Self, &str) -> bool) -> String {
        let numbered = (2..).map(|number| format!("{name}.{number}"));
        let free = std::iter::once(name.to_owned()).chain(numbered).find(|wanted| !is_taken(self, wanted));
        free.expect("there are more numbers than names")
    }

    /// The values that are shown, with their names, in the order in which they were recorded.
    pub fn watched(&self) -> &[(String, ValueId)] {
        &self.watched
    }

    /// Has a scalar reported as a part of the loss.
    pub fn report_loss(&mut self, reported: ReportedLoss) {
        self.loss_parts.push(reported);
    }

    /// The scalars that are reported as a part of a loss, in the order in which they were recorded; those that it is not made of are not.
    pub fn parts_of_loss(&self, loss: ValueId, part: LossPart) -> Vec<ValueId> {
        let mut made_of = HashSet::from([loss]);
        for node in self.nodes.iter().rev().filter(|_| !self.loss_parts.is_empty()) {
            if node.outputs.iter().any(|output| made_of.contains(output)) {
                made_of.extend(&node.inputs);
            }
        }
        let reported = self.loss_parts.iter().filter(|reported| reported.part == part);
        reported.filter(|reported| made_of.contains(&reported.of)).map(|reported| reported.mean).collect()
    }

    /// The layer that nodes are put in from now on.
    pub fn layer(&self) -> Arc<str> {
        self.layers.last().cloned().unwrap_or_else(|| Arc::from(""))
    }

    /// Begins a layer: nodes are of it until [`Self::leave_layer`].
    pub fn enter_layer(&mut self, name: Arc<str>) {
        // Layers that were made without a name stand in the one around them.
        let name = if name.is_empty() { self.layer() } else { name };
        self.layers.push(name);
    }

    /// Ends the innermost layer.
    pub fn leave_layer(&mut self) {
        self.layers.pop();
    }

    /// The phase that nodes are put in from now on; forward until told otherwise.
    pub fn set_phase(&mut self, phase: Phase) {
        self.phase = Some(phase);
    }

    /// The place that nodes are put in from now on; the first stage until told otherwise.
    pub fn set_place(&mut self, place: Place) {
        self.place = place;
    }

    /// The place that nodes are put in.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Moves a node to another place.
    pub fn reassign_place(&mut self, id: NodeId, place: Place) {
        self.nodes[id.index()].place = place;
    }

    /// The place of the node that makes a value's bytes; none for what no node makes.
    pub fn place_of(&self, id: ValueId) -> Option<Place> {
        self.producer(id).map(|node| node.place)
    }

    /// The node that makes a value's bytes; none for what comes from outside.
    pub fn producer(&self, id: ValueId) -> Option<&Node> {
        self.maker(id).map(|node| self.node(node))
    }

    /// The same, by its id.
    pub fn maker(&self, id: ValueId) -> Option<NodeId> {
        match self.value(self.value(id).root).source {
            Source::Node { node, .. } => Some(node),
            _ => None,
        }
    }

    /// Moves a node into another phase.
    pub fn reassign_phase(&mut self, id: NodeId, phase: Phase) {
        self.nodes[id.index()].phase = phase;
    }

    /// Refuses tensors of nothing, those of more bytes than there can be, and more tensors than a model ever has.
    fn check_sizes(&self, op: &str, specs: &[Spec]) -> Result<()> {
        if self.values.len() > MOST_VALUES {
            let why = format!("the step has more than {MOST_VALUES} tensors");
            return Err(Error::config("model", why, "use fewer layers"));
        }
        for spec in specs {
            let what = match spec.checked_bytes() {
                Some(1..) => continue,
                Some(0) => "an extent is 0".to_owned(),
                None if spec.dtype.size_in_bytes() == 0 => format!("elements of {:?} are not whole bytes", spec.dtype),
                None => "more than 2^63 bytes".to_owned(),
            };
            let (layer, shapes) = (self.layer().to_string(), vec![spec.shape.clone()]);
            return Err(Error::Shape { op: op.into(), layer, what, shapes });
        }
        Ok(())
    }

    fn push_value(&mut self, spec: Spec, source: Source) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        let layout = Layout::contiguous(spec.shape.clone());
        self.values.push(Value { spec, source, root: id, layout, rows: None });
        id
    }

    fn push_view(&mut self, root: ValueId, spec: Spec, layout: Layout) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        let source = self.value(root).source.clone();
        self.values.push(Value { spec, source, root, layout, rows: None });
        id
    }
}
