//! 1F1B in the shape of a V, from the same family as V-Half and V-Min (Qi et al., arXiv 2405.15362). It needs two
//! thirds of 1F1B's memory without splitting backwards.
//!
//! Like the rest of the V family, it repeats the slots of one micro-batch every six slots. A backward is whole and
//! fills two consecutive slots. So there are no weight gradients to fill holes with; only the warm-up is squeezed.

use super::{Placement, Schedule, Shape};
use crate::{Action, Error, Kind};

/// Slots per micro-batch: for each of two chunks, one for a forward and two for a backward.
const PERIOD: usize = 6;

/// The V-1F1B schedule: each micro-batch goes down and up the ranks at full speed. The backward does so too, except for
/// three idle slots after every third rank, where it would collide with other micro-batches. Peak: ⌈(2P+1)/3⌉
/// micro-batches.
#[derive(Debug, Clone, Copy, Default)]
pub struct VOneForwardOneBackward;

impl Schedule for VOneForwardOneBackward {
    fn name(&self) -> &'static str {
        "v-1f1b"
    }

    fn placement(&self) -> Placement {
        Placement::V
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 2)?;
        let mut slots = Slots::repeat(shape.ranks as usize, shape.micro_batches as usize);
        slots.squeeze();
        Ok(slots.rows())
    }
}

/// The passes of a micro-batch on a rank, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    ForwardDown,
    ForwardUp,
    BackwardUp,
    BackwardDown,
}

const PASSES: [Pass; 4] = [Pass::ForwardDown, Pass::ForwardUp, Pass::BackwardUp, Pass::BackwardDown];

impl Pass {
    fn is_forward(self) -> bool {
        matches!(self, Self::ForwardDown | Self::ForwardUp)
    }

    /// True if the pass goes from rank 0 to the last rank.
    fn descends(self) -> bool {
        matches!(self, Self::ForwardDown | Self::BackwardUp)
    }

    /// Returns the number of slots of the pass.
    fn length(self) -> usize {
        if self.is_forward() { 1 } else { 2 }
    }

    /// Returns the first slot of the pass for micro-batch 0. If the number of ranks is divisible by three, the
    /// micro-batch waits for three slots on rank 0, between the forward and the backward of the last stage. Without
    /// this wait, two of the pattern's slots would coincide modulo six.
    fn first(self, ranks: usize, rank: usize) -> usize {
        let turn = if ranks.is_multiple_of(3) { 3 } else { 0 };
        let backward = |nth: usize| 2 * ranks + turn + 2 * nth + 3 * ((nth + [1, 0, 2][ranks % 3]) / 3);
        match self {
            Self::ForwardDown => rank,
            Self::ForwardUp => 2 * ranks - 1 - rank,
            Self::BackwardUp => backward(rank),
            Self::BackwardDown => backward(2 * ranks - 1 - rank),
        }
    }
}

/// The slots of all ranks.
struct Slots {
    ranks: Vec<RankSlots>,
}

struct RankSlots {
    /// First slot of each pass, as `[pass][micro-batch]`.
    starts: [Vec<usize>; 4],
    taken: Vec<bool>,
    /// Chunks alive after each slot. A backward frees its chunk in its last slot.
    live: Vec<u32>,
}

impl Slots {
    fn repeat(ranks: usize, micro_batches: usize) -> Self {
        let first_end = Pass::BackwardDown.first(ranks, 0) + Pass::BackwardDown.length();
        let end = first_end + PERIOD * (micro_batches - 1);
        let ranks =
            (0..ranks).map(|rank| RankSlots::repeat(PASSES.map(|pass| pass.first(ranks, rank)), micro_batches, end));
        Self { ranks: ranks.collect() }
    }

    /// Moves every pass, in order of time, to the earliest place that its inputs allow and that does not raise the
    /// peak.
    fn squeeze(&mut self) {
        let peak = self.ranks.iter().flat_map(|rank| &rank.live).copied().max().unwrap_or_default();
        let mut uses: Vec<(usize, usize, Pass, usize)> = Vec::new();
        for (rank, slots) in self.ranks.iter().enumerate() {
            for (pass, starts) in PASSES.into_iter().zip(&slots.starts) {
                uses.extend(starts.iter().enumerate().map(|(index, &start)| (start, rank, pass, index)));
            }
        }
        uses.sort_unstable();
        for (start, rank, pass, index) in uses {
            let earliest = self.earliest(rank, pass, index);
            let slots = &mut self.ranks[rank];
            let place = if pass.is_forward() {
                slots.place_forward(earliest, start, peak)
            } else {
                slots.place_backward(earliest, start)
            };
            slots.shift(pass, index, place);
        }
    }

    /// Returns the first slot after every pass on which this pass depends, and after the same pass of the micro-batch
    /// before.
    fn earliest(&self, rank: usize, pass: Pass, index: usize) -> usize {
        let end = |rank: usize, pass: Pass, index| self.ranks[rank].starts[pass as usize][index] + pass.length();
        let neighbour = if pass.descends() { rank.checked_sub(1) } else { Some(rank + 1) };
        let received = match neighbour.filter(|&neighbour| neighbour < self.ranks.len()) {
            Some(neighbour) => end(neighbour, pass, index),
            None if pass == Pass::ForwardDown => 0,
            None => end(rank, PASSES[pass as usize - 1], index),
        };
        let previous = index.checked_sub(1).map_or(0, |previous| end(rank, pass, previous));
        received.max(previous)
    }

    fn rows(&self) -> Vec<Vec<Action>> {
        let ranks = self.ranks.len() as u32;
        let row = |(rank, slots): (u32, &RankSlots)| {
            let mut timed: Vec<(usize, Action)> = Vec::new();
            for (pass, starts) in PASSES.into_iter().zip(&slots.starts) {
                let kind = if pass.is_forward() { Kind::Forward } else { Kind::Backward };
                let chunk = u32::from(matches!(pass, Pass::ForwardUp | Pass::BackwardUp));
                let stage = Placement::V.stage(ranks, rank, chunk);
                timed.extend((0..).zip(starts).map(|(index, &start)| (start, Action::new(kind, stage, index))));
            }
            timed.sort_unstable_by_key(|(start, _)| *start);
            timed.into_iter().map(|(_, action)| action).collect()
        };
        (0..).zip(&self.ranks).map(row).collect()
    }
}

impl RankSlots {
    fn repeat(pattern: [usize; 4], micro_batches: usize, end: usize) -> Self {
        let starts = pattern.map(|first| (0..micro_batches).map(|index| first + PERIOD * index).collect::<Vec<_>>());
        let (mut taken, mut live) = (vec![false; end], vec![0; end]);
        let mut uses: Vec<(usize, Pass)> = Vec::new();
        for (pass, starts) in PASSES.into_iter().zip(&starts) {
            uses.extend(starts.iter().map(|&start| (start, pass)));
        }
        uses.sort_unstable();
        let (mut at, mut alive) = (0, 0);
        for (start, pass) in uses {
            let last = start + pass.length() - 1;
            taken[start..=last].fill(true);
            live[at..last].fill(alive);
            if pass.is_forward() {
                alive += 1
            } else {
                alive -= 1
            }
            at = last;
        }
        live[at..].fill(alive);
        Self { starts, taken, live }
    }

    /// Returns the first slot from `earliest` on that is free and followed by another free slot. If there is no such
    /// slot before `start`, returns `start`.
    fn place_backward(&self, earliest: usize, start: usize) -> usize {
        (earliest..start).find(|&slot| !self.taken[slot] && !self.taken[slot + 1]).unwrap_or(start)
    }

    /// Returns the first free slot from `earliest` on after which one more chunk can be alive without exceeding `peak`.
    /// If there is no such slot before `start`, returns `start`.
    fn place_forward(&self, earliest: usize, start: usize, peak: u32) -> usize {
        let full = (earliest..start).rev().find(|&slot| self.live[slot] >= peak);
        let from = full.map_or(earliest, |slot| slot + 1);
        (from..start).find(|&slot| !self.taken[slot]).unwrap_or(start)
    }

    fn shift(&mut self, pass: Pass, index: usize, place: usize) {
        let start = std::mem::replace(&mut self.starts[pass as usize][index], place);
        let length = pass.length();
        self.taken[start..start + length].fill(false);
        self.taken[place..place + length].fill(true);
        if pass.is_forward() {
            self.live[place..start].iter_mut().for_each(|live| *live += 1);
        } else {
            self.live[place + 1..start + 1].iter_mut().for_each(|live| *live -= 1);
        }
    }
}
