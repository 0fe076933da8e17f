//! The least height of tiny problems, found by trying everything. Other results are checked against it.

use std::ops::Range;

use gapless_alloc::{Arrangement, BufferId, Gap, Group, Lifetime, Problem};

/// Returns the least height of any plan. For one height after another, it tries every offset of every buffer.
#[allow(dead_code, reason = "not every test asks for it")]
pub fn exhausted(problem: &Problem) -> u64 {
    least(problem, &[], u64::MAX, u64::MAX).expect("there are enough steps")
}

/// Returns the least height of any plan up to `most`, or `u64::MAX` if there is none. Returns `None` after `steps`
/// offsets.
pub fn least(problem: &Problem, gaps: &[Gap], most: u64, steps: u64) -> Option<u64> {
    let mut search = Search::new(problem, gaps, steps);
    for height in 0..=most {
        if search.place(height)? {
            return Some(height);
        }
    }
    Some(u64::MAX)
}

/// True if some plan ends at or below `height`.
#[allow(dead_code, reason = "not every test asks for it")]
pub fn fits(problem: &Problem, height: u64) -> bool {
    Search::new(problem, &[], u64::MAX).place(height) == Some(true)
}

/// Every offset of every buffer in turn, in the order of the buffers.
struct Search<'p> {
    problem: &'p Problem,
    /// The bytes that each buffer needs, counted from its offset, and the ticks at which it needs them.
    needs: Vec<Vec<(Lifetime, Range<u64>)>>,
    offsets: Vec<u64>,
    /// Number of offsets that may still be tried.
    steps: u64,
}

impl<'p> Search<'p> {
    fn new(problem: &'p Problem, gaps: &[Gap], steps: u64) -> Self {
        let needs = problem.ids().map(|id| {
            let b = problem.buffer(id);
            let gaps: Vec<&Gap> = gaps.iter().filter(|gap| gap.buffer == id).collect();
            let at = |tick: u64| match gaps.iter().find(|gap| gap.ticks.contains(&tick)) {
                Some(gap) => gap.window.clone().unwrap_or(0..0),
                None => 0..b.bytes,
            };
            let needs: Vec<_> = match gaps.is_empty() {
                true => vec![(b.lifetime.clone(), 0..b.bytes)],
                false => b.lifetime.clone().map(|tick| (tick..tick + 1, at(tick))).collect(),
            };
            needs.into_iter().filter(|(_, bytes)| !bytes.is_empty()).collect()
        });
        Self { problem, needs: needs.collect(), offsets: Vec::new(), steps }
    }

    /// Returns whether some plan ends at or below `height`, or `None` if the steps are spent.
    fn place(&mut self, height: u64) -> Option<bool> {
        let id = BufferId(self.offsets.len() as u32);
        let Some(b) = self.problem.buffers().get(id.index()) else { return Some(true) };
        let top = self.needs[id.index()].iter().map(|need| need.1.end).max().unwrap_or(0);
        // A buffer that needs no bytes has no part in the height, but a group may need it at some offset.
        let is_grouped = self.problem.groups().iter().any(|group| group.members.contains(&id));
        let last = match (top, is_grouped) {
            (0, true) => height + 64,
            (0, false) => 0,
            _ => height,
        };
        let candidates = b.offset.map_or(0..=last, |at| at..=at);
        for at in candidates.filter(|at| (top == 0 || at + top <= height) && at % b.alignment == 0) {
            self.steps = self.steps.checked_sub(1)?;
            self.offsets.push(at);
            let found = self.is_sound(id) && self.place(height)?;
            self.offsets.pop();
            if found {
                return Some(true);
            }
        }
        Some(false)
    }

    /// True if the last buffer violates nothing.
    fn is_sound(&self, id: BufferId) -> bool {
        let at = self.offsets[id.index()];
        let meets = |a: &Range<u64>, b: &Range<u64>| a.start.max(b.start) < a.end.min(b.end);
        let moved = |bytes: &Range<u64>, by: u64| bytes.start + by..bytes.end + by;
        let placed = || self.problem.ids().zip(&self.offsets).filter(|(other, _)| *other != id);
        let shares = |a: &(Lifetime, Range<u64>), b: &(Lifetime, Range<u64>), other_at: u64| {
            meets(&a.0, &b.0) && meets(&moved(&a.1, at), &moved(&b.1, other_at))
        };
        let needs = &self.needs[id.index()];
        let is_apart = self.problem.pairs_apart().iter().all(|&(a, b)| {
            let [a, b] = [a, b].map(|id| Some((self.offsets.get(id.index())?, self.problem.buffer(id).bytes)));
            a.zip(b).is_none_or(|((a, more), (b, bytes))| !meets(&(*a..a + more), &(*b..b + bytes)))
        });
        let mut forbidden = self.problem.forbidden().iter();
        is_apart
            && !forbidden.any(|range| needs.iter().any(|need| meets(&moved(&need.1, at), range)))
            && placed().all(|(other, &other_at)| {
                let others = &self.needs[other.index()];
                !needs.iter().any(|need| others.iter().any(|other| shares(need, other, other_at)))
            })
            && self.problem.groups().iter().all(|group| self.lies_together(group))
    }

    /// True if the placed members of a group are at their distances.
    fn lies_together(&self, group: &Group) -> bool {
        let bytes = |id: BufferId| self.problem.buffer(id).bytes;
        let at = |id: &BufferId| self.offsets.get(id.index()).copied();
        let placed = || group.members.iter().filter_map(|id| Some((at(id)?, at(id)? + bytes(*id))));
        match group.arrangement {
            Arrangement::AnyOrder => {
                let mut ranges: Vec<(u64, u64)> = placed().collect();
                ranges.sort_unstable();
                let all: u64 = group.members.iter().map(|id| bytes(*id)).sum();
                let span = ranges.iter().map(|range| range.1).max().unwrap_or(0) - ranges.first().map_or(0, |r| r.0);
                span <= all && ranges.len() < group.members.len()
                    || ranges.windows(2).all(|pair| pair[0].1 == pair[1].0)
            }
            Arrangement::Stacked => {
                let mut below = 0;
                let bases = group.members.iter().map(|id| {
                    below += bytes(*id);
                    Some((at(id)? + bytes(*id)).checked_sub(below))
                });
                let bases: Vec<Option<u64>> = bases.flatten().collect();
                bases.iter().all(|base| base.is_some() && *base == bases[0])
            }
            Arrangement::Given => {
                let bases = group.members.iter().zip(&group.distances);
                let bases: Vec<_> = bases.filter_map(|(id, distance)| Some(at(id)?.checked_sub(*distance))).collect();
                bases.iter().all(|base| base.is_some() && *base == bases[0])
            }
        }
    }
}
