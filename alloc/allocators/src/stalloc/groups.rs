//! STAlloc's groups (`group` in the released code): buffers that are born in one phase of a step and die in another.
//!
//! All members of a group are alive together between the two phases. So the group's size is the sum of its members'
//! sizes, and the members' offsets in the group are fixed beforehand. The *usage* of a group is the used part of its
//! rectangle of time × memory. Two groups that overlap in time are fused if that increases the product of their usages:
//! members of the smaller group go where the larger one is idle. A group with a usage below 0.7 is dissolved.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gapless_alloc::Lifetime;

use super::Rectangle;
use super::layers::in_heap;
use super::skyline::Skyline;

/// Least usage of a group.
const LEAST_USAGE: f64 = 0.7;

/// A group is dissolved if it has fewer members than this and is smaller than a tenth of the largest group.
const FEW: usize = 5;

/// The rectangles of a group, by number, with their offsets in the group.
type Members = Vec<(usize, u64)>;

/// Buffers at fixed offsets relative to each other.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub members: Members,
    pub lifetime: Lifetime,
    pub bytes: u64,
}

/// Forms groups of the rectangles that live from one phase to another, without fusing them. `spans` has the iteration,
/// first phase and last phase of each rectangle. Also returns the rectangles that are in no group, in the order of the
/// released planner.
pub(super) fn form(rectangles: &[Rectangle], spans: &[(u64, usize, usize)]) -> (Vec<Group>, Vec<usize>) {
    let mut by_span: BTreeMap<(u64, usize, usize), Vec<usize>> = BTreeMap::new();
    let mut single = Vec::new();
    for (number, span) in spans.iter().enumerate() {
        if span.1 == span.2 {
            single.push(number);
        } else {
            by_span.entry(*span).or_default().push(number);
        }
    }
    let mut groups: Vec<Group> = by_span.into_values().map(|members| Group::of(rectangles, members)).collect();
    groups.sort_by_key(|group| group.lifetime.start);
    let largest = groups.iter().map(|group| group.bytes).max().unwrap_or(0);
    dissolve(&mut groups, &mut single, |g| (g.bytes as f64) < largest as f64 * 0.1 && g.members.len() < FEW);
    // A single buffer that is as large as a group becomes a group of its own. As in the released code, the buffer that
    // follows in the list is then skipped.
    let smallest = groups.iter().map(|group| group.bytes).min().unwrap_or(u64::MAX);
    let mut is_passed_over = false;
    single.retain(|&number| {
        let is_large = !is_passed_over && rectangles[number].bytes >= smallest;
        if is_large {
            groups.push(Group::of(rectangles, vec![number]));
        }
        is_passed_over = is_large;
        !is_large
    });
    dissolve(&mut groups, &mut single, |group| group.usage(rectangles) < LEAST_USAGE);
    (groups, single)
}

/// Dissolves the groups for which `is_none` is true. Their members become single buffers, in order of birth.
fn dissolve(groups: &mut Vec<Group>, single: &mut Vec<usize>, is_none: impl Fn(&Group) -> bool) {
    groups.retain(|group| {
        let gone = is_none(group);
        if gone {
            let mut members: Vec<usize> = group.members.iter().map(|member| member.0).collect();
            members.sort_unstable();
            single.extend(members);
        }
        !gone
    });
}

/// Numbers of the groups by size, the largest first. Groups of equal size are in the order of [`in_heap`].
pub(super) fn by_size(groups: &[Group]) -> Vec<Vec<usize>> {
    let mut by_size: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (number, group) in groups.iter().enumerate() {
        by_size.entry(group.bytes).or_default().push(number);
    }
    by_size.into_values().rev().map(|alike| in_heap(alike, |number| groups[number].lifetime.start)).collect()
}

/// Tries to fuse each group with all larger groups, called bases. A base is fused at most once. As in the released
/// code, a smaller group that was fused is tried with further bases in the same turn, so its members may end up in
/// several groups.
pub(super) fn fuse(rectangles: &[Rectangle], groups: Vec<Group>) -> Vec<Group> {
    let classes = by_size(&groups);
    let mut is_used = vec![false; groups.len()];
    let mut fused = Vec::new();
    for (at, class) in classes.iter().enumerate() {
        for &small in class {
            if is_used[small] {
                continue;
            }
            for &base in classes[..at].iter().flatten() {
                let pair = (!is_used[base]).then(|| Group::fuse(rectangles, &groups[base], &groups[small])).flatten();
                if let Some((whole, rest)) = pair {
                    (is_used[small], is_used[base]) = (true, true);
                    fused.push(whole);
                    fused.extend(rest);
                }
            }
        }
    }
    // The remaining groups follow size by size. The sizes are in the order in which they first occur.
    let mut classes = classes;
    classes.sort_by_key(|class| class.iter().min().copied());
    fused.extend(classes.into_iter().flatten().filter(|&number| !is_used[number]).map(|number| groups[number].clone()));
    fused
}

impl Group {
    /// Stacks the members, the longest-lived at the bottom.
    fn of(rectangles: &[Rectangle], mut members: Vec<usize>) -> Self {
        let lifetime = span(rectangles, members.iter().copied());
        let length = |number: usize| rectangles[number].lifetime.end - rectangles[number].lifetime.start;
        members.sort_by_key(|&number| Reverse(length(number)));
        let mut bytes = 0;
        let mut place = |number: usize| {
            bytes += rectangles[number].bytes;
            (number, bytes - rectangles[number].bytes)
        };
        let members = members.into_iter().map(&mut place).collect();
        Self { members, lifetime, bytes }
    }

    /// Returns the part of the group's rectangle that its members use.
    fn usage(&self, rectangles: &[Rectangle]) -> f64 {
        let area = |lifetime: &Lifetime, bytes: u64| u128::from(lifetime.end - lifetime.start) * u128::from(bytes);
        let used: u128 = self.members.iter().map(|m| area(&rectangles[m.0].lifetime, rectangles[m.0].bytes)).sum();
        used as f64 / area(&self.lifetime, self.bytes).max(1) as f64
    }

    /// Fuses `small` into the idle space of `base`. Returns the fused group, and a group of the members that did not
    /// fit. Returns `None` if that would not improve the usages.
    fn fuse(rectangles: &[Rectangle], base: &Self, small: &Self) -> Option<(Self, Option<Self>)> {
        let (a, b) = (&base.lifetime, &small.lifetime);
        let base_first = a.start <= b.start;
        let (former, latter) = if base_first { (a, b) } else { (b, a) };
        if former.end <= latter.start || former.end > latter.end {
            return None; // disjoint or nested
        }
        let (placed, left) = fill(rectangles, base, small, base_first)?;
        let lifetime = span(rectangles, placed.iter().map(|m| m.0));
        let whole = Self { members: placed, lifetime, bytes: base.bytes };
        let rest = (!left.is_empty()).then(|| Self::of(rectangles, left));
        let after = whole.usage(rectangles) * rest.as_ref().unwrap_or(&whole).usage(rectangles);
        (after > base.usage(rectangles) * small.usage(rectangles)).then_some((whole, rest))
    }
}

/// Returns the members of both groups with their offsets, and the members of the smaller group that found no place.
///
/// The base becomes a staircase: the more a member's lifetime extends towards the other group, the lower the member
/// lies. So the idle space is in one piece. Each step of the staircase takes the first member of the other group that
/// does not overlap it in time.
fn fill(rectangles: &[Rectangle], base: &Group, small: &Group, base_first: bool) -> Option<(Members, Vec<usize>)> {
    let start = |number: usize| rectangles[number].lifetime.start;
    let end = |number: usize| rectangles[number].lifetime.end;
    // Members are sorted by birth first, so that members with equal ends stay in that order.
    let by_birth = |group: &Group| {
        let mut members: Vec<usize> = group.members.iter().map(|m| m.0).collect();
        members.sort_by_key(|&m| start(m));
        members
    };
    let (mut steps, mut left) = (by_birth(base), by_birth(small));
    (if base_first { &mut steps } else { &mut left }).sort_by_key(|&m| Reverse(end(m)));
    let mut skyline = Skyline::flat(0);
    let mut placed = Members::new();
    for &member in &steps {
        let Rectangle { lifetime, bytes } = &rectangles[member];
        placed.push((member, skyline.stack(lifetime, *bytes, base.bytes)?));
    }
    let (mut step, mut floor) = (0, 0);
    while !left.is_empty() {
        while step + 1 < steps.len() && placed[step + 1].1 <= floor {
            step += 1;
        }
        let found = left.iter().enumerate().find_map(|(at, &member)| {
            let bytes = rectangles[member].bytes;
            let fits = match base_first {
                true => start(member) >= end(steps[step]) && floor + bytes <= base.bytes,
                false => end(member) <= start(steps[step]),
            };
            let lifetime = &rectangles[member].lifetime;
            Some((at, fits.then(|| skyline.stack(lifetime, bytes, base.bytes)).flatten()?))
        });
        match found {
            Some((at, offset)) => {
                let member = left.remove(at);
                placed.push((member, offset));
                floor = offset + rectangles[member].bytes;
                // The search starts again from the first step, since the floor may be lower than before.
                step = 0;
            }
            None if step + 1 == steps.len() => break,
            None => floor = placed[step + 1].1,
        }
    }
    Some((placed, left))
}

/// Ticks from the first birth to the last death.
fn span(rectangles: &[Rectangle], members: impl Iterator<Item = usize> + Clone) -> Lifetime {
    let start = members.clone().map(|m| rectangles[m].lifetime.start).min().unwrap_or(0);
    start..members.map(|m| rectangles[m].lifetime.end).max().unwrap_or(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the members and bytes of each group, fused or not, and the remaining rectangles.
    fn check(rows: &[(Lifetime, u64)], phases: &[u64], is_fused: bool, expected: &[(&[usize], u64)], rest: &[usize]) {
        let rectangles: Vec<Rectangle> =
            rows.iter().map(|(lifetime, bytes)| Rectangle { lifetime: lifetime.clone(), bytes: *bytes }).collect();
        let phase = |tick: u64| phases.partition_point(|&boundary| boundary <= tick);
        let spans: Vec<_> = rows.iter().map(|(life, _)| (0, phase(life.start), phase(life.end - 1))).collect();
        let (mut groups, single) = form(&rectangles, &spans);
        if is_fused {
            groups = fuse(&rectangles, groups);
        }
        let members = |group: &Group| group.members.iter().map(|m| m.0).collect::<Vec<_>>();
        let found: Vec<(Vec<usize>, u64)> = groups.iter().map(|group| (members(group), group.bytes)).collect();
        let expected: Vec<_> = expected.iter().map(|(members, bytes)| (members.to_vec(), *bytes)).collect();
        assert_eq!((found, single), (expected, rest.to_vec()), "{rows:?}");
    }

    #[test]
    fn groups_are_by_first_and_last_phase() {
        let rows = [(0..30, 8), (1..29, 4), (2..3, 1), (11..29, 2)];
        check(&rows, &[10, 20], false, &[(&[0, 1], 12), (&[3], 2)], &[2]);
        check(&rows, &[], false, &[], &[0, 1, 2, 3]);
        // Two thirds of the rectangle are idle, so it does not become a group.
        check(&[(0..11, 8), (9..30, 8)], &[10], false, &[], &[0, 1]);
        // The second group has few members and less than a tenth of the largest group's bytes, so it is dissolved.
        check(&[(0..30, 100), (1..15, 9)], &[10, 20], false, &[(&[0], 100)], &[1]);
        // Every second single buffer that is as large as a group becomes a group.
        let rows = [(0..30, 4), (1..2, 5), (3..4, 5), (5..6, 5)];
        check(&rows, &[10], false, &[(&[0], 4), (&[1], 5), (&[3], 5)], &[2]);
    }

    #[test]
    fn groups_fuse_where_usage_improves() {
        // The members of the larger group die one after the other. The members of the smaller group are then born one
        // after the other.
        let rows = [(0..30, 8), (0..22, 8), (23..50, 6), (31..50, 6)];
        check(&rows, &[10, 20, 40], true, &[(&[0, 1, 3, 2], 16)], &[]);
        // Groups that are nested in time are never fused.
        check(&[(0..50, 8), (15..35, 6)], &[10, 20, 40], true, &[(&[0], 8), (&[1], 6)], &[]);
    }
}
