//! What judges of attempts share: small parts, and whether what was found is a plan.

use std::cmp::Reverse;

use gapless_testing::prelude::*;

use super::meter::Meter;
use super::part::{Item, Part};

/// A part of `(start, cliques, bytes)`, cut off where there are no more cliques.
pub(super) fn part(rows: &[(u32, u32, u64)], cliques: u32) -> Part {
    let item = |&(start, lasts, bytes): &(u32, u32, u64)| Item {
        start,
        end: (start + lasts).min(cliques),
        bytes,
        alignment: 1,
    };
    let mut items: Vec<Item> = rows.iter().map(item).collect();
    items.sort_by_key(|item| (item.start, Reverse(item.end)));
    Part { items, cliques, ..Part::default() }
}

/// The bytes alive in each clique of a part, its fullest cliques, and how full these are.
pub(super) fn peaks(part: &Part) -> (Vec<u64>, Vec<u32>, u64) {
    let live = part.live();
    let most = live.iter().copied().max().unwrap_or(0);
    let peaks = (0..part.cliques).filter(|&k| live[k as usize] == most).collect();
    (live, peaks, most)
}

/// What an attempt finds for some work is a plan below the ceiling, against every pair of items; and its second run is the first.
pub(super) fn judge_attempt(
    part: &Part,
    ceiling: u64,
    work: u64,
    run: impl Fn(&mut Meter) -> Option<Vec<u64>>,
) -> Result<(), TestCaseError> {
    let run = || run(&mut Meter { work, ..Meter::default() });
    let found = run();
    prop_assert_eq!(&found, &run());
    let Some(offsets) = found else { return Ok(()) };
    let span = |i: usize| (offsets[i], offsets[i] + part.items[i].bytes);
    for (i, item) in part.items.iter().enumerate() {
        prop_assert!(span(i).1 <= ceiling);
        for j in (0..i).filter(|&j| item.meets(part.items[j].start..part.items[j].end)) {
            prop_assert!(span(i).1 <= span(j).0 || span(j).1 <= span(i).0);
        }
    }
    Ok(())
}
