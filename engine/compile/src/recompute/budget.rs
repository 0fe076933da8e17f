//! The search for the fastest step whose arena fits a byte budget.
//!
//! - In: the layers of a rank with their [`Choice`]s, the number of micro-batches in flight per stage, and a callback
//!   that lowers and plans a [`RematPlan`].
//! - Out: the fastest plan found that fits.
//! - Never: an estimate. Every returned plan has really been planned within the budget.
//!
//! The search picks one choice per layer (a multiple-choice knapsack). While layer l runs its backward, the layers
//! before l hold the values that they keep, and every other micro-batch in flight holds all values that it keeps. So
//! the search minimizes the recomputation time under the constraint
//!
//! ```text
//! (held by other micro-batches) + Σ kept of layers before l + peak of l  ≤  limit,   for every l.
//! ```
//!
//! Dynamic programming from the first layer to the last finds the choices. After each layer, it keeps only the states
//! that are Pareto-optimal in bytes and time.
//!
//! A micro-batch in flight holds kept values from forward to backward. If the backward is split, the micro-batch holds
//! kept values from forward to I, and other values from I to W. Two moments are considered: when the number of
//! micro-batches between forward and backward is highest, and when the number between I and W is highest.
//!
//! The initial limit is the budget minus the bytes that this model of the layers does not cover, such as parameters and
//! scratch. The limit is then corrected by the sizes of the real plans.
//!
//! All micro-batches use these choices, except for the first one to run its backward. During that backward, not all
//! accumulated gradients exist yet, so there is space to keep more values. Its separate limit is raised as far as the
//! real plans allow.

use std::collections::HashMap;

use gapless_graph::Place;
use gapless_parallel::{Action, Kind};

use super::block::Block;
use super::layer::Choice;
use super::{RematPlan, SavedActivations, Variant};
use crate::error::{Error, Result};

/// Approximate number of states that are kept per layer if there are more than [`MANY`].
const STATES: usize = 4096;

/// Number of states per layer up to which all of them are kept.
const MANY: usize = 1 << 16;

/// Number of guesses of the bytes that other micro-batches hold.
const GUESSES: u64 = 32;

/// Maximum number of plans that are made for one budget.
const PLANS: usize = 24;

/// Maximum number of plans that are made for the separate choices of the first micro-batch.
const PLANS_OF_FIRST: usize = 8;

/// A budget, and the layers of one rank that must fit into it.
pub struct Budget<'a> {
    /// Maximum size of the arena in bytes.
    pub bytes: u64,
    pub saved: &'a SavedActivations<'a>,
    /// The layers of this rank, in graph order.
    pub blocks: &'a [Block],
    /// Number of micro-batches in flight at once, by stage.
    pub in_flight: HashMap<Place, InFlight>,
    /// The first micro-batch to run its backward. `None` if there is only one micro-batch.
    pub first_backward: Option<u32>,
}

impl Budget<'_> {
    /// Returns the fastest plan found that fits the budget.
    ///
    /// `plan_size` lowers and plans a recomputation, and returns the size of the arena. If the capacity is exceeded,
    /// `plan_size` may stop early and return a lower bound of the arena's size, as long as this bound exceeds the
    /// capacity. Without a capacity, `plan_size` returns the size of the lowest plan.
    ///
    /// # Errors
    /// Returns [`Error::OverBudget`] with the smallest arena found if no plan fits. Returns the errors of `plan_size`.
    pub fn fit(&self, mut plan_size: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>) -> Result<RematPlan> {
        let plain: Vec<usize> = vec![0; self.blocks.len()];
        let height = plan_size(&self.recomputation(&plain), Some(self.bytes))?;
        if height <= self.bytes {
            return Ok(self.recomputation(&plain));
        }
        match self.search(&plain, height, &mut plan_size)? {
            Some((choices, limit)) => self.refine_first(choices, limit, &mut plan_size),
            None => {
                let least = self.recomputation(&self.least());
                match plan_size(&least, None)? {
                    smallest if smallest <= self.bytes => Ok(least),
                    smallest => Err(Error::OverBudget { budget: self.bytes, smallest }),
                }
            }
        }
    }

    /// Returns choices that are the same for all micro-batches, and the limit with which these choices were found.
    /// Returns `None` if no choices fit.
    fn search(
        &self,
        plain: &[usize],
        height: u64,
        mut plan_size: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>,
    ) -> Result<Option<(Vec<usize>, u64)>> {
        // Bytes that the model of the layers does not cover: parameters, scratch, the update.
        let unseen = i128::from(height) - i128::from(self.peak(plain));
        let (mut low, mut high) = (0i128, i128::from(height) - unseen);
        let mut limit = i128::from(self.bytes) - unseen;
        let mut best: Option<(Vec<usize>, u64)> = None;
        let mut known: HashMap<Vec<usize>, u64> = HashMap::new();
        for _ in 0..PLANS {
            let found = u64::try_from(limit).ok().and_then(|limit| Some((self.solve(limit)?, limit)));
            let Some((choices, at)) = found else {
                low = low.max(limit);
                if high - low <= 1 {
                    break;
                }
                limit = (low + high) / 2;
                continue;
            };
            let before = known.get(&choices).copied();
            let height = match before {
                Some(height) => height,
                None => plan_size(&self.recomputation(&choices), Some(self.bytes))?,
            };
            known.insert(choices.clone(), height);
            let slack = i128::from(self.bytes) - i128::from(height);
            if slack >= 0 {
                low = low.max(limit);
                if best.as_ref().is_none_or(|(found, _)| self.nanoseconds(&choices) < self.nanoseconds(found)) {
                    best = Some((choices, at));
                }
            } else {
                high = high.min(limit);
            }
            // The next limit is the one at which the model predicts an exact fit. If that limit is outside of the known
            // range, or if these choices were planned before, the next limit is the middle of the range.
            let next = limit + slack;
            limit = if before.is_none() && next > low && next < high { next } else { (low + high) / 2 };
            if high - low <= i128::from(self.bytes / 4096) {
                break;
            }
        }
        Ok(best)
    }

    /// Finds separate choices for the first micro-batch to run its backward, starting from the limit of the other
    /// micro-batches. `rest` holds the choices of these others. Returns the plan with both.
    fn refine_first(
        &self,
        rest: Vec<usize>,
        limit: u64,
        mut plan_size: impl FnMut(&RematPlan, Option<u64>) -> Result<u64>,
    ) -> Result<RematPlan> {
        let (mut best, all) = (self.recomputation(&rest), self.peak(&vec![0; self.blocks.len()]));
        let (Some(first), mut low, mut high) = (self.first_backward, limit, all) else { return Ok(best) };
        let mut taken = rest.clone();
        // The first attempt keeps everything.
        let mut limit = all;
        for _ in 0..PLANS_OF_FIRST {
            let Some(choices) = self.solve(limit) else { break };
            let fits = choices == taken || {
                let more = self.recomputation(&rest).except(first, self.variant(&choices));
                let fits = plan_size(&more, Some(self.bytes))? <= self.bytes;
                if fits {
                    (best, taken) = (more, choices);
                }
                fits
            };
            *(if fits { &mut low } else { &mut high }) = limit;
            if high.saturating_sub(low) <= all / 1024 {
                break;
            }
            limit = low + (high - low) / 2;
        }
        Ok(best)
    }

    /// Returns the choices that hold the fewest bytes according to the model.
    fn least(&self) -> Vec<usize> {
        let plain: Vec<usize> = vec![0; self.blocks.len()];
        let most = self.peak(&plain);
        let (mut low, mut high) = (0, most);
        while high - low > 1 + most / 4096 {
            let limit = low + (high - low) / 2;
            *(if self.solve(limit).is_some() { &mut high } else { &mut low }) = limit;
        }
        self.solve(high).unwrap_or(plain)
    }

    fn choice(&self, block: usize, choice: usize) -> &Choice {
        &self.blocks[block].choices[choice]
    }

    fn nanoseconds(&self, choices: &[usize]) -> u64 {
        let times = choices.iter().enumerate().map(|(block, &choice)| self.choice(block, choice).nanoseconds);
        times.fold(0, u64::saturating_add)
    }

    /// Returns the bytes of a block that all micro-batches except the current one hold, at each of the two moments.
    fn held_by_others(&self, block: usize, choice: &Choice) -> [u64; 2] {
        let moments = self.in_flight.get(&self.blocks[block].place).copied().unwrap_or_default();
        moments.map(|[kept, waits]| kept.saturating_sub(1) * choice.kept + waits * choice.kept_until_weights)
    }

    /// Returns the peak of the bytes that the layers hold, according to the model.
    fn peak(&self, choices: &[usize]) -> u64 {
        let chosen = || choices.iter().enumerate().map(|(block, &choice)| (block, self.choice(block, choice)));
        let others = chosen().map(|(block, choice)| self.held_by_others(block, choice)).fold([0, 0], added);
        let mut before = 0;
        let at_layer = chosen().map(|(_, choice)| {
            let peak = before + choice.peak;
            before += choice.kept;
            peak
        });
        others.into_iter().max().unwrap_or(0) + at_layer.max().unwrap_or(0)
    }

    /// Returns the fastest choices found that meet a limit, or `None` if no choices do.
    fn solve(&self, limit: u64) -> Option<Vec<usize>> {
        let alone = self.in_flight.values().flatten().all(|&[kept, waits]| kept <= 1 && waits == 0);
        let guesses = if alone { 0..1 } else { 0..GUESSES };
        let mut best: Option<(Vec<usize>, u64)> = None;
        for guess in guesses {
            let others = (u128::from(limit) * u128::from(guess) / u128::from(GUESSES)) as u64;
            let below = best.as_ref().map(|best| best.1);
            if let Some(choices) = self.solve_with_reserve(limit - others, others, below) {
                let nanoseconds = self.nanoseconds(&choices);
                best = Some((choices, nanoseconds));
            }
        }
        best.map(|best| best.0)
    }

    /// Returns the fastest choices if the other micro-batches may hold `others` bytes, and the current micro-batch may
    /// hold `limit` bytes. Returns `None` if there are no such choices, or none that take less time than `below`.
    fn solve_with_reserve(&self, limit: u64, others: u64, below: Option<u64>) -> Option<Vec<usize>> {
        let mut layers: Vec<Vec<State>> = vec![vec![State::default()]];
        for (index, block) in self.blocks.iter().enumerate() {
            let others_of: Vec<[u64; 2]> =
                block.choices.iter().map(|choice| self.held_by_others(index, choice)).collect();
            let mut next = States::new(&layers[index], block, &others_of);
            for (from, state) in layers[index].iter().enumerate() {
                for (choice, figures) in block.choices.iter().enumerate() {
                    let state = State {
                        kept: state.kept + figures.kept,
                        others: added(state.others, others_of[choice]),
                        nanoseconds: state.nanoseconds.saturating_add(figures.nanoseconds),
                        from: from as u32,
                        choice: choice as u32,
                    };
                    let takes_less = below.is_none_or(|below| state.nanoseconds < below);
                    if takes_less
                        && layers[index][from].kept + figures.peak <= limit
                        && state.others.iter().all(|&held| held <= others)
                    {
                        next.push(state);
                    }
                }
            }
            layers.push(next.undominated());
        }
        // States are sorted by ascending bytes, and so by descending time. The last state is the fastest.
        let mut at = layers.last()?.len().checked_sub(1)?;
        let mut choices = Vec::with_capacity(self.blocks.len());
        for states in layers[1..].iter().rev() {
            choices.push(states[at].choice as usize);
            at = states[at].from as usize;
        }
        choices.reverse();
        Some(choices)
    }

    fn variant(&self, choices: &[usize]) -> Variant {
        let chosen = choices.iter().zip(self.blocks);
        let dropping =
            self.saved.dropping(chosen.clone().flat_map(|(&choice, block)| block.dropped(&block.choices[choice])));
        self.saved.ending_with_input(dropping, chosen.flat_map(|(&choice, block)| block.again(&block.choices[choice])))
    }

    fn recomputation(&self, choices: &[usize]) -> RematPlan {
        RematPlan::uniform(self.variant(choices))
    }
}

/// A summary of the choices made for the first layers.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    kept: u64,
    /// Bytes that other micro-batches hold, at each of the two moments.
    others: [u64; 2],
    nanoseconds: u64,
    /// Index of the state before this layer, which this state extends.
    from: u32,
    /// Index of the choice made for this layer.
    choice: u32,
}

impl State {
    /// Returns the bytes by which states are compared: those of the current micro-batch plus those of the others. For
    /// stages with the same number of micro-batches in flight, both sums have their maxima at the same time, and the
    /// result is exact. For other stages, a good state may be missed.
    fn bytes(&self) -> u64 {
        self.kept + self.others[0].max(self.others[1])
    }
}

/// The states after a layer. If there are too many states, only the fastest state of each size class and the smallest
/// state are kept.
struct States {
    all: Vec<State>,
    /// The fastest state of each size class; empty if all states are kept.
    fastest: Vec<Option<State>>,
    smallest: Option<State>,
    least: u64,
    bucket_bytes: u64,
}

impl States {
    /// Creates the collection for states that combine one of the states `before` a layer with one choice of the layer.
    fn new(before: &[State], block: &Block, others: &[[u64; 2]]) -> Self {
        let of_choices = |combine: fn(u64, u64) -> u64| {
            block.choices.iter().zip(others).map(move |(choice, others)| choice.kept + combine(others[0], others[1]))
        };
        let of_states = || before.iter().map(State::bytes);
        let least = of_states().min().unwrap_or(0) + of_choices(u64::min).min().unwrap_or(0);
        let most = of_states().max().unwrap_or(0) + of_choices(u64::max).max().unwrap_or(0);
        let many = before.len() * block.choices.len() > MANY;
        let fastest = vec![None; if many { STATES } else { 0 }];
        Self { all: Vec::new(), fastest, smallest: None, least, bucket_bytes: (most - least) / STATES as u64 + 1 }
    }

    fn push(&mut self, state: State) {
        if self.fastest.is_empty() {
            return self.all.push(state);
        }
        let fastest = &mut self.fastest[((state.bytes() - self.least) / self.bucket_bytes) as usize];
        let order = |state: &State| (state.nanoseconds, state.bytes());
        if fastest.is_none_or(|known| order(&state) < order(&known)) {
            *fastest = Some(state);
        }
        if self.smallest.is_none_or(|known| state.bytes() < known.bytes()) {
            self.smallest = Some(state);
        }
    }

    /// Returns the states that are Pareto-optimal in bytes and time, by ascending bytes.
    fn undominated(mut self) -> Vec<State> {
        self.all.extend(self.fastest.into_iter().chain([self.smallest]).flatten());
        self.all.sort_unstable_by_key(|s| (s.bytes(), s.nanoseconds, s.from, s.choice));
        let mut best: Vec<State> = Vec::new();
        for state in self.all {
            if best.last().is_none_or(|last| state.nanoseconds < last.nanoseconds) {
                best.push(state);
            }
        }
        best
    }
}

/// Two numbers of micro-batches of a stage: those between forward and backward (or I), and those between I and W. Both
/// numbers are given at two moments: when the first number is highest, and when the second number is highest.
pub type InFlight = [[u64; 2]; 2];

fn added(one: [u64; 2], other: [u64; 2]) -> [u64; 2] {
    [one[0] + other[0], one[1] + other[1]]
}

/// Returns, for each stage, the numbers of micro-batches that a rank's actions hold at the two moments.
pub fn in_flight(row: &[Action]) -> HashMap<Place, InFlight> {
    let mut now: HashMap<Place, [u64; 2]> = HashMap::new();
    let mut most: HashMap<Place, InFlight> = HashMap::new();
    for action in row {
        let place = Place::Stage(action.stage);
        let [kept, waits] = now.entry(place).or_default();
        match action.kind {
            Kind::Forward => *kept += 1,
            Kind::Backward => *kept = kept.saturating_sub(1),
            Kind::BackwardInput => (*kept, *waits) = (kept.saturating_sub(1), *waits + 1),
            Kind::BackwardWeight => *waits = waits.saturating_sub(1),
        }
        let [most_kept, most_waits] = most.entry(place).or_default();
        *most_kept = [*kept, *waits].max(*most_kept);
        if (*waits, *kept) > (most_waits[1], most_waits[0]) {
            *most_waits = [*kept, *waits];
        }
    }
    most
}

/// Returns the micro-batch whose backward comes first among a rank's actions. Returns `None` if there is only one
/// micro-batch.
pub fn first_backward(row: &[Action]) -> Option<u32> {
    let mut backward = row.iter().filter(|action| action.kind != Kind::Forward).map(|action| action.micro_batch.0);
    let first = backward.next()?;
    backward.any(|other| other != first).then_some(first)
}
