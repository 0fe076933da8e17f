//! One item after another, in an order that need not be time's: each takes a hole that those before it left.

use std::cmp::Reverse;

use super::holes::{Fit, Holes};
use super::meter::Meter;
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
    /// returns the height; `over` receives the items that end above the ceiling, `purse` pays for what is looked
    /// at. `None` when it is empty, the address space ends or pins lie on each other.
    pub fn run(&self, order: &[u32], offsets: &mut [u64], over: &mut Vec<u32>, purse: &mut Meter) -> Option<u64> {
        let mut occupied = Occupied::new(self.part.cliques);
        let mut holes = Holes::new(self.ceiling);
        let mut pinned = vec![false; if self.part.pins.is_empty() { 0 } else { order.len() }];
        let mut height = 0;
        over.clear();
        for &(i, at) in &self.part.pins {
            let item = self.part.items[i as usize];
            purse.spend(occupied.holes(item, &mut holes));
            // Pins of groups and forbidden ranges may contradict each other.
            if !holes.claim(at, at + item.bytes) {
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
            purse.spend(occupied.holes(item, &mut holes));
            if purse.left() == 0 {
                return None;
            }
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

/// Offsets of all items: of those that have a place, and the lowest that is left for the others, the longest-lived first.
/// `None` when the address space ends; `meter` pays, but stops nothing.
pub(crate) fn fill_in(part: &Part, places: &[Option<u64>], meter: &mut Meter) -> Option<Vec<u64>> {
    let items = &part.items;
    let mut missing: Vec<u32> = (0..items.len() as u32).filter(|&i| places[i as usize].is_none()).collect();
    let mut offsets: Vec<u64> = places.iter().map(|place| place.unwrap_or(0)).collect();
    if missing.is_empty() {
        return Some(offsets);
    }
    missing.sort_by_key(|&i| (Reverse((items[i as usize].cliques(), items[i as usize].bytes)), i));
    let mut occupied = Occupied::new(part.cliques);
    for (item, place) in items.iter().zip(places) {
        place.iter().for_each(|&at| occupied.insert(*item, at));
    }
    let mut holes = Holes::new(u64::MAX);
    for i in missing {
        let item = items[i as usize];
        meter.spend(occupied.holes(item, &mut holes));
        let at = holes.take(item.bytes, item.alignment, Fit::Lowest)?;
        occupied.insert(item, at);
        offsets[i as usize] = at;
    }
    Some(offsets)
}
