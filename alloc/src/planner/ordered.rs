//! One item after another, in an order that need not be time's: each takes a hole that those before it left.

use super::holes::{Fit, Holes};
use super::occupied::Occupied;
use super::part::Part;

/// One placement of a whole part, item by item.
pub(crate) struct Ordered<'p> {
    pub part: &'p Part,
    /// Where each item goes.
    pub fit: Fit,
    /// The height aimed at.
    pub ceiling: u64,
}

impl Ordered<'_> {
    /// Places the items in `order`, which names each of them once; pins keep their places. Writes the offsets and
    /// returns the height; `over` receives the items that end above the ceiling, `work` counts what was looked at.
    /// `None` when the address space ends or pins overlap.
    pub fn run(&self, order: &[u32], offsets: &mut [u64], over: &mut Vec<u32>, work: &mut u64) -> Option<u64> {
        let mut occupied = Occupied::new(self.part.cliques);
        let mut holes = Holes::new(self.ceiling);
        let mut pinned = vec![false; if self.part.pins.is_empty() { 0 } else { order.len() }];
        let mut height = 0;
        over.clear();
        for &(i, at) in &self.part.pins {
            let item = self.part.items[i as usize];
            // A group can be pinned onto something by one of its members.
            if occupied.taken(item).iter().any(|&(from, to)| from < at + item.bytes && at < to) {
                return None;
            }
            occupied.insert(item, at);
            offsets[i as usize] = at;
            pinned[i as usize] = true;
            if !self.part.is_ghost(i) {
                height = height.max(at + item.bytes);
            }
        }
        for &i in order.iter().filter(|&&i| !pinned.get(i as usize).is_some_and(|&p| p)) {
            let item = self.part.items[i as usize];
            *work += occupied.holes(item, &mut holes);
            let at = holes.take(item.bytes, item.alignment, self.fit)?;
            occupied.insert(item, at);
            offsets[i as usize] = at;
            height = height.max(at + item.bytes);
            if at + item.bytes > self.ceiling {
                over.push(i);
            }
        }
        Some(height)
    }
}
