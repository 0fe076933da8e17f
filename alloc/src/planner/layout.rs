//! One way to lay out what is alive, as a [`beam`](super::beam) keeps many: who lies where, which ranges are free, and how
//! orderly that is.
//!
//! A layout is orderly where those lie side by side that leave at nearly the same time, for together they give back one
//! large range, and where few ranges are free. Its disorder says how far it is from that.

use super::eject::mix;

/// What a free range adds to the disorder: as much as a neighbour that leaves thirty times as far away.
const RANGE: u64 = 80;

/// An item in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rect {
    pub from: u64,
    pub to: u64,
    /// When it dies, in cliques of the direction of the sweep.
    pub leaves: u32,
    pub item: u32,
}

impl Rect {
    /// Rectangles that are alike have one key, whichever item they are.
    fn key(self) -> u64 {
        mix(self.from ^ (self.to - self.from).rotate_left(20), u64::from(self.leaves))
    }
}

/// A free range, with the times at which the items below and above it leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hole {
    pub from: u64,
    pub to: u64,
    below: u32,
    above: u32,
}

/// Where an item could go, and what the layout would be then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Index of the hole.
    hole: usize,
    pub rect: Rect,
    /// The disorder, and more where the item would lie beside a stranger although the hole's other end is better.
    pub rank: u64,
    /// Layouts that are alike have one hash.
    pub hash: u64,
}

/// The edges of the arena never leave: as of the last clique.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arena {
    pub ceiling: u64,
    pub cliques: u32,
}

/// Who is where at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    /// Ascending.
    pub live: Vec<Rect>,
    /// Ascending.
    pub holes: Vec<Hole>,
    disorder: u64,
    hash: u64,
    /// Which entry of the history led here.
    pub node: u32,
}

impl Layout {
    /// Of items that lie on each other from 0 up.
    pub fn new(live: Vec<Rect>, node: u32, arena: Arena) -> Self {
        let hash = live.iter().fold(0, |hash, rect| hash ^ rect.key());
        let mut layout = Self { live, holes: Vec::new(), disorder: 0, hash, node };
        layout.survey(arena);
        layout
    }

    /// Every place at an end of a hole for an item of so many bytes that leaves then.
    pub fn places(&self, item: u32, bytes: u64, leaves: u32) -> impl Iterator<Item = Place> + '_ {
        let fitting = self.holes.iter().enumerate().filter(move |(_, hole)| hole.to - hole.from >= bytes);
        fitting.flat_map(move |(index, hole)| {
            let (below, above) = (apart(hole.below, leaves), apart(leaves, hole.above));
            let fills = hole.to - hole.from == bytes;
            let disorder =
                self.disorder + below + above - apart(hole.below, hole.above) - if fills { RANGE } else { 0 };
            let place = move |from: u64, more: u64| {
                let rect = Rect { from, to: from + bytes, leaves, item };
                Place { hole: index, rect, rank: disorder + more, hash: self.hash ^ rect.key() }
            };
            let low = place(hole.from, if fills { 0 } else { below.saturating_sub(above) });
            let high = (!fills).then(|| place(hole.to - bytes, above.saturating_sub(below)));
            std::iter::once(low).chain(high)
        })
    }

    /// Puts an item to one of its [`places`](Self::places).
    pub fn put(&mut self, place: &Place) {
        let (hole, rect) = (self.holes[place.hole], place.rect);
        let index = self.live.partition_point(|other| other.from < rect.from);
        self.live.insert(index, rect);
        self.hash = place.hash;
        self.disorder += apart(hole.below, rect.leaves) + apart(rect.leaves, hole.above);
        self.disorder -= apart(hole.below, hole.above);
        if hole.from < rect.from {
            self.holes[place.hole] = Hole { to: rect.from, above: rect.leaves, ..hole };
        } else if rect.to < hole.to {
            self.holes[place.hole] = Hole { from: rect.to, below: rect.leaves, ..hole };
        } else {
            self.holes.remove(place.hole);
            self.disorder -= RANGE;
        }
    }

    /// Frees the ranges of those that die, which ascend by number.
    pub fn bury(&mut self, dead: &[u32], arena: Arena) {
        let mut hash = self.hash;
        self.live.retain(|rect| {
            let stays = dead.binary_search(&rect.item).is_err();
            if !stays {
                hash ^= rect.key();
            }
            stays
        });
        self.hash = hash;
        self.survey(arena);
    }

    /// Finds the holes between those alive, and how orderly that is.
    fn survey(&mut self, arena: Arena) {
        self.holes.clear();
        self.disorder = 0;
        let mut below = Rect { from: 0, to: 0, leaves: arena.cliques, item: 0 };
        let top = Rect { from: arena.ceiling, to: arena.ceiling, ..below };
        for &rect in self.live.iter().chain([&top]) {
            if below.to < rect.from {
                self.holes.push(Hole { from: below.to, to: rect.from, below: below.leaves, above: rect.leaves });
                self.disorder += RANGE;
            }
            self.disorder += apart(below.leaves, rect.leaves);
            below = rect;
        }
    }

    /// How many of these bytes (items by size, the largest first) find no room between those that stay longer than
    /// `until`, and `more` if it does, when each goes to the tightest. `room` is scratch.
    pub fn misfits(&self, more: Option<Rect>, until: u32, sizes: &[u64], arena: Arena, room: &mut Vec<u64>) -> u64 {
        room.clear();
        let mut floor = 0;
        let mut pass = |rect: &Rect| {
            if rect.from > floor {
                room.push(rect.from - floor);
            }
            floor = rect.to;
        };
        let mut more = more.filter(|more| more.leaves > until);
        for rect in self.live.iter().filter(|rect| rect.leaves > until) {
            if let Some(more) = more.take_if(|more| more.from < rect.from) {
                pass(&more);
            }
            pass(rect);
        }
        more.iter().for_each(&mut pass);
        pass(&Rect { from: arena.ceiling, to: arena.ceiling, leaves: 0, item: 0 });
        let mut misfits = 0;
        for &bytes in sizes {
            match room.iter_mut().filter(|left| **left >= bytes).min() {
                Some(left) => *left -= bytes,
                None => misfits += bytes,
            }
        }
        misfits
    }
}

/// How much two neighbours that leave at these times add to the disorder: the doublings of the time between, in
/// sixteenths.
fn apart(a: u32, b: u32) -> u64 {
    sixteenths_of_doublings(a.abs_diff(b))
}

/// The logarithm of `n + 1` to base 2 in sixteenths, between powers of two along a straight line: without a rounding that
/// differs between machines.
pub(super) fn sixteenths_of_doublings(n: u32) -> u64 {
    let n = u64::from(n) + 1;
    let power = n.ilog2();
    u64::from(16 * power) + (((n << 4) >> power) - 16)
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    const ARENA: Arena = Arena { ceiling: 60, cliques: 99 };

    /// A stack of `(bytes, leaves)`, into which further items are put: each to one of its places.
    fn grown(stack: &[(u64, u32)], more: &[(u64, u32, prop::sample::Index)]) -> Layout {
        let mut top = 0;
        let rects = stack.iter().zip(0..).map(|(&(bytes, leaves), item)| {
            top += bytes;
            Rect { from: top - bytes, to: top, leaves, item }
        });
        let mut layout = Layout::new(rects.collect(), 0, ARENA);
        for (&(bytes, leaves, index), item) in more.iter().zip(stack.len() as u32..) {
            layout.bury(&[item / 2], ARENA);
            let places: Vec<Place> = layout.places(item, bytes, leaves).collect();
            if !places.is_empty() {
                layout.put(index.get(&places));
            }
        }
        layout
    }

    generated! {
        /// Changed step by step, or seen for the first time.
        #[test]
        fn what_is_known_of_a_layout_is_so(
            stack in prop::collection::vec((1..9u64, 1..99u32), 0..6),
            more in prop::collection::vec((1..9u64, 1..99u32, any::<prop::sample::Index>()), 0..20),
        ) {
            let layout = grown(&stack, &more);
            prop_assert_eq!(&Layout::new(layout.live.clone(), 0, ARENA), &layout);
            prop_assert!(layout.live.iter().all(|rect| rect.to <= ARENA.ceiling));
            prop_assert!(layout.live.windows(2).all(|pair| pair[0].to <= pair[1].from));
            let free: u64 = layout.holes.iter().map(|hole| hole.to - hole.from).sum();
            prop_assert_eq!(free, ARENA.ceiling - layout.live.iter().map(|rect| rect.to - rect.from).sum::<u64>());
        }

        /// What would be is what comes to be.
        #[test]
        fn a_place_leads_to_what_it_says(
            stack in prop::collection::vec((1..9u64, 1..99u32), 0..6),
            more in prop::collection::vec((1..9u64, 1..99u32, any::<prop::sample::Index>()), 0..20),
            (bytes, leaves, until) in (1..9u64, 1..99u32, 0..99u32),
            sizes in prop::collection::vec(1..20u64, 0..5),
        ) {
            let before = grown(&stack, &more);
            let mut room = Vec::new();
            for place in before.places(77, bytes, leaves) {
                let mut after = before.clone();
                after.put(&place);
                prop_assert_eq!(after.hash, place.hash);
                prop_assert!(after.disorder <= place.rank);
                prop_assert_eq!(
                    before.misfits(Some(place.rect), until, &sizes, ARENA, &mut room),
                    after.misfits(None, until, &sizes, ARENA, &mut room)
                );
            }
        }
    }

    /// Of 60 bytes, 10 to 20 and 40 to 50 stay: there is room for 10, 20 and 10.
    #[test]
    fn misfits_find_no_room() {
        let rect = |from, leaves, item| Rect { from, to: from + 10, leaves, item };
        let layout = Layout::new(vec![rect(0, 5, 0), rect(10, 9, 1), rect(40, 9, 2)], 0, ARENA);
        let misfits = |more, sizes: &[u64]| layout.misfits(more, 5, sizes, ARENA, &mut Vec::new());
        assert_eq!(misfits(None, &[20, 10, 10]), 0);
        assert_eq!(misfits(None, &[15, 12, 10, 10]), 12);
        assert_eq!(misfits(Some(rect(25, 9, 3)), &[20, 10]), 20);
        assert_eq!(misfits(Some(rect(25, 5, 3)), &[20, 10]), 0);
    }

    #[test]
    fn doublings_are_counted_in_sixteenths() {
        let expected = [(0, 0), (1, 16), (2, 24), (3, 32), (7, 48), (11, 56), (u32::MAX, 512)];
        for (n, sixteenths) in expected {
            assert_eq!(sixteenths_of_doublings(n), sixteenths, "{n}");
        }
    }
}
