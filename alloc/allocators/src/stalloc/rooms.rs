//! The room that layers have for one size class.
//!
//! The births and deaths of a class's members cut time into cells, and each member needs a few consecutive cells. So a
//! trial only copies one height per cell, and looks at a few cells for each member.

use std::collections::BTreeMap;
use std::ops::Range;

use gapless_alloc::Lifetime;

use super::layers::Layer;
use super::skyline::Skyline;

/// Rectangles of one size, numbered in the order of their chains.
pub(super) struct Class {
    pub bytes: u64,
    /// Ticks that each member needs in a layer that it fills.
    pub ticks: Vec<Lifetime>,
    by_start: Vec<usize>,
}

impl Class {
    pub(super) fn new(bytes: u64, ticks: Vec<Lifetime>) -> Self {
        let mut by_start: Vec<usize> = (0..ticks.len()).collect();
        by_start.sort_by_key(|&member| ticks[member].start);
        Self { bytes, ticks, by_start }
    }

    /// Returns the members that lie within one of these ranges of ticks, in order of birth.
    fn within(&self, valleys: &[Lifetime]) -> Vec<usize> {
        let mut members = Vec::new();
        for valley in valleys {
            let from = self.by_start.partition_point(|&member| self.ticks[member].start < valley.start);
            let born = self.by_start[from..].iter().take_while(|&&member| self.ticks[member].start < valley.end);
            members.extend(born.filter(|&&member| self.ticks[member].end <= valley.end));
        }
        members
    }
}

/// The room that one layer has for each member, if that member is alone.
pub(super) struct Room {
    /// The members for which there is room: the number of each, and the cells that it needs.
    members: Vec<(usize, Range<usize>)>,
    /// Start of each cell, and finally the end of the last cell.
    ticks: Vec<u64>,
    /// For each cell, the greatest height of the layer's skyline during the cell, or 0 if no member needs the cell.
    pub heights: Vec<u64>,
}

impl Room {
    fn new(layer: &Layer, class: &Class) -> Self {
        let limit = layer.bytes.saturating_sub(class.bytes);
        // If the class has few members, each is looked up by itself; otherwise the members are looked up in the free
        // ranges.
        let mut members = match class.ticks.len() < layer.skyline.pieces() / 16 {
            true => (0..class.ticks.len()).filter(|&m| layer.skyline.is_low(&class.ticks[m], limit)).collect(),
            false => class.within(&layer.skyline.valleys(limit)),
        };
        members.sort_unstable();
        let mut ticks: Vec<u64> = members.iter().flat_map(|&m| [class.ticks[m].start, class.ticks[m].end]).collect();
        ticks.sort_unstable();
        ticks.dedup();
        let cell = |tick: u64| ticks.partition_point(|&other| other < tick);
        let cells = |member: usize| (member, cell(class.ticks[member].start)..cell(class.ticks[member].end));
        let members: Vec<_> = members.into_iter().map(cells).collect();
        // Number of members that need each cell, stored as the difference from the cell before.
        let mut needed = vec![0i64; ticks.len()];
        for (_, cells) in &members {
            needed[cells.start] += 1;
            needed[cells.end] -= 1;
        }
        let mut now = 0;
        let height = |(pair, change): (&[u64], &i64)| {
            now += change;
            if now > 0 { layer.skyline.top(&(pair[0]..pair[1])) } else { 0 }
        };
        let heights = ticks.windows(2).zip(&needed).map(height).collect();
        Self { members, ticks, heights }
    }

    /// Returns the places that the members have in an order, ascending, each with the cells that the member needs.
    pub(super) fn by_place(&self, rank: &[usize]) -> Vec<(usize, Range<usize>)> {
        let mut places: Vec<_> = self.members.iter().map(|(member, cells)| (rank[*member], cells.clone())).collect();
        places.sort_by_key(|place| place.0);
        places
    }

    /// Returns the layer's skyline, in which the cells that have grown have the new `heights`.
    pub(super) fn grown(&self, skyline: &Skyline, heights: &[u64]) -> Skyline {
        let grown = (0..heights.len()).filter(|&cell| heights[cell] > self.heights[cell]);
        skyline.with(grown.map(|cell| (self.ticks[cell]..self.ticks[cell + 1], heights[cell])))
    }
}

/// The rooms of all layers. The room of a layer is computed when it is first needed, because most classes find a place
/// in the first layers.
#[derive(Default)]
pub(super) struct Rooms {
    known: BTreeMap<usize, Room>,
}

impl Rooms {
    pub(super) fn of(&mut self, at: usize, layer: &Layer, class: &Class) -> &Room {
        self.known.entry(at).or_insert_with(|| Room::new(layer, class))
    }
}

/// Stacks `bytes` on the highest of these cells and raises all of them to the new top. Returns the offset of the new
/// bytes, or `None` if the top would exceed `limit`.
pub(super) fn stack(cells: &mut [u64], bytes: u64, limit: u64) -> Option<u64> {
    // A loop, because tests are compiled with a `max` that is called for each cell.
    let mut below = *cells.first()?;
    for &cell in &*cells {
        below = below.max(cell);
    }
    let top = below.checked_add(bytes).filter(|&top| top <= limit)?;
    cells.fill(top);
    Some(below)
}

/// The places of an order whose members have found no room yet.
pub(super) struct Left {
    pub is_left: Vec<bool>,
    pub count: usize,
}

impl Left {
    pub(super) fn all(count: usize) -> Self {
        Self { is_left: vec![true; count], count }
    }

    pub(super) fn take(&mut self, place: usize) {
        self.count -= usize::from(std::mem::replace(&mut self.is_left[place], false));
    }

    pub(super) fn places(&self) -> impl Iterator<Item = usize> {
        self.is_left.iter().enumerate().filter(|(_, is_left)| **is_left).map(|(place, _)| place)
    }
}
