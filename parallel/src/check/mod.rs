//! Checks a table of actions and reports everything that is wrong with it. The checker shares no code with the
//! generators and passes; it is based on the requirements of training only.
//!
//! In: one list of cells per rank, with or without communication. Out: all violations. Never: a repaired table.

mod order;
mod progress;

use std::collections::{BTreeMap, BTreeSet};

use crate::{Action, Cell, Communication, CommunicationKind, Kind, MicroBatch, StageId};

/// The behaviour of sends. With either behaviour, a receive lasts until its message has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sends {
    /// A send is done at once. The message waits for its receiver.
    Buffered,
    /// A send lasts until its receiver reaches the receive. In a table without communication, it lasts until the
    /// receiver reaches the action that needs the message. Orders in which two neighbours send to each other first, as
    /// in 1F1B, deadlock with such sends. [`crate::communicate`] places the receives so that this does not happen. A
    /// table that passes the check with such sends needs no tags either: between two ranks, messages are received in
    /// the order in which they are sent.
    Blocking,
}

/// A violation found in a table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Violation {
    #[error("stage {} of micro-batch {} has no {what}", stage.0, micro_batch.0)]
    Missing { stage: StageId, micro_batch: MicroBatch, what: &'static str },
    #[error("stage {} has no {what}, though other stages have one", stage.0)]
    MissingOfWeights { stage: StageId, what: &'static str },
    #[error("{cell} is done {times} times")]
    Repeated { cell: Cell, times: usize },
    #[error("stage {} of micro-batch {} has a whole backward beside a split one", stage.0, micro_batch.0)]
    WholeAndSplit { stage: StageId, micro_batch: MicroBatch },
    #[error("rank {rank}: {cell} is outside the {stages} stages and {micro_batches} micro-batches")]
    OutOfRange { rank: usize, cell: Cell, stages: u32, micro_batches: u32 },
    #[error("stage {} runs on ranks {ranks:?}, not on one", stage.0)]
    Scattered { stage: StageId, ranks: Vec<usize> },
    #[error("rank {rank}: {cell} does not come after {needs}, which it needs")]
    OutOfOrder { rank: usize, cell: Cell, needs: Cell },
    #[error("rank {rank}: {cell} has no {other}")]
    Unpaired { rank: usize, cell: Cell, other: Cell },
    #[error("rank {rank} waits forever at {at} ({sends:?} sends)")]
    Deadlock { rank: usize, at: Cell, sends: Sends },
}

/// Returns all violations of a table for `stages` stages and `micro_batches` micro-batches. If the list is empty, the
/// table can be used for training.
///
/// A table without sends and receives is assumed to send right after an action and to receive right before one. A table
/// with any send or receive must have every message between ranks. The same holds for waits, reductions, fetched
/// weights and updates: a table must have either all cells of such a kind or none.
pub fn check<C: Copy + Into<Cell>>(table: &[Vec<C>], stages: u32, micro_batches: u32, sends: Sends) -> Vec<Violation> {
    let rows: Vec<Vec<Cell>> = table.iter().map(|row| row.iter().map(|&cell| cell.into()).collect()).collect();
    let mut violations = Vec::new();
    let owners = owners(&rows, &mut violations);
    let table = Table { kinds: rows.iter().flatten().filter_map(communication_kind).collect(), rows, owners, stages };
    table.check_counts(micro_batches, &mut violations);
    table.check_weight_counts(&mut violations);
    table.check_pairs(&mut violations);
    table.order(&mut violations);
    table.progress(sends, &mut violations);
    violations
}

/// The table, with everything that several checks use.
struct Table {
    rows: Vec<Vec<Cell>>,
    /// The rank that runs each stage.
    owners: BTreeMap<StageId, usize>,
    stages: u32,
    /// The kinds of communication that occur anywhere.
    kinds: BTreeSet<CommunicationKind>,
}

/// Returns the rank of each stage. Cells of one stage on several ranks are violations.
fn owners(rows: &[Vec<Cell>], violations: &mut Vec<Violation>) -> BTreeMap<StageId, usize> {
    let mut ranks: BTreeMap<StageId, BTreeSet<usize>> = BTreeMap::new();
    for (rank, row) in rows.iter().enumerate() {
        row.iter().flat_map(stages_of).for_each(|stage| _ = ranks.entry(stage).or_default().insert(rank));
    }
    let scattered = ranks.iter().filter(|(_, ranks)| ranks.len() > 1);
    violations.extend(
        scattered.map(|(&stage, ranks)| Violation::Scattered { stage, ranks: ranks.iter().copied().collect() }),
    );
    ranks.into_iter().filter_map(|(stage, ranks)| Some((stage, ranks.into_iter().next()?))).collect()
}

fn stages_of(cell: &Cell) -> impl Iterator<Item = StageId> + use<> {
    let other = match *cell {
        Cell::Communicate(communication) => Some(communication.stage),
        Cell::Update(stage) => Some(stage),
        Cell::One(_) | Cell::Overlap(..) => None,
    };
    cell.actions().map(|action| action.stage).chain(other)
}

fn communication_kind(cell: &Cell) -> Option<CommunicationKind> {
    match cell {
        Cell::Communicate(communication) => Some(communication.kind),
        _ => None,
    }
}

impl Table {
    /// Returns all cells with their rank. An overlapped pair counts as its two actions.
    fn cells(&self) -> impl Iterator<Item = (usize, Cell)> {
        let row = |(rank, row): (usize, &Vec<Cell>)| {
            let parts: Vec<(usize, Cell)> = row.iter().flat_map(parts).map(|cell| (rank, cell)).collect();
            parts
        };
        self.rows.iter().enumerate().flat_map(row)
    }

    /// Checks that each forward occurs once. Each backward must also occur once, either whole or split into I and W.
    fn check_counts(&self, micro_batches: u32, violations: &mut Vec<Violation>) {
        let stages = self.stages;
        let mut times: BTreeMap<Cell, usize> = BTreeMap::new();
        for (rank, cell) in self.cells() {
            let micro_batch = match cell {
                Cell::One(action) => Some(action.micro_batch),
                Cell::Communicate(communication) => communication.micro_batch,
                Cell::Overlap(..) | Cell::Update(_) => None,
            };
            if stages_of(&cell).any(|stage| stage.0 >= stages) || micro_batch.is_some_and(|m| m.0 >= micro_batches) {
                violations.push(Violation::OutOfRange { rank, cell, stages, micro_batches });
            }
            *times.entry(cell).or_default() += 1;
        }
        // Weights may be fetched and released several times; only the order is checked.
        let once = |cell: &Cell| {
            !matches!(communication_kind(cell), Some(CommunicationKind::Unshard | CommunicationKind::Reshard))
        };
        let repeated = times.iter().filter(|&(cell, &times)| times > 1 && once(cell));
        violations.extend(repeated.map(|(&cell, &times)| Violation::Repeated { cell, times }));

        for (stage, micro_batch) in (0..stages).flat_map(|stage| (0..micro_batches).map(move |m| (stage, m))) {
            let has = |kind| times.contains_key(&Cell::One(Action::new(kind, stage, micro_batch)));
            let (whole, input, weight) = (has(Kind::Backward), has(Kind::BackwardInput), has(Kind::BackwardWeight));
            let (stage, micro_batch) = (StageId(stage), MicroBatch(micro_batch));
            let mut missing = |what| violations.push(Violation::Missing { stage, micro_batch, what });
            if !has(Kind::Forward) {
                missing("forward");
            }
            match (whole, input, weight) {
                (true, false, false) | (false, true, true) => {}
                (true, ..) => violations.push(Violation::WholeAndSplit { stage, micro_batch }),
                (false, false, false) => missing("backward"),
                (false, false, true) => missing("input gradient"),
                (false, true, false) => missing("weight gradient"),
            }
        }
    }

    /// Checks that gradients are reduced and weights updated for all stages or for none.
    fn check_weight_counts(&self, violations: &mut Vec<Violation>) {
        let about = |kind| move |stage| Cell::Communicate(Communication { kind, stage, micro_batch: None });
        let kinds: [(&str, &dyn Fn(StageId) -> Cell); 3] = [
            ("reduction of its gradients", &about(CommunicationKind::ReduceGradient)),
            ("wait for the reduction of its gradients", &about(CommunicationKind::WaitReduceGradient)),
            ("update", &Cell::Update),
        ];
        let there: BTreeSet<Cell> = self.rows.iter().flatten().copied().collect();
        for (what, cell) in kinds {
            let (with, without): (Vec<StageId>, Vec<StageId>) =
                (0..self.stages).map(StageId).partition(|&stage| there.contains(&cell(stage)));
            if !with.is_empty() {
                violations.extend(without.into_iter().map(|stage| Violation::MissingOfWeights { stage, what }));
            }
        }
    }

    /// Checks that every send has a matching receive, and every receive a matching send. If the table has waits, every
    /// send must have a matching wait.
    fn check_pairs(&self, violations: &mut Vec<Violation>) {
        let there: BTreeSet<Cell> = self.rows.iter().flatten().copied().collect();
        let waits = [CommunicationKind::WaitSendForward, CommunicationKind::WaitSendBackward];
        let has_waits = waits.iter().any(|wait| self.kinds.contains(wait));
        for (rank, cell) in self.cells() {
            let Cell::Communicate(communication) = cell else { continue };
            let wait = match communication.kind {
                CommunicationKind::SendForward => Some(waits[0]),
                CommunicationKind::SendBackward => Some(waits[1]),
                _ => None,
            };
            let wait = wait.filter(|_| has_waits).map(|kind| Communication { kind, ..communication });
            let others = communication.other_end().into_iter().chain(wait).map(Cell::Communicate);
            violations.extend(others.filter(|other| !there.contains(other)).map(|other| Violation::Unpaired {
                rank,
                cell,
                other,
            }));
        }
    }

    /// True if the table has messages; otherwise its actions imply them.
    fn has_messages(&self) -> bool {
        use CommunicationKind::{ReceiveBackward, ReceiveForward, SendBackward, SendForward};
        [SendForward, ReceiveForward, SendBackward, ReceiveBackward].iter().any(|kind| self.kinds.contains(kind))
    }

    /// Returns the stage from which an action receives its input, if any.
    fn source(&self, action: Action) -> Option<StageId> {
        match action.kind {
            Kind::Forward => action.stage.0.checked_sub(1).map(StageId),
            Kind::Backward | Kind::BackwardInput => {
                Some(StageId(action.stage.0.saturating_add(1))).filter(|below| below.0 < self.stages)
            }
            Kind::BackwardWeight => None,
        }
    }
}

fn parts(cell: &Cell) -> Vec<Cell> {
    match *cell {
        Cell::Overlap(first, second) => vec![Cell::One(first), Cell::One(second)],
        cell => vec![cell],
    }
}
