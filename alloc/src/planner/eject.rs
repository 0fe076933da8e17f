//! Guided ejection: repairs a plan that ends above a ceiling, one item at a time.
//!
//! What ends above the ceiling leaves the plan and waits in a pool. Each step takes one out of the pool and puts it where
//! that hurts least below the ceiling: into a free place if there is one, else onto the items that are cheapest to do
//! without, which go to the pool in turn. An item's price is its weight (larger and longer-lived ones are harder to place
//! again) times how often it had to force its way in, so that the quarrelsome settle first and no two items throw each
//! other out for ever. After many steps without a lighter pool, the lightest is taken up again, with the prices learnt.
//! (Nagata and Bräysy's guided ejection search for vehicle routing, 2009, with bytes × time for the routes.)

use std::cmp::Reverse;

use rayon::prelude::*;

use super::crowd::{Crowd, Placed as Neighbour};
use super::meter::Meter;
use super::ordered::fill_in;
use super::part::{Item, Part};
use super::portfolio::Placed;

/// A plan that is lowered step by step.
pub(crate) struct Ejection<'p> {
    part: &'p Part,
    /// The lowest plan so far.
    pub plan: Placed,
    lanes: Vec<Lane<'p>>,
}

impl<'p> Ejection<'p> {
    /// Starts from places by item; what has none goes to the lowest that is left, the longest-lived first. `None` when
    /// the address space ends.
    pub fn new(part: &'p Part, places: &[Option<u64>], meter: &mut Meter) -> Option<Self> {
        let offsets = fill_in(part, places, meter)?;
        let (crowd, work) = Crowd::of(part, &offsets);
        let lane = |taste| Lane::new(part, &offsets, crowd.clone(), taste);
        let lanes: Vec<Lane> = Taste::ALL.into_iter().map(lane).collect();
        meter.spend(work * lanes.len() as u64);
        let plan = Placed { height: part.height(&offsets), offsets };
        Some(Self { part, plan, lanes })
    }

    /// Looks for a plan of at most `ceiling` bytes within `work`; whether it was found. What found no place below the
    /// ceiling goes above the others, and that may still be a lower plan than before.
    ///
    /// Two lanes with different tastes take turns of growing length, side by side where there are threads. Of those that
    /// are done in the earliest turn, the first by number has the word: the same on every machine.
    pub fn lower(&mut self, ceiling: u64, work: u64, meter: &mut Meter) -> bool {
        let movable = |i: usize| !self.part.pins.iter().any(|pin| pin.0 as usize == i);
        if self.part.items.iter().enumerate().any(|(i, item)| item.bytes > ceiling && movable(i)) {
            return false;
        }
        let end = meter.spent.saturating_add(work).min(meter.work);
        self.lanes.iter_mut().for_each(|lane| lane.aim(ceiling));
        let mut turn = FIRST_TURN;
        while meter.spent < end && !meter.late() && self.lanes.iter().all(Lane::searches) {
            let here = turn.min((end - meter.spent).div_ceil(self.lanes.len() as u64));
            let deadline: &Meter = meter;
            self.lanes.par_iter_mut().for_each(|lane| lane.run(here, deadline));
            meter.spend(self.lanes.iter_mut().map(|lane| std::mem::take(&mut lane.work)).sum());
            turn += turn / 4;
        }
        self.lanes.iter_mut().for_each(Lane::fill_up);
        let best = self.lanes.iter().filter_map(Lane::plan).min_by_key(|plan| plan.height);
        if let Some(plan) = best.filter(|plan| plan.height < self.plan.height) {
            self.plan = plan;
        }
        self.lanes.iter_mut().for_each(|lane| lane.adopt(&self.plan.offsets));
        self.plan.height <= ceiling
    }
}

/// Work of a lane's first turn.
const FIRST_TURN: u64 = 50_000;

/// Steps without a lighter pool after which the lightest is taken up again.
const PATIENCE: u32 = 300;

/// What makes an item heavy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taste {
    /// The root of bytes times cliques, which lets a large item give way to a few small ones.
    Root,
    /// Bytes times cliques.
    Area,
}

impl Taste {
    const ALL: [Self; 2] = [Self::Root, Self::Area];
}

/// The pool so far that weighed least, with the places of the others.
#[derive(Debug)]
struct Lightest {
    mass: u64,
    pool: Vec<u32>,
    places: Vec<Option<u64>>,
}

struct Lane<'p> {
    part: &'p Part,
    ceiling: u64,
    seed: u64,
    places: Vec<Option<u64>>,
    crowd: Crowd,
    /// Items without a place.
    pool: Vec<u32>,
    /// Their weight.
    mass: u64,
    weight: Vec<u64>,
    /// Weight × failures; [`FIXED`] for pins.
    price: Vec<u64>,
    lightest: Lightest,
    /// Items that may lie elsewhere than in the lightest state.
    moved: Vec<u32>,
    steps: u64,
    since_lightest: u32,
    /// Pins leave some item no place.
    stuck: bool,
    work: u64,
    met: Vec<Neighbour>,
    edges: Edges,
}

/// Price of what can't be moved: more than all others together.
const FIXED: u64 = 1 << 60;

/// The heaviest weight. Times its failures times the items beside it, it stays below [`FIXED`].
const HEAVIEST: f64 = 1_000_000.0;

/// Failures that are counted.
const MOST_FAILURES: u64 = 1 << 16;

impl<'p> Lane<'p> {
    fn new(part: &'p Part, offsets: &[u64], crowd: Crowd, taste: Taste) -> Self {
        let items = &part.items;
        let area = |item: &Item| item.bytes as f64 * f64::from(item.cliques());
        let most = items.iter().map(area).fold(1.0, f64::max);
        let share = |item: &Item| match taste {
            Taste::Root => (area(item) / most).sqrt(),
            Taste::Area => area(item) / most,
        };
        let weight: Vec<u64> = items.iter().map(|item| 1 + (HEAVIEST * share(item)) as u64).collect();
        let mut price = weight.clone();
        part.pins.iter().for_each(|pin| price[pin.0 as usize] = FIXED);
        let places: Vec<Option<u64>> = offsets.iter().copied().map(Some).collect();
        let lightest = Lightest { mass: 0, pool: Vec::new(), places: places.clone() };
        Self {
            part,
            ceiling: u64::MAX,
            seed: taste as u64,
            places,
            crowd,
            pool: Vec::new(),
            mass: 0,
            weight,
            price,
            lightest,
            moved: Vec::new(),
            steps: 0,
            since_lightest: 0,
            stuck: false,
            work: 0,
            met: Vec::new(),
            edges: Edges::default(),
        }
    }

    /// Sends what ends above a ceiling to the pool.
    fn aim(&mut self, ceiling: u64) {
        self.ceiling = ceiling;
        self.stuck = false;
        for (i, item) in (0..).zip(&self.part.items) {
            let ends_above = self.places[i as usize].is_some_and(|at| at + item.bytes > ceiling);
            if ends_above && self.price[i as usize] < FIXED {
                self.take_away(i);
            }
        }
        self.lightest.mass = u64::MAX;
        self.note();
    }

    fn searches(&self) -> bool {
        !self.pool.is_empty() && !self.stuck
    }

    fn run(&mut self, work: u64, deadline: &Meter) {
        while self.searches() && self.work < work {
            self.step();
            if self.mass < self.lightest.mass {
                self.note();
            } else if self.since_lightest > PATIENCE {
                self.take_up();
            }
            if self.steps.is_multiple_of(256) && deadline.late() {
                return;
            }
        }
    }

    /// Finds a place for one of the pool.
    fn step(&mut self) {
        self.steps += 1;
        self.since_lightest += 1;
        let chosen = mix(self.steps, self.seed) as usize % self.pool.len();
        let i = self.pool[chosen];
        let item = self.part.items[i as usize];
        let looked = self.crowd.beside(item, &mut self.met);
        self.work += 8 + looked + WORK_PER_NEIGHBOUR * self.met.len() as u64;
        self.edges.fill(&self.met, &self.price);
        let random = mix(self.steps, !self.seed);
        let Some(choice) = self.edges.cheapest(item.bytes, item.alignment, self.ceiling, random) else {
            self.stuck = true;
            return;
        };
        self.pool.swap_remove(chosen);
        self.mass -= self.weight[i as usize];
        if choice.price > 0 {
            let (price, weight) = (&mut self.price[i as usize], self.weight[i as usize]);
            *price = (*price + weight).min(weight * MOST_FAILURES);
            let (from, to) = (choice.at, choice.at + item.bytes);
            let met = std::mem::take(&mut self.met);
            met.iter().filter(|other| other.from < to && from < other.to).for_each(|other| self.take_away(other.item));
            self.met = met;
        }
        self.put(i, choice.at);
    }

    fn put(&mut self, i: u32, at: u64) {
        self.places[i as usize] = Some(at);
        self.work += self.crowd.insert(i, self.part.items[i as usize], at);
        self.moved.push(i);
    }

    /// Sends an item to the pool.
    fn take_away(&mut self, i: u32) {
        if let Some(at) = self.places[i as usize].take() {
            self.work += self.crowd.remove(i, self.part.items[i as usize], at);
            self.moved.push(i);
            self.pool.push(i);
            self.mass += self.weight[i as usize];
        }
    }

    /// The pool is lighter than ever.
    fn note(&mut self) {
        self.since_lightest = 0;
        self.lightest.mass = self.mass;
        self.lightest.pool.clone_from(&self.pool);
        for i in self.moved.drain(..) {
            self.lightest.places[i as usize] = self.places[i as usize];
        }
    }

    /// Back to the lightest pool; the prices stay.
    fn take_up(&mut self) {
        self.since_lightest = 0;
        for i in std::mem::take(&mut self.moved) {
            self.change(i, self.lightest.places[i as usize]);
        }
        self.mass = self.lightest.mass;
        self.pool.clone_from(&self.lightest.pool);
    }

    /// Moves an item without a word to the pool.
    fn change(&mut self, i: u32, place: Option<u64>) {
        if self.places[i as usize] == place {
            return;
        }
        let item = self.part.items[i as usize];
        if let Some(at) = self.places[i as usize] {
            self.work += self.crowd.remove(i, item, at);
        }
        if let Some(at) = place {
            self.work += self.crowd.insert(i, item, at);
        }
        self.places[i as usize] = place;
    }

    /// Gives the lightest pool places above everything else where there are none below, the longest-lived first.
    fn fill_up(&mut self) {
        if self.pool.is_empty() {
            return;
        }
        self.take_up();
        let mut missing = std::mem::take(&mut self.pool);
        let items = &self.part.items;
        missing.sort_by_key(|&i| (Reverse((items[i as usize].cliques(), items[i as usize].bytes)), i));
        self.mass = 0;
        let mut taken = Vec::new();
        for i in missing {
            self.work += self.crowd.beside(items[i as usize], &mut self.met);
            taken.clear();
            taken.extend(self.met.iter().map(|other| (other.from, other.to)));
            taken.sort_unstable();
            // Only the end of the address space leaves an item without a place.
            if let Some(at) = lowest_gap(&taken, items[i as usize]) {
                self.put(i, at);
            }
        }
    }

    /// What is planned now, if that is everything.
    fn plan(&self) -> Option<Placed> {
        let offsets: Vec<u64> = self.places.iter().copied().collect::<Option<_>>()?;
        Some(Placed { height: self.part.height(&offsets), offsets })
    }

    /// Takes over a plan.
    fn adopt(&mut self, offsets: &[u64]) {
        for (i, &at) in (0..).zip(offsets) {
            self.change(i, Some(at));
            self.lightest.places[i as usize] = Some(at);
        }
        self.pool.clear();
        self.moved.clear();
        self.mass = 0;
    }
}

/// Sorting a neighbour's edges costs that much more than looking at it.
const WORK_PER_NEIGHBOUR: u64 = 4;

/// Where the rectangles beside an item begin and end, with their prices.
#[derive(Debug, Default)]
struct Edges {
    /// `(from, price)`, ascending.
    lower: Vec<(u64, u64)>,
    /// `(to, price)`, ascending.
    upper: Vec<(u64, u64)>,
}

/// A place for an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    at: u64,
    /// Of those that lie there.
    price: u64,
}

impl Edges {
    fn fill(&mut self, met: &[Neighbour], price: &[u64]) {
        self.lower.clear();
        self.upper.clear();
        self.lower.extend(met.iter().map(|other| (other.from, price[other.item as usize])));
        self.upper.extend(met.iter().map(|other| (other.to, price[other.item as usize])));
        // Runs that ascend, or nearly so: stable sorts are quick on them.
        self.lower.sort_by_key(|edge| edge.0);
        self.upper.sort_by_key(|edge| edge.0);
    }

    /// The cheapest place below the ceiling: of free ones, in the tightest hole; of others, any. `None` when pins leave
    /// none.
    ///
    /// The price changes only where an edge of the item meets an edge of a neighbour, so that the places on top of
    /// something and right under something are all that need be asked.
    fn cheapest(&self, bytes: u64, alignment: u64, ceiling: u64, random: u64) -> Option<Choice> {
        let last = ceiling.checked_sub(bytes)?;
        let last = last - last % alignment;
        let on_top = std::iter::once(0).chain(self.upper.iter().map(|edge| edge.0));
        let mut on_top = on_top.filter_map(|to| to.checked_next_multiple_of(alignment)).peekable();
        let under = self.lower.iter().filter_map(|edge| edge.0.checked_sub(bytes)).map(|at| at - at % alignment);
        let mut under = under.chain(std::iter::once(last)).peekable();
        let (mut below, mut above) = (0, 0);
        // Prices of all that begin below the item's top, and of all that end at or below its bottom.
        let (mut begun, mut ended) = (0u128, 0u128);
        let mut best: Option<((u64, u64), Choice)> = None;
        let mut asked = 0u64;
        loop {
            let at = match (on_top.peek(), under.peek()) {
                (Some(a), Some(b)) if a <= b => on_top.next(),
                (_, Some(_)) => under.next(),
                (_, None) => None,
            };
            let Some(at) = at else { break };
            // Both lists ascend, so that the last place of the second one ends the search.
            if at > last {
                continue;
            }
            while let Some(edge) = self.lower.get(below).filter(|edge| edge.0 < at + bytes) {
                begun += u128::from(edge.1);
                below += 1;
            }
            while let Some(edge) = self.upper.get(above).filter(|edge| edge.0 <= at) {
                ended += u128::from(edge.1);
                above += 1;
            }
            let price = u64::try_from(begun - ended).unwrap_or(FIXED).min(FIXED);
            asked += 1;
            let tie = if price == 0 {
                let floor = above.checked_sub(1).map_or(0, |k| self.upper[k].0);
                self.lower.get(below).map_or(ceiling, |edge| edge.0.min(ceiling)) - floor
            } else {
                mix(asked, random)
            };
            if price < FIXED && best.is_none_or(|(least, _)| (price, tie) < least) {
                best = Some(((price, tie), Choice { at, price }));
            }
        }
        best.map(|(_, choice)| choice)
    }
}

/// 64 well-mixed bits of two words.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

/// The lowest aligned place for `item` between `taken` ranges, which are sorted by their start.
fn lowest_gap(taken: &[(u64, u64)], item: Item) -> Option<u64> {
    let mut floor = 0u64;
    for &(from, to) in taken {
        let at = floor.checked_next_multiple_of(item.alignment)?;
        if from >= at && from - at >= item.bytes {
            return Some(at);
        }
        floor = floor.max(to);
    }
    let at = floor.checked_next_multiple_of(item.alignment)?;
    at.checked_add(item.bytes).map(|_| at)
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    /// Places of the others, whose prices are their sizes plus one.
    fn neighbours(rows: &[(u64, u64)]) -> (Vec<Neighbour>, Vec<u64>) {
        let placed = |(i, &(from, bytes)): (usize, &(u64, u64))| Neighbour {
            from,
            to: from + bytes,
            start: 0,
            end: 1,
            item: i as u32,
        };
        (rows.iter().enumerate().map(placed).collect(), rows.iter().map(|row| row.1 + 1).collect())
    }

    fn items(rows: &[(u32, u32, u64, bool)]) -> Part {
        let item = |&(start, cliques, bytes, even): &(u32, u32, u64, bool)| Item {
            start,
            end: (start + cliques).min(12),
            bytes,
            alignment: if even { 2 } else { 1 },
        };
        let mut items: Vec<Item> = rows.iter().map(item).collect();
        items.sort_by_key(|item| (item.start, Reverse(item.end)));
        let mut part = Part { items, cliques: 12, ..Part::default() };
        part.bound = part.live().into_iter().max().unwrap_or(0);
        part
    }

    fn is_plan(part: &Part, placed: &Placed) -> bool {
        let (items, at) = (&part.items, &placed.offsets);
        let apart = |i: usize, j: usize| {
            !items[i].meets(items[j].start..items[j].end)
                || at[i] + items[i].bytes <= at[j]
                || at[j] + items[j].bytes <= at[i]
        };
        (0..items.len()).all(|i| at[i] % items[i].alignment == 0 && (0..i).all(|j| apart(i, j)))
            && placed.height == (0..items.len()).map(|i| at[i] + items[i].bytes).max().unwrap_or(0)
    }

    generated! {
        /// Against every place below the ceiling.
        #[test]
        fn the_cheapest_place_is_found(
            rows in prop::collection::vec((0..40u64, 1..9u64), 0..12),
            bytes in 1..12u64,
            ceiling in 8..50u64,
            random in any::<u64>(),
        ) {
            let (met, prices) = neighbours(&rows);
            let mut edges = Edges::default();
            edges.fill(&met, &prices);
            let price = |at: u64| -> u64 {
                rows.iter().zip(&prices).filter(|(row, _)| row.0 < at + bytes && at < row.0 + row.1).map(|p| p.1).sum()
            };
            let least = (0..=ceiling.saturating_sub(bytes)).filter(|at| at + bytes <= ceiling).map(price).min();
            let choice = edges.cheapest(bytes, 1, ceiling, random);
            prop_assert_eq!(choice.map(|choice| choice.price), least);
            if let Some(choice) = choice {
                prop_assert!(choice.at + bytes <= ceiling);
                prop_assert_eq!(price(choice.at), choice.price);
            }
            // Alignment may cost, but is kept, and the price named is the one paid.
            if let Some(choice) = edges.cheapest(bytes, 4, ceiling, random) {
                prop_assert!(choice.at % 4 == 0 && choice.at + bytes <= ceiling);
                prop_assert_eq!(price(choice.at), choice.price);
            }
        }

        /// From places for some of the items, down to the bound and back up: always a plan, never a higher one, and the
        /// same whoever runs the lanes.
        #[test]
        fn plans_remain_plans(
            rows in prop::collection::vec((0..12u32, 1..12u32, 1..9u64, any::<bool>()), 1..30),
            ceilings in prop::collection::vec(0..40u64, 1..6),
        ) {
            let part = items(&rows);
            let run = || {
                let mut meter = Meter { work: 400_000, ..Meter::default() };
                let mut ejection = Ejection::new(&part, &vec![None; part.items.len()], &mut meter).unwrap();
                let mut heights = vec![ejection.plan.clone()];
                for above in &ceilings {
                    let ceiling = part.bound + above;
                    let before = ejection.plan.height;
                    let reached = ejection.lower(ceiling, 40_000, &mut meter);
                    assert_eq!(reached, ejection.plan.height <= ceiling);
                    assert!(ejection.plan.height <= before);
                    heights.push(ejection.plan.clone());
                }
                heights
            };
            let plans = run();
            for plan in &plans {
                prop_assert!(is_plan(&part, plan), "{:?} {:?}", part.items, plan);
            }
            let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(run);
            prop_assert_eq!(plans, alone);
        }
    }

    /// Two long items that the sweep's greed put apart, so that a third one ends above the bound.
    #[test]
    fn what_stands_in_the_way_moves() {
        let part = items(&[(0, 6, 4, false), (2, 4, 4, false), (4, 8, 8, false)]);
        let places = [Some(0), Some(8), Some(12)];
        let mut meter = Meter { work: 100_000, ..Meter::default() };
        let mut ejection = Ejection::new(&part, &places, &mut meter).unwrap();
        assert_eq!((ejection.plan.height, part.bound), (20, 16));
        assert!(ejection.lower(part.bound, 50_000, &mut meter));
        assert!(is_plan(&part, &ejection.plan));
    }

    #[test]
    fn pins_stay() {
        let mut part = items(&[(0, 6, 4, false), (0, 6, 4, false), (0, 6, 4, false)]);
        part.pins = vec![(1, 4)];
        let mut meter = Meter { work: 100_000, ..Meter::default() };
        let mut ejection = Ejection::new(&part, &[Some(8), Some(4), Some(12)], &mut meter).unwrap();
        assert!(ejection.lower(12, 50_000, &mut meter));
        assert_eq!((ejection.plan.offsets[1], ejection.plan.height), (4, 12));
        // Nobody fits below the pin and above it.
        assert!(!ejection.lower(11, 50_000, &mut meter));
        assert_eq!(ejection.plan.height, 12);
    }
}
