//! The search of Qi et al. (arXiv 2401.10241, section 6) for two chunks per rank in the shape of a V. It searches an
//! order for given costs and a limit on activations.
//!
//! First comes a warm-up that fills the V. Then come rounds of one input gradient and at most one forward per rank.
//! Weight gradients go where a rank would wait or has to free memory. For two kinds of gaps, the search tries both with
//! and without weight gradients that overrun the gap: gaps before forwards, and gaps before input gradients on the way
//! up.
//!
//! Each attempt measures how long every rank has waited. In the next attempt, a rank that waited less than the
//! longest-waiting rank may wait longer by the difference. This repeats as long as it helps.

use super::gap_filling::{Overrun, PartialOrders, Saved, Setting};
use super::{Placement, Schedule, Shape};
use crate::{Action, Costs, Durations, Error, Kind};

/// The searched ZBV schedule, for costs that are not all equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchedZbv {
    /// Costs per stage for which the order is searched. As in the authors' code, the median of each kind of costs is
    /// used for all stages, since the warm-up assumes that all ranks are equally fast.
    pub costs: Vec<Costs>,
    /// The maximum number of activations alive on any rank, in forwards of one chunk. The default is 2P, the peak of
    /// 1F1B.
    pub peak: Option<u32>,
    /// The sizes of the activations of a forward that each gradient frees.
    pub saved: Saved,
}

/// One tick per action, and the peak of 1F1B.
impl Default for SearchedZbv {
    fn default() -> Self {
        Self { costs: vec![Costs::default()], peak: None, saved: Saved::default() }
    }
}

impl Schedule for SearchedZbv {
    fn name(&self) -> &'static str {
        "zbv-searched"
    }

    fn placement(&self) -> Placement {
        Placement::V
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check_chunks(self.name(), 2)?;
        let enough = 2 * shape.ranks;
        let peak = self.peak.unwrap_or(enough);
        let costs = [middle(&self.costs)];
        let setting = Setting { costs: &costs, shape, placement: Placement::V, saved: self.saved, peak };
        let found = Choices::all().filter_map(|choices| Search::improve(setting, choices));
        let shortest = found.min_by_key(PartialOrders::longest_wait);
        shortest.map(PartialOrders::rows).ok_or(Error::Room { schedule: self.name(), needed: enough, peak })
    }
}

/// Returns the median over all stages, for each kind of costs.
fn middle(costs: &[Costs]) -> Costs {
    let averaged = |ticks: fn(&Costs) -> u64| {
        let mut all: Vec<u64> = costs.iter().map(ticks).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or_default()
    };
    Costs {
        forward: averaged(|costs| costs.forward),
        backward_input: averaged(|costs| costs.backward_input),
        backward_weight: averaged(|costs| costs.backward_weight),
        overlapped: averaged(|costs| costs.overlapped),
        transfer: averaged(|costs| costs.transfer),
    }
}

/// Whether a weight gradient is run in a gap that is shorter than the weight gradient, if waiting through the gap would
/// make the rank the one that waits longest. There is one choice for each kind of action after the gap.
#[derive(Debug, Clone, Copy)]
struct Choices {
    /// For gaps before input gradients on the way up. Before input gradients on the way down, the weight gradient is
    /// always run.
    input_up: bool,
    /// For gaps before forwards.
    forward: bool,
}

impl Choices {
    fn all() -> impl Iterator<Item = Self> {
        let both = [true, false];
        both.into_iter().flat_map(move |input_up| both.map(|forward| Self { input_up, forward }))
    }
}

/// One order under construction.
struct Search<'a> {
    growth: PartialOrders<'a>,
    setting: Setting<'a>,
    choices: Choices,
}

impl<'a> Search<'a> {
    /// Repeats the search until an attempt is no better than the attempt before, and returns the best orders. Each
    /// attempt uses the waiting times that the attempt before has measured. Returns `None` if the first attempt finds
    /// no orders within the limit.
    fn improve(setting: Setting<'a>, choices: Choices) -> Option<PartialOrders<'a>> {
        let mut best = Self::run(setting, choices, Vec::new())?;
        loop {
            let lent = best.waits().into_iter().map(|waited| best.longest_wait() - waited).collect();
            match Self::run(setting, choices, lent) {
                Some(next) if next.longest_wait() < best.longest_wait() => best = next,
                _ => return Some(best),
            }
        }
    }

    fn run(setting: Setting<'a>, choices: Choices, lent: Vec<u64>) -> Option<PartialOrders<'a>> {
        let mut search = Self { growth: PartialOrders::new(setting, lent), setting, choices };
        search.warm_up()?;
        for _ in 0..2 * setting.shape.micro_batches {
            search.round()?;
        }
        (0..setting.shape.ranks).for_each(|rank| search.growth.flush(rank));
        Some(search.growth)
    }

    /// Adds forwards only. The first micro-batch goes down and up the ranks. While it is on other ranks, a rank runs
    /// forwards of later micro-batches. Then forwards follow until every rank has begun as many chunks as the first
    /// rank. Returns `None` if these forwards exceed the limit.
    fn warm_up(&mut self) -> Option<()> {
        let Shape { ranks, micro_batches, .. } = *self.setting.shape;
        for rank in 0..ranks {
            self.growth.put(Kind::Forward, self.down(rank))?;
        }
        for rank in (0..ranks).rev() {
            let forward = self.setting.costs.action(Action::new(Kind::Forward, self.down(rank), 0));
            // Adds a further forward on this rank and on each rank before it, on two conditions. This rank's forward
            // must end before the first micro-batch comes back up, and the limit must leave room for two forwards per
            // rank of the remaining way.
            while self.growth.arrival(Kind::Forward, self.up(rank))? >= self.growth.free(rank) + forward
                && self.growth.room(rank) >= 2 * u64::from(rank) + 2
                && self.growth.done(Kind::Forward, self.down(rank)) < micro_batches
            {
                (0..=rank).try_for_each(|rank| self.growth.put(Kind::Forward, self.down(rank)))?;
            }
            self.growth.put(Kind::Forward, self.up(rank))?;
        }
        let mut goes_up = false;
        for rank in 1..ranks {
            while self.is_behind(rank) {
                for rank in (rank..ranks).rev() {
                    let stage = if goes_up { self.up(rank) } else { self.down(rank) };
                    if self.growth.done(Kind::Forward, stage) < micro_batches {
                        self.growth.put(Kind::Forward, stage)?;
                    }
                }
                goes_up = !goes_up;
            }
        }
        Some(())
    }

    /// True if the rank has begun fewer chunks than the rank before it, or has a chunk that could go up to that rank.
    fn is_behind(&self, rank: u32) -> bool {
        let [before, here] = [rank - 1, rank]
            .map(|rank| [self.down(rank), self.up(rank)].map(|stage| self.growth.done(Kind::Forward, stage)));
        here[0] + here[1] < before[0] + before[1]
            || here[1] <= before[1] && before[1] < self.setting.shape.micro_batches
    }

    /// Adds one input gradient of every rank, then at most one forward of every rank. Returns `None` if one of these
    /// actions cannot be added.
    fn round(&mut self) -> Option<()> {
        let ranks = self.setting.shape.ranks;
        let (ups, downs): (Vec<u32>, Vec<u32>) = (0..ranks).partition(|&rank| self.next_input_goes_up(rank));
        for rank in downs.into_iter().rev() {
            self.put(Kind::BackwardInput, self.down(rank), true)?;
        }
        for rank in ups {
            self.put(Kind::BackwardInput, self.up(rank), self.choices.input_up)?;
        }
        for rank in 0..ranks {
            if let Some(stage) = self.next_forward(rank) {
                self.growth.make_room(rank)?;
                self.put(Kind::Forward, stage, self.choices.forward)?;
            }
        }
        Some(())
    }

    fn put(&mut self, kind: Kind, stage: u32, overruns: bool) -> Option<()> {
        self.growth.fill_gap(kind, stage, Overrun { affordable: false, costly: overruns });
        self.growth.put(kind, stage)
    }

    /// True if the next input gradient is on the way up. An input gradient on the way down comes first as soon as its
    /// input has arrived.
    fn next_input_goes_up(&self, rank: u32) -> bool {
        let done = |stage| self.growth.done(Kind::BackwardInput, stage);
        let (up, down) = (done(self.up(rank)), done(self.down(rank)));
        let has_arrived = self.growth.arrival(Kind::BackwardInput, self.down(rank)).is_some();
        down >= up || !has_arrived && up < self.setting.shape.micro_batches
    }

    /// Returns the stage of a rank's next forward, or `None` if no forward is due. A forward on the way up comes first
    /// as soon as its input has arrived.
    fn next_forward(&self, rank: u32) -> Option<u32> {
        let (down, up) = (self.down(rank), self.up(rank));
        let done = |stage| self.growth.done(Kind::Forward, stage);
        let has_arrived = |stage| self.growth.arrival(Kind::Forward, stage).is_some();
        if done(up) < done(down) && has_arrived(up) {
            return Some(up);
        }
        // If every micro-batch that went down has also come up, a forward on the way down is due. If its input has not
        // arrived, the search fails.
        (done(down) < self.setting.shape.micro_batches && (done(up) >= done(down) || has_arrived(down))).then_some(down)
    }

    fn down(&self, rank: u32) -> u32 {
        Placement::V.stage(self.setting.shape.ranks, rank, 0)
    }

    fn up(&self, rank: u32) -> u32 {
        Placement::V.stage(self.setting.shape.ranks, rank, 1)
    }
}
