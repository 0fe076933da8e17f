//! Places buffers as low as the lower bound allows.
//!
//! A portfolio of orderings, each with best-fit placement; the lowest plan wins.

mod best_fit;

use crate::{Problem, lower_bound};

/// What the planner may spend and what it must fit into.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Arena size that the plan should fit into; `None` for as low as possible.
    pub capacity: Option<u64>,
}

/// Why the height is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The height equals the max-live bound: nothing lower exists.
    MaxLive,
    /// Not proven; the gap to the bound remains.
    None,
}

/// Why the planner stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The height is proven.
    Proven,
    /// Every ordering was tried.
    Exhausted,
}

/// What planning cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Complete placements that were tried.
    pub placements: u64,
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
pub fn plan(problem: &Problem, _options: &Options) -> Solution {
    let lower_bound = lower_bound(problem);
    let mut best: Option<(u64, Vec<u64>)> = None;
    let mut stats = Stats::default();
    for order in best_fit::orders(problem) {
        let (height, offsets) = best_fit::place(problem, &order);
        stats.placements += 1;
        if best.as_ref().is_none_or(|b| height < b.0) {
            best = Some((height, offsets));
        }
        if height == lower_bound {
            break;
        }
    }
    let (height, offsets) = best.expect("the portfolio is not empty");
    let proven = height == lower_bound;
    Solution {
        offsets,
        height,
        lower_bound,
        proof: if proven { Proof::MaxLive } else { Proof::None },
        stop_reason: if proven { StopReason::Proven } else { StopReason::Exhausted },
        stats,
    }
}
