//! Orders that are grown on all ranks, with weight gradients in the gaps. This is the common part of the two searches
//! of Qi et al. (arXiv 2401.10241, sections 3 and 6).
//!
//! In: for each step of the growth, the stage whose next forward or input gradient is added. Out: every rank's order,
//! and how long each rank waited. The caller doesn't place weight gradients. They go into gaps in which a rank would
//! wait, to places where they have to free memory, or to the end.

use std::collections::VecDeque;

use super::{Placement, Shape};
use crate::{Action, Costs, Durations, Kind};

/// The memory that a forward keeps on its rank until the gradients are computed, in any unit.
///
/// The limit of the searches is a number of forwards. Each input gradient frees a fraction of a forward's memory, and
/// each weight gradient frees the rest. With [`Saved::WEIGHT`], everything is kept until the weight gradient, as 1F1B
/// keeps everything until the whole backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// The memory that the input gradient frees.
    pub for_input: u32,
    /// The memory that the weight gradient frees.
    pub for_weight: u32,
}

/// The values for a transformer layer that keeps its attention scores. Such a layer keeps 34 + 5as/h bytes per element
/// (Korthikanti et al., arXiv 2205.05198, section 4.1). 32 of these bytes are inputs of matrix products and are freed
/// by weight gradients. The rest is 82 bytes if sequences are 16 times as long as a head is wide.
impl Default for Saved {
    fn default() -> Self {
        Self { for_input: 82, for_weight: 32 }
    }
}

impl Saved {
    /// Everything is kept until the weight gradient.
    pub const WEIGHT: Self = Self { for_input: 0, for_weight: 1 };

    fn total(self) -> u64 {
        u64::from(self.for_input) + u64::from(self.for_weight)
    }
}

/// The inputs of a search: the costs, the shape and the placement of the stages, the memory that forwards keep, and the
/// limit of that memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting<'a> {
    pub costs: &'a [Costs],
    pub shape: &'a Shape,
    pub placement: Placement,
    pub saved: Saved,
    /// The memory limit of each rank, as the number of forwards whose memory ([`Saved`]) may be alive at the same time.
    pub peak: u32,
}

/// The orders of all ranks so far.
pub(super) struct PartialOrders<'a> {
    setting: Setting<'a>,
    ranks: Vec<Rank>,
    /// Ends of the forwards and of the input gradients of each stage, indexed by micro-batch.
    ends: [Vec<Vec<u64>>; 2],
    /// By rank: the ticks that the rank may wait in all without loss, because another rank waits that long anyway.
    lent: Vec<u64>,
}

#[derive(Default)]
struct Rank {
    row: Vec<Action>,
    begun: u64,
    free: u64,
    /// Ticks that the rank has waited since its first action.
    waited: u64,
    live: u64,
    /// Weight gradients whose input gradients are done, oldest first.
    pending: VecDeque<Action>,
}

/// Whether a weight gradient that is longer than the gap is run anyway, for two kinds of gaps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Overrun {
    /// For gaps that the rank can wait through without becoming the rank that waits longest.
    pub affordable: bool,
    /// For longer gaps.
    pub costly: bool,
}

impl<'a> PartialOrders<'a> {
    /// Starts with empty orders. Ranks without an entry in `lent` get 0.
    pub fn new(setting: Setting<'a>, mut lent: Vec<u64>) -> Self {
        let ranks: Vec<Rank> = (0..setting.shape.ranks).map(|_| Rank::default()).collect();
        lent.resize(ranks.len(), 0);
        let stages = vec![Vec::new(); (setting.shape.ranks * setting.shape.chunks) as usize];
        Self { setting, ranks, ends: [stages.clone(), stages], lent }
    }

    /// Returns the number of forwards or input gradients of `stage` so far.
    pub fn done(&self, kind: Kind, stage: u32) -> u32 {
        self.ends_of(kind, stage).len() as u32
    }

    /// Returns the tick from which on the next forward or input gradient of `stage` can start. Returns `None` if the
    /// action that computes its input has not been added yet, or if all micro-batches are done.
    pub fn arrival(&self, kind: Kind, stage: u32) -> Option<u64> {
        let micro_batch = self.done(kind, stage);
        if micro_batch == self.setting.shape.micro_batches {
            return None;
        }
        let last = self.ends[0].len() as u32 - 1;
        let from = match kind {
            Kind::Forward if stage == 0 => return Some(0),
            Kind::Forward => Action::new(kind, stage - 1, micro_batch),
            _ if stage == last => Action::new(Kind::Forward, stage, micro_batch),
            _ => Action::new(kind, stage + 1, micro_batch),
        };
        let end = *self.ends_of(from.kind, from.stage.0).get(micro_batch as usize)?;
        let is_message = self.owner(from.stage.0) != self.owner(stage);
        Some(end + if is_message { self.setting.costs.transfer(from) } else { 0 })
    }

    /// Adds the next forward or input gradient of `stage`. Returns `None` if its input has not been computed yet, or if
    /// a forward would exceed the limit.
    pub fn put(&mut self, kind: Kind, stage: u32) -> Option<()> {
        let arrival = self.arrival(kind, stage)?;
        let action = Action::new(kind, stage, self.done(kind, stage));
        let owner = self.owner(stage);
        let total = self.setting.saved.total();
        if kind == Kind::Forward {
            self.ranks[owner].live += total;
            if self.ranks[owner].live > self.limit() {
                return None;
            }
        } else {
            self.ranks[owner].live -= u64::from(self.setting.saved.for_input);
            self.ranks[owner].pending.push_back(Action { kind: Kind::BackwardWeight, ..action });
        }
        let end = self.run(owner, action, arrival);
        self.ends[usize::from(kind != Kind::Forward)][stage as usize].push(end);
        Some(())
    }

    /// Adds weight gradients until another forward fits. Returns `None` if none is left and the forward still doesn't
    /// fit.
    pub fn make_room(&mut self, rank: u32) -> Option<()> {
        while self.room(rank) == 0 {
            self.put_weight(rank as usize)?;
        }
        Some(())
    }

    /// Runs pending weight gradients while the rank would otherwise wait for the input of the next action of `stage`.
    /// `overrun` says whether one may run past the end of the gap.
    pub fn fill_gap(&mut self, kind: Kind, stage: u32, overrun: Overrun) {
        let Some(arrival) = self.arrival(kind, stage) else { return };
        let owner = self.owner(stage);
        while let Some(&weight) = self.ranks[owner].pending.front() {
            let rank = &self.ranks[owner];
            if rank.free + self.setting.costs.action(weight) > arrival {
                let gap = arrival.saturating_sub(rank.free);
                let starts = if gap > self.affordable(owner as u32) { overrun.costly } else { overrun.affordable };
                if gap > 0 && starts {
                    self.put_weight(owner);
                }
                return;
            }
            self.put_weight(owner);
        }
    }

    /// Adds all weight gradients whose input gradients are done.
    pub fn flush(&mut self, rank: u32) {
        while self.put_weight(rank as usize).is_some() {}
    }

    /// Returns the ticks that this rank can wait without becoming the rank that waits longest.
    pub fn affordable(&self, rank: u32) -> u64 {
        let rank = rank as usize;
        self.longest_wait().max(self.lent[rank]) - self.ranks[rank].waited
    }

    /// Returns the number of further forwards that fit within the limit.
    pub fn room(&self, rank: u32) -> u64 {
        let free = self.limit() - self.ranks[rank as usize].live;
        free.checked_div(self.setting.saved.total()).unwrap_or(u64::MAX)
    }

    /// Returns the ticks of the weight gradients that must run before another forward fits.
    pub fn room_ticks(&self, rank: u32) -> u64 {
        let Rank { live, pending, .. } = &self.ranks[rank as usize];
        let over = (live + self.setting.saved.total()).saturating_sub(self.limit());
        let weight = u64::from(self.setting.saved.for_weight);
        let needed = (0..).take_while(|count| count * weight < over);
        pending.iter().zip(needed).map(|(&weight, _)| self.setting.costs.action(weight)).sum()
    }

    /// Returns the tick at which the rank has finished all actions added so far.
    pub fn free(&self, rank: u32) -> u64 {
        self.ranks[rank as usize].free
    }

    /// Returns the ticks that each rank waited since its first action.
    pub fn waits(&self) -> Vec<u64> {
        self.ranks.iter().map(|rank| rank.waited).collect()
    }

    /// Returns the longest wait of a rank since its first action.
    pub fn longest_wait(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.waited).max().unwrap_or_default()
    }

    /// Returns the longest time from a rank's first action to the end of its last.
    pub fn longest_span(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.free - rank.begun).max().unwrap_or_default()
    }

    /// Returns every rank's order.
    pub fn rows(self) -> Vec<Vec<Action>> {
        self.ranks.into_iter().map(|rank| rank.row).collect()
    }

    fn put_weight(&mut self, owner: usize) -> Option<()> {
        let weight = self.ranks[owner].pending.pop_front()?;
        self.ranks[owner].live -= u64::from(self.setting.saved.for_weight);
        self.run(owner, weight, 0);
        Some(())
    }

    fn run(&mut self, owner: usize, action: Action, arrival: u64) -> u64 {
        let rank = &mut self.ranks[owner];
        let start = rank.free.max(arrival);
        match rank.row.is_empty() {
            true => rank.begun = start,
            false => rank.waited += start - rank.free,
        }
        rank.free = start + self.setting.costs.action(action);
        rank.row.push(action);
        rank.free
    }

    fn limit(&self) -> u64 {
        u64::from(self.setting.peak).saturating_mul(self.setting.saved.total())
    }

    fn ends_of(&self, kind: Kind, stage: u32) -> &[u64] {
        &self.ends[usize::from(kind != Kind::Forward)][stage as usize]
    }

    fn owner(&self, stage: u32) -> usize {
        self.setting.placement.owner(self.setting.shape.ranks, stage) as usize
    }
}
