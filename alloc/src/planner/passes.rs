//! Ways to lower the best plan of a part that sweeps have left above its goal, and in which order they are taken.

use super::classes::classes;
use super::descend::descend;
use super::exact::{self, Verdict};
use super::meter::Meter;
use super::portfolio::{Placed, Portfolio};
use super::scale::{Scale, scales};

/// What a part should reach.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Goal {
    /// Nothing lower helps: the bound of the whole problem.
    pub ceiling: u64,
    /// Nothing lower is asked for.
    pub enough: u64,
}

impl Goal {
    pub fn is_met(self, portfolio: &Portfolio) -> bool {
        portfolio.best.as_ref().is_some_and(|b| b.height <= self.enough)
    }
}

/// One way to lower the best plan, and which share of the work that is left it may spend: one in so many.
pub(crate) type Pass = (u64, fn(Goal, &mut Portfolio));

/// What comes before a search of a small part: cheap there, and often enough.
pub(crate) const PLACEMENTS: [Pass; 2] =
    [(16, |_, portfolio| portfolio.long_once()), (16, |_, portfolio| portfolio.order_once())];

/// What settles most of what sweeps leave.
pub(crate) const QUICK_PASSES: [Pass; 9] = [
    (256, mend),
    (32, take_back),
    (32, |_, portfolio| portfolio.repair()),
    (8, |goal, portfolio| {
        let enough = CLASSES_PER_ITEM * portfolio.timeline.part.items.len() as u64;
        within(enough, portfolio, |portfolio| by_classes(goal, portfolio));
    }),
    (16, |_, portfolio| portfolio.long_once()),
    (16, |_, portfolio| portfolio.order_once()),
    (64, mend),
    (4, leap),
    (3, look_ahead),
];

/// Work for each item that sizes apart may cost, and how much of it those that flow around them. Where that helps, a sixth
/// of the whole was enough, and two thirds of the share.
const CLASSES_PER_ITEM: u64 = 4_000;
const AROUND_PER_ITEM: u64 = 600;

/// Repairs start from different plans, first with little work each: what one can't reach is often near another.
pub(crate) const PASSES: [Pass; 9] = [
    (4, take_back),
    (3, from_coarse_to_fine),
    (8, |_, portfolio| portfolio.repair()),
    (6, mend_others),
    (8, mend),
    (3, |_, portfolio| portfolio.long_once()),
    (8, mend_others),
    (3, from_coarse_to_fine),
    (1, mend),
];

/// What is tried on some of the items alone.
const COARSE_PASSES: [Pass; 10] = [
    (1, |_, portfolio| portfolio.sweep_once()),
    (2, |goal, portfolio| {
        if portfolio.is_small() {
            search(goal.enough, portfolio.meter.left(), portfolio);
        }
    }),
    (2, take_back),
    (3, leap),
    (2, look_ahead),
    (8, mend),
    (3, |_, portfolio| portfolio.long_once()),
    (8, |_, portfolio| portfolio.order_once()),
    (2, mend_others),
    (1, mend),
];

/// Runs passes one after another until the goal is met or the meter stops.
pub(crate) fn run(passes: &[Pass], goal: Goal, portfolio: &mut Portfolio) {
    for &(share, pass) in passes {
        if is_over(goal, portfolio) {
            return;
        }
        within(portfolio.meter.left() / share, portfolio, |portfolio| pass(goal, portfolio));
    }
}

/// Runs something that may spend `work` of what is left.
pub(crate) fn within(work: u64, portfolio: &mut Portfolio, run: impl FnOnce(&mut Portfolio)) {
    let all = portfolio.meter.work;
    portfolio.meter.work = all.min(portfolio.meter.spent.saturating_add(work));
    run(portfolio);
    portfolio.meter.work = all;
}

fn is_over(goal: Goal, portfolio: &Portfolio) -> bool {
    goal.is_met(portfolio) || portfolio.meter.stopped().is_some()
}

/// Searches for a plan of at most `capacity` bytes.
pub(crate) fn search(capacity: u64, work: u64, portfolio: &mut Portfolio) -> Verdict {
    let part = portfolio.timeline.part;
    let verdict = exact::search(part, capacity, work, &mut portfolio.meter);
    if let Verdict::Found(offsets) = &verdict {
        portfolio.offer(Some(Placed { height: part.height(offsets), offsets: offsets.clone() }));
    }
    verdict
}

/// Sweeps that take back what led nowhere: first to the goal itself, then halfway between the lowest height that was
/// missed and the best plan. Where such a height was met, what is left is spent on the goal; where the first two were
/// missed, others may do better with it.
fn take_back(goal: Goal, portfolio: &mut Portfolio) {
    let small_below = scales(portfolio.timeline.part).first().map_or(0, Scale::least);
    let try_for = |target: u64, share: u64, portfolio: &mut Portfolio| {
        let mut found = false;
        within(portfolio.meter.left() / share, portfolio, |portfolio| found = portfolio.retrace(target, small_below));
        found
    };
    if try_for(goal.enough, 3, portfolio) {
        return;
    }
    let grain = portfolio.timeline.part.grain();
    let (mut lowest, mut met) = (goal.enough, 0);
    for tried in 1..=HEIGHTS {
        let height = portfolio.best.as_ref().map_or(lowest, |best| best.height);
        let step = height.saturating_sub(lowest) / 2;
        if step < grain || is_over(goal, portfolio) {
            break;
        }
        let target = lowest + step - step % grain;
        if try_for(target, 8, portfolio) {
            met += 1;
        } else {
            lowest = target;
        }
        if tried == 2 && met == 0 {
            return;
        }
    }
    try_for(goal.enough, 1, portfolio);
}

/// Sweeps that keep several layouts, to the goal itself.
fn look_ahead(goal: Goal, portfolio: &mut Portfolio) {
    portfolio.look_ahead(goal.enough);
}

/// Sweeps that compare layouts where there is least to spare, to the goal itself.
fn leap(goal: Goal, portfolio: &mut Portfolio) {
    portfolio.leap(goal.enough);
}

/// Heights between the goal and the best plan that are tried.
const HEIGHTS: u32 = 6;

/// Repairs the best plan.
pub(crate) fn mend(goal: Goal, portfolio: &mut Portfolio) {
    if let Some(best) = &portfolio.best {
        let places: Vec<Option<u64>> = best.offsets.iter().copied().map(Some).collect();
        let placed = descend(portfolio.timeline.part, &places, goal.enough, &mut portfolio.meter);
        portfolio.offer(placed);
    }
}

/// Repairs the plans beside the best, in equal shares.
fn mend_others(goal: Goal, portfolio: &mut Portfolio) {
    let others = std::mem::take(&mut portfolio.others);
    for (done, other) in others.iter().enumerate() {
        if is_over(goal, portfolio) {
            break;
        }
        let share = portfolio.meter.left() / (others.len() - done) as u64;
        within(share, portfolio, |portfolio| {
            let places: Vec<Option<u64>> = other.offsets.iter().copied().map(Some).collect();
            let placed = descend(portfolio.timeline.part, &places, goal.enough, &mut portfolio.meter);
            portfolio.offer(placed);
        });
    }
    // What was repaired once leads to the same again.
    portfolio.others.clear();
}

/// Plans sizes apart that keep to themselves where the part is fullest, one region above the other, and then everything
/// else around them.
fn by_classes(goal: Goal, portfolio: &mut Portfolio) {
    let part = portfolio.timeline.part;
    let classes = classes(part, &mut portfolio.meter);
    if classes.len() < 2 {
        return;
    }
    let mut places = vec![None; part.items.len()];
    let mut base = 0u64;
    for class in &classes {
        let room = Goal { ceiling: class.part.bound, enough: class.part.bound };
        let share = Meter { work: portfolio.meter.spent + portfolio.meter.left() / 4, ..portfolio.meter };
        let mut alone = Portfolio::new(&class.part, room.ceiling, share);
        run(&COARSE_PASSES, room, &mut alone);
        portfolio.sweeps += alone.sweeps;
        portfolio.meter.spent = alone.meter.spent;
        // Where a region doesn't hold its class, the regions together are too high.
        let Some(placed) = alone.best.filter(|best| best.height <= room.enough) else { return };
        let Some(top) = base.checked_add(placed.height) else { return };
        class.members.iter().zip(placed.offsets).for_each(|(&i, at)| places[i as usize] = Some(base + at));
        base = top;
    }
    let mut placed = None;
    within(AROUND_PER_ITEM * part.items.len() as u64, portfolio, |portfolio| {
        placed = descend(part, &places, goal.enough, &mut portfolio.meter);
    });
    // What is no lower than the best is no place to start from either.
    portfolio.offer(placed.filter(|placed| portfolio.best.as_ref().is_none_or(|best| placed.height < best.height)));
}

/// Plans the large items alone, on the grid that their sizes have in common, then adds smaller and smaller ones, each
/// time to the height that leaves the rest its own. The coarsest grid gets half of the work.
fn from_coarse_to_fine(goal: Goal, portfolio: &mut Portfolio) {
    let part = portfolio.timeline.part;
    let mut places = vec![None; part.items.len()];
    for (level, scale) in scales(part).iter().enumerate() {
        if is_over(goal, portfolio) {
            return;
        }
        let room = scale.coarse.bound.max(goal.enough.saturating_sub(scale.fine));
        let room = Goal { ceiling: room, enough: room };
        let share = Meter { work: portfolio.meter.spent + portfolio.meter.left() / 2, ..portfolio.meter };
        let mut large = Portfolio::new(&scale.coarse, room.ceiling, share);
        if level == 0 {
            run(&COARSE_PASSES, room, &mut large);
        } else {
            let places: Vec<Option<u64>> = scale.members.iter().map(|&i| places[i as usize]).collect();
            let placed = descend(&scale.coarse, &places, room.enough, &mut large.meter);
            large.offer(placed);
        }
        portfolio.sweeps += large.sweeps;
        portfolio.meter.spent = large.meter.spent;
        let Some(placed) = large.best else { return };
        scale.members.iter().zip(placed.offsets).for_each(|(&i, at)| places[i as usize] = Some(at));
    }
    if places.iter().any(Option::is_some) {
        let placed = descend(part, &places, goal.enough, &mut portfolio.meter);
        portfolio.offer(placed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::judging::part;
    use crate::planner::part::Whole;
    use crate::synthetic::Step;

    /// However many items there are for the work, sweeps on their own have what a few of them take.
    #[test]
    fn many_items_have_their_sweeps() {
        let step = Step { layers: 64, micro_batches: 20, stages: 16, ..Step::default() };
        let whole = Whole::new(&step.problem().unwrap(), true);
        let [part] = whole.parts.as_slice() else { panic!("one part") };
        let work = 8 * part.items.len() as u64;
        let mut portfolio = Portfolio::new(part, part.bound, Meter { work, ..Meter::default() });
        portfolio.sweep_once();
        assert_eq!(portfolio.best.map(|best| best.height), Some(part.bound));
    }

    /// Full ten times with seven ones and a transient. Three ones are born before the one that they follow is gone, so that
    /// the transient must move by one each time: who leaves next lies right below it.
    #[test]
    fn what_sweeps_leave_of_a_small_region_is_searched() {
        let starts = [0, 0, 0, 0, 0, 0, 0, 2, 5, 7, 9, 10, 13, 15, 17, 18];
        let ends = [3, 4, 6, 8, 11, 12, 14, 16, 19, 21, 21, 21, 21, 21, 21, 21];
        let ones = starts.into_iter().zip(ends).map(|(start, end)| (start, end - start, 1));
        let rows: Vec<(u32, u32, u64)> = ones.chain((0..10).map(|k| (2 * k + 1, 1, 172))).collect();
        let part = part(&rows, 21);
        let goal = Goal { ceiling: 179, enough: 179 };
        let mut portfolio = Portfolio::new(&part, goal.ceiling, Meter { work: 6_000_000, ..Meter::default() });
        portfolio.sweep_once();
        assert!(!goal.is_met(&portfolio), "too easy");
        run(&COARSE_PASSES[..2], goal, &mut portfolio);
        assert!(goal.is_met(&portfolio), "{:?}", portfolio.best);
    }
}
