//! Determines which values cross between ranks, and when the sender may free the buffer of a sent value.
//!
//! - In: a graph whose nodes have places, and the actions of all ranks.
//! - Out: for each value, the other ranks that read the value. For each message, the first action of the sender before
//!   which, according to the schedule, the message has certainly been received. A wait that is placed before this
//!   action never blocks.
//! - Never: a buffer or an instruction.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gapless_communicator::{Direction, Tag};
use gapless_graph::{Graph, Node, Phase, Place, Source, ValueId};
use gapless_parallel::{Action, Kind, StageId};

use crate::error::{Error, Result};
use crate::lowering::Output;

/// Returns the phases that an action of this kind runs.
pub fn phases(kind: Kind) -> &'static [Phase] {
    match kind {
        Kind::Forward => &[Phase::Forward],
        Kind::Backward => &[Phase::BackwardInput, Phase::BackwardWeight],
        Kind::BackwardInput => &[Phase::BackwardInput],
        Kind::BackwardWeight => &[Phase::BackwardWeight],
    }
}

/// The values that cross between ranks: values that are computed on one rank and read on others.
#[derive(Debug, Default)]
pub struct CrossRankValues {
    ranks: usize,
    rank_of: HashMap<StageId, usize>,
    /// Roots that F, I or W computes and that cross once per micro-batch. Each root has the other ranks whose F, I or W
    /// reads the root.
    per_micro_batch: BTreeMap<ValueId, BTreeSet<usize>>,
    /// Roots that the update or the host reads, and that cross once per step. Each root has the other ranks that read
    /// the root.
    per_step: BTreeMap<ValueId, BTreeSet<usize>>,
    /// Persistent tensors that one rank changes. Each tensor has the other ranks that read the tensor.
    replicas: BTreeMap<ValueId, BTreeSet<usize>>,
    /// The values that each stage reads from other ranks in each phase, in order.
    needs: HashMap<(StageId, Phase), Vec<ValueId>>,
    /// The tags of messages, without their micro-batch. The first table is for roots that cross once per micro-batch,
    /// and the second for roots that cross once per step.
    tags: [HashMap<ValueId, Tag>; 2],
}

impl CrossRankValues {
    pub fn new(graph: &Graph, alive: &[bool], table: &[Vec<Action>], outputs: &[Output]) -> Self {
        let mut rank_of = HashMap::new();
        for (rank, row) in table.iter().enumerate() {
            row.iter().for_each(|action| _ = rank_of.insert(action.stage, rank));
        }
        let mut crossings = Self { ranks: table.len(), rank_of, ..Self::default() };
        let mut readers: BTreeMap<ValueId, BTreeSet<usize>> = BTreeMap::new();
        let mut writers: BTreeMap<ValueId, usize> = BTreeMap::new();
        for id in graph.node_ids().filter(|id| alive[id.index()]) {
            let node = graph.node(id);
            for root in node.inputs.iter().map(|&input| graph.value(input).root) {
                let ranks = crossings.ranks_of(node.place);
                match graph.producer(root) {
                    Some(maker) => crossings.record(root, maker, node.phase, node.place, ranks),
                    None => readers.entry(root).or_default().extend(ranks),
                }
            }
            for input in node.mutated_inputs() {
                let root = graph.value(input).root;
                let persistent = matches!(graph.value(root).source, Source::Persistent { .. });
                if let (true, Place::Stage(stage)) = (persistent, node.place) {
                    writers.insert(root, crossings.rank_of[&stage]);
                }
            }
        }
        for (root, writer) in writers {
            let mut others = readers.remove(&root).unwrap_or_default();
            others.remove(&writer);
            if !others.is_empty() {
                crossings.replicas.insert(root, others);
            }
        }
        for output in outputs.iter().filter(|output| output.everywhere) {
            let root = graph.value(output.value).root;
            if let Some(maker) = graph.producer(root) {
                let ranks = 0..crossings.ranks;
                crossings.record(root, maker, Phase::Update, Place::Everywhere, ranks);
            }
        }
        crossings.assign_tags(graph);
        crossings
    }

    /// Assigns tags to the values that cross. Every rank assigns the same tags.
    fn assign_tags(&mut self, graph: &Graph) {
        // A value sent to an earlier stage is a gradient, even if a fused head computes it in the forward.
        let goes_back = |root: ValueId, maker: StageId| {
            let mut readers = self.needs.iter().filter(|(_, roots)| roots.contains(&root));
            readers.all(|(&(reader, phase), _)| phase != Phase::Forward && reader < maker)
        };
        let mut numbers: HashMap<(Direction, u32), u32> = HashMap::new();
        let mut tag = |direction: Option<Direction>, root: ValueId| {
            let maker = graph.producer(root);
            let stage = maker.map_or(StageId(0), |maker| match maker.place {
                Place::Stage(stage) => stage,
                Place::Everywhere => StageId(0),
            });
            let direction = direction.unwrap_or(match maker.map(|maker| maker.phase) {
                Some(Phase::Forward) if !goes_back(root, stage) => Direction::Forward,
                _ => Direction::Backward,
            });
            let tensor = numbers.entry((direction, stage.0)).or_default();
            *tensor += 1;
            Tag { direction, stage: stage.0, micro_batch: 0, tensor: *tensor - 1 }
        };
        let per_micro_batch = self.per_micro_batch.keys().map(|&root| (root, tag(None, root))).collect();
        let per_step = self.per_step.keys().chain(self.replicas.keys());
        let per_step = per_step.map(|&root| (root, tag(Some(Direction::Update), root))).collect();
        self.tags = [per_micro_batch, per_step];
    }

    /// Returns the tag of a root in one micro-batch. `None` stands for a root that crosses once per step.
    pub fn tag(&self, root: ValueId, micro_batch: Option<u32>) -> Tag {
        match micro_batch {
            Some(micro_batch) => Tag { micro_batch, ..self.tags[0][&root] },
            None => self.tags[1][&root],
        }
    }

    fn record(&mut self, root: ValueId, maker: &Node, phase: Phase, place: Place, ranks: impl Iterator<Item = usize>) {
        let Place::Stage(stage) = maker.place else { return };
        let from = self.rank_of[&stage];
        let to: Vec<usize> = ranks.filter(|&rank| rank != from).collect();
        if to.is_empty() {
            return;
        }
        if phase == Phase::Update {
            self.per_step.entry(root).or_default().extend(to);
            return;
        }
        debug_assert!(maker.phase != Phase::Update);
        self.per_micro_batch.entry(root).or_default().extend(to);
        if let Place::Stage(reader) = place {
            let needs = self.needs.entry((reader, phase)).or_default();
            if !needs.contains(&root) {
                needs.push(root);
            }
        }
    }

    /// Returns the ranks that run the nodes of a place.
    pub fn ranks_of(&self, place: Place) -> std::ops::Range<usize> {
        match place {
            Place::Stage(stage) => self.rank_of[&stage]..self.rank_of[&stage] + 1,
            Place::Everywhere => 0..self.ranks,
        }
    }

    /// Returns the values that an action reads from other ranks, in order.
    pub fn needs(&self, action: &Action) -> impl Iterator<Item = ValueId> {
        let parts = phases(action.kind).iter().filter_map(|&phase| self.needs.get(&(action.stage, phase)));
        parts.flatten().copied()
    }

    /// Returns the other ranks that read a root once per micro-batch.
    pub fn per_micro_batch(&self, root: ValueId) -> impl Iterator<Item = usize> {
        self.per_micro_batch.get(&root).into_iter().flatten().copied()
    }

    /// Returns the other ranks that read a root, or its sum over micro-batches, once per step.
    pub fn per_step(&self, root: ValueId) -> impl Iterator<Item = usize> {
        self.per_step.get(&root).into_iter().flatten().copied()
    }

    /// Returns all values that other ranks read once per step, in graph order.
    pub fn all_per_step(&self) -> impl Iterator<Item = ValueId> {
        self.per_step.keys().copied()
    }

    /// Returns the other ranks that hold a copy of a persistent tensor that one rank changes.
    pub fn replicas(&self, root: ValueId) -> impl Iterator<Item = usize> {
        self.replicas.get(&root).into_iter().flatten().copied()
    }

    /// For each message that `rank` sends, returns the index of the rank's first action before which the message has
    /// certainly been received. The keys are (root, micro-batch, receiver). Messages that are sent once per step have
    /// no entry, and neither have messages without such an action.
    ///
    /// # Errors
    /// Returns an error if the actions wait for each other in a cycle, or if an action reads a value that is never
    /// computed.
    pub fn received_before(
        &self,
        graph: &Graph,
        table: &[Vec<Action>],
        rank: usize,
    ) -> Result<HashMap<(ValueId, u32, usize), usize>> {
        let known = self.known(graph, table, rank)?;
        let mut received_before = HashMap::new();
        for (to, row) in table.iter().enumerate().filter(|(to, _)| *to != rank) {
            let mut seen = BTreeSet::new();
            for (index, action) in row.iter().enumerate() {
                for root in self.needs(action) {
                    let key = (root, action.micro_batch.0);
                    if self.maker(graph, root) != Some(rank) || !seen.insert(key) {
                        continue;
                    }
                    let by = known.partition_point(|knows| knows[to] as usize <= index);
                    if by < table[rank].len() {
                        received_before.insert((key.0, key.1, to), by);
                    }
                }
            }
        }
        Ok(received_before)
    }

    fn maker(&self, graph: &Graph, root: ValueId) -> Option<usize> {
        match graph.place_of(root)? {
            Place::Stage(stage) => self.rank_of.get(&stage).copied(),
            Place::Everywhere => None,
        }
    }

    /// Returns `known[action][other]`: the number of actions of rank `other` that have certainly ended when an action
    /// of `rank` starts, because `rank` has received a value that depends on them.
    ///
    /// The entries are vector clocks (Fidge, Mattern), one per action of every rank. The clock of an action of another
    /// rank is dropped once all actions that receive a value from that action have been visited. So there are never
    /// more such clocks than messages in flight.
    fn known(&self, graph: &Graph, table: &[Vec<Action>], rank: usize) -> Result<Vec<Vec<u32>>> {
        let mut made: HashMap<(StageId, Phase, u32), (usize, usize)> = HashMap::new();
        for (rank, row) in table.iter().enumerate() {
            for (index, action) in row.iter().enumerate() {
                for &phase in phases(action.kind) {
                    made.insert((action.stage, phase, action.micro_batch.0), (rank, index));
                }
            }
        }
        // For each action, the actions from which it receives values.
        let mut sources: Vec<Vec<Vec<(usize, usize)>>> = Vec::with_capacity(table.len());
        let mut readers: HashMap<(usize, usize), usize> = HashMap::new();
        for row in table {
            let mut of_row = Vec::with_capacity(row.len());
            for action in row {
                let mut of_action = BTreeSet::new();
                for root in self.needs(action) {
                    let maker = graph.producer(root).expect("what crosses is made by a node");
                    let Place::Stage(stage) = maker.place else { continue };
                    let Some(&source) = made.get(&(stage, maker.phase, action.micro_batch.0)) else {
                        let why = format!("{action} needs a result that stage {} never computes", stage.0);
                        return Err(Error::config("pipeline.schedule", why, "correct its table"));
                    };
                    of_action.insert(source);
                }
                of_action.iter().for_each(|&source| *readers.entry(source).or_default() += 1);
                of_row.push(of_action.into_iter().collect());
            }
            sources.push(of_row);
        }
        let mut clocks: HashMap<(usize, usize), Vec<u32>> = HashMap::new();
        let mut now = vec![vec![0; table.len()]; table.len()];
        let mut done = vec![0; table.len()];
        let mut known = Vec::with_capacity(table[rank].len());
        loop {
            let mut moved = false;
            for (current, row) in sources.iter().enumerate() {
                while let Some(from) = row.get(done[current]) {
                    if !from.iter().all(|&(from, at)| done[from] > at) {
                        break;
                    }
                    let index = done[current];
                    now[current][current] = index as u32;
                    for source in from {
                        let clock = &clocks[source];
                        now[current].iter_mut().zip(clock).for_each(|(mine, &theirs)| *mine = theirs.max(*mine));
                        now[current][source.0] = now[current][source.0].max(source.1 as u32 + 1);
                        let left = readers.get_mut(source).expect("a reader of it was counted");
                        *left -= 1;
                        if *left == 0 {
                            clocks.remove(source);
                        }
                    }
                    if readers.contains_key(&(current, index)) {
                        clocks.insert((current, index), now[current].clone());
                    }
                    if current == rank {
                        known.push(now[current].clone());
                    }
                    done[current] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        match table.iter().zip(&done).position(|(row, &done)| done < row.len()) {
            None => Ok(known),
            Some(rank) => {
                let why = format!("rank {rank} waits forever at {}", table[rank][done[rank]]);
                Err(Error::config("pipeline.schedule", why, "correct its table"))
            }
        }
    }
}
