//! STAlloc's planner: groups and buffers of one size share strips, large sizes first, and smaller ones fill what larger
//! strips leave idle before they get strips of their own.

use std::collections::{BTreeMap, BTreeSet};

use gapless_alloc::Lifetime;

use super::groups;
use super::skyline::Skyline;

/// What is to be placed: a lifetime and a size in bytes.
#[derive(Debug, Clone)]
pub(super) struct Rectangle {
    pub lifetime: Lifetime,
    pub bytes: u64,
}

/// Offsets, one per rectangle, and the height of all strips, in bytes; past 2^64 both stay there, for no device holds
/// that.
#[derive(Debug, Default)]
pub(super) struct Strips {
    pub offsets: Vec<u64>,
    pub height: u64,
}

/// Places all rectangles. `phases` are the ticks at which a phase ends and the next begins; without any, no groups are
/// formed.
pub(super) fn place(rectangles: &[Rectangle], phases: &[u64]) -> Strips {
    let (groups, single) = groups::form(rectangles, phases);
    let mut offsets = vec![0; rectangles.len()];
    let mut stacks = Stacks::default();
    let outlines: Vec<Rectangle> =
        groups.iter().map(|group| Rectangle { lifetime: group.lifetime.clone(), bytes: group.bytes }).collect();
    let mut bases = vec![0; groups.len()];
    stacks.fill(&outlines, (0..groups.len()).collect(), &mut bases);
    // From here on, what groups leave idle inside of their outlines may be filled, too.
    stacks.strips.iter_mut().for_each(|strip| strip.skyline = Skyline::flat());
    for (group, &base) in groups.iter().zip(&bases) {
        let strip = stacks.strips.partition_point(|strip| strip.offset <= base) - 1;
        for &(member, offset) in &group.members {
            let Rectangle { lifetime, bytes } = &rectangles[member];
            offsets[member] = base.saturating_add(offset);
            let strip = &mut stacks.strips[strip];
            strip.skyline.raise(lifetime, (base - strip.offset).saturating_add(offset).saturating_add(*bytes));
        }
    }
    stacks.fill(rectangles, single, &mut offsets);
    Strips { offsets, height: stacks.height }
}

/// All strips, one above the other.
#[derive(Debug, Default)]
struct Stacks {
    strips: Vec<Strip>,
    height: u64,
}

/// A range of offsets over all time, filled from below.
#[derive(Debug)]
struct Strip {
    offset: u64,
    bytes: u64,
    skyline: Skyline,
}

impl Stacks {
    /// Places the rectangles of these numbers, size by size, and notes their offsets.
    fn fill(&mut self, rectangles: &[Rectangle], numbers: Vec<usize>, offsets: &mut [u64]) {
        let mut by_size: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for index in numbers {
            by_size.entry(rectangles[index].bytes).or_default().push(index);
        }
        for (bytes, alike) in by_size.into_iter().rev() {
            let mut left = Vec::new();
            for index in chains(rectangles, alike).into_iter().flatten() {
                let lifetime = &rectangles[index].lifetime;
                let found = self.strips.iter_mut().find_map(|strip| {
                    let below = strip.skyline.stack(lifetime, bytes, strip.bytes)?;
                    Some(strip.offset.saturating_add(below))
                });
                match found {
                    Some(offset) => offsets[index] = offset,
                    None => left.push(index),
                }
            }
            for chain in chains(rectangles, left) {
                let mut skyline = Skyline::flat();
                for index in chain {
                    skyline.stack(&rectangles[index].lifetime, bytes, bytes).expect("buffers of a chain take turns");
                    offsets[index] = self.height;
                }
                self.strips.push(Strip { offset: self.height, bytes, skyline });
                self.height = self.height.saturating_add(bytes);
            }
        }
    }
}

/// Rectangles as chains in which each starts after the one before has ended: in order of their start, each joins the
/// chain that ended last.
fn chains(rectangles: &[Rectangle], mut numbers: Vec<usize>) -> Vec<Vec<usize>> {
    numbers.sort_by_key(|&index| (rectangles[index].lifetime.start, index));
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut ends: BTreeSet<(u64, usize)> = BTreeSet::new();
    for index in numbers {
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
