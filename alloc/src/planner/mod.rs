//! Places buffers as low as the lower bound allows.
//!
//! In: a [`Problem`] and what may be spent. Out: one offset per buffer with what is known about the height.
//!
//! - [`decompose`] splits the problem exactly: cliques instead of ticks, [`parts`](decompose::parts) that do not meet, what lives
//!   throughout at the bottom. Its [`regions`](decompose::regions) keep sizes apart where a part is fullest.
//! - [`lower_bound`](mod@lower_bound) bounds a part with pins.
//! - [`place`] has placements from scratch: one [`sweep`](place::sweep) engine, with simple policies
//!   ([`portfolio`](place::portfolio)) or scores and backtracking ([`backtrack`](place::backtrack)), and [`strips`](place::strips).
//! - [`improve`] lowers plans: a [`squeaky_wheel`](improve::squeaky_wheel) and guided [`ejection`](improve::ejection), under a ceiling
//!   that falls ([`descent`](improve::descent)).
//! - [`prove`] searches small parts exhaustively.
//! - [`space`] is what these know of addresses.
//! - [`solve`] says what is tried on a part, in which order; [`run`] does it for all parts and concludes what is proven.
//! - [`features`]: groups whose members live differently, and plans that keep earlier addresses.
//! - [`budget`] counts what that costs; [`mix`](mod@mix) has the random bits of all searches.

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

/// What the planner may spend and what it must fit into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Arena size that the plan should fit into; `None` for as low as possible.
    pub capacity: Option<u64>,
    /// Work that may be spent, in rectangles looked at: the same on every machine. The [default](Self::DEFAULT_WORK) is about five
    /// seconds of one core at most; tables that meet their bound take a small part of it.
    pub work: u64,
    /// Wall-clock limit. A plan that it cuts short depends on the machine and says so ([`StopReason::Deadline`]).
    pub deadline: Option<Duration>,
    /// Threads; `None` for all of the current rayon pool. The plan does not depend on it.
    pub threads: Option<usize>,
    /// An earlier plan, by buffer: addresses that are kept as far as that costs no height.
    pub warm_start: Option<Vec<Option<u64>>>,
}

impl Options {
    /// About five seconds of one core at most.
    pub const DEFAULT_WORK: u64 = 150_000_000;

    /// Some tens of milliseconds at most, up to 10^5 buffers.
    pub const QUICK_WORK: u64 = 2_500_000;

    /// For planning thousands of problems: [`QUICK_WORK`](Self::QUICK_WORK). A plan may end a little above that of the default.
    pub fn quick() -> Self {
        Self { work: Self::QUICK_WORK, ..Self::default() }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self { capacity: None, work: Self::DEFAULT_WORK, deadline: None, threads: None, warm_start: None }
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
    /// This plan does not; whether another would is not known.
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
    /// Everything was tried.
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
/// pins, alignments and sizes leave no plan within 2^64 - 1 bytes that the searches could find gets no offsets at all.
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
    let run = Run::new(problem, options);
    if groups::has_ragged_groups(problem) { groups::plan(run) } else { run.plan() }
}
