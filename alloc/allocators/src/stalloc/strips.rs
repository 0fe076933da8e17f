//! Strips without the losses of the released planner: buffers of one size take turns in strips. Large sizes are placed
//! first. Smaller buffers first fill the idle space of larger strips, and then get strips of their own.
//!
//! One iteration is planned. Each lifetime lasts from birth to death and no longer, and every size class is placed in
//! order of birth. The result shows how low the plans of [`layers`](super::layers) would be without these losses.

use std::collections::BTreeMap;

use super::Rectangle;
use super::chains::{Echo, chains};
use super::skyline::Skyline;

/// A range of offsets over all of time, which is filled from the bottom.
struct Strip {
    offset: u64,
    bytes: u64,
    skyline: Skyline,
}

/// Records the offset of each rectangle, and returns the height of all strips.
pub(super) fn place(rectangles: &[Rectangle], offsets: &mut [u64]) -> u64 {
    let mut by_size: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (number, rectangle) in rectangles.iter().enumerate() {
        by_size.entry(rectangle.bytes).or_default().push(number);
    }
    let lifetime = |number: usize| &rectangles[number].lifetime;
    let (mut strips, mut height): (Vec<Strip>, u64) = (Vec::new(), 0);
    for (bytes, mut alike) in by_size.into_iter().rev() {
        alike.sort_by_key(|&number| lifetime(number).start);
        let mut left = Vec::new();
        for number in chains(&alike, lifetime, &Echo::default()).into_iter().flat_map(|chain| chain.members) {
            let found = strips
                .iter_mut()
                .find_map(|strip| Some(strip.offset + strip.skyline.stack(lifetime(number), bytes, strip.bytes)?));
            match found {
                Some(offset) => offsets[number] = offset,
                None => left.push(number),
            }
        }
        left.sort_by_key(|&number| lifetime(number).start);
        for chain in chains(&left, lifetime, &Echo::default()) {
            let mut skyline = Skyline::flat(0);
            for number in chain.members {
                skyline.raise(lifetime(number), bytes);
                offsets[number] = height;
            }
            strips.push(Strip { offset: height, bytes, skyline });
            height += bytes;
        }
    }
    height
}
