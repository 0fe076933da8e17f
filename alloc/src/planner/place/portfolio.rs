//! Sweeps with many policies. The cheap policies that often succeed come first.
//!
//! 1. Sweeps outwards from the fullest clique, whose items fill the arena without a gap in any order. The two halves of
//!    time are independent, so the best sweep of each half becomes part of the plan.
//! 2. Sweeps from the edges of time, forward and backward. For large parts, one [`best_fit`] from each edge comes first.
//! 3. Sweeps around the long-lived items, which are placed first.
//! 4. [Squeaky-wheel](squeaky_wheel) sweeps: items that end above the ceiling are placed first in the next sweep.

use std::cmp::Reverse;

use rayon::prelude::*;

use super::best_fit::{self, best_fit};
use super::sweep::{Rule, Start, Sweep};
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::{Item, Placement};
use crate::planner::decompose::timeline::Timeline;
use crate::planner::improve::squeaky_wheel::squeaky_wheel;
use crate::planner::solve::Solver;
use crate::planner::space::free_list::{Fit, FreeList, Place};
use crate::planner::space::reserved::Reserved;

/// Least work per item that plain sweeps may spend, which is enough for a few sweeps. From a million items on, this is
/// more than the share of the default work for plain sweeps. Taking work from the later steps does no harm then, since
/// these don't suit so many items.
const WORK_PER_ITEM: u64 = 40;

/// Chains that run in parallel. The number is fixed, so that the result does not depend on the machine.
const WAVE: usize = 8;

/// Number of chains in the first wave of learning. On problems for which learning helps, the first chains often
/// succeed.
const FIRST_WAVE: usize = 2;

/// Sweeps of a learning chain.
const ROUNDS: u32 = 12;

/// The rules by which a sweep chooses a free range for each item, and an order for items that are born together.
#[derive(Debug, Clone, Copy)]
struct Policy {
    /// An item alive in at least this many cliques counts as long.
    long_from: u32,
    long: Fit,
    short: Fit,
    /// Whether items born together are placed largest first, rather than longest-lived first.
    is_largest_first: bool,
}

/// A series of sweeps with one policy, each of which learns from those before.
#[derive(Debug, Clone, Copy)]
struct Chain<'s> {
    is_backward: bool,
    start: Start<'s>,
    policy: Policy,
    /// Index into [`RANKS`]: the order in which items are pre-placed.
    rank: usize,
    /// An item alive in at least this many cliques is pre-placed.
    placed_from: u32,
    rounds: u32,
}

/// Work spent, and number of sweeps.
type Spent = (u64, u64);

/// A sort key. The item with the smallest key comes first.
type Key = fn(Item) -> (u128, u32);

/// Sort keys by size, length and area, the largest first.
const RANKS: [Key; 3] = [
    |item| (u128::MAX - u128::from(item.bytes), item.start),
    |item| (u128::MAX - u128::from(item.cliques()), item.start),
    |item| (u128::MAX - u128::from(item.bytes) * u128::from(item.cliques()), item.start),
];

impl Solver<'_> {
    /// Runs stages 1 and 2 with one sweep per chain. Most of the work is left to the later steps, unless there are so
    /// many items that these steps would achieve little. The plain sweeps need no share, so every part gets a plan,
    /// unless the address space is too small or pins overlap.
    pub fn sweep_once(&mut self, budget: &mut Budget) {
        let share = (budget.left() / 4).max(WORK_PER_ITEM * self.part.items.len() as u64);
        let is_plain_first = self.part.is_large() && self.part.pins.is_empty();
        let outwards = if is_plain_first { share / 2 } else { share };
        let before = budget.spent;
        budget.within(outwards, |budget| self.sweep_outwards(1, budget));
        if is_plain_first && !self.is_done(budget) {
            self.sweep_plainly(budget);
        }
        let share = share.saturating_sub(budget.spent - before);
        budget.within(share, |budget| self.follow_all(&self.edge_chains(1), budget));
        if self.best.is_none() {
            self.sweep_plainly(budget);
        }
    }

    /// Sweeps from both edges of time, without a limit on the work. Around pins, each birth gets the lowest place.
    fn sweep_plainly(&mut self, budget: &mut Budget) {
        for is_backward in [false, true] {
            if self.part.pins.is_empty() {
                let found = best_fit(self.timeline(is_backward));
                self.count((best_fit::WORK_PER_ITEM * self.part.items.len() as u64, 1), budget);
                self.keep_if_lower(found.map(|(height, offsets)| Placement { height, offsets }));
            } else if self.best.is_none() {
                let chain = Chain { is_backward, ..Chain::PLAIN };
                let enough = Budget { work: u64::MAX, spent: 0, ..*budget };
                let (placement, spent) = self.follow(&chain, u64::MAX, enough);
                self.count(spent, budget);
                self.keep_if_lower(placement);
            }
        }
    }

    /// Runs stage 3 with one sweep per chain.
    pub fn sweep_long_first(&mut self, budget: &mut Budget) {
        self.follow_all(&self.long_first(1), budget);
    }

    /// Runs stage 4: chains from the edges of time and chains around long-lived items, in turns; then chains outwards
    /// from the fullest clique.
    pub fn sweep_and_learn(&mut self, budget: &mut Budget) {
        let (edges, long) = (self.edge_chains(ROUNDS), self.long_first(ROUNDS));
        let waves = edges.len().div_ceil(WAVE).max(long.len().div_ceil(WAVE));
        let turn = |wave: usize| [&edges, &long].map(|list| list.iter().skip(wave * WAVE).take(WAVE).copied());
        let turns: Vec<Chain> = (0..waves).flat_map(turn).flatten().collect();
        self.follow_all(&turns, budget);
        self.sweep_outwards(ROUNDS, budget);
    }

    fn sweep_outwards(&mut self, rounds: u32, budget: &mut Budget) {
        let part = self.part;
        let Some(&peak) = part.fullest_cliques().first().filter(|_| part.is_free()) else { return };
        let alive = self.forward.alive(peak);
        let policies = policies(part.cliques);
        for key in stack_orders(peak) {
            if self.is_done(budget) {
                return;
            }
            let mut stack = alive.clone();
            sort_by_key(&mut stack, |&i| (key(part.items[i as usize]), i));
            // The two halves of time are independent of each other.
            let share = budget.share(budget.left() / 2);
            let halves: Vec<_> = [(false, peak), (true, part.cliques - 1 - peak)]
                .into_par_iter()
                .map(|(is_backward, clique)| {
                    let start = Start::Stack(clique, &stack);
                    let chain = |&policy| Chain { is_backward, start, policy, rank: 1, rounds, ..Chain::PLAIN };
                    self.best_of(policies.iter().map(chain), share)
                })
                .collect();
            halves.iter().for_each(|half| self.count(half.1, budget));
            let [(Some(after), _), (Some(before), _)] = halves.as_slice() else { continue };
            let mut both = after.clone();
            both.height = after.height.max(before.height);
            for (i, _) in part.items.iter().enumerate().filter(|(_, item)| item.end <= peak) {
                both.offsets[i] = before.offsets[i];
            }
            self.keep_if_lower(Some(both));
        }
    }

    /// Runs chains one after another until one meets the ceiling or the share is spent. Returns the lowest plan (`None`
    /// if no chain found one), and the work and number of sweeps spent.
    fn best_of<'s>(&self, chains: impl Iterator<Item = Chain<'s>>, share: Budget) -> (Option<Placement>, Spent) {
        let (mut best, mut spent) = (None::<Placement>, (0, 0));
        for chain in chains {
            let limit = best.as_ref().map_or(u64::MAX, |best| best.height - 1);
            let (placement, more) = self.follow(&chain, limit, share.share(share.work.saturating_sub(spent.0)));
            spent = (spent.0 + more.0, spent.1 + more.1);
            best = placement.or(best);
            if best.as_ref().is_some_and(|best| best.height <= self.goal.ceiling) || spent.0 >= share.work {
                break;
            }
        }
        (best, spent)
    }

    /// Chains from the edges of time in both directions.
    fn edge_chains(&self, rounds: u32) -> Vec<Chain<'static>> {
        let mut chains = Vec::new();
        for policy in policies(self.part.cliques) {
            for is_backward in [false, true] {
                for rank in if rounds > 1 { 0..RANKS.len() } else { 0..1 } {
                    chains.push(Chain { is_backward, policy, rank, rounds, ..Chain::PLAIN });
                }
            }
        }
        chains
    }

    /// Chains that pre-place the long-lived items.
    fn long_first(&self, rounds: u32) -> Vec<Chain<'static>> {
        let mut chains = Vec::new();
        for placed_from in long_lengths(self.part.cliques) {
            for rank in 0..RANKS.len() {
                for (is_backward, short) in [(false, Fit::Highest), (true, Fit::Lowest), (false, Fit::Tightest)] {
                    let policy = Policy { long_from: placed_from, short, ..Policy::PLAIN };
                    chains.push(Chain { is_backward, policy, rank, placed_from, rounds, ..Chain::PLAIN });
                }
            }
        }
        chains
    }

    fn follow_all(&mut self, chains: &[Chain], budget: &mut Budget) {
        let first = match chains.first() {
            Some(chain) if chain.rounds > 1 => chains.len().min(FIRST_WAVE),
            _ => 0,
        };
        let (first, others) = chains.split_at(first);
        for wave in std::iter::once(first).chain(others.chunks(WAVE)) {
            if self.is_done(budget) {
                return;
            }
            let limit = self.best.as_ref().map_or(u64::MAX, |best| best.height - 1);
            // The chains of a wave run in parallel and share no results.
            let share = budget.share(budget.left() / WAVE as u64);
            let results: Vec<_> = wave.par_iter().map(|chain| self.follow(chain, limit, share)).collect();
            for (placement, spent) in results {
                self.count(spent, budget);
                self.keep_if_lower(placement);
            }
        }
    }

    /// Runs the sweeps of a chain. Returns the lowest plan of these sweeps (`None` if no plan is within the limit), and
    /// the work and number of sweeps spent.
    fn follow(&self, chain: &Chain, limit: u64, mut budget: Budget) -> (Option<Placement>, Spent) {
        let items = &self.part.items;
        let timeline = self.timeline(chain.is_backward);
        let mut best = None::<Placement>;
        let first = (0..items.len() as u32).filter(|&i| items[i as usize].cliques() >= chain.placed_from).collect();
        let sweeps = squeaky_wheel(chain.rounds, first, |first| {
            sort_by_key(first, |&i| (RANKS[chain.rank](items[i as usize]), i));
            let mut fixed = self.part.pins.clone();
            let mut height = 0;
            if let Start::Stack(_, stack) = chain.start {
                for &i in stack {
                    if !first.is_empty() {
                        fixed.push((i, height));
                    }
                    height += items[i as usize].bytes;
                }
            }
            let reserved = Reserved::place(timeline, &fixed, first, &mut budget)?;
            let limit = if chain.rounds == 1 { limit } else { u64::MAX };
            let mut rule = Fitted {
                solver: self,
                chain,
                reserved: &reserved,
                limit,
                height,
                over: Vec::new(),
                blocked: Vec::new(),
            };
            let mut sweep = Sweep::new(timeline, chain.start, u64::MAX, false);
            if !sweep.run(&mut rule, &mut budget) {
                return None;
            }
            let (height, over) = (rule.height, rule.over);
            if best.as_ref().is_none_or(|best| height < best.height) {
                best = Some(Placement { height, offsets: sweep.space.offsets });
            }
            Some((height, if budget.left() == 0 { Vec::new() } else { over }))
        });
        (best.filter(|best| best.height <= limit), (budget.spent, sweeps.into()))
    }

    fn timeline(&self, is_backward: bool) -> &Timeline<'_> {
        if is_backward { &self.backward } else { &self.forward }
    }

    fn count(&mut self, (work, sweeps): Spent, budget: &mut Budget) {
        budget.spend(work);
        self.placements += sweeps;
    }

    fn is_done(&self, budget: &Budget) -> bool {
        budget.stopped().is_some() || self.best.as_ref().is_some_and(|best| best.height <= self.goal.ceiling)
    }
}

impl Policy {
    const PLAIN: Self = Self { long_from: 0, long: Fit::Lowest, short: Fit::Lowest, is_largest_first: false };
}

impl Chain<'_> {
    /// A single sweep forward in time, without pre-placed items.
    const PLAIN: Self = Self {
        is_backward: false,
        start: Start::Edge,
        policy: Policy::PLAIN,
        rank: 0,
        placed_from: u32::MAX,
        rounds: 1,
    };
}

/// A rule that places items by policy, around pre-placed ones.
struct Fitted<'s> {
    solver: &'s Solver<'s>,
    chain: &'s Chain<'s>,
    reserved: &'s Reserved,
    /// The sweep ends once its height exceeds this.
    limit: u64,
    height: u64,
    /// Items that ended above the ceiling and were not pre-placed.
    over: Vec<u32>,
    blocked: Vec<(u64, u64)>,
}

impl Rule for Fitted<'_> {
    fn order(&mut self, born: &mut [u32]) {
        if self.chain.policy.is_largest_first {
            sort_by_key(born, |&i| Reverse(self.solver.part.items[i as usize].bytes));
        }
        if !self.reserved.is_empty() {
            sort_by_key(born, |&i| self.reserved.offset(i).is_none());
        }
    }

    fn choose(&mut self, i: u32, space: &FreeList, budget: &mut Budget) -> Option<Place> {
        let (policy, part) = (self.chain.policy, self.solver.part);
        let item = self.solver.timeline(self.chain.is_backward).item(i);
        let end = |at: u64| at + item.bytes;
        if let Some(at) = self.reserved.offset(i) {
            let place = space.at(at, item.bytes)?;
            self.height = if part.is_forbidden(i) { self.height } else { self.height.max(end(at)) };
            return (self.height <= self.limit).then_some(place);
        }
        let fit = if item.cliques() >= policy.long_from { policy.long } else { policy.short };
        let looked = self.reserved.starting(item.start + 1..item.end, &mut self.blocked);
        budget.spend(1 + looked / 4 + space.holes.len() as u64 / 4);
        let ceiling = self.solver.goal.ceiling;
        let place = space.find(item.bytes, item.alignment, fit, ceiling, &self.blocked)?;
        self.height = self.height.max(end(place.1));
        if end(place.1) > ceiling {
            self.over.push(i);
        }
        (self.height <= self.limit).then_some(place)
    }
}

/// Lifetimes in cliques from which on an item may count as long-lived.
fn long_lengths(cliques: u32) -> Vec<u32> {
    let mut lengths = Vec::new();
    for share in [0.01, 0.003, 0.03, 0.001, 0.1] {
        let length = (share * f64::from(cliques)) as u32 + 1;
        if !lengths.contains(&length) {
            lengths.push(length);
        }
    }
    lengths
}

/// The policies; those that succeed most often come first.
fn policies(cliques: u32) -> Vec<Policy> {
    let mut policies = Vec::new();
    for is_largest_first in [false, true] {
        for fit in [Fit::Lowest, Fit::Tightest] {
            policies.push(Policy { long_from: 0, long: fit, short: fit, is_largest_first });
        }
        for long_from in long_lengths(cliques) {
            for (long, short) in
                [(Fit::Lowest, Fit::Highest), (Fit::Lowest, Fit::TightestHigh), (Fit::Tightest, Fit::TightestHigh)]
            {
                policies.push(Policy { long_from, long, short, is_largest_first });
            }
        }
    }
    policies
}

/// Sort keys for the stack at the peak. The item with the smallest key is at the bottom.
fn stack_orders(peak: u32) -> [Box<dyn Fn(Item) -> u64>; 6] {
    [
        Box::new(|item| u64::from(item.start)),
        Box::new(|item| u64::MAX - u64::from(item.start)),
        Box::new(|item| u64::MAX - item.bytes),
        Box::new(|item| u64::from(item.end)),
        Box::new(|item| u64::MAX - u64::from(item.cliques())),
        Box::new(move |item| u64::from((item.end - peak).max(peak + 1 - item.start))),
    ]
}
