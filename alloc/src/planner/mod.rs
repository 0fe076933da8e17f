//! Places buffers as low as the searches can, and proves how low a plan can be.
//!
//! In: a [`Problem`] and a budget. Out: one offset per buffer, and a proven bound on the height.
//!
//! - [`decompose`] splits the problem exactly. It turns ticks into cliques, forms independent
//!   [`parts`](decompose::parts), and puts buffers that live throughout a part at its bottom. Its
//!   [`regions`](decompose::regions) separate sizes where a part is fullest.
//! - [`lower_bound`](mod@lower_bound) bounds the height of a part with pins, and of buffers with alignments.
//! - [`place`] plans from scratch. One [`sweep`](place::sweep) engine serves both simple policies
//!   ([`portfolio`](place::portfolio)) and scored places with backtracking ([`backtrack`](place::backtrack)). There are
//!   also [`strips`](place::strips).
//! - [`improve`] lowers plans: a [`squeaky_wheel`](improve::squeaky_wheel), and guided [`ejection`](improve::ejection)
//!   under a falling ceiling ([`descent`](improve::descent)).
//! - [`prove`] searches small parts exhaustively.
//! - [`space`] has the indexes of addresses for all of these.
//! - [`solve`] lists the searches that are tried on a part, in order. [`run`] runs them on all parts and concludes what
//!   is proven.
//! - [`features`] adds groups that are no rectangles, pairs to keep apart, and plans that keep earlier addresses.
//! - [`budget`] counts the cost; [`mix`](mod@mix) has the random bits of all searches.

mod budget;
mod decompose;
mod features;
mod improve;
mod lower_bound;
mod mix;
mod place;
mod prove;
mod run;
mod solve;
mod space;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::Problem;
use features::groups;
use run::Run;

/// The limits of a planning run: the capacity that the plan should fit into, and the cost of the search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Arena size that the plan should fit into; `None` asks for the smallest arena.
    pub capacity: Option<u64>,
    /// Most work that may be spent. The unit is one rectangle looked at, so the limit means the same on every machine.
    /// The [default](Self::DEFAULT_WORK) takes at most about five seconds of one core. A problem whose plan reaches the
    /// lower bound takes only a small fraction of the default.
    pub work: u64,
    /// Wall-clock limit. A plan that it cuts short depends on the machine; [`StopReason::Deadline`] marks such a plan.
    pub deadline: Option<Duration>,
    /// Number of threads; `None` uses the current rayon pool. The number has no influence on the plan.
    pub threads: Option<usize>,
    /// Offsets of an earlier plan, by buffer. The planner keeps these offsets as far as that costs no height; with a
    /// capacity, as far as the plan fits. This takes work in addition to [`work`](Self::work): at most 50 per buffer
    /// and 100,000, twelve times.
    pub warm_start: Option<Vec<Option<u64>>>,
}

impl Options {
    /// The default work, which takes at most about five seconds of one core.
    pub const DEFAULT_WORK: u64 = 150_000_000;

    /// Work for quick plans. It takes at most some tens of milliseconds for up to 10^5 buffers.
    pub const QUICK_WORK: u64 = 2_500_000;

    /// Options for planning thousands of problems, with [`QUICK_WORK`](Self::QUICK_WORK). A plan may be a little higher
    /// than with the default options.
    pub fn quick() -> Self {
        Self { work: Self::QUICK_WORK, ..Self::default() }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self { capacity: None, work: Self::DEFAULT_WORK, deadline: None, threads: None, warm_start: None }
    }
}

/// The proof that no plan is lower, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The height equals the max-live bound, which no plan is below.
    MaxLive,
    /// The height equals a bound that also counts alignments, pinned buffers and forbidden ranges.
    Constraints {
        /// The bound in bytes.
        bound: u64,
    },
    /// Every plan lower than this one was ruled out by search.
    Exhausted,
    /// The height is not proven lowest; a gap to the bound remains.
    None {
        /// No plan is lower than this many bytes.
        bound: u64,
    },
}

impl Proof {
    /// The kind of proof in one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::MaxLive => "max-live",
            Self::Constraints { .. } => "constraints",
            Self::Exhausted => "exhausted",
            Self::None { .. } => "none",
        }
    }
}

/// The relation of the plan to the capacity asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// The plan fits, or no capacity was asked for.
    Fits,
    /// It is proven that no plan fits.
    Impossible,
    /// This plan does not fit, but another one might.
    Unknown,
}

/// The reason why the planner stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The plan is proven lowest.
    Proven,
    /// The plan fits the capacity that was asked for.
    Fits,
    /// No plan can fit the capacity that was asked for.
    Impossible,
    /// All searches ended without reaching a limit.
    Exhausted,
    /// The work was spent.
    Work,
    /// The deadline passed. Another run may return another plan.
    Deadline,
}

/// The cost of planning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of placements that were tried. A placement of only one half of time also counts as one.
    pub placements: u64,
    /// Work spent, in rectangles looked at.
    pub work: u64,
    /// Independent parts that were planned separately.
    pub parts: usize,
    /// Buffers that kept the address of the earlier plan.
    pub kept: usize,
}

/// The plan, which is one offset per buffer, and the proven bound on its height.
#[derive(Debug, Clone)]
pub struct Solution {
    /// Offset in bytes of each buffer, indexed by [`BufferId`](crate::BufferId).
    pub offsets: Vec<u64>,
    /// One past the highest byte in use.
    pub height: u64,
    /// The max-live lower bound in bytes.
    pub lower_bound: u64,
    /// The proof that the height is the lowest, or the best proven bound.
    pub proof: Proof,
    /// Whether the plan fits the capacity.
    pub fit: Fit,
    /// The reason why the planner stopped.
    pub stop_reason: StopReason,
    /// The cost of planning.
    pub stats: Stats,
}

impl Solution {
    /// The best proven lower bound in bytes: no plan is lower than this. It equals the height if the height is proven
    /// lowest.
    pub fn bound(&self) -> u64 {
        match self.proof {
            Proof::None { bound } => bound,
            _ => self.height,
        }
    }

    /// Height ÷ lower bound; 1 means no gaps.
    pub fn gap(&self) -> f64 {
        if self.lower_bound == 0 { 1.0 } else { self.height as f64 / self.lower_bound as f64 }
    }

    /// Height ÷ [best proven lower bound](Self::bound); 1 if the height is proven lowest.
    pub fn bound_gap(&self) -> f64 {
        if self.bound() == 0 { 1.0 } else { self.height as f64 / self.bound() as f64 }
    }
}

/// Plans `problem`. The same problem and options always give the same plan, unless a deadline cuts the search short.
///
/// The offsets form a plan even if [`Solution::fit`] says that the plan exceeds the capacity. The offsets are empty
/// only if the searches find no plan within 2^64 - 1 bytes.
pub fn plan(problem: &Problem, options: &Options) -> Solution {
    match options.threads {
        None => plan_here(problem, options),
        Some(threads) => match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
            Ok(pool) => pool.install(|| plan_here(problem, options)),
            // If no pool can be created, the current one is used.
            Err(_) => plan_here(problem, options),
        },
    }
}

fn plan_here(problem: &Problem, options: &Options) -> Solution {
    let run = Run::new(problem, options);
    if groups::has_rigid_units(problem) { groups::plan(run) } else { run.plan() }
}
