//! Many placements of one part, from cheap and likely to dear, until one meets the ceiling; repairs start from the best.
//!
//! 1. Outwards from the fullest clique: its items fill the arena without a gap whatever their order, and the two halves
//!    of time do not see each other, so that the best sweep of each half makes the plan.
//! 2. From the edges, forward and backward.
//! 3. One item after another: by size, length, area or time.
//! 4. The long-lived first, largest first; then the others around them.
//! 5. Squeaky wheel: what ends above the ceiling gets a place of its own before the next sweep, or comes first in the
//!    next order.
//! 6. Outwards from a fullest clique, and back again where something finds no place ([`attempts`](super::attempts)).

use std::cmp::Reverse;

use rayon::prelude::*;

use super::holes::Fit;
use super::meter::Meter;
use super::ordered::Ordered;
use super::part::{Item, Part};
use super::reserved::Reserved;
use super::sweep::{Direction, Order, Policy, Start, Sweep, Timeline};

/// A plan of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placed {
    pub height: u64,
    pub offsets: Vec<u64>,
}

/// The portfolio over one part.
pub(crate) struct Portfolio<'p> {
    pub timeline: Timeline<'p>,
    /// The height aimed at.
    pub ceiling: u64,
    /// Complete or half sweeps made so far.
    pub sweeps: u64,
    pub meter: Meter,
    pub best: Option<Placed>,
    /// The lowest plans that were offered and are not the best, lowest first: other places to start repairs from.
    pub others: Vec<Placed>,
    /// Whether every stack that is left open was tried to its end in vain.
    pub is_open_over: bool,
}

const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];

/// Work for each item that sweeps on their own may have in any case: a few of them. It is more than a quarter of the default from
/// three million items on, and what comes after them is not made for so many.
const SWEEPS_PER_ITEM: u64 = 40;

impl<'p> Portfolio<'p> {
    pub fn new(part: &'p Part, ceiling: u64, meter: Meter) -> Self {
        let timeline = Timeline::new(part);
        Self { timeline, ceiling, sweeps: 0, meter, best: None, others: Vec::new(), is_open_over: false }
    }

    /// Stages 1 and 2: sweeps on their own. They leave most of the work to what comes after them, unless there are so many items
    /// that little would come of it.
    pub fn sweep_once(&mut self) {
        let work = self.meter.work;
        let left = self.meter.left();
        let enough = SWEEPS_PER_ITEM.saturating_mul(self.part().items.len() as u64);
        self.meter.work = self.meter.spent + (left / 4).max(enough.min(left));
        self.outwards(1);
        self.follow_all(&self.edges(1));
        self.meter.work = work;
        self.settle();
    }

    /// Stage 3: one item after another.
    pub fn order_once(&mut self) {
        self.in_orders(Fit::Lowest, 1);
    }

    /// Stage 4: the long-lived first.
    pub fn long_once(&mut self) {
        self.follow_all(&self.long_first(1));
    }

    /// A part that comes after the work is spent still gets a plan: the lowest place for whoever comes. Only the end of
    /// the address space, or pins on each other, leave it without.
    fn settle(&mut self) {
        let policy = Policy { long_from: 0, long: Fit::Lowest, short: Fit::Lowest, order: Order::Longest };
        for direction in DIRECTIONS {
            if self.best.is_none() {
                let chain = Chain { start: Start::Edge, direction, policy, rank: 0, rounds: 1 };
                let (placed, spent) = self.follow(&chain, Vec::new(), u64::MAX, u64::MAX);
                self.spend(spent);
                self.offer(placed);
            }
        }
    }

    /// Stage 5: sweeps that learn from one another, those from the edges and the long-lived first by turns.
    pub fn repair(&mut self) {
        let (edges, long_first) = (self.edges(ROUNDS), self.long_first(ROUNDS));
        let mut turns = Vec::new();
        for turn in 0..edges.len().div_ceil(WAVE).max(long_first.len().div_ceil(WAVE)) {
            for jobs in [&edges, &long_first] {
                turns.extend(jobs.iter().skip(turn * WAVE).take(WAVE).copied());
            }
        }
        self.follow_all(&turns);
        self.outwards(ROUNDS);
        // Dearest, and seldom the one that helps where a single round didn't.
        self.in_orders(Fit::Lowest, ROUNDS);
        self.in_orders(Fit::Tightest, ROUNDS);
    }

    /// Whether a search, which visits every item at every step, is cheap.
    pub fn is_small(&self) -> bool {
        let items = &self.part().items;
        let cells: u64 = items.iter().map(|item| u64::from(item.cliques())).sum();
        items.len() <= 3_000 && cells <= 500_000
    }

    fn part(&self) -> &'p Part {
        self.timeline.part
    }

    fn done(&self) -> bool {
        self.meter.stopped().is_some() || self.best.as_ref().is_some_and(|b| b.height <= self.ceiling)
    }

    /// Takes over the best of several results, the first of equals.
    pub fn offer(&mut self, placed: Option<Placed>) {
        let Some(placed) = placed else { return };
        let beaten = match &mut self.best {
            Some(best) if best.height <= placed.height => Some(placed),
            best => best.replace(placed),
        };
        let Some(beaten) = beaten else { return };
        let at = self.others.partition_point(|other| other.height < beaten.height);
        // Plans of one height are likely to be the same.
        if self.others.get(at).is_none_or(|other| other.height > beaten.height) {
            self.others.insert(at, beaten);
            self.others.truncate(OTHERS);
        }
    }

    fn spend(&mut self, (sweeps, work): (u64, u64)) {
        self.sweeps += sweeps;
        self.meter.spend(work);
    }

    /// Stage 1, and with `rounds > 1` its repair.
    fn outwards(&mut self, rounds: u32) {
        let part = self.part();
        if !part.pins.is_empty() || part.items.iter().any(|item| item.alignment > 1) {
            return;
        }
        let live = part.live();
        let Some(peak) = (0..part.cliques).max_by_key(|&k| (live[k as usize], Reverse(k))) else { return };
        let alive = self.timeline.alive(peak);
        let policies = policies(part);
        for key in stack_orders(peak) {
            if self.done() {
                return;
            }
            let mut stack = alive.clone();
            stack.sort_by_key(|&i| (key(part.items[i as usize]), i));
            let start = Start::Stack(peak, &stack);
            // The halves don't know of each other.
            let share = self.meter.left() / 2;
            let halves: Vec<(Option<Placed>, (u64, u64))> = DIRECTIONS
                .par_iter()
                .map(|&direction| {
                    let (mut best, mut spent) = (None::<Placed>, (0, 0));
                    for &policy in &policies {
                        let chain = Chain { start, direction, policy, rank: 1, rounds };
                        let limit = best.as_ref().map_or(u64::MAX, |b| b.height - 1);
                        let (placed, made) = self.follow(&chain, Vec::new(), limit, share.saturating_sub(spent.1));
                        spent = (spent.0 + made.0, spent.1 + made.1);
                        best = placed.or(best);
                        if best.as_ref().is_some_and(|b| b.height <= self.ceiling) || spent.1 >= share {
                            break;
                        }
                    }
                    (best, spent)
                })
                .collect();
            halves.iter().for_each(|half| self.spend(half.1));
            let [(Some(after), _), (Some(before), _)] = halves.as_slice() else { continue };
            let mut merged = after.clone();
            merged.height = after.height.max(before.height);
            for (i, _) in part.items.iter().enumerate().filter(|(_, item)| item.end <= peak) {
                merged.offsets[i] = before.offsets[i];
            }
            self.offer(Some(merged));
        }
    }

    /// Stage 3, and with `rounds > 1` its repair.
    fn in_orders(&mut self, fit: Fit, rounds: u32) {
        if self.done() || self.part().items.len() > MOST_IN_ORDER {
            return;
        }
        let results: Vec<_> = ORDERS.par_iter().map(|&key| self.in_order(key, fit, rounds)).collect();
        for (placed, spent) in results {
            self.spend(spent);
            self.offer(placed);
        }
    }

    /// Places everything by `key`; what ends above the ceiling comes first in the next round.
    fn in_order(&self, key: Key, fit: Fit, rounds: u32) -> (Option<Placed>, (u64, u64)) {
        let items = &self.part().items;
        let ordered = Ordered { part: self.part(), fit, ceiling: self.ceiling };
        let mut comes_first = vec![false; items.len()];
        let mut order: Vec<u32> = (0..items.len() as u32).collect();
        let (mut best, mut lowest_in) = (None::<Placed>, 0);
        let mut made = 0;
        let mut over = Vec::new();
        let mut purse = Meter { work: self.meter.left() / ORDERS.len() as u64, spent: 0, ..self.meter };
        while made < rounds {
            order.sort_by_key(|&i| (!comes_first[i as usize], key(items[i as usize]), i));
            let mut offsets = vec![0; items.len()];
            made += 1;
            let Some(height) = ordered.run(&order, &mut offsets, &mut over, &mut purse) else { break };
            if best.as_ref().is_none_or(|b| height < b.height) {
                (best, lowest_in) = (Some(Placed { height, offsets }), made);
            }
            over.retain(|&i| !std::mem::replace(&mut comes_first[i as usize], true));
            if over.is_empty() || made > lowest_in + PATIENCE || purse.stopped().is_some() {
                break;
            }
        }
        (best, (made.into(), purse.spent))
    }

    /// Chains over everything at once, in either direction.
    fn edges(&self, rounds: u32) -> Vec<Job<'static>> {
        let mut jobs = Vec::new();
        for policy in policies(self.part()) {
            for direction in DIRECTIONS {
                for rank in if rounds > 1 { 0..RANKS.len() } else { 0..1 } {
                    let chain = Chain { start: Start::Edge, direction, policy, rank, rounds };
                    jobs.push(Job { chain, long_from: u32::MAX });
                }
            }
        }
        jobs
    }

    /// Chains that begin with the long-lived items in their places.
    fn long_first(&self, rounds: u32) -> Vec<Job<'static>> {
        let mut jobs = Vec::new();
        for long_from in long_lengths(self.part()) {
            for rank in 0..RANKS.len() {
                for (direction, short) in [
                    (Direction::Forward, Fit::Highest),
                    (Direction::Backward, Fit::Lowest),
                    (Direction::Forward, Fit::Tightest),
                ] {
                    let policy = Policy { long_from, long: Fit::Lowest, short, order: Order::Longest };
                    jobs.push(Job { chain: Chain { start: Start::Edge, direction, policy, rank, rounds }, long_from });
                }
            }
        }
        jobs
    }

    fn follow_all(&mut self, jobs: &[Job]) {
        // Where repairs help, the first often does; single sweeps are cheap.
        let first = match jobs.first() {
            Some(job) if job.chain.rounds > 1 => jobs.len().min(FIRST_WAVE),
            _ => 0,
        };
        let (first, others) = jobs.split_at(first);
        for wave in std::iter::once(first).chain(others.chunks(WAVE)) {
            if self.done() {
                return;
            }
            let limit = self.best.as_ref().map_or(u64::MAX, |b| b.height - 1);
            // The chains of a wave don't know of each other.
            let share = self.meter.left() / WAVE as u64;
            let results: Vec<_> = wave
                .par_iter()
                .map(|Job { chain, long_from }| {
                    let long = |i: &u32| self.part().items[*i as usize].cliques() >= *long_from;
                    self.follow(chain, (0..self.part().items.len() as u32).filter(long).collect(), limit, share)
                })
                .collect();
            for (placed, spent) in results {
                self.spend(spent);
                self.offer(placed);
            }
        }
    }

    /// Sweeps around the reserved members; what ends above the ceiling joins them for the next round. Returns the best
    /// plan within the limit that `work` pays for, if any, with the sweeps made and the work spent.
    fn follow(&self, chain: &Chain, mut members: Vec<u32>, limit: u64, work: u64) -> (Option<Placed>, (u64, u64)) {
        let part = self.part();
        let (mut best, mut lowest) = (None::<Placed>, (u64::MAX, 0));
        let mut sweeps = 0;
        let mut purse = Meter { work, spent: 0, ..self.meter };
        let mut over = Vec::new();
        while sweeps < chain.rounds {
            members.sort_by_key(|&i| (RANKS[chain.rank](part.items[i as usize]), i));
            let Some(reserved) = Reserved::place(part, chain.start, &members, &mut purse) else { break };
            let cut = if chain.rounds == 1 { limit } else { u64::MAX };
            let placed = self.sweep(chain, &reserved, cut, &mut over, &mut purse);
            sweeps += 1;
            let Some(placed) = placed else { break };
            if placed.height < lowest.0 {
                lowest = (placed.height, sweeps);
                if placed.height <= limit {
                    best = Some(placed);
                }
            }
            over.retain(|&i| reserved.of(i).is_none());
            if over.is_empty() || sweeps > lowest.1 + PATIENCE || purse.stopped().is_some() {
                break;
            }
            members.append(&mut over);
        }
        (best, (sweeps.into(), purse.spent))
    }

    fn sweep(
        &self,
        chain: &Chain,
        reserved: &Reserved,
        limit: u64,
        over: &mut Vec<u32>,
        purse: &mut Meter,
    ) -> Option<Placed> {
        let mut offsets = vec![0; self.part().items.len()];
        let &Chain { policy, direction, start, .. } = chain;
        let sweep =
            Sweep { timeline: &self.timeline, policy, direction, start, reserved, ceiling: self.ceiling, limit };
        let height = sweep.run(&mut offsets, over, purse)?;
        Some(Placed { height, offsets })
    }
}

/// A chain, and from how many cliques on an item has a place before it begins.
#[derive(Debug, Clone, Copy)]
struct Job<'s> {
    chain: Chain<'s>,
    long_from: u32,
}

/// Sweeps that learn from one another.
#[derive(Debug, Clone, Copy)]
struct Chain<'s> {
    start: Start<'s>,
    direction: Direction,
    policy: Policy,
    /// Index into [`RANKS`].
    rank: usize,
    rounds: u32,
}

/// Plans that are kept beside the best.
const OTHERS: usize = 4;

/// Chains that run side by side; a fixed number, so that the result does not depend on the machine.
const WAVE: usize = 8;

/// Chains of the first wave that repairs: where that helps, the first often does.
const FIRST_WAVE: usize = 2;

/// Sweeps of a chain that repairs.
const ROUNDS: u32 = 12;

/// Rounds without a lower plan after which a chain ends.
const PATIENCE: u32 = 5;

/// The least comes first.
type Key = fn(Item) -> (u128, u32);

/// Who is placed first where everything is placed item by item.
const ORDERS: [Key; 4] = [RANKS[0], RANKS[1], RANKS[2], |item| (item.start.into(), u32::MAX - item.end)];

/// Items up to which placing one after another, a hundred times dearer than a step of a sweep, is tried.
const MOST_IN_ORDER: usize = 50_000;

/// Who is reserved first: the least key.
const RANKS: [Key; 3] = [
    |item| (u128::MAX - u128::from(item.bytes), item.start),
    |item| (u128::MAX - u128::from(item.cliques()), item.start),
    |item| (u128::MAX - u128::from(item.bytes) * u128::from(item.cliques()), item.start),
];

/// From how many cliques on an item counts as long.
fn long_lengths(part: &Part) -> Vec<u32> {
    let mut lengths = Vec::new();
    for share in [0.01, 0.003, 0.03, 0.001, 0.1] {
        let length = (share * f64::from(part.cliques)) as u32 + 1;
        if !lengths.contains(&length) {
            lengths.push(length);
        }
    }
    lengths
}

/// The policies, most often successful first.
fn policies(part: &Part) -> Vec<Policy> {
    let mut policies = Vec::new();
    for order in [Order::Longest, Order::Largest] {
        for fit in [Fit::Lowest, Fit::Tightest] {
            policies.push(Policy { long_from: 0, long: fit, short: fit, order });
        }
        for long_from in long_lengths(part) {
            for (long, short) in
                [(Fit::Lowest, Fit::Highest), (Fit::Lowest, Fit::TightestHigh), (Fit::Tightest, Fit::TightestHigh)]
            {
                policies.push(Policy { long_from, long, short, order });
            }
        }
    }
    policies
}

/// Orders for the stack at the peak, bottom first.
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
