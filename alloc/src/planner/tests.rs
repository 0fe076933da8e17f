//! Helpers of the unit tests: small parts, and a check for plans.

use std::cmp::Reverse;

use super::decompose::parts::{Item, Part, Placement};

/// A part of `(start, cliques, bytes)`. Items end with the last clique at the latest.
pub(super) fn part(rows: &[(u32, u32, u64)], cliques: u32) -> Part {
    let item = |&(start, lasts, bytes): &(u32, u32, u64)| Item {
        start,
        end: (start + lasts).min(cliques),
        bytes,
        alignment: 1,
    };
    let mut items: Vec<Item> = rows.iter().map(item).collect();
    items.sort_by_key(|item| (item.start, Reverse(item.end)));
    Part::from_items(items, cliques)
}

/// True if no two items overlap, every alignment is kept and the height is the highest end. Every pair of items is
/// compared.
pub(super) fn is_plan(part: &Part, plan: &Placement) -> bool {
    let (items, at) = (&part.items, &plan.offsets);
    let end = |i: usize| at[i] + items[i].bytes;
    let meets = |i: usize, j: usize| items[i].meets(items[j].start..items[j].end) && at[i] < end(j) && at[j] < end(i);
    (0..items.len()).all(|i| at[i] % items[i].alignment == 0 && (0..i).all(|j| !meets(i, j)))
        && plan.height == (0..items.len()).map(end).max().unwrap_or(0)
}
