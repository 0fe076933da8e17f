//! Walks the forward of a graph, action by action, and calls what is recorded of it back.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use gapless_alloc::Buffer;
use gapless_engine::graph::{Graph, NodeId, Phase, Place, Source, ValueId};
use gapless_engine::recompute::block_of;
use gapless_parallel::{Action, Kind, StageId};

use super::EagerError;
use super::autograd::{Autograd, Frame, Mode, Var};
use super::tape::{BF16, F32, INT64, Tensor};

/// What of a step is a matter of how its program is written.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Bytes of a parameter's element.
    pub parameter: u64,
    /// Whether products are cast to bfloat16.
    pub is_amp: bool,
    /// Whether sums of gradients and masters are there before the step.
    pub is_mixed: bool,
    /// Whether it is written as in transformers, rather than as in nanoGPT: the loss is of logits in float32, and attention is a function
    /// of its own.
    pub is_transformers: bool,
    pub micro_batches: usize,
    pub stages: usize,
    /// Ranks that share the optimizer's states.
    pub data_ranks: u64,
}

/// In order, so that what goes together goes in the same order each time.
type Environment = BTreeMap<ValueId, Var>;

/// A rank's step under way.
pub struct Run<'g> {
    graph: &'g Graph,
    style: Style,
    autograd: Autograd,
    /// The nodes of each stage of this rank.
    stages: HashMap<StageId, Stage>,
    parameters: HashMap<ValueId, Var>,
    /// In the order of the model.
    trained: Vec<ValueId>,
    /// What lives through the step beside them.
    persistent: Vec<Tensor>,
    /// Autocast's cache.
    casts: RefCell<Environment>,
    /// What swiglu takes the silu of, which is done as soon as it is there.
    gates: HashSet<ValueId>,
    blocks: Vec<String>,
    checkpointed: HashSet<String>,
    in_flight: HashMap<Action, InFlight>,
    /// What the last backward leaves until the next action has received.
    left: Vec<Tensor>,
}

#[derive(Debug, Default)]
struct Stage {
    nodes: Vec<NodeId>,
    /// The last node that reads a value, by position.
    last: BTreeMap<ValueId, usize>,
    /// What other stages read of it; the loss of the last one.
    outputs: Vec<ValueId>,
}

/// A micro-batch between its forward and its backward.
struct InFlight {
    inputs: Vec<Var>,
    outputs: Vec<Var>,
}

/// Puts products of the same tensor behind each other, with the views of each: queries, keys and values are made before any of them is
/// rotated.
fn put_products_together(graph: &Graph, nodes: &mut [NodeId]) {
    let read = |id: NodeId| Some(graph.node(id)).filter(|node| node.op.name() == "linear").map(|node| node.inputs[0]);
    let is_view = |id: &&NodeId| matches!(graph.node(**id).op.name(), "reshape" | "transpose");
    for position in 0..nodes.len() {
        let Some(input) = read(nodes[position]) else { continue };
        let views = |from: usize, nodes: &[NodeId]| from + 1 + nodes[from + 1..].iter().take_while(is_view).count();
        let end = views(position, nodes);
        if let Some(next) = (end..nodes.len()).take(32).find(|&next| read(nodes[next]) == Some(input)) {
            let moved = views(next, nodes);
            nodes[end..moved].rotate_right(moved - next);
        }
    }
}

/// The values of a stage that others read, in order; its last one if they read none.
fn outputs(graph: &Graph, place: StageId, stage: &Stage) -> Vec<ValueId> {
    let made: HashSet<ValueId> = stage.nodes.iter().flat_map(|&id| &graph.node(id).outputs).copied().collect();
    let elsewhere =
        graph.nodes().iter().filter(|node| node.phase == Phase::Forward && node.place != Place::Stage(place));
    let mut read: Vec<ValueId> =
        elsewhere.flat_map(|node| &node.inputs).filter(|id| made.contains(id)).copied().collect();
    read.sort_unstable();
    read.dedup();
    match stage.nodes.last() {
        Some(&last) if read.is_empty() => vec![graph.node(last).outputs[0]],
        _ => read,
    }
}

impl<'g> Run<'g> {
    /// Allocates what is there before a step.
    pub fn new(graph: &'g Graph, style: Style, row: &[Action]) -> Self {
        let mut stages: HashMap<StageId, Stage> = HashMap::new();
        let here: HashSet<StageId> = row.iter().map(|action| action.stage).collect();
        let mut blocks: Vec<String> = Vec::new();
        for id in graph.node_ids() {
            let node = graph.node(id);
            let Place::Stage(place) = node.place else { continue };
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
            if style.is_transformers {
                put_products_together(graph, &mut stage.nodes);
            }
            let inputs =
                |(position, &id): (usize, &NodeId)| graph.node(id).inputs.iter().map(move |&id| (id, position));
            stage.last = stage.nodes.iter().enumerate().flat_map(inputs).collect();
            stage.outputs = outputs(graph, place, stage);
        }
        let mut run = Self {
            graph,
            style,
            autograd: Autograd::default(),
            stages,
            parameters: HashMap::new(),
            trained: Vec::new(),
            persistent: Vec::new(),
            casts: RefCell::default(),
            gates: graph.nodes().iter().filter(|node| node.op.name() == "swiglu").map(|node| node.inputs[0]).collect(),
            blocks,
            checkpointed: HashSet::new(),
            in_flight: HashMap::new(),
            left: Vec::new(),
        };
        run.allocate_persistent();
        run
    }

    /// Blocks of the model, in order.
    pub fn blocks(&self) -> &[String] {
        &self.blocks
    }

    /// Lets blocks keep their inputs alone.
    pub fn checkpoint(&mut self, blocks: Vec<String>) {
        self.checkpointed = blocks.into_iter().collect();
    }

    /// Parameters, tables of rotary positions, and the optimizer's states.
    fn allocate_persistent(&mut self) {
        let Self { graph, style, .. } = *self;
        let read: HashSet<ValueId> = self.stages.values().flat_map(|stage| stage.last.keys().copied()).collect();
        for (id, _) in graph.persistent().filter(|(id, _)| read.contains(id)) {
            let spec = &graph.value(id).spec;
            let (elements, width) = (spec.elements() as u64, spec.dims().last().copied().unwrap_or(1) as u64);
            let data = self.autograd.tape.new_tensor(elements, width, style.parameter);
            let var = match graph.is_frozen(id) {
                true => Var { data, edge: None },
                false => {
                    self.trained.push(id);
                    self.autograd.leaf(data, !style.is_mixed)
                }
            };
            self.parameters.insert(id, var);
        }
        let tape = &self.autograd.tape;
        let node_ids = self.stages.values().flat_map(|stage| &stage.nodes);
        if let Some(rope) = node_ids.map(|&id| graph.node(id)).find(|node| node.op.name() == "rope") {
            let dims = graph.value(rope.inputs[0]).spec.dims();
            let elements = (dims.iter().product::<usize>() / dims[0] / dims[dims.len() - 2]) as u64;
            let dtype = if style.is_amp { F32 } else { style.parameter };
            self.persistent.extend([(); 2].map(|()| tape.new_tensor(elements, 1, dtype)));
        }
        for id in &self.trained {
            let elements = graph.value(*id).spec.elements() as u64;
            let share = elements.div_ceil(style.data_ranks);
            let state = if style.is_mixed { F32 } else { style.parameter };
            if style.is_mixed {
                self.persistent.push(tape.new_tensor(elements, 1, F32));
                self.persistent.push(tape.new_tensor(share, 1, F32));
            }
            self.persistent.extend([share, share, 1].map(|count| tape.new_tensor(count, 1, state)));
        }
    }

    /// Does an action of the schedule.
    pub fn act(&mut self, action: Action) -> Result<(), EagerError> {
        match action.kind {
            Kind::Forward => self.forward(action),
            _ => {
                self.backward(action);
                Ok(())
            }
        }
    }

    fn forward(&mut self, action: Action) -> Result<(), EagerError> {
        let graph = self.graph;
        let is_last = action.stage.0 as usize + 1 == self.style.stages;
        let Some(stage) = self.stages.get(&action.stage) else { return Ok(()) };
        let made: HashSet<ValueId> = stage.nodes.iter().flat_map(|&id| &graph.node(id).outputs).copied().collect();
        let (mut environment, mut inputs) = (Environment::new(), Vec::new());
        for &id in stage.last.keys().filter(|id| !made.contains(id)) {
            let value = graph.value(id);
            let elements = value.spec.elements() as u64;
            let var = match value.source {
                Source::Input { .. } => Var { data: self.autograd.tape.new_tensor(elements, 1, INT64), edge: None },
                // Received from another stage.
                Source::Node { .. } => {
                    let width = value.spec.dims().last().copied().unwrap_or(1) as u64;
                    let data = self.autograd.tape.new_tensor(elements, width, self.style.parameter);
                    inputs.push(self.autograd.leaf(data, true));
                    inputs[inputs.len() - 1].clone()
                }
                _ => continue,
            };
            environment.insert(id, var);
        }
        self.left.clear();
        let mut outputs = self.run_stage(stage, environment)?;
        if is_last && self.style.micro_batches > 1 {
            outputs = outputs.iter().map(|loss| self.autograd.scale(loss)).collect();
        }
        self.casts.take();
        self.in_flight.insert(Action { kind: Kind::Backward, ..action }, InFlight { inputs, outputs });
        Ok(())
    }

    fn backward(&mut self, action: Action) {
        let Some(InFlight { inputs, outputs }) = self.in_flight.remove(&action) else { return };
        let tape = &self.autograd.tape;
        let gradients: Vec<Tensor> = outputs.iter().map(|output| tape.like(&output.data)).collect();
        self.left.clear();
        let stage = &self.stages[&action.stage];
        let (edges, data): (Vec<_>, Vec<Tensor>) = outputs.into_iter().map(|Var { data, edge }| (edge, data)).unzip();
        let roots = edges.into_iter().zip(&gradients).filter_map(|(edge, gradient)| Some((edge?, gradient.clone())));
        self.autograd.backward(roots.collect(), &|frame| self.recall(stage, frame));
        self.left.extend(gradients);
        for input in inputs {
            let of_input = input.leaf().and_then(|leaf| leaf.grad.take());
            self.left.extend(of_input);
            self.left.push(input.data);
        }
        self.left.extend(data);
        if self.style.stages == 1 {
            self.left.clear();
        }
    }

    /// Norms of all gradients, and nothing more: a fused update works in place. Gradients go with the step.
    pub fn update(&mut self) {
        self.left.clear();
        let tape = &self.autograd.tape;
        let norms: Vec<Tensor> = self.trained.iter().map(|_| tape.bytes(F32)).collect();
        let _stacked = tape.bytes(F32 * norms.len() as u64);
        let _norm = tape.bytes(F32);
        for id in &self.trained {
            self.parameters[id].leaf().map(|leaf| leaf.grad.take());
        }
    }

    /// The table.
    pub fn into_buffers(self) -> Vec<Buffer> {
        self.autograd.tape.clone().into_buffers()
    }

    /// Runs a stage's forward; what other stages read of it, or the loss.
    fn run_stage(&self, stage: &Stage, mut environment: Environment) -> Result<Vec<Var>, EagerError> {
        let block = |position: usize| block_of(&self.graph.node(stage.nodes[position]).layer);
        let mut start = 0;
        // What the loop over blocks began with is a variable of its own.
        let mut first: Option<Vec<(ValueId, Var)>> = None;
        while start < stage.nodes.len() {
            let name = block(start);
            let end = (start + 1..stage.nodes.len()).find(|&at| block(at) != name).unwrap_or(stage.nodes.len());
            let nodes = start..end;
            let inputs = self.inputs(stage, nodes.clone(), &environment);
            first = name.map(|_| first.unwrap_or_else(|| inputs.clone()));
            let is_checkpointed = name.is_some_and(|name| self.checkpointed.contains(name));
            let frame = is_checkpointed.then(|| Frame::new(nodes.clone(), inputs.clone()));
            if let Some(frame) = &frame {
                self.autograd.set_mode(Mode::Forget(frame.clone()));
            }
            // A caller holds what it calls a block with until that returns; between blocks nobody does.
            let mut inside: Environment = inputs.into_iter().collect();
            if name.is_none() {
                environment
                    .retain(|id, _| !inside.contains_key(id) || stage.last[id] >= end || stage.outputs.contains(id));
            }
            self.run_nodes(stage, nodes, &mut inside)?;
            self.autograd.set_mode(Mode::Keep);
            environment
                .retain(|id, _| stage.last.get(id).is_some_and(|&last| last >= end) || stage.outputs.contains(id));
            environment.extend(inside);
            start = end;
        }
        Ok(stage.outputs.iter().filter_map(|id| environment.remove(id)).collect())
    }

    /// What some nodes read of those before.
    fn inputs(&self, stage: &Stage, nodes: Range<usize>, environment: &Environment) -> Vec<(ValueId, Var)> {
        let read = stage.nodes[nodes].iter().flat_map(|&id| &self.graph.node(id).inputs);
        let mut ids: Vec<ValueId> = read.copied().collect();
        ids.sort_unstable();
        ids.dedup();
        ids.into_iter().filter_map(|id| environment.get(&id).map(|var| (id, var.clone()))).collect()
    }

    /// Runs a checkpoint's forward again.
    fn recall(&self, stage: &Stage, frame: &Frame) {
        let mut environment = frame.inputs.iter().cloned().collect();
        // It has run before.
        let _ = self.run_nodes(stage, frame.nodes.clone(), &mut environment);
        self.casts.take();
    }

    fn run_nodes(&self, stage: &Stage, nodes: Range<usize>, values: &mut Environment) -> Result<(), EagerError> {
        // Local variables of a function around attention.
        let mut locals: Vec<Var> = Vec::new();
        let mut scope = String::new();
        for position in nodes.clone() {
            let node = self.graph.node(stage.nodes[position]);
            if !node.layer.starts_with(&scope) {
                locals.clear();
            }
            self.apply(stage.nodes[position], values)?;
            if node.op.name() == "attention" {
                let block = block_of(&node.layer).filter(|_| !self.style.is_transformers);
                scope = block.unwrap_or(&node.layer).to_owned();
                let read = node.inputs.iter().chain(&node.outputs);
                locals.extend(read.filter_map(|id| values.get(id)).cloned());
            }
            values.retain(|id, _| stage.last.get(id).is_none_or(|&last| last > position) || stage.outputs.contains(id));
        }
        Ok(())
    }

    /// Calls the rule of a node.
    fn apply(&self, id: NodeId, values: &mut Environment) -> Result<(), EagerError> {
        let (node, autograd) = (self.graph.node(id), &self.autograd);
        let value = |index: usize| {
            let input = *node.inputs.get(index)?;
            values.get(&input).or_else(|| self.parameters.get(&input)).cloned()
        };
        let unknown = || EagerError::Op { op: node.op.name().to_owned(), layer: node.layer.to_string() };
        let input = |index: usize| value(index).ok_or_else(unknown);
        let output = node.outputs[0];
        let spec = &self.graph.value(output).spec;
        let width = spec.dims().last().copied().unwrap_or(1) as u64;
        let made = match node.op.name() {
            "embedding" => autograd.embedding(&input(0)?, &input(1)?.data),
            // The rows of a table of positions.
            "narrow" | "broadcast_as" if self.parameters.contains_key(&node.inputs[0]) => {
                let rows = self.graph.value(node.inputs[0]).spec.dims()[0].min(spec.elements() / width as usize);
                let positions = autograd.tape.new_tensor(rows as u64, 1, INT64);
                autograd.embedding(&input(0)?, &positions)
            }
            "narrow" => return self.split(id, &input(0)?, values),
            "broadcast_as" | "contiguous" | "scaled_sum" => input(0)?,
            "reshape" => autograd.view(&input(0)?, width),
            "transpose" => autograd.transpose(&input(0)?),
            "linear" => {
                self.linear(node.inputs[1], &input(0)?, &input(1)?, value(2).map(|bias| (node.inputs[2], bias)))
            }
            "rope" => autograd.transpose(&autograd.rope(&autograd.transpose(&input(0)?))),
            "attention" => {
                let head = self.graph.value(node.inputs[0]).spec.dims().last().copied().unwrap_or(1) as u64;
                let [q, k, v] = [input(0)?, input(1)?, input(2)?];
                // Ours is [batch, tokens, heads, size].
                autograd.transpose(&autograd.attention([&q, &k, &v], q.data.elements / head))
            }
            "add" => autograd.add(&input(0)?, &input(1)?),
            "affine" => autograd.scale(&input(0)?),
            "dropout" => autograd.dropout(&input(0)?),
            "gelu" | "gelu_erf" | "silu" | "relu" => autograd.activation(&input(0)?),
            "mul" => autograd.mul(&input(0)?, &input(1)?),
            "swiglu" => autograd.mul(&input(0)?, &input(1)?),
            "rms_norm" => autograd.rms_norm(&input(0)?, &input(1)?),
            "layer_norm" => autograd.layer_norm(&input(0)?, &input(1)?, &input(2)?),
            "linear_cross_entropy" => {
                let (x, weight, targets) = (input(0)?, input(1)?, input(2)?.data);
                values.remove(&node.inputs[2]);
                let mut logits = self.linear(node.inputs[1], &x, &weight, None);
                if self.style.is_transformers {
                    logits = autograd.cast(&logits, F32);
                }
                autograd.cross_entropy(&logits, targets, self.style.is_amp)
            }
            _ => return Err(unknown()),
        };
        let made = if self.gates.contains(&output) { autograd.activation(&made) } else { made };
        values.insert(output, made);
        Ok(())
    }

    /// A product; under autocast of casts of what it reads, of which parameters' are kept until the forward's end.
    fn linear(&self, id: ValueId, x: &Var, weight: &Var, bias: Option<(ValueId, Var)>) -> Var {
        let Self { autograd, style, .. } = self;
        if !style.is_amp {
            return autograd.linear(x, weight, bias.as_ref().map(|(_, bias)| bias));
        }
        let kept = |id: ValueId, parameter: &Var| {
            let known = self.casts.borrow().get(&id).cloned();
            known.unwrap_or_else(|| {
                let cast = autograd.cast(parameter, BF16);
                self.casts.borrow_mut().insert(id, cast.clone());
                cast
            })
        };
        // C++ casts a call's arguments from the last to the first.
        let bias = bias.map(|(id, bias)| kept(id, &bias));
        let weight = kept(id, weight);
        let x = autograd.cast(x, BF16);
        autograd.linear(&x, &weight, bias.as_ref())
    }

    /// All parts of a tensor that is narrowed into parts that lie side by side.
    fn split(&self, id: NodeId, whole: &Var, values: &mut Environment) -> Result<(), EagerError> {
        let node = self.graph.node(id);
        if values.contains_key(&node.outputs[0]) {
            return Ok(());
        }
        let is_part = |other: &&NodeId| {
            let other = self.graph.node(**other);
            other.op.name() == "narrow" && other.inputs[0] == node.inputs[0] && other.phase == Phase::Forward
        };
        let ids: Vec<NodeId> = self.graph.node_ids().collect();
        let parts: Vec<NodeId> = ids.iter().filter(is_part).copied().collect();
        for (part, var) in parts.iter().zip(self.autograd.split(whole, parts.len() as u64)) {
            values.insert(self.graph.node(*part).outputs[0], var);
        }
        Ok(())
    }
}
