//! The V family of arXiv 2405.15362: the slots of one micro-batch are repeated every six slots and squeezed, and weight
//! gradients go into the remaining holes.
//!
//! In: the slots of micro-batch 0 (section 3 of the paper). Out: each rank's order. The slots only determine the order,
//! so the costs of the actions have no effect.

use super::{Placement, Shape};
use crate::{Action, Kind};

/// The slots of one micro-batch on one rank: F on the way down, F on the way up, I on the way up, I on the way down.
pub(super) type Pattern = [u32; 4];

/// Slots per micro-batch: three kinds of work for each of two chunks.
const PERIOD: u32 = 6;

/// Computes every rank's order for a pattern given as `(ranks, rank) → slots`.
pub(super) fn unroll(shape: &Shape, pattern: fn(u32, u32) -> Pattern) -> Vec<Vec<Action>> {
    let ranks = (0..shape.ranks).map(|r| RankSlots::repeat(pattern(shape.ranks, r), shape.micro_batches));
    let mut table = Slots { ranks: ranks.collect() };

    // The passes are moved twice. The first time, weight gradients have slots, so that the warm-up closes up. The
    // second time, weight gradients have no slots, so that they don't delay the drain.
    table.fill_holes();
    table.pull_forward(Weights::Placed);
    table.run_eagerly();
    table.drop_weights();
    table.pull_forward(Weights::InHoles);
    table.fill_holes();
    table.run_eagerly();
    table.drop_weights();

    (0..shape.ranks).zip(&table.ranks).map(|(r, slots)| slots.actions(shape.ranks, r)).collect()
}

/// The use of a slot, in the order in which a micro-batch passes a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    ForwardDown,
    ForwardUp,
    InputUp,
    InputDown,
    /// W of either chunk, numbered 0..2M in the order of the input gradients.
    Weight,
}

const PASSES: [Pass; 5] = [Pass::ForwardDown, Pass::ForwardUp, Pass::InputUp, Pass::InputDown, Pass::Weight];

impl Pass {
    fn is_input(self) -> bool {
        matches!(self, Self::InputUp | Self::InputDown)
    }

    fn is_forward(self) -> bool {
        matches!(self, Self::ForwardDown | Self::ForwardUp)
    }

    /// Returns the neighbour from which this pass receives, or `None` if it receives from no other rank.
    fn upstream(self, rank: usize, ranks: usize) -> Option<usize> {
        match self {
            Self::ForwardDown | Self::InputUp => rank.checked_sub(1),
            Self::ForwardUp | Self::InputDown => Some(rank + 1).filter(|&next| next < ranks),
            Self::Weight => None,
        }
    }

    /// Returns the pass of the same micro-batch on the same rank that must come before this pass, or `None` if there is
    /// none.
    fn before(self) -> Option<Self> {
        match self {
            Self::ForwardDown | Self::Weight => None,
            Self::ForwardUp => Some(Self::ForwardDown),
            Self::InputUp => Some(Self::ForwardUp),
            Self::InputDown => Some(Self::InputUp),
        }
    }
}

/// The treatment of weight gradients while other passes are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weights {
    /// Weight gradients have slots of their own, and are moved too.
    Placed,
    /// Each weight gradient takes the first free slot after its input gradient.
    InHoles,
}

/// The slots of one rank: `[pass][micro-batch]`, ascending in the micro-batch.
#[derive(Debug, Clone)]
struct RankSlots {
    slots: [Vec<u32>; 5],
}

/// One use of a slot. The order of the fields is the order in which slots are visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    slot: u32,
    rank: usize,
    pass: Pass,
    index: usize,
}

struct Slots {
    ranks: Vec<RankSlots>,
}

impl Slots {
    fn fill_holes(&mut self) {
        for rank in &mut self.ranks {
            rank.slots[Pass::Weight as usize] = rank.holes().into_iter().map(|(slot, _)| slot).collect();
        }
    }

    fn drop_weights(&mut self) {
        for rank in &mut self.ranks {
            rank.slots[Pass::Weight as usize].clear();
        }
    }

    /// Returns all uses of slots, in order of time.
    fn uses(&self) -> Vec<Use> {
        let mut uses: Vec<Use> = self.ranks.iter().enumerate().flat_map(|(rank, slots)| slots.uses(rank)).collect();
        uses.sort_unstable();
        uses
    }

    /// Moves each use, in order of time, into the first free slot that its dependencies allow and that does not raise
    /// the peak. The steady state in the middle stays unchanged.
    fn pull_forward(&mut self, weights: Weights) {
        let peak = self.ranks.iter().map(|rank| rank.peak(weights)).max().unwrap_or_default();
        let last = self.ranks[0].slots[Pass::ForwardDown as usize].len() - 1;
        let mut taken: Vec<Vec<bool>> = self.ranks.iter().map(|rank| vec![false; rank.end() as usize]).collect();
        #[derive(PartialEq)]
        enum Phase {
            WarmUp,
            Steady,
            Drain,
        }
        let mut phase = Phase::WarmUp;

        for Use { slot, rank, pass, index } in self.uses() {
            // The steady state begins when rank 0 finishes its first micro-batch, and ends when rank 0 starts its last
            // micro-batch.
            if phase == Phase::WarmUp && pass == Pass::InputDown && rank == 0 {
                phase = Phase::Steady;
            }
            let moves = match phase {
                Phase::WarmUp => weights == Weights::Placed,
                Phase::Steady => false,
                Phase::Drain => true,
            };
            if phase == Phase::Steady && pass == Pass::ForwardDown && index == last {
                phase = Phase::Drain;
            }
            let mut chosen = slot;
            if moves {
                for candidate in self.earliest(rank, pass, index)..slot {
                    if !taken[rank][candidate as usize] {
                        self.ranks[rank].slots[pass as usize][index] = candidate;
                        if self.ranks[rank].peak(weights) <= peak {
                            chosen = candidate;
                            break;
                        }
                    }
                }
            }
            self.ranks[rank].slots[pass as usize][index] = chosen;
            taken[rank][chosen as usize] = true;
        }
    }

    /// Returns the first slot that comes after everything this use depends on.
    fn earliest(&self, rank: usize, pass: Pass, index: usize) -> u32 {
        let slot = |rank: usize, pass: Pass, index: usize| self.ranks[rank].slots[pass as usize][index];
        let received = pass.upstream(rank, self.ranks.len()).map(|from| slot(from, pass, index));
        let before = pass.before().map(|before| slot(rank, before, index));
        let previous = index.checked_sub(1).map(|previous| slot(rank, pass, previous));
        let input = (pass == Pass::Weight).then(|| self.ranks[rank].inputs()[index]);
        [received, before, previous, input].into_iter().flatten().max().map_or(0, |latest| latest + 1)
    }

    /// Closes up idle slots: keeps each rank's order and lets every use start as soon as it can, in one slot each.
    fn run_eagerly(&mut self) {
        let mut next_free = vec![0; self.ranks.len()];
        for Use { rank, pass, index, .. } in self.uses() {
            // Uses are visited in order of time, so all uses that this one depends on have their new slots already. A
            // weight gradient depends only on its rank's order.
            let start = match pass {
                Pass::Weight => next_free[rank],
                _ => self.earliest(rank, pass, index).max(next_free[rank]),
            };
            self.ranks[rank].slots[pass as usize][index] = start;
            next_free[rank] = start + 1;
        }
    }
}

impl RankSlots {
    fn repeat(pattern: Pattern, micro_batches: u32) -> Self {
        let mut slots: [Vec<u32>; 5] = Default::default();
        for (slots, first) in slots.iter_mut().zip(pattern) {
            *slots = (0..micro_batches).map(|m| first + PERIOD * m).collect();
        }
        Self { slots }
    }

    fn uses(&self, rank: usize) -> impl Iterator<Item = Use> {
        let passes = PASSES.into_iter().zip(&self.slots);
        passes.flat_map(move |(pass, slots)| {
            slots.iter().enumerate().map(move |(index, &slot)| Use { slot, rank, pass, index })
        })
    }

    /// Returns the slot after the last slot in use.
    fn end(&self) -> u32 {
        self.slots.iter().filter_map(|slots| slots.last()).max().map_or(0, |last| last + 1)
    }

    /// Slots of the input gradients of both chunks, in order of time.
    fn inputs(&self) -> Vec<u32> {
        let mut inputs = [&self.slots[Pass::InputUp as usize][..], &self.slots[Pass::InputDown as usize]].concat();
        inputs.sort_unstable();
        inputs
    }

    /// Returns the use of each slot.
    fn timeline(&self) -> Vec<Option<Pass>> {
        let mut timeline = vec![None; self.end() as usize];
        for Use { slot, pass, .. } in self.uses(0) {
            timeline[slot as usize] = Some(pass);
        }
        timeline
    }

    /// Returns the slots for weight gradients, each with the kind of input gradient that it belongs to. Free slots
    /// after the input gradient come first, then slots past the end. The chunk on the way up comes first, since its
    /// input gradients do.
    fn holes(&self) -> Vec<(u32, Pass)> {
        let mut holes = Vec::new();
        let (mut up, mut down) = (0, 0);
        let mut place = |slot, up: &mut u32, down: &mut u32| {
            if *up > 0 {
                *up -= 1;
                holes.push((slot, Pass::InputUp));
            } else if *down > 0 {
                *down -= 1;
                holes.push((slot, Pass::InputDown));
            }
        };
        for (slot, used) in (0..).zip(self.timeline()) {
            match used {
                Some(Pass::InputUp) => up += 1,
                Some(Pass::InputDown) => down += 1,
                Some(_) => {}
                None => place(slot, &mut up, &mut down),
            }
        }
        for slot in self.end()..self.end() + up + down {
            place(slot, &mut up, &mut down);
        }
        holes
    }

    /// Returns the maximum number of activations alive at once, in chunks.
    fn peak(&self, weights: Weights) -> i32 {
        let (mut live, mut peak, mut pending) = (0_i32, 0, 0);
        for used in self.timeline() {
            match used {
                Some(pass) if pass.is_forward() => live += 1,
                Some(pass) if pass.is_input() => pending += 1,
                Some(_) => live -= 1,
                None if weights == Weights::InHoles && pending > 0 => {
                    pending -= 1;
                    live -= 1;
                }
                None => {}
            }
            peak = peak.max(live);
        }
        peak
    }

    fn actions(&self, ranks: u32, rank: u32) -> Vec<Action> {
        let (down, up) = (Placement::V.stage(ranks, rank, 0), Placement::V.stage(ranks, rank, 1));
        let mut weights =
            [(Pass::InputUp, up), (Pass::InputDown, down)].map(|(input_pass, stage)| (input_pass, stage, 0));
        let mut timed: Vec<(u32, Action)> = self
            .uses(0)
            .map(|Use { slot, pass, index, .. }| {
                let (kind, stage) = match pass {
                    Pass::ForwardDown => (Kind::Forward, down),
                    Pass::ForwardUp => (Kind::Forward, up),
                    Pass::InputUp => (Kind::BackwardInput, up),
                    Pass::InputDown => (Kind::BackwardInput, down),
                    Pass::Weight => unreachable!("weight gradients were dropped before the order is read"),
                };
                (slot, Action::new(kind, stage, index as u32))
            })
            .collect();
        for (slot, pass) in self.holes() {
            let (_, stage, next) =
                weights.iter_mut().find(|(input_pass, ..)| *input_pass == pass).expect("one of the two");
            timed.push((slot, Action::new(Kind::BackwardWeight, *stage, *next)));
            *next += 1;
        }
        timed.sort_unstable_by_key(|(slot, _)| *slot);
        timed.into_iter().map(|(_, action)| action).collect()
    }
}
