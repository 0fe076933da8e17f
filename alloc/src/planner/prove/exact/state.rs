//! A plan that is built from the bottom, and the changes made so far, so that they can be undone.
//!
//! In: items to put on the floor, and floors to raise. Out: the items that are settled, the remaining items, and the
//! lowest place of each remaining item. Never: a choice between items.

use std::ops::Range;

use super::spans::{Runs, Spans};
use crate::order::sort_by_key;
use crate::planner::decompose::parts::{Item, Part};
use crate::planner::decompose::timeline::Buckets;
use crate::planner::mix::mix128;

/// One floor per clique, and the items that are settled below it.
#[derive(Clone)]
pub(super) struct State<'p> {
    pub part: &'p Part,
    pub items: &'p [Item],
    /// Pin of each item; empty if there are none.
    pins: Vec<Option<u64>>,
    pub capacity: u64,
    /// For each clique, the index of the first item born in it or later.
    pub starts: Vec<u32>,
    /// Number of items alive in each clique.
    pub alive: Vec<u32>,
    /// For each item, the places at which it can come to rest.
    pub reach: Vec<Reach>,
    pub floor: Vec<u64>,
    /// Bytes of the remaining items in each clique.
    pub rest: Vec<u64>,
    pub offsets: Vec<u64>,
    pub placed: Vec<bool>,
    /// The lowest place of each remaining item, as of the last time that floors were raised.
    pub lowest: Vec<u64>,
    pub trail: Vec<Change>,
    keys: Vec<u128>,
}

/// The places at which an item can come to rest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach {
    pub cliques: u32,
    /// Its cliques in the tables of spans.
    pub runs: Runs,
    /// The lowest and the highest offset.
    pub least: u64,
    pub top: u64,
    pub alignment: u64,
}

/// A change that can be undone.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    Floor(u32, u64),
    Placed(u32),
}

impl<'p> State<'p> {
    /// Creates the state in which nothing is placed. Returns `None` if more bytes than the capacity are alive in some
    /// clique. `table` has the spans of the items.
    pub fn new(part: &'p Part, capacity: u64, table: &Spans) -> Option<Self> {
        let rest = part.live();
        if rest.iter().any(|&bytes| bytes > capacity) {
            return None;
        }
        let mut alive = vec![0; part.cliques as usize];
        for item in &part.items {
            alive[item.start as usize..item.end as usize].iter_mut().for_each(|count| *count += 1);
        }
        let mut pins = vec![None; if part.pins.is_empty() { 0 } else { part.items.len() }];
        part.pins.iter().for_each(|&(i, at)| pins[i as usize] = Some(at));
        let reach = part.items.iter().zip(0..).map(|(item, i)| {
            let (pin, highest) = (pins.get(i).copied().flatten(), capacity - item.bytes);
            Reach {
                cliques: item.cliques(),
                runs: table.runs(item.start, item.end),
                least: pin.unwrap_or(0),
                top: pin.map_or(highest, |pin| pin.min(highest)),
                alignment: if pin.is_some() { 1 } else { item.alignment },
            }
        });
        let reach = reach.collect();
        Some(Self {
            part,
            items: &part.items,
            pins,
            capacity,
            starts: Buckets::new(part.cliques + 1, part.items.iter().map(|item| item.start)).starts,
            alive,
            reach,
            floor: vec![0; part.cliques as usize],
            rest,
            offsets: vec![0; part.items.len()],
            placed: part.items.iter().map(|item| item.bytes == 0).collect(),
            lowest: vec![0; part.items.len()],
            trail: Vec::new(),
            keys: (0..part.items.len() as u64).map(|i| mix128(i, 0x51)).collect(),
        })
    }

    /// Offset at which an item is pinned; `None` if the item has no pin.
    pub fn pin(&self, i: u32) -> Option<u64> {
        self.pins.get(i as usize).copied().flatten()
    }

    /// The remaining items that start within cliques `[from, to)`.
    pub fn to_come(&self, from: u32, to: u32) -> impl Iterator<Item = u32> + '_ {
        (self.starts[from as usize]..self.starts[to as usize]).filter(|&i| !self.placed[i as usize])
    }

    /// The remaining items that fit into a valley at its floor and are alive in any of `cliques`, which belong to it.
    pub fn fitting(&self, valley: Range<u32>, cliques: Range<u32>) -> impl Iterator<Item = u32> + '_ {
        let floor = self.floor[valley.start as usize];
        self.to_come(valley.start, cliques.end).filter(move |&i| {
            let item = self.items[i as usize];
            item.end <= valley.end && item.end > cliques.start && self.lowest[i as usize] == floor
        })
    }

    /// Cuts `[from, to)` wherever no remaining item crosses, and returns the pieces, the one with the least slack
    /// first. Cliques without remaining items are left out.
    pub fn pieces(&self, from: u32, to: u32) -> Vec<(u32, u32)> {
        let mut pieces: Vec<(u32, u32)> = Vec::new();
        for i in self.to_come(from, to) {
            let item = self.items[i as usize];
            match pieces.last_mut() {
                Some(piece) if item.start < piece.1 => piece.1 = piece.1.max(item.end),
                _ => pieces.push((item.start, item.end)),
            }
        }
        if pieces.len() > 1 {
            sort_by_key(&mut pieces, |&(a, b)| (a..b).map(|k| self.slack(k)).min());
        }
        pieces
    }

    /// Bytes of a clique that may stay empty.
    pub fn slack(&self, k: u32) -> u64 {
        self.capacity - self.floor[k as usize] - self.rest[k as usize]
    }

    /// Places an item on the floor, which must be equal in all of its cliques.
    pub fn put(&mut self, i: u32) {
        let item = self.items[i as usize];
        let at = self.floor[item.start as usize];
        self.offsets[i as usize] = at;
        self.placed[i as usize] = true;
        self.trail.push(Change::Placed(i));
        for k in item.start..item.end {
            self.rest[k as usize] -= item.bytes;
            self.raise(k, at + item.bytes);
        }
    }

    /// Raises a clique's floor.
    pub fn raise(&mut self, k: u32, floor: u64) {
        self.trail.push(Change::Floor(k, self.floor[k as usize]));
        self.floor[k as usize] = floor;
    }

    /// Undoes all changes after the first `mark`.
    pub fn undo(&mut self, mark: usize) {
        while self.trail.len() > mark {
            match self.trail.pop() {
                Some(Change::Floor(k, floor)) => self.floor[k as usize] = floor,
                Some(Change::Placed(i)) => {
                    let item = self.items[i as usize];
                    self.placed[i as usize] = false;
                    for k in item.start..item.end {
                        self.rest[k as usize] += item.bytes;
                    }
                }
                None => return,
            }
        }
    }

    /// A hash of everything that decides whether `[from, to)` can be planned: the remaining items, and the floors below
    /// them.
    pub fn hash(&self, from: u32, to: u32) -> u128 {
        let floors = (from..to).filter(|&k| self.rest[k as usize] > 0);
        let floors = floors.fold(0, |hash, k| hash ^ mix128(u64::from(k) << 1 | 1, self.floor[k as usize]));
        self.to_come(from, to).fold(floors, |hash, i| hash ^ self.keys[i as usize])
    }
}
