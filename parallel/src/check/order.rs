//! Checks the dependencies between cells of the same rank: each cell must come after the cells on which it depends.

use std::collections::BTreeSet;

use super::{Table, Violation, parts};
use crate::{Action, Cell, Communication, CommunicationKind, Kind, StageId};

impl Table {
    /// Checks that each cell comes after the cells of the same rank on which it depends.
    pub(super) fn order(&self, violations: &mut Vec<Violation>) {
        for (rank, row) in self.rows.iter().enumerate() {
            let mut done = BTreeSet::new();
            let mut held = BTreeSet::new();
            for (at, cell) in row.iter().enumerate() {
                let mut late = |cell, needs| violations.push(Violation::OutOfOrder { rank, cell, needs });
                // Both halves of a pair start at once, so neither half can depend on the other.
                for cell in parts(cell) {
                    for needs in self.needs(rank, cell) {
                        if !needs.iter().any(|cell| done.contains(cell)) {
                            late(cell, needs[0]);
                        }
                    }
                    self.hold(cell, &mut held, &mut late);
                    if ends_a_stage(cell) {
                        let rest = row[at + 1..].iter().flat_map(parts);
                        rest.filter(|&later| must_precede(later, cell)).for_each(|later| late(cell, later));
                    }
                }
                done.extend(parts(cell));
            }
        }
    }

    /// Returns the dependencies of a cell. Each dependency is a list of cells, and any one of these cells satisfies it.
    fn needs(&self, rank: usize, cell: Cell) -> Vec<Vec<Cell>> {
        match cell {
            Cell::One(action) => self.needs_of_action(rank, action),
            Cell::Communicate(communication) => needs_of_communication(communication).into_iter().collect(),
            Cell::Update(stage) => {
                let reduces = self.kinds.contains(&CommunicationKind::ReduceGradient);
                let wait = about(CommunicationKind::WaitReduceGradient, stage);
                reduces.then(|| vec![wait]).into_iter().collect()
            }
            Cell::Overlap(..) => unreachable!("pairs come in parts"),
        }
    }

    fn needs_of_action(&self, rank: usize, action: Action) -> Vec<Vec<Cell>> {
        let own = match action.kind {
            Kind::Forward => None,
            Kind::Backward | Kind::BackwardInput => Some(Kind::Forward),
            Kind::BackwardWeight => Some(Kind::BackwardInput),
        };
        let own = own.map(|kind| vec![Cell::One(Action { kind, ..action })]);
        let from_another = |source| self.owners.get(&source).is_some_and(|&owner| owner != rank);
        let receives = self.has_messages() && self.source(action).is_some_and(from_another);
        let received = receives.then(|| {
            let kind = match action.kind {
                Kind::Forward => CommunicationKind::ReceiveForward,
                _ => CommunicationKind::ReceiveBackward,
            };
            vec![Cell::Communicate(Communication { kind, stage: action.stage, micro_batch: Some(action.micro_batch) })]
        });
        own.into_iter().chain(received).collect()
    }

    /// Checks, if weights are fetched at all, that a stage computes only while its rank holds the weights of the stage.
    fn hold(&self, cell: Cell, held: &mut BTreeSet<StageId>, late: &mut impl FnMut(Cell, Cell)) {
        use CommunicationKind::{Reshard, Unshard};
        match cell {
            Cell::One(Action { stage, .. }) if self.kinds.contains(&Unshard) && !held.contains(&stage) => {
                late(cell, about(Unshard, stage));
            }
            Cell::Communicate(Communication { kind: Unshard, stage, .. }) if !held.insert(stage) => {
                late(cell, about(Reshard, stage));
            }
            Cell::Communicate(Communication { kind: Reshard, stage, .. }) if !held.remove(&stage) => {
                late(cell, about(Unshard, stage));
            }
            _ => {}
        }
    }
}

fn needs_of_communication(communication: Communication) -> Option<Vec<Cell>> {
    let Communication { kind, stage, micro_batch } = communication;
    let action = |kind| micro_batch.map(|micro_batch| Cell::One(Action { kind, stage, micro_batch }));
    let send = |kind| vec![Cell::Communicate(Communication { kind, ..communication })];
    match kind {
        CommunicationKind::SendForward => Some(action(Kind::Forward).into_iter().collect()),
        CommunicationKind::SendBackward => {
            Some(action(Kind::Backward).into_iter().chain(action(Kind::BackwardInput)).collect())
        }
        CommunicationKind::WaitSendForward => Some(send(CommunicationKind::SendForward)),
        CommunicationKind::WaitSendBackward => Some(send(CommunicationKind::SendBackward)),
        CommunicationKind::WaitReduceGradient => Some(send(CommunicationKind::ReduceGradient)),
        CommunicationKind::ReceiveForward
        | CommunicationKind::ReceiveBackward
        | CommunicationKind::Unshard
        | CommunicationKind::Reshard
        | CommunicationKind::ReduceGradient => None,
    }
    .filter(|needs: &Vec<Cell>| !needs.is_empty())
}

/// True if this cell must come after certain other cells of its stage ([`must_precede`]).
fn ends_a_stage(cell: Cell) -> bool {
    match cell {
        Cell::Update(_) => true,
        Cell::Communicate(communication) => communication.kind == CommunicationKind::ReduceGradient,
        Cell::One(_) | Cell::Overlap(..) => false,
    }
}

/// True if `earlier` must come before `cell`: gradients are reduced after the stage's last gradient is computed, and
/// weights are updated after the last use of the old weights.
fn must_precede(earlier: Cell, cell: Cell) -> bool {
    let Cell::One(action) = earlier else { return false };
    match cell {
        Cell::Update(stage) => action.stage == stage,
        Cell::Communicate(Communication { kind: CommunicationKind::ReduceGradient, stage, .. }) => {
            action.stage == stage && matches!(action.kind, Kind::Backward | Kind::BackwardWeight)
        }
        _ => false,
    }
}

fn about(kind: CommunicationKind, stage: StageId) -> Cell {
    Cell::Communicate(Communication { kind, stage, micro_batch: None })
}
