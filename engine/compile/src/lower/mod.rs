//! Lowering: builds one list of instructions per rank, by walking through the rank's actions and emitting the nodes of
//! each action.
//!
//! - In: a graph whose nodes are marked forward (F), input gradient (I), weight gradient (W) or update, and the actions
//!   of a schedule.
//! - Out: a [`Program`] in which every instance of a value has its own buffer, and in which values of other ranks are
//!   read as if they were local. The [`passes`](crate::passes) then insert messages, let outputs overwrite inputs, and
//!   more.
//! - Never: an address.
//!
//! Values of the forward and the backward exist once per micro-batch. If the update reads such a value, it reads the
//! *sum* over the micro-batches. Operations that can accumulate into their output build this sum in place. After any
//! other operation, lowering emits an addition.

mod dynamic_rows;
mod evict_rows;
mod overlap_reduce;
mod rematerialize;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::{Label, Role};
use gapless_graph::nn::{Init, Initializer};
use gapless_graph::ops::{Binary, BinaryKind, Collective, Contiguous};
use gapless_graph::{Graph, Node, NodeId, Op, Phase, Place, Source, Value, ValueId};
use gapless_parallel::{Action, Kind};

use self::dynamic_rows::RowCounts;
use self::evict_rows::Evicted;
use self::overlap_reduce::EarlyNode;
use self::rematerialize::{Occurrence, SmallerForWeights, smaller_for_weights};
use crate::cross_rank::{CrossRankValues, phases};
use crate::error::{Error, Result};
use crate::lowering::{Lowering, Output, Target};
use crate::passes::{self, Context, FINISH, UPDATE, dump};
use crate::program::{
    BufferId, BufferKind, Instance, Instr, InstrKind, IoTensor, Operand, Part, Program, role_of_node,
};
use crate::verify::check_sizes;

/// The maximum number of instructions of a program. Until its addresses are resolved, an instruction takes some 5 KB.
const MAX_INSTRUCTIONS: usize = 1 << 20;

/// Lowers a graph along a schedule for one rank, and runs all passes over the resulting program.
///
/// # Errors
/// Returns an error if the actions wait for each other in a cycle, if an action reads a value that no action computes,
/// or if the program would have too many instructions.
pub fn lower(lowering: &Lowering<'_>) -> Result<Program> {
    lower_as(lowering, &Shared::new(lowering))
}

/// Like [`lower`], for a caller that lowers several ranks of a table, and finds only once what they have in common.
///
/// # Errors
/// Returns the errors of [`lower`].
pub(crate) fn lower_as(lowering: &Lowering<'_>, shared: &Shared) -> Result<Program> {
    lower_observed(lowering, shared, &mut |stage, program| dump(stage, program))
}

/// The facts about a graph and a table of actions that do not depend on the rank.
#[derive(Debug)]
pub(crate) struct Shared {
    /// By node of the graph: whether it runs on any rank.
    pub alive: Vec<bool>,
    /// Values that cross between ranks.
    pub crossings: CrossRankValues,
}

impl Shared {
    /// Finds the facts for all ranks of `lowering`, whichever rank it is for.
    pub fn new(lowering: &Lowering<'_>) -> Self {
        let alive = alive_nodes(lowering.graph, lowering.outputs);
        let crossings = CrossRankValues::new(lowering.graph, &alive, lowering.table, lowering.outputs);
        Self { alive, crossings }
    }
}

/// Like [`lower_as`], but calls `observe` with the program after every stage.
pub(crate) fn lower_observed(
    lowering: &Lowering<'_>,
    Shared { alive, crossings }: &Shared,
    observe: &mut dyn FnMut(&'static str, &Program),
) -> Result<Program> {
    let mut lowerer = Lowerer::new(lowering, alive, crossings);
    let actions = &lowering.table[lowering.rank];
    let instructions = actions.iter().map(|action| lowerer.nodes_of(action).count()).sum();
    if instructions > MAX_INSTRUCTIONS {
        let program = lowering.name.to_owned();
        return Err(Error::TooManyInstructions { program, instructions, most: MAX_INSTRUCTIONS });
    }
    for (index, action) in actions.iter().enumerate() {
        lowerer.emit_action(index, action);
    }
    lowerer.emit_update();
    lowerer.outputs();
    let Lowerer { mut program, first_buffer, .. } = lowerer;
    check_sizes(&program)?;
    observe("lower", &program);
    passes::run(&mut program, &Context { lowering, alive, crossings, first_buffer: &first_buffer }, observe)?;
    Ok(program)
}

struct Lowerer<'a> {
    lowering: &'a Lowering<'a>,
    crossings: &'a CrossRankValues,
    program: Program,
    /// By node: whether the node still has to be emitted.
    alive: Vec<bool>,
    /// By root: whether the update reads the sum of the root's micro-batches.
    accumulated: Vec<bool>,
    /// By root: whether the root is read in its own micro-batch, or sent to another rank there.
    read_within: Vec<bool>,
    /// The buffer of each instance that is currently live.
    live_buffer: HashMap<Instance, BufferId>,
    /// The first buffer of each instance.
    first_buffer: HashMap<Instance, BufferId>,
    /// The nodes of each place and phase, in graph order.
    nodes: HashMap<(Place, Phase), Vec<NodeId>>,
    /// Nodes of the update that can run before the last action ends: the sums of gradients over the data ranks, and the
    /// nodes that lead to them.
    early_update: Vec<EarlyNode>,
    /// Values with dynamic rows.
    row_counts: RowCounts,
    /// Dynamic rows that may be evicted between forward and backward.
    evicted: Evicted,
    /// Per [`Variant`](crate::recompute::Variant): the recomputed nodes that run early, in I instead of W.
    smaller_for_weights: Vec<SmallerForWeights>,
    /// Whether the current action is an I. In that case, the W of the same micro-batch is a later action.
    is_split: bool,
}

impl<'a> Lowerer<'a> {
    fn new(lowering: &'a Lowering<'a>, alive: &[bool], crossings: &'a CrossRankValues) -> Self {
        let graph = lowering.graph;
        let values = graph.values().len();
        let (mut accumulated, mut read_within) = (vec![false; values], vec![false; values]);
        let mut nodes: HashMap<(Place, Phase), Vec<NodeId>> = HashMap::new();
        for id in graph.node_ids().filter(|id| alive[id.index()]) {
            let node = graph.node(id);
            let is_here = crossings.ranks_of(node.place).contains(&lowering.rank);
            for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                let per_micro_batch = graph.producer(root).is_some_and(|p| p.phase != Phase::Update);
                accumulated[root.index()] |= node.phase == Phase::Update && per_micro_batch;
                read_within[root.index()] |= node.phase != Phase::Update && is_here;
            }
            for &output in &node.outputs {
                read_within[output.index()] |= crossings.per_micro_batch(output).next().is_some();
            }
            nodes.entry((node.place, node.phase)).or_default().push(id);
        }
        let row_counts = RowCounts::new(lowering, alive, crossings);
        let evicted = Evicted::new(lowering, alive, &row_counts);
        let program = Program { name: lowering.name.into(), ..Program::default() };
        let (live_buffer, first_buffer, alive, early_update) =
            (HashMap::new(), HashMap::new(), alive.to_vec(), Vec::new());
        let smaller_for_weights = smaller_for_weights(lowering, &nodes);
        let lowerer = Self {
            lowering,
            crossings,
            program,
            alive,
            accumulated,
            read_within,
            live_buffer,
            first_buffer,
            nodes,
            early_update,
            row_counts,
            evicted,
            smaller_for_weights,
            is_split: false,
        };
        Self { early_update: lowerer.early_nodes(), ..lowerer }
    }

    /// Returns the nodes that an action runs, phase by phase.
    fn nodes_of(&self, action: &Action) -> impl Iterator<Item = NodeId> {
        let place = Place::Stage(action.stage);
        let of_phase = move |&phase: &Phase| self.nodes.get(&(place, phase)).into_iter().flatten().copied();
        phases(action.kind).iter().flat_map(of_phase)
    }

    fn emit_action(&mut self, index: usize, action: &Action) {
        let graph = self.lowering.graph;
        let (first, micro_batch) = (self.program.instrs.len(), action.micro_batch.0);
        let mut nodes: Vec<NodeId> = self.nodes_of(action).collect();
        nodes.sort_unstable();
        self.is_split = action.kind == Kind::BackwardInput;
        let last = self.last_phases(index, action);
        for id in nodes {
            let node = graph.node(id);
            self.rematerialize_inputs(id, micro_batch);
            self.emit_node(id, micro_batch);
            if last.contains(&node.phase) {
                self.complete(&node.outputs);
            }
        }
        self.drop_rematerialized(action);
        self.end_part(first, action.to_string(), Some(*action));
    }

    /// Emits the work that is done once per step, after the last action.
    fn emit_update(&mut self) {
        let graph = self.lowering.graph;
        let first = self.program.instrs.len();
        for id in graph.node_ids() {
            let node = graph.node(id);
            if node.phase == Phase::Update && self.alive[id.index()] && self.is_here(node.place) {
                self.emit_node(id, 0);
            }
        }
        self.end_part(first, UPDATE.into(), None);
    }

    fn end_part(&mut self, first: usize, name: String, action: Option<Action>) {
        self.program.parts.push(Part { instrs: first..self.program.instrs.len(), name, action });
    }

    fn is_here(&self, place: Place) -> bool {
        self.crossings.ranks_of(place).contains(&self.lowering.rank)
    }

    fn emit_node(&mut self, id: NodeId, micro_batch: u32) {
        self.emit(id, micro_batch, Occurrence::Original);
        self.emit_vote(self.lowering.graph.node(id), micro_batch);
    }

    /// Emits a node, followed by the sums over micro-batches of those outputs for which a sum is needed.
    fn emit(&mut self, id: NodeId, micro_batch: u32, occurrence: Occurrence) {
        let graph = self.lowering.graph;
        let node = graph.node(id);
        let mut inputs: Vec<Operand> = Vec::with_capacity(node.inputs.len());
        for &id in &node.inputs {
            let value = graph.value(id);
            let buffer = self.instance(value.root, node.phase, micro_batch);
            inputs.push(Operand::new(buffer, value));
        }
        let mut followups = Vec::new();
        let mut accumulate = 0;
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for index in 0..node.outputs.len() {
            let (buffer, adds) = self.output(node, index, micro_batch, occurrence, &mut inputs, &mut followups);
            accumulate |= u64::from(adds) << index;
            outputs.push(Operand::new(buffer, graph.value(node.outputs[index])));
        }
        let workspace = self.workspace(node, micro_batch);
        let defines_count = node.outputs.first().and_then(|&output| self.count_defined(output, micro_batch));
        let work = match Collective::of(node) {
            Some(collective) => InstrKind::Collective(collective, self.program.add_request()),
            None => InstrKind::Compute(node.op.clone()),
        };
        let instr = Instr::plain(work, inputs, outputs, micro_batch, node.layer.clone());
        let (rematerialized, predicate) = (occurrence == Occurrence::Recomputed, occurrence.predicate());
        self.program.instrs.push(Instr {
            workspace,
            accumulate,
            rematerialized,
            defines_count,
            predicate,
            node: Some(id),
            ..instr
        });
        for Followup { op, inputs, output, value } in followups {
            let input = |(buffer, overwritten_by)| Operand { overwritten_by, ..Operand::new(buffer, value) };
            let (inputs, outputs) = (inputs.into_iter().map(input).collect(), vec![Operand::new(output, value)]);
            let instr = Instr::plain(InstrKind::Compute(op), inputs, outputs, micro_batch, node.layer.clone());
            self.program.instrs.push(Instr { node: Some(id), ..instr });
        }
    }

    /// Returns the buffer of an output, and whether the operation accumulates into that buffer. An output whose sum the
    /// update reads is summed over the micro-batches, either by the operation itself or by an instruction that is
    /// emitted after the operation.
    fn output(
        &mut self,
        node: &Node,
        index: usize,
        micro_batch: u32,
        occurrence: Occurrence,
        inputs: &mut [Operand],
        followups: &mut Vec<Followup<'a>>,
    ) -> (BufferId, bool) {
        let id = node.outputs[index];
        let value = self.lowering.graph.value(id);
        if let Some(buffer) = occurrence.predicate().and_then(|_| self.still_live(id, micro_batch)) {
            return (buffer, false);
        }
        let (is_read, sum) = (self.read_within[id.index()], self.live_buffer.get(&Instance::sum(id)).copied());
        if let Some(sum) = sum
            && !is_read
            && node.op.accumulates(index)
        {
            return (sum, true);
        }
        let mutated = node.op.mutates().iter().find(|pair| pair.1 == index);
        let buffer = match mutated.and_then(|&(input, _)| inputs.get_mut(input)) {
            Some(input) => {
                input.overwritten_by = Some(index);
                input.buffer
            }
            None => self.new_buffer(node, id, index, micro_batch),
        };
        match (self.accumulated[id.index()], sum) {
            (false, _) => {}
            (true, Some(sum)) => {
                let op = Arc::new(Binary { kind: BinaryKind::Add });
                followups.push(Followup { op, inputs: vec![(sum, Some(0)), (buffer, None)], output: sum, value });
            }
            // The sum starts as the first micro-batch's value. The sum gets this value's own buffer or, if the value is
            // also read in its micro-batch, a copy.
            (true, None) if !is_read => {
                self.set_buffer(Instance::sum(id), buffer);
            }
            (true, None) => {
                let sum = self.new_buffer(node, id, index, micro_batch);
                self.set_buffer(Instance::sum(id), sum);
                followups.push(Followup { op: Arc::new(Contiguous), inputs: vec![(buffer, None)], output: sum, value });
            }
        }
        // A value that is still live keeps its first buffer. A node that recomputes evicted rows may also have outputs
        // that are not evicted rows. Such an output is not registered, so a reader of the output recomputes it.
        let key = self.key(id, node.phase, micro_batch);
        let is_wanted = occurrence.predicate().is_none() || self.is_temporary(id, micro_batch);
        if is_wanted && (occurrence == Occurrence::Original || !self.live_buffer.contains_key(&key)) {
            self.set_buffer(key, buffer);
        }
        (buffer, false)
    }

    /// Returns the instance of `root` that a node of `phase` reads or writes: the instance of the micro-batch, or the
    /// sum.
    fn key(&self, root: ValueId, phase: Phase, micro_batch: u32) -> Instance {
        let once = match &self.lowering.graph.value(root).source {
            Source::Node { node, .. } => self.lowering.graph.node(*node).phase == Phase::Update,
            Source::Persistent { .. } | Source::Constant(_) | Source::Data { .. } | Source::Cache { .. } => true,
            Source::Input { name } => name.starts_with(PER_STEP),
        };
        match phase {
            _ if once => Instance::micro_batch(root, 0),
            Phase::Update if self.accumulated[root.index()] => Instance::sum(root),
            _ => Instance::micro_batch(root, micro_batch),
        }
    }

    /// Returns the buffer from which a value is read. Values from outside the program or from another rank are declared
    /// at their first use.
    fn instance(&mut self, root: ValueId, phase: Phase, micro_batch: u32) -> BufferId {
        let key = self.key(root, phase, micro_batch);
        if let Some(&buffer) = self.live_buffer.get(&key) {
            return buffer;
        }
        let value = self.lowering.graph.value(root);
        let buffer = match &value.source {
            Source::Persistent { name, fill } => {
                let role = self.lowering.roles.get(&root).copied().unwrap_or(Role::Parameter);
                let layer = name.rsplit_once('.').map_or("", |(layer, _)| layer).to_owned();
                let label = Label { tensor: name.clone(), op: String::new(), layer, role };
                let kind = BufferKind::Persistent { fill: fill.clone(), spec: value.spec.clone() };
                self.program.add(value.spec.bytes(), label, kind)
            }
            Source::Constant(number) => {
                // Programs share constants by name, so the same number in two types needs two names.
                let name = match value.spec.dtype {
                    DType::F32 => format!("constant {number}"),
                    other => format!("constant {number} ({})", other.as_str()),
                };
                self.constant(Init::Const(*number), name, None, value)
            }
            Source::Data { name, elements } => {
                self.constant(Init::Const(0.0), name.clone(), Some(elements.clone()), value)
            }
            Source::Input { name } => self.input(name, key, value),
            Source::Cache { name } => {
                let layer = name.rsplit_once('/').map_or("", |(layer, _)| layer).to_owned();
                let label = Label { tensor: name.clone(), op: "cache".into(), layer, role: Role::Cache };
                self.program.add(value.spec.bytes(), label, BufferKind::Cache)
            }
            Source::Node { .. } => self.remote_value(root, key),
        };
        self.set_buffer(key, buffer);
        buffer
    }

    fn set_buffer(&mut self, key: Instance, buffer: BufferId) {
        self.live_buffer.insert(key, buffer);
        self.first_buffer.entry(key).or_insert(buffer);
    }

    fn constant(&mut self, init: Init, name: String, given: Option<Arc<[f64]>>, value: &Value) -> BufferId {
        let fill = Initializer { given, ..Initializer::whole(init, name.clone(), value.spec.dims()) };
        let label = Label { tensor: name, op: String::new(), layer: String::new(), role: Role::Input };
        self.program.add(value.spec.bytes(), label, BufferKind::Persistent { fill, spec: value.spec.clone() })
    }

    fn input(&mut self, name: &str, key: Instance, value: &Value) -> BufferId {
        let label = Label { tensor: name.to_owned(), op: "input".into(), layer: String::new(), role: Role::Input };
        let buffer = self.program.add(value.spec.bytes(), label, BufferKind::Input);
        let (operand, spec) = (Operand::new(buffer, value), value.spec.clone());
        self.program.inputs.push(IoTensor { name: name.to_owned(), micro_batch: key.micro_batch, operand, spec });
        buffer
    }

    /// Declares a value that another rank computes, and returns its buffer.
    fn remote_value(&mut self, root: ValueId, key: Instance) -> BufferId {
        let maker = self.lowering.graph.producer(root).expect("it is made by a node");
        debug_assert!(!self.is_here(maker.place), "inputs are made before they are read");
        let output = maker.outputs.iter().position(|&output| output == root).unwrap_or(0);
        let buffer = self.new_buffer(maker, root, output, key.micro_batch);
        self.program.buffers[buffer.index()].label.role = Role::Communication;
        buffer
    }

    fn new_buffer(&mut self, node: &Node, id: ValueId, output: usize, micro_batch: u32) -> BufferId {
        let op_name = node.op.name();
        let is_summed = self.accumulated[id.index()];
        let tensor = match (node.phase, is_summed) {
            (Phase::Update, _) | (_, true) => format!("{}/{op_name}.{output}", node.layer),
            _ => format!("{}/{op_name}.{output} of micro-batch {micro_batch}", node.layer),
        };
        let dynamic_rows = self.dynamic_rows(id, micro_batch);
        let role = match dynamic_rows {
            Some(_) => Role::Routing,
            None if is_summed => Role::Gradient,
            None => role_of_node(node.phase),
        };
        let label = Label { tensor, op: op_name.into(), layer: node.layer.to_string(), role };
        let buffer = self.program.add(self.lowering.graph.value(id).spec.bytes(), label, BufferKind::Temporary);
        self.program.buffers[buffer.index()].dynamic_rows = dynamic_rows;
        buffer
    }

    fn workspace(&mut self, node: &Node, micro_batch: u32) -> Vec<BufferId> {
        let graph = self.lowering.graph;
        let outputs = graph.specs(&node.outputs);
        let pieces = match self.lowering.target {
            Target::Cpu { threads } => node.op.workspace(&graph.specs(&node.inputs), &outputs, threads),
            Target::Cuda | Target::CudaUnfused => {
                let inputs = node.inputs.iter().map(|&id| graph.value(id));
                let inputs = inputs.map(|value| (&value.layout, value.spec.dtype));
                gapless_graph::launches::workspace(&*node.op, inputs, &outputs)
            }
        };
        let add = |(piece, bytes): (usize, u64)| {
            let tensor = format!("{}/{} workspace.{piece} of micro-batch {micro_batch}", node.layer, node.op.name());
            let (op, layer) = (node.op.name().into(), node.layer.to_string());
            self.program.add(bytes, Label { tensor, op, layer, role: Role::Workspace }, BufferKind::Temporary)
        };
        pieces.into_iter().enumerate().map(add).collect()
    }

    /// Declares the values that the host reads, and keeps their buffers until the end of the program.
    fn outputs(&mut self) {
        let graph = self.lowering.graph;
        for output in self.lowering.outputs {
            let value = graph.value(output.value);
            if !output.everywhere && graph.place_of(value.root).is_some_and(|place| !self.is_here(place)) {
                continue;
            }
            let buffer = self.instance(value.root, Phase::Update, 0);
            let kind = &mut self.program.buffers[buffer.index()].kind;
            if matches!(kind, BufferKind::Temporary) {
                *kind = BufferKind::Output;
            }
            let (operand, spec) = (Operand::new(buffer, value), value.spec.clone());
            self.program.outputs.push(IoTensor { name: output.name.clone(), micro_batch: 0, operand, spec });
        }
        self.end_part(self.program.instrs.len(), FINISH.into(), None);
    }
}

/// An instruction that is emitted after a node's own instruction, on the buffer of one of the node's outputs.
struct Followup<'a> {
    op: Arc<dyn Op>,
    /// Each input, with the index of the output that overwrites it, if any.
    inputs: Vec<(BufferId, Option<usize>)>,
    output: BufferId,
    value: &'a Value,
}

/// Prefix of the names of inputs that the host writes once per step instead of once per micro-batch.
pub const PER_STEP: &str = "step.";

/// Returns for each node whether the node runs: whether the states of the update or the outputs depend on it. Views
/// never run, because they compute nothing.
pub fn alive_nodes(graph: &Graph, outputs: &[Output]) -> Vec<bool> {
    let mut wanted = vec![false; graph.values().len()];
    for id in outputs.iter().map(|output| output.value) {
        wanted[id.index()] = true;
        wanted[graph.value(id).root.index()] = true;
    }
    let mut alive = vec![false; graph.nodes().len()];
    for id in graph.node_ids().rev() {
        let node = graph.node(id);
        let changes_state = node.phase == Phase::Update && !node.op.mutates().is_empty();
        if changes_state || node.outputs.iter().any(|o| wanted[o.index()]) {
            alive[id.index()] = !graph.is_view(node.outputs[0]);
            for &input in &node.inputs {
                wanted[input.index()] = true;
                wanted[graph.value(input).root.index()] = true;
            }
        }
    }
    alive
}
