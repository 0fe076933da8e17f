//! One list of instructions per rank: walks the rank's actions and lays down the nodes of each part.
//!
//! In: a graph whose nodes are marked F, I, W or update, and the actions of a schedule. Out: a [`Program`]. In-place
//! decisions are made here, so that the planner sees merged buffers. Never: an address.
//!
//! Values of the forward and backward parts exist once per micro-batch. What the update reads of them is their *sum* over
//! the micro-batches: operations that can add to their output do so in place, others get an addition behind them.
//!
//! What is read on another rank than where it is made is sent as soon as it is there, and received in front of its first
//! reader. The wait for a send stands where the order of the step says that the message was taken, so it never blocks
//! between actions; until then the bytes stay as they are.

mod again;
mod counted;
mod early;
mod let_go;
mod stash;
mod transfer;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::DType;
use gapless_alloc::{Label, Role};
use gapless_graph::Op;
use gapless_graph::nn::{Fill, Init};
use gapless_graph::ops::{Binary, BinaryKind, Contiguous};
use gapless_graph::{Graph, Node, NodeId, Phase, Place, Source, Value, ValueId};
use gapless_parallel::Action;

use self::again::{Life, Reads};
use self::counted::Counts;
use self::early::{Early, collective_of};
use self::let_go::LetGo;
use self::stash::PutAway;
use self::transfer::{Collecting, Sending};
use super::fuse::fuse;
use super::hoist::{UPDATE, hoist};
use super::messages::{Crossings, phases};
use super::order::order;
use super::program::{BufferId, Held, Instance, Operand, Part, Program, Step, Work, role_of_node};
use crate::error::Result;
use crate::recompute::Recomputation;

/// What to lower, and how.
#[derive(Debug)]
pub struct Lowering<'a> {
    /// The name of the program.
    pub name: &'a str,
    /// Forward, backward and update nodes.
    pub graph: &'a Graph,
    /// The actions of every rank, in order.
    pub table: &'a [Vec<Action>],
    /// The rank whose program it is.
    pub rank: usize,
    /// What the host reads after the program. Values of the update, or of the only micro-batch.
    pub outputs: &'a [Output],
    /// Roles of persistent values that are not parameters.
    pub roles: &'a HashMap<ValueId, Role>,
    /// What is computed again in the backward.
    pub recomputation: &'a Recomputation,
    /// Whether rows that are received need not wait for their backward: if there is no room for them while the program runs,
    /// they are exchanged again.
    pub lets_go: bool,
    /// What it is for.
    pub target: Target,
}

/// Whose kernels run a program: workspaces are sized for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The CPU's.
    Cpu {
        /// Threads of the run.
        threads: usize,
    },
    /// A GPU's.
    Cuda,
    /// A GPU's, each operation with kernels of its own: what those that do several operations are judged by.
    CudaUnfused,
}

impl Target {
    /// Whether what is counted while a program runs can have its place there and then.
    pub(super) fn counts(self) -> bool {
        matches!(self, Self::Cpu { .. })
    }
}

/// A value that the host reads after a program.
#[derive(Debug, Clone)]
pub struct Output {
    /// The name it is read by.
    pub name: String,
    /// What it is.
    pub value: ValueId,
    /// Whether every rank has it, or only the one that makes it.
    pub everywhere: bool,
}

impl Output {
    /// A value that every rank has in the end.
    pub fn everywhere(name: impl Into<String>, value: ValueId) -> Self {
        Self { name: name.into(), value, everywhere: true }
    }

    /// A value that stays on the rank that makes it.
    pub fn local(name: impl Into<String>, value: ValueId) -> Self {
        Self { name: name.into(), value, everywhere: false }
    }
}

/// Lowers a graph along a schedule, for one rank.
///
/// # Errors
/// When the actions wait for each other in a circle, or for what is never made.
pub fn lower(lowering: &Lowering<'_>) -> Result<Program> {
    let mut lowerer = Lowerer::new(lowering)?;
    for (index, action) in lowering.table[lowering.rank].iter().enumerate() {
        lowerer.action(index, action);
    }
    lowerer.update();
    lowerer.finish();
    let mut program = lowerer.program;
    hoist(&mut program);
    order(&mut program);
    if lowering.target == Target::Cuda {
        fuse(&mut program);
    }
    Ok(program)
}

/// Stands for the sum over micro-batches where a key names a micro-batch.
const SUM: u32 = u32::MAX;

/// Where an instance of a root lies, and how often it will still be read.
#[derive(Debug, Clone, Copy)]
struct Placed {
    buffer: BufferId,
    reads_left: usize,
}

struct Lowerer<'a> {
    of: &'a Lowering<'a>,
    program: Program,
    alive: Vec<bool>,
    /// How often each root is read.
    reads: Reads<'a>,
    /// Roots made per micro-batch that the update reads summed.
    accumulated: Vec<bool>,
    /// Instances by (root, micro-batch); what exists once stands at micro-batch 0, sums at [`SUM`].
    placed: HashMap<(ValueId, u32), Placed>,
    /// Instances that wait for the backward otherwise than as they are, by (root, micro-batch).
    away: HashMap<(ValueId, u32), PutAway>,
    crossings: Crossings,
    /// The nodes to run of each place and phase, in the order of the graph.
    nodes: HashMap<(Place, Phase), Vec<NodeId>>,
    /// The action before which a message has been taken, by (root, micro-batch, receiver).
    taken: HashMap<(ValueId, u32, usize), usize>,
    /// Sends that nobody has waited for yet.
    sending: Vec<Sending>,
    /// Collectives that nobody has waited for yet.
    collecting: Vec<Collecting>,
    /// Nodes of the update that can run before the last action is over: what sums gradients over the data ranks.
    early: Vec<Early>,
    /// Values whose rows are counted.
    counts: Counts,
    /// Those that need not wait for the backward.
    let_go: LetGo,
}

impl<'a> Lowerer<'a> {
    fn new(of: &'a Lowering<'a>) -> Result<Self> {
        let graph = of.graph;
        let alive = alive_nodes(graph, of.outputs);
        let crossings = Crossings::new(graph, &alive, of.table, of.outputs);
        let taken = crossings.taken(graph, of.table, of.rank)?;
        let mut accumulated = vec![false; graph.values().len()];
        for node in graph.node_ids().filter(|n| alive[n.index()]).map(|n| graph.node(n)) {
            for root in node.inputs.iter().map(|&i| graph.value(i).root) {
                let per_micro_batch = graph.producer(root).is_some_and(|p| p.phase != Phase::Update);
                accumulated[root.index()] |= node.phase == Phase::Update && per_micro_batch;
            }
        }
        let counts = Counts::new(of, &alive, &crossings);
        let let_go = LetGo::new(of, &alive, &counts);
        let reads = Reads::new(of, &alive, &crossings, &let_go);
        let mut nodes: HashMap<(Place, Phase), Vec<NodeId>> = HashMap::new();
        for id in graph.node_ids().filter(|id| alive[id.index()]) {
            nodes.entry((graph.node(id).place, graph.node(id).phase)).or_default().push(id);
        }
        let program = Program { name: of.name.into(), ..Program::default() };
        let (placed, away) = (HashMap::new(), HashMap::new());
        let (sending, collecting, early) = (Vec::new(), Vec::new(), Vec::new());
        let mut lowerer = Self {
            of,
            program,
            alive,
            reads,
            accumulated,
            placed,
            away,
            crossings,
            nodes,
            taken,
            sending,
            collecting,
            early,
            counts,
            let_go,
        };
        lowerer.early = lowerer.early_nodes();
        Ok(lowerer)
    }

    /// F, B, I or W of one stage and micro-batch.
    fn action(&mut self, index: usize, action: &Action) {
        let graph = self.of.graph;
        let (first, micro_batch) = (self.program.steps.len(), action.micro_batch.0);
        let needs: Vec<ValueId> = self.crossings.needs(action).collect();
        for root in needs {
            if !self.placed.contains_key(&(root, micro_batch)) {
                self.receive((root, micro_batch), Some(micro_batch));
            }
        }
        self.wait_for_sends(|sending| sending.taken.is_some_and(|taken| taken <= index));
        let place = Place::Stage(action.stage);
        let of_phase = |&phase: &Phase| self.nodes.get(&(place, phase)).into_iter().flatten().copied();
        let mut nodes: Vec<NodeId> = phases(action.kind).iter().flat_map(of_phase).collect();
        nodes.sort_unstable();
        let mut made = Vec::new();
        let last = self.last_phases(index, action);
        for node in nodes.into_iter().map(|id| graph.node(id)) {
            self.restore(node, micro_batch);
            self.node(node, micro_batch);
            self.put_away(node, micro_batch);
            made.extend(&node.outputs);
            if last.contains(&node.phase) {
                self.complete(&node.outputs);
            }
        }
        for root in made {
            let to: Vec<usize> = self.crossings.per_micro_batch(root).collect();
            to.into_iter().for_each(|to| self.send((root, micro_batch), to, Some(micro_batch)));
        }
        if phases(action.kind).contains(&Phase::Forward) {
            self.put_away_rest(action.stage, micro_batch);
            self.drop_reborn(action.stage, micro_batch);
        }
        self.end_part(first, action.to_string(), Some(*action));
    }

    /// What happens once per step, after the last action.
    fn update(&mut self) {
        let graph = self.of.graph;
        let first = self.program.steps.len();
        self.wait_for_sends(|_| true);
        let per_step: Vec<ValueId> = self.crossings.all_per_step().collect();
        for root in per_step {
            let maker = graph.producer(root).expect("what crosses is made by a node");
            if maker.phase != Phase::Update && self.is_here(maker.place) {
                self.send_per_step(root);
            }
        }
        for id in graph.node_ids() {
            let node = graph.node(id);
            if node.phase != Phase::Update || !self.alive[id.index()] {
                continue;
            }
            let here = self.is_here(node.place);
            if here {
                for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                    self.receive_per_step(root);
                }
                self.node(node, 0);
                node.outputs.iter().for_each(|&output| self.send_per_step(output));
            }
            for &(input, _) in node.op.must_overwrite() {
                self.refresh(graph.value(node.inputs[input]).root, node.place, here);
            }
        }
        self.end_part(first, UPDATE.into(), None);
    }

    fn end_part(&mut self, first: usize, name: String, action: Option<Action>) {
        let last = self.program.steps.len();
        if last > first {
            self.program.parts.push(Part { steps: first..last, name, action });
        }
    }

    fn is_here(&self, place: Place) -> bool {
        self.crossings.ranks_of(place).contains(&self.of.rank)
    }

    fn node(&mut self, node: &Node, micro_batch: u32) {
        self.instruct(node, micro_batch, Life::First);
        self.settle(node, micro_batch);
    }

    /// Lays down a node, with what belongs behind it.
    fn instruct(&mut self, node: &Node, micro_batch: u32, life: Life) {
        let graph = self.of.graph;
        let roots: Vec<ValueId> = node.inputs.iter().map(|&input| graph.value(input).root).collect();
        let keys: Vec<_> = roots.iter().map(|&root| self.key(root, node.phase, micro_batch)).collect();
        keys.iter().for_each(|key| self.finish_with(*key));
        let mut inputs: Vec<Operand> = Vec::with_capacity(node.inputs.len());
        for &id in &node.inputs {
            let value = graph.value(id);
            let buffer = self.instance(value.root, node.phase, micro_batch);
            inputs.push(Operand::new(buffer, value));
        }
        let collective = collective_of(node);
        if collective.is_none() {
            keys.iter().for_each(|key| self.read(*key));
        }
        let mut outputs = Vec::with_capacity(node.outputs.len());
        let mut accumulate = 0;
        let (mut add_behind, mut copy_behind) = (Vec::new(), Vec::new());
        for (index, &id) in node.outputs.iter().enumerate() {
            let value = graph.value(id);
            if let Some(buffer) = life.only_if().and_then(|_| self.still_placed(id, micro_batch)) {
                outputs.push(Operand::new(buffer, value));
                continue;
            }
            let (per_micro_batch, per_step) =
                (self.reads.per_micro_batch(id, micro_batch, life), self.reads.per_step(id));
            let sum = self.placed.get(&(id, SUM)).map(|sum| sum.buffer);
            let buffer = match sum {
                Some(sum) if per_micro_batch == 0 && node.op.accumulates(index) => {
                    accumulate |= 1 << index;
                    sum
                }
                _ => {
                    let taken_over = self.overwritten(node, index, micro_batch, &mut inputs);
                    let buffer = taken_over.unwrap_or_else(|| self.fresh(node, id, index, micro_batch));
                    let reads_left = match (self.accumulated[id.index()], sum) {
                        (false, _) => per_micro_batch + per_step,
                        (true, Some(sum)) => {
                            add_behind.push((sum, buffer, value));
                            per_micro_batch
                        }
                        // The first micro-batch to come begins the sum: with its own bytes, unless they are still read.
                        (true, None) if per_micro_batch == 0 => {
                            self.placed.insert((id, SUM), Placed { buffer, reads_left: per_step });
                            usize::MAX
                        }
                        (true, None) => {
                            let sum = self.fresh(node, id, index, micro_batch);
                            self.placed.insert((id, SUM), Placed { buffer: sum, reads_left: per_step });
                            copy_behind.push((sum, buffer, value));
                            per_micro_batch
                        }
                    };
                    // What is still there from its first life stays where it is. What is made beside rows that come back, and
                    // not for them, is nobody's: whoever wants it has it made in any case.
                    let key = self.key(id, node.phase, micro_batch);
                    let is_wanted = life.only_if().is_none() || self.is_between(id, micro_batch);
                    if is_wanted && (life == Life::First || !self.placed.contains_key(&key)) {
                        self.placed.insert(key, Placed { buffer, reads_left });
                    }
                    buffer
                }
            };
            outputs.push(Operand::new(buffer, value));
        }
        let workspace = self.workspace(node, micro_batch);
        let work = match collective {
            Some(collective) => {
                let request = self.program.requests;
                self.program.requests += 1;
                let operands = inputs.iter().chain(&outputs).map(|o| Operand { overwritten_by: None, ..o.clone() });
                let (operands, makes) = (operands.collect(), node.outputs[0]);
                self.collecting.push(Collecting { request, operands, reads: keys, makes, only_if: life.only_if() });
                Work::Collective(collective, request)
            }
            None => Work::Compute(node.op.clone()),
        };
        let layer = node.layer.clone();
        let again = life == Life::Second;
        let counts = node.outputs.first().and_then(|&output| self.count_made(output, micro_batch));
        self.program.steps.push(Step {
            work,
            inputs,
            outputs,
            workspace,
            accumulate,
            micro_batch,
            layer,
            again,
            counts,
            only_if: life.only_if(),
        });
        for (sum, part, value) in copy_behind {
            let input = [(part, None)];
            self.behind(Arc::new(Contiguous), &input, sum, value, node, micro_batch);
        }
        for (sum, part, value) in add_behind {
            let inputs = [(sum, Some(0)), (part, None)];
            self.behind(Arc::new(Binary { kind: BinaryKind::Add }), &inputs, sum, value, node, micro_batch);
        }
    }

    /// A step behind a node's own, on instances of one of its outputs.
    fn behind(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[(BufferId, Option<usize>)],
        output: BufferId,
        value: &Value,
        node: &Node,
        micro_batch: u32,
    ) {
        let input = |&(buffer, overwritten_by)| Operand { overwritten_by, ..Operand::new(buffer, value) };
        let (inputs, outputs) = (inputs.iter().map(input).collect(), vec![Operand::new(output, value)]);
        let layer = node.layer.clone();
        self.program.steps.push(Step::plain(Work::Compute(op), inputs, outputs, micro_batch, layer));
    }

    /// The key of the instance of `root` that a node of `phase` sees.
    fn key(&self, root: ValueId, phase: Phase, micro_batch: u32) -> (ValueId, u32) {
        let once = match &self.of.graph.value(root).source {
            Source::Node { node, .. } => self.of.graph.node(*node).phase == Phase::Update,
            Source::Persistent { .. } | Source::Constant(_) => true,
            Source::Input { name } => name.starts_with(PER_STEP),
        };
        match phase {
            _ if once => (root, 0),
            Phase::Update if self.accumulated[root.index()] => (root, SUM),
            _ => (root, micro_batch),
        }
    }

    /// The buffer of an instance that is read, declared on first sight if it comes from outside.
    fn instance(&mut self, root: ValueId, phase: Phase, micro_batch: u32) -> BufferId {
        let key = self.key(root, phase, micro_batch);
        if let Some(placed) = self.placed.get(&key) {
            return placed.buffer;
        }
        let value = self.of.graph.value(root);
        let (tensor, role, held) = match &value.source {
            Source::Persistent { name, fill } => {
                let role = self.of.roles.get(&root).copied().unwrap_or(Role::Parameter);
                (name.clone(), role, Held::Always { fill: fill.clone(), spec: value.spec.clone() })
            }
            Source::Constant(number) => {
                // Programs share by name, and one number of two types is two tensors.
                let name = match value.spec.dtype {
                    DType::F32 => format!("constant {number}"),
                    other => format!("constant {number} ({})", other.as_str()),
                };
                let fill = Fill { init: Init::Const(*number), name: name.clone(), first: 0 };
                (name, Role::Input, Held::Always { fill, spec: value.spec.clone() })
            }
            Source::Input { name } => (name.clone(), Role::Input, Held::FromStart),
            Source::Node { .. } => unreachable!("inputs are made, or received, before they are read"),
        };
        let op = if matches!(held, Held::FromStart) { "input" } else { "" };
        let layer = match &value.source {
            Source::Persistent { .. } => tensor.rsplit_once('.').map_or("", |(layer, _)| layer).to_owned(),
            _ => String::new(),
        };
        let label = Label { tensor: tensor.clone(), op: op.into(), layer, role };
        let from_host = matches!(held, Held::FromStart);
        let buffer = self.program.add(value.spec.bytes(), label, held);
        // Persistent tensors are read by whoever comes next, so nothing may take their bytes.
        let (per_micro_batch, per_step) =
            (self.reads.per_micro_batch(root, micro_batch, Life::First), self.reads.per_step(root));
        let reads_left = if from_host { per_micro_batch + per_step } else { usize::MAX };
        self.placed.insert(key, Placed { buffer, reads_left });
        if from_host {
            let operand = Operand::new(buffer, value);
            let spec = value.spec.clone();
            self.program.inputs.push(Instance { name: tensor, micro_batch: key.1, operand, spec });
        }
        buffer
    }

    /// The bytes of an input that this output takes over, if any.
    fn overwritten(
        &mut self,
        node: &Node,
        output: usize,
        micro_batch: u32,
        inputs: &mut [Operand],
    ) -> Option<BufferId> {
        let out = &self.of.graph.value(node.outputs[output]).spec;
        if let Some(&(input, _)) = node.op.must_overwrite().iter().find(|pair| pair.1 == output) {
            inputs[input].overwritten_by = Some(output);
            return Some(inputs[input].buffer);
        }
        for &(input, _) in node.op.may_overwrite().iter().filter(|pair| pair.1 == output) {
            let root = self.of.graph.value(node.inputs[input]).root;
            let placed = self.placed[&self.key(root, node.phase, micro_batch)];
            let counted = self.counted(node.outputs[output], micro_batch);
            let operand = &inputs[input];
            let whole = operand.layout.is_contiguous()
                && operand.layout.start_offset() == 0
                && self.program.buffers[operand.buffer.index()].bytes == out.bytes()
                && self.program.buffers[operand.buffer.index()].counted == counted;
            let alone = inputs.iter().filter(|other| other.buffer == operand.buffer).count() == 1;
            let made_here = matches!(self.program.buffers[operand.buffer.index()].held, Held::No);
            if placed.reads_left == 0 && whole && alone && made_here && operand.overwritten_by.is_none() {
                let buffer = operand.buffer;
                inputs[input].overwritten_by = Some(output);
                return Some(buffer);
            }
        }
        None
    }

    fn fresh(&mut self, node: &Node, id: ValueId, output: usize, micro_batch: u32) -> BufferId {
        let of = node.op.name();
        let tensor = match (node.phase, self.accumulated[id.index()]) {
            (Phase::Update, _) | (_, true) => format!("{}/{of}.{output}", node.layer),
            _ => format!("{}/{of}.{output} of micro-batch {micro_batch}", node.layer),
        };
        let role = if self.accumulated[id.index()] { Role::Gradient } else { role_of_node(node.phase) };
        let label = Label { tensor, op: of.into(), layer: node.layer.to_string(), role };
        let counted = self.counted(id, micro_batch);
        let role = if counted.is_some() { Role::Routing } else { role };
        let buffer = self.program.add(self.of.graph.value(id).spec.bytes(), Label { role, ..label }, Held::No);
        self.program.buffers[buffer.index()].counted = counted;
        buffer
    }

    fn workspace(&mut self, node: &Node, micro_batch: u32) -> Vec<BufferId> {
        let graph = self.of.graph;
        let outputs = graph.specs(&node.outputs);
        let pieces = match self.of.target {
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
            self.program.add(bytes, Label { tensor, op, layer, role: Role::Workspace }, Held::No)
        };
        pieces.into_iter().enumerate().map(add).collect()
    }

    /// Names what the host reads, and holds it until the end.
    fn finish(&mut self) {
        let graph = self.of.graph;
        let first = self.program.steps.len();
        for output in self.of.outputs {
            let value = graph.value(output.value);
            if output.everywhere {
                self.receive_per_step(value.root);
            } else if graph.place_of(value.root).is_some_and(|place| !self.is_here(place)) {
                continue;
            }
            let buffer = self.instance(value.root, Phase::Update, 0);
            let held = &mut self.program.buffers[buffer.index()].held;
            if matches!(held, Held::No) {
                *held = Held::ToEnd;
            }
            let operand = Operand::new(buffer, value);
            let spec = value.spec.clone();
            self.program.outputs.push(Instance { name: output.name.clone(), micro_batch: 0, operand, spec });
        }
        self.finish_collectives(|_| true);
        self.wait_for_sends(|_| true);
        self.end_part(first, "finish".into(), None);
    }
}

/// Inputs whose name begins so are written once per step instead of once per micro-batch.
pub const PER_STEP: &str = "step.";

/// Nodes to run: those that the update's states or the outputs depend on, but for views, which do nothing.
pub fn alive_nodes(graph: &Graph, outputs: &[Output]) -> Vec<bool> {
    let mut wanted = vec![false; graph.values().len()];
    for id in outputs.iter().map(|output| output.value) {
        wanted[id.index()] = true;
        wanted[graph.value(id).root.index()] = true;
    }
    let mut alive = vec![false; graph.nodes().len()];
    for id in graph.node_ids().rev() {
        let node = graph.node(id);
        let changes_state = node.phase == Phase::Update && !node.op.must_overwrite().is_empty();
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
