//! Places buffers as low as the lower bound allows.
//!
//! In: a [`Problem`] and what may be spent. Out: one offset per buffer with what is known about the height. The passes,
//! in the order they run:
//!
//! - [`part`] splits the problem exactly: cliques instead of ticks, parts that don't meet, what lives throughout at the
//!   bottom; [`poured`] bounds a part with pins.
//! - [`strategy`] says what is tried on a part, [`passes`] in which order where sweeps leave a gap.
//! - [`portfolio`] runs [`sweep`]s ([`holes`] is what a sweep knows of space, [`reserved`] what it flows around) and
//!   [`ordered`] placements ([`occupied`] is what those know of space); [`attempts`] aim at one height: [`retrace`] sweeps
//!   and takes back what led nowhere, [`beam`] sweeps with many [`layout`]s and looks ahead, [`milestones`] goes by
//!   [`leap`]s from one [`narrow`] place to the next, and may leave the first stack [`undecided`].
//! - [`exact`] searches small parts; [`descend`] lowers plans of any size by [`eject`]ing what is in the way ([`crowd`]
//!   knows who that is), the large items of a part first ([`scale`]), or sizes that keep to themselves ([`classes`]).
//! - [`grouped`] lets a group's members each live their own life.
//! - [`keep`] holds on to the addresses of an earlier plan.
//! - [`meter`] counts what that costs.

mod attempts;
mod beam;
mod classes;
mod crowd;
mod descend;
mod eject;
mod exact;
mod grouped;
mod holes;
#[cfg(test)]
mod judging;
mod keep;
mod layout;
mod leap;
mod meter;
mod milestones;
mod narrow;
mod occupied;
mod ordered;
mod part;
mod passes;
mod portfolio;
mod poured;
mod reserved;
mod retrace;
mod scale;
mod strategy;
mod sweep;
mod undecided;

use std::time::Duration;

use crate::deadline::Deadline;
use crate::{Buffer, Problem, lower_bound};
use meter::Meter;
use part::{Source, Whole};
use strategy::plan_parts;

/// What the planner may spend and what it must fit into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Arena size that the plan should fit into; `None` for as low as possible.
    pub capacity: Option<u64>,
    /// Work that may be spent, in rectangles looked at: the same on every machine. The default is 5 to 16 seconds of one
    /// core where nothing settles a small part; steps that meet their bound take a small part of it.
    pub work: u64,
    /// Wall-clock limit. A plan that it cuts short depends on the machine and says so ([`StopReason::Deadline`]).
    pub deadline: Option<Duration>,
    /// Threads; `None` for all of the current rayon pool. The plan doesn't depend on it.
    pub threads: Option<usize>,
    /// An earlier plan, by buffer: addresses that are kept as far as that costs no height.
    pub warm_start: Option<Vec<Option<u64>>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { capacity: None, work: 450_000_000, deadline: None, threads: None, warm_start: None }
    }
}

/// Why the height is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The height equals the max-live bound: nothing lower exists.
    MaxLive,
    /// The height equals a bound that also counts alignments, pinned buffers and forbidden ranges.
    Constraints {
        /// That bound in bytes.
        bound: u64,
    },
    /// Every plan lower than this one was ruled out by search.
    Exhausted,
    /// Not proven; the gap to the bound remains.
    None {
        /// No plan is lower than this many bytes.
        bound: u64,
    },
}

impl Proof {
    /// The proof in a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::MaxLive => "max-live",
            Self::Constraints { .. } => "constraints",
            Self::Exhausted => "exhausted",
            Self::None { .. } => "none",
        }
    }
}

/// Whether the plan fits the capacity asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// It fits, or no capacity was asked for.
    Fits,
    /// No plan fits: proven.
    Impossible,
    /// This plan doesn't; whether another would is not known.
    Unknown,
}

/// Why the planner stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The height is proven.
    Proven,
    /// The plan fits the capacity that was asked for.
    Fits,
    /// No plan can fit the capacity that was asked for.
    Impossible,
    /// Every pass was made.
    Exhausted,
    /// The work was spent.
    Work,
    /// The deadline passed: another run may end elsewhere.
    Deadline,
}

/// What planning cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Complete placements and halves of them that were tried.
    pub placements: u64,
    /// Rectangles looked at.
    pub work: u64,
    /// Parts that were planned apart.
    pub parts: usize,
    /// Buffers that kept the address of the earlier plan.
    pub kept: usize,
}

/// One offset per buffer, and what is known about it.
#[derive(Debug, Clone)]
pub struct Solution {
    /// Offset in bytes of each buffer, indexed by [`BufferId`](crate::BufferId).
    pub offsets: Vec<u64>,
    /// One past the highest byte in use.
    pub height: u64,
    /// The max-live lower bound in bytes.
    pub lower_bound: u64,
    /// Why the height is final.
    pub proof: Proof,
    /// Whether it fits the capacity.
    pub fit: Fit,
    /// Why the planner stopped.
    pub stop_reason: StopReason,
    /// What it cost.
    pub stats: Stats,
}

impl Solution {
    /// Height ÷ lower bound; 1 means no gaps.
    pub fn gap(&self) -> f64 {
        if self.lower_bound == 0 { 1.0 } else { self.height as f64 / self.lower_bound as f64 }
    }
}

/// Plans `problem`: deterministic for the same input and options.
///
/// The offsets are always a plan, also where [`Solution::fit`] says that it exceeds the capacity. Only a problem whose
/// pins, alignments and sizes leave no plan within 2^64 - 1 bytes that the passes could find gets no offsets at all.
pub fn plan(problem: &Problem, options: &Options) -> Solution {
    match options.threads {
        None => plan_here(problem, options),
        Some(threads) => match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
            Ok(pool) => pool.install(|| plan_here(problem, options)),
            // A machine that gives no threads still has this one.
            Err(_) => plan_here(problem, options),
        },
    }
}

fn plan_here(problem: &Problem, options: &Options) -> Solution {
    let planner = Planner::new(problem, options);
    if grouped::has_ragged_groups(problem) { grouped::plan(planner) } else { planner.run() }
}

/// Height and offsets.
type Plan = (u64, Vec<u64>);

struct Planner<'p> {
    problem: &'p Problem,
    options: &'p Options,
    meter: Meter,
    stats: Stats,
}

impl<'p> Planner<'p> {
    fn new(problem: &'p Problem, options: &'p Options) -> Self {
        let meter = Meter { work: options.work, deadline: Deadline::after(options.deadline), spent: 0 };
        Self::within(problem, options, meter)
    }

    /// One that spends what is left of another's, rather than what its options say.
    fn within(problem: &'p Problem, options: &'p Options, meter: Meter) -> Self {
        Self { problem, options, meter, stats: Stats::default() }
    }

    fn run(mut self) -> Solution {
        let (known, plan) = self.solve();
        self.conclude(known, plan)
    }

    /// The best plan that was found, as height and offsets, and what is proven.
    fn solve(&mut self) -> (Known, Option<Plan>) {
        let lower_bound = lower_bound(self.problem);
        let mut known = Known { lower_bound, constraints: lower_bound, searched: lower_bound };
        let whole = Whole::new(self.problem, true);
        let bounds = whole.parts.iter().map(|part| part.base.saturating_add(part.bound));
        let bound = bounds.fold(lower_bound, u64::max);
        let aim = bound.max(self.options.capacity.unwrap_or(0));
        if let Some(plan) = self.keep(aim) {
            known.constraints = known.constraints.max(bound.saturating_sub(whole.padding));
            known.searched = known.constraints;
            return (known, Some(plan));
        }
        let mut best = self.attempt(&whole, &mut known);
        let open = |best: &Option<Plan>, known: &Known| best.as_ref().is_none_or(|b| b.0 > known.searched);
        if whole.padding > 0 && open(&best, &known) {
            let raw = self.attempt(&Whole::new(self.problem, false), &mut known);
            best = [best, raw].into_iter().flatten().min_by_key(|plan| plan.0);
        }
        // What the bound didn't allow to keep may fit below the height that was reached.
        let kept = best.as_ref().filter(|b| b.0 > aim).and_then(|b| self.keep(b.0));
        (known, kept.or(best))
    }

    /// A plan of at most `target` bytes that keeps earlier addresses, if that was asked for.
    fn keep(&mut self, target: u64) -> Option<Plan> {
        let earlier = self.options.warm_start.as_ref()?;
        let (plan, work) = keep::keep(self.problem, earlier, target, self.meter);
        self.meter.spend(work);
        plan
    }

    /// Plans the parts one by one and puts them together; learns what is proven on the way.
    fn attempt(&mut self, whole: &Whole, known: &mut Known) -> Option<Plan> {
        let bounds = whole.parts.iter().map(|part| part.base.saturating_add(part.bound));
        // In rounded bytes, so that it may exceed what can be proven of the problem as given.
        let aim = bounds.fold(known.lower_bound, u64::max);
        let enough = self.options.capacity.unwrap_or(0).max(aim);
        self.stats.parts = self.stats.parts.max(whole.parts.len());
        let mut offsets = without_bytes(self.problem);
        for &(source, at) in &whole.settled {
            self.put(whole.sources[source as usize], at, &mut offsets);
        }
        let (mut complete, mut proven) = (true, aim);
        let outcomes = plan_parts(&whole.parts, aim, enough, &mut self.meter);
        for (part, outcome) in whole.parts.iter().zip(outcomes) {
            self.stats.placements += outcome.sweeps;
            proven = proven.max(part.base.saturating_add(outcome.proven));
            let Some(placed) = outcome.placed else {
                complete = false;
                continue;
            };
            for (&source, at) in part.sources.iter().zip(placed.offsets) {
                self.put(whole.sources[source as usize], part.base + at, &mut offsets);
            }
        }
        known.constraints = known.constraints.max(aim.saturating_sub(whole.padding));
        known.searched = known.searched.max(proven.saturating_sub(whole.padding)).max(known.constraints);
        let end = |(b, at): (&Buffer, &u64)| if b.bytes == 0 { 0 } else { at + b.bytes };
        let height = self.problem.buffers().iter().zip(&offsets).map(end).max().unwrap_or(0);
        complete.then_some((height, offsets))
    }

    /// Writes an item's offset to the buffers it stands for.
    fn put(&self, source: Source, at: u64, offsets: &mut [u64]) {
        match source {
            Source::Buffer(index) => offsets[index as usize] = at,
            Source::Group(index) => {
                let mut next = at;
                for &id in &self.problem.groups()[index as usize].members {
                    offsets[id.index()] = next;
                    next += self.problem.buffer(id).bytes;
                }
            }
            Source::Forbidden => {}
        }
    }

    fn conclude(mut self, known: Known, plan: Option<Plan>) -> Solution {
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
            (Proof::None { .. }, Fit::Impossible) => self.meter.stopped().unwrap_or(StopReason::Impossible),
            (Proof::None { .. }, Fit::Fits) if self.options.capacity.is_some() => StopReason::Fits,
            (Proof::None { .. }, _) => self.meter.stopped().unwrap_or(StopReason::Exhausted),
            _ => StopReason::Proven,
        };
        self.stats.work = self.meter.spent;
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

/// Offsets for what takes no space, which no pass places: where it is pinned, or 0.
fn without_bytes(problem: &Problem) -> Vec<u64> {
    let pinned = |b: &Buffer| if b.bytes == 0 { b.offset.unwrap_or(0) } else { 0 };
    let mut offsets: Vec<u64> = problem.buffers().iter().map(pinned).collect();
    for group in problem.groups().iter().filter(|group| group.bytes == 0) {
        group.members.iter().for_each(|id| offsets[id.index()] = group.offset.unwrap_or(0));
    }
    offsets
}

/// Heights that no plan is below, each at least the one before.
struct Known {
    /// Max-live.
    lower_bound: u64,
    /// With alignments, pins, forbidden ranges.
    constraints: u64,
    /// With what searches ruled out.
    searched: u64,
}
