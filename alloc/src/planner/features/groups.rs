//! Groups that are no rectangles, and pairs of buffers to keep apart.
//!
//! A group is no rectangle if its members live differently, leave bytes between them, need an offset that no alignment
//! describes, or may be stacked in orders that make a difference. Such a group is a *rigid unit*: rectangles at fixed
//! distances. A buffer of a pair to keep apart is a rigid unit too. The other searches place single rectangles and know
//! of lifetimes only. So three related problems are planned:
//!
//! 1. The problem without the groups and pairs, with each member by itself. A bound proven for this problem holds for
//!    the original too.
//! 2. The problem with each group as one rectangle, as if all members lived as long as the group, and with the
//!    lifetimes of pairs extended until they overlap. Every plan of this problem is a plan of the original, but wastes
//!    space.
//! 3. The problem with the rigid units pinned. It is planned only if the best plan so far is higher than the proven
//!    bound. The other buffers can then use the space around each member. The pins come first from the best plan so far
//!    and the plan of problem 2, then from placing the units one by one, and finally from all possible places, if there
//!    are few.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::{Item, gcd, in_cliques};
use crate::planner::improve::squeaky_wheel::squeaky_wheel;
use crate::planner::run::{Known, Plan, Run, without_bytes};
use crate::planner::space::by_clique::Occupied;
use crate::planner::{Options, Solution};
use crate::{Arrangement, Buffer, BufferId, Group, Problem};

/// True if the problem has rigid units.
pub(in crate::planner) fn has_rigid_units(problem: &Problem) -> bool {
    !problem.pairs_apart().is_empty() || problem.groups().iter().any(|group| !group.is_rectangle(problem.buffers()))
}

/// Plans a problem that has rigid units.
pub(in crate::planner) fn plan(run: Run) -> Solution {
    let rigid = Rigid::new(run.problem);
    let mut grouped = Grouped { run, rigid, best: None };
    let known = grouped.solve();
    let Grouped { run, best, .. } = grouped;
    run.conclude(known, best)
}

/// The groups and buffers that are rigid units or belong to one.
struct Rigid {
    /// By group.
    groups: Vec<bool>,
    /// By buffer.
    buffers: Vec<bool>,
}

impl Rigid {
    fn new(problem: &Problem) -> Self {
        let mut buffers = vec![false; problem.len()];
        problem.pairs_apart().iter().flat_map(|pair| [pair.0, pair.1]).for_each(|id| buffers[id.index()] = true);
        let mut groups = Vec::with_capacity(problem.groups().len());
        for group in problem.groups() {
            let is_rigid = !group.is_rectangle(problem.buffers()) || group.members.iter().any(|id| buffers[id.index()]);
            group.members.iter().for_each(|id| buffers[id.index()] |= is_rigid);
            groups.push(is_rigid);
        }
        Self { groups, buffers }
    }

    /// True if these offsets respect the rigid groups and the pairs to keep apart.
    fn holds(&self, problem: &Problem, offsets: &[u64]) -> bool {
        let end = |id: BufferId| offsets[id.index()].checked_add(problem.buffer(id).bytes);
        let is_whole = |group: &Group| match group.arrangement {
            Arrangement::AnyOrder => {
                let mut members = group.members.clone();
                sort_by_key(&mut members, |&id| (offsets[id.index()], problem.buffer(id).bytes));
                members.windows(2).all(|pair| end(pair[0]) == Some(offsets[pair[1].index()]))
            }
            _ => {
                let base = |k: usize| offsets[group.members[k].index()].checked_sub(group.distances[k]);
                (0..group.members.len()).all(|k| base(k).is_some() && base(k) == base(0))
            }
        };
        let is_apart = |&(a, b): &(BufferId, BufferId)| {
            let start = offsets[a.index()].max(offsets[b.index()]);
            end(a).zip(end(b)).is_some_and(|(a, b)| a.min(b) <= start)
        };
        let mut groups = problem.groups().iter().zip(&self.groups).filter(|(_, is_rigid)| **is_rigid);
        groups.all(|(group, _)| is_whole(group)) && problem.pairs_apart().iter().all(is_apart)
    }
}

/// Returns problem 2 of this module's list, or `None` if its bytes may exceed the address space, or if pins contradict
/// the extended lifetimes.
fn in_rectangles(problem: &Problem) -> Option<Problem> {
    let mut buffers = problem.buffers().to_vec();
    for &(a, b) in problem.pairs_apart() {
        let (a, b) = (a.index(), b.index());
        let (first, later) = if buffers[a].lifetime.start <= buffers[b].lifetime.start { (a, b) } else { (b, a) };
        let overlapping = buffers[later].lifetime.start + 1;
        buffers[first].lifetime.end = buffers[first].lifetime.end.max(overlapping);
    }
    let groups = problem.groups().iter().map(|g| u128::from(g.reach()) + u128::from(g.phase) + u128::from(g.alignment));
    let alone = problem.buffers().iter().map(|b| u128::from(b.bytes) + u128::from(b.alignment));
    let is_addressable = groups.chain(alone).sum::<u128>() <= u64::MAX.into();
    problem.with_groups(|_| true).with_buffers(buffers).ok().filter(|_| is_addressable)
}

struct Grouped<'p> {
    run: Run<'p>,
    rigid: Rigid,
    best: Option<Plan>,
}

/// Largest problem, in buffers, in which the rigid units and all other buffers are placed one by one in a common order.
const MAX_IN_ORDER: usize = 50_000;

/// Most combinations of the rigid units' places that are tried one by one.
const MAX_PLACES: u64 = 1_000;

/// Most rounds of placing units in one order. In each round, the units that ended too high in earlier rounds come
/// first.
const ROUNDS: u32 = 6;

impl Grouped<'_> {
    fn solve(&mut self) -> Known {
        let problem = self.run.problem;
        let loose = problem.with_groups(|group| group.is_rectangle(problem.buffers()));
        let (mut known, plan) = self.solve_one(&loose, 4);
        let aim = known.searched.max(self.run.options.capacity.unwrap_or(0));
        let kept = self.keep();
        if let Some(kept) = kept.clone().filter(|kept| kept.0 <= aim) {
            self.best = Some(kept);
            return known;
        }
        self.keep_if_lower(plan);
        if let Some(rectangles) = in_rectangles(problem).filter(|_| self.is_open(aim)) {
            let (_, whole) = self.solve_one(&rectangles, 4);
            self.keep_if_lower(whole.clone());
            if let Some((_, offsets)) = whole.filter(|_| self.is_open(aim)) {
                self.flow_around(&|id| offsets.get(id.index()).copied(), 8);
            }
        }
        let all = RigidUnits::new(problem, &self.rigid);
        for key in KEYS {
            let (rigid, others): (Vec<u32>, Vec<u32>) =
                (0..all.units.len() as u32).partition(|&u| all.units[u as usize].is_rigid);
            let mut lists = vec![rigid.clone()];
            if problem.len() <= MAX_IN_ORDER {
                lists.push([rigid, others].concat());
            }
            for units in lists {
                if self.is_open(aim) {
                    self.in_order(&all, key, &units, aim);
                }
            }
        }
        if self.is_open(aim) {
            self.everywhere(&all, &mut known);
        }
        if kept.as_ref().is_some_and(|kept| self.best.as_ref().is_none_or(|best| kept.0 <= best.0)) {
            self.best = kept;
        }
        known
    }

    /// Returns a plan in which the rigid units keep their earlier addresses, and the other buffers as far as that costs
    /// no height. Returns `None` if there are no such addresses or no such plan was found.
    fn keep(&mut self) -> Option<Plan> {
        let earlier = self.run.options.warm_start.as_ref()?;
        let pinned = self.pinned(&|id| earlier.get(id.index()).copied().flatten())?;
        let budget = self.run.budget.share(self.run.budget.left() / 8);
        let mut run = Run::within(&pinned, self.run.options, budget);
        let (_, plan) = run.solve();
        self.run.keeping += run.budget.spent.saturating_add(run.keeping);
        plan.filter(|plan| self.rigid.holds(self.run.problem, &plan.1))
    }

    /// Tries all orders and places of all rigid units below the best height, if there are few. Then raises the proven
    /// bound to the lowest bound that was proven for any of these places, or to the best height if that is lower.
    fn everywhere(&mut self, all: &RigidUnits, known: &mut Known) {
        let Some((height, mut offsets)) = self.best.clone() else { return };
        let grain = all.grain();
        let places = |unit: &Unit| -> Option<Vec<(usize, u64)>> {
            let mut places = Vec::new();
            for (k, order) in unit.orders.iter().enumerate() {
                let last = (height - 1).saturating_sub(order.bytes);
                let step = grain.next_multiple_of(order.alignment);
                let all = order.offset.map_or(order.phase..=last, |pin| pin..=pin);
                if all.end().saturating_sub(*all.start()) / step > MAX_PLACES {
                    return None;
                }
                places.extend(all.step_by(usize::try_from(step).ok()?).map(|at| (k, at)));
            }
            unit.has_all_orders.then_some(places)
        };
        let units: Vec<&Unit> = all.units.iter().filter(|unit| unit.is_rigid).collect();
        let Some(places) = units.iter().map(|unit| places(unit)).collect::<Option<Vec<_>>>() else { return };
        let count = places.iter().try_fold(1u64, |count, places| count.checked_mul(places.len() as u64));
        let Some(count) = count.filter(|&count| count <= MAX_PLACES) else { return };
        let mut proven = height;
        for number in 0..count {
            if !self.is_open(known.searched) {
                return;
            }
            let mut rest = number;
            for (unit, places) in units.iter().zip(&places) {
                let (order, at) = places[(rest % places.len() as u64) as usize];
                rest /= places.len() as u64;
                let order = &unit.orders[order];
                for (id, distance) in order.members.iter().zip(&order.distances) {
                    offsets[id.index()] = at + distance;
                }
            }
            let bound = self.flow_around(&|id| offsets.get(id.index()).copied(), count - number);
            proven = proven.min(bound);
        }
        known.searched = known.searched.max(proven.min(self.best.as_ref().map_or(height, |best| best.0)));
    }

    /// Places `units` in the order of `key`, then plans the other buffers around the rigid units at these offsets. Units
    /// that ended too high are placed first in the next round.
    fn in_order(&mut self, all: &RigidUnits, key: Key, units: &[u32], aim: u64) {
        let is_everything = units.len() == all.units.len();
        let mut rank: Vec<(bool, u32)> = units.iter().map(|&u| (true, u)).collect();
        squeaky_wheel(ROUNDS, Vec::new(), |first| {
            rank.iter_mut().for_each(|unit| unit.0 = !first.contains(&unit.1));
            sort_by_key(&mut rank, |&(is_late, u)| (is_late, key(all.units[u as usize].whole), u));
            let order: Vec<u32> = rank.iter().map(|unit| unit.1).collect();
            let placed = all.place(&order, aim, &mut self.run.budget)?;
            self.run.stats.placements += 1;
            if is_everything {
                self.keep_if_lower(Some((placed.height, placed.offsets.clone())));
            }
            if self.is_open(aim) {
                self.flow_around(&|id| placed.offsets.get(id.index()).copied(), 8);
            }
            let joining = placed.over.into_iter().filter(|u| !first.contains(u) && self.is_open(aim));
            Some((placed.height, joining.collect()))
        });
    }

    /// Returns the problem with the rigid units pinned at the offsets that `place` returns, or `None` if they can't be
    /// there.
    fn pinned(&self, place: &dyn Fn(BufferId) -> Option<u64>) -> Option<Problem> {
        let problem = self.run.problem;
        let (mut buffers, mut offsets) = (problem.buffers().to_vec(), vec![0; problem.len()]);
        for id in problem.ids().filter(|id| self.rigid.buffers[id.index()]) {
            let b = &mut buffers[id.index()];
            let at = place(id).filter(|&at| b.offset.is_none_or(|pin| pin == at))?;
            offsets[id.index()] = at;
            b.offset = Some(at);
        }
        let mut is_rigid = self.rigid.groups.iter();
        let others = problem.with_groups(|_| is_rigid.next() == Some(&false));
        others.with_buffers(buffers).ok().filter(|_| self.rigid.holds(problem, &offsets))
    }

    /// Plans the problem with the rigid units pinned at the offsets that `place` returns. It may spend 1/`shares` of the
    /// budget left. Returns a lower bound on the height of such plans, or `u64::MAX` if the units can't be at these
    /// offsets.
    fn flow_around(&mut self, place: &dyn Fn(BufferId) -> Option<u64>, shares: u64) -> u64 {
        let Some(pinned) = self.pinned(place) else { return u64::MAX };
        let (known, plan) = self.solve_one(&pinned, shares);
        self.keep_if_lower(plan);
        known.searched
    }

    /// Plans a related problem with 1/`shares` of the budget left, without regard to earlier addresses.
    fn solve_one(&mut self, problem: &Problem, shares: u64) -> (Known, Option<Plan>) {
        let options = Options { warm_start: None, ..self.run.options.clone() };
        let mut run = Run::within(problem, &options, self.run.budget.share(self.run.budget.left() / shares));
        let result = run.solve();
        self.run.budget.spend(run.budget.spent);
        self.run.stats.placements += run.stats.placements;
        self.run.stats.parts = self.run.stats.parts.max(run.stats.parts);
        result
    }

    /// Keeps a plan if it is lower than the best so far and respects the groups and pairs.
    fn keep_if_lower(&mut self, plan: Option<Plan>) {
        let plan = plan.filter(|plan| self.rigid.holds(self.run.problem, &plan.1));
        self.best = [self.best.take(), plan].into_iter().flatten().min_by_key(|plan| plan.0);
    }

    /// True if there is no plan yet, or if the best plan is higher than `aim` and the budget is not spent.
    fn is_open(&self, aim: u64) -> bool {
        let found = self.best.as_ref();
        found.is_none_or(|best| best.0 > aim) && (found.is_none() || self.run.budget.stopped().is_none())
    }
}

/// A sort key. The item with the smallest key comes first.
type Key = fn(Item) -> (u128, u32);

const KEYS: [Key; 4] = [
    |item| (u128::MAX - u128::from(item.bytes), item.start),
    |item| (u128::MAX - u128::from(item.bytes) * u128::from(item.cliques()), item.start),
    |item| (u128::MAX - u128::from(item.cliques()), item.start),
    |item| (item.start.into(), u32::MAX - item.end),
];

/// A problem as units: groups, and the buffers that belong to none.
struct RigidUnits<'p> {
    problem: &'p Problem,
    /// The item of each buffer.
    items: Vec<Item>,
    cliques: u32,
    units: Vec<Unit>,
    /// The buffers from which a buffer is to be kept apart.
    apart: HashMap<BufferId, Vec<BufferId>>,
}

/// Rectangles at fixed distances: a group, or a single buffer.
struct Unit {
    /// The smallest rectangle around the unit.
    whole: Item,
    is_rigid: bool,
    pin: Option<u64>,
    /// The ways to arrange its members.
    orders: Vec<Group>,
    /// Whether there is no other way.
    has_all_orders: bool,
}

struct Placed {
    /// The highest end of a placed unit.
    height: u64,
    /// Offset of each buffer; 0 if it was not placed.
    offsets: Vec<u64>,
    /// Units that end above the aim.
    over: Vec<u32>,
}

impl<'p> RigidUnits<'p> {
    fn new(problem: &'p Problem, rigid: &Rigid) -> Self {
        let lifetimes: Vec<(u64, u64)> = problem.buffers().iter().map(|b| (b.lifetime.start, b.lifetime.end)).collect();
        let item = |b: &Buffer| Item { start: 0, end: 0, bytes: b.bytes, alignment: b.alignment };
        let mut items: Vec<Item> = problem.buffers().iter().map(item).collect();
        let cliques = in_cliques(&lifetimes, &mut items);
        let mut grouped = vec![false; problem.len()];
        problem.groups().iter().flat_map(|g| &g.members).for_each(|id| grouped[id.index()] = true);
        let alone = problem.ids().filter(|id| !grouped[id.index()] && problem.buffer(*id).bytes > 0);
        let alone = alone.filter_map(|id| {
            let group = Group::stack(problem.buffers(), vec![id]).ok()?;
            Some((rigid.buffers[id.index()], true, vec![group]))
        });
        let groups = problem.groups().iter().zip(&rigid.groups).map(|(g, &is_rigid)| {
            let has_all_orders = g.arrangement != Arrangement::AnyOrder || g.members.len() <= FEW;
            (is_rigid, has_all_orders, orders(problem, g))
        });
        let units = groups.chain(alone).map(|(is_rigid, has_all_orders, orders)| {
            let first = &orders[0];
            let spans = first.members.iter().map(|id| items[id.index()]);
            let (start, end) = spans.fold((u32::MAX, 0), |(s, e), item| (s.min(item.start), e.max(item.end)));
            let whole = Item { start, end, bytes: first.bytes, alignment: first.alignment };
            Unit { whole, is_rigid, pin: first.offset, orders, has_all_orders }
        });
        let units = units.collect();
        let mut apart: HashMap<BufferId, Vec<BufferId>> = HashMap::new();
        for &(a, b) in problem.pairs_apart() {
            apart.entry(a).or_default().push(b);
            apart.entry(b).or_default().push(a);
        }
        Self { problem, items, cliques, units, apart }
    }

    /// Returns a common divisor of all offsets at which a buffer or group can come to rest.
    fn grain(&self) -> u64 {
        let buffers = self.problem.buffers().iter();
        let numbers =
            buffers.flat_map(|b| [b.bytes, if b.alignment == 1 { 0 } else { b.alignment }, b.offset.unwrap_or(0)]);
        let ranges = self.problem.forbidden().iter().flat_map(|range| [range.start, range.end]);
        let distances = self.problem.groups().iter().flat_map(|group| group.distances.iter().copied());
        numbers.chain(ranges).chain(distances).fold(0, gcd).max(1)
    }

    /// Places each of `units` in turn at the lowest offset that the pins and the earlier units leave. Returns `None` if
    /// a unit finds no place in the address space, or if another unit has taken the place of a pinned unit.
    fn place(&self, units: &[u32], aim: u64, budget: &mut Budget) -> Option<Placed> {
        let mut occupied = Occupied::new(self.cliques);
        let always = Item { start: 0, end: self.cliques, bytes: 0, alignment: 1 };
        for range in self.problem.forbidden() {
            occupied.insert(Item { bytes: range.end - range.start, ..always }, range.start, budget);
        }
        let mut placed = Placed { height: 0, offsets: without_bytes(self.problem), over: Vec::new() };
        let mut is_placed = vec![false; self.problem.len()];
        // Units that have only one place come first, whether or not they are among `units`: no other unit may take it.
        let places = |u: &u32| match &self.units[*u as usize] {
            unit if unit.pin.is_none() => 2,
            unit => i32::from(unit.orders.len() > 1),
        };
        let fixed = (0..self.units.len() as u32).filter(|u| places(u) == 0);
        let mut order: Vec<u32> = fixed.chain(units.iter().copied().filter(|u| places(u) > 0)).collect();
        sort_by_key(&mut order, |u| places(u));
        for u in order {
            let unit = &self.units[u as usize];
            let mut best: Option<(u64, &Group)> = None;
            for order in &unit.orders {
                let apart_from = |id: &BufferId| {
                    let others = self.apart.get(id).into_iter().flatten().filter(|other| is_placed[other.index()]);
                    others.map(|other| {
                        let at = placed.offsets[other.index()];
                        (at, at + self.problem.buffer(*other).bytes)
                    })
                };
                let apart = order.members.iter().map(|id| apart_from(id).collect()).collect::<Vec<_>>();
                let at = self.lowest(order, &apart, &mut occupied, budget);
                if let Some(at) = at.filter(|&at| best.is_none_or(|(lowest, _)| at < lowest)) {
                    best = Some((at, order));
                }
            }
            let (at, order) = best?;
            for (&id, distance) in order.members.iter().zip(&order.distances) {
                placed.offsets[id.index()] = at + distance;
                is_placed[id.index()] = true;
                let item = self.items[id.index()];
                if item.bytes > 0 {
                    occupied.insert(item, at + distance, budget);
                }
            }
            placed.height = placed.height.max(at + order.bytes);
            if at + order.bytes > aim {
                placed.over.push(u);
            }
        }
        Some(placed)
    }

    /// Returns the lowest offset of a unit, or `None` if the address space has no room for it. Each member needs free
    /// bytes during its own lifetime only. `apart` has the ranges that each member must not touch at any time.
    fn lowest(
        &self,
        unit: &Group,
        apart: &[Vec<(u64, u64)>],
        occupied: &mut Occupied,
        budget: &mut Budget,
    ) -> Option<u64> {
        // Offsets of the unit at which a member would touch a byte that is taken.
        let mut blocked: Vec<(u64, u64)> = Vec::new();
        for ((id, &distance), apart) in unit.members.iter().zip(&unit.distances).zip(apart) {
            let item = self.items[id.index()];
            let taken = if item.bytes > 0 { occupied.taken(item, budget) } else { &[] };
            for &(from, to) in taken.iter().chain(apart.iter().filter(|_| item.bytes > 0)) {
                let meets = ((from + 1).saturating_sub(distance + item.bytes), to.saturating_sub(distance));
                if meets.0 < meets.1 {
                    blocked.push(meets);
                }
            }
        }
        budget.spend(blocked.len() as u64 + unit.members.len() as u64);
        blocked.sort_unstable();
        if let Some(pin) = unit.offset {
            return (!blocked.iter().any(|&(from, to)| from <= pin && pin < to)).then_some(pin);
        }
        let mut at = unit.phase;
        for (from, to) in blocked {
            if from > at {
                break;
            }
            at = at.max(unit.aligned_from(to)?);
        }
        at.checked_add(unit.reach()).map(|_| at)
    }
}

/// Returns the ways to arrange a group. A group whose distances are fixed has only one way. If the planner chooses the
/// order, a group of few members gets all orders that alignments and pins allow. A larger group gets the orders in which
/// the members are sorted by length, birth, death or size, ascending or descending.
fn orders(problem: &Problem, group: &Group) -> Vec<Group> {
    let mut orders = vec![group.clone()];
    if group.arrangement != Arrangement::AnyOrder {
        return orders;
    }
    let stack = |members: Vec<BufferId>| Group::stack(problem.buffers(), members).ok();
    if group.members.len() <= FEW {
        orders.extend(permutations(&group.members).into_iter().filter_map(stack));
        return orders;
    }
    let keys: [fn(&Buffer) -> u64; 4] =
        [|b| b.lifetime.end - b.lifetime.start, |b| b.lifetime.start, |b| b.lifetime.end, |b| b.bytes];
    for key in keys {
        let mut members = group.members.clone();
        sort_by_key(&mut members, |&id| (Reverse(key(problem.buffer(id))), id));
        orders.extend(stack(members.clone()));
        members.reverse();
        orders.extend(stack(members));
    }
    orders
}

/// Most members of which every order is tried.
const FEW: usize = 4;

fn permutations(members: &[BufferId]) -> Vec<Vec<BufferId>> {
    if members.is_empty() {
        return vec![Vec::new()];
    }
    let led_by = |k: usize| {
        let rest = permutations(&[&members[..k], &members[k + 1..]].concat());
        rest.into_iter().map(move |rest| [&members[k..=k], &rest].concat())
    };
    (0..members.len()).flat_map(led_by).collect()
}
