//! The training step as data: single-assignment values of known shape, made by nodes in order.
//!
//! In: calls of the builder ([`Tensor`]), and of autodiff. Out: a [`Graph`] whose nodes stand in an order
//! in which they can run. Never: a buffer, an address, or a number.
//!
//! View operations (`reshape`, `transpose`, `narrow`, `broadcast_as`) make no data: their value shares the storage of
//! another one, its *root*, under a layout. A node whose operation cannot read strides gets a `contiguous` copy put in
//! front of it, so that everything after the graph can rely on what an operation declared.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Layout, Shape};
use gapless_kernels::{LossTerms, Spec};
use gapless_parallel::StageId;

use crate::error::{Error, Result};
use crate::nn::{Init, Initializer};
use crate::op::{Op, Rows};
use crate::ops::Contiguous;
use crate::optim::Optimizer;
use crate::reference::layout_indices;

/// Tensors of a graph at most: a thousand layers have some ten thousands.
const MOST_VALUES: usize = 1 << 20;

/// The types that operations compute in, each in one of them throughout: sums and statistics that need it are f32 in any
/// case.
pub const FLOATS: [DType; 2] = [DType::F32, DType::BF16];

/// Index of a value in its graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(u32);

/// Index of a node in its graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl ValueId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a value comes from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Output `output` of a node.
    Node {
        /// The node.
        node: NodeId,
        /// Which of its outputs.
        output: usize,
    },
    /// A tensor that outlives the step: a parameter, or a state of the optimizer.
    Persistent {
        /// Full name.
        name: String,
        /// What it holds before the first step.
        fill: Initializer,
    },
    /// Written by the host before each micro-batch.
    Input {
        /// Name by which the host writes it.
        name: String,
    },
    /// What the runs of some programs hand on to each other: keys or values of past tokens. Holds anything before the first.
    Cache {
        /// Name by which programs share it.
        name: String,
    },
    /// The same number everywhere.
    Constant(f64),
    /// Numbers that the model's source gives, in row-major order.
    Data {
        /// A name that says which numbers these are.
        name: String,
        /// The numbers.
        elements: Arc<[f64]>,
    },
}

/// A tensor that does not exist yet.
#[derive(Debug, Clone)]
pub struct Value {
    /// Shape and element type.
    pub spec: Spec,
    /// Where it comes from.
    pub source: Source,
    /// The value that owns the bytes; itself unless this is a view.
    pub root: ValueId,
    /// Where in the root's bytes the elements lie.
    pub layout: Layout,
    /// Of a root whose rows are counted while the step runs: by what.
    pub rows: Option<RowCount>,
}

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
    },
}

/// Rows that are counted while the step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowCount {
    /// The value whose last element is their number.
    pub starts: ValueId,
    /// Their number if all ranks have the same.
    pub balanced: usize,
}

/// Which part of the step a node belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// The forward pass, once per micro-batch.
    Forward,
    /// Gradients that earlier layers wait for (I), once per micro-batch.
    BackwardInput,
    /// Gradients of weights, which nobody waits for before the update (W), once per micro-batch.
    BackwardWeight,
    /// Once per step, after the last micro-batch.
    Update,
}

/// Who runs a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The rank that has the stage.
    Stage(StageId),
    /// Every rank for itself. Only in the update.
    Everywhere,
}

impl Default for Place {
    fn default() -> Self {
        Self::Stage(StageId(0))
    }
}

/// One operation applied to values.
#[derive(Debug, Clone)]
pub struct Node {
    /// What is computed.
    pub op: Arc<dyn Op>,
    /// From what.
    pub inputs: Vec<ValueId>,
    /// Into what.
    pub outputs: Vec<ValueId>,
    /// The layer it stands in, e.g. `h.3.attn`; empty outside of layers.
    pub layer: Arc<str>,
    /// Which part of the step.
    pub phase: Phase,
    /// Who runs it.
    pub place: Place,
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

    /// Declares a tensor that outlives the step, or finds it if it is there already.
    ///
    /// # Errors
    /// [`Error::ParameterShape`] when it was declared with another shape, [`Error::TypeClash`] with another type.
    pub fn add_persistent(&mut self, name: &str, spec: Spec, init: Init) -> Result<ValueId> {
        self.check_sizes(name, std::slice::from_ref(&spec))?;
        if let Some(&id) = self.names.get(name) {
            let made = &self.value(id).spec;
            if made.shape != spec.shape {
                let (asked, made) = (spec.shape, made.shape.clone());
                return Err(Error::ParameterShape { name: name.into(), asked, made });
            }
            return if made.dtype == spec.dtype { Ok(id) } else { Err(Error::TypeClash { name: name.into() }) };
        }
        let fill = Initializer { init, name: name.into(), first: 0, given: None };
        let id = self.push_value(spec, Source::Persistent { name: name.into(), fill });
        self.names.insert(name.into(), id);
        Ok(id)
    }

    /// Declares this rank's share of the rows of a tensor that as many ranks share as divide them.
    ///
    /// # Errors
    /// As [`Self::add_persistent`].
    pub fn add_share(&mut self, name: &str, whole: Spec, init: Init, (ranks, rank): (usize, usize)) -> Result<ValueId> {
        let mut dims = whole.dims().to_vec();
        dims[0] /= ranks;
        let id = self.add_persistent(name, whole.in_shape(dims), init)?;
        let elements = self.value(id).spec.elements();
        if let Source::Persistent { fill, .. } = &mut self.values[id.index()].source {
            fill.first = rank * elements;
        }
        self.shares.insert(id, whole.shape);
        Ok(id)
    }

    /// Lets a persistent tensor begin as the elements of a parameter from its `skip`th on, which may be of another type.
    pub fn fill_as(&mut self, id: ValueId, parameter: ValueId, skip: usize) {
        let Source::Persistent { fill, .. } = &self.value(parameter).source else { return };
        let like = Initializer { first: fill.first + skip, ..fill.clone() };
        if let Source::Persistent { fill, .. } = &mut self.values[id.index()].source {
            *fill = like;
        }
    }

    /// The shape of the whole tensor that a persistent one is this expert rank's share of.
    pub fn shared(&self, id: ValueId) -> Option<&Shape> {
        self.shares.get(&id)
    }

    /// Declares a tensor that the host writes, or finds it if it is there already.
    ///
    /// # Errors
    /// [`Error::TypeClash`] when it was declared with another shape or type.
    pub fn add_input(&mut self, name: &str, spec: Spec) -> Result<ValueId> {
        self.check_sizes(name, std::slice::from_ref(&spec))?;
        if let Some(&id) = self.names.get(name) {
            let same = self.value(id).spec == spec && matches!(self.value(id).source, Source::Input { .. });
            return if same { Ok(id) } else { Err(Error::TypeClash { name: name.into() }) };
        }
        let id = self.push_value(spec, Source::Input { name: name.into() });
        self.names.insert(name.into(), id);
        Ok(id)
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

    /// Declares a tensor of past tokens, named after the layer that nodes are put in.
    ///
    /// # Errors
    /// [`Error::Shape`] when an extent is 0, or it has more bytes than there can be.
    pub fn add_cache(&mut self, what: &str, spec: Spec) -> Result<ValueId> {
        self.check_sizes(what, std::slice::from_ref(&spec))?;
        let name = self.free_name(&format!("{}/{what}", self.layer()), |graph, name| graph.names.contains_key(name));
        let id = self.push_value(spec, Source::Cache { name: name.clone() });
        self.names.insert(name, id);
        Ok(id)
    }

    /// A tensor of one number, stored as one element that every shape repeats.
    pub fn add_constant(&mut self, number: f64, spec: Spec) -> ValueId {
        let key = (number.to_bits(), spec.dtype);
        let stored = match self.constants.get(&key) {
            Some(&id) => id,
            None => self.push_value(spec.in_shape(()), Source::Constant(number)),
        };
        self.constants.insert(key, stored);
        if spec.shape.rank() == 0 {
            return stored;
        }
        let layout = Layout::new(spec.shape.clone(), vec![0; spec.shape.rank()], 0);
        self.push_view(stored, spec, layout)
    }

    /// A tensor of numbers that the model's source gives; equal ones are stored once.
    pub fn add_data(&mut self, elements: Vec<f64>, spec: Spec) -> ValueId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{:?}", (spec.dtype, spec.dims())).as_bytes());
        for x in &elements {
            hasher.update(&x.to_le_bytes());
        }
        let name = format!("data {}", &hasher.finalize().to_hex()[..16]);
        if let Some(&id) = self.names.get(&name) {
            return id;
        }
        let id = self.push_value(spec, Source::Data { name: name.clone(), elements: elements.into() });
        self.names.insert(name, id);
        id
    }

    /// Applies `op`, with a copy in front of inputs whose strides it cannot read. Returns one value per output.
    ///
    /// # Errors
    /// [`Error::Shape`] with the operation's own words, the layer and the shapes.
    pub fn apply(&mut self, op: Arc<dyn Op>, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        let out_specs = self.infer(&*op, inputs)?;
        if let Some(layout) = op.view(&self.value(inputs[0]).layout) {
            let [spec] = <[Spec; 1]>::try_from(out_specs).expect("a view has one output");
            let root = self.value(inputs[0]).root;
            let id = self.push_view(root, spec, layout);
            self.push_node(op, inputs.to_vec(), vec![id]);
            return Ok(vec![id]);
        }
        let mut inputs = inputs.to_vec();
        for (index, id) in inputs.iter_mut().enumerate() {
            let layout = &self.value(*id).layout;
            if !layout.is_contiguous() && !op.reads_strides(index, layout) {
                *id = self.apply(Arc::new(Contiguous), &[*id])?[0];
            }
        }
        let outputs: Vec<ValueId> = out_specs
            .into_iter()
            .enumerate()
            .map(|(output, spec)| {
                let node = NodeId(self.nodes.len() as u32);
                self.push_value(spec, Source::Node { node, output })
            })
            .collect();
        for &output in &outputs {
            self.values[output.index()].rows = self.rows_of(&*op, &inputs, output);
        }
        self.push_node(op, inputs, outputs.clone());
        Ok(outputs)
    }

    /// What counts the rows of an output, if anything does.
    fn rows_of(&self, op: &dyn Op, inputs: &[ValueId], output: ValueId) -> Option<RowCount> {
        let dims = self.value(output).spec.dims();
        match op.rows() {
            Rows::Counted { starts, balanced } => Some(RowCount { starts: inputs[starts], balanced }),
            Rows::Inherited => inputs.iter().find_map(|&input| {
                let input = self.value(input);
                (input.spec.dims() == dims).then_some(self.value(input.root).rows).flatten()
            }),
            Rows::Unaware | Rows::Fixed => None,
        }
    }

    /// The shape rule of `op`.
    fn infer(&self, op: &dyn Op, inputs: &[ValueId]) -> Result<Vec<Spec>> {
        let specs = self.specs(inputs);
        let out_specs = op.infer(&specs).map_err(|what| self.refused(op, inputs, what))?;
        self.check_sizes(op.name(), &out_specs)?;
        Ok(out_specs)
    }

    fn refused(&self, op: &dyn Op, inputs: &[ValueId], what: impl Into<String>) -> Error {
        let shapes = inputs.iter().map(|&id| self.value(id).spec.shape.clone()).collect();
        Error::Shape { op: op.name().into(), layer: self.layer().to_string(), what: what.into(), shapes }
    }

    /// Lets a node compute more: `op` takes the node's inputs as they lie, and makes its outputs and `new` others, which are
    /// returned.
    ///
    /// # Errors
    /// [`Error::Shape`] when it does not.
    pub fn extend_node(&mut self, id: NodeId, op: Arc<dyn Op>, new: usize) -> Result<Vec<ValueId>> {
        let Node { inputs, outputs, .. } = self.node(id).clone();
        let out_specs = self.infer(&*op, &inputs)?;
        let kept = outputs.iter().map(|&output| &self.value(output).spec);
        if out_specs.len() != outputs.len() + new || !kept.eq(&out_specs[..outputs.len()]) {
            let what = format!("its outputs must be those of {} and {new} more", self.node(id).op.name());
            return Err(self.refused(&*op, &inputs, what));
        }
        let readable = |(index, &input): (usize, &ValueId)| {
            let layout = &self.value(input).layout;
            layout.is_contiguous() || op.reads_strides(index, layout)
        };
        if !inputs.iter().enumerate().all(readable) {
            let what = format!("it must read the strides that {} reads", self.node(id).op.name());
            return Err(self.refused(&*op, &inputs, what));
        }
        let first = outputs.len();
        let new = out_specs.into_iter().enumerate().skip(first);
        let new: Vec<ValueId> =
            new.map(|(output, spec)| self.push_value(spec, Source::Node { node: id, output })).collect();
        let node = &mut self.nodes[id.index()];
        node.op = op;
        node.outputs.extend(&new);
        Ok(new)
    }

    /// Lets a node make a value, which nobody reads so far, in another type of float; false if it can't.
    ///
    /// # Errors
    /// [`Error::Shape`] when what the operation says that it makes then is anything else.
    pub fn make_in(&mut self, id: ValueId, dtype: DType) -> Result<bool> {
        let Source::Node { node, output } = self.value(id).source else { return Ok(false) };
        let Node { op, inputs, outputs, .. } = self.node(node);
        let Some(op) = op.with_output_dtype(output, dtype).filter(|_| outputs[output] == id) else { return Ok(false) };
        let mut expected = self.specs(outputs);
        expected[output].dtype = dtype;
        if self.infer(&*op, inputs)? != expected {
            return Err(self.refused(&*op, inputs, format!("only the type of output {output} may change")));
        }
        self.nodes[node.index()].op = op;
        self.values[id.index()].spec.dtype = dtype;
        Ok(true)
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
            let why = format!("a step of more than {MOST_VALUES} tensors");
            return Err(Error::Config { what: "model", why, remedy: "fewer layers" });
        }
        for spec in specs {
            let bytes = spec.dims().iter().try_fold(spec.dtype.size_in_bytes(), |bytes, &dim| bytes.checked_mul(dim));
            let what = match bytes {
                Some(1..=0x7fff_ffff_ffff_ffff) => continue,
                Some(0) => "an extent is 0".to_owned(),
                _ => "more than 2^63 bytes".to_owned(),
            };
            let (layer, shapes) = (self.layer().to_string(), vec![spec.shape.clone()]);
            return Err(Error::Shape { op: op.into(), layer, what, shapes });
        }
        Ok(())
    }

    fn push_node(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, outputs: Vec<ValueId>) {
        if let [output] = outputs[..]
            && self.is_view(output)
        {
            let node = NodeId(self.nodes.len() as u32);
            self.values[output.index()].source = Source::Node { node, output: 0 };
        }
        let (layer, phase) = (self.layer(), self.phase.unwrap_or(Phase::Forward));
        self.nodes.push(Node { op, inputs, outputs, layer, phase, place: self.place });
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
