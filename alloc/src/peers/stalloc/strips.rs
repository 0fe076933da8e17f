//! STAlloc's planner: buffers of one size share strips, large sizes first, and smaller ones fill what larger strips leave
//! idle before they get strips of their own.

use std::collections::{BTreeMap, BTreeSet};

use crate::Lifetime;

/// What is to be placed: a lifetime and a size in bytes.
#[derive(Debug, Clone)]
pub(super) struct Rectangle {
    pub lifetime: Lifetime,
    pub bytes: u64,
}

/// Offsets, one per rectangle, and the height of all strips, in bytes; past 2^64 both stay there, for no device holds that.
#[derive(Debug, Default)]
pub(super) struct Strips {
    pub offsets: Vec<u64>,
    pub height: u64,
}

/// Places all rectangles.
pub(super) fn place(rectangles: &[Rectangle]) -> Strips {
    let mut by_size: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (index, rectangle) in rectangles.iter().enumerate() {
        by_size.entry(rectangle.bytes).or_default().push(index);
    }
    let mut offsets = vec![0; rectangles.len()];
    let mut height = 0;
    let mut strips: Vec<Strip> = Vec::new();
    for (bytes, mut alike) in by_size.into_iter().rev() {
        alike.sort_by_key(|&index| (rectangles[index].lifetime.start, index));
        let order: Vec<usize> = chains(rectangles, &alike).into_iter().flatten().collect();
        let mut left = Vec::new();
        for index in order {
            let lifetime = &rectangles[index].lifetime;
            match strips.iter_mut().find_map(|strip| strip.stack(lifetime, bytes)) {
                Some(offset) => offsets[index] = offset,
                None => left.push(index),
            }
        }
        left.sort_by_key(|&index| (rectangles[index].lifetime.start, index));
        for chain in chains(rectangles, &left) {
            let mut strip = Strip { offset: height, bytes, skyline: BTreeMap::from([(0, 0)]) };
            for index in chain {
                offsets[index] =
                    strip.stack(&rectangles[index].lifetime, bytes).expect("buffers of a chain take turns");
            }
            height = height.saturating_add(bytes);
            strips.push(strip);
        }
    }
    Strips { offsets, height }
}

/// Rectangles (by start) as chains in which each starts after the one before has ended: each joins the chain that ended
/// last.
fn chains(rectangles: &[Rectangle], by_start: &[usize]) -> Vec<Vec<usize>> {
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut ends: BTreeSet<(u64, usize)> = BTreeSet::new();
    for &index in by_start {
        let lifetime = &rectangles[index].lifetime;
        let chain = match ends.range(..=(lifetime.start, usize::MAX)).next_back().copied() {
            Some(end) => {
                ends.remove(&end);
                end.1
            }
            None => {
                chains.push(Vec::new());
                chains.len() - 1
            }
        };
        chains[chain].push(index);
        ends.insert((lifetime.end, chain));
    }
    chains
}

/// A range of offsets over all time, filled from below.
#[derive(Debug)]
struct Strip {
    offset: u64,
    bytes: u64,
    /// From each tick on: bytes taken, counted from the strip's offset.
    skyline: BTreeMap<u64, u64>,
}

impl Strip {
    /// Puts `bytes` on top of all that is there during `lifetime`; returns the offset, if they fit.
    fn stack(&mut self, lifetime: &Lifetime, bytes: u64) -> Option<u64> {
        let room = self.bytes.checked_sub(bytes)?;
        let at = |tick| *self.skyline.range(..=tick).next_back().expect("a skyline starts at tick 0").1;
        let mut top = at(lifetime.start);
        for (_, &height) in self.skyline.range(lifetime.clone()) {
            if top > room {
                return None;
            }
            top = top.max(height);
        }
        if top > room {
            return None;
        }
        let after = at(lifetime.end);
        let covered: Vec<u64> = self.skyline.range(lifetime.clone()).map(|(&tick, _)| tick).collect();
        for tick in covered {
            self.skyline.remove(&tick);
        }
        self.skyline.insert(lifetime.start, top + bytes);
        self.skyline.entry(lifetime.end).or_insert(after);
        Some(self.offset.saturating_add(top))
    }
}
