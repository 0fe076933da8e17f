//! The released planner's `split-and-fuse` (the last step of `allocate_group` in Synthesizer/allocator.py). Buffers are
//! placed by size, the largest first. The buffers of one size go into the idle space of the existing layers, then into
//! layers of their own.
//!
//! Two properties of the released code affect the results:
//!
//! - Time counts single requests. A buffer that fills the idle space of a layer occupies the ticks from its first to
//!   its last, both included. A member of the layer itself, however, occupies the ticks one earlier: from the tick
//!   before its first to the tick before its last. So a buffer doesn't fit if it is freed in the very request before a
//!   member's birth.
//! - The order in which a size class is offered is revised by [`TRIALS`] passes. Each pass fills copies of the layers.
//!   Then the positions (in the order) of the buffers that found no place move to the front. The next pass reads these
//!   positions as numbers of buffers. Whether a pass has improved the result is not checked.

use std::collections::BTreeMap;

use gapless_alloc::Lifetime;

use super::Rectangle;
use super::chains::{Echo, chains};
use super::rooms::{Class, Left, Rooms, stack};
use super::skyline::Skyline;

/// Passes over a size class before it is placed. The released code repeats a pass until the bytes of the layers that
/// the class would need alone have stayed the same five times, or have grown. They are the same in every pass, so there
/// are always this many passes.
const TRIALS: usize = 6;

/// All layers, one above the other.
#[derive(Debug, Default)]
pub(super) struct Layers {
    layers: Vec<Layer>,
    /// Sum of the layers' bytes, at most `u64::MAX`.
    pub height: u64,
}

/// A range of offsets over all time.
#[derive(Debug)]
pub(super) struct Layer {
    offset: u64,
    pub bytes: u64,
    pub skyline: Skyline,
}

impl Layers {
    /// Adds a layer on top and returns its offset.
    pub(super) fn push(&mut self, bytes: u64, skyline: Skyline) -> u64 {
        let offset = self.height;
        self.layers.push(Layer { offset, bytes, skyline });
        self.height = self.height.saturating_add(bytes);
        offset
    }

    /// Places the rectangles with these numbers and records their offsets.
    pub(super) fn fill(&mut self, rectangles: &[Rectangle], numbers: &[usize], echo: &Echo, offsets: &mut [u64]) {
        let mut by_size: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for &number in numbers {
            by_size.entry(rectangles[number].bytes).or_default().push(number);
        }
        for (bytes, alike) in by_size.into_iter().rev() {
            let class = in_heap(alike, |number| rectangles[number].lifetime.start);
            self.fill_class(rectangles, bytes, &class, echo, offsets);
        }
    }

    /// Places the rectangles of one size.
    fn fill_class(&mut self, rectangles: &[Rectangle], bytes: u64, class: &[usize], echo: &Echo, offsets: &mut [u64]) {
        let lifetime = |number: usize| &rectangles[number].lifetime;
        let numbers: Vec<usize> = chains(class, lifetime, echo).into_iter().flat_map(|chain| chain.members).collect();
        let ticks = numbers.iter().map(|&number| lifetime(number).start..lifetime(number).end + 1).collect();
        let class = Class::new(bytes, ticks);
        let mut rooms = Rooms::default();
        let order = self.revised_order(&class, &mut rooms);
        // Members go into existing layers as far as they fit.
        let rank = ranks(&order);
        let mut left = Left::all(order.len());
        for at in self.as_large_as(bytes) {
            if left.count == 0 {
                break;
            }
            let layer = &mut self.layers[at];
            let room = rooms.of(at, layer, &class);
            let mut heights = room.heights.clone();
            for (place, cells) in room.by_place(&rank) {
                if !left.is_left[place] {
                    continue;
                }
                if let Some(below) = stack(&mut heights[cells], bytes, layer.bytes) {
                    let member = order[place];
                    offsets[numbers[member]] = layer.offset.saturating_add(below);
                    left.take(place);
                }
            }
            layer.skyline = room.grown(&layer.skyline, &heights);
        }
        // All other members go into new layers.
        let mut left: Vec<usize> = left.places().map(|place| numbers[order[place]]).collect();
        left.sort_by_key(|&number| lifetime(number).start);
        for chain in chains(&left, lifetime, echo) {
            let members = chain.members.iter().map(|&number| (occupied(lifetime(number)), bytes));
            let offset = self.push(bytes, Skyline::flat(0).with(members));
            chain.members.iter().for_each(|&number| offsets[number] = offset);
        }
    }

    /// Returns the order in which members of the class are offered, after the trials.
    fn revised_order(&self, class: &Class, rooms: &mut Rooms) -> Vec<usize> {
        let mut order: Vec<usize> = (0..class.ticks.len()).collect();
        for _ in 0..TRIALS {
            let left = self.trial(class, rooms, &order);
            let others = order.iter().copied().filter(|&member| !left.is_left[member]);
            let revised: Vec<usize> = left.places().chain(others).collect();
            if revised == order {
                break;
            }
            order = revised;
        }
        order
    }

    /// Offers all members to every layer. Returns the places in `order` of the members that no layer takes.
    fn trial(&self, class: &Class, rooms: &mut Rooms, order: &[usize]) -> Left {
        let mut left = Left::all(order.len());
        let rank = ranks(order);
        for at in self.as_large_as(class.bytes) {
            if left.count == 0 {
                break;
            }
            let layer = &self.layers[at];
            let room = rooms.of(at, layer, class);
            let mut places = room.by_place(&rank);
            // Entries after the last place that this layer could still take change nothing.
            places.truncate(places.iter().rposition(|(place, _)| left.is_left[*place]).map_or(0, |last| last + 1));
            if places.is_empty() {
                continue;
            }
            let mut heights = room.heights.clone();
            for (place, cells) in places {
                if stack(&mut heights[cells], class.bytes, layer.bytes).is_some() {
                    left.take(place);
                }
            }
        }
        left
    }

    fn as_large_as(&self, bytes: u64) -> impl Iterator<Item = usize> + use<> {
        let large: Vec<usize> = (0..self.layers.len()).filter(|&at| self.layers[at].bytes >= bytes).collect();
        large.into_iter()
    }
}

/// The place of each member in an order.
fn ranks(order: &[usize]) -> Vec<usize> {
    let mut rank = vec![0; order.len()];
    order.iter().enumerate().for_each(|(place, &member)| rank[member] = place);
    rank
}

/// Returns the ticks that a member of the layer itself occupies.
pub(super) fn occupied(lifetime: &Lifetime) -> Lifetime {
    lifetime.start - 1..lifetime.end
}

/// Returns the items in the order of a binary heap's array, after they were pushed one by one with `key` (Python's
/// `heapq`). The released planner iterates over such an array. Items that are pushed in ascending order stay in that
/// order.
pub(super) fn in_heap(items: Vec<usize>, key: impl Fn(usize) -> u64) -> Vec<usize> {
    let mut heap = items;
    for pushed in 1..heap.len() {
        let mut at = pushed;
        while at > 0 && key(heap[at]) < key(heap[(at - 1) / 2]) {
            heap.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
    }
    heap
}
