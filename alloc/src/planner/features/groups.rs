//! Groups whose members live differently, called ragged.
//!
//! The members of such a group form a staircase: rectangles at fixed distances. The other searches place single
//! rectangles only. So three related problems are planned:
//!
//! 1. The problem without the groups, with each member by itself. A bound proven for this problem holds for the
//!    original too.
//! 2. The problem with each group as one rectangle, as if all members lived as long as the group. Every plan of this
//!    problem is a plan of the original, but wastes the space around shorter-lived members.
//! 3. The problem with the members of the groups pinned. It is planned only if the best plan so far is higher than the
//!    proven bound. The other buffers can then use the space around each member. The pins come first from the best plan
//!    so far and the plan of problem 2, then from placing the staircases one by one, and finally from all possible
//!    places, if there are few.

use std::cmp::Reverse;

use crate::order::sort_by_key;
use crate::planner::budget::Budget;
use crate::planner::decompose::parts::{Item, gcd, in_cliques};
use crate::planner::improve::squeaky_wheel::squeaky_wheel;
use crate::planner::run::{Known, Plan, Run, without_bytes};
use crate::planner::space::by_clique::Occupied;
use crate::planner::{Options, Solution};
use crate::{Buffer, BufferId, Group, Problem};

/// True if the members of some group have different lifetimes.
pub(in crate::planner) fn has_ragged_groups(problem: &Problem) -> bool {
    problem.groups().iter().any(|group| group.is_ragged(problem.buffers()))
}

/// Plans a problem that has ragged groups.
pub(in crate::planner) fn plan(run: Run) -> Solution {
    let mut grouped = Grouped { run, best: None };
    let known = grouped.solve();
    let Grouped { run, best } = grouped;
    run.conclude(known, best)
}

struct Grouped<'p> {
    run: Run<'p>,
    best: Option<Plan>,
}

/// Largest problem, in buffers, in which the staircases and all other buffers are placed one by one in a common order.
const MAX_IN_ORDER: usize = 50_000;

/// Most combinations of the ragged groups' places that are tried one by one.
const MAX_PLACES: u64 = 1_000;

/// Most rounds of placing units in one order. In each round, the units that ended too high in earlier rounds come
/// first.
const ROUNDS: u32 = 6;

impl Grouped<'_> {
    fn solve(&mut self) -> Known {
        let problem = self.run.problem;
        let is_ragged = |group: &Group| group.is_ragged(problem.buffers());
        let apart = problem.with_groups(|group| !is_ragged(group));
        let (mut known, _) = self.solve_one(&apart, 4, &Options { warm_start: None, ..self.run.options.clone() });
        let aim = known.searched.max(self.run.options.capacity.unwrap_or(0));
        if let Some(earlier) = self.run.options.warm_start.clone() {
            self.flow_around(&|id| earlier.get(id.index()).copied().flatten(), 8);
        }
        if self.is_open(aim) {
            let (_, whole) = self.solve_one(problem, 4, &self.run.options.clone());
            self.keep_if_lower(whole.clone());
            if let Some((_, offsets)) = whole.filter(|_| self.is_open(aim)) {
                self.flow_around(&|id| offsets.get(id.index()).copied(), 8);
            }
        }
        let stairs = RigidUnits::new(problem);
        for key in KEYS {
            let (groups, everything): (Vec<u32>, Vec<u32>) =
                (0..stairs.units.len() as u32).partition(|&u| stairs.units[u as usize].is_ragged);
            let mut lists = vec![groups.clone()];
            if problem.len() <= MAX_IN_ORDER {
                lists.push([groups, everything].concat());
            }
            for units in lists {
                if self.is_open(aim) {
                    self.in_order(&stairs, key, &units, aim);
                }
            }
        }
        if self.is_open(aim) {
            self.everywhere(&stairs, &mut known);
        }
        known
    }

    /// Tries all places of all ragged groups below the best height, if there are few such places. Then raises the
    /// proven bound to the lowest bound that was proven for any of these places, or to the best height if that is
    /// lower.
    fn everywhere(&mut self, stairs: &RigidUnits, known: &mut Known) {
        let Some((height, mut offsets)) = self.best.clone() else { return };
        let grain = stairs.grain();
        let places = |unit: &Unit| -> Option<Vec<(usize, u64)>> {
            let mut places = Vec::new();
            for (k, order) in unit.orders.iter().enumerate() {
                let last = (height - 1).saturating_sub(order.bytes);
                let step = grain.next_multiple_of(order.alignment);
                let all = order.offset.map_or(0..=last, |pin| pin..=pin);
                if (all.end() - all.start()) / step > MAX_PLACES {
                    return None;
                }
                places.extend(all.step_by(usize::try_from(step).ok()?).map(|at| (k, at)));
            }
            Some(places)
        };
        let units: Vec<&Unit> = stairs.units.iter().filter(|unit| unit.is_ragged).collect();
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
                let mut next = at;
                for id in &unit.orders[order].members {
                    offsets[id.index()] = next;
                    next += self.run.problem.buffer(*id).bytes;
                }
            }
            let bound = self.flow_around(&|id| offsets.get(id.index()).copied(), count - number);
            proven = proven.min(bound);
        }
        known.searched = known.searched.max(proven.min(self.best.as_ref().map_or(height, |best| best.0)));
    }

    /// Places `units` in the order of `key`, then plans the other buffers around the groups at these offsets. Units
    /// that ended too high are placed first in the next round.
    fn in_order(&mut self, stairs: &RigidUnits, key: Key, units: &[u32], aim: u64) {
        let is_everything = units.len() == stairs.units.len();
        let mut rank: Vec<(bool, u32)> = units.iter().map(|&u| (true, u)).collect();
        squeaky_wheel(ROUNDS, Vec::new(), |first| {
            rank.iter_mut().for_each(|unit| unit.0 = !first.contains(&unit.1));
            sort_by_key(&mut rank, |&(is_late, u)| (is_late, key(stairs.units[u as usize].whole), u));
            let order: Vec<u32> = rank.iter().map(|unit| unit.1).collect();
            let placed = stairs.place(&order, aim, &mut self.run.budget)?;
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

    /// Plans the problem with the members of ragged groups pinned at the offsets that `place` returns. It may spend
    /// 1/`shares` of the budget left. Returns a lower bound on the height of such plans, or `u64::MAX` if the members
    /// can't be at these offsets.
    fn flow_around(&mut self, place: &dyn Fn(BufferId) -> Option<u64>, shares: u64) -> u64 {
        let problem = self.run.problem;
        let mut buffers = problem.buffers().to_vec();
        for group in problem.groups().iter().filter(|group| group.is_ragged(problem.buffers())) {
            let mut members = group.members.clone();
            if group.any_order {
                sort_by_key(&mut members, |&id| (place(id), problem.buffer(id).bytes));
            }
            let mut next = None;
            for id in members {
                let b = &mut buffers[id.index()];
                let Some(at) = place(id).filter(|at| next.is_none_or(|next| next == *at)) else { return u64::MAX };
                if b.offset.is_some_and(|pin| pin != at) || at % b.alignment != 0 {
                    return u64::MAX;
                }
                next = at.checked_add(b.bytes);
                b.offset = Some(at);
            }
        }
        let others = problem.with_groups(|group| !group.is_ragged(problem.buffers()));
        let Some(pinned) = others.with_buffers(buffers) else { return u64::MAX };
        let (known, plan) = self.solve_one(&pinned, shares, &self.run.options.clone());
        self.keep_if_lower(plan);
        known.searched
    }

    /// Plans a related problem with 1/`shares` of the budget left.
    fn solve_one(&mut self, problem: &Problem, shares: u64, options: &Options) -> (Known, Option<Plan>) {
        let mut run = Run::within(problem, options, self.run.budget.share(self.run.budget.left() / shares));
        let result = run.solve();
        self.run.budget.spend(run.budget.spent);
        self.run.stats.placements += run.stats.placements;
        self.run.stats.parts = self.run.stats.parts.max(run.stats.parts);
        result
    }

    fn keep_if_lower(&mut self, plan: Option<Plan>) {
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

/// A problem as rigid units: groups, and the buffers that belong to none.
struct RigidUnits<'p> {
    problem: &'p Problem,
    /// The item of each buffer.
    items: Vec<Item>,
    cliques: u32,
    units: Vec<Unit>,
}

/// Rectangles at fixed distances: a group, or a single buffer.
struct Unit {
    /// The smallest rectangle around the unit.
    whole: Item,
    is_ragged: bool,
    pin: Option<u64>,
    /// The ways to stack its members.
    orders: Vec<Group>,
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
    fn new(problem: &'p Problem) -> Self {
        let lifetimes: Vec<(u64, u64)> = problem.buffers().iter().map(|b| (b.lifetime.start, b.lifetime.end)).collect();
        let item = |b: &Buffer| Item { start: 0, end: 0, bytes: b.bytes, alignment: b.alignment };
        let mut items: Vec<Item> = problem.buffers().iter().map(item).collect();
        let cliques = in_cliques(&lifetimes, &mut items);
        let mut grouped = vec![false; problem.len()];
        problem.groups().iter().flat_map(|g| &g.members).for_each(|id| grouped[id.index()] = true);
        let alone = problem.ids().filter(|id| !grouped[id.index()] && problem.buffer(*id).bytes > 0);
        let alone = alone.filter_map(|id| Some((false, vec![Group::stack(problem.buffers(), vec![id]).ok()?])));
        let groups = problem.groups().iter().map(|g| (g.is_ragged(problem.buffers()), orders(problem, g)));
        let units = groups.chain(alone).map(|(is_ragged, orders)| {
            let first = &orders[0];
            let spans = first.members.iter().map(|id| items[id.index()]);
            let (start, end) = spans.fold((u32::MAX, 0), |(s, e), item| (s.min(item.start), e.max(item.end)));
            let whole = Item { start, end, bytes: first.bytes, alignment: first.alignment };
            Unit { whole, is_ragged, pin: first.offset, orders }
        });
        let units = units.collect();
        Self { problem, items, cliques, units }
    }

    /// Returns a common divisor of all offsets at which a buffer or group can come to rest.
    fn grain(&self) -> u64 {
        let buffers = self.problem.buffers().iter().filter(|b| b.bytes > 0);
        let sizes = buffers.flat_map(|b| [b.bytes, b.alignment, b.offset.unwrap_or(0)]);
        let ranges = self.problem.forbidden().iter().flat_map(|range| [range.start, range.end]);
        sizes.chain(ranges).fold(0, gcd).max(1)
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
        let is_pinned = |u: &&u32| self.units[**u as usize].pin.is_some();
        for &u in units.iter().filter(is_pinned).chain(units.iter().filter(|u| !is_pinned(u))) {
            let unit = &self.units[u as usize];
            let mut best: Option<(u64, &Group)> = None;
            for order in &unit.orders {
                let at = self.lowest(order, &mut occupied, budget);
                if let Some(at) = at.filter(|&at| best.is_none_or(|(lowest, _)| at < lowest)) {
                    best = Some((at, order));
                }
            }
            let (at, order) = best?;
            let mut next = at;
            for &id in &order.members {
                placed.offsets[id.index()] = next;
                let item = self.items[id.index()];
                if item.bytes > 0 {
                    occupied.insert(item, next, budget);
                }
                next += item.bytes;
            }
            placed.height = placed.height.max(next);
            if next > aim {
                placed.over.push(u);
            }
        }
        Some(placed)
    }

    /// Returns the lowest offset of a stack, or `None` if the address space has no room for the stack. Each member
    /// needs free bytes during its own lifetime only.
    fn lowest(&self, stack: &Group, occupied: &mut Occupied, budget: &mut Budget) -> Option<u64> {
        // Offsets of the stack at which a member would overlap something already placed.
        let mut blocked: Vec<(u64, u64)> = Vec::new();
        let mut below = 0;
        for id in &stack.members {
            let item = self.items[id.index()];
            for &(from, to) in if item.bytes > 0 { occupied.taken(item, budget) } else { &[] } {
                let meets = ((from + 1).saturating_sub(below + item.bytes), to.saturating_sub(below));
                if meets.0 < meets.1 {
                    blocked.push(meets);
                }
            }
            below += item.bytes;
        }
        budget.spend(blocked.len() as u64 + stack.members.len() as u64);
        blocked.sort_unstable();
        if let Some(pin) = stack.offset {
            return (!blocked.iter().any(|&(from, to)| from <= pin && pin < to)).then_some(pin);
        }
        let mut at = 0u64;
        for (from, to) in blocked {
            if from > at {
                break;
            }
            at = at.max(to.checked_next_multiple_of(stack.alignment)?);
        }
        at.checked_add(stack.bytes).map(|_| at)
    }
}

/// Returns the ways to stack a group. A group in fixed order has only one way. If the planner chooses the order, a
/// group of few members gets all orders that alignments and pins allow. A larger group gets the orders in which the
/// members are sorted by length, birth, death or size, ascending or descending.
fn orders(problem: &Problem, group: &Group) -> Vec<Group> {
    let mut orders = vec![group.clone()];
    if !group.any_order {
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
