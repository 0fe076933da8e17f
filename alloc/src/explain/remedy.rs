//! Remedies: changes after which a problem fits, and lower bounds on their size.
//!
//! At every tick at which more bytes are alive than the capacity holds, changes must free the excess.
//! [`cover`](super::cover) computes the fewest changes that free it, and no remedy has fewer changes. A plan of the
//! changed problem shows whether these changes suffice. If they don't, the buffers that end above the capacity in that
//! plan are changed as well.

use std::cmp::Reverse;
use std::ops::Range;

use super::cover::{Candidate, fewest, fewest_bytes};
use crate::deadline::Deadline;
use crate::order::sort_by_key;
use crate::problem::gcd;
use crate::{Buffer, BufferId, Label, Lifetime, Options, Problem, Role, Solution, plan};

/// One change of a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The buffer is left out: its contents live elsewhere, or the buffer is not needed at all.
    LeaveOut(BufferId),
    /// The buffer is smaller by this number of bytes.
    Shrink(BufferId, u64),
    /// The buffer's bytes are free during these ticks: its contents are recomputed, or kept elsewhere meanwhile.
    Free(BufferId, Lifetime),
}

impl Change {
    /// The buffer that is changed.
    pub fn buffer(&self) -> BufferId {
        let (Self::LeaveOut(id) | Self::Shrink(id, _) | Self::Free(id, _)) = self;
        *id
    }
}

/// Changes of one kind after which the problem fits. A plan of the changed problem was checked against the capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// The changes, the largest first. The size of a shrinking change is the number of bytes taken off; the size of any
    /// other change is the size of its buffer.
    pub changes: Vec<Change>,
    /// Total bytes taken off if buffers shrink; otherwise the number of changes.
    pub size: u64,
    /// Proven lower bound on the size of any remedy of this kind.
    pub at_least: u64,
}

impl Remedy {
    fn new(problem: &Problem, mut changes: Vec<Change>, at_least: u64) -> Self {
        let bytes = |change: &Change| match change {
            Change::Shrink(_, bytes) => *bytes,
            Change::LeaveOut(id) | Change::Free(id, _) => problem.buffer(*id).bytes,
        };
        sort_by_key(&mut changes, |change| (Reverse(bytes(change)), change.buffer()));
        let size = |change: &Change| if let Change::Shrink(_, bytes) = change { *bytes } else { 1 };
        let size = changes.iter().map(size).fold(0, u64::saturating_add);
        Self { changes, size, at_least }
    }

    /// True if it is proven that no remedy is smaller.
    pub fn is_smallest(&self) -> bool {
        self.size == self.at_least
    }
}

/// Returns the problem after `changes`, or `None` if pins and groups don't allow the changes, or if the problem does not
/// have the buffers.
pub(super) fn apply(problem: &Problem, changes: &[Change]) -> Option<Problem> {
    let mut buffers = problem.buffers().to_vec();
    for change in changes {
        let b = buffers.get_mut(change.buffer().index())?;
        match change {
            Change::LeaveOut(_) => b.bytes = 0,
            Change::Shrink(_, bytes) => b.bytes = b.bytes.saturating_sub(*bytes),
            Change::Free(_, during) => {
                let after = Buffer { lifetime: during.end..b.lifetime.end, ..b.clone() };
                b.lifetime.end = during.start;
                buffers.push(after);
                continue;
            }
        }
        // A buffer without bytes keeps its id, but takes no space and needs no particular address.
        if b.bytes == 0 {
            *b = Buffer::new(b.lifetime.clone(), 0);
        }
    }
    problem.with_buffers(buffers).ok()
}

/// A search for remedies of one problem.
pub(super) struct RemedySearch<'p> {
    pub problem: &'p Problem,
    pub labels: &'p [Label],
    pub solution: &'p Solution,
    pub capacity: u64,
    pub threads: Option<usize>,
    /// Once this deadline has passed, no more remedies are tried. The remedies found by then are valid, but may not be
    /// the smallest.
    pub deadline: Deadline,
}

/// Work of one search for a cover.
const COVER_WORK: u64 = 60_000_000;

/// Work of planning a changed problem.
const PLAN_WORK: u64 = 20_000_000;

/// A set of at most this many buffers is pruned, and at most this many buffers are tried alone.
const TRIES: usize = 12;

impl RemedySearch<'_> {
    /// Searches for the fewest buffers such that all other buffers fit.
    pub fn leave_out(&self) -> Remedy {
        let out = |ids: &[BufferId]| -> Vec<Change> { ids.iter().map(|&id| Change::LeaveOut(id)).collect() };
        if self.deadline.has_passed() {
            let changes = self.applicable(out(&self.above(self.solution)), Change::LeaveOut);
            return Remedy::new(self.problem, changes, self.is_impossible().into());
        }
        let excess = Excess::new(self.problem, self.capacity, self.unit(), |b| Some(b.lifetime.clone()));
        let found = fewest(&excess.bytes, &excess.candidates, COVER_WORK, self.deadline);
        // Planning may have proven that no plan fits, even if no single tick exceeds the capacity.
        let at_least = found.at_least.unwrap_or(0).max(usize::from(self.is_impossible()));
        let mut best = self.above(self.solution);
        let mut ids: Vec<BufferId> = found.chosen.unwrap_or_default().iter().map(|&k| excess.ids[k]).collect();
        if ids.is_empty() {
            // If no tick holds too many bytes, gaps in the plan are the cause. Leaving out a single one of the buffers
            // that ended above the capacity may then be enough.
            let mut alone = best.clone();
            sort_by_key(&mut alone, |&id| Reverse(self.problem.buffer(id).bytes));
            let single = |id: &&BufferId| excess.bytes.is_empty() && self.solves(&out(&[**id])).is_ok();
            best = alone.iter().take(TRIES).find(single).map_or(best, |&id| vec![id]);
        } else if ids.len() < best.len() {
            match self.solves(&out(&ids)) {
                Ok(()) => best = ids,
                Err(Some(rest)) => {
                    ids.extend(self.above(&rest));
                    ids.sort_unstable();
                    ids.dedup();
                    best = if ids.len() < best.len() { ids } else { best };
                }
                Err(None) => {}
            }
        }
        self.prune(&mut best, at_least);
        Remedy::new(self.problem, self.applicable(out(&best), Change::LeaveOut), at_least as u64)
    }

    /// Returns the changes themselves if the problem allows them. Otherwise, the pins or alignments of a group don't
    /// suit what is left of it. Then `entirely` changes all members of such groups.
    fn applicable(&self, mut changes: Vec<Change>, entirely: impl Fn(BufferId) -> Change) -> Vec<Change> {
        if apply(self.problem, &changes).is_none() {
            for group in self.problem.groups() {
                let count = changes.len();
                changes.retain(|change| !group.members.contains(&change.buffer()));
                if changes.len() < count {
                    changes.extend(group.members.iter().map(|&id| entirely(id)));
                }
            }
        }
        changes
    }

    /// Removes buffers from `ids` as long as the problem still fits when only the remaining ones are left out. Sets of
    /// more than [`TRIES`] buffers are not changed.
    fn prune(&self, ids: &mut Vec<BufferId>, at_least: usize) {
        let mut k = 0;
        while k < ids.len() && ids.len() > at_least && ids.len() <= TRIES {
            let mut fewer = ids.clone();
            fewer.remove(k);
            let changes: Vec<Change> = fewer.iter().map(|&id| Change::LeaveOut(id)).collect();
            match self.solves(&changes) {
                Ok(()) => *ids = fewer,
                Err(_) => k += 1,
            }
        }
    }

    /// Searches for the fewest bytes that, taken off buffers, make the problem fit.
    pub fn shrink(&self) -> Remedy {
        let mut best = vec![0; self.problem.len()];
        self.cut(self.solution, &mut best);
        let mut at_least = self.solution.lower_bound.saturating_sub(self.capacity).max(self.is_impossible().into());
        let unit = self.unit();
        // The first pass reduces sizes by single bytes, which helps only with the topmost buffers. The second pass
        // reduces sizes by multiples of the unit.
        for unit in if unit > 1 { vec![1, unit] } else { vec![1] } {
            if self.deadline.has_passed() {
                break;
            }
            let excess =
                Excess::new(self.problem, self.capacity - self.capacity % unit, unit, |b| Some(b.lifetime.clone()));
            let Some(taken) = fewest_bytes(&excess.bytes, &excess.candidates) else { continue };
            if unit == 1 {
                at_least = at_least.max(taken.iter().copied().fold(0, u64::saturating_add));
            }
            let mut shrunk = vec![0; self.problem.len()];
            for ((id, c), taken) in excess.ids.iter().zip(&excess.candidates).zip(taken).filter(|(_, taken)| *taken > 0)
            {
                let left = c.bytes.saturating_sub(taken.checked_next_multiple_of(unit).unwrap_or(c.bytes));
                shrunk[id.index()] = self.problem.buffer(*id).bytes.saturating_sub(left);
            }
            match self.solves(&self.shrinking(&shrunk)) {
                Ok(()) => {}
                Err(Some(rest)) => self.cut(&rest, &mut shrunk),
                Err(None) => continue,
            }
            if total(&shrunk) < total(&best) {
                best = shrunk;
            }
        }
        let to_nothing = |id| Change::Shrink(id, self.problem.buffer(id).bytes);
        Remedy::new(self.problem, self.applicable(self.shrinking(&best), to_nothing), at_least)
    }

    fn shrinking(&self, by: &[u64]) -> Vec<Change> {
        let shrunk = self.problem.ids().zip(by).filter(|(_, bytes)| **bytes > 0);
        shrunk.map(|(id, &bytes)| Change::Shrink(id, bytes)).collect()
    }

    /// Shrinks buffers further by the bytes that lie above the capacity in `solution`, a plan of the shrunk buffers.
    fn cut(&self, solution: &Solution, shrunk: &mut [u64]) {
        for id in self.problem.ids() {
            let left = self.problem.buffer(id).bytes - shrunk[id.index()];
            // If there is no plan, any byte may lie above the capacity.
            let above = |&at: &u64| left.min(at.saturating_add(left).saturating_sub(self.capacity));
            shrunk[id.index()] += solution.offsets.get(id.index()).map_or(left, above);
        }
    }

    /// Searches for the fewest lifetimes to interrupt. With labels, only activations are interrupted. Members of groups
    /// and buffers that are to be kept apart are never interrupted. An interrupted buffer is still alive at its first
    /// and last tick, for its first writer and its last reader. Returns `None` if no such remedy was found.
    pub fn free(&self) -> Option<Remedy> {
        if self.deadline.has_passed() {
            return None;
        }
        let mut grouped = vec![false; self.problem.len()];
        self.problem.groups().iter().flat_map(|g| &g.members).for_each(|id| grouped[id.index()] = true);
        self.problem.pairs_apart().iter().for_each(|&(a, b)| {
            grouped[a.index()] = true;
            grouped[b.index()] = true;
        });
        let may_change = |id: BufferId| {
            let is_activation = |label: &Label| label.role == Role::Activation;
            !grouped[id.index()] && (self.labels.is_empty() || self.labels.get(id.index()).is_some_and(is_activation))
        };
        let inside =
            |b: &Buffer| (b.lifetime.end - b.lifetime.start > 2).then(|| b.lifetime.start + 1..b.lifetime.end - 1);
        let mut excess = Excess::new(self.problem, self.capacity, self.unit(), inside);
        excess.keep(may_change);
        let found = fewest(&excess.bytes, &excess.candidates, COVER_WORK, self.deadline);
        let (chosen, at_least) = (found.chosen?, found.at_least? as u64);
        let free = |ticks: &dyn Fn(usize) -> Lifetime| -> Vec<Change> {
            chosen.iter().map(|&k| Change::Free(excess.ids[k], ticks(k))).collect()
        };
        // Lifetimes are interrupted only during the ticks that are too full; if that doesn't suffice, between their
        // first and last tick.
        let full = free(&|k| {
            let span = excess.candidates[k].span.clone();
            excess.ticks[span.start].start..excess.ticks[span.end - 1].end
        });
        let longest = free(&|k| {
            let lifetime = &self.problem.buffer(excess.ids[k]).lifetime;
            lifetime.start + 1..lifetime.end - 1
        });
        let suffices = |changes: &Vec<Change>| !changes.is_empty() && self.solves(changes).is_ok();
        let changes = [full, longest].into_iter().find(suffices)?;
        Some(Remedy::new(self.problem, changes, at_least.max(u64::from(self.is_impossible()))))
    }

    /// True if planning has proven that no plan fits the capacity.
    pub(super) fn is_impossible(&self) -> bool {
        self.solution.bound() > self.capacity
    }

    /// Returns a common divisor of all offsets. The result is 1 if there are forbidden ranges, since a forbidden range
    /// may begin at any byte.
    pub(super) fn unit(&self) -> u64 {
        let alignments = self.problem.buffers().iter().filter(|b| b.bytes > 0).map(|b| b.alignment);
        if self.problem.forbidden().is_empty() { alignments.fold(0, gcd).max(1) } else { 1 }
    }

    /// Returns the bytes that buffers may have at one tick, with their sizes rounded up to the [`unit`](Self::unit).
    pub(super) fn room(&self) -> u128 {
        room(self.problem, self.capacity, self.unit())
    }

    /// Returns the buffers that end above the capacity in `solution`. If `solution` has no plan, returns all buffers
    /// that have bytes.
    fn above(&self, solution: &Solution) -> Vec<BufferId> {
        let bytes = |id: BufferId| self.problem.buffer(id).bytes;
        let end = |id: BufferId| solution.offsets.get(id.index()).map_or(u64::MAX, |at| at.saturating_add(bytes(id)));
        self.problem.ids().filter(|&id| bytes(id) > 0 && end(id) > self.capacity).collect()
    }

    /// Plans the changed problem. Returns `Ok` if the plan fits. If the plan doesn't fit, the error holds this plan. If
    /// there is no plan or the deadline has passed, the error holds `None`.
    fn solves(&self, changes: &[Change]) -> Result<(), Option<Solution>> {
        if self.deadline.has_passed() {
            return Err(None);
        }
        let changed = apply(self.problem, changes).ok_or(None)?;
        let options = Options {
            capacity: Some(self.capacity),
            work: PLAN_WORK,
            deadline: self.deadline.left(),
            threads: self.threads,
            warm_start: None,
        };
        let solution = plan(&changed, &options);
        match solution.offsets.len() == changed.len() {
            true if solution.height <= self.capacity => Ok(()),
            true => Err(Some(solution)),
            false => Err(None),
        }
    }
}

/// Returns the bytes below `capacity` that are not forbidden, rounded up to a multiple of `unit`, since the topmost buffer
/// may fill its last unit only in part.
fn room(problem: &Problem, capacity: u64, unit: u64) -> u128 {
    let forbidden = problem.forbidden().iter().map(|range| range.end.min(capacity).saturating_sub(range.start));
    u128::from(capacity.saturating_sub(forbidden.sum())).next_multiple_of(unit.into())
}

fn total(bytes: &[u64]) -> u128 {
    bytes.iter().map(|&bytes| u128::from(bytes)).sum()
}

/// Bytes alive beyond the capacity, and the buffers that can be changed.
struct Excess {
    /// Ranges of ticks that are too full, ascending.
    ticks: Vec<Lifetime>,
    /// Bytes that must be freed during each range of ticks.
    bytes: Vec<u64>,
    candidates: Vec<Candidate>,
    /// Buffer of each candidate.
    ids: Vec<BufferId>,
}

impl Excess {
    /// Computes the excess. All bytes are rounded to multiples of `unit`, since all offsets are such multiples. `helps`
    /// returns the ticks during which a buffer's bytes can be freed, or `None` if they can't be freed.
    fn new(problem: &Problem, capacity: u64, unit: u64, helps: impl Fn(&Buffer) -> Option<Lifetime>) -> Self {
        let room = room(problem, capacity, unit);
        let rounded = |b: &Buffer| b.bytes.checked_next_multiple_of(unit).unwrap_or(b.bytes);
        let alive = || problem.ids().filter(|&id| problem.buffer(id).bytes > 0);
        let mut points: Vec<u64> = Vec::new();
        for b in alive().map(|id| problem.buffer(id)) {
            points.extend([b.lifetime.start, b.lifetime.end]);
            points.extend(helps(b).into_iter().flat_map(|ticks| [ticks.start, ticks.end]));
        }
        points.sort_unstable();
        points.dedup();
        let at = |tick: u64| points.partition_point(|&p| p < tick);
        let mut live = vec![0i128; points.len()];
        for b in alive().map(|id| problem.buffer(id)) {
            live[at(b.lifetime.start)] += i128::from(rounded(b));
            live[at(b.lifetime.end)] -= i128::from(rounded(b));
        }
        for k in 1..live.len() {
            live[k] += live[k - 1];
        }
        let over = |k: usize| live[k].saturating_sub_unsigned(room).clamp(0, u64::MAX.into()) as u64;
        let full: Vec<usize> = (0..points.len()).filter(|&k| over(k) > 0).collect();
        let span = |ticks: Lifetime| -> Range<usize> {
            let first = |tick: u64| full.partition_point(|&k| points[k] < tick);
            first(ticks.start)..first(ticks.end)
        };
        let (mut candidates, mut ids) = (Vec::new(), Vec::new());
        for id in alive() {
            let b = problem.buffer(id);
            if let Some(span) = helps(b).map(span).filter(|span| !span.is_empty()) {
                candidates.push(Candidate { span, bytes: rounded(b) });
                ids.push(id);
            }
        }
        let bytes = full.iter().map(|&k| over(k)).collect();
        let ticks = full.iter().map(|&k| points[k]..points.get(k + 1).copied().unwrap_or(points[k])).collect();
        Self { ticks, bytes, candidates, ids }
    }

    /// Removes the candidates for which `may_change` is false.
    fn keep(&mut self, may_change: impl Fn(BufferId) -> bool) {
        let kept: Vec<bool> = self.ids.iter().map(|&id| may_change(id)).collect();
        let mut next = kept.iter();
        self.candidates.retain(|_| next.next().is_some_and(|&k| k));
        let mut next = kept.iter();
        self.ids.retain(|_| next.next().is_some_and(|&k| k));
    }
}
