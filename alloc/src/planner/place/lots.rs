//! The initial stack of a sweep. The order of its items is not decided yet.
//!
//! Any order of the items alive at the first clique gives a stack without gaps, and no rule predicts which order leads
//! to a plan. So the order is decided later: the stack is one undecided range. The offset of an item in that range is
//! fixed only when a later birth depends on it. When an item of the stack dies, its bytes become a free *lot*:
//!
//! - A new item of the same size takes the lot over, without fixing its offset.
//! - For an item of another size, the lot is moved to one end of the undecided range, where it extends a free range.

use std::cmp::Reverse;

use super::leap::PlacedItem;
use crate::planner::mix::mix;

/// Value of [`PlacedItem::dies_before`] for the undecided range.
pub(super) const UNDECIDED: u32 = u32::MAX;

/// The place of an item: an offset, or the bytes of an item of the stack, whose offset may still be undecided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Offset(u64),
    Of(u32),
}

/// The bytes of one item of the stack. Later items of the same size may take them over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lot {
    /// The item of the stack that these bytes belonged to first.
    root: u32,
    bytes: u64,
    /// The clique before which the current or last owner dies.
    dies_before: u32,
}

/// The lots whose offsets are not decided yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Lots(Vec<Lot>);

/// A candidate place for a birth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub rank: u64,
    pub from: u64,
    /// The lot that the birth takes over, if any.
    pub reused_lot: Option<usize>,
    /// Lots whose offsets this place decides, with those offsets. The first lot lies at an end of the undecided range.
    pub decided: [Option<(usize, u64)>; 2],
}

impl Lots {
    /// Creates the lots of a stack from `(item, bytes, clique before which the item dies)`.
    pub fn new(stack: impl Iterator<Item = (u32, u64, u32)>) -> Self {
        Self(stack.map(|(root, bytes, dies_before)| Lot { root, bytes, dies_before }).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn root(&self, lot: usize) -> u32 {
        self.0[lot].root
    }

    /// The items of the stack whose lots are still undecided, with their bytes.
    pub fn rest(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.0.iter().map(|lot| (lot.root, lot.bytes))
    }

    /// Returns a hash of the lots at a clique. The hash doesn't depend on the order of the lots, and treats all dead
    /// lots of one size alike. `seen` maps the clique before which a lot's owner dies to a coarser time.
    pub fn key(&self, clique: u32, seen: impl Fn(u32) -> u32) -> u64 {
        self.0.iter().fold(0, |key: u64, lot| {
            let leaves = if lot.dies_before <= clique { 0 } else { 1 + u64::from(seen(lot.dies_before)) };
            key.wrapping_add(mix(lot.bytes, leaves))
        })
    }

    /// Bytes of the lots that are free at a clique.
    pub fn freed(&self, clique: u32) -> u64 {
        self.0.iter().filter(|lot| lot.dies_before <= clique).map(|lot| lot.bytes).sum()
    }

    /// The lots that are free at a clique, as `(index, bytes)`, the largest first. At most two lots of each size are
    /// returned.
    pub fn dead(&self, clique: u32) -> Vec<(usize, u64)> {
        let mut dead: Vec<(usize, u64)> = Vec::new();
        for (index, lot) in self.0.iter().enumerate().filter(|(_, lot)| lot.dies_before <= clique) {
            if dead.iter().filter(|other| other.1 == lot.bytes).count() < 2 {
                dead.push((index, lot.bytes));
            }
        }
        dead.sort_unstable_by_key(|&(index, bytes)| (Reverse(bytes), index));
        dead
    }

    /// Visits every way to extend the free range `from..to` to at least `bytes` with one or two dead lots at one of its
    /// ends. The range itself must be smaller than `bytes`. `open` says for each end whether the undecided range begins
    /// there. `visit` gets the extended range, and the lots used with their offsets.
    pub fn extensions(
        dead: &[(usize, u64)],
        (from, to): (u64, u64),
        open: [bool; 2],
        bytes: u64,
        mut visit: impl FnMut(u64, u64, [Option<(usize, u64)>; 2]),
    ) {
        let lacks = bytes - (to - from);
        for (k, &(one, first)) in dead.iter().enumerate().filter(|&(k, lot)| k == 0 || dead[k - 1].1 != lot.1) {
            if first >= lacks {
                if open[0] {
                    visit(from - first, to, [Some((one, from - first)), None]);
                }
                if open[1] {
                    visit(from, to + first, [Some((one, to)), None]);
                }
                continue;
            }
            let mut last = 0;
            for &(other, second) in &dead[k + 1..] {
                if second == last || second >= lacks || first + second < lacks {
                    continue;
                }
                last = second;
                if open[0] {
                    let low = from - first - second;
                    visit(low, to, [Some((one, from - first)), Some((other, low))]);
                }
                if open[1] {
                    visit(from, to + first + second, [Some((one, to)), Some((other, to + first))]);
                }
            }
        }
    }

    /// Applies a place. A lot that is taken over gets a new owner, which dies before clique `leaves`. If offsets of
    /// lots are decided, the bytes of these lots are removed from the undecided range in `live`, and the offsets are
    /// appended to `path`.
    pub fn take(&mut self, place: &Candidate, leaves: u32, live: &mut Vec<PlacedItem>, path: &mut Vec<(u32, At)>) {
        if let Some(lot) = place.reused_lot {
            self.0[lot].dies_before = leaves;
        }
        let mut decided: Vec<(usize, u64)> = place.decided.into_iter().flatten().collect();
        for &(index, at) in &decided {
            let lot = self.0[index];
            path.push((lot.root, At::Offset(at)));
            let end = at + lot.bytes;
            for slab in live.iter_mut().filter(|slab| slab.dies_before == UNDECIDED) {
                if slab.from == at {
                    slab.from = end;
                } else if slab.to == end {
                    slab.to = at;
                }
            }
            live.retain(|slab| slab.from < slab.to);
        }
        decided.sort_unstable();
        while let Some((index, _)) = decided.pop() {
            self.0.remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    /// Creates lots from `(bytes, leaves)`, and the undecided range from address 10 on that holds these lots.
    fn stretch(rows: &[(u64, u32)]) -> (Lots, Vec<PlacedItem>) {
        let lots = Lots::new((0..).zip(rows).map(|(root, &(bytes, leaves))| (root, bytes, leaves)));
        let to = 10 + rows.iter().map(|row| row.0).sum::<u64>();
        (lots, vec![PlacedItem { from: 10, to, dies_before: UNDECIDED }])
    }

    generated! {
        /// Each opening extends a range by distinct dead lots until it is large enough. The other lots keep exactly the
        /// room that they need.
        #[test]
        fn a_range_grows_by_lots_that_are_free(
            rows in prop::collection::vec((1..9u64, 0..9u32), 1..9),
            (clique, free, more) in (0..9u32, 0..6u64, 1..9u64),
        ) {
            let (lots, live) = stretch(&rows);
            let dead = lots.dead(clique);
            let end = live[0].to;
            for (from, to, open) in [(10 - free, 10, [false, true]), (end, end + free, [true, false])] {
                let mut ways = Vec::new();
                Lots::extensions(&dead, (from, to), open, free + more, |from, to, decided| ways.push((from, to, decided)));
                for (low, high, decided) in ways {
                    let (mut left, mut live, mut path) = (lots.clone(), live.clone(), Vec::new());
                    left.take(&Candidate { decided, ..Candidate::default() }, 0, &mut live, &mut path);
                    let grown: u64 = path.iter().map(|&(root, _)| rows[root as usize].0).sum();
                    prop_assert!(path.iter().all(|&(root, _)| rows[root as usize].1 <= clique));
                    prop_assert_eq!(high - low, free + grown);
                    prop_assert!(grown >= more);
                    prop_assert_eq!(left.len() + path.len(), lots.len());
                    let room: u64 = live.iter().map(|slab| slab.to - slab.from).sum();
                    prop_assert_eq!(room, left.rest().map(|(_, bytes)| bytes).sum::<u64>());
                    prop_assert!(live.iter().all(|slab| slab.to <= low || high <= slab.from));
                }
            }
        }
    }

    /// A free lot of four bytes gets a new owner, and is free again when that owner dies.
    #[test]
    fn a_lot_is_taken_over_by_one_of_its_size() {
        let (mut lots, mut live) = stretch(&[(4, 9), (4, 1), (2, 1)]);
        let before = live.clone();
        assert_eq!(lots.dead(2), [(1, 4), (2, 2)]);
        lots.take(&Candidate { reused_lot: Some(1), ..Candidate::default() }, 5, &mut live, &mut Vec::new());
        assert_eq!((lots.dead(2), lots.dead(5)), (vec![(2, 2)], vec![(1, 4), (2, 2)]));
        assert_eq!((live, lots.root(1), lots.freed(5)), (before, 1, 6));
    }

    /// The hash depends neither on the order of the lots nor on when dead lots died.
    #[test]
    fn lots_that_are_alike_have_one_key() {
        let key = |rows: &[(u64, u32)]| stretch(rows).0.key(3, |leaves| leaves / 2);
        assert_eq!(key(&[(4, 1), (4, 9), (2, 2)]), key(&[(2, 3), (4, 8), (4, 2)]));
        assert_ne!(key(&[(4, 1), (4, 9)]), key(&[(4, 1), (4, 6)]));
        assert_ne!(key(&[(4, 1), (4, 1)]), key(&[(2, 1), (2, 1)]));
    }
}
