//! The training step as data: single-assignment values of known shape, produced by nodes in order.
//!
//! In: calls of the builder ([`Tensor`]) and of autodiff. Out: a [`Graph`] whose nodes are in an order in which they
//! can run. Never: a buffer, an address, or the value of an element.
//!
//! View operations (`reshape`, `transpose`, `narrow`, `broadcast_as`) move no data. Their value shares the storage of
//! another value, its *root*, under a layout. If a node's operation cannot read the strides of an input, a `contiguous`
//! copy is inserted before it, so that everything after this crate can rely on
//! [`Op::reads_strides`](crate::Op::reads_strides).

mod apply;
mod carry;
mod check;
mod declare;
mod node;
mod value;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Layout};
use gapless_kernels::{LossTerms, Spec};

use crate::error::{Error, Result};
use crate::nn::Preference;
use crate::optim::Optimizer;
use crate::reference::layout_indices;

pub use node::{Node, NodeId, Phase, Place};
pub use value::{FLOATS, RowCount, Source, Value, ValueId};

/// Upper limit of the number of values in a graph. A model of a thousand layers has some ten thousand values.
const MAX_VALUES: usize = 1 << 20;

/// The relation between the tokens of a graph's sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sequences {
    /// Each sequence holds the beginning of one text.
    #[default]
    Whole,
    /// Like [`Self::Whole`], but operations read the places of tokens from a value, so that ranks can divide the tokens.
    Placed {
        /// The position of each token in its text: u32 [batch, tokens].
        positions: ValueId,
    },
    /// Each sequence continues a text. Caches ([`Source::Cache`]) have the keys and values of the text's past tokens,
    /// which earlier runs have written. Attention appends the keys and values of the new tokens to the caches, and
    /// reads those of all tokens from there.
    Continued {
        /// The position of each token in its text: u32 [batch, tokens]. The positions in a sequence are consecutive.
        positions: ValueId,
        /// The greatest number of tokens in a text.
        window: usize,
    },
    /// Each sequence holds several documents, one after another. Tokens of different documents do not attend to each
    /// other, and the loss of each token is multiplied by a weight.
    Packed {
        /// The index of the first token of each token's document: u32 [batch, tokens].
        document_starts: ValueId,
        /// The position of each token in its document: u32 [batch, tokens].
        positions: ValueId,
        /// The weight of each token's loss: f32 [batch, tokens].
        weights: ValueId,
        /// The weight of each token in the statistics of a router: f32 [batch, tokens], 0 for padding, with a mean of 1
        /// over the batch.
        routed: ValueId,
    },
}

/// The evaluation of whole sequences in place of their tokens. The likelihood of a sequence is that of its targets with
/// the weight 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SequenceLoss {
    /// The log-likelihood of each sequence is recorded ([`Graph::log_likelihoods`]). The loss does not change.
    LogLikelihoods,
    /// The loss is that of pairs: sequence 2i has the chosen answer of pair i, and sequence 2i + 1 the rejected one.
    /// With `kto`, sequence 2i has an answer with a label, and sequence 2i + 1 the answer to another prompt.
    Pairs {
        /// The loss of a pair.
        preference: Preference,
        /// The log-likelihood of each sequence under the reference model: f32 `[batch]`. `None` stands for zeros.
        reference: Option<ValueId>,
        /// The label of each sequence, for a loss of labels: f32 `[batch]`, 1 for a desirable answer and 0 for an
        /// undesirable one. The labels of sequences 2i + 1 have no effect.
        desirable: Option<ValueId>,
    },
}

/// A mean over the batch that each step reports in addition to its loss: a part of the loss, or a statistic of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossPart {
    /// −log p of the targets, without further terms. Reported only if the loss has further terms.
    Likelihood,
    /// The balance losses of the routers.
    Balance,
    /// The z-losses of the routers.
    RouterZ,
    /// The rewards of chosen answers.
    ChosenReward,
    /// The rewards of rejected answers.
    RejectedReward,
    /// The differences of the two rewards of a pair.
    RewardMargin,
    /// 1 for each pair whose chosen answer has the higher reward, and 0 for each other pair.
    RewardAccuracy,
}

/// A scalar that is a summand of a reported part of the loss.
#[derive(Debug, Clone, Copy)]
pub struct ReportedLoss {
    /// The part of the loss.
    pub part: LossPart,
    /// A loss contains this summand if the loss depends on this value.
    pub depends_on: ValueId,
    /// The scalar that is reported for a micro-batch.
    pub scalar: ValueId,
}

/// Values and the nodes that produce them, in an order in which they can run.
#[derive(Debug, Default)]
pub struct Graph {
    values: Vec<Value>,
    nodes: Vec<Node>,
    names: HashMap<String, ValueId>,
    /// The value that stores each constant, by the bits of the constant's number and by its type.
    constants: HashMap<(u64, DType), ValueId>,
    layers: Vec<Arc<str>>,
    phase: Option<Phase>,
    place: Place,
    random_places: u64,
    /// Update rules of parameters that are not updated by the optimizer.
    rules: HashMap<ValueId, Arc<dyn Optimizer>>,
    /// Parameters that are not trained.
    frozen: HashSet<ValueId>,
    /// For parameters whose elements are packed, the number of elements that they stand for.
    packed: HashMap<ValueId, usize>,
    /// Weights of output heads.
    heads: HashSet<ValueId>,
    /// Parameters whose rows are vectors.
    vectors: HashSet<ValueId>,
    /// The paths of the layers that can have adapters.
    linear_layers: Vec<String>,
    /// Scalars that each training step reports in addition to the loss, with their names.
    watched: Vec<(String, ValueId)>,
    /// Scalars that are reported as parts of the loss.
    loss_parts: Vec<ReportedLoss>,
    sequences: Sequences,
    loss_terms: LossTerms,
    sequence_loss: Option<SequenceLoss>,
    /// The log-likelihood of each sequence: f32 `[batch]`.
    log_likelihoods: Option<ValueId>,
}

/// Locks the graph. A poisoned lock is ignored: after a panic in another thread, the graph may lack nodes, but it is
/// consistent.
pub fn lock(graph: &Mutex<Graph>) -> MutexGuard<'_, Graph> {
    graph.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Graph {
    /// Returns a value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// Returns a node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Returns the shapes and types of values.
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

    /// The ids of all nodes, in order.
    pub fn node_ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// The ids of all values, in order.
    pub fn value_ids(&self) -> impl DoubleEndedIterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// True if the value is a view of another value.
    pub fn is_view(&self, id: ValueId) -> bool {
        self.value(id).root != id
    }

    /// The values that live longer than the step, with their names, in the order in which they were declared.
    pub fn persistent(&self) -> impl Iterator<Item = (ValueId, &str)> {
        self.value_ids().filter_map(|id| match &self.value(id).source {
            Source::Persistent { name, .. } => Some((id, name.as_str())),
            _ => None,
        })
    }

    /// Sets the relation between tokens for the nodes that are recorded from now on.
    pub fn set_sequences(&mut self, sequences: Sequences) {
        self.sequences = sequences;
    }

    /// Sets the additional terms of vocabulary losses for the nodes that are recorded from now on.
    pub fn set_loss_terms(&mut self, terms: LossTerms) {
        self.loss_terms = terms;
    }

    /// The terms that losses over a vocabulary have in addition to −log p of their targets.
    pub fn loss_terms(&self) -> LossTerms {
        self.loss_terms
    }

    /// Sets the evaluation of whole sequences for vocabulary losses that are recorded from now on.
    pub fn set_sequence_loss(&mut self, loss: SequenceLoss) {
        self.sequence_loss = Some(loss);
    }

    /// The evaluation of whole sequences; `None` if the loss is that of single tokens.
    pub fn sequence_loss(&self) -> Option<SequenceLoss> {
        self.sequence_loss
    }

    pub(crate) fn set_log_likelihoods(&mut self, id: ValueId) {
        self.log_likelihoods = Some(id);
    }

    /// The log-likelihood of each sequence: f32 `[batch]`. `None` before a loss is recorded under
    /// [`SequenceLoss::LogLikelihoods`].
    pub fn log_likelihoods(&self) -> Option<ValueId> {
        self.log_likelihoods
    }

    /// The relation between the tokens of each sequence.
    pub fn sequences(&self) -> Sequences {
        self.sequences
    }

    /// Returns the number that all elements of a value equal. Returns `None` if the value is not such a constant.
    pub fn number(&self, id: ValueId) -> Option<f64> {
        match self.value(self.value(id).root).source {
            Source::Constant(number) => Some(number),
            _ => None,
        }
    }

    /// Returns the elements of a value in row-major order if the model's source gives them, and `None` if they are
    /// known only when the program runs.
    pub fn data(&self, id: ValueId) -> Option<Vec<f64>> {
        let value = self.value(id);
        match &self.value(value.root).source {
            Source::Constant(number) => Some(vec![*number; value.spec.elements()]),
            Source::Data { elements, .. } => Some(layout_indices(&value.layout).map(|i| elements[i]).collect()),
            _ => None,
        }
    }

    /// Returns a new key for an operation that draws random numbers. Keys count these operations in the order in which
    /// they are recorded, so a key does not depend on shapes.
    pub fn next_random(&mut self) -> u64 {
        self.random_places += 1;
        self.random_places
    }

    /// Makes `rule` update a parameter. The optimizer of the training step then leaves this parameter alone.
    pub fn set_optimizer(&mut self, parameter: ValueId, rule: Arc<dyn Optimizer>) {
        self.rules.insert(parameter, rule);
    }

    /// Returns the parameter's own update rule ([`Self::set_optimizer`]), or `None` if the optimizer of the training
    /// step updates the parameter.
    pub fn optimizer_of(&self, parameter: ValueId) -> Option<&Arc<dyn Optimizer>> {
        self.rules.get(&parameter)
    }

    /// Marks a parameter as the weight of an output head, whose outputs are logits.
    pub fn mark_head(&mut self, parameter: ValueId) {
        let root = self.value(parameter).root;
        self.heads.insert(root);
    }

    /// True if a parameter is the weight of an output head ([`Self::mark_head`]).
    pub fn is_head(&self, parameter: ValueId) -> bool {
        self.heads.contains(&parameter)
    }

    /// Marks a parameter as a list of vectors, such as one bias for each expert, and not a matrix.
    pub fn mark_vectors(&mut self, parameter: ValueId) {
        self.vectors.insert(parameter);
    }

    /// True if a parameter is a list of vectors ([`Self::mark_vectors`]).
    pub fn has_vectors(&self, parameter: ValueId) -> bool {
        self.vectors.contains(&parameter)
    }

    /// Excludes a parameter from training: it gets no gradient.
    pub fn freeze(&mut self, parameter: ValueId) {
        self.frozen.insert(parameter);
    }

    /// True if a parameter is excluded from training.
    pub fn is_frozen(&self, parameter: ValueId) -> bool {
        self.frozen.contains(&parameter)
    }

    /// Sets the number of elements of a model's weight that a persistent tensor stores.
    pub fn mark_packed(&mut self, parameter: ValueId, elements: usize) {
        self.packed.insert(parameter, elements);
    }

    /// Returns the number of elements of the model's weights that all of a persistent tensor stores, of which a rank may hold
    /// a part: the number of elements of the tensor, unless they are packed ([`Self::mark_packed`]).
    pub fn weight_elements(&self, parameter: ValueId) -> usize {
        let elements = || self.window(parameter).whole_dims().iter().product();
        self.packed.get(&parameter).copied().unwrap_or_else(elements)
    }

    /// Adds the path of a layer that can have an adapter.
    pub(crate) fn declare_linear(&mut self, layer: &str) {
        self.linear_layers.push(layer.to_owned());
    }

    /// The paths of the layers that can have adapters, in the order in which they were declared.
    pub fn linear_layers(&self) -> &[String] {
        &self.linear_layers
    }

    /// Reports a value under `name` in each step. If another value is already reported under this name, a number is
    /// appended to `name`.
    pub fn watch(&mut self, name: &str, id: ValueId) {
        let free = self.free_name(name, |graph, wanted| graph.watched.iter().any(|(taken, _)| taken == wanted));
        self.watched.push((free, id));
    }

    /// Returns `name` if it is unused. Otherwise, returns `name` followed by the lowest number from 2 on that gives an
    /// unused name.
    fn free_name(&self, name: &str, is_taken: impl Fn(&Self, &str) -> bool) -> String {
        let numbered = (2..).map(|number| format!("{name}.{number}"));
        let free = std::iter::once(name.to_owned()).chain(numbered).find(|wanted| !is_taken(self, wanted));
        free.expect("there are more numbers than names")
    }

    /// The values that each step reports, with their names, in the order in which they were recorded.
    pub fn watched(&self) -> &[(String, ValueId)] {
        &self.watched
    }

    /// Adds a scalar that is reported as a part of the loss.
    pub fn report_loss(&mut self, reported: ReportedLoss) {
        self.loss_parts.push(reported);
    }

    /// Returns the scalars that are reported as `part` of `loss`, in the order in which they were recorded. Scalars
    /// that are not summands of this loss are left out.
    pub fn parts_of_loss(&self, loss: ValueId, part: LossPart) -> Vec<ValueId> {
        let mut made_of = HashSet::from([loss]);
        for node in self.nodes.iter().rev().filter(|_| !self.loss_parts.is_empty()) {
            if node.outputs.iter().any(|output| made_of.contains(output)) {
                made_of.extend(&node.inputs);
            }
        }
        let reported = self.loss_parts.iter().filter(|reported| reported.part == part);
        reported.filter(|reported| made_of.contains(&reported.depends_on)).map(|reported| reported.scalar).collect()
    }

    /// The layer to which new nodes belong.
    pub fn layer(&self) -> Arc<str> {
        self.layers.last().cloned().unwrap_or_else(|| Arc::from(""))
    }

    /// Begins a layer. New nodes belong to it until the matching call of [`Self::leave_layer`].
    pub fn enter_layer(&mut self, name: Arc<str>) {
        // Nodes of a layer without a name belong to the enclosing layer.
        let name = if name.is_empty() { self.layer() } else { name };
        self.layers.push(name);
    }

    /// Ends the innermost layer.
    pub fn leave_layer(&mut self) {
        self.layers.pop();
    }

    /// Sets the phase of the nodes that are recorded from now on; initially the forward.
    pub fn set_phase(&mut self, phase: Phase) {
        self.phase = Some(phase);
    }

    /// Sets the place of the nodes that are recorded from now on; initially the first stage.
    pub fn set_place(&mut self, place: Place) {
        self.place = place;
    }

    /// The place of new nodes.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Moves a node to another place.
    pub fn reassign_place(&mut self, id: NodeId, place: Place) {
        self.nodes[id.index()].place = place;
    }

    /// Returns the place of the node that produces a value's bytes, or `None` if no node produces them.
    pub fn place_of(&self, id: ValueId) -> Option<Place> {
        self.producer(id).map(|node| node.place)
    }

    /// Returns the node of which a value is an output, which may be a view, or `None` if it is no node's output.
    pub(crate) fn maker(&self, id: ValueId) -> Option<NodeId> {
        match self.value(id).source {
            Source::Node { node, .. } => Some(node),
            _ => None,
        }
    }

    /// Returns the node that produces a value's bytes, or `None` if no node produces them.
    pub fn producer(&self, id: ValueId) -> Option<&Node> {
        self.producer_id(id).map(|node| self.node(node))
    }

    /// Returns the id of the node that produces a value's bytes, or `None` if no node produces them.
    pub fn producer_id(&self, id: ValueId) -> Option<NodeId> {
        self.maker(self.value(id).root)
    }

    /// Moves a node into another phase.
    pub fn reassign_phase(&mut self, id: NodeId, phase: Phase) {
        self.nodes[id.index()].phase = phase;
    }

    /// Checks that new values are neither empty nor too large, and that the graph has room for them within
    /// [`MAX_VALUES`].
    fn check_sizes(&self, op: &str, specs: &[Spec]) -> Result<()> {
        if self.values.len() > MAX_VALUES {
            let why = format!("the step has more than {MAX_VALUES} tensors");
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
        self.values.push(Value { spec, source, root: id, layout, row_count: None });
        id
    }

    fn push_view(&mut self, root: ValueId, spec: Spec, layout: Layout) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        let source = self.value(root).source.clone();
        self.values.push(Value { spec, source, root, layout, row_count: None });
        id
    }
}
