//! Runs the actions of a rank: forwards, by walking through the graph, and backwards, as they were recorded.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;

use gapless_alloc::Buffer;
use gapless_engine::graph::{DType, Graph, Node, NodeId, Phase, Source, Spec, ValueId};
use gapless_engine::ops::Collective;
use gapless_engine::recompute::block_of;
use gapless_parallel::{Action, Axes, Kind, StageId};

use super::EagerError;
use super::autograd::{Autograd, Checkpoint, Mode, Var};
use super::experts::{ExpertRows, Mixture};
use super::fsdp::{Fsdp, Units};
use super::megatron::Megatron;
use super::stage::{Stage, is_sum, places};
use super::tape::{BF16, F32, INT64, Tape, Tensor};

/// Properties of a step that depend on the framework's program for it.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Bytes per parameter element.
    pub parameter: u64,
    /// Whether autocast casts the operands of products to bfloat16.
    pub is_amp: bool,
    /// Whether sums of gradients and masters are allocated before the step.
    pub is_mixed: bool,
    /// Whether the modelled program is written like transformers' models (true) or like nanoGPT (false). In
    /// transformers' models, the loss is computed from float32 logits, and attention is a separate function.
    pub is_transformers: bool,
    pub micro_batches: usize,
    pub stages: usize,
    /// Number of ranks that share the optimizer's states.
    pub data_ranks: u64,
    /// Number of ranks that share the experts.
    pub expert_ranks: u64,
    /// Number of ranks that share the tensors of a layer.
    pub tensor_ranks: u64,
    /// Properties of a Megatron run; `None` for other programs.
    pub megatron: Option<Megatron>,
    /// Properties of a run with FSDP2; `None` for other programs.
    pub fsdp: Option<Fsdp>,
}

impl Style {
    /// Whether elementwise operations between products are fused.
    fn fuses(&self) -> bool {
        self.megatron.is_some_and(|megatron| !megatron.has_unfused_layers)
            || self.fsdp.is_some_and(|fsdp| fsdp.is_compiled)
    }

    /// Bytes per element of an optimizer state.
    fn state(&self) -> u64 {
        if self.is_mixed || self.fsdp.is_some() { F32 } else { self.parameter }
    }
}

/// The effect of a node in Megatron.
enum Applied {
    /// The node's first output.
    Made(Var),
    /// Megatron computes no such value.
    Nothing,
    /// The rule of PyTorch's operation applies.
    AsElsewhere,
}

/// Values by id. The map is ordered, so values that are freed together are always freed in the same order.
type Environment = BTreeMap<ValueId, Var>;

/// The step of a rank, while it runs.
pub struct Run<'g> {
    graph: &'g Graph,
    style: Style,
    autograd: Autograd,
    /// The nodes of each stage of this rank.
    stages: HashMap<StageId, Stage>,
    parameters: HashMap<ValueId, Var>,
    /// Parameters that exist once per expert of this rank.
    of_experts: HashMap<ValueId, Vec<Var>>,
    /// Trained parameters, in the order of the model.
    trained: Vec<Var>,
    /// Other tensors that live through the step: first the rotary tables.
    persistent: Vec<Tensor>,
    /// Number of rotary tables.
    tables: usize,
    /// Whether the optimizer has its states. It gets them in its first update.
    has_states: bool,
    /// Micro-batches of earlier steps.
    earlier: usize,
    /// The cache of autocast, by parameter and expert.
    casts: RefCell<BTreeMap<(ValueId, usize), Var>>,
    /// Inputs of `swiglu` to which `silu` is applied. This happens as soon as such an input has been computed.
    gates: HashSet<ValueId>,
    /// Mixtures of experts by layer.
    mixtures: BTreeMap<String, Mixture>,
    /// Row counts of experts.
    rows: &'g ExpertRows<'g>,
    micro_batch: Cell<usize>,
    blocks: Vec<String>,
    checkpointed: HashSet<String>,
    /// The units of FSDP2.
    units: Option<Rc<RefCell<Units>>>,
    in_flight: HashMap<Action, InFlight>,
    /// Gradients of the next action's outputs, if they have been received before the action starts.
    received: Vec<Tensor>,
    /// Tensors that the last backward keeps until the next action has received its inputs.
    left: Vec<Tensor>,
    /// The f32 copies of gradients that an update made, until the next step.
    copies: Vec<Tensor>,
    /// Whether the forward drops elements.
    drops: bool,
}

/// A micro-batch between its forward and its backward.
struct InFlight {
    inputs: Vec<Var>,
    outputs: Vec<Var>,
}

impl<'g> Run<'g> {
    /// Creates a run and allocates everything that exists before the step. This includes the states of the optimizer,
    /// unless the step is the first of a run.
    pub fn new(graph: &'g Graph, style: Style, row: &[Action], rows: &'g ExpertRows<'g>, is_first: bool) -> Self {
        let mixtures = Mixture::find(graph);
        let (stages, blocks) = Stage::of_rank(graph, &places(graph, &mixtures), row, style.is_transformers);
        let mut run = Self {
            graph,
            style,
            autograd: Autograd::default(),
            stages,
            parameters: HashMap::new(),
            of_experts: HashMap::new(),
            trained: Vec::new(),
            persistent: Vec::new(),
            tables: 0,
            has_states: !is_first,
            earlier: 0,
            casts: RefCell::default(),
            gates: graph
                .nodes()
                .iter()
                .filter(|node| !style.fuses() && node.op.name() == "swiglu")
                .map(|node| node.inputs[0])
                .collect(),
            mixtures,
            rows,
            micro_batch: Cell::new(0),
            blocks,
            checkpointed: HashSet::new(),
            units: None,
            in_flight: HashMap::new(),
            received: Vec::new(),
            left: Vec::new(),
            copies: Vec::new(),
            drops: graph.nodes().iter().any(|node| node.op.name() == "dropout"),
        };
        run.allocate_persistent();
        run
    }

    /// Names of the model's blocks, in order.
    pub fn blocks(&self) -> &[String] {
        &self.blocks
    }

    /// Sets the blocks that are checkpointed.
    pub fn checkpoint(&mut self, blocks: Vec<String>) {
        self.checkpointed = blocks.into_iter().collect();
    }

    /// Allocates parameters, rotary tables, masters, sums of gradients and, after the first step, optimizer states.
    fn allocate_persistent(&mut self) {
        let Self { graph, style, .. } = *self;
        let read: HashSet<ValueId> = self.stages.values().flat_map(|stage| stage.last.keys().copied()).collect();
        let of_experts: HashSet<ValueId> = self.mixtures.values().flat_map(|mixture| mixture.projections).collect();
        for (id, _) in graph.persistent().filter(|(id, _)| read.contains(id)) {
            let spec = &graph.value(id).spec;
            let (elements, width) = (spec.elements() as u64, spec.dims().last().copied().unwrap_or(1) as u64);
            let count = if of_experts.contains(&id) { spec.dims()[0] } else { 1 };
            let parameter = |_| {
                let new = match style.fsdp {
                    Some(_) => Tape::without_memory,
                    None => Tape::new_tensor,
                };
                let data = new(&self.autograd.tape, elements / count as u64, width, style.parameter);
                match graph.is_frozen(id) {
                    true => Var { data, edge: None },
                    false => self.autograd.leaf(data, !style.is_mixed),
                }
            };
            let mut vars: Vec<Var> = (0..count).map(parameter).collect();
            self.trained.extend(vars.iter().filter(|var| var.edge.is_some()).cloned());
            if of_experts.contains(&id) {
                self.of_experts.insert(id, vars);
            } else if let Some(var) = vars.pop() {
                self.parameters.insert(id, var);
            }
        }
        let tape = &self.autograd.tape;
        let node_ids = self.stages.values().flat_map(|stage| &stage.nodes);
        if let Some(rope) = node_ids.map(|&id| graph.node(id)).find(|node| node.op.name() == "rope") {
            let dims = graph.value(rope.inputs[0]).spec.dims();
            let elements = (dims.iter().product::<usize>() / dims[0] / dims[dims.len() - 2]) as u64;
            let dtype = if style.is_amp { F32 } else { style.parameter };
            self.persistent.extend([(); 2].map(|()| tape.new_tensor(elements, 1, dtype)));
        }
        self.tables = self.persistent.len();
        if let Some(fsdp) = style.fsdp {
            self.allocate_shards(fsdp);
            return;
        }
        if let Some(megatron) = style.megatron {
            let elements = self.trained_elements();
            let share = elements.div_ceil(megatron.optimizer_ranks);
            let new = |count: u64, dtype: u64| self.autograd.tape.new_tensor(count, 1, dtype);
            self.persistent.push(new(elements, megatron.gradient));
            self.persistent.extend([(); 3].map(|()| new(share, F32)));
            self.persistent.extend(self.workspaces(megatron).map(|bytes| new(bytes, 1)));
            self.copies.extend((self.has_states && megatron.copies_gradients).then(|| new(share, F32)));
            self.has_states = true;
            return;
        }
        for Var { data: Tensor { elements, .. }, .. } in &self.trained {
            let share = elements.div_ceil(style.data_ranks);
            if style.is_mixed {
                self.persistent.push(tape.new_tensor(*elements, 1, F32));
                self.persistent.push(tape.new_tensor(share, 1, F32));
            }
            if self.has_states {
                self.persistent.extend([share, share, 1].map(|count| tape.new_tensor(count, 1, style.state())));
            }
        }
    }

    /// Allocates the f32 shards of parameters and, after the first step, their moments, and makes the units.
    fn allocate_shards(&mut self, fsdp: Fsdp) {
        let Self { graph, autograd, .. } = &*self;
        let mut units = Units::new(fsdp, &autograd.tape);
        let mut persistent = Vec::new();
        let named: HashMap<ValueId, &str> = graph.persistent().collect();
        for block in [None].into_iter().chain(self.blocks.iter().map(|block| Some(block.as_str()))) {
            let mut ids: Vec<ValueId> = self.parameters.keys().copied().collect();
            ids.sort_unstable();
            for id in ids.into_iter().filter(|id| block_of(named[id]) == block) {
                let rows = graph.value(id).spec.dims().first().copied().unwrap_or(1) as u64;
                let shard = units.add(block, &self.parameters[&id], rows);
                let moments = if self.has_states { 2 } else { 0 };
                persistent.extend((0..=moments).map(|_| autograd.tape.new_tensor(shard, 1, F32)));
            }
        }
        self.persistent.extend(persistent);
        self.units = Some(Rc::new(RefCell::new(units)));
    }

    /// Returns the bytes of Megatron's buffers that live through the step: workspaces, and the buffer into which products
    /// gather their tokens.
    fn workspaces(&self, megatron: Megatron) -> [u64; 2] {
        let gathers = |node: &&Node| {
            megatron.has_gather_buffer
                && matches!(Collective::of(node), Some(Collective::AllGather { axes: Axes::TENSOR, .. }))
        };
        let gathers = self.graph.nodes().iter().filter(gathers);
        let elements = gathers.map(|node| self.graph.value(node.outputs[0]).spec.elements());
        [megatron.workspaces, elements.max().unwrap_or(0) as u64 * self.style.parameter]
    }

    fn trained_elements(&self) -> u64 {
        self.trained.iter().map(|var| var.data.elements).sum()
    }

    /// Returns the bytes of parameters, sums of gradients, masters and moments, and of copies of gradients for the update.
    pub fn states(&self) -> u64 {
        let bytes = |tensor: &Tensor| tensor.elements * tensor.dtype;
        let experts = self.of_experts.values().flatten();
        let parameters = self.parameters.values().chain(experts).map(|var| bytes(&var.data)).sum::<u64>();
        let parameters = if self.units.is_some() { 0 } else { parameters };
        let workspaces = self.style.megatron.map_or(0, |megatron| self.workspaces(megatron).iter().sum());
        let others: u64 = self.persistent.iter().skip(self.tables).chain(&self.copies).map(bytes).sum();
        parameters + others - workspaces
    }

    /// Runs an action of the schedule. `next` is the action after it, or `None` for the last action.
    pub fn run_action(&mut self, action: Action, next: Option<&Action>) -> Result<(), EagerError> {
        self.copies.clear();
        self.micro_batch.set(self.earlier + action.micro_batch.0 as usize);
        match action.kind {
            Kind::Forward => self.forward(action, next),
            _ => {
                self.backward(action);
                Ok(())
            }
        }
    }

    fn forward(&mut self, action: Action, next: Option<&Action>) -> Result<(), EagerError> {
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
                // The value is received from another stage.
                Source::Node { .. } => {
                    let width = value.spec.dims().last().copied().unwrap_or(1) as u64;
                    let data = self.autograd.tape.new_tensor(elements, width, self.dtype(&value.spec));
                    inputs.push(self.autograd.leaf(data, true));
                    inputs[inputs.len() - 1].clone()
                }
                _ => continue,
            };
            environment.insert(id, var);
        }
        // With interleaved stages, the same exchange also receives the gradients for the backward that follows.
        if let Some(next) = next.filter(|_| self.stages.len() > 1) {
            let is_received = |next: &&InFlight| next.outputs.iter().all(|output| output.data.elements > 1);
            let outputs = self.in_flight.get(next).filter(is_received).map_or(&[][..], |next| &next.outputs);
            self.received = outputs.iter().map(|output| self.autograd.tape.like(&output.data)).collect();
        }
        self.left.clear();
        if let Some(units) = &self.units {
            units.borrow_mut().before_forward(0);
        }
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
        let gradients: Vec<Tensor> = match std::mem::take(&mut self.received) {
            received if received.len() == outputs.len() => received,
            _ => outputs.iter().map(|output| tape.like(&output.data)).collect(),
        };
        self.left.clear();
        let stage = &self.stages[&action.stage];
        let (edges, data): (Vec<_>, Vec<Tensor>) = outputs.into_iter().map(|Var { data, edge }| (edge, data)).unzip();
        let roots = edges.into_iter().zip(&gradients).filter_map(|(edge, gradient)| Some((edge?, gradient.clone())));
        self.autograd.backward(roots.collect(), &|frame| self.recall(stage, frame));
        if let Some(units) = &self.units {
            units.borrow_mut().end_backward();
        }
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

    /// Runs the update, and then frees the gradients. The update allocates only the gradient norms, because a fused
    /// update works in place. In the first step, it also allocates the states of the optimizer.
    pub fn update(&mut self) {
        self.left.clear();
        if let Some(units) = &self.units {
            units.borrow_mut().end_step();
        }
        let tape = &self.autograd.tape;
        {
            let norms: Vec<Tensor> = self.trained.iter().map(|_| tape.bytes(F32)).collect();
            let _stacked = tape.bytes(F32 * norms.len() as u64);
            let _norm = tape.bytes(F32);
        }
        if !std::mem::replace(&mut self.has_states, true) {
            for Var { data: Tensor { elements, .. }, .. } in &self.trained {
                let share = elements.div_ceil(self.style.data_ranks);
                let states = [1, share, share].map(|count| tape.new_tensor(count, 1, self.style.state()));
                self.persistent.extend(states);
            }
        }
        if let Some(megatron) = self.style.megatron.filter(|megatron| megatron.copies_gradients) {
            let share = self.trained_elements().div_ceil(megatron.optimizer_ranks);
            self.copies.push(self.autograd.tape.new_tensor(share, 1, F32));
        }
        for parameter in &self.trained {
            parameter.leaf().map(|leaf| leaf.grad.take());
        }
        if let Some(units) = &self.units {
            units.borrow_mut().zero_grad();
        }
        self.earlier += self.style.micro_batches;
    }

    /// The tick of the next allocation or free.
    pub fn now(&self) -> u64 {
        self.autograd.tape.now()
    }

    /// Returns for each buffer whether it is allocated on a stream of collectives.
    pub fn are_beside(&self) -> Vec<bool> {
        self.autograd.tape.are_beside()
    }

    /// Returns the table of lifetimes. If it is of a steady step, a buffer that is never freed counts as alive from the
    /// first tick.
    pub fn into_buffers(self, is_steady: bool) -> Vec<Buffer> {
        self.autograd.tape.clone().into_buffers(is_steady)
    }

    /// Runs a stage's forward. Returns the values that other stages read. For the last stage, returns the loss.
    fn run_stage(&self, stage: &Stage, mut environment: Environment) -> Result<Vec<Var>, EagerError> {
        let block = |position: usize| block_of(&self.graph.node(stage.nodes[position]).layer);
        let mut start = 0;
        // In the programs of dense models, a variable keeps the input of the loop over blocks alive.
        let mut first: Option<Vec<(ValueId, Var)>> = None;
        while start < stage.nodes.len() {
            let name = block(start);
            let end = (start + 1..stage.nodes.len()).find(|&at| block(at) != name).unwrap_or(stage.nodes.len());
            let nodes = start..end;
            let mut inputs = self.inputs(stage, nodes.clone(), &environment);
            let unit = self.units.as_ref().zip(name);
            let unit = unit.and_then(|(units, name)| Some((units, units.borrow().index(Some(name))?)));
            if let Some((units, index)) = unit {
                units.borrow_mut().before_forward(index);
                let needing: Vec<&mut Var> =
                    inputs.iter_mut().map(|(_, var)| var).filter(|var| var.edge.is_some()).collect();
                let hooked =
                    self.autograd.after_backward(&needing.iter().map(|var| &**var).collect::<Vec<_>>(), units, index);
                needing.into_iter().zip(hooked).for_each(|(var, hooked)| *var = hooked);
            }
            first = name
                .filter(|_| self.mixtures.is_empty() && self.units.is_none())
                .map(|_| first.unwrap_or_else(|| inputs.clone()));
            let is_checkpointed = name.is_some_and(|name| self.checkpointed.contains(name));
            let frame = is_checkpointed.then(|| Checkpoint::new(nodes.clone(), inputs.clone(), self.selects()));
            if let Some(frame) = &frame {
                self.autograd.set_mode(Mode::Drop(frame.clone()));
            }
            // While a block runs, the caller of the block holds its inputs. Outside of blocks, no caller holds inputs.
            let mut inside: Environment = inputs.into_iter().collect();
            if name.is_none() {
                environment
                    .retain(|id, _| !inside.contains_key(id) || stage.last[id] >= end || stage.outputs.contains(id));
            }
            let given: HashSet<ValueId> = inside.keys().copied().collect();
            self.run_nodes(stage, nodes, &mut inside)?;
            self.autograd.set_mode(Mode::Keep);
            if let Some(frame) = frame.filter(|_| self.style.fsdp.is_some_and(|fsdp| fsdp.is_compiled)) {
                frame.drop_last_result();
            }
            if let Some((units, index)) = unit {
                units.borrow_mut().after_forward(index);
                inside.retain(|id, _| !given.contains(id));
                for var in inside.values_mut() {
                    *var = self.autograd.before_backward(var, units, index);
                }
            }
            environment
                .retain(|id, _| stage.last.get(id).is_some_and(|&last| last >= end) || stage.outputs.contains(id));
            environment.extend(inside);
            start = end;
        }
        Ok(stage.outputs.iter().filter_map(|id| environment.remove(id)).collect())
    }

    /// Whether checkpoints keep some results.
    fn selects(&self) -> bool {
        self.style.fsdp.is_some_and(|fsdp| fsdp.selects)
    }

    /// Returns the values that these nodes read from earlier nodes.
    fn inputs(&self, stage: &Stage, nodes: Range<usize>, environment: &Environment) -> Vec<(ValueId, Var)> {
        let read = stage.nodes[nodes].iter().flat_map(|&id| &self.graph.node(id).inputs);
        let mut ids: Vec<ValueId> = read.copied().collect();
        ids.sort_unstable();
        ids.dedup();
        ids.into_iter().filter_map(|id| environment.get(&id).map(|var| (id, var.clone()))).collect()
    }

    /// Runs the forward of a checkpoint again, to recompute its tensors.
    fn recall(&self, stage: &Stage, frame: &Checkpoint) {
        let mut environment = frame.inputs.iter().cloned().collect();
        // Errors cannot occur: the same nodes have run before.
        let _ = self.run_nodes(stage, frame.nodes.clone(), &mut environment);
        self.casts.take();
    }

    fn run_nodes(&self, stage: &Stage, nodes: Range<usize>, values: &mut Environment) -> Result<(), EagerError> {
        // Local variables of the function around attention, which stay alive until it returns.
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
            values
                .retain(|id, _| stage.last.get(id).is_some_and(|&last| last > position) || stage.outputs.contains(id));
        }
        Ok(())
    }

    /// Applies the rule of a node.
    fn apply(&self, id: NodeId, values: &mut Environment) -> Result<(), EagerError> {
        let applied = match self.style {
            Style { megatron: Some(megatron), .. } => self.apply_megatron(megatron, id, values),
            Style { fsdp: Some(fsdp), .. } => self.apply_torchtitan(fsdp, id, values),
            _ => Applied::AsElsewhere,
        };
        match applied {
            Applied::Made(made) => _ = values.insert(self.graph.node(id).outputs[0], made),
            Applied::Nothing => {}
            Applied::AsElsewhere => return self.apply_rule(id, values),
        }
        Ok(())
    }

    /// Applies the rule of PyTorch's operation for a node.
    fn apply_rule(&self, id: NodeId, values: &mut Environment) -> Result<(), EagerError> {
        let (node, autograd) = (self.graph.node(id), &self.autograd);
        let value = |index: usize| {
            let input = *node.inputs.get(index)?;
            values.get(&input).or_else(|| self.parameters.get(&input)).cloned()
        };
        let unknown = || EagerError::Op { op: node.op.name().to_owned(), layer: node.layer.to_string() };
        let input = |index: usize| value(index).ok_or_else(unknown);
        if let Some(mixture) = self.mixtures.get(&*node.layer) {
            // The experts' program runs in place of the dispatch node and covers all nodes of the layer, so the other
            // nodes do nothing.
            if id == mixture.dispatch {
                let weights = values.get(&mixture.weights).cloned().ok_or_else(unknown)?;
                values.insert(mixture.output, self.experts(mixture, &node.layer, &input(0)?, &weights));
            }
            return Ok(());
        }
        let output = node.outputs[0];
        let spec = &self.graph.value(output).spec;
        let width = spec.dims().last().copied().unwrap_or(1) as u64;
        let made = match node.op.name() {
            "embedding" => autograd.embedding(&input(0)?, &input(1)?.data),
            // Rows of a table of positions.
            "narrow" | "broadcast_as" if self.parameters.contains_key(&node.inputs[0]) => {
                let rows = self.graph.value(node.inputs[0]).spec.dims()[0].min(spec.elements() / width as usize);
                let positions = autograd.tape.new_tensor(rows as u64, 1, INT64);
                autograd.embedding(&input(0)?, &positions)
            }
            "narrow" => return self.split(id, &input(0)?, values),
            "broadcast_as" | "contiguous" | "scaled_sum" => input(0)?,
            // The program has no operation of its own for a constant that is added to a sum or multiplied with it.
            "affine" if is_sum(self.graph, node.inputs[0]) => input(0)?,
            "to_dtype" => autograd.cast(&input(0)?, self.dtype(spec)),
            "softmax_last_dim" => autograd.softmax(&input(0)?),
            "sigmoid" => autograd.sigmoid(&input(0)?),
            "sum" => autograd.sum(&input(0)?, spec.elements() as u64, width),
            "div" => autograd.div(&input(0)?, &input(1)?),
            "top_k" => {
                let made = autograd.top_k(&input(0)?, width);
                values.extend(node.outputs.iter().copied().zip(made));
                return Ok(());
            }
            "expert_load" => Var { data: autograd.tape.new_tensor(spec.elements() as u64, width, F32), edge: None },
            // The sorting in the experts' program covers this operation.
            "route" => return Ok(()),
            "reshape" => autograd.view(&input(0)?, width),
            "transpose" => autograd.transpose(&input(0)?),
            "linear" => {
                let bias = value(2).map(|bias| (node.inputs[2], bias));
                self.linear(node.inputs[1], &input(0)?, &input(1)?, bias)
            }
            "rope" => autograd.transpose(&autograd.rope(&autograd.transpose(&input(0)?))),
            "attention" => {
                let head = self.graph.value(node.inputs[0]).spec.dims().last().copied().unwrap_or(1) as u64;
                let [q, k, v] = [input(0)?, input(1)?, input(2)?];
                // The attention operation of this engine uses [batch, tokens, heads, size].
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

    /// Applies the rule of a node that differs in Megatron.
    fn apply_megatron(&self, megatron: Megatron, id: NodeId, values: &mut Environment) -> Applied {
        let (node, autograd, ranks) = (self.graph.node(id), &self.autograd, self.style.tensor_ranks);
        let value = |index: usize| {
            let input = *node.inputs.get(index)?;
            values.get(&input).or_else(|| self.parameters.get(&input)).cloned()
        };
        let Some(x) = value(0) else {
            // The statistics of logits, and gradients that this engine computes in the forward.
            return Applied::Nothing;
        };
        let operands = || Some([value(0)?, value(1)?, value(2)?]);
        let made = match node.op.name() {
            // A bias is added without a copy of it for each row.
            "broadcast_as" if self.graph.value(node.inputs[0]).spec.dims().len() == 1 => x,
            // The sum is written over the summand.
            "all_reduce" => x,
            "all_gather" => autograd.gather(&x, ranks, megatron.has_gather_buffer),
            "reduce_scatter" => autograd.reduce_scatter(&x, ranks),
            "linear_cross_entropy_statistics" => return Applied::Nothing,
            "scaled_sum" => autograd.sum(&x, 1, 1),
            "rms_norm" | "swiglu" | "rope" if megatron.has_unfused_layers => return Applied::AsElsewhere,
            "rms_norm" => match value(1) {
                Some(weight) => autograd.fused_rms_norm(&x, &weight),
                None => return Applied::AsElsewhere,
            },
            "swiglu" => match value(1) {
                Some(up) => autograd.fused_swiglu(&x, &up),
                None => return Applied::AsElsewhere,
            },
            "rope" => autograd.fused_rope(&x),
            "attention" => {
                let Some([q, k, v]) = operands() else { return Applied::AsElsewhere };
                let dims = self.graph.value(node.inputs[1]).spec.dims();
                let (keys, head) = (dims[dims.len() - 2] as u64, dims[dims.len() - 1] as u64);
                let rows = q.data.elements / head;
                autograd.transpose(&match () {
                    () if megatron.is_unfused => autograd.unfused_attention([&q, &k, &v], rows, keys, self.drops),
                    () if megatron.is_ring => autograd.ring_attention([&q, &k, &v], rows),
                    () if megatron.copies_output => autograd.scale(&autograd.attention([&q, &k, &v], rows)),
                    () => autograd.attention([&q, &k, &v], rows),
                })
            }
            "linear_cross_entropy" => {
                let Some(weight) = value(1) else { return Applied::AsElsewhere };
                let logits = self.linear(node.inputs[1], &x, &weight, None);
                autograd.split_cross_entropy(&logits)
            }
            _ => return Applied::AsElsewhere,
        };
        Applied::Made(made)
    }

    /// Applies the rule of a node that differs in torchtitan (`torchtitan/models/llama/model.py`).
    fn apply_torchtitan(&self, fsdp: Fsdp, id: NodeId, values: &Environment) -> Applied {
        let (node, autograd, ranks) = (self.graph.node(id), &self.autograd, self.style.tensor_ranks);
        let value = |index: usize| {
            let input = *node.inputs.get(index)?;
            values.get(&input).or_else(|| self.parameters.get(&input)).cloned()
        };
        let Some(x) = value(0) else { return Applied::Nothing };
        let made = match (node.op.name(), value(1)) {
            ("all_reduce", _) => x,
            ("all_gather", _) => autograd.gather_tokens(&x, ranks, fsdp),
            ("reduce_scatter", _) => autograd.scatter_tokens(&x, ranks, fsdp),
            ("linear_cross_entropy_statistics", _) => return Applied::Nothing,
            ("rms_norm", Some(weight)) if fsdp.is_compiled => autograd.fused_rms_norm(&x, &weight),
            ("swiglu", Some(up)) if fsdp.is_compiled => autograd.fused_swiglu(&x, &up),
            ("rope", _) if fsdp.is_compiled => autograd.fused_rope(&x),
            ("rope", _) => autograd.complex_rope(&x),
            ("attention", Some(k)) => {
                let Some(v) = value(2) else { return Applied::AsElsewhere };
                let [k, v] = [k, v].map(|x_kv| autograd.repeat(&x_kv, x.data.elements));
                let head = self.graph.value(node.inputs[0]).spec.dims().last().copied().unwrap_or(1) as u64;
                autograd.transpose(&autograd.attention([&x, &k, &v], x.data.elements / head))
            }
            ("linear_cross_entropy", Some(weight)) => {
                let Some(targets) = value(2) else { return Applied::AsElsewhere };
                // The training loop holds the logits until the loss is computed.
                let logits = self.linear(node.inputs[1], &x, &weight, None);
                autograd.cross_entropy(&autograd.cast(&logits, F32), targets.data, false)
            }
            _ => return Applied::AsElsewhere,
        };
        Applied::Made(made)
    }

    /// A linear layer over the last dimension.
    fn linear(&self, id: ValueId, x: &Var, weight: &Var, bias: Option<(ValueId, Var)>) -> Var {
        // C++ casts the arguments of a call from the last to the first.
        let bias = bias.map(|(id, bias)| self.autocast((id, 0), &bias));
        let weight = self.autocast((id, 0), weight);
        self.autograd.linear(&self.operand(x), &weight, bias.as_ref())
    }

    /// Returns the activation that a product reads. Under autocast, this is a cast of the activation.
    fn operand(&self, x: &Var) -> Var {
        if self.style.is_amp { self.autograd.cast(x, BF16) } else { x.clone() }
    }

    /// Returns the parameter that a product reads. Under autocast, this is a cast of the parameter, and the cast is
    /// cached until the forward ends.
    fn autocast(&self, id: (ValueId, usize), parameter: &Var) -> Var {
        if !self.style.is_amp {
            return parameter.clone();
        }
        let known = self.casts.borrow().get(&id).cloned();
        known.unwrap_or_else(|| {
            let cast = self.autograd.cast(parameter, BF16);
            self.casts.borrow_mut().insert(id, cast.clone());
            cast
        })
    }

    /// Runs the experts of a layer, each of which computes down(silu(gate(x))·up(x)) on its rows.
    fn experts(&self, mixture: &Mixture, layer: &str, x: &Var, weights: &Var) -> Var {
        let Self { autograd, style, .. } = self;
        let [gate, up, down] = mixture.projections;
        let project = |id: ValueId, expert: usize, x: &Var| {
            let weight = self.autocast((id, expert), &self.of_experts[&id][expert]);
            autograd.flat_linear(&self.operand(x), &weight)
        };
        let expert = |expert: usize, x: &Var| {
            let hidden = {
                let activated = autograd.activation(&project(gate, expert, x));
                let product = autograd.mul(&activated, &project(up, expert, x));
                drop(activated);
                product
            };
            project(down, expert, &hidden)
        };
        let count = self.of_experts[&gate].len();
        let mut rows = (self.rows)(self.micro_batch.get(), layer);
        rows.truncate(count);
        match style.expert_ranks {
            1 => autograd.looped_experts(x, weights, &rows, &expert),
            _ => autograd.experts_over_ranks(x, weights, &rows, &expert),
        }
    }

    /// Bytes per element.
    fn dtype(&self, spec: &Spec) -> u64 {
        if spec.dtype == DType::F32 { F32 } else { self.style.parameter }
    }

    /// Splits a tensor at once into all adjacent parts that `narrow` operations take of it.
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
