//! Parts on a coarser grid: without their small items, what remains often has sizes that are multiples of something large.
//!
//! Activations are multiples of a hidden width, statistics and masks are not. Where a few kilobytes lie between the
//! megabytes, the holes that these leave don't fit the next ones. So the large items are planned alone, in what the small
//! ones leave at least, and the small ones fill up the holes.

use super::part::{Item, Part, gcd};

/// A part without its small items.
pub(crate) struct Scale {
    pub coarse: Part,
    /// What each coarse item is in the whole part.
    pub members: Vec<u32>,
    /// The most bytes of small items alive together.
    pub fine: u64,
}

/// A grid is worth a try if it is that much coarser than the next finer one.
const COARSER: u64 = 4;

/// What is left out must be at most this share of the whole.
const FINE_SHARE: u64 = 64;

/// Scales of a part that are tried.
const MOST: usize = 3;

/// The scales of a part, the coarsest first; none for parts with pins.
pub(crate) fn scales(part: &Part) -> Vec<Scale> {
    let mut sizes: Vec<u64> = part.items.iter().map(|item| item.bytes).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    let mut scales = Vec::new();
    let mut grid = 0;
    for pair in sizes.windows(2) {
        grid = gcd(grid, pair[0]);
        if scales.len() == MOST || !part.pins.is_empty() {
            break;
        }
        if grid / gcd(grid, pair[1]) >= COARSER {
            let scale = Scale::new(part, pair[0]);
            if scale.fine <= part.bound / FINE_SHARE {
                scales.push(scale);
            }
        }
    }
    scales
}

impl Scale {
    fn new(part: &Part, least: u64) -> Self {
        let (members, small): (Vec<u32>, Vec<u32>) =
            (0..part.items.len() as u32).partition(|&i| part.items[i as usize].bytes >= least);
        let only = |members: &[u32]| {
            let items: Vec<Item> = members.iter().map(|&i| part.items[i as usize]).collect();
            let mut part = Part { items, cliques: part.cliques, ..Part::default() };
            part.bound = part.live().into_iter().max().unwrap_or(0);
            part
        };
        Self { coarse: only(&members), fine: only(&small).bound, members }
    }

    /// Bytes of the smallest item that is not left out.
    pub fn least(&self) -> u64 {
        self.coarse.items.iter().map(|item| item.bytes).min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(sizes: &[u64]) -> Part {
        let items = sizes.iter().map(|&bytes| Item { start: 0, end: 1, bytes, alignment: 1 }).collect();
        Part { items, cliques: 1, bound: sizes.iter().sum(), ..Part::default() }
    }

    #[test]
    fn scales_are_cut_where_the_grid_gets_finer() {
        let cuts = |sizes: &[u64]| -> Vec<(usize, u64, u64)> {
            scales(&part(sizes)).iter().map(|s| (s.members.len(), s.coarse.grain(), s.fine)).collect()
        };
        // Megabytes, then kilobytes, then bytes.
        assert_eq!(cuts(&[3 << 20, 1 << 10, 2 << 20, 5]), [(2, 1 << 20, 1029), (3, 1 << 10, 5)]);
        // A grid that is only twice as coarse is left alone, and so are small items that are too many.
        assert_eq!(cuts(&[1 << 20, 1 << 19]), []);
        assert_eq!(cuts(&[1 << 20, 1 << 17]), []);
        assert_eq!(cuts(&[]), []);
    }
}
