//! The program of one rank: a list of instructions over buffers that have no addresses yet.

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
    /// Returns the id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a buffer in the offload file of a program. On a GPU, the file may be host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OffloadId(pub(crate) u32);

impl OffloadId {
    /// Returns the id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A range of the offload file. It holds an activation from the copy out of the arena to the copy back into the arena.
#[derive(Debug, Clone)]
pub struct OffloadBuffer {
    /// Size in bytes.
    pub bytes: u64,
}

/// A piece of memory that is live from its first use to its last use, or longer if its [`kind`](Self::kind) says so.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// Size in bytes; the largest possible size if the rows are dynamic.
    pub bytes: u64,
    /// Names and role.
    pub label: Label,
    /// The extension of the buffer's lifetime beyond its uses by instructions.
    pub kind: BufferKind,
    /// The size per row, if the number of rows is known only while the step runs.
    pub dynamic_rows: Option<DynamicRows>,
}

/// One instance of a value. Most values have an instance per micro-batch, and some have one for the whole step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// The root of the value. All views of a root share its instance.
    pub root: ValueId,
    /// The micro-batch; 0 for values that exist once per step.
    pub micro_batch: u32,
    /// Whether this is the sum of the value over the micro-batches.
    pub is_sum: bool,
}

impl Instance {
    /// Returns the instance of a value in one micro-batch.
    pub fn micro_batch(root: ValueId, micro_batch: u32) -> Self {
        Self { root, micro_batch, is_sum: false }
    }

    /// Returns the sum of a value over the micro-batches, as an instance.
    pub fn sum(root: ValueId) -> Self {
        Self { root, micro_batch: 0, is_sum: true }
    }
}

/// Size of a buffer whose number of rows is known only while the step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DynamicRows {
    /// Index of the row count that gives the number of rows.
    pub count: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Bytes of the buffer if all ranks have the same number of rows.
    pub balanced: u64,
}

/// The extension of a buffer's lifetime beyond its uses by instructions.
#[derive(Debug, Clone)]
pub enum BufferKind {
    /// The lifetime does not extend: only instructions use the buffer.
    Temporary,
    /// The buffer lives for the whole run: parameters, optimizer states, constants. Programs that declare the same name
    /// share it.
    Persistent {
        /// Its contents before the first step.
        fill: Initializer,
        /// The shape and type with which the tensor was declared. Instructions may read it through views of other
        /// shapes.
        spec: Spec,
    },
    /// The buffer carries its contents from one run of a program to the next. All programs that declare the same name
    /// share the buffer. Programs that come before the first or after the last of these programs may use the bytes of
    /// the buffer.
    Cache,
    /// An input: the host writes it before the program starts.
    Input,
    /// An output: the host reads it after the program ends.
    Output,
}

/// A tensor of an instruction.
#[derive(Debug, Clone)]
pub struct Operand {
    /// The buffer that holds it.
    pub buffer: BufferId,
    /// Shape, strides and offset in the buffer, in elements.
    pub layout: Layout,
    /// Element type.
    pub dtype: DType,
    /// For inputs: the index of the output that overwrites this operand in place.
    pub overwritten_by: Option<usize>,
    /// The piece of the instruction's scratch that holds an f32 copy of the operand, if there is one.
    pub widened: Option<BufferId>,
}

impl Operand {
    /// Returns an operand that is a value, with the value's layout in the buffer of its root.
    pub fn new(buffer: BufferId, value: &Value) -> Self {
        Self { buffer, layout: value.layout.clone(), dtype: value.spec.dtype, overwritten_by: None, widened: None }
    }

    /// Returns an operand that is a single f32.
    pub fn scalar(buffer: BufferId) -> Self {
        Self { buffer, layout: Layout::contiguous(()), dtype: DType::F32, overwritten_by: None, widened: None }
    }
}

/// A message between two ranks of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// Identifies the message. Both ranks use the same tag. It is unique among the messages in flight between these two
    /// ranks.
    pub tag: Tag,
    /// Index of the request in its program.
    pub request: usize,
}

/// The kind of an instruction.
#[derive(Debug, Clone)]
pub enum InstrKind {
    /// An operation of the graph.
    Compute(Arc<dyn Op>),
    /// Starts sending input 0, which must not change until the matching wait.
    Send(Message),
    /// Starts receiving into output 0, which must not be used until the matching wait.
    Receive(Message),
    /// Waits for a send or receive to complete. Input 0 is the tensor that is sent or received.
    Wait(Message),
    /// Starts a collective. The second field is the index of its request. The operands must not be used until the
    /// matching `Finish`.
    Collective(Collective, usize),
    /// Waits for the collective with this request. The inputs are all operands of the collective.
    Finish(usize),
    /// Copies input 0 from the arena to the offload file. On a GPU, starts the copy; input 0 must not change until the
    /// matching `Offloaded`.
    Offload(OffloadId),
    /// Waits on a GPU for the copy that `Offload` has started. Input 0 is the copied tensor.
    Offloaded(OffloadId),
    /// Copies output 0 from the offload file to the arena. On a GPU, starts the copy; output 0 must not be used until
    /// the matching `Fetched`.
    Fetch(OffloadId),
    /// Waits on a GPU for the copy that `Fetch` has started. Input 0 is the copied tensor.
    Fetched(OffloadId),
    /// Tries to reserve arena space, until the backward, for all rows of this row count. Output 0 is an f32: 1 if there
    /// is no space, and 0 if the space is reserved.
    Vote(u32),
    /// Evicts the rows of this row count if input 0, the sum of all ranks' votes, is not 0.
    ApplyVote(u32),
}

impl InstrKind {
    /// Returns the name that reports and errors use.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Compute(op) => op.name(),
            Self::Send(_) => "send",
            Self::Receive(_) => "receive",
            Self::Wait(_) => "wait",
            Self::Collective(collective, _) => collective.name(),
            Self::Finish(_) => "finish",
            Self::Offload(_) => "offload",
            Self::Offloaded(_) => "offloaded",
            Self::Fetch(_) => "fetch",
            Self::Fetched(_) => "fetched",
            Self::Vote(_) => "vote",
            Self::ApplyVote(_) => "apply_vote",
        }
    }
}

/// One instruction on buffers.
#[derive(Debug, Clone)]
pub struct Instr {
    /// The operation, message or copy.
    pub kind: InstrKind,
    /// Tensors that the instruction reads.
    pub inputs: Vec<Operand>,
    /// Tensors that the instruction writes.
    pub outputs: Vec<Operand>,
    /// Pieces of scratch memory.
    pub workspace: Vec<BufferId>,
    /// Bit mask: if bit i is set, output i is accumulated into instead of overwritten.
    pub accumulate: u64,
    /// The micro-batch, which is part of the key of the instruction's random numbers.
    pub micro_batch: u32,
    /// Name of the layer to which the instruction belongs.
    pub layer: Arc<str>,
    /// Whether the instruction recomputes a value that the forward has already computed.
    pub rematerialized: bool,
    /// Index of the row count that the instruction produces, as the last element of output 0.
    pub defines_count: Option<u32>,
    /// If this is the index of a row count, the instruction runs only if the rows of that count were evicted.
    pub predicate: Option<u32>,
    /// The graph node from which the instruction was lowered.
    pub node: Option<NodeId>,
}

/// A tensor that the host writes or reads by name.
#[derive(Debug, Clone)]
pub struct IoTensor {
    /// The name with which the tensor was declared.
    pub name: String,
    /// The micro-batch; 0 for tensors that exist once per step.
    pub micro_batch: u32,
    /// The tensor in its buffer.
    pub operand: Operand,
    /// Shape and type.
    pub spec: Spec,
}

/// A list of instructions over buffers. The positions at which a buffer is used in this list define the buffer's
/// lifetime.
#[derive(Debug, Clone, Default)]
pub struct Program {
    /// Name: `train`, `evaluate`, ….
    pub name: String,
    /// Buffers, indexed by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Instructions in execution order.
    pub instrs: Vec<Instr>,
    /// Tensors that the host writes before the program starts.
    pub inputs: Vec<IoTensor>,
    /// Tensors that the host reads after the program ends.
    pub outputs: Vec<IoTensor>,
    /// Number of requests: messages and collectives together.
    pub requests: usize,
    /// Number of row counts that are determined while the program runs.
    pub row_counts: usize,
    /// Named ranges of instructions, in order.
    pub parts: Vec<Part>,
    /// Buffers in the offload file, indexed by [`OffloadId`].
    pub offload: Vec<OffloadBuffer>,
}

/// Consecutive instructions that belong together, e.g. `0F3`: an action with its messages, or work that is done once
/// per step. An action has several parts if a pass has moved other instructions into the middle of the action.
#[derive(Debug, Clone)]
pub struct Part {
    /// The instructions of the part.
    pub instrs: std::ops::Range<usize>,
    /// The name shown in pictures and traces.
    pub name: String,
    /// The action to which the part belongs. `None` for work that is done once per step.
    pub action: Option<Action>,
}

/// The category to which an instruction's time is attributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// The forward pass.
    Forward,
    /// The backward pass, recomputation included.
    Backward,
    /// Work done once per step: norm, clipping, optimizer.
    Update,
    /// Starting messages and collectives, and waiting for them.
    Communication,
}

impl Instr {
    /// Creates an instruction without scratch, accumulation or predicate that is not a recomputation.
    pub fn plain(
        kind: InstrKind,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
        micro_batch: u32,
        layer: Arc<str>,
    ) -> Self {
        let (workspace, accumulate, rematerialized, defines_count, predicate, node) =
            (Vec::new(), 0, false, None, None, None);
        Self {
            kind,
            inputs,
            outputs,
            workspace,
            accumulate,
            micro_batch,
            layer,
            rematerialized,
            defines_count,
            predicate,
            node,
        }
    }

    /// Returns the shapes and types of operands, as the methods of operations take them.
    pub fn specs(operands: &[Operand]) -> Vec<Spec> {
        operands.iter().map(|o| Spec { shape: o.layout.shape().clone(), dtype: o.dtype }).collect()
    }

    /// Returns the floating-point operations of the instruction. An instruction that runs only if rows were evicted
    /// counts as 0.
    pub fn flops(&self) -> u64 {
        match &self.kind {
            InstrKind::Compute(op) if self.predicate.is_none() => {
                op.flops(&Self::specs(&self.inputs), &Self::specs(&self.outputs))
            }
            _ => 0,
        }
    }

    /// Returns the modelled time of the instruction's arithmetic and memory traffic on a device. It is 0 for messages,
    /// offload copies, and instructions that run only if rows were evicted.
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
    /// Adds a buffer of `bytes` bytes to the offload file.
    ///
    /// # Panics
    /// Panics if the file has 2^32 buffers.
    pub fn add_offload(&mut self, bytes: u64) -> OffloadId {
        let id = OffloadId(u32::try_from(self.offload.len()).expect("fewer than 2^32 buffers"));
        self.offload.push(OffloadBuffer { bytes });
        id
    }

    /// Returns the activity of each instruction.
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

    /// Returns the floating-point operations of one run.
    pub fn flops(&self) -> u64 {
        self.flops_of(0..self.instrs.len())
    }

    /// Returns the floating-point operations spent on recomputation in one run.
    pub fn rematerialized_flops(&self) -> u64 {
        sum(self.instrs.iter().filter(|instr| instr.rematerialized))
    }

    /// Returns the modelled time of one run on a device, and how much of that time is spent on recomputation.
    pub fn nanoseconds(&self, rates: &Rates) -> [u64; 2] {
        let time = |instrs: &mut dyn Iterator<Item = &Instr>| {
            instrs.map(|instr| instr.nanoseconds(rates)).fold(0, u64::saturating_add)
        };
        [time(&mut self.instrs.iter()), time(&mut self.instrs.iter().filter(|instr| instr.rematerialized))]
    }

    /// Returns the floating-point operations of every action, in the order in which actions start. The simulator
    /// derives durations from them.
    pub fn action_flops(&self) -> Vec<(Action, u64)> {
        let mut flops: Vec<(Action, u64)> = Vec::new();
        for part in &self.parts {
            let Some(action) = part.action else { continue };
            let more = self.flops_of(part.instrs.clone());
            // An action has several parts if other instructions were moved into it.
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

    /// Reorders the instructions. A moved instruction keeps its part, and splits the part into which it has moved.
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

    /// Removes the instructions for which `is_kept` is false, and the buffers that are then unused.
    pub(crate) fn keep(&mut self, is_kept: &[bool]) {
        // The number of kept instructions before each instruction.
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

    /// Returns the index of a new message or collective.
    pub(crate) fn add_request(&mut self) -> usize {
        self.requests += 1;
        self.requests - 1
    }

    /// Adds a buffer, and returns its id.
    pub fn add(&mut self, bytes: u64, label: Label, kind: BufferKind) -> BufferId {
        let id = BufferId(u32::try_from(self.buffers.len()).expect("fewer than 2^32 buffers"));
        self.buffers.push(Buffer { bytes, label, kind, dynamic_rows: None });
        id
    }
}

/// Sums up the floating-point operations of instructions. The sum saturates, because a user's operation may report any
/// number.
fn sum<'i>(instrs: impl Iterator<Item = &'i Instr>) -> u64 {
    instrs.map(Instr::flops).fold(0, u64::saturating_add)
}

/// Returns the role of a buffer whose value is computed in the given phase.
pub fn role_of_node(phase: gapless_graph::Phase) -> Role {
    match phase {
        gapless_graph::Phase::BackwardWeight => Role::Gradient,
        _ => Role::Activation,
    }
}
