//! STAlloc's groups: buffers that are born in one phase of a step and die in another, together.
//!
//! All members of a group are alive at once between the two phases, so its size is their sum and their places in it are
//! fixed beforehand. Two groups that overlap in time are fused, the smaller into what the larger leaves idle, where that
//! makes the product of their time-memory usages larger. A group that uses less than 0.7 of its rectangle is no group.

use std::collections::BTreeMap;

use gapless_alloc::Lifetime;

use super::skyline::Skyline;
use super::strips::Rectangle;

/// Least part of a group's rectangle that its members use.
const LEAST_USAGE: f64 = 0.7;

/// Buffers with fixed places relative to each other.
#[derive(Debug, Clone)]
pub(super) struct Group {
    /// Index of the rectangle and offset within the group.
    pub members: Vec<(usize, u64)>,
    pub lifetime: Lifetime,
    pub bytes: u64,
}

/// Groups by first and last phase, fused where it pays, and the rectangles in no group. `phases` are the ticks at which a
/// phase ends and the next begins.
pub(super) fn form(rectangles: &[Rectangle], phases: &[u64]) -> (Vec<Group>, Vec<usize>) {
    let phase = |tick: u64| phases.partition_point(|&boundary| boundary <= tick);
    let mut by_phases: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    let mut single = Vec::new();
    for (index, rectangle) in rectangles.iter().enumerate() {
        match (phase(rectangle.lifetime.start), phase(rectangle.lifetime.end - 1)) {
            (first, last) if first == last => single.push(index),
            ends => by_phases.entry(ends).or_default().push(index),
        }
    }
    let mut groups = Vec::new();
    for members in by_phases.into_values() {
        match Group::stack(rectangles, &members).filter(|group| group.usage(rectangles) >= LEAST_USAGE) {
            Some(group) => groups.push(group),
            None => single.extend(members),
        }
    }
    (fuse(rectangles, groups), single)
}

/// Tries every pair, the larger group as the base; each group is fused once at most.
fn fuse(rectangles: &[Rectangle], mut groups: Vec<Group>) -> Vec<Group> {
    groups.sort_by_key(|group| (std::cmp::Reverse(group.bytes), group.lifetime.start, group.lifetime.end));
    let mut fused = Vec::new();
    let mut used = vec![false; groups.len()];
    for small in 0..groups.len() {
        for base in 0..small {
            if used[small] || used[base] {
                continue;
            }
            if let Some((whole, rest)) = Group::fuse(rectangles, &groups[base], &groups[small]) {
                (used[small], used[base]) = (true, true);
                fused.push(whole);
                fused.extend(rest);
            }
        }
    }
    fused.extend(groups.into_iter().zip(used).filter(|(_, used)| !used).map(|(group, _)| group));
    fused
}

impl Group {
    /// Members one above the other; `None` when their sum is past 2^64.
    fn stack(rectangles: &[Rectangle], members: &[usize]) -> Option<Self> {
        let lifetime = span(rectangles, members.iter().copied());
        let (mut bytes, mut placed) = (0u64, Vec::with_capacity(members.len()));
        for &member in members {
            placed.push((member, bytes));
            bytes = bytes.checked_add(rectangles[member].bytes)?;
        }
        Some(Self { members: placed, lifetime, bytes })
    }

    /// The part of the rectangle around the group that its members use.
    fn usage(&self, rectangles: &[Rectangle]) -> f64 {
        let area = |lifetime: &Lifetime, bytes: u64| (lifetime.end - lifetime.start) as f64 * bytes as f64;
        let used: f64 = self.members.iter().map(|m| area(&rectangles[m.0].lifetime, rectangles[m.0].bytes)).sum();
        used / area(&self.lifetime, self.bytes).max(1.0)
    }

    /// `small` in what `base` leaves idle: the fused group and what did not fit, if the usages improve.
    fn fuse(rectangles: &[Rectangle], base: &Self, small: &Self) -> Option<(Self, Option<Self>)> {
        let (a, b) = (&base.lifetime, &small.lifetime);
        let overlap = a.start < b.end && b.start < a.end;
        let nested = (a.start <= b.start && b.end <= a.end) || (b.start <= a.start && a.end <= b.end);
        if !overlap || nested {
            return None;
        }
        // The base becomes a staircase: its members by distance of their free end, the longest at the bottom. Idle memory is
        // then in one piece, and each step of it takes the first member of the other group that does not reach back to it.
        let base_first = a.start < b.start;
        let mut steps: Vec<usize> = base.members.iter().map(|m| m.0).collect();
        let mut incoming: Vec<usize> = small.members.iter().map(|m| m.0).collect();
        if base_first {
            steps.sort_by_key(|&m| std::cmp::Reverse(rectangles[m].lifetime.end));
            incoming.sort_by_key(|&m| rectangles[m].lifetime.start);
        } else {
            steps.sort_by_key(|&m| rectangles[m].lifetime.start);
            incoming.sort_by_key(|&m| std::cmp::Reverse(rectangles[m].lifetime.end));
        }
        let mut skyline = Skyline::flat();
        let mut placed: Vec<(usize, u64)> = Vec::new();
        for &member in &steps {
            let Rectangle { lifetime, bytes } = &rectangles[member];
            placed.push((member, skyline.stack(lifetime, *bytes, base.bytes)?));
        }
        let (mut step, mut floor) = (0, 0);
        while !incoming.is_empty() {
            while step + 1 < steps.len() && placed[step + 1].1 <= floor {
                step += 1;
            }
            let of_step = &rectangles[steps[step]].lifetime;
            let found = incoming.iter().enumerate().find_map(|(at, &member)| {
                let Rectangle { lifetime, bytes } = &rectangles[member];
                let apart = if base_first { lifetime.start >= of_step.end } else { lifetime.end <= of_step.start };
                let fits = apart && floor.checked_add(*bytes).is_some_and(|top| top <= base.bytes);
                let offset = fits.then(|| skyline.stack(lifetime, *bytes, base.bytes)).flatten()?;
                Some((at, member, offset))
            });
            match found {
                Some((at, member, offset)) => {
                    incoming.remove(at);
                    placed.push((member, offset));
                    floor = offset + rectangles[member].bytes;
                }
                None if step + 1 == steps.len() => break,
                None => floor = placed[step + 1].1,
            }
        }
        let left = incoming;
        if left.len() == small.members.len() {
            return None;
        }
        let lifetime = span(rectangles, placed.iter().map(|m| m.0));
        let whole = Self { members: placed, lifetime, bytes: base.bytes };
        let rest = if left.is_empty() { None } else { Some(Self::stack(rectangles, &left)?) };
        let after = whole.usage(rectangles) * rest.as_ref().unwrap_or(&whole).usage(rectangles);
        (after > base.usage(rectangles) * small.usage(rectangles)).then_some((whole, rest))
    }
}

/// From the first birth to the last death.
fn span(rectangles: &[Rectangle], members: impl Iterator<Item = usize> + Clone) -> Lifetime {
    let start = members.clone().map(|m| rectangles[m].lifetime.start).min().unwrap_or(0);
    start..members.map(|m| rectangles[m].lifetime.end).max().unwrap_or(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rectangles(rows: &[(Lifetime, u64)]) -> Vec<Rectangle> {
        rows.iter().map(|(lifetime, bytes)| Rectangle { lifetime: lifetime.clone(), bytes: *bytes }).collect()
    }

    /// (members, lifetime, bytes) of each group, and the rest.
    fn check(rows: &[(Lifetime, u64)], phases: &[u64], expected: &[(&[usize], Lifetime, u64)], rest: &[usize]) {
        let (groups, single) = form(&rectangles(rows), phases);
        let row = |g: &Group| (g.members.iter().map(|m| m.0).collect(), g.lifetime.clone(), g.bytes);
        let found: Vec<(Vec<usize>, Lifetime, u64)> = groups.iter().map(row).collect();
        let expected: Vec<_> = expected.iter().map(|(m, l, b)| (m.to_vec(), l.clone(), *b)).collect();
        assert_eq!((found, single), (expected, rest.to_vec()), "{rows:?}");
    }

    #[test]
    fn groups_are_by_first_and_last_phase() {
        let rows = [(0..30, 8), (1..29, 4), (2..3, 100), (11..29, 2)];
        check(&rows, &[10, 20], &[(&[0, 1], 0..30, 12), (&[3], 11..29, 2)], &[2]);
        check(&rows, &[], &[], &[0, 1, 2, 3]);
        // Two thirds empty: no group.
        check(&[(0..11, 8), (9..30, 8)], &[10], &[], &[0, 1]);
    }

    #[test]
    fn groups_fuse_where_usage_improves() {
        // The larger dies in steps, the smaller is born in steps after it.
        let rows = [(0..30, 8), (0..22, 8), (23..50, 6), (31..50, 6)];
        check(&rows, &[10, 20, 40], &[(&[0, 1, 3, 2], 0..50, 16)], &[]);
        // Nested in time: never.
        check(&[(0..50, 8), (15..35, 6)], &[10, 20, 40], &[(&[0], 0..50, 8), (&[1], 15..35, 6)], &[]);
    }
}
