//! Branch and bound for a plan of one part below a capacity.
//!
//! Any plan can be pushed down until every item rests on the floor or on another item. The search builds such plans
//! from below. Its state is one *floor* per clique: what is under it is settled, and the bytes still to come must fit
//! between it and the capacity; what is left over is the clique's *slack*. One step looks at one *valley* (neighbouring
//! cliques of equal floor between higher ones) and one clique of it, and branches on what comes next right there: one of the
//! items that fit the valley, at the floor; or nothing, which raises the clique's floor to the next height at which an
//! item could come to rest, and costs slack. These cases exclude each other and leave none out.
//!
//! What keeps the tree small:
//! - a floor rises at once to the lowest place that any item still to come could have there;
//! - the next step is taken where the fewest cases are open, and where searches failed before;
//! - where no item still to come crosses between two cliques, both sides are searched apart;
//! - of equal items one is tried, and states that failed before (no-goods) are not entered again.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::planner::budget::Budget;
use crate::planner::decompose::parts::{Item, Part};
use crate::planner::decompose::timeline::Buckets;

/// What a search found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A plan within the capacity.
    Found(Vec<u64>),
    /// There is none.
    Impossible,
    /// The work was spent.
    Unknown,
}

/// Searches for a plan of `part` within `capacity` until the budget is spent.
///
/// Three workers with different orders of candidates restart with growing limits; each remembers what failed. The verdict is that of the
/// first worker, by number, that has one in the earliest round: the same on every machine.
pub(crate) fn search(part: &Part, capacity: u64, budget: &mut Budget) -> Verdict {
    let below;
    let part = if part.forbidden.is_empty() {
        part
    } else {
        below = part.below(capacity);
        // What is alive need not fit beside the forbidden ranges, nor their sum within 2^64.
        let forbidden: u64 = part.forbidden.iter().map(|&i| below.items[i as usize].bytes).sum();
        if part.live().iter().any(|&bytes| bytes > capacity.saturating_sub(forbidden)) {
            return Verdict::Impossible;
        }
        &below
    };
    let Some(first) = Search::new(part, capacity, *budget) else { return Verdict::Impossible };
    let mut workers = Rank::ALL.map(|rank| Search { rank, ..first.clone() });
    let mut limit = FIRST_LIMIT.max(part.items.len() as u64 * 50);
    for round in 0.. {
        let limit_here = limit.min(budget.left().saturating_mul(VISITS_PER_WORK) / workers.len() as u64);
        if limit_here < part.items.len() as u64 || budget.is_late() {
            break;
        }
        // Workers above this one may stop: their verdict would not be used.
        let decided = AtomicUsize::new(usize::MAX);
        let outcomes = in_threads(&mut workers, |number, worker| {
            (worker.seed, worker.left, worker.depth) = (round, limit_here, 0);
            let outcome = worker.solve(0, part.cliques, &|| decided.load(Ordering::Relaxed) < number);
            if outcome != Outcome::Spent {
                decided.fetch_min(number, Ordering::Relaxed);
            }
            outcome
        });
        budget.spend(limit_here * workers.len() as u64 / VISITS_PER_WORK);
        for (worker, outcome) in workers.iter_mut().zip(outcomes) {
            match outcome {
                Outcome::Solved => return Verdict::Found(std::mem::take(&mut worker.offsets)),
                Outcome::Failed => return Verdict::Impossible,
                Outcome::Spent => worker.restart(),
            }
        }
        limit += limit / 5;
    }
    Verdict::Unknown
}

/// Visits of an item in a clique for the price of a rectangle in a sweep.
const VISITS_PER_WORK: u64 = 24;

/// Visits in the first round of a worker.
const FIRST_LIMIT: u64 = 1_000_000;

/// Visits that a branch costs beside those it counts, and for each item or clique of its state.
const VISITS_PER_BRANCH: u64 = 200;
const VISITS_PER_STATE: u64 = 6;

/// States that a worker remembers before it forgets them all.
const MEMORY: usize = 1_000_000;

/// Steps from the root after which a branch is given up, so that the stack suffices.
const DEPTH: u32 = 20_000;

/// Stack of a worker: [`DEPTH`] steps take less.
const STACK_BYTES: usize = 64 << 20;

/// Runs the workers side by side where the pool has more than one thread.
fn in_threads<'p>(workers: &mut [Search<'p>], run: impl Fn(usize, &mut Search<'p>) -> Outcome + Sync) -> Vec<Outcome> {
    let run = &run;
    let together = if rayon::current_num_threads() > 1 { workers.len() } else { 1 };
    let mut outcomes = Vec::new();
    for (wave, workers) in workers.chunks_mut(together).enumerate() {
        std::thread::scope(|scope| {
            let started: Vec<_> = workers
                .iter_mut()
                .enumerate()
                .map(|(k, worker)| {
                    let body = move || run(wave * together + k, worker);
                    std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, body)
                })
                .collect();
            // A machine that gives no thread has spent nothing and knows nothing.
            let outcome = |thread: std::io::Result<std::thread::ScopedJoinHandle<Outcome>>| {
                thread.map_or(Outcome::Spent, |t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            };
            outcomes.extend(started.into_iter().map(outcome));
        });
    }
    outcomes
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Solved,
    Failed,
    Spent,
}

/// Which candidate is tried first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    Longest,
    Largest,
    Area,
}

impl Rank {
    const ALL: [Self; 3] = [Self::Longest, Self::Largest, Self::Area];
}

/// One undoable change.
#[derive(Debug, Clone, Copy)]
enum Change {
    Floor(u32, u64),
    Placed(u32),
}

#[derive(Clone)]
struct Search<'p> {
    items: &'p [Item],
    /// By item; empty without pins.
    pins: Vec<Option<u64>>,
    capacity: u64,
    rank: Rank,
    /// Changes the order of candidates; 0 leaves it pure.
    seed: u64,
    /// Where each clique's births begin among the items.
    starts: Vec<u32>,
    /// Items by clique that they are alive in.
    alive: Vec<Vec<u32>>,
    floor: Vec<u64>,
    /// Bytes still to come, by clique.
    rest: Vec<u64>,
    offsets: Vec<u64>,
    placed: Vec<bool>,
    /// The lowest place of each item still to come, as of the last [`lift`](Self::lift).
    lowest: Vec<u64>,
    trail: Vec<Change>,
    keys: Vec<u128>,
    /// Searches that failed in each clique.
    conflicts: Vec<u32>,
    /// States known to fail, by hash.
    failed: HashSet<u128>,
    left: u64,
    depth: u32,
    deadline: Budget,
    scratch: Vec<u64>,
}

impl<'p> Search<'p> {
    /// `None` when some clique holds more than the capacity.
    fn new(part: &'p Part, capacity: u64, deadline: Budget) -> Option<Self> {
        let rest = part.live();
        if rest.iter().any(|&bytes| bytes > capacity) {
            return None;
        }
        let mut alive = vec![Vec::new(); part.cliques as usize];
        for (i, item) in part.items.iter().enumerate() {
            alive[item.start as usize..item.end as usize].iter_mut().for_each(|list| list.push(i as u32));
        }
        let mut pins = vec![None; if part.pins.is_empty() { 0 } else { part.items.len() }];
        part.pins.iter().for_each(|&(i, at)| pins[i as usize] = Some(at));
        Some(Self {
            items: &part.items,
            pins,
            capacity,
            rank: Rank::Longest,
            seed: 0,
            starts: Buckets::new(part.cliques + 1, part.items.iter().map(|item| item.start)).starts,
            alive,
            floor: vec![0; part.cliques as usize],
            rest,
            offsets: vec![0; part.items.len()],
            placed: part.items.iter().map(|item| item.bytes == 0).collect(),
            lowest: vec![0; part.items.len()],
            trail: Vec::new(),
            keys: (0..part.items.len() as u64).map(|i| mix(i, 0x51)).collect(),
            conflicts: vec![0; part.cliques as usize],
            failed: HashSet::new(),
            left: 0,
            depth: 0,
            deadline,
            scratch: Vec::new(),
        })
    }

    fn restart(&mut self) {
        self.undo(0);
        self.conflicts.iter_mut().for_each(|c| *c = c.div_ceil(2));
    }

    /// Plans what is still to come within cliques `[from, to)`, which nothing still to come crosses into.
    fn solve(&mut self, from: u32, to: u32, cancelled: &dyn Fn() -> bool) -> Outcome {
        if self.left == 0 || self.depth > DEPTH {
            return Outcome::Spent;
        }
        if !self.lift(from, to) {
            return Outcome::Failed;
        }
        for (from, to) in self.pieces(from, to) {
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
        if cancelled() || (self.trail.len().is_multiple_of(64) && self.deadline.is_late()) {
            return Outcome::Spent;
        }
        let size = u64::from(to - from) + u64::from(self.starts[to as usize] - self.starts[from as usize]);
        self.left = self.left.saturating_sub(VISITS_PER_BRANCH + VISITS_PER_STATE * size);
        let state = self.state(from, to);
        if self.failed.contains(&state) {
            return Outcome::Failed;
        }
        let Some(Place { clique, gap, mut candidates }) = self.most_contended(from, to) else { return Outcome::Failed };
        self.sort(&mut candidates);
        let mark = self.trail.len();
        let mut previous = None;
        for i in candidates {
            let kind = (self.items[i as usize], self.pin(i));
            if previous == Some(kind) {
                continue;
            }
            previous = Some(kind);
            self.put(i);
            match self.solve(from, to, cancelled) {
                Outcome::Failed => self.undo(mark),
                other => return other,
            }
        }
        if let Some(next) = gap {
            self.raise(clique, next);
            match self.solve(from, to, cancelled) {
                Outcome::Failed => self.undo(mark),
                other => return other,
            }
        }
        self.conflicts[clique as usize] += 1;
        if self.failed.len() >= MEMORY {
            self.failed.clear();
        }
        self.failed.insert(state);
        Outcome::Failed
    }

    fn pin(&self, i: u32) -> Option<u64> {
        self.pins.get(i as usize).copied().flatten()
    }

    /// Items still to come that start within cliques `[from, to)`.
    fn to_come(&self, from: u32, to: u32) -> impl Iterator<Item = u32> + '_ {
        (self.starts[from as usize]..self.starts[to as usize]).filter(|&i| !self.placed[i as usize])
    }

    /// Raises floors to the lowest place that anything still to come could have there, and notes each item's lowest
    /// place; false when something can't be placed any more.
    fn lift(&mut self, from: u32, to: u32) -> bool {
        let mut scratch = std::mem::take(&mut self.scratch);
        let fits = loop {
            scratch.clear();
            scratch.resize((to - from) as usize, u64::MAX);
            let mut work = 0;
            let mut dead_end = None;
            for i in self.starts[from as usize]..self.starts[to as usize] {
                if self.placed[i as usize] {
                    continue;
                }
                let item = self.items[i as usize];
                let span = item.start as usize..item.end as usize;
                work += span.len() as u64;
                let floor = self.floor[span.clone()].iter().copied().max().unwrap_or(0);
                let at = match self.pin(i) {
                    Some(pin) if pin >= floor => Some(pin),
                    Some(_) => None,
                    None if item.alignment == 1 => Some(floor),
                    None => floor.checked_next_multiple_of(item.alignment),
                };
                let Some(at) = at.filter(|at| at.checked_add(item.bytes).is_some_and(|end| end <= self.capacity))
                else {
                    dead_end = Some(item.start);
                    break;
                };
                self.lowest[i as usize] = at;
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
                if low != u64::MAX && low > self.floor[k as usize] {
                    self.raise(k, low);
                    changed = true;
                    if self.rest[k as usize] > self.capacity - low {
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

    /// Cuts `[from, to)` where nothing still to come crosses, the fullest first; what is settled is left out.
    fn pieces(&self, from: u32, to: u32) -> Vec<(u32, u32)> {
        let mut pieces: Vec<(u32, u32)> = Vec::new();
        for i in self.to_come(from, to) {
            let item = self.items[i as usize];
            match pieces.last_mut() {
                Some(piece) if item.start < piece.1 => piece.1 = piece.1.max(item.end),
                _ => pieces.push((item.start, item.end)),
            }
        }
        if pieces.len() > 1 {
            pieces.sort_by_key(|&(a, b)| (a..b).map(|k| self.slack(k)).min());
        }
        pieces
    }

    fn slack(&self, k: u32) -> u64 {
        self.capacity - self.floor[k as usize] - self.rest[k as usize]
    }

    /// The place with the fewest cases, counted against the failures seen there; `None` when some place has no case.
    fn most_contended(&mut self, from: u32, to: u32) -> Option<Place> {
        let mut best: Option<(Score, Place)> = None;
        let mut k = from;
        // A wall stands where the floor is higher, and nothing crosses the ends of the piece.
        let mut left_is_wall = true;
        while k < to {
            let floor = self.floor[k as usize];
            let end = (k + 1..to).find(|&c| self.floor[c as usize] != floor).unwrap_or(to);
            let right_is_wall = end == to || self.floor[end as usize] > floor;
            if left_is_wall && right_is_wall && !self.valley(k, end, &mut best) {
                return None;
            }
            left_is_wall = end < to && self.floor[end as usize] < floor;
            k = end;
        }
        best.map(|(_, place)| place)
    }

    /// Looks at every clique of the valley `[a, b)`; false when one of them has no case.
    fn valley(&mut self, a: u32, b: u32, best: &mut Option<(Score, Place)>) -> bool {
        let floor = self.floor[a as usize];
        let mut count = vec![0u32; (b - a) as usize];
        let mut fitting: Vec<u32> = Vec::new();
        let mut previous = None;
        for i in self.to_come(a, b) {
            let item = self.items[i as usize];
            if item.end <= b && self.lowest[i as usize] == floor {
                // Equal items stand together and are one case.
                if previous != Some((item, self.pin(i))) {
                    count[(item.start - a) as usize..(item.end - a) as usize].iter_mut().for_each(|c| *c += 1);
                }
                previous = Some((item, self.pin(i)));
                fitting.push(i);
            }
        }
        // Whatever comes to rest above the floor inside the valley rests on something that is still to come.
        let mut least_top = u64::MAX;
        for k in a..b {
            for &i in &self.alive[k as usize] {
                if !self.placed[i as usize] {
                    least_top = least_top.min(self.lowest[i as usize] + self.items[i as usize].bytes);
                }
            }
        }
        for k in a..b {
            let list = &self.alive[k as usize];
            self.left = self.left.saturating_sub(VISITS_PER_STATE * list.len() as u64);
            if self.rest[k as usize] == 0 {
                continue;
            }
            // Where the next item could come to rest if none does at the floor.
            let places = list.iter().filter(|&&i| !self.placed[i as usize]).map(|&i| match self.lowest[i as usize] {
                at if at == floor => least_top,
                at => at,
            });
            let next = places.min().unwrap_or(u64::MAX);
            let gap = (next - floor <= self.slack(k)).then_some(next);
            let cases = u64::from(count[(k - a) as usize]) + u64::from(gap.is_some());
            if cases == 0 {
                self.conflicts[k as usize] += 1;
                return false;
            }
            let score = match cases {
                1 => (0, 0, 0),
                _ => (cases * 1_000_000 / (u64::from(self.conflicts[k as usize]) + 10), self.slack(k), floor),
            };
            if best.as_ref().is_none_or(|(lowest, _)| score < *lowest) {
                let here = |i: &u32| self.items[*i as usize].start <= k && k < self.items[*i as usize].end;
                let candidates = fitting.iter().copied().filter(here).collect();
                *best = Some((score, Place { clique: k, gap, candidates }));
            }
            if cases == 1 {
                break;
            }
        }
        true
    }

    /// Best first; equal items stay together.
    fn sort(&self, candidates: &mut [u32]) {
        candidates.sort_by_key(|&i| {
            let item = self.items[i as usize];
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
                        mix(item.bytes ^ u64::from(item.start) << 40 ^ u64::from(item.end) << 20, self.seed) as u64
                            % 64,
                    )
                }
            };
            (Reverse((key >> 6).saturating_mul(weight)), item.start, item.end, item.bytes, i)
        });
    }

    /// Places an item on the floor under it.
    fn put(&mut self, i: u32) {
        let item = self.items[i as usize];
        let at = self.floor[item.start as usize];
        self.offsets[i as usize] = at;
        self.placed[i as usize] = true;
        self.trail.push(Change::Placed(i));
        for k in item.start..item.end {
            self.rest[k as usize] -= item.bytes;
            self.raise(k, at + item.bytes);
        }
    }

    fn raise(&mut self, k: u32, floor: u64) {
        self.trail.push(Change::Floor(k, self.floor[k as usize]));
        self.floor[k as usize] = floor;
    }

    fn undo(&mut self, mark: usize) {
        while self.trail.len() > mark {
            match self.trail.pop() {
                Some(Change::Floor(k, floor)) => self.floor[k as usize] = floor,
                Some(Change::Placed(i)) => {
                    let item = self.items[i as usize];
                    self.placed[i as usize] = false;
                    for k in item.start..item.end {
                        self.rest[k as usize] += item.bytes;
                    }
                }
                None => return,
            }
        }
    }

    /// What decides whether `[from, to)` can be planned: who is still to come, and the floors under them.
    fn state(&self, from: u32, to: u32) -> u128 {
        let floors = (from..to).filter(|&k| self.rest[k as usize] > 0);
        let floors = floors.fold(0, |hash, k| hash ^ mix(u64::from(k) << 1 | 1, self.floor[k as usize]));
        self.to_come(from, to).fold(floors, |hash, i| hash ^ self.keys[i as usize])
    }
}

/// Fewer is sooner.
type Score = (u64, u64, u64);

struct Place {
    clique: u32,
    /// Where the floor goes if nothing comes here; `None` when that can't be.
    gap: Option<u64>,
    candidates: Vec<u32>,
}

/// 128 well-mixed bits of two words.
fn mix(a: u64, b: u64) -> u128 {
    let half = |seed: u64| {
        let mut x = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_add(seed).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
        x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        x ^ (x >> 32)
    };
    u128::from(half(1)) << 64 | u128::from(half(2))
}
