//! The problem in the form that the searches work on.
//!
//! In: a checked [`Problem`]. Out: [`Part`]s that can be planned separately and whose plans add up to a plan of the
//! whole. Never: a decision that could cost height. All four steps are exact:
//!
//! 1. Sizes are rounded up to the greatest common divisor of the alignments, since no buffer can start between two
//!    multiples of this divisor. A forbidden range can, so a problem with forbidden ranges keeps its sizes. If an
//!    alignment divides all sizes and pins, every stack of buffers satisfies this alignment, and it is dropped.
//! 2. Each group becomes one item, as if all its members lived as long as the group. If members live differently,
//!    `features/groups.rs` plans the group.
//! 3. Ticks become *cliques*: the maximal sets of buffers alive together, numbered in order of time. Two buffers
//!    overlap in time exactly when they share a clique. Between two cliques, the order of births and deaths doesn't
//!    matter.
//! 4. The problem is split wherever no item is alive on both sides of a clique boundary. Items alive throughout a part
//!    go to its bottom, and the rest of the part may be split again.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;

use rayon::prelude::*;

use super::timeline::Buckets;
use crate::order::sort_by_key;
use crate::planner::lower_bound::fractional_bound;
pub(crate) use crate::problem::gcd;
use crate::{BufferId, Lifetime, Problem};

/// One rectangle to place, in a part's own cliques `[start, end)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    pub start: u32,
    pub end: u32,
    pub bytes: u64,
    /// The alignment, or 1 if every stack of items satisfies the alignment anyway.
    pub alignment: u64,
}

impl Item {
    pub fn cliques(self) -> u32 {
        self.end - self.start
    }

    /// Whether the item is alive in any of these cliques.
    pub fn meets(self, cliques: Range<u32>) -> bool {
        self.start < cliques.end && cliques.start < self.end
    }
}

/// Items that share no clique with the items of any other part.
#[derive(Debug, Clone, Default)]
pub(crate) struct Part {
    /// Sorted by start; of items that start together, the longest-lived comes first.
    pub items: Vec<Item>,
    /// For each item, its index in [`Whole::sources`].
    pub sources: Vec<u32>,
    /// Items that must stay where they are: `(item, offset)`, offsets counted from the part's base.
    pub pins: Vec<(u32, u64)>,
    /// Pinned items that stand for forbidden ranges, ascending. They don't count towards heights.
    pub forbidden: Vec<u32>,
    /// Number of cliques.
    pub cliques: u32,
    /// Bytes below the part, taken by items that are alive throughout the part.
    pub base: u64,
    /// Lower bound of the part's height, see [`Part::height_bound`].
    pub bound: u64,
    /// The height of every plan is a multiple of this.
    pub grain: u64,
}

/// A plan of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    pub height: u64,
    /// Offset of each item.
    pub offsets: Vec<u64>,
}

/// The origin of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A buffer, by index.
    Buffer(u32),
    /// A group, by index.
    Group(u32),
    /// A forbidden range.
    Forbidden,
}

/// The parts of a problem.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub parts: Vec<Part>,
    pub sources: Vec<Source>,
    /// `(source, offset)` of the items that were moved to the bottom of their part.
    pub bottom: Vec<(u32, u64)>,
    /// The most bytes that rounding added to one item. A bound computed from rounded sizes is too high by at most this.
    pub padding: u64,
}

/// Most times that a part is split again after the items alive throughout the part were moved to its bottom. Deeper
/// nesting is left to the searches.
const DEPTH: u32 = 8;

/// A part is large if it has more items than this.
const LARGE: usize = 80_000;

impl Whole {
    /// Splits a problem. If `rounded`, sizes are rounded up as far as the alignments allow. That simplifies the items,
    /// but a plan may be too high by the bytes added to its topmost item.
    pub fn new(problem: &Problem, rounded: bool) -> Self {
        let Table { lifetimes, mut items, sources, pins, padding } = table(problem, rounded);
        let mut whole = Self { parts: Vec::new(), sources, bottom: Vec::new(), padding };
        let cliques = in_cliques(&lifetimes, &mut items);
        let mut pin_of = vec![None; if pins.is_empty() { 0 } else { items.len() }];
        for (item, offset) in pins {
            pin_of[item as usize] = Some(offset);
        }
        let pin = |i: u32| pin_of.get(i as usize).copied().flatten();
        let mut stack = vec![(by_start(&items, cliques), 0, 0)];
        while let Some((members, base, depth)) = stack.pop() {
            for mut members in split(&items, members) {
                let Some(&first) = members.first() else { continue };
                let from = items[first as usize].start;
                let to = members.iter().map(|&i| items[i as usize].end).max().unwrap_or(from);
                let spans = |i: u32| items[i as usize].start == from && items[i as usize].end == to;
                let loose = |i: u32| items[i as usize].alignment == 1 && pin(i).is_none();
                // Among the items that start first, the longest-lived comes first in the list. So if this item doesn't
                // span the part, no item does.
                if depth == DEPTH || !spans(first) || !members.iter().all(|&i| loose(i)) {
                    whole.parts.push(Part::new(&items, &whole.sources, members, pin, from..to, base));
                    continue;
                }
                let mut above = base;
                members.retain(|&i| {
                    if spans(i) {
                        whole.bottom.push((i, above));
                        above += items[i as usize].bytes;
                    }
                    !spans(i)
                });
                stack.push((members, above, depth + 1));
            }
        }
        whole
    }
}

impl Part {
    fn new(
        all: &[Item],
        kinds: &[Source],
        sources: Vec<u32>,
        pin: impl Fn(u32) -> Option<u64>,
        cliques: Range<u32>,
        base: u64,
    ) -> Self {
        let shifted = |&i: &u32| {
            let item = all[i as usize];
            Item { start: item.start - cliques.start, end: item.end - cliques.start, ..item }
        };
        let items = sources.iter().map(shifted).collect();
        // If a part holds pins, no items were moved to the part's bottom, so the base is 0.
        let pins: Vec<(u32, u64)> = (0..).zip(&sources).filter_map(|(k, &i)| Some((k, pin(i)?))).collect();
        let is_forbidden = |k: &u32| kinds[sources[*k as usize] as usize] == Source::Forbidden;
        let forbidden = pins.iter().map(|pin| pin.0).filter(is_forbidden).collect();
        let cliques = cliques.end - cliques.start;
        Self { items, sources, pins, forbidden, cliques, base, ..Self::default() }.measured()
    }

    /// A part of these items, without pins.
    pub fn from_items(items: Vec<Item>, cliques: u32) -> Self {
        Self { items, cliques, ..Self::default() }.measured()
    }

    /// Computes the bound and the grain.
    fn measured(self) -> Self {
        let sizes = self.items.iter().map(|item| gcd(item.bytes, if item.alignment == 1 { 0 } else { item.alignment }));
        let grain = sizes.chain(self.pins.iter().map(|pin| pin.1)).fold(0, |grain, size| gcd(size, grain)).max(1);
        Self { bound: self.height_bound(), grain, ..self }
    }

    /// Bytes alive in each clique.
    pub fn live(&self) -> Vec<u64> {
        // Differences may wrap around. The running sums undo the wrapping, since no sum exceeds the live bytes.
        let mut live = vec![0u64; self.cliques as usize + 1];
        let mut add = |item: Item, bytes: u64| {
            live[item.start as usize] = live[item.start as usize].wrapping_add(bytes);
            live[item.end as usize] = live[item.end as usize].wrapping_sub(bytes);
        };
        self.items.iter().for_each(|&item| add(item, item.bytes));
        for &i in &self.forbidden {
            let item = self.items[i as usize];
            add(item, item.bytes.wrapping_neg());
        }
        for k in 1..live.len() {
            live[k] = live[k].wrapping_add(live[k - 1]);
        }
        live.pop();
        live
    }

    /// Returns the largest of three bounds: the most bytes alive in a clique, the highest end of a pin, and the
    /// [`fractional_bound`] of the items between the pins.
    fn height_bound(&self) -> u64 {
        let live = self.live();
        let bound = live.iter().copied().max().unwrap_or(0);
        if self.pins.is_empty() {
            return bound;
        }
        let end = |&(i, at): &(u32, u64)| if self.is_forbidden(i) { 0 } else { at + self.items[i as usize].bytes };
        self.pins.iter().map(end).fold(bound.max(fractional_bound(self, &live)), u64::max)
    }

    /// True if an item is a forbidden range.
    pub fn is_forbidden(&self, item: u32) -> bool {
        // The list is in the order of the items.
        !self.forbidden.is_empty() && self.forbidden.binary_search(&item).is_ok()
    }

    /// Returns the plan with these offsets. The plan's height is one past the highest byte, not counting forbidden
    /// ranges.
    pub fn placement(&self, offsets: Vec<u64>) -> Placement {
        let ends = (0..).zip(self.items.iter().zip(&offsets)).filter(|(i, _)| !self.is_forbidden(*i));
        let height = ends.map(|(_, (item, at))| at + item.bytes).max().unwrap_or(0);
        Placement { height, offsets }
    }

    /// True if the items of a clique form a plan in any order when stacked: nothing is pinned, and no alignment leaves
    /// gaps.
    pub fn is_free(&self) -> bool {
        self.pins.is_empty() && self.items.iter().all(|item| item.alignment == 1)
    }

    /// True if steps that look at all items alive at the same time as an item would take too long.
    pub fn is_large(&self) -> bool {
        self.items.len() > LARGE
    }

    /// The cliques with the most bytes alive, ascending.
    pub fn fullest_cliques(&self) -> Vec<u32> {
        let live = self.live();
        let most = live.iter().copied().max();
        (0..self.cliques).filter(|&k| Some(live[k as usize]) == most).collect()
    }

    /// The part with forbidden ranges cut off at `capacity` and turned into ordinary pins.
    pub fn below(&self, capacity: u64) -> Self {
        let mut part = self.clone();
        for &(i, at) in self.pins.iter().filter(|pin| self.is_forbidden(pin.0)) {
            let item = &mut part.items[i as usize];
            item.bytes = item.bytes.min(capacity.saturating_sub(at));
        }
        part.pins.retain(|&(i, _)| part.items[i as usize].bytes > 0);
        part.forbidden.clear();
        part
    }
}

/// Items with lifetimes in ticks, and their origins.
#[derive(Default)]
struct Table {
    /// `[start, end)` in ticks.
    lifetimes: Vec<(u64, u64)>,
    items: Vec<Item>,
    sources: Vec<Source>,
    /// `(item, offset)`.
    pins: Vec<(u32, u64)>,
    padding: u64,
}

impl Table {
    fn push(&mut self, source: Source, lifetime: &Lifetime, bytes: u64, alignment: u64, pin: Option<u64>) {
        if let Some(offset) = pin {
            self.pins.push((self.items.len() as u32, offset));
        }
        self.lifetimes.push((lifetime.start, lifetime.end));
        self.items.push(Item { start: 0, end: 0, bytes, alignment });
        self.sources.push(source);
    }
}

/// Steps 1 and 2 of this module's list. Buffers of zero bytes are left out.
fn table(problem: &Problem, rounded: bool) -> Table {
    let count = problem.len() + problem.groups().len();
    let (lifetimes, items, sources) = (Vec::with_capacity(count), Vec::with_capacity(count), Vec::with_capacity(count));
    let mut table = Table { lifetimes, items, sources, ..Table::default() };
    let grouped: HashSet<BufferId> = problem.groups().iter().flat_map(|g| &g.members).copied().collect();
    for id in problem.ids() {
        let b = problem.buffer(id);
        if b.bytes > 0 && (grouped.is_empty() || !grouped.contains(&id)) {
            table.push(Source::Buffer(id.0), &b.lifetime, b.bytes, b.alignment, b.offset);
        }
    }
    for (index, g) in problem.groups().iter().enumerate().filter(|(_, g)| g.bytes > 0) {
        // An item has no phase. So the bytes from a multiple of the alignment up to the group are part of its item.
        let (bytes, alignment) = match g.offset {
            None => (g.phase + g.bytes, g.alignment),
            Some(_) => (g.bytes, gcd(g.alignment, g.phase)),
        };
        table.push(Source::Group(index as u32), &g.lifetime, bytes, alignment, g.offset);
    }
    let common = table.items.iter().fold(0, |unit, item| gcd(unit, item.alignment));
    // A forbidden range may begin anywhere, and a buffer that ends right below it must keep its size.
    let unit = if rounded && problem.forbidden().is_empty() { common } else { 1 };
    let mut grain = table.pins.iter().fold(0, |grain, &(_, offset)| gcd(grain, offset));
    for item in &mut table.items {
        // Rounding can only fail for a size within one unit of 2^64. An item of such a size keeps it.
        let rounded = item.bytes.checked_next_multiple_of(unit).unwrap_or(item.bytes);
        table.padding = table.padding.max(rounded - item.bytes);
        item.bytes = rounded;
        grain = gcd(item.bytes, grain);
    }
    let whole_time = 0..problem.end();
    for range in problem.forbidden().iter().filter(|_| !problem.is_empty()) {
        table.push(Source::Forbidden, &whole_time, range.end - range.start, 1, Some(range.start));
        grain = gcd(gcd(grain, range.start), range.end);
    }
    // All offsets are multiples of the grain once it includes every alignment that can push items off the grain.
    while let Some(item) = table.items.iter().find(|item| grain % item.alignment != 0 && item.alignment % grain != 0) {
        grain = gcd(grain, item.alignment);
    }
    for item in &mut table.items {
        if grain % item.alignment == 0 {
            item.alignment = 1;
        }
    }
    table
}

/// Step 3 of this module's list: sets the `start` and `end` of the items and returns the number of cliques.
pub(crate) fn in_cliques(lifetimes: &[(u64, u64)], items: &mut [Item]) -> u32 {
    let last = lifetimes.iter().map(|l| l.1).max().unwrap_or(0);
    // Each tick is replaced by a small number: the tick itself if all ticks are small, otherwise its rank among the
    // ticks.
    let ticks: Option<Vec<u64>> = (last > 4 * lifetimes.len() as u64 + 1024).then(|| {
        let mut ticks: Vec<u64> = lifetimes.iter().flat_map(|l| [l.0, l.1]).collect();
        ticks.par_sort_unstable();
        ticks.dedup();
        ticks
    });
    let rank = |tick: u64| match &ticks {
        Some(ticks) => ticks.partition_point(|&t| t < tick),
        None => tick as usize,
    };
    let count = ticks.as_ref().map_or_else(|| last as usize + 1, Vec::len);
    items.par_iter_mut().zip(lifetimes).for_each(|(item, lifetime)| {
        (item.start, item.end) = (rank(lifetime.0) as u32, rank(lifetime.1) as u32);
    });
    // A clique is complete when a death comes after a birth.
    let (mut births, mut deaths) = (vec![false; count], vec![false; count]);
    for item in items.iter() {
        births[item.start as usize] = true;
        deaths[item.end as usize] = true;
    }
    let (mut complete, mut open) = (0u32, false);
    let clique_of: Vec<u32> = births
        .iter()
        .zip(&deaths)
        .map(|(&birth, &death)| {
            if death && open {
                complete += 1;
                open = false;
            }
            open |= birth;
            complete
        })
        .collect();
    for item in items.iter_mut() {
        (item.start, item.end) = (clique_of[item.start as usize], clique_of[item.end as usize]);
    }
    complete
}

/// Item indices sorted by start, the longest first.
fn by_start(items: &[Item], cliques: u32) -> Vec<u32> {
    let mut order = Buckets::new(cliques + 1, items.iter().map(|item| item.start));
    for range in order.starts.windows(2) {
        sort_by_key(&mut order.entries[range[0] as usize..range[1] as usize], |&i| (Reverse(items[i as usize].end), i));
    }
    order.entries
}

/// Cuts `members` (sorted by start) wherever no item is alive on both sides of the cut.
fn split(items: &[Item], members: Vec<u32>) -> Vec<Vec<u32>> {
    let (mut segments, mut from, mut reach) = (Vec::new(), 0, 0);
    for (position, &i) in members.iter().enumerate() {
        let item = items[i as usize];
        if position > from && item.start >= reach {
            segments.push(members[from..position].to_vec());
            from = position;
        }
        reach = reach.max(item.end);
    }
    if from == 0 {
        return vec![members];
    }
    segments.push(members[from..].to_vec());
    segments
}
