//! The automatic schedule of Qi et al. (arXiv 2401.10241, section 3): one chunk per rank, with an order that is
//! searched for given costs and a limit on activations. With a limit of P forwards, this is the authors' ZB-1p. With a
//! limit of 2P forwards, it is their ZB-2p.
//!
//! First comes a warm-up that is as long as time and memory allow. Then come rounds of at most one forward and one
//! input gradient per rank. Weight gradients go where a rank would wait or has to free memory. The rules do not
//! determine three choices (`Choices`). All eight combinations of them are tried, and the first of the shortest orders
//! is returned.

use super::gap_filling::{Overrun, PartialOrders, Saved, Setting};
use super::{Placement, Schedule, Shape};
use crate::{Action, Costs, Durations, Error, Kind};

/// The searched zero-bubble schedule: ZB-1p, ZB-2p, and other limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchedZb {
    /// Costs per stage for which the order is searched. A single entry holds for all stages.
    pub costs: Vec<Costs>,
    /// The maximum number of activations alive on any rank, in forwards. The default is P, the peak of 1F1B.
    pub peak: Option<u32>,
    /// The sizes of the activations of a forward that each gradient frees.
    pub saved: Saved,
}

/// One tick per action, and the peak of 1F1B.
impl Default for SearchedZb {
    fn default() -> Self {
        Self { costs: vec![Costs::default()], peak: None, saved: Saved::default() }
    }
}

impl Schedule for SearchedZb {
    fn name(&self) -> &'static str {
        "zb-searched"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 1)?;
        let peak = self.peak.unwrap_or(shape.ranks);
        let setting = Setting { costs: &self.costs, shape, placement: Placement::Loop, saved: self.saved, peak };
        let found = Choices::all().filter_map(|choices| Search::run(setting, choices));
        let shortest = found.min_by_key(PartialOrders::longest_span);
        shortest.map(PartialOrders::rows).ok_or(Error::Room { schedule: self.name(), needed: 1, peak })
    }
}

/// The choices that the rules of the search do not determine.
#[derive(Debug, Clone, Copy)]
struct Choices {
    /// True if the warm-up ends before the first input gradient arrives, false if it ends after.
    waits_for_first_input: bool,
    /// True if a rank leaves a forward out when that forward would delay the next input gradient.
    inputs_first: bool,
    /// True if a weight gradient is run even in a gap that the rank could afford to wait through.
    eager: bool,
}

impl Choices {
    fn all() -> impl Iterator<Item = Self> {
        let both = [true, false];
        both.into_iter().flat_map(move |waits_for_first_input| {
            both.into_iter()
                .flat_map(move |inputs_first| both.map(|eager| Self { waits_for_first_input, inputs_first, eager }))
        })
    }
}

/// One order under construction. A rank and its only stage have the same number.
struct Search<'a> {
    growth: PartialOrders<'a>,
    setting: Setting<'a>,
    choices: Choices,
}

impl<'a> Search<'a> {
    fn run(setting: Setting<'a>, choices: Choices) -> Option<PartialOrders<'a>> {
        let mut search = Self { growth: PartialOrders::new(setting, Vec::new()), setting, choices };
        search.warm_up()?;
        for _ in 1..setting.shape.micro_batches {
            search.round()?;
        }
        (0..setting.shape.ranks).for_each(|rank| search.growth.flush(rank));
        Some(search.growth)
    }

    /// Adds each rank's forwards up to the rank's first input gradient, and that input gradient. Returns `None` if one
    /// of these actions cannot be added.
    fn warm_up(&mut self) -> Option<()> {
        let ranks = self.setting.shape.ranks;
        for rank in 0..ranks {
            self.growth.put(Kind::Forward, rank)?;
        }
        for (rank, further) in (0..).zip(self.further_forwards()) {
            for _ in 0..further {
                self.growth.put(Kind::Forward, rank)?;
            }
        }
        (0..ranks).rev().try_for_each(|rank| self.growth.put(Kind::BackwardInput, rank))
    }

    /// Returns the number of forwards that each rank runs between its first forward and its first input gradient.
    fn further_forwards(&self) -> Vec<u32> {
        let Setting { costs, shape, .. } = self.setting;
        let mut further = vec![0; shape.ranks as usize];
        let mut arrival = 0;
        for rank in (0..shape.ranks).rev() {
            let forward = costs.action(Action::new(Kind::Forward, rank, 0));
            let input = Action::new(Kind::BackwardInput, rank, 0);
            let mut free = self.growth.free(rank);
            let room = self.growth.room(rank).min(u64::from(shape.micro_batches) - 1) as u32;
            let further = &mut further[rank as usize];
            while *further < room
                && if self.choices.waits_for_first_input { free + forward <= arrival } else { free < arrival }
            {
                free += forward;
                *further += 1;
            }
            arrival = free.max(arrival) + costs.action(input) + costs.transfer(input);
        }
        // Each rank runs fewer forwards than the rank before it. Otherwise the rank would have to wait for a forward of
        // the rank before. A rank that runs all forwards is the exception.
        for rank in 1..further.len() {
            let before = further[rank - 1];
            let are_all = before.min(further[rank]) + 1 == shape.micro_batches;
            further[rank] = further[rank].min(if are_all { before } else { before.saturating_sub(1) });
        }
        further
    }

    /// Adds one input gradient of every rank, each after at most one forward. Returns `None` if one of these actions
    /// cannot be added.
    fn round(&mut self) -> Option<()> {
        let Shape { ranks, micro_batches, .. } = *self.setting.shape;
        let overrun = Overrun { affordable: self.choices.eager, costly: true };
        // If a rank leaves out a forward, the ranks before it need not compute that forward's input.
        let first = (0..ranks).rev().find(|&rank| !self.wants_forward(rank)).map_or(0, |rank| rank + 1);
        for rank in first..ranks {
            self.growth.make_room(rank)?;
            self.growth.fill_gap(Kind::Forward, rank, overrun);
            self.growth.put(Kind::Forward, rank)?;
        }
        for rank in (0..ranks).rev() {
            self.growth.fill_gap(Kind::BackwardInput, rank, overrun);
            if rank == 0 && self.growth.done(Kind::Forward, 0) == micro_batches {
                self.growth.flush(0);
            }
            self.growth.put(Kind::BackwardInput, rank)?;
        }
        Some(())
    }

    fn wants_forward(&self, rank: u32) -> bool {
        let Setting { costs, shape, .. } = self.setting;
        let done = |rank| self.growth.done(Kind::Forward, rank);
        if done(rank) == shape.micro_batches {
            return false;
        }
        let next = rank + 1;
        if !self.choices.inputs_first || next == shape.ranks || done(rank) < done(next) + 2 {
            return true;
        }
        // The next rank has enough other work, so this rank's forward may wait for the input gradient if that gains
        // time.
        let [forward, next_forward] = [rank, next].map(|rank| costs.action(Action::new(Kind::Forward, rank, 0)));
        let input = Action::new(Kind::BackwardInput, next, 0);
        let arrival = self.growth.free(next) + next_forward + costs.action(input) + costs.transfer(input);
        let free = self.growth.free(rank);
        let fits = free + self.growth.room_ticks(rank) + forward <= arrival;
        free < arrival && (fits || arrival - free > self.growth.affordable(rank))
    }
}
