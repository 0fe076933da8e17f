//! The search of one worker. A worker picks the clique for the next step, tries the cases of this clique and remembers
//! the states that failed.
//!
//! In: a part, a capacity and a number of visits. Out: a plan, a proof that there is none, or the result that the
//! visits were not enough. A state that the worker remembers as failed is not searched again.

use std::cmp::Reverse;
use std::collections::HashSet;

use super::state::State;
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::Part;
use crate::planner::mix::mix128;

/// Visits charged for each branch, in addition to those counted.
const VISITS_PER_BRANCH: u64 = 200;
/// Visits charged for each item or clique in the state of a branch.
const VISITS_PER_STATE: u64 = 6;

/// Most failed states that a worker remembers. A worker that reaches this number forgets all of them.
const MEMORY: usize = 1_000_000;

/// Depth at which a branch is given up, so that the stack of the thread suffices.
pub(super) const DEPTH: u32 = 20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Solved,
    Failed,
    Spent,
}

/// The order of candidates: by length, by size or by area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rank {
    Longest,
    Largest,
    Area,
}

impl Rank {
    pub const ALL: [Self; 3] = [Self::Longest, Self::Largest, Self::Area];
}

/// One worker's search.
#[derive(Clone)]
pub(super) struct Search<'p> {
    pub state: State<'p>,
    rank: Rank,
    /// Seed of random changes to the order of candidates. A multiple of 8 leaves the order unchanged.
    pub seed: u64,
    /// Number of failures seen in each clique.
    conflicts: Vec<u32>,
    /// Hashes of the states known to fail.
    failed: HashSet<u128>,
    /// Visits that are left.
    pub left: u64,
    pub depth: u32,
    deadline: Budget,
    scratch: Vec<u64>,
}

impl<'p> Search<'p> {
    /// Creates a search. Returns `None` if more bytes than the capacity are alive in some clique.
    pub fn new(part: &'p Part, capacity: u64, deadline: Budget) -> Option<Self> {
        Some(Self {
            state: State::new(part, capacity)?,
            rank: Rank::Longest,
            seed: 0,
            conflicts: vec![0; part.cliques as usize],
            failed: HashSet::new(),
            left: 0,
            depth: 0,
            deadline,
            scratch: Vec::new(),
        })
    }

    /// A copy of the search with another order of candidates.
    pub fn with_rank(&self, rank: Rank) -> Self {
        Self { rank, ..self.clone() }
    }

    /// Goes back to the root. The states known to fail are kept, and the numbers of failures seen in each clique are
    /// halved.
    pub fn restart(&mut self) {
        self.state.undo(0);
        self.conflicts.iter_mut().for_each(|c| *c = c.div_ceil(2));
    }

    /// Plans the items still to be placed within cliques `[from, to)`. No such item may cross the edges of this range.
    pub fn solve(&mut self, from: u32, to: u32, cancelled: &dyn Fn() -> bool) -> Outcome {
        if self.left == 0 || self.depth > DEPTH {
            return Outcome::Spent;
        }
        if !self.lift(from, to) {
            return Outcome::Failed;
        }
        for (from, to) in self.state.pieces(from, to) {
            self.depth += 1;
            let outcome = self.branch(from, to, cancelled);
            self.depth -= 1;
            if outcome != Outcome::Solved {
                return outcome;
            }
        }
        Outcome::Solved
    }

    fn branch(&mut self, from: u32, to: u32, cancelled: &dyn Fn() -> bool) -> Outcome {
        if cancelled() || (self.state.trail.len().is_multiple_of(64) && self.deadline.is_late()) {
            return Outcome::Spent;
        }
        let size = u64::from(to - from) + u64::from(self.state.starts[to as usize] - self.state.starts[from as usize]);
        self.left = self.left.saturating_sub(VISITS_PER_BRANCH + VISITS_PER_STATE * size);
        let hash = self.state.hash(from, to);
        if self.failed.contains(&hash) {
            return Outcome::Failed;
        }
        let Some(BranchPoint { clique, gap, mut candidates }) = self.most_contended(from, to) else {
            return Outcome::Failed;
        };
        self.sort(&mut candidates);
        let mark = self.state.trail.len();
        let mut previous = None;
        for i in candidates {
            let kind = (self.state.items[i as usize], self.state.pin(i));
            if previous == Some(kind) {
                continue;
            }
            previous = Some(kind);
            self.state.put(i);
            match self.solve(from, to, cancelled) {
                Outcome::Failed => self.state.undo(mark),
                other => return other,
            }
        }
        if let Some(next) = gap {
            self.state.raise(clique, next);
            match self.solve(from, to, cancelled) {
                Outcome::Failed => self.state.undo(mark),
                other => return other,
            }
        }
        self.conflicts[clique as usize] += 1;
        if self.failed.len() >= MEMORY {
            self.failed.clear();
        }
        self.failed.insert(hash);
        Outcome::Failed
    }

    /// Raises each floor to the lowest place that any remaining item could have there, until no floor changes. Also
    /// records the lowest place of each remaining item. Returns false if some item no longer fits.
    fn lift(&mut self, from: u32, to: u32) -> bool {
        let mut scratch = std::mem::take(&mut self.scratch);
        let fits = loop {
            scratch.clear();
            scratch.resize((to - from) as usize, u64::MAX);
            let mut work = 0;
            let mut dead_end = None;
            for i in self.state.starts[from as usize]..self.state.starts[to as usize] {
                if self.state.placed[i as usize] {
                    continue;
                }
                let item = self.state.items[i as usize];
                let span = item.start as usize..item.end as usize;
                work += span.len() as u64;
                let floor = self.state.floor[span.clone()].iter().copied().max().unwrap_or(0);
                let at = match self.state.pin(i) {
                    Some(pin) if pin >= floor => Some(pin),
                    Some(_) => None,
                    None if item.alignment == 1 => Some(floor),
                    None => floor.checked_next_multiple_of(item.alignment),
                };
                let Some(at) = at.filter(|at| at.checked_add(item.bytes).is_some_and(|end| end <= self.state.capacity))
                else {
                    dead_end = Some(item.start);
                    break;
                };
                self.state.lowest[i as usize] = at;
                scratch[span.start - from as usize..span.end - from as usize].iter_mut().for_each(|l| *l = at.min(*l));
            }
            self.left = self.left.saturating_sub(1 + work);
            if let Some(clique) = dead_end {
                self.conflicts[clique as usize] += 1;
                break false;
            }
            let mut changed = false;
            let mut full = None;
            for (k, &low) in (from..to).zip(&scratch) {
                if low != u64::MAX && low > self.state.floor[k as usize] {
                    self.state.raise(k, low);
                    changed = true;
                    if self.state.rest[k as usize] > self.state.capacity - low {
                        full = Some(k);
                        break;
                    }
                }
            }
            if let Some(clique) = full {
                self.conflicts[clique as usize] += 1;
                break false;
            }
            if !changed {
                break true;
            }
        };
        self.scratch = scratch;
        fits
    }

    /// Returns the clique with the fewest cases, weighted by the failures seen in each clique. Returns `None` if some
    /// clique has no case, so that the state has no plan.
    fn most_contended(&mut self, from: u32, to: u32) -> Option<BranchPoint> {
        let mut best: Option<(Score, BranchPoint)> = None;
        let mut k = from;
        // A higher floor acts as a wall. So do the ends of the piece, which no item crosses.
        let mut left_is_wall = true;
        while k < to {
            let floor = self.state.floor[k as usize];
            let end = (k + 1..to).find(|&c| self.state.floor[c as usize] != floor).unwrap_or(to);
            let right_is_wall = end == to || self.state.floor[end as usize] > floor;
            if left_is_wall && right_is_wall && !self.valley(k, end, &mut best) {
                return None;
            }
            left_is_wall = end < to && self.state.floor[end as usize] < floor;
            k = end;
        }
        best.map(|(_, place)| place)
    }

    /// Looks at every clique of the valley `[a, b)` and updates `best`. Returns false if one of these cliques has no
    /// case.
    fn valley(&mut self, a: u32, b: u32, best: &mut Option<(Score, BranchPoint)>) -> bool {
        let floor = self.state.floor[a as usize];
        let mut count = vec![0u32; (b - a) as usize];
        let mut fitting: Vec<u32> = Vec::new();
        let mut previous = None;
        for i in self.state.to_come(a, b) {
            let item = self.state.items[i as usize];
            if item.end <= b && self.state.lowest[i as usize] == floor {
                // Equal items are next to each other in the list, and are one case.
                if previous != Some((item, self.state.pin(i))) {
                    count[(item.start - a) as usize..(item.end - a) as usize].iter_mut().for_each(|c| *c += 1);
                }
                previous = Some((item, self.state.pin(i)));
                fitting.push(i);
            }
        }
        // If an item comes to rest in the valley but above its floor, it rests on an item that is still to be placed.
        let mut least_top = u64::MAX;
        for k in a..b {
            for &i in &self.state.alive[k as usize] {
                if !self.state.placed[i as usize] {
                    least_top = least_top.min(self.state.lowest[i as usize] + self.state.items[i as usize].bytes);
                }
            }
        }
        for k in a..b {
            let list = &self.state.alive[k as usize];
            self.left = self.left.saturating_sub(VISITS_PER_STATE * list.len() as u64);
            if self.state.rest[k as usize] == 0 {
                continue;
            }
            // The heights at which the next item could come to rest if no item does so at the floor.
            let places = list.iter().filter(|&&i| !self.state.placed[i as usize]).map(|&i| {
                match self.state.lowest[i as usize] {
                    at if at == floor => least_top,
                    at => at,
                }
            });
            let next = places.min().unwrap_or(u64::MAX);
            let gap = (next - floor <= self.state.slack(k)).then_some(next);
            let cases = u64::from(count[(k - a) as usize]) + u64::from(gap.is_some());
            if cases == 0 {
                self.conflicts[k as usize] += 1;
                return false;
            }
            let score = match cases {
                1 => (0, 0, 0),
                _ => (cases * 1_000_000 / (u64::from(self.conflicts[k as usize]) + 10), self.state.slack(k), floor),
            };
            if best.as_ref().is_none_or(|(lowest, _)| score < *lowest) {
                let here = |i: &u32| self.state.items[*i as usize].start <= k && k < self.state.items[*i as usize].end;
                let candidates = fitting.iter().copied().filter(here).collect();
                *best = Some((score, BranchPoint { clique: k, gap, candidates }));
            }
            if cases == 1 {
                break;
            }
        }
        true
    }

    /// Sorts candidates, the best first. Equal items stay together.
    fn sort(&self, candidates: &mut [u32]) {
        sort_by_key(candidates, |&i| {
            let item = self.state.items[i as usize];
            let (bytes, cliques) = (u128::from(item.bytes), u128::from(item.cliques()));
            let key = match self.rank {
                Rank::Area => bytes * cliques,
                Rank::Longest => cliques << 64 | bytes,
                Rank::Largest => bytes << 32 | cliques,
            };
            let weight = match self.seed % 8 {
                0 => 64,
                _ => {
                    32 + u128::from(
                        mix128(item.bytes ^ u64::from(item.start) << 40 ^ u64::from(item.end) << 20, self.seed) as u64
                            % 64,
                    )
                }
            };
            (Reverse((key >> 6).saturating_mul(weight)), item.start, item.end, item.bytes, i)
        });
    }
}

/// The score of a clique. The clique with the lowest score is branched on.
type Score = (u64, u64, u64);

/// The clique to branch on, and its cases.
struct BranchPoint {
    clique: u32,
    /// The new floor if no item rests on the old one; `None` if that case is impossible.
    gap: Option<u64>,
    candidates: Vec<u32>,
}
