//! Simulates when each action of a step happens on a device.
//!
//! In: the programs of all pipeline ranks, and a device. Out: the timeline of `parallel`'s simulator in nanoseconds.
//! Messages between stages occupy the link, not the ranks. Computation hides a part of the collectives over data ranks,
//! but no part of the exchange of experts' rows, and no part of copies to the offload file and from it, because the
//! runtime waits for each of these copies.

use std::collections::{BTreeMap, HashMap};

use gapless_alloc::lower_bound;
#[cfg(doc)]
use gapless_engine::compile::step::RankSketch;
use gapless_engine::compile::{Instr, InstrKind, Operand, Program, table};
use gapless_engine::ops::Collective;
use gapless_parallel::{
    Action, Axes, Cell, Costs, Durations, Error, Kind, Mesh, MicroBatch, Shape, StageId, Stuck, Timeline, simulate,
};

use super::device::Reach;
use super::{CostModel, Precision, Step, ThisMachine};

/// The simulated times of a step.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Timeline of one model replica in nanoseconds. Each row ends with the rank's update.
    pub timeline: Timeline,
    /// Costs of each stage in nanoseconds: the means over its actions. A backward that is not split counts as
    /// `backward_input`.
    pub stages: Vec<Costs>,
    /// By rank, the nanoseconds of the work that the rank does once per step.
    pub updates: Vec<u64>,
    /// Nanoseconds that each rank spends on recomputation.
    pub recomputed: Vec<u64>,
    /// Nanoseconds that each rank spends on copies to the offload file and from it.
    pub offloaded: Vec<u64>,
}

/// The time for which one rank is busy in a step, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BusyTime {
    /// Operations, the part of collectives that computation does not hide, and copies to the offload file and from it.
    /// Messages between stages and the time that the rank waits are not included.
    pub all: u64,
    /// The part that is spent on recomputation.
    pub recomputed: u64,
    /// The part that is spent on copies to the offload file and from it.
    pub offloaded: u64,
}

impl BusyTime {
    /// Recomputation time divided by the time of everything else.
    pub fn overhead(&self) -> f64 {
        self.recomputed as f64 / self.all.saturating_sub(self.recomputed).max(1) as f64
    }
}

/// The reason why a step cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum TimingError {
    /// The schedule does not exist for the step's shape.
    #[error(transparent)]
    Schedule(#[from] Error),
    /// The actions wait for each other in a cycle.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

impl Timing {
    /// Returns the time from the start of the first action to the end of the last.
    pub fn nanoseconds(&self) -> u64 {
        self.timeline.makespan()
    }

    /// Recomputation time divided by the time of everything else, over all ranks.
    pub fn overhead(&self) -> f64 {
        let all = self.timeline.ranks.iter().flatten().map(|span| span.end - span.start).sum();
        let [recomputed, offloaded] = [&self.recomputed, &self.offloaded].map(|ranks| ranks.iter().sum());
        BusyTime { all, recomputed, offloaded }.overhead()
    }
}

impl Step {
    /// Simulates the step on its device. `programs` has the programs of all pipeline ranks.
    ///
    /// # Errors
    /// Returns an error if the schedule does not exist for the step's shape.
    pub fn timing(&self, programs: &[Program]) -> Result<Timing, TimingError> {
        self.simulated(self.measured(&RankProgram::all(programs)))
    }

    /// Simulates the step with a cost model of your own in place of the step's device.
    ///
    /// # Errors
    /// Returns the errors of [`Self::timing`].
    pub fn timing_with(&self, programs: &[Program], costs: &dyn CostModel) -> Result<Timing, TimingError> {
        self.simulated(ActionDurations::of(&RankProgram::all(programs), costs, self.precision(), self.network()))
    }

    /// Simulates the step at the rates of its device's profile. This is [`Self::timing`], except on `this-machine`, where
    /// no operation is run.
    ///
    /// # Errors
    /// Returns the errors of [`Self::timing`].
    pub fn timing_by_rates(&self, programs: &[Program]) -> Result<Timing, TimingError> {
        self.timing_with(programs, &self.device)
    }

    /// Returns the time for which a rank is busy, at the rates of the device's profile.
    pub fn busy_time(&self, program: &Program) -> BusyTime {
        let programs = RankProgram::all(std::slice::from_ref(program));
        let measured = ActionDurations::of(&programs, &self.device, self.precision(), self.network());
        let sum = |of: &HashMap<Action, u64>| of.values().sum::<u64>();
        BusyTime {
            all: sum(&measured.actions) + measured.updates.iter().sum::<u64>(),
            recomputed: sum(&measured.recomputed),
            offloaded: sum(&measured.offloaded),
        }
    }

    fn network(&self) -> Network {
        Network { mesh: self.options.mesh, node: self.device.node, known: HashMap::new() }
    }

    pub(super) fn measured(&self, programs: &[RankProgram<'_>]) -> ActionDurations {
        let measured_by =
            |costs: &dyn CostModel| ActionDurations::of(programs, costs, self.precision(), self.network());
        match self.machine(programs) {
            Some(machine) => measured_by(&machine),
            None => measured_by(&self.device),
        }
    }

    /// If the step's device is `this-machine`, returns the cost model that measures operations on this machine, whose
    /// cores the ranks share. Otherwise returns `None`.
    fn machine(&self, programs: &[RankProgram<'_>]) -> Option<ThisMachine> {
        if !self.device.is_measured() {
            return None;
        }
        let ranks = self.options.mesh.ranks().unwrap_or(1);
        let threads = match self.threads {
            0 => (rayon::current_num_threads() / ranks).max(1),
            threads => threads,
        };
        let alive = |program: &Program| table(program).map_or(0, |table| lower_bound(&table));
        Some(ThisMachine::new(
            ranks,
            threads,
            programs.iter().map(|rank| alive(rank.program)).max().unwrap_or(0),
            self.device.disk,
        ))
    }

    /// Simulates the step with known durations.
    pub(super) fn simulated(&self, measured: ActionDurations) -> Result<Timing, TimingError> {
        let shape = self.shape();
        let actions = self.options.pipeline.schedule.actions(&shape)?;
        let by_rank = |of: &HashMap<Action, u64>| {
            let time = |action: &Action| of.get(&measured.representative_of(*action)).copied().unwrap_or(0);
            actions.iter().map(|row| row.iter().map(time).sum()).collect()
        };
        let (recomputed, offloaded) = (by_rank(&measured.recomputed), by_rank(&measured.offloaded));
        let mut table = self.options.pipeline.schedule.table(&shape)?;
        for (rank, row) in table.iter_mut().enumerate() {
            row.push(Cell::Update(StageId(rank as u32)));
        }
        let timeline = simulate(&table, &measured)?;
        let stages = (0..shape.ranks * shape.chunks).map(|stage| measured.mean(StageId(stage))).collect();
        Ok(Timing { timeline, stages, updates: measured.updates, recomputed, offloaded })
    }

    /// The shape of the step's pipeline.
    pub fn shape(&self) -> Shape {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Shape {
            ranks: number(self.options.mesh.pipeline),
            chunks: number(self.options.pipeline.chunks),
            micro_batches: number(self.options.micro_batches),
        }
    }
}

/// The program of a pipeline rank, or that of an equal rank ([`RankSketch`]).
#[derive(Debug)]
pub(super) struct RankProgram<'p> {
    pub program: &'p Program,
    pub rank: usize,
    /// The rank from which the program is.
    pub like: usize,
    /// The stages of this rank, by those of the rank from which the program is; empty if they are the same.
    pub stages: HashMap<StageId, StageId>,
}

impl<'p> RankProgram<'p> {
    /// The programs of all ranks, in order.
    fn all(programs: &'p [Program]) -> Vec<Self> {
        let of_rank = |(rank, program)| Self { program, rank, like: rank, stages: HashMap::new() };
        programs.iter().enumerate().map(of_rank).collect()
    }

    /// Returns this rank's action for an action of the program.
    pub fn action(&self, action: Action) -> Action {
        Action { stage: self.stages.get(&action.stage).copied().unwrap_or(action.stage), ..action }
    }

    /// Returns the rank to which this rank sends what the program sends to `peer` in an action.
    fn peer(&self, peer: usize) -> usize {
        peer + self.rank - self.like
    }
}

/// Durations of actions, computed from programs.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct ActionDurations {
    pub actions: HashMap<Action, u64>,
    pub transfers: HashMap<Action, u64>,
    pub updates: Vec<u64>,
    /// For each action, the time that is spent on recomputation.
    pub recomputed: HashMap<Action, u64>,
    /// For each action, the time that is spent on copies to the offload file and from it.
    pub offloaded: HashMap<Action, u64>,
    /// Work that a rank does once per step, inside the last action of a kind: the time, by rank and action.
    pub early: HashMap<(usize, Action), u64>,
    /// The same work by action, if the durations of only one micro-batch are known.
    pub once: HashMap<Action, u64>,
    /// If the durations of only one micro-batch are known, this micro-batch. Its durations then apply to all
    /// micro-batches.
    pub all_as: Option<MicroBatch>,
}

impl Durations for ActionDurations {
    fn action(&self, action: Action) -> u64 {
        let [of_all, once] = [self.actions.get(&self.representative_of(action)), self.once.get(&action)];
        of_all.into_iter().chain(once).sum()
    }

    fn transfer(&self, from: Action) -> u64 {
        self.transfers.get(&self.representative_of(from)).copied().unwrap_or(0)
    }

    /// Returns the duration of a rank's update. `rank` holds the number of the rank, because each rank has one update
    /// for all of its stages.
    fn update(&self, rank: StageId) -> u64 {
        self.updates.get(rank.0 as usize).copied().unwrap_or(0)
    }
}

/// The copies of offloaded activations that a GPU makes one after another while it computes.
#[derive(Debug, Default)]
struct HiddenCopies {
    /// The time from the start of the program, in nanoseconds.
    now: u64,
    /// The end of the last copy, and of each copy by its buffer and direction.
    last: u64,
    ends: HashMap<(usize, bool), u64>,
}

impl HiddenCopies {
    /// Returns `None` if the program does not wait for copies, because each copy ends before the next instruction.
    fn of(program: &Program) -> Option<Self> {
        let waits =
            program.instrs.iter().any(|instr| matches!(instr.kind, InstrKind::Offloaded(_) | InstrKind::Fetched(_)));
        waits.then(Self::default)
    }

    /// Starts a copy, which takes `copy` nanoseconds. Returns 0, the time that computation waits.
    fn start(&mut self, kind: &InstrKind, copy: u64) -> u64 {
        self.last = self.last.max(self.now).saturating_add(copy);
        self.ends.extend(copy_of(kind).map(|key| (key, self.last)));
        0
    }

    /// Returns the time that computation waits for a copy.
    fn end(&self, kind: &InstrKind) -> u64 {
        let end = copy_of(kind).and_then(|key| self.ends.get(&key));
        end.map_or(0, |end| end.saturating_sub(self.now))
    }
}

/// Returns the buffer of a copy, and whether it is copied back.
fn copy_of(kind: &InstrKind) -> Option<(usize, bool)> {
    match kind {
        InstrKind::Offload(id) | InstrKind::Offloaded(id) => Some((id.index(), false)),
        InstrKind::Fetch(id) | InstrKind::Fetched(id) => Some((id.index(), true)),
        _ => None,
    }
}

impl ActionDurations {
    fn representative_of(&self, action: Action) -> Action {
        Action { micro_batch: self.all_as.unwrap_or(action.micro_batch), ..action }
    }

    fn of(programs: &[RankProgram<'_>], device: &dyn CostModel, precision: Precision, mut network: Network) -> Self {
        let mut measured = Self::default();
        let mut known = Known::default();
        for of_rank in programs {
            let &RankProgram { program, rank, .. } = of_rank;
            let mut update = 0;
            let mut hidden = HiddenCopies::of(program);
            let meanwhile = computed_meanwhile(program, |instr| known.nanoseconds(instr, device, precision));
            for part in &program.parts {
                let action = part.action.map(|action| of_rank.action(action));
                let mut sent = BTreeMap::new();
                let (mut time, mut again, mut copies, mut early) = (0, 0, 0, 0);
                for (index, instr) in part.instrs.clone().zip(&program.instrs[part.instrs.clone()]) {
                    let here = match &instr.kind {
                        InstrKind::Compute(_) => known.nanoseconds(instr, device, precision),
                        InstrKind::Collective(collective, _) => {
                            let meanwhile = meanwhile.get(&index).copied();
                            let network = (&mut network, rank);
                            collective_nanoseconds(program, instr, (*collective, meanwhile), device, network)
                        }
                        InstrKind::Send(message) if action.is_some() => {
                            let peer = of_rank.peer(message.peer);
                            let reach = Reach::of_message(network.mesh, [rank, peer], network.node);
                            sent.entry(peer).or_insert((reach, 0)).1 += bytes(program, &instr.inputs);
                            0
                        }
                        InstrKind::Offload(id) | InstrKind::Fetch(id) => {
                            let copy = device.offload(program.offload[id.index()].bytes);
                            let waiting = hidden.as_mut().map_or(copy, |hidden| hidden.start(&instr.kind, copy));
                            copies += waiting;
                            waiting
                        }
                        InstrKind::Offloaded(_) | InstrKind::Fetched(_) => {
                            let waiting = hidden.as_ref().map_or(0, |hidden| hidden.end(&instr.kind));
                            copies += waiting;
                            waiting
                        }
                        _ => 0,
                    };
                    if let Some(hidden) = &mut hidden {
                        hidden.now += here;
                    }
                    time += here;
                    let is_again = instr.rematerialized && matches!(instr.kind, InstrKind::Compute(_));
                    again += if is_again { here } else { 0 };
                    // Nodes of the update are lowered once, with the first micro-batch.
                    let is_early = action.is_some_and(|action| action.micro_batch.0 != instr.micro_batch);
                    early += if is_early { here } else { 0 };
                }
                match action {
                    // An action may have several parts, because other instructions were moved into the middle of the
                    // action.
                    Some(action) => {
                        *measured.actions.entry(action).or_default() += time;
                        *measured.recomputed.entry(action).or_default() += again;
                        *measured.offloaded.entry(action).or_default() += copies;
                        if early > 0 {
                            *measured.early.entry((rank, action)).or_default() += early;
                        }
                        if !sent.is_empty() {
                            let transfer: u64 =
                                sent.values().map(|&(reach, bytes)| device.transfer(bytes, reach)).sum();
                            measured.transfers.entry(action).and_modify(|all| *all += transfer).or_insert(transfer);
                        }
                    }
                    None => update += time,
                }
            }
            measured.updates.push(update);
        }
        measured
    }

    /// Makes the durations of one micro-batch those of all, without the work that a rank does once per step.
    pub(super) fn all_as(mut self, micro_batch: MicroBatch) -> Self {
        for ((_, action), time) in &self.early {
            *self.actions.entry(*action).or_default() -= time;
        }
        Self { all_as: Some(micro_batch), ..self }
    }

    /// Adds the work that each rank does once per step to the last action of its kind in a table of actions.
    pub(super) fn with_once(mut self, table: &[Vec<Action>]) -> Self {
        for (&(rank, Action { kind, stage, .. }), &time) in &self.early {
            let mut actions = table[rank].iter().rev();
            if let Some(&last) = actions.find(|action| (action.kind, action.stage) == (kind, stage)) {
                *self.once.entry(last).or_default() += time;
            }
        }
        self
    }

    /// Returns the costs of a stage, which are the means over its actions.
    fn mean(&self, stage: StageId) -> Costs {
        let mean_of = |kind, map: &HashMap<Action, u64>| {
            let is_it = |action: &Action| {
                (action.stage, action.kind) == (stage, kind) && self.representative_of(*action) == *action
            };
            let of_kind = map.iter().filter(|(action, _)| is_it(action));
            let (sum, count): (u64, u64) = of_kind.fold((0, 0), |(sum, count), (_, time)| (sum + time, count + 1));
            sum.checked_div(count).unwrap_or(0)
        };
        let forward = mean_of(Kind::Forward, &self.actions);
        let backward_input = mean_of(Kind::BackwardInput, &self.actions) + mean_of(Kind::Backward, &self.actions);
        let backward_weight = mean_of(Kind::BackwardWeight, &self.actions);
        let transfer = mean_of(Kind::Forward, &self.transfers);
        Costs {
            forward,
            backward_input,
            backward_weight,
            overlapped: forward + backward_input + backward_weight,
            transfer,
        }
    }
}

/// Cached times of operations. A node runs once per micro-batch, always on the same shapes.
#[derive(Debug, Default)]
struct Known(HashMap<(usize, u64, bool), u64>);

impl Known {
    fn nanoseconds(&mut self, instr: &Instr, device: &dyn CostModel, precision: Precision) -> u64 {
        let InstrKind::Compute(op) = &instr.kind else { return 0 };
        // All instructions of a node have the same operation. Instructions that lowering has added have no node, and
        // their times are not cached.
        let Some(node) = instr.node else { return device.nanoseconds(instr, precision) };
        let address = std::sync::Arc::as_ptr(op).cast::<()>() as usize;
        let key = (address, node.index() as u64, instr.predicate.is_some());
        *self.0.entry(key).or_insert_with(|| device.nanoseconds(instr, precision))
    }
}

/// The distribution of a mesh's ranks over nodes.
struct Network {
    mesh: Mesh,
    /// Number of ranks of a node.
    node: usize,
    known: HashMap<(usize, Axes), Reach>,
}

impl Network {
    fn reach(&mut self, stage: usize, axes: Axes) -> Reach {
        let &mut Self { mesh, node, .. } = self;
        *self.known.entry((stage, axes)).or_insert_with(|| Reach::of_group(mesh, stage, axes, node))
    }
}

/// Returns the bytes of these tensors. If the number of routed rows is only known at run time, balanced routing is
/// assumed.
fn bytes(program: &Program, operands: &[Operand]) -> u64 {
    let bytes_of = |operand: &Operand| {
        let buffer = &program.buffers[operand.buffer.index()];
        let tensor = (operand.layout.shape().elem_count() * operand.dtype.size_in_bytes()) as u64;
        buffer.dynamic_rows.map_or(tensor, |counted| counted.balanced.min(tensor))
    };
    operands.iter().map(bytes_of).sum()
}

/// Returns, for each collective over shard ranks, the time of the operations between its start and its wait. The start and the
/// wait depend on the numbers of such collectives that may be under way.
fn computed_meanwhile(program: &Program, mut nanoseconds: impl FnMut(&Instr) -> u64) -> HashMap<usize, u64> {
    let (mut now, mut started, mut meanwhile) = (0, HashMap::new(), HashMap::new());
    for (index, instr) in program.instrs.iter().enumerate() {
        match &instr.kind {
            InstrKind::Collective(collective, request) if collective.axes() == Axes::SHARD => {
                started.insert(*request, (index, now));
            }
            InstrKind::Finish(request) => {
                meanwhile.extend(started.remove(request).map(|(start, before)| (start, now - before)));
            }
            InstrKind::Compute(_) => now += nanoseconds(instr),
            _ => {}
        }
    }
    meanwhile
}

/// Returns the time of a collective of a pipeline stage that computation does not hide. Ring algorithms are assumed, as in
/// NCCL's documentation. Collectives over tensor or context ranks alone are in the path of the computation, so nothing
/// hides them. If the time of the operations meanwhile is given, they hide at most that.
fn collective_nanoseconds(
    program: &Program,
    instr: &Instr,
    (collective, meanwhile): (Collective, Option<u64>),
    device: &dyn CostModel,
    (network, stage): (&mut Network, usize),
) -> u64 {
    let axes = collective.axes();
    let ranks = network.mesh.size(axes);
    let (input, output) = (instr.inputs.get(..1).unwrap_or_default(), instr.outputs.get(..1).unwrap_or_default());
    let (whole, ways, can_hide) = match collective {
        Collective::AllReduce { .. } => (bytes(program, input), 2.0, true),
        Collective::ReduceScatter { .. } => (bytes(program, input), 1.0, true),
        Collective::AllGather { .. } | Collective::Refill { .. } => (bytes(program, output), 1.0, true),
        Collective::AllToAll { .. } | Collective::AllToAllRows { .. } => (bytes(program, output), 1.0, false),
    };
    if ranks < 2 {
        return 0;
    }
    let sent = ways * whole as f64 * (ranks - 1) as f64 / ranks as f64;
    let reach = network.reach(stage, axes);
    let can_hide = can_hide && axes & Axes::TENSOR == Axes::NONE && axes != Axes::CONTEXT;
    let whole = device.collective(sent, reach, false);
    let hidden = whole - device.collective(sent, reach, can_hide).min(whole);
    whole - meanwhile.map_or(hidden, |meanwhile| hidden.min(meanwhile))
}
