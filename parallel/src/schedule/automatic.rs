//! A schedule that searches for an order, given costs and a limit on live activations, instead of following a rule.
//!
//! In: costs, the limit, a placement. Out: the fastest of many orders, which come from the rules that keep to the limit
//! and from greedy growth. A greedy order is grown on all ranks at the same time: the rank that is free first takes one
//! of the actions whose inputs have arrived, chosen by a policy.
//!
//! The growth follows the heuristic of Qi et al. (arXiv 2401.10241, section 3). A rank runs forwards up to the limit,
//! then forwards and input gradients in turn. Weight gradients go where a rank would wait anyway, or where they have to
//! free memory. A grid of policies is tried.

use std::collections::BTreeMap;

use super::{InterleavedZeroBubble, Placement, Schedule, Shape, VHalf, VMin, ZbH1, ZbH2, Zbv};
use crate::{Action, Cell, Costs, Durations, Error, Kind, simulate};

/// The schedule that returns the fastest order found for these costs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Automatic {
    /// Costs per stage for which the order is searched. A single entry holds for all stages.
    pub costs: Vec<Costs>,
    /// The maximum number of activations alive on any rank, in chunks of one micro-batch. The default is V · P, the
    /// peak of 1F1B.
    pub peak: Option<u32>,
    /// The assignment of stages to ranks.
    pub placement: Placement,
}

/// One tick per action, the peak of 1F1B, and two chunks per rank in the shape of a V.
impl Default for Automatic {
    fn default() -> Self {
        Self { costs: vec![Costs::default()], peak: None, placement: Placement::V }
    }
}

/// The largest [`Shape::extent`] for which the schedule searches. One search grows and simulates some two hundred
/// orders.
const MAX_EXTENT: u32 = 1 << 14;

impl Schedule for Automatic {
    fn name(&self) -> &'static str {
        "automatic"
    }

    fn placement(&self) -> Placement {
        self.placement
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check(self.name())?;
        shape.check_extent(self.name(), MAX_EXTENT)?;
        let default = shape.chunks * shape.ranks;
        let limit = self.peak.unwrap_or(default);
        if limit < shape.chunks {
            return Err(Error::Peak { schedule: self.name(), needed: shape.chunks, peak: limit });
        }
        // A rank that takes any action that has arrived can be misled by a message that is only a little late. So
        // orders are also grown for zero transfer times, and for equal costs.
        let rules = self.rules().into_iter().filter_map(|rule| rule.actions(shape).ok());
        let at_once = self.costs.iter().map(|costs| Costs { transfer: 0, ..*costs }).collect();
        let costs = [self.costs.clone(), at_once, vec![Costs::default()]];
        let grown = costs.iter().flat_map(|costs| {
            Policy::all().filter_map(move |policy| GreedyOrders::run(self, costs, shape, limit, policy))
        });
        let timed = rules.chain(grown).filter_map(|rows| {
            let cells: Vec<Vec<Cell>> = rows.iter().map(|row| row.iter().copied().map(Cell::One).collect()).collect();
            let timeline = simulate(&cells, &self.costs[..]).ok()?;
            let peak = (0..rows.len()).map(|rank| timeline.peak(rank)).max()?;
            (peak <= i64::from(limit)).then_some(((timeline.makespan(), peak), rows))
        });
        let best = timed.min_by_key(|(key, _)| *key).expect("without a cap on the warm-up every order gets to the end");
        Ok(best.1)
    }
}

impl Automatic {
    /// Returns the rule-based schedules of the same placement that split backwards.
    fn rules(&self) -> Vec<Box<dyn Schedule>> {
        match self.placement {
            Placement::V => vec![Box::new(Zbv), Box::new(VHalf), Box::new(VMin)],
            Placement::Loop => vec![Box::new(ZbH1), Box::new(ZbH2), Box::new(InterleavedZeroBubble)],
        }
    }
}

/// The rules by which a free rank chooses its next action.
#[derive(Debug, Clone, Copy)]
struct Policy {
    first: First,
    /// The order of actions of one kind. If true, stages nearer to the loss come first. If false, earlier micro-batches
    /// come first.
    deeper_first: bool,
    /// A weight gradient is taken if no other action of the rank is known to start within `patience` thirds of the
    /// weight gradient's duration from now.
    patience: u64,
    /// The rule that caps the number of forwards of a rank before its first backward.
    warm_up: WarmUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Input,
    Forward,
    InTurn,
}

#[derive(Debug, Clone, Copy)]
enum WarmUp {
    Limit,
    RoundTrip,
    Distance,
}

impl Policy {
    fn all() -> impl Iterator<Item = Self> {
        let firsts = [First::Input, First::Forward, First::InTurn].into_iter();
        let orders = firsts.flat_map(|first| [false, true].map(|deeper_first| (first, deeper_first)));
        let waits =
            orders.flat_map(|(first, deeper_first)| [0, 1, 2, 3].map(|patience| (first, deeper_first, patience)));
        waits.flat_map(|(first, deeper_first, patience)| {
            [WarmUp::Limit, WarmUp::RoundTrip, WarmUp::Distance].map(|warm_up| Self {
                first,
                deeper_first,
                patience,
                warm_up,
            })
        })
    }

    fn warm_up(self, shape: &Shape, rank: u32) -> u32 {
        let distance = shape.ranks - 1 - rank;
        match self.warm_up {
            WarmUp::Limit => u32::MAX,
            WarmUp::RoundTrip => (shape.chunks - 1) * shape.ranks + 2 * distance + 1,
            WarmUp::Distance => (shape.chunks - 1) * shape.ranks + distance + 1,
        }
    }
}

/// An order that is being grown on all ranks.
struct GreedyOrders<'a> {
    automatic: &'a Automatic,
    /// Costs for which the order is grown.
    costs: &'a [Costs],
    shape: &'a Shape,
    limit: u32,
    policy: Policy,
    ranks: Vec<Rank>,
    /// The next action of each rank, and the tick at which it starts. `None` if the next action is not known yet.
    next: Vec<Option<(u64, Action)>>,
}

#[derive(Default)]
struct Rank {
    row: Vec<Action>,
    free: u64,
    live: u32,
    forwards: u32,
    backwards: u32,
    /// Actions whose inputs arrive at known ticks, each with the tick from which on the action can run.
    able: BTreeMap<Action, u64>,
}

impl<'a> GreedyOrders<'a> {
    /// Grows a complete order. Returns `None` if a cap on the warm-up stops the growth half-way.
    fn run(
        automatic: &'a Automatic,
        costs: &'a [Costs],
        shape: &'a Shape,
        limit: u32,
        policy: Policy,
    ) -> Option<Vec<Vec<Action>>> {
        let ranks: Vec<Rank> = (0..shape.ranks).map(|_| Rank::default()).collect();
        let next = vec![None; ranks.len()];
        let mut growth = Self { automatic, costs, shape, limit, policy, ranks, next };
        growth.arrive(Action::new(Kind::Forward, 0, 0), 0);
        // The rank that can start first goes next. So no rank chooses before the events that its choice depends on.
        while let Some((start, rank, action)) =
            (0..).zip(&growth.next).filter_map(|(rank, next)| next.map(|(start, action)| (start, rank, action))).min()
        {
            growth.take(rank, action, start);
        }
        let done: usize = growth.ranks.iter().map(|rank| rank.row.len()).sum();
        let all = (shape.ranks * shape.chunks * shape.micro_batches) as usize * 3;
        (done == all).then(|| growth.ranks.into_iter().map(|rank| rank.row).collect())
    }

    fn choose(&self, index: usize) -> Option<(u64, Action)> {
        let rank = &self.ranks[index];
        let waiting = rank.able.iter().filter(|(action, _)| action.kind != Kind::BackwardWeight);
        let allowed = waiting.filter(|(action, _)| action.kind != Kind::Forward || self.has_room(index, **action));
        let soonest = allowed.clone().map(|(_, &arrival)| arrival.max(rank.free)).min();
        let weight = rank.able.keys().find(|action| action.kind == Kind::BackwardWeight);
        if let Some(&weight) = weight {
            let cost = self.costs.action(weight);
            if soonest.is_none_or(|start| start > rank.free && 3 * (start - rank.free) >= self.policy.patience * cost) {
                return Some((rank.free, weight));
            }
        }
        let start = soonest?;
        let there = allowed.filter(|&(_, &arrival)| arrival <= start);
        let (&action, _) = there.min_by_key(|&(&action, _)| self.preference(rank, action))?;
        Some((start, action))
    }

    /// Returns the sort key of an action. The action with the smallest key comes first.
    fn preference(&self, rank: &Rank, action: Action) -> (bool, u32, u32) {
        let is_forward = action.kind == Kind::Forward;
        let wants_forward = match self.policy.first {
            First::Input => false,
            First::Forward => true,
            First::InTurn => rank.row.last().is_some_and(|last| last.kind != Kind::Forward),
        };
        let (stage, micro_batch) = (action.stage.0, action.micro_batch.0);
        // The loss is after the last stage: forwards run towards it, backwards away from it.
        let to_go = if is_forward { self.shape.ranks * self.shape.chunks - 1 - stage } else { stage };
        let order = if self.policy.deeper_first { (to_go, micro_batch) } else { (micro_batch, to_go) };
        (is_forward != wants_forward, order.0, order.1)
    }

    /// True if a forward stays within the limits. A forward that starts a micro-batch must leave room for the later
    /// chunks of that micro-batch, one at a time, so that all micro-batches in progress can be finished.
    fn has_room(&self, index: usize, action: Action) -> bool {
        let rank = &self.ranks[index];
        let chunk = (action.stage.0 / self.shape.ranks).min(self.shape.chunks - 1);
        let later = self.shape.chunks - 1 - chunk;
        let warms_up = rank.backwards == 0 && (later > 0 || self.shape.chunks == 1);
        let warm_up = self.policy.warm_up(self.shape, index as u32);
        rank.live + 1 + later <= self.limit && !(warms_up && rank.forwards >= warm_up)
    }

    fn take(&mut self, index: usize, action: Action, start: u64) {
        let Action { kind, stage, micro_batch } = action;
        let end = start + self.costs.action(action);
        let rank = &mut self.ranks[index];
        rank.able.remove(&action);
        rank.free = end;
        rank.row.push(action);
        match kind {
            Kind::Forward => (rank.live, rank.forwards) = (rank.live + 1, rank.forwards + 1),
            Kind::BackwardInput => rank.backwards += 1,
            Kind::BackwardWeight | Kind::Backward => rank.live -= 1,
        }
        let last = self.shape.ranks * self.shape.chunks - 1;
        if kind == Kind::Forward && stage.0 == 0 && micro_batch.0 + 1 < self.shape.micro_batches {
            self.arrive(Action::new(Kind::Forward, 0, micro_batch.0 + 1), 0);
        }
        match kind {
            Kind::Forward if stage.0 == last => {
                self.arrive(Action::new(Kind::BackwardInput, stage.0, micro_batch.0), end)
            }
            Kind::Forward => self.hand_over(index, Action::new(Kind::Forward, stage.0 + 1, micro_batch.0), end, action),
            Kind::BackwardInput => {
                self.arrive(Action { kind: Kind::BackwardWeight, ..action }, end);
                if let Some(above) = stage.0.checked_sub(1) {
                    self.hand_over(index, Action::new(Kind::BackwardInput, above, micro_batch.0), end, action);
                }
            }
            Kind::BackwardWeight | Kind::Backward => {}
        }
        self.next[index] = self.choose(index);
    }

    fn hand_over(&mut self, from: usize, action: Action, end: u64, made_by: Action) {
        let transfer = if self.owner(action) == from { 0 } else { self.costs.transfer(made_by) };
        self.arrive(action, end + transfer);
    }

    fn arrive(&mut self, action: Action, at: u64) {
        let owner = self.owner(action);
        self.ranks[owner].able.insert(action, at);
        self.next[owner] = self.choose(owner);
    }

    fn owner(&self, action: Action) -> usize {
        self.automatic.placement.owner(self.shape.ranks, action.stage.0) as usize
    }
}
