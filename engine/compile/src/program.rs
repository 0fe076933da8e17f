//! What is executed, before anything has an address: operations over buffers, in order.

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_alloc::{Label, Role};
use gapless_communicator::Tag;
use gapless_graph::Op;
use gapless_graph::nn::Initializer;
use gapless_graph::ops::Collective;
use gapless_graph::{NodeId, Spec, Value, ValueId};
use gapless_parallel::{Action, Kind, Rates};

/// Index of a buffer in its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub(crate) u32);

impl BufferId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a buffer outside of the arena in its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub(crate) u32);

impl HostId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Bytes of the file that activations wait in, from the instruction that writes them to the one that reads them.
#[derive(Debug, Clone)]
pub struct HostBuffer {
    /// Size.
    pub bytes: u64,
}

/// Bytes that live from their first use to their last, unless something outside holds them longer.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// Size.
    pub bytes: u64,
    /// Names and role.
    pub label: Label,
    /// Who holds it beyond its uses.
    pub kind: BufferKind,
    /// If its rows are counted while the step runs: `bytes` is then the most that they may take.
    pub counted: Option<DynamicRows>,
}

/// One making of a value: of a micro-batch, or once per step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// The value: the root of all that show it.
    pub root: ValueId,
    /// The micro-batch; 0 for what exists once per step.
    pub micro_batch: u32,
    /// Whether it is the sum over micro-batches.
    pub is_sum: bool,
}

impl Origin {
    /// A value of a micro-batch.
    pub fn of(root: ValueId, micro_batch: u32) -> Self {
        Self { root, micro_batch, is_sum: false }
    }

    /// The sum over the micro-batches.
    pub fn sum(root: ValueId) -> Self {
        Self { root, micro_batch: 0, is_sum: true }
    }
}

/// How large a buffer is whose rows are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DynamicRows {
    /// Which of the program's counts it goes by.
    pub count: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Bytes if all ranks have the same number of rows.
    pub balanced: u64,
}

/// Who holds a buffer beyond its uses by instructions.
#[derive(Debug, Clone)]
pub enum BufferKind {
    /// Nobody.
    No,
    /// The run: parameters, optimizer states, constants. Shared between programs by name.
    Always {
        /// What it holds before the first step.
        fill: Initializer,
        /// What it was declared as; instructions may read it through views of other shapes.
        spec: Spec,
    },
    /// The runs of the programs that name it, which hand it on to each other. Shared between them by name; other programs may use
    /// its bytes.
    Cache,
    /// The host writes it before the program starts.
    FromStart,
    /// The host reads it after the program ends.
    ToEnd,
}

/// A tensor of an instruction.
#[derive(Debug, Clone)]
pub struct Operand {
    /// The buffer that holds it.
    pub buffer: BufferId,
    /// Where in the buffer, in elements.
    pub layout: Layout,
    /// Element type.
    pub dtype: DType,
    /// For inputs: the output that has the same bytes.
    pub overwritten_by: Option<usize>,
    /// The piece of the instruction's scratch that has it in f32.
    pub widened: Option<BufferId>,
}

impl Operand {
    /// A value as it lies in its root's buffer.
    pub fn new(buffer: BufferId, value: &Value) -> Self {
        Self { buffer, layout: value.layout.clone(), dtype: value.spec.dtype, overwritten_by: None, widened: None }
    }

    /// One f32.
    pub fn scalar(buffer: BufferId) -> Self {
        Self { buffer, layout: Layout::contiguous(()), dtype: DType::F32, overwritten_by: None, widened: None }
    }
}

/// A message between two ranks of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// The same on both sides, and different for any two messages that are under way between them at a time.
    pub tag: Tag,
    /// Which of the program's requests it is.
    pub request: usize,
}

/// What a step does.
#[derive(Debug, Clone)]
pub enum InstrKind {
    /// An operation of the graph.
    Compute(Arc<dyn Op>),
    /// Begins to send input 0, which stays as it is until the wait.
    Send(Message),
    /// Begins to receive output 0, which nobody touches until the wait.
    Receive(Message),
    /// Waits for a message; input 0 is what is sent or received.
    Wait(Message),
    /// Begins an operation of the data ranks together, as request number so-and-so. Its operands are left alone until it
    /// is finished.
    Collective(Collective, usize),
    /// Waits for a collective; its inputs are all that it read or wrote.
    Finish(usize),
    /// Copies input 0 out of the arena.
    Offload(HostId),
    /// Copies output 0 into the arena.
    Fetch(HostId),
    /// Looks for room for all rows of a count that are to wait for the backward. Output 0: a number, 1 if there is none.
    Vote(u32),
    /// Lets the rows of a count go if input 0, a number, is not 0.
    ApplyVote(u32),
}

impl InstrKind {
    /// The name that reports and errors use.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Compute(op) => op.name(),
            Self::Send(_) => "send",
            Self::Receive(_) => "receive",
            Self::Wait(_) => "wait",
            Self::Collective(collective, _) => collective.name(),
            Self::Finish(_) => "finish",
            Self::Offload(_) => "offload",
            Self::Fetch(_) => "fetch",
            Self::Vote(_) => "vote",
            Self::ApplyVote(_) => "apply_vote",
        }
    }
}

/// One instruction on buffers.
#[derive(Debug, Clone)]
pub struct Instr {
    /// What is done.
    pub kind: InstrKind,
    /// From what.
    pub inputs: Vec<Operand>,
    /// Into what.
    pub outputs: Vec<Operand>,
    /// The pieces of its scratch.
    pub workspace: Vec<BufferId>,
    /// Bit i: output i is added to instead of set.
    pub accumulate: u64,
    /// The micro-batch whose random numbers it draws.
    pub micro_batch: u32,
    /// The layer it belongs to.
    pub layer: Arc<str>,
    /// Whether the forward has done this before.
    pub rematerialized: bool,
    /// The count that the last element of output 0 is.
    pub counts: Option<u32>,
    /// If it is left out unless the rows of this count were let go.
    pub predicate: Option<u32>,
    /// The node of the graph that it was laid down for.
    pub node: Option<NodeId>,
}

/// A tensor that the host writes or reads by name.
#[derive(Debug, Clone)]
pub struct IoTensor {
    /// The name it was declared with.
    pub name: String,
    /// The micro-batch, for what exists once per micro-batch.
    pub micro_batch: u32,
    /// The tensor.
    pub operand: Operand,
    /// Shape and type.
    pub spec: Spec,
}

/// A list of operations over buffers. It *is* the lifetime of every buffer.
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// `train`, `evaluate`, ….
    pub name: String,
    /// Buffers, indexed by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Operations in order.
    pub instrs: Vec<Instr>,
    /// What the host writes before it starts.
    pub inputs: Vec<IoTensor>,
    /// What the host reads after it ends.
    pub outputs: Vec<IoTensor>,
    /// Messages that it sends or receives.
    pub requests: usize,
    /// Numbers of rows that are counted while it runs.
    pub counts: usize,
    /// Steps that belong together, in order.
    pub parts: Vec<Part>,
    /// What waits outside of the arena, indexed by [`HostId`].
    pub host: Vec<HostBuffer>,
}

/// Steps that belong together, e.g. `0F3`: an action with the messages around it, or what happens once per step; of either, a
/// piece, where one was moved into the other.
#[derive(Debug, Clone)]
pub struct Part {
    /// Which steps.
    pub instrs: std::ops::Range<usize>,
    /// What pictures and traces call it.
    pub name: String,
    /// The action, if it is one.
    pub action: Option<Action>,
}

/// What an instruction's time counts as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// The forward pass.
    Forward,
    /// The backward pass, with what it computes again.
    Backward,
    /// What is done once per step: norm, clipping, optimizer.
    Update,
    /// Messages and collectives: beginning them, and waiting.
    Communication,
}

impl Instr {
    /// A step without scratch that sets its outputs, for the first time.
    pub fn plain(
        kind: InstrKind,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
        micro_batch: u32,
        layer: Arc<str>,
    ) -> Self {
        let (workspace, accumulate, rematerialized, counts, predicate, node) = (Vec::new(), 0, false, None, None, None);
        Self {
            kind,
            inputs,
            outputs,
            workspace,
            accumulate,
            micro_batch,
            layer,
            rematerialized,
            counts,
            predicate,
            node,
        }
    }

    /// Shapes and types of operands, as operations are asked about them.
    pub fn specs(operands: &[Operand]) -> Vec<Spec> {
        operands.iter().map(|o| Spec { shape: o.layout.shape().clone(), dtype: o.dtype }).collect()
    }

    /// Arithmetic; none of what is only done if rows were let go.
    pub fn flops(&self) -> u64 {
        match &self.kind {
            InstrKind::Compute(op) if self.predicate.is_none() => {
                op.flops(&Self::specs(&self.inputs), &Self::specs(&self.outputs))
            }
            _ => 0,
        }
    }

    /// Modelled time on a device; none for messages, copies out of the arena and back, and what is only done if rows were let go.
    pub fn nanoseconds(&self, rates: &Rates) -> u64 {
        match &self.kind {
            InstrKind::Compute(op) if self.predicate.is_none() => {
                let (inputs, outputs) = (Self::specs(&self.inputs), Self::specs(&self.outputs));
                rates.nanoseconds(op.flops(&inputs, &outputs), op.bytes_moved(&inputs, &outputs))
            }
            _ => 0,
        }
    }
}

impl Program {
    /// What each instruction's time counts as.
    pub(crate) fn activities(&self) -> Vec<Activity> {
        let mut activities = vec![Activity::Update; self.instrs.len()];
        for part in &self.parts {
            let activity = match part.action {
                Some(Action { kind: Kind::Forward, .. }) => Activity::Forward,
                Some(_) => Activity::Backward,
                None => Activity::Update,
            };
            activities[part.instrs.clone()].fill(activity);
        }
        for (activity, instr) in activities.iter_mut().zip(&self.instrs) {
            if let InstrKind::Send(_)
            | InstrKind::Receive(_)
            | InstrKind::Wait(_)
            | InstrKind::Collective(..)
            | InstrKind::Finish(_) = instr.kind
            {
                *activity = Activity::Communication;
            }
        }
        activities
    }

    /// Arithmetic of one run.
    pub fn flops(&self) -> u64 {
        self.flops_of(0..self.instrs.len())
    }

    /// Arithmetic of what a run computes again.
    pub fn rematerialized_flops(&self) -> u64 {
        sum(self.instrs.iter().filter(|instr| instr.rematerialized))
    }

    /// Modelled time of one run on a device, and how much of it goes into what is computed again.
    pub fn nanoseconds(&self, rates: &Rates) -> [u64; 2] {
        let time = |instrs: &mut dyn Iterator<Item = &Instr>| {
            instrs.map(|instr| instr.nanoseconds(rates)).fold(0, u64::saturating_add)
        };
        [time(&mut self.instrs.iter()), time(&mut self.instrs.iter().filter(|instr| instr.rematerialized))]
    }

    /// Arithmetic of every action, in the order in which they begin: what a simulator makes durations of.
    pub fn action_flops(&self) -> Vec<(Action, u64)> {
        let mut flops: Vec<(Action, u64)> = Vec::new();
        for part in &self.parts {
            let Some(action) = part.action else { continue };
            let more = self.flops_of(part.instrs.clone());
            // What moved into an action has cut it in two.
            match flops.iter_mut().rev().find(|(known, _)| *known == action) {
                Some((_, flops)) => *flops = flops.saturating_add(more),
                None => flops.push((action, more)),
            }
        }
        flops
    }

    pub(crate) fn flops_of(&self, instrs: std::ops::Range<usize>) -> u64 {
        sum(self.instrs[instrs].iter())
    }

    /// Puts the steps in another order. What has moved is still of the part that it was of, and cuts in two the part that it has
    /// moved into.
    pub(crate) fn rearrange(&mut self, order: &[usize]) {
        let old = std::mem::take(&mut self.parts);
        let mut part_of = vec![usize::MAX; order.len()];
        for (index, part) in old.iter().enumerate() {
            let whole = old[..index].iter().position(|other| (other.action, &other.name) == (part.action, &part.name));
            part_of[part.instrs.clone()].fill(whole.unwrap_or(index));
        }
        let mut start = 0;
        for run in order.chunk_by(|&a, &b| part_of[a] == part_of[b]) {
            let instrs = start..start + run.len();
            start = instrs.end;
            self.parts.extend(old.get(part_of[run[0]]).map(|part| Part { instrs, ..part.clone() }));
        }
        let mut instrs: Vec<Option<Instr>> = std::mem::take(&mut self.instrs).into_iter().map(Some).collect();
        self.instrs = order.iter().filter_map(|&index| instrs[index].take()).collect();
    }

    /// Takes out the steps that are not kept, and buffers that nobody uses any more.
    pub(crate) fn keep(&mut self, is_kept: &[bool]) {
        // Kept steps in front of each.
        let mut before = vec![0; is_kept.len() + 1];
        for (at, &is_kept) in is_kept.iter().enumerate() {
            before[at + 1] = before[at] + usize::from(is_kept);
        }
        for part in &mut self.parts {
            part.instrs = before[part.instrs.start]..before[part.instrs.end];
        }
        let mut kept = is_kept.iter();
        self.instrs.retain(|_| *kept.next().expect("one for each step"));
        let mut is_used = vec![false; self.buffers.len()];
        self.each_use(|buffer| is_used[buffer.index()] = true);
        let mut ids = Vec::with_capacity(is_used.len());
        let mut next = 0;
        for &is_used in &is_used {
            ids.push(BufferId(next));
            next += u32::from(is_used);
        }
        let mut used = is_used.iter();
        self.buffers.retain(|_| *used.next().expect("one for each buffer"));
        self.each_use(|buffer| *buffer = ids[buffer.index()]);
    }

    /// Calls `f` with every use of a buffer, in order: an instruction's inputs, outputs and scratch.
    pub(crate) fn each_use(&mut self, mut f: impl FnMut(&mut BufferId)) {
        for instr in &mut self.instrs {
            instr.inputs.iter_mut().chain(&mut instr.outputs).for_each(|operand| f(&mut operand.buffer));
            instr.workspace.iter_mut().for_each(&mut f);
            instr.inputs.iter_mut().chain(&mut instr.outputs).filter_map(|o| o.widened.as_mut()).for_each(&mut f);
        }
        self.inputs.iter_mut().chain(&mut self.outputs).for_each(|instance| f(&mut instance.operand.buffer));
    }

    /// The number of a message or collective.
    pub(crate) fn add_request(&mut self) -> usize {
        self.requests += 1;
        self.requests - 1
    }

    /// A new buffer.
    pub fn add(&mut self, bytes: u64, label: Label, kind: BufferKind) -> BufferId {
        let id = BufferId(u32::try_from(self.buffers.len()).expect("fewer than 2^32 buffers"));
        self.buffers.push(Buffer { bytes, label, kind, counted: None });
        id
    }
}

/// Arithmetic of instructions. What an operation says of its own may be anything.
fn sum<'i>(instrs: impl Iterator<Item = &'i Instr>) -> u64 {
    instrs.map(Instr::flops).fold(0, u64::saturating_add)
}

/// The role of a buffer that holds a value made in a given phase.
pub fn role_of_node(phase: gapless_graph::Phase) -> Role {
    match phase {
        gapless_graph::Phase::BackwardWeight => Role::Gradient,
        _ => Role::Activation,
    }
}
