//! Simulates when each cell runs, given the durations of the actions, and counts the activations alive meanwhile.

use std::collections::BTreeMap;

use crate::{Action, Cell, Communication, CommunicationKind, Durations, Kind, MicroBatch, StageId};

/// A cell and the half-open range of ticks in which it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The cell.
    pub cell: Cell,
    /// First tick.
    pub start: u64,
    /// Tick after the last.
    pub end: u64,
}

/// The result of simulating a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// The spans of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
}

/// The error if a rank waits forever. [`crate::check()`] reports the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} waits forever at {cell}; gapless_parallel::check names what it waits for")]
pub struct Stuck {
    /// The rank that waits.
    pub rank: usize,
    /// The cell at which it waits.
    pub cell: Cell,
}

/// Simulates a table. Every cell starts as soon as its rank is free and the inputs of the cell have arrived.
///
/// Sends are buffered and receives are posted ahead, so communication takes no time on the rank itself. A message takes
/// its transfer time. The transfer begins at the message's send if the table has sends, otherwise at the end of the
/// action that produced it. A wait lasts until the transfer is over.
///
/// # Errors
/// Returns [`Stuck`] if the inputs of a cell are never produced.
pub fn simulate(table: &[Vec<Cell>], costs: &(impl Durations + ?Sized)) -> Result<Timeline, Stuck> {
    let last = table.iter().flatten().flat_map(Cell::actions).map(|action| action.stage).max();
    let sends_are_written = table.iter().flatten().any(|cell| matches!(cell, Cell::Communicate(c) if is_send(c.kind)));
    let mut results = Results { sends_are_written, ends: BTreeMap::new(), sends: BTreeMap::new() };
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); table.len()];
    let mut unfinished: Vec<usize> = (0..table.len()).collect();
    loop {
        unfinished.retain(|&rank| ranks[rank].len() < table[rank].len());
        let mut moved = false;
        for &rank in &unfinished {
            while let Some(&cell) = table[rank].get(ranks[rank].len()) {
                let free = ranks[rank].last().map_or(0, |span| span.end);
                let Some(ready) = results.ready(&cell, rank, last, costs) else { break };
                let start = free.max(ready);
                let end = start + duration(&cell, costs);
                results.record(&cell, rank, end);
                ranks[rank].push(Span { cell, start, end });
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck =
        table.iter().zip(&ranks).enumerate().find_map(|(rank, (row, spans))| Some((rank, *row.get(spans.len())?)));
    match stuck {
        Some((rank, cell)) => Err(Stuck { rank, cell }),
        None => Ok(Timeline { ranks }),
    }
}

impl Timeline {
    /// Returns the ticks from 0 to the end of the last cell.
    pub fn makespan(&self) -> u64 {
        self.ranks.iter().flatten().map(|span| span.end).max().unwrap_or_default()
    }

    /// Returns the ticks of the makespan in which a rank runs no action and no update.
    pub fn bubble(&self, rank: usize) -> u64 {
        let busy = |span: &Span| match span.cell {
            // Waiting is not work.
            Cell::Communicate(_) => 0,
            Cell::One(_) | Cell::Overlap(..) | Cell::Update(_) => span.end - span.start,
        };
        self.makespan() - self.ranks[rank].iter().map(busy).sum::<u64>()
    }

    /// Returns the bubbles of all ranks as a share of ranks × makespan. Returns 0 if nothing takes time.
    pub fn bubble_share(&self) -> f64 {
        let bubbles: u64 = (0..self.ranks.len()).map(|rank| self.bubble(rank)).sum();
        let whole = self.makespan() as f64 * self.ranks.len() as f64;
        if whole > 0.0 { bubbles as f64 / whole } else { 0.0 }
    }

    /// Returns the number of activations alive on a rank, at each tick where this number changes. The unit is one chunk
    /// of one micro-batch. An activation is born where its F starts, and dies where its W or whole B ends.
    pub fn live(&self, rank: usize) -> Vec<(u64, i64)> {
        let mut changes: BTreeMap<u64, i64> = BTreeMap::new();
        for (span, action) in self.ranks[rank].iter().flat_map(|span| span.cell.actions().map(move |a| (span, a))) {
            match action.kind {
                Kind::Forward => *changes.entry(span.start).or_default() += 1,
                Kind::Backward | Kind::BackwardWeight => *changes.entry(span.end).or_default() -= 1,
                Kind::BackwardInput => {}
            }
        }
        let mut live = 0;
        changes
            .into_iter()
            .map(|(time, change)| {
                live += change;
                (time, live)
            })
            .collect()
    }

    /// Returns the maximum of [`Timeline::live`].
    pub fn peak(&self, rank: usize) -> i64 {
        self.live(rank).into_iter().map(|(_, live)| live).max().unwrap_or_default()
    }
}

/// A result that other cells depend on. A whole backward counts as its input gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Completed {
    Forward(StageId, MicroBatch),
    Input(StageId, MicroBatch),
    Weight(StageId, MicroBatch),
}

/// The results so far, each with its rank, end and action, and the ends of the sends.
struct Results {
    sends_are_written: bool,
    ends: BTreeMap<Completed, (usize, u64, Action)>,
    sends: BTreeMap<Communication, u64>,
}

impl Results {
    /// Returns the tick at which all inputs of a cell have arrived, or `None` if one of them is not computed yet.
    fn ready(&self, cell: &Cell, rank: usize, last: Option<StageId>, costs: &(impl Durations + ?Sized)) -> Option<u64> {
        if let Cell::Communicate(wait) = cell {
            return self.wait_end(*wait, costs);
        }
        let needs = cell.actions().flat_map(|action| needs(action, last));
        needs.map(|need| self.arrival(need, rank, costs)).try_fold(0, |ready, arrival| Some(ready.max(arrival?)))
    }

    fn arrival(&self, need: Completed, rank: usize, costs: &(impl Durations + ?Sized)) -> Option<u64> {
        let &(from, end, action) = self.ends.get(&need)?;
        if from == rank {
            return Some(end);
        }
        let left = if self.sends_are_written { *self.sends.get(&send_of(action)?)? } else { end };
        Some(left + costs.transfer(action))
    }

    fn wait_end(&self, wait: Communication, costs: &(impl Durations + ?Sized)) -> Option<u64> {
        let Communication { kind, stage, micro_batch } = wait;
        let (kind, kind_of_action) = match kind {
            CommunicationKind::WaitSendForward => (CommunicationKind::SendForward, Kind::Forward),
            CommunicationKind::WaitSendBackward => (CommunicationKind::SendBackward, Kind::BackwardInput),
            _ => return Some(0),
        };
        let left = self.sends.get(&Communication { kind, ..wait })?;
        Some(left + costs.transfer(Action { kind: kind_of_action, stage, micro_batch: micro_batch? }))
    }

    fn record(&mut self, cell: &Cell, rank: usize, end: u64) {
        self.ends.extend(cell.actions().map(|action| (Completed::of(action), (rank, end, action))));
        if let Cell::Communicate(send) = *cell
            && is_send(send.kind)
        {
            self.sends.insert(send, end);
        }
    }
}

impl Completed {
    fn of(action: Action) -> Self {
        match action.kind {
            Kind::Forward => Self::Forward(action.stage, action.micro_batch),
            Kind::Backward | Kind::BackwardInput => Self::Input(action.stage, action.micro_batch),
            Kind::BackwardWeight => Self::Weight(action.stage, action.micro_batch),
        }
    }
}

fn needs(action: Action, last: Option<StageId>) -> Vec<Completed> {
    let Action { kind, stage, micro_batch } = action;
    let neighbour = match kind {
        Kind::Forward => stage.0.checked_sub(1).map(|above| Completed::Forward(StageId(above), micro_batch)),
        Kind::Backward | Kind::BackwardInput if last == Some(stage) => None,
        Kind::Backward | Kind::BackwardInput => Some(Completed::Input(StageId(stage.0 + 1), micro_batch)),
        Kind::BackwardWeight => Some(Completed::Input(stage, micro_batch)),
    };
    let own = matches!(kind, Kind::Backward | Kind::BackwardInput).then_some(Completed::Forward(stage, micro_batch));
    own.into_iter().chain(neighbour).collect()
}

fn send_of(action: Action) -> Option<Communication> {
    let kind = match action.kind {
        Kind::Forward => CommunicationKind::SendForward,
        Kind::Backward | Kind::BackwardInput => CommunicationKind::SendBackward,
        Kind::BackwardWeight => return None,
    };
    Some(Communication { kind, stage: action.stage, micro_batch: Some(action.micro_batch) })
}

fn is_send(kind: CommunicationKind) -> bool {
    matches!(kind, CommunicationKind::SendForward | CommunicationKind::SendBackward)
}

fn duration(cell: &Cell, costs: &(impl Durations + ?Sized)) -> u64 {
    match *cell {
        Cell::One(action) => costs.action(action),
        Cell::Overlap(forward, backward) => costs.overlapped(forward, backward),
        Cell::Communicate(_) => 0,
        Cell::Update(stage) => costs.update(stage),
    }
}
