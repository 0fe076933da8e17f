//! The search of one worker. A worker picks the clique for the next step, tries the cases of this clique and remembers
//! the states that failed.
//!
//! In: a part, a capacity and a number of visits. Out: a plan, a proof that there is none, or the result that the
//! visits were not enough. A state that the worker remembers as failed is not searched again.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use super::spans::Spans;
use super::state::State;
use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::Part;
use crate::planner::mix::mix128;
use crate::planner::space::aligned;

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
    /// Tables that are filled where they are needed; kept here so that their memory is reused.
    floors: Spans,
    places: Spans,
    ends: Vec<u32>,
    count: Vec<i64>,
}

impl<'p> Search<'p> {
    /// Creates a search. Returns `None` if more bytes than the capacity are alive in some clique.
    pub fn new(part: &'p Part, capacity: u64, deadline: Budget) -> Option<Self> {
        let longest = part.items.iter().map(|item| item.cliques()).max().unwrap_or(1);
        let table = Spans::new(part.cliques, longest);
        Some(Self {
            state: State::new(part, capacity, &table)?,
            rank: Rank::Longest,
            seed: 0,
            conflicts: vec![0; part.cliques as usize],
            failed: HashSet::new(),
            left: 0,
            depth: 0,
            deadline,
            floors: table.clone(),
            places: table,
            ends: vec![0; part.cliques as usize],
            count: Vec::new(),
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
        let Some(BranchPoint { clique, gap, valley }) = self.most_contended(from, to) else {
            return Outcome::Failed;
        };
        let mut candidates: Vec<u32> = self.state.fitting(valley, clique..clique + 1).collect();
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
        let Self { state, floors, places, conflicts, left, .. } = self;
        // From the second round on, floors stay as they are if no place has changed.
        let mut is_first = true;
        loop {
            floors.read(&state.floor, from, to);
            places.clear(from, to);
            let (mut work, mut changed, mut dead_end) = (0, is_first, None);
            for i in state.starts[from as usize] as usize..state.starts[to as usize] as usize {
                if state.placed[i] {
                    continue;
                }
                let item = state.reach[i];
                work += u64::from(item.cliques);
                let at = aligned(floors.max(item.runs).max(item.least), item.alignment);
                let Some(at) = at.filter(|at| *at <= item.top) else {
                    dead_end = Some(state.items[i].start);
                    break;
                };
                changed |= at != state.lowest[i];
                state.lowest[i] = at;
                places.lower(item.runs, at);
            }
            *left = left.saturating_sub(1 + work);
            if changed && dead_end.is_none() {
                (is_first, changed) = (false, false);
                places.minima(from, to);
                for k in from..to {
                    let low = places.minimum(k);
                    if low != u64::MAX && low > state.floor[k as usize] {
                        state.raise(k, low);
                        changed = true;
                        if state.rest[k as usize] > state.capacity - low {
                            dead_end = Some(k);
                            break;
                        }
                    }
                }
            }
            if let Some(clique) = dead_end {
                conflicts[clique as usize] += 1;
                return false;
            }
            if !changed {
                return true;
            }
        }
    }

    /// Returns the clique with the fewest cases, weighted by the failures seen in each clique. Returns `None` if some
    /// clique has no case, so that the state has no plan.
    fn most_contended(&mut self, from: u32, to: u32) -> Option<BranchPoint> {
        let Self { state, places, floors: tops, ends, .. } = self;
        // For each clique, one past the last clique of the same run of equal floors.
        ends[to as usize - 1] = to;
        for k in (from as usize + 1..to as usize).rev() {
            ends[k - 1] = if state.floor[k - 1] == state.floor[k] { ends[k] } else { k as u32 };
        }
        // Lowest places and tops of the items that fit into no run at its floor.
        places.clear(from, to);
        tops.clear(from, to);
        for i in state.to_come(from, to) {
            let (item, lowest) = (state.items[i as usize], state.lowest[i as usize]);
            if lowest > state.floor[item.start as usize] || item.end > ends[item.start as usize] {
                let runs = state.reach[i as usize].runs;
                places.lower(runs, lowest);
                tops.lower(runs, lowest + item.bytes);
            }
        }
        places.minima(from, to);
        tops.minima(from, to);
        let mut best: Option<(Score, BranchPoint)> = None;
        let mut k = from;
        // A higher floor acts as a wall. So do the ends of the piece, which no item crosses.
        let mut left_is_wall = true;
        while k < to {
            let floor = self.state.floor[k as usize];
            let end = self.ends[k as usize];
            let right_is_wall = end == to || self.state.floor[end as usize] > floor;
            if left_is_wall && right_is_wall && !self.valley(k, end, &mut best) {
                return None;
            }
            left_is_wall = end < to && self.state.floor[end as usize] < floor;
            k = end;
        }
        best.map(|(_, point)| point)
    }

    /// Looks at every clique of the valley `[a, b)` and updates `best`. Returns false if one of these cliques has no
    /// case.
    fn valley(&mut self, a: u32, b: u32, best: &mut Option<(Score, BranchPoint)>) -> bool {
        let Self { state, places, floors: tops, count, conflicts, left, .. } = self;
        let floor = state.floor[a as usize];
        // If an item comes to rest in the valley but above its floor, it rests on an item that is still to be placed.
        let mut least_top = (a..b).map(|k| tops.minimum(k)).min().unwrap_or(u64::MAX);
        // The change in the number of items that fit at the floor, from the clique before.
        count.clear();
        count.resize((b - a) as usize + 1, 0i64);
        let mut previous = None;
        for i in state.fitting(a..b, a..b) {
            let item = state.items[i as usize];
            // Equal items are next to each other in the list, and are one case.
            if previous != Some((item, state.pin(i))) {
                count[(item.start - a) as usize] += 1;
                count[(item.end - a) as usize] -= 1;
            }
            previous = Some((item, state.pin(i)));
            least_top = least_top.min(floor + item.bytes);
        }
        let mut fitting = 0;
        for (k, more) in (a..b).zip(&*count) {
            fitting += more;
            *left = left.saturating_sub(VISITS_PER_STATE * u64::from(state.alive[k as usize]));
            if state.rest[k as usize] == 0 {
                continue;
            }
            // The height at which the next item could come to rest if no item does so at the floor.
            let next = places.minimum(k).min(least_top);
            let gap = (next - floor <= state.slack(k)).then_some(next);
            let cases = fitting as u64 + u64::from(gap.is_some());
            if cases == 0 {
                conflicts[k as usize] += 1;
                return false;
            }
            let score = match cases {
                1 => (0, 0, 0),
                _ => (cases * 1_000_000 / (u64::from(conflicts[k as usize]) + 10), state.slack(k), floor),
            };
            if best.as_ref().is_none_or(|(lowest, _)| score < *lowest) {
                *best = Some((score, BranchPoint { clique: k, gap, valley: a..b }));
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
    /// The valley of the clique.
    valley: Range<u32>,
}
