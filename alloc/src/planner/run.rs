//! One run of the planner. A run decomposes the problem, plans the parts, joins their plans and concludes what is
//! proven.

use super::budget::Budget;
use super::decompose::parts::{Source, Whole};
use super::features::warm_start::keep;
use super::lower_bound::{Aligned, aligned_bound};
use super::solve::solve_parts;
use super::{Fit, Options, Proof, Solution, Stats, StopReason};
use crate::deadline::Deadline;
use crate::{Buffer, BufferId, Problem, lower_bound};

/// Height and offsets of a plan.
pub(super) type Plan = (u64, Vec<u64>);

pub(super) struct Run<'p> {
    pub problem: &'p Problem,
    pub options: &'p Options,
    pub budget: Budget,
    /// Work spent to keep earlier addresses. It is not charged to the budget. Otherwise, less work would be left for the
    /// other steps than without earlier addresses, and the plan might get higher.
    pub keeping: u64,
    pub stats: Stats,
}

impl<'p> Run<'p> {
    pub fn new(problem: &'p Problem, options: &'p Options) -> Self {
        let budget = Budget { work: options.work, deadline: Deadline::after(options.deadline), spent: 0 };
        Self::within(problem, options, budget)
    }

    /// A run with the given budget, which replaces the work and the deadline of the options.
    pub fn within(problem: &'p Problem, options: &'p Options, budget: Budget) -> Self {
        Self { problem, options, budget, keeping: 0, stats: Stats::default() }
    }

    pub fn plan(mut self) -> Solution {
        let (known, plan) = self.solve();
        self.conclude(known, plan)
    }

    /// Returns the proven bounds, and the height and offsets of the best plan. The plan is `None` if none was found.
    pub fn solve(&mut self) -> (Known, Option<Plan>) {
        let lower_bound = lower_bound(self.problem);
        let whole = Whole::new(self.problem, true);
        let bounds = whole.parts.iter().map(|part| part.base.saturating_add(part.bound));
        let bound = bounds.fold(lower_bound, u64::max).saturating_sub(whole.padding);
        // If rounding has padded sizes, the rounded bound is nearly as good, and often met at once.
        let mut aligned = if whole.padding == 0 { aligned_bound(self.problem) } else { Aligned::default() };
        let bound = bound.max(lower_bound).max(aligned.bound);
        let mut known = Known { lower_bound, constraints: bound, searched: bound };
        let aim = bound.max(self.options.capacity.unwrap_or(0));
        if let Some(plan) = self.keep(aim) {
            return (known, Some(plan));
        }
        let mut best = self.attempt(&whole, &mut known);
        let open = |best: &Option<Plan>, known: &Known| best.as_ref().is_none_or(|b| b.0 > known.searched);
        if whole.padding > 0 && open(&best, &known) {
            aligned = aligned_bound(self.problem);
            known.constraints = known.constraints.max(aligned.bound);
            known.searched = known.searched.max(aligned.bound);
        }
        if whole.padding > 0 && open(&best, &known) {
            let raw = self.attempt(&Whole::new(self.problem, false), &mut known);
            best = lower(best, raw);
        }
        if open(&best, &known)
            && let Some(topped) = self.topped(&aligned)
        {
            // What is proven of the problem with these pins does not hold without them.
            let raw = self.attempt(&Whole::new(&topped, false), &mut known.clone());
            best = lower(best, raw);
        }
        // Tries again to keep the earlier addresses: they did not fit within `aim`, but may fit within the height of
        // the best plan.
        let kept = best.as_ref().filter(|b| b.0 > aim).and_then(|b| self.keep(b.0));
        (known, kept.or(best))
    }

    /// Returns the problem with the buffers that can be topmost pinned there. Returns `None` if there are none, or if
    /// pins or groups do not allow it.
    fn topped(&self, aligned: &Aligned) -> Option<Problem> {
        let is_free = |&(id, at): &(BufferId, u64)| self.problem.buffer(id).offset.is_none_or(|pin| pin == at);
        if aligned.top.is_empty() || !self.problem.groups().is_empty() || !aligned.top.iter().all(is_free) {
            return None;
        }
        let mut buffers = self.problem.buffers().to_vec();
        aligned.top.iter().for_each(|&(id, at)| buffers[id.index()].offset = Some(at));
        self.problem.with_buffers(buffers).ok()
    }

    /// Returns a plan of at most `target` bytes that keeps earlier addresses. Returns `None` if the options have no
    /// earlier addresses or no such plan was found.
    fn keep(&mut self, target: u64) -> Option<Plan> {
        let earlier = self.options.warm_start.as_ref()?;
        let (plan, work) = keep(self.problem, earlier, target, self.budget);
        self.keeping += work;
        plan
    }

    /// Plans the parts, joins their plans and raises the proven bounds. Returns the joined plan, or `None` if a part
    /// has no plan.
    fn attempt(&mut self, whole: &Whole, known: &mut Known) -> Option<Plan> {
        let bounds = whole.parts.iter().map(|part| part.base.saturating_add(part.bound));
        // This bound is computed from rounded sizes, so it may exceed what can be proven of the problem as given.
        let aim = bounds.fold(known.constraints, u64::max);
        let enough = self.options.capacity.unwrap_or(0).max(aim);
        self.stats.parts = self.stats.parts.max(whole.parts.len());
        let mut offsets = without_bytes(self.problem);
        for &(source, at) in &whole.bottom {
            self.put(whole.sources[source as usize], at, &mut offsets);
        }
        let (mut complete, mut proven) = (true, aim);
        let outcomes = solve_parts(&whole.parts, aim, enough, &mut self.budget);
        for (part, outcome) in whole.parts.iter().zip(outcomes) {
            self.stats.placements += outcome.placements;
            proven = proven.max(part.base.saturating_add(outcome.proven));
            let Some(best) = outcome.best else {
                complete = false;
                continue;
            };
            for (&source, at) in part.sources.iter().zip(best.offsets) {
                self.put(whole.sources[source as usize], part.base + at, &mut offsets);
            }
        }
        known.constraints = known.constraints.max(aim.saturating_sub(whole.padding));
        known.searched = known.searched.max(proven.saturating_sub(whole.padding)).max(known.constraints);
        let end = |(b, at): (&Buffer, &u64)| if b.bytes == 0 { 0 } else { at + b.bytes };
        let height = self.problem.buffers().iter().zip(&offsets).map(end).max().unwrap_or(0);
        complete.then_some((height, offsets))
    }

    /// Writes an item's offset to the buffers that the item stands for.
    fn put(&self, source: Source, at: u64, offsets: &mut [u64]) {
        match source {
            Source::Buffer(index) => offsets[index as usize] = at,
            Source::Group(index) => {
                let group = &self.problem.groups()[index as usize];
                let base = if group.offset.is_none() { at + group.phase } else { at };
                for (id, distance) in group.members.iter().zip(&group.distances) {
                    offsets[id.index()] = base + distance;
                }
            }
            Source::Forbidden => {}
        }
    }

    pub fn conclude(mut self, known: Known, plan: Option<Plan>) -> Solution {
        let (height, offsets) = plan.unzip();
        let proof = match height {
            Some(height) if height <= known.lower_bound => Proof::MaxLive,
            Some(height) if height <= known.constraints => Proof::Constraints { bound: height },
            Some(height) if height <= known.searched => Proof::Exhausted,
            _ => Proof::None { bound: known.searched },
        };
        let fit = match self.options.capacity {
            Some(capacity) if known.searched > capacity => Fit::Impossible,
            Some(capacity) if height.is_none_or(|h| h > capacity) => Fit::Unknown,
            _ if height.is_none() => Fit::Unknown,
            _ => Fit::Fits,
        };
        let stop_reason = match (proof, fit) {
            (Proof::None { .. }, Fit::Impossible) => self.budget.stopped().unwrap_or(StopReason::Impossible),
            (Proof::None { .. }, Fit::Fits) if self.options.capacity.is_some() => StopReason::Fits,
            (Proof::None { .. }, _) => self.budget.stopped().unwrap_or(StopReason::Exhausted),
            _ => StopReason::Proven,
        };
        self.stats.work = self.budget.spent.saturating_add(self.keeping);
        if let (Some(earlier), Some(offsets)) = (&self.options.warm_start, &offsets) {
            self.stats.kept = offsets.iter().zip(earlier).filter(|&(at, before)| Some(*at) == *before).count();
        }
        Solution {
            offsets: offsets.unwrap_or_default(),
            height: height.unwrap_or(u64::MAX),
            lower_bound: known.lower_bound,
            proof,
            fit,
            stop_reason,
            stats: self.stats,
        }
    }
}

/// Returns the lower one of two plans.
fn lower(first: Option<Plan>, second: Option<Plan>) -> Option<Plan> {
    [first, second].into_iter().flatten().min_by_key(|plan| plan.0)
}

/// Initial offsets. Buffers of zero bytes, which no search places, get the offset of their pin. All others get 0.
pub(super) fn without_bytes(problem: &Problem) -> Vec<u64> {
    let pinned = |b: &Buffer| if b.bytes == 0 { b.offset.unwrap_or(0) } else { 0 };
    let mut offsets: Vec<u64> = problem.buffers().iter().map(pinned).collect();
    for group in problem.groups().iter().filter(|group| group.bytes == 0) {
        for (id, distance) in group.members.iter().zip(&group.distances) {
            offsets[id.index()] = group.offset.unwrap_or(group.phase) + distance;
        }
    }
    offsets
}

/// Lower bounds on the height of every plan. Each bound is at least as high as the one before.
#[derive(Clone)]
pub(super) struct Known {
    /// The max-live bound.
    lower_bound: u64,
    /// The bound that also counts alignments, pins and forbidden ranges.
    constraints: u64,
    /// The bound that also counts everything that searches ruled out.
    pub searched: u64,
}
